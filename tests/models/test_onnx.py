import copy
import os
import pickle
import signal
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor, make_tensor_value_info

from esvdfair.models import adapt, find_layer
from esvdfair.models.base import PREDICT_ROWS
from esvdfair.models.onnx import OnnxAdapter

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 6))
# (m, n) weight and (m,) bias of three layers; unequal widths, so that a transposed weight cannot pass
LAYERS = [(RNG.normal(size=shape) / 2, RNG.normal(size=shape[0])) for shape in [(8, 6), (7, 8), (1, 7)]]
OTHER = [(RNG.normal(size=weight.shape) / 2, RNG.normal(size=bias.shape)) for weight, bias in LAYERS]

TYPES = {np.float16: TensorProto.FLOAT16, np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
ROUNDING = {np.float16: 2e-2, np.float32: 2e-5, np.float64: 1e-12}


def model_of(nodes, tensors=(), *, inputs=None, outputs=("y",), dtype=np.float32, functions=()):
    """A model with much around its graph that must survive an edit."""
    inputs = inputs or [make_tensor_value_info("x", TYPES[dtype], ["rows", 6])]
    outputs = [make_tensor_value_info(name, TYPES[dtype], None) for name in outputs]
    graph = make_graph(nodes, "scores", inputs, outputs, tensors, doc_string="a graph")
    domains = [make_opsetid("", 17), make_opsetid("ai.onnx.ml", 3), make_opsetid("com.microsoft", 1)]
    domains += [make_opsetid("local", 1)] if functions else []
    model = make_model(graph, opset_imports=domains, ir_version=8, producer_name="a trainer", functions=functions)
    onnx.helper.set_model_props(model, {"trained on": "wages", "seed": "3"})
    inferred = model if functions else onnx.shape_inference.infer_shapes(model)
    for output, known in zip(model.graph.output, inferred.graph.output, strict=True):
        rank = len(known.type.tensor_type.shape.dim) if known.type.tensor_type.HasField("shape") else 2
        output.CopyFrom(make_tensor_value_info(output.name, TYPES[dtype], [None] * rank))
    return model


def tensor(name, values, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(values).astype(dtype), name)


def typed(name, values, dtype):
    """A tensor whose numbers are in a field of their own type, not in raw bytes."""
    values = np.asarray(values, dtype)
    return make_tensor(name, TYPES[dtype], values.shape, values.ravel().tolist())


def gemm(index, x, z, dtype=np.float32, *, stored=tensor, alpha=1.0, beta=1.0, **options):
    weight, bias = LAYERS[index]
    weight = (weight if options.get("transB") else weight.T) / alpha
    tensors = [stored(f"w{index}", weight, dtype), stored(f"b{index}", bias / beta, dtype)]
    if alpha != 1 or beta != 1:
        options |= {"alpha": alpha, "beta": beta}
    return [make_node("Gemm", [x, f"w{index}", f"b{index}"], [z], f"dense {index}", **options)], tensors


def gemm_by_output(index, x, z, dtype=np.float32):
    return gemm(index, x, z, dtype, transB=1)


def gemm_scaled(index, x, z, dtype=np.float32):
    return gemm(index, x, z, dtype, transB=index % 2, alpha=float(np.float32(0.3)), beta=float(np.float32(-1.7)))


def gemm_typed(index, x, z, dtype=np.float32):
    return gemm(index, x, z, dtype, stored=typed)


def matmul(index, x, z, dtype=np.float32, *, order=1, bias_shape=(-1,)):
    weight, bias = LAYERS[index]
    tensors = [tensor(f"w{index}", weight.T, dtype), tensor(f"b{index}", bias.reshape(bias_shape), dtype)]
    product = make_node("MatMul", [x, f"w{index}"], [f"p{index}"], f"dense {index}")
    return [product, make_node("Add", [f"p{index}", f"b{index}"][::order], [z], f"bias {index}")], tensors


def matmul_bias_left(index, x, z, dtype=np.float32):
    return matmul(index, x, z, dtype, order=-1, bias_shape=(1, -1))


def behind(operation, **options):
    def layer(index, x, z, dtype=np.float32):
        nodes, tensors = gemm(index, x, z, dtype)
        for item in tensors[: 1 if options else 2]:
            nodes.insert(0, make_node(operation, [f"stored {item.name}"], [item.name], **options))
        for item in tensors[: 1 if options else 2]:
            item.name = f"stored {item.name}"
        if options:
            tensors[0].CopyFrom(tensor(tensors[0].name, LAYERS[index][0], dtype))
        return nodes, tensors

    return layer


def constant_nodes(index, x, z, dtype=np.float32):
    nodes, tensors = gemm_by_output(index, x, z, dtype)
    return [*(make_node("Constant", [], [item.name], value=item) for item in tensors), *nodes], []


def nameless(index, x, z, dtype=np.float32):
    nodes, tensors = matmul(index, x, z, dtype)
    for node in nodes:
        node.name = ""
    return nodes, tensors


def network(layer=gemm_by_output, last=(), tensors=(), dtype=np.float32, **options):
    """Three layers with a relu between; `last` takes z to y."""
    parts = [layer(0, "x", "z0", dtype), layer(1, "h0", "z1", dtype), layer(2, "h1", "z" if last else "y", dtype)]
    relus = [[make_node("Relu", [f"z{i}"], [f"h{i}"])] for i in range(2)]
    nodes = [*parts[0][0], *relus[0], *parts[1][0], *relus[1], *parts[2][0], *last]
    weights = [item for _, items in parts for item in items]
    return model_of(nodes, [*weights, *tensors], dtype=dtype, **options)


def forward(x, layers=LAYERS, head=lambda z: z):
    """The same network in NumPy: the input of each layer, and the prediction."""
    inputs = []
    for weight, bias in layers:
        inputs.append(x)
        z = x @ weight.T + bias
        x = np.maximum(z, 0)
    return inputs, head(z[:, 0])


def chain(*operations):
    """Nodes from z to y, each `(operator, further inputs, attributes)`."""
    names = ["z", *(f"t{i}" for i in range(len(operations) - 1)), "y"]
    return [
        make_node(kind, [names[i], *more], [names[i + 1]], **options)
        for i, (kind, more, options) in enumerate(operations)
    ]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


NUMBERS = [tensor("two", 2.0), tensor("five", [[5.0]])]
FLAT = [numpy_helper.from_array(np.array([-1]), "flat")]

# name: (model, head in NumPy, kind of head)
HEADS = {
    "identity": ((), lambda z: z, "identity"),
    "sigmoid": (chain(("Sigmoid", [], {})), sigmoid, "sigmoid"),
    "softplus": (chain(("Softplus", [], {})), lambda z: np.logaddexp(0, z), "softplus"),
    "exp": (chain(("Exp", [], {})), np.exp, "exp"),
    "affine": (chain(("Mul", ["two"], {}), ("Sub", ["five"], {})), lambda z: 2 * z - 5, "affine"),
    "moves": (
        chain(("Identity", [], {}), ("Flatten", [], {}), ("Reshape", ["flat"], {}), ("Cast", [], {"to": 1})),
        lambda z: z,
        "identity",
    ),
    "squeeze and scale": (
        chain(("Squeeze", [], {}), ("Sigmoid", [], {}), ("Mul", ["two"], {})),
        lambda z: 2 * sigmoid(z),
        "sigmoid",
    ),
    "sigmoid by hand": (
        chain(("Neg", [], {}), ("Exp", [], {}), ("Add", ["two"], {}), ("Reciprocal", [], {})),
        lambda z: 1 / (2 + np.exp(-z)),
        "sigmoid",
    ),
}

STYLES = {
    "Gemm [out, in]": gemm_by_output,
    "Gemm [in, out]": gemm,
    "Gemm with alpha and beta": gemm_scaled,
    "Gemm, typed fields": gemm_typed,
    "MatMul + Add": matmul,
    "Add, bias first": matmul_bias_left,
    "Constant nodes": constant_nodes,
    "Identity nodes": behind("Identity"),
    "Transpose nodes": behind("Transpose", perm=[1, 0]),
    "nodes without names": nameless,
}
PRECISIONS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


@pytest.fixture(scope="module", params=[*STYLES, "float16, MatMul", "float64, Gemm", "float16, typed fields"])
def case(request):
    """A model in one style: adapter, model, dtype."""
    if request.param in STYLES:
        layer, dtype = STYLES[request.param], np.float32
    else:
        precision, style = request.param.split(", ")
        dtype = PRECISIONS[precision]
        layer = {"MatMul": matmul, "Gemm": gemm_scaled, "typed fields": gemm_typed}[style]
    model = network(layer, dtype=dtype)
    return OnnxAdapter(model.SerializeToString()), model, dtype


def test_layers_hold_what_the_model_computes_with(case):
    adapter, _, dtype = case
    layers = adapter.layers(X)
    assert [layer.index for layer in layers] == [0, 1, 2]
    for layer, (weight, bias) in zip(layers, LAYERS, strict=True):
        assert layer.weight.dtype == layer.bias.dtype == np.float64
        np.testing.assert_allclose(layer.weight, weight, rtol=0, atol=ROUNDING[dtype])
        np.testing.assert_allclose(layer.bias, bias, rtol=0, atol=ROUNDING[dtype])


def test_capture_gives_inputs_and_prediction_of_one_pass(case):
    adapter, _, dtype = case
    names = [layer.name for layer in adapter.layers(X)]
    inputs, prediction = adapter.capture(X, names)
    expected, expected_prediction = forward(X)
    for name, value in zip(names, expected, strict=True):
        assert inputs[name].dtype == dtype
        np.testing.assert_allclose(inputs[name], value, rtol=0, atol=ROUNDING[dtype])
    np.testing.assert_allclose(prediction, expected_prediction, rtol=0, atol=ROUNDING[dtype])
    assert prediction.dtype == dtype
    assert adapter.n_features == 6


def test_replaced_weights_predict_as_numpy_does(case):
    adapter, _, dtype = case
    names = [layer.name for layer in adapter.layers(X)]
    replaced = adapter.replace(dict(zip(names, OTHER, strict=True)))
    expected = forward(X, OTHER)[1]
    assert np.abs(expected - adapter.predict(X)).max() > 1
    for predicted in (replaced.predict(X), adapt(replaced.model).predict(X)):
        assert predicted.shape == (300,)
        np.testing.assert_allclose(predicted, expected, rtol=0, atol=ROUNDING[dtype])


def test_an_edit_changes_its_own_constants_and_nothing_else(case):
    adapter, model, _ = case
    name = adapter.layers(X)[1].name
    edited = onnx.load_from_string(adapter.replace({name: OTHER[1]}).model)
    assert edited != model
    onnx.checker.check_model(edited, full_check=True)
    changed = [i for i, (a, b) in enumerate(zip(constants(edited), constants(model), strict=True)) if a != b]
    assert [constants(model)[i].name.removeprefix("stored ") for i in changed] == ["w1", "b1"]
    for index in changed:
        a, b = constants(edited)[index], constants(model)[index]
        assert a.dims == b.dims
        assert [field.name for field, _ in a.ListFields()] == [field.name for field, _ in b.ListFields()]
        a.CopyFrom(b)
    assert edited == model


def constants(model):
    inside = [node.attribute[0].t for node in model.graph.node if node.op_type == "Constant"]
    return [*model.graph.initializer, *inside]


def test_no_edit_gives_the_same_model_and_the_same_bits(case):
    adapter, model, _ = case
    own = {layer.name: (layer.weight, layer.bias) for layer in adapter.layers(X)}
    for weights in ({}, own, {name: (weight, None) for name, (weight, _) in own.items()}):
        same = adapter.replace(weights)
        assert onnx.load_from_string(same.model) == model
        np.testing.assert_array_equal(same.predict(X), adapter.predict(X), strict=True)


def test_predicts_what_a_plain_session_does(case):
    adapter, model, dtype = case
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (expected,) = session.run(None, {"x": X.astype(dtype)})
    np.testing.assert_array_equal(adapter.predict(X), expected[:, 0])


def test_a_bias_of_none_keeps_the_old_one():
    adapter = adapt(network().SerializeToString())
    replaced = adapter.replace({"dense 2": (OTHER[2][0], None)})
    expected = forward(X, [*LAYERS[:2], (OTHER[2][0], LAYERS[2][1])])[1]
    np.testing.assert_allclose(replaced.predict(X), expected, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_head(name):
    nodes, function, kind = HEADS[name]
    adapter = OnnxAdapter(network(last=nodes, tensors=NUMBERS + FLAT).SerializeToString())
    inputs, expected = forward(X, head=function)
    head = adapter.head(X)
    assert head.kind == kind
    np.testing.assert_allclose(adapter.predict(X), expected, rtol=1e-4, atol=1e-5)
    z = inputs[-1] @ LAYERS[-1][0][0] + LAYERS[-1][1]
    np.testing.assert_allclose(head.apply(z), expected, rtol=1e-4, atol=1e-5)


def test_head_is_seen_beyond_a_narrow_batch():
    adapter = OnnxAdapter(network(last=chain(("Sigmoid", [], {}))).SerializeToString())
    assert adapter.head(1e-6 * X[:3]).kind == "sigmoid"


def reshaped_like_the_input():
    nodes = [make_node("Shape", ["x"], ["s"], start=0, end=1), make_node("Reshape", ["z", "s"], ["y"])]
    return network(last=nodes)


def test_a_shape_is_no_branch():
    assert OnnxAdapter(reshaped_like_the_input().SerializeToString()).head(X).kind == "identity"


@pytest.mark.parametrize(
    "model",
    [
        lambda: network(last=chain(("Clip", ["", "huge"], {})), tensors=[tensor("huge", 1e6)]),
        lambda: network(last=chain(("Tanh", [], {}), ("Mul", ["two"], {})), tensors=NUMBERS),
        lambda: network(last=chain(("Relu", [], {}))),
        lambda: network(last=chain(("Exp", [], {}), ("Exp", [], {}))),
    ],
)
def test_monotone_heads_are_followed(model):
    adapter = OnnxAdapter(model().SerializeToString())
    *_, last = adapter.layers(X)
    head, expected = adapter.head(X), adapter.predict(X)
    assert head.kind == "monotone"
    z = adapter.capture(X, [last.name])[0][last.name] @ last.weight[0] + last.bias[0]
    np.testing.assert_allclose(head.apply(z), expected, rtol=1e-3, atol=1e-3 * np.median(np.abs(expected)))


def beside(operator, *after):
    """The last layer and the mean of the inputs, joined."""
    nodes = [make_node("ReduceMean", ["x"], ["offset"], axes=[1]), make_node(operator, ["z", "offset"], ["joined"])]
    after = after or (("Identity", [], {}),)
    following = chain(*after)
    following[0].input[0] = "joined"
    return network(last=[*nodes, *following])


@pytest.mark.parametrize(
    ("after", "function", "kind"),
    [
        ((), lambda z: z, "identity"),
        ((("Sigmoid", [], {}),), sigmoid, "sigmoid"),
        ((("Exp", [], {}),), np.exp, "exp"),
    ],
)
def test_what_is_added_to_the_last_layer_stays_as_it_is(after, function, kind):
    adapter = OnnxAdapter(beside("Add", *after).SerializeToString())
    layer, offset = adapter.layers(X)[-1], X.mean(axis=1)
    assert (adapter.head(X).kind, layer.weight.shape, layer.offset) == (kind, (1, 8), True)
    inputs, prediction = adapter.capture(X, [layer.name])
    known = forward(X)[0][-1]
    np.testing.assert_allclose(inputs[layer.name], np.column_stack([known, offset]), atol=1e-4)
    np.testing.assert_allclose(prediction, function(forward(X)[1] + offset), rtol=1e-4, atol=1e-5)
    weight = np.append(OTHER[2][0], [[1.0]], axis=1)
    edited = adapter.replace({layer.name: (weight, OTHER[2][1])})
    expected = function(known @ OTHER[2][0][0] + OTHER[2][1] + offset)
    np.testing.assert_allclose(edited.predict(X), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda: network(last=chain(("Cast", [], {"to": 7}), ("Cast", [], {"to": 1}))),
            "by 'Cast to INT64', which is not",
        ),
        (
            lambda: network(last=chain(("Gelu", [], {"domain": "com.microsoft"}))),
            "by 'com.microsoft.Gelu', which is not",
        ),
        (lambda: beside("Add", ("Relu", [], {})), "'dense 2': 'Add' brings in another branch of the model"),
        (
            lambda: network(
                last=[make_node("ReduceMean", ["z"], ["m"], axes=[0]), make_node("Sub", ["z", "m"], ["y"])]
            ),
            "'ReduceMean', 'Sub' brings in another branch of the model .* or other rows",
        ),
    ],
)
def test_head_that_cannot_be_repaired_is_named(model, said):
    adapter = OnnxAdapter(model().SerializeToString())
    with pytest.raises(ValueError, match=said):
        adapter.head(X)


def test_head_of_a_wide_layer():
    weight = tensor("w", RNG.normal(size=(6, 2)))
    nodes = [make_node("MatMul", ["x", "w"], ["z"], "wide"), make_node("ReduceMax", ["z"], ["y"], axes=[1])]
    with pytest.raises(ValueError, match=r"'wide' gives shape \(256, 2\) for 256 rows, and 'ReduceMax' makes one"):
        OnnxAdapter(model_of(nodes, [weight]).SerializeToString()).head(X)


def wide(*last):
    tensors = [tensor("w", LAYERS[0][0].T), tensor("b", LAYERS[0][1])]
    return model_of([make_node("Gemm", ["x", "w", "b"], ["z" if last else "y"], "wide"), *last], tensors)


@pytest.mark.parametrize(("output", "row"), [(3, 3), (-1, 7), ("y:2", 2), (("y", 1), 1), ("5", 5)])
def test_one_column_of_a_wide_layer(output, row):
    model = wide(*chain(("Sigmoid", [], {})))
    adapter = adapt(model.SerializeToString(), output=output)
    assert adapter.layers()[0].weight.shape == (8, 6)  # without rows, nothing can be run
    (layer,) = adapter.layers(X)
    np.testing.assert_allclose(layer.weight, LAYERS[0][0][[row]], atol=1e-6)
    np.testing.assert_allclose(adapter.predict(X), sigmoid(X @ LAYERS[0][0][row] + LAYERS[0][1][row]), atol=1e-5)
    assert adapter.head(X).kind == "sigmoid"
    edited = adapter.replace({"wide": (2 * layer.weight, layer.bias)})
    np.testing.assert_allclose(edited.layers(X)[0].weight, 2 * layer.weight, atol=1e-6)
    both = [onnx.load_from_string(m).graph.initializer[0] for m in (model.SerializeToString(), edited.model)]
    old, new = (numpy_helper.to_array(t) for t in both)
    assert [i for i in range(8) if not np.array_equal(old[:, i], new[:, i])] == [row]


def test_two_classes():
    nodes = [make_node("Gemm", ["x", "w", "b"], ["z"], "classes"), make_node("Softmax", ["z"], ["y"], axis=1)]
    weight, bias = LAYERS[0][0][:2], LAYERS[0][1][:2]
    adapter = OnnxAdapter(model_of(nodes, [tensor("w", weight.T), tensor("b", bias)]).SerializeToString(), output=1)
    (layer,) = adapter.layers(X)
    np.testing.assert_allclose(layer.weight, weight[1:] - weight[:1], atol=1e-6)
    assert adapter.head(X).kind == "sigmoid"
    edited = adapter.replace({"classes": (np.ones((1, 6)), np.zeros(1))})
    np.testing.assert_allclose(edited.predict(X), sigmoid(X.sum(axis=1)), atol=1e-5)


def test_a_column_that_is_not_there():
    with pytest.raises(ValueError, match=r"shape \(300, 8\) for 300 rows, which has no column `output=9`"):
        OnnxAdapter(wide().SerializeToString(), output=9).predict(X)


def test_head_needs_a_row():
    with pytest.raises(ValueError, match="no rows"):
        OnnxAdapter(network().SerializeToString()).head(X[:0])


# --- which layers there are -------------------------------------------------------------------------------------------


def two_outputs():
    parts = [gemm(0, "x", "z0"), gemm(1, "h", "z1"), gemm(2, "g", "y")]
    aux = make_node("Gemm", ["h", "wa"], ["aux"], "auxiliary")
    nodes = [*parts[0][0], make_node("Relu", ["z0"], ["h"]), aux, *parts[1][0], make_node("Relu", ["z1"], ["g"])]
    tensors = [item for _, items in parts for item in items]
    return model_of([*nodes, *parts[2][0]], [*tensors, tensor("wa", np.ones((8, 1)))], outputs=("aux", "y"))


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("y", ["dense 0", "dense 1", "dense 2"]),
        ("aux", ["dense 0", "auxiliary"]),
        (0, ["dense 0", "auxiliary"]),
        (-1, ["dense 0", "dense 1", "dense 2"]),
    ],
)
def test_layers_are_those_that_feed_the_chosen_output(output, names):
    adapter = adapt(two_outputs().SerializeToString(), output=output)
    assert [layer.name for layer in adapter.layers(X)] == names
    expected = forward(X)[1] if "dense 2" in names else forward(X)[0][1].sum(axis=1)
    np.testing.assert_allclose(adapter.predict(X), expected, atol=1e-5)
    edited = adapter.replace({names[0]: OTHER[0]})
    assert [layer.name for layer in edited.layers()] == names  # the output that was chosen stays chosen


@pytest.mark.parametrize(
    ("output", "error", "said"),
    [
        (None, ValueError, "2 outputs: 'aux', 'y'. Choose"),
        ("z", ValueError, "no output 'z'; it has 'aux', 'y'"),
        (2, ValueError, "no output 2"),
        (-3, ValueError, "no output -3"),
        (True, TypeError, "got True"),
        (len, TypeError, "name or the position"),
    ],
)
def test_choice_of_output(output, error, said):
    with pytest.raises(error, match=said):
        adapt(two_outputs().SerializeToString(), output=output)


@pytest.mark.parametrize(
    "value",
    [
        make_tensor_value_info("y", TensorProto.INT64, [None, 1]),
        onnx.helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, [None, 1]),
    ],
)
def test_an_output_of_another_type(value):
    model = network()
    model.graph.output[0].CopyFrom(value)
    with pytest.raises(ValueError, match="output 'y' is not a tensor of floating-point numbers"):
        OnnxAdapter(model.SerializeToString())


def test_layers_without_names_are_called_after_their_outputs():
    names = [layer.name for layer in OnnxAdapter(network(nameless).SerializeToString()).layers()]
    assert names == ["z0", "z1", "y"]
    model = network()
    for node in model.graph.node:
        node.name = "node"
    assert [layer.name for layer in OnnxAdapter(model.SerializeToString()).layers()] == ["z0", "z1", "y"]


def test_layer_without_bias():
    model = network()
    del model.graph.node[-1].input[2]
    adapter = OnnxAdapter(model.SerializeToString())
    assert find_layer(adapter.layers(), -1).bias is None
    with pytest.raises(ValueError, match="'dense 2' has no bias"):
        adapter.replace({"dense 2": OTHER[2]})
    expected = forward(X, [*LAYERS[:2], (OTHER[2][0], 0)])[1]
    np.testing.assert_allclose(adapter.replace({"dense 2": (OTHER[2][0], None)}).predict(X), expected, atol=1e-5)


def test_beta_of_zero_is_no_bias():
    model = network()
    model.graph.node[-1].attribute.append(onnx.helper.make_attribute("beta", 0.0))
    adapter = OnnxAdapter(model.SerializeToString())
    assert adapter.layers()[-1].bias is None
    np.testing.assert_allclose(adapter.predict(X), forward(X)[1] - LAYERS[2][1], atol=1e-5)


def test_a_sum_of_activations_is_no_bias():
    product = make_node("MatMul", ["x", "w"], ["p"], "only")
    tensors = [tensor("w", np.ones((6, 1)))]
    doubled = model_of([product, make_node("Add", ["p", "p"], ["y"])], tensors)
    assert OnnxAdapter(doubled.SerializeToString()).layers()[0].bias is None
    assert OnnxAdapter(doubled.SerializeToString()).head(X).scale == pytest.approx(2)
    shown = model_of([product, make_node("Add", ["p", "b"], ["y"])], [*tensors, tensor("b", [3.0])], outputs=("y", "p"))
    assert OnnxAdapter(shown.SerializeToString(), output="y").layers()[0].bias is None  # p is wanted without it
    assert OnnxAdapter(shown.SerializeToString(), output="y").head(X).offset == pytest.approx(3)


@pytest.mark.parametrize(
    "between",
    [
        [make_node("Cast", ["p"], ["c"], to=TensorProto.FLOAT)],
        [make_node("Cast", ["p"], ["i"], to=TensorProto.DOUBLE), make_node("Cast", ["i"], ["c"], to=TensorProto.FLOAT)],
        [make_node("Identity", ["p"], ["c"])],
        [make_node("Squeeze", ["p", "axis"], ["c"])],
        [make_node("Reshape", ["p", "flat"], ["c"])],
    ],
    ids=["Cast", "two Casts", "Identity", "Squeeze", "Reshape"],
)
def test_a_bias_is_found_behind_what_leaves_numbers_alone(between):
    shapes = [numpy_helper.from_array(np.array([value]), name) for name, value in (("axis", 1), ("flat", -1))]
    nodes = [make_node("MatMul", ["x", "w"], ["p"], "only"), *between, make_node("Add", ["c", "b"], ["y"])]
    adapter = OnnxAdapter(
        model_of(nodes, [tensor("w", LAYERS[0][0][:1].T), tensor("b", [3.0]), *shapes]).SerializeToString()
    )
    (layer,) = adapter.layers(X)
    assert layer.bias == pytest.approx([3.0])
    assert adapter.head(X).kind == "identity"
    edited = adapter.replace({"only": (2 * layer.weight, layer.bias + 1)})
    np.testing.assert_allclose(edited.predict(X), X @ (2 * layer.weight[0]) + 4, atol=1e-5)


def test_a_bias_of_another_precision_than_the_weight():
    nodes = [
        make_node("MatMul", ["x", "w"], ["p"], "only"),
        make_node("Cast", ["p"], ["c"], to=TensorProto.DOUBLE),
        make_node("Add", ["c", "b"], ["z"]),
        make_node("Sigmoid", ["z"], ["s"]),
        make_node("Cast", ["s"], ["y"], to=TensorProto.FLOAT),
    ]
    tensors = [tensor("w", LAYERS[0][0][:1].T), tensor("b", [0.5], np.float64)]
    adapter = OnnxAdapter(model_of(nodes, tensors).SerializeToString())
    assert adapter.layers(X)[0].bias == pytest.approx([0.5])
    assert adapter.head(X).kind == "sigmoid"


def test_a_vector_is_a_weight_with_one_output():
    nodes = [make_node("MatMul", ["x", "w"], ["p"], "only"), make_node("Add", ["p", "b"], ["y"])]
    model = model_of(nodes, [tensor("w", np.arange(6.0)), tensor("b", 3.0)])
    adapter = OnnxAdapter(model.SerializeToString())
    (layer,) = adapter.layers()
    np.testing.assert_array_equal(layer.weight, [np.arange(6.0)])
    np.testing.assert_array_equal(layer.bias, [3.0])
    assert adapter.head(X).kind == "identity"
    replaced = adapter.replace({"only": (np.ones((1, 6)), np.zeros(1))})
    np.testing.assert_allclose(replaced.predict(X), X.sum(axis=1), atol=1e-5)


def test_products_of_activations_are_no_layers():
    nodes = [
        make_node("Gemm", ["x", "w"], ["z0"], "only"),
        make_node("Transpose", ["z0"], ["t"], perm=[1, 0]),
        make_node("MatMul", ["z0", "t"], ["square"], "gram"),
        make_node("MatMul", ["one", "x"], ["left"], "from the left"),
        make_node("ReduceSum", ["left"], ["l"], keepdims=1),
        make_node("ReduceMean", ["square"], ["s"], axes=[1]),
        make_node("Add", ["s", "l"], ["y"]),
    ]
    model = model_of(nodes, [tensor("w", np.ones((6, 2))), tensor("one", np.ones((1, 300)))])
    assert [layer.name for layer in OnnxAdapter(model.SerializeToString()).layers()] == ["only"]


def test_functions_that_call_functions_are_read_once():
    depth, domains = 40, [make_opsetid("", 17), make_opsetid("local", 1)]
    bodies = [
        [make_node(f"F{i + 1}", ["a"], ["b"], domain="local"), make_node(f"F{i + 1}", ["b"], ["c"], domain="local")]
        for i in range(depth)
    ]
    bodies.append([make_node("Relu", ["a"], ["c"])])
    functions = [onnx.helper.make_function("local", f"F{i}", ["a"], ["c"], b, domains) for i, b in enumerate(bodies)]
    nodes = [make_node("F0", ["x"], ["h"], domain="local"), make_node("MatMul", ["h", "w"], ["y"], "only")]
    model = model_of(nodes, [tensor("w", np.ones((6, 1)))], functions=functions)
    assert [layer.name for layer in OnnxAdapter(model.SerializeToString()).layers()] == ["only"]


def test_initialisers_that_are_inputs_too():
    model = network()
    for item in model.graph.initializer:
        model.graph.input.append(make_tensor_value_info(item.name, item.data_type, item.dims))
    adapter = OnnxAdapter(model.SerializeToString())
    assert len(adapter.layers()) == 3
    np.testing.assert_allclose(adapter.predict(X), forward(X)[1], atol=1e-5)


def test_one_value_may_enter_two_layers():
    nodes = [make_node("MatMul", ["x", name], [f"p{name}"], name) for name in "ab"]
    nodes.append(make_node("Add", ["pa", "pb"], ["y"]))
    model = model_of(nodes, [tensor(name, np.ones((6, 1))) for name in "ab"])
    inputs, prediction = OnnxAdapter(model.SerializeToString()).capture(X, ["b", "a"])
    assert list(inputs) == ["b", "a"]
    np.testing.assert_array_equal(inputs["a"], X.astype(np.float32))
    np.testing.assert_array_equal(inputs["b"], inputs["a"])
    np.testing.assert_allclose(prediction, 2 * X.sum(axis=1), atol=1e-5)


@pytest.mark.parametrize("call", [lambda a: a.capture(X, ["dense 9"]), lambda a: a.replace({"dense 9": OTHER[0]})])
def test_unknown_layer(call):
    with pytest.raises(ValueError, match=r"'dense 9' feeds the prediction.*0: 'dense 0' \(6 → 8\)"):
        call(OnnxAdapter(network().SerializeToString()))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((LAYERS[1][0].T, None), r"shape \(8, 7\); it must be \(7, 8\)"),
        ((LAYERS[1][0], np.zeros(8)), r"bias of layer 'dense 1' has shape \(8,\)"),
        ((LAYERS[1][0] * np.nan, None), "not all finite"),
        ((LAYERS[1][0] * 1e6, None), "too large for float16"),
    ],
)
def test_weights_that_do_not_fit(weights, said):
    adapter = OnnxAdapter(network(matmul, dtype=np.float16).SerializeToString())
    before = adapter.predict(X)
    with pytest.raises(ValueError, match=said):
        adapter.replace({"dense 1": weights})
    np.testing.assert_array_equal(adapter.predict(X), before)


# --- layers that cannot be edited -------------------------------------------------------------------------------------


def renamed(edit):
    def make():
        model = network()
        edit(model.graph)
        return model

    return make


def point(graph, node, slot, name):
    graph.node[node].input[slot] = name


def tied(graph):
    graph.node.insert(0, make_node("Gemm", ["x", "w0", "b0"], ["twin"], "twin", transB=1))


def quantised_by(*nodes):
    def make():
        tensors = [
            numpy_helper.from_array(np.ones((6, 1), np.int8), "q"),
            tensor("scale", 0.1),
            tensor("w", np.ones((6, 1))),
        ]
        tensors.append(numpy_helper.from_array(np.int8(0), "zero"))
        tensors.append(numpy_helper.from_array(np.ones((6, 1), np.int32), "i"))
        return model_of([make_node(*args, **options) for args, options in nodes], tensors)

    return make


def node(kind, inputs, outputs, name="", **options):
    return ((kind, inputs, outputs, name), options)


def in_a_subgraph():
    inner = make_graph(
        [make_node("MatMul", ["x", "w"], ["inside"])], "then", [], [make_tensor_value_info("inside", 1, None)]
    )
    nodes = [
        make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        make_node("Greater", ["total", "nought"], ["positive"]),
        make_node("If", ["positive"], ["y"], "branch", then_branch=inner, else_branch=inner),
    ]
    return model_of(nodes, [tensor("w", np.ones((6, 1))), tensor("nought", 0.0)])


def in_a_function():
    body = [make_node("MatMul", ["a", "b"], ["c"])]
    function = onnx.helper.make_function("local", "Dense", ["a", "b"], ["c"], body, [make_opsetid("", 17)])
    nodes = [make_node("Dense", ["x", "w"], ["y"], "called", domain="local")]
    return model_of(nodes, [tensor("w", np.ones((6, 1)))], functions=[function])


def read_by_a_subgraph():
    inner = make_graph(
        [make_node("ReduceSum", ["w2"], ["inside"])], "then", [], [make_tensor_value_info("inside", 1, None)]
    )
    model = network(
        last=[
            make_node("If", ["yes"], ["c"], "peek", then_branch=inner, else_branch=inner),
            make_node("Add", ["z", "c"], ["y"]),
        ]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    return model


def sparse():
    values = tensor("w", [1.0, 2.0])
    indices = numpy_helper.from_array(np.array([0, 3]), "places")
    model = model_of([make_node("MatMul", ["x", "w"], ["y"], "thin")])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [6, 1]))
    return model


REFUSED = {
    "weight in two layers": (renamed(tied), "'dense 0' shares its weight 'w0', which is read by 'twin', 'dense 0'"),
    "bias in two layers": (renamed(lambda g: point(g, 2, 2, "b0")), "'dense 0' shares its bias 'b0'"),
    "weight is an output": (
        renamed(lambda g: g.output.append(make_tensor_value_info("w1", 1, [7, 8]))),
        "'dense 1' shares its weight 'w1'",
    ),
    "weight read by a subgraph": (
        read_by_a_subgraph,
        "'dense 2' shares its weight 'w2', which is read by 'dense 2', 'peek'",
    ),
    "weight computed": (
        quantised_by(node("Exp", ["w"], ["v"]), node("MatMul", ["x", "v"], ["y"], "curved")),
        "weight 'v' of layer 'curved' is computed by Exp",
    ),
    "weight sparse": (sparse, "weight 'w' of layer 'thin' is stored as a sparse tensor"),
    "dequantised weight": (
        quantised_by(node("DequantizeLinear", ["q", "scale"], ["v"]), node("MatMul", ["x", "v"], ["y"], "small")),
        r"'small' is quantised \(DequantizeLinear\)",
    ),
    "integer product": (
        quantised_by(
            node("DynamicQuantizeLinear", ["x"], ["xq", "s", "o"]),
            node("MatMulInteger", ["xq", "q"], ["p"], "small"),
            node("Cast", ["p"], ["y"], to=1),
        ),
        r"'small' is quantised \(MatMulInteger\)",
    ),
    "QLinearMatMul": (
        quantised_by(
            node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
            node("QLinearMatMul", ["xq", "scale", "zero", "q", "scale", "zero", "scale", "zero"], ["p"], "small"),
            node("DequantizeLinear", ["p", "scale", "zero"], ["y"]),
        ),
        r"'small' is quantised \(QLinearMatMul\)",
    ),
    "integer weight": (
        quantised_by(
            node("Cast", ["x"], ["xi"], to=TensorProto.INT32),
            node("MatMul", ["xi", "i"], ["p"], "whole"),
            node("Cast", ["p"], ["y"], to=1),
        ),
        "weight 'i' of layer 'whole' is INT32; float16, float32 or float64 is needed",
    ),
    "fused": (
        quantised_by(node("FusedMatMul", ["x", "w"], ["y"], "fast", domain="com.microsoft")),
        r"'fast' is an operator fused by an optimiser \(FusedMatMul\)",
    ),
    "in a subgraph": (in_a_subgraph, r"'branch' \(If\) holds a linear layer \(MatMul\)"),
    "in a function": (in_a_function, r"'called' \(Dense\) holds a linear layer \(MatMul\)"),
    "input transposed": (
        lambda: model_of([make_node("Gemm", ["x", "w"], ["y"], "turned", transA=1)], [tensor("w", np.ones((300, 1)))]),
        "'turned' takes its input transposed",
    ),
    "alpha of zero": (
        lambda: model_of([make_node("Gemm", ["x", "w"], ["y"], "null", alpha=0.0)], [tensor("w", np.ones((6, 1)))]),
        r"layer 'null' has shape \(6, 1\) and factor 0",
    ),
    "many matrices": (
        lambda: model_of([make_node("MatMul", ["x", "w"], ["y"], "stack")], [tensor("w", np.ones((2, 6, 1)))]),
        r"layer 'stack' has shape \(2, 6, 1\)",
    ),
    "one bias for all": (
        renamed(lambda g: g.initializer[1].CopyFrom(tensor("b0", [1.0]))),
        r"bias 'b0' of layer 'dense 0' has shape \(1,\), which does not hold one number for each of 8 outputs",
    ),
    "bias from the input": (renamed(lambda g: point(g, 2, 2, "z0")), "'dense 1' adds 'z0', which depends on the input"),
    "no layer": (
        quantised_by(node("ReduceMean", ["x"], ["m"], axes=[1]), node("Relu", ["m"], ["y"])),
        "no linear layer .* feeds the output 'y'.* Its operations are ReduceMean, Relu",
    ),
    "constant output": (quantised_by(node("MatMul", ["w", "scale2"], ["y"])), "no linear layer .* none that depend"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_be_edited_is_named(name):
    make, said = REFUSED[name]
    model = make()
    if name == "constant output":
        model.graph.initializer.append(tensor("scale2", np.ones((1, 300))))
    with pytest.raises(ValueError, match=said):
        OnnxAdapter(model.SerializeToString(), output="y").layers(X)


def dropout(training, stored=True):
    switch = numpy_helper.from_array(np.array(training), "switch")
    last = [make_node("Dropout", ["z", "", "switch"], ["y"], "drop")]
    if stored:
        return network(last=last, tensors=[switch])
    return network(last=[make_node("Constant", [], ["switch"], value=switch), *last])


def batch_norm(**options):
    ones = [tensor(name, np.ones(1)) for name in "abcd"]
    outputs = ["y", "mean", "variance"] if options else ["y"]
    return network(last=[make_node("BatchNormalization", ["z", *"abcd"], outputs, "norm", **options)], tensors=ones)


@pytest.mark.parametrize(
    "model", [lambda: dropout(True), lambda: dropout(True, False), lambda: batch_norm(training_mode=1)]
)
def test_a_model_exported_in_training_mode(model):
    with pytest.raises(ValueError, match=r"'(drop|norm)' \(\w+\) is in training mode.* export after model\.eval\(\)"):
        OnnxAdapter(model().SerializeToString())


@pytest.mark.parametrize("model", [lambda: dropout(False), batch_norm])
def test_a_model_exported_for_prediction(model):
    assert OnnxAdapter(model().SerializeToString()).head(X).kind in ("identity", "affine")


def test_a_model_that_is_no_function_of_a_row():
    nodes = [make_node("ReduceMean", ["x"], ["m"], axes=[0]), make_node("Sub", ["x", "m"], ["c"])]
    nodes.append(make_node("MatMul", ["c", "w"], ["y"]))
    adapter = OnnxAdapter(model_of(nodes, [tensor("w", np.ones((6, 1)))]).SerializeToString())
    with pytest.raises(ValueError, match="depend on the other rows in the batch"):
        adapter.head(X)


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "rows"), [(1, 5), (4, 8), (4, 10), (4, 4), (16, 3)])
def test_a_model_for_a_fixed_number_of_rows(batch, rows):
    inputs = [make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6])]
    flat = [numpy_helper.from_array(np.array([batch]), "flat")]
    model = network(last=chain(("Reshape", ["flat"], {})), tensors=flat, inputs=inputs)
    adapter = OnnxAdapter(model.SerializeToString())
    expected, prediction = forward(X[:rows])
    np.testing.assert_allclose(adapter.predict(X[:rows]), prediction, atol=1e-5)
    captured, again = adapter.capture(X[:rows], ["dense 2"])
    np.testing.assert_allclose(captured["dense 2"], expected[2], atol=1e-5)
    np.testing.assert_allclose(again, prediction, atol=1e-5)
    assert adapter.head(X[:rows]).kind == "identity"
    with pytest.raises(ValueError, match=f"no rows; the model was exported for {batch}"):
        adapter.predict(X[:0])


def test_a_fixed_number_of_rows_along_another_axis():
    inputs = [make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])]
    adapter = OnnxAdapter(network(last=chain(("Transpose", [], {})), inputs=inputs).SerializeToString())
    with pytest.raises(ValueError, match=r"gives shape \(1, 4\) for 4 rows; these do not come apart"):
        adapter.predict(X[:8])


def test_many_rows_and_none():
    adapter = OnnxAdapter(network().SerializeToString())
    many = np.tile(X, (PREDICT_ROWS // 300 + 2, 1))
    np.testing.assert_allclose(adapter.predict(many), np.tile(forward(X)[1], len(many) // 300), atol=1e-5)
    assert adapter.predict(X[:0]).shape == (0,)


def test_more_than_one_number_a_row():
    model = model_of([make_node("MatMul", ["x", "w"], ["y"])], [tensor("w", np.ones((6, 2)))])
    with pytest.raises(ValueError, match=r"returns shape \(300, 2\) for 300 rows: more than one output column"):
        OnnxAdapter(model.SerializeToString()).predict(X)


def test_an_operator_that_onnxruntime_does_not_know():
    model = network(last=[make_node("Secret", ["z"], ["y"], domain="com.microsoft")])
    with pytest.raises(ValueError, match=r"onnxruntime cannot load the model: .*Secret") as error:
        OnnxAdapter(model.SerializeToString()).predict(X)
    assert "\n" not in str(error.value)


def test_a_batch_that_the_model_cannot_run():
    flat = [numpy_helper.from_array(np.array([7, 1]), "flat")]
    adapter = OnnxAdapter(network(last=chain(("Reshape", ["flat"], {})), tensors=flat).SerializeToString())
    with pytest.raises(ValueError, match=r"onnxruntime cannot run the model on this batch: .*Reshape") as error:
        adapter.predict(X)
    assert "\n" not in str(error.value)


def endless():
    scalar, any_shape = make_tensor_value_info("c", TensorProto.BOOL, []), make_tensor_value_info("v", 1, None)
    body = make_graph(
        [make_node("Identity", ["c"], ["c2"]), make_node("Neg", ["v"], ["v2"])],
        "body",
        [make_tensor_value_info("i", TensorProto.INT64, []), scalar, any_shape],
        [make_tensor_value_info("c2", TensorProto.BOOL, []), make_tensor_value_info("v2", 1, None)],
    )
    yes = numpy_helper.from_array(np.array(True), "yes")
    return network(last=[make_node("Loop", ["", "yes", "z"], ["y"], body=body)], tensors=[yes])


def test_a_model_that_loops_for_ever(monkeypatch):
    monkeypatch.setenv("ESVDFAIR_TIME_LIMIT", "0.2")
    with pytest.raises(ValueError, match=r"not finished a batch of 300 rows in 0\.2 seconds, .*ESVDFAIR_TIME_LIMIT"):
        OnnxAdapter(endless().SerializeToString()).predict(X)
    monkeypatch.delenv("ESVDFAIR_TIME_LIMIT")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C is handled
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        OnnxAdapter(endless().SerializeToString()).predict(X)
    signal.signal(signal.SIGALRM, before)


def test_threads_follow_the_environment(monkeypatch):
    seen = []

    class Session:
        def __init__(self, data, options, providers):
            seen.append((options.intra_op_num_threads, options.log_severity_level, providers))

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    for value in ("3", "2,1", "many", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        OnnxAdapter(network().SerializeToString())._session  # noqa: B018
    assert [threads for threads, *_ in seen] == [3, 2, 0, 0]
    assert {(level, *providers) for _, level, providers in seen} == {(4, "CPUExecutionProvider")}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_an_adapter_can_be_copied_after_use(duplicate):
    adapter = OnnxAdapter(network().SerializeToString()).replace({"dense 0": OTHER[0]})
    expected = adapter.predict(X)
    adapter.head(X)
    twin = duplicate(adapter)
    np.testing.assert_array_equal(twin.predict(X), expected)
    np.testing.assert_array_equal(twin.replace({"dense 0": OTHER[0]}).predict(X), expected)
    assert twin.model == adapter.model


def test_model_is_what_was_given_until_it_is_edited(tmp_path):
    data = network().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    assert OnnxAdapter(data).model is data
    assert OnnxAdapter(bytearray(data)).model == data
    assert OnnxAdapter(path).model is path
    assert OnnxAdapter(str(path)).model == str(path)
    for given in (data, path):
        edited = OnnxAdapter(given).replace({"dense 0": OTHER[0]}).model
        assert isinstance(edited, bytes)
        assert edited != data
    assert path.read_bytes() == data


def test_needs_a_path_or_bytes():
    with pytest.raises(TypeError, match="path or the bytes of an ONNX model, got a ModelProto"):
        OnnxAdapter(network())


def test_telemetry_is_off_before_onnxruntime_is_imported(monkeypatch):
    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name == "onnxruntime":
                raise ImportError(f"telemetry off: {os.environ['ORT_DISABLE_TELEMETRY']}", name=name)

    for name in ("esvdfair.models.onnx", "onnxruntime"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    with pytest.raises(ImportError, match="telemetry off: 1"):
        adapt("model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_names_the_extra(package, monkeypatch):
    monkeypatch.delitem(sys.modules, "esvdfair.models.onnx")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"need onnx and onnxruntime .*pip install 'esvdfair\[onnx\]'"):
        adapt("model.onnx")


# --- graphs of other tools --------------------------------------------------------------------------------------------


def test_float16_between_float_inputs_and_outputs():
    model = network(dtype=np.float16)
    for node in model.graph.node:
        node.input[:] = ["half" if name == "x" else name for name in node.input]
        node.output[:] = ["result" if name == "y" else name for name in node.output]
    model.graph.node.insert(0, make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16))
    model.graph.node.append(make_node("Cast", ["result"], ["y"], to=TensorProto.FLOAT))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    adapter = OnnxAdapter(model.SerializeToString())
    assert adapter.head(X).kind in ("identity", "affine")
    name = adapter.layers(X)[-1].name
    edited = adapter.replace({name: OTHER[2]})
    np.testing.assert_allclose(edited.predict(X), forward(X, [*LAYERS[:2], OTHER[2]])[1], atol=0.02)


def test_nodes_out_of_order_are_put_in_order():
    model = network()
    nodes = list(model.graph.node)[::-1]
    expected = OnnxAdapter(model.SerializeToString()).predict(X)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnxruntime.InferenceSession(model.SerializeToString())  # which minds no order
    adapter = OnnxAdapter(model.SerializeToString())
    assert [layer.name for layer in adapter.layers(X)] == ["dense 0", "dense 1", "dense 2"]
    np.testing.assert_array_equal(adapter.predict(X), expected)
    onnx.checker.check_model(onnx.load_from_string(adapter.replace({"dense 2": OTHER[2]}).model))


def test_hidden_layers_that_onnxruntime_has_fused_are_no_obstacle(tmp_path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(network().SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert "FusedGemm" in [node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node]
    adapter = OnnxAdapter(tmp_path / "fused.onnx")
    (layer,) = adapter.layers(X)
    assert adapter.head(X).kind == "identity"
    edited = adapter.replace({layer.name: OTHER[2]})
    np.testing.assert_allclose(edited.predict(X), forward(X, [*LAYERS[:2], OTHER[2]])[1], atol=1e-5)


def test_a_sum_of_two_layers_is_one_wide_layer():
    deep, weights = gemm(0, "x", "z0")
    last, more = gemm_by_output(2, "h1", "deep")
    middle, others = gemm(1, "h0", "z1")
    wide = make_node("MatMul", ["x", "wide weight"], ["wide"], "wide")
    relus = [make_node("Relu", [f"z{i}"], [f"h{i}"]) for i in range(2)]
    tail = [make_node("Mul", ["wide", "two"], ["scaled"]), make_node("Add", ["deep", "scaled"], ["y"])]
    factor = np.arange(1.0, 7.0)[:, None]
    tensors = [*weights, *others, *more, tensor("wide weight", factor), tensor("two", 2.0)]
    model = model_of([*deep, relus[0], *middle, relus[1], *last, wide, *tail], tensors)
    adapter = OnnxAdapter(model.SerializeToString())
    layer, head = adapter.layers(X)[-1], adapter.head(X)
    assert (layer.name, layer.weight.shape, head.kind) == ("dense 2 + wide", (1, 13), "affine")
    np.testing.assert_allclose(adapter.predict(X), forward(X)[1] + 2 * (X @ factor)[:, 0], rtol=1e-4, atol=1e-4)
    features = adapter.capture(X, [layer.name])[0][layer.name]
    weight = RNG.normal(size=(1, 13))
    edited = adapter.replace({layer.name: (weight, np.array([0.5]))})
    np.testing.assert_allclose(edited.predict(X), head.apply(features @ weight[0] + 0.5), rtol=1e-4, atol=1e-4)
