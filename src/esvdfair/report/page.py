"""The page: tables and chart numbers for the templates, which hold its words and structure.

Jinja escapes all text: names come from the user's file.
"""

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np

from esvdfair.audit import Array
from esvdfair.curve import Curve, CurvePoint
from esvdfair.cutoffs import Decisions, decision_table, ratios_by_share
from esvdfair.explain import Direction, Directions, LayerGap, LayerScan, People, explain_people
from esvdfair.explain.directions import correlate
from esvdfair.files import version_of
from esvdfair.plots import density, make_grid
from esvdfair.report.content import Content, Step, named_groups
from esvdfair.text import (
    EVALUATED_ON,
    interval,
    label_text,
    number,
    per_cent,
    percent,
    share,
    signed,
    some_names,
    too_small,
    verdict,
)

PAIRS_SHOWN = 10
GROUPS_DRAWN = 8
"""As many as there are colours; the tables list all groups."""
FEW_ROWS = 200
"""What is said of a group with fewer rows is called uncertain."""


@dataclass(frozen=True)
class Table:
    """Cells of text; ``left`` columns are aligned left, ``moving`` ones follow the slider."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = ()
    moving: Sequence[int] = ()


def make_environment() -> jinja2.Environment:
    """Templates in which all values are escaped, with the forms of numbers and the tables as functions."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("esvdfair.report"), autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    forms = (interval, label_text, number, per_cent, percent, plain, share, some_names, too_small)
    tables = (change_table, decisions_table, direction_table, distribution_table, feature_table, group_table,
              layer_name, layer_table, mover_table, pair_table, peak_words, point_table, quantile_table,
              tree_table)  # fmt: skip
    environment.filters |= {form.__name__: form for form in forms}
    environment.globals |= {make.__name__: make for make in tables}
    return environment


def plain(text: str) -> str:
    """A name from a user's file that neither ends a line nor becomes Markdown or HTML."""
    line = " ".join(text.split())
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in line)


def render(
    content: Content, *, about: Mapping[str, str], command: Sequence[str] | str | None, title: str | None
) -> str:
    """The whole page; ``about`` says which model and data it is about, and what is predicted."""
    script, style = (files("esvdfair.report").joinpath(name).read_text("utf-8") for name in ("charts.js", "page.css"))
    line = "esvdfair.report.write_report(path, fair, X, y, sensitive_features=…)"
    if command is not None:
        line = command if isinstance(command, str) else shlex.join(["esvdfair", *command])
    by = "" if content.attribute == "group" else f" by {content.attribute}"
    data = chart_data(content, None if isinstance(command, str) else command)
    predictions, sizes = (content.before.prediction, content.after.prediction), content.summary["group_sizes"]
    return make_environment().get_template("page.html").render(
        title=title or f"Repair report: parity{by}", about=about, command=line, content=content,
        summary=content.summary, verdict=verdict(content.summary), rows_are=EVALUATED_ON[content.rows_are],
        first_summary=content.fair.summary_, chosen_on=EVALUATED_ON[content.fair.summary_["evaluated_on"]],
        script=script, style=style, hashes=(_hash_of(script), _hash_of(style)),
        data=data, here=data["steps"][content.chosen], drawn=GROUPS_DRAWN, decision=content.decision,
        people=explain_people(*predictions, **named_groups(content.rows), top=10),
        few=[label_text(group) for group, rows in sizes.items() if rows < FEW_ROWS],
        made_by=f"esvdfair {version_of('esvdfair') or ''}".strip(),
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def _hash_of(source: str) -> str:
    """How a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")


# --- tables --------------------------------------------------------------------------------------------------------


def group_table(content: Content) -> Table:
    """Mean prediction and error of every group, before and at the slider's position."""
    pairs = zip(_group_cells(content, content.before), _group_cells(content, content.after), strict=True)
    rows = [
        [label_text(label), f"{size:,}", *(cell for both in zip(old, new, strict=True) for cell in both)]
        for label, size, (old, new) in zip(content.rows.labels, content.sizes, pairs, strict=True)
    ]
    names = ["mean", "over-prediction", "mean squared error"] if content.has_labels else ["mean", "squared change"]
    header = [content.attribute, "rows", *(f"{name} {when}" for name in names for when in ("before", "after"))]
    caption = (
        f"Mean prediction{', over-prediction (negative: under-prediction)' * content.has_labels} and error by group"
    )
    return Table(caption, header, rows, moving=range(3, len(header), 2))


def _group_cells(content: Content, step: Step) -> list[list[str]]:
    """Of every group the mean prediction, the mean error where there are labels, and the error."""
    spread, columns = content.spread, [step.means, *[step.bias] * content.has_labels]
    plain = [[number(value, beside=spread) for value in of_group] for of_group in zip(*columns, strict=True)]
    return [[*cells, number(mse, beside=spread**2)] for cells, mse in zip(plain, step.group_mse, strict=True)]


def quantile_table(content: Content, step: Step, model: str) -> Table:
    levels, lines = (0.1, 0.5, 0.9), []
    for g, name in enumerate(content.names):
        values, weight = _of_group(content, step.prediction, g)
        weight = np.ones(len(values)) if weight is None else weight
        found = np.quantile(values, levels, weights=weight, method="inverted_cdf")
        lines.append([name, f"{len(values):,}", number(float(step.means[g])), *map(number, found)])
    return Table(f"Quantiles, {model}", [content.attribute, "rows", "mean", *map(percent, levels)], lines)


def distribution_table(content: Content, step: Step, model: str) -> Table:
    grid = make_grid([content.before.prediction, content.after.prediction], 11)
    below = zip(grid, _distribution(content, step, grid).T, strict=True)
    rows = [[number(threshold), *map(percent, parts)] for threshold, parts in below]
    return Table(f"Share of each group at or below a prediction, {model}", ["prediction", *content.names], rows)


def peak_words(content: Content, step: Step) -> str:
    """Where two groups differ most."""
    peak, names = step.peak, content.names
    return (
        f"{percent(peak.high_share)} of {names[peak.high_group]} but {percent(peak.low_share)} of "
        f"{names[peak.low_group]} score at or below {number(peak.threshold)}, where the groups differ most."
    )


def pair_table(content: Content) -> Table | None:
    """Every pair of groups by itself, where there are several."""
    pairs = content.summary["pairs"]
    if len(pairs) < 2:
        return None
    lines = [
        [" and ".join(map(label_text, p["groups"])), share(p["ks_before"]), share(p["ks_after"]),
         share(p["ks_population"]), share(p["ks_floor"]), "yes" if p["established"] else "no"]
        for p in sorted(pairs, key=lambda pair: -pair["ks_population"])[:PAIRS_SHOWN]
    ]  # fmt: skip
    header = ["pair", "KS before", "KS after", "estimated population KS", "noise level", "beyond chance"]
    return Table("Pairs of groups, the largest first (after: chosen model)", header, lines, left=(5,))


def decisions_table(content: Content, found: Decisions) -> Table:
    caption = f"{per_cent(found.share_before)} of all people selected. {found.cutoff_words()}"
    return Table(caption, *decision_table(found, content.attribute))


def change_table(content: Content, people: People) -> Table:
    rows = []
    for g in people.groups:
        change = ("+" if g.mean_change > 0 else "") + number(g.mean_change)
        shares = map(percent, (g.share_up, g.share_down, g.share_moved))
        rows.append([label_text(g.group), change, *shares, share(g.rank_correlation)])
    header = [content.attribute, "mean change", "up", "down", f"by more than {number(people.threshold)}"]
    return Table("Share of each group whose prediction changes", [*header, "rank correlation"], rows)


def mover_table(content: Content, people: People) -> Table:
    x = content.rows.x
    places = x.index if hasattr(x, "iloc") else content.rows.row_id  # what the user calls a row
    rows = [
        [str(places[m.row]), label_text(m.group), number(m.before), number(m.after), f"{100 * m.rank_before:.0f}",
         f"{100 * m.rank_after:.0f}"]
        for m in people.movers
    ]  # fmt: skip
    header = ["row", content.attribute, "before", "after", "percentile before", "percentile after"]
    return Table("The largest changes; rows are numbered as in their file", header, rows, left=(1,))


def feature_table(content: Content) -> Table:
    """The input columns that go with both group and prediction, the strongest link first."""
    rows, groups = content.rows, len(content.names)
    members = (rows.codes[:, None] == np.arange(groups)).astype(np.float64)
    values = np.column_stack([content.before.prediction, content.after.prediction, members])
    weight = np.ones(len(values)) if rows.weight is None else rows.weight
    found = []
    names, correlations = correlate(values, weight, rows.x)
    for name, (old, new, *of_groups) in zip(names, correlations.T, strict=True):
        found.append((name, max(of_groups, key=abs) if groups > 2 else of_groups[1], old, new))
    found.sort(key=lambda feature: -abs(feature[1] * feature[2]))
    header = ["input", f"with {content.attribute}", "with prediction, before", "with prediction, after"]
    whom = f"being {content.names[1]}" if groups == 2 else "being in the group it follows most"
    caption = f"Correlation of each input with {whom} and with the prediction"
    return Table(caption, header, [[name, *map(signed, values)] for name, *values in found[:10]])


def point_table(content: Content) -> Table:
    rows = []
    for i, step in enumerate(content.steps):
        estimate, aim = (None, "") if step.point is None else (step.point.ks_population, step.point.target)
        error = number(step.mse, beside=content.spread**2)
        name = f"{i or 'original'}{' (chosen)' if i == content.chosen else ''}"
        better = content.dominated_by[i]
        beaten = "" if better is None else str(better or "original")
        rows.append([name, share(step.peak.distance), share(estimate), error, share(content.r2(step)), beaten, aim])
    header = ["point", "KS", "estimated KS when chosen", content.error_name, "R²", "dominated by", "refitted towards"]
    return Table("Points of the curve, by falling KS on the rows of this page", header, rows, left=(5, 6))


def layer_table(content: Content) -> Table | None:
    scan = content.scan
    if not isinstance(scan, LayerScan):
        return None
    rows = []
    for f in scan.layers:
        name = ("→ " if f.index == scan.best.index else "") + layer_name(f)
        gaps = map(number, (f.relative_mean_gap, f.relative_covariance_gap))
        rows.append([name, f"{f.inputs} → {f.outputs}", *gaps, share(f.ks), number(f.mse)])
    header = ["layer", "size", "difference in means", "in covariances", "KS if edited", "MSE if edited"]
    return Table("Differences are relative to the spread of the layer’s output", header, rows)


def direction_table(content: Content) -> Table | None:
    found = content.directions
    if not isinstance(found, Directions):
        return None
    rows = []
    for d in (*found.mean, *found.covariance):
        name = f"{'means' if d.kind == 'mean' else 'spreads'} {d.rank}"
        sigmas = number(d.sigma_before), number(d.sigma_after, beside=d.sigma_before)
        rows.append([name, percent(d.share), number(d.difference), *sigmas, follows(d)])
    of_two = " minus ".join(content.names) if len(found.groups) == 2 else "of two groups"
    whole = "part of the bound" if any(d.share_of == "bound" for d in found.covariance) else "part of the difference"
    after = "after" if content.hidden_edits else "if edited"
    header = ["direction", whole, "difference", "σ before", f"σ {after}", "follows (correlation)"]
    caption = f"The main directions, the difference of mean or variance ({of_two}), and the inputs they go with"
    return Table(caption, header, rows, left=(5,))


def tree_table(content: Content) -> Table | None:
    found = content.trees
    if found is None:
        return None
    trees = sorted(enumerate(found.trees), key=lambda item: -abs(item[1]))[:5]
    parts = [*found.columns[:15], *((f"tree {place}", part) for place, part in trees)]
    rows = [[name, number(part), percent(part / (found.mean_gap or 1.0))] for name, part in parts]
    caption = f"{' minus '.join(map(label_text, found.groups))}: {number(found.mean_gap)}, before the model’s link"
    return Table(caption, ["column or tree", "difference in means", "share"], rows)


def layer_name(found: LayerGap | Directions) -> str:
    """What the model calls a layer; a model that is a layer has no name for it."""
    name = found.layer if isinstance(found, Directions) else found.name
    return name or f"number {found.index}"


def follows(direction: Direction) -> str:
    """The inputs that a direction goes with, if it is one."""
    if not direction.stable:
        known = "" if direction.stability is None else f" (|cos| {direction.stability:.2f})"
        return f"not the same in two halves of the rows{known}"
    return ", ".join(f"{name} {signed(correlation)}" for name, correlation in direction.features) or "–"


# --- the numbers that the page's script draws ------------------------------------------------------------------------


def chart_data(content: Content, command: Sequence[str] | None) -> dict[str, Any]:
    """Everything in #data of the page."""
    drawn = sorted(np.argsort(-np.array(content.sizes), kind="stable")[:GROUPS_DRAWN].tolist())  # the largest groups
    names, old, new = content.names, content.before, content.after
    grid = make_grid([old.prediction, new.prediction])
    change = new.prediction - old.prediction
    at_change = make_grid([change[content.rows.codes == g] for g in drawn])
    steps = [_step_data(content, i, command) | {
        "densities": _densities(content, step.prediction, drawn, grid), "means": digits(step.means[drawn]),
    } for i, step in enumerate(content.steps)]  # fmt: skip
    shown = {point.index for point in content.points}
    known = content.points and content.rows_judged and not content.adjusted  # figures of the same rows, not adjusted
    judged = content.fair.curve_.points if known else ()
    ratios = (ratios_by_share(p, **named_groups(content.rows)) for p in (old.prediction, new.prediction))
    return {
        "groups": [names[g] for g in drawn],
        "means": steps[0]["means"],
        "grid": _span(grid),
        "steps": steps,
        "chosen": content.chosen,
        "peak": max(max(map(max, steps[i]["densities"])) for i in (0, content.chosen)),
        "predicted": content.predicted if len(content.predicted) <= 40 else "prediction",
        "others": [digits((p.ks, p.mse)) for p in judged if p.index not in shown],  # that the slider leaves out
        "floor": content.summary["ks_floor"],
        "target": content.summary["target_ks"],
        "refit": content.mse_refit,
        "errorName": content.error_name,
        "cdf": {"before": _cdf(content, old, drawn), "after": _cdf(content, new, drawn)},
        "changes": {
            "grid": _span(at_change),
            "densities": _densities(content, change, drawn, at_change),
            "means": digits((new.means - old.means)[drawn]),
        },
        "ratios": [[digits(point) for point in points] for points in ratios],
        **_inner_data(content),
    }


def _step_data(content: Content, i: int, command: Sequence[str] | None) -> dict[str, Any]:
    """A position of the slider: its figures, and how to make its model."""
    step, chosen = content.steps[i], i == content.chosen
    python = "model = fair.model_" if not i else "model = fair.estimator_"
    if step.point is not None and not chosen:
        python = f"model = fair.curve_.model({step.point.index})"
    line = None if command is None or not i else ["esvdfair", *command] if chosen else None
    if command is not None and step.point is not None and not chosen:
        target = target_of(content.fair.curve_, step.point)
        line = None if target is None else ["esvdfair", *with_target(command, target)]
    return {
        "ks": float(f"{step.peak.distance:.4g}"),
        "mse": float(f"{step.mse:.5g}"),
        "sentence": content.step_sentence(i),
        "dominated": content.dominated_by[i] is not None,
        "python": python,
        "command": None if line is None else shlex.join(line),
        "cells": [cell for row in _group_cells(content, step) for cell in row],
    }


def target_of(curve: Curve, point: CurvePoint) -> float | None:
    """The shortest target for which :meth:`Curve.select` returns a point; None where no target does."""
    for places in (3, 4, 6):
        target = float(np.ceil(point.ks_population * 10**places) / 10**places)
        if 0 < target <= 1 and curve.select(target_ks=target) == point:
            return target
    return None


def with_target(command: Sequence[str], target: float) -> list[str]:
    """The words of a command with another target."""
    kept, skip = [], False
    for word in command:
        if skip or word.split("=")[0] in ("--target-ks", "--max-mse-increase"):
            skip = not skip and "=" not in word
            continue
        kept.append(word)
    return [*kept, "--target-ks", f"{target:g}"]


def _inner_data(content: Content) -> dict[str, Any]:
    """Layers and directions, where there are any."""
    found: dict[str, Any] = {}
    directions, scan = content.directions, content.scan
    if isinstance(directions, Directions):
        spectra = {"before": directions.spectrum_before, "after": directions.spectrum_after}
        found["spectrum"] = {when: digits(values[:48]) for when, values in spectra.items()}
        found["spectrum"]["afterName"] = "after" if content.hidden_edits else "if edited"
    if isinstance(scan, LayerScan):
        found["layers"] = [
            {"name": layer_name(f), "ks": f.ks, "low": f.ks_low, "high": f.ks_high, "best": f is scan.best}
            for f in scan.layers
        ]
        found["layersBefore"] = scan.ks_before
    return found


def _of_group(content: Content, values: Array, group: int) -> tuple[Array, Array | None]:
    """A group's values and weights."""
    mine, weight = content.rows.codes == group, content.rows.weight
    return values[mine], None if weight is None else weight[mine]


def _distribution(content: Content, step: Step, thresholds: Array) -> Array:
    """(G, k) part of each group at or below each of k thresholds."""
    found = []
    for g in range(len(content.rows.labels)):
        values, weight = _of_group(content, step.prediction, g)
        order = np.argsort(values)
        mass = np.ones(len(order)) if weight is None else weight[order]
        below = np.append(0.0, np.cumsum(mass) / mass.sum())
        found.append(below[np.searchsorted(values[order], thresholds, side="right")])
    return np.array(found)


def _cdf(content: Content, step: Step, drawn: list[int]) -> dict[str, Any]:
    grid = make_grid([content.before.prediction, content.after.prediction], 161)
    thresholds = np.unique(np.append(grid, step.peak.threshold))
    return {
        "x": thresholds.tolist(),
        "shares": [digits(shares) for shares in _distribution(content, step, thresholds)[drawn]],
        "at": step.peak.threshold,
        "low": step.peak.low_share,
        "high": step.peak.high_share,
    }


def _densities(content: Content, values: Array, groups: list[int], grid: Array) -> list[list[float]]:
    samples = (_of_group(content, values, group) for group in groups)
    return [digits(density(mine, grid, weight)) for mine, weight in samples]


def digits(values: Iterable[float]) -> list[float]:
    """Four digits that count: enough for a chart, and short."""
    return [float(f"{value:.4g}") for value in values]


def _span(grid: Array) -> list[float]:
    return [float(grid[0]), float(grid[-1]), len(grid)]
