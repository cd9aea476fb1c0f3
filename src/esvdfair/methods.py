"""Problem -> Candidates: what a refit of the last layer aims at, and the refits to choose from.

A refit needs to know what to aim at, how close to stay to the original weights, and how hard to press for parity. None
of these can be known beforehand, so all combinations are solved, and validation rows choose among them.

``paper`` and ``exact``, which edit a hidden layer first, are in :mod:`esvdfair.hidden`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning

from esvdfair.core.edits import LayerEdit
from esvdfair.core.ks import Groups, ks_between
from esvdfair.core.moments import GroupMoments
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.parity import ParityProblem
from esvdfair.core.quadratic import FeatureSpace, Fit, Quadratic, target_covariances, unit_factors
from esvdfair.core.transport import TransportProblem, transport_path
from esvdfair.exceptions import InputError
from esvdfair.models.base import LinearLayer, Weights
from esvdfair.problem import FLAT, FOLDS, MANY_ROWS, Effort, Problem, apply_layers, folds_of, original_fit, outputs

Array = NDArray[np.float64]

TARGETS = ("labels", "predictions", "optimum")
LARGEST_NEWTON = 2048  # coefficients up to which P(group | features) is found by Newton's method, which needs a Hessian
FAINT = 1e-3  # principal axes with less than this part of a feature's variance say nothing about the group
FEW = 3  # every third strength is cross-fitted; the others lie between


CrossFitted: TypeAlias = tuple[list[Fit], Array]
"""Fits made without a fold of the training rows, and their predictions (n, k) for the rows of that fold."""


@dataclass(frozen=True)
class Candidates:
    """Fits to choose from, and what they predict.

    Attributes
    ----------
    problem : what they were made from
    fits : k of them
    validation, training : (n, k) their predictions for the validation rows, and for the training rows
    cross_fitted : some of them, fitted again without one fold of the training rows; None if that would change nothing
    plain : refits of the last layer without fairness constraint
    """

    problem: Problem
    fits: tuple[Fit, ...]
    validation: Array
    training: Array
    cross_fitted: CrossFitted | None = None
    plain: tuple[Fit, ...] = ()

    @classmethod
    def of(cls, problem: Problem, fits: Sequence[Fit], cross_fitted: CrossFitted | None = None) -> "Candidates":
        """Fits of the last layer alone."""
        validation = outputs(problem.head, problem.validation, fits)
        same = problem.training is problem.validation
        training = validation if same else outputs(problem.head, problem.training, fits)
        plain = tuple(fit for fit in fits if fit.diagnostics.get("plain"))
        return cls(problem, tuple(fits), validation, training, cross_fitted, plain)


@dataclass(frozen=True)
class Refits:
    """What the refits of one last layer share: principal axes and targets.

    ``fold`` is left out of the training rows of ``whole``, which knows what does not depend on it.
    """

    problem: Problem
    effort: Effort
    whole: "Refits | None" = None
    fold: int = -1

    def __post_init__(self) -> None:
        rows = self.problem.training
        if np.ptp(rows.prediction) <= 1e-12 * max(np.abs(rows.prediction).max(), 1e-300):
            raise ValueError(
                f"the model predicts {rows.prediction[0]:.6g} for every row; it is alike for all groups already and "
                "there is nothing to repair. Check the model and X."
            )

    @cached_property
    def folds(self) -> NDArray[np.intp]:
        """(rows,) the fold of each training row; all the same where none is going to be left out."""
        rows = self.problem.training
        return folds_of(rows) if self.problem.fold_moments else np.zeros(len(rows), dtype=np.intp)

    @cached_property
    def moments(self) -> GroupMoments:
        """Of ``[h, y]`` over the training rows."""
        if self.whole is None:
            return self.problem.moments
        return GroupMoments.total([each for k, each in enumerate(self.problem.fold_moments) if k != self.fold])

    @cached_property
    def _unit_factors(self) -> Array:
        """(p,) of the features."""
        rows, centred = self.problem.training, self.problem.layer.bias is not None
        return unit_factors(rows.features, rows.weight, centred=centred)

    @cached_property
    def space(self) -> FeatureSpace:
        """Principal axes of the features."""
        layer, factors = self.problem.layer, (self.whole or self)._unit_factors
        options: dict[str, Any] = {"intercept": layer.bias is not None, "offset": layer.offset}
        return FeatureSpace.from_moments(self.moments, layer.weight.shape[1], factors=factors, **options)

    @cached_property
    def coupling(self) -> TransportProblem:
        """What transport couples: a bounded number of rows, a random choice since they are in hash order."""
        rows, index = self.problem.training, self._bounded
        rotated, weight = self.space.rotate(rows.features[index]), rows.parity_weight[index]
        return TransportProblem(rotated, rows.codes[index], len(self.problem.labels), sample_weight=weight)

    @cached_property
    def _bounded(self) -> NDArray[np.intp]:
        """Of every group the first training rows: positions of at most ``effort.transport_rows`` each."""
        codes, groups = self.problem.training.codes, range(len(self.problem.labels))
        codes = codes if self.whole is None else np.where(self.whole.folds == self.fold, -1, codes)
        return np.concatenate([np.flatnonzero(codes == g)[: self.effort.transport_rows] for g in groups])

    def quadratics(self, target: str, ridges: Sequence[float]) -> Iterator[tuple[str, Quadratic]]:
        """The quadratic of every ridge, for "labels", "predictions", or every level of the "optimum"."""
        if target == "optimum":
            levels, known = (self.whole or self)._optimum_values
            towards = list(zip(levels, self._towards(known, 0.0), strict=True))
            for level, quadratic in towards if self.whole is None else towards[1::2]:
                for ridge in ridges:
                    yield f"optimum {level:.3g}", replace(quadratic, ridge=ridge)
        else:
            layer = original_fit(self.problem.layer)
            for ridge in ridges:
                own = Quadratic.from_layer(self.space, layer.weight, layer.bias, ridge)
                yield target, own if target == "predictions" else self.labels(ridge)

    def labels(self, ridge: float) -> Quadratic:
        """Towards the labels, or the predictions where there are none."""
        head, moments = self.problem.head, self.moments
        if not head.is_affine:
            return self._towards((self.whole or self)._head_aware_values, ridge)[0]
        known: dict[str, Any] = {"space": self.space, "original": self.problem.layer.weight[0], "ridge": ridge}
        quadratic = Quadratic.from_moments(moments, target=moments.width - 1, **known)
        slope, intercept = head.line
        mean = (quadratic.target_mean - intercept) / slope
        return replace(quadratic, cross=quadratic.cross / slope, target_mean=mean)

    def _towards(self, known: list[tuple[Array, Array]], ridge: float) -> list[Quadratic]:
        """With each of the targets."""
        (cross, means), original = known[self.fold], self.problem.layer.weight[0]
        columns = zip(cross @ self.space.axes, means.tolist(), strict=True)
        return [Quadratic(self.space, along, mean, original, ridge) for along, mean in columns]

    def _covariances(self, outputs: Array) -> list[tuple[Array, Array]]:
        """Of each column of outputs (before the head) for all training rows, without each fold and on all rows."""
        rows, centred = self.problem.training, self.problem.layer.bias is not None
        return target_covariances(rows.features, outputs, rows.weight, self.folds, centred=centred)

    @cached_property
    def _head_aware_values(self) -> list[tuple[Array, Array]]:
        return self._covariances(self.head_aware_outputs[:, None])

    @cached_property
    def head_aware_outputs(self) -> Array:
        """(rows,) what the labels of the training rows mean before a curved head.

        They are outputs of the layer of least squared error *after* the head, kept within the range of the model's own:
        where a head is flat, an output far out costs nothing after the head, but would dominate a squared error before.
        """
        rows, head, space = self.problem.training, self.problem.head, self.space
        rotated = space.rotate(rows.features)
        y, share, variances = rows.y, rows.weight / rows.weight.sum(), space.variances
        known = original_fit(self.problem.layer)
        start = np.append(known.weight @ space.dual, space.mean @ known.weight + known.bias)
        penalty = 1e-6 * float(np.var(y)) / max(float(variances @ start[:-1] ** 2), 1e-300)

        def loss(v: Array) -> tuple[float, Array]:
            z = rotated @ v[:-1] + v[-1]
            error = head.apply(z) - y
            slope = 2 * share * error * head.derivative(z)
            pull = v[:-1] - start[:-1]
            gradient = np.append(slope @ rotated + 2 * penalty * variances * pull, slope.sum())
            gradient[-2:-1] *= self.space.offset is None  # the weight of an offset stays
            return float(share @ error**2 + penalty * variances @ pull**2), gradient

        best = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
        weight = known.weight + space.axes @ (best[:-1] - start[:-1])
        usual = head.inverse(rows.prediction)
        found = rows.features.astype(np.float64) @ weight + float(best[-1] - space.mean @ weight)
        return np.clip(found, usual.min(), usual.max())

    @cached_property
    def _optimum_values(self) -> tuple[list[float], list[tuple[Array, Array]]]:
        """Levels of the attribute-unaware optimum, and its values f*(x) before the head (docs/method.md 2.6)."""
        training, known, groups = self.problem.training, self.regression_layer, len(self.problem.labels)
        eta = apply_layers(training.features, known.weight[None], np.array([known.bias]), self.problem.head.apply)[:, 0]
        probability = self.group_probability(training.features)
        compared = np.flatnonzero(training.codes < groups)
        share = training.parity_weight[compared]
        ties = np.rint(eta[compared] / (1e-9 * (np.ptp(eta) or 1.0)))  # last bits would break them, and move the levels
        before = ks_between(ties, Groups(training.codes[compared], groups, share))
        levels = [part * before for part in self.effort.levels]
        coarse = {"n_cells": 512, "n_grid": int(np.clip(384 // groups, 48, 64))}  # as good a target as twice as fine
        fitted = fit_optimum(eta[compared], probability[compared], levels=levels, sample_weight=share, **coarse)
        values = [self.problem.head.inverse(optimum.predict(eta, probability)) for optimum in fitted]
        return levels, self._covariances(np.column_stack(values))

    @cached_property
    def group_probability(self) -> Callable[[NDArray[Any]], Array]:
        """P̂(group | features): a function from features (rows, p) to (rows, G); used while fitting only.

        A logistic regression on the principal axes that carry some variance, on a bounded number of rows of each group,
        regularised as the validation rows prefer.
        """
        from sklearn.linear_model import LogisticRegression  # half of what importing esvdfair would cost

        training, validation, index, space = self.problem.training, self.problem.validation, self._bounded, self.space
        compared = np.flatnonzero(validation.codes < len(self.problem.labels))
        axes = space.axes[:, space.variances > FAINT]
        known = apply_layers(training.features[index], axes.T, -space.mean @ axes, np.positive)
        codes, weight = training.codes[index], training.parity_weight[index]
        every = np.bincount(training.codes, training.parity_weight)[: codes.max() + 1]
        weight *= (every / np.bincount(codes, weight))[codes]  # so that they have the weight of all rows of their group
        # Newton's steps cost a Gram matrix each, and few are needed from one regularisation to the next.
        small = known.shape[1] * len(self.problem.labels) <= LARGEST_NEWTON
        classifier = LogisticRegression(solver="newton-cholesky" if small else "lbfgs", max_iter=200, warm_start=True)
        losses, found = [], []
        for c in sorted(self.effort.regularisations):
            with warnings.catch_warnings():  # an estimate that stopped early is compared too
                warnings.simplefilter("ignore", ConvergenceWarning)
                classifier.set_params(C=c).fit(known, codes, sample_weight=weight)
            coef = classifier.coef_ @ axes.T  # of the features themselves
            if len(coef) == 1:  # of two groups: the first has none
                coef = np.vstack([np.zeros_like(coef), coef])
            bias = np.append(0.0, classifier.intercept_)[-len(coef) :] - coef @ space.mean
            found.append(partial(apply_layers, weight=coef, bias=bias, after=partial(softmax, axis=0)))
            chance = found[-1](validation.features)[compared, validation.codes[compared]]
            losses.append(-np.average(np.log(np.maximum(chance, 1e-6)), weights=validation.parity_weight[compared]))
        return found[int(np.argmin(losses))]

    @cached_property
    def regression_layer(self) -> Fit:
        """η(x) = E[Y|x]: the original layer or one refitted to the labels, whichever has less validation error."""
        fits, rows = [original_fit(self.problem.layer)], self.problem.validation
        if self.problem.error_against == "labels":
            fits += [known.fit(known.minimiser) for _, known in self.quadratics("labels", self.effort.ridges)]
        errors = (outputs(self.problem.head, rows, fits) - rows.y[:, None]) ** 2
        return fits[int(np.argmin(np.average(errors, axis=0, weights=rows.weight)))]


# --- the candidates ---------------------------------------------------------------------------------------------------

Solve = Callable[[Refits, bool], list[Fit]]
"""The candidates of some refits: all of them, or every few, which are enough to learn how much they over-fit."""


def transport(refits: Refits, few: bool = False, *, targets: Sequence[str]) -> list[Fit]:
    """The transport path of every target and ridge (docs/method.md 2.4, 2.6)."""
    effort = refits.effort
    # The optimum's targets are as fair as their level, and transport only cleans up: a few small strengths will do.
    # The model's own predictions win where labels over-fit; a coarser path finds that out.
    path = {
        "labels": effort.strengths[:: FEW if few else 1],
        "predictions": effort.strengths[:: FEW if few else 2 if "labels" in targets else 1],
        "optimum": effort.strengths[: max(len(effort.strengths) // 2, 1) : 2 * FEW if few else 3],
    }
    return [
        replace(fit, target=name, diagnostics={"plain": name == "labels" and not fit.strength})
        for target in targets
        for name, quadratic in refits.quadratics(target, _ridges(effort, target, targets, few=few))
        for fit in transport_path(refits.coupling, quadratic, strengths=path[target])
    ]


def parity(
    refits: Refits,
    few: bool = False,
    *,
    targets: Sequence[str],
    mean_reduction: float | None = None,
    covariance_reduction: float | None = None,
) -> list[Fit]:
    """Equal group means and variances (docs/method.md 2.3); a grid of both when no reduction is given.

    First come the refits towards the labels without any parity, of strength 0: their error is what the refit alone
    would bring.
    """
    effort, given = refits.effort, (mean_reduction, covariance_reduction) != (None, None)
    space = refits.space if given or len(refits.problem.labels) == 2 else refits.space.denoised()
    quadratics = [
        (name, replace(quadratic, space=space))
        for target in targets
        for name, quadratic in refits.quadratics(target, _ridges(effort, target, targets, few=few))
    ]
    found = [q.fit(q.minimiser, diagnostics={"plain": True}) for name, q in quadratics if name == "labels"]
    if given:
        reductions = mean_reduction or 1.0, covariance_reduction or 1.0
        return found + [replace(parity_at(quadratic, *reductions), target=name) for name, quadratic in quadratics]
    return found + _parity_grid(quadratics, effort, few)


def _parity_grid(quadratics: Sequence[tuple[str, Quadratic]], effort: Effort, few: bool) -> list[Fit]:
    """Every mean penalty with every variance reduction, or the ends and the middle of both."""

    @cache
    def problem(ridge: float, penalty: float) -> ParityProblem:  # its eigenproblem serves every target
        return ParityProblem(next(q for _, q in quadratics if q.ridge == ridge), penalty)

    found = []
    for name, quadratic in quadratics:
        grids: list[Sequence[float]] = [effort.mean_penalties, effort.variance_reductions]
        if few or name != "labels":
            grids = [sorted({grid[0], grid[len(grid) // 2], grid[-1]}) for grid in grids]
        for penalty, reduction in product(*grids):
            at = problem(quadratic.ridge, penalty)
            fit = at.solve(at.budget(reduction), quadratic)
            known = {**fit.diagnostics, "variance_reduction": reduction}
            found.append(replace(fit, target=name, strength=penalty, diagnostics=known))
    return found


def _ridges(effort: Effort, target: str, targets: Sequence[str], *, few: bool) -> Sequence[float]:
    """All, but one in the middle for predictions next to labels, which hardly over-fit; and for a ``few`` optima."""
    if (target == "predictions" and "labels" in targets) or (target == "optimum" and few):
        return effort.ridges[len(effort.ridges) // 2 :][:1]
    return effort.ridges


def solve_all(problem: Problem, solve: Solve, effort: Effort, *, scans: bool) -> tuple[list[Fit], CrossFitted | None]:
    """The candidates and, where a point is going to be chosen among them (``scans``), some of them cross-fitted.

    That is the closed form without a fold of the training rows, for each of a few folds (docs/method.md 2.7). None
    where the rows are so many next to the features that it would change nothing, or not all of them are kept. What the
    refit aims at is that of all rows; what is left out are the rows of the fold in moments and bins.
    """
    refits, rows = Refits(problem, effort), problem.training
    found = solve(refits, False)
    if not scans or not problem.fold_moments or min(problem.sizes) >= MANY_ROWS * len(refits.space.variances):
        return found, None
    less = replace(effort, transport_rows=effort.transport_rows // 4)
    for k in range(FOLDS):
        fits, out = solve(Refits(problem, less, whole=refits, fold=k), True), np.flatnonzero(refits.folds == k)
        if not k:
            predictions = np.empty((len(rows), len(fits)), order="F")
        predictions.T[:, out] = outputs(problem.head, rows.take(out), fits).T
    return found, (fits, predictions)


# --- a fit and its layer -------------------------------------------------------------------------------------------


def weights_of(layer: LinearLayer, fit: Fit) -> Weights:
    """What a fit puts in place of the layers of a model whose last layer is ``layer``."""
    last = fit.weight[None, :], None if layer.bias is None else np.array([fit.bias])
    return {**after_edits(fit.edits), layer.name: last}


def after_edits(edits: Sequence[LayerEdit]) -> Weights:
    """The last state of every layer that was edited."""
    return {edit.layer: (edit.weight_after, edit.bias_after) for edit in edits}


def check_rescales(problem: Problem) -> None:
    """Raise unless the last layer can shift and stretch the predictions."""
    problem.layer.check_no_offset("rescale=True")
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
    """A fit of ``problem`` with the mean and standard deviation of the original model's predictions of training rows.

    ``original`` is the problem of that model: another one where a hidden layer was edited. A fit that predicts nearly
    the same number for everybody stays as it is.
    """
    mean_before, sd_before = _output_moments(original_fit(original.layer), original)
    mean, sd = _output_moments(fit, problem)
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
