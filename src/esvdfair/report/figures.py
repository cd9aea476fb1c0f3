"""Numbers behind the charts: densities on a grid, distribution functions, and where these are farthest apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

CELLS = 81
"""Values of a density."""
REPRESENTATIVES = 512
"""A larger sample is replaced by so many of its quantiles, which a smooth density cannot tell from it."""
TAIL = 0.002
"""Part of the people at either end for whom no room is kept in a chart."""


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


def make_grid(samples: Iterable[Array], cells: int = CELLS) -> Array:
    """(cells,) evenly spaced values that cover the samples but for their outermost tails."""
    ends = np.array([np.quantile(values, [TAIL, 1 - TAIL]) for values in samples])
    low, high = ends[:, 0].min(), ends[:, 1].max()
    # all values equal: any room will do, as long as it shows at the size of these values
    room = 0.06 * (high - low) or max(0.5, abs(high) * 0.01)
    return np.linspace(low - room, high + room, cells)


def density(values: Array, grid: Array) -> Array:
    """(cells,) Gaussian kernel density with Silverman's bandwidth, never narrower than a cell of the grid."""
    quartiles = np.quantile(values, [0.25, 0.75])
    spreads = [s for s in (values.std(), float(np.ptp(quartiles)) / 1.349) if s > 0]
    bandwidth = max(0.9 * min(spreads, default=0.0) * len(values) ** -0.2, grid[1] - grid[0])
    if len(values) > REPRESENTATIVES:
        values = np.quantile(values, (np.arange(REPRESENTATIVES) + 0.5) / REPRESENTATIVES)
    z = (grid[:, None] - values) / bandwidth
    found: Array = np.exp(-0.5 * z**2).mean(axis=1) / (bandwidth * np.sqrt(2 * np.pi))
    return found


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
