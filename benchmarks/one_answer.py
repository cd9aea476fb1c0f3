"""One answer: how far predictions of the repaired model move when only the way in which rows arrive is another.

    ESVDFAIR_DATA=… python benchmarks/one_answer.py                          # ten seeds; an hour on one core
    ESVDFAIR_DATA=… python benchmarks/one_answer.py --data wages --seeds 1-2 --quick

Batches of 8192 rows in memory are compared with other sizes, a stream, the same rows in another order, a CSV file in
one chunk and in many, and two threads. A row is known by its number, wherever
it comes. The table has the largest difference of a prediction over their standard deviation; the goal is 1e-6.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from threadpoolctl import threadpool_limits

from esvdfair import ESVDFair, ESVDFairWarning
from esvdfair.batches import Batch
from esvdfair.problem import Effort
from esvdfair.tables import Roles, TableBatches, files
from reproduction.config import Training
from reproduction.datasets import load
from reproduction.network import Trained, train

METHODS = ("paper", "exact", "parity", "transport")
TRAINING = Training(epochs=3, width=64, depth=4)  # the arithmetic of a repair is the same behind a hasty network
GOAL = 1e-6


def numbered(trained: Trained, order: np.ndarray, size: int) -> Callable[[], Iterator[Batch]]:
    """A stream of training rows in the given order, each with its number."""
    x, y, sensitive = trained.split.train
    labels, codes = np.unique(sensitive.astype(str), return_inverse=True)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield Batch(x[rows], y[rows], tuple(labels.tolist()), codes[rows], None, rows)

    return batches


def table_of(trained: Trained, chunk_bytes: int) -> TableBatches:
    """The training rows from a CSV file, read in chunks of about so many bytes."""
    x, y, sensitive = trained.split.train
    names = [f"x{i}" for i in range(x.shape[1])]
    frame = pd.DataFrame(x.astype(np.float64), columns=names).assign(group=sensitive.astype(str), label=y)
    with tempfile.TemporaryDirectory() as folder, patch.object(files, "BLOCK", chunk_bytes):
        path = Path(folder, "rows.csv")
        frame.to_csv(path, index=False)
        return TableBatches(path, Roles(("group",), "label"))  # small enough to be held once it is read


def repair(trained: Trained, method: str, effort: Effort, stream: Any = None, batch_size: int = 8192) -> np.ndarray:
    """What the repaired network predicts for the test rows."""
    target = None if method == "paper" else 0.1  # paper as printed; its scan is that of exact
    fair = ESVDFair(trained.network, method=method, target_ks=target, effort=effort, batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        if stream is None:
            x, y, sensitive = trained.split.train
            fair.fit(x, y, sensitive_features=sensitive.astype(str))
        else:
            fair.fit(stream)
    return np.asarray(fair.predict(trained.split.test.X), dtype=np.float64)


def in_one_process(trained: Trained, method: str, effort: Effort) -> dict[str, np.ndarray]:
    """Predictions by the way in which the rows came."""
    rows = np.arange(len(trained.split.train.y))
    shuffled = np.random.default_rng(trained.seed).permutation(rows)
    found = {f"batches of {size}": repair(trained, method, effort, batch_size=size) for size in (8192, 1000, 317)}
    found["stream"] = repair(trained, method, effort, numbered(trained, rows, 1000))
    found["another order"] = repair(trained, method, effort, numbered(trained, shuffled, 1000))
    for chunks, size in (("one chunk", files.BLOCK), ("chunks of 50 kB", 50_000)):
        found[f"a file, {chunks}"] = repair(trained, method, effort, table_of(trained, size))
    before = torch.get_num_threads()
    with threadpool_limits(2):
        torch.set_num_threads(2)
        found["two threads"] = repair(trained, method, effort)
    torch.set_num_threads(before)
    return found


def compare(name: str, seed: int, effort: Effort) -> list[tuple[str, str, float]]:
    """(method, way, largest difference over the standard deviation) for one network."""
    trained = train(load(name, "clean"), TRAINING, seed)
    rows = []
    for method in METHODS:
        found = in_one_process(trained, method, effort)
        first = found.pop("batches of 8192")
        rows += [(method, way, float(np.abs(other - first).max() / first.std())) for way, other in found.items()]
    return rows


def markdown(rows: list[tuple[str, str, float]]) -> str:
    """The largest difference of every method and way."""
    ways = list(dict.fromkeys(way for _, way, _ in rows))
    lines = [("", *METHODS), ("---",) * (len(METHODS) + 1)]
    for way in ways:
        largest = [max(value for m, w, value in rows if (m, w) == (method, way)) for method in METHODS]
        lines.append((way, *(f"{value:.0e}" if value else "0" for value in largest)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="law,compas,wages")
    parser.add_argument("--seeds", default="1-10")
    parser.add_argument("--quick", action="store_true", help="a few candidates instead of a hundred")
    given = parser.parse_args()
    first, last = (int(part) for part in (given.seeds.split("-") * 2)[:2])
    effort = Effort.quick() if given.quick else Effort()
    for name in given.data.split(","):
        rows = []
        for seed in range(first, last + 1):
            rows += compare(name, seed, effort)
        worst = max(value for _, _, value in rows)
        print(
            f"\n{name}, seeds {given.seeds}: largest difference {worst:.0e} (goal {GOAL:.0e})\n\n{markdown(rows)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
