"""The recipes of docs/engines.md: short, shown as they are, and those that need no Java come to the model of `fit`."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "engines"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "people")


def recipe(name):
    """Lines between the marks."""
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    return textwrap.dedent(re.search(r"^ *# recipe\n(.*?)^ *# end\n", text, re.S | re.M)[1])


JOBS = {"arrow": {}, "dask_cluster": {}} | {
    f"rank {rank}": {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"} for rank in range(3)
}
# One process imports the libraries and makes what the recipes take as given; each recipe runs in a fork of it.
FORKS = """
import json, os, runpy, sys, traceback
folder, jobs = sys.argv[1], json.loads(sys.argv[2])
sys.path[:0] = [folder]
import people, torch
model = people.prepare()
people.prepare = lambda: model
children = {}
for name, environment in jobs.items():
    if not (child := os.fork()):
        code = 1
        try:
            os.environ.update(environment)
            os.dup2(os.open(f"{sys.argv[3]}/{name}.txt", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            script = "torch_ranks" if "RANK" in environment else name
            runpy.run_path(f"{folder}/{script}.py", run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    children[name] = child
print(json.dumps({name: os.waitpid(child, 0)[1] for name, child in children.items()}))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Exit status and output of every recipe that needs no Java."""
    place = tmp_path_factory.mktemp("engines")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    have = {"arrow": find_spec("pyarrow"), "dask_cluster": find_spec("dask")}
    jobs = {name: extra | {"MASTER_PORT": port} for name, extra in JOBS.items() if have.get(name, True)}
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", FORKS, str(FOLDER), json.dumps(jobs), str(place)]
    done = subprocess.run(command, env=known, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return {name: (code, (place / f"{name}.txt").read_text("utf-8")) for name, code in codes.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_short_and_the_page_shows_them(name):
    lines = [line for line in recipe(name).splitlines() if line.strip() and " import " not in f" {line}"]
    assert 5 <= len(lines) <= 15
    page = (ROOT / "docs" / "engines.md").read_text("utf-8")
    shown, run = (re.sub(r"\n{3,}", "\n\n", text) for text in (page, recipe(name)))  # of blank lines, ruff decides
    assert f"```python\n{run}```" in shown


@pytest.mark.parametrize("name", ["arrow", "dask_cluster"])
def test_parts_come_to_the_model_of_fit(name, ran):
    if name not in ran:
        pytest.skip("needs an extra")
    code, out = ran[name]
    assert code == 0, out
    assert re.search(r"6,763 rows in 8 parts; estimated KS 0\.0\d+; from fit on all rows .* sd\n", out)


def test_ranks_come_to_the_model_of_fit(ran):
    """6,761 rows for three: the sampler repeats one of them."""
    found = [ran[f"rank {rank}"] for rank in range(3)]
    assert [code for code, _ in found] == [0] * 3, found
    assert "6,761 rows in 3 parts; estimated KS 0.0" in found[1][1]
