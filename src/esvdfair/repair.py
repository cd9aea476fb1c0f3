"""The four methods, each from a model and batches of rows to a judged trade-off curve."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from esvdfair.batches import Batch, Batches, Splitter
from esvdfair.candidates import RIDGES, STRENGTHS, Candidate, LastLayer, Refits
from esvdfair.core.checks import Label
from esvdfair.core.edits import LayerEdit, account, edit_exact, edit_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.parity import ParityProblem
from esvdfair.core.refit.quadratic import Quadratic
from esvdfair.core.refit.sgd import finetune
from esvdfair.distributed import broadcast
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models.protocol import LinearLayer, ModelAdapter, find_layer
from esvdfair.passes import Pass, Rows, collect_rows
from esvdfair.tradeoff import Curve, Judge, Judged, Weights, make_curve

Array = NDArray[np.float64]

MIN_GROUP_ROWS = 5
"""A group needs so many rows on both sides of the split; otherwise all rows fit and all rows judge."""

FACTORS = tuple(float(f) for f in np.geomspace(0.03, 100.0, 12))
"""Common factors on both reductions that `paper` and `exact` scan for a target."""

EXACT_RIDGE = 1e-4
"""Ridge of the parity-keeping refit of `exact`; without one, features of condition 1e11 let the error explode."""

MEAN_PENALTIES = (0.0, 0.1, 0.5, 2.0, 8.0, 32.0, 128.0, float("inf"))
VARIANCE_REDUCTIONS = (1.0, 4.0, float("inf"))


@dataclass(frozen=True)
class Setting:
    """What every method starts from."""

    adapter: ModelAdapter
    layers: tuple[LinearLayer, ...]
    last: LastLayer
    batches: Batches
    validation: Batches | None
    split: Splitter | None
    seed: int
    has_labels: bool


@dataclass(frozen=True)
class Builder:
    """Makes the model of a point: a copy of the original with other weights."""

    adapter: ModelAdapter

    def __call__(self, weights: Weights) -> Any:
        return self.adapter.replace(weights).model


@dataclass(frozen=True)
class Repair:
    """A judged curve, the untouched model on the same rows, and how to account for the edits of a point."""

    curve: Curve
    judge: Judge
    before: Array
    predictions: Array
    edits: Callable[[int], list[LayerEdit]]


@dataclass(frozen=True)
class Gathered:
    """One pass over the rows, with the rows that judge told from those that fit."""

    seen: Pass
    training: Rows
    judging: Rows
    judged_on: str

    @property
    def n_groups(self) -> int:
        return len(self.seen.labels)


def gather(setting: Setting, adapter: ModelAdapter, inner: LinearLayer | None = None) -> Gathered:
    """Run the model over the training rows, and over the validation rows when there are any."""
    layer = find_layer(setting.layers, -1)
    if setting.validation is not None:
        seen = collect_rows(adapter, setting.batches, layer, split=None, seed=setting.seed, inner=inner)
        judging = collect_judging(adapter, setting.validation, layer, labels=seen.labels, seed=setting.seed)
        return Gathered(seen, seen.training, judging, "validation")
    seen = collect_rows(adapter, setting.batches, layer, split=setting.split, seed=setting.seed, inner=inner)
    enough = [
        len(rows) and len(rows.group_rows) == len(seen.labels) and rows.group_rows.min() >= MIN_GROUP_ROWS
        for rows in (seen.training, seen.heldout)
    ]
    if all(enough):
        return Gathered(seen, seen.training, seen.heldout, "heldout")
    if setting.split is not None:
        warnings.warn(
            "a group has too few rows to hold some of them out, so all rows fit and the same rows judge: expect the "
            "repaired model to do worse on new people. Pass validation=, or more rows.",
            ESVDFairWarning,
            stacklevel=2,
        )
        seen = collect_rows(adapter, setting.batches, layer, split=None, seed=setting.seed, inner=inner)
    return Gathered(seen, seen.training, seen.training, "train")


def collect_judging(
    adapter: ModelAdapter, validation: Batches, layer: LinearLayer, *, labels: tuple[Label, ...], seed: int
) -> Rows:
    """Run the model over rows that judge; their groups must be those of the rows that fit, ``labels``."""
    seen = collect_rows(adapter, validation, layer, split=_everything, seed=seed)
    return _relabel(seen.heldout, seen.labels, labels)


def share_curve(repair: Repair) -> Repair:
    """The repair with the curve of rank 0, on every rank.

    Transport has several minima, and on unlike hardware the last bits of a sum may choose among them.
    """
    curve = repair.curve
    points, floor, weights = broadcast(lambda: (curve.points, curve.ks_floor, curve.weights))
    return replace(repair, curve=replace(curve, points=points, ks_floor=floor, weights=weights))


def repair_by_transport(
    setting: Setting,
    *,
    targets: Sequence[str],
    ridges: Sequence[float] = RIDGES,
    strengths: Sequence[float] = STRENGTHS,
) -> Repair:
    """The last layer along transport paths (DESIGN 2.4, 2.6): one pass over the rows."""
    rows = gather(setting, setting.adapter)
    refits = _refits(setting, rows)
    return _last_layer_repair(setting, rows, refits.transport(targets, ridges, strengths))


def repair_by_parity(
    setting: Setting, *, targets: Sequence[str], mean_reduction: float | None, covariance_reduction: float | None
) -> Repair:
    """The last layer with equal group means and variances (DESIGN 2.3): one pass over the rows.

    With both reductions None, a grid of mean penalties and variance reductions.
    """
    rows = gather(setting, setting.adapter)
    return refit_by_parity(
        setting, rows, targets=targets, mean_reduction=mean_reduction, covariance_reduction=covariance_reduction
    )


def refit_by_parity(
    setting: Setting,
    rows: Gathered,
    *,
    targets: Sequence[str],
    mean_reduction: float | None,
    covariance_reduction: float | None,
) -> Repair:
    """As :func:`repair_by_parity` after its pass.

    The refit needs the moments alone, so there may be no training rows at hand; only the labels before a curved head
    cannot be a target then.
    """
    refits = _refits(setting, rows)
    if mean_reduction is None and covariance_reduction is None:
        candidates = refits.parity(targets, RIDGES, MEAN_PENALTIES, VARIANCE_REDUCTIONS)
    else:
        candidates = [
            _parity_at(quadratic, name, mean_reduction or 1.0, covariance_reduction or 1.0)
            for target in targets
            for name, quadratic in refits.quadratics(target, RIDGES)
        ]
    return _last_layer_repair(setting, rows, candidates)


def repair_hidden(
    setting: Setting,
    *,
    method: str,
    layer: int | str,
    reductions: Sequence[tuple[float | None, float | None]],
    refit: str,
) -> Repair:
    """`paper` and `exact`: edit a hidden layer, then refit the last one on the features that the edit leaves.

    One pass for the moments of the layer, and one for each pair of reductions.
    """
    inner = find_layer(setting.layers, layer)
    if inner.index == setting.layers[-1].index:
        raise ValueError(
            f"layer {layer!r} is the output layer; method={method!r} edits a hidden layer and then refits the output "
            "layer. Choose an earlier one, or method='parity' or 'transport', which edit the output layer alone."
        )
    if not setting.has_labels:
        setting = replace(setting, batches=_Predicted(setting.batches, setting.adapter))
    rows = gather(setting, setting.adapter, inner)
    edit = edit_paper if method == "paper" else edit_exact
    weights: list[Weights] = []
    edits: list[list[LayerEdit]] = []
    columns: list[tuple[Array, Array]] = []
    candidates: list[Candidate] = []
    for mean, covariance in reductions:
        solve = partial(
            edit,
            inner.weight,
            rows.seen.inner_moments,
            mean_reduction=mean,
            covariance_reduction=covariance,
            bias=inner.bias,
            layer=inner.name,
        )
        steps = list(broadcast(solve))  # all ranks run the very same edited layer
        after = (steps[-1].weight_after, steps[-1].bias_after) if steps else (inner.weight, inner.bias)
        edited = gather(setting, setting.adapter.replace({inner.name: after}))
        candidate = _refit_last(setting, edited, refit, mean or 1.0, covariance or 1.0)
        candidate = replace(candidate, strength=float(mean or 1.0))
        candidates.append(candidate)
        weights.append({inner.name: after, **last_weights(setting.last, candidate)})
        edits.append([*steps, last_edit(setting.last, candidate, edited.seen.moments)])
        columns.append(
            (_predict(setting.last, candidate, edited.judging), _predict(setting.last, candidate, edited.training))
        )
    judging, training = (np.column_stack(c) for c in zip(*columns, strict=True))
    judged = _judged(rows, judging, training)
    curve, order = make_curve(judged, candidates, weights, Builder(setting.adapter), setting.seed)
    return Repair(curve, judged.judge, rows.judging.prediction, judging[:, order], lambda i: edits[order[i]])


# --- the last layer ------------------------------------------------------------------------------------------------


def _refits(setting: Setting, rows: Gathered) -> Refits:
    prediction = (rows.training if len(rows.training) else rows.judging).prediction
    if np.ptp(prediction) <= 1e-12 * max(np.abs(prediction).max(), 1e-300):
        raise ValueError(
            f"the model predicts {prediction[0]:.6g} for every row; it is alike for all groups already and there is "
            "nothing to repair. Check the model and X."
        )
    return Refits(setting.last, rows.seen.moments, rows.training, rows.judging, rows.n_groups)


def _last_layer_repair(setting: Setting, rows: Gathered, candidates: list[Candidate]) -> Repair:
    last = setting.last
    stacked = np.array([c.weight for c in candidates]).T, np.array([c.bias for c in candidates])
    judging, training = (last.head.apply(_outputs(part, *stacked)) for part in (rows.judging, rows.training))
    weights = [last_weights(last, candidate) for candidate in candidates]
    judged = _judged(rows, judging, training)
    curve, order = make_curve(judged, candidates, weights, Builder(setting.adapter), setting.seed)
    moments = rows.seen.moments
    return Repair(
        curve,
        judged.judge,
        rows.judging.prediction,
        judging[:, order],
        lambda i: [last_edit(last, candidates[order[i]], moments)],
    )


def _refit_last(setting: Setting, rows: Gathered, refit: str, mean: float, covariance: float) -> Candidate:
    """The output layer after a hidden layer was edited."""
    refits = _refits(setting, rows)
    name, quadratic = next(refits.quadratics("labels", [EXACT_RIDGE if refit == "parity" else 0.0]))
    if refit == "parity":
        return _parity_at(quadratic, name, mean, covariance)
    if refit == "ols":
        weight, bias = quadratic.layer(quadratic.minimiser)
        return Candidate(weight, bias, name, 0.0, 0.0, True)
    last, training = setting.last, rows.training
    assert training.y is not None
    fit = finetune(
        training.features,
        last.head.inverse(training.y) if last.head.is_affine else refits.head_aware_outputs,
        weight=last.weight,
        bias=last.bias or 0.0,
        sample_weight=training.weight,
        random_state=setting.seed,
    )
    return Candidate(fit.weight, fit.bias, name, 0.0, 0.0, fit.converged)


def _parity_at(quadratic: Quadratic, name: str, mean_reduction: float, covariance_reduction: float) -> Candidate:
    """The parity refit whose squared mean and variance gaps are the original's divided by the reductions."""
    unpenalised = ParityProblem(quadratic, 0.0)
    budget = unpenalised.budget(np.sqrt(covariance_reduction))  # the covariance gap d_v² is the variance gap squared
    allowed = unpenalised.gaps(quadratic.coordinates(quadratic.original))[0] / np.sqrt(mean_reduction)
    if allowed == 0.0:
        fit = ParityProblem(quadratic, np.inf).solve(budget)
    else:
        fit = unpenalised.solve(budget)
        if fit.mean_gap > allowed:
            fit = ParityProblem(quadratic, _mean_penalty(quadratic, budget, fit.mean_gap, allowed)).solve(budget)
    return Candidate(fit.weight, fit.bias, name, quadratic.ridge, mean_reduction, fit.converged)


def _mean_penalty(quadratic: Quadratic, budget: float, gap: float, allowed: float) -> float:
    """λ_e at which the mean gap, ``gap`` without a penalty, is ``allowed``; every trial costs an eigenproblem.

    With one direction and no variance budget ``gap/(1 + λ_e s²)`` is exact, s the whitened gap: the search starts there
    and doubles its steps. A gap that no penalty within e^±40 of it closes is rounding, and infinity closes it.
    """

    @cache
    def excess(log_penalty: float) -> float:
        left = ParityProblem(quadratic, np.exp(log_penalty)).solve(budget).mean_gap
        return float(np.log(max(left / allowed, 1e-100)))

    whitened = float(np.sum((quadratic.space.mean_gaps * quadratic.scale) ** 2))
    start = float(np.log((gap / allowed - 1) / whitened))
    towards = 1.0 if excess(start) > 0 else -1.0
    near, step = start, 0.5
    while (excess(near + towards * step) > 0) == (towards > 0):
        near, step = near + towards * step, 2 * step
        if step > 40:
            return np.inf
    low, high = sorted((near, near + towards * step))
    return float(np.exp(brentq(excess, low, high, xtol=1e-6)))


def last_weights(last: LastLayer, candidate: Candidate) -> Weights:
    """What a candidate puts in place of the last layer."""
    return {last.name: (candidate.weight[None, :], None if last.bias is None else np.array([candidate.bias]))}


def last_edit(last: LastLayer, candidate: Candidate, moments: GroupMoments) -> LayerEdit:
    """The account of what a candidate changes."""
    return account(
        last.weight[None, :],
        candidate.weight[None, :],
        moments.columns(slice(0, len(last.weight))),
        bias_before=None if last.bias is None else np.array([last.bias]),
        bias_after=None if last.bias is None else np.array([candidate.bias]),
        multiplier=candidate.strength,
        converged=candidate.converged,
        layer=last.name,
    )


def _predict(last: LastLayer, candidate: Candidate, rows: Rows) -> Array:
    return last.head.apply(_outputs(rows, candidate.weight, candidate.bias))


def _outputs(rows: Rows, weight: Array, bias: Array | float) -> Array:
    """(n,) or (n, k) ``h w + b`` in float64, a block at a time: a float64 copy of all features would be large."""
    output = np.empty((len(rows), *weight.shape[1:]))
    for start in range(0, len(rows), 8192):
        block = slice(start, start + 8192)
        output[block] = rows.features[block].astype(np.float64) @ weight + bias
    return output


# --- rows ----------------------------------------------------------------------------------------------------------


def _everything(row_id: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.ones(len(row_id), dtype=bool)


def _judged(rows: Gathered, judging: Array, training: Array) -> Judged:
    fitted = None if rows.judged_on == "train" else _judge_rows(rows.training, rows.seen.labels)
    return Judged(judging, training, _judge_rows(rows.judging, rows.seen.labels), fitted, rows.judged_on)


def _judge_rows(rows: Rows, labels: tuple[Label, ...]) -> Judge:
    return Judge(rows.prediction if rows.y is None else rows.y, rows.codes, rows.weight, labels)


def _relabel(rows: Rows, labels: tuple[Label, ...], known: tuple[Label, ...]) -> Rows:
    """Codes of validation rows in terms of the groups of the training rows."""
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise ValueError(f"validation has the groups {unknown}, which the training rows do not have: {list(known)}.")
    absent = [label for label in known if label not in labels]
    if absent:
        raise ValueError(f"validation has no rows of the groups {absent}; it must hold every group to judge parity.")
    position = np.array([known.index(label) for label in labels], dtype=np.intp)
    return replace(rows, codes=position[rows.codes])


class _Predicted:
    """Batches whose labels are the untouched model's own predictions, for when there are none."""

    def __init__(self, batches: Any, adapter: ModelAdapter) -> None:
        self._batches, self._adapter = batches, adapter

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield replace(batch, y=self._adapter.predict(batch.x).astype(np.float64))
