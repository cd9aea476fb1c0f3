"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
