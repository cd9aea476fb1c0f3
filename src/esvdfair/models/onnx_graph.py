"""The graph of an ONNX model: its dataflow, and the linear layers in it. Nothing here runs a model."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import onnx
from onnx import TensorProto, numpy_helper

from esvdfair.models.onnx_layers import (
    EDITABLE,
    GraphLayer,
    Parameter,
    attribute,
    classic_layer,
    tree_layer,
    weight_parameter,
)

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

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


class Graph:
    """Who makes and who reads each tensor of a model, and what feeds the output that is the prediction.

    Parameters of the layers found refer to the tensors of the model.
    """

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
        found = [layer for layer in found if layer.trees is None or layer is found[-1]]
        if not found:
            kinds = ", ".join(dict.fromkeys(node.op_type for node in self._running)) or "none that depend on the input"
            raise ValueError(
                f"no linear layer (Gemm, MatMul by a constant, LinearRegressor) feeds the output {self.output!r}, so "
                f"there is no weight to edit. Its operations are {kinds}."
            )
        names = [layer.name for layer in found]
        if all(names) and len(set(names)) == len(names):
            return tuple(found)
        # Names of nodes are free text in ONNX; names of tensors are not.
        return tuple(replace(layer, name=layer.output) for layer in found)

    def _found(self) -> list[GraphLayer]:
        """Layers that can be edited; `ValueError` if one that cannot comes after them."""
        closed = {node.output[0]: self._closed(node, node.name or node.output[0]) for node in self._running}
        found = [layer for node in self._running if not closed[node.output[0]] for layer in self._layer(node)]
        passed = self._reached(layer.output for layer in found)
        for name, problem in closed.items():  # hidden layers that cannot be edited are no obstacle to the last
            if problem and (name in passed or not found):
                raise ValueError(problem)
        return found

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
        alone = not found or any(layer.input in after for layer in found)
        return self.layers[-1:] if alone else found

    def _reached(self, ends: Iterable[str]) -> set[str]:
        """Tensors that the output depends on with none of some others in between, and those of them that end a way."""
        reached, stops = {self.output}, set(ends)
        for node in reversed(self._nodes):
            stopped = not stops.isdisjoint(node.output) or node.op_type in _SHAPE_ONLY
            if not reached.isdisjoint(node.output) and not stopped:
                reached.update(_reads(node))
        return reached

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
            adapts = node.op_type == "BatchNormalization" and (
                attribute(node, "training_mode", 0) or any(node.output[1:])
            )
            if drops or adapts:
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

    def _layer(self, node: onnx.NodeProto) -> Iterator[GraphLayer]:
        """The layer that a node is, if it is one."""
        label = node.name or node.output[0]
        if node.op_type in _CLASSIC and node.domain == "ai.onnx.ml":
            yield classic_layer(node, label)
        if node.op_type in _TREES and node.domain == "ai.onnx.ml":
            yield tree_layer(node, label)
        if node.op_type not in _LINEAR or node.domain not in _STANDARD:
            return
        x, w = node.input[:2]
        if x not in self._varying or w in self._varying:
            return  # a product of two activations, or one that mixes rows
        if attribute(node, "transA", 0):
            raise ValueError(f"layer {label!r} takes its input transposed (transA=1), which is not supported.")
        tensor, flipped = self._constant(w, label, "weight")
        by_output, scale = flipped != bool(attribute(node, "transB", 0)), attribute(node, "alpha", 1.0)
        weight = weight_parameter(label, tensor, by_output=by_output, scale=scale)
        output, bias = self._bias(node, weight.shape[0], label)
        yield GraphLayer(node.name, x, output, weight, bias)

    def _bias(self, node: onnx.NodeProto, width: int, label: str) -> tuple[str, Parameter | None]:
        """The tensor that a layer ends in, and its bias: the third input of a Gemm, or a constant that an Add adds."""
        third, scale = "".join(node.input[2:]), attribute(node, "beta", 1.0)
        if third and scale != 0:
            return str(node.output[0]), self._third(third, scale, width, label)
        value = str(node.output[0])
        while (reader := self._only_reader(value)) is not None and _keeps_values(reader, width):
            if reader.input[0] != value:
                break
            value = reader.output[0]
        if reader is not None and reader.op_type == "Add" and reader.domain in _STANDARD:
            (other,) = (name for name in reader.input if name != value)
            added = self._stored(other)
            if added is not None and _is_bias(added, width):
                self._constant(other, label, "bias")  # refuses one that has other readers
                return str(reader.output[0]), Parameter(added, (width,))
        return str(node.output[0]), None

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
            return _is_quantised(label, node.op_type)
        if node.op_type in _FUSED:
            return (
                f"layer {label!r} is an operator fused by an optimiser ({node.op_type}). Repair the model as it was "
                "before the optimisation."
            )
        inner = next((kind for kind in self._inner_kinds(node) if kind in _LINEAR | _QUANTISED | _FUSED), None)
        if inner is None:
            return None
        return (
            f"{label!r} ({node.op_type}) holds a linear layer ({inner}) inside a function or subgraph, where its "
            "weights cannot be edited. onnx.inliner.inline_local_functions takes functions apart."
        )

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
        chain = list(self._chain(name))
        tensor = self._stored(name)
        if tensor is None:
            node = self._producer.get(chain[-1])
            how = "stored as a sparse tensor" if node is None else f"computed by {node.op_type}"
            if node is not None and "quantize" in node.op_type.lower():
                raise ValueError(_is_quantised(label, node.op_type))
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


def _keeps_values(node: onnx.NodeProto, width: int) -> bool:
    """Whether a node hands on the output of a layer (rows, width): in another precision or, of one number, shape.

    Keras, for one, casts between the product and the bias.
    """
    if node.domain not in _STANDARD:
        return False
    casts = node.op_type == "Cast" and attribute(node, "to", TensorProto.FLOAT) in FLOATS
    return casts or node.op_type == "Identity" or (width == 1 and node.op_type in ("Reshape", "Squeeze", "Flatten"))


def _is_bias(tensor: onnx.TensorProto, width: int) -> bool:
    """Whether a tensor holds `width` numbers along its last axis, of a type that can be edited."""
    dims = tuple(tensor.dims)
    return math.prod(dims) == width and (width == 1 or dims[-1] == width) and tensor.data_type in EDITABLE


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


def _is_quantised(label: str, kind: str) -> str:
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
