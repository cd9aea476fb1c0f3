"""An ONNX model at rest: read whole from a file, written in the shape of another, and what it takes and gives.

A model in memory is self-contained: tensors in external data are read in, by a reader that opens no file outside the
model's folder, and neither onnx nor onnxruntime is ever given a file name.
"""

import copy
import math
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]  # protobuf ships no types
from onnx import TensorProto
from onnx.external_data_helper import set_external_data, uses_external_data

from esvdfair.exceptions import InputError
from esvdfair.files import whole_file
from esvdfair.models import base, onnx_graph

ModelSource = str | os.PathLike[str] | bytes
Selector = str | int | tuple[str | int, int | str]

LARGEST = 2**31 - 1
"""Bytes that a protobuf message can hold; onnxruntime takes no more from memory."""

_ALIGNMENT = 4096  # a page, so that a runtime can map the tensors into memory, as ONNX asks

_ITEMSIZE: dict[int, int] = {
    **dict.fromkeys([TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8], 1),
    **dict.fromkeys([TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT16, TensorProto.UINT16], 2),
    **dict.fromkeys([TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32], 4),
    **dict.fromkeys([TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64], 8),
}


def read_model(source: ModelSource) -> tuple[onnx.ModelProto, frozenset[int]]:
    """Read a model with all tensors inside, and which of `all_tensors` were in external data.

    What is no valid ONNX model, or keeps data outside its folder, or in a file that is too short, is a `ValueError`.
    """
    if isinstance(source, bytes):
        data, folder, label = source, None, f"the model ({len(source)} bytes)"
    else:
        path = _path(source)
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a directory; an ONNX file is needed.")
        if not path.exists():
            raise FileNotFoundError(f"there is no file {str(path)!r}.")
        if not path.is_file():
            raise ValueError(f"{str(path)!r} is a pipe or a device; save the model to a file first.")
        data, folder, label = path.read_bytes(), path.parent, repr(str(path))
    model = _parse(data, label)
    outside = [(index, tensor) for index, tensor in enumerate(all_tensors(model)) if uses_external_data(tensor)]
    budget = LARGEST - len(data)
    for _, tensor in outside:
        budget -= _load(tensor, folder, budget)
    _check(model, label)
    return model, frozenset(index for index, _ in outside)


def _path(path: str | os.PathLike[str]) -> Path:
    """A path that a file can have."""
    if "\0" in os.fspath(path):
        raise ValueError(f"the path {os.fspath(path)!r} holds a NUL character, which no file name has; check the path.")
    return Path(path)


def all_tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model in a fixed order, wherever it stands: initialisers, attributes, subgraphs, functions."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for _, value in message.ListFields():
        for item in value if hasattr(value, "add") else (value,):
            if isinstance(item, Message):
                yield from all_tensors(item)


def save_model(model: ModelSource, path: str | os.PathLike[str], *, like: ModelSource | None = None) -> None:
    """Write an ONNX model to a file.

    Parameters
    ----------
    model : bytes or path
        Such as `estimator_` of a repaired model.
    path : where to write
        What is there is replaced at the end, and left alone if writing fails (a full disk).
    like : the model before its repair, optional
        Tensors that it keeps in external data go to external data again, in a file named `path` + ".data".
    """
    proto, external = read_model(model)
    if like is not None:
        original, external = read_model(like)
        count, other = (sum(1 for _ in all_tensors(item)) for item in (proto, original))
        if count != other:
            raise ValueError(f"the model has {count} tensors and the one it should be like {other}; pass its original.")
    path = _path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write a model to {str(path)!r}: it is a directory.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write a model to {str(path)!r}: there is no folder {str(path.parent)!r}.")
    with ExitStack() as stack:
        files = [stack.enter_context(whole_file(path))]
        if external:
            beside = path.with_name(path.name + ".data")
            files.append(stack.enter_context(whole_file(beside)))
            _move_out(proto, external, beside.name, files[-1])
        files[0].write(proto.SerializeToString())
        for file in files:  # both are on disk before either takes its name
            file.flush()
            os.fsync(file.fileno())


def _move_out(model: onnx.ModelProto, external: Collection[int], location: str, file: IO[bytes]) -> None:
    """Write tensors to `file`, and have the model refer to them."""
    for index, tensor in enumerate(all_tensors(model)):
        if index in external:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            set_external_data(tensor, location, offset=file.tell(), length=len(tensor.raw_data))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")


def external_files(path: str | os.PathLike[str]) -> list[str]:
    """Names of the files with external data of a model file, as it gives them, sorted; none of them is opened."""
    tensors = all_tensors(_parse(Path(path).read_bytes(), repr(str(path))))
    return sorted({entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"})


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
    """Run `onnx.checker`; and look at tensors, whose type and size not every version of it does.

    Nodes out of order, which onnxruntime runs all the same, are put in order.
    """
    _sort(model.graph)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{label} is not a valid ONNX model: {first_line(error)}") from None
    for tensor in all_tensors(model):
        size, fault = _size(tensor), ""
        if tensor.data_type not in TensorProto.DataType.values():
            fault = f"is of unknown type {tensor.data_type}"
        elif tensor.HasField("raw_data") and size not in (None, len(tensor.raw_data)):
            fault = f"of shape {tuple(tensor.dims)} holds {len(tensor.raw_data)} bytes; it needs {size}"
        if fault:
            raise ValueError(f"{label} is not a valid ONNX model: tensor {tensor.name!r} {fault}.")


def _sorted(graph: onnx.GraphProto) -> bool:
    """Whether no node reads what a later one makes."""
    later = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        if later & {*node.input}:
            return False
        later -= {*node.output}
    return True


def _sort(graph: onnx.GraphProto) -> None:
    """Put nodes in an order in which each comes after those that it reads, if they are in none and there is one."""
    if _sorted(graph):
        return
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = {place: {makers[n] for n in node.input if n in makers} for place, node in enumerate(graph.node)}
    try:
        order = [copy.deepcopy(graph.node[place]) for place in TopologicalSorter(needs).static_order()]
    except CycleError:  # which the checker reports
        return
    del graph.node[:]
    graph.node.extend(order)


def first_line(error: BaseException) -> str:
    """What an error of onnx or onnxruntime says, without what it appends."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _size(tensor: onnx.TensorProto) -> int | None:
    """Bytes of raw data that the shape asks for; None for types that are packed, or text."""
    itemsize = _ITEMSIZE.get(tensor.data_type)
    return None if itemsize is None else math.prod(tensor.dims) * itemsize


def _load(tensor: onnx.TensorProto, folder: Path | None, budget: int) -> int:
    """Put the external data of a tensor inside; the number of bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, where = entries.get("location", ""), f"external data of tensor {tensor.name!r}"
    if folder is None:
        raise ValueError(
            f"tensor {tensor.name!r} is in external data ({location!r}), which bytes cannot lead to: pass the path of "
            "the model file."
        )
    file = Path(os.path.realpath(folder / _path(location)))  # links and dots followed
    if not location or os.path.isabs(location) or not file.is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where} is at {location!r}, outside the model's folder; a model could so read any file. Put the data "
            "beside the model."
        )
    if not file.exists():
        raise FileNotFoundError(f"{where} is at {location!r}, and there is no such file beside the model.")
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{where} is at {location!r}, which is not a regular file.")
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


# --- what it takes and gives ------------------------------------------------------------------------------------------


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
    tensors = {value.name: _tensor_of(value, model) for value in model.graph.output}
    names, numbers = list(tensors), [name for name, (tensor, _) in tensors.items() if tensor is not None]
    which, place = _name_and_place(output, names)
    listing = ", ".join(map(repr, names))
    if which is None and len(names) > 1 and len(numbers) != 1:
        raise InputError(f"the model has {len(names)} outputs: {listing}. Choose the prediction with `output`.")
    known = place == base.SIGMOID or isinstance(place, int | None)
    if isinstance(which, bool) or not isinstance(which, str | int | None) or not known:
        raise TypeError(f"output must be the name or the position of an output, got {output!r}.")
    chosen: dict[Any, str] = {name: name for name in names} | {None: (*numbers, *names)[0]}
    chosen |= dict(zip(range(-len(names), len(names)), names * 2, strict=True))
    if which not in chosen:
        raise ValueError(f"the model has no output {which!r}; it has {listing}.")
    tensor, width = tensors[chosen[which]]
    if tensor is None:
        raise ValueError(f"output {chosen[which]!r} is not a tensor of floating-point numbers, as predictions are.")
    if place is None and width == 2 and len(names) == 2 and len(numbers) == 1:
        place = 1  # beside a label, the probability of the second of two classes
    return tensor, place


def _name_and_place(output: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Split what was given into an output, by name or position, and a column of it, "sigmoid" or None."""
    if isinstance(output, tuple) and len(output) == 2:
        return output
    if len(names) == 1 and type(output) is int:
        return None, output
    if not isinstance(output, str) or output in names:
        return output, None
    name, _, text = output.rpartition(":")
    place = int(text) if text.isdecimal() else text
    if not name and place != text:
        return _name_and_place(place, names)
    if output == base.SIGMOID:
        return None, output
    if name in names and (place != text or text == base.SIGMOID):
        return name, place
    return output, None


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
