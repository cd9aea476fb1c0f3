"""Every pair of groups by itself: distances, noise levels and p-values against SciPy and brute force."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from esvdfair.core.ks import Groups
from esvdfair.core.pairs import Pairs, holm, rising

SIZES = (40, 300, 7, 1200)


def rows(sizes=SIZES, seed=0, decimals=12, weighted=False):
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    scores = np.round(rng.normal(size=len(codes)) + 0.3 * codes, decimals)
    weight = rng.exponential(size=len(codes)) if weighted else None
    return scores, Groups.of(codes, len(sizes), weight)


@pytest.mark.parametrize("decimals", [12, 1], ids=["no ties", "ties"])
@pytest.mark.parametrize("groups", [2, 4, 12])
def test_distances_are_those_of_scipy(groups, decimals):
    scores, split = rows((SIZES * 8)[:groups], decimals=decimals)
    members = [scores[split.codes == g] for g in range(groups)]
    expected = [stats.ks_2samp(members[g], members[h]).statistic for g, h in combinations(range(groups), 2)]
    assert Pairs(split).distances(scores) == pytest.approx(np.array(expected), abs=1e-12)


def test_weighted_distances_are_those_of_brute_force():
    scores, split = rows(decimals=1, weighted=True)

    def share(g, threshold):
        mine = split.codes == g
        return split.weight[mine & (scores <= threshold)].sum() / split.weight[mine].sum()

    shares = np.array([[share(g, threshold) for threshold in np.unique(scores)] for g in range(4)])
    expected = [np.abs(shares[g] - shares[h]).max() for g, h in combinations(range(4), 2)]
    assert Pairs(split).distances(scores) == pytest.approx(np.array(expected), abs=1e-12)


@pytest.mark.parametrize("decimals", [12, 0], ids=["no ties", "ties"])
def test_the_noise_of_a_pair_does_not_depend_on_other_groups(decimals):
    """Beside two groups of 400 rows one of 3 has noise of its own, and leaves theirs alone."""
    scores, split = rows((400, 400, 3), decimals=decimals)
    large = split.codes < 2
    alone = Pairs(Groups.of(split.codes[large], 2, None), scores[large], seed=1)
    beside = Pairs(split, scores, seed=1)
    assert beside.floors[0] == alone.floors[0]
    assert beside.resolved[0] == alone.resolved[0]
    assert beside.interval(scores, 0, 0.95) == alone.interval(scores[large], 0, 0.95)
    assert beside.floors[1:].min() > 4 * beside.floors[0]


def test_the_noise_level_is_the_mean_distance_of_equal_groups():
    rng = np.random.default_rng(0)
    draws = [stats.ks_2samp(rng.normal(size=60), rng.normal(size=150)).statistic for _ in range(1500)]
    _, split = rows((60, 150))
    assert Pairs(split).floors[0] == pytest.approx(np.mean(draws), rel=0.03)


def test_p_values_are_those_of_permutations():
    """On a tail that 4,000 permutations can see; with ties Kolmogorov's would be far too large."""
    rng = np.random.default_rng(3)
    for decimals in (12, 0):
        scores = np.round(rng.normal(size=200), decimals)
        codes = np.repeat([0, 1], [80, 120])
        pairs = Pairs(Groups.of(codes, 2, None), scores, seed=2)
        drawn = np.array([pairs.distances(scores[rng.permutation(200)])[0] for _ in range(4000)])
        for level in (0.5, 0.1, 0.02):
            distance = np.quantile(drawn, 1 - level)
            by_hand = np.mean(drawn >= distance * (1 - 1e-9))
            error = np.sqrt(by_hand * (1 - by_hand) * (1 / 4000 + 1 / 1000))  # of both simulations
            assert pairs.p_values(np.array([distance]))[0] == pytest.approx(by_hand, abs=3 * error)


def test_holm_is_the_step_down_procedure_written_out():
    rng = np.random.default_rng(4)
    for _ in range(50):
        p = rng.random(6) ** 4
        left, expected = set(range(6)), np.zeros(6, dtype=bool)
        while left and p[smallest := min(left, key=lambda i: p[i])] <= 0.05 / len(left):
            expected[smallest] = True
            left.remove(smallest)
        assert holm(p).tolist() == expected.tolist()


# --- the largest of several estimates --------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [99, 400])
def test_the_largest_estimate_is_that_of_the_largest_pair(small):
    """Lowered where pairs nearly tie, but not where a group has under 100 rows, and never where one pair stands out."""
    _, split = rows((400, small, 500))
    found = Pairs(split)
    squares = np.array([[0.0100, 0.0098, 0.0099], [0.0900, 0.0001, 0.0001]])
    pairs, largest = found.largest(squares, found.floors)
    np.testing.assert_array_equal(largest, pairs.max(axis=1))
    assert (pairs <= np.sqrt(squares)).all()
    if small < 100:
        np.testing.assert_allclose(pairs, np.sqrt(squares))
    else:
        assert largest[0] < 0.95 * 0.1
    assert largest[1] == pytest.approx(0.3, abs=0.003)


def test_the_largest_of_tied_pairs_is_not_a_lucky_one():
    """Six groups of 150 rows at parity but for one pair's worth of shift: the plain maximum is far too large."""
    rng = np.random.default_rng(5)
    codes = np.repeat(np.arange(6), 150)
    pairs = Pairs(Groups.of(codes, 6, None))
    shift = 0.5 * (codes % 2)  # nine of the fifteen pairs are 0.5 apart
    true = 2 * stats.norm.cdf(0.25) - 1
    plain, corrected = [], []
    for _ in range(60):
        squares = pairs.distances(rng.normal(size=900) + shift)[None] ** 2 - pairs.floors**2
        plain.append(np.sqrt(max(squares.max(), 0)))
        corrected.append(pairs.largest(squares, pairs.floors)[1][0])
    assert np.mean(plain) > 1.2 * true
    assert abs(np.mean(corrected) - true) < 0.8 * abs(np.mean(plain) - true)


def test_squares_rise_with_the_order_and_stay_above_their_own():
    squares, order = np.array([0.04, 0.01, 0.03, 0.09]), np.array([1.0, 2.0, 3.0, 4.0])
    found = rising(squares, order)
    assert found == pytest.approx([0.04, 0.025, 0.03, 0.09])


# --- intervals -----------------------------------------------------------------------------------------------------


def test_the_interval_of_the_largest_holds_the_largest_population_distance():
    """Groups of 60 to 900 rows, the largest distance between the two large ones."""
    rng = np.random.default_rng(6)
    codes = np.repeat(np.arange(3), [900, 700, 60])
    pairs = Pairs(Groups.of(codes, 3, None))
    true, inside = 2 * stats.norm.cdf(0.3) - 1, 0
    for _ in range(60):
        scores = rng.normal(size=len(codes)) + np.array([0.0, 0.6, 0.3])[codes]
        low, high = pairs.largest_interval(scores, draws=200)
        inside += low <= true <= high
    assert inside >= 54  # 57 of 60 expected; 53 or fewer have a probability of 3 %
