"""Summary -> Problem -> candidates: training and validation rows, and refits of the last layer to choose from.

A refit of the last layer needs to know what to aim at (the labels, the model's own predictions, or the best that any
attribute-unaware predictor could do), how close to stay to the original weights, and how hard to press for parity.
None of them can be known beforehand, so all combinations are solved and rows that did not fit them choose.

``paper`` and ``exact``, which edit a hidden layer first, are in :mod:`esvdfair.hidden`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize
from scipy.special import expit, softmax
from sklearn.exceptions import ConvergenceWarning

from esvdfair.batches import Rows, row_key
from esvdfair.core.checks import Label, sort_key
from esvdfair.core.edits import LayerEdit
from esvdfair.core.ks import Groups, adjusted_weights, ks_between
from esvdfair.core.moments import GroupMoments
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.parity import ParityProblem
from esvdfair.core.quadratic import FeatureSpace, Fit, Head, Quadratic, blocks, unit_factors
from esvdfair.core.transport import TransportProblem, transport_path
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import LinearLayer, Weights
from esvdfair.summary import KEPT_ROWS, Summary

Array = NDArray[np.float64]

UNTOUCHED = "untouched"
"""``target`` of the model as it was given, which is a candidate like the others."""

TARGETS = ("labels", "predictions", "optimum")

LARGEST_NEWTON = 2048
"""Up to so many coefficients P(group | features) is found by Newton's method, whose Hessian has as many columns."""

FAINT = 1e-3
"""Principal axes with less than this part of a feature's variance say nothing about the group."""

FOLDS = 4
"""Of the training rows, to learn how much a refit over-fits them."""

FEW = 3
"""Every third strength is cross-fitted; the others lie between."""

MANY_ROWS = 40
"""Rows of the smallest group for each feature from which a refit hardly over-fits."""

MIN_GROUP_ROWS = 30
"""Groups with fewer training rows, or fewer validation rows, are set aside: not compared, not constrained."""

FEWEST_ROWS = 5
"""A smaller `min_group_rows` sets nobody aside whom the split leaves with too few rows: then no row is held out."""

SHIFT_COST = 0.02
"""Part of the error that a missing bias may cost without a warning."""


@dataclass(frozen=True)
class Effort:
    """Search budget: which candidates are compared, and on how many rows.

    Attributes
    ----------
    ridges : ρ of every refit, relative to the features' mean variance
    strengths : λ_w of transport, ascending
    levels : α of the optimum that transport may aim at, as parts of the untouched model's KS distance
    mean_penalties, variance_reductions : the grid that parity scans for a target
    factors : common factors on both reductions, which paper and exact scan for a target
    regularisations : inverse strengths among which the estimate of P(group | features) is chosen
    rows : rows that are kept, at most, weighted to represent all of their group; of all others the moments
    transport_rows : rows of each group that transport couples (the quadratic sees all rows)
    scanned_bytes : bound on the inputs that paper and exact keep to scan their factors on
    points : fewest points of a curve, if there are as many candidates
    resamples : of every interval of a KS distance
    """

    ridges: tuple[float, ...] = (1e-6, 1e-3)
    strengths: tuple[float, ...] = (0.0, *np.geomspace(0.03, 1e3, 20).tolist())
    levels: tuple[float, ...] = (0.03, 0.07, 0.12, 0.2, 0.32, 0.5)
    mean_penalties: tuple[float, ...] = (0.0, 0.1, 0.5, 2.0, 8.0, 32.0, 128.0, np.inf)
    variance_reductions: tuple[float, ...] = (1.0, 4.0, np.inf)
    factors: tuple[float, ...] = tuple(np.geomspace(0.03, 100.0, 12).tolist())
    regularisations: tuple[float, ...] = (1e-2, 1e-1)
    rows: int = KEPT_ROWS
    transport_rows: int = 5_000
    scanned_bytes: int = 2**30
    points: int = 20
    resamples: int = 1000

    @classmethod
    def quick(cls) -> "Effort":
        """A few candidates instead of some hundred: for tests and first looks."""
        return cls(
            ridges=(1e-4,),
            strengths=(0.0, 0.3, 3.0, 30.0, 300.0),
            levels=(0.1, 0.3),
            mean_penalties=(0.0, 2.0, np.inf),
            variance_reductions=(1.0, np.inf),
            factors=(0.1, 1.0, 10.0),
            regularisations=(0.01,),
            resamples=200,
        )


# --- training and validation rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What is solved: training and validation rows of the groups that are compared.

    Attributes
    ----------
    labels : the groups that are compared, sorted
    moments : of ``[h, y]`` over the training rows, h the inputs of the last layer; the pooled ones are of all rows
    layer, head : the last layer, and what maps its output to the prediction
    training, judging : training and validation rows, the same when no row could be held out
    judged_on : "validation", "heldout", "train" or "test"
    error_against : "labels", or "predictions" of the original model
    sizes : (G,) training rows of each group
    seed : of the split that holds rows out
    set_aside : groups too small to be compared, with their rows; their codes follow those of ``labels``
    complete : whether all validation rows were kept
    """

    labels: tuple[Label, ...]
    moments: GroupMoments
    layer: LinearLayer
    head: Head
    training: Rows
    judging: Rows
    judged_on: str
    error_against: str
    sizes: tuple[int, ...] = ()
    seed: int = 0
    set_aside: Mapping[Label, int] = field(default_factory=dict)
    complete: bool = True


def make_problem(
    summary: Summary,
    validation: Summary | None = None,
    *,
    seed: int = 0,
    validation_fraction: float = 0.25,
    min_group_rows: int = MIN_GROUP_ROWS,
    warns: bool = True,
) -> Problem:
    """Divide the rows of a summary into training and validation rows; with ``validation``, its rows validate.

    Rows that were not kept always train. ``warns`` of predictions that do not fit the labels.
    """
    if summary.output is None or (validation is not None and validation.output is None):
        raise ValueError("there are no rows to fit on: the data is empty, or an iterator that was read before.")
    assert summary.kept.id is not None
    if validation is None and validation_fraction:
        out = row_key(summary.kept.id, seed) < validation_fraction
        held = Counter({g: int(n) for g, n in zip(summary.groups, _sizes(summary, out), strict=True)})
        fits = Counter(summary.group_rows)
        fits.subtract(held)
        groups, everybody = _large(fits, held, least=min_group_rows), Counter(summary.group_rows)
        all_compared = min_group_rows >= FEWEST_ROWS or len(groups) == len(_large(everybody, least=min_group_rows))
        if len(groups) >= 2 and all_compared:
            return _problem(summary, summary, out, groups, fits, "heldout", seed, warns)
        check_enough(everybody, _large(everybody, least=min_group_rows), min_group_rows)
        warnings.warn(
            f"Too few rows to hold some out (`min_group_rows={min_group_rows}`), so all rows are used both to fit and "
            "to choose. Expect worse results on new data; pass `validation`, or more rows.",
            ESVDFairWarning,
            stacklevel=3,
        )
    fits, nobody = Counter(summary.group_rows), np.zeros(len(summary.kept), dtype=bool)
    if validation is None:
        groups = _large(fits, least=min_group_rows)
        check_enough(fits, groups, min_group_rows)
        return _problem(summary, None, nobody, groups, fits, "train", seed, warns)
    apart = Counter(validation.group_rows)
    groups = _large(fits, apart, least=min_group_rows)
    check_enough(fits + apart, groups, min_group_rows)
    return _problem(summary, validation, nobody, groups, fits, "validation", seed, warns)


def _sizes(summary: Summary, chosen: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.bincount(summary.kept.codes[chosen], minlength=len(summary.groups))


def _large(*counts: Counter[Label], least: int) -> tuple[Label, ...]:
    """The groups that have at least so many rows in all of the counts, sorted."""
    return tuple(sorted((g for g in counts[0] if min(each[g] for each in counts) >= least), key=sort_key))


def _problem(
    summary: Summary,
    validation: Summary | None,
    out: NDArray[np.bool_],
    judged: tuple[Label, ...],
    fits: Counter[Label],
    judged_on: str,
    seed: int,
    warns: bool,
) -> Problem:
    assert summary.output is not None
    everybody = Counter(summary.group_rows)
    if validation is not None and validation is not summary:
        everybody += Counter(validation.group_rows)
    others = tuple(sorted(set(everybody) - set(judged), key=sort_key))
    # Weights of the rows that train and of those that do not, by group.
    own = np.bincount(summary.kept.codes[out], summary.kept.weight[out], minlength=len(summary.groups))
    kept = summary.kept
    training = select_rows(summary, ~out, (*judged, *others), len(judged), seed, totals=summary.mass.sum(axis=1) - own)
    judging = training
    if validation is summary:
        judging = select_rows(summary, out, (*judged, *others), len(judged), seed, totals=summary.mass.sum(axis=1))
    elif validation is not None:
        every = np.ones(len(validation.kept), dtype=bool)
        totals = validation.mass.sum(axis=1)
        judging = select_rows(validation, every, (*judged, *others), len(judged), seed, totals=totals)
    moments = GroupMoments().merge(summary.rest)
    order = np.flatnonzero(~out)
    order = order[np.lexsort((row_key(kept.id[order], seed + 1), kept.codes[order]))]  # type: ignore[index]
    for block in blocks(len(order), 8192):
        i = order[block]
        moments.update_codes(kept.features[i], summary.groups, kept.codes[i], kept.weight[i], beside=kept.y[i])
    if training.adjusted is not None:
        moments = _moments_of(training, judged, pooled=False)[0].with_pooled(moments)
    else:
        moments = moments.only(judged)
    if warns and summary.labelled:
        _notice_labels(training, summary.output.head)
    return Problem(
        labels=judged,
        moments=moments,
        layer=summary.output.layer,
        head=summary.output.head,
        training=training,
        judging=judging,
        judged_on=judged_on,
        error_against="labels" if summary.labelled else "predictions",
        sizes=tuple(fits[label] for label in judged),
        seed=seed,
        set_aside={label: everybody[label] for label in others},
        complete=(validation or summary).complete,
    )


def select_rows(
    summary: Summary, chosen: NDArray[np.bool_], labels: Sequence[Label], count: int, seed: int, *, totals: Array
) -> Rows:
    """Some of the kept rows, group by group in random order, with codes that are positions in ``labels``.

    Where not all rows are kept, weights are scaled so that each group has its ``totals`` (of ``summary.groups``). The
    first ``count`` labels are compared: where there are strata, their rows get adjusted weights.
    """
    kept, index = summary.kept, np.flatnonzero(chosen)
    place = np.array([labels.index(label) for label in summary.groups], dtype=np.intp)
    codes = place[kept.codes[index]]
    assert kept.id is not None
    order = np.lexsort((row_key(kept.id[index], seed + 1), codes))
    index, codes = index[order], codes[order]
    rows = replace(kept, strata=None).take(index)
    rows = replace(rows, codes=codes)
    if not summary.complete:
        own = np.bincount(kept.codes[index], rows.weight, minlength=len(totals))
        rows = replace(rows, weight=rows.weight * (totals / np.where(own > 0, own, 1.0))[kept.codes[index]])
    if not summary.adjusted:
        return rows
    assert kept.strata is not None
    strata, weight, compared = kept.strata[index], np.zeros(len(codes)), codes < count
    weight[compared] = adjusted_weights(codes[compared], count, strata[compared], rows.weight[compared])
    return replace(rows, adjusted=weight, strata=strata)


def all_rows(summary: Summary, min_group_rows: int) -> tuple[Rows, tuple[Label, ...], dict[Label, int]]:
    """All kept rows, the groups that are compared, and those set aside with their rows."""
    counts = Counter(summary.group_rows)
    judged = _large(counts, least=min_group_rows)
    check_enough(counts, judged, min_group_rows)
    others = tuple(sorted(set(counts) - set(judged), key=sort_key))
    every, totals = np.ones(len(summary.kept), dtype=bool), summary.mass.sum(axis=1)
    rows = select_rows(summary, every, (*judged, *others), len(judged), 0, totals=totals)
    return rows, judged, {label: counts[label] for label in others}


def check_enough(rows: Counter[Label], judged: Sequence[Label], least: int) -> None:
    """Raise unless two groups or more are compared."""
    if len(judged) >= 2:
        return
    found = ", ".join(f"{label!r}: {count}" for label, count in sorted(rows.items(), key=lambda item: -item[1])[:6])
    if len(rows) < 2:
        raise InputError(f"`sensitive_features` contains one group, {found}; parity needs at least two.")
    raise InputError(
        f"`min_group_rows={least}` rows in the training data and in the validation data leave fewer than two groups to "
        f"compare ({found}). Pass more rows, merge groups, or lower it."
    )


def _notice_labels(rows: Rows, head: Head) -> None:
    """Warn when labels are 0 and 1 and predictions look like logits, or are worse than the mean of the labels."""
    y, p, total = rows.y, rows.prediction, rows.weight.sum()
    if not total > 0:
        return
    if head.is_affine and set(np.unique(y)) == {0.0, 1.0} and np.mean((expit(p) - y) ** 2) < np.mean((p - y) ** 2):
        words = (
            f"The labels are 0 and 1, and the predictions look like logits (from {p.min():.3g} to {p.max():.3g}), so "
            "errors against the labels have no meaning. Repair the score with `output='sigmoid'`."
        )
        warnings.warn(words, ESVDFairWarning, stacklevel=4)
        return
    mean, other = (float(rows.weight @ values / total) for values in (y, p))
    spread, wide, error = (float(rows.weight @ d**2 / total) ** 0.5 for d in (y - mean, p - other, y - p))
    if error > spread:
        words = (
            f"The model predicts the labels worse than a constant: they have mean {mean:.3g} and standard deviation "
            f"{spread:.3g}, the predictions {other:.3g} and {wide:.3g}. Check that `y` is in the units of the "
            "predictions."
        )
        warnings.warn(words, ESVDFairWarning, stacklevel=4)


def notice_missing_bias(problem: Problem, prediction: Array) -> None:
    """Warn when a shift of all repaired predictions would lower the error, and the last layer has no bias for it.

    ``prediction`` are those of ``problem.judging``. Of n rows a shift takes 1/n of the error by chance.
    """
    rows = problem.judging
    if problem.layer.bias is not None or problem.error_against != "labels" or not len(rows):
        return
    share = rows.weight / rows.weight.sum()
    shift, before = (float(share @ (rows.y - values)) for values in (prediction, rows.prediction))
    rest = float(share @ (rows.y - prediction - shift) ** 2)
    if shift**2 > max(SHIFT_COST, 9 * float(share @ share)) * rest and abs(shift) > abs(before):
        warnings.warn(
            ESVDFairWarning(
                f"The last layer {problem.layer.name!r} has no bias, so the repaired predictions are off by "
                f"{-shift:+.3g} on average, which increases the mean squared error by {shift**2 / rest:.0%}. Add "
                f"{shift:+.3g} to the predictions, or give the layer a bias."
            ),
            stacklevel=2,
        )


# --- what there is to choose from ---------------------------------------------------------------------------------


def outputs(head: Head, rows: Rows, fits: Sequence[Fit]) -> Array:
    """(n, k) what the fits predict, column by column in memory; what the untouched model does is known."""
    known = [fit.target == UNTOUCHED for fit in fits]
    if all(known):
        return np.repeat(rows.prediction[:, None], len(fits), axis=1)
    weight, bias = np.array([fit.weight for fit in fits]), np.array([fit.bias for fit in fits])
    output = _outputs(rows.features, weight, bias, head.apply)
    output[:, known] = rows.prediction[:, None]
    return output


def _outputs(features: NDArray[Any], weight: Array, bias: Array, after: Callable[[Array], Array]) -> Array:
    """(n, k) of layers ``weight`` (k, p) and ``bias`` (k,), with ``after``, which takes (k, rows), applied to them."""
    output = np.empty((len(bias), len(features)))
    live = np.flatnonzero(features.any(axis=0))  # of a ReLU network half of the units may be dead
    weight = weight[:, live]
    for block in blocks(len(features)):
        output[:, block] = after(weight @ features[block, live].astype(np.float64).T + bias[:, None])
    return output.T


@dataclass(frozen=True)
class Candidates:
    """Fits to choose from, and what they predict.

    Attributes
    ----------
    sample : what they were made from
    fits : k of them
    judging, training : (n, k) their predictions for the validation rows, and for the training rows
    cross_fitted : some of them, fitted again without one fold of the training rows after the other, and what they
        predict for the rows of that fold (n, some of k); None where that would change nothing
    plain : refits of the last layer without parity, which tell what a refit alone would bring
    """

    sample: Problem
    fits: tuple[Fit, ...]
    judging: Array
    training: Array
    cross_fitted: "CrossFitted | None" = None
    plain: tuple[Fit, ...] = ()

    @classmethod
    def of(cls, sample: Problem, fits: Sequence[Fit], cross_fitted: "CrossFitted | None" = None) -> "Candidates":
        """Fits of the last layer alone."""
        judging = outputs(sample.head, sample.judging, fits)
        same = sample.training is sample.judging
        training = judging if same else outputs(sample.head, sample.training, fits)
        plain = tuple(fit for fit in fits if fit.diagnostics.get("plain"))
        return cls(sample, tuple(fits), judging, training, cross_fitted, plain)


@dataclass(frozen=True)
class CrossFitted:
    """Fits made without a fold of the training rows, and their predictions (n, k) for the rows of that fold."""

    fits: tuple[Fit, ...]
    predictions: Array


def untouched(layer: LinearLayer) -> Fit:
    """The last layer as it was given, which is a candidate like the others."""
    return Fit(layer.weight[0], 0.0 if layer.bias is None else float(layer.bias[0]), target=UNTOUCHED)


# --- the last layer alone ------------------------------------------------------------------------------------------


Solve = Callable[["Refits", bool], list[Fit]]
"""The candidates of some refits: all of them, or every few, which is enough to learn how much they over-fit."""


def transport(targets: Sequence[str], effort: Effort) -> Solve:
    """The transport path of every target and ridge (docs/method.md 2.4, 2.6)."""

    def solve(refits: Refits, few: bool) -> list[Fit]:
        strengths = effort.strengths
        # The optimum's targets are as fair as their level, and transport only cleans up: a few small strengths will do.
        # The model's own predictions win where labels over-fit; a coarser path finds that out.
        path = {
            "labels": strengths[:: FEW if few else 1],
            "predictions": strengths[:: FEW if few else 2 if "labels" in targets else 1],
            "optimum": strengths[: max(len(strengths) // 2, 1) : 2 * FEW if few else 3],
        }
        return [
            replace(fit, target=name, diagnostics={"plain": name == "labels" and not fit.strength})
            for target in targets
            for name, quadratic in refits.quadratics(target, _ridges(effort, target, targets, few=few))
            for fit in transport_path(refits.problem, quadratic, strengths=path[target])
        ]

    return solve


def parity(
    targets: Sequence[str],
    effort: Effort,
    *,
    mean_reduction: float | None = None,
    covariance_reduction: float | None = None,
) -> Solve:
    """Equal group means and variances (docs/method.md 2.3); a grid of both when no reduction is given.

    First come the refits towards the labels without any parity, of strength 0: what they err is what the refit alone
    would bring.

    Needs the moments alone: there may be no training rows at hand, and then the labels before a curved head cannot be a
    target.
    """

    def solve(refits: Refits, few: bool) -> list[Fit]:
        given = mean_reduction is not None or covariance_reduction is not None
        several = len(refits.sample.labels) > 2
        space = refits.space.denoised() if several and not given else refits.space
        quadratics = [
            (name, replace(quadratic, space=space))
            for target in targets
            for name, quadratic in refits.quadratics(target, _ridges(effort, target, targets, few=few))
        ]
        plain = [plain_fit(quadratic) for name, quadratic in quadratics if name == "labels"]
        if given:
            return plain + [
                replace(parity_at(quadratic, mean_reduction or 1.0, covariance_reduction or 1.0), target=name)
                for name, quadratic in quadratics
            ]

        @cache
        def problem(ridge: float, penalty: float) -> ParityProblem:  # its eigenproblem serves every target
            return ParityProblem(next(q for _, q in quadratics if q.ridge == ridge), penalty)

        return plain + [
            replace(at.solve(at.budget(reduction), quadratic), target=name, strength=penalty)
            for name, quadratic in quadratics
            for penalty in _thinned(effort.mean_penalties, few or name != "labels")
            for at in [problem(quadratic.ridge, penalty)]
            for reduction in _thinned(effort.variance_reductions, few or name != "labels")
        ]

    return solve


def _thinned(grid: Sequence[float], few: bool) -> Sequence[float]:
    """All values, or the ends and the middle (see :func:`transport`)."""
    return sorted({grid[0], grid[len(grid) // 2], grid[-1]}) if few else grid


def solve_all(sample: Problem, solve: Solve, effort: Effort, *, scans: bool) -> tuple[list[Fit], CrossFitted | None]:
    """The candidates and, where a point is going to be chosen among them (``scans``), some of them cross-fitted."""
    refits = Refits(sample, effort)
    return solve(refits, False), _cross_fit(refits, solve) if scans else None


def _cross_fit(refits: "Refits", solve: Solve) -> CrossFitted | None:
    """The closed form without a fold of the training rows, for each of a few folds (docs/method.md 2.7).

    None where the rows are so many next to the features that it would change nothing, or not all of them are kept.
    What the refit aims at is that of all rows; what is left out are the rows of the fold in moments and bins.
    """
    sample, rows = refits.sample, refits.sample.training
    judged = rows.codes < len(sample.labels)
    if np.count_nonzero(judged) < sum(sample.sizes) or not len(rows):
        return None
    if min(sample.sizes) >= MANY_ROWS * len(refits.space.variances):
        return None
    fold = np.empty(len(rows), dtype=np.intp)
    for code in np.unique(rows.codes):  # rows of a group are in random order
        mine = np.flatnonzero(rows.codes == code)
        fold[mine] = np.arange(len(mine)) % FOLDS
    pooled = sample.moments.has_own_pool
    moments = [_moments_of(rows.take(fold == k), sample.labels, pooled=pooled) for k in range(FOLDS)]
    fits: list[Fit] = []
    predictions: Array | None = None
    for k in range(FOLDS):
        index = np.flatnonzero(fold != k)
        without = _merged([each for i, each in enumerate(moments) if i != k])
        part = replace(sample, moments=without, training=rows.take(index))
        few = replace(refits.effort, transport_rows=refits.effort.transport_rows // 4)
        fits = solve(Refits(part, few, whole=refits, index=index), True)
        out = np.flatnonzero(fold == k)
        found = outputs(sample.head, rows.take(out), fits)
        predictions = np.empty((len(rows), len(fits)), order="F") if predictions is None else predictions
        predictions[out] = found
    assert predictions is not None
    return CrossFitted(tuple(fits), predictions)


def _moments_of(rows: Rows, labels: Sequence[Any], *, pooled: bool) -> tuple[GroupMoments, GroupMoments]:
    """Moments of ``[h, y]`` of the groups that are compared and, where these are not all rows as they are, of all."""
    groups, everyone = GroupMoments(), GroupMoments()
    judged = np.flatnonzero((rows.codes < len(labels)) & (rows.parity_weight > 0))
    for block in blocks(len(judged), 8192):
        i = judged[block]
        groups.update_codes(rows.features[i], labels, rows.codes[i], rows.parity_weight[i], beside=rows.y[i])
    if pooled:
        everyone.update_codes(rows.features, ("",), np.zeros(len(rows), dtype=np.intp), rows.weight, beside=rows.y)
    return groups, everyone


def _merged(parts: Sequence[tuple[GroupMoments, GroupMoments]]) -> GroupMoments:
    groups, everyone = GroupMoments(), GroupMoments()
    for mine, all_rows in parts:
        groups.merge(mine)
        everyone.merge(all_rows)
    return groups.with_pooled(everyone) if everyone.labels else groups


def _ridges(effort: Effort, target: str, targets: Sequence[str], *, few: bool) -> Sequence[float]:
    """All ridges, but one in the middle for predictions next to labels: where they win, they hardly over-fit.

    Of a ``few`` one will do for the optimum too, whose targets are smooth.
    """
    if (target == "predictions" and "labels" in targets) or (target == "optimum" and few):
        return effort.ridges[len(effort.ridges) // 2 :][:1]
    return effort.ridges


def plain_fit(quadratic: Quadratic) -> Fit:
    """The refit without fairness constraint."""
    return quadratic.fit(quadratic.minimiser, diagnostics={"plain": True})


# --- a fit and its layer -------------------------------------------------------------------------------------------


def weights_of(layer: LinearLayer, fit: Fit) -> Weights:
    """What a fit puts in place of the layers of a model whose last layer is ``layer``."""
    last = fit.weight[None, :], None if layer.bias is None else np.array([fit.bias])
    return {**after_edits(fit.edits), layer.name: last}


def after_edits(edits: Sequence[LayerEdit]) -> Weights:
    """The last state of every layer that was edited."""
    return {edit.layer: (edit.weight_after, edit.bias_after) for edit in edits}


def account_for(sample: Problem, fit: Fit) -> list[LayerEdit]:
    """The account of what a fit changes: those of its edits, or that of the refit of the last layer.

    There ``sigma`` are the singular values of ``D Wᵀ``, so that Σσ² is d_e², and the budget is what was achieved.
    """
    if fit.edits:
        return list(fit.edits)
    layer, before, after = sample.layer, sample.layer.weight, fit.weight[None, :]
    moments = sample.moments.columns(slice(0, before.shape[1]))
    sigma_before, sigma_after = (scipy.linalg.svdvals(moments.mean_differences() @ w.T) for w in (before, after))
    bias = None if layer.bias is None else np.array([fit.bias])
    shift = 0.0 if layer.bias is None else fit.bias - layer.bias[0]
    change = fit.weight - before[0]
    moved = change @ moments.pooled_scatter() @ change
    moved += moments.pooled_weight * (change @ moments.pooled_mean() + shift) ** 2
    gap = float(np.sum(sigma_after**2))
    return [
        LayerEdit(
            layer=layer.name,
            weight_before=before,
            weight_after=after,
            bias_before=layer.bias,
            bias_after=bias,
            sigma_before=sigma_before,
            sigma_after=sigma_after,
            multiplier=fit.strength,
            budget=gap,
            achieved=gap,
            converged=fit.converged,
            output_change=float(moved),
            gap_before=float(np.sum(sigma_before**2)),
            gap_after=gap,
        )
    ]


# --- what a refit aims at ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refits:
    """Everything that the refits of one last layer share: principal axes, targets."""

    sample: Problem
    effort: Effort
    whole: "Refits | None" = None  # of all training rows, where these are without a fold
    index: NDArray[np.intp] | None = None  # the rows of ``whole`` that these are of

    def __post_init__(self) -> None:
        rows = self.sample.training if len(self.sample.training) else self.sample.judging
        if len(rows) and np.ptp(rows.prediction) <= 1e-12 * max(np.abs(rows.prediction).max(), 1e-300):
            raise ValueError(
                f"the model predicts {rows.prediction[0]:.6g} for every row; it is alike for all groups already and "
                "there is nothing to repair. Check the model and X."
            )

    @cached_property
    def _original(self) -> tuple[Array, float]:
        fit = untouched(self.sample.layer)
        return fit.weight, fit.bias

    @cached_property
    def _unit_factors(self) -> Array | None:
        """(p,) of the features; None where no training rows are at hand."""
        if self.whole is not None:
            return self.whole._unit_factors
        rows, centred = self.sample.training, self.sample.layer.bias is not None
        return unit_factors(rows.features, rows.weight, centred=centred) if len(rows) else None

    @cached_property
    def space(self) -> FeatureSpace:
        """Principal axes of the features."""
        layer = self.sample.layer
        return FeatureSpace.from_moments(
            self.sample.moments, layer.weight.shape[1], intercept=layer.bias is not None, factors=self._unit_factors
        )

    @cached_property
    def problem(self) -> TransportProblem:
        """What transport couples: a bounded number of rows, a random choice since they are in hash order."""
        rows, index = self.sample.training, self._bounded
        rotated, weight = self.space.rotate(rows.features[index]), rows.parity_weight[index]
        return TransportProblem(rotated, rows.codes[index], len(self.sample.labels), sample_weight=weight)

    @cached_property
    def _bounded(self) -> NDArray[np.intp]:
        """Of every group the first training rows: positions of at most ``effort.transport_rows`` each."""
        codes, groups = self.sample.training.codes, range(len(self.sample.labels))
        return np.concatenate([np.flatnonzero(codes == g)[: self.effort.transport_rows] for g in groups])

    def quadratics(self, target: str, ridges: Sequence[float]) -> Iterator[tuple[str, Quadratic]]:
        """The quadratic of every ridge, for "labels", "predictions", or every level of the "optimum"."""
        if target == "optimum":
            levels, values = self._optimum_values
            towards = self._towards(np.column_stack([self.sample.head.inverse(column) for column in values]), 0.0)
            for level, quadratic in zip(levels, towards, strict=True):
                for ridge in ridges:
                    yield f"optimum {level:.3g}", replace(quadratic, ridge=ridge)
        else:
            for ridge in ridges:
                own = target == "predictions"
                yield target, Quadratic.from_layer(self.space, *self._original, ridge) if own else self.labels(ridge)

    def labels(self, ridge: float) -> Quadratic:
        """Towards the labels, or whatever stands in for them."""
        head, moments = self.sample.head, self.sample.moments
        if not head.is_affine:
            return self._towards(self.head_aware_outputs[:, None], ridge)[0]
        quadratic = Quadratic.from_moments(
            moments, space=self.space, target=moments.width - 1, original=self._original[0], ridge=ridge
        )
        slope, intercept = head.line
        return replace(
            quadratic,
            cross=quadratic.cross / slope,
            target_mean=(quadratic.target_mean - intercept) / slope,
        )

    def _towards(self, outputs: Array, ridge: float) -> list[Quadratic]:
        """With each column of outputs (before the head) for the training rows as the target."""
        rows = self.sample.training
        original, weight = self._original[0], rows.weight
        return Quadratic.from_targets(
            rows.features, outputs, space=self.space, original=original, ridge=ridge, sample_weight=weight
        )

    @cached_property
    def _head_aware_layer(self) -> tuple[Array, float]:
        """The layer of least squared error *after* a curved head; its outputs are what "labels" means before it."""
        rows, head, axes = self.sample.training, self.sample.head, self.space.axes
        rotated = self.space.rotate(rows.features)
        y, share, variances = rows.y, rows.weight / rows.weight.sum(), self.space.variances
        original, bias = self._original
        start = np.append(original @ self.space.dual, self.space.mean @ original + bias)
        penalty = 1e-6 * float(np.var(y)) / max(float(variances @ start[:-1] ** 2), 1e-300)

        def loss(v: Array) -> tuple[float, Array]:
            z = rotated @ v[:-1] + v[-1]
            error = head.apply(z) - y
            slope = 2 * share * error * head.derivative(z)
            pull = v[:-1] - start[:-1]
            gradient = np.append(slope @ rotated + 2 * penalty * variances * pull, slope.sum())
            return float(share @ error**2 + penalty * variances @ pull**2), gradient

        best = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
        weight = original + axes @ (best[:-1] - start[:-1])
        return weight, float(best[-1] - self.space.mean @ weight)

    @cached_property
    def head_aware_outputs(self) -> Array:
        """(rows,) what the labels of the training rows mean before a curved head.

        Kept within the range of the model's own outputs: where a head is flat, an output far out costs nothing after
        the head, but would dominate a squared error before it.
        """
        if self.whole is not None:
            return self.whole.head_aware_outputs[self.index]
        weight, bias = self._head_aware_layer
        training = self.sample.training
        outputs = self.sample.head.inverse(training.prediction)
        return np.clip(training.features.astype(np.float64) @ weight + bias, outputs.min(), outputs.max())

    @cached_property
    def _optimum_values(self) -> tuple[list[float], list[Array]]:
        """Levels of the attribute-unaware optimum, and its values f*(x) for the training rows (docs/method.md 2.6)."""
        if self.whole is not None:  # every other level
            levels, values = self.whole._optimum_values
            return levels[1::2], [value[self.index] for value in values[1::2]]
        training, groups = self.sample.training, len(self.sample.labels)
        weight, bias = self.regression_layer
        eta = _outputs(training.features, weight[None], np.array([bias]), self.sample.head.apply)[:, 0]
        probability = self.group_probability(training.features)
        judged = np.flatnonzero(training.codes < groups)
        share = training.parity_weight[judged]
        before = ks_between(eta[judged], Groups(training.codes[judged], groups, share))
        levels = [part * before for part in self.effort.levels]
        coarse = {"n_cells": 512, "n_grid": int(np.clip(384 // groups, 48, 64))}  # as good a target as twice as fine
        fitted = fit_optimum(eta[judged], probability[judged], levels=levels, sample_weight=share, **coarse)
        return levels, [optimum.predict(eta, probability) for optimum in fitted]

    @cached_property
    def group_probability(self) -> Callable[[NDArray[Any]], Array]:
        """P̂(group | features): a function from features (rows, p) to (rows, G); used while fitting only.

        A logistic regression on the principal axes that carry some variance, on a bounded number of rows of each group,
        regularised as the judging rows prefer.
        """
        from sklearn.linear_model import LogisticRegression  # half of what importing esvdfair would cost

        training, judging, index, space = self.sample.training, self.sample.judging, self._bounded, self.space
        judged = np.flatnonzero(judging.codes < len(self.sample.labels))
        axes = space.axes[:, space.variances > FAINT]
        known = _outputs(training.features[index], axes.T, -space.mean @ axes, np.positive)
        codes, weight = training.codes[index], training.parity_weight[index]
        # They stand for all rows of their group.
        weight *= (np.bincount(training.codes, training.parity_weight)[: codes.max() + 1] / np.bincount(codes, weight))[
            codes
        ]
        # Newton's steps cost a Gram matrix each, and few are needed from one regularisation to the next.
        small = known.shape[1] * len(self.sample.labels) <= LARGEST_NEWTON
        classifier = LogisticRegression(solver="newton-cholesky" if small else "lbfgs", max_iter=200, warm_start=True)
        losses, found = [], []
        for c in sorted(self.effort.regularisations):
            with warnings.catch_warnings():  # an estimate that stopped early is judged like the others
                warnings.simplefilter("ignore", ConvergenceWarning)
                classifier.set_params(C=c).fit(known, codes, sample_weight=weight)
            coef = classifier.coef_ @ axes.T  # of the features themselves
            if len(coef) == 1:  # of two groups: the first has none
                coef = np.vstack([np.zeros_like(coef), coef])
            bias = np.append(0.0, classifier.intercept_)[-len(coef) :] - coef @ space.mean
            found.append(partial(_outputs, weight=coef, bias=bias, after=partial(softmax, axis=0)))
            chance = found[-1](judging.features)[judged, judging.codes[judged]]
            losses.append(-np.average(np.log(np.maximum(chance, 1e-6)), weights=judging.parity_weight[judged]))
        return found[int(np.argmin(losses))]

    @cached_property
    def regression_layer(self) -> tuple[Array, float]:
        """η(x) = E[Y|x]: the untouched layer or one refitted to the labels, whichever errs least where it is judged."""
        fits, rows = [untouched(self.sample.layer)], self.sample.judging
        if self.sample.error_against == "labels":
            fits += [plain_fit(quadratic) for _, quadratic in self.quadratics("labels", self.effort.ridges)]
        errors = (outputs(self.sample.head, rows, fits) - rows.y[:, None]) ** 2
        best = fits[int(np.argmin(np.average(errors, axis=0, weights=rows.weight)))]
        return best.weight, best.bias


# --- parity at given reductions ------------------------------------------------------------------------------------


def parity_at(quadratic: Quadratic, mean_reduction: float, covariance_reduction: float) -> Fit:
    """The parity refit whose squared mean and variance gaps are the original's divided by the reductions."""
    unpenalised = ParityProblem(quadratic, 0.0)
    budget = unpenalised.budget(np.sqrt(covariance_reduction))  # the covariance gap d_v² is the variance gap squared
    allowed = unpenalised.gaps[0] / np.sqrt(mean_reduction)
    if allowed == 0.0:
        fit = ParityProblem(quadratic, np.inf).solve(budget)
    else:
        fit = unpenalised.solve(budget)
        gap = fit.diagnostics["mean_gap"]
        if gap > allowed:
            fit = ParityProblem(quadratic, _mean_penalty(quadratic, budget, gap, allowed)).solve(budget)
    return replace(fit, strength=mean_reduction)


def _mean_penalty(quadratic: Quadratic, budget: float, gap: float, allowed: float) -> float:
    """λ_e at which the mean gap, ``gap`` without a penalty, is ``allowed``; every trial costs an eigenproblem.

    With one direction and no variance budget ``gap/(1 + λ_e s²)`` is exact, s the whitened gap: the search starts there
    and doubles its steps. A gap that no penalty within e^±40 of it closes is rounding, and infinity closes it.
    """

    @cache
    def excess(log_penalty: float) -> float:
        left = ParityProblem(quadratic, np.exp(log_penalty)).solve(budget).diagnostics["mean_gap"]
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
