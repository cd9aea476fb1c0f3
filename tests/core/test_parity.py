"""The moment-parity refit: what the layer does on the rows, and a certificate of global optimality for two groups."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import NonlinearConstraint, minimize

from esvdfair.core.moments import GroupMoments
from esvdfair.core.parity import ParityProblem
from esvdfair.core.quadratic import FeatureSpace, Quadratic


def diagonal_quadratic(form, z, mean_gap=None):
    """A quadratic whose whitened coordinates are the features: minimiser z, M = form (a diagonal or a matrix)."""
    z, form = np.asarray(z, dtype=float), np.asarray(form, dtype=float)
    form = np.diag(form) if form.ndim == 1 else form
    gap = np.zeros(len(z)) if mean_gap is None else np.asarray(mean_gap, dtype=float)
    space = FeatureSpace(
        mean=np.zeros(len(z)),
        axes=np.eye(len(z)),
        dual=np.eye(len(z)),
        variances=np.ones(len(z)),
        group_means=np.array([gap, np.zeros(len(z))]),
        group_rows=np.ones(2),
        group_covariances=np.array([5 * np.eye(len(z)) + form, 5 * np.eye(len(z))]),
    )
    return Quadratic(space, cross=z, target_mean=0.0, original=z, ridge=0.0)


def make_rows(seed=0, sizes=(60, 90), p=4, dead=0, scale=1.0, unlike=(0.3, 2.0)):
    """Features whose group means and covariances differ, target, groups, original weights."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    spreads = rng.uniform(*unlike, size=(len(sizes), p))
    h = (
        rng.normal(size=(len(groups), p)) * spreads[groups] @ rng.normal(size=(p, p))
        + rng.normal(size=p) * groups[:, None]
    )
    t = h @ rng.normal(size=p) + rng.normal(size=len(groups)) + 5.0
    h = scale * np.column_stack([h, np.full((len(groups), dead), 0.5)])
    return h, t, groups, rng.normal(size=p + dead) / scale


def make_quadratic(h, t, groups, original, *, ridge=0.0, weights=None, intercept=True):
    moments = GroupMoments().update(np.column_stack([h, t]), groups, weights)
    space = FeatureSpace.from_moments(moments, h.shape[1], intercept=intercept)
    return Quadratic.from_moments(moments, space=space, target=h.shape[1], original=original, ridge=ridge)


def remove_gaps(quadratic):
    """The layer of equal means and variances."""
    return ParityProblem(quadratic, np.inf).solve(0.0)


def excess(quadratic, fit):
    """By how much a layer's error and ridge term exceed the least: a distance in whitened coordinates."""
    return float(np.sum((quadratic.coordinates(fit.weight) - quadratic.minimiser) ** 2))


def parts(problem):
    """D (pairs × r), M (r × r) and r in whitened coordinates, written out again."""
    quadratic = problem.quadratic
    scale = quadratic.scale
    return (
        quadratic.space.mean_gaps * scale,
        scale[:, None] * -np.diff(quadratic.space.group_covariances, axis=0)[0] * scale,
        quadratic.minimiser,
    )


def assert_globally_optimal(problem, fit, tolerance=1e-8):
    """KKT with a positive semi-definite Hessian of the Lagrangian: for this problem that proves the global minimum.

    Everything is restricted to the null space of D when the mean penalty is infinite, and to that of M as well when
    the multiplier is.
    """
    gaps, form, r = parts(problem)
    u = problem.quadratic.coordinates(fit.weight)
    basis = np.eye(len(r))
    penalty, gamma = problem.mean_penalty, fit.diagnostics["multiplier"]
    if np.isinf(penalty):
        basis, penalty = null_space(gaps, np.linalg.norm(gaps) * 1e-9 + 1e-9), 0.0
    if np.isinf(gamma):
        reduced = basis.T @ form @ basis
        basis, gamma = basis @ null_space(reduced, np.linalg.norm(reduced) * 1e-12), 0.0
    hessian = np.eye(len(r)) + penalty * gaps.T @ gaps + gamma * form
    size = np.linalg.norm(r) * np.linalg.norm(hessian)
    assert np.linalg.norm(basis.T @ (hessian @ u - r)) <= tolerance * size, "stationarity"
    assert np.linalg.norm(u - basis @ (basis.T @ u)) <= tolerance * np.linalg.norm(r), "feasibility of the subspace"
    if basis.shape[1]:
        assert np.linalg.eigvalsh(basis.T @ hessian @ basis).min() >= -tolerance * np.linalg.norm(hessian), "curvature"
    slack = fit.diagnostics["budget"] - abs(u @ form @ u)
    form_size = np.linalg.norm(form) * (r @ r)
    assert slack >= -1e-9 * form_size, "feasibility"
    if fit.diagnostics["multiplier"] != 0:
        assert abs(slack) <= 1e-9 * form_size, "complementary slackness"
        assert np.sign(fit.diagnostics["multiplier"]) * (u @ form @ u) >= -1e-9 * form_size, "sign of the multiplier"


def null_space(matrix, cut):
    _, s, vt = np.linalg.svd(matrix)
    return vt[int(np.sum(s > cut)) :].T


# --- branches ---------------------------------------------------------------------------------------------------

HARD = {"form": [4.0, 1.0, -2.0], "z": [1.0, 1.0, 0.0]}
BRANCHES = {
    "inactive": ("inactive", {"form": [1.0, -2.0], "z": [1.0, 0.5]}, 0.6),
    "inactive at the bound": ("inactive", {"form": [1.0, -2.0], "z": [1.0, 0.5]}, 0.5),
    "interior": ("interior", {"form": [3.0, -1.0], "z": [1.0, 1.0]}, 0.5),
    "interior, negative gap": ("interior", {"form": [-3.0, 1.0], "z": [1.0, 1.0]}, 0.5),
    "interior, budget 0": ("interior", {"form": [3.0, -1.0], "z": [1.0, 1.0]}, 0.0),
    "interior, tiny compensation": ("interior", {"form": [3.0, -1e-9], "z": [1.0, 1.0]}, 0.5),
    "interior, next to the pole": ("interior", {"form": [4.0, -2.0], "z": [1.0, 1e-7]}, 0.1),
    "interior, extreme not needed": ("interior", {"form": [4.0, -1.0, -2.0], "z": [1.0, 1.0, 0.0]}, 0.1),
    "interior, extreme twice": ("interior", {"form": [4.0, -2.0, -2.0], "z": [1.0, 1e-3, 2e-3]}, 0.1),
    "semidefinite": ("semidefinite", {"form": [3.0, 1.0, 0.0], "z": [1.0, 1.0, 1.0]}, 0.01),
    "semidefinite, negative": ("semidefinite", {"form": [-3.0, -1.0, 0.0], "z": [1.0, 1.0, 1.0]}, 0.01),
    "semidefinite, tiny budget": ("semidefinite", {"form": [3.0, 1.0, 0.0], "z": [1.0, 1.0, 1.0]}, 1e-150),
    "zero": ("zero", {"form": [3.0, 1.0, 0.0], "z": [1.0, 1.0, 1.0]}, 0.0),
    "zero, budget that underflows": ("zero", {"form": [3.0, 1.0, 0.0], "z": [1.0, 1.0, 1.0]}, 1e-250),
    "hard": ("hard", HARD, 0.01),
    "hard, negative gap": ("hard", {"form": [-4.0, -1.0, 2.0], "z": [1.0, 1.0, 0.0]}, 0.01),
    "hard, budget 0": ("hard", HARD, 0.0),
    "hard to rounding": ("hard", {"form": [4.0, 1.0, -2.0], "z": [1.0, 1.0, -1e-17]}, 0.01),
    "hard, extreme twice": ("hard", {"form": [4.0, -2.0, -2.0], "z": [1.0, 0.0, 0.0]}, 0.01),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("unit", [1.0, 1e-40, 1e40])
def test_every_branch_is_reached_and_optimal(name, unit):
    branch, problem, budget = BRANCHES[name]
    z = unit * np.array(problem["z"])
    problem = ParityProblem(diagonal_quadratic(problem["form"], z), mean_penalty=0.0)

    fit = problem.solve(budget * unit**2)

    assert fit.diagnostics["branch"] == branch
    assert fit.converged
    assert_globally_optimal(problem, fit)
    explained = fit.diagnostics["eigenvalues"] @ fit.diagnostics["coordinates"] ** 2
    assert fit.diagnostics["variance_gap"] == pytest.approx(explained)
    assert (fit.diagnostics["multiplier"] == 0) == (branch == "inactive")
    assert np.isinf(fit.diagnostics["multiplier"]) == (branch == "zero")


def test_hard_case_has_the_known_solution():
    """λ = (4, 1, −2), z = (1, 1, 0): γ = 1/2, u = (1/3, 2/3, √((4/9 + 4/9 − c)/2))."""
    fit = ParityProblem(diagonal_quadratic(**HARD), 0.0).solve(0.01)
    assert fit.diagnostics["multiplier"] == pytest.approx(0.5)
    np.testing.assert_allclose(np.abs(fit.weight), [1 / 3, 2 / 3, np.sqrt((8 / 9 - 0.01) / 2)])


@pytest.mark.parametrize("groups", [2, 3])
def test_groups_with_the_same_rows_change_nothing(groups):
    """Rounding of the moments is not a gap: parity of what is alike already costs nothing."""
    h, t, _, original = make_rows(sizes=(60,), p=5)
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(60) for _ in range(groups)])
    quadratic = make_quadratic(h[order] + 1e3, t[order], np.repeat(np.arange(groups), 60), original)
    fit = remove_gaps(quadratic)
    assert fit.diagnostics["branch"] == "inactive"
    np.testing.assert_allclose(fit.weight, quadratic.layer(quadratic.minimiser)[0], rtol=1e-6)


# --- against an independent solver ------------------------------------------------------------------------------


def scipy_best(problem, budget, starts):
    """Least objective (without its constant) that SLSQP reaches from several starts, among its feasible ends."""
    gaps, form, r = parts(problem)
    penalty = 0.0 if np.isinf(problem.mean_penalty) else problem.mean_penalty
    hessian = np.eye(len(r)) + penalty * gaps.T @ gaps
    constraints = [NonlinearConstraint(lambda u: u @ form @ u, -budget, budget, jac=lambda u: 2 * u @ form)]
    if np.isinf(problem.mean_penalty):
        constraints.append(NonlinearConstraint(lambda u: gaps @ u, 0, 0, jac=lambda u: gaps))
    best = np.inf
    for start in starts:
        found = minimize(
            lambda u: u @ hessian @ u - 2 * u @ r,
            start,
            jac=lambda u: 2 * (hessian @ u - r),
            method="SLSQP",
            constraints=constraints,
            options={"ftol": 1e-14, "maxiter": 300},
        )
        feasible = abs(found.x @ form @ found.x) <= budget + 1e-10
        if feasible and (not np.isinf(problem.mean_penalty) or np.abs(gaps @ found.x).max() < 1e-10):
            best = min(best, found.fun)
    return best


@pytest.mark.filterwarnings("ignore:delta_grad == 0.0:UserWarning")
@pytest.mark.parametrize(("seed", "mean_penalty"), [(0, 0.0), (1, 0.0), (2, 3.0), (3, 3.0), (4, np.inf), (5, np.inf)])
def test_no_worse_than_scipy_from_many_starts(seed, mean_penalty):
    problem = ParityProblem(make_quadratic(*make_rows(seed), ridge=0.01), mean_penalty)
    gaps, form, r = parts(problem)
    gap = r @ form @ r
    budget = abs(gap) / (3.0 if seed % 2 else 200.0)
    assert abs(gap) > 1e-3  # there is a gap before

    fit = problem.solve(budget)

    u = problem.quadratic.coordinates(fit.weight)
    ours = u @ u - 2 * u @ r + (mean_penalty * np.sum((gaps @ u) ** 2) if np.isfinite(mean_penalty) else 0.0)
    rng = np.random.default_rng(seed)
    theirs = scipy_best(problem, budget, [np.zeros_like(r), r, *rng.normal(size=(4, len(r))) * np.linalg.norm(r)])
    assert np.isfinite(theirs)
    assert ours <= theirs + 1e-7 * abs(theirs)
    assert abs(u @ form @ u) <= budget * (1 + 1e-9)


# --- properties -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    p=st.integers(1, 6),
    dead=st.integers(0, 2),
    small_group=st.sampled_from([2, 3, 40]),
    exponent=st.sampled_from([-100, -20, 0, 20, 100]),
    ridge=st.sampled_from([0.0, 1e-4, 1.0]),
    mean_penalty=st.sampled_from([0.0, 0.1, 1e4, np.inf]),
    reduction=st.sampled_from([1.0, 10.0, 1e6, np.inf]),
)
@example(seed=0, p=1, dead=0, small_group=2, exponent=0, ridge=0.0, mean_penalty=np.inf, reduction=np.inf)
def test_result_is_feasible_optimal_and_explained(seed, p, dead, small_group, exponent, ridge, mean_penalty, reduction):
    h, t, groups, original = make_rows(seed, sizes=(small_group, 50), p=p, dead=dead, scale=2.0**exponent)
    problem = ParityProblem(make_quadratic(h, t, groups, original, ridge=ridge), mean_penalty)

    fit = problem.solve(problem.budget(reduction))

    assert fit.converged
    assert_globally_optimal(problem, fit)
    output = h @ fit.weight + fit.bias
    means = [output[groups == g].mean() for g in (0, 1)]
    variances = [output[groups == g].var(ddof=1) for g in (0, 1)]
    before = h @ original
    spread = max(variances) + np.var(before) + np.var(t)
    assert fit.diagnostics["mean_gap"] == pytest.approx(abs(means[0] - means[1]), rel=1e-9, abs=1e-9 * np.sqrt(spread))
    assert fit.diagnostics["variance_gap"] == pytest.approx(variances[0] - variances[1], rel=1e-9, abs=1e-9 * spread)
    assert output.mean() == pytest.approx(t.mean(), rel=1e-9)
    gap_before = before[groups == 0].var(ddof=1) - before[groups == 1].var(ddof=1)
    assert fit.diagnostics["budget"] == pytest.approx(abs(gap_before) / reduction, rel=1e-7, abs=1e-12 * spread)
    if np.isinf(mean_penalty):
        assert abs(means[0] - means[1]) <= 1e-9 * np.sqrt(spread)
    np.testing.assert_allclose(fit.weight[p:], original[p:], rtol=1e-9)


def test_infinite_penalty_and_reduction_remove_both_gaps():
    h, t, groups, original = make_rows(3, p=5)
    quadratic = make_quadratic(h, t, groups, original, ridge=1e-4)

    def gaps(weight):
        a, b = (h[groups == g] @ weight for g in (0, 1))
        return abs(a.mean() - b.mean()), abs(a.var(ddof=1) - b.var(ddof=1))

    mean_before, variance_before = gaps(quadratic.layer(quadratic.minimiser)[0])
    mean_after, variance_after = gaps(remove_gaps(quadratic).weight)
    assert mean_before > 0.1
    assert variance_before > 0.1
    assert mean_after <= 1e-9 * mean_before
    assert variance_after <= 1e-9 * variance_before


def test_a_layer_without_bias_reaches_parity_too():
    h, t, groups, original = make_rows(3, p=5)
    fit = remove_gaps(make_quadratic(h, t, groups, original, ridge=1e-4, intercept=False))
    first, second = (h[groups == g] @ fit.weight for g in (0, 1))
    assert fit.bias == 0.0
    assert first.mean() == pytest.approx(second.mean(), rel=1e-9)
    assert first.var(ddof=1) == pytest.approx(second.var(ddof=1), rel=1e-9)


def test_error_falls_as_budgets_widen_and_one_spectrum_serves_all(monkeypatch):
    problem = ParityProblem(make_quadratic(*make_rows(2, p=6)), 1.0)
    budgets = [problem.budget(reduction) for reduction in (np.inf, 100.0, 10.0, 1.0)] + [np.inf]
    first = problem.solve(budgets[0])
    monkeypatch.setattr("scipy.linalg.eigh", None)  # a second eigenproblem would fail
    fits = [first, *(problem.solve(budget) for budget in budgets[1:])]
    objectives = [
        excess(problem.quadratic, fit) + problem.mean_penalty * fit.diagnostics["mean_gap"] ** 2 for fit in fits
    ]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[0] > objectives[-1]
    assert fits[-1].diagnostics["branch"] == "inactive"


# --- more than two groups, weights ------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "p"), [((60, 80, 70), 8), ((80, 90, 70, 90), 16)])
@pytest.mark.parametrize(("mean_penalty", "reduction"), [(0.0, np.inf), (1.0, 50.0), (np.inf, np.inf)])
def test_more_groups_come_together_and_the_layer_is_not_a_constant(sizes, p, mean_penalty, reduction):
    h, t, groups, original = make_rows(5, sizes=sizes, p=p, unlike=(0.7, 1.4))
    problem = ParityProblem(make_quadratic(h, t, groups, original), mean_penalty)
    fit = problem.solve(problem.budget(reduction))

    def by_group(weight, statistic):
        return np.array([statistic(h[groups == g] @ weight) for g in range(len(sizes))])

    before, after = (by_group(w, lambda x: x.var(ddof=1)) for w in (original, fit.weight))
    means = by_group(fit.weight, np.mean)
    pairs = np.triu_indices(len(sizes), k=1)
    spread = np.var(t)
    assert np.ptp(before) > 0.1  # there is a gap
    assert fit.converged
    assert fit.diagnostics["branch"] == "dual"
    assert fit.diagnostics["gap"] == pytest.approx(0.0, abs=1e-7 * spread)
    assert fit.diagnostics["budget"] == pytest.approx(np.ptp(before) / reduction, rel=1e-9)
    assert fit.diagnostics["variance_gap"] == pytest.approx(np.ptp(after), abs=1e-9 * spread)
    assert np.ptp(after) <= fit.diagnostics["budget"] + 1e-9 * spread
    assert fit.diagnostics["mean_gap"] == pytest.approx(
        np.linalg.norm(means[pairs[0]] - means[pairs[1]]), rel=1e-7, abs=1e-9 * np.sqrt(spread)
    )
    if np.isinf(mean_penalty):
        assert np.ptp(means) < 1e-9 * np.sqrt(spread)
    # Differs from the first build, whose bound Σ|C_g − C_h| only a constant could meet.
    assert not fit.diagnostics["constant"]
    assert np.mean((t - h @ fit.weight - fit.bias) ** 2) < 0.95 * spread
    assert fit.diagnostics["multipliers"].sum() == pytest.approx(0.0, abs=1e-9)


def test_two_of_three_groups_alike_are_two_groups():
    """A group that has the same rows as another adds no constraint: the exact solution for two."""
    h, t, groups, original = make_rows(3, sizes=(60, 90), p=5)
    two = ParityProblem(make_quadratic(h, t, groups, original), np.inf).solve(0.0)
    again = groups == 0
    rows = [np.concatenate([x, x[again]]) for x in (h, t)]
    weights = np.concatenate([np.where(again, 0.5, 1.0), np.full(60, 0.5)])
    three = ParityProblem(make_quadratic(*rows, np.append(groups, np.full(60, 2)), original, weights=weights), np.inf)
    fit = three.solve(0.0)
    np.testing.assert_allclose(fit.weight, two.weight, rtol=1e-5, atol=1e-8)


def test_when_only_a_constant_is_fair_the_fit_says_so():
    """One group varies more than the other two along every feature: equal variances leave nothing."""
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], 100)
    h = rng.normal(size=(300, 3)) * np.array([1.0, 1.1, 5.0])[groups][:, None]
    problem = ParityProblem(make_quadratic(h, h.sum(1), groups, np.ones(3)), 0.0)
    fit = problem.solve(0.0)
    assert fit.diagnostics["constant"]
    assert not fit.weight.any()  # rounding noise would have a KS distance of its own
    assert fit.bias == pytest.approx(problem.quadratic.target_mean)
    assert not problem.solve(problem.budget(2.0)).diagnostics["constant"]


def test_integer_weights_are_repeated_rows_in_mean_parity():
    """Only the means: the divisor of a weighted covariance treats weights as reliabilities, not as repeats."""
    h, t, groups, original = make_rows(6)
    counts = np.random.default_rng(0).integers(1, 4, len(t))
    weighted = ParityProblem(make_quadratic(h, t, groups, original, weights=counts), np.inf).solve(np.inf)
    rows = [np.repeat(x, counts, axis=0) for x in (h, t, groups)]
    repeated = ParityProblem(make_quadratic(*rows, original), np.inf).solve(np.inf)
    np.testing.assert_allclose(weighted.weight, repeated.weight, rtol=1e-8)


def test_weighted_variance_gap_uses_the_reliability_divisor():
    h, t, groups, original = make_rows(6)
    weights = np.random.default_rng(0).uniform(0.1, 3, len(t))
    fit = ParityProblem(make_quadratic(h, t, groups, original, weights=weights), np.inf).solve(0.0)
    first, second = (np.cov(h[groups == g] @ fit.weight, aweights=weights[groups == g]) for g in (0, 1))
    assert first == pytest.approx(float(second), rel=1e-9)


# --- errors -----------------------------------------------------------------------------------------------------


def test_errors_say_what_is_wrong():
    quadratic = make_quadratic(*make_rows())
    for penalty in (-1.0, np.nan):
        with pytest.raises(ValueError, match="mean_penalty="):
            ParityProblem(quadratic, penalty)
    problem = ParityProblem(quadratic, 1.0)
    for budget in (-1.0, np.nan):
        with pytest.raises(ValueError, match="budget="):
            problem.solve(budget)
    for reduction in (0.9, 0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"reduction=.*must be at least 1"):
            problem.budget(reduction)


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_missed_by_rounding_alone_is_met(seed):
    """Budgets within a few units in the last place of the gap: the bound on γ from below comes out as 0 there."""
    h, t, groups, original = make_rows(seed=seed, p=6)
    problem = ParityProblem(make_quadratic(h, t, groups, original, ridge=1e-4), 0.0)
    free = problem.solve(np.inf)
    gap = abs(free.diagnostics["variance_gap"])
    for budget in (gap, np.nextafter(gap, 0), gap * (1 - 1e-15), gap * (1 - 1e-14)):
        fit = problem.solve(budget)
        assert fit.converged
        np.testing.assert_allclose(fit.weight, free.weight, rtol=1e-6, atol=1e-9)
