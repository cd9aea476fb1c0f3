"""The scalar solvers against numpy.roots and SLSQP."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from esvdfair.core.edits import shrink_covariance, shrink_mean, solve_covariance, solve_mean

SOLVERS = pytest.mark.parametrize(("solve", "power"), [(solve_mean, 2), (solve_covariance, 4)])
decade = st.floats(-10, 10).map(lambda e: 10.0**e)


def cost_of(sigma_after, sigma, cost):
    return float(np.sum(np.asarray(cost) * (sigma_after - sigma) ** 2))


@settings(max_examples=100, deadline=None)
@given(k=decade, sigma=decade, gamma=decade)
def test_cubic_agrees_with_numpy_roots_over_twenty_decades(k, sigma, gamma):
    ours = shrink_covariance(np.array([sigma]), np.array([k]), gamma)[0]
    # In units of σ the cubic 2γσ² t³ + k t − k = 0 has one real root t in (0, 1]; polish it by Newton, since
    # numpy.roots alone loses digits when the coefficients differ by many decades.
    a = 2 * gamma * sigma**2 / k
    roots = np.roots([a, 0, 1, -1])
    t = roots[np.argmin(np.abs(roots.imag) + (roots.real < 0))].real
    for _ in range(4):
        t -= (a * t**3 + t - 1) / (3 * a * t**2 + 1)
    assert ours == pytest.approx(t * sigma, rel=1e-12)


def test_differs_from_the_paper_in_the_cubic():
    """The printed root (27γ⁴kσ² for 27γ⁴k²σ²) does not solve the stationarity condition; ours does."""
    k, sigma, gamma = 3.0, 2.0, 0.7
    printed = (9 * gamma**2 * k * sigma + np.sqrt(3) * np.sqrt(2 * gamma**3 * k**3 + 27 * gamma**4 * k * sigma**2)) ** (
        1 / 3
    )
    printed = -k / (6 ** (1 / 3) * printed) + printed / (6 ** (2 / 3) * gamma)
    ours = shrink_covariance(np.array([sigma]), np.array([k]), gamma)[0]
    assert abs(k * ours - k * sigma + 2 * gamma * ours**3) < 1e-12
    assert abs(k * printed - k * sigma + 2 * gamma * printed**3) > 0.1


def test_differs_from_the_paper_in_the_mean_shrinkage():
    """σk/(k+γ) is stationary for the Lagrangian; the printed σk/(kγ) is not."""
    k, sigma, gamma = 3.0, 2.0, 0.7
    ours = shrink_mean(np.array([sigma]), np.array([k]), gamma)[0]
    assert abs(k * (ours - sigma) + gamma * ours) < 1e-12
    assert abs(k * (sigma / gamma - sigma) + gamma * sigma / gamma) > 0.1


@SOLVERS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_budget_is_met_with_equality_and_no_worse_than_slsqp(solve, power, data):
    n = data.draw(st.integers(1, 6))
    sigma = np.array(data.draw(st.lists(st.floats(0.05, 5), min_size=n, max_size=n)))
    cost = 10.0 ** np.array(data.draw(st.lists(st.floats(-3, 3), min_size=n, max_size=n)))
    budget = np.sum(sigma**power) / data.draw(st.floats(1.01, 1e4))
    ours = solve(sigma, cost, budget)
    assert ours.converged
    assert ours.achieved == pytest.approx(budget, rel=1e-9)
    assert np.all(ours.sigma >= 0)
    assert np.all(ours.sigma <= sigma)
    scale = cost.max()
    oracle = minimize(
        lambda s: cost_of(s, sigma, cost / scale),
        sigma * 0.9,
        jac=lambda s: 2 * cost / scale * (s - sigma),
        constraints={
            "type": "ineq",
            "fun": lambda s: (budget - np.sum(s**power)) / budget,
            "jac": lambda s: -power * s ** (power - 1) / budget,
        },
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    feasible = oracle.x * min(1.0, (budget / np.sum(np.abs(oracle.x) ** power)) ** (1 / power))
    theirs = cost_of(feasible, sigma, cost)
    assert cost_of(ours.sigma, sigma, cost) <= theirs * (1 + 1e-7)


@SOLVERS
def test_twenty_decades_of_cost_still_meet_the_budget(solve, power):
    rng = np.random.default_rng(0)
    sigma, cost = 10 ** rng.uniform(-5, 5, 40), 10 ** rng.uniform(-10, 10, 40)
    for reduction in (1 + 1e-9, 1.5, 150.0, 1e12):
        budget = np.sum(sigma**power) / reduction
        assert solve(sigma, cost, budget).achieved == pytest.approx(budget, rel=1e-9)


@SOLVERS
@pytest.mark.parametrize("excess", [1, 8, 16, 17, 40, 1000])
def test_a_budget_overrun_by_rounding_is_met(solve, power, excess):
    """Up to 16 eps nothing changes; beyond, where the bracket is as narrow as rounding, still no error."""
    rng = np.random.default_rng(excess)
    for _ in range(20):
        sigma, cost = rng.uniform(0.1, 3, 30), 10 ** rng.uniform(-6, 6, 30)
        result = solve(sigma, cost, np.sum(sigma**power) / (1 + excess * np.finfo(float).eps))
        assert result.converged
        np.testing.assert_allclose(result.sigma, sigma, rtol=1e-9)
        assert excess > 8 or result.multiplier == 0.0


@SOLVERS
def test_free_directions_vanish_when_the_rest_is_the_budget_but_for_rounding(solve, power):
    sigma, cost = np.array([1.0, 3.0, 2.0]), np.array([1.0, 0.0, 1.0])
    result = solve(sigma, cost, (1 + 2.0**power) * (1 - 1e-15))
    assert result.sigma.tolist() == [1.0, 0.0, 2.0]


@SOLVERS
def test_zero_budget_removes_everything(solve, power):
    result = solve([1.0, 2.0], [1.0, 0.0], 0.0)
    assert result.sigma.tolist() == [0.0, 0.0]
    assert result.multiplier == np.inf
    assert solve([0.0, 0.0], [1.0, 2.0], 0.0).multiplier == 0.0


@SOLVERS
@pytest.mark.parametrize("nothing", [0.0, -1e-18])
def test_free_directions_go_first_and_get_back_what_is_left(solve, power, nothing):
    """A cost of zero, or negative by rounding, made the authors' root solve return 1.4 × where 150 × was asked."""
    sigma, cost = np.array([1.0, 3.0, 2.0]), np.array([1.0, nothing, 1.0])
    budget = 0.9 * np.sum(sigma**power)
    result = solve(sigma, cost, budget)
    assert result.sigma[[0, 2]].tolist() == [1.0, 2.0]
    assert 0 < result.sigma[1] < 3.0
    assert result.achieved == pytest.approx(budget, rel=1e-12)
    assert result.multiplier == 0.0
    tight = solve(sigma, cost, 0.5 * (1 + 2.0**power))
    assert tight.sigma[1] == 0.0
    assert tight.achieved == pytest.approx(0.5 * (1 + 2.0**power), rel=1e-12)
    assert tight.multiplier > 0


@SOLVERS
def test_negative_budget_is_an_error(solve, power):
    with pytest.raises(ValueError, match="budget=-1"):
        solve([1.0], [1.0], -1.0)
