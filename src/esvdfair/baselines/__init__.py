"""Other ways to the same end, behind one shape: ``fit(scores, y, sensitive_features=…)`` and ``predict(scores, …)``.

`WassersteinBarycenter` and `PrivateHistogram` need the group at prediction (``sensitive_features=``);
`WithPredictedGroups` around one of them, and `UnawareOptimum`, need features instead (``X=``).
"""

import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils.validation import check_is_fitted

from esvdfair.baselines.score_maps import Floats, PrivateHistogram, WassersteinBarycenter, known_groups
from esvdfair.core.checks import check_column, check_features, check_weight, row_count, unit_scale
from esvdfair.core.optimum import fit_optimum
from esvdfair.exceptions import ESVDFairWarning

__all__ = ["GroupPredictor", "PrivateHistogram", "UnawareOptimum", "WassersteinBarycenter", "WithPredictedGroups"]


class GroupPredictor(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Predict the sensitive group from the features.

    Parameters
    ----------
    classifier : object with ``fit(X, codes)`` and ``predict(X)``, default=None
        Any classifier of whole-number classes, such as a network with two outputs. It is cloned (copied, if it is not a
        scikit-learn estimator). None is a logistic regression, as in the paper for the law data.

    Attributes
    ----------
    labels_ : tuple
        Group labels, sorted.
    classifier_ : object
        The fitted classifier; class i is ``labels_[i]``.

    Examples
    --------
    >>> from esvdfair.baselines import GroupPredictor
    >>> GroupPredictor().fit([[0.0], [1.0], [2.0], [3.0]], ["a", "a", "b", "b"]).predict([[-1.0], [4.0]]).tolist()
    ['a', 'b']
    """

    def __init__(self, *, classifier: Any = None) -> None:
        self.classifier = classifier

    def fit(self, X: Any, sensitive_features: Any, *, sample_weight: Any = None) -> Self:
        """Fit the classifier to the groups (rows,) of X (rows, features); weights are passed on when given."""
        X = self._features(X)
        self.labels_, codes, weight = known_groups(sensitive_features, sample_weight, row_count(X))
        classifier = LogisticRegression(max_iter=1000) if self.classifier is None else self.classifier
        # in other units weights would change the regularisation
        extra = {} if sample_weight is None else {"sample_weight": weight / weight.mean()}
        self.classifier_ = clone(classifier, safe=False)
        self.classifier_.fit(X, codes, **extra)
        return self

    def _features(self, X: Any) -> Any:
        """A classifier of the user's may take text or missing values; the one we choose takes numbers."""
        return check_features(X) if self.classifier is None else X

    def predict(self, X: Any) -> NDArray[Any]:
        """Label of the most likely group, shape (rows,)."""
        check_is_fitted(self)
        codes = np.asarray(self.classifier_.predict(self._features(X))).astype(np.intp).ravel()
        mixed = isinstance(self.labels_[0], tuple) or len({type(label) for label in self.labels_}) > 1
        labels = np.fromiter(self.labels_, dtype=object, count=len(self.labels_)) if mixed else np.asarray(self.labels_)
        return labels[codes]

    def predict_proba(self, X: Any) -> Floats:
        """P̂(group | x), shape (rows, groups), columns in the order of ``labels_``."""
        check_is_fitted(self)
        if not hasattr(self.classifier_, "predict_proba"):
            raise TypeError(
                f"{type(self.classifier_).__name__} has no predict_proba, and probabilities of the groups were asked "
                "for. Use a classifier that gives them, such as LogisticRegression."
            )
        return np.asarray(self.classifier_.predict_proba(self._features(X)), dtype=np.float64)


class WithPredictedGroups(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Wrap a baseline so that it predicts the attribute from the features instead of asking for it.

    The baseline is fitted with the true groups, as in the paper; only ``predict`` replaces them. Where the classifier
    is wrong, predictions stay unfair.

    Parameters
    ----------
    baseline : object
        `WassersteinBarycenter`, `PrivateHistogram`, or an object with the same ``fit`` and ``predict``.
    group_predictor : GroupPredictor, default=None
        None uses a logistic regression. Wrap a fitted one in ``sklearn.frozen.FrozenEstimator`` to share it between
        baselines.
    not_private : bool, default=False
        A baseline with ``epsilon`` is refused unless this is True: its ε covers the histogram only, and the classifier
        of groups learns from the same rows without noise.

    Attributes
    ----------
    baseline_, group_predictor_ : object
        The fitted copies.

    Examples
    --------
    >>> import numpy as np
    >>> from esvdfair.baselines import WassersteinBarycenter, WithPredictedGroups
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 3))
    >>> groups = np.where(X[:, 0] > 0, "a", "b")
    >>> fair = WithPredictedGroups(baseline=WassersteinBarycenter(random_state=0))
    >>> fair.fit(X.sum(axis=1), sensitive_features=groups, X=X).predict(X.sum(axis=1), X=X).shape
    (200,)
    """

    def __init__(
        self, *, baseline: Any, group_predictor: GroupPredictor | None = None, not_private: bool = False
    ) -> None:
        self.baseline = baseline
        self.group_predictor = group_predictor
        self.not_private = not_private

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, X: Any, sample_weight: Any = None) -> Self:
        """Fit the baseline on the true groups and the predictor on (X, true groups).

        As :meth:`WassersteinBarycenter.fit`, with X (rows, features), what the group is predicted from. A baseline with
        ``epsilon`` is a ValueError, unless ``not_private`` says that the whole need not be private.
        """
        if getattr(self.baseline, "epsilon", None) is not None and not self.not_private:
            raise ValueError(
                f"epsilon={self.baseline.epsilon} covers the histogram alone: the classifier of groups learns from the "
                "same rows without noise, so the whole is not private. Pass not_private=True if that is meant, or "
                "epsilon=None."
            )
        self.baseline_ = clone(self.baseline).fit(
            scores, y, sensitive_features=sensitive_features, sample_weight=sample_weight
        )
        self.group_predictor_ = _fitted(self.group_predictor, X, sensitive_features, sample_weight)
        return self

    def predict(self, scores: Any, *, X: Any) -> Floats:
        """The baseline's prediction for the predicted groups, shape (rows,)."""
        check_is_fitted(self)
        groups = self.group_predictor_.predict(X)
        return np.asarray(self.baseline_.predict(scores, sensitive_features=groups))


class UnawareOptimum(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Attribute-unaware optimum: the scores are taken as η(x) = E[Y|x], the group enters through P̂(group|x) alone.

    Where the other baselines take ``sensitive_features`` in predict, this one takes what the group is guessed from, X.
    The optimum is optimal only as far as the scores are E[Y|x] and the probabilities are right.

    Parameters
    ----------
    alpha : float, at least 0
        Bound on the largest pairwise KS distance, measured with P̂(group|x).
    group_predictor : GroupPredictor or None
        Its classifier needs ``predict_proba``. None takes a logistic regression. Wrap a fitted one, whose probabilities
        are known to be right, in ``sklearn.frozen.FrozenEstimator``.

    Attributes
    ----------
    optimum_ : core.optimum.Optimum
    unit_ : int, exponent of the power of two in which it takes scores; 0 unless squares of the scores leave float64
    group_predictor_ : the fitted copy

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

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, X: Any, sample_weight: Any = None) -> Self:
        """Solve for the optimum at level ``alpha``; as :meth:`WithPredictedGroups.fit`, but y is not used."""
        eta = check_column(scores, None, "scores")
        self.group_predictor_ = _fitted(self.group_predictor, X, sensitive_features, sample_weight)
        weight = None if sample_weight is None else check_weight(sample_weight, eta.size, of="scores")
        unit = unit_scale(eta)
        self.unit_ = unit if abs(unit) > 200 else 0  # beyond it products of four scores may leave float64
        probability = self.group_predictor_.predict_proba(X)
        (self.optimum_,) = fit_optimum(
            np.ldexp(eta, -self.unit_), probability, levels=[self.alpha], sample_weight=weight
        )
        if not self.optimum_.converged:
            warnings.warn(
                f"the optimum at alpha={self.alpha} did not converge (KS reached {self.optimum_.ks:.3f}); "
                "regret measured against it is unreliable. Try a larger alpha.",
                ESVDFairWarning,
                stacklevel=2,
            )
        return self

    def predict(self, scores: Any, *, X: Any) -> Floats:
        """f*(x), shape (rows,); ``scores`` (rows,) are η(x), the predictions of the model."""
        check_is_fitted(self, "optimum_")
        eta = np.ldexp(check_column(scores, None, "scores"), -self.unit_)
        return np.ldexp(self.optimum_.predict(eta, self.group_predictor_.predict_proba(X)), self.unit_)


def _fitted(predictor: GroupPredictor | None, X: Any, sensitive_features: Any, sample_weight: Any) -> GroupPredictor:
    """A fitted copy of the predictor of groups; by default a logistic regression."""
    copy: GroupPredictor = clone(GroupPredictor() if predictor is None else predictor)
    return copy.fit(X, sensitive_features, sample_weight=sample_weight)
