"""Trees of LightGBM, read from the text of the model."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from esvdfair.models.tree_libraries import Array, Numbers, Tree, TreeLibrary, one_output

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
        objective, *options = about.get("objective", "").split() or [""]
        _check_supported(self._sections, options)
        self.link = _LIGHTGBM_LINKS.get(objective, "identity")
        self.scale = float(next((o.partition(":")[2] for o in options if o.startswith("sigmoid:")), 1.0))
        self._leaf_counts = [int(section["num_leaves"]) for section in self._sections]
        self._first_leaves: Numbers = np.array(self._leaf_counts, dtype=np.intp) - 1
        self._divisor = len(sections) if "average_output" in about else 1
        self.base_tree = -1 if "average_output" in about else 0  # the first tree holds the average it starts from
        self.sizes = [2 * leaves - 1 for leaves in self._leaf_counts]
        parts = [
            np.concatenate([np.zeros(n - 1), _values_of(section, "leaf_value")])
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
                child = _values_of(section, name).astype(np.intp)
                sides.append(np.concatenate([np.where(child < 0, n - 2 - child, child), none]))  # ~leaf, from n - 1 on
            column = np.concatenate([_values_of(section, "split_feature").astype(np.intp), none])
            counts = [_values_of(section, name) for name in ("internal_count", "leaf_count")]
            yield Tree(sides[0], sides[1], column, np.concatenate(counts) if n > 1 else np.zeros(1))

    def leaves(self, x: Any) -> Numbers:
        found = np.asarray(self.model.predict(x, pred_leaf=True), dtype=np.intp).reshape(-1, len(self.sizes))
        return self._first_leaves + found

    def contributions(self, x: Any) -> Array:
        return np.asarray(self.model.predict(x, pred_contrib=True), dtype=np.float64)[:, :-1] / self._divisor

    def write(self, values: Array, base: float) -> None:
        for t, new in enumerate(self.parts(values)):
            for leaf, value in enumerate((new[self._leaf_counts[t] - 1 :] * self._divisor).tolist()):
                self._booster.set_leaf_output(t, leaf, value)

    def content(self) -> Any:
        return self._booster.model_to_string()


def _check_supported(sections: Sequence[dict[str, str]], options: Sequence[str]) -> None:
    """Raise unless leaves hold values, and the prediction is a known function of their sum."""
    if any(section.get("is_linear") == "1" for section in sections):
        raise ValueError(
            "the LightGBM model has linear trees, whose leaves hold linear models instead of values. Fit it with "
            "linear_tree=False."
        )
    if "sqrt" in options:
        raise ValueError(
            "the LightGBM model was fitted with reg_sqrt=True, and squares the sum of its leaves. Fit it without."
        )


def _values_of(section: dict[str, str], name: str) -> Array:
    return np.array(section.get(name, "").split(), dtype=np.float64)
