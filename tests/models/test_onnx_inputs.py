import numpy as np
import onnx
import pandas as pd
import pytest
import scipy.sparse
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from esvdfair.models.onnx import OnnxAdapter

FLOAT, DOUBLE, INT, TEXT, BOOL = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.INT64,
    TensorProto.STRING,
    TensorProto.BOOL,
)
TABLE = pd.DataFrame({
    "age": [30.5, 41.0, 22.25],
    "years": np.array([3, 2**53 + 1, 5]),
    "town": ["here", "there", "here"],
    "union": [True, False, True],
})  # fmt: skip


def model_of(nodes, inputs, tensors=()):
    inputs = [make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs]
    outputs = [make_tensor_value_info("y", FLOAT, ["rows", 1])]
    domains = [make_opsetid("", 17), make_opsetid("ai.onnx.ml", 3)]
    return make_model(make_graph(nodes, "g", inputs, outputs, tensors), opset_imports=domains, ir_version=8)


def adapter_of(inputs, *, first=()):
    """A layer with weights 1, 2, 3… over all inputs, each cast to float32 and made (rows, width)."""
    nodes, parts, width = list(first), [], 0
    for name, kind, shape in inputs:
        if kind == TEXT:
            nodes.append(
                make_node(
                    "LabelEncoder",
                    [name],
                    [f"{name} f"],
                    keys_strings=["here", "there"],
                    values_floats=[1.0, 2.0],
                    domain="ai.onnx.ml",
                )
            )
        else:
            nodes.append(make_node("Cast", [name], [f"{name} f"], to=FLOAT))
        columns = 1 if shape is None or len(shape) == 1 else shape[1]
        nodes.append(make_node("Reshape", [f"{name} f", f"{name} s"], [f"{name} t"]))
        parts.append((name, columns))
        width += columns
    nodes.append(make_node("Concat", [f"{name} t" for name, _ in parts], ["all"], axis=1))
    nodes.append(make_node("MatMul", ["all", "w"], ["y"], "layer"))
    tensors = [numpy_helper.from_array(np.array([-1, columns]), f"{name} s") for name, columns in parts]
    tensors.append(numpy_helper.from_array(np.arange(1.0, width + 1, dtype=np.float32)[:, None], "w"))
    return OnnxAdapter(model_of(nodes, inputs, tensors).SerializeToString())


COLUMNS = [("town", TEXT, ["n", 1]), ("age", FLOAT, ["n", 1]), ("union", BOOL, [None, 1]), ("years", INT, [None])]


def seen(adapter, x):
    """What reaches the layer."""
    return adapter.capture(x, ["layer"])[0]["layer"]


EXPECTED = np.column_stack([[1, 2, 1], TABLE["age"], TABLE["union"], TABLE["years"]]).astype(np.float32)


def test_columns_of_a_frame_are_taken_by_name():
    adapter = adapter_of(COLUMNS)
    assert adapter.n_features == 4
    for order in (["age", "years", "town", "union"], ["union", "town", "age", "years"]):
        np.testing.assert_array_equal(seen(adapter, TABLE[order]), EXPECTED)
    np.testing.assert_allclose(adapter.predict(TABLE), EXPECTED @ [1, 2, 3, 4], rtol=1e-6)


def test_columns_of_an_array_are_taken_in_order():
    ordered = TABLE[["town", "age", "union", "years"]]
    adapter = adapter_of(COLUMNS)
    np.testing.assert_array_equal(seen(adapter, ordered.to_numpy()), EXPECTED)
    np.testing.assert_array_equal(seen(adapter, ordered.set_axis(range(4), axis=1)), EXPECTED)


def test_inputs_one_by_one():
    blocks = adapter_of([("first", FLOAT, ["n", 2]), ("second", INT, ["n", 1])])
    first, second = np.arange(8.0).reshape(4, 2), np.arange(4)[:, None]
    for x in ({"second": second, "first": torch.tensor(first)}, (first, second), [first, second]):
        np.testing.assert_array_equal(seen(blocks, x), np.column_stack([first, second]))
        assert blocks.predict(x).shape == (4,)
    with pytest.raises(ValueError, match="X has the inputs first, third; the model takes first, second"):
        blocks.predict({"first": first, "third": second})


def test_whole_numbers_keep_every_digit():
    feeds = [("years", INT, ["n", 1]), ("age", DOUBLE, ["n", 1])]
    inner = [make_node("Mod", ["years", "ten"], ["digit"])]
    nodes = [
        *inner,
        make_node("Cast", ["digit"], ["d"], to=FLOAT),
        make_node("Cast", ["age"], ["a"], to=FLOAT),
        make_node("Concat", ["d", "a"], ["all"], axis=1),
        make_node("MatMul", ["all", "w"], ["y"], "layer"),
    ]
    tensors = [numpy_helper.from_array(np.array(10), "ten"), numpy_helper.from_array(np.ones((2, 1), np.float32), "w")]
    adapter = OnnxAdapter(model_of(nodes, feeds, tensors).SerializeToString())
    assert seen(adapter, TABLE[["age", "years"]])[1, 0] == (2**53 + 1) % 10


def test_missing_numbers_of_nullable_columns():
    frame = pd.DataFrame({"a": pd.array([1, None, 3], "Int64"), "b": pd.array([0.5, 1.5, None], "Float64")})
    adapter = adapter_of([("b", FLOAT, ["n", 1]), ("a", FLOAT, ["n", 1])])
    np.testing.assert_array_equal(seen(adapter, frame), [[0.5, 1], [1.5, np.nan], [np.nan, 3]])


def test_blocks_of_columns():
    adapter = adapter_of([("first", FLOAT, ["n", 2]), ("second", DOUBLE, ["n", 1]), ("third", INT, ["n", 3])])
    assert adapter.n_features == 6
    x = np.arange(24.0).reshape(4, 6)
    np.testing.assert_array_equal(seen(adapter, x), x)
    frame = pd.DataFrame(x, columns=list("fedcba"))
    np.testing.assert_array_equal(seen(adapter, frame), x)


@pytest.mark.parametrize(
    "kind",
    [
        np.asarray,
        np.ndarray.tolist,
        lambda x: x.astype(np.float16),
        lambda x: x.astype(int),
        lambda x: x.astype(object),
        lambda x: pd.DataFrame(x, columns=list("abc")),
        lambda x: torch.tensor(x, requires_grad=True),
        scipy.sparse.csr_matrix,
    ],
)
@pytest.mark.parametrize("declared", [FLOAT, DOUBLE, INT])
def test_one_matrix(kind, declared):
    x = np.arange(12.0).reshape(4, 3)
    adapter = adapter_of([("x", declared, ["n", 3])])
    assert adapter.n_features == 3
    np.testing.assert_array_equal(seen(adapter, kind(x)), x)


def test_one_matrix_of_undeclared_width():
    nodes = [make_node("MatMul", ["x", "w"], ["y"], "layer")]
    tensors = [numpy_helper.from_array(np.ones((3, 1), np.float32), "w")]
    adapter = OnnxAdapter(model_of(nodes, [("x", FLOAT, [None, None])], tensors).SerializeToString())
    assert adapter.n_features is None
    x = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(adapter.predict(x), x.sum(axis=1))
    with pytest.raises(ValueError, match="onnxruntime cannot run the model on this batch"):
        adapter.predict(x[:, :2])


def test_rows_that_are_not_vectors():
    nodes = [make_node("Flatten", ["x"], ["flat"]), make_node("MatMul", ["flat", "w"], ["y"], "layer")]
    tensors = [numpy_helper.from_array(np.ones((6, 1), np.float32), "w")]
    adapter = OnnxAdapter(model_of(nodes, [("x", FLOAT, [None, 2, 3])], tensors).SerializeToString())
    x = np.arange(24.0).reshape(4, 2, 3)
    np.testing.assert_array_equal(adapter.predict(x), x.sum(axis=(1, 2)))
    assert adapter.n_features is None


ONE = [("x", FLOAT, ["n", 3])]
TWO = [("age", FLOAT, ["n", 1]), ("pay", INT, ["n", 1])]


@pytest.mark.parametrize(
    ("inputs", "x", "said"),
    [
        (ONE, np.zeros((4, 2)), r"X has 2 columns; the model takes 3 columns \(input 'x'\)"),
        (ONE, pd.DataFrame({"a": [1], "b": [2]}), r"X has 2 columns \(a, b\); the model takes 3 columns"),
        (ONE, np.zeros(3), "X has 1 dimensions; the model takes a table of 3 columns"),
        (TWO, np.zeros((4, 3)), r"X has 3 columns; the model takes 2 columns \(age, pay\)"),
        (TWO, pd.DataFrame({"pay": [1], "Age": [2]}), r"X has 2 columns \(pay, Age\); .*\(age, pay\), by name"),
        (TWO, pd.DataFrame({"pay": [1], "age": [2], "sex": [0]}), r"X has 3 columns \(pay, age, sex\)"),
        (TWO, pd.DataFrame([[1, 2]], columns=["pay", "pay"]), r"X has 2 columns \(pay, pay\)"),
        (
            TWO,
            pd.DataFrame({"pay": [1.0, 2.5], "age": [1, 2]}),
            r"column 'pay' holds 2\.5; input 'pay' takes whole numbers",
        ),
        (TWO, pd.DataFrame({"pay": [1.0, np.nan], "age": [1, 2]}), "column 'pay' holds nan; input 'pay' takes whole"),
        (TWO, pd.DataFrame({"pay": [1.0, np.inf], "age": [1, 2]}), "column 'pay' holds inf; input 'pay' takes whole"),
        (TWO, pd.DataFrame({"pay": [1], "age": ["41"]}), "column 'age' is not numeric"),
        (TWO, pd.DataFrame({"pay": [1], "age": pd.to_datetime(["2020-01-01"])}), "column 'age' is not numeric"),
        (TWO, np.array([["1", "2"]]), "column X is not numeric"),
        (TWO, np.array([[object(), 2]]), "column X is not numeric"),
        ([("u", BOOL, ["n", 2])], np.array([[0, 2]]), "holds 2; input 'u' takes 0 or 1"),
        ([("t", TEXT, ["n", 2])], np.array([["a", np.nan]], dtype=object), "holds nan; input 't' takes text"),
        ([("age", FLOAT, ["n", 1]), ("town", TEXT, ["n", 1])], np.zeros((2, 2)), "holds 0.0; input 'town' takes text"),
    ],
)
def test_a_table_that_does_not_fit(inputs, x, said):
    with pytest.raises(ValueError, match=said):
        adapter_of(inputs).predict(x)


def identity_of(inputs):
    nodes = [make_node("Cast", [inputs[0][0]], ["y"], to=FLOAT)]
    return OnnxAdapter(model_of(nodes, inputs).SerializeToString())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([("a", FLOAT, ["n", 1]), ("b", FLOAT, ["n", None])], "has 2 inputs, and 'b' does not say how many columns"),
        ([("a", FLOAT, ["n", 1]), ("b", FLOAT, ["n", 2, 3])], "'b' does not say how many columns it takes"),
        ([("a", FLOAT, [4, 1]), ("b", FLOAT, [5, 1])], "exported for 4 and 5 rows at a time; export it for any number"),
        ([("a", FLOAT, [2**40, 2])], r"exported for 1,099,511,627,776 rows at a time; export it for any number"),
        ([("a", TensorProto.COMPLEX64, ["n", 1])], "input 'a' of the model takes complex64"),
    ],
)
def test_inputs_that_no_table_fits(inputs, said):
    with pytest.raises(ValueError, match=said):
        identity_of(inputs).predict(np.zeros((4, 2)))


def test_no_input():
    nodes = [make_node("Identity", ["w"], ["y"])]
    tensors = [numpy_helper.from_array(np.ones((3, 1), np.float32), "w")]
    with pytest.raises(ValueError, match="no input"):
        OnnxAdapter(model_of(nodes, [], tensors).SerializeToString()).predict(np.zeros((3, 1)))


def test_an_input_that_is_no_tensor():
    model = model_of([make_node("ConcatFromSequence", ["x"], ["y"], axis=1)], [])
    model.graph.input.append(onnx.helper.make_tensor_sequence_value_info("x", FLOAT, ["n", 1]))
    with pytest.raises(ValueError, match="input 'x' of the model is not a tensor"):
        OnnxAdapter(model.SerializeToString()).predict(np.zeros((3, 1)))
