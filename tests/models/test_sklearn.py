import copy
import functools
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.cross_decomposition import PLSRegression
from sklearn.ensemble import VotingRegressor
from sklearn.exceptions import ConvergenceWarning, DataConversionWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import (
    ARDRegression,
    ElasticNet,
    GammaRegressor,
    Lars,
    Lasso,
    LassoLars,
    LinearRegression,
    LogisticRegression,
    OrthogonalMatchingPursuit,
    PoissonRegressor,
    RANSACRegressor,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
    SGDRegressor,
    TheilSenRegressor,
    TweedieRegressor,
)
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    OneHotEncoder,
    PowerTransformer,
    QuantileTransformer,
    StandardScaler,
)
from sklearn.svm import SVR, LinearSVC, LinearSVR

from esvdfair import Effort, ESVDFair, ESVDFairWarning, summarise
from esvdfair.models import adapt
from esvdfair.models.base import PREDICT_ROWS
from esvdfair.models.sklearn import SklearnAdapter
from esvdfair.report import verdict

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 4))
Y = np.exp(0.3 * X[:, 0] - 0.2 * X[:, 1] + 0.1 * rng.normal(size=200)) * 50
FRAME = pd.DataFrame(X, columns=["age", "pay", "years", "score"])


def mlp(activation="relu", **options):
    return MLPRegressor(hidden_layer_sizes=(7, 5), activation=activation, max_iter=15, random_state=0, **options)


def fit(model, x=X, y=Y):
    with warnings.catch_warnings():
        for category in (ConvergenceWarning, DataConversionWarning):
            warnings.simplefilter("ignore", category)
        return model.fit(x, y)


def target(regressor, **options):
    return TransformedTargetRegressor(regressor, **options)


def log_then_standardise():
    return make_pipeline(FunctionTransformer(np.log, np.exp), StandardScaler())


# name: (fitted model, kind of head)
CASES = {
    **{name: (lambda name=name: fit(mlp(name)), "identity") for name in ("relu", "tanh", "logistic", "identity")},
    "lbfgs": (lambda: fit(mlp("tanh", solver="lbfgs")), "identity"),
    "float32": (lambda: fit(mlp(), X.astype(np.float32), Y.astype(np.float32)), "identity"),
    "poisson": (lambda: fit(mlp(loss="poisson")), "exp"),
    "column of targets": (lambda: fit(target(mlp(), transformer=StandardScaler()), y=Y[:, None]), "affine"),
    "pipeline": (lambda: fit(make_pipeline(StandardScaler(), mlp())), "identity"),
    "pipeline of one": (lambda: fit(make_pipeline(mlp())), "identity"),
    "passthrough": (lambda: fit(Pipeline([("a", StandardScaler()), ("b", "passthrough"), ("c", mlp())])), "identity"),
    "standardised target": (lambda: fit(target(mlp(), transformer=StandardScaler())), "affine"),
    "target in [0, 1]": (lambda: fit(target(mlp(), transformer=MinMaxScaler())), "affine"),
    "negated target": (lambda: fit(target(mlp(), func=np.negative, inverse_func=np.negative)), "affine"),
    "log target": (lambda: fit(target(mlp(), func=np.log, inverse_func=np.exp)), "exp"),
    "log1p target": (lambda: fit(target(mlp(), func=np.log1p, inverse_func=np.expm1)), "exp"),
    "standardised log": (lambda: fit(target(mlp(), transformer=log_then_standardise())), "exp"),
    "no transformer": (lambda: fit(target(mlp())), "identity"),
    "target around pipeline": (
        lambda: fit(target(make_pipeline(StandardScaler(), mlp()), transformer=StandardScaler())),
        "affine",
    ),
    "pipeline around target": (
        lambda: fit(make_pipeline(StandardScaler(), target(mlp(), func=np.log, inverse_func=np.exp))),
        "exp",
    ),
    "pipeline in pipeline": (
        lambda: fit(make_pipeline(StandardScaler(), make_pipeline(MinMaxScaler(), mlp()))),
        "identity",
    ),
    "target in target": (
        lambda: fit(target(target(mlp(), transformer=StandardScaler()), func=np.log, inverse_func=np.exp)),
        "exp",
    ),
    "poisson, standardised": (
        lambda: fit(target(mlp(loss="poisson"), transformer=MinMaxScaler((1, 2)))),
        "exp",
    ),
    "frozen": (lambda: FrozenEstimator(fit(mlp())), "identity"),
    "frozen pipeline": (lambda: FrozenEstimator(fit(make_pipeline(StandardScaler(), mlp()))), "identity"),
    "pipeline of frozen parts": (
        lambda: make_pipeline(FrozenEstimator(StandardScaler().fit(X)), FrozenEstimator(fit(mlp()))).fit(X, Y),
        "identity",
    ),
    "target around frozen": (
        lambda: fit(target(FrozenEstimator(fit(mlp(), y=(Y - 50) / 9)), transformer=StandardScaler())),
        "affine",
    ),
}


@functools.cache
def fitted(name):
    """One fit of each case; no test changes it, as each of them checks."""
    return CASES[name][0]()


def core(model):
    """The network inside, found by the plainest code."""
    while not isinstance(model, MLPRegressor):
        inner = {FrozenEstimator: "estimator", TransformedTargetRegressor: "regressor_"}.get(type(model))
        model = model[-1] if inner is None else getattr(model, inner)
    return model


@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    """List, predict, capture, replace and head agree with each other and with the model, and leave it alone."""
    model, kind = fitted(name), CASES[name][1]
    before = pickle.dumps(model)
    adapter = adapt(model)
    assert isinstance(adapter, SklearnAdapter)
    assert adapter.model is model
    assert adapter.n_features == 4

    layers = adapter.layers(X)
    names = [layer.name for layer in layers]
    assert names == ["coefs_[0]", "coefs_[1]", "coefs_[2]"]
    assert [layer.weight.shape for layer in layers] == [(7, 4), (5, 7), (1, 5)]
    assert all(layer.weight.dtype == layer.bias.dtype == np.float64 for layer in layers)
    expected = model.predict(X).ravel()
    np.testing.assert_array_equal(adapter.predict(X), expected)

    inputs, prediction = adapter.capture(X, names)
    np.testing.assert_allclose(prediction, expected, rtol=1e-6 if name == "float32" else 1e-13)
    assert prediction.dtype == expected.dtype
    activation = {"relu": lambda a: np.maximum(a, 0), "tanh": np.tanh, "identity": lambda a: a}.get(
        core(model).activation, lambda a: 1 / (1 + np.exp(-a))
    )
    for layer, following in pairwise(layers):
        output = inputs[layer.name] @ layer.weight.T + layer.bias
        np.testing.assert_allclose(activation(output), inputs[following.name], rtol=1e-4, atol=1e-5)

    head = adapter.head(X)
    assert head.kind == kind
    z = inputs[names[-1]] @ layers[-1].weight.T + layers[-1].bias
    np.testing.assert_allclose(head.apply(z).ravel(), expected, rtol=1e-5 if name == "float32" else 1e-9)

    same = adapter.replace({layer.name: (layer.weight, layer.bias) for layer in layers})
    np.testing.assert_array_equal(same.predict(X), expected)
    assert pickle.dumps(model) == before


# What makes another copy, or other arrays; all others are written to in the same way.
COPIES = ["relu", "lbfgs", "float32", "pipeline", "standardised log", "frozen pipeline", "pipeline of frozen parts"]


@pytest.mark.parametrize("name", COPIES)
def test_replace_edits_a_copy(name):
    model = fitted(name)
    before = pickle.dumps(model)
    adapter = adapt(model)
    layers = adapter.layers(X)
    edited = adapter.replace(
        {"coefs_[1]": (3 * layers[1].weight, layers[1].bias - 1), "coefs_[2]": (layers[2].weight, None)}
    )
    assert type(edited.model) is type(model)
    network, original = core(edited.model), core(model)
    np.testing.assert_allclose(network.coefs_[1], 3 * original.coefs_[1], rtol=1e-6)
    np.testing.assert_allclose(network.intercepts_[1], original.intercepts_[1] - 1, rtol=1e-6)
    for index in (0, 2):
        np.testing.assert_array_equal(network.coefs_[index], original.coefs_[index])
        np.testing.assert_array_equal(network.intercepts_[index], original.intercepts_[index])
    assert network.coefs_[1].dtype == original.coefs_[1].dtype
    assert np.abs(edited.predict(X) - adapter.predict(X)).max() > 1e-6
    np.testing.assert_array_equal(edited.predict(X), pickle.loads(pickle.dumps(edited.model)).predict(X).ravel())
    assert pickle.dumps(model) == before


@pytest.mark.parametrize("name", ["pipeline", "target around pipeline", "frozen pipeline", "standardised target"])
def test_frames_with_names_work_without_warnings(name):
    model = copy.deepcopy(fitted(name))
    inner = model.estimator if isinstance(model, FrozenEstimator) else model
    fit(inner, FRAME, Y)
    adapter = adapt(model)
    _, prediction = adapter.capture(FRAME, ["coefs_[1]"])
    np.testing.assert_allclose(prediction, model.predict(FRAME).ravel(), rtol=1e-12)
    edited = adapter.replace({})
    np.testing.assert_array_equal(edited.predict(FRAME), model.predict(FRAME).ravel())
    assert adapter.head(FRAME).kind in ("identity", "affine")
    with pytest.raises(ValueError, match="feature names should match"):
        adapter.capture(FRAME.rename(columns={"age": "Age"}), ["coefs_[0]"])


def test_columns_chosen_by_name_and_sparse_features():
    frame = FRAME.assign(job=np.array(["clerk", "baker"])[(X[:, 0] > 0).astype(int)])
    encode = ColumnTransformer([("job", OneHotEncoder(), ["job"])], remainder="passthrough", sparse_threshold=1.0)
    model = fit(make_pipeline(encode, mlp()), frame)
    adapter = adapt(model)
    inputs, prediction = adapter.capture(frame, ["coefs_[0]"])
    assert inputs["coefs_[0]"].shape == (200, 6)
    np.testing.assert_allclose(prediction, model.predict(frame), rtol=1e-12)


def test_transformers_that_give_frames():
    model = fit(make_pipeline(StandardScaler(), mlp()).set_output(transform="pandas"), FRAME)
    np.testing.assert_allclose(adapt(model).capture(FRAME, [])[1], model.predict(FRAME), rtol=1e-12)


def test_sparse_input():
    model = fit(mlp())
    sparse = scipy.sparse.csr_array(X)
    np.testing.assert_allclose(adapt(model).predict(sparse), model.predict(X), rtol=1e-12)
    np.testing.assert_allclose(adapt(model).capture(sparse, ["coefs_[0]"])[0]["coefs_[0]"], X)


def test_preceding_steps_run_once():
    calls = []

    def count(x):
        calls.append(len(x))
        return x

    model = fit(make_pipeline(FunctionTransformer(count), mlp()))
    calls.clear()
    adapt(model).capture(X, ["coefs_[0]", "coefs_[1]", "coefs_[2]"])
    assert calls == [200]


def test_predict_runs_in_batches():
    calls = []

    def count(x):
        calls.append(len(x))
        return x

    model = fit(make_pipeline(FunctionTransformer(count), mlp()))
    calls.clear()
    prediction = adapt(model).predict(np.tile(X, (60, 1)))
    assert max(calls) == PREDICT_ROWS
    assert sum(calls) == 12_000
    np.testing.assert_allclose(prediction, np.tile(model.predict(X), 60), rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"func": np.sqrt, "inverse_func": np.square}, r"FunctionTransformer.*inverse_func=square"),
        ({"func": np.exp, "inverse_func": np.log}, r"FunctionTransformer.*inverse_func=log"),
    ],
)
def test_unsupported_heads_are_named(options, name):
    model = fit(target(mlp(), check_inverse=False, **options), y=Y / Y.max())
    with pytest.raises(ValueError, match=f"by {name}.*which is (not continuous and monotone|NaN for)"):
        adapt(model).head(X)


@pytest.mark.filterwarnings("ignore:The repaired model keeps .* of the variance")
@pytest.mark.parametrize(
    "options",
    [
        {"func": np.cbrt, "inverse_func": lambda z: z**3},
        {"transformer": QuantileTransformer(n_quantiles=50)},
        {"transformer": QuantileTransformer(n_quantiles=50, output_distribution="normal")},
        {"transformer": PowerTransformer("box-cox")},
        {"func": np.abs, "inverse_func": lambda z: np.clip(z, 0.3, 0.6)},
    ],
    ids=["cube", "quantiles", "normal quantiles", "box-cox", "clip"],
)
def test_monotone_heads_are_followed(options):
    model = target(Ridge(), check_inverse=False, **options).fit(X, Y / Y.max())
    head = adapt(model).head(X)
    assert head.kind == "monotone"
    np.testing.assert_allclose(head.apply(model.regressor_.predict(X)), model.predict(X), atol=1e-6)
    fair = ESVDFair(model, method="transport", min_group_rows=10, effort=Effort.quick())
    fair.fit(X, Y / Y.max(), sensitive_features=X[:, 0] > 0)
    assert fair.summary_["ks_after"] < 0.7 * fair.summary_["ks_before"]
    np.testing.assert_array_equal(fair.predict(X), fair.estimator_.predict(X))


@pytest.mark.parametrize(
    "model",
    [
        mlp(),
        make_pipeline(StandardScaler(), mlp()),
        target(mlp(), transformer=StandardScaler()),
        FrozenEstimator(mlp()),
        target(FrozenEstimator(mlp())),
    ],
)
def test_a_model_that_is_not_fitted(model):
    with pytest.raises(NotFittedError):
        adapt(model)


LABELS = np.where(np.median(Y) < Y, "yes", "no")

# name: (fitted model, kind of head)
LINES = {
    "least squares": (lambda: LinearRegression().fit(X, Y), "identity"),
    "ridge": (lambda: make_pipeline(StandardScaler(), Ridge()).fit(X, Y), "identity"),
    "no intercept": (lambda: Lasso(fit_intercept=False).fit(X, Y), "identity"),
    "column of targets": (lambda: ElasticNet().fit(X, Y[:, None]), "identity"),
    "one row of weights": (lambda: LinearRegression().fit(X, Y[:, None]), "identity"),
    "steps": (lambda: SGDRegressor(random_state=0).fit(X, Y), "identity"),
    "float32": (lambda: LinearRegression().fit(X.astype(np.float32), Y.astype(np.float32)), "identity"),
    "log target": (lambda: target(Ridge(), func=np.log, inverse_func=np.exp).fit(X, Y), "exp"),
    "poisson": (lambda: PoissonRegressor().fit(X, Y), "exp"),
    "support vectors": (lambda: LinearSVR(random_state=0).fit(X, Y), "identity"),
    "angles": (lambda: Lars().fit(X, Y), "identity"),
    "angles of a lasso": (lambda: LassoLars().fit(X, Y), "identity"),
    "matching pursuit": (lambda: OrthogonalMatchingPursuit().fit(X, Y), "identity"),
    "relevance": (lambda: ARDRegression().fit(X, Y), "identity"),
    "medians": (lambda: TheilSenRegressor(random_state=0).fit(X, Y), "identity"),
    "partial least squares": (lambda: PLSRegression().fit(X + 3, Y), "identity"),
    "without outliers": (lambda: RANSACRegressor(random_state=0).fit(X, Y), "identity"),
    "ridge without outliers": (
        lambda: make_pipeline(RANSACRegressor(Ridge(), min_samples=9, random_state=0)).fit(X, Y),
        "identity",
    ),
    "tweedie": (lambda: TweedieRegressor(power=1.5).fit(X, Y), "exp"),
    "tweedie of a normal": (lambda: TweedieRegressor(power=0).fit(X, Y), "identity"),
    "tweedie with a link": (lambda: TweedieRegressor(power=1.5, link="log").fit(X, Y), "exp"),
    "gamma": (lambda: GammaRegressor().fit(X, Y), "exp"),
    "logistic steps": (lambda: SGDClassifier(loss="log_loss", random_state=0).fit(X, LABELS), "sigmoid"),
    "another library": (lambda: Slopes().fit(X, Y), "identity"),
    "search": (lambda: GridSearchCV(Ridge(), {"alpha": [0.1, 1]}, cv=2).fit(X, Y), "identity"),
    "logistic": (lambda: LogisticRegression().fit(X, LABELS), "sigmoid"),
    "logistic pipeline": (lambda: make_pipeline(StandardScaler(), LogisticRegression()).fit(X, LABELS), "sigmoid"),
    "frozen logistic": (lambda: FrozenEstimator(LogisticRegression(solver="liblinear").fit(X, LABELS)), "sigmoid"),
    "classifier": (lambda: fit(classifier(), y=LABELS), "sigmoid"),
    "classifier pipeline": (lambda: fit(make_pipeline(StandardScaler(), classifier()), y=Y > 50), "sigmoid"),
}


class Slopes:
    """A linear model that knows nothing of scikit-learn."""

    def fit(self, x, y):
        self.coef_, *_ = np.linalg.lstsq(x - x.mean(axis=0), y - y.mean(), rcond=None)
        self.intercept_ = y.mean() - x.mean(axis=0) @ self.coef_
        return self

    def predict(self, x):
        return x @ self.coef_ + self.intercept_


def classifier():
    return MLPClassifier(hidden_layer_sizes=(7, 5), max_iter=15, random_state=0)


@pytest.mark.parametrize("name", LINES)
def test_linear_models_and_scores_of_classifiers(name):
    make, kind = LINES[name]
    model = make()
    before, adapter = pickle.dumps(model), adapt(model)
    score = hasattr(model, "predict_proba")
    expected = model.predict_proba(X)[:, 1] if score else model.predict(X).ravel()
    np.testing.assert_array_equal(adapter.predict(X), expected)
    *_, last = adapter.layers(X)
    inputs, prediction = adapter.capture(X, [last.name])
    np.testing.assert_allclose(prediction, expected, rtol=1e-5 if name == "float32" else 1e-12)
    head = adapter.head(X)
    assert head.kind == kind
    assert (last.bias is None) == (name == "no intercept")

    bias = None if last.bias is None else last.bias + 0.5
    edited = adapter.replace({last.name: (0.5 * last.weight, bias)})
    z = inputs[last.name] @ (0.5 * last.weight[0]) + (0 if bias is None else bias)
    np.testing.assert_allclose(edited.predict(X), head.apply(z), rtol=1e-5)
    assert type(edited.model) is type(model)
    assert pickle.dumps(model) == before
    if score:
        classes = (model.estimator if isinstance(model, FrozenEstimator) else model).classes_
        np.testing.assert_array_equal(edited.model.predict(X), classes[(edited.predict(X) > 0.5).astype(int)])
    same = adapter.replace({last.name: (last.weight, last.bias)})
    np.testing.assert_allclose(same.predict(X), expected, rtol=1e-12 if isinstance(model, PLSRegression) else 0)
    if hasattr(model, "coef_"):
        assert (np.shape(edited.model.coef_), type(edited.model.intercept_)) == (
            np.shape(model.coef_),
            type(model.intercept_),
        )


def test_the_score_of_a_ridge_classifier_is_on_the_scale_of_its_labels():
    model = make_pipeline(StandardScaler(), RidgeClassifier()).fit(X, LABELS)
    adapter, expected = adapt(model), (model.decision_function(X) + 1) / 2
    np.testing.assert_allclose(adapter.predict(X), expected)
    assert adapter.head(X).is_affine
    (layer,) = adapter.layers(X)
    edited = adapter.replace({layer.name: (0.5 * layer.weight, layer.bias + 0.3)})
    np.testing.assert_allclose(edited.predict(X), (edited.model.decision_function(X) + 1) / 2)
    assert (edited.model.predict(X) != model.predict(X)).any()


@pytest.mark.parametrize("model", [Lasso(alpha=3.0), make_pipeline(StandardScaler(), Lasso(alpha=3.0))])
def test_coefficients_that_are_zero_stay_zero(model):
    model.fit(X, Y)
    old = (model[-1] if isinstance(model, Pipeline) else model).coef_
    assert 0 < np.count_nonzero(old) < 4
    assert adapt(model).layers(X)[-1].weight.shape == (1, np.count_nonzero(old))
    fair = ESVDFair(model, method="parity", mean_reduction=2.0, min_group_rows=10).fit(
        X, Y, sensitive_features=X[:, 0] > 0
    )
    new = (fair.estimator_[-1] if isinstance(model, Pipeline) else fair.estimator_).coef_
    np.testing.assert_array_equal(new == 0, old == 0)
    assert not np.allclose(new, old)
    np.testing.assert_array_equal(fair.predict(X), fair.estimator_.predict(X))


def test_a_linear_model_of_another_library_comes_back_as_one():
    fair = ESVDFair(Slopes().fit(X, Y), method="parity", mean_reduction=2.0, min_group_rows=10)
    fair.fit(X, Y, sensitive_features=X[:, 0] > 0)
    assert type(fair.estimator_) is Slopes
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
    np.testing.assert_array_equal(fair.predict(X), fair.estimator_.predict(X))


def test_a_positive_model_that_gets_negative_coefficients_says_so():
    adapter = adapt(LinearRegression(positive=True).fit(X, -Y @ np.eye(200) + 100 * X.sum(axis=1)))
    (layer,) = adapter.layers(X)
    with pytest.warns(ESVDFairWarning, match="LinearRegression has positive=True, but 4 of 4 repaired coefficients"):
        adapter.replace({layer.name: (-layer.weight, layer.bias)})


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (lambda: LinearSVC().fit(X, LABELS), TypeError, "LinearSVC with loss='squared_hinge': it has no predict_proba"),
        (lambda: SGDClassifier().fit(X, LABELS), TypeError, "SGDClassifier with loss='hinge': it has no predict_proba"),
        (lambda: SVR(kernel="linear").fit(X, Y), TypeError, "cannot repair a SVR"),
        (lambda: SGDClassifier(loss="log_loss").fit(X, LABELS).sparsify(), ValueError, r"Call its densify\(\) first"),
    ],
)
def test_linear_models_that_cannot_be_repaired(model, error, words):
    with pytest.raises(error, match=words):
        adapt(model())


@pytest.mark.parametrize("model", [LogisticRegression(), MLPClassifier(hidden_layer_sizes=(3,), max_iter=5)])
def test_more_than_two_classes(model):
    with pytest.raises(ValueError, match="tells 3 classes apart"):
        adapt(fit(model, y=np.digitize(Y, [45, 55])))


def test_several_targets():
    with pytest.raises(ValueError, match="predicts 2 columns"):
        adapt(fit(mlp(), y=np.column_stack([Y, Y])))


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: target(m, transformer=StandardScaler())])
def test_one_of_several_targets(wrap):
    model = fit(wrap(mlp()), y=np.column_stack([Y, -Y, Y**2]))
    adapter = adapt(model, output=1)
    np.testing.assert_array_equal(adapter.predict(X), model.predict(X)[:, 1])
    last = adapter.layers(X)[-1]
    assert last.weight.shape == (1, 5)
    inputs, prediction = adapter.capture(X, [last.name])
    np.testing.assert_allclose(prediction, adapter.predict(X), rtol=1e-12)
    np.testing.assert_allclose(
        adapter.head(X).apply(inputs[last.name] @ last.weight[0] + last.bias), prediction, rtol=1e-9
    )
    edited = adapter.replace({last.name: (2 * last.weight, last.bias + 1)})
    np.testing.assert_array_equal(edited.model.predict(X)[:, [0, 2]], model.predict(X)[:, [0, 2]])
    assert np.abs(edited.predict(X) - prediction).max() > 0.1
    with pytest.raises(ValueError, match=r"predicts 3 columns. Choose one with `output`, from 0 to 2; got 3"):
        adapt(model, output=3)


def test_output_is_for_other_frameworks():
    with pytest.raises(ValueError, match="output='mean'"):
        adapt(fitted("relu"), output="mean")


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"coefs_[1]": (np.zeros((7, 5)), None)}, r"shape \(7, 5\); it must be \(5, 7\)"),
        ({"coefs_[1]": (np.zeros((5, 7)), np.zeros(7))}, r"bias of layer .* \(7,\)"),
        ({"coefs_[3]": (np.zeros((5, 7)), None)}, r"no linear layer named 'coefs_\[3\]'.* 0: 'coefs_\[0\]'"),
    ],
)
def test_replace_refuses_what_does_not_fit(weights, match):
    with pytest.raises(ValueError, match=match):
        adapt(fitted("relu")).replace(weights)


def test_capture_of_an_unknown_layer():
    with pytest.raises(ValueError, match=r"no linear layer named 'net\.0'"):
        adapt(fitted("relu")).capture(X, ["net.0"])


def test_a_head_is_found_from_a_single_row():
    assert adapt(fitted("log target")).head(X[:1]).kind == "exp"


class LogRidge(Ridge):
    """Fits the logarithm and predicts what it is the logarithm of."""

    def fit(self, X, y):
        return super().fit(X, np.log(y))

    def predict(self, X):
        return np.exp(super().predict(X))


class Rounded(Pipeline):
    """Rounds what its last step predicts."""

    def predict(self, X):
        return np.round(super().predict(X), -1)


class Sharpened(LogisticRegression):
    """Scores other than those of its own coefficients."""

    def predict_proba(self, X):
        return super().predict_proba(X) ** 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogRidge().fit(X, Y),
        lambda: make_pipeline(StandardScaler(), LogRidge()).fit(X, Y),
        lambda: Rounded([("scale", StandardScaler()), ("line", Ridge())]).fit(X, Y),
        lambda: Sharpened().fit(X, LABELS),
    ],
    ids=["subclass", "in a pipeline", "pipeline", "scores"],
)
def test_a_predict_of_its_own_is_refused(make):
    with pytest.raises(ValueError, match="as its predict changes what they compute") as caught:
        adapt(make()).head(X)
    assert str(caught.value).count(". ") == 1


def test_columns_of_very_different_sizes_are_no_other_predict():
    rng = np.random.default_rng(0)
    table = (rng.normal(size=(300, 3)) * [1, 1e5, 1e-4] + [0, 1e7, 0]).astype(np.float32)
    model = LinearRegression().fit(table, rng.normal(size=300) + table[:, 0])
    assert adapt(model).head(table).kind == "identity"


def people():
    """Two groups that differ in a column that a Lasso keeps and in one that it leaves out."""
    rng = np.random.default_rng(3)
    group = rng.integers(0, 2, 1500)
    x = rng.normal(size=(1500, 5)) + group[:, None] * [1.6, 0, 0, 0.5, 0]
    return x, x @ [1.0, 1.5, 0.2, 0.0, 0.0] + rng.normal(size=1500), group


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: make_pipeline(StandardScaler(), m),
        lambda m: VotingRegressor([("a", m), ("b", Ridge())]),
    ],
    ids=["alone", "in a pipeline", "in a mean"],
)
@pytest.mark.parametrize("by", ["rows", "summary"])
def test_zeros_change_only_if_asked(wrap, by):
    x, y, group = people()
    model = wrap(Lasso(alpha=0.3)).fit(x, y)

    def coefficients(found):
        found = found.estimators_[0] if isinstance(found, VotingRegressor) else found
        return (found[-1] if isinstance(found, Pipeline) else found).coef_

    zero = coefficients(model) == 0
    assert 0 < zero.sum() < 5
    errors = {}
    for keeps in (True, False):
        fair = ESVDFair(model, target_ks=0.15, keep_zeros=keeps, effort=Effort.quick())
        assert clone(fair).get_params()["keep_zeros"] is keeps
        if by == "rows":
            fair.fit(x, y, sensitive_features=group)
        else:
            fair.fit_summary(summarise(model, x, y, sensitive_features=group, keep_zeros=keeps))
        new = coefficients(fair.estimator_)
        assert not np.allclose(new, coefficients(model))
        np.testing.assert_array_equal(new == 0, zero & keeps)
        np.testing.assert_array_equal(fair.predict(x), fair.estimator_.predict(x))
        errors[keeps] = fair.summary_["mse_refit"]
        assert fair.summary_["ks_after"] < 0.6 * fair.summary_["ks_before"]
        assert np.isfinite(pickle.loads(pickle.dumps(fair)).predict(x)).all()
    if not isinstance(model, VotingRegressor):  # whose Ridge has all columns in either case
        assert errors[False] < errors[True] - 0.01


def test_a_summary_needs_the_same_zeros():
    x, y, group = people()
    model = Lasso(alpha=0.3).fit(x, y)
    summary = summarise(model, x, y, sensitive_features=group)
    with pytest.raises(
        ValueError, match="`summary` was made with another `keep_zeros`: it has 2 features of each row, not 5"
    ):
        ESVDFair(model, keep_zeros=False).fit_summary(summary)
    with pytest.raises(ValueError, match=r"`keep_zeros=1\.5`; expected True or False"):
        ESVDFair(model, keep_zeros=1.5).fit(x, y, sensitive_features=group)


POSITIVE = [
    LinearRegression(positive=True),
    Ridge(positive=True),
    Lasso(alpha=0.01, positive=True),
    ElasticNet(alpha=0.01, positive=True),
    LassoLars(alpha=0.001, positive=True),
    VotingRegressor([("a", LinearRegression(positive=True)), ("b", Ridge())]),
]


@pytest.mark.parametrize("model", POSITIVE, ids=[type(model).__name__ for model in POSITIVE])
@pytest.mark.parametrize("shifted", [[0.8, 0, 0, 0, 0], [0.8, 0.4, 0, 0.5, 0]], ids=["a little", "much"])
def test_negative_coefficients_of_a_positive_model_are_reported(model, shifted):
    """The one-column shift is met by a smaller coefficient, the other one only by negative ones."""
    rng = np.random.default_rng(5)
    group = rng.integers(0, 2, 3000)
    x = rng.normal(size=(3000, 5)) + group[:, None] * shifted
    y = x @ [1.0, 1.0, 0.6, 0.5, 0.2] + rng.normal(size=3000)
    fair = ESVDFair(clone(model).fit(x, y), target_ks=0.12 if shifted[1] == 0 else 0.03, effort=Effort.quick())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fair.fit(x, y, sensitive_features=group)
    repaired = fair.estimator_.estimators_[0] if isinstance(model, VotingRegressor) else fair.estimator_
    negative = np.sum(repaired.coef_ < 0)
    assert (negative > 0) == (shifted[1] > 0)
    said = [str(warning.message) for warning in caught if "has positive=True" in str(warning.message)]
    assert len(said) == (negative > 0)
    assert fair.summary_.negative_coefficients == negative
    assert fair.assess(x, y, sensitive_features=group).negative_coefficients == negative
    assert ("repaired coefficients are negative" in str(verdict(fair.summary_))) == (negative > 0)
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
