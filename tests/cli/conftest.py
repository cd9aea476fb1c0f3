"""A model file and tables for all tests of the command line."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pandas as pd
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from esvdfair.cli import main
from esvdfair.models.onnx import OnnxAdapter

FEATURES = ["age", "hours", "school"]


def network(seed=0, width=8):
    """A model with two linear layers, input X of three columns."""
    rng = np.random.default_rng(seed)
    arrays = {
        "W1": rng.normal(size=(width, 3)),
        "b1": rng.normal(size=width) / 4,
        "W2": rng.normal(size=(1, width)),
        "b2": np.zeros(1),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["X", "W1", "b1"], ["z"], name="hidden", transB=1),
            helper.make_node("Relu", ["z"], ["h"]),
            helper.make_node("Gemm", ["h", "W2", "b2"], ["y"], name="last", transB=1),
        ],
        "network",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 1])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def people(rows, seed, model):
    """A table whose groups differ in what the model sees."""
    rng = np.random.default_rng(seed)
    sex = np.where(rng.random(rows) < 0.4, "female", "male")
    X = rng.normal(size=(rows, 3)) + np.where(sex == "male", 0.8, 0.0)[:, None]
    table = pd.DataFrame(X, columns=FEATURES)
    predicted = OnnxAdapter(model.SerializeToString()).predict(X)
    return table.assign(income=predicted + rng.normal(size=rows), sex=sex)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """`model` (ONNX), `data` (CSV), `new` (Parquet), `scores` (CSV with predictions and a second attribute);
    `people(rows, seed)` makes more.
    """
    folder = tmp_path_factory.mktemp("files")
    model = network()
    found = SimpleNamespace(
        folder=folder,
        model=folder / "model.onnx",
        data=folder / "people.csv",
        new=folder / "new.parquet",
        scores=folder / "scores.csv",
        people=lambda rows, seed: people(rows, seed, model),
    )
    onnx.save(model, found.model)
    data, new = people(600, 1, model), people(400, 2, model)
    data.to_csv(found.data, index=False)
    new.to_parquet(found.new)
    predicted = OnnxAdapter(found.model).predict(data[FEATURES])
    region = np.random.default_rng(3).choice(["north", "south"], len(data))
    data[["income", "sex"]].assign(score=predicted, region=region).to_csv(found.scores, index=False)
    return found


@pytest.fixture(autouse=True)
def width(monkeypatch):
    """A terminal in which most tables are in one piece, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def invoke():
    """Run a command; words may be paths or numbers."""

    def run(*words):
        return CliRunner().invoke(main, [str(word) for word in words], prog_name="esvdfair")

    return run


@pytest.fixture
def refused(invoke):
    """Run a command that must fail: one line on stderr, exit code 2, nothing printed. Gives the line."""

    def run(*words):
        result = invoke(*words)
        assert result.exit_code == 2, (result.stdout, result.stderr)
        assert result.stdout == ""
        assert result.stderr.startswith("esvdfair: ")
        assert result.stderr.count("\n") == 1
        assert len(result.stderr) < 2000
        return result.stderr

    return run


@pytest.fixture
def written(tmp_path):
    """Names of the files in tmp_path, hidden ones too."""
    return lambda folder=tmp_path: sorted(path.name for path in Path(folder).iterdir())
