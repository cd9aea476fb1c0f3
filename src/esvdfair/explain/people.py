"""Who is moved by a repair, how far, and whether people change places."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import Label, check_column, check_groups, check_weight, row_count

Array = NDArray[np.float64]

STILL = 1e-6
"""A change below this part of the range of the predictions is rounding, neither up nor down."""


@dataclass(frozen=True)
class Mover:
    """One person: predictions and ranks before and after. A rank is the part of all people below: 0.5 is the middle."""

    row: int
    group: Label
    before: float
    after: float
    change: float
    rank_before: float
    rank_after: float


@dataclass(frozen=True)
class GroupChange:
    """What a repair does to one group.

    Attributes
    ----------
    group, rows : label and number of people
    mean_before, mean_after, mean_change, mean_absolute_change : of the predictions
    share_up, share_down : part of the group whose prediction rises, or falls
    share_moved : part of the group moved by more than the threshold
    rank_correlation : Spearman's, within the group; 1 when nobody overtakes anybody, None when undefined
    mean_rank_change : mean change of rank among all people: 0.1 is ten percentiles up
    """

    group: Label
    rows: int
    mean_before: float
    mean_after: float
    mean_change: float
    mean_absolute_change: float
    share_up: float
    share_down: float
    share_moved: float
    rank_correlation: float | None
    mean_rank_change: float


@dataclass(frozen=True)
class People:
    """Who is moved by a repair.

    Attributes
    ----------
    rows : number of people with weight
    threshold : the amount that ``share_moved`` counts from
    mean_absolute_change, share_moved : over all people
    rank_correlation : Spearman's correlation of the predictions before and after; None when one of them is constant
    mean_absolute_rank_change : as a part of all people: 0.05 is five percentiles
    groups : tuple of GroupChange
    movers : tuple of Mover, the largest change first
    """

    rows: int
    threshold: float
    mean_absolute_change: float
    share_moved: float
    rank_correlation: float | None
    mean_absolute_rank_change: float
    groups: tuple[GroupChange, ...]
    movers: tuple[Mover, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row for each group."""
        return pd.DataFrame([asdict(group) for group in self.groups])

    def movers_to_frame(self) -> pd.DataFrame:
        """One row for each of the people who move most."""
        return pd.DataFrame([asdict(mover) for mover in self.movers], columns=list(Mover.__dataclass_fields__))


def explain_people(
    before: Any,
    after: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    threshold: float | None = None,
    top: int = 10,
    missing: str = "error",
) -> People:
    """Compare predictions before and after a repair, person by person.

    Parameters
    ----------
    before, after : (rows,) predictions for the same people
    sensitive_features : (rows,) group of each person, or several columns; one group is enough here
    sample_weight : (rows,) weight in every mean, share and rank; a person of weight 0 is left out
    threshold : what counts as moved; default a quarter of the standard deviation of ``before``
    top : how many of the people who move most to list
    missing : "error", or "group" for a group of those whose attribute is missing

    Raises
    ------
    ValueError
        Lengths that differ, missing or infinite values, a negative threshold or ``top``.

    Examples
    --------
    >>> people = explain_people([1, 2, 3], [2, 2, 1], sensitive_features=["a", "a", "b"], top=1)
    >>> people.movers[0].row, people.movers[0].change, people.movers[0].group
    (2, -2.0, 'b')
    """
    if row_count(before) != row_count(after):
        raise ValueError(
            f"before has {row_count(before)} predictions, after has {row_count(after)}; pass those of the same people."
        )
    old, new = (check_column(v, row_count(v), name) for v, name in ((before, "before"), (after, "after")))
    if not len(old):
        raise ValueError("before and after hold no predictions; pass those of at least one person.")
    if not top >= 0:
        raise ValueError(f"top={top!r}; it says how many people to list, so give 0 or more.")
    labels, codes = check_groups(sensitive_features, len(old), missing)
    weight = np.ones(len(old)) if sample_weight is None else check_weight(sample_weight, len(old))
    live = np.flatnonzero(weight > 0)
    moves = _Moves(old[live], new[live], weight[live])
    threshold = _checked_threshold(threshold, moves)
    share = moves.weight / moves.weight.sum()
    return People(
        rows=len(live),
        threshold=threshold,
        mean_absolute_change=float(share @ np.abs(moves.change)),
        share_moved=float(share @ (np.abs(moves.change) > threshold)),
        rank_correlation=rank_correlation(moves.old, moves.new, share),
        mean_absolute_rank_change=float(share @ np.abs(moves.ranks[1] - moves.ranks[0])),
        groups=tuple(
            moves.of_group(label, codes[live] == code, threshold)
            for code, label in enumerate(labels)
            if (codes[live] == code).any()
        ),
        movers=tuple(moves.of_person(i, int(live[i]), labels[codes[live[i]]]) for i in moves.farthest(top)),
    )


class _Moves:
    """Predictions of n people before and after: changes and ranks."""

    def __init__(self, old: Array, new: Array, weight: Array) -> None:
        self.old, self.new, self.weight = old, new, weight
        self.change = new - old
        self.ranks = mid_ranks(old, weight), mid_ranks(new, weight)
        self._still = STILL * float(np.ptp(np.concatenate([old, new])))

    def of_group(self, label: Label, mine: NDArray[np.bool_], threshold: float) -> GroupChange:
        old, new, change = self.old[mine], self.new[mine], self.change[mine]
        share = self.weight[mine] / self.weight[mine].sum()
        return GroupChange(
            group=label,
            rows=len(old),
            mean_before=float(share @ old),
            mean_after=float(share @ new),
            mean_change=float(share @ change),
            mean_absolute_change=float(share @ np.abs(change)),
            share_up=float(share @ (change > self._still)),
            share_down=float(share @ (change < -self._still)),
            share_moved=float(share @ (np.abs(change) > threshold)),
            rank_correlation=rank_correlation(old, new, share),
            mean_rank_change=float(share @ (self.ranks[1] - self.ranks[0])[mine]),
        )

    def farthest(self, top: int) -> list[int]:
        """Positions of those who move most, of equals the first; those who do not move are left out."""
        order = np.argsort(-np.abs(self.change), kind="stable")[:top]
        return [int(i) for i in order if abs(self.change[i]) > self._still]

    def of_person(self, i: int, row: int, group: Label) -> Mover:
        return Mover(
            row=row,
            group=group,
            before=float(self.old[i]),
            after=float(self.new[i]),
            change=float(self.change[i]),
            rank_before=float(self.ranks[0][i]),
            rank_after=float(self.ranks[1][i]),
        )


def mid_ranks(values: Array, weight: Array) -> Array:
    """(rows,) weight below each value plus half of that at it, as a part of all: (rank − ½)/n without weights."""
    _, inverse = np.unique(values, return_inverse=True)
    at = np.bincount(inverse, weights=weight)
    ranks: Array = ((np.cumsum(at) - at / 2) / at.sum())[inverse]
    return ranks


def rank_correlation(x: Array, y: Array, weight: Array) -> float | None:
    """Spearman's correlation, weighted; None when x or y is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    a, b = (ranks - np.average(ranks, weights=weight) for ranks in (mid_ranks(x, weight), mid_ranks(y, weight)))
    return float(np.clip((weight * a) @ b / np.sqrt(((weight * a) @ a) * ((weight * b) @ b)), -1.0, 1.0))


def _checked_threshold(threshold: float | None, moves: _Moves) -> float:
    if threshold is None:
        centred = moves.old - np.average(moves.old, weights=moves.weight)
        return 0.25 * float(np.sqrt(np.average(centred**2, weights=moves.weight)))
    if not threshold >= 0:
        raise ValueError(f"threshold={threshold!r}; it is compared with how far a prediction moved, so give 0 or more.")
    return float(threshold)
