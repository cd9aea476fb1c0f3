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
