"""The rows of a table of any size, as batches."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from esvdfair.batches import Batch, row_ids, row_key
from esvdfair.core.checks import check_strata, label_text
from esvdfair.core.ks import label_parts, make_cells
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.tables.files import SHOWN, open_table
from esvdfair.tables.scan import (
    OTHERS,
    Progress,
    Roles,
    Scan,
    Usage,
    as_float,
    as_numbers,
    encode,
    model_inputs,
    scan_table,
)
from esvdfair.text import quoted, some_names

HELD_BYTES = 256 * 2**20
"""A file of no more than this is parsed once and its columns kept."""
RARE_ROWS = 1_000
"""Of a group so many rows are in a sample, if it has them, however rare it is."""
_COLUMNS = ("X", "y", "predictions", "groups", "weight", "control", "ids")
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
    weight : (rows,) or None
    control : the columns that gaps are adjusted for, or None
    ids : (rows,) what identifies each row, where a column does
    scan : of the whole table, of which these rows may be a part
    """

    X: pd.DataFrame
    y: "pd.Series[float] | None"
    predictions: "pd.Series[float] | None"
    groups: pd.DataFrame
    weight: "pd.Series[float] | None"
    control: pd.DataFrame | None
    ids: "pd.Series[Any] | None"
    scan: Scan

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def attribute(self) -> str:
        """The sensitive columns, for people."""
        return ", ".join(map(str, self.groups))

    @property
    def parts(self) -> tuple[Any, ...]:
        """Inputs, labels, groups, weights and strata, as ``validation=`` takes them."""
        return self.X, self.y, self.groups, self.weight, self.control

    @property
    def beside(self) -> dict[str, Any]:
        """Groups and weights, as whatever takes predictions takes them."""
        return {"sensitive_features": self.groups, "sample_weight": self.weight}

    @property
    def compared(self) -> dict[str, Any]:
        """The same and the strata, where groups are compared."""
        return {**self.beside, "control_features": self.control}

    @property
    def counted(self) -> tuple[Any, ...]:
        """The same with rows counted from 1, as people count those of a file."""
        return self.X.set_axis(self.X.index + 1), *self.parts[1:]

    def take(self, keep: Any) -> "TableRows":
        """The rows that a mask (rows,) keeps."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        kept: Any = {name: None if column is None else column[keep] for name, column in columns.items()}
        return replace(self, **kept)


class TableBatches:
    """Batches of the complete rows of a CSV or Parquet file, read chunk by chunk on every pass.

    ``ESVDFair(model).fit(TableBatches(…))`` repairs on a file of any size. A row's id is its position in the file, also
    where rows with missing values are left out, so that the held-out rows and all samples are the same rows however the
    file is cut.

    Parameters
    ----------
    path : CSV or Parquet, or a directory of Parquet files
    roles : which column is what
    drop_missing : leave out rows in which a value of these columns is missing
    missing_group : people without a value of a sensitive column become the group "missing"
    min_groups : fewest groups; 1 where the others are in other tables
    min_group_rows : smaller groups are left out, and a warning names them
    other : join them to one group "other" instead, if it is large enough
    sep : what separates the fields of a CSV file, see :func:`open_table`
    part : names the file among others, whose rows it keeps apart: see :func:`esvdfair.summarise`
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
    FileNotFoundError, ImportError
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
        min_group_rows: int = 1,
        other: bool = False,
        sep: str | None = None,
        part: int | str = 0,
        batch_rows: int = 8192,
        check_inputs: Callable[[Sequence[str]], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        file = open_table(path, sep=sep)
        self.path, self.roles, self.inputs = file.path, roles, model_inputs(roles, file)
        if check_inputs is not None:
            check_inputs(self.inputs)
        self._batch_rows, self.part = batch_rows, part
        self._usage = Usage(
            file, roles, self.inputs, drop_missing, missing_group, min_groups, min_group_rows, other, progress
        )
        self.scan, frames = scan_table(self._usage, keep=file.held_size <= HELD_BYTES, quick=True)
        if self.scan.small:
            _warn_of_small(self.scan, self._usage)
        self._floats = [name for name in self.inputs if self.scan.head[name].dtype.kind == "f"]
        self._held = {chunk: self._complete(frame, self.scan.firsts[chunk]) for chunk, frame in frames.items()}

    def __iter__(self) -> Iterator[Batch]:
        return (batch for part in self._parts() for batch in self._batches(part))

    def _batches(self, part: "TableRows") -> Iterator[Batch]:
        labels, codes = encode(part.groups)
        group_parts = 0
        if part.control is not None:
            group_parts = label_parts(labels[0])
            labels, codes = make_cells((labels, codes), check_strata(part.control, len(codes)))
        row_id = row_ids(part.ids, self.part, part.groups.index)
        y, weight = (None if c is None else np.asarray(c, dtype=np.float64) for c in (part.y, part.weight))
        for start in range(0, len(part), self._batch_rows):
            rows = slice(start, start + self._batch_rows)
            own_y, own_weight = (None if column is None else column[rows] for column in (y, weight))
            yield Batch(part.X.iloc[rows], own_y, labels, codes[rows], own_weight, row_id[rows], group_parts)

    def sample(self, most: int | None = None, *, seed: int = 0) -> TableRows:
        """Rows in memory: all of them, or about ``most``, chosen by a hash of their position in the file.

        Every row is as likely as any other, except that of each group about ``RARE_ROWS`` rows are taken, or all that
        it has. Reads the whole file.
        """
        scan = self.scan
        share = 1.0 if most is None or most >= scan.rows else most / scan.rows
        limit = {label: max(share, RARE_ROWS / size) for label, size in zip(scan.labels, scan.sizes, strict=True)}
        parts = []
        for part in self._parts():
            if share < 1.0:
                labels, codes = encode(part.groups)
                key = row_key(part.groups.index.to_numpy(dtype=np.int64), seed + _SAMPLE)
                part = part.take(key < np.array([limit[label] for label in labels])[codes])
            parts.append(part)
        return _join(parts)

    def _parts(self) -> Iterator[TableRows]:
        """Yield the complete rows of each chunk; those held come first, and they are the first of the file."""
        yield from (part for part in self._held.values() if len(part))
        if len(self._held) == len(self.scan.firsts):
            return
        firsts = (*self.scan.firsts, self.scan.total)
        first = firsts[len(self._held)]
        for chunk, frame in self._usage.read(lambda chunk: chunk not in self._held, self.scan.texts):
            stop = first + len(frame)
            if stop > self.scan.total or (self.scan.inputs_read and stop != firsts[chunk + 1]):
                break
            part, first = self._complete(frame, first), stop
            if len(part):
                yield part
        if first != self.scan.total:
            raise ValueError(f"{self._usage.path} has changed since it was first read; start again.")

    def _complete(self, frame: pd.DataFrame, first: int) -> TableRows:
        """The complete rows of a chunk, whose first row is the ``first`` of the file, in types of the whole file."""
        usage, roles = self._usage, self.roles
        frame = as_float(frame, self.scan.floats).set_axis(pd.RangeIndex(first, first + len(frame)))
        if not self.scan.inputs_read and not all(np.isfinite(frame[name].to_numpy().sum()) for name in self._floats):
            scan_table(usage, keep=False)  # fails, and says how many values are missing or infinite
        if self.scan.dropped:
            frame = frame[~usage.absent(frame).any(axis=1)]
        groups = usage.groups(frame)
        if self.scan.small and len(frame):
            labels, codes = encode(groups)
            small = np.array([label in self.scan.small for label in labels])[codes]
            if self.scan.joined is None:
                frame, groups = frame[~small], groups[~small]
            else:
                groups = groups.astype(object)
                groups.loc[small] = OTHERS
        found = {role: as_numbers(frame[name], role, usage.path) for name, role in roles.numeric.items()}
        y, predictions, weight = (found.get(role) for role in ("target", "predictions", "weight"))
        control = frame[list(roles.control)] if roles.control else None
        ids = None if roles.row_id is None else frame[roles.row_id]
        return TableRows(frame[self.inputs], y, predictions, groups, weight, control, ids, self.scan)


def _warn_of_small(scan: Scan, usage: Usage) -> None:
    names = [f"{quoted(label_text(label))} {rows}" for label, rows in scan.small.items()]
    done = "were left out" if scan.joined is None else f"became the group {quoted(OTHERS)}"
    warning = ESVDFairWarning(
        f"{sum(scan.small.values()):,} rows of {usage.path} {done}, as their groups have fewer than "
        f"{usage.min_group_rows}: {some_names(names, SHOWN)}."
    )
    warnings.warn(warning, stacklevel=3)


def _join(parts: list[TableRows]) -> TableRows:
    """Rows, one part below the other."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: [getattr(part, name) for part in parts] for name in _COLUMNS}
    found: Any = {name: None if those[0] is None else pd.concat(those) for name, those in columns.items()}
    return TableRows(**found, scan=parts[0].scan)


def read_rows(path: str | os.PathLike[str], roles: Roles, **options: Any) -> TableRows:
    """All complete rows of a table, in memory; options and errors as of :class:`TableBatches`."""
    return TableBatches(path, roles, **options).sample()
