"""Correlations with input columns (explain/directions.py), against numpy and pandas."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

from esvdfair.explain.directions import MAX_CATEGORIES, correlate, name_features

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
VALUES = np.column_stack([X[:, 1] + RNG.normal(size=60), -X[:, 2], np.ones(60)])


def test_the_correlations_are_those_of_numpy():
    names, found = correlate(VALUES, np.ones(60), X, ["a", "b", "c"])
    assert names == ["a", "b", "c"]
    for i in range(2):
        np.testing.assert_allclose(found[i], [np.corrcoef(VALUES[:, i], x)[0, 1] for x in X.T])
    np.testing.assert_array_equal(found[2], 0)  # values that do not vary


@pytest.mark.parametrize(
    "hold", [pd.DataFrame, scipy.sparse.csr_array, lambda x: x.reshape(60, 3, 1), lambda x: x.tolist()]
)
def test_whatever_holds_the_columns(hold):
    expected = correlate(VALUES, np.ones(60), X, ["a", "b", "c"])[1]
    np.testing.assert_allclose(correlate(VALUES, np.ones(60), hold(X), ["a", "b", "c"])[1], expected, atol=1e-15)


def test_a_weight_counts_as_so_many_rows():
    weight = RNG.integers(0, 3, 60)
    repeat = np.repeat(np.arange(60), weight)
    weighted = correlate(VALUES, weight * 1.0, X, ["a", "b", "c"])[1]
    np.testing.assert_allclose(weighted, correlate(VALUES[repeat], np.ones(len(repeat)), X[repeat], list("abc"))[1])


def test_constant_and_empty_columns_are_left_out_and_missing_values_skipped():
    frame = pd.DataFrame({"constant": 0.1, "empty": np.nan, "holes": X[:, 1]}, index=range(60))
    frame.loc[:9, "holes"] = np.nan
    names, found = correlate(VALUES, np.ones(60), frame, list(frame.columns))
    assert names == ["holes"]
    assert found[0, 0] == pytest.approx(np.corrcoef(VALUES[10:, 0], X[10:, 1])[0, 1])


def test_a_column_of_text_becomes_one_indicator_for_each_value():
    city = np.where(X[:, 0] > 0, "Oslo", "Rome").astype(object)
    city[0] = None
    frame = pd.DataFrame({"city": city, "flag": X[:, 1] > 0, "kind": pd.Categorical(["k", "l"] * 30)})
    names, found = correlate(VALUES, np.ones(60), frame, list(frame.columns))
    assert set(names) == {"city=Oslo", "city=Rome", "flag", "kind=k", "kind=l"}
    oslo = np.corrcoef(VALUES[1:, 0], (city == "Oslo")[1:])[0, 1]
    assert found[0, names.index("city=Oslo")] == pytest.approx(oslo)
    assert found[0, names.index("city=Rome")] == pytest.approx(-oslo)
    assert found[0, names.index("flag")] == pytest.approx(np.corrcoef(VALUES[:, 0], X[:, 1] > 0)[0, 1])


def test_a_column_of_names_costs_no_more_than_its_frequent_values():
    frame = pd.DataFrame({"id": [f"person {i}" for i in range(60)]})
    assert len(correlate(VALUES, np.ones(60), frame, ["id"])[0]) == MAX_CATEGORIES


def test_no_column_varies():
    names, found = correlate(VALUES, np.ones(60), np.zeros((60, 2)), ["a", "b"])
    assert names == []
    assert found.shape == (3, 0)


def test_names():
    assert name_features(X, None) == ["x0", "x1", "x2"]
    assert name_features(pd.DataFrame({"age": [1], 7: [2]}), None) == ["age", "7"]
    assert name_features(X, ["a", "b", "c"]) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 names, X has 3 columns"):
        name_features(X, ["a", "b"])
    assert name_features({"ids": X, "age": X[:, 0]}, None) == ["ids[0]", "ids[1]", "ids[2]", "age[0]"]
