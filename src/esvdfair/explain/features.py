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
    columns = _table(X).columns
    if given is None:
        return [str(name) for name in columns]
    if len(given) != len(columns):
        raise ValueError(f"feature_names holds {len(given)} names, X has {len(columns)} columns; give one for each.")
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


def _numeric_columns(table: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
    for name, (_, column) in zip(names, table.items(), strict=True):
        column = column.infer_objects()
        if pd.api.types.is_numeric_dtype(column.dtype):
            yield name, column.to_numpy(dtype=np.float64, na_value=np.nan)
            continue
        for value in column.value_counts().index[:MAX_CATEGORIES]:
            indicator = (column == value).to_numpy(dtype=np.float64, na_value=np.nan)
            yield f"{name}={value}", np.where(column.isna(), np.nan, indicator)


def _table(X: Any) -> pd.DataFrame:
    """X as a DataFrame; several inputs side by side."""
    if (several := several_inputs(X)) is not None:
        named = []
        for name, part in several.items():
            columns = [f"{name}[{column}]" for column in getattr(part, "columns", range(_table(part).shape[1]))]
            named.append(_table(part).set_axis(columns, axis=1).reset_index(drop=True))
        return pd.concat(named, axis=1)
    if isinstance(X, pd.DataFrame):
        return X
    sparse = getattr(X, "tocsc", None)
    values = to_numpy(X) if sparse is None else pd.DataFrame.sparse.from_spmatrix(sparse())  # type: ignore[attr-defined]
    flat = values if sparse is not None else values.reshape(len(values), int(np.prod(values.shape[1:])))
    return pd.DataFrame(flat).add_prefix("x")


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
