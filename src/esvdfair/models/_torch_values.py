"""Values that go into a torch model and come out of it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Selector = str | int | Callable[[Any], Any]


def to_tensor(x: Any, model: nn.Module) -> torch.Tensor:
    """Copy `x` in the model's dtype, on its device: a forward pass that works in place must not write into `x`.

    Integer tensors stay integers if the model has an embedding.
    """
    like = _reference(model)
    if not isinstance(x, torch.Tensor):
        return torch.tensor(_numeric(x), dtype=like.dtype).to(like.device)
    keep = not x.is_floating_point() and any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    # dtype first: a device may not know the dtype that comes in (float64 on Apple's)
    moved = (x if keep else x.to(like.dtype)).to(like.device)
    return (moved.clone() if moved is x else moved).detach()


def _reference(model: nn.Module) -> torch.Tensor:
    """A floating tensor of the model that shows its dtype and device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0)


def _numeric(x: Any) -> NDArray[Any]:
    if hasattr(x, "toarray"):
        x = x.toarray()
    if hasattr(x, "iloc") and hasattr(x, "columns"):
        for column, dtype in zip(x.columns, x.dtypes, strict=True):
            if not (hasattr(dtype, "kind") and dtype.kind in "fiub"):
                raise ValueError(
                    f"column {column!r} is not numeric ({dtype}), and a torch model takes numbers only. Encode it as "
                    "it was encoded in training."
                )
        return np.asarray(x.to_numpy(dtype=np.float64, na_value=np.nan))
    array = np.asarray(x)
    return array if array.dtype.kind in "fiub" else array.astype(np.float64)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """NumPy array of a tensor; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def select(result: Any, output: Selector | None) -> torch.Tensor:
    """Take the prediction out of what a model returned."""
    if callable(output):
        value = output(result)
    elif isinstance(result, torch.Tensor):
        if output is not None:
            raise ValueError(
                f"output={output!r} selects from a dict or tuple, but the model returns one tensor: drop it."
            )
        value = result
    elif output is None:
        raise ValueError(f"the model returns {_contents(result)}. Say which is the prediction: output=key or index.")
    else:
        value = _item(result, output)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"output={output!r} gives a {type(value).__name__}, not a tensor of predictions.")
    return value


def _item(result: Any, output: str | int) -> Any:
    try:
        if isinstance(output, str) and not isinstance(result, Mapping):
            return getattr(result, output)  # a named tuple or a dataclass
        return result[output]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"the model returns {_contents(result)}, and nothing in it is output={output!r}.") from error


def _contents(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} with keys {', '.join(map(repr, result))}"
    if isinstance(result, list | tuple):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"


def one_column(prediction: torch.Tensor, rows: int) -> torch.Tensor:
    """Predictions as (rows,), from (rows,), (rows, 1) or, for a single row that was squeezed, ()."""
    shape = tuple(prediction.shape)
    if prediction.numel() == rows and (shape[:1] == (rows,) or (shape == () and rows == 1)):
        return prediction.reshape(rows)
    if len(shape) > 1 and shape[0] == rows:
        raise ValueError(
            f"the model returns shape {shape} for {rows} rows: more than one output column. One number a row is "
            "needed; select it with output=, or repair one output at a time."
        )
    raise ValueError(f"the model returns shape {shape} for {rows} rows; it must be ({rows},) or ({rows}, 1).")
