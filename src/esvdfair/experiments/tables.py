"""From rows to lines of a table: mean ± standard deviation over seeds, beside what the paper prints."""

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esvdfair.experiments.config import Experiment, Preparation, Printed, Variant
from esvdfair.experiments.rows import Row, variants_in_order

_NAMES = {
    "untouched": "network as trained",
    "constant": "best constant",
    "barycenter": "Chzhen 2020",
    "private_histogram": "Xian 2024",
    "paper": "ESVDFair, as in the paper",
    "paper_printed_cubic": "  with the printed cubic",
    "paper_unguarded_solve": "  with it and an unguarded solve",
    "algorithm_2": "Algorithm 2 (least squares)",
    "parity": "parity",
    "transport": "transport",
    "optimum": "unaware optimum",
    "equipy": "EquiPy",
    "fairlearn": "Fairlearn CorrelationRemover",
    "leace": "LEACE and least squares",
}


@dataclass(frozen=True)
class Statistic:
    """Mean and (sample) standard deviation over seeds; the latter is None for one seed."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Statistic":
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.sd is None else f"{self.mean:.3f} ± {self.sd:.3f}"


@dataclass(frozen=True)
class Line:
    """One method over all seeds.

    ``regret``, ``covariance_reached`` and ``met`` (share of seeds whose target was met on validation rows) are None
    where a method has none. ``agrees`` says whether both means are as close to the printed ones as ``Printed`` allows.
    """

    variant: Variant
    seeds: int
    mse: Statistic
    ks: Statistic
    regret: Statistic | None
    covariance_reached: Statistic | None
    met: float | None
    printed: Printed | None
    agrees: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self)
        variant = plain.pop("variant")
        if self.printed is not None:
            del plain["printed"]["variant"]
        return {**variant, **plain}


@dataclass(frozen=True)
class Table:
    """An experiment over all its saved seeds: text for people, plain values for machines."""

    experiment: Experiment
    preparation: Preparation
    seeds: tuple[int, ...]
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], experiment: Experiment, preparation: Preparation) -> "Table":
        seeds = tuple(sorted({row.seed for row in rows}))
        return cls(experiment, preparation, seeds, tuple(summarize(rows, experiment)))

    def __str__(self) -> str:
        e = self.experiment
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        title = f"{e.name}, preparation {self.preparation}, {seeds}, {e.evaluated_on} rows"
        return f"{title}\n\n{format_table(shown(self.lines, e))}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.name,
            "preparation": self.preparation,
            "evaluated_on": self.experiment.evaluated_on,
            "seeds": list(self.seeds),
            "lines": [line.to_dict() for line in self.lines],
        }


def summarize(rows: Sequence[Row], experiment: Experiment) -> list[Line]:
    """A line for every variant, in the order of the rows."""
    printed = {p.variant: p for p in experiment.printed} if all(r.preparation == "paper" for r in rows) else {}
    by_variant: dict[Variant, list[Row]] = {variant: [] for variant in variants_in_order(rows)}
    for row in rows:
        by_variant[row.variant].append(row)
    return [_line(variant, found, printed.get(variant)) for variant, found in by_variant.items()]


def shown(lines: Sequence[Line], experiment: Experiment) -> list[Line]:
    """The lines that a table shows: of the curves of `transport` and of the optimum only some points."""
    levels = {"transport": experiment.shown_transport, "optimum": experiment.shown_levels}
    return [line for line in lines if line.variant.level in levels.get(line.variant.method, (line.variant.level,))]


def describe(variant: Variant) -> str:
    """What a person calls a line."""
    name = _NAMES.get(variant.method, variant.method)
    details = []
    if variant.fitted_on:
        details.append(f"fitted on {variant.fitted_on}")
    if variant.group != "none":
        details.append(f"{variant.group} group")
    if variant.level is not None:
        details.append("no bound" if variant.level == 1.0 else f"KS ≤ {variant.level:g}")
    if variant.method == "paper":
        details.append(f"c̃_e {variant.mean_reduction:g}, c̃_v {variant.covariance_reduction:g}")
    return f"{name}, {', '.join(details)}" if details else name


def format_table(lines: Sequence[Line]) -> str:
    """A table for the terminal."""
    header = ["", "MSE", "KS", "regret", "paper: MSE", "KS", "agrees"]
    cells = _without_empty([header, *([describe(line.variant), *_numbers(line)] for line in lines)])
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    padded = ([cell + " " * (w - _width(cell)) for cell, w in zip(row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def format_markdown(lines: Sequence[Line]) -> str:
    """The same table for a document."""
    header = ["method", "MSE", "KS", "regret", "paper: MSE", "paper: KS", "agrees"]
    header, *cells = _without_empty([header, *([describe(line.variant).strip(), *_numbers(line)] for line in lines)])
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells))


def _without_empty(cells: list[list[str]]) -> list[list[str]]:
    """Leave out columns that have a header and nothing under it, as those of the paper where it prints nothing."""
    kept = [i for i, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
    return [[row[i] for i in kept] for row in cells]


def _width(text: str) -> int:
    """Columns on the terminal: the tilde of c̃ stands on its letter."""
    return sum(not unicodedata.combining(character) for character in text)


def _numbers(line: Line) -> list[str]:
    printed = line.printed
    return [
        str(line.mse),
        str(line.ks),
        "" if line.regret is None else str(line.regret),
        "" if printed is None else f"{printed.mse:.3f} ± {printed.mse_within:.3f}",
        "" if printed is None else f"{printed.ks:.3f} ± {printed.ks_within:.3f}",
        "" if line.agrees is None else ("yes" if line.agrees else "no"),
    ]


def _line(variant: Variant, rows: Sequence[Row], printed: Printed | None) -> Line:
    mse, ks = Statistic.of([row.mse for row in rows]), Statistic.of([row.ks for row in rows])
    met = [row.met for row in rows if row.met is not None]
    agrees = None
    if printed is not None:
        agrees = _within(mse, printed.mse, printed.mse_within) and _within(ks, printed.ks, printed.ks_within)
    return Line(
        variant=variant,
        seeds=len(rows),
        mse=mse,
        ks=ks,
        regret=_optional([row.regret for row in rows]),
        covariance_reached=_optional([row.covariance_reached for row in rows]),
        met=float(np.mean(met)) if met else None,
        printed=printed,
        agrees=agrees,
    )


def _within(ours: Statistic, printed: float, tolerance: float) -> bool:
    """To the three decimals that are printed."""
    return bool(round(abs(round(ours.mean, 3) - printed), 3) <= tolerance)


def _optional(values: Sequence[float | None]) -> Statistic | None:
    found = [value for value in values if value is not None]
    return Statistic.of(found) if found else None
