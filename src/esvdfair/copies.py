"""Whether validation rows are copies of training rows."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.batches import ArrayBatches, Batches
from esvdfair.core.checks import row_count, several_inputs, to_numpy
from esvdfair.exceptions import ESVDFairWarning, InputError

BLOCK_ROWS = 512
"""Rows that are hashed at once: what lies between stays in the processor's cache."""


def check_apart(training: Batches, validation: Batches | None, confidence: float | None) -> None:
    """Warn if validation rows are training rows, inputs and labels alike; with a confidence, raise.

    Only rows in memory are compared. Some rows coincide in discrete data: they count as copies where clearly more do
    than by chance and most training rows are like no other, or where all rows are the same.
    """
    if not isinstance(training, ArrayBatches) or not isinstance(validation, ArrayBatches):
        return
    known, asked = (_hash_labelled(rows) for rows in (training, validation))
    if known is None or asked is None or not len(asked):
        return
    repeated = int(np.isin(asked, known).sum())
    _, counts = np.unique(known, return_counts=True)
    by_chance = counts[counts > 1].sum() / len(known)  # of a row from the same population
    noise = np.sqrt(by_chance * (1 - by_chance) * (1 / len(asked) + 1 / len(known)))
    copied = by_chance < 0.5 and repeated / len(asked) - by_chance > max(0.1 * (1 - by_chance), 5 * noise)
    if not copied and not (len(asked) == len(known) and np.array_equal(np.sort(asked), np.sort(known))):
        return
    words = (
        f"{repeated:,} of {len(asked):,} rows of `validation` are also in `X`, so they cannot show how the repair does "
        "on new rows. Pass rows that are not in `X`, or leave `validation` out."
    )
    if confidence is not None:
        raise InputError(f"`confidence={confidence}` requires new rows: {words}")
    warnings.warn(ESVDFairWarning(words), stacklevel=2)


def _hash_labelled(rows: ArrayBatches) -> NDArray[np.uint64] | None:
    """A number for every row, equal for equal inputs and labels; None where inputs cannot be compared."""
    found = hash_rows(rows.x)
    return found if found is None or rows.y is None else hash_rows((found.view(np.int64), rows.y))


def hash_rows(x: Any) -> NDArray[np.uint64] | None:
    """A number for every row, equal for equal rows; None of a sparse matrix, or of values that are lists."""
    if hasattr(x, "tocsr"):
        return None
    several = several_inputs(x)
    parts = [x] if several is None else list(several.values())
    if isinstance(x, pd.DataFrame):
        numbers = [i for i, dtype in enumerate(x.dtypes) if dtype.kind in "biuf"]
        others = sorted(set(range(x.shape[1])) - set(numbers))
        parts = [x.iloc[:, numbers], x.iloc[:, others].astype(object)]
    total = np.zeros(row_count(x), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            values = to_numpy(part).reshape(len(total), -1)
            for start in range(0, len(total), BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                try:
                    words = _mixed_words(values[rows]).sum(axis=1)
                except (TypeError, ValueError):  # lists, which have no hash
                    return None
                total[rows] = total[rows] * np.uint64(0x9E3779B97F4A7C15) + words
    return total


def _mixed_words(values: NDArray[Any]) -> NDArray[np.uint64]:
    """(n, p) numbers that depend on a value and its column: of numbers by their float64, whatever their dtype."""
    if values.dtype.kind in "biuf":
        words = (values.astype(np.float64) + 0.0).view(np.uint64)  # -0.0 is 0.0
    else:
        words = pd.util.hash_array(values.astype(object).ravel(), categorize=False).reshape(values.shape)
    factors = np.random.default_rng(0).integers(2**64 - 1, size=values.shape[1], dtype=np.uint64) | np.uint64(1)
    words = (words ^ (words >> np.uint64(32))) * factors
    return words ^ (words >> np.uint64(29))
