"""The splits of the paper: 70 % training, 15 % validation, 15 % test, one for each seed 33..82."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from esvdfair.datasets import Dataset

SEEDS = range(33, 83)


class Part(NamedTuple):
    """Some rows of a data set; unpacks as ``X, y, sensitive_features``, so it can be passed as ``validation=``.

    X : (rows, features) float64, scaled; y : (rows,) float64; sensitive_features : (rows,) object (strings).
    """

    X: NDArray[np.float64]
    y: NDArray[np.float64]
    sensitive_features: NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class Split:
    """A data set in three parts, scaled with the statistics of the training part alone (unless it came scaled)."""

    train: Part
    validation: Part
    test: Part

    @property
    def heldout(self) -> Part:
        """Validation and test rows together, the 30 % on which the paper's ablations are scored."""
        both = zip(self.validation, self.test, strict=True)
        return Part(*(np.concatenate(pair) for pair in both))


def split(dataset: Dataset, seed: int) -> Split:
    """Shuffle by ``seed`` and cut 70/15/15; then scale the columns that the data set lists.

    The scaling is fitted on the training rows: ``(x − mean)/std`` for ``dataset.standardize`` and
    ``(x − min)/(max − min)`` for ``dataset.rescale``, so test dates may fall a little outside [0, 1]. A column that is
    constant on the training rows is only centred.

    Parameters
    ----------
    dataset : Dataset
    seed : int
        The paper's are 33..82. Equal seeds give equal rows, for either preparation with as many rows.

    Returns
    -------
    Split
    """
    rows = np.arange(len(dataset.X))
    train, rest = train_test_split(rows, test_size=0.30, random_state=seed)
    validation, test = train_test_split(rest, test_size=0.50, random_state=seed)
    X = _scaled(dataset, train)
    return Split(*(_part(dataset, X, which) for which in (train, validation, test)))


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


def _part(dataset: Dataset, X: NDArray[np.float64], rows: NDArray[np.intp]) -> Part:
    return Part(
        X=X[rows],
        y=np.asarray(dataset.y, dtype=np.float64)[rows],
        sensitive_features=dataset.sensitive_features.to_numpy(object)[rows],
    )
