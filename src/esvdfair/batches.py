"""Anything that holds rows -> a re-iterable of batches, and the split of rows into training and held-out ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import (
    Label,
    check_classes,
    check_column,
    check_groups,
    check_strata,
    check_weight,
    row_count,
    row_slice,
    several_inputs,
    take,
    to_numpy,
)
from esvdfair.core.strata import label_parts, make_cells
from esvdfair.distributed import all_gather, rank, world_size
from esvdfair.exceptions import Given, InputError


@dataclass(frozen=True)
class Batch:
    """Some rows: inputs, label, group, weight, and the global index that never changes however rows are batched.

    Where gaps are adjusted, ``labels`` are cells of a group and a stratum, whose first ``group_parts`` parts name the
    group (:mod:`esvdfair.core.strata`); 0 says that they are groups.
    """

    x: Any
    y: NDArray[np.float64] | None
    labels: tuple[Label, ...]
    codes: NDArray[np.intp]
    weight: NDArray[np.float64] | None
    row_id: NDArray[np.int64]
    group_parts: int = 0

    def take(self, index: NDArray[np.intp]) -> "Batch":
        """Some of the rows."""
        y, weight = (None if column is None else column[index] for column in (self.y, self.weight))
        return replace(
            self, x=take(self.x, index), y=y, codes=self.codes[index], weight=weight, row_id=self.row_id[index]
        )


class ArrayBatches:
    """Batches of rows that are in memory; the first of them is row ``first_row`` of all ranks' rows."""

    def __init__(
        self,
        x: Any,
        y: Any,
        sensitive_features: Any,
        sample_weight: Any = None,
        control_features: Any = None,
        *,
        missing: str = "error",
        batch_size: int = 8192,
        first_row: int = 0,
        classes: Sequence[Any] | None = None,
    ) -> None:
        self.rows = row_count(x)
        self._x, self._batch_size, self._first_row = x, batch_size, first_row
        self._y = _labels(y, self.rows, classes)
        sensitive_features, control_features = (_column(x, named) for named in (sensitive_features, control_features))
        self._groups = _groups(sensitive_features, control_features, self.rows, missing)
        self._weight = None if sample_weight is None else check_weight(sample_weight, self.rows)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The groups, or the cells, of all its rows."""
        return self._groups[0]

    def __iter__(self) -> Iterator[Batch]:
        labels, codes, group_parts = self._groups
        for start in range(0, self.rows, self._batch_size):
            stop = min(start + self._batch_size, self.rows)
            part = slice(start, stop)
            yield Batch(
                row_slice(self._x, start, stop),
                None if self._y is None else self._y[part],
                labels,
                codes[part],
                None if self._weight is None else self._weight[part],
                np.arange(start, stop) + self._first_row,
                group_parts,
            )


def _labels(y: Any, rows: int, classes: Sequence[Any] | None) -> NDArray[np.float64] | None:
    """(rows,) numbers, or 0 and 1 for the two classes of a classifier; None when there are none."""
    if y is None:
        return None
    return check_column(y, rows, "y") if classes is None else check_classes(y, rows, classes)


def _column(x: Any, named: Any) -> Any:
    """A column of a DataFrame `x` that is named rather than given."""
    if not isinstance(named, str):
        return named
    if list(getattr(x, "columns", ())).count(named) != 1:
        raise InputError(
            "{sensitive_features} is a name, and X has no such column (or several). Give the labels themselves.",
            sensitive_features=Given(named),
        )
    return x[named]


def _groups(
    sensitive_features: Any, control_features: Any, rows: int, missing: str
) -> tuple[tuple[Label, ...], NDArray[np.intp], int]:
    """Labels and codes of groups, or of cells, and how many parts of a cell's label name its group."""
    labels, codes = check_groups(sensitive_features, rows, missing)
    if control_features is None or not labels:
        return labels, codes, 0
    strata = check_strata(control_features, rows, missing)
    return *make_cells((labels, codes), strata), label_parts(labels[0])


class StreamBatches:
    """Batches of rows from a loader, an iterable, or a function that makes one; rows are numbered as they come.

    An item is (X, y, sensitive), (X, y, sensitive, weight), (X, y, sensitive, weight or None, control), or a
    :class:`Batch`, which is taken as it is. Of several ranks, rank r is taken to hold the rows r, r + ranks,
    r + 2 ranks, …, as a ``DistributedSampler`` without shuffling deals them out.
    """

    def __init__(self, source: Any, *, missing: str = "error", classes: Sequence[Any] | None = None) -> None:
        self._source, self._missing, self._classes = source, missing, classes

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for item in self._source() if callable(self._source) else self._source:
            batch = self._batch(item, start)
            start += len(batch.codes)
            yield batch

    def _batch(self, item: Any, start: int) -> Batch:
        if isinstance(item, Batch):
            return item
        if not isinstance(item, tuple | list) or len(item) not in (3, 4, 5):
            got = f"{len(item)} items" if isinstance(item, tuple | list) else type(item).__name__
            raise ValueError(f"a batch must be (X, y, sensitive[, weight[, control]]); got {got}.")
        x, y, sensitive, weight, control = [*item, None, None][:5]
        rows = row_count(x)
        labels, codes, group_parts = _groups(sensitive, control, rows, self._missing)
        return Batch(
            x,
            _labels(y, rows, self._classes),
            labels,
            codes,
            None if weight is None else check_weight(weight, rows),
            np.arange(start, start + rows) * world_size() + rank(),
            group_parts,
        )


class Batches(Protocol):
    """Batches of rows that can be read again."""

    def __iter__(self) -> Iterator[Batch]: ...


def is_stream(x: Any) -> bool:
    """Whether x yields batches (a DataLoader, an iterable, a function that makes one) rather than holding rows."""
    if hasattr(x, "shape") or isinstance(x, list | tuple | str | bytes | Mapping):
        return False
    return callable(x) or isinstance(x, Iterable)


def as_rows(x: Any) -> Any:
    """Rows in memory as they are when they are of a kind of their own, or several inputs; else as an array.

    Raises
    ------
    ValueError
        A single row, or a single feature as a vector.
    """
    if hasattr(x, "tocsr"):
        return x.tocsr()  # of the sparse formats, one whose rows can be taken
    if several_inputs(x) is not None:
        return x
    if not hasattr(x, "shape") or isinstance(x, np.ma.MaskedArray | np.matrix):
        x = to_numpy(x)
    columns = getattr(x, "columns", None)
    if columns is not None and (not columns.is_unique or len({isinstance(name, str) for name in columns}) > 1):
        raise InputError("{X} has columns of one name, or names of several types; rename them.", X=Given())
    if len(x.shape) < 2:
        raise ValueError(
            f"Expected 2D array, got an array of shape {tuple(x.shape)} instead. Reshape your data: X.reshape(-1, 1) "
            "if it has one feature, X.reshape(1, -1) if it is one row."
        )
    return x


def inputs_of(source: Any) -> Iterator[Any]:
    """The inputs alone of batches as a stream yields them: X, (X,), (X, y), (X, y, sensitive[, weight])."""
    for item in source() if callable(source) else source:
        whole = hasattr(item, "shape") or isinstance(item, Mapping)
        yield item.x if isinstance(item, Batch) else item if whole else item[0]


def make_batches(
    x: Any,
    y: Any,
    sensitive_features: Any,
    sample_weight: Any = None,
    control_features: Any = None,
    *,
    missing: str = "error",
    batch_size: int = 8192,
    name: str = "X",
    classes: Sequence[Any] | None = None,
) -> Batches:
    """Rows in memory or a stream of them, as batches that can be read again; ``name`` is what errors call them.

    With ``classes``, two of them, y becomes 1 for the second and 0 for the first. All ranks call it together: rows in
    memory are numbered rank after rank, as if the shards stood one below the other.

    Raises
    ------
    ValueError
        A stream with columns beside it, or one that can be read only once; rows in memory without groups; some ranks
        with rows in memory and others with a stream, whose numbers would collide.
    """
    stream = is_stream(x)
    x = x if stream else as_rows(x)
    first_row = _first_row(None if stream else row_count(x), name)
    if not stream:
        if sensitive_features is None:
            raise ValueError(
                "sensitive_features is missing; parity is between groups, so fit needs one label for each row: "
                "fit(X, y, sensitive_features=a). Prediction will not need it."
            )
        return ArrayBatches(
            x,
            y,
            sensitive_features,
            sample_weight,
            control_features,
            missing=missing,
            batch_size=batch_size,
            first_row=first_row,
            classes=classes,
        )
    columns = {
        "y": y,
        "sensitive_features": sensitive_features,
        "sample_weight": sample_weight,
        "control_features": control_features,
    }
    beside = [name for name, value in columns.items() if value is not None]
    if beside:
        raise ValueError(
            f"X yields batches, yet {' and '.join(beside)} came beside it; a shuffled loader would misalign them "
            "silently. Yield (X, y, sensitive[, weight[, control]]) batches instead."
        )
    if not callable(x) and iter(x) is x:
        raise ValueError(
            f"{name} is an iterator, which can be read only once. Pass arrays, a DataLoader, or a function that makes "
            "the iterator."
        )
    return StreamBatches(x, missing=missing, classes=classes)


def _first_row(rows: int | None, name: str) -> int:
    """Global number of this rank's first row; ``rows`` is None for a stream, whose length nobody knows."""
    counts = all_gather(rows)
    known = [count for count in counts if count is not None]
    if 0 < len(known) < len(counts):
        streams = [i for i, count in enumerate(counts) if count is None]
        raise ValueError(f"{name} is a stream on the ranks {streams} and arrays on the others; pass one kind on all.")
    return 0 if rows is None else sum(known[: rank()])


def row_key(row_id: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for every row, from its global index and the seed alone (splitmix64).

    Does not depend on how rows are batched, ordered or sharded, so that the held-out rows and the bounded sample are
    the same rows on one machine and on many.
    """
    with np.errstate(over="ignore"):
        z = row_id.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(2 * (seed % 2**31) + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / 2.0**53


Splitter = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


def held_out(fraction: float, seed: int) -> Splitter:
    """Which rows are kept out of the fit: a fraction of every group, chosen by hash."""
    return lambda row_id: row_key(row_id, seed) < fraction
