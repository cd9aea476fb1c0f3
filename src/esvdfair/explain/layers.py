"""Layer scan: how far the groups are apart after every linear layer, and what an edit there would reach."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray

from esvdfair.batches import Batches, Splitter, held_out, is_stream, make_batches
from esvdfair.core import gaps
from esvdfair.core.edits import edit_exact
from esvdfair.core.moments import GroupMoments
from esvdfair.estimator import PAPER_REDUCTIONS, ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models import adapt
from esvdfair.models.base import LinearLayer, ModelAdapter
from esvdfair.repair import EXACT_RIDGE

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LayerGap:
    """One linear layer ``Z = X Wᵀ + b``: the gap after it, and what an edit of it would reach.

    Attributes
    ----------
    name, index : how the model calls it, and its position in the order of execution
    outputs, inputs : shape (m, n) of W
    mean_gap : ``d_e² = Σ ‖d_gh Wᵀ‖²``
    covariance_gap : ``d_v² = Σ ‖W M_gh Wᵀ‖_F²``
    bound : ``Σσ⁴ ≥ d_v²``, what a covariance edit shrinks
    relative_mean_gap : ``d_e² / tr V`` with V the covariance of Z over all rows: comparable between layers
    relative_covariance_gap : ``d_v² / ‖V‖_F²``
    ks, ks_low, ks_high, mse : KS distance, its interval, and mean squared error on rows that did not fit, when this
        layer is edited and the last one refitted under parity; for the last layer, the refit alone. None when
        there is no refit, because the edit leaves a network that predicts one value for everybody.
    """

    name: str
    index: int
    outputs: int
    inputs: int
    mean_gap: float
    covariance_gap: float
    bound: float
    relative_mean_gap: float
    relative_covariance_gap: float
    ks: float | None = None
    ks_low: float | None = None
    ks_high: float | None = None
    mse: float | None = None


@dataclass(frozen=True)
class LayerScan:
    """All linear layers in the order of execution, and the untouched model on the same rows.

    Attributes
    ----------
    layers : tuple of LayerGap
    ks_before, mse_before : of the untouched model
    ks_floor : what two samples of one distribution would show at these group sizes
    evaluated_on : "validation", "heldout" or "train"
    error_against : "labels", or "predictions" of the untouched model when there are no labels
    rows : number of rows that judged
    """

    layers: tuple[LayerGap, ...]
    ks_before: float
    mse_before: float
    ks_floor: float
    evaluated_on: str
    error_against: str
    rows: int

    @property
    def best(self) -> LayerGap:
        """The layer to edit: the most accurate of those whose KS is within the sampling floor of the lowest.

        It compares the one point that the reductions reach in each layer, not their whole trade-off curves.
        """
        reached = [(layer.ks, layer.mse, layer) for layer in self.layers if layer.ks is not None]
        lowest = min(ks for ks, _, _ in reached)
        return min((mse, ks, layer.index, layer) for ks, mse, layer in reached if ks <= lowest + self.ks_floor)[-1]

    def to_frame(self) -> pd.DataFrame:
        """One row for each layer."""
        return pd.DataFrame([asdict(layer) for layer in self.layers])


def scan_layers(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any = None,
    sample_weight: Any = None,
    validation: tuple[Any, ...] | None = None,
    mean_reduction: float = PAPER_REDUCTIONS[0],
    covariance_reduction: float = PAPER_REDUCTIONS[1],
    output: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
    random_state: int = 0,
) -> LayerScan:
    """Which layer carries the gap, and which is the one to edit.

    Every hidden layer is edited as ``ESVDFair(model, method="exact", layer=...)`` does, the last as ``"parity"`` does.
    One pass over the rows gathers the moments of all layers, one more for each layer tells what its edit reaches.

    Parameters
    ----------
    model : torch.nn.Module, fitted MLPRegressor (also in a Pipeline), or path or bytes of an ONNX file
    X, y, sensitive_features, sample_weight, validation : as in :meth:`esvdfair.ESVDFair.fit`
    mean_reduction, covariance_reduction : how many times smaller an edit makes the squared gaps
    output, missing, batch_size, random_state : as in :class:`esvdfair.ESVDFair`

    Raises
    ------
    ValueError
        As :meth:`esvdfair.ESVDFair.fit`; also for a model that predicts one value for everybody.
    """
    if not isinstance(random_state, int | np.integer):
        raise TypeError(f"random_state={random_state!r}; every layer must be judged on the same rows, so give an int.")
    adapter = adapt(model, output=output)
    batches = make_batches(X, y, sensitive_features, sample_weight, missing=missing, batch_size=batch_size)
    has_labels = y is not None if not is_stream(X) else getattr(next(iter(batches), None), "y", None) is not None
    beside = {"sensitive_features": sensitive_features, "sample_weight": sample_weight, "validation": validation}
    options: dict[str, Any] = {
        "output": output,
        "missing": missing,
        "batch_size": batch_size,
        "random_state": random_state,
    }
    reductions: dict[str, Any] = {"mean_reduction": mean_reduction, "covariance_reduction": covariance_reduction}
    target = "labels" if has_labels else "predictions"
    refitted = ESVDFair(model, method="parity", targets=target, **reductions, **options).fit(X, y, **beside)
    summary = refitted.summary_
    judged_on = summary["evaluated_on"]
    if judged_on == "train":
        options["validation_fraction"] = 0.0  # it has warned already that no rows could be held out
    if not has_labels:
        X, y, beside["validation"] = _towards_predictions(adapter, X, validation)
    split = held_out(refitted.validation_fraction, random_state) if judged_on == "heldout" else None
    layers = adapter.layers(next(iter(batches)).x)
    moments = layer_moments(adapter, batches, layers, split)
    found = [measure_gap(layer, moments[layer.name]) for layer in layers]
    for layer in layers[:-1]:
        edit = edit_exact(layer.weight, moments[layer.name], bias=layer.bias, layer=layer.name, **reductions)[-1]
        edited = adapter.replace({layer.name: (edit.weight_after, edit.bias_after)}).model
        fair = ESVDFair(edited, method="parity", targets="labels", **reductions, **options)
        found[layer.index] = _with_reach(found[layer.index], fair, X, y, beside)
    low, high = summary["ks_interval"]
    found[-1] = replace(found[-1], ks=summary["ks_after"], ks_low=low, ks_high=high, mse=summary["mse_after"])
    return LayerScan(
        layers=tuple(found),
        ks_before=summary["ks_before"],
        mse_before=summary["mse_before"],
        ks_floor=summary["ks_floor"],
        evaluated_on=judged_on,
        error_against=target,
        rows=summary["rows"],
    )


def layer_moments(
    adapter: ModelAdapter, batches: Batches, layers: Sequence[LinearLayer], split: Splitter | None = None
) -> dict[str, GroupMoments]:
    """Moments of the inputs of several layers from one pass, over the rows that ``split`` does not hold out."""
    moments = {layer.name: GroupMoments() for layer in layers}
    for batch in batches:
        inputs, _ = adapter.capture(batch.x, list(moments))
        weight = batch.weight
        if split is not None:
            keep = ~split(batch.row_id)
            weight = keep.astype(np.float64) if weight is None else weight * keep
        for name, value in inputs.items():
            moments[name].update_codes(value, batch.labels, batch.codes, weight)
    return {name: found.all_reduce() for name, found in moments.items()}


def measure_gap(layer: LinearLayer, moments: GroupMoments) -> LayerGap:
    """The gaps after a layer, in its own units and relative to the spread of its outputs."""
    w = layer.weight
    spread = w @ (moments.pooled_scatter() / moments.counts.sum()) @ w.T  # V
    mean_gap, covariance_gap = gaps.mean_gap(w, moments), gaps.covariance_gap(w, moments)
    return LayerGap(
        name=layer.name,
        index=layer.index,
        outputs=w.shape[0],
        inputs=w.shape[1],
        mean_gap=mean_gap,
        covariance_gap=covariance_gap,
        bound=float(np.sum(scipy.linalg.svdvals(w @ covariance_factor(moments)) ** 4)),
        relative_mean_gap=_ratio(mean_gap, float(np.trace(spread))),
        relative_covariance_gap=_ratio(covariance_gap, float(np.sum(spread**2))),
    )


def covariance_factor(moments: GroupMoments) -> Array:
    """(n, q) S_v, with one column of zeros when the groups' covariances are equal."""
    axes, magnitude = gaps.covariance_axes(moments)
    return axes * np.sqrt(magnitude) if len(magnitude) else np.zeros((moments.width, 1))


def _ratio(value: float, scale: float) -> float:
    return value / scale if scale > 0 else 0.0


def _with_reach(gap: LayerGap, fair: ESVDFair, X: Any, y: Any, beside: dict[str, Any]) -> LayerGap:
    """Adds what an edited model reaches after the refit of its last layer that ``method="exact"`` makes."""
    try:
        fair.fit(X, y, **beside)
    except ValueError as error:
        # The untouched model ran on these very rows, so this is about the edited one; the other layers still tell.
        warnings.warn(f"after an edit of layer {gap.name!r} there is no refit: {error}", ESVDFairWarning, stacklevel=3)
        return gap
    point = next(point for point in fair.curve_.points if point.ridge == EXACT_RIDGE)
    return replace(gap, ks=point.ks, ks_low=point.ks_low, ks_high=point.ks_high, mse=point.mse)


def _towards_predictions(adapter: ModelAdapter, X: Any, validation: tuple[Any, ...] | None) -> tuple[Any, Any, Any]:
    """Rows whose labels are the untouched model's own predictions."""
    if validation is not None:
        validation = (validation[0], adapter.predict(validation[0]), *validation[2:])
    if not is_stream(X):
        return X, adapter.predict(X), validation

    def stream() -> Any:
        for x, _, *rest in X() if callable(X) else X:
            yield x, adapter.predict(x), *rest

    return stream, None, validation
