"""ESVDFair on the kinds of models people have: one column of several, scores of classifiers, linear models."""

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance

# Untrained networks do for what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")

METHODS = ["paper", "exact", "parity", "transport"]
QUICK = Effort.quick()


def people(rows=800, seed=0):
    rng = np.random.default_rng(seed)
    sex = rng.integers(0, 2, rows)
    X = (rng.normal(size=(rows, 4)) + sex[:, None] * [1.0, 0.3, 0, 0]).astype(np.float32)
    z = X @ np.array([1.0, 0.5, 1.0, -1.0], dtype=np.float32) + 0.3 * rng.normal(size=rows)
    return X, z, (z > 0.5).astype(int), sex


X, Y, CLASS, SEX = people()


def quietly(model, target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return clone(model).fit(X, target)


def to_onnx(model, **options):
    skl2onnx = pytest.importorskip("skl2onnx", reason="needs skl2onnx (extra esvdfair[dev])")
    return skl2onnx.to_onnx(model, X[:1], **options).SerializeToString()


def repaired(model, y, **options):
    fair = ESVDFair(model, **({"effort": QUICK, "targets": "labels"} | options))
    return fair.fit(X, y, sensitive_features=SEX)


def closes_the_gap(fair, factor=0.6):
    assert fair.summary_["ks_before"] > 0.2
    assert fair.summary_["ks_after"] < factor * fair.summary_["ks_before"]
    fresh, _, _, sex = people(seed=1)
    assert ks_distance(fair.predict(fresh), sensitive_features=sex) < factor * fair.summary_["ks_before"]
    return fair


# --- one column of a wide last layer -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide():
    """A network of three outputs, each of which follows the group."""
    model = MLPRegressor(hidden_layer_sizes=(12, 8), max_iter=40, learning_rate_init=0.01, random_state=0)
    return quietly(model, np.column_stack([Y, 2 * Y + X[:, 2], Y - X[:, 3]]))


@pytest.mark.parametrize("method", METHODS)
def test_one_target_of_several(wide, method):
    fair = closes_the_gap(repaired(wide, Y, method=method, output=1), 0.8)
    np.testing.assert_array_equal(fair.predict(X), fair.estimator_.predict(X)[:, 1])
    if method in ("parity", "transport"):
        np.testing.assert_array_equal(fair.estimator_.predict(X)[:, [0, 2]], wide.predict(X)[:, [0, 2]])
    for before, after in zip(wide.coefs_[-1].T[[0, 2]], fair.estimator_.coefs_[-1].T[[0, 2]], strict=True):
        np.testing.assert_array_equal(before, after)
    assert fair.edits_[-1].weight_after.shape == (1, 8)


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_of_a_mean_and_variance_head(method):
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")

    class Gaussian(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.leave = torch.nn.Linear(4, 16), torch.nn.Linear(16, 2)

        def forward(self, x):
            mean, spread = self.leave(torch.relu(self.body(x))).unbind(1)
            return mean, torch.nn.functional.softplus(spread)

    torch.manual_seed(1)
    model = Gaussian()
    fair = closes_the_gap(repaired(model, Y, method=method, output=0), 0.8)
    assert torch.equal(fair.estimator_.leave.weight[1], model.leave.weight[1])
    assert torch.equal(fair.estimator_.leave.bias[1], model.leave.bias[1])
    if method in ("parity", "transport"):
        assert torch.equal(fair.estimator_(torch.tensor(X))[1], model(torch.tensor(X))[1])


# --- scores of binary classifiers ----------------------------------------------------------------------------------

CLASSIFIERS = {
    "network": MLPClassifier((12, 8), max_iter=30, learning_rate_init=0.01, random_state=0),
    "network in a pipeline": make_pipeline(
        StandardScaler(), MLPClassifier((12, 8), max_iter=30, learning_rate_init=0.01, random_state=0)
    ),
    "logistic regression": LogisticRegression(),
}


# Two of four features carry the group: parity costs a score of 0 and 1 most of its variance, and that is said.
COSTLY = pytest.mark.filterwarnings(r"ignore:The repaired model (keeps \d+% of|predicts no better than a constant)")


@pytest.fixture(scope="module")
def classifiers():
    return {name: quietly(model, CLASS) for name, model in CLASSIFIERS.items()}


@COSTLY
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_score_of_a_classifier(classifiers, name, method):
    if name == "logistic regression" and method in ("paper", "exact"):
        with pytest.raises(ValueError, match="no hidden layer"):
            repaired(classifiers[name], CLASS, method=method)
        return
    model = classifiers[name]
    fair = closes_the_gap(repaired(model, CLASS, method=method), 0.8)
    assert is_classifier(fair.estimator_)
    assert type(fair.estimator_) is type(model)
    scores = fair.estimator_.predict_proba(X)
    np.testing.assert_array_equal(scores[:, 1], fair.predict(X))
    np.testing.assert_allclose(scores.sum(axis=1), 1)
    np.testing.assert_array_equal(fair.estimator_.predict(X), (scores[:, 1] > 0.5).astype(int))
    held = fair.summary_["mse_before"]
    assert held == pytest.approx(np.mean((model.predict_proba(X)[:, 1] - CLASS) ** 2), abs=0.02)  # Brier's score


@pytest.mark.parametrize("classes", [(-1, 1), (1, 2), (False, True), ("no", "yes")])
def test_labels_are_those_of_the_classifier(classifiers, classes):
    """Squared errors are of the score against 0 and 1, whatever the two classes are called."""
    labels = np.array(classes)[CLASS]
    rows = {"sensitive_features": SEX, "validation": (X + 1e-6, pd.Series(labels), SEX)}
    apart = ESVDFair(CLASSIFIERS["logistic regression"], method="parity", effort=QUICK).fit(X, labels, **rows)
    assert apart.summary_["error_against"] == "labels"
    assert set(apart.estimator_.predict(X)) == set(classes)
    fair = repaired(quietly(CLASSIFIERS["network"], labels), labels, method="parity")
    as_zero_one = repaired(classifiers["network"], CLASS, method="parity")
    assert fair.summary_["mse_before"] == pytest.approx(as_zero_one.summary_["mse_before"], abs=1e-6)
    assert set(fair.estimator_.predict(X)) == set(classes)


def test_labels_of_another_question_are_refused(classifiers):
    with pytest.raises(ValueError, match="`y` contains 2, which is not one of the classes"):
        repaired(classifiers["network"], CLASS * 2)


def network(*end):
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2 if end else 1), *end)
    with torch.no_grad():
        model[2].weight *= 4
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_network_that_ends_in_one_logit(method):
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    model = network()
    fair = closes_the_gap(repaired(model, CLASS, method=method, output=torch.sigmoid), 0.8)
    score = torch.sigmoid(fair.estimator_(torch.tensor(X))).detach().numpy().ravel()
    np.testing.assert_allclose(score, fair.predict(X), atol=1e-6)
    assert fair.summary_["mse_after"] < 0.35  # Brier's score


def test_two_outputs_through_a_softmax():
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    model = network(torch.nn.Softmax(dim=1))
    fair = closes_the_gap(repaired(model, CLASS, method="parity", output=1))
    np.testing.assert_allclose(fair.estimator_(torch.tensor(X)).detach().numpy().sum(axis=1), 1, atol=1e-6)
    three = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3), torch.nn.Softmax(dim=1))
    with pytest.raises(ValueError, match="_softmax"):
        repaired(three, CLASS, output=1)


def test_logits_that_meet_labels_are_noticed():
    """Errors of logits against 0 and 1 mean nothing, and a refit towards such labels would not give logits."""
    model = quietly(MLPClassifier((8,), max_iter=60, learning_rate_init=0.02, random_state=0), CLASS)
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    logits = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for layer, weight, bias in zip(logits[::2], model.coefs_, model.intercepts_, strict=True):
            layer.weight.copy_(torch.tensor(weight.T))
            layer.bias.copy_(torch.tensor(bias))
    with pytest.warns(ESVDFairWarning, match=r"look like logits.*output='sigmoid'"):
        repaired(logits, CLASS, method="parity")
    score = repaired(logits, CLASS, method="parity", output="sigmoid")
    as_classifier = repaired(model, CLASS, method="parity")
    assert score.summary_["mse_after"] == pytest.approx(as_classifier.summary_["mse_after"], abs=1e-4)
    regressor = quietly(
        MLPRegressor(hidden_layer_sizes=(8,), max_iter=60, learning_rate_init=0.02, random_state=0), CLASS
    )
    repaired(regressor, CLASS, method="parity")  # a regression on 0 and 1 is no score of logits


def test_an_onnx_file_that_ends_in_one_logit(classifiers):
    """What the sigmoid is taken of must be said; the file still gives logits."""
    onnx = pytest.importorskip("onnx")
    file = onnx.load_from_string(to_onnx(classifiers["network"], options={"zipmap": False}))
    logit = next(node for node in file.graph.node if node.op_type == "Sigmoid").input[0]
    del file.graph.output[:]
    file.graph.output.append(onnx.helper.make_tensor_value_info(logit, onnx.TensorProto.FLOAT, [None, 1]))
    model = file.SerializeToString()
    plain = closes_the_gap(repaired(model, CLASS, method="parity", output="sigmoid"))
    named = repaired(model, CLASS, method="parity", output=f"{logit}:sigmoid")
    np.testing.assert_array_equal(plain.predict(X), named.predict(X))
    expected = repaired(classifiers["network"], CLASS, method="parity")
    np.testing.assert_allclose(plain.predict(X), expected.predict(X), atol=1e-4)
    with pytest.warns(ESVDFairWarning, match=r"look like logits.*output='sigmoid'"):
        repaired(model, CLASS, method="parity")


# --- linear models -------------------------------------------------------------------------------------------------


def test_an_unfitted_pipeline_takes_weights():
    weight = np.linspace(0.5, 2, len(X))
    model = make_pipeline(StandardScaler(), LinearRegression())
    fair = ESVDFair(model, method="parity", effort=QUICK, targets="labels")
    fair.fit(X, Y, sensitive_features=SEX, sample_weight=weight, validation=(X + 1e-6, Y, SEX))
    scaled = StandardScaler().fit(X)
    expected = LinearRegression().fit(scaled.transform(X), Y, sample_weight=weight)
    np.testing.assert_allclose(fair.model_[-1].coef_, expected.coef_, rtol=1e-5)
