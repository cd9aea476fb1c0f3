"""Results -> matplotlib axes, which need the extra `plots`; and densities, which the report draws by itself."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import check_column, check_groups
from esvdfair.core.metrics import ks_distance
from esvdfair.cutoffs import ratios_by_share
from esvdfair.text import EVALUATED_ON, label_text, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_before_and_after", "plot_curve", "plot_densities", "plot_ratios"]

Array = NDArray[np.float64]

# Okabe and Ito's colours, safe for colour-blind readers; the same as in the report (report/page.css).
GROUPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9", "#8a8000", "#000000")
INK, ACCENT, QUIET = "#222222", GROUPS[0], "#999999"
LINES = ("-", "--", ":", "-.")
REPRESENTATIVES = 512
"""A larger sample is replaced by so many of its quantiles, which a smooth density cannot tell from it."""


def plot_curve(curve: Any, *, target_ks: float | None = None, ax: "Axes | None" = None) -> "Axes":
    """Draw the trade-off curve: error over KS distance, with intervals, the noise level and a chosen point.

    Parameters
    ----------
    curve : Curve
        From :func:`esvdfair.fit_curve` or ``ESVDFair.curve_``.
    target_ks : float, default=None
        Target to mark, with the point that :meth:`Curve.select` returns for it.
    ax : matplotlib Axes, default=None
        Axes to draw on. If None, new ones are made.

    Returns
    -------
    Axes
        The axes.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import fit_curve
    >>> from esvdfair.plots import plot_curve
    >>> X, sex = np.random.default_rng(0).normal(size=(400, 3)), np.arange(400) % 2
    >>> curve = fit_curve(LinearRegression().fit(X, X[:, 0]), X, X[:, 0], sensitive_features=sex)
    >>> axes = plot_curve(curve, target_ks=0.2)
    """
    ax = _axes() if ax is None else ax
    ks, mse, low, high = np.transpose([(point.ks, point.mse, point.ks_low, point.ks_high) for point in curve.points])
    widths = np.maximum([ks - low, high - ks], 0.0)
    ax.errorbar(ks, mse, xerr=widths, fmt="none", ecolor=QUIET, elinewidth=0.6, alpha=0.35, zorder=1)
    ax.plot(ks, mse, "o", color=ACCENT, markersize=4, zorder=2, label="repaired models")
    if (original := curve.original) is not None:
        ax.plot([original.ks], [original.mse], "*", color=INK, markersize=9, zorder=4, label="original model")
    if curve.mse_refit is not None:
        name = "refit without fairness constraint"
        ax.axhline(curve.mse_refit, color=QUIET, linewidth=0.8, linestyle="--", zorder=1, label=name)
    if target_ks is not None:
        chosen = curve.select(target_ks=target_ks)
        ax.axvline(target_ks, color=INK, linewidth=0.8, linestyle=":", label=f"target {target_ks:g}")
        name = f"chosen: KS {chosen.ks:.3f} (population {chosen.ks_population:.3f}),\nMSE {number(chosen.mse)}"
        ax.plot([chosen.ks], [chosen.mse], "o", color="none", markeredgecolor=INK, markersize=11, zorder=3, label=name)
    finish_tradeoff(ax, floor=curve.ks_floor, rows=EVALUATED_ON[curve.evaluated_on].partition(",")[0])
    # above the axes, where it covers no point
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "columnspacing": 1}
    ax.legend(frameon=False, fontsize=8, ncols=2, handlelength=1.2, **place)
    return ax


def finish_tradeoff(ax: "Axes", *, floor: float | None = None, rows: str = "") -> None:
    """Axes of every trade-off, here and in the reproduction: error over KS, the zone below the floor behind it all."""
    ax.set_xlim(left=0)
    ax.margins(y=0.12)
    if floor is not None:
        ax.axvspan(0, floor, color=QUIET, alpha=0.15, linewidth=0, zorder=0)
        look: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8, "color": QUIET}
        ax.text(floor / 2, 0.02, "noise level", transform=ax.get_xaxis_transform(), zorder=0.5, **look)
    ax.set_xlabel("KS distance between groups" + (f" ({rows})" if rows else ""))
    ax.set_ylabel("mean squared error")
    ax.yaxis.set_major_formatter(_tick)
    ax.spines[["top", "right"]].set_visible(False)


def plot_densities(y_pred: Any, *, sensitive_features: Any, ax: "Axes | None" = None) -> "Axes":
    """Draw the distribution of every group's predictions; the title is the KS distance, ticks mark the means.

    Parameters
    ----------
    y_pred : array-like of shape (rows,)
        Predictions.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    ax : matplotlib Axes, default=None
        Axes to draw on. If None, new ones are made.

    Returns
    -------
    Axes
        The axes.

    Raises
    ------
    ValueError
        If lengths differ, values are not finite, or there are fewer than two groups.

    Examples
    --------
    >>> from esvdfair.plots import plot_densities
    >>> plot_densities([1, 2, 3, 4], sensitive_features=["a", "a", "b", "b"]).get_title(loc="left")
    'KS distance 1.000'
    """
    values = check_column(y_pred, len(y_pred), "y_pred")
    labels, codes = check_groups(sensitive_features, len(values), "error")
    ks = ks_distance(values, sensitive_features=codes)
    ax = _axes() if ax is None else ax
    samples = [values[codes == g] for g in range(len(labels))]
    grid = make_grid(samples)
    for g, (label, mine) in enumerate(zip(labels, samples, strict=True)):
        color, heights = GROUPS[g % len(GROUPS)], density(mine, grid)
        ax.plot(grid, heights, LINES[g % len(LINES)], color=color, linewidth=2, label=label_text(label))
        ax.fill_between(grid, heights, color=color, alpha=0.1, linewidth=0)
        ax.plot([mine.mean()] * 2, [0, 0.08], transform=ax.get_xaxis_transform(), color=color, linewidth=1.2)
    ax.legend(frameon=False, fontsize=9)
    ax.set_title(f"KS distance {ks:.3f}", loc="left", fontsize=11, color=INK)
    ax.set_ylim(bottom=0)
    ax.set_yticks([])
    ax.set_xlabel("prediction")
    ax.xaxis.set_major_formatter(_tick)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def plot_ratios(
    before: Any, after: Any, *, sensitive_features: Any, ax: "Axes | None" = None, **options: Any
) -> "Axes":
    """Draw the lowest adverse-impact ratio over the share of people selected, before and after a repair.

    Parameters
    ----------
    before, after : array-like of shape (rows,)
        Predictions of the original and of the repaired model for the same rows.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    ax : matplotlib Axes, default=None
        Axes to draw on. If None, new ones are made.
    **options : dict
        ``select`` and ``sample_weight``, as in :func:`esvdfair.decisions`.

    Returns
    -------
    Axes
        The axes.

    Examples
    --------
    >>> import numpy as np
    >>> from esvdfair.plots import plot_ratios
    >>> rng = np.random.default_rng(0)
    >>> sex = rng.integers(0, 2, 400)
    >>> axes = plot_ratios(rng.normal(size=400) + sex, rng.normal(size=400), sensitive_features=sex)
    """
    ax = _axes() if ax is None else ax
    ax.axhline(0.8, color=QUIET, linewidth=0.8, linestyle="--", zorder=1)
    for predictions, name, color, line in ((before, "original", QUIET, "--"), (after, "repaired", ACCENT, "-")):
        points = ratios_by_share(predictions, sensitive_features=sensitive_features, **options)
        ax.plot(*np.reshape(points, (-1, 2)).T, line, color=color, linewidth=2, label=name)
    ax.legend(frameon=False, fontsize=9)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("share of all people selected")
    ax.set_ylabel("lowest adverse-impact ratio")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_before_and_after(before: Any, after: Any, *, sensitive_features: Any, axes: Any = None) -> Any:
    """Draw the predictions of every group before and after a repair, one above the other, on the same scale.

    Parameters
    ----------
    before, after : array-like of shape (rows,)
        Predictions of the original and of the repaired model for the same rows.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    axes : sequence of two matplotlib Axes, default=None
        Axes to draw on. If None, new ones are made.

    Returns
    -------
    sequence of two Axes
        The axes.

    Examples
    --------
    >>> from esvdfair.plots import plot_before_and_after
    >>> axes = plot_before_and_after([1, 2, 3, 4], [2, 3, 2, 3], sensitive_features=["a", "a", "b", "b"])
    >>> len(axes)
    2
    """
    axes = _axes(2) if axes is None else axes
    for ax, y_pred, model in zip(axes, (before, after), ("original", "repaired"), strict=True):
        plot_densities(y_pred, sensitive_features=sensitive_features, ax=ax)
        ax.set_title(f"{model} model: {ax.get_title(loc='left')}", loc="left", fontsize=11, color=INK)
    ends = np.array([ax.get_xlim() for ax in axes])
    for ax in axes:
        ax.set_xlim(ends[:, 0].min(), ends[:, 1].max())
    return axes


def _tick(value: float, _: float) -> str:
    """A number at an axis, written as in tables."""
    return f"{value:,.10g}"


def _axes(rows: int = 1) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'esvdfair[plots]'") from error
    return plt.subplots(rows, figsize=(6, 3 + rows), layout="constrained")[1]


# --- densities -----------------------------------------------------------------------------------------------------


def make_grid(samples: Iterable[Array], cells: int = 81) -> Array:
    """(cells,) evenly spaced values that cover the samples but for their outermost tails."""
    ends = np.array([np.quantile(values, [0.002, 0.998]) for values in samples])
    low, high = ends[:, 0].min(), ends[:, 1].max()
    # all values equal: any room will do, as long as it shows at the size of these values
    room = 0.06 * (high - low) or max(0.5, abs(high) * 0.01)
    return np.linspace(low - room, high + room, cells)


def density(values: Array, grid: Array, weight: Array | None = None) -> Array:
    """(cells,) Gaussian kernel density with Silverman's bandwidth, never narrower than a cell of the grid."""
    w = np.full(len(values), 1 / len(values)) if weight is None else weight / weight.sum()
    low, high = _weighted_quantiles(values, weight, np.array([0.25, 0.75]))
    sd = float(np.sqrt(w @ (values - w @ values) ** 2))
    spreads = [s for s in (sd, (high - low) / 1.349) if s > 0]
    bandwidth = max(0.9 * min(spreads, default=0.0) * float(w @ w) ** 0.2, grid[1] - grid[0])
    if len(values) > REPRESENTATIVES:
        values = _weighted_quantiles(values, weight, (np.arange(REPRESENTATIVES) + 0.5) / REPRESENTATIVES)
        w = np.full(REPRESENTATIVES, 1 / REPRESENTATIVES)
    z = (grid[:, None] - values) / bandwidth
    found: Array = np.exp(-0.5 * z**2) @ w / (bandwidth * np.sqrt(2 * np.pi))
    return found


def _weighted_quantiles(values: Array, weight: Array | None, levels: Array) -> Array:
    if weight is None:
        return np.quantile(values, levels)
    return np.quantile(values, levels, weights=weight, method="inverted_cdf")
