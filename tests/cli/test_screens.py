"""What commands print in terminals of 80 and 120 columns is what the files in `screens/` show; --renew writes them."""

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.cells import cell_len

from tests.cli.conftest import network
from tests.test_docs import alike

SCREENS = Path(__file__).parent / "screens"
MODEL = ["model.onnx", "people.csv", "--sensitive", "sex", "--target", "income"]
RACES = ["model.onnx", "races.csv", "--sensitive", "sex", "--sensitive", "race", "--target", "income"]
COMMANDS = {
    "audit": ["audit", *MODEL, "--target-ks", "0.1"],
    "audit-cutoff": ["audit", *MODEL, "--select-share", "0.2"],
    "audit-six-groups": ["audit", *RACES],
    "explain": ["explain", *MODEL, "--repaired", "fair.onnx"],
    "explain-trees": ["explain", "model.txt", *MODEL[1:], "--repaired", "fair.txt"],
    "curve": ["curve", *MODEL, "--target-ks", "0.2", "--quick"],
    "curve-all": ["curve", *MODEL, "--quick", "--all"],
    "repair": ["repair", *MODEL, "--target-ks", "0.2", "--quick", "-o", "again.onnx"],
    "repair-cutoff": ["repair", *RACES, "--target-ks", "0.4", "--quick", "--select-share", "0.2", "-o", "again.onnx"],
    "compare": ["compare", *MODEL, "--quick"],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(files, tmp_path_factory):
    """A folder with models, repaired models, and tables of two groups and of six, three of them small."""
    lightgbm = pytest.importorskip("lightgbm", reason="needs the extra esvdfair[lightgbm]")
    folder = tmp_path_factory.mktemp("screens")
    data = files.people(2000, 5)
    data.to_csv(folder / "people.csv", index=False)
    race = np.random.default_rng(6).choice(["black", "hispanic", "white"], len(data), p=[0.2, 0.02, 0.78])
    data.assign(race=race).to_csv(folder / "races.csv", index=False)
    onnx.save(network(), folder / "model.onnx")
    half = network()
    last = half.graph.initializer[2]
    last.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(last) / 2, last.name))
    onnx.save(half, folder / "fair.onnx")
    table = lightgbm.Dataset(data[["age", "hours", "school"]], data["income"])
    options = {"num_leaves": 8, "verbose": -1, "num_threads": 1, "seed": 0}
    for name, rate in (("model.txt", 0.1), ("fair.txt", 0.05)):
        lightgbm.train(options | {"learning_rate": rate}, table, 20).save_model(folder / name)
    return folder


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints(name, columns, place, invoke, monkeypatch, tmp_path, request):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    result = invoke(*COMMANDS[name])
    assert result.exit_code in (0, 1), result.output
    printed = re.sub(r"\b\d+\.\d s\b", "0.0 s", result.output)
    wide = [line for line in printed.splitlines() if cell_len(line) > columns]
    assert [line for line in wide if not line.startswith("note: ")] == []  # on stderr, which is no terminal here
    screen = SCREENS / f"{name}-{columns}.txt"
    if request.config.getoption("--renew"):
        screen.write_text(printed, "utf-8")
    shown, now = screen.read_text("utf-8").splitlines(), printed.splitlines()
    different = [(old, new) for old, new in zip(shown, now, strict=False) if not alike(old, new, 0.02)]
    assert different == []
    assert len(shown) == len(now)
