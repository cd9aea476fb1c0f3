import copy
import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression

from esvdfair import ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.batches import held_out
from esvdfair.problem import Effort
from esvdfair.report import render_report, write_report
from esvdfair.report.page import make_environment
from esvdfair.text import number, verdict

VOID = {"meta", "input", "br", "img"}
SECTIONS = [
    "cards", "next", "compared", "decisions", "people", "distributions", "features", "caveats", "engineers", "origin",
]  # fmt: skip
CHARTS = [
    "density-before", "density-step", "tradeoff", "cdf-before", "cdf-after", "spectrum", "layers", "changes",
    "ratios",
]  # fmt: skip


class Outline(HTMLParser):
    """Tags with their attributes, all text outside scripts and styles, and whether the tags nest."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(page)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def by_id(self, name):
        return next(attributes for _, attributes in self.tags if attributes.get("id") == name)


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page)


def chart_numbers(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_tags_nest_and_every_part_is_there(outline):
    assert outline.open == []
    assert [a["id"] for tag, a in outline.tags if tag == "section"] == SECTIONS


def test_every_chart_has_a_text_alternative(outline):
    found = [a for _, a in outline.tags if a.get("class") == "chart"]
    assert sorted(a["id"] for a in found) == sorted(CHARTS)
    assert all(a["role"] == "img" and len(a["aria-label"]) > 30 for a in found)


def test_small_and_without_anything_from_elsewhere(page):
    assert len(page.encode()) < 300_000
    outside = re.findall(
        r"(?:https?:)?//[a-z][^\s\"'<]*", page.replace("http://www.w3.org/2000/svg", ""), re.IGNORECASE
    )
    assert [found for found in outside if "." in found and not found.startswith("// ")] == []
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|innerHTML|\beval\(", page)
    assert not {tag for tag, _ in Outline(page).tags} & {"link", "img", "iframe", "object", "embed", "b", "i"}


def test_names_are_shown_and_not_run(outline):
    policy = next(a["content"] for tag, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert [a.get("type") for tag, a in outline.tags if tag == "script"] == ["application/json", None]
    assert not [a for _, a in outline.tags if any(name.startswith("on") for name in a)]
    for name in ("<script>document.title='run'</script>", "</script><!--", "\"q\" onload='z'", "<b>sex</b>", "b & c"):
        assert name in outline.text
    assert "</pre><script>" in outline.text  # the command, quoted for a shell
    assert "'a b.csv'" in outline.text


def test_headline_numbers_are_those_of_the_summary(outline, fair):
    s = fair.summary_
    lead = outline.text.split("How predictions are distributed")[0]  # the rows that judged are among those given
    assert f"measured on {s['rows']:,} held-out validation rows." in outline.text
    assert verdict(s).headline in lead
    assert ("meets the target of 0.16" if s["met"] else "does not meet the target of 0.16") in lead
    low, high = s["ks_interval"]
    assert f"Parity {s['ks_population']:.3f} estimated population KS, chosen model; target 0.16" in lead
    assert f"95% interval {low:.3f} to {high:.3f}." in lead
    assert f"Measured KS distance {s['ks_before']:.3f} → {s['ks_after']:.3f}; noise level {s['ks_floor']:.3f}" in lead
    for figure in ("mse_before", "mse_after"):
        assert number(s[figure]) in lead
    explained = f"(R² {s['r2_before']:.3f} to {s['r2_after']:.3f})"
    assert f"explains more of the variance than before {explained}" in lead
    assert f"Accuracy {s['r2_before']:.3f} → {s['r2_after']:.3f} R²" in lead


def test_the_slider_covers_the_curve_and_starts_at_the_chosen_model(case, fair, page, outline):
    numbers = chart_numbers(page)
    slider = outline.by_id("slider")
    made = [(p.mse, p.ks) for p in fair.curve_.points if p.target != "untouched"]
    unbeaten = {(m, k) for m, k in made if not any(a <= m and b <= k and (a, b) != (m, k) for a, b in made)}
    assert int(slider["max"]) == len(numbers["steps"]) - 1 == len(unbeaten) > 1
    assert int(slider["value"]) == numbers["chosen"]
    chosen = numbers["steps"][numbers["chosen"]]
    assert chosen["ks"] == pytest.approx(fair.summary_["ks_after"], rel=1e-3)
    assert chosen["mse"] == pytest.approx(fair.summary_["mse_after"], rel=1e-3)
    # what is drawn there are the predictions of the repaired model for the rows that judged it
    held = held_out(0.25, 0)(np.arange(600))
    means = [fair.predict(case.X[held])[case.groups[held] == name].mean() for name in sorted(set(case.groups))]
    np.testing.assert_allclose(chosen["means"], means, rtol=1e-3)
    assert chosen["densities"] != numbers["steps"][0]["densities"]
    drawn = [s["ks"] for s in numbers["steps"][1:]]
    assert len(drawn) + len(numbers["others"]) == len(fair.curve_)
    assert drawn[0] > drawn[-1]


def test_one_before_everywhere(case, fair, page, outline):
    """Charts, slider, layers and headline are about the same rows."""
    numbers, s = chart_numbers(page), fair.summary_
    assert numbers["cdf"]["before"]["high"] - numbers["cdf"]["before"]["low"] == pytest.approx(s["ks_before"])
    assert numbers["cdf"]["after"]["high"] - numbers["cdf"]["after"]["low"] == pytest.approx(s["ks_after"])
    assert numbers["layersBefore"] == pytest.approx(s["ks_before"])
    assert numbers["steps"][0]["ks"] == pytest.approx(s["ks_before"], rel=1e-3)
    cells = [number(value) for label in s["group_mse_after"] for value in (s["group_mse_after"][label],)]
    assert numbers["steps"][numbers["chosen"]]["cells"][2::3] == cells


def test_test_rows_make_the_page(case, fair):
    test = case.X[400:], case.y[400:], case.groups[400:]
    page = render_report(fair, case.X[:400], case.y[:400], sensitive_features=case.groups[:400], test=test)
    outline, numbers = Outline(page), chart_numbers(page)
    assert "measured on 200 rows of test data" in outline.text
    assert f"chosen on {fair.summary_['rows']} held-out validation rows" in outline.text
    for when, predicted in (("before", case.model.predict(test[0])), ("after", fair.predict(test[0]))):
        expected = ks_distance(predicted, sensitive_features=test[2])
        assert numbers["cdf"][when]["high"] - numbers["cdf"][when]["low"] == pytest.approx(expected)
    assert numbers["layersBefore"] == pytest.approx(
        ks_distance(case.model.predict(test[0]), sensitive_features=test[2])
    )
    assert numbers["others"] == []  # these points were judged on other rows
    given = render_report(fair, *test[:2], sensitive_features=test[2])
    assert "rows given here; if some of them are training rows" in given


def test_the_page_opens_with_what_it_is_about(case, fair):
    shown = Outline(
        render_report(
            fair, case.X, case.y, sensitive_features=case.groups, model="<i>m.onnx", data="people.csv",
            predicts="income", unit="EUR a year",
        )
    ).text  # fmt: skip
    opening = shown.split("How predictions are distributed")[0]
    for said in ("<i>m.onnx", "people.csv", "income, in EUR a year", "b & c ("):
        assert said in opening
    unnamed = Outline(render_report(fair, case.X, case.y, sensitive_features=case.groups)).text
    assert "Model MLPRegressor Data 600 rows of 4 inputs" in unnamed
    assert "a number that nobody named" in unnamed


def test_people_are_numbered_as_in_their_file(case, fair):
    index = np.arange(600) * 10 + 7
    page = render_report(fair, case.X.set_index(index), case.y, sensitive_features=case.groups)
    rows = re.findall(r'<th scope="row">(\d+)</th><td class="text"', page)
    held = held_out(0.25, 0)(np.arange(600))
    change = np.abs(fair.predict(case.X[held]) - case.model.predict(case.X[held]))
    assert int(rows[0]) == index[held][change.argmax()]


@pytest.mark.filterwarnings("ignore:The repaired model is worse than the original")
def test_weights_count_as_people(case):
    weight = np.random.default_rng(1).integers(0, 3, 600)
    fair = ESVDFair(case.model, method="parity", effort=Effort.quick()).fit(
        case.X, case.y, sensitive_features=case.groups, sample_weight=weight
    )
    page = render_report(fair, case.X, case.y, sensitive_features=case.groups, sample_weight=weight)
    numbers, times = chart_numbers(page), np.repeat(np.arange(600), weight * held_out(0.25, 0)(np.arange(600)))
    expected = ks_distance(fair.predict(case.X.iloc[times]), sensitive_features=case.groups.iloc[times])
    assert numbers["cdf"]["after"]["high"] - numbers["cdf"]["after"]["low"] == pytest.approx(expected)
    again = case.groups.iloc[times]
    means = [fair.predict(case.X.iloc[times])[again == name].mean() for name in sorted(set(again))]
    np.testing.assert_allclose(numbers["steps"][numbers["chosen"]]["means"], means, rtol=1e-3)


def test_nothing_is_rounding_noise(case):
    """Full parity of the means leaves 1e-16; the page says 0."""
    fair = ESVDFair(case.model, method="parity", validation_fraction=0.0, effort=Effort.quick())
    fair.fit(case.X, case.y, sensitive_features=case.groups)
    page = render_report(fair, case.X, case.y, sensitive_features=case.groups)
    assert fair.summary_["mean_gap_after"] < 1e-9
    assert not re.search(r"\de-1\d", Outline(page).text)
    assert "training rows, so results on new data" in page


def test_a_hidden_edit_shows_its_own_layer_and_a_refit_says_that_it_left_it(case, page):
    fair = case.repaired(method="exact", effort=Effort.quick())
    edited = render_report(fair, case.X, case.y, sensitive_features=case.groups)
    assert "The repair edited this layer" in edited
    assert chart_numbers(edited)["spectrum"]["afterName"] == "after"
    assert "refitted the last layer only" in page
    spectrum = chart_numbers(page)["spectrum"]
    assert spectrum["afterName"] == "if edited"
    assert sum(spectrum["after"]) < sum(spectrum["before"])


def test_without_labels_errors_are_changes(case):
    fair = ESVDFair(case.model, method="parity", effort=Effort.quick()).fit(case.X, sensitive_features=case.groups)
    shown = Outline(render_report(fair, case.X, sensitive_features=case.groups)).text
    assert "root mean square" in shown
    assert "There were no labels" in shown


def test_what_it_refuses(case, fair):
    with pytest.raises(NotFittedError):
        render_report(ESVDFair(case.model), case.X, case.y, sensitive_features=case.groups)
    with pytest.raises(ValueError, match="fewer than two groups"):
        render_report(fair, case.X, case.y, sensitive_features=["a"] * 600)
    with pytest.raises(ValueError, match=r"fewer than two groups of 30 rows or more \(`min_group_rows=30`\)"):
        render_report(fair, case.X, case.y, sensitive_features=["a"] * 599 + ["b"])
    with pytest.raises(ValueError, match="X has no rows"):
        render_report(fair, case.X[:0], case.y[:0], sensitive_features=[])
    with pytest.raises(ValueError, match="in memory"):
        render_report(fair, iter([case.X]), sensitive_features=case.groups)


def test_written_whole_or_not_at_all(case, fair, page, tmp_path, monkeypatch):
    place = tmp_path / "report.html"
    place.write_text("old")
    beside = {"sensitive_features": case.groups}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            write_report(place, fair, case.X, case.y, **beside)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert place.read_text() == "old"
    write_report(place, fair, case.X, case.y, title="Jürgen \ud800", **beside)
    assert place.read_bytes().decode("utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_torch_model_of_one_layer_and_ten_groups():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    groups = np.arange(2400) % 10
    X = torch.as_tensor(rng.normal(size=(2400, 3)) + 0.1 * groups[:, None], dtype=torch.float32)
    torch.manual_seed(0)
    fair = ESVDFair(torch.nn.Linear(3, 1), method="parity", effort=Effort.quick())
    with pytest.warns(ESVDFairWarning, match="the same number for everybody"):  # three features cannot serve ten groups
        fair.fit(X, sensitive_features=groups)
    page = render_report(fair, X, sensitive_features=groups)
    assert len(chart_numbers(page)["groups"]) == 8
    assert set(chart_numbers(page)["groups"]) < {f"group {i}" for i in range(10)}
    assert "no layer before its last one" in page
    assert "spectrum" not in chart_numbers(page)
    assert "Drawn are the 8 largest groups; the tables contain all 10." in page


def test_json_in_a_script_cannot_leave_it():
    hostile = "</script><!--<script>&\u2028\u2029\ud800"
    template = make_environment().from_string("{{ value | tojson }}")
    written = template.render(value={"a": hostile})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"a": hostile}
    with pytest.raises(ValueError, match="JSON"):
        template.render(value=[float("nan")])


@pytest.fixture(scope="module")
def many():
    """A model with enough rows that targets can be told apart."""
    rng = np.random.default_rng(5)
    groups = np.arange(4000) % 2
    X = rng.normal(size=(4000, 4)) + np.outer(groups, [0.8, 0, 0, 0.3])
    y = X.sum(axis=1) + rng.normal(size=4000)
    fair = ESVDFair(LinearRegression().fit(X, y), target_ks=0.2, effort=Effort.quick())
    return fair.fit(X, y, sensitive_features=groups), X, y, groups


def test_every_point_comes_with_the_command_and_the_line_that_make_it(many):
    fair, X, y, groups = many
    command = ["repair", "m.onnx", "--max-mse-increase", "0.1", "--target-ks=0.16", "-o", "f.onnx"]
    numbers = chart_numbers(render_report(fair, X, y, sensitive_features=groups, command=command))
    steps, held, again = numbers["steps"], held_out(0.25, 0)(np.arange(4000)), 0
    assert [s["ks"] for s in steps[1:]] == sorted((s["ks"] for s in steps[1:]), reverse=True)
    assert (steps[0]["python"], steps[0]["command"]) == ("model = fair.model_", None)
    assert steps[numbers["chosen"]]["command"] == " ".join(["esvdfair", *command])
    for i, step in enumerate(steps):
        made = {"fair": fair}
        exec(step["python"], made)
        assert np.mean((made["model"].predict(X[held]) - y[held]) ** 2) == pytest.approx(step["mse"], rel=1e-4)
        if step["dominated"]:  # figures are rounded
            assert any(s["ks"] <= step["ks"] and s["mse"] <= step["mse"] and s is not step for s in steps)
        else:
            assert not any(s["ks"] < step["ks"] and s["mse"] < step["mse"] for s in steps)
        if step["command"] and i != numbers["chosen"]:
            *words, target = step["command"].split()
            assert words == ["esvdfair", "repair", "m.onnx", "-o", "f.onnx", "--target-ks"]
            point = fair.curve_.select(target_ks=float(target))
            assert step["python"] == f"model = fair.curve_.model({point.index})"
            again += 1
    assert again > 2


def test_a_model_that_meets_the_target_already_is_kept(case, fair):
    kept = copy.copy(fair)
    kept.point_, kept.estimator_ = fair.curve_.original, fair.model_
    same = {f"{name}_after": fair.summary_[f"{name}_before"] for name in ("mse", "ks", "r2")}
    kept.summary_ = fair.summary_ | same | {"met": True, "target_ks": 0.9}
    page = render_report(kept, case.X, case.y, sensitive_features=case.groups)
    assert chart_numbers(page)["chosen"] == 0
    assert "Keep the original model: its estimated population KS of" in Outline(page).text


def test_the_refit_without_parity_stands_beside_before_and_after(fair, page, outline):
    refit = fair.summary_["mse_refit"]
    assert chart_numbers(page)["refit"] == pytest.approx(refit)
    assert f"refit without fairness constraint {number(refit)}" in outline.text


@pytest.mark.parametrize("met", [True, False])
def test_whether_the_target_is_met_is_what_the_summary_says(case, fair, met):
    """On rows that judged, nothing is decided again; the KS distance there may lie above the target by sampling."""
    told = copy.copy(fair)
    told.summary_ = fair.summary_ | {"met": met, "target_ks": fair.summary_["ks_after"] * 0.99}
    rows = case.X, case.y, case.groups
    shown = Outline(render_report(told, *rows[:2], sensitive_features=case.groups, judged=rows)).text
    assert verdict(told.summary_).headline in shown
    assert (" meets the target of" in shown) is met


# --- pairs of groups, small groups, explained variance -------------------------------------------------------------


@pytest.fixture(scope="module")
def four():
    """Three groups, and seven rows of a fourth whose errors are large."""
    rng = np.random.default_rng(4)
    groups = rng.permutation(np.repeat(["a", "b", "c", "few"], [600, 500, 300, 7]))
    X = rng.normal(size=(1407, 3)) + np.outer(groups == "b", [1.0, 0, 0]) + np.outer(groups == "c", [0.5, 0, 0])
    y = X.sum(axis=1) + 0.3 * rng.normal(size=1407) + 30 * (groups == "few")
    new = np.arange(1407) % 2 == 0
    fair = ESVDFair(LinearRegression().fit(X, y), target_ks=0.2, effort=Effort.quick())
    with pytest.warns(ESVDFairWarning, match="1 group is too small to compare and set aside: few"):
        fair.fit(X[~new], y[~new], sensitive_features=groups[~new])
    return fair, (X[~new], y[~new]), groups[~new], (X[new], y[new], groups[new])


def test_a_group_that_is_too_small_is_named_and_its_rows_count_in_the_error(four):
    fair, rows, groups, test = four
    few = int(np.sum(test[2] == "few"))
    told = fair.assess(test[0], test[1], sensitive_features=test[2])
    shown = Outline(render_report(fair, *rows, sensitive_features=groups, test=test)).text
    assert shown.count(f"Too small to compare: few ({few} rows).") == 1
    assert f"measured on {len(test[1])} rows of test data" in shown
    mse = np.mean((fair.predict(test[0]) - test[1]) ** 2)
    assert told["mse_after"] == pytest.approx(mse)
    assert f"Mean squared error {number(told['mse_before'])} → {number(mse)}" in shown
    alone = test[2] != "few"
    assert mse > 2 * np.mean((fair.predict(test[0][alone]) - test[1][alone]) ** 2)


def test_every_pair_has_its_own_noise_level_on_the_page(four):
    fair, rows, groups, test = four
    told = fair.assess(test[0], test[1], sensitive_features=test[2])
    page = render_report(fair, *rows, sensitive_features=groups, test=test)
    assert [a["id"] for tag, a in Outline(page).tags if tag == "section"] == [*SECTIONS[:2], "pairs", *SECTIONS[2:]]
    assert len(told["pairs"]) == 3
    for pair in told["pairs"]:
        figures = [f"{pair[name]:.3f}" for name in ("ks_before", "ks_after", "ks_population", "ks_floor")]
        beyond = "yes" if pair["established"] else "no"
        assert " ".join([" and ".join(pair["groups"]), *figures, beyond]) in Outline(page).text
    assert len({f"{pair['ks_floor']:.3f}" for pair in told["pairs"]}) == 3


def test_adjusted_differences_are_on_the_page_and_the_chart_shows_people_as_they_are(many):
    _, X, y, groups = many
    control = (X[:, 1] > 0).astype(int)
    fair = ESVDFair(LinearRegression().fit(X, y), target_ks=0.1, effort=Effort.quick())
    fair.fit(X, y, sensitive_features=groups, control_features=control)
    page, s = render_report(fair, X, y, sensitive_features=groups), fair.summary_
    row = [f"{s[key]:.3f}" for key in ("ks_raw_before", "ks_raw_after", "ks_before", "ks_after")]
    assert " ".join(["KS distance", *row]) in Outline(page).text
    numbers = chart_numbers(page)
    assert numbers["steps"][0]["ks"] == pytest.approx(s["ks_raw_before"], rel=1e-3)
    assert numbers["others"] == []  # their distances are adjusted
