"""What the rest of the library may ask of a model, whatever framework it comes from.

Everything above `models/` speaks to a network through `ModelAdapter` alone. Rules that every adapter keeps:

- The user's model is never changed, not even when a call raises.
- `layers` lists a linear layer only if the prediction depends on it; a sum of several last layers is one layer at the
  end (see `readouts`). `weight` is (outputs, inputs), however the framework stores it.
- A layer that runs but cannot be edited by itself (tied weights, called twice, lazy, quantised) is a `ValueError` that
  names it, raised by `layers`: an index must not silently skip a layer. A hidden layer whose weight is computed from
  others (spectral norm, pruning) is listed, and refused by `replace`; hidden layers that an optimiser of ONNX fused are
  left out.
- `capture` runs its whole argument in one pass and returns the framework's own arrays on the model's own device;
  `predict` takes any number of rows, batches by itself and returns NumPy.
- `layers` and `head` look at the first `PROBE_ROWS` rows of the batch they are given, and remember the answer. `head`
  also tries chosen values for what the last layer gives: on the batch alone a clamp may be idle.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import check_numbers, row_count, take, to_numpy
from esvdfair.core.quadratic import Head
from esvdfair.exceptions import InputError
from esvdfair.models.heads import close, find_head, probe_points, rounding, same_values, spacing
from esvdfair.models.readouts import LinearLayer, Part, Readout, side_by_side
from esvdfair.models.tails import FEWEST_ROWS, Line, Tail, find_offset, find_readout, offsets_of

__all__ = ["LinearLayer", "ModelAdapter", "OutputLayer", "Part", "Readout", "Tail", "Weights"]

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
class OutputLayer:
    """The output layer as some rows show it: all that a refit needs to know of a model.

    Attributes
    ----------
    layer : its weights, (1, n) and (1,) or None
    head : what maps its output to the prediction
    readout : what it takes of the last layers, or None
    added : the layer, and a parameter that is its bias although the model adds it itself (torch), or None
    """

    layer: LinearLayer
    head: Head
    readout: Readout | None = None
    added: tuple[str, str] | None = None


class ModelAdapter(ABC):
    """One trained regressor, seen through its linear layers."""

    readout: Readout | None = None  # what the prediction takes of the last layers; found on rows where it is not set
    added: tuple[str, str] | None = None  # the last layer, and a parameter that the model adds to its output
    classes: Sequence[Any] | None = None  # the two that a classifier predicts, whose score is the prediction
    search: Mapping[str, tuple[float, ...]] = {}  # fields of Effort that suit the model better than the usual values
    trees: bool = False  # whether it is a tree ensemble, which fits its training rows closely
    takes_missing: bool = False  # whether it predicts rows without values of some inputs
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
    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """`capture` of layers that are listed by `_all_layers`."""

    @abstractmethod
    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        """The linear layers, each with all of its outputs; only torch needs rows to find them."""

    @abstractmethod
    def _edited(self, weights: Weights) -> Self:
        """The adapter of a copy that has these weights of whole layers, which fit, in the dtype of the old ones."""

    @abstractmethod
    def _predict(self, x: Any) -> Any:
        """Predictions (rows,) for all rows of `x` at once, in the framework's own arrays."""

    @abstractmethod
    def _tail(self, rows: Any) -> Tail:
        """What follows the last linear layers, seen on some rows."""

    @property
    def negative(self) -> int | None:
        """Number of negative coefficients of a linear model with ``positive=True``; None of other models."""
        return None

    def free_zeros(self) -> Self:
        """Let coefficients of a linear model that are 0 change like the others; returns self."""
        return self

    def _tail_of(self, x: Any, readout: Readout) -> Tail:
        """What follows the last layers that are known, seen on any rows."""
        return self._tail(x)

    def _position_weights(self, x: Any) -> dict[str, Any]:
        """(rows, positions) weights of the positions of every last layer, where they differ between rows."""
        raise NotImplementedError("this framework has no derivatives, so no part has positions=None.")

    def layers(self, x: Any = None) -> tuple[LinearLayer, ...]:
        """Linear layers that feed the prediction, in order of execution, found by running some rows of `x`.

        The last one is listed as what of it the prediction depends on, and a sum of several as one layer; without
        rows, as they are.
        """
        layers = self._all_layers(x)
        if x is not None and self.readout is None:
            self.readout = self._find_readout(self._tail(first_rows(x)))
        return layers if self.readout is None else self._joined(layers, self.readout)

    def _find_readout(self, tail: Tail) -> Readout | None:
        """What the prediction takes of the last layers and, where it takes something else too, the offset."""
        readout = find_readout(tail)
        if readout is None or tail.joined is None:
            return readout
        return replace(
            readout, offset=find_offset(tail, readout, lambda row: self._tail_of(take(tail.rows, row), readout))
        )

    def _joined(self, layers: Sequence[LinearLayer], readout: Readout) -> tuple[LinearLayer, ...]:
        """The layers, with those that the prediction is read off as one at the end."""
        last = {part.layer for part in readout.parts}
        before = [replace(each, index=index) for index, each in enumerate(e for e in layers if e.name not in last)]
        return (*before, replace(readout.layer(layers), index=len(before)))

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Run one forward pass over all rows of `x`.

        Returns
        -------
        inputs : dict
            For each name the input of that layer, (rows, ..., n); of the last one, (rows, n).
        prediction : (rows,)
            Both in the framework's own arrays, on the model's device, without gradients.
        """
        readout = self.readout
        if readout is None or readout.name not in names:
            return self._capture(x, names)
        wanted = dict.fromkeys([*(name for name in names if name != readout.name), *(p.layer for p in readout.parts)])
        inputs, prediction = self._capture(x, list(wanted))
        moving = any(part.positions is None for part in readout.parts)
        weights = self._position_weights(x) if moving else {}
        pooled = [part.pool(inputs[part.layer], weights.get(part.layer)) for part in readout.parts]
        if readout.offset is not None:
            offsets = offsets_of(Line.of(self._tail_of(x, readout), readout), readout.offset)[:, None]
            like = pooled[0]
            pooled.append(offsets.astype(like.dtype) if isinstance(like, np.ndarray) else like.new_tensor(offsets))
        found = {name: inputs[name] for name in names if name != readout.name}
        return found | {readout.name: pooled[0] if len(pooled) == 1 else side_by_side(pooled)}, prediction

    def with_output(self, known: OutputLayer) -> Self:
        """Take the output layer as known, so that `replace` needs no rows; returns self."""
        self.readout, self.added = known.readout, known.added
        return self

    def predict(self, x: Any) -> NDArray[Any]:
        """Predictions for `x`, (rows,), as NumPy in the dtype of the model (float32 for bfloat16), in batches."""
        parts = (take(x, slice(i, i + PREDICT_ROWS)) for i in range(0, max(row_count(x), 1), PREDICT_ROWS))
        return np.concatenate([to_numpy(self._predict(part)) for part in parts])

    def replace(self, weights: Weights) -> Self:
        """Put `{name: (weight, bias)}` into a copy of the model; a bias of None keeps the one that is there.

        Type, dtype, device and training flags are those of the original. A layer without bias cannot be given
        one: that would be another architecture, so it is a `ValueError`.
        """
        new: dict[str, tuple[NDArray[Any], NDArray[Any] | None]] = {}
        for name, (weight, bias) in weights.items():
            if self.readout is None or self.readout.name != name:
                check_replacement(self._layer(name), weight, bias)
                new[name] = weight, bias
                continue
            layers = [self._layer(part.layer) for part in self.readout.parts]
            check_replacement(self.readout.layer(layers), weight, bias)
            new |= self.readout.split(layers, weight, bias)
        twin = self._edited(new)
        twin.readout = self.readout
        return twin

    def head(self, x: Any) -> Head:
        """Find what maps the last linear layer's output to the prediction.

        What follows the layer is run on chosen values, within and beyond the range of what the layer gives on `x`; its
        operations are named when they make none of the known kinds.
        """
        tail = self._tail(first_rows(x))
        self.readout = readout = self.readout or self._find_readout(tail)
        if readout is None:
            if tail.joined is not None or len(tail.parts) > 1:
                raise ValueError(bypassed(tail, None))
            raise ValueError(
                f"the last linear layer {tail.layer!r} gives shape {tail.output.shape} for {row_count(tail.rows)} "
                f"rows, and {tail.operation} makes one prediction a row of them, which is no weighted sum. Choose one "
                "column with `output`, or make what follows this layer an nn.Linear, which is seen where a product "
                "with a bare parameter may not be."
            )
        if readout.offset is not None:
            return self._checked(readout.offset, tail.rows, tail.eps or spacing(tail.output))
        line = Line.of(tail, readout)
        if tail.joined is not None:
            raise ValueError(bypassed(tail, line))
        tried = line.outputs(probe_points(line.read(tail.flat)))
        z, prediction = tail.at(tried)
        eps = tail.eps or spacing(tail.output, prediction)
        # Half of the points with other rows and another batch: a head sees neither.
        half = len(tried) // 2
        if not close(prediction[::-1][:half], tail.at(tried[::-1][:half])[1], 8 * eps):
            self._check_repeats(tail.rows, eps)
            raise ValueError(bypassed(tail, line))
        z = line.read(z)
        if "identity" in tail.kinds and np.array_equal(z, prediction):
            return self._checked(Head("identity"), tail.rows, eps)
        head = find_head(z, prediction, kinds=tail.kinds, operation=tail.operation, eps=eps, run=line.run)
        return self._checked(head, tail.rows, eps)

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
        parts = [take(rows, slice(half)), take(rows, slice(half, None))]
        if not same_values(whole, np.concatenate([self.predict(part) for part in parts if row_count(part)]), eps):
            raise ValueError(
                "predictions depend on the other rows in the batch, as with a mean over the batch or a batch norm "
                "without running statistics. Use a model that predicts each row by itself."
            )

    def _checked(self, head: Head, rows: Any, eps: float) -> Head:
        """The head; `ValueError` unless with it the last layer and its inputs make what the model predicts."""
        self._check_rows(rows, eps)
        layer = self.layers(rows)[-1]
        inputs, captured = self.capture(rows, [layer.name])
        features, predicted = to_numpy(inputs[layer.name]).astype(np.float64), self.predict(rows).astype(np.float64)
        if features.shape != (len(predicted), layer.weight.shape[1]):
            return head  # the layer sees several vectors of a row, which is refused where one is needed
        bias = 0.0 if layer.bias is None else layer.bias[0]
        with np.errstate(all="ignore"):
            z, size = features @ layer.weight[0] + bias, np.abs(features) @ np.abs(layer.weight[0]) + abs(bias)
            low, computed, high = (head.apply(z + step * eps * size) for step in (-64.0, 0.0, 64.0))
            allowed = np.abs(high - low) + rounding(predicted, eps)
            found = np.stack([computed, to_numpy(captured).astype(np.float64)])
            misses = np.abs(found - predicted) > allowed
        if misses.any():  # values that are not finite are refused elsewhere
            which, row = np.argwhere(misses)[0]
            parts = "leaves" if self.trees else "linear layers"
            raise ValueError(
                f"the model predicts {predicted[row]:.4g} where its {parts} give {found[which, row]:.4g}, as its "
                "predict changes what they compute. Pass a model without that change, and apply it to the predictions."
            )
        return head


def bypassed(tail: Tail, line: Line | None) -> str:
    """What to do about a prediction that depends on more than a weighted sum of the last layers."""
    operation = tail.operation if tail.joined is None else repr(tail.joined)
    found = f"the prediction of a row depends on more than its output of the last linear layer {tail.layer!r}: "
    if row_count(tail.rows) < FEWEST_ROWS:
        return f"{found}{operation} brings in something else. Pass at least {FEWEST_ROWS} rows, which show what it is."
    if line is not None and _multiplies(line):
        return (
            f"{found}{operation} multiplies by a factor that depends on `X` and is not part of that layer (an "
            "exposure). Divide y by it and repair the network without it."
        )
    return (
        f"{found}{operation} brings in another branch of the model that is no weighted sum of linear layers, or other "
        "rows. This architecture is not supported; esvdfair.baselines change the predictions of any model."
    )


def _multiplies(line: Line) -> bool:
    """Whether what else the prediction depends on is a factor of each row."""
    rows = min(row_count(line.tail.rows), 32)
    with np.errstate(all="ignore"):
        low, high = (line.run(np.full(rows, value))[1].astype(np.float64) for value in (-0.5, 1.0))
        ratio = high / low
        return bool(np.ptp(high) > 0 and np.ptp(ratio) <= 1e-3 * np.abs(ratio).max() < np.inf)


def first_rows(x: Any) -> Any:
    """The rows of a batch that are looked at."""
    if row_count(x) == 0:
        raise ValueError("got a batch of no rows; at least one is needed to see the layers and the head of the model.")
    return take(x, slice(PROBE_ROWS))


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
