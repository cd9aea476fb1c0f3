"""
Files larger than memory
========================

A file of any size is read once, in chunks. The repair keeps group moments of all rows
and a bounded sample of rows, so memory does not grow with the file. The file in this
example is small, so that the page builds quickly.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, GroupMoments
from esvdfair.datasets import make_wages
from esvdfair.plots import plot_densities
from esvdfair.tables import Roles, TableBatches

# %%
# A CSV file of 60,000 made-up people. Parquet files, directories of them, ``.csv.gz``
# and ``.zip`` work too.

folder = Path(tempfile.mkdtemp())
people = make_wages(60_000)
table = people.X.assign(lwage=people.y, sex=people.sensitive_features)
table.to_csv(folder / "people.csv", index=False)

network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(people.X[:5000], people.y[:5000])

# %%
# Name the columns that are not inputs of the model. All others are inputs, in the order
# of the file.

rows = TableBatches(folder / "people.csv", Roles(sensitive=("sex",), target="lwage"))
fair = ESVDFair(model, target_ks=0.08, effort=Effort.quick()).fit(rows)
print(f"evaluated on {fair.summary_['rows']:,} held-out rows of {len(table):,}")
print(f"KS {fair.summary_['ks_before']:.3f} -> {fair.summary_['ks_after']:.3f}")

# %%
# Group moments do not depend on how the rows are divided into chunks.

whole = GroupMoments().update(people.X.to_numpy(), people.sensitive_features)
parts = GroupMoments()
for chunk in pd.read_csv(folder / "people.csv", chunksize=7000):
    parts = parts.merge(
        GroupMoments().update(chunk[people.X.columns].to_numpy(), chunk["sex"])
    )
print(f"largest difference of the means: {abs(whole.means - parts.means).max():.1e}")

# %%
# Predictions for new people.

fresh = make_wages(20_000, random_state=1)
X, sex = fresh.X, fresh.sensitive_features
figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), sharex=True, layout="constrained")
for ax, name, found in zip(
    axes, ("original", "repaired"), (model, fair.estimator_), strict=True
):
    plot_densities(found.predict(X), sensitive_features=sex, ax=ax)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left")
