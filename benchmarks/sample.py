"""What the bounded sample costs: a fit whose samples hold every row beside one with the library's bounds.

    python benchmarks/sample.py            # 300,000 rows; a few minutes

Moments know all rows in both. The bounded fit reads whole distributions from 60,000 rows, chooses its point on 100,000
and couples 5,000 of each group. Both models are judged on 200,000 fresh rows.
"""

import warnings
from dataclasses import replace

import numpy as np

from esvdfair import ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.problem import Effort
from reproduction.config import Training
from reproduction.network import train_network

ROWS, FRESH = 300_000, 200_000
TRAINING = Training(epochs=1, width=64, depth=3, batch_size=512, learning_rate=3e-3)


def make_rows(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight inputs, two of which differ between the groups (one of five is in the smaller), and a label."""
    rng = np.random.default_rng(seed)
    group = (rng.random(rows) < 0.2).astype(int)
    x = rng.normal(size=(rows, 8)) + group[:, None] * np.array([0.8, -0.5, 0, 0, 0, 0, 0, 0])
    y = x[:, 0] + 0.5 * np.tanh(x[:, 1] * x[:, 2]) + 0.3 * x[:, 3] ** 2 + 0.5 * rng.normal(size=rows)
    return x.astype(np.float32), y, group


def main() -> None:
    warnings.simplefilter("ignore", ESVDFairWarning)
    efforts = {
        "bounded": Effort(),
        "all rows": replace(Effort(), rows=2 * ROWS, transport_rows=ROWS),
    }
    x, y, group = make_rows(ROWS, 0)
    fresh, label, its_group = make_rows(FRESH, 1)
    network = train_network(*make_rows(100_000, 2)[:2], seed=0, training=TRAINING)
    print(f"{ROWS:,} rows; KS and MSE on {FRESH:,} fresh rows")
    for target in (0.05, 0.10):
        found = {}
        for name, effort in efforts.items():
            fair = ESVDFair(network, target_ks=target, random_state=0, effort=effort)
            prediction = fair.fit(x, y, sensitive_features=group).predict(fresh)
            ks = ks_distance(prediction, sensitive_features=its_group)
            found[name] = ks, float(np.mean((prediction - label) ** 2))
        (ks, mse), (ks_all, mse_all) = found.values()
        print(
            f"target {target}: bounded {ks:.4f} / {mse:.4f}, all rows {ks_all:.4f} / {mse_all:.4f}; "
            f"KS {ks - ks_all:+.4f}, MSE {mse / mse_all - 1:+.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
