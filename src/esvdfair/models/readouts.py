"""How the value before the head is read off the last linear layers of a model: a `Readout`.

Most models read one number: the output of one layer. Others read a weighted sum: the mean of an ensemble, wide and deep
parts, a low-rank update beside a layer, one of several positions or their mean. Such a sum of linear layers is one
linear layer with all their inputs, and is repaired as one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.quadratic import Head
from esvdfair.exceptions import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LinearLayer:
    """A layer `Z = X Wᵀ + b` of a model: a copy of its weights in float64.

    Parameters
    ----------
    name : str
        How the framework calls it: "net.3" in torch, "coefs_[2]" in scikit-learn. A sum of several layers is called
        after all of them: "wide + deep.2".
    index : int
        Position among the linear layers that feed the prediction, in order of execution.
    weight : (m, n) float64
    bias : (m,) float64, or None when the layer has none
    offset : whether the last input is an offset: a known term of the prediction, whose weight is 1 and stays
    """

    name: str
    index: int
    weight: NDArray[np.float64]
    bias: NDArray[np.float64] | None
    offset: bool = False

    def check_no_offset(self, asked: str) -> None:
        """Raise where the model adds an offset, which an option does not take into account."""
        if self.offset:
            raise InputError(
                f"the model adds an offset, a term of `X`, to the output of {self.name!r}, which `{asked}` does not "
                "take into account. Use `method='transport'`, without `rescale`."
            )


@dataclass(frozen=True)
class Part:
    """What the prediction takes of one layer: a weighted sum of some of its outputs.

    Parameters
    ----------
    layer : str
    outputs : tuple of int
        Which outputs of the layer, and
    factors : tuple of float
        what each of them is multiplied by.
    positions : tuple of float or None
        Weights, which add up to 1, of the positions at which the layer is applied to a row: (1.0,) for one that gives
        (rows, outputs). None if they differ between rows: they are found in each batch.
    members : bool
        Whether each position has weights of its own. The weights of the layer are those of all, side by side.
    """

    layer: str
    outputs: tuple[int, ...] = (0,)
    factors: tuple[float, ...] = (1.0,)
    positions: tuple[float, ...] | None = (1.0,)
    members: bool = False

    def read(self, values: NDArray[Any]) -> NDArray[Any]:
        """(1, ...) of the layer's weight or bias (m, ...)."""
        return np.tensordot(np.array(self.factors), values[list(self.outputs)], 1)[None]

    def write(self, values: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        """A weight or bias (m, ...) of which `read` gives `new`; outputs with a negative factor keep theirs."""
        values = values.copy()
        if self.factors == (1.0,):
            values[self.outputs[0]] = new[0]
            return values
        raising = np.maximum(self.factors, 0.0) if max(self.factors) > 0 else np.array(self.factors)
        change = (new - self.read(values))[0] / (raising @ raising)
        for output, factor in zip(self.outputs, raising, strict=True):
            values[output] += factor * change
        return values

    def pool(self, inputs: Any, weights: Any = None) -> Any:
        """(rows, n) of the inputs of the layer, an array or a tensor (rows, positions…, n).

        ``weights`` (rows, positions) are those of a part whose positions differ between rows.
        """
        if self.positions == (1.0,) and inputs.ndim == 2:
            return inputs
        rows, width = inputs.shape[0], inputs.shape[-1]
        if self.positions is None:
            inputs = inputs.reshape(rows, weights.shape[1], width) * weights[:, :, None]
            return inputs.reshape(rows, -1) if self.members else inputs.sum(1)
        inputs = inputs.reshape(-1, len(self.positions), width)
        if self.members:
            return side_by_side([weight * inputs[:, place] for place, weight in enumerate(self.positions)])
        used = [(place, weight) for place, weight in enumerate(self.positions) if weight]
        if len(used) == 1 and used[0][1] == 1:
            return inputs[:, used[0][0]]
        return sum(weight * inputs[:, place] for place, weight in used)


@dataclass(frozen=True)
class Readout:
    """The value before the head: the sum of some parts of the last layers.

    An adapter that knows it (a mean of estimators, say) sets its attribute ``readout`` to one, and lists the layers of
    all parts; the others find it on some rows. `ModelAdapter` then shows one layer, with all inputs side by side, and
    writes its weights back to the layers of the parts.

    Parameters
    ----------
    parts : tuple of Part
    usual : float
        A usual output of the last layers, at which weights of positions are found.
    offset : Head or None
        Where the model adds an offset to the sum, a column of its input or the log of one: the head that follows both,
        by which the offset of a row is found.
    """

    parts: tuple[Part, ...]
    usual: float = 0.0
    offset: Head | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Readout":
        """From what `dataclasses.asdict` made of one, and JSON of that."""

        offset = values.get("offset")
        parts = []
        for item in values["parts"]:
            known: dict[str, Any] = {n: tuple(each) if isinstance(each, list) else each for n, each in item.items()}
            parts.append(Part(**known))
        return cls(tuple(parts), values["usual"], None if offset is None else Head(**offset))

    @property
    def name(self) -> str:
        """What the layer is called: the layer of the one part, or "a + b"."""
        return " + ".join(dict.fromkeys(part.layer for part in self.parts))

    def layer(self, layers: Sequence[LinearLayer]) -> LinearLayer:
        """One layer (1, n) of those of the parts."""
        own = {layer.name: layer for layer in layers}
        columns = [part.read(own[part.layer].weight) for part in self.parts]
        weight = np.concatenate(columns if self.offset is None else [*columns, np.ones((1, 1))], axis=1)
        biases = [(part, own[part.layer].bias) for part in self.parts]
        known = [part.read(bias) for part, bias in biases if bias is not None and moves(part)]
        bias = np.sum(known, axis=0) if known else None
        return LinearLayer(self.name, len(layers) - 1, weight, bias, self.offset is not None)

    def split(
        self, layers: Sequence[LinearLayer], weight: Array, bias: Array | None
    ) -> dict[str, tuple[Array, Array | None]]:
        """Weights and biases of the layers of the parts, of which `layer` gives these."""
        own = {layer.name: layer for layer in layers}
        new = {part.layer: (own[part.layer].weight, own[part.layer].bias) for part in self.parts}
        with_bias = [part for part in self.parts if own[part.layer].bias is not None and moves(part)]
        before, start = self.layer(layers).bias, 0
        for part in self.parts:
            old_weight, old_bias = new[part.layer]
            stop = start + old_weight.shape[1]
            new[part.layer], start = (part.write(old_weight, weight[:, start:stop]), old_bias), stop
        if bias is None or before is None:
            return {name: (changed, None) for name, (changed, _) in new.items()}
        for part in with_bias:  # all biases change alike
            old_weight, old_bias = new[part.layer]
            assert old_bias is not None
            share = bias if len(with_bias) == 1 else part.read(old_bias) + (bias - before) / len(with_bias)
            new[part.layer] = old_weight, part.write(old_bias, share)
        return new

    def same_as(self, other: "Readout | None") -> bool:
        """Whether two readouts, found on different rows, are the same up to rounding."""
        if other is None or [_shape(part) for part in self.parts] != [_shape(part) for part in other.parts]:
            return False
        if (self.offset is None) != (other.offset is None):
            return False
        mine, theirs = ([f for p in one.parts for f in (*p.factors, *(p.positions or ()))] for one in (self, other))
        return len(mine) == len(theirs) and bool(np.allclose(mine, theirs, rtol=1e-3, atol=1e-6))


def moves(part: Part) -> bool:
    """Whether a bias of the layer moves the prediction: a difference of two positions has none."""
    return part.positions is None or abs(sum(part.positions)) > 1e-6


def _shape(part: Part) -> Any:
    return part.layer, part.outputs, part.positions is None


def side_by_side(arrays: Sequence[Any]) -> Any:
    """(rows, n₁ + n₂ + …) of arrays, or of tensors, which stay on their device."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays, axis=1)
    import torch  # which tensors come from

    return torch.cat(list(arrays), dim=1)
