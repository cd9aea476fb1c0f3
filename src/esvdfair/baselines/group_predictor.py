"""The predicted attribute, for baselines that need one where the real one is absent."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils.validation import check_is_fitted

from esvdfair.baselines.base import Floats, label_array
from esvdfair.core.checks import encode_groups


class GroupPredictor(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Predict the sensitive group from the features.

    Parameters
    ----------
    classifier : object with ``fit(X, codes)`` and ``predict(X)``, or None
        Any classifier of whole-number classes, for instance a network with a two-class head; it is cloned (copied,
        when it is not a scikit-learn estimator). None takes a logistic regression, as the paper does for law.

    Attributes
    ----------
    labels_ : tuple of group labels, sorted
    classifier_ : the fitted copy; class i is ``labels_[i]``
    """

    def __init__(self, *, classifier: Any = None) -> None:
        self.classifier = classifier

    def fit(self, X: Any, sensitive_features: Any, *, sample_weight: Any = None) -> Self:
        """Fit the classifier of groups.

        Parameters
        ----------
        X : (rows, features)
        sensitive_features : (rows,) or (rows, attributes) group labels, at least two different ones
        sample_weight : (rows,) or None; passed on only when given
        """
        self.labels_, codes = encode_groups(sensitive_features)
        if len(self.labels_) < 2:
            raise ValueError(f"only one group, {self.labels_[0]!r}; there is nothing to predict.")
        classifier = LogisticRegression(max_iter=1000) if self.classifier is None else self.classifier
        extra = {} if sample_weight is None else {"sample_weight": sample_weight}
        self.classifier_ = clone(classifier, safe=False)
        self.classifier_.fit(X, codes, **extra)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Label of the most likely group, shape (rows,)."""
        check_is_fitted(self)
        codes = np.asarray(self.classifier_.predict(X)).astype(np.intp).ravel()
        return label_array(self.labels_)[codes]

    def predict_proba(self, X: Any) -> Floats:
        """P̂(group | x), shape (rows, groups), columns in the order of ``labels_``.

        Raises
        ------
        TypeError
            When the classifier has no ``predict_proba``.
        """
        check_is_fitted(self)
        if not hasattr(self.classifier_, "predict_proba"):
            raise TypeError(
                f"{type(self.classifier_).__name__} has no predict_proba, and probabilities of the groups were asked "
                "for. Use a classifier that gives them, such as LogisticRegression."
            )
        return np.asarray(self.classifier_.predict_proba(X), dtype=np.float64)


class WithPredictedGroups(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A baseline that needs no attribute at prediction: it predicts one from the features.

    Fitted with the true groups, as in the paper; only predict replaces them. What the classifier gets wrong stays
    unfair.

    Parameters
    ----------
    baseline : WassersteinBarycenter, PrivateHistogram, or anything with their ``fit`` and ``predict``
    group_predictor : GroupPredictor or None
        None takes one with a logistic regression. Wrap a fitted one in ``sklearn.frozen.FrozenEstimator`` to share it
        between baselines instead of fitting it again for each.

    Attributes
    ----------
    baseline_, group_predictor_ : the fitted copies

    Examples
    --------
    >>> import numpy as np
    >>> from esvdfair.baselines import WassersteinBarycenter
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 3))
    >>> groups = np.where(X[:, 0] > 0, "a", "b")
    >>> fair = WithPredictedGroups(baseline=WassersteinBarycenter(random_state=0))
    >>> fair.fit(X.sum(axis=1), sensitive_features=groups, X=X).predict(X.sum(axis=1), X=X).shape
    (200,)
    """

    def __init__(self, *, baseline: Any, group_predictor: GroupPredictor | None = None) -> None:
        self.baseline = baseline
        self.group_predictor = group_predictor

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, X: Any, sample_weight: Any = None) -> Self:
        """Fit the baseline on the true groups and the predictor on (X, true groups).

        Parameters
        ----------
        scores : (rows,) predictions of the model
        y : (rows,) training targets or None
        sensitive_features : (rows,) or (rows, attributes) true group labels
        X : (rows, features) what the group is predicted from
        sample_weight : (rows,) or None
        """
        predictor = GroupPredictor() if self.group_predictor is None else self.group_predictor
        self.baseline_ = clone(self.baseline).fit(
            scores, y, sensitive_features=sensitive_features, sample_weight=sample_weight
        )
        self.group_predictor_ = clone(predictor).fit(X, sensitive_features, sample_weight=sample_weight)
        return self

    def predict(self, scores: Any, *, X: Any) -> Floats:
        """The baseline's prediction for the predicted groups, shape (rows,)."""
        check_is_fitted(self)
        groups = self.group_predictor_.predict(X)
        return np.asarray(self.baseline_.predict(scores, sensitive_features=groups))
