"""Six benchmarks of speed and size, as ratios measured in one run; writes docs/performance.md.

    python benchmarks/scale.py                       # about ten minutes on two quiet cores
    python benchmarks/scale.py --quick               # under a minute: does it run? The ratios mean little
    python benchmarks/scale.py --only fit,curve      # some of fit, peers, growth, processes, curve, latency

Needs the extras torch, onnx and peers (`make bench` installs them).

One thread unless told otherwise: the thread pools of torch and of NumPy's BLAS both spin while they wait, and on few
cores they then slow each other down, which says nothing about the library (try `--threads 2 --only fit`).
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from esvdfair import ESVDFairWarning
from speed import curve, fit_time, growth, latency, peers, processes
from speed.document import render
from speed.measure import Section, describe_machine, limit_threads, warm_up

SIZES = ("full", "quick", "tiny")
Benchmark = Callable[[str, int], Section]


def by_size(size: str, full: dict[str, object], quick: dict[str, object], tiny: dict[str, object]) -> dict[str, object]:
    return {"full": full, "quick": quick, "tiny": tiny}[size]


def run_fit(size: str, threads: int) -> Section:
    sizes = by_size(
        size,
        {"widths": (256, 1024, 2048), "rows": 100_000, "repeats": {256: 3, 1024: 2, 2048: 1}},
        {"widths": (256,), "rows": 20_000, "repeats": {256: 2}},
        {"widths": (16,), "rows": 1000, "repeats": {16: 1}},
    )
    return fit_time.run(**sizes)  # type: ignore[arg-type]


def run_peers(size: str, threads: int) -> Section:
    sizes = by_size(
        size,
        {"widths": (256, 1024), "rows": 50_000, "transcribed": 1024, "sample": 24, "repeats": 3},
        {"widths": (256,), "rows": 10_000, "transcribed": 256, "sample": 16, "repeats": 2},
        {"widths": (16,), "rows": 1000, "transcribed": 16, "sample": 4, "repeats": 1},
    )
    return peers.run(**sizes)  # type: ignore[arg-type]


def run_growth(size: str, threads: int) -> Section:
    sizes = by_size(
        size,
        {
            "rows": (10_000, 100_000, 1_000_000, 10_000_000),
            "width": 256,
            "memory": (500_000, 10_000_000),
            "widths": (64, 256, 1024, 4096),
            "at": 20_000,
        },
        {"rows": (10_000, 50_000), "width": 64, "memory": (10_000, 50_000), "widths": (64, 256), "at": 10_000},
        {"rows": (1000,), "width": 16, "memory": (1000, 2000), "widths": (8, 16), "at": 1000},
    )
    return growth.run(**sizes, threads=threads)  # type: ignore[arg-type]


def run_processes(size: str, threads: int) -> Section:
    sizes = by_size(
        size,
        {"rows": 20 * 8192, "width": 1024, "repeats": 3},
        {"rows": 4 * 8192, "width": 256, "repeats": 1},
        {"rows": 2 * 8192, "width": 8, "repeats": 1},
    )
    return processes.run(**sizes)  # type: ignore[arg-type]


def run_curve(size: str, threads: int) -> Section:
    sizes = by_size(
        size,
        {"rows": 100_000, "width": 256, "repeats": 3},
        {"rows": 10_000, "width": 64, "repeats": 1},
        {"rows": 1000, "width": 8, "repeats": 1},
    )
    return curve.run(**sizes)  # type: ignore[arg-type]


def run_latency(size: str, threads: int) -> Section:
    sizes = by_size(
        size,
        {"width": 256, "batches": (1, 1024), "repeats": 2000},
        {"width": 256, "batches": (1, 1024), "repeats": 300},
        {"width": 8, "batches": (1, 16), "repeats": 20},
    )
    return latency.run(**sizes, threads=threads)  # type: ignore[arg-type]


BENCHMARKS: dict[str, Benchmark] = {
    "fit": run_fit,
    "peers": run_peers,
    "growth": run_growth,
    "processes": run_processes,
    "curve": run_curve,
    "latency": run_latency,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="the same as --size quick")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks to run, with commas between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="default for a full run: docs/performance.md")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    warnings.simplefilter("ignore", ESVDFairWarning)
    machine, start, sections = describe_machine(arguments.threads), time.perf_counter(), []
    limit_threads(arguments.threads)
    warm_up()
    for name in chosen:
        began = time.perf_counter()
        sections.append(BENCHMARKS[name](arguments.size, arguments.threads))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    options = [f"--size {arguments.size}"] * (arguments.size != "full")
    options += [f"--only {arguments.only}"] * (len(chosen) < len(BENCHMARKS))
    command = " ".join(["python benchmarks/scale.py", *options]) if options else "make bench"
    if arguments.size != "full":
        machine.append(f"sizes: {arguments.size}, to see that the script works; the goals are meant for the full ones")
    text = render(sections, machine, command, (time.perf_counter() - start) / 60)
    out = arguments.out
    if out is None and not options:
        out = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
    if out is None:
        print(text)
    else:
        out.write_text(text, encoding="utf-8")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
