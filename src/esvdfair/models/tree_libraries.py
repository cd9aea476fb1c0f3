"""What is asked of a library of tree ensembles, and scikit-learn's answers; the boosters' are in `tree_boosters`.

Every ensemble predicts ``link(base + Σ_t value[leaf_t(x)])``. A `TreeLibrary` numbers the nodes of all trees one after
the other, says which leaf each row reaches, and writes new leaf values into its model.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from sklearn import ensemble, tree
from sklearn.base import is_classifier
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.utils import get_tags
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted, validate_data

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]

LINKS: dict[str, Callable[[Array], Array]] = {
    "identity": np.positive,
    "exp": np.exp,
    "sigmoid": expit,
    "softplus": partial(np.logaddexp, 0.0),
}
"""What follows the sum of the leaf values."""


@dataclass(frozen=True)
class Tree:
    """Structure of one tree of N nodes; node 0 is the root."""

    left: Numbers  # (N,) number of the child that smaller values of the column go to; -1 at a leaf
    right: Numbers
    column: Numbers  # (N,) input column of the split; -1 at a leaf, or where several columns are combined
    rows: Array  # (N,) training rows; zeros where the model does not store them

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

    def add_up(self, *sums: Array) -> None:
        """Give every inner node the sum of the leaves below it, in place."""
        for nodes in reversed(self.levels()):
            for each in sums:
                each[nodes] = each[self.left[nodes]] + each[self.right[nodes]]


class TreeLibrary(ABC):
    """The trees of a fitted model."""

    link = "identity"  # what follows the sum, one of LINKS
    scale = 1.0  # factor on the sum before the link
    base = 0.0  # what is added to the sum of the leaves
    base_tree: int | None = None  # whose leaves take a change of the base; -1: all in equal parts; None: it is stored
    several_inputs = False  # whether the model may take several inputs
    eps = 2.0**-52  # relative spacing of the library's arithmetic
    columns: Sequence[str] | None = None  # names of the input columns, where the model has them
    categories: Sequence[bool] = ()  # by column, whether a table of it must have the dtype category
    texts: Sequence[str] = ()  # names of columns of categories that must be text or whole numbers
    constraints: Sequence[int] = ()  # by column, 1 or -1 where predictions must rise or fall with it
    sizes: Sequence[int]  # nodes of each tree
    values: Array  # (nodes,) what a leaf adds to the prediction; unused at inner nodes

    def __init__(self, model: Any) -> None:
        self.model = model  # estimator or booster, which `write` changes
        # Of a classifier the probability of the second class is the prediction.
        self.scores = hasattr(model, "predict_proba") and is_classifier(model)

    @abstractmethod
    def trees(self) -> Iterator[Tree]:
        """Yield the structure of each tree."""

    @abstractmethod
    def leaves(self, x: Any) -> Numbers:
        """(rows, trees) numbers of the leaves, within each tree."""

    def add(self, leaves: Numbers) -> Array:
        """(rows,) base and values of leaves (trees, rows), added as the library adds them."""
        return np.asarray(self.values[leaves].sum(axis=0) + self.base)

    @abstractmethod
    def write(self, values: Array, base: float) -> None:
        """Put new leaf values, and a new base where there is one, into the model."""

    @abstractmethod
    def content(self) -> Any:
        """Splits and leaf values, for a fingerprint: bytes, text, arrays, or lists of them."""

    def memo(self) -> dict[int, Any]:
        """Parts of the model that are copied already, for `copy.deepcopy`."""
        return {}

    def predict(self, x: Any) -> NDArray[Any]:
        """(rows,) what the model itself predicts."""
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

    def finish(self, z: Array) -> Array:
        """Prediction of a sum."""
        return LINKS[self.link](self.scale * z)

    @cached_property
    def starts(self) -> Numbers:
        """(trees + 1,) number of each tree's first node among the nodes of all trees."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.intp)

    def parts(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Values of all nodes, tree by tree."""
        return np.split(values, self.starts[1:-1])


def one_output(outputs: int, what: str) -> None:
    """Raise unless the model has one output."""
    if outputs != 1:
        raise ValueError(
            f"the {what} predicts several outputs or more than two classes; a tree ensemble must have one output or "
            "two classes. Fit one model for each output."
        )


def open_trees(model: Any) -> TreeLibrary:
    """Read the trees of a fitted model; `TypeError` if it is of another kind."""
    origins = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    library: Callable[[Any], TreeLibrary]
    if origins & {("lightgbm", "Booster"), ("lightgbm", "LGBMModel")}:
        from esvdfair.models.tree_boosters import LightGBMTrees as library
    elif origins & {("xgboost", "Booster"), ("xgboost", "XGBModel")}:
        from esvdfair.models.tree_boosters import XGBoostTrees as library
    elif ("catboost", "CatBoost") in origins:
        from esvdfair.models.tree_boosters import CatBoostTrees as library
    elif isinstance(model, _HISTOGRAM):
        library = HistogramTrees
    elif isinstance(model, (*_SINGLE, *_SEVERAL, *_BOOSTING)):
        library = SklearnTrees
    else:
        raise TypeError(
            f"{type(model).__name__} cannot be repaired. Of ensembles, trees, forests, bagged trees and gradient "
            "boosting are supported; the scores of others can be changed by esvdfair.baselines."
        )
    return library(model)


# --- scikit-learn -----------------------------------------------------------------------------------------------------

_SINGLE = (tree.DecisionTreeRegressor, tree.DecisionTreeClassifier)  # ExtraTree is a DecisionTree
_SEVERAL = (
    ensemble.RandomForestRegressor, ensemble.RandomForestClassifier, ensemble.ExtraTreesRegressor,
    ensemble.ExtraTreesClassifier, ensemble.BaggingRegressor, ensemble.BaggingClassifier,
)  # fmt: skip
_BOOSTING = (ensemble.GradientBoostingRegressor, ensemble.GradientBoostingClassifier)
_HISTOGRAM = (ensemble.HistGradientBoostingRegressor, ensemble.HistGradientBoostingClassifier)


class _SklearnLibrary(TreeLibrary):
    """Names of columns and monotone constraints, which all estimators store the same way."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        check_is_fitted(model)
        names = getattr(model, "feature_names_in_", None)
        self.columns = None if names is None else [str(name) for name in names]
        given = getattr(model, "monotonic_cst", None)
        if isinstance(given, dict):
            given = [given.get(name, 0) for name in self.columns or ()]
        self.constraints = () if given is None else [int(sign) for sign in given]


class SklearnTrees(_SklearnLibrary):
    """A decision tree, a forest, bagged trees or GradientBoosting of scikit-learn."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        name = type(model).__name__
        boosting, scores = isinstance(model, _BOOSTING), self.scores
        members = [model] if isinstance(model, _SINGLE) else list(np.ravel(model.estimators_))
        if not all(isinstance(member, _SINGLE) for member in members):
            raise TypeError(f"the {name} holds models other than decision trees; only bagged trees are supported.")
        one_output(members[0].n_outputs_, name)
        if scores:
            one_output(max(len(model.classes_) - 1, *(0 if boosting else len(m.classes_) - 1 for m in members)), name)
        self._trees = [member.tree_ for member in members]
        self._chosen = getattr(model, "estimators_features_", [None] * len(members))  # columns of each bagged tree
        self._factor = model.learning_rate if boosting else 1 / len(members)
        self._class = int(scores and not boosting)  # the leaf holds a probability of each class
        self.base_tree = 0 if boosting else -1
        if boosting:
            init = model.init_
            if not isinstance(init, str | DummyRegressor | DummyClassifier):
                raise ValueError(
                    f"the {name} starts from another model, init={init!r}. Only a constant start is supported: fit it "
                    "with init=None or init='zero'."
                )
            self.base = float(model._raw_predict_init(np.zeros((1, model.n_features_in_)))[0, 0])
            self.link = "sigmoid" if scores else "identity"
            self.scale = 2.0 if model.loss == "exponential" else 1.0
        self.sizes = [part.node_count for part in self._trees]

    @cached_property
    def values(self) -> Array:  # type: ignore[override]  # that of a large forest takes half a second, and a copy needs none
        values: Array = np.concatenate([part.value[:, 0, self._class] for part in self._trees])
        values *= self._factor
        return values

    def trees(self) -> Iterator[Tree]:
        for part, chosen in zip(self._trees, self._chosen, strict=True):
            column = part.feature if chosen is None else np.asarray(chosen)[part.feature]
            column = np.where(part.children_left < 0, -1, column)
            yield Tree(part.children_left, part.children_right, column, part.n_node_samples.astype(np.float64))

    def leaves(self, x: Any) -> Numbers:
        finite = "allow-nan" if get_tags(self.model).input_tags.allow_nan else True
        x = validate_data(self.model, x, reset=False, dtype=np.float32, accept_sparse="csr", ensure_all_finite=finite)
        first = self._reached(np.zeros(1, dtype=np.intp), x)[0]
        order = np.argsort(first)  # neighbours now take similar paths, which stay in the processor's cache
        x, places = x[order], np.arange(len(self._trees))
        jobs = Parallel(n_jobs=getattr(self.model, "n_jobs", None), require="sharedmem")
        parts = jobs(delayed(self._reached)(some, x) for some in np.array_split(places, min(len(places), 32)))
        found = np.empty((len(places), len(order)), dtype=np.intp)
        found[:, order] = np.concatenate(parts)
        return found.T

    def _reached(self, places: Numbers, x: Any) -> Numbers:
        """(trees, rows) numbers of the leaves of some trees."""
        chosen = ((self._trees[place], self._chosen[place]) for place in places)
        return np.stack([part.apply(x if columns is None else x[:, columns]) for part, columns in chosen])

    def memo(self) -> dict[int, Any]:
        return {id(part): copy.copy(part) for part in self._trees}  # `deepcopy` alone copies each twice

    def write(self, values: Array, base: float) -> None:
        for part, new in zip(self._trees, self.parts(values), strict=True):
            leaf = part.children_left < 0
            part.value[leaf, 0, self._class] = new[leaf] / self._factor
            if self._class:
                part.value[leaf, 0, 0] = 1 - part.value[leaf, 0, 1]

    def content(self) -> Any:
        names = ("children_left", "children_right", "feature", "threshold", "value")
        return [[np.asarray(getattr(part, name)) for name in names] for part in self._trees]


class HistogramTrees(_SklearnLibrary):
    """HistGradientBoosting of scikit-learn."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        one_output(model.n_trees_per_iteration_, type(model).__name__)
        self._predictors = [step[0] for step in model._predictors]
        self.sizes = [len(part.nodes) for part in self._predictors]
        self.values = np.concatenate([part.nodes["value"] for part in self._predictors])
        self.base = float(np.ravel(model._baseline_prediction)[0])
        poisson = model.loss in ("poisson", "gamma")
        self.link = "sigmoid" if self.scores else "exp" if poisson else "identity"

    def trees(self) -> Iterator[Tree]:
        categorical = self.model.is_categorical_
        moved = self.model._preprocessor is not None and categorical is not None  # categorical columns come first
        order = np.argsort(~categorical, kind="stable") if moved else np.arange(self.model.n_features_in_)
        for nodes in (part.nodes for part in self._predictors):
            left, right, column = (
                np.where(nodes["is_leaf"], -1, found)
                for found in (nodes["left"].astype(int), nodes["right"].astype(int), order[nodes["feature_idx"]])
            )
            yield Tree(left, right, column, nodes["count"].astype(np.float64))

    def leaves(self, x: Any) -> Numbers:
        table = np.asarray(self.model._preprocess_X(x, reset=False), dtype=np.float64)
        known = self.model._bin_mapper.make_known_categories_bitsets()
        found = np.empty((len(self.sizes), len(table)), dtype=np.intp)
        for place, part in enumerate(self._predictors):
            numbered = copy.copy(part)  # a tree whose leaves predict their own number
            numbered.nodes = part.nodes.copy()
            numbered.nodes["value"] = np.arange(len(part.nodes))
            found[place] = numbered.predict(table, *known, 1)
        return found.T

    def write(self, values: Array, base: float) -> None:
        for part, new in zip(self._predictors, self.parts(values), strict=True):
            leaf = part.nodes["is_leaf"].astype(bool)
            part.nodes["value"][leaf] = new[leaf]
        self.model._baseline_prediction = np.full_like(self.model._baseline_prediction, base)

    def content(self) -> Any:
        names = ("left", "right", "feature_idx", "num_threshold", "value")
        arrays = [[np.asarray(part.nodes[name]) for name in names] for part in self._predictors]
        return [self.base, [part.raw_left_cat_bitsets for part in self._predictors], arrays]
