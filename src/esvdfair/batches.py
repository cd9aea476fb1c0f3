"""Anything that holds rows -> `Batch`es; what identifies a row, and which rows are held out, by a hash of it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import (
    Label,
    as_pandas,
    check_classes,
    check_column,
    check_groups,
    check_strata,
    check_weight,
    row_count,
    several_inputs,
    take,
    to_numpy,
)
from esvdfair.core.ks import label_parts, make_cells, split_cell
from esvdfair.exceptions import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Data:
    """Rows as a user gives them, columns in memory or a stream in place of X: see :meth:`esvdfair.ESVDFair.fit`."""

    X: Any
    y: Any = None
    sensitive_features: Any = None
    sample_weight: Any = None
    control_features: Any = None

    @classmethod
    def of(cls, validation: Any) -> "Data":
        """What ``validation=`` and its like hold: columns, or a stream."""
        if is_stream(validation):
            return cls(validation)
        if not isinstance(validation, tuple | list) or len(validation) not in (3, 4, 5):
            raise ValueError(
                "validation must be (X, y, sensitive_features[, sample_weight[, control_features]]), where y and "
                "weight may be None, or yield such batches."
            )
        return cls(*validation)

    @property
    def is_stream(self) -> bool:
        return is_stream(self.X)


COLUMNS = tuple(column.name for column in fields(Data)[2:])  # what may stand beside X and y


@dataclass(frozen=True)
class Batch:
    """Some rows: inputs, label, group, weight, and the global index that never changes however rows are batched.

    Where gaps are adjusted, ``labels`` are cells of a group and a stratum, whose first ``group_parts`` parts name the
    group (:mod:`esvdfair.core.ks`); 0 says that they are groups.
    """

    x: Any
    y: Array | None
    labels: tuple[Label, ...]
    codes: NDArray[np.intp]
    weight: Array | None
    row_id: NDArray[Any]
    group_parts: int = 0

    @property
    def groups(self) -> list[Label]:
        """The group of every one of ``labels``."""
        return [split_cell(label, self.group_parts)[0] if self.group_parts else label for label in self.labels]

    def take(self, index: NDArray[np.intp] | slice) -> "Batch":
        """Some of the rows."""
        y, weight = (None if column is None else column[index] for column in (self.y, self.weight))
        return replace(
            self, x=take(self.x, index), y=y, codes=self.codes[index], weight=weight, row_id=self.row_id[index]
        )


Batches: TypeAlias = Iterable[Batch]  # most can be read again


class ArrayBatches:
    """Batches of rows that are in memory."""

    def __init__(self, data: Data, *, batch_size: int = 8192, **options: Any) -> None:
        self._whole, self._batch_size = _make_batch(data, **options), batch_size
        self.x, self.y, self.rows = self._whole.x, self._whole.y, len(self._whole.codes)

    @property
    def group_rows(self) -> Mapping[Label, int]:
        """Number of rows of every group, of those with a weight."""
        counts: Counter[Label] = Counter()
        rows = np.bincount(self._whole.codes, None if self._whole.weight is None else self._whole.weight > 0)
        for group, n in zip(self._whole.groups, rows.astype(int).tolist(), strict=False):
            counts[group] += n
        return counts

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.rows, self._batch_size):
            yield self._whole.take(slice(start, start + self._batch_size))


class StreamBatches:
    """Batches of rows from a loader, an iterable, or a function that makes one; rows are numbered as they come.

    An item is (X, y, sensitive[, weight[, control[, row_id]]]), of which y, weight and control may be None, or a
    :class:`Batch`, which is taken as it is.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        self._source, self._options = source, options
        self.group_rows: Mapping[Label, int] = getattr(source, "group_rows", {})  # of tables, which were counted before

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for item in self._source() if callable(self._source) else self._source:
            batch = item
            if not isinstance(item, Batch):
                if not isinstance(item, tuple | list) or not 3 <= len(item) <= 6:
                    got = f"{len(item)} items" if isinstance(item, tuple | list) else type(item).__name__
                    raise ValueError(f"a batch must be (X, y, sensitive[, weight[, control[, row_id]]]); got {got}.")
                data, row_id = Data(as_pandas(item[0]), *item[1:5]), None if len(item) < 6 else item[5]
                positions = np.arange(start, start + row_count(data.X))
                batch = _make_batch(data, row_id=row_id, positions=positions, **self._options)
            start += len(batch.codes)
            yield batch


def _make_batch(
    data: Data,
    *,
    missing: str = "error",
    classes: Sequence[Any] | None = None,
    row_id: Any = None,
    part: int | str = 0,
    positions: NDArray[np.int64] | None = None,
) -> Batch:
    """Rows and what stands beside them, checked; ``positions`` in their part, where they are not all of it."""
    rows, y, weight = row_count(data.X), data.y, data.sample_weight
    _check_indexes(data)
    if y is not None:
        y = check_column(y, rows, "y") if classes is None else check_classes(y, rows, classes)
    labels, codes = check_groups(_named(data.X, data.sensitive_features), rows, missing)
    group_parts = 0
    if data.control_features is not None and labels:
        group_parts = label_parts(labels[0])
        strata = check_strata(_named(data.X, data.control_features), rows, missing)
        labels, codes = make_cells((labels, codes), strata)
    if weight is not None:
        weight = check_weight(weight, rows, squares=True, zero=positions is not None)
    row_id = row_ids(row_id, part, np.arange(rows) if positions is None else positions)
    return Batch(data.X, y, labels, codes, weight, row_id, group_parts)


def _check_indexes(data: Data) -> None:
    """Raise where pandas objects hold the same labels in another order: rows are matched by position, not by label.

    Indexes with other labels, or with labels that occur twice, do not tell which order is meant.
    """
    given = [(name, part) for name, value in vars(data).items()
             for part in (value.values() if isinstance(value, Mapping) and name in COLUMNS else [value])]  # fmt: skip
    indexes = [(name, part.index) for name, part in given if isinstance(part, pd.DataFrame | pd.Series)]
    for name, index in indexes[1:]:
        of, first = indexes[0]
        alike = len(index) == len(first) and index.nlevels == first.nlevels and not index.equals(first)
        if alike and index.is_unique and first.is_unique and index.isin(first).all():
            raise InputError(
                f"`{name}` has the index of `{of}` in another order, and rows are matched by position. Reindex it "
                f"with {name}.loc[{of}.index], or pass arrays if the order is right."
            )


def _named(x: Any, column: Any) -> Any:
    """A column of a DataFrame `x` that is named rather than given."""
    if not isinstance(column, str):
        return column
    if list(getattr(x, "columns", ())).count(column) != 1:
        raise InputError(
            f"`sensitive_features={column!r}` is a name, and `X` has no such column (or several). Pass the labels."
        )
    return x[column]


def is_stream(x: Any) -> bool:
    """Whether x yields batches (a DataLoader, an iterable, a function that makes one) rather than holding rows."""
    if hasattr(x, "shape") or isinstance(x, str | bytes | Mapping):
        return False
    if isinstance(x, list | tuple):  # of batches, not of rows or of several inputs
        return bool(x) and all(isinstance(item, tuple) and bool(item and getattr(item[0], "shape", ())) for item in x)
    return callable(x) or isinstance(x, Iterable)


def as_rows(x: Any) -> Any:
    """Rows in memory as they are when they are of a kind of their own, or several inputs; else as an array."""
    if hasattr(x, "tocsr"):
        return x.tocsr()  # of the sparse formats, one whose rows can be taken
    x = as_pandas(x)
    if several_inputs(x) is not None:
        return x
    if not hasattr(x, "shape") or isinstance(x, np.ma.MaskedArray | np.matrix):
        x = to_numpy(x)
    columns = getattr(x, "columns", None)
    if columns is not None and (not columns.is_unique or len({isinstance(name, str) for name in columns}) > 1):
        raise InputError("`X` has two columns of one name, or names of several types; rename them.")
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


def make_batches(data: Data, *, row_id: Any = None, batch_size: int = 8192, **options: Any) -> Batches:
    """Rows in memory or a stream of them, as batches.

    Options are ``missing``; ``classes``, two of them, with which y becomes 1 for the second and 0 for the first; and
    ``part``, which with ``row_id`` identifies the rows (:func:`row_ids`).
    """
    if not data.is_stream:
        if data.sensitive_features is None:
            raise ValueError(
                "sensitive_features is missing; parity is between groups, so fit needs one label for each row: "
                "fit(X, y, sensitive_features=a). Prediction will not need it."
            )
        return ArrayBatches(replace(data, X=as_rows(data.X)), row_id=row_id, batch_size=batch_size, **options)
    given = vars(data) | {"X": None, "row_id": row_id}
    if beside := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"X yields batches, yet {' and '.join(beside)} came beside it; a shuffled loader would misalign them "
            "silently. Yield (X, y, sensitive[, weight[, control[, row_id]]]) batches instead."
        )
    return StreamBatches(data.X, **options)


def is_read_once(x: Any) -> bool:
    """Whether x is an iterator, which can be read only once."""
    return is_stream(x) and not callable(x) and iter(x) is x


def row_ids(row_id: Any, part: int | str, positions: Any) -> NDArray[np.uint64]:
    """(rows,) what identifies each row: its ``row_id`` or, without one, the part and its position there.

    A whole number i is the row at position i of part 0; texts are hashed.
    """
    positions = np.asarray(positions).astype(np.uint64)
    offset = np.uint64(0 if part == 0 else _hashed(repr(part)))
    if row_id is None:
        with np.errstate(over="ignore"):
            return np.asarray(positions + offset)
    values = np.array(row_id, dtype=object) if isinstance(row_id, list | tuple) else to_numpy(row_id)
    if values.shape != positions.shape:
        raise InputError(f"`row_id` has shape {values.shape}; expected {positions.shape}, one id for each row.")
    if values.dtype == object and not pd.isna(values).any():
        values = np.array(values.tolist())
    if values.dtype.kind in "iu":
        return values.astype(np.uint64)
    if values.dtype.kind not in "US":
        raise InputError(f"`row_id` contains values of type {values.dtype}; pass whole numbers or texts, none missing.")
    return np.array([_hashed(str(value)) for value in values.tolist()], dtype=np.uint64)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def row_key(row_id: NDArray[Any], seed: int) -> Array:
    """A number in [0, 1) for every row, from its global index and the seed alone (splitmix64).

    Does not depend on how rows are batched or ordered, so the held-out rows and the bounded sample do not either.
    """
    with np.errstate(over="ignore"):
        z = row_id.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(2 * (seed % 2**31) + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / 2.0**53


Splitter: TypeAlias = Callable[[NDArray[Any]], NDArray[np.bool_]]


def held_out(fraction: float, seed: int) -> Splitter:
    """Which rows are kept out of the fit: a fraction of every group, chosen by hash."""
    return lambda row_id: row_key(row_id, seed) < fraction


# --- rows that stay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Some rows at the input of the last layer."""

    features: NDArray[Any]  # (n, p) in the dtype of the model
    prediction: Array  # (n,) of the original model
    y: Array  # (n,) labels; the original model's predictions where there are none
    codes: NDArray[np.intp]  # (n,) groups, positions in a list of labels
    weight: Array  # (n,) scaled up where a group was sampled
    adjusted: Array | None = None  # (n,) the weights that give all groups the same mix of strata
    strata: NDArray[np.intp] | None = None
    id: NDArray[np.uint64] | None = None  # what identifies each row (`row_ids`)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def parity_weight(self) -> Array:
        """What a row counts where groups are compared; ``weight`` is what it counts in the error."""
        return self.weight if self.adjusted is None else self.adjusted

    def take(self, index: NDArray[Any]) -> "Rows":
        """Some of the rows; no copies of rows that follow each other."""
        adjoin = index.dtype != bool and len(index) and (np.diff(index) == 1).all()
        part = slice(index[0], index[-1] + 1) if adjoin else index
        return Rows(*(None if column is None else column[part] for column in vars(self).values()))  # type: ignore

    def joined(self, other: "Rows") -> "Rows":
        """These rows, and then others."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Rows(*(None if pair[0] is None else np.concatenate(pair) for pair in pairs))  # type: ignore

    @classmethod
    def none(cls, width: int) -> "Rows":
        """No rows, of so many features."""
        empty = np.zeros(0)
        return cls(np.zeros((0, width)), empty, empty, np.zeros(0, dtype=np.intp), empty)
