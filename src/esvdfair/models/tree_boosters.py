"""Trees of LightGBM, XGBoost and CatBoost, as estimators, boosters and files."""

import copy
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit
from sklearn.utils.validation import check_is_fitted

from esvdfair.exceptions import InputError
from esvdfair.models.base import Weights
from esvdfair.models.tree_libraries import LINKS, Array, Numbers, Tree, TreeLibrary, one_output
from esvdfair.models.trees import TreeAdapter


class _LeavesLast(TreeLibrary):
    """A library that numbers leaves apart: inner nodes come first in a tree here, leaves after them."""

    def _number(self, counts: Sequence[int], values: Array) -> None:
        """Take (leaves,) values of all leaves, and how many each tree has."""
        self._first_leaves: Numbers = np.array(counts, dtype=np.intp) - 1
        self.sizes = (2 * self._first_leaves + 1).tolist()
        nodes = (np.arange(size) for size in self.sizes)
        self._is_leaf = np.concatenate([n >= first for n, first in zip(nodes, self._first_leaves, strict=True)])
        self.values = np.zeros(len(self._is_leaf))
        self.values[self._is_leaf] = values

    def _tree(self, children: Any, columns: Any, rows: Any) -> Tree:
        """Of (inner, 2) children, ``~number`` of a leaf, (inner,) columns and (leaves,) training rows, if known."""
        inner, none = len(columns), np.full(len(columns) + 1, -1, dtype=np.intp)
        child = np.asarray(children, dtype=np.intp).reshape(-1, 2)
        left, right = (np.concatenate([np.where(side < 0, inner + ~side, side), none]) for side in child.T)
        tree = Tree(left, right, np.concatenate([columns, none]).astype(np.intp), np.zeros(2 * inner + 1))
        tree.rows[inner:] = rows if np.size(rows) else 0.0
        tree.add_up(tree.rows)
        return tree


# --- LightGBM, read from the text of the model ------------------------------------------------------------------------

_LIGHTGBM_LINKS = {
    **dict.fromkeys(("poisson", "gamma", "tweedie"), "exp"),
    **dict.fromkeys(("binary", "cross_entropy"), "sigmoid"),
    "cross_entropy_lambda": "softplus",
}


class LightGBMTrees(_LeavesLast):
    """A LightGBM estimator or Booster."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._booster = model.booster_ if hasattr(type(model), "booster_") else model
        about, *self._sections = (
            dict(line.partition("=")[::2] for line in section.partition("\n\n")[0].splitlines())
            for section in re.split(r"\nTree=\d+\n", self._booster.model_to_string())
        )
        one_output(int(about["num_tree_per_iteration"]), type(model).__name__)
        objective, *options = about.get("objective", "").split() or [""]
        self._check_sums(options)
        self.link = _LIGHTGBM_LINKS.get(objective, "identity")
        self.scale = float(next((o.partition(":")[2] for o in options if o.startswith("sigmoid:")), 1.0))
        average = "average_output" in about
        self._divisor = len(self._sections) if average else 1
        self.base_tree = -1 if average else 0  # the first tree holds the average it starts from
        counts = [int(section["num_leaves"]) for section in self._sections]
        self._number(counts, np.concatenate([_numbers(s, "leaf_value") for s in self._sections]) / self._divisor)
        self.constraints = [int(word) for word in about.get("monotone_constraints", "").split()]
        self.columns = about["feature_names"].split()
        if self._booster.pandas_categorical:  # a column of categories lists them, one of numbers has [low:high]
            self.categories = [re.match(r"-?\d", info) is not None for info in about["feature_infos"].split()]

    def _check_sums(self, options: Sequence[str]) -> None:
        """Raise unless the prediction is a function of the sum of values in leaves."""
        if any(section.get("is_linear") == "1" for section in self._sections):
            raise ValueError(
                "the LightGBM model has linear trees, whose leaves hold linear models instead of values. Fit it with "
                "linear_tree=False."
            )
        if "sqrt" in options:
            raise ValueError(
                "the LightGBM model was fitted with reg_sqrt=True, and squares the sum of its leaves. Fit it without."
            )

    def memo(self) -> dict[int, Any]:
        booster = copy.deepcopy(self._booster)
        booster.best_iteration = self._booster.best_iteration  # which a deep copy forgets
        return {id(self._booster): booster}

    def trees(self) -> Iterator[Tree]:
        for section in self._sections:
            names = ("left_child", "right_child", "split_feature", "leaf_count")
            left, right, column, rows = (_numbers(section, name) for name in names)
            yield self._tree(np.stack([left, right], axis=1), column, rows)

    def leaves(self, x: Any) -> Numbers:
        found = np.asarray(self.model.predict(x, pred_leaf=True), dtype=np.intp).reshape(-1, len(self.sizes))
        return self._first_leaves + found

    def contributions(self, x: Any) -> Array:
        return np.asarray(self.model.predict(x, pred_contrib=True), dtype=np.float64)[:, :-1] / self._divisor

    def write(self, values: Array, base: float) -> None:
        for t, (first, new) in enumerate(zip(self._first_leaves, self.parts(values), strict=True)):
            for leaf, value in enumerate((new[first:] * self._divisor).tolist()):
                self._booster.set_leaf_output(t, leaf, value)

    def content(self) -> Any:
        return self._booster.model_to_string()


def _numbers(section: dict[str, str], name: str) -> Array:
    return np.array(section.get(name, "").split(), dtype=np.float64)


# --- XGBoost, read and written as the JSON of the model ---------------------------------------------------------------

_XGBOOST_LINKS = {
    **dict.fromkeys(("count:poisson", "reg:gamma", "reg:tweedie"), "exp"),
    **dict.fromkeys(("reg:logistic", "binary:logistic"), "sigmoid"),
}
_INVERSE: dict[str, Callable[[float], float]] = {"identity": float, "exp": np.log, "sigmoid": logit}


class XGBoostTrees(TreeLibrary):
    """An XGBoost estimator or Booster."""

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
        self._parallel = int(trees["gbtree_model_param"]["num_parallel_tree"])
        self._parts = trees["trees"] if rounds is None else trees["trees"][: (rounds + 1) * self._parallel]
        self._dart = "weight_drop" in booster  # which weighs its trees
        self._drops = np.array(booster.get("weight_drop", [1.0] * len(trees["trees"])), dtype=np.float32)
        self.link = _XGBOOST_LINKS.get(learner["objective"]["name"], "identity")
        self.base = float(_INVERSE[self.link](float(about["base_score"].strip("[]"))))  # stored after the link
        self.sizes = [len(part["left_children"]) for part in self._parts]
        values = [np.array(part["split_conditions"], dtype=np.float32).astype(np.float64) for part in self._parts]
        self.values = np.concatenate([float(drop) * v for drop, v in zip(self._drops, values, strict=False)])
        self.columns = self._booster.feature_names
        settings = json.loads(self._booster.save_config())["learner"]["gradient_booster"]
        given = settings.get("gbtree", settings)["tree_train_param"]["monotone_constraints"]
        self.constraints = [int(word) for word in given.strip("()").split(",") if word]
        if hasattr(self._booster, "get_categories") and not self._booster.get_categories().empty():  # xgboost 3.1
            self.categories = [kind == "c" for kind in self._booster.feature_types]

    def trees(self) -> Iterator[Tree]:
        for part in self._parts:
            left, right, column = (np.array(part[key]) for key in ("left_children", "right_children", "split_indices"))
            # A row counts as its second derivative, which is 1 for a squared error and at most 1/4 for a logistic one.
            rows = np.array(part["sum_hessian"]) * (4 if self.link == "sigmoid" else 1)
            yield Tree(left, right, np.where(left < 0, -1, column), rows)

    def leaves(self, x: Any) -> Numbers:
        given = self.model is self._booster
        found = self._booster.predict(self._matrix(x), pred_leaf=True) if given else self.model.apply(x)
        return np.asarray(found).reshape(-1, len(self.sizes)).astype(np.intp)

    def add(self, leaves: Numbers) -> Array:
        base, drops = np.float32(self.base), self._drops[: len(leaves), None]
        terms = (self.values[leaves] / drops).astype(np.float32, order="C")  # summed tree by tree
        if self._dart:  # a tree is predicted with the base, and that is taken off again
            terms = (terms + base - base) * drops
        return np.asarray(np.add.reduce(terms, axis=0, initial=base), dtype=np.float64)

    def contributions(self, x: Any) -> Array:
        rounds = (0, len(self._parts) // self._parallel)
        found = self._booster.predict(self._matrix(x), pred_contribs=True, iteration_range=rounds)
        return np.asarray(found, dtype=np.float64)[:, :-1]

    def predict(self, x: Any) -> NDArray[Any]:
        given = self.model is self._booster
        return np.asarray(self._booster.predict(self._matrix(x))) if given else super().predict(x)

    def _matrix(self, x: Any) -> Any:
        import xgboost

        names = self._booster.feature_names
        if hasattr(x, "columns"):
            x, names = (x.to_numpy(), None) if names is None else (x, None)
        return xgboost.DMatrix(x, feature_names=names, enable_categorical=True)

    def write(self, values: Array, base: float) -> None:
        for part, drop, new in zip(self._parts, self._drops, self.parts(values), strict=False):
            for node in np.flatnonzero(np.array(part["left_children"]) < 0).tolist():
                part["split_conditions"][node] = part["base_weights"][node] = float(np.float32(new[node] / float(drop)))
        stored = str(np.float32(LINKS[self.link](np.array([base]))[0]))  # 2.1 reads 0.5 where it has more digits
        about = self._saved["learner"]["learner_model_param"]
        about["base_score"] = f"[{stored}]" if about["base_score"].startswith("[") else stored
        settings = json.loads(self._booster.save_config())  # which the model's JSON does not contain
        settings["learner"]["learner_model_param"]["base_score"] = about["base_score"]
        self._booster.load_model(bytearray(json.dumps(self._saved).encode()))
        self._booster.load_config(json.dumps(settings))

    def content(self) -> Any:
        return bytes(self._booster.save_raw(raw_format="ubj"))


# --- CatBoost, read from the JSON of the model ------------------------------------------------------------------------

_CATBOOST_LINKS = {"Logloss": "sigmoid", "CrossEntropy": "sigmoid", "Poisson": "exp", "Tweedie": "exp"}


class CatBoostTrees(_LeavesLast):
    """A CatBoost model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        check_is_fitted(model)
        self._saved = json.loads(_json(model, lambda path: path.read_text("utf-8")))
        counts, values = [int(count) for count in model.get_tree_leaf_counts()], np.asarray(model.get_leaf_values())
        one_output(len(values) // sum(counts), type(model).__name__)
        self._scale, self.base = model.get_scale_and_bias()
        self._number(counts, values * self._scale)
        options = model.get_all_params()
        if hasattr(model, "_estimator_type"):  # a plain CatBoost or a ranker predicts the sum
            self.link = _CATBOOST_LINKS.get(str(options.get("loss_function")).partition(":")[0], "identity")
        self.columns = [str(name) for name in model.feature_names_]
        self.texts = [self.columns[place] for place in model.get_cat_feature_indices()]
        given = options.get("monotone_constraints", {})
        self.constraints = [int(given.get(n, 0)) for n in self.columns] if isinstance(given, dict) else list(given)

    def trees(self) -> Iterator[Tree]:
        if "oblivious_trees" in self._saved:
            yield from map(self._symmetric, self._saved["oblivious_trees"])
        else:
            yield from map(self._nested, self._saved["trees"])

    def _symmetric(self, saved: Any) -> Tree:
        """One split for each level; the first decides the lowest bit of the leaf's number."""
        splits = saved["splits"] or ()
        columns = [self._split_columns[split["split_index"]] for split in splits]
        children = []
        for level in range(len(columns)):  # nodes of a level are numbered by the bits that are decided there
            below = np.arange(2**level)[:, None] + [0, 2**level]
            children.append(2 ** (level + 1) - 1 + below if level + 1 < len(columns) else ~below)
        repeated = np.repeat(columns, 2 ** np.arange(len(columns)))
        return self._tree(np.concatenate(children) if children else (), repeated, saved.get("leaf_weights", ()))

    def _nested(self, saved: Any) -> Tree:
        """Inner nodes and leaves are numbered as they are met, left before right."""
        columns: list[int] = []
        weights: list[float] = []
        children: list[Any] = []

        def visit(node: Any) -> int:  # ~number of a leaf, number of an inner node
            if "value" in node:
                weights.append(node.get("weight", 0.0))
                return ~(len(weights) - 1)
            place = len(columns)
            columns.append(self._split_columns[node["split"]["split_index"]])
            children.append(None)
            children[place] = visit(node["left"]), visit(node["right"])
            return place

        visit(saved)
        return self._tree(children, columns, weights)

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

    def contributions(self, x: Any) -> Array:
        from catboost import CatBoost, Pool

        # As it is, the values of trees that are not symmetric do not add up: catboost/catboost#2136.
        model = _json(self.model, lambda path: CatBoost().load_model(str(path), format="json"))
        rows = Pool(x, cat_features=model.get_cat_feature_indices())
        return np.asarray(model.get_feature_importance(rows, type="ShapValues"), dtype=np.float64)[:, :-1]

    def write(self, values: Array, base: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.cbm")
            self.model.save_model(path)
            self.model.load_model(path)  # a copy in memory cannot be edited, one from a file can
        self.model.set_leaf_values(values[self._is_leaf] / self._scale)
        self.model.set_scale_and_bias(self._scale, base)

    def content(self) -> Any:
        names = ("features_info", "scale_and_bias", "oblivious_trees", "trees")
        return json.dumps([self._saved.get(name) for name in names], sort_keys=True)


def _json(model: Any, read: Callable[[Path], Any]) -> Any:
    """What is read from a JSON file of a CatBoost model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save_model(str(path), format="json")
        return read(path)


# --- files ------------------------------------------------------------------------------------------------------------

_LIBRARIES = {"txt": "lightgbm", "json": "xgboost", "ubj": "xgboost", "cbm": "catboost"}


def tree_format(source: str | bytes | bytearray | os.PathLike[Any]) -> str | None:
    """Format of a file or its bytes: "txt", "json", "ubj" or "cbm"; None where it holds no trees of these libraries."""
    if isinstance(source, bytes | bytearray):
        head = bytes(source[:64])
    elif Path(source).is_file():
        with Path(source).open("rb") as file:
            head = file.read(64)
    else:
        return None
    if head.startswith(b"tree\n"):
        return "txt"
    if head.startswith(b"CBM1"):
        return "cbm"
    if head.startswith(b"{") and b"learner" in head:
        return "json" if head.lstrip(b"{ \r\n\t").startswith(b'"') else "ubj"
    return None


class TreeFileAdapter(TreeAdapter):
    """A tree ensemble in a file or in bytes; of a repaired one, ``model`` is the bytes in the same format."""

    takes_missing = True

    def __init__(self, source: str | bytes | bytearray | os.PathLike[Any], *, output: Any = None) -> None:
        self._format = tree_format(source) or ""
        self._given: Any = bytes(source) if isinstance(source, bytearray) else source
        content = self._given if isinstance(self._given, bytes) else Path(self._given).read_bytes()
        super().__init__(_open_bytes(content, self._format), output=output)

    def __reduce__(self) -> Any:
        return TreeFileAdapter, (self.model,)

    @property
    def model(self) -> Any:
        """The path or bytes that were given; of a model with new leaf values the bytes."""
        if self._given is not None:
            return self._given
        if self._format == "txt":
            return self._model.model_to_string(num_iteration=-1).encode()
        return bytes(
            self._model._serialize_model() if self._format == "cbm" else self._model.save_raw(raw_format=self._format)
        )

    def _edited(self, weights: Weights) -> Self:
        twin = super()._edited(weights)
        twin._given = None
        return twin

    def _table(self, x: Any) -> Any:
        """The rows, with text or numbers in columns of categories as such: a CSV file has no dtypes."""
        if hasattr(x, "columns") and self.library.texts:
            return x.assign(**{name: _as_text(x[name]) for name in self.library.texts if name in x})
        named = [n for n, known in zip(getattr(x, "columns", ()), self.library.categories, strict=False) if known]
        return x.astype(dict.fromkeys(named, "category")) if named else super()._table(x)


def _as_text(column: Any) -> Any:
    """Categories as CatBoost takes them; whole numbers are fractions where other rows had none."""
    if column.isna().any():
        raise InputError(
            f"column {column.name!r} holds categories for CatBoost, and some are missing. Write what stood for them in "
            "training, or leave out those rows by `drop_missing`."
        )
    return column.astype(np.int64) if column.dtype.kind == "f" else column


def _open_bytes(content: bytes, form: str) -> Any:
    """The model in the bytes of a file."""
    name = _LIBRARIES[form]
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"a .{form} model needs {name}: pip install 'esvdfair[{name}]'.", name=name) from error
    if form == "txt":
        return library.Booster(model_str=content.decode())
    if form == "cbm":
        plain = library.CatBoost().load_model(blob=content)
        binary = str(plain.get_all_params().get("loss_function")).startswith(("Logloss", "CrossEntropy"))
        kind = library.CatBoostClassifier if binary else library.CatBoostRegressor
        return kind().load_model(blob=content)
    return _until_best(library.Booster(model_file=bytearray(content)))


def _until_best(booster: Any) -> Any:
    """The XGBoost model without trees after early stopping, with which an estimator predicts, but not a Booster."""
    best = booster.attr("best_iteration")
    if best is None:
        return booster
    saved = json.loads(bytes(booster.save_raw(raw_format="json")))  # a slice of the Booster would lose its categories
    part = saved["learner"]["gradient_booster"]
    trees = part.get("gbtree", part)["model"]
    trees["iteration_indptr"] = trees["iteration_indptr"][: int(best) + 2]
    kept = trees["iteration_indptr"][-1]
    trees["gbtree_model_param"]["num_trees"] = str(kept)
    for holder, name in ((trees, "trees"), (trees, "tree_info"), (part, "weight_drop")):
        if name in holder:
            holder[name] = holder[name][:kept]
    booster.load_model(bytearray(json.dumps(saved).encode()))
    return booster
