import json

import numpy as np
import pandas as pd
import pytest

from esvdfair import group_mse, ks_distance, ks_distance_ci, ks_floor
from esvdfair.models.onnx import OnnxAdapter

SEX = ["--sensitive", "sex"]


def flat(text):
    return " ".join(text.split())


def test_the_numbers_are_those_of_the_library(files, invoke):
    result = invoke("audit", files.model, files.data, *SEX, "--target", "income", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    data = pd.read_csv(files.data)
    predicted = OnnxAdapter(files.model).predict(data[["age", "hours", "school"]])
    groups = {"sensitive_features": data["sex"]}
    assert found["ks"] == ks_distance(predicted, **groups) > 0.25
    assert tuple(found["ks_interval"]) == ks_distance_ci(predicted, **groups)
    assert found["ks_floor"] == ks_floor(**groups)
    assert {g["group"]: g["mse"] for g in found["groups"]} == pytest.approx(
        group_mse(data["income"], predicted, **groups)
    )
    assert found["rows"] == 600
    assert found["dropped"] == 0
    assert found["target_ks"] is found["met"] is None


def test_a_table_for_people(files, invoke):
    text = invoke("audit", files.model, files.data, *SEX, "--target", "income").stdout
    assert f"{files.model} on 600 rows of {files.data}" in flat(text)
    for words in ("mean prediction", "95% interval", "MSE", "KS distance", "noise level", "Wasserstein distance"):
        assert words in text
    lines = [line for line in text.splitlines() if line.startswith(("female", "male"))]
    assert len(lines) == 2
    assert len({len(line) for line in lines}) == 1  # columns stand under each other
    assert "Predictions differ between female and male: KS" in flat(text)
    assert "Error is similar across groups." in flat(text)


def test_predictions_from_a_column_and_two_attributes(files, invoke):
    words = ["audit", files.scores, "--predictions", "score", *SEX, "--sensitive", "region"]
    found = json.loads(invoke(*words, "--json").stdout)
    assert [g["group"] for g in found["groups"]] == ["female, north", "female, south", "male, north", "male, south"]
    assert found["mse"] is None
    assert "KS to the rest" in invoke(*words).stdout


@pytest.mark.parametrize(("target", "code", "word"), [("0.9", 0, "met"), ("0.05", 1, "not met")])
def test_a_target_decides_the_exit_code(files, invoke, target, code, word):
    result = invoke("audit", files.model, files.data, *SEX, "--features", "age,hours,school", "--target-ks", target)
    assert result.exit_code == code
    found = json.loads(
        invoke("audit", files.model, files.data, *SEX, "--features", "age,hours,school", "--json").stdout
    )
    estimate = f"estimated population KS {found['ks_population']:.3f}"
    assert result.stdout.endswith(f"Target KS ≤ {target}: {word} ({estimate}).\n")


def test_a_target_below_the_noise_level_that_the_estimate_keeps_cannot_be_told(invoke, tmp_path):
    """Scores of two groups that hardly differ, on so few rows that chance alone shows more than the target."""
    pd.DataFrame({"score": np.arange(100.0), "sex": np.resize(["f", "m"], 100)}).to_csv(
        tmp_path / "alike.csv", index=False
    )
    words = ["audit", tmp_path / "alike.csv", "--predictions", "score", *SEX, "--target-ks"]
    result = invoke(*words, 0.1)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.endswith("Target KS ≤ 0.1: cannot be decided (estimated population KS 0.000).\n")
    assert invoke(*words, 0.2).stdout.endswith("Target KS ≤ 0.2: met (estimated population KS 0.000).\n")


def test_features_choose_and_order_the_inputs(files, invoke):
    names = ["age", "hours", "school"]
    found = json.loads(
        invoke("audit", files.model, files.data, *SEX, "--features", ",".join(names[::-1]), "--json").stdout
    )
    data = pd.read_csv(files.data)
    swapped = OnnxAdapter(files.model).predict(data[names[::-1]].to_numpy())
    assert found["ks"] == ks_distance(swapped, sensitive_features=data["sex"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sensitive", "Sexx", "--target", "income"], "has no column 'Sexx'. Did you mean 'sex'?"),
        (["--sensitive", "sex", "--target", "incme"], "Did you mean 'income'?"),
        (["--sensitive", "sex"], "the model takes 3 columns and"),
        (["--sensitive", "sex"], "gives it 4: age, hours, school, income. Is 'income' the label? Add --target income"),
        (["--sensitive", "age", "--target", "sex"], "'sex' of"),
        (["--sensitive", "sex", "--features", "age,hours,sex"], "column 'sex' is not numeric"),
        (["--sensitive", "income", "--features", "age,hours,school"], "looks continuous"),
        (["--target", "income"], "Missing option '--sensitive'"),
        (
            ["--sensitive", "sex", "--predictions", "income"],
            "--predictions needs one file, a table, and no model; got 2 files",
        ),
        (["--sensitive", "sex", "--target", "income", "--output", "z"], "no output 'z'"),
    ],
)
def test_bad_columns(files, refused, words, said):
    assert said in refused("audit", files.model, files.data, *words)


def test_one_file_without_predictions(files, refused):
    assert "Add the model or the table that is missing (MODEL DATA)" in refused("audit", files.data, *SEX)


def test_bad_model_files(files, refused, tmp_path):
    whole = files.model.read_bytes()
    words = [files.data, *SEX, "--target", "income"]
    for size in (0, 1, 7, 50, len(whole) // 3, len(whole) // 2, len(whole) - 60, len(whole) - 1):
        (tmp_path / "cut.onnx").write_bytes(whole[:size])
        assert "cut.onnx" in refused("audit", tmp_path / "cut.onnx", *words)
    assert "there is no file" in refused("audit", tmp_path / "none.onnx", *words)
    assert "is a directory" in refused("audit", tmp_path, *words)
    assert "not an ONNX model" in refused("audit", files.data, *words)


def test_missing_values_are_counted_and_can_be_dropped(files, invoke, refused, tmp_path):
    data = pd.read_csv(files.data)
    data.loc[[3, 7], "age"] = np.nan
    data.loc[[7, 8, 9, 10], "sex"] = None
    path = tmp_path / "holes.csv"
    data.to_csv(path, index=False)
    words = ["audit", files.model, path, *SEX, "--target", "income"]
    said = refused(*words)
    assert "missing values in 5 of 600 rows ('sex' 4, 'age' 2)" in said
    assert "--drop-missing" in said
    assert "--missing-group" in said
    dropped = json.loads(invoke(*words, "--drop-missing", "--json").stdout)
    assert (dropped["rows"], dropped["dropped"]) == (595, 5)
    assert "(5 with missing values left out)" in flat(invoke(*words, "--drop-missing").stdout)
    grouped = json.loads(invoke(*words, "--drop-missing", "--missing-group", "--json").stdout)
    assert [(g["group"], g["rows"]) for g in grouped["groups"]][-1] == ("missing", 3)
    assert "'age' 2" in refused(*words, "--missing-group")


def test_labels_cannot_steer_the_terminal(files, invoke, tmp_path):
    data = pd.read_csv(files.scores)
    data["sex"] = data["sex"].replace("male", "\x1b[31mmale\n")
    data.to_csv(tmp_path / "odd.csv", index=False)
    text = invoke("audit", tmp_path / "odd.csv", "--predictions", "score", *SEX).stdout
    assert "\x1b" not in text
    assert "\\x1b[31mmale\\n" in text


def test_the_target_of_an_audit_is_not_aimed_at(invoke):
    shown = " ".join(invoke("audit", "--help").stdout.split())
    assert "Largest KS distance between groups that passes; above it the exit code is 1." in shown
    assert "aim at" not in shown


def test_compressed_tables_and_other_marks(files, invoke, tmp_path):
    plain = json.loads(invoke("audit", files.model, files.data, *SEX, "--target", "income", "--json").stdout)
    data = pd.read_csv(files.data)
    data.to_csv(tmp_path / "people.tsv.gz", sep="\t", index=False)
    data.to_csv(tmp_path / "people.txt", sep=":", index=False)
    for name, more in (("people.tsv.gz", []), ("people.txt", ["--sep", ":"]), ("people.tsv.gz", ["--sep", "tab"])):
        words = ["audit", files.model, tmp_path / name, *SEX, "--target", "income", *more, "--json"]
        assert json.loads(invoke(*words).stdout)["ks"] == plain["ks"]


def test_a_group_of_one_is_named_by_its_label(files, invoke, refused, tmp_path):
    data = pd.read_csv(files.data)
    data.loc[0, "sex"] = "neither"
    data.to_csv(tmp_path / "one.csv", index=False)
    words = ["audit", files.model, tmp_path / "one.csv", *SEX, "--target", "income"]
    assert "Too small to compare: neither (1 row)." in flat(invoke(*words).stdout)
    data.loc[20:, "sex"] = "male"
    data.to_csv(tmp_path / "one.csv", index=False)
    said = refused(*words)
    assert "1 of 3 groups have 30 rows or more (--min-group-rows 30), but a comparison needs two" in said


def test_small_groups(files, invoke, tmp_path):
    data = pd.read_csv(files.data)
    data.loc[:2, "sex"] = "x"
    data.loc[3:5, "sex"] = "z"
    data.to_csv(tmp_path / "few.csv", index=False)
    words = ["audit", files.model, tmp_path / "few.csv", *SEX, "--target", "income", "--min-group-rows", 5, "--json"]
    result = invoke(*words)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["rows"], found["groups_set_aside"]) == (600, {"x": 3, "z": 3})
    assert [pair["groups"] for pair in found["pairs"]] == [["female", "male"]]
    predicted = OnnxAdapter(files.model).predict(data[["age", "hours", "school"]])
    assert found["mse"] == pytest.approx(np.mean((predicted - data["income"]) ** 2))  # of their rows too
    large = data["sex"].isin(["female", "male"])
    assert found["ks"] == ks_distance(predicted[large], sensitive_features=data["sex"][large])
    assert "Too small to compare: x (3 rows), z (3 rows)." in flat(invoke(*words[:-1]).stdout)
    other = invoke(*words, "--other")
    assert "note: 6 rows of" in other.stderr
    assert "became the group 'other', as their groups have fewer than 5: 'x' 3, 'z' 3." in other.stderr
    joined = json.loads(other.stdout)
    assert [(g["group"], g["rows"]) for g in joined["groups"]][-1] == ("other", 6)
    assert joined["groups_set_aside"] == {}
