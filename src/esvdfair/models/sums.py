"""Means of scikit-learn models: `VotingRegressor` and `BaggingRegressor` of networks and linear models.

A mean of linear layers is one linear layer with all their inputs, and is repaired as one.
"""

import copy
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import BaggingRegressor
from sklearn.utils.validation import check_is_fitted

from esvdfair.core.checks import check_features, to_numpy
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights
from esvdfair.models.sklearn import SklearnAdapter, before_last, finish_target, levels, target_steps
from esvdfair.models.tails import Section


class MeanAdapter(ModelAdapter):
    """Several networks or linear models whose predictions are averaged.

    Parameters
    ----------
    model : VotingRegressor or BaggingRegressor
        Or a Pipeline, TransformedTargetRegressor, FrozenEstimator or GridSearchCV that ends in one. Fitted;
        `NotFittedError` otherwise.
    output : None
        A mean has one output.
    """

    def __init__(self, model: Any, *, output: Any = None) -> None:
        self._model, self._levels = model, levels(model)
        for level in self._levels:
            check_is_fitted(level)
        self._mean = self._levels[-1]
        self._members = [self._member(member, output) for member in self._mean.estimators_]
        self._shares = _shares_of(self._mean)
        ends = np.cumsum([0, *(len(member.layers()[-1].weight) for member in self._members)])
        self._columns = [slice(*pair) for pair in pairwise(ends.tolist())]

    def _member(self, member: Any, output: Any) -> SklearnAdapter:
        try:
            return SklearnAdapter(member, output=output)
        except TypeError as error:
            raise TypeError(
                f"cannot repair a {type(self._mean).__name__} that holds a {type(levels(member)[-1]).__name__}: all of "
                "its models must be networks or linear models. Fit it without that one, or repair each model alone."
            ) from error

    @property
    def n_features(self) -> int | None:
        """Number of columns that the model was fitted on."""
        width: int | None = getattr(self._model, "n_features_in_", None)
        return width

    @property
    def negative(self) -> int | None:
        """Number of negative coefficients of linear models with ``positive=True``; None where there are none."""
        counts = [member.negative for member in self._members if member.negative is not None]
        return sum(counts) if counts else None

    def free_zeros(self) -> "MeanAdapter":
        """Let coefficients of linear models that are 0 change like the others; returns self."""
        for member in self._members:
            member.free_zeros()
        return self

    def _named(self) -> list[tuple[int, str, LinearLayer]]:
        """Member, name in the member, and layer."""
        found: list[tuple[int, str, LinearLayer]] = []
        for i, member in enumerate(self._members):
            for layer in member.layers():
                name = f"estimators_[{i}].{layer.name}"
                found.append((i, layer.name, LinearLayer(name, len(found), layer.weight, layer.bias)))
        return found

    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        return tuple(layer for _, _, layer in self._named())

    def _inputs(self, x: Any) -> list[Any]:
        """What each member gets."""
        x = before_last(self._levels, to_numpy(x) if hasattr(x, "detach") else x)
        if not isinstance(self._mean, BaggingRegressor):
            return [x] * len(self._members)
        table = check_features(x)
        return [table[:, columns] for columns in self._mean.estimators_features_]

    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        passes = [member.forward(part) for member, part in zip(self._members, self._inputs(x), strict=True)]
        places = {name: (i, self._members[i].find(own)) for i, own, layer in self._named() for name in [layer.name]}
        inputs = {name: passes[places[name][0]][0][places[name][1]] for name in names}
        return inputs, self._average([last for _, last in passes])

    def _average(self, outputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Predictions (rows,) of what the last layer of each member gives."""
        finished = [member.finish(z) for member, z in zip(self._members, outputs, strict=True)]
        mean = np.average(np.column_stack(finished), axis=1, weights=self._shares)
        return np.asarray(finish_target(self._levels, mean[:, None])).ravel()

    def _tail(self, rows: Any) -> Tail:
        lasts = [member.forward(part)[1] for member, part in zip(self._members, self._inputs(rows), strict=True)]
        names = [f"estimators_[{i}].{member.layers()[-1].name}" for i, member in enumerate(self._members)]
        output = np.column_stack(lasts)

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = z.astype(output.dtype)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
                return values, self._average([values[:, columns] for columns in self._columns])

        sections = tuple(
            Section(name, 1, columns.stop - columns.start) for name, columns in zip(names, self._columns, strict=True)
        )
        operation = ", ".join(["a mean of models", *target_steps(self._levels)])
        return Tail(" + ".join(names), rows, output, run, operation=operation, sections=sections)

    def _predict(self, x: Any) -> NDArray[Any]:
        return np.asarray(self._model.predict(to_numpy(x) if hasattr(x, "detach") else x)).ravel()

    def _edited(self, weights: Weights) -> "MeanAdapter":
        model = copy.deepcopy(self._model)
        mean = levels(model)[-1]
        for i, member in enumerate(self._members):
            own = {name: weights[layer.name] for j, name, layer in self._named() if j == i and layer.name in weights}
            if own:
                mean.estimators_[i] = member.replace(own).model
        if hasattr(mean, "named_estimators_"):
            kept = [name for name, estimator in mean.estimators if not isinstance(estimator, str)]
            mean.named_estimators_.update(zip(kept, mean.estimators_, strict=True))
        return MeanAdapter(model)


def _shares_of(mean: Any) -> NDArray[np.float64]:
    """(members,) weight of each, which add up to 1."""
    weights = getattr(mean, "weights", None)
    if weights is None:
        return np.full(len(mean.estimators_), 1 / len(mean.estimators_))
    kept = [w for (_, estimator), w in zip(mean.estimators, weights, strict=True) if not isinstance(estimator, str)]
    return np.asarray(np.array(kept, dtype=np.float64) / np.sum(kept))
