"""Least squares against numpy.linalg.lstsq on the rows, and where the paper's form fails."""

import numpy as np
import pytest

from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.ols import fit_ols


def make_rows(seed=0, rows=80, p=4):
    rng = np.random.default_rng(seed)
    groups = np.arange(rows) % 3 == 0
    h = np.maximum(rng.normal(size=(rows, p)) + groups[:, None], 0.0)
    return h, h @ rng.normal(size=p) + 2.0 + 0.1 * rng.normal(size=rows), groups


def moments_of(h, *columns, groups, weights=None):
    return GroupMoments().update(np.column_stack([h, *columns]), groups, weights)


def test_is_least_squares_with_an_intercept():
    h, t, groups = make_rows()
    fit = fit_ols(moments_of(h, t, groups=groups), target=4, original=np.zeros(4))

    expected, *_ = np.linalg.lstsq(np.column_stack([h, np.ones(len(h))]), t, rcond=None)

    np.testing.assert_allclose(np.append(fit.weight, fit.bias), expected, rtol=1e-9)
    assert fit.mse == pytest.approx(np.mean((t - h @ fit.weight - fit.bias) ** 2), rel=1e-9)
    assert fit.objective == pytest.approx(fit.mse)
    assert fit.converged


def test_a_layer_without_bias_stays_without():
    h, t, groups = make_rows()
    fit = fit_ols(moments_of(h, t, groups=groups), target=4, original=np.zeros(4), intercept=False)
    np.testing.assert_allclose(fit.weight, np.linalg.lstsq(h, t, rcond=None)[0], rtol=1e-9)
    assert fit.bias == 0.0
    assert fit.mse == pytest.approx(np.mean((t - h @ fit.weight) ** 2), rel=1e-9)


def test_any_later_column_is_a_target():
    h, t, groups = make_rows()
    moments = moments_of(h, t, 5 - t, groups=groups)
    to_label, to_prediction = (fit_ols(moments, target=column, original=np.zeros(4)) for column in (4, 5))
    np.testing.assert_allclose(to_prediction.weight, -to_label.weight, rtol=1e-9)
    assert to_prediction.bias == pytest.approx(5 - to_label.bias)


def test_differs_from_the_paper_dead_units_and_no_intercept():
    """With a dead unit HᵀH has no inverse; without an intercept the fit is worse even where it has one."""
    h, t, groups = make_rows()
    paper = np.linalg.inv(h.T @ h) @ h.T @ t
    dead = np.column_stack([h, np.zeros(len(h))])
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.inv(dead.T @ dead)

    fit = fit_ols(moments_of(dead, t, groups=groups), target=5, original=[0, 0, 0, 0, 0.7])

    assert fit.weight[-1] == pytest.approx(0.7)
    assert fit.mse < 0.1 * np.mean((t - h @ paper) ** 2)


def test_without_ridge_redundant_units_change_least():
    h, t, groups = make_rows()
    h = np.column_stack([h, h[:, 0] + h[:, 1]])
    original = np.random.default_rng(1).normal(size=5)
    fit = fit_ols(moments_of(h, t, groups=groups), target=5, original=original)

    centred = h - h.mean(axis=0)
    nearest = original + np.linalg.pinv(centred, rcond=1e-10) @ (t - t.mean() - centred @ original)

    np.testing.assert_allclose(fit.weight, nearest, rtol=1e-8)


def test_ridge_pulls_towards_the_original_weights():
    h, t, groups = make_rows()
    original = np.array([1.0, -2.0, 3.0, -4.0])
    moments = moments_of(h, t, groups=groups)
    distances = [
        np.linalg.norm(fit_ols(moments, target=4, original=original, ridge=ridge).weight - original)
        for ridge in (0.0, 0.1, 10.0, 1e9)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-6 < distances[0]


def test_integer_weights_are_repeated_rows():
    h, t, groups = make_rows()
    counts = np.random.default_rng(2).integers(0, 4, len(t))
    weighted = fit_ols(moments_of(h, t, groups=groups, weights=counts), target=4, original=np.ones(4), ridge=0.01)
    repeated_rows = [np.repeat(x, counts, axis=0) for x in (h, t)]
    repeated = fit_ols(
        moments_of(*repeated_rows, groups=np.repeat(groups, counts)), target=4, original=np.ones(4), ridge=0.01
    )
    np.testing.assert_allclose(weighted.weight, repeated.weight, rtol=1e-9)
    assert weighted.mse == pytest.approx(repeated.mse)


@pytest.mark.parametrize("target", [-1, 0, 3, 5])
def test_target_must_be_a_column_after_the_features(target):
    h, t, groups = make_rows()
    with pytest.raises(ValueError, match=r"features are columns 0 to 3 of 5"):
        fit_ols(moments_of(h, t, groups=groups), target=target, original=np.zeros(4))
