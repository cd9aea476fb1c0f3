"""Law School Success: undergraduate grades of black and white students (Wightman 1998)."""

from pathlib import Path

import pandas as pd

from esvdfair.datasets.base import Dataset
from esvdfair.datasets.remote import Preparation, RemoteFile, read_csv

FILE = RemoteFile(
    path="law/bar_pass_prediction.csv",
    url=(
        "https://raw.githubusercontent.com/TheRohanVerma/CMPUT622_FairSMOTE_vs_FairClassBal/"
        "a895803f7e2a09010dc2185653081b790a164096/data/bar_pass_prediction.csv"
    ),
    sha256="76ebfdb0427ce8db038d53fa5943180ac77096bffb8264f000ed21e9f0ec82f2",
)

_COLUMNS = ["dnn_bar_pass_prediction", "gender", "lsat", "pass_bar", "race1", "ugpa"]
_DESCRIPTION = (
    "Undergraduate grade point average of black and white law students from gender, LSAT score and bar passage; "
    "LSAC National Longitudinal Bar Passage Study, L. F. Wightman (1998)."
)
_LEAK = (
    " As in the paper, `dnn_bar_pass_prediction` is a feature although it takes 25 values, one for each value of the "
    "target: an error below .05 only means that a network found the leak."
)


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
    table = read_csv(FILE, preparation, data_home=data_home, download_if_missing=download_if_missing)[_COLUMNS]
    table = table[table["race1"].isin(["black", "white"])]
    clean = preparation == "clean"
    table = (table.dropna() if clean else table).reset_index(drop=True)
    X = _clean_features(table) if clean else _paper_features(table)
    return Dataset(
        X=X,
        y=table["ugpa"].astype("float64"),
        sensitive_features=table["race1"].astype(str).rename("race"),
        name="law",
        target_name="ugpa",
        sensitive_name="race",
        description=_DESCRIPTION + ("" if clean else _LEAK),
        preparation=preparation,
        standardize=tuple(X.columns) if clean else (),
    )


def _clean_features(table: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "lsat": table["lsat"].astype("float64"),
            "gender_male": (table["gender"] == "male").astype("float64"),
            "pass_bar": table["pass_bar"].astype("float64"),
        }
    )


def _paper_features(table: pd.DataFrame) -> pd.DataFrame:
    numbers = table[["dnn_bar_pass_prediction", "lsat"]]
    one_hot = pd.get_dummies(table[["gender", "pass_bar"]], columns=["gender", "pass_bar"], dtype="float64")
    one_hot.insert(2, "gender_nan", table["gender"].isna().astype("float64"))
    X = pd.concat([numbers, one_hot], axis=1).astype("float64")
    return (X - X.mean()) / X.std(ddof=0)  # divisor N, as scikit-learn's StandardScaler
