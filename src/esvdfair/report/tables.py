"""Rows of the page's tables, as plain text."""

from esvdfair.explain import Direction, Directions, LayerScan, People
from esvdfair.report.content import Content
from esvdfair.report.words import label_text, layer_name, number, percent, share


def direction_rows(found: Directions) -> list[list[str]]:
    """One row for each direction, those of the mean first."""
    return [
        [
            f"{'means' if d.kind == 'mean' else 'spreads'} {d.rank}",
            percent(d.share),
            number(d.sigma_before),
            number(d.sigma_after),
            _follows(d),
        ]
        for d in (*found.mean, *found.covariance)
    ]


def layer_rows(scan: LayerScan) -> list[list[str]]:
    return [
        [
            ("→ " if f.index == scan.best.index else "") + layer_name(f),
            f"{f.inputs} → {f.outputs}",
            number(f.relative_mean_gap),
            number(f.relative_covariance_gap),
            share(f.ks),
            number(f.mse),
        ]
        for f in scan.layers
    ]


def feature_rows(content: Content) -> list[list[str]]:
    return [[f.name, *map(_signed, (f.group, f.before, f.after))] for f in content.features]


def people_rows(people: People) -> list[list[str]]:
    return [
        [
            label_text(g.group),
            f"{g.rows:,}",
            number(g.mean_before),
            number(g.mean_after),
            percent(g.share_up),
            percent(g.share_down),
            percent(g.share_moved),
            share(g.rank_correlation),
        ]
        for g in people.groups
    ]


def mover_rows(people: People) -> list[list[str]]:
    return [
        [
            str(m.row),
            label_text(m.group),
            number(m.before),
            number(m.after),
            f"{100 * m.rank_before:.0f}",
            f"{100 * m.rank_after:.0f}",
        ]
        for m in people.movers
    ]


def _follows(direction: Direction) -> str:
    return ", ".join(f"{name} {_signed(correlation)}" for name, correlation in direction.features) or "–"


def _signed(correlation: float) -> str:
    """A correlation with its sign, which nothing has that rounds to zero."""
    return f"{correlation:+z.2f}".replace("+0.00", "0.00")
