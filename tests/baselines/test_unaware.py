"""Unaware optimum: the wrapper calls core.optimum with the right things, and says what is missing."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, RidgeClassifier

from esvdfair.baselines import GroupPredictor, UnawareOptimum
from esvdfair.core.metrics import ks_distance
from esvdfair.core.optimum import fit_optimum


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2))
    groups = np.where(x[:, 0] + 0.5 * rng.normal(size=600) > 0, "a", "b")
    return x, x @ [1.0, 0.5], groups


def test_it_is_the_optimum_of_the_probabilities_that_the_features_give(rows):
    x, eta, groups = rows
    probability = LogisticRegression(max_iter=1000).fit(x, groups).predict_proba(x)
    (direct,) = fit_optimum(eta, probability, levels=[0.1])
    got = UnawareOptimum(alpha=0.1).fit(eta, sensitive_features=groups, X=x).predict(eta, X=x)
    np.testing.assert_allclose(got, direct.predict(eta, probability), atol=1e-12)


def test_probabilities_that_are_known_are_taken_from_a_frozen_predictor(rows):
    x, eta, groups = rows
    known = FrozenEstimator(GroupPredictor().fit(x, groups))
    fair = UnawareOptimum(alpha=0.1, group_predictor=known).fit(eta[:500], sensitive_features=groups[:500], X=x[:500])
    (direct,) = fit_optimum(eta[:500], known.predict_proba(x[:500]), levels=[0.1])
    np.testing.assert_allclose(fair.predict(eta, X=x), direct.predict(eta, known.predict_proba(x)), atol=1e-12)


def test_it_brings_the_groups_together_without_the_attribute(rows):
    x, eta, groups = rows
    assert ks_distance(eta, sensitive_features=groups) > 0.5
    got = UnawareOptimum(alpha=0.1).fit(eta, sensitive_features=groups, X=x).predict(eta, X=x)
    assert ks_distance(got, sensitive_features=groups) < 0.2


def test_a_smaller_alpha_costs_more(rows):
    x, eta, groups = rows
    fits = [UnawareOptimum(alpha=a).fit(eta, sensitive_features=groups, X=x) for a in (0.05, 0.2, 1.0)]
    costs = [np.mean((fit.predict(eta, X=x) - eta) ** 2) for fit in fits]
    assert costs[0] > 1.05 * costs[1] > costs[2]


def test_weights_reach_the_solver(rows):
    x, eta, groups = rows
    predictor = GroupPredictor().fit(x, groups)
    probability, weight = predictor.predict_proba(x), np.where(eta > 0, 2.0, 1.0)
    (expected,) = fit_optimum(eta, probability, levels=[0.1], sample_weight=weight)
    got = UnawareOptimum(alpha=0.1, group_predictor=FrozenEstimator(predictor))
    got.fit(eta, sensitive_features=groups, X=x, sample_weight=weight)
    np.testing.assert_allclose(got.optimum_.group_prior, expected.group_prior)
    (unweighted,) = fit_optimum(eta, probability, levels=[0.1])
    assert abs(unweighted.group_prior[0] - expected.group_prior[0]) > 0.01


def test_errors_say_what_to_do(rows):
    x, eta, groups = rows
    with pytest.raises(NotFittedError):
        UnawareOptimum().predict(eta, X=x)
    with pytest.raises(TypeError, match="has no predict_proba"):
        UnawareOptimum(group_predictor=GroupPredictor(classifier=RidgeClassifier())).fit(
            eta, sensitive_features=groups, X=x
        )
