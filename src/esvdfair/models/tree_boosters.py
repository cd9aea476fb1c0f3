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
        head, *sections = re.split(r"\nTree=\d+\n", self._booster.model_to_string())
        about = dict(line.partition("=")[::2] for line in head.splitlines())
        one_output(int(about["num_tree_per_iteration"]), type(model).__name__)
        self._sections = [
            dict(line.partition("=")[::2] for line in s.partition("\n\n")[0].splitlines()) for s in sections
        ]
        objective, *options = about.get("objective", "").split() or [""]
        if any(section.get("is_linear") == "1" for section in self._sections):
            raise ValueError(
                "the LightGBM model has linear trees, whose leaves hold linear models instead of values. Fit it with "
                "linear_tree=False."
            )
        if "sqrt" in options:
            raise ValueError(
                "the LightGBM model was fitted with reg_sqrt=True, and squares the sum of its leaves. Fit it without."
            )
        self.link = _LIGHTGBM_LINKS.get(objective, "identity")
        self.scale = float(next((o.partition(":")[2] for o in options if o.startswith("sigmoid:")), 1.0))
        self._divisor = len(sections) if "average_output" in about else 1
        self.base_tree = -1 if "average_output" in about else 0  # the first tree holds the average it starts from
        counts = [int(section["num_leaves"]) for section in self._sections]
        self._number(counts, np.concatenate([_numbers(s, "leaf_value") for s in self._sections]) / self._divisor)
        self.constraints = [int(word) for word in about.get("monotone_constraints", "").split()]
        self.columns = about["feature_names"].split()

    def memo(self) -> dict[int, Any]:
        booster = copy.deepcopy(self._booster)
        booster.best_iteration = self._booster.best_iteration  # which a deep copy forgets
        return {id(self._booster): booster}

    def trees(self) -> Iterator[Tree]:
        for first, section in zip(self._first_leaves, self._sections, strict=True):
            none = np.full(first + 1, -1, dtype=np.intp)
            sides = []
            for name in ("left_child", "right_child"):
                child = _numbers(section, name).astype(np.intp)
                sides.append(np.concatenate([np.where(child < 0, first + ~child, child), none]))  # a leaf is ~number
            column = np.concatenate([_numbers(section, "split_feature").astype(np.intp), none])
            counts = [_numbers(section, name) for name in ("internal_count", "leaf_count")]
            yield Tree(sides[0], sides[1], column, np.concatenate(counts) if first else np.zeros(1))

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
    **dict.fromkeys(("reg:logistic", "binary:logistic", "binary:logitraw"), "sigmoid"),
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
        self._drops = booster.get("weight_drop", [1.0] * len(trees["trees"]))  # dart weighs its trees
        objective = learner["objective"]["name"]
        self._stored = _XGBOOST_LINKS.get(objective, "identity")  # base_score is stored after this link
        self.link = "identity" if objective == "binary:logitraw" else self._stored
        self.base = float(_INVERSE[self._stored](float(about["base_score"].strip("[]"))))
        self.sizes = [len(part["left_children"]) for part in self._parts]
        values = [np.array(part["split_conditions"], dtype=np.float32).astype(np.float64) for part in self._parts]
        self.values = np.concatenate([drop * v for drop, v in zip(self._drops, values, strict=False)])
        self.columns = self._booster.feature_names
        settings = json.loads(self._booster.save_config())["learner"]["gradient_booster"]
        given = settings.get("gbtree", settings)["tree_train_param"]["monotone_constraints"]
        self.constraints = [int(word) for word in given.strip("()").split(",") if word]

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

    def contributions(self, x: Any) -> Array:
        rounds = (0, len(self._parts) // self._parallel)
        found = self._booster.predict(self._matrix(x), pred_contribs=True, iteration_range=rounds)
        return np.asarray(found, dtype=np.float64)[:, :-1]

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
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.json"
            model.save_model(str(path), format="json")
            self._saved = json.loads(path.read_text("utf-8"))
        counts, values = [int(count) for count in model.get_tree_leaf_counts()], np.asarray(model.get_leaf_values())
        one_output(len(values) // sum(counts), type(model).__name__)
        self._scale, self.base = model.get_scale_and_bias()
        self._number(counts, values * self._scale)
        options = model.get_all_params()
        self.link = _CATBOOST_LINKS.get(str(options.get("loss_function")).partition(":")[0], "identity")
        self.columns = [str(name) for name in model.feature_names_]
        given = options.get("monotone_constraints", {})
        self.constraints = [int(given.get(n, 0)) for n in self.columns] if isinstance(given, dict) else list(given)

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
        columns: list[int] = []
        weights: list[float] = []
        links: list[list[int]] = []

        def visit(node: Any) -> int:  # ~number of a leaf, number of an inner node
            if "value" in node:
                weights.append(node.get("weight", 0.0))
                return ~(len(weights) - 1)
            place = len(columns)
            columns.append(self._split_columns[node["split"]["split_index"]])
            links.append([])
            links[place] = [visit(node["left"]), visit(node["right"])]
            return place

        visit(saved)
        inner, leaves = len(columns), len(weights)
        child = np.array(links, dtype=np.intp).reshape(-1, 2)
        child = np.concatenate([np.where(child < 0, inner + ~child, child), np.full((leaves, 2), -1)])
        rows = np.concatenate([np.zeros(inner), weights])
        for node in reversed(range(inner)):
            rows[node] = rows[child[node]].sum()
        return Tree(child[:, 0], child[:, 1], np.array([*columns, *[-1] * leaves], dtype=np.intp), rows)

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
        from catboost import Pool

        rows = Pool(x, cat_features=self.model.get_cat_feature_indices())
        return np.asarray(self.model.get_feature_importance(rows, type="ShapValues"), dtype=np.float64)[:, :-1]

    def write(self, values: Array, base: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.cbm")
            self.model.save_model(path)
            self.model.load_model(path)  # a copy in memory cannot be edited, one from a file can
        self.model.set_leaf_values(values[self._is_leaf] / self._scale)
        self.model.set_scale_and_bias(self._scale, base)

    def content(self) -> Any:
        parts = [json.dumps(self._saved[name], sort_keys=True) for name in ("features_info", "scale_and_bias")]
        return [*parts, json.dumps(self._saved.get("oblivious_trees") or self._saved["trees"], sort_keys=True)]


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

    def _twin(self) -> Self:
        twin = super()._twin()
        twin._given, twin._format = None, self._format
        return twin


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
    return library.Booster(model_file=bytearray(content))
