"""Linear layers of an ONNX model: where their weights are stored, and how they are read and written."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from scipy.special import expit, softmax

from esvdfair.models.base import rounded

EDITABLE: dict[int, tuple[str, Any]] = {  # where a tensor holds its values when they are not raw bytes, and as what
    TensorProto.FLOAT: ("float_data", np.float32),
    TensorProto.DOUBLE: ("double_data", np.float64),
    TensorProto.FLOAT16: ("int32_data", np.uint16),
}


@dataclass(frozen=True)
class Parameter:
    """A layer's weight (m, n) or bias (m,): `scale · A`, or `scale · Aᵀ` if it is transposed, for A that is stored.

    It is stored in a tensor, or in an attribute of a LinearRegressor or LinearClassifier, as float32. Of two classes
    that mirror each other, -w and w, the second is the layer and the first follows it.
    """

    holder: onnx.TensorProto | onnx.AttributeProto
    shape: tuple[int, ...]
    transposed: bool = False
    scale: float = 1.0  # that the operator applies: alpha or beta of a Gemm
    mirrored: bool = False

    @property
    def data_type(self) -> int:
        """In which it is stored, as ONNX numbers types."""
        return int(self.holder.data_type if isinstance(self.holder, onnx.TensorProto) else TensorProto.FLOAT)

    def read(self) -> NDArray[np.float64]:
        """Values that the layer works with."""
        return self.scale * self._stored()

    def write(self, values: NDArray[Any], layer: str) -> None:
        """Store `values`, rounded to the dtype of what is stored; entries equal to those of `read` keep every bit."""
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.data_type))
        values = np.asarray(values, dtype=np.float64)
        new = rounded(layer, np.where(values == self.read(), self._stored(), values / self.scale), dtype)
        flat = np.ravel(new.T if self.transposed else new)
        if isinstance(self.holder, onnx.AttributeProto):
            self.holder.floats[:] = [*(-flat if self.mirrored else []), *flat]
        elif self.holder.HasField("raw_data"):
            self.holder.raw_data = flat.astype(dtype.newbyteorder("<")).tobytes()
        else:
            field, kind = EDITABLE[self.data_type]
            getattr(self.holder, field)[:] = flat.view(kind).tolist()

    def _stored(self) -> NDArray[np.float64]:
        if isinstance(self.holder, onnx.TensorProto):
            with np.errstate(invalid="ignore"):  # a signalling NaN, which the prediction will show
                values = np.asarray(numpy_helper.to_array(self.holder), dtype=np.float64)
        else:
            values = np.array(self.holder.floats, dtype=np.float64)[-math.prod(self.shape) :]
        return values.reshape(self.shape[::-1]).T if self.transposed else values.reshape(self.shape)


@dataclass(frozen=True)
class GraphLayer:
    """A linear layer `Z = X Wᵀ + b`: the tensors X and Z by name, W and b as constants of the graph.

    A LinearClassifier does not show Z: its `output` is what its `transform` makes of it.
    """

    name: str
    input: str
    output: str
    weight: Parameter
    bias: Parameter | None
    transform: str | None = None
    trees: onnx.NodeProto | None = None  # of a tree ensemble, its node; the weight are the values of its leaves

    @property
    def data_type(self) -> int:
        """Of `output`, as ONNX numbers types."""
        floats = self.trees is not None and self.trees.op_type != "TreeEnsemble"
        return int(TensorProto.FLOAT) if floats else (self.bias or self.weight).data_type

    def finish(self, z: NDArray[Any]) -> NDArray[Any]:
        """`output` of Z (rows, m), in its dtype."""
        if self.transform is None:
            return z
        scores = z.astype(np.float64)
        if self.weight.mirrored:
            scores = np.hstack([-scores, scores])
        if self.transform == "LOGISTIC":
            scores = expit(scores)
        elif self.transform == "SOFTMAX":
            scores = softmax(scores, axis=1)
        return scores.astype(z.dtype)

    @property
    def operations(self) -> tuple[str, ...]:
        """What stands between Z and `output`, as an operator of its own would be called."""
        names = {None: (), "NONE": (), "LOGISTIC": ("Sigmoid",), "SOFTMAX": ("Softmax",)}
        return names.get(self.transform, (f"{self.transform} of a LinearClassifier",))


def weight_parameter(layer: str, tensor: onnx.TensorProto, *, by_output: bool, scale: float) -> Parameter:
    """A weight stored as (outputs, inputs) if `by_output`, else as (inputs, outputs); a vector has one output."""
    if tensor.data_type not in EDITABLE:
        kind = TensorProto.DataType.Name(tensor.data_type)
        raise ValueError(
            f"the weight {tensor.name!r} of layer {layer!r} is {kind}; float16, float32 or float64 is needed."
        )
    dims = tuple(tensor.dims)
    if not dims or math.prod(dims[:-2]) != 1 or scale == 0:
        raise ValueError(
            f"the weight {tensor.name!r} of layer {layer!r} has shape {dims} and factor {scale:g}; one matrix and a "
            "factor other than 0 are needed."
        )
    rows, columns = dims[-2:] if len(dims) > 1 else (dims[0], 1)
    shape = (rows, columns) if by_output else (columns, rows)
    return Parameter(tensor, shape, transposed=not by_output, scale=scale)


def classic_layer(node: onnx.NodeProto, label: str) -> GraphLayer:
    """The layer that a LinearRegressor or LinearClassifier is."""
    stored = {item.name: item for item in node.attribute}
    classifies = node.op_type == "LinearClassifier"
    transform = attribute(node, "post_transform", b"NONE").decode()
    if "coefficients" not in stored or (transform != "NONE" and not classifies):
        raise ValueError(f"layer {label!r} ({node.op_type}) has no coefficients, or {transform} applied to its output.")
    outputs = _class_count(stored) if classifies else attribute(node, "targets", 1)
    weight = np.array(stored["coefficients"].floats)
    bias = np.array(stored["intercepts"].floats if "intercepts" in stored else [])
    if not outputs or len(weight) % outputs or len(bias) not in (0, outputs) or (classifies and outputs < 2):
        raise ValueError(f"layer {label!r} ({node.op_type}) has {len(weight)} coefficients for {outputs} outputs.")
    mirrored = classifies and outputs == 2 and _mirrored(weight) and _mirrored(bias)
    shown = 1 if mirrored else outputs
    return GraphLayer(
        node.name,
        node.input[0],
        node.output[1 if classifies else 0],
        Parameter(stored["coefficients"], (shown, len(weight) // outputs), mirrored=mirrored),
        Parameter(stored["intercepts"], (shown,), mirrored=mirrored) if len(bias) else None,
        transform if classifies else None,
    )


def _class_count(stored: dict[str, onnx.AttributeProto]) -> int:
    return next((len(item.ints or item.strings) for name, item in stored.items() if "classlabels" in name), 0)


def _mirrored(values: NDArray[Any]) -> bool:
    """Whether the second half is the first with the other sign."""
    return np.array_equal(values[: len(values) // 2], -values[len(values) // 2 :])


def tree_layer(node: onnx.NodeProto, label: str) -> GraphLayer:
    """The trees of a node as a layer, in which their sum is linear; see `onnx_trees`."""
    names = ("leaf_weights", "target_weights_as_tensor", "class_weights_as_tensor", "target_weights", "class_weights")
    stored = next((item for item in node.attribute if item.name in names), None)
    if stored is None:
        raise ValueError(f"the trees {label!r} ({node.op_type}) have no leaf values, so there is nothing to edit.")
    holder = stored.t if stored.HasField("t") else stored
    size = math.prod(stored.t.dims) if stored.HasField("t") else len(stored.floats)
    return GraphLayer(node.name, node.input[0], node.output[-1], Parameter(holder, (1, size)), None, trees=node)


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Value of a node's attribute."""
    return next((onnx.helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)
