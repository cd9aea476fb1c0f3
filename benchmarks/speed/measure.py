"""Clocks, the machine's description, and the form that every benchmark's result takes."""

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

WORKER = Path(__file__).with_name("worker.py")
VERSIONS = (
    "numpy",
    "scipy",
    "torch",
    "scikit-learn",
    "pandas",
    "onnxruntime",
    "concept-erasure",
    "fairlearn",
)


@dataclass(frozen=True)
class Goal:
    """A measured ratio beside what was asked of it; ``below`` tells which way is better."""

    what: str
    value: float
    bound: float
    below: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.below else self.value >= self.bound


@dataclass(frozen=True)
class Section:
    """One benchmark: what was measured, one or more tables (header row first), the goals, and remarks."""

    title: str
    what: str
    tables: Sequence[Sequence[Sequence[object]]]
    goals: Sequence[Goal] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock seconds of one call; garbage is collected before, not during."""
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def warm_up() -> None:
    """Do once what only the first fit of a process does: imports on demand, thread pools."""
    from esvdfair import ESVDFair
    from speed.models import make_rows, network

    x, y, a = make_rows(1000)
    for method in ("paper", "exact", "parity"):
        ESVDFair(network(8), method=method, targets="labels").fit(x, y, sensitive_features=a)


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Fewest seconds of each function over rounds in which all of them run in turn, so that all see one machine."""
    rounds = [{name: seconds(function) for name, function in functions.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in functions}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def run_worker(*arguments: object, threads: int) -> subprocess.Popen[str]:
    """Start ``worker.py`` in a process of its own; its last line is JSON (see :func:`result`)."""
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, arguments)],
        env={**os.environ, **thread_limits(threads)},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(worker: subprocess.Popen[str]) -> dict[str, float]:
    """What a worker measured; raises when it failed."""
    output, _ = worker.communicate()
    if worker.returncode:
        raise RuntimeError(f"a worker ended with code {worker.returncode}: {worker.args!r}")
    return dict(json.loads(output.splitlines()[-1]))


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that keeps every thread pool of a new process at ``threads``."""
    return {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "OPENBLAS", "MKL")}


def limit_threads(threads: int) -> None:
    """The same for this process, whose libraries are loaded already."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)


def peak_megabytes() -> float:
    """Largest resident size of this process so far.

    Linux carries ``ru_maxrss`` over from the parent that started the process; VmHWM is of this process alone.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def describe_machine(threads: int) -> list[str]:
    """The lines that say what the figures were measured on."""
    packages = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    return [
        f"processor: {_processor()}, {os.cpu_count()} cores; {_memory()} of memory; {platform.platform()}",
        f"threads: {threads} a process, except where a line says otherwise",
        f"Python {platform.python_version()}, {packages}",
        f"load before the run (1, 5, 15 minutes): {', '.join(f'{load:.2f}' for load in os.getloadavg())}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB"
