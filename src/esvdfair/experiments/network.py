"""The paper's predictor: five linear layers, 256 wide, ReLU; trained by Adam on mini-batches of 128 rows."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.optim.adam import adam

from esvdfair.datasets import Dataset, Examples, Split, fetch_compas, fetch_law, load_wages, split
from esvdfair.distributed import few_threads
from esvdfair.experiments.config import Preparation, Training
from esvdfair.files import whole_file

Array = NDArray[np.float64]


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
            return _network_of({name: torch.from_numpy(saved[name]) for name in saved.files})


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


def train(dataset: Dataset, training: Training, seed: int, shelf: Shelf | None = None) -> Trained:
    """Split the data by ``seed`` and train the network on the training rows, unless it stands on the shelf."""
    parts, shelf = split(dataset, seed), shelf or Shelf()
    make = partial(train_network, parts.train.X, parts.train.y, seed=seed, training=training)
    return Trained(seed, parts, shelf.get(f"seed-{seed}", make, training), shelf)


@lru_cache(maxsize=2)
def load(dataset: str, preparation: Preparation) -> Dataset:
    """A data set of the experiments, once for each process."""
    if dataset == "wages":
        return load_wages()
    return fetch_law(preparation) if dataset == "law" else fetch_compas(preparation)


def train_network(
    X: ArrayLike,
    y: ArrayLike,
    *,
    seed: int,
    loss: Literal["squared", "cross_entropy"] = "squared",
    training: Training | None = None,
) -> nn.Sequential:
    """Train the predictor of the paper.

    Equal arguments give equal weights, bit for bit on the same machine, whatever the thread settings and the state of
    torch's generator, which is left as it was: start and shuffle come from ``seed``, and training runs on one thread
    (the matrices are too small for more to pay, and sums would come out in another order).

    Parameters
    ----------
    X : (rows, features)
    y : (rows,) numbers for ``loss="squared"``; class codes 0, 1, … for ``loss="cross_entropy"``
    loss : mean squared error with one output, or cross-entropy with one output (logit) for each class, which predicts
        the sensitive group for baselines that need it
    training : shape and schedule; by default the paper's

    Returns
    -------
    torch.nn.Sequential
        float32, in evaluation mode; ``Linear, ReLU, …, Linear``.
    """
    classes = loss == "cross_entropy"
    inputs = torch.as_tensor(np.asarray(X), dtype=torch.float32)
    targets = torch.as_tensor(np.asarray(y), dtype=torch.int64 if classes else torch.float32)
    outputs = int(targets.max()) + 1 if classes else 1
    training, criterion = training or Training(), nn.CrossEntropyLoss() if classes else nn.MSELoss()
    with seeded(seed):
        network = build_network(inputs.shape[1], outputs, width=training.width, depth=training.depth)
        columns = inputs, targets if classes else targets[:, None]
        run_epochs(network, lambda x, t: criterion(network(x), t), columns, training)
    return network.eval()


def run_epochs(
    network: nn.Module, loss: Callable[..., Tensor], columns: tuple[Tensor, ...], training: Training
) -> None:
    """Adam on ``loss(*batch)`` over shuffled mini-batches of the rows of ``columns``; changes ``network``.

    The last mini-batch of an epoch is dropped when it is not full, unless it is the only one.
    """
    optimizer, rate, rows = Adam(network), training.learning_rate, len(columns[0])
    whole = rows - rows % training.batch_size or rows
    for _ in range(training.epochs):
        order = torch.randperm(rows)[:whole]
        # One gather for the epoch and views of it: a DataLoader would collate row by row.
        for batch in zip(*(torch.split(column[order], training.batch_size) for column in columns), strict=True):
            optimizer.step(loss(*batch), rate)
        rate *= training.decay


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


def _network_of(state: dict[str, Tensor]) -> nn.Sequential:
    """The network that has these weights."""
    first, *_, last = (value for value in state.values() if value.ndim == 2)
    with torch.random.fork_rng(devices=[]):  # the weights that it draws are replaced
        network = build_network(first.shape[1], last.shape[0], width=first.shape[0], depth=len(state) // 2)
    network.load_state_dict(state)
    return network.eval()


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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """One thread and torch's generator at ``seed``; both are as before afterwards."""
    with few_threads(0), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
