"""Moment-parity refit of the last layer: equal means and variances of the groups' outputs, in closed form.

In the whitened coordinates u of :mod:`esvdfair.core.refit.quadratic`, with D (pairs × r) the gaps between the group
means and M = Cov₁ − Cov₂ (r × r), the refit with mean penalty λ_e and variance budget c is

    min  ‖u − r‖² + λ_e‖D u‖²     s.t.  |uᵀ M u| ≤ c.

With ``B = (I + λ_e DᵀD)^{-1/2}`` and the spectrum ``B M B = E diag(λ) Eᵀ``, the substitution ``u = B E v`` leaves
``min ‖v − z‖²  s.t. |Σ λ_i v_i²| ≤ c`` with ``z = Eᵀ B r``: a trust-region subproblem, not convex, whose global minimum
is ``v_i = z_i/(1+γλ_i)`` at the root γ of one monotone scalar equation. One spectrum serves every budget.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.ols import quadratic_of
from esvdfair.core.refit.quadratic import Array, FeatureSpace, Fit, Quadratic

Branch = Literal["inactive", "interior", "semidefinite", "zero", "hard"]

_EPS = float(np.finfo(np.float64).eps)
# Gaps below these parts of the features' own spread are rounding of the moments, not gaps.
_NO_MEAN_GAP = 1e-10
_NO_VARIANCE_GAP = 1e-13
# What is below this part of its like counts as zero when the hard case is told from the interior.
_HARD = 1e-12
# A budget below this part of the gap is zero: the numbers that would meet it underflow.
_NO_BUDGET = 1e-200


@dataclass(frozen=True)
class ParityProblem:
    """The refit of one quadratic at one mean penalty, for any number of variance budgets.

    Parameters
    ----------
    quadratic : features, target and ridge
    mean_penalty : λ_e ≥ 0, the weight of the squared mean gap beside the mean squared error; ``inf`` for equal means

    Examples
    --------
    A scan over budgets costs one eigenproblem::

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
    def _variance_form(self) -> Array:
        """(r, r) M in whitened coordinates."""
        scale = self.quadratic.scale
        form: Array = variance_form(self.quadratic.space) * scale * scale[:, None]
        return form

    def _shrink(self, x: Array) -> Array:
        """``(I + λ_e DᵀD)^{-1/2} x``, columns of x; the projection onto the null space of D when λ_e is infinite."""
        directions, values = self._gap_directions
        # With the SVD of D, I + λ_e DᵀD is 1 + λ_e s² along its right singular vectors and 1 elsewhere.
        loss = 1.0 - 1.0 / np.sqrt(1.0 + self.mean_penalty * values**2)
        shrunk: Array = x - directions.T @ (loss * (directions @ x).T).T
        return shrunk

    @cached_property
    def _spectrum(self) -> tuple[Array, Array]:
        """λ (r,) and E (r, r) of ``B M B``."""
        form = self._shrink(self._shrink(self._variance_form).T)
        values, vectors = scipy.linalg.eigh(form, driver="evd", check_finite=False)
        return values, vectors

    def gaps(self, u: Array) -> tuple[float, float]:
        """Mean gap ``‖D w‖`` and variance gap ``wᵀ M w`` at whitened coordinates u."""
        mean_gaps = self.quadratic.space.mean_gaps @ (self.quadratic.scale * u)
        return float(np.linalg.norm(mean_gaps)), float(u @ self._variance_form @ u)

    def budget(self, reduction: float) -> float:
        """Variance budget that is the original layer's variance gap divided by ``reduction`` (1 or more, or inf)."""
        if not reduction >= 1:
            raise ValueError(
                f"reduction={reduction!r}; the variance gap is divided by it, so it must be 1 or more "
                "(inf removes the gap)."
            )
        _, gap = self.gaps(self.quadratic.coordinates(self.quadratic.original))
        return abs(gap) / float(reduction)

    def solve(self, budget: float) -> Fit:
        """The layer of least objective with ``|wᵀ M w| ≤ budget``; ``inf`` leaves the variances alone.

        ``objective`` is ``E(t − h·w − b)² + ρ‖w − w₀‖² + λ_e‖D w‖²``; its last term is 0 when λ_e is infinite. In
        ``diagnostics``:

        mean_gap : ``‖D w‖``; with two groups the distance between their mean outputs
        variance_gap : ``wᵀ M w``; with two groups the difference of their output variances (first label minus second),
            with more the bound ``wᵀ(Σ_{g<h}|Cov_g − Cov_h|)w`` on the sum of all pairwise differences
        budget : c, the largest ``|variance_gap|`` allowed
        multiplier : γ, with the sign of the gap it holds back; infinite in branch ``zero``
        branch : how it was solved. ``inactive``: the budget was met at γ = 0. ``interior``: a root γ.
            ``semidefinite``: the same, where no direction can compensate another. ``zero``: as before with budget 0.
            ``hard``: no γ alone meets the budget; the most compensating direction takes up the rest.
        eigenvalues : (r,) λ
        coordinates : (r,) v; ``eigenvalues * coordinates**2`` adds up to ``variance_gap``: the gap, explained exactly
        gap : by how much a better layer could undercut the objective
        """
        if not budget >= 0:
            raise ValueError(f"budget={budget!r}; the variance gap is kept below it, so it must not be negative.")
        eigenvalues, vectors = self._spectrum
        minimiser = vectors.T @ self._shrink(self.quadratic.minimiser)
        coordinates, multiplier, branch = _nearest_within(eigenvalues, minimiser, float(budget))
        u = self._shrink(vectors @ coordinates)
        mean_gap, _ = self.gaps(u)
        variance_gap = float(eigenvalues @ coordinates**2)
        penalty = self.mean_penalty * mean_gap**2 if np.isfinite(self.mean_penalty) else 0.0
        rounding = 1e-9 * float(np.abs(eigenvalues).max() * (minimiser @ minimiser))
        return self.quadratic.fit(
            u,
            penalty=penalty,
            strength=self.mean_penalty,
            converged=bool(abs(variance_gap) <= budget + rounding),
            diagnostics={
                "mean_gap": mean_gap,
                "variance_gap": variance_gap,
                "budget": float(budget),
                "multiplier": multiplier,
                "branch": branch,
                "eigenvalues": eigenvalues,
                "coordinates": coordinates,
                "gap": 0.0,
            },
        )


def fit_parity(
    moments: GroupMoments,
    *,
    target: int,
    original: ArrayLike,
    ridge: float = 1e-4,
    intercept: bool = True,
    mean_penalty: float = np.inf,
    reduction: float = np.inf,
) -> Fit:
    """Refit a last layer so that the means and variances of its outputs come together across groups.

    Parameters
    ----------
    moments, target, original, ridge, intercept : as in :func:`esvdfair.core.refit.ols.fit_ols`. Parity makes up for
        what it takes out with directions that vary little; without a ridge their weights grow beyond measure, and
        rows that were not fitted pay for it
    mean_penalty : λ_e, see :class:`ParityProblem`
    reduction : how many times smaller the variance gap must be than that of the original layer

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> groups = np.repeat([0, 1], [60, 40])
    >>> h = rng.normal(size=(100, 3)) * (1 + groups[:, None]) + groups[:, None]
    >>> moments = GroupMoments().update(np.column_stack([h, h.sum(1)]), groups)
    >>> fit = fit_parity(moments, target=3, original=np.ones(3))
    >>> output = h @ fit.weight + fit.bias
    >>> bool(np.isclose(output[:60].mean(), output[60:].mean()))
    True
    >>> bool(np.isclose(output[:60].var(ddof=1), output[60:].var(ddof=1)))
    True
    """
    quadratic = quadratic_of(moments, target=target, original=original, ridge=ridge, intercept=intercept)
    problem = ParityProblem(quadratic, mean_penalty)
    return problem.solve(problem.budget(reduction))


def variance_form(space: FeatureSpace) -> Array:
    """(r, r) M along the axes: Cov₁ − Cov₂ for two groups, ``Σ_{g<h} |Cov_g − Cov_h|`` for more.

    With two groups the problem is solved exactly although M is indefinite. With more there is one constraint for each
    pair, and their sum of absolute values is bounded by one convex form instead: conservative, never wrong.
    """
    first, second = np.triu_indices(len(space.share), k=1)
    differences = space.group_covariances[first] - space.group_covariances[second]
    noise = _NO_VARIANCE_GAP * space.variances[-1]
    differences[np.abs(differences).max(axis=(1, 2)) <= noise] = 0.0
    if len(first) == 1:
        single: Array = (differences[0] + differences[0].T) / 2
        return single
    values, vectors = np.linalg.eigh(differences)
    absolute: Array = np.einsum("gik,gk,gjk->ij", vectors, np.abs(values), vectors, optimize=True)
    return absolute


# --- min ‖v − z‖²  s.t.  |Σ λ_i v_i²| ≤ c -----------------------------------------------------------------------


def _nearest_within(eigenvalues: Array, z: Array, budget: float) -> tuple[Array, float, Branch]:
    """Global minimum v, its multiplier γ (``v_i = z_i/(1+γλ_i)`` but for the hard case) and the branch taken."""
    gap = float(eigenvalues @ z**2)
    if abs(gap) <= budget:
        return z, 0.0, "inactive"
    # In units of the largest |λ| and of ‖z‖, and with the sign for which the gap is positive.
    unit = float(np.copysign(np.abs(eigenvalues).max(), gap))
    size = float(np.linalg.norm(z))
    lam = eigenvalues / unit
    lam[np.abs(lam) <= len(lam) * _EPS] = 0.0
    v, gamma, branch = _solve_scaled(lam, z / size, budget / abs(unit) / size**2)
    return size * v, gamma / unit, branch


def _solve_scaled(lam: Array, z: Array, c: float) -> tuple[Array, float, Branch]:
    """As :func:`_nearest_within` with max λ = O(1), ‖z‖ = 1 and h(0) > c, where h(γ) = Σ λ_i z_i²/(1+γλ_i)²."""

    def excess(gamma: float) -> float:
        return float(lam @ (z / (1.0 + gamma * lam)) ** 2) - c

    # h falls, and no faster than 16 Σλ²z² as long as every 1 + γλ_i ≥ 1/2: a bound on γ from below.
    lower = excess(0.0) / (16.0 * float(lam**2 @ z**2))
    if lower <= 0.0:  # over the budget by rounding alone
        return z, 0.0, "inactive"
    lowest = float(lam.min())
    if lowest >= 0:
        positive = lam > 0
        if c <= _NO_BUDGET:
            return np.where(positive, 0.0, z), np.inf, "zero"
        # (1+γλ)² > γ²λ², hence h(γ) < Σ z²/λ / γ²: a bound from above.
        upper = float(np.sqrt(np.sum(z[positive] ** 2 / lam[positive]) / c))
        gamma = _log_root(excess, lower, upper)
        return z / (1.0 + gamma * lam), gamma, "semidefinite"
    upper = -0.5 / lowest
    if excess(upper) <= 0:
        gamma = _log_root(excess, lower, upper)
        return z / (1.0 + gamma * lam), gamma, "interior"
    return _solve_near_pole(lam, z, c)


def _solve_near_pole(lam: Array, z: Array, c: float) -> tuple[Array, float, Branch]:
    """The root next to the pole γ = −1/λ_min, in s = 1 + γλ_min ∈ (0, ½], or the hard case.

    ``1 + γλ_i = (1 − q_i) + s q_i`` with ``q_i = λ_i/λ_min``: no digit is lost however small s is.
    """
    extreme = int(np.argmin(lam))
    lowest = float(lam[extreme])
    q, rest = lam / lowest, (lowest - lam) / lowest

    def excess(s: float) -> float:
        return float(lam @ (z / (rest + s * q)) ** 2) - c

    near = rest <= _HARD
    if np.linalg.norm(z[near]) <= _HARD:
        v = np.divide(z, rest, out=np.zeros_like(z), where=~near)
        left = float(lam @ v**2) - c
        if left > 0:
            v[extreme] = np.copysign(np.sqrt(left / -lowest), z[extreme])
            return v, -1.0 / lowest, "hard"
    # At this s the extreme term alone, λ_min z²/s², outweighs all positive ones.
    outweighs = abs(z[extreme]) * np.sqrt(-lowest / (lam[lam > 0] @ z[lam > 0] ** 2 - c))
    s = _log_root(excess, max(0.5 * outweighs, 1e-100), 0.5)
    return z / (rest + s * q), (s - 1.0) / lowest, "interior"


def _log_root(f: Callable[[float], float], lower: float, upper: float) -> float:
    """Root of a monotone function between positive bounds; a bound when rounding puts the root outside."""

    def of_log(x: float) -> float:
        return f(math.exp(x))

    a, b = math.log(lower), math.log(upper)
    at_a, at_b = of_log(a), of_log(b)
    if (at_a > 0) == (at_b > 0):
        return lower if abs(at_a) <= abs(at_b) else upper
    return math.exp(brentq(of_log, a, b, xtol=_EPS, rtol=4 * _EPS))
