"""Processes that are killed, interrupted, crowded or alone: kills, signals, full disks, threads, forks, leaks.

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
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from esvdfair import Effort, ESVDFair
from esvdfair.cli import main
from trust.arrays import GROUP, LABEL, TABLE
from trust.models import graph, net
from trust.verdict import Tally

WORDS = ["--sensitive", "sex", "--target", "pay", "--method", "parity"]


# --- children --------------------------------------------------------------------------------------------------------


def start(work: Callable[[], Any], *, stdout: str | None = None) -> int:
    """A fork that does some work and leaves with its exit code; its output goes nowhere, or to a file."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        sink = os.open(stdout or os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
        signal.alarm(60)
        code = work() or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
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


def repair(folder: Path, *more: str) -> Callable[[], Any]:
    """`esvdfair repair` on the files of a folder."""
    words = [
        "repair",
        str(folder / "m.onnx"),
        str(folder / "people.csv"),
        *WORDS,
        "-o",
        str(folder / "fair.onnx"),
        *more,
    ]
    return lambda: main(words)


@contextmanager
def site() -> Iterator[Path]:
    """A folder with a model and a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.onnx").write_bytes(graph().SerializeToString())
        frame = pd.DataFrame(np.tile(TABLE, (4, 1)), columns=list("abcd")).assign(
            pay=np.tile(LABEL, 4), sex=np.tile(GROUP, 4)
        )  # fmt: skip
        frame.to_csv(folder / "people.csv", index=False)
        yield folder


# --- kills -----------------------------------------------------------------------------------------------------------


def kills(count: int, seed: int = 0) -> Tally:
    """kill -9 at random moments of a repair that replaces an older one: the old files or the new, a clean next run."""
    tally, rng = Tally(), np.random.default_rng(seed)
    with site() as folder:
        started = time.monotonic()
        code = ended(start(repair(folder)))
        whole = time.monotonic() - started
        if code != 0:
            tally.add("repair", "raw", f"exit code {code}")
            return tally
        for i in range(count):
            # The files are written in the last part of a run, so half of the kills fall there.
            moment = whole * (rng.uniform(0, 1.1) if i % 2 else rng.uniform(0.75, 1.1))
            child = start(repair(folder, "--force"))
            time.sleep(moment)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            ended(child)
            tally.add(f"kill {i} after {moment:.3f} s", *_whole(folder))
        for left in folder.glob(".*"):
            os.utime(left, (0, 0))
        code = ended(start(repair(folder, "--force")))
        rest = [path.name for path in folder.glob(".*")]
        good = code == 0 and not rest and _whole(folder)[0] == "right"
        tally.add("the run after", "right" if good else "silent", f"exit code {code}, left {rest}")
    return tally


def _whole(folder: Path) -> tuple[str, str]:
    """Whether the model is complete, and a record that is there is of this model."""
    model, record = folder / "fair.onnx", folder / "fair.onnx.json"
    if not model.exists():
        return "silent", "no model"
    data = model.read_bytes()
    if len(data) != len(graph().SerializeToString()):
        return "silent", f"a model of {len(data)} bytes"
    if not record.exists():
        return "right", ""
    try:
        known = json.loads(record.read_text())["model_after"]["sha256"]["fair.onnx"]
    except (ValueError, KeyError) as error:
        return "silent", f"a torn record ({error})"
    return ("right", "") if known == hashlib.sha256(data).hexdigest() else ("silent", "a record of another model")


# --- signals, disks, surroundings ------------------------------------------------------------------------------------


def surroundings() -> Tally:
    """Signals, full disks, places that cannot be written, two writers, a poor environment."""
    tally = Tally()
    for name, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        for moment in (0.05, 0.15, 0.3):
            _note(tally, f"{name.name} after {moment} s", *_signalled(name, code, moment))
    _note(tally, "SIGINT in an endless model", *_signalled(signal.SIGINT, 130, 1.0, endless=True))
    with site() as folder:
        code = ended(start(repair(folder), stdout="/dev/full"))
        _note(tally, "stdout is full", code == 3 and _whole(folder)[0] == "right", f"exit code {code}")
    with site() as folder:
        code = ended(start(lambda: _limited(repair(folder))))
        left = sorted(path.name for path in folder.iterdir())
        _note(tally, "the disk is full", code == 2 and left == ["m.onnx", "people.csv"], f"exit code {code}, {left}")
    with site() as folder:
        words = ["repair", str(folder / "m.onnx"), str(folder / "people.csv"), *WORDS]
        for out in ("/proc/fair.onnx", str(folder / "m.onnx"), str(folder / "people.csv"), str(folder)):
            before = _sums(folder)
            code = ended(start(lambda out=out: main([*words, "-o", out, "--force"])))
            _note(tally, f"to {Path(out).name}", code == 2 and _sums(folder) == before, f"exit code {code}")
    with site() as folder:
        children = [start(repair(folder)) for _ in range(2)]
        codes = sorted(str(ended(child)) for child in children)
        _note(tally, "two writers", codes == ["0", "2"] and _whole(folder)[0] == "right", f"exit codes {codes}")
    with site() as folder:
        poor = {k: v for k, v in os.environ.items() if k not in ("HOME", "LANG")} | {"LC_ALL": "C", "PYTHONUTF8": "0"}
        words = [
            sys.executable,
            "-O",
            "-W",
            "error::RuntimeWarning",
            "-m",
            "esvdfair",
            "repair",
            str(folder / "m.onnx"),
        ]
        words += [str(folder / "people.csv"), *WORDS, "-o", str(folder / "fair.onnx")]
        done = subprocess.run(words, env=poor, capture_output=True, timeout=120, check=False)
        good = done.returncode == 0 and _whole(folder)[0] == "right"
        _note(tally, "no HOME, locale C, -O, warnings are errors", good, done.stderr.decode(errors="replace")[-200:])
    return tally


def _note(tally: Tally, name: str, good: bool, detail: str) -> None:
    tally.add(name, "right" if good else "silent", detail)


def _sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def _limited(work: Callable[[], Any]) -> Any:
    """Do some work with files that may hold 200 bytes, as on a disk that fills up."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    return work()


def _signalled(name: signal.Signals, code: int, moment: float, *, endless: bool = False) -> tuple[bool, str]:
    """Whether a repair ends within two seconds of a signal with its code, or was done before; nothing torn."""
    with site() as folder:
        if endless:
            from trust.models import endless_loop

            (folder / "m.onnx").write_bytes(endless_loop().SerializeToString())
        child = start(repair(folder))
        time.sleep(moment)
        os.kill(child, name)
        since = time.monotonic()
        got = ended(child, 10)
        took = time.monotonic() - since
        nothing = not (folder / "fair.onnx").exists()
        good = (got == code and took < 2) or (got == 0 and _whole(folder)[0] == "right")
        return good and (got == 0 or nothing or _whole(folder)[0] == "right"), f"exit code {got} after {took:.1f} s"


# --- threads, forks, leaks -------------------------------------------------------------------------------------------


def small_fit(model: Any) -> Any:
    """Predictions of a small repair."""
    fair = ESVDFair(
        model, method="parity", effort=Effort.quick(), validation_fraction=0.0, min_group_rows=2, random_state=0
    )
    return fair.fit(TABLE, LABEL, sensitive_features=GROUP).predict(TABLE)


def concurrency(fits: int = 500) -> Tally:
    """Threads on one model, a fork after torch has used two threads, many fits in one process."""
    tally = Tally()
    model = net().train()
    known, found, errors = small_fit(model), [], []

    def work() -> None:
        try:
            found.append(small_fit(model))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    for _ in range(4):
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, values in enumerate(found):
        _note(tally, f"thread {i}", np.array_equal(values, known) and model.training, "another result, or another flag")
    for error in errors:
        tally.add("thread", "raw", error)
    code = ended(start(_after_two_threads), 60)
    _note(tally, "fork after two threads", code == 0, f"exit code {code}")
    _note(tally, f"{fits} fits", *_leak(fits))
    return tally


def _after_two_threads() -> int:
    """In a child, so that this process stays as it is: use two threads, fork, fit in the fork."""
    torch.set_num_threads(2)
    big = torch.ones(600, 600)
    (big @ big).sum().item()
    known = small_fit(net())
    code = ended(start(lambda: int(not np.array_equal(small_fit(net()), known))), 30)
    return 1 if code is None else code


def _leak(fits: int) -> tuple[bool, str]:
    """Whether memory and descriptors stay as they are from the first tenth of many fits to the last."""
    model = net()

    def used() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    before = (0, 0)
    for i in range(fits):
        if i == fits // 5:
            before = used()
        small_fit(model)
    after = used()
    grown = (after[0] - before[0]) / 2**20
    return grown < 8 and after[1] <= before[1], f"{grown:.1f} MiB more, descriptors {before[1]} to {after[1]}"
