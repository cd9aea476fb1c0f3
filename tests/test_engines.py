"""The recipes of docs/engines.md: short, shown as they are, and those that need no Java come to the model of `fit`."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "engines"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "people")


def recipe(name):
    """Lines between the marks."""
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    return textwrap.dedent(re.search(r"^ *# recipe\n(.*?)^ *# end\n", text, re.S | re.M)[1])


def start(name, **environment):
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **environment}
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    return subprocess.Popen(command, env=known, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_short_and_the_page_shows_them(name):
    lines = [line for line in recipe(name).splitlines() if line.strip() and " import " not in f" {line}"]
    assert 5 <= len(lines) <= 15
    page = (ROOT / "docs" / "engines.md").read_text("utf-8")
    assert f"```python\n{recipe(name)}```" in page


@pytest.mark.parametrize("name", ["arrow", "dask_cluster"])
def test_parts_come_to_the_model_of_fit(name):
    pytest.importorskip("dask" if name == "dask_cluster" else "pyarrow")
    out, err = (process := start(name)).communicate(timeout=300)
    assert process.returncode == 0, err
    assert re.search(r"6,763 rows in 8 parts; estimated KS 0\.0\d+; from fit on all rows .* sd\n", out)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_come_to_the_model_of_fit(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [start("torch_ranks", RANK=str(rank), **known) for rank in range(ranks)]
    found = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, found
    assert f"6,761 rows in {ranks} parts; estimated KS 0.0" in found[1][0]
