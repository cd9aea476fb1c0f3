"""The two data sets of the paper, which may not be redistributed: found or downloaded, checked by hash, prepared."""

import hashlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from esvdfair.datasets.base import Dataset

VARIABLE = "ESVDFAIR_DATA"
Preparation = Literal["clean", "paper"]


@dataclass(frozen=True)
class RemoteFile:
    """One file: where it lies under a data folder, where its very bytes are public, and their SHA-256."""

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

_LAW_IS = (
    "Undergraduate grade point average of black and white law students from gender, LSAT score and bar passage; "
    "LSAC National Longitudinal Bar Passage Study, L. F. Wightman (1998)."
)
_LEAK = (
    " As in the paper, `dnn_bar_pass_prediction` is a feature although it takes 25 values, one for each value of the "
    "target: an error below .05 only means that a network found the leak."
)
_COMPAS_IS = (
    "Whether a person is charged with a new crime within two years, from age, sex, counts of prior offences, COMPAS "
    "scores and six dates; ProPublica's Broward County file. The dates leak: a custody date long after the screening "
    "goes with recidivism. They are kept, as in the paper."
)

NUMBERS = (
    "age", "juv_fel_count", "decile_score", "juv_misd_count", "juv_other_count", "v_decile_score", "priors_count",
)  # fmt: skip
DATES = ("c_jail_in", "c_jail_out", "c_offense_date", "screening_date", "in_custody", "out_custody")


def fetch_law(
    preparation: Preparation = "clean", *, data_home: str | Path | None = None, download_if_missing: bool = True
) -> Dataset:
    """Law School Success: target ``ugpa``, attribute ``race`` (black 1,343, white 18,716).

    The file is looked for in the folder of the environment variable ``ESVDFAIR_DATA``, then in the cache, then
    downloaded; its bytes are pinned by SHA-256.

    Parameters
    ----------
    preparation : {"clean", "paper"}
        ``"clean"`` drops the four rows without gender (one black, three white) and the column
        ``dnn_bar_pass_prediction``, which is the target in disguise (25 values, one for each value of ugpa), and leaves
        scaling to the training split: features ``lsat, gender_male, pass_bar``.
        ``"paper"`` does as the authors did: that column stays, gender is one-hot with a column ``gender_nan`` for the
        four rows, and everything is standardised with the moments of all rows.
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
    table = _read(LAW, preparation, data_home=data_home, download_if_missing=download_if_missing)
    clean = preparation == "clean"
    kept = table["race1"].isin(["black", "white"]) & (table["gender"].notna() | (not clean))
    table = table[kept].reset_index(drop=True)
    X = table[["lsat", "pass_bar"]].astype("float64")
    if clean:
        X.insert(1, "gender_male", (table["gender"] == "male").astype("float64"))
    else:
        X = _as_the_authors(table)
    return Dataset(
        X=X,
        y=table["ugpa"].astype("float64"),
        sensitive_features=table["race1"].astype(str).rename("race"),
        name="law",
        target_name="ugpa",
        sensitive_name="race",
        description=_LAW_IS + ("" if clean else _LEAK),
        preparation=preparation,
        standardize=tuple(X.columns) if clean else (),
    )


def _as_the_authors(table: pd.DataFrame) -> pd.DataFrame:
    numbers = table[["dnn_bar_pass_prediction", "lsat"]]
    one_hot = pd.get_dummies(table[["gender", "pass_bar"]], columns=["gender", "pass_bar"], dtype="float64")
    one_hot.insert(2, "gender_nan", table["gender"].isna().astype("float64"))
    X = pd.concat([numbers, one_hot], axis=1).astype("float64")
    return (X - X.mean()) / X.std(ddof=0)  # divisor N, as scikit-learn's StandardScaler


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
    table = _read(COMPAS, preparation, data_home=data_home, download_if_missing=download_if_missing)
    clean = preparation == "clean"
    X = table[list(NUMBERS)].astype("float64")
    X["sex_male"] = (table["sex"] == "Male").astype("float64")
    for column in DATES:  # in days since 1970; NaN where it is missing
        X[column] = (pd.to_datetime(table[column]) - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
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
        description=_COMPAS_IS,
        preparation=preparation,
        standardize=(*NUMBERS, "sex_male") if clean else (),
        rescale=DATES if clean else (),
    )


# --- where the files are ---------------------------------------------------------------------------------------------


def _read(
    file: RemoteFile, preparation: str, *, data_home: str | Path | None, download_if_missing: bool
) -> pd.DataFrame:
    """The table in ``file``. A ``preparation`` that is none of the two is a ValueError before any file is sought."""
    if preparation not in ("clean", "paper"):
        raise ValueError(
            f"preparation is {preparation!r}; choose 'clean' (no leak, scaled on the training rows) or 'paper' (as the "
            "authors did)."
        )
    return pd.read_csv(locate(file, data_home=data_home, download_if_missing=download_if_missing))


def locate(file: RemoteFile, *, data_home: str | Path | None = None, download_if_missing: bool = True) -> Path:
    """Path of a local copy of ``file`` with the pinned bytes: given by ``ESVDFAIR_DATA``, cached, or downloaded.

    Raises
    ------
    ValueError
        The file in ``ESVDFAIR_DATA`` has other bytes than the pinned ones.
    FileNotFoundError
        It is nowhere and cannot be downloaded; the one line names the variable, the file and the address.
    ImportError
        A download is needed and pooch is not installed.
    """
    folder = os.environ.get(VARIABLE)
    if folder and (given := Path(folder) / file.path).is_file():
        found = _sha256(given)
        if found != file.sha256:
            raise ValueError(
                f"{given} (from {VARIABLE}) has SHA-256 {found}, expected {file.sha256}: it is another version of the "
                f"file, and row counts and results would differ. Replace it by {file.url} or unset {VARIABLE}."
            )
        return given
    cached = cache_folder(data_home) / file.path
    if cached.is_file() and _sha256(cached) == file.sha256:
        return cached
    if not download_if_missing:
        raise FileNotFoundError(_absent(file, "download_if_missing=False"))
    try:
        _pooch().retrieve(file.url, known_hash=f"sha256:{file.sha256}", fname=cached.name, path=cached.parent)
    except OSError as error:  # no connection, no such page, no room on the disk
        raise FileNotFoundError(_absent(file, type(error).__name__)) from error
    except ValueError as error:  # pooch's word for a wrong hash; it keeps nothing then
        raise FileNotFoundError(_absent(file, "the bytes there are not the pinned ones")) from error
    return cached


def cache_folder(data_home: str | Path | None = None) -> Path:
    """``data_home``, or the folder for downloaded files that the operating system proposes (``XDG_CACHE_HOME``…)."""
    return Path(_pooch().os_cache("esvdfair") if data_home is None else data_home).expanduser()


def _absent(file: RemoteFile, reason: str) -> str:
    return (
        f"{file.path} not found: set the environment variable {VARIABLE} to a folder that holds it, or go online once "
        f"to download it from {file.url} ({reason})."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pooch() -> Any:
    try:
        return importlib.import_module("pooch")
    except ImportError as error:
        raise ImportError(
            f"downloading needs pooch: pip install 'esvdfair[data]', or set {VARIABLE} to a folder with the file."
        ) from error
