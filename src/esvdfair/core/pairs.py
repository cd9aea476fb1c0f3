"""Every pair of groups by itself: its KS distance, noise level, estimate, interval and bound.

Groups of very different size must not share one noise level: next to a group of 3 rows any distance looks like chance,
and the distance between two large groups would disappear with it. So each pair is a problem of two groups, solved with
the tools of :mod:`esvdfair.core.ks`, and what is reported or compared with a target is the largest of the pairs' own
figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import kolmogorov

from esvdfair.core.ks import (
    FEW_GROUPS,
    Codes,
    Floats,
    Groups,
    Normals,
    Null,
    Ranked,
    ks_null,
    lattice_shift,
    lower_end,
    two_group_null,
    upper_bound,
)

_DRAWS = 1000  # simulated distances of a pair with ties or strata
_TIE_ROWS = 100  # validation rows that every group needs for the tie correction
_TIE_SHARE, _TIE_SPREAD = 0.3, 1.2  # of the tie correction; chosen on simulated populations (docs/method.md 2.7)


@dataclass(frozen=True)
class Pairs:
    """All pairs g < h of groups, in the order of ``np.triu_indices``.

    Attributes
    ----------
    groups : rows of two groups or more
    scores : (rows,) whose ties lower the noise level; None if the scores are all different
    seed : of the simulations behind noise levels and intervals
    """

    groups: Groups
    scores: Floats | None = None
    seed: int = 0

    @cached_property
    def normals(self) -> Normals:
        """Standard normal draws of a shape; noise levels and intervals share them, as drawing is most of their cost."""
        return _Draws(self.seed)

    @cached_property
    def index(self) -> tuple[Codes, Codes]:
        """(P,) first and second group of every pair."""
        return np.triu_indices(self.groups.count, k=1)

    def __len__(self) -> int:
        return len(self.index[0])

    @property
    def effective_rows(self) -> Floats:
        """(P,) n_e = 1/(1/n_g + 1/n_h)."""
        first, second = self.index
        return np.asarray(1 / (1 / self.groups.sizes[first] + 1 / self.groups.sizes[second]), dtype=np.float64)

    # --- distances ---------------------------------------------------------------------------------------------

    def distances(self, scores: Floats) -> Floats:
        """(P,) KS distance of every pair."""
        groups = self.groups
        if groups.count > FEW_GROUPS:
            return self._distances_of_many(scores)
        values, shares = [], []
        for rows in groups.members:
            if groups.weight is None:
                values.append(np.sort(scores[rows]))
                shares.append(np.arange(len(rows) + 1) / len(rows))
            else:
                order = np.argsort(scores[rows])
                values.append(scores[rows][order])
                below = np.append(0.0, np.cumsum(groups.shares[rows][order]))
                shares.append(below / below[-1])
        pairs = zip(*self.index, strict=True)
        return np.array([_distance(values[g], shares[g], values[h], shares[h]) for g, h in pairs])

    def _distances_of_many(self, scores: Floats) -> Floats:
        """From distribution functions at a bounded number of thresholds: a loop over pairs would be long."""
        cdfs = Ranked(scores, self.groups).table.cdfs
        found = [np.abs(cdfs[g + 1 :] - cdf).max(axis=1) for g, cdf in enumerate(cdfs[:-1])]
        return np.concatenate(found)

    # --- noise -------------------------------------------------------------------------------------------------

    @cached_property
    def nulls(self) -> list[Null]:
        """For each pair the KS distance that chance alone produces."""
        first, second = self.index
        if self.groups.count <= FEW_GROUPS:
            return [self._null(g, h) for g, h in zip(first, second, strict=True)]
        sizes = self.groups.sizes
        largest = np.argsort(sizes)[-2:]
        shrink = self._null(*sorted(largest)).floor / two_group_null(*sizes[largest]).floor  # by ties and strata
        effective = [two_group_null(sizes[g], sizes[h]) for g, h in zip(first, second, strict=True)]
        return [null if shrink > 0.99 else null.scaled(shrink) for null in effective]

    def _null(self, g: int, h: int) -> Null:
        rows, pair = self._pair(g, h)
        scores = None if self.scores is None else self.scores[rows]
        return ks_null(pair, scores, self.seed, draws=_DRAWS, normals=self.normals)

    def _pair(self, g: int, h: int) -> tuple[Codes, Groups]:
        """Positions of the rows of two groups, and these as groups 0 and 1."""
        groups = self.groups
        if groups.count == 2:
            return np.arange(len(groups.codes)), groups
        rows = np.sort(np.concatenate([groups.members[g], groups.members[h]]))
        codes = (groups.codes[rows] == h).astype(np.intp)
        weight, strata = (None if column is None else column[rows] for column in (groups.weight, groups.strata))
        return rows, Groups.of(codes, 2, weight, strata)

    @cached_property
    def floors(self) -> Floats:
        """(P,) noise level: the mean KS distance that chance alone produces."""
        return np.array([null.floor for null in self.nulls])

    @cached_property
    def resolved(self) -> Floats:
        """(P,) the population distance at which a sample's, about √(k² + floor²), is the 90% point of chance."""
        high = np.array([null.quantile(0.9) for null in self.nulls])
        return np.sqrt(np.maximum(0.0, high**2 - self.floors**2))

    def p_values(self, distances: Floats) -> Floats:
        """(P,) probability that chance alone produces a distance at least as large.

        Without ties and strata Kolmogorov's, with the shift of a finite sample; else simulated, and beyond the
        resolution of the simulation Kolmogorov's at the number of rows that has the simulated noise level.
        """
        found = np.empty(len(distances))
        first, second = self.index
        for i, (distance, null) in enumerate(zip(distances, self.nulls, strict=True)):
            n, m = self.groups.sizes[first[i]], self.groups.sizes[second[i]]
            effective = n * m / (n + m)
            found[i] = kolmogorov(np.sqrt(effective) * (distance + lattice_shift(n, m)))
            if null.draws is not None:
                simulated = (1 + np.count_nonzero(null.draws >= distance * (1 - 1e-9))) / (1 + len(null.draws))
                tail = kolmogorov(0.868731 / max(null.floor, 1e-12) * distance)
                found[i] = simulated if simulated > 5 / len(null.draws) else min(simulated, max(tail, found[i]))
        return found

    # --- intervals and bounds ----------------------------------------------------------------------------------

    def interval(self, scores: Floats, pair: int, confidence: float, *, draws: int = 1000) -> tuple[float, float]:
        """Interval of one pair's population distance; see `esvdfair.ks_distance_ci`."""
        rows, groups = self._pair(*(int(side[pair]) for side in self.index))
        ranked = Ranked(scores[rows], groups)
        null = self.nulls[pair]
        low = lower_end(ranked, confidence, floor=null, draws=draws, random_state=self.seed, normals=self.normals)
        return low, upper_bound(ranked, (1 + confidence) / 2)

    def largest_interval(self, scores: Floats, confidence: float = 0.95, *, draws: int = 1000) -> tuple[float, float]:
        """Interval of the largest population distance of any pair.

        The lower end is the largest of the pairs' own, with Bonferroni's correction for their number; the upper end
        needs none (an intersection–union test, `esvdfair.ks_bound`).
        """
        if len(self) == 1:
            return self.interval(scores, 0, confidence, draws=draws)
        alone = 1 - (1 - confidence) / len(self)
        distances = self.distances(scores)
        # No more than a few pairs can have the largest lower end: those that are far above their noise level.
        likely = np.argsort(distances - 2 * self.floors)[-5:]
        low = max(self.interval(scores, int(i), alone, draws=draws)[0] for i in likely)
        return low, upper_bound(Ranked(scores, self.groups), (1 + confidence) / 2)

    def upper_bounds(self, scores: Floats, confidence: float, method: str, shown: Codes) -> Floats:
        """One-sided upper bound of the population distance of each pair in ``shown``."""
        found = []
        for g, h in zip(*(side[shown] for side in self.index), strict=True):
            rows, groups = self._pair(int(g), int(h))
            found.append(upper_bound(Ranked(scores[rows], groups), confidence, method))
        return np.array(found)

    # --- estimates ---------------------------------------------------------------------------------------------

    def compare(self, scores: Floats) -> "Comparison":
        """Compare the groups' scores, pair by pair: what an audit, a test and a report say of the same rows."""
        distances = self.distances(scores)
        estimates, largest = self.largest(distances[None] ** 2 - self.floors**2, self.floors)
        p_values = self.p_values(distances)
        return Comparison(distances, estimates[0], float(largest[0]), self.floors, p_values, holm(p_values))

    def largest(self, squares: Floats, noise: Floats) -> tuple[Floats, Floats]:
        """Estimates of the pairs' population distances, and the largest, for candidates whose pairs nearly tie.

        Parameters
        ----------
        squares : (k, P) estimates of the squared distances, which may be negative
        noise : (P,) the noise level of these estimates

        Of many pairs with nearly the same distance the largest *estimate* is too large, by what chance adds to the
        luckiest: with k pairs effectively tied it is lowered by ``0.3 √(ln k)`` standard deviations, and so are the
        estimates of the pairs that exceed it. With two groups nothing changes. Below 100 rows in a group the
        correction is left out.
        """
        squares = np.asarray(squares, dtype=np.float64)
        top = squares.max(axis=1)
        if squares.shape[1] > 1 and self.groups.sizes.min() >= _TIE_ROWS:
            spread = _TIE_SPREAD * noise * np.sqrt(np.maximum(squares, 0.0) + noise**2 / 2)  # sd of an estimate
            at = squares.argmax(axis=1)[:, None]
            peak = np.take_along_axis(spread, at, axis=1)
            tied = np.exp(-0.5 * (top[:, None] - squares) ** 2 / (peak**2 + spread**2)).sum(axis=1)
            top = top - _TIE_SHARE * np.sqrt(np.log(tied)) * peak[:, 0]
        pairs = np.sqrt(np.maximum(0.0, np.minimum(squares, top[:, None])))
        return np.asarray(pairs), np.asarray(pairs.max(axis=1))


@dataclass(frozen=True)
class Comparison:
    """What some rows say of every pair of groups; arrays (P,), in the order of the `Pairs`.

    Attributes
    ----------
    distances : KS distance on these rows
    estimates : estimated population KS
    largest : the largest of them
    floors : noise level
    p_values : probability that chance alone produces such a distance
    established : whether the difference is beyond chance, by Holm's procedure at 5% over all pairs
    """

    distances: Floats
    estimates: Floats
    largest: float
    floors: Floats
    p_values: Floats
    established: NDArray[np.bool_]

    @property
    def order(self) -> Codes:
        """Pairs by rising importance: the last is the largest difference that is established, or else the largest."""
        return np.lexsort((self.distances, self.estimates, self.established))


class _Draws:
    """Standard normal draws of any shape: the first of one long list."""

    def __init__(self, seed: int) -> None:
        self._rng, self._known = np.random.default_rng(seed), np.empty(0)

    def __call__(self, shape: tuple[int, int, int]) -> Floats:
        missing = prod(shape) - len(self._known)
        if missing > 0:  # a little more: intervals differ in a threshold or two
            self._known = np.append(self._known, self._rng.standard_normal(missing + missing // 50))
        return self._known[: prod(shape)].reshape(shape)


def _distance(a: Floats, shares_a: Floats, b: Floats, shares_b: Floats) -> float:
    """KS of two sorted samples with the share of each group up to every row.

    F_a rises at values of a alone: F_a − F_b is largest at one of them, and F_b − F_a just before one.
    """
    if len(a) > len(b):
        a, shares_a, b, shares_b = b, shares_b, a, shares_a
    above = shares_a[1:] - shares_b[b.searchsorted(a, side="right")]
    below = shares_b[b.searchsorted(a, side="left")] - shares_a[:-1]
    return float(max(above.max(), below.max()))


def holm(p_values: Floats, level: float = 0.05) -> NDArray[np.bool_]:
    """Which of several hypotheses are rejected by Holm's procedure: all errors together stay below ``level``."""
    order = np.argsort(p_values)
    passed = p_values[order] <= level / np.arange(len(order), 0, -1)
    rejected = np.zeros(len(order), dtype=bool)
    rejected[order] = np.logical_and.accumulate(passed)
    return rejected


def rising(squares: Floats, order: Floats) -> Floats:
    """Squared distances (k,) of candidates made to rise with ``order`` (k,), and never below their own.

    The smallest of many estimates is a lucky one. Neighbours in an order that other rows gave share their luck
    (isotonic regression).
    """
    by = np.argsort(order, kind="stable")
    shared = np.empty(len(squares))
    shared[by] = isotonic_regression(squares[by]).x
    return np.asarray(np.maximum(shared, squares), dtype=np.float64)


def meets(estimates: Sequence[float], floors: Sequence[float], target_ks: float) -> bool:
    """Whether every pair keeps a target: its noise level is below it, so that it can be told, and its estimate too."""
    return max(floors) <= target_ks and max(estimates) <= target_ks
