"""Trees of XGBoost, read and written as the JSON of the model."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from esvdfair.models.tree_libraries import LINKS, Array, Numbers, Tree, TreeLibrary, one_output

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
        self._parallel = int(trees["gbtree_model_param"]["num_parallel_tree"])
        self._parts = trees["trees"] if rounds is None else trees["trees"][: (rounds + 1) * self._parallel]
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
        self._booster.load_model(bytearray(json.dumps(self._saved).encode()))

    def content(self) -> Any:
        return bytes(self._booster.save_raw(raw_format="ubj"))
