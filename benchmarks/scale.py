"""Benchmarks of speed and size, as ratios measured in one run; renews the tables of benchmarks/performance.md.

    python benchmarks/scale.py                       # about ten minutes on two quiet cores
    python benchmarks/scale.py --quick               # under a minute, printed: does it run? The ratios mean little
    python benchmarks/scale.py --only fit,target     # some of them; the other tables stay as they are

Needs the extras torch and onnx (`make bench` installs them).

One thread, except where a table says otherwise: the thread pools of torch and of NumPy's BLAS both spin while they
wait, and on few cores they then slow each other down, which says nothing about the library.
"""

import argparse
import gc
import io
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import scipy.linalg
import torch
from skl2onnx import to_onnx
from sklearn.neural_network import MLPRegressor
from threadpoolctl import threadpool_limits
from torch import nn

from esvdfair import ESVDFair
from esvdfair.cli import main as command_line
from esvdfair.table_files import TableFile
from reproduction.config import Training
from reproduction.datasets import load
from reproduction.network import train

DOCUMENT = Path(__file__).resolve().with_name("performance.md")
PACKAGES = ("numpy", "scipy", "torch", "scikit-learn", "pandas", "onnxruntime")
INPUTS, BATCH = 16, 8192
Row = tuple[object, ...]


@dataclass(frozen=True)
class Section:
    """What was measured, its tables (header first), and goals: name, measured value, largest value that meets it."""

    title: str
    what: str
    tables: list[list[Row]]
    goals: list[tuple[str, float, float]]


# --- networks, rows, clocks ----------------------------------------------------------------------------------------


def network(width: int, hidden: int = 2) -> nn.Sequential:
    """``hidden`` ReLU layers of one width between 16 inputs and one output, as PyTorch initialises them."""
    torch.manual_seed(0)
    layers = [part for n, m in pairwise([INPUTS, *[width] * hidden]) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1)).eval()


def make_rows(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (rows, 16), labels and two groups that differ in mean and spread."""
    rng = np.random.default_rng((seed, rows))
    a = rng.integers(0, 2, rows)
    x = rng.standard_normal((rows, INPUTS), dtype=np.float32)
    x = x * (1 + 0.3 * a[:, None]).astype(np.float32) + (0.5 * a[:, None]).astype(np.float32)
    return x, x.sum(axis=1) + rng.standard_normal(rows), a


def in_batches(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + BATCH, rows)) for start in range(0, rows, BATCH))


def forward(model: nn.Module, x: torch.Tensor) -> None:
    """The bare forward pass over all rows."""
    with torch.no_grad():
        for part in in_batches(len(x)):
            model(x[part])


def product(x: np.ndarray) -> None:
    """The bare XᵀX."""
    for part in in_batches(len(x)):
        x[part].T @ x[part]


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of one call, of the processor by default; garbage is collected before, not during."""
    gc.collect()
    start = clock()
    function()
    return clock() - start


def interleaved(functions: dict[str, Callable[[], object]], repeats: int, *clock: Callable[[], float]) -> Any:
    """Fewest seconds of each function over rounds in which all of them run in turn, so that all see one machine."""
    rounds = [{name: seconds(function, *clock) for name, function in functions.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in functions}


def set_threads(threads: int) -> threadpool_limits:
    torch.set_num_threads(threads)
    return threadpool_limits(threads)


# --- rows in memory ------------------------------------------------------------------------------------------------

METHODS: dict[str, tuple[dict[str, object], dict[str, int]]] = {  # options, and what one solution cannot do without
    "parity": ({"targets": "labels"}, {"forward": 1, "product": 1, "eigh": 2}),
    "paper": ({"refit": "ols"}, {"forward": 2, "product": 2, "eigh": 2, "svd": 2}),
    "exact": ({}, {"forward": 2, "product": 2, "eigh": 3, "svd": 1, "cholesky": 1}),
}


def fit(repeats: dict[int, int], rows: int) -> Section:
    """Fits of all methods without a target, beside the bare parts of their lower bound; ``repeats`` at each width."""
    header = ("method", "width", "fit, s", "forward, s", "XᵀX, s", "factorisations, s", "bound, s", "fit / bound")
    table: list[Row] = [header]
    goals = []
    for width, rounds in repeats.items():
        model, (x, y, a) = network(width), make_rows(rows)
        rng = np.random.default_rng(0)
        hidden, square = rng.standard_normal((round(0.75 * rows), width)), rng.standard_normal((width, width))
        bare: dict[str, Callable[[], object]] = {
            "forward": partial(forward, model, torch.as_tensor(x)),
            "product": partial(product, hidden),
            "eigh": partial(scipy.linalg.eigh, square + square.T, driver="evd"),
            "svd": partial(scipy.linalg.svd, square, full_matrices=False),
            "cholesky": partial(scipy.linalg.cholesky, square @ square.T + width * np.eye(width)),
        }
        fits = {
            name: partial(ESVDFair(model, method=name, **options).fit, x, y, sensitive_features=a)
            for name, (options, _) in METHODS.items()
        }
        times = interleaved(bare | fits, rounds)
        for name, (_, needs) in METHODS.items():
            parts = {part: count * times[part] for part, count in needs.items()}
            bound = sum(parts.values())
            passes = parts["forward"], parts["product"]
            numbers = (times[name], *passes, bound - sum(passes), bound, times[name] / bound)
            table.append((name, width, *(f"{number:.2f}" for number in numbers)))
            goals.append((f"{name}, width {width}", times[name] / bound, 1.5))
    return Section(
        "Fit time over its lower bound",
        f"`ESVDFair(network, method=…).fit(X, y, sensitive_features=a)` with {rows:,} rows in memory and a network of "
        "two hidden layers, reductions left at their defaults, no target. The bound is what one solution of the method "
        "cannot do without, each part measured bare in the same rounds: the forward passes (parity one, the others "
        "two), one float64 XᵀX over the training rows (three quarters) for every layer whose moments are needed, and "
        "the factorisations: parity two symmetric eigenproblems of the width; paper two of them and two SVDs; exact "
        "three, one SVD and a Cholesky factor. Fewest seconds of several rounds (width: rounds): "
        + ", ".join(f"{width}: {rounds}" for width, rounds in repeats.items())
        + ".",
        [table],
        goals,
    )


def target(dataset: str, repeats: int, training: Training | None = None) -> Section:
    """Fits with a target on the paper's network, each over one forward pass, one XᵀX and two eigenproblems."""
    trained = train(load(dataset, "paper"), training or Training(), 1)
    (x, y, a), validation = trained.split.train, trained.split.validation
    all_rows = torch.as_tensor(np.concatenate([x, validation.X]), dtype=torch.float32)
    hidden = np.random.default_rng(0).standard_normal((len(x), trained.network[-1].in_features))
    symmetric = hidden[: hidden.shape[1]] + hidden[: hidden.shape[1]].T

    def bound() -> None:
        forward(trained.network, all_rows)
        product(hidden)
        for _ in range(2):
            scipy.linalg.eigh(symmetric, driver="evd")

    asked = {"transport": 3.5, "parity": 3.0}
    runs: dict[str, Callable[[], object]] = {"bound": bound}
    for method in asked:
        fair = ESVDFair(trained.network, method=method, target_ks=0.1)
        runs[method] = partial(fair.fit, x, y, sensitive_features=a, validation=validation)
    times, clock = interleaved(runs, repeats), interleaved(runs, repeats, time.perf_counter)
    threads = torch.get_num_threads()
    with set_threads(os.cpu_count() or 1):
        free, spun = interleaved(runs, repeats, time.perf_counter), interleaved(runs, repeats)
    torch.set_num_threads(threads)
    header = ("", "s", "over the bound", "by the clock, s", "with default threads, s", "processor seconds of these")
    table: list[Row] = [header]
    for name, t in times.items():
        others = (f"{taken[name]:.2f}" for taken in (clock, free, spun))
        table.append((name, f"{t:.2f}", f"{t / times['bound']:.1f}", *others))
    goals = [(f"{name} over the bound, {dataset}", times[name] / times["bound"], goal) for name, goal in asked.items()]
    goals += [(f"{name}, default threads over one, by the clock", free[name] / clock[name], 1.1) for name in asked]
    return Section(
        "A target on real rows",
        "`ESVDFair(network, method=…, target_ks=0.1).fit(…, validation=…)` with the paper's network on "
        f"{dataset}, seed 1, {len(x):,} training rows. The bound is one forward pass over all rows, a float64 XᵀX of "
        f"the training rows and two symmetric eigenproblems. Fewest seconds of {repeats} rounds. Default threads are "
        "as many as there are cores; their processor seconds show whether a pool spins.",
        [table],
        goals,
    )


# --- streams and files, each in a process of its own ---------------------------------------------------------------


def alone(function: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """What a function measures in a new process, and the largest resident size of that process in MB."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_with_peak, function, *arguments).result()


def _with_peak(function: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = function(*arguments)
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be that of the parent, where it is larger
    return found | {"peak": int(status.split("VmHWM:")[1].split()[0]) / 1024}


def fit_stream(method: str, rows: int, width: int) -> dict[str, float]:
    """Stream rows through ESVDFair; they are made batch by batch, which is in the time."""

    def batches() -> Iterator[tuple[np.ndarray, ...]]:
        return (make_rows(part.stop - part.start, seed=part.stop) for part in in_batches(rows))

    fair = ESVDFair(network(width, hidden=1), method=method, targets="labels")
    return {"seconds": seconds(lambda: fair.fit(batches))}


def growth(rows: tuple[int, ...], width: int, memory: tuple[int, int], widths: tuple[int, ...], at: int) -> Section:
    """Streaming fits over rows at one width, over ``widths`` at so many rows; peaks are compared at ``memory``."""
    first: list[Row] = [("method", "rows", "s", "peak, MB")]
    second: list[Row] = [("method", "width", "s", "peak, MB")]
    goals = []
    for method, sizes in (("parity", sorted({*rows, *memory})), ("transport", memory)):
        found = {n: alone(fit_stream, method, n, width) for n in sizes}
        first += [(method, f"{n:,}", f"{m['seconds']:.2f}", f"{m['peak']:.0f}") for n, m in found.items()]
        few, many = memory
        what = f"{method}: peak at {many:,} rows over that at {few:,}"
        goals.append((what, found[many]["peak"] / found[few]["peak"], 1.2))
    for n in widths:
        measured = alone(fit_stream, "parity", at, n)
        second.append(("parity", n, f"{measured['seconds']:.2f}", f"{measured['peak']:.0f}"))
    return Section(
        "Growth",
        f'`ESVDFair(network, method=…, targets="labels").fit(make_batches)`: rows are made batch by batch (which is in '
        f"the time) and streamed through a network of one hidden layer. First table: width {width}. Second: {at:,} "
        "rows. The peak is the process's largest resident size, with Python, torch and SciPy in it. It rises until the "
        "bounded samples are full (60,000 training rows, 100,000 validation rows) and then stays.",
        [first, second],
        goals,
    )


def repair_file(model: Path, table: Path) -> dict[str, float]:
    """Run the command on a file; a parse is one walk through its chunks."""
    parses = 0

    def counted(frames: Callable[..., Any]) -> Callable[..., Any]:
        def walk(*arguments: Any, **options: Any) -> Any:
            nonlocal parses
            parses += 1
            return frames(*arguments, **options)

        return walk

    for kind in TableFile.__subclasses__():
        kind.frames = counted(kind.frames)
    words = ["repair", str(model), str(table), "--sensitive", "sex", "--target", "y", "--method", "parity"]
    run = partial(command_line, [*words, "-o", f"{table}.onnx", "--force"], standalone_mode=False)
    return {"seconds": seconds(run, time.perf_counter), "parses": parses}


def write_table(path: Path, blocks: int, rows: int = 50_000) -> None:
    """The same people so many times, as CSV or Parquet."""
    x, y, sex = make_rows(rows)
    names = [f"x{i}" for i in range(INPUTS)]
    block = pd.DataFrame(x.astype(np.float64), columns=names).round(6).assign(y=np.round(y, 6), sex=sex)
    if path.suffix == ".csv":
        header, _, lines = block.to_csv(index=False).partition("\n")
        with path.open("w") as file:
            file.write(f"{header}\n")
            file.writelines(lines for _ in range(blocks))
    else:
        table = pyarrow.Table.from_pandas(block)
        with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
            for _ in range(blocks):
                writer.write_table(table)


def write_model(path: Path) -> None:
    x, y, _ = make_rows(2000)
    model = MLPRegressor(hidden_layer_sizes=(64,), max_iter=20, tol=1.0, random_state=0).fit(x, y)
    path.write_bytes(to_onnx(model, x[:1]).SerializeToString())


def files(blocks: tuple[int, int]) -> Section:
    """`esvdfair repair` of a CSV and a Parquet file of so many times 50,000 rows, small and large."""
    table: list[Row] = [("file", "MB", "rows", "s", "parses", "peak, MB")]
    goals = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.onnx")
        write_model(model)
        for kind in ("csv", "parquet"):
            path, peaks = Path(folder, f"people.{kind}"), []
            for count in blocks:
                write_table(path, count)
                found = alone(repair_file, model, path)
                size = f"{path.stat().st_size / 1e6:.0f}", f"{50_000 * count:,}"
                numbers = (f"{found['seconds']:.1f}", f"{found['parses']:.0f}", f"{found['peak']:.0f}")
                table.append((kind, *size, *numbers))
                peaks.append(found["peak"])
            goals.append((f"{kind}: parses of the large file", found["parses"], 2))
            goals.append((f"{kind}: peak of the large file over that of the small", peaks[1] / peaks[0], 1.2))
    return Section(
        "Files",
        f"`esvdfair repair model.onnx people.csv --method parity`, a network of {INPUTS} inputs and 64 hidden units. "
        "The Parquet files hold the same rows. A parse reads every row of the file once; before, its bytes are hashed. "
        "Seconds by the clock.",
        [table],
        goals,
    )


# --- sections -> benchmarks/performance.md -------------------------------------------------------------------------

# name -> what runs, and its arguments: in full, and with --quick
BENCHMARKS: dict[str, tuple[Callable[..., Section], dict[str, Any], dict[str, Any]]] = {
    "target": (target, {"dataset": "law", "repeats": 5}, {"dataset": "law", "repeats": 2}),
    "fit": (
        fit,
        {"repeats": {256: 3, 1024: 2, 2048: 1}, "rows": 100_000},
        {"repeats": {256: 2}, "rows": 20_000},
    ),
    "growth": (
        growth,
        {
            "rows": (10_000, 100_000, 1_000_000, 10_000_000),
            "width": 256,
            "memory": (500_000, 10_000_000),
            "widths": (64, 256, 1024, 4096),
            "at": 20_000,
        },
        {"rows": (10_000, 50_000), "width": 64, "memory": (10_000, 50_000), "widths": (64, 256), "at": 10_000},
    ),
    "files": (files, {"blocks": (12, 125)}, {"blocks": (1, 6)}),
}


def render(section: Section, source: str) -> str:
    """A section in Markdown, without its title; ``source`` says where its figures come from."""
    met = [
        (what, f"{value:.2f}", f"≤ {most:g}", "yes" if value <= most else "**no**")
        for what, value, most in section.goals
    ]
    parts = [source, section.what]
    for header, *rows in (*section.tables, [("goal", "measured", "asked", "met"), *met]):
        lines = (header, ["---"] * len(header), *rows)
        parts.append("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))
    return "\n\n".join(parts)


def renew(document: Path, name: str, text: str) -> None:
    """Put what was measured between the marks of that name; what people write stands outside the marks, and stays."""
    start, end = f"<!-- measured: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = document.read_text(encoding="utf-8").partition(start)
    document.write_text(f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def describe_machine() -> str:
    """The lines that say what the figures were measured on."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0] or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return "\n".join(
        (
            f"- processor: {cpu}, {os.cpu_count()} cores; {memory:.0f} GB of memory; {platform.platform()}",
            "- threads: 1 a process, except where a line says otherwise",
            f"- Python {platform.python_version()}, {packages}",
            f"- load before the run (1, 5, 15 minutes): {', '.join(f'{load:.2f}' for load in os.getloadavg())}",
        )
    )


def commit() -> str:
    """The commit that is checked out, with ``-dirty`` where files differ from it."""
    git = ["git", "-C", str(DOCUMENT.parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, printed")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks to run, with commas between")
    options = parser.parse_args()
    chosen, machine = options.only.split(","), describe_machine()
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    warnings.simplefilter("ignore")
    os.environ.update({f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")})  # of new processes
    set_threads(1)
    fit({8: 1}, 1000)  # imports on demand are of no fit that is measured
    for name in chosen:
        run, full, quick = BENCHMARKS[name]
        load_before = os.getloadavg()[0]
        section = run(**(quick if options.quick else full))
        source = f"*`python benchmarks/scale.py --only {name}` at commit {commit()}; load of the machine before it "
        text = render(section, f"{source}{load_before:.1f}.*")
        if options.quick:
            print(f"## {section.title}\n\n{text}\n")
        else:
            renew(DOCUMENT, name, text)
            renew(DOCUMENT, "machine", machine)


if __name__ == "__main__":
    main()
