"""Distributions on a grid: repair of a noisy distribution function, cheapest transport to near parity."""

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from esvdfair.baselines.base import Floats


def isotonic_linf(x: Floats) -> Floats:
    """Non-decreasing z that minimises ``max |z − x|``: the mean of the running maximum and the later minimum."""
    return np.asarray((np.maximum.accumulate(x) + np.minimum.accumulate(x[::-1])[::-1]) / 2)


def repair_cdf(x: Floats) -> Floats:
    """The distribution function on the same points that is nearest to x in the largest deviation.

    Clipping the isotonic solution to [0, 1] and raising its end to 1 keeps it optimal: what clipping adds to the
    deviation no distribution function could avoid.
    """
    z = np.clip(isotonic_linf(x), 0.0, 1.0)
    z[-1] = 1.0
    return z


def monotone_plan(p: Floats, q: Floats) -> Floats:
    """Joint mass (bins, bins) that carries p to q in order: the cheapest one for a convex cost on the line.

    Bins i and j share the levels that both cover: ``γ_ij = (min(P_i, Q_j) − max(P_{i−1}, Q_{j−1}))⁺``.
    """
    before, after = np.cumsum(p), np.cumsum(q)
    upper = np.minimum(before[:, None], after)
    lower = np.maximum((before - p)[:, None], after - q)
    return np.asarray(np.maximum(upper - lower, 0.0))


@dataclass(frozen=True)
class Coupling:
    """Result of the linear program for G groups and k bins.

    ``plans`` (G, k, k): joint mass of (bin before, bin after); ``targets`` (G, k): distribution after; ``cost``:
    mean squared change, averaged over groups with their shares.
    """

    plans: Floats
    targets: Floats
    cost: float


def cheapest_coupling(histogram: Floats, *, proportions: Floats, points: Floats, alpha: float) -> Coupling:
    """Transport all groups to output distributions within KS distance ``alpha`` of each other.

    ``min Σ_a w_a Σ_ij γ_aij (c_i − c_j)²`` over plans γ_a ≥ 0 with ``Σ_j γ_aij = p_ai`` and output distribution
    functions ``R_a(j) = Σ_{l≤j} Σ_i γ_ail``, such that ``|R_a(j) − B(j)| ≤ α/2`` for a common B (the barycentre).

    Parameters
    ----------
    histogram : (groups, bins), p, each row sums to 1
    proportions : (groups,), w
    points : (bins,), c, the value a bin stands for
    alpha : largest allowed KS distance between two groups; 0 gives them one distribution

    Raises
    ------
    RuntimeError
        When HiGHS does not solve the program, which is always feasible.
    """
    groups, bins = histogram.shape
    square = (points[:, None] - points[None, :]) ** 2
    weight = proportions / proportions.sum()
    a_eq, a_ub = _constraints(groups, bins)
    solution = linprog(  # type: ignore[call-overload]  # the stubs do not know sparse constraints
        # costs in units of the largest one, so that the solver's tolerances mean the same for every scale of scores
        np.concatenate([np.kron(weight, square.ravel() / square.max()), np.zeros((groups + 1) * bins)]),
        A_ub=a_ub,
        b_ub=np.full(a_ub.shape[0], alpha / 2),
        A_eq=a_eq,
        b_eq=np.concatenate([histogram.ravel(), np.zeros(groups * bins)]),
        bounds=(0, 1),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if solution.status != 0:
        raise RuntimeError(f"HiGHS did not solve the transport program: {solution.message}")
    cdfs = solution.x[groups * bins * bins :].reshape(groups + 1, bins)[:groups]
    targets = np.diff([repair_cdf(cdf) for cdf in cdfs], prepend=0.0, axis=1)
    # the solver meets the marginals to its tolerance, the monotone plans to these targets meet them exactly
    plans = np.stack([monotone_plan(p, q) for p, q in zip(histogram, targets, strict=True)])
    return Coupling(plans, targets, float(np.einsum("a,aij,ij->", weight, plans, square)))


def _constraints(groups: int, bins: int) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Equalities (rows of γ sum to p; columns of γ are steps of R) and inequalities (|R_a − B| ≤ α/2)."""
    one, eye = np.ones((1, bins)), sparse.eye_array(bins)
    every = sparse.eye_array(groups)
    row_sums = sparse.kron(every, sparse.kron(eye, one))
    column_sums = sparse.kron(every, sparse.kron(one, eye))
    steps = sparse.kron(every, sparse.diags_array([1.0, -1.0], offsets=[0, -1], shape=(bins, bins)))
    a_eq = sparse.block_array(
        [
            [row_sums, sparse.csr_array((groups * bins, groups * bins)), sparse.csr_array((groups * bins, bins))],
            [column_sums, -steps, sparse.csr_array((groups * bins, bins))],
        ],
        format="csr",
    )
    gap = sparse.hstack(
        [
            sparse.csr_array((groups * bins, groups * bins * bins)),
            sparse.eye_array(groups * bins),
            -sparse.kron(np.ones((groups, 1)), eye),
        ]
    )
    return a_eq, sparse.vstack([gap, -gap], format="csr")
