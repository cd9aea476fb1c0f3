"""A CSV or Parquet file -> the rows that a repair needs: inputs, label, groups."""

import csv
import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from esvdfair.batches import MISSING, check_groups
from esvdfair.core.groups import Label

_CHUNK = 4 * 2**20  # bytes without a line end that no table has: every line of twice as many holds such a chunk
_SHOWN = 12  # names that an error lists
_LONGEST_NAME = 60


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are.

    Attributes
    ----------
    sensitive : the groups; several columns mean their combinations
    target : the label, if there is one
    predictions : predictions of a model that is not at hand; then no column is an input
    features : the model's inputs, in its order; None takes the remaining columns in file order
    """

    sensitive: tuple[str, ...]
    target: str | None = None
    predictions: str | None = None
    features: tuple[str, ...] | None = None

    def named(self) -> dict[str, str]:
        """Column -> what it is, of those that are no inputs."""
        single = {"target": self.target, "predictions": self.predictions}
        return dict.fromkeys(self.sensitive, "sensitive") | {c: role for role, c in single.items() if c is not None}

    def inputs(self, columns: Sequence[str]) -> list[str]:
        """Columns that the model takes."""
        if self.features is not None:
            return list(self.features)
        return [] if self.predictions is not None else [name for name in columns if name not in self.named()]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table, aligned by position, none with a missing value.

    Attributes
    ----------
    path : where they came from
    sha256 : of the file
    X : inputs of the model, of the types that they have in the file
    y : (rows,) labels or None
    predictions : (rows,) or None
    groups : the sensitive columns
    labels : the groups that occur, at least two
    dropped : rows left out because a value was missing
    """

    path: Path
    sha256: str
    roles: Roles
    X: pd.DataFrame
    y: "pd.Series[float] | None"
    predictions: "pd.Series[float] | None"
    groups: pd.DataFrame
    labels: tuple[Label, ...]
    dropped: int

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def attribute(self) -> str:
        """The sensitive columns, for people."""
        return ", ".join(self.roles.sensitive)

    @property
    def parts(self) -> "tuple[pd.DataFrame, pd.Series[float] | None, pd.DataFrame]":
        """Inputs, labels and groups, as ``validation=`` takes them."""
        return self.X, self.y, self.groups

    def take(self, keep: Any) -> "Rows":
        """The rows that a mask (rows,) keeps."""
        y, predictions = (None if c is None else c[keep] for c in (self.y, self.predictions))
        groups = self.groups[keep]
        return Rows(
            self.path, self.sha256, self.roles, self.X[keep], y, predictions, groups,
            _labels(groups, self.path), self.dropped,
        )  # fmt: skip


def read_table(path: str | os.PathLike[str]) -> tuple[pd.DataFrame, str]:
    """Read a CSV or Parquet file; the content decides which, not the name.

    Returns
    -------
    table : DataFrame
    sha256 : str
        Of the bytes that were read.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        The path leads to no file.
    ValueError
        The file is empty, of another kind, malformed, or has a name twice in its header.
    ImportError
        Parquet without pyarrow.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a directory; a CSV or Parquet file is needed.")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{str(path)!r} is empty; a table with a header and rows is needed.")
    try:
        table = _parquet(data) if data.startswith(b"PAR1") else _csv(data)
    except ImportError:
        raise ImportError(f"{str(path)!r} is Parquet, which needs pyarrow: pip install 'esvdfair[data]'.") from None
    except (ValueError, OSError, csv.Error, pd.errors.ParserWarning) as error:
        raise ValueError(f"{str(path)!r} cannot be read as a table: {_first_line(error)}") from None
    table.columns = table.columns.map(str)
    if table.empty:
        raise ValueError(f"{str(path)!r} has {len(table.columns)} columns and no rows.")
    return table.reset_index(drop=True), hashlib.sha256(data).hexdigest()


def read_rows(
    path: str | os.PathLike[str], roles: Roles, *, drop_missing: bool = False, missing_group: bool = False
) -> Rows:
    """Read a table and take the columns that the roles name.

    Parameters
    ----------
    path : CSV or Parquet
    roles : which column is what
    drop_missing : leave out rows in which a value of these columns is missing
    missing_group : people without a value of a sensitive column become the group "missing"

    Raises
    ------
    ValueError
        A column that is not there (the nearest name is suggested) or stands in two roles, a target or predictions that
        are not numbers, missing or infinite values, fewer than two groups; see also :func:`read_table`.
    """
    path = Path(path)
    table, sha256 = read_table(path)
    inputs = _check_roles(roles, table, path)
    y, predictions = (
        None if name is None else _numbers(table[name], role, path)
        for role, name in (("target", roles.target), ("predictions", roles.predictions))
    )
    groups = table[list(roles.sensitive)]
    if missing_group:
        groups = groups.astype(object).where(groups.notna(), MISSING)
    kept = _complete(table, groups, roles, inputs, path, drop_missing, missing_group)
    X, groups = table.loc[kept, inputs], groups[kept]
    y, predictions = (None if column is None else column[kept] for column in (y, predictions))
    for column in (*(X[name] for name in inputs), y, predictions):
        if column is not None:
            _check_finite(column, path)
    return Rows(path, sha256, roles, X, y, predictions, groups, _labels(groups, path), int((~kept).sum()))


def _parquet(data: bytes) -> pd.DataFrame:
    table: pd.DataFrame = pd.read_parquet(io.BytesIO(data))
    return table


def _csv(data: bytes) -> pd.DataFrame:
    if b"\0" in data[:_CHUNK]:
        raise ValueError("it is neither Parquet nor text in UTF-8.")
    for start in range(0, len(data) - _CHUNK + 1, _CHUNK):
        if all(data.find(end, start, start + _CHUNK) < 0 for end in (b"\n", b"\r")):
            line = data.count(b"\n", 0, start) + 1
            raise ValueError(f"line {line} is longer than {_CHUNK // 2**20} MB, as no line of a table is.")
    header = next(csv.reader(io.StringIO(data[: 2 * _CHUNK].decode("utf-8-sig", errors="replace"), newline=None)))
    twice = (
        sorted({name for name in header if name and header.count(name) > 1}) if len(set(header)) < len(header) else []
    )
    if twice:
        raise ValueError(f"its header has {_listing(twice)} more than once; give each column a name of its own.")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # more fields than the header names
        return pd.read_csv(io.BytesIO(data), low_memory=False, index_col=False)


def _first_line(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8."
    if isinstance(error, pd.errors.ParserWarning):
        return "a row has more fields than the header has names."
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix(
        "Error tokenizing data. C error: "
    )


def _check_roles(roles: Roles, table: pd.DataFrame, path: Path) -> list[str]:
    """The model's inputs; every column that has a role is there and has one role only."""
    if not roles.sensitive:
        raise ValueError("no sensitive column was named; parity is between the groups that it makes.")
    columns = list(table.columns)
    for name in (*roles.named(), *(roles.features or ())):
        if name not in columns:
            raise ValueError(_not_there(name, columns, path))
    others = {*roles.sensitive, *(roles.features or ())}
    for single, what in ((roles.target, "target"), (roles.predictions, "predictions")):
        if single is not None and single in others:
            raise ValueError(f"column {_short(single)} is the {what} and something else besides; give it one role.")
        others.add(single or "")
    inputs = roles.inputs(columns)
    repeated = [name for name in dict.fromkeys(inputs) if inputs.count(name) > 1] if roles.features else []
    if repeated or len(set(roles.sensitive)) < len(roles.sensitive):
        raise ValueError(f"a column is named twice: {_listing(repeated or roles.sensitive)}.")
    if not inputs and roles.predictions is None:
        raise ValueError(f"{str(path)!r} has no column left for the model's inputs beside {_listing(roles.named())}.")
    return inputs


def _not_there(name: str, columns: list[str], path: Path) -> str:
    lower = {column.lower(): column for column in columns}
    near = get_close_matches(name.lower()[:_LONGEST_NAME], list(lower), n=1, cutoff=0.6)
    hint = f" Did you mean {_short(lower[near[0]])}?" if near else ""
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        hint = " Its fields seem to be separated by something else than commas."
    return f"{str(path)!r} has no column {_short(name)}.{hint} It has {_listing(columns)}."


def _numbers(column: "pd.Series[Any]", role: str, path: Path) -> "pd.Series[float]":
    """A column as float64, with NaN for what is missing."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return pd.Series(column.to_numpy(np.float64, na_value=np.nan), index=column.index, name=column.name)
    text = pd.to_numeric(column.astype(str), errors="coerce").isna() & column.notna()
    example = f", for example {_short(str(column[text].iloc[0]))}" if text.any() else f" ({column.dtype})"
    raise ValueError(
        f"column {_short(str(column.name))} of {str(path)!r}, the {role}, is not numeric{example}; esvdfair repairs "
        "regression, which predicts numbers."
    )


def _complete(
    table: pd.DataFrame,
    groups: pd.DataFrame,
    roles: Roles,
    inputs: list[str],
    path: Path,
    drop_missing: bool,
    missing_group: bool,
) -> "pd.Series[bool]":
    """Which rows have all values; an error that counts the missing ones, unless they may be dropped."""
    others = [name for name in roles.named() if name not in roles.sensitive]
    absent = table[list(dict.fromkeys([*inputs, *others]))].isna()
    for name in roles.sensitive:
        absent[name] = groups[name].isna() | (table[name].isna() if name in inputs else False)
    incomplete = absent.any(axis=1)
    if incomplete.any() and not drop_missing:
        counts = absent.sum()
        counts = counts[counts > 0].sort_values(ascending=False, kind="stable")
        listed = ", ".join(f"{_short(str(name))} {count}" for name, count in counts.head(_SHOWN).items())
        more = f" and {len(counts) - _SHOWN} more columns" if len(counts) > _SHOWN else ""
        own = any(name in counts.index for name in roles.sensitive) and not missing_group
        raise ValueError(
            f"{str(path)!r} has missing values in {incomplete.sum():,} of {len(table):,} rows ({listed}{more}). "
            "--drop-missing leaves those rows out"
            + ("; --missing-group makes people without a group a group of their own." if own else ".")
        )
    if incomplete.all():
        raise ValueError(f"all {len(table):,} rows of {str(path)!r} have a missing value; none is left.")
    return ~incomplete


def _check_finite(column: "pd.Series[Any]", path: Path) -> None:
    if not pd.api.types.is_float_dtype(column):
        return
    infinite = int(np.isinf(column.to_numpy(np.float64)).sum())
    if infinite:
        raise ValueError(
            f"column {_short(str(column.name))} of {str(path)!r} holds {infinite} infinite values; correct or remove "
            "those rows."
        )


def _labels(groups: pd.DataFrame, path: Path) -> tuple[Label, ...]:
    """The groups that occur; fails on fewer than two, and on a column that looks continuous."""
    names = ", ".join(map(_short, groups.columns))
    try:
        labels, _ = check_groups(groups, len(groups), "error")
    except ValueError as error:
        raise ValueError(str(error).replace("sensitive_features", f"the sensitive column {names}")) from None
    if len(labels) < 2:
        raise ValueError(
            f"all {len(groups):,} rows of {str(path)!r} are of one group, {labels[0]!r} in {names}; parity needs two."
        )
    return labels


def _short(name: str) -> str:
    """A name from a file, in quotes, escaped, of bounded length."""
    return repr(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")


def _listing(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(_short, names[:_SHOWN])) + more
