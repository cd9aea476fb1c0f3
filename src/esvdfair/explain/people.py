"""Who is moved by a repair, how far, and whether people change places."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import Label, check_column
from esvdfair.core.ks import live_groups

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
    before, after : array-like of shape (rows,)
        Predictions of the original and of the repaired model for the same rows.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. One group is enough here.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row. Rows of weight 0 are left out.
    threshold : float, default=None
        Smallest change that counts. If None, a quarter of the standard deviation of ``before``.
    top : int, default=10
        How many of the people whose predictions change most to list.
    missing : {"error", "group"}, default="error"
        Whether a missing attribute value is an error or a group of its own.

    Returns
    -------
    People
        Changes by group, and the largest ones.

    Raises
    ------
    ValueError
        If lengths differ, values are missing or infinite, or ``threshold`` or ``top`` is negative.

    Examples
    --------
    >>> from esvdfair.explain import explain_people
    >>> people = explain_people([1, 2, 3], [2, 2, 1], sensitive_features=["a", "a", "b"], top=1)
    >>> people.movers[0].row, people.movers[0].change, people.movers[0].group
    (2, -2.0, 'b')
    """
    old = check_column(before, None, "before")
    new = check_column(after, len(old), "after", of="before")
    if not len(old):
        raise ValueError("before and after hold no predictions; pass those of at least one person.")
    if not top >= 0:
        raise ValueError(f"top={top!r}; it says how many people to list, so give 0 or more.")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold={threshold!r}; it is compared with how far a prediction moved; give 0 or more.")
    live, labels, groups = live_groups(sensitive_features, sample_weight, len(old), missing, of="before")
    old, new = old[live], new[live]
    share = np.full(len(old), 1 / len(old)) if groups.weight is None else groups.weight / groups.weight.sum()
    threshold = 0.25 * float(np.sqrt(share @ (old - share @ old) ** 2)) if threshold is None else threshold
    still = STILL * float(np.ptp(np.concatenate([old, new])))
    change, ranks = new - old, (mid_ranks(old, share), mid_ranks(new, share))
    distance, rank_change = np.abs(change), ranks[1] - ranks[0]
    columns = {
        "mean_before": old,
        "mean_after": new,
        "mean_change": change,
        "mean_absolute_change": distance,
        "share_up": change > still,
        "share_down": change < -still,
        "share_moved": distance > threshold,
        "mean_rank_change": rank_change,
    }
    means = {name: groups.means(column.astype(np.float64)).tolist() for name, column in columns.items()}
    changes = (
        GroupChange(
            labels[g],
            len(rows),
            rank_correlation=rank_correlation(old[rows], new[rows], share[rows]),
            **{name: of_groups[g] for name, of_groups in means.items()},
        )
        for g, rows in enumerate(groups.members)
    )
    movers = (
        Mover(int(live[i]), labels[groups.codes[i]], *(float(column[i]) for column in (old, new, change, *ranks)))
        for i in np.argsort(-distance, kind="stable")[:top]
        if distance[i] > still
    )
    return People(
        len(live),
        threshold=float(threshold),
        mean_absolute_change=float(share @ distance),
        share_moved=float(share @ (distance > threshold)),
        rank_correlation=rank_correlation(old, new, share),
        mean_absolute_rank_change=float(share @ np.abs(rank_change)),
        groups=tuple(changes),
        movers=tuple(movers),
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
    spread = np.cov(mid_ranks(x, weight), mid_ranks(y, weight), aweights=weight)
    return float(np.clip(spread[0, 1] / np.sqrt(spread[0, 0] * spread[1, 1]), -1.0, 1.0))
