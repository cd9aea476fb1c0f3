"""A CSV or Parquet file in chunks of whole rows that can be read again and again."""

import csv
import gzip
import io
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

import pandas as pd

from esvdfair.text import quoted, some_names

PIECE = 4 * 2**20
"""Bytes of a line that no table has."""
BLOCK = 8 * 2**20
"""Bytes of a chunk of CSV, about."""
CHUNK_ROWS = 65_536
"""Rows of a chunk of Parquet, at most."""
CHUNK_VALUES = 2**21
"""Of a wide table a chunk has fewer rows, so that it holds about so many values."""
SHOWN = 12
"""Names that an error lists."""
SEPARATORS = ",\t;|"
"""What may separate fields where nothing is said, the first of them in doubt."""
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_BUFFER = 2**18  # bytes that the reader of a column takes at once; without it, all that a row group has


class TableFile:
    """A file that can be read again and again, in chunks of whole rows.

    Attributes
    ----------
    path : of the file, as it was given
    place : where its bytes are: a copy of what can be read only once or is compressed
    names : as they stand in the header
    columns : names of its columns
    size : bytes of the file
    held_size : bytes of its values, about
    rows : how many there are, about
    chunk_rows : rows of a chunk, at most
    copies : keeps them, they go when this goes
    """

    names: list[str]
    columns: list[str]
    held_size: int
    rows: int
    chunk_rows: int
    copies: Sequence[Any] = ()

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self.place, self.size = path, place, place.stat().st_size

    def cut(self, parts: int) -> None:
        """Make chunks small enough for so many of them."""
        self.chunk_rows = max(min(self.chunk_rows, self.rows // parts), 1)

    def frames(
        self, columns: Sequence[str], texts: Sequence[str] = (), *, strict: bool = False
    ) -> Iterator[tuple[pd.DataFrame, int]]:
        """The rows of each chunk, and the bytes of the file up to its end, about.

        ``texts`` are read as text where their type is open. ``strict`` looks at all columns, also those that are not
        asked for, and fails where a row does not fit the header.
        """
        raise NotImplementedError


def open_table(path: str | os.PathLike[str], *, sep: str | None = None) -> TableFile:
    """Open a CSV or Parquet file, also in gzip or zip, all of which its content tells apart, and read its header.

    Parameters
    ----------
    sep : what separates the fields of a CSV file; by default the header decides among comma, tab, semicolon and |

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        The path leads to no file.
    ValueError
        The file is empty, of another kind, or has a name twice in its header.
    ImportError
        Parquet without pyarrow.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a directory; a CSV or Parquet file is needed.")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    place, copies = path, []
    if not path.is_file():  # what comes through a pipe, <(sort people.csv), can be read once only
        with path.open("rb") as pipe:
            copies.append(_copy(pipe))
        place = Path(copies[-1].name)
    with place.open("rb") as file:
        start = file.read(4)
    if start.startswith((_GZIP, _ZIP)):
        with readable(path), _unpacked(place, start) as content:
            copies.append(_copy(content))
        place = Path(copies[-1].name)
        with place.open("rb") as file:
            start = file.read(4)
    table = ParquetFile(path, place) if start == b"PAR1" else CsvFile(path, place, sep)
    table.copies = copies
    twice = sorted({name for name in table.names if name and table.names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{str(path)!r} cannot be read as a table: its header has {listing(twice)} more than once; give each "
            "column a name of its own."
        )
    return table


def _copy(stream: Any) -> Any:
    """What a stream gives, in a file that is gone when the result is."""
    copy = NamedTemporaryFile(prefix="esvdfair-")  # noqa: SIM115
    try:
        shutil.copyfileobj(stream, copy, PIECE)
        copy.flush()
    except BaseException:
        copy.close()
        raise
    return copy


@contextmanager
def _unpacked(place: Path, start: bytes) -> Iterator[Any]:
    """The content of a gzip file, or of the one file in a zip file."""
    if start.startswith(_GZIP):
        with gzip.open(place) as content:
            yield content
        return
    with zipfile.ZipFile(place) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
        if len(names) != 1:
            raise ValueError(f"it is a zip file that holds {len(names)} files; one table is needed.")
        with archive.open(names[0]) as content:
            yield content


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of what reads a file -> an error of one line that names the file."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{str(path)!r} is Parquet, which needs pyarrow: pip install 'esvdfair[data]'.") from None
    except Exception as error:  # a damaged file makes readers raise what they like: KeyError, EOFError, MemoryError
        raise ValueError(f"{str(path)!r} cannot be read as a table: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8."
    if isinstance(error, pd.errors.ParserWarning):
        return "a row has more fields than the header has names."
    first = (str(error).strip().splitlines() or [""])[0].removeprefix("Error tokenizing data. C error: ")
    known = first and isinstance(error, ValueError | OSError | EOFError | csv.Error | zipfile.BadZipFile)
    return first if known else f"it is damaged ({' '.join([type(error).__name__, first]).strip()})."


def listing(names: Sequence[str]) -> str:
    """Names from a file, of many the first few."""
    return some_names([quoted(name) for name in names], SHOWN)


# --- CSV -----------------------------------------------------------------------------------------------------------


class CsvFile(TableFile):
    """A CSV file, which pandas reads chunk by chunk."""

    def __init__(self, path: Path, place: Path, sep: str | None = None) -> None:
        super().__init__(path, place)
        self.held_size = self.size
        with place.open("rb") as file, readable(path):
            start = file.read(2 * PIECE)
            if not start.strip():
                raise ValueError("it is empty; a table with a header and rows is needed.")
            if b"\0" in start:
                raise ValueError("it is neither Parquet nor text in UTF-8.")
            lines = max(start.count(b"\n"), start.count(b"\r"), 1)
            self.rows = lines * self.size // len(start)
            self.chunk_rows = max(self.rows * BLOCK // self.size, 1)
            file.seek(0)
            text = io.TextIOWrapper(io.BufferedReader(_Lines(file)), encoding="utf-8-sig", errors="replace", newline="")
            filled = (line for line in text if line.strip())  # pandas, too, skips lines of nothing
            first = next(filled)
            self.sep = sep or max(SEPARATORS, key=re.sub('"[^"]*"', "", first).count)
            self.names = next(csv.reader(chain([first], filled), delimiter=self.sep))
            self.columns = [str(name) for name in pd.read_csv(io.BytesIO(start), sep=self.sep, nrows=0).columns]

    def frames(
        self, columns: Sequence[str], texts: Sequence[str] = (), *, strict: bool = False
    ) -> Iterator[tuple[pd.DataFrame, int]]:
        names = None if strict else list(dict.fromkeys(columns))  # with names, pandas takes rows of any length
        with self.place.open("rb") as file, readable(self.path):
            lines = _Lines(file)
            frames = pd.read_csv(
                lines, sep=self.sep, low_memory=False, index_col=False, usecols=names, chunksize=self.chunk_rows,
                dtype=dict.fromkeys(texts, str),
            )  # fmt: skip
            while True:
                lines.ahead = 0
                with warnings.catch_warnings():
                    warnings.simplefilter("error", pd.errors.ParserWarning)  # more fields than the header names
                    frame = next(frames, None)
                if frame is None:
                    return
                frame.columns = frame.columns.map(str)
                yield frame[list(columns)], file.tell()


class _Lines(io.RawIOBase):
    """The bytes of a CSV file; fails where a line, or a row, is longer than any of a table, before all of it is held.

    Attributes
    ----------
    ahead : bytes read since someone set it to 0
    """

    ahead = 0

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._line, self._open = file, 1, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        buffer[: len(piece)] = piece
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        self._open = len(piece) - end + (0 if end else self._open)
        self._line += piece.count(b"\n")
        self.ahead += len(piece)
        if self._open > PIECE:
            raise ValueError(f"line {self._line} is longer than {PIECE // 2**20} MB, as no line of a table is.")
        if self.ahead > 64 * BLOCK + 2 * PIECE:
            raise ValueError(
                f"a row before line {self._line} goes on for more than {self.ahead // 2**20} MB; a quotation mark may "
                "not be closed."
            )
        return len(piece)


# --- Parquet -------------------------------------------------------------------------------------------------------


class ParquetFile(TableFile):
    """A Parquet file; a chunk is a batch of its reader."""

    def __init__(self, path: Path, place: Path) -> None:
        super().__init__(path, place)
        with readable(path), self._open() as file:
            self.names, meta = list(file.schema_arrow.names), file.metadata
            columns = file.schema_arrow.empty_table().to_pandas().columns
            self.rows = meta.num_rows
            self.held_size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        self.columns = [str(name) for name in columns]  # an index that was stored is no column
        self.chunk_rows = min(CHUNK_ROWS, max(CHUNK_VALUES // max(len(self.columns), 1), 256))

    def frames(
        self, columns: Sequence[str], texts: Sequence[str] = (), *, strict: bool = False
    ) -> Iterator[tuple[pd.DataFrame, int]]:
        done = 0
        with readable(self.path), self._open() as file:
            for batch in file.iter_batches(batch_size=self.chunk_rows, columns=list(dict.fromkeys(columns))):
                frame: pd.DataFrame = batch.to_pandas()
                frame.columns = frame.columns.map(str)
                done += len(frame)
                yield frame.reset_index(drop=True)[list(columns)], self.size * done // self.rows

    def _open(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.place, buffer_size=_BUFFER, pre_buffer=False)
