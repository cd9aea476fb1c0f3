"""Model + batches -> Summary: what is kept as the rows pass, and what is checked of them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from threading import Lock, local
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from esvdfair.batches import Batch, Batches, Data, Rows, make_batches, row_key
from esvdfair.core.checks import Label, check_labels, count_not_finite, several_inputs, sort_key, take_rows, to_numpy
from esvdfair.core.ks import split_cell
from esvdfair.core.moments import GroupMoments
from esvdfair.exceptions import InputError
from esvdfair.models import adapt
from esvdfair.models.base import LinearLayer, ModelAdapter, OutputLayer
from esvdfair.summary import KEEP_SEED, KEPT_ROWS, Summary, level, prune

Array = NDArray[np.float64]

KEPT_BYTES = 2**27  # bytes of features, in float64, from which a summary keeps fewer rows, ...
FEWEST_KEPT, MOST_BYTES = 40_000, 2**30  # ... but so many rows, unless these take so many bytes
ROUNDING = 2.0**-46  # differences below this part of the numbers depend on the order of summation
LARGEST = 1e120  # labels, predictions and weights beyond it are refused: squares of sums of their squares leave float64


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
    keep_zeros: bool = True,
    batch_size: int = 8192,
    rows: int = KEPT_ROWS,
    group_rows: Mapping[Label, int] | None = None,
) -> Summary:
    """Run the model over some rows, and summarise what :meth:`ESVDFair.fit_summary` needs of them.

    Parameters
    ----------
    model : estimator, torch.nn.Module, str, Path or bytes
        The trained model, the same for all parts.
    X : array-like, DataFrame, tensor, DataLoader or iterable
        Rows of this part, as in :meth:`ESVDFair.fit`. There may be none.
    y : array-like, default=None
        Labels.
    sensitive_features : array-like, DataFrame, dict or str, default=None
        Group of each row.
    sample_weight : array-like, default=None
        Weight of each row.
    control_features : array-like or DataFrame, default=None
        Strata to adjust for.
    row_id : array-like of shape (rows,), default=None
        Whole numbers or strings that are unique over all parts. With them the repair does not depend on the order of
        rows or on how they are divided into parts. A whole number i is the row at position i of part 0.
    part : int or str, default=0
        Name of the part, if there is no ``row_id``: rows are then identified by the part and their position in it.
    output : str, int or callable, default=None
        Which output is the prediction, as in :class:`esvdfair.ESVDFair`.
    missing : {"error", "group"}, default="error"
        Whether a missing attribute value is an error or a group of its own.
    keep_zeros : bool, default=True
        Whether coefficients of a linear model that are 0 stay 0, as in :class:`esvdfair.ESVDFair`.
    batch_size : int, default=8192
        Rows that run through the model at once.
    rows : int, default=160000
        Largest number of rows to keep, the same for all parts.
    group_rows : mapping, default=None
        Number of rows of each group in *all* parts, from a first count. A part then keeps only its share, so that less
        is sent between machines.

    Returns
    -------
    Summary
        ``a + b`` and ``sum(parts)`` are summaries of all their rows.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import summarise
    >>> X, sex = np.random.default_rng(0).normal(size=(400, 3)), np.arange(400) % 2
    >>> model = LinearRegression().fit(X, X[:, 0])
    >>> summarise(model, X[:200], sensitive_features=sex[:200], part=0)
    Summary(200 rows, of which it contains 200; groups 0: 100, 1: 100)
    """
    from esvdfair.models import fingerprint

    adapter = model if isinstance(model, ModelAdapter) else adapt(model, output=output, keep_zeros=keep_zeros)
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
    output: OutputLayer | None = None,
    split: tuple[float, int] | None = None,
) -> Summary:
    """Summarise batches, read once.

    Parameters
    ----------
    original : whose predictions are the labels where there are none; default ``adapter``
    watch : gets the inputs of the layers that it names
    output : the output layer, where it is known; else it is found on the first rows
    split : fraction of rows that a solve holds out, and its seed: rows are put in its order, so that it copies none
    """
    stream = (batch for batch in batches if len(batch.codes))
    first = next(stream, None)
    if first is None:
        return Summary(model, rows)
    # The model is looked at with few rows, however wide it is; predictions that are not finite are refused below.
    with few_threads(0), np.errstate(over="ignore", invalid="ignore"):
        layers = layers_of(adapter, first.x)
        if output is None:
            output = OutputLayer(layers[-1], adapter.head(first.x), adapter.readout, adapter.added)
    row_bytes = 8 * output.layer.weight.shape[1]
    bound = max(min(rows, max(KEPT_BYTES // row_bytes, min(FEWEST_KEPT, MOST_BYTES // row_bytes))), 2)
    found = _Gathered(first, bound, group_rows or getattr(batches, "group_rows", {}))
    names = [*(() if watch is None else watch.names), output.layer.name]
    with few_threads(max(layer.weight.shape[1] for layer in layers)):
        for batch in chain([first], stream):
            _check_inputs(adapter, batch.x)
            inputs, prediction = adapter.capture(batch.x, names)
            features, y = inputs[output.layer.name], batch.y
            _check_captured(output.layer, features, prediction, len(batch.codes))
            if y is None:
                y = prediction if original is None else original.predict(batch.x)
                y = np.asarray(to_numpy(y), dtype=np.float64)
            _check_unit(y, prediction)
            found.add(batch, features, prediction, y)
            if watch is not None:
                watch.add(batch, inputs)
    return found.summary(model, output, split)


class _Gathered:
    """A summary that grows batch by batch. Groups and strata are numbered in the order in which they come."""

    def __init__(self, first: Batch, bound: int, group_rows: Mapping[Label, int]) -> None:
        names, shape = tuple(getattr(first.x, "columns", ())), tuple(getattr(first.x, "shape", ()))
        self._known: dict[str, Any] = {
            "bound": bound,
            "columns": names if all(isinstance(name, str) for name in names) else (),
            "n_features": int(shape[1]) if len(shape) > 1 else None,
            "labelled": first.y is not None,
            "weighted": False,
            "adjusted": bool(first.group_parts),
        }
        # Where all rows of a group are counted, the key below which they may be kept: hardly more than will be.
        self._bound, most = bound, level(list(group_rows.values()), bound)
        self._limits = {g: min((most + 6 * most**0.5 + 16) / max(n, 1), 1.0) for g, n in group_rows.items()}
        self._groups: list[Label] = []
        self._strata: list[Label] = []
        self._rows: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self._mass, self._cut, self._rest = np.zeros((0, 0)), np.zeros(0), GroupMoments()
        self._columns: dict[str, NDArray[Any]] = {}
        self._size = 0

    def add(self, batch: Batch, features: Any, prediction: Any, y: Array) -> None:
        if (batch.y is not None) != self._known["labelled"]:
            raise ValueError("some batches have labels and some have none; give all rows labels, or none.")
        self._known["weighted"] |= batch.weight is not None
        codes, strata = self._numbered(batch)
        weight = np.ones(len(codes)) if batch.weight is None else batch.weight
        present = weight > 0
        np.add.at(self._rows, (codes[present], strata[present]), 1)
        np.add.at(self._mass, (codes[present], strata[present]), weight[present])
        stays = present & (row_key(batch.row_id, KEEP_SEED) < self._cut[codes])
        if (goes := present & ~stays).any():
            self._rest.update_codes(features, self._groups, codes, weight * goes, beside=y)
        index = np.flatnonzero(stays)
        columns = {
            "features": take_rows(features, index), "prediction": take_rows(prediction, index).astype(np.float64),
            "y": y[index], "codes": codes[index], "weight": weight[index], "strata": strata[index],
            "id": batch.row_id[index].astype(np.uint64),
        }  # fmt: skip
        self._put(columns, len(index))
        if self._size > self._bound + self._bound // 8:
            self._prune()

    def _numbered(self, batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(rows,) codes of groups and of strata; the tables grow with them."""
        parts = batch.group_parts
        pairs = [split_cell(label, parts) if parts else (label, "") for label in batch.labels]
        for group, stratum in pairs:
            self._groups += [] if group in self._groups else [group]
            self._strata += [] if stratum in self._strata else [stratum]
        check_labels(self._groups)
        edges = [(0, len(each) - n) for each, n in zip((self._groups, self._strata), self._rows.shape, strict=True)]
        self._rows, self._mass = np.pad(self._rows, edges), np.pad(self._mass, edges)
        self._cut = np.append(self._cut, [self._limits.get(label, 1.0) for label in self._groups[len(self._cut) :]])
        places = [(self._groups.index(group), self._strata.index(stratum)) for group, stratum in pairs]
        place = np.array(places, dtype=np.intp).reshape(-1, 2)
        return place[batch.codes, 0], place[batch.codes, 1]

    def _put(self, columns: Mapping[str, NDArray[Any]], rows: int) -> None:
        """Copy rows in. Arrays have room for all that may come: memory that is not written to costs nothing."""
        stop = self._size + rows
        for name, values in columns.items():
            room = self._columns.get(name, values[:0])
            dtype = np.result_type(room, values)
            if stop > len(room) or dtype != room.dtype:
                larger = np.empty((max(stop, self._bound + self._bound // 4), *values.shape[1:]), dtype=dtype)
                larger[: self._size] = room[: self._size]
                self._columns[name] = room = larger
            room[self._size : stop] = values
        self._size = stop

    def _kept(self) -> Rows:
        return Rows(**{name: values[: self._size] for name, values in self._columns.items()})

    def _prune(self) -> None:
        """Move rows that cannot stay into ``rest``; the last ones take their places."""
        stays, self._cut, self._rest = prune(self._kept(), self._cut, self._rows, self._bound, self._groups, self._rest)
        self._size = int(np.count_nonzero(stays))
        holes, last = np.flatnonzero(~stays[: self._size]), self._size + np.flatnonzero(stays[self._size :])
        for column in self._columns.values():
            column[holes] = column[last]

    def summary(self, model: str, output: OutputLayer, split: tuple[float, int] | None) -> Summary:
        """What was gathered, with groups and strata in order."""
        self._prune()
        groups, strata = (tuple(sorted(labels, key=sort_key)) for labels in (self._groups, self._strata))
        kept = self._kept()
        if split is not None:
            assert kept.id is not None
            place, (fraction, seed) = np.array([groups.index(label) for label in self._groups]), split
            order = np.lexsort((row_key(kept.id, seed + 1), place[kept.codes], row_key(kept.id, seed) < fraction))
            for column in self._columns.values():
                table = column.reshape(len(column), -1)
                at_once = max(32, 2**22 // max(len(order), 1))
                for start in range(0, table.shape[1], at_once):  # in place: features take most of the memory
                    table[: len(order), start : start + at_once] = table[order, start : start + at_once]
        found = Summary(
            model, output=output, groups=tuple(self._groups), strata=tuple(self._strata), rows=self._rows,
            mass=self._mass, cut=self._cut, kept=kept, rest=self._rest, **self._known,
        )  # fmt: skip
        return found.relabelled(groups, strata).pruned()


def layers_of(adapter: ModelAdapter, x: Any) -> tuple[LinearLayer, ...]:
    """The linear layers of a model, if it takes these rows and squares of sums of its weights are in float64."""
    width = adapter.n_features
    if width is not None and len(getattr(x, "shape", ())) == 2 and x.shape[1] != width:
        raise InputError(f"X has {x.shape[1]} features, but the model expects {width} features as input.")
    layers = adapter.layers(x)
    for layer in layers:
        largest = float(np.abs(layer.weight).max(initial=0.0))
        if largest > LARGEST:
            raise ValueError(
                f"the layer {layer.name!r} has weights as large as {largest:.3g}, whose squares leave float64; check "
                "the model."
            )
    return layers


def _check_inputs(adapter: ModelAdapter, X: Any) -> None:
    # A scikit-learn pipeline may fill in missing values, and says itself when it cannot.
    if adapter.trees or type(adapter.model).__module__.startswith("sklearn"):
        return
    several = several_inputs(X)
    for x in [X] if several is None else several.values():
        x = x.data if hasattr(x, "tocsr") else x  # of a sparse matrix what is stored
        floats = str(getattr(x, "dtype", "")).startswith(("float", "torch.float"))
        if floats and (bad := count_not_finite(x)):
            raise InputError(f"`X` contains {bad} NaN or infinite values. Fill them in or drop those rows.")


def _check_captured(layer: LinearLayer, features: Any, prediction: Any, rows: int) -> None:
    if bad := count_not_finite(prediction):
        raise ValueError(
            f"the model predicts NaN or infinite values for {bad} of {rows} rows; check X for missing values and the "
            "model's weights."
        )
    if features.ndim != 2 or features.shape[0] != rows:
        raise ValueError(
            f"the last linear layer {layer.name!r} takes inputs of shape {tuple(features.shape)} for {rows} rows; "
            "a repair of the output needs one feature vector for each row."
        )


def _check_unit(y: Array, prediction: Any) -> None:
    """Raise where labels or predictions are so large that squares leave float64."""
    for name, values in (("y", y), ("the prediction", prediction)):
        if len(values) and not (largest := float(abs(values).max())) <= LARGEST:
            raise ValueError(
                f"{name} is as large as {largest:.3g}, and sums of squares leave float64; give it in another unit."
            )
        if len(values) and 0 < float(values.max() - values.min()) < ROUNDING * largest:
            raise ValueError(
                f"{name} differs between rows by no more than the rounding of numbers as large as {largest:.3g}. "
                "Subtract a constant from it, or from the columns of X."
            )


# --- threads ----------------------------------------------------------------------------------------------------------

WIDE = 768
"""Layers of this width on are large enough for threads to pay."""


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

    Both pools wait for work by spinning on the cores that the other needs: on small matrices two threads are slower
    than one. Several Python threads may be inside at once: the first limits the pools, and the last gives back what the
    first found. Torch keeps a number for each thread, so each sets and resets its own.
    """
    if width >= WIDE or getattr(_Pools.here, "inside", False):
        yield
        return
    torch = sys.modules.get("torch")
    with _Pools.lock:
        if _Pools.inside == 0:
            _Pools.before = tuple((library, library.num_threads) for library in _blas_libraries(len(sys.modules)))
            _Pools.torch_threads = 1 if torch is None else torch.get_num_threads()
            _set_threads([(library, 1) for library, _ in _Pools.before])
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
            if _Pools.inside == 0:
                _set_threads(_Pools.before)


@lru_cache(maxsize=1)
def _blas_libraries(modules: int) -> list[Any]:
    """The BLAS libraries that are loaded; searching takes milliseconds, and only new modules bring new ones."""
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


def _set_threads(threads: Sequence[tuple[Any, int]]) -> None:
    # threadpoolctl leaves OpenBLAS to the Python thread that set it first, and silently does nothing for the others.
    for library, count in threads:
        getattr(library, "_real_set_num_threads", library.set_num_threads)(count)
