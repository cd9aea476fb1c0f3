"""Commands that torchrun starts on several ranks: shared work, one voice, one exit code."""

import os
import socket
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from esvdfair.core.moments import GroupMoments
from esvdfair.models.onnx import OnnxAdapter

pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")

COLUMNS = ("--sensitive", "sex", "--target", "income")


def run_ranks(*words):
    """Start two ranks as torchrun does, without a third process: exit codes, stdouts, stderrs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "esvdfair", *map(str, words)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [rank.returncode for rank in ranks], [out for out, _ in said], [error for _, error in said]


def test_torchrun_repairs_as_one_process_does(files, invoke, tmp_path, written):
    words = ("repair", files.model, files.data, *COLUMNS, "--validation", files.new, "--method", "exact")
    alone = invoke(*words, "-o", tmp_path / "alone.onnx")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "esvdfair"]
    both = subprocess.run(
        [*command, *map(str, words), "-o", str(tmp_path / "both.onnx")], capture_output=True, text=True, timeout=120
    )
    assert both.returncode == 0, both.stderr
    assert both.stdout == alone.stdout.replace("alone.onnx", "both.onnx")
    assert written() == ["alone.onnx", "alone.onnx.json", "both.onnx", "both.onnx.json"]
    X = np.random.default_rng(0).normal(size=(100, 3))
    first, second = (OnnxAdapter(tmp_path / name).predict(X) for name in ("alone.onnx", "both.onnx"))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)


def test_moments_of_two_ranks_are_those_of_one(files, invoke, tmp_path):
    words = ("moments", "collect", files.model, files.data, *COLUMNS)
    invoke(*words, "-o", tmp_path / "alone.moments")
    codes, outs, errors = run_ranks(*words, "-o", tmp_path / "both.moments")
    assert codes == [0, 0], errors
    assert outs[1] == errors[1] == ""
    alone, both = (GroupMoments.load(tmp_path / name) for name in ("alone.moments", "both.moments"))
    np.testing.assert_array_equal(alone.rows, both.rows)
    np.testing.assert_allclose(both.scatters, alone.scatters, rtol=0, atol=1e-10 * np.abs(alone.scatters).max())


def test_a_bad_value_in_the_part_of_one_rank_is_one_line_and_no_file(files, tmp_path, written):
    table = pd.read_csv(files.data)
    table.loc[599, "income"] = np.inf
    table.to_csv(tmp_path / "bad.csv", index=False)
    codes, outs, errors = run_ranks("repair", files.model, tmp_path / "bad.csv", *COLUMNS, "-o", tmp_path / "fair.onnx")
    assert codes == [2, 2]
    assert outs == ["", ""]
    lines = [line for error in errors for line in error.splitlines() if line.startswith("esvdfair: ")]
    assert len(lines) == 1
    assert "income" in lines[0]
    assert written() == ["bad.csv"]


def test_a_target_that_is_not_met_is_the_same_exit_code_on_all_ranks(files):
    words = ("curve", files.model, files.data, *COLUMNS, "--method", "exact", "--target-ks", "0", "--json")
    codes, outs, errors = run_ranks(*words)
    assert codes == [1, 1], errors
    assert '"met": false' in outs[0]
    assert outs[1] == errors[1] == ""


def test_a_command_that_shares_no_work_runs_on_the_first_rank_alone(files):
    codes, outs, errors = run_ranks("audit", files.model, files.data, *COLUMNS)
    assert codes == [0, 0], errors
    assert "KS" in outs[0]
    assert outs[1] == ""
