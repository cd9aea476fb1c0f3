"""Repair and transport on a grid, each against an independent linear program."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from esvdfair.baselines.private_histogram import cheapest_plans, monotone_plan, repair_cdf


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


def test_a_valid_cdf_is_not_changed():
    x = np.array([0.0, 0.25, 0.25, 0.9, 1.0])
    np.testing.assert_array_equal(repair_cdf(x), x)


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
    got = cheapest_plans(histogram, proportions=proportions, points=np.arange(7.0), alpha=alpha)
    assert got.cost == pytest.approx(cost_in_cdfs(histogram, proportions, alpha), rel=1e-7, abs=1e-9)
    assert got.cost > 0.01


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3])
def test_plans_have_the_right_marginals_and_the_slack_is_used_but_respected(groups, alpha):
    rng = np.random.default_rng(10 + groups)
    histogram = rng.dirichlet(np.full(12, 0.4), size=groups)
    got = cheapest_plans(histogram, proportions=np.ones(groups), points=np.linspace(0, 1, 12), alpha=alpha)
    np.testing.assert_allclose(got.plans.sum(axis=2), histogram, atol=1e-9)
    cdfs = np.cumsum(got.targets, axis=1)
    ks = max(np.abs(cdfs[a] - cdfs[b]).max() for a, b in combinations(range(groups), 2))
    assert ks == pytest.approx(alpha, abs=1e-9)
    before = np.cumsum(histogram, axis=1)
    assert np.ptp(before, axis=0).max() > 0.3


def test_plans_are_monotone():
    histogram = np.random.default_rng(20).dirichlet(np.ones(10), size=2)
    plans = cheapest_plans(histogram, proportions=np.ones(2), points=np.arange(10.0), alpha=0.0).plans
    for plan in plans:
        rows, columns = np.nonzero(plan > 1e-9)
        crossing = (rows[:, None] < rows[None, :]) & (columns[:, None] > columns[None, :])
        assert not crossing.any()


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
    np.testing.assert_allclose(small.targets, large.targets, atol=1e-8)
    assert small.cost * 1e36 == pytest.approx(large.cost, rel=1e-6)
