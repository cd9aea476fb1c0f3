"""A table larger than memory as batches that can be read again, and as a bounded sample of its rows."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from esvdfair.batches import Batch, row_key
from esvdfair.core.checks import Label
from esvdfair.tables.columns import Usage
from esvdfair.tables.opening import open_table
from esvdfair.tables.roles import Roles, check_roles
from esvdfair.tables.rows import Part, Rows, join, make_part
from esvdfair.tables.scan import Codes, Progress, check_labels, own, read_chunks, scan_source

HELD_BYTES = 256 * 2**20
"""A file of no more than this is parsed once and its columns kept."""
RARE_ROWS = 1_000
"""Of a group so many rows are in a sample, if it has them, however rare it is."""
_SAMPLE = 7  # another hash than those of the split and of the rows that a repair keeps


class TableBatches:
    """Batches of the complete rows of a CSV or Parquet file, read chunk by chunk on every pass.

    ``ESVDFair(model).fit(TableBatches(…))`` repairs on a file of any size. A row's id is its position in the file, also
    where rows with missing values are left out, so that the held-out rows and all samples are the same rows however the
    file is cut. Under ``torch.distributed`` every rank gives the batches of its own chunks.

    Parameters
    ----------
    path : CSV or Parquet
    roles : which column is what
    drop_missing : leave out rows in which a value of these columns is missing
    missing_group : people without a value of a sensitive column become the group "missing"
    min_groups : fewest groups; 1 where the others are in other tables
    batch_rows : rows of a batch, at most
    progress : told how many bytes of how many are read

    Attributes
    ----------
    scan : Scan, what a first pass over the whole file has found

    Raises
    ------
    ValueError
        A column that is not there (the nearest name is suggested) or stands in two roles, a malformed file, a target or
        predictions that are not numbers, missing or infinite values, fewer than ``min_groups`` groups.
    FileNotFoundError, IsADirectoryError, ImportError
        See :func:`open_table`.

    Examples
    --------
    >>> import pandas as pd, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "people.csv")
    >>> pd.DataFrame({"age": [30, 40, 50], "pay": [1.0, 2.0, 3.0], "sex": ["f", "m", "f"]}).to_csv(path, index=False)
    >>> table = TableBatches(path, Roles(("sex",), "pay"), batch_rows=2)
    >>> [batch.row_id.tolist() for batch in table], table.scan.labels
    ([[0, 1], [2]], ('f', 'm'))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        roles: Roles,
        *,
        drop_missing: bool = False,
        missing_group: bool = False,
        min_groups: int = 2,
        batch_rows: int = 8192,
        progress: Progress | None = None,
    ) -> None:
        self._source = open_table(path)
        inputs = tuple(check_roles(roles, self._source.columns, self._source.path))
        self._usage = Usage(self._source.path, roles, inputs, drop_missing, missing_group, min_groups)
        self._batch_rows, self._progress = batch_rows, progress
        keep = self._source.held_size <= HELD_BYTES
        self.scan, frames = scan_source(self._source, self._usage, progress=progress, keep=keep)
        self._held: list[Part] | None = None
        if frames is not None:
            firsts = self.scan.firsts
            self._held = [make_part(frame, self._usage, self.scan, firsts[chunk.index]) for chunk, frame in frames]

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def roles(self) -> Roles:
        return self._usage.roles

    @property
    def inputs(self) -> list[str]:
        """The model's inputs, in its order."""
        return list(self._usage.inputs)

    @property
    def attribute(self) -> str:
        """The sensitive columns, for people."""
        return ", ".join(self.roles.sensitive)

    def __iter__(self) -> Iterator[Batch]:
        for part in self._parts():
            labels, codes = self._encode(part.groups)
            row_id = part.groups.index.to_numpy(dtype=np.int64)
            y = None if part.y is None else np.asarray(part.y, dtype=np.float64)
            for start in range(0, len(part), self._batch_rows):
                rows = slice(start, start + self._batch_rows)
                yield Batch(part.X.iloc[rows], None if y is None else y[rows], labels, codes[rows], None, row_id[rows])

    def sample(self, most: int | None = None, *, seed: int = 0) -> Rows:
        """Rows in memory: all of them, or about ``most``, chosen by a hash of their position in the file.

        Every row is as likely as any other, except that of each group about ``RARE_ROWS`` rows are taken, or all that
        it has. Reads the whole file, whichever rank asks.
        """
        scan = self.scan
        share = 1.0 if most is None or most >= scan.rows else most / scan.rows
        limit = {label: max(share, RARE_ROWS / size) for label, size in zip(scan.labels, scan.sizes, strict=True)}
        parts = []
        for part in self._parts(all_ranks=True):
            if share < 1.0:
                labels, codes = self._encode(part.groups)
                key = row_key(part.groups.index.to_numpy(dtype=np.int64), seed + _SAMPLE)
                part = part.take(key < np.array([limit[label] for label in labels])[codes])
            parts.append(part)
        found = join(parts)
        return Rows(
            self.path, scan.sha256, self.roles, found.X, found.y, found.predictions, found.groups, scan.labels,
            scan.dropped, scan.rows,
        )  # fmt: skip

    def _parts(self, *, all_ranks: bool = False) -> Iterator[Part]:
        """Chunk by chunk, the complete rows; those of this rank, or all."""
        scan = self.scan
        chunks = list(scan.chunks) if all_ranks else own(scan.chunks)
        if self._held is not None and len(self._held) == len(chunks):
            yield from (part for part in self._held if len(part))
            return
        for chunk, frame in read_chunks(self._source, chunks, self._usage.columns, scan.texts, self._progress):
            first, end = (*scan.firsts, scan.total)[chunk.index : chunk.index + 2]
            if len(frame) != end - first:
                raise ValueError(f"{str(self.path)!r} has changed since it was first read; start again.")
            part = make_part(frame, self._usage, scan, first)
            if len(part):
                yield part

    def _encode(self, groups: pd.DataFrame) -> tuple[tuple[Label, ...], Codes]:
        return check_labels(groups, self.roles.sensitive)


def read_rows(
    path: str | os.PathLike[str], roles: Roles, *, drop_missing: bool = False, missing_group: bool = False
) -> Rows:
    """All complete rows of a table, in memory; parameters and errors as of :class:`TableBatches`."""
    return TableBatches(path, roles, drop_missing=drop_missing, missing_group=missing_group).sample()
