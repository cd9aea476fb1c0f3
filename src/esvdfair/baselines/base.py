"""What the baselines share: the rows a fit learns from, maps that need the group at prediction."""

from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from esvdfair.core.checks import Label, check_column, check_rows, check_weight, encode_groups
from esvdfair.exceptions import Given, InputError

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.intp]
FittedOn: TypeAlias = Literal["scores", "targets"]
RandomState: TypeAlias = int | np.random.Generator | None

FIT, PREDICT = 0, 1
"""What a seed serves, so that fit and predict never share draws."""


class FitRows(NamedTuple):
    """The rows a baseline learns from.

    ``values`` (rows,) are the scores or the targets, ``codes`` (rows,) index ``labels``, ``weight`` (rows,)
    is all ones when no sample weight was given.
    """

    values: Floats
    labels: tuple[Label, ...]
    codes: Codes
    weight: Floats

    def proportions(self) -> Floats:
        """Weighted share of every group, shape (groups,), sums to 1."""
        mass = np.bincount(self.codes, weights=self.weight, minlength=len(self.labels))
        return np.asarray(mass / mass.sum(), dtype=np.float64)


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
    """Check what ``fit`` was given and choose the values whose distributions are estimated.

    ``fitted_on="targets"`` takes the training targets y, as the authors of the paper did; the maps so found are
    later applied to model scores all the same.
    """
    if fitted_on not in ("scores", "targets"):
        raise InputError("{fitted_on}: expected 'scores' or 'targets'.", fitted_on=Given(fitted_on))
    values = check_column(scores, None, "scores")
    if fitted_on == "targets":
        if y is None:
            raise InputError("{fitted_on} needs the training targets; pass y to fit.", fitted_on=Given(fitted_on))
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
    weight = check_weight(sample_weight, rows, of=of)
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
            "{sensitive_features} has groups {unseen} that were not in fit, which saw {seen}; there is no map for "
            "them. Fit on rows of every group.",
            sensitive_features=Given(),
            unseen=unseen,
            seen=list(labels),
        )
    return np.array([position[label] for label in got], dtype=np.intp)[codes]
