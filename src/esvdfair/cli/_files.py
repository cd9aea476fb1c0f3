"""Files that a command writes: all of them or none."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def staged(*paths: Path) -> Iterator[dict[Path, Path]]:
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
