"""The paper's edit as printed and as its authors solve it, to measure what the errata cost. Not for use.

The library's own edit is :func:`esvdfair.core.edits.edit_paper`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, fsolve

from esvdfair.core import gaps
from esvdfair.core.edits import edit_mean_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.solvers import shrink_mean, solve_covariance

Array = NDArray[np.float64]
Shrink = Callable[[Array, Array, float], Array]

_EPSILON = 1e-5  # of S_e, as in the paper


@dataclass(frozen=True)
class ErrataEdit:
    """The weight (m, n) after both edits, and by how much Σσ⁴ and Σσ² really fell."""

    weight: Array
    covariance_reached: float
    mean_reached: float


def printed_cubic(sigma: Array, cost: Array, multiplier: float) -> Array:
    """σ' as the appendix prints it, with ``27γ⁴ k σ²`` under the root where ``27γ⁴ k² σ²`` is right."""
    k, g = cost, multiplier
    with np.errstate(invalid="ignore", divide="ignore"):  # a negative cost gives no number; the authors saw none either
        root = np.sqrt(2 * g**3 * k**3 + 27 * g**4 * k * sigma**2)
        phi = np.cbrt(9 * g**2 * k * sigma + np.sqrt(3.0) * root)
        return np.asarray(-k / (6 ** (1 / 3) * phi) + phi / (6 ** (2 / 3) * g))


def edit_with_printed_cubic(
    weight: Array, moments: GroupMoments, *, mean_reduction: float, covariance_reduction: float
) -> ErrataEdit:
    """Algorithm 1 with the printed cubic and everything else right: costs as squared norms, a bracketed root."""
    svd = gaps.explain_covariance(weight, moments)
    total = float(np.sum(svd.sigma**4))
    budget = total / covariance_reduction
    active = (svd.cost > 0) & (svd.sigma > 0)
    sigma, cost = svd.sigma[active], svd.cost[active]

    def excess(log_gamma: float) -> float:
        return float(np.log(np.sum(printed_cubic(sigma, cost, np.exp(log_gamma)) ** 4) / budget))

    # The right multiplier is near theirs: widen a bracket around it until it holds the root.
    low = high = float(np.log(solve_covariance(sigma, cost, budget).multiplier))
    while excess(low) < 0:
        low -= 1.0
    while excess(high) > 0:
        high += 1.0
    shrunk = np.zeros_like(svd.sigma)
    shrunk[active] = printed_cubic(sigma, cost, float(np.exp(brentq(excess, low, high))))
    edit = edit_mean_paper((svd.u * shrunk) @ svd.step, moments, reduction=mean_reduction, epsilon=_EPSILON)
    before, after = float(np.sum(edit.sigma_before**2)), float(np.sum(edit.sigma_after**2))
    return ErrataEdit(edit.weight_after, total / float(np.sum(shrunk**4)), before / after)


def edit_unguarded(
    weight: Array, moments: GroupMoments, *, mean_reduction: float, covariance_reduction: float
) -> ErrataEdit:
    """Algorithm 1 with the printed cubic, costs as direct products, inverses, and ``fsolve`` started from 1.

    Written after a description of the authors' code, not copied from it. A cost that rounding made negative has no σ';
    the root solve then sees no numbers and returns its start, and σ stays as it is in those directions.
    """
    second_moment = gaps.scatter_about(moments, centred=False)
    values, vectors = np.linalg.eigh(gaps.covariance_differences(moments)[0])
    spread = vectors * np.sqrt(np.abs(values))
    middle, covariance_reached = edit_unbracketed(
        weight, spread, second_moment, power=4, reduction=covariance_reduction, shrink=printed_cubic
    )
    after, mean_reached = edit_unbracketed(
        middle,
        gaps.mean_factor(moments, _EPSILON),
        second_moment,
        power=2,
        reduction=mean_reduction,
        shrink=shrink_mean,
    )
    return ErrataEdit(after, covariance_reached, mean_reached)


def edit_unbracketed(
    weight: Array, factor: Array, second_moment: Array, *, power: int, reduction: float, shrink: Shrink
) -> tuple[Array, float]:
    """The weight with ``Σσᵖ`` of ``W S`` lowered ``reduction`` times if the root solve works; by how much it was."""
    u, sigma, vt = np.linalg.svd(weight @ factor, full_matrices=False)
    step = vt @ np.linalg.pinv(factor)
    cost = np.array([p @ second_moment @ p for p in step])
    total = float(np.sum(sigma**power))

    def excess(gamma: Array) -> list[float]:
        return [float(np.sum(shrink(sigma, cost, float(gamma[0])) ** power)) - total / reduction]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # its failure goes unseen, as in the authors' code
        gamma = float(fsolve(excess, 1.0)[0])
    shrunk = shrink(sigma, cost, gamma)
    shrunk = np.where(np.isfinite(shrunk), shrunk, sigma)
    return (u * shrunk) @ step, total / float(np.sum(shrunk**power))
