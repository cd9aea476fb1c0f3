"""
A PyTorch network on COMPAS
===========================

ProPublica's file of two-year recidivism in Broward County. A network scores how likely
a person is to be charged again; race is not an input. How close can the scores of two
groups come, and how much does the error of each group increase? **Parity does not
answer whether a score like this should exist at all.**
"""

import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from torch import nn

from esvdfair import Effort, ESVDFair
from esvdfair.plots import plot_curve, plot_densities

# %%
# The file is ``compas-scores-two-years.csv`` of `ProPublica
# <https://github.com/propublica/compas-analysis>`_.

table = pd.read_csv(
    Path(os.environ["ESVDFAIR_DATA"]) / "compas" / "compas-scores-two-years.csv"
)
features = [
    "age",
    "juv_fel_count",
    "juv_misd_count",
    "juv_other_count",
    "priors_count",
    "decile_score",
]
table["race"] = table["race"].where(table["race"] == "African-American", "other")
print(table["race"].value_counts())
train, rest = train_test_split(table, test_size=0.3, random_state=1)
validation, test = train_test_split(rest, test_size=0.5, random_state=1)
mean, spread = train[features].mean(), train[features].std()


def inputs(people):
    return ((people[features] - mean) / spread).to_numpy(np.float32)


def labels(people):
    return people["two_year_recid"].to_numpy(np.float32)


# %%
# An ordinary network, trained as usual.

torch.manual_seed(0)
X, y = torch.tensor(inputs(train)), torch.tensor(labels(train))
network = nn.Sequential(
    nn.Linear(X.shape[1], 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 1),
)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
for _ in range(8):
    for rows in torch.randperm(len(X)).split(128):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(X[rows]).squeeze(1), y[rows]).backward()
        optimizer.step()

# %%
# ``ESVDFair`` takes the module and returns a copy with a different last layer. Arrays
# and tensors both work.

fair = ESVDFair(network, target_ks=0.15, effort=Effort.quick())
fair.fit(
    X,
    y,
    sensitive_features=train["race"],
    validation=(inputs(validation), labels(validation), validation["race"]),
)

reached = fair.summary_
before, after, noise = (reached[f"ks_{name}"] for name in ("before", "after", "floor"))
print(f"KS   {before:.3f} -> {after:.3f}, noise level {noise:.3f}")
print(f"MSE  {reached['mse_before']:.4f} -> {reached['mse_after']:.4f}")
for group, before in reached["group_mse_before"].items():
    print(f"  of {group}: {before:.4f} -> {reached['group_mse_after'][group]:.4f}")

# %%
# The trade-off, and the repaired predictions for test rows.

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
plot_curve(fair.curve_, target_ks=0.15, ax=left)
plot_densities(fair.predict(inputs(test)), sensitive_features=test["race"], ax=right)
right.set_title(f"repaired, test rows: {right.get_title(loc='left')}", loc="left")
