"""Group variances that agree: the dual against SciPy from many starts, its certificate, and the case of two groups."""

import numpy as np
import pytest
from scipy.optimize import NonlinearConstraint, minimize

from esvdfair.core.parity import nearest_within, nearest_within_all


def make_case(seed, r=None, groups=None):
    rng = np.random.default_rng(seed)
    r, groups = r or int(rng.integers(3, 15)), groups or int(rng.integers(3, 6))
    roots = rng.normal(size=(groups, r, 3 * r)) * np.exp(0.5 * rng.normal(size=(groups, r, 1)))
    return roots @ roots.transpose(0, 2, 1) / (3 * r), rng.normal(size=r)


def variances(covariances, v):
    return np.einsum("i,gij,j->g", v, covariances, v)


def scipy_best(covariances, z, budget, starts):
    """Least distance that SLSQP reaches over (v, m) with |variance − m| ≤ c/2, among its feasible ends."""
    within = NonlinearConstraint(
        lambda x: variances(covariances, x[:-1]) - x[-1],
        -budget / 2,
        budget / 2,
        jac=lambda x: np.column_stack([2 * covariances @ x[:-1], -np.ones(len(covariances))]),
    )
    best = z @ z  # the constant
    for start in starts:
        found = minimize(
            lambda x: np.sum((x[:-1] - z) ** 2),
            np.append(start, variances(covariances, start).mean()),
            jac=lambda x: np.append(2 * (x[:-1] - z), 0.0),
            method="SLSQP",
            constraints=within,
            options={"ftol": 1e-13, "maxiter": 300},
        )
        if np.ptp(variances(covariances, found.x[:-1])) <= budget + 1e-7:
            best = min(best, found.fun)
    return best


@pytest.mark.parametrize("part", [0.0, 0.03, 0.3])
@pytest.mark.parametrize("seed", [0, 1, 5, 10, 12, 18, 22, 23])  # 5, 10, 12, 22 are not certified at part 0
def test_no_worse_than_scipy_from_many_starts_and_the_bound_holds(seed, part):
    covariances, z = make_case(seed)
    before = np.ptp(variances(covariances, z))
    budget = part * before
    assert before > 0.05 * (z @ z)  # there is a gap

    nearest = nearest_within_all(covariances, z, budget)

    distance, unit = np.sum((nearest.point - z) ** 2), z @ z
    starts = [z, 0.5 * z, *np.random.default_rng(seed).normal(size=(4, len(z)))]
    theirs = scipy_best(covariances, z, budget, starts)
    assert np.ptp(variances(covariances, nearest.point)) <= budget + 1e-8 * before
    assert distance <= theirs + 1e-6 * unit
    assert nearest.gap >= 0
    assert theirs >= distance - nearest.gap - 1e-6 * unit  # the lower bound
    assert nearest.certified == (nearest.gap <= 1e-7 * unit)
    assert (nearest.branch == "dual") <= nearest.certified


def test_what_is_certified_satisfies_the_optimality_conditions():
    """(I + Σμ_g C_g) v = z with a positive definite matrix, μ on the widest groups only: proof of a global minimum."""
    covariances, z = make_case(5)
    budget = 0.3 * np.ptp(variances(covariances, z))
    nearest = nearest_within_all(covariances, z, budget)
    assert nearest.certified
    mu, v = nearest.multipliers, nearest.point
    matrix = np.eye(len(z)) + np.tensordot(mu, covariances, 1)
    assert np.linalg.eigvalsh(matrix).min() > 0
    np.testing.assert_allclose(matrix @ v, z, atol=1e-7)
    assert mu.sum() == pytest.approx(0.0, abs=1e-12)
    output = variances(covariances, v)
    np.testing.assert_allclose(output[mu > 1e-6 * mu.max()], output.max(), rtol=1e-7)
    np.testing.assert_allclose(output[mu < -1e-6 * mu.max()], output.min(), rtol=1e-7)


@pytest.mark.parametrize("part", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_with_two_groups_the_dual_is_the_exact_solution(seed, part):
    covariances, z = make_case(seed, r=6, groups=2)
    form = covariances[0] - covariances[1]
    eigenvalues, vectors = np.linalg.eigh(form)
    budget = part * abs(z @ form @ z)
    v, multiplier, _ = nearest_within(eigenvalues, vectors.T @ z, budget)
    nearest = nearest_within_all(covariances, z, budget)
    assert nearest.certified
    np.testing.assert_allclose(nearest.point, vectors @ v, atol=1e-8)
    np.testing.assert_allclose(nearest.multipliers, [multiplier, -multiplier], rtol=1e-5)


@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_units_do_not_matter(unit):
    covariances, z = make_case(1)
    plain, scaled = nearest_within_all(covariances, z, 0.0), nearest_within_all(covariances, unit * z, 0.0)
    np.testing.assert_allclose(scaled.point, unit * plain.point, rtol=1e-6)
    other = nearest_within_all(unit * covariances, z, 0.0)
    np.testing.assert_allclose(other.point, plain.point, rtol=1e-6)


def test_a_budget_that_is_met_returns_z():
    covariances, z = make_case(2)
    budget = np.ptp(variances(covariances, z))
    for enough in (budget, 2 * budget, np.inf, budget * (1 - 1e-15)):
        nearest = nearest_within_all(covariances, z, enough)
        assert nearest.branch == "inactive"
        np.testing.assert_array_equal(nearest.point, z)


@pytest.mark.parametrize(("seed", "certified"), [(0, True), (1, False)])
def test_more_groups_than_coordinates_leave_a_constant_and_an_honest_bound(seed, certified):
    covariances, z = make_case(seed, r=6, groups=8)
    nearest = nearest_within_all(covariances, z, 0.0)
    np.testing.assert_allclose(nearest.point, 0.0, atol=1e-9)
    assert nearest.certified == certified
    assert (nearest.gap < 1e-9) == certified
    wide = nearest_within_all(covariances, z, 0.5 * np.ptp(variances(covariances, z)))
    assert np.linalg.norm(wide.point) > 0.1 * np.linalg.norm(z)


def test_many_groups_are_polished_from_one_start():
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(45, 90, 250)) * np.exp(0.2 * rng.normal(size=(45, 90, 1)))
    covariances, z = roots @ roots.transpose(0, 2, 1) / 250, rng.normal(size=90)
    nearest = nearest_within_all(covariances, z, 0.0)
    assert np.ptp(variances(covariances, nearest.point)) < 1e-8 * np.ptp(variances(covariances, z))
    assert 0 <= nearest.gap < 0.1 * np.sum((nearest.point - z) ** 2)
