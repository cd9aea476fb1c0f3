"""The paper's figures from saved seeds: densities of the groups, and KS against MSE. Needs the extra ``plots``."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from esvdfair.experiments.config import PAPER, Experiment, Preparation, Variant
from esvdfair.experiments.rows import Folder, SeedResult, write_atomically
from esvdfair.experiments.tables import Line, Table, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panels = Mapping[str, Mapping[str, NDArray[np.float64]]]

# Okabe and Ito's palette: told apart also by the colour-blind.
_GROUPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_INK, _QUIET, _OURS, _ON_SCORES = "#222222", "#8a8a8a", "#0072b2", "#d55e00"
_MARKERS = {
    "untouched": "*",
    "barycenter": "s",
    "private_histogram": "D",
    "algorithm_2": "v",
    "parity": "^",
    "transport": "P",
    "finetuned": "<",
    "from_scratch": ">",
}
_SHORT = {
    "untouched": "as trained",
    "barycenter": "Chzhen",
    "private_histogram": "Xian",
    "paper": "ESVDFair (paper)",
    "algorithm_2": "Algorithm 2",
    "finetuned": "all layers fine-tuned",
    "from_scratch": "trained from scratch",
}
_BASELINES = ("barycenter", "private_histogram")
_PANELS = (
    Variant("untouched"),
    *(Variant(name, "targets", "predicted") for name in _BASELINES),
    PAPER,
    *(Variant(name, "scores", "predicted") for name in _BASELINES),
    Variant("parity", level=0.10),
    Variant("transport", level=0.10),
)


def draw(experiment: Experiment, preparation: Preparation, seeds: Sequence[int], out: Path) -> list[Path]:
    """Draw all figures of one experiment from the saved ones among ``seeds``; returns their paths."""
    folder = Folder(out, experiment, preparation)
    results = [folder.read(seed) for seed in folder.finished() if seed in set(seeds)]
    if not results:
        return []
    table = Table.of([row for result in results for row in result.rows], experiment, preparation)
    title = f"{experiment.name}, preparation “{preparation}”, {len(results)} seeds, {experiment.evaluated_on} rows"
    figures = {
        "densities": draw_densities(_panels(results, experiment), experiment.shown_range, title),
        "tradeoff": (draw_tradeoff if experiment.is_comparison else draw_ablation)(table.lines, title),
    }
    paths = []
    for name, figure in figures.items():
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
        paths.append(out / "figures" / f"{folder.name}-{name}.png")
        write_atomically(paths[-1], image.getvalue())
    return paths


def draw_densities(panels: Panels, shown: tuple[float, float], title: str) -> "Figure":
    """One panel a method: the distribution of its predictions in every group."""
    columns = min(len(panels), 4) if len(panels) != 5 else 5
    rows = -(-len(panels) // columns)
    figure = _figure(3.0 * columns, 2.3 * rows + 0.5)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for ax, (name, densities) in zip(axes, panels.items(), strict=False):
        for color, (label, density) in zip(_GROUPS, densities.items(), strict=False):
            middle = np.linspace(*shown, 2 * len(density) + 1)[1::2]
            ax.fill_between(middle, density, step="mid", color=color, alpha=0.25, linewidth=0)
            ax.step(middle, density, where="mid", color=color, linewidth=1.0, label=label)
        ax.set_title(name, fontsize=9)
        _plain(ax)
        ax.set_yticks([])
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.supxlabel("prediction", fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def draw_tradeoff(lines: Sequence[Line], title: str) -> "Figure":
    """KS against MSE: mean and standard deviation over seeds, the paper's points hollow, the optimum as a line."""
    figure, ax = _plane(8.0, 4.6, title)
    curve = sorted((line.ks.mean, line.mse.mean) for line in lines if line.variant.method == "optimum")
    ax.plot([mse for _, mse in curve], [ks for ks, _ in curve], color=_QUIET, linewidth=1.2, label="plug-in optimum")
    points = [line for line in lines if _in_tradeoff(line.variant)]
    limit = 1.8 * float(np.median([line.mse.mean for line in points]))
    for line in sorted(points, key=lambda line: line.mse.mean > limit):
        if line.mse.mean <= limit:
            _point(ax, line, _color(line.variant), label=_short(line.variant))
        else:
            ax.plot([], [], " ", label=f"not shown: {_short(line.variant)},\nMSE {line.mse},\nKS {line.ks}")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def draw_ablation(lines: Sequence[Line], title: str) -> "Figure":
    """KS against MSE along c̃: ours with error bars, the paper's points hollow."""
    figure, ax = _plane(6.0, 4.2, title)
    ax.plot([line.mse.mean for line in lines], [line.ks.mean for line in lines], color=_OURS, linewidth=1.0)
    varied = "mean" if len({line.variant.mean_reduction for line in lines}) > 1 else "covariance"
    symbol = {"mean": r"$\tilde{c}_e$", "covariance": r"$\tilde{c}_v$"}[varied]
    for line in lines:
        _point(ax, line, _OURS)
        label = f"{symbol} = {getattr(line.variant, f'{varied}_reduction'):g}"
        ax.annotate(label, (line.mse.mean, line.ks.mean), (7, 6), textcoords="offset points", fontsize=8, color=_INK)
    return figure


def _panels(results: Sequence[SeedResult], experiment: Experiment) -> Panels:
    """Densities pooled over seeds: method -> group -> (bins,)."""
    totals: dict[Variant, dict[str, NDArray[np.float64]]] = {}
    for density in (density for result in results for density in result.densities):
        groups = totals.setdefault(density.variant, {})
        groups[density.label] = groups.get(density.label, 0.0) + np.array(density.counts, dtype=np.float64)
    if experiment.is_comparison:
        titles = {variant: _short(variant) for variant in _PANELS if variant in totals}
    else:
        titles = {variant: describe(variant).removeprefix("ESVDFair, as in the paper, ") for variant in totals}
    return {
        title: {label: counts / counts.sum() for label, counts in totals[variant].items()}
        for variant, title in titles.items()
    }


def _in_tradeoff(variant: Variant) -> bool:
    if variant.method == "transport":
        return variant.level == 0.10
    alone = ("untouched", "paper", "algorithm_2", "parity", "finetuned", "from_scratch")
    return variant.method in alone or variant.group == "predicted"


def _short(variant: Variant) -> str:
    name = _SHORT.get(variant.method, variant.method)
    return f"{name} on {variant.fitted_on}" if variant.fitted_on else name


def _color(variant: Variant) -> str:
    if variant.method in ("parity", "transport"):
        return _OURS
    return _ON_SCORES if variant.fitted_on == "scores" else _INK


def _point(ax: "Axes", line: Line, color: str, label: str | None = None) -> None:
    marker = _MARKERS.get(line.variant.method, "o")
    ax.errorbar(line.mse.mean, line.ks.mean, xerr=line.mse.sd, yerr=line.ks.sd, fmt=marker, color=color, markersize=5,
                elinewidth=0.8, capsize=2, alpha=0.9, zorder=3, label=label)  # fmt: skip
    if line.printed is not None:
        ax.plot(line.printed.mse, line.printed.ks, marker, color="none", markeredgecolor=color, markersize=10, zorder=2)
    ax.set_ylim(bottom=0)


def _plane(width: float, height: float, title: str) -> tuple["Figure", "Axes"]:
    """A figure of KS over MSE."""
    figure = _figure(width, height)
    ax = figure.subplots()
    ax.set_xlabel("mean squared error", fontsize=9)
    ax.set_ylabel("KS distance between the groups", fontsize=9)
    _plain(ax)
    figure.suptitle(f"{title}\nfilled: ours, mean ± standard deviation; hollow: printed in the paper", fontsize=9)
    return figure, ax


def _plain(ax: "Axes") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'esvdfair[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")
