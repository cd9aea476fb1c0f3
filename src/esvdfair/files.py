"""Files that appear whole or not at all; arrays and a JSON header in one file; what made them."""

import hashlib
import io
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, BinaryIO
from uuid import uuid4
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

_PACKAGES = ("esvdfair", "numpy", "scipy", "scikit-learn", "pandas", "onnx", "onnxruntime")
_HEADER = "header.json"


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name at the end of the block, complete; a failure leaves what was there."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # only there when something failed


@contextmanager
def whole_files(*paths: Path, replace: bool = True) -> Iterator[dict[Path, Path]]:
    """Where to write the files ``paths`` for now; at the end of the block they take their names, complete.

    They wait in a hidden folder beside their place, so that a rename gets them there; after a failure inside the block
    everything is as it was. Other files that appear beside them, such as external data of a model, come along. The last
    of ``paths``, the record of the others, goes first and comes last: a process that is killed in between leaves none
    that is of other files. What cannot be written is an OSError in words; without ``replace`` so is a file that has
    appeared since somebody looked.
    """
    try:
        with ExitStack() as stack:
            stages = {
                folder: Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix=".esvdfair-")))
                for folder in {path.parent for path in paths}
            }
            yield {path: stages[path.parent] / path.name for path in paths}
            found = {folder / file.name: file for folder, stage in stages.items() for file in sorted(stage.iterdir())}
            if not replace and (taken := [final for final in found if final.exists()]):
                raise FileExistsError(f"{str(taken[0])!r} has appeared meanwhile; nothing was written.")
            paths[-1].unlink(missing_ok=True)
            for final in sorted(found, key=lambda final: final == paths[-1]):
                os.replace(found[final], final)
    except FileExistsError:
        raise
    except OSError as error:
        names = " and ".join(repr(str(path)) for path in paths)
        raise OSError(f"cannot write {names}: {error.strerror or error}") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str | None]:
    """Of Python, of this package and of those that its numbers depend on."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES}


def version_of(package: str) -> str | None:
    """Version of an installed package; None when it is not installed, as when it runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- arrays and a JSON header: a zip with a checksum, without pickle, compression or dates --------------------------


def write_arrays(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    header: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Write a header that JSON can hold and arrays of numbers; the file appears whole or not at all."""
    digest = hashlib.sha256()
    with whole_file(path) as file, ZipFile(file, "w", ZIP_STORED) as archive:
        for name, content in _parts({"format": f"esvdfair-{kind}-{version}", **header}, arrays):
            digest.update(name.encode() + content)
            archive.writestr(ZipInfo(name), content)  # without a date: equal content gives equal files
        archive.comment = digest.digest()


def _parts(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes, one array at a time: the largest takes most of the memory."""
    yield _HEADER, json.dumps(header).encode()
    for name, values in arrays.items():
        file = io.BytesIO()
        np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)
        yield f"{name}.npy", file.getvalue()


def read_arrays(
    path: str | os.PathLike[str], kind: str, version: int
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
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
    header, arrays, digest = {}, {}, hashlib.sha256()
    with ZipFile(stream) as archive:
        if any(info.compress_type != ZIP_STORED for info in archive.infolist()):
            raise ValueError("it holds compressed parts")
        for name in archive.namelist():
            content = archive.read(name)
            digest.update(name.encode() + content)
            if name == _HEADER:
                header = json.loads(content)
            else:
                arrays[name.removesuffix(".npy")] = _array(content)
        if header.get("format") != expected:
            raise ValueError(f"format {header.get('format')!r}, expected {expected!r}")
        if archive.comment != digest.digest():
            raise ValueError("its content differs from what was written: the SHA-256 does not match")
    return header, arrays


def label_from_json(item: Any) -> Any:
    """A label of a group as JSON has it, where tuples are lists."""
    if isinstance(item, list):
        return tuple(label_from_json(part) for part in item)
    if not isinstance(item, str | int):
        raise ValueError(f"{item!r} is no group")
    return item


def _array(content: bytes) -> NDArray[Any]:
    """The array in the bytes of a .npy file, not copied."""
    stream = io.BytesIO(content)
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
