"""Tries to break the package, counts what happens, and writes docs/reliability.md's table.

python benchmarks/reliability.py [--only arrays,models,files,kills,concurrency,properties] [--show]
"""

import argparse
import time
from collections.abc import Callable

from trust import arrays
from trust.verdict import Tally, judge_all

SUITES: dict[str, tuple[str, Callable[[], Tally]]] = {
    "arrays": ("hostile arrays (estimator, metrics, moments, baselines)", lambda: judge_all(arrays.all_trials())),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SUITES))
    only = parser.parse_args().only.split(",")
    for name in only:
        title, run = SUITES[name]
        start = time.process_time()
        tally = run()
        print(tally.row(title), f"{time.process_time() - start:.0f} s")
        for line in tally.failures:
            print("   ", line)


if __name__ == "__main__":
    main()
