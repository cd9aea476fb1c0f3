"""Numbers behind the charts: densities of groups, distribution functions, and where these are farthest apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esvdfair.audit import Array, density

Codes = NDArray[np.intp]


@dataclass(frozen=True)
class Farthest:
    """Where two groups' distribution functions are farthest apart: the KS distance is ``high − low`` at ``at``."""

    at: float
    low: float
    high: float
    low_group: int
    high_group: int

    @property
    def distance(self) -> float:
        return self.high - self.low


@dataclass(frozen=True)
class Distributions:
    """Distribution functions F_g (G, k) of the groups at k thresholds, among them the one where they differ most."""

    thresholds: Array
    shares: Array
    farthest: Farthest


def group_densities(values: Array, codes: Codes, groups: Sequence[int], grid: Array) -> list[list[float]]:
    """Densities of some groups, rounded for the page."""
    return [rounded(density(values[codes == g], grid)) for g in groups]


def distributions(values: Array, codes: Codes, groups: int, grid: Array) -> Distributions:
    """F_g at every value of the grid and where the groups are farthest apart, over all values that occur."""
    occurring = np.unique(values)
    shares = _shares(values, codes, groups, occurring)
    peak = int(np.argmax(np.ptp(shares, axis=0)))
    low, high = int(np.argmin(shares[:, peak])), int(np.argmax(shares[:, peak]))
    at = float(occurring[peak])
    thresholds = np.unique(np.append(grid, at))
    found = Farthest(at, float(shares[low, peak]), float(shares[high, peak]), low, high)
    return Distributions(thresholds, _shares(values, codes, groups, thresholds), found)


def rounded(values: Iterable[float]) -> list[float]:
    """Four digits that count: enough for a chart, and short."""
    return [float(f"{value:.4g}") for value in values]


def _shares(values: Array, codes: Codes, groups: int, thresholds: Array) -> Array:
    rows = []
    for g in range(groups):
        mine = np.sort(values[codes == g])
        rows.append(np.searchsorted(mine, thresholds, side="right") / len(mine))
    return np.array(rows)
