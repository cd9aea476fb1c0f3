"""The paper's figures from saved seeds: densities of the groups, and error over KS. Needs the extra ``plots``."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from esvdfair.experiments.config import PAPER, Experiment, Preparation, Variant
from esvdfair.experiments.rows import Row, write_atomically
from esvdfair.experiments.tables import Line, Table, describe
from esvdfair.plots import ACCENT, GROUPS, INK, QUIET, finish_tradeoff, name_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panels = Mapping[str, Mapping[str, NDArray[np.float64]]]

_SCORES = GROUPS[1]
# Marker, colour and name of the methods that the trade-off shows; baselines with the predicted group alone.
_SHOWN = {
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


def draw(rows: Sequence[Row], experiment: Experiment, preparation: Preparation, folder: Path) -> list[Path]:
    """Draw the figures of one experiment into a folder: densities only of rows that know them; returns their paths."""
    if not rows:
        return []
    table = Table.of(rows, experiment, preparation)
    title = f"{experiment.name}, preparation “{preparation}”, {table.extent}"
    floor = float(np.mean([row.ks_floor for row in rows]))
    draw_plane = draw_tradeoff if experiment.is_comparison else draw_ablation
    figures, panels = {"tradeoff": draw_plane(table.lines, title, floor)}, _panels(rows, experiment)
    if panels:
        figures = {"densities": draw_densities(panels, experiment.shown_range, title), **figures}
    paths = []
    for name, figure in figures.items():
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
        paths.append(folder / f"{experiment.name}-{preparation}-{name}.png")
        write_atomically(paths[-1], image.getvalue())
    return paths


def draw_densities(panels: Panels, shown: tuple[float, float], title: str) -> "Figure":
    """One panel a method: the distribution of its predictions in every group."""
    columns = min(len(panels), 4) if len(panels) != 5 else 5
    rows = -(-len(panels) // columns)
    figure = _figure(3.0 * columns, 2.3 * rows + 0.5)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for ax, (name, densities) in zip(axes, panels.items(), strict=False):
        for color, (label, density) in zip(GROUPS, densities.items(), strict=False):
            middle = np.linspace(*shown, 2 * len(density) + 1)[1::2]
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
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def draw_tradeoff(lines: Sequence[Line], title: str, floor: float) -> "Figure":
    """Error over KS: mean ± standard deviation of the seeds, the paper's points hollow, two curves as lines."""
    shown = [(line, *_SHOWN[line.variant]) for line in lines if line.variant in _SHOWN]
    limit = 1.8 * float(np.median([line.mse.mean for line, *_ in shown]))
    far = [f"not shown: {name}, MSE {line.mse}, KS {line.ks}" for line, *_, name in shown if line.mse.mean > limit]
    curves = {
        color: sorted((line.ks.mean, line.mse.mean) for line in lines if line.variant.method == method)
        for method, color in (("transport", ACCENT), ("optimum", QUIET))
    }
    named = [("plug-in optimum", *curve[len(curve) // 2], QUIET) for curve in (curves[QUIET],) if curve]
    points = [point for point in shown if point[0].mse.mean <= limit]
    return _plane((8.0, 5.0), title, curves, points, named, floor, note="\n".join(far))


def draw_ablation(lines: Sequence[Line], title: str, floor: float) -> "Figure":
    """Error over KS along c̃: ours with error bars, the paper's points hollow."""
    varied = "mean" if len({line.variant.mean_reduction for line in lines}) > 1 else "covariance"
    symbol = {"mean": r"$\tilde{c}_e$", "covariance": r"$\tilde{c}_v$"}[varied]
    points = [(line, "o", ACCENT, f"{symbol} = {getattr(line.variant, f'{varied}_reduction'):g}") for line in lines]
    curve = [(line.ks.mean, line.mse.mean) for line in lines]
    return _plane((6.0, 4.2), title, {ACCENT: curve}, points, [], floor)


def _panels(rows: Sequence[Row], experiment: Experiment) -> Panels:
    """Densities pooled over seeds: method -> group -> (bins,)."""
    totals: dict[Variant, dict[str, NDArray[np.float64]]] = {}
    for row in (row for row in rows if row.densities):
        groups = totals.setdefault(row.variant, {})
        for label, counts in row.densities.items():
            groups[label] = groups.get(label, 0.0) + np.array(counts, dtype=np.float64)
    if experiment.is_comparison:
        shown = {variant: name for variant, (_, _, name) in _SHOWN.items() if variant.method not in _NO_PANEL}
        titles = {variant: name for variant, name in shown.items() if variant in totals}
    else:
        titles = {variant: describe(variant).removeprefix("ESVDFair, as in the paper, ") for variant in totals}
    return {
        title: {label: counts / counts.sum() for label, counts in totals[variant].items()}
        for variant, title in titles.items()
    }


def _plane(
    size: tuple[float, float],
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    points: Sequence[tuple[Line, str, str, str]],
    named: Sequence[tuple[str, float, float, str]],
    floor: float,
    note: str = "",
) -> "Figure":
    """Curves by their colour, points with marker, colour and name; axes and names as in `plots.plot_curve`."""
    figure = _figure(*size)
    figure.suptitle(f"{title}\nfilled: ours, mean ± standard deviation; hollow: printed in the paper", fontsize=9)
    ax = figure.subplots()
    for color, curve in ((color, curve) for color, curve in curves.items() if curve):
        ax.plot([ks for ks, _ in curve], [mse for _, mse in curve], color=color, linewidth=1.0, zorder=1.5)
    for line, marker, color, _ in points:
        ax.errorbar(line.ks.mean, line.mse.mean, xerr=line.ks.sd, yerr=line.mse.sd, fmt=marker, color=color,
                    markersize=9 if marker == "*" else 5, elinewidth=0.8, capsize=2, alpha=0.9, zorder=3)  # fmt: skip
        if line.printed is not None:
            at = line.printed.ks, line.printed.mse
            ax.plot(*at, marker, color="none", markeredgecolor=color, markersize=10, zorder=2)
    finish_tradeoff(ax, floor=floor)
    ax.set_title(note, loc="right", fontsize=8, color=INK)
    names = [*named, *((name, line.ks.mean, line.mse.mean, color) for line, _, color, name in points)]
    name_points(ax, [name[:3] for name in names], colors=[color for *_, color in names], size=8)
    return figure


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'esvdfair[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")
