"""Scalar solvers: how far each singular value shrinks so that a budget is met at the least cost.

Both problems read

    min Σ k_i (σ'_i − σ_i)²   subject to   Σ σ'_i^p ≤ c        (p = 2: mean gap, p = 4: covariance gap)

and are solved by one multiplier γ ≥ 0, the root of one monotone equation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]

_EPS = float(np.finfo(np.float64).eps)
_MET = 1 + 16 * _EPS  # a budget overrun by no more than this is met: a second edit with the same budget changes nothing


@dataclass(frozen=True)
class Shrinkage:
    """Solution of the problem above.

    Attributes
    ----------
    sigma : (r,) σ', not negative, never above σ
    multiplier : γ; 0 when the budget was met already, inf when the budget is 0
    achieved : Σσ'^p
    converged : whether the root was found to machine precision
    """

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
    return _solve(sigma, cost, budget, 2, shrink_mean, _mean_bracket)


def solve_covariance(sigma: ArrayLike, cost: ArrayLike, budget: float) -> Shrinkage:
    """Solve ``min Σk(σ'−σ)²`` subject to ``Σσ'⁴ ≤ budget``.

    Differs from the paper: the equation for γ in its appendix has σ'² where the constraint has σ'⁴.
    """
    return _solve(sigma, cost, budget, 4, shrink_covariance, _covariance_bracket)


def _mean_bracket(sigma: Array, cost: Array, ratio: float) -> tuple[float, float]:
    """γ at which every σ shrinks by at most, at least, √ratio."""
    return cost.min() * (np.sqrt(ratio) - 1), cost.max() * (np.sqrt(ratio) - 1)


def _covariance_bracket(sigma: Array, cost: Array, ratio: float) -> tuple[float, float]:
    """γ at which every σ shrinks by at most, at least, ratio^¼."""
    alone = (ratio**0.75 - ratio**0.5) * cost / (2 * sigma**2)
    return alone.min(), alone.max()


def _solve(
    sigma: ArrayLike,
    cost: ArrayLike,
    budget: float,
    power: int,
    shrink: Callable[[Array, Array, float], Array],
    bracket: Callable[[Array, Array, float], tuple[float, float]],
) -> Shrinkage:
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

    low, high = bracket(s, k, rest / budget)
    gamma = log_root(excess, low / 2, 2 * high)  # exact in real arithmetic; the factors absorb rounding
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
