"""Processes that are killed, interrupted, crowded or alone: kills, signals, full disks, threads, leaks.

Children are forks of a process that has imported everything and run nothing, so that each costs what its work costs.
"""

import gc
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from esvdfair import Effort, ESVDFair
from esvdfair.cli import main
from trust.arrays import GROUP, LABEL, TABLE
from trust.models import endless_loop, graph, net
from trust.verdict import Tally

WORDS = ["--sensitive", "sex", "--target", "pay", "--method", "parity"]


# --- children --------------------------------------------------------------------------------------------------------


def start(work: Callable[[], Any], stdout: str = os.devnull) -> int:
    """A fork that does some work and leaves with its exit code; its output goes nowhere, or to a file."""
    if child := os.fork():
        return child
    code = 70
    try:
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
        signal.alarm(60)
        code = work() or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        os._exit(code)


def ended(child: int, seconds: float = 60.0) -> int | None:
    """The exit code of a child as a shell gives it (128 + signal); None when it was killed for taking too long."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def words(folder: Path, *more: str, out: Path | None = None) -> list[str]:
    """`repair` of the files of a folder."""
    files = str(folder / "m.onnx"), str(folder / "people.csv")
    return ["repair", *files, *WORDS, "-o", str(out or folder / "fair.onnx"), *more]


@contextmanager
def site() -> Iterator[Path]:
    """A folder with a model and a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.onnx").write_bytes(graph().SerializeToString())
        frame = pd.DataFrame(np.tile(TABLE, (4, 1)), columns=list("abcd"))
        frame.assign(pay=np.tile(LABEL, 4), sex=np.tile(GROUP, 4)).to_csv(folder / "people.csv", index=False)
        yield folder


def whole(folder: Path) -> bool:
    """Whether the model is complete, and a record that is there is of this model."""
    model, record = folder / "fair.onnx", folder / "fair.onnx.json"
    if not model.exists() or model.stat().st_size != len(graph().SerializeToString()):
        return False
    try:
        known = json.loads(record.read_text())["model_after"]["sha256"]["fair.onnx"] if record.exists() else None
    except (ValueError, KeyError):  # a torn record
        return False
    return known in (None, hashlib.sha256(model.read_bytes()).hexdigest())


def note(tally: Tally, name: str, good: bool, detail: object) -> None:
    tally.add(name, "right" if good else "silent", str(detail))


# --- kills, signals, disks, surroundings ---------------------------------------------------------------------------


def kills(count: int, seed: int = 0) -> Tally:
    """kill -9 at random moments of a repair that replaces an older one: the old files or the new, a clean next run."""
    tally, rng = Tally(), np.random.default_rng(seed)
    with site() as folder:
        started = time.monotonic()
        if code := ended(start(lambda: main(words(folder)))):
            raise RuntimeError(f"a repair ended with exit code {code}")
        took = time.monotonic() - started
        for i in range(count):
            # The files are written in the last part of a run, so half of the kills fall there.
            moment = took * (rng.uniform(0, 1.1) if i % 2 else rng.uniform(0.75, 1.1))
            child = start(lambda: main(words(folder, "--force")))
            time.sleep(moment)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            ended(child)
            note(tally, f"kill {i}", whole(folder), f"after {moment:.3f} s")
        for left in folder.glob(".*"):
            os.utime(left, (0, 0))
        code = ended(start(lambda: main(words(folder, "--force"))))
        rest = [path.name for path in folder.glob(".*")]
        note(tally, "the run after", code == 0 and not rest and whole(folder), f"exit code {code}, left {rest}")
    return tally


def surroundings() -> Tally:
    """Signals, full disks, places that cannot be written, two writers, a poor environment."""
    tally = Tally()
    for name, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        for moment in (0.05, 0.15, 0.3):
            note(tally, f"{name.name} after {moment} s", *signalled(name, code, moment))
    note(tally, "SIGINT in an endless model", *signalled(signal.SIGINT, 130, 1.0, endless=True))
    with site() as folder:
        code = ended(start(lambda: main(words(folder)), stdout="/dev/full"))
        note(tally, "stdout is full", code == 3 and whole(folder), f"exit code {code}")
    with site() as folder:
        before = _contents(folder)
        code = ended(start(lambda: _on_a_small_disk(folder)))
        note(tally, "the disk is full", code == 2 and _contents(folder) == before, f"exit code {code}")
        for out in (Path("/proc/fair.onnx"), folder / "m.onnx", folder / "people.csv", folder):
            code = ended(start(lambda out=out: main(words(folder, "--force", out=out))))
            note(tally, f"to {out.name}", code == 2 and _contents(folder) == before, f"exit code {code}")
        children = [start(lambda: main(words(folder))) for _ in range(2)]
        codes = sorted(str(ended(child)) for child in children)
        note(tally, "two writers", codes == ["0", "2"] and whole(folder), f"exit codes {codes}")
    with site() as folder:
        poor = {k: v for k, v in os.environ.items() if k not in ("HOME", "LANG")} | {"LC_ALL": "C", "PYTHONUTF8": "0"}
        python = [sys.executable, "-O", "-W", "error::RuntimeWarning", "-m", "esvdfair"]
        done = subprocess.run([*python, *words(folder)], env=poor, capture_output=True, timeout=120, check=False)
        good = done.returncode == 0 and whole(folder)
        note(tally, "no HOME, locale C, -O, warnings are errors", good, done.stderr[-200:])
    return tally


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _on_a_small_disk(folder: Path) -> Any:
    """A repair with files that may hold 200 bytes, as on a disk that fills up."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    return main(words(folder))


def signalled(name: signal.Signals, code: int, moment: float, *, endless: bool = False) -> tuple[bool, str]:
    """Whether a repair ends within two seconds of a signal with its code, or was done before; nothing torn."""
    with site() as folder:
        if endless:
            (folder / "m.onnx").write_bytes(endless_loop().SerializeToString())
        child = start(lambda: main(words(folder)))
        time.sleep(moment)
        os.kill(child, name)
        since = time.monotonic()
        got = ended(child, 10)
        took = time.monotonic() - since
        stopped = got == code and took < 2 and (whole(folder) or not (folder / "fair.onnx").exists())
        return stopped or (got == 0 and whole(folder)), f"exit code {got} after {took:.1f} s"


# --- threads and leaks -----------------------------------------------------------------------------------------------


def small_fit(model: Any) -> Any:
    """Predictions of a small repair."""
    fair = ESVDFair(model, method="parity", effort=Effort.quick(), validation_fraction=0.0, min_group_rows=2)
    return fair.fit(TABLE, LABEL, sensitive_features=GROUP).predict(TABLE)


def in_threads(threads: int, fits: int) -> list[bool]:
    """Whether fits of one model in several threads give what one fit gives, and leave the model as it was."""
    model = net().train()
    known = small_fit(model)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(small_fit, [model] * fits))
    return [np.array_equal(values, known) and model.training for values in found]


def concurrency(fits: int = 500) -> Tally:
    """Threads on one model, many fits in one process."""
    tally = Tally()
    for i, same in enumerate(in_threads(6, 24)):
        note(tally, f"thread {i}", same, "another result, or another flag")
    note(tally, f"{fits} fits", *_leak(fits))
    return tally


def _leak(fits: int) -> tuple[bool, str]:
    """Whether memory and descriptors stay as they are from the first fifth of many fits to the last."""
    model = net()

    def used() -> tuple[float, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd"))

    for i in range(fits):
        if i == fits // 5:
            before = used()
        small_fit(model)
    after = used()
    grown = after[0] - before[0]
    return grown < 8 and after[1] <= before[1], f"{grown:.1f} MiB more, descriptors {before[1]} to {after[1]}"
