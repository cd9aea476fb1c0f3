"""Files that appear whole or not at all; arrays and a JSON header in one file; what made them."""

import errno
import hashlib
import io
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import IO, Any, BinaryIO
from uuid import uuid4
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

_PACKAGES = ("esvdfair", "numpy", "scipy", "scikit-learn", "pandas", "onnx", "onnxruntime")
_FORGOTTEN = 60.0  # seconds after which a hidden folder that is not locked was left by a process that was killed
_DTYPES = ("<f8", "<f4", "<f2", "<i8", "<u8")
_HEADER = "header.json"

Arrays = Mapping[str, NDArray[Any]]


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
            stages = {folder: stack.enter_context(_stage(folder)) for folder in {path.parent for path in paths}}
            yield {path: stages[path.parent] / path.name for path in paths}
            found = [(file, folder / file.name) for folder, stage in stages.items() for file in sorted(stage.iterdir())]
            if replace:
                paths[-1].unlink(missing_ok=True)
                for file, final in sorted(found, key=lambda pair: pair[1] == paths[-1]):
                    os.replace(file, final)
            else:
                _link(found)
    except FileExistsError as error:
        raise FileExistsError(f"{str(error.filename2)!r} has appeared meanwhile; nothing was written.") from None
    except OSError as error:
        names = " and ".join(repr(str(path)) for path in paths)
        raise OSError(f"cannot write {names}: {error.strerror or error}") from None


def _link(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Give files their names, all or none; FileExistsError where one is taken."""
    done: list[Path] = []
    try:
        for file, final in pairs:
            try:
                os.link(file, final)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                if final.exists():
                    raise FileExistsError(errno.EEXIST, "", str(file), None, str(final)) from None
                os.replace(file, final)
            done.append(final)
    except OSError:
        for final in done:
            final.unlink(missing_ok=True)
        raise


@contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """A hidden folder that is locked as long as it is used; those that nobody uses any more are removed."""
    for old in folder.glob(".esvdfair-*"):
        if old.is_dir() and not old.is_symlink() and time() - old.stat().st_mtime > _FORGOTTEN:
            with _locked(old) as unused:
                if unused:
                    shutil.rmtree(old, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix=".esvdfair-") as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process has a folder for itself, during the block; False where there are no locks."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


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
    path: str | os.PathLike[str], kind: str, version: int, header: Mapping[str, Any], arrays: Arrays
) -> None:
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


def label_from_json(item: Any) -> Any:
    """A label of a group as JSON has it, where tuples are lists."""
    if isinstance(item, list):
        return tuple(label_from_json(part) for part in item)
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
