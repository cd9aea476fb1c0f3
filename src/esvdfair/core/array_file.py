"""Arrays and a JSON header in one file: a zip with a checksum, without pickle, compression or dates."""

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label
from esvdfair.files import whole_file

_DTYPES = ("<f8", "<f4", "<f2", "<i8", "<u8")
_HEADER = "header.json"

Arrays = Mapping[str, NDArray[Any]]


def write(path: str | os.PathLike[str], kind: str, version: int, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a header that JSON can hold and arrays of numbers; the file appears whole or not at all."""
    arrays = {name: values.astype(values.dtype.newbyteorder("<"), copy=False) for name, values in arrays.items()}
    shapes = {name: [values.dtype.str, *values.shape] for name, values in arrays.items()}
    whole = {"format": f"esvdfair-{kind}-{version}", **header, "arrays": shapes}
    parts = {_HEADER: json.dumps(whole | {"sha256": _digest(whole, arrays)}).encode()}
    for name, values in arrays.items():
        parts[f"{name}.npy"] = _npy_header(*shapes[name]) + values.tobytes()
    with whole_file(path) as file, ZipFile(file, "w", ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(ZipInfo(name), content)  # without a date: equal content gives equal files


def read(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the header and the arrays of a file; ValueError for a file of another kind or a damaged one."""
    with open(path, "rb") as stream:
        try:
            return _read(stream, f"esvdfair-{kind}-{version}")
        except Exception as error:  # zipfile and json raise a dozen kinds of them for bytes that nobody meant
            raise damaged(path, kind, error) from error


def damaged(path: str | os.PathLike[str], kind: str, error: Exception) -> ValueError:
    """The error for a file whose content is wrong."""
    why = str(error) or type(error).__name__
    return ValueError(f"{os.fspath(path)!r} is not a {kind} file of esvdfair, or damaged ({why}).")


def _read(stream: IO[bytes], expected: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Nothing is larger in memory than in the file, since nothing in it may be compressed."""
    with ZipFile(stream) as archive:
        if any(info.compress_type != ZIP_STORED for info in archive.infolist()):
            raise ValueError("it holds compressed parts")
        header = json.loads(archive.read(_HEADER))
        if header["format"] != expected:
            raise ValueError(f"format {header['format']!r}, expected {expected!r}")
        shapes = header["arrays"]
        arrays = {name: _array(archive.read(f"{name}.npy"), name, *shape) for name, shape in shapes.items()}
    if header.pop("sha256") != _digest(header, arrays):
        raise ValueError("its content differs from what was written: the SHA-256 does not match")
    return header, arrays


def label_from_json(item: Any) -> Label:
    """A label as JSON has it, where tuples are lists."""
    if isinstance(item, list):
        return tuple(label_from_json(part) for part in item)  # type: ignore[misc]  # combinations of combinations, too
    if not isinstance(item, str | int):
        raise ValueError(f"{item!r} is no group")
    return item


def _digest(header: Mapping[str, Any], arrays: Arrays) -> str:
    found = hashlib.sha256(json.dumps(header).encode())
    for values in arrays.values():
        found.update(np.ascontiguousarray(values).data if values.size else b"")
    return found.hexdigest()


def _npy_header(dtype: str, *shape: int) -> bytes:
    """What NumPy writes before the bytes of an array."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": tuple(shape)})
    return file.getvalue()


def _array(content: bytes, name: str, dtype: str, *shape: int) -> NDArray[Any]:
    """The array in a part of a file; ValueError unless it has the dtype and shape that the header gives it."""
    header = _npy_header(dtype, *shape)
    size = np.dtype(dtype).itemsize if dtype in _DTYPES else 0
    if not size or not content.startswith(header) or len(content) != len(header) + size * math.prod(shape):
        raise ValueError(f"its {name} have another type or shape than they should")
    return np.frombuffer(content, dtype=dtype, offset=len(header)).reshape(shape)
