"""What a data set is: features, target, sensitive attribute, how its columns are to be scaled, and how it is split."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A regression task with a sensitive attribute, rows aligned by position.

    Parameters
    ----------
    X : DataFrame of shape (rows, features), float64, no missing values
        The sensitive attribute is never among the columns.
    y : Series of shape (rows,), float64
    sensitive_features : Series of shape (rows,), strings
    name, target_name, sensitive_name, description : str
        For tables, figures and people.
    preparation : str
        ``"clean"`` or ``"paper"``.
    standardize : tuple of str
        Columns of X that still have to be brought to mean 0 and variance 1, with the moments of the training rows.
    rescale : tuple of str
        Columns of X that still have to be brought to [0, 1], with the range of the training rows.
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
