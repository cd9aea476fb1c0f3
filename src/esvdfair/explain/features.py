"""Correlation of some values with every input column, whatever holds the columns."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import several_inputs, to_numpy

Array = NDArray[np.float64]

MAX_CATEGORIES = 50
"""Of a column that is not numeric, so many of its most frequent values are looked at."""


def name_features(X: Any, given: Sequence[str] | None) -> list[str]:
    """Names of the columns of X: those given, those of a DataFrame, or x0, x1, …; rows of any shape count as flat.

    Of several inputs the columns are called name[0], name[1], …
    """
    table = _table(X)
    width = table.shape[1]
    if given is None:
        return [str(name) for name in table.columns] if hasattr(table, "columns") else [f"x{i}" for i in range(width)]
    if len(given) != width:
        raise ValueError(f"feature_names holds {len(given)} names, X has {width} columns; give one name for each.")
    return [str(name) for name in given]


def correlate(values: Array, weight: Array, X: Any, names: Sequence[str]) -> tuple[list[str], Array]:
    """Pearson correlation of k values with the p columns of X that vary.

    A column that is not numeric becomes one indicator for each of its most frequent values, named "column=value". Rows
    where a column is missing do not count for that column.

    Parameters
    ----------
    values : (rows, k)
    weight : (rows,)

    Returns
    -------
    names : p names
    correlations : (k, p); 0 for values that do not vary
    """
    found, rows = [], []
    for name, column in _numeric_columns(_table(X), names):
        correlation = _correlation(values, column, weight)
        if correlation is not None:
            found.append(name)
            rows.append(correlation)
    return found, np.array(rows).reshape(len(rows), values.shape[1]).T


def _numeric_columns(table: Any, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
    for i, name in enumerate(names):
        column = _column(table, i)
        if pd.api.types.is_numeric_dtype(column.dtype):
            yield name, column.to_numpy(dtype=np.float64, na_value=np.nan)
            continue
        for value in column.value_counts().index[:MAX_CATEGORIES]:
            indicator = (column == value).to_numpy(dtype=np.float64, na_value=np.nan)
            yield f"{name}={value}", np.where(column.isna(), np.nan, indicator)


def _table(X: Any) -> Any:
    """X as a DataFrame, a sparse matrix of columns, or an array (rows, p); several inputs side by side."""
    several = several_inputs(X)
    if several is not None:
        return pd.DataFrame(
            {f"{name}[{i}]": x for name, value in several.items() for i, x in enumerate(_flat(value).T)}
        )
    if hasattr(X, "iloc"):
        return X
    if hasattr(X, "tocsc"):
        return X.tocsc()
    return _flat(X)


def _flat(X: Any) -> NDArray[Any]:
    values = to_numpy(X)
    return values.reshape(len(values), int(np.prod(values.shape[1:])))


def _column(table: Any, i: int) -> "pd.Series[Any]":
    column: pd.Series[Any]
    if hasattr(table, "iloc"):
        column = table.iloc[:, i]
    else:
        column = pd.Series(table[:, [i]].toarray().ravel() if hasattr(table, "toarray") else table[:, i])
    return column.infer_objects() if column.dtype == object else column


def _correlation(values: Array, column: Array, weight: Array) -> Array | None:
    """(k,) correlations with one column, or None when it does not vary."""
    known = np.isfinite(column)
    if not known.all():
        values, column, weight = values[known], column[known], weight[known]
    if not weight.sum() > 0:
        return None
    share = weight / weight.sum()
    x, z = column - share @ column, values - share @ values
    spread, spreads = share @ x**2, share @ z**2
    # what rounding of the mean leaves of a constant column
    if spread <= (1e-12 * np.abs(column).max()) ** 2:
        return None
    varies = spreads > (1e-12 * np.abs(values).max(axis=0)) ** 2
    cross = (share * x) @ z
    correlation: Array = np.divide(cross, np.sqrt(spread * spreads), out=np.zeros_like(cross), where=varies)
    return np.clip(correlation, -1.0, 1.0)
