"""The networks of the tables: five linear layers, 256 wide, ReLU, trained by Adam on mini-batches.

On the error alone, as in the paper (:func:`train_network`), or as a user would do instead of a repair, on the error
plus λ·W₂² between the groups' predictions (:func:`train_on_both`).
"""

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.optim.adam import adam

from esvdfair.core.checks import encode_groups
from esvdfair.files import whole_file
from esvdfair.gather import few_threads
from reproduction.config import Retraining, Training
from reproduction.datasets import Examples, Split, Unscaled, split

Array = NDArray[np.float64]


# --- networks with their data --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shelf:
    """Networks that were trained before, one file each in ``folder``; without a folder none is kept.

    Training is most of the work of a table, and no change of a method makes it necessary again.
    """

    folder: Path | None = None

    def get(self, name: str, make: Callable[[], nn.Sequential], *decided_by: object) -> nn.Sequential:
        """The network of this name and these settings; made and kept when it is not there."""
        if self.folder is None:
            return make()
        path = self.folder / f"{name}-{hashlib.sha256(repr(decided_by).encode()).hexdigest()[:12]}.npz"
        if not path.exists():
            network = make()
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                np.savez(file, **{name: value.numpy() for name, value in network.state_dict().items()})
        with np.load(path, allow_pickle=False) as saved:
            state = {name: torch.from_numpy(saved[name]) for name in saved.files}
        first, *_, last = (value for value in state.values() if value.ndim == 2)
        with torch.random.fork_rng(devices=[]):  # the weights that it draws are replaced
            network = build_network(first.shape[1], last.shape[0], width=first.shape[0], depth=len(state) // 2)
        network.load_state_dict(state)
        return network.eval()


@dataclass(frozen=True)
class Trained:
    """The network of a seed and the split it was trained on; it ends in ``Linear, ReLU, Linear``."""

    seed: int
    split: Split
    network: nn.Sequential
    shelf: Shelf = field(default_factory=Shelf)

    def examples(self, name: str) -> Examples:
        """The rows "train", "validation", "test" or "heldout"."""
        examples: Examples = getattr(self.split, name)
        return examples

    def scores(self, name: str) -> Array:
        """(rows,) what the network predicts for them."""
        return predict(self.network, self.examples(name).X)

    def features(self, name: str) -> NDArray[np.float32]:
        """(rows, width) inputs of the output layer."""
        return run_through(self.network[:-1], self.examples(name).X)


def train(dataset: Unscaled, training: Training, seed: int, shelf: Shelf | None = None) -> Trained:
    """Split the data by ``seed`` and train the network on the training rows, unless it stands on the shelf."""
    parts, shelf = split(dataset, seed), shelf or Shelf()
    make = partial(train_network, parts.train.X, parts.train.y, seed=seed, training=training)
    return Trained(seed, parts, shelf.get(f"seed-{seed}", make, training), shelf)


# --- training ------------------------------------------------------------------------------------------------------


def train_network(
    X: ArrayLike,
    y: ArrayLike,
    *,
    seed: int,
    loss: Literal["squared", "cross_entropy"] = "squared",
    training: Training | None = None,
) -> nn.Sequential:
    """The predictor of the paper, ``Linear, ReLU, …, Linear`` in float32, trained on X (rows, features) and y (rows,).

    With ``loss="cross_entropy"`` y are class codes 0, 1, … and there is an output (logit) for each class; it predicts
    the sensitive group for baselines that need it. The last mini-batch of an epoch is dropped when it is not full,
    unless it is the only one.

    Equal arguments give equal weights, bit for bit on the same machine, whatever the thread settings and the state of
    torch's generator, which is left as it was: start and shuffle come from ``seed``, and training runs on one thread
    (the matrices are too small for more to pay, and sums would come out in another order).
    """
    classes, how = loss == "cross_entropy", training or Training()
    inputs = torch.as_tensor(np.asarray(X), dtype=torch.float32)
    targets = torch.as_tensor(np.asarray(y), dtype=torch.int64 if classes else torch.float32)
    outputs = int(targets.max()) + 1 if classes else 1
    columns = inputs, targets if classes else targets[:, None]
    criterion, rate = nn.CrossEntropyLoss() if classes else nn.MSELoss(), how.learning_rate
    whole = len(inputs) - len(inputs) % how.batch_size or len(inputs)
    with seeded(seed):
        network = build_network(inputs.shape[1], outputs, width=how.width, depth=how.depth)
        optimizer = Adam(network)
        for _ in range(how.epochs):
            order = torch.randperm(len(inputs))[:whole]
            # One gather for the epoch and views of it: a DataLoader would collate row by row.
            for x, t in zip(*(torch.split(column[order], how.batch_size) for column in columns), strict=True):
                optimizer.step(criterion(network(x), t), rate)
            rate *= how.decay
    return network.eval()


def train_on_both(
    start: nn.Sequential, rows: Examples, penalty: float, how: Retraining, *, epochs: int, seed: int
) -> nn.Sequential:
    """A copy of ``start``, trained on the error plus ``penalty`` times :func:`wasserstein`.

    Every batch holds as many rows of each group (in plain ones of law the smaller group has a dozen, and W₂ sees noise
    instead of quantiles); weights give the groups their share in the error. An epoch has as many steps as batches would
    fill the rows. These settings and those of ``how`` were tuned on law and COMPAS, seeds 1 and 2, which no table
    reports.
    """
    labels, codes = encode_groups(rows.sensitive_features)
    x, y = (torch.as_tensor(values, dtype=torch.float32) for values in (rows.X, rows.y))
    members = [torch.as_tensor(np.flatnonzero(codes == g)) for g in range(len(labels))]
    share = [len(m) / len(y) for m in members]
    size = max(how.batch_size // len(labels), 1)
    steps = max(len(y) // how.batch_size, 1)

    def drawn(mine: Tensor) -> Tensor:
        """(steps, size) of a group's rows, shuffled; a group that is too small comes again, shuffled anew."""
        times = -(-steps * size // len(mine))
        return torch.cat([mine[torch.randperm(len(mine))] for _ in range(times)])[: steps * size].reshape(steps, size)

    with seeded(seed):
        network = copy.deepcopy(start).train()
        optimizer = Adam(network)
        for epoch in range(epochs):
            rate = how.learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
            strength = penalty * (min(1.0, epoch / how.ramp) if how.ramp else 1.0)
            for batch in torch.stack([drawn(mine) for mine in members], dim=1):  # (groups, size) rows
                output = network(x[batch.flatten()])[:, 0].reshape(batch.shape)
                errors = (output - y[batch]).square().mean(dim=1)
                loss = sum((s * e for s, e in zip(share, errors, strict=True)), strength * wasserstein(output))
                optimizer.step(loss, rate)
    return network.eval()


def wasserstein(output: Tensor) -> Tensor:
    """W₂² between groups with as many outputs each, (groups, rows): of sorted outputs; the mean over pairs."""
    ordered = torch.sort(output, dim=1).values
    pairs = [(a - b).square().mean() for a, b in itertools.combinations(ordered, 2)]
    return torch.stack(pairs).mean()


class Adam:
    """``torch.optim.Adam`` by the function behind it: making the class loads torch's compiler, which takes seconds."""

    def __init__(self, network: nn.Module) -> None:
        self.parameters: list[Tensor] = list(network.parameters())
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros(()) for _ in self.parameters]

    def step(self, loss: Tensor, rate: float) -> None:
        """Change the parameters of the network that ``loss`` was computed with."""
        gradients = list(torch.autograd.grad(loss, self.parameters))
        with torch.no_grad():
            adam(
                self.parameters, gradients, self.first, self.second, [], self.steps,
                lr=rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False, fused=True,
            )  # fmt: skip


def build_network(features: int, outputs: int = 1, *, width: int = 256, depth: int = 5) -> nn.Sequential:
    """``depth`` linear layers with ReLU between them, untrained, from torch's current generator."""
    sizes = [features, *[width] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """One thread and torch's generator at ``seed``; both are as before afterwards."""
    with few_threads(0), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# --- predicting ----------------------------------------------------------------------------------------------------


def linear(network: nn.Sequential, index: int) -> nn.Linear:
    """A linear layer of the network: the output layer is -1, the last hidden one -3."""
    layer = network[index]
    assert isinstance(layer, nn.Linear)
    return layer


def run_through(network: nn.Module, X: ArrayLike) -> NDArray[np.float32]:
    """(rows, outputs) what a network, or the first layers of one (``network[:-1]``), make of the rows."""
    with few_threads(0), torch.inference_mode():
        out: NDArray[np.float32] = network(torch.as_tensor(np.asarray(X), dtype=torch.float32)).numpy()
    return out


def predict(network: nn.Module, X: ArrayLike) -> Array:
    """(rows,) predictions of a network with one output."""
    return run_through(network, X)[:, 0].astype(np.float64)


class NetworkClassifier:
    """The paper's network with an output for each group, in the shape that `GroupPredictor` wants."""

    def __init__(self, training: Training, seed: int) -> None:
        self.training, self.seed = training, seed

    def fit(self, X: Any, codes: Any) -> "NetworkClassifier":
        self.network_ = train_network(X, codes, seed=self.seed, loss="cross_entropy", training=self.training)
        return self

    def predict(self, X: Any) -> NDArray[np.intp]:
        codes: NDArray[np.intp] = run_through(self.network_, X).argmax(axis=1)
        return codes
