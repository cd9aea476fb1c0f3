"""What can be said of predictions, their groups and, if there are any, labels: figures and a verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from esvdfair.core.checks import check_column, check_groups, check_strata, check_weight
from esvdfair.core.ks import (
    Groups,
    Peak,
    Ranked,
    adjusted_weights,
    ks_between,
    ks_interval,
    ks_null,
    ks_peak,
    ks_to_rest,
    outside_support,
)
from esvdfair.core.metrics import wasserstein_distance
from esvdfair.exceptions import Given, InputError
from esvdfair.text import label_text, number, share

Array = NDArray[np.float64]
Codes = NDArray[np.intp]


@dataclass(frozen=True)
class GroupFigures:
    """One group: rows, mean and spread of its predictions, its error, its distance to everybody else.

    Every pair is a 95 % interval; errors are None without labels.
    """

    group: str
    rows: int
    mean: float
    mean_interval: tuple[float, float]
    std: float
    ks_to_rest: float
    ks_to_rest_interval: tuple[float, float]
    mse: float | None
    mse_interval: tuple[float, float] | None
    mean_error: float | None


@dataclass(frozen=True)
class Adjusted:
    """The gaps of groups that are reweighted to the same mix of strata (docs/method.md 2.8)."""

    ks: float
    ks_interval: tuple[float, float]
    ks_floor: float
    ks_chance: float
    mean_gap: float
    outside_support: float
    """Share of people who are like nobody of some other group; they are left out."""


@dataclass(frozen=True)
class Audit:
    """All figures of an audit, of the rows that carry weight; ``widest`` numbers the groups as ``groups`` does."""

    rows: int
    ks: float
    ks_interval: tuple[float, float]
    ks_floor: float
    mean_gap: float
    variance_gap: float
    wasserstein: float
    mse: float | None
    widest: Peak
    groups: tuple[GroupFigures, ...]
    ks_chance: float
    """What parity would stay below in 95 % of cases on so many rows."""
    adjusted: Adjusted | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, such as JSON takes."""
        peak, (more, fewer) = self.widest, self._farthest()
        widest = {
            "threshold": peak.threshold,
            "more": more,
            "more_share": peak.high_share,
            "fewer": fewer,
            "fewer_share": peak.low_share,
        }
        return {**asdict(self), "widest": widest}

    def verdict(self) -> str:
        """What the figures say, in plain words."""
        parts = [self._difference()]
        if self.adjusted is not None:
            parts.append(_explained(self.ks, self.adjusted))
        if self.ks > self.ks_chance:
            peak, (more, fewer) = self.widest, self._farthest()
            parts.append(
                f"Where they differ most, {peak.high_share:.0%} of {more} but {peak.low_share:.0%} of {fewer} are "
                f"predicted {number(peak.threshold)} or less."
            )
            low, high = (end(self.groups, key=lambda g: g.mean) for end in (min, max))
            parts.append(f"The mean of {high.group} is {number(high.mean - low.mean)} above that of {low.group}.")
        parts.extend(self._who_pays())
        return " ".join(parts)

    def _farthest(self) -> tuple[str, str]:
        """The two groups that differ most: the one with more of its people at or below the threshold first."""
        return self.groups[self.widest.high_group].group, self.groups[self.widest.low_group].group

    def _difference(self) -> str:
        ks, floor = share(self.ks), share(self.ks_floor)
        if self.ks <= self.ks_chance:
            return f"No difference beyond chance: KS {ks}, and parity itself would show about {floor} on so many rows."
        times = f"KS {ks}, {self.ks / self.ks_floor:.1f} times what parity would show on so many rows"
        if self.ks_interval[0] < self.ks / 2:
            return f"The groups are predicted differently, but how much is uncertain: {times}."
        return f"The groups are predicted differently: {times}."

    def _who_pays(self) -> list[str]:
        errors = [(g.mse, g.mse_interval, g.group) for g in self.groups if g.mse is not None and g.mse_interval]
        if not errors:
            return []
        best, worst = min(errors), max(errors)
        if best[1][1] >= worst[1][0]:
            return ["The model errs about as much in every group."]
        return [
            f"The model errs most on {worst[2]}: mean squared error {number(worst[0])}, {number(best[0])} on {best[2]}."
        ]


def _explained(raw: float, adjusted: Adjusted) -> str:
    """How much of the raw distance is left between people who are alike in the controls."""
    left = f"KS {share(adjusted.ks)}, where {share(raw)} without adjusting"
    if adjusted.ks <= adjusted.ks_chance:
        return f"Among people who are alike in the controls, no difference beyond chance: {left}."
    return f"Among people who are alike in the controls, the groups still differ: {left}."


def audit_predictions(
    predictions: Any,
    groups: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    control_features: Any = None,
    seed: int = 0,
) -> Audit:
    """Figures of predictions by group, with errors when there are labels.

    Parameters
    ----------
    predictions : (rows,)
    groups : (rows,) labels or (rows, attributes), whose combinations are the groups
    y : (rows,) labels, if there are any
    sample_weight : (rows,) how many people a row stands for; rows of weight 0 are left out
    control_features : (rows,) or several columns that gaps are adjusted for, beside the raw ones
    seed : of the resamples behind the intervals

    Raises
    ------
    ValueError
        Fewer than two groups, a group of one row, lengths that differ, missing or infinite values.

    Examples
    --------
    >>> found = audit_predictions([1, 2, 3, 4], ["a", "a", "b", "b"])
    >>> found.ks, found.mean_gap, [group.rows for group in found.groups]
    (1.0, 2.0, [2, 2])
    """
    scores = check_column(predictions, len(predictions), "predictions")
    truth = None if y is None else check_column(y, len(scores), "y")
    labels, codes = check_groups(groups, len(scores), "error")
    weight = None if sample_weight is None else check_weight(sample_weight, len(scores))
    strata = None if control_features is None else check_strata(control_features, len(scores))[1]
    if weight is not None:
        live = weight > 0
        strata = None if strata is None else strata[live]
        scores, codes, weight, truth = scores[live], codes[live], weight[live], None if truth is None else truth[live]
    names = [label_text(label) for label in labels]
    sizes = np.bincount(codes, minlength=len(names))
    if sizes.min() < 2:
        raise InputError(
            "group {name!r} has {rows} row(s); a distribution needs at least 2. Pass more rows, or leave small groups "
            "out: {min_group_rows}.",
            name=names[int(sizes.argmin())], rows=int(sizes.min()), min_group_rows=Given(),
        )  # fmt: skip
    found = Groups.of(codes, len(names), weight)
    return Audit(
        rows=len(scores),
        **_distances(scores, found, seed),
        variance_gap=float(np.ptp(found.variances(scores))),
        wasserstein=wasserstein_distance(scores, sensitive_features=codes, sample_weight=weight),
        mse=None if truth is None else float(np.average((scores - truth) ** 2, weights=weight)),
        widest=ks_peak(scores, found),
        groups=_groups(names, Groups(codes, len(names), weight), scores, truth),
        adjusted=None if strata is None else _adjusted(scores, codes, len(names), strata, weight, seed),
    )


def _distances(scores: Array, groups: Groups, seed: int) -> dict[str, Any]:
    """What is said of the raw gaps and of adjusted ones."""
    null = ks_null(groups, scores, seed)
    return {
        "ks": ks_between(scores, groups),
        "ks_interval": ks_interval(Ranked(scores, groups), 0.95, floor=null, draws=1000, random_state=seed),
        "ks_floor": null.floor,
        "ks_chance": null.quantile(0.95),
        "mean_gap": float(np.ptp(groups.means(scores))),
    }


def _adjusted(scores: Array, codes: Codes, count: int, strata: Codes, weight: Array | None, seed: int) -> Adjusted:
    plain = np.ones(len(scores)) if weight is None else weight
    adjusted = adjusted_weights(codes, count, strata, plain)
    found = _distances(scores, Groups.of(codes, count, adjusted, strata), seed)
    return Adjusted(**found, outside_support=outside_support(plain, adjusted))


def _groups(names: Sequence[str], groups: Groups, scores: Array, truth: Array | None) -> tuple[GroupFigures, ...]:
    """The figures of every group; the rows are put in order of their groups once, however many there are."""
    to_rest, weight = ks_to_rest(scores, groups), groups.weight
    order = np.argsort(groups.codes, kind="stable")
    ends = np.cumsum(np.bincount(groups.codes, minlength=len(names)))[:-1]
    own = [None] * len(names) if weight is None else np.split(weight[order], ends)
    errors = [None] * len(names) if truth is None else np.split((scores - truth)[order], ends)
    found = []
    for g, (name, mine, w, error) in enumerate(zip(names, np.split(scores[order], ends), own, errors, strict=True)):
        found.append(
            GroupFigures(
                group=name,
                rows=len(mine),
                mean=float(np.average(mine, weights=w)),
                mean_interval=mean_interval(mine, w),
                std=_spread(mine, w),
                ks_to_rest=float(to_rest.distance[g]),
                ks_to_rest_interval=(float(to_rest.low[g]), float(to_rest.high[g])),
                mse=None if error is None else float(np.average(error**2, weights=w)),
                mse_interval=None if error is None else mean_interval(error**2, w),
                mean_error=None if error is None else float(np.average(error, weights=w)),
            )
        )
    return tuple(found)


def mean_interval(values: Array, weight: Array | None = None) -> tuple[float, float]:
    """Student's 95 % interval of a (weighted) mean; of values that are never negative it starts at 0 at the least.

    With Σw = 1 the variance is Σ w²(x−x̄)²/(1−w), s²/n without weights, on 1/Σw² − 1 degrees of freedom.
    """
    w = _shares(values, weight)
    mean = float(w @ values)
    variance = float((w**2 / (1 - w)) @ (values - mean) ** 2)
    half = float(stdtrit(1 / (w @ w) - 1, 0.975)) * variance**0.5  # Student's quantile
    low = max(0.0, mean - half) if values.min() >= 0 else mean - half
    return low, mean + half


def _shares(values: Array, weight: Array | None) -> Array:
    return np.full(len(values), 1 / len(values)) if weight is None else weight / weight.sum()


def _spread(values: Array, weight: Array | None) -> float:
    """Standard deviation with the unbiased divisor, n − 1 without weights."""
    w = _shares(values, weight)
    return float(np.sqrt(w @ (values - w @ values) ** 2 / (1 - w @ w)))
