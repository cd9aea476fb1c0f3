"""Fitted networks and linear models of scikit-learn as a `ModelAdapter`, means of them, and what usually wraps them.

A linear model is any estimator with ``coef_`` and ``intercept_``: that its predictions are made of them is checked on
rows. A classifier of two classes is taken for the score P(second class | x) that it predicts. A mean of linear layers
is one linear layer with all their inputs, and is repaired as one.

Long because the table of wrappers, and what is refused, belong to the models that they are about.
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
from sklearn.ensemble import BaggingRegressor, StackingClassifier, StackingRegressor, VotingRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.svm import LinearSVR
from sklearn.utils.validation import check_is_fitted, validate_data

from esvdfair.core.checks import check_features, several_inputs, to_numpy
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import LinearLayer, ModelAdapter, OutputLayer, Tail, Weights, rounded
from esvdfair.models.tails import Section

_NETWORKS = (MLPRegressor, MLPClassifier)
_RIDGES = (linear_model.RidgeClassifier, linear_model.RidgeClassifierCV)
_LINEAR = {"coef_", "intercept_"}
_LINEAR_MODULES = ("sklearn.linear_model.", "sklearn.cross_decomposition.")
_ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "identity": lambda a: a,
    "logistic": expit,
    "tanh": np.tanh,
    "relu": lambda a: np.maximum(a, 0),
    "exp": np.exp,  # output of a Poisson loss
    "half": lambda a: (a + 1) / 2,  # ridge classifiers are fitted on -1 and 1
    "clipped": lambda a: np.clip((a + 1) / 2, 0, 1),  # modified Huber loss
}
Arrays = list[tuple[NDArray[Any], NDArray[Any] | None]]
"""Weight (m, n) and bias (m,) of every layer."""


class Member:
    """One network or linear model, and the estimators that wrap it."""

    def __init__(self, model: Any, output: Any) -> None:
        self.levels = _known_levels(model)
        for level in self.levels:
            if not getattr(level, "__dict__", {}).keys() >= _LINEAR:  # which need not be scikit-learn's own
                check_is_fitted(level)
        self.last = self.levels[-1]
        self.kind = type(self.last).__name__
        self.network = isinstance(self.last, _NETWORKS)
        self.classes = getattr(self.last, "classes_", None)
        self.used: NDArray[np.intp] | None = None  # inputs of a linear model that have a weight; None for all
        calibrated = any(isinstance(level, CalibratedClassifierCV) for level in self.levels)
        if not self.network:
            _check_line(self.last, calibrated=calibrated)
            ((coefficients, _),) = self.whole()
            used = np.flatnonzero(coefficients.any(axis=0))
            self.used = used if 0 < len(used) < coefficients.shape[1] else None
        else:
            _check_network(self.last)
        self.place = _check_place(len(self.whole()[-1][0]), output, self.classes)
        self.names = [f"coefs_[{i}]" for i in range(len(self.whole()))] if self.network else ["coef_"]
        # After the last layer. Calibration takes scores where there are some.
        link = str(self.last.out_activation_) if self.network else _link_of(self.last)
        self.activation = "identity" if calibrated and hasattr(self.last, "decision_function") else link

    @property
    def negative(self) -> int | None:
        """Number of negative coefficients of a linear model with ``positive=True``; None of other models."""
        return int(np.sum(self.last.coef_ < 0)) if getattr(self.last, "positive", False) else None

    def whole(self) -> Arrays:
        """The layers as the estimator holds them."""
        if self.network:
            return [(c.T, b) for c, b in zip(self.last.coefs_, self.last.intercepts_, strict=True)]
        weight = np.atleast_2d(self.last.coef_)
        if not getattr(self.last, "fit_intercept", True):
            return [(weight, None)]
        bias = np.broadcast_to(self.last.intercept_, len(weight))
        return [(weight, bias - weight @ self.last._x_mean if hasattr(self.last, "_x_mean") else bias)]

    def arrays(self) -> Arrays:
        """The layers, of a linear model without the inputs that have no weight."""
        whole = self.whole()
        return whole if self.used is None else [(weight[:, self.used], bias) for weight, bias in whole]

    def write(self, index: int, weight: NDArray[Any], bias: NDArray[Any] | None) -> None:
        """Give a layer new weights, in place."""
        name, (held, old_bias) = self.names[index], self.whole()[index]
        # A view, of the same memory layout, so that products round as before.
        held[:, slice(None) if self.used is None else self.used] = rounded(name, weight, held.dtype)
        if not self.network:
            _set_line(self.last, held, old_bias if bias is None else bias)
        elif bias is not None:
            self.last.intercepts_[index][...] = rounded(name, bias, self.last.intercepts_[index].dtype)

    def forward(self, x: Any) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """Input of every layer, and output of the last, (rows, outputs)."""
        value = self._transform(x)
        inputs: list[NDArray[Any]] = []
        with np.errstate(over="ignore", invalid="ignore"):  # a prediction that is not finite is an error of its own
            for weight, bias in self.arrays():
                first = value if self.used is None else value[:, self.used]
                inputs.append(_ACTIVATIONS[self.last.activation](value) if inputs else first)
                value = inputs[-1] @ weight.T + (0 if bias is None else bias)
        return inputs, value

    def _transform(self, x: Any) -> NDArray[Any]:
        """What the steps before the model make of `x`."""
        x = before_last(self.levels, x)
        if hasattr(x, "columns") and hasattr(self.last, "feature_names_in_"):
            validate_data(self.last, x, skip_check_array=True, reset=False)  # the names
        table, width = check_features(x), self.whole()[0][0].shape[1]
        if table.shape[1] != width:
            raise InputError(
                f"X has {table.shape[1]} features, but {self.kind} is expecting {width} features as input."
            )
        return table

    def finish(self, z: NDArray[Any]) -> NDArray[Any]:
        """Prediction (rows,) of the last layer's output (rows, outputs)."""
        return self.column_of(finish_target(self.levels, _ACTIVATIONS[self.activation](z)))

    def column_of(self, prediction: NDArray[Any]) -> NDArray[Any]:
        """(rows,) of what the model predicts."""
        return prediction.ravel() if self.place is None else prediction[:, self.place]


class SklearnAdapter(ModelAdapter):
    """A network or a linear model, through its `coefs_` or its `coef_`, or a mean of such models.

    Parameters
    ----------
    model : MLPRegressor, MLPClassifier, an estimator with ``coef_`` and ``intercept_``, or a VotingRegressor or
        BaggingRegressor of these
        Or a Pipeline, TransformedTargetRegressor, FrozenEstimator, GridSearchCV, RANSACRegressor that ends in one, in
        any nesting; a classifier must tell two classes apart. Fitted; `NotFittedError` otherwise. Coefficients that are
        0, as those of a Lasso, stay 0: the layer has the other inputs alone.
    output : int, optional
        Which column of several that the model predicts.
    """

    def __init__(self, model: Any, *, output: Any = None) -> None:
        self._model, self._output = model, output
        *_, last = found = levels(model)
        self._mean = last if isinstance(last, VotingRegressor | BaggingRegressor) else None
        self._outer = found if self._mean is not None else ()  # of the mean; other levels belong to the one member
        for level in self._outer:
            check_is_fitted(level)
        members = [model] if self._mean is None else self._mean.estimators_
        self._members = [self._member(member) for member in members]
        self._shares = None if self._mean is None else _shares_of(self._mean)
        self.classes = self._members[0].classes
        names = [(i, j, name) for i, member in enumerate(self._members) for j, name in enumerate(member.names)]
        prefix = "" if self._mean is None else "estimators_[{}]."
        self._places = {prefix.format(i) + name: (i, j) for i, j, name in names}  # member and layer, by name

    def _member(self, member: Any) -> Member:
        try:
            return Member(member, self._output)
        except TypeError as error:
            if self._mean is None:
                raise
            raise TypeError(
                f"cannot repair a {type(self._mean).__name__} that holds a {type(levels(member)[-1]).__name__}: all of "
                "its models must be networks or linear models of scikit-learn. Fit it without that one, or repair each "
                "model alone."
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

    def free_zeros(self) -> "SklearnAdapter":
        """Let coefficients of linear models that are 0 change like the others; returns self."""
        for member in self._members:
            member.used = None
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
        arrays = [pair for member in self._members for pair in member.arrays()]
        return tuple(
            LinearLayer(name, i, weight.astype(float), None if bias is None else np.array(bias, dtype=float))
            for i, (name, (weight, bias)) in enumerate(zip(self._places, arrays, strict=True))
        )

    def _forward(self, x: Any) -> list[tuple[list[NDArray[Any]], NDArray[Any]]]:
        """Of every member the inputs of its layers and the output of the last."""
        if several_inputs(x) is not None:
            raise InputError("`X` is several inputs; a scikit-learn model takes one table.")
        x = before_last(self._outer, to_numpy(x) if hasattr(x, "detach") else x)
        if not isinstance(self._mean, BaggingRegressor):
            return [member.forward(x) for member in self._members]
        table, columns = check_features(x), self._mean.estimators_features_
        return [member.forward(table[:, own]) for member, own in zip(self._members, columns, strict=True)]

    def _finish(self, outputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Predictions (rows,) of what the last layer of each member gives."""
        finished = [member.finish(z) for member, z in zip(self._members, outputs, strict=True)]
        if self._shares is None:
            return finished[0]
        mean = np.average(np.column_stack(finished), axis=1, weights=self._shares)
        return np.asarray(finish_target(self._outer, mean[:, None])).ravel()

    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        wanted = {name: self._places[self._layer(name).name] for name in names}
        passes = self._forward(x)
        return {name: passes[i][0][j] for name, (i, j) in wanted.items()}, self._finish([last for _, last in passes])

    def _edited(self, weights: Weights) -> "SklearnAdapter":
        twin = SklearnAdapter(copy.deepcopy(self._model), output=self._output)
        for mine, its in zip(self._members, twin._members, strict=True):
            its.used = mine.used
        for name, (weight, bias) in weights.items():
            i, j = self._places[name]
            twin._members[i].write(j, weight, bias)
        for member in twin._members:
            if member.negative:
                words = f"{member.negative} of {np.size(member.last.coef_)} repaired coefficients are negative."
                warnings.warn(ESVDFairWarning(f"The {member.kind} has positive=True, but {words}"), stacklevel=3)
        return twin

    def _predict(self, x: Any) -> NDArray[Any]:
        """By the model's own `predict`, or `predict_proba`."""
        x, first = to_numpy(x) if hasattr(x, "detach") else x, self._members[0]
        if self.classes is None:
            prediction = np.asarray(self._model.predict(x))
            return prediction.ravel() if self._mean is not None else first.column_of(prediction)
        if first.activation == "half":
            return np.asarray((self._model.decision_function(x) + 1) / 2)
        return np.asarray(self._model.predict_proba(x)[:, 1])

    def _tail(self, rows: Any) -> Tail:
        lasts = [last for _, last in self._forward(rows)]
        names = [name for name, (i, j) in self._places.items() if j == len(self._members[i].names) - 1]
        output, ends = np.column_stack(lasts), np.cumsum([last.shape[1] for last in lasts])[:-1]

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = z.astype(output.dtype)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
                return values, self._finish(np.split(values, ends, axis=1))

        link = "a mean of models" if self._mean is not None else self._members[0].activation
        steps = [link, *target_steps(self._outer or self._members[0].levels)]
        operation = ", ".join(step for step in steps if step != "identity") or "nothing"
        sections = tuple(Section(name, 1, last.shape[1]) for name, last in zip(names, lasts, strict=True))
        return Tail(" + ".join(names), rows, output, run, operation, sections=sections)


def _shares_of(mean: Any) -> NDArray[np.float64]:
    """(members,) weight of each, which add up to 1."""
    weights = getattr(mean, "weights", None)
    if weights is None:
        return np.full(len(mean.estimators_), 1 / len(mean.estimators_))
    kept = [w for (_, estimator), w in zip(mean.estimators, weights, strict=True) if not isinstance(estimator, str)]
    return np.asarray(np.array(kept, dtype=np.float64) / np.sum(kept))


def _set_line(model: Any, weight: NDArray[Any], bias: NDArray[Any] | None) -> None:
    """Give a linear model coefficients (m, n) and an intercept, in the shape and the type of those that it has."""
    model.coef_ = weight.reshape(np.shape(model.coef_))
    if bias is None:
        return
    if hasattr(model, "_x_mean"):  # partial least squares subtracts the mean first
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


# --- which models -----------------------------------------------------------------------------------------------------


def _known_levels(model: Any) -> tuple[Any, ...]:
    """The model and what it wraps, down to the one with the layers; `TypeError` if there is none."""
    *_, last = found = levels(model)
    known = isinstance(last, (*_NETWORKS, LinearSVR)) or type(last).__module__.startswith(_LINEAR_MODULES)
    if not known and not getattr(last, "__dict__", {}).keys() >= _LINEAR:
        inside = "" if len(found) == 1 else f" (inside a {type(model).__name__})"
        raise TypeError(
            f"cannot repair a {type(last).__name__}{inside}, which has no linear layer that is known here. Of "
            "scikit-learn, networks, linear models and tree ensembles are supported, alone, as last step of a "
            "Pipeline, or inside a TransformedTargetRegressor, FrozenEstimator or GridSearchCV. Other models: see "
            "esvdfair.baselines, which change scores."
        )
    return found


def _check_network(model: Any) -> None:
    """Raise unless the layers of a network are numbers and fit together."""
    weights, biases = (list(getattr(model, name, [])) for name in ("coefs_", "intercepts_"))
    numbers = all(np.asarray(weight).dtype.kind in "fiu" for weight in weights)
    chained = all(before.shape[1] == len(after) for before, after in pairwise(weights))
    if not (weights and numbers and chained and [w.shape[1] for w in weights] == [len(b) for b in biases]):
        kind = type(model).__name__
        raise ValueError(f"coefs_ and intercepts_ of the {kind} do not match, or are not numbers. Fit it again.")


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
        return "clipped" if getattr(model, "loss", None) == "modified_huber" else "logistic"
    if isinstance(model, linear_model.TweedieRegressor):
        return "identity" if model.link == "identity" or (model.link == "auto" and model.power <= 0) else "exp"
    return "exp" if isinstance(model, linear_model.PoissonRegressor | linear_model.GammaRegressor) else "identity"


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


# --- estimators that wrap a model: what they do before it and after it ------------------------------------------------

_INNER: dict[str, tuple[str, str, Any]] = {  # where a wrapper has its model, once fitted and before; the usual one
    "FrozenEstimator": ("estimator", "estimator", None),
    "TransformedTargetRegressor": ("regressor_", "regressor", linear_model.LinearRegression()),
    "BaseSearchCV": ("best_estimator_", "estimator", None),
    "RANSACRegressor": ("estimator_", "estimator", linear_model.LinearRegression()),
    "StackingRegressor": ("final_estimator_", "final_estimator", linear_model.RidgeCV()),
    "StackingClassifier": ("final_estimator_", "final_estimator", linear_model.LogisticRegression()),
}


def levels(model: Any) -> tuple[Any, ...]:
    """The model and what it wraps, down to what is no Pipeline, target transformer, search, stack or calibration."""
    if isinstance(model, Pipeline):
        return (model, *levels(model.steps[-1][1]))
    if isinstance(model, CalibratedClassifierCV):
        return (model, *levels(_calibrated(model)[0]))
    for base in type(model).__mro__:
        if base.__module__.startswith("sklearn.") and base.__name__ in _INNER:
            fitted, given, usual = _INNER[base.__name__]
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
