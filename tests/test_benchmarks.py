"""benchmarks/scale.py runs and writes its document; the plain transcription it compares with gives the same weights."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from esvdfair.core.edits import edit_paper
from esvdfair.core.moments import GroupMoments

pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
pytest.importorskip("onnxruntime", reason="needs the extra esvdfair[onnx]")
pytest.importorskip("concept_erasure", reason="needs the extra esvdfair[peers]")
pytest.importorskip("fairlearn", reason="needs the extra esvdfair[peers]")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def speed(monkeypatch):
    """The package `speed`, as the script finds it beside itself."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import speed.document
    import speed.growth
    import speed.measure
    import speed.processes
    import speed.transcription
    import speed.worker

    return speed


def test_the_script_writes_a_table_for_every_benchmark(tmp_path):
    out = tmp_path / "performance.md"
    options = ["--size", "tiny", "--only", "fit,peers,curve,latency", "--threads", "1", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "scale.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    for title in ("Fit time over its lower bound", "Peers on the same", "trade-off curve", "Inference latency"):
        assert title in text
    assert "What dominated: parity at 16" in text
    assert "threads: 1 a process" in text
    assert text.count("| yes |") + text.count("| **no** |") == 3 + 4 + 2 + 4


def test_an_unknown_benchmark_is_refused(speed, monkeypatch, capsys):
    import scale

    monkeypatch.setattr(sys, "argv", ["scale.py", "--only", "fit,speed"])
    with pytest.raises(SystemExit):
        scale.main()
    assert "no benchmark speed" in capsys.readouterr().err


def test_workers_stream_and_share_rows(speed, tmp_path):
    """What the benchmarks of growth and of processes run apart: one streaming fit, and two ranks."""
    ranks = [speed.measure.run_worker("rank", own, 2, tmp_path, 3 * 8192, 4, 1, threads=1) for own in (0, 1)]
    found = speed.worker.fit("parity", 1000, 4)
    assert all(set(speed.measure.result(rank)) == {"moments", "fit"} for rank in ranks)
    assert found["seconds"] > 0
    assert 50 < found["peak"] < 5000


def test_a_worker_that_fails_is_an_error(speed, monkeypatch, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(speed.measure, "WORKER", broken)
    with pytest.raises(RuntimeError, match="ended with code 3"):
        speed.measure.result(speed.measure.run_worker("fit", threads=1))


@pytest.mark.parametrize("costs", ["costs_by_direction", "costs_with_one_inverse"])
def test_the_transcription_of_algorithm_1_gives_the_weights_of_edit_paper(speed, costs):
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], [70, 50])
    x = rng.normal(size=(120, 12)) * np.where(groups[:, None], np.linspace(0.5, 2, 12), 1) + 0.5 * groups[:, None]
    w = rng.normal(size=(12, 12))
    reductions = {"mean_reduction": 15.0, "covariance_reduction": 150.0}
    plain = speed.transcription.algorithm_1(w, x, groups, costs=getattr(speed.transcription, costs), **reductions)
    ours = edit_paper(w, GroupMoments().update(x, groups), **reductions)[-1].weight_after
    assert np.abs(ours - w).max() > 0.1
    np.testing.assert_allclose(plain, ours, rtol=1e-5, atol=1e-7)


def test_slopes_and_goals(speed):
    assert speed.measure.slope([10, 100, 1000], [3, 30, 300]) == pytest.approx(1.0)
    below, above = speed.measure.Goal("a", 1.4, 1.5), speed.measure.Goal("b", 30, 25, below=False)
    assert below.met
    assert above.met
    missed = speed.measure.Goal("c", 1.6, 1.5)
    section = speed.measure.Section("T", "what", [[("a", "b"), (1, 2)]], [below, missed])
    text = speed.document.render([section], ["machine"], "make bench", 1.0)
    assert "1 of 2 goals are met. Missed: c (1.60, goal ≤ 1.5)." in text
    assert "| 1 | 2 |" in text
