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
- A layer that runs but cannot be edited by itself (tied weights, called twice, lazy, quantised, parametrised) is
  a `ValueError` that names it, raised by `layers`: an index must not silently skip a layer.
- `weight` is (outputs, inputs), as in `Z = X Wᵀ + b`, however the framework stores it; `replace` takes the same
  orientation back.
- `capture` runs its whole argument in one pass and returns the framework's own arrays on the model's own device;
  the caller makes the batches. `predict` takes any number of rows, batches by itself and returns NumPy.
- `layers` and `head` look at the first `PROBE_ROWS` rows of the batch they are given, and remember the answer.
- `head` should not trust the batch alone: a clamp may be idle on it. Where the framework allows, feed
  `heads.probe_points(z)` in place of the last layer's output and hand the result to `heads.find_head`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esvdfair.models.heads import Head

Weights = Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]]
"""New weights: layer name -> (weight, bias); a bias of None keeps the one that is there."""

PROBE_ROWS = 256
"""Rows of a batch that `layers` and `head` look at: enough to see the structure, cheap on any model."""

PREDICT_ROWS = 8192
"""Rows that `predict` runs at once: hidden activations of this many rows are all it holds."""


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


class ModelAdapter(Protocol):
    """One trained regressor, seen through its linear layers."""

    @property
    def model(self) -> Any:
        """The user's model object."""

    @property
    def n_features(self) -> int | None:
        """Number of input columns, where the model tells."""

    def layers(self, x: Any) -> tuple[LinearLayer, ...]:
        """Linear layers that feed the prediction, in order of execution, found by running some rows of `x`."""

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Run one forward pass over all rows of `x`.

        Returns
        -------
        inputs : dict
            For each name the input of that layer, (rows, ..., n).
        prediction : (rows,)
            Both in the framework's own arrays, on the model's device, without gradients.
        """

    def predict(self, x: Any) -> NDArray[Any]:
        """Predictions for `x`, (rows,), as NumPy in the dtype of the model (float32 for bfloat16)."""

    def replace(self, weights: Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]]) -> "ModelAdapter":
        """Put `{name: (weight, bias)}` into a copy of the model; a bias of None keeps the one that is there.

        Type, dtype, device and training flags are those of the original. A layer without bias cannot be given
        one: that would be another architecture, so it is a `ValueError`.
        """

    def head(self, x: Any) -> Head:
        """Describe what maps the last linear layer's output to the prediction."""


def find_layer(layers: Sequence[LinearLayer], which: int | str) -> LinearLayer:
    """Look up a layer by index (negative counts from the end) or by name; the error lists what there is."""
    if isinstance(which, str):
        for layer in layers:
            if layer.name == which:
                return layer
        raise ValueError(
            f"no linear layer named {which!r} feeds the prediction. {_listing(layers)} A layer that the forward "
            "pass does not reach is not listed."
        )
    if isinstance(which, bool) or not isinstance(which, int | np.integer):
        raise TypeError(f"layer must be an index or a name, got {which!r}. {_listing(layers)}")
    if not -len(layers) <= which < len(layers):
        raise ValueError(f"layer {which} is out of range. {_listing(layers)}")
    return layers[which]


def _listing(layers: Sequence[LinearLayer]) -> str:
    rows = (f"{layer.index}: {layer.name!r} ({layer.weight.shape[1]} → {layer.weight.shape[0]})" for layer in layers)
    return f"The linear layers in order of execution are {', '.join(rows) or 'none'}."


def check_replacement(
    layer: str,
    *,
    weight: NDArray[Any],
    bias: NDArray[Any] | None,
    weight_shape: tuple[int, ...],
    has_bias: bool,
) -> None:
    """Raise `ValueError` unless `weight` and `bias` fit the layer (m, n) and are finite."""
    if np.shape(weight) != weight_shape:
        raise ValueError(f"new weight of layer {layer!r} has shape {np.shape(weight)}; it must be {weight_shape}.")
    if bias is not None and not has_bias:
        raise ValueError(
            f"layer {layer!r} has no bias, and adding one would change the architecture. Solve without an "
            "intercept, or rebuild the model with bias=True."
        )
    if bias is not None and np.shape(bias) != weight_shape[:1]:
        raise ValueError(f"new bias of layer {layer!r} has shape {np.shape(bias)}; it must be {weight_shape[:1]}.")
    if not np.all(np.isfinite(weight)) or (bias is not None and not np.all(np.isfinite(bias))):
        raise ValueError(f"new weights of layer {layer!r} are not all finite.")


def row_slice(x: Any, start: int, stop: int) -> Any:
    """Rows start..stop of `x`, in its own type (a DataFrame keeps its column names)."""
    if hasattr(x, "iloc"):
        return x.iloc[start:stop]
    if hasattr(x, "tocsr"):
        return x.tocsr()[start:stop]
    return x[start:stop] if hasattr(x, "shape") else np.asarray(x[start:stop])
