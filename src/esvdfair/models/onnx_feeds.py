"""What an ONNX model is given, rows of a table as inputs, and which of its outputs is the prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from esvdfair.core.checks import several_inputs, to_numpy
from esvdfair.exceptions import InputError
from esvdfair.models import base, onnx_graph

Selector = str | int | tuple[str | int, int | str]
Feeds = dict[str, NDArray[Any]]

# --- which output -----------------------------------------------------------------------------------------------------


def _tensor_of(value: onnx.ValueInfoProto, model: onnx.ModelProto) -> tuple[str | None, int | None]:
    """The tensor that holds the numbers of an output, if they are such, and how many there are a row."""
    kind = value.type.tensor_type
    if value.type.HasField("tensor_type") and kind.elem_type in onnx_graph.FLOATS:
        return value.name, (kind.shape.dim[1].dim_value or None) if len(kind.shape.dim) == 2 else None
    for node in model.graph.node:  # probabilities by class, as scikit-learn's exporter writes them
        if node.op_type == "ZipMap" and value.name in node.output:
            return node.input[0], max(len(a.ints or a.strings) for a in node.attribute)
    return None, None


def choose_output(model: onnx.ModelProto, output: Selector | None) -> tuple[str, Any]:
    """Name of the tensor that is the prediction, and which of its columns, or that it is a logit."""
    names = [value.name for value in model.graph.output]
    tensors = {value.name: _tensor_of(value, model) for value in model.graph.output}
    numbers = [name for name in names if tensors[name][0] is not None]
    which, place = _name_and_place(output, names)
    chosen = _chosen(which, place, names, numbers, output)
    tensor, width = tensors[chosen]
    if tensor is None:
        raise ValueError(f"output {chosen!r} is not a tensor of floating-point numbers, as predictions are.")
    if place is None and width == 2 and len(names) == 2 and len(numbers) == 1:
        place = 1  # beside a label, the probability of the second of two classes
    return tensor, place


def _chosen(which: Any, place: Any, names: Sequence[str], numbers: Sequence[str], output: Any) -> str:
    """Name of the output that is meant, which is one of ``names``."""
    listing = ", ".join(map(repr, names))
    if which is None and len(names) > 1 and len(numbers) != 1:
        raise InputError(f"the model has {len(names)} outputs: {listing}. Choose the prediction with `output`.")
    known = place == base.SIGMOID or isinstance(place, int | None)
    if isinstance(which, bool) or not isinstance(which, str | int | None) or not known:
        raise TypeError(f"output must be the name or the position of an output, got {output!r}.")
    if which is None:
        return (*numbers, *names)[0]
    by_place = dict(zip(range(-len(names), len(names)), [*names, *names], strict=True))
    known_names: dict[Any, str] = {**by_place, **{name: name for name in names}}
    if which not in known_names:
        raise ValueError(f"the model has no output {which!r}; it has {listing}.")
    return known_names[which]


def _name_and_place(output: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Split what was given into an output, by name or position, and a column of it or None."""
    if isinstance(output, tuple) and len(output) == 2:
        return output
    if isinstance(output, str) and output not in names:
        name, place = _from_text(output)
        if place is not None and (name in names or (place == base.SIGMOID and not name)):
            return name or None, place
        output = output if place is None or name else place
    return (None, output) if len(names) == 1 and type(output) is int else (output, None)


def _from_text(text: str) -> tuple[str, Any]:
    """The name, and the column or "sigmoid", of an output as it is written on a command line; None for neither."""
    name, _, place = text.rpartition(":")
    return name, int(place) if place.isdecimal() else place if place == base.SIGMOID else None


# --- rows of a table as inputs: one matrix, or one input for each column or block of columns -------------------------


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


def inputs_of_model(model: onnx.ModelProto) -> tuple[ModelInput, ...]:
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


def _model_input(value: onnx.ValueInfoProto) -> ModelInput:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise ValueError(f"input {value.name!r} of the model is not a tensor.")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    if dtype.kind not in "fiubO":
        raise ValueError(f"input {value.name!r} of the model takes {dtype}; numbers or text can be given.")
    shape = tuple(max(dim.dim_value, 0) or None for dim in kind.shape.dim)  # 0 where none is set
    return ModelInput(value.name, dtype, shape if kind.HasField("shape") else None)


def make_feeds(x: Any, inputs: Sequence[ModelInput]) -> Feeds:
    """Split `x` into the inputs of a model, each in its own dtype.

    Several inputs are taken by name, or in order. With one input for each column, the columns of a DataFrame are taken
    by name; else columns are taken in order.
    """
    several = several_inputs(x)
    if several is not None:
        return _feeds_of_several(several, inputs)
    x = x.toarray() if hasattr(x, "toarray") else x
    x = x if base.is_frame(x) else to_numpy(x)
    if len(inputs) == 1 and (inputs[0].shape is None or len(inputs[0].shape) > 2):
        return {inputs[0].name: _convert(np.asarray(x), inputs[0])}
    if x.ndim != 2:
        raise ValueError(f"X has {x.ndim} dimensions; the model takes a table of {_columns_of(inputs)}.")
    feeds = {}
    for item, columns in zip(inputs, _assign_columns(x, inputs), strict=True):
        block = _convert(x.iloc[:, columns] if base.is_frame(x) else x[:, columns], item)
        feeds[item.name] = block[:, 0] if item.shape is not None and len(item.shape) == 1 else block
    return feeds


def _feeds_of_several(several: Mapping[Any, Any], inputs: Sequence[ModelInput]) -> Feeds:
    names = [item.name for item in inputs]
    keys = list(range(len(inputs))) if set(several) == set(range(len(inputs))) else names
    if set(several) != set(keys):
        raise ValueError(
            f"X has the inputs {', '.join(map(str, several))}; the model takes {', '.join(sorted(names))}."
        )
    return {item.name: _convert(to_numpy(several[key]), item) for key, item in zip(keys, inputs, strict=True)}


def _assign_columns(x: Any, inputs: Sequence[ModelInput]) -> list[Any]:
    """Which columns of `x`, by position, go to each input."""
    names = list(x.columns) if base.is_frame(x) else []
    found = f"X has {x.shape[1]} columns" + (f" ({', '.join(map(str, names))})" if names else "")
    if len(inputs) > 1 and any(isinstance(name, str) for name in names) and all(item.width == 1 for item in inputs):
        if sorted(map(str, names)) != sorted(item.name for item in inputs):
            raise ValueError(
                f"{found}; the model takes {_columns_of(inputs)}, by name. Pass these columns alone, or an array with "
                "the columns in that order."
            )
        return [[names.index(item.name)] for item in inputs]
    if len(inputs) == 1 and inputs[0].width is None:
        return [slice(None)]
    ends = np.cumsum([item.width for item in inputs]).tolist()
    if x.shape[1] != ends[-1]:
        raise ValueError(f"{found}; the model takes {_columns_of(inputs)}.")
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _columns_of(inputs: Sequence[ModelInput]) -> str:
    if len(inputs) == 1:
        return f"{inputs[0].width or 'any number of'} columns (input {inputs[0].name!r})"
    parts = (item.name if item.width == 1 else f"{item.name}: {item.width} columns" for item in inputs)
    return f"{sum(item.width or 0 for item in inputs)} columns ({', '.join(parts)})"


def _convert(values: Any, item: ModelInput) -> NDArray[Any]:
    """An array or a table in the dtype of an input, if it can be said in it."""
    if item.dtype.kind == "O":
        given = converted = np.asarray(values, dtype=object)
        bad, takes = ~np.vectorize(lambda value: isinstance(value, str), otypes=[bool])(given), "text"
    else:
        given = base.numeric(values, f"input {item.name!r}")
        with np.errstate(over="ignore", invalid="ignore"):
            converted = given.astype(item.dtype)
        if item.dtype.kind == "f":
            return converted
        kind = "0 or 1" if item.dtype.kind == "b" else "whole numbers"
        bad, takes = converted != given, f"{kind} ({item.dtype})"
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        column = repr(values.columns[place[-1]]) if base.is_frame(values) else "X"
        raise ValueError(f"column {column} holds {given[place]!s}; input {item.name!r} takes {takes}.")
    return converted
