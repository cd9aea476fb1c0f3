"""Every check of a column, a weight and groups, and the one way from a tensor to NumPy.

What users pass comes through here first: arrays, lists, pandas objects, torch tensors on any device.
"""

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from esvdfair.distributed import world_size

Scalar: TypeAlias = str | int | bool
Label: TypeAlias = Scalar | tuple[Scalar, ...]

MISSING = "missing"
"""Label of the group of people whose attribute is missing, with ``missing="group"``."""

MAX_INTEGER_GROUPS = 50
"""More distinct whole numbers than this are taken for a measurement, not for groups."""


# --- arrays of any framework ---------------------------------------------------------------------------------------


def to_numpy(values: Any) -> NDArray[Any]:
    """An array-like as NumPy; a torch tensor comes from its device (bfloat16, which NumPy lacks, as float32)."""
    if not hasattr(values, "detach"):
        return np.asarray(values)
    tensor = values.detach().cpu()
    return np.asarray((tensor.float() if tensor.dtype == sys.modules["torch"].bfloat16 else tensor).numpy())


def several_inputs(x: Any) -> dict[Any, Any] | None:
    """The inputs of a model that takes several of them, by name or place; None when `x` is one.

    Several are a mapping (a ``BatchEncoding`` is one; values without rows are left out), a tuple of arrays, or a list
    of arrays of which one is more than a vector: a list of vectors is a table.
    """
    if isinstance(x, Mapping):
        return {name: value for name, value in x.items() if hasattr(value, "__len__") and not isinstance(value, str)}
    if not isinstance(x, tuple | list) or not x or not all(hasattr(item, "shape") for item in x):
        return None
    return dict(enumerate(x)) if isinstance(x, tuple) or any(len(item.shape) > 1 for item in x) else None


def row_count(x: Any) -> int:
    """Number of rows of an array, DataFrame, tensor, sparse matrix or nested list, or of several such inputs."""
    shape = getattr(x, "shape", None)
    if shape:
        return int(shape[0])
    inputs = several_inputs(x)
    if inputs is None:
        return len(x)
    rows = {name: row_count(value) for name, value in inputs.items()}
    if len(set(rows.values())) != 1:
        lengths = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise ValueError(f"X is several inputs of different lengths ({lengths}); they must match row by row.")
    return next(iter(rows.values()))


def take_rows(values: Any, index: NDArray[np.intp]) -> NDArray[Any]:
    """Some rows as NumPy; of a tensor only these rows leave its device."""
    if isinstance(values, np.ndarray):
        return values[index]
    return to_numpy(values.index_select(0, sys.modules["torch"].as_tensor(index, device=values.device)))


def count_not_finite(values: Any) -> int:
    """How many values are NaN or infinite; one number leaves the device."""
    finite = np.isfinite(values) if isinstance(values, np.ndarray) else values.isfinite()
    return int((~finite).sum())


# --- columns -------------------------------------------------------------------------------------------------------


def check_column(values: Any, rows: int, name: str) -> NDArray[np.float64]:
    """(rows,) finite float64 of an array-like of shape (rows,) or (rows, 1)."""
    raw = to_numpy(values)
    if np.iscomplexobj(raw):
        raise ValueError(f"Complex data not supported: {name} holds complex numbers.")
    try:
        column = raw.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} holds values that are not numbers ({error}); esvdfair repairs regression.") from error
    if column.ndim == 2 and column.shape[1] != 1:
        raise ValueError(
            f"{name} has {column.shape[1]} columns; a regressor with several outputs is repaired one output at a time. "
            f"Pass one column of {name}."
        )
    if column.ndim > 2 or column.ndim == 0:
        raise ValueError(f"{name} has shape {column.shape}; expected ({rows},).")
    column = column.reshape(-1)
    if len(column) != rows:
        raise ValueError(f"X has {rows} rows but {name} has {len(column)} values; they must match row by row.")
    bad = int(np.count_nonzero(~np.isfinite(column)))
    if bad:
        raise ValueError(f"{name} holds {bad} NaN or infinite values; drop those rows.")
    return column


def check_weight(values: Any, rows: int) -> NDArray[np.float64]:
    """(rows,) finite weights, not negative, not all zero; the share of one rank among several may be."""
    weight = check_column(values, rows, "sample_weight")
    if (weight < 0).any() or not (weight.any() or world_size() > 1):
        raise ValueError("sample_weight must not be negative, and not zero everywhere.")
    return weight


# --- groups --------------------------------------------------------------------------------------------------------


def check_groups(sensitive_features: Any, rows: int, missing: str) -> tuple[tuple[Label, ...], NDArray[np.intp]]:
    """Labels and codes of the groups; missing values are an error or, with ``missing="group"``, a group."""
    if rows == 0 and row_count(sensitive_features) == 0:
        return (), np.zeros(0, dtype=np.intp)
    if missing == "group":
        sensitive_features = _label_missing(sensitive_features)
    labels, codes = encode_groups(sensitive_features)
    if len(codes) != rows:
        raise ValueError(f"X has {rows} rows but sensitive_features has {len(codes)}; they must match row by row.")
    if len(labels) > MAX_INTEGER_GROUPS and all(type(label) is int for label in labels):
        raise ValueError(
            f"sensitive_features takes {len(labels)} different whole numbers, so it looks continuous; bin it first, "
            "for example with pandas.cut, or pass strings if these really are groups."
        )
    return labels, codes


def _label_missing(sensitive_features: Any) -> pd.DataFrame:
    if hasattr(sensitive_features, "detach"):
        sensitive_features = to_numpy(sensitive_features)
    frame = pd.DataFrame(sensitive_features)
    columns = []
    for i in range(frame.shape[1]):
        column = frame.iloc[:, i].astype(object)
        columns.append(column.where(column.notna(), MISSING))
    return pd.concat(columns, axis=1) if columns else frame


def encode_groups(groups: Any) -> tuple[tuple[Label, ...], NDArray[np.intp]]:
    """Sorted distinct labels and, for every row, the position of its label.

    Parameters
    ----------
    groups : array-like of shape (rows,) or (rows, attributes)
        Strings, integers or booleans; a float column that holds only whole numbers counts as integers.
        Several attribute columns become their intersection: one tuple label for each combination that occurs.

    Returns
    -------
    labels : tuple of str, int, bool or tuples of them, sorted
    codes : (rows,) integers with ``labels[codes[i]]`` the group of row i

    Raises
    ------
    ValueError
        When a value is missing (the message counts them) or fractional (bin a continuous attribute first).

    Examples
    --------
    >>> labels, codes = encode_groups(["b", "a", "b"])
    >>> labels, codes.tolist()
    (('a', 'b'), [1, 0, 1])
    """
    if hasattr(groups, "detach"):
        groups = to_numpy(groups)
    if isinstance(groups, pd.DataFrame):
        columns = [groups.iloc[:, i] for i in range(groups.shape[1])]
    else:
        columns = _columns(groups)
    if not columns:
        raise ValueError("sensitive_features has no column; give one label for each row.")
    encoded = [_encode_column(column) for column in columns]
    if len(encoded) == 1:
        return encoded[0]
    return _intersect(encoded)


def _columns(groups: Any) -> list[Any]:
    if isinstance(groups, pd.Series | pd.Index | pd.Categorical):
        is_tuples = groups.dtype == object and len(groups) and isinstance(np.asarray(groups)[0], tuple)
        return _tuple_columns(list(groups)) if is_tuples else [groups]
    if isinstance(groups, list | tuple) and len(groups) and all(isinstance(g, tuple) for g in groups):
        return _tuple_columns(groups)
    values = np.asarray(groups)
    if values.dtype == object and values.ndim == 1 and len(values) and isinstance(values[0], tuple):
        return _tuple_columns(list(values))
    if values.ndim == 0 or values.ndim > 2:
        raise ValueError(
            f"sensitive_features has shape {values.shape}; expected one label for each row, shape (rows,), "
            "or one column for each attribute, shape (rows, attributes)."
        )
    return [values] if values.ndim == 1 else [values[:, i] for i in range(values.shape[1])]


def _tuple_columns(rows: Any) -> list[Any]:
    widths = {len(row) if isinstance(row, tuple) else 1 for row in rows}
    if len(widths) != 1:
        raise ValueError(
            f"group labels are tuples of different lengths {sorted(widths)}; give every row the same attributes."
        )
    return [pd.Series([row[i] for row in rows], dtype=object) for i in range(widths.pop())]


def _encode_column(column: ArrayLike) -> tuple[tuple[Label, ...], NDArray[np.intp]]:
    codes, uniques = pd.factorize(column, use_na_sentinel=True)  # type: ignore[call-overload,arg-type,unused-ignore]
    missing = int(np.count_nonzero(codes < 0))
    if missing:
        raise ValueError(
            f"sensitive_features has {missing} missing value(s) among {len(codes)} rows; "
            "every row needs a group. Drop those rows, or give them a label of their own."
        )
    labels = [_plain(value) for value in np.asarray(uniques, dtype=object)]
    order = sorted(range(len(labels)), key=lambda i: sort_key(labels[i]))
    rank = np.empty(len(labels), dtype=np.intp)
    rank[order] = np.arange(len(labels))
    return tuple(labels[i] for i in order), rank[codes]


def _plain(value: Any) -> Scalar:
    """A Python str, int or bool; NumPy scalars and whole floats are converted."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        if not float(value).is_integer():
            raise ValueError(
                f"sensitive_features holds the fractional value {value!r}, so it looks continuous; "
                "parity is between groups of people. Bin it first, for example with pandas.cut."
            )
        return int(value)
    return str(value)


def sort_key(label: Label) -> tuple[str, Any]:
    """Orders labels of one type by value, and of several types by the type's name first."""
    if isinstance(label, tuple):
        return ("tuple", tuple(sort_key(part) for part in label))
    return (type(label).__name__, label)


def _intersect(
    encoded: list[tuple[tuple[Label, ...], NDArray[np.intp]]],
) -> tuple[tuple[Label, ...], NDArray[np.intp]]:
    """Only the combinations that occur become groups."""
    shape = tuple(len(labels) for labels, _ in encoded)
    flat = np.ravel_multi_index([codes for _, codes in encoded], shape)
    present, codes = np.unique(flat, return_inverse=True)
    positions = np.unravel_index(present, shape)
    labels = [
        tuple(names[p] for (names, _), p in zip(encoded, row, strict=True)) for row in zip(*positions, strict=True)
    ]
    return tuple(labels), codes.astype(np.intp)  # type: ignore[return-value,arg-type,unused-ignore]
