"""COMPAS: recidivism within two years (ProPublica 2016)."""

from pathlib import Path

import pandas as pd

from esvdfair.datasets.base import Dataset
from esvdfair.datasets.remote import Preparation, RemoteFile, read_csv

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
    preparation: Preparation = "clean", *, data_home: str | Path | None = None, download_if_missing: bool = True
) -> Dataset:
    """COMPAS: target ``two_year_recid`` (0 or 1), attribute ``race`` (African-American 2,941, other 2,914).

    Of the 7,214 rows of the two-year file the 5,855 with all six dates stay. Sex is one column, 1 for men.

    Parameters
    ----------
    preparation : {"clean", "paper"}
        ``"paper"`` scales the dates to [0, 1] by their range over the *whole file*, before rows without a date are
        dropped, and leaves the other features in their units. The paper does not say this, nor which six dates: it was
        inferred, as the encoding whose networks come closest to the printed error and KS, untouched and repaired.
        ``"clean"`` leaves all scaling to the training split: dates (here in days since 1970) by their range, the other
        features to mean 0 and variance 1.
        Both keep the dates, which leak: a custody date long after the screening goes with recidivism.
    data_home, download_if_missing : as in :func:`~esvdfair.datasets.fetch_law`, with its errors

    Returns
    -------
    Dataset
    """
    # `decile_score` and `priors_count` occur twice in the header; pandas renames the second of each, the first is meant
    table = read_csv(FILE, preparation, data_home=data_home, download_if_missing=download_if_missing)
    clean = preparation == "clean"
    X = _features(table)
    if not clean:
        dates = X[list(DATES)]
        X[list(DATES)] = (dates - dates.min()) / (dates.max() - dates.min())
    kept = X.notna().all(axis=1)
    african_american = table.loc[kept, "race"] == "African-American"
    return Dataset(
        X=X[kept].reset_index(drop=True),
        y=table.loc[kept, "two_year_recid"].astype("float64").reset_index(drop=True),
        sensitive_features=african_american.map({True: "African-American", False: "other"}).reset_index(drop=True),
        name="compas",
        target_name="two_year_recid",
        sensitive_name="race",
        description=_DESCRIPTION,
        preparation=preparation,
        standardize=(*NUMBERS, "sex_male") if clean else (),
        rescale=DATES if clean else (),
    )


def _features(table: pd.DataFrame) -> pd.DataFrame:
    """All rows of the file; a date that is missing is NaN."""
    X = table[list(NUMBERS)].astype("float64")
    X["sex_male"] = (table["sex"] == "Male").astype("float64")
    for column in DATES:
        X[column] = (pd.to_datetime(table[column]) - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    return X
