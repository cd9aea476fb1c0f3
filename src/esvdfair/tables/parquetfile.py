"""Parquet, in chunks of rows that lie in one row group."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pandas as pd

from esvdfair.tables.sources import Chunk, readable

CHUNK_ROWS = 65_536
CHUNK_VALUES = 2**21
"""Of a wide table a chunk has fewer rows, so that it holds about so many values."""
_BUFFER = 2**18  # bytes that the reader of a column takes at once; without it, all that a row group has


class ParquetSource:
    """A Parquet file."""

    copy: Any = None

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self._place = path, place
        self.size = place.stat().st_size
        with readable(path), self._open() as file:
            names, meta = file.schema_arrow.empty_table().to_pandas().columns, file.metadata
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            self._ends = list(accumulate(group.num_rows for group in groups))  # of row groups, in rows of the file
            self.held_size = sum(group.total_byte_size for group in groups)
        self.columns = [str(name) for name in names]  # an index that was stored is no column

    def plan(self, parts: int = 1) -> tuple[list[Chunk], str]:
        """All chunks, about ``parts`` at the least, and the SHA-256 of the file."""
        with self._place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        chunks: list[Chunk] = []
        step = min(self._step, -(-self._ends[-1] // parts)) if self._ends else 1
        for first, end in zip([0, *self._ends], self._ends, strict=False):
            for start in range(first, end, step):
                stop = min(start + step, end)
                chunks.append(Chunk(len(chunks), start, stop, self.size * stop // self._ends[-1]))
        return chunks, digest

    def frames(
        self, chunks: Sequence[Chunk], columns: Sequence[str], dtypes: Mapping[str, Any], *, strict: bool = False
    ) -> Iterator[tuple[Chunk, pd.DataFrame]]:
        """Each chunk and its rows; see :class:`Source`. What its columns hold, the file itself says."""
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

        return pyarrow.parquet.ParquetFile(self._place, buffer_size=_BUFFER, pre_buffer=False)


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
