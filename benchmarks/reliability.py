"""Tries to break the package, counts what happens, and writes the tables of benchmarks/reliability.md.

    python benchmarks/reliability.py [--only arrays,models,files,kills,concurrency,properties] [--out FILE]

A part that is run alone replaces its own lines. Exit code 1 when something was silent, raw or hung.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trust import arrays, files, models, processes, properties
from trust.verdict import Tally, judge_all

DOCUMENT = Path(__file__).resolve().parents[0] / "reliability.md"
MUTATIONS, KILLS, FITS, PROBLEMS = (
    2100,
    100,
    500,
    48,
)  # a mutation may give back the file as it was, which does not count

Row = tuple[str, Callable[[], Tally]]
SUITES: dict[str, list[Row]] = {
    "models": [("hostile models (torch, scikit-learn, ONNX)", lambda: judge_all(models.all_trials()))],
    "files": [(f"mutated files: {kind}", lambda kind=kind: files.run(kind, MUTATIONS)) for kind in files.KINDS],
    "kills": [
        ("kills of `repair`, and the run after them", lambda: processes.kills(KILLS)),
        ("signals, full disks, two writers, poor surroundings", processes.surroundings),
    ],
    "concurrency": [
        (f"threads on one model, a fork, {FITS} fits", lambda: processes.concurrency(FITS)),
    ],
    "arrays": [
        ("hostile arrays: metrics", lambda: judge_all(arrays.metric_trials())),
        ("hostile arrays: `GroupMoments`", lambda: judge_all(arrays.moment_trials())),
        ("hostile arrays: baselines", lambda: judge_all(arrays.baseline_trials())),
        ("hostile arrays: `ESVDFair`", lambda: judge_all(arrays.estimator_trials())),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*SUITES, "properties"]))
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    options = parser.parse_args()
    bad = 0
    for name in options.only.split(","):
        if name == "properties":
            for title, fraction in (("All rows fit and judge", 0.0), ("A quarter of the rows is held out", 0.25)):
                replace_table(options.out, title, properties.table(properties.measure(fraction)))
            worse = properties.worse_in_both(PROBLEMS)
            replace_table(options.out, f"Of {PROBLEMS} made-up problems", properties.table(worse))
            bad += sum(sum(worse[name].values()) for name in worse if name.startswith("without"))
            continue
        for title, run in SUITES[name]:
            start = time.process_time()
            tally = run()
            bad += tally.bad
            print(tally.row(title), f"{time.process_time() - start:.0f} s", flush=True)
            for line in tally.failures:
                print("   ", " ".join(line.split())[:240], flush=True)
            replace_line(options.out, title, tally.row(title))
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
