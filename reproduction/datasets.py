"""The data sets of the paper and their split; law and COMPAS may not be redistributed: they are found or downloaded.

A file is looked for in the folder that the environment variable ``ESVDFAIR_DATA`` names, then in the cache, then
downloaded with pooch; its bytes are pinned by SHA-256.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from esvdfair.datasets import Dataset, load_wages
from esvdfair.files import sha256_of

VARIABLE = "ESVDFAIR_DATA"
Preparation = Literal["clean", "paper"]


@dataclass(frozen=True)
class RemoteFile:
    """One file: its path in a data folder, its public address, and its SHA-256."""

    path: str
    url: str
    sha256: str


LAW = RemoteFile(
    path="law/bar_pass_prediction.csv",
    url=(
        "https://raw.githubusercontent.com/TheRohanVerma/CMPUT622_FairSMOTE_vs_FairClassBal/"
        "a895803f7e2a09010dc2185653081b790a164096/data/bar_pass_prediction.csv"
    ),
    sha256="76ebfdb0427ce8db038d53fa5943180ac77096bffb8264f000ed21e9f0ec82f2",
)
COMPAS = RemoteFile(
    path="compas/compas-scores-two-years.csv",
    url=(
        "https://raw.githubusercontent.com/propublica/compas-analysis/"
        "bafff5da3f2e45eca6c2d5055faad269defd135a/compas-scores-two-years.csv"
    ),
    sha256="c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
)

NUMBERS = (  # of COMPAS
    "age", "juv_fel_count", "decile_score", "juv_misd_count", "juv_other_count", "v_decile_score", "priors_count",
)  # fmt: skip
DATES = ("c_jail_in", "c_jail_out", "c_offense_date", "screening_date", "in_custody", "out_custody")


@dataclass(frozen=True, eq=False, repr=False)
class Unscaled(Dataset):
    """A data set, and which of its columns `split` scales by the training rows.

    ``standardize`` columns get mean 0 and variance 1, ``rescale`` columns the range [0, 1].
    """

    standardize: tuple[str, ...] = ()
    rescale: tuple[str, ...] = ()


@lru_cache(maxsize=2)
def load(dataset: str, preparation: Preparation) -> Unscaled:
    """Load "law", "compas" or "wages", once for each process."""
    if dataset == "wages":
        wages = load_wages()
        return Unscaled(**vars(wages), standardize=wages.feature_names)
    return fetch_law(preparation) if dataset == "law" else fetch_compas(preparation)


def fetch_law(preparation: Preparation = "clean") -> Unscaled:
    """Load Law School Success: target ``ugpa``, attribute ``race`` (black 1,343, white 18,716).

    ``"clean"`` drops the four rows without gender (one black, three white) and the column
    ``dnn_bar_pass_prediction``, which is the target in disguise (25 values, one for each value of ugpa), and leaves
    scaling to the training split: features ``lsat, gender_male, pass_bar``.

    ``"paper"`` does as the authors did: that column stays, gender is one-hot with a column ``gender_nan`` for the
    four rows, and everything is standardised with the moments of all rows.
    """
    table, clean = pd.read_csv(locate(LAW)), preparation == "clean"
    kept = table["race1"].isin(["black", "white"]) & (table["gender"].notna() | (not clean))
    table = table[kept].reset_index(drop=True)
    if clean:
        X = table[["lsat", "gender", "pass_bar"]].rename(columns={"gender": "gender_male"})
        X = X.assign(gender_male=X["gender_male"] == "male").astype("float64")
    else:
        one_hot = pd.get_dummies(table[["gender", "pass_bar"]], columns=["gender", "pass_bar"])
        one_hot.insert(2, "gender_nan", table["gender"].isna())
        X = pd.concat([table[["dnn_bar_pass_prediction", "lsat"]], one_hot], axis=1).astype("float64")
        X = (X - X.mean()) / X.std(ddof=0)  # divisor N, as scikit-learn's StandardScaler
    return Unscaled(
        X=X,
        y=table["ugpa"].astype("float64"),
        sensitive_features=table["race1"].astype(str).rename("race"),
        name="law",
        target_name="ugpa",
        sensitive_name="race",
        description=(
            "Undergraduate grade point average of black and white law students from gender, LSAT score and bar "
            "passage; LSAC National Longitudinal Bar Passage Study, L. F. Wightman (1998)."
        ),
        standardize=tuple(X.columns) if clean else (),
    )


def fetch_compas(preparation: Preparation = "clean") -> Unscaled:
    """Load COMPAS: target ``two_year_recid`` (0 or 1), attribute ``race`` (African-American 2,941, other 2,914).

    Of the 7,214 rows of the two-year file the 5,855 with all six dates stay. Sex is one column, 1 for men.

    ``"paper"`` scales the dates to [0, 1] by their range over the *whole file*, before rows without a date are
    dropped, and leaves the other features in their units. The paper does not say this, nor which six dates: it was
    inferred, as the encoding whose networks come closest to the printed error and KS, original and repaired.

    ``"clean"`` leaves all scaling to the training split: dates (here in days since 1970) by their range, the other
    features to mean 0 and variance 1.

    Both keep the dates, which leak: a custody date long after the screening goes with recidivism.
    """
    # `decile_score` and `priors_count` occur twice in the header; pandas renames the second of each, the first is meant
    table, clean = pd.read_csv(locate(COMPAS)), preparation == "clean"
    X = table[list(NUMBERS)].astype("float64")
    X["sex_male"] = (table["sex"] == "Male").astype("float64")
    for column in DATES:  # in days since 1970; NaN where it is missing
        X[column] = (pd.to_datetime(table[column]) - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    if not clean:
        dates = X[list(DATES)]
        X[list(DATES)] = (dates - dates.min()) / (dates.max() - dates.min())
    kept = X.notna().all(axis=1)
    african_american = table.loc[kept, "race"] == "African-American"
    return Unscaled(
        X=X[kept].reset_index(drop=True),
        y=table.loc[kept, "two_year_recid"].astype("float64").reset_index(drop=True),
        sensitive_features=african_american.map({True: "African-American", False: "other"}).reset_index(drop=True),
        name="compas",
        target_name="two_year_recid",
        sensitive_name="race",
        description=(
            "Whether a person is charged with a new crime within two years, from age, sex, counts of prior offences, "
            "COMPAS scores and six dates; ProPublica's Broward County file."
        ),
        standardize=(*NUMBERS, "sex_male") if clean else (),
        rescale=DATES if clean else (),
    )


def locate(file: RemoteFile) -> Path:
    """Return the path of a local copy of ``file``, downloading it when there is none.

    Raises
    ------
    ValueError
        The file in ``ESVDFAIR_DATA`` has other bytes than the pinned ones.
    FileNotFoundError
        It is not found and cannot be downloaded.
    """
    folder = os.environ.get(VARIABLE)
    if folder and (given := Path(folder) / file.path).is_file():
        if sha256_of(given) != file.sha256:
            raise ValueError(
                f"{given} (from {VARIABLE}) is another version of the file: its SHA-256 is not {file.sha256}. "
                f"Replace it with {file.url} or unset {VARIABLE}."
            )
        return given
    import pooch  # a file that is given needs none

    cached = Path(pooch.os_cache("esvdfair")) / file.path
    try:
        pooch.retrieve(file.url, known_hash=f"sha256:{file.sha256}", fname=cached.name, path=cached.parent)
    except (OSError, ValueError) as error:  # no connection; or other bytes there
        raise FileNotFoundError(
            f"{file.path} not found and not downloaded ({type(error).__name__}). "
            f"Set {VARIABLE} to a folder that contains it, or get it from {file.url}."
        ) from error
    return cached


# --- the split ------------------------------------------------------------------------------------------------------


class Examples(NamedTuple):
    """Rows of a data set, which unpack as ``X, y, sensitive_features`` and can be passed as ``validation=``."""

    X: NDArray[np.float64]
    y: NDArray[np.float64]
    sensitive_features: NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class Split:
    """A data set in three, scaled with the statistics of the training rows alone (unless it came scaled)."""

    train: Examples
    validation: Examples
    test: Examples

    @property
    def heldout(self) -> Examples:
        """Validation and test rows together, the 30 % on which the paper's ablations are scored."""
        both = zip(self.validation, self.test, strict=True)
        return Examples(*(np.concatenate(pair) for pair in both))


def split(dataset: Unscaled, seed: int) -> Split:
    """Shuffle the rows, divide them 70/15/15 as the paper does, and scale the columns that the data set lists.

    The scaling is fitted on the training rows: ``(x − mean)/std`` for ``dataset.standardize`` and ``(x − min)/(max −
    min)`` for ``dataset.rescale``, so test values may fall outside [0, 1]. A column that is constant on the training
    rows is only centred.
    """
    train, rest = train_test_split(np.arange(len(dataset.X)), test_size=0.30, random_state=seed)
    validation, test = train_test_split(rest, test_size=0.50, random_state=seed)
    X = _scaled(dataset, train)
    y, groups = dataset.y.to_numpy(np.float64), dataset.sensitive_features.to_numpy(object)
    return Split(*(Examples(X[rows], y[rows], groups[rows]) for rows in (train, validation, test)))


def _scaled(dataset: Unscaled, train: NDArray[np.intp]) -> NDArray[np.float64]:
    seen = dataset.X.iloc[train]
    shift = pd.Series(0.0, index=dataset.X.columns)
    scale = pd.Series(1.0, index=dataset.X.columns)
    for column in dataset.standardize:
        shift[column], scale[column] = seen[column].mean(), seen[column].std(ddof=0)
    for column in dataset.rescale:
        shift[column], scale[column] = seen[column].min(), seen[column].max() - seen[column].min()
    scaled: NDArray[np.float64] = ((dataset.X - shift) / scale.where(scale > 0, 1.0)).to_numpy(np.float64)
    return scaled
