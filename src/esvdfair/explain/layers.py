"""How far the groups are apart after every layer of the network, and what an edit of each would reach."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray

from esvdfair.batches import COLUMNS, Data, is_read_once, make_batches
from esvdfair.core import gaps
from esvdfair.core.edits import PAPER_REDUCTIONS, edit_exact
from esvdfair.core.moments import GroupMoments
from esvdfair.curve import CurvePoint
from esvdfair.evaluation import Evaluator, evaluate
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.gather import few_threads
from esvdfair.hidden import Reader, refit_edited
from esvdfair.methods import Candidates, parity, solve_all
from esvdfair.models import adapt
from esvdfair.models.base import LinearLayer
from esvdfair.problem import MIN_GROUP_ROWS, Effort

Array = NDArray[np.float64]
READING = ("missing", "batch_size")


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
    ks, ks_low, ks_high, mse : KS distance, its interval, and mean squared error on validation rows, when this
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
    """All linear layers in the order of execution, and the original model on the same rows.

    Attributes
    ----------
    layers : tuple of LayerGap
    ks_before, mse_before : of the original model
    ks_floor : noise level: the KS distance that chance alone produces at these group sizes
    evaluated_on : "validation", "heldout" or "train"
    error_against : "labels", or "predictions" of the original model when there are no labels
    rows : number of validation rows
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
        """The layer to edit: the most accurate of those whose KS is within the noise level of the lowest.

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
    mean_reduction: float = PAPER_REDUCTIONS[0],
    covariance_reduction: float = PAPER_REDUCTIONS[1],
    output: Any = None,
    random_state: int = 0,
    **options: Any,
) -> LayerScan:
    """Measure the gap after every layer, and what an edit of each layer would reach.

    Hidden layers are edited as by ``ESVDFair(model, method="exact", layer=...)``, the last as by ``method="parity"``.
    The rows are read once for the moments of all layers, and once more for each layer.

    Parameters
    ----------
    model : estimator, torch.nn.Module, str, Path or bytes
        As in :class:`esvdfair.ESVDFair`.
    X : array-like, DataFrame, tensor, DataLoader or iterable
        Rows, as in :meth:`esvdfair.ESVDFair.fit`.
    y : array-like, default=None
        Labels.
    mean_reduction, covariance_reduction : float
        Factors by which the squared gaps shrink.
    output : str, int or callable, default=None
        Which output is the prediction, as in :class:`esvdfair.ESVDFair`.
    random_state : int, default=0
        Random seed.
    **options : dict
        ``sensitive_features``, ``sample_weight``, ``control_features`` and ``validation`` as in
        :meth:`esvdfair.ESVDFair.fit`; ``missing``, ``batch_size``, ``validation_fraction`` and ``effort`` as in
        :class:`esvdfair.ESVDFair`.

    Returns
    -------
    LayerScan
        One `LayerGap` for each layer.

    Raises
    ------
    ValueError
        As :meth:`esvdfair.ESVDFair.fit`; also for a model that predicts one value for everybody.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPRegressor
    >>> from esvdfair.explain import scan_layers
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 500)
    >>> X = rng.normal(size=(500, 2)) + a[:, None] * [1, 0]
    >>> model = MLPRegressor(hidden_layer_sizes=(8,), max_iter=1000, random_state=0).fit(X, X.sum(axis=1))
    >>> len(scan_layers(model, X, sensitive_features=a).to_frame())
    2
    """
    if not isinstance(random_state, int | np.integer):
        raise TypeError(
            f"random_state={random_state!r}; expected an int, so that all layers have the same validation rows."
        )
    if is_read_once(X):
        raise ValueError("X is an iterator, which can be read only once. Pass arrays, a DataLoader, or a function.")
    adapter = adapt(model, output=output)
    columns, reading = ({n: options.pop(n) for n in names if n in options} for names in (COLUMNS, READING))
    validation, effort = options.pop("validation", None), options.pop("effort", None) or Effort()
    batches = make_batches(Data(X, y, **columns), classes=adapter.classes, **reading)
    apart = None if validation is None else make_batches(Data.of(validation), classes=adapter.classes, **reading)
    split: dict[str, Any] = {"seed": int(random_state), "validation_fraction": 0.25, "min_group_rows": MIN_GROUP_ROWS}
    reader = Reader(adapter, batches, apart, effort.rows, split | options)
    layers = reader.layers()
    asked = {"mean_reduction": mean_reduction, "covariance_reduction": covariance_reduction}
    with few_threads(max(layer.weight.shape[1] for layer in layers)):
        return _scan(reader, layers, effort, asked)


def _scan(reader: Reader, layers: Sequence[LinearLayer], effort: Effort, asked: dict[str, float]) -> LayerScan:
    moments, problem = reader.moments_of(layers)
    if problem.evaluated_on == "train":
        reader.split["validation_fraction"] = 0.0  # it has warned already that no rows could be held out
    solve = partial(parity, targets=(problem.error_against,), **asked)  # type: ignore[arg-type]
    refits, _ = solve_all(problem, solve, effort, scans=False)
    candidates = Candidates.of(problem, [fit for fit in refits if fit.strength])
    curve = evaluate(candidates, reader.original, effort=effort)
    hidden = zip(layers[:-1], moments[:-1], strict=True)
    points = [_reached(reader, layer, found, effort, asked) for layer, found in hidden]
    points.append(min(curve.points, key=lambda point: point.mse))
    rows = problem.validation
    before, here = rows.prediction[:, None], Evaluator(rows, len(problem.labels))
    return LayerScan(
        layers=tuple(_gap(*each) for each in zip(layers, moments, points, strict=True)),
        ks_before=float(here.distances(before).max()),
        mse_before=float(here.errors(before)[0]),
        ks_floor=curve.ks_floor,
        evaluated_on=problem.evaluated_on,
        error_against=problem.error_against,
        rows=len(rows),
    )


def _reached(
    reader: Reader, layer: LinearLayer, moments: GroupMoments, effort: Effort, asked: dict[str, float]
) -> CurvePoint | None:
    """What an edited layer and the refit that ``method="exact"`` makes after it reach; None when there is no refit."""
    edit = edit_exact(layer.weight, moments, bias=layer.bias, layer=layer.name, **asked)[-1]
    try:
        edited = reader.read(reader.original.replace({layer.name: (edit.weight_after, edit.bias_after)}))
        fit = refit_edited(edited, "parity", **asked)
        curve = evaluate(Candidates.of(edited, [fit]), reader.original, effort=effort)
    except ValueError as error:
        # The original model ran on these very rows, so this is about the edited one; the other layers still count.
        message = f"after an edit of layer {layer.name!r} there is no refit: {error}"
        warnings.warn(message, ESVDFairWarning, stacklevel=4)
        return None
    return curve.points[0]


def _gap(layer: LinearLayer, moments: GroupMoments, point: CurvePoint | None) -> LayerGap:
    """The gaps after a layer, in its own units and relative to the spread of its outputs; and what an edit reaches."""
    w = layer.weight
    spread = w @ (moments.pooled_scatter() / moments.pooled_weight) @ w.T  # V
    mean_gap, covariance_gap = gaps.squared_mean_gap(w, moments), gaps.squared_covariance_gap(w, moments)
    return LayerGap(
        name=layer.name,
        index=layer.index,
        outputs=w.shape[0],
        inputs=w.shape[1],
        mean_gap=mean_gap,
        covariance_gap=covariance_gap,
        bound=float(np.sum(covariance_sigmas(w, moments) ** 4)),
        relative_mean_gap=mean_gap / (float(np.trace(spread)) or 1.0),
        relative_covariance_gap=covariance_gap / (float(np.sum(spread**2)) or 1.0),
        **{} if point is None else {name: getattr(point, name) for name in ("ks", "ks_low", "ks_high", "mse")},
    )


def covariance_sigmas(weight: Array, moments: GroupMoments) -> Array:
    """(k,) singular values of ``W S_v``, largest first; one zero when the groups' covariances are equal."""
    axes, values = gaps.covariance_spectrum(moments)
    factor = axes * np.sqrt(np.abs(values)) if len(values) else np.zeros((moments.width, 1))
    found: Array = scipy.linalg.svdvals(weight @ factor)
    return found
