"""Groups of rows, also within strata, the KS distance between them, and what sampling does to it.

Everything here takes rows that are checked already: :class:`Groups`, and ``scores`` (rows,), which are finite. The
public functions are in :mod:`esvdfair.core.metrics`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import kolmogi, ndtri

from esvdfair.core.checks import Label, Scalar, check_groups, check_weight
from esvdfair.exceptions import InputError

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.intp]
Seed: TypeAlias = int | np.random.Generator | None

FEW_GROUPS = 12  # up to here every pair is looked at by itself
_TABLE_CELLS = 200_000  # numbers in the table of distribution functions from which a bound is read
_FEW_CELLS = 256  # thresholds where groups are many
_SHRINK_ROWS = 2.0  # pooled rows lent to each group, without which complete separation would look certain
_FLOORS_APART = 3.0  # distances from here on are no longer near parity, at a confidence of 0.95


@dataclass(frozen=True)
class Groups:
    """Who belongs to which group, as parity sees it.

    Attributes
    ----------
    codes : (rows,) numbers in ``range(count)``, each of which occurs with positive weight
    count : number of groups
    weight : (rows,), adjusted for strata where there are any; None counts every row once
    strata : (rows,) codes of the strata that are adjusted for, if any
    """

    codes: Codes
    count: int
    weight: Floats | None = None
    strata: Codes | None = None

    @classmethod
    def of(cls, codes: Codes, count: int, weight: Floats | None = None, strata: Codes | None = None) -> "Groups":
        """With weights whose largest in each group is 1, so that squares neither overflow nor vanish."""
        if weight is not None:
            largest = np.zeros(count)
            np.maximum.at(largest, codes, weight)
            weight = weight / largest[codes]
        alike = weight is not None and strata is None and bool((weight == 1.0).all())
        return cls(codes, count, None if alike else weight, strata)

    def take(self, rows: Codes) -> "Groups":
        """Some of the rows, or all in another order; strata are left behind."""
        return Groups(self.codes[rows], self.count, None if self.weight is None else self.weight[rows])

    @cached_property
    def mass(self) -> Floats:
        """(G,) Σw."""
        return np.bincount(self.codes, self.weight, self.count).astype(np.float64)

    @cached_property
    def members(self) -> list[Codes]:
        """Positions of the rows of each group."""
        return np.split(np.argsort(self.codes, kind="stable"), np.cumsum(np.bincount(self.codes))[:-1])

    @cached_property
    def steps(self) -> list[tuple[slice | Codes, Floats]]:
        """Where the rows of each group are, a slice if they stand together, and which share of it is before each."""
        found = []
        for rows in self.members:
            place = slice(rows[0], rows[-1] + 1)
            found.append((place if rows[-1] - rows[0] < len(rows) else rows, np.arange(len(rows) + 1) / len(rows)))
        return found

    @cached_property
    def shares(self) -> Floats:
        """(rows,) each row's share of its group: they sum to 1 in every group, so that none drowns in another."""
        return np.asarray((1.0 if self.weight is None else self.weight) / self.mass[self.codes], dtype=np.float64)

    @cached_property
    def sizes(self) -> Floats:
        """(G,) effective rows, (Σw)²/Σw²: the number of rows without weights."""
        if self.weight is None:
            return self.mass
        return np.asarray(1.0 / np.bincount(self.codes, self.shares**2, self.count), dtype=np.float64)

    def means(self, values: Floats) -> Floats:
        """(G,) weighted means of values (rows,)."""
        weighted = values if self.weight is None else values * self.weight
        return np.asarray(np.bincount(self.codes, weighted, self.count) / self.mass, dtype=np.float64)

    def variances(self, values: Floats) -> Floats:
        """(G,) unbiased: Σw(x−x̄)²/(Σw − Σw²/Σw), the weighted mean of (x−x̄)² over 1 − 1/n for n effective rows."""
        spread = self.means((values - self.means(values)[self.codes]) ** 2)
        rest = 1 - 1 / self.sizes
        return np.divide(spread, rest, out=np.zeros_like(spread), where=rest > 0)  # one effective row does not vary


def live_groups(
    sensitive_features: Any, sample_weight: Any, rows: int, missing: str = "error", *, of: str = "X"
) -> tuple[Codes, tuple[Label, ...], Groups]:
    """Positions of the rows that have weight, labels of the groups that occur among them, and these rows' groups."""
    labels, codes = check_groups(sensitive_features, rows, missing, of=of)
    weight = None if sample_weight is None else check_weight(sample_weight, rows, of=of)
    live = np.arange(rows) if weight is None else np.flatnonzero(weight)
    kept = np.flatnonzero(np.bincount(codes[live]))
    groups = Groups(np.searchsorted(kept, codes[live]), len(kept), None if weight is None else weight[live])
    return live, tuple(labels[g] for g in kept), groups


# --- strata --------------------------------------------------------------------------------------------------------
#
# Adjusted gaps compare groups as if each had the same mix of strata (of jobs, regions, hours). Strata that some group
# has no row in leave the comparison; over the others, the *common support*, P(s) is the share of stratum s among all
# rows and P(s|g) that among the rows of group g, which are weighted by a_gs = P(s) / P(s|g). A *cell* is a group and a
# stratum; its label is one flat tuple, first the parts of the group's label.


def adjusting_factors(mass: Floats) -> Floats:
    """(G, S) a_gs from the weight (G, S) of each group in each stratum; 0 outside the common support."""
    support = (mass > 0).all(axis=0)
    if not support.any():
        raise InputError(
            "no stratum of `control_features` contains rows of every group, so groups cannot be compared within "
            "strata. Use fewer or coarser ones."
        )
    inside = np.where(support, mass, 0.0)
    common = inside.sum(axis=0) / inside.sum()  # P(s)
    own = inside / inside.sum(axis=1, keepdims=True)  # P(s|g)
    factors: Floats = np.divide(common, own, out=np.zeros_like(own), where=own > 0)
    return factors


def adjusted_weights(codes: Codes, n_groups: int, strata: Codes, weight: Floats | None = None) -> Floats:
    """(rows,) the weights times a_gs, for groups ``codes`` and strata ``strata``; 0 outside the common support."""
    weight = np.ones(len(codes)) if weight is None else weight
    n_strata = int(strata.max(initial=0)) + 1
    cell = codes * n_strata + strata
    mass = np.bincount(cell, weight, n_groups * n_strata).reshape(n_groups, n_strata).astype(np.float64)
    return np.asarray(weight * adjusting_factors(mass).ravel()[cell], dtype=np.float64)


def outside_support(weight: Floats, adjusted: Floats) -> float:
    """Share of the weight in strata that some group lacks."""
    return float(weight[adjusted == 0].sum() / weight.sum())


def make_cells(
    groups: tuple[Sequence[Label], Codes], strata: tuple[Sequence[Label], Codes]
) -> tuple[tuple[Label, ...], Codes]:
    """Labels and codes of the cells that occur, in the order of groups and then of strata."""
    (names, codes), (kinds, places) = groups, strata
    present, cell = np.unique(codes * len(kinds) + places, return_inverse=True)
    labels = [(*_attributes(names[i // len(kinds)]), *_attributes(kinds[i % len(kinds)])) for i in present.tolist()]
    return tuple(labels), cell.astype(np.intp)


def split_cell(cell: Label, parts: int) -> tuple[Label, Label]:
    """The group and the stratum of a cell whose group's label has so many parts."""
    parted = _attributes(cell)
    group, stratum = parted[:parts], parted[parts:]
    return group[0] if parts == 1 else group, stratum[0] if len(stratum) == 1 else stratum


def label_parts(label: Label) -> int:
    """How many attributes a label names."""
    return len(_attributes(label))


def _attributes(label: Label) -> tuple[Scalar, ...]:
    return label if isinstance(label, tuple) else (label,)


# --- distances -----------------------------------------------------------------------------------------------------


def ks_between(scores: Floats, groups: Groups) -> float:
    """The largest distance between two groups. One sort, whatever the number of groups."""
    if groups.count == 2:
        return two_sample_distance(*sorted_groups(scores, groups))
    return float(Ranked(scores, groups).gaps.max())


Sorted: TypeAlias = tuple[Floats, Floats]
"""The scores of a group in order, and the share of the group up to every row, from 0 to 1."""


def sorted_groups(scores: Floats, groups: Groups) -> list[Sorted]:
    """Every group, sorted."""
    if groups.weight is None:  # NumPy sorts values several times faster than it finds their order
        return [(np.sort(scores[rows]), shares) for rows, shares in groups.steps]
    found = []
    for rows in groups.members:
        rows = rows[np.argsort(scores[rows])]
        below = np.append(0.0, np.cumsum(groups.shares[rows]))
        found.append((scores[rows], below / below[-1]))
    return found


def two_sample_distance(a: Sorted, b: Sorted) -> float:
    """KS of two samples: F_a − F_b is largest at a value of a, and F_b − F_a just before one."""
    (few, shares), (many, others) = (a, b) if len(a[0]) <= len(b[0]) else (b, a)
    after = many.searchsorted(few, side="right")
    above = shares[1:] - others[after]
    tied = np.flatnonzero(few == many[np.maximum(after, 1) - 1])  # else as many are below as are not above
    after[tied] = many.searchsorted(few[tied], side="left")
    below = others[after] - shares[:-1]
    return float(max(above.max(), below.max()))


class Peak(NamedTuple):
    """Where two groups differ most: ``high_share`` of one and ``low_share`` of the other are at or below ``threshold``.

    ``distance`` is the difference of the two shares; ``high_group`` and ``low_group`` are codes.
    """

    distance: float
    threshold: float
    high_group: int
    high_share: float
    low_group: int
    low_share: float


def ks_peak(scores: Floats, groups: Groups) -> Peak:
    """The threshold at which two groups differ most, and who they are."""
    ranked = Ranked(scores, groups)
    peak = int(np.argmax(ranked.gaps))
    threshold = float(ranked.distinct[peak])
    shares = groups.means((scores <= threshold).astype(np.float64))
    high, low = int(shares.argmax()), int(shares.argmin())
    return Peak(float(ranked.gaps[peak]), threshold, high, float(shares[high]), low, float(shares[low]))


class Ranked:
    """Scores in order, beside their groups: what a distance and its bounds are read from, in one sort."""

    def __init__(self, scores: Floats, groups: Groups) -> None:
        order = np.argsort(scores)
        self.scores, self.groups, self.ordered = scores, groups, groups.take(order)
        self.ends = last_rows(scores[order])
        self.distinct = scores[order][self.ends]

    @cached_property
    def gaps(self) -> Floats:
        """(distinct,) the largest distance between two groups at every distinct score."""
        return largest_gaps(self.ordered, self.ends)

    @cached_property
    def table(self) -> "CdfTable":
        """From which bounds are read."""
        count = self.groups.count
        return cdf_table(self, _TABLE_CELLS // count if count <= FEW_GROUPS else _FEW_CELLS)


def last_rows(ranked: NDArray[Any]) -> Codes:
    """Positions of the last row of every distinct score, for sorted scores."""
    return np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))


def largest_gaps(groups: Groups, ends: Codes) -> Floats:
    """max_g F_g − min_g F_g after the rows at ``ends``, for rows in the order of their scores.

    No F_g falls, so the largest at a threshold is the largest value that any row up to it stepped *to*, and the
    smallest is the smallest value that any row beyond it will step *from*: two running extrema, without G.
    """
    codes = groups.codes
    small = codes.astype(np.uint16) if groups.count <= 2**16 else codes  # which NumPy sorts by digits, in linear time
    by_group = np.argsort(small, kind="stable")
    counts = np.bincount(codes, minlength=groups.count)
    starts = np.cumsum(counts) - counts
    before, after = np.empty((2, len(codes)))  # F of its own group before and after each row
    if groups.weight is None:
        rank, sizes = np.arange(len(codes)) - np.repeat(starts, counts), np.repeat(counts, counts)
        before[by_group], after[by_group] = rank / sizes, (rank + 1) / sizes
    else:
        run = np.append(0.0, np.cumsum(groups.shares[by_group]))
        base = np.repeat(run[starts], counts)
        total = np.repeat(run[starts + counts], counts) - base
        before[by_group], after[by_group] = (run[:-1] - base) / total, (run[1:] - base) / total
    gaps: Floats = np.maximum.accumulate(after)[ends]
    gaps -= np.append(np.minimum.accumulate(before[::-1])[::-1], 1.0)[ends + 1]
    return gaps


# --- each group against the rest -----------------------------------------------------------------------------------


class ToRest(NamedTuple):
    """KS distance of every group to all other rows, and its interval; shapes (G,)."""

    distance: Floats
    low: Floats
    high: Floats


def ks_to_rest(scores: Floats, groups: Groups, *, confidence: float = 0.95) -> ToRest:
    """Each group against the rest, in one sort for all groups.

    The interval is in closed form: the upper end is that of `ks_distance_ci`, the lower end ``T − q`` with q the
    quantile of the distance that chance alone produces, somewhat lower than that of `ks_distance_ci`.
    """
    ranked = Ranked(scores, groups)
    codes, z = ranked.ordered.codes, float(ndtri((1 + confidence) / 2))
    weight = np.ones(len(codes)) if ranked.ordered.weight is None else ranked.ordered.weight
    weight = weight / weight.max()
    mass, squares = np.bincount(codes, weight), np.bincount(codes, weight**2)
    sizes, rest = mass**2 / squares, (mass.sum() - mass) ** 2 / (squares.sum() - squares)
    everyone = np.cumsum(weight)[ranked.ends]
    found = np.empty((groups.count, 3))
    for g in range(groups.count):
        own = np.cumsum(np.where(codes == g, weight, 0.0))[ranked.ends]
        others = np.clip((everyone - own) / (mass.sum() - mass[g]), 0.0, 1.0)
        own = np.minimum(own / mass[g], 1.0)
        gap, error = np.abs(own - others), np.sqrt(own * (1 - own) / sizes[g] + others * (1 - others) / rest[g])
        null, distance = two_group_null(sizes[g], rest[g]), gap.max()
        tail = (1 - confidence) / 2 * (1 + near_parity(distance, null.floor))
        found[g] = distance, max(0.0, distance - null.quantile(1 - tail)), np.clip((gap + z * error).max(), distance, 1)
    return ToRest(*found.T)


# --- what chance alone produces --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Null:
    """The KS distance of samples of one distribution: its mean (``floor``) and its quantiles.

    ``draws`` are simulated distances; None for two groups without ties, where there is a closed form of their
    effective ``sizes``.
    """

    floor: float
    sizes: Floats
    draws: Floats | None = None

    def quantile(self, level: float) -> float:
        """The distance that chance stays below with probability ``level``."""
        if self.draws is not None:
            return float(np.quantile(self.draws, level))
        n, m = self.sizes
        return float(np.clip(kolmogi(1 - level) / np.sqrt(n * m / (n + m)) - lattice_shift(n, m), 0.0, 1.0))


def two_group_null(n: float, m: float) -> Null:
    n_e = n * m / (n + m)
    floor = 0.868731 / np.sqrt(n_e) - lattice_shift(n, m) + 0.06 / n_e**1.5
    return Null(min(1.0, float(floor)), np.array([n, m]))


def lattice_shift(n: Any, m: Any) -> Any:
    """By how much finite samples without ties fall short of the Brownian bridge, in expectation."""
    return (np.maximum(n, m) + 2 * np.minimum(n, m)) / (6 * n * m)


# --- bounds on the population's distance ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CdfTable:
    """Distribution functions of the groups at some thresholds, the peak among them; arrays (G, K).

    ``squares`` is the distribution of w², which the variance of a weighted distribution function is made of.
    """

    cdfs: Floats
    squares: Floats
    sizes: Floats

    @property
    def shrunk(self) -> tuple[Floats, Floats]:
        """``cdfs`` and ``squares``, to each of which some pooled rows are lent."""
        pooled = self.sizes @ self.cdfs / self.sizes.sum()
        lent = (_SHRINK_ROWS / (self.sizes + _SHRINK_ROWS))[:, None]
        return self.cdfs + lent * (pooled - self.cdfs), self.squares + lent * (pooled - self.squares)

    @property
    def variances(self) -> Floats:
        """(G, K) of each F: ``Σ w²(1{x ≤ t} − F)²/(Σw)²``, F(1 − F)/n without weights."""
        f, q = self.shrunk
        return np.asarray(np.maximum(0.0, q * (1 - 2 * f) + f**2) / self.sizes[:, None], dtype=np.float64)


def cdf_table(ranked: Ranked, cells: int) -> CdfTable:
    """At most ``cells`` thresholds and the peak: all that there are, or such as are equally dense in every group."""
    groups, ends = ranked.ordered, ranked.ends
    if len(ends) > cells:
        cell = np.floor(np.cumsum(groups.shares)[ends] / groups.count * cells)
        ends = ends[np.unique(np.append(np.flatnonzero(np.diff(cell, append=np.inf)), np.argmax(ranked.gaps)))]
    place = groups.codes * len(ends) + np.repeat(np.arange(len(ends)), np.diff(ends, prepend=-1))

    def distribution(mass: Floats) -> Floats:
        below = np.cumsum(np.bincount(place, mass, groups.count * len(ends)).reshape(groups.count, -1), axis=1)
        return np.asarray(below / below[:, -1:], dtype=np.float64)

    cdfs = distribution(groups.shares)
    return CdfTable(cdfs, cdfs if groups.weight is None else distribution(groups.shares**2), groups.sizes)


def upper_bound(ranked: Ranked, confidence: float, method: str = "normal") -> float:
    """`ks_bound` without its checks: the largest ``F_g − F_h + z √(s_g + s_h)`` over pairs g ≠ h and thresholds."""
    table = ranked.table
    if method == "normal":
        spread, z = table.variances, float(ndtri(confidence))
    else:
        # P(D − D̂ ≥ x) ≤ exp(−2x²/(1/n_g + 1/n_h)), Hoeffding's inequality with Σ (w/Σw)² = 1/n
        spread, z = np.broadcast_to(1 / table.sizes[:, None], table.cdfs.shape), np.sqrt(-np.log1p(-confidence) / 2)
    largest = float(ranked.gaps.max())
    for g in range(len(table.cdfs)):
        value = table.cdfs[g] - table.cdfs + z * np.sqrt(spread[g] + spread)
        value[g] = -np.inf
        largest = max(largest, float(value.max()))
    return min(largest, 1.0)


def near_parity(distance: float, floor: float) -> float:
    """1 up to two floors, 0 from three on."""
    return float(np.clip(_FLOORS_APART - distance / floor, 0.0, 1.0)) if floor else 0.0
