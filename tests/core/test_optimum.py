"""The attribute-unaware optimum against the linear program it is the dual of, and against the barycentre."""

from itertools import combinations

import numpy as np
import pytest
import scipy.sparse
from scipy.optimize import linprog
from scipy.stats import ks_2samp

from esvdfair.core import optimum as module
from esvdfair.core.optimum import fit_optimum

LEVELS = [0.3, 0.1, 0.03, 0.0]


def small_case(groups, seed, rows=40):
    """Random rows whose η is correlated with the group, unequal group sizes and weights."""
    rng = np.random.default_rng(seed)
    eta = rng.normal(size=rows)
    probability = rng.dirichlet(np.arange(1.0, groups + 1), size=rows)
    probability[:, 0] *= np.exp(1.5 * eta)
    return eta, probability / probability.sum(axis=1, keepdims=True), rng.uniform(0.2, 1.0, size=rows)


def gaussian_case(groups, rows, seed=0):
    """Mixture of Gaussians with the exact P(s|x), so that η and the group overlap but differ."""
    rng = np.random.default_rng(seed)
    prior = np.arange(1.0, groups + 1) / np.arange(1, groups + 1).sum()
    centre = np.column_stack([np.linspace(0, 1, groups), np.linspace(1, 0, groups), np.arange(groups) % 2])
    group = rng.choice(groups, size=rows, p=prior)
    x = rng.normal(size=(rows, 3)) + centre[group]
    density = prior * np.exp(-0.5 * ((x[:, None] - centre) ** 2).sum(axis=2))
    return x[:, 0] + 0.5 * np.sin(x[:, 1]), density / density.sum(axis=1, keepdims=True), group


def variance(eta, weight=None):
    return np.average((eta - np.average(eta, weights=weight)) ** 2, weights=weight)


def pairwise_ks(f, probability, weight=None):
    """Brute force over every threshold and pair, with soft group membership."""
    weight = np.ones(len(f)) if weight is None else weight
    mass = weight[:, None] * probability
    mass = mass / mass.sum(axis=0)
    cdf = (f <= np.sort(f)[:, None]).astype(float) @ mass
    return max(np.abs(cdf[:, a] - cdf[:, b]).max() for a, b in combinations(range(mass.shape[1]), 2))


def primal_optimum(eta, probability, weight, grid, level):
    """The linear program over randomised assignments rows × grid, solved by HiGHS."""
    weight = weight / weight.sum()
    ratio = probability / (weight @ probability)
    upto = np.tril(np.ones((len(grid), len(grid))))[:-1]  # row k selects the values l ≤ k
    gaps = scipy.sparse.vstack(
        [
            scipy.sparse.kron(scipy.sparse.coo_array((weight * (ratio[:, b] - ratio[:, a]))[None, :]), upto)
            for a, b in combinations(range(probability.shape[1]), 2)
        ]
    )
    solution = linprog(
        (weight[:, None] * (eta[:, None] - grid) ** 2).ravel(),
        A_ub=scipy.sparse.vstack([gaps, -gaps]),
        b_ub=np.full(2 * gaps.shape[0], level),
        A_eq=scipy.sparse.kron(scipy.sparse.eye_array(len(eta)), np.ones((1, len(grid)))),
        b_eq=np.ones(len(eta)),
        method="highs",
    )
    assert solution.status == 0
    return solution.fun


# --- the dual is the dual -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "seed"), [(2, 0), (2, 1), (3, 0), (4, 1)])
def test_dual_objective_equals_the_linear_program(groups, seed):
    eta, probability, weight = small_case(groups, seed)
    # |smoothed max − max| ≤ log(L)/β bounds the gap of the smoothed minimiser; the slack is for HiGHS.
    sharpness, n_grid = 3e4, 16
    tolerance = np.log(n_grid) / sharpness * variance(eta, weight)
    fitted = fit_optimum(eta, probability, levels=LEVELS, sample_weight=weight, n_grid=n_grid, sharpness=sharpness)
    for optimum in fitted:
        exact = primal_optimum(eta, probability, weight, optimum.grid, optimum.level)
        assert optimum.converged
        assert -1e-7 <= exact - optimum.dual_objective <= tolerance  # weak, then strong duality
    assert fitted[-1].dual_objective > 100 * tolerance  # the constraint costs something, else nothing was tested


# --- known solutions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [2, 3])
def test_known_attribute_gives_the_wasserstein_barycentre(groups):
    """P(s|x) ∈ {0, 1} and α = 0: f(x, a) = Σ_b p_b Q_b(F_a(η)), at the price Σ_a p_a W₂²(a, barycentre)."""
    sizes = [200, 300, 500][-groups:]
    # Quantiles of known laws: location, scale and shape differ between the groups.
    quantile = [lambda u: 2 * u, lambda u: 1 + 3 * u**2, lambda u: -1 + np.sqrt(u)][:groups]
    ranks = [(np.arange(n) + 0.5) / n for n in sizes]
    eta = np.concatenate([q(u) for q, u in zip(quantile, ranks, strict=True)])
    group = np.repeat(np.arange(groups), sizes)
    prior = np.array(sizes) / sum(sizes)
    u = np.concatenate(ranks)
    barycentre = sum(p * q(u) for p, q in zip(prior, quantile, strict=True))
    (optimum,) = fit_optimum(eta, np.eye(groups)[group], levels=[0.0], n_grid=200, sharpness=3000)
    assert optimum.converged
    price = np.mean((barycentre - eta) ** 2)
    assert price > 0.1 * eta.var()
    assert optimum.dual_objective == pytest.approx(price, rel=2e-3)
    assert optimum.mse == pytest.approx(price, rel=1e-2)
    f = optimum.predict(eta, np.eye(groups)[group])
    assert np.sqrt(np.mean((f - barycentre) ** 2)) < np.diff(optimum.grid).max()
    # Within a grid step, the larger group's next row is tied: 1/200 of the smaller group, a few steps wide.
    assert max(ks_2samp(f[group == 0], f[group == b]).statistic for b in range(1, groups)) < 0.03


@pytest.mark.parametrize("rows", [500, 5000])
def test_loose_level_returns_eta(rows):
    eta, probability, _ = gaussian_case(2, rows)
    (optimum,) = fit_optimum(eta, probability, levels=[1.0])
    np.testing.assert_allclose(optimum.predict(eta, probability), eta, atol=1e-12)
    assert optimum.ks > 0.2
    assert not optimum.potential.any()
    assert optimum.mse < 1e-20


def test_uninformative_probabilities_return_eta_at_level_zero():
    eta = np.random.default_rng(0).normal(size=700)
    probability = np.full((700, 2), [0.3, 0.7])
    (optimum,) = fit_optimum(eta, probability, levels=[0.0])
    np.testing.assert_allclose(optimum.predict(eta, probability), eta, atol=1e-9)
    assert optimum.ks < 1e-12


@pytest.mark.parametrize("constant", [0.0, 3.0, -1e6])
def test_constant_eta_stays_constant(constant):
    _, probability, _ = gaussian_case(3, 50)
    (optimum,) = fit_optimum(np.full(50, constant), probability, levels=[0.0])
    np.testing.assert_allclose(optimum.predict(np.full(50, constant), probability), constant, rtol=1e-12)
    assert optimum.mse == pytest.approx(0.0, abs=1e-12)
    assert optimum.ks == pytest.approx(0.0, abs=1e-12)
    assert optimum.converged


@pytest.mark.parametrize("rows", [50, 400, 1500])
def test_group_probability_that_is_a_function_of_eta_is_pooled(rows):
    """Δ linear in η: the optimum maps a range of rows to one value; values that differ by rounding would undo it."""
    eta = np.linspace(0, 1, rows)
    probability = np.column_stack([1 - eta, eta])
    assert pairwise_ks(eta, probability) > 0.49
    for optimum in fit_optimum(eta, probability, levels=[0.1, 0.02, 0.0]):
        f = optimum.predict(eta, probability)
        assert pairwise_ks(f, probability) < optimum.level + 2 / rows + 0.01  # one row more or less at each end
        assert np.mean((f - eta) ** 2) == pytest.approx(optimum.dual_objective, rel=4 / rows + 0.01)


# --- what a user sees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [2, 3])
def test_levels_are_met_and_cost_more_the_stricter(groups):
    eta, probability, _ = gaussian_case(groups, 2000)
    before = pairwise_ks(eta, probability)
    assert before > 0.25
    levels = [0.2, 0.1, 0.05, 0.0]
    fitted = fit_optimum(eta, probability, levels=levels)
    spread = variance(eta)
    for optimum in fitted:
        f = optimum.predict(eta, probability)
        assert optimum.converged
        # Ties are not randomised and cells stand for several rows: about 1 % of a group.
        assert abs(pairwise_ks(f, probability) - optimum.level) < 0.015
        assert abs(optimum.ks - optimum.level) < 0.015
        assert np.mean((f - eta) ** 2) == pytest.approx(optimum.dual_objective, abs=5e-3 * spread)
        assert optimum.mse == pytest.approx(optimum.dual_objective, abs=5e-3 * spread)
    assert np.all(np.diff([o.mse for o in fitted]) > 0)
    assert np.all(np.diff([o.dual_objective for o in fitted]) > 0)


def test_true_groups_come_together_on_fresh_rows():
    eta, probability, _ = gaussian_case(2, 3000, seed=0)
    (optimum,) = fit_optimum(eta, probability, levels=[0.05])
    eta, probability, group = gaussian_case(2, 4000, seed=1)
    before = ks_2samp(eta[group == 0], eta[group == 1]).statistic
    f = optimum.predict(eta, probability)
    after = ks_2samp(f[group == 0], f[group == 1]).statistic
    assert before > 0.25
    assert after < 0.09  # 0.05 and about twice the sampling error


def test_compression_changes_little():
    eta, probability, _ = gaussian_case(2, 3000)
    (exact,) = fit_optimum(eta, probability, levels=[0.05], n_cells=3000)
    (compressed,) = fit_optimum(eta, probability, levels=[0.05], n_cells=512)
    assert compressed.dual_objective == pytest.approx(exact.dual_objective, abs=2e-3 * variance(eta))
    difference = exact.predict(eta, probability) - compressed.predict(eta, probability)
    assert np.mean(difference**2) < 5e-3 * variance(eta)


def test_order_of_levels_is_kept_and_repeats_are_allowed():
    eta, probability, _ = small_case(2, seed=0)
    fitted = fit_optimum(eta, probability, levels=[0.0, 0.2, 0.0])
    assert [o.level for o in fitted] == [0.0, 0.2, 0.0]
    assert fitted[0] is fitted[2]
    assert fit_optimum(eta, probability, levels=[]) == ()


def test_cold_start_at_a_strict_level_agrees_with_the_warm_one():
    eta, probability, _ = gaussian_case(3, 600)
    (cold,) = fit_optimum(eta, probability, levels=[0.0])
    *_, warm = fit_optimum(eta, probability, levels=[0.3, 0.1, 0.0])
    assert cold.converged
    assert cold.dual_objective == pytest.approx(warm.dual_objective, rel=1e-3)


def test_integer_weights_equal_repeated_rows():
    eta, probability, _ = small_case(2, seed=1)
    repeats = np.random.default_rng(0).integers(0, 4, size=len(eta))
    (weighted,) = fit_optimum(eta, probability, levels=[0.05], sample_weight=repeats, n_grid=30)
    again = np.repeat(np.arange(len(eta)), repeats)
    (repeated,) = fit_optimum(eta[again], probability[again], levels=[0.05], n_grid=30)
    np.testing.assert_allclose(weighted.group_prior, repeated.group_prior)
    # The interpolated quantiles that place the grid differ a little.
    assert weighted.dual_objective == pytest.approx(repeated.dual_objective, rel=1e-2)
    (unweighted,) = fit_optimum(eta, probability, levels=[0.05], n_grid=30)
    assert unweighted.dual_objective != pytest.approx(repeated.dual_objective, rel=5e-2)


def test_shift_and_scale_of_eta_carry_over():
    eta, probability, _ = gaussian_case(2, 800)
    (plain,) = fit_optimum(eta, probability, levels=[0.1])
    (moved,) = fit_optimum(100.0 + 1e-3 * eta, probability, levels=[0.1])
    expected = 100.0 + 1e-3 * plain.predict(eta, probability)
    np.testing.assert_allclose(moved.predict(100.0 + 1e-3 * eta, probability), expected, atol=2e-5)
    assert moved.ks == pytest.approx(plain.ks, abs=5e-3)


def test_group_order_does_not_matter():
    eta, probability, _ = gaussian_case(3, 900)
    (plain,) = fit_optimum(eta, probability, levels=[0.1])
    (turned,) = fit_optimum(eta, probability[:, [2, 0, 1]], levels=[0.1])
    assert turned.dual_objective == pytest.approx(plain.dual_objective, rel=1e-3)
    np.testing.assert_allclose(plain.potential.sum(axis=0), 0.0, atol=1e-12)


def test_prediction_of_many_rows_equals_row_by_row():
    eta, probability, _ = gaussian_case(2, 300)
    (optimum,) = fit_optimum(eta, probability, levels=[0.1])
    many = np.tile(np.arange(300), 60)  # more rows than are scored at once
    np.testing.assert_allclose(
        optimum.predict(eta[many], probability[many]), optimum.predict(eta, probability)[many], rtol=1e-12
    )
    assert optimum.predict(np.empty(0), np.empty((0, 2))).shape == (0,)


# --- one answer -----------------------------------------------------------------------------------------------


def repeated_rows(seed):
    """400 different rows, most of them many times over, as discrete features give them."""
    rng = np.random.default_rng(seed)
    eta, probability, _ = gaussian_case(2, 400, seed)
    which = rng.integers(0, 400, size=3000)
    return eta[which], probability[which]


@pytest.mark.parametrize("discrete", [True, False])
def test_last_bits_and_order_of_the_rows_come_out_as_small_as_they_went_in(discrete):
    """Noise of 1e-9 standard deviations, another one for every row, moves the optimum by no more than 1e-7.

    Not at level 0, where thresholds that split no cell leave the multipliers undetermined.
    """
    eta, probability = repeated_rows(0) if discrete else gaussian_case(2, 3000)[:2]
    rng = np.random.default_rng(1)
    order = rng.permutation(len(eta))
    noise = 1e-9 * rng.normal(size=len(eta))
    shaken = np.clip(probability[:, 0] + noise, 0, 1)
    other_eta, other = eta + noise * eta.std(), np.column_stack([shaken, 1 - shaken])
    levels = [0.2, 0.05, 0.01]
    plain = fit_optimum(eta, probability, levels=levels)
    again = fit_optimum(other_eta[order], other[order], levels=levels)
    for one, two in zip(plain, again, strict=True):
        change = two.predict(other_eta, other) - one.predict(eta, probability)
        assert np.abs(change).max() < 1e-7 * eta.std()


def test_no_cell_divides_rows_that_agree():
    eta, probability = repeated_rows(2)
    rng = np.random.default_rng(3)
    noisy = eta + 1e-8 * rng.normal(size=len(eta))
    weight = np.full(len(eta), 1 / len(eta))
    total, values, chance = module._atoms(weight, noisy, probability)
    assert len(total) == len(np.unique(eta))
    np.testing.assert_allclose(values, np.unique(eta), atol=1e-7)
    assert total.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(total @ chance, weight @ probability)
    # Rows of the same η and another P(s|x) are other rows; a row without weight is none.
    twice = np.concatenate([probability, probability[:, ::-1]])
    weights = np.append(weight, np.zeros(len(eta)))
    assert len(module._atoms(np.tile(weight, 2), np.tile(eta, 2), twice)[0]) == 2 * len(total)
    assert len(module._atoms(weights, np.tile(eta, 2), twice)[0]) == len(total)


# --- pieces ---------------------------------------------------------------------------------------------------


def test_pools_are_narrow_and_widen_no_gap():
    rng = np.random.default_rng(0)
    f = np.concatenate([0.5 + 1e-7 * rng.normal(size=100), rng.uniform(size=100)])
    first = np.where(np.arange(200) < 100, 0.1 + 0.8 * (f > 0.5), 0.5)  # ordered by group within a hair of 0.5
    mass = np.column_stack([first, 1 - first])
    mass = mass / mass.sum(axis=0)
    pools = module._find_pools(f, mass, 0.1, width=0.01)
    pooled = module._pool(f, pools)
    assert module._group_gaps(f, mass)[1].max() > 0.3
    assert module._group_gaps(pooled, mass)[1].max() <= 0.1 + module._POOL_SLACK
    assert np.abs(pooled - f).max() <= 0.0101
    assert np.all(np.diff(pooled[np.argsort(f)]) >= 0)
    np.testing.assert_array_equal(module._pool(f, np.empty((0, 3))), f)


def test_values_between_grid_points_maximise_the_interpolated_score():
    rng = np.random.default_rng(0)
    grid = np.sort(rng.uniform(-1, 1, size=9))
    eta, pull = rng.uniform(-1, 1, size=40), 0.2 * rng.normal(size=(40, 9)).cumsum(axis=1)
    f = module._best_values(eta, np.eye(40), pull, grid)
    fine = np.linspace(grid[0], grid[-1], 20001)
    for i in range(40):
        at_f = np.interp(f[i], grid, pull[i]) - (eta[i] - f[i]) ** 2
        best_on_grid = (pull[i] - (eta[i] - grid) ** 2).max()
        nearest = np.abs(fine - f[i]) <= 1e-3
        assert at_f >= best_on_grid - 1e-12
        assert at_f >= (np.interp(fine[nearest], grid, pull[i]) - (eta[i] - fine[nearest]) ** 2).max() - 1e-9


# --- bad input ------------------------------------------------------------------------------------------------

GOOD = np.array([0.0, 1.0, 2.0]), np.array([[0.5, 0.5], [0.2, 0.8], [0.6, 0.4]])


@pytest.mark.parametrize(
    ("eta", "probability", "message"),
    [
        (GOOD[0][:2], GOOD[1], "shape"),
        (GOOD[0][:, None], GOOD[1], "shape"),
        (GOOD[0], GOOD[1][:, :1], "at least two groups"),
        (np.array([0.0, np.nan, 1.0]), GOOD[1], "NaN"),
        (GOOD[0], np.array([[0.5, 0.5], [0.2, np.inf], [0.6, 0.4]]), "NaN or infinite"),
        (GOOD[0], np.array([[0.5, 0.6], [0.2, 0.8], [0.6, 0.4]]), "sum to one"),
        (GOOD[0], np.array([[-0.5, 1.5], [0.2, 0.8], [0.6, 0.4]]), "negative"),
        (GOOD[0], np.array([[1.0, 0.0]] * 3), r"groups \[1\] have probability 0"),
        (np.empty(0), np.empty((0, 2)), "no rows"),
    ],
)
def test_bad_rows_are_refused(eta, probability, message):
    with pytest.raises(ValueError, match=message):
        fit_optimum(eta, probability, levels=[0.1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [-0.1]}, "negative"),
        ({"levels": [np.nan]}, "missing"),
        ({"levels": [0.1], "sample_weight": [1.0, 2.0]}, "sample_weight"),
        ({"levels": [0.1], "sample_weight": [0.0, 0.0, 0.0]}, "is zero everywhere"),
        ({"levels": [0.1], "sample_weight": [1.0, -1.0, 1.0]}, "negative values"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit_optimum(*GOOD, **options)


def test_predicting_with_other_groups_is_refused():
    (optimum,) = fit_optimum(*GOOD, levels=[0.1], n_grid=20)
    assert (optimum.grid[0], optimum.grid[-1]) == (0.0, 2.0)
    with pytest.raises(ValueError, match="fitted with 2 groups"):
        optimum.predict(GOOD[0], np.full((3, 3), 1 / 3))
