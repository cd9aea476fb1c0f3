"""One seed of the law table: ours and the straightforward procedure, side by side, in seconds of one core.

    ESVDFAIR_DATA=… python benchmarks/reproduce.py            # a few minutes

Straightforward is what a reader of the paper would write: training and fine-tuning from a DataLoader, the fine-tune
through the whole network, costs k_i in a loop over directions with the inverses written out. Where a method has no
simpler form (baselines, parity, transport, the optimum) both sides run the same code.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from threadpoolctl import threadpool_limits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esvdfair.core.edits import PAPER_REDUCTIONS, shrink_covariance, shrink_mean
from esvdfair.core.metrics import ks_distance
from reproduction import methods
from reproduction.config import LAW
from reproduction.datasets import load, split
from reproduction.network import Trained, build_network, predict, train

SEED = 34


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def report(name: str, ours: float, straightforward: float, goal: float) -> None:
    ratio = straightforward / ours
    print(f"{name:46s} ours {ours:6.2f} s, straightforward {straightforward:7.2f} s: {ratio:5.1f} × (goal ≥ {goal:g})")


# --- the straightforward procedure ---------------------------------------------------------------------------------


def fit(network: nn.Module, parameters: list[nn.Parameter], X: np.ndarray, y: np.ndarray, epochs: int) -> None:
    rows = TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None])
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    for _ in range(epochs):
        for x, t in DataLoader(rows, batch_size=128, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(network(x), t).backward()
            optimizer.step()
        schedule.step()


def train_from_loader() -> Trained:
    parts = split(load("law", "paper"), SEED)
    torch.manual_seed(SEED)
    network = build_network(parts.train.X.shape[1])
    fit(network, list(network.parameters()), parts.train.X, parts.train.y, epochs=20)
    return Trained(SEED, parts, network.eval())


def edit_in_loops(weight: np.ndarray, x: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Algorithm 1 with a loop over directions and explicit inverses; dead units want the cut of the spectrum of M."""
    one, two = (x[groups == label] for label in np.unique(groups))
    values, vectors = np.linalg.eigh(np.cov(one.T) - np.cov(two.T))
    keep = np.abs(values) > len(values) * np.finfo(float).eps * np.abs(values).max()
    factor = vectors[:, keep] @ np.diag(np.sqrt(np.abs(values[keep])))
    weight = shrink_in_loops(weight, factor, x, 4, PAPER_REDUCTIONS[1], shrink_covariance)
    d = one.mean(axis=0) - two.mean(axis=0)
    factor = np.linalg.cholesky(np.outer(d, d) + 1e-5 * np.eye(len(d)))
    return shrink_in_loops(weight, factor, x, 2, PAPER_REDUCTIONS[0], shrink_mean)


def shrink_in_loops(weight, factor, x, power, reduction, shrink) -> np.ndarray:
    u, sigma, vt = np.linalg.svd(weight @ factor, full_matrices=False)
    cost = np.zeros(len(sigma))
    for i in range(len(sigma)):
        cost[i] = vt[i] @ np.linalg.pinv(factor) @ x.T @ x @ np.linalg.pinv(factor).T @ vt[i]
    live = (cost > 0) & (sigma > 0)
    budget = np.sum(sigma**power) / reduction

    def excess(log_gamma: float) -> float:
        return np.sum(shrink(sigma[live], cost[live], np.exp(log_gamma)) ** power) - budget

    shrunk = np.where(live, shrink(sigma, np.where(live, cost, 1.0), np.exp(brentq(excess, -60.0, 60.0))), 0.0)
    after = np.zeros_like(weight)
    for i in range(len(sigma)):
        after += shrunk[i] * np.outer(u[:, i], vt[i]) @ np.linalg.pinv(factor)
    return after


def paper_straightforward(trained: Trained) -> np.ndarray:
    """Edit and fine-tune; predictions for the test rows."""
    rows, network = trained.split.train, copy.deepcopy(trained.network)
    with torch.no_grad():
        x = network[:-3](torch.tensor(rows.X, dtype=torch.float32)).double().numpy()
        after = edit_in_loops(network[-3].weight.double().numpy(), x, rows.sensitive_features)
        network[-3].weight.copy_(torch.tensor(after))
    for parameter in network[:-1].parameters():
        parameter.requires_grad_(False)
    fit(network, list(network[-1].parameters()), rows.X, rows.y, epochs=50)
    return predict(network, trained.split.test.X)


def said(prediction: np.ndarray, trained: Trained) -> str:
    here = trained.split.test
    ks = ks_distance(prediction, sensitive_features=here.sensitive_features)
    return f"MSE {np.mean((prediction - here.y) ** 2):.4f}, KS {ks:.3f}"


def main() -> None:
    load("law", "paper")
    train_ours, trained = seconds(lambda: train(load("law", "paper"), LAW.training, SEED))
    train_loader, other = seconds(train_from_loader)
    print(f"  untouched: ours {said(trained.scores('test'), trained)}; loader {said(other.scores('test'), other)}")
    report("training", train_ours, train_loader, 1)
    (quick, (ours,)), (slow, theirs) = (
        seconds(lambda: list(methods.paper(trained, LAW))),
        seconds(lambda: paper_straightforward(trained)),
    )
    print(f"  the paper's method: ours {said(ours.prediction, trained)}; straightforward {said(theirs, trained)}")
    report("post-processing (Algorithm 1 and fine-tune)", quick, slow, 25)
    report("one seed, the paper's method alone", train_ours + quick, train_loader + slow, 3)
    shared, _ = seconds(lambda: [list(f(trained, LAW)) for f in (methods.baselines, methods.repaired, methods.optimum)])
    print(f"  the same on both sides (baselines, parity, transport, optimum): {shared:.2f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(1):
        main()
