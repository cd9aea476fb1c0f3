"""
Adjusted pay gap
================

"Women are predicted to earn less" and "women in the same region with the same degree are predicted to earn less" are
two statements. Here we hold that region and degree count, and ask for parity among people who are alike in both: each
group is compared as if it had the common mix of these strata.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.datasets import load_wages

wages = load_wages()
X, X_val, y, y_val, sex, sex_val = train_test_split(
    wages.X, wages.y, wages.sensitive_features, test_size=0.4, random_state=0
)
network = MLPRegressor(hidden_layer_sizes=(32, 32), early_stopping=True, random_state=0)
model = make_pipeline(StandardScaler(), network).fit(X, y)

# %%
# The strata: bachelor's degree or not, in the south or not. The repair knows them while fitting; predictions need
# neither them nor the sex.

strata = ["BA", "south"]
options = {"target_ks": 0.08, "effort": Effort.quick()}
raw = ESVDFair(model, **options).fit(X, y, sensitive_features=sex, validation=(X_val, y_val, sex_val))
adjusted = ESVDFair(model, **options).fit(
    X,
    y,
    sensitive_features=sex,
    control_features=X[strata],
    validation=(X_val, y_val, sex_val, np.ones(len(y_val)), X_val[strata]),
)

# %%
# Both distances of all three models, on the validation rows. Which one should be small is a question about the
# decision, not about the model: what is held to count must not itself be the outcome of unequal treatment.

models = {"as trained": model, "raw parity": raw, "adjusted parity": adjusted}
distances = {}
for name, found in models.items():
    predicted = found.predict(X_val)
    plain = ks_distance(predicted, sensitive_features=sex_val)
    alike = ks_distance(predicted, sensitive_features=sex_val, control_features=X_val[strata])
    distances[name] = plain, alike
    error = ((predicted - y_val) ** 2).mean()
    print(f"{name:16} KS raw {plain:.3f}, adjusted {alike:.3f}; mean squared error {error:.4f}")

# %%
# The gap of the means, stratum by stratum.

figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
cells = X_val[strata].astype(int).agg(lambda row: f"BA {row['BA']}, south {row['south']}", axis=1)
names = sorted(set(cells))
for place, (name, found) in enumerate(models.items()):
    predicted = found.predict(X_val)
    gaps = [
        predicted[(cells == cell) & (sex_val == "male")].mean()
        - predicted[(cells == cell) & (sex_val == "female")].mean()
        for cell in names
    ]
    ax.bar(np.arange(len(names)) + 0.27 * (place - 1), gaps, width=0.25, label=name)
ax.axhline(0, color="black", linewidth=0.8)
ax.set_xticks(range(len(names)), names)
ax.set_ylabel("men above women,\nmean predicted log wage")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
