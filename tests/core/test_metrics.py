"""Distances between groups against SciPy, brute force and simulation."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import linprog
from sklearn.metrics import mean_squared_error

from esvdfair.core import ks
from esvdfair.core.ks import Groups, ks_between, ks_peak, ks_to_rest
from esvdfair.core.metrics import (
    group_mse,
    ks_bound,
    ks_distance,
    ks_distance_ci,
    ks_floor,
    ks_null_quantile,
    ks_population,
    mean_gap,
    variance_gap,
    wasserstein_distance,
)
from esvdfair.core.pairs import Pairs, rising

Floats = NDArray[np.float64]


def codes_of(*sizes: int) -> NDArray[np.intp]:
    return np.repeat(np.arange(len(sizes)), sizes)


def shifted(rng: np.random.Generator, codes: NDArray[np.intp], shift: float, decimals: int = 12) -> Floats:
    return np.round(rng.standard_normal(len(codes)) + shift * codes, decimals)


# --- ks_distance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decimals", [12, 1, 0])
@pytest.mark.parametrize("sizes", [(1, 7), (40, 40), (300, 17)])
def test_ks_equals_scipy_ties_included(sizes: tuple[int, int], decimals: int) -> None:
    rng = np.random.default_rng(sum(sizes) + decimals)
    codes = rng.permutation(codes_of(*sizes))
    scores = shifted(rng, codes, 0.7, decimals)
    expected = stats.ks_2samp(scores[codes == 0], scores[codes == 1], method="asymp").statistic
    assert ks_distance(scores, sensitive_features=codes) == pytest.approx(expected, abs=1e-12)
    assert ks_between(scores, Groups(codes, 2)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("distance", [ks_distance, wasserstein_distance, mean_gap])
def test_whole_weights_are_repeated_rows(distance: Callable[..., float]) -> None:
    rng = np.random.default_rng(1)
    codes = rng.permutation(codes_of(25, 40, 12))
    scores = shifted(rng, codes, 0.3, 1)
    weights = rng.integers(0, 5, len(codes))
    repeated = distance(np.repeat(scores, weights), sensitive_features=np.repeat(codes, weights))
    assert distance(scores, sensitive_features=codes, sample_weight=weights) == pytest.approx(repeated, rel=1e-12)
    assert distance(scores, sensitive_features=codes) != pytest.approx(repeated, rel=1e-3)


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 2)), min_size=1, max_size=40),
    weights=st.lists(st.floats(0.1, 10), min_size=43, max_size=43),
)
def test_ks_keeps_under_increasing_maps_and_flips(rows: list[tuple[int, int]], weights: list[float]) -> None:
    scores, codes = np.array([*rows, (0, 0), (1, 1), (2, 2)]).T
    weight = weights[: len(scores)]
    ks = ks_distance(scores, sensitive_features=codes, sample_weight=weight)
    assert 0 <= ks <= 1
    mapped = ks_distance(scores**3 + 2 * scores, sensitive_features=codes, sample_weight=weight)
    assert mapped == ks  # order and ties are all that matter
    assert ks_distance(-scores, sensitive_features=codes, sample_weight=weight) == pytest.approx(ks, abs=1e-12)


def test_any_array_like_is_read_and_none_is_changed() -> None:
    scores, names = [0.1, 0.4, 0.2, 0.9, 0.7], ["a", "a", "b", "b", "b"]
    expected = ks_distance(scores, sensitive_features=names)
    assert expected == pytest.approx(2 / 3)
    assert ks_distance(np.array(scores)[:, None], sensitive_features=np.array(names)) == expected
    series = pd.Series(scores, index=[9, 8, 7, 6, 5])
    assert ks_distance(series, sensitive_features=pd.Series(names, dtype="category")) == expected
    assert list(series) == scores
    both = pd.DataFrame({"sex": names, "old": [0, 1, 0, 1, 1]})
    assert ks_distance(scores, sensitive_features=both) == 1  # four intersections, some of one row


def test_a_tensor_that_requires_a_gradient_is_read() -> None:
    torch = pytest.importorskip("torch")
    scores = torch.tensor([[0.1], [0.4], [0.2], [0.9], [0.7]], dtype=torch.bfloat16, requires_grad=True)
    assert ks_distance(scores, sensitive_features=torch.tensor([0, 0, 1, 1, 1])) == pytest.approx(2 / 3)


def test_the_peak_is_where_two_groups_differ_most() -> None:
    rng = np.random.default_rng(5)
    codes = rng.permutation(codes_of(30, 50, 20))
    scores, weights = shifted(rng, codes, 0.6, 1), rng.random(100)
    for w in (None, weights):
        peak = ks_peak(scores, Groups(codes, 3, w))
        share = [np.average(scores[codes == g] <= peak.threshold, weights=None if w is None else w[codes == g])
                 for g in range(3)]  # fmt: skip
        assert peak.distance == ks_between(scores, Groups(codes, 3, w))
        assert (peak.high_group, peak.low_group) == (np.argmax(share), np.argmin(share))
        assert (peak.high_share, peak.low_share) == pytest.approx((max(share), min(share)), abs=1e-12)
        assert peak.high_share - peak.low_share == pytest.approx(peak.distance, abs=1e-12)
    assert ks_peak(np.zeros(4), Groups(codes_of(2, 2), 2)).distance == 0


@pytest.mark.parametrize("scale", [1e-160, 1e160, 1e305])
def test_scales_near_the_ends_of_float64(scale: float) -> None:
    rng = np.random.default_rng(7)
    codes = codes_of(20, 30, 10)
    scores, weights = shifted(rng, codes, 1.0), rng.random(60)
    kwargs = {"sensitive_features": codes, "sample_weight": weights}
    large = {"sensitive_features": codes, "sample_weight": weights * scale}
    for metric in (mean_gap, wasserstein_distance):
        assert metric(scores * scale, **large) == pytest.approx(metric(scores, **kwargs) * scale, rel=1e-12)
    for metric in (ks_distance, ks_distance_ci):
        assert metric(scores * scale, **large) == pytest.approx(metric(scores, **kwargs), abs=1e-12)
    assert variance_gap(scores, **large) == pytest.approx(variance_gap(scores, **kwargs), rel=1e-12)
    if scale > 1:
        with pytest.raises(ValueError, match="the variance gap is beyond the largest float64"):
            variance_gap(scores * scale, **kwargs)
        with pytest.raises(ValueError, match="the error is beyond"):
            group_mse(scores, scores * scale, **kwargs)


# --- ks_floor ---------------------------------------------------------------------------------------------------


def simulated_ks(codes: NDArray[np.intp], draws: Floats) -> float:
    """Mean KS over the rows of `draws`, each a sample of one distribution for all groups."""
    order = np.argsort(draws, axis=1)
    ranked = np.take_along_axis(draws, order, axis=1)
    cdfs = [np.cumsum((codes == g)[order], axis=1) / np.sum(codes == g) for g in set(codes)]
    gap = np.max(cdfs, axis=0) - np.min(cdfs, axis=0)
    gap[:, :-1][ranked[:, 1:] == ranked[:, :-1]] = 0  # inside a tie there is no threshold
    return float(gap.max(axis=1).mean())


@pytest.mark.parametrize("sizes", [(5, 5), (30, 200), (25, 25, 25), (20, 40, 100), (150, 250, 100, 60)])
def test_floor_is_the_simulated_distance_of_one_distribution(sizes: tuple[int, ...]) -> None:
    codes = codes_of(*sizes)
    expected = simulated_ks(codes, np.random.default_rng(0).random((3000, len(codes))))
    assert ks_floor(sensitive_features=codes) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("sizes", [(10, 14), (50, 50, 90), (200, 120, 240)])
@pytest.mark.parametrize("kind", ["two values", "nine values", "clipped"])
def test_floor_with_ties_is_the_simulated_one(sizes: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(1)
    codes = codes_of(*sizes)
    scores = {
        "two values": (rng.random(len(codes)) < 0.3).astype(float),
        "nine values": rng.integers(9, size=len(codes)).astype(float),
        "clipped": np.maximum(0.3, rng.standard_normal(len(codes))),
    }[kind]
    expected = simulated_ks(codes, rng.permuted(np.tile(scores, (2000, 1)), axis=1))
    floor = ks_floor(sensitive_features=codes, y_pred=scores)
    assert floor == pytest.approx(expected, rel=0.03)
    assert floor < 0.95 * ks_floor(sensitive_features=codes)


def test_floor_does_not_mind_a_few_ties_and_repeats_itself() -> None:
    codes = codes_of(500, 400)
    scores = np.random.default_rng(0).standard_normal(900)
    scores[:20] = np.repeat(scores[:10], 2)
    assert ks_floor(sensitive_features=codes, y_pred=scores) == ks_floor(sensitive_features=codes)
    assert ks_floor(sensitive_features=codes, y_pred=np.zeros(900)) == 0
    three = codes_of(10, 20, 30)
    assert ks_floor(sensitive_features=three) == ks_floor(sensitive_features=three)
    assert ks_floor(sensitive_features=three, random_state=1) != ks_floor(sensitive_features=three)


@pytest.mark.parametrize(
    ("sizes", "sigma", "draws", "rel"),
    [
        ((80, 150), 0.8, 2000, 0.02),
        ((150, 350), 1.5, 600, 0.05),
        ((60, 60, 60), 1.5, 600, 0.05),
        ((20, 3000, 9000), 0.0, 400, 0.04),  # of which but a part of the large ones is dealt out
        ((8,) * 100, 0.0, 60, 0.03),
    ],
)
def test_floor_of_unlike_weights_and_sizes_is_the_simulated_one(
    sizes: tuple[int, ...], sigma: float, draws: int, rel: float
) -> None:
    rng = np.random.default_rng(3)
    codes = codes_of(*sizes)
    weights = rng.lognormal(0, sigma, len(codes)) if sigma else None
    groups = Groups(codes, len(sizes), weights)
    expected = np.mean([ks_between(rng.random(len(codes)), groups) for _ in range(draws)])
    floor = ks_floor(sensitive_features=codes, sample_weight=weights)
    assert floor == pytest.approx(expected, rel=rel)
    assert floor > (1 + sigma / 4) * ks_floor(sensitive_features=codes) or not sigma


@pytest.mark.parametrize("alone", [np.arange(300), [0, 1]])
def test_floor_of_single_rows_is_a_distance(alone: object) -> None:
    assert ks_floor(sensitive_features=alone) <= 1


@pytest.mark.parametrize(("groups", "ratio"), [(2, 1.563), (3, 1.46), (5, 1.37)])
def test_the_95_per_cent_point_of_parity_depends_on_the_number_of_groups(groups: int, ratio: float) -> None:
    codes = codes_of(*[2000] * groups)
    quantile = ks_null_quantile(sensitive_features=codes)
    assert quantile / ks_floor(sensitive_features=codes) == pytest.approx(ratio, rel=0.03)
    if groups == 2:
        assert stats.ks_2samp([0], [1]).pvalue == 1  # the p-value of our quantile is 5 %:
        assert stats.kstwo.sf(quantile, 1000) == pytest.approx(0.05, abs=0.003)


# --- each group against the rest --------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_each_group_against_the_rest_equals_one_distance_for_each(weighted: bool) -> None:
    rng = np.random.default_rng(8)
    codes = np.append(np.repeat(np.arange(15), 2), rng.integers(15, size=300))
    scores = np.round(rng.standard_normal(330) + 0.1 * codes, 1)
    weights = rng.exponential(size=330) if weighted else None
    found = ks_to_rest(scores, Groups(codes, 15, weights))
    for g in range(15):
        mine = codes == g
        assert found.distance[g] == pytest.approx(
            ks_distance(scores, sensitive_features=mine, sample_weight=weights), abs=1e-12
        )
        assert 0 <= found.low[g] <= found.distance[g] <= found.high[g] <= 1
        if not weighted:
            high = ks_bound(scores, sensitive_features=mine, confidence=0.975)
            assert found.high[g] == pytest.approx(high, abs=0.05)  # which lends rows to each side
    assert (found.low > 0).any()
    assert (found.low == 0).any()


# --- ks_distance_ci ---------------------------------------------------------------------------------------------


def normal_shift(rng: np.random.Generator, codes: NDArray[np.intp], ks: float) -> Floats:
    """Two normal groups at distance ks."""
    return shifted(rng, codes, 2 * stats.norm.ppf((1 + ks) / 2))


def plateau(rng: np.random.Generator, codes: NDArray[np.intp], ks: float) -> Floats:
    """F₀ − F₁ = ks on all of [0, 1]: the supremum has no single place, where the plain basic interval covers 0.85."""
    uniform, moved = rng.random((2, len(codes)))
    return np.where(moved < ks, uniform + np.where(codes == 1, 1, -1), uniform)


@pytest.mark.parametrize(("draw", "sizes", "floors"), [(normal_shift, (60, 300), 3), (plateau, (150, 150), 4)])
def test_interval_covers_the_true_distance(draw: Callable[..., Floats], sizes: tuple[int, int], floors: int) -> None:
    rng = np.random.default_rng(0)
    codes = codes_of(*sizes)
    true = floors * ks_floor(sensitive_features=codes)
    intervals = [
        ks_distance_ci(draw(rng, codes, true), sensitive_features=codes, n_resamples=200, random_state=i)
        for i in range(150)
    ]
    assert np.mean([low <= true <= high for low, high in intervals]) >= 0.90
    assert np.mean([high - low for low, high in intervals]) < true  # not by being vacuous


@pytest.mark.parametrize("shift", [0.0, 0.7, 9.0])
@pytest.mark.parametrize("groups", [2, 3])
def test_interval_lies_in_the_unit_interval_around_the_estimate(shift: float, groups: int) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(groups, size=700)
    scores = shifted(rng, codes, shift)
    low, high = ks_distance_ci(scores, sensitive_features=codes, n_resamples=200)
    assert 0 <= low <= ks_distance(scores, sensitive_features=codes) <= high <= 1
    assert (low == 0) == (shift == 0.0)
    assert low < 1


def test_interval_leaves_zero_out_where_a_test_of_parity_rejects_it() -> None:
    rng = np.random.default_rng(4)
    codes = codes_of(200, 200)
    seen = set()
    for ks_true in np.repeat([0.05, 0.1, 0.15], 10):
        scores = normal_shift(rng, codes, ks_true)
        p = stats.ks_2samp(scores[codes == 0], scores[codes == 1], method="exact").pvalue
        if p < 0.045 or p > 0.055:
            low, _ = ks_distance_ci(scores, sensitive_features=codes)
            assert (low > 0) == (p < 0.05)
            seen.add(p < 0.05)
    assert seen == {True, False}


def test_interval_near_the_floor_of_many_rows() -> None:
    """5,000 rows a group at a distance of .041, p = .0004: [0, .056] before, though parity is out of the question."""
    grid = np.linspace(0, 1, 5000)
    scores, codes = np.append(grid, grid + 0.041), codes_of(5000, 5000)
    low, high = ks_distance_ci(scores, sensitive_features=codes)
    assert 0.008 < low < 0.025
    assert 0.055 < high < 0.065


def test_interval_of_many_groups_subtracts_what_parity_shows() -> None:
    """Of the pair that is farthest apart, at a level that allows for all pairs."""
    rng = np.random.default_rng(10)
    codes = codes_of(*[30] * 20)
    apart = rng.standard_normal(600) + 3 * (codes == 0)
    near = rng.standard_normal(600) + 0.7 * (codes == 0)
    alike = rng.standard_normal(600)
    (null,) = Pairs(Groups(codes_of(30, 30), 2)).nulls
    assert ks_distance_ci(alike, sensitive_features=codes)[0] == 0
    for scores, far in ((near, False), (apart, True)):
        low, high = ks_distance_ci(scores, sensitive_features=codes)
        distance = ks_distance(scores, sensitive_features=codes)
        assert high >= distance
        if far:
            assert distance - null.quantile(1 - 0.025 / 190) <= low < distance - null.quantile(0.5)
            assert high == 1
        else:
            assert low == pytest.approx(distance - null.quantile(1 - 0.05 / 190))


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_interval_of_many_small_groups_covers(shift: float) -> None:
    """The lower end, which has to allow for the luckiest of 190 pairs, is above the truth in 5 % of samples at most."""
    rng = np.random.default_rng(11)
    codes = codes_of(*[30] * 20)
    true = 2 * stats.norm.cdf(shift / 2) - 1
    above = sum(
        ks_distance_ci(rng.standard_normal(600) + shift * (codes == 0), sensitive_features=codes)[0] > true
        for _ in range(100)
    )
    assert above <= 9  # 10 or more of 100 have a probability of 3 % where 5 % are allowed


def test_complete_separation_is_not_certain() -> None:
    codes = codes_of(50, 50)
    low, high = ks_distance_ci(codes, sensitive_features=codes)
    assert high == 1
    # 50 rows show no one of a share of 1 % more often than not (0.99⁵⁰ = 0.6)
    assert 0.9 < low < 0.98


def test_constant_scores_are_at_parity_for_certain() -> None:
    constant = {"y_pred": np.full(90, 0.3), "sensitive_features": codes_of(40, 50)}
    assert ks_distance(**constant) == ks_bound(**constant) == ks_population(**constant) == 0
    assert ks_distance_ci(**constant) == (0, 0)


def test_interval_repeats_itself_and_widens_with_confidence() -> None:
    rng = np.random.default_rng(5)
    codes = codes_of(150, 250)
    scores = shifted(rng, codes, 1.0)
    low, high = ks_distance_ci(scores, sensitive_features=codes)
    assert ks_distance_ci(scores, sensitive_features=codes) == (low, high)
    assert ks_distance_ci(scores, sensitive_features=codes, random_state=np.random.default_rng(7)) != (low, high)
    wide = ks_distance_ci(scores, sensitive_features=codes, confidence=0.999)
    assert wide[0] < low < high < wide[1]


def test_interval_knows_only_relative_weights_and_widens_with_them() -> None:
    rng = np.random.default_rng(8)
    codes = codes_of(800, 800)
    scores = shifted(rng, codes, 1.0)
    plain = ks_distance_ci(scores, sensitive_features=codes)
    equal = ks_distance_ci(scores, sensitive_features=codes, sample_weight=np.full(1600, 2.5))
    assert equal == pytest.approx(plain, abs=1e-12)
    quarter = np.where(np.arange(1600) % 4 == 0, 1.0, 1e-9)
    low, high = ks_distance_ci(scores, sensitive_features=codes, sample_weight=quarter)
    assert (high - low) / (plain[1] - plain[0]) == pytest.approx(2, rel=0.2)


def test_variance_of_weighted_shares_agrees_with_resampling_the_rows() -> None:
    rng = np.random.default_rng(0)
    codes = codes_of(250, 400)
    scores = shifted(rng, codes, 1.0)
    weights = np.exp(scores)  # rows in the upper tail count most, so w² is distributed unlike w
    table = ks.cdf_table(ks.Ranked(scores, Groups(codes, 2, weights)), 10**6)
    at = int(np.searchsorted(np.sort(scores), 0.0)) - 1

    def resampled() -> float:
        rows = rng.integers(250, size=250)
        return float(np.average(scores[rows] <= 0.0, weights=weights[rows]))

    draws = [resampled() for _ in range(2000)]
    assert np.sqrt(table.variances[0, at]) == pytest.approx(np.std(draws), rel=0.08)
    assert abs(np.std(draws) / np.sqrt(table.cdfs[0, at] * (1 - table.cdfs[0, at]) / table.sizes[0]) - 1) > 0.15


# --- ks_bound and ks_population ---------------------------------------------------------------------------------


def sharp(rng: np.random.Generator, codes: NDArray[np.intp], ks: float) -> Floats:
    """Uniform groups that differ at a sharp peak in the middle: where a bound has least to spare."""
    grid = np.linspace(0, 1, 2001)
    peak = ks / 2 * np.maximum(0, 1 - np.abs(grid - 0.5) / max(0.2, 0.7 * ks))
    u = rng.random(len(codes))
    return np.where(codes == 0, np.interp(u, grid + peak, grid), np.interp(u, grid - peak, grid))


@pytest.mark.parametrize(("sizes", "sigma"), [((360, 40), 0.0), ((200, 200), 0.0), ((150, 350), 1.0)])
def test_the_bound_is_exceeded_as_rarely_as_it_says(sizes: tuple[int, int], sigma: float) -> None:
    """A small version of benchmarks/promise.py."""
    rng = np.random.default_rng(11)
    codes = codes_of(*sizes)
    exceeded, tight = [], []
    for _ in range(200):
        scores = sharp(rng, codes, 0.2)
        weights = rng.lognormal(0, sigma, len(codes)) if sigma else None
        bounds = [
            ks_bound(scores, sensitive_features=codes, sample_weight=weights, confidence=0.9, method=method)
            for method in ("normal", "hoeffding")
        ]
        assert bounds[0] < bounds[1]
        exceeded.append(bounds[0] < 0.2)
        tight.append(bounds[0])
    assert np.mean(exceeded) <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / 200)
    assert np.mean(tight) < 0.2 + 3 * ks_floor(sensitive_features=codes, sample_weight=weights)


def test_the_bound_is_the_largest_over_thresholds_and_pairs() -> None:
    rng = np.random.default_rng(12)
    codes = codes_of(40, 60, 25)
    scores = rng.standard_normal(125) + 0.3 * codes
    below = np.array([[np.mean(scores[codes == g] <= t) for t in scores] for g in range(3)])
    sizes = np.array([40, 60, 25.0])
    margin = np.sqrt(np.log(20) / 2)
    by_hand = max(
        (below[g] - below[h]).max() + margin * np.sqrt(1 / sizes[g] + 1 / sizes[h])
        for g in range(3) for h in range(3) if g != h
    )  # fmt: skip
    assert ks_bound(scores, sensitive_features=codes, method="hoeffding") == pytest.approx(by_hand, abs=1e-12)
    wald = max(
        (below[g] - below[h] + 1.644854 * np.sqrt(
            below[g] * (1 - below[g]) / sizes[g] + below[h] * (1 - below[h]) / sizes[h])).max()
        for g in range(3) for h in range(3) if g != h
    )  # fmt: skip
    assert ks_bound(scores, sensitive_features=codes) == pytest.approx(wald, abs=0.01)  # which lends no rows
    heavy = ks_bound(scores, sensitive_features=codes, sample_weight=np.full(125, 3.0))
    assert heavy == pytest.approx(ks_bound(scores, sensitive_features=codes), abs=1e-12)


def test_the_estimate_takes_off_what_sampling_adds() -> None:
    rng = np.random.default_rng(14)
    codes = codes_of(150, 250)
    floor = ks_floor(sensitive_features=codes)
    draws = [normal_shift(rng, codes, 2 * floor) for _ in range(150)]
    estimates = [ks_population(scores, sensitive_features=codes) for scores in draws]
    plain = [ks_distance(scores, sensitive_features=codes) for scores in draws]
    assert np.mean(estimates) == pytest.approx(2 * floor, rel=0.1)
    assert np.mean(plain) > 2.2 * floor
    alike = np.arange(400)  # of both groups at every place: below the noise level
    assert ks_distance(alike, sensitive_features=np.resize([0, 0, 1], 400)) < floor
    assert ks_population(alike, sensitive_features=np.resize([0, 0, 1], 400)) == 0


def test_the_best_of_many_estimates_is_not_a_lucky_one() -> None:
    """60 candidates at one and the same distance: the smallest single estimate is far too small."""
    rng = np.random.default_rng(15)
    codes = codes_of(200, 200)
    judged, other = (
        np.array([ks_distance(normal_shift(rng, codes, 0.15), sensitive_features=codes) for _ in range(60)])
        for _ in range(2)
    )
    floor = ks_floor(sensitive_features=codes)
    single = np.sqrt(np.maximum(0, judged**2 - floor**2))
    along = np.sqrt(np.maximum(0, rising(judged**2 - floor**2, other)))
    assert single.min() < 0.06
    assert along.min() > 0.1
    assert (along >= single).all()
    assert rising(judged[:1] ** 2, other[:1]) == pytest.approx(judged[:1] ** 2)


# --- Wasserstein ------------------------------------------------------------------------------------------------


def test_wasserstein_one_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    codes = rng.permutation(codes_of(33, 70))
    scores = shifted(rng, codes, 0.5, 1)
    weights = rng.random(len(codes))
    a, b = codes == 0, codes == 1
    assert wasserstein_distance(scores, sensitive_features=codes) == pytest.approx(
        stats.wasserstein_distance(scores[a], scores[b]), rel=1e-12
    )
    assert wasserstein_distance(scores, sensitive_features=codes, sample_weight=weights) == pytest.approx(
        stats.wasserstein_distance(scores[a], scores[b], weights[a], weights[b]), rel=1e-12
    )


@pytest.mark.parametrize("order", [1, 2])
def test_wasserstein_equals_the_cheapest_transport_plan(order: int) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(7), 2 * rng.standard_normal(11) + 1
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(11))
    cost = np.abs(x[:, None] - y) ** order
    marginals = np.vstack([np.kron(np.eye(7), np.ones(11)), np.kron(np.ones(7), np.eye(11))])
    plan = linprog(cost.ravel(), A_eq=marginals, b_eq=np.concatenate([p, q]))
    got = wasserstein_distance(
        np.append(x, y), sensitive_features=codes_of(7, 11), sample_weight=np.append(3 * p, q), order=order
    )
    assert got == pytest.approx(plan.fun ** (1 / order), rel=1e-8)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("groups", [3, 40])
def test_wasserstein_of_several_groups_is_that_of_the_farthest_pair(groups: int, order: int) -> None:
    rng = np.random.default_rng(4)
    codes = np.append(np.arange(40) % groups, rng.integers(groups, size=300))
    scores, weights = rng.standard_normal(340) * (1 + codes % 3), rng.exponential(size=340)
    pairs = [
        wasserstein_distance(scores[mine], sensitive_features=codes[mine], sample_weight=weights[mine], order=order)
        for g, h in combinations(range(groups), 2)
        for mine in [(codes == g) | (codes == h)]
    ]
    got = wasserstein_distance(scores, sensitive_features=codes, sample_weight=weights, order=order)
    assert got == pytest.approx(max(pairs), rel=1e-12)


# --- moments and errors by group --------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_and_variance_gaps_equal_numpy(weighted: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.permutation(codes_of(15, 40, 8))
    scores = 1e3 + rng.standard_normal(63) * np.array([1.0, 2.0, 3.0])[codes] + codes
    weights = rng.random(63) if weighted else None
    of_group = [(scores[codes == g], None if weights is None else weights[codes == g]) for g in range(3)]
    means = [np.average(x, weights=w) for x, w in of_group]
    variances = [np.cov(x, aweights=w) for x, w in of_group]
    kwargs = {"sensitive_features": codes, "sample_weight": weights}
    assert mean_gap(scores, **kwargs) == pytest.approx(max(means) - min(means), rel=1e-10)
    assert variance_gap(scores, **kwargs) == pytest.approx(max(variances) - min(variances), rel=1e-10)


def test_group_mse_equals_scikit_learn_group_by_group() -> None:
    rng = np.random.default_rng(1)
    names = np.array(["b", "a", "b", "a", "b", "c"])
    y, scores, weights = rng.standard_normal((3, 6))
    weights = np.abs(weights)
    got = group_mse(y, scores, sensitive_features=names, sample_weight=weights)
    assert list(got) == ["a", "b", "c"]
    for name, mse in got.items():
        mine = names == name
        assert mse == pytest.approx(mean_squared_error(y[mine], scores[mine], sample_weight=weights[mine]))
    assert group_mse([1.0, 2.0], [1.0, 4.0], sensitive_features=[7, 7]) == {7: 2.0}


# --- errors -----------------------------------------------------------------------------------------------------

GOOD = np.array([0.1, 0.2, 0.3, 0.4])
NAMES = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("y_pred", "groups", "weights", "message"),
    [
        (GOOD, ["a"] * 4, None, r"one group, 'a'; at least 2 groups are needed"),
        ([], [], None, "no rows"),
        ([0.1, np.nan, np.inf, 1], NAMES, None, "`y_pred` contains 2 NaN or infinite values among 4"),
        (GOOD[:3], NAMES, None, "`sensitive_features` has 4 rows but `y_pred` has 3"),
        (np.ones((4, 2)), NAMES, None, "`y_pred` has 2 columns"),
        (0.5, NAMES, None, r"`y_pred` has shape \(\)"),
        (["high", "low", "low", "low"], NAMES, None, "`y_pred` contains values that are not numbers"),
        (GOOD, NAMES, [1, -1, 1, -2], "2 negative values"),
        (GOOD, NAMES, [1, 1, 1], "`sensitive_features` has 4 rows but `sample_weight` has 3"),
        (GOOD, NAMES, [1, 1, 1, np.nan], "`sample_weight` contains 1 NaN or infinite"),
        (GOOD, NAMES, [1, 1, 0, 0], "group 'b' has 0 rows with positive weight"),
        (GOOD, ["a", None, "b", "b"], None, "1 missing value"),
    ],
)
def test_bad_rows_are_refused(y_pred: object, groups: object, weights: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ks_distance(y_pred, sensitive_features=groups, sample_weight=weights)


@pytest.mark.parametrize("distance", [ks_distance_ci, variance_gap])
@pytest.mark.parametrize(("groups", "weights"), [(["a", "b", "b", "b"], None), (NAMES, [1, 0, 1, 1])])
def test_a_spread_needs_two_rows_in_every_group(
    distance: Callable[..., float], groups: list[str], weights: list[int] | None
) -> None:
    with pytest.raises(ValueError, match="group 'a' has 1 rows with positive weight; this needs at least 2"):
        distance(GOOD, sensitive_features=groups, sample_weight=weights)


@pytest.mark.parametrize("confidence", [0, 1, 95, -0.5])
def test_confidence_must_be_a_proper_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence="):
        ks_distance_ci(GOOD, sensitive_features=NAMES, confidence=confidence)


def test_other_arguments_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="n_resamples=0"):
        ks_distance_ci(GOOD, sensitive_features=NAMES, n_resamples=0)
    with pytest.raises(ValueError, match="method='exact'"):
        ks_bound(GOOD, sensitive_features=NAMES, method="exact")
    with pytest.raises(ValueError, match="level=1"):
        ks_null_quantile(1, sensitive_features=NAMES)
    with pytest.raises(ValueError, match="order=3"):
        wasserstein_distance(GOOD, sensitive_features=NAMES, order=3)
    with pytest.raises(ValueError, match="`y_pred` has 4 rows but `y_true` has 3"):
        group_mse(GOOD[:3], GOOD, sensitive_features=NAMES)
    with pytest.raises(ValueError, match="no rows"):
        group_mse([], [], sensitive_features=[])
    with pytest.raises(ValueError, match="`sensitive_features` has 4 rows but `y_pred` has 3"):
        ks_floor(sensitive_features=NAMES, y_pred=GOOD[:3])
    with pytest.raises(ValueError, match="one group"):
        ks_floor(sensitive_features=["a", "a"])
