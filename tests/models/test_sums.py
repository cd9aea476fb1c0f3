"""Means, stacks and calibrated models of scikit-learn: what goes in comes out, and the original stays as it was."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.ensemble import (
    BaggingRegressor,
    GradientBoostingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingRegressor,
)
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import Lasso, LinearRegression, LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import LinearSVC

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.models import adapt, fingerprint

RNG = np.random.default_rng(0)
A = RNG.integers(0, 2, 1200)
X = RNG.normal(size=(1200, 4)) + A[:, None] * [0.8, 0, 0, 0]
Y = X[:, 0] + 0.5 * np.sin(2 * X[:, 1]) + X[:, 2] + 0.3 * RNG.normal(size=1200)
LABEL = (Y > 0).astype(int)


def network(seed=0, **options):
    return MLPRegressor(hidden_layer_sizes=(8,), max_iter=30, learning_rate_init=0.02, random_state=seed, **options)


def scaled(model):
    return TransformedTargetRegressor(make_pipeline(StandardScaler(), model), transformer=StandardScaler())


MEANS = {
    "networks": VotingRegressor([("a", network(0)), ("b", network(1))]),
    "weighted, one dropped": VotingRegressor(
        [("a", Ridge()), ("no", "drop"), ("b", scaled(network(2)))], weights=[1, 5, 3]
    ),
    "network and sparse": VotingRegressor([("net", network()), ("lasso", Lasso(0.05))]),
    "bagged networks": BaggingRegressor(network(), n_estimators=3, max_features=0.75, random_state=0),
    "bagged linear": BaggingRegressor(LinearRegression(), n_estimators=5, random_state=0),
    "in a pipeline": make_pipeline(StandardScaler(), VotingRegressor([("a", Ridge()), ("b", network())])),
    "in a target transformer": TransformedTargetRegressor(
        VotingRegressor([("a", Ridge()), ("b", Ridge(10))]), transformer=MinMaxScaler()
    ),
}
FEW = make_pipeline(make_column_transformer(("passthrough", [1, 2, 3])), Ridge())  # the columns that groups share
STACKS = {
    "linear": StackingRegressor(
        [("tree", GradientBoostingRegressor(n_estimators=10)), ("net", network()), ("few", FEW)]
    ),
    "with inputs": StackingRegressor([("near", KNeighborsRegressor())], Ridge(), passthrough=True),
    "network": StackingRegressor([("a", Ridge()), ("b", KNeighborsRegressor())], network(), passthrough=True),
}


def fitted(model, y=Y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(X, y)


def many(rows=20_000):
    """So many other people that chance plays no part."""
    group = np.random.default_rng(7).integers(0, 2, rows)
    return np.random.default_rng(8).normal(size=(rows, 4)) + group[:, None] * [0.8, 0, 0, 0], group


def by_hand(model, rows):
    """What a mean or a stack predicts, put together of what its models predict."""
    if isinstance(model, TransformedTargetRegressor):
        return model.transformer_.inverse_transform(by_hand(model.regressor_, rows)[:, None])[:, 0]
    if hasattr(model, "steps"):
        return by_hand(model[-1], model[:-1].transform(rows))
    if isinstance(model, StackingRegressor):
        columns = [each.predict(rows) for each in model.estimators_] + ([rows] if model.passthrough else [])
        return model.final_estimator_.predict(np.column_stack(columns))
    used = getattr(model, "estimators_features_", [slice(None)] * len(model.estimators_))
    weights = [1, 3] if getattr(model, "weights", None) else None
    own = [each.predict(rows[:, columns]) for each, columns in zip(model.estimators_, used, strict=True)]
    return np.average(own, axis=0, weights=weights)


@pytest.mark.filterwarnings("ignore:.*(No candidate meets|keeps .* of the variance)")
@pytest.mark.parametrize("name", [*MEANS, *STACKS])
def test_what_goes_in_comes_out(name):
    model = fitted({**MEANS, **STACKS}[name])
    content = fingerprint(model)
    fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick(), random_state=0).fit(X, Y, sensitive_features=A)
    assert type(fair.estimator_) is type(model)
    assert fingerprint(model) == content
    rows, group = many()
    before, after = model.predict(rows), fair.estimator_.predict(rows)
    np.testing.assert_array_equal(after, fair.predict(rows))
    np.testing.assert_allclose(after, by_hand(fair.estimator_, rows), rtol=1e-6, atol=1e-9)
    assert ks_distance(after, sensitive_features=group) < 0.5 * ks_distance(before, sensitive_features=group)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fair)).predict(rows), after)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_one_layer_of_all_its_models(name):
    """New weights w do what the captured inputs times w do: the oracle is the layer itself."""
    model = fitted(MEANS[name])
    adapter = adapt(model)
    layer, head = adapter.layers(X)[-1], adapter.head(X)
    inputs, prediction = adapter.capture(X, [layer.name])
    features = inputs[layer.name]
    np.testing.assert_allclose(prediction, model.predict(X), rtol=1e-6)
    np.testing.assert_allclose(head.apply(features @ layer.weight[0] + layer.bias[0]), model.predict(X), rtol=1e-6)
    weight, bias = layer.weight + RNG.normal(size=layer.weight.shape), layer.bias + 0.7
    edited = adapter.replace({layer.name: (weight, bias)}).model
    np.testing.assert_allclose(edited.predict(X), head.apply(features @ weight[0] + bias[0]), rtol=1e-5, atol=1e-5)


def test_a_lasso_in_a_mean_keeps_its_zeros_and_named_models_are_the_repaired_ones():
    model = fitted(MEANS["network and sparse"])
    zero = model.named_estimators_["lasso"].coef_ == 0
    assert zero.any()
    fair = ESVDFair(model, target_ks=0.2, effort=Effort.quick()).fit(X, Y, sensitive_features=A)
    assert (fair.estimator_.named_estimators_["lasso"].coef_[zero] == 0).all()
    for member, named in zip(fair.estimator_.estimators_, fair.estimator_.named_estimators_.values(), strict=True):
        assert member is named


def test_a_bagged_model_takes_tables():
    table = pd.DataFrame(X, columns=list("abcd"))
    model = BaggingRegressor(Ridge(), n_estimators=3, max_features=2, random_state=0).fit(table, Y)
    fair = ESVDFair(model, effort=Effort.quick()).fit(table, Y, sensitive_features=A)
    np.testing.assert_array_equal(fair.predict(table), fair.estimator_.predict(table))


CALIBRATED = {
    "sigmoid": CalibratedClassifierCV(LogisticRegression(), method="sigmoid", ensemble=False),
    "isotonic": CalibratedClassifierCV(LogisticRegression(), method="isotonic", ensemble=False),
    "no probability of its own": CalibratedClassifierCV(LinearSVC(), method="sigmoid", ensemble=False),
    "frozen": CalibratedClassifierCV(FrozenEstimator(LogisticRegression().fit(X, LABEL))),
    "stacked": StackingClassifier([("a", LogisticRegression())], LogisticRegression(), passthrough=True),
}


@pytest.mark.filterwarnings("ignore:.*keeps .* of the variance")
@pytest.mark.parametrize("name", CALIBRATED)
def test_a_calibrated_or_stacked_classifier_is_repaired_before_its_calibration(name):
    model = fitted(CALIBRATED[name], LABEL)
    content, (rows, group) = fingerprint(model), many()
    fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick(), random_state=0).fit(X, LABEL, sensitive_features=A)
    assert fingerprint(model) == content
    assert type(fair.estimator_) is type(model)
    before, after = (each.predict_proba(rows)[:, 1] for each in (model, fair.estimator_))
    np.testing.assert_allclose(after, fair.predict(rows), atol=1e-9)
    assert ks_distance(after, sensitive_features=group) < 0.5 * ks_distance(before, sensitive_features=group)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            VotingRegressor([("net", network()), ("tree", GradientBoostingRegressor(n_estimators=3))]),
            "VotingRegressor that holds a GradientBoostingRegressor: all of its models must be networks or linear",
        ),
        (BaggingRegressor(KNeighborsRegressor(), 2), "BaggingRegressor that holds a KNeighborsRegressor"),
        (StackingRegressor([("a", Ridge())], KNeighborsRegressor()), r"KNeighborsRegressor \(inside a StackingReg"),
    ],
    ids=["trees in a mean", "neighbours", "neighbours on top"],
)
def test_refusals_name_the_model_and_the_next_step(model, said):
    with pytest.raises(TypeError, match=said):
        adapt(fitted(model))


def test_an_ensemble_of_calibrated_models_is_refused():
    with pytest.raises(TypeError, match=r"averages 3 classifiers\. Fit it with ensemble=False"):
        adapt(fitted(CalibratedClassifierCV(LogisticRegression(), cv=3), LABEL))


def test_an_unfitted_mean_is_fitted_on_the_training_rows():
    with pytest.raises(NotFittedError):
        adapt(MEANS["bagged linear"].__class__(Ridge()))
    fair = ESVDFair(BaggingRegressor(Ridge(), 3, random_state=0), target_ks=0.2, effort=Effort.quick())
    assert len(fair.fit(X, Y, sensitive_features=A).estimator_.estimators_) == 3
