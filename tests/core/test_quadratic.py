"""The whitened quadratic against the same sums taken over the rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import FeatureSpace, Quadratic, target_covariances, unit_factors


def make_rows(seed=0, rows=90, p=5, dead=0, scale=1.0):
    """Features with a duplicate and ``dead`` constant columns, target, groups of unequal size, original weights."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([0, 1], [rows // 3, rows - rows // 3]))
    h = rng.normal(size=(rows, p)) @ rng.normal(size=(p, p)) + groups[:, None] + 3.0
    h = scale * np.column_stack([h, h[:, 0], np.full((rows, dead), 0.5)])
    t = np.sin(h[:, 0] / scale) + 0.3 * groups + rng.normal(size=rows)
    return h, t, groups, rng.normal(size=h.shape[1]) / scale


def make_quadratic(h, t, groups, original, *, ridge, weights=None, intercept=True):
    moments = GroupMoments().update(np.column_stack([h, t]), groups, weights)
    space = FeatureSpace.from_moments(moments, h.shape[1], intercept=intercept)
    return Quadratic.from_moments(moments, space=space, target=h.shape[1], original=original, ridge=ridge)


def spread(h, weights=None, intercept=True):
    """(p,) the units of features: standard deviations, about zero without an intercept; 1 for a constant."""
    share = np.ones(len(h)) / len(h) if weights is None else weights / np.sum(weights)
    centred = h - share @ h if intercept else h
    unit = np.sqrt(share @ centred**2)
    return np.where(unit > 1e-12 * np.abs(h).max(axis=0), unit, 1.0)


def penalised_least_squares(h, t, original, ridge, weights=None, intercept=True):
    """Oracle: standardised rows and, below them, one row for each ridge term; the minimum change by lstsq."""
    w = np.ones(len(t)) if weights is None else np.asarray(weights, dtype=float)
    share = w / w.sum()
    root = np.sqrt(share)[:, None]
    h_mean, t_mean = (share @ h, share @ t) if intercept else (np.zeros(h.shape[1]), 0.0)
    unit = spread(h, weights, intercept)
    centred = (h - h_mean) * root / unit
    left = np.vstack([centred, np.sqrt(ridge) * np.eye(h.shape[1])])
    right = np.append((t - t_mean) * root[:, 0] - centred @ (unit * original), np.zeros(h.shape[1]))
    weight = original + np.linalg.lstsq(left, right, rcond=1e-10)[0] / unit
    return weight, t_mean - h_mean @ weight


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.1, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_minimiser_is_the_penalised_least_squares_solution(ridge, weighted, intercept):
    h, t, groups, original = make_rows(dead=2)
    weights = np.random.default_rng(1).uniform(0.1, 3, len(t)) if weighted else None
    quadratic = make_quadratic(h, t, groups, original, ridge=ridge, weights=weights, intercept=intercept)

    weight, bias = quadratic.layer(quadratic.minimiser)

    expected_weight, expected_bias = penalised_least_squares(h, t, original, ridge, weights, intercept)
    np.testing.assert_allclose(weight, expected_weight, rtol=1e-8, atol=1e-9)
    assert bias == pytest.approx(expected_bias, rel=1e-8, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ridge=st.sampled_from([0.0, 1e-4, 1.0]),
    dead=st.integers(0, 3),
    exponent=st.integers(-100, 100),
    intercept=st.booleans(),
)
def test_what_the_rows_say_is_a_plain_distance_in_whitened_coordinates(seed, ridge, dead, exponent, intercept):
    h, t, groups, original = make_rows(seed, rows=40, p=3, dead=dead, scale=2.0**exponent)
    quadratic = make_quadratic(h, t, groups, original, ridge=ridge, intercept=intercept)

    unit = spread(h, intercept=intercept)

    def objective(u):
        weight, bias = quadratic.layer(u)
        return np.mean((t - h @ weight - bias) ** 2) + ridge * np.sum((unit * (weight - original)) ** 2)

    u = np.random.default_rng(seed).normal(size=len(quadratic.minimiser))
    distance = np.sum((u - quadratic.minimiser) ** 2)
    assert objective(u) == pytest.approx(objective(quadratic.minimiser) + distance, rel=1e-9)


def test_differs_from_the_paper_dead_units_and_no_intercept():
    """With a dead unit HᵀH has no inverse; without an intercept the fit is worse even where it has one."""
    rng = np.random.default_rng(0)
    h, groups = np.maximum(rng.normal(size=(80, 4)), 0.0), np.arange(80) % 3 == 0
    t = h @ rng.normal(size=4) + 2.0 + 0.1 * rng.normal(size=80)
    paper = np.linalg.inv(h.T @ h) @ h.T @ t
    dead = np.column_stack([h, np.zeros(len(h))])
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.inv(dead.T @ dead)

    quadratic = make_quadratic(dead, t, groups, np.array([0, 0, 0, 0, 0.7]), ridge=0.0)
    weight, bias = quadratic.layer(quadratic.minimiser)

    assert weight[-1] == pytest.approx(0.7)
    assert np.mean((t - dead @ weight - bias) ** 2) < 0.1 * np.mean((t - h @ paper) ** 2)


def test_coordinates_invert_layer_and_directions_outside_the_features_keep_the_original():
    h, t, groups, original = make_rows(dead=2)
    quadratic = make_quadratic(h, t, groups, original, ridge=0.01)
    u = np.arange(1.0, 1 + len(quadratic.minimiser))
    weight, _ = quadratic.layer(u)

    assert len(u) == 5  # five independent features; the duplicate and the dead add none
    np.testing.assert_allclose(quadratic.coordinates(weight), u, rtol=1e-10)
    np.testing.assert_allclose(weight[-2:], original[-2:], rtol=1e-12)
    same, _ = quadratic.layer(quadratic.coordinates(original))
    np.testing.assert_allclose(same, original, rtol=1e-10)


def test_space_holds_the_group_moments_along_the_axes():
    h, _, groups, _ = make_rows(dead=1)
    space = FeatureSpace.from_moments(GroupMoments().update(h, groups))
    rotated = space.rotate(h)

    np.testing.assert_allclose(rotated.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(np.cov(rotated.T, ddof=0), np.diag(space.variances), atol=1e-10)
    for g in (0, 1):
        np.testing.assert_allclose(np.cov(rotated[groups == g].T), space.group_covariances[g], atol=1e-10)
    assert np.linalg.norm(space.mean_gaps) > 0.1  # there is a gap to see
    first, second = (rotated[groups == g].mean(axis=0) for g in (0, 1))
    np.testing.assert_allclose(space.mean_gaps, [first - second], atol=1e-12)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_covariances_of_targets_agree_with_moments(weighted, intercept):
    h, t, groups, original = make_rows(dead=1)
    weights = np.random.default_rng(1).uniform(0.1, 3, len(t)) if weighted else np.ones(len(t))
    t, fold = t + 5, np.arange(len(t)) % 3

    found = target_covariances(h, np.column_stack([-t, t]), weights, fold, centred=intercept)

    assert len(found) == 4
    for left_out, (cross, means) in zip((0, 1, 2, 3), found, strict=True):
        kept = fold != left_out
        options = {"ridge": 0.01, "weights": weights[kept], "intercept": intercept}
        known = make_quadratic(h[kept], t[kept], groups[kept], original, **options)
        np.testing.assert_allclose(cross[1] @ known.space.axes, known.cross, atol=1e-12)
        assert means[1] == pytest.approx(known.target_mean)
    ((alone, _),) = target_covariances(h, t[:, None], weights, np.zeros(len(t), dtype=int), centred=intercept)
    np.testing.assert_allclose(alone[0], found[-1][0][1], atol=1e-12)


@pytest.mark.parametrize("intercept", [False, True])
def test_from_layer_aims_at_the_outputs_of_the_original_layer(intercept):
    h, _, groups, original = make_rows(dead=1)
    bias = 0.7 if intercept else 0.0
    known = make_quadratic(h, h @ original + bias, groups, original, ridge=0.01, intercept=intercept)

    other = Quadratic.from_layer(known.space, original, bias, ridge=0.01)

    np.testing.assert_allclose(other.cross, known.cross, atol=1e-9)
    assert other.target_mean == pytest.approx(known.target_mean)
    np.testing.assert_allclose(other.layer(other.minimiser)[0], original, rtol=1e-9)


@pytest.mark.parametrize("varies", [True, False])
@pytest.mark.parametrize("intercept", [False, True])
def test_an_offset_keeps_its_weight(intercept, varies):
    """Refitting beside an offset is refitting without it towards the rest; its own outputs ask for no change."""
    h, t, groups, original = make_rows(dead=1)
    offset = h[:, 1] ** 2 + groups if varies else np.full(len(t), 3.0 * intercept)
    moments = GroupMoments().update(np.column_stack([h, offset, t]), groups)
    space = FeatureSpace.from_moments(moments, h.shape[1] + 1, intercept=intercept, offset=True)
    beside = np.append(original, 1.0)
    found = Quadratic.from_moments(moments, space=space, target=h.shape[1] + 1, original=beside, ridge=0.01)
    weight, bias = found.layer(found.minimiser)

    alone = make_quadratic(h, t - offset, groups, original, ridge=0.01, intercept=intercept)
    expected, expected_bias = alone.layer(alone.minimiser)
    np.testing.assert_allclose(weight, np.append(expected, 1.0), rtol=1e-8, atol=1e-10)
    assert bias == pytest.approx(expected_bias, abs=1e-8)
    towards = Quadratic.from_layer(space, beside, 0.5 * intercept, ridge=0.01)
    np.testing.assert_allclose(towards.layer(towards.minimiser)[0], beside, rtol=1e-8)
    np.testing.assert_allclose(
        space.rotate(np.column_stack([h, offset])) @ (space.dual.T @ beside) + space.mean @ beside,
        h @ original + offset,
        atol=1e-8,
    )


def test_integer_weights_are_repeated_rows():
    h, t, groups, original = make_rows()
    counts = np.random.default_rng(2).integers(1, 4, len(t))
    weighted = make_quadratic(h, t, groups, original, ridge=0.01, weights=counts)
    repeated = make_quadratic(*(np.repeat(x, counts, axis=0) for x in (h, t, groups)), original, ridge=0.01)
    np.testing.assert_allclose(
        weighted.layer(weighted.minimiser)[0], repeated.layer(repeated.minimiser)[0], rtol=1e-9, atol=1e-10
    )


def test_features_far_from_zero_keep_their_digits():
    h, t, groups, original = make_rows()
    near = make_quadratic(h, t, groups, original, ridge=0.01)
    far = make_quadratic(h + 1e6, t, groups, original, ridge=0.01)
    np.testing.assert_allclose(far.layer(far.minimiser)[0], near.layer(near.minimiser)[0], rtol=1e-6)


def test_errors_say_what_is_wrong():
    h, t, groups, original = make_rows()
    with pytest.raises(ValueError, match="all features are constant"):
        make_quadratic(np.ones_like(h), t, groups, original, ridge=0.0)
    for ridge in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="ridge="):
            make_quadratic(h, t, groups, original, ridge=ridge)
    with pytest.raises(ValueError, match="has 1 row"):
        make_quadratic(h, t, np.arange(len(t)) == 3, original, ridge=0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_that_vary_on_a_few_rows_are_held_and_constants_are_left_out(dtype):
    rng = np.random.default_rng(0)
    h = np.maximum(rng.normal(size=(1000, 6)), 0.0).astype(dtype)
    h[:, 1] = 0.0
    h[:9, 1] = 3.0  # a unit that fires on 9 rows
    h[:, 2] = 0.0
    h[:30, 2] = 3.0
    h[:, 3] = 0.1 * (1 + np.finfo(dtype).eps * rng.integers(0, 2, 1000))  # a constant up to rounding
    h[:, 4] = 1e-12 * h[:, 5]
    factors = unit_factors(h, np.ones(1000))
    assert factors[[0, 2, 4, 5]].tolist() == [1.0] * 4
    assert factors[3] == 0.0
    assert factors[1] > 1e4
    assert unit_factors(1e9 * h, np.ones(1000)).tolist() == factors.tolist()
    weighted = np.where(np.arange(1000) < 100, 10.0, 1e-9)  # nothing but the first hundred rows counts
    assert unit_factors(h, weighted)[0] == 1.0


def test_a_held_feature_keeps_its_weight_and_the_others_are_refitted():
    rng = np.random.default_rng(0)
    h, groups = rng.normal(size=(500, 3)), np.arange(500) % 2
    h[:, 2] = np.arange(500) < 3
    t = h @ [1.0, 2.0, 30.0]
    moments = GroupMoments().update(np.column_stack([h, t]), groups)
    space = FeatureSpace.from_moments(moments, 3, factors=unit_factors(h, np.ones(500)))
    quadratic = Quadratic.from_moments(moments, space=space, target=3, original=np.array([0.0, 0.0, 5.0]), ridge=1e-6)
    weight, _ = quadratic.layer(quadratic.minimiser)
    assert weight[2] == pytest.approx(5.0, rel=0.01)
    expected, _ = penalised_least_squares(h[:, :2], t - 5 * h[:, 2], np.zeros(2), 1e-6)
    np.testing.assert_allclose(weight[:2], expected, rtol=1e-3)


def test_denoised_moments_keep_a_gap_that_rows_show_and_drop_noise():
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], [4000, 4000, 40])
    h = rng.normal(size=(8040, 10))
    h[groups == 1, 0] += 1.0
    space = FeatureSpace.from_moments(GroupMoments().update(h, groups))
    clean = space.denoised()
    raw, kept = (np.linalg.norm(each.mean_gaps, axis=1) for each in (space, clean))
    assert kept[0] == pytest.approx(raw[0], rel=0.02)
    assert raw[1] > 0.5 * np.sqrt(10 / 40)  # what chance alone shows
    shown = clean.group_means[2] - 0.5 * (clean.group_means[0] + clean.group_means[1])
    assert np.linalg.norm(shown) < 0.7 * np.linalg.norm(space.group_means[2])
    noise = [np.abs(each.group_covariances[2] - each.group_covariances[0]).max() for each in (space, clean)]
    assert noise[1] < 0.3 * noise[0]
