"""From whatever names the sensitive groups to labels and integer codes."""

from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

Scalar: TypeAlias = str | int | bool
Label: TypeAlias = Scalar | tuple[Scalar, ...]


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
    if hasattr(groups, "detach"):  # a torch tensor, on whichever device
        groups = groups.detach().cpu().numpy()
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
