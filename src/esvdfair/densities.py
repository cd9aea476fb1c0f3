"""Smooth densities of predictions on a grid, for plots and for the report."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CELLS = 81
"""Values of a density."""
REPRESENTATIVES = 512
"""A larger sample is replaced by so many of its quantiles, which a smooth density cannot tell from it."""
TAIL = 0.002
"""Part of the people at either end for whom no room is kept in a chart."""


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
