"""W₂² between the groups' outputs of a linear layer: its exact value, its gradient, and its curvature by quantile bins.

Row i has centred features z_i along the principal axes (r of them), and the layer's output is ``f_i = z_i·v``. With Q_g
the quantile function of group g's outputs, p_g its share and ``m = Σ p_g Q_g`` the quantile function of the barycentre,

    T(v) = ∫ Σ_g p_g (Q_g − m)² dt / Σ_{g<h} p_g p_h = Σ_{g<h} p_g p_h W₂²(g, h) / Σ_{g<h} p_g p_h,

the mean of the pairwise W₂² weighted by p_g p_h; for two groups it is W₂² itself. In a matrix A (G−1 × G) with
``AᵀA = (diag(p) − ppᵀ) / Σ_{g<h} p_g p_h`` the integrand is ``‖A Q(t)‖²``: rows of A are *contrasts* between groups.

Quantile functions are steps, so T is a finite sum over the pieces on which all of them are constant. Sorting fixes the
pieces; with the order fixed T is a quadratic in v, an upper bound of T elsewhere (sorting is the cheapest coupling).
So ``∂Q_g(t)/∂v`` is the feature row at level t, and averaged over quantile bins it gives the Gauss-Newton curvature.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Index = NDArray[np.intp]

_ROWS_PER_BIN = 8  # fewer, and a bin mean says more about its rows than about its quantile


@dataclass(frozen=True)
class Pieces:
    """The levels in (0, 1) at which several step functions are all constant.

    Attributes
    ----------
    lengths : (pieces,) they sum to 1
    steps : for each function, (pieces,) which of its steps the piece lies on, non-decreasing
    """

    lengths: Array
    steps: tuple[Index, ...]

    @classmethod
    def merge(cls, levels: list[Array]) -> "Pieces":
        """From the upper ends of each function's steps: (n_g,) ascending, the last one 1."""
        lower = np.concatenate([[0.0], *(level[:-1] for level in levels)])
        lower.sort()
        return cls(np.diff(lower, append=1.0), tuple(level.searchsorted(lower, side="right") for level in levels))


@dataclass(frozen=True)
class Coupling:
    """The groups' outputs, sorted and laid side by side.

    Attributes
    ----------
    value : T, the mean pairwise W₂²
    gaps : (G−1, pieces) contrasts between the groups' quantiles, ``A Q(t)``
    orders : for each group, (n_g,) its rows by ascending output
    pieces : the levels
    """

    value: float
    gaps: Array
    orders: tuple[Index, ...]
    pieces: Pieces


class TransportProblem:
    """W₂² between groups as a function of a linear layer on given rows; serves every target, ridge and strength.

    Parameters
    ----------
    rotated : (rows, r) features along the principal axes, ``FeatureSpace.rotate``; kept, and copied in float32
    codes : (rows,) group of each row, 0 .. n_groups − 1
    n_groups : G
    sample_weight : (rows,) non-negative; a row of weight 0 is left out
    share : (G,) weight of each group in the barycentre; default: its part of the sample weight. Give it when the rows
        are a sample that does not keep the groups' proportions. Without effect for two groups.
    n_bins : quantile bins for the curvature; fewer are used when the smallest group has under 8 rows a bin

    Raises
    ------
    ValueError
        For lengths that differ, fewer than two groups, a group without rows, values that are not finite.
    """

    def __init__(
        self,
        rotated: ArrayLike,
        codes: ArrayLike,
        n_groups: int,
        *,
        sample_weight: ArrayLike | None = None,
        share: ArrayLike | None = None,
        n_bins: int = 64,
    ) -> None:
        if n_bins < 1:
            raise ValueError(f"n_bins={n_bins!r}; expected a positive number of quantile bins.")
        rows, groups, weight = _checked_rows(rotated, codes, n_groups, sample_weight)
        order = np.argsort(groups, kind="stable")
        order = order[weight[order] > 0]
        bounds = np.searchsorted(groups[order], np.arange(n_groups + 1))
        sizes = np.diff(bounds)
        if n_groups < 2 or not sizes.all():
            raise ValueError(
                f"group sizes are {sizes.tolist()}; parity compares two groups or more, each with rows of positive "
                "weight. Take a sample of rows that holds every group, or merge small groups."
            )
        self._rotated, self._order = rows, order
        # Products with the rows are bound by memory: float32 copies, in group order and in units of each column's size.
        self._unit = np.sqrt(np.mean(rows**2, axis=0))
        self._unit[self._unit == 0] = 1.0
        self._rows = (rows[order] / self._unit).astype(np.float32)
        self._parts = [slice(a, b) for a, b in pairwise(bounds)]
        weights = [weight[order[part]] for part in self._parts]
        self.contrasts = _contrasts(_checked_share(share, np.array([w.sum() for w in weights])))
        self.n_bins = int(max(1, min(n_bins, sizes.min() // _ROWS_PER_BIN)))
        self._edges = np.arange(1, self.n_bins + 1) / self.n_bins
        self._weights = None if all(np.ptp(w) == 0 for w in weights) else weights
        if self._weights is None:  # then the pieces do not depend on the order, and are made once
            levels = [np.arange(1, size + 1) / size for size in sizes]
            self._pieces = Pieces.merge(levels)
            self._bins = [Pieces.merge([level, self._edges]) for level in levels]

    @property
    def rows(self) -> int:
        """How many rows of positive weight there are."""
        return len(self._rows)

    @property
    def rank(self) -> int:
        """r, the number of feature columns."""
        return int(self._rows.shape[1])

    def outputs(self, v: Array) -> Array:
        """(rows,) ``z_i·v``, in the order of the groups."""
        outputs: Array = (self._rotated @ v)[self._order]
        return outputs

    def fast_outputs(self, v: Array) -> Array:
        """The same to about seven digits, in half the time."""
        outputs: Array = (self._rows @ (self._unit * v).astype(np.float32)).astype(np.float64)
        return outputs

    def couple(self, outputs: Array) -> Coupling:
        """Sort the outputs of each group and set quantile against quantile."""
        parts = [outputs[part] for part in self._parts]
        orders = tuple(np.argsort(part) for part in parts)
        pieces = self._pieces if self._weights is None else Pieces.merge(self._levels(orders))
        quantiles = np.stack([f[o][s] for f, o, s in zip(parts, orders, pieces.steps, strict=True)])
        gaps = self.contrasts @ quantiles
        return Coupling(float(np.einsum("kt,kt,t->", gaps, gaps, pieces.lengths)), gaps, orders, pieces)

    def half_gradient(self, coupling: Coupling) -> Array:
        """(r,) ½ ∂T/∂v: every row pulled by the gap at the levels that it occupies."""
        pulls = self.contrasts.T @ (coupling.gaps * coupling.pieces.lengths)  # (G, pieces)
        slopes = np.empty(len(self._rows), dtype=np.float32)
        for part, order, step, pull in zip(self._parts, coupling.orders, coupling.pieces.steps, pulls, strict=True):
            slopes[part][order] = np.bincount(step, weights=pull, minlength=len(order))
        gradient: Array = (slopes @ self._rows) * self._unit
        return gradient

    def bin_contrasts(self, coupling: Coupling) -> Array:
        """((G−1)·bins, r) B with ``T ≈ ‖Bv‖²``: contrasts between the groups' mean rows in each quantile bin."""
        levels = None if self._weights is None else self._levels(coupling.orders)
        means = np.empty((len(self._parts), self.n_bins, self.rank))
        for g, (part, order) in enumerate(zip(self._parts, coupling.orders, strict=True)):
            pieces = self._bins[g] if levels is None else Pieces.merge([levels[g], self._edges])
            row, quantile_bin = pieces.steps
            starts = quantile_bin.searchsorted(np.arange(self.n_bins + 1))
            data = (pieces.lengths * self.n_bins).astype(np.float32)
            average = scipy.sparse.csr_array((data, order[row], starts), shape=(self.n_bins, len(order)))
            means[g] = average @ self._rows[part]
        means *= self._unit / np.sqrt(self.n_bins)
        contrasts: Array = np.tensordot(self.contrasts, means, 1).reshape(-1, self.rank)
        return contrasts

    def _levels(self, orders: tuple[Index, ...]) -> list[Array]:
        """Upper ends of the steps of each group's quantile function, for unequal weights."""
        levels = [np.cumsum(weight[order]) for weight, order in zip(self._weights or [], orders, strict=True)]
        return [np.append(level[:-1] / level[-1], 1.0) for level in levels]


def _contrasts(share: Array) -> Array:
    """(G−1, G) A with ``AᵀA = (diag(p) − ppᵀ) / Σ_{g<h} p_g p_h``; (1, −1) up to sign for two groups."""
    form = np.diag(share) - np.outer(share, share)
    values, vectors = np.linalg.eigh(form / (0.5 * np.trace(form)))  # Σ_{g<h} p_g p_h = ½ Σ p_g (1 − p_g)
    contrasts: Array = (vectors[:, 1:] * np.sqrt(values[1:])).T  # the smallest eigenvalue is 0: equal quantiles
    return contrasts


def _checked_rows(
    rotated: ArrayLike, codes: ArrayLike, n_groups: int, sample_weight: ArrayLike | None
) -> tuple[Array, Index, Array]:
    rows, groups = np.asarray(rotated, dtype=np.float64), np.asarray(codes)
    if rows.ndim != 2 or groups.shape != rows.shape[:1]:
        raise ValueError(
            f"rotated features have shape {rows.shape} and codes {groups.shape}; expected (rows, r), (rows,)."
        )
    if groups.size and (groups.min() < 0 or groups.max() >= n_groups):
        raise ValueError(f"codes run from {groups.min()} to {groups.max()}; expected 0 to {n_groups - 1}.")
    weight = np.ones(len(rows)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
    if weight.shape != groups.shape:
        raise ValueError(f"sample_weight has shape {weight.shape}, expected {groups.shape}: one weight for each row.")
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError("sample_weight must be finite and not negative.")
    if not np.isfinite(rows).all():
        bad = int((~np.isfinite(rows).all(axis=1)).sum())
        raise ValueError(f"{bad} of {len(rows)} feature rows hold NaN or infinite values; drop those rows.")
    return rows, groups.astype(np.intp), weight


def _checked_share(share: ArrayLike | None, totals: Array) -> Array:
    p = totals if share is None else np.asarray(share, dtype=np.float64)
    if p.shape != totals.shape or not np.isfinite(p).all() or (p <= 0).any():
        raise ValueError(f"share={share!r}; expected {len(totals)} positive numbers, one for each group.")
    normalised: Array = p / p.sum()
    return normalised
