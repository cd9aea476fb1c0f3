"""Rows of a table in memory: inputs, label, groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from esvdfair.core.checks import Label
from esvdfair.tables.columns import Usage, as_float, numbers
from esvdfair.tables.roles import Roles
from esvdfair.tables.scan import Scan, check_labels
from esvdfair.tables.words import one_group


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows, none with a missing value; the index of each column is the row's position in the file."""

    X: pd.DataFrame
    y: "pd.Series[float] | None"
    predictions: "pd.Series[float] | None"
    groups: pd.DataFrame

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, keep: Any) -> "Part":
        """The rows that a mask (rows,) keeps."""
        y, predictions = (None if column is None else column[keep] for column in (self.y, self.predictions))
        return Part(self.X[keep], y, predictions, self.groups[keep])


def make_part(frame: pd.DataFrame, usage: Usage, scan: Scan, first: int) -> Part:
    """The complete rows of a chunk, whose first row is the ``first`` of the file, in the types of the whole file."""
    frame = as_float(frame, scan.floats).set_axis(pd.RangeIndex(first, first + len(frame)))
    if scan.dropped:
        frame = frame[~usage.absent(frame).any(axis=1)]
    found = {role: numbers(frame[name], role, usage.path) for name, role in usage.numeric.items()}
    y, predictions = found.get("target"), found.get("predictions")
    return Part(frame[list(usage.inputs)], y, predictions, usage.groups(frame))


def join(parts: Sequence[Part]) -> Part:
    """Parts, one below the other."""
    if len(parts) == 1:
        return parts[0]
    y, predictions = (
        None if columns[0] is None else pd.concat(columns)
        for columns in ([part.y for part in parts], [part.predictions for part in parts])
    )
    return Part(pd.concat([p.X for p in parts]), y, predictions, pd.concat([p.groups for p in parts]))


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
    dropped : rows of the file left out because a value was missing
    available : rows of the file that could be used; these here may be a sample of them
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
    available: int

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
        """The rows that a mask (rows,) keeps.

        Raises
        ------
        ValueError
            They are of one group.
        """
        part = Part(self.X, self.y, self.predictions, self.groups).take(keep)
        labels, _ = check_labels(part.groups, self.roles.sensitive)
        if len(labels) < 2:
            raise ValueError(one_group(labels[0], len(part), self.roles.sensitive, self.path))
        return replace(self, X=part.X, y=part.y, predictions=part.predictions, groups=part.groups, labels=labels)
