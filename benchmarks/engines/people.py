"""What all recipes take as given: a model, the folder people/ of Parquet files, and what they should come to."""

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair, ESVDFairWarning
from esvdfair.datasets import load_wages

INPUTS = list(load_wages().X.columns)
GOAL = 1e-6
warnings.simplefilter("ignore", ESVDFairWarning)


def table() -> pd.DataFrame:
    """All rows; ``person`` is the position of each."""
    wages = load_wages()
    return wages.X.assign(lwage=wages.y, sex=wages.sensitive_features, person=np.arange(len(wages.y)))


def prepare() -> MLPRegressor:
    """Train a model, and make people/ in a new working folder: two partitions, one file of 3 rows, one of one group."""
    rows = table()
    os.chdir(tempfile.mkdtemp())
    os.environ["PYSPARK_PYTHON"] = sys.executable  # Spark would take the first python3 of the PATH
    parts = np.random.default_rng(0).integers(0, 6, len(rows))
    parts[:3] = 6
    parts[np.flatnonzero(rows["sex"] == "female")[10:500]] = 7
    for part, own in rows.groupby(parts):
        folder = Path("people", f"half={part % 2}")
        folder.mkdir(parents=True, exist_ok=True)
        own.to_parquet(folder / f"{part}.parquet", index=False)
    model = MLPRegressor(hidden_layer_sizes=(32, 16), max_iter=15, tol=1.0, random_state=0)
    return model.fit(rows[INPUTS].to_numpy(), rows["lwage"])


def check(engine: str, fair: Any, parts: int, rows: pd.DataFrame | None = None) -> None:
    """Print how far predictions are from those of `fit` on all rows; fail above the goal."""
    rows = table() if rows is None else rows
    X = rows[INPUTS].to_numpy()
    known = ESVDFair(fair.model_, target_ks=0.1).fit(X, rows["lwage"], sensitive_features=rows["sex"]).predict(X)
    far = float(np.abs(fair.predict(X) - known).max() / known.std())
    ks = fair.summary_["ks_population"]
    print(f"{engine}: {len(rows):,} rows in {parts} parts; estimated KS {ks:.3f}; from fit on all rows {far:.0e} sd")
    if not far <= GOAL:
        raise SystemExit(f"that is more than {GOAL:.0e}")
