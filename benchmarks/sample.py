"""What the bounded sample costs: a fit whose samples hold every row beside one with the library's bounds.

    python benchmarks/sample.py            # 300,000 rows; a few minutes

Moments know all rows in both. The bounded fit reads whole distributions from 60,000 rows, chooses its point on 100,000
and couples 5,000 of each group. Both models are judged on 200,000 fresh rows.
"""

import warnings
from functools import partial

import numpy as np
import torch

from esvdfair import ESVDFair, ESVDFairWarning, candidates, ks_distance, passes, repair

ROWS, FRESH, WIDTH = 300_000, 200_000, 64


def make_rows(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight inputs, two of which differ between the groups (one of five is in the smaller), and a label."""
    rng = np.random.default_rng(seed)
    group = (rng.random(rows) < 0.2).astype(int)
    x = rng.normal(size=(rows, 8)) + group[:, None] * np.array([0.8, -0.5, 0, 0, 0, 0, 0, 0])
    y = x[:, 0] + 0.5 * np.tanh(x[:, 1] * x[:, 2]) + 0.3 * x[:, 3] ** 2 + 0.5 * rng.normal(size=rows)
    return x.astype(np.float32), y, group


def train(x: np.ndarray, y: np.ndarray) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    inputs, labels = torch.as_tensor(x), torch.as_tensor(y, dtype=torch.float32)
    for part in torch.randperm(len(x)).split(512):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(inputs[part])[:, 0], labels[part]).backward()
        optimizer.step()
    return network


def bound(training: int, heldout: int, coupled: int) -> None:
    """Set the bounds of both samples and of the rows of each group that transport couples."""
    repair.collect_rows = partial(passes.collect_rows, training_rows=training, heldout_rows=heldout)
    candidates.TRANSPORT_ROWS = coupled


def main() -> None:
    warnings.simplefilter("ignore", ESVDFairWarning)
    ours = passes.TRAINING_ROWS, passes.HELDOUT_ROWS, candidates.TRANSPORT_ROWS
    x, y, group = make_rows(ROWS, 0)
    fresh, label, its_group = make_rows(FRESH, 1)
    network = train(*make_rows(100_000, 2)[:2])
    print(f"{ROWS:,} rows; KS and MSE on {FRESH:,} fresh rows")
    for target in (0.05, 0.10):
        found = {}
        for name, bounds in (("bounded", ours), ("all rows", (ROWS, ROWS, ROWS))):
            bound(*bounds)
            fair = ESVDFair(network, target_ks=target, random_state=0).fit(x, y, sensitive_features=group)
            prediction = fair.predict(fresh)
            ks = ks_distance(prediction, sensitive_features=its_group)
            found[name] = ks, float(np.mean((prediction - label) ** 2))
        (ks, mse), (ks_all, mse_all) = found["bounded"], found["all rows"]
        print(
            f"target {target}: bounded {ks:.4f} / {mse:.4f}, all rows {ks_all:.4f} / {mse_all:.4f}; "
            f"KS {ks - ks_all:+.4f}, MSE {mse / mse_all - 1:+.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
