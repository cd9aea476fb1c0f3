"""ESVDFair as a user meets it: one line to repair a model, and an honest account."""

import json
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import (
    Effort,
    ESVDFair,
    ESVDFairWarning,
    fit_curve,
    ks_bound,
    ks_distance,
    ks_population,
)
from esvdfair.batches import held_out
from esvdfair.core.edits import LayerEdit
from esvdfair.text import to_json

# The fine-tune of the paper, stopped early, leaves little of this network, and says so.
PAPER = pytest.param(
    "paper", marks=pytest.mark.filterwarnings("ignore:The repaired model predicts no better than a constant")
)
METHODS = [PAPER, "exact", "parity", "transport"]


def people(rows=1200, seed=0, groups=2):
    """Rows whose first features differ by group in mean and spread."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, groups, rows)
    X = rng.normal(size=(rows, 4))
    X[:, 0] = X[:, 0] * (1 + 0.2 * a) + 1.6 * a
    y = X[:, 0] + 1.5 * np.sin(2 * X[:, 1]) + X[:, 2] + 0.3 * rng.normal(size=rows)
    return X, y, a


def train(X, y, *layers, wrap=lambda network: network):
    network = MLPRegressor(hidden_layer_sizes=layers, learning_rate_init=0.01, max_iter=60, random_state=0, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return wrap(network).fit(X, y)


@pytest.fixture(scope="module")
def data():
    return people()


@pytest.fixture(scope="module")
def model(data):
    X, y, _ = data
    return train(X, y, 24, 12)


def fitted(model, data, **options):
    X, y, a = data
    return ESVDFair(model, **({"targets": ["labels", "predictions"]} | options)).fit(X, y, sensitive_features=a)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_closes_the_gap_accounts_for_it_and_leaves_the_model_alone(model, data, method):
    X, _, _ = data
    given = pickle.dumps(model)
    fair, again = (fitted(model, data, method=method, random_state=5) for _ in range(2))
    assert pickle.dumps(model) == given
    np.testing.assert_array_equal(fair.predict(X), again.predict(X))
    other = fitted(model, data, method=method, random_state=np.random.RandomState(0))
    assert not np.array_equal(fair.predict(X), other.predict(X))
    fresh, _, group = people(seed=1)
    before = ks_distance(model.predict(fresh), sensitive_features=group)
    after = ks_distance(fair.predict(fresh), sensitive_features=group)
    assert before > 0.3
    assert after < (0.75 if method == "paper" else 0.5) * before
    assert fair.summary_["evaluated_on"] == "heldout"
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
    assert sum(fair.summary_["group_sizes"].values()) == fair.summary_["rows"]
    assert all(isinstance(edit, LayerEdit) for edit in fair.edits_)
    assert len(fair.edits_) == (3 if method in ("paper", "exact") else 1)
    assert type(fair.estimator_) is MLPRegressor
    np.testing.assert_array_equal(fair.predict(X), fair.estimator_.predict(X))
    for edit in fair.edits_[-1:]:
        np.testing.assert_array_equal(edit.weight_after.T, fair.estimator_.coefs_[-1])


@pytest.mark.parametrize("method", METHODS)
def test_a_target_is_met_on_held_out_rows_or_said_not_to_be(model, data, method):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fair = fitted(model, data, method=method, target_ks=0.15)
    summary = fair.summary_
    assert summary["met"] == (summary["ks_population"] <= 0.15)
    assert summary["met"] or any(w.category is ESVDFairWarning for w in caught)
    if method in ("parity", "transport", "exact"):
        assert summary["met"]


def test_max_mse_increase_takes_the_fairest_within(model, data):
    fair = fitted(model, data, max_mse_increase=0.5)
    assert fair.summary_["mse_after"] <= 1.5 * fair.summary_["mse_before"]
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
    within = [p for p in fair.curve_.points if p.mse <= 1.5 * fair.summary_["mse_before"]]
    assert fair.summary_["ks_after"] == min(within, key=lambda p: (p.ks_population, p.mse)).ks


def test_the_curve_has_twenty_points_and_builds_models_without_refitting(model, data):
    X, y, a = data
    curve = fit_curve(model, X, y, sensitive_features=a, targets=["labels", "predictions"])
    assert len(curve) >= 20
    frame = curve.to_frame()
    assert list(frame.columns) == [
        "mse", "r2", "ks", "ks_low", "ks_high", "mean_gap", "variance_gap", "target", "ridge", "strength",
        "ks_population", "ks_upper", "constant",
    ]  # fmt: skip
    assert (frame["ks_low"] <= frame["ks_high"]).all()
    point = curve.select(target_ks=0.15)
    assert point.ks_population <= 0.15
    repaired = curve.model(point)
    np.testing.assert_array_equal(repaired.predict(X), curve.model(point.index).predict(X))
    assert ks_distance(repaired.predict(X), sensitive_features=a) < 0.2
    assert curve.points[point] is point
    with pytest.raises(IndexError):
        curve.model(len(curve))
    np.testing.assert_array_equal(repaired.predict(X), fitted(model, data, target_ks=0.15).predict(X))


@pytest.mark.parametrize("method", METHODS)
def test_without_labels_it_repairs_towards_the_models_own_predictions(model, data, method):
    X, _, a = data
    fair = ESVDFair(model, method=method, targets="predictions" if method in ("parity", "transport") else "auto")
    fair.fit(X, sensitive_features=a)
    assert fair.summary_["mse_before"] == pytest.approx(0.0, abs=1e-12)
    assert fair.summary_["ks_after"] < 0.75 * fair.summary_["ks_before"]


def test_the_optimum_as_a_target(model, data):
    fair = fitted(model, data, targets="optimum", target_ks=0.2)
    assert fair.summary_["met"]
    assert {point.target.split()[0] for point in fair.curve_.points} == {"untouched", "optimum"}


def test_three_groups_and_intersections(data):
    X, y, a = people(groups=3, rows=1500)
    model = train(X, y, 24)
    fair = fitted(model, (X, y, a), target_ks=0.2)
    assert fair.summary_["met"]
    assert list(fair.summary_["group_sizes"]) == [0, 1, 2]
    both = pd.DataFrame({"race": np.where(a == 0, "x", "y"), "old": X[:, 3] > 0})
    fair = fitted(model, (X, y, both), target_ks=0.3)
    assert list(fair.summary_["group_mse_after"]) == [("x", False), ("x", True), ("y", False), ("y", True)]
    assert fair.summary_["group_sizes"]["x", True] > 0
    found = json.loads(to_json(fair.summary_))  # several attributes are text there
    assert list(found["group_sizes"]) == ["x, False", "x, True", "y, False", "y, True"]


def test_missing_attribute_values(model, data):
    X, y, a = data
    holes = np.where(np.arange(len(a)) % 10 == 0, None, a.astype(object))
    with pytest.raises(ValueError, match="120 missing value"):
        fitted(model, (X, y, holes))
    fair = fitted(model, (X, y, holes), missing="group")
    assert "missing" in fair.summary_["group_sizes"]


def test_sample_weights_are_honoured(model, data):
    X, y, a = data
    weight = np.where(X[:, 1] > 0, 1.0, 0.0)
    options = {"targets": "labels", "method": "parity"}
    weighted = ESVDFair(model, **options).fit(X, y, sensitive_features=a, sample_weight=weight)
    assert weighted.summary_["rows"] < len(X) / 5
    plain = ESVDFair(model, **options).fit(X, y, sensitive_features=a)
    assert not np.allclose(weighted.predict(X), plain.predict(X))
    scaled = ESVDFair(model, **options).fit(X, y, sensitive_features=a, sample_weight=7 * weight)
    np.testing.assert_allclose(scaled.predict(X), weighted.predict(X), rtol=1e-6)


def test_validation_rows_judge(model, data):
    X, y, a = data
    fresh = people(seed=2, rows=500)
    fair = ESVDFair(model, targets="labels").fit(X, y, sensitive_features=a, validation=fresh)
    assert fair.summary_["evaluated_on"] == "validation"
    assert fair.summary_["rows"] == 500
    assert fair.summary_["mse_before"] == pytest.approx(np.mean((model.predict(fresh[0]) - fresh[1]) ** 2))
    assert fair.summary_["ks_after"] == pytest.approx(
        ks_distance(fair.predict(fresh[0]), sensitive_features=fresh[2]), abs=0.005
    )
    other = np.where(fresh[2] == 0, "z", fresh[2].astype(object))
    with pytest.raises(ValueError, match=rf"leaves fewer than two groups to compare .*'z': {np.sum(other == 'z')}"):
        ESVDFair(model).fit(X, y, sensitive_features=a, validation=(*fresh[:2], other))
    alone = [part[fresh[2] == 0] for part in fresh]
    with pytest.raises(ValueError, match="leaves fewer than two groups to compare"):
        ESVDFair(model).fit(X, y, sensitive_features=a, validation=alone)
    with pytest.raises(ValueError, match="validation must be"):
        ESVDFair(model).fit(X, y, sensitive_features=a, validation=(X, y))


def test_groups_too_small_to_hold_out_are_judged_on_training_rows(model, data):
    """Of 40 rows ten would be held out, and no two groups would be left to compare."""
    X, y, _ = data
    few = np.where(np.arange(len(X)) < 40, "few", "many")
    with pytest.warns(ESVDFairWarning, match="Too few rows to hold some out"):
        fair = fitted(model, (X, y, few), targets="labels", target_ks=0.2)
    assert fair.summary_["evaluated_on"] == "train"
    assert fair.summary_["group_sizes"] == {"few": 40, "many": 1160}


# --- scikit-learn --------------------------------------------------------------------------------------------------


WRAPPERS = {
    "pipeline": lambda m: make_pipeline(StandardScaler(), m),
    "target": lambda m: TransformedTargetRegressor(m, transformer=StandardScaler()),
    "frozen": lambda m: m,
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrapped_networks_come_back_as_what_they_were(data, kind):
    X, y, a = data
    frame = pd.DataFrame(X, columns=list("abcd"))
    wrapped = train(frame, y, 16, wrap=WRAPPERS[kind])
    wrapped = FrozenEstimator(wrapped) if kind == "frozen" else wrapped
    fair = ESVDFair(wrapped, targets="labels").fit(frame, y, sensitive_features=a)
    assert type(fair.estimator_) is type(wrapped)
    assert fair.summary_["ks_after"] < 0.5 * fair.summary_["ks_before"]
    assert list(fair.feature_names_in_) == list("abcd")


def test_an_unfitted_network_is_fitted_on_the_training_rows(data):
    X, y, a = data
    unfitted = MLPRegressor(hidden_layer_sizes=(16,), random_state=0, tol=1e-3, max_iter=500)
    fair = ESVDFair(unfitted, targets="labels").fit(X, y, sensitive_features=a)
    assert not hasattr(unfitted, "coefs_")
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
    with pytest.raises(NotFittedError, match="is not fitted"):
        ESVDFair(unfitted).fit(X, sensitive_features=a)


@pytest.mark.filterwarnings("ignore:The repaired model predicts no better than a constant")  # of the paper's fine-tune
def test_cross_validation_by_metadata_routing(model, data):
    X, y, a = data
    with sklearn.config_context(enable_metadata_routing=True):
        fair = ESVDFair(FrozenEstimator(model), method="parity", targets="labels").set_fit_request(
            sensitive_features=True
        )
        scores = cross_val_score(fair, X, y, params={"sensitive_features": a}, cv=3)
        assert (scores > 0.2).all()
        search = GridSearchCV(fair, {"method": ["parity", "paper"]}, cv=2).fit(X, y, sensitive_features=a)
    assert search.best_estimator_.summary_["ks_after"] < search.best_estimator_.summary_["ks_before"]


def test_clone_pickle_repr(model, data):
    X, _, _ = data
    with pytest.raises(NotFittedError):
        ESVDFair(model).predict(X)
    fair = fitted(FrozenEstimator(model), data, method="parity")
    assert clone(fair).get_params()["method"] == "parity"
    again = pickle.loads(pickle.dumps(fair))
    np.testing.assert_array_equal(again.predict(X), fair.predict(X))
    np.testing.assert_array_equal(again.curve_.model(0).predict(X), fair.curve_.model(0).predict(X))
    assert "method='parity'" in repr(fair)


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_batches_give_what_arrays_give(model, data, method):
    X, y, a = data
    parts = [slice(start, start + 170) for start in range(0, len(X), 170)]
    options = {"method": method, "targets": ["labels", "predictions"]}
    streamed = ESVDFair(model, **options).fit(lambda: ((X[part], y[part], a[part]) for part in parts))
    whole = ESVDFair(model, **options).fit(X, y, sensitive_features=a)
    np.testing.assert_allclose(streamed.predict(X), whole.predict(X), rtol=1e-6, atol=1e-6)
    assert streamed.n_features_in_ == 4


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "expected 'paper' or 'exact'"),
        ({"missing": "drop"}, "'error' or 'group'"),
        ({"method": "transport", "layer": -2}, "edits the last layer alone"),
        ({"method": "parity", "layer": 0}, "edits the last layer alone"),
        ({"method": "paper", "layer": -1}, "is the output layer"),
        ({"method": "paper", "layer": 9}, "out of range"),
        ({"method": "exact", "layer": "net.7"}, "no linear layer named"),
        ({"method": "exact", "refit": "ols"}, "requires `method='paper'`"),
        ({"method": "paper", "refit": "lasso"}, "'sgd' or 'ols'"),
        ({"method": "paper", "target_ks": 0.1, "mean_reduction": 15}, "give one or the other"),
        ({"target_ks": 0.1, "max_mse_increase": 0.1}, "Give one of them"),
        ({"mean_reduction": 15}, "transport takes target_ks"),
        ({"method": "paper", "mean_reduction": 0.5}, "`mean_reduction=0.5`; expected a number of at least 1"),
        ({"target_ks": 1.5}, "between 0 and 1"),
        ({"max_mse_increase": -1}, "not negative"),
        ({"validation_fraction": 1.0}, "from 0 to below 1"),
        ({"targets": "magic"}, "some of"),
        ({"targets": []}, "some of"),
        ({"target_ks": "0.1"}, "`target_ks='0.1'`; expected a number"),
        ({"target_ks": True}, "`target_ks=True`; expected a number"),
        ({"batch_size": 0}, "`batch_size=0`; expected a whole number of at least 1"),
        ({"batch_size": 10.0}, "`batch_size=10.0`; expected a whole number of at least 1"),
        ({"batch_size": None}, "`batch_size=None`; expected a whole number"),
        ({"random_state": -1}, "`random_state=-1`; expected a whole number of at least 0"),
        ({"random_state": True}, "`random_state=True`; expected a whole number"),
        ({"min_group_rows": 1}, "`min_group_rows=1`; expected a whole number of at least 2"),
        ({"min_group_rows": "30"}, "`min_group_rows='30'`; expected a whole number"),
        ({"method": "parity", "mean_reduction": "3"}, "`mean_reduction='3'`; expected a number of at least 1"),
        ({"targets": 3}, "some of"),
    ],
)
def test_contradicting_options_are_refused(model, data, options, message):
    X, y, a = data
    with pytest.raises(ValueError, match=message):
        ESVDFair(model, **options).fit(X, y, sensitive_features=a)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y, a: (X, y, a[:5]), "`X` has 1200 rows but `sensitive_features` has 5"),
        (lambda X, y, a: (X, y, np.zeros(len(a))), "one group, 0: 1200"),
        (
            lambda X, y, a: (X, y, np.where(np.arange(len(a)) == 0, 1, 0)),
            r"fewer than two groups to compare \(0: 1199, 1: 1\)",
        ),
        (lambda X, y, a: (X, y, X[:, 3]), "continuous"),
        (lambda X, y, a: (X, y, None), "sensitive_features is missing"),
        (lambda X, y, a: (X, np.column_stack([y, y]), a), "`y` has 2 columns"),
        (lambda X, y, a: (X[:, :2], y, a), "X has 2 features, but"),
        (lambda X, y, a: (np.where(X[0, 0] == X, np.nan, X), y, a), "NaN"),
    ],
    ids=["length", "one group", "small", "continuous", "none", "columns", "width", "nan"],
)
def test_bad_rows_are_explained(model, data, change, message):
    X, y, a = change(*data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        with pytest.raises(ValueError, match=message):
            ESVDFair(model, targets="predictions").fit(X, y, sensitive_features=a)


@pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")
def test_what_leaves_nothing_to_fit_is_refused(model, data):
    X, y, a = data
    with pytest.raises(ValueError, match="there is no y"):
        ESVDFair(model, targets="labels").fit(X, sensitive_features=a)
    with pytest.raises(ValueError, match="no rows to fit on"):
        ESVDFair(model).fit(iter([]))
    flat = MLPRegressor(hidden_layer_sizes=(4,), max_iter=1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat.fit(X, y)
    flat.coefs_[-1][:] = 0.0
    with pytest.raises(ValueError, match="for every row"):
        ESVDFair(flat).fit(X, y, sensitive_features=a)


# --- rows that neither fitted nor chose ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PAPER, "transport"])
def test_rows_that_neither_fitted_nor_chose_are_assessed_as_the_others_were(model, data, method):
    fair = fitted(model, data, method=method, effort=Effort.quick())
    fresh, y, group = people(3000, seed=7)
    found = fair.assess(fresh, y, sensitive_features=group)
    assert found.keys() == fair.summary_.keys()
    assert (found["evaluated_on"], found["rows"]) == ("test", 3000)
    assert found["ks_after"] == pytest.approx(ks_distance(fair.predict(fresh), sensitive_features=group), abs=1e-9)
    assert found["ks_before"] == pytest.approx(ks_distance(model.predict(fresh), sensitive_features=group), abs=1e-9)
    assert found["mse_after"] == pytest.approx(np.mean((fair.predict(fresh) - y) ** 2))
    assert found["ks_population"] == pytest.approx(ks_population(fair.predict(fresh), sensitive_features=group))
    if method == "transport":
        assert found["mse_refit"] <= 1.05 * found["mse_before"]


def test_a_certificate_of_other_rows_is_theirs(model, data):
    options = {"target_ks": 0.25, "confidence": 0.9, "effort": Effort.quick(), "targets": "labels"}
    fair = fitted(model, data, **options)
    fresh, y, group = people(6000, seed=7)
    found = fair.assess(fresh, y, sensitive_features=group)
    bound = ks_bound(fair.predict(fresh), sensitive_features=group, confidence=0.9)
    assert found["ks_upper"] == pytest.approx(bound, abs=1e-9)
    assert found["certified"] == (bound <= 0.25)
    assert fair.summary_["certified"] == fair.summary_["met"]


@pytest.mark.parametrize("method", ["parity", "transport"])
def test_groups_by_chance_cost_nothing(method):
    """25 random groups whose distance is what chance shows: no accuracy is traded for that noise."""
    rng = np.random.default_rng(0)
    X, a = rng.normal(size=(6000, 5)), np.array([f"g{i}" for i in rng.integers(0, 25, 6000)])
    y = X[:, 0] + 0.3 * rng.normal(size=6000)
    options = {"target_ks": 0.2, "effort": Effort.quick(), "targets": ["labels", "predictions"]}
    fair = ESVDFair(train(X, y, 16), method=method, **options).fit(X, y, sensitive_features=a)
    assert fair.summary_["ks_before"] > 0.25
    assert fair.summary_["mse_after"] <= fair.summary_["mse_before"]
    assert fair.summary_["met"]
    json.loads(to_json(fair.summary_))


# --- what is said of the rows before and after ------------------------------------------------------------------------


def messages(model, *rows, options=None, **beside):
    """Texts of the warnings of a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ESVDFair(model, effort=Effort.quick(), **(options or {})).fit(*rows, **beside)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("method", METHODS)
def test_labels_in_other_units_than_the_predictions_are_noticed_once(model, data, method):
    X, y, a = data
    options = {"method": method, "targets": "labels"}
    (said,) = [m for m in messages(model, X, 1000 * y + 30_000, sensitive_features=a, options=options) if "worse" in m]
    train = ~held_out(0.25, 0)(np.arange(len(y)))
    for values in (1000 * y[train] + 30_000, model.predict(X[train])):
        assert f"{values.mean():.3g}" in said
        assert f"{values.std():.3g}" in said
    assert "Check that `y` is in the units of the predictions." in said
    assert not [m for m in messages(model, X, y, sensitive_features=a, options=options) if "worse" in m]
    assert not [m for m in messages(model, X, sensitive_features=a) if "worse" in m]


def test_units_are_compared_with_the_weights_of_the_rows(model, data):
    X, y, a = data
    wrong = np.arange(len(y)) % 2 == 0
    mixed = np.where(wrong, 1000 * y + 30_000, y)
    assert [m for m in messages(model, X, mixed, sensitive_features=a) if "worse" in m]
    assert not [m for m in messages(model, X, mixed, sensitive_features=a, sample_weight=~wrong * 1.0) if "worse" in m]


def test_validation_that_repeats_training_rows_warns_and_does_not_certify(model, data):
    X, y, a = data
    rows = {"sensitive_features": a, "validation": (X[:300], y[:300], a[:300])}
    assert [m for m in messages(model, X, y, **rows) if "300 of 300 rows of `validation` are also in `X`" in m]
    with pytest.raises(ValueError, match=r"confidence=0\.9` requires new rows"):
        ESVDFair(model, target_ks=0.1, confidence=0.9).fit(X, y, **rows)


def test_a_missing_bias_that_costs_accuracy_is_named():
    from sklearn.linear_model import LinearRegression

    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 2000)
    X = np.column_stack([rng.normal(size=2000) + 5 + 3 * a, rng.normal(size=2000)])
    y = X @ [2.0, 1.0] + rng.normal(size=2000)
    options = {"targets": "labels", "target_ks": 0.05}
    without, with_one = (LinearRegression(fit_intercept=own).fit(X, y) for own in (False, True))
    (said,) = [m for m in messages(without, X, y, sensitive_features=a, options=options) if "no bias" in m]
    assert "The last layer 'coef_' has no bias, so the repaired predictions are off by " in said
    assert not [m for m in messages(with_one, X, y, sensitive_features=a, options=options) if "no bias" in m]
    assert not [m for m in messages(without, X, y, sensitive_features=rng.permutation(a)) if "no bias" in m]
