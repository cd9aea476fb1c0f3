"""Models of trees in files of LightGBM, XGBoost and CatBoost: their inputs are found by name."""

import json

import numpy as np
import pandas as pd
import pytest

lightgbm = pytest.importorskip("lightgbm", reason="needs the extra esvdfair[lightgbm]")
xgboost = pytest.importorskip("xgboost", reason="needs the extra esvdfair[xgboost]")
catboost = pytest.importorskip("catboost", reason="needs the extra esvdfair[catboost]")

SEX = ["--sensitive", "sex"]
INPUTS = ["age", "hours a week", "school"]


@pytest.fixture(scope="module")
def trees(files, tmp_path_factory):
    """`save(name, named)` trains and saves a model on `people.csv`, with or without names of columns."""
    folder = tmp_path_factory.mktemp("trees")
    table = files.people(800, 4).rename(columns={"hours": "hours a week"})
    table.to_csv(folder / "people.csv", index=False)

    def save(name, named=True):
        X = table[INPUTS] if named else table[INPUTS].to_numpy()
        if name == "model.txt":
            model = lightgbm.LGBMRegressor(n_estimators=20, verbose=-1, n_jobs=1).fit(X, table["income"]).booster_
        elif name == "model.cbm":
            model = catboost.CatBoostRegressor(iterations=20, verbose=False, allow_writing_files=False, thread_count=1)
            model.fit(X, table["income"])
        else:
            model = xgboost.XGBRegressor(n_estimators=20, n_jobs=1).fit(X, table["income"])
        model.save_model(folder / name)
        return folder / name, table, model

    return save


@pytest.mark.parametrize("name", ["model.txt", "model.json", "model.ubj", "model.cbm"])
def test_inputs_are_found_by_name_in_any_order_beside_other_columns(name, trees, invoke, tmp_path):
    path, table, model = trees(name)
    mixed = table.assign(id=np.arange(len(table)))[["school", "id", "income", "sex", "hours a week", "age"]]
    mixed.to_csv(tmp_path / "mixed.csv", index=False)
    result = invoke("audit", path, tmp_path / "mixed.csv", *SEX, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = xgboost.DMatrix(table[INPUTS]) if isinstance(model, xgboost.Booster) else table[INPUTS]
    means = pd.Series(model.predict(data)).groupby(table["sex"]).mean()
    found = {group["group"]: group["mean"] for group in json.loads(result.stdout)["groups"]}
    assert found == pytest.approx(means.to_dict(), abs=1e-5)


@pytest.mark.parametrize("name", ["model.txt", "model.json", "model.cbm"])
def test_models_that_know_no_names_take_columns_in_order(name, trees, invoke, tmp_path):
    path, table, model = trees(name, named=False)
    table[["sex", *INPUTS]].to_csv(tmp_path / "people.csv", index=False)
    result = invoke("audit", path, tmp_path / "people.csv", *SEX, "--json")
    means = pd.Series(model.predict(table[INPUTS].to_numpy())).groupby(table["sex"]).mean()
    found = {group["group"]: group["mean"] for group in json.loads(result.stdout)["groups"]}
    assert found == pytest.approx(means.to_dict(), abs=1e-5)


def test_an_input_that_the_table_lacks(trees, refused, tmp_path):
    path, table, _ = trees("model.txt")
    table.drop(columns="school").to_csv(tmp_path / "few.csv", index=False)
    said = refused("audit", path, tmp_path / "few.csv", *SEX)
    assert "has no column 'school', which the model takes. Name the columns that are its inputs" in said


@pytest.mark.parametrize("name", ["model.txt", "model.json", "model.ubj", "model.cbm"])
def test_columns_and_trees_are_explained_and_whose_predictions_change(name, trees, invoke, tmp_path):
    path, _, _ = trees(name)
    data, out = path.parent / "people.csv", tmp_path / f"fair{path.suffix}"
    words = [data, *SEX, "--target", "income"]
    done = invoke("repair", path, *words, "--target-ks", 0.2, "--quick", "-o", out)
    assert done.exit_code in (0, 1), done.stderr
    found = json.loads(invoke("explain", path, *words, "--repaired", out, "--json").stdout)
    gap = found["mean_gap"]
    assert sum(part for _, part in found["columns"]) == pytest.approx(gap)
    assert sum(found["trees"]) == pytest.approx(gap)
    assert {name for name, _ in found["columns"]} <= {*INPUTS, "hours_a_week"}
    before = {group["group"]: group["mean_before"] for group in found["people"]["groups"]}
    assert abs(before["male"] - before["female"]) == pytest.approx(gap, rel=1e-4)
    shown = invoke("explain", path, *words, "--repaired", out, "--top", 2).stdout
    for said in ("male − female", "column", "The 2 of 20 trees with the largest part", "Predictions that change"):
        assert said in shown


def test_trees_have_no_layers(trees, refused):
    path, _, _ = trees("model.txt")
    said = refused("explain", path, path.parent / "people.csv", *SEX, "--target", "income", "--layer", 1)
    assert "is a tree ensemble and has no layers. Leave out --layer." in said
