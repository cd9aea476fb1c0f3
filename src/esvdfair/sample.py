"""Model + batches -> Sample: what one pass over the rows leaves.

The moments know every training row; the rows that are kept, a bounded number, are those that the whole distribution is
read from (transport, the optimum) and those on which a point is chosen. Nothing else is kept, so memory does not
depend on the number of rows.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock, local
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from threadpoolctl import ThreadpoolController

from esvdfair.batches import (
    ArrayBatches,
    Batch,
    Batches,
    Data,
    Digest,
    Keeper,
    Rows,
    Splitter,
    group_of,
    held_out,
    make_batches,
    row_key,
)
from esvdfair.core.checks import (
    Label,
    count_not_finite,
    row_count,
    row_slice,
    several_inputs,
    sort_key,
    take,
    take_rows,
)
from esvdfair.core.ks import adjusted_weights, split_cell
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Head
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.models.base import PROBE_ROWS, LinearLayer, ModelAdapter, Weights

Array = NDArray[np.float64]

IN_ORDER_ROWS = 8192
"""Rows of which moments are gathered at once when all rows are in order."""

STRIP_ROWS = 16
"""Rows that products of matrices take at once, or a multiple of it."""

LARGEST = 1e120
"""Labels, predictions and weights beyond it are refused: squares of sums of their squares leave float64."""

SHIFT_COST = 0.02
"""Part of the error that a missing bias may cost without a warning."""

MIN_GROUP_ROWS = 30
"""Groups with fewer training rows, or fewer validation rows, are set aside: not compared, not constrained."""

FEWEST_ROWS = 5
"""A smaller `min_group_rows` sets nobody aside whom the split leaves with too few rows: then no row is held out."""


WIDE = 768
"""Layers of this width on are large enough for threads to pay."""


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes
    ----------
    ridges : ρ of every refit, relative to the features' mean variance
    strengths : λ_w of transport, ascending
    levels : α of the optimum that transport may aim at, as parts of the untouched model's KS distance
    mean_penalties, variance_reductions : the grid that parity scans for a target
    factors : common factors on both reductions, which paper and exact scan for a target
    regularisations : inverse strengths among which the estimate of P(group | features) is chosen
    training_rows, judging_rows : bounds of the rows that are kept, shared equally by the groups
    transport_rows : rows of each group that transport couples (the quadratic sees all rows); and that are kept to put
        candidates in order, where a method reads only the moments of the rows that fit and not all can be kept
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
    training_rows: int = 60_000
    judging_rows: int = 100_000
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
class Setting:
    """The model and the rows of a fit.

    Attributes
    ----------
    adapter : of the untouched model
    layers : its linear layers, in the order of execution
    head : what maps the last one's output to the prediction
    batches, validation : rows that fit, and rows that judge when they are given apart
    split : tells the rows that judge from those that fit, when they are not; None keeps all rows for both
    seed : of whatever is drawn
    has_labels : whether the rows have labels; else the untouched model's own predictions stand in for them
    effort : how hard to try
    probe : some inputs
    partial : whether the rows are a part of those that were given, held in memory (:func:`hold`)
    moments_alone : whether the method reads no more of the rows that fit than their moments
    min_group_rows : groups with fewer training or validation rows are set aside
    """

    adapter: ModelAdapter
    layers: tuple[LinearLayer, ...]
    head: Head
    batches: Batches
    validation: Batches | None
    split: Splitter | None
    seed: int
    has_labels: bool
    effort: Effort
    probe: Any = field(repr=False)
    partial: bool = False
    moments_alone: bool = False
    min_group_rows: int = MIN_GROUP_ROWS

    @property
    def last(self) -> LinearLayer:
        """The output layer."""
        return self.layers[-1]

    @property
    def width(self) -> int:
        """Inputs of the widest layer."""
        return int(max(layer.weight.shape[1] for layer in self.layers))


@dataclass(frozen=True)
class Sample:
    """What one pass over the rows leaves.

    Attributes
    ----------
    labels : the groups that are compared, sorted
    moments : of ``[h, y]`` over the training rows, h the inputs of the last layer; the pooled ones are of all rows
    layer, head : the last layer, and what maps its output to the prediction
    training, judging : rows that fit and rows that judge, the same when no row could be held out
    judged_on : "validation", "heldout" or "train"
    error_against : "labels", or "predictions" of the untouched model
    inner : by name, moments of the inputs of other layers
    sizes, judging_sizes : (G,) training and validation rows of each group
    seed : of the split that holds rows out
    partial : whether it is of a part of the rows (:func:`hold`)
    set_aside : groups too small to be compared, with their rows; their codes follow those of ``labels``
    """

    labels: tuple[Label, ...]
    moments: GroupMoments
    layer: LinearLayer
    head: Head
    training: Rows
    judging: Rows
    judged_on: str
    error_against: str
    inner: Mapping[str, GroupMoments] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    judging_sizes: tuple[int, ...] = ()
    seed: int = 0
    partial: bool = False
    set_aside: Mapping[Label, int] = field(default_factory=dict)


# --- threads ----------------------------------------------------------------------------------------------------------


class _Pools:
    """What is known of the thread pools while they are limited; guarded by the lock."""

    lock = Lock()
    inside = 0  # Python threads
    before: tuple[tuple[Any, int], ...] = ()  # BLAS libraries, and how many threads they had
    torch_threads = 1
    here = local()  # whether this very Python thread is inside


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """One thread for BLAS and torch where layers are narrower than ``WIDE``; afterwards as many as before.

    The pools of torch and of NumPy's BLAS wait for work by spinning. On small matrices, taken in turn, each spins on
    the cores that the other needs, and two threads are slower than one.

    Several Python threads may be inside at once: the first limits the pools, and the last gives back what the first
    found. Torch keeps a number for each thread, so each sets and resets its own.
    """
    if width >= WIDE or getattr(_Pools.here, "inside", False):
        yield
        return
    torch = sys.modules.get("torch")
    with _Pools.lock:
        if _Pools.inside == 0:
            libraries = ThreadpoolController().select(user_api="blas").lib_controllers
            _Pools.before = tuple((library, library.num_threads) for library in libraries)
            _Pools.torch_threads = 1 if torch is None else torch.get_num_threads()
            for library in libraries:
                _set_threads(library, 1)
        _Pools.inside += 1
    if torch is not None:
        torch.set_num_threads(1)
    _Pools.here.inside = True
    try:
        yield
    finally:
        _Pools.here.inside = False
        if torch is not None:
            torch.set_num_threads(_Pools.torch_threads)
        with _Pools.lock:
            _Pools.inside -= 1
            for library, threads in _Pools.before if _Pools.inside == 0 else ():
                _set_threads(library, threads)


def _set_threads(library: Any, threads: int) -> None:
    # threadpoolctl leaves OpenBLAS to the Python thread that set it first, and silently does nothing for the others.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(threads)


# --- what a fit starts from ----------------------------------------------------------------------------------------


def prepare(
    adapter: ModelAdapter | Callable[[], ModelAdapter],
    data: Data,
    *,
    validation: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
    validation_fraction: float = 0.25,
    seed: int = 0,
    effort: Effort | None = None,
    classes: Sequence[Any] | None = None,
    min_group_rows: int = MIN_GROUP_ROWS,
) -> Setting:
    """Check rows and model.

    Parameters
    ----------
    adapter : of the model, or a function that makes it once the rows are known to be good
    data, validation : as :meth:`esvdfair.ESVDFair.fit` takes them
    missing, batch_size, validation_fraction, min_group_rows : as in :class:`esvdfair.ESVDFair`
    classes : the two that a classifier tells apart, where ``adapter`` is a function; else it knows them
    """
    classes = adapter.classes if isinstance(adapter, ModelAdapter) else classes
    reading: dict[str, Any] = {"missing": missing, "batch_size": batch_size, "classes": classes}
    batches = make_batches(data, **reading)
    apart = None if validation is None else make_batches(Data.of(validation), name="validation", **reading)
    adapter = adapter() if callable(adapter) else adapter
    split = held_out(validation_fraction, seed) if apart is None and validation_fraction else None
    setting = meet(adapter, batches, seed=seed, effort=effort)
    _check_finite(adapter, data.X)
    return replace(setting, validation=apart, split=split, min_group_rows=min_group_rows)


@few_threads(0)  # what it is looked at with is small, however wide it is
def meet(adapter: ModelAdapter, batches: Batches, *, seed: int = 0, effort: Effort | None = None) -> Setting:
    """Let the model meet its first rows; all rows of the setting fit, and the same rows judge."""
    first = next((batch for batch in batches if len(batch.codes)), None)
    if first is None:
        raise ValueError("there are no rows to fit on: the data is empty.")
    probe, labels = first.x, first.y
    width = adapter.n_features
    if width is not None and len(getattr(probe, "shape", ())) == 2 and probe.shape[1] != width:
        raise InputError(f"X has {probe.shape[1]} features, but the model expects {width} features as input.")
    layers = adapter.layers(probe)
    _check_size(layers)
    with np.errstate(over="ignore", invalid="ignore"):  # predictions that are not finite are refused as they come
        head = adapter.head(probe)
    if labels is not None and head.is_affine:
        _notice_logits(adapter, probe, labels)
    effort = effort or Effort()
    if adapter.ridges is not None and effort.ridges in (Effort().ridges, Effort.quick().ridges):
        effort = replace(effort, ridges=adapter.ridges)
    return Setting(adapter, layers, head, batches, None, None, seed, labels is not None, effort, probe)


def _notice_logits(adapter: ModelAdapter, probe: Any, labels: Array) -> None:
    """Warn when labels are 0 and 1 and predictions come closer to them as logits than as they are."""
    labels = labels[:PROBE_ROWS]
    if set(np.unique(labels)) != {0.0, 1.0}:
        return
    prediction = adapter.predict(row_slice(probe, 0, PROBE_ROWS))
    if np.mean((expit(prediction) - labels) ** 2) < np.mean((prediction - labels) ** 2):
        warnings.warn(
            ESVDFairWarning(
                f"The labels are 0 and 1, and the predictions look like logits (from {prediction.min():.3g} to "
                f"{prediction.max():.3g}), so errors against the labels have no meaning. Repair the score with "
                "`output='sigmoid'`."
            ),
            stacklevel=2,
        )


def _notice_units(rows: Rows, head: Head) -> None:
    """Warn when the model predicts the labels worse than their mean does; not of logits, of which was warned."""
    y, p, total = rows.y, rows.prediction, rows.weight.sum()
    binary = head.is_affine and set(np.unique(y)) == {0.0, 1.0}
    if not total > 0 or (binary and np.mean((expit(p) - y) ** 2) < np.mean((p - y) ** 2)):
        return
    mean, other = (float(rows.weight @ values / total) for values in (y, p))
    spread, wide, error = (float(rows.weight @ d**2 / total) ** 0.5 for d in (y - mean, p - other, y - p))
    if error > spread:
        warnings.warn(
            ESVDFairWarning(
                f"The model predicts the labels worse than a constant: they have mean {mean:.3g} and standard "
                f"deviation {spread:.3g}, the predictions {other:.3g} and {wide:.3g}. Check that `y` is in the units "
                "of the predictions."
            ),
            stacklevel=2,
        )


def notice_missing_bias(sample: Sample, prediction: Array) -> None:
    """Warn when a shift of all repaired predictions would lower the error, and the last layer has no bias for it.

    ``prediction`` are those of ``sample.judging``. Of n rows a shift takes 1/n of the error by chance.
    """
    rows = sample.judging
    if sample.layer.bias is not None or sample.error_against != "labels" or not len(rows):
        return
    share = rows.weight / rows.weight.sum()
    shift, before = (float(share @ (rows.y - values)) for values in (prediction, rows.prediction))
    rest = float(share @ (rows.y - prediction - shift) ** 2)
    if shift**2 > max(SHIFT_COST, 9 * float(share @ share)) * rest and abs(shift) > abs(before):
        warnings.warn(
            ESVDFairWarning(
                f"The last layer {sample.layer.name!r} has no bias, so the repaired predictions are off by "
                f"{-shift:+.3g} on average, which increases the mean squared error by {shift**2 / rest:.0%}. Add "
                f"{shift:+.3g} to the predictions, or give the layer a bias."
            ),
            stacklevel=2,
        )


def _check_size(layers: Sequence[LinearLayer]) -> None:
    """Raise where weights are so large that squares of sums of them leave float64."""
    for layer in layers:
        largest = float(np.abs(layer.weight).max(initial=0.0))
        if largest > LARGEST:
            raise ValueError(
                f"the layer {layer.name!r} has weights as large as {largest:.3g}, whose squares leave float64; check "
                "the model."
            )


def _check_finite(adapter: ModelAdapter, X: Any) -> None:
    # A scikit-learn pipeline may fill in missing values, and says itself when it cannot.
    if adapter.trees or type(adapter.model).__module__.startswith("sklearn"):
        return
    for x in _each(X):
        x = x.data if hasattr(x, "tocsr") else x  # of a sparse matrix what is stored
        floats = str(getattr(x, "dtype", "")).startswith(("float", "torch.float"))
        if floats and (bad := count_not_finite(x)):
            raise InputError(f"`X` contains {bad} NaN or infinite values. Fill them in or drop those rows.")


def _each(x: Any) -> list[Any]:
    """The inputs, which are one or several."""
    several = several_inputs(x)
    return [x] if several is None else list(several.values())


# --- one pass ------------------------------------------------------------------------------------------------------


def draw(setting: Setting, weights: Weights | None = None, *, inner: Sequence[str] = ()) -> Sample:
    """Run the model once over the training rows, and once over the validation rows when there are any.

    Parameters
    ----------
    weights : ``{name: (W, b)}`` put into a copy of the model first
    inner : names of layers whose input moments are gathered too
    """
    run, least = _Pass(setting, weights, inner), setting.min_group_rows
    if setting.validation is not None:
        seen, apart = run.over(setting.batches, None, judged_elsewhere=True), run.over(setting.validation, _everything)
        return run.sample(seen, (apart, 1), "validation", _large(seen.counts(0), apart.counts(1), least=least))
    seen = run.over(setting.batches, setting.split, judged_elsewhere=setting.split is not None)
    if setting.split is None:
        return run.sample(seen, None, "train", _large(seen.counts(0), least=least))
    groups = _large(seen.counts(0), seen.counts(1), least=least)
    rows = seen.counts(0) + seen.counts(1)
    everybody = least >= FEWEST_ROWS or len(groups) == len(_large(rows, least=least))
    if len(groups) >= 2 and everybody:
        return run.sample(seen, (seen, 1), "heldout", groups)
    _check_enough(rows, _large(rows, least=least), least)
    warnings.warn(
        ESVDFairWarning(
            f"Too few rows to hold some out (`min_group_rows={least}`), so all rows are used both to fit and to "
            "choose. Expect worse results on new data; pass `validation`, or more rows."
        ),
        stacklevel=2,
    )
    whole = run.over(setting.batches, None)
    return run.sample(whole, None, "train", _large(whole.counts(0), least=least))


def _large(*counts: Counter[Label], least: int) -> tuple[Label, ...]:
    """The groups that have at least so many rows in all of the counts, sorted."""
    return tuple(sorted((g for g in counts[0] if min(each[g] for each in counts) >= least), key=sort_key))


def draw_judging(setting: Setting) -> tuple[Rows, tuple[Label, ...], dict[Label, int]]:
    """Run the model over test rows: these, the groups that are compared, and those set aside with their rows."""
    seen = _Pass(setting, None, ()).over(setting.batches, _everything)
    judged = _large(seen.counts(1), least=setting.min_group_rows)
    _check_enough(seen.counts(1), judged, setting.min_group_rows)
    others = seen.others(judged)
    return seen.rows(1, judged, others), judged, {label: seen.counts(1)[label] for label in others}


def hold(setting: Setting, sample: Sample) -> Setting:
    """The setting with a bounded set of its rows in memory, inputs and all; itself when few are in memory already.

    The rows are those with the smallest hash keys of their group, as many of each as ``effort.training_rows`` and
    ``effort.scanned_bytes`` allow, weighted to stand for all: one more pass over the batches.
    """
    effort, size = setting.effort, sum(getattr(x, "nbytes", 0) for x in _each(setting.probe))
    per_row = size / max(row_count(setting.probe), 1)
    most = min(effort.training_rows, int(effort.scanned_bytes / per_row) if per_row else effort.training_rows)
    parts = [(setting.batches, sample.sizes)]
    if setting.validation is not None:
        parts.append((setting.validation, sample.judging_sizes))
    shares = [{k: most / len(sizes) / n for k, n in zip(sample.labels, sizes, strict=True)} for _, sizes in parts]
    shares = [share | dict.fromkeys(sample.set_aside, 1.0) for share in shares]
    if all(isinstance(batches, ArrayBatches) for batches, _ in parts) and min(min(s.values()) for s in shares) >= 1.0:
        return setting
    held = [_held(batches, share, setting.seed) for (batches, _), share in zip(parts, shares, strict=True)]
    partial = min(min(share.values()) for share in shares) < 1.0
    return replace(setting, batches=held[0], validation=held[1] if len(held) > 1 else None, partial=partial)


def _held(batches: Batches, share: Mapping[Label, float], seed: int) -> list[Batch]:
    """Of each group about this part of the rows, by a hash of their number."""
    kept = []
    for batch in batches:
        groups = [group_of(label, batch.group_parts) for label in batch.labels]
        part = np.array([min(share[group], 1.0) for group in groups])[batch.codes]
        index = np.flatnonzero(row_key(batch.row_id, seed + 2) < part)
        if len(index):
            weight = np.ones(len(part)) if batch.weight is None else batch.weight
            kept.append(replace(batch, weight=weight / part).take(index))
    return kept


def _everything(row_id: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.ones(len(row_id), dtype=bool)


def _nothing(row_id: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.zeros(len(row_id), dtype=bool)


@dataclass(frozen=True)
class _Seen:
    """What a pass has seen: moments of the rows that fit, and kept rows, first those that fit, then the others.

    Moments and kept rows are those of ``cells``, which are the groups themselves when ``group_parts`` is 0.
    """

    cells: tuple[Label, ...]
    group_parts: int
    moments: GroupMoments
    inner: Mapping[str, GroupMoments]
    kept: tuple[Keeper, Keeper]
    digest: bytes

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """The groups."""
        return tuple(sorted({group_of(cell, self.group_parts) for cell in self.cells}, key=sort_key))

    def cell_rows(self, part: int) -> Rows:
        """Kept rows, their codes those of cells."""
        return replace(self.kept[part].rows(self.cells), kept_of=self.digest)

    def rows(self, part: int, judged: tuple[Label, ...], others: tuple[Label, ...]) -> Rows:
        """Kept rows, their codes those of groups: first those that are compared, then the others."""
        return self.grouped(self.cell_rows(part), judged, others)

    def grouped(self, rows: Rows, judged: tuple[Label, ...], others: tuple[Label, ...]) -> Rows:
        """Rows of cells as rows of groups."""
        labels = (*judged, *others)
        if not len(rows):
            return rows
        if not self.group_parts:
            position = np.array([labels.index(label) for label in self.cells], dtype=np.intp)
            return replace(rows, codes=position[rows.codes])
        pairs = [split_cell(cell, self.group_parts) for cell in self.cells]
        strata = sorted({stratum for _, stratum in pairs}, key=sort_key)
        group, stratum = np.array([(labels.index(g), strata.index(s)) for g, s in pairs], dtype=np.intp).T
        codes, strata_codes = group[rows.codes], stratum[rows.codes]
        weight, compared = np.zeros(len(codes)), codes < len(judged)
        weight[compared] = adjusted_weights(codes[compared], len(judged), strata_codes[compared], rows.weight[compared])
        return replace(rows, codes=codes, adjusted=weight, strata=strata_codes)

    def counts(self, part: int) -> Counter[Label]:
        """Rows of each group."""
        counts = Counter[Label]()
        for cell, (rows, _) in self.kept[part].counts.items():
            counts[group_of(cell, self.group_parts)] += rows
        return counts

    def others(self, judged: tuple[Label, ...], *more: Label) -> tuple[Label, ...]:
        """The groups that are not compared."""
        return tuple(sorted({*self.labels, *more} - {*judged}, key=sort_key))

    def moments_of(self, moments: GroupMoments, judged: tuple[Label, ...]) -> GroupMoments:
        """Moments of cells as moments of the groups that are compared; the pooled ones stay those of all rows."""
        if not moments.labels:
            return moments
        return moments.adjusted(self.group_parts, judged) if self.group_parts else moments.only(judged)


class _Pass:
    """A model on its way over batches."""

    def __init__(self, setting: Setting, weights: Weights | None, inner: Sequence[str]) -> None:
        self.setting, self.inner, self.edited = setting, tuple(inner), bool(weights)
        self.adapter = setting.adapter.replace(weights) if weights else setting.adapter

    def over(self, batches: Batches, split: Splitter | None, *, judged_elsewhere: bool = False) -> _Seen:
        """Run over all batches; ``split`` tells the rows that do not fit, ``judged_elsewhere`` that no other judges."""
        setting, last, split = self.setting, self.setting.last, split or _nothing
        moments, inner = GroupMoments(), {name: GroupMoments() for name in self.inner}
        effort = setting.effort
        few = effort.transport_rows if setting.moments_alone and judged_elsewhere else None
        kept = Keeper(effort.training_rows, setting.seed, few=few), Keeper(effort.judging_rows, setting.seed)
        group_parts = 0
        digest = Digest()
        if isinstance(batches, ArrayBatches):
            whole = batches.whole()
            out = split(whole.row_id)
            for keeper, chosen in zip(kept, (~out, out), strict=True):
                keeper.expect(whole, chosen)
        later = kept[0].keeps_all  # then moments are gathered once, from what is kept (`_in_order`)
        # Of a part of the rows, features of an inner layer would serve nobody.
        alone = self.inner if len(self.inner) == 1 and later is not False else ()
        for batch in batches:
            rows = len(batch.codes)
            inputs, prediction = self._captured(batch)
            check_prediction(prediction, rows)
            group_parts = batch.group_parts
            y = self._labels(batch, prediction)
            _check_unit(y, prediction)
            digest.add(batch)
            out = split(batch.row_id)
            weight = (~out).astype(np.float64) if batch.weight is None else batch.weight * ~out
            features = inputs[last.name]
            check_features(last, features, rows)
            beside = [inputs[name] for name in alone if name != last.name]
            beside = [each for each in beside if each.ndim == 2 and each.shape[0] == rows]
            for name, found in inner.items() if not (later and beside) else ():
                found.update_codes(inputs[name], batch.labels, batch.codes, weight)
            if not later:
                moments.update_codes(features, batch.labels, batch.codes, weight, beside=y)
            kept[0].add(batch, ~out, [*beside, features], prediction, y)
            kept[1].add(batch, out, [features], prediction, y)
        if not any(keeper.counts for keeper in kept):
            raise ValueError("there are no rows to fit on: the data is empty.")
        cells = tuple(sorted(set(kept[0].counts) | set(kept[1].counts), key=sort_key))
        return _Seen(cells, group_parts, moments, inner, kept, digest.value)

    def sample(
        self, seen: _Seen, judging: "tuple[_Seen, int] | None", judged_on: str, judged: tuple[Label, ...]
    ) -> Sample:
        setting, cells = self.setting, seen.cell_rows(0)
        moments, inner = seen.moments, dict(seen.inner)
        if len(cells) == sum(seen.counts(0).values()) and len(cells):
            moments = _in_order(cells, seen.cells, cells.y)
            if cells.inner is not None:
                inner = dict.fromkeys(inner, _in_order(replace(cells, features=cells.inner), seen.cells))
        counts = [seen.counts(0)] if judging is None else [seen.counts(0), judging[0].counts(judging[1])]
        everybody = Counter[Label]()
        for each in counts:
            everybody += each
        others = seen.others(judged, *everybody)
        _check_enough(everybody, judged, setting.min_group_rows)
        training = seen.grouped(replace(cells, inner=None), judged, others)
        if setting.has_labels and not self.edited and not setting.partial:
            _notice_units(training, setting.head)
        return Sample(
            labels=judged,
            moments=seen.moments_of(moments, judged),
            layer=setting.last,
            head=setting.head,
            training=training,
            judging=training if judging is None else judging[0].rows(judging[1], judged, others),
            judged_on=judged_on,
            error_against="labels" if setting.has_labels else "predictions",
            inner={name: seen.moments_of(found, judged) for name, found in inner.items()},
            sizes=tuple(counts[0][label] for label in judged),
            judging_sizes=tuple(counts[-1][label] for label in judged),
            seed=setting.seed,
            partial=setting.partial,
            set_aside={label: everybody[label] for label in others},
        )

    def _captured(self, batch: Batch) -> tuple[dict[str, Any], Any]:
        """Inputs of the layers, and the prediction."""
        rows, names = len(batch.codes), [*self.inner, self.setting.last.name]
        inputs, prediction = self.adapter.capture(_padded(batch), names)
        seen = max(len(prediction), 1)
        # A layer may see several rows of each, one below the other.
        return {name: found[: len(found) * rows // seen] for name, found in inputs.items()}, prediction[:rows]

    def _labels(self, batch: Batch, prediction: Any) -> Array:
        """(rows,) labels, or what the untouched model predicts."""
        if self.setting.has_labels and batch.y is not None:
            return batch.y
        if self.edited:
            prediction = self.setting.adapter.predict(_padded(batch))
        return np.asarray(take_rows(prediction, np.arange(len(batch.codes))), dtype=np.float64)


def _padded(batch: Batch) -> Any:
    """The inputs, with the last row repeated up to a whole number of strips.

    A product of float32 matrices rounds the last few rows otherwise than the same rows further up, so that what a model
    says of a row would hang on where a batch ends.
    """
    rows = len(batch.codes)
    if rows % STRIP_ROWS == 0:
        return batch.x
    return take(batch.x, np.minimum(np.arange(rows + -rows % STRIP_ROWS), rows - 1))


def _in_order(rows: Rows, labels: tuple[Label, ...], beside: Array | None = None) -> GroupMoments:
    """The moments again, from rows that are all there, in their own order: no bit hangs on batches or ranks."""
    moments = GroupMoments()
    for start in range(0, len(rows), IN_ORDER_ROWS):
        part = slice(start, start + IN_ORDER_ROWS)
        y = None if beside is None else beside[part]
        moments.update_codes(rows.features[part], labels, rows.codes[part], rows.weight[part], beside=y)
    return moments


def _check_enough(rows: Counter[Label], judged: Sequence[Label], least: int) -> None:
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


def check_features(layer: LinearLayer, features: Any, rows: int) -> None:
    if features.ndim != 2 or features.shape[0] != rows:
        raise ValueError(
            f"the last linear layer {layer.name!r} takes inputs of shape {tuple(features.shape)} for {rows} rows; "
            "a repair of the output needs one feature vector for each row."
        )


def check_prediction(prediction: Any, rows: int) -> None:
    bad = count_not_finite(prediction)
    if bad:
        raise ValueError(
            f"the model predicts NaN or infinite values for {bad} of {rows} rows; check X for missing values and the "
            "model's weights."
        )


def _check_unit(y: Array, prediction: Any) -> None:
    """Raise where labels or predictions are so large that squares leave float64."""
    for name, values in (("y", y), ("the prediction", prediction)):
        if len(values) and not (largest := float(abs(values).max())) <= LARGEST:
            raise ValueError(
                f"{name} is as large as {largest:.3g}, and sums of squares leave float64; give it in another unit."
            )
