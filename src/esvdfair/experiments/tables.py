"""From rows to lines of a table: mean ± standard deviation over seeds, beside what the paper prints."""

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esvdfair.experiments.config import Experiment, Preparation, Printed, Variant
from esvdfair.experiments.rows import Row

_NAMES = {
    "untouched": "network as trained",
    "refitted": "the same, last layer refitted without parity",
    "constant": "best constant",
    "barycenter": "Chzhen 2020",
    "private_histogram": "Xian 2024",
    "paper": "ESVDFair, as in the paper",
    "paper_printed_cubic": "  with the printed cubic",
    "paper_unguarded_solve": "  with it and an unguarded solve",
    "algorithm_2": "Algorithm 2 (least squares)",
    "finetuned": "all layers fine-tuned with MSE + λ·W₂²",
    "from_scratch": "all layers from scratch with MSE + λ·W₂²",
    "optimum": "unaware plug-in optimum",
    "equipy": "EquiPy",
    "fairlearn": "Fairlearn CorrelationRemover",
    "leace": "LEACE and least squares",
}
_SHOWN = {"transport": (0.10, 0.12), "optimum": (0.05, 0.10, 0.15)}  # points of curves that people see
_HEADER = ["MSE", "KS", "excess over the plug-in optimum", "paper: MSE", "paper: KS", "agrees"]


@dataclass(frozen=True)
class Statistic:
    """Mean and (sample) standard deviation over seeds; the latter is None for one seed."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Statistic":
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def __str__(self) -> str:
        return self.text(digits=3)

    def text(self, *, digits: int, signed: bool = False, of_mean: int | None = None) -> str:
        """``0.055 ± 0.006``; with ``of_mean`` seeds the deviation is that of their mean."""
        mean = f"{self.mean:{'+' if signed else ''}.{digits}f}"
        sd = "" if self.sd is None else f" ± {self.sd / np.sqrt(of_mean or 1):.{digits}f}"
        return f"{mean}{sd}".replace("-", "−")


@dataclass(frozen=True)
class Line:
    """One method over all seeds.

    ``regret`` and ``met`` (share of seeds whose target was met on validation rows) are None where a method has none.
    ``agrees`` says whether both means are as close to the printed ones as ``Printed`` allows.
    """

    variant: Variant
    seeds: int
    mse: Statistic
    ks: Statistic
    regret: Statistic | None
    met: float | None
    printed: Printed | None
    agrees: bool | None

    @classmethod
    def of(cls, variant: Variant, rows: Sequence[Row], printed: Printed | None) -> "Line":
        mse, ks = Statistic.of([row.mse for row in rows]), Statistic.of([row.ks for row in rows])
        known = {
            name: [value for row in rows if (value := getattr(row, name)) is not None] for name in ("regret", "met")
        }
        agrees = None
        if printed is not None:
            pairs = (mse.mean, printed.mse, printed.mse_within), (ks.mean, printed.ks, printed.ks_within)
            agrees = all(round(abs(round(ours, 3) - theirs), 3) <= within for ours, theirs, within in pairs)
        return cls(
            variant=variant,
            seeds=len(rows),
            mse=mse,
            ks=ks,
            regret=Statistic.of(known["regret"]) if known["regret"] else None,
            met=float(np.mean(known["met"])) if known["met"] else None,
            printed=printed,
            agrees=agrees,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self)
        variant = plain.pop("variant")
        if self.printed is not None:
            del plain["printed"]["variant"]
        return {**variant, **plain}

    def cells(self, seeds: int) -> list[str]:
        """Its name and its numbers, as in ``_HEADER``; it says so when it has fewer than the ``seeds`` of its table."""
        printed = self.printed
        return [
            describe(self.variant) + (f" ({self.seeds} of {seeds} seeds)" if self.seeds < seeds else ""),
            str(self.mse),
            str(self.ks),
            "" if self.regret is None else str(self.regret),
            "" if printed is None else f"{printed.mse:.3f} ± {printed.mse_within:.3f}",
            "" if printed is None else f"{printed.ks:.3f} ± {printed.ks_within:.3f}",
            "" if self.agrees is None else ("yes" if self.agrees else "no"),
        ]


@dataclass(frozen=True)
class Table:
    """An experiment over all its saved seeds: text for people, plain values for machines."""

    experiment: Experiment
    preparation: Preparation
    seeds: tuple[int, ...]
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], experiment: Experiment, preparation: Preparation) -> "Table":
        """A line for every variant, in the order of the rows."""
        printed = {p.variant: p for p in experiment.printed} if preparation == "paper" else {}
        by_variant: dict[Variant, list[Row]] = {}
        for row in rows:
            by_variant.setdefault(row.variant, []).append(row)
        lines = (Line.of(variant, found, printed.get(variant)) for variant, found in by_variant.items())
        return cls(experiment, preparation, tuple(sorted({row.seed for row in rows})), tuple(lines))

    def __getitem__(self, variant: Variant) -> Line:
        return next(line for line in self.lines if line.variant == variant)

    def shown(self) -> list[Line]:
        """The lines that people see: of the curves of `transport` and of the optimum only some points."""
        return [x for x in self.lines if x.variant.level in _SHOWN.get(x.variant.method, (x.variant.level,))]

    def __str__(self) -> str:
        """The table for the terminal."""
        cells = self._cells("")
        widths = [max(map(text_width, column)) for column in zip(*cells, strict=True)]
        padded = ([cell + " " * (w - text_width(cell)) for cell, w in zip(row, widths, strict=True)] for row in cells)
        head = f"{self.experiment.name}, preparation {self.preparation}, {self.extent}"
        return f"{head}\n\n" + "\n".join("  ".join(row).rstrip() for row in padded)

    def to_markdown(self) -> str:
        """The same table for a document."""
        return markdown(self._cells("method"))

    def _cells(self, corner: str) -> list[list[str]]:
        """Header and lines, without columns that have nothing under their header, as where the paper prints nothing."""
        cells = [[corner, *_HEADER], *(line.cells(len(self.seeds)) for line in self.shown())]
        kept = [i for i, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
        return [[row[i] for i in kept] for row in cells]

    @property
    def extent(self) -> str:
        few = "up to " if any(line.seeds < len(self.seeds) for line in self.lines) else ""
        return f"{few}{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}, {self.experiment.evaluated_on} rows"

    def to_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.name,
            "preparation": self.preparation,
            "evaluated_on": self.experiment.evaluated_on,
            "seeds": list(self.seeds),
            "lines": [line.to_dict() for line in self.lines],
        }


def describe(variant: Variant) -> str:
    """What a person calls a line."""
    details = []
    if variant.fitted_on:
        details.append(f"fitted on {variant.fitted_on}")
    if variant.group != "none":
        details.append(f"{variant.group} group")
    if variant.level is not None:
        details.append("no bound" if variant.level == 1.0 else f"KS ≤ {variant.level:g}")
    if variant.method == "paper":
        details.append(f"c̃_e {variant.mean_reduction:g}, c̃_v {variant.covariance_reduction:g}")
    return ", ".join([_NAMES.get(variant.method, variant.method), *details])


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; the first row is its header."""
    header, *rows = ([cell.strip() for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def text_width(text: str) -> int:
    """Columns on the terminal: the tilde of c̃ stands on its letter."""
    return sum(not unicodedata.combining(character) for character in text)
