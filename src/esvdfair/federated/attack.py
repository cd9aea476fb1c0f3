"""What somebody who holds a moments file can read of single people: the attack that :mod:`.guard` is there to stop.

A column c of the rows x = [h, y] that is non-zero for one person shows itself, ``Σc² = (Σc)²/w``, and ``Σcx / Σc`` is
then the person's row. Taken off the moments, the next one may show (*peeling*). A column that has one value for all but
one person, or one large value among small ones, does not show itself, but guesses for each column are cheap, and a
guess can be checked by whoever knows a little about the people. The guesses here are judged against the rows
themselves, which is more than an attacker can do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label
from esvdfair.core.moments import GroupMoments

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
    found = {}
    for g, label in enumerate(moments.labels):
        count, mean, scatter = moments.counts[g], moments.means[g], moments.scatters[g]
        weight = count / moments.rows[g]  # of one row, as far as one can tell
        x = np.append(1.0, mean)
        second = count * np.outer(x, x)  # Σ w x xᵀ of rows x = [1, h, y]
        second[1:, 1:] += scatter
        found[label] = Found(_peel(second, weight), _guesses(count, mean, scatter))
    return found


def _peel(second: Array, weight: float) -> Array:
    """Rows of columns that are non-zero for one person, one after the other taken off."""
    rows: list[Array] = []
    second, floor = second.copy(), 1e-9 * np.diag(second)
    while True:
        total, squares = second[0, 1:], np.diag(second)[1:]
        alone = (squares > floor[1:]) & (np.abs(total**2 - squares * weight) < 1e-6 * squares * weight)
        if not alone.any() or len(rows) > len(second):
            return np.array([row[1:] for row in rows]).reshape(-1, len(second) - 1)
        column = 1 + int(np.flatnonzero(alone)[0])
        rows.append(second[column] / second[0, column])
        second -= weight * np.outer(rows[-1], rows[-1])


def _guesses(count: float, mean: Array, scatter: Array) -> Array:
    """For each column the row of the one person who has all of it, or who alone differs in it, either way."""
    spread = np.diag(scatter)
    with np.errstate(divide="ignore", invalid="ignore"):
        all_of_it = mean + scatter / (count * mean[:, None])
        differs = scatter / np.sqrt(spread)[:, None] * np.sqrt(max(count - 1, 0.0) / count)
    return np.vstack([all_of_it, mean + differs, mean - differs])
