"""Wasserstein barycentre: closed form for Gaussians, brute-force transport, parity, ties, failures."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import norm
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from esvdfair.baselines import PrivateHistogram, WassersteinBarycenter
from esvdfair.core.metrics import ks_distance, ks_floor


def sample(sizes, rng, *, shift=1.0, spread=0.5):
    """Gaussian scores, group g with mean shift·g and standard deviation 1 + spread·g."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return rng.normal(size=groups.size) * (1 + spread * groups) + shift * groups, groups


def gaussian_case():
    sizes, means, scales = np.array([2000, 1000, 500]), np.array([0.0, 1.0, 3.0]), np.array([1.0, 0.5, 2.0])
    groups = np.repeat(np.arange(3), sizes)
    z = np.concatenate([norm.ppf((np.arange(n) + 0.5) / n) for n in sizes])
    return means[groups] + scales[groups] * z, groups, z, sizes / sizes.sum(), means, scales


def test_matches_the_closed_form_for_gaussians():
    scores, groups, z, p, means, scales = gaussian_case()
    got = (
        WassersteinBarycenter(split=False)
        .fit(scores, sensitive_features=groups)
        .predict(scores, sensitive_features=groups)
    )
    # barycentre of Gaussians: mean Σ p m, standard deviation Σ p s
    inner = np.abs(z) < 2
    np.testing.assert_allclose(got[inner], (p @ means + (p @ scales) * z)[inner], atol=0.02)


def test_own_group_is_part_of_the_sum():
    """Differs from the paper: its formula leaves out Q_a(F_a(f)) and so does not even keep the overall mean."""
    scores, groups = sample([300, 100], np.random.default_rng(0))
    scores = scores + 10
    got = (
        WassersteinBarycenter(split=False)
        .fit(scores, sensitive_features=groups)
        .predict(scores, sensitive_features=groups)
    )
    assert abs(got.mean() - scores.mean()) < 0.02
    printed = 0.25 * scores[groups == 1].mean()  # mean of p_1 Q_1(F_0(f)) over group 0
    assert abs(got[groups == 0].mean() - printed) > 5


@pytest.mark.parametrize("count", [2, 3])
def test_matches_brute_force_transport_between_samples_of_equal_size(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 4)) * np.arange(1, count + 1)[:, None]
    groups = np.repeat(np.arange(count), 4)

    def cost(assignment):
        rows = np.stack([x[g][list(p)] for g, p in enumerate(assignment)])
        return ((rows - rows.mean(axis=0)) ** 2).sum()

    best = min(product([tuple(range(4))], *[list(permutations(range(4)))] * (count - 1)), key=cost)
    expected = np.empty((count, 4))
    centre = np.stack([x[g][list(p)] for g, p in enumerate(best)]).mean(axis=0)
    for g, p in enumerate(best):
        expected[g, list(p)] = centre
    got = WassersteinBarycenter(split=False).fit(x.ravel(), sensitive_features=groups)
    np.testing.assert_allclose(got.predict(x.ravel(), sensitive_features=groups), expected.ravel(), atol=1e-12)


def test_matches_a_transport_program_between_samples_of_unequal_size():
    """Sizes 6 and 3: two rows of the large group share one row of the small one, so the map stays deterministic."""
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=6), 2 + 3 * rng.normal(size=3)
    cost = (x[:, None] - y[None, :]) ** 2
    marginals = np.vstack([np.kron(np.eye(6), np.ones(3)), np.kron(np.ones(6), np.eye(3))])
    plan = linprog(cost.ravel(), A_eq=marginals, b_eq=np.r_[np.full(6, 1 / 6), np.full(3, 1 / 3)]).x.reshape(6, 3)
    groups = np.repeat([0, 1], [6, 3])
    fair = WassersteinBarycenter(split=False).fit(np.r_[x, y], sensitive_features=groups)
    expected = (2 / 3) * x + (1 / 3) * (plan * 6) @ y
    np.testing.assert_allclose(fair.predict(x, sensitive_features=np.zeros(6, int)), expected, atol=1e-9)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("sizes", [[900, 300], [500, 400, 300]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_sample_ks_with_the_true_attribute_is_at_most_twice_the_floor(split, sizes, seed):
    scores, groups = sample(sizes, np.random.default_rng(seed))
    fair = WassersteinBarycenter(split=split, random_state=seed).fit(scores, sensitive_features=groups)
    assert ks_distance(scores, sensitive_features=groups) > 5 * ks_floor(sensitive_features=groups)
    assert ks_distance(fair.predict(scores, sensitive_features=groups), sensitive_features=groups) <= 2 * ks_floor(
        sensitive_features=groups
    )


def test_ties_are_split_so_that_atoms_of_different_size_still_meet():
    rng = np.random.default_rng(3)
    groups = np.repeat([0, 1], [800, 400])
    scores = np.where(
        groups == 0, rng.choice(4, 1200, p=[0.7, 0.1, 0.1, 0.1]), rng.choice(4, 1200, p=[0.1, 0.2, 0.2, 0.5])
    )
    fair = WassersteinBarycenter(random_state=3).fit(scores, sensitive_features=groups)
    got = fair.predict(scores, sensitive_features=groups)
    assert ks_distance(scores, sensitive_features=groups) > 0.5
    assert ks_distance(got, sensitive_features=groups) <= 2 * ks_floor(sensitive_features=groups)
    for group, atom in ((0, 0), (1, 3)):  # without splitting, one input value has one output value
        assert len(np.unique(got[(scores == atom) & (groups == group)])) > 1


@pytest.mark.parametrize(
    "baseline", [WassersteinBarycenter(jitter=1e-9, random_state=0), PrivateHistogram(bins=5, random_state=0)]
)
@pytest.mark.parametrize("scale", [2.0**-530, 2.0**530])
def test_scores_near_the_ends_of_float64(baseline, scale):
    scores, groups = sample([40, 30], np.random.default_rng(15))
    expected = clone(baseline).fit(scores, sensitive_features=groups).predict(scores, sensitive_features=groups)
    if scale > 1 and isinstance(baseline, PrivateHistogram):
        with pytest.raises(ValueError, match="mean squared change is beyond the largest float64"):
            clone(baseline).fit(scores * scale, sensitive_features=groups)
        return
    fair = clone(baseline).fit(scores * scale, sensitive_features=groups, sample_weight=np.full(70, scale))
    got = fair.predict(scores * scale, sensitive_features=groups) / scale
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_ties_at_any_magnitude():
    """A jitter of fixed size would vanish in the rounding of large scores or drown small ones."""
    groups = np.repeat([0, 1], [60, 60])
    base = np.where(groups == 0, np.arange(120) % 3, np.arange(120) % 2).astype(float)
    results = []
    for scale in (1e-12, 1.0, 1e12):
        fair = WassersteinBarycenter(random_state=0).fit(base * scale, sensitive_features=groups)
        results.append(fair.predict(base * scale, sensitive_features=groups) / scale)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-12)
    np.testing.assert_allclose(results[2], results[1], rtol=1e-12)


def test_jitter_separates_what_two_groups_share_and_moves_nothing_else():
    """As on COMPAS fitted on 0/1 targets: both groups get one constant, which only a jitter tells apart."""
    rng = np.random.default_rng(13)
    groups = np.repeat([0, 1], 200)
    y = (np.arange(400) % 10 < np.where(groups == 0, 4, 6)).astype(float)
    scores = rng.uniform(0.1, 0.9, size=400)

    def predict(jitter, seed):
        fair = WassersteinBarycenter(fitted_on="targets", jitter=jitter, random_state=seed)
        return fair.fit(scores, y, sensitive_features=groups).predict(scores, sensitive_features=groups)

    plain, jittered = ([predict(jitter, seed) for seed in range(20)] for jitter in (0.0, 1e-9))
    np.testing.assert_allclose(jittered, plain, atol=1e-8)
    assert min(ks_distance(values, sensitive_features=groups) for values in plain) == 0
    assert min(ks_distance(values, sensitive_features=groups) for values in jittered) == 1


def test_map_is_monotone_within_a_group():
    scores, groups = sample([300, 200, 100], np.random.default_rng(4))
    fair = WassersteinBarycenter(random_state=0).fit(scores, sensitive_features=groups)
    grid = np.linspace(-5, 8, 200)
    for group in range(3):
        assert np.all(np.diff(fair.predict(grid, sensitive_features=np.full(200, group))) >= 0)


def test_groups_that_agree_already_are_left_alone():
    values = np.random.default_rng(5).normal(size=50)
    scores, groups = np.tile(values, 3), np.repeat(["a", "b", "c"], 50)
    fair = WassersteinBarycenter(split=False).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(fair.predict(scores, sensitive_features=groups), scores, rtol=1e-12)


def test_rounding_of_weights_does_not_skip_to_the_next_value():
    rng = np.random.default_rng(14)
    values, weight = rng.normal(size=200), rng.uniform(0.1, 1, size=200)
    scores, groups = np.tile(values, 2), np.repeat(["a", "b"], 200)
    fair = WassersteinBarycenter(split=False)
    fair.fit(scores, sensitive_features=groups, sample_weight=np.r_[weight, 0.3 * weight])
    np.testing.assert_allclose(fair.predict(scores, sensitive_features=groups), scores, rtol=1e-12)


def test_whole_weights_count_as_repeated_rows():
    rng = np.random.default_rng(6)
    scores, groups = sample([40, 30], rng)
    weight = rng.integers(0, 4, size=70)
    weighted = WassersteinBarycenter(split=False).fit(scores, sensitive_features=groups, sample_weight=weight)
    repeated = WassersteinBarycenter(split=False).fit(
        np.repeat(scores, weight), sensitive_features=np.repeat(groups, weight)
    )
    new = rng.normal(size=100)
    at = rng.integers(0, 2, size=100)
    np.testing.assert_allclose(
        weighted.predict(new, sensitive_features=at), repeated.predict(new, sensitive_features=at), atol=1e-12
    )


def test_fitted_on_targets_uses_the_targets_alone():
    rng = np.random.default_rng(8)
    scores, groups = sample([100, 100], rng)
    y = scores + rng.normal(size=200)
    on_targets = WassersteinBarycenter(fitted_on="targets", random_state=0)
    first = on_targets.fit(scores, y, sensitive_features=groups).predict(scores, sensitive_features=groups)
    second = on_targets.fit(scores[::-1], y, sensitive_features=groups).predict(scores, sensitive_features=groups)
    as_scores = WassersteinBarycenter(random_state=0).fit(y, sensitive_features=groups)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, as_scores.predict(scores, sensitive_features=groups))


def test_an_integer_seed_repeats_and_a_generator_moves_on():
    groups = np.repeat([0, 1], 50)
    scores = np.zeros(100) + (np.arange(100) % 5)
    seeded = WassersteinBarycenter(random_state=1).fit(scores, sensitive_features=groups)
    first = seeded.predict(scores, sensitive_features=groups)
    np.testing.assert_array_equal(first, seeded.predict(scores, sensitive_features=groups))
    again = clone(seeded).fit(scores, sensitive_features=groups).predict(scores, sensitive_features=groups)
    np.testing.assert_array_equal(first, again)
    moving = WassersteinBarycenter(random_state=np.random.default_rng(1)).fit(
        scores * groups, sensitive_features=groups
    )
    draws = [moving.predict(scores * groups, sensitive_features=groups) for _ in range(2)]
    assert not np.array_equal(*draws)


def test_intersections_of_attributes_are_groups():
    rng = np.random.default_rng(9)
    both = rng.integers(0, 2, size=(400, 2))
    scores = rng.normal(size=400) + both @ [1.0, 2.0]
    fair = WassersteinBarycenter(split=False).fit(scores, sensitive_features=both)
    assert fair.labels_ == ((0, 0), (0, 1), (1, 0), (1, 1))
    got = fair.predict(scores, sensitive_features=both)
    assert ks_distance(got, sensitive_features=both @ [1, 2]) < 0.05


def test_a_score_beyond_the_fitted_range_gets_the_end_of_the_barycentre():
    scores, groups = sample([50, 50], np.random.default_rng(10))
    fair = WassersteinBarycenter(split=False).fit(scores, sensitive_features=groups)
    got = fair.predict([-1e9, 1e9], sensitive_features=[0, 0])
    inside = fair.predict(scores, sensitive_features=groups)
    np.testing.assert_allclose(got, [inside.min(), inside.max()])


def test_inputs_are_not_touched():
    scores, groups = sample([20, 20], np.random.default_rng(11))
    before = scores.copy()
    fair = WassersteinBarycenter(random_state=0).fit(scores, sensitive_features=groups)
    fair.predict(scores, sensitive_features=groups)
    np.testing.assert_array_equal(scores, before)


def test_errors_say_what_to_do():
    scores, groups = sample([20, 20], np.random.default_rng(12))
    fair = WassersteinBarycenter(random_state=0)
    with pytest.raises(NotFittedError):
        fair.predict(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="only one group"):
        fair.fit(scores, sensitive_features=np.zeros(40, int))
    with pytest.raises(ValueError, match="split=False"):
        fair.fit(scores, sensitive_features=np.r_[0, np.ones(39, int)])
    with pytest.raises(ValueError, match="pass `y` to fit"):
        WassersteinBarycenter(fitted_on="targets").fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="expected 'scores' or 'targets'"):
        WassersteinBarycenter(fitted_on="labels").fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="jitter is -1"):
        WassersteinBarycenter(jitter=-1).fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="`scores` contains 1 NaN or infinite"):
        fair.fit(np.r_[np.nan, scores[1:]], sensitive_features=groups)
    with pytest.raises(ValueError, match="`scores` has 40 rows but `sensitive_features` has 39"):
        fair.fit(scores, sensitive_features=groups[1:])
    with pytest.raises(ValueError, match="1 missing value"):
        fair.fit(scores[:3], sensitive_features=["a", float("nan"), "b"])
    with pytest.raises(ValueError, match="random_state=-1"):
        WassersteinBarycenter(random_state=-1).fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="zero total sample_weight"):
        fair.fit(scores, sensitive_features=groups, sample_weight=groups)
    with pytest.raises(ValueError, match="20 negative values"):
        fair.fit(scores, sensitive_features=groups, sample_weight=groups - 1)
    with pytest.raises(ValueError, match="`scores` has 2 columns"):
        fair.fit(np.ones((20, 2)), sensitive_features=groups)
    fair.fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match=r"groups \[2\] that were not in the training data"):
        fair.predict([0.0, 1.0], sensitive_features=[0, 2])
