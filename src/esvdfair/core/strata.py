"""Adjusted gaps: groups compared as if each had the same mix of strata (of jobs, regions, hours).

Stratum s of group g holds the weight W_gs. Strata that some group has no row in leave the comparison; over the others,
the *common support*, P(s) is their share of all rows and P(s|g) that of the rows of g. Rows of g in s are weighted by

    a_gs = P(s) / P(s|g),

after which every group has the mix P(s) and its own total weight. Whatever differs between groups then does so within
strata. A *cell* is a group and a stratum; its label is one flat tuple, first the parts of the group's label.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label, Scalar
from esvdfair.exceptions import Given, InputError

Floats = NDArray[np.float64]
Codes = NDArray[np.intp]

_THRESHOLDS = 128
GRID_SHIFT = 0.5826
"""−ζ(1/2)/√(2π): what a supremum over a grid misses, in standard deviations of one step."""


def adjusting_factors(mass: Floats) -> Floats:
    """(G, S) a_gs from the weight (G, S) of each group in each stratum; 0 outside the common support.

    Raises
    ------
    ValueError
        When no stratum holds every group: then nothing can be compared within strata.
    """
    support = (mass > 0).all(axis=0)
    if not support.any():
        raise InputError(
            "no stratum of {control_features} holds rows of every group, so nothing can be compared within strata; "
            "use fewer or coarser ones.",
            control_features=Given(),
        )
    inside = np.where(support, mass, 0.0)
    common = inside.sum(axis=0) / inside.sum()  # P(s)
    own = inside / inside.sum(axis=1, keepdims=True)  # P(s|g)
    factors: Floats = np.divide(common, own, out=np.zeros_like(own), where=own > 0)
    return factors


def adjusted_weights(codes: Codes, n_groups: int, strata: Codes, weight: Floats | None = None) -> Floats:
    """(rows,) the weights times a_gs, for groups ``codes`` and strata ``strata``; 0 outside the common support."""
    weight = np.ones(len(codes)) if weight is None else weight
    n_strata = int(strata.max(initial=0)) + 1
    cell = codes * n_strata + strata
    mass = np.bincount(cell, weight, n_groups * n_strata).reshape(n_groups, n_strata).astype(np.float64)
    return np.asarray(weight * adjusting_factors(mass).ravel()[cell], dtype=np.float64)


def outside_support(weight: Floats, adjusted: Floats) -> float:
    """Share of the weight of people who are like nobody of some other group, and so are left out."""
    return float(weight[adjusted == 0].sum() / weight.sum())


# --- cells ---------------------------------------------------------------------------------------------------------


def make_cells(
    groups: tuple[Sequence[Label], Codes], strata: tuple[Sequence[Label], Codes]
) -> tuple[tuple[Label, ...], Codes]:
    """Labels and codes of the cells that occur, in the order of groups and then of strata."""
    (names, codes), (kinds, places) = groups, strata
    present, cell = np.unique(codes * len(kinds) + places, return_inverse=True)
    labels = [(*_parts(names[i // len(kinds)]), *_parts(kinds[i % len(kinds)])) for i in present.tolist()]
    return tuple(labels), cell.astype(np.intp)


def split_cell(cell: Label, parts: int) -> tuple[Label, Label]:
    """The group and the stratum of a cell whose group's label has so many parts."""
    parted = _parts(cell)
    group, stratum = parted[:parts], parted[parts:]
    return group[0] if parts == 1 else group, stratum[0] if len(stratum) == 1 else stratum


def label_parts(label: Label) -> int:
    """How many attributes a label names."""
    return len(_parts(label))


def _parts(label: Label) -> tuple[Scalar, ...]:
    return label if isinstance(label, tuple) else (label,)


# --- what sampling does to adjusted distributions ------------------------------------------------------------------


def stratified_noise(
    scores: Floats, codes: Codes, n_groups: int, strata: Codes, weights: Floats, draws: int, rng: np.random.Generator
) -> Floats:
    """(draws,) KS distances that sampling alone makes between groups of one adjusted distribution.

    Weights that give every group a known mix leave no noise *between* strata: an adjusted F_g is a sum of those of its
    cells, whose errors are Brownian bridges, each over the cell's own distribution. Where strata tell scores apart,
    as a job does pay, a distance is far less noisy than effective sizes suggest.
    """
    present = np.flatnonzero(weights > 0)
    order = present[np.argsort(scores[present])]
    ranked = scores[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    if len(ends) > _THRESHOLDS:
        ends = ends[np.linspace(0, len(ends) - 1, _THRESHOLDS).astype(np.intp)]
    column = np.minimum(np.searchsorted(ends, np.arange(len(order))), len(ends) - 1)
    noise, steps = np.zeros((n_groups, draws, len(ends))), np.zeros((n_groups, len(ends)))
    for g in range(n_groups):
        total = weights[codes == g].sum()
        for s in np.unique(strata[order][codes[order] == g]):
            mine = (codes[order] == g) & (strata[order] == s)
            w = weights[order][mine] / total
            variance = np.bincount(column[mine], w**2, len(ends))
            cdf = np.cumsum(np.bincount(column[mine], w, len(ends))) / w.sum()
            walk = np.cumsum(rng.standard_normal((draws, len(ends))) * np.sqrt(variance), axis=1)
            noise[g] += walk - walk[:, -1:] * cdf
            steps[g] += variance
    at = np.ptp(noise, axis=0).argmax(axis=1)
    there = np.take_along_axis(noise, at[None, :, None], axis=2)[:, :, 0]
    pair = steps[there.argmax(axis=0), at] + steps[there.argmin(axis=0), at]
    return np.asarray(np.clip(np.ptp(there, axis=0) + GRID_SHIFT * np.sqrt(pair), 0.0, 1.0), dtype=np.float64)
