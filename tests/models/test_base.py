import copy
import hashlib
import pickle
import sys
import types

import numpy as np
import onnx
import pandas as pd
import pytest
import scipy.sparse
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.ensemble import AdaBoostRegressor
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from esvdfair.core.checks import row_count, take
from esvdfair.models import LinearLayer, adapt, find_layer, fingerprint
from esvdfair.models.base import check_replacement
from esvdfair.models.torch import TorchAdapter

LAYERS = tuple(LinearLayer(name, index, np.zeros((2, 3)), None) for index, name in enumerate(["net.0", "net.2", "out"]))


@pytest.mark.parametrize(
    ("which", "name"),
    [(0, "net.0"), (2, "out"), (-1, "out"), (-3, "net.0"), (np.int64(1), "net.2"), ("net.2", "net.2")],
)
def test_find_layer(which, name):
    assert find_layer(LAYERS, which).name == name


@pytest.mark.parametrize("which", [3, -4, "net.1", ""])
def test_find_layer_lists_what_there_is(which):
    with pytest.raises(ValueError, match=r"0: 'net.0' \(3 → 2\), 1: 'net.2' \(3 → 2\), 2: 'out'") as error:
        find_layer(LAYERS, which)
    assert str(which) in str(error.value)


def test_find_layer_of_a_model_with_one_layer():
    with pytest.raises(ValueError, match=r"one linear layer, 'net\.0', and no hidden layer.* Use `method='transport'`"):
        find_layer(LAYERS[:1], -2)


@pytest.mark.parametrize("which", [1.0, None, True])
def test_find_layer_takes_index_or_name(which):
    with pytest.raises(TypeError, match="index or a name"):
        find_layer(LAYERS, which)


@pytest.mark.parametrize(
    ("weight", "bias", "match"),
    [
        (np.zeros((3, 2)), None, r"weight of layer 'a' has shape \(3, 2\); it must be \(2, 3\)"),
        (np.zeros((2, 3)), np.zeros(3), r"bias of layer 'a' has shape \(3,\)"),
        (np.full((2, 3), np.nan), None, "not all finite"),
        (np.zeros((2, 3)), np.array([0.0, np.inf]), "not all finite"),
    ],
)
def test_check_replacement(weight, bias, match):
    layer = LinearLayer("a", 0, np.zeros((2, 3)), np.zeros(2))
    check_replacement(layer, np.ones((2, 3)), np.ones(2))
    with pytest.raises(ValueError, match=match):
        check_replacement(layer, weight, bias)
    with pytest.raises(ValueError, match="has no bias"):
        check_replacement(LinearLayer("a", 0, np.zeros((2, 3)), None), np.ones((2, 3)), np.ones(2))


@pytest.mark.parametrize(
    "convert",
    [np.asarray, pd.DataFrame, torch.tensor, np.ndarray.tolist, scipy.sparse.csr_matrix, scipy.sparse.coo_array],
)
def test_rows_of_any_container(convert):
    array = np.arange(12.0).reshape(6, 2)
    container = convert(array)
    part = take(container, slice(2, 4))
    assert row_count(container) == 6
    assert row_count(part) == 2
    dense = part.toarray() if hasattr(part, "toarray") else np.asarray(part)
    np.testing.assert_array_equal(dense, array[2:4])


def test_a_slice_of_a_frame_keeps_its_names():
    frame = pd.DataFrame({"age": [1.0, 2.0], "pay": [3.0, 4.0]})
    assert list(take(frame, slice(1)).columns) == ["age", "pay"]


@pytest.mark.parametrize("model", [object(), None, 3.0, np.zeros(3), TorchAdapter])
def test_unsupported_type_names_the_supported(model):
    with pytest.raises(TypeError, match=r"torch.nn.Module.*scikit-learn.*Pipeline.*ONNX"):
        adapt(model)


@pytest.mark.parametrize("model", [KNeighborsRegressor(), AdaBoostRegressor()])
def test_other_sklearn_models_are_unsupported(model):
    with pytest.raises(TypeError, match=r"(KNeighbors|AdaBoost)Regressor.*esvdfair\.baselines"):
        adapt(model)


@pytest.mark.parametrize("model", ["model.onnx", b"\x08", bytearray(b"\x08"), __import__("pathlib").Path("m.onnx")])
def test_files_go_to_the_onnx_adapter(model, monkeypatch):
    fake = types.ModuleType("esvdfair.models.onnx")
    fake.adapt_onnx = lambda model, *, output: ("onnx", model, output)
    monkeypatch.setitem(sys.modules, "esvdfair.models.onnx", fake)
    assert adapt(model, output="score") == ("onnx", model, "score")


# --- fingerprint ------------------------------------------------------------------------------------------------------


def linear_onnx(weight):
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 1])],
        [numpy_helper.from_array(np.full((3, 1), weight, np.float32), "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_an_onnx_file_has_the_fingerprint_of_its_bytes(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(linear_onnx(1.0), path)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert fingerprint(path) == fingerprint(str(path)) == expected
    assert fingerprint(path.read_bytes()) == fingerprint(bytearray(path.read_bytes())) == expected
    onnx.save(linear_onnx(2.0), path)
    assert fingerprint(path) != expected


def test_external_data_counts(tmp_path):
    found = []
    for weight in (1.0, 2.0):
        path = tmp_path / f"{weight}" / "model.onnx"
        path.parent.mkdir()
        onnx.save(linear_onnx(weight), path, save_as_external_data=True, location="w", size_threshold=0)
        found.append((path.read_bytes(), fingerprint(path)))
    assert found[0][0] == found[1][0]  # the files are the same, the models are not
    assert found[0][1] != found[1][1]
    assert found[0][1] == fingerprint(linear_onnx(1.0).SerializeToString())


def network(activation=torch.nn.ReLU, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), activation(), torch.nn.Linear(4, 1)).to(dtype)


def test_a_torch_module():
    model = network()
    before = fingerprint(model)
    assert before == fingerprint(copy.deepcopy(model)) == fingerprint(model.eval()) == fingerprint(network())
    assert before == fingerprint(torch.nn.DataParallel(model))
    others = [network(torch.nn.Tanh), network(dtype=torch.float64), network(dtype=torch.bfloat16), network()]
    with torch.no_grad():
        others[-1][2].bias += 1e-6
    assert len({before, *map(fingerprint, others)}) == 5


@pytest.fixture(scope="module")
def pipeline():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    steps = (
        StandardScaler(),
        FunctionTransformer(np.tanh),
        MLPRegressor(hidden_layer_sizes=(4,), tol=1e9, random_state=np.random.RandomState(0)),
    )
    return make_pipeline(*steps).fit(X, X.sum(axis=1))


def test_a_scikit_learn_estimator(pipeline):
    before = fingerprint(pipeline)
    assert before == fingerprint(copy.deepcopy(pipeline)) == fingerprint(pickle.loads(pickle.dumps(pipeline)))
    changes = [
        lambda model: model[-1].coefs_[0].__setitem__((0, 0), 0.5),
        lambda model: model[0].mean_.__setitem__(0, 7.0),
        lambda model: model[-1].set_params(activation="tanh"),
        lambda model: model[1].set_params(func=np.sinh),
    ]
    found = {before}
    for change in changes:
        other = copy.deepcopy(pipeline)
        change(other)
        found.add(fingerprint(other))
    assert len(found) == 5


def test_an_object_that_holds_itself(pipeline):
    model = copy.deepcopy(pipeline)
    model.owner = model
    assert fingerprint(model) != fingerprint(pipeline)
