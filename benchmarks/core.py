"""Speed of the core as ratios over the bare linear algebra it contains, all measured in this run.

Whole fits, peers, growth and processes are in `scale.py`.

python benchmarks/core.py            # all
python benchmarks/core.py moments    # one of moments, paper, parity, memory
"""

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import scipy.linalg

from esvdfair.core.edits import edit_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.parity import ParityProblem
from esvdfair.core.refit.quadratic import FeatureSpace, Quadratic


def best(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run: the one that other work on the machine disturbed least."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def alternate(ours: Callable[[], object], bare: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Best times of two functions run in turn, so that both see the same machine."""
    times = [(best(ours, 1), best(bare, 1)) for _ in range(repeats)]
    return min(t[0] for t in times), min(t[1] for t in times)


def report(name: str, ours: float, bare: float, goal: float) -> None:
    print(f"{name:58s} {ours:8.3f} s / {bare:8.3f} s = {ours / bare:5.2f}   (goal ≤ {goal})", flush=True)


def rows_of(rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, width)) + 1.0, rng.integers(0, 2, rows)


def moments() -> None:
    x, groups = rows_of(1_000_000, 256)
    labels = np.array(["a", "b"])[groups]
    starts = range(0, len(x), 8192)

    def ours() -> None:
        m = GroupMoments()
        for i in starts:
            m.update(x[i : i + 8192], labels[i : i + 8192])

    def bare() -> None:
        total = np.zeros((256, 256))
        for i in starts:
            batch = x[i : i + 8192]
            total += batch.T @ batch

    report("GroupMoments over X.T @ X, 1e6 × 256, batches of 8,192", *alternate(ours, bare, 3), goal=1.5)


def paper() -> None:
    for width in (256, 1024):
        x, groups = rows_of(4 * width, width)
        x[groups == 1] = x[groups == 1] @ np.diag(np.linspace(0.5, 2.0, width)) + 0.3
        m = GroupMoments().update(x, groups)
        w = np.random.default_rng(1).normal(size=(width, width))
        c0, c1 = m.covariances()
        gap = c0 - c1

        def bare(gap: np.ndarray = gap, w: np.ndarray = w) -> None:
            scipy.linalg.eigh(gap, driver="evd")
            scipy.linalg.svd(w, full_matrices=False)
            scipy.linalg.svd(w, full_matrices=False)

        ours, base = alternate(lambda w=w, m=m: edit_paper(w, m), bare, 5 if width < 1000 else 3)
        report(f"the paper's edit over eigh + two SVDs, n = {width}", ours, base, goal=1.5)


def parity() -> None:
    for width in (256, 1024):
        x, groups = rows_of(4 * width, width)
        x[groups == 1] = x[groups == 1] @ np.diag(np.linspace(0.5, 2.0, width)) + 0.3
        y = x @ np.random.default_rng(1).normal(size=width)
        m = GroupMoments().update(np.column_stack([x, y]), groups)
        w0 = np.random.default_rng(2).normal(size=width)
        space = FeatureSpace.from_moments(m, width)
        quadratic = Quadratic.from_moments(m, space=space, target=width, original=w0, ridge=1e-4)
        c0, c1 = m.columns(slice(0, width)).covariances()
        gap, pooled = c0 - c1, c0 + c1

        def ours(quadratic: Quadratic = quadratic) -> None:
            problem = ParityProblem(quadratic, mean_penalty=np.inf)
            problem.solve(problem.budget(100))

        base_ours, base = alternate(ours, lambda a=gap, b=pooled: scipy.linalg.eigh(a, b), 5)
        report(f"parity over its generalised eigenproblem, n = {width}", base_ours, base, goal=1.5)


MEMORY = """
import sys
import numpy as np
from esvdfair.core.moments import GroupMoments
rng, m = np.random.default_rng(0), GroupMoments()
for _ in range(int(sys.argv[1]) // 8192):
    m.update(rng.normal(size=(8192, 256)), rng.integers(0, 2, 8192))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


def memory() -> None:
    """Peak memory of a stream must not grow with its length."""
    short, long = (
        int(subprocess.run([sys.executable, "-c", MEMORY, str(n)], capture_output=True, check=True, text=True).stdout)
        for n in (100_000, 2_000_000)
    )
    print(
        f"peak memory of a stream: {short} MB at 1e5 rows, {long} MB at 2e6 rows = {long / short:.2f}   (goal ≤ 1.05)"
    )


if __name__ == "__main__":
    parts = {"moments": moments, "paper": paper, "parity": parity, "memory": memory}
    for name in sys.argv[1:] or parts:
        parts[name]()
