"""Tree ensembles as a `ModelAdapter`: the prediction is linear in the leaf values.

An ensemble predicts ``link(base + Σ_t v[leaf_t(x)])``, a last layer with as many inputs as leaves. A few hundred random
combinations of them are enough. Every leaf is hashed to one of B buckets with a sign (feature hashing), and the layer
has the inputs

    ψ_j(x) = Σ_t sign[leaf_t(x)] · 1[bucket[leaf_t(x)] = j],  j = 1 … B,   and   f(x) = Σ_t v[leaf_t(x)],

with the weights (0 … 0, 1). New weights (α, s) are written back as ``v' = s·v + sign·α[bucket]``. The layer depends on
the model alone, so it is the same in every part of the data. Leaves with few training rows would be fitted to those
rows: all leaves below the lowest ancestor with enough rows share one bucket and one sign. With no more such groups of
leaves than buckets, each has a bucket of its own.
"""

import copy
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline

from esvdfair.core.checks import several_inputs, to_numpy
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import LinearLayer, ModelAdapter, Part, Readout, Tail, Weights
from esvdfair.models.sklearn import before_last, check_all_fitted, finish_target, levels, predict_wrapped, target_steps
from esvdfair.models.tree_libraries import Tree, TreeLibrary, open_trees

Array = NDArray[np.float64]

BUCKETS = 512
"""Inputs of the layer, besides f(x)."""
MIN_ROWS = 40
"""Training rows of leaves that may change on their own."""
MIN_ROWS_GROWN = 80
"""The same where trees are grown until their leaves hold a few rows."""
GROWN = 10
"""Training rows in a leaf, on average, below which trees count as fully grown."""
SEARCH = {"ridges": (1e-3, 0.1, 10.0), "regularisations": (1e-3, 1e-2)}
"""What is tried: a layer of counts over-fits more easily than hidden units, groups' probabilities included."""

_LAYER = "leaves"
_ROWS_AT_ONCE = 1024


class TreeAdapter(ModelAdapter):
    """A tree ensemble, seen through its leaves.

    Parameters
    ----------
    model : estimator or booster of LightGBM, XGBoost or CatBoost; tree, forest or gradient boosting of scikit-learn
        Or a Pipeline, TransformedTargetRegressor, FrozenEstimator or GridSearchCV that ends in one. Fitted. Of a
        classifier of two classes, the probability of the second is the prediction.
    output : None
        A tree ensemble has one output.
    """

    search = SEARCH
    trees = True
    readout = Readout((Part(_LAYER),))

    def __init__(self, model: Any, *, output: Any = None) -> None:
        if output is not None:
            raise InputError(f"`output={output!r}` was given, but a tree ensemble has one output. Leave it out.")
        self._model = model
        self._levels = levels(model)
        check_all_fitted(self._levels)
        self._use(open_trees(self._levels[-1]))

    def _use(self, library: TreeLibrary) -> None:
        self.library = library
        self.classes = getattr(library.model, "classes_", None) if library.link == "sigmoid" or library.scores else None
        self._rows: Any = None  # of which `head` has been found: an edit is checked on them
        self._leaves_of_rows: NDArray[np.intp] | None = None

    def __reduce__(self) -> Any:
        return TreeAdapter, (self._model,)

    @property
    def n_features(self) -> int | None:
        """Number of columns that the model was fitted on."""
        width = getattr(self._model, "n_features_in_", None) or None  # 0 of a CatBoost model from a file
        if width is None and len(self._levels) == 1 and self.library.columns is not None:
            return len(self.library.columns)
        return width

    @property
    def codes(self) -> NDArray[np.int16]:
        """(nodes,) of each leaf ``sign · (bucket + 1)``."""
        return self._coded[0]

    @cached_property
    def _coded(self) -> tuple[NDArray[np.int16], bool]:
        """Codes, and whether changes of them keep the monotone constraints."""
        ordered = np.flatnonzero(self.library.constraints)
        codes, groups = _codes(self.library, ordered)
        if len(ordered) and groups == len(self.library.sizes):  # one in each tree: there would be nothing to change
            free, more = _codes(self.library, ordered[:0])
            return (free, False) if more > groups else (codes, True)
        return codes, True

    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        weight = np.zeros((1, BUCKETS + 1))
        weight[0, -1] = 1
        return (LinearLayer(_LAYER, 0, weight, np.array([self.library.base])),)

    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Features (rows, BUCKETS + 1) of the leaves that the rows reach, and the prediction."""
        for name in names:
            self._layer(name)
        features, sums = self._features(x)
        return dict.fromkeys(names, features), self._finish(sums)

    def leaves(self, x: Any) -> NDArray[np.intp]:
        """(rows, trees) numbers of the leaves among the nodes of all trees."""
        if x is self._rows and self._leaves_of_rows is not None:
            return self._leaves_of_rows
        if several_inputs(x) is not None and not self.library.several_inputs:
            raise InputError("`X` is several inputs; a tree ensemble takes one table.")
        return self.library.leaves(self._entering(x)) + self.library.starts[:-1]

    def contributions(self, x: Any) -> Array:
        """(rows, columns) TreeSHAP values of the columns that enter the trees, before the link."""
        return self.library.contributions(self._entering(x))

    def names(self, X: Any) -> list[str] | None:
        """Names of the columns that enter the trees, where they are known."""
        given = [str(name) for name in X.columns] if hasattr(X, "columns") else None
        steps = [level[:-1] for level in self._levels if isinstance(level, Pipeline) and len(level) > 1]
        if not steps:
            own = self.library.columns
            return list(own) if given is None and own is not None else given
        try:
            for step in steps:
                given = [str(name) for name in step.get_feature_names_out(given)]
        except (AttributeError, ValueError):  # some steps give no names
            return None
        return given

    def _table(self, x: Any) -> Any:
        """The rows as the model takes them."""
        return to_numpy(x) if hasattr(x, "detach") else x

    def _entering(self, x: Any) -> Any:
        return before_last(self._levels, self._table(x))

    def _features(self, x: Any) -> tuple[Array, Array]:
        """Features (rows, BUCKETS + 1), and what the trees and the base add up to (rows,)."""
        nodes = self.leaves(x).T  # tree by tree, whose values lie together
        features, sums = np.empty((nodes.shape[1], BUCKETS + 1)), np.empty(nodes.shape[1])
        for start in range(0, len(features), _ROWS_AT_ONCE):
            part = nodes[:, start : start + _ROWS_AT_ONCE]
            code, rows = self.codes[part], part.shape[1]
            bucket = np.abs(code) + (np.arange(rows) * BUCKETS - 1)
            counts = np.bincount(bucket.ravel(), np.sign(code).ravel(), minlength=rows * BUCKETS)
            features[start : start + rows, :-1] = counts.reshape(-1, BUCKETS)
            sums[start : start + rows] = self.library.add(part)
        features[:, -1] = sums - self.library.base
        return features, sums

    def _edited(self, weights: Weights) -> Self:
        (weight, bias), library = weights[_LAYER], self.library
        alpha, scale = np.asarray(weight[0, :-1], dtype=np.float64), float(weight[0, -1])
        change = np.concatenate([[0.0], alpha, -alpha[::-1]])  # of a negative code, counted from the end
        values = scale * library.values
        for new, codes in zip(library.parts(values), library.parts(self.codes), strict=True):
            new += change[codes]
        base = library.base if bias is None else float(bias[0])
        if library.base_tree is not None:
            every = library.base_tree < 0
            part = slice(None) if every else slice(*library.starts[library.base_tree :][:2])
            values[part] += (base - library.base) / (len(library.sizes) if every else 1)
            base = library.base
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        twin._model = self._copy_of_model()
        twin._levels = levels(twin._model)
        twin._use(type(library)(twin._levels[-1]))
        twin.library.write(values, base)
        twin.library.values, twin.library.base = values, base
        if self._rows is not None:
            self._check_written(twin)
        if scale < 0 or (alpha.any() and not self._coded[1]):
            self._warn_constraints()
        return twin

    def _copy_of_model(self) -> Any:
        memo = self.library.memo()
        for level in reversed(self._levels):
            if isinstance(level, FrozenEstimator):  # `deepcopy` finds the method of a CatBoost model through it
                memo[id(level)] = FrozenEstimator(copy.deepcopy(level.estimator, memo))
        return copy.deepcopy(self._model, memo)

    def _check_written(self, twin: "TreeAdapter") -> None:
        """Raise unless the copy predicts the sum of the leaf values that were written."""
        nodes, library = self.leaves(self._rows), twin.library
        z = library.add(nodes.T)
        size = (np.abs(library.values[nodes]).sum(axis=1) + abs(library.base)) * 64 * library.eps
        with np.errstate(all="ignore"):
            low, wanted, high = (self._finish(z + step * size) for step in (-1, 0, 1))
        found = np.asarray(twin._predict(self._rows), dtype=np.float64)
        wrong = np.abs(found - wanted) > np.abs(high - low) + 64 * library.eps * np.abs(wanted).max()
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"the edited {type(library.model).__name__} predicts {found[row]:.6g} where its leaves add up to "
                f"{wanted[row]:.6g}. This version of the library, or an option of the model, is not supported."
            )

    def _warn_constraints(self) -> None:
        """Name the columns whose monotone constraint new leaf values need not keep."""
        names = self.library.columns
        ordered = np.flatnonzero(self.library.constraints).tolist()
        if ordered:
            columns = ", ".join(repr(names[c]) if names is not None else str(c) for c in ordered)
            warnings.warn(
                ESVDFairWarning(
                    f"The repaired model no longer guarantees the monotone constraint on column {columns}. Check its "
                    "predictions along that column before you use it."
                ),
                stacklevel=4,
            )

    def _predict(self, x: Any) -> NDArray[Any]:
        if len(self._levels) == 1:
            return self.library.predict(self._table(x))
        return predict_wrapped(self._model, self._table(x), scores=self.classes is not None)

    def _finish(self, z: Array) -> Array:
        """Prediction (rows,) of sums of leaf values (rows,)."""
        calibrated = any(isinstance(level, CalibratedClassifierCV) for level in self._levels)
        raw = calibrated and hasattr(self._levels[-1], "decision_function")  # which a calibrator prefers
        return np.asarray(finish_target(self._levels, (z if raw else self.library.finish(z))[:, None])).ravel()

    def _check_rows(self, rows: Any, eps: float) -> None:
        if len(self._levels) > 1:  # trees predict each row by itself; steps before them may not
            super()._check_rows(rows, eps)

    def _tail(self, rows: Any) -> Tail:
        self._leaves_of_rows, self._rows = self.leaves(rows), rows
        z = self.library.add(self._leaves_of_rows.T)[:, None]

        def run(tried: Array) -> tuple[NDArray[Any], NDArray[Any]]:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
                return tried, self._finish(tried[:, 0])

        operation = ", ".join([*self.library.operations, *target_steps(self._levels)]) or "nothing"
        return Tail(_LAYER, rows, z, run, operation=operation, eps=self.library.eps)


def _codes(library: TreeLibrary, ordered: NDArray[np.intp]) -> tuple[NDArray[np.int16], int]:
    """(nodes,) ``sign · (bucket + 1)`` of the group of leaves that each node belongs to, and the number of groups."""
    leaves = (sum(library.sizes) + len(library.sizes)) // 2
    grown = next(iter(library.trees())).rows[0] * len(library.sizes) < GROWN * leaves
    hashed: list[NDArray[np.int16]] = []
    own: list[NDArray[np.int16]] = []  # a bucket for each group of leaves, while there are as many
    groups = 0
    for start, tree in zip(library.starts[:-1], library.trees(), strict=True):
        owner = _owner(tree, MIN_ROWS_GROWN if grown else MIN_ROWS, ordered)
        owns = np.zeros(len(owner), dtype=bool)
        owns[owner[tree.left < 0]] = True
        place = (np.cumsum(owns) - 1)[owner]
        number = _scrambled((np.flatnonzero(owns) + start).astype(np.uint64))
        bucket = (number % BUCKETS + 1).astype(np.int16)
        hashed.append(np.where(number >> np.uint64(63), bucket, -bucket)[place])
        if groups <= BUCKETS:
            own.append((groups + 1 + place).astype(np.int16))
        groups += int(owns.sum())
    return np.concatenate(own if groups <= BUCKETS else hashed), groups


def _owner(tree: Tree, least: int, ordered: NDArray[np.intp]) -> NDArray[np.intp]:
    """(N,) the node whose leaves all change like each node's.

    It is the lowest at or above it with so many training rows, where they are known, and not below a split on an
    ``ordered`` column: leaves that differ in such a column keep their order.
    """
    nodes = np.arange(len(tree.left))
    joins = tree.rows < least if tree.rows[0] else np.zeros(len(nodes), dtype=bool)
    if len(ordered):
        below = np.isin(tree.column, ordered)[tree.parent]
        below[0] = False
        for level in tree.levels():
            for child in (tree.left[level], tree.right[level]):
                below[child] |= below[level]
        joins |= below
    owner = np.where(joins, tree.parent, nodes)
    while not np.array_equal(owner, above := owner[owner]):  # pointers double their length each time
        owner = above
    return owner


def _scrambled(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A fixed pseudo-random number for each number (splitmix64)."""
    with np.errstate(over="ignore"):
        z = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
