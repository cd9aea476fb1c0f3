import json

import numpy as np
import pandas as pd
import pytest

from esvdfair import ks_distance
from esvdfair.baselines import WassersteinBarycenter
from esvdfair.cli import compare
from esvdfair.cli._options import split_rows
from esvdfair.cli.compare import Method
from esvdfair.exceptions import InputError
from esvdfair.models.onnx import OnnxAdapter
from esvdfair.tables import Roles, TableBatches

ROLES = ["--sensitive", "sex", "--target", "income"]
NAMES = [
    "the original model", "transport", "parity", "exact", "paper", "barycenter", "barycenter, group predicted",
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
    before = scores["the original model"]
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
        raise InputError("no hidden layer for `method='exact'`")

    methods = [compare.methods()[0], Method("exact", "nothing", True, fail)]
    monkeypatch.setattr(compare, "methods", lambda: methods)
    result = invoke("compare", files.model, files.data, *ROLES)
    assert result.exit_code == 0
    assert "exact is not possible here: no hidden layer for --method exact" in result.stdout
    assert "MSE of female" in result.stdout


def test_groups_too_small_to_compare(files, refused, tmp_path):
    data = pd.read_csv(files.data).iloc[:80]
    data["sex"] = ["a"] * 45 + ["b"] * 35
    data.to_csv(tmp_path / "few.csv", index=False)
    said = refused("compare", files.model, tmp_path / "few.csv", *ROLES)
    assert "0 of 2 groups have 30 rows or more (--min-group-rows 30), but a comparison needs two" in said
    data["sex"] = ["a"] * 79 + ["b"]
    data.to_csv(tmp_path / "few.csv", index=False)
    said = refused("compare", files.model, tmp_path / "few.csv", *ROLES)
    assert "1 of 2 groups with 30 rows or more (--min-group-rows 30)" in said


def test_a_group_with_few_rows_to_judge_on_is_not_compared(files, invoke, tmp_path, monkeypatch):
    """Of its 40 rows ten judge: the distance to them would be noise, whatever the method."""
    without_scans(monkeypatch, *NAMES[1:5], *NAMES[6:])
    data = pd.read_csv(files.data)
    data.loc[data.index[-40:], "sex"] = "x"
    data.to_csv(tmp_path / "all.csv", index=False)
    words = ["compare", files.model, tmp_path / "all.csv", *ROLES]
    assert "Too small to compare: x (" in invoke(*words).stdout
    found = json.loads(invoke(*words, "--json").stdout)["scores"]
    assert list(found[0]["group_mse"]) == ["female", "male"]
    judge = split_rows(TableBatches(tmp_path / "all.csv", Roles(("sex",), "income")), None, 0)[1]
    large = judge.take(judge.groups["sex"] != "x")
    expected = ks_distance(OnnxAdapter(files.model).predict(large.X), sensitive_features=large.groups)
    assert found[0]["ks"] == pytest.approx(expected)


def test_the_split_is_by_rows_and_seed(files):
    rows = TableBatches(files.data, Roles(("sex",), "income"))
    fit, judge = split_rows(rows, None, 0)
    assert set(fit.X.index).isdisjoint(judge.X.index)
    assert len(fit) + len(judge) == 600
    assert 0.2 < len(judge) / 600 < 0.3
    again, other = (list(split_rows(rows, None, seed)[1].X.index) for seed in (0, 1))
    assert again == list(judge.X.index) != other


@pytest.mark.parametrize(
    "more",
    [[], ["--validation", "new"], ["--confidence", "0.8", "--test", "new"], ["--validation", "new", "--test", "test"]],
    ids=" ".join,
)
def test_the_same_words_give_what_repair_gives(files, invoke, tmp_path, monkeypatch, more):
    """Learnt from, chosen and judged on the same rows as `esvdfair repair`."""
    without_scans(monkeypatch, *set(NAMES) - {"the original model", "parity"})
    files.people(300, 8).to_parquet(tmp_path / "test")
    more = [{"new": files.new, "test": tmp_path / "test"}.get(word, word) for word in more]
    words = [files.model, files.data, *ROLES, "--target-ks", "0.3", "--quick", "--seed", 3, "--json", *more]
    before, parity = json.loads(invoke("compare", *words).stdout)["scores"]
    record = json.loads(invoke("repair", *words, "--method", "parity", "-o", tmp_path / "fair.onnx").stdout)
    reached = record["tested"] or record["reached"]
    for score, when in ((before, "before"), (parity, "after")):
        assert score["ks"] == pytest.approx(reached[f"ks_{when}"], abs=1e-6)
        assert score["mse"] == pytest.approx(reached[f"mse_{when}"], rel=1e-5)


def test_baselines_adjust_for_controls(files, invoke, tmp_path, monkeypatch):
    """The barycentre closes the gap between people of the same job, which it leaves open without --control."""
    data = files.people(3000, 4)
    data = data.assign(job=(data["age"] + data["school"] > 0.8).astype(int))
    data.to_csv(tmp_path / "jobs.csv", index=False)
    files.people(3000, 5).assign(job=lambda t: (t["age"] + t["school"] > 0.8).astype(int)).to_csv(
        tmp_path / "test.csv", index=False
    )
    without_scans(monkeypatch, *set(NAMES) - {"the original model", "barycenter"})
    words = ["compare", files.model, tmp_path / "jobs.csv", *ROLES, "--features", "age,hours,school", "--json"]
    found = json.loads(invoke(*words, "--control", "job", "--test", tmp_path / "test.csv").stdout)
    before, barycenter = found["scores"]
    assert before["ks"] > 2.5 * found["ks_floor"]
    assert barycenter["ks"] < 2 * found["ks_floor"]  # both the rows that fit it and those that judge it are samples
    monkeypatch.setattr(compare, "_learned", lambda rows: rows.beside)
    _, raw = json.loads(invoke(*words, "--control", "job", "--test", tmp_path / "test.csv").stdout)["scores"]
    assert barycenter["ks"] < 0.7 * raw["ks"]
