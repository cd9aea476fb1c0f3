"""Other libraries in the shape of the baselines, for comparisons; each needs the extra ``peers``.

Nothing here is imported by the rest of the library, and the libraries themselves only inside ``fit``.
"""

import copy
import importlib
import warnings
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.linear_model import LinearRegression
from sklearn.utils.validation import check_is_fitted

from esvdfair.baselines.score_maps import Codes, Floats, ScoreMap, known_groups
from esvdfair.core.checks import check_column, check_numbers, check_rows, row_count


def _import(module: str, distribution: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # theirs, and nothing our user can act on
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this comparison needs {distribution}, which could not be imported ({error}). "
            "Install it with: pip install 'esvdfair[peers]'"
        ) from error


class _OnScores(ScoreMap):
    """What the maps of other libraries share: they are fitted on scores, and take no weights."""

    def _check_parameters(self, sample_weight: Any) -> None:
        _refuse_weights(sample_weight)


def _refuse_weights(sample_weight: Any) -> None:
    if sample_weight is not None:
        raise ValueError("this library takes no sample weights, so they would be ignored; pass sample_weight=None.")


class FairlearnCorrelationRemover(_OnScores):
    """Fairlearn's `CorrelationRemover` on the score: equal group means, nothing else; needs the group at prediction.

    Fairlearn has no post-processing for the distribution of a regression, so this is its nearest.

    Attributes
    ----------
    labels_ : tuple of group labels, sorted
    remover_ : the fitted CorrelationRemover
    """

    def _learn(self, values: Floats, codes: Codes, weight: Floats) -> None:
        preprocessing = _import("fairlearn.preprocessing", "fairlearn")
        groups = range(1, len(self.labels_))  # columns of the table below
        self.remover_ = preprocessing.CorrelationRemover(sensitive_feature_ids=list(groups))
        self.remover_.fit(_score_and_dummies(values, codes, len(self.labels_)))

    def _move(self, f: Floats, codes: Codes) -> Floats:
        return np.asarray(self.remover_.transform(_score_and_dummies(f, codes, len(self.labels_)))).reshape(-1)


def _score_and_dummies(values: Floats, codes: Any, groups: int) -> Floats:
    """Columns: the score, then an indicator for every group but the first; shape (rows, groups)."""
    return np.column_stack([values, np.eye(groups)[codes][:, 1:]])


class EquipyWasserstein(_OnScores):
    """EquiPy's `FairWasserstein`: another implementation of Chzhen et al.; needs the group at prediction.

    Parameters
    ----------
    sigma : float
        Half-width of the uniform jitter, in units of the score.
    random_state : int

    Attributes
    ----------
    labels_ : tuple of group labels, sorted
    fair_ : the fitted FairWasserstein
    """

    def __init__(self, *, sigma: float = 1e-4, random_state: int = 0) -> None:
        self.sigma = sigma
        self.random_state = random_state

    def _learn(self, values: Floats, codes: Codes, weight: Floats) -> None:
        fairness = _import("equipy.fairness", "equipy")
        self.fair_ = fairness.FairWasserstein(sigma=self.sigma, seed=self.random_state)
        self.fair_.fit(values, pd.DataFrame({"group": codes}))

    def _move(self, f: Floats, codes: Codes) -> Floats:
        # EquiPy leaves out the terms of groups that are absent from the rows to predict: add a row of each
        every = np.arange(len(self.labels_))
        padded = np.concatenate([f, np.full(every.size, f[0])])
        groups = pd.DataFrame({"group": np.concatenate([codes, every])})
        fair = copy.deepcopy(self.fair_)  # its transform moves its generator on
        return np.asarray(fair.transform(padded, groups), dtype=np.float64)[: f.size]


class LeaceRegression(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Least squares on features from which concept-erasure's LEACE has removed the group.

    No linear function of the erased features has a mean gap between groups. Needs features, at best those of the
    last hidden layer, and no group at prediction.

    Attributes
    ----------
    eraser_ : the fitted LeaceEraser
    regression_ : the LinearRegression on erased features
    """

    def fit(self, scores: Any, y: Any = None, *, sensitive_features: Any, X: Any, sample_weight: Any = None) -> Self:
        """Erase the groups from X (rows, features) and regress y on what is left, or the scores when y is None."""
        _refuse_weights(sample_weight)
        values = check_column(*((scores, None, "scores") if y is None else (y, row_count(scores), "y")), of="scores")
        labels, codes, _ = known_groups(sensitive_features, None, len(values), of="scores")
        erasure = _import("concept_erasure", "concept-erasure")
        torch = _import("torch", "torch")
        features = torch.as_tensor(check_numbers(X, "X").astype(np.float64))
        check_rows(features.shape[0], values.size, "X", of="scores")
        indicators = torch.as_tensor(np.eye(len(labels))[codes])
        # its defaults shrink the covariance and drop weak directions, which leaves part of the gap; exact here
        self.eraser_ = erasure.LeaceEraser.fit(features, indicators, shrinkage=False, svd_tol=1e-8)
        self.regression_ = LinearRegression().fit(self.eraser_(features).numpy(), values)
        return self

    def predict(self, scores: Any = None, *, X: Any) -> Floats:
        """Predictions from erased features, shape (rows,); ``scores`` is not used, part of the common shape."""
        check_is_fitted(self)
        torch = _import("torch", "torch")
        features = torch.as_tensor(check_numbers(X, "X").astype(np.float64))
        return np.asarray(self.regression_.predict(self.eraser_(features).numpy()))
