"""How many rows a repair must keep: error at equal KS when --rows N of a million are kept, and moments of all others.

    ESVDFAIR_DATA=… python benchmarks/rows.py                    # five seeds, an hour or less on one core
    ESVDFAIR_DATA=… python benchmarks/rows.py --seeds 1 --rows 10000,40000 --data 200000

No real table of a million rows is at hand. Rows are drawn from law (20,000 real rows) with replacement; noise on the
score of the admission test and on the label makes each a new person, and the smaller group is 1 % of the draw. The
network is trained on law itself. All repaired models of a curve are evaluated on fresh draws, and the error is
interpolated at equal KS.
"""

import argparse
import warnings
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np

from esvdfair import ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.methods import Effort
from reproduction.config import Training
from reproduction.datasets import load
from reproduction.network import Trained, run_through, train

TRAINING = Training(epochs=3, width=64, depth=4)
FRESH, SMALL, NOISE = 200_000, 0.01, 0.3
TARGETS = (0.05, 0.10)


def draw(trained: Trained, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels and groups of new people."""
    parts = [trained.split.train, trained.split.validation, trained.split.test]
    x, y, group = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(3))
    rng, group = np.random.default_rng(seed), group.astype(str)
    labels, counts = np.unique(group, return_counts=True)
    few = rng.random(rows) < SMALL
    index = np.empty(rows, dtype=np.intp)
    for label, mask in ((labels[counts.argmin()], few), (labels[counts.argmax()], ~few)):
        index[mask] = rng.choice(np.flatnonzero(group == label), mask.sum())
    drawn = x[index].copy()
    score = np.argmax([len(np.unique(column)) for column in x.T])  # lsat: the only input that is not yes or no
    drawn[:, score] += NOISE * x[:, score].std() * rng.normal(size=rows)
    return drawn, y[index] + NOISE * y.std() * rng.normal(size=rows), group[index]


def error_at(ks: np.ndarray, mse: np.ndarray, target: float) -> float:
    """The least error of these models, and of mixtures of neighbours, at a KS distance."""
    order = np.argsort(ks)
    return float(np.interp(target, ks[order], np.minimum.accumulate(mse[order])))


def measure(trained: Trained, rows: Any, fresh: Any, kept: int) -> dict[str, float]:
    """Error at equal KS of the curve, KS of the chosen model, and seconds, by what they are called in the table.

    Errors are in parts of the variance that the original network explains.
    """
    start = process_time()
    effort = replace(Effort(), rows=kept)
    fair = ESVDFair(trained.network, target_ks=TARGETS[-1], effort=effort, random_state=trained.seed)
    fair.fit(rows[0], rows[1], sensitive_features=rows[2])
    found = {"seconds": process_time() - start}
    curve, (x, y, group) = fair.curve_, fresh
    features = run_through(trained.network[:-1], x)  # only the last layer differs

    def judge(model: Any) -> tuple[float, float]:
        prediction = run_through(model[-1], features)[:, 0]
        return ks_distance(prediction, sensitive_features=group), float(np.mean((prediction - y) ** 2))

    ks, mse = np.array([judge(curve.model(point.index)) for point in curve.points]).T
    explained = np.var(y) - judge(trained.network)[1]
    found |= {f"error at KS {target}": error_at(ks, mse, target) / explained for target in TARGETS}
    return found | {f"KS for target {TARGETS[-1]}": judge(fair.estimator_)[0]}


def markdown(found: dict[int, list[dict[str, float]]], all_rows: int) -> str:
    """A line for every number of rows: means over the seeds; errors as changes from the fit that keeps all rows."""
    columns = list(found[all_rows][0])
    lines = [("rows kept", *columns), ("---:",) * (len(columns) + 1)]
    for kept, each in found.items():
        cells = []
        for name in columns:
            values = np.array([one[name] for one in each])
            if name.startswith("error") and kept != all_rows:
                change = values - [one[name] for one in found[all_rows]]
                cells.append(f"{change.mean():+.2%} ± {change.std(ddof=1) / len(change) ** 0.5:.2%}")
            else:
                cells.append(f"{values.mean():.0f}" if name == "seconds" else f"{values.mean():.4f}")
        lines.append((f"{kept:,}", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1-5")
    parser.add_argument("--data", type=int, default=1_000_000)
    parser.add_argument("--rows", default="10000,20000,40000,80000,160000")
    given = parser.parse_args()
    warnings.simplefilter("ignore", ESVDFairWarning)
    first, last = (int(part) for part in (given.seeds.split("-") * 2)[:2])
    found: dict[int, list[dict[str, float]]] = {int(rows): [] for rows in given.rows.split(",")} | {given.data: []}
    for seed in range(first, last + 1):
        trained = train(load("law", "clean"), TRAINING, seed)
        rows, fresh = draw(trained, given.data, seed), draw(trained, FRESH, seed + 100)
        for kept in found:
            found[kept].append(measure(trained, rows, fresh, kept))
            print(f"seed {seed}, {kept:,} rows: {found[kept][-1]}", flush=True)
    print(f"\n{given.data:,} rows drawn from law, {SMALL:.0%} in the smaller group; seeds {given.seeds}\n")
    print(markdown(found, given.data))


if __name__ == "__main__":
    main()
