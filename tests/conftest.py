"""One thread each and one kind of randomness for all tests, and ranks that need not import anything."""

import multiprocessing
import os
import sys
import warnings

import pytest
from hypothesis import HealthCheck, settings

# Thread pools read these once, when NumPy or torch is loaded, which no test has done yet. The tests already run in
# several processes; more threads than cores would only slow them down.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # LightGBM takes all cores nevertheless: where they are busy, it would spin

# The same examples on every run; how long one takes says something about the machine, not about the code.
settings.register_profile("esvdfair", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("esvdfair")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write what guides show and what commands print anew")


def pytest_collection_finish() -> None:
    """Pin torch as well, when a collected test has loaded it; where it is absent nothing imports it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(work, *arguments)`: exit codes of two children that run `work(rank, *arguments)` at the same time.

    They are forked: a fresh process spends seconds on importing torch and the rest, which this one has done.
    """

    def run(work, *arguments, world=2, seconds=120):
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the other threads here are those of pytest-xdist
            for child in children:
                child.start()
        for child in children:
            child.join(seconds)
            child.kill()  # only one that hangs is still there
            child.join()
        return [child.exitcode for child in children]

    return run
