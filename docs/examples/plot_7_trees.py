"""
Wages, with LightGBM
====================

Boosted trees predict hourly wages without anybody's sex, yet differently for women and
men. The repair changes the values in the leaves; splits, number of trees and class of
the model stay as they are.
"""

import lightgbm
import matplotlib.pyplot as plt
from sklearn.model_selection import train_test_split

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.datasets import load_wages
from esvdfair.explain import explain_trees
from esvdfair.plots import plot_densities

# %%
# Trees fit their training rows closely, so validation rows must be new to them.

wages = load_wages()
X, X_rest, y, y_rest, sex, sex_rest = train_test_split(
    wages.X, wages.y, wages.sensitive_features, test_size=0.5, random_state=0
)
X_val, X_test, y_val, y_test, sex_val, sex_test = train_test_split(
    X_rest, y_rest, sex_rest, test_size=0.5, random_state=0
)
model = lightgbm.LGBMRegressor(
    n_estimators=100,
    num_leaves=15,
    learning_rate=0.05,
    verbose=-1,
    random_state=0,
)
model.fit(X, y)

# %%
# Where does the difference in means come from? Its parts, by input column, add up
# exactly.

print(
    explain_trees(model, X_test, sensitive_features=sex_test)
    .to_frame()
    .head(5)
    .round(3)
    .to_string(index=False)
)

# %%
# The repair returns an ``LGBMRegressor``.

fair = ESVDFair(model, target_ks=0.10, effort=Effort.quick())
fair.fit(X, y, sensitive_features=sex, validation=(X_val, y_val, sex_val))
repaired = fair.estimator_

for name, found in (("original", model), ("repaired", repaired)):
    predicted = found.predict(X_test)
    distance = ks_distance(predicted, sensitive_features=sex_test)
    error = ((predicted - y_test) ** 2).mean()
    print(f"{name:10}  KS {distance:.3f}  mean squared error {error:.4f}")

# %%
# Predictions for the test rows.

figure, (before, after) = plt.subplots(
    1, 2, figsize=(8, 3.8), sharex=True, layout="constrained"
)
plot_densities(model.predict(X_test), sensitive_features=sex_test, ax=before)
plot_densities(repaired.predict(X_test), sensitive_features=sex_test, ax=after)
before.set_title(f"original: {before.get_title(loc='left')}", loc="left")
after.set_title(f"repaired: {after.get_title(loc='left')}", loc="left")
