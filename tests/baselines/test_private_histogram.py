"""Private histogram: noise, slack, randomised transport, parity, failures."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from esvdfair.baselines import PrivateHistogram, private_histogram
from esvdfair.baselines.private_histogram import CheapestPlans
from esvdfair.core.metrics import ks_distance, ks_floor


def sample(sizes, rng):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return rng.normal(size=groups.size) * (1 + 0.5 * groups) + groups, groups


def test_full_slack_only_bins():
    scores, groups = sample([200, 100], np.random.default_rng(0))
    fair = PrivateHistogram(alpha=1.0, bounds=(-4, 6)).fit(scores, sensitive_features=groups)
    got = fair.predict(scores, sensitive_features=groups)
    assert fair.cost_ == pytest.approx(0, abs=1e-12)
    assert np.abs(got - np.clip(scores, -4, 6)).max() <= 10 / 18 / 2 + 1e-12


def test_noise_has_the_scale_of_the_promise(monkeypatch):
    """A share is the sum of 2 cells, each with Laplace noise of scale b = 2/(ε n), variance 2b²: deviation 2b."""
    stand_in = CheapestPlans(np.ones((2, 2, 2)) / 4, np.ones((2, 2)) / 2, 0.0)
    monkeypatch.setattr(private_histogram, "cheapest_plans", lambda *_, **__: stand_in)  # 1000 programs are slow
    scores, groups = sample([500, 500], np.random.default_rng(1))
    shares = [
        PrivateHistogram(bins=2, bounds=(-4, 6), epsilon=0.5, random_state=seed)
        .fit(scores, sensitive_features=groups)
        .proportions_
        for seed in range(1000)
    ]
    b = 2 / (0.5 * 1000)
    assert np.std(np.asarray(shares) - 0.5) == pytest.approx(2 * b, rel=0.1)
    quiet = PrivateHistogram(bins=2, bounds=(-4, 6)).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(quiet.proportions_, 0.5, rtol=1e-12)


@pytest.mark.parametrize("epsilon", [10.0, 0.1, 0.001])
def test_noisy_histograms_are_repaired_to_distributions(epsilon):
    scores, groups = sample([300, 30], np.random.default_rng(2))
    fair = PrivateHistogram(bounds=(-4, 6), epsilon=epsilon, random_state=0).fit(scores, sensitive_features=groups)
    for table in (fair.histogram_, fair.target_, *fair.transport_):
        assert table.min() >= -1e-12
        np.testing.assert_allclose(table.sum(axis=-1), 1, atol=1e-9)
    assert np.ptp(np.cumsum(fair.target_, axis=1), axis=0).max() < 1e-9


def test_weak_privacy_approaches_no_privacy():
    scores, groups = sample([300, 200], np.random.default_rng(3))
    private = PrivateHistogram(bounds=(-4, 6), epsilon=1e9, random_state=0).fit(scores, sensitive_features=groups)
    exact = PrivateHistogram(bounds=(-4, 6)).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(private.histogram_, exact.histogram_, atol=1e-6)
    assert private.cost_ == pytest.approx(exact.cost_, rel=1e-4)


def test_random_transport_has_the_right_marginals():
    scores, groups = sample([30_000, 20_000], np.random.default_rng(4))
    fair = PrivateHistogram(bins=6, bounds=(-2, 3), random_state=0).fit(scores, sensitive_features=groups)
    got = fair.predict(scores, sensitive_features=groups)
    for code, n in enumerate((30_000, 20_000)):
        mine = groups == code
        share = np.array([np.mean(got[mine] == point) for point in fair.points_])
        np.testing.assert_allclose(share, fair.target_[code], atol=4 * np.sqrt(0.25 / n))
        start = (scores >= fair.edges_[2]) & (scores < fair.edges_[3]) & mine
        moved = np.array([np.mean(got[start] == point) for point in fair.points_])
        np.testing.assert_allclose(moved, fair.transport_[code, 2], atol=4 * np.sqrt(0.25 / start.sum()))
    assert np.count_nonzero(fair.transport_[0, 2] > 0.05) > 1  # else the check of randomness would be empty


@pytest.mark.parametrize("sizes", [[900, 300], [500, 400, 300]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_sample_ks_with_the_true_attribute_is_at_most_twice_the_floor(sizes, seed):
    scores, groups = sample(sizes, np.random.default_rng(seed))
    fair = PrivateHistogram(random_state=seed).fit(scores, sensitive_features=groups)
    assert ks_distance(scores, sensitive_features=groups) > 5 * ks_floor(sensitive_features=groups)
    assert ks_distance(fair.predict(scores, sensitive_features=groups), sensitive_features=groups) <= 2 * ks_floor(
        sensitive_features=groups
    )


def test_slack_is_respected_in_sample():
    scores, groups = sample([3000, 2000], np.random.default_rng(5))
    fair = PrivateHistogram(alpha=0.15, random_state=0).fit(scores, sensitive_features=groups)
    ks = ks_distance(fair.predict(scores, sensitive_features=groups), sensitive_features=groups)
    assert ks == pytest.approx(0.15, abs=2 * ks_floor(sensitive_features=groups))


def test_the_larger_group_moves_less():
    scores, groups = sample([900, 100], np.random.default_rng(10))
    scores = scores + 2 * groups
    fair = PrivateHistogram(bins=40).fit(scores, sensitive_features=groups)
    # like every barycentre, the target has the overall mean, not the mean of the group means
    assert scores.mean() == pytest.approx(fair.target_[0] @ fair.points_, abs=0.1)
    assert abs((scores[groups == 0].mean() + scores[groups == 1].mean()) / 2 - scores.mean()) > 1


def test_bins_are_closed_on_the_left_and_catch_what_lies_outside():
    scores = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 0.1, 1.1, 1.9])
    groups = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    fair = PrivateHistogram(bins=2, bounds=(0, 2), alpha=1.0).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(fair.histogram_, [[0.4, 0.6], [1 / 3, 2 / 3]])
    got = fair.predict([-100.0, 0.99, 1.0, 100.0], sensitive_features=[0, 0, 0, 0])
    np.testing.assert_allclose(got, [0.5, 0.5, 1.5, 1.5])


def test_a_bin_unseen_in_its_group_is_left_where_it_is():
    scores, groups = np.array([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 0, 1, 1, 1])
    fair = PrivateHistogram(bins=5, random_state=0).fit(scores, sensitive_features=groups)
    np.testing.assert_allclose(fair.predict([0.5, 0.3], sensitive_features=[0, 1]), [0.5, 0.3])


def test_whole_weights_count_as_repeated_rows():
    rng = np.random.default_rng(6)
    scores, groups = sample([40, 30], rng)
    weight = rng.integers(1, 4, size=70)
    weighted = PrivateHistogram().fit(scores, sensitive_features=groups, sample_weight=weight)
    repeated = PrivateHistogram().fit(np.repeat(scores, weight), sensitive_features=np.repeat(groups, weight))
    np.testing.assert_allclose(weighted.histogram_, repeated.histogram_, atol=1e-12)
    np.testing.assert_allclose(weighted.proportions_, repeated.proportions_, atol=1e-12)


def test_fitted_on_targets_uses_the_targets_alone():
    rng = np.random.default_rng(7)
    scores, groups = sample([100, 100], rng)
    y = scores + rng.normal(size=200)
    on_targets = PrivateHistogram(fitted_on="targets").fit(scores, y, sensitive_features=groups)
    as_scores = PrivateHistogram().fit(y, sensitive_features=groups)
    np.testing.assert_array_equal(on_targets.histogram_, as_scores.histogram_)
    assert not np.array_equal(as_scores.edges_, PrivateHistogram().fit(scores, sensitive_features=groups).edges_)


def test_an_integer_seed_repeats_and_a_generator_moves_on():
    scores, groups = sample([100, 100], np.random.default_rng(8))
    seeded = PrivateHistogram(bins=4, random_state=0).fit(scores, sensitive_features=groups)
    np.testing.assert_array_equal(
        seeded.predict(scores, sensitive_features=groups), seeded.predict(scores, sensitive_features=groups)
    )
    moving = PrivateHistogram(bins=4, random_state=np.random.default_rng(0)).fit(scores, sensitive_features=groups)
    assert not np.array_equal(
        moving.predict(scores, sensitive_features=groups), moving.predict(scores, sensitive_features=groups)
    )


def test_errors_say_what_to_do():
    scores, groups = sample([20, 20], np.random.default_rng(9))
    with pytest.raises(NotFittedError):
        PrivateHistogram().predict(scores, sensitive_features=groups)
    bad = [
        ({"bins": 1}, "at least 2"),
        ({"bins": 2.5}, "at least 2"),
        ({"alpha": -0.1}, "between 0 and 1"),
        ({"bounds": (1, 1)}, "low < high"),
        ({"epsilon": 0.0, "bounds": (0, 1)}, "positive number"),
        ({"epsilon": 1.0}, "would leak"),
    ]
    for parameters, message in bad:
        with pytest.raises(ValueError, match=message):
            PrivateHistogram(**parameters).fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="less privacy than promised"):
        PrivateHistogram(epsilon=1.0, bounds=(-4, 6)).fit(scores, sensitive_features=groups, sample_weight=np.ones(40))
    with pytest.raises(ValueError, match="all fitted values equal"):
        PrivateHistogram().fit(np.ones(40), sensitive_features=groups)
    fair = PrivateHistogram().fit(scores, sensitive_features=groups)
    with pytest.raises(ValueError, match="not in the training data"):
        fair.predict([0.0], sensitive_features=["x"])
