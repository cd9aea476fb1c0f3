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
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights, check_replacement, rounded

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
    output : None
        Only for the sake of one signature; a scikit-learn regressor has one output.
    """

    def __init__(self, model: Any, *, output: Any = None) -> None:
        if output is not None:
            raise InputError(
                "{output} was given, but a scikit-learn regressor has one output: drop it.", output=Given(output)
            )
        self._model = model
        self._levels = tuple(_levels(model))
        for level in self._levels:
            check_is_fitted(level)
        self._mlp: MLPRegressor = self._levels[-1]
        if self._mlp.n_outputs_ != 1:
            raise ValueError(
                f"the MLPRegressor predicts {self._mlp.n_outputs_} columns; one is needed. Fit one model a column."
            )
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
        for name, (weight, bias) in weights.items():
            shape = self._mlp.coefs_[self._index(name)].T.shape
            check_replacement(name, weight=weight, bias=bias, weight_shape=shape, has_bias=True)
        adapter = SklearnAdapter(copy.deepcopy(self._model))
        for name, (weight, bias) in weights.items():
            index = self._index(name)
            _assign(adapter._mlp.coefs_, index, np.asarray(weight).T, name)
            if bias is not None:
                _assign(adapter._mlp.intercepts_, index, np.asarray(bias), name)
        return adapter

    def _predict(self, x: Any) -> NDArray[Any]:
        """By the model's own `predict`."""
        return np.asarray(self._model.predict(x)).ravel()

    def _tail(self, rows: Any) -> Tail:
        """The output activation and the target transformers."""
        _, last = self._forward(rows)

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = z.astype(last.dtype)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
                return values, self._finish(values[:, None])

        return Tail(self._names[-1], last, run, operation=self._finishing())

    def _index(self, name: str) -> int:
        if name not in self._names:
            raise ValueError(f"the model has no layer {name!r}; it has {', '.join(self._names)}.")
        return self._names.index(name)

    def _forward(self, x: Any) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """Input of every layer, and output of the last, (rows, 1)."""
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
        """Prediction (rows,) of the last layer's output (rows, 1)."""
        value = _ACTIVATIONS[self._mlp.out_activation_](z)
        for level in reversed(self._levels):
            if isinstance(level, TransformedTargetRegressor):
                value = level.transformer_.inverse_transform(value.reshape(-1, 1))
        return np.asarray(value).ravel()

    def _finishing(self) -> str:
        """Name what `_finish` does, for an error."""
        parts = [] if self._mlp.out_activation_ == "identity" else [self._mlp.out_activation_]
        for level in reversed(self._levels):
            if isinstance(level, TransformedTargetRegressor):
                inverse = getattr(level.transformer_, "inverse_func", None)
                detail = f" with inverse_func={getattr(inverse, '__name__', inverse)}" if inverse is not None else ""
                parts.append(f"{type(level.transformer_).__name__}.inverse_transform{detail}")
        return ", ".join(parts) or "nothing"


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
