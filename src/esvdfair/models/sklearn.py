"""A fitted scikit-learn network or linear model as a `ModelAdapter`, also inside the estimators that usually wrap it.

A linear model is any estimator with ``coef_`` and ``intercept_``: that its predictions are made of them is checked on
rows. A classifier of two classes is taken for the score P(second class | x) that it predicts.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from sklearn import linear_model
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.cross_decomposition import PLSRegression
from sklearn.ensemble import StackingClassifier, StackingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.svm import LinearSVR
from sklearn.utils.validation import check_is_fitted, validate_data

from esvdfair.core.checks import check_features, several_inputs, to_numpy
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import LinearLayer, ModelAdapter, OutputLayer, Tail, Weights, rounded

_NETWORKS = (MLPRegressor, MLPClassifier)
_RIDGES = (linear_model.RidgeClassifier, linear_model.RidgeClassifierCV)
_LINEAR = {"coef_", "intercept_"}
_ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "identity": lambda a: a,
    "logistic": expit,
    "tanh": np.tanh,
    "relu": lambda a: np.maximum(a, 0),
    "exp": np.exp,  # output of a Poisson loss
    "half": lambda a: (a + 1) / 2,  # ridge classifiers are fitted on -1 and 1
}


class SklearnAdapter(ModelAdapter):
    """A network or a linear model, through its `coefs_` or its `coef_`.

    Parameters
    ----------
    model : MLPRegressor, MLPClassifier, or an estimator with ``coef_`` and ``intercept_``
        Or a Pipeline, TransformedTargetRegressor, FrozenEstimator, GridSearchCV, RANSACRegressor that ends in one, in
        any nesting; a classifier must tell two classes apart. Fitted; `NotFittedError` otherwise. Coefficients that are
        0, as those of a Lasso, stay 0: the layer has the other inputs alone.
    output : int, optional
        Which column of several that the model predicts.
    """

    _used: NDArray[np.intp] | None = None  # inputs of a linear model that have a weight; None for all

    def __init__(self, model: Any, *, output: Any = None) -> None:
        self._model = model
        self._levels = _known_levels(model)
        for level in self._levels:
            if not getattr(level, "__dict__", {}).keys() >= _LINEAR:  # which need not be scikit-learn's own
                check_is_fitted(level)
        self._last = self._levels[-1]
        self._network = isinstance(self._last, _NETWORKS)
        self.classes = getattr(self._last, "classes_", None)
        calibrated = any(isinstance(level, CalibratedClassifierCV) for level in self._levels)
        if self._network:
            _check_network(self._last)
        else:
            _check_line(self._last, calibrated=calibrated)
            ((coefficients, _),) = self._whole()
            used = np.flatnonzero(coefficients.any(axis=0))
            self._used = used if 0 < len(used) < coefficients.shape[1] else None
        self._place = _check_place(len(self._whole()[-1][0]), output, self.classes)
        self._names = [f"coefs_[{i}]" for i in range(len(self._whole()))] if self._network else ["coef_"]
        # After the last layer. Calibration takes scores where there are some.
        link = str(self._last.out_activation_) if self._network else _link_of(self._last)
        self._activation = "identity" if calibrated and hasattr(self._last, "decision_function") else link

    @property
    def n_features(self) -> int | None:
        """Number of columns that the model was fitted on."""
        width: int | None = getattr(self._model, "n_features_in_", None)
        return width

    @property
    def negative(self) -> int | None:
        """Number of negative coefficients of a linear model with ``positive=True``; None of other models."""
        return int(np.sum(self._last.coef_ < 0)) if getattr(self._last, "positive", False) else None

    def free_zeros(self) -> "SklearnAdapter":
        """Let coefficients of a linear model that are 0 change like the others; returns self."""
        self._used = None
        return self

    def with_output(self, known: OutputLayer) -> "SklearnAdapter":
        """As for all models; the features of a sparse linear model depend on `keep_zeros`."""
        super().with_output(known)
        mine, its = (layer.weight.shape[1] for layer in (self.layers()[-1], known.layer))
        if mine != its:
            raise InputError(
                f"`summary` was made with another `keep_zeros`: it has {its} features of each row, not {mine}. Give "
                "summarise and ESVDFair the same."
            )
        return self

    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        return tuple(
            LinearLayer(
                name, index, weight.astype(np.float64), None if bias is None else np.array(bias, dtype=np.float64)
            )
            for index, (name, (weight, bias)) in enumerate(zip(self._names, self._arrays(), strict=True))
        )

    def _arrays(self) -> list[tuple[NDArray[Any], NDArray[Any] | None]]:
        """Weight (m, n) and bias (m,) of every layer, of a linear model without the inputs that have no weight."""
        whole = self._whole()
        return whole if self._used is None else [(weight[:, self._used], bias) for weight, bias in whole]

    def _whole(self) -> list[tuple[NDArray[Any], NDArray[Any] | None]]:
        """Weight (m, n) and bias (m,) of every layer, as the estimator holds them."""
        if self._network:
            return [(c.T, b) for c, b in zip(self._last.coefs_, self._last.intercepts_, strict=True)]
        weight = np.atleast_2d(self._last.coef_)
        if not getattr(self._last, "fit_intercept", True):
            return [(weight, None)]
        bias = np.broadcast_to(self._last.intercept_, len(weight))
        return [(weight, bias - weight @ self._last._x_mean if isinstance(self._last, PLSRegression) else bias)]

    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Run one forward pass: inputs of the named layers and the prediction."""
        wanted = {name: self._layer(name).index for name in names}
        inputs, last = self.forward(x)
        return {name: inputs[index] for name, index in wanted.items()}, self.finish(last)

    def _edited(self, weights: Weights) -> "SklearnAdapter":
        twin = SklearnAdapter(copy.deepcopy(self._model), output=self._place)
        twin._used = self._used
        for name, (weight, bias) in weights.items():
            index = self._names.index(name)
            held, old_bias = twin._whole()[index]  # a view, of the same memory layout, so that products round as before
            held[:, slice(None) if self._used is None else self._used] = rounded(name, weight, held.dtype)
            if not self._network:
                _set_line(twin._last, held, old_bias if bias is None else bias)
            elif bias is not None:
                twin._last.intercepts_[index][...] = rounded(name, bias, twin._last.intercepts_[index].dtype)
        if twin.negative:
            words = f"{twin.negative} of {np.size(twin._last.coef_)} repaired coefficients are negative."
            message = f"The {type(twin._last).__name__} has positive=True, but {words}"
            warnings.warn(ESVDFairWarning(message), stacklevel=3)
        return twin

    def _predict(self, x: Any) -> NDArray[Any]:
        """By the model's own `predict`, or `predict_proba`."""
        x = to_numpy(x) if hasattr(x, "detach") else x
        if self.classes is None:
            return self._column_of(np.asarray(self._model.predict(x)))
        if self._activation == "half":
            return np.asarray((self._model.decision_function(x) + 1) / 2)
        return np.asarray(self._model.predict_proba(x)[:, 1])

    def _tail(self, rows: Any) -> Tail:
        """The output activation and the target transformers."""
        last = self.forward(rows)[1]
        activation = [] if self._activation == "identity" else [self._activation]
        operation = ", ".join([*activation, *target_steps(self._levels)]) or "nothing"

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = z.astype(last.dtype)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
                return values, self.finish(values)

        return Tail(self._names[-1], rows, last, run, operation=operation)

    def find(self, name: str) -> int:
        """Index of a layer."""
        return self._names.index(name)

    def forward(self, x: Any) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """Input of every layer, and output of the last, (rows, outputs)."""
        value = self._transform(x)
        inputs: list[NDArray[Any]] = []
        with np.errstate(over="ignore", invalid="ignore"):  # a prediction that is not finite is an error of its own
            for weight, bias in self._arrays():
                first = value if self._used is None else value[:, self._used]
                inputs.append(_ACTIVATIONS[self._last.activation](value) if inputs else first)
                value = inputs[-1] @ weight.T + (0 if bias is None else bias)
        return inputs, value

    def _transform(self, x: Any) -> NDArray[Any]:
        """Input of the network: what the steps before it make of `x`."""
        if several_inputs(x) is not None:
            raise InputError("`X` is several inputs; a scikit-learn model takes one table.")
        x = before_last(self._levels, x)
        if hasattr(x, "columns") and hasattr(self._last, "feature_names_in_"):
            validate_data(self._last, x, skip_check_array=True, reset=False)  # the names
        table, width = check_features(x), self._whole()[0][0].shape[1]
        if table.shape[1] != width:
            kind = type(self._last).__name__
            raise InputError(f"X has {table.shape[1]} features, but {kind} is expecting {width} features as input.")
        return table

    def finish(self, z: NDArray[Any]) -> NDArray[Any]:
        """Prediction (rows,) of the last layer's output (rows, outputs)."""
        return self._column_of(finish_target(self._levels, _ACTIVATIONS[self._activation](z)))

    def _column_of(self, prediction: NDArray[Any]) -> NDArray[Any]:
        return prediction.ravel() if self._place is None else prediction[:, self._place]


def _set_line(model: Any, weight: NDArray[Any], bias: NDArray[Any] | None) -> None:
    """Give a linear model coefficients (m, n) and an intercept, in the shape and the type of those that it has."""
    model.coef_ = weight.reshape(np.shape(model.coef_))
    if bias is None:
        return
    if isinstance(model, PLSRegression):  # it subtracts the mean first
        bias = bias + weight @ model._x_mean
    new = rounded("coef_", bias, np.asarray(model.intercept_).dtype)
    if np.ndim(model.intercept_):
        model.intercept_[...] = new
    else:
        model.intercept_ = type(model.intercept_)(new[0])


def fit_model(model: Any, x: Any, y: Any, weight: Any = None) -> Any:
    """A fitted clone of a model that is not fitted; a Pipeline hands the weight on to its last step."""
    steps = "".join(f"{level.steps[-1][0]}__" for level in levels(model) if isinstance(level, Pipeline))
    return clone(model).fit(x, y, **({} if weight is None else {f"{steps}sample_weight": weight}))


def _check_network(network: Any) -> None:
    """Raise unless the weights are numbers that fit together: somebody may have changed them since the fit."""
    if not hasattr(network, "coefs_") or not hasattr(network, "intercepts_"):
        raise NotFittedError(f"the {type(network).__name__} has no weights; fit it.")
    shapes = [np.shape(c) for c in network.coefs_]
    fit = all(len(s) == 2 for s in shapes) and all(a[1] == b[0] for a, b in pairwise(shapes))
    kinds = {np.asarray(part).dtype.kind for part in (*network.coefs_, *network.intercepts_)}
    if not fit or [s[1:] for s in shapes] != [np.shape(b) for b in network.intercepts_] or kinds - set("f"):
        raise ValueError(
            f"the layers of the {type(network).__name__} do not fit together (weights of shapes {shapes}, dtypes "
            f"{sorted(kinds)}); were coefs_ or intercepts_ changed after the fit?"
        )


def _check_line(model: Any, *, calibrated: bool) -> None:
    """Raise unless the model has coefficients that are plain numbers, and a classifier a score."""
    kind = type(model).__name__
    if hasattr(model.coef_, "toarray"):
        raise ValueError(f"the coefficients of the {kind} are a sparse matrix. Call its densify() first.")
    if hasattr(model, "classes_") and not (hasattr(model, "predict_proba") or isinstance(model, _RIDGES) or calibrated):
        loss = f" with loss={model.loss!r}" if hasattr(model, "loss") else ""
        raise TypeError(
            f"cannot repair a {kind}{loss}: it has no predict_proba. Use a LogisticRegression, or an SGDClassifier "
            "with loss='log_loss'."
        )


def _link_of(model: Any) -> str:
    """What follows the layer of a linear model."""
    if isinstance(model, _RIDGES):
        return "half"
    if hasattr(model, "classes_"):
        return "logistic"
    if isinstance(model, linear_model.TweedieRegressor):
        return "identity" if model.link == "identity" or (model.link == "auto" and model.power <= 0) else "exp"
    return "exp" if isinstance(model, linear_model.PoissonRegressor | linear_model.GammaRegressor) else "identity"


def is_skorch(model: Any) -> bool:
    """Whether a model is a network of skorch, which is an estimator too."""
    return any(base.__module__.startswith("skorch.") for base in type(model).__mro__)


def _is_line(model: Any) -> bool:
    """Whether a model has one linear layer and keeps its coefficients; if not fitted, scikit-learn's are known."""
    known = isinstance(model, LinearSVR | PLSRegression) or type(model).__module__.startswith("sklearn.linear_model")
    return known or getattr(model, "__dict__", {}).keys() >= _LINEAR


def _check_place(columns: int, output: Any, classes: Sequence[Any] | None) -> int | None:
    """Which of several columns is meant, None when there is one; a classifier of two classes has one."""
    if classes is not None and (len(classes) != 2 or columns != 1):
        raise ValueError(
            f"the model tells {len(classes)} classes apart; the score of one class against one other can be repaired. "
            "Fit one model for each question."
        )
    if columns == 1 and output is not None:
        raise InputError(f"`output={output!r}` was given, but the model has one output. Leave it out.")
    if columns > 1 and not (isinstance(output, int) and -columns <= output < columns):
        raise InputError(
            f"the model predicts {columns} columns. Choose one with `output`, from 0 to {columns - 1}"
            + ("." if output is None else f"; got {output!r}.")
        )
    return None if columns == 1 else int(output)


def _known_levels(model: Any) -> tuple[Any, ...]:
    """The model and what it wraps, down to the one with the layers; `TypeError` if there is none."""
    found = levels(model)
    if not isinstance(found[-1], _NETWORKS) and not _is_line(found[-1]):
        inside = "" if len(found) == 1 else f" (inside a {type(model).__name__})"
        raise TypeError(
            f"cannot repair a {type(found[-1]).__name__}{inside}, which has no linear layer that is known here. Of "
            "scikit-learn, networks, linear models and tree ensembles are supported, alone, as last step of a "
            "Pipeline, or inside a TransformedTargetRegressor, FrozenEstimator or GridSearchCV. Other models: see "
            "esvdfair.baselines, which change scores."
        )
    return found


# --- estimators that wrap a model: what they do before it and after it ------------------------------------------------

_INNER: dict[type, tuple[str, str, Any]] = {  # where a wrapper has its model, once fitted and before; the usual one
    FrozenEstimator: ("estimator", "estimator", None),
    TransformedTargetRegressor: ("regressor_", "regressor", linear_model.LinearRegression()),
    GridSearchCV: ("best_estimator_", "estimator", None),
    RandomizedSearchCV: ("best_estimator_", "estimator", None),
    linear_model.RANSACRegressor: ("estimator_", "estimator", linear_model.LinearRegression()),
    StackingRegressor: ("final_estimator_", "final_estimator", linear_model.RidgeCV()),
    StackingClassifier: ("final_estimator_", "final_estimator", linear_model.LogisticRegression()),
}


def levels(model: Any) -> tuple[Any, ...]:
    """The model and what it wraps, down to what is no Pipeline, target transformer, search, stack or calibration."""
    if isinstance(model, Pipeline):
        return (model, *levels(model.steps[-1][1]))
    if isinstance(model, CalibratedClassifierCV):
        return (model, *levels(_calibrated(model)[0]))
    for kind, (fitted, given, usual) in _INNER.items():
        if isinstance(model, kind):
            inner = getattr(model, fitted, getattr(model, given))
            return (model, *levels(usual if inner is None else inner))
    return (model,)


def _calibrated(level: CalibratedClassifierCV) -> tuple[Any, Any]:
    """The classifier and its calibrator, of which there must be one; None before it is fitted."""
    several = getattr(level, "calibrated_classifiers_", None)
    if several is None:
        return level.estimator, None
    if len(several) != 1:
        raise TypeError(
            f"cannot repair a CalibratedClassifierCV that averages {len(several)} classifiers. Fit it with "
            "ensemble=False, or give it a fitted classifier in a FrozenEstimator."
        )
    return several[0].estimator, several[0].calibrators[0]


def before_last(found: tuple[Any, ...], x: Any) -> Any:
    """What the steps before the last model make of `x`."""
    for level in found:
        if isinstance(level, Pipeline) and len(level) > 1:
            x = level[:-1].transform(x)
        elif isinstance(level, StackingRegressor | StackingClassifier):
            x = level.transform(x)
    return x


def finish_target(found: tuple[Any, ...], value: NDArray[Any]) -> NDArray[Any]:
    """What target transformers and calibrators make of the last model's prediction (rows, outputs)."""
    for level in reversed(found):
        if isinstance(level, TransformedTargetRegressor):
            value = np.asarray(level.transformer_.inverse_transform(value.reshape(len(value), -1)))
        elif isinstance(level, CalibratedClassifierCV):
            value = np.asarray(_calibrated(level)[1].predict(value.ravel()))[:, None]
    return value


def target_steps(found: tuple[Any, ...]) -> list[str]:
    """Names of what `finish_target` does, for an error."""
    names = []
    for level in reversed(found):
        if isinstance(level, TransformedTargetRegressor):
            inverse = getattr(level.transformer_, "inverse_func", None)
            detail = f" with inverse_func={getattr(inverse, '__name__', inverse)}" if inverse is not None else ""
            names.append(f"{type(level.transformer_).__name__}.inverse_transform{detail}")
        elif isinstance(level, CalibratedClassifierCV):
            names.append(f"calibration with method={level.method!r}")
    return names


def check_all_fitted(found: tuple[Any, ...]) -> None:
    """Raise `NotFittedError` unless every wrapper is fitted."""
    for level in found[:-1]:
        check_is_fitted(level)


def predict_wrapped(model: Any, x: Any, *, scores: bool) -> NDArray[Any]:
    """What the outer model predicts, with one column; of a classifier the probability of the second class."""
    return np.asarray(model.predict_proba(x)[:, 1] if scores else model.predict(x)).ravel()
