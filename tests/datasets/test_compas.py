"""COMPAS in both preparations. Needs the file, which may not be redistributed: ESVDFAIR_DATA says where."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ks_2samp

from esvdfair.datasets import Dataset, fetch_compas
from esvdfair.datasets.paper import COMPAS as FILE
from esvdfair.datasets.paper import DATES, NUMBERS

FOLDER = Path(os.environ.get("ESVDFAIR_DATA", "nowhere"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / FILE.path).is_file(), reason=f"ESVDFAIR_DATA names no folder with {FILE.path}"
)


@pytest.fixture(scope="module")
def clean() -> Dataset:
    return fetch_compas()


@pytest.fixture(scope="module")
def paper() -> Dataset:
    return fetch_compas(preparation="paper")


@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_rows_groups_and_target(preparation: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(preparation)
    assert dataset.group_sizes == {"African-American": 2941, "other": 2914}
    assert dataset.preparation == preparation
    assert set(dataset.y) == {0.0, 1.0}
    recidivism = dataset.y.groupby(dataset.sensitive_features).mean()
    assert recidivism["African-American"] > recidivism["other"] + 0.1


def test_paper_scales_the_dates_and_nothing_else(paper: Dataset) -> None:
    assert paper.X[list(DATES)].stack().between(0, 1).all()
    assert paper.X["age"].max() > 60
    assert paper.standardize == paper.rescale == ()


def test_dates_are_ranged_over_the_whole_file_before_rows_are_dropped(paper: Dataset) -> None:
    raw = pd.read_csv(FOLDER / FILE.path)
    assert len(raw) == 7214
    kept = raw[list(DATES)].notna().all(axis=1).to_numpy()
    for column in DATES:
        date = pd.to_datetime(raw[column])
        expected = (date - date.min()) / (date.max() - date.min())
        np.testing.assert_allclose(paper.X[column], expected[kept], atol=1e-12)
    assert (paper.X[list(DATES)].min() > 0).any()  # a date that only a dropped row has: the order matters


@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_sex_is_one_column(preparation: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(preparation)
    assert dataset.feature_names == (*NUMBERS, "sex_male", *DATES)
    assert set(dataset.X["sex_male"]) == {0.0, 1.0}


def test_clean_leaves_all_scaling_to_the_split(clean: Dataset) -> None:
    assert clean.rescale == DATES
    assert clean.standardize == (*NUMBERS, "sex_male")
    assert set(clean.feature_names) == {*clean.standardize, *clean.rescale}
    screened = pd.Timestamp("1970-01-01") + pd.Timedelta(days=clean.X["screening_date"].median())
    assert screened.year == 2013


def test_the_first_of_each_doubled_column_is_meant(clean: Dataset) -> None:
    raw = pd.read_csv(FOLDER / FILE.path, header=None, skiprows=1)
    header = (FOLDER / FILE.path).read_text().splitlines()[0].split(",")
    complete = raw[[header.index(d) for d in DATES]].notna().all(axis=1)
    for column in ("decile_score", "priors_count"):
        assert header.count(column) == 2
        np.testing.assert_array_equal(clean.X[column], raw.loc[complete, header.index(column)])


def test_no_outcome_among_the_features(clean: Dataset) -> None:
    assert not {"is_recid", "event", "end", "two_year_recid", "race"} & set(clean.feature_names)
    black = clean.sensitive_features == "African-American"
    assert ks_2samp(clean.X["decile_score"][black], clean.X["decile_score"][~black]).statistic > 0.2
