"""Summary -> Problem: the training and validation rows of the groups that are compared, and how much is searched."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit

from esvdfair.batches import ArrayBatches, Batches, Rows, row_key
from esvdfair.core.checks import Label, row_count, several_inputs, sort_key, to_numpy
from esvdfair.core.ks import adjusted_weights
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit, Head, blocks
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import LinearLayer
from esvdfair.summary import KEPT_ROWS, Summary

Array = NDArray[np.float64]

ORIGINAL = "untouched"  # target of the original model, which is a candidate like the others
FLAT = 0.01  # part of the original model's standard deviation below which a model is called a constant
MIN_GROUP_ROWS = 30  # groups with fewer training rows, or fewer validation rows, are neither compared nor constrained
FEWEST_ROWS = 5  # below this `min_group_rows`, no row is held out if that would set a group aside
FOLDS = 4  # of the training rows, to learn how much a refit over-fits them
MANY_ROWS = 40  # rows of the smallest group for each feature from which a refit hardly over-fits
SHIFT_COST = 0.02  # part of the error that a missing bias may cost without a warning


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
    evaluated_on, out, groups, sizes, rows = _divide(summary, validation, seed, validation_fraction, min_group_rows)
    apart = {"validation": validation, "heldout": summary}.get(evaluated_on)
    labels, kept = _labels(rows, groups, min_group_rows), summary.kept
    if validation_fraction and apart is None:
        warnings.warn(
            f"Too few rows to hold some out (`min_group_rows={min_group_rows}`), so all rows are used both to fit and "
            "to choose. Expect worse results on new data; pass `validation`, or more rows.",
            ESVDFairWarning,
            stacklevel=5,
        )
    # Weights of all rows but those that do not train, by group.
    totals = summary.mass.sum(axis=1) - np.bincount(kept.codes[out], kept.weight[out], minlength=len(summary.groups))
    own, training = _select(summary, ~out, labels, len(groups), seed, totals)
    if warns and summary.labelled:
        _notice_labels(training, summary.output.head)
    few = summary.complete and min(sizes[label] for label in groups) < MANY_ROWS * training.features.shape[1]
    parts = _moments_by_fold(own, training, groups, labels, FOLDS if few else 1)
    rest = summary.rest
    if rest.labels:  # rows that were not kept, which have no strata to adjust for
        rest = GroupMoments().with_pooled(rest) if summary.adjusted else rest.only(groups)
    shown = out if apart is summary else np.ones(0 if apart is None else len(apart.kept), dtype=bool)
    return Problem(
        labels=groups,
        moments=GroupMoments.total([*parts, rest] if rest.labels else parts),
        layer=summary.output.layer,
        head=summary.output.head,
        training=training,
        validation=training if apart is None else _select(apart, shown, labels, len(groups), seed)[1],
        evaluated_on=evaluated_on,
        error_against="labels" if summary.labelled else "predictions",
        sizes=tuple(sizes[label] for label in groups),
        seed=seed,
        set_aside={label: rows[label] for label in labels[len(groups) :]},
        complete=(validation or summary).complete,
        fold_moments=tuple(parts) if few else (),
    )


def _divide(
    summary: Summary, validation: Summary | None, seed: int, fraction: float, least: int
) -> tuple[str, NDArray[np.bool_], tuple[Label, ...], Counter[Label], Counter[Label]]:
    """On which rows fits are evaluated, which kept rows are held out, the groups, their training rows, and all rows."""
    kept, sizes = summary.kept, Counter(summary.group_rows)
    assert kept.id is not None
    none, groups = np.zeros(len(kept), dtype=bool), _large(sizes, least=least)
    if validation is not None:
        others = Counter(validation.group_rows)
        return "validation", none, _large(sizes, others, least=least), sizes, sizes + others
    if fraction:
        chosen = row_key(kept.id, seed) < fraction
        held = np.bincount(kept.codes[chosen], minlength=len(summary.groups)).tolist()
        held_sizes = Counter(dict(zip(summary.groups, held, strict=True)))
        common = _large(sizes - held_sizes, held_sizes, least=least)
        if len(common) >= 2 and (least >= FEWEST_ROWS or common == groups):
            return "heldout", chosen, common, sizes - held_sizes, sizes
    return "train", none, groups, sizes, sizes


def make_test_problem(summary: Summary, min_group_rows: int) -> Problem:
    """All kept rows as rows to evaluate a model on; nothing is fitted."""
    if summary.output is None:
        raise ValueError("there are no rows to evaluate: the data is empty.")
    counts = Counter(summary.group_rows)
    groups = _large(counts, least=min_group_rows)
    labels = _labels(counts, groups, min_group_rows)
    _, rows = _select(summary, np.ones(len(summary.kept), dtype=bool), labels, len(groups), 0)
    layer, against = summary.output.layer, "labels" if summary.labelled else "predictions"
    none, aside = Rows.none(layer.weight.shape[1]), {label: counts[label] for label in labels[len(groups) :]}
    return Problem(groups, GroupMoments(), layer, summary.output.head, none, rows, "test", against, set_aside=aside)


def _large(*counts: Counter[Label], least: int) -> tuple[Label, ...]:
    """The groups that have at least so many rows in all of the counts, sorted."""
    return tuple(sorted((g for g in counts[0] if min(each[g] for each in counts) >= least), key=sort_key))


def _labels(rows: Counter[Label], groups: tuple[Label, ...], least: int) -> tuple[Label, ...]:
    """The groups that are compared, two or more, and then those that are set aside."""
    if len(groups) >= 2:
        return *groups, *sorted(set(rows) - set(groups), key=sort_key)
    found = ", ".join(f"{label!r}: {count}" for label, count in sorted(rows.items(), key=lambda item: -item[1])[:6])
    if len(rows) < 2:
        raise InputError(f"`sensitive_features` contains one group, {found}; parity needs at least two.")
    raise InputError(
        f"`min_group_rows={least}`, in training and in validation data, leaves fewer than two groups to compare "
        f"({found}). Pass more rows, merge groups, or lower it."
    )


def _select(
    summary: Summary,
    chosen: NDArray[np.bool_],
    labels: Sequence[Label],
    count: int,
    seed: int,
    totals: Array | None = None,
) -> tuple[Rows, Rows]:
    """Some kept rows, group by group in random order, with codes that are positions in ``labels``; and reweighted.

    Where not all rows are kept, weights are scaled so that each group has its total, by default that of all its rows.
    The first ``count`` labels are compared: where there are strata, their rows get adjusted weights.
    """
    kept, place = summary.kept, np.array([labels.index(label) for label in summary.groups], dtype=np.intp)
    index, totals = np.flatnonzero(chosen), summary.mass.sum(axis=1) if totals is None else totals
    codes = place[kept.codes[index]]
    assert kept.id is not None
    order = np.lexsort((row_key(kept.id[index], seed + 1), codes))
    own = replace(kept.take(index[order]), codes=codes[order])
    weight = own.weight
    if not summary.complete:
        found, wanted = np.bincount(own.codes, weight, minlength=len(labels)), np.zeros(len(labels))
        wanted[place] = totals
        weight = weight * (wanted / np.where(found > 0, found, 1.0))[own.codes]
    if not summary.adjusted:
        return own, replace(own, weight=weight, strata=None)
    assert own.strata is not None
    adjusted, compared = np.zeros(len(own)), own.codes < count
    adjusted[compared] = adjusted_weights(own.codes[compared], count, own.strata[compared], weight[compared])
    return own, replace(own, weight=weight, adjusted=adjusted)


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
        moments, adjusted = GroupMoments(), GroupMoments()
        for block in blocks(len(own), 8192):
            features, codes, inside = own.features[block], own.codes[block], fold[block] == k
            moments.update_codes(features, labels, codes, own.weight[block] * inside, beside=own.y[block])
            if training.adjusted is not None:
                adjusted.update_codes(features, labels, codes, training.adjusted[block] * inside, beside=own.y[block])
        plain = training.adjusted is None
        found.append(moments.only(groups) if plain else adjusted.only(groups).with_pooled(moments))
    return found


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
            f"The last layer {problem.layer.name!r} has no bias, so the repaired predictions are off by "
            f"{-shift:+.3g} on average, which increases the mean squared error by {shift**2 / rest:.0%}. Add "
            f"{shift:+.3g} to the predictions, or give the layer a bias.",
            ESVDFairWarning,
            stacklevel=3,
        )


# --- validation rows that are copies of training rows -----------------------------------------------------------------


def check_apart(training: Batches, validation: Batches | None, confidence: float | None) -> None:
    """Warn if validation rows are training rows, inputs and labels alike; with a confidence, raise.

    Only rows in memory are compared. Some rows coincide in discrete data: they count as copies where clearly more do
    than by chance and most training rows are like no other, or where all rows are the same.
    """
    if not isinstance(training, ArrayBatches) or not isinstance(validation, ArrayBatches):
        return
    known, asked = (hash_rows(rows.x, rows.y) for rows in (training, validation))
    if known is None or asked is None or not len(asked):
        return
    repeated = int(np.isin(asked, known).sum())
    _, counts = np.unique(known, return_counts=True)
    by_chance = counts[counts > 1].sum() / len(known)  # of a row from the same population
    noise = np.sqrt(by_chance * (1 - by_chance) * (1 / len(asked) + 1 / len(known)))
    copied = by_chance < 0.5 and repeated / len(asked) - by_chance > max(0.1 * (1 - by_chance), 5 * noise)
    if not copied and not (len(asked) == len(known) and np.array_equal(np.sort(asked), np.sort(known))):
        return
    words = (
        f"{repeated:,} of {len(asked):,} rows of `validation` are also in `X`, so they cannot show how the repair does "
        "on new rows. Pass rows that are not in `X`, or leave `validation` out."
    )
    if confidence is not None:
        raise InputError(f"`confidence={confidence}` requires new rows: {words}")
    warnings.warn(words, ESVDFairWarning, stacklevel=2)


def hash_rows(x: Any, y: Array | None = None) -> NDArray[np.uint64] | None:
    """A number for every row and label, equal for equal ones; None of a sparse matrix, or of values that are lists."""
    if hasattr(x, "tocsr"):
        return None
    several, total = several_inputs(x), np.zeros(row_count(x), dtype=np.uint64)
    for part in [*([x] if several is None else several.values()), *([] if y is None else [y])]:
        frame = part if isinstance(part, pd.DataFrame) else pd.DataFrame(to_numpy(part).reshape(len(total), -1))
        is_number = np.array([isinstance(d, np.dtype) and d.kind in "biuf" for d in frame.dtypes], dtype=bool)
        with np.errstate(over="ignore"):
            numbers = frame.loc[:, is_number].astype(np.float64) + 0.0  # -0.0 is 0.0
        for columns in (numbers, frame.loc[:, ~is_number].astype(object)):
            try:
                words = pd.util.hash_pandas_object(columns, index=False, categorize=False) if columns.shape[1] else 0
            except (TypeError, ValueError):  # lists, which have no hash
                return None
            total = total * np.uint64(0x9E3779B97F4A7C15) + np.asarray(words, dtype=np.uint64)
    return total


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
        output[:, block] = after(weight @ features[block].take(live, axis=1).astype(np.float64).T + bias[:, None])
    return output.T


def original_fit(layer: LinearLayer) -> Fit:
    """The last layer of the original model, which is a candidate like the others."""
    return Fit(layer.weight[0], 0.0 if layer.bias is None else float(layer.bias[0]), target=ORIGINAL)
