"""One thread each and one kind of randomness for all tests."""

import os
import sys

from hypothesis import HealthCheck, settings

# Thread pools read these once, when NumPy or torch is loaded, which no test has done yet. The tests already run in
# several processes; more threads than cores would only slow them down.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# The same examples on every run; how long one takes says something about the machine, not about the code.
settings.register_profile("esvdfair", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("esvdfair")


def pytest_collection_finish() -> None:
    """Pin torch as well, when a collected test has loaded it; where it is absent nothing imports it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
