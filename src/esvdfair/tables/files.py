"""A CSV file, or Parquet files, in chunks of whole rows that can be read again and again."""

import csv
import gzip
import hashlib
import io
import os
import re
import shutil
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

import pandas as pd

from esvdfair.files import sha256_of
from esvdfair.text import quoted, some_names

PIECE = 4 * 2**20
"""Bytes of a line that no table has."""
BLOCK = 8 * 2**20
"""Bytes of a chunk of CSV, about."""
WIDE = 2**14
"""Columns from which on a chunk is larger: pandas takes its time for every column of it."""
CHUNK_ROWS = 65_536
"""Rows of a chunk of Parquet, at most."""
CHUNK_VALUES = 2**21
"""Of a wide table a chunk has fewer rows, so that it holds about so many values."""
SHOWN = 12
"""Names that an error lists."""
SEPARATORS = ",\t;|"
"""What may separate fields where nothing is said, the first of them in doubt."""
_TOO_LONG = f"line {{}} is longer than {PIECE // 2**20} MB, as no line of a table is."
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_URI = re.compile(r"(\w{2,}):/+(.*)")  # a Path has one slash of the two or three
_BUFFER = 2**15  # bytes that the reader of a column takes at once; without it, all that a row group has
_WHOLE = 128 * 2**20  # bytes of a row group that is read as a whole


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
    copies : keeps them, they go when this goes
    """

    names: list[str]
    columns: list[str]
    size: int
    held_size: int
    copies: Sequence[Any] = ()

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self.place = path, place

    def sha256(self) -> str:
        """Of the file as it was given."""
        return sha256_of(self.path if self.path.is_file() else self.place)

    def cut(self) -> None:
        """Make chunks, before rows are read."""
        raise NotImplementedError

    def is_complete(self, columns: Sequence[str]) -> bool:
        """Whether the file itself says that these columns have a value in every row; NaN is a value there."""
        return False

    def frames(
        self, wanted: Callable[[int], bool], columns: Sequence[str], texts: Sequence[str] = (), *, strict: bool = False
    ) -> Iterator[tuple[int, pd.DataFrame, int]]:
        """Number and rows of each chunk that is wanted, and the bytes of the file up to its end, about.

        ``texts`` are read as text where their type is open. ``strict`` looks at all columns, also those that are not
        asked for, and fails where a row does not fit the header.
        """
        raise NotImplementedError


def open_table(path: str | os.PathLike[str], *, sep: str | None = None) -> TableFile:
    """Open a CSV or Parquet file, also in gzip or zip, all of which its content tells apart, and read its header.

    Parameters
    ----------
    path : a file; or a directory of Parquet files, also in partitions such as ``year=2024/``; or a URI of Parquet that
        pyarrow can open, such as ``s3://bucket/people/``
    sep : what separates the fields of a CSV file; by default the header decides among comma, tab, semicolon and |

    Raises
    ------
    FileNotFoundError
        The path leads to no file.
    ValueError
        The file is empty, of another kind, or has a name twice in its header; a directory has other files than Parquet.
    ImportError
        Parquet without pyarrow.
    """
    path = Path(path)
    if path.is_dir() or _URI.match(str(path)):
        return ParquetFiles(path, path)
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
    table = ParquetFiles(path, place) if start == b"PAR1" else CsvFile(path, place, sep)
    table.copies = copies
    twice = sorted(name for name, count in Counter(table.names).items() if name and count > 1)
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
    """A CSV file; pandas parses each chunk as a file of its own, whoever parses those before it."""

    def __init__(self, path: Path, place: Path, sep: str | None = None) -> None:
        super().__init__(path, place)
        self.size = self.held_size = place.stat().st_size
        with place.open("rb") as file:
            start = file.read(2 * PIECE)
        with readable(path):
            if not start.strip():
                raise ValueError("it is empty; a table with a header and rows is needed.")
            if b"\0" in start:
                raise ValueError("it is neither Parquet nor text in UTF-8.")
            text = io.TextIOWrapper(io.BytesIO(start), encoding="utf-8-sig", errors="replace", newline="")
            filled = (line for line in text if line.strip())  # pandas, too, skips lines of nothing
            first = next(filled)
            if len(first) > PIECE:
                raise ValueError(_TOO_LONG.format(1))
            self.sep = sep or max(SEPARATORS, key=re.sub('"[^"]*"', "", first).count)
            self.names = next(csv.reader(chain([first], filled), delimiter=self.sep))
            if len(self.names) < WIDE:
                self.columns = [str(name) for name in pd.read_csv(io.BytesIO(start), sep=self.sep, nrows=0).columns]
            else:  # what pandas says, which is slow on a wide header
                self.columns = [name or f"Unnamed: {i}" for i, name in enumerate(self.names)]

    def cut(self) -> None:
        """Chunks are (first byte, byte behind the last); all end with a row."""
        self._chunks: list[tuple[int, int]] = []
        size, start, left = max(BLOCK, BLOCK * len(self.columns) // WIDE), 0, b""
        with self.place.open("rb") as file, readable(self.path):
            piece = bytes(size)
            while len(piece) == size:
                piece = file.read(size)
                left += piece
                end = len(left) if len(piece) < size else _end_of_rows(left, self.sep)
                if end and not left[:end].isspace():
                    self._chunks.append((start, start + end))
                start, left = start + end, left[end:]
                last = start + max(left.rfind(b"\n"), left.rfind(b"\r")) + 1
                if start + len(left) - last > PIECE:
                    raise ValueError(_TOO_LONG.format(_lines_before(last, file) + 1))
                if len(left) > size + 2 * PIECE:
                    raise ValueError(
                        f"the row that starts in line {_lines_before(start, file) + 1} goes on for more than "
                        f"{len(left) // 2**20} MB; a quotation mark may not be closed."
                    )

    def frames(
        self, wanted: Callable[[int], bool], columns: Sequence[str], texts: Sequence[str] = (), *, strict: bool = False
    ) -> Iterator[tuple[int, pd.DataFrame, int]]:
        used = None if strict else list(dict.fromkeys(columns))  # with them, pandas takes rows of any length
        with self.place.open("rb") as file, readable(self.path):
            for chunk, (start, stop) in enumerate(self._chunks):
                if not wanted(chunk):
                    continue
                file.seek(start)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error", pd.errors.ParserWarning)  # the first row has too many fields
                        frame = pd.read_csv(
                            io.BytesIO(file.read(stop - start)), sep=self.sep, header=None if chunk else 0,
                            names=self.columns, usecols=used, index_col=False, low_memory=False,
                            dtype=dict.fromkeys(texts, str),
                        )  # fmt: skip
                except pd.errors.ParserError as error:
                    raise ValueError(_of_the_file(str(error), _lines_before(start, file))) from None
                # A copy has one block of memory for each type: pandas reads one for each column, and is slow on those.
                yield chunk, frame.copy()[list(columns)], stop


def _end_of_rows(block: bytes, sep: str) -> int:
    """Bytes of the whole rows in a block that starts with one: up to a line end that no quotation marks enclose."""
    end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
    if b'"' not in block:
        return end
    # A mark opens where a field begins, elsewhere it is text; inside, two of them stand for one.
    opening, closing = rb'"(?<=[%s\r\n]")' % re.escape(sep.encode()), rb'[^"]*+(?:""[^"]*+)*+"'
    closed = re.compile(rb'(?:[^"]*+(?:%s%s|(?!%s)"))*+[^"]*+' % (opening, closing, opening))
    while end:
        whole = closed.match(b"\n" + block, 0, end + 1)
        if whole is None or whole.end() > end:
            break
        end = max(block.rfind(b"\n", 0, whole.end() - 1), block.rfind(b"\r", 0, whole.end() - 1)) + 1
    return end


def _of_the_file(said: str, lines: int) -> str:
    """What pandas says of a line of a chunk, which so many lines of the file precede."""
    return re.sub(r"(?<=line |.row )\d+", lambda found: str(int(found[0]) + lines), said)


def _lines_before(place: int, file: BinaryIO) -> int:
    """How many lines of a file end before a place in it."""
    file.seek(0)
    pieces = iter(lambda: file.read(min(PIECE, place - file.tell())), b"")
    return sum(piece.count(b"\n") or piece.count(b"\r") for piece in pieces)


# --- Parquet -------------------------------------------------------------------------------------------------------


class ParquetFiles(TableFile):
    """A Parquet file, or those of a directory by name; a chunk is a batch of the reader of one file.

    pyarrow.dataset finds the files and the values of their partitions. It would read whole row groups, so each file is
    read by itself, buffered and without read-ahead.
    """

    def __init__(self, path: Path, place: Path) -> None:
        super().__init__(path, place)
        with readable(path):
            import pyarrow as pa
            from pyarrow import dataset

            uri = _URI.match(str(place))
            source = str(place) if uri is None else f"{uri[1]}:{'///' if uri[1] == 'file' else '//'}{uri[2]}"
            try:
                found = dataset.dataset(source, format="parquet", partitioning=None if place.is_file() else "hive")
                self._parts = sorted(found.get_fragments(), key=lambda part: str(part.path))
                metas = [part.metadata for part in self._parts]
            except (OSError, pa.ArrowInvalid) as error:
                named = re.search(r"input source '([^'<]+)'", str(error))
                which = str(path) if named is None else named[1]
                raise ValueError(f"{which!r} is not Parquet, damaged, or not there.") from None
            if not metas:
                raise ValueError("the directory has no files; Parquet files are needed.")
            self._keys = [dataset.get_partition_keys(part.partition_expression) for part in self._parts]
            schemas = [part.physical_schema for part in self._parts]
            keys = [column for column in found.schema if column.name in self._keys[0]]
            self._schema = pa.unify_schemas([*schemas, pa.schema(keys)], promote_options="permissive")
            self.names = list(self._schema.names)
            columns = self._schema.empty_table().to_pandas().columns
        self.columns = [str(name) for name in columns]  # an index that was stored is no column
        self.size = sum(found.filesystem.get_file_info(part.path).size for part in self._parts)
        self._rows = sum(meta.num_rows for meta in metas)
        self.held_size = sum(meta.row_group(i).total_byte_size for meta in metas for i in range(meta.num_row_groups))

    def sha256(self) -> str:
        """Of the file; of several, that of the lines that ``sha256sum`` prints of them, in this order."""
        if self.place.is_file():
            return super().sha256()
        whole, root = hashlib.sha256(), os.path.commonpath([os.path.dirname(part.path) for part in self._parts])
        for part in self._parts:
            with part.open() as file:
                digest = hashlib.sha256()
                while piece := file.read(PIECE):
                    digest.update(piece)
            whole.update(f"{digest.hexdigest()}  {os.path.relpath(part.path, root)}\n".encode())
        return whole.hexdigest()

    def cut(self) -> None:
        self._chunk_rows = min(CHUNK_ROWS, max(CHUNK_VALUES // max(len(self.columns), 1), 256))

    def is_complete(self, columns: Sequence[str]) -> bool:
        for part in self._parts:
            groups = [part.metadata.row_group(i) for i in range(part.metadata.num_row_groups)]
            places = {part.metadata.schema.column(i).path: i for i in range(part.metadata.num_columns)}
            if not places.keys() >= set(columns):
                return False
            found = (group.column(places[name]).statistics for group in groups for name in columns)
            if not all(known is not None and known.has_null_count and known.null_count == 0 for known in found):
                return False
        return True

    def frames(
        self, wanted: Callable[[int], bool], columns: Sequence[str], texts: Sequence[str] = (), *, strict: bool = False
    ) -> Iterator[tuple[int, pd.DataFrame, int]]:
        import pyarrow as pa

        done, rows, frame = 0, None, None
        try:
            with readable(self.path):
                for chunk, rows in enumerate(self._batches(list(dict.fromkeys(columns)))):
                    done += rows.num_rows
                    if wanted(chunk):
                        frame = rows.select(list(columns)).to_pandas()
                        frame.columns, frame.index = frame.columns.map(str), pd.RangeIndex(len(frame))
                        yield chunk, frame, self.size * done // self._rows
        finally:
            del rows, frame
            pa.default_memory_pool().release_unused()  # pyarrow would keep it

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        """Rows with the columns and types of all files: a column that a file lacks is missing there."""
        from pyarrow import parquet

        for part, keys in zip(self._parts, self._keys, strict=True):
            own = [name for name in columns if name in part.physical_schema.names]
            with part.open() as source:
                file = parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)
                for rows in self._pieces(file, own):
                    yield rows if own == columns and len(self._parts) == 1 else self._unified(rows, columns, keys)

    def _pieces(self, file: Any, columns: list[str]) -> Iterator[Any]:
        """The rows of one file. A reader of batches holds pages of every column, often more than a row group."""
        import pyarrow as pa

        for i in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(i)
            if group.total_byte_size > _WHOLE:
                batches = file.iter_batches(batch_size=self._chunk_rows, row_groups=[i], columns=columns)
                yield from (pa.Table.from_batches([batch]) for batch in batches)
                continue
            whole = file.read_row_group(i, columns=columns)
            yield from (whole.slice(start, self._chunk_rows) for start in range(0, group.num_rows, self._chunk_rows))
            del whole
            pa.default_memory_pool().release_unused()  # it would keep several row groups

    def _unified(self, rows: Any, columns: Sequence[str], keys: Mapping[str, Any]) -> Any:
        """Rows of one file with the columns and types of all; keys are the values of its partition."""
        import pyarrow as pa

        fields = [self._schema.field(name) for name in columns]
        values = [
            rows.column(field.name).cast(field.type)
            if field.name in rows.schema.names
            else pa.repeat(pa.scalar(keys.get(field.name), field.type), rows.num_rows)
            for field in fields
        ]
        return pa.Table.from_arrays(values, schema=pa.schema(fields, self._schema.metadata))
