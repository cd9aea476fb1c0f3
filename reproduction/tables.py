"""From rows to tables and figures: mean ± standard deviation over seeds, beside what the paper prints.

Figures, the densities of the groups and error over KS, need the extra ``plots``.
"""

import io
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.plots import ACCENT, GROUPS, INK, QUIET, finish_tradeoff
from reproduction.config import PAPER, Experiment, Printed, Variant
from reproduction.labels import name_points
from reproduction.runs import Row, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """One method over all seeds."""

    variant: Variant
    seeds: int
    mse: Statistic
    ks: Statistic
    regret: Statistic | None  # None where a method has none
    met: float | None  # share of seeds whose target was met on validation rows
    printed: Printed | None
    agrees: bool | None  # whether both means are as close to the printed ones as Printed allows

    @classmethod
    def of(cls, variant: Variant, rows: Sequence[Row], printed: Printed | None) -> "Line":
        mse, ks = Statistic.of([row.mse for row in rows]), Statistic.of([row.ks for row in rows])
        regret = [row.regret for row in rows if row.regret is not None]
        met = [row.met for row in rows if row.met is not None]
        agrees = None
        if printed is not None:
            pairs = (mse.mean, printed.mse, printed.mse_within), (ks.mean, printed.ks, printed.ks_within)
            agrees = all(round(abs(round(ours, 3) - theirs), 3) <= within for ours, theirs, within in pairs)
        return cls(
            variant,
            len(rows),
            mse,
            ks,
            Statistic.of(regret) if regret else None,
            float(np.mean(met)) if met else None,
            printed,
            agrees,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self)
        if self.printed is not None:
            del plain["printed"]["variant"]
        return {**plain.pop("variant"), **plain}

    def cells(self, seeds: int) -> list[str]:
        """Its name and its numbers, as in ``_HEADER``; it says so when it has fewer than the ``seeds`` of its table."""
        printed = self.printed
        return [
            describe(self.variant) + (f" ({self.seeds} of {seeds} seeds)" if self.seeds < seeds else ""),
            str(self.mse),
            str(self.ks),
            str(self.regret or ""),
            "" if printed is None else f"{printed.mse:.3f} ± {printed.mse_within:.3f}",
            "" if printed is None else f"{printed.ks:.3f} ± {printed.ks_within:.3f}",
            {None: "", True: "yes", False: "no"}[self.agrees],
        ]


@dataclass(frozen=True)
class Table:
    """An experiment over all its saved seeds: text for people, plain values for machines."""

    rows: Sequence[Row]
    experiment: Experiment

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows})

    @cached_property
    def lines(self) -> list[Line]:
        """A line for every variant, in the order of the rows."""
        printed = {p.variant: p for p in self.experiment.printed} if self.experiment.preparation == "paper" else {}
        by_variant: dict[Variant, list[Row]] = {}
        for row in self.rows:
            by_variant.setdefault(row.variant, []).append(row)
        return [Line.of(variant, found, printed.get(variant)) for variant, found in by_variant.items()]

    def __getitem__(self, variant: Variant) -> Line:
        for line in self.lines:
            if line.variant == variant:
                return line
        what = describe(variant).strip()
        raise ValueError(
            f"{self.experiment.full_name} has no row of {what!r}; run `python -m reproduction` without --part."
        )

    def shown(self) -> list[Line]:
        """The lines that people see: of the curves of `transport` and of the optimum only some points."""
        return [x for x in self.lines if x.variant.level in _SHOWN.get(x.variant.method, (x.variant.level,))]

    def __str__(self) -> str:
        """The table for the terminal."""
        cells = self._cells("")
        widths = [max(map(text_width, column)) for column in zip(*cells, strict=True)]
        padded = ([cell + " " * (w - text_width(cell)) for cell, w in zip(row, widths, strict=True)] for row in cells)
        head = f"{self.experiment.name}, preparation {self.experiment.preparation}, {self.extent}"
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
            "preparation": self.experiment.preparation,
            "evaluated_on": self.experiment.evaluated_on,
            "seeds": self.seeds,
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


def text_width(text: str) -> int:
    """Columns on the terminal: the tilde of c̃ stands on its letter."""
    return sum(not unicodedata.combining(character) for character in text)


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; the first row is its header."""
    header, *rows = ([cell.strip() for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


# --- figures -------------------------------------------------------------------------------------------------------


_SCORES = GROUPS[1]
# Marker, colour and name of the methods that the trade-off shows; baselines with the predicted group alone.
_DRAWN = {
    Variant("untouched"): ("*", INK, "as trained"),
    Variant("refitted"): ("D", INK, "refitted"),
    Variant("barycenter", "targets", "predicted"): ("s", QUIET, "Chzhen on targets"),
    Variant("private_histogram", "targets", "predicted"): ("D", QUIET, "Xian on targets"),
    PAPER: ("o", INK, "ESVDFair (paper)"),
    Variant("barycenter", "scores", "predicted"): ("s", _SCORES, "Chzhen on scores"),
    Variant("private_histogram", "scores", "predicted"): ("D", _SCORES, "Xian on scores"),
    Variant("parity", level=0.10): ("^", ACCENT, "parity"),
    Variant("transport", level=0.10): ("P", ACCENT, "transport"),
    Variant("finetuned", level=0.10): ("<", GROUPS[2], "all layers fine-tuned"),
    Variant("from_scratch", level=0.10): (">", GROUPS[2], "all layers from scratch"),
}
_NO_PANEL = ("refitted", "finetuned", "from_scratch")


def draw_figures(table: Table, folder: Path) -> list[Path]:
    """Draw the figures of a table into a folder: densities only of rows that know them; returns their paths."""
    if not table.rows:
        return []
    figures = {"densities": draw_densities(table)} if _densities(table) else {}
    figures["tradeoff"] = draw_tradeoff(table) if table.experiment.is_comparison else draw_ablation(table)
    paths = []
    for what, figure in figures.items():
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
        paths.append(folder / f"{table.experiment.full_name}-{what}.png")
        write_atomically(paths[-1], image.getvalue())
    return paths


def _densities(table: Table) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Pooled over seeds, of the methods that have a panel: its title -> group -> (bins,)."""
    totals: dict[Variant, dict[str, NDArray[np.float64]]] = {}
    for row in (row for row in table.rows if row.densities):
        groups = totals.setdefault(row.variant, {})
        for label, counts in row.densities.items():
            groups[label] = groups.get(label, 0.0) + np.array(counts, dtype=np.float64)
    if table.experiment.is_comparison:
        titles = {v: name for v, (_, _, name) in _DRAWN.items() if v in totals and v.method not in _NO_PANEL}
    else:
        titles = {v: describe(v).removeprefix("ESVDFair, as in the paper, ") for v in totals}
    return {title: {label: counts / counts.sum() for label, counts in totals[v].items()} for v, title in titles.items()}


def draw_densities(table: Table) -> "Figure":
    """One panel a method: the distribution of its predictions in every group."""
    panels = _densities(table)
    columns = min(len(panels), 4) if len(panels) != 5 else 5
    rows = -(-len(panels) // columns)
    figure = _figure(3.0 * columns, 2.3 * rows + 0.5)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for ax, (name, densities) in zip(axes, panels.items(), strict=False):
        for color, (label, density) in zip(GROUPS, densities.items(), strict=False):
            middle = np.linspace(*table.experiment.shown_range, 2 * len(density) + 1)[1::2]
            ax.fill_between(middle, density, step="mid", color=color, alpha=0.25, linewidth=0)
            ax.step(middle, density, where="mid", color=color, linewidth=1.0, label=label)
        ax.set_title(name, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.set_yticks([])
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    figure.supxlabel("prediction", fontsize=9)
    figure.suptitle(_title(table), fontsize=10, x=0.01, ha="left")
    return figure


def draw_tradeoff(table: Table) -> "Figure":
    """Error over KS: mean ± standard deviation of the seeds, the paper's points hollow, two curves as lines."""
    shown = [(line, *_DRAWN[line.variant]) for line in table.lines if line.variant in _DRAWN]
    limit = 1.8 * float(np.median([line.mse.mean for line, *_ in shown]))
    far = [f"not shown: {name}, MSE {line.mse}, KS {line.ks}" for line, *_, name in shown if line.mse.mean > limit]
    transport, optimum = (
        sorted((line.ks.mean, line.mse.mean) for line in table.lines if line.variant.method == method)
        for method in ("transport", "optimum")
    )
    points = [point for point in shown if point[0].mse.mean <= limit]
    named = [("plug-in optimum", *optimum[len(optimum) // 2], QUIET)] if optimum else []
    curves = {ACCENT: transport, QUIET: optimum}
    return _plane(table, (8.0, 5.0), curves, points, named=named, note="\n".join(far))


def draw_ablation(table: Table) -> "Figure":
    """Error over KS along c̃: ours with error bars, the paper's points hollow."""
    varied = "mean" if len({line.variant.mean_reduction for line in table.lines}) > 1 else "covariance"
    symbol = {"mean": r"$\tilde{c}_e$", "covariance": r"$\tilde{c}_v$"}[varied]
    at = (f"{symbol} = {getattr(line.variant, f'{varied}_reduction'):g}" for line in table.lines)
    points = [(line, "o", ACCENT, name) for line, name in zip(table.lines, at, strict=True)]
    return _plane(table, (6.0, 4.2), {ACCENT: [(line.ks.mean, line.mse.mean) for line in table.lines]}, points)


def _plane(
    table: Table,
    size: tuple[float, float],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    points: Sequence[tuple[Line, str, str, str]],
    *,
    named: Sequence[tuple[str, float, float, str]] = (),
    note: str = "",
) -> "Figure":
    """Curves by their colour, points with marker, colour and name; axes as in `plots.plot_curve`."""
    figure = _figure(*size)
    words = "filled: ours, mean ± standard deviation; hollow: printed in the paper"
    figure.suptitle(f"{_title(table)}\n{words}", fontsize=9)
    ax = figure.subplots()
    for color, curve in curves.items():
        if curve:
            ax.plot(*zip(*curve, strict=True), color=color, linewidth=1.0, zorder=1.5)
    for line, marker, color, _ in points:
        ax.errorbar(line.ks.mean, line.mse.mean, xerr=line.ks.sd, yerr=line.mse.sd, fmt=marker, color=color,
                    markersize=9 if marker == "*" else 5, elinewidth=0.8, capsize=2, alpha=0.9, zorder=3)  # fmt: skip
        if line.printed is not None:
            at = line.printed.ks, line.printed.mse
            ax.plot(*at, marker, color="none", markeredgecolor=color, markersize=10, zorder=2)
    finish_tradeoff(ax, floor=float(np.mean([row.ks_floor for row in table.rows])))
    ax.set_title(note, loc="right", fontsize=8, color=INK)
    names = [*named, *((name, line.ks.mean, line.mse.mean, color) for line, _, color, name in points)]
    name_points(ax, [name[:3] for name in names], colors=[color for *_, color in names], size=8)
    return figure


def _title(table: Table) -> str:
    return f"{table.experiment.name}, preparation “{table.experiment.preparation}”, {table.extent}"


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'esvdfair[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")
