"""The networks and rows that the benchmarks run on: made up, seeded, of any size."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

INPUTS = 16
BATCH = 8192
Rows = tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.intp]]


def network(width: int, *, hidden: int = 2, seed: int = 0) -> nn.Sequential:
    """``hidden`` ReLU layers of one width between 16 inputs and one output, as PyTorch initialises them."""
    torch.manual_seed(seed)
    widths = [INPUTS, *[width] * hidden]
    layers = [part for n, m in pairwise(widths) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1)).eval()


def make_rows(rows: int, seed: int = 0) -> Rows:
    """Inputs (rows, 16), labels and two groups that differ in mean and spread."""
    rng = np.random.default_rng((seed, rows))
    a = rng.integers(0, 2, rows)
    x = rng.standard_normal((rows, INPUTS), dtype=np.float32)
    x *= (1.0 + 0.3 * a[:, None]).astype(np.float32)
    x += (0.5 * a[:, None]).astype(np.float32)
    return x, x.sum(axis=1) + rng.standard_normal(rows), a


def stream(rows: int, *, first: int = 0, step: int = 1) -> Iterator[Rows]:
    """The same kind of rows, made batch by batch; with ``first`` and ``step`` the batches of one shard."""
    starts = range(0, rows, BATCH)
    for i in range(first, len(starts), step):
        yield make_rows(min(BATCH, rows - starts[i]), seed=i + 1)


def forward(model: nn.Module, x: torch.Tensor) -> None:
    """The bare forward pass over all rows, in the batches that ESVDFair takes."""
    with torch.no_grad():
        for start in range(0, len(x), BATCH):
            model(x[start : start + BATCH])
