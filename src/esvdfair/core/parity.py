"""Moment-parity refit of the last layer: equal means and variances of the groups' outputs.

In the whitened coordinates u of :mod:`esvdfair.core.quadratic`, with D (pairs × r) the gaps between the group means and
C_g (r × r) the group covariances, the refit with mean penalty λ_e and variance budget c is

    min  ‖u − r‖² + λ_e‖D u‖²     s.t.  |uᵀ(C_g − C_h)u| ≤ c  for all pairs of groups.

With ``B = (I + λ_e DᵀD)^{-1/2}`` the substitution ``u = B v`` leaves the point nearest to ``z = B r`` at which group
variances ``v_g = vᵀ C_g v``, of covariances ``B C_g B``, agree:

    min ‖v − z‖²   s.t.  |v_g − v_h| ≤ c  for all pairs of groups.

Not convex. *Two groups*: one form ``M = C₁ − C₂``, a trust-region subproblem; along the eigenvectors of M its global
minimum is ``z_i/(1+γλ_i)`` at the root γ of one monotone equation. *More*: the Lagrange dual,

    max over μ ∈ R^G, Σμ = 0, A = I + Σ μ_g C_g ≻ 0,   of   zᵀz − zᵀA⁻¹z − c/2 Σ|μ_g|,

is concave with as many unknowns as groups. Where A stays positive definite at its maximum, ``v = A⁻¹z`` meets the
constraints and its distance equals the bound: a certified global minimum. Elsewhere the point comes from a local
solver, and the difference between its distance and the bound says how much better another point could be.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import scipy.linalg
from scipy.linalg.lapack import dpotrf, dpotrs
from scipy.optimize import NonlinearConstraint, minimize

from esvdfair.core.edits import check_reduction, log_root
from esvdfair.core.quadratic import Array, Fit, Quadratic

Branch = Literal["inactive", "interior", "semidefinite", "zero", "hard", "dual", "local"]

_EPS = float(np.finfo(np.float64).eps)
_HARD = 1e-12  # below this part of its like a number is zero when the hard case is told from the interior
_NO_BUDGET = 1e-200  # a budget below this part of the gap is zero: the numbers that would meet it underflow
_CERTIFIED, _MET = 1e-7, 1e-9  # what counts so, in units of ‖z‖² and of the largest difference of covariances
_LARGEST_MULTIPLIER, _MAX_STEPS = 1e6, 100
_LARGE = 4000  # groups times coordinates beyond which the local solver starts from one point only
_NO_MEAN_GAP = 1e-10  # part of the features' own spread that is rounding of the moments
_CONSTANT = 1e-9  # outputs that vary less than this part of the least-squares ones are a constant


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
        """In whitened coordinates, (1, r, r) ``C₀ − C₁`` for two groups, (G, r, r) ``C_g − C̄`` for more."""
        scale = self.quadratic.scale
        return self.quadratic.space.covariance_gaps * (scale * scale[:, None])

    def _shrink(self, x: Array) -> Array:
        """``(I + λ_e DᵀD)^{-1/2} x``, columns of x; the projection onto the null space of D when λ_e is infinite."""
        directions, values = self._gap_directions
        # With the SVD of D, I + λ_e DᵀD is 1 + λ_e s² along its right singular vectors and 1 elsewhere.
        loss = 1.0 - 1.0 / np.sqrt(1.0 + self.mean_penalty * values**2)
        return np.asarray(x - directions.T @ (loss * (directions @ x).T).T)

    @cached_property
    def _shrunk(self) -> Array:
        """The differences as forms in v: ``B C B``."""
        return np.stack([self._shrink(self._shrink(form).T) for form in self._differences])

    @cached_property
    def _spectrum(self) -> Any:
        """λ (r,) and E (r, r) of ``B M B``, for two groups."""
        return scipy.linalg.eigh(self._shrunk[0], driver="evd", check_finite=False)

    def _gaps(self, u: Array) -> tuple[float, float]:
        """Mean gap ``‖D w‖`` and variance gap at whitened coordinates u."""
        variances = (self._differences @ u) @ u
        gap = variances[0] if len(variances) == 1 else np.ptp(variances)
        return float(np.linalg.norm(self.quadratic.space.mean_gaps @ (self.quadratic.scale * u))), float(gap)

    @cached_property
    def gaps(self) -> tuple[float, float]:
        """Mean gap and (absolute) variance gap of the original layer: see :meth:`solve`."""
        mean, variance = self._gaps(self.quadratic.coordinates(self.quadratic.original))
        return mean, abs(variance)

    def budget(self, reduction: float) -> float:
        """Variance budget that is the original layer's variance gap divided by ``reduction`` (1 or more, or inf)."""
        check_reduction(reduction)
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
        multiplier, eigenvalues, coordinates : two groups: γ, with the sign of the gap it holds back (infinite in branch
            ``zero``); (r,) λ and v, of which ``λ v²`` adds up to ``variance_gap``
        multipliers : more groups: (G,) μ of their variances
        """
        if not budget >= 0:
            raise ValueError(f"budget={budget!r}; the variance gap is kept below it, so it must not be negative.")
        quadratic = towards or self.quadratic
        aim = self._shrink(quadratic.minimiser)
        known: dict[str, Any]
        if len(self._differences) == 1:
            eigenvalues, vectors = self._spectrum
            z = vectors.T @ aim
            v, multiplier, branch = nearest_within(eigenvalues, z, float(budget))
            variance_gap = float(eigenvalues @ v**2)
            known = {
                "eigenvalues": eigenvalues,
                "coordinates": v,
                "multiplier": multiplier,
                "branch": branch,
                "gap": 0.0,
            }
            converged = abs(variance_gap) <= budget + 1e-9 * float(np.abs(eigenvalues).max() * (z @ z))  # to rounding
            u = self._shrink(vectors @ v)
            mean_gap, _ = self._gaps(u)
        else:
            nearest = nearest_within_all(self._shrunk, aim, float(budget))
            known = {"multipliers": nearest.multipliers, "branch": nearest.branch, "gap": nearest.gap}
            converged, u = nearest.certified, self._shrink(nearest.point)
            mean_gap, variance_gap = self._gaps(u)
        spread, before = (
            float(quadratic.space.variances @ (quadratic.scale * x) ** 2) for x in (u, quadratic.minimiser)
        )
        constant = spread <= _CONSTANT * before
        known |= {"mean_gap": mean_gap, "variance_gap": variance_gap, "budget": float(budget), "constant": constant}
        fit = quadratic.fit(u, strength=self.mean_penalty, converged=converged, diagnostics=known)
        if constant:  # to the last bit: what rounding leaves of a weight could still tell the groups apart
            space = quadratic.space
            moved = np.where(space.axes.any(axis=1), fit.weight, 0.0)  # the dead ones keep their weights
            fit = replace(fit, weight=fit.weight - moved, bias=fit.bias + float(space.mean @ moved))
        return fit


# --- two groups: min ‖v − z‖²  s.t.  |Σ λ_i v_i²| ≤ c ---------------------------------------------------------------


def nearest_within(eigenvalues: Array, z: Array, budget: float) -> tuple[Array, float, Branch]:
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
    """As :func:`nearest_within` with max λ = O(1), ‖z‖ = 1 and h(0) > c, where h(γ) = Σ λ_i z_i²/(1+γλ_i)²."""

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
        gamma = log_root(excess, lower, upper)
        return z / (1.0 + gamma * lam), gamma, "semidefinite"
    upper = -0.5 / lowest
    if excess(upper) <= 0:
        gamma = log_root(excess, lower, upper)
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
    s = log_root(excess, max(0.5 * outweighs, 1e-100), 0.5)
    return z / (rest + s * q), (s - 1.0) / lowest, "interior"


# --- more groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nearest:
    """A point v (r,) and its multipliers μ (G,), whose sum is 0: positive for groups whose variance is held down.

    Attributes
    ----------
    gap : ‖v − z‖² minus the lower bound of the dual: 0 to rounding when the point is certified
    certified : whether the point is a global minimum to rounding
    branch : "inactive" (z itself), "dual" (``A⁻¹z``), or "local"
    """

    point: Array
    multipliers: Array
    gap: float
    certified: bool
    branch: Branch


def nearest_within_all(covariances: Array, z: Array, budget: float) -> Nearest:
    """The point nearest to z whose group variances differ by at most ``budget``; covariances (G, r, r)."""
    if _variance_spread(covariances, z) <= budget * (1 + 16 * _EPS):
        return Nearest(z, np.zeros(len(covariances)), 0.0, True, "inactive")
    # In units of ‖z‖ and of the largest difference of covariances, only differences from their mean matter.
    size, differences = float(np.linalg.norm(z)), covariances - covariances.mean(axis=0)
    unit = float(np.abs(differences).max())
    dual = _ParityDual(z / size, differences / unit, budget / unit / size**2)
    attempts = [(dual, False), (dual, True)]
    # Where only huge multipliers make variances equal, rounding of the forms would decide, and the bound would say
    # nothing. Then they are made equal up to what counts as met.
    if 2 * dual.half < _MET:
        attempts.append((_ParityDual(dual.z, dual.forms, _MET), False))
    for each, barrier in attempts:
        y = each.minimise(barrier=barrier)
        v, multipliers = each.solution(y), each.basis @ y
        gap = max(each.distance(v) - each.bound(y), 0.0)
        if np.abs(multipliers).max() <= _LARGEST_MULTIPLIER and each.is_met(v) and gap <= _CERTIFIED:
            return Nearest(size * v, multipliers / unit, size**2 * gap, True, "dual")
        if each is dual:
            start = y
    v = dual.polish(start)
    gap = max(dual.distance(v) - dual.bound(start), 0.0)
    return Nearest(size * v, dual.basis @ start / unit, size**2 * gap, gap <= _CERTIFIED, "local")


def _variance_spread(covariances: Array, v: Array) -> float:
    """Largest difference between two group variances."""
    return float(np.ptp((covariances @ v) @ v))


class _ParityDual:
    """``min zᵀA⁻¹z + c/2 Σ|μ_g|`` over ``μ = N y``, N an orthonormal basis of Σμ = 0: the dual without its constant.

    ``|μ|`` is smoothed by the logarithmic barrier of ``min c/2 (p + q), p − q = μ, p, q > 0`` at weight τ. Where the
    minimum lies on the boundary of A ≻ 0, ``τ Σ ξᵀA⁻¹ξ`` over a few random ξ keeps the path inside: the boundary has
    G − 2 dimensions, so that a null vector orthogonal to G + 2 of them and to z is not met (16 do for many groups).
    """

    def __init__(self, z: Array, forms: Array, budget: float) -> None:
        self.z, self.forms, self.half = z, forms, budget / 2
        self.basis = scipy.linalg.null_space(np.ones((1, len(forms))))  # (G, G−1)
        self.along = np.tensordot(self.basis.T, forms, 1)  # (G−1, r, r)
        self.probes = np.random.default_rng(0).normal(size=(len(z), min(len(forms) + 2, 16))) / np.sqrt(len(z))

    def minimise(self, *, barrier: bool) -> Array:
        """Newton's method along τ → 0, from μ = 0."""
        y = np.zeros(len(self.along))
        for tau, last in self._weights(barrier):
            state = self._state(y, tau, barrier)
            assert state is not None  # the step that led here was taken because A is positive definite
            for _ in range(_MAX_STEPS):
                gradient, hessian = self._derivatives(y, *state[1:], tau)
                step = -np.linalg.solve(hessian + 1e-15 * np.trace(hessian) * np.eye(len(y)), gradient)
                fall = -float(gradient @ step)
                if not last and fall < 0.1 * tau:
                    break
                close = fall < 1e-12 * float(self.z @ state[1][:, 0])  # one more step squares the error
                t, trial = self._line_search(y, step, state[0], fall, tau, barrier, sure=close)
                if trial is None:
                    break
                y, state = y + t * step, trial
                if close:
                    break
        return y

    def _weights(self, barrier: bool) -> list[tuple[float, bool]]:
        """τ, and whether it is the last one."""
        start, end = (0.1 * self.half or 1e-2), (1e-12 if self.half > 0 or barrier else 0.0)
        steps = math.ceil(math.log(start / end, 20)) if start > end > 0 else 0
        return [*((start / 20**k, False) for k in range(steps)), (end, True)]

    def _line_search(
        self, y: Array, step: Array, value: float, fall: float, tau: float, barrier: bool, *, sure: bool
    ) -> tuple[float, tuple[float, Array, Array] | None]:
        """Halve until A is positive definite and Armijo holds (``sure``: too near the minimum for values to tell)."""
        t = 1.0
        while t > 1e-8:
            trial = self._state(y + t * step, tau, barrier)
            if trial is not None and (sure or trial[0] <= value - 1e-4 * t * fall):
                return t, trial
            t /= 2
        return t, None

    def _matrix(self, y: Array) -> Array:
        """A."""
        return np.asarray(np.eye(len(self.z)) + np.tensordot(y, self.along, 1))

    def _state(self, y: Array, tau: float, barrier: bool) -> tuple[float, Array, Array] | None:
        """The value, ``A⁻¹X`` (r, k) and the Cholesky factor of A; None where A is not positive definite."""
        lower, failed = dpotrf(self._matrix(y), lower=1, overwrite_a=1)
        if failed:
            return None
        columns = np.column_stack([self.z, math.sqrt(tau) * self.probes]) if barrier else self.z[:, None]
        solutions = dpotrs(lower, columns, lower=1)[0]
        value = float(np.sum(columns * solutions))
        if self.half > 0:
            # p + q = (τ + √(τ² + (c/2 μ)²)) / (c/2), p q = τ (p + q)/c at the minimum
            total = (tau + np.hypot(tau, self.half * (self.basis @ y))) / self.half
            value += float(np.sum(self.half * total - tau * np.log(tau * total / (2 * self.half))))
        return value, solutions, lower

    def _derivatives(self, y: Array, solutions: Array, lower: Array, tau: float) -> tuple[Array, Array]:
        """Gradient ``−vᵀF_k v`` and Hessian ``2 vᵀF_k A⁻¹F_l v`` in y, and those of the smoothed ``c/2 Σ|μ|``."""
        pulled = self.along @ solutions  # (G−1, r, k)
        gradient = -np.einsum("im,kim->k", solutions, pulled)
        flat = pulled.transpose(1, 0, 2).reshape(len(self.z), -1)
        solved = dpotrs(lower, flat, lower=1)[0].reshape(len(self.z), len(y), -1)
        hessian = 2 * np.einsum("kim,ilm->kl", pulled, solved)
        if self.half > 0:
            mu = self.basis @ y
            root = np.hypot(tau, self.half * mu)
            gradient += self.basis.T @ (self.half**2 * mu / (tau + root))
            hessian += (self.basis.T * (self.half**2 * tau / (root * (tau + root)))) @ self.basis
        return gradient, hessian

    def solution(self, y: Array) -> Array:
        """``v = A⁻¹z``."""
        return np.asarray(dpotrs(dpotrf(self._matrix(y), lower=1, overwrite_a=1)[0], self.z, lower=1)[0])

    def bound(self, y: Array) -> float:
        """A lower bound of ‖v − z‖² over all v that meet the budget, for every y with A ≻ 0."""
        return float(1.0 - self.z @ self.solution(y) - self.half * np.abs(self.basis @ y).sum())

    def distance(self, v: Array) -> float:
        return float(np.sum((v - self.z) ** 2))

    def is_met(self, v: Array) -> bool:
        return _variance_spread(self.forms, v) <= 2 * self.half + _MET

    def polish(self, y: Array) -> Array:
        """A local minimum near ``A⁻¹z``, or where the direction that A nearly loses is added to it; 0 if none is found.

        The constant predictor v = 0 meets every budget.
        """
        v = self.solution(y)
        if self.half == 0 and len(self.forms) > len(v):  # more equations than unknowns
            return np.zeros_like(v)
        lost = scipy.linalg.eigh(self._matrix(y), subset_by_index=[0, 0])[1][:, 0] * np.linalg.norm(v - self.z)
        starts = (v, v + lost, v - lost, self.z) if len(self.forms) * len(v) <= _LARGE else (v,)
        found = [self._met(self._descend(start)) for start in starts]
        return min([np.zeros_like(v), *filter(self.is_met, found)], key=self.distance)

    def _descend(self, start: Array) -> Array:
        """SLSQP over (v, m) with ``|v_g − m| ≤ c/2``."""
        within = NonlinearConstraint(
            lambda x: (self.forms @ x[:-1]) @ x[:-1] - x[-1],
            -self.half,
            self.half,
            jac=lambda x: np.column_stack([2 * self.forms @ x[:-1], np.full(len(self.forms), -1.0)]),
        )

        def loss(x: Array) -> tuple[float, Array]:
            return self.distance(x[:-1]), np.append(2 * (x[:-1] - self.z), 0.0)

        x = np.append(start, np.mean((self.forms @ start) @ start))
        found: Array = minimize(loss, x, jac=True, method="SLSQP", constraints=within, tol=1e-12).x[:-1]
        return found

    def _met(self, v: Array) -> Array:
        """v moved as little as it takes to meet the budget to rounding."""
        if self.half > 0:
            spread = _variance_spread(self.forms, v)
            return v * math.sqrt(2 * self.half / spread) if spread > 2 * self.half else v
        for _ in range(5):  # Gauss-Newton on v_g = v_h
            pulled = self.along @ v
            v = v - np.linalg.lstsq(2 * pulled, pulled @ v, rcond=None)[0]
        return v
