"""Rows are the same whatever the number of jobs, and however often a run was killed or doubled."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reproduction.config import WAGES, Training
from reproduction.runs import Folder, Task, plan, work, write_atomically

ROOT = Path(__file__).parents[2]
QUICK = replace(
    WAGES,
    name="quick",
    parts=("paper",),
    reductions=((5.0, 15.0), (15.0, 150.0)),
    training=Training(epochs=1, width=8, depth=3),
)
SEEDS = range(33, 37)
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
from reproduction.config import WAGES, Training
from reproduction.runs import plan, run
quick = replace(WAGES, name="quick", parts=("paper",), reductions=((5.0, 15.0), (15.0, 150.0)),
                training=Training(epochs=1, width=8, depth=3))
run(plan([quick], range(33, 37), Path(sys.argv[1]))[1], jobs=2)
"""


def complete(out: Path) -> dict[str, bytes]:
    """The seeds that are not there yet, in this process."""
    for task in plan([QUICK], SEEDS, out)[1]:
        work(task)
    Folder(out, QUICK).combine()
    return files(out)


def files(out: Path) -> dict[str, bytes]:
    # A run that is killed while it writes leaves a hidden file beside, which nothing reads.
    files = (path for path in out.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def put(files: dict[str, bytes], out: Path) -> None:
    for name, content in files.items():
        write_atomically(out / name, content)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    done = complete(tmp_path_factory.mktemp("uninterrupted"))
    assert len(done) == 2 * len(SEEDS) + 1  # rows and network of every seed, and the table of all
    return done


def test_a_run_of_two_jobs_that_is_killed_goes_on_where_it_was(uninterrupted, tmp_path):
    """Two processes make what this one makes, and a worker whose parent was killed ends too."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    killed = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment)
    seeds = tmp_path / "quick-clean" / "paper"
    deadline = time.monotonic() + 600
    while not list(seeds.glob("seed-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    saved = {path.name: path.stat().st_mtime_ns for path in seeds.glob("seed-*.json")}
    assert saved
    assert complete(tmp_path) == uninterrupted
    kept = {path.name: path.stat().st_mtime_ns for path in seeds.glob("seed-*.json")}
    assert saved.items() <= kept.items()  # what was saved was not made again


def test_a_task_that_another_run_has_done_is_left_alone(uninterrupted, tmp_path):
    put(uninterrupted, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    work(Task((Folder(tmp_path, QUICK),), 34))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_experiments_on_the_same_networks_share_a_task(tmp_path):
    other = replace(QUICK, name="other", reductions=((1.5, 150.0),))
    longer = replace(QUICK, name="longer", training=Training(epochs=2))
    done, todo = plan([QUICK, other, longer], [33, 34], tmp_path)
    assert done == []
    named = [(tuple(folder.experiment.full_name for folder in task.folders), task.seed) for task in todo]
    shared, alone = ("quick-clean", "other-clean"), ("longer-clean",)
    assert named == [(shared, 33), (alone, 33), (shared, 34), (alone, 34)]


def test_a_preparation_that_the_data_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="quick has no preparation 'paper'; choose clean"):
        plan([replace(QUICK, preparation="paper")], [33], tmp_path)


def test_what_is_saved_is_not_planned(uninterrupted, tmp_path):
    put(uninterrupted, tmp_path)
    done, todo = plan([QUICK], range(33, 39), tmp_path)
    assert [task.seed for task in done] == [33, 34, 35, 36]
    assert [task.seed for task in todo] == [37, 38]
    assert {row.seed for row in Folder(tmp_path, QUICK).rows([34, 35, 99])} == {34, 35}


def test_a_saved_seed_of_another_protocol_stops_the_plan(uninterrupted, tmp_path):
    put(uninterrupted, tmp_path)
    with pytest.raises(ValueError, match="another protocol"):
        plan([replace(QUICK, reductions=((5.0, 15.0),))], SEEDS, tmp_path)


def test_a_part_whose_rows_were_deleted_is_made_again_from_the_same_networks(uninterrupted, tmp_path, monkeypatch):
    put(uninterrupted, tmp_path)
    monkeypatch.setattr("reproduction.network.Adam", None)  # nothing is trained again
    Folder(tmp_path, QUICK).path("paper", 34).unlink()
    assert complete(tmp_path) == uninterrupted


def test_a_seed_is_made_with_one_thread(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("reproduction.runs.to_rows", lambda *_: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(Folder, "write", lambda *_: None)
    monkeypatch.setattr("reproduction.methods.METHODS", {"paper": lambda *_: []})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    work(Task((Folder(tmp_path, QUICK),), 33))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert seen == [1]


def test_a_seed_that_fails_is_named_and_not_saved(tmp_path):
    impossible = replace(QUICK, reductions=((0.5, 1.0),))
    with pytest.raises(RuntimeError, match=r"seed 33 of quick, preparation clean, failed: .*reduction=0\.5"):
        work(Task((Folder(tmp_path, impossible),), 33))
    assert not list((tmp_path / "quick-clean").rglob("*.json"))
