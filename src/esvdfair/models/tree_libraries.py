"""What every library of tree ensembles must answer: its leaves, read and written the same way.

Every ensemble predicts ``link(base + Σ_t value[leaf_t(x)])``. A `TreeLibrary` numbers the nodes of all trees one after
the other, says which leaf each row reaches, and writes new leaf values into its model. No library is imported here
before a model of it is given.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.base import is_classifier

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]


def _identity(z: Array) -> Array:
    return z


def _softplus(z: Array) -> Array:
    return np.logaddexp(0.0, z)


LINKS: dict[str, Callable[[Array], Array]] = {
    "identity": _identity,
    "exp": np.exp,
    "sigmoid": expit,
    "softplus": _softplus,
}
"""What follows the sum of the leaf values."""


@dataclass(frozen=True)
class Tree:
    """Structure of one tree of N nodes.

    Attributes
    ----------
    left, right : (N,) numbers of the children; -1 at a leaf. Smaller values of the column go left
    column : (N,) input column that the node splits on; -1 at a leaf, or where several columns are combined
    rows : (N,) training rows of the node; zeros where the model does not store them
    """

    left: Numbers
    right: Numbers
    column: Numbers
    rows: Array

    @cached_property
    def parent(self) -> Numbers:
        """(N,) number of the parent; the root is its own."""
        parent, inner = np.zeros(len(self.left), dtype=np.intp), np.flatnonzero(self.left >= 0)
        parent[self.left[inner]] = parent[self.right[inner]] = inner
        return parent

    def levels(self) -> list[Numbers]:
        """Numbers of the inner nodes, by depth from the root."""
        found, nodes = [], np.zeros(1, dtype=np.intp)
        while (nodes := nodes[self.left[nodes] >= 0]).size:
            found.append(nodes)
            nodes = np.concatenate([self.left[nodes], self.right[nodes]])
        return found


class TreeLibrary(ABC):
    """The trees of a fitted model.

    Attributes
    ----------
    model : the estimator or booster; `write` changes it
    link : name of what follows the sum, one of ``LINKS``
    scale : factor on the sum before the link
    scores : whether the model is a classifier, whose probability of the second class is the prediction
    sizes : nodes of each tree
    values : (nodes,) what a leaf adds to the prediction; unused at inner nodes
    base : what is added to the sum of the leaves
    base_tree : tree whose leaves take a change of the base; None where the library stores a base of its own; -1 for all
        trees in equal parts
    several_inputs : whether the model may take several inputs
    eps : relative spacing of the library's arithmetic
    constraints : by column, 1 or -1 where predictions must rise or fall with it
    """

    link: str = "identity"
    scale: float = 1.0
    base: float = 0.0
    base_tree: int | None = None
    several_inputs: bool = False
    eps: float = 2.0**-52
    scores: bool = False
    sizes: Sequence[int]
    values: Array

    def __init__(self, model: Any) -> None:
        self.model = model
        self.scores = is_classifier(model) if hasattr(model, "__sklearn_tags__") else False

    def memo(self) -> dict[int, Any]:
        """Parts of the model that are copied already, for `copy.deepcopy`."""
        return {}

    def twin(self, model: Any) -> Self:
        """The trees of a deep copy of the model."""
        return type(self)(model)

    @abstractmethod
    def trees(self) -> Iterator[Tree]:
        """Yield the structure of each tree."""

    @abstractmethod
    def leaves(self, x: Any) -> Numbers:
        """(rows, trees) numbers of the leaves, within each tree."""

    @abstractmethod
    def write(self, values: Array, base: float) -> None:
        """Put new leaf values, and a new base where there is one, into the model."""

    @abstractmethod
    def content(self) -> Any:
        """Splits and leaf values, for a fingerprint: bytes, text, arrays, or lists of them."""

    def predict(self, x: Any) -> NDArray[Any]:
        """(rows,) what the model itself predicts; of a classifier the probability of the second class."""
        if self.scores:
            return np.asarray(self.model.predict_proba(x))[:, 1]
        return np.asarray(self.model.predict(x)).ravel()

    def contributions(self, x: Any) -> Array:
        """(rows, columns) TreeSHAP values, by the library itself."""
        raise ValueError(
            f"`shap=True` was given, but {type(self.model).__name__} computes no TreeSHAP values. Leave it out: the "
            "split by column needs no other library."
        )

    @property
    def operations(self) -> Sequence[str]:
        """Names of what follows the sum."""
        return () if self.link == "identity" else (self.link,)

    @property
    def constraints(self) -> Sequence[int]:
        return ()

    @property
    def columns(self) -> Sequence[str] | None:
        """Names of the input columns, where the model has them."""
        names = getattr(self.model, "feature_names_in_", None)
        return None if names is None else [str(name) for name in names]

    @cached_property
    def starts(self) -> Numbers:
        """(trees + 1,) number of each tree's first node among the nodes of all trees."""
        return np.array([0, *accumulate(self.sizes)], dtype=np.intp)

    def parts(self, values: Array) -> Iterator[Array]:
        """Values of all nodes, tree by tree."""
        return (values[start:stop] for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True))

    def finish(self, z: Array) -> Array:
        """Prediction of a sum."""
        return LINKS[self.link](self.scale * z)


def one_output(outputs: int, what: str) -> None:
    """Raise unless the model has one output."""
    if outputs != 1:
        raise ValueError(
            f"the {what} predicts {outputs} outputs or classes; a tree ensemble must have one output or two classes. "
            "Fit one model for each output."
        )


def open_trees(model: Any) -> TreeLibrary:
    """Read the trees of a fitted model."""
    origins = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    library: Callable[[Any], TreeLibrary]
    if origins & {("lightgbm", "Booster"), ("lightgbm", "LGBMModel")}:
        from esvdfair.models.tree_lightgbm import LightGBMTrees as library
    elif origins & {("xgboost", "Booster"), ("xgboost", "XGBModel")}:
        from esvdfair.models.tree_xgboost import XGBoostTrees as library
    elif ("catboost", "CatBoost") in origins:
        from esvdfair.models.tree_catboost import CatBoostTrees as library
    else:
        from esvdfair.models.tree_sklearn import open_sklearn as library
    return library(model)
