"""Tries to break the package, counts what happens, and writes the tables of benchmarks/reliability.md.

    python benchmarks/reliability.py [--only models,files,kills,concurrency,arrays,properties]

A part that is run alone replaces its own lines. Exit code 1 when something was silent, raw or hung.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trust import arrays, files, models, processes, properties
from trust.verdict import Tally, judge_all

DOCUMENT = Path(__file__).resolve().with_name("reliability.md")
MUTATIONS = 2100  # some give back the file as it was, which does not count
FITS, PROBLEMS = 500, 48

# title of a line -> the part that it belongs to, and what runs
SUITES: dict[str, tuple[str, Callable[[], Tally]]] = {
    "hostile models (torch, scikit-learn, ONNX)": ("models", lambda: judge_all(models.all_trials())),
    **{f"mutated files: {kind}": ("files", partial(files.run, kind, MUTATIONS)) for kind in files.KINDS},
    "kills of `repair`, and the run after them": ("kills", partial(processes.kills, 100)),
    "signals, full disks, two writers, poor surroundings": ("kills", processes.surroundings),
    f"threads on one model, {FITS} fits": ("concurrency", partial(processes.concurrency, FITS)),
    "hostile arrays: metrics": ("arrays", lambda: judge_all(arrays.metric_trials())),
    "hostile arrays: `GroupMoments`": ("arrays", lambda: judge_all(arrays.moment_trials())),
    "hostile arrays: baselines": ("arrays", lambda: judge_all(arrays.baseline_trials())),
    "hostile arrays: `ESVDFair`": ("arrays", lambda: judge_all(arrays.estimator_trials())),
}


def main() -> None:
    parts = [*dict.fromkeys(part for part, _ in SUITES.values()), "properties"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts))
    chosen, bad = parser.parse_args().only.split(","), 0
    for title, (part, run) in SUITES.items():
        if part in chosen:
            start = time.process_time()
            tally = run()
            bad += len(tally.failures)
            print(tally.row(title), f"{time.process_time() - start:.0f} s", flush=True)
            for line in tally.failures:
                print("   ", " ".join(line.split())[:240], flush=True)
            replace_line(DOCUMENT, title, tally.row(title))
    if "properties" in chosen:
        for title, fraction in (("All rows fit and judge", 0.0), ("A quarter of the rows is held out", 0.25)):
            replace_table(DOCUMENT, title, properties.table(properties.measure(fraction)))
        worse = properties.worse_in_both(PROBLEMS)
        replace_table(DOCUMENT, f"Of {PROBLEMS} made-up problems", properties.table(worse))
        bad += sum(sum(counts.values()) for name, counts in worse.items() if name.startswith("without"))
    sys.exit(1 if bad else 0)


def replace_line(document: Path, title: str, line: str) -> None:
    """Put a line of the table in the place of the one that begins alike."""
    text = document.read_text(encoding="utf-8")
    document.write_text(re.sub(rf"(?m)^\| {re.escape(title)} \|.*$", lambda _: line, text), encoding="utf-8")


def replace_table(document: Path, title: str, lines: list[str]) -> None:
    """Put a table in the place of the one below the words ``title``."""
    text = document.read_text(encoding="utf-8")
    pattern = rf"(?ms)^({re.escape(title)}[^\n]*\n\n)(?:\|[^\n]*\n)+"
    document.write_text(re.sub(pattern, lambda found: found[1] + "\n".join(lines) + "\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
