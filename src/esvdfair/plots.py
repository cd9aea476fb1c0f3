"""Results -> matplotlib axes. Needs the extra `plots`; nothing here computes."""

from typing import TYPE_CHECKING

from esvdfair.tradeoff import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, ACCENT, QUIET = "#222222", "#0072b2", "#999999"  # blue of the Okabe–Ito palette: safe for colour-blind readers


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


def _axes() -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'esvdfair[plots]'") from error
    return plt.subplots(figsize=(6, 4), layout="constrained")[1]
