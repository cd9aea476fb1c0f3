"""The trade-off curve: what every candidate reaches on validation rows, the rule that picks a point, its warnings.

``target_ks`` speaks of the population, not of a sample (docs/method.md 2.7), and of every pair of groups.
:meth:`Curve.meets` is the one place that decides whether a point meets it.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import Label, label_text
from esvdfair.core.pairs import meets
from esvdfair.core.quadratic import Fit
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models.base import ModelAdapter, Weights
from esvdfair.plots import plot_curve
from esvdfair.problem import ORIGINAL

Array = NDArray[np.float64]

KEPT = 0.5  # part of the explained variance below which a repair gives up most of it
PARITY = 0.05  # KS distance that is near enough to parity where no target was given


@dataclass(frozen=True)
class CurvePoint:
    """One repaired model on the trade-off curve, evaluated on validation rows.

    Attributes
    ----------
    mse, r2, ks, mean_gap, variance_gap : on the validation rows
    ks_low, ks_high : 95% interval of the population KS, computed when it is asked for
    ks_upper : one-sided bound of the population KS, at the curve's confidence, 95% where none was asked for
    target : what the refit aimed at: "labels", "predictions", "optimum 0.05"; "untouched" is the original model
    ridge : ρ, relative to the features' variances
    strength : λ_w of transport, the factor on the reductions for paper and exact, …: 0 is the weakest
    ks_population : estimated population KS, the largest over the pairs of groups
    ks_pairs : estimated population KS of every pair, in the order of ``Curve.pairs``; the rule compares these
    ks_certified : smallest target that it is certified for; None where no confidence was asked for
    constant : whether it has become one prediction for everybody
    index : position in ``Curve.points``; a point can be used wherever its index can
    """

    mse: float
    r2: float
    ks: float
    mean_gap: float
    variance_gap: float
    target: str
    ridge: float
    strength: float
    ks_population: float
    ks_pairs: tuple[float, ...]
    ks_certified: float | None
    constant: bool
    index: int
    measure: Callable[[], tuple[float, float, float]] | None = field(default=None, repr=False, compare=False)

    def __index__(self) -> int:
        return self.index

    @cached_property
    def _bounds(self) -> tuple[float, float, float]:
        assert self.measure is not None
        return self.measure()

    @property
    def ks_low(self) -> float:
        return self._bounds[0]

    @property
    def ks_high(self) -> float:
        return self._bounds[1]

    @property
    def ks_upper(self) -> float:
        return self._bounds[2]

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies, which hold numbers and no validation rows."""
        return {**self.__dict__, "_bounds": self._bounds, "measure": None}

    def to_dict(self) -> dict[str, Any]:
        """All figures of the point by name."""
        after = {"ks": ("ks_low", "ks_high"), "ks_population": ("ks_upper",)}
        shown = (each.name for each in fields(self) if each.name not in ("measure", "index", "ks_pairs"))
        return {name: getattr(self, name) for own in shown for name in (own, *after.get(own, ()))}


@dataclass(frozen=True, repr=False)
class Curve:
    """Points from the most accurate to the fairest; ``model(i)`` builds the model of one without refitting.

    Attributes
    ----------
    points : tuple of CurvePoint, by falling estimated population KS
    pairs : the pairs of groups that are compared
    pair_floors : noise level of every pair: the mean KS that chance alone produces at these group sizes
    pair_resolved : the smallest population KS of every pair that these rows can tell from parity
    pair_rows : effective rows of every pair, ``1/(1/n₁ + 1/n₂)``
    evaluated_on : "validation", "heldout", "train" or "test"
    weights : of every point, what it puts in place of the layers of the model
    adapter : of the original model, which the models of the curve are copies of
    candidates : of every point, which of the candidates it is
    original_pairs, original_floors : estimate and noise level of every pair for the original model, where that is
        compared on all rows; ``ks_pairs`` of its point is what other points can be compared with
    confidence, certificate : of the certificates; no confidence, no certificates
    mse_refit : error of the last layer refitted without fairness constraint; None where it is not known
    refit : that layer
    """

    points: tuple[CurvePoint, ...]
    pairs: tuple[tuple[Label, Label], ...]
    pair_floors: tuple[float, ...]
    pair_resolved: tuple[float, ...]
    pair_rows: tuple[float, ...]
    evaluated_on: str
    weights: tuple[Weights, ...]
    adapter: ModelAdapter
    candidates: tuple[int, ...] = ()
    original_pairs: tuple[float, ...] = ()
    original_floors: tuple[float, ...] = ()
    confidence: float | None = None
    certificate: str = "normal"
    mse_refit: float | None = None
    refit: Fit | None = None

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        first, last = self.points[0], self.points[-1]
        return (
            f"Curve({len(self)} points, evaluated on {self.evaluated_on!r}: MSE {first.mse:.4g} at KS {first.ks:.3f} "
            f"to MSE {last.mse:.4g} at KS {last.ks:.3f})"
        )

    @property
    def original(self) -> CurvePoint | None:
        """The original model; None where it was no candidate."""
        return next((point for point in self.points if point.target == ORIGINAL), None)

    @property
    def ks_floor(self) -> float:
        """The largest noise level of any pair."""
        return max(self.pair_floors)

    def estimates(self, point: CurvePoint) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the estimated population KS and the noise level of every pair of groups.

        Parameters
        ----------
        point : CurvePoint
            A point of the curve.

        Returns
        -------
        estimates : tuple of float
            Estimated population KS of each pair, which is compared with a target.
        floors : tuple of float
            Noise level of each pair.
        """
        if point.target == ORIGINAL and self.original_pairs:
            return self.original_pairs, self.original_floors
        return point.ks_pairs, self.pair_floors

    def resolvable(self, target_ks: float) -> NDArray[np.bool_]:
        """(P,) whether these rows can resolve a target: the noise level of each pair is at most that."""
        return np.asarray(self.pair_floors) <= target_ks

    def meets(self, point: CurvePoint, target_ks: float) -> bool:
        """Tell whether a point meets a target.

        Every pair's estimate must be at most the target, no pair's noise level may exceed it, and, if confidence was
        asked for, the point must be certified.

        Parameters
        ----------
        point : CurvePoint
            A point of the curve.
        target_ks : float
            Largest KS distance between two groups that is acceptable in the population.

        Returns
        -------
        bool
            Whether it does.
        """
        certified = point.ks_certified is None or point.ks_certified <= target_ks
        return certified and meets(*self.estimates(point), target_ks)

    def unresolved(self, target_ks: float) -> str:
        """How many pairs have a noise level above the target, in words."""
        resolvable = self.resolvable(target_ks)
        few = f"{np.count_nonzero(~resolvable)} of {len(resolvable)} pairs of groups"
        return few if resolvable.any() else "every pair of groups"

    def _limits(self, target_ks: float) -> Array:
        """(P,) what the estimate of each pair may be for a point to be chosen.

        A pair whose noise level exceeds the target does not drive the choice; where that is so of all, the target
        counts as what these rows can tell from parity: to go further would be to pay for noise.
        """
        resolvable = self.resolvable(target_ks)
        if self.confidence is not None or resolvable.all():
            return np.full(len(self.pairs), target_ks)
        if resolvable.any():
            return np.where(resolvable, target_ks, np.inf)
        return np.maximum(target_ks, self.pair_resolved)

    def select(self, *, target_ks: float) -> CurvePoint:
        """Return the point to take for a target.

        - The original model, if it meets the target.
        - Else the most accurate point that meets the target.
        - If none does, the most accurate of those that these rows cannot tell from the fairest.

        A pair of groups whose noise level exceeds the target does not drive the choice. If that is so for all pairs,
        the target counts as the smallest KS that these rows can tell from parity.

        Parameters
        ----------
        target_ks : float
            Largest KS distance between two groups that is acceptable in the population.

        Returns
        -------
        CurvePoint
            The point.
        """
        if self.original is not None and self.meets(self.original, target_ks):
            return self.original
        compared = {
            p.index: self.estimates(p)[0] if self.resolvable(target_ks).any() else p.ks_pairs for p in self.points
        }
        return self._within(self._limits(target_ks), compared, target_ks)

    def closest_to_parity(self) -> CurvePoint:
        """Return the point to take without a target.

        It is that of a target of 0.05, or of the smallest KS that these rows can tell from parity if that is larger.

        Returns
        -------
        CurvePoint
            The point.
        """
        compared = {point.index: point.ks_pairs for point in self.points}
        return self._within(np.maximum(PARITY, self.pair_resolved), compared, np.inf)

    def _within(self, limits: Array, compared: Mapping[int, Sequence[float]], certified_for: float) -> CurvePoint:
        """The original model, or the most accurate point, whose pairs, in ``compared`` by index, keep limits (P,)."""
        certified = [p for p in self.points if p.ks_certified is None or p.ks_certified <= certified_for]
        meeting = [point for point in certified if (np.asarray(compared[point.index]) <= limits).all()]
        if self.original is not None and self.original in meeting:
            return self.original
        if not meeting:
            driving = np.isfinite(limits)
            largest = np.array([np.asarray(p.ks_pairs)[driving].max() for p in self.points])
            alike = np.hypot(largest.min(), np.asarray(self.pair_resolved)[driving].max())
            meeting = [point for point, ks in zip(self.points, largest, strict=True) if ks <= alike]
        return _most_accurate(meeting)

    def model(self, i: int) -> Any:
        """Return the repaired model of a point, of the type of the original model.

        Parameters
        ----------
        i : int or CurvePoint
            Index of the point, or the point.

        Returns
        -------
        object
            The repaired model.
        """
        return self.adapter.replace(self.weights[range(len(self.points))[i]]).model

    def plot(self, *, target_ks: float | None = None, ax: Any = None) -> Any:
        """Draw error over KS distance, as :func:`esvdfair.plots.plot_curve` does.

        Parameters
        ----------
        target_ks : float, default=None
            Target to mark.
        ax : matplotlib Axes, default=None
            Axes to draw on. If None, new ones are made.

        Returns
        -------
        Axes
            The axes.
        """
        return plot_curve(self, target_ks=target_ks, ax=ax)

    def _repr_html_(self) -> str:
        """A small picture of error over KS distance, and the table."""
        ks, mse = (np.array([getattr(point, name) for point in self.points]) for name in ("ks", "mse"))
        x = 10 + 280 * ks / max(ks.max(), self.ks_floor, 1e-12)
        y = 110 - 100 * (mse - mse.min()) / (np.ptp(mse) or 1.0)
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="#0072b2"/>' for a, b in zip(x, y, strict=True))
        noise = 280 * self.ks_floor / max(ks.max(), self.ks_floor, 1e-12)
        picture = (
            '<svg width="300" height="120" role="img" aria-label="mean squared error over KS distance">'
            f'<rect x="10" width="{noise:.1f}" height="120" fill="#eee"><title>noise level</title></rect>{dots}</svg>'
        )
        columns = ["mse", "r2", "ks", "ks_low", "ks_high", "ks_population", "target"]
        table = self.to_frame()[columns].to_html(border=0, float_format=lambda value: f"{value:.3g}")
        return (
            f"<div>{picture}<p>Mean squared error (up) over KS distance (right) on {self.evaluated_on} rows; grey: "
            f"noise level {self.ks_floor:.3f}.</p>{table}</div>"
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each point.

        ``ks_population`` and ``ks_certified`` are compared with a target.

        Returns
        -------
        DataFrame
            The points.
        """
        frame = pd.DataFrame([point.to_dict() for point in self.points])
        return frame if self.confidence is not None else frame.drop(columns="ks_certified")


def _most_accurate(points: Iterable[CurvePoint]) -> CurvePoint:
    return min(points, key=lambda point: (point.mse, point.ks_population))


def choose(
    curve: Curve, *, target_ks: float | None = None, max_mse_increase: float | None = None, closest: bool = False
) -> CurvePoint:
    """A point of the curve, with a warning when it is not as asked for.

    Parameters
    ----------
    target_ks : as :meth:`Curve.select`
    max_mse_increase : the fairest point whose error is at most this part above the original model's
    closest : without either, :meth:`Curve.closest_to_parity`; else the most accurate point that is pressed for parity
        at all (``strength`` above 0)
    """
    least = 0.0
    if max_mse_increase is not None:
        assert curve.original is not None
        within = [point for point in curve.points if point.mse <= curve.original.mse * (1 + max_mse_increase)]
        point = min(within, key=lambda point: (point.ks_population, point.mse))
        words = f"No candidate within `max_mse_increase={max_mse_increase:g}` improves parity"
        _warn(f"{words}; returning the original model." if point is curve.original else "")
    elif target_ks is not None:
        point, least = curve.select(target_ks=target_ks), KEPT
        _warn("" if curve.meets(point, target_ks) else _why_missed(curve, point, target_ks))
    elif closest:
        point, least = curve.closest_to_parity(), KEPT
    else:
        point = _most_accurate(point for point in curve.points if point.strength > 0)
    _warn(_why_useless(curve, point, least=least))
    return point


def _warn(words: str) -> None:
    if words:
        warnings.warn(words, ESVDFairWarning, stacklevel=5)


def _rows_text(curve: Curve) -> str:
    return {"heldout": "held-out", "train": "training"}.get(curve.evaluated_on, curve.evaluated_on) + " rows"


def _why_missed(curve: Curve, point: CurvePoint, target_ks: float) -> str:
    """Why the target is not met, what was taken instead, and what would help."""
    floors, resolvable = np.asarray(curve.pair_floors), curve.resolvable(target_ks)
    rows = _rows_text(curve)
    taken = (
        "the original model is returned"
        if point is curve.original
        else f"the repaired model has an estimated population KS of {point.ks_population:.3f} and error {point.mse:.4g}"
    )
    if point.ks_certified is not None and point.ks_certified > target_ks:
        needed = "No number of rows would do, since no estimate is below the target."
        # A bound exceeds its estimate by a margin that falls as 1/√rows.
        margins = [
            (p.ks_certified - p.ks_population) / (target_ks - p.ks_population)
            for p in curve.points
            if p.ks_certified is not None and p.ks_population < target_ks
        ]
        if margins:
            needed = f"About {_times(min(margins) ** 2)} times as many {rows} would be needed."
        return (
            f"No candidate can be certified to meet `target_ks={target_ks:g}` at `confidence={curve.confidence:g}` on "
            f"the {rows}; {taken}. {needed}"
        )
    if resolvable.all():
        return (
            f"No candidate meets `target_ks={target_ks:g}`; {taken}, and KS {point.ks:.3f} on the {rows}. See "
            "`curve_` for what can be reached."
        )
    worst = int(floors.argmax())
    needed = "No number of rows resolves a target of 0"
    if target_ks > 0:
        needed = f"About {_times((floors[worst] / target_ks) ** 2)} times as many rows would resolve it"
    others = resolvable.any() and max(np.asarray(point.ks_pairs)[resolvable]) > target_ks
    return (
        f"`target_ks={target_ks:g}` is below the noise level of {curve.unresolved(target_ks)}: chance alone gives a KS "
        f"of about {floors[worst]:.3f} between {' and '.join(map(label_text, curve.pairs[worst]))} on the {rows}. "
        f"{needed}; {taken}." + (" Among the other pairs no candidate meets it either." if others else "")
    )


def _times(factor: float) -> str:
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}" if factor < 1e4 else "more than 10,000"


def _why_useless(curve: Curve, point: CurvePoint, *, least: float) -> str:
    """What is wrong with a point that is worse than the original in all, or keeps less than a part of its R²."""
    original = curve.original
    if original is None or point is original:
        return ""
    if point.mse > original.mse and point.ks > original.ks:
        return (
            f"The repaired model is worse than the original in both error ({original.mse:.4g} to {point.mse:.4g}) and "
            f"KS ({original.ks:.3f} to {point.ks:.3f}) on the {_rows_text(curve)}. Pass `target_ks` to keep the "
            "original where nothing is better."
        )
    if not point.constant and not (original.r2 > 0 and point.r2 < least * original.r2):
        return ""
    if point.constant:
        keeps = "predicts nearly the same number for everybody"
    elif point.r2 <= 0:
        keeps = "predicts no better than a constant"
    else:
        keeps = f"keeps {point.r2 / original.r2:.0%} of the variance that the original model explains"
    said = f"The repaired model {keeps} (R² {original.r2:.3f} to {point.r2:.3f})."
    keeping = [p for p in curve.points if p.r2 >= KEPT * original.r2 and p is not original]
    if keeping:
        best = min(keeping, key=lambda p: (p.ks_population, p.mse))
        said += (
            f" The fairest point that keeps half of it, number {best.index} of the curve, has an estimated population "
            f"KS of {best.ks_population:.3f}."
        )
    return f"{said} A milder `target_ks` or `max_mse_increase` keeps more; see `curve_`."
