"""What a table holds: the roles of its columns, and one pass that says whether its rows can be used."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import MAX_INTEGER_GROUPS, MISSING, Label, encode_groups, sort_key
from esvdfair.distributed import all_gather, rank, reading, together, world_size
from esvdfair.exceptions import Given, InputError
from esvdfair.files import sha256_of
from esvdfair.tables.files import SEPARATORS, SHOWN, TableFile, listing
from esvdfair.text import quoted, some_names

Codes = NDArray[np.intp]

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
    """

    sensitive: tuple[str, ...]
    target: str | None = None
    predictions: str | None = None
    features: tuple[str, ...] | None = None
    weight: str | None = None
    control: tuple[str, ...] = ()

    @property
    def numeric(self) -> dict[str, str]:
        """Columns that must hold numbers -> what they are."""
        singles = {"target": self.target, "predictions": self.predictions, "weight": self.weight}
        return {name: role for role, name in singles.items() if name is not None}

    def named(self) -> dict[str, str]:
        """Column -> what it is, of those that are no inputs."""
        return dict.fromkeys(self.sensitive, "sensitive") | self.numeric

    def inputs(self, columns: Sequence[str]) -> list[str]:
        """Columns that the model takes."""
        if self.features is not None:
            return list(self.features)
        return [] if self.predictions is not None else [name for name in columns if name not in self.named()]


def check_roles(roles: Roles, table: TableFile) -> tuple[str, ...]:
    """The model's inputs; every column that has a role is there and has one role only."""
    if not roles.sensitive:
        raise ValueError("no sensitive column was named; parity is between the groups that it makes.")
    for name in (*roles.named(), *roles.control, *(roles.features or ())):
        if name not in table.columns:
            raise _not_there(name, table.columns, table.path)
    if twice := set(roles.control) & set(roles.named()):
        raise InputError(
            "{control_features}: column {name} has another role already; gaps cannot be adjusted for it.",
            control_features=Given(), name=quoted(min(twice)),
        )  # fmt: skip
    others = {*roles.sensitive, *(roles.features or ())}
    for what, single in (("target", roles.target), ("predictions", roles.predictions), ("weight", roles.weight)):
        if single is not None and single in others:
            raise ValueError(f"column {quoted(single)} is the {what} and something else besides; give it one role.")
        others.add(single or "")
    inputs = roles.inputs(table.columns)
    repeated = [name for name in dict.fromkeys(inputs) if inputs.count(name) > 1] if roles.features else []
    if repeated or len(set(roles.sensitive)) < len(roles.sensitive):
        raise ValueError(f"a column is named twice: {listing(repeated or roles.sensitive)}.")
    if not inputs and roles.predictions is None:
        beside = listing(list(roles.named()))
        raise ValueError(f"{str(table.path)!r} has no column left for the model's inputs beside {beside}.")
    return tuple(inputs)


def _not_there(name: str, columns: Sequence[str], path: Path) -> InputError:
    """That a column is not there, which one may be meant, and which there are."""
    lower = {column.lower(): column for column in columns}
    near = get_close_matches(name.lower()[:60], list(lower), n=1, cutoff=0.6)
    hint = f" Did you mean {quoted(lower[near[0]])}?" if near else ""
    said = {"start": f"{str(path)!r} has no column {quoted(name)}.{hint}", "there": listing(columns)}
    if len(columns) == 1 and any(mark in columns[0] for mark in SEPARATORS):
        return InputError("{start} Its fields seem to be separated by another mark: {sep}.", said, sep=Given())
    return InputError("{start} It has {there}.", said)


@dataclass(frozen=True)
class Usage:
    """Which columns are used, and what happens to missing values.

    Attributes
    ----------
    roles : which column is what
    inputs : columns that the model takes, in its order
    missing_group : people without a value of a sensitive column become the group "missing"
    min_groups : with fewer groups the table is refused
    min_group_rows : smaller groups are left out
    other : or joined to one group, "other"
    """

    path: Path
    roles: Roles
    inputs: tuple[str, ...]
    drop_missing: bool
    missing_group: bool
    min_groups: int = 2
    min_group_rows: int = 1
    other: bool = False

    @property
    def columns(self) -> list[str]:
        """All that is used, each once."""
        return list(dict.fromkeys([*self.inputs, *self.roles.numeric, *self.roles.sensitive, *self.roles.control]))

    def groups(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The sensitive columns, with a label for people who have none if they are to be a group."""
        groups = frame[list(self.roles.sensitive)]
        return groups.astype(object).where(groups.notna(), MISSING) if self.missing_group else groups

    def absent(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Which of the values that are needed are missing: (rows, used columns) booleans."""
        absent = frame[self.columns].isna()
        if self.missing_group:
            for name in set(self.roles.sensitive) - set(self.inputs):
                absent[name] = False
        return absent


# --- what a column holds -------------------------------------------------------------------------------------------

EMPTY, NUMBER, BOOLEAN, OTHER = "empty", "number", "boolean", "other"
Types = set[tuple[str, Any]]
"""Kinds and dtypes that a column was read in, chunk by chunk: CSV does not say what a column holds, all chunks decide.
"""


def _is_float(types: Types) -> bool:
    """Whether whole numbers in one chunk are fractions, or missing, in another."""
    kinds, dtypes = map(set, zip(*types, strict=True))
    return len(dtypes) > 1 and NUMBER in kinds and kinds <= {EMPTY, NUMBER}


def _kind(column: "pd.Series[Any]") -> str:
    if pd.api.types.is_bool_dtype(column.dtype):
        return BOOLEAN
    if not column.notna().any():
        return EMPTY
    if pd.api.types.is_numeric_dtype(column.dtype):
        return NUMBER
    is_boolean = column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "boolean"
    return BOOLEAN if is_boolean else OTHER


def as_float(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """The frame with float64 in some columns."""
    dtypes = {name: np.float64 for name in names if frame[name].dtype != np.float64}
    return frame.astype(dtypes) if dtypes else frame


def numbers(column: "pd.Series[Any]", role: str, path: Path) -> "pd.Series[float]":
    """A column as float64, with NaN for what is missing.

    Raises
    ------
    ValueError
        It is not numeric; the error shows a value.
    """
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return pd.Series(column.to_numpy(np.float64, na_value=np.nan), index=column.index, name=column.name)
    if not column.notna().any():
        return pd.Series(np.nan, index=column.index, name=column.name)
    text = column.notna() & pd.to_numeric(column.astype(str), errors="coerce").isna()
    example = f", for example {quoted(str(column[text].iloc[0]))}" if text.any() else ""
    raise ValueError(
        f"column {quoted(str(column.name))} of {str(path)!r}, the {role}, is not numeric{example}; esvdfair repairs "
        "regression, which predicts numbers."
    )


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
    """What chunks say; sums of it say what all of them say."""

    types: dict[str, Types]
    rows: dict[int, int] = field(default_factory=dict)
    incomplete: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    infinite: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    heads: dict[int, pd.DataFrame] = field(default_factory=dict)

    def add(self, chunk: int, frame: pd.DataFrame, usage: Usage) -> None:
        self.rows[chunk] = len(frame)
        if not len(frame):  # nothing but the header
            return
        absent = usage.absent(frame)
        incomplete = absent.any(axis=1)
        self.incomplete += int(incomplete.sum())
        self.missing.update({str(name): int(count) for name, count in absent.sum().items()})
        for name, column in frame.items():
            self.types[str(name)].add((_kind(column), column.dtype))
        for name, role in usage.roles.numeric.items():
            found = numbers(frame[name], role, usage.path)  # fails at once: other chunks cannot make numbers of text
            if role == "weight" and (found < 0).any():
                raise ValueError(f"column {quoted(name)} of {str(usage.path)!r}, the weight, holds negative values.")
        kept = frame if not incomplete.any() else frame[~incomplete]
        if len(kept):
            infinite = np.isinf(kept.select_dtypes("number").astype(np.float64)).sum()
            self.infinite.update({str(name): int(count) for name, count in infinite.items()})
            self._add_groups(usage.groups(kept).astype(object))
            if not self.heads:
                self.heads[chunk] = kept[list(usage.inputs)].iloc[:1]

    def _add_groups(self, groups: pd.DataFrame) -> None:
        if len(self.groups) <= MAX_GROUPS:
            sizes = groups.groupby(list(groups.columns), sort=False).size()
            keys = sizes.index if groups.shape[1] > 1 else ((key,) for key in sizes.index)
            self.groups.update(dict(zip(keys, sizes.tolist(), strict=True)))

    def merge(self, other: "_Seen") -> None:
        self.rows |= other.rows
        self.heads |= other.heads
        self.incomplete += other.incomplete
        self.missing.update(other.missing)
        self.infinite.update(other.infinite)
        self.groups.update(other.groups)
        for name, types in other.types.items():
            self.types[name] |= types


def scan_table(
    table: TableFile, usage: Usage, *, progress: Progress | None = None, keep: bool = False
) -> tuple[Scan, dict[int, pd.DataFrame]]:
    """Read a table once, in bounded memory, and see whether it can be used.

    The ranks of a process group share the chunks and then tell each other what they have seen.

    Parameters
    ----------
    keep : give back all chunks of this rank; else only the first, which whoever looks at a few rows reads again

    Raises
    ------
    ValueError
        A malformed file, a target or predictions that are not numbers, missing values (counted) unless they may be
        dropped, infinite values, too few groups.
    """
    with together():
        table.cut(world_size())
        sha256 = sha256_of(table.path if table.path.is_file() else table.place)
        if len(set(all_gather(sha256))) > 1:
            raise ValueError(f"the ranks read different files under the name {str(table.path)!r}.")
        texts: tuple[str, ...] = ()
        while True:
            seen, kept = _observe(table, usage, texts, progress, keep)
            kinds = {name: {kind for kind, _ in types} - {EMPTY} for name, types in seen.types.items()}
            mixed = tuple(name for name in kinds if len(kinds[name]) > 1 and name not in texts)
            if not mixed:
                break
            texts += mixed  # a chunk alone looked like numbers: read all of them again, as what they are
        return _settle(table, usage, seen, sha256, texts), kept


def is_own(chunk: int) -> bool:
    """Whether a chunk is this rank's: every so many-th."""
    return chunk % world_size() == rank()


def read_chunks(
    table: TableFile,
    wanted: Callable[[int], bool],
    columns: Sequence[str],
    texts: Sequence[str],
    progress: Progress | None,
    *,
    strict: bool = False,
) -> Iterator[tuple[int, pd.DataFrame]]:
    """Number and rows of every chunk that is wanted, saying how far it is."""
    if progress is not None:
        progress(0, table.size)
    for chunk, frame, end in table.frames(wanted, columns, texts, strict=strict):
        yield chunk, frame
        if progress is not None:
            progress(end, table.size)


def _observe(
    table: TableFile, usage: Usage, texts: Sequence[str], progress: Progress | None, keep: bool
) -> tuple[_Seen, dict[int, pd.DataFrame]]:
    seen = _Seen({name: set() for name in usage.columns})
    kept: dict[int, pd.DataFrame] = {}
    with reading() as listen:
        for chunk, frame in read_chunks(table, is_own, usage.columns, texts, progress, strict=True):
            seen.add(chunk, frame, usage)
            if keep or not kept:
                kept[chunk] = frame
            listen()
    first, *others = all_gather(seen)
    for other in others:
        first.merge(other)
    return first, kept


def _settle(table: TableFile, usage: Usage, seen: _Seen, sha256: str, texts: tuple[str, ...]) -> Scan:
    """What all chunks say together, or why the table cannot be used."""
    sizes = [rows for _, rows in sorted(seen.rows.items())]
    total = sum(sizes)
    if not total:
        raise ValueError(f"{str(table.path)!r} has {len(table.columns)} columns and no rows.")
    _check_complete(usage, seen, total)
    _check_finite(usage, seen)
    groups = _groups(usage, seen)
    small = {label: size for label, size in groups.items() if size < usage.min_group_rows}
    labels, joined = {label: size for label, size in groups.items() if label not in small}, None
    if usage.other and sum(small.values()) >= usage.min_group_rows:
        joined = OTHERS if len(usage.roles.sensitive) == 1 else (OTHERS,) * len(usage.roles.sensitive)
        labels[joined] = labels.get(joined, 0) + sum(small.values())
    if len(labels) < usage.min_groups:
        raise InputError(
            "{path!r} has {count} of {all} groups with {min_group_rows} rows or more; parity needs two.",
            path=str(usage.path), count=len(labels), all=len(groups), min_group_rows=Given(usage.min_group_rows),
        )  # fmt: skip
    floats = tuple(name for name, types in seen.types.items() if _is_float(types))
    return Scan(
        sha256=sha256,
        total=total,
        rows=sum(labels.values()),
        dropped=seen.incomplete,
        labels=tuple(sorted(labels, key=sort_key)),
        sizes=tuple(labels[label] for label in sorted(labels, key=sort_key)),
        small=small,
        joined=joined,
        firsts=tuple(accumulate([0, *sizes[:-1]])),
        texts=texts,
        floats=floats,
        head=as_float(seen.heads[min(seen.heads)], [name for name in floats if name in usage.inputs]),
    )


def _check_complete(usage: Usage, seen: _Seen, total: int) -> None:
    """An error that counts the missing values, unless they may be dropped."""
    if seen.incomplete and not usage.drop_missing:
        found = {name: count for name, count in seen.missing.items() if count}
        counts = sorted(found.items(), key=lambda item: -item[1])
        listed = some_names([f"{quoted(name)} {count}" for name, count in counts], SHOWN)
        own = any(name in found for name in usage.roles.sensitive) and not usage.missing_group
        raise InputError(
            "{path!r} has missing values in {rows:,} of {total:,} rows ({listed}). {drop_missing} leaves those rows out"
            + ("; {missing_group} makes people without a group a group of their own." if own else "."),
            path=str(usage.path), rows=seen.incomplete, total=total, listed=listed, drop_missing=Given(),
            missing_group=Given(),
        )  # fmt: skip
    if seen.incomplete == total:
        raise ValueError(f"all {total:,} rows of {str(usage.path)!r} have a missing value; none is left.")


def _check_finite(usage: Usage, seen: _Seen) -> None:
    for name in (*usage.inputs, *usage.roles.numeric):
        if seen.infinite[name]:
            raise ValueError(
                f"column {quoted(name)} of {str(usage.path)!r} holds {seen.infinite[name]} infinite values; correct or "
                "remove those rows."
            )


def _groups(usage: Usage, seen: _Seen) -> dict[Label, int]:
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
    sizes = [0] * len(labels)
    for code, count in zip(codes, seen.groups.values(), strict=True):
        sizes[code] += count
    if len(labels) < usage.min_groups:
        raise ValueError(
            f"all {sizes[0]:,} rows of {str(usage.path)!r} are of one group, {labels[0]!r} in {listing(names)}; parity "
            "needs two."
        )
    return dict(zip(labels, sizes, strict=True))


def encode(groups: pd.DataFrame) -> tuple[tuple[Label, ...], Codes]:
    """Labels and codes of sensitive columns; errors name the columns."""
    try:
        return encode_groups(groups)
    except ValueError as error:
        raise ValueError(str(error).replace("sensitive_features", _sensitive([str(name) for name in groups]))) from None


def _sensitive(names: Sequence[str]) -> str:
    return f"the sensitive column {', '.join(map(quoted, names))}"
