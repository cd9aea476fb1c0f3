"""Score maps: what both share; the Wasserstein barycentre against closed forms and brute-force transport."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import norm
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from esvdfair.baselines import PrivateHistogram, WassersteinBarycenter
from esvdfair.core.metrics import ks_distance, ks_floor


def sample(sizes, seed):
    """Gaussian scores, group g with mean g and standard deviation 1 + g/2."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(seed).normal(size=groups.size) * (1 + 0.5 * groups) + groups, groups


def moved(baseline, scores, groups, **columns):
    return baseline.fit(scores, sensitive_features=groups, **columns).predict(scores, sensitive_features=groups)


# --- both maps -------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("baseline", [WassersteinBarycenter, PrivateHistogram])


@pytest.mark.parametrize("sizes", [[900, 300], [500, 400, 300]])
@pytest.mark.parametrize(
    "baseline", [WassersteinBarycenter(), WassersteinBarycenter(split=False), PrivateHistogram()], ids=str
)
def test_in_sample_ks_with_the_true_attribute_is_at_most_twice_the_floor(baseline, sizes):
    scores, groups = sample(sizes, 0)
    floor = ks_floor(sensitive_features=groups)
    assert ks_distance(scores, sensitive_features=groups) > 5 * floor
    got = moved(clone(baseline).set_params(random_state=0), scores, groups)
    assert ks_distance(got, sensitive_features=groups) <= 2 * floor


@pytest.mark.parametrize(
    "baseline", [WassersteinBarycenter(jitter=1e-9, random_state=0), PrivateHistogram(bins=5, random_state=0)]
)
@pytest.mark.parametrize("scale", [2.0**-530, 2.0**530])
def test_scores_near_the_ends_of_float64(baseline, scale):
    scores, groups = sample([40, 30], 15)
    expected = moved(clone(baseline), scores, groups)
    if scale > 1 and isinstance(baseline, PrivateHistogram):
        with pytest.raises(ValueError, match="mean squared change is beyond the largest float64"):
            clone(baseline).fit(scores * scale, sensitive_features=groups)
        return
    got = moved(clone(baseline), scores * scale, groups, sample_weight=np.full(70, scale)) / scale
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("baseline", [WassersteinBarycenter(split=False), PrivateHistogram(random_state=0)])
def test_whole_weights_count_as_repeated_rows(baseline):
    rng = np.random.default_rng(16)
    scores, groups = sample([40, 30], 6)
    weight = rng.integers(1, 4, size=70)
    weight[::7] = 0 if isinstance(baseline, WassersteinBarycenter) else 1  # a bin's range counts every row
    weighted = clone(baseline).fit(scores, sensitive_features=groups, sample_weight=weight)
    repeated = clone(baseline).fit(np.repeat(scores, weight), sensitive_features=np.repeat(groups, weight))
    np.testing.assert_allclose(weighted.proportions_, repeated.proportions_, atol=1e-12)
    new, at = rng.normal(size=100), rng.integers(0, 2, size=100)
    got, expected = (fair.predict(new, sensitive_features=at) for fair in (weighted, repeated))
    np.testing.assert_allclose(got, expected, atol=1e-12)


@BOTH
def test_fitted_on_targets_uses_the_targets_alone(baseline):
    scores, groups = sample([100, 100], 8)
    y = scores + np.random.default_rng(8).normal(size=200)
    on_targets, on_scores = baseline(fitted_on="targets", random_state=0), baseline(random_state=0)
    first, second = (
        on_targets.fit(given, y, sensitive_features=groups).predict(scores, sensitive_features=groups)
        for given in (scores, scores[::-1])
    )
    as_scores = on_scores.fit(y, sensitive_features=groups).predict(scores, sensitive_features=groups)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, as_scores)
    assert not np.array_equal(first, moved(on_scores, scores, groups))


@BOTH
def test_an_integer_seed_repeats_and_a_generator_moves_on(baseline):
    scores, groups = np.random.default_rng(8).normal(size=100).round(1), np.repeat([0, 1], 50)
    scores += groups
    seeded = baseline(random_state=1).fit(scores, sensitive_features=groups)
    first, again = (seeded.predict(scores, sensitive_features=groups) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    refitted = clone(seeded).fit(scores, sensitive_features=groups)
    np.testing.assert_array_equal(first, refitted.predict(scores, sensitive_features=groups))
    moving = baseline(random_state=np.random.default_rng(1)).fit(scores, sensitive_features=groups)
    assert not np.array_equal(*(moving.predict(scores, sensitive_features=groups) for _ in range(2)))


ONES = np.ones(40)


@pytest.mark.parametrize(
    ("baseline", "changed", "message"),
    [
        (WassersteinBarycenter(), {"sensitive_features": np.zeros(40, int)}, "only one group"),
        (WassersteinBarycenter(), {"sensitive_features": np.r_[0, np.ones(39, int)]}, "split=False"),
        (WassersteinBarycenter(fitted_on="targets"), {}, "pass `y` to fit"),
        (WassersteinBarycenter(fitted_on="labels"), {}, "expected 'scores' or 'targets'"),
        (WassersteinBarycenter(jitter=-1), {}, "jitter is -1"),
        (WassersteinBarycenter(random_state=-1), {}, "random_state=-1"),
        (WassersteinBarycenter(), {"scores": np.r_[np.nan, ONES[1:]]}, "`scores` contains 1 NaN or infinite"),
        (WassersteinBarycenter(), {"scores": np.ones((40, 2))}, "`scores` has 2 columns"),
        (
            WassersteinBarycenter(),
            {"sensitive_features": ["a"] * 39},
            "`scores` has 40 rows but `sensitive_features` has 39",
        ),
        (WassersteinBarycenter(), {"sensitive_features": ["a", "b"] * 19 + ["a", float("nan")]}, "1 missing value"),
        (WassersteinBarycenter(), {"sample_weight": np.repeat([0, 1], 20)}, "zero total sample_weight"),
        (WassersteinBarycenter(), {"sample_weight": np.repeat([-1, 1], 20)}, "20 negative values"),
        (PrivateHistogram(bins=1), {}, "at least 2"),
        (PrivateHistogram(bins=2.5), {}, "at least 2"),
        (PrivateHistogram(alpha=-0.1), {}, "between 0 and 1"),
        (PrivateHistogram(bounds=(1, 1)), {}, "low < high"),
        (PrivateHistogram(epsilon=0.0, bounds=(0, 1)), {}, "positive number"),
        (PrivateHistogram(epsilon=1.0), {}, "would leak"),
        (PrivateHistogram(epsilon=1.0, bounds=(-4, 6)), {"sample_weight": ONES}, "less privacy than promised"),
        (PrivateHistogram(), {"scores": ONES}, "all fitted values equal"),
    ],
)
def test_what_fit_refuses(baseline, changed, message):
    scores, groups = sample([20, 20], 12)
    with pytest.raises(ValueError, match=message):
        baseline.fit(**{"scores": scores, "sensitive_features": groups, **changed})


@BOTH
def test_what_predict_refuses(baseline):
    scores, groups = sample([20, 20], 12)
    with pytest.raises(NotFittedError):
        baseline().predict(scores, sensitive_features=groups)
    before = scores.copy()
    fair = baseline().fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match=r"groups \[2\] that were not in the training data"):
        fair.predict([0.0, 1.0], sensitive_features=[0, 2])
    fair.predict(scores, sensitive_features=groups)
    np.testing.assert_array_equal(scores, before)  # inputs are not touched


# --- the barycentre ---------------------------------------------------------------------------------------------------


def test_matches_the_closed_form_for_gaussians():
    sizes, means, scales = np.array([2000, 1000, 500]), np.array([0.0, 1.0, 3.0]), np.array([1.0, 0.5, 2.0])
    groups, p = np.repeat(np.arange(3), sizes), sizes / sizes.sum()
    z = np.concatenate([norm.ppf((np.arange(n) + 0.5) / n) for n in sizes])
    got = moved(WassersteinBarycenter(split=False), means[groups] + scales[groups] * z, groups)
    # barycentre of Gaussians: mean Σ p m, standard deviation Σ p s
    inner = np.abs(z) < 2
    np.testing.assert_allclose(got[inner], (p @ means + (p @ scales) * z)[inner], atol=0.02)


def test_own_group_is_part_of_the_sum():
    """Differs from the paper: its formula leaves out Q_a(F_a(f)) and so does not even keep the overall mean."""
    scores, groups = sample([300, 100], 0)
    scores = scores + 10
    got = moved(WassersteinBarycenter(split=False), scores, groups)
    assert abs(got.mean() - scores.mean()) < 0.02
    printed = 0.25 * scores[groups == 1].mean()  # mean of p_1 Q_1(F_0(f)) over group 0
    assert abs(got[groups == 0].mean() - printed) > 5


@pytest.mark.parametrize("count", [2, 3])
def test_matches_brute_force_transport_between_samples_of_equal_size(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 4)) * np.arange(1, count + 1)[:, None]

    def cost(assignment):
        rows = np.stack([x[g][list(p)] for g, p in enumerate(assignment)])
        return ((rows - rows.mean(axis=0)) ** 2).sum()

    best = min(product([tuple(range(4))], *[list(permutations(range(4)))] * (count - 1)), key=cost)
    expected = np.empty((count, 4))
    centre = np.stack([x[g][list(p)] for g, p in enumerate(best)]).mean(axis=0)
    for g, p in enumerate(best):
        expected[g, list(p)] = centre
    got = moved(WassersteinBarycenter(split=False), x.ravel(), np.repeat(np.arange(count), 4))
    np.testing.assert_allclose(got, expected.ravel(), atol=1e-12)


def test_matches_a_transport_program_between_samples_of_unequal_size():
    """Sizes 6 and 3: two rows of the large group share one row of the small one, so the map stays deterministic."""
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=6), 2 + 3 * rng.normal(size=3)
    cost = (x[:, None] - y[None, :]) ** 2
    marginals = np.vstack([np.kron(np.eye(6), np.ones(3)), np.kron(np.ones(6), np.eye(3))])
    plan = linprog(cost.ravel(), A_eq=marginals, b_eq=np.r_[np.full(6, 1 / 6), np.full(3, 1 / 3)]).x.reshape(6, 3)
    got = moved(WassersteinBarycenter(split=False), np.r_[x, y], np.repeat([0, 1], [6, 3]))
    np.testing.assert_allclose(got[:6], (2 / 3) * x + (1 / 3) * (plan * 6) @ y, atol=1e-9)


def test_ties_are_split_so_that_atoms_of_different_size_still_meet():
    rng = np.random.default_rng(3)
    groups = np.repeat([0, 1], [800, 400])
    scores = np.where(
        groups == 0, rng.choice(4, 1200, p=[0.7, 0.1, 0.1, 0.1]), rng.choice(4, 1200, p=[0.1, 0.2, 0.2, 0.5])
    )
    got = moved(WassersteinBarycenter(random_state=3), scores, groups)
    assert ks_distance(scores, sensitive_features=groups) > 0.5
    assert ks_distance(got, sensitive_features=groups) <= 2 * ks_floor(sensitive_features=groups)
    for group, atom in ((0, 0), (1, 3)):  # without splitting, one input value has one output value
        assert len(np.unique(got[(scores == atom) & (groups == group)])) > 1


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_ties_at_any_magnitude(scale):
    """A jitter of fixed size would vanish in the rounding of large scores or drown small ones."""
    groups = np.repeat([0, 1], [60, 60])
    base = np.where(groups == 0, np.arange(120) % 3, np.arange(120) % 2).astype(float)
    got, expected = (moved(WassersteinBarycenter(random_state=0), base * unit, groups) / unit for unit in (scale, 1.0))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_jitter_separates_what_two_groups_share_and_moves_nothing_else():
    """As on COMPAS fitted on 0/1 targets: both groups get one constant, which only a jitter tells apart."""
    rng = np.random.default_rng(13)
    groups = np.repeat([0, 1], 200)
    y = (np.arange(400) % 10 < np.where(groups == 0, 4, 6)).astype(float)
    scores = rng.uniform(0.1, 0.9, size=400)

    def predict(jitter, seed):
        return moved(WassersteinBarycenter(fitted_on="targets", jitter=jitter, random_state=seed), scores, groups, y=y)

    plain, jittered = ([predict(jitter, seed) for seed in range(20)] for jitter in (0.0, 1e-9))
    np.testing.assert_allclose(jittered, plain, atol=1e-8)
    assert min(ks_distance(values, sensitive_features=groups) for values in plain) == 0
    assert min(ks_distance(values, sensitive_features=groups) for values in jittered) == 1


def test_map_is_monotone_within_a_group_and_ends_with_the_barycentre():
    scores, groups = sample([300, 200, 100], 4)
    fair = WassersteinBarycenter(random_state=0).fit(scores, sensitive_features=groups)
    grid = np.linspace(-5, 8, 200)
    for group in range(3):
        assert np.all(np.diff(fair.predict(grid, sensitive_features=np.full(200, group))) >= 0)
    whole = WassersteinBarycenter(split=False)
    inside = moved(whole, scores, groups)
    ends = whole.predict([-1e9, 1e9], sensitive_features=[0, 0])
    np.testing.assert_allclose(ends, [inside.min(), inside.max()])


@pytest.mark.parametrize("weighted", [False, True])  # rounding of weights must not skip to the next value
def test_groups_that_agree_already_are_left_alone(weighted):
    rng = np.random.default_rng(14)
    values, weight = rng.normal(size=200), rng.uniform(0.1, 1, size=200)
    columns = {"sample_weight": np.r_[weight, 0.3 * weight, weight]} if weighted else {}
    scores, groups = np.tile(values, 3), np.repeat(["a", "b", "c"], 200)
    got = moved(WassersteinBarycenter(split=False), scores, groups, **columns)
    np.testing.assert_allclose(got, scores, rtol=1e-12)
