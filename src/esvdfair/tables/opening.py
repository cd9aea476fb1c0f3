"""A path -> the file behind it, by content rather than by name."""

import os
import shutil
from pathlib import Path
from tempfile import NamedTemporaryFile

from esvdfair.tables.csvfile import CsvSource
from esvdfair.tables.parquetfile import ParquetSource
from esvdfair.tables.sources import Source


def open_table(path: str | os.PathLike[str]) -> Source:
    """Open a CSV or Parquet file and read its header.

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
    if path.is_file():
        return _source(path, path)
    # What comes through a pipe, <(zcat people.csv.gz), can be read once only; its copy goes when the source goes.
    copy = NamedTemporaryFile(prefix="esvdfair-")  # noqa: SIM115
    with path.open("rb") as pipe:
        shutil.copyfileobj(pipe, copy)
    copy.flush()
    source = _source(path, Path(copy.name))
    source.copy = copy
    return source


def _source(path: Path, place: Path) -> CsvSource | ParquetSource:
    with place.open("rb") as file:
        start = file.read(4)
    return ParquetSource(path, place) if start == b"PAR1" else CsvSource(path, place)
