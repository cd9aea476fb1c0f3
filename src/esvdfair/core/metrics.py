"""How far apart predictions of groups are: KS with noise level, interval and bound, Wasserstein, gaps, errors.

Long because every public function documents its parameters.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from esvdfair.core.checks import (
    Label,
    check_column,
    check_rows,
    check_strata,
    check_weight,
    encode_groups,
    make_generator,
    unit_scale,
    unscaled,
)
from esvdfair.core.ks import Floats, Groups, Null, Ranked, Seed, adjusted_weights, ks_between, upper_bound
from esvdfair.core.pairs import Pairs, ks_null
from esvdfair.exceptions import InputError

_FEW_GROUPS = 8  # up to here every pair is summed
_CELLS = 128  # levels at which many quantile functions are compared before they are compared exactly


# --- Kolmogorov–Smirnov --------------------------------------------------------------------------------------------


def ks_distance(
    y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None, control_features: Any = None
) -> float:
    """Compute the largest Kolmogorov–Smirnov (KS) distance between the predictions of two groups.

    ``max_{g,h} sup_t |F_g(t) − F_h(t)|`` with F_g the (weighted) empirical distribution function of group g: exact,
    also with ties. 0 is statistical parity, 1 is complete separation.

    Parameters
    ----------
    y_pred : array-like of shape (rows,) or (rows, 1)
        Predictions.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row.
    control_features : array-like of shape (rows,) or (rows, attributes), default=None
        Strata, such as job or region: groups are compared as if each had the same mix of strata.

    Returns
    -------
    float
        Distance between 0 and 1.

    Raises
    ------
    ValueError
        If there is only one group, a value is missing or infinite, lengths differ, a weight is negative, or a group has
        no weight.

    Examples
    --------
    >>> ks_distance([1, 2, 3, 4], sensitive_features=["a", "a", "b", "a"])
    0.6666666666666666
    """
    return ks_between(*_check_scores(y_pred, sensitive_features, sample_weight, control_features))


def demographic_parity_ks(y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None) -> float:
    """Compute `ks_distance` with the signature of a Fairlearn or scikit-learn metric.

    It is 0 for rows of one group, so that it can be used in a ``MetricFrame``.

    Parameters
    ----------
    y_true : object
        Not used.
    y_pred, sensitive_features, sample_weight : array-like
        Predictions, groups and weights of the rows, as for `ks_distance`.

    Returns
    -------
    float
        Distance between 0 and 1.

    Examples
    --------
    >>> demographic_parity_ks(None, [1, 2, 3, 4], sensitive_features=["a", "a", "b", "a"])
    0.6666666666666666
    """
    if len(encode_groups(sensitive_features)[0]) == 1:
        return 0.0
    return ks_distance(y_pred, sensitive_features=sensitive_features, sample_weight=sample_weight)


def ks_distance_ci(
    y_pred: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    control_features: Any = None,
    confidence: float = 0.95,
    n_resamples: int = 1000,
    random_state: Seed = 0,
) -> tuple[float, float]:
    """Compute a confidence interval of the population's KS distance.

    With more than two groups it is an interval of the largest distance of any pair: the lower end is the largest of the
    pairs' own, with Bonferroni's correction for their number, the upper end is the largest of the pairs' own.

    Parameters
    ----------
    y_pred, sensitive_features, sample_weight, control_features : array-like
        Predictions, groups, weights and strata of the rows, as for `ks_distance`.
    confidence : float, default=0.95
        Probability with which such intervals contain the distance.
    n_resamples : int, default=1000
        Bootstrap samples behind the lower end.
    random_state : int, Generator or None, default=0
        Seed of the simulation.

    Returns
    -------
    low : float
        Lower end, at most the distance of these rows.
    high : float
        Upper end, at least the distance of these rows.

    Raises
    ------
    ValueError
        As `ks_distance`; also for a group with one row, ``confidence`` outside (0, 1) or ``n_resamples`` below 1.

    Notes
    -----
    With T the distance of these rows, D(t) the difference of the two distribution functions and α = 1 − confidence, the
    upper end is `ks_bound` at 1 − α/2. The lower end is T − q. From three noise levels on q is the 1 − α/2 quantile of
    ``sup_t (ε* − (T − D − 4 sd)₊)``, where ε* is bootstrap noise and sd the standard error of T − D(t): the noise
    wherever the true peak may be. Up to two noise levels it is the 1 − α quantile of the distance that chance
    produces: the interval excludes 0 exactly where a test of parity at level α rejects it. In between, both are mixed.

    Examples
    --------
    >>> groups, scores = ["a", "b"] * 200, list(range(400))
    >>> low, high = ks_distance_ci(scores, sensitive_features=groups)
    >>> low, round(high, 3)
    (0.0, 0.103)
    """
    _check_confidence(confidence)
    if n_resamples < 1:
        raise InputError(f"`n_resamples={n_resamples}` must be at least 1.")
    scores, groups = _check_scores(y_pred, sensitive_features, sample_weight, control_features, rows_needed=2)
    pairs = Pairs(groups, scores, _seed(random_state))
    return pairs.largest_interval(scores, confidence, draws=n_resamples)


def ks_bound(
    y_pred: Any,
    *,
    sensitive_features: Any,
    confidence: float = 0.95,
    method: str = "normal",
    sample_weight: Any = None,
    control_features: Any = None,
) -> float:
    """Compute a one-sided upper confidence bound of the population's KS distance.

    The distance exceeds the bound in at most 1 − confidence of samples. The rows must not have been used to fit or to
    choose the model.

    Parameters
    ----------
    y_pred, sensitive_features, sample_weight, control_features : array-like
        Predictions, groups, weights and strata of the rows, as for `ks_distance`.
    confidence : float, default=0.95
        Between 0 and 1.
    method : {"normal", "hoeffding"}, default="normal"
        Normal approximation, or a bound that holds at every sample size and is wider.

    Returns
    -------
    float
        The bound, at least the distance of these rows.

    Notes
    -----
    An intersection–union test: it can fail only at the true peak, so a bound for a single threshold, taken at all of
    them, is enough. With δ = 1 − confidence it is ``sup over t and pairs of F_g − F_h + z_{1−δ} √(v_g + v_h)``,
    ``v = Σ w²(1{x ≤ t} − F)²/(Σw)²`` (``F(1 − F)/n`` without weights); the margin of ``"hoeffding"`` is
    ``√(ln(1/δ)/2) √(1/n_g + 1/n_h)``, n = (Σw)²/Σw², which holds if the weights do not depend on the predictions.

    Examples
    --------
    >>> groups, scores = ["a", "b"] * 200, list(range(400))
    >>> round(ks_bound(scores, sensitive_features=groups), 3), round(ks_distance(scores, sensitive_features=groups), 3)
    (0.087, 0.005)
    """
    _check_confidence(confidence)
    if method not in ("normal", "hoeffding"):
        raise InputError(f"`method={method!r}` is not a bound; use 'normal' or 'hoeffding'.")
    scores, groups = _check_scores(y_pred, sensitive_features, sample_weight, control_features)
    return upper_bound(Ranked(scores, groups), confidence, method)


def ks_population(
    y_pred: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    control_features: Any = None,
    random_state: Seed = 0,
) -> float:
    """Estimate the population's KS distance: ``√(T² − noise²)``, or 0 if the distance T is below the noise level.

    With more than two groups it is the largest over the pairs, each with its own distance and noise level, corrected
    for pairs that nearly tie (docs/method.md 2.7).

    Parameters
    ----------
    y_pred, sensitive_features, sample_weight, control_features : array-like
        Predictions, groups, weights and strata of the rows, as for `ks_distance`.
    random_state : int, Generator or None, default=0
        Seed of the simulation.

    Returns
    -------
    float
        Estimate between 0 and 1.

    Notes
    -----
    Sampling makes the distance T of these rows larger than the population's k, about √(k² + noise²). On known
    populations (`benchmarks/promise.py`) the estimate is right on average for a shift. Where groups differ at one sharp
    peak it is a quarter too small at k = noise, a tenth at 2 noise; where they differ over the whole range it is a
    quarter and a fifth too large.

    Examples
    --------
    >>> groups, scores = ["a", "b"] * 200, list(range(400))
    >>> ks_population(scores, sensitive_features=groups)
    0.0
    """
    scores, groups = _check_scores(y_pred, sensitive_features, sample_weight, control_features)
    pairs = Pairs(groups, scores, _seed(random_state))
    squares = pairs.distances(scores)[None] ** 2 - pairs.floors**2
    return float(pairs.largest(squares, pairs.floors)[1][0])


def ks_floor(
    *,
    sensitive_features: Any,
    y_pred: Any = None,
    sample_weight: Any = None,
    control_features: Any = None,
    random_state: Seed = 0,
) -> float:
    """Compute the noise level: the expected `ks_distance` of groups that have the same distribution.

    A distance near the noise level cannot be told from parity at these group sizes.

    Parameters
    ----------
    sensitive_features, sample_weight, control_features : array-like
        Groups, weights and strata of the rows, as for `ks_distance`.
    y_pred : array-like of shape (rows,), default=None
        Predictions, of which only ties matter: they lower the noise level. If None, all predictions are taken to
        differ.
    random_state : int, Generator or None, default=0
        Seed of the simulation.

    Returns
    -------
    float
        Noise level between 0 and 1.

    Notes
    -----
    For two groups, with n_e = n₁n₂/(n₁+n₂), it is ``0.868731/√n_e − (max+2·min)/(6n₁n₂) + 0.06/n_e^{1.5}`` (within 2%
    from three rows a group). With more groups or tied scores it is simulated, by permutations where groups are small,
    else by their Gaussian limit. Weighted groups count with their effective sizes (Σw)²/Σw².

    Examples
    --------
    >>> round(ks_floor(sensitive_features=["a"] * 100 + ["b"] * 100), 3)
    0.118
    """
    return _null(sensitive_features, y_pred, sample_weight, control_features, random_state).floor


def ks_null_quantile(
    level: float = 0.95,
    *,
    sensitive_features: Any,
    y_pred: Any = None,
    sample_weight: Any = None,
    random_state: Seed = 0,
) -> float:
    """Compute a quantile of the KS distance that chance alone produces.

    A larger distance is a difference beyond chance at level 1 − level. The 95% point is 1.56 noise levels for two
    groups, 1.46 for three, 1.37 for five.

    Parameters
    ----------
    level : float, default=0.95
        Between 0 and 1.
    sensitive_features, y_pred, sample_weight, random_state : object
        Groups, predictions and weights of the rows, and a seed, as for `ks_floor`.

    Returns
    -------
    float
        The KS distance that groups of one distribution stay below with probability ``level``.

    Examples
    --------
    >>> round(ks_null_quantile(0.95, sensitive_features=["a"] * 100 + ["b"] * 100), 2)
    0.19
    """
    if not 0 < level < 1:
        raise InputError(f"`level={level}` is not strictly between 0 and 1; use for example 0.95.")
    return _null(sensitive_features, y_pred, sample_weight, None, random_state).quantile(level)


def _null(sensitive_features: Any, y_pred: Any, sample_weight: Any, control_features: Any, random_state: Seed) -> Null:
    _, groups = _check_groups(sensitive_features, sample_weight, control_features)
    scores = None if y_pred is None else check_column(y_pred, len(groups.codes), "y_pred", of="sensitive_features")
    return ks_null(groups, scores, make_generator(random_state))


def _seed(random_state: Seed) -> int:
    return random_state if isinstance(random_state, int) else int(make_generator(random_state).integers(2**31))


# --- Wasserstein, moments, errors ----------------------------------------------------------------------------------


def wasserstein_distance(
    y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None, control_features: Any = None, order: int = 1
) -> float:
    """Compute the largest Wasserstein distance between the predictions of two groups.

    ``W_p = (∫₀¹ |Q_g(u) − Q_h(u)|^p du)^{1/p}`` with Q the quantile functions, summed exactly over their merged steps.

    Parameters
    ----------
    y_pred, sensitive_features, sample_weight, control_features : array-like
        Predictions, groups, weights and strata of the rows, as for `ks_distance`.
    order : {1, 2}, default=1
        The exponent p.

    Returns
    -------
    float
        Distance in the unit of the predictions.

    Examples
    --------
    >>> wasserstein_distance([1, 2, 3, 4], sensitive_features=["a", "a", "b", "b"])
    2.0
    """
    if order not in (1, 2):
        raise InputError(f"`order={order!r}` is not available; use order 1 or 2.")
    scores, groups = _check_scores(y_pred, sensitive_features, sample_weight, control_features)
    unit = unit_scale(scores)
    by_group = np.lexsort((scores, groups.codes))
    bounds = np.cumsum(np.bincount(groups.codes))[:-1]
    values = np.split(np.ldexp(scores, -unit)[by_group], bounds)
    masses = np.split(np.ones(len(scores)) if groups.weight is None else groups.weight[by_group], bounds)
    functions = [(x, np.cumsum(mass)) for x, mass in zip(values, masses, strict=True)]
    farthest = 0.0
    for g, h, at_most in _farthest_first(functions, order):
        if at_most <= farthest:
            break
        farthest = max(farthest, _quantile_distance(*functions[g], *functions[h], order))
    return unscaled(farthest, unit, "the Wasserstein distance")


def _farthest_first(groups: list[tuple[Floats, Floats]], order: int) -> Iterable[tuple[int, int, float]]:
    """Pairs of groups and what their distance is at most; of many, those that may be farthest, the farthest first.

    A sketch of Q is its mean over each of some equal cells of levels. Distances of sketches are never above those of
    the functions (Jensen), and below by at most what both functions vary within the cells (half a cell's range each).
    """
    if len(groups) <= _FEW_GROUPS:
        return ((g, h, np.inf) for g, h in combinations(range(len(groups)), 2))
    levels = np.linspace(0, 1, _CELLS + 1)
    means, rough = np.empty((len(groups), _CELLS)), np.empty(len(groups))
    for g, (values, below) in enumerate(groups):
        upto = below / below[-1]
        integral = np.append(0.0, np.cumsum(values * np.diff(upto, prepend=0.0)))
        means[g] = np.diff(np.interp(levels, np.append(0.0, upto), integral)) * _CELLS
        starts, ends = np.searchsorted(upto, levels[:-1] + 1e-12), np.searchsorted(upto, levels[1:] - 1e-12)
        rough[g] = np.mean(np.maximum(0.0, (values[ends] - values[starts]) / 2) ** order) ** (1 / order)
    sketch = cdist(means, means, "minkowski", p=order) * _CELLS ** (-1 / order)
    at_most = np.triu(sketch + rough[:, None] + rough, 1) * (1 + 1e-9)
    first, second = np.nonzero(at_most >= sketch.max())
    most = at_most[first, second]
    by_most = np.argsort(-most)
    return zip(first[by_most].tolist(), second[by_most].tolist(), most[by_most].tolist(), strict=True)


def _quantile_distance(a: Floats, below_a: Floats, b: Floats, below_b: Floats, order: int) -> float:
    # levels in units of 1/(W_a W_b): whole numbers for unit weights, so that equal levels merge exactly
    levels_a, levels_b = below_a * below_b[-1], below_b * below_a[-1]
    levels = np.sort(np.concatenate([levels_a, levels_b]))
    widths = np.diff(levels, prepend=0.0)
    middles = levels - widths / 2
    gaps = np.abs(a[np.searchsorted(levels_a, middles)] - b[np.searchsorted(levels_b, middles)])
    return float((widths @ gaps**order / levels[-1]) ** (1 / order))


def mean_gap(y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None, control_features: Any = None) -> float:
    """Compute the largest absolute difference between the mean predictions of two groups.

    Parameters
    ----------
    y_pred, sensitive_features, sample_weight, control_features : array-like
        Predictions, groups, weights and strata of the rows, as for `ks_distance`.

    Returns
    -------
    float
        Difference in the unit of the predictions.

    Examples
    --------
    >>> mean_gap([1, 2, 3, 4], sensitive_features=["a", "a", "b", "b"])
    2.0
    """
    scores, groups = _check_scores(y_pred, sensitive_features, sample_weight, control_features)
    unit = unit_scale(scores)
    return unscaled(float(np.ptp(groups.means(np.ldexp(scores, -unit)))), unit, "the mean gap")


def variance_gap(
    y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None, control_features: Any = None
) -> float:
    """Compute the largest absolute difference between the unbiased variances of two groups' predictions.

    The divisor is ``Σw − Σw²/Σw`` as for `numpy.cov` with ``aweights``: n − 1 without weights. Every group needs two
    rows with positive weight.

    Parameters
    ----------
    y_pred, sensitive_features, sample_weight, control_features : array-like
        Predictions, groups, weights and strata of the rows, as for `ks_distance`.

    Returns
    -------
    float
        Difference in the squared unit of the predictions.

    Examples
    --------
    >>> variance_gap([1, 2, 3, 5], sensitive_features=["a", "a", "b", "b"])
    1.5
    """
    labels, groups = _check_groups(sensitive_features, sample_weight, control_features, rows_needed=2)
    scores = check_column(y_pred, len(groups.codes), "y_pred", of="sensitive_features")
    if not (1 - 1 / groups.sizes).min() > 0:
        raise InputError(
            f"`sample_weight` of group {labels[int(groups.sizes.argmin())]!r} lies on one row; a variance needs at "
            "least two rows with weight."
        )
    unit = unit_scale(scores)
    return unscaled(float(np.ptp(groups.variances(np.ldexp(scores, -unit)))), 2 * unit, "the variance gap")


def group_mse(y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None) -> dict[Label, float]:
    """Compute the mean squared error of each group.

    Parameters
    ----------
    y_true : array-like of shape (rows,)
        Labels.
    y_pred, sensitive_features, sample_weight : array-like
        Predictions, groups and weights of the rows, as for `ks_distance`.

    Returns
    -------
    dict
        Mean squared error, keyed by group label. A single group is allowed.

    Examples
    --------
    >>> group_mse([1, 2, 3, 5], [1, 2, 3, 4], sensitive_features=["a", "a", "b", "b"])
    {'a': 0.0, 'b': 0.5}
    """
    labels, groups = _check_groups(sensitive_features, sample_weight, groups_needed=1)
    scores = check_column(y_pred, len(groups.codes), "y_pred", of="sensitive_features")
    truth = check_column(y_true, len(scores), "y_true", of="y_pred")
    unit = unit_scale(scores, truth)
    means = groups.means((np.ldexp(truth, -unit) - np.ldexp(scores, -unit)) ** 2).tolist()
    return {label: unscaled(mse, 2 * unit, "the error") for label, mse in zip(labels, means, strict=True)}


# --- checks --------------------------------------------------------------------------------------------------------


def _check_scores(
    y_pred: Any, sensitive_features: Any, sample_weight: Any, control_features: Any, *, rows_needed: int = 1
) -> tuple[Floats, Groups]:
    """Finite scores and their groups."""
    scores = check_column(y_pred, None, "y_pred")
    _, groups = _check_groups(sensitive_features, sample_weight, control_features, rows_needed=rows_needed)
    check_rows(len(scores), len(groups.codes), "y_pred", of="sensitive_features")
    return scores, groups


def _check_groups(
    sensitive_features: Any,
    sample_weight: Any,
    control_features: Any = None,
    *,
    rows_needed: int = 1,
    groups_needed: int = 2,
) -> tuple[tuple[Label, ...], Groups]:
    """Labels, and the groups."""
    labels, codes = encode_groups(sensitive_features)
    if len(labels) < groups_needed:
        found = f"one group, {labels[0]!r}" if labels else "no rows"
        raise InputError(f"`sensitive_features` contains {found}; at least {groups_needed} groups are needed.")
    weights = strata = None
    if sample_weight is not None:
        weights = check_weight(sample_weight, len(codes), of="sensitive_features", zero=True)
    if control_features is not None:
        _, strata = check_strata(control_features, len(codes), of="sensitive_features")
        weights = adjusted_weights(codes, len(labels), strata, weights)
    rows = np.bincount(codes, None if weights is None else weights > 0, len(labels))
    if rows.min() < rows_needed:
        raise ValueError(
            f"group {labels[rows.argmin()]!r} has {int(rows.min())} rows with positive weight; this needs at least "
            f"{rows_needed} in every group. Pass more rows, or leave the group out."
        )
    return labels, Groups.of(codes, len(labels), weights, strata)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"`confidence={confidence}` is not strictly between 0 and 1; use for example 0.95.")
