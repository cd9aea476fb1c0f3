"""The Gaussian mechanism: moments with so much noise that it hardly matters whether one person is among the rows.

Noise must be as large as the most that one person can change, so it needs bounds, and bounds may not come from the rows
that they protect. They come from *public* rows, which some site or the owner of the model may show: their mean, the
direction of the output and their largest principal axes (K in all), their spread along these, their range of labels.
With z the coordinates along the axes, divided by the spread, rows are seen as ``x = (1, z/R, y')/√3``, clipped to
``‖z‖ ≤ R`` and ``|y'| ≤ 1`` (without labels (1, z/R)/√2). Nobody's x is longer than 1: one person more or less changes
``Σxxᵀ``, over all groups, by at most 1 in the Frobenius norm. Noise of standard deviation σ on its diagonal and σ/√2 on
each entry beside it is then (ε, δ)-private, by the calibration of Balle and Wang (2018). Counts and means are in Σxxᵀ
too: all numbers in the file have noise. Which groups there are is not protected, and *replacing* a person is a change
of up to √2, not 1.

Where only the sum of m sites is ever seen (:mod:`.masks`), they add the noise together: each adds the part ``2/m`` of
its variance, so that the sum has at least all of it as long as half of the sites keep what they added to themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.optimize import brentq
from scipy.special import log_ndtr

from esvdfair.core.moments import GroupMoments
from esvdfair.exceptions import Given, InputError
from esvdfair.federated.guard import second_moments

Array = NDArray[np.float64]

AXES = 8
"""Directions of the last layer's inputs that moments with noise tell of; each costs as much noise as the others."""

FEWEST = 10.0
"""Rows that a group must seem to have after noise."""

_WITHIN = 0.95  # part of the public rows that are not clipped


@dataclass(frozen=True)
class Noise:
    """The Gaussian mechanism that a collection went through.

    Attributes
    ----------
    epsilon, delta : what it guarantees, for one person more or less
    sigma : standard deviation of the noise, for a sum that one person changes by 1 at most
    axes : directions of the layer's inputs that the moments tell of
    sites : how many add it together under masks; moments of one of them have a part of it only
    """

    epsilon: float
    delta: float
    sigma: float
    axes: int
    sites: int = 1

    @property
    def own(self) -> float:
        """Standard deviation of what one site adds."""
        return self.sigma * math.sqrt(min(1.0, 2 / self.sites))


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Smallest σ for which noise N(0, σ²) on a sum that one person changes by at most 1 is (ε, δ)-private.

    It is the root of ``Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) = δ`` (Balle and Wang 2018, theorem 8).

    Examples
    --------
    >>> round(gaussian_sigma(1.0, 1e-5), 3)
    3.731
    """

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        near, far = (float(log_ndtr(sign / (2 * sigma) - epsilon * sigma)) for sign in (1, -1))
        return math.exp(near) - math.exp(epsilon + far) - delta

    return math.exp(brentq(excess, math.log(1e-3), math.log(1e8), xtol=1e-12))


@dataclass(frozen=True)
class Frame:
    """How public rows bound and measure others.

    Attributes
    ----------
    centre : (p,) c
    axes : (K, p) orthonormal, the first along the weights of the layer
    reach : (K,) R times the spread along each axis: z/R are the coordinates of h − c divided by it
    middle, half : of the range of labels; None without labels
    """

    centre: Array
    axes: Array
    reach: Array
    middle: float | None
    half: float

    @classmethod
    def of(cls, batches: Sequence[Array], weight: Array, *, labelled: bool, axes: int = AXES) -> "Frame":
        """From public rows ``[h, y]``."""
        rows = np.concatenate(batches)
        p = len(weight)
        centre = rows[:, :p].mean(axis=0)
        h = rows[:, :p] - centre
        first = weight / (np.linalg.norm(weight) or 1.0)
        _, _, others = np.linalg.svd(h - np.outer(h @ first, first), full_matrices=False)
        found = np.vstack([first, others[: axes - 1]])
        spread = (h @ found.T).std(axis=0)
        live = spread > 1e-6 * spread.max()
        if len(rows) < 10 * axes or not live[0]:
            raise InputError(
                "{public} has {rows} rows, on which the model's outputs vary by {spread:.3g}; give {needed} or more "
                "that differ, of the same kind as the others.",
                public=Given(),
                rows=len(rows),
                spread=spread[0],
                needed=10 * axes,
            )
        found, spread = found[live], spread[live]
        radius = float(np.quantile(np.linalg.norm(h @ found.T / spread, axis=1), _WITHIN))
        low, high = (float(rows[:, -1].min()), float(rows[:, -1].max())) if labelled else (0.0, 0.0)
        return cls(centre, found, radius * spread, (low + high) / 2 if labelled else None, (high - low) / 2 or 1.0)

    def seen(self, rows: Array) -> Array:
        """(rows, K) clipped z/R, and beside it y' where there are labels."""
        z = (rows[:, : len(self.centre)] - self.centre) @ self.axes.T / self.reach
        z = z / np.maximum(np.linalg.norm(z, axis=1), 1.0)[:, None]
        if self.middle is None:
            return np.asarray(z)
        return np.column_stack([z, np.clip((rows[:, -1] - self.middle) / self.half, -1.0, 1.0)])

    def told(self, moments: GroupMoments) -> GroupMoments:
        """Moments of what is seen as moments of ``[h, y]``: directions beside the axes are as in the centre."""
        back, shift = self.axes.T * self.reach, self.centre
        if self.middle is not None:
            back = block_diag(back, np.full((1, 1), self.half))
            shift = np.append(shift, self.middle)
        found = moments.mapped(back)
        arrays = found.rows, found.counts, found.weight_squares, found.means + shift, found.scatters
        return GroupMoments.from_arrays(found.labels, *arrays)


def make_noise(epsilon: float, delta: float, *, axes: int, sites: int = 1) -> Noise:
    """The mechanism for these parameters, checked."""
    if not (0 < epsilon <= 100 and 1e-12 <= delta < 0.5 and sites >= 1):
        raise InputError(
            "{epsilon} and {delta}: expected an epsilon above 0 and up to 100 and a delta from 1e-12 to 0.5, far below "
            "one over the number of people.",
            epsilon=Given(epsilon),
            delta=Given(delta),
        )
    return Noise(float(epsilon), float(delta), gaussian_sigma(epsilon, delta), axes, sites)


def add_noise(moments: GroupMoments, noise: Noise, *, labelled: bool, random: np.random.Generator) -> GroupMoments:
    """Moments of what a frame has seen, with noise on all their sums.

    Raises
    ------
    ValueError
        A group seems to have fewer than `FEWEST` rows after noise.
    """
    parts, found = 2 + labelled, []
    for g, label in enumerate(moments.labels):
        second = second_moments(moments, g)
        second += parts * _symmetric(len(second), noise.own, random)  # on Σxxᵀ of rows x = (1, z/R, y')/√parts
        count, mean = float(second[0, 0]), second[0, 1:] / second[0, 0]
        if count < FEWEST:
            raise InputError(
                "with {epsilon} the noise hides the group {label!r}: it seems to have {count:.0f} rows. Join groups, "
                "or allow a larger epsilon.",
                epsilon=Given(noise.epsilon),
                label=label,
                count=count,
            )
        found.append((label, round(count), count, count, mean, second[1:, 1:] - count * np.outer(mean, mean)))
    return GroupMoments.from_arrays(*map(list, zip(*found, strict=True)))


def _symmetric(n: int, sigma: float, random: np.random.Generator) -> Array:
    """Noise of standard deviation σ on the diagonal and σ/√2 beside it: N(0, σ²) in the Frobenius norm."""
    noise = random.normal(scale=sigma, size=(n, n))
    return (noise + noise.T) / 2
