"""Several threads on one model: each gives what one gives, and the model stays as it is."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair

# Untrained networks do for what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")

RNG = np.random.default_rng(0)
SEX = RNG.integers(0, 2, 400)
X = (RNG.normal(size=(400, 4)) + SEX[:, None] * [1, 0, 0, 0]).astype(np.float32)
Y = X.sum(axis=1) + RNG.normal(size=400)


def fitted(model, method):
    return ESVDFair(model, method=method, targets="labels", effort=Effort.quick()).fit(X, Y, sensitive_features=SEX)


@pytest.mark.filterwarnings("ignore:The repaired model predicts no better than a constant")  # it was not trained
def test_fits_on_one_module_that_is_left_in_train_mode():
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    torch.manual_seed(0)
    nn = torch.nn
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
    model = nn.Sequential(*layers).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = fitted(model, "exact").predict(X)
    with ThreadPoolExecutor(4) as pool:
        fits = list(pool.map(lambda _: fitted(model, "exact"), range(4)))
        for fair in fits:
            np.testing.assert_array_equal(fair.predict(X), expected)
        shared = fits[0]
        shared.estimator_.train()  # the user's own flags on what came back
        assert all(np.array_equal(found, expected) for found in pool.map(lambda _: shared.predict(X), range(20)))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_fits_on_one_scikit_learn_model():
    model = MLPRegressor(hidden_layer_sizes=(8, 8), max_iter=20, tol=1, n_iter_no_change=2, random_state=0).fit(X, Y)
    expected = fitted(model, "transport").predict(X)
    with ThreadPoolExecutor(4) as pool:
        for fair in pool.map(lambda _: fitted(model, "transport"), range(4)):
            np.testing.assert_array_equal(fair.predict(X), expected)


def test_fits_on_one_onnx_file():
    skl2onnx = pytest.importorskip("skl2onnx", reason="needs skl2onnx (extra esvdfair[dev])")
    model = MLPRegressor(hidden_layer_sizes=(8, 8), max_iter=20, tol=1, n_iter_no_change=2, random_state=0).fit(X, Y)
    file = skl2onnx.to_onnx(model, X[:1]).SerializeToString()
    expected = fitted(file, "parity").predict(X)
    with ThreadPoolExecutor(4) as pool:
        fits = list(pool.map(lambda _: fitted(file, "parity"), range(4)))
        assert all(np.array_equal(fair.predict(X), expected) for fair in fits)
        assert all(np.array_equal(found, expected) for found in pool.map(lambda _: fits[0].predict(X), range(20)))


def test_a_fork_after_torch_used_two_threads():
    """In a process of its own: what this one's pools of threads have done must not matter."""
    pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    done = subprocess.run(
        [sys.executable, "-c", FORKS], timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert done.returncode == 0


FORKS = """
import os, signal, sys
import numpy as np, torch
from esvdfair import Effort, ESVDFair

torch.set_num_threads(2)
(torch.ones(600, 600) @ torch.ones(600, 600)).sum().item()  # starts the pool, which a fork does not have
X = np.random.default_rng(0).normal(size=(200, 4))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).double()

def fitted():
    fair = ESVDFair(model, method="parity", effort=Effort.quick(), validation_fraction=0.0)
    return fair.fit(X, X.sum(axis=1), sensitive_features=X[:, 0] > 0).predict(X)

known = fitted()
child = os.fork()
if not child:
    signal.alarm(30)
    os._exit(0 if np.array_equal(fitted(), known) else 1)
sys.exit(os.waitpid(child, 0)[1])
"""
