"""A file of rows, in chunks: what CSV and Parquet have in common."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd


@dataclass(frozen=True)
class Chunk:
    """Some rows that stand beside each other in a file and are read at once.

    Attributes
    ----------
    index : 0, 1, 2, …, in the order of the file
    start, stop : where it stands: bytes of a CSV file, rows of a Parquet file
    end_byte : bytes of the file up to its end (about, for Parquet), to show how far reading is
    """

    index: int
    start: int
    stop: int
    end_byte: int


class Source(Protocol):
    """A file that can be read again and again, all of it or some of its chunks.

    Attributes
    ----------
    path : of the file, as it was given
    columns : names of all its columns
    size : bytes of the file
    held_size : bytes of its values, about
    copy : keeps the copy of what can be read only once
    """

    path: Path
    columns: list[str]
    size: int
    held_size: int
    copy: Any

    def plan(self, parts: int = 1) -> tuple[list[Chunk], str]:
        """All chunks, about ``parts`` at the least, and the SHA-256 of the file. Reads the bytes once, keeps none."""
        ...

    def frames(
        self, chunks: Sequence[Chunk], columns: Sequence[str], dtypes: Mapping[str, Any], *, strict: bool = False
    ) -> Iterator[tuple[Chunk, pd.DataFrame]]:
        """Each chunk and its rows. ``dtypes`` are of columns whose type in the file is open; ``strict`` looks at all
        columns, also those that are not asked for, and fails where a row does not fit the header.
        """
        ...


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of what reads a file -> an error of one line that names the file."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{str(path)!r} is Parquet, which needs pyarrow: pip install 'esvdfair[data]'.") from None
    except (ValueError, OSError, csv.Error, pd.errors.ParserWarning) as error:
        raise ValueError(f"{str(path)!r} cannot be read as a table: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8."
    if isinstance(error, pd.errors.ParserWarning):
        return "a row has more fields than the header has names."
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix(
        "Error tokenizing data. C error: "
    )
