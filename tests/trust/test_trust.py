"""A part of what `make trust` tries: nothing is silent, raw or hangs; and what must not change a repair does not."""

import signal
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
pytest.importorskip("onnxruntime", reason="needs the extra esvdfair[onnx]")
pytest.importorskip("pyarrow", reason="needs the extra esvdfair[data]")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import reliability  # noqa: E402
from trust import arrays, files, models, processes, properties, verdict  # noqa: E402

# Untrained networks do for what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")


@pytest.mark.parametrize(
    ("trials", "step"),
    [
        (arrays.metric_trials, 31),
        (arrays.moment_trials, 3),
        (arrays.baseline_trials, 9),
        (arrays.estimator_trials, 53),
        (models.all_trials, 6),
    ],
)
def test_hostile_input_gives_a_clear_error_or_a_right_result(trials, step):
    tally = verdict.judge_all(islice(trials(), 0, None, step))
    assert tally.failures == []
    assert tally.counts["clear"] > 5
    assert tally.counts["right"] > 5


FOUND = [
    "parity sample_weight largest", "exact X times 1e+100", "paper X times 1e-160", "paper X times 1e+100",
    "validation sample_weight one integer beyond int64", "validation sample_weight times 1e-300",
    "validation sample_weight times 1e+160", "validation sample_weight denormal", "torch parity X three axes",
    "torch parity X big-endian", "torch parity X long double", "torch parity X a long double beyond float",
    "torch parity X torch complex", "torch parity X torch without data", "torch parity X csr",
]  # fmt: skip


def test_what_the_whole_grid_has_found_stays_mended():
    trials = [trial for trial in arrays.estimator_trials() if any(name in trial.name for name in FOUND)]
    assert len(trials) >= len(FOUND)
    assert verdict.judge_all(trials).failures == []


@pytest.mark.parametrize("kind", files.KINDS)
def test_mutated_files_are_refused_or_read_as_they_are(kind):
    tally = files.run(kind, 50)
    assert tally.failures == []
    assert tally.counts.total() > 40


def test_threads_on_one_model_give_what_one_gives():
    assert processes.in_threads(4, 4) == [True] * 4


def test_control_c_ends_a_model_that_loops_for_ever():
    assert processes.signalled(signal.SIGINT, 130, 1.0, endless=True)[0]


def test_order_names_and_units_change_nothing(monkeypatch):
    monkeypatch.setattr(properties, "METHODS", ("transport", "exact"))
    moved = properties.measure(0.0)
    for name in ("another order of rows", "other names of groups", "predictions and labels times 1000"):
        assert max(moved[name].values()) <= properties.HELD, name
    held_out = properties.measure(0.25)
    assert max(held_out["predictions and labels times 1000"].values()) <= properties.HELD
    assert max(held_out["another order of rows"].values()) > properties.HELD  # another draw, as the guide says


def test_a_repair_is_never_worse_in_both_on_its_rows_without_a_warning():
    found = properties.worse_in_both(2)
    for goal in ("no target", "target 0.1"):
        assert set(found[f"without, {goal}"].values()) == {0}, goal


# --- the judge itself: it must be able to fail -----------------------------------------------------------------------


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("run", "right", "expected"),
    [
        (lambda: 1, None, "silent"),
        (lambda: 1, lambda found: found == 2 or "not two", "silent"),
        (lambda: 2, lambda found: found == 2, "right"),
        (lambda: np.zeros(3) @ np.zeros(4), None, "raw"),
        (lambda: np.float64(1) / np.float64(0), None, "raw"),
        (lambda: raises(ValueError("X is bad")), None, "clear"),
        (lambda: raises(ValueError("bad")), None, "raw"),
        (lambda: raises(KeyError("X")), None, "raw"),
        (lambda: files.OnnxAdapter(b""), None, "clear"),
    ],
)
def test_verdicts(run, right, expected):
    assert verdict.judge(verdict.Trial("a trial", run, right, "X"))[0] == expected


def test_a_trial_that_does_not_end_hangs(monkeypatch):
    monkeypatch.setattr(verdict, "LIMIT", 1)
    assert verdict.judge(verdict.Trial("sleep", lambda: threading.Event().wait(9), None))[0] == "hang"


def test_the_tables_are_those_of_the_guide(tmp_path):
    text = reliability.DOCUMENT.read_text(encoding="utf-8")
    for title in reliability.SUITES:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
        assert line.endswith("| 0 |"), title
    copy = tmp_path / "reliability.md"
    copy.write_text(text, encoding="utf-8")
    reliability.replace_line(copy, "mutated files: CSV", "| mutated files: CSV | 7 | 3 | 4 | 0 |")
    reliability.replace_table(copy, "All rows fit and judge", ["| | parity |", "|---|---|", "| order | 0.5 |"])
    written = copy.read_text(encoding="utf-8")
    assert "| mutated files: CSV | 7 | 3 | 4 | 0 |" in written
    assert "| order | 0.5 |\n\nA quarter" in written
