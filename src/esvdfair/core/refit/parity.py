"""Moment-parity refit of the last layer: equal means and variances of the groups' outputs, in closed form.

In the whitened coordinates u of :mod:`esvdfair.core.refit.quadratic`, with D (pairs × r) the gaps between the group
means and C_g (r × r) the group covariances, the refit with mean penalty λ_e and variance budget c is

    min  ‖u − r‖² + λ_e‖D u‖²     s.t.  |uᵀ(C_g − C_h)u| ≤ c  for all pairs of groups.

With ``B = (I + λ_e DᵀD)^{-1/2}`` the substitution ``u = B v`` leaves ``min ‖v − B r‖²`` under the same constraints on
``B C_g B``: the problem of :mod:`esvdfair.core.refit.nearest`. For two groups one spectrum serves every budget.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg

from esvdfair.core.refit.nearest import nearest_within, nearest_within_all
from esvdfair.core.refit.quadratic import Array, Fit, Quadratic

# Gaps below these parts of the features' own spread are rounding of the moments, not gaps.
_NO_MEAN_GAP = 1e-10
_NO_VARIANCE_GAP = 1e-13
# Outputs that vary less than this part of the least-squares ones are a constant.
_CONSTANT = 1e-9


@dataclass(frozen=True)
class ParityProblem:
    """The refit at one ridge and one mean penalty, for any number of targets and variance budgets.

    Parameters
    ----------
    quadratic : features, target and ridge
    mean_penalty : λ_e ≥ 0, the weight of the squared mean gap beside the mean squared error; ``inf`` for equal means

    Examples
    --------
    With two groups a scan over budgets, and over targets, costs one eigenproblem::

        problem = ParityProblem(quadratic, mean_penalty=np.inf)
        fits = [problem.solve(problem.budget(reduction)) for reduction in (1, 10, 100, np.inf)]
    """

    quadratic: Quadratic
    mean_penalty: float

    def __post_init__(self) -> None:
        if not self.mean_penalty >= 0:
            raise ValueError(f"mean_penalty={self.mean_penalty!r}; expected a number that is not negative, or inf.")

    @cached_property
    def _gap_directions(self) -> tuple[Array, Array]:
        """Right singular vectors (k, r) and values (k,) of the whitened mean gaps; k ≤ G − 1."""
        gaps = self.quadratic.space.mean_gaps * self.quadratic.scale
        _, values, directions = scipy.linalg.svd(gaps, full_matrices=False)
        spread = np.sqrt(np.max(self.quadratic.space.variances * self.quadratic.scale**2))
        real = values > _NO_MEAN_GAP * max(values[0], spread)
        return directions[real], values[real]

    @cached_property
    def _differences(self) -> Array:
        """In whitened coordinates, (1, r, r) ``C₀ − C₁`` for two groups, (G, r, r) ``C_g − C̄`` for more.

        Differences that are rounding of the moments are 0.
        """
        space, scale = self.quadratic.space, self.quadratic.scale
        covariances = space.group_covariances
        others = covariances[1:] if len(covariances) == 2 else covariances.mean(axis=0)
        differences = covariances[: -1 if len(covariances) == 2 else None] - others
        differences[np.abs(differences).max(axis=(1, 2)) <= _NO_VARIANCE_GAP * space.variances[-1]] = 0.0
        symmetric: Array = (differences + differences.transpose(0, 2, 1)) * (0.5 * scale * scale[:, None])
        return symmetric

    def _shrink(self, x: Array) -> Array:
        """``(I + λ_e DᵀD)^{-1/2} x``, columns of x; the projection onto the null space of D when λ_e is infinite."""
        directions, values = self._gap_directions
        # With the SVD of D, I + λ_e DᵀD is 1 + λ_e s² along its right singular vectors and 1 elsewhere.
        loss = 1.0 - 1.0 / np.sqrt(1.0 + self.mean_penalty * values**2)
        shrunk: Array = x - directions.T @ (loss * (directions @ x).T).T
        return shrunk

    @cached_property
    def _shrunk(self) -> Array:
        """The differences as forms in v: ``B C B``."""
        return np.stack([self._shrink(self._shrink(form).T) for form in self._differences])

    @cached_property
    def _spectrum(self) -> tuple[Array, Array]:
        """λ (r,) and E (r, r) of ``B M B``, for two groups."""
        values, vectors = scipy.linalg.eigh(self._shrunk[0], driver="evd", check_finite=False)
        return values, vectors

    def _mean_gap(self, u: Array) -> float:
        """``‖D w‖`` at whitened coordinates u."""
        return float(np.linalg.norm(self.quadratic.space.mean_gaps @ (self.quadratic.scale * u)))

    def _variance_gap(self, u: Array) -> float:
        variances = (self._differences @ u) @ u
        return float(variances[0] if len(variances) == 1 else np.ptp(variances))

    @cached_property
    def gaps(self) -> tuple[float, float]:
        """Mean gap and (absolute) variance gap of the original layer: see :meth:`solve`."""
        u = self.quadratic.coordinates(self.quadratic.original)
        return self._mean_gap(u), abs(self._variance_gap(u))

    def budget(self, reduction: float) -> float:
        """Variance budget that is the original layer's variance gap divided by ``reduction`` (1 or more, or inf)."""
        if not reduction >= 1:
            raise ValueError(
                f"reduction={reduction!r}; the variance gap is divided by it, so it must be 1 or more "
                "(inf removes the gap)."
            )
        return self.gaps[1] / float(reduction)

    def solve(self, budget: float, towards: Quadratic | None = None) -> Fit:
        """The layer of least objective with ``|variance_gap| ≤ budget``; ``inf`` leaves the variances alone.

        ``towards`` is a quadratic of the same features and ridge with another target than the problem's own.

        ``converged`` says that no layer does better, to rounding. In ``diagnostics``:

        mean_gap : ``‖D w‖``; with two groups the distance between their mean outputs
        variance_gap : with two groups the difference of their output variances (first label minus second), with more
            the largest difference between two of them
        budget : c, the largest ``|variance_gap|`` allowed
        gap : by how much another layer could undercut the objective at most; 0 when converged
        constant : whether the outputs do not vary any more: then only a constant meets the budget
        branch : how it was solved. ``inactive``: the budget was met without a multiplier. Two groups: ``interior``, a
            root γ; ``semidefinite``, the same where no direction can compensate another; ``zero``, as before with
            budget 0; ``hard``, no γ alone meets the budget, the most compensating direction takes up the rest. More:
            ``dual``, certified by the dual; ``local``, the best point of a local solver, to be judged by ``gap``
        multiplier : two groups: γ, with the sign of the gap it holds back; infinite in branch ``zero``
        eigenvalues, coordinates : two groups: (r,) λ and v; ``λ v²`` adds up to ``variance_gap``: the gap, explained
        multipliers : more groups: (G,) μ of their variances
        """
        if not budget >= 0:
            raise ValueError(f"budget={budget!r}; the variance gap is kept below it, so it must not be negative.")
        quadratic = towards or self.quadratic
        solve = self._solve_two if len(self._differences) == 1 else self._solve_more
        v, known = solve(budget, self._shrink(quadratic.minimiser))
        u = self._shrink(v)
        spread, before = (
            float(quadratic.space.variances @ (quadratic.scale * x) ** 2) for x in (u, quadratic.minimiser)
        )
        constant = spread <= _CONSTANT * before
        fit = quadratic.fit(
            u,
            strength=self.mean_penalty,
            converged=known.pop("converged"),
            diagnostics={
                "mean_gap": self._mean_gap(u),
                "budget": float(budget),
                "constant": constant,
                **known,
            },
        )
        if constant:  # to the last bit: what rounding leaves of a weight could still tell the groups apart
            space = quadratic.space
            spreads = space.axes**2 @ space.variances  # (p,) of the features; the dead ones keep their weights
            moved = np.where(spreads > 1e-12 * spreads.max(), fit.weight, 0.0)
            fit = replace(fit, weight=fit.weight - moved, bias=fit.bias + float(space.mean @ moved))
        return fit

    def _solve_two(self, budget: float, aim: Array) -> tuple[Array, dict[str, Any]]:
        eigenvalues, vectors = self._spectrum
        minimiser = vectors.T @ aim
        coordinates, multiplier, branch = nearest_within(eigenvalues, minimiser, float(budget))
        gap = float(eigenvalues @ coordinates**2)
        rounding = 1e-9 * float(np.abs(eigenvalues).max() * (minimiser @ minimiser))
        return vectors @ coordinates, {
            "variance_gap": gap,
            "multiplier": multiplier,
            "branch": branch,
            "eigenvalues": eigenvalues,
            "coordinates": coordinates,
            "gap": 0.0,
            "converged": bool(abs(gap) <= budget + rounding),
        }

    def _solve_more(self, budget: float, aim: Array) -> tuple[Array, dict[str, Any]]:
        nearest = nearest_within_all(self._shrunk, aim, float(budget))
        return nearest.point, {
            "variance_gap": self._variance_gap(self._shrink(nearest.point)),
            "multipliers": nearest.multipliers,
            "branch": nearest.branch,
            "gap": nearest.gap,
            "converged": nearest.certified,
        }
