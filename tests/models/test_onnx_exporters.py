"""Models as the usual exporters write them."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
from sklearn.compose import make_column_transformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LinearRegression, LogisticRegression, Ridge, SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

from esvdfair.models import adapt
from esvdfair.models.onnx import save_model
from esvdfair.models.sklearn import SklearnAdapter
from esvdfair.models.torch import TorchAdapter

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 6))
Y = X @ RNG.normal(size=6) + np.abs(X[:, 0])


def assert_same_network(exported, original, x, *, x_original=None, atol=1e-5):
    """Layers, their inputs, predictions and head are those of the original; so they are after the same edit."""
    x_original = x if x_original is None else x_original
    ours, theirs = exported.layers(x), original.layers(x_original)
    assert len(ours) == len(theirs)
    inputs, prediction = exported.capture(x, [layer.name for layer in ours])
    expected, expected_prediction = original.capture(x_original, [layer.name for layer in theirs])
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.weight, other.weight, atol=1e-6)
        assert (mine.bias is None) == (other.bias is None)
        np.testing.assert_allclose(
            0 if mine.bias is None else mine.bias, 0 if other.bias is None else other.bias, atol=1e-6
        )
        np.testing.assert_allclose(inputs[mine.name], expected[other.name], atol=atol)
    np.testing.assert_allclose(prediction, expected_prediction, atol=atol)
    assert exported.head(x).kind == original.head(x_original).kind
    weights = [(RNG.normal(size=layer.weight.shape), RNG.normal(size=layer.bias.shape)) for layer in ours]
    edited = exported.replace({layer.name: new for layer, new in zip(ours, weights, strict=True)})
    reference = original.replace({layer.name: new for layer, new in zip(theirs, weights, strict=True)})
    onnx.checker.check_model(onnx.load_from_string(edited.model), full_check=True)
    np.testing.assert_allclose(adapt(edited.model).predict(x), reference.predict(x_original), rtol=1e-4, atol=10 * atol)


def torch_model(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 1), nn.Sigmoid(), nn.Flatten(0),
    ).eval()  # fmt: skip


def export_by_script(model, path, rows=7, **options):
    with warnings.catch_warnings():
        # This exporter is deprecated, and says so in several ways; its files will be around for years.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(model, (torch.zeros(rows, 6),), path, dynamo=False, input_names=["x"], **options)


def test_torch_by_script(tmp_path):
    model = torch_model()
    export_by_script(model, tmp_path / "model.onnx", dynamic_axes={"x": {0: "rows"}})
    assert_same_network(adapt(tmp_path / "model.onnx"), TorchAdapter(model), X)


def test_torch_by_script_without_folding(tmp_path):
    """Linear layers on (rows, tokens, width) become Transpose, MatMul and Add nodes."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Linear(1, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.embed(x.unsqueeze(-1)).relu().mean(dim=1))

    torch.manual_seed(0)
    model = Tokens()
    for folded in (True, False):
        path = tmp_path / f"{folded}.onnx"
        export_by_script(model, path, dynamic_axes={"x": {0: "rows"}}, do_constant_folding=folded)
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert "MatMul" in kinds
        assert ("Transpose" in kinds) is not folded
        assert_same_network(adapt(path), TorchAdapter(model), X)


def test_torch_by_script_for_a_fixed_number_of_rows(tmp_path):
    model = torch_model()
    export_by_script(model, tmp_path / "model.onnx", rows=64)
    assert_same_network(adapt(tmp_path / "model.onnx"), TorchAdapter(model), X)


def test_torch_by_dynamo(tmp_path):
    """A file that `torch.onnx.export(dynamo=True)` of torch 2.13 wrote; to export it anew would take half a minute."""
    for name in ("dynamo.onnx", "dynamo.onnx.data"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    path = tmp_path / "dynamo.onnx"
    assert (tmp_path / "dynamo.onnx.data").stat().st_size > 4 * 64 * 64  # its way with weights of some size
    model = torch_model(width=64)
    stored = {
        tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in onnx.load(path).graph.initializer
    }
    model.load_state_dict({name: stored[name] for name in model.state_dict()})
    exported = adapt(path)
    assert_same_network(exported, TorchAdapter(model), X)
    save_model(exported.model, tmp_path / "same.onnx")
    np.testing.assert_array_equal(adapt(tmp_path / "same.onnx").predict(X), exported.predict(X))
    assert (tmp_path / "same.onnx.data").exists()


def fitted(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a few steps are enough here
        return model.fit(x, Y)


def network(**options):
    return MLPRegressor(hidden_layer_sizes=(8, 5), max_iter=5, random_state=0, **options)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("relu", np.float32), ("tanh", np.float32), ("logistic", np.float64), ("identity", np.float64)],
)
def test_sklearn(activation, dtype):
    model = fitted(make_pipeline(StandardScaler(), network(activation=activation)), X)
    exported = adapt(to_onnx(model, X[:1].astype(dtype)).SerializeToString())
    assert exported.n_features == 6
    assert exported.predict(X).dtype == dtype
    assert_same_network(exported, SklearnAdapter(model), X, atol=1e-5 if dtype == np.float32 else 1e-6)


@pytest.mark.parametrize(
    "model",
    [LinearRegression(), Ridge(), make_pipeline(StandardScaler(), Lasso(alpha=1e-4)), SGDRegressor()],
)
def test_linear_models(model):
    model.fit(X, Y)
    exported = adapt(to_onnx(model, X[:1].astype(np.float32)).SerializeToString())
    assert_same_network(exported, SklearnAdapter(model), X)


@pytest.mark.parametrize("zipmap", [True, False])
@pytest.mark.parametrize("model", [LogisticRegression(), MLPClassifier((5,), max_iter=5, random_state=0)])
def test_scores_of_classifiers(model, zipmap):
    labels = np.where(Y > 0, "yes", "no")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, labels)
    exported = to_onnx(model, X[:1].astype(np.float32), options={id(model): {"zipmap": zipmap}})
    adapter = adapt(exported.SerializeToString())
    assert_same_network(adapter, SklearnAdapter(model), X)
    last, name = adapter.layers(X)[-1], exported.graph.output[1].name
    np.testing.assert_array_equal(adapt(exported.SerializeToString(), output=name).predict(X), adapter.predict(X))
    edited = adapter.replace({last.name: (-last.weight, last.bias + 0.1)})
    session = onnxruntime.InferenceSession(edited.model)
    label, probability = session.run(None, {"X": X.astype(np.float32)})
    scores = pd.DataFrame(probability).to_numpy()
    np.testing.assert_allclose(scores[:, 1], edited.predict(X), rtol=1e-6)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(label, model.classes_[(scores[:, 1] > 0.5).astype(int)])


def test_more_than_two_classes():
    model = LogisticRegression().fit(X, np.digitize(Y, [-1, 1]))
    exported = to_onnx(model, X[:1].astype(np.float32), options={id(model): {"zipmap": False}})
    with pytest.raises(ValueError, match="more than one output column"):
        adapt(exported.SerializeToString()).predict(X)
    with pytest.raises(ValueError, match="'Normalizer' makes one prediction a row of them, which is no weighted sum"):
        adapt(exported.SerializeToString(), output=("probabilities", 1)).head(X)


def test_sklearn_with_one_input_for_each_column():
    table = pd.DataFrame(X[:, :3], columns=["age", "pay", "years"])
    table["children"] = RNG.integers(0, 3, len(X))
    table["town"] = np.where(X[:, 3] > 0, "here", "there")
    encoder = make_column_transformer(
        (StandardScaler(), ["age", "pay"]), (OneHotEncoder(), ["children"]), (OneHotEncoder(), ["town"]),
        remainder="passthrough",
    )  # fmt: skip
    model = fitted(make_pipeline(encoder, network()), table)
    kinds = {"children": Int64TensorType, "town": StringTensorType}
    types = [(column, kinds.get(column, FloatTensorType)([None, 1])) for column in table]
    exported = adapt(to_onnx(model, initial_types=types).SerializeToString())
    assert exported.n_features == 5
    assert_same_network(exported, SklearnAdapter(model), table[table.columns[::-1]], x_original=table)
    assert_same_network(exported, SklearnAdapter(model), table.to_numpy(), x_original=table)
