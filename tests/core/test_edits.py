"""Each edit meets its budget, and no independent solver finds a cheaper one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from esvdfair.core import gaps
from esvdfair.core.edits import (
    LayerEdit,
    edit_covariance,
    edit_covariance_paper,
    edit_exact,
    edit_mean,
    edit_mean_paper,
    edit_paper,
)
from esvdfair.core.moments import GroupMoments

ALL = [edit_mean, edit_mean_paper, edit_covariance, edit_covariance_paper]
COVARIANCE = [edit_covariance, edit_covariance_paper]


def case(seed, *, width=6, outputs=4, groups=2, dead=1, bias=True):
    rng = np.random.default_rng(seed)
    sizes = (40, 25, 12)[:groups]
    x = np.vstack(
        [rng.normal(size=(n, width)) @ rng.normal(size=(width, width)) + 2 * rng.normal(size=width) for n in sizes]
    )
    if dead:
        x[:, -dead:] = 0.0
    labels = np.repeat(np.arange(groups), sizes)
    w, b = rng.normal(size=(outputs, width)), rng.normal(size=outputs)
    return x, labels, w, b if bias else None


def outputs_change(x, edit: LayerEdit):
    before = x @ edit.weight_before.T + (0 if edit.bias_before is None else edit.bias_before)
    after = x @ edit.weight_after.T + (0 if edit.bias_after is None else edit.bias_after)
    return float(np.sum((after - before) ** 2))


def unit_spread(x, g):
    """Inputs whose largest variance in any group is 1: there the optimal edit has the paper's directions."""
    spread = np.max([x[g == i].std(axis=0, ddof=1) for i in np.unique(g)], axis=0)
    return x / np.where(spread > 0, spread, 1.0)


cases = {
    "seed": st.integers(0, 2**32 - 1),
    "groups": st.integers(2, 3),
    "dead": st.integers(0, 2),
    "outputs": st.integers(2, 7),
    "bias": st.booleans(),
}


@pytest.mark.parametrize("edit", ALL)
@settings(max_examples=15, deadline=None)
@given(reduction=st.sampled_from([1.5, 15.0, 150.0, 1e6]), **cases)
def test_budget_is_met_with_equality_and_the_account_is_true(edit, reduction, seed, groups, dead, outputs, bias):
    x, g, w, b = case(seed, groups=groups, dead=dead, outputs=outputs, bias=bias)
    moments = GroupMoments().update(x, g)
    result = edit(w, moments, reduction=reduction, bias=b)
    assert result.converged
    assert result.achieved == pytest.approx(result.budget, rel=1e-9)
    gap = gaps.squared_covariance_gap if edit in COVARIANCE else gaps.squared_mean_gap
    assert result.gap_before == pytest.approx(gap(w, moments))
    assert result.gap_after == pytest.approx(gap(result.weight_after, moments))
    assert result.gap_after <= result.budget * (1 + 1e-9)
    assert result.output_change == pytest.approx(outputs_change(x, result), rel=1e-6)
    np.testing.assert_array_equal(result.weight_before, w)


@pytest.mark.parametrize("edit", ALL)
def test_a_reduction_of_one_leaves_the_layer_untouched(edit):
    x, g, w, b = case(0)
    result = edit(w, GroupMoments().update(x, g), reduction=1, bias=b)
    np.testing.assert_array_equal(result.weight_after, w)
    np.testing.assert_array_equal(result.bias_after, b)
    assert result.multiplier == result.output_change == 0


@pytest.mark.parametrize("edit", ALL)
@settings(max_examples=10, deadline=None)
@given(**cases)
def test_infinite_reduction_removes_the_gap(edit, seed, groups, dead, outputs, bias):
    x, g, w, b = case(seed, groups=groups, dead=dead, outputs=outputs, bias=bias)
    result = edit(w, GroupMoments().update(x, g), reduction=np.inf, bias=b)
    assert result.gap_before > 0
    assert result.gap_after <= 1e-18 * max(result.gap_before, 1)  # the gap itself, unsquared, to 1e-9
    if edit in (edit_mean, edit_mean_paper):
        assert np.sqrt(result.gap_after) <= 1e-10 * np.sqrt(result.gap_before)


@settings(max_examples=20, deadline=None)
@given(reduction=st.floats(1.01, 1e4), **cases)
def test_the_exact_edits_change_no_more_than_the_papers_at_equal_budgets(reduction, seed, groups, dead, outputs, bias):
    x, g, w, b = case(seed, groups=groups, dead=dead, outputs=outputs, bias=bias)
    moments = GroupMoments().update(x, g)
    paper = edit_mean_paper(w, moments, reduction=reduction, bias=b)
    exact = edit_mean(w, moments, reduction=max(1.0, paper.gap_before / paper.budget), bias=b)
    assert exact.gap_after <= paper.budget * (1 + 1e-9)
    assert exact.output_change <= paper.output_change * (1 + 1e-9)
    moments = GroupMoments().update(unit_spread(x, g), g)
    paper, exact = (edit(w, moments, reduction=reduction, bias=b) for edit in (edit_covariance_paper, edit_covariance))
    assert exact.achieved == pytest.approx(paper.achieved, rel=1e-9)
    assert exact.output_change <= paper.output_change * (1 + 1e-9)


def test_optimal_covariance_edit_keeps_what_lies_outside_the_range_of_m():
    """Differs from the paper: with equal spread along the first axis, S⁺ drops that column of W."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=60)
    x = np.column_stack([np.concatenate([shared, shared]), rng.normal(size=120) * np.repeat([1, 3], 60)])
    x[:60, 1] -= np.polyval(np.polyfit(shared, x[:60, 1], 1), shared)  # no correlation within either group
    x[60:, 1] -= np.polyval(np.polyfit(shared, x[60:, 1], 1), shared)
    moments = GroupMoments().update(x, np.repeat([0, 1], 60))
    w = np.array([[1.0, 1.0], [2.0, -1.0]])
    np.testing.assert_allclose(edit_covariance(w, moments, reduction=10).weight_after[:, 0], w[:, 0], atol=1e-9)
    assert np.abs(edit_covariance_paper(w, moments, reduction=10).weight_after[:, 0]).max() < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_two_groups_follow_sherman_morrison(seed):
    """W' = W − (1 − 1/√ρ)(W dᵀ)(d C⁺)/(d C⁺ dᵀ)   (docs/method.md 2.1)."""
    x, g, w, b = case(seed, dead=0)
    rho = 7.0
    edit = edit_mean(w, GroupMoments().update(x, g), reduction=rho, bias=b)
    centred = x - x.mean(0)
    inverse = np.linalg.pinv(centred.T @ centred)
    d = x[g == 0].mean(0) - x[g == 1].mean(0)
    expected = w - (1 - 1 / np.sqrt(rho)) * np.outer(w @ d, d @ inverse) / (d @ inverse @ d)
    np.testing.assert_allclose(edit.weight_after, expected, atol=1e-9)
    np.testing.assert_allclose(edit.bias_after, b + (w - expected) @ x.mean(0), atol=1e-9)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_infinite_reduction_is_least_squares_concept_erasure(groups, seed):
    """LEACE: x ↦ x − Σ^{½} P Σ^{-½}(x − x̄), P the projection on Σ^{-½} Σ_xz; then the unchanged layer."""
    x, g, w, b = case(seed, groups=groups, dead=0)
    edit = edit_mean(w, GroupMoments().update(x, g), reduction=np.inf, bias=b)
    centred = x - x.mean(0)
    one_hot = np.eye(groups)[g]
    values, vectors = np.linalg.eigh(np.cov(centred.T))
    root, whiten = (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T
    u, s, _ = np.linalg.svd(whiten @ centred.T @ (one_hot - one_hot.mean(0)), full_matrices=False)
    u = u[:, s > 1e-8 * s[0]]
    erased = x - centred @ (root @ u @ u.T @ whiten).T
    np.testing.assert_allclose(x @ edit.weight_after.T + edit.bias_after, erased @ w.T + b, atol=1e-7)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_solver_beats_the_exact_mean_edit(groups, seed):
    x, g, w, b = case(seed, width=3, outputs=2, groups=groups, dead=0)
    moments = GroupMoments().update(x, g)
    edit = edit_mean(w, moments, reduction=9.0, bias=b)
    d = moments.mean_differences()

    def change(v):
        return np.sum((x @ (v[:6].reshape(2, 3) - w).T + v[6:] - b) ** 2) / len(x)

    oracle = minimize(
        change,
        np.concatenate([0.5 * w.ravel(), b]),
        constraints={"type": "ineq", "fun": lambda v: 1 - np.sum((d @ v[:6].reshape(2, 3).T) ** 2) / edit.budget},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 1000},
    )
    assert oracle.fun > 0
    assert edit.output_change / len(x) <= oracle.fun * (1 + 1e-6)


@pytest.mark.parametrize("optimal", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_no_solver_beats_the_covariance_edits_within_their_directions(optimal, seed):
    """The optimal edit: over all W' with W'S = U diag(σ')Vᵀ, Σσ'⁴ ≤ c. The paper's: over σ' alone."""
    x, g, w, _ = case(seed, width=3, outputs=2, dead=0, bias=False)
    x[:, 2] = x[:, 1]  # C and M singular
    moments = GroupMoments().update(x, g)
    if optimal:
        edit = edit_covariance(w, moments, reduction=20.0)
        whitening = gaps.whitener(gaps.scatter_about(moments, centred=False))
        svd = gaps.explain_covariance_optimal(w, moments, whitening=whitening)
    else:
        edit, svd = edit_covariance_paper(w, moments, reduction=20.0), gaps.explain_covariance(w, moments)

    def change(s):
        if not optimal:
            return np.sum((x @ ((svd.u * s) @ svd.step - w).T) ** 2) / len(x)
        # the least change of outputs with W'S given, by equality-constrained least squares
        target = (svd.u * s) @ svd.v.T - w @ svd.factor
        gram, m = x.T @ x, svd.factor
        kkt = np.block([[2 * gram, m], [m.T, np.zeros((m.shape[1], m.shape[1]))]])
        delta = np.linalg.lstsq(kkt, np.vstack([np.zeros_like(w.T), target.T]), rcond=None)[0][: len(gram)].T
        return np.sum((x @ delta.T) ** 2) / len(x)

    oracle = minimize(
        change,
        0.4 * svd.sigma,
        constraints={"type": "ineq", "fun": lambda s: 1 - np.sum(s**4) / edit.budget},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert edit.output_change / len(x) <= oracle.fun * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("algorithm", [edit_paper, edit_exact])
def test_algorithm_1_is_the_covariance_edit_then_the_mean_edit(algorithm):
    x, g, w, b = case(1)
    moments = GroupMoments().update(x, g)
    first, second = algorithm(w, moments, mean_reduction=15, covariance_reduction=150, bias=b, layer="net.2")
    np.testing.assert_array_equal(second.weight_before, first.weight_after)
    np.testing.assert_array_equal(second.bias_before, first.bias_after)
    assert first.layer == second.layer == "net.2"
    covariance, mean = (
        (edit_covariance_paper, edit_mean_paper) if algorithm is edit_paper else (edit_covariance, edit_mean)
    )
    unit = np.ones(len(w)) if algorithm is edit_paper else np.std(x @ w.T, axis=0)  # exact: outputs in their own units
    alone = covariance(w / unit[:, None], moments, reduction=150, bias=b / unit)
    np.testing.assert_allclose(first.weight_after, unit[:, None] * alone.weight_after, atol=1e-12)
    chained = mean(alone.weight_after, moments, reduction=15, bias=alone.bias_after)
    np.testing.assert_allclose(second.weight_after, unit[:, None] * chained.weight_after, atol=1e-9)
    assert len(algorithm(w, moments, mean_reduction=None, covariance_reduction=150, bias=b)) == 1
    assert len(algorithm(w, moments, mean_reduction=15, covariance_reduction=None, bias=b)) == 1


def test_the_account_of_the_exact_edit_says_where_the_covariance_gap_ends():
    x, g, w, b = case(1)
    moments = GroupMoments().update(x, g)
    first, second = edit_exact(w, moments, bias=b)
    unit = np.std(x @ w.T, axis=0)[:, None]
    ends, between = (gaps.squared_covariance_gap(e.weight_after / unit, moments) for e in (second, first))
    assert first.gap_after == pytest.approx(ends, rel=1e-9)
    assert ends != pytest.approx(between, rel=1e-3)  # the mean edit moved it
    (alone,) = edit_exact(w, moments, mean_reduction=None, bias=b)
    assert alone.gap_after == pytest.approx(between, rel=1e-9)


@pytest.mark.parametrize("groups", [2, 3])
def test_the_exact_edit_does_not_depend_on_units(groups):
    """An input, or an output, times a number and the weights divided by it is the same layer."""
    x, g, w, b = case(1)
    g = g + (np.arange(len(g)) % 5 == 0) if groups == 3 else g
    inputs, outputs = 10.0 ** np.linspace(-6, 6, w.shape[1]), 10.0 ** np.linspace(6, -6, len(w))
    plain = edit_exact(w, GroupMoments().update(x, g), bias=b)
    scaled = edit_exact(
        outputs[:, None] * w / inputs, GroupMoments().update(x * inputs, g), bias=outputs * b, layer="net.2"
    )
    for one, other in zip(plain, scaled, strict=True):
        change = (one.weight_after - w) @ x.T
        moved = (other.weight_after * inputs / outputs[:, None] - w) @ x.T
        np.testing.assert_allclose(moved, change, rtol=0, atol=1e-6 * np.abs(change).max())
        np.testing.assert_allclose(other.sigma_after, one.sigma_after, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(other.bias_after / outputs, one.bias_after, rtol=1e-6, atol=1e-9)


def test_the_papers_edit_leaves_the_bias_alone():
    x, g, w, b = case(2)
    for edit in edit_paper(w, GroupMoments().update(x, g), bias=b):
        np.testing.assert_array_equal(edit.bias_after, b)


def test_differs_from_the_paper_on_an_output_layer():
    """With one output W S_e has one singular value: the paper's mean edit would only scale the predictions."""
    x, g, w, b = case(3, outputs=1)
    moments = GroupMoments().update(x, g)
    for edit, reductions in ((edit_mean_paper, {"reduction": 15}), (edit_paper, {})):
        with pytest.raises(ValueError, match="one output"):
            edit(w, moments, **reductions, bias=b)
    exact = edit_mean(w, moments, reduction=15, bias=b)
    assert exact.gap_after == pytest.approx(exact.gap_before / 15)
    scaled = w / np.sqrt(15)
    assert exact.output_change < np.sum(((x - x.mean(0)) @ (w - scaled).T) ** 2)


def test_zero_gap_is_left_alone_by_the_exact_edit():
    """Differs from the paper: its budget is relative to Σσ², so W shrinks even when there is no gap."""
    rng = np.random.default_rng(4)
    half = rng.normal(size=(30, 3))
    x, g = np.vstack([half, half]), np.repeat([0, 1], 30)
    moments = GroupMoments().update(x, g)
    w = rng.normal(size=(2, 3))
    np.testing.assert_array_equal(edit_mean(w, moments, reduction=15).weight_after, w)
    assert np.linalg.norm(edit_mean_paper(w, moments, reduction=15).weight_after) < 0.3 * np.linalg.norm(w)


def test_groups_alike_but_for_rounding_are_left_alone():
    """A covariance gap of 1e-30 is no gap; a budget relative to it would shrink W for real."""
    rng = np.random.default_rng(6)
    half = rng.normal(size=(200, 4))
    x = np.vstack([half, half[::-1] + 1e-17])
    moments = GroupMoments().update(x, np.repeat([0, 1], 200))
    w = rng.normal(size=(3, 4))
    for edit in COVARIANCE:
        np.testing.assert_array_equal(edit(w, moments, reduction=150, bias=np.zeros(3)).weight_after, w)


def test_a_group_of_two_rows_and_a_constant_feature():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(30, 4))
    x[:, 1] = 3.0
    moments = GroupMoments().update(x, [0] * 28 + [1] * 2)
    w = rng.normal(size=(3, 4))
    for edit in ALL:
        result = edit(w, moments, reduction=15, bias=np.zeros(3))
        assert np.isfinite(result.weight_after).all()
        assert result.achieved == pytest.approx(result.budget, rel=1e-9)


@pytest.mark.parametrize("edit", ALL)
def test_bad_arguments_are_explained(edit):
    x, g, w, b = case(6)
    moments = GroupMoments().update(x, g)
    for reduction in (0.5, -1.0, np.nan):
        with pytest.raises(ValueError, match="must be at least 1"):
            edit(w, moments, reduction=reduction)
    alone = GroupMoments().update(x, np.zeros(len(x), dtype=int))
    for weight, bias, gathered, message in (
        (w[:, :3], None, moments, "moments have width 6"),
        (w, np.ones(9), moments, "bias has shape"),
        (w * np.nan, b, moments, "NaN or infinite"),
        (w, None, alone, "1 group"),
    ):
        with pytest.raises(ValueError, match=message):
            edit(weight, gathered, reduction=2, bias=bias)
