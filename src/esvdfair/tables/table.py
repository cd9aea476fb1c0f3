"""A table of any size: the roles of its columns, what one pass says of its rows, and these rows as batches."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.batches import Batch, row_ids, row_key
from esvdfair.core.checks import MAX_INTEGER_GROUPS, MISSING, Label, check_strata, encode_groups, sort_key
from esvdfair.core.ks import label_parts, make_cells
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.tables.files import SEPARATORS, SHOWN, TableFile, listing, open_table
from esvdfair.text import label_text, quoted, some_names

HELD_BYTES = 256 * 2**20
"""A file of no more than this is parsed once and its columns kept."""
RARE_ROWS = 1_000
"""Of a group so many rows are in a sample, if it has them, however rare it is."""
MAX_GROUPS = 10_000
"""More combinations of sensitive values than this are not collected, nor accepted."""
OTHERS = "other"
"""Label of the group that small groups are joined to."""
_COLUMNS = ("X", "y", "predictions", "groups", "weight", "control", "ids")
_SAMPLE = 7  # another hash than those of the split and of the rows that a repair keeps

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are read, after every chunk; starts anew with every pass."""


# --- roles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are.

    Attributes
    ----------
    sensitive : the groups; several columns mean their combinations
    target : the label, if there is one
    predictions : predictions of a model that is not at hand; then no column is an input
    features : the model's inputs, in its order; None takes the remaining columns in file order
    weight : how much each row counts, if there is one
    control : what gaps are adjusted for; may be inputs of the model too
    row_id : what identifies each row, whole numbers or texts; by default its position in the file
    """

    sensitive: tuple[str, ...]
    target: str | None = None
    predictions: str | None = None
    features: tuple[str, ...] | None = None
    weight: str | None = None
    control: tuple[str, ...] = ()
    row_id: str | None = None

    @property
    def numeric(self) -> dict[str, str]:
        """Columns that must hold numbers -> what they are."""
        singles = {"target": self.target, "predictions": self.predictions, "weight": self.weight}
        return {name: role for role, name in singles.items() if name is not None}

    def named(self) -> dict[str, str]:
        """Column -> what it is, of those that are no inputs."""
        ids = {} if self.row_id is None else {self.row_id: "row id"}
        return ids | dict.fromkeys(self.sensitive, "sensitive") | self.numeric


def _inputs(roles: Roles, file: TableFile) -> list[str]:
    """The model's inputs; every column that has a role is there and has one role only."""
    features = roles.features or ()
    if not roles.sensitive:
        raise ValueError("no sensitive column was named; parity is between the groups that it makes.")
    known, named = set(file.columns), roles.named()
    for name in (*named, *roles.control, *features):
        if name not in known:
            raise _not_there(name, file)
    if twice := set(roles.control) & set(roles.named()):
        raise InputError(f"`control_features`: column {quoted(min(twice))} has another role already.")
    others = {*roles.sensitive, *features}
    singles = {"target": roles.target, "predictions": roles.predictions, "weight": roles.weight, "row id": roles.row_id}
    for role, single in singles.items():
        if single is not None and single in others:
            raise ValueError(f"column {quoted(single)} is the {role} and something else besides; give it one role.")
        others.add(single or "")
    for names in (features, roles.sensitive):
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"a column is named twice: {listing(repeated)}.")
    if roles.features is None and roles.predictions is None:
        features = tuple(name for name in file.columns if name not in named)
    if not features and roles.predictions is None:
        beside = listing(list(roles.named()))
        raise ValueError(f"{str(file.path)!r} has no column left for the model's inputs beside {beside}.")
    return list(features)


def _not_there(name: str, file: TableFile) -> InputError:
    """That a column is not there, which one may be meant, and which there are."""
    lower = {column.lower(): column for column in file.columns}
    near = get_close_matches(name.lower()[:60], list(lower), n=1, cutoff=0.6)
    hint = f" Did you mean {quoted(lower[near[0]])}?" if near else ""
    start = f"{str(file.path)!r} has no column {quoted(name)}.{hint}"
    if len(file.columns) == 1 and any(mark in file.columns[0] for mark in SEPARATORS):
        return InputError(f"{start} Its fields seem to be separated by another character: use `sep`.")
    return InputError(f"{start} It has {listing(file.columns)}.")


@dataclass(frozen=True)
class _Usage:
    """A file, which of its columns are used, and what happens to missing values and small groups."""

    file: TableFile
    roles: Roles
    inputs: list[str]
    drop_missing: bool
    missing_group: bool
    min_groups: int
    min_group_rows: int
    other: bool
    progress: Progress | None

    @property
    def path(self) -> str:
        """Of the file, in quotation marks."""
        return repr(str(self.file.path))

    @property
    def columns(self) -> list[str]:
        """All that is used, each once."""
        roles = self.roles
        return list(dict.fromkeys([*self.inputs, *roles.numeric, *roles.sensitive, *roles.control, *roles.named()]))

    def groups(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The sensitive columns, with a label for people who have none if they are to be a group."""
        groups = frame[list(self.roles.sensitive)]
        return groups.astype(object).where(groups.notna(), MISSING) if self.missing_group else groups

    def absent(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Which of the values that are needed are missing: (rows, used columns) booleans."""
        absent = frame[self.columns].isna()
        if self.missing_group:
            absent[list(set(self.roles.sensitive) - set(self.inputs))] = False
        return absent

    def read(
        self, wanted: Callable[[int], bool], texts: Sequence[str], *, strict: bool = False
    ) -> Iterator[tuple[int, pd.DataFrame]]:
        """Number and rows of every chunk that is wanted, saying how far it is."""
        tell = self.progress or (lambda done, size: None)
        tell(0, self.file.size)
        for chunk, frame, end in self.file.frames(wanted, self.columns, texts, strict=strict):
            yield chunk, frame
            tell(end, self.file.size)


# --- what a column holds: CSV does not say it, all chunks decide ---------------------------------------------------

_EMPTY, _NUMBER, _BOOLEAN, _OTHER = "empty", "number", "boolean", "other"


def _kinds(frame: pd.DataFrame) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and dtype of every column; of numbers the dtype tells, so that a wide table is read quickly."""
    types = pd.api.types
    empty: list[bool] = np.atleast_1d(frame.isna().to_numpy().all(axis=0)).tolist()
    for place, (name, dtype, nothing) in enumerate(zip(frame.columns, frame.dtypes.tolist(), empty, strict=True)):
        kind = _OTHER
        if types.is_bool_dtype(dtype):
            kind = _BOOLEAN
        elif nothing:
            kind = _EMPTY
        elif types.is_numeric_dtype(dtype):
            kind = _NUMBER
        elif types.is_object_dtype(dtype) and types.infer_dtype(frame.iloc[:, place], skipna=True) == "boolean":
            kind = _BOOLEAN
        yield str(name), kind, dtype


def _as_float(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    dtypes = {name: np.float64 for name in names if frame[name].dtype != np.float64}
    return frame.astype(dtypes) if dtypes else frame


def _numbers(column: "pd.Series[Any]", role: str, path: str) -> "pd.Series[float]":
    """A column as float64, with NaN for what is missing; if it is not numeric, an error that shows a value."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return pd.Series(column.to_numpy(np.float64, na_value=np.nan), index=column.index, name=column.name)
    if not column.notna().any():
        return pd.Series(np.nan, index=column.index, name=column.name)
    text = column.notna() & pd.to_numeric(column.astype(str), errors="coerce").isna()
    example = f", for example {quoted(str(column[text].iloc[0]))}" if text.any() else ""
    raise ValueError(
        f"column {quoted(str(column.name))} of {path}, the {role}, is not numeric{example}; esvdfair repairs "
        "regression, which predicts numbers."
    )


def _encode(groups: pd.DataFrame) -> tuple[tuple[Label, ...], NDArray[np.intp]]:
    """Labels and codes of sensitive columns; errors name the columns."""
    try:
        return encode_groups(groups)
    except ValueError as error:
        raise ValueError(str(error).replace("`sensitive_features`", _sensitive(list(groups)))) from None


def _sensitive(names: Iterable[Any]) -> str:
    return f"the sensitive column {', '.join(quoted(str(name)) for name in names)}"


# --- the scan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """What is known of a table after one pass.

    Attributes
    ----------
    sha256 : of the file
    total : rows of the file
    rows : those that are used
    dropped : rows left out because a value was missing
    labels : the groups that occur
    sizes : rows of each of them
    small : groups that had too few rows -> how many
    joined : the group that they became; None where they were left out
    firsts : for each chunk, the position in the file of its first row
    texts : columns that are text, though some chunks alone look like numbers
    floats : columns of whole numbers that are fractions, or missing, elsewhere
    head : the first row's inputs, in the types of the whole file
    """

    sha256: str
    total: int
    rows: int
    dropped: int
    labels: tuple[Label, ...]
    sizes: tuple[int, ...]
    small: dict[Label, int]
    joined: Label | None
    firsts: tuple[int, ...]
    texts: tuple[str, ...]
    floats: tuple[str, ...]
    head: pd.DataFrame


@dataclass
class _Seen:
    """What chunks contain.

    Attributes
    ----------
    types : column -> kinds and dtypes in which chunks were read
    rows, heads : of chunks, by their number
    incomplete : rows with a missing value
    missing, infinite : column -> values
    groups : values of the sensitive columns -> rows
    """

    types: dict[str, set[tuple[str, Any]]]
    rows: dict[int, int] = field(default_factory=dict)
    heads: dict[int, pd.DataFrame] = field(default_factory=dict)
    incomplete: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    infinite: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def add(self, chunk: int, frame: pd.DataFrame, usage: _Usage) -> None:
        self.rows[chunk] = len(frame)
        if not len(frame):  # nothing but the header
            return
        absent = usage.absent(frame)
        incomplete = absent.any(axis=1)
        self.incomplete += int(incomplete.sum())
        self.missing.update(dict(zip(map(str, absent), absent.to_numpy().sum(axis=0).tolist(), strict=True)))
        for column, kind, dtype in _kinds(frame):
            self.types[column].add((kind, dtype))
        for name, role in usage.roles.numeric.items():
            found = _numbers(frame[name], role, usage.path)  # fails at once: other chunks cannot make numbers of text
            if role == "weight" and (found < 0).any():
                raise ValueError(f"column {quoted(name)} of {usage.path}, the weight, holds negative values.")
        kept = frame if not incomplete.any() else frame[~incomplete]
        if len(kept):
            numbers = kept.select_dtypes("number")
            infinite = np.isinf(numbers.to_numpy(np.float64, na_value=np.nan)).sum(axis=0)
            self.infinite.update(dict(zip(map(str, numbers), infinite.tolist(), strict=True)))
            if len(self.groups) <= MAX_GROUPS:
                sizes = usage.groups(kept).astype(object).groupby(list(usage.roles.sensitive), sort=False).size()
                keys = sizes.index if len(usage.roles.sensitive) > 1 else ((key,) for key in sizes.index)
                self.groups.update(dict(zip(keys, sizes.tolist(), strict=True)))
            if not self.heads:
                self.heads[chunk] = kept[usage.inputs].iloc[:1]


def scan_table(usage: _Usage, *, keep: bool) -> tuple[Scan, dict[int, pd.DataFrame]]:
    """Read a table once, in bounded memory, and see whether it can be used.

    With ``keep`` all chunks are returned; else only the first.
    """
    file = usage.file
    file.cut()
    sha256 = file.sha256()
    texts: tuple[str, ...] = ()
    while True:
        seen, kept = _observe(usage, texts, keep)
        kinds = {name: {kind for kind, _ in types} - {_EMPTY} for name, types in seen.types.items()}
        mixed = tuple(name for name in kinds if len(kinds[name]) > 1 and name not in texts)
        if not mixed:
            return _settle(usage, seen, sha256, texts), kept
        texts += mixed  # a chunk alone looked like numbers: read all of them again, as what they are


def _observe(usage: _Usage, texts: Sequence[str], keep: bool) -> tuple[_Seen, dict[int, pd.DataFrame]]:
    seen = _Seen({name: set() for name in usage.columns})
    kept: dict[int, pd.DataFrame] = {}
    for chunk, frame in usage.read(lambda chunk: True, texts, strict=True):
        seen.add(chunk, frame, usage)
        if keep or not kept:
            kept[chunk] = frame
    return seen, kept


def _settle(usage: _Usage, seen: _Seen, sha256: str, texts: tuple[str, ...]) -> Scan:
    """What all chunks say together, or why the table cannot be used."""
    sizes = [rows for _, rows in sorted(seen.rows.items())]
    _check_values(usage, seen, sum(sizes))
    groups = _groups(usage, seen)
    small = {label: size for label, size in groups.items() if size < usage.min_group_rows}
    labels, joined = {label: size for label, size in groups.items() if label not in small}, None
    if usage.other and sum(small.values()) >= usage.min_group_rows:
        joined = OTHERS if len(usage.roles.sensitive) == 1 else (OTHERS,) * len(usage.roles.sensitive)
        labels[joined] = labels.get(joined, 0) + sum(small.values())
    if len(labels) < usage.min_groups:
        raise InputError(
            f"{usage.path} has {len(labels)} of {len(groups)} groups with `min_group_rows={usage.min_group_rows}` rows "
            "or more; parity needs two."
        )
    floats = []
    for name, types in seen.types.items():  # whole numbers in one chunk, fractions or missing in another
        kinds, dtypes = map(set, zip(*types, strict=True))
        floats += [name] * (len(dtypes) > 1 and _NUMBER in kinds and kinds <= {_EMPTY, _NUMBER})
    in_order = sorted(labels, key=sort_key)
    return Scan(
        sha256=sha256,
        total=sum(sizes),
        rows=sum(labels.values()),
        dropped=seen.incomplete,
        labels=tuple(in_order),
        sizes=tuple(labels[label] for label in in_order),
        small=small,
        joined=joined,
        firsts=tuple(accumulate([0, *sizes[:-1]])),
        texts=texts,
        floats=tuple(floats),
        head=_as_float(seen.heads[min(seen.heads)], set(floats) & set(usage.inputs)),
    )


def _check_values(usage: _Usage, seen: _Seen, total: int) -> None:
    """Fail where there are no rows, where values are missing that may not be dropped, or are infinite."""
    if not total:
        raise ValueError(f"{usage.path} has {len(usage.file.columns)} columns and no rows.")
    if seen.incomplete and not usage.drop_missing:
        listed = [f"{quoted(name)} {count}" for name, count in seen.missing.most_common() if count]
        own = any(seen.missing[name] for name in usage.roles.sensitive) and not usage.missing_group
        raise InputError(
            f"{usage.path} has missing values in {seen.incomplete:,} of {total:,} rows ({some_names(listed, SHOWN)}). "
            "`drop_missing` leaves those rows out"
            + ("; `missing_group` makes people without a group a group of their own." if own else ".")
        )
    if seen.incomplete == total:
        raise ValueError(f"all {total:,} rows of {usage.path} have a missing value; none is left.")
    for name in (*usage.inputs, *usage.roles.numeric):
        if seen.infinite[name]:
            raise ValueError(
                f"column {quoted(name)} of {usage.path} holds {seen.infinite[name]} infinite values; correct or remove "
                "those rows."
            )


def _groups(usage: _Usage, seen: _Seen) -> dict[Label, int]:
    """The groups and their sizes; fails on too few, and on a column that looks continuous."""
    names = usage.roles.sensitive
    labels, codes = _encode(pd.DataFrame(list(seen.groups), columns=list(names), dtype=object))
    if len(seen.groups) > MAX_GROUPS:
        raise ValueError(
            f"{_sensitive(names)} makes more than {MAX_GROUPS:,} groups; parity is between groups of many people. Join "
            "them into fewer."
        )
    if len(labels) > MAX_INTEGER_GROUPS and all(type(label) is int for label in labels):
        raise ValueError(
            f"{_sensitive(names)} takes {len(labels)} different whole numbers, so it looks continuous; bin it first, "
            "or write words for the numbers if these really are groups."
        )
    sizes = np.bincount(codes, weights=list(seen.groups.values())).astype(int).tolist()
    if len(labels) < usage.min_groups:
        raise ValueError(
            f"all {sizes[0]:,} rows of {usage.path} are of one group, {labels[0]!r} in {listing(names)}; parity needs "
            "two."
        )
    return dict(zip(labels, sizes, strict=True))


# --- rows and batches -----------------------------------------------------------------------------------------------


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
        self.path, self.roles, self.inputs = file.path, roles, _inputs(roles, file)
        if check_inputs is not None:
            check_inputs(self.inputs)
        self._batch_rows, self.part = batch_rows, part
        self._usage = _Usage(
            file, roles, self.inputs, drop_missing, missing_group, min_groups, min_group_rows, other, progress
        )
        self.scan, frames = scan_table(self._usage, keep=file.held_size <= HELD_BYTES)
        if self.scan.small:
            _warn_of_small(self.scan, self._usage)
        self._held = {chunk: self._complete(frame, self.scan.firsts[chunk]) for chunk, frame in frames.items()}

    def __iter__(self) -> Iterator[Batch]:
        for part in self._parts():
            labels, codes = _encode(part.groups)
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
                labels, codes = _encode(part.groups)
                key = row_key(part.groups.index.to_numpy(dtype=np.int64), seed + _SAMPLE)
                part = part.take(key < np.array([limit[label] for label in labels])[codes])
            parts.append(part)
        return _join(parts)

    def _parts(self) -> Iterator[TableRows]:
        """Yield the complete rows of each chunk; those held come first, and they are the first of the file."""
        starts = (*self.scan.firsts, self.scan.total)
        yield from (part for part in self._held.values() if len(part))
        left = set(range(len(starts) - 1)) - set(self._held)
        if not left:
            return
        for chunk, frame in self._usage.read(left.__contains__, self.scan.texts):
            if len(frame) != starts[chunk + 1] - starts[chunk]:
                raise ValueError(f"{self._usage.path} has changed since it was first read; start again.")
            part = self._complete(frame, starts[chunk])
            if len(part):
                yield part

    def _complete(self, frame: pd.DataFrame, first: int) -> TableRows:
        """The complete rows of a chunk, whose first row is the ``first`` of the file, in types of the whole file."""
        usage, roles = self._usage, self.roles
        frame = _as_float(frame, self.scan.floats).set_axis(pd.RangeIndex(first, first + len(frame)))
        if self.scan.dropped:
            frame = frame[~usage.absent(frame).any(axis=1)]
        groups = usage.groups(frame)
        if self.scan.small and len(frame):
            labels, codes = _encode(groups)
            small = np.array([label in self.scan.small for label in labels])[codes]
            if self.scan.joined is None:
                frame, groups = frame[~small], groups[~small]
            else:
                groups = groups.astype(object)
                groups.loc[small] = OTHERS
        found = {role: _numbers(frame[name], role, usage.path) for name, role in roles.numeric.items()}
        y, predictions, weight = (found.get(role) for role in ("target", "predictions", "weight"))
        control = frame[list(roles.control)] if roles.control else None
        ids = None if roles.row_id is None else frame[roles.row_id]
        return TableRows(frame[self.inputs], y, predictions, groups, weight, control, ids, self.scan)


def _warn_of_small(scan: Scan, usage: _Usage) -> None:
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
