"""`summarise` in parts, `repair --summary`: the repair of all rows, whoever summarised them."""

import json

import numpy as np
import onnx
import pandas as pd
import pytest

from esvdfair import Summary
from esvdfair.models.onnx import OnnxAdapter

ROLES = ["--sensitive", "sex", "--target", "income"]
FEATURES = ["--features", "age,hours,school"]


@pytest.fixture
def parts(files, invoke, tmp_path):
    """Summaries of four parts of the data by row ids, of which one has few rows of two groups, and one has none."""
    data = pd.read_csv(files.data).assign(person=np.arange(600))
    for i, part in enumerate([data[:350], data[350:353], data[353:], data[:0]]):
        part.to_parquet(tmp_path / f"part-{i}.parquet")
        words = [tmp_path / f"part-{i}.parquet", *ROLES, "--row-id", "person", "-o", tmp_path / f"part-{i}.summary"]
        assert invoke("summarise", files.model, *words).exit_code == 0
    return tmp_path / "part-*.summary"


def test_summaries_of_parts_give_the_repair_of_all_rows(files, parts, invoke, tmp_path):
    words = ["--target-ks", 0.15, "--quick"]
    whole = invoke("repair", files.model, files.data, *ROLES, *words, "-o", tmp_path / "whole.onnx")
    result = invoke("repair", files.model, "--summary", parts, *words, "-o", tmp_path / "fair.onnx")
    assert (result.exit_code, result.stderr) == (whole.exit_code, whole.stderr)
    assert result.stdout == whole.stdout.replace("whole.onnx", "fair.onnx")
    x = pd.read_parquet(files.new)[["age", "hours", "school"]]
    one, other = (OnnxAdapter(tmp_path / name).predict(x) for name in ("whole.onnx", "fair.onnx"))
    assert np.abs(one - other).max() <= 1e-6 * one.std()
    record = json.loads((tmp_path / "fair.onnx.json").read_text())["data"]
    assert record["rows"] == 600
    assert record["features"] == ["age", "hours", "school"]
    assert len(record["summaries"]) == 4


def test_the_default_part_tells_files_apart_and_refuses_the_same_file_twice(files, invoke, refused, tmp_path):
    for name in ("a", "b"):
        files.people(300, ord(name)).to_csv(tmp_path / f"{name}.csv", index=False)
    for out, path in (("a", "a"), ("b", "b"), ("again", "a")):
        result = invoke(
            "summarise", files.model, tmp_path / f"{path}.csv", *ROLES, "-o", tmp_path / f"{out}.summary", "--json"
        )
        assert json.loads(result.stdout)["rows"] == 300
    words = ["repair", files.model, "--quick", "-o", tmp_path / "fair.onnx"]
    assert "--part" in refused(*words, "--summary", tmp_path / "*.summary")
    result = invoke(*words, "--summary", tmp_path / "a.summary", "--summary", tmp_path / "b.summary", "--json")
    assert json.loads(result.stdout)["data"]["rows"] == 600
    again = ["summarise", files.model, tmp_path / "a.csv", *ROLES, "--part", "2", "-o", tmp_path / "a.summary"]
    assert "--force" in refused(*again)
    assert invoke(*again, "--force").exit_code == 0
    assert len(Summary.load(tmp_path / "a.summary").kept) == 300


def test_what_a_summary_contains(files, parts, invoke, tmp_path):
    result = invoke("show", parts)
    assert "part-1.summary: 3 rows\n" in result.stdout
    assert "part-3.summary: 0 rows\n" in result.stdout
    assert "Contains 600 of these rows (inputs of the last layer, predictions, labels, groups)" in result.stdout
    assert " ".join(result.stdout.split()).count("treat it as the data") == 4
    sizes = pd.read_csv(files.data)["sex"].value_counts()
    found = json.loads(invoke("show", tmp_path / "part-0.summary", "--json").stdout)
    assert found[0]["columns"] == ["age", "hours", "school"]
    assert found[0]["contains_rows"] == sum(found[0]["group_rows"].values()) == 350
    for group, rows in sizes.items():
        assert f"{group}  {rows}".replace(" ", "") in result.stdout.split("sum:")[1].replace(" ", "")


def test_a_bounded_summary_represents_all_rows(files, invoke, tmp_path):
    words = ["summarise", files.model, files.data, *ROLES, "-o", tmp_path / "few.summary", "--rows", 200, "--json"]
    found = json.loads(invoke(*words).stdout)
    assert (found["rows"], found["contains_rows"]) == (600, 200)
    kept = Summary.load(tmp_path / "few.summary").kept
    assert np.bincount(kept.codes).tolist() == [100, 100]  # as many of each group


def test_rows_bounds_what_a_repair_keeps(files, invoke, tmp_path):
    words = [
        "repair",
        files.model,
        files.data,
        *ROLES,
        "--quick",
        "--json",
        "--rows",
        400,
        "-o",
        tmp_path / "fair.onnx",
    ]
    found = json.loads(invoke(*words).stdout)
    assert found["data"]["rows"] == 600
    assert found["parameters"]["effort"]["rows"] == 400
    assert found["reached"]["rows"] < 120  # a quarter of the rows that are kept


def test_a_report_of_summaries_is_about_the_test_rows(files, parts, invoke, refused, tmp_path):
    page, card = tmp_path / "page.html", tmp_path / "card.md"
    words = ["repair", files.model, "--summary", parts, "--quick", "-o", tmp_path / "fair.onnx", "--report", page]
    assert "add --test FILE" in refused(*words)
    assert "Missing option '--sensitive'" in refused(*words, "--test", files.new)
    more = ["--test", files.new, *ROLES, "--cutoff", 0, "--model-card", card]
    result = invoke(*words, *more)
    assert result.exit_code == 0
    assert "evaluated on 400 rows" in " ".join(result.stdout.split())
    assert "4 summaries" in page.read_text()
    assert "4 summaries, 600 rows" in card.read_text()


def test_validation_rows_beside_summaries(files, parts, invoke, tmp_path):
    words = ["--quick", "--json", "--validation", files.new, *ROLES, "-o"]
    found = json.loads(invoke("repair", files.model, "--summary", parts, *words, tmp_path / "a.onnx").stdout)
    expected = json.loads(invoke("repair", files.model, files.data, *words, tmp_path / "b.onnx").stdout)
    assert found["reached"]["rows"] == 400
    assert found["reached"]["mse_after"] == pytest.approx(expected["reached"]["mse_after"], rel=1e-6)


def test_a_directory_of_parquet_files_is_one_table(files, invoke, tmp_path):
    data = pd.read_csv(files.data)
    for sex, rows in data.groupby("sex"):
        (tmp_path / "people" / f"sex={sex}").mkdir(parents=True)
        rows.drop(columns="sex").to_parquet(tmp_path / "people" / f"sex={sex}" / "0.parquet")
    words = ["repair", files.model, tmp_path / "people", *ROLES, *FEATURES, "--quick", "-o", tmp_path / "fair.onnx"]
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["data"]["rows"] == 600
    onnx.load(tmp_path / "fair.onnx")


def test_wrong_calls(files, parts, refused, tmp_path):
    out = ["-o", tmp_path / "fair.onnx"]
    assert "pass DATA" in refused("repair", files.model, *out)
    assert "quotation marks" in refused("repair", files.model, files.data, "--summary", parts, *out)
    assert "no file matches" in refused("show", tmp_path / "none-*.summary")
    assert "is not a summary file" in refused("show", files.data)
    assert "different models" not in refused("repair", files.model, "--summary", parts, "--method", "exact", *out)
    other = tmp_path / "other.onnx"
    model = onnx.load(files.model)
    model.graph.initializer[0].raw_data = np.frombuffer(model.graph.initializer[0].raw_data, "f4").tobytes()[::-1]
    onnx.save(model, other)
    assert "another model" in refused("repair", other, "--summary", parts, *out)
    words = ["summarise", files.model, files.data, *ROLES, "--row-id", "income", "-o", tmp_path / "x.summary"]
    assert "one role" in refused(*words)
