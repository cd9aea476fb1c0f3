"""The data sets of the paper in both preparations, and where their files are looked for."""

import hashlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ks_2samp

from reproduction.datasets import (
    COMPAS,
    DATES,
    LAW,
    NUMBERS,
    VARIABLE,
    RemoteFile,
    fetch_compas,
    fetch_law,
    locate,
    split,
)

FOLDER = Path(os.environ.get(VARIABLE, "nowhere"))
needs_files = pytest.mark.skipif(
    not all((FOLDER / file.path).is_file() for file in (LAW, COMPAS)),
    reason=f"{VARIABLE} names no folder with {LAW.path} and {COMPAS.path}",
)


def determines(column, target):
    return bool((target.groupby(column.to_numpy()).nunique() == 1).all())


@needs_files
def test_law_as_in_the_paper_and_clean():
    paper, clean = fetch_law("paper"), fetch_law()
    assert paper.group_sizes == {"black": 1343, "white": 18716}
    assert clean.group_sizes == {"black": 1342, "white": 18713}
    np.testing.assert_allclose(paper.X.mean(), 0, atol=1e-9)
    np.testing.assert_allclose(paper.X.std(ddof=0), 1)
    assert (paper.X["gender_nan"] > 50).sum() == 4
    assert paper.standardize == paper.rescale == ()
    assert clean.X["lsat"].between(10, 50).all()
    assert clean.standardize == clean.feature_names == ("lsat", "gender_male", "pass_bar")
    assert set(np.unique(clean.X[["gender_male", "pass_bar"]])) == {0.0, 1.0}
    assert determines(paper.X["dnn_bar_pass_prediction"], paper.y)  # the leak
    assert not any(determines(clean.X[column], clean.y) for column in clean.feature_names)
    black = paper.sensitive_features == "black"
    assert ks_2samp(paper.y[black], paper.y[~black]).statistic > 0.2


@needs_files
@pytest.mark.parametrize("preparation", ["clean", "paper"])
def test_compas_rows_groups_and_features(preparation):
    dataset = fetch_compas(preparation)
    assert dataset.group_sizes == {"African-American": 2941, "other": 2914}
    assert set(dataset.y) == set(dataset.X["sex_male"]) == {0.0, 1.0}
    assert dataset.feature_names == (*NUMBERS, "sex_male", *DATES)
    recidivism = dataset.y.groupby(dataset.sensitive_features).mean()
    assert recidivism["African-American"] > recidivism["other"] + 0.1


@needs_files
def test_compas_of_the_paper_scales_dates_over_the_whole_file_before_rows_are_dropped():
    paper, raw = fetch_compas("paper"), pd.read_csv(FOLDER / COMPAS.path)
    kept = raw[list(DATES)].notna().all(axis=1).to_numpy()
    for column in DATES:
        date = pd.to_datetime(raw[column])
        expected = (date - date.min()) / (date.max() - date.min())
        np.testing.assert_allclose(paper.X[column], expected[kept], atol=1e-12)
    assert (paper.X[list(DATES)].min() > 0).any()  # a date that only a dropped row has: the order matters
    assert paper.X["age"].max() > 60
    assert paper.standardize == paper.rescale == ()


@needs_files
def test_compas_clean_is_scaled_by_the_training_rows():
    clean = fetch_compas()
    assert (clean.standardize, clean.rescale) == ((*NUMBERS, "sex_male"), DATES)
    parts, columns = split(clean, 33), [clean.feature_names.index(d) for d in DATES]
    assert (parts.train.X[:, columns].min(axis=0) == 0).all()
    np.testing.assert_allclose(parts.train.X[:, columns].max(axis=0), 1)
    assert parts.heldout.X[:, columns].min() < 0 or parts.heldout.X[:, columns].max() > 1


@needs_files
def test_compas_takes_the_first_of_each_doubled_column():
    raw = pd.read_csv(FOLDER / COMPAS.path, header=None, skiprows=1)
    header = (FOLDER / COMPAS.path).read_text().splitlines()[0].split(",")
    complete = raw[[header.index(d) for d in DATES]].notna().all(axis=1)
    for column in ("decile_score", "priors_count"):
        assert header.count(column) == 2
        np.testing.assert_array_equal(fetch_compas().X[column], raw.loc[complete, header.index(column)])


GOOD, BAD = b"a,b\n1,2\n", b"a,b\n3,4\n"
FILE = RemoteFile("some/file.csv", "https://example.invalid/file.csv", hashlib.sha256(GOOD).hexdigest())


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The path of the file in the folder that the variable names."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "some").mkdir()
    return tmp_path / FILE.path


def test_a_given_file_needs_no_pooch(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    given.write_bytes(GOOD)
    assert locate(FILE) == given


def test_a_given_file_with_other_bytes_is_an_error(given):
    given.write_bytes(BAD)
    with pytest.raises(ValueError, match=f"{VARIABLE}.*not {FILE.sha256}"):
        locate(FILE)


def test_otherwise_the_file_is_downloaded_with_the_pinned_hash(given, tmp_path, monkeypatch):
    asked = []
    retrieve = lambda url, known_hash, fname, path: asked.append((url, known_hash, path / fname))  # noqa: E731
    monkeypatch.setitem(sys.modules, "pooch", SimpleNamespace(retrieve=retrieve, os_cache=lambda _: tmp_path / "cache"))
    assert locate(FILE) == tmp_path / "cache" / FILE.path
    assert asked == [(FILE.url, f"sha256:{FILE.sha256}", tmp_path / "cache" / FILE.path)]


@pytest.mark.parametrize("problem", [ConnectionError("a very long story"), ValueError("hash of downloaded file")])
def test_a_failed_download_names_variable_file_and_address(problem, given, tmp_path, monkeypatch):
    def retrieve(*_, **__):
        raise problem

    monkeypatch.setitem(sys.modules, "pooch", SimpleNamespace(retrieve=retrieve, os_cache=lambda _: tmp_path / "cache"))
    with pytest.raises(FileNotFoundError) as caught:
        locate(FILE)
    assert all(part in str(caught.value) for part in (VARIABLE, FILE.path, FILE.url, type(problem).__name__))
