"""Baselines that map scores and need the group at prediction: the Wasserstein barycentre and a private histogram."""

from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from esvdfair.core.checks import (
    Label,
    check_column,
    check_rows,
    check_weight,
    encode_groups,
    make_generator,
    unit_scale,
    unscaled,
)
from esvdfair.core.ks import Groups, sorted_groups
from esvdfair.exceptions import InputError

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.intp]
FittedOn: TypeAlias = Literal["scores", "targets"]
RandomState: TypeAlias = int | np.random.Generator | None

FIT, PREDICT = 0, 1
"""What a seed serves, so that fit and predict never share draws."""
SAME_LEVEL = 1e-12
"""j/n and k/m that are equal as fractions differ by rounding; far below 1/n for any n that fits in memory."""


class ScoreMap(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A map of scores that needs the group at prediction.

    A subclass has ``fitted_on`` among its parameters, learns from (values, codes of ``labels_``, weights) and moves
    scores of known groups.
    """

    fitted_on: FittedOn = "scores"

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, sample_weight: Any = None) -> Self:
        """Learn the map.

        Parameters
        ----------
        scores : array-like of shape (rows,)
            Predictions of the model.
        y : array-like of shape (rows,), default=None
            Labels of the training rows; required with ``fitted_on="targets"``.
        sensitive_features : array-like of shape (rows,) or (rows, attributes)
            Group of each row.
        sample_weight : array-like of shape (rows,), default=None
            Weight of each row.
        """
        self._check_parameters(sample_weight)
        if self.fitted_on not in ("scores", "targets"):
            raise InputError(f"`fitted_on={self.fitted_on!r}`: expected 'scores' or 'targets'.")
        values = check_column(scores, None, "scores")
        if self.fitted_on == "targets":
            if y is None:
                raise InputError(f"`fitted_on={self.fitted_on!r}` needs the training targets; pass `y` to fit.")
            values = check_column(y, len(values), "y", of="scores")
        self.labels_, codes, weight = known_groups(sensitive_features, sample_weight, len(values), of="scores")
        self._learn(values, codes, weight)
        return self

    def predict(self, scores: Any, *, sensitive_features: Any) -> Floats:
        """Move scores (rows,) by the map of their group; every group must have been in the training data."""
        check_is_fitted(self)
        f = check_column(scores, None, "scores")
        found, codes = encode_groups(sensitive_features)
        check_rows(len(codes), f.size, "sensitive_features", of="scores")
        place = {label: i for i, label in enumerate(self.labels_)}
        if unseen := [label for label in found if label not in place]:
            raise InputError(
                f"`sensitive_features` has groups {unseen} that were not in the training data, which has "
                f"{list(self.labels_)}. Fit on rows of every group."
            )
        return np.asarray(self._move(f, np.array([place[label] for label in found], dtype=np.intp)[codes]))

    def _check_parameters(self, sample_weight: Any) -> None:
        """Raise on parameters that cannot be used, before any row is looked at."""

    def _learn(self, values: Floats, codes: Codes, weight: Floats) -> None:
        raise NotImplementedError

    def _move(self, f: Floats, codes: Codes) -> Floats:
        raise NotImplementedError


def known_groups(
    sensitive_features: Any, sample_weight: Any, rows: int, *, of: str = "X"
) -> tuple[tuple[Label, ...], Codes, Floats]:
    """Labels and codes of at least two groups, and weights, the largest of them 1; no group may weigh nothing."""
    labels, codes = encode_groups(sensitive_features)
    check_rows(len(codes), rows, "sensitive_features", of=of)
    if len(labels) < 2:
        found = f"only one group, {labels[0]!r}," if labels else "no group"
        raise ValueError(f"{found} among {len(codes)} rows; at least two are needed.")
    if sample_weight is None:
        return labels, codes, np.ones(rows)
    weight = check_weight(sample_weight, rows, of=of)
    weight = weight / weight.max()  # shares are all that counts, and sums of them cannot overflow
    mass = np.bincount(codes, weights=weight, minlength=len(labels))
    if mass.min() <= 0:
        raise ValueError(f"group {labels[int(mass.argmin())]!r} has zero total sample_weight; drop it or weigh it.")
    return labels, codes, weight


class WassersteinBarycenter(ScoreMap):
    """Move every group's scores to the barycentre of all groups (Chzhen et al., 2020); needs the group at prediction.

    ``g(x, a) = Σ_b p_b Q_b(F_a(f(x)))`` with group shares p, quantile functions Q and distribution functions F,
    the smallest mean squared change that gives all groups one distribution. F is estimated on one half of each
    group's rows and Q on the other.

    Differs from the paper: it prints only the other group's term; the sum is over all groups, the own one included.

    Parameters
    ----------
    fitted_on : {"scores", "targets"}, default="scores"
        Whose distributions are estimated in fit: the model's scores, or the training targets y, as the authors of
        the paper did. In both cases the maps are applied to scores.
    split : bool, default=True
        Halves as in Chzhen et al., which their guarantee needs; False takes all rows for both F and Q, which is
        better when a group is small.
    jitter : float, default=0.0
        Standard deviation of normal noise on fitted values and scores, in units of the fitted values' own. Ties are
        broken by random levels without it; only the reproduction of the paper's COMPAS row needs it.
    random_state : int, Generator or None, default=None
        Draws the halves, the order of tied scores and the jitter. With an integer each call of predict repeats its
        draws; predicting tied scores row by row therefore needs None or a Generator.

    Attributes
    ----------
    labels_ : tuple
        Group labels, sorted.
    proportions_ : ndarray of shape (groups,)
        Their shares p.
    noise_scale_ : float
        Standard deviation of the jitter in units of the scores.
    cdfs_, quantiles_ : tuple
        Of each group the sorted values and the cumulative shares from 0 to 1 behind F and Q.

    Examples
    --------
    >>> import numpy as np
    >>> groups = np.array(["a", "b"] * 50)
    >>> scores = np.arange(100.0) + 1000.0 * (groups == "b")
    >>> fair = WassersteinBarycenter(split=False).fit(scores, sensitive_features=groups)
    >>> fair.predict(np.array([0.0, 1001.0]), sensitive_features=["a", "b"]).tolist()
    [500.5, 500.5]
    """

    def __init__(
        self,
        *,
        fitted_on: FittedOn = "scores",
        split: bool = True,
        jitter: float = 0.0,
        random_state: RandomState = None,
    ) -> None:
        self.fitted_on = fitted_on
        self.split = split
        self.jitter = jitter
        self.random_state = random_state

    def _check_parameters(self, sample_weight: Any) -> None:
        if not self.jitter >= 0:
            raise ValueError(f"jitter is {self.jitter!r}; expected 0 or a small positive number such as 1e-9.")

    def _learn(self, values: Floats, codes: Codes, weight: Floats) -> None:
        rng = make_generator(self.random_state, FIT)
        unit = unit_scale(values)
        self.noise_scale_ = self.jitter * float(np.ldexp(np.ldexp(values, -unit).std(), unit))
        values = values + rng.normal(scale=self.noise_scale_, size=values.size)
        mass = np.bincount(codes, weights=weight)
        self.proportions_ = mass / mass.sum()
        halves = []
        for label, members in zip(self.labels_, Groups(codes, len(mass)).members, strict=True):
            rows = members[weight[members] > 0]
            if self.split and rows.size < 2:
                raise ValueError(
                    f"group {label!r} has {rows.size} row; two halves need at least 2. Pass more rows or split=False."
                )
            halves.append(np.array_split(rng.permutation(rows), 2) if self.split else [rows, rows])
        self.cdfs_, self.quantiles_ = (
            tuple(sorted_groups(values[rows], Groups.of(codes[rows], len(mass), weight[rows])))
            for rows in map(np.concatenate, zip(*halves, strict=True))
        )

    def _move(self, f: Floats, codes: Codes) -> Floats:
        rng = make_generator(self.random_state, PREDICT)
        f = f + rng.normal(scale=self.noise_scale_, size=f.size)
        level = np.empty(f.size)
        for code in np.unique(codes):
            level[codes == code] = _level(self.cdfs_[code], f[codes == code], rng)
        # g(x, a) = Σ_b p_b Q_b(F_a(f(x))): once F_a is applied, the map is the same for every group
        moved = np.zeros(f.size)
        for share, (values, levels) in zip(self.proportions_, self.quantiles_, strict=True):
            reached = np.searchsorted(levels[1:], level - SAME_LEVEL)  # the smallest value whose level reaches it
            moved += share * values[np.minimum(reached, values.size - 1)]
        return moved


def _level(cdf: tuple[Floats, Floats], t: Floats, rng: np.random.Generator) -> Floats:
    """F(t), with the mass of an atom spread evenly over the rows that fall on it.

    A score tied with m fitted values gets one of their m levels at random: the limit of a jitter that goes to zero,
    without a scale to choose. Where nothing is tied this is the plain F(t) and draws nothing.
    """
    values, levels = cdf
    below, upto = (np.searchsorted(values, t, side=side) for side in ("left", "right"))
    ties, share = upto - below, np.ones(t.shape)
    tied = ties > 1
    share[tied] = rng.integers(1, ties[tied], endpoint=True) / ties[tied]
    return np.asarray(levels[below] + share * (levels[upto] - levels[below]))


class PrivateHistogram(ScoreMap):
    """Bin the scores and move them at random to nearly equal distributions (Xian et al., 2024); needs the group.

    The joint histogram of group and bin gets Laplace noise of scale 2/(ε·rows) (one changed row moves two cells by
    1/rows), each group's distribution function is repaired, the plans of ``cheapest_plans`` are found, and a score in
    bin i of group a becomes the middle of bin j with probability ``γ_aij / Σ_j γ_aij``. A bin that a group did not
    show in fit is left where it is.

    Parameters
    ----------
    bins : int, default=18
        Number of bins of equal width. The authors' code has 18 for both data sets.
    bounds : tuple of two floats, default=None
        Range of the bins; scores outside count into the outer bins. None takes the range of the fitted values, which
        is refused together with ``epsilon``, because the range itself would leak rows.
    epsilon : float, default=None
        Differential privacy ε of the histogram with respect to changing one row; None adds no noise. It is for
        comparing methods, not for publishing: not covered are the number of rows, the names of the groups, the model
        whose scores these are, repeated fits, an integer ``random_state``, and the low bits of the noise.
    alpha : float, default=0.0
        Allowed KS distance between two groups of the fitted (noisy) distribution after transport.
    fitted_on : {"scores", "targets"}, default="scores"
        As in `WassersteinBarycenter`.
    random_state : int, Generator or None, default=None
        Draws the noise and the transport. With an integer each call of predict repeats its draws; predicting row by
        row therefore needs None or a Generator, else all rows share one draw.

    Attributes
    ----------
    labels_ : tuple
        Group labels, sorted.
    proportions_ : ndarray of shape (groups,)
        Their (noisy) shares.
    edges_, points_ : ndarray of shape (bins + 1,) and (bins,)
        Edges and middles of the bins.
    histogram_, target_ : ndarray of shape (groups, bins)
        Repaired distributions before and after transport.
    transport_ : ndarray of shape (groups, bins, bins)
        Probability of moving from bin i to bin j.
    cost_ : float
        Mean squared change of the binned scores.

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

    def _learn(self, values: Floats, codes: Codes, weight: Floats) -> None:
        low, high = self.bounds if self.bounds is not None else (values.min(), values.max())
        if not low < high:
            raise ValueError(f"all fitted values equal {low}; bins need a range. Pass bounds=(low, high).")
        unit, groups = unit_scale(np.array([low, high])), len(self.labels_)
        self.edges_ = np.ldexp(np.linspace(np.ldexp(low, -unit), np.ldexp(high, -unit), self.bins + 1), unit)
        self.points_ = self.edges_[1:] / 2 + self.edges_[:-1] / 2
        mass = np.bincount(codes * self.bins + self._bin(values), weights=weight, minlength=groups * self.bins)
        joint = (mass / mass.sum()).reshape(groups, self.bins)
        if self.epsilon is not None:
            rng = make_generator(self.random_state, FIT)
            joint = joint + rng.laplace(scale=2 / (self.epsilon * values.size), size=joint.shape)
        # Noise can make a group's mass negative; it then counts for next to nothing instead of turning costs into gains
        self.proportions_ = np.clip(joint.sum(axis=1), 1e-6, None)
        cdfs = np.cumsum(joint / self.proportions_[:, None], axis=1)
        self.histogram_ = np.diff([repair_cdf(cdf) for cdf in cdfs], prepend=0.0, axis=1)
        plans, self.target_, self.cost_ = cheapest_plans(
            self.histogram_, proportions=self.proportions_, points=self.points_, alpha=self.alpha
        )
        # P(bin after | bin before): rows of the plans over their sums; the identity where the group was not seen,
        # about which the linear program says nothing
        seen = self.histogram_ > 1e-12
        row_mass = np.where(seen, plans.sum(axis=2), 1.0)
        self.transport_ = np.where(seen[:, :, None], plans / row_mass[:, :, None], np.eye(self.bins))

    def _bin(self, values: Floats) -> Codes:
        """Bin of every value, [edge, next edge); what lies outside the bounds counts into the outer bins."""
        return np.clip(np.searchsorted(self.edges_, values, side="right") - 1, 0, self.bins - 1)

    def _move(self, f: Floats, codes: Codes) -> Floats:
        u = make_generator(self.random_state, PREDICT).random(f.size)
        levels = np.cumsum(self.transport_, axis=2)[codes, self._bin(f)]  # (rows, bins)
        moved = np.count_nonzero(levels <= u[:, None], axis=1)
        return np.asarray(self.points_[np.minimum(moved, self.bins - 1)])


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


def cheapest_plans(
    histogram: Floats, *, proportions: Floats, points: Floats, alpha: float
) -> tuple[Floats, Floats, float]:
    """Transport (groups, bins) distributions p to ones within KS distance ``alpha`` of each other.

    ``min Σ_a w_a Σ_ij γ_aij (c_i − c_j)²`` over plans γ_a ≥ 0 with ``Σ_j γ_aij = p_ai`` and output distribution
    functions ``R_a(j) = Σ_{l≤j} Σ_i γ_ail``, such that ``|R_a(j) − B(j)| ≤ α/2`` for a common B (the barycentre).

    Returns the plans γ (groups, bins, bins), the distributions after (groups, bins), and the mean squared change.
    """
    groups, bins = histogram.shape
    unit = unit_scale(points)
    scaled = np.ldexp(points, -unit)
    square = (scaled[:, None] - scaled[None, :]) ** 2
    weight = proportions / proportions.sum()
    one, eye, every = np.ones((1, bins)), sparse.eye_array(bins), sparse.eye_array(groups)
    step = sparse.diags_array([1.0, -1.0], offsets=[0, -1], shape=(bins, bins))
    rows = sparse.block_array(  # over (γ, R, B)
        [
            [sparse.kron(every, sparse.kron(eye, one)), None, None],  # Σ_j γ_aij
            [sparse.kron(every, sparse.kron(one, eye)), -sparse.kron(every, step), None],  # Σ_i γ_aij − step of R_a
            [None, sparse.eye_array(groups * bins), -sparse.kron(np.ones((groups, 1)), eye)],  # R_a − B
        ],
        format="csr",
    )
    equal, gap = rows[: 2 * groups * bins], rows[2 * groups * bins :]
    solution = linprog(  # type: ignore[call-overload]  # the stubs do not know sparse constraints
        # costs in units of the largest one, so that the solver's tolerances mean the same for every scale of scores
        np.concatenate([np.kron(weight, square.ravel() / square.max()), np.zeros((groups + 1) * bins)]),
        A_ub=sparse.vstack([gap, -gap], format="csr"),
        b_ub=np.full(2 * groups * bins, alpha / 2),
        A_eq=equal,
        b_eq=np.concatenate([histogram.ravel(), np.zeros(groups * bins)]),
        bounds=(0, 1),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if solution.status != 0:
        raise RuntimeError(f"HiGHS did not solve the transport program, which is always feasible: {solution.message}")
    cdfs = solution.x[groups * bins * bins :].reshape(groups + 1, bins)[:groups]
    targets = np.diff([repair_cdf(cdf) for cdf in cdfs], prepend=0.0, axis=1)
    # the solver meets the marginals to its tolerance, the monotone plans to these targets meet them exactly
    plans = np.stack([monotone_plan(p, q) for p, q in zip(histogram, targets, strict=True)])
    cost = float(np.einsum("a,aij,ij->", weight, plans, square))
    return plans, targets, unscaled(cost, 2 * unit, "the mean squared change")
