"""Maps of scores that need the group at prediction: what they share, and the Wasserstein barycentre."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from esvdfair.core import checks
from esvdfair.core.checks import Label, check_column, check_rows, encode_groups
from esvdfair.exceptions import InputError

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.intp]
FittedOn: TypeAlias = Literal["scores", "targets"]
RandomState: TypeAlias = int | np.random.Generator | None

FIT, PREDICT = 0, 1
"""What a seed serves, so that fit and predict never share draws."""


class FitRows(NamedTuple):
    """The rows a baseline learns from: scores or targets (rows,), codes (rows,) of ``labels``, weights (rows,)."""

    values: Floats
    labels: tuple[Label, ...]
    codes: Codes
    weight: Floats


class ScoreMap(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A map of scores to fairer ones that needs the group at prediction: ``fit`` and ``predict`` of such baselines.

    A subclass has ``fitted_on`` among its parameters and says how it learns (``_learn``) and how it moves a score
    (``_move``); the checks are here.
    """

    fitted_on: FittedOn

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, sample_weight: Any = None) -> Self:
        """Learn the map.

        Parameters
        ----------
        scores : (rows,) predictions of the model
        y : (rows,) training targets; used, and then required, with ``fitted_on="targets"``
        sensitive_features : (rows,) or (rows, attributes) group labels
        sample_weight : (rows,) or None; an error where a baseline cannot honour it

        Raises
        ------
        ValueError
            Parameters outside their range; targets asked for but not given, lengths that differ, fewer than two
            groups, a group of zero weight.
        """
        self._check_parameters(sample_weight)
        rows = fit_rows(
            scores, y, sensitive_features=sensitive_features, sample_weight=sample_weight, fitted_on=self.fitted_on
        )
        self.labels_ = rows.labels
        self._learn(rows)
        return self

    def predict(self, scores: Any, *, sensitive_features: Any) -> Floats:
        """Scores moved by the map of their group, shape (rows,).

        Parameters
        ----------
        scores : (rows,) predictions of the model
        sensitive_features : (rows,) or (rows, attributes) group labels, each seen in fit
        """
        check_is_fitted(self)
        f = check_column(scores, None, "scores")
        return np.asarray(self._move(f, known_codes(sensitive_features, self.labels_, f.size)), dtype=np.float64)

    def _check_parameters(self, sample_weight: Any) -> None:
        """Raise on parameters that cannot be used, before any row is looked at."""

    def _learn(self, rows: FitRows) -> None:
        raise NotImplementedError

    def _move(self, f: Floats, codes: Codes) -> Floats:
        raise NotImplementedError


def fit_rows(
    scores: Any, y: Any, *, sensitive_features: Any, sample_weight: Any, fitted_on: FittedOn = "scores"
) -> FitRows:
    """Check what ``fit`` was given and choose the values whose distributions are estimated."""
    if fitted_on not in ("scores", "targets"):
        raise InputError(f"`fitted_on={fitted_on!r}`: expected 'scores' or 'targets'.")
    values = check_column(scores, None, "scores")
    if fitted_on == "targets":
        if y is None:
            raise InputError(f"`fitted_on={fitted_on!r}` needs the training targets; pass `y` to fit.")
        values = check_column(y, len(values), "y", of="scores")
    labels, codes, weight = known_groups(sensitive_features, sample_weight, len(values), of="scores")
    return FitRows(values, labels, codes, weight)


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
    weight = checks.check_weight(sample_weight, rows, of=of)
    weight = weight / weight.max()  # shares are all that counts, and sums of them cannot overflow
    mass = np.bincount(codes, weights=weight, minlength=len(labels))
    if mass.min() <= 0:
        raise ValueError(f"group {labels[int(mass.argmin())]!r} has zero total sample_weight; drop it or weigh it.")
    return labels, codes, weight


def known_codes(sensitive_features: Any, labels: tuple[Label, ...], rows: int) -> Codes:
    """Position in ``labels`` of each row's group; fails on a group that ``fit`` has not seen."""
    got, codes = encode_groups(sensitive_features)
    check_rows(len(codes), rows, "sensitive_features", of="scores")
    position = {label: i for i, label in enumerate(labels)}
    unseen = [label for label in got if label not in position]
    if unseen:
        raise InputError(
            f"`sensitive_features` has groups {unseen} that were not in the training data, which has {list(labels)}. "
            "Fit on rows of every group."
        )
    return np.array([position[label] for label in got], dtype=np.intp)[codes]


# --- the barycentre (Chzhen et al., 2020) ---------------------------------------------------------------------------

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
        rng = checks.make_generator(self.random_state, FIT)
        unit = checks.unit_scale(rows.values)
        self.noise_scale_ = self.jitter * float(np.ldexp(np.ldexp(rows.values, -unit).std(), unit))
        values = rows.values + rng.normal(scale=self.noise_scale_, size=rows.values.size)
        mass = np.bincount(rows.codes, weights=rows.weight)
        self.proportions_ = mass / mass.sum()
        halves: list[tuple[Codes, Codes]] = []
        for code, label in enumerate(rows.labels):
            members = np.flatnonzero((rows.codes == code) & (rows.weight > 0))
            if self.split and members.size < 2:
                raise ValueError(
                    f"group {label!r} has {members.size} row; two halves need at least 2. Pass more rows or "
                    "split=False."
                )
            first, second = np.array_split(rng.permutation(members), 2) if self.split else (members, members)
            halves.append((first, second))
        self.cdfs_, self.quantiles_ = (
            tuple(EmpiricalDistribution.of(values[i], rows.weight[i]) for i in half)
            for half in zip(*halves, strict=True)
        )

    def _move(self, f: Floats, codes: Codes) -> Floats:
        rng = checks.make_generator(self.random_state, PREDICT)
        f = f + rng.normal(scale=self.noise_scale_, size=f.size)
        level = np.empty(f.size)
        for code in np.unique(codes):
            level[codes == code] = self.cdfs_[code].cdf(f[codes == code], rng)
        # g(x, a) = Σ_b p_b Q_b(F_a(f(x))): once F_a is applied, the map is the same for every group
        return np.asarray(sum(p * q.quantile(level) for p, q in zip(self.proportions_, self.quantiles_, strict=True)))
