"""The gaps between groups after a linear layer, and the explainable SVD that splits them into directions.

A layer computes ``z = x Wᵀ + b``, W is m × n. For groups g < h, ``d_gh = x̄_g − x̄_h`` (1 × n) and
``M_gh = Cov_g − Cov_h`` (n × n). After the layer,

    squared mean gap        d_e² = Σ ‖d_gh Wᵀ‖²
    squared covariance gap  d_v² = Σ ‖W M_gh Wᵀ‖_F²

A factor S with ``SSᵀ = Σ d_ghᵀd_gh + εI`` (mean) or ``SSᵀ = Σ|M_gh|`` (covariance) turns them into singular values:
with ``W S = Σ σ_i u_i v_iᵀ``, ``d_e² = Σσ_i² − ε tr(WWᵀ)`` and ``d_v² ≤ Σσ_i⁴``.
"""

from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray
from scipy.linalg.lapack import dpocon, dpotrf, dpstrf, dtrtri

from esvdfair.core.moments import GroupMoments

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExplainableSVD:
    """``W S = Σ σ_i u_i v_iᵀ`` and what moving each σ_i costs."""

    factor: Array  # (n, q) S
    u: Array  # (m, r) directions of the layer's output
    sigma: Array  # (r,) the gap along them
    v: Array  # (q, r) right singular vectors
    step: Array  # (r, n) rows p_i; raising σ_i by 1 adds u_i p_i to the weight
    cost: Array  # (r,) k_i, the squared change of the layer's outputs, summed over rows, when σ_i moves by 1
    sign: Array  # (q,) of the eigenvalue of M behind each column of S; 1 for a positive semi-definite matrix

    def change(self, sigma_after: Array) -> Array:
        """(m, n) change of the weight that takes σ to σ'."""
        return (self.u * (sigma_after - self.sigma)) @ self.step

    def output_change(self, sigma_after: Array) -> float:
        """``‖ΔZ‖_F² = Σ k_i (σ'_i − σ_i)²``: what :meth:`change` does to the layer's outputs, summed over the rows.

        No cross terms, because the u_i are orthogonal, or the p_i under the scatter of the inputs.
        """
        return float(self.cost @ (sigma_after - self.sigma) ** 2)


def covariance_differences(moments: GroupMoments) -> Array:
    """(pairs, n, n) ``Cov_g − Cov_h`` for each pair g < h."""
    covariances = moments.covariances()
    first, second = np.triu_indices(len(covariances), k=1)
    return covariances[first] - covariances[second]


def squared_mean_gap(weight: ArrayLike, moments: GroupMoments) -> float:
    """``d_e² = Σ ‖d_gh Wᵀ‖²``, the squared distance between group means after the layer."""
    return float(np.sum((moments.mean_differences() @ np.asarray(weight, dtype=np.float64).T) ** 2))


def squared_covariance_gap(weight: ArrayLike, moments: GroupMoments) -> float:
    """``d_v² = Σ ‖W M_gh Wᵀ‖_F²``, the squared distance between group covariances after the layer."""
    w = np.asarray(weight, dtype=np.float64)
    return float(sum(np.sum((w @ m @ w.T) ** 2) for m in covariance_differences(moments)))


def mean_factor(moments: GroupMoments, epsilon: float) -> Array:
    """(n, n) symmetric S_e with ``S_e S_eᵀ = DᵀD + εI`` (Lemma 1).

    The paper takes Cholesky's. Every factor gives the same σ_i, u_i and costs; this one is a multiple of the identity
    but for the few directions of D, so that products cost next to nothing.

    Differs from the paper: its proof prints ``(x̄₁−x̄₂)(x̄₁−x̄₂)ᵀ``, a number for row vectors.
    """
    return _times_power(np.eye(moments.width), moments, epsilon, 0.5)


def _times_power(matrix: Array, moments: GroupMoments, epsilon: float, power: float) -> Array:
    """(m, n) ``A (DᵀD + εI)^p``, for A (m, n), in O(m n) operations for each direction of D."""
    _, s, directions = scipy.linalg.svd(moments.mean_differences(), full_matrices=False)
    rest = epsilon**power
    product: Array = rest * matrix + ((matrix @ directions.T) * ((s**2 + epsilon) ** power - rest)) @ directions
    return product


def fourth_powers(transformed: Array, sign: Array) -> tuple[float, float]:
    """``Σσ⁴`` and, for two groups, ``d_v²`` of a layer, from ``T = W S`` (m, q) and the signs of Λ (q,).

    ``W M Wᵀ = T sign(Λ) Tᵀ = P − N`` with P and N the parts of positive and negative eigenvalues, and ``T Tᵀ = P + N``.
    Any orthogonal matrix on the left of T leaves both as they are, so that ``ΣVᵀ`` may stand for ``W S = UΣVᵀ``.
    """
    positive, negative = (part @ part.T for part in (transformed[:, sign > 0], transformed[:, sign < 0]))
    return float(np.sum((positive + negative) ** 2)), float(np.sum((positive - negative) ** 2))


def covariance_spectrum(moments: GroupMoments, unit: Array | None = None) -> tuple[Array, Array]:
    """Q (n, q) and λ (q,), the non-zero spectrum of M for two groups, of ``Σ|M_gh|`` for more.

    With ``unit`` (n,) of inputs that are measured in it: of ``M / (unit unitᵀ)``. A difference of covariances that is
    nothing but their rounding counts as none, so that groups that are alike are left alone.

    Differs from the paper: Algorithm 1 takes the spectrum of W and leaves out the square root.
    """
    differences, spread = covariance_differences(moments), _spreads(moments)

    def absolute(matrix: Array) -> Array:
        values, vectors = scipy.linalg.eigh(matrix, driver="evd")
        return np.asarray((vectors * np.abs(values)) @ vectors.T)

    if unit is not None:
        differences, spread = differences / np.outer(unit, unit), spread / unit**2
    matrix = differences[0] if len(differences) == 1 else np.sum([absolute(m) for m in differences], axis=0)
    values, vectors = scipy.linalg.eigh(matrix, driver="evd")
    magnitude = np.abs(values)
    rounding = max(len(values) * magnitude.max(), max(len(values), 64) * spread.max()) * np.finfo(np.float64).eps
    live = magnitude > rounding
    return vectors[:, live], values[live]


def _spreads(moments: GroupMoments) -> Array:
    """(n,) largest variance of each input in any group."""
    return np.asarray(np.diagonal(moments.covariances(), axis1=1, axis2=2).max(axis=0))


def scatter_about(moments: GroupMoments, *, centred: bool) -> Array:
    """(n, n) C: ``XᵀX`` over all rows, or the same about the mean."""
    scatter, mean = moments.pooled_scatter(), moments.pooled_mean()
    return scatter if centred else scatter + moments.pooled_weight * np.outer(mean, mean)


def whitener(matrix: Array) -> tuple[Array, Array]:
    """L (n, r) and a left inverse (r, n) with ``matrix = L Lᵀ``, over the range of a positive semi-definite matrix.

    Columns are brought to unit scale first, so that a feature in small units is not mistaken for a dead one. L is
    triangular when the matrix is regular, and comes from the spectrum when it is not.
    """
    unit, scale = _unit_scale(matrix)
    lower = _regular_cholesky(unit)
    if lower is not None:
        return scale[:, None] * lower, dtrtri(lower, lower=1)[0] / scale
    values, vectors = scipy.linalg.eigh(unit, driver="evd")
    live = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)
    root = np.sqrt(values[live])
    return scale[:, None] * vectors[:, live] * root, (vectors[:, live] / root).T / scale


def scatter_factor(matrix: Array) -> Array:
    """(n, r) F with ``matrix = F Fᵀ`` for a positive semi-definite matrix of rank r."""
    unit, scale = _unit_scale(matrix)
    regular = _regular_cholesky(unit)
    if regular is not None:
        return scale[:, None] * regular
    lower, pivots, rank, _ = dpstrf(unit, lower=1)
    factor = np.empty((len(matrix), rank))
    factor[pivots - 1] = np.tril(lower)[:, :rank]
    return scale[:, None] * factor


def _unit_scale(matrix: Array) -> tuple[Array, Array]:
    """The matrix with a diagonal of ones, and the scale (n,) that was taken off its rows and columns."""
    scale = np.sqrt(np.diag(matrix))
    scale = np.where(scale > 0, scale, 1.0)
    return matrix / np.outer(scale, scale), scale


def _regular_cholesky(matrix: Array) -> Array | None:
    """(n, n) lower triangular factor; None unless every eigenvalue stands clear of the rounding of the largest."""
    lower, failed = dpotrf(matrix, lower=1, clean=1)
    if failed:
        return None
    reciprocal_condition, _ = dpocon(lower, np.abs(matrix).sum(axis=0).max(), uplo="L")
    clear = reciprocal_condition > 10 * len(matrix) * np.finfo(np.float64).eps  # 10: LAPACK's is an estimate
    return lower if clear else None


def explain_mean(
    weight: ArrayLike, moments: GroupMoments, *, epsilon: float, second_moment_factor: Array | None = None
) -> ExplainableSVD:
    """The paper's SVD for the mean gap: ``W S_e``, ``k_i = ‖v_iᵀ S_e⁻¹ F‖²`` with ``XᵀX = F Fᵀ``."""
    w = np.asarray(weight, dtype=np.float64)
    factor = mean_factor(moments, epsilon)
    u, sigma, vt = scipy.linalg.svd(_times_power(w, moments, epsilon, 0.5), full_matrices=False)  # W S
    step = _times_power(vt, moments, epsilon, -0.5)  # vᵀ S⁻¹
    cost = _cost(step, moments, second_moment_factor)
    return ExplainableSVD(factor, u, sigma, vt.T, step, cost, np.ones(len(factor)))


def explain_covariance(
    weight: ArrayLike, moments: GroupMoments, *, second_moment_factor: Array | None = None
) -> ExplainableSVD:
    """The paper's SVD for the covariance gap: ``W S_v``, ``k_i = ‖v_iᵀ S_v⁺ F‖²`` with ``XᵀX = F Fᵀ``."""
    w = np.asarray(weight, dtype=np.float64)
    axes, values = covariance_spectrum(moments)
    root = np.sqrt(np.abs(values))
    factor = axes * root
    u, sigma, vt = scipy.linalg.svd(w @ factor, full_matrices=False)
    step = (vt / root) @ axes.T  # vᵀ S⁺
    cost = _cost(step, moments, second_moment_factor)
    return ExplainableSVD(factor, u, sigma, vt.T, step, cost, np.sign(values))


def explain_mean_optimal(weight: ArrayLike, moments: GroupMoments, *, whitening: tuple[Array, Array]) -> ExplainableSVD:
    """The mean gap split so that each part can be moved alone at the least cost (docs/method.md 2.1).

    With ``whitening`` L and L⁺, ``C = LLᵀ`` and ``D L⁺ᵀ = Σ s_j a_j v_jᵀ``, at most G − 1 directions,
    ``W Dᵀ = Σ σ_j u_j a_jᵀ`` where ``σ_j = s_j‖W L v_j‖``, ``p_j = v_jᵀL⁺/s_j`` and ``k_j = 1/s_j²``. Here the u_j are
    not orthogonal.
    """
    root, inverse = whitening
    differences = moments.mean_differences()
    a, s, vt = scipy.linalg.svd(differences @ inverse.T, full_matrices=False)
    keep = s > len(s) * np.finfo(np.float64).eps * s.max(initial=0.0)
    a, s, vt = a[:, keep], s[keep], vt[keep]
    moved = np.asarray(weight, dtype=np.float64) @ (root @ vt.T)  # (m, r)   W L v_j
    size = np.linalg.norm(moved, axis=0)
    u = np.divide(moved, size, out=np.zeros_like(moved), where=size > 0)
    step = (vt @ inverse) / s[:, None]
    return ExplainableSVD(differences.T, u, s * size, a, step, 1.0 / s**2, np.ones(len(differences)))


def explain_covariance_optimal(
    weight: ArrayLike, moments: GroupMoments, *, whitening: tuple[Array, Array]
) -> ExplainableSVD:
    """Singular values in the inputs' own units, with the cheapest change of weight that moves each of them alone.

    docs/method.md 2.2: ``A = (SᵀC⁺S)⁺``, ``k_i = v_iᵀ A v_i``, ``p_i = v_iᵀ A Sᵀ C⁺``. With ``C = LLᵀ``, every input in
    units of its spread d and ``T = L⁺dQ``, so that ``S = dQ|Λ|^½`` and ``L⁺S = T|Λ|^½``, this is
    ``p_i = (v_iᵀ|Λ|^{-½} T⁺) L⁺`` and ``k_i = ‖v_iᵀ|Λ|^{-½} T⁺‖²``. When S and C are invertible ``T⁺ = Qᵀd⁻¹L``.

    Differs from the paper: its ``S⁺`` loses ``W(I − SS⁺)`` when M is singular; this change keeps it. And it takes the
    spectrum of M in whatever units the inputs come: scaling a unit up and its weights down, which leaves the network
    as it is, changes the paper's edit, and inputs in small units are lost to rounding. With d it changes nothing.
    """
    w = np.asarray(weight, dtype=np.float64)
    spread = np.sqrt(_spreads(moments))
    unit = np.where(spread > 0, spread, 1.0)
    axes, values = covariance_spectrum(moments, unit)
    root = np.sqrt(np.abs(values))
    factor = unit[:, None] * axes * root
    u, sigma, vt = scipy.linalg.svd(w @ factor, full_matrices=False)
    lower, inverse = whitening
    if axes.shape == lower.shape == (w.shape[1], w.shape[1]):
        step = (vt / root) @ axes.T / unit
        moved = step @ lower
    else:
        moved = (vt / root) @ scipy.linalg.pinv(inverse @ (unit[:, None] * axes))
        step = moved @ inverse
    return ExplainableSVD(factor, u, sigma, vt.T, step, np.sum(moved**2, axis=1), np.sign(values))


def _cost(step: Array, moments: GroupMoments, factor: Array | None) -> Array:
    """k_i = ‖p_i F‖², which unlike the product ``p C pᵀ`` cannot come out negative; 0 where that is but rounding."""
    factor = scatter_factor(scatter_about(moments, centred=False)) if factor is None else factor
    moved = step @ factor
    cost = np.einsum("ij,ij->i", moved, moved)
    with np.errstate(over="ignore", invalid="ignore"):
        rounding = (np.finfo(np.float64).eps * len(factor)) ** 2 * np.sum(step**2, axis=1) * np.sum(factor**2)
    if not np.isfinite(rounding).all():
        raise ValueError("the inputs of the layer are so small that squares leave float64; give them in another unit.")
    return np.where(cost > rounding, cost, 0.0)
