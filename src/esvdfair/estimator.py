"""ESVDFair: the scikit-learn estimator around a trained model, and `fit_curve`."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from esvdfair import methods
from esvdfair.batches import COLUMNS, Batch, Data, Digest, Rows, as_rows, check_apart, held_out, inputs_of, is_stream
from esvdfair.core.checks import label_text, row_count, take, to_numpy
from esvdfair.core.edits import PAPER_REDUCTIONS, check_reduction
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit
from esvdfair.curve import Curve, CurvePoint, choose, judge, summarise
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.methods import Candidates
from esvdfair.models import adapt
from esvdfair.models.base import ModelAdapter
from esvdfair.sample import (
    MIN_GROUP_ROWS,
    Effort,
    Sample,
    Setting,
    draw,
    draw_judging,
    few_threads,
    notice_missing_bias,
    prepare,
)

METHODS = ("paper", "exact", "parity", "transport")


class ESVDFair(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Repair a trained regressor so that its predictions are distributed alike in every sensitive group.

    Edits weights in closed form and gives back the same model. The sensitive attribute is needed by :meth:`fit` only,
    never by :meth:`predict`.

    Parameters
    ----------
    model : torch.nn.Module, scikit-learn MLPRegressor, tree ensemble, or path or bytes of an ONNX file
        The trained model; it is never changed. Tree ensembles are those of scikit-learn, LightGBM, XGBoost and
        CatBoost. An MLPRegressor or a tree ensemble may be the last step of a Pipeline, inside a
        TransformedTargetRegressor, or in a FrozenEstimator, which survives cloning in cross-validation. A scikit-learn
        model that is not fitted is fitted on the training rows first.
    method : {"transport", "parity", "exact", "paper"}
        ``transport`` brings the whole distributions of the groups together by refitting the last layer. ``parity``
        does so for means and variances alone, from moments alone. ``exact`` edits a hidden layer, then refits the
        last one under parity. ``paper`` is Algorithm 2 of the paper.
    target_ks : float, optional
        Largest Kolmogorov–Smirnov distance between groups to aim at, *in the population*: the most accurate candidate
        whose estimated distance meets it is taken, the model as given if it does already. Without any target,
        ``transport`` aims at 0.05, or at the smallest distance that these rows can tell from parity.
    confidence : float in (0, 1), optional
        Take only what is certified to keep ``target_ks``: at 0.9, at most one in ten samples of rows that judge would
        certify a model that does not. They should be new to the model. Where nothing can be certified the fairest is
        taken, with a warning that tells how many rows it would need.
    certificate : {"normal", "hoeffding"}
        The bound behind it: of the normal approximation, or one that holds at every sample size and needs about three
        times as many rows.
    max_mse_increase : float, optional
        Instead of ``target_ks``: the fairest candidate whose mean squared error is at most this part above the
        untouched model's (0.05: five per cent).
    mean_reduction, covariance_reduction : float ≥ 1 or inf, optional
        How many times smaller the squared gaps become, for ``paper`` and ``exact`` (default 15 and 150) and ``parity``
        (default inf). Not together with a target.
    refit : {"sgd", "ols"}, optional
        How ``paper`` refits the last layer: the paper's fine-tune (default), or the least squares of its Algorithm 2.
    layer : int or str, optional
        Which linear layer ``paper`` and ``exact`` edit, by index or dotted name; default -2, the last hidden one.
    targets : "auto", or some of ("labels", "predictions", "optimum")
        What the refit may aim at, compared on rows that did not fit; "auto" takes all that the data allow.
    validation_fraction : float
        Part of the rows that is held out to choose among candidates, when ``fit`` gets no ``validation``.
    min_group_rows : int, default 30
        Groups with fewer training rows, or fewer validation rows, are set aside: not compared and not constrained, but
        their rows count in the error. A warning and ``summary_["groups_set_aside"]`` name them. 2 compares every
        group.
    missing : {"error", "group"}
        Whether a missing attribute value is an error or a group of its own.
    output : str, int or callable, optional
        Which output of a torch model that returns several, or of an ONNX model, is the prediction.
    batch_size : int
        Rows that run through the model at once.
    effort : Effort, optional
        How hard to try; ``Effort.quick()`` compares a few candidates instead of some hundred.
    random_state : int, RandomState or None
        Seeds the held-out split, the bounded samples and the fine-tune.

    Attributes
    ----------
    estimator_ : the repaired model, of the type of ``model``
    model_ : the untouched model that was repaired: ``model``, or what it became when it had to be fitted first
    edits_ : list of LayerEdit, one for each edit made; none where the model as given was chosen
    curve_ : Curve, the trade-off between error and parity
    point_ : CurvePoint, the point of it that was chosen
    summary_ : dict, what was reached, on which rows, and whether errors are against labels or the model's predictions
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPRegressor
    >>> from esvdfair import ESVDFair, ks_distance
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 2000)
    >>> X = rng.normal(size=(2000, 5)) + a[:, None] * [0.8, 0, 0, 0, 0]
    >>> y = X.sum(axis=1) + rng.normal(size=2000)
    >>> model = MLPRegressor(hidden_layer_sizes=(32,), max_iter=300, random_state=0).fit(X, y)
    >>> fair = ESVDFair(model, target_ks=0.1).fit(X, y, sensitive_features=a)
    >>> ks_distance(fair.predict(X), sensitive_features=a) < ks_distance(model.predict(X), sensitive_features=a)
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
        X : (rows, features) array, DataFrame or tensor; for a model with several inputs a tuple, a list or a mapping of
            them; or a DataLoader, an iterable, or a function that makes one, which yields
            (X, y, sensitive[, weight[, control]]) batches
        y : (rows,) labels. Without them the model is repaired towards its own predictions, and every mean squared
            error is measured against those.
        sensitive_features : (rows,) group of each person, or several columns, whose combinations become the groups
        sample_weight : (rows,)
        control_features : (rows,) or several columns, optional
            What people may rightly differ in (job, region, hours): gaps are then *adjusted*, that is, groups are
            compared as if each had the same mix of these strata (docs/method.md 2.8). The error keeps plain weights.
        validation : (X, y, sensitive_features[, sample_weight[, control_features]]); or what yields such batches
            Rows that the model was *not trained on*; a candidate is chosen and judged on them. Without it a fraction
            of X is held out from the repair. Those rows are new to the repair but not to the model, if X is what it was
            trained on: its errors there are then too small. ``summary_["evaluated_on"]`` says which rows judged:
            "validation", "heldout", or "train" when a group has too few rows to hold any out.

        Returns
        -------
        self
        """
        data = Data(X, y, sensitive_features, sample_weight, control_features)
        check_options(self)
        setting = self._prepare(data, validation)
        with few_threads(setting.width):
            candidates = self._candidates(setting)
            _warn_set_aside(candidates.sample, self.min_group_rows)
            curve = self._judge(setting, candidates)
            point = self._choose(curve)
            if candidates.redo is not None and point.target != methods.UNTOUCHED:
                candidates = candidates.redo(candidates.fits[curve.candidates[point]])
                curve, point = _replaced(curve, point, self._judge(setting, candidates))
            take_point(self, candidates, curve, point)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predictions of the repaired model, (rows,). Takes no sensitive attribute.

        Of a DataLoader, or whatever else yields X, (X,), (X, y) or batches as for :meth:`fit`, those of all its rows,
        in the order in which they come.
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
    ) -> dict[str, Any]:
        """What ``summary_`` says, of rows that neither fitted nor chose, which alone are impartial; X as in `fit`.

        ``met`` and ``certified`` are decided anew, on these rows; ``evaluated_on`` is "test".
        """
        check_is_fitted(self, "estimator_")
        data = Data(X, y, sensitive_features, sample_weight, control_features)
        setting = self._setting(adapt(self.model_, output=self.output), data, validation_fraction=0.0)
        layer = setting.last
        rows, labels, aside = draw_judging(setting)
        after = draw_judging(replace(setting, adapter=self._predictor))[0].prediction
        against = "labels" if setting.has_labels else "predictions"
        none = Rows.none(layer.weight.shape[1])
        sample = Sample(labels, GroupMoments(), layer, setting.head, none, rows, "test", against, set_aside=aside)
        refit = self.curve_.refit if hasattr(self, "curve_") else None
        fits, plain = (Fit(layer.weight[0], 0.0),), () if refit is None else (refit,)
        curve = self._judge(setting, Candidates(sample, fits, after[:, None], np.zeros((0, 1)), plain=plain))
        asked: dict[str, Any] = {"method": self.method, "target_ks": self.target_ks}
        found = summarise(sample, after, curve, curve.points[0], **asked)
        return found | {"decided_by": self.summary_["decided_by"]}

    def judged(self, rows: Batch) -> NDArray[np.bool_] | None:
        """Which of these rows judged the repair: known where they are the rows of ``fit``, or those that judged it.

        None where they are others, or the same in another order, or where only a part of them was kept to judge.
        """
        digest, seed = getattr(self, "_judged_of", (b"", 0))
        unlabelled = self.summary_["error_against"] == "predictions"
        if Digest().add(replace(rows, y=None) if unlabelled else rows).value != digest:
            return None
        out = np.ones(len(rows.codes), dtype=bool)
        if self.summary_["evaluated_on"] == "heldout":
            out = held_out(self.validation_fraction, seed)(rows.row_id)
        counted = out if rows.weight is None else out & (rows.weight > 0)
        return out if np.count_nonzero(counted) == self.summary_["rows"] else None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = False
        tags.target_tags.multi_output = False
        if hasattr(self.model, "__sklearn_tags__"):
            tags.input_tags.sparse = get_tags(self.model).input_tags.sparse
        return tags

    # --- the steps of fit ------------------------------------------------------------------------------------------

    def _prepare(self, data: Data, validation: Any) -> Setting:
        """The model and the rows, checked."""
        data = data if data.is_stream else replace(data, X=self._rows(data.X, reset=True))
        if not data.is_stream and row_count(data.X) < 2:
            raise ValueError(f"X has n_samples={row_count(data.X)}; parity between groups needs at least two of each.")
        seed = self.seed()
        setting = self._setting(
            lambda: self._adapter(data, None if validation is not None else seed),
            data,
            validation=validation,
            validation_fraction=self.validation_fraction,
            seed=seed,
            classes=self._classes(data.y),
        )
        check_apart(setting.batches, setting.validation, self.confidence)
        if data.is_stream and hasattr(setting.probe, "shape"):
            self.n_features_in_ = int(setting.probe.shape[1])
        self.model_ = setting.adapter.model
        return setting

    def _setting(self, adapter: Any, data: Data, **options: Any) -> Setting:
        known = {name: getattr(self, name) for name in ("missing", "batch_size", "effort", "min_group_rows")}
        return prepare(adapter, data, **known, **options)

    def _candidates(self, setting: Setting) -> Candidates:
        """What the method has to offer: of the last layer alone, after one pass, or after edits of a hidden one."""
        if self.method in ("paper", "exact"):
            return self._edited(setting)
        if self.method not in ("parity", "transport"):
            raise NotImplementedError(f"method {self.method!r} is in METHODS, but ESVDFair does not implement it.")
        targets, given = self._targets(setting.has_labels), [self.mean_reduction, self.covariance_reduction]
        if self.method == "parity" and not self._has_target() and given == [None, None]:
            given = [np.inf, np.inf]
        if given != [None, None]:
            if self.targets == "auto":
                # Where the reductions say how fair to be, a target that is fair already adds nothing (docs/method.md).
                targets = tuple(name for name in targets if name != "optimum")
            setting = replace(setting, moments_alone=setting.head.is_affine and "optimum" not in targets)
        sample = draw(setting)
        # Rows that certify may not even choose a regularisation.
        fitting = sample if self.confidence is None else replace(sample, judging=sample.training)
        if self.method == "transport":
            solve = methods.transport(targets, setting.effort)
        else:
            solve = methods.parity(targets, setting.effort, mean_reduction=given[0], covariance_reduction=given[1])
        fits, crossed = methods.solve_all(fitting, solve, setting.effort, scans=given == [None, None])
        return Candidates.of(sample, [*fits, methods.untouched(sample.layer)], crossed)

    def _edited(self, setting: Setting) -> Candidates:
        refit = "parity" if self.method == "exact" else (self.refit or "sgd")
        layer = -2 if self.layer is None else self.layer
        setting = replace(setting, moments_alone=setting.head.is_affine and refit != "sgd")
        hidden = methods.HiddenEdit(setting, method=self.method, layer=layer, refit=refit)
        given = self.mean_reduction, self.covariance_reduction
        mean, covariance = (d if g is None else g for d, g in zip(PAPER_REDUCTIONS, given, strict=True))
        factors = setting.effort.factors if self._has_target() else (1.0,)
        reductions = [(max(1.0, f * mean), max(1.0, f * covariance)) for f in factors]
        return hidden.candidates(reductions, beside=[methods.untouched(setting.last)])

    def _judge(self, setting: Setting, candidates: Candidates) -> Curve:
        return judge(
            candidates,
            setting.adapter,
            effort=setting.effort,
            seed=setting.seed,
            confidence=self.confidence,
            certificate=self.certificate,
        )

    def _choose(self, curve: Curve) -> CurvePoint:
        return choose(
            curve,
            target_ks=self.target_ks,
            max_mse_increase=self.max_mse_increase,
            closest=self.method == "transport",
        )

    # --- inputs ----------------------------------------------------------------------------------------------------

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

    def _adapter(self, data: Data, seed: int | None) -> ModelAdapter:
        """The adapter of the model, which is fitted first when it is a scikit-learn model that is not."""
        try:
            adapter = adapt(self.model, output=self.output)
            if adapter.trees and seed is not None:
                _warn_trees()
            return adapter
        except NotFittedError:
            if data.is_stream or data.y is None:
                raise NotFittedError(
                    f"the {type(self.model).__name__} is not fitted; fit it first, or pass X and y as arrays so that "
                    "it can be fitted here."
                ) from None
        rows = np.arange(row_count(data.X))
        chosen = rows if seed is None else rows[~held_out(self.validation_fraction, seed)(rows)]
        weight = None if data.sample_weight is None else to_numpy(data.sample_weight)[chosen]
        from esvdfair.models.sklearn import fit_model

        model = fit_model(self.model, take(data.X, chosen), to_numpy(data.y)[chosen], weight)
        return adapt(model, output=self.output)

    def _classes(self, y: Any) -> Any:
        """The two classes that a scikit-learn classifier tells apart, or will when it is fitted; else None."""
        if not (hasattr(self.model, "__sklearn_tags__") and is_classifier(self.model)):
            return None
        classes = getattr(self.model, "classes_", None)
        classes = np.unique(to_numpy(y)) if classes is None and y is not None else classes
        return classes if classes is not None and len(classes) == 2 else None

    def _targets(self, has_labels: bool) -> tuple[str, ...]:
        if isinstance(self.targets, str) and self.targets == "auto":
            return methods.TARGETS if has_labels else methods.TARGETS[1:]
        names = (self.targets,) if isinstance(self.targets, str | int | float) else tuple(self.targets)
        unknown = [name for name in names if name not in methods.TARGETS]
        if unknown or not names:
            raise ValueError(f"targets={self.targets!r}; expected 'auto' or some of {methods.TARGETS}.")
        if "labels" in names and not has_labels:
            raise ValueError("targets holds 'labels', but there is no y; pass y, or targets='predictions'.")
        return names

    def _has_target(self) -> bool:
        return self.target_ks is not None or self.max_mse_increase is not None

    def seed(self) -> int:
        """A whole number from ``random_state``; another each time where that is a generator."""
        state = self.random_state
        if isinstance(state, int | np.integer):
            return int(state)
        return int(check_random_state(state).randint(2**31 - 1))


def _warn_set_aside(sample: Sample, least: int) -> None:
    """Name the groups that are too small to be compared."""
    if not sample.set_aside:
        return
    names = [f"{label_text(label)} ({rows} rows)" for label, rows in sample.set_aside.items()]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    count = "1 group is" if len(names) == 1 else f"{len(names)} groups are"
    needed = "" if sample.judged_on == "train" else " in the training data, and as many in the validation data"
    warnings.warn(
        ESVDFairWarning(
            f"{count} too small to compare and set aside: {', '.join(names[:10])}{more}. Their rows count in the error "
            f"only; a group needs `min_group_rows={least}` rows{needed}."
        ),
        stacklevel=3,
    )


def _warn_trees() -> None:
    warnings.warn(
        ESVDFairWarning(
            "Trees fit their training rows closely, so errors and KS distances on those rows are too small. Pass rows "
            "that the trees were not trained on as `validation=(X, y, sensitive_features)`."
        ),
        stacklevel=8,
    )


def take_point(fair: ESVDFair, candidates: Candidates, curve: Curve, point: CurvePoint) -> None:
    """Let a point of the curve, one of the candidates, be what ``fair`` has come to."""
    sample, chosen = candidates.sample, curve.candidates[point]
    fit = candidates.fits[chosen]
    fair.curve_, fair.point_ = curve, point
    fair._judged_of = sample.judging.kept_of, sample.seed
    fair._predictor = curve.adapter.replace(curve.weights[point.index])
    fair.estimator_ = fair._predictor.model
    notice_missing_bias(sample, candidates.judging[:, chosen])
    fair.edits_ = [] if fit.target == methods.UNTOUCHED else methods.account_for(sample, fit)
    asked: dict[str, Any] = {
        "method": fair.method,
        "target_ks": fair.target_ks,
        "max_mse_increase": fair.max_mse_increase,
    }
    fair.summary_ = summarise(sample, candidates.judging[:, chosen], curve, point, **asked)


def _replaced(curve: Curve, point: CurvePoint, again: Curve) -> tuple[Curve, CurvePoint]:
    """The curve with a point that was done and judged again, on all rows."""
    i, certified = point.index, again.points[0].ks_certified
    if certified is not None and point.ks_certified is not None:
        certified = max(certified, point.ks_certified)  # as it was the bound of this one that let it be chosen
    point = replace(again.points[0], index=i, ks_certified=certified)

    def put(old: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
        return (*old[:i], new, *old[i + 1 :])

    return replace(
        curve,
        points=put(curve.points, point),
        weights=put(curve.weights, again.weights[0]),
        candidates=put(curve.candidates, 0),
        mse_refit=again.mse_refit,
        refit=again.refit,
    ), point


CHOICES = {
    "method": METHODS,
    "missing": ("error", "group"),
    "refit": (None, "sgd", "ols"),
    "certificate": ("normal", "hoeffding"),
}
"""Values of the options that have a few."""
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "target_ks": (lambda value: 0 <= value <= 1, "a KS distance lies between 0 and 1"),
    "max_mse_increase": (lambda value: value >= 0, "expected a number that is not negative"),
    "confidence": (lambda value: 0 < value < 1, "expected a number between 0 and 1, such as 0.9"),
    "validation_fraction": (lambda value: 0 <= value < 1, "expected a number from 0 to below 1"),
    "min_group_rows": (
        lambda value: value >= 2 and not isinstance(value, float),
        "expected a whole number of at least 2",
    ),
    "batch_size": (lambda value: value >= 1 and not isinstance(value, float), "expected a whole number of at least 1"),
}
"""What the options that are numbers must be."""


def check_options(fair: ESVDFair) -> None:
    """Raise ValueError for options that are wrong, or that contradict each other."""
    if isinstance(fair.model, type):
        raise TypeError(f"model is the class {fair.model.__name__}; pass an object of it.")
    if fair.effort is not None and not isinstance(fair.effort, Effort):
        raise TypeError(f"effort={fair.effort!r}; expected an esvdfair.Effort, such as Effort.quick().")
    for name, choices in CHOICES.items():
        if (value := getattr(fair, name)) not in choices:
            allowed = " or ".join(repr(choice) for choice in choices if choice is not None)
            raise InputError(f"`{name}={value!r}`; expected {allowed}.")
    for name, (right, expected) in RANGES.items():
        value = getattr(fair, name)
        number = isinstance(value, Real) and not isinstance(value, bool)
        absent = value is None and name not in ("validation_fraction", "batch_size", "min_group_rows")
        if not absent and not (number and right(value)):
            words = expected if number else "expected a number"
            raise InputError(f"`{name}={value!r}`; {words}.")
    state: Any = fair.random_state
    if isinstance(state, bool) or (isinstance(state, int | np.integer) and state < 0):
        raise InputError(f"`random_state={state}`; expected a whole number of at least 0, a RandomState or None.")
    if fair.refit is not None and fair.method != "paper":
        raise InputError(f"`refit={fair.refit!r}` requires `method='paper'`; got `method={fair.method!r}`.")
    if fair.layer is not None and fair.method in ("parity", "transport"):
        raise InputError(
            f"`layer={fair.layer!r}` was given, but `method={fair.method!r}` edits the last layer alone. Leave the "
            "layer out, or use the method 'exact' or 'paper'."
        )
    if fair.target_ks is not None and fair.max_mse_increase is not None:
        raise InputError(
            f"`target_ks={fair.target_ks}` and `max_mse_increase={fair.max_mse_increase}` each choose a point on the "
            "curve. Give one of them."
        )
    has_target = fair.target_ks is not None or fair.max_mse_increase is not None
    if fair.confidence is not None and not has_target:
        raise InputError(f"`confidence={fair.confidence}` requires `target_ks`.")
    reductions = [name for name in ("mean_reduction", "covariance_reduction") if getattr(fair, name) is not None]
    if reductions and has_target:
        raise ValueError(f"{' and '.join(reductions)} fix the point, and a target chooses it; give one or the other.")
    if reductions and fair.method == "transport":
        raise ValueError(f"{' and '.join(reductions)} belong to the other methods; transport takes target_ks.")
    for name in reductions:
        if isinstance(getattr(fair, name), bool) or not isinstance(getattr(fair, name), Real):
            raise InputError(f"`{name}={getattr(fair, name)!r}`; expected a number of at least 1, or inf.")
        check_reduction(getattr(fair, name))


def fit_curve(model: Any, X: Any, y: Any = None, **options: Any) -> Curve:
    """The trade-off curve between error and parity: 20 points or more from one pass over the rows.

    Parameters
    ----------
    model, X, y : as in :class:`ESVDFair` and its ``fit``
    **options : ``sensitive_features``, ``sample_weight``, ``control_features``, ``validation`` as ``fit`` takes them;
        others as :class:`ESVDFair` does, such as ``method`` and ``random_state``

    Returns
    -------
    Curve
        ``curve.select(target_ks=0.1)`` gives a point, ``curve.model(point)`` the repaired model of it,
        ``curve.to_frame()`` a table.
    """
    rows = {name: options.pop(name) for name in (*COLUMNS, "validation") if name in options}
    if "max_mse_increase" not in options and "target_ks" not in options:
        options["max_mse_increase"] = np.inf  # a scan, whichever point it ends on
    curve: Curve = ESVDFair(model, **options).fit(X, y, **rows).curve_
    return curve
