"""`python -m reproduction`: a reduced protocol from end to end, and bad input."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from esvdfair.problem import Effort
from reproduction import __main__ as reproduce
from reproduction import datasets
from reproduction.config import EXPERIMENTS, Retraining, Training
from reproduction.datasets import load
from reproduction.runs import work

REDUCED = {
    "training": Training(epochs=3, width=16, batch_size=256, learning_rate=5e-3),
    "retraining": Retraining(stages=1),
    "effort": Effort.quick(),
    "optimum_levels": (0.05, 0.10),
}


def some_rows(name, preparation):
    """At most 4,000 rows of a data set, drawn once."""
    whole = load(name, preparation)
    keep = np.sort(np.random.default_rng(0).permutation(len(whole.y))[:4000])
    columns = {column: getattr(whole, column).iloc[keep] for column in ("X", "y", "sensitive_features")}
    return replace(whole, **columns)


@pytest.fixture
def reduced(monkeypatch):
    """Quick experiments on some rows, in this process: reproduction/tests/test_runs_processes.py starts others."""
    monkeypatch.setattr(reproduce, "run", lambda tasks, **_: list(map(work, tasks)))
    monkeypatch.setattr(datasets, "load", some_rows)
    for name, experiment in EXPERIMENTS.items():
        monkeypatch.setitem(EXPERIMENTS, name, replace(experiment, **REDUCED))


def invoke(*args):
    return CliRunner().invoke(reproduce.main, [*map(str, args)])


def check(result, out, names, preparation, seeds):
    """The tables that a command printed as JSON, after a look at the rows that it wrote."""
    assert result.exit_code == 0, (result.output, result.exception)
    tables = json.loads(result.stdout)
    assert [table["experiment"] for table in tables] == names
    for table in tables:
        assert table["seeds"] == seeds
        assert all(line["seeds"] == len(seeds) for line in table["lines"])
        name = f"{table['experiment']}-{preparation}"
        assert (out / f"{name}.csv").read_text().count("\n") == 1 + len(seeds) * len(table["lines"])
    return tables


def check_comparison(table):
    lines = {(line["method"], line["fitted_on"], line["group"], line["level"]): line for line in table["lines"]}
    assert {key[0] for key in lines} == {
        "untouched", "refitted", "constant", "barycenter", "private_histogram", "paper", "paper_printed_cubic",
        "paper_unguarded_solve", "algorithm_2", "parity", "transport", "finetuned", "from_scratch", "optimum",
    }  # fmt: skip
    before, after = (
        lines[key]["ks"]["mean"] for key in (("untouched", "", "none", None), ("transport", "", "none", 0.1))
    )
    # of so few rows the original model may meet the target by its estimate, and is returned then
    assert after < before or (after == before and before < 0.15)


@pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")  # trained for an epoch
def test_wages_from_end_to_end(reduced, tmp_path):
    result = invoke("wages", "--seeds", "33-34", "--out", tmp_path, "--json")
    check_comparison(*check(result, tmp_path, ["wages"], "clean", [33, 34]))
    for figure in ("densities", "tradeoff"):
        assert (tmp_path / "figures" / f"wages-clean-{figure}.png").read_bytes().startswith(b"\x89PNG")
    again = invoke("wages", "--seeds", "33-34", "--out", tmp_path)
    assert again.exit_code == 0
    assert again.stdout.startswith("wages, preparation clean, 2 seeds, test rows\n")
    assert "transport, KS ≤ 0.1" in again.stdout
    assert again.stdout.rstrip().endswith("wages-clean-tradeoff.png")


@pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")  # trained for an epoch
@pytest.mark.skipif("ESVDFAIR_DATA" not in os.environ, reason="needs the files of law and COMPAS in ESVDFAIR_DATA")
def test_the_papers_data_from_end_to_end(reduced, tmp_path, monkeypatch):
    drawn = []  # figures of such tables are drawn in reproduction/tests/test_report.py
    monkeypatch.setattr(reproduce, "draw_figures", lambda table, _: drawn.append(table.experiment.name) or [])
    result = invoke("all", "--preparation", "paper", "--seeds", "33", "--out", tmp_path, "--json")
    names = ["law", "compas", "ablation-mean", "ablation-covariance"]
    law, compas, mean, covariance = check(result, tmp_path, names, "paper", [33])
    assert drawn == names
    for table in (law, compas):
        check_comparison(table)
    for table in (mean, covariance):
        assert table["evaluated_on"] == "heldout"
        assert [line["method"] for line in table["lines"]] == ["paper"] * 5
    for table in (law, compas, mean, covariance):
        assert sum(line["printed"] is not None for line in table["lines"]) >= 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "'nothing' is not one of"),
        (["law", "--seeds", "many"], "seeds 'many' cannot be read"),
        (["law", "--jobs", "0"], "--jobs"),
        (["wages", "--preparation", "paper"], "wages has no preparation 'paper'"),
        (["report"], "holds no finished seed of law and compas"),
        ([], "Missing argument"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(args, said, tmp_path):
    result = invoke(*args, "--out", tmp_path / "none")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert not (tmp_path / "none").exists()


def test_rows_of_another_protocol_are_refused(reduced, tmp_path):
    folder = tmp_path / "wages-clean" / "repaired"
    folder.mkdir(parents=True)
    saved = {"format": "esvdfair-seed-3", "protocol": {}, "rows": []}
    (folder / "seed-33.json").write_text(json.dumps(saved))
    result = invoke("wages", "--seeds", "33", "--out", tmp_path)
    assert result.exit_code == 2
    assert "another protocol" in result.stderr


def test_help_names_every_experiment():
    result = invoke("--help")
    assert result.exit_code == 0
    for name in [*EXPERIMENTS, "all", "report"]:
        assert name in result.stdout
