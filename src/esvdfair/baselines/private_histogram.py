"""Fair regression from a private histogram (Xian et al., 2024): noise, repair, linear program, random transport."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from esvdfair.baselines.base import (
    FitRows,
    FittedOn,
    Floats,
    RandomState,
    as_column,
    fit_rows,
    generator,
    known_codes,
)
from esvdfair.baselines.coupling import cheapest_coupling, repair_cdf

# Noise can make a group's mass negative; it then counts for next to nothing instead of turning costs into gains
_SMALLEST_SHARE = 1e-6
# A bin below this probability was not seen in the group: the linear program says nothing about it
_UNSEEN = 1e-12


class PrivateHistogram(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Bin the scores, find the cheapest transport to nearly equal distributions, apply it at random.

    Needs the group at prediction. The joint histogram of group and bin gets Laplace noise of scale 2/(ε·rows) (one
    changed row moves two cells by 1/rows), each group's distribution function is repaired, the plans of
    :func:`coupling.cheapest_coupling` are found, and a score in bin i of group a becomes the middle of bin j with
    probability ``γ_aij / Σ_j γ_aij``. A bin that a group did not show in fit is left where it is.

    Parameters
    ----------
    bins : int
        Number of bins of equal width. The authors' code has 18 for both data sets.
    bounds : (low, high) or None
        Range of the bins; scores outside count into the outer bins. None takes the range of the fitted values,
        which is refused together with ``epsilon``, because the range itself would leak rows.
    epsilon : float or None
        Differential privacy ε of the fit with respect to changing one row (the number of rows and the names of the
        groups count as public); None adds no noise.
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

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, sample_weight: Any = None) -> Self:
        """Estimate the histograms and solve the linear program.

        Parameters
        ----------
        scores : (rows,) predictions of the model
        y : (rows,) training targets; used, and then required, with ``fitted_on="targets"``
        sensitive_features : (rows,) or (rows, attributes) group labels
        sample_weight : (rows,) or None; refused with ``epsilon``, whose noise is for rows that count alike

        Raises
        ------
        ValueError
            Parameters outside their range, ``epsilon`` without ``bounds``; see also :func:`base.fit_rows`.
        """
        self._check_parameters(sample_weight)
        rows = fit_rows(
            scores, y, sensitive_features=sensitive_features, sample_weight=sample_weight, fitted_on=self.fitted_on
        )
        self.labels_ = rows.labels
        self.edges_ = self._bin_edges(rows.values)
        self.points_ = (self.edges_[1:] + self.edges_[:-1]) / 2
        joint = self._joint_histogram(rows)
        self.proportions_ = np.clip(joint.sum(axis=1), _SMALLEST_SHARE, None)
        cdfs = np.cumsum(joint / self.proportions_[:, None], axis=1)
        self.histogram_ = np.diff([repair_cdf(cdf) for cdf in cdfs], prepend=0.0, axis=1)
        coupling = cheapest_coupling(
            self.histogram_, proportions=self.proportions_, points=self.points_, alpha=self.alpha
        )
        self.target_ = coupling.targets
        self.cost_ = coupling.cost
        self.transport_ = _conditional(coupling.plans, self.histogram_ > _UNSEEN)
        return self

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

    def _bin_edges(self, values: Floats) -> Floats:
        low, high = self.bounds if self.bounds is not None else (values.min(), values.max())
        if not low < high:
            raise ValueError(f"all fitted values equal {low}; bins need a range. Pass bounds=(low, high).")
        return np.linspace(low, high, self.bins + 1)

    def _joint_histogram(self, rows: FitRows) -> Floats:
        """Share of rows in (group, bin), shape (groups, bins), with noise when ``epsilon`` is set."""
        groups = len(rows.labels)
        cell = rows.codes * self.bins + self._bin(rows.values)
        mass = np.bincount(cell, weights=rows.weight, minlength=groups * self.bins)
        joint = (mass / mass.sum()).reshape(groups, self.bins)
        if self.epsilon is None:
            return np.asarray(joint)
        rng = generator(self.random_state, purpose=0)
        return np.asarray(joint + rng.laplace(scale=2 / (self.epsilon * rows.values.size), size=joint.shape))

    def _bin(self, values: Floats) -> NDArray[np.intp]:
        """Bin of every value, [edge, next edge); what lies outside the bounds counts into the outer bins."""
        return np.clip(np.searchsorted(self.edges_, values, side="right") - 1, 0, self.bins - 1)

    def predict(self, scores: Any, *, sensitive_features: Any) -> Floats:
        """Middles of the bins that the scores are moved to, shape (rows,).

        Parameters
        ----------
        scores : (rows,) predictions of the model
        sensitive_features : (rows,) or (rows, attributes) group labels, each seen in fit
        """
        check_is_fitted(self)
        f = as_column(scores, name="scores")
        codes = known_codes(sensitive_features, self.labels_, f.size)
        u = generator(self.random_state, purpose=1).random(f.size)
        levels = np.cumsum(self.transport_, axis=2)[codes, self._bin(f)]  # (rows, bins)
        moved = np.count_nonzero(levels <= u[:, None], axis=1)
        return np.asarray(self.points_[np.minimum(moved, self.bins - 1)])


def _conditional(plans: Floats, seen: NDArray[np.bool_]) -> Floats:
    """P(bin after | bin before): rows of the plans over their sums, the identity where nothing was seen."""
    mass = np.where(seen, plans.sum(axis=2), 1.0)
    return np.where(seen[:, :, None], plans / mass[:, :, None], np.eye(plans.shape[1]))
