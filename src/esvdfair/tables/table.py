"""A table larger than memory as batches that can be read again, and as rows in memory, all or a sample of them."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from esvdfair.batches import Batch, row_key
from esvdfair.tables.files import open_table
from esvdfair.tables.scan import (
    Progress,
    Roles,
    Scan,
    Usage,
    as_float,
    check_roles,
    encode,
    numbers,
    own,
    read_chunks,
    scan_table,
)

HELD_BYTES = 256 * 2**20
"""A file of no more than this is parsed once and its columns kept."""
RARE_ROWS = 1_000
"""Of a group so many rows are in a sample, if it has them, however rare it is."""
_SAMPLE = 7  # another hash than those of the split and of the rows that a repair keeps


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of a table in memory, none with a missing value; the index of every column is their place in the file.

    Attributes
    ----------
    X : inputs of the model, of the types that they have in the file
    y : (rows,) labels or None
    predictions : (rows,) or None
    groups : the sensitive columns
    scan : of the whole table, of which these rows may be a part
    """

    X: pd.DataFrame
    y: "pd.Series[float] | None"
    predictions: "pd.Series[float] | None"
    groups: pd.DataFrame
    scan: Scan

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def attribute(self) -> str:
        """The sensitive columns, for people."""
        return ", ".join(map(str, self.groups))

    @property
    def parts(self) -> "tuple[pd.DataFrame, pd.Series[float] | None, pd.DataFrame]":
        """Inputs, labels and groups, as ``validation=`` takes them."""
        return self.X, self.y, self.groups

    def take(self, keep: Any) -> "TableRows":
        """The rows that a mask (rows,) keeps."""
        y, predictions = (None if column is None else column[keep] for column in (self.y, self.predictions))
        return TableRows(self.X[keep], y, predictions, self.groups[keep], self.scan)


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
    check_inputs : told the model's inputs before the rows are read, and may refuse them
    progress : told how many bytes of how many are read

    Attributes
    ----------
    scan : Scan, what a first pass over the whole file has found
    inputs : the model's inputs, in its order

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
        check_inputs: Callable[[Sequence[str]], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._file = open_table(path)
        self.path, self.roles = self._file.path, roles
        self._usage = Usage(
            self.path, roles, check_roles(roles, self._file), drop_missing, missing_group, min_groups
        )  # fmt: skip
        self.inputs = list(self._usage.inputs)
        if check_inputs is not None:
            check_inputs(self.inputs)
        self._batch_rows, self._progress = batch_rows, progress
        keep = self._file.held_size <= HELD_BYTES
        self.scan, frames = scan_table(self._file, self._usage, progress=progress, keep=keep)
        self._held: list[TableRows] | None = None
        if frames is not None:
            self._held = [self._complete(frame, self.scan.firsts[chunk.index]) for chunk, frame in frames]

    def __iter__(self) -> Iterator[Batch]:
        for part in self._parts():
            labels, codes = encode(part.groups)
            row_id = part.groups.index.to_numpy(dtype=np.int64)
            y = None if part.y is None else np.asarray(part.y, dtype=np.float64)
            for start in range(0, len(part), self._batch_rows):
                rows = slice(start, start + self._batch_rows)
                yield Batch(part.X.iloc[rows], None if y is None else y[rows], labels, codes[rows], None, row_id[rows])

    def sample(self, most: int | None = None, *, seed: int = 0) -> TableRows:
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
                labels, codes = encode(part.groups)
                key = row_key(part.groups.index.to_numpy(dtype=np.int64), seed + _SAMPLE)
                part = part.take(key < np.array([limit[label] for label in labels])[codes])
            parts.append(part)
        return _join(parts)

    def _parts(self, *, all_ranks: bool = False) -> Iterator[TableRows]:
        """Chunk by chunk, the complete rows; those of this rank, or all."""
        scan = self.scan
        chunks = list(scan.chunks) if all_ranks else own(scan.chunks)
        if self._held is not None and len(self._held) == len(chunks):
            yield from (part for part in self._held if len(part))
            return
        for chunk, frame in read_chunks(self._file, chunks, self._usage.columns, scan.texts, self._progress):
            first, end = (*scan.firsts, scan.total)[chunk.index : chunk.index + 2]
            if len(frame) != end - first:
                raise ValueError(f"{str(self.path)!r} has changed since it was first read; start again.")
            part = self._complete(frame, first)
            if len(part):
                yield part

    def _complete(self, frame: pd.DataFrame, first: int) -> TableRows:
        """The complete rows of a chunk, whose first row is the ``first`` of the file, in types of the whole file."""
        usage, roles = self._usage, self.roles
        frame = as_float(frame, self.scan.floats).set_axis(pd.RangeIndex(first, first + len(frame)))
        if self.scan.dropped:
            frame = frame[~usage.absent(frame).any(axis=1)]
        found = {role: numbers(frame[name], role, self.path) for name, role in roles.numeric.items()}
        return TableRows(
            frame[self.inputs], found.get("target"), found.get("predictions"), usage.groups(frame), self.scan
        )  # fmt: skip


def _join(parts: list[TableRows]) -> TableRows:
    """Rows, one part below the other."""
    if len(parts) == 1:
        return parts[0]
    y, predictions = (
        None if columns[0] is None else pd.concat(columns)
        for columns in ([part.y for part in parts], [part.predictions for part in parts])
    )
    X, groups = pd.concat([part.X for part in parts]), pd.concat([part.groups for part in parts])
    return TableRows(X, y, predictions, groups, parts[0].scan)


def read_rows(
    path: str | os.PathLike[str], roles: Roles, *, drop_missing: bool = False, missing_group: bool = False
) -> TableRows:
    """All complete rows of a table, in memory; parameters and errors as of :class:`TableBatches`."""
    return TableBatches(path, roles, drop_missing=drop_missing, missing_group=missing_group).sample()
