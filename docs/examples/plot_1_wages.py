"""
Wages, with scikit-learn
========================

A network predicts hourly wages. The sex is not an input, yet predictions for men and
women differ, because work experience and degrees differ. We repair the network and
evaluate it on test data.
"""

import matplotlib.pyplot as plt
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.datasets import load_wages
from esvdfair.plots import plot_curve, plot_densities

# %%
# Training, validation and test rows. ``X`` has no column for the sex.

wages = load_wages()
X, X_rest, y, y_rest, sex, sex_rest = train_test_split(
    wages.X, wages.y, wages.sensitive_features, test_size=0.5, random_state=0
)
X_val, X_test, y_val, y_test, sex_val, sex_test = train_test_split(
    X_rest, y_rest, sex_rest, test_size=0.5, random_state=0
)

network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(X, y)

# %%
# The repair. ``Effort.quick()`` compares a few candidates, which is enough here; the
# default compares several hundred.

fair = ESVDFair(model, target_ks=0.10, effort=Effort.quick())
fair.fit(X, y, sensitive_features=sex, validation=(X_val, y_val, sex_val))
repaired = fair.estimator_  # a Pipeline like `model`, which is unchanged

for name, found in (("original", model), ("repaired", repaired)):
    predicted = found.predict(X_test)
    distance = ks_distance(predicted, sensitive_features=sex_test)
    error = ((predicted - y_test) ** 2).mean()
    print(f"{name:10}  KS {distance:.3f}  mean squared error {error:.4f}")

# %%
# The trade-off between error and parity. Each point is a repaired model;
# ``fair.curve_.model(point)`` returns it.

plot_curve(fair.curve_, target_ks=0.10)

# %%
# Predictions for the test rows. Ticks mark the means of the groups.

figure, (before, after) = plt.subplots(
    1, 2, figsize=(8, 3.8), sharex=True, layout="constrained"
)
plot_densities(model.predict(X_test), sensitive_features=sex_test, ax=before)
plot_densities(repaired.predict(X_test), sensitive_features=sex_test, ax=after)
before.set_title(f"original: {before.get_title(loc='left')}", loc="left")
after.set_title(f"repaired: {after.get_title(loc='left')}", loc="left")
# sphinx_gallery_thumbnail_number = 2
