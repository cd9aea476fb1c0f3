"""The theorems of the paper as identities, on inputs where a wrong version differs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esvdfair.core import gaps
from esvdfair.core.moments import GroupMoments


def layer_inputs(seed, *, width=6, groups=2, rows=(40, 25, 12), dead=1, definite=False):
    """Rows of unequal groups with unequal means and covariances; the last columns may be dead."""
    rng = np.random.default_rng(seed)
    blocks, labels = [], []
    for g in range(groups):
        spread = (1 + 0.5 * g) * np.eye(width) if definite else rng.normal(size=(width, width))
        base = rng.normal(size=(rows[g], width)) @ spread
        blocks.append(base + rng.normal(size=width) * 2 + 3)
        labels += [g] * rows[g]
    x = np.vstack(blocks)
    if dead:
        x[:, -dead:] = 0.0
    return x, np.array(labels)


def unit_spread(x, g):
    """Inputs whose largest variance in any group is 1: there the optimal edit has the paper's directions."""
    spread = np.max([x[g == i].std(axis=0, ddof=1) for i in np.unique(g)], axis=0)
    return x / np.where(spread > 0, spread, 1.0)


def optimal(w, moments, *, centred):
    whitening = gaps.whitener(gaps.scatter_about(moments, centred=centred))
    return gaps.explain_covariance_optimal(w, moments, whitening=whitening)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), outputs=st.integers(1, 9), dead=st.integers(0, 3), groups=st.integers(2, 3))
def test_theorem_1_mean_gap_is_the_sum_of_squares(seed, outputs, dead, groups):
    x, g = layer_inputs(seed, dead=dead, groups=groups)
    w = np.random.default_rng(seed).normal(size=(outputs, x.shape[1]))
    moments = GroupMoments().update(x, g)
    epsilon = 1e-5
    svd = gaps.explain_mean(w, moments, epsilon=epsilon)
    total = np.sum(svd.sigma**2)
    means = [(x[g == i] @ w.T).mean(0) for i in range(groups)]
    by_hand = sum(np.sum((means[i] - means[j]) ** 2) for i in range(groups) for j in range(i))
    assert by_hand > 0
    assert abs(by_hand - (total - epsilon * np.trace(w @ w.T))) <= 1e-10 * total
    assert gaps.squared_mean_gap(w, moments) == pytest.approx(by_hand, rel=1e-10)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), outputs=st.integers(1, 9), dead=st.integers(0, 3), groups=st.integers(2, 3))
def test_theorem_2_covariance_gap_is_bounded_by_the_fourth_powers(seed, outputs, dead, groups):
    x, g = layer_inputs(seed, dead=dead, groups=groups)
    w = np.random.default_rng(seed).normal(size=(outputs, x.shape[1]))
    moments = GroupMoments().update(x, g)
    svd = gaps.explain_covariance(w, moments)
    total = np.sum(svd.sigma**4)
    covariances = [np.atleast_2d(np.cov((x[g == i] @ w.T).T)) for i in range(groups)]
    by_hand = sum(np.sum((covariances[i] - covariances[j]) ** 2) for i in range(groups) for j in range(i))
    assert 0 < by_hand <= total * (1 + 1e-10)
    assert gaps.squared_covariance_gap(w, moments) == pytest.approx(by_hand, rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_theorem_2_holds_with_equality_for_semi_definite_m(seed):
    rng = np.random.default_rng(seed)
    x0, x1 = rng.normal(size=(40, 4)), np.zeros((30, 4))
    x1[:, 0] = 1.0  # no variance at all in group 1: M = Cov₀ is positive semi-definite
    x0[:, 3] = 0.0
    moments = GroupMoments().update(np.vstack([x0, x1]), [0] * 40 + [1] * 30)
    w = rng.normal(size=(3, 4))
    total = np.sum(gaps.explain_covariance(w, moments).sigma ** 4)
    assert abs(gaps.squared_covariance_gap(w, moments) - total) <= 1e-10 * total


@pytest.mark.parametrize("groups", [2, 3])
def test_the_mean_factor_gives_what_the_papers_cholesky_factor_gives(groups):
    x, g = layer_inputs(9, groups=groups)
    moments = GroupMoments().update(x, g)
    w = np.random.default_rng(9).normal(size=(4, 6))
    svd = gaps.explain_mean(w, moments, epsilon=1e-3)
    d = moments.mean_differences()
    cholesky = np.linalg.cholesky(d.T @ d + 1e-3 * np.eye(6))
    np.testing.assert_allclose(svd.factor @ svd.factor.T, cholesky @ cholesky.T, atol=1e-10)
    np.testing.assert_allclose((svd.u * svd.sigma) @ svd.v.T, w @ svd.factor, atol=1e-10)
    u, sigma, vt = np.linalg.svd(w @ cholesky, full_matrices=False)
    np.testing.assert_allclose(svd.sigma, sigma, rtol=1e-9)
    np.testing.assert_allclose(svd.u[:, :, None] * svd.step, u[:, :, None] * (vt @ np.linalg.inv(cholesky)), atol=1e-8)


def test_differs_from_the_paper_in_the_divisor_of_m():
    """Both terms over N₁ − 1, as printed, is another matrix when the groups differ in size."""
    x, g = layer_inputs(0)
    m = gaps.covariance_differences(GroupMoments().update(x, g))[0]
    centred = [x[g == i] - x[g == i].mean(0) for i in (0, 1)]
    np.testing.assert_allclose(m, centred[0].T @ centred[0] / 39 - centred[1].T @ centred[1] / 24, atol=1e-12)
    printed = (centred[0].T @ centred[0] - centred[1].T @ centred[1]) / 39
    assert np.abs(m - printed).max() > 0.1


def test_differs_from_the_paper_in_the_spectrum_it_takes():
    """S_v comes from the spectrum of M with square roots; |M| must come back."""
    x, g = layer_inputs(1)
    moments = GroupMoments().update(x, g)
    svd = gaps.explain_covariance(np.eye(6), moments)
    values, vectors = np.linalg.eigh(gaps.covariance_differences(moments)[0])
    np.testing.assert_allclose(svd.factor @ svd.factor.T, (vectors * np.abs(values)) @ vectors.T, atol=1e-10)
    axes, values = gaps.covariance_spectrum(moments)
    np.testing.assert_allclose(axes * np.sqrt(np.abs(values)), svd.factor)


@pytest.mark.parametrize("explain", [lambda w, m: gaps.explain_mean(w, m, epsilon=1e-5), gaps.explain_covariance])
def test_cost_is_the_output_change_of_moving_one_singular_value(explain):
    x, g = layer_inputs(2)
    moments = GroupMoments().update(x, g)
    w = np.random.default_rng(2).normal(size=(4, 6))
    svd = explain(w, moments)
    for i in range(len(svd.sigma)):
        after = svd.sigma.copy()
        after[i] += 1.0
        change = np.sum((x @ svd.change(after).T) ** 2)
        assert svd.cost[i] == pytest.approx(change, rel=1e-8, abs=1e-9)
    all_at_once = svd.sigma * np.linspace(0.2, 0.9, len(svd.sigma))
    change = np.sum((x @ svd.change(all_at_once).T) ** 2)
    assert svd.output_change(all_at_once) == pytest.approx(change, rel=1e-8)


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("outputs", [1, 4, 9])
def test_fourth_powers_are_the_bound_and_the_gap_of_two_groups(outputs, dead):
    x, g = layer_inputs(7, dead=dead)
    moments = GroupMoments().update(x, g)
    w = np.random.default_rng(7).normal(size=(outputs, 6))
    svd = gaps.explain_covariance(w, moments)
    for transformed in (w @ svd.factor, (svd.v * svd.sigma).T):
        bound, gap = gaps.fourth_powers(transformed, svd.sign)
        assert bound == pytest.approx(np.sum(svd.sigma**4), rel=1e-10)
        assert gap == pytest.approx(gaps.squared_covariance_gap(w, moments), rel=1e-10)
    assert gap < 0.999 * bound  # M has eigenvalues of both signs: the two differ


@pytest.mark.parametrize("centred", [True, False])
def test_optimal_directions_move_one_singular_value_each_and_never_cost_more(centred):
    x, g = layer_inputs(3, dead=2)
    moments = GroupMoments().update(unit_spread(x, g), g)
    w = np.random.default_rng(3).normal(size=(4, 6))
    best, paper = optimal(w, moments, centred=centred), gaps.explain_covariance(w, moments)
    after = best.sigma * 0.3
    np.testing.assert_allclose((w + best.change(after)) @ best.factor, (best.u * after) @ best.v.T, atol=1e-9)
    assert np.all(best.cost <= paper.cost * (1 + 1e-9))


def test_costs_agree_when_the_factor_is_invertible():
    x, g = layer_inputs(4, dead=0)
    moments = GroupMoments().update(unit_spread(x, g), g)
    w = np.random.default_rng(4).normal(size=(6, 6))
    best = optimal(w, moments, centred=False)
    np.testing.assert_allclose(best.cost, gaps.explain_covariance(w, moments).cost, rtol=1e-6)


def test_cost_free_directions_are_exactly_free():
    """Inputs without a second moment along a direction of S: the cost there is 0, not rounding noise."""
    x, g = layer_inputs(5, dead=3)
    svd = gaps.explain_mean(np.eye(6), GroupMoments().update(x, g), epsilon=1e-5)
    assert np.count_nonzero(svd.cost == 0.0) == 3
    assert np.all(svd.cost >= 0)


def test_whitener_is_not_fooled_by_units():
    """A feature in units 1e-9 of another's is alive all the same."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(50, 3)) * [1.0, 1e-9, 0.0]
    factor, inverse = gaps.whitener(x.T @ x)
    assert factor.shape == (3, 2)
    np.testing.assert_allclose(inverse @ factor, np.eye(2), atol=1e-10)
    np.testing.assert_allclose(factor @ factor.T, x.T @ x, rtol=1e-10)


@pytest.mark.parametrize("smallest", [1.0, 1e-8, 1e-14, 0.0])
def test_whitener_and_factor_of_regular_and_singular_matrices(smallest):
    """At 1e-14 of the largest an eigenvalue is rounding: the triangular factor must not be taken there."""
    rng = np.random.default_rng(8)
    q = np.linalg.qr(rng.normal(size=(30, 30)))[0]
    values = np.append(smallest, np.linspace(1.0, 2.0, 29))
    matrix = (q * values) @ q.T
    matrix = (matrix + matrix.T) / 2
    lower, inverse = gaps.whitener(matrix)
    rank = 30 if smallest > 1e-12 else 29
    assert lower.shape == (30, rank)
    np.testing.assert_allclose(inverse @ lower, np.eye(rank), atol=1e-7)
    np.testing.assert_allclose(lower @ lower.T, matrix, atol=1e-12)
    factor = gaps.scatter_factor(matrix)
    np.testing.assert_allclose(factor @ factor.T, matrix, atol=1e-12)
    triangular = np.array_equal(lower, np.tril(lower))
    assert triangular == (smallest > 1e-12)
