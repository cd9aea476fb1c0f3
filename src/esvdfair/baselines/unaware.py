"""The best predictor without the attribute, in the shape of the other baselines: the reference for regret."""

import warnings
from typing import Any, Self

from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from esvdfair.baselines.base import Floats, as_column, as_weight
from esvdfair.baselines.group_predictor import GroupPredictor
from esvdfair.core.optimum import fit_optimum
from esvdfair.exceptions import ESVDFairWarning


class UnawareOptimum(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Attribute-unaware optimum: the scores are taken as η(x) = E[Y|x], the group enters through P̂(group|x) alone.

    Where the other baselines take ``sensitive_features`` in predict, this one takes what the group is guessed from:
    the features X (a classifier is fitted on them) or, for those who have them, the probabilities themselves.
    The optimum is optimal only as far as the scores are E[Y|x] and the probabilities are right.

    Parameters
    ----------
    alpha : float, at least 0
        Bound on the largest pairwise KS distance, measured with P̂(group|x).
    group_predictor : GroupPredictor or None
        Used when X is given; its classifier needs ``predict_proba``. None takes a logistic regression.

    Attributes
    ----------
    optimum_ : core.optimum.Optimum
    group_predictor_ : the fitted copy, or None when probabilities were given

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(300, 2))
    >>> groups = np.where(X[:, 0] + rng.normal(size=300) > 0, "a", "b")
    >>> fair = UnawareOptimum(alpha=0.1).fit(X.sum(axis=1), sensitive_features=groups, X=X)
    >>> fair.predict(X.sum(axis=1), X=X).shape
    (300,)
    """

    def __init__(self, *, alpha: float = 0.1, group_predictor: GroupPredictor | None = None) -> None:
        self.alpha = alpha
        self.group_predictor = group_predictor

    def fit(
        self,
        scores: Any,
        y: Any = None,
        *,
        sensitive_features: Any = None,
        X: Any = None,
        group_probability: Any = None,
        sample_weight: Any = None,
    ) -> Self:
        """Solve for the optimum at level ``alpha``.

        Parameters
        ----------
        scores : (rows,) η(x), the predictions of the model
        y : not used; part of the common shape
        sensitive_features : (rows,) or (rows, attributes) group labels; needed with X
        X : (rows, features) what the group is predicted from
        group_probability : (rows, groups) P̂(group|x), instead of X
        sample_weight : (rows,) or None

        Raises
        ------
        ValueError
            Neither or both of X and ``group_probability``, or X without ``sensitive_features``.
        """
        eta = as_column(scores, name="scores")
        _exactly_one(X, group_probability)
        self.group_predictor_ = None
        if X is not None:
            if sensitive_features is None:
                raise ValueError("X without sensitive_features: the classifier of groups learns from both. Pass both.")
            predictor = GroupPredictor() if self.group_predictor is None else self.group_predictor
            self.group_predictor_ = clone(predictor).fit(X, sensitive_features, sample_weight=sample_weight)
            group_probability = self.group_predictor_.predict_proba(X)
        weight = None if sample_weight is None else as_weight(sample_weight, eta.size)
        (self.optimum_,) = fit_optimum(eta, group_probability, levels=[self.alpha], sample_weight=weight)
        if not self.optimum_.converged:
            warnings.warn(
                f"the optimum at alpha={self.alpha} did not converge (KS reached {self.optimum_.ks:.3f}); "
                "regret measured against it is unreliable. Try a larger alpha.",
                ESVDFairWarning,
                stacklevel=2,
            )
        return self

    def predict(self, scores: Any, *, X: Any = None, group_probability: Any = None) -> Floats:
        """f*(x), shape (rows,).

        Parameters
        ----------
        scores : (rows,) η(x), the predictions of the model
        X : (rows, features), when fitted with X
        group_probability : (rows, groups), columns as in fit; may replace X
        """
        check_is_fitted(self, "optimum_")
        _exactly_one(X, group_probability)
        if X is not None:
            if self.group_predictor_ is None:
                raise ValueError("fitted with group_probability, so there is no classifier for X; pass probabilities.")
            group_probability = self.group_predictor_.predict_proba(X)
        return self.optimum_.predict(as_column(scores, name="scores"), group_probability)


def _exactly_one(X: Any, group_probability: Any) -> None:
    if (X is None) == (group_probability is None):
        raise ValueError(
            f"got {'neither' if X is None else 'both'} of X and group_probability; pass one of them: the features to "
            "predict the group from, or the probabilities themselves."
        )
