"""Closed-form edits of one linear layer that bring the groups' means or covariances together after it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from esvdfair.core import gaps
from esvdfair.core.moments import GroupMoments

Array = NDArray[np.float64]

PAPER_REDUCTIONS = (15.0, 150.0)  # how many times smaller the paper makes Σσ² of the mean and Σσ⁴ of the covariance
_EPS = float(np.finfo(np.float64).eps)
_MET = 1 + 16 * _EPS  # a budget overrun by no more than this is met: a second edit with the same budget changes nothing


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


def edit_mean_paper(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float,
    epsilon: float = 1e-5,
    bias: ArrayLike | None = None,
    layer: str = "",
    factor: Array | None = None,
) -> LayerEdit:
    """The paper's mean edit: shrink the singular values of ``W S_e`` until ``Σσ'² ≤ Σσ²/reduction``.

    Parameters
    ----------
    weight : (m, n) of the layer, m > 1: with one output it would only scale the predictions towards zero
    moments : moments of the layer's inputs
    reduction : at least 1; inf removes everything
    epsilon : ε of ``S_e S_eᵀ = DᵀD + εI``
    bias, layer : carried into the result unchanged
    factor : F with ``XᵀX = F Fᵀ``, where it is known already
    """
    w, b = _checked(weight, bias, moments)
    if len(w) == 1:  # differs from the paper, which is silent on m = 1
        raise ValueError(
            "this layer has one output, where the paper's mean edit only scales the predictions towards zero. "
            "Edit a hidden layer (layer=-2), or use edit_mean, which is exact for any layer."
        )
    svd = gaps.explain_mean(w, moments, epsilon=epsilon, second_moment_factor=factor)
    # S_e is invertible, so that W + Σ(σ'−σ)uvᵀS_e⁻¹ is (Σσ'uvᵀ)S_e⁻¹
    return _edit(w, b, moments, svd, 2, reduction, layer, epsilon=epsilon)


def edit_covariance_paper(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float,
    bias: ArrayLike | None = None,
    layer: str = "",
    factor: Array | None = None,
) -> LayerEdit:
    """The paper's covariance edit: shrink the singular values of ``W S_v`` until ``Σσ'⁴ ≤ Σσ⁴/reduction``.

    ``W' = (Σσ'_i u_i v_iᵀ) S_v⁺``. When M is singular this drops what W does outside its range; `edit_covariance` keeps
    it. Parameters as for `edit_mean_paper`.
    """
    w, b = _checked(weight, bias, moments)
    svd = gaps.explain_covariance(w, moments, second_moment_factor=factor)
    return _edit(w, b, moments, svd, 4, reduction, layer, drops=True)


def edit_paper(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    mean_reduction: float | None = PAPER_REDUCTIONS[0],
    covariance_reduction: float | None = PAPER_REDUCTIONS[1],
    bias: ArrayLike | None = None,
    layer: str = "",
) -> tuple[LayerEdit, ...]:
    """Algorithm 1: the covariance edit, then the mean edit of its result. A reduction of None leaves that step out."""
    factor = gaps.scatter_factor(gaps.scatter_about(moments, centred=False))
    steps = (edit_covariance_paper, covariance_reduction), (edit_mean_paper, mean_reduction)
    return tuple(_in_turn(steps, weight, bias, moments, layer=layer, factor=factor))


def edit_mean(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float,
    bias: ArrayLike | None = None,
    layer: str = "",
    whitening: tuple[Array, Array] | None = None,
) -> LayerEdit:
    """The exact mean edit (docs/method.md 2.1): the least change of the layer's outputs with ``d_e² ≤ c_e``.

    ``min tr((W−W')C(W−W')ᵀ)`` subject to ``‖D W'ᵀ‖² ≤ c_e = d_e²/reduction``, where D holds the mean difference of
    every pair of groups and C is the scatter of the inputs: about their mean when the layer has a bias, which then
    moves to ``b' = b + (W−W')x̄``, the joint optimum; about zero when it has none. ``reduction=inf`` is least-squares
    concept erasure (LEACE). ``whitening`` is L and L⁺ of C, where known already.

    Differs from the paper: it states that this problem has no closed form, and restricts it.
    """
    w, b = _checked(weight, bias, moments)
    svd = gaps.explain_mean_optimal(w, moments, whitening=whitening or _whitening(b, moments))
    return _edit(w, b, moments, svd, 2, reduction, layer, follows=True)


def edit_covariance(
    weight: ArrayLike,
    moments: GroupMoments,
    *,
    reduction: float,
    bias: ArrayLike | None = None,
    layer: str = "",
    whitening: tuple[Array, Array] | None = None,
) -> LayerEdit:
    """The optimal covariance edit within its singular directions (docs/method.md 2.2), ``Σσ'⁴ ≤ Σσ⁴/reduction``.

    The singular directions are those of the paper for inputs in units of their spread, so that scaling a unit up and
    its weights down changes nothing. It keeps what W does outside the range of M, and on inputs of unit spread never
    changes the layer's outputs more than `edit_covariance_paper`. With a bias the inputs are centred and the bias moves
    with the weight. ``whitening`` as in `edit_mean`.
    """
    w, b = _checked(weight, bias, moments)
    svd = gaps.explain_covariance_optimal(w, moments, whitening=whitening or _whitening(b, moments))
    return _edit(w, b, moments, svd, 4, reduction, layer, follows=True)


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

    Every output is taken in units of its standard deviation, so that scaling an output up and the next layer's weights
    down changes nothing; singular values, budgets, gaps and the change of the outputs are in these units. The mean edit
    moves the covariance gap again: ``gap_after`` of the first edit says where it ends.
    """
    w, b = _checked(weight, bias, moments)
    variances = np.einsum("ij,ij->i", w @ moments.pooled_scatter(), w) / moments.pooled_weight
    unit = np.sqrt(np.where(variances > 0, variances, 1.0))
    w, b = w / unit[:, None], None if b is None else b / unit
    steps = (edit_covariance, covariance_reduction), (edit_mean, mean_reduction)
    edits = _in_turn(steps, w, b, moments, layer=layer, whitening=_whitening(b, moments))
    if len(edits) == 2:
        edits[0] = replace(edits[0], gap_after=gaps.squared_covariance_gap(edits[1].weight_after, moments))
    return tuple(
        replace(
            edit,
            weight_before=edit.weight_before * unit[:, None],
            weight_after=edit.weight_after * unit[:, None],
            bias_before=None if edit.bias_before is None else edit.bias_before * unit,
            bias_after=None if edit.bias_after is None else edit.bias_after * unit,
        )
        for edit in edits
    )


def _in_turn(
    steps: Iterable[tuple[Callable[..., LayerEdit], float | None]],
    weight: ArrayLike,
    bias: ArrayLike | None,
    moments: GroupMoments,
    **shared: Any,
) -> list[LayerEdit]:
    """Each edit on the result of the one before; a reduction of None leaves one out."""
    edits: list[LayerEdit] = []
    for edit, reduction in steps:
        if reduction is not None:
            edits.append(edit(weight, moments, reduction=reduction, bias=bias, **shared))
            weight, bias = edits[-1].weight_after, edits[-1].bias_after
    return edits


def _whitening(bias: Array | None, moments: GroupMoments) -> tuple[Array, Array]:
    """L and L⁺ of the scatter C of the inputs: about their mean where a bias can follow it, else about zero."""
    return gaps.whitener(gaps.scatter_about(moments, centred=bias is not None))


def _edit(
    before: Array,
    bias: Array | None,
    moments: GroupMoments,
    svd: gaps.ExplainableSVD,
    power: int,
    reduction: float,
    layer: str,
    *,
    follows: bool = False,
    epsilon: float = 0.0,
    drops: bool = False,
) -> LayerEdit:
    """Shrink σ until ``Σσ'^power`` is within its budget, and the account of it.

    ``follows``: the bias moves to ``b' = b + (W − W')x̄``, so that the mean output stays. ``drops``: the weight is made
    of the singular directions alone, without what W does outside them.
    """
    check_reduction(reduction)
    with np.errstate(over="ignore"):
        total = float(np.sum(svd.sigma**power))
    if not np.isfinite(total):  # powers leave float64 long before the features do
        raise ValueError(
            f"the largest singular value of the gap is {svd.sigma.max():.3g}, and its power {power} leaves float64; "
            "give the features in another unit."
        )
    solution = (solve_mean if power == 2 else solve_covariance)(svd.sigma, svd.cost, total / reduction)
    after, output_change = before + svd.change(solution.sigma), svd.output_change(solution.sigma)
    if drops and not np.array_equal(solution.sigma, svd.sigma):
        after = (svd.u * solution.sigma) @ svd.step
        if svd.factor.shape[0] != svd.factor.shape[1]:  # W(I − SS⁺) is lost, beside what the σ_i move
            scatter = gaps.scatter_about(moments, centred=False)
            output_change = float(np.sum((after - before) @ scatter * (after - before)))
    if not np.abs(after).max(initial=0.0) < 1e150:  # squares of larger weights leave float64
        raise ValueError(f"the edited weights of the layer {layer!r} leave float64. Give its inputs in a larger unit.")
    measure = gaps.squared_mean_gap if power == 2 else gaps.squared_covariance_gap
    if power == 2:
        gap_before, gap_after = (measure(weight, moments) for weight in (before, after))
        achieved = gap_after + epsilon * float(np.sum(after**2))  # Σσ'² = d_e² + ε tr(W'W'ᵀ)   (Theorem 1)
    else:
        achieved, gap_after = gaps.fourth_powers(after @ svd.factor, svd.sign)
        _, gap_before = gaps.fourth_powers((svd.v * svd.sigma).T, svd.sign)
        if len(moments.labels) > 2:  # there the factor is of |M| and bounds the gap only
            gap_before, gap_after = measure(before, moments), measure(after, moments)
    return LayerEdit(
        layer=layer,
        weight_before=before,
        weight_after=after,
        bias_before=bias,
        bias_after=bias + (before - after) @ moments.pooled_mean() if follows and bias is not None else bias,
        sigma_before=svd.sigma,
        sigma_after=solution.sigma,
        multiplier=solution.multiplier,
        budget=total / reduction,
        achieved=achieved,
        converged=solution.converged,
        output_change=output_change,
        gap_before=gap_before,
        gap_after=gap_after,
    )


def _checked(weight: ArrayLike, bias: ArrayLike | None, moments: GroupMoments) -> tuple[Array, Array | None]:
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
    return w, b


def check_reduction(reduction: float) -> None:
    """Raise unless the reduction is at least 1 (inf is allowed and removes the gap)."""
    if not reduction >= 1:
        raise ValueError(
            f"reduction={reduction!r}; it says how many times smaller the squared gap becomes, so it must be at least "
            "1. Use 1 to change nothing and inf to remove the gap."
        )


# --- how far each singular value shrinks so that a budget is met at the least cost ---------------------------------
#
#     min Σ k_i (σ'_i − σ_i)²   subject to   Σ σ'_i^p ≤ c        (p = 2: mean gap, p = 4: covariance gap)
#
# is solved by one multiplier γ ≥ 0, the root of one monotone equation.


@dataclass(frozen=True)
class Shrinkage:
    """σ' (r,), its multiplier γ (0 when the budget was met already, inf when it is 0), and Σσ'^p (``achieved``)."""

    sigma: Array
    multiplier: float
    achieved: float
    converged: bool


def shrink_mean(sigma: Array, cost: Array, multiplier: float) -> Array:
    """``σ' = σ k / (k + γ)``, for γ ≥ 0 and k > 0.

    Differs from the paper: its theorem prints ``σ k / (k γ)``; the appendix derives the form used here.
    """
    return sigma * (cost / (cost + multiplier))


def shrink_covariance(sigma: Array, cost: Array, multiplier: float) -> Array:
    """The real root of ``k σ' − k σ + 2γ σ'³ = 0``, for γ ≥ 0 and k > 0.

    With ``y = 1.5 √6 √γ σ / √k`` it is ``σ' = σ · 3 sinh(asinh(y)/3) / y``, accurate to a few units in the last place
    over twenty decades, where Cardano's formula cancels.

    Differs from the paper: it prints ``27 γ⁴ k σ²`` under the root where ``27 γ⁴ k² σ²`` is right.
    """
    y = 1.5 * np.sqrt(6.0) * np.sqrt(multiplier) * sigma / np.sqrt(cost)
    safe = np.where(y > 0, y, 1.0)
    return sigma * np.where(y > 0, 3.0 * np.sinh(np.arcsinh(safe) / 3.0) / safe, 1.0)


def solve_mean(sigma: ArrayLike, cost: ArrayLike, budget: float) -> Shrinkage:
    """Solve ``min Σk(σ'−σ)²`` subject to ``Σσ'² ≤ budget``."""
    return _shrink_to(sigma, cost, budget, 2, shrink_mean, lambda s, k, ratio: k * (np.sqrt(ratio) - 1))


def solve_covariance(sigma: ArrayLike, cost: ArrayLike, budget: float) -> Shrinkage:
    """Solve ``min Σk(σ'−σ)²`` subject to ``Σσ'⁴ ≤ budget``.

    Differs from the paper: the equation for γ in its appendix has σ'² where the constraint has σ'⁴.
    """
    return _shrink_to(
        sigma, cost, budget, 4, shrink_covariance, lambda s, k, ratio: (ratio**0.75 - ratio**0.5) * k / (2 * s**2)
    )


def _shrink_to(
    sigma: ArrayLike,
    cost: ArrayLike,
    budget: float,
    power: int,
    shrink: Callable[[Array, Array, float], Array],
    alone: Callable[[Array, Array, float], Array],
) -> Shrinkage:
    """``alone`` gives the γ at which each σ by itself would meet the budget, of which the sum is ``ratio`` times."""
    sigma, cost = np.asarray(sigma, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    if not budget >= 0:
        raise ValueError(f"budget={budget!r}; the sum of powers of singular values cannot be below 0.")
    total = float(np.sum(sigma**power))
    if total <= budget * _MET:
        return Shrinkage(sigma.copy(), 0.0, total, True)
    if budget == 0:
        return Shrinkage(np.zeros_like(sigma), np.inf, 0.0, True)

    # Moving along a direction of no cost is free (rounding may even make k slightly negative): take those first.
    paid = cost > 0
    rest = float(np.sum(sigma[paid] ** power))
    if rest <= budget * _MET:
        free = max(budget - rest, 0.0) / (total - rest)  # what is left of the budget goes back to the free directions
        shrunk = np.where(paid, sigma, sigma * free ** (1 / power))
        return Shrinkage(shrunk, 0.0, float(np.sum(shrunk**power)), True)

    active = paid & (sigma > 0)
    s, k = sigma[active], cost[active]

    def excess(gamma: float) -> float:
        return float(np.log(np.sum(shrink(s, k, gamma) ** power) / budget))

    ends = alone(s, k, rest / budget)
    gamma = log_root(excess, ends.min() / 2, 2 * ends.max())  # exact in real arithmetic; the factors absorb rounding
    shrunk = np.zeros_like(sigma)
    shrunk[active] = shrink(s, k, gamma)
    achieved = float(np.sum(shrunk**power))
    return Shrinkage(shrunk, gamma, achieved, abs(achieved - budget) <= 1e-9 * budget)


def log_root(f: Callable[[float], float], lower: float, upper: float) -> float:
    """Root of a monotone function between positive bounds; a bound when rounding puts the root outside."""

    def of_log(x: float) -> float:
        return f(math.exp(x))

    a, b = math.log(lower), math.log(upper)
    at_a, at_b = of_log(a), of_log(b)
    if (at_a > 0) == (at_b > 0):
        return lower if abs(at_a) <= abs(at_b) else upper
    return math.exp(brentq(of_log, a, b, xtol=_EPS, rtol=4 * _EPS))
