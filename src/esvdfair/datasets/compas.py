"""COMPAS: recidivism within two years (ProPublica 2016)."""

from pathlib import Path
from typing import Literal

import pandas as pd

from esvdfair.datasets._fetch import RemoteFile, locate
from esvdfair.datasets.base import Dataset, check_preparation, rescaled

FILE = RemoteFile(
    path="compas/compas-scores-two-years.csv",
    url=(
        "https://raw.githubusercontent.com/propublica/compas-analysis/"
        "bafff5da3f2e45eca6c2d5055faad269defd135a/compas-scores-two-years.csv"
    ),
    sha256="c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
)

NUMBERS = (
    "age", "juv_fel_count", "decile_score", "juv_misd_count", "juv_other_count", "v_decile_score", "priors_count",
)  # fmt: skip
DATES = ("c_jail_in", "c_jail_out", "c_offense_date", "screening_date", "in_custody", "out_custody")

_DESCRIPTION = (
    "Whether a person is charged with a new crime within two years, from age, sex, counts of prior offences, COMPAS "
    "scores and six dates; ProPublica's Broward County file. The dates leak: a custody date long after the screening "
    "goes with recidivism. They are kept, as in the paper."
)


def fetch_compas(
    preparation: Literal["clean", "paper"] = "clean",
    *,
    data_home: str | Path | None = None,
    download_if_missing: bool = True,
) -> Dataset:
    """COMPAS: target ``two_year_recid`` (0 or 1), attribute ``race`` (African-American 2,941, other 2,914).

    Of the 7,214 rows of the two-year file the 5,855 with all six dates stay. The file is looked for in the folder of
    the environment variable ``ESVDFAIR_DATA``, then in the cache, then downloaded; its bytes are pinned by SHA-256.

    Parameters
    ----------
    preparation : {"clean", "paper"}
        ``"paper"`` scales the dates to [0, 1] by their range over all rows and leaves the other features in their
        units, sex in two one-hot columns. The paper does not say this, nor which six dates: it was inferred, as the
        encoding whose untouched networks come closest to the printed error and KS.
        ``"clean"`` leaves all scaling to the training split: dates (here in days since 1970) by their range, the other
        features to mean 0 and variance 1.
        Both keep the dates, which leak: a custody date long after the screening goes with recidivism.
    data_home : path, optional
        Cache folder, instead of the one of the operating system.
    download_if_missing : bool
        False never opens a connection.

    Returns
    -------
    Dataset

    Raises
    ------
    FileNotFoundError
        When the file is nowhere and cannot be downloaded.
    ValueError
        When ``preparation`` is unknown, or the file in ``ESVDFAIR_DATA`` has other bytes.
    """
    check_preparation(preparation)
    path = locate(FILE, data_home=data_home, download_if_missing=download_if_missing)
    # `decile_score` and `priors_count` occur twice in the header; pandas renames the second of each, the first is meant
    table = pd.read_csv(path).dropna(subset=list(DATES)).reset_index(drop=True)
    clean = preparation == "clean"
    sex = ("sex_male",) if clean else ("sex_female", "sex_male")  # "paper": inferred, see the docstring
    X = _features(table)[[*NUMBERS, *sex, *DATES]]
    return Dataset(
        X=X if clean else rescaled(X, DATES),
        y=table["two_year_recid"].astype("float64"),
        sensitive_features=_race(table),
        name="compas",
        target_name="two_year_recid",
        sensitive_name="race",
        description=_DESCRIPTION,
        preparation=preparation,
        standardize=(*NUMBERS, *sex) if clean else (),
        rescale=DATES if clean else (),
    )


def _features(table: pd.DataFrame) -> pd.DataFrame:
    X = table[list(NUMBERS)].astype("float64")
    X["sex_male"] = (table["sex"] == "Male").astype("float64")
    X["sex_female"] = 1.0 - X["sex_male"]
    for column in DATES:
        X[column] = (pd.to_datetime(table[column]) - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    return X


def _race(table: pd.DataFrame) -> "pd.Series[str]":
    african_american = table["race"] == "African-American"
    return african_american.map({True: "African-American", False: "other"}).rename("race")
