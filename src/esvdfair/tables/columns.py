"""What the columns of some rows hold: missing values, infinite ones, numbers or text."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from esvdfair.core.checks import MISSING
from esvdfair.tables.roles import Roles
from esvdfair.tables.words import short

EMPTY, NUMBER, BOOLEAN, OTHER = "empty", "number", "boolean", "other"


@dataclass(frozen=True)
class Usage:
    """Which columns are used, and what happens to missing values.

    Attributes
    ----------
    roles : which column is what
    inputs : columns that the model takes, in its order
    missing_group : people without a value of a sensitive column become the group "missing"
    min_groups : with fewer groups the table is refused
    """

    path: Path
    roles: Roles
    inputs: tuple[str, ...]
    drop_missing: bool
    missing_group: bool
    min_groups: int = 2

    @property
    def columns(self) -> list[str]:
        """All that is used, each once."""
        return list(dict.fromkeys([*self.inputs, *self.numeric, *self.roles.sensitive]))

    @property
    def numeric(self) -> dict[str, str]:
        """Columns that must hold numbers -> what they are."""
        singles = {"target": self.roles.target, "predictions": self.roles.predictions}
        return {name: role for role, name in singles.items() if name is not None}

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


@dataclass
class Types:
    """Types that a column was read in, chunk by chunk.

    A CSV file does not say what a column holds; each chunk tells by its own values, and together they decide.
    """

    kinds: set[str] = field(default_factory=set)
    dtypes: set[Any] = field(default_factory=set)

    def add(self, column: "pd.Series[Any]") -> None:
        self.kinds.add(_kind(column))
        self.dtypes.add(column.dtype)

    def merge(self, other: "Types") -> None:
        self.kinds |= other.kinds
        self.dtypes |= other.dtypes

    @property
    def is_mixed(self) -> bool:
        """Whether chunks disagree, so that all of them have to be read as text."""
        return len(self.kinds - {EMPTY}) > 1

    @property
    def is_float(self) -> bool:
        """Whether whole numbers in one chunk are fractions, or missing, in another."""
        return len(self.dtypes) > 1 and self.kinds <= {EMPTY, NUMBER} and NUMBER in self.kinds


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
    raise ValueError(not_numeric(str(column.name), role, path, text_in(column)))


def text_in(column: "pd.Series[Any]") -> str | None:
    """A value of a column that is no number, if there is one."""
    if pd.api.types.is_numeric_dtype(column):
        return None
    text = column.notna() & pd.to_numeric(column.astype(str), errors="coerce").isna()
    return str(column[text].iloc[0]) if text.any() else None


def not_numeric(name: str, role: str, path: Path, example: str | None) -> str:
    """That a column is not numeric, with a value that shows it."""
    shown = "" if example is None else f", for example {short(example)}"
    return (
        f"column {short(name)} of {str(path)!r}, the {role}, is not numeric{shown}; esvdfair repairs regression, which "
        "predicts numbers."
    )


def count_infinite(column: "pd.Series[Any]") -> int:
    """How many values are infinite; 0 where there can be none."""
    if not pd.api.types.is_float_dtype(column.dtype):
        return 0
    return int(np.isinf(column.to_numpy(np.float64, na_value=np.nan)).sum())
