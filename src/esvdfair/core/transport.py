"""Transport refit of the last layer: least squares plus λ_w · W₂² between the groups' outputs (docs/method.md 2.4).

    min over u of   E(t − h·w − b)² + ρ‖w − w₀‖² + λ_w T(scale∘u),

u the whitened coordinates of ``Quadratic``, in which the first two terms are ``‖u − u_ridge‖² + constant``. Row i has
centred features z_i along the principal axes (r of them) and the output ``f_i = z_i·v``. With Q_g the quantile function
of group g's outputs, ``T(v) = ∫ (Q_g − Q_h)² dt``, its mean over the pairs g < h.

The derivative of Q_g(t) is the feature row at level t. Averaged over quantile bins, made at some point, it gives for
each pair a block B_gh (bins × r) with ``T ≈ mean of ‖B_gh v‖²``; with B fixed the problem is a small linear system. All
pairs count alike, but what a pair can demand grows with what its rows can show: bins are as many as 8 rows a bin allow,
of the smaller group, and with three groups or more the noise of bin means is taken out of each block. In whitened
coordinates a block of pure noise has singular values up to about ``τ``,

    τ² = (1/n_g + 1/n_h) (√bins + √d)²,   d = Σ Λ/(Λ+ρ),

so singular values s become ``√max(0, s² − τ²)``: forty rows cannot steer twenty thousand.

One such solve for each strength on an ascending path, with the bins of the point before, is the whole trade-off curve.
T itself has many valleys; descending into them buys nothing on new data, and lets the last bits of the rows decide
which.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import ceil, inf, log

import numpy as np
import scipy.linalg
import scipy.sparse
from numpy.typing import NDArray
from scipy.linalg.lapack import dposv

from esvdfair.core.quadratic import Array, Fit, Quadratic

_BLOCK_ROWS = 896  # of the blocks of all pairs together
_ROWS_PER_BIN = 8  # fewer, and a bin mean says more about its rows than about its quantile
_EQUAL = 1e-12  # rows, as those of discrete features, that differ by less than this part of the largest are one
_TIE = 1e-9  # outputs closer than this part of their first spread are one: only rounding would tell them apart
_WEAK, _RUNG = 0.1, 6.0  # the first step from the ridge solution, and the factor between two steps, at most


def transport_path(problem: "TransportProblem", quadratic: Quadratic, *, strengths: Sequence[float]) -> list[Fit]:
    """Refits at every strength λ_w, in the order given; each one's bins are made at the next smaller strength.

    Parameters
    ----------
    problem : rows, groups and weights; its columns are the axes of ``quadratic.space``, its rows may be a sample
    quadratic : target and ridge
    strengths : λ_w ≥ 0, a pure number (error and W₂² have the same unit); 0 gives the ridge solution
    """
    if not all(0 <= strength < inf for strength in strengths):
        raise ValueError(f"strengths={strengths!r}; expected finite numbers that are not negative.")
    u, scale, tie = quadratic.minimiser, quadratic.scale, None
    freedom = float(quadratic.space.variances @ scale**2)  # d
    found = {0.0: u}
    for strength in _ladder({0.0, *strengths})[1:]:
        outputs = problem.outputs(scale * u)
        tie = _TIE * float(np.std(outputs)) if tie is None else tie
        blocks = [block * scale for block in problem.pair_blocks(outputs, tie=tie)]
        if len(blocks) > 1:
            blocks = [_denoised(*each, freedom) for each in zip(blocks, problem.pair_noise, strict=True)]
        free = len(u) - (quadratic.space.offset is not None)
        found[strength] = u = _woodbury(quadratic.minimiser, np.concatenate(blocks), strength, free)
    return [quadratic.fit(found[strength], strength=strength) for strength in strengths]


def _ladder(strengths: set[float]) -> list[float]:
    """The strengths in ascending order, with rungs in between where they lie far apart."""
    ladder = set(strengths)
    for low, high in pairwise(sorted(strengths)):
        low = max(low, _WEAK / _RUNG)
        steps = ceil(log(high / low) / log(_RUNG)) if high > low else 1
        ladder |= {low * (high / low) ** (k / steps) for k in range(1, steps)}
    return sorted(ladder)


def _denoised(block: Array, noise: float, freedom: float) -> Array:
    """A block (bins, r) in whitened coordinates without what noise adds to its singular values.

    ``noise`` is 1/n_g + 1/n_h; the block carries the factor 1/pairs of the mean over pairs in its own scale.
    """
    squares, vectors = scipy.linalg.eigh(block @ block.T)
    threshold = noise * (np.sqrt(len(block)) + np.sqrt(freedom)) ** 2
    kept = np.sqrt(np.maximum(0.0, squares - threshold) / np.maximum(squares, 1e-300))
    return np.asarray((vectors * kept) @ (vectors.T @ block))


def _woodbury(z: Array, b: Array, strength: float, free: int) -> Array:
    """The minimum of ``‖u − z‖² + λ‖Bu‖²`` over the first ``free`` coordinates; the others are those of z.

    Without others ``(I + λBᵀB)⁻¹ z``, by Woodbury when there are fewer bins than coordinates. The bound on λ keeps both
    systems positive definite, so that their Cholesky factors exist.
    """
    strength = min(strength, 1e12 / max(float(np.sum(b**2)), 1e-300))  # beyond, only rounding changes
    moved = b[:, :free]
    if len(b) < free:
        small = moved @ moved.T + np.eye(len(b)) / strength
        solution = z[:free] - moved.T @ dposv(small, b @ z)[1]
    else:
        full = strength * (moved.T @ moved) + np.eye(free)
        solution = dposv(full, z[:free] - strength * (moved.T @ (b[:, free:] @ z[free:])))[1]
    return np.append(solution, z[free:])


def _equal_rows(rows: Array, codes: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """An order of rows by group in which equal ones stand together, and the places at which unlike ones begin."""
    key = rows @ np.random.default_rng(0).normal(size=rows.shape[1])
    order = np.lexsort((key, codes))
    rounding = _EQUAL * float(np.abs(rows).max())
    new = np.append(True, (np.diff(codes[order]) > 0) | (np.diff(key[order]) > rounding * rows.shape[1]))
    near = np.flatnonzero(~new)
    new[near] = np.abs(rows[order[near]] - rows[order[near - 1]]).max(axis=1, initial=0.0) > rounding
    return order, np.flatnonzero(new)


class TransportProblem:
    """W₂² between groups as a function of a linear layer on given rows; serves every target, ridge and strength.

    Parameters
    ----------
    rotated : (rows, r) features along the principal axes, ``FeatureSpace.rotate``
    codes : (rows,) group of each row, 0 .. n_groups − 1
    n_groups : G
    sample_weight : (rows,) non-negative; a row of weight 0 counts for nothing. Only proportions within a group matter
    n_bins : quantile bins of a pair at most; fewer where the smaller group has under 8 rows a bin, or there are many
        pairs
    """

    def __init__(
        self,
        rotated: Array,
        codes: NDArray[np.intp],
        n_groups: int,
        *,
        sample_weight: Array | None = None,
        n_bins: int = 32,
    ) -> None:
        weight = np.ones(len(codes)) if sample_weight is None else sample_weight
        sizes = np.bincount(codes, weight > 0, n_groups).astype(int)
        if n_groups < 2 or not sizes.all():
            raise ValueError(
                f"group sizes are {sizes.tolist()}; parity compares two groups or more, each with rows of positive "
                "weight. Take a sample of rows that holds every group, or merge small groups."
            )
        self._pairs = list(combinations(range(n_groups), 2))
        most = max(1, min(n_bins, _BLOCK_ROWS // len(self._pairs)))
        bins = np.clip(sizes // _ROWS_PER_BIN, 1, most)
        # Of more than two groups a power of two, so that the bins of one are whole bins of the other.
        self.bins = np.full(2, bins.min()) if n_groups == 2 else 2 ** np.floor(np.log2(bins)).astype(int)
        weight = weight / np.bincount(codes, weight)[codes]  # 1 in every group
        squares = np.bincount(codes, weight**2)
        # (1/n_g + 1/n_h) over the number of pairs, n the effective rows: the noise in the blocks.
        self.pair_noise = [float(squares[g] + squares[h]) / len(self._pairs) for g, h in self._pairs]
        order, first = _equal_rows(rotated, codes)
        self._rows, self._weight = rotated[order[first]], np.add.reduceat(weight[order], first)
        bounds = np.searchsorted(codes[order[first]], np.arange(n_groups + 1))
        self._parts = [slice(a, b) for a, b in pairwise(bounds)]
        self._first = np.concatenate([[0], np.cumsum(self.bins)])  # bin of each group
        # The bin of each row; by columns, so that a product reads rows in the order in which they lie in memory.
        columns = np.zeros(len(first), dtype=np.int32), np.arange(len(first) + 1, dtype=np.int32)
        self._indicator = scipy.sparse.csc_array((self._weight, *columns), shape=(int(self._first[-1]), len(first)))

    def outputs(self, v: Array) -> Array:
        """``z_i·v`` of the different rows, group by group."""
        return np.asarray(self._rows @ v)

    def pair_blocks(self, outputs: Array, *, tie: float = 0.0) -> list[Array]:
        """For each pair the block (bins, r) B_gh, with ``T ≈ Σ ‖B_gh v‖²``: differences of mean rows in quantile bins.

        Rows whose outputs lie within ``tie`` of their neighbours share their levels, so that their order is of no
        effect; a row that an edge cuts belongs to both bins in parts.
        """
        above = [self._divide(g, outputs[part], tie) for g, part in enumerate(self._parts)]
        sums = np.split(np.asarray(self._indicator @ self._rows), self._first[1:-1])
        for group, over in zip(sums, above, strict=True):
            group[:-1] -= over
            group[1:] += over
        blocks = []
        for g, h in self._pairs:
            bins = min(len(sums[g]), len(sums[h]))  # those of the coarser
            a, b = (sums[k].reshape(bins, -1, sums[k].shape[1]).sum(axis=1) for k in (g, h))
            blocks.append(np.sqrt(bins / len(self._pairs)) * (a - b))
        return blocks

    def _divide(self, g: int, outputs: Array, tie: float) -> Array:
        """Put the rows of a group into its bins, and return (bins − 1, r) what lies above the edges that cut them."""
        part, edges = self._parts[g], np.arange(1, self.bins[g]) / self.bins[g]
        rows, weight, order = self._rows[part], self._weight[part], np.argsort(outputs)
        starts = np.flatnonzero(np.diff(outputs[order], prepend=-inf) > tie)  # of rows that share their levels
        ends = np.append(starts[1:], len(order))
        levels = np.cumsum(weight[order])[ends - 1]
        cut = np.searchsorted(levels, edges)  # the rows that an edge cuts, or that end there; they go below it
        bins = np.arange(self._first[g], self._first[g + 1])
        self._indicator.indices[part][order] = np.repeat(bins, np.diff(ends[cut], prepend=0, append=len(order)))
        share = (levels[cut] - edges) / (levels[cut] - np.append(0.0, levels)[cut])
        if len(starts) == len(order) or not len(cut):
            tied = order[cut]
            return np.asarray((share * weight[tied])[:, None] * rows[tied])
        cut, which = np.unique(cut, return_inverse=True)
        tied = order[np.concatenate([np.arange(starts[i], ends[i]) for i in cut])]
        sizes = ends[cut] - starts[cut]
        sums = np.add.reduceat(weight[tied, None] * rows[tied], np.cumsum(sizes) - sizes)
        return np.asarray(share[:, None] * sums[which])
