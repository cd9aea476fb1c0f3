"""ESVDFair: the scikit-learn estimator around a trained model, and `fit_curve`."""

import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from esvdfair.batches import Batch, Batches, held_out, is_stream, make_batches, row_key
from esvdfair.candidates import TARGETS, LastLayer
from esvdfair.core.checks import count_not_finite, row_count
from esvdfair.core.edits import check_reduction
from esvdfair.distributed import broadcast, together, world_size
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models import adapt
from esvdfair.models.protocol import LinearLayer, ModelAdapter
from esvdfair.repair import (
    FACTORS,
    Repair,
    Setting,
    repair_by_parity,
    repair_by_transport,
    repair_hidden,
    share_curve,
)
from esvdfair.shards import check_model, check_options, number_rows, share_probe
from esvdfair.tradeoff import Curve, CurvePoint

METHODS = ("paper", "exact", "parity", "transport")
PAPER_REDUCTIONS = (15.0, 150.0)
NULL_QUANTILE = 1.5657
"""95 % quantile over mean of the KS distance of two samples of one distribution (1.3581 / 0.8687)."""


class ESVDFair(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is untyped
    """Repair a trained regressor so that its predictions are distributed alike in every sensitive group.

    Edits weights in closed form and gives back the same model. The sensitive attribute is needed by :meth:`fit` only,
    never by :meth:`predict`.

    Parameters
    ----------
    model : torch.nn.Module, scikit-learn MLPRegressor, or path or bytes of an ONNX file
        The trained model; it is never changed. An MLPRegressor may be the last step of a Pipeline, inside a
        TransformedTargetRegressor, or in a FrozenEstimator, which survives cloning in cross-validation. A scikit-learn
        model that is not fitted is fitted on the training rows first.
    method : {"transport", "parity", "exact", "paper"}
        ``transport`` brings the whole distributions of the groups together by refitting the last layer. ``parity``
        does so for means and variances alone, from moments alone. ``exact`` edits a hidden layer, then refits the
        last one under parity. ``paper`` is Algorithm 2 of the paper.
    target_ks : float, optional
        Largest Kolmogorov–Smirnov distance between groups to aim at; the most accurate candidate that meets it on rows
        that did not fit it is taken. Without any target, ``transport`` goes as far as these rows can tell:
        KS ≤ max(0.05, what two samples of one distribution exceed in 5 % of cases).
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
    missing : {"error", "group"}
        Whether a missing attribute value is an error or a group of its own.
    output : str, int or callable, optional
        Which output of a torch model that returns several, or of an ONNX model, is the prediction.
    batch_size : int
        Rows that run through the model at once.
    random_state : int, RandomState or None
        Seeds the held-out split, the bounded samples and the fine-tune.

    Attributes
    ----------
    estimator_ : the repaired model, of the type of ``model``
    edits_ : list of LayerEdit, one for each edit made
    curve_ : Curve, the trade-off between error and parity
    summary_ : dict, what was reached, and on which rows
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
        max_mse_increase: float | None = None,
        mean_reduction: float | None = None,
        covariance_reduction: float | None = None,
        refit: str | None = None,
        layer: int | str | None = None,
        targets: str | Sequence[str] = "auto",
        validation_fraction: float = 0.25,
        missing: str = "error",
        output: Any = None,
        batch_size: int = 8192,
        random_state: Any = 0,
    ) -> None:
        self.model = model
        self.method = method
        self.target_ks = target_ks
        self.max_mse_increase = max_mse_increase
        self.mean_reduction = mean_reduction
        self.covariance_reduction = covariance_reduction
        self.refit = refit
        self.layer = layer
        self.targets = targets
        self.validation_fraction = validation_fraction
        self.missing = missing
        self.output = output
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sensitive_features: Any = None,
        sample_weight: Any = None,
        validation: tuple[Any, ...] | None = None,
    ) -> Self:
        """Repair the model.

        Parameters
        ----------
        X : (rows, features) array, DataFrame or tensor; or a DataLoader, an iterable, or a function that makes one,
            which yields (X, y, sensitive[, weight]) batches
        y : (rows,) labels. Without them the model is repaired towards its own predictions, and every mean squared
            error is measured against those.
        sensitive_features : (rows,) group of each person, or several columns, whose combinations become the groups
        sample_weight : (rows,)
        validation : (X, y, sensitive_features) or a fourth item with weights
            Rows that the model was *not trained on*; a candidate is chosen and judged on them. Without it a fraction
            of X is held out from the repair. Those rows are new to the repair but not to the model, if X is what it was
            trained on: its errors there are then too small. ``summary_["evaluated_on"]`` says which rows judged:
            "validation", "heldout", or "train" when a group has too few rows to hold any out.

        Under an initialised ``torch.distributed`` process group every rank calls this with its own shard of the rows,
        and all get the model of one process on all rows (docs/distributed.md).

        Returns
        -------
        self
        """
        with together():
            self._check_options()
            setting = self._setting(X, y, sensitive_features, sample_weight, validation)
            self._finish(self._repair(setting))
            self._predictor = adapt(self.estimator_, output=self.output)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predictions of the repaired model, (rows,). Takes no sensitive attribute."""
        check_is_fitted(self, "estimator_")
        X = _as_rows(X)
        validate_data(self, X, skip_check_array=True, reset=False)
        return self._predictor.predict(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = False
        tags.target_tags.multi_output = False
        if hasattr(self.model, "__sklearn_tags__"):
            tags.input_tags.sparse = get_tags(self.model).input_tags.sparse
        return tags

    # --- parts of fit ----------------------------------------------------------------------------------------------

    def _setting(
        self, X: Any, y: Any, sensitive_features: Any, sample_weight: Any, validation: tuple[Any, ...] | None
    ) -> Setting:
        """Everything a method starts from; the same on every rank but for the rows."""
        stream = is_stream(X)
        if not stream:
            X = _as_rows(X)
            validate_data(self, X, skip_check_array=True)
        self._check_ranks(validation)
        first_row, rows = number_rows(None if stream else X.shape[0], "X")
        if rows is not None and rows < 2:
            raise ValueError(f"X has n_samples={rows}; parity between groups needs at least two of each.")
        seed = broadcast(self._seed)
        batches = make_batches(
            X, y, sensitive_features, sample_weight,
            missing=self.missing, batch_size=self.batch_size, first_row=first_row,
        )  # fmt: skip
        judged_apart = None if validation is None else self._validation_batches(validation)
        adapter = self._adapter(X, y, sample_weight, seed if validation is None else None, stream)
        probe, has_labels = share_probe(_first_batch(X, batches))
        if stream:
            self.n_features_in_ = int(probe.shape[1])
        self._check_inputs(adapter, X, probe, stream)
        layers = adapter.layers(probe)
        check_model(layers)
        return Setting(
            adapter=adapter,
            layers=layers,
            last=last_layer_of(adapter, layers, probe),
            batches=batches,
            validation=judged_apart,
            split=held_out(self.validation_fraction, seed) if validation is None and self.validation_fraction else None,
            seed=seed,
            has_labels=has_labels,
        )

    def _repair(self, setting: Setting) -> Repair:
        targets = self._targets(setting.has_labels)
        if self.method == "transport":
            return repair_by_transport(setting, targets=targets)
        chosen = self._has_target()
        if self.method == "parity":
            given = self.mean_reduction, self.covariance_reduction
            if not chosen and given == (None, None):
                given = np.inf, np.inf
            return repair_by_parity(setting, targets=targets, mean_reduction=given[0], covariance_reduction=given[1])
        mean, covariance = (
            default if given is None else given
            for default, given in zip(PAPER_REDUCTIONS, (self.mean_reduction, self.covariance_reduction), strict=True)
        )
        factors = FACTORS if chosen else (1.0,)
        return repair_hidden(
            setting,
            method=self.method,
            layer=-2 if self.layer is None else self.layer,
            reductions=[(max(1.0, f * mean), max(1.0, f * covariance)) for f in factors],
            refit="parity" if self.method == "exact" else (self.refit or "sgd"),
        )

    def _finish(self, repair: Repair) -> None:
        """Take a point of the judged curve; the same on every rank."""
        repair = share_curve(repair)
        point = self._choose(repair)
        point, self.edits_, self.summary_ = broadcast(
            lambda: (point, repair.edits(point.index), self._summary(repair, point))
        )
        self.curve_ = repair.curve
        self.estimator_ = repair.curve.model(point.index)

    def _choose(self, repair: Repair) -> CurvePoint:
        curve = repair.curve
        if self.max_mse_increase is not None:
            return self._fairest_within(repair, self.max_mse_increase)
        target = self.target_ks
        if target is None:
            if self.method != "transport":
                return min(curve.points, key=lambda point: point.mse)
            return curve.select(target_ks=max(0.05, NULL_QUANTILE * curve.ks_floor))
        point = curve.select(target_ks=target)
        if target < curve.ks_floor:
            warnings.warn(
                f"target_ks={target:g} is below {curve.ks_floor:.3f}, what two samples of one distribution would "
                "show at these group sizes; no model can be shown to meet it on these rows. More rows in the "
                "smallest group would lower that floor.",
                ESVDFairWarning,
                stacklevel=4,
            )
        elif point.judged_ks > target:
            failing = "meets" if point.ks > target else "can be relied on to keep"
            warnings.warn(
                f"no candidate {failing} target_ks={target:g}; took the fairest, with KS {point.ks:.3f} "
                f"[{point.ks_low:.3f}, {point.ks_high:.3f}] on the {curve.evaluated_on} rows and about "
                f"{point.judged_ks:.3f} to expect on fresh ones. See curve_ for what can be reached.",
                ESVDFairWarning,
                stacklevel=4,
            )
        return point

    def _fairest_within(self, repair: Repair, increase: float) -> CurvePoint:
        before = float(repair.judge.mse(repair.before[:, None])[0])
        within = [point for point in repair.curve.points if point.mse <= before * (1 + increase)]
        if within:
            return min(within, key=lambda point: (point.judged_ks, point.mse))
        point = min(repair.curve.points, key=lambda point: point.mse)
        warnings.warn(
            f"no candidate stays within max_mse_increase={increase:g}; took the most accurate, with mean squared error "
            f"{point.mse:.4g} against {before:.4g} before.",
            ESVDFairWarning,
            stacklevel=5,
        )
        return point

    def _summary(self, repair: Repair, point: CurvePoint) -> dict[str, Any]:
        judge, before, after = repair.judge, repair.before, repair.predictions[:, point.index]
        both = np.column_stack([before, after])
        mse, ks = judge.mse(both), judge.ks(both)
        mean_gap, variance_gap = judge.gaps(both)
        sizes = np.bincount(judge.codes, minlength=len(judge.labels))
        return {
            "method": self.method,
            "target_ks": self.target_ks,
            "met": None if self.target_ks is None else bool(ks[1] <= self.target_ks),
            "mse_before": float(mse[0]),
            "mse_after": float(mse[1]),
            "ks_before": float(ks[0]),
            "ks_after": float(ks[1]),
            "ks_interval": (point.ks_low, point.ks_high),
            "ks_floor": repair.curve.ks_floor,
            "group_sizes": dict(zip(judge.labels, sizes.tolist(), strict=True)),
            "group_mse_before": judge.group_mse(before),
            "group_mse_after": judge.group_mse(after),
            "mean_gap_before": float(mean_gap[0]),
            "mean_gap_after": float(mean_gap[1]),
            "variance_gap_before": float(variance_gap[0]),
            "variance_gap_after": float(variance_gap[1]),
            "evaluated_on": repair.curve.evaluated_on,
            "rows": len(judge.codes),
        }

    # --- inputs ----------------------------------------------------------------------------------------------------

    def _adapter(self, X: Any, y: Any, sample_weight: Any, seed: int | None, stream: bool) -> ModelAdapter:
        """The adapter of the model, which is fitted first when it is a scikit-learn model that is not."""
        try:
            return adapt(self.model, output=self.output)
        except NotFittedError:
            if world_size() > 1:
                raise NotFittedError(
                    f"the {type(self.model).__name__} is not fitted, and each rank would fit another one on its shard; "
                    "fit it first, and give the same to all ranks."
                ) from None
            if stream or y is None:
                raise NotFittedError(
                    f"the {type(self.model).__name__} is not fitted; fit it first, or pass X and y as arrays so that "
                    "it can be fitted here."
                ) from None
        rows = np.arange(X.shape[0])
        keep = np.ones(len(rows), dtype=bool) if seed is None else row_key(rows, seed) >= self.validation_fraction
        chosen = np.flatnonzero(keep)
        part = X.iloc[chosen] if hasattr(X, "iloc") else X[chosen]
        weight = {} if sample_weight is None else {"sample_weight": np.asarray(sample_weight)[chosen]}
        return adapt(clone(self.model).fit(part, np.asarray(y)[chosen], **weight), output=self.output)

    def _validation_batches(self, validation: tuple[Any, ...]) -> Batches:
        if not isinstance(validation, tuple | list) or len(validation) not in (3, 4):
            raise ValueError(
                "validation must be (X, y, sensitive_features) or (X, y, sensitive_features, sample_weight); "
                "y may be None."
            )
        x, y, sensitive, *weight = validation
        x = x if hasattr(x, "shape") or is_stream(x) else np.asarray(x)
        first_row, _ = number_rows(None if is_stream(x) else row_count(x), "validation")
        return make_batches(
            x, y, sensitive, *weight, missing=self.missing, batch_size=self.batch_size, first_row=first_row
        )

    def _check_ranks(self, validation: Any) -> None:
        """That all ranks were given the same options; a batch may be of another size, and a seed is rank 0's."""
        own = ("model", "output", "batch_size", "random_state")
        options = {name: value for name, value in self.get_params(deep=False).items() if name not in own}
        check_options(options | {"validation": "missing" if validation is None else "given"})

    def _check_inputs(self, adapter: ModelAdapter, X: Any, probe: Any, stream: bool) -> None:
        width = adapter.n_features
        if width is not None and getattr(probe, "ndim", 2) == 2 and probe.shape[1] != width:
            raise ValueError(f"X has {probe.shape[1]} features, but the model expects {width} features as input.")
        if stream or type(self.model).__module__.startswith("sklearn") or not hasattr(X, "dtype"):
            return
        if str(X.dtype).startswith(("float", "torch.float")):
            bad = count_not_finite(X)
            if bad:
                raise ValueError(f"X holds {bad} NaN or infinite values; fill them in or drop those rows.")

    def _targets(self, has_labels: bool) -> tuple[str, ...]:
        if isinstance(self.targets, str) and self.targets == "auto":
            return TARGETS if has_labels else TARGETS[1:]
        names = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        unknown = [name for name in names if name not in TARGETS]
        if unknown or not names:
            raise ValueError(f"targets={self.targets!r}; expected 'auto' or some of {TARGETS}.")
        if "labels" in names and not has_labels:
            raise ValueError("targets holds 'labels', but there is no y; pass y, or targets='predictions'.")
        return names

    def _has_target(self) -> bool:
        return self.target_ks is not None or self.max_mse_increase is not None

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _check_options(self) -> None:
        """Options that are wrong, or that contradict each other."""
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}; expected one of {METHODS}.")
        if self.missing not in ("error", "group"):
            raise ValueError(f"missing={self.missing!r}; expected 'error' or 'group'.")
        if self.refit not in (None, "sgd", "ols"):
            raise ValueError(f"refit={self.refit!r}; expected 'sgd' or 'ols'.")
        if self.refit is not None and self.method != "paper":
            raise ValueError(
                f"refit={self.refit!r} belongs to method='paper'; method={self.method!r} has its own refit."
            )
        if self.layer is not None and self.method in ("parity", "transport"):
            raise ValueError(
                f"layer={self.layer!r} with method={self.method!r}, which edits the last layer alone; leave layer out, "
                "or use method='exact' or 'paper'."
            )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction!r}; expected a number from 0 to below 1.")
        if self.target_ks is not None and not 0 <= self.target_ks <= 1:
            raise ValueError(f"target_ks={self.target_ks!r}; a KS distance lies between 0 and 1.")
        if self.max_mse_increase is not None and not self.max_mse_increase >= 0:
            raise ValueError(f"max_mse_increase={self.max_mse_increase!r}; expected a number that is not negative.")
        if self.target_ks is not None and self.max_mse_increase is not None:
            raise ValueError("target_ks and max_mse_increase each choose a point on the curve; give one of them.")
        reductions = {"mean_reduction": self.mean_reduction, "covariance_reduction": self.covariance_reduction}
        given = [name for name, value in reductions.items() if value is not None]
        if given and self._has_target():
            raise ValueError(f"{' and '.join(given)} fix the point, and a target chooses it; give one or the other.")
        if given and self.method == "transport":
            raise ValueError(f"{' and '.join(given)} belong to the other methods; transport takes target_ks.")
        for value in reductions.values():
            if value is not None:
                check_reduction(value)


def fit_curve(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any = None,
    sample_weight: Any = None,
    validation: tuple[Any, ...] | None = None,
    **options: Any,
) -> Curve:
    """The trade-off curve between error and parity: 20 points or more from one pass over the rows.

    Parameters
    ----------
    model, X, y, sensitive_features, sample_weight, validation : as in :class:`ESVDFair` and its ``fit``
    **options : further options of :class:`ESVDFair`, such as ``method`` and ``random_state``

    Returns
    -------
    Curve
        ``curve.select(target_ks=0.1)`` gives a point, ``curve.model(point)`` the repaired model of it,
        ``curve.to_frame()`` a table.
    """
    if "max_mse_increase" not in options and "target_ks" not in options:
        options["max_mse_increase"] = np.inf  # a scan, whichever point it ends on
    fair = ESVDFair(model, **options)
    fair.fit(X, y, sensitive_features=sensitive_features, sample_weight=sample_weight, validation=validation)
    return fair.curve_


def last_layer_of(adapter: ModelAdapter, layers: tuple[LinearLayer, ...], probe: Any) -> LastLayer:
    """The last linear layer of a regressor and the head after it; ValueError when it has several outputs."""
    last = layers[-1]
    if last.weight.shape[0] != 1:
        raise ValueError(
            f"the last linear layer {last.name!r} has {last.weight.shape[0]} outputs; esvdfair repairs a regressor "
            "with one output."
        )
    bias = None if last.bias is None else float(last.bias[0])
    return LastLayer(last.name, last.weight[0], bias, adapter.head(probe))


def _as_rows(X: Any) -> Any:
    """X as it is when it has rows of its own kind, else as an array; a single row is refused."""
    if hasattr(X, "tocsr"):
        X = X.tocsr()  # of the sparse formats, one whose rows can be taken
    X = X if hasattr(X, "shape") else np.asarray(X)
    if len(X.shape) < 2:
        raise ValueError(
            f"Expected 2D array, got an array of shape {tuple(X.shape)} instead. Reshape your data: X.reshape(-1, 1) "
            "if it has one feature, X.reshape(1, -1) if it is one row."
        )
    return X


def _is_one_shot(X: Any) -> bool:
    return is_stream(X) and not callable(X) and iter(X) is X


def _first_batch(X: Any, batches: Batches) -> Batch | None:
    if _is_one_shot(X):
        raise ValueError(
            "X is an iterator, which can be read only once. Pass arrays, a DataLoader, or a function that makes the "
            "iterator."
        )
    return next(iter(batches), None)
