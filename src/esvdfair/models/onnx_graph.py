"""The graph of an ONNX model: its dataflow, and the linear layers in it, whose weights are read and written."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from scipy.special import expit, softmax

from esvdfair.models.base import rounded

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

_EDITABLE: dict[int, tuple[str, Any]] = {  # where a tensor holds its values when they are not raw bytes, and as what
    TensorProto.FLOAT: ("float_data", np.float32),
    TensorProto.DOUBLE: ("double_data", np.float64),
    TensorProto.FLOAT16: ("int32_data", np.uint16),
}
_STANDARD = ("", "ai.onnx")
_SHAPE_ONLY = frozenset({"Shape", "Size"})  # what they give depends on their input's shape, not on its values
_LINEAR = frozenset({"Gemm", "MatMul"})
_CLASSIC = frozenset({"LinearRegressor", "LinearClassifier"})
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleRegressor", "TreeEnsembleClassifier"})
_QUANTISED = frozenset({
    "QLinearMatMul", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits",
    "MatMulBnb4", "MatMulFpQ4",
})  # fmt: skip
_FUSED = frozenset({"FusedGemm", "FusedMatMul", "FusedMatMulActivation", "GemmFastGelu", "GemmFloat8"})


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
            field, kind = _EDITABLE[self.data_type]
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
    """A linear layer `Z = X Wᵀ + b`: the tensors X and Z by name, W and b as constants of the graph."""

    name: str
    input: str
    output: str  # of a LinearClassifier, which does not show Z, what its transform makes of it
    weight: Parameter
    bias: Parameter | None
    transform: str = "NONE"
    trees: onnx.NodeProto | None = None  # of a tree ensemble, its node; the weight are the values of its leaves

    @property
    def data_type(self) -> int:
        """Of `output`, as ONNX numbers types."""
        floats = self.trees is not None and self.trees.op_type != "TreeEnsemble"
        return int(TensorProto.FLOAT) if floats else (self.bias or self.weight).data_type

    @property
    def shows_z(self) -> bool:
        """Whether `output` is Z."""
        return self.transform == "NONE" and not self.weight.mirrored

    def finish(self, z: NDArray[Any]) -> NDArray[Any]:
        """`output` of Z (rows, m), in its dtype."""
        scores = np.hstack([-z, z]) if self.weight.mirrored else z
        if self.transform in ("LOGISTIC", "SOFTMAX"):
            curve = expit if self.transform == "LOGISTIC" else partial(softmax, axis=1)
            scores = curve(scores.astype(np.float64))
        return scores.astype(z.dtype, copy=False)

    @property
    def operations(self) -> tuple[str, ...]:
        """What stands between Z and `output`, as an operator of its own would be called."""
        names = {"NONE": (), "LOGISTIC": ("Sigmoid",), "SOFTMAX": ("Softmax",)}
        return names.get(self.transform, (f"{self.transform} of a LinearClassifier",))


def _matrix(layer: str, tensor: onnx.TensorProto, *, by_output: bool, scale: float) -> Parameter:
    """A weight stored as (outputs, inputs) if `by_output`, else as (inputs, outputs); a vector has one output."""
    which = f"the weight {tensor.name!r} of layer {layer!r}"
    if tensor.data_type not in _EDITABLE:
        kind = TensorProto.DataType.Name(tensor.data_type)
        raise ValueError(f"{which} is {kind}; float16, float32 or float64 is needed.")
    dims = tuple(tensor.dims)
    if not dims or math.prod(dims[:-2]) != 1 or scale == 0:
        raise ValueError(
            f"{which} has shape {dims} and factor {scale:g}; one matrix and a factor other than 0 are needed."
        )
    rows, columns = dims[-2:] if len(dims) > 1 else (dims[0], 1)
    return Parameter(tensor, (rows, columns) if by_output else (columns, rows), transposed=not by_output, scale=scale)


def _classic_layer(node: onnx.NodeProto, label: str) -> GraphLayer:
    """The layer that a LinearRegressor or LinearClassifier is."""
    stored = {item.name: item for item in node.attribute}
    classifies = node.op_type == "LinearClassifier"
    transform = attribute(node, "post_transform", b"NONE").decode()
    if "coefficients" not in stored or (transform != "NONE" and not classifies):
        raise ValueError(f"layer {label!r} ({node.op_type}) has no coefficients, or {transform} applied to its output.")
    classes = [*attribute(node, "classlabels_ints", ()), *attribute(node, "classlabels_strings", ())]
    outputs = len(classes) if classifies else attribute(node, "targets", 1)
    weight, bias = np.array(stored["coefficients"].floats), np.array(attribute(node, "intercepts", ()))
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
        transform,
    )


def _mirrored(values: NDArray[Any]) -> bool:
    """Whether the second half is the first with the other sign."""
    return np.array_equal(values[: len(values) // 2], -values[len(values) // 2 :])


def _tree_layer(node: onnx.NodeProto, label: str) -> GraphLayer:
    """The trees of a node as a layer, in which their sum is linear; see `onnx_trees`."""
    names = ("leaf_weights", "target_weights_as_tensor", "class_weights_as_tensor", "target_weights", "class_weights")
    stored = next((item for item in node.attribute if item.name in names), None)
    if stored is None:
        raise ValueError(f"the trees {label!r} ({node.op_type}) have no leaf values, so there is nothing to edit.")
    holder, size = (stored.t, math.prod(stored.t.dims)) if stored.HasField("t") else (stored, len(stored.floats))
    return GraphLayer(node.name, node.input[0], node.output[-1], Parameter(holder, (1, size)), None, trees=node)


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Value of a node's attribute."""
    return next((onnx.helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


class Graph:
    """Who makes and who reads each tensor of a model, and what feeds the output that is the prediction."""

    def __init__(self, model: onnx.ModelProto, output: str) -> None:
        graph = model.graph
        self.output = output
        self._nodes = tuple(graph.node)
        self._functions = {(function.domain, function.name): function for function in model.functions}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._outputs = {value.name for value in graph.output}
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self._nodes:
            for name in _reads(node):
                self._readers[name].append(node)
        self._varying = self._downstream(value.name for value in graph.input if value.name not in self._tensors)
        live = self._varying & upstream(self._nodes, [output], values_only=True)
        self._running = tuple(node for node in self._nodes if not live.isdisjoint(node.output))

    @cached_property
    def layers(self) -> tuple[GraphLayer, ...]:
        """Linear layers that feed the output, in order of execution; `ValueError` if one of them cannot be edited."""
        found = self._found()
        if not found:
            kinds = ", ".join(dict.fromkeys(node.op_type for node in self._running)) or "none that depend on the input"
            raise ValueError(
                f"no linear layer (Gemm, MatMul by a constant, LinearRegressor) feeds the output {self.output!r}, so "
                f"there is no weight to edit. Its operations are {kinds}."
            )
        names = {layer.name for layer in found}
        if all(names) and len(names) == len(found):
            return tuple(found)
        # Names of nodes are free text in ONNX; names of tensors are not.
        return tuple(replace(layer, name=layer.output) for layer in found)

    def _found(self) -> list[GraphLayer]:
        """Layers that can be edited, trees only at the end; `ValueError` if one that cannot comes after them."""
        closed = {node.output[0]: self._closed(node, node.name or node.output[0]) for node in self._running}
        found = [layer for node in self._running if not closed[node.output[0]] for layer in self._layer(node)]
        passed = self._reached(layer.output for layer in found)
        for name, problem in closed.items():  # hidden layers that cannot be edited are no obstacle to the last
            if problem and (name in passed or not found):
                raise ValueError(problem)
        return [layer for layer in found if layer.trees is None or layer is found[-1]]

    @property
    def ends_in_trees(self) -> bool:
        """Whether the last layer is a tree ensemble."""
        kinds = [node.op_type for node in self._running if node.op_type in _LINEAR | _CLASSIC | _TREES]
        return bool(kinds) and kinds[-1] in _TREES

    @cached_property
    def last_layers(self) -> tuple[GraphLayer, ...]:
        """The layers after which no other one comes; the last in order where one of them goes round another."""
        passed = self._reached(layer.output for layer in self.layers)
        found = tuple(layer for layer in self.layers if layer.output in passed)
        after = self._downstream(layer.output for layer in found)
        return self.layers[-1:] if not found or any(layer.input in after for layer in found) else found

    def path(self, *sources: str) -> tuple[list[str], str | None]:
        """Operations by which tensors reach the output, in order, and the first that joins them with other inputs."""
        carried = self._downstream(sources)
        nodes = [node for node in self._running if _meets(node, carried)]
        others = self._varying - carried
        joining = (str(node.op_type) for node in nodes if not others.isdisjoint(_reads(node)))
        return [_operation_name(node) for node in nodes], next(joining, None)

    def check_inference(self) -> None:
        """Raise if the model was exported as it is while training: it predicts at random, or by the batch."""
        for node in self._nodes:
            switch = self._stored("".join(node.input[2:3])) if node.op_type == "Dropout" else None
            drops = switch is not None and bool(numpy_helper.to_array(switch).any())
            trains = attribute(node, "training_mode", 0) or any(node.output[1:])
            if drops or (node.op_type == "BatchNormalization" and trains):
                raise ValueError(
                    f"{node.name or node.output[0]!r} ({node.op_type}) is in training mode, so that the model does not "
                    "predict a row by itself: export after model.eval()."
                )

    def _downstream(self, names: Iterable[str]) -> set[str]:
        """Tensors whose values depend on the named ones, with these."""
        reached = set(names)
        for node in self._nodes:
            if _meets(node, reached):
                reached.update(name for name in node.output if name)
        return reached

    def _reached(self, ends: Iterable[str]) -> set[str]:
        """Tensors that the output depends on with none of some others in between, and those of them that end a way."""
        reached, stops = {self.output}, set(ends)
        for node in reversed(self._nodes):
            stopped = not stops.isdisjoint(node.output) or node.op_type in _SHAPE_ONLY
            if not reached.isdisjoint(node.output) and not stopped:
                reached.update(_reads(node))
        return reached

    def _layer(self, node: onnx.NodeProto) -> Iterator[GraphLayer]:
        """The layer that a node is, if it is one."""
        label = node.name or node.output[0]
        if node.domain == "ai.onnx.ml" and node.op_type in _CLASSIC | _TREES:
            yield (_tree_layer if node.op_type in _TREES else _classic_layer)(node, label)
        if node.op_type not in _LINEAR or node.domain not in _STANDARD:
            return
        x, w = node.input[:2]
        if x not in self._varying or w in self._varying:
            return  # a product of two activations, or one that mixes rows
        if attribute(node, "transA", 0):
            raise ValueError(f"layer {label!r} takes its input transposed (transA=1), which is not supported.")
        tensor, flipped = self._constant(w, label, "weight")
        by_output, scale = flipped != bool(attribute(node, "transB", 0)), attribute(node, "alpha", 1.0)
        weight = _matrix(label, tensor, by_output=by_output, scale=scale)
        output, bias = self._bias(node, weight.shape[0], label)
        yield GraphLayer(node.name, x, output, weight, bias)

    def _bias(self, node: onnx.NodeProto, width: int, label: str) -> tuple[str, Parameter | None]:
        """The tensor that a layer ends in, and its bias: the third input of a Gemm, or a constant that an Add adds."""
        value, third, scale = str(node.output[0]), "".join(node.input[2:]), attribute(node, "beta", 1.0)
        if third and scale != 0:
            return value, self._third(third, scale, width, label)
        while (reader := self._only_reader(value)) is not None and _keeps_values(reader, value, width):
            value = reader.output[0]
        if reader is not None and reader.op_type == "Add" and reader.domain in _STANDARD:
            (other,) = (name for name in reader.input if name != value)
            added = self._stored(other)
            if added is not None and _is_bias(added, width):
                self._constant(other, label, "bias")  # refuses one that has other readers
                return reader.output[0], Parameter(added, (width,))
        return node.output[0], None

    def _third(self, name: str, scale: float, width: int, label: str) -> Parameter:
        """The bias of a Gemm."""
        if name in self._varying:
            raise ValueError(f"layer {label!r} adds {name!r}, which depends on the input, as its bias.")
        tensor, _ = self._constant(name, label, "bias")
        if not _is_bias(tensor, width):
            raise ValueError(
                f"the bias {name!r} of layer {label!r} has shape {tuple(tensor.dims)}, which does not hold one "
                f"number for each of {width} outputs."
            )
        return Parameter(tensor, (width,), scale=scale)

    def _only_reader(self, name: str) -> onnx.NodeProto | None:
        """The node that reads a tensor, if it is one alone, reads it once, and the tensor is no output."""
        readers = self._readers[name]
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def _closed(self, node: onnx.NodeProto, label: str) -> str | None:
        """Why a linear layer that the node holds cannot be edited, if it holds one."""
        if node.op_type in _QUANTISED:
            return _of_integers(label, node.op_type)
        if node.op_type in _FUSED:
            return (
                f"layer {label!r} is an operator fused by an optimiser ({node.op_type}). Repair the model as it was "
                "before the optimisation."
            )
        for inner in self._inner_kinds(node):
            if inner in _LINEAR | _QUANTISED | _FUSED:
                return (
                    f"{label!r} ({node.op_type}) holds a linear layer ({inner}) inside a function or subgraph, where "
                    "its weights cannot be edited. onnx.inliner.inline_local_functions takes functions apart."
                )
        return None

    def _inner_kinds(self, node: onnx.NodeProto) -> Iterator[str]:
        """Operators in the subgraphs and functions that a node runs."""
        waiting, functions = [node], dict(self._functions)
        while waiting:
            caller = waiting.pop()
            bodies: list[Any] = _subgraphs(caller)
            if function := functions.pop((caller.domain, caller.op_type), None):  # one that calls itself is read once
                bodies.append(function)
            for inner in (inner for body in bodies for inner in body.node):
                yield inner.op_type
                waiting.append(inner)

    def _stored(self, name: str) -> onnx.TensorProto | None:
        """The tensor of an initialiser or a Constant node, also behind Identity and Transpose nodes."""
        *_, root = self._chain(name)
        node = self._producer.get(root)
        if node is None or node.op_type != "Constant":
            return self._tensors.get(root)
        return next((item.t for item in node.attribute if item.name == "value"), None)

    def _chain(self, name: str) -> Iterator[str]:
        """The tensor, and those it is no more than a view of."""
        yield name
        while (node := self._producer.get(name)) is not None and node.domain in _STANDARD:
            swaps = node.op_type == "Transpose" and list(attribute(node, "perm", [1, 0])) == [1, 0]
            if node.op_type != "Identity" and not swaps:
                return
            name = node.input[0]
            yield name

    def _constant(self, name: str, label: str, role: str) -> tuple[onnx.TensorProto, bool]:
        """The stored tensor of a layer's weight or bias, and whether it is transposed on the way to the layer."""
        chain, tensor = list(self._chain(name)), self._stored(name)
        if tensor is None:
            node = self._producer.get(chain[-1])
            how = "stored as a sparse tensor" if node is None else f"computed by {node.op_type}"
            if node is not None and "quantize" in node.op_type.lower():
                raise ValueError(_of_integers(label, node.op_type))
            raise ValueError(
                f"the {role} {name!r} of layer {label!r} is {how}, so it cannot be replaced by other numbers. Store it "
                "as an initialiser."
            )
        for link in chain:
            if len(self._readers[link]) > 1 or link in self._outputs:
                others = [repr(node.name or node.output[0]) for node in self._readers[link]]
                raise ValueError(
                    f"layer {label!r} shares its {role} {link!r}, which is read by {', '.join(others)}: an edit would "
                    "act in several places. Give each use an initialiser of its own."
                )
        flips = sum(self._producer[link].op_type == "Transpose" for link in chain[:-1])
        return tensor, flips % 2 == 1


def _keeps_values(node: onnx.NodeProto, name: str, width: int) -> bool:
    """Whether a node hands on a layer's output (rows, width) in another precision (as Keras does) or shape."""
    if node.domain not in _STANDARD or node.input[0] != name:
        return False
    casts = node.op_type == "Cast" and attribute(node, "to", TensorProto.FLOAT) in FLOATS
    return casts or node.op_type == "Identity" or (width == 1 and node.op_type in ("Reshape", "Squeeze", "Flatten"))


def _is_bias(tensor: onnx.TensorProto, width: int) -> bool:
    """Whether a tensor holds `width` numbers along its last axis, of a type that can be edited."""
    dims = tuple(tensor.dims)
    return math.prod(dims) == width and (width == 1 or dims[-1] == width) and tensor.data_type in _EDITABLE


def upstream(nodes: Iterable[onnx.NodeProto], names: Iterable[str], *, values_only: bool = False) -> set[str]:
    """Tensors without which the named ones cannot be computed, with these; or those that their values depend on."""
    reached = set(names)
    for node in reversed(tuple(nodes)):
        if not reached.isdisjoint(node.output) and not (values_only and node.op_type in _SHAPE_ONLY):
            reached.update(_reads(node))
    return reached


def _meets(node: onnx.NodeProto, names: set[str]) -> bool:
    return node.op_type not in _SHAPE_ONLY and not names.isdisjoint(_reads(node))


def _reads(node: onnx.NodeProto) -> list[str]:
    """Tensors that a node reads, as often as it does; subgraphs read tensors around them."""
    names = [name for name in node.input if name]
    for graph in _subgraphs(node):
        inside = {value.name for value in (*graph.input, *graph.initializer)}
        inside.update(name for inner in graph.node for name in inner.output)
        read = [name for inner in graph.node for name in _reads(inner)] + [value.name for value in graph.output]
        names += [name for name in read if name not in inside]
    return names


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for item in node.attribute for graph in (*item.graphs, *([item.g] if item.HasField("g") else []))]


def _of_integers(label: str, kind: str) -> str:
    return (
        f"layer {label!r} is quantised ({kind}): its weights are small integers, which an edit cannot move freely. "
        "Repair the float model, then run onnxruntime.quantization (quantize_dynamic or quantize_static) again."
    )


def _operation_name(node: onnx.NodeProto) -> str:
    """Name of an operator, with what makes it another one: its domain, or the type that a Cast rounds to."""
    if node.domain not in ("", "ai.onnx", "ai.onnx.ml"):
        return f"{node.domain}.{node.op_type}"
    to = attribute(node, "to", TensorProto.FLOAT)
    return f"Cast to {TensorProto.DataType.Name(to)}" if node.op_type == "Cast" and to not in FLOATS else node.op_type
