"""The dataflow of an ONNX graph, and the linear layers in it.

All of it is read off the graph: which operation feeds what, and which constants it takes. Nothing is run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx

from esvdfair.models._onnx_parameter import Parameter, bias_parameter, weight_parameter

_STANDARD = ("", "ai.onnx")
_SHAPE_ONLY = frozenset({"Shape", "Size"})  # what they give depends on their input's shape, not on its values
_LINEAR = frozenset({"Gemm", "MatMul"})
_QUANTISED = frozenset({
    "QLinearMatMul", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits",
    "MatMulBnb4", "MatMulFpQ4",
})  # fmt: skip
_FUSED = frozenset({"FusedGemm", "FusedMatMul", "FusedMatMulActivation", "GemmFastGelu", "GemmFloat8"})


@dataclass(frozen=True)
class GraphLayer:
    """A linear layer `Z = X Wᵀ + b`: the tensors X and Z by name, W and b as constants of the graph."""

    name: str
    input: str
    output: str
    weight: Parameter
    bias: Parameter | None


class Graph:
    """Who makes and who reads each tensor of a model, and what feeds one of its outputs.

    Parameters
    ----------
    model : onnx.ModelProto
        Parameters of the layers found refer to its tensors.
    output : str
        The output that is the prediction.
    """

    def __init__(self, model: onnx.ModelProto, output: str) -> None:
        graph = model.graph
        self.output = output
        self._nodes = tuple(graph.node)
        self._functions = {(function.domain, function.name): function for function in model.functions}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._outputs = {value.name for value in graph.output}
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self._nodes:
            for name in _reads(node):
                self._readers.setdefault(name, []).append(node)
        self._varying = self._downstream(value.name for value in graph.input if value.name not in self._tensors)
        self._feeding = self._upstream(output)

    @cached_property
    def layers(self) -> tuple[GraphLayer, ...]:
        """Linear layers that feed the output, in order of execution; `ValueError` if one of them cannot be edited."""
        running = [node for node in self._nodes if self._runs(node)]
        found = [layer for node in running for layer in self._layer(node)]
        if not found:
            kinds = ", ".join(dict.fromkeys(node.op_type for node in running)) or "none that depend on the input"
            raise ValueError(
                f"no linear layer (Gemm, or MatMul by a constant) feeds the output {self.output!r}, so there is no "
                f"weight to edit. Its operations are {kinds}."
            )
        names = [layer.name for layer in found]
        if all(names) and len(set(names)) == len(names):
            return tuple(found)
        # Names of nodes are free text in ONNX; names of tensors are not.
        return tuple(GraphLayer(la.output, la.input, la.output, la.weight, la.bias) for la in found)

    def path(self, source: str) -> tuple[onnx.NodeProto, ...]:
        """Operations by which the tensor `source` reaches the output, in order of execution."""
        carried = self._downstream([source])
        return tuple(node for node in self._nodes if self._runs(node) and _meets(node, carried))

    def mixing(self, source: str) -> str | None:
        """First operation on the path that also reads something else that depends on the input."""
        carried = self._downstream([source])
        for node in self.path(source):
            if any(name in self._varying and name not in carried for name in _reads(node)):
                return str(node.op_type)
        return None

    def _runs(self, node: onnx.NodeProto) -> bool:
        """Whether the output depends on this node, and the node on an input."""
        return any(name in self._feeding and name in self._varying for name in node.output)

    def _downstream(self, names: Iterable[str]) -> set[str]:
        """Tensors whose values depend on the named ones, with these."""
        reached = set(names)
        for node in self._nodes:
            if _meets(node, reached):
                reached.update(name for name in node.output if name)
        return reached

    def _upstream(self, name: str) -> set[str]:
        """Tensors that the values of the named one depend on, with it."""
        reached = {name}
        for node in reversed(self._nodes):
            if reached.intersection(node.output) and node.op_type not in _SHAPE_ONLY:
                reached.update(_reads(node))
        return reached

    def _layer(self, node: onnx.NodeProto) -> Iterator[GraphLayer]:
        """The layer that a node is, if it is one."""
        label = node.name or node.output[0]
        self._refuse_closed(node, label)
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
        output, bias = self._biased(node, weight.shape[0], label)
        yield GraphLayer(node.name, x, output, weight, bias)

    def _biased(self, node: onnx.NodeProto, width: int, label: str) -> tuple[str, Parameter | None]:
        """The tensor that a layer ends in, and its bias: the third input of a Gemm, or what an Add adds."""
        third, scale = "".join(node.input[2:]), attribute(node, "beta", 1.0)
        if not third or scale == 0:
            return self._added(node.output[0], width, label)
        if third in self._varying:
            raise ValueError(f"layer {label!r} adds {third!r}, which depends on the input, as its bias.")
        tensor, _ = self._constant(third, label, "bias")
        bias = bias_parameter(tensor, width, scale=scale)
        if bias is None:
            raise ValueError(
                f"the bias {third!r} of layer {label!r} has shape {tuple(tensor.dims)}, which does not hold one number "
                f"for each of {width} outputs."
            )
        return str(node.output[0]), bias

    def _added(self, product: str, width: int, label: str) -> tuple[str, Parameter | None]:
        """The sum of a product and its bias, if a constant is all that is done to it; else the product itself."""
        readers = self._readers.get(product, [])
        if len(readers) == 1 and readers[0].op_type == "Add" and product not in self._outputs:
            (other,) = (name for name in readers[0].input if name != product)
            tensor = self._stored(other)
            bias = None if tensor is None else bias_parameter(tensor, width)
            if bias is not None:
                self._constant(other, label, "bias")
                return str(readers[0].output[0]), bias
        return product, None

    def _refuse_closed(self, node: onnx.NodeProto, label: str) -> None:
        """Raise if the node holds a linear layer that cannot be got at."""
        if node.op_type in _QUANTISED:
            raise ValueError(_is_quantised(label, node.op_type))
        if node.op_type in _FUSED:
            raise ValueError(
                f"layer {label!r} is an operator fused by an optimiser ({node.op_type}). Repair the model as it was "
                "before the optimisation."
            )
        inner = next((kind for kind in self._inner_kinds(node) if kind in _LINEAR | _QUANTISED | _FUSED), None)
        if inner is not None:
            raise ValueError(
                f"{label!r} ({node.op_type}) holds a linear layer ({inner}) inside a function or subgraph, where its "
                "weights cannot be edited. onnx.inliner.inline_local_functions takes functions apart."
            )

    def _inner_kinds(self, node: onnx.NodeProto) -> Iterator[str]:
        """Operators in the subgraphs and functions that a node runs."""
        waiting, called = [node], set()
        while waiting:
            caller = waiting.pop()
            bodies: list[Any] = list(_subgraphs(caller))
            key = caller.domain, caller.op_type
            if key in self._functions and key not in called:  # a function that calls itself is read once
                called.add(key)
                bodies.append(self._functions[key])
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
        while (node := self._producer.get(name)) is not None and node.domain in _STANDARD and _is_view(node):
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


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Value of a node's attribute."""
    for item in node.attribute:
        if item.name == name:
            return onnx.helper.get_attribute_value(item)
    return default


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


def _is_view(node: onnx.NodeProto) -> bool:
    swap = node.op_type == "Transpose" and list(attribute(node, "perm", [1, 0])) == [1, 0]
    return swap or node.op_type == "Identity"


def _is_quantised(label: str, kind: str) -> str:
    return (
        f"layer {label!r} is quantised ({kind}): its weights are small integers, which an edit cannot move freely. "
        "Repair the model as it was before, then quantise it again."
    )
