"""Files that a command writes: whether they can be, and then all of them or none."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from esvdfair.distributed import rank

PICTURES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Fail, before any work, where a picture cannot be drawn."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {str(path)!r}: the name must end in one of {', '.join(PICTURES)}.")
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'esvdfair[plots]'.")


def check_free(paths: list[Path], *, force: bool, inputs: list[Path]) -> None:
    """Fail, before any work, where a file cannot be written or would be overwritten; by the first rank, who writes."""
    if rank() > 0:
        return
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"cannot write to {str(path)!r}: it is a directory.")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}.")
        if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
            raise ValueError(f"{str(path)!r} is a file that is read; write the result elsewhere.")
        if path.exists() and not force:
            raise FileExistsError(f"{str(path)!r} is there already; --force replaces it.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("two results would go to one file; give each a name of its own.")


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
