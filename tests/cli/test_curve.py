import json

import pandas as pd

from esvdfair import Effort, fit_curve

ROLES = ["--sensitive", "sex", "--target", "income"]
EXACT = ["--method", "exact", "--quick"]


def test_the_points_are_those_of_fit_curve(files, invoke):
    result = invoke("curve", files.model, files.data, *ROLES, *EXACT, "--validation", files.new, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    data, new = pd.read_csv(files.data), pd.read_parquet(files.new)
    features = ["age", "hours", "school"]
    curve = fit_curve(
        str(files.model),
        data[features],
        data["income"],
        sensitive_features=data["sex"],
        validation=(new[features], new["income"], new["sex"]),
        method="exact",
        effort=Effort.quick(),
    )
    assert [point["ks"] for point in found["points"]] == [point.ks for point in curve.points]
    assert found["ks_floor"] == curve.ks_floor
    assert found["evaluated_on"] == "validation"
    assert found["chosen"] is found["met"] is None


def test_a_table_a_plot_in_text_and_a_picture(files, invoke, refused, tmp_path, written):
    picture = tmp_path / "curve.svg"
    words = ["curve", files.model, files.data, *ROLES, *EXACT, "--target-ks", "0.9", "--plot", picture]
    result = invoke(*words)
    assert result.exit_code == 0
    for said in ("rows held out from the repair", "95% interval", "aims at", "◉", "└───", "Noise level", "met by →"):
        assert said in result.stdout
    assert result.stdout.count("→") == 2  # the point, and the sentence about it
    assert written() == ["curve.svg"]
    assert picture.read_text().count("</svg>") == 1
    assert "is there already" in refused(*words)


def test_a_target_out_of_reach_gives_exit_code_1(files, invoke):
    result = invoke("curve", files.model, files.data, *ROLES, *EXACT, "--target-ks", "0")
    assert result.exit_code == 1
    assert "not met; → comes closest" in result.stdout


def test_a_picture_of_an_unknown_kind_is_refused_before_any_work(files, refused, tmp_path):
    said = refused("curve", files.model, tmp_path / "none.csv", *ROLES, "--plot", tmp_path / "curve.doc")
    assert "must end in one of .png, .svg, .pdf" in said


def test_confidence_marks_only_what_is_certified(files, invoke):
    asked = ["--target-ks", "0.05", "--confidence", "0.9", "--method", "parity", "--json"]
    result = invoke("curve", files.model, files.data, *ROLES, "--quick", *asked)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["met"] is False
    assert all(point["ks_certified"] >= point["ks_upper"] > 0.05 for point in found["points"])
