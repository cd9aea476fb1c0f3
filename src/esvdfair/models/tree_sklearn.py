"""Decision trees, forests, bagged trees and gradient boosting of scikit-learn."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn import ensemble, tree
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.utils.validation import check_is_fitted

from esvdfair.models.tree_libraries import Array, Numbers, Tree, TreeLibrary, one_output

_SINGLE = (tree.DecisionTreeRegressor, tree.DecisionTreeClassifier)  # ExtraTree is a DecisionTree
_FORESTS = (
    ensemble.RandomForestRegressor, ensemble.RandomForestClassifier, ensemble.ExtraTreesRegressor,
    ensemble.ExtraTreesClassifier,
)  # fmt: skip
_BAGGING = (ensemble.BaggingRegressor, ensemble.BaggingClassifier)
_BOOSTING = (ensemble.GradientBoostingRegressor, ensemble.GradientBoostingClassifier)
_HISTOGRAM = (ensemble.HistGradientBoostingRegressor, ensemble.HistGradientBoostingClassifier)


def open_sklearn(model: Any) -> TreeLibrary:
    """Read the trees of a fitted model of scikit-learn; `TypeError` if it is of another kind."""
    if isinstance(model, _HISTOGRAM):
        return HistogramTrees(model)
    if isinstance(model, (*_SINGLE, *_FORESTS, *_BAGGING, *_BOOSTING)):
        return SklearnTrees(model)
    raise TypeError(
        f"cannot repair a {type(model).__name__}. Of ensembles, trees, forests, bagged trees and gradient boosting "
        "are supported; the scores of others can be changed by esvdfair.baselines."
    )


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
        given = getattr(self.model, "monotonic_cst", None)
        return () if given is None else [int(sign) for sign in given]

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

    def memo(self) -> dict[int, Any]:
        """Copies of the trees: `deepcopy` alone would copy each twice, first its state."""
        copies: dict[int, Any] = {}
        for part in self._trees:
            make, given, state = part.__reduce__()
            copies[id(part)] = make(*given)
            copies[id(part)].__setstate__(state)
        return copies

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
