import copy
import hashlib
import pickle

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from esvdfair.models.base import fingerprint


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
