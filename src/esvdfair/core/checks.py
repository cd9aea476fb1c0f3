"""Every check of a column, a weight and groups, and the one way from a tensor to NumPy.

What users pass is read as its owner meant it or refused: text, dates, complex and masked values are no numbers, a
missing group is missing in every spelling, and labels that read alike (1 and "1") are never one group, nor two.

Long because every door of the package asks for the same checks.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.exceptions import InputError

Scalar: TypeAlias = str | int | bool
Label: TypeAlias = Scalar | tuple[Scalar, ...]
Encoded: TypeAlias = tuple[tuple[Label, ...], NDArray[np.intp]]
"""Sorted distinct labels of groups and, for every row, the position of its label."""

MISSING = "missing"  # label of the group of people whose attribute is missing, with missing="group"
MAX_INTEGER_GROUPS = 50  # more distinct whole numbers than this are taken for a measurement, not for groups


# --- arrays of any framework ---------------------------------------------------------------------------------------


def to_numpy(values: Any) -> NDArray[Any]:
    """An array-like as NumPy, unless values are masked; a torch tensor leaves its device (bfloat16 as float32)."""
    if hasattr(values, "detach"):
        if values.is_meta:
            raise ValueError("got a tensor on the device 'meta', which holds no values; load them first.")
        tensor = values.detach()
        try:
            return np.asarray(tensor.numpy(force=True))
        except TypeError:  # bfloat16 and narrower floats
            return np.asarray(tensor.float().numpy(force=True))
    if isinstance(values, np.ma.MaskedArray):
        if masked := np.count_nonzero(np.ma.getmaskarray(values)):
            raise ValueError(
                f"got a masked array with {masked} masked values, which stand for nothing; drop those rows, or fill "
                "them with .filled(...)."
            )
        return np.asarray(values.data)
    try:
        return np.asarray(values)
    except MemoryError:
        raise
    except Exception as error:  # whatever the object's own __array__ raises
        raise ValueError(f"got a {type(values).__name__} that gives no array ({error}).") from error


def as_pandas(x: Any) -> Any:
    """A table of polars or pyarrow as a DataFrame of the same names and types; anything else as it is."""
    owner = type(x).__module__.partition(".")[0]
    if owner == "pyarrow" and hasattr(x, "column_names"):
        return x.to_pandas()
    if owner == "polars" and hasattr(x, "collect"):
        raise InputError("`X` is a LazyFrame, which contains no rows yet; pass X.collect().")
    if owner != "polars" or not hasattr(x, "get_columns"):
        return x
    # Not by its to_pandas(), which needs pyarrow.
    return pd.DataFrame({column.name: _pandas_column(column) for column in x.get_columns()})


def _pandas_column(column: Any) -> Any:
    """A column of polars as NumPy, or as a pandas Categorical; the categories of an Enum keep their order."""
    kind = type(column.dtype).__name__
    if kind not in ("Categorical", "Enum"):
        return column.to_numpy()
    return pd.Categorical(column.to_list(), categories=list(column.dtype.categories) if kind == "Enum" else None)


def several_inputs(x: Any) -> dict[Any, Any] | None:
    """The inputs of a model that takes several of them, by name or place; None when `x` is one.

    Several are a mapping (a ``BatchEncoding`` is one; values without rows are left out), a tuple of arrays, or a list
    of arrays of which one is more than a vector: a list of vectors is a table. None stands for an optional input.
    """
    if hasattr(x, "shape"):
        return None
    if isinstance(x, Mapping):
        return {name: value for name, value in x.items() if hasattr(value, "__len__") and not isinstance(value, str)}
    if not isinstance(x, tuple | list) or not all(hasattr(item, "shape") or item is None for item in x):
        return None
    given = {place: item for place, item in enumerate(x) if item is not None}
    several = given and (isinstance(x, tuple) or any(len(item.shape) > 1 for item in given.values()))
    return given if several else None


def row_count(x: Any) -> int:
    """Number of rows of an array, DataFrame, tensor, sparse matrix or nested list, or of several such inputs."""
    shape = getattr(x, "shape", None)
    if shape:
        return int(shape[0])
    inputs = several_inputs(x)
    if inputs is None:
        return len(x)
    rows = {name: row_count(value) for name, value in inputs.items()}
    if not rows:
        raise ValueError("X is a mapping that holds no array; give each input of the model by its name.")
    if len(set(rows.values())) != 1:
        lengths = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise ValueError(f"X is several inputs of different lengths ({lengths}); they must match row by row.")
    return next(iter(rows.values()))


def take(x: Any, index: NDArray[np.intp] | slice) -> Any:
    """Some rows of `x`, in its own type (a DataFrame keeps its column names)."""
    if hasattr(x, "shape"):
        return (x.iloc if hasattr(x, "iloc") else x.tocsr() if hasattr(x, "tocsr") else x)[index]
    several = each_input(x, lambda value: take(value, index))
    return several or (np.asarray(x[index]) if isinstance(index, slice) else np.asarray(x)[index])


def each_input(x: Any, change: Callable[[Any], Any]) -> Any:
    """Several inputs, each changed, as a dict or a tuple; None when `x` is not several."""
    inputs = several_inputs(x)
    if inputs is None:
        return None
    changed = {name: change(value) for name, value in inputs.items()}
    return {**x, **changed} if isinstance(x, Mapping) else tuple(changed.get(i, item) for i, item in enumerate(x))


def take_rows(values: Any, index: NDArray[np.intp]) -> NDArray[Any]:
    """Some rows as NumPy; of a tensor only these rows leave its device."""
    if isinstance(values, np.ndarray):
        return values[index]
    return to_numpy(values.index_select(0, sys.modules["torch"].as_tensor(index, device=values.device)))


def count_not_finite(values: Any) -> int:
    """How many values are NaN or infinite, or are so as float64; one number leaves the device."""
    if isinstance(values, np.ndarray) and values.dtype.itemsize > 8:
        with np.errstate(over="ignore"):
            values = values.astype(np.float64)
    finite = np.isfinite(values) if isinstance(values, np.ndarray) else values.isfinite()
    return int((~finite).sum())


# --- numbers -------------------------------------------------------------------------------------------------------


def check_numbers(values: Any, name: str) -> NDArray[Any]:
    """An array-like of real numbers as NumPy, in its own dtype when that is one of numbers, else in float64."""
    try:
        raw = to_numpy(values)
    except ValueError as error:
        raise InputError(f"`{name}` cannot be read as an array: {error}") from error
    if raw.dtype.kind in "biuf":
        return raw
    if raw.dtype.kind == "c" or (raw.dtype == object and any(isinstance(v, complex) for v in raw.flat)):
        raise InputError(f"Complex data not supported: `{name}` contains complex numbers.")
    try:
        if raw.dtype != object:
            raise TypeError(f"their dtype is {raw.dtype}")
        for value in raw.flat:
            if isinstance(value, str | bytes | np.datetime64 | np.timedelta64) or value is pd.NaT:
                raise TypeError(f"one is {value!r}, of type {type(value).__name__}")
        with np.errstate(over="ignore"):  # an extended float beyond float64 becomes infinite, which callers report
            return np.where(pd.isna(raw), np.nan, raw).astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"`{name}` contains values that are not numbers ({error}). Pass one number for each row."
        ) from error


def check_column(values: Any, rows: int | None, name: str, *, of: str = "X") -> NDArray[np.float64]:
    """(rows,) finite float64 of an array-like of shape (rows,) or (rows, 1); ``of`` is what has that many rows."""
    with np.errstate(over="ignore"):
        column = check_numbers(values, name).astype(np.float64)
    if column.ndim == 2 and column.shape[1] != 1:
        raise InputError(
            f"`{name}` has {column.shape[1]} columns, shape {column.shape}; a regressor with several outputs is "
            "repaired one output at a time. Pass one column."
        )
    if column.ndim > 2 or column.ndim == 0:
        raise InputError(f"`{name}` has shape {column.shape}; expected one number for each row, shape (rows,).")
    column = column.reshape(-1)
    if rows is not None:
        check_rows(len(column), rows, name, of=of)
    if bad := count_not_finite(column):
        raise InputError(f"`{name}` contains {bad} NaN or infinite values among {len(column)}. Drop those rows.")
    return column


def check_classes(values: Any, rows: int, classes: Sequence[Any]) -> NDArray[np.float64]:
    """(rows,) 1 where a label is the second of two classes, 0 where it is the first."""
    labels = to_numpy(values).reshape(-1)
    check_rows(len(labels), rows, "y")
    first, second = (labels == label for label in classes)
    if not np.all(first | second):
        label, known = labels[np.argmin(first | second)].item(), " and ".join(map(repr, np.asarray(classes).tolist()))
        raise InputError(f"`y` contains {label!r}, which is not one of the classes {known} of the model.")
    return np.asarray(second, dtype=np.float64)


def check_features(values: Any, name: str = "X") -> NDArray[Any]:
    """(rows, features) finite numbers of a table, dense; in float32 when they are, else in float64."""
    table = check_numbers(values.toarray() if hasattr(values, "toarray") else values, name)
    with np.errstate(over="ignore"):
        table = table.astype(np.float32 if table.dtype == np.float32 else np.float64, copy=False)
    if table.ndim != 2 or not table.shape[1]:
        none = f"has 0 feature(s) (shape={table.shape}) while a minimum of 1 is required."
        words = none if table.ndim == 2 else f"has shape {table.shape}; expected (rows, features)."
        raise InputError(f"`{name}` {words}")
    if bad := count_not_finite(table):
        raise InputError(f"`{name}` contains {bad} NaN or infinite values. Fill them in or drop those rows.")
    return table


def check_rows(got: int, rows: int, name: str, *, of: str = "X") -> None:
    """Raise unless ``name`` has one entry for each of the ``rows`` rows of ``of``."""
    if got != rows:
        raise InputError(f"`{of}` has {rows} rows but `{name}` has {got} values; they must match row by row.")


def check_weight(
    values: Any, rows: int, *, of: str = "X", zero: bool = False, squares: bool = False
) -> NDArray[np.float64]:
    """(rows,) finite weights, not negative; not all zero unless ``zero``; with ``squares`` these are in float64 too."""
    weight = check_column(values, rows, "sample_weight", of=of)
    negative, largest = int(np.count_nonzero(weight < 0)), float(weight.max(initial=0.0))
    if negative or not (zero or weight.any()):
        found = f"has {negative} negative values" if negative else "is zero everywhere"
        raise InputError(f"`sample_weight` {found}. Pass how many people each row represents.")
    if squares and largest and not 1e-140 < largest < 1e140:
        raise InputError(
            f"`sample_weight` has a maximum of {largest:.3g}, and the sum of squares leaves float64. Divide the "
            "weights of all batches by one common number."
        )
    return weight


def make_generator(random_state: Any, *purpose: int) -> np.random.Generator:
    """A generator from a whole number, None or a generator; uses of one seed are told apart by the numbers after it."""
    if random_state is None or isinstance(random_state, np.random.Generator):
        return np.random.default_rng(random_state)
    if isinstance(random_state, bool) or not isinstance(random_state, int | np.integer) or random_state < 0:
        raise InputError(
            f"`random_state={random_state!r}`; expected a whole number of at least 0, a numpy Generator or None."
        )
    return np.random.default_rng([int(random_state), *purpose] if purpose else int(random_state))


def unit_scale(*columns: NDArray[np.float64]) -> int:
    """Exponent e with which ``np.ldexp(column, -e)`` is at most 1 and at least ½ somewhere: squares stay in float64."""
    largest = max((float(np.abs(column).max()) for column in columns if column.size), default=0.0)
    return int(np.frexp(largest)[1])


def unscaled(value: float, exponent: int, name: str) -> float:
    """``value · 2^exponent``; ValueError when float64 cannot hold it."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        raise ValueError(
            f"{name} is beyond the largest float64, about 1.8e308; give the values in another unit."
        ) from None


# --- groups --------------------------------------------------------------------------------------------------------


def check_groups(sensitive_features: Any, rows: int | None, missing: str = "error", *, of: str = "X") -> Encoded:
    """As `encode_groups`, of so many rows; many distinct whole numbers, which look like a measurement, are refused."""
    if rows == 0 and row_count(sensitive_features) == 0:
        return (), np.zeros(0, dtype=np.intp)
    labels, codes = encode_groups(sensitive_features, missing=missing)
    if rows is not None:
        check_rows(len(codes), rows, "sensitive_features", of=of)
    if len(labels) > MAX_INTEGER_GROUPS and all(type(label) is int for label in labels):
        raise InputError(
            f"`sensitive_features` has {len(labels)} different whole numbers, so it looks continuous. Bin it first, "
            "for example with pandas.cut, or pass the numbers as text if these are groups."
        )
    return labels, codes


def check_strata(control_features: Any, rows: int | None, missing: str = "error", *, of: str = "X") -> Encoded:
    """As `check_groups`, of what gaps are adjusted for."""
    try:
        return check_groups(control_features, rows, missing, of=of)
    except InputError as error:
        raise InputError(str(error).replace("`sensitive_features`", "`control_features`")) from None


def encode_groups(groups: Any, *, missing: str = "error") -> Encoded:
    """Sorted distinct labels and, for every row, the position of its label.

    Groups are strings, whole numbers or booleans, of shape (rows,) or (rows, attributes), or columns by name; other
    hashable values count by their text. Several attributes become one tuple label for each combination that occurs.
    What is missing (None, NaN, pd.NA, NaT or masked) is an error or, with ``missing="group"``, the group `MISSING`.

    Examples
    --------
    >>> labels, codes = encode_groups(["b", "a", "b"])
    >>> labels, codes.tolist()
    (('a', 'b'), [1, 0, 1])
    """
    columns = _label_columns(groups)
    if not columns:
        raise InputError("`sensitive_features` has no column; pass one label for each row.")
    if len(lengths := {len(column) for column in columns}) > 1:
        raise InputError(f"`sensitive_features` has columns of different lengths, {sorted(lengths)}.")
    encoded = [_encode_column(column, missing) for column in columns]
    return encoded[0] if len(encoded) == 1 else _intersect(encoded)


def _label_columns(groups: Any) -> list[Any]:
    """One column for each attribute, each something that pandas can factorise without losing what is missing."""
    if isinstance(groups, Mapping):  # columns by name, as Fairlearn takes them
        return [column for values in groups.values() for column in _label_columns(values)]
    if isinstance(groups, pd.DataFrame):
        return [groups.iloc[:, i] for i in range(groups.shape[1])]  # by position: names may occur twice
    of_pandas = isinstance(groups, pd.Series | pd.Index | pd.Categorical)
    if of_pandas and groups.dtype != object:
        return [groups]
    if (of_pandas or isinstance(groups, list | tuple)) and len(groups):
        return _split_rows(list(groups))
    return _array_columns(groups)


def _array_columns(groups: Any) -> list[Any]:
    masked = isinstance(groups, np.ma.MaskedArray)
    values = _without(groups.data, np.ma.getmaskarray(groups)) if masked else to_numpy(groups)
    if values.ndim not in (1, 2):
        raise InputError(
            f"`sensitive_features` has shape {values.shape}; expected one label for each row, shape (rows,), or one "
            "column for each attribute, shape (rows, attributes)."
        )
    if values.dtype == object and len(values):
        return _split_rows(values.tolist())
    return [values] if values.ndim == 1 else list(values.T)


def _without(values: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[Any]:
    return np.where(missing, np.array(None), values) if missing.any() else values


def _split_rows(rows: Sequence[Any]) -> list[Any]:
    """Columns of Python values: of labels one, of sequences of labels one for each of their places."""
    if set(map(type, rows)) <= {str}:  # as most are, and looking at each takes as long as the model
        return [_object_column(rows)]
    rows = [row.tolist() if hasattr(row, "tolist") and not isinstance(row, np.generic) else row for row in rows]
    widths = {len(row) for row in rows if isinstance(row, tuple | list)}
    if not widths:
        return [_object_column(rows)]
    if not pd.isna([row for row in rows if not isinstance(row, tuple | list)]).all():
        widths.add(1)
    if len(widths) != 1:
        raise ValueError(
            f"group labels are rows of different lengths {sorted(widths)}; give every row the same attributes."
        )
    width = widths.pop()
    full = [row if isinstance(row, tuple | list) else [row] * width for row in rows]
    return [_object_column(column) for column in zip(*full, strict=True)]


def _object_column(values: Sequence[Any]) -> NDArray[Any]:
    """A one-dimensional array of the values as they are: NumPy would turn 1 and NaN beside "a" into text."""
    return np.fromiter(values, dtype=object, count=len(values))


def _encode_column(column: Any, missing: str) -> Encoded:
    column = _readable(column)
    try:
        codes, uniques = pd.factorize(column, use_na_sentinel=True)
    except TypeError as error:
        raise InputError(
            f"`sensitive_features` contains values that cannot be labels ({error}). Pass text, integers or booleans."
        ) from error
    labels: list[Scalar] = [_plain_label(value) for value in uniques]
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise InputError(
            f"`sensitive_features` contains different values that all read {twice[0]!r}. Give all labels one type."
        )
    absent = codes < 0
    if absent.any():
        if missing != "group":
            raise InputError(
                f"`sensitive_features` has {np.count_nonzero(absent)} missing value(s) among {len(codes)} rows. Drop "
                "those rows, or make them a group of their own with `missing='group'`."
            )
        if MISSING not in labels:
            labels.append(MISSING)
        codes = np.where(absent, labels.index(MISSING), codes)
    check_labels(labels)
    order = sorted(range(len(labels)), key=lambda i: sort_key(labels[i]))
    return tuple(labels[i] for i in order), np.argsort(order)[codes]


def _readable(column: Any) -> Any:
    """The column, with what hashing or NumPy's types would hide brought to light."""
    kind = getattr(column.dtype, "kind", "O")
    if kind in "Vc":
        raise InputError(
            f"`sensitive_features` has the dtype {column.dtype}; pass labels, one column for each attribute."
        )
    if column.dtype == object and not set(map(type, column)) <= {str}:
        numbers = (value for value in column if isinstance(value, int | float | np.number | np.bool_))
        if len({isinstance(value, bool | np.bool_) for value in numbers if value == value}) == 2:
            raise InputError("`sensitive_features` mixes booleans and numbers. Give all labels one type.")
    if not isinstance(column, np.ndarray):
        return column
    if kind in "mM":
        return pd.Series(column)  # as an object, a datetime64[ns] would be a whole number
    if kind in "US":
        text = column.astype(str)
        return _without(text, text == "nan")  # no missing text in NumPy: np.array(["a", np.nan]) holds three letters
    return column.astype(column.dtype.newbyteorder("="), copy=False)  # pandas takes no other byte order


def _plain_label(value: Any) -> Scalar:
    """A Python str, int or bool; NumPy scalars and whole floats are converted."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        if not float(value).is_integer():
            raise InputError(
                f"`sensitive_features` contains the fractional value {value!r}, so it looks continuous. Bin it first, "
                "for example with pandas.cut."
            )
        return int(value)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def check_labels(labels: Iterable[Label]) -> None:
    """Raise when two labels read alike without being one: 1 and "1", True and 1, ("a", 1) and ("a", "1").

    As text, in a table or as a key of a record, they would be one group.
    """
    seen: dict[Any, Label] = {}
    for label in labels:
        text = tuple(map(str, label)) if isinstance(label, tuple) else (str(label),)
        for reading in (text, ("value", label)):  # True and 1 differ as text and are equal as keys
            other = seen.setdefault(reading, label)
            if sort_key(other) != sort_key(label):
                raise InputError(
                    f"group labels {other!r} and {label!r} read alike but differ in type; give all labels one type."
                )


def label_text(label: Label) -> str:
    """A group as people write it; of several attributes, their values."""
    return ", ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def distinct_names(labels: Sequence[Label]) -> list[str]:
    """Each label as people write it; where two would be written alike, as JSON, which tells them apart."""
    texts = [label_text(label) for label in labels]
    alike = Counter(texts)
    return [json.dumps(label) if alike[text] > 1 else text for label, text in zip(labels, texts, strict=True)]


def sort_key(label: Label) -> tuple[str, Any]:
    """Orders labels of one type by value, and of several types by the type's name first."""
    if isinstance(label, tuple):
        return ("tuple", tuple(sort_key(part) for part in label))
    return (type(label).__name__, label)


def _intersect(encoded: list[Encoded]) -> Encoded:
    """Only the combinations that occur become groups."""
    shape = tuple(len(labels) for labels, _ in encoded)
    flat = np.ravel_multi_index([codes for _, codes in encoded], shape)
    present, codes = np.unique(flat, return_inverse=True)
    positions = np.unravel_index(present, shape)
    labels = [
        tuple(names[p] for (names, _), p in zip(encoded, row, strict=True)) for row in zip(*positions, strict=True)
    ]
    return tuple(labels), codes.astype(np.intp)  # type: ignore[return-value,arg-type,unused-ignore]
