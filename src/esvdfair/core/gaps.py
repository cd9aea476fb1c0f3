"""The gaps between groups after a linear layer, and the explainable SVD that splits them into directions.

A layer computes ``z = x Wᵀ + b``, W is m × n. For groups g < h, ``d_gh = x̄_g − x̄_h`` (1 × n) and
``M_gh = Cov_g − Cov_h`` (n × n). After the layer,

    mean gap        d_e² = Σ ‖d_gh Wᵀ‖²
    covariance gap  d_v² = Σ ‖W M_gh Wᵀ‖_F²

A factor S with ``SSᵀ = Σ d_ghᵀd_gh + εI`` (mean) or ``SSᵀ = Σ|M_gh|`` (covariance) turns them into singular values:
with ``W S = Σ σ_i u_i v_iᵀ``, ``d_e² = Σσ_i² − ε tr(WWᵀ)`` and ``d_v² ≤ Σσ_i⁴``.
"""

from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray
from scipy.linalg.lapack import dpotrf, dpstrf

from esvdfair.core.moments import GroupMoments

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExplainableSVD:
    """``W S = Σ σ_i u_i v_iᵀ`` and what moving each σ_i costs.

    Attributes
    ----------
    factor : (n, q) S
    u : (m, r) left singular vectors: directions of the layer's output
    sigma : (r,) singular values: the gap along them
    v : (q, r) right singular vectors
    step : (r, n) rows p_i; raising σ_i by 1 adds ``u_i p_i`` to the weight
    cost : (r,) k_i, the squared change of the layer's outputs (summed over rows) when σ_i moves by 1
    """

    factor: Array
    u: Array
    sigma: Array
    v: Array
    step: Array
    cost: Array

    def change(self, sigma_after: Array) -> Array:
        """(m, n) change of the weight that takes σ to σ'."""
        return (self.u * (sigma_after - self.sigma)) @ self.step


def mean_differences(moments: GroupMoments) -> Array:
    """(pairs, n) D, one row ``x̄_g − x̄_h`` for each pair g < h."""
    moments.require_groups()
    means = moments.means
    first, second = np.triu_indices(len(means), k=1)
    return means[first] - means[second]


def covariance_differences(moments: GroupMoments) -> Array:
    """(pairs, n, n) ``Cov_g − Cov_h`` for each pair g < h."""
    covariances = moments.covariances()
    first, second = np.triu_indices(len(covariances), k=1)
    return covariances[first] - covariances[second]


def mean_gap(weight: ArrayLike, moments: GroupMoments) -> float:
    """``d_e² = Σ ‖d_gh Wᵀ‖²``, the squared distance between group means after the layer."""
    return float(np.sum((mean_differences(moments) @ np.asarray(weight, dtype=np.float64).T) ** 2))


def covariance_gap(weight: ArrayLike, moments: GroupMoments) -> float:
    """``d_v² = Σ ‖W M_gh Wᵀ‖_F²``, the squared distance between group covariances after the layer."""
    w = np.asarray(weight, dtype=np.float64)
    return float(sum(np.sum((w @ m @ w.T) ** 2) for m in covariance_differences(moments)))


def mean_factor(moments: GroupMoments, epsilon: float) -> Array:
    """(n, n) lower triangular S_e with ``S_e S_eᵀ = DᵀD + εI`` (Lemma 1).

    Differs from the paper: its proof prints ``(x̄₁−x̄₂)(x̄₁−x̄₂)ᵀ``, a number for row vectors.
    """
    d = mean_differences(moments)
    factor: Array = scipy.linalg.cholesky(d.T @ d + epsilon * np.eye(d.shape[1]), lower=True)
    return factor


def covariance_axes(moments: GroupMoments) -> tuple[Array, Array]:
    """Q (n, q) and |λ| (q,) with ``S_v = Q|Λ|^½``, ``S_v S_vᵀ = Σ|M_gh|``, over the non-zero eigenvalues.

    A difference of covariances that is nothing but their rounding counts as none, so that groups that are alike are
    left alone.

    Differs from the paper: Algorithm 1 takes the spectrum of W and leaves out the square root.
    """
    differences = covariance_differences(moments)
    matrix = differences[0] if len(differences) == 1 else np.sum([_absolute(m) for m in differences], axis=0)
    values, vectors = scipy.linalg.eigh(matrix)
    magnitude = np.abs(values)
    spread = max(np.diag(covariance).max() for covariance in moments.covariances())
    rounding = max(len(values) * magnitude.max(), max(len(values), 64) * spread) * np.finfo(np.float64).eps
    live = magnitude > rounding
    return vectors[:, live], magnitude[live]


def _absolute(matrix: Array) -> Array:
    values, vectors = scipy.linalg.eigh(matrix)
    absolute: Array = (vectors * np.abs(values)) @ vectors.T
    return absolute


def scatter_about(moments: GroupMoments, *, centred: bool) -> Array:
    """(n, n) C: ``XᵀX`` over all rows, or the same about the mean."""
    scatter = moments.pooled_scatter()
    if not centred:
        mean = moments.pooled_mean()
        scatter = scatter + moments.counts.sum() * np.outer(mean, mean)
    return scatter


def whitener(matrix: Array) -> tuple[Array, Array]:
    """L (n, r) and a left inverse (r, n) with ``matrix = L Lᵀ``, over the range of a positive semi-definite matrix.

    Columns are brought to unit scale before the eigendecomposition, so that a feature in small units is not
    mistaken for a dead one.
    """
    scale = np.sqrt(np.diag(matrix))
    scale = np.where(scale > 0, scale, 1.0)
    values, vectors = scipy.linalg.eigh(matrix / np.outer(scale, scale))
    live = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)
    root = np.sqrt(values[live])
    return scale[:, None] * vectors[:, live] * root, (vectors[:, live] / root).T / scale


def scatter_factor(matrix: Array) -> Array:
    """(n, r) F with ``matrix = F Fᵀ`` for a positive semi-definite matrix of rank r.

    Plain Cholesky, or with pivots, at unit scale, when the matrix is singular.
    """
    scale = np.sqrt(np.diag(matrix))
    scale = np.where(scale > 0, scale, 1.0)
    unit = matrix / np.outer(scale, scale)
    plain, failed = dpotrf(unit, lower=1, clean=1)
    if not failed and np.diag(plain).min() ** 2 > len(unit) * np.finfo(np.float64).eps:
        lower, pivots, rank = plain, np.arange(1, len(unit) + 1), len(unit)
    else:
        lower, pivots, rank, _ = dpstrf(unit, lower=1)
    factor = np.empty((len(matrix), rank))
    factor[pivots - 1] = np.tril(lower)[:, :rank]
    return scale[:, None] * factor


def explain_mean(
    weight: ArrayLike, moments: GroupMoments, *, epsilon: float, second_moment_factor: Array | None = None
) -> ExplainableSVD:
    """The paper's SVD for the mean gap: ``W S_e``, ``k_i = ‖v_iᵀ S_e⁻¹ F‖²`` with ``XᵀX = F Fᵀ``."""
    w = np.asarray(weight, dtype=np.float64)
    factor = mean_factor(moments, epsilon)
    u, sigma, vt = _svd(w @ factor)
    # vᵀ S⁻¹ as the solution of Sᵀ p = v
    step = scipy.linalg.solve_triangular(factor, vt.T, lower=True, trans="T").T
    return ExplainableSVD(
        factor, u, sigma, vt.T, step, _cost(step, _second_moment_factor(moments, second_moment_factor))
    )


def explain_covariance(
    weight: ArrayLike, moments: GroupMoments, *, second_moment_factor: Array | None = None
) -> ExplainableSVD:
    """The paper's SVD for the covariance gap: ``W S_v``, ``k_i = ‖v_iᵀ S_v⁺ F‖²`` with ``XᵀX = F Fᵀ``."""
    w = np.asarray(weight, dtype=np.float64)
    axes, magnitude = covariance_axes(moments)
    root = np.sqrt(magnitude)
    factor = axes * root
    u, sigma, vt = _svd(w @ factor)
    step = (vt / root) @ axes.T  # vᵀ S⁺
    return ExplainableSVD(
        factor, u, sigma, vt.T, step, _cost(step, _second_moment_factor(moments, second_moment_factor))
    )


def explain_covariance_optimal(weight: ArrayLike, moments: GroupMoments, *, centred: bool) -> ExplainableSVD:
    """The same singular values, with the cheapest change of weight that moves each of them alone (DESIGN 2.2).

    ``A = (SᵀC⁺S)⁺``, ``k_i = v_iᵀ A v_i``, ``p_i = v_iᵀ A Sᵀ C⁺``. With ``C = LLᵀ`` and ``T = L⁺Q``, so that
    ``L⁺S = T|Λ|^½``, this is ``p_i = (v_iᵀ|Λ|^{-½} T⁺) L⁺`` and ``k_i = ‖v_iᵀ|Λ|^{-½} T⁺‖²``.

    Differs from the paper: its ``S⁺`` loses ``W(I − SS⁺)`` when M is singular; this change keeps it.
    """
    w = np.asarray(weight, dtype=np.float64)
    axes, magnitude = covariance_axes(moments)
    root = np.sqrt(magnitude)
    factor = axes * root
    u, sigma, vt = _svd(w @ factor)
    _, inverse = whitener(scatter_about(moments, centred=centred))
    whitened_step = (vt / root) @ scipy.linalg.pinv(inverse @ axes)
    return ExplainableSVD(factor, u, sigma, vt.T, whitened_step @ inverse, np.sum(whitened_step**2, axis=1))


def _svd(matrix: Array) -> tuple[Array, Array, Array]:
    u, sigma, vt = scipy.linalg.svd(matrix, full_matrices=False)
    return u, sigma, vt


def _second_moment_factor(moments: GroupMoments, given: Array | None) -> Array:
    return scatter_factor(scatter_about(moments, centred=False)) if given is None else given


def _cost(step: Array, factor: Array) -> Array:
    """k_i = ‖p_i F‖², and 0 where that is nothing but rounding.

    As a squared norm it cannot come out negative; the direct product ``p C pᵀ`` can, hugely.
    """
    moved = step @ factor
    cost = np.einsum("ij,ij->i", moved, moved)
    rounding = (np.finfo(np.float64).eps * len(factor)) ** 2 * np.sum(step**2, axis=1) * np.sum(factor**2)
    return np.where(cost > rounding, cost, 0.0)
