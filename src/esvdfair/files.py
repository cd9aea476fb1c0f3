"""Files that appear whole or not at all, and what they say of what made them."""

import errno
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import BinaryIO
from uuid import uuid4

_PACKAGES = ("esvdfair", "numpy", "scipy", "scikit-learn", "pandas", "onnx", "onnxruntime")
_FORGOTTEN = 60.0  # seconds after which a hidden folder that is not locked was left by a process that was killed


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name at the end of the block, complete.

    It waits beside its place, so that it gets there by a rename: readers see the old file or the new one. A failure
    inside the block (a full disk) leaves what was there.
    """
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

    They wait in a hidden folder beside their place, so that they get there by a rename, which replaces what was there
    in one step. A failure inside the block (a full disk) leaves everything as it was. Other files that appear beside
    them, such as external data of a model, come along. The last of ``paths`` is gone before the others are replaced, so
    that a process that is killed in between leaves no record of other files than those that are there. Folders that
    killed processes have left are removed.

    Parameters
    ----------
    replace : whether to replace files that have appeared since somebody looked

    Raises
    ------
    FileExistsError
        A file has appeared, and is not to be replaced.
    OSError
        In words: what could not be written, and why.
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
