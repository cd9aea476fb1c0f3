"""Targets × ridge × path -> last layers to choose from.

A refit of the last layer needs to know what to aim at (the labels, the model's own predictions, or the best that any
attribute-unaware predictor could do), how close to stay to the original weights, and how hard to press for parity.
None of them can be known beforehand, so all combinations are solved and rows that did not fit them choose.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning

from esvdfair.core.metrics import ks_from_codes
from esvdfair.core.moments import GroupMoments
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.refit.parity import ParityProblem
from esvdfair.core.refit.quadratic import FeatureSpace, Quadratic
from esvdfair.core.refit.transport import TransportProblem, transport_path
from esvdfair.models.heads import Head
from esvdfair.passes import Rows

Array = NDArray[np.float64]

TARGETS = ("labels", "predictions", "optimum")
RIDGES = (1e-6, 1e-4, 1e-2)
STRENGTHS: tuple[float, ...] = (0.0, *(float(s) for s in np.geomspace(0.03, 1e3, 20)))
OPTIMUM_LEVELS = (0.02, 0.06, 0.1, 0.16, 0.24, 0.34, 0.5)
"""Levels α of the optimum, as parts of the untouched model's KS distance."""
GROUP_REGULARISATION = (1e-3, 1e-2, 1e-1, 1.0)
"""Inverse regularisation strengths among which the estimate of P(group | features) is chosen."""
TRANSPORT_ROWS = 5000
"""Rows of each group that transport couples; more of them would only be slower (the quadratic sees all rows)."""


@dataclass(frozen=True)
class LastLayer:
    """The output layer of a model: weight (p,), bias (None when it has none), and the head after it."""

    name: str
    weight: Array
    bias: float | None
    head: Head


@dataclass(frozen=True)
class Candidate:
    """A last layer, and the choices that made it."""

    weight: Array
    bias: float
    target: str
    ridge: float
    strength: float
    converged: bool


class Refits:
    """Everything that the refits of one last layer share: principal axes, rotated rows, targets.

    Parameters
    ----------
    layer : the layer to refit
    moments : of ``[h, y]`` (``h`` alone without labels) over the training rows
    training : sample of the training rows
    judging : rows that did not fit, which choose the best estimate of E[Y|x] for the optimum
    n_groups : number of groups
    """

    def __init__(self, layer: LastLayer, moments: GroupMoments, training: Rows, judging: Rows, n_groups: int) -> None:
        self.layer, self.training, self.judging, self.n_groups = layer, training, judging, n_groups
        self._moments = moments
        self.space = FeatureSpace.from_moments(moments, len(layer.weight), intercept=layer.bias is not None)

    @cached_property
    def rotated(self) -> Array:
        """(rows, r) training features along the principal axes."""
        return self.space.rotate(self.training.features)

    @cached_property
    def problem(self) -> TransportProblem:
        codes = self.training.codes
        # The training sample is in hash order within each group, so its first rows are a random choice.
        index = np.concatenate([np.flatnonzero(codes == g)[:TRANSPORT_ROWS] for g in range(self.n_groups)])
        return TransportProblem(
            self.rotated[index],
            codes[index],
            self.n_groups,
            sample_weight=self.training.weight[index],
            share=self.space.share,
        )

    def transport(self, targets: Sequence[str], ridges: Sequence[float], strengths: Sequence[float]) -> list[Candidate]:
        """The transport path of every target and ridge (DESIGN 2.4)."""
        # The optimum's targets are as fair as their level, and transport only cleans up: a few small strengths will do.
        # The model's own predictions win where labels over-fit; a coarser path finds that out.
        path = {
            "labels": strengths,
            "predictions": strengths[:: 2 if "labels" in targets else 1],
            "optimum": strengths[: len(strengths) // 2 : 3],
        }
        return [
            Candidate(fit.weight, fit.bias, name, quadratic.ridge, fit.strength, fit.converged)
            for target in targets
            for name, quadratic in self.quadratics(target, ridges)
            for fit in transport_path(self.problem, quadratic, strengths=path[target])
        ]

    def parity(
        self,
        targets: Sequence[str],
        ridges: Sequence[float],
        mean_penalties: Sequence[float],
        reductions: Sequence[float],
    ) -> list[Candidate]:
        """Moment-parity refits over a grid of mean penalties λ_e and variance reductions (DESIGN 2.3)."""
        found = []
        for target in targets:
            for name, quadratic in self.quadratics(target, ridges):
                for penalty in mean_penalties:
                    problem = ParityProblem(quadratic, penalty)
                    for reduction in reductions:
                        fit = problem.solve(problem.budget(reduction))
                        found.append(Candidate(fit.weight, fit.bias, name, quadratic.ridge, penalty, fit.converged))
        return found

    def quadratics(self, target: str, ridges: Sequence[float]) -> Iterator[tuple[str, Quadratic]]:
        """The quadratic of every ridge, for "labels", "predictions", or every level of the "optimum"."""
        if target == "optimum":
            for level, values in self._optimum_values:
                for ridge in ridges:
                    yield f"optimum {level:.3g}", self._towards(self.layer.head.inverse(values), ridge)
        else:
            for ridge in ridges:
                yield target, self._labels(ridge) if target == "labels" else self._predictions(ridge)

    def _predictions(self, ridge: float) -> Quadratic:
        return Quadratic.from_layer(self.space, self.layer.weight, self.layer.bias or 0.0, ridge=ridge)

    def _labels(self, ridge: float) -> Quadratic:
        head = self.layer.head
        if not head.is_affine:
            return self._towards(self.head_aware_outputs, ridge)
        quadratic = Quadratic.from_moments(
            self._moments, space=self.space, target=self._moments.width - 1, original=self.layer.weight, ridge=ridge
        )
        slope, intercept = head.line
        return replace(
            quadratic,
            cross=quadratic.cross / slope,
            target_mean=(quadratic.target_mean - intercept) / slope,
            target_variance=quadratic.target_variance / slope**2,
        )

    def _towards(self, outputs: Array, ridge: float) -> Quadratic:
        """With outputs (before the head) for the training rows as the target."""
        return Quadratic.from_target(
            self.rotated,
            outputs,
            space=self.space,
            original=self.layer.weight,
            ridge=ridge,
            sample_weight=self.training.weight,
        )

    @cached_property
    def _head_aware_layer(self) -> tuple[Array, float]:
        """The layer of least squared error *after* a curved head; its outputs are what "labels" means before it."""
        rows, head, axes = self.training, self.layer.head, self.space.axes
        if rows.y is None:
            raise ValueError("the labels are missing; give y, or targets='predictions'.")
        y, share = rows.y, rows.weight / rows.weight.sum()
        start = np.append(self.layer.weight @ axes, self.space.mean @ self.layer.weight + (self.layer.bias or 0.0))
        variances = self.space.variances

        def loss(v: Array) -> tuple[float, Array]:
            z = self.rotated @ v[:-1] + v[-1]
            error = head.apply(z) - y
            slope = 2 * share * error * head.derivative(z)
            pull = v[:-1] - start[:-1]
            penalty = 1e-6 * float(np.var(y)) / max(float(variances @ start[:-1] ** 2), 1e-300)
            gradient = np.append(slope @ self.rotated + 2 * penalty * variances * pull, slope.sum())
            return float(share @ error**2 + penalty * variances @ pull**2), gradient

        best = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
        weight = self.layer.weight + axes @ (best[:-1] - start[:-1])
        return weight, float(best[-1] - self.space.mean @ weight)

    @cached_property
    def head_aware_outputs(self) -> Array:
        """(rows,) what the labels of the training rows mean before a curved head.

        Kept within the range of the model's own outputs: where a head is flat, an output far out costs nothing after
        the head, but would dominate a squared error before it.
        """
        weight, bias = self._head_aware_layer
        outputs = self.layer.head.inverse(self.training.prediction)
        return np.clip(self.training.features.astype(np.float64) @ weight + bias, outputs.min(), outputs.max())

    @cached_property
    def _optimum_values(self) -> list[tuple[float, Array]]:
        """Values f*(x) of the attribute-unaware optimum for the training rows, at every level (DESIGN 2.6)."""
        eta = self._best_regression()
        before = ks_from_codes(eta, self.training.codes, self.n_groups, self.training.weight)
        levels = [part * before for part in OPTIMUM_LEVELS]
        fitted = fit_optimum(eta, self._group_probability, levels=levels, sample_weight=self.training.weight)
        return [(optimum.level, optimum.predict(eta, self._group_probability)) for optimum in fitted]

    def _best_regression(self) -> Array:
        """E[Y|x] for the training rows: the refit or the untouched layer, whichever errs least on the judging rows."""
        layers = [(self.layer.weight, self.layer.bias or 0.0)]
        if self.training.y is not None:
            quadratics = (quadratic for _, quadratic in self.quadratics("labels", RIDGES))
            layers += [quadratic.layer(quadratic.minimiser) for quadratic in quadratics]
        rows = self.judging
        y = rows.prediction if rows.y is None else rows.y
        errors = [
            np.average((self.layer.head.apply(rows.features @ w + b) - y) ** 2, weights=rows.weight) for w, b in layers
        ]
        weight, bias = layers[int(np.argmin(errors))]
        return self.layer.head.apply(self.training.features @ weight + bias)

    @cached_property
    def _group_probability(self) -> Array:
        """(rows, G) P̂(group | features) for the training rows; used while fitting only.

        A logistic regression on standardised features, regularised as the judging rows prefer.
        """
        from sklearn.linear_model import LogisticRegression  # half of what importing esvdfair would cost

        training, judging = self.training, self.judging
        mean, spread = training.features.mean(axis=0), training.features.std(axis=0)
        live = spread > 1e-6 * spread.max()
        known, unseen = ((rows.features[:, live] - mean[live]) / spread[live] for rows in (training, judging))
        losses, found = [], []
        for c in GROUP_REGULARISATION:
            classifier = LogisticRegression(C=c, max_iter=200)
            with warnings.catch_warnings():  # an estimate that stopped early is judged like the others
                warnings.simplefilter("ignore", ConvergenceWarning)
                classifier.fit(known, training.codes, sample_weight=training.weight)
            chance = classifier.predict_proba(unseen)[np.arange(len(judging)), judging.codes]
            losses.append(-np.average(np.log(np.maximum(chance, 1e-6)), weights=judging.weight))
            found.append(np.asarray(classifier.predict_proba(known)))
        return found[int(np.argmin(losses))]
