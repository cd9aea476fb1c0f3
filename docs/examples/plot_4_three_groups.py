"""
Three groups
============

More than two groups need no option: every pair is brought together, and the KS distance is that of the farthest pair.
Small groups set the limit of what can be told: with 127 people in the smallest group that judges, groups that *are*
distributed alike would still show a KS distance of about 0.1. That is the sampling floor.
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
# Each model audited on the rows that chose it. Beside a distance stands how sure it is.

for name, found in models.items():
    audit = audit_predictions(found.predict(X_val), race_val, y_val)
    low, high = audit.ks_interval
    print(f"{name:10}  KS {audit.ks:.3f} [{low:.3f}, {high:.3f}]  floor {audit.ks_floor:.3f}  MSE {audit.mse:.4f}")

# %%
# The picture: who is where, before and after.

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharex=True, layout="constrained")
for ax, (name, found) in zip(axes, models.items(), strict=True):
    plot_densities(found.predict(X_val), sensitive_features=race_val, ax=ax)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left")
