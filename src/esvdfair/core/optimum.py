"""The best predictor that brings group distributions together without seeing the group.

Given η(x) = E[Y|x] and P(s|x), with p_s = E P(s|x), the groups' distribution functions of a (randomised)
predictor f are F_s(t) = E[P(s|x)/p_s · 1{f ≤ t}]. The problem is

    min E(f − η)²   subject to   |F_a(t) − F_b(t)| ≤ α  for all groups a < b and all t,

a linear program once f takes values on a grid q_1 < … < q_L. One multiplier ν_ab,k for each pair and each k < L
(at q_L the constraint is empty) gives each group a potential, ψ_b(q_l) = Σ_{k≥l} (Σ_{a<b} ν_ab,k − Σ_{c>b} ν_bc,k),
and strong duality reads

    optimum = − min_ν  E[max_l  Σ_s P(s|x)/p_s · ψ_s(q_l) − (η − q_l)²]  +  α Σ |ν|,

the arg max over l being the optimal prediction. For two groups Σ_s is Δ(x)ψ(q_l), Δ = P(1|x)/p₁ − P(0|x)/p₀.

The maximum is smoothed to β⁻¹ logsumexp(β ·) and the dual solved by an active-set Newton method while β grows. Rows are
first compressed to weighted cells in (η, P(·|x)); those that agree to about 1e-6 are one atom, which none divides. The
dual is solved to more digits than the optimum is worth: stopped early, it would amplify the last bits of η.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esvdfair.core.checks import check_weight

Floats = NDArray[np.float64]

_AGREE = 1e-6  # rows whose η, in units of its spread, and probabilities differ by less are one
_TOLERANCE, _CONVERGED = 1e-6, 1e-3  # of the optimality conditions, in units of KS: where to stop; what is good enough
_MAX_TRIALS, _NEGLIGIBLE = 120, -50.0  # exp of less is nothing beside 1, and slow where it underflows
_POOL_SLACK = 3e-3  # a gap over the level that is worth a pool; smaller ones come from the cells' own mass
_ROWS_AT_ONCE = 512  # whose scores on the grid fit in a core's own cache


@dataclass(frozen=True)
class Optimum:
    """Attribute-unaware optimum at one level α of the Kolmogorov-Smirnov (KS) distance.

    Attributes
    ----------
    level : α, the bound on the largest pairwise KS distance
    grid : (L,) increasing values q_l
    potential : (G, L) ψ_s(q_l), zero in the last column; the groups' potentials sum to zero
    pools : (r, 3) disjoint intervals [low, high] of values, and the one value that stands for each (``_find_pools``)
    group_prior : (G,) p_s
    converged : whether the smoothed dual met its optimality conditions
    dual_objective : a certified lower bound on the mean squared distance to η of every (randomised) predictor on the
        cells that takes values on the grid and keeps every pairwise KS distance at or under ``level``
    mse, ks : of ``predict`` on the cells: mean squared distance to η, and largest pairwise KS distance
    """

    level: float
    grid: Floats
    potential: Floats
    pools: Floats
    group_prior: Floats
    converged: bool
    dual_objective: float
    mse: float
    ks: float

    def predict(self, eta: ArrayLike, group_probability: ArrayLike) -> Floats:
        """(n,) f*(x) of rows with E[Y|x] (n,) and P(s|x) (n, G), in the order of the groups at fitting."""
        eta, probability = _check_rows(eta, group_probability)
        if probability.shape[1] != len(self.group_prior):
            raise ValueError(
                f"group_probability has {probability.shape[1]} columns, but the optimum was fitted with "
                f"{len(self.group_prior)} groups; give the same columns in the same order."
            )
        return _pool(_best_values(eta, probability / self.group_prior, self.potential, self.grid), self.pools)


def fit_optimum(
    eta: ArrayLike,
    group_probability: ArrayLike,
    *,
    levels: Sequence[float],
    sample_weight: ArrayLike | None = None,
    n_grid: int | None = None,
    n_cells: int = 1024,
    sharpness: float = 300.0,
) -> tuple[Optimum, ...]:
    """Optimal unaware predictors at several levels α, in the order of ``levels``.

    Parameters
    ----------
    eta, group_probability : (n,) E[Y|x]; (n, G) P(s|x), rows that sum to one
    levels : bounds α ≥ 0 on the largest pairwise KS distance; each is solved starting from the next larger one.
    sample_weight : (n,) non-negative, optional.
    n_grid : number of values L, at most. By default 128, fewer from four groups on, because the dual has a
        multiplier for each value and pair of groups.
    n_cells : rows are compressed to at most so many weighted cells; fewer rows than that are kept as they are.
    sharpness : β in units of 1/Var(η). The smoothed dual lies within log(L)/β of the exact one.

    The optimum is randomised where rows tie; ``predict`` is not, so on data with few distinct rows its KS distance can
    differ from α by their mass. ``Optimum.ks`` says what was reached.

    Examples
    --------
    >>> import numpy as np
    >>> eta = np.linspace(0, 1, 50)
    >>> p = np.column_stack([1 - eta, eta])
    >>> strict, loose = fit_optimum(eta, p, levels=[0.1, 1.0])
    >>> strict.ks < loose.ks, strict.mse > loose.mse
    (True, True)
    """
    eta, probability = _check_rows(eta, group_probability)
    if not len(eta):
        raise ValueError("eta has no rows; an optimum needs data to be fitted on.")
    if not all(level >= 0 for level in levels):
        raise ValueError(f"levels {list(levels)} has a negative or missing bound on the KS distance; use 0 or more.")
    weight = np.ones(len(eta)) if sample_weight is None else check_weight(sample_weight, len(eta))
    weight = weight / weight.sum()
    if len(absent := np.flatnonzero(weight @ probability <= 0)):
        raise ValueError(f"groups {absent.tolist()} have probability 0 in every row; leave their columns out.")
    n_grid = n_grid or int(np.clip(384 // probability.shape[1], 48, 128))
    weight, eta, probability = _atoms(weight, eta, probability)
    prior = weight @ probability
    grid, ratio = _make_grid(weight, eta, n_grid), probability / prior
    if len(eta) > n_cells:
        # Split at the median of the groups' own measures together: a KS distance is felt within a small group too.
        cell = _split_cells(np.column_stack([eta, ratio[:, 1:]]), weight * ratio.sum(axis=1), n_cells)
        weight, eta, *columns = _weighted_means(cell, weight, [eta, *ratio.T])
        ratio = np.column_stack(columns)
    dual = _Dual(weight, eta, ratio, grid)
    nu = np.zeros((len(dual.incidence), len(dual.grid) - 1))
    fitted: dict[float, Optimum] = {}
    for level in sorted(set(map(float, levels)), reverse=True):
        nu, converged = _minimise(dual, nu, level, sharpness)
        fitted[level] = _optimum(dual, nu, level, prior, converged)
    return tuple(fitted[float(level)] for level in levels)


def _atoms(weight: Floats, eta: Floats, probability: Floats) -> tuple[Floats, Floats, Floats]:
    """Rows of positive weight, those that agree merged to their mean, in the order of their values.

    Rows agree when they are neighbours within the tolerance in η and then in every probability: unlike rounding, this
    divides no cluster.
    """
    present = weight > 0
    weight, columns = weight[present], np.column_stack([eta, probability])[present]
    near = min(_AGREE, 0.01 / len(columns))  # rows that have nothing to do with each other are farther apart
    units = [float(np.std(columns[:, 0])), *np.ones(probability.shape[1])]
    cluster = np.zeros(len(columns), dtype=np.intp)
    for column, unit in zip(columns.T, units, strict=True):
        order = np.lexsort((column, cluster))
        new = (np.diff(cluster[order]) > 0) | (np.diff(column[order]) > near * unit)
        cluster[order] = np.concatenate([[0], np.cumsum(new)])
    total, *means = _weighted_means(cluster, weight, columns.T)
    merged = np.column_stack(means)
    return total, merged[:, 0], merged[:, 1:]


def _weighted_means(place: NDArray[np.intp], weight: Floats, columns: Iterable[Floats]) -> list[Floats]:
    """Total weight, and weighted means of the columns, of the rows of each place."""
    total = np.bincount(place, weight).astype(np.float64)
    return [total, *[np.bincount(place, weight * column) / total for column in columns]]


def _split_cells(points: Floats, mass: Floats, n_cells: int) -> NDArray[np.intp]:
    """Cell number of each atom: halve every cell in mass, along its widest standardised coordinate, again and again."""
    spread = points.std(axis=0)
    points = points / np.where(spread > 0, spread, 1.0)
    cell = np.zeros(len(points), dtype=np.intp)
    for _ in range(int(np.log2(n_cells))):
        total, *centre = _weighted_means(cell, mass, points.T)
        off = points - np.column_stack(centre)[cell]
        scatter = np.column_stack([np.bincount(cell, mass * column**2) for column in off.T])
        key = np.take_along_axis(points, scatter.argmax(axis=1)[cell][:, None], axis=1)[:, 0]
        order = np.lexsort((key, cell))
        # Mass below the middle of each atom, from the start of its cell.
        below = np.cumsum(mass[order]) - 0.5 * mass[order]
        below -= (np.cumsum(total) - total)[cell[order]]
        cell[order] = 2 * cell[order] + (below > 0.5 * total[cell[order]])
        cell = np.unique(cell, return_inverse=True)[1]
    return cell


def _make_grid(weight: Floats, eta: Floats, n_grid: int) -> Floats:
    """Half of the values spread evenly over the range of η, half over its distribution; the ends are the range.

    No value outside the range is needed: clipping a predictor to it lowers the error and raises no KS distance.
    """
    low, high = float(eta.min()), float(eta.max())
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant to rounding: one value, nothing to move
        return np.array([weight @ eta])
    order = np.argsort(eta)
    # Few quantiles, and a least spacing of 1/8 of the even one: near-ties in η must make no near-ties in the grid.
    share = np.linspace(0, 1, 33)
    # Flat along an atom, with a ramp to the next: rows that tie give the same quantiles in any order, merged or not.
    above, ramp = np.cumsum(weight[order]), 0.5 * weight.min()
    ends = np.column_stack([above - weight[order] + ramp, above - ramp]).ravel()
    knots = np.interp(share, ends, np.repeat(eta[order], 2))
    knots[0], knots[-1] = low, high
    mixture = 0.5 * (knots - low) / (high - low) + 0.5 * share
    even = 8 * (n_grid - 1)
    steps = np.interp(np.linspace(0, 1, n_grid), mixture, (knots - low) / (high - low)) * even
    return low + (high - low) * (np.unique(np.round(steps)) / even)


class _Dual:
    """The dual on given cells and grid, as a function of the multipliers ν of shape (pairs, L−1).

    ``weight`` (m,) sums to one; ``ratio`` (m, G) is P(s|x)/p_s, whose weighted mean is one for every group.
    """

    def __init__(self, weight: Floats, eta: Floats, ratio: Floats, grid: Floats) -> None:
        self.weight, self.eta, self.ratio, self.grid = weight, eta, ratio, grid
        # Pairs with group 0 come first: alone they already span all differences.
        first, second = np.array(list(combinations(range(ratio.shape[1]), 2))).T
        # F_b − F_a of a pair (a, b) in terms of F_s − F_0, s ≥ 1.
        self.incidence = np.eye(ratio.shape[1])[second, 1:] - np.eye(ratio.shape[1])[first, 1:]
        # Cells run along the last axis, so that sums over the grid are sums of contiguous rows.
        self.contrast = (ratio[:, 1:] - ratio[:, :1]).T.copy()  # (G−1, m), mean zero
        # −(η − q)² = 2ηq − q² − η²: with the potentials one product; about the middle, so that nothing cancels.
        middle = 0.5 * (grid[0] + grid[-1])
        self.values, centred = grid - middle, eta - middle
        self.sides = np.vstack([self.contrast, 2 * centred, np.ones(len(centred))])  # (G+1, m)
        self.square = float(weight @ centred**2)

    def contrast_potential(self, nu: Floats) -> Floats:
        """Σ over k ≥ l of the multipliers, shape (G−1, L): the potentials of all groups but group 0."""
        total = self.incidence[: len(nu)].T @ nu
        tail = np.cumsum(total[:, ::-1], axis=1)[:, ::-1]
        return np.column_stack([tail, np.zeros(len(tail))])

    def score(self, nu: Floats, beta: float, out: Floats | None = None) -> Floats:
        """β (Σ_s P(s|x)/p_s ψ_s(q_l) − (η − q_l)² + η²), shape (L, m)."""
        left = np.vstack([self.contrast_potential(nu), self.values, -(self.values**2)]).T * beta
        return np.matmul(left, self.sides, out=out)

    def smooth(self, nu: Floats, beta: float, out: Floats | None = None) -> tuple[float, Floats, Floats]:
        """Value of the smoothed E[max …], its gradient in ν, and P(f ≤ q_k | cell), shape (L−1, m), within ``out``."""
        score = self.score(nu, beta, out)
        top = score.max(axis=0)
        score -= top
        live = np.flatnonzero(score > _NEGLIGIBLE)  # one in five
        raised = np.exp(score.ravel()[live])
        score[:] = 0.0
        score.ravel()[live] = raised
        total = score.sum(axis=0)
        score /= total
        value = float(self.weight @ (top + np.log(total))) / beta - self.square
        for row, before in zip(score[1:], score[:-1], strict=True):  # five times faster than cumsum down the rows
            row += before
        below = score[:-1]
        difference = (self.weight * self.contrast) @ below.T  # F_s − F_0 at q_k
        return value, self.incidence[: len(nu)] @ difference, below

    def hessian(self, below: Floats, free: NDArray[np.bool_], beta: float) -> Floats:
        """Second derivatives in the free entries of ν (in the order of ``np.nonzero(free)``).

        Cov(1{f ≤ q_k}, 1{f ≤ q_j}) = C_k − C_k C_j for k ≤ j, with C = P(f ≤ q | cell).
        """
        pair, k = np.nonzero(free)
        contrast = self.incidence @ self.contrast * np.sqrt(beta * self.weight)  # (pairs, m)
        weighted = below[k]
        weighted *= contrast[pair]
        product = (weighted @ contrast.T)[:, pair] - weighted @ weighted.T
        return np.where(k[:, None] <= k, product, product.T)

    def bound(self, nu: Floats, alpha: float) -> float:
        """The exact (unsmoothed) dual at ν: a lower bound on the optimum for every ν."""
        best = float(self.weight @ self.score(nu, 1.0).max(axis=0)) - self.square
        return -best - alpha * float(np.abs(nu).sum())


def _minimise(dual: _Dual, nu: Floats, alpha: float, sharpness: float) -> tuple[Floats, bool]:
    """Minimise the dual from ν; a sharpness above 300 is reached in stages, each from the solution of the last."""
    if nu.shape[1] == 0:
        return nu, True
    # At α = 0 all pairs are tight, and those with group 0 span the rest.
    active = dual.incidence.T @ nu if alpha == 0 else nu
    variance = float(dual.weight @ (dual.eta - dual.weight @ dual.eta) ** 2)
    stages = 1 + max(0, int(np.ceil(np.log(sharpness / 300) / np.log(4))))
    violation = np.inf
    for stage in reversed(range(stages)):
        active, violation = _newton(dual, active, alpha, beta=sharpness / 4.0**stage / variance)
    return np.pad(active, ((0, len(nu) - len(active)), (0, 0))), violation <= _CONVERGED


def _newton(dual: _Dual, nu: Floats, alpha: float, *, beta: float) -> tuple[Floats, float]:
    """Minimise smooth(ν) + α Σ|ν|; returns ν and its largest violation of the optimality conditions.

    Damped (Levenberg-Marquardt) Newton steps within the orthant that ν is in or would move into. The damping is in
    units of the second derivative that an evenly spread η would have, E[Δ²]/(2 (q_{k+1} − q_k) range), because the true
    one vanishes at thresholds that split no cell.
    """
    spread = float(dual.weight @ (dual.contrast**2).sum(axis=0))
    unit = np.broadcast_to(spread / (2 * np.diff(dual.grid) * np.ptp(dual.grid)), nu.shape)
    at, spare = np.empty((2, len(dual.grid), len(dual.eta)))
    value, gradient, below = dual.smooth(nu, beta, at)
    damping, hessian, violation = 0.1, None, np.inf
    for _ in range(_MAX_TRIALS):
        if hessian is None:
            violation, free, sign = _search_space(nu, gradient, alpha)
            if violation <= _TOLERANCE:
                break
            hessian = dual.hessian(below, free, beta)
        step = np.zeros_like(nu)
        damped = hessian + np.diag(damping * unit[free])
        step[free] = _orthant_step(damped, nu[free], (gradient + alpha * sign)[free], sign[free] if alpha > 0 else None)
        trial = dual.smooth(nu + step, beta, spare)
        penalty = alpha * float(np.abs(nu + step).sum() - np.abs(nu).sum())
        promised, gained = -float((gradient * step).sum()) - penalty, value - trial[0] - penalty
        if gained > 0.01 * promised > 0:
            nu, (value, gradient, below), hessian = nu + step, trial, None
            at, spare = spare, at
            damping = max(damping / 10, 1e-8) if gained > 0.3 * promised else damping
        elif damping > 1e8:  # no step gains anything any more: rounding
            break
        else:
            damping *= 10
    return nu, violation


def _search_space(nu: Floats, gradient: Floats, alpha: float) -> tuple[float, NDArray[np.bool_], Floats]:
    """Largest violation of the optimality conditions, the entries of ν free to move, and their orthant."""
    size = np.abs(gradient)
    violation = float(np.where(nu != 0, np.abs(gradient + alpha * np.sign(nu)), size - alpha).max())
    # Of the pairs too far apart at one threshold only the farthest joins: moving it moves the others.
    enters = (size > alpha) & (size == size.max(axis=0)) if alpha > 0 else size >= 0
    sign = np.where(nu != 0, np.sign(nu), -np.sign(gradient) * enters)
    return violation, (nu != 0) | enters, sign


def _orthant_step(hessian: Floats, nu: Floats, slope: Floats, sign: Floats | None) -> Floats:
    """Step to the minimum of the quadratic model; what would leave its orthant goes to zero, the rest is solved again.

    ``sign=None``: no orthant.
    """
    step, free = -nu, np.ones(len(nu), dtype=bool)
    while free.any():
        rhs = -slope[free] + hessian[np.ix_(free, ~free)] @ nu[~free]
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], rhs)
        leaves = free & ((nu + step) * sign < 0) if sign is not None else np.zeros_like(free)
        if not leaves.any():
            break
        free &= ~leaves
        step[leaves] = -nu[leaves]
    return step


def _optimum(dual: _Dual, nu: Floats, level: float, prior: Floats, converged: bool) -> Optimum:
    potential = dual.contrast_potential(nu)
    potential = np.vstack([-potential.sum(axis=0), potential])
    mass = dual.weight[:, None] * dual.ratio
    f = _best_values(dual.eta, dual.ratio, potential, dual.grid)
    pools = _find_pools(f, mass, level, width=np.ptp(dual.grid) / len(dual.grid))
    f = _pool(f, pools)
    return Optimum(
        level=level,
        grid=dual.grid,
        potential=potential,
        pools=pools,
        group_prior=prior,
        converged=converged,
        dual_objective=dual.bound(nu, level),
        mse=float(dual.weight @ (f - dual.eta) ** 2),
        ks=float(_group_gaps(f, mass)[1].max()),
    )


def _best_values(eta: Floats, ratio: Floats, potential: Floats, grid: Floats) -> Floats:
    """arg max over q of ratio·potential(q) − (η − q)², the potential (G, L) known on the grid and linear between.

    The grid decides which segments; within them the maximum is in closed form.
    """
    middle = 0.5 * (grid[0] + grid[-1])
    values, shares = grid - middle, np.ascontiguousarray(ratio.T)
    left = np.column_stack([ratio, 2 * (eta - middle), np.ones(len(eta))])
    right = np.vstack([potential, values, -(values**2)])
    best = np.empty(len(eta), dtype=np.intp)
    for start in range(0, len(eta), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        np.argmax(left[rows] @ right, axis=1, out=best[rows])

    def pull(at: NDArray[np.intp]) -> Floats:
        return np.asarray((shares * potential[:, at]).sum(axis=0))

    value: Floats = grid[best]
    score = np.full(len(eta), -np.inf)
    for left_end in (best - 1, best):
        low = np.clip(left_end, 0, max(len(grid) - 2, 0))
        high = np.minimum(low + 1, len(grid) - 1)
        width = grid[high] - grid[low]
        at_low = pull(low)
        slope = (pull(high) - at_low) / np.where(width > 0, width, 1.0)
        q = np.clip(eta + 0.5 * slope, grid[low], grid[high])
        q_score = at_low + slope * (q - grid[low]) - (eta - q) ** 2
        value = np.where(q_score > score, q, value)
        score = np.maximum(score, q_score)
    return value


def _group_gaps(f: Floats, mass: Floats) -> tuple[Floats, Floats]:
    """Distinct values t of f, and max_a F_a(t) − min_b F_b(t) at each; mass (m, G), columns sum to one."""
    order = np.argsort(f)
    last = np.append(np.diff(f[order]) > 0, True)
    return f[order][last], np.ptp(np.cumsum(mass[order], axis=0)[last], axis=1)


def _find_pools(f: Floats, mass: Floats, level: float, *, width: float) -> Floats:
    """Intervals of f, at most ``width`` wide, at whose inner thresholds the groups are farther apart than ``level``.

    Where Δ is nearly a function of η a whole range of rows ties, and rounding would order their values by group. One
    value for all of them mends it, and being monotone it can widen no gap.
    """
    values, gap = _group_gaps(f, mass)
    apart = (gap > level + _POOL_SLACK) & (np.diff(values, append=values[-1]) <= width)
    first, end = np.flatnonzero(np.diff(apart, prepend=False, append=False)).reshape(-1, 2).T
    narrow = values[end] - values[first] <= width
    low, high = values[first[narrow]], values[end[narrow]]
    # A little wider than the values themselves: rows of which a cell is the mean lie about its value.
    return np.column_stack([low - 1e-3 * width, high + 1e-3 * width, 0.5 * (low + high)])


def _pool(f: Floats, pools: Floats) -> Floats:
    if not len(pools):
        return f
    low, high, value = pools.T
    nearest = np.maximum(np.searchsorted(low, f, side="right") - 1, 0)
    return np.where((low[nearest] <= f) & (f <= high[nearest]), value[nearest], f)


def _check_rows(eta: ArrayLike, group_probability: ArrayLike) -> tuple[Floats, Floats]:
    eta, probability = np.asarray(eta, dtype=np.float64), np.asarray(group_probability, dtype=np.float64)
    if eta.ndim != 1 or probability.ndim != 2 or len(eta) != len(probability) or probability.shape[1] < 2:
        shapes = f"eta has shape {eta.shape} and group_probability {probability.shape}"
        raise ValueError(f"{shapes}; expected (n,) and (n, groups), with at least two groups.")
    if not (np.isfinite(eta).all() and np.isfinite(probability).all()):
        raise ValueError("eta or group_probability has NaN or infinite values; drop those rows or mend the model.")
    if (probability < 0).any() or not np.allclose(probability.sum(axis=1), 1.0, atol=1e-6):
        raise ValueError("group_probability has negative entries, or rows that do not sum to one.")
    return eta, probability
