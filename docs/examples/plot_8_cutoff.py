"""
Decisions at a cut-off
======================

A score becomes a decision at a cut-off. Who is selected before and after the repair,
how large are the adverse-impact ratios, and which cut-off selects as many people as
before?
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, decisions
from esvdfair.datasets import load_wages

wages = load_wages()
X, X_rest, y, y_rest, sex, sex_rest = train_test_split(
    wages.X, wages.y, wages.sensitive_features, test_size=0.5, random_state=0
)
X_val, X_test, y_val, y_test, sex_val, sex_test = train_test_split(
    X_rest, y_rest, sex_rest, test_size=0.5, random_state=0
)
network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(X, y)
fair = ESVDFair(model, target_ks=0.10, effort=Effort.quick())
fair.fit(X, y, sensitive_features=sex, validation=(X_val, y_val, sex_val))

# %%
# Select the 20% with the largest predictions. The repaired predictions have a smaller
# spread, so the old cut-off would select fewer people: use the new one.

before, after = model.predict(X_test), fair.predict(X_test)
found = decisions(before, after, sensitive_features=sex_test, select_share=0.2)
columns = [
    "selected_before",
    "selected_after",
    "ratio_before",
    "ratio_after",
    "ratio_low",
    "ratio_high",
]
print(found.to_frame()[columns].round(2).to_string())
print(found.cutoff_words())

# %%
# The adverse-impact ratio at every selected share. A ratio below 0.8 is a common sign
# of adverse impact.

shares = np.linspace(0.05, 0.6, 23)
ratios = {"original": [], "repaired": []}
for share in shares:
    found = decisions(before, after, sensitive_features=sex_test, select_share=share)
    frame = found.to_frame()
    ratios["original"].append(frame["ratio_before"].min())
    ratios["repaired"].append(frame["ratio_after"].min())

figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name, values in ratios.items():
    ax.plot(100 * shares, values, label=name)
ax.axhline(0.8, color="grey", linewidth=0.8, linestyle="--")
ax.set_xlabel("% of people selected")
ax.set_ylabel("smallest adverse-impact ratio")
ax.set_ylim(0, 1.05)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
