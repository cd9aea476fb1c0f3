"""What a refit aims at: labels, predictions, or the attribute-unaware optimum, and what all refits of a layer share."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning

from esvdfair.core.ks import Groups, ks_between
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.quadratic import FeatureSpace, Fit, Quadratic, unit_factors
from esvdfair.core.transport import TransportProblem
from esvdfair.problem import Effort, Problem, apply_layers, original_fit, outputs

Array = NDArray[np.float64]

TARGETS = ("labels", "predictions", "optimum")
LARGEST_NEWTON = 2048
"""Up to so many coefficients P(group | features) is found by Newton's method, whose Hessian has as many columns."""
FAINT = 1e-3
"""Principal axes with less than this part of a feature's variance say nothing about the group."""


@dataclass(frozen=True)
class Refits:
    """Everything that the refits of one last layer share: principal axes, targets."""

    problem: Problem
    effort: Effort
    whole: "Refits | None" = None  # of all training rows, where these are without a fold
    index: NDArray[np.intp] | None = None  # the rows of ``whole`` that these are of

    def __post_init__(self) -> None:
        rows = self.problem.training if len(self.problem.training) else self.problem.validation
        if len(rows) and np.ptp(rows.prediction) <= 1e-12 * max(np.abs(rows.prediction).max(), 1e-300):
            raise ValueError(
                f"the model predicts {rows.prediction[0]:.6g} for every row; it is alike for all groups already and "
                "there is nothing to repair. Check the model and X."
            )

    @cached_property
    def _original(self) -> tuple[Array, float]:
        fit = original_fit(self.problem.layer)
        return fit.weight, fit.bias

    @cached_property
    def _unit_factors(self) -> Array | None:
        """(p,) of the features; None where no training rows are at hand."""
        if self.whole is not None:
            return self.whole._unit_factors
        rows, centred = self.problem.training, self.problem.layer.bias is not None
        return unit_factors(rows.features, rows.weight, centred=centred) if len(rows) else None

    @cached_property
    def space(self) -> FeatureSpace:
        """Principal axes of the features."""
        layer = self.problem.layer
        return FeatureSpace.from_moments(
            self.problem.moments, layer.weight.shape[1], intercept=layer.bias is not None, factors=self._unit_factors
        )

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
        return np.concatenate([np.flatnonzero(codes == g)[: self.effort.transport_rows] for g in groups])

    def quadratics(self, target: str, ridges: Sequence[float]) -> Iterator[tuple[str, Quadratic]]:
        """The quadratic of every ridge, for "labels", "predictions", or every level of the "optimum"."""
        if target == "optimum":
            levels, values = self._optimum_values
            towards = self._towards(np.column_stack([self.problem.head.inverse(column) for column in values]), 0.0)
            for level, quadratic in zip(levels, towards, strict=True):
                for ridge in ridges:
                    yield f"optimum {level:.3g}", replace(quadratic, ridge=ridge)
        else:
            for ridge in ridges:
                own = target == "predictions"
                yield target, Quadratic.from_layer(self.space, *self._original, ridge) if own else self.labels(ridge)

    def labels(self, ridge: float) -> Quadratic:
        """Towards the labels, or the predictions where there are none."""
        head, moments = self.problem.head, self.problem.moments
        if not head.is_affine:
            return self._towards(self.head_aware_outputs[:, None], ridge)[0]
        quadratic = Quadratic.from_moments(
            moments, space=self.space, target=moments.width - 1, original=self._original[0], ridge=ridge
        )
        slope, intercept = head.line
        return replace(
            quadratic,
            cross=quadratic.cross / slope,
            target_mean=(quadratic.target_mean - intercept) / slope,
        )

    def _towards(self, outputs: Array, ridge: float) -> list[Quadratic]:
        """With each column of outputs (before the head) for the training rows as the target."""
        rows = self.problem.training
        original, weight = self._original[0], rows.weight
        return Quadratic.from_targets(
            rows.features, outputs, space=self.space, original=original, ridge=ridge, sample_weight=weight
        )

    @cached_property
    def _head_aware_layer(self) -> tuple[Array, float]:
        """The layer of least squared error *after* a curved head; its outputs are what "labels" means before it."""
        rows, head, axes = self.problem.training, self.problem.head, self.space.axes
        rotated = self.space.rotate(rows.features)
        y, share, variances = rows.y, rows.weight / rows.weight.sum(), self.space.variances
        original, bias = self._original
        start = np.append(original @ self.space.dual, self.space.mean @ original + bias)
        penalty = 1e-6 * float(np.var(y)) / max(float(variances @ start[:-1] ** 2), 1e-300)

        def loss(v: Array) -> tuple[float, Array]:
            z = rotated @ v[:-1] + v[-1]
            error = head.apply(z) - y
            slope = 2 * share * error * head.derivative(z)
            pull = v[:-1] - start[:-1]
            gradient = np.append(slope @ rotated + 2 * penalty * variances * pull, slope.sum())
            return float(share @ error**2 + penalty * variances @ pull**2), gradient

        best = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
        weight = original + axes @ (best[:-1] - start[:-1])
        return weight, float(best[-1] - self.space.mean @ weight)

    @cached_property
    def head_aware_outputs(self) -> Array:
        """(rows,) what the labels of the training rows mean before a curved head.

        Kept within the range of the model's own outputs: where a head is flat, an output far out costs nothing after
        the head, but would dominate a squared error before it.
        """
        if self.whole is not None:
            return self.whole.head_aware_outputs[self.index]
        weight, bias = self._head_aware_layer
        training = self.problem.training
        outputs = self.problem.head.inverse(training.prediction)
        return np.clip(training.features.astype(np.float64) @ weight + bias, outputs.min(), outputs.max())

    @cached_property
    def _optimum_values(self) -> tuple[list[float], list[Array]]:
        """Levels of the attribute-unaware optimum, and its values f*(x) for the training rows (docs/method.md 2.6)."""
        if self.whole is not None:  # every other level
            levels, values = self.whole._optimum_values
            return levels[1::2], [value[self.index] for value in values[1::2]]
        training, groups = self.problem.training, len(self.problem.labels)
        weight, bias = self.regression_layer
        eta = apply_layers(training.features, weight[None], np.array([bias]), self.problem.head.apply)[:, 0]
        probability = self.group_probability(training.features)
        compared = np.flatnonzero(training.codes < groups)
        share = training.parity_weight[compared]
        before = ks_between(eta[compared], Groups(training.codes[compared], groups, share))
        levels = [part * before for part in self.effort.levels]
        coarse = {"n_cells": 512, "n_grid": int(np.clip(384 // groups, 48, 64))}  # as good a target as twice as fine
        fitted = fit_optimum(eta[compared], probability[compared], levels=levels, sample_weight=share, **coarse)
        return levels, [optimum.predict(eta, probability) for optimum in fitted]

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
    def regression_layer(self) -> tuple[Array, float]:
        """η(x) = E[Y|x]: the original layer or one refitted to the labels, whichever has less validation error."""
        fits, rows = [original_fit(self.problem.layer)], self.problem.validation
        if self.problem.error_against == "labels":
            fits += [plain_fit(quadratic) for _, quadratic in self.quadratics("labels", self.effort.ridges)]
        errors = (outputs(self.problem.head, rows, fits) - rows.y[:, None]) ** 2
        best = fits[int(np.argmin(np.average(errors, axis=0, weights=rows.weight)))]
        return best.weight, best.bias


def plain_fit(quadratic: Quadratic) -> Fit:
    """The refit without fairness constraint."""
    return quadratic.fit(quadratic.minimiser, diagnostics={"plain": True})
