"""Files of an ONNX model: reading one whole, and writing one in the shape of another.

A model in memory is self-contained: tensors in external data are read in, by a reader that opens no file outside the
model's folder, and neither onnx nor onnxruntime is ever given a file name.
"""

import copy
import math
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import IO

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]  # protobuf ships no types
from onnx import TensorProto
from onnx.external_data_helper import set_external_data, uses_external_data

from esvdfair.files import whole_file

ModelSource = str | os.PathLike[str] | bytes

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
