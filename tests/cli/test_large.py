"""Files larger than memory: the same results in pieces, and samples that say that they are samples."""

import io
import json
import re
import sys

import pandas as pd
import pytest

from esvdfair import table_files, tables
from esvdfair.cli import _options, audit, compare
from esvdfair.cli._terminal import at_work

ROLES = ["--sensitive", "sex", "--target", "income"]
EXACT = ["--method", "exact", "--quick"]


@pytest.fixture
def large(monkeypatch):
    """Every file is too large to be kept, and comes in many chunks."""
    monkeypatch.setattr(tables, "HELD_BYTES", -1)
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 50)


@pytest.fixture
def small_samples(monkeypatch):
    """A sample is about half of the 600 rows."""
    monkeypatch.setattr(tables, "RARE_ROWS", 5)
    monkeypatch.setattr(audit, "AUDITED_ROWS", 300)
    monkeypatch.setattr(_options, "HELD_ROWS", 300)


def numbers(found):
    """All floats of nested results, in order."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return [number for item in found for number in numbers(item)]
    return [found] if isinstance(found, float) else []


def test_a_repair_of_a_large_file_is_that_of_a_small_one(files, invoke, tmp_path, monkeypatch, request):
    words = ["repair", files.model, files.data, *ROLES, *EXACT, "--validation", files.new]
    page = ["--report", tmp_path / "page.html"]
    small = json.loads(invoke(*words, "-o", tmp_path / "small.onnx", "--json").stdout)
    request.getfixturevalue("large")
    result = invoke(*words, *page, "-o", tmp_path / "large.onnx", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["data"], found["validation"]) == (small["data"], small["validation"])
    assert numbers(found["reached"]) == pytest.approx(numbers(small["reached"]), rel=1e-5)
    assert found["reached"]["group_sizes"] == small["reached"]["group_sizes"]
    assert (tmp_path / "page.html").exists()


def test_a_curve_of_a_large_file_is_that_of_a_small_one(files, invoke, request):
    words = ["curve", files.model, files.data, *ROLES, *EXACT, "--json"]
    small = json.loads(invoke(*words).stdout)
    request.getfixturevalue("large")
    found = json.loads(invoke(*words).stdout)
    assert numbers(found) == pytest.approx(numbers(small), rel=1e-5)


def test_dropped_rows_do_not_move_the_held_out_ones(files, invoke, tmp_path, request):
    """Rows are known by their place in the file, whatever is left out before them."""
    data = pd.read_csv(files.data)
    data.loc[::7, "age"] = None
    data.to_csv(tmp_path / "holes.csv", index=False)
    words = ["curve", files.model, tmp_path / "holes.csv", *ROLES, *EXACT, "--drop-missing", "--json"]
    small = json.loads(invoke(*words).stdout)
    request.getfixturevalue("large")
    assert numbers(json.loads(invoke(*words).stdout)) == pytest.approx(numbers(small), rel=1e-5)


def test_an_audit_of_a_sample_says_so(files, invoke, large, small_samples):
    result = invoke("audit", files.model, files.data, *ROLES, "--json")
    found = json.loads(result.stdout)
    assert 240 < found["rows"] < 360
    assert found["available"] == 600
    assert result.stderr.startswith(f"note: '{files.data}' has 600 rows;")
    assert f"a random sample of {found['rows']}." in result.stderr
    assert result.stderr.count("\n") == 1
    again = json.loads(invoke("audit", files.model, files.data, *ROLES, "--json", "--seed", 1).stdout)
    assert again["ks"] != found["ks"]


@pytest.mark.parametrize("command", ["explain", "compare"])
def test_others_sample_too(files, invoke, large, small_samples, monkeypatch, command):
    first = compare.methods()[:1]
    monkeypatch.setattr(compare, "methods", lambda: first)
    result = invoke(command, files.model, files.data, *ROLES, "--validation", files.new, "--json")
    assert result.exit_code == 0
    assert [line.split(";")[0] for line in result.stderr.splitlines()] == [
        f"note: '{files.data}' has 600 rows",
        f"note: '{files.new}' has 400 rows",
    ]


def test_the_report_of_a_large_file_shows_a_sample(files, invoke, large, small_samples, tmp_path):
    words = ["repair", files.model, files.data, *ROLES, *EXACT, "-o", tmp_path / "fair.onnx"]
    assert invoke(*words).stderr == ""
    result = invoke(*words, "--force", "--report", tmp_path / "page.html")
    assert result.exit_code == 0, result.stderr
    assert "used a random sample of" in result.stderr
    assert json.loads((tmp_path / "fair.onnx.json").read_text())["data"]["rows"] == 600


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_bars_on_a_terminal_while_it_lasts(monkeypatch, stream, shown):
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    with at_work(2) as work:
        work.step("reading")
        work.read(1000, 2000)  # nobody waits for that
        assert "MB" not in screen.getvalue()
        work.read(10**9, 2 * 10**9)
        work.step("repairing")
        assert (re.search("repairing.*1/2.*0:00:00", screen.getvalue()) is not None) is shown
    assert ("1,000 of 2,000 MB" in screen.getvalue()) is shown
    assert shown or screen.getvalue() == ""
