"""Private histogram: noise, slack, randomised transport; repair and transport against independent linear programs."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from esvdfair.baselines import PrivateHistogram, score_maps
from esvdfair.baselines.score_maps import cheapest_plans, monotone_plan, repair_cdf
from esvdfair.core.metrics import ks_distance, ks_floor


def sample(sizes, rng):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return rng.normal(size=groups.size) * (1 + 0.5 * groups) + groups, groups


def test_full_slack_only_bins():
    scores, groups = sample([200, 100], np.random.default_rng(0))
    fair = PrivateHistogram(alpha=1.0, bounds=(-4, 6)).fit(scores, sensitive_features=groups)
    got = fair.predict(scores, sensitive_features=groups)
    assert fair.cost_ == pytest.approx(0, abs=1e-12)
    assert np.abs(got - np.clip(scores, -4, 6)).max() <= 10 / 18 / 2 + 1e-12


def test_noise_has_the_scale_of_the_promise(monkeypatch):
    """A share is the sum of 2 cells, each with Laplace noise of scale b = 2/(ε n), variance 2b²: deviation 2b."""
    stand_in = np.ones((2, 2, 2)) / 4, np.ones((2, 2)) / 2, 0.0
    monkeypatch.setattr(score_maps, "cheapest_plans", lambda *_, **__: stand_in)  # 1000 programs are slow
    scores, groups = sample([500, 500], np.random.default_rng(1))
    shares = [
        PrivateHistogram(bins=2, bounds=(-4, 6), epsilon=0.5, random_state=seed)
        .fit(scores, sensitive_features=groups)
        .proportions_
        for seed in range(1000)
    ]
    b = 2 / (0.5 * 1000)
    assert np.std(np.asarray(shares) - 0.5) == pytest.approx(2 * b, rel=0.1)
    quiet = PrivateHistogram(bins=2, bounds=(-4, 6)).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(quiet.proportions_, 0.5, rtol=1e-12)


@pytest.mark.parametrize("epsilon", [10.0, 0.1, 0.001])
def test_noisy_histograms_are_repaired_to_distributions(epsilon):
    scores, groups = sample([300, 30], np.random.default_rng(2))
    fair = PrivateHistogram(bounds=(-4, 6), epsilon=epsilon, random_state=0).fit(scores, sensitive_features=groups)
    for table in (fair.histogram_, fair.target_, *fair.transport_):
        assert table.min() >= -1e-12
        np.testing.assert_allclose(table.sum(axis=-1), 1, atol=1e-9)
    assert np.ptp(np.cumsum(fair.target_, axis=1), axis=0).max() < 1e-9


def test_random_transport_has_the_right_marginals():
    scores, groups = sample([30_000, 20_000], np.random.default_rng(4))
    fair = PrivateHistogram(bins=6, bounds=(-2, 3), random_state=0).fit(scores, sensitive_features=groups)
    got = fair.predict(scores, sensitive_features=groups)
    for code, n in enumerate((30_000, 20_000)):
        mine = groups == code
        share = np.array([np.mean(got[mine] == point) for point in fair.points_])
        np.testing.assert_allclose(share, fair.target_[code], atol=4 * np.sqrt(0.25 / n))
        start = (scores >= fair.edges_[2]) & (scores < fair.edges_[3]) & mine
        moved = np.array([np.mean(got[start] == point) for point in fair.points_])
        np.testing.assert_allclose(moved, fair.transport_[code, 2], atol=4 * np.sqrt(0.25 / start.sum()))
    assert np.count_nonzero(fair.transport_[0, 2] > 0.05) > 1  # else the check of randomness would be empty


def test_slack_is_respected_in_sample():
    scores, groups = sample([3000, 2000], np.random.default_rng(5))
    fair = PrivateHistogram(alpha=0.15, random_state=0).fit(scores, sensitive_features=groups)
    ks = ks_distance(fair.predict(scores, sensitive_features=groups), sensitive_features=groups)
    assert ks == pytest.approx(0.15, abs=2 * ks_floor(sensitive_features=groups))


def test_the_larger_group_moves_less():
    scores, groups = sample([900, 100], np.random.default_rng(10))
    scores = scores + 2 * groups
    fair = PrivateHistogram(bins=40).fit(scores, sensitive_features=groups)
    # like every barycentre, the target has the overall mean, not the mean of the group means
    assert scores.mean() == pytest.approx(fair.target_[0] @ fair.points_, abs=0.1)
    assert abs((scores[groups == 0].mean() + scores[groups == 1].mean()) / 2 - scores.mean()) > 1


def test_bins_are_closed_on_the_left_and_catch_what_lies_outside():
    scores = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 0.1, 1.1, 1.9])
    groups = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    fair = PrivateHistogram(bins=2, bounds=(0, 2), alpha=1.0).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(fair.histogram_, [[0.4, 0.6], [1 / 3, 2 / 3]])
    got = fair.predict([-100.0, 0.99, 1.0, 100.0], sensitive_features=[0, 0, 0, 0])
    np.testing.assert_allclose(got, [0.5, 0.5, 1.5, 1.5])


def test_a_bin_unseen_in_its_group_is_left_where_it_is():
    scores, groups = np.array([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 0, 1, 1, 1])
    fair = PrivateHistogram(bins=5, random_state=0).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(fair.predict([0.5, 0.3], sensitive_features=[0, 1]), [0.5, 0.3])


# --- repair and transport on a grid -----------------------------------------------------------------------------------


def nearest_monotone(x):
    """min t s.t. |z − x| ≤ t, z non-decreasing in [0, 1] and z_last = 1, by linear programming."""
    n = x.size
    eye, one = np.eye(n), np.ones((n, 1))
    order = np.hstack([-np.diff(np.eye(n), axis=0), np.zeros((n - 1, 1))])
    a_ub = np.vstack([np.hstack([eye, -one]), np.hstack([-eye, -one]), order])
    b_ub = np.r_[x, -x, np.zeros(n - 1)]
    z_bounds = [(0, 1)] * (n - 1) + [(1, 1)]
    return linprog(np.r_[np.zeros(n), 1.0], A_ub=a_ub, b_ub=b_ub, bounds=[*z_bounds, (0, None)]).fun


@pytest.mark.parametrize("seed", range(5))
def test_repaired_cdf_is_the_nearest_distribution_function(seed):
    x = np.cumsum(np.random.default_rng(seed).normal(0.08, 0.3, size=12))
    z = repair_cdf(x)
    assert np.all(np.diff(z) >= 0)
    assert z[0] >= 0
    assert z[-1] == 1
    assert np.abs(z - x).max() == pytest.approx(nearest_monotone(x), abs=1e-9)


def cost_in_cdfs(histogram, proportions, alpha):
    """The same program without plans, over output distribution functions R_a alone, for unit bins.

    Under the monotone coupling P(X ≤ s, Y > t) = (P(s) − R(t))⁺, and (y − x)² counts pairs (s, t) of steps between
    x and y, so W₂² = Σ_{s≤t} (2 − 1{s=t}) [(P(s) − R(t))⁺ + (R(s) − P(t))⁺].
    """
    groups, k = histogram.shape
    p = np.cumsum(histogram, axis=1)
    pairs = [(s, t) for s in range(k) for t in range(s, k)]
    r_count, slack_count = groups * k, groups * len(pairs) * 2
    cost, a_ub, b_ub = np.zeros(r_count + slack_count), [], []

    def row(entries, bound):
        line = np.zeros(r_count + slack_count)
        for index, value in entries:
            line[index] += value
        a_ub.append(line)
        b_ub.append(bound)

    slack = r_count
    for a in range(groups):
        for s, t in pairs:
            cost[slack : slack + 2] = proportions[a] * (1 if s == t else 2)
            row([(a * k + t, -1), (slack, -1)], -p[a, s])  # P(s) − R(t) ≤ slack
            row([(a * k + s, 1), (slack + 1, -1)], p[a, t])  # R(s) − P(t) ≤ slack
            slack += 2
        for s in range(k - 1):
            row([(a * k + s, 1), (a * k + s + 1, -1)], 0)
        for b in range(groups):
            for s in range(k):
                row([(a * k + s, 1), (b * k + s, -1)], alpha if a != b else 0)
    bounds = ([(0, 1)] * (k - 1) + [(1, 1)]) * groups + [(0, None)] * slack_count
    return linprog(cost, A_ub=np.array(a_ub), b_ub=b_ub, bounds=bounds).fun


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3])
def test_program_matches_an_independent_one_in_distribution_functions(groups, alpha):
    rng = np.random.default_rng(groups)
    histogram = np.stack([rng.dirichlet(np.linspace(0.2, 2, 7)[:: (-1) ** g]) for g in range(groups)])
    proportions = rng.dirichlet(np.ones(groups))
    *_, cost = cheapest_plans(histogram, proportions=proportions, points=np.arange(7.0), alpha=alpha)
    assert cost == pytest.approx(cost_in_cdfs(histogram, proportions, alpha), rel=1e-7, abs=1e-9)
    assert cost > 0.01


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3])
def test_plans_have_the_right_marginals_and_the_slack_is_used_but_respected(groups, alpha):
    rng = np.random.default_rng(10 + groups)
    histogram = rng.dirichlet(np.full(12, 0.4), size=groups)
    points = np.linspace(0, 1, 12)
    plans, targets, _ = cheapest_plans(histogram, proportions=np.ones(groups), points=points, alpha=alpha)
    np.testing.assert_allclose(plans.sum(axis=2), histogram, atol=1e-9)
    cdfs = np.cumsum(targets, axis=1)
    ks = max(np.abs(cdfs[a] - cdfs[b]).max() for a, b in combinations(range(groups), 2))
    assert ks == pytest.approx(alpha, abs=1e-9)
    before = np.cumsum(histogram, axis=1)
    assert np.ptp(before, axis=0).max() > 0.3


def test_monotone_plan_is_the_cheapest_between_its_marginals():
    p, q = np.random.default_rng(30).dirichlet(np.ones(6), size=2)
    cost = (np.arange(6)[:, None] - np.arange(6)) ** 2
    marginals = np.vstack([np.kron(np.eye(6), np.ones(6)), np.kron(np.ones(6), np.eye(6))])
    plan = monotone_plan(p, q)
    np.testing.assert_allclose([plan.sum(axis=1), plan.sum(axis=0)], [p, q], atol=1e-15)
    best = linprog(cost.ravel(), A_eq=marginals, b_eq=np.r_[p, q]).fun
    assert (plan * cost).sum() == pytest.approx(best, abs=1e-9)


def test_the_scale_of_the_points_does_not_matter():
    histogram = np.random.default_rng(31).dirichlet(np.ones(8), size=2)
    small, large = (
        cheapest_plans(histogram, proportions=np.ones(2), points=np.arange(8.0) * scale, alpha=0.05)
        for scale in (1e-9, 1e9)
    )
    np.testing.assert_allclose(small[1], large[1], atol=1e-8)
    assert small[2] * 1e36 == pytest.approx(large[2], rel=1e-6)
