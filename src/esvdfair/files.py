"""Files that appear whole or not at all."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from uuid import uuid4


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
def whole_files(*paths: Path) -> Iterator[dict[Path, Path]]:
    """Where to write the files ``paths`` for now; at the end of the block they take their names, complete.

    They wait in a hidden folder beside their place, so that they get there by a rename, which replaces what was there
    in one step. A failure inside the block (a full disk) leaves everything as it was. Other files that appear beside
    them, such as external data of a model, come along.

    Raises
    ------
    OSError
        In words: what could not be written, and why.
    """
    try:
        with ExitStack() as stack:
            folders = {path.parent for path in paths}
            stages = {
                folder: Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix=".esvdfair-")))
                for folder in folders
            }
            yield {path: stages[path.parent] / path.name for path in paths}
            for folder, stage in stages.items():
                for file in sorted(stage.iterdir()):
                    os.replace(file, folder / file.name)
    except OSError as error:
        names = " and ".join(repr(str(path)) for path in paths)
        raise OSError(f"cannot write {names}: {error.strerror or error}") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
