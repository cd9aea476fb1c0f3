"""The trade-off curve: what every fit reaches on rows that did not fit it, and the rule that picks one."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import Label
from esvdfair.core.ks import Null, ks_from_codes, ks_null
from esvdfair.core.metrics import group_mse, ks_distance_ci, mean_gap, variance_gap
from esvdfair.core.refit.quadratic import Fit
from esvdfair.distributed import broadcast
from esvdfair.exceptions import ESVDFairWarning, Given
from esvdfair.methods import Predicted, predict, weights_of
from esvdfair.models.base import ModelAdapter, Weights
from esvdfair.sample import Effort, Rows, Sample

Array = NDArray[np.float64]

MARGIN = 0.2
"""Part of the sampling floor that is added to the expected KS distance of the best of many candidates."""
DIGITS = 1e-9
"""Part of its scale to which a prediction, an error or a distance is rounded before it is compared."""


@dataclass(frozen=True)
class CurvePoint:
    """One repaired model on the trade-off curve, judged on rows that did not fit it.

    Attributes
    ----------
    mse, ks, ks_low, ks_high, mean_gap, variance_gap : on the judging rows
    target : what the refit aimed at: "labels", "predictions" or "optimum 0.05"
    ridge : ρ, relative to the features' mean variance
    strength : λ_w of transport, the factor on the reductions for paper and exact, …: 0 is the weakest
    judged_ks : the KS distance that the rule compares with the target (see :meth:`Curve.select`)
    index : position in ``Curve.points``; a point can stand wherever its index can
    """

    mse: float
    ks: float
    ks_low: float
    ks_high: float
    mean_gap: float
    variance_gap: float
    target: str
    ridge: float
    strength: float
    judged_ks: float
    index: int

    def __index__(self) -> int:
        return self.index


@dataclass(frozen=True)
class Builder:
    """Makes the model of a point: a copy of the original with other weights."""

    adapter: ModelAdapter

    def __call__(self, weights: Weights) -> Any:
        return self.adapter.replace(weights).model


@dataclass(frozen=True)
class Curve:
    """Points from the most accurate to the fairest; ``model(i)`` builds the model of one without refitting.

    Attributes
    ----------
    points : tuple of CurvePoint, by falling KS distance
    ks_floor : what two samples of one distribution would show at these group sizes
    evaluated_on : "validation", "heldout" or "train"
    weights : of every point, what it puts in place of the layers of the model
    ks_chance : what they would stay below in 95 % of cases; a larger distance is more than chance
    """

    points: tuple[CurvePoint, ...]
    ks_floor: float
    evaluated_on: str
    weights: tuple[Weights, ...] = field(repr=False)
    build: Callable[[Weights], Any] = field(repr=False)
    ks_chance: float = 1.0

    def __len__(self) -> int:
        return len(self.points)

    def select(self, *, target_ks: float) -> CurvePoint:
        """The most accurate point that meets the target; the fairest when none does.

        A point meets the target when ``judged_ks`` does: the KS distance to expect on fresh people, which is never
        below that on the judging rows. The best of many candidates on few rows is a lucky one; this keeps the promise
        (see :func:`expected_ks`).
        """
        meeting = [point for point in self.points if point.judged_ks <= target_ks]
        if not meeting:
            return min(self.points, key=lambda point: (point.judged_ks, point.mse))
        return min(meeting, key=lambda point: (point.mse, point.judged_ks))

    def model(self, i: int) -> Any:
        """The repaired model of point i, of the type of the model that was given."""
        return self.build(self.weights[range(len(self.points))[i]])

    def to_frame(self) -> pd.DataFrame:
        """One row for each point."""
        frame = pd.DataFrame([asdict(point) for point in self.points])
        return frame.drop(columns=["index", "judged_ks"])


# --- judging -------------------------------------------------------------------------------------------------------


def judge(
    sample: Sample,
    fits: Sequence[Fit],
    adapter: ModelAdapter,
    *,
    predicted: Predicted | None = None,
    effort: Effort | None = None,
    seed: int = 0,
) -> tuple[Curve, list[int]]:
    """The fits that are not beaten in both error and parity, as a curve; and which fits they are.

    When fewer than ``effort.points`` are unbeaten, those that are beaten only by them follow, and so on.

    Parameters
    ----------
    adapter : of the untouched model, which the models of the curve are copies of
    predicted : what the fits predict, where it is known already
    """
    effort = effort or Effort()

    def look() -> tuple[list[CurvePoint], float, float, list[int]]:
        rows, known = sample.judging, predict(sample, fits) if predicted is None else predicted
        # Neither the order of two rows nor that of two candidates may hang on the last bits of a sum.
        judging, training = (_rounded(part, np.ptp(rows.prediction)) for part in known)
        null = ks_null(rows.codes, len(sample.labels), None, _weight(rows), seed)
        floor = null.floor
        mse, ks = mean_squared_errors(rows, judging), ks_distances(rows, judging)
        expected = expected_ks(sample, judging, training, ks, floor)
        order: list[int] = []
        for front in _fronts(_rounded(mse, mse.max()), _rounded(expected, 1.0)):
            if len(order) >= effort.points:
                break
            order += front
        order.sort(key=lambda i: (-expected[i], mse[i]))
        points = []
        for position, i in enumerate(order):
            seen = _Seen(rows, judging[:, i])
            low, high = seen.interval(null, effort.resamples, seed)
            points.append(
                CurvePoint(
                    mse=float(mse[i]),
                    ks=float(ks[i]),
                    ks_low=low,
                    ks_high=high,
                    mean_gap=seen.mean_gap,
                    variance_gap=seen.variance_gap,
                    target=fits[i].target,
                    ridge=fits[i].ridge,
                    strength=fits[i].strength,
                    judged_ks=float(expected[i]),
                    index=position,
                )
            )
        return points, floor, null.quantile(0.95), order

    points, floor, chance, order = broadcast(look)
    weights = tuple(weights_of(sample.layer, fits[i]) for i in order)
    return Curve(tuple(points), floor, sample.judged_on, weights, Builder(adapter), chance), order


def _rounded(values: Array, unit: float) -> Array:
    """To a billionth of the unit."""
    step = DIGITS * max(float(unit), np.finfo(np.float64).tiny)
    return np.asarray(np.round(values / step) * step, dtype=np.float64)


def expected_ks(sample: Sample, judging: Array, training: Array, alone: Array, floor: float) -> Array:
    """(k,) the KS distance of each fit to expect on fresh rows, as many as those that judge.

    The distance on the judging rows, ``alone``, is honest but noisy, and the best of many candidates is a lucky one.
    The distance k on all rows is precise but too small, since most of them fitted; fresh rows add their own sampling
    noise to it, about ``√(k² + floor²)``. Their mean, plus a margin that grows with the floor, is the estimate; it is
    never below the distance on the judging rows. Where no training rows are at hand, the distance on the judging rows,
    which has that noise in it, stands for both.
    """
    if sample.judged_on == "train":
        return alone
    if not len(sample.training):
        return alone + MARGIN * floor
    rows = [sample.judging, sample.training]
    together = replace(
        sample.judging,
        codes=np.concatenate([part.codes for part in rows]),
        weight=np.concatenate([part.weight for part in rows]),
    )
    pairs = zip(judging.T, training.T, strict=True)
    on_all = np.concatenate([ks_distances(together, np.concatenate(pair)[:, None]) for pair in pairs])
    expected: Array = (alone + np.hypot(on_all, floor)) / 2 + MARGIN * floor
    return np.maximum(alone, expected)


def mean_squared_errors(rows: Rows, prediction: Array) -> Array:
    """(k,) weighted mean squared error of each column of predictions (n, k)."""
    share = rows.weight / rows.weight.sum()
    # Column by column, here and below: all candidates at once would be several copies of a large table.
    return np.array([share @ (column - rows.y) ** 2 for column in prediction.T])


def ks_distances(rows: Rows, prediction: Array) -> Array:
    """(k,) Kolmogorov–Smirnov distance between the groups, for each column."""
    weight, groups = _weight(rows), int(rows.codes.max()) + 1
    return np.array([ks_from_codes(column, rows.codes, groups, weight) for column in prediction.T])


def _weight(rows: Rows) -> Array | None:
    """The weights, or None when they are equal."""
    return None if np.all(rows.weight == rows.weight[0]) else rows.weight


class _Seen:
    """One vector of predictions on the judging rows, and what can be said of it."""

    def __init__(self, rows: Rows, prediction: Array) -> None:
        self._rows, self._prediction = rows, prediction
        self._groups: dict[str, Any] = {"sensitive_features": rows.codes, "sample_weight": rows.weight}

    @property
    def mean_gap(self) -> float:
        return mean_gap(self._prediction, **self._groups)

    @property
    def variance_gap(self) -> float:
        return variance_gap(self._prediction, **self._groups)

    @property
    def group_mse(self) -> list[float]:
        return list(group_mse(self._rows.y, self._prediction, **self._groups).values())

    def interval(self, null: Null, resamples: int, seed: int) -> tuple[float, float]:
        return ks_distance_ci(
            self._prediction,
            sensitive_features=self._rows.codes,
            sample_weight=_weight(self._rows),
            floor=null,
            n_resamples=resamples,
            random_state=seed,
        )


def _fronts(mse: Array, ks: Array) -> list[list[int]]:
    """Candidates sorted into fronts: the unbeaten, those that only the unbeaten beat, and so on."""
    left = np.lexsort((ks, mse)).tolist()  # by error; an unbeaten one has a lower KS than all before it
    fronts = []
    while left:
        best, front, rest = np.inf, [], []
        for i in left:
            if ks[i] < best:
                best = ks[i]
                front.append(i)
            else:
                rest.append(i)
        fronts.append(front)
        left = rest
    return fronts


# --- choosing ------------------------------------------------------------------------------------------------------


def choose(
    curve: Curve,
    *,
    target_ks: float | None = None,
    max_mse_increase: float | None = None,
    mse_before: float = np.inf,
    as_far_as_told: bool = False,
) -> CurvePoint:
    """A point of the curve, with a warning when none is as asked for.

    Parameters
    ----------
    target_ks : the most accurate point that meets it
    max_mse_increase : the fairest point whose error is at most this part above ``mse_before``
    as_far_as_told : without either, the most accurate point that these rows cannot tell from parity; else the most
        accurate of all
    """
    if max_mse_increase is not None:
        return _fairest_within(curve, max_mse_increase, mse_before)
    if target_ks is None:
        if as_far_as_told:
            return curve.select(target_ks=max(0.05, curve.ks_chance))
        return min(curve.points, key=lambda point: point.mse)
    point = curve.select(target_ks=target_ks)
    if target_ks < curve.ks_floor:
        _note(
            "{target_ks} is below {floor:.3f}, what two samples of one distribution would show at these group sizes; "
            "no model can be shown to meet it on these rows. More rows in the smallest group would lower that floor.",
            target_ks=Given(target_ks),
            floor=curve.ks_floor,
        )
    elif point.judged_ks > target_ks:
        _note(
            "no candidate {fails} {target_ks}; took the fairest, with KS {ks:.3f} [{low:.3f}, {high:.3f}] on the "
            "{rows} rows and about {expected:.3f} to expect on fresh ones. See {curve_} for what can be reached.",
            fails="meets" if point.ks > target_ks else "can be relied on to keep",
            target_ks=Given(target_ks),
            ks=point.ks,
            low=point.ks_low,
            high=point.ks_high,
            rows=curve.evaluated_on,
            expected=point.judged_ks,
            curve_=Given(),
        )
    return point


def _fairest_within(curve: Curve, increase: float, before: float) -> CurvePoint:
    within = [point for point in curve.points if point.mse <= before * (1 + increase)]
    if within:
        return min(within, key=lambda point: (point.judged_ks, point.mse))
    point = min(curve.points, key=lambda point: point.mse)
    _note(
        "no candidate stays within {max_mse_increase}; took the most accurate, with mean squared error {after:.4g} "
        "against {before:.4g} before.",
        max_mse_increase=Given(increase),
        after=point.mse,
        before=before,
    )
    return point


def _note(template: str, **values: Any) -> None:
    warnings.warn(ESVDFairWarning(template, values), stacklevel=5)


def summarise(
    sample: Sample, after: Array, curve: Curve, point: CurvePoint, *, method: str, target_ks: float | None
) -> dict[str, Any]:
    """What was reached on the judging rows, ``after`` (n,) being what the chosen point predicts for them."""
    rows = sample.judging
    both = np.column_stack([rows.prediction, after])
    mse, ks = mean_squared_errors(rows, both), ks_distances(rows, both)
    old, new = _Seen(rows, rows.prediction), _Seen(rows, after)

    def by_group(values: Sequence[float]) -> Mapping[Label, float]:
        return dict(zip(sample.labels, values, strict=True))

    return {
        "method": method,
        "target_ks": target_ks,
        "met": None if target_ks is None else bool(ks[1] <= target_ks),
        "mse_before": float(mse[0]),
        "mse_after": float(mse[1]),
        "ks_before": float(ks[0]),
        "ks_after": float(ks[1]),
        "ks_interval": (point.ks_low, point.ks_high),
        "ks_floor": curve.ks_floor,
        "group_sizes": by_group(np.bincount(rows.codes, minlength=len(sample.labels)).tolist()),
        "group_mse_before": by_group(old.group_mse),
        "group_mse_after": by_group(new.group_mse),
        "mean_gap_before": old.mean_gap,
        "mean_gap_after": new.mean_gap,
        "variance_gap_before": old.variance_gap,
        "variance_gap_after": new.variance_gap,
        "evaluated_on": sample.judged_on,
        "error_against": sample.error_against,
        "rows": len(rows),
    }
