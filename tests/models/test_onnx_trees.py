"""ONNX models that end in trees: the leaves add up, edits are written back, the graph stays as it is."""

import json
import pickle

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from skl2onnx import to_onnx
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    BaggingRegressor,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeRegressor

from esvdfair import Effort, ESVDFair
from esvdfair.cli import main
from esvdfair.explain import explain_trees
from esvdfair.models import adapt, fingerprint
from esvdfair.models.trees import BUCKETS

pytestmark = pytest.mark.filterwarnings("ignore:No candidate meets", "ignore:Trees fit")

RNG = np.random.default_rng(0)
GROUP = RNG.integers(0, 2, 700)
X = (RNG.normal(size=(700, 3)) + GROUP[:, None] * [1.0, 0, 0.2]).astype(np.float32)
Y = X[:, 0] + X[:, 1] ** 2 + 0.3 * RNG.normal(size=700)
SIZE = {"n_estimators": 12, "max_depth": 4, "random_state": 0}


def exported(model, y=Y, **options):
    return to_onnx(model.fit(X, y), X[:1], **options).SerializeToString()


def run(model, x=X):
    """What onnxruntime makes of a model: its last output, of a classifier the probability of the second class."""
    session = onnxruntime.InferenceSession(model)
    value = session.run(None, {session.get_inputs()[0].name: x})[-1]
    return np.array([row[1] for row in value]) if isinstance(value, list) else np.ravel(value).astype(float)


def together(kind=TensorProto.FLOAT, aggregate=1, post=0, weights=(-1, 2, 0.5, 0.3, 7, -3, 0.25)):
    """A TreeEnsemble of ai.onnx.ml 5: two trees of three leaves, and one of a single leaf."""
    pytest.importorskip("onnxruntime", minversion="1.30", reason="older ones predict other values for this model")
    node = helper.make_node(
        "TreeEnsemble", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, aggregate_function=aggregate,
        post_transform=post, tree_roots=[0, 2, 4], nodes_modes=helper.make_tensor("m", TensorProto.UINT8, [5], [0] * 5),
        nodes_featureids=[0, 1, 1, 2, 0], nodes_splits=helper.make_tensor("s", kind, [5], [0.4, 0, 0.3, 0.1, 0]),
        nodes_truenodeids=[1, 0, 4, 3, 6], nodes_trueleafs=[0, 1, 1, 1, 1],
        nodes_falsenodeids=[2, 1, 3, 5, 6], nodes_falseleafs=[1, 1, 0, 1, 1],
        leaf_targetids=[0] * 7, leaf_weights=helper.make_tensor("w", kind, [7], weights),
    )  # fmt: skip
    # tree 0: node 0 → (node 1 → leaves 0, 1), leaf 2; tree 1: node 2 → leaf 4, (node 3 → leaves 3, 5); tree 2: leaf 6
    return model_of([node], kind, 5)


def model_of(nodes, kind=TensorProto.FLOAT, version=3):
    graph = helper.make_graph(
        nodes,
        "trees",
        [helper.make_tensor_value_info("x", kind, [None, 3])],
        [helper.make_tensor_value_info("y", kind, [None, 1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def changed(model, **settings):
    """A model whose tree node has other attributes; None takes one out."""
    proto = onnx.load_model_from_string(model)
    (node,) = (node for node in proto.graph.node if node.op_type.startswith("TreeEnsemble"))
    kept = [item for item in node.attribute if item.name not in settings]
    new = [helper.make_attribute(name, value) for name, value in settings.items() if value is not None]
    del node.attribute[:]
    node.attribute.extend([*kept, *new])
    return proto.SerializeToString()


def doubled(model):
    """A model with its leaf values as a tensor of float64, as exporters of float64 models write them."""
    proto = onnx.load_model_from_string(model)
    attributes = {item.name: item for item in proto.graph.node[0].attribute}
    tensors = {
        f"{name}_as_tensor": numpy_helper.from_array(np.array(attributes[name].floats, dtype=np.float64))
        for name in ("nodes_values", "target_weights", "base_values")
    }
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    next(item for item in proto.opset_import if item.domain == "ai.onnx.ml").version = 3
    dropped = dict.fromkeys(("nodes_values", "target_weights", "base_values", "nodes_hitrates"))
    return changed(proto.SerializeToString(), **dropped, **tensors)


def after(model, operator, **attributes):
    """A model with another node at its end."""
    proto = onnx.load_model_from_string(model)
    proto.graph.node[-1].output[0] = "sum"
    proto.graph.node.append(helper.make_node(operator, ["sum"], [proto.graph.output[0].name], **attributes))
    return proto.SerializeToString()


PIPELINE = make_pipeline(SimpleImputer(), StandardScaler(), RandomForestRegressor(**SIZE))
MODELS = {
    "forest": lambda: exported(RandomForestRegressor(**SIZE)),
    "extra trees": lambda: exported(ExtraTreesRegressor(**SIZE)),
    "one tree": lambda: exported(DecisionTreeRegressor(max_depth=5, random_state=0)),
    "boosting": lambda: exported(GradientBoostingRegressor(**SIZE)),
    "boosting, opset 1": lambda: exported(GradientBoostingRegressor(**SIZE), target_opset={"": 15, "ai.onnx.ml": 1}),
    "boosting, float64": lambda: doubled(exported(GradientBoostingRegressor(**SIZE))),
    "grown forest": lambda: exported(RandomForestRegressor(20, random_state=0)),
    "average": lambda: changed(exported(RandomForestRegressor(**SIZE)), aggregate_function="AVERAGE"),
    "average from a base": lambda: changed(exported(GradientBoostingRegressor(**SIZE)), aggregate_function="AVERAGE"),
    "pipeline": lambda: exported(PIPELINE),
    "exp after it": lambda: after(exported(PIPELINE, 0.3 * Y), "Exp"),
    "logistic": lambda: changed(exported(GradientBoostingRegressor(**SIZE)), post_transform="LOGISTIC"),
    "classifier": lambda: exported(GradientBoostingClassifier(**SIZE), (Y > 1).astype(int)),
    "classifier, matrix": lambda: exported(
        GradientBoostingClassifier(**SIZE), (Y > 1).astype(int), options={"zipmap": False}
    ),
    "TreeEnsemble": together,
    "TreeEnsemble, float64": lambda: together(TensorProto.DOUBLE),
    "TreeEnsemble, average": lambda: together(aggregate=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_leaves_add_up_before_and_after_an_edit(name):
    model = MODELS[name]()
    double = "float64" in name
    x = X.astype(np.float64) if double else X
    adapter = adapt(model)
    head, (layer,) = adapter.head(x), adapter.layers(x)
    before = adapter.predict(x)
    weight = np.concatenate([0.02 * RNG.normal(size=(1, BUCKETS)), [[0.8]]], axis=1)
    twin = adapter.replace({"leaves": (weight, layer.bias + 0.05)})
    features = adapter.capture(x, ["leaves"])[0]["leaves"]
    wanted = head.apply(features @ weight[0] + layer.bias + 0.05)
    result = run(twin.model, x) if "matrix" not in name else run(twin.model, x)[1::2]
    assert np.ptp(wanted - before) > 0.05 * np.ptp(before)
    exact = name == "TreeEnsemble, float64"
    assert np.abs(result - wanted).max() < (1e-12 if exact else 1e-6) * max(1, np.ptp(wanted))
    assert np.array_equal(adapter.predict(x), before), "the original has changed"
    assert np.array_equal(adapt(twin.model).predict(x), pickle.loads(pickle.dumps(twin)).predict(x))
    assert fingerprint(twin.model) != fingerprint(model)


def test_only_leaf_values_and_the_base_change():
    for name in ("boosting", "pipeline", "classifier", "TreeEnsemble"):
        given = MODELS[name]()
        adapter = adapt(given)
        adapter.head(X)
        weight = np.concatenate([RNG.normal(size=(1, BUCKETS)), [[0.5]]], axis=1)
        edited = adapter.replace({"leaves": (weight, np.array([0.3]))}).model
        assert edited != given
        left = dict.fromkeys(("target_weights", "class_weights", "leaf_weights", "base_values"))
        assert changed(edited, **left) == changed(given, **left)
        assert abs(len(edited) - len(given)) < 8


@pytest.mark.parametrize("name", ["grown forest", "pipeline", "boosting", "classifier"])
def test_fit_brings_groups_together(name):
    model = MODELS[name]()
    y = (Y > 1).astype(int) if name == "classifier" else Y
    fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick())
    fair.fit(X[:500], y[:500], sensitive_features=GROUP[:500], validation=(X[500:], y[500:], GROUP[500:]))
    assert isinstance(fair.estimator_, bytes)
    assert fair.summary_["ks_after"] < 0.85 * fair.summary_["ks_before"]
    assert np.allclose(run(fair.estimator_), fair.predict(X), atol=1e-6)
    assert np.array_equal(pickle.loads(pickle.dumps(fair)).predict(X), fair.predict(X))


def test_text_columns_and_names():
    table = pd.DataFrame(X, columns=["a", "b", "c"]).assign(job=np.where(RNG.random(700) < 0.3, "x", "y"))
    encoded = make_column_transformer((OneHotEncoder(), ["job"]), (StandardScaler(), ["a", "b", "c"]))
    pipeline = make_pipeline(encoded, GradientBoostingRegressor(**SIZE)).fit(table, Y + (table["job"] == "x"))
    model = to_onnx(pipeline, table[:1]).SerializeToString()
    fair = ESVDFair(model, target_ks=0.2, effort=Effort.quick()).fit(table, Y, sensitive_features=GROUP)
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
    found = [name for name, _ in explain_trees(model, table, sensitive_features=GROUP).columns]
    assert sorted(found) == ["0", "1", "2", "3", "4"]  # of what the encoder gives, not columns of the table
    assert found[0] == "2"


@pytest.mark.parametrize("name", ["forest", "pipeline"])
def test_explained_as_in_scikit_learn(name):
    fitted = RandomForestRegressor(**SIZE) if name == "forest" else clone(PIPELINE)
    model, table = exported(fitted), pd.DataFrame(X, columns=["a", "b", "c"])
    found = explain_trees(model, table, sensitive_features=GROUP)
    same = explain_trees(fitted.fit(table, Y), table, sensitive_features=GROUP)
    assert found.mean_gap == pytest.approx(same.mean_gap, abs=1e-5)
    assert sum(part for _, part in found.columns) == pytest.approx(found.mean_gap, rel=1e-9)
    assert dict(found.columns) == pytest.approx(dict(same.columns), abs=1e-4)


def test_commands(tmp_path):
    source, out, data = tmp_path / "trees.onnx", tmp_path / "fair.onnx", tmp_path / "people.csv"
    source.write_bytes(MODELS["boosting"]())
    pd.DataFrame(X, columns=["a", "b", "c"]).assign(y=Y, sex=np.where(GROUP, "f", "m")).to_csv(data, index=False)
    columns = [str(data), "--sensitive", "sex", "--target", "y"]
    done = CliRunner().invoke(main, ["repair", str(source), *columns, "--target-ks", "0.3", "--quick", "-o", str(out)])
    assert done.exit_code in (0, 1), done.output
    done = CliRunner().invoke(main, ["audit", str(out), *columns])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, ["explain", str(source), *columns, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["columns"][0][0] == "a"
    assert np.ptp(run(out.read_bytes()) - run(source.read_bytes())) > 0


def test_refusals():
    two_targets = exported(RandomForestRegressor(**SIZE), np.c_[Y, Y])
    forest = exported(RandomForestRegressor(**SIZE))
    cases = {
        "one output or two classes": two_targets,
        "votes with probabilities": exported(RandomForestClassifier(**SIZE), (Y > 1).astype(int)),
        "with one tree ensemble": exported(BaggingRegressor(n_estimators=2, random_state=0)),
        "only SUM and AVERAGE": changed(forest, aggregate_function="MAX"),
        "only NONE and LOGISTIC": changed(forest, post_transform="PROBIT"),
        "several values each, or none": changed(forest, target_nodeids=[0] * len(_stored(forest, "target_nodeids"))),
        "have loops": changed(together(), nodes_truenodeids=[1, 0, 4, 2, 6], nodes_trueleafs=[0, 1, 1, 0, 1]),
    }
    for reason, model in cases.items():
        with pytest.raises(ValueError, match=reason):
            adapt(model, output=0 if reason.startswith("one") else None)
    with pytest.raises(ValueError, match="no hidden layer"):
        ESVDFair(forest, method="exact").fit(X, Y, sensitive_features=GROUP)
    assert adapt(exported(LinearRegression())).trees is False


def _stored(model, name):
    (node,) = onnx.load_model_from_string(model).graph.node
    return next(helper.get_attribute_value(item) for item in node.attribute if item.name == name)
