import subprocess
import sys
import types

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair.core.checks import row_count
from esvdfair.models import LinearLayer, adapt, find_layer
from esvdfair.models.base import check_replacement, row_slice
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


@pytest.mark.parametrize("which", [1.0, None, True])
def test_find_layer_takes_index_or_name(which):
    with pytest.raises(TypeError, match="index or a name"):
        find_layer(LAYERS, which)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": np.zeros((3, 2))}, r"weight of layer 'a' has shape \(3, 2\); it must be \(2, 3\)"),
        ({"bias": np.zeros(3)}, r"bias of layer 'a' has shape \(3,\)"),
        ({"has_bias": False}, "has no bias"),
        ({"weight": np.full((2, 3), np.nan)}, "not all finite"),
        ({"bias": np.array([0.0, np.inf])}, "not all finite"),
    ],
)
def test_check_replacement(change, match):
    good = {"weight": np.zeros((2, 3)), "bias": np.zeros(2), "weight_shape": (2, 3), "has_bias": True}
    check_replacement("a", **good)
    with pytest.raises(ValueError, match=match):
        check_replacement("a", **(good | change))


@pytest.mark.parametrize(
    "convert",
    [np.asarray, pd.DataFrame, torch.tensor, np.ndarray.tolist, scipy.sparse.csr_matrix, scipy.sparse.coo_array],
)
def test_rows_of_any_container(convert):
    array = np.arange(12.0).reshape(6, 2)
    container = convert(array)
    part = row_slice(container, 2, 4)
    assert row_count(container) == 6
    assert row_count(part) == 2
    dense = part.toarray() if hasattr(part, "toarray") else np.asarray(part)
    np.testing.assert_array_equal(dense, array[2:4])


def test_a_slice_of_a_frame_keeps_its_names():
    frame = pd.DataFrame({"age": [1.0, 2.0], "pay": [3.0, 4.0]})
    assert list(row_slice(frame, 0, 1).columns) == ["age", "pay"]


@pytest.mark.parametrize("model", [object(), None, 3.0, np.zeros(3), TorchAdapter])
def test_unsupported_type_names_the_supported(model):
    with pytest.raises(TypeError, match=r"torch.nn.Module.*MLPRegressor.*Pipeline.*ONNX"):
        adapt(model)


@pytest.mark.parametrize("model", [LinearRegression(), make_pipeline(StandardScaler(), LinearRegression())])
def test_other_sklearn_models_are_unsupported(model):
    with pytest.raises(TypeError, match=r"LinearRegression.*MLPRegressor"):
        adapt(model)


@pytest.mark.parametrize("model", ["model.onnx", b"\x08", bytearray(b"\x08"), __import__("pathlib").Path("m.onnx")])
def test_files_go_to_the_onnx_adapter(model, monkeypatch):
    onnx = types.ModuleType("esvdfair.models.onnx")
    onnx.OnnxAdapter = lambda model, *, output: ("onnx", model, output)
    monkeypatch.setitem(sys.modules, "esvdfair.models.onnx", onnx)
    assert adapt(model, output="score") == ("onnx", model, "score")


def test_sklearn_users_do_not_import_torch():
    code = (
        "import sys, numpy as np\n"
        "from sklearn.neural_network import MLPRegressor\n"
        "from esvdfair.models import adapt\n"
        "model = MLPRegressor(hidden_layer_sizes=2, max_iter=1).fit(np.zeros((4, 4)), np.zeros(4))\n"
        "adapt(model).layers(np.eye(4))\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'matplotlib'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
