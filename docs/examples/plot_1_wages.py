"""
Wages, with scikit-learn
========================

A network predicts hourly wages. It is never told anybody's sex, yet it predicts men and women differently: work
experience and degrees tell it enough. We repair the network and look at people whom neither training nor repair has
seen.
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
# Three parts: to train on, to choose a repair on, and to judge both on. The sex is no column of ``X``.

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
# The repair. ``Effort.quick()`` compares few candidates, for this page; leave it out to compare some hundred.

fair = ESVDFair(model, target_ks=0.10, effort=Effort.quick())
fair.fit(X, y, sensitive_features=sex, validation=(X_val, y_val, sex_val))
repaired = fair.estimator_  # a Pipeline like `model`, which is as it was

for name, found in (("as trained", model), ("repaired", repaired)):
    predicted = found.predict(X_test)
    distance = ks_distance(predicted, sensitive_features=sex_test)
    print(f"{name:10}  KS {distance:.3f}  mean squared error {((predicted - y_test) ** 2).mean():.4f}")

# %%
# What it costs, and what another target would cost: each point is a model that is ready to take.

plot_curve(fair.curve_, target_ks=0.10)

# %%
# Before and after, on people whom nobody has seen. The tick marks a group's mean.

figure, (before, after) = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True, layout="constrained")
plot_densities(model.predict(X_test), sensitive_features=sex_test, ax=before)
plot_densities(repaired.predict(X_test), sensitive_features=sex_test, ax=after)
before.set_title(f"as trained: {before.get_title(loc='left')}", loc="left")
after.set_title(f"repaired: {after.get_title(loc='left')}", loc="left")
# sphinx_gallery_thumbnail_number = 2
