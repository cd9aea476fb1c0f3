"""What one pass says of a table: the roles of its columns, the types of their values, its groups."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import MAX_INTEGER_GROUPS, MISSING, Label, encode_groups, sort_key
from esvdfair.exceptions import InputError
from esvdfair.tables.files import SEPARATORS, SHOWN, TableFile, listing
from esvdfair.text import quoted, some_names

MAX_GROUPS = 10_000
"""More combinations of sensitive values than this are not collected, nor accepted."""
OTHERS = "other"
"""Label of the group that small groups are joined to."""
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
    def singles(self) -> dict[str, str]:
        """What a single column is -> its name."""
        found = {"target": self.target, "predictions": self.predictions, "weight": self.weight, "row id": self.row_id}
        return {role: name for role, name in found.items() if name is not None}

    @property
    def numeric(self) -> dict[str, str]:
        """Columns that must hold numbers -> what they are."""
        return {name: role for role, name in self.singles.items() if role != "row id"}

    def named(self) -> dict[str, str]:
        """Column -> what it is, of those that are no inputs."""
        return dict.fromkeys(self.sensitive, "sensitive") | {name: role for role, name in self.singles.items()}


def model_inputs(roles: Roles, file: TableFile) -> list[str]:
    """The model's inputs; every column that has a role is there and has one role only."""
    if not roles.sensitive:
        raise ValueError("no sensitive column was named; parity is between the groups that it makes.")
    features, known, named = roles.features or (), set(file.columns), roles.named()
    for name in (*named, *roles.control, *features):
        if name not in known:
            raise _not_there(name, file)
    _check_roles(roles, features)
    if roles.features is None and roles.predictions is None:
        features = tuple(name for name in file.columns if name not in named)
    if not features and roles.predictions is None:
        beside = listing(list(named))
        raise ValueError(f"{str(file.path)!r} has no column left for the model's inputs beside {beside}.")
    return list(features)


def _check_roles(roles: Roles, features: Sequence[str]) -> None:
    """Fail where a column has two roles; strata may be inputs, and groups too where they are named."""
    for names in (features, roles.sensitive):
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"a column is named twice: {listing(repeated)}.")
    if twice := set(roles.control) & set(roles.named()):
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


@dataclass(frozen=True)
class Usage:
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


def as_float(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    dtypes = {name: np.float64 for name in names if frame[name].dtype != np.float64}
    return frame.astype(dtypes) if dtypes else frame


def as_numbers(column: "pd.Series[Any]", role: str, path: str) -> "pd.Series[float]":
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


def encode(groups: pd.DataFrame) -> tuple[tuple[Label, ...], NDArray[np.intp]]:
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
    inputs_read : whether all inputs were looked at
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
    inputs_read: bool = True


@dataclass
class _Chunks:
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

    def add(self, chunk: int, frame: pd.DataFrame, usage: Usage) -> None:
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
            found = as_numbers(frame[name], role, usage.path)  # fails at once: other chunks cannot make numbers of text
            if role == "weight" and (found < 0).any():
                raise ValueError(f"column {quoted(name)} of {usage.path}, the weight, holds negative values.")
        kept = frame if not incomplete.any() else frame[~incomplete]
        if len(kept):
            numbers = kept.select_dtypes("number")
            infinite = np.isinf(numbers.to_numpy(np.float64, na_value=np.nan)).sum(axis=0)
            self.infinite.update(dict(zip(map(str, numbers), infinite.tolist(), strict=True)))
            self._count_groups(usage.groups(kept))
            if not self.heads:
                self.heads[chunk] = kept[usage.inputs].iloc[:1]

    def _count_groups(self, groups: pd.DataFrame) -> None:
        if len(self.groups) <= MAX_GROUPS:
            sizes = groups.astype(object).groupby(list(groups), sort=False).size()
            keys = sizes.index if groups.shape[1] > 1 else ((key,) for key in sizes.index)
            self.groups.update(dict(zip(keys, sizes.tolist(), strict=True)))


def scan_table(usage: Usage, *, keep: bool, quick: bool = False) -> tuple[Scan, dict[int, pd.DataFrame]]:
    """Read a table once, in bounded memory, and see whether it can be used.

    With ``keep`` all chunks are returned; else only the first. A ``quick`` scan reads no inputs but those of the first
    chunk, where the file says that no value is missing; NaN is then found as rows are read.
    """
    file = usage.file
    file.cut()
    sha256 = file.sha256()
    if quick and not keep and not usage.drop_missing and file.is_complete(usage.inputs):
        seen, _ = _observe(replace(usage, inputs=[]), (), False)
        chunk, frame = next(usage.read(lambda chunk: True, ()))
        seen.heads = {chunk: frame[usage.inputs].iloc[:1].copy()}
        return replace(_settle(usage, seen, sha256, ()), inputs_read=False), {}
    texts: tuple[str, ...] = ()
    while True:
        seen, kept = _observe(usage, texts, keep)
        kinds = {name: {kind for kind, _ in types} - {_EMPTY} for name, types in seen.types.items()}
        mixed = tuple(name for name in kinds if len(kinds[name]) > 1 and name not in texts)
        if not mixed:
            return _settle(usage, seen, sha256, texts), kept
        texts += mixed  # a chunk alone looked like numbers: read all of them again, as what they are


def _observe(usage: Usage, texts: Sequence[str], keep: bool) -> tuple[_Chunks, dict[int, pd.DataFrame]]:
    seen = _Chunks({name: set() for name in usage.columns})
    kept: dict[int, pd.DataFrame] = {}
    for chunk, frame in usage.read(lambda chunk: True, texts, strict=True):
        seen.add(chunk, frame, usage)
        if keep or not kept:
            kept[chunk] = frame
    return seen, kept


def _settle(usage: Usage, seen: _Chunks, sha256: str, texts: tuple[str, ...]) -> Scan:
    """What all chunks say together, or why the table cannot be used."""
    sizes = [rows for _, rows in sorted(seen.rows.items())]
    _check_values(usage, seen, sum(sizes))
    groups = _sized_groups(usage, seen)
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
        head=as_float(seen.heads[min(seen.heads)], set(floats) & set(usage.inputs)),
    )


def _check_values(usage: Usage, seen: _Chunks, total: int) -> None:
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


def _sized_groups(usage: Usage, seen: _Chunks) -> dict[Label, int]:
    """The groups and their sizes; fails on too few, and on a column that looks continuous."""
    names = usage.roles.sensitive
    labels, codes = encode(pd.DataFrame(list(seen.groups), columns=list(names), dtype=object))
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
