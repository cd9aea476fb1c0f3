"""A fitted scikit-learn `MLPRegressor` as a `ModelAdapter`, also inside the estimators that usually wrap it."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted, validate_data

from esvdfair.exceptions import Given, InputError
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights, rounded

_ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "identity": lambda a: a,
    "logistic": expit,
    "tanh": np.tanh,
    "relu": lambda a: np.maximum(a, 0),
    "exp": np.exp,  # output of a Poisson loss
}


class SklearnAdapter(ModelAdapter):
    """An `MLPRegressor`, seen through its `coefs_`.

    Parameters
    ----------
    model : MLPRegressor, or Pipeline, TransformedTargetRegressor, FrozenEstimator that end in one, in any nesting
        Fitted; `NotFittedError` otherwise.
    output : int, optional
        Which column of several that the model predicts.
    """

    def __init__(self, model: Any, *, output: Any = None) -> None:
        self._model = model
        self._levels = tuple(_levels(model))
        for level in self._levels:
            check_is_fitted(level)
        self._mlp: MLPRegressor = self._levels[-1]
        self._place = _check_place(self._mlp.n_outputs_, output)
        self._names = tuple(f"coefs_[{index}]" for index in range(len(self._mlp.coefs_)))

    @property
    def model(self) -> Any:
        """The estimator that was given."""
        return self._model

    @property
    def n_features(self) -> int | None:
        """Number of columns that the model was fitted on."""
        width: int | None = getattr(self._model, "n_features_in_", None)
        return width

    def layers(self, x: Any = None) -> tuple[LinearLayer, ...]:
        """List the layers; all of them always run, so `x` is not looked at."""
        return self._narrowed(self._all_layers(), None)

    def _all_layers(self) -> tuple[LinearLayer, ...]:
        parts = zip(self._names, self._mlp.coefs_, self._mlp.intercepts_, strict=True)
        return tuple(
            LinearLayer(name, index, np.array(coef.T, dtype=np.float64), np.array(intercept, dtype=np.float64))
            for index, (name, coef, intercept) in enumerate(parts)
        )

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Run one forward pass: inputs of the named layers and the prediction."""
        wanted = [self._index(name) for name in names]
        inputs, last = self._forward(x)
        return {self._names[index]: inputs[index] for index in wanted}, self._finish(last)

    def replace(self, weights: Weights) -> "SklearnAdapter":
        """Put new weights into a deep copy of the estimator, in the dtype of the old ones."""
        whole = {layer.name: layer for layer in self._all_layers()}
        new = {name: self._whole(whole[self._names[self._index(name)]], *given) for name, given in weights.items()}
        adapter = SklearnAdapter(copy.deepcopy(self._model), output=self._place)
        adapter._column = self._column
        for name, (weight, bias) in new.items():
            index = self._index(name)
            _assign(adapter._mlp.coefs_, index, np.asarray(weight).T, name)
            if bias is not None:
                _assign(adapter._mlp.intercepts_, index, np.asarray(bias), name)
        return adapter

    def _predict(self, x: Any) -> NDArray[Any]:
        """By the model's own `predict`."""
        return self._column_of(self._model.predict(x))

    def _tail(self, rows: Any) -> Tail:
        """The output activation and the target transformers."""
        last = np.zeros((2, self._mlp.n_outputs_)) if rows is None else self._forward(rows)[1]

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = z.astype(last.dtype)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
                return values, self._finish(values)

        return Tail(self._names[-1], last, run, operation=self._finishing())

    def _index(self, name: str) -> int:
        if name not in self._names:
            raise ValueError(f"the model has no layer {name!r}; it has {', '.join(self._names)}.")
        return self._names.index(name)

    def _forward(self, x: Any) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """Input of every layer, and output of the last, (rows, outputs)."""
        value = self._transform(x)
        inputs: list[NDArray[Any]] = []
        for coef, intercept in zip(self._mlp.coefs_, self._mlp.intercepts_, strict=True):
            inputs.append(_ACTIVATIONS[self._mlp.activation](value) if inputs else value)
            value = inputs[-1] @ coef + intercept
        return inputs, value

    def _transform(self, x: Any) -> NDArray[Any]:
        """Input of the network: what the steps before it make of `x`."""
        for level in self._levels:
            if isinstance(level, Pipeline) and len(level) > 1:
                x = level[:-1].transform(x)
        x = validate_data(self._mlp, x, accept_sparse=["csr", "csc"], reset=False)
        return np.asarray(x.toarray() if hasattr(x, "toarray") else x)

    def _finish(self, z: NDArray[Any]) -> NDArray[Any]:
        """Prediction (rows,) of the last layer's output (rows, outputs)."""
        value = _ACTIVATIONS[self._mlp.out_activation_](z)
        for level in reversed(self._levels):
            if isinstance(level, TransformedTargetRegressor):
                value = level.transformer_.inverse_transform(value.reshape(len(z), -1))
        return self._column_of(value)

    def _column_of(self, prediction: Any) -> NDArray[Any]:
        value = np.asarray(prediction)
        return value.ravel() if self._place is None else value[:, self._place]

    def _finishing(self) -> str:
        """Name what `_finish` does, for an error."""
        parts = [] if self._mlp.out_activation_ == "identity" else [self._mlp.out_activation_]
        for level in reversed(self._levels):
            if isinstance(level, TransformedTargetRegressor):
                inverse = getattr(level.transformer_, "inverse_func", None)
                detail = f" with inverse_func={getattr(inverse, '__name__', inverse)}" if inverse is not None else ""
                parts.append(f"{type(level.transformer_).__name__}.inverse_transform{detail}")
        return ", ".join(parts) or "nothing"


def _check_place(columns: int, output: Any) -> int | None:
    """Which of several columns is meant; None when there is one."""
    if columns == 1 and output is not None:
        raise InputError(
            "{output} was given, but a scikit-learn regressor has one output: drop it.", output=Given(output)
        )
    if columns > 1 and not (isinstance(output, int) and -columns <= output < columns):
        raise InputError(
            "the model predicts {columns} columns; one is needed. Say which, from 0 to {last}: {output}.",
            columns=columns,
            last=columns - 1,
            output=Given(output),
        )
    return None if columns == 1 else int(output)


def _levels(model: Any) -> Iterator[Any]:
    """Yield the model and what it wraps, down to the MLPRegressor; `TypeError` if there is none."""
    level = model
    while not isinstance(level, MLPRegressor):
        yield level
        if isinstance(level, FrozenEstimator):
            level = level.estimator
        elif isinstance(level, Pipeline):
            level = level.steps[-1][1]
        elif isinstance(level, TransformedTargetRegressor):
            level = getattr(level, "regressor_", level.regressor)
        else:
            inside = "" if level is model else f" (inside a {type(model).__name__})"
            raise TypeError(
                f"cannot repair a {type(level).__name__}{inside}: of scikit-learn, an MLPRegressor is supported, "
                "alone, as last step of a Pipeline, or inside a TransformedTargetRegressor or FrozenEstimator."
            )
    yield level


def _assign(arrays: list[NDArray[Any]], index: int, values: NDArray[Any], name: str) -> None:
    """Replace one array of a list, keeping dtype and memory layout, so that products round as before."""
    new = np.empty_like(arrays[index])
    new[...] = rounded(name, values, new.dtype)
    arrays[index] = new
