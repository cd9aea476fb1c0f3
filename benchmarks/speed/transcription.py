"""Algorithm 1 of the paper, line by line: a loop over the directions, inverses where the paper writes inverses.

Written from the paper with its errata put right (docs/decisions, DESIGN section 1), so that it gives the weights that
`esvdfair.core.edits.edit_paper` gives. It is what a reader would type in, and what the library is compared with.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]
Costs = Callable[[Array, Array, Array], Array]
Shrink = Callable[[float, float, float], float]


def algorithm_1(
    w: Array, x: Array, groups: NDArray[np.intp], *, mean_reduction: float, covariance_reduction: float, costs: Costs
) -> Array:
    """(m, n) weight after the covariance edit and the mean edit, for inputs x (N, n) of two groups."""
    x1, x2 = x[groups == 0], x[groups == 1]
    mean1, mean2 = x1.mean(axis=0), x2.mean(axis=0)
    centred1, centred2 = x1 - mean1, x2 - mean2
    m = centred1.T @ centred1 / (len(x1) - 1) - centred2.T @ centred2 / (len(x2) - 1)
    values, q = np.linalg.eigh(m)
    s_v = q @ np.diag(np.sqrt(np.abs(values)))
    w = _edit(w, s_v, x, 4, covariance_reduction, _cubic_root, costs)
    d = (mean1 - mean2)[None, :]
    s_e = np.linalg.cholesky(d.T @ d + 1e-5 * np.eye(len(d.T)))
    return _edit(w, s_e, x, 2, mean_reduction, lambda sigma, k, gamma: sigma * k / (k + gamma), costs)


def _edit(w: Array, s: Array, x: Array, power: int, reduction: float, shrink: Shrink, costs: Costs) -> Array:
    u, sigma, vt = np.linalg.svd(w @ s)
    k = costs(vt.T, s, x)
    budget = np.sum(sigma**power) / reduction

    def shrunk(gamma: float) -> list[float]:
        return [shrink(sigma[i], k[i], gamma) for i in range(len(sigma))]

    def excess(log_gamma: float) -> float:
        return float(np.sum(np.array(shrunk(np.exp(log_gamma))) ** power)) - budget

    scale = np.log(np.median(k))
    after = shrunk(np.exp(brentq(excess, scale - 60, scale + 60, xtol=1e-12)))
    total = np.zeros_like(w)
    for i in range(len(sigma)):
        total += after[i] * np.outer(u[:, i], vt[i])
    return total @ np.linalg.inv(s)


def _cubic_root(sigma: float, k: float, gamma: float) -> float:
    """The real root of ``k σ' − k σ + 2γ σ'³ = 0`` (Cardano)."""
    p, q = k / (2 * gamma), k * sigma / (2 * gamma)
    root = np.sqrt(q**2 / 4 + p**3 / 27)
    large = np.cbrt(q / 2 + root)
    return float(large - p / (3 * large))


def costs_by_direction(v: Array, s: Array, x: Array) -> Array:
    """(r,) ``k_i = v_iᵀ S⁻¹ XᵀX S⁻ᵀ v_i``, as the paper's loop writes it."""
    k = np.zeros(v.shape[1])
    for i in range(v.shape[1]):
        k[i] = v[:, i].T @ np.linalg.inv(s) @ x.T @ x @ np.linalg.inv(s).T @ v[:, i]
    return k


def costs_with_one_inverse(v: Array, s: Array, x: Array) -> Array:
    """(r,) the same loop with the inverse and XᵀX taken out of it."""
    inverse, second_moment = np.linalg.inv(s), x.T @ x
    k = np.zeros(v.shape[1])
    for i in range(v.shape[1]):
        p = v[:, i] @ inverse
        k[i] = p @ second_moment @ p
    return k
