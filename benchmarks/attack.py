"""What somebody who holds a moments file can read of single people: the attack that `federated/guard.py` is to stop.

Whoever stands alone in a column is read by `guard.read_alone`, one after the other. A column that has one value for all
but one person, or one large value among small ones, does not show itself, but guesses for each column are cheap, and a
guess can be checked by whoever knows a little about the people. The guesses here are judged against the rows
themselves, which is more than an attacker can do. Moments of several groups are attacked one by one and together, the
groups being columns then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label
from esvdfair.core.moments import GroupMoments
from esvdfair.federated.guard import read_alone

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """Rows read from the moments of one group: ``certain`` (k, n) show themselves, ``guesses`` (m, n) may be wrong."""

    certain: Array
    guesses: Array

    def among(self, rows: Array) -> NDArray[np.intp]:
        """Which of the true rows (N, n) were read: the distance is below 0.001 standard deviations of the columns."""
        spread = rows.std(axis=0)
        rows, read = (
            part[:, spread > 0] / spread[spread > 0] for part in (rows, np.vstack([self.certain, self.guesses]))
        )
        hits = (np.sqrt(np.mean((rows - row) ** 2, axis=1)) < 1e-3 for row in read if np.isfinite(row).all())
        return np.unique(np.concatenate([np.zeros(0, dtype=np.intp), *(np.flatnonzero(hit) for hit in hits)]))


def attack(moments: GroupMoments) -> Mapping[Label, Found]:
    """Read rows from the moments of every group."""
    alone = read_alone(moments)
    parts = zip(moments.labels, moments.counts, moments.means, moments.scatters, strict=True)
    return {label: Found(alone[label], _guesses(*given)) for label, *given in parts}


def attack_together(moments: GroupMoments) -> Found:
    """Read rows ``[groups, h, y]`` from what the moments tell of everybody, groups as columns of 0 and 1."""
    everybody = pooled_with_groups(moments)
    (found,) = attack(everybody).values()
    return found


def pooled_with_groups(moments: GroupMoments) -> GroupMoments:
    """Moments of the rows ``[groups, h, y]`` of everybody."""
    n, share = len(moments.labels), moments.counts / moments.counts.sum()
    mean = np.append(share, moments.pooled_mean())
    scatter = np.zeros((len(mean), len(mean)))
    scatter[n:, n:] = moments.pooled_scatter()
    scatter[:n, :n] = np.diag(moments.counts) - moments.counts.sum() * np.outer(share, share)
    scatter[:n, n:] = moments.counts[:, None] * (moments.means - moments.pooled_mean())
    scatter[n:, :n] = scatter[:n, n:].T
    sums = ([moments.rows.sum()], [moments.counts.sum()], [moments.weight_squares.sum()])
    return GroupMoments.from_arrays(["everybody"], *sums, [mean], [scatter])


def _guesses(count: float, mean: Array, scatter: Array) -> Array:
    """For each column the row of the one person who has all of it, or who alone differs in it, either way."""
    spread = np.diag(scatter)
    with np.errstate(divide="ignore", invalid="ignore"):
        all_of_it = mean + scatter / (count * mean[:, None])
        differs = scatter / np.sqrt(spread)[:, None] * np.sqrt(max(count - 1, 0.0) / count)
    return np.vstack([all_of_it, mean + differs, mean - differs])
