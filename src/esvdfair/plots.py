"""Results -> matplotlib axes. Needs the extra `plots`; nothing here computes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from esvdfair.audit import Array, density, make_grid
from esvdfair.core.checks import check_column, check_groups
from esvdfair.core.metrics import ks_distance
from esvdfair.curve import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, safe for colour-blind readers; the same as in the report (report/page.css).
GROUPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9", "#8a8000", "#000000")
INK, ACCENT, QUIET = "#222222", GROUPS[0], "#999999"
LINES = ("-", "--", ":", "-.")
NAMED_AT_LINES = 4
"""Groups that are named at their lines; names of more would cover each other, so they get a legend."""


def plot_curve(curve: Curve, *, target_ks: float | None = None, ax: "Axes | None" = None) -> "Axes":
    """The trade-off curve: mean squared error over KS distance, with intervals, the floor, and a chosen point.

    Parameters
    ----------
    curve : from :func:`esvdfair.fit_curve` or ``ESVDFair.curve_``
    target_ks : marks the target and the point that :meth:`Curve.select` takes for it
    ax : axes to draw on; new ones by default
    """
    ax = _axes() if ax is None else ax
    ks = [point.ks for point in curve.points]
    mse = [point.mse for point in curve.points]
    below, above = ([getattr(p, end) for p in curve.points] for end in ("ks_low", "ks_high"))
    widths = [
        [k - low for k, low in zip(ks, below, strict=True)],
        [high - k for k, high in zip(ks, above, strict=True)],
    ]
    widths = [[max(width, 0.0) for width in side] for side in widths]
    ax.errorbar(ks, mse, xerr=widths, fmt="none", ecolor=QUIET, elinewidth=0.6, alpha=0.35, zorder=1)
    ax.plot(ks, mse, "o", color=ACCENT, markersize=4, zorder=2)
    ax.axvspan(0, curve.ks_floor, color=QUIET, alpha=0.15, linewidth=0, zorder=0)
    ax.annotate(
        "sampling floor",
        (curve.ks_floor / 2, 0.97),
        xycoords=("data", "axes fraction"),
        rotation=90,
        ha="center",
        va="top",
        fontsize=8,
        color=QUIET,
    )
    if target_ks is not None:
        chosen = curve.select(target_ks=target_ks)
        ax.axvline(target_ks, color=INK, linewidth=0.8, linestyle=":")
        ax.plot([chosen.ks], [chosen.mse], "o", color="none", markeredgecolor=INK, markersize=11, zorder=3)
        ax.annotate(
            f"KS {chosen.ks:.3f}, MSE {chosen.mse:.4g}",
            (chosen.ks, chosen.mse),
            xytext=(10, 10),
            textcoords="offset points",
            fontsize=9,
            color=INK,
        )
    ax.set_xlim(left=0)
    ax.set_xlabel(f"KS distance between groups ({curve.evaluated_on} rows)")
    ax.set_ylabel("mean squared error")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_densities(y_pred: Any, *, sensitive_features: Any, ax: "Axes | None" = None) -> "Axes":
    """How the predictions of every group are distributed, with the KS distance as title; ticks mark the means.

    Parameters
    ----------
    y_pred : (rows,) predictions
    sensitive_features : (rows,) group of each person, or several columns, whose combinations are the groups
    ax : axes to draw on; new ones by default

    Raises
    ------
    ValueError
        Lengths that differ, values that are not finite, or fewer than two groups.
    """
    values = check_column(y_pred, len(y_pred), "y_pred")
    labels, codes = check_groups(sensitive_features, len(values), "error")
    ks = ks_distance(values, sensitive_features=codes)
    ax = _axes() if ax is None else ax
    names = [", ".join(map(str, label)) if isinstance(label, tuple) else str(label) for label in labels]
    samples = {name: values[codes == g] for g, name in enumerate(names)}
    grid = make_grid(samples.values())
    places = sorted(samples, key=lambda name: float(samples[name].mean()))
    for g, (name, mine) in enumerate(samples.items()):
        look: dict[str, Any] = {"color": GROUPS[g % len(GROUPS)]}
        heights = density(mine, grid)
        ax.plot(grid, heights, LINES[g % len(LINES)], linewidth=2, label=name, **look)
        ax.plot([mine.mean()] * 2, [0, 0.08], transform=ax.get_xaxis_transform(), linewidth=1.2, **look)
        if len(samples) <= NAMED_AT_LINES:
            ax.fill_between(grid, heights, alpha=0.13, linewidth=0, **look)
            _name_at_line(ax, name, grid, heights, place=places.index(name) / (len(places) - 1), color=look["color"])
    if len(samples) > NAMED_AT_LINES:
        ax.legend(frameon=False, fontsize=9)
    ax.set_title(f"KS distance {ks:.3f}", loc="left", fontsize=11, color=INK)
    ax.set_ylim(bottom=0)
    ax.set_yticks([])
    ax.set_xlabel("prediction")
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def _name_at_line(ax: "Axes", name: str, grid: Array, heights: Array, *, place: float, color: str) -> None:
    """Write a group's name on its outer flank: the lowest mean (place 0) on the left, the highest (1) on the right."""
    right, top = place >= 0.5, int(heights.argmax())
    flank = np.arange(top, len(grid)) if right else np.arange(top, -1, -1)
    wanted = heights[top] * (0.5 + 0.4 * abs(2 * place - 1))  # those in between lower down
    at = flank[int((heights[flank] <= wanted).argmax())]
    ax.annotate(
        name,
        (grid[at], heights[at]),
        xytext=(7 if right else -7, 3),
        textcoords="offset points",
        ha="left" if right else "right",
        fontsize=10,
        fontweight="bold",
        color=color,
    )


def _axes() -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'esvdfair[plots]'") from error
    return plt.subplots(figsize=(6, 4), layout="constrained")[1]
