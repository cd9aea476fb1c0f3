"""Which kinds of head the operations after the last linear layer of an ONNX graph can make."""

from collections.abc import Iterable

import onnx

from esvdfair.models._onnx_graph import attribute

# Operations that may stand in a head. Whether together they make one of the known kinds is found numerically;
# anything else (Clip, Relu, Tanh, Where) is refused even if it is idle on every point that was tried.
_MOVES = frozenset({
    "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast", "CastLike", "Expand", "Slice",
    "Gather", "Split", "Concat", "Dropout",
})  # fmt: skip
_LINEAR = frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "ReduceSum", "ReduceMean", "BatchNormalization", "Scaler",
})  # fmt: skip
_CURVES = {"Sigmoid": ("sigmoid",), "Softplus": ("softplus",)}
_CURVE_PARTS = frozenset({"Exp", "Log", "Reciprocal", "Pow"})
_LINES = ("identity", "affine")
_KNOWN = _MOVES | _LINEAR | _CURVE_PARTS | _CURVES.keys()
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def head_kinds(path: Iterable[onnx.NodeProto]) -> tuple[str, ...]:
    """Kinds of head that the operations can make; none if one of them cannot stand in a head."""
    names = {_operation(node) for node in path} - _MOVES - _LINEAR
    if not names:
        return _LINES
    if not names <= _KNOWN:
        return ()
    if len(names) == 1 and (name := names.pop()) in _CURVES:
        return _CURVES[name]
    return ("sigmoid", "softplus", "exp", *_LINES)


def describe(path: Iterable[onnx.NodeProto]) -> str:
    """Name the operations that matter: those that cannot stand in a head if there are any, else all but moves."""
    names = list(dict.fromkeys(_operation(node) for node in path))
    foreign = [name for name in names if name not in _KNOWN]
    return ", ".join(repr(name) for name in foreign or names if name not in _MOVES) or "no operation"


def _operation(node: onnx.NodeProto) -> str:
    """Name of an operator, with what makes it another one: its domain, or the type that a Cast rounds to."""
    if node.domain not in ("", "ai.onnx", "ai.onnx.ml"):
        return f"{node.domain}.{node.op_type}"
    to = attribute(node, "to", onnx.TensorProto.FLOAT)
    if node.op_type == "Cast" and to not in FLOATS:
        return f"Cast to {onnx.TensorProto.DataType.Name(to)}"
    return str(node.op_type)
