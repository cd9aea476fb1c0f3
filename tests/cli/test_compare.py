import json

import numpy as np
import pandas as pd
import pytest

from esvdfair import ks_distance
from esvdfair.baselines import WassersteinBarycenter
from esvdfair.cli import compare
from esvdfair.cli._shared import learning_and_judging
from esvdfair.cli.compare import Method
from esvdfair.exceptions import Given, InputError
from esvdfair.models.onnx import OnnxAdapter
from esvdfair.tables import Roles, TableBatches

ROLES = ["--sensitive", "sex", "--target", "income"]
NAMES = [
    "the model as it is", "transport", "parity", "exact", "paper", "barycenter", "barycenter, group predicted",
    "private histogram", "private histogram, group predicted", "unaware optimum",
]  # fmt: skip


def without_scans(monkeypatch, *left_out):
    """Fewer methods, for tests that look at something else."""
    kept = [method for method in compare.methods() if method.name not in left_out]
    monkeypatch.setattr(compare, "methods", lambda: kept)


def test_every_method_is_judged_on_rows_it_has_not_seen(files, invoke):
    result = invoke("compare", files.model, files.data, *ROLES, "--quick", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    scores = {score["method"]: score for score in found["scores"]}
    assert list(scores) == NAMES
    assert found["rows_fit"] + found["rows_test"] == 600
    assert all(score["error"] is None for score in scores.values())
    assert {name for name, score in scores.items() if score["same_model"]} == set(NAMES[:5])
    assert {name for name, score in scores.items() if score["needs"] != "nothing"} == {
        "barycenter",
        "private histogram",
    }
    before = scores["the model as it is"]
    assert all(scores[name]["ks"] < before["ks"] for name in ("transport", "parity", "barycenter"))
    assert before["mse"] < scores["transport"]["mse"]


def test_rows_of_validation_judge(files, invoke, monkeypatch):
    without_scans(monkeypatch, "transport", "parity", "exact", "paper", "unaware optimum")
    found = json.loads(invoke("compare", files.model, files.data, *ROLES, "--validation", files.new, "--json").stdout)
    assert (found["rows_fit"], found["rows_test"]) == (600, 400)
    data, new = pd.read_csv(files.data), pd.read_parquet(files.new)
    fitted, unseen = (OnnxAdapter(files.model).predict(t[["age", "hours", "school"]]) for t in (data, new))
    oracle = WassersteinBarycenter(random_state=0).fit(fitted, sensitive_features=data["sex"])
    moved = oracle.predict(unseen, sensitive_features=new["sex"])
    (barycenter,) = (score for score in found["scores"] if score["method"] == "barycenter")
    assert barycenter["ks"] == ks_distance(moved, sensitive_features=new["sex"])
    assert barycenter["mse"] == pytest.approx(np.mean((moved - new["income"]) ** 2))


def test_a_method_that_cannot_be_applied_says_why(files, invoke, monkeypatch):
    def fail(case):
        raise InputError("no hidden layer for {method}", method=Given("exact"))

    methods = [compare.methods()[0], Method("exact", "nothing", True, fail)]
    monkeypatch.setattr(compare, "methods", lambda: methods)
    result = invoke("compare", files.model, files.data, *ROLES)
    assert result.exit_code == 0
    assert "exact: not possible here. no hidden layer for --method exact" in result.stdout
    assert "MSE of female" in result.stdout


def test_groups_too_small_to_split(files, refused, tmp_path):
    data = pd.read_csv(files.data).iloc[:30]
    data["sex"] = ["a"] * 29 + ["b"]
    data.to_csv(tmp_path / "few.csv", index=False)
    assert "--validation" in refused("compare", files.model, tmp_path / "few.csv", *ROLES)


def test_the_split_is_by_rows_and_seed(files):
    rows = TableBatches(files.data, Roles(("sex",), "income"))
    fit, judge = learning_and_judging(rows, None, 0)
    assert set(fit.X.index).isdisjoint(judge.X.index)
    assert len(fit) + len(judge) == 600
    assert 0.2 < len(judge) / 600 < 0.3
    again, other = (list(learning_and_judging(rows, None, seed)[1].X.index) for seed in (0, 1))
    assert again == list(judge.X.index) != other


@pytest.mark.parametrize("validation", [True, False])
def test_the_same_words_give_what_repair_gives(files, invoke, tmp_path, monkeypatch, validation):
    """Learnt from, chosen and judged on the same rows as `esvdfair repair`."""
    without_scans(monkeypatch, *set(NAMES) - {"the model as it is", "parity"})
    words = [files.model, files.data, *ROLES, "--target-ks", "0.15", "--quick", "--seed", 3, "--json"]
    words += ["--validation", files.new] if validation else []
    before, parity = json.loads(invoke("compare", *words).stdout)["scores"]
    reached = json.loads(invoke("repair", *words, "--method", "parity", "-o", tmp_path / "fair.onnx").stdout)["reached"]
    for score, when in ((before, "before"), (parity, "after")):
        assert score["ks"] == pytest.approx(reached[f"ks_{when}"], abs=1e-6)
        assert score["mse"] == pytest.approx(reached[f"mse_{when}"], rel=1e-5)
