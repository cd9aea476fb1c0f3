"""Tree ensembles of LightGBM, XGBoost, CatBoost and scikit-learn: their leaves, read and written the same way.

Every ensemble predicts ``link(base + Σ_t value[leaf_t(x)])``. A `TreeLibrary` numbers the nodes of all trees one after
the other, says which leaf each row reaches, and writes new leaf values into its model. No library is imported here
before a model of it is given.
"""

import json
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit
from sklearn import ensemble, tree
from sklearn.base import is_classifier
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.utils.validation import check_is_fitted

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
    eps : relative spacing of the library's arithmetic
    constraints : by column, 1 or -1 where predictions must rise or fall with it
    """

    link: str = "identity"
    scale: float = 1.0
    base: float = 0.0
    base_tree: int | None = None
    eps: float = 2.0**-52
    scores: bool = False
    sizes: Sequence[int]
    values: Array

    def __init__(self, model: Any) -> None:
        self.model = model
        self.scores = is_classifier(model) if hasattr(model, "__sklearn_tags__") else False

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


# --- scikit-learn -----------------------------------------------------------------------------------------------------

_SINGLE = (tree.DecisionTreeRegressor, tree.DecisionTreeClassifier)  # ExtraTree is a DecisionTree
_FORESTS = (
    ensemble.RandomForestRegressor, ensemble.RandomForestClassifier, ensemble.ExtraTreesRegressor,
    ensemble.ExtraTreesClassifier,
)  # fmt: skip
_BAGGING = (ensemble.BaggingRegressor, ensemble.BaggingClassifier)
_BOOSTING = (ensemble.GradientBoostingRegressor, ensemble.GradientBoostingClassifier)
_HISTOGRAM = (ensemble.HistGradientBoostingRegressor, ensemble.HistGradientBoostingClassifier)


class SklearnTrees(TreeLibrary):
    """A decision tree, a forest, bagged trees or GradientBoosting of scikit-learn."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        check_is_fitted(model)
        name = type(model).__name__
        boosting, scores = isinstance(model, _BOOSTING), self.scores
        members = [model] if isinstance(model, _SINGLE) else list(np.ravel(model.estimators_))
        if not all(isinstance(member, _SINGLE) for member in members):
            raise TypeError(f"the {name} holds models other than decision trees; only bagged trees are supported.")
        one_output(members[0].n_outputs_, name)
        if scores:
            one_output(max(len(model.classes_) - 1, *(0 if boosting else len(m.classes_) - 1 for m in members)), name)
        self._trees = [member.tree_ for member in members]
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
        self.values = np.concatenate([part.value[:, 0, self._class] for part in self._trees]) * self._factor

    @property
    def constraints(self) -> Sequence[int]:
        return tuple(getattr(self.model, "monotonic_cst", None) or ())

    def trees(self) -> Iterator[Tree]:
        chosen = getattr(self.model, "estimators_features_", [None] * len(self._trees))
        for part, columns in zip(self._trees, chosen, strict=True):
            column = np.where(part.children_left < 0, -1, part.feature)
            if columns is not None:  # bagging gives each tree some of the columns
                column = np.where(column < 0, -1, np.asarray(columns)[column])
            yield Tree(part.children_left, part.children_right, column, part.n_node_samples.astype(np.float64))

    def leaves(self, x: Any) -> Numbers:
        if not isinstance(self.model, _BAGGING):
            return np.asarray(self.model.apply(x), dtype=np.intp).reshape(len(x), -1)
        x = np.asarray(x, dtype=np.float32)
        chosen = zip(self._trees, self.model.estimators_features_, strict=True)
        return np.stack([part.apply(np.ascontiguousarray(x[:, columns])) for part, columns in chosen], axis=1)

    def write(self, values: Array, base: float) -> None:
        for part, new in zip(self._trees, self.parts(values), strict=True):
            leaf = part.children_left < 0
            part.value[leaf, 0, self._class] = new[leaf] / self._factor
            if self._class:
                part.value[leaf, 0, 0] = 1 - part.value[leaf, 0, 1]

    def content(self) -> Any:
        names = ("children_left", "children_right", "feature", "threshold", "value")
        return [[np.asarray(getattr(part, name)) for name in names] for part in self._trees]


class HistogramTrees(TreeLibrary):
    """HistGradientBoosting of scikit-learn."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        check_is_fitted(model)
        one_output(model.n_trees_per_iteration_, type(model).__name__)
        self._nodes = [step[0].nodes for step in model._predictors]
        self.sizes = [len(nodes) for nodes in self._nodes]
        self.values = np.concatenate([nodes["value"] for nodes in self._nodes])
        self.base = float(np.ravel(model._baseline_prediction)[0])
        poisson = model.loss in ("poisson", "gamma")
        self.link = "sigmoid" if self.scores else "exp" if poisson else "identity"

    @property
    def constraints(self) -> Sequence[int]:
        given = self.model.monotonic_cst
        if isinstance(given, dict):
            return [given.get(name, 0) for name in self.columns or ()]
        return () if given is None else list(given)

    def trees(self) -> Iterator[Tree]:
        for nodes in self._nodes:
            leaf = nodes["is_leaf"].astype(bool)
            left, right = (np.where(leaf, -1, nodes[side].astype(np.intp)) for side in ("left", "right"))
            column = np.where(leaf, -1, self._column_order()[nodes["feature_idx"]])
            yield Tree(left, right, column, nodes["count"].astype(np.float64))

    def _column_order(self) -> Numbers:
        """Input column of each column that the trees see: categorical ones come first there."""
        categorical = self.model.is_categorical_
        if self.model._preprocessor is None or categorical is None:
            return np.arange(self.model.n_features_in_)
        return np.concatenate([np.flatnonzero(categorical), np.flatnonzero(~np.asarray(categorical))])

    def leaves(self, x: Any) -> Numbers:
        from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

        table = np.asarray(self.model._preprocess_X(x, reset=False), dtype=np.float64)
        known, places = self.model._bin_mapper.make_known_categories_bitsets()
        found = np.empty((len(table), len(self.sizes)), dtype=np.intp)
        for place, (step, nodes) in enumerate(zip(self.model._predictors, self._nodes, strict=True)):
            numbered = nodes.copy()
            numbered["value"] = np.arange(len(nodes))  # a tree whose leaves predict their own number
            stand_in = TreePredictor(numbered, step[0].binned_left_cat_bitsets, step[0].raw_left_cat_bitsets)
            found[:, place] = stand_in.predict(table, known, places, 1)
        return found

    def write(self, values: Array, base: float) -> None:
        for nodes, new in zip(self._nodes, self.parts(values), strict=True):
            leaf = nodes["is_leaf"].astype(bool)
            nodes["value"][leaf] = new[leaf]
        self.model._baseline_prediction = np.full_like(self.model._baseline_prediction, base)

    def content(self) -> Any:
        names = ("left", "right", "feature_idx", "num_threshold", "value")
        bitsets = [step[0].raw_left_cat_bitsets for step in self.model._predictors]
        return [self.base, bitsets, [[np.asarray(nodes[name]) for name in names] for nodes in self._nodes]]


# --- LightGBM ---------------------------------------------------------------------------------------------------------

_LIGHTGBM_LINKS = {
    **dict.fromkeys(("poisson", "gamma", "tweedie"), "exp"),
    **dict.fromkeys(("binary", "cross_entropy"), "sigmoid"),
    "cross_entropy_lambda": "softplus",
}


class LightGBMTrees(TreeLibrary):
    """A LightGBM estimator or Booster. Inner nodes come first in a tree, leaves after them."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._booster = model.booster_ if hasattr(type(model), "booster_") else model
        head, *sections = re.split(r"\nTree=\d+\n", self._booster.model_to_string())
        about = dict(line.partition("=")[::2] for line in head.splitlines())
        one_output(int(about["num_tree_per_iteration"]), type(model).__name__)
        self._sections = [
            dict(line.partition("=")[::2] for line in s.partition("\n\n")[0].splitlines()) for s in sections
        ]
        if any(section.get("is_linear") == "1" for section in self._sections):
            raise ValueError(
                "the LightGBM model has linear trees, whose leaves hold linear models instead of values. Fit it with "
                "linear_tree=False."
            )
        objective, *options = about.get("objective", "").split() or [""]
        if "sqrt" in options:
            raise ValueError(
                "the LightGBM model was fitted with reg_sqrt=True, and squares the sum of its leaves. Fit it without."
            )
        self.link = _LIGHTGBM_LINKS.get(objective, "identity")
        self.scale = float(next((o.partition(":")[2] for o in options if o.startswith("sigmoid:")), 1.0))
        self._leaf_counts = [int(section["num_leaves"]) for section in self._sections]
        self._first_leaves: Numbers = np.array(self._leaf_counts, dtype=np.intp) - 1
        self._divisor = len(sections) if "average_output" in about else 1
        self.base_tree = -1 if "average_output" in about else 0  # the first tree holds the average it starts from
        self.sizes = [2 * leaves - 1 for leaves in self._leaf_counts]
        parts = [
            np.concatenate([np.zeros(n - 1), _numbers(section, "leaf_value")])
            for n, section in zip(self._leaf_counts, self._sections, strict=True)
        ]
        self.values = np.concatenate(parts) / self._divisor
        self._constraints = [int(word) for word in about.get("monotone_constraints", "").split()]
        self._names: list[str] = about["feature_names"].split()

    def twin(self, model: Any) -> Self:
        booster = model.booster_ if hasattr(type(model), "booster_") else model
        booster.best_iteration = self._booster.best_iteration  # which a deep copy forgets
        return type(self)(model)

    @property
    def constraints(self) -> Sequence[int]:
        return self._constraints

    @property
    def columns(self) -> list[str]:
        return self._names

    def trees(self) -> Iterator[Tree]:
        for n, section in zip(self._leaf_counts, self._sections, strict=True):
            none = np.full(n, -1, dtype=np.intp)
            sides = []
            for name in ("left_child", "right_child"):
                child = _numbers(section, name).astype(np.intp)
                sides.append(np.concatenate([np.where(child < 0, n - 2 - child, child), none]))  # ~leaf, from n - 1 on
            column = np.concatenate([_numbers(section, "split_feature").astype(np.intp), none])
            counts = [_numbers(section, name) for name in ("internal_count", "leaf_count")]
            yield Tree(sides[0], sides[1], column, np.concatenate(counts) if n > 1 else np.zeros(1))

    def leaves(self, x: Any) -> Numbers:
        found = np.asarray(self.model.predict(x, pred_leaf=True), dtype=np.intp).reshape(-1, len(self.sizes))
        return self._first_leaves + found

    def write(self, values: Array, base: float) -> None:
        for t, new in enumerate(self.parts(values)):
            for leaf, value in enumerate((new[self._leaf_counts[t] - 1 :] * self._divisor).tolist()):
                self._booster.set_leaf_output(t, leaf, value)

    def content(self) -> Any:
        return self._booster.model_to_string()


def _numbers(section: dict[str, str], name: str) -> Array:
    return np.array(section.get(name, "").split(), dtype=np.float64)


# --- XGBoost ----------------------------------------------------------------------------------------------------------

_XGBOOST_LINKS = {
    **dict.fromkeys(("count:poisson", "reg:gamma", "reg:tweedie"), "exp"),
    **dict.fromkeys(("reg:logistic", "binary:logistic", "binary:logitraw"), "sigmoid"),
}
_INVERSE: dict[str, Callable[[float], float]] = {"identity": float, "exp": np.log, "sigmoid": logit}


class XGBoostTrees(TreeLibrary):
    """An XGBoost estimator or Booster, edited by its own JSON format."""

    eps = 2.0**-23

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._booster = model.get_booster() if hasattr(model, "get_booster") else model
        self._saved = json.loads(bytes(self._booster.save_raw(raw_format="json")))
        learner = self._saved["learner"]
        booster, about = learner["gradient_booster"], learner["learner_model_param"]
        if booster["name"] == "gblinear":
            raise ValueError(
                "the XGBoost model is linear (booster='gblinear') and has no trees. Use booster='gbtree', or a linear "
                "model of scikit-learn."
            )
        one_output(max(int(about["num_class"]), int(about.get("num_target", 1))), type(model).__name__)
        trees = booster.get("gbtree", booster)["model"]
        rounds = None if model is self._booster else getattr(model, "best_iteration", None)
        parallel = int(trees["gbtree_model_param"]["num_parallel_tree"])
        self._parts = trees["trees"] if rounds is None else trees["trees"][: (rounds + 1) * parallel]
        self._drops = booster.get("weight_drop", [1.0] * len(trees["trees"]))  # dart weighs its trees
        objective = learner["objective"]["name"]
        self.link = _XGBOOST_LINKS.get(objective, "identity")
        self._stored = self.link  # base_score is stored after this link
        if objective == "binary:logitraw":
            self.link = "identity"
        self.base = float(_INVERSE[self._stored](float(about["base_score"].strip("[]"))))
        self.sizes = [len(part["left_children"]) for part in self._parts]
        self.values = np.concatenate(
            [
                drop * np.array(part["split_conditions"], dtype=np.float32).astype(np.float64)
                for part, drop in zip(self._parts, self._drops, strict=False)
            ]
        )

    @property
    def constraints(self) -> Sequence[int]:
        settings = json.loads(self._booster.save_config())["learner"]["gradient_booster"]
        found = settings.get("gbtree", settings)["tree_train_param"]["monotone_constraints"]
        return [int(word) for word in found.strip("()").split(",") if word]

    @property
    def columns(self) -> Sequence[str] | None:
        return self._booster.feature_names  # type: ignore[no-any-return]

    def trees(self) -> Iterator[Tree]:
        for part in self._parts:
            left, right, column = (np.array(part[key]) for key in ("left_children", "right_children", "split_indices"))
            # A row counts as its second derivative, which is 1 for a squared error and at most 1/4 for a logistic one.
            rows = np.array(part["sum_hessian"]) * (4 if self._stored == "sigmoid" else 1)
            yield Tree(left, right, np.where(left < 0, -1, column), rows)

    def leaves(self, x: Any) -> Numbers:
        if self.model is not self._booster:
            found = self.model.apply(x)
        else:
            found = self._booster.predict(self._matrix(x), pred_leaf=True)
        return np.asarray(found).reshape(-1, len(self.sizes)).astype(np.intp)

    def predict(self, x: Any) -> NDArray[Any]:
        if self.model is self._booster:
            return np.asarray(self._booster.predict(self._matrix(x)))
        return super().predict(x)

    def _matrix(self, x: Any) -> Any:
        import xgboost

        names = self._booster.feature_names
        if hasattr(x, "columns"):
            x, names = (x.to_numpy(), None) if names is None else (x, None)
        return xgboost.DMatrix(x, feature_names=names, enable_categorical=True)

    def write(self, values: Array, base: float) -> None:
        for part, drop, new in zip(self._parts, self._drops, self.parts(values), strict=False):
            for node in np.flatnonzero(np.array(part["left_children"]) < 0).tolist():
                part["split_conditions"][node] = part["base_weights"][node] = float(np.float32(new[node] / drop))
        stored = float(LINKS[self._stored](np.array([base]))[0])
        about = self._saved["learner"]["learner_model_param"]
        about["base_score"] = f"[{stored!r}]" if about["base_score"].startswith("[") else repr(stored)
        self._booster.load_model(bytearray(json.dumps(self._saved).encode()))

    def content(self) -> Any:
        return bytes(self._booster.save_raw(raw_format="ubj"))


# --- CatBoost ---------------------------------------------------------------------------------------------------------


class CatBoostTrees(TreeLibrary):
    """A CatBoost model. Inner nodes come first in a tree, leaves after them."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        check_is_fitted(model)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.json"
            model.save_model(str(path), format="json")
            self._saved = json.loads(path.read_text("utf-8"))
        self._leaf_counts = [int(count) for count in model.get_tree_leaf_counts()]
        self._first_leaves: Numbers = np.array(self._leaf_counts, dtype=np.intp) - 1
        values = np.asarray(model.get_leaf_values())
        one_output(len(values) // sum(self._leaf_counts), type(model).__name__)
        self._scale, self.base = model.get_scale_and_bias()
        self.sizes = [2 * count - 1 for count in self._leaf_counts]
        stops = np.cumsum(self._leaf_counts)
        parts = np.split(values * self._scale, stops[:-1])
        self.values = np.concatenate([np.concatenate([np.zeros(len(part) - 1), part]) for part in parts])
        self._loss = str(model.get_all_params().get("loss_function", "RMSE")).partition(":")[0]
        poisson = self._loss in ("Poisson", "Tweedie")
        self.link = "sigmoid" if self._loss in ("Logloss", "CrossEntropy") else "exp" if poisson else "identity"

    @property
    def constraints(self) -> Sequence[int]:
        found = self.model.get_all_params().get("monotone_constraints", {})
        return [int(found.get(name, 0)) for name in self.columns] if isinstance(found, dict) else list(found)

    @property
    def columns(self) -> Sequence[str]:
        return [str(name) for name in self.model.feature_names_]

    def trees(self) -> Iterator[Tree]:
        if "oblivious_trees" in self._saved:
            yield from map(self._symmetric, self._saved["oblivious_trees"])
        else:
            yield from map(self._nested, self._saved["trees"])

    def _symmetric(self, saved: Any) -> Tree:
        """One split for each level; the first decides the lowest bit of the leaf's number."""
        columns = [self._split_columns[split["split_index"]] for split in saved["splits"] or ()]
        depth, inner = len(columns), 2 ** len(columns) - 1
        left, right, column = (np.full(2 * inner + 1, -1, dtype=np.intp) for _ in range(3))
        rows = np.zeros(2 * inner + 1)
        rows[inner:] = saved.get("leaf_weights", 0.0)
        for level in reversed(range(depth)):
            low = np.arange(2**level)  # nodes of a level are numbered by the bits that are decided there
            here, below = 2**level - 1 + low, 2 ** (level + 1) - 1 + low
            left[here], right[here], column[here] = below, below + 2**level, columns[level]
            rows[here] = rows[left[here]] + rows[right[here]]
        return Tree(left, right, column, rows)

    def _nested(self, saved: Any) -> Tree:
        """Inner nodes and leaves are numbered as they are met, left before right."""
        inner: list[Any] = []
        leaves: list[Any] = []
        links: list[list[int]] = []

        def visit(node: Any) -> int:  # ~number of a leaf, number of an inner node
            if "value" in node:
                leaves.append(node.get("weight", 0.0))
                return ~(len(leaves) - 1)
            place = len(inner)
            inner.append(self._split_columns[node["split"]["split_index"]])
            links.append([])
            links[place] = [visit(node["left"]), visit(node["right"])]
            return place

        visit(saved)
        n = len(leaves)
        child = np.array(links, dtype=np.intp).reshape(-1, 2)
        child = np.concatenate([np.where(child < 0, n - 2 - child, child), np.full((n, 2), -1)])
        rows = np.concatenate([np.zeros(n - 1), leaves])
        for node in reversed(range(n - 1)):
            rows[node] = rows[child[node]].sum()
        return Tree(child[:, 0], child[:, 1], np.array([*inner, *[-1] * n], dtype=np.intp), rows)

    @cached_property
    def _split_columns(self) -> list[int]:
        """Input column of each split that the model knows; -1 for a combination of several columns."""
        about = self._saved["features_info"]
        categorical = about.get("categorical_features") or []
        found = [f["flat_feature_index"] for f in about.get("float_features") or [] for _ in f["borders"] or []]
        found += [f["flat_feature_index"] for f in categorical for _ in f.get("values") or []]
        for statistic in about.get("ctrs") or []:
            places = {element.get("cat_feature_index") for element in statistic["elements"]}
            place = places.pop() if len(places) == 1 else None
            found += [-1 if place is None else categorical[place]["flat_feature_index"]] * len(statistic["borders"])
        return found

    def leaves(self, x: Any) -> Numbers:
        return self._first_leaves + np.asarray(self.model.calc_leaf_indexes(x), dtype=np.intp)

    def write(self, values: Array, base: float) -> None:
        new = [part[count - 1 :] for part, count in zip(self.parts(values), self._leaf_counts, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.cbm")
            self.model.save_model(path)
            self.model.load_model(path)  # a copy in memory cannot be edited, one from a file can
        self.model.set_leaf_values(np.concatenate(new) / self._scale)
        self.model.set_scale_and_bias(self._scale, base)

    def content(self) -> Any:
        parts = [json.dumps(self._saved[name], sort_keys=True) for name in ("features_info", "scale_and_bias")]
        return [*parts, json.dumps(self._saved.get("oblivious_trees") or self._saved["trees"], sort_keys=True)]


# --- which of them ----------------------------------------------------------------------------------------------------


def library_of(model: Any) -> type[TreeLibrary] | None:
    """Which of the libraries a model belongs to; None where it is no tree ensemble."""
    if isinstance(model, _HISTOGRAM):
        return HistogramTrees
    if isinstance(model, (*_SINGLE, *_FORESTS, *_BAGGING, *_BOOSTING)):
        return SklearnTrees
    origins = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    if origins & {("lightgbm", "Booster"), ("lightgbm", "LGBMModel")}:
        return LightGBMTrees
    if origins & {("xgboost", "Booster"), ("xgboost", "XGBModel")}:
        return XGBoostTrees
    return CatBoostTrees if ("catboost", "CatBoost") in origins else None


def open_trees(model: Any) -> TreeLibrary:
    """Read the trees of a fitted model."""
    library = library_of(model)
    if library is None:
        raise TypeError(
            f"cannot repair a {type(model).__name__}. Of ensembles, trees, forests, bagged trees and gradient boosting "
            "are supported; the scores of others can be changed by esvdfair.baselines."
        )
    return library(model)
