"""ESVDFair: the scikit-learn estimator around a trained model, and `fit_curve`.

Long because every option, attribute and argument of the public class is documented here.
"""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from esvdfair import hidden, methods
from esvdfair.batches import (
    COLUMNS,
    Batch,
    Data,
    as_rows,
    held_out,
    inputs_of,
    is_read_once,
    is_stream,
    make_batches,
)
from esvdfair.core.checks import label_text, row_count, take, to_numpy
from esvdfair.core.edits import PAPER_REDUCTIONS
from esvdfair.core.quadratic import Fit
from esvdfair.curve import Curve, choose
from esvdfair.evaluation import evaluate
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.fit_report import FitReport, account_for, make_report
from esvdfair.gather import few_threads, gather, summarise
from esvdfair.methods import TARGETS, Candidates
from esvdfair.models import adapt
from esvdfair.models.base import ModelAdapter
from esvdfair.plots import plot_before_and_after
from esvdfair.problem import (
    MIN_GROUP_ROWS,
    ORIGINAL,
    Effort,
    Problem,
    check_apart,
    make_problem,
    make_test_problem,
    notice_missing_bias,
    original_fit,
)
from esvdfair.summary import Summary

METHODS = ("paper", "exact", "parity", "transport")
CHOICES: dict[str, tuple[Any, ...]] = {
    "method": METHODS,
    "missing": ("error", "group"),
    "refit": (None, "sgd", "ols"),
    "certificate": ("normal", "hoeffding"),
    "rescale": (False, True),
    "keep_zeros": (True, False),
}
REDUCTIONS = dict(zip(("mean_reduction", "covariance_reduction"), PAPER_REDUCTIONS, strict=True))
NUMBERS: dict[str, tuple[Any, str]] = {
    "target_ks": (pd.Interval(0, 1, closed="both"), "expected a number between 0 and 1, or None"),
    "max_mse_increase": (pd.Interval(0, np.inf, closed="both"), "expected a number that is not negative, or None"),
    "confidence": (pd.Interval(0, 1, closed="neither"), "expected a number between 0 and 1, such as 0.9, or None"),
    **dict.fromkeys(
        REDUCTIONS, (pd.Interval(1, np.inf, closed="both"), "expected a number of at least 1, such as inf, or None")
    ),
    "validation_fraction": (pd.Interval(0, 1, closed="left"), "expected a number from 0 to below 1"),
    "min_group_rows": (pd.Interval(2, np.inf, closed="left"), "expected a whole number of at least 2"),
    "batch_size": (pd.Interval(1, np.inf, closed="left"), "expected a whole number of at least 1"),
}


class ESVDFair(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Repair a trained regressor so that its predictions have the same distribution in every sensitive group.

    The weights of the last layer, or the leaf values of trees, are changed in closed form; the result is a model of
    the same type. :meth:`fit` needs the sensitive attribute, :meth:`predict` does not.

    Parameters
    ----------
    model : estimator, torch.nn.Module, str, Path or bytes
        The trained model, which is never changed: a scikit-learn network, linear model or tree ensemble, alone or in a
        Pipeline, TransformedTargetRegressor, GridSearchCV or FrozenEstimator; a skorch, LightGBM, XGBoost or CatBoost
        model; a torch module; or the path or bytes of an ONNX file. A scikit-learn model that is not fitted is fitted
        on the training rows first.
    method : {"transport", "parity", "exact", "paper"}, default="transport"
        How the model is repaired:

        - "transport" brings the whole distributions of the groups together by refitting the last layer.
        - "parity" matches means and variances only.
        - "exact" edits a hidden layer, then refits the last one with equal means and variances.
        - "paper" is Algorithm 2 of the paper, with its errata corrected.
    target_ks : float, default=None
        Largest Kolmogorov–Smirnov distance between any two groups that is acceptable in the population. The original
        model is returned if its estimate meets it, else the most accurate candidate whose estimate does. Without any
        target, "transport" aims at 0.05, or at the smallest KS that the rows can distinguish from parity.
    confidence : float, default=None
        Choose only a model that is certified to meet ``target_ks``: at 0.9, at most one in ten validation samples
        certifies a model that misses it. If none can be certified, the fairest is returned with a warning that says
        how many rows are needed.
    certificate : {"normal", "hoeffding"}, default="normal"
        The bound behind the certificate: the normal approximation, or one that holds at every sample size and needs
        about three times as many rows.
    max_mse_increase : float, default=None
        Instead of ``target_ks``: choose the fairest candidate whose mean squared error exceeds that of the original
        model by at most this fraction.
    mean_reduction, covariance_reduction : float, default=None
        Factors, from 1 to inf, by which the squared differences in means and covariances shrink; not allowed together
        with a target. The defaults are 15 and 150 for "paper" and "exact", inf for "parity".
    refit : {"sgd", "ols"}, default=None
        How "paper" refits the last layer: by the paper's fine-tuning (the default) or by least squares.
    layer : int or str, default=None
        Linear layer that "paper" and "exact" edit, by index or dotted name; None is the last hidden layer (-2).
    targets : "auto" or sequence of str, default="auto"
        What the refit may aim at: "labels", "predictions" of the original model, or the "optimum", the best fair
        predictor that does not use the attribute. "auto" tries all that the data allow.
    rescale : bool, default=False
        Whether the repaired predictions get the mean and standard deviation of the original ones on the training rows.
        KS distances do not change. Not possible where a sigmoid or another curve follows the last layer.
    keep_zeros : bool, default=True
        Whether coefficients of a linear model that are 0, such as those of a Lasso, stay 0.
    validation_fraction : float, default=0.25
        Fraction of the rows that is held out to choose among candidates when :meth:`fit` gets no ``validation``.
    min_group_rows : int, default=30
        Groups with fewer training or validation rows are set aside, with a warning: not compared and not constrained,
        but counted in the error. 2 compares every group.
    missing : {"error", "group"}, default="error"
        Whether a missing attribute value is an error or a group of its own.
    output : str, int or callable, default=None
        Which output is the prediction, for torch and ONNX models with several. "sigmoid" turns a logit into a score.
    batch_size : int, default=8192
        Rows that run through the model at once.
    effort : Effort, default=None
        Search budget. ``Effort.quick()`` compares a few candidates instead of several hundred.
    random_state : int, RandomState or None, default=0
        Seed of the held-out split, of subsamples and of the fine-tuning.

    Attributes
    ----------
    estimator_ : object
        The repaired model, of the same type as ``model``.
    model_ : object
        The original model: ``model``, or its fitted copy if it was not fitted.
    summary_ : FitReport
        Error, KS distance and more, before and after the repair, on validation rows: a dict whose entries are
        attributes too.
    curve_ : Curve
        The trade-off between error and parity.
    point_ : CurvePoint
        The point of the curve that was chosen.
    edits_ : list of LayerEdit
        What was changed, layer by layer; empty if the original model was chosen.
    n_features_in_ : int
        Number of features seen during :meth:`fit`.
    feature_names_in_ : ndarray of str
        Names of the features, if X has column names.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPRegressor
    >>> from esvdfair import ESVDFair, ks_distance
    >>> rng = np.random.default_rng(0)
    >>> group = rng.integers(0, 2, 2000)
    >>> X = rng.normal(size=(2000, 5)) + group[:, None] * [0.8, 0, 0, 0, 0]
    >>> y = X.sum(axis=1) + rng.normal(size=2000)
    >>> model = MLPRegressor(early_stopping=True, random_state=0).fit(X, y)
    >>> fair = ESVDFair(model, target_ks=0.1).fit(X, y, sensitive_features=group)
    >>> before = ks_distance(model.predict(X), sensitive_features=group)
    >>> after = ks_distance(fair.predict(X), sensitive_features=group)
    >>> after < before
    True
    """

    def __init__(
        self,
        model: Any,
        *,
        method: str = "transport",
        target_ks: float | None = None,
        confidence: float | None = None,
        certificate: str = "normal",
        max_mse_increase: float | None = None,
        mean_reduction: float | None = None,
        covariance_reduction: float | None = None,
        refit: str | None = None,
        layer: int | str | None = None,
        targets: str | Sequence[str] = "auto",
        rescale: bool = False,
        keep_zeros: bool = True,
        validation_fraction: float = 0.25,
        min_group_rows: int = MIN_GROUP_ROWS,
        missing: str = "error",
        output: Any = None,
        batch_size: int = 8192,
        effort: Effort | None = None,
        random_state: Any = 0,
    ) -> None:
        self.model = model
        self.method = method
        self.target_ks = target_ks
        self.confidence = confidence
        self.certificate = certificate
        self.max_mse_increase = max_mse_increase
        self.mean_reduction = mean_reduction
        self.covariance_reduction = covariance_reduction
        self.refit = refit
        self.layer = layer
        self.targets = targets
        self.rescale = rescale
        self.keep_zeros = keep_zeros
        self.validation_fraction = validation_fraction
        self.min_group_rows = min_group_rows
        self.missing = missing
        self.output = output
        self.batch_size = batch_size
        self.effort = effort
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sensitive_features: Any = None,
        sample_weight: Any = None,
        control_features: Any = None,
        validation: Any = None,
    ) -> Self:
        """Repair the model.

        Parameters
        ----------
        X : array-like, DataFrame, tensor, DataLoader or iterable
            Training rows, (rows, features). A tuple, list or mapping of arrays for a model with several inputs. A
            DataLoader, an iterable, or a function that returns one, yields batches
            ``(X, y, sensitive_features[, sample_weight[, control_features]])``.
        y : array-like, default=None
            Labels, (rows,). Without them the model's own predictions take their place, also in errors.
        sensitive_features : array-like, DataFrame, dict or str, default=None
            Group of each row. Several columns are combined into groups; a str is the name of a column of X.
        sample_weight : array-like, default=None
            Weight of each row, (rows,).
        control_features : array-like or DataFrame, default=None
            Strata, such as job or region: groups are compared as if each had the same mix of them. Errors are not
            adjusted.
        validation : tuple, DataLoader or iterable, default=None
            ``(X, y, sensitive_features[, sample_weight[, control_features]])`` of rows that the model was *not trained
            on*, or batches of them; the candidate is chosen and evaluated there. If None, ``validation_fraction`` of X
            is held out, or nothing if a group has too few rows (``summary_["evaluated_on"]`` is then "train").

        Returns
        -------
        ESVDFair
            The fitted estimator; ``estimator_`` is the repaired model.
        """
        data = Data(X, y, sensitive_features, sample_weight, control_features)
        return self._choose_among(*self._candidates(data, validation))

    def fit_summary(self, summary: Summary, validation: Any = None) -> Self:
        """Repair the model from a summary of its rows, made by :func:`esvdfair.summarise` with the same model.

        Parameters
        ----------
        summary : Summary
            Summary of all training rows: ``part_1 + part_2``, or ``sum(parts)``.
        validation : Summary or tuple, default=None
            Validation rows, summarised or as in :meth:`fit`. If None, a fraction of ``summary`` is held out.

        Returns
        -------
        ESVDFair
            The fitted estimator.
        """
        self._check_options()
        if self.method in ("paper", "exact"):
            raise InputError(
                f"`method={self.method!r}` reads the rows more than once, and a summary has only part of them. Use "
                "`method='transport'` or `method='parity'`, or pass the rows to fit."
            )
        if not isinstance(summary, Summary):
            raise TypeError(f"fit_summary takes a Summary, got {type(summary).__name__}; pass rows to fit.")
        from esvdfair.models import fingerprint

        adapter = adapt(self.model, output=self.output, keep_zeros=self.keep_zeros)
        if summary.model != fingerprint(adapter.model):
            raise InputError("`summary` was made with another model; summarise the rows with `model`.")
        if summary.output is None:
            raise ValueError("there are no rows to fit on: the summary is empty.")
        adapter = self._adopt(adapter.with_output(summary.output))
        if validation is not None and not isinstance(validation, Summary):
            known = {name: getattr(self, name) for name in ("output", "missing", "keep_zeros", "batch_size")}
            rows = Data.of(validation)
            beside = {name: getattr(rows, name) for name in COLUMNS}
            validation = summarise(self.model, rows.X, rows.y, rows=self._effort.rows, **beside, **known)
        if summary.columns:
            self.feature_names_in_ = np.array(summary.columns, dtype=object)
        return self._choose_among(adapter, self._refits(summary, validation))

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict with the repaired model.

        Parameters
        ----------
        X : array-like, DataFrame, tensor, DataLoader or iterable
            Rows, (rows, features), or batches X, ``(X,)``, ``(X, y)`` or as in :meth:`fit`.

        Returns
        -------
        ndarray
            Predictions, (rows,), in the order of the rows.
        """
        check_is_fitted(self, "estimator_")
        predictor: ModelAdapter = self._predictor
        if not is_stream(X):
            return predictor.predict(self._rows(X, reset=False))
        parts = [predictor.predict(self._rows(x, reset=False)) for x in inputs_of(X)]
        if not parts:
            raise ValueError("X yields no batch, so there is nothing to predict; an iterator can be read only once.")
        return np.concatenate(parts)

    def assess(
        self,
        X: Any,
        y: Any = None,
        *,
        sensitive_features: Any = None,
        sample_weight: Any = None,
        control_features: Any = None,
    ) -> FitReport:
        """Evaluate the repaired model on held-out data.

        Parameters
        ----------
        X : array-like, DataFrame, tensor, DataLoader or iterable
            Rows that were used neither to fit nor to choose, as in :meth:`fit`.
        y : array-like, default=None
            Labels, (rows,).
        sensitive_features : array-like, DataFrame, dict or str, default=None
            Group of each row.
        sample_weight : array-like, default=None
            Weight of each row, (rows,).
        control_features : array-like or DataFrame, default=None
            Strata to adjust for.

        Returns
        -------
        FitReport
            The entries of ``summary_`` for these rows, on which ``met`` and ``certified`` are decided too.
        """
        check_is_fitted(self, "estimator_")
        data = Data(X, y, sensitive_features, sample_weight, control_features)
        adapter = adapt(self.model_, output=self.output, keep_zeros=self.keep_zeros)
        batches = make_batches(data, missing=self.missing, batch_size=self.batch_size, classes=adapter.classes)
        problem, repaired = (
            make_test_problem(gather(each, batches, rows=self._effort.rows), self.min_group_rows)
            for each in (adapter, self._predictor)
        )
        after, refit = repaired.validation.prediction, self.curve_.refit if hasattr(self, "curve_") else None
        fits, plain = (Fit(problem.layer.weight[0], 0.0),), () if refit is None else (refit,)
        candidates = Candidates(problem, fits, after[:, None], np.zeros((0, 1)), plain=plain)
        curve = self._evaluate(adapter, candidates)
        found = make_report(problem, after, curve, curve.points[0], method=self.method, target_ks=self.target_ks)
        kept = ("decided_by", "negative_coefficients")  # which depend on no rows
        return FitReport(found | {name: self.summary_[name] for name in kept if name in self.summary_})

    def plot_distributions(self, X: Any, *, sensitive_features: Any, axes: Any = None) -> Any:
        """Draw how the predictions of each group are distributed, before and after the repair.

        Parameters
        ----------
        X : array-like, DataFrame, tensor, DataLoader or iterable
            Rows, as in :meth:`fit`.
        sensitive_features : array-like, DataFrame, dict or str
            Group of each row.
        axes : sequence of two matplotlib Axes, default=None
            Where to draw; None makes a new figure.

        Returns
        -------
        sequence of Axes
            Of the original and of the repaired model.
        """
        check_is_fitted(self, "estimator_")
        batches = make_batches(Data(X, None, sensitive_features), missing=self.missing, batch_size=self.batch_size)
        adapter, found = adapt(self.model_, output=self.output), []
        for batch in batches:
            groups = np.array([label_text(label) for label in batch.groups])[batch.codes]
            found.append((adapter.predict(batch.x), self._predictor.predict(batch.x), groups))
        before, after, groups = (np.concatenate(column) for column in zip(*found, strict=True))
        return plot_before_and_after(before, after, sensitive_features=groups, axes=axes)

    def judged(self, rows: Batch) -> NDArray[np.bool_] | None:
        """Find the rows that chose the repair among the rows of :meth:`fit`.

        Parameters
        ----------
        rows : Batch
            All rows of :meth:`fit` in the same order, or the validation rows.

        Returns
        -------
        ndarray of bool or None
            Whether each row is a validation row; None if these are other rows, or not all of them were kept.
        """
        known, seed = getattr(self, "_validated", ("", 0))
        out = np.ones(len(rows.codes), dtype=bool)
        if self.summary_["evaluated_on"] == "heldout":
            out = held_out(self.validation_fraction, seed)(rows.row_id)
        i = np.flatnonzero(out if rows.weight is None else out & (rows.weight > 0))
        y = None if self.summary_["error_against"] == "predictions" or rows.y is None else rows.y[i]
        names = [label_text(group) for group in rows.groups]
        return out if _known_rows(rows.row_id[i], y, names, rows.codes[i]) == known else None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = False
        tags.target_tags.multi_output = False
        if hasattr(self.model, "__sklearn_tags__"):
            tags.input_tags.sparse = get_tags(self.model).input_tags.sparse
        return tags

    # --- the steps of fit ------------------------------------------------------------------------------------------

    def _check_options(self, scans: bool = False) -> None:
        """Raise for options that are wrong or contradict each other; ``scans`` asks for a whole curve."""
        self._check_values()
        targets = 2 - [self.target_ks, self.max_mse_increase].count(None)
        self._scans = scans or targets > 0
        given = " and ".join(name for name in REDUCTIONS if getattr(self, name) is not None)
        seed, numbered = self.random_state, isinstance(self.random_state, int | np.integer)
        faults = [
            (
                self.refit is not None and self.method != "paper",
                f"`refit={self.refit!r}` requires `method='paper'`; got `method={self.method!r}`.",
            ),
            (
                self.layer is not None and self.method in ("parity", "transport"),
                f"`layer={self.layer!r}` was given, but `method={self.method!r}` edits the last layer alone. Leave the "
                "layer out, or use the method 'exact' or 'paper'.",
            ),
            (
                targets > 1,
                f"`target_ks={self.target_ks}` and `max_mse_increase={self.max_mse_increase}` each choose a point on "
                "the curve. Give one of them.",
            ),
            (
                self.confidence is not None and not self._scans,
                f"`confidence={self.confidence}` requires `target_ks`.",
            ),
            (given and self._scans, f"{given} fix the point, and a target chooses it; give one or the other."),
            (
                given and self.method == "transport",
                f"{given} belong to the other methods; transport takes target_ks.",
            ),
            (
                numbered and (isinstance(seed, bool) or seed < 0),
                f"`random_state={seed}`; expected a whole number of at least 0, a RandomState or None.",
            ),
        ]
        for is_fault, words in faults:
            if is_fault:
                raise InputError(words)
        seed = int(seed if numbered else check_random_state(seed).randint(2**31 - 1))
        self._split: dict[str, Any] = {"seed": seed}
        self._split |= {name: getattr(self, name) for name in ("validation_fraction", "min_group_rows")}

    def _check_values(self) -> None:
        """Raise for a single option that is wrong."""
        if isinstance(self.model, type):
            raise TypeError(f"model is the class {self.model.__name__}; pass an object of it.")
        if self.effort is not None and not isinstance(self.effort, Effort):
            raise TypeError(f"effort={self.effort!r}; expected an esvdfair.Effort, such as Effort.quick().")
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"`{name}={value!r}`; expected {' or '.join(map(repr, choices))}.")
        for name, (allowed, expected) in NUMBERS.items():
            value = getattr(self, name)
            if value is None and expected.endswith("None"):
                continue
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or value not in allowed or ("whole" in expected and isinstance(value, float)):
                raise InputError(f"`{name}={value!r}`; {expected}.")

    def _candidates(self, data: Data, validation: Any, *, scans: bool = False) -> tuple[ModelAdapter, Candidates]:
        """The refits to choose from; ``scans`` asks for a whole curve."""
        self._check_options(scans)
        data = data if data.is_stream else replace(data, X=self._rows(data.X, reset=True))
        if not data.is_stream and row_count(data.X) < 2:
            raise ValueError(f"X has n_samples={row_count(data.X)}; parity between groups needs at least two of each.")
        edits_hidden = self.method in ("paper", "exact")
        if edits_hidden and is_read_once(data.X):
            raise ValueError(
                f"X is an iterator, which can be read only once, and `method={self.method!r}` reads it twice. Pass "
                "arrays, a DataLoader, or a function that makes the iterator."
            )
        reading: dict[str, Any] = {"missing": self.missing, "batch_size": self.batch_size}
        reading["classes"] = self._classes(data.y)
        batches = make_batches(data, **reading)
        apart = None if validation is None else make_batches(Data.of(validation), **reading)
        adapter = self._adopt(self._adapter(data, held=apart is None))
        check_apart(batches, apart, self.confidence)
        rows = self._effort.rows
        if edits_hidden:
            return adapter, self._edited(hidden.Reader(adapter, batches, apart, rows, self._split))
        order = (self.validation_fraction if apart is None else 0.0, self._split["seed"])
        asked: dict[str, Any] = {"rows": rows, "split": order}
        summary = gather(adapter, batches, **asked)
        other = None if apart is None else gather(adapter, apart, output=summary.output, **asked)
        return adapter, self._refits(summary, other)

    def _classes(self, y: Any) -> Any:
        """The two classes that a scikit-learn classifier tells apart, or will when it is fitted; else None."""
        if not (hasattr(self.model, "__sklearn_tags__") and is_classifier(self.model)):
            return None
        classes = getattr(self.model, "classes_", None)
        classes = np.unique(to_numpy(y)) if classes is None and y is not None else classes
        return classes if classes is not None and len(classes) == 2 else None

    def _adapter(self, data: Data, *, held: bool) -> ModelAdapter:
        """The adapter of the model, which is fitted first when it is a scikit-learn model that is not.

        ``held`` says that some of the rows are held out.
        """
        options = {"output": self.output, "keep_zeros": self.keep_zeros}
        try:
            adapter = adapt(self.model, **options)
        except NotFittedError:
            if data.is_stream or data.y is None:
                raise NotFittedError(
                    f"the {type(self.model).__name__} is not fitted; fit it first, or pass X and y as arrays so that "
                    "it can be fitted here."
                ) from None
            from esvdfair.models.sklearn import fit_model

            chosen = np.arange(row_count(data.X))
            if held:
                chosen = chosen[~held_out(self.validation_fraction, self._split["seed"])(chosen)]
            weight = None if data.sample_weight is None else to_numpy(data.sample_weight)[chosen]
            return adapt(fit_model(self.model, take(data.X, chosen), to_numpy(data.y)[chosen], weight), **options)
        if adapter.trees and held:
            warnings.warn(
                "Trees fit their training rows closely, so errors and KS distances on those rows are too small. Pass "
                "rows that the trees were not trained on as `validation=(X, y, sensitive_features)`.",
                ESVDFairWarning,
                stacklevel=4,
            )
        return adapter

    def _adopt(self, adapter: ModelAdapter) -> ModelAdapter:
        """Remember the original model, and the search budget, with what suits the model where nothing was chosen."""
        effort, usual = self.effort or Effort(), (Effort(), Effort.quick())
        suits: dict[str, Any] = {
            name: values
            for name, values in adapter.search.items()
            if getattr(effort, name) in [getattr(each, name) for each in usual]
        }
        self.model_, self._effort = adapter.model, replace(effort, **suits)
        return adapter

    def _refits(self, summary: Summary, validation: Summary | None) -> Candidates:
        """Refits of the last layer, and the original one."""
        if summary.n_features is not None:  # as scikit-learn does where `fit` gets an array
            self.n_features_in_ = summary.n_features
        with few_threads(0 if summary.output is None else summary.output.layer.weight.shape[1]):
            problem = make_problem(summary, validation, **self._split)
            given = [getattr(self, name) for name in REDUCTIONS]
            if self.method == "parity" and not self._scans and given == [None, None]:
                given = [np.inf, np.inf]
            targets = self._targets(labelled=summary.labelled, reduced=given != [None, None])
            if self.method == "transport":
                solve: methods.Solve = partial(methods.transport, targets=targets)
            else:
                problem.layer.check_no_offset("method='parity'")
                reductions = dict(zip(REDUCTIONS, given, strict=True))
                solve = partial(methods.parity, targets=targets, **reductions)
            # Rows that certify may not even choose a regularisation.
            fitting = problem if self.confidence is None else replace(problem, validation=problem.training)
            fits, crossed = methods.solve_all(fitting, solve, self._effort, scans=given == [None, None])
            if self.rescale:
                methods.check_rescales(problem)
                fits = [methods.rescaled(fit, problem, problem) for fit in fits]
            return Candidates.of(problem, [*fits, original_fit(problem.layer)], crossed)

    def _targets(self, *, labelled: bool, reduced: bool) -> tuple[str, ...]:
        """What the refit may aim at."""
        if isinstance(self.targets, str) and self.targets == "auto":
            # Where reductions say how fair to be, a target that is fair already adds nothing (docs/method.md).
            return TARGETS[0 if labelled else 1 : 2 if reduced else 3]
        names = (self.targets,) if isinstance(self.targets, str | int | float) else tuple(self.targets)
        if not names or set(names) - set(TARGETS):
            raise ValueError(f"targets={self.targets!r}; expected 'auto' or some of {TARGETS}.")
        if "labels" in names and not labelled:
            raise ValueError("targets holds 'labels', but there is no y; pass y, or targets='predictions'.")
        return names

    def _edited(self, reader: hidden.Reader) -> Candidates:
        """Edits of a hidden layer, each followed by a refit of the last one, and the original layers."""
        mean, covariance = (getattr(self, name) or default for name, default in REDUCTIONS.items())
        factors = self._effort.factors if self._scans else (1.0,)
        candidates = hidden.solve(
            reader,
            method=self.method,
            layer=-2 if self.layer is None else self.layer,
            refit="parity" if self.method == "exact" else self.refit or "sgd",
            reductions=[(max(1.0, f * mean), max(1.0, f * covariance)) for f in factors],
            most_bytes=self._effort.scanned_bytes if self._scans else None,
            rescale=self.rescale,
        )
        if reader.n_features is not None:
            self.n_features_in_ = reader.n_features
        return candidates

    def _evaluate(self, adapter: ModelAdapter, candidates: Candidates) -> Curve:
        asked: dict[str, Any] = {"confidence": self.confidence, "certificate": self.certificate}
        return evaluate(candidates, adapter, effort=self._effort, **asked)

    def _choose_among(self, adapter: ModelAdapter, candidates: Candidates) -> Self:
        """Evaluate the candidates, choose one, and keep what is known of it."""
        problem, asked = candidates.problem, {"target_ks": self.target_ks, "max_mse_increase": self.max_mse_increase}
        _warn_set_aside(problem, self.min_group_rows)
        with few_threads(problem.layer.weight.shape[1]):
            curve = self._evaluate(adapter, candidates)
            point = choose(curve, **asked, closest=self.method == "transport")
            chosen = curve.candidates[point]
            fit, after = candidates.fits[chosen], candidates.validation[:, chosen]
            self.curve_, self.point_ = curve, point
            self._predictor = adapter.replace(curve.weights[point.index])
            self.estimator_ = self._predictor.model
            notice_missing_bias(problem, after)
            self.edits_ = [] if fit.target == ORIGINAL else account_for(problem, fit)
            self.summary_ = make_report(problem, after, curve, point, method=self.method, **asked)
        if self._predictor.negative is not None:
            self.summary_["negative_coefficients"] = self._predictor.negative
        rows = problem.validation
        names = [label_text(label) for label in (*problem.labels, *problem.set_aside)]
        known = _known_rows(rows.id, None if problem.error_against == "predictions" else rows.y, names, rows.codes)
        self._validated = known if problem.complete else "", problem.seed
        return self

    def _rows(self, X: Any, *, reset: bool) -> Any:
        """Rows in memory, checked; columns of a DataFrame in the order of those that fitted, unless ``reset``."""
        X = as_rows(X)
        if not hasattr(X, "shape"):
            return X  # several inputs, which scikit-learn knows nothing of
        names = None if reset else getattr(self, "feature_names_in_", None)
        if names is not None and hasattr(X, "columns") and sorted(map(str, X.columns)) == sorted(names):
            X = X[list(names)]
        validate_data(self, X, skip_check_array=True, reset=reset)
        return X


def _warn_set_aside(problem: Problem, least: int) -> None:
    """Name the groups that are too small to be compared."""
    names = [f"{label_text(label)} ({rows} rows)" for label, rows in problem.set_aside.items()]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    count = "1 group is" if len(names) == 1 else f"{len(names)} groups are"
    needed = "" if problem.evaluated_on == "train" else " in the training data, and as many in the validation data"
    if names:
        warnings.warn(
            f"{count} too small to compare and set aside: {', '.join(names[:10])}{more}. Their rows count in the error "
            f"only; a group needs {least} rows (`min_group_rows={least}`){needed}.",
            ESVDFairWarning,
            stacklevel=4,
        )


def _known_rows(row_id: Any, y: Any, names: Sequence[str], codes: NDArray[np.intp]) -> str:
    """A text that tells rows, by id, label and group, from other rows: no rows need be kept to know them again."""
    order = np.argsort(row_id, kind="stable")
    found = hashlib.sha256(np.asarray(row_id)[order].astype(np.uint64).tobytes())
    found.update(b"" if y is None else np.asarray(y)[order].tobytes())
    found.update("\n".join(np.array(names, dtype=object)[codes[order]]).encode(errors="surrogatepass"))
    return found.hexdigest()


def fit_curve(model: Any, X: Any, y: Any = None, **options: Any) -> Curve:
    """Compute the trade-off curve between error and parity in one pass over the rows.

    Parameters
    ----------
    model : estimator, torch.nn.Module, str, Path or bytes
        The trained model, as in :class:`ESVDFair`.
    X : array-like, DataFrame, tensor, DataLoader or iterable
        Training rows, as in :meth:`ESVDFair.fit`.
    y : array-like, default=None
        Labels, (rows,).
    **options : dict
        ``sensitive_features``, ``sample_weight``, ``control_features`` and ``validation`` of :meth:`ESVDFair.fit`, and
        parameters of :class:`ESVDFair`, such as ``method``.

    Returns
    -------
    Curve
        At least 20 points, if there are as many candidates. ``curve.select(target_ks=0.1)`` returns a point,
        ``curve.model(point)`` its repaired model, ``curve.to_frame()`` a table.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import fit_curve
    >>> rng = np.random.default_rng(0)
    >>> group = rng.integers(0, 2, 2000)
    >>> X = rng.normal(size=(2000, 5)) + group[:, None] * [0.8, 0, 0, 0, 0]
    >>> y = X.sum(axis=1) + rng.normal(size=2000)
    >>> curve = fit_curve(LinearRegression().fit(X, y), X, y, sensitive_features=group)
    >>> point = curve.select(target_ks=0.1)
    >>> type(curve.model(point)).__name__
    'LinearRegression'
    """
    rows = {name: options.pop(name) for name in COLUMNS if name in options}
    validation, fair = options.pop("validation", None), ESVDFair(model, **options)
    adapter, candidates = fair._candidates(Data(X, y, **rows), validation, scans=True)
    _warn_set_aside(candidates.problem, fair.min_group_rows)
    with few_threads(candidates.problem.layer.weight.shape[1]):
        return fair._evaluate(adapter, candidates)
