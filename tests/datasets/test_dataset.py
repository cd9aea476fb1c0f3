"""A Dataset refuses what later steps could not use."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from esvdfair.datasets import Dataset


def tiny(**changes: object) -> Dataset:
    fields: dict[str, object] = {
        "X": pd.DataFrame({"p": [1.0, 2.0, 4.0], "q": [0.0, 5.0, 10.0]}),
        "y": pd.Series([0.5, 1.5, 2.5]),
        "sensitive_features": pd.Series(["b", "a", "b"]),
        "name": "tiny",
        "target_name": "y",
        "sensitive_name": "s",
    }
    return Dataset(**(fields | changes))


def test_names_and_group_sizes() -> None:
    dataset = tiny()
    assert dataset.feature_names == ("p", "q")
    assert dataset.group_sizes == {"a": 1, "b": 2}
    assert "3 rows × 2 features" in repr(dataset)
    assert "a 1, b 2" in repr(dataset)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": pd.Series([1.0, 2.0])}, "3, 2 and 3 rows"),
        ({"X": pd.DataFrame({"p": [1.0, np.nan, 3.0]})}, "1 missing"),
        ({"y": pd.Series([1.0, np.nan, np.nan])}, "2 missing"),
        ({"sensitive_features": pd.Series(["a", None, "b"])}, "1 missing"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)
