"""Trees of CatBoost, read from the JSON of the model."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from esvdfair.models.tree_libraries import Array, Numbers, Tree, TreeLibrary, one_output


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

    def contributions(self, x: Any) -> Array:
        from catboost import Pool

        rows = Pool(x, cat_features=self.model.get_cat_feature_indices())
        return np.asarray(self.model.get_feature_importance(rows, type="ShapValues"), dtype=np.float64)[:, :-1]

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
