"""Small models of every kind, and people whose groups differ in what the models see."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPRegressor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # where the attack is

FEATURES = ["age", "hours", "school"]


class Headed(torch.nn.Module):
    """Two linear layers and a head."""

    def __init__(self, head, *, seed=0, width=6, bias=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.hidden = torch.nn.Linear(3, width)
            self.last = torch.nn.Linear(width, 1, bias=bias)
        self.double()
        self._head = head

    def forward(self, x):
        return self._head(self.last(torch.relu(self.hidden(x))))


def affine(z):
    return 3.0 * z - 2.0


@pytest.fixture(scope="session")
def make_network():
    """`make_network("affine", seed=0, bias=True)`: a torch module with float64 weights."""
    heads = {"identity": lambda z: z * 1.0, "affine": affine, "sigmoid": torch.sigmoid}
    return lambda head="identity", **options: Headed(heads[head], **options)


@pytest.fixture(scope="session")
def people():
    """`people(rows, seed)`: X, y, a (two groups by default) and weights."""

    def make(rows=600, seed=0, groups=("a", "b")):
        rng = np.random.default_rng(seed)
        code = rng.choice(len(groups), rows, p=np.array([3, 2, 2][: len(groups)]) / sum([3, 2, 2][: len(groups)]))
        X = rng.normal(size=(rows, 3)) * (1 + 0.4 * code[:, None]) + 0.8 * code[:, None]
        y = X @ [0.5, -1.0, 2.0] + np.maximum(X[:, 0], 0) + rng.normal(size=rows)
        return SimpleNamespace(X=X, y=y, a=np.array(groups)[code], w=rng.uniform(0.5, 2, rows))

    return make


@pytest.fixture(scope="session")
def mlp(people):
    """A fitted scikit-learn model."""
    data = people(300, 9)
    # a tolerance that no epoch can meet ends the fit after a few of them, without a warning
    return MLPRegressor(
        hidden_layer_sizes=(6,), tol=1e9, n_iter_no_change=15, learning_rate_init=0.02, random_state=0
    ).fit(data.X, data.y)
