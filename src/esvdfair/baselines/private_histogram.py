"""Fair regression from a private histogram (Xian et al., 2024): noise, repair, linear program, random transport."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from esvdfair.baselines.score_maps import FIT, PREDICT, Codes, FitRows, FittedOn, Floats, RandomState, ScoreMap
from esvdfair.core.checks import make_generator, unit_scale, unscaled


class PrivateHistogram(ScoreMap):
    """Bin the scores, find the cheapest transport to nearly equal distributions, apply it at random.

    Needs the group at prediction. The joint histogram of group and bin gets Laplace noise of scale 2/(ε·rows) (one
    changed row moves two cells by 1/rows), each group's distribution function is repaired, the plans of
    :func:`cheapest_plans` are found, and a score in bin i of group a becomes the middle of bin j with
    probability ``γ_aij / Σ_j γ_aij``. A bin that a group did not show in fit is left where it is.

    Parameters
    ----------
    bins : int
        Number of bins of equal width. The authors' code has 18 for both data sets.
    bounds : (low, high) or None
        Range of the bins; scores outside count into the outer bins. None takes the range of the fitted values,
        which is refused together with ``epsilon``, because the range itself would leak rows.
    epsilon : float or None
        Differential privacy ε of the histogram with respect to changing one row (the number of rows and the names of
        the groups count as public); None adds no noise. Not covered: the model whose scores these are, repeated fits,
        an integer ``random_state`` (who knows it can take the noise off again), and the low bits of Laplace noise in
        floating point. It is for comparing methods, not for publishing.
    alpha : float in [0, 1]
        Allowed KS distance between two groups of the fitted (noisy) distribution after transport.
    fitted_on : {"scores", "targets"}
        Whose distributions are estimated in fit: the model's scores, or the training targets y, as the authors of
        the paper did. In both cases the plans are applied to scores.
    random_state : int, Generator or None
        Draws the noise and the transport. With an integer each call of predict repeats its draws; predicting row
        by row therefore needs None or a Generator, else all rows share one draw.

    Attributes
    ----------
    labels_ : tuple of group labels, sorted
    proportions_ : (groups,) their (noisy) shares
    edges_, points_ : (bins + 1,) and (bins,) edges and middles of the bins
    histogram_ : (groups, bins) repaired distributions before transport
    target_ : (groups, bins) distributions after transport
    transport_ : (groups, bins, bins) probability of moving from bin i to bin j
    cost_ : float, mean squared change of the binned scores

    References
    ----------
    Xian, Li, Kamath, Zhao: Differentially private post-processing for fair regression. ICML 2024.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> groups = rng.integers(0, 2, size=2000)
    >>> scores = rng.normal(size=2000) + groups
    >>> fair = PrivateHistogram(bins=20, bounds=(-3, 4), epsilon=1.0, random_state=0)
    >>> fair.fit(scores, sensitive_features=groups).predict(scores, sensitive_features=groups).shape
    (2000,)
    """

    def __init__(
        self,
        *,
        bins: int = 18,
        bounds: tuple[float, float] | None = None,
        epsilon: float | None = None,
        alpha: float = 0.0,
        fitted_on: FittedOn = "scores",
        random_state: RandomState = None,
    ) -> None:
        self.bins = bins
        self.bounds = bounds
        self.epsilon = epsilon
        self.alpha = alpha
        self.fitted_on = fitted_on
        self.random_state = random_state

    def _check_parameters(self, sample_weight: Any) -> None:
        if self.bins != int(self.bins) or self.bins < 2:
            raise ValueError(f"bins is {self.bins!r}; expected a whole number of at least 2.")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha!r}; a KS distance lies between 0 and 1.")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds is {self.bounds!r}; expected (low, high) with low < high.")
        if self.epsilon is None:
            return
        if not self.epsilon > 0:
            raise ValueError(f"epsilon is {self.epsilon!r}; expected a positive number, or None for no noise.")
        if self.bounds is None:
            raise ValueError(
                "epsilon without bounds: the range of the data would leak two rows. Pass bounds=(low, high) that "
                "you know without looking at the data."
            )
        if sample_weight is not None:
            raise ValueError(
                "sample_weight together with epsilon: the noise is scaled for rows that count alike, so a heavy "
                "row would get less privacy than promised. Pass one of the two."
            )

    def _learn(self, rows: FitRows) -> None:
        self.edges_ = self._bin_edges(rows.values)
        self.points_ = self.edges_[1:] / 2 + self.edges_[:-1] / 2
        joint = self._joint_histogram(rows)
        # Noise can make a group's mass negative; it then counts for next to nothing instead of turning costs into gains
        self.proportions_ = np.clip(joint.sum(axis=1), 1e-6, None)
        cdfs = np.cumsum(joint / self.proportions_[:, None], axis=1)
        self.histogram_ = np.diff([repair_cdf(cdf) for cdf in cdfs], prepend=0.0, axis=1)
        found = cheapest_plans(self.histogram_, proportions=self.proportions_, points=self.points_, alpha=self.alpha)
        self.target_ = found.targets
        self.cost_ = found.cost
        # P(bin after | bin before): rows of the plans over their sums; the identity where the group was not seen,
        # about which the linear program says nothing
        seen = self.histogram_ > 1e-12
        mass = np.where(seen, found.plans.sum(axis=2), 1.0)
        self.transport_ = np.where(seen[:, :, None], found.plans / mass[:, :, None], np.eye(self.bins))

    def _bin_edges(self, values: Floats) -> Floats:
        low, high = self.bounds if self.bounds is not None else (values.min(), values.max())
        if not low < high:
            raise ValueError(f"all fitted values equal {low}; bins need a range. Pass bounds=(low, high).")
        unit = unit_scale(np.array([low, high]))
        return np.ldexp(np.linspace(np.ldexp(low, -unit), np.ldexp(high, -unit), self.bins + 1), unit)

    def _joint_histogram(self, rows: FitRows) -> Floats:
        """Share of rows in (group, bin), shape (groups, bins), with noise when ``epsilon`` is set."""
        groups = len(rows.labels)
        cell = rows.codes * self.bins + self._bin(rows.values)
        mass = np.bincount(cell, weights=rows.weight, minlength=groups * self.bins)
        joint = (mass / mass.sum()).reshape(groups, self.bins)
        if self.epsilon is None:
            return np.asarray(joint)
        rng = make_generator(self.random_state, FIT)
        return np.asarray(joint + rng.laplace(scale=2 / (self.epsilon * rows.values.size), size=joint.shape))

    def _bin(self, values: Floats) -> NDArray[np.intp]:
        """Bin of every value, [edge, next edge); what lies outside the bounds counts into the outer bins."""
        return np.clip(np.searchsorted(self.edges_, values, side="right") - 1, 0, self.bins - 1)

    def _move(self, f: Floats, codes: Codes) -> Floats:
        u = make_generator(self.random_state, PREDICT).random(f.size)
        levels = np.cumsum(self.transport_, axis=2)[codes, self._bin(f)]  # (rows, bins)
        moved = np.count_nonzero(levels <= u[:, None], axis=1)
        return np.asarray(self.points_[np.minimum(moved, self.bins - 1)])


# --- distributions on a grid ---------------------------------------------------------------------------------------


def repair_cdf(x: Floats) -> Floats:
    """The distribution function on the same points that is nearest to x in the largest deviation.

    The mean of the running maximum and the later minimum is the nearest that does not fall. Clipping it to [0, 1] and
    raising its end to 1 keeps it nearest: what clipping adds to the deviation no distribution function could avoid.
    """
    z = np.clip((np.maximum.accumulate(x) + np.minimum.accumulate(x[::-1])[::-1]) / 2, 0.0, 1.0)
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
class CheapestPlans:
    """Result of the linear program for G groups and k bins."""

    plans: Floats  # (G, k, k) joint mass of (bin before, bin after)
    targets: Floats  # (G, k) distribution after
    cost: float  # mean squared change, averaged over groups with their shares


def cheapest_plans(histogram: Floats, *, proportions: Floats, points: Floats, alpha: float) -> CheapestPlans:
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
    unit = unit_scale(points)
    scaled = np.ldexp(points, -unit)
    square = (scaled[:, None] - scaled[None, :]) ** 2
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
    cost = float(np.einsum("a,aij,ij->", weight, plans, square))
    return CheapestPlans(plans, targets, unscaled(cost, 2 * unit, "the mean squared change"))


def _constraints(groups: int, bins: int) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Equalities and inequalities over (γ, R, B), as they are written above."""
    one, eye, every = np.ones((1, bins)), sparse.eye_array(bins), sparse.eye_array(groups)
    step = sparse.diags_array([1.0, -1.0], offsets=[0, -1], shape=(bins, bins))
    rows = sparse.block_array(
        [
            [sparse.kron(every, sparse.kron(eye, one)), None, None],  # Σ_j γ_aij
            [sparse.kron(every, sparse.kron(one, eye)), -sparse.kron(every, step), None],  # Σ_i γ_aij − step of R_a
            [None, sparse.eye_array(groups * bins), -sparse.kron(np.ones((groups, 1)), eye)],  # R_a − B
        ],
        format="csr",
    )
    equal, gap = rows[: 2 * groups * bins], rows[2 * groups * bins :]
    return equal, sparse.vstack([gap, -gap], format="csr")
