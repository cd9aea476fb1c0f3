"""
Three groups, one of them small
===============================

Several groups need no option. Every pair of groups has its own KS distance, estimate
and noise level (the KS distance that chance alone produces at these group sizes). A
group with fewer than 30 training or validation rows is set aside: it is named, not
compared, and its rows still count in the error.
"""

import warnings

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair
from esvdfair.datasets import load_wages
from esvdfair.plots import plot_densities

wages = load_wages(attribute="race")
X, X_val, y, y_val, race, race_val = train_test_split(
    wages.X, wages.y, wages.sensitive_features, test_size=0.4, random_state=0
)
network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(X, y)

# %%
# All three groups are large enough here. Each line is a pair of groups on the
# validation rows.

fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick())
fair.fit(X, y, sensitive_features=race, validation=(X_val, y_val, race_val))
pairs = pd.DataFrame(fair.summary_["pairs"])
columns = ["groups", "ks_before", "ks_after", "ks_population", "ks_floor"]
print(pairs[columns].round(3).to_string(index=False))

# %%
# Now keep only 50 rows of one group: 25 for training and 25 for validation. It is set
# aside with a warning, and the other two groups are repaired as well as before.


def few(rows, groups, count):
    """Positions of all rows except those of the group "hispanic" beyond a count."""
    place = (groups == "hispanic").cumsum()
    return rows[(groups != "hispanic") | (place <= count)]


some, some_val = few(race, race, 25).index, few(race_val, race_val, 25).index
small = ESVDFair(model, target_ks=0.15, effort=Effort.quick())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    small.fit(
        X.loc[some],
        y[some],
        sensitive_features=race[some],
        validation=(X_val.loc[some_val], y_val[some_val], race_val[some_val]),
    )
print(caught[0].message)
print("set aside:", small.summary_["groups_set_aside"])
print(pd.DataFrame(small.summary_["pairs"])[columns].round(3).to_string(index=False))

# %%
# Predictions of the original and the repaired model for the three groups.

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, layout="constrained")
for ax, (name, found) in zip(
    axes, {"original": model, "repaired": fair}.items(), strict=True
):
    plot_densities(found.predict(X_val), sensitive_features=race_val, ax=ax)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left")
