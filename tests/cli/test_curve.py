import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from esvdfair import Effort, fit_curve
from esvdfair.cli.curve import spread_out

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
    for said in (
        "held-out validation rows",
        "95% interval",
        "difference in means",
        "◉",
        "└───",
        "Noise level",
        "the point → meets it",
    ):
        assert said in result.stdout
    assert result.stdout.count("→") == 2  # the point, and the sentence about it
    assert written() == ["curve.svg"]
    assert picture.read_text().count("</svg>") == 1
    assert "exists. Use --force" in refused(*words)


def test_a_target_out_of_reach_gives_exit_code_1(files, invoke):
    result = invoke("curve", files.model, files.data, *ROLES, *EXACT, "--target-ks", "0")
    assert result.exit_code == 1
    assert "no point meets it; → comes closest" in result.stdout


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


@pytest.mark.parametrize("chosen", [None, 0, 57, 140, 199])
def test_about_a_dozen_points_at_even_steps_and_the_chosen_one(chosen):
    """However the points crowd at one end, each step of the estimated KS has the nearest of them."""
    estimates = np.sort(np.random.default_rng(0).random(200) ** 4)[::-1]
    points = [SimpleNamespace(index=i, ks_population=ks) for i, ks in enumerate(estimates)]
    shown = spread_out(points, None if chosen is None else points[chosen])
    assert {0, 199} <= {point.index for point in shown}
    assert chosen is None or chosen in {point.index for point in shown}
    assert 10 <= len(shown) <= 13
    assert shown == sorted(shown, key=lambda point: point.index)
    for step in np.linspace(estimates[0], estimates[-1], 12):
        assert np.abs(estimates - step).min() == min(abs(point.ks_population - step) for point in shown)
    assert spread_out(points[:3], None) == points[:3]


def test_all_points_on_request(files, invoke):
    words = ["curve", files.model, files.data, *ROLES, "--target-ks", "0.1"]
    points = json.loads(invoke(*words, "--json").stdout)["points"]
    some, every = (invoke(*words, *more).stdout for more in ([], ["--all"]))
    rows = [[line for line in text.split("mean squared error against")[0].splitlines() if "[" in line]
            for text in (some, every)]  # fmt: skip
    assert len(rows[1]) == len(points) > 20 > 13 >= len(rows[0])
    assert f"({len(rows[0])} are listed; --all lists all)" in " ".join(some.split())
    (chosen,) = [line for line in rows[1] if line.startswith("→")]
    assert chosen in rows[0]
