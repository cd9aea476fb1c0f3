"""The paper's predictor: five linear layers, 256 wide, ReLU; trained by Adam on mini-batches of 128 rows."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn


def train_network(
    X: ArrayLike,
    y: ArrayLike,
    *,
    seed: int,
    loss: Literal["squared", "cross_entropy"] = "squared",
    epochs: int = 20,
    width: int = 256,
    depth: int = 5,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    decay: float = 0.8,
) -> nn.Sequential:
    """Train the predictor of the paper; the defaults are the paper's.

    Equal arguments give equal weights, bit for bit on the same machine, whatever the thread settings and the state of
    torch's generator, which is left as it was: start and shuffle come from ``seed``, and training runs on one thread
    (the matrices are too small for more to pay, and sums would come out in another order).

    Parameters
    ----------
    X : (rows, features)
    y : (rows,)
        Numbers for ``loss="squared"``; class codes 0, 1, … for ``loss="cross_entropy"``.
    seed : int
    loss : {"squared", "cross_entropy"}
        Mean squared error with one output, or cross-entropy with one output (logit) for each class, which predicts
        the sensitive group for baselines that need it.
    epochs, width, depth, batch_size : int
        ``depth`` counts linear layers.
    learning_rate, decay : float
        Adam's rate in epoch t (from 0) is ``learning_rate · decayᵗ``.

    Returns
    -------
    torch.nn.Sequential
        float32, in evaluation mode; ``Linear, ReLU, …, Linear``.

    Raises
    ------
    ValueError
        When X and y do not have the same rows, ``loss`` is unknown, or its class codes are not whole numbers from 0.
    """
    inputs = torch.as_tensor(np.asarray(X), dtype=torch.float32)
    targets, outputs = _targets(y, loss)
    if inputs.ndim != 2 or len(inputs) != len(targets):
        raise ValueError(
            f"X has shape {tuple(inputs.shape)} and y {len(targets)} rows; expected one row of X for each."
        )
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(inputs.shape[1], outputs, width=width, depth=depth)
        criterion = nn.MSELoss() if loss == "squared" else nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=decay)
        for _ in range(epochs):
            # one gather for the epoch and views of it: a DataLoader would collate row by row
            order = torch.randperm(len(inputs))
            _epoch(
                network,
                criterion,
                optimizer,
                torch.split(inputs[order], batch_size),
                torch.split(targets[order], batch_size),
            )
            schedule.step()
    return network.eval()


def build_network(features: int, outputs: int = 1, *, width: int = 256, depth: int = 5) -> nn.Sequential:
    """``depth`` linear layers with ReLU between them, untrained, from torch's current generator."""
    sizes = [features, *[width] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def predict(network: nn.Module, X: ArrayLike) -> NDArray[np.float64]:
    """Outputs of the network: (rows,) for one output, (rows, classes) logits otherwise."""
    with _one_thread(), torch.inference_mode():
        out: Tensor = network(torch.as_tensor(np.asarray(X), dtype=torch.float32))
    values: NDArray[np.float64] = out.double().numpy()
    return values[:, 0] if values.shape[1] == 1 else values


def predict_proba(network: nn.Module, X: ArrayLike) -> NDArray[np.float64]:
    """Class probabilities (rows, classes) of a network trained with ``loss="cross_entropy"``."""
    probabilities: NDArray[np.float64] = torch.softmax(torch.from_numpy(predict(network, X)), dim=1).numpy()
    return probabilities


def _epoch(
    network: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
) -> None:
    for x, t in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        criterion(network(x), t).backward()
        optimizer.step()


def _targets(y: ArrayLike, loss: str) -> tuple[Tensor, int]:
    """Targets in the shape the loss wants, and the number of outputs."""
    values = np.asarray(y)
    if values.ndim != 1:
        raise ValueError(f"y has shape {values.shape}; expected one number for each row, shape (rows,).")
    if loss == "squared":
        return torch.as_tensor(values, dtype=torch.float32).unsqueeze(1), 1
    if loss == "cross_entropy":
        if not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
            raise ValueError(f"y is {values.dtype} from {values.min()}; cross-entropy needs class codes 0, 1, 2, …")
        return torch.as_tensor(values, dtype=torch.int64), int(values.max()) + 1
    raise ValueError(f"loss is {loss!r}; choose 'squared' or 'cross_entropy'.")


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
