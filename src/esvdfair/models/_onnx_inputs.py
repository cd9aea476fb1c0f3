"""Rows of a table as the inputs of an ONNX model: one matrix, or one input for each column or block of columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ModelInput:
    """An input of a model: its name, its dtype (object for text) and its shape with None for what is open."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None

    @property
    def width(self) -> int | None:
        """Number of columns of a table that it takes, where it tells."""
        if self.shape is None or not 1 <= len(self.shape) <= 2:
            return None
        return self.shape[1] if len(self.shape) == 2 else 1


def model_inputs(model: onnx.ModelProto) -> tuple[ModelInput, ...]:
    """Inputs that a caller must give: those without an initialiser."""
    graph = model.graph
    preset = {tensor.name for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))}
    inputs = tuple(_model_input(value) for value in graph.input if value.name not in preset)
    if not inputs:
        raise ValueError("the model has no input, so its prediction depends on no data.")
    for item in inputs:
        if len(inputs) > 1 and item.width is None:
            raise ValueError(
                f"the model has {len(inputs)} inputs, and {item.name!r} does not say how many columns it takes (its "
                f"shape is {item.shape}). Export the model with one input, or with inputs of fixed widths."
            )
    return inputs


def batch_size(inputs: Sequence[ModelInput]) -> int | None:
    """Number of rows that the model takes at once, if it was exported for one number alone."""
    sizes = {item.shape[0] for item in inputs if item.shape} - {None}
    if len(sizes) > 1:
        raise ValueError(f"the inputs of the model take different numbers of rows: {', '.join(map(str, sizes))}.")
    return sizes.pop() if sizes else None


def make_feeds(x: Any, inputs: Sequence[ModelInput]) -> Feeds:
    """Split `x` into the inputs of a model, each in its own dtype.

    With one input for each column, the columns of a DataFrame are taken by name; else columns are taken in order.
    """
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    x = x.toarray() if hasattr(x, "toarray") else x
    x = x if _is_frame(x) else np.asarray(x)
    if len(inputs) == 1 and (inputs[0].shape is None or len(inputs[0].shape) > 2):
        whole = np.asarray(x)
        return {inputs[0].name: _convert(whole, inputs[0], "X")}
    if x.ndim != 2:
        raise ValueError(f"X has {x.ndim} dimensions; the model takes a table of {_columns_of(inputs)}.")
    feeds = {}
    for item, columns in zip(inputs, _assign_columns(x, inputs), strict=True):
        block = _take(x, columns, item)
        feeds[item.name] = block[:, 0] if item.shape is not None and len(item.shape) == 1 else block
    return feeds


def _model_input(value: onnx.ValueInfoProto) -> ModelInput:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise ValueError(f"input {value.name!r} of the model is not a tensor.")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    if dtype.kind not in "fiubO":
        raise ValueError(f"input {value.name!r} of the model takes {dtype}; numbers or text can be given.")
    sizes = (dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None for dim in kind.shape.dim)
    return ModelInput(value.name, dtype, tuple(sizes) if kind.HasField("shape") else None)


def _assign_columns(x: Any, inputs: Sequence[ModelInput]) -> list[list[int]]:
    """Positions of the columns of `x` that go to each input."""
    names = list(x.columns) if _is_frame(x) else []
    if len(inputs) > 1 and any(isinstance(name, str) for name in names) and all(item.width == 1 for item in inputs):
        if sorted(map(str, names)) != sorted(item.name for item in inputs):
            raise ValueError(
                f"X has {_columns_in(x)}; the model takes {_columns_of(inputs)}, by name. Pass these columns alone, or "
                "an array with the columns in that order."
            )
        return [[names.index(item.name)] for item in inputs]
    if len(inputs) == 1 and inputs[0].width is None:
        return [list(range(x.shape[1]))]
    ends = np.cumsum([item.width for item in inputs]).tolist()
    if x.shape[1] != ends[-1]:
        raise ValueError(f"X has {_columns_in(x)}; the model takes {_columns_of(inputs)}.")
    return [list(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]


def _columns_in(x: Any) -> str:
    names = f" ({', '.join(map(str, x.columns))})" if _is_frame(x) else ""
    return f"{x.shape[1]} columns{names}"


def _columns_of(inputs: Sequence[ModelInput]) -> str:
    if len(inputs) == 1:
        return f"{inputs[0].width or 'any number of'} columns (input {inputs[0].name!r})"
    parts = (item.name if item.width == 1 else f"{item.name}: {item.width} columns" for item in inputs)
    return f"{sum(item.width or 0 for item in inputs)} columns ({', '.join(parts)})"


def _is_frame(x: Any) -> bool:
    return hasattr(x, "iloc") and hasattr(x, "columns")


def _take(x: Any, columns: list[int], item: ModelInput) -> NDArray[Any]:
    """Columns of a table as (rows, columns), in the dtype of the input that they go to."""
    if not _is_frame(x):
        return _convert(x[:, columns[0] : columns[-1] + 1], item, "X")
    parts = [_convert(_values(x.iloc[:, column]), item, repr(x.columns[column])) for column in columns]
    return np.column_stack(parts)


def _values(series: Any) -> NDArray[Any]:
    """Values of a column; a missing number becomes NaN."""
    if isinstance(series.dtype, np.dtype):
        return np.asarray(series.to_numpy())
    numeric = getattr(series.dtype, "kind", "O") in "fiub"
    return np.asarray(series.to_numpy(np.float64, na_value=np.nan) if numeric else series.to_numpy(object))


def _convert(values: NDArray[Any], item: ModelInput, column: str) -> NDArray[Any]:
    """Values in the dtype of an input, if they can be said in it."""
    if item.dtype.kind == "O":
        if not all(isinstance(value, str) for value in values.ravel()):
            raise ValueError(f"column {column} holds values that are not text; input {item.name!r} takes text.")
        return values.astype(object)
    values = _numbers(values, item, column)
    if item.dtype.kind in "iub":
        with np.errstate(invalid="ignore"):
            same = values.astype(item.dtype) == values
        if not np.all(same):
            kind = "0 or 1" if item.dtype.kind == "b" else "whole numbers"
            raise ValueError(
                f"column {column} holds {values[~same].ravel()[0]!s}; input {item.name!r} takes {kind} ({item.dtype})."
            )
    with np.errstate(over="ignore"):
        return values.astype(item.dtype)


def _numbers(values: NDArray[Any], item: ModelInput, column: str) -> NDArray[Any]:
    if values.dtype.kind in "fiub":
        return values
    # Text that looks like a number is still text: how it was encoded in training is not ours to guess.
    if values.dtype.kind == "O" and not any(isinstance(value, str | bytes) for value in values.ravel()):
        try:
            return values.astype(np.float64)
        except (TypeError, ValueError):
            pass
    raise ValueError(
        f"column {column} is not numeric ({values.dtype}), and input {item.name!r} takes {item.dtype}. Encode it as it "
        "was encoded in training."
    )
