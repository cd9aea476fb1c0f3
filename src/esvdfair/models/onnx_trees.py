"""An ONNX model that ends in a tree ensemble: the same graph out, with other leaf values.

The trees are one node: TreeEnsembleRegressor, TreeEnsembleClassifier of two classes, or TreeEnsemble (ai.onnx.ml 5).
Other nodes may stand before it, such as a scaler or an encoder, and after it. Which leaf a row reaches is asked of
onnxruntime: of a copy of the node whose leaves hold their own numbers, with one output for each tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from scipy.special import expit

from esvdfair.models.base import ModelAdapter
from esvdfair.models.onnx import OnnxAdapter, start_session
from esvdfair.models.onnx_files import ModelSource
from esvdfair.models.onnx_graph import GraphLayer
from esvdfair.models.tree_libraries import Array, Numbers, Tree, TreeLibrary, one_output
from esvdfair.models.trees import TreeAdapter

ROWS_IN_A_LEAF = 1.58
"""Training rows in a leaf of a fully grown tree: 1 / (1 − 1/e), where a bootstrap sample has a leaf for each row."""
LEAVES_GROWN = 250
"""Leaves of a tree, on average, above which trees count as fully grown: ONNX does not store training rows."""

_BY_COLUMN = frozenset({"Imputer", "Scaler", "Cast", "Identity", "Add", "Sub", "Mul", "Div", "Clip"})
_SETTINGS = {  # as TreeEnsemble numbers them, and what holds where none is given
    "aggregate_function": (("AVERAGE", "SUM", "MIN", "MAX"), "SUM"),
    "post_transform": (("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"), "NONE"),
}


class OnnxEnsemble(OnnxAdapter):
    """An ONNX model that ends in trees: what enters them, and what it makes of their sum."""

    _sample: dict[str, NDArray[Any]]

    @property
    def node(self) -> GraphLayer:
        """The node of the trees, whose weight are the leaf values."""
        return self._graph.layers[-1]

    def operations(self) -> list[str]:
        """Names of what follows the trees; `ValueError` if something else comes in."""
        names, joined = self._graph.path(self.node.output)
        if joined is not None:
            raise ValueError(
                f"the prediction is made of more than the trees {self.node.name or self.node.output!r}: {joined} "
                "brings in another part of the model. Export a model with one tree ensemble."
            )
        return names

    def entering(self, x: Any) -> NDArray[Any]:
        """Input of the trees, (rows, columns)."""
        shown, _ = self._run_open(x, [self.node.input])
        self._sample = {item.name: shown[item.name][:1] for item in self._inputs}
        return np.asarray(shown[self.node.input])

    def after(self, values: NDArray[Any]) -> NDArray[Any]:
        """Prediction (rows,) of what the trees give (rows, outputs)."""
        rows = len(values)
        if self.node.output != self._output:  # inputs of the model are asked for, but nothing depends on them
            feeds = {name: np.repeat(value, rows, axis=0) for name, value in self._sample.items()}
            (values,) = self._run(self._tail_session, feeds | {self.node.output: values}, [self._output])
        return self._prediction(values, rows)

    def names(self, columns: Sequence[str] | None) -> list[str] | None:
        """Names of what enters the trees, where the nodes before them keep the columns of the table apart."""
        if len(self._inputs) == 1:
            known = {self._inputs[0].name: list(columns or ())}
        else:
            known = {item.name: [item.name] * (item.width == 1) for item in self._inputs}
        constants = {tensor.name for tensor in self._proto.graph.initializer}
        for node in self._proto.graph.node:
            parts = [known.get(name, []) for name in node.input if name not in constants]
            known[node.output[0]] = _joined(node.op_type, parts)
        return known.get(self.node.input) or None

    def start_alone(self, node: onnx.NodeProto, dtype: np.dtype[Any]) -> onnxruntime.InferenceSession:
        """A session with one input, of a dtype, that gives the last output of a node alone."""
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        graph = helper.make_graph(
            [node],
            "trees",
            [helper.make_tensor_value_info(node.input[0], kind, [None, None])],
            [onnx.ValueInfoProto(name=node.output[-1])],
        )
        alone = helper.make_model(graph, opset_imports=self._proto.opset_import, ir_version=self._proto.ir_version)
        return start_session(alone, [node.output[-1]])

    def store(self, values: Array, base: float) -> None:
        """Put other leaf values, and a base where there is one, into the model, which is no longer what was given."""
        layer = self.node
        layer.weight.write(values[None], layer.name)
        for item in () if layer.trees is None else layer.trees.attribute:
            if item.name == "base_values":
                item.floats[:] = [base]
            elif item.name == "base_values_as_tensor":
                old = numpy_helper.to_array(item.t)
                item.t.CopyFrom(numpy_helper.from_array(np.array([base], dtype=old.dtype), item.t.name))
        kept = self.__getstate__() | {"_given": None}  # without sessions of the old values
        self.__dict__.clear()
        self.__dict__.update(kept)


class OnnxTrees(TreeLibrary):
    """The trees of an ONNX model; a tree's nodes are numbered from the root down."""

    model: OnnxEnsemble
    several_inputs = True

    def __init__(self, model: OnnxEnsemble) -> None:
        super().__init__(model)
        layer = model.node
        assert layer.trees is not None  # by which `adapt_onnx` has chosen the class
        self._node, self._label = layer.trees, f"{layer.trees.op_type} {layer.trees.name or layer.output!r}"
        self._classifies = self._node.op_type == "TreeEnsembleClassifier"
        about = {item.name: helper.get_attribute_value(item) for item in self._node.attribute}
        about = {name: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for name, v in about.items()}
        average = self._check(about)
        self._operations = tuple(model.operations())
        self._forest = _listed_together(about) if self._node.op_type == "TreeEnsemble" else _listed_apart(about)
        self.sizes = self._forest.sizes
        weights = layer.weight.read()[0]
        if np.unique(self._forest.places).size != len(weights) or len(weights) != (self._forest.left < 0).sum():
            raise ValueError(
                f"the leaves of {self._label} have several values each, or none, so they cannot be edited."
            )
        self._sessions: dict[np.dtype[Any], onnxruntime.InferenceSession] = {}
        self._divisor = len(self.sizes) if average else 1
        self.values = np.zeros(len(self._forest.left))
        self.values[self._forest.places] = weights / self._divisor
        stored = np.ravel(about.get("base_values", about.get("base_values_as_tensor", ())))
        self.base = float(stored[0]) if stored.size else 0.0
        self.base_tree = None if stored.size else -1 if average else 0
        self.dtype = np.dtype(helper.tensor_dtype_to_np_dtype(layer.data_type))
        self.eps = float(np.finfo(self.dtype).eps)
        logistic = _setting(about, "post_transform") == "LOGISTIC"
        self._logistic = logistic and (self._classifies or self._runs_logistic(about))

    def _check(self, about: dict[str, Any]) -> bool:
        """Raise unless the sum of the leaves decides; whether it is divided by the number of trees."""
        labels = about.get("classlabels_int64s", about.get("classlabels_strings", ()))
        one_output(max(int(about.get("n_targets", 1)), len(labels) - 1), self._label)
        how, post = _setting(about, "aggregate_function"), _setting(about, "post_transform")
        if how not in ("SUM", "AVERAGE"):
            raise ValueError(f"{self._label} has aggregate_function={how!r}; only SUM and AVERAGE can be edited.")
        if post not in ("NONE", "LOGISTIC"):
            raise ValueError(f"{self._label} has post_transform={post!r}; only NONE and LOGISTIC are supported.")
        if self._classifies and (post != "LOGISTIC" or len(set(about["class_ids"])) > 1):
            raise ValueError(
                f"{self._label} votes with probabilities, which other leaf values would move out of 0 to 1. Repair the "
                "classifier in its own library and export it again."
            )
        return how == "AVERAGE"

    def _runs_logistic(self, about: dict[str, Any]) -> bool:
        """Whether onnxruntime applies the LOGISTIC of a regressor, which not every version of it does."""
        row = np.zeros((1, max(about["nodes_featureids"], default=0) + 1), dtype=self.dtype)
        z = self.values[self._numbers(row) + self.starts[:-1]].sum(axis=1) + self.base
        (given,) = self.model.start_alone(self._node, self.dtype).run(None, {self._node.input[0]: row})
        return bool(abs(given[0, -1] - expit(z)) < abs(given[0, -1] - z))

    @property
    def operations(self) -> Sequence[str]:
        return (*(["LOGISTIC"] if self._logistic else []), *self._operations)

    def trees(self) -> Iterator[Tree]:
        forest = self._forest
        grown = len(forest.places) > LEAVES_GROWN * len(self.sizes)
        for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True):
            left, right = (
                np.where(side < 0, -1, side - start) for side in (forest.left[start:stop], forest.right[start:stop])
            )
            tree = Tree(left, right, forest.column[start:stop], np.where(left < 0, ROWS_IN_A_LEAF * grown, 0.0))
            tree.add_up(tree.rows)
            yield tree

    def leaves(self, x: Any) -> Numbers:
        return self._numbers(self.model.entering(x))

    def _numbers(self, entering: NDArray[Any]) -> Numbers:
        """(rows, trees) numbers of the leaves for what enters the trees."""
        if entering.dtype not in self._sessions:
            self._sessions[entering.dtype] = self.model.start_alone(self._numbered(), entering.dtype)
        (found,) = self._sessions[entering.dtype].run(None, {self._node.input[0]: entering})
        return np.asarray(found).astype(np.intp)

    def _numbered(self) -> onnx.NodeProto:
        """The node with numbers of leaves for values, and one output for each tree."""
        tree = np.repeat(np.arange(len(self.sizes)), self.sizes)[self._forest.places]
        number = (self._forest.places - self.starts[tree]).astype(self.dtype)
        together = self._node.op_type == "TreeEnsemble"
        node = onnx.NodeProto(op_type="TreeEnsemble" if together else "TreeEnsembleRegressor", domain=self._node.domain)
        node.input.append(self._node.input[0])
        node.output.append(self._node.output[-1])
        given = {item.name: item for item in self._node.attribute}
        shape = ("nodes_", "tree_roots", "membership_values", "leaf_targetids")
        node.attribute.extend(item for name, item in given.items() if name.startswith(shape))
        if together:
            next(item for item in node.attribute if item.name == "leaf_targetids").ints[:] = tree.tolist()
            node.attribute.append(helper.make_attribute("leaf_weights", numpy_helper.from_array(number)))
        else:
            kind = "class" if self._classifies else "target"
            for name in ("treeids", "nodeids"):
                node.attribute.append(helper.make_attribute(f"target_{name}", list(given[f"{kind}_{name}"].ints)))
            node.attribute.append(helper.make_attribute("target_ids", tree.tolist()))
            if any(name.endswith("_as_tensor") for name in given):
                doubles = numpy_helper.from_array(number.astype(np.float64))
                node.attribute.append(helper.make_attribute("target_weights_as_tensor", doubles))
            else:
                node.attribute.append(helper.make_attribute("target_weights", number.tolist()))
        node.attribute.append(helper.make_attribute("n_targets", len(self.sizes)))
        return node

    def predict(self, x: Any) -> NDArray[Any]:
        return self.model.predict(x)

    def finish(self, z: Array) -> Array:
        with np.errstate(over="ignore"):
            values = (expit(z) if self._logistic else z).astype(self.dtype)[:, None]
        if self._classifies:
            values = np.hstack([1 - values, values])
        return np.asarray(self.model.after(values), dtype=np.float64)

    def write(self, values: Array, base: float) -> None:
        self.model.store(values[self._forest.places] * self._divisor, base)

    def content(self) -> Any:
        return self.model.model


class OnnxTreeAdapter(TreeAdapter):
    """The trees at the end of an ONNX model; of a repaired one, ``model`` is the bytes."""

    def __init__(self, ensemble: OnnxEnsemble) -> None:
        self._model = ensemble
        self._levels = (ensemble,)
        self._use(OnnxTrees(ensemble))

    def __reduce__(self) -> Any:
        return OnnxTreeAdapter, (self._model,)

    @property
    def model(self) -> ModelSource:
        """The path or bytes that were given; of a model with new leaf values the bytes."""
        return self._model.model  # type: ignore[no-any-return]

    def names(self, X: Any) -> list[str] | None:
        """Names of the columns that enter the trees, where they are known."""
        return self._model.names([str(name) for name in X.columns] if hasattr(X, "columns") else None)  # type: ignore[no-any-return]

    def _check_rows(self, rows: Any, eps: float) -> None:
        ModelAdapter._check_rows(self, rows, eps)  # nodes before the trees may mix rows

    @property
    def n_features(self) -> int | None:
        """Number of columns that the inputs take together, where they tell."""
        return self._model.n_features  # type: ignore[no-any-return]


def _joined(operator: str, parts: Sequence[list[str]]) -> list[str]:
    """Names of columns after an operator that keeps them apart; none after others."""
    keeps = operator == "Concat" or (operator in _BY_COLUMN and len(parts) == 1)
    return [name for part in parts for name in part] if keeps and all(parts) else []


@dataclass(frozen=True)
class _Forest:
    """Nodes of all trees, tree after tree and from each root down.

    Attributes
    ----------
    left, right : (nodes,) numbers of the children where a split holds and where it does not; -1 at a leaf
    column : (nodes,) input column; -1 at a leaf
    sizes : nodes of each tree
    places : (leaves,) number of the node of each leaf value, in the order in which the model stores them
    """

    left: Numbers
    right: Numbers
    column: Numbers
    sizes: Sequence[int]
    places: Numbers


def _listed_apart(about: dict[str, Any]) -> _Forest:
    """Of a TreeEnsembleRegressor or TreeEnsembleClassifier: nodes have a tree and a number in it."""
    tree, number = (np.array(about[f"nodes_{name}"], dtype=np.intp) for name in ("treeids", "nodeids"))
    span = number.max(initial=0) + 1
    keys = tree * span + number
    order = np.argsort(keys)

    def found(wanted: Numbers) -> Numbers:
        return np.asarray(order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)])

    leaf = np.array([mode == b"LEAF" for mode in about["nodes_modes"]])
    left, right = (
        np.where(leaf, -1, found(tree * span + np.array(about[f"nodes_{side}nodeids"], dtype=np.intp)))
        for side in ("true", "false")
    )
    inside = np.zeros(len(tree), dtype=bool)
    inside[np.concatenate([left[~leaf], right[~leaf]])] = True
    kind = "class" if "class_treeids" in about else "target"
    values = [np.array(about[f"{kind}_{name}"], dtype=np.intp) for name in ("treeids", "nodeids")]
    return _numbered_down(
        left, right, about["nodes_featureids"], order[~inside[order]], found(values[0] * span + values[1])
    )


def _listed_together(about: dict[str, Any]) -> _Forest:
    """Of a TreeEnsemble: inner nodes and leaves in two lists, and the roots of the trees."""
    inner, leaves = len(about["nodes_featureids"]), len(about["leaf_targetids"])
    none, roots = np.full(leaves, -1, dtype=np.intp), np.array(about["tree_roots"], dtype=np.intp)
    left, right = (
        np.concatenate([np.array(about[f"nodes_{side}nodeids"]) + inner * np.array(about[f"nodes_{side}leafs"]), none])
        for side in ("true", "false")
    )
    roots = np.where(left[roots] == right[roots], left[roots], roots)  # a tree of one leaf has it on both sides
    return _numbered_down(left, right, [*about["nodes_featureids"], *none], roots, inner + np.arange(leaves))


def _numbered_down(left: Numbers, right: Numbers, column: Any, roots: Numbers, values: Numbers) -> _Forest:
    """Number the nodes that can be reached from the roots, tree after tree."""
    met, owners = [roots], [np.arange(len(roots))]
    while met[-1].size:
        if sum(map(len, met)) > len(left):
            raise ValueError("the trees of the ONNX model have loops, so it is damaged. Export it again.")
        split = left[met[-1]] >= 0
        nodes, owner = met[-1][split], owners[-1][split]
        met.append(np.concatenate([left[nodes], right[nodes]]))
        owners.append(np.concatenate([owner, owner]))
    visited, owner = np.concatenate(met), np.concatenate(owners)
    order = visited[np.argsort(owner, kind="stable")]
    place = np.full(len(left) + 1, -1, dtype=np.intp)  # the last stands for -1, which no node has
    place[order] = np.arange(len(order))
    column = np.where(left < 0, -1, np.asarray(column, dtype=np.intp))
    sizes = np.bincount(owner, minlength=len(roots)).tolist()
    return _Forest(place[left[order]], place[right[order]], column[order], sizes, place[values])


def _setting(about: dict[str, Any], name: str) -> str:
    """A setting, which older operators write as text and TreeEnsemble as a number."""
    numbered, usual = _SETTINGS[name]
    given = about.get(name, usual)
    if isinstance(given, int):
        return dict(enumerate(numbered)).get(given, str(given))
    return given.decode() if isinstance(given, bytes) else str(given)
