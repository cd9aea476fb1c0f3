"""Rows are the same whatever the number of jobs, and however often a run was killed or doubled."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from esvdfair.experiments.config import WAGES, Finetune, Training
from esvdfair.experiments.rows import Folder, write_atomically
from esvdfair.experiments.runner import Task, _one_thread_each, _work, collect, plan, run

SRC = Path(__file__).parents[2] / "src"
QUICK = replace(
    WAGES,
    name="quick",
    kind="ablation",
    reductions=((5.0, 15.0), (15.0, 150.0)),
    training=Training(epochs=1, width=8, depth=3),
    finetune=Finetune(epochs=1),
)
SEEDS = range(33, 37)
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
from esvdfair.experiments.config import WAGES, Finetune, Training
from esvdfair.experiments.runner import plan, run
quick = replace(WAGES, name="quick", kind="ablation", reductions=((5.0, 15.0), (15.0, 150.0)),
                training=Training(epochs=1, width=8, depth=3), finetune=Finetune(epochs=1))
run(plan([(quick, "clean")], range(33, 37), Path(sys.argv[1]))[1], jobs=1)
"""


def complete(out: Path, *, jobs: int) -> dict[str, bytes]:
    run(plan([(QUICK, "clean")], SEEDS, out)[1], jobs=jobs)
    Folder(out, QUICK, "clean").combine()
    return files(out)


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def start(out: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)], env={**os.environ, "PYTHONPATH": str(SRC)})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    done = complete(tmp_path_factory.mktemp("uninterrupted"), jobs=2)
    assert len(done) == len(SEEDS) + 1
    return done


def test_a_killed_run_goes_on_and_two_runs_share_the_rest(uninterrupted, tmp_path):
    """With one job each, where the uninterrupted run had two."""
    first = start(tmp_path)
    seeds = tmp_path / "quick-clean"
    deadline = time.monotonic() + 120
    while not list(seeds.glob("seed-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    saved = {path.name: path.stat().st_mtime_ns for path in seeds.glob("seed-*.json")}
    assert saved
    second = start(tmp_path)
    assert complete(tmp_path, jobs=1) == uninterrupted
    assert second.wait(timeout=120) == 0
    assert files(tmp_path) == uninterrupted
    kept = {path.name: path.stat().st_mtime_ns for path in seeds.glob("seed-*.json")}
    assert saved.items() <= kept.items()  # what was saved was not made again


def test_experiments_on_the_same_networks_share_a_task(tmp_path):
    other = replace(QUICK, name="other", reductions=((1.5, 150.0),))
    longer = replace(QUICK, name="longer", training=Training(epochs=2))
    done, todo = plan([(QUICK, "clean"), (other, "clean"), (longer, "clean")], [33, 34], tmp_path)
    assert done == []
    assert todo == [
        Task((QUICK, other), "clean", 33, tmp_path),
        Task((longer,), "clean", 33, tmp_path),
        Task((QUICK, other), "clean", 34, tmp_path),
        Task((longer,), "clean", 34, tmp_path),
    ]


def test_a_preparation_that_the_data_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="quick has no preparation 'paper'; choose clean"):
        plan([(QUICK, "paper")], [33], tmp_path)


def test_what_is_saved_is_not_planned(uninterrupted, tmp_path):
    for name, content in uninterrupted.items():
        write_atomically(tmp_path / name, content)
    done, todo = plan([(QUICK, "clean")], range(33, 39), tmp_path)
    assert [task.seed for task in done] == [33, 34, 35, 36]
    assert [task.seed for task in todo] == [37, 38]
    assert {row.seed for row in collect(QUICK, "clean", [34, 35, 99], tmp_path)} == {34, 35}


def test_a_saved_seed_of_another_protocol_stops_the_plan(uninterrupted, tmp_path):
    for name, content in uninterrupted.items():
        write_atomically(tmp_path / name, content)
    with pytest.raises(ValueError, match="another protocol"):
        plan([(replace(QUICK, epsilon=1e-3), "clean")], SEEDS, tmp_path)


def test_the_threads_of_the_caller_are_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with _one_thread_each():
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


def test_a_seed_that_fails_is_named_and_not_saved(tmp_path):
    impossible = replace(QUICK, reductions=((0.5, 1.0),))
    with pytest.raises(RuntimeError, match=r"seed 33 of quick, preparation clean, failed: reduction=0\.5"):
        _work(Task((impossible,), "clean", 33, tmp_path))
    assert files(tmp_path) == {}
