"""Every pair of groups by itself: its KS distance, noise level, estimate, interval and bound.

Groups of very different size must not share one noise level: next to a group of 3 rows any distance looks like chance,
and the distance between two large groups would disappear with it. What is reported is the largest of the pairs' own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import kolmogorov

from esvdfair.core.ks import (
    FEW_GROUPS,
    CdfTable,
    Codes,
    Floats,
    Groups,
    Null,
    Ranked,
    Seed,
    cdf_table,
    largest_gaps,
    last_rows,
    lattice_shift,
    near_parity,
    sorted_groups,
    two_group_null,
    two_sample_distance,
    upper_bound,
)

Normals: TypeAlias = Callable[[tuple[int, int, int]], Floats]

_DRAWN: dict[int, Floats] = {}  # the longest run of normal draws of the last seed

_DRAWS = 1000  # simulated distances of a pair with ties or strata
_TIE_ROWS = 100  # validation rows that every group needs for the tie correction
_TIE_SHARE, _TIE_SPREAD = 0.3, 1.2  # of the tie correction; chosen on simulated populations (docs/method.md 2.7)
_NOISE_CELLS = 4_000_000  # numbers held by one chunk of simulated noise
_NEAR_AT = 0.95  # confidence at which near parity ends at three noise levels
_NEAR_PEAK = 4.0  # standard errors within which another threshold may be the true peak
_PERMUTED_ROWS = 400  # up to here parity is simulated by permutations, above by their limit
_LARGE_GROUP = 50  # effective rows from which a group is near enough to that limit
_NULL_CELLS, _STRATA_CELLS = 256, 128  # thresholds of that limit; and where strata are adjusted for
_TIED_SHARE = 0.05  # share of tied rows below which ties hardly move the floor
_GRID_SHIFT = 0.5826  # −ζ(1/2)/√(2π): what a supremum over a grid misses, in standard deviations of one step


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

    def normals(self, shape: tuple[int, int, int]) -> Floats:
        """The first standard normal draws of the seed, kept: noise levels and intervals of several sets share them."""
        count = prod(shape)
        if count > len(_DRAWN.get(self.seed, ())):
            _DRAWN.clear()
            _DRAWN[self.seed] = np.random.default_rng(self.seed).standard_normal(count)
            _DRAWN[self.seed].flags.writeable = False
        return _DRAWN[self.seed][:count].reshape(shape)

    @cached_property
    def index(self) -> tuple[Codes, Codes]:
        """(P,) first and second group of every pair."""
        return np.triu_indices(self.groups.count, k=1)

    def __len__(self) -> int:
        return len(self.index[0])

    @property
    def effective_rows(self) -> Floats:
        """(P,) n_e = 1/(1/n_g + 1/n_h)."""
        n, m = self.groups.sizes[np.array(self.index)]
        return np.asarray(n * m / (n + m), dtype=np.float64)

    def distances(self, scores: Floats) -> Floats:
        """(P,) KS distance of every pair."""
        if self.groups.count <= FEW_GROUPS:
            samples = sorted_groups(scores, self.groups)
            return np.array([two_sample_distance(samples[g], samples[h]) for g, h in zip(*self.index, strict=True)])
        # From distribution functions at a bounded number of thresholds: a loop over pairs would be long.
        cdfs = Ranked(scores, self.groups).table.cdfs
        return np.concatenate([np.abs(cdfs[g + 1 :] - cdf).max(axis=1) for g, cdf in enumerate(cdfs[:-1])])

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
        return [null if shrink > 0.99 else Null(shrink * null.floor, null.sizes / shrink**2) for null in effective]

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
        for i, (g, h, distance, null) in enumerate(zip(*self.index, distances, self.nulls, strict=True)):
            n, m = self.groups.sizes[g], self.groups.sizes[h]
            found[i] = kolmogorov(np.sqrt(n * m / (n + m)) * (distance + lattice_shift(n, m)))
            if null.draws is not None:
                simulated = (1 + np.count_nonzero(null.draws >= distance * (1 - 1e-9))) / (1 + len(null.draws))
                tail = kolmogorov(0.868731 / max(null.floor, 1e-12) * distance)
                found[i] = simulated if simulated > 5 / len(null.draws) else min(simulated, max(tail, found[i]))
        return found

    def interval(self, scores: Floats, pair: int, confidence: float, *, draws: int = 1000) -> tuple[float, float]:
        """Interval of one pair's population distance; see `esvdfair.ks_distance_ci`."""
        rows, groups = self._pair(self.index[0][pair], self.index[1][pair])
        ranked = Ranked(scores[rows], groups)
        low = _lower_end(ranked, self.nulls[pair], confidence, draws, self.normals)
        return low, upper_bound(ranked, (1 + confidence) / 2)

    def largest_interval(self, scores: Floats, confidence: float = 0.95, *, draws: int = 1000) -> tuple[float, float]:
        """Interval of the largest population distance of any pair; see `esvdfair.ks_distance_ci`."""
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
        for pair in shown:
            rows, groups = self._pair(self.index[0][pair], self.index[1][pair])
            found.append(upper_bound(Ranked(scores[rows], groups), confidence, method))
        return np.array(found)

    def compare(self, scores: Floats) -> "Comparison":
        """Compare the groups' scores, pair by pair."""
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
    """Figures of every pair of groups; arrays (P,), in the order of the `Pairs`.

    Attributes
    ----------
    distances : KS distance on these rows
    estimates, largest : estimated population KS, and the largest of them
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


def holm(p_values: Floats, level: float = 0.05) -> NDArray[np.bool_]:
    """Which of several hypotheses are rejected by Holm's procedure: all errors together stay below ``level``."""
    order = np.argsort(p_values)
    passed = p_values[order] <= level / np.arange(len(order), 0, -1)
    rejected = np.zeros(len(order), dtype=bool)
    rejected[order] = np.logical_and.accumulate(passed)
    return rejected


def rising(squares: Floats, order: Floats) -> Floats:
    """Squared distances (k,) of candidates made to rise with ``order`` (k,), and never below their own.

    The smallest of many estimates is a lucky one; neighbours in an order that other rows gave share their luck.
    """
    by = np.argsort(order, kind="stable")
    shared = np.empty(len(squares))
    shared[by] = isotonic_regression(squares[by]).x
    return np.asarray(np.maximum(shared, squares), dtype=np.float64)


def meets(estimates: Sequence[float], floors: Sequence[float], target_ks: float) -> bool:
    """Whether the noise level and the estimate of every pair are within a target."""
    return max(floors) <= target_ks and max(estimates) <= target_ks


# --- what chance alone produces ------------------------------------------------------------------------------------


def ks_null(
    groups: Groups,
    scores: Floats | None = None,
    random_state: Seed = 0,
    *,
    draws: int = 4000,
    normals: Normals | None = None,
) -> Null:
    """What KS distance these groups would show if they came from one distribution; see `ks_floor`.

    Where strata are adjusted for, noise is within them only. ``draws`` are for two groups; the more pairs, the less
    their maximum varies, and the fewer are needed; ``normals`` gives draws of a shape, which others may share.
    """
    count, sizes, rng = groups.count, groups.sizes, np.random.default_rng(random_state)
    if groups.strata is not None and scores is not None:
        found = _within_strata(scores, groups, max(200, 2000 // count), rng)
        return Null(float(found.mean()), sizes, found)
    cells = _NULL_CELLS if count <= FEW_GROUPS else _NULL_CELLS // 4
    masses, tied = _null_cells(scores, groups.weight, cells)
    if count == 2 and masses[tied].sum() < _TIED_SHARE:
        return two_group_null(*sizes)
    draws = max(200 if count <= FEW_GROUPS else 80, 2 * draws // count)
    if len(groups.codes) <= _PERMUTED_ROWS or sizes.min() < _LARGE_GROUP * max(1.0, np.log10(count)):
        found = _permuted(groups, scores, draws, rng)
    else:
        shared = normals if count <= FEW_GROUPS else None
        found = _limit(sizes, masses, tied, draws, shared or rng.standard_normal)
    return Null(float(found.mean()), sizes, found)


def _permuted(groups: Groups, scores: Floats | None, draws: int, rng: np.random.Generator) -> Floats:
    """KS when the groups are dealt out anew over the sorted scores; exact but for the number of draws."""
    rows = rng.permutation(len(groups.codes))
    counts = np.bincount(groups.codes, minlength=groups.count)
    # beside the smallest group, a hundred times its rows is as good as any number
    limit = max(100 * int(counts.min()), 20_000 // groups.count)
    if counts.max() > limit:
        rows = rows[np.argsort(groups.codes[rows], kind="stable")]
        rows = rows[np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) < limit]
    ends = last_rows(np.sort(np.arange(len(rows)) if scores is None else scores[rows]))
    found = np.empty(int(np.clip(4_000_000 // len(rows), 30, draws)))
    for i in range(len(found)):
        rows = rng.permutation(rows)
        found[i] = largest_gaps(groups.take(rows), ends).max()
    return found


def _limit(sizes: Floats, masses: Floats, tied: NDArray[np.bool_], draws: int, normals: Normals) -> Floats:
    """Supremum of the limiting bridges on a grid, moved by what grid and finite samples change in expectation."""
    cdf = np.cumsum(masses)
    step = np.sqrt(masses)
    deviations, found = np.sqrt(masses / sizes[:, None]), []
    at_once = max(1, _NOISE_CELLS // (len(sizes) * len(masses)))
    for start in range(0, draws, at_once):
        drawn = normals((len(sizes), min(at_once, draws - start), len(masses)))
        if len(sizes) == 2:  # the difference of two bridges is one
            noise = _bridges(np.ones((1, len(cdf))), cdf[None], drawn[:1] * deviations[0] - drawn[1:] * deviations[1])
            gaps = np.abs(noise[0])
        else:
            noise = _bridges(deviations**2, np.broadcast_to(cdf, deviations.shape), drawn)
            gaps = np.ptp(noise, axis=0)
        at, (n, m) = gaps.argmax(axis=1), sizes[:2]  # (size,)
        if len(sizes) > 2:
            there = np.take_along_axis(noise, at[None, :, None], axis=2)[:, :, 0]  # (G, size)
            n, m = sizes[there.argmax(axis=0)], sizes[there.argmin(axis=0)]
        between = _GRID_SHIFT * step[at] * np.sqrt(1 / n + 1 / m) - lattice_shift(n, m)
        found.append(gaps[np.arange(len(at)), at] + np.where(tied[at], 0.0, between))
    return np.asarray(np.clip(np.concatenate(found), 0.0, 1.0), dtype=np.float64)


def _within_strata(scores: Floats, groups: Groups, draws: int, rng: np.random.Generator) -> Floats:
    """(draws,) KS distances that sampling alone makes between groups of one adjusted distribution.

    Weights that give every group a known mix leave no noise *between* strata: an adjusted F_g is a sum of those of its
    cells, whose errors are Brownian bridges. Where scores differ by stratum, as pay does by job, this is far less noise
    than effective sizes suggest.
    """
    order = np.argsort(scores)
    order = order[groups.shares[order] > 0]
    ends = last_rows(scores[order])
    if len(ends) > _STRATA_CELLS:
        ends = ends[np.linspace(0, len(ends) - 1, _STRATA_CELLS).astype(np.intp)]
    column = np.minimum(np.searchsorted(ends, np.arange(len(order))), len(ends) - 1)
    share, code = groups.shares[order], groups.codes[order]
    stratum = np.zeros_like(code) if groups.strata is None else groups.strata[order]
    noise, steps = np.zeros((groups.count, draws, len(ends))), np.zeros((groups.count, len(ends)))
    for g in range(groups.count):
        for s in np.unique(stratum[code == g]):
            mine = (code == g) & (stratum == s)
            variance = np.bincount(column[mine], share[mine] ** 2, len(ends)).astype(np.float64)
            cdf = np.cumsum(np.bincount(column[mine], share[mine], len(ends))) / share[mine].sum()
            noise[g] += _bridges(variance[None], cdf[None], rng.standard_normal((1, draws, len(ends))))[0]
            steps[g] += variance
    at = np.ptp(noise, axis=0).argmax(axis=1)
    there = np.take_along_axis(noise, at[None, :, None], axis=2)[:, :, 0]
    pair = steps[there.argmax(axis=0), at] + steps[there.argmin(axis=0), at]
    return np.asarray(np.clip(np.ptp(there, axis=0) + _GRID_SHIFT * np.sqrt(pair), 0.0, 1.0), dtype=np.float64)


def _bridges(variances: Floats, cdfs: Floats, normals: Floats) -> Floats:
    """(G, size, K) draws of the sampling noise of every F: Σ_{i≤k} e_i − F_k Σ_i e_i with e_i ~ N(0, variance_i)."""
    noise: Floats = normals * np.sqrt(variances)[:, None]
    for walk, cdf in zip(noise, cdfs, strict=True):  # in place: the room is half of the time
        np.cumsum(walk, axis=1, out=walk)
        for part in np.array_split(walk, max(1, walk.size // 100_000)):
            part -= part[:, -1:] * cdf
    return noise


def _null_cells(scores: Floats | None, weights: Floats | None, cells: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Masses of consecutive cells of the pooled scores, and which cells are one tied value."""
    if scores is None:
        return np.full(cells, 1 / cells), np.zeros(cells, dtype=bool)
    _, value, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mass = np.bincount(value, weights)
    mass = mass / mass.sum()
    tied = (counts > 1) & (mass > 0.5 / cells)
    cell = np.floor(np.cumsum(mass) * cells)
    first = np.append(True, (cell[1:] != cell[:-1]) | tied[1:] | tied[:-1])
    masses = np.asarray(np.bincount(np.cumsum(first) - 1, mass), dtype=np.float64)
    return masses, tied[first]


# --- the lower end of an interval ----------------------------------------------------------------------------------


def _lower_end(ranked: Ranked, null: Null, confidence: float, draws: int, normals: Normals) -> float:
    """Lower end of the interval of `esvdfair.ks_distance_ci`, of two groups."""
    distance = float(ranked.gaps.max())
    # The surer an interval is to be, the farther parity reaches.
    reach = null.quantile(confidence) / max(null.quantile(_NEAR_AT), 1e-12)
    near = near_parity(distance, null.floor * reach)
    level = 1 - (1 - confidence) / 2 * (1 + near)
    margin = near * null.quantile(level) if near else 0.0
    if near < 1:
        table = cdf_table(ranked, _NULL_CELLS)
        noise = _noise_near_peak(table, normals((2, draws, table.cdfs.shape[1])))
        margin += (1 - near) * max(0.0, float(np.quantile(noise, level)))
    return max(0.0, distance - margin)


def _noise_near_peak(table: CdfTable, normals: Floats) -> Floats:
    """(size,) draws of sup over thresholds of ε* − (T − D − c·sd)₊: the noise wherever the true peak may be.

    ε* is the noise of a multiplier bootstrap, made of ``normals`` (2, size, K); sd is the standard error of T − D(t).
    """
    size, (f, g) = normals.shape[1], table.cdfs
    centre, squares = table.shrunk
    variance = np.maximum(0.0, np.diff(squares, axis=1, prepend=0.0)) / table.sizes[:, None]  # < 0 by rounding alone
    peak = int(np.argmax(np.abs(f - g)))
    sign = 1.0 if f[peak] >= g[peak] else -1.0
    first, second = _bridges(variance, centre, normals)
    epsilon = np.subtract(first, second, out=first) * sign
    at_peak = epsilon[:, peak]
    mean, product = np.stack([np.ones(size), at_peak]) @ epsilon / size
    square = np.einsum("ik,ik->k", epsilon, epsilon) / size
    supremum = np.full(size, -np.inf)
    for side in (1.0, -1.0):  # the group that is ahead at the peak over the other, and the other over it
        spread = square - 2 * side * product + at_peak @ at_peak / size - (side * mean - at_peak.mean()) ** 2
        doubt = _NEAR_PEAK * np.sqrt(np.maximum(0.0, spread))  # sd of ε − ε at the peak
        shortfall = np.maximum(0.0, np.abs(f - g)[peak] - side * sign * (f - g) - doubt)
        np.maximum(supremum, (side * epsilon - shortfall).max(axis=1), out=supremum)
    return supremum
