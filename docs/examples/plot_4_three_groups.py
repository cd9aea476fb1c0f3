"""
Three groups
============

More than two groups need no option. Every pair of groups has its own KS distance, estimate and noise level: the KS
that chance alone produces at these group sizes. Groups with fewer than 30 rows would be set aside and named.
"""

import matplotlib.pyplot as plt
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair
from esvdfair.audit import audit_predictions
from esvdfair.datasets import load_wages
from esvdfair.plots import plot_densities

wages = load_wages(attribute="race")
X, X_val, y, y_val, race, race_val = train_test_split(
    wages.X, wages.y, wages.sensitive_features, test_size=0.4, random_state=0, stratify=wages.sensitive_features
)
network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(X, y)

# %%
# ``parity`` makes the means and variances of all three equal; ``transport``, the default, whole distributions.

models = {"as trained": model}
for method in ("parity", "transport"):
    fair = ESVDFair(model, method=method, target_ks=0.15, effort=Effort.quick())
    models[method] = fair.fit(X, y, sensitive_features=race, validation=(X_val, y_val, race_val)).estimator_

# %%
# Audit each model on the validation rows. The figures are those of the two most different groups.

for name, found in models.items():
    audit = audit_predictions(found.predict(X_val), race_val, y_val)
    largest = max(audit.between.pairs, key=lambda pair: pair.ks_population)
    pair = " and ".join(largest.groups)
    print(f"{name:10}  {pair}: KS {largest.ks:.3f}, noise level {largest.ks_floor:.3f}; MSE {audit.mse:.4f}")

# %%
# The picture: who is where, before and after.

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharex=True, layout="constrained")
for ax, (name, found) in zip(axes, models.items(), strict=True):
    plot_densities(found.predict(X_val), sensitive_features=race_val, ax=ax)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left")
