"""A file of group moments: a zip of plain arrays and a header, without pickle, compression or dates."""

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label, check_labels, sort_key
from esvdfair.files import whole_file

FIELDS = {"rows": "<i8", "counts": "<f8", "weight_squares": "<f8", "means": "<f8", "scatters": "<f8"}
"""The arrays of a file, and how their numbers are written."""
_FORMAT = "esvdfair-moments-2"  # 1 had no checksum, and files of it may give single people away
_HEADER = "header.json"

Arrays = Mapping[str, NDArray[Any]]
Read = tuple[list[Label], list[NDArray[Any]], dict[str, Any] | None]


def digest(labels: Sequence[Label], arrays: Arrays, header: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of labels and numbers, and of a file's header."""
    found = hashlib.sha256(json.dumps([labels, header]).encode())
    for name, values in arrays.items():
        found.update(np.asarray(values, dtype=FIELDS[name]).tobytes())
    return found.hexdigest()


def write(
    path: str | os.PathLike[str], labels: Sequence[Label], width: int, arrays: Arrays, about: Mapping[str, Any] | None
) -> None:
    """Write labels, arrays and what they are about; the file appears whole or not at all."""
    said = None if about is None else dict(about)
    header = {"format": _FORMAT, "labels": labels, "width": width, "about": said}
    parts = {_HEADER: json.dumps(header | {"sha256": digest(labels, arrays, header)}).encode()}
    for name, values in arrays.items():
        parts[f"{name}.npy"] = _npy_header(name, values.shape) + np.asarray(values, dtype=FIELDS[name]).tobytes()
    with whole_file(path) as file, ZipFile(file, "w", ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(ZipInfo(name), content)  # without a date: equal moments are equal files


def read(path: str | os.PathLike[str]) -> Read:
    """Labels, arrays (none where there are no labels), and what they are about; ValueError for anything else."""
    with open(path, "rb") as stream:
        try:
            return _read(stream)
        except Exception as error:  # zipfile and json raise a dozen kinds of them for bytes that nobody meant
            why = str(error) or type(error).__name__
            raise ValueError(f"{os.fspath(path)!r} is not a moments file of esvdfair, or damaged ({why}).") from error


def _read(stream: IO[bytes]) -> Read:
    """Nothing is larger in memory than in the file, since nothing in it may be compressed."""
    with ZipFile(stream) as archive:
        if any(info.compress_type != ZIP_STORED for info in archive.infolist()):
            raise ValueError("it holds compressed parts")
        if "header.npy" in archive.namelist():
            raise ValueError("it was written by an older version; collect the moments again")
        header = json.loads(archive.read(_HEADER))
        if header["format"] != _FORMAT:
            raise ValueError(f"format {header['format']!r}")
        labels, width = [label_from_json(item) for item in header["labels"]], int(header["width"])
        check_labels(labels)
        if len(set(labels)) < len(labels) or sorted(labels, key=sort_key) != labels:
            raise ValueError("its groups are not in order")
        shapes = {"means": (len(labels), width), "scatters": (len(labels), width, width)}
        arrays = {
            name: _array(archive.read(f"{name}.npy"), name, shapes.get(name, (len(labels),)))
            for name in (FIELDS if labels else ())
        }
    if header.pop("sha256") != digest(labels, arrays, header):
        raise ValueError("its numbers are not those it was written with: their SHA-256 differs")
    return labels, list(arrays.values()), header["about"]


def label_from_json(item: Any) -> Label:
    """A label as JSON has it, where tuples are lists."""
    if isinstance(item, list):
        return tuple(label_from_json(part) for part in item)  # type: ignore[misc]  # combinations of combinations, too
    if not isinstance(item, str | int):
        raise ValueError(f"{item!r} is no group")
    return item


def _npy_header(name: str, shape: tuple[int, ...]) -> bytes:
    """What NumPy writes before the bytes of an array."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": FIELDS[name], "fortran_order": False, "shape": shape})
    return file.getvalue()


def _array(content: bytes, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array in a part of a file; ValueError unless it has the dtype and shape that it must have."""
    header = _npy_header(name, shape)
    if not content.startswith(header) or len(content) != len(header) + 8 * math.prod(shape):
        raise ValueError(f"its {name} have another type or shape than they should")
    return np.frombuffer(content, dtype=FIELDS[name], offset=len(header)).astype(FIELDS[name][1:]).reshape(shape)
