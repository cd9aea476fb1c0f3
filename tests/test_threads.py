"""A fit on a narrow network runs on one thread and leaves the caller's settings as they were."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from esvdfair.gather import WIDE, few_threads, summarise

torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")


def libraries():
    return ThreadpoolController().select(user_api="blas").lib_controllers


def blas():
    return {library.num_threads for library in libraries()}


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads(), [library.num_threads for library in libraries()]
    torch.set_num_threads(2)
    for library in libraries():
        library.set_num_threads(2)
    yield
    torch.set_num_threads(before[0])
    for library, threads in zip(libraries(), before[1], strict=True):
        library.set_num_threads(threads)


def test_narrow_layers_get_one_thread_and_settings_come_back():
    with few_threads(256):
        with pytest.raises(ValueError, match="broken"), few_threads(8):
            raise ValueError("broken")
        assert (blas(), torch.get_num_threads()) == ({1}, 1)  # what is inside leaves it so
    assert (blas(), torch.get_num_threads()) == ({2}, 2)


def test_wide_layers_keep_theirs():
    with few_threads(WIDE):
        assert blas() == {2}
        assert torch.get_num_threads() == 2


def test_a_second_thread_is_limited_after_the_first_was():
    with few_threads(8):
        pass
    seen = []

    def work():
        with few_threads(8):
            seen.append((blas(), torch.get_num_threads()))
        seen.append((blas(), torch.get_num_threads()))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [({1}, 1), ({2}, 2)]


def test_looking_at_the_model_is_limited_too():
    """Before the width of its layers is known, and before that limit, the model runs on a few rows."""
    seen = []
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    network[0].register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3)).astype(np.float32)
    summarise(network, X, X.sum(axis=1), sensitive_features=np.arange(40) % 2)
    assert set(seen) == {1}


def test_several_threads_at_once_leave_them_too():
    start, seen = threading.Barrier(4), []

    def work(seed):
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(20):
            with few_threads(8):
                seen.append(torch.get_num_threads())
                rng.normal(size=(50, 50)) @ rng.normal(size=(50, 50))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(seen) == {1}
    assert blas() == {2}
    assert torch.get_num_threads() == 2


def test_a_fork_after_torch_used_two_threads():
    """In a process of its own: what this one's pools of threads have done must not matter."""
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
