"""The predictor: its shape, its repeatability, and that it learns (with a gap between groups, before any repair)."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import ks_2samp
from torch import nn

from reproduction.config import Training
from reproduction.datasets import load
from reproduction.network import NetworkClassifier, Shelf, build_network, predict, train, train_network

SMALL = {"training": Training(epochs=3, width=16, depth=3)}


def problem(rows: int = 300) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 4))
    return X, X[:, 0] + np.abs(X[:, 1])


def weights(network: nn.Module) -> NDArray[np.float32]:
    return np.concatenate([p.detach().numpy().ravel() for p in network.parameters()])


def test_architecture_of_the_paper() -> None:
    layers = list(build_network(7))
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU] * 4 + [nn.Linear]
    shapes = [tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear)]
    assert shapes == [(256, 7), (256, 256), (256, 256), (256, 256), (1, 256)]


def test_equal_seeds_give_equal_bits_and_other_seeds_others() -> None:
    X, y = problem()
    first = train_network(X, y, seed=33, **SMALL)
    torch.rand(5)
    again = train_network(X, y, seed=33, **SMALL)
    other = train_network(X, y, seed=34, **SMALL)
    np.testing.assert_array_equal(weights(first), weights(again))
    assert not np.array_equal(weights(first), weights(other))
    assert not first.training


def test_threads_and_generator_are_left_alone() -> None:
    X, y = problem()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = train_network(X, y, seed=33, **SMALL)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        one = train_network(X, y, seed=33, **SMALL)
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(weights(one), weights(two))
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_are_not_changed() -> None:
    X, y = (a.astype(np.float32) for a in problem())
    X_before, y_before = X.copy(), y.copy()
    train_network(X, y, seed=0, **SMALL)
    np.testing.assert_array_equal(X, X_before)
    np.testing.assert_array_equal(y, y_before)


@pytest.mark.parametrize("batch_size", [32, 100, 200])
def test_an_epoch_is_adam_on_the_shuffled_full_batches(batch_size: int) -> None:
    """Against a plain loop: the same generator, Adam by its formulas, batches by index, the last dropped if not full.

    A batch that would hold more than all rows holds all of them.
    """
    X, y = (torch.tensor(a, dtype=torch.float32) for a in problem(100))
    torch.manual_seed(5)
    network = build_network(4, width=8, depth=2)
    parameters = list(network.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    step = 0
    for epoch in range(2):
        order = torch.randperm(100)
        for start in (0, 32, 64) if batch_size == 32 else (0,):
            rows = order[start : start + batch_size]
            gradients = torch.autograd.grad((network(X[rows])[:, 0] - y[rows]).square().mean(), parameters)
            step += 1
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                change = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
                p.data -= 1e-3 * 0.8**epoch * change
    training = Training(epochs=2, width=8, depth=2, batch_size=batch_size)
    ours = train_network(X.numpy(), y.numpy(), seed=5, training=training)
    np.testing.assert_allclose(weights(ours), weights(network), rtol=1e-4, atol=1e-6)


def test_training_does_not_load_the_compiler_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What any class of `torch.optim` does when it is made, and which takes longer than most trainings."""
    monkeypatch.delattr(torch.optim.Optimizer, "__init__")
    monkeypatch.delattr(torch.optim.Optimizer, "add_param_group")
    train_network(*problem(), seed=0, **SMALL)


def test_learns_wages_and_has_a_gap_before() -> None:
    trained = train(load("wages", "clean"), Training(epochs=3, width=64, depth=3), 33)
    scores, test = trained.scores("test"), trained.split.test
    assert np.mean((scores - test.y) ** 2) < 0.9 * test.y.var()
    female = test.sensitive_features == "female"
    assert ks_2samp(scores[female], scores[~female]).statistic > 0.12  # floor at these sizes: .055


def test_classes() -> None:
    X, y = problem()
    codes = np.digitize(y, [0.0, 1.5])
    training = Training(epochs=40, width=32, depth=3, learning_rate=0.01, decay=0.9)
    assert (NetworkClassifier(training, 0).fit(X, codes).predict(X) == codes).mean() > 0.8


def test_predict_is_one_float64_a_row() -> None:
    X, y = problem()
    scores = predict(train_network(X, y, seed=0, **SMALL), X)
    assert scores.shape == (300,)
    assert scores.dtype == np.float64


def test_a_network_on_the_shelf_is_not_trained_again_unless_something_else_decides_it(tmp_path) -> None:
    made = []

    def make() -> nn.Sequential:
        made.append(len(made))
        return train_network(*problem(), seed=len(made), **SMALL)

    shelf, state = Shelf(tmp_path / "networks"), torch.get_rng_state()
    first, again, other = (shelf.get("seed-1", make, SMALL["training"], penalty) for penalty in (1.0, 1.0, 2.0))
    np.testing.assert_array_equal(weights(first), weights(again))
    assert not np.array_equal(weights(first), weights(other))
    assert made == [0, 1]
    assert not again.training
    assert torch.equal(torch.get_rng_state(), state)
    Shelf().get("seed-1", make)
    assert made == [0, 1, 2]
    assert len(list((tmp_path / "networks").iterdir())) == 2
