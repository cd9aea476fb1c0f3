"""The trade-off curve: what every candidate reaches on rows that did not fit it, and the rule that picks one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.candidates import Candidate
from esvdfair.core.checks import Label
from esvdfair.core.metrics import group_mse, ks_distance_ci, ks_floor, ks_from_codes, mean_gap, variance_gap

Array = NDArray[np.float64]
Weights = Mapping[str, tuple[Array, Array | None]]

MARGIN = 0.2
"""Part of the sampling floor that is added to the expected KS distance of the best of many candidates."""


@dataclass(frozen=True)
class Judge:
    """Rows that judge predictions: labels, groups, weights.

    Attributes
    ----------
    y : (n,) labels; the untouched model's own predictions when there are none
    codes : (n,) groups, positions in ``labels``
    weight : (n,)
    labels : the groups
    """

    y: Array
    codes: NDArray[np.intp]
    weight: Array
    labels: tuple[Label, ...]

    def mse(self, prediction: Array) -> Array:
        """(k,) weighted mean squared error of each of k columns of predictions (n, k)."""
        share = self.weight / self.weight.sum()
        # Column by column, here and below: all candidates at once would be several copies of a large table.
        return np.array([share @ (column - self.y) ** 2 for column in prediction.T])

    def ks(self, prediction: Array) -> Array:
        """(k,) Kolmogorov–Smirnov distance between the groups, for each column."""
        groups = len(self.labels)
        weight = None if self.unweighted else self.weight
        return np.array([ks_from_codes(column, self.codes, groups, weight) for column in prediction.T])

    def gaps(self, prediction: Array) -> tuple[Array, Array]:
        """(k,) largest differences of group means and of (unbiased) group variances, for each column."""
        rows = {"sensitive_features": self.codes, "sample_weight": self.weight}
        return (
            np.array([mean_gap(column, **rows) for column in prediction.T]),
            np.array([variance_gap(column, **rows) for column in prediction.T]),
        )

    def group_mse(self, prediction: Array) -> dict[Label, float]:
        """Mean squared error of one vector of predictions in every group: who pays."""
        by_code = group_mse(self.y, prediction, sensitive_features=self.codes, sample_weight=self.weight)
        return dict(zip(self.labels, by_code.values(), strict=True))

    def interval(self, prediction: Array, floor: float, seed: int) -> tuple[float, float]:
        """Confidence interval of the KS distance of one vector of predictions."""
        weight = None if self.unweighted else self.weight
        return ks_distance_ci(
            prediction, sensitive_features=self.codes, sample_weight=weight, floor=floor, random_state=seed
        )

    @property
    def unweighted(self) -> bool:
        return bool(np.all(self.weight == self.weight[0]))


@dataclass(frozen=True)
class Judged:
    """Predictions of k candidates on the rows that judge and on those that fitted them.

    Attributes
    ----------
    judging, training : (rows, k)
    judge, training_judge : of these rows; the second is None when the same rows fitted and judge
    judged_on : "validation", "heldout" or "train"
    """

    judging: Array
    training: Array
    judge: Judge
    training_judge: Judge | None
    judged_on: str

    def judged_ks(self, floor: float) -> Array:
        """(k,) the KS distance to expect on fresh rows, as many as those that judge.

        The distance on the judging rows is honest but noisy, and the best of many candidates is a lucky one. The
        distance k on all rows is precise but too small, since most of them fitted; fresh rows add their own sampling
        noise to it, about ``√(k² + floor²)``. Their mean, plus a margin that grows with the floor, is the estimate; it
        is never below the distance on the judging rows. Where no training rows are at hand, the distance on the judging
        rows, which has that noise in it, stands for both.
        """
        alone = self.judge.ks(self.judging)
        if self.training_judge is None:
            return alone
        if not len(self.training_judge.codes):
            return alone + MARGIN * floor
        together = Judge(
            np.concatenate([self.judge.y, self.training_judge.y]),
            np.concatenate([self.judge.codes, self.training_judge.codes]),
            np.concatenate([self.judge.weight, self.training_judge.weight]),
            self.judge.labels,
        )
        columns = zip(self.judging.T, self.training.T, strict=True)
        on_all = np.concatenate([together.ks(np.concatenate(pair)[:, None]) for pair in columns])
        expected: Array = (alone + np.hypot(on_all, floor)) / 2 + MARGIN * floor
        return np.maximum(alone, expected)


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
class Curve:
    """Points from the most accurate to the fairest; ``model(i)`` builds the model of one without refitting.

    Attributes
    ----------
    points : tuple of CurvePoint, by falling KS distance
    ks_floor : what two samples of one distribution would show at these group sizes
    evaluated_on : "validation", "heldout" or "train"
    """

    points: tuple[CurvePoint, ...]
    ks_floor: float
    evaluated_on: str
    weights: tuple[Weights, ...] = field(repr=False)
    build: Callable[[Weights], Any] = field(repr=False)

    def __len__(self) -> int:
        return len(self.points)

    def select(self, *, target_ks: float) -> CurvePoint:
        """The most accurate point that meets the target; the fairest when none does.

        A point meets the target when ``judged_ks`` does: the KS distance to expect on fresh people, which is never
        below that on the judging rows. The best of many candidates on few rows is a lucky one; this keeps the promise
        (see :meth:`Judged.judged_ks`).
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


def make_curve(
    judged: Judged,
    candidates: Sequence[Candidate],
    weights: Sequence[Weights],
    build: Callable[[Weights], Any],
    seed: int,
    *,
    at_least: int = 20,
) -> tuple[Curve, list[int]]:
    """The candidates that are not beaten in both error and parity, as a curve; and which candidates they are.

    When fewer than ``at_least`` are unbeaten, those that are beaten only by them follow, and so on.
    """
    judge = judged.judge
    floor = ks_floor(sensitive_features=judge.codes)
    mse, ks, judged_ks = judge.mse(judged.judging), judge.ks(judged.judging), judged.judged_ks(floor)
    layers = _fronts(mse, judged_ks)
    chosen: list[int] = []
    for front in layers:
        if len(chosen) >= at_least:
            break
        chosen += front
    order = sorted(chosen, key=lambda i: (-judged_ks[i], mse[i]))
    mean_gaps, variance_gaps = judge.gaps(judged.judging[:, order])
    points = []
    for position, i in enumerate(order):
        low, high = judge.interval(judged.judging[:, i], floor, seed)
        points.append(
            CurvePoint(
                mse=float(mse[i]),
                ks=float(ks[i]),
                ks_low=low,
                ks_high=high,
                mean_gap=float(mean_gaps[position]),
                variance_gap=float(variance_gaps[position]),
                target=candidates[i].target,
                ridge=candidates[i].ridge,
                strength=candidates[i].strength,
                judged_ks=float(judged_ks[i]),
                index=position,
            )
        )
    return Curve(tuple(points), floor, judged.judged_on, tuple(weights[i] for i in order), build), order


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
