"""Law School Success in both preparations. Needs the file, which may not be redistributed: ESVDFAIR_DATA says where."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ks_2samp

from esvdfair.datasets import Dataset, fetch_law
from esvdfair.datasets.paper import LAW as FILE

FOLDER = Path(os.environ.get("ESVDFAIR_DATA", "nowhere"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / FILE.path).is_file(), reason=f"ESVDFAIR_DATA names no folder with {FILE.path}"
)


@pytest.fixture(scope="module")
def clean() -> Dataset:
    return fetch_law()


@pytest.fixture(scope="module")
def paper() -> Dataset:
    return fetch_law(preparation="paper")


def test_paper_keeps_every_black_and_white_row(paper: Dataset) -> None:
    assert paper.group_sizes == {"black": 1343, "white": 18716}
    assert paper.preparation == "paper"


def test_clean_is_the_default_and_drops_the_rows_without_gender(clean: Dataset) -> None:
    assert clean.group_sizes == {"black": 1342, "white": 18713}
    assert clean.preparation == "clean"


def test_paper_is_standardised_over_all_rows_with_a_column_for_missing_gender(paper: Dataset) -> None:
    np.testing.assert_allclose(paper.X.mean(), 0, atol=1e-9)
    np.testing.assert_allclose(paper.X.std(ddof=0), 1)
    assert (paper.X["gender_nan"] > 50).sum() == 4
    assert paper.standardize == paper.rescale == ()


def test_clean_is_unscaled_and_leaves_scaling_to_the_split(clean: Dataset) -> None:
    assert clean.X["lsat"].between(10, 50).all()
    assert clean.standardize == clean.feature_names
    assert set(np.unique(clean.X[["gender_male", "pass_bar"]])) == {0.0, 1.0}


def determines_target(column: "pd.Series[float]", target: "pd.Series[float]") -> bool:
    return bool((target.groupby(column.to_numpy()).nunique() == 1).all())


def test_the_leak_is_in_paper_and_not_in_clean(clean: Dataset, paper: Dataset) -> None:
    assert determines_target(paper.X["dnn_bar_pass_prediction"], paper.y)
    assert not any(determines_target(clean.X[column], clean.y) for column in clean.feature_names)
    assert clean.X.corrwith(clean.y).abs().max() < 0.5


@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_a_gap_exists_in_the_target(preparation: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(preparation)
    black = dataset.sensitive_features == "black"
    assert ks_2samp(dataset.y[black], dataset.y[~black]).statistic > 0.2
