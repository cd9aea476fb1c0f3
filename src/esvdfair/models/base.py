"""What the rest of the library may ask of a model, whatever framework it comes from.

Everything above `models/` speaks to a network through `ModelAdapter` alone. An adapter

- lists the linear layers that the prediction passes through, in the order in which they run;
- hands out the inputs of some of them together with the prediction, from one forward pass;
- puts new weights into a **copy** of the model;
- says what maps the last linear layer's output to the prediction (a `Head`).

Rules that every adapter keeps (for whoever writes the next one):

- The user's model is never changed, not even when a call raises.
- `layers` lists a linear layer only if the prediction depends on it. A layer that does not run, or that feeds
  another output only, is left out; asking for it by name is then an error of `find_layer` or of `capture`.
- A layer that runs but cannot be edited by itself (tied weights, called twice, lazy, quantised) is a `ValueError` that
  names it, raised by `layers`: an index must not silently skip a layer. A hidden layer whose weight is computed from
  others (spectral norm, pruning) is listed; `replace` refuses it.
- `weight` is (outputs, inputs), however the framework stores it, in what it lists and in what `replace` takes back.
- `capture` runs its whole argument in one pass and returns the framework's own arrays on the model's own device;
  the caller makes the batches. `predict` takes any number of rows, batches by itself and returns NumPy.
- `layers` and `head` look at the first `PROBE_ROWS` rows of the batch they are given, and remember the answer.
- `head` does not trust the batch alone, on which a clamp may be idle: chosen values stand in for what the layer gives.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from esvdfair.core.checks import check_numbers, row_count, row_slice, to_numpy
from esvdfair.core.quadratic import KINDS, Head
from esvdfair.exceptions import InputError

Array = NDArray[np.float64]

PROBE_ROWS = 256
"""Rows of a batch that `layers` and `head` look at: enough to see the structure, cheap on any model."""

TIME_LIMIT = "ESVDFAIR_TIME_LIMIT"
"""Environment variable: seconds that a model from a file may take for one batch; a file may hold an endless loop."""

PREDICT_ROWS = 8192
"""Rows that `predict` runs at once: hidden activations of this many rows are all it holds."""

SIGMOID = "sigmoid"
"""The `output` that takes a logit for a score: its sigmoid is the prediction."""

Weights = Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]]
"""New weight (m, n) and bias (m,) of layers, by name; a bias of None keeps the one that is there."""


@dataclass(frozen=True)
class LinearLayer:
    """A layer `Z = X Wᵀ + b` of a model: a copy of its weights in float64.

    Parameters
    ----------
    name : str
        How the framework calls it: "net.3" in torch, "coefs_[2]" in scikit-learn.
    index : int
        Position among the linear layers that feed the prediction, in order of execution.
    weight : (m, n) float64
    bias : (m,) float64, or None when the layer has none
    """

    name: str
    index: int
    weight: NDArray[np.float64]
    bias: NDArray[np.float64] | None


@dataclass(frozen=True)
class Column:
    """What of the last layer the prediction depends on: one of its outputs, or one less another (two classes).

    A wide layer is listed with that one output; `replace` puts new weights where they belong and leaves all others
    alone.
    """

    layer: str
    index: int
    minus: int | None = None

    def read(self, values: NDArray[Any]) -> NDArray[Any]:
        """(1, ...) of the layer's weight or bias (m, ...)."""
        own = values[[self.index]]
        return own if self.minus is None else own - values[[self.minus]]

    def write(self, values: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        """A weight or bias (m, ...) of which `read` gives `new`."""
        values = values.copy()
        values[self.index] = new[0] if self.minus is None else new[0] + values[self.minus]
        return values

    def outputs(self, like: NDArray[Any], points: Array) -> Array:
        """Outputs (n, m) of the layer that are seen as `points`, in the other columns as in `like`."""
        z = like[np.arange(len(points)) % len(like)].astype(np.float64)
        z[:, self.index] = points
        if self.minus is not None:
            z[:, self.minus] = 0
        return z

    def of(self, layer: LinearLayer) -> LinearLayer:
        """The layer with this one output."""
        bias = None if layer.bias is None else self.read(layer.bias)
        return replace(layer, weight=self.read(layer.weight), bias=bias)


@dataclass(frozen=True)
class OutputLayer:
    """The output layer as some rows show it: all that a refit needs to know of a model.

    Attributes
    ----------
    layer : its weights, (1, n) and (1,) or None
    head : what maps its output to the prediction
    column : which of several outputs it is, or None
    added : the layer, and a parameter that is its bias although the model adds it itself (torch), or None
    """

    layer: LinearLayer
    head: Head
    column: Column | None = None
    added: tuple[str, str] | None = None


@dataclass(frozen=True)
class Tail:
    """What follows the last linear layer of a model, laid open."""

    layer: str  # name of the last linear layer
    rows: Any  # the rows that were looked at
    output: NDArray[Any]  # (rows, ...) what the layer gives for them
    # Takes outputs z (n, ...) to `(z, prediction)`: z as the model's arithmetic holds it, and what the model makes of
    # it, with rows of the batch repeated as needed.
    run: Callable[[Array], tuple[NDArray[Any], NDArray[Any]]]
    operation: str  # what stands between the two, by name
    kinds: Sequence[str] = KINDS  # of head that this can be
    joined: str | None = None  # first operation that brings in something else which depends on the input
    eps: float | None = None  # relative spacing of the model's arithmetic, where the dtype of the arrays does not tell


class ModelAdapter(ABC):
    """One trained regressor, seen through its linear layers."""

    column: Column | None = None
    added: tuple[str, str] | None = None  # the last layer, and a parameter that the model adds to its output
    classes: Sequence[Any] | None = None  # the two that a classifier tells apart, whose score is the prediction
    ridges: tuple[float, ...] | None = None  # regularisations that suit the model; None for the usual ones
    trees: bool = False  # whether it is a tree ensemble: it fits its training rows closely, and may take missing values
    _model: Any

    @property
    def model(self) -> Any:
        """The user's model object; of one with new weights, the copy that has them."""
        return self._model

    @property
    @abstractmethod
    def n_features(self) -> int | None:
        """Number of input columns, where the model tells."""

    @abstractmethod
    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Run one forward pass over all rows of `x`.

        Returns
        -------
        inputs : dict
            For each name the input of that layer, (rows, ..., n).
        prediction : (rows,)
            Both in the framework's own arrays, on the model's device, without gradients.
        """

    @abstractmethod
    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        """What `layers` lists, each with all of its outputs; only torch needs rows to tell."""

    @abstractmethod
    def _edited(self, weights: Weights) -> Self:
        """The adapter of a copy that has these weights of whole layers, which fit, in the dtype of the old ones."""

    @abstractmethod
    def _predict(self, x: Any) -> Any:
        """Predictions (rows,) for all rows of `x` at once, in the framework's own arrays."""

    @abstractmethod
    def _tail(self, rows: Any) -> Tail:
        """What follows the last linear layer, seen on some rows."""

    def layers(self, x: Any = None) -> tuple[LinearLayer, ...]:
        """Linear layers that feed the prediction, in order of execution, found by running some rows of `x`.

        If the last one is wide, it is listed as what of it the prediction depends on; without rows, as it is.
        """
        layers = self._all_layers(x)
        if x is None or len(layers[-1].weight) == 1:
            return layers
        self.column = self.column or _find_column(self._tail(first_rows(x)))
        return layers if self.column is None else (*layers[:-1], self.column.of(layers[-1]))

    def output_layer(self, x: Any) -> OutputLayer:
        """Find the output layer and its head on some rows."""
        layer, head = self.layers(x)[-1], self.head(x)
        return OutputLayer(layer, head, self.column, self.added)

    def with_output(self, known: OutputLayer) -> Self:
        """Take the output layer as known, so that `replace` needs no rows; returns self."""
        self.column, self.added = known.column, known.added
        return self

    def predict(self, x: Any) -> NDArray[Any]:
        """Predictions for `x`, (rows,), as NumPy in the dtype of the model (float32 for bfloat16), in batches."""
        starts = range(0, max(row_count(x), 1), PREDICT_ROWS)
        return np.concatenate([to_numpy(self._predict(row_slice(x, start, start + PREDICT_ROWS))) for start in starts])

    def replace(self, weights: Weights) -> Self:
        """Put `{name: (weight, bias)}` into a copy of the model; a bias of None keeps the one that is there.

        Type, dtype, device and training flags are those of the original. A layer without bias cannot be given
        one: that would be another architecture, so it is a `ValueError`.
        """
        new = {}
        for name, (weight, bias) in weights.items():
            layer, column = self._layer(name), self.column
            if column is None or column.layer != name:
                check_replacement(layer, weight, bias)
            else:
                check_replacement(column.of(layer), weight, bias)
                weight = column.write(layer.weight, weight)
                bias = None if bias is None or layer.bias is None else column.write(layer.bias, bias)
            new[name] = weight, bias
        twin = self._edited(new)
        twin.column = self.column
        return twin

    def head(self, x: Any) -> Head:
        """Find what maps the last linear layer's output to the prediction.

        What follows the layer is run on chosen values, within and beyond the range of what the layer gives on `x`; its
        operations are named when they make none of the known kinds.
        """
        tail = self._tail(first_rows(x))
        rows, shape = tail.rows, tail.output.shape
        self.column = column = self.column or _find_column(tail)
        if column is None:
            raise ValueError(
                f"the last linear layer {tail.layer!r} gives shape {shape} for {row_count(rows)} rows, and "
                f"{tail.operation} makes one prediction a row of them. Only one of its outputs, or the difference of "
                "two, can stand before a head. A product with a bare parameter is not seen as a layer: make it an "
                "nn.Linear."
            )
        if tail.joined is not None:
            raise ValueError(_bypassed(tail.layer, repr(tail.joined)))
        outputs = tail.output.reshape(len(tail.output), -1)
        points = probe_points(column.read(outputs.T))

        def run(points: Array) -> tuple[NDArray[Any], NDArray[Any]]:
            z, prediction = tail.run(column.outputs(outputs, points).reshape(-1, *shape[1:]))
            return column.read(z.reshape(len(z), -1).T)[0], prediction

        tried = column.outputs(outputs, points).reshape(-1, *shape[1:])
        z, prediction = tail.run(tried)
        eps = tail.eps or _spacing(z, prediction)
        # Half of the points with other rows and another batch: a head sees neither.
        half = len(points) // 2
        if not _close(prediction[::-1][:half], tail.run(tried[::-1][:half])[1], 8 * eps):
            self._check_repeats(rows, eps)
            raise ValueError(_bypassed(tail.layer, tail.operation))
        z = column.read(z.reshape(len(z), -1).T)[0]
        if "identity" in tail.kinds and np.array_equal(z, prediction):
            head = Head("identity")
        else:
            head = find_head(z, prediction, kinds=tail.kinds, operation=tail.operation, eps=eps, run=run)
        self._check_rows(rows, eps)
        self._check_captured(rows, head, eps)
        return head

    def _layer(self, name: str) -> LinearLayer:
        """A layer that can be given new weights, all of its outputs; `ValueError` if there is none of that name."""
        return find_layer(self._all_layers(None), name)

    def _check_repeats(self, rows: Any, eps: float) -> NDArray[Any]:
        """Raise unless the model predicts the same for the same rows; the prediction."""
        first, second = self.predict(rows), self.predict(rows)
        if not same_values(first, second, eps):
            raise ValueError(
                "the model predicts other values for the same rows when it runs again: something in it stays random, "
                "such as dropout or input noise that is not switched off for prediction. Switch it off."
            )
        return first

    def _check_rows(self, rows: Any, eps: float) -> None:
        """Raise unless the prediction of a row is a function of that row alone."""
        whole, half = self._check_repeats(rows, eps), (row_count(rows) + 1) // 2
        parts = [row_slice(rows, 0, half), row_slice(rows, half, row_count(rows))]
        apart = np.concatenate([self.predict(part) for part in parts if row_count(part)])
        if not same_values(whole, apart, eps):
            raise ValueError(
                "the model predicts other values for a row when other rows stand beside it (a mean over the batch, or "
                "a batch norm without statistics of its own), so its prediction is no function of the row."
            )

    def _check_captured(self, rows: Any, head: Head, eps: float) -> None:
        """Raise unless inputs of the last layer, its weights and the head make what the model itself predicts."""
        layer = self.layers(rows)[-1]
        inputs, captured = self.capture(rows, [layer.name])
        features, predicted = to_numpy(inputs[layer.name]).astype(np.float64), self.predict(rows).astype(np.float64)
        if features.shape != (len(predicted), layer.weight.shape[1]):
            return  # the layer sees several vectors of a row, which is refused where one is needed
        bias = 0.0 if layer.bias is None else layer.bias[0]
        with np.errstate(all="ignore"):
            z, size = features @ layer.weight[0] + bias, np.abs(features) @ np.abs(layer.weight[0]) + abs(bias)
            low, computed, high = (head.apply(z + step * eps * size) for step in (-64.0, 0.0, 64.0))
            allowed = np.abs(high - low) + _rounding(predicted, eps)
            misses = np.abs(np.stack([computed, to_numpy(captured).astype(np.float64)]) - predicted) > allowed
        if misses.any():  # values that are not finite are refused elsewhere
            which, row = np.argwhere(misses)[0]
            found = (computed, captured)[which][row]
            raise ValueError(
                f"the model predicts {predicted[row]:.4g} where its linear layers give {float(found):.4g}, as its "
                "predict changes what they compute. Pass a model without that change, and apply it to the predictions."
            )


def adapt(model: Any, *, output: Any = None) -> ModelAdapter:
    """Wrap a trained model in the adapter of its framework.

    Parameters
    ----------
    model : torch.nn.Module, fitted scikit-learn network or linear model, tree ensemble of scikit-learn, LightGBM,
        XGBoost or CatBoost, or path or bytes of an ONNX file or of a file of these three libraries
        A scikit-learn model may be the last step of a Pipeline, inside a TransformedTargetRegressor, a FrozenEstimator
        or a GridSearchCV. Of a classifier of two classes the score P(second class | x) is the prediction.
    output : str, int, tuple or callable, optional
        Which of several outputs, or columns of an output, is the prediction.

    Raises
    ------
    TypeError
        The model is of no supported type.
    sklearn.exceptions.NotFittedError
        A scikit-learn model that is not fitted.
    """
    # By name, so that torch is not imported for those who do not use it.
    origins = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    adapter: Callable[..., ModelAdapter]
    if has_trees(model):
        from esvdfair.models.trees import TreeAdapter as adapter
    elif isinstance(model, str | bytes | bytearray | os.PathLike):
        from esvdfair.models.tree_files import TreeFileAdapter, tree_format

        if tree_format(model) is not None:
            return TreeFileAdapter(model, output=output)
        from esvdfair.models.onnx import adapt_onnx as adapter
    elif ("torch", "Module") in origins:
        from esvdfair.models.torch import TorchAdapter as adapter
    elif ("sklearn", "BaseEstimator") in origins or (
        hasattr(model, "predict") and getattr(model, "__dict__", {}).keys() >= {"coef_", "intercept_"}
    ):
        from esvdfair.models.sklearn import SklearnAdapter as adapter
        from esvdfair.models.sklearn import is_skorch, levels

        if is_skorch(levels(model)[-1]):
            from esvdfair.models.skorch import SkorchAdapter as adapter
    else:
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        for holder in ("lightning_module", "model"):  # Lightning's and Hugging Face's trainers
            if hasattr(getattr(model, holder, None), "state_dict"):
                raise TypeError(
                    f"cannot repair a {kind} itself; pass the network that it holds: its attribute {holder}."
                )
        raise TypeError(
            f"cannot repair a {kind}. Supported are a torch.nn.Module, a network, linear model or tree ensemble of "
            "scikit-learn (also in a Pipeline or GridSearchCV), a model of LightGBM, XGBoost or CatBoost, and a "
            "path or the bytes of an ONNX model. The predictions of any other model can be moved by esvdfair.baselines."
        )
    return adapter(model, output=output)


def has_trees(model: Any) -> bool:
    """Whether the model is a tree ensemble, or wraps one."""
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if not packages & {"sklearn", "lightgbm", "xgboost", "catboost"}:
        return False
    from esvdfair.models.sklearn import levels

    homes = ("sklearn.tree.", "sklearn.ensemble.", "lightgbm.", "xgboost.", "catboost.")
    return any(base.__module__.startswith(homes) for base in type(levels(model)[-1]).__mro__)


def first_rows(x: Any) -> Any:
    """The rows of a batch that are looked at."""
    if row_count(x) == 0:
        raise ValueError("got a batch of no rows; at least one is needed to see the layers and the head of the model.")
    return row_slice(x, 0, PROBE_ROWS)


def is_frame(x: Any) -> bool:
    """Whether `x` is a table with named columns."""
    return hasattr(x, "iloc") and hasattr(x, "columns")


def numeric(x: Any, taker: str, column: str = "X") -> NDArray[Any]:
    """Numbers of an array or a table, missing ones as NaN.

    Text that looks like a number is still text: how it was encoded in training is not ours to guess.
    """
    try:
        return check_numbers(x.toarray() if hasattr(x, "toarray") else x, "X")
    except InputError:
        for place, name in enumerate(x.columns if is_frame(x) else ()):
            numeric(x.iloc[:, place], taker, repr(name))  # raises at the column that is to blame
        raise ValueError(
            f"column {column} is not numeric ({getattr(x, 'dtype', type(x).__name__)}), and {taker} takes numbers. "
            "Encode it as it was encoded in training."
        ) from None


def as_column(prediction: Any, rows: int, place: int | None = None) -> Any:
    """Predictions as (rows,), from (rows,), (rows, 1), () for one row that was squeezed, or one column of several."""
    shape = tuple(prediction.shape)
    wide = len(shape) == 2 and shape[0] == rows and shape[1] > 1
    if wide and place is not None and -shape[1] <= place < shape[1]:
        return prediction[:, place]
    if int(np.prod(shape)) == rows and (shape[:1] == (rows,) or (shape == () and rows == 1)) and place in (None, 0, -1):
        return prediction.reshape(rows)
    if place is not None or wide:
        raise InputError(
            f"the model returns shape {shape} for {rows} rows: more than one output column. Choose one with `output`."
            if place is None
            else f"the model returns shape {shape} for {rows} rows, which has no column `output={place}`."
        )
    raise ValueError(f"the model returns shape {shape} for {rows} rows; it must be ({rows},) or ({rows}, 1).")


def find_layer(layers: Sequence[LinearLayer], which: int | str) -> LinearLayer:
    """Look up a layer by index (negative counts from the end) or by name; the error lists what there is."""
    rows = (f"{layer.index}: {layer.name!r} ({layer.weight.shape[1]} → {layer.weight.shape[0]})" for layer in layers)
    listing = f"The linear layers in order of execution are {', '.join(rows) or 'none'}."
    if isinstance(which, str):
        for layer in layers:
            if layer.name == which:
                return layer
        raise ValueError(
            f"no linear layer named {which!r} feeds the prediction. {listing} A layer that the forward pass does not "
            "reach is not listed."
        )
    if isinstance(which, bool) or not isinstance(which, int | np.integer):
        raise TypeError(f"layer must be an index or a name, got {which!r}. {listing}")
    if which == -2 and len(layers) == 1:
        raise InputError(
            f"the model has one linear layer, {layers[0].name!r}, and no hidden layer to edit. Use "
            "`method='transport'`, which edits the last layer alone."
        )
    if not -len(layers) <= which < len(layers):
        raise ValueError(f"layer {which} is out of range. {listing}")
    return layers[which]


def check_replacement(layer: LinearLayer, weight: NDArray[Any], bias: NDArray[Any] | None) -> None:
    """Raise `ValueError` unless `weight` and `bias` fit the layer (m, n) and are finite."""
    shape = layer.weight.shape
    if np.shape(weight) != shape:
        raise ValueError(f"new weight of layer {layer.name!r} has shape {np.shape(weight)}; it must be {shape}.")
    if bias is not None and layer.bias is None:
        raise ValueError(
            f"layer {layer.name!r} has no bias, and adding one would change the architecture. Solve without an "
            "intercept, or rebuild the model with bias=True."
        )
    if bias is not None and np.shape(bias) != shape[:1]:
        raise ValueError(f"new bias of layer {layer.name!r} has shape {np.shape(bias)}; it must be {shape[:1]}.")
    if not np.all(np.isfinite(weight)) or (bias is not None and not np.all(np.isfinite(bias))):
        raise ValueError(f"new weights of layer {layer.name!r} are not all finite.")


def rounded(layer: str, values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """New weights in the dtype of the old ones; `ValueError` where that makes them infinite."""
    with np.errstate(over="ignore"):
        new = np.asarray(values, dtype=np.float64).astype(dtype)
    if not np.all(np.isfinite(new)):
        raise ValueError(f"new weights of layer {layer!r} are too large for {dtype}.")
    return new


# --- what stands between the last linear layer and the prediction -----------------------------------------------------

# What torch and ONNX call the operations that make the known kinds of head, in lower case. Whether together they make
# one of them is found numerically; with anything else (clamp, relu, tanh, where) the head is some monotone function.
_MOVES = frozenset({  # move numbers about and leave them as they are
    "view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "squeeze", "unsqueeze", "select", "slice", "t",
    "transpose", "permute", "expand", "clone", "alias", "identity", "detach", "_to_copy", "cast", "castlike", "copy",
    "contiguous", "unbind", "split", "split_with_sizes", "index", "gather", "concat", "lift_fresh", "dropout",
})  # fmt: skip
_LINES = frozenset({  # can make an affine map
    "add", "sub", "rsub", "mul", "div", "neg", "addmm", "mm", "bmm", "addmv", "mv", "dot", "linear", "addcmul", "sum",
    "mean", "reducesum", "reducemean", "batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_no_update", "batchnormalization", "scaler",
})  # fmt: skip
_CURVES = frozenset({"sigmoid", "softplus"})  # are a kind of head by themselves
_PARTS = frozenset({  # a curve can be put together of them
    "exp", "exp2", "expm1", "log", "log1p", "reciprocal", "pow", "logaddexp", "log_sigmoid_forward", "_softmax",
    "softmax",
})  # fmt: skip

_QUANTILES = 64  # of a batch, the first of the points at which a head is looked at
_MAX_KNOTS = 20_000  # of a head that is followed point by point
_MIN_POINTS = 8  # different outputs of the last layer, to tell which head follows it


def name_operations(operations: Iterable[str]) -> tuple[str, Sequence[str]]:
    """Operations as an error names them, and the kinds of head that they can make.

    Those that are in no known kind are named alone, and make none.
    """
    names = [name for name in dict.fromkeys(operations) if name.lower() not in _MOVES]
    foreign = [name for name in names if name.lower() not in _LINES | _CURVES | _PARTS]
    text = ", ".join(map(repr, foreign or names)) or "no operation that could be seen"
    bends = {name.lower() for name in names} - _LINES
    if foreign:
        return text, ()
    if not bends:
        return text, ("identity", "affine")
    return text, tuple(bends) if len(bends) == 1 and bends <= _CURVES else KINDS


def probe_points(z: Any) -> Array:
    """Outputs of the last layer at which to look at a head: where a batch `z` lies, and well beyond.

    A third are quantiles of `z`; a third cover three times its range (at least four either side of its middle), so
    that a clamp that the batch does not touch shows, and a narrow batch cannot pass a curve for a line; a third lie
    around zero, where a softplus and a relu differ on any scale.
    """
    flat = np.asarray(z, dtype=np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    if flat.size == 0:
        flat = np.zeros(1)
    low, high = float(flat.min()), float(flat.max())
    middle, reach = (low + high) / 2, max(1.5 * (high - low), 4.0)
    inside = np.quantile(flat, np.linspace(0.0, 1.0, _QUANTILES))
    beyond = np.linspace(middle - reach, middle + reach, 64)
    return np.concatenate([inside, beyond, np.linspace(-8.0, 8.0, 64)])


def _find_column(tail: Tail) -> Column | None:
    """Which outputs of the last layer move the prediction, if it is one, or two by their difference alone."""
    z = tail.output.astype(np.float64)
    if z.ndim != 2 or z.shape[1] == 1:
        rows = row_count(tail.rows)
        return Column(tail.layer, 0) if z.shape in ((rows,), (rows, 1)) else None
    before = tail.run(z)[1]
    shift = np.random.default_rng(0).uniform(0.5, 1.5, (z.shape[1],))  # unequal, or a softmax would not see all at once

    def moving(columns: NDArray[np.intp]) -> list[int]:
        moved = z.copy()
        moved[:, columns] += shift[columns]
        if np.array_equal(tail.run(moved)[1], before, equal_nan=True):
            return []
        if len(columns) == 1:
            return [int(columns[0])]
        found = moving(columns[: len(columns) // 2])
        return found if len(found) > 2 else found + moving(columns[len(columns) // 2 :])

    found = moving(np.arange(z.shape[1]))
    if len(found) == 1:
        return Column(tail.layer, found[0])
    if len(found) != 2 or not _close(before, tail.run(z + 1.0)[1], 1e-3):
        return None
    z[:, found[1]] += 1
    rises = float(np.nanmean(tail.run(z)[1] - before)) > 0
    return Column(tail.layer, found[rises], minus=found[not rises])


def find_head(
    z: Any,
    prediction: Any,
    *,
    kinds: Sequence[str] = KINDS,
    operation: str = "an unknown operation",
    eps: float | None = None,
    run: Callable[[Array], tuple[NDArray[Any], NDArray[Any]]] | None = None,
) -> Head:
    """Find the head, of some kinds, that maps outputs of the last layer `z` (n,) to `prediction` (n,).

    `operation`, what the adapter knows to stand between the two, is named in the error. `eps` is the relative spacing
    of the arithmetic that made `prediction` (0.0078 for bfloat16; by default the coarser of the two dtypes). `run` is
    the head itself, which is followed point by point where no kind fits. That it is not monotone, that `z` varies too
    little to tell, or `prediction` not at all, is a `ValueError`.
    """
    eps = eps or _spacing(z, prediction)
    # Some dozens of roundings, but few of bfloat16's, which are 0.8 % each; and torch's softplus is the identity above
    # 20, which is 2e-9 from the formula in float64 too.
    tolerance = max(1e-9, min(64 * eps, 2e-3), 5 * eps)
    z, p = (np.asarray(values, dtype=np.float64).ravel() for values in (z, prediction))
    usable = np.isfinite(z) & ~np.isinf(p)  # inf is an overflow of the model's dtype
    z, p = z[usable], p[usable]
    if np.isnan(p).any():  # a logarithm or a root, outside its domain
        raise ValueError(
            f"the prediction is made from the last linear layer's output by {operation}, which is NaN for "
            f"{z[np.isnan(p)][0]:.3g}. Use one that is defined everywhere, such as exp or a QuantileTransformer."
        )
    if np.unique(z).size < _MIN_POINTS:
        raise ValueError(
            f"the last linear layer gives {np.unique(z).size} different outputs on this batch; telling which "
            f"head follows it needs at least {_MIN_POINTS}. Pass more rows, or check that the model is not constant."
        )
    if np.ptp(p) <= tolerance * np.abs(p).max():
        raise ValueError(
            f"the predictions are constant ({p[0]:.6g}) although the last linear layer's output varies: the head "
            "is saturated or ignores it, so there is nothing to refit. Check the model on this batch."
        )
    # Rounding is relative to p, but where p passes through zero the terms it is made of are not small.
    weight = 1.0 / np.maximum(np.abs(p), np.median(np.abs(p[p != 0])))
    for family in (_plain_fits, _general_fits):
        fits = [(head, float(np.max(np.abs(head.apply(z) - p) * weight))) for head in family(z, p, weight, kinds)]
        fits = [(head, miss) for head, miss in fits if miss <= tolerance and _resolved(head, z)]  # NaN is none
        if fits:
            best = min(miss for _, miss in fits)
            close = [head for head, miss in fits if miss <= 2 * best + 2 * eps]
            shapes = {"a line" if head.is_affine else head.kind for head in close}
            if len(shapes) > 1 and family is _plain_fits:  # they would differ off the batch
                raise ValueError(
                    "the last linear layer's outputs vary too little on this batch to tell "
                    f"{' from '.join(sorted(shapes))} as the head of the model. Pass rows that differ more."
                )
            return close[0]
    followed = None if run is None else _follow(run, z, eps)
    if followed is None:
        raise ValueError(_unsupported(operation))
    return followed


def _unsupported(operation: str) -> str:
    return (
        f"the prediction is made from the last linear layer's output by {operation}, which is not continuous and "
        "monotone. Take that operation out of the model and apply it to the predictions yourself."
    )


def _follow(run: Callable[[Array], tuple[NDArray[Any], NDArray[Any]]], z: Array, eps: float) -> Head | None:
    """A monotone head as points, so many that lines between them are right to 3e-7; None if it is not monotone."""
    spread, (z, p) = run(z[:_QUANTILES])[1].astype(np.float64), _in_order(run, z)
    middle, scale = float(np.median(spread)), float(np.ptp(spread)) or 1e-3 * float(np.ptp(p))
    tolerance, narrow = max(3e-7, min(64 * eps, 0.02)), 16 * eps * float(np.abs(z).max())
    open_pieces = np.ones(len(z) - 1, dtype=bool)
    for _ in range(50):
        wide = np.flatnonzero(open_pieces & (np.diff(z) > narrow))
        if not wide.size or len(z) > _MAX_KNOTS:
            break
        between = z[wide] + 0.382 * np.diff(z)[wide]  # not the middle, where an odd function is on its chord
        new_z, new_p = (np.asarray(found, dtype=np.float64).ravel() for found in run(between))
        allowed = tolerance * np.maximum(scale, np.abs(new_p - middle))
        miss = (np.abs(new_p - np.interp(new_z, z, p)) > allowed) & (new_z > z[wide]) & (new_z < z[wide + 1])
        at = wide[miss] + 1
        z, p = np.insert(z, at, new_z[miss]), np.insert(p, at, new_p[miss])
        inserted = at + np.arange(len(at))
        open_pieces = np.zeros(len(z) - 1, dtype=bool)
        open_pieces[inserted] = open_pieces[inserted - 1] = True
    jumps = (np.diff(z) <= narrow) & (np.abs(np.diff(p)) > 0.01 * scale)  # which the coarse dtypes have everywhere
    if jumps.any() and eps < 1e-4:
        return None
    falls = p[-1] < p[0]
    rising = np.maximum.accumulate(-p if falls else p)
    if np.max((rising - (-p if falls else p)) / np.maximum(scale, np.abs(p - middle))) > tolerance:
        return None
    return Head("monotone", knots=(z, -rising if falls else rising))


def _in_order(run: Callable[[Array], tuple[NDArray[Any], NDArray[Any]]], points: Array) -> tuple[Array, Array]:
    z, p = (np.asarray(found, dtype=np.float64).ravel() for found in run(np.unique(points)))
    z, first = np.unique(z, return_index=True)
    return z, p[first]


def _bypassed(layer: str, operation: str) -> str:
    return (
        f"the prediction of a row depends on more than its output of the last linear layer {layer!r}: {operation} "
        "brings in another branch of the model, or other rows, so it is no head that a refit could stand before."
    )


def _plain_fits(z: Array, p: Array, weight: Array, kinds: Sequence[str]) -> Iterator[Head]:
    """Heads with inner map z, from few parameters to more."""
    for kind in KINDS:
        if kind in kinds and kind != "affine":
            yield Head(kind)
        if kind in kinds and kind != "identity":
            yield _with_outer(kind, z, p, weight)


def _resolved(head: Head, z: Array) -> bool:
    """Whether enough points lie on the bend of a sigmoid or softplus: else it could as well be a step or a relu."""
    on_bend = np.abs(head.inner_scale * z + head.inner_offset) <= 4
    return head.kind not in _CURVES or np.unique(z[on_bend]).size >= _MIN_POINTS


def _with_outer(
    kind: str, z: Array, p: Array, weight: Array, inner_scale: float = 1.0, inner_offset: float = 0.0
) -> Head:
    """Least-squares scale and offset for given inner ones: min Σ wᵢ² (pᵢ − offset − scale·gᵢ)²."""
    g = Head(kind, inner_scale=inner_scale, inner_offset=inner_offset).apply(z)
    # Centring and scaling g keeps the two columns of the system independent when g is huge or nearly constant.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # scale and offset are NaN where none fits
        mass = weight**2 / np.sum(weight**2)
        centre_g, centre_p = mass @ g, mass @ p
        scale = float(mass @ ((g - centre_g) * (p - centre_p)) / (mass @ (g - centre_g) ** 2))
    return Head(kind, scale, float(centre_p - scale * centre_g), inner_scale, inner_offset)


def _general_fits(z: Array, p: Array, weight: Array, kinds: Sequence[str]) -> Iterator[Head]:
    """Heads with an inner map slope · (z − centre): a coarse search over it, then Gauss-Newton."""
    slopes = np.geomspace(0.5, 500.0, 14) / np.ptp(z)
    both = np.concatenate([slopes, -slopes])
    centres = np.linspace(z.min(), z.max(), 9)
    if "exp" in kinds:
        yield _refine("exp", z, p, weight, both, np.array([np.median(z)]))  # its centre is a scale
    if "sigmoid" in kinds:
        yield _refine("sigmoid", z, p, weight, slopes, centres)  # sigmoid(−u) = 1 − sigmoid(u)
    if "softplus" in kinds:
        yield _refine("softplus", z, p, weight, both, centres)


def _refine(kind: str, z: Array, p: Array, weight: Array, slopes: Array, centres: Array) -> Head:
    """Best head over slope and centre (over slope alone if there is one centre); scale and offset are solved for."""
    slope, centre = (grid.ravel() for grid in np.meshgrid(slopes, centres))
    mass = weight**2 / np.sum(weight**2)
    with np.errstate(all="ignore"):
        # What a regression of p on g leaves: var(p) − cov(g, p)² / var(g)
        g = Head(kind).apply(slope[:, None] * (z - centre[:, None]))
        g = g - (g @ mass)[:, None]
        gain = (g @ (mass * (p - mass @ p))) ** 2 / (g**2 @ mass)
    start = int(np.argmax(np.where(np.isfinite(gain), gain, -1.0)))

    def head_at(inner: Array) -> Head:
        inner_scale, middle = (float(value) for value in (*inner, centres[0])[:2])
        return _with_outer(kind, z, p, weight, inner_scale, -inner_scale * middle)

    def residual(inner: Array, /) -> Array:
        with np.errstate(invalid="ignore"):
            miss = (head_at(inner).apply(z) - p) * weight
        return np.where(np.isfinite(miss), miss, 1e6)

    free = min(centres.size, 2)
    sizes, first = (abs(slope[start]), np.ptp(z))[:free], (slope[start], centre[start])[:free]
    solved = least_squares(residual, first, x_scale=sizes, max_nfev=60, xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return head_at(solved.x)


def _spacing(*values: NDArray[Any]) -> float:
    """Relative spacing of the coarsest of the arrays' dtypes."""
    return max(float(np.finfo(array.dtype).eps) for array in values)


def _close(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    """Whether two computations of the same values differ by some roundings at most."""
    finite = np.abs(a[np.isfinite(a)])
    size = float(np.median(finite)) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True))


def same_values(a: NDArray[Any], b: NDArray[Any], eps: float) -> bool:
    """Whether predictions differ by no more than what another order of summation in a deep model may do to them."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True  # refused elsewhere, with a count of them
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.abs(a - b).max() <= _rounding(a, eps))


def _rounding(a: Array, eps: float) -> float:
    """What another order of summation may do to predictions."""
    return min(max(1e-6, 2**13 * eps), 0.1) * float(np.ptp(a)) + 64 * eps * float(np.abs(a).max())
