"""What every benchmark needs: networks and rows of any size, clocks, and the document that the results become."""

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

VERSIONS = ("numpy", "scipy", "torch", "scikit-learn", "pandas", "onnxruntime")


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
    notes: Sequence[str] = ()


def seconds(function: Callable[[], object], clock: Callable[[], float] | None = None) -> float:
    """Seconds of one call: of the processor with one thread, whatever else the machine does; else by the clock.

    Garbage is collected before, not during.
    """
    clock = clock or (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    gc.collect()
    start = clock()
    function()
    return clock() - start


def warm_up() -> None:
    """Do once what only the first fit of a process does: imports on demand, thread pools."""
    from esvdfair import ESVDFair

    x, y, a = make_rows(1000)
    for method in ("paper", "exact", "parity"):
        ESVDFair(network(8), method=method, targets="labels").fit(x, y, sensitive_features=a)


def interleaved(
    functions: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] | None = None
) -> dict[str, float]:
    """Fewest seconds of each function over rounds in which all of them run in turn, so that all see one machine."""
    rounds = [{name: seconds(function, clock) for name, function in functions.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in functions}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def run_script(script: Path, *arguments: object, threads: int) -> subprocess.Popen[str]:
    """Start a script in a process of its own; its last line is JSON (see :func:`result`)."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, **thread_limits(threads), "PYTHONPATH": path},
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
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)


@contextmanager
def all_threads() -> Iterator[None]:
    """As many threads as there are cores, as in a process that sets no variable; afterwards as before."""
    from threadpoolctl import threadpool_limits

    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    torch.set_num_threads(cores)
    try:
        with threadpool_limits(cores):
            yield
    finally:
        torch.set_num_threads(before)


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


# --- networks and rows ---------------------------------------------------------------------------------------------

INPUTS = 16
BATCH = 8192
Rows = tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.intp]]


def network(width: int, *, hidden: int = 2, seed: int = 0) -> nn.Sequential:
    """``hidden`` ReLU layers of one width between 16 inputs and one output, as PyTorch initialises them."""
    torch.manual_seed(seed)
    widths = [INPUTS, *[width] * hidden]
    layers = [part for n, m in pairwise(widths) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1)).eval()


def make_rows(rows: int, seed: int = 0) -> Rows:
    """Inputs (rows, 16), labels and two groups that differ in mean and spread."""
    rng = np.random.default_rng((seed, rows))
    a = rng.integers(0, 2, rows)
    x = rng.standard_normal((rows, INPUTS), dtype=np.float32)
    x *= (1.0 + 0.3 * a[:, None]).astype(np.float32)
    x += (0.5 * a[:, None]).astype(np.float32)
    return x, x.sum(axis=1) + rng.standard_normal(rows), a


def stream(rows: int, *, first: int = 0, step: int = 1) -> Iterator[Rows]:
    """The same kind of rows, made batch by batch; with ``first`` and ``step`` the batches of one shard."""
    starts = range(0, rows, BATCH)
    for i in range(first, len(starts), step):
        yield make_rows(min(BATCH, rows - starts[i]), seed=i + 1)


def forward(model: nn.Module, x: torch.Tensor) -> None:
    """The bare forward pass over all rows, in the batches that ESVDFair takes."""
    with torch.no_grad():
        for start in range(0, len(x), BATCH):
            model(x[start : start + BATCH])


# --- sections -> benchmarks/performance.md --------------------------------------------------------------------------


def renew(document: Path, name: str, text: str, title: str = "") -> None:
    """Put what was measured between the marks of that name, which are added, below a title, where they are missing.

    What people write stands outside the marks, and stays.
    """
    start, end = f"<!-- measured: {name} -->", f"<!-- end: {name} -->"
    whole = document.read_text(encoding="utf-8") if document.exists() else "# Performance\n"
    if start not in whole:
        whole = f"{whole.rstrip()}\n\n" + f"## {title}\n\n" * bool(title) + f"{start}\n{end}\n"
    before, _, rest = whole.partition(start)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def render(section: Section, source: str) -> str:
    """A section in Markdown, without its title; ``source`` says where its figures come from."""
    lines = [source, "", section.what]
    for table in section.tables:
        lines += ["", *_table(table)]
    if section.goals:
        rows = [(g.what, _value(g), _bound(g), "yes" if g.met else "**no**") for g in section.goals]
        lines += ["", *_table([("goal", "measured", "asked", "met"), *rows])]
    for note in section.notes:
        lines += ["", note]
    return "\n".join(lines)


def commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False)
    return found.stdout.strip() + "+" * bool(changed.stdout.strip()) if found.returncode == 0 else "unknown"


def _value(goal: Goal) -> str:
    return f"{goal.value:.2f}" if goal.value < 100 else f"{goal.value:.0f}"


def _bound(goal: Goal) -> str:
    return f"{'≤' if goal.below else '≥'} {goal.bound:g}"


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    header, *body = [" | ".join(str(cell) for cell in row) for row in rows]
    return [f"| {header} |", "|" + "---|" * len(rows[0]), *(f"| {row} |" for row in body)]
