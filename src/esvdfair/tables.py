"""A CSV or Parquet file of any size -> the rows that a repair needs: inputs, label, groups.

Long because it says what each column may be, scans the whole file for what does not fit, and reads it in batches.
"""

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from esvdfair.batches import ArrayBatches, Batch, Data, row_key
from esvdfair.core.checks import MISSING, Label, check_groups, encode_groups, label_text, sort_key
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.table_files import SEPARATORS, SHOWN, TableFile, listing, open_table
from esvdfair.text import quoted, some_names

__all__ = ["Progress", "Roles", "Scan", "TableBatches", "TableRows", "open_table"]

HELD_BYTES = 256 * 2**20
"""A file of no more than this is parsed once and its columns kept."""
RARE_ROWS = 1_000
"""Of a group so many rows are in a sample, if it has them, however rare it is."""
MAX_GROUPS = 10_000
"""More combinations of sensitive values than this are not collected, nor accepted."""
OTHERS = "other"
"""Label of the group that small groups are joined to."""
Progress = Callable[[int, int], None]
"""Told how many bytes of how many are read, again and again; starts anew with every pass."""
_SAMPLE = 7  # another hash than those of the split and of the rows that a repair keeps


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
    def singles(self) -> dict[str, str]:
        """What a single column is -> its name."""
        found = {"target": self.target, "predictions": self.predictions, "weight": self.weight, "row id": self.row_id}
        return {role: name for role, name in found.items() if name is not None}

    @property
    def numeric(self) -> dict[str, str]:
        """Columns that must hold numbers -> what they are."""
        return {name: role for role, name in self.singles.items() if role != "row id"}

    @property
    def named(self) -> dict[str, str]:
        """Column -> what it is, of those that are no inputs."""
        return dict.fromkeys(self.sensitive, "sensitive") | {name: role for role, name in self.singles.items()}


def model_inputs(roles: Roles, file: TableFile) -> list[str]:
    """The model's inputs; every column that has a role is there and has one role only."""
    if not roles.sensitive:
        raise ValueError("no sensitive column was named; parity is between the groups that it makes.")
    features, known = roles.features or (), set(file.columns)
    for name in (*roles.named, *roles.control, *features):
        if name not in known:
            raise _not_there(name, file)
    _check_roles(roles, features)
    if roles.predictions is not None:
        return list(features)
    inputs = features if roles.features is not None else [name for name in file.columns if name not in roles.named]
    if not inputs:
        raise ValueError(
            f"{str(file.path)!r} has no column left for the model's inputs beside {listing([*roles.named])}."
        )
    return list(inputs)


def _check_roles(roles: Roles, features: Sequence[str]) -> None:
    """Fail where a column has two roles; strata may be inputs, and groups too where they are named."""
    for names in (features, roles.sensitive):
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"a column is named twice: {listing(repeated)}.")
    if twice := roles.named.keys() & set(roles.control):
        raise InputError(f"`control_features`: column {quoted(min(twice))} has another role already.")
    others = {*roles.sensitive, *features}
    for role, name in roles.singles.items():
        if name in others:
            raise ValueError(f"column {quoted(name)} is the {role} and something else besides; give it one role.")
        others.add(name)


def _not_there(name: str, file: TableFile) -> InputError:
    """That a column is not there, which one may be meant, and which there are."""
    lower = {column.lower(): column for column in file.columns}
    near = get_close_matches(name.lower()[:60], list(lower), n=1, cutoff=0.6)
    hint = f" Did you mean {quoted(lower[near[0]])}?" if near else ""
    start = f"{str(file.path)!r} has no column {quoted(name)}.{hint}"
    if len(file.columns) == 1 and any(mark in file.columns[0] for mark in SEPARATORS):
        return InputError(f"{start} Its fields seem to be separated by another character: use `sep`.")
    return InputError(f"{start} It has {listing(file.columns)}.")


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of a table in memory, none with a missing value; their index is their place in the file."""

    X: pd.DataFrame  # inputs of the model, of the types that they have in the file
    y: "pd.Series[float] | None"
    predictions: "pd.Series[float] | None"
    groups: pd.DataFrame  # the sensitive columns
    weight: "pd.Series[float] | None"
    control: pd.DataFrame | None  # the columns that gaps are adjusted for
    ids: "pd.Series[Any] | None"  # what identifies each row, where a column does

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def beside(self) -> dict[str, Any]:
        """Groups and weights, as whatever takes predictions takes them."""
        return {"sensitive_features": self.groups, "sample_weight": self.weight}

    @property
    def compared(self) -> dict[str, Any]:
        """The same and the strata, where groups are compared."""
        return {**self.beside, "control_features": self.control}

    def take(self, keep: Any) -> "TableRows":
        """The rows that a mask (rows,) keeps."""
        return TableRows(*(None if column is None else column[keep] for column in vars(self).values()))  # type: ignore


class TableBatches:
    """Batches of the complete rows of a CSV or Parquet file, read piece by piece on every pass.

    ``ESVDFair(model).fit(TableBatches(…))`` repairs on a file of any size. A row's id is its position in the file, also
    where rows with missing values are left out, so that the held-out rows and all samples are the same rows however the
    file is cut.

    Parameters
    ----------
    path : CSV or Parquet, or a directory of Parquet files
    roles : which column is what
    drop_missing : leave out rows in which a value of these columns is missing
    missing_group : people without a value of a sensitive column become the group "missing"
    missing_inputs : rows without values of the model's inputs stay, unless they are dropped
    min_groups : fewest groups; 0 where the others, or all rows, are in other tables
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
    ValueError, FileNotFoundError, ImportError
        Columns that are not there or have two roles; values that are missing, infinite or not numeric; too few groups;
        see :func:`open_table`.

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
        missing_inputs: bool = False,
        min_groups: int = 2,
        min_group_rows: int = 1,
        other: bool = False,
        sep: str | None = None,
        part: int | str = 0,
        batch_rows: int = 8192,
        check_inputs: Callable[[Sequence[str]], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.file = open_table(path, sep=sep)
        self.path, self.roles, self.inputs = self.file.path, roles, model_inputs(roles, self.file)
        if check_inputs is not None:
            check_inputs(self.inputs)
        self.drop_missing, self.missing_group, self.part = drop_missing, missing_group, part
        self.missing_inputs = missing_inputs and not drop_missing
        self.min_groups, self.min_group_rows, self.other = min_groups, min_group_rows, other
        self._batch_rows, self._progress = batch_rows, progress
        self.scan, frames = scan_table(self)
        if small := self.scan.small:
            names = [f"{quoted(label_text(label))} {rows}" for label, rows in small.items()]
            done = "were left out" if self.scan.joined is None else f"became the group {quoted(OTHERS)}"
            warning = (
                f"{sum(small.values()):,} rows of {str(self.path)!r} {done}, as their groups have fewer than "
                f"{min_group_rows}: {some_names(names, SHOWN)}."
            )
            warnings.warn(ESVDFairWarning(warning), stacklevel=2)
        self._held = None if frames is None else list(self._complete(frames))

    @property
    def group_rows(self) -> dict[Label, int]:
        """Number of rows of every group; none where some may have no weight."""
        return {} if self.roles.weight else dict(zip(self.scan.labels, self.scan.sizes, strict=True))

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._pieces():
            data, of_file = Data(rows.X, rows.y, **rows.compared), rows.groups.index.to_numpy(dtype=np.int64)
            yield from ArrayBatches(
                data, row_id=rows.ids, part=self.part, positions=of_file, batch_size=self._batch_rows
            )

    def sample(self, most: int | None = None, *, seed: int = 0) -> TableRows:
        """Rows in memory: all of them, or about ``most``, chosen by a hash of their position in the file.

        Every row is as likely as any other, except that of each group about ``RARE_ROWS`` rows are taken, or all that
        it has. Reads the whole file.
        """
        scan = self.scan
        share = 1.0 if most is None or most >= scan.rows else most / scan.rows
        limit = {label: max(share, RARE_ROWS / size) for label, size in zip(scan.labels, scan.sizes, strict=True)}
        found = []
        for rows in self._pieces():
            if share < 1.0:
                labels, codes = encode_groups(rows.groups)
                key = row_key(rows.groups.index.to_numpy(dtype=np.int64), seed + _SAMPLE)
                rows = rows.take(key < np.array([limit[label] for label in labels])[codes])
            found.append(rows)
        if len(found) == 1:
            return found[0]
        columns = zip(*(vars(rows).values() for rows in found), strict=True)
        return TableRows(*(None if parts[0] is None else pd.concat(parts) for parts in columns))  # type: ignore

    def _pieces(self) -> Iterator[TableRows]:
        """Yield the complete rows, some at a time."""
        held = self._held
        return iter(self._complete(self.read(self.columns, self.scan.texts)) if held is None else held)

    def _complete(self, frames: Iterable[pd.DataFrame]) -> Iterator[TableRows]:
        """Yield the complete rows of frames of the whole file, in types of the whole file."""
        first = 0
        for frame in frames:
            rows = self._complete_rows(frame.set_axis(pd.RangeIndex(first, first + len(frame))))
            first += len(frame)
            if len(rows):
                yield rows
        if first != self.scan.total:
            raise ValueError(f"{str(self.path)!r} has changed since it was first read; start again.")

    def _complete_rows(self, frame: pd.DataFrame) -> TableRows:
        scan, roles = self.scan, self.roles
        frame = frame.astype(dict.fromkeys(scan.floats, np.float64)) if scan.floats else frame
        if scan.dropped:
            frame = frame[~self.absent(frame).any(axis=1)]
        groups = self.groups(frame)
        if scan.small and len(frame):
            labels, codes = encode_groups(groups)
            small = np.array([label in scan.small for label in labels])[codes]
            if scan.joined is None:
                frame, groups = frame[~small], groups[~small]
            else:
                groups = groups.astype(object)
                groups.loc[small] = OTHERS
        found = {role: as_numbers(frame[name], role, self.path) for name, role in roles.numeric.items()}
        y, predictions, weight = map(found.get, ("target", "predictions", "weight"))
        control = frame[list(roles.control)] if roles.control else None
        ids, x = None if roles.row_id is None else frame[roles.row_id], frame[self.inputs]
        if not scan.inputs_read and not np.isfinite(x.select_dtypes("float").to_numpy()).all():
            wrong = [name for name in self.inputs if not np.isfinite(x[name]).all()]
            advice = "correct those rows, or leave out those with NaN by `drop_missing`"
            raise InputError(f"{str(self.path)!r} has NaN or infinite values in {listing(wrong)}; {advice}.")
        return TableRows(x, y, predictions, groups, weight, control, ids)

    # --- the file ---

    @property
    def columns(self) -> list[str]:
        """All that is used, each once."""
        return list(dict.fromkeys([*self.inputs, *self.roles.numeric, *self.roles.named, *self.roles.control]))

    def read(self, columns: Sequence[str], texts: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the rows of the file, some at a time, saying how far it is."""
        tell = self._progress or (lambda done, size: None)
        tell(0, self.file.size)
        for frame, done in self.file.frames(columns, texts):
            yield frame
            tell(done, self.file.size)

    def groups(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The sensitive columns, with a label for people who have none if they are to be a group."""
        groups = frame[list(self.roles.sensitive)]
        return groups.astype(object).where(groups.notna(), MISSING) if self.missing_group else groups

    def absent(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Which of the values that are needed are missing: (rows, columns) booleans."""
        absent = frame.isna()
        if self.missing_group:
            absent[list(set(self.roles.sensitive) - set(self.inputs))] = False
        if self.missing_inputs:
            others = {*self.roles.numeric, *self.roles.named, *self.roles.control}
            absent[[name for name in self.inputs if name in absent and name not in others]] = False
        return absent


# --- the scan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """What one pass over a whole table finds."""

    sha256: str
    total: int  # rows of the file
    dropped: int  # those with a missing value
    labels: tuple[Label, ...]  # the groups that are used
    sizes: tuple[int, ...]  # and how many rows each has
    small: dict[Label, int]  # groups that have too few rows, and how many
    joined: Label | None  # the group that they became; None where they were left out
    head: pd.DataFrame  # the inputs of the first complete row, in the types of the whole file
    texts: Sequence[str]  # columns that are text, though some rows alone look like numbers
    floats: Sequence[str]  # columns of whole numbers that are fractions, or missing, elsewhere
    inputs_read: bool  # whether all inputs were looked at

    @property
    def rows(self) -> int:
        """Those that are used."""
        return sum(self.sizes)


def scan_table(table: TableBatches) -> tuple[Scan, list[pd.DataFrame] | None]:
    """Read a table once, in bounded memory, and see whether it can be used. The rows of a small file are returned.

    Of a large file that itself says that no input is missing, no inputs are read; NaN is then found as rows are read.
    """
    sha256, keep = table.file.sha256(), table.file.held_size <= HELD_BYTES
    quick = not (keep or table.drop_missing or table.missing_inputs) and table.file.is_complete(table.inputs)
    columns = list(dict.fromkeys([*table.roles.named, *table.roles.control])) if quick else table.columns
    counts, frames, texts = _count(table, columns, keep)
    counts.check()
    used, small, joined = _large_groups(table, counts.group_sizes())
    labels = tuple(sorted(used, key=sort_key))
    sizes = tuple(used[label] for label in labels)
    floats = [name for name, types in counts.types.items() if len(types) > 1 and counts.kinds(name) == {_NUMBERS}]
    head = next(table.read(table.columns, ())) if quick else counts.head
    head = head[table.inputs].iloc[:1].astype({name: np.float64 for name in floats if name in table.inputs})
    found = Scan(sha256, counts.rows, counts.incomplete, labels, sizes, small, joined, head, texts, floats, not quick)
    return found, frames if keep else None


def _count(table: TableBatches, columns: Sequence[str], keep: bool) -> tuple["_Counts", list[pd.DataFrame], list[str]]:
    """What all rows contain, the rows themselves where they are kept, and the columns that had to be read as text."""
    texts: list[str] = []
    while True:
        counts, frames = _Counts(table), []
        for frame in table.read(columns, texts):
            counts.add(frame)
            frames += [frame] if keep else []
        mixed = [name for name in counts.types if len(counts.kinds(name)) > 1 and name not in texts]
        if not mixed:
            return counts, frames, texts
        texts += mixed  # some rows alone looked like numbers: read all of them again, as what they are


def _large_groups(
    table: TableBatches, sizes: dict[Label, int]
) -> tuple[dict[Label, int], dict[Label, int], Label | None]:
    """Groups that are used, groups that are too small, and their rows; the group that these are joined to."""
    small = {label: size for label, size in sizes.items() if size < table.min_group_rows}
    used, joined = {label: size for label, size in sizes.items() if label not in small}, None
    if table.other and sum(small.values()) >= table.min_group_rows:
        joined = OTHERS if len(table.roles.sensitive) == 1 else (OTHERS,) * len(table.roles.sensitive)
        used[joined] = used.get(joined, 0) + sum(small.values())
    if len(used) < table.min_groups:
        raise InputError(
            f"{str(table.path)!r} has {len(used)} of {len(sizes)} groups with {table.min_group_rows} rows or "
            f"more (`min_group_rows={table.min_group_rows}`); parity needs two."
        )
    return used, small, joined


_NOTHING, _NUMBERS, _BOOLEANS, _OTHERS = "nothing", "numbers", "booleans", "others"


class _Counts:
    """What rows of a table contain: how many there are, types and missing or infinite values of columns, groups."""

    def __init__(self, table: TableBatches) -> None:
        self.table, self.rows, self.incomplete, self.head = table, 0, 0, pd.DataFrame(columns=table.columns)
        self.types: defaultdict[Any, set[tuple[str, Any]]] = defaultdict(set)
        self.missing: Counter[Any] = Counter()
        self.infinite: Counter[Any] = Counter()
        self.groups: Counter[Any] = Counter()

    def kinds(self, name: str) -> set[str]:
        """What a column holds, but for nothing."""
        return {kind for kind, _ in self.types[name]} - {_NOTHING}

    def add(self, frame: pd.DataFrame) -> None:
        """Count some rows; fail at once where other rows could not make them right."""
        if not len(frame):  # nothing but the header
            return
        self.rows += len(frame)
        absent = self.table.absent(frame)
        incomplete = absent.any(axis=1)
        self.incomplete += int(incomplete.sum())
        self.missing.update(absent.sum().to_dict())
        for name in frame:
            self.types[name].add((_kind_of(frame[name]), frame[name].dtype))
        for name, role in self.table.roles.numeric.items():
            if (as_numbers(frame[name], role, self.table.path) < 0).any() and role == "weight":
                raise ValueError(
                    f"column {quoted(name)} of {str(self.table.path)!r}, the weight, holds negative values."
                )
        frame = frame[~incomplete] if incomplete.any() else frame
        if len(frame):
            numbers = frame.select_dtypes("number")
            infinite = np.isinf(numbers.to_numpy(np.float64, na_value=np.nan)).sum(axis=0).tolist()
            self.infinite.update(dict(zip(numbers, infinite, strict=True)))
            if len(self.groups) <= MAX_GROUPS:
                self.groups.update(self.table.groups(frame).astype(object).value_counts(sort=False).to_dict())
            self.head = self.head if len(self.head) else frame.iloc[:1].copy()

    def check(self) -> None:
        """Fail where there are no rows, where values are missing that may not be dropped, or are infinite."""
        table, path = self.table, repr(str(self.table.path))
        if not self.rows and table.min_groups:
            raise ValueError(f"{path} has {len(table.file.columns)} columns and no rows.")
        if self.incomplete and not table.drop_missing:
            listed = [f"{quoted(name)} {count}" for name, count in self.missing.most_common() if count]
            own = any(self.missing[name] for name in table.roles.sensitive) and not table.missing_group
            raise InputError(
                f"{path} has missing values in {self.incomplete:,} of {self.rows:,} rows "
                f"({some_names(listed, SHOWN)}). `drop_missing` leaves those rows out"
                + ("; `missing_group` makes people without a group a group of their own." if own else ".")
            )
        if self.incomplete == self.rows and table.min_groups:
            raise ValueError(f"all {self.rows:,} rows of {path} have a missing value; none is left.")
        for name, count in self.infinite.items():
            if count and (name in table.inputs or name in table.roles.numeric):
                raise ValueError(
                    f"column {quoted(name)} of {path} holds {count} infinite values; correct or remove those rows."
                )

    def group_sizes(self) -> dict[Label, int]:
        """The groups and their rows; fails on too few, and on a column that looks continuous."""
        names = list(self.table.roles.sensitive)
        column = f"the sensitive column {', '.join(map(quoted, names))}"
        try:
            labels, codes = check_groups(pd.DataFrame(list(self.groups), columns=names, dtype=object), None)
        except ValueError as error:
            raise ValueError(str(error).replace("`sensitive_features`", column)) from None
        if len(self.groups) > MAX_GROUPS:
            raise ValueError(
                f"{column} makes more than {MAX_GROUPS:,} groups; parity is between groups of many people. Join them "
                "into fewer."
            )
        sizes = np.bincount(codes, weights=list(self.groups.values())).astype(int).tolist()
        if len(labels) < self.table.min_groups:
            raise ValueError(
                f"all {sizes[0]:,} rows of {str(self.table.path)!r} are of one group, {labels[0]!r} in "
                f"{listing(names)}; parity needs two."
            )
        return dict(zip(labels, sizes, strict=True))


def _kind_of(column: "pd.Series[Any]") -> str:
    """What a column holds: CSV does not say it, all rows decide."""
    if column.isna().all():
        return _NOTHING
    kind = pd.api.types.infer_dtype(column, skipna=True)
    return {"integer": _NUMBERS, "floating": _NUMBERS, "boolean": _BOOLEANS}.get(kind, _OTHERS)


def as_numbers(column: "pd.Series[Any]", role: str, path: Path) -> "pd.Series[float]":
    """A column as float64, with NaN for what is missing; if it is not numeric, an error that shows a value."""
    if column.dtype == np.float64:
        return column
    numeric = pd.api.types.is_numeric_dtype(column)
    numbers = pd.to_numeric(column if numeric else column.astype(str), errors="coerce").astype(np.float64)
    text = numbers.isna() & column.notna()
    if text.any():
        raise ValueError(
            f"column {quoted(str(column.name))} of {str(path)!r}, the {role}, is not numeric, for example "
            f"{quoted(str(column[text].iloc[0]))}; esvdfair repairs regression, which predicts numbers."
        )
    return numbers
