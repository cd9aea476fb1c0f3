"""Values that go into a torch module and come out of it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esvdfair.core.checks import each_input
from esvdfair.exceptions import InputError
from esvdfair.models import base

Selector = str | int | tuple[str | int, ...] | Callable[[Any], Any]
Inputs = torch.Tensor | tuple[Any, ...] | dict[str, Any]
"""What a module is called with: one tensor, tensors in order, or tensors by name."""


def to_inputs(x: Any, model: nn.Module, *, whole: bool = False) -> Inputs:
    """Copies of one or several inputs, as `to_tensor` makes them; of several, whole numbers and masks stay."""
    several: Inputs | None = each_input(x, lambda value: to_tensor(value, model, whole=True))
    return to_tensor(x, model, whole=whole) if several is None else several


def to_tensor(x: Any, model: nn.Module, *, whole: bool = False) -> torch.Tensor:
    """Copy `x` in the model's dtype, on its device: a forward pass that works in place must not write into `x`.

    Integer tensors stay integers if the model has an embedding; other integers if `whole` numbers are wanted.
    """
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)
    like = torch.empty(0) if like is None else like
    if not isinstance(x, torch.Tensor):
        values = _native(base.numeric(x, "a torch model"))
        keep = whole and values.dtype.kind in "iub"
        return torch.tensor(values, dtype=None if keep else like.dtype).to(like.device)
    if x.is_complex() or x.is_meta or x.layout != torch.strided:
        kind = "complex" if x.is_complex() else "on the device meta, without data" if x.is_meta else f"{x.layout}"
        raise ValueError(f"X is a tensor that is {kind}; a torch model takes dense tensors of numbers.")
    embeds = whole or any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    keep = not x.is_floating_point() and embeds
    # dtype first: a device may not know the dtype that comes in (float64 on Apple's)
    moved = (x if keep else x.to(like.dtype)).to(like.device)
    return (moved.clone() if moved is x else moved).detach()


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """An array as torch takes it: no negative strides, no other order of bytes, no long doubles."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind != "f" or (values.dtype.isnative and values.dtype.itemsize <= 8):
        return values
    with np.errstate(over="ignore"):  # what is beyond float64 is infinite, and then said to be
        return values.astype(np.float64)


def select(result: Any, output: Selector | None) -> torch.Tensor:
    """Take the prediction out of what a model returned."""
    value = output(result) if callable(output) else result
    steps = () if output is None or callable(output) else output if isinstance(output, tuple) else (output,)
    try:
        for step in steps:
            value = _item(value, step, output)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise InputError(f"the model returns {_contents(value)}; `output={output!r}` is not part of it.") from error
    if isinstance(value, torch.Tensor):
        return value
    if output is None:
        raise InputError(
            f"the model returns {_contents(result)}. Choose the prediction with `output`, a key or an index."
        )
    raise InputError(f"`output={output!r}` returns a {type(value).__name__}, not a tensor of predictions.")


def _item(result: Any, step: str | int, output: Selector | None) -> Any:
    if not isinstance(result, torch.Tensor):
        attribute = isinstance(step, str) and not isinstance(result, Mapping)  # of a named tuple or a dataclass
        return getattr(result, str(step)) if attribute else result[step]
    if step == base.SIGMOID:
        return torch.sigmoid(result)
    if result.ndim == 2 and result.shape[1] > 1 and isinstance(step, int):
        return result[:, step]
    raise InputError(
        f"`output={output!r}` selects from a dict, a tuple or several columns, but the model returns one tensor. "
        "Leave it out."
    )


def _contents(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"{result.shape[1]} columns"
    kind = f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        return f"{kind} with keys {', '.join(map(repr, result))}"
    return f"{kind} of {len(result)}" if isinstance(result, list | tuple) else kind
