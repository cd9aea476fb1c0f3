"""Wasserstein barycentre of the groups' score distributions (Chzhen et al., 2020)."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from esvdfair.baselines.base import FIT, PREDICT, Codes, FitRows, FittedOn, Floats, RandomState, ScoreMap
from esvdfair.core.checks import make_generator, unit_scale

# j/n and k/m that are equal as fractions differ by rounding as floats; far below 1/n for any n that fits in memory
_LEVEL_TOLERANCE = 1e-12


@dataclass(frozen=True)
class EmpiricalDistribution:
    """Sorted ``values`` (n,) and ``levels`` (n + 1,), the cumulative share of weight, from 0 to 1."""

    values: Floats
    levels: Floats

    @classmethod
    def of(cls, values: Floats, weight: Floats) -> Self:
        """The weighted empirical distribution of ``values`` (n,)."""
        order = np.argsort(values, kind="stable")
        cumulative = np.concatenate([[0.0], np.cumsum(weight[order])])
        return cls(values[order], cumulative / cumulative[-1])

    def cdf(self, t: Floats, rng: np.random.Generator) -> Floats:
        """F(t), with the mass of an atom spread evenly over the rows that fall on it.

        A score tied with m fitted values gets one of their m levels at random: the limit of a jitter that goes to
        zero, without a scale to choose. Where nothing is tied this is the plain F(t) and draws nothing.
        """
        below = np.searchsorted(self.values, t, side="left")
        upto = np.searchsorted(self.values, t, side="right")
        ties = upto - below
        share = np.ones(t.shape)
        tied = ties > 1
        share[tied] = rng.integers(1, ties[tied], endpoint=True) / ties[tied]
        return self.levels[below] + share * (self.levels[upto] - self.levels[below])

    def quantile(self, u: Floats) -> Floats:
        """Q(u) = the smallest value whose level reaches u."""
        position = np.searchsorted(self.levels[1:], u - _LEVEL_TOLERANCE, side="left")
        return self.values[np.minimum(position, self.values.size - 1)]


class WassersteinBarycenter(ScoreMap):
    """Move every group's scores to the barycentre of all groups; needs the group at prediction.

    ``g(x, a) = Σ_b p_b Q_b(F_a(f(x)))`` with group shares p, quantile functions Q and distribution functions F,
    the smallest mean squared change that gives all groups one distribution. F is estimated on one half of each
    group's rows and Q on the other.

    Differs from the paper: it prints only the other group's term; the sum is over all groups, the own one included.

    Parameters
    ----------
    fitted_on : {"scores", "targets"}
        Whose distributions are estimated in fit: the model's scores, or the training targets y, as the authors of
        the paper did. In both cases the maps are applied to scores.
    split : bool
        Halves as in Chzhen et al., which their guarantee needs; False takes all rows for both F and Q, which is
        better when a group is small.
    jitter : float
        Ties are broken exactly, by random levels, whatever the scale of the scores. A positive value adds normal noise
        besides, to the fitted values and to the scores in predict, as Chzhen et al. do; in units of the fitted
        values' standard deviation. It matters to a reproduction of the paper's COMPAS row alone: on 0/1 targets both
        groups can get the same constant, and only the jitter (1e-9, say) makes KS count the two as different.
    random_state : int, Generator or None
        Draws the halves, the order of tied scores and the jitter. With an integer each call of predict repeats its
        draws; predicting tied scores row by row therefore needs None or a Generator.

    Attributes
    ----------
    labels_ : tuple of group labels, sorted
    proportions_ : (groups,) their shares p
    noise_scale_ : float, standard deviation of the jitter in units of the scores
    cdfs_, quantiles_ : tuple of EmpiricalDistribution, one for each group

    References
    ----------
    Chzhen, Denis, Hebiri, Oneto, Pontil: Fair regression with Wasserstein barycenters. NeurIPS 2020.

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

    def _learn(self, rows: FitRows) -> None:
        rng = make_generator(self.random_state, FIT)
        unit = unit_scale(rows.values)
        self.noise_scale_ = self.jitter * float(np.ldexp(np.ldexp(rows.values, -unit).std(), unit))
        rows = rows._replace(values=rows.values + rng.normal(scale=self.noise_scale_, size=rows.values.size))
        halves = [self._halves(rows, code, rng) for code in range(len(rows.labels))]
        self.proportions_ = rows.proportions()
        self.cdfs_ = tuple(EmpiricalDistribution.of(rows.values[i], rows.weight[i]) for i, _ in halves)
        self.quantiles_ = tuple(EmpiricalDistribution.of(rows.values[i], rows.weight[i]) for _, i in halves)

    def _halves(self, rows: FitRows, code: int, rng: np.random.Generator) -> tuple[Codes, Codes]:
        """Row numbers of one group for F and for Q; rows of zero weight carry no information and are left out."""
        members = np.flatnonzero((rows.codes == code) & (rows.weight > 0))
        if not self.split:
            return members, members
        if members.size < 2:
            raise ValueError(
                f"group {rows.labels[code]!r} has {members.size} row; two halves need at least 2. Pass more rows or "
                "split=False."
            )
        first, second = np.array_split(rng.permutation(members), 2)
        return first, second

    def _move(self, f: Floats, codes: Codes) -> Floats:
        rng = make_generator(self.random_state, PREDICT)
        f = f + rng.normal(scale=self.noise_scale_, size=f.size)
        level = np.empty(f.size)
        for code in np.unique(codes):
            level[codes == code] = self.cdfs_[code].cdf(f[codes == code], rng)
        # g(x, a) = Σ_b p_b Q_b(F_a(f(x))): once F_a is applied, the map is the same for every group
        return np.asarray(sum(p * q.quantile(level) for p, q in zip(self.proportions_, self.quantiles_, strict=True)))
