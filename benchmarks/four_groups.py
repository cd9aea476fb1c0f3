"""What parity between four groups costs: COMPAS by race and sex, on the rows that fit and on those of the test split.

    python benchmarks/four_groups.py --seeds 1-20      # two minutes of one core; prints a Markdown table

Over-fit would show as a gap between the two columns that grows with parity; a price shows in both.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esvdfair import Effort, ESVDFair, ESVDFairWarning
from reproduction.config import Training
from reproduction.datasets import load
from reproduction.network import predict, train

# What is asked for: mean and covariance reduction, and what else
ASKED = {
    "last layer refitted, no parity": (1.0, 1.0, {"targets": "labels", "effort": Effort(ridges=(1e-3,))}),
    "equal means": (np.inf, 1.0, {"targets": "labels", "effort": Effort(ridges=(1e-3,))}),
    "equal means and variances": (np.inf, np.inf, {"targets": "labels", "effort": Effort(ridges=(1e-3,))}),
    "the same, target and ridge chosen on the validation rows": (np.inf, np.inf, {}),
}


def errors(seed: int) -> Iterator[tuple[Any, ...]]:
    """(what, training error, test error) for the network of one seed."""
    dataset = load("compas", "paper")
    trained, male = train(dataset, Training(), seed), dataset.feature_names.index("sex_male")
    split = trained.split

    def groups(x: NDArray[np.float64], race: NDArray[np.object_]) -> NDArray[np.object_]:
        return np.column_stack([race, np.where(x[:, male] > 0.5, "male", "female")]).astype(object)

    def both(model: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> list[float]:
        return [float(np.mean((model(rows.X) - rows.y) ** 2)) for rows in (split.train, split.test)]

    yield "the network as trained", *both(lambda rows: predict(trained.network, rows))
    (x, y, race), validation = split.train, split.validation
    judging = validation.X, validation.y, groups(validation.X, validation.sensitive_features)
    for what, (mean, covariance, options) in ASKED.items():
        fair = ESVDFair(
            trained.network, method="parity", mean_reduction=mean, covariance_reduction=covariance, **options
        )
        fair.fit(x, y, sensitive_features=groups(x, race), validation=judging)
        yield what, *both(fair.predict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1-20")
    first, last = (int(part) for part in (parser.parse_args().seeds.split("-") * 2)[:2])
    warnings.simplefilter("ignore", ESVDFairWarning)
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(first, last + 1):
        for what, *both in errors(seed):
            found.setdefault(what, []).append((both[0], both[1]))
    print("| | training rows | test rows |\n|---|---|---|")
    for what, values in found.items():
        mean, error = np.mean(values, axis=0), np.std(values, axis=0) / np.sqrt(len(values))
        print(f"| {what} | " + " | ".join(f"{m:.4f} ± {e:.4f}" for m, e in zip(mean, error, strict=True)) + " |")


if __name__ == "__main__":
    main()
