"""How far apart the groups' predictions are: KS with its interval and floor, Wasserstein, moment gaps, errors."""

from itertools import combinations, permutations
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import (
    Label,
    check_column,
    check_rows,
    check_weight,
    encode_groups,
    unit_scale,
    unscaled,
)
from esvdfair.exceptions import Given, InputError

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.intp]
Seed: TypeAlias = int | np.random.Generator | None

_PERMUTED_ROWS = 400  # up to here the floor is simulated by permutations, above by their limit
_NULL_CELLS = 256  # thresholds of that limit
_DRAWS_AT_ONCE = 4_000_000  # numbers held by one chunk of resamples
_SHRINK_ROWS = 2.0  # pooled rows lent to each group, without which complete separation would look certain
_NEAR_PEAK = 2.0  # standard errors within which another threshold may be the true peak
_FLOORS_ABOVE_ZERO = 3.0  # below this many floors the interval starts at 0
_TIED_SHARE = 0.05  # share of tied rows below which ties hardly move the floor
_GRID_SHIFT = 0.5826  # −ζ(1/2)/√(2π): what a supremum over a grid misses, in standard deviations of one step


def ks_distance(y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None) -> float:
    """Largest Kolmogorov–Smirnov distance between the predictions of two groups.

    ``max_{g,h} sup_t |F_g(t) − F_h(t)|`` with F_g the (weighted) empirical distribution function of group g.
    Exact: no bins, ties count once. 0 is statistical parity, 1 is complete separation.

    Parameters
    ----------
    y_pred : array-like of shape (rows,) or (rows, 1)
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
    sample_weight : array-like of shape (rows,), optional

    Raises
    ------
    ValueError
        One group only, missing or infinite values, lengths that differ, weights below zero, a group of zero weight.

    Examples
    --------
    >>> ks_distance([1, 2, 3, 4], sensitive_features=["a", "a", "b", "a"])
    0.6666666666666666
    """
    scores, labels, codes, weights = _check(y_pred, sensitive_features, sample_weight)
    return ks_from_codes(scores, codes, len(labels), weights)


def ks_from_codes(scores: Floats, codes: Codes, n_groups: int, weights: Floats | None = None) -> float:
    """`ks_distance` without its checks, for callers in a loop: every code in ``range(n_groups)`` must occur.

    One sort, whatever the number of groups: see `_envelopes`.
    """
    _, upper, lower = _envelopes(scores, codes, n_groups, weights)
    return float((upper - lower).max())


class Peak(NamedTuple):
    """Where two groups differ most: ``high_share`` of one and ``low_share`` of the other are at or below ``threshold``.

    ``distance``, the difference of the two shares, is the KS distance; ``high_group`` and ``low_group`` are codes.
    """

    distance: float
    threshold: float
    high_group: int
    high_share: float
    low_group: int
    low_share: float


def ks_peak(scores: Floats, codes: Codes, n_groups: int, weights: Floats | None = None) -> Peak:
    """The threshold at which two groups differ most, and who they are; arguments as for `ks_from_codes`."""
    thresholds, upper, lower = _envelopes(scores, codes, n_groups, weights)
    peak = int(np.argmax(upper - lower))
    below = scores <= thresholds[peak]
    shares = _group_means(below.astype(np.float64), codes, n_groups, weights)
    high, low = int(shares.argmax()), int(shares.argmin())
    distance = float(upper[peak] - lower[peak])
    return Peak(distance, float(thresholds[peak]), high, float(shares[high]), low, float(shares[low]))


def ks_distance_ci(
    y_pred: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    confidence: float = 0.95,
    n_resamples: int = 1000,
    floor: float | None = None,
    random_state: Seed = 0,
) -> tuple[float, float]:
    """Bootstrap interval of `ks_distance`, resampled within each group.

    With T the estimate, D(t) the difference of two groups and ε*(t) its bootstrap noise (a multiplier bootstrap,
    so that weights need no special case and, after one sort, the cost does not grow with the rows):

    - upper end ``T − q_{α/2}[sup_t (D + ε*) − T]``, the basic interval;
    - lower end ``T − q_{1−α/2}[sup_t (ε* − (T − D − c·sd)₊)]``, where sd is the standard error of T − D(t). The
      basic interval is the case c = 0. It takes every threshold below the peak for truly lower and so misses part
      of the upward bias of a supremum: it covers 0.83 to 0.92 at a nominal 0.95, and c = 2 covers 0.93 to 0.98.

    The interval lies in [0, 1] and holds the estimate. Its lower end is 0 when the estimate is below three times
    `ks_floor`, where no bootstrap can tell a gap from none; pass ``floor`` when it is known already.

    Returns
    -------
    (low, high) : tuple of float

    Raises
    ------
    ValueError
        As `ks_distance`; also a group with one row, ``confidence`` outside (0, 1), ``n_resamples`` below 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is not strictly between 0 and 1; use for example 0.95.")
    if n_resamples < 1:
        raise ValueError(f"n_resamples={n_resamples} draws nothing; use at least a few hundred.")
    scores, labels, codes, weights = _check(y_pred, sensitive_features, sample_weight, rows_needed=2)
    rng = np.random.default_rng(random_state)
    sizes = _effective_sizes(codes, len(labels), weights)
    cdfs = _cdfs(scores, codes, len(labels), weights)
    # the distribution of w², which has the variance of a weighted distribution function; the same for equal weights
    squares = cdfs if weights is None else _cdfs(scores, codes, len(labels), weights**2)
    kept = _thresholds(cdfs)
    above, basic = _resample(cdfs[:, kept], squares[:, kept], sizes, n_resamples, rng)
    distance = float(np.ptp(cdfs, axis=0).max())
    tail = (1 - confidence) / 2
    low = distance - max(0.0, float(np.quantile(above, 1 - tail)))
    high = distance - min(0.0, float(np.quantile(basic, tail)))
    if distance < _FLOORS_ABOVE_ZERO * (_floor(codes, sizes, scores, weights, rng) if floor is None else floor):
        low = 0.0
    return max(low, 0.0), min(high, 1.0)


def ks_floor(
    *, sensitive_features: Any, y_pred: Any = None, sample_weight: Any = None, random_state: Seed = 0
) -> float:
    """Expected `ks_distance` when every group is a sample of one and the same distribution.

    An estimate near the floor is what parity itself would show at these group sizes. For two groups, with
    n_e = n₁n₂/(n₁+n₂): ``0.868731/√n_e − (max+2·min)/(6n₁n₂) + 0.06/n_e^{1.5}`` (within 2 % from three rows a group);
    with more groups, or tied scores, it is simulated, up to 400 rows by permutations, above by their Gaussian limit.
    Weighted groups count with their effective sizes (Σw)²/Σw².

    Parameters
    ----------
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
    y_pred : array-like of shape (rows,), optional
        Only its ties matter: tied scores lower the floor. Without it the scores are taken to be all different.
    sample_weight : array-like of shape (rows,), optional
    random_state : int, Generator or None
        Seeds the simulation.

    Examples
    --------
    >>> round(ks_floor(sensitive_features=["a"] * 100 + ["b"] * 100), 3)
    0.118
    """
    labels, codes, weights = _check_groups(sensitive_features, sample_weight)
    scores = None if y_pred is None else check_column(y_pred, len(codes), "y_pred", of="sensitive_features")
    sizes = _effective_sizes(codes, len(labels), weights)
    return _floor(codes, sizes, scores, weights, np.random.default_rng(random_state))


def wasserstein_distance(y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None, order: int = 1) -> float:
    """Largest Wasserstein distance of order 1 or 2 between the predictions of two groups.

    ``W_p = (∫₀¹ |Q_g(u) − Q_h(u)|^p du)^{1/p}`` with Q the quantile functions, summed exactly over their merged steps.
    """
    if order not in (1, 2):
        raise ValueError(f"order={order!r} is not available; use order=1 or order=2.")
    scores, labels, codes, weights = _check(y_pred, sensitive_features, sample_weight)
    unit = unit_scale(scores)
    scores = np.ldexp(scores, -unit)
    groups = [
        _quantile_steps(scores[codes == g], None if weights is None else weights[codes == g])
        for g in range(len(labels))
    ]
    distance = max(_quantile_distance(*a, *b, order) for a, b in combinations(groups, 2))
    return unscaled(distance, unit, "the Wasserstein distance")


def mean_gap(y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None) -> float:
    """Largest absolute difference between the mean predictions of two groups."""
    scores, labels, codes, weights = _check(y_pred, sensitive_features, sample_weight)
    unit = unit_scale(scores)
    gap = np.ptp(_group_means(np.ldexp(scores, -unit), codes, len(labels), weights))
    return unscaled(float(gap), unit, "the mean gap")


def variance_gap(y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None) -> float:
    """Largest absolute difference between the unbiased variances of two groups' predictions.

    The divisor is ``Σw − Σw²/Σw`` as for `numpy.cov` with ``aweights``: n − 1 without weights. A group needs two
    rows with weight.
    """
    scores, labels, codes, weights = _check(y_pred, sensitive_features, sample_weight, rows_needed=2)
    unit = unit_scale(scores)
    scores = np.ldexp(scores, -unit)
    deviations = scores - _group_means(scores, codes, len(labels), weights)[codes]
    variances = _group_means(deviations**2, codes, len(labels), weights)
    # Σw(x−x̄)²/(Σw − Σw²/Σw) = (weighted mean of (x−x̄)²) / (1 − 1/n_e)
    gap = np.ptp(variances / (1 - 1 / _effective_sizes(codes, len(labels), weights)))
    return unscaled(float(gap), 2 * unit, "the variance gap")


def group_mse(y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None) -> dict[Label, float]:
    """Mean squared error within each group, keyed by label; a single group is allowed."""
    scores, labels, codes, weights = _check(y_pred, sensitive_features, sample_weight, groups_needed=1)
    truth = check_column(y_true, len(scores), "y_true", of="y_pred")
    unit = unit_scale(scores, truth)
    errors = np.ldexp(truth, -unit) - np.ldexp(scores, -unit)
    means = _group_means(errors**2, codes, len(labels), weights).tolist()
    return {label: unscaled(mse, 2 * unit, "the error") for label, mse in zip(labels, means, strict=True)}


def _envelopes(scores: Floats, codes: Codes, n_groups: int, weights: Floats | None) -> tuple[Floats, Floats, Floats]:
    """Distinct scores, and at each of them max_g F_g and min_g F_g; shapes (distinct,).

    No F_g falls, so the largest at a threshold is the largest value that any row up to it stepped *to*, and the
    smallest is the smallest value that any row beyond it will step *from*: two running extrema, without G.
    """
    order = np.argsort(scores)
    ranked = scores[order]
    before, after = _steps(codes[order], n_groups, None if weights is None else weights[order])
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    upper = np.maximum.accumulate(after)[ends]
    lower = np.append(np.minimum.accumulate(before[::-1])[::-1], 1.0)[ends + 1]
    return ranked[ends], upper, lower


def _steps(codes: Codes, n_groups: int, weights: Floats | None) -> tuple[Floats, Floats]:
    """F of its own group before and after each row, for rows in the order of their scores; shapes (rows,)."""
    small = codes.astype(np.uint16) if n_groups <= 2**16 else codes  # which NumPy sorts by digits, in linear time
    by_group = np.argsort(small, kind="stable")
    counts = np.bincount(codes, minlength=n_groups)
    before, after = np.empty((2, len(codes)))
    if weights is None:
        rank = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.repeat(counts, counts)
        before[by_group], after[by_group] = rank / sizes, (rank + 1) / sizes
        return before, after
    share = weights / np.bincount(codes, weights, n_groups)[codes]  # each group sums to 1, so none drowns in another
    run = np.cumsum(share[by_group])
    starts = np.cumsum(counts) - counts
    base = np.repeat(np.append(0.0, run)[starts], counts)
    total = np.repeat(run[starts + counts - 1], counts) - base
    after[by_group] = (run - base) / total
    before[by_group] = (np.append(0.0, run[:-1]) - base) / total
    return before, after


def _cdfs(scores: Floats, codes: Codes, n_groups: int, weights: Floats | None) -> Floats:
    """(G, distinct scores): F_g at each distinct score."""
    order = np.argsort(scores)
    ranked = scores[order]
    last_of_tie = np.append(ranked[1:] != ranked[:-1], True)
    member = codes[order] == np.arange(n_groups)[:, None]  # (G, rows)
    below = np.cumsum(member if weights is None else member * weights[order], axis=1)[:, last_of_tie]
    return np.asarray(below / below[:, -1:], dtype=np.float64)


def _thresholds(cdfs: Floats) -> Codes:
    """Columns to resample: the peak, the end, and a bounded number of others, equally dense in every group."""
    cells = max(64, 512 // len(cdfs))  # all pairs are resampled, so the more groups the coarser
    if cdfs.shape[1] <= cells:
        return np.arange(cdfs.shape[1])
    cell = np.floor(cdfs.mean(axis=0) * cells)
    peak = np.argmax(np.ptp(cdfs, axis=0))
    return np.unique(np.append(np.flatnonzero(np.diff(cell, append=np.inf)), peak))


def _resample(
    cdfs: Floats, squares: Floats, sizes: Floats, n_resamples: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Draws of the two suprema of `ks_distance_ci`, each of shape (n_resamples,)."""
    pooled = sizes @ cdfs / sizes.sum()
    lent = (_SHRINK_ROWS / (sizes + _SHRINK_ROWS))[:, None]
    centre = cdfs + lent * (pooled - cdfs)  # (G, K)
    spread = np.diff(squares + lent * (pooled - squares), axis=1, prepend=0.0)
    variance = np.maximum(0.0, spread) / sizes[:, None]  # a step of zero can be negative by rounding
    at_once = max(50, _DRAWS_AT_ONCE // cdfs.size)
    above, basic = [], []
    for start in range(0, n_resamples, at_once):
        size = min(at_once, n_resamples - start)
        noise = np.stack([_bridges(v, f, size, rng) for v, f in zip(variance, centre, strict=True)])  # (G, B, K)
        above.append(_noise_near_peak(cdfs, noise))
        basic.append(np.ptp(cdfs[:, None] + noise, axis=0).max(axis=1) - np.ptp(cdfs, axis=0).max())
    return np.concatenate(above), np.concatenate(basic)


def _bridges(variance: Floats, cdf: Floats, size: int, rng: np.random.Generator) -> Floats:
    """(size, K) draws of the sampling noise of one F: Σ_{i≤k} e_i − F_k Σ_i e_i with e_i ~ N(0, variance_i)."""
    walk = np.cumsum(rng.standard_normal((size, len(cdf))) * np.sqrt(variance), axis=1)
    return np.asarray(walk - walk[:, -1:] * cdf, dtype=np.float64)


def _noise_near_peak(cdfs: Floats, noise: Floats) -> Floats:
    """sup over pairs and thresholds of ε* − (T − D − c·sd)₊, the noise wherever the true peak may be; shape (B,)."""
    gaps = np.ptp(cdfs, axis=0)
    peak = int(np.argmax(gaps))
    high, low = np.argmax(cdfs[:, peak]), np.argmin(cdfs[:, peak])
    at_peak = noise[high, :, peak] - noise[low, :, peak]
    supremum = np.full(noise.shape[1], -np.inf)
    for g, h in permutations(range(len(cdfs)), 2):
        epsilon = noise[g] - noise[h]  # (B, K)
        doubt = _NEAR_PEAK * (epsilon - at_peak[:, None]).std(axis=0)
        shortfall = np.maximum(0.0, gaps[peak] - (cdfs[g] - cdfs[h]) - doubt)
        supremum = np.maximum(supremum, (epsilon - shortfall).max(axis=1))
    return supremum


def _floor(
    codes: Codes, sizes: Floats, scores: Floats | None, weights: Floats | None, rng: np.random.Generator
) -> float:
    masses, tied = _null_cells(scores, weights)
    if len(sizes) == 2 and masses[tied].sum() < _TIED_SHARE:
        n, m = sizes
        n_e = n * m / (n + m)
        return min(1.0, float(0.868731 / np.sqrt(n_e) - _lattice_shift(n, m) + 0.06 / n_e**1.5))
    draws = max(500, 8000 // len(sizes))  # the more pairs, the less their maximum varies
    if len(codes) <= _PERMUTED_ROWS:
        return _permuted_floor(codes, len(sizes), scores, weights, draws, rng)
    return _limit_floor(sizes, masses, tied, draws, rng)


def _permuted_floor(
    codes: Codes,
    n_groups: int,
    scores: Floats | None,
    weights: Floats | None,
    draws: int,
    rng: np.random.Generator,
) -> float:
    """Mean KS when the groups are dealt out anew over the sorted scores; exact but for the number of draws."""
    ranked = np.sort(np.arange(len(codes)) if scores is None else scores)
    last_of_tie = np.append(ranked[1:] != ranked[:-1], True)
    rows = rng.permuted(np.tile(np.arange(len(codes)), (draws, 1)), axis=1)  # (draws, rows)
    mass = np.ones(len(codes)) if weights is None else weights
    below = np.stack([np.cumsum(((codes == g) * mass)[rows], axis=1)[:, last_of_tie] for g in range(n_groups)])
    return float(np.ptp(below / below[..., -1:], axis=0).max(axis=1).mean())


def _limit_floor(sizes: Floats, masses: Floats, tied: NDArray[np.bool_], draws: int, rng: np.random.Generator) -> float:
    """Mean supremum of the limiting bridges on a grid, moved by what grid and finite samples change in expectation."""
    cdf = np.cumsum(masses)
    noise = [_bridges(masses / n, cdf, draws, rng) for n in sizes]
    supremum = np.zeros(draws)
    for g, h in combinations(range(len(sizes)), 2):
        step = np.sqrt(masses * (1 / sizes[g] + 1 / sizes[h]))
        between = np.where(tied, 0.0, _GRID_SHIFT * step - _lattice_shift(sizes[g], sizes[h]))
        supremum = np.maximum(supremum, (np.abs(noise[g] - noise[h]) + between).max(axis=1))
    return float(supremum.mean())


def _lattice_shift(n: float, m: float) -> float:
    """By how much finite samples without ties fall short of the Brownian bridge, in expectation."""
    return (max(n, m) + 2 * min(n, m)) / (6 * n * m)


def _null_cells(scores: Floats | None, weights: Floats | None) -> tuple[Floats, NDArray[np.bool_]]:
    """Masses of consecutive cells of the pooled scores, and which cells are one tied value."""
    if scores is None:
        return np.full(_NULL_CELLS, 1 / _NULL_CELLS), np.zeros(_NULL_CELLS, dtype=bool)
    _, value, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mass = np.bincount(value, weights)
    mass = mass / mass.sum()
    tied = (counts > 1) & (mass > 0.5 / _NULL_CELLS)
    cell = np.floor(np.cumsum(mass) * _NULL_CELLS)
    first = np.append(True, (cell[1:] != cell[:-1]) | tied[1:] | tied[:-1])
    masses = np.asarray(np.bincount(np.cumsum(first) - 1, mass), dtype=np.float64)
    return masses, tied[first]


def _quantile_steps(values: Floats, weights: Floats | None) -> tuple[Floats, Floats]:
    """Sorted values and the weight up to each."""
    order = np.argsort(values)
    mass = np.ones(len(values)) if weights is None else weights[order]
    return values[order], np.cumsum(mass)


def _quantile_distance(a: Floats, below_a: Floats, b: Floats, below_b: Floats, order: int) -> float:
    # levels in units of 1/(W_a W_b): whole numbers for unit weights, so that equal levels merge exactly
    levels_a, levels_b = below_a * below_b[-1], below_b * below_a[-1]
    levels = np.sort(np.concatenate([levels_a, levels_b]))
    widths = np.diff(levels, prepend=0.0)
    middles = levels - widths / 2
    gaps = np.abs(a[np.searchsorted(levels_a, middles)] - b[np.searchsorted(levels_b, middles)])
    return float((widths @ gaps**order / levels[-1]) ** (1 / order))


def _group_means(values: Floats, codes: Codes, n_groups: int, weights: Floats | None) -> Floats:
    sums = np.bincount(codes, values if weights is None else values * weights, n_groups)
    return np.asarray(sums / np.bincount(codes, weights, n_groups), dtype=np.float64)


def _effective_sizes(codes: Codes, n_groups: int, weights: Floats | None) -> Floats:
    """(Σw)²/Σw² of each group: its number of rows without weights."""
    if weights is None:
        return np.bincount(codes, minlength=n_groups).astype(np.float64)
    return np.asarray(np.bincount(codes, weights) ** 2 / np.bincount(codes, weights**2), dtype=np.float64)


def _check(
    y_pred: Any, sensitive_features: Any, sample_weight: Any, *, rows_needed: int = 1, groups_needed: int = 2
) -> tuple[Floats, tuple[Label, ...], Codes, Floats | None]:
    """Finite scores, labels and codes of their groups, and weights, the largest of each group 1."""
    scores = check_column(y_pred, None, "y_pred")
    labels, codes, weights = _check_groups(sensitive_features, sample_weight, rows_needed, groups_needed)
    check_rows(len(scores), len(codes), "y_pred", of="sensitive_features")
    return scores, labels, codes, weights


def _check_groups(
    sensitive_features: Any, sample_weight: Any, rows_needed: int = 1, groups_needed: int = 2
) -> tuple[tuple[Label, ...], Codes, Floats | None]:
    labels, codes = encode_groups(sensitive_features)
    if len(labels) < groups_needed:
        raise InputError(
            "{sensitive_features} holds {found}; this needs at least {needed}. Pass rows of every group.",
            sensitive_features=Given(),
            found=f"one group, {labels[0]!r}" if labels else "no rows",
            needed=groups_needed,
        )
    weights = None
    if sample_weight is not None:
        weights = check_weight(sample_weight, len(codes), of="sensitive_features", zero=True)
    rows = np.bincount(codes, None if weights is None else weights > 0, len(labels))
    if rows.min() < rows_needed:
        raise ValueError(
            f"group {labels[rows.argmin()]!r} has {int(rows.min())} rows with positive weight; this needs at least "
            f"{rows_needed} in every group. Pass more rows, or leave the group out."
        )
    if weights is not None:
        largest = np.zeros(len(labels))
        np.maximum.at(largest, codes, weights)
        weights = weights / largest[codes]  # sums and squares then neither overflow nor vanish
    return labels, codes, weights
