"""What a data set is: features, target, sensitive attribute, and how its columns are to be scaled."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd


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
        When the three have different lengths, X is not float64, or a value is missing.
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
        if not (self.X.dtypes == "float64").all():
            raise ValueError(
                f"X has column types {sorted(set(map(str, self.X.dtypes)))}; every column must be float64."
            )
        missing = int(self.X.isna().sum().sum() + self.y.isna().sum() + self.sensitive_features.isna().sum())
        if missing:
            raise ValueError(f"{self.name} has {missing} missing values; drop or fill those rows before.")
        unknown = {*self.standardize, *self.rescale} - set(self.X.columns)
        if unknown:
            raise ValueError(f"columns to scale {sorted(unknown)} are not in X; X has {list(self.X.columns)}.")

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


def check_preparation(preparation: str) -> None:
    """Raise ValueError unless ``preparation`` is one of the two there are."""
    if preparation not in ("clean", "paper"):
        raise ValueError(
            f"preparation is {preparation!r}; choose 'clean' (no leak, scaled on the training rows) or 'paper' (as the "
            "authors did)."
        )


def standardized(table: pd.DataFrame) -> pd.DataFrame:
    """Every column to mean 0 and variance 1 over all rows (divisor N, as scikit-learn's StandardScaler)."""
    return (table - table.mean()) / table.std(ddof=0)


def rescaled(table: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    """The given columns to [0, 1] by their range over all rows; the others as they are."""
    part = table[list(columns)]
    return table.assign(**{c: (part[c] - part[c].min()) / (part[c].max() - part[c].min()) for c in columns})
