"""Benchmarks of speed and size, as ratios measured in one run; renews the tables of benchmarks/performance.md.

    python benchmarks/scale.py                       # about ten minutes on two quiet cores
    python benchmarks/scale.py --quick               # under a minute, printed: does it run? The ratios mean little
    python benchmarks/scale.py --only fit,curve      # some of them; the other tables stay as they are
    python benchmarks/scale.py --only fit --widths 256    # on a busy machine: 2048 takes minutes

Needs the extras torch and onnx (`make bench` installs them).

One thread unless told otherwise: the thread pools of torch and of NumPy's BLAS both spin while they wait, and on few
cores they then slow each other down, which says nothing about the library (try `--threads 2 --only fit`).
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from esvdfair import ESVDFairWarning
from reproduction.config import Training
from speed import fits, growth, latency
from speed.measure import Section, commit, describe_machine, limit_threads, render, renew, warm_up

DOCUMENT = Path(__file__).resolve().parents[0] / "performance.md"
SIZES = ("full", "quick", "tiny")
# name -> what runs, and its arguments at every size
BENCHMARKS: dict[str, tuple[Callable[..., Section], dict[str, dict[str, Any]]]] = {
    "fit": (
        fits.run_fit,
        {
            "full": {"widths": (256, 1024, 2048), "rows": 100_000, "repeats": {256: 3, 1024: 2, 2048: 1}},
            "quick": {"widths": (256,), "rows": 20_000, "repeats": {256: 2}},
            "tiny": {"widths": (16,), "rows": 1000, "repeats": {16: 1}},
        },
    ),
    "target": (
        fits.run_target,
        {
            "full": {"dataset": "law", "repeats": 5},
            "quick": {"dataset": "law", "repeats": 2},
            "tiny": {"dataset": "wages", "repeats": 1, "training": Training(width=16, epochs=1)},
        },
    ),
    "growth": (
        growth.run_growth,
        {
            "full": {
                "rows": (10_000, 100_000, 1_000_000, 10_000_000),
                "width": 256,
                "memory": (500_000, 10_000_000),
                "widths": (64, 256, 1024, 4096),
                "at": 20_000,
            },
            "quick": {
                "rows": (10_000, 50_000), "width": 64, "memory": (10_000, 50_000), "widths": (64, 256), "at": 10_000
            },
            "tiny": {"rows": (1000,), "width": 16, "memory": (1000, 2000), "widths": (8, 16), "at": 1000},
        },
    ),
    "files": (
        growth.run_files,
        {
            "full": {"megabytes": (100, 1000)},
            "quick": {"megabytes": (10, 50)},
            "tiny": {"megabytes": (1, 2)},
        },
    ),
    "curve": (
        fits.run_curve,
        {
            "full": {"rows": 100_000, "width": 256, "repeats": 3},
            "quick": {"rows": 10_000, "width": 64, "repeats": 1},
            "tiny": {"rows": 1000, "width": 8, "repeats": 1},
        },
    ),
    "latency": (
        latency.run,
        {
            "full": {"width": 256, "batches": (1, 1024), "repeats": 2000},
            "quick": {"width": 256, "batches": (1, 1024), "repeats": 300},
            "tiny": {"width": 8, "batches": (1, 16), "repeats": 20},
        },
    ),
    "core": (
        fits.run_core,
        {
            "full": {"rows": 200_000, "widths": (256, 1024), "repeats": 3},
            "quick": {"rows": 20_000, "widths": (256,), "repeats": 2},
            "tiny": {"rows": 500, "widths": (8,), "repeats": 1},
        },
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="the same as --size quick")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks to run, with commas between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--widths", default="", help="of fit: these alone, with commas between")
    parser.add_argument("--out", type=Path, default=None, help="default at full size: benchmarks/performance.md")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    warnings.simplefilter("ignore", ESVDFairWarning)
    out = arguments.out or (DOCUMENT if arguments.size == "full" else None)
    machine = describe_machine(arguments.threads)
    if arguments.size != "full":
        machine.append(f"sizes: {arguments.size}, to see that the script works; the goals are meant for the full ones")
    limit_threads(arguments.threads)
    warm_up()
    for name in chosen:
        began = time.perf_counter()
        run, sizes = BENCHMARKS[name]
        load = os.getloadavg()[0]
        asked, command = dict(sizes[arguments.size]), f"`python benchmarks/scale.py --only {name}`"
        if name == "fit" and arguments.widths:
            asked["widths"] = tuple(map(int, arguments.widths.split(",")))
            asked["repeats"] = {width: asked["repeats"][width] for width in asked["widths"]}
            command = f"`python benchmarks/scale.py --only fit --widths {arguments.widths}`"
        section = run(**asked, threads=arguments.threads)
        text = render(section, f"*{command} at commit {commit()}; load of the machine before it {load:.1f}.*")
        if out is None:
            print(f"## {section.title}\n\n{text}\n")
        else:
            renew(out, name, text, section.title)
            renew(out, "machine", "\n".join(f"- {line}" for line in machine))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
