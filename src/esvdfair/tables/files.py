"""A CSV or Parquet file in chunks of whole rows that can be read again and again."""

import csv
import gzip
import hashlib
import io
import os
import re
import shutil
import warnings
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.files import sha256_of
from esvdfair.text import quoted, some_names

PIECE = 4 * 2**20
"""Bytes without a line end that no table has: every line of twice as many holds such a piece."""
BLOCK = 8 * 2**20
"""Bytes of a chunk of CSV, about."""
CHUNK_ROWS = 65_536
"""Rows of a chunk of Parquet."""
CHUNK_VALUES = 2**21
"""Of a wide table a chunk has fewer rows, so that it holds about so many values."""
SHOWN = 12
"""Names that an error lists."""
SEPARATORS = ",\t;|"
"""What may separate fields where nothing is said, the first of them in doubt."""
_MARK, _GZIP, _ZIP = b"\xef\xbb\xbf", b"\x1f\x8b", b"PK\x03\x04"
_BUFFER = 2**18  # bytes that the reader of a column takes at once; without it, all that a row group has


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


class TableFile:
    """A file that can be read again and again, all of it or some of its chunks.

    Attributes
    ----------
    path : of the file, as it was given
    place : where its bytes are: a copy of what can be read only once or is compressed
    names : as they stand in the header
    columns : names of its columns
    size : bytes of the file
    held_size : bytes of its values, about
    sha256 : of the file, where it is not that of the bytes at ``place``
    copies : keeps them, they go when this goes
    """

    names: list[str]
    columns: list[str]
    held_size: int
    sha256: str | None = None
    copies: Sequence[Any] = ()

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self.place, self.size = path, place, place.stat().st_size

    def plan(self, parts: int = 1) -> tuple[list[Chunk], str]:
        """All chunks, about ``parts`` at the least, and the SHA-256 of the file. Reads the bytes once, keeps none."""
        raise NotImplementedError

    def frames(
        self, chunks: Sequence[Chunk], columns: Sequence[str], dtypes: Mapping[str, Any], *, strict: bool = False
    ) -> Iterator[tuple[Chunk, pd.DataFrame]]:
        """Each chunk and its rows. ``dtypes`` are of columns whose type in the file is open; ``strict`` looks at all
        columns, also those that are not asked for, and fails where a row does not fit the header.
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
    table.sha256 = sha256_of(path) if path.is_file() and copies else None
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
    """A CSV file; each chunk is parsed under the file's header, as if it were a file of its own."""

    def __init__(self, path: Path, place: Path, sep: str | None = None) -> None:
        super().__init__(path, place)
        self.held_size = self.size
        with place.open("rb") as file:
            start = file.read(2 * PIECE)
        if not start.strip():
            raise ValueError(f"{str(path)!r} is empty; a table with a header and rows is needed.")
        with readable(path):
            if b"\0" in start[:PIECE]:
                raise ValueError("it is neither Parquet nor text in UTF-8.")
            _check_line(start[:PIECE], 1)
            self.sep = _separator(start) if sep is None else sep
            self._header, self._body = _header(start, self.sep)
            text = self._header.decode("utf-8", errors="replace")
            self.names = next(csv.reader(io.StringIO(text, newline=None), delimiter=self.sep))
            self.columns = [str(name) for name in self._parse(b"", None, {}).columns]

    def plan(self, parts: int = 1) -> tuple[list[Chunk], str]:
        digest = hashlib.sha256()
        block = min(BLOCK, -(-self.size // parts))
        chunks: list[Chunk] = []
        lines, start, pending = 1, 0, b""
        with readable(self.path), self.place.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                _check_line(piece, lines)
                lines += piece.count(b"\n")
                pending += piece
                while len(pending) >= block:
                    end = last_end(pending[:block], self.sep) or last_end(pending, self.sep)
                    if not end:
                        _check_record(pending, lines)
                        break
                    self._add(chunks, start, start + end)
                    start, pending = start + end, pending[end:]
        self._add(chunks, start, start + len(pending))
        return chunks, digest.hexdigest()

    def frames(
        self, chunks: Sequence[Chunk], columns: Sequence[str], dtypes: Mapping[str, Any], *, strict: bool = False
    ) -> Iterator[tuple[Chunk, pd.DataFrame]]:
        names = None if strict else list(dict.fromkeys(columns))  # with names, pandas takes rows of any length
        with self.place.open("rb") as file:
            for chunk in chunks:
                file.seek(chunk.start)
                with readable(self.path):
                    frame = self._rows(file.read(chunk.stop - chunk.start), chunk, names, dtypes)
                yield chunk, frame[list(columns)]

    def _add(self, chunks: list[Chunk], start: int, stop: int) -> None:
        """Append a chunk, unless all of it is header."""
        start = max(start, self._body)
        if stop > start:
            chunks.append(Chunk(len(chunks), start, stop, stop))

    def _rows(self, block: bytes, chunk: Chunk, names: list[str] | None, dtypes: Mapping[str, Any]) -> pd.DataFrame:
        try:
            return self._parse(block, names, dtypes)
        except pd.errors.ParserError as error:
            shift = self._lines_before(chunk) - self._header.count(b"\n")
            text = re.sub(r"(?<=line |.row )\d+", lambda found: str(int(found[0]) + shift), str(error))
            raise ValueError(text) from None

    def _parse(self, block: bytes, names: list[str] | None, dtypes: Mapping[str, Any]) -> pd.DataFrame:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more fields than the header names
            frame = pd.read_csv(
                io.BytesIO(self._header + block), sep=self.sep, low_memory=False, index_col=False, usecols=names,
                dtype=dict(dtypes),
            )  # fmt: skip
        frame.columns = frame.columns.map(str)
        return frame

    def _lines_before(self, chunk: Chunk) -> int:
        """Line ends in the file before a chunk."""
        lines, left = 0, chunk.start
        with self.place.open("rb") as file:
            while left > 0:
                piece = file.read(min(left, PIECE))
                lines, left = lines + piece.count(b"\n"), left - len(piece)
        return lines


def _check_line(piece: bytes, line: int) -> None:
    if len(piece) == PIECE and b"\n" not in piece and b"\r" not in piece:
        raise ValueError(f"line {line} is longer than {PIECE // 2**20} MB, as no line of a table is.")


def _check_record(pending: bytes, lines: int) -> None:
    if len(pending) > BLOCK + 2 * PIECE:
        line = lines - pending.count(b"\n")
        raise ValueError(
            f"the row that starts in line {line} goes on for more than {len(pending) // 2**20} MB; a quotation mark "
            "may not be closed."
        )


def _separator(start: bytes) -> str:
    """What separates most names in the first line that is not blank, quoted ones aside."""
    line = next(iter(start.removeprefix(_MARK).lstrip(b"\r\n").splitlines()), b"")
    bare = re.sub(rb'"[^"]*"', b"", line)
    return max(SEPARATORS, key=lambda mark: bare.count(mark.encode()))


def _header(start: bytes, sep: str) -> tuple[bytes, int]:
    """The line with the names, without a byte order mark, and where it ends in the file."""
    mark = len(_MARK) if start.startswith(_MARK) else 0
    text = start[mark:]
    blank = len(text) - len(text.lstrip(b" \r\n"))  # lines of nothing are skipped before the header as elsewhere
    first = max(text.rfind(b"\n", 0, blank), text.rfind(b"\r", 0, blank)) + 1
    ends = record_ends(text[first:], sep)
    end = first + int(ends[0]) if len(ends) else len(text)
    end += text[end - 1 : end + 1] == b"\r\n"
    header = text[first:end]
    return header if header.endswith((b"\n", b"\r")) else header + b"\n", mark + end


# --- where the records of CSV end: at a line end that is not inside quotation marks --------------------------------

_QUOTE, _LF, _CR = b'"\n\r'
Places = NDArray[np.intp]


def last_end(block: bytes, sep: str = ",") -> int:
    """Length of the whole records at the start of a block that starts with a record; 0 when none ends in it."""
    if b'"' not in block:
        return max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
    ends = record_ends(block, sep)
    return int(ends[-1]) if len(ends) else 0


def record_ends(block: bytes, sep: str = ",") -> Places:
    """Positions behind every line end outside quotation marks, in a block that starts with a record."""
    data = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero((data == _LF) | (data == _CR))
    if b'"' in block:
        ends = ends[np.searchsorted(_marks(data, ord(sep)), ends) % 2 == 0]
    return ends + 1


def _marks(data: NDArray[np.uint8], sep: int) -> Places:
    """Positions of the quotation marks that open and close fields, in turn; a doubled one may close and open again."""
    marks = np.flatnonzero(data == _QUOTE)
    return marks if _in_pairs(data, marks, sep) else np.array(_marks_one_by_one(data, marks, sep), dtype=np.intp)


def _in_pairs(data: NDArray[np.uint8], marks: Places, sep: int) -> bool:
    """Whether every other mark stands at the start of a field and those between at the end of one."""
    around = np.concatenate([[_LF], data, [_LF]]).astype(np.uint8)
    before, after = around[marks[0::2]], around[marks[1::2] + 2]
    edges = [sep, _LF, _CR, _QUOTE]
    return bool(np.isin(before, edges).all() and np.isin(after, edges).all())


def _marks_one_by_one(data: NDArray[np.uint8], marks: Places, sep: int) -> list[Any]:
    """As the parser does it: a mark opens at the start of a field only; inside, two of them stand for one."""
    found: list[Any] = []
    inside, skip = False, -1
    for place in marks.tolist():
        if place == skip:
            continue
        if not inside:
            inside = place == 0 or data[place - 1] in (sep, _LF, _CR)
            found += [place] * inside
        elif place + 1 < len(data) and data[place + 1] == _QUOTE:
            skip = place + 1
        else:
            inside = False
            found.append(place)
    return found


# --- Parquet -------------------------------------------------------------------------------------------------------


class ParquetFile(TableFile):
    """A Parquet file; a chunk lies in one row group."""

    def __init__(self, path: Path, place: Path) -> None:
        super().__init__(path, place)
        with readable(path), self._open() as file:
            self.names, meta = list(file.schema_arrow.names), file.metadata
            columns = file.schema_arrow.empty_table().to_pandas().columns
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            self._ends = list(accumulate(group.num_rows for group in groups))  # of row groups, in rows of the file
            self.held_size = sum(group.total_byte_size for group in groups)
        self.columns = [str(name) for name in columns]  # an index that was stored is no column

    def plan(self, parts: int = 1) -> tuple[list[Chunk], str]:
        with self.place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        chunks: list[Chunk] = []
        step = max(min(self._step, -(-(self._ends or [0])[-1] // parts)), 1)
        for first, end in zip([0, *self._ends], self._ends, strict=False):
            for start in range(first, end, step):
                stop = min(start + step, end)
                chunks.append(Chunk(len(chunks), start, stop, self.size * stop // self._ends[-1]))
        return chunks, digest

    def frames(
        self, chunks: Sequence[Chunk], columns: Sequence[str], dtypes: Mapping[str, Any], *, strict: bool = False
    ) -> Iterator[tuple[Chunk, pd.DataFrame]]:
        import pyarrow

        names = list(dict.fromkeys(columns))
        with self._open() as file:
            for group, mine in groupby(chunks, lambda chunk: bisect_right(self._ends, chunk.start)):
                first = [0, *self._ends][group]
                batches = file.iter_batches(batch_size=self._step, row_groups=[group], columns=names)
                parts = _cut(batches, first, list(mine))
                while True:
                    with readable(self.path):
                        chunk, rows = next(parts, (None, ()))
                        if chunk is None:
                            break
                        frame: pd.DataFrame = pyarrow.Table.from_batches(rows).to_pandas()
                    frame.columns = frame.columns.map(str)
                    yield chunk, frame.reset_index(drop=True)[list(columns)]

    @property
    def _step(self) -> int:
        """Rows of a chunk."""
        return min(CHUNK_ROWS, max(CHUNK_VALUES // max(len(self.columns), 1), 256))

    def _open(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.place, buffer_size=_BUFFER, pre_buffer=False)


def _cut(batches: Iterator[Any], first: int, chunks: list[Chunk]) -> Iterator[tuple[Chunk, list[Any]]]:
    """The record batches of a row group, whose first row is ``first``, cut at the chunks."""
    batch: Any = None
    start = first
    for chunk in chunks:
        parts: list[Any] = []
        while sum(part.num_rows for part in parts) < chunk.stop - chunk.start:
            batch = next(batches) if batch is None else batch
            low, high = max(chunk.start - start, 0), min(chunk.stop - start, batch.num_rows)
            if low < high:
                parts.append(batch.slice(low, high - low))
            if start + batch.num_rows <= chunk.stop:
                batch, start = None, start + batch.num_rows
        yield chunk, parts
