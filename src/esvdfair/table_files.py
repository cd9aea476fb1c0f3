"""A CSV file, or Parquet files, as frames of whole rows that can be read again and again."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

import pandas as pd

from esvdfair.files import sha256_of
from esvdfair.text import quoted, some_names

CHUNK_ROWS = 65_536  # rows of a frame, at most
FEWEST_ROWS = 64  # that are never too many: pandas takes its time for every column of a frame
BLOCK = 8 * 2**20  # bytes of CSV that a frame has, about
CHUNK_VALUES = 2**19  # values of Parquet that a frame has, about
UNFINISHED = 512 * 2**20  # bytes of CSV in which a frame ends, unless a quotation mark was forgotten
SHOWN = 12
"""Names that an error lists."""
SEPARATORS = ",\t;|"
"""What may separate fields where nothing is said, the first of them in doubt."""
_URI = re.compile(r"(\w{2,}):/+(.*)")  # a Path has one slash of the two or three
_BUFFER = 2**15  # bytes that the reader of a Parquet column takes at once; without it, all that a row group has
_MORE = "\0"  # the column of fields that the header has no name for; no name has this character


class TableFile:
    """A file that can be read again and again, in frames of whole rows.

    Attributes
    ----------
    path, place : of the file as it was given, and of a plain copy where that is a pipe or compressed
    columns : names of its columns
    size, held_size : bytes of the file, and of its values, about
    copies : temporary files, which go when this goes
    """

    columns: list[str]
    size: int
    held_size: int
    copies: Sequence[Any] = ()

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self.place = path, place

    def sha256(self) -> str:
        """Of the file as it was given."""
        return sha256_of(self.path if self.path.is_file() else self.place)

    def is_complete(self, columns: Sequence[str]) -> bool:
        """Whether the file itself says that these columns have a value in every row; NaN is a value there."""
        return False

    def frames(self, columns: Sequence[str], texts: Sequence[str] = ()) -> Iterator[tuple[pd.DataFrame, int]]:
        """Yield some rows and the bytes of the file up to their end, about.

        ``texts`` are read as text where their type is open.
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
    FileNotFoundError, ValueError, ImportError
        There is no file; it is empty, of another kind, or its header has a name twice; Parquet without pyarrow.
    """
    path = Path(path)
    if path.is_dir() or _URI.match(str(path)):
        return ParquetFiles(path, path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    with readable(path):
        copies = _plain_copies(path)
    place = Path(copies[-1].name) if copies else path
    with place.open("rb") as file:
        table = ParquetFiles(path, place) if file.read(4) == b"PAR1" else CsvFile(path, place, sep)
    table.copies = copies
    twice = sorted(name for name, count in Counter(table.columns).items() if count > 1)
    if twice:
        raise ValueError(
            f"{str(path)!r} cannot be read as a table: its header has {listing(twice)} more than once; give each "
            "column a name of its own."
        )
    return table


def _plain_copies(path: Path) -> list[Any]:
    """Copies of what comes through a pipe, which can be read only once, and then of what gzip or zip contain."""
    copies = []
    if not path.is_file():
        with path.open("rb") as pipe:
            copies.append(_copy(pipe))
        path = Path(copies[-1].name)
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        if start.startswith(b"\x1f\x8b"):
            copies.append(_copy(gzip.GzipFile(fileobj=file)))
        elif start == b"PK\x03\x04":
            archive = zipfile.ZipFile(file)
            names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
            if len(names) != 1:
                raise ValueError(f"it is a zip file that holds {len(names)} files; one table is needed.")
            copies.append(_copy(archive.open(names[0])))
    return copies


def _copy(stream: Any) -> Any:
    """What a stream gives, in a file that is gone when the result is."""
    copy = NamedTemporaryFile(prefix="esvdfair-")  # noqa: SIM115
    try:
        shutil.copyfileobj(stream, copy)
    except BaseException:
        copy.close()
        raise
    copy.flush()
    return copy


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of what reads a file -> an error of one line that names the file."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{str(path)!r} is Parquet, which needs pyarrow: pip install 'esvdfair[data]'.") from None
    except Exception as error:  # a damaged file makes readers raise what they like: KeyError, EOFError, MemoryError
        first = (str(error).strip().splitlines() or [""])[0].removeprefix("Error tokenizing data. C error: ")
        if isinstance(error, UnicodeDecodeError):
            first = "it is not text in UTF-8."
        elif not first or not isinstance(error, ValueError | OSError | EOFError | csv.Error | zipfile.BadZipFile):
            first = f"it is damaged ({' '.join([type(error).__name__, first]).strip()})."
        raise ValueError(f"{str(path)!r} cannot be read as a table: {first}") from None


def listing(names: Sequence[str]) -> str:
    """Names from a file, of many the first few."""
    return some_names([quoted(name) for name in names], SHOWN)


# --- CSV -----------------------------------------------------------------------------------------------------------


class CsvFile(TableFile):
    """A CSV file, which pandas parses."""

    def __init__(self, path: Path, place: Path, sep: str | None = None) -> None:
        super().__init__(path, place)
        self.size = self.held_size = place.stat().st_size
        with place.open("rb") as file, readable(path):
            start = file.read(BLOCK)
            if not start.strip():
                raise ValueError("it is empty; a table with a header and rows is needed.")
            if b"\0" in start:
                raise ValueError("it is neither Parquet nor text in UTF-8.")
            file.seek(0)
            text: Any = io.TextIOWrapper(
                io.BufferedReader(_Watched(file)), encoding="utf-8-sig", errors="replace", newline=""
            )
            blank, first = next((i, line) for i, line in enumerate(text) if line.strip())
            self.sep = sep or max(SEPARATORS, key=re.sub('"[^"]*"', "", first).count)
            names = next(csv.reader(chain([first], text), delimiter=self.sep))
        self.columns = [name or f"Unnamed: {i}" for i, name in enumerate(names)]  # as pandas calls them
        self._header = blank + 1
        lines = start.count(b"\n") or start.count(b"\r")
        self._rows = min(CHUNK_ROWS, max(FEWEST_ROWS, BLOCK * lines // len(start)))

    def frames(self, columns: Sequence[str], texts: Sequence[str] = ()) -> Iterator[tuple[pd.DataFrame, int]]:
        # pandas cuts a row that is too long where it is the first of a frame: one more column finds it everywhere.
        with self.place.open("rb") as file, readable(self.path), warnings.catch_warnings():
            warnings.simplefilter("ignore", pd.errors.ParserWarning)
            watched = _Watched(file)
            try:
                reader = pd.read_csv(
                    watched, sep=self.sep, header=None, names=[*self.columns, _MORE], skiprows=self._header,
                    index_col=False, low_memory=False, dtype=dict.fromkeys(texts, str), chunksize=self._rows,
                )  # fmt: skip
                for frame in reader:
                    if frame[_MORE].notna().any():
                        raise self._long_row()
                    watched.unfinished = 0
                    # pandas reads a block of memory for each column and is slow on them; a copy has one for each type.
                    yield frame[list(columns)].copy(), watched.done
            except pd.errors.ParserError as error:
                raise (self._long_row() if "saw" in str(error) else error) from None

    def _long_row(self) -> ValueError:
        """That a row has more fields than there are names; pandas does not say which, or not rightly."""
        with self.place.open(encoding="utf-8-sig", newline="") as text:
            rows = csv.reader(text, delimiter=self.sep)
            long = (f"line {rows.line_num} has {len(row)} fields" for row in rows if len(row) > len(self.columns))
            found = next(long, "a row has fields")
        return ValueError(f"{found}, more than the header has names ({len(self.columns)}).")


class _Watched(io.RawIOBase):
    """The bytes of a text file; fails where a row does not end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._line, self.done, self.unfinished = file, 1, 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        buffer[: len(piece)] = piece
        self.done += len(piece)
        self.unfinished += len(piece)
        self._line += piece.count(b"\n") or piece.count(b"\r")
        if self.unfinished > UNFINISHED:
            raise ValueError(
                f"a row before line {self._line} goes on for more than {UNFINISHED // 2**20} MB; a quotation mark may "
                "not be closed."
            )
        return len(piece)


# --- Parquet -------------------------------------------------------------------------------------------------------


class ParquetFiles(TableFile):
    """A Parquet file, or those of a directory by name.

    pyarrow.dataset finds the files and the values of their partitions. It would read whole row groups (1.5 GB
    of memory for one of 500 MB), so each file is read by itself, buffered and without read-ahead.
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
                groups = [group for part in self._parts for group in part.row_groups]
            except (OSError, pa.ArrowInvalid) as error:
                named = re.search(r"input source '([^'<]+)'", str(error))
                which = str(path) if named is None else named[1]
                raise ValueError(f"{which!r} is not Parquet, damaged, or not there.") from None
            if not self._parts:
                raise ValueError("the directory has no files; Parquet files are needed.")
            self._keys = [dataset.get_partition_keys(part.partition_expression) for part in self._parts]
            keys = pa.schema([column for column in found.schema if column.name in self._keys[0]])
            schemas = [part.physical_schema for part in self._parts]
            self._schema = pa.unify_schemas([*schemas, keys], promote_options="permissive")
            columns = self._schema.empty_table().to_pandas().columns
        self.columns = [str(name) for name in columns]  # an index that was stored is no column
        self.size = sum(found.filesystem.get_file_info(part.path).size for part in self._parts)
        self.held_size = sum(group.total_byte_size for group in groups)
        self._total = sum(group.num_rows for group in groups)

    def sha256(self) -> str:
        """Of the file; of several, that of the lines that ``sha256sum`` prints of them, in this order."""
        if self.place.is_file():
            return super().sha256()
        root, lines = os.path.commonpath([os.path.dirname(part.path) for part in self._parts]), ""
        for part in self._parts:
            with part.open() as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines += f"{digest}  {os.path.relpath(part.path, root)}\n"
        return hashlib.sha256(lines.encode()).hexdigest()

    def is_complete(self, columns: Sequence[str]) -> bool:
        for group in (part.metadata.row_group(i) for part in self._parts for i in range(len(part.row_groups))):
            chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
            known = [chunks[name].statistics for name in columns if name in chunks]
            if len(known) < len(columns) or any(each is None or each.null_count != 0 for each in known):
                return False
        return True

    def frames(self, columns: Sequence[str], texts: Sequence[str] = ()) -> Iterator[tuple[pd.DataFrame, int]]:
        import pyarrow as pa
        from pyarrow import parquet

        rows, done = min(CHUNK_ROWS, max(FEWEST_ROWS, CHUNK_VALUES // len(columns))), 0
        schema = pa.schema([self._schema.field(name) for name in columns], self._schema.metadata)
        with readable(self.path):
            for part, keys in zip(self._parts, self._keys, strict=True):
                own = [name for name in columns if name in part.physical_schema.names]
                with part.open() as source:
                    file = parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)
                    batches = file.iter_batches(rows, columns=own, use_threads=False)
                    for frame in (_in_schema(batch, schema, keys) for batch in batches):
                        done += len(frame)
                        yield frame, self.size * done // self._total
                pa.default_memory_pool().release_unused()  # pyarrow would keep it


def _in_schema(batch: Any, schema: Any, keys: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of one file with the columns and types of all: keys are the values of its partition, the rest is missing."""
    import pyarrow as pa

    rows, names = pa.Table.from_batches([batch]), list(schema.names)
    for field in schema:
        if field.name in keys:
            rows = rows.append_column(field, pa.repeat(pa.scalar(keys[field.name], field.type), batch.num_rows))
    if rows.schema != schema:
        rows = pa.concat_tables([schema.empty_table(), rows], promote_options="permissive")
    frame: pd.DataFrame = rows.select(names).to_pandas(use_threads=False)
    return frame.set_axis(names, axis=1).reset_index(drop=True)
