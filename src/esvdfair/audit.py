"""Measure predictions by group: distances between pairs of groups, errors by group, and a verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from sklearn.metrics import r2_score

from esvdfair.core.checks import check_column, check_strata
from esvdfair.core.ks import Groups, adjusted_weights, ks_peak, ks_to_rest, live_groups, outside_support
from esvdfair.core.metrics import wasserstein_distance
from esvdfair.core.pairs import Pairs, meets
from esvdfair.exceptions import InputError
from esvdfair.problem import MIN_GROUP_ROWS
from esvdfair.text import interval, label_text, number, share, too_small

__all__ = ["Audit", "Distances", "GroupFigures", "PairFigures", "audit_predictions"]

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

SHOWN_PAIRS = 12
"""Pairs of groups, the largest differences first, that have intervals and are listed."""


@dataclass(frozen=True)
class GroupFigures:
    """One group: rows, mean and spread of its predictions, its error, its distance to everybody else.

    Every pair of numbers is a 95% interval; errors are None without labels.
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
class PairFigures:
    """Two groups: their KS distance, its noise level, estimated population KS, and whether they differ.

    ``established`` says that the difference is beyond chance, by Holm's procedure at 5% over all pairs. The 95%
    interval is None of pairs that are not shown.
    """

    groups: tuple[str, str]
    ks: float
    ks_interval: tuple[float, float] | None
    ks_population: float
    ks_floor: float
    p_value: float
    established: bool


@dataclass(frozen=True)
class Distances:
    """What is said of the groups that are compared, as they are or adjusted for control features.

    ``ks``, ``ks_population`` and ``mean_gap`` are the largest over the pairs; ``ks_interval`` is of the largest
    population KS of any pair; ``widest`` is where the most different pair differs most: the prediction ``threshold``
    and the shares at or below it of the group with ``more`` and of that with ``fewer``.
    """

    ks: float
    ks_population: float
    ks_interval: tuple[float, float]
    ks_floor: float
    mean_gap: float
    pairs: tuple[PairFigures, ...]
    widest: dict[str, Any]

    @property
    def largest(self) -> PairFigures | None:
        """The largest difference that is established."""
        found = (pair for pair in self.pairs if pair.established)
        return max(found, key=lambda pair: pair.ks_population, default=None)

    def meets(self, target_ks: float) -> bool:
        """Whether every pair keeps the target; the rule of `ESVDFair`."""
        return meets([p.ks_population for p in self.pairs], [p.ks_floor for p in self.pairs], target_ks)

    def exceeds(self, target_ks: float) -> bool:
        """Whether some pair misses the target, as far as these rows can tell: else it may be met or not."""
        seen = any(pair.ks_floor <= target_ks < pair.ks_population for pair in self.pairs)
        return seen or self.ks_interval[0] > target_ks

    def words(self) -> str:
        """The largest difference that is established, or that there is none."""
        pair, widest = self.largest, self.widest
        if pair is None:
            chance = f"where chance alone shows up to about {share(self.ks_floor)} at these group sizes"
            return f"No difference beyond chance: KS {share(self.ks)}, {chance}."
        noise = f"chance alone shows about {share(pair.ks_floor)}"
        parts = [
            f"Predictions differ between {pair.groups[0]} and {pair.groups[1]}: KS {share(pair.ks)} (95% interval "
            f"{interval(pair.ks_interval, share)}; {noise})."
        ]
        if pair.ks_interval is None or pair.ks_interval[0] < pair.ks / 2:
            parts.append("How large the difference is remains uncertain.")
        parts.append(
            f"{widest['more_share']:.0%} of {widest['more']} but {widest['fewer_share']:.0%} of {widest['fewer']} "
            f"score at or below {number(widest['threshold'])}."
        )
        if len(self.pairs) > 1:
            parts.append(f"{sum(p.established for p in self.pairs)} of {len(self.pairs)} pairs of groups differ.")
        return " ".join(parts)


@dataclass(frozen=True)
class Audit:
    """All figures of an audit, of the rows that carry weight."""

    rows: int
    between: Distances
    variance_gap: float
    wasserstein: float
    mse: float | None
    r2: float | None
    groups: tuple[GroupFigures, ...]
    groups_set_aside: dict[str, int]
    adjusted: Distances | None = None
    outside_support: float | None = None
    """Share of the rows in strata that lack a group; they leave the adjusted comparison."""

    @property
    def compared(self) -> Distances:
        """What a target is compared with: the adjusted distances where there are control features."""
        return self.adjusted or self.between

    def to_dict(self) -> dict[str, Any]:
        """Plain values, such as JSON takes."""
        found = asdict(self)
        return {"rows": found.pop("rows"), **found.pop("between"), **found}

    def verdict(self) -> str:
        """What the figures say, in plain words."""
        parts = [self.between.words()]
        if self.adjusted is not None:
            left = f"KS {share(self.adjusted.ks)}, {share(self.between.ks)} without adjusting"
            still = "the groups still differ" if self.adjusted.largest else "no difference beyond chance"
            parts.append(f"Adjusted for the control features, {still}: {left}.")
        if self.groups_set_aside:
            parts.append(too_small(self.groups_set_aside))
        large = (g for g in self.groups if g.group not in self.groups_set_aside)
        errors = [(g.mse, g.mse_interval, g.group) for g in large if g.mse is not None and g.mse_interval]
        if errors:
            (low, (_, low_end), best), (high, (high_start, _), worst) = min(errors), max(errors)
            largest = f"largest for {worst}: mean squared error {number(high)}, against {number(low)} for {best}."
            parts.append("Error is " + ("similar across groups." if low_end >= high_start else largest))
        return " ".join(parts)


def audit_predictions(
    predictions: Any,
    groups: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    control_features: Any = None,
    min_group_rows: int = MIN_GROUP_ROWS,
    seed: int = 0,
) -> Audit:
    """Measure predictions by group, and errors if there are labels.

    Parameters
    ----------
    predictions : array-like of shape (rows,)
        Predictions of one model.
    groups : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    y : array-like of shape (rows,), default=None
        Labels.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row. Rows of weight 0 are left out.
    control_features : array-like or DataFrame, default=None
        Strata to adjust for. Raw and adjusted differences are both reported.
    min_group_rows : int, default=30
        Groups with fewer rows are set aside and not compared.
    seed : int, default=0
        Seed of the bootstrap samples behind the intervals.

    Returns
    -------
    Audit
        Figures of every group and every pair of groups, and the verdict.

    Raises
    ------
    ValueError
        If fewer than two groups have enough rows, lengths differ, or values are missing or infinite.

    Examples
    --------
    >>> from esvdfair.audit import audit_predictions
    >>> found = audit_predictions([1, 2, 3, 4], ["a", "a", "b", "b"], min_group_rows=2)
    >>> found.between.ks, found.between.mean_gap, [group.rows for group in found.groups]
    (1.0, 2.0, [2, 2])
    """
    scores = check_column(predictions, len(predictions), "predictions")
    truth = None if y is None else check_column(y, len(scores), "y")
    strata = None if control_features is None else check_strata(control_features, len(scores))[1]
    live, labels, everybody = live_groups(groups, sample_weight, len(scores))
    scores, truth = scores[live], None if truth is None else truth[live]
    names, sizes, fewest = [label_text(label) for label in labels], np.bincount(everybody.codes), max(min_group_rows, 2)
    judged = np.flatnonzero(sizes >= fewest)
    if len(judged) < 2:
        raise InputError(
            f"{len(judged)} of {len(names)} groups have {fewest} rows or more (`min_group_rows={fewest}`), but a "
            "comparison needs two. Pass more rows, or lower `min_group_rows`."
        )
    rows = np.flatnonzero(np.isin(everybody.codes, judged))
    inside, weight = scores[rows], None if everybody.weight is None else everybody.weight[rows]
    codes, kept = np.searchsorted(judged, everybody.codes[rows]), tuple(names[g] for g in judged)
    compared = Groups.of(codes, len(judged), weight)
    adjusted, outside = None, None
    if strata is not None:
        plain, own = np.ones(len(rows)) if weight is None else weight, strata[live][rows]
        weights = adjusted_weights(codes, len(judged), own, plain)
        adjusted = _distances(inside, Groups.of(codes, len(judged), weights, own), kept, seed)
        outside = outside_support(plain, weights)
    return Audit(
        rows=len(scores),
        between=_distances(inside, compared, kept, seed),
        variance_gap=float(np.ptp(compared.variances(inside))),
        wasserstein=wasserstein_distance(inside, sensitive_features=codes, sample_weight=weight),
        mse=None if truth is None else float(np.average((scores - truth) ** 2, weights=everybody.weight)),
        r2=None if truth is None else float(r2_score(truth, scores, sample_weight=everybody.weight)),
        groups=tuple(_all_figures(names, everybody, scores, truth)),
        groups_set_aside={names[g]: int(n) for g, n in enumerate(sizes) if n < fewest},
        adjusted=adjusted,
        outside_support=outside,
    )


def _distances(scores: Array, groups: Groups, names: tuple[str, ...], seed: int) -> Distances:
    """Figures of all pairs, and of the most different one."""
    pairs = Pairs(groups, scores, seed)
    found, ends = pairs.compare(scores), np.transpose(pairs.index)
    shown = set(found.order[-SHOWN_PAIRS:].tolist())
    figures = tuple(
        PairFigures(
            groups=(names[g], names[h]),
            ks=float(found.distances[i]),
            ks_interval=pairs.interval(scores, i, 0.95) if i in shown else None,
            ks_population=float(found.estimates[i]),
            ks_floor=float(found.floors[i]),
            p_value=float(found.p_values[i]),
            established=bool(found.established[i]),
        )
        for i, (g, h) in enumerate(ends)
    )
    widest = ends[found.order[-1]]
    rows = np.flatnonzero(np.isin(groups.codes, widest))
    weight = None if groups.weight is None else groups.weight[rows]
    peak = ks_peak(scores[rows], Groups.of((groups.codes[rows] == widest[1]).astype(np.intp), 2, weight))
    more, fewer = (names[widest[group]] for group in (peak.high_group, peak.low_group))
    shares = {"more": more, "more_share": peak.high_share, "fewer": fewer, "fewer_share": peak.low_share}
    return Distances(
        ks=float(found.distances.max()),
        ks_population=found.largest,
        ks_interval=pairs.largest_interval(scores),
        ks_floor=float(found.floors.max()),
        mean_gap=float(np.ptp(groups.means(scores))),
        pairs=figures,
        widest={"threshold": peak.threshold, **shares},
    )


def _all_figures(names: Sequence[str], groups: Groups, scores: Array, truth: Array | None) -> Iterator[GroupFigures]:
    to_rest, means, variances = ks_to_rest(scores, groups), groups.means(scores), groups.variances(scores)
    error = np.zeros(len(scores)) if truth is None else scores - truth
    squares, errors = groups.means(error**2), groups.means(error)
    for g, (name, rows) in enumerate(zip(names, groups.members, strict=True)):
        w = groups.shares[rows]
        yield GroupFigures(
            group=name,
            rows=len(rows),
            mean=float(means[g]),
            mean_interval=mean_interval(scores[rows], w, (scores.min(), scores.max())),
            std=float(variances[g] ** 0.5),
            ks_to_rest=float(to_rest.distance[g]),
            ks_to_rest_interval=(float(to_rest.low[g]), float(to_rest.high[g])),
            mse=None if truth is None else float(squares[g]),
            mse_interval=None if truth is None else mean_interval(error[rows] ** 2, w),
            mean_error=None if truth is None else float(errors[g]),
        )


def mean_interval(
    values: Array, weight: Array | None = None, within: tuple[float, float] | None = None
) -> tuple[float, float]:
    """Student's 95% interval of a (weighted) mean, cut to a range that the values have.

    With Σw = 1 the variance is Σ w²(x−x̄)²/(1−w), s²/n without weights, on 1/Σw² − 1 degrees of freedom. By default the
    range is from 0 for values that are never negative. One row has no interval: the range itself.
    """
    lowest, highest = within or (0.0 if values.min() >= 0 else -np.inf, np.inf)
    w = np.full(len(values), 1 / len(values)) if weight is None else weight / weight.sum()
    mean, effective = float(w @ values), 1 / float(w @ w)
    if effective <= 1 + 1e-9:
        return float(lowest), float(highest)
    variance = float((w**2 / (1 - w)) @ (values - mean) ** 2)
    half = float(stdtrit(effective - 1, 0.975)) * variance**0.5  # Student's quantile
    return max(float(lowest), mean - half), min(float(highest), mean + half)
