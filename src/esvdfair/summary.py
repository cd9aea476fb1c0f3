"""Model + batches -> Summary: a bounded sample of rows, and group moments of all others. Summaries of parts add up.

Every row is in exactly one of the two, so training rows, folds and validation rows are chosen at the solve and one
summary serves every seed. Which rows are kept depends on a hash of their ids alone, not on order, batches or parts.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from threading import Lock, local
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from esvdfair.batches import Batch, Batches, Data, Rows, make_batches, row_key
from esvdfair.core import array_file
from esvdfair.core.checks import Label, check_labels, count_not_finite, several_inputs, sort_key, take_rows
from esvdfair.core.ks import split_cell
from esvdfair.core.moments import FIELDS, GroupMoments
from esvdfair.core.quadratic import Head
from esvdfair.exceptions import InputError
from esvdfair.models import adapt
from esvdfair.models.base import LinearLayer, ModelAdapter, OutputLayer
from esvdfair.models.readouts import Readout

Array = NDArray[np.float64]

KEPT_ROWS = 160_000
"""Rows that a summary keeps at most; of the groups, the small ones whole."""

KEPT_BYTES = 2**30
"""Bytes of features that it keeps at most."""

KEEP_SEED = 12345
"""Of the hash by which rows are kept: one for all summaries, so that they add up."""

LARGEST = 1e120
"""Labels, predictions and weights beyond it are refused: squares of sums of their squares leave float64."""

WIDE = 768
"""Layers of this width on are large enough for threads to pay."""


@dataclass(frozen=True, eq=False)
class Summary:
    """All that a repair of the output layer needs to know of some rows. Add summaries of parts with ``+`` or ``sum``.

    It contains rows (features, predictions, labels and groups of people): treat it as the data.

    Attributes
    ----------
    model : fingerprint of the model
    output : its output layer and head; None while there are no rows
    columns, n_features : names of the input columns, where they have some, and their number, where it is known
    labelled, weighted, adjusted : whether rows have labels, weights, strata
    bound : most rows that are kept
    groups, strata : labels, sorted; one stratum ``""`` where there are none
    rows, mass : (G, S) number of rows and sum of weights, of all rows
    cut : (G,) rows with a larger hash key are not kept
    kept : the rows that are kept
    rest : moments of ``[features, y]`` over the rows that are not

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import ESVDFair, summarise
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 2000)
    >>> X = rng.normal(size=(2000, 3)) + a[:, None]
    >>> y = X.sum(axis=1) + rng.normal(size=2000)
    >>> model = LinearRegression().fit(X, y)
    >>> parts = [summarise(model, X[i], y[i], sensitive_features=a[i], row_id=i)
    ...          for i in np.array_split(np.arange(2000), 4)]
    >>> sum(parts)
    Summary(2,000 rows, of which it contains 2,000; groups 0: 1,017, 1: 983)
    >>> fair = ESVDFair(model, target_ks=0.2).fit_summary(sum(parts))
    """

    model: str
    bound: int
    output: OutputLayer | None = None
    columns: tuple[str, ...] = ()
    n_features: int | None = None
    labelled: bool = False
    weighted: bool = False
    adjusted: bool = False
    groups: tuple[Label, ...] = ()
    strata: tuple[Label, ...] = ()
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    mass: Array = field(default_factory=lambda: np.zeros((0, 0)))
    cut: Array = field(default_factory=lambda: np.zeros(0))
    kept: Rows = field(default_factory=lambda: Rows.none(0))
    rest: GroupMoments = field(default_factory=GroupMoments)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label}: {n:,}" for label, n in list(self.group_rows.items())[:10])
        more = ", …" if len(self.groups) > 10 else ""
        total = int(self.rows.sum())
        return f"Summary({total:,} rows, of which it contains {len(self.kept):,}; groups {sizes or 'none'}{more})"

    @property
    def group_rows(self) -> dict[Label, int]:
        """Number of rows of every group."""
        return dict(zip(self.groups, self.rows.sum(axis=1).tolist(), strict=True))

    @property
    def complete(self) -> bool:
        """Whether all rows are kept."""
        return len(self.kept) == int(self.rows.sum())

    def __add__(self, other: Any) -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        _check_alike(self, other)
        if self.output is None or other.output is None:
            return other if self.output is None else self
        groups, strata = (
            tuple(sorted({*getattr(self, name), *getattr(other, name)}, key=sort_key)) for name in ("groups", "strata")
        )
        for labels in (groups, strata):
            check_labels(labels)
        first, second = self._relabelled(groups, strata), other._relabelled(groups, strata)
        return replace(
            first,
            output=min(self.output, other.output, key=lambda known: repr(known.head)),
            rows=first.rows + second.rows,
            mass=first.mass + second.mass,
            cut=np.minimum(first.cut, second.cut),
            kept=first.kept.joined(second.kept),
            rest=GroupMoments().merge(self.rest).merge(other.rest),
        ).pruned()

    def __radd__(self, other: Any) -> "Summary":
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def _relabelled(self, groups: tuple[Label, ...], strata: tuple[Label, ...]) -> "Summary":
        """With codes and tables for more groups and strata."""
        group, stratum = (
            np.array([new.index(label) for label in old], dtype=np.intp)
            for old, new in ((self.groups, groups), (self.strata, strata))
        )
        rows, mass = np.zeros((len(groups), len(strata)), dtype=np.int64), np.zeros((len(groups), len(strata)))
        rows[np.ix_(group, stratum)], mass[np.ix_(group, stratum)] = self.rows, self.mass
        cut = np.ones(len(groups))
        cut[group] = self.cut
        assert self.kept.strata is not None
        kept = replace(self.kept, codes=group[self.kept.codes], strata=stratum[self.kept.strata])
        return replace(self, groups=groups, strata=strata, rows=rows, mass=mass, cut=cut, kept=kept)

    def pruned(self) -> "Summary":
        """With the rows that are too many moved into ``rest``.

        Of every group those with the smallest keys stay. Their number only falls as parts are added, so the order in
        which they are added does not matter.
        """
        assert self.kept.id is not None
        if len(np.unique(self.kept.id)) < len(self.kept):
            raise InputError(
                "a row is in the sum twice: the same part was added twice, or two parts have the same ids. Give each "
                "part its own `part`, or each row its own `row_id`."
            )
        stays, cut = _smallest(self.kept.id, self.kept.codes, self.cut, self.rows.sum(axis=1), self.bound)
        if stays.all():
            return replace(self, cut=cut)
        gone, rest = self.kept.take(~stays), GroupMoments().merge(self.rest)
        rest.update_codes(gone.features, self.groups, gone.codes, gone.weight, beside=gone.y)
        return replace(self, cut=cut, kept=self.kept.take(stays), rest=rest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file: plain arrays and JSON, no pickle. It contains rows: treat it as the data."""
        _save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Summary":
        """Read what :meth:`save` wrote. A file of another kind, or a damaged one: ValueError."""
        return _load(path)


def _check_alike(one: Summary, other: Summary) -> None:
    """Raise unless two summaries are of the same model and of rows of one kind."""
    if one.model != other.model:
        raise InputError("these are summaries of different models; summarise all parts with the same model.")
    if one.output is None or other.output is None:
        return
    for name in ("columns", "n_features", "labelled", "weighted", "adjusted", "bound"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            raise InputError(f"summaries differ in `{name}` ({mine} and {theirs}); summarise all parts alike.")
    first, second = one.output, other.output
    same = first.layer.name == second.layer.name and first.added == second.added
    same = same and (first.readout is second.readout or (first.readout or Readout(())).same_as(second.readout))
    # A head is found by trying values, and differs between batches: in the last digits, or as knots of a table do.
    prediction = np.concatenate([one.kept.prediction[:100], other.kept.prediction[:100]])
    unit = (1e-4 if first.head.kind == "monotone" else 1e-6) * max(
        float(np.ptp(prediction)), 1e-6 * float(np.abs(prediction).max(initial=0.0))
    )
    if same:
        z = first.head.inverse(prediction)
        same = bool(np.abs(first.head.apply(z) - second.head.apply(z)).max(initial=0.0) <= unit)
    if not same:
        raise InputError("these are summaries of different outputs of the model; give all parts one `output`.")


def level(counts: Sequence[int] | NDArray[np.int64], bound: int) -> int:
    """The largest s with ``Σ min(n_g, s) ≤ bound``: how many rows of a group may be kept."""
    left, sizes = bound, sorted(int(n) for n in counts)
    if sum(sizes) <= bound:
        return sizes[-1] if sizes else 0
    for i, n in enumerate(sizes):
        share = left // (len(sizes) - i)
        if n > share:
            return share
        left -= n
    raise AssertionError("unreachable")


def _smallest(
    row_id: NDArray[np.uint64], codes: NDArray[np.intp], cut: Array, counts: NDArray[np.int64], bound: int
) -> tuple[NDArray[np.bool_], Array]:
    """Which rows stay, those of the smallest keys of every group, and the cut of every group after that."""
    key = row_key(row_id, KEEP_SEED)
    order = np.lexsort((row_id, key, codes))
    rank = np.empty(len(order), dtype=np.intp)
    rank[order] = np.arange(len(order)) - np.searchsorted(codes[order], codes[order])
    stays = (rank < level(counts, bound)) & (key < cut[codes])
    cut = cut.copy()
    np.minimum.at(cut, codes[~stays], key[~stays])
    return stays, cut


# --- files ------------------------------------------------------------------------------------------------------------


NOTICE = "This file contains rows (features, predictions, labels and groups of people). Treat it as the data."
_PLAIN = ("model", "bound", "columns", "n_features", "labelled", "weighted", "adjusted", "groups", "strata")
_TABLES = ("rows", "mass", "cut")
_KEPT = ("features", "prediction", "y", "codes", "weight", "strata", "id")


def _save(summary: Summary, path: str | os.PathLike[str]) -> None:
    """Write a summary; the file appears whole or not at all."""
    header: dict[str, Any] = {"notice": NOTICE, **{name: getattr(summary, name) for name in _PLAIN}}
    arrays: dict[str, NDArray[Any]] = {}
    if (known := summary.output) is not None:
        header["output"] = {
            "layer": [known.layer.name, known.layer.index], "head": _plain(known.head), "added": known.added,
            "readout": None if known.readout is None else asdict(known.readout),
        }  # fmt: skip
        header["rest"] = summary.rest.labels
        arrays = {name: getattr(summary, name) for name in _TABLES}
        arrays |= {f"kept_{name}": getattr(summary.kept, name) for name in _KEPT}
        arrays |= {f"rest_{name}": getattr(summary.rest, name) for name in FIELDS if summary.rest.labels}
        arrays["layer_weight"] = known.layer.weight
        arrays |= {} if known.layer.bias is None else {"layer_bias": known.layer.bias}
    array_file.write(path, "summary", 1, header, arrays)


def _load(path: str | os.PathLike[str]) -> Summary:
    """Read a summary; ValueError for a file of another kind, or a damaged one."""
    header, arrays = array_file.read(path, "summary", 1)
    try:
        return _loaded(header, arrays)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise array_file.damaged(path, "summary", error) from error


def _loaded(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Summary:
    plain: dict[str, Any] = {name: header[name] for name in _PLAIN} | {"columns": tuple(header["columns"])}
    for name in ("groups", "strata"):
        plain[name] = tuple(array_file.label_from_json(label) for label in header[name])
    if "output" not in header:
        return Summary(**plain)
    known = header["output"]
    name, index = known["layer"]
    layer = LinearLayer(name, index, arrays["layer_weight"], arrays.get("layer_bias"))
    head = Head(**{name: _arrays(value) for name, value in known["head"].items()})
    readout = None if known["readout"] is None else Readout.from_json(known["readout"])
    output = OutputLayer(layer, head, readout, None if known["added"] is None else tuple(known["added"]))
    kept = Rows(**{name: arrays[f"kept_{name}"] for name in _KEPT})
    shape, tables = (len(plain["groups"]), len(plain["strata"])), {name: arrays[name] for name in _TABLES}
    lengths = {len(getattr(kept, name)) for name in _KEPT}
    right = tables["rows"].shape == tables["mass"].shape == shape and tables["cut"].shape == shape[:1]
    if len(lengths) != 1 or not right or kept.features.shape[1:] != layer.weight.shape[1:]:
        raise ValueError("its arrays have other shapes than they should")
    for codes, count in ((kept.codes, shape[0]), (kept.strata, shape[1])):
        if codes is None or (len(codes) and not 0 <= codes.min() <= codes.max() < count):
            raise ValueError("its rows are of groups that it does not have")
    if not all(np.isfinite(getattr(kept, name)).all() for name in _KEPT):
        raise ValueError("its rows are not finite")
    labels = [array_file.label_from_json(label) for label in header["rest"]]
    rest = GroupMoments.from_file(labels, {name: arrays[f"rest_{name}"] for name in FIELDS if labels})
    return Summary(**plain | tables, output=output, kept=kept, rest=rest)


def _plain(head: Head) -> dict[str, Any]:
    """The fields of a head as JSON can hold them."""
    return {
        name: [part.tolist() for part in value] if isinstance(value, tuple) else value
        for name, value in asdict(head).items()
    }


def _arrays(value: Any) -> Any:
    return tuple(np.array(part) for part in value) if isinstance(value, list) else value


# --- making one ----------------------------------------------------------------------------------------------------


def summarise(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any = None,
    sample_weight: Any = None,
    control_features: Any = None,
    row_id: Any = None,
    part: int | str = 0,
    output: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
    rows: int = KEPT_ROWS,
    group_rows: Mapping[Label, int] | None = None,
) -> Summary:
    """Run the model over some rows, and summarise what :meth:`ESVDFair.fit_summary` needs of them.

    Parameters
    ----------
    model, X, y, sensitive_features, sample_weight, control_features : as in :meth:`ESVDFair.fit`
    row_id : (rows,) whole numbers or texts, one for each row
        With it, the repair does not depend on the order of rows or on how they are divided into parts. A whole number i
        is the row at position i of part 0.
    part : int or str
        Names the part, where there is no ``row_id``: rows are then identified by the part and their position in it.
    output, missing, batch_size : as in :class:`ESVDFair`
    rows : most rows to keep, the same for all parts
    group_rows : {group: rows} of *all* parts, from a first count
        A part then keeps only its share, so that little is sent around.

    Returns
    -------
    Summary
        ``a + b`` and ``sum(parts)`` are summaries of all their rows. A part may have no rows.
    """
    from esvdfair.models import fingerprint

    adapter = model if isinstance(model, ModelAdapter) else adapt(model, output=output)
    data = Data(X, y, sensitive_features, sample_weight, control_features)
    batches = make_batches(
        data, missing=missing, batch_size=batch_size, classes=adapter.classes, row_id=row_id, part=part
    )
    return gather(adapter, batches, rows=rows, group_rows=group_rows, model=fingerprint(adapter.model))


class Watch(Protocol):
    """Someone who looks at inputs of other layers as they pass."""

    names: Sequence[str]

    def add(self, batch: Batch, inputs: Mapping[str, Any]) -> None: ...


def gather(
    adapter: ModelAdapter,
    batches: Batches,
    *,
    rows: int = KEPT_ROWS,
    group_rows: Mapping[Label, int] | None = None,
    model: str = "",
    original: ModelAdapter | None = None,
    watch: Watch | None = None,
) -> Summary:
    """Summarise batches, read once.

    Parameters
    ----------
    original : whose predictions are the labels where there are none; default ``adapter``
    watch : gets the inputs of the layers that it names
    """
    stream = iter(batches)
    first = next((batch for batch in stream if len(batch.codes)), None)
    if first is None:
        return Summary(model, rows)
    with few_threads(0):  # what the model is looked at with is small, however wide it is
        output, widest = _look(adapter, first.x)
    bound = max(min(rows, KEPT_BYTES // (8 * output.layer.weight.shape[1])), 2)
    found = _Gathered(first, bound, group_rows or {})
    names = [*(() if watch is None else watch.names), output.layer.name]
    with few_threads(widest):
        for batch in chain([first], stream):
            if not len(batch.codes):
                continue
            _check_finite(adapter, batch.x)
            inputs, prediction = adapter.capture(batch.x, names)
            _check_prediction(prediction, len(batch.codes))
            features = inputs[output.layer.name]
            _check_features(output.layer, features, len(batch.codes))
            y = batch.y
            if y is None:
                y = prediction if original is None else original.predict(batch.x)
                y = np.asarray(take_rows(y, np.arange(len(batch.codes))), dtype=np.float64)
            _check_unit(y, prediction)
            found.add(batch, features, prediction, y)
            if watch is not None:
                watch.add(batch, inputs)
    return found.summary(model, output)


class _Gathered:
    """A summary that grows batch by batch. Groups and strata are numbered in the order in which they come."""

    def __init__(self, first: Batch, bound: int, group_rows: Mapping[Label, int]) -> None:
        self.labelled, self.weighted, self.adjusted = first.y is not None, False, bool(first.group_parts)
        names = tuple(getattr(first.x, "columns", ()))
        self.columns = names if all(isinstance(name, str) for name in names) else ()
        shape: tuple[int, ...] = tuple(getattr(first.x, "shape", ()))
        self.n_features = int(shape[1]) if len(shape) > 1 else None
        self.bound, self._shares = bound, _shares(group_rows, bound)
        self.groups: list[Label] = []
        self.strata: list[Label] = []
        self.rows: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.mass: Array = np.zeros((0, 0))
        self.cut: Array = np.zeros(0)
        self.rest = GroupMoments()
        self._columns: dict[str, NDArray[Any]] = {}
        self._size = 0

    def add(self, batch: Batch, features: Any, prediction: Any, y: Array) -> None:
        if (batch.y is not None) != self.labelled:
            raise ValueError("some batches have labels and some have none; give all rows labels, or none.")
        self.weighted |= batch.weight is not None
        codes, strata = self._numbered(batch)
        weight = np.ones(len(codes)) if batch.weight is None else batch.weight
        present = weight > 0
        np.add.at(self.rows, (codes[present], strata[present]), 1)
        np.add.at(self.mass, (codes[present], strata[present]), weight[present])
        stays = present & (row_key(batch.row_id, KEEP_SEED) < self.cut[codes])
        if (goes := present & ~stays).any():
            self.rest.update_codes(features, self.groups, codes, weight * goes, beside=y)
        index = np.flatnonzero(stays)
        columns = {
            "features": take_rows(features, index), "prediction": take_rows(prediction, index).astype(np.float64),
            "y": y[index], "codes": codes[index], "weight": weight[index], "strata": strata[index],
            "id": batch.row_id[index].astype(np.uint64),
        }  # fmt: skip
        self._put(columns, len(index))
        if self._size > self.bound + self.bound // 4:
            self._prune()

    def _numbered(self, batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(rows,) codes of groups and of strata; the tables grow with them."""
        parts = batch.group_parts
        pairs = [split_cell(label, parts) if parts else (label, "") for label in batch.labels]
        for group, stratum in pairs:
            self.groups += [] if group in self.groups else [group]
            self.strata += [] if stratum in self.strata else [stratum]
        check_labels(self.groups)
        more = len(self.groups) - len(self.rows), len(self.strata) - self.rows.shape[1]
        if any(more):
            self.cut = np.append(self.cut, [self._shares.get(label, 1.0) for label in self.groups[len(self.cut) :]])
            edges = (0, more[0]), (0, more[1])
            self.rows, self.mass = np.pad(self.rows, edges), np.pad(self.mass, edges)
        places = [(self.groups.index(group), self.strata.index(stratum)) for group, stratum in pairs]
        place = np.array(places, dtype=np.intp).reshape(-1, 2)
        return place[batch.codes, 0], place[batch.codes, 1]

    def _put(self, columns: Mapping[str, NDArray[Any]], rows: int) -> None:
        """Copy rows in. Arrays have room for all that may come: memory that is not written to costs nothing."""
        stop = self._size + rows
        for name, values in columns.items():
            room = self._columns.get(name, values[:0])
            dtype = np.result_type(room, values)
            if stop > len(room) or dtype != room.dtype:
                larger = np.empty((max(stop, self.bound + self.bound // 2), *values.shape[1:]), dtype=dtype)
                larger[: self._size] = room[: self._size]
                self._columns[name] = room = larger
            room[self._size : stop] = values
        self._size = stop

    def _kept(self, index: Any = slice(None)) -> Rows:
        return Rows(**{name: values[: self._size][index] for name, values in self._columns.items()})

    def _prune(self) -> None:
        """Move rows that cannot stay into ``rest``."""
        kept = self._kept()
        assert kept.id is not None
        stays, self.cut = _smallest(kept.id, kept.codes, self.cut, self.rows.sum(axis=1), self.bound)
        gone = kept.take(~stays)
        self.rest.update_codes(gone.features, self.groups, gone.codes, gone.weight, beside=gone.y)
        index = np.flatnonzero(stays)
        for column in self._columns.values():
            for start in range(0, len(index), 8192):  # forwards, so that nothing is written over before it is read
                part = index[start : start + 8192]
                column[start : start + len(part)] = column[part]
        self._size = len(index)

    def summary(self, model: str, output: OutputLayer) -> Summary:
        """What was gathered, with groups and strata in order."""
        few = self._size < self.bound // 2
        found = Summary(
            model, self.bound, output, self.columns, self.n_features, self.labelled, self.weighted, self.adjusted,
            tuple(self.groups), tuple(self.strata), self.rows, self.mass, self.cut,
            self._kept(np.arange(self._size) if few else slice(None)), self.rest,
        )  # fmt: skip
        groups, strata = (tuple(sorted(labels, key=sort_key)) for labels in (self.groups, self.strata))
        return found._relabelled(groups, strata).pruned()


def _shares(group_rows: Mapping[Label, int], bound: int) -> dict[Label, float]:
    """The key below which rows of each group may be kept, where all of them are counted: hardly more than will be."""
    most = level(list(group_rows.values()), bound)
    return {label: min((most + 6 * most**0.5 + 16) / max(n, 1), 1.0) for label, n in group_rows.items()}


def _look(adapter: ModelAdapter, x: Any) -> tuple[OutputLayer, int]:
    """The output layer of a model, and the inputs of its widest layer."""
    width = adapter.n_features
    if width is not None and len(getattr(x, "shape", ())) == 2 and x.shape[1] != width:
        raise InputError(f"X has {x.shape[1]} features, but the model expects {width} features as input.")
    layers = adapter.layers(x)
    _check_size(layers)
    with np.errstate(over="ignore", invalid="ignore"):  # predictions that are not finite are refused as they come
        output = adapter.output_layer(x)
    return output, int(max(layer.weight.shape[1] for layer in layers))


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


def _check_features(layer: LinearLayer, features: Any, rows: int) -> None:
    if features.ndim != 2 or features.shape[0] != rows:
        raise ValueError(
            f"the last linear layer {layer.name!r} takes inputs of shape {tuple(features.shape)} for {rows} rows; "
            "a repair of the output needs one feature vector for each row."
        )


def _check_prediction(prediction: Any, rows: int) -> None:
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
