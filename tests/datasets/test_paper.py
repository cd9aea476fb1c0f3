"""The data sets of the paper in both preparations. Need the files, which may not be redistributed: ESVDFAIR_DATA."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ks_2samp

from esvdfair.datasets import COMPAS, DATES, LAW, NUMBERS, Dataset, fetch_compas, fetch_law

FOLDER = Path(os.environ.get("ESVDFAIR_DATA", "nowhere"))
pytestmark = pytest.mark.skipif(
    not all((FOLDER / file.path).is_file() for file in (LAW, COMPAS)),
    reason=f"ESVDFAIR_DATA names no folder with {LAW.path} and {COMPAS.path}",
)


@pytest.fixture(scope="module")
def clean_law() -> Dataset:
    return fetch_law()


@pytest.fixture(scope="module")
def paper_law() -> Dataset:
    return fetch_law("paper")


@pytest.fixture(scope="module")
def clean_compas() -> Dataset:
    return fetch_compas()


@pytest.fixture(scope="module")
def paper_compas() -> Dataset:
    return fetch_compas("paper")


def test_paper_keeps_every_black_and_white_row(paper_law: Dataset) -> None:
    assert paper_law.group_sizes == {"black": 1343, "white": 18716}
    assert paper_law.preparation == "paper"


def test_clean_is_the_default_and_drops_the_rows_without_gender(clean_law: Dataset) -> None:
    assert clean_law.group_sizes == {"black": 1342, "white": 18713}
    assert clean_law.preparation == "clean"


def test_paper_is_standardised_over_all_rows_with_a_column_for_missing_gender(paper_law: Dataset) -> None:
    np.testing.assert_allclose(paper_law.X.mean(), 0, atol=1e-9)
    np.testing.assert_allclose(paper_law.X.std(ddof=0), 1)
    assert (paper_law.X["gender_nan"] > 50).sum() == 4
    assert paper_law.standardize == paper_law.rescale == ()


def test_clean_is_unscaled_and_leaves_scaling_to_the_split(clean_law: Dataset) -> None:
    assert clean_law.X["lsat"].between(10, 50).all()
    assert clean_law.standardize == clean_law.feature_names
    assert set(np.unique(clean_law.X[["gender_male", "pass_bar"]])) == {0.0, 1.0}


def determines_target(column: "pd.Series[float]", target: "pd.Series[float]") -> bool:
    return bool((target.groupby(column.to_numpy()).nunique() == 1).all())


def test_the_leak_is_in_paper_and_not_in_clean(clean_law: Dataset, paper_law: Dataset) -> None:
    assert determines_target(paper_law.X["dnn_bar_pass_prediction"], paper_law.y)
    assert not any(determines_target(clean_law.X[column], clean_law.y) for column in clean_law.feature_names)
    assert clean_law.X.corrwith(clean_law.y).abs().max() < 0.5


@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_a_gap_exists_in_the_target(preparation: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(f"{preparation}_law")
    black = dataset.sensitive_features == "black"
    assert ks_2samp(dataset.y[black], dataset.y[~black]).statistic > 0.2


@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_rows_groups_and_target(preparation: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(f"{preparation}_compas")
    assert dataset.group_sizes == {"African-American": 2941, "other": 2914}
    assert dataset.preparation == preparation
    assert set(dataset.y) == {0.0, 1.0}
    recidivism = dataset.y.groupby(dataset.sensitive_features).mean()
    assert recidivism["African-American"] > recidivism["other"] + 0.1


def test_paper_scales_the_dates_and_nothing_else(paper_compas: Dataset) -> None:
    assert paper_compas.X[list(DATES)].stack().between(0, 1).all()
    assert paper_compas.X["age"].max() > 60
    assert paper_compas.standardize == paper_compas.rescale == ()


def test_dates_are_ranged_over_the_whole_file_before_rows_are_dropped(paper_compas: Dataset) -> None:
    raw = pd.read_csv(FOLDER / COMPAS.path)
    assert len(raw) == 7214
    kept = raw[list(DATES)].notna().all(axis=1).to_numpy()
    for column in DATES:
        date = pd.to_datetime(raw[column])
        expected = (date - date.min()) / (date.max() - date.min())
        np.testing.assert_allclose(paper_compas.X[column], expected[kept], atol=1e-12)
    assert (paper_compas.X[list(DATES)].min() > 0).any()  # a date that only a dropped row has: the order matters


@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_sex_is_one_column(preparation: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(f"{preparation}_compas")
    assert dataset.feature_names == (*NUMBERS, "sex_male", *DATES)
    assert set(dataset.X["sex_male"]) == {0.0, 1.0}


def test_clean_leaves_all_scaling_to_the_split(clean_compas: Dataset) -> None:
    assert clean_compas.rescale == DATES
    assert clean_compas.standardize == (*NUMBERS, "sex_male")
    assert set(clean_compas.feature_names) == {*clean_compas.standardize, *clean_compas.rescale}
    screened = pd.Timestamp("1970-01-01") + pd.Timedelta(days=clean_compas.X["screening_date"].median())
    assert screened.year == 2013


def test_the_first_of_each_doubled_column_is_meant(clean_compas: Dataset) -> None:
    raw = pd.read_csv(FOLDER / COMPAS.path, header=None, skiprows=1)
    header = (FOLDER / COMPAS.path).read_text().splitlines()[0].split(",")
    complete = raw[[header.index(d) for d in DATES]].notna().all(axis=1)
    for column in ("decile_score", "priors_count"):
        assert header.count(column) == 2
        np.testing.assert_array_equal(clean_compas.X[column], raw.loc[complete, header.index(column)])


def test_no_outcome_among_the_features(clean_compas: Dataset) -> None:
    assert not {"is_recid", "event", "end", "two_year_recid", "race"} & set(clean_compas.feature_names)
    black = clean_compas.sensitive_features == "African-American"
    assert ks_2samp(clean_compas.X["decile_score"][black], clean_compas.X["decile_score"][~black]).statistic > 0.2
