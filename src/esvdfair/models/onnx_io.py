"""What goes into and out of ONNX models: files, and rows of a table; nothing here looks at what a model computes.

A model in memory is self-contained: tensors in external data are read in, by a reader that opens no file outside the
model's folder, and neither onnx nor onnxruntime is ever given a file name.
"""

import math
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]  # protobuf ships no types
from numpy.typing import NDArray
from onnx.external_data_helper import set_external_data, uses_external_data

from esvdfair.core.checks import several_inputs, to_numpy
from esvdfair.files import whole_file
from esvdfair.models.base import is_frame, numeric

ModelSource = str | os.PathLike[str] | bytes
Feeds = dict[str, NDArray[Any]]

LARGEST = 2**31 - 1
"""Bytes that a protobuf message can hold; onnxruntime takes no more from memory."""

_ALIGNMENT = 4096  # a page, so that a runtime can map the tensors into memory, as ONNX asks

_MOST_ROWS = 2**22  # rows of a batch, where the model is made for one number alone: missing ones are filled up

_TYPE = onnx.TensorProto
_ITEMSIZE: dict[int, int] = {
    **dict.fromkeys([_TYPE.BOOL, _TYPE.INT8, _TYPE.UINT8], 1),
    **dict.fromkeys([_TYPE.FLOAT16, _TYPE.BFLOAT16, _TYPE.INT16, _TYPE.UINT16], 2),
    **dict.fromkeys([_TYPE.FLOAT, _TYPE.INT32, _TYPE.UINT32], 4),
    **dict.fromkeys([_TYPE.DOUBLE, _TYPE.INT64, _TYPE.UINT64], 8),
}


def read_model(source: ModelSource) -> tuple[onnx.ModelProto, frozenset[int]]:
    """Read a model with all tensors inside, and which of `all_tensors` were in external data.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        The path leads to no file.
    ValueError
        The content is no valid ONNX model, or external data is missing, too short or outside the model's folder.
    """
    if isinstance(source, bytes):
        data, folder, label = source, None, f"the model ({len(source)} bytes)"
    else:
        path = Path(source)
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a directory; an ONNX file is needed.")
        if not path.exists():
            raise FileNotFoundError(f"there is no file {str(path)!r}.")
        if not path.is_file():
            raise ValueError(f"{str(path)!r} is a pipe or a device; save the model to a file first.")
        data, folder, label = path.read_bytes(), path.parent, repr(str(path))
    model = _parse(data, label)
    external = frozenset(index for index, tensor in enumerate(all_tensors(model)) if uses_external_data(tensor))
    budget = LARGEST - len(data)
    for tensor in all_tensors(model):
        if uses_external_data(tensor):
            budget -= _load(tensor, folder, budget)
    _check(model, label)
    return model, external


def all_tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model in a fixed order, wherever it stands: initialisers, attributes, subgraphs, functions."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for _, value in message.ListFields():
        for item in value if hasattr(value, "add") else (value,):
            if isinstance(item, Message):
                yield from all_tensors(item)


def write_model(model: onnx.ModelProto, path: str | os.PathLike[str], external: Collection[int] = ()) -> None:
    """Write a self-contained model, with the tensors `external` in a file beside it, named `path` + ".data".

    A failure on the way (a full disk) leaves no file and what was there before.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write a model to {str(path)!r}: it is a directory.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write a model to {str(path)!r}: there is no folder {str(path.parent)!r}.")
    _check(model, "the model to write")
    with ExitStack() as stack:
        files = [stack.enter_context(whole_file(path))]
        if external:
            beside = path.with_name(path.name + ".data")
            files.append(stack.enter_context(whole_file(beside)))
            model = _move_out(model, external, beside.name, files[-1])
        files[0].write(model.SerializeToString())
        for file in files:  # both are on disk before either takes its name
            file.flush()
            os.fsync(file.fileno())


def save_model(model: ModelSource, path: str | os.PathLike[str], *, like: ModelSource | None = None) -> None:
    """Write an ONNX model to a file.

    Parameters
    ----------
    model : bytes or path
        Such as `estimator_` of a repaired model.
    path : where to write; what is there is replaced at the end, and left alone if writing fails
    like : the model before its repair, optional
        Tensors that it keeps in external data go to external data again, in a file named `path` + ".data".
    """
    proto, external = read_model(model)
    if like is not None:
        original, external = read_model(like)
        count, other = (sum(1 for _ in all_tensors(item)) for item in (proto, original))
        if count != other:
            raise ValueError(f"the model has {count} tensors and the one it should be like {other}; pass its original.")
    write_model(proto, path, external)


def external_files(path: str | os.PathLike[str]) -> list[str]:
    """Names of the files with external data of a model file, as it gives them, sorted; none of them is opened."""
    tensors = all_tensors(_parse(Path(path).read_bytes(), repr(str(path))))
    return sorted({_entries(tensor)["location"] for tensor in tensors if "location" in _entries(tensor)})


def _parse(data: bytes, label: str) -> onnx.ModelProto:
    if not data:
        raise ValueError(f"{label} is empty; an ONNX model is needed.")
    if len(data) > LARGEST:
        raise ValueError(f"{label} is larger than 2 GB, the most that ONNX can hold in one piece.")
    try:
        model = onnx.ModelProto()
        model.ParseFromString(data)
    except DecodeError:
        raise ValueError(f"{label} is not an ONNX model, or it is truncated.") from None
    if not model.graph.output:
        raise ValueError(f"{label} is not an ONNX model, or it is truncated: it has no graph with an output.")
    return model


def _check(model: onnx.ModelProto, label: str) -> None:
    """Run `onnx.checker`; and look at tensors, whose type and size not every version of it does."""
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{label} is not a valid ONNX model: {first_line(error)}") from None
    for tensor in all_tensors(model):
        if tensor.data_type not in _TYPE.DataType.values():
            raise ValueError(
                f"{label} is not a valid ONNX model: tensor {tensor.name!r} is of unknown type {tensor.data_type}."
            )
        size = _size(tensor)
        if tensor.HasField("raw_data") and size is not None and len(tensor.raw_data) != size:
            raise ValueError(
                f"{label} is not a valid ONNX model: tensor {tensor.name!r} of shape {tuple(tensor.dims)} holds "
                f"{len(tensor.raw_data)} bytes; it needs {size}."
            )


def first_line(error: BaseException) -> str:
    """What an error of onnx or onnxruntime says, without what it appends."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _size(tensor: onnx.TensorProto) -> int | None:
    """Bytes of raw data that the shape asks for; None for types that are packed, or text."""
    itemsize = _ITEMSIZE.get(tensor.data_type)
    return None if itemsize is None else math.prod(tensor.dims) * itemsize


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _load(tensor: onnx.TensorProto, folder: Path | None, budget: int) -> int:
    """Put the external data of a tensor inside; the number of bytes."""
    entries = _entries(tensor)
    location, where = entries.get("location", ""), f"external data of tensor {tensor.name!r}"
    if folder is None:
        raise ValueError(
            f"tensor {tensor.name!r} is in external data ({location!r}), which bytes cannot lead to: pass the path of "
            "the model file."
        )
    file = _inside(folder, location, where)
    available = file.stat().st_size
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else (_size(tensor) or available - offset)
    except ValueError:
        raise ValueError(f"{where} has an offset or length that is not a number.") from None
    if offset < 0 or length < 0 or offset + length > available:
        raise ValueError(
            f"{where} should be bytes {offset} to {offset + length} of {location!r}, which has {available}: the file "
            "is truncated, or belongs to another model."
        )
    if length > budget:
        raise ValueError("the model with its external data is larger than 2 GB, which is not supported.")
    with file.open("rb") as data:
        data.seek(offset)
        tensor.raw_data = data.read(length)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    return length


def _inside(folder: Path, location: str, where: str) -> Path:
    """The file at `location`, if links and dots followed it is a regular file in `folder`."""
    file = Path(os.path.realpath(folder / location))
    if not location or os.path.isabs(location) or not file.is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where} is at {location!r}, outside the model's folder; a model could so read any file. Put the data "
            "beside the model."
        )
    if not file.exists():
        raise FileNotFoundError(f"{where} is at {location!r}, and there is no such file beside the model.")
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{where} is at {location!r}, which is not a regular file.")
    return file


def _move_out(model: onnx.ModelProto, external: Collection[int], location: str, file: IO[bytes]) -> onnx.ModelProto:
    """Write tensors to `file`; a copy of the model that refers to them."""
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    for index, tensor in enumerate(all_tensors(moved)):
        if index in external:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            set_external_data(tensor, location, offset=file.tell(), length=len(tensor.raw_data))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
    return moved


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
    rows = sizes.pop() if sizes else None
    if rows is not None and rows > _MOST_ROWS:
        raise ValueError(f"the model was exported for {rows:,} rows at a time; export it for fewer, or for any number.")
    return rows


def make_feeds(x: Any, inputs: Sequence[ModelInput]) -> Feeds:
    """Split `x` into the inputs of a model, each in its own dtype.

    Several inputs are taken by name, or in order. With one input for each column, the columns of a DataFrame are taken
    by name; else columns are taken in order.
    """
    several = several_inputs(x)
    if several is not None:
        by_place = set(several) == set(range(len(inputs)))
        if not by_place and set(several) != {item.name for item in inputs}:
            raise ValueError(
                f"X has the inputs {', '.join(map(str, several))}; the model takes "
                f"{', '.join(sorted(item.name for item in inputs))}."
            )
        keys = several if by_place else [item.name for item in inputs]
        return {item.name: _convert(to_numpy(several[key]), item) for key, item in zip(keys, inputs, strict=True)}
    x = x.toarray() if hasattr(x, "toarray") else x
    x = x if is_frame(x) else to_numpy(x)
    if len(inputs) == 1 and (inputs[0].shape is None or len(inputs[0].shape) > 2):
        return {inputs[0].name: _convert(np.asarray(x), inputs[0])}
    if x.ndim != 2:
        raise ValueError(f"X has {x.ndim} dimensions; the model takes a table of {_columns_of(inputs)}.")
    feeds = {}
    for item, columns in zip(inputs, _assign_columns(x, inputs), strict=True):
        block = _convert(x.iloc[:, columns] if is_frame(x) else x[:, columns], item)
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
    names = list(x.columns) if is_frame(x) else []
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
    names = f" ({', '.join(map(str, x.columns))})" if is_frame(x) else ""
    return f"{x.shape[1]} columns{names}"


def _columns_of(inputs: Sequence[ModelInput]) -> str:
    if len(inputs) == 1:
        return f"{inputs[0].width or 'any number of'} columns (input {inputs[0].name!r})"
    parts = (item.name if item.width == 1 else f"{item.name}: {item.width} columns" for item in inputs)
    return f"{sum(item.width or 0 for item in inputs)} columns ({', '.join(parts)})"


def blank_rows(inputs: Sequence[ModelInput]) -> dict[str, NDArray[Any]]:
    """Two rows of nothing, on which to look at what follows the last layer."""
    rows = batch_size(inputs) or 2
    sizes = {item.name: tuple(size or 1 for size in (item.shape or (rows,))[1:]) for item in inputs}
    return {
        item.name: np.full((rows, *sizes[item.name]), "" if item.dtype.kind == "O" else 0, item.dtype)
        for item in inputs
    }


def _convert(values: Any, item: ModelInput) -> NDArray[Any]:
    """An array or a table in the dtype of an input, if it can be said in it."""
    names = list(map(repr, values.columns)) if is_frame(values) else ["X"] * (values.shape[-1] if values.ndim else 1)
    if item.dtype.kind == "O":
        texts = np.asarray(values, dtype=object)
        _refuse(~np.vectorize(lambda value: isinstance(value, str), otypes=[bool])(texts), texts, names, item, "text")
        return texts
    numbers = numeric(values, f"input {item.name!r}")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = numbers.astype(item.dtype)
    if item.dtype.kind in "iub":
        kind = "0 or 1" if item.dtype.kind == "b" else "whole numbers"
        _refuse(converted != numbers, numbers, names, item, f"{kind} ({item.dtype})")
    return converted


def _refuse(bad: NDArray[np.bool_], values: NDArray[Any], names: Sequence[str], item: ModelInput, takes: str) -> None:
    """Raise if one of the values cannot be said in the dtype of an input."""
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        raise ValueError(f"column {names[place[-1]]} holds {values[place]!s}; input {item.name!r} takes {takes}.")
