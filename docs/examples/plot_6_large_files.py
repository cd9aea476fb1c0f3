"""
Files larger than memory
========================

A table of any size is read chunk by chunk, once. Kept are group moments, which know every row, and a bounded sample
of rows, which the whole distributions are read from; memory does not grow with the file. Here the file is small, so
that this page is built quickly, and the chunks are smaller still.
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
# A file of 60,000 people who are made up. Parquet works too, and is faster; so do ``.csv.gz`` and ``.zip``.

folder = Path(tempfile.mkdtemp())
people = make_wages(60_000)
table = people.X.assign(lwage=people.y, sex=people.sensitive_features)
table.to_csv(folder / "people.csv", index=False)

network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(people.X[:5000], people.y[:5000])

# %%
# Say which column is what; all others are inputs of the model, in file order. The repair reads the file once.

rows = TableBatches(folder / "people.csv", Roles(sensitive=("sex",), target="lwage"))
fair = ESVDFair(model, target_ks=0.08, effort=Effort.quick()).fit(rows)
print(f"judged on {fair.summary_['rows']:,} held-out rows of {len(table):,}")
print(f"KS {fair.summary_['ks_before']:.3f} -> {fair.summary_['ks_after']:.3f}")

# %%
# What the pass keeps of all rows is the same whatever the chunks: moments stream, and moments of parts add up.

whole = GroupMoments().update(people.X.to_numpy(), people.sensitive_features)
parts = GroupMoments()
for chunk in pd.read_csv(folder / "people.csv", chunksize=7000):
    parts = parts.merge(GroupMoments().update(chunk[people.X.columns].to_numpy(), chunk["sex"]))
print(f"largest difference of the means: {abs(whole.means - parts.means).max():.1e}")

# %%
# Predictions of fresh people.

fresh = make_wages(20_000, random_state=1)
X, sex = fresh.X, fresh.sensitive_features
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True, layout="constrained")
for ax, name, found in zip(axes, ("as trained", "repaired"), (model, fair.estimator_), strict=True):
    plot_densities(found.predict(X), sensitive_features=sex, ax=ax)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left")
