"""Predicted groups: labels survive, any classifier works, baselines compose; the wrapper of the unaware optimum."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, RidgeClassifier

from esvdfair.baselines import (
    GroupPredictor,
    PrivateHistogram,
    UnawareOptimum,
    WassersteinBarycenter,
    WithPredictedGroups,
)
from esvdfair.core.metrics import ks_distance
from esvdfair.core.optimum import fit_optimum


class Threshold:
    """A classifier that is not a scikit-learn estimator, with predictions of shape (rows, 1) as a network gives."""

    def fit(self, x, codes):
        self.flip = np.corrcoef(x[:, 0], codes)[0, 1] < 0
        return self

    def predict(self, x):
        return ((x[:, :1] > 0) != self.flip).astype(np.float32)


def rows(n=400, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    return x, x @ [1.0, 0.5, 0.2], x[:, 0] + 0.3 * rng.normal(size=n) > 0


@pytest.mark.parametrize("names", [("b", "a"), (7, 3), (True, False)])
def test_predicts_the_labels_it_was_given(names):
    x, _, first = rows()
    labels = np.where(first, names[0], names[1])
    predictor = GroupPredictor().fit(x, labels)
    got, probability = predictor.predict(x), predictor.predict_proba(x)
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    np.testing.assert_array_equal(np.array(predictor.labels_)[probability.argmax(axis=1)], got)
    assert set(got.tolist()) == set(names)
    assert np.mean(got == labels) > 0.8


def test_intersections_come_back_as_tuples():
    x, _, first = rows()
    both = pd.DataFrame({"sex": np.where(first, "f", "m"), "old": x[:, 1] > 0})
    predictor = GroupPredictor().fit(x, both)
    assert predictor.labels_ == (("f", False), ("f", True), ("m", False), ("m", True))
    got = predictor.predict(x)
    assert got.shape == (400,)
    assert np.mean([g == t for g, t in zip(got, both.itertuples(index=False, name=None), strict=True)]) > 0.8


def test_any_object_with_fit_and_predict_serves_and_is_copied():
    x, _, first = rows()
    mine = Threshold()
    predictor = GroupPredictor(classifier=mine).fit(x, np.where(first, "a", "b"))
    assert np.mean(predictor.predict(x) == np.where(x[:, 0] > 0, "a", "b")) == 1
    assert not hasattr(mine, "flip")
    with pytest.raises(TypeError, match="Threshold has no predict_proba"):
        predictor.predict_proba(x)


def test_weights_reach_the_classifier():
    x, _, first = rows()
    weight = np.where(first, 10.0, 1.0)
    plain, weighted = (GroupPredictor().fit(x, first, sample_weight=w) for w in (None, weight))
    assert np.mean(weighted.predict(x)) > np.mean(plain.predict(x)) + 0.05


@pytest.mark.parametrize("baseline", [WassersteinBarycenter(random_state=0), PrivateHistogram(random_state=0)])
def test_composition_equals_the_two_steps_by_hand(baseline):
    x, scores, first = rows()
    groups = np.where(first, "a", "b")
    test_x, test_scores, _ = rows(seed=1)
    got = WithPredictedGroups(baseline=baseline).fit(scores, sensitive_features=groups, X=x)
    by_hand = clone(baseline).fit(scores, sensitive_features=groups)
    predicted = GroupPredictor().fit(x, groups).predict(test_x)
    np.testing.assert_array_equal(
        got.predict(test_scores, X=test_x), by_hand.predict(test_scores, sensitive_features=predicted)
    )
    assert not hasattr(baseline, "labels_")


def test_the_baseline_is_fitted_on_true_groups_targets_and_weights():
    x, scores, first = rows()
    y, weight = scores + 1, 1.0 + first
    got = WithPredictedGroups(baseline=PrivateHistogram(fitted_on="targets"))
    got.fit(scores, y, sensitive_features=first, X=x, sample_weight=weight)
    alone = PrivateHistogram().fit(y, sensitive_features=first, sample_weight=weight)
    np.testing.assert_allclose(got.baseline_.histogram_, alone.histogram_)


def test_a_fitted_predictor_can_be_shared():
    x, scores, first = rows()
    shared = GroupPredictor().fit(x, first)
    composed = WithPredictedGroups(
        baseline=WassersteinBarycenter(random_state=0), group_predictor=FrozenEstimator(shared)
    )
    composed.fit(scores, sensitive_features=first, X=np.zeros((400, 3)))  # not used to fit again
    assert composed.group_predictor_.estimator is shared
    assert len(np.unique(composed.predict(scores, X=x))) > 100


def test_what_is_refused():
    x, scores, first = rows()
    with pytest.raises(NotFittedError):
        GroupPredictor().predict(x)
    with pytest.raises(NotFittedError):
        WithPredictedGroups(baseline=WassersteinBarycenter()).predict(scores, X=x)
    with pytest.raises(ValueError, match="only one group"):
        GroupPredictor(classifier=LogisticRegression()).fit(x, np.zeros(400, int))
    with pytest.raises(ValueError, match="only one group"):
        WithPredictedGroups(baseline=WassersteinBarycenter()).fit(scores, sensitive_features=first | True, X=x)


def test_a_private_histogram_with_predicted_groups_is_not_private_and_says_so():
    x, scores, first = rows()
    private = PrivateHistogram(epsilon=1.0, bounds=(-4, 4), random_state=0)
    with pytest.raises(ValueError, match="the whole is not private"):
        WithPredictedGroups(baseline=private).fit(scores, sensitive_features=first, X=x)
    told = WithPredictedGroups(baseline=private, not_private=True).fit(scores, sensitive_features=first, X=x)
    assert told.predict(scores, X=x).shape == (400,)


# --- unaware optimum --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unaware():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2))
    groups = np.where(x[:, 0] + 0.5 * rng.normal(size=600) > 0, "a", "b")
    return x, x @ [1.0, 0.5], groups


def test_it_is_the_optimum_of_the_probabilities_that_the_features_give(unaware):
    x, eta, groups = unaware
    probability = LogisticRegression(max_iter=1000).fit(x, groups).predict_proba(x)
    (direct,) = fit_optimum(eta, probability, levels=[0.1])
    got = UnawareOptimum(alpha=0.1).fit(eta, sensitive_features=groups, X=x).predict(eta, X=x)
    np.testing.assert_allclose(got, direct.predict(eta, probability), atol=1e-12)


def test_probabilities_that_are_known_are_taken_from_a_frozen_predictor(unaware):
    x, eta, groups = unaware
    known = FrozenEstimator(GroupPredictor().fit(x, groups))
    fair = UnawareOptimum(alpha=0.1, group_predictor=known).fit(eta[:500], sensitive_features=groups[:500], X=x[:500])
    (direct,) = fit_optimum(eta[:500], known.predict_proba(x[:500]), levels=[0.1])
    np.testing.assert_allclose(fair.predict(eta, X=x), direct.predict(eta, known.predict_proba(x)), atol=1e-12)


def test_a_smaller_alpha_brings_the_groups_closer_and_costs_more(unaware):
    x, eta, groups = unaware
    fits = [UnawareOptimum(alpha=a).fit(eta, sensitive_features=groups, X=x).predict(eta, X=x) for a in (0.1, 0.2, 1.0)]
    costs = [np.mean((fit - eta) ** 2) for fit in fits]
    assert costs[0] > 1.05 * costs[1] > costs[2]
    assert ks_distance(fits[0], sensitive_features=groups) < 0.2 < 0.5 < ks_distance(eta, sensitive_features=groups)


def test_weights_reach_the_solver(unaware):
    x, eta, groups = unaware
    predictor = GroupPredictor().fit(x, groups)
    probability, weight = predictor.predict_proba(x), np.where(eta > 0, 2.0, 1.0)
    (expected,) = fit_optimum(eta, probability, levels=[0.1], sample_weight=weight)
    got = UnawareOptimum(alpha=0.1, group_predictor=FrozenEstimator(predictor))
    got.fit(eta, sensitive_features=groups, X=x, sample_weight=weight)
    np.testing.assert_allclose(got.optimum_.group_prior, expected.group_prior)
    (unweighted,) = fit_optimum(eta, probability, levels=[0.1])
    assert abs(unweighted.group_prior[0] - expected.group_prior[0]) > 0.01


def test_what_the_optimum_refuses(unaware):
    x, eta, groups = unaware
    with pytest.raises(NotFittedError):
        UnawareOptimum().predict(eta, X=x)
    with pytest.raises(TypeError, match="has no predict_proba"):
        UnawareOptimum(group_predictor=GroupPredictor(classifier=RidgeClassifier())).fit(
            eta, sensitive_features=groups, X=x
        )
