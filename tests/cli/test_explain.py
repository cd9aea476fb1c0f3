import json

import numpy as np
import pandas as pd
import pytest

from esvdfair.models.onnx import OnnxAdapter, save_model

ROLES = ["--sensitive", "sex", "--target", "income"]


@pytest.fixture(scope="module")
def repaired(files):
    """The model with half of its last layer."""
    adapter = OnnxAdapter(files.model)
    last = adapter.layers()[-1]
    path = files.folder / "half.onnx"
    save_model(adapter.replace({last.name: (last.weight / 2, last.bias)}).model, path)
    return path


def test_layers_and_directions_for_people(files, invoke):
    result = invoke("explain", files.model, files.data, *ROLES)
    assert (result.exit_code, result.stderr) == (0, "")
    for said in (
        "hidden",
        "3 → 8",
        "8 → 1",
        "KS if edited",
        "Directions of layer hidden along which the groups differ",
    ):
        assert said in result.stdout
    assert "Predictions that change" not in result.stdout


def test_json_holds_all_parts(files, invoke, repaired):
    result = invoke("explain", files.model, files.data, *ROLES, "--layer", "-1", "--repaired", repaired, "--json")
    found = json.loads(result.stdout)
    assert [layer["name"] for layer in found["layers"]["layers"]] == ["hidden", "last"]
    assert found["directions"]["layer"] == "last"
    assert found["directions"]["mean"][0]["share"] == pytest.approx(1)
    assert [group["group"] for group in found["people"]["groups"]] == ["female", "male"]
    assert len(found["people"]["movers"]) == 5


def test_movers_are_rows_of_the_file(files, invoke, repaired, tmp_path):
    data = pd.read_csv(files.data)
    data.loc[:99, "age"] = np.nan
    data.to_csv(tmp_path / "holes.csv", index=False)
    words = [
        "explain",
        files.model,
        tmp_path / "holes.csv",
        *ROLES,
        "--drop-missing",
        "--repaired",
        repaired,
        "--top",
        1,
    ]
    (mover,) = json.loads(invoke(*words, "--json").stdout)["people"]["movers"]
    person = data.loc[[mover["row"]], ["age", "hours", "school"]]
    assert OnnxAdapter(files.model).predict(person)[0] == pytest.approx(mover["before"], rel=1e-5)
    text = invoke(*words).stdout
    assert "Predictions that change" in text
    assert f"\n{mover['row'] + 1} " in text


def test_directions_of_chance_are_shown_as_such(files, invoke, tmp_path):
    """Two halves of the rows agree on the direction of the means, not on what little the spreads differ."""
    data = files.people(600, 4)
    data.to_csv(tmp_path / "few.csv", index=False)
    text = invoke("explain", files.model, tmp_path / "few.csv", *ROLES).stdout
    means, spreads = text.split("Directions of layer")[1].split("\n\n")[1:3]
    assert "share of gap" in means
    assert "not the same in two halves" not in means
    assert "not the same in two halves of the rows (|cos| 0." in spreads


def test_a_layer_that_is_not_there(files, refused):
    assert "'lost'" in refused("explain", files.model, files.data, *ROLES, "--layer", "lost")


def test_gaps_of_layers_and_directions_are_adjusted_for_controls(files, invoke, tmp_path):
    data = pd.read_csv(files.data)
    data.assign(job=data["age"] > 0.4).to_csv(tmp_path / "jobs.csv", index=False)
    words = ["explain", files.model, tmp_path / "jobs.csv", *ROLES, "--features", "age,hours,school", "--json"]
    raw, adjusted = (json.loads(invoke(*words, *more).stdout) for more in ([], ["--control", "job"]))
    for gap in (lambda found: found["layers"]["ks_before"], lambda found: found["directions"]["mean_gap_before"]):
        assert gap(adjusted) < 0.9 * gap(raw)
