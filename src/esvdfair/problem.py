"""Summary -> Problem: the training and validation rows of the groups that are compared, and how much is searched."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from esvdfair.batches import Rows, row_key
from esvdfair.core.checks import Label, sort_key
from esvdfair.core.ks import adjusted_weights
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit, Head, blocks
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import LinearLayer
from esvdfair.summary import KEPT_ROWS, Summary

Array = NDArray[np.float64]

ORIGINAL = "untouched"
"""``target`` of the original model, which is a candidate like the others."""
FLAT = 0.01
"""Part of the original model's standard deviation below which a model is called a constant."""
MIN_GROUP_ROWS = 30
"""Groups with fewer training rows, or fewer validation rows, are set aside: not compared, not constrained."""
FEWEST_ROWS = 5
"""Below this `min_group_rows`, no row is held out if that would set a group aside."""
FOLDS = 4
"""Of the training rows, to learn how much a refit over-fits them."""
MANY_ROWS = 40
"""Rows of the smallest group for each feature from which a refit hardly over-fits."""
SHIFT_COST = 0.02
"""Part of the error that a missing bias may cost without a warning."""


@dataclass(frozen=True)
class Effort:
    """Search budget: which candidates are compared, and on how many rows.

    Parameters
    ----------
    ridges : tuple of float
        Regularisation strengths of every refit, relative to the spread of each feature.
    strengths : tuple of float
        Strengths of the parity term of "transport", ascending.
    levels : tuple of float
        Levels of the fair optimum that "transport" may aim at, as fractions of the original model's KS distance.
    mean_penalties, variance_reductions : tuple of float
        Grid that "parity" searches for a target.
    factors : tuple of float
        Common factors on both reductions, which "paper" and "exact" search for a target.
    regularisations : tuple of float
        Inverse strengths among which the classifier of groups is chosen.
    rows : int
        Largest number of rows kept in memory, weighted to represent all rows of their group. Of all other rows only
        moments are kept.
    transport_rows : int
        Rows of each group whose distributions "transport" matches. The error uses all rows.
    scanned_bytes : int
        Largest size of the inputs that "paper" and "exact" keep in memory to search their factors.
    points : int
        Smallest number of points of a curve, if there are as many candidates.
    resamples : int
        Bootstrap samples behind each interval of a KS distance.

    Examples
    --------
    >>> from esvdfair import Effort
    >>> len(Effort().strengths), len(Effort.quick().strengths)
    (21, 5)
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


@dataclass(frozen=True)
class Problem:
    """What is solved: training and validation rows of the groups that are compared.

    Attributes
    ----------
    labels : the groups that are compared, sorted
    moments : of ``[h, y]`` over the training rows, h the inputs of the last layer; the pooled ones are of all rows
    layer, head : the last layer, and what maps its output to the prediction
    training, validation : their rows, the same when no row could be held out
    evaluated_on : "validation", "heldout", "train" or "test"
    error_against : "labels", or "predictions" of the original model
    sizes : (G,) training rows of each group
    seed : of the split that holds rows out
    set_aside : groups too small to be compared, with their rows; their codes follow those of ``labels``
    complete : whether all validation rows were kept
    fold_moments : of the training rows of each fold (:func:`folds_of`); none where the rows are so many next to the
        features that a refit hardly over-fits them, or not all of them were kept
    """

    labels: tuple[Label, ...]
    moments: GroupMoments
    layer: LinearLayer
    head: Head
    training: Rows
    validation: Rows
    evaluated_on: str
    error_against: str
    sizes: tuple[int, ...] = ()
    seed: int = 0
    set_aside: Mapping[Label, int] = field(default_factory=dict)
    complete: bool = True
    fold_moments: tuple[GroupMoments, ...] = ()


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
    kept, sizes = summary.kept, Counter(summary.group_rows)
    assert kept.id is not None
    apart, out, evaluated_on = validation, np.zeros(len(kept), dtype=bool), "train"
    groups, rows = _large(sizes, least=min_group_rows), sizes
    if validation is not None:
        others, evaluated_on = Counter(validation.group_rows), "validation"
        groups, rows = _large(sizes, others, least=min_group_rows), sizes + others
    elif validation_fraction:
        chosen = row_key(kept.id, seed) < validation_fraction
        held = np.bincount(kept.codes[chosen], minlength=len(summary.groups)).tolist()
        held_sizes = Counter(dict(zip(summary.groups, held, strict=True)))
        common = _large(sizes - held_sizes, held_sizes, least=min_group_rows)
        if len(common) >= 2 and (min_group_rows >= FEWEST_ROWS or common == groups):
            apart, out, evaluated_on = summary, chosen, "heldout"
            groups, sizes = common, sizes - held_sizes
    check_enough(rows, groups, min_group_rows)
    if validation is None and validation_fraction and evaluated_on == "train":
        warnings.warn(
            f"Too few rows to hold some out (`min_group_rows={min_group_rows}`), so all rows are used both to fit and "
            "to choose. Expect worse results on new data; pass `validation`, or more rows.",
            ESVDFairWarning,
            stacklevel=3,
        )
    aside = tuple(sorted(set(rows) - set(groups), key=sort_key))
    labels, count = (*groups, *aside), len(groups)
    by: dict[str, Any] = {"labels": labels, "count": count, "seed": seed}
    own = _select(summary, ~out, labels, seed)
    # Weights of all rows but those that do not train, by group.
    totals = summary.mass.sum(axis=1) - np.bincount(kept.codes[out], kept.weight[out], minlength=len(summary.groups))
    training = _reweighted(own, summary, labels, count, totals)
    if warns and summary.labelled:
        _notice_labels(training, summary.output.head)
    few = summary.complete and min(sizes[label] for label in groups) < MANY_ROWS * training.features.shape[1]
    parts = _moments_by_fold(own, training, groups, labels, FOLDS if few else 1)
    return Problem(
        labels=groups,
        moments=_with_rest(parts, summary, groups),
        layer=summary.output.layer,
        head=summary.output.head,
        training=training,
        validation=training if apart is None else select_rows(apart, out if apart is summary else None, **by),
        evaluated_on=evaluated_on,
        error_against="labels" if summary.labelled else "predictions",
        sizes=tuple(sizes[label] for label in groups),
        seed=seed,
        set_aside={label: rows[label] for label in aside},
        complete=(validation or summary).complete,
        fold_moments=tuple(parts) if few else (),
    )


def _large(*counts: Counter[Label], least: int) -> tuple[Label, ...]:
    """The groups that have at least so many rows in all of the counts, sorted."""
    return tuple(sorted((g for g in counts[0] if min(each[g] for each in counts) >= least), key=sort_key))


def folds_of(rows: Rows) -> NDArray[np.intp]:
    """(rows,) the fold of each training row; those of a group are in random order, one group after the other."""
    return (np.arange(len(rows)) - np.searchsorted(rows.codes, rows.codes)) % FOLDS


def _moments_by_fold(
    own: Rows, training: Rows, groups: Sequence[Label], labels: Sequence[Label], folds: int
) -> list[GroupMoments]:
    """Moments of ``[h, y]`` over the training rows of each fold; ``own`` are the same rows with their own weights."""
    fold = folds_of(own) if folds > 1 else np.zeros(len(own), dtype=np.intp)
    found = []
    for k in range(folds):
        moments = _moments(own, labels, own.weight * (fold == k))
        if training.adjusted is None:
            moments = moments.only(groups)
        else:
            adjusted = _moments(training, labels, training.adjusted * (fold == k))
            moments = adjusted.only(groups).with_pooled(moments)
        found.append(moments)
    return found


def _with_rest(parts: Sequence[GroupMoments], summary: Summary, groups: Sequence[Label]) -> GroupMoments:
    """The moments of all parts and of the rows that were not kept, which have no strata to adjust for."""
    rest = summary.rest
    if not rest.labels:
        return GroupMoments.total(parts)
    return GroupMoments.total([*parts, GroupMoments().with_pooled(rest) if summary.adjusted else rest.only(groups)])


def _moments(rows: Rows, labels: Sequence[Label], weight: Array) -> GroupMoments:
    moments = GroupMoments()
    for block in blocks(len(rows), 8192):
        moments.update_codes(rows.features[block], labels, rows.codes[block], weight[block], beside=rows.y[block])
    return moments


def select_rows(
    summary: Summary,
    chosen: NDArray[np.bool_] | None = None,
    *,
    labels: Sequence[Label],
    count: int,
    seed: int = 0,
) -> Rows:
    """All kept rows or some, group by group in random order, with codes that are positions in ``labels``.

    Where not all rows are kept, weights are scaled so that each group has its total. The first ``count`` labels are
    compared: where there are strata, their rows get adjusted weights.
    """
    return _reweighted(_select(summary, chosen, labels, seed), summary, labels, count, summary.mass.sum(axis=1))


def _select(summary: Summary, chosen: NDArray[np.bool_] | None, labels: Sequence[Label], seed: int) -> Rows:
    """As :func:`select_rows`, with their own weights."""
    kept = summary.kept
    index = np.arange(len(kept)) if chosen is None else np.flatnonzero(chosen)
    codes = np.array([labels.index(label) for label in summary.groups], dtype=np.intp)[kept.codes[index]]
    assert kept.id is not None
    order = np.lexsort((row_key(kept.id[index], seed + 1), codes))
    return replace(kept.take(index[order]), codes=codes[order])


def _reweighted(rows: Rows, summary: Summary, labels: Sequence[Label], count: int, totals: Array) -> Rows:
    """With weights that add up to the total of each group, in the order of ``summary.groups``, and adjusted ones."""
    weight = rows.weight
    if not summary.complete:
        own, wanted = np.bincount(rows.codes, weight, minlength=len(labels)), np.zeros(len(labels))
        wanted[[labels.index(label) for label in summary.groups]] = totals
        weight = weight * (wanted / np.where(own > 0, own, 1.0))[rows.codes]
    if not summary.adjusted:
        return replace(rows, weight=weight, strata=None)
    assert rows.strata is not None
    adjusted, compared = np.zeros(len(rows)), rows.codes < count
    adjusted[compared] = adjusted_weights(rows.codes[compared], count, rows.strata[compared], weight[compared])
    return replace(rows, weight=weight, adjusted=adjusted)


def all_rows(summary: Summary, min_group_rows: int) -> tuple[Rows, tuple[Label, ...], dict[Label, int]]:
    """All kept rows, the groups that are compared, and those set aside with their rows."""
    counts = Counter(summary.group_rows)
    groups = _large(counts, least=min_group_rows)
    check_enough(counts, groups, min_group_rows)
    aside = tuple(sorted(set(counts) - set(groups), key=sort_key))
    rows = select_rows(summary, labels=(*groups, *aside), count=len(groups))
    return rows, groups, {label: counts[label] for label in aside}


def check_enough(rows: Counter[Label], groups: Sequence[Label], least: int) -> None:
    """Raise unless two groups or more are compared."""
    if len(groups) >= 2:
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
    mean, other = (float(rows.weight @ values / total) for values in (y, p))
    spread, wide, error = (float(rows.weight @ d**2 / total) ** 0.5 for d in (y - mean, p - other, y - p))
    if head.is_affine and set(np.unique(y)) == {0.0, 1.0} and np.mean((expit(p) - y) ** 2) < np.mean((p - y) ** 2):
        words = (
            f"The labels are 0 and 1, and the predictions look like logits (from {p.min():.3g} to {p.max():.3g}), so "
            "errors against the labels have no meaning. Repair the score with `output='sigmoid'`."
        )
    elif error > spread:
        words = (
            f"The model predicts the labels worse than a constant: they have mean {mean:.3g} and standard deviation "
            f"{spread:.3g}, the predictions {other:.3g} and {wide:.3g}. Check that `y` is in the units of the "
            "predictions."
        )
    else:
        return
    warnings.warn(words, ESVDFairWarning, stacklevel=4)


def notice_missing_bias(problem: Problem, prediction: Array) -> None:
    """Warn when a shift of all repaired predictions would lower the error, and the last layer has no bias for it.

    ``prediction`` are those of ``problem.validation``. Of n rows a shift takes 1/n of the error by chance.
    """
    rows = problem.validation
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


# --- predictions of fits ----------------------------------------------------------------------------------------------


def outputs(head: Head, rows: Rows, fits: Sequence[Fit]) -> Array:
    """(n, k) what the fits predict, column by column in memory; those of the original model are known."""
    known = [fit.target == ORIGINAL for fit in fits]
    if all(known):
        return np.repeat(rows.prediction[:, None], len(fits), axis=1)
    weight, bias = np.array([fit.weight for fit in fits]), np.array([fit.bias for fit in fits])
    output = apply_layers(rows.features, weight, bias, head.apply)
    output[:, known] = rows.prediction[:, None]
    return output


def apply_layers(features: NDArray[Any], weight: Array, bias: Array, after: Callable[[Array], Array]) -> Array:
    """(n, k) of layers ``weight`` (k, p) and ``bias`` (k,), with ``after``, which takes (k, rows), applied to them."""
    output = np.empty((len(bias), len(features)))
    live = np.flatnonzero(features.any(axis=0))  # of a ReLU network half of the units may be dead
    weight = weight[:, live]
    for block in blocks(len(features)):
        output[:, block] = after(weight @ features[block, live].astype(np.float64).T + bias[:, None])
    return output.T


def original_fit(layer: LinearLayer) -> Fit:
    """The last layer of the original model, which is a candidate like the others."""
    return Fit(layer.weight[0], 0.0 if layer.bias is None else float(layer.bias[0]), target=ORIGINAL)
