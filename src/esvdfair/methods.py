"""Problem -> candidates: refits of the last layer to choose from.

A refit of the last layer needs to know what to aim at (:mod:`esvdfair.targets`), how close to stay to the original
weights, and how hard to press for parity. None of them can be known beforehand, so all combinations are solved, and
validation rows choose among them.

``paper`` and ``exact``, which edit a hidden layer first, are in :mod:`esvdfair.hidden`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.optimize import brentq

from esvdfair.core.edits import LayerEdit
from esvdfair.core.moments import GroupMoments
from esvdfair.core.parity import ParityProblem
from esvdfair.core.quadratic import Fit, Quadratic
from esvdfair.core.transport import transport_path
from esvdfair.exceptions import InputError
from esvdfair.models.base import LinearLayer, Weights
from esvdfair.problem import FLAT, FOLDS, MANY_ROWS, Effort, Problem, folds_of, original_fit, outputs
from esvdfair.targets import Refits, plain_fit

Array = NDArray[np.float64]

FEW = 3
"""Every third strength is cross-fitted; the others lie between."""


@dataclass(frozen=True)
class Candidates:
    """Fits to choose from, and what they predict.

    Attributes
    ----------
    problem : what they were made from
    fits : k of them
    validation, training : (n, k) their predictions for the validation rows, and for the training rows
    cross_fitted : some of them, fitted again without one fold of the training rows after the other, and what they
        predict for the rows of that fold (n, some of k); None where that would change nothing
    plain : refits of the last layer without fairness constraint
    """

    problem: Problem
    fits: tuple[Fit, ...]
    validation: Array
    training: Array
    cross_fitted: "CrossFitted | None" = None
    plain: tuple[Fit, ...] = ()

    @classmethod
    def of(cls, problem: Problem, fits: Sequence[Fit], cross_fitted: "CrossFitted | None" = None) -> "Candidates":
        """Fits of the last layer alone."""
        validation = outputs(problem.head, problem.validation, fits)
        same = problem.training is problem.validation
        training = validation if same else outputs(problem.head, problem.training, fits)
        plain = tuple(fit for fit in fits if fit.diagnostics.get("plain"))
        return cls(problem, tuple(fits), validation, training, cross_fitted, plain)


@dataclass(frozen=True)
class CrossFitted:
    """Fits made without a fold of the training rows, and their predictions (n, k) for the rows of that fold."""

    fits: tuple[Fit, ...]
    predictions: Array


# --- the last layer alone ------------------------------------------------------------------------------------------


Solve = Callable[[Refits, bool], list[Fit]]
"""The candidates of some refits: all of them, or every few, which are enough to learn how much they over-fit."""


def transport(targets: Sequence[str], effort: Effort) -> Solve:
    """The transport path of every target and ridge (docs/method.md 2.4, 2.6)."""

    def solve(refits: Refits, few: bool) -> list[Fit]:
        strengths = effort.strengths
        # The optimum's targets are as fair as their level, and transport only cleans up: a few small strengths will do.
        # The model's own predictions win where labels over-fit; a coarser path finds that out.
        path = {
            "labels": strengths[:: FEW if few else 1],
            "predictions": strengths[:: FEW if few else 2 if "labels" in targets else 1],
            "optimum": strengths[: max(len(strengths) // 2, 1) : 2 * FEW if few else 3],
        }
        return [
            replace(fit, target=name, diagnostics={"plain": name == "labels" and not fit.strength})
            for target in targets
            for name, quadratic in refits.quadratics(target, _ridges(effort, target, targets, few=few))
            for fit in transport_path(refits.coupling, quadratic, strengths=path[target])
        ]

    return solve


def parity(
    targets: Sequence[str],
    effort: Effort,
    *,
    mean_reduction: float | None = None,
    covariance_reduction: float | None = None,
) -> Solve:
    """Equal group means and variances (docs/method.md 2.3); a grid of both when no reduction is given.

    First come the refits towards the labels without any parity, of strength 0: their error is what the refit alone
    would bring. Needs the moments alone: there may be no training rows at hand, and then the labels before a curved
    head cannot be a target.
    """
    given = mean_reduction is not None or covariance_reduction is not None

    def solve(refits: Refits, few: bool) -> list[Fit]:
        several = len(refits.problem.labels) > 2
        space = refits.space.denoised() if several and not given else refits.space
        quadratics = [
            (name, replace(quadratic, space=space))
            for target in targets
            for name, quadratic in refits.quadratics(target, _ridges(effort, target, targets, few=few))
        ]
        plain = [plain_fit(quadratic) for name, quadratic in quadratics if name == "labels"]
        if not given:
            return plain + _parity_grid(quadratics, effort, few)
        return plain + [
            replace(parity_at(quadratic, mean_reduction or 1.0, covariance_reduction or 1.0), target=name)
            for name, quadratic in quadratics
        ]

    return solve


def _parity_grid(quadratics: Sequence[tuple[str, Quadratic]], effort: Effort, few: bool) -> list[Fit]:
    """Every mean penalty with every variance reduction."""

    @cache
    def problem(ridge: float, penalty: float) -> ParityProblem:  # its eigenproblem serves every target
        return ParityProblem(next(q for _, q in quadratics if q.ridge == ridge), penalty)

    found = []
    for name, quadratic in quadratics:
        thin = few or name != "labels"
        for penalty in _thinned(effort.mean_penalties, thin):
            at = problem(quadratic.ridge, penalty)
            for reduction in _thinned(effort.variance_reductions, thin):
                fit = at.solve(at.budget(reduction), quadratic)
                known = {**fit.diagnostics, "variance_reduction": reduction}
                found.append(replace(fit, target=name, strength=penalty, diagnostics=known))
    return found


def _thinned(grid: Sequence[float], few: bool) -> Sequence[float]:
    """All values, or the ends and the middle (see :func:`transport`)."""
    return sorted({grid[0], grid[len(grid) // 2], grid[-1]}) if few else grid


def solve_all(problem: Problem, solve: Solve, effort: Effort, *, scans: bool) -> tuple[list[Fit], CrossFitted | None]:
    """The candidates and, where a point is going to be chosen among them (``scans``), some of them cross-fitted."""
    refits = Refits(problem, effort)
    return solve(refits, False), _cross_fit(refits, solve) if scans else None


def _cross_fit(refits: Refits, solve: Solve) -> CrossFitted | None:
    """The closed form without a fold of the training rows, for each of a few folds (docs/method.md 2.7).

    None where the rows are so many next to the features that it would change nothing, or not all of them are kept.
    What the refit aims at is that of all rows; what is left out are the rows of the fold in moments and bins.
    """
    problem, rows = refits.problem, refits.problem.training
    moments = problem.fold_moments
    if not moments or min(problem.sizes) >= MANY_ROWS * len(refits.space.variances):
        return None
    fold = folds_of(rows)
    few = replace(refits.effort, transport_rows=refits.effort.transport_rows // 4)
    fits: list[Fit] = []
    predictions = np.empty((len(rows), 0))
    for k in range(FOLDS):
        index = np.flatnonzero(fold != k)
        without = GroupMoments.total([each for i, each in enumerate(moments) if i != k])
        part = replace(problem, moments=without, training=rows.take(index))
        fits = solve(Refits(part, few, whole=refits, index=index), True)
        if not k:
            predictions = np.empty((len(rows), len(fits)), order="F")
        predictions[fold == k] = outputs(problem.head, rows.take(fold == k), fits)
    return CrossFitted(tuple(fits), predictions)


def _ridges(effort: Effort, target: str, targets: Sequence[str], *, few: bool) -> Sequence[float]:
    """All ridges, but one in the middle for predictions next to labels: where they win, they hardly over-fit.

    Of a ``few`` one will do for the optimum too, whose targets are smooth.
    """
    if (target == "predictions" and "labels" in targets) or (target == "optimum" and few):
        return effort.ridges[len(effort.ridges) // 2 :][:1]
    return effort.ridges


# --- a fit and its layer -------------------------------------------------------------------------------------------


def weights_of(layer: LinearLayer, fit: Fit) -> Weights:
    """What a fit puts in place of the layers of a model whose last layer is ``layer``."""
    last = fit.weight[None, :], None if layer.bias is None else np.array([fit.bias])
    return {**after_edits(fit.edits), layer.name: last}


def after_edits(edits: Sequence[LayerEdit]) -> Weights:
    """The last state of every layer that was edited."""
    return {edit.layer: (edit.weight_after, edit.bias_after) for edit in edits}


def account_for(problem: Problem, fit: Fit) -> list[LayerEdit]:
    """The account of what a fit changes: those of its edits, or that of the refit of the last layer.

    There ``sigma`` are the singular values of ``D Wᵀ``, so that Σσ² is d_e², and the budget is what was achieved.
    """
    if fit.edits:
        return list(fit.edits)
    layer, before, after = problem.layer, problem.layer.weight, fit.weight[None, :]
    moments = problem.moments.columns(slice(0, before.shape[1]))
    sigma_before, sigma_after = (scipy.linalg.svdvals(moments.mean_differences() @ w.T) for w in (before, after))
    bias = None if layer.bias is None else np.array([fit.bias])
    shift = 0.0 if layer.bias is None else fit.bias - layer.bias[0]
    change = fit.weight - before[0]
    moved = change @ moments.pooled_scatter() @ change
    moved += moments.pooled_weight * (change @ moments.pooled_mean() + shift) ** 2
    gap = float(np.sum(sigma_after**2))
    return [
        LayerEdit(
            layer=layer.name,
            weight_before=before,
            weight_after=after,
            bias_before=layer.bias,
            bias_after=bias,
            sigma_before=sigma_before,
            sigma_after=sigma_after,
            multiplier=fit.strength,
            budget=gap,
            achieved=gap,
            converged=fit.converged,
            output_change=float(moved),
            gap_before=float(np.sum(sigma_before**2)),
            gap_after=gap,
        )
    ]


def check_rescales(problem: Problem) -> None:
    """Raise unless the last layer can shift and stretch the predictions."""
    if not problem.head.is_affine:
        raise InputError(
            f"`rescale=True` requires predictions that are a linear function of the last layer, and a "
            f"{problem.head.kind} follows it. Leave `rescale` out, or rescale the predictions yourself."
        )
    if problem.layer.bias is None:
        raise InputError(
            f"`rescale=True` shifts the predictions, and the last layer {problem.layer.name!r} has no bias. Leave "
            "`rescale` out, or give the layer a bias."
        )


def rescaled(fit: Fit, problem: Problem, original: Problem) -> Fit:
    """The fit whose predictions have the mean and standard deviation of the original model's on the training rows.

    Parameters
    ----------
    problem : what the fit was made from
    original : that of the original model, which is another one where a hidden layer was edited

    A fit that predicts nearly the same number for everybody stays as it is.
    """
    before = original_fit(original.layer)
    (mean_before, sd_before), (mean, sd) = (
        _output_moments(each, of) for each, of in ((before, original), (fit, problem))
    )
    if sd <= FLAT * sd_before:
        return fit
    factor = sd_before / sd
    return replace(fit, weight=factor * fit.weight, bias=mean_before + factor * (fit.bias - mean))


def _output_moments(fit: Fit, problem: Problem) -> tuple[float, float]:
    """Mean and standard deviation of the last layer's output over all training rows."""
    moments = problem.moments.columns(slice(0, len(fit.weight)))
    variance = float(fit.weight @ moments.pooled_scatter() @ fit.weight) / moments.pooled_weight
    return float(moments.pooled_mean() @ fit.weight) + fit.bias, float(np.sqrt(max(variance, 0.0)))


# --- parity at given reductions ------------------------------------------------------------------------------------


def parity_at(quadratic: Quadratic, mean_reduction: float, covariance_reduction: float) -> Fit:
    """The parity refit whose squared mean and variance gaps are the original's divided by the reductions."""
    unpenalised = ParityProblem(quadratic, 0.0)
    budget = unpenalised.budget(np.sqrt(covariance_reduction))  # the covariance gap d_v² is the variance gap squared
    allowed = unpenalised.gaps[0] / np.sqrt(mean_reduction)
    if allowed == 0.0:
        fit = ParityProblem(quadratic, np.inf).solve(budget)
    else:
        fit = unpenalised.solve(budget)
        gap = fit.diagnostics["mean_gap"]
        if gap > allowed:
            fit = ParityProblem(quadratic, _mean_penalty(quadratic, budget, gap, allowed)).solve(budget)
    return replace(fit, strength=mean_reduction)


def _mean_penalty(quadratic: Quadratic, budget: float, gap: float, allowed: float) -> float:
    """λ_e at which the mean gap, ``gap`` without a penalty, is ``allowed``; every trial costs an eigenproblem.

    With one direction and no variance budget ``gap/(1 + λ_e s²)`` is exact, s the whitened gap: the search starts there
    and doubles its steps. A gap that no penalty within e^±40 of it closes is rounding, and infinity closes it.
    """

    @cache
    def excess(log_penalty: float) -> float:
        left = ParityProblem(quadratic, np.exp(log_penalty)).solve(budget).diagnostics["mean_gap"]
        return float(np.log(max(left / allowed, 1e-100)))

    whitened = float(np.sum((quadratic.space.mean_gaps * quadratic.scale) ** 2))
    start = float(np.log((gap / allowed - 1) / whitened))
    towards = 1.0 if excess(start) > 0 else -1.0
    near, step = start, 0.5
    while (excess(near + towards * step) > 0) == (towards > 0):
        near, step = near + towards * step, 2 * step
        if step > 40:
            return np.inf
    low, high = sorted((near, near + towards * step))
    return float(np.exp(brentq(excess, low, high, xtol=1e-6)))
