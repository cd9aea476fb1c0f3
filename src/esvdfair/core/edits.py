"""Closed-form edits of one linear layer that bring the groups' means or covariances together after it."""

from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray

from esvdfair.core import gaps
from esvdfair.core.moments import GroupMoments
from esvdfair.core.solvers import Shrinkage, solve_covariance, solve_mean

Array = NDArray[np.float64]

PAPER_REDUCTIONS = (15.0, 150.0)
"""How many times smaller the paper makes ``Σσ²`` of the mean and ``Σσ⁴`` of the covariance."""


@dataclass(frozen=True)
class LayerEdit:
    """A layer before and after an edit, and the account of it.

    Attributes
    ----------
    layer : name of the layer in its model, "" when unknown
    weight_before, weight_after : (m, n)
    bias_before, bias_after : (m,), or None for a layer without bias
    sigma_before, sigma_after : (r,) singular values: the gap, direction by direction
    multiplier : γ of the solution; 0 when the budget was met already
    budget : what the constrained quantity (Σσ'², Σσ'⁴ or d_e²) may be at most
    achieved : what it is, measured on ``weight_after``
    converged : whether the multiplier was found to machine precision
    output_change : ``‖Z' − Z‖_F²``, squared change of the layer's outputs summed over the rows
    gap_before, gap_after : d_e² (mean edits) or d_v² (covariance edits); ``gap_after`` of the covariance edit within
        :func:`edit_exact` is that of the layer as it ends, after the mean edit
    """

    layer: str
    weight_before: Array
    weight_after: Array
    bias_before: Array | None
    bias_after: Array | None
    sigma_before: Array
    sigma_after: Array
    multiplier: float
    budget: float
    achieved: float
    converged: bool
    output_change: float
    gap_before: float
    gap_after: float


@dataclass(frozen=True)
class _Layer:
    """Checked inputs of an edit."""

    weight: Array
    bias: Array | None
    name: str

    @classmethod
    def check(cls, weight: ArrayLike, bias: ArrayLike | None, name: str, moments: GroupMoments) -> "_Layer":
        w = np.array(weight, dtype=np.float64)
        if w.ndim != 2 or w.shape[1] != moments.width:
            raise ValueError(
                f"the weight has shape {w.shape}, the moments have width {moments.width}; expected (outputs, "
                f"{moments.width}). Gather the moments of the inputs of this very layer."
            )
        b = None if bias is None else np.array(bias, dtype=np.float64)
        if b is not None and b.shape != (w.shape[0],):
            raise ValueError(f"the bias has shape {b.shape}, expected ({w.shape[0]},) for this weight.")
        if not np.isfinite(w).all() or (b is not None and not np.isfinite(b).all()):
            raise ValueError("the layer's weight or bias holds NaN or infinite values; it cannot be repaired.")
        return cls(w, b, name)

    def whitening(self, moments: GroupMoments) -> tuple[Array, Array]:
        """L and L⁺ of the scatter C of the inputs: about their mean where a bias can follow it, else about zero."""
        return gaps.whitener(gaps.scatter_about(moments, centred=self.bias is not None))


def edit_mean_paper(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float | None = None,
    budget: float | None = None,
    epsilon: float = 1e-5,
    bias: ArrayLike | None = None,
    layer: str = "",
) -> LayerEdit:
    """The paper's mean edit: shrink the singular values of ``W S_e`` until ``Σσ'² ≤ c_e``.

    Parameters
    ----------
    weight : (m, n) of the layer, m > 1
    moments : moments of the layer's inputs
    reduction : c̃_e ≥ 1, the budget is ``c_e = Σσ²/c̃_e``; inf removes everything. Give this or ``budget``.
    budget : c_e itself
    epsilon : ε of ``S_e S_eᵀ = DᵀD + εI``
    bias, layer : carried into the result unchanged

    Raises
    ------
    ValueError
        For a layer with one output: there W S_e has one singular value, and shrinking it scales the predictions
        towards zero instead of closing a gap.
    """
    checked = _Layer.check(weight, bias, layer, moments)
    _refuse_single_output(checked.weight)
    return _edit_mean_paper(checked, moments, reduction, budget, epsilon, None)


def edit_covariance_paper(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float | None = None,
    budget: float | None = None,
    bias: ArrayLike | None = None,
    layer: str = "",
) -> LayerEdit:
    """The paper's covariance edit: shrink the singular values of ``W S_v`` until ``Σσ'⁴ ≤ c_v``.

    ``W' = (Σσ'_i u_i v_iᵀ) S_v⁺``. When M is singular this drops what W does outside its range;
    :func:`edit_covariance` keeps it. The budget is ``Σσ⁴/reduction``.
    """
    checked = _Layer.check(weight, bias, layer, moments)
    return _edit_covariance_paper(checked, moments, reduction, budget, None)


def edit_paper(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    mean_reduction: float | None = PAPER_REDUCTIONS[0],
    covariance_reduction: float | None = PAPER_REDUCTIONS[1],
    epsilon: float = 1e-5,
    bias: ArrayLike | None = None,
    layer: str = "",
) -> tuple[LayerEdit, ...]:
    """Algorithm 1: the covariance edit, then the mean edit of its result. A reduction of None leaves that step out."""
    checked = _Layer.check(weight, bias, layer, moments)
    _refuse_single_output(checked.weight)
    factor = gaps.scatter_factor(gaps.scatter_about(moments, centred=False))
    edits = []
    if covariance_reduction is not None:
        edits.append(_edit_covariance_paper(checked, moments, covariance_reduction, None, factor))
        checked = _Layer(edits[-1].weight_after, checked.bias, layer)
    if mean_reduction is not None:
        edits.append(_edit_mean_paper(checked, moments, mean_reduction, None, epsilon, factor))
    return tuple(edits)


def edit_mean(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float | None = None,
    budget: float | None = None,
    bias: ArrayLike | None = None,
    layer: str = "",
) -> LayerEdit:
    """The exact mean edit (docs/method.md 2.1): the least change of the layer's outputs with ``d_e² ≤ c_e``.

    ``min tr((W−W')C(W−W')ᵀ)`` subject to ``‖D W'ᵀ‖² ≤ c_e``, where D holds the mean difference of every pair of
    groups and C is the scatter of the inputs: about their mean when the layer has a bias, which then moves to
    ``b' = b + (W−W')x̄``, the joint optimum; about zero when it has none. The budget is ``d_e²/reduction``;
    ``reduction=inf`` is least-squares concept erasure (LEACE).

    With ``C = LLᵀ`` and ``D L⁺ᵀ = Σ s_j a_j v_jᵀ`` the solution shrinks ``σ_j = s_j‖W L v_j‖`` at cost ``1/s_j²``, the
    problem of :func:`esvdfair.core.solvers.solve_mean`, with at most G − 1 directions.

    Differs from the paper: it states that this problem has no closed form, and restricts it.
    """
    checked = _Layer.check(weight, bias, layer, moments)
    return _edit_mean(checked, moments, reduction, budget, checked.whitening(moments))


def edit_covariance(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float | None = None,
    budget: float | None = None,
    bias: ArrayLike | None = None,
    layer: str = "",
) -> LayerEdit:
    """The optimal covariance edit within its singular directions (docs/method.md 2.2), budget ``c_v = Σσ⁴/reduction``.

    The singular directions are those of the paper for inputs in units of their spread, so that scaling a unit up and
    its weights down changes nothing. It meets ``Σσ'⁴ ≤ c_v`` as :func:`edit_covariance_paper` does, keeps what W does
    outside the range of M, and on inputs of unit spread never changes the layer's outputs more. With a bias the inputs
    are centred and the bias moves with the weight.
    """
    checked = _Layer.check(weight, bias, layer, moments)
    return _edit_covariance(checked, moments, reduction, budget, checked.whitening(moments))


def edit_exact(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    mean_reduction: float | None = PAPER_REDUCTIONS[0],
    covariance_reduction: float | None = PAPER_REDUCTIONS[1],
    bias: ArrayLike | None = None,
    layer: str = "",
) -> tuple[LayerEdit, ...]:
    """The optimal covariance edit, then the exact mean edit of its result: Algorithm 1 without its restrictions.

    The mean edit moves the covariance gap again, a little up or down: the first account says where it ends.
    """
    checked = _Layer.check(weight, bias, layer, moments)
    whitening = checked.whitening(moments)
    edits: list[LayerEdit] = []
    if covariance_reduction is not None:
        edits.append(_edit_covariance(checked, moments, covariance_reduction, None, whitening))
        checked = _Layer(edits[-1].weight_after, edits[-1].bias_after, layer)
    if mean_reduction is not None:
        edits.append(_edit_mean(checked, moments, mean_reduction, None, whitening))
    if len(edits) == 2:
        edits[0] = replace(edits[0], gap_after=gaps.squared_covariance_gap(edits[1].weight_after, moments))
    return tuple(edits)


def account(
    before: ArrayLike,
    after: ArrayLike,
    moments: GroupMoments,
    *,
    bias_before: Array | None,
    bias_after: Array | None,
    multiplier: float,
    converged: bool,
    layer: str = "",
) -> LayerEdit:
    """The account of a change that a refit made: mean gaps before and after, change of the outputs.

    ``sigma`` are the singular values of ``D Wᵀ``, so that Σσ² is d_e². The budget is what was achieved.
    """
    w, v = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    d = gaps.mean_differences(moments)
    gap_before, gap_after = gaps.squared_mean_gap(w, moments), gaps.squared_mean_gap(v, moments)
    shift = np.zeros(len(w)) if bias_before is None or bias_after is None else bias_after - bias_before
    change = np.column_stack([v - w, shift])
    mean = np.append(moments.pooled_mean(), 1.0)
    scatter = np.zeros((len(mean), len(mean)))
    scatter[:-1, :-1] = moments.pooled_scatter()
    scatter += moments.pooled_weight * np.outer(mean, mean)
    return LayerEdit(
        layer=layer,
        weight_before=w,
        weight_after=v,
        bias_before=bias_before,
        bias_after=bias_after,
        sigma_before=scipy.linalg.svdvals(d @ w.T),
        sigma_after=scipy.linalg.svdvals(d @ v.T),
        multiplier=multiplier,
        budget=gap_after,
        achieved=gap_after,
        converged=converged,
        output_change=float(np.sum((change @ scatter) * change)),
        gap_before=gap_before,
        gap_after=gap_after,
    )


def _edit_mean(
    layer: _Layer, moments: GroupMoments, reduction: float | None, budget: float | None, whitening: tuple[Array, Array]
) -> LayerEdit:
    w, (root, inverse) = layer.weight, whitening
    _, s, vt = scipy.linalg.svd(gaps.mean_differences(moments) @ inverse.T, full_matrices=False)
    keep = s > len(s) * np.finfo(np.float64).eps * s.max(initial=0.0)
    s, vt = s[keep], vt[keep]
    moved = w @ (root @ vt.T)  # (m, r)   W L v_j
    size = np.linalg.norm(moved, axis=0)
    sigma = s * size  # Σσ_j² = d_e²
    allowed = _budget(float(np.sum(sigma**2)), reduction, budget)
    solution = solve_mean(sigma, 1.0 / s**2, allowed)
    kept = np.divide(solution.sigma, sigma, out=np.ones_like(sigma), where=sigma > 0)
    after = w - (moved * (1.0 - kept)) @ (vt @ inverse)
    gap_after = gaps.squared_mean_gap(after, moments)
    return _result(
        layer,
        after,
        moments,
        sigma,
        solution,
        budget=allowed,
        achieved=gap_after,
        output_change=float(np.sum(((1.0 - kept) * size) ** 2)),  # the v_j L⁺ are orthonormal under C
        gap_before=gaps.squared_mean_gap(w, moments),
        gap_after=gap_after,
    )


def _edit_covariance(
    layer: _Layer, moments: GroupMoments, reduction: float | None, budget: float | None, whitening: tuple[Array, Array]
) -> LayerEdit:
    svd = gaps.explain_covariance_optimal(layer.weight, moments, whitening=whitening)
    allowed = _budget(float(np.sum(svd.sigma**4)), reduction, budget)
    solution = solve_covariance(svd.sigma, svd.cost, allowed)
    after = layer.weight + svd.change(solution.sigma)
    return _covariance_result(layer, after, moments, svd, solution, allowed, svd.output_change(solution.sigma))


def _edit_mean_paper(
    layer: _Layer,
    moments: GroupMoments,
    reduction: float | None,
    budget: float | None,
    epsilon: float,
    factor: Array | None,
) -> LayerEdit:
    w = layer.weight
    svd = gaps.explain_mean(w, moments, epsilon=epsilon, second_moment_factor=factor)
    allowed = _budget(float(np.sum(svd.sigma**2)), reduction, budget)
    solution = solve_mean(svd.sigma, svd.cost, allowed)
    after = w + svd.change(solution.sigma)  # S_e is invertible, so this is (Σσ'uvᵀ)S_e⁻¹
    gap_after = gaps.squared_mean_gap(after, moments)
    return _result(
        layer,
        after,
        moments,
        svd.sigma,
        solution,
        budget=allowed,
        achieved=gap_after + epsilon * float(np.sum(after**2)),  # Σσ'² = d_e² + ε tr(W'W'ᵀ)   (Theorem 1)
        output_change=svd.output_change(solution.sigma),
        gap_before=gaps.squared_mean_gap(w, moments),
        gap_after=gap_after,
        move_bias=False,
    )


def _edit_covariance_paper(
    layer: _Layer, moments: GroupMoments, reduction: float | None, budget: float | None, factor: Array | None
) -> LayerEdit:
    svd = gaps.explain_covariance(layer.weight, moments, second_moment_factor=factor)
    allowed = _budget(float(np.sum(svd.sigma**4)), reduction, budget)
    solution = solve_covariance(svd.sigma, svd.cost, allowed)
    untouched = np.array_equal(solution.sigma, svd.sigma)
    after = layer.weight.copy() if untouched else (svd.u * solution.sigma) @ svd.step
    if untouched or svd.factor.shape[0] == svd.factor.shape[1]:
        output_change = svd.output_change(solution.sigma)
    else:  # a singular M: W(I − SS⁺) is lost beside what the σ_i move
        change = after - layer.weight
        output_change = float(np.sum((change @ gaps.scatter_about(moments, centred=False)) * change))
    return _covariance_result(layer, after, moments, svd, solution, allowed, output_change, move_bias=False)


def _covariance_result(
    layer: _Layer,
    after: Array,
    moments: GroupMoments,
    svd: gaps.ExplainableSVD,
    solution: Shrinkage,
    allowed: float,
    output_change: float,
    *,
    move_bias: bool = True,
) -> LayerEdit:
    achieved, gap_after = gaps.fourth_powers(after @ svd.factor, svd.sign)
    if len(moments.labels) == 2:
        _, gap_before = gaps.fourth_powers((svd.v * svd.sigma).T, svd.sign)
    else:
        gap_before, gap_after = (gaps.squared_covariance_gap(w, moments) for w in (layer.weight, after))
    return _result(
        layer,
        after,
        moments,
        svd.sigma,
        solution,
        budget=allowed,
        achieved=achieved,
        output_change=output_change,
        gap_before=gap_before,
        gap_after=gap_after,
        move_bias=move_bias,
    )


def _result(
    layer: _Layer,
    after: Array,
    moments: GroupMoments,
    sigma: Array,
    solution: Shrinkage,
    *,
    budget: float,
    achieved: float,
    output_change: float,
    gap_before: float,
    gap_after: float,
    move_bias: bool = True,
) -> LayerEdit:
    """The account of an edit; the bias follows the mean output where the method lets it."""
    bias = layer.bias
    if move_bias and bias is not None:
        bias = bias + (layer.weight - after) @ moments.pooled_mean()  # b' = b + (W − W')x̄
    return LayerEdit(
        layer=layer.name,
        weight_before=layer.weight,
        weight_after=after,
        bias_before=layer.bias,
        bias_after=bias,
        sigma_before=sigma,
        sigma_after=solution.sigma,
        multiplier=solution.multiplier,
        budget=budget,
        achieved=achieved,
        converged=solution.converged,
        output_change=output_change,
        gap_before=gap_before,
        gap_after=gap_after,
    )


def _budget(total: float, reduction: float | None, budget: float | None) -> float:
    if (reduction is None) == (budget is None):
        raise ValueError(f"got reduction={reduction!r} and budget={budget!r}; give exactly one of them.")
    if reduction is not None:
        check_reduction(reduction)
        return total / reduction
    assert budget is not None
    if not budget >= 0:
        raise ValueError(f"budget={budget!r}; a squared gap cannot be below 0. Use 0 to remove the gap.")
    return float(budget)


def check_reduction(reduction: float) -> None:
    """Raise unless the reduction is at least 1 (inf is allowed and removes the gap)."""
    if not reduction >= 1:
        raise ValueError(
            f"reduction={reduction!r}; it says how many times smaller the squared gap becomes, so it must be at least "
            "1. Use 1 to change nothing and inf to remove the gap."
        )


def _refuse_single_output(weight: Array) -> None:
    # Differs from the paper, which is silent on m = 1.
    if weight.shape[0] == 1:
        raise ValueError(
            "this layer has one output, where the paper's mean edit only scales the predictions towards zero. "
            "Edit a hidden layer (layer=-2), or use edit_mean, which is exact for any layer."
        )
