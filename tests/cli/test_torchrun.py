"""Commands that torchrun starts on several ranks: shared work, one voice, one exit code."""

import contextlib
import io
import json
import os
import socket

import numpy as np
import pandas as pd
import pytest

from esvdfair.cli import main
from esvdfair.core.moments import GroupMoments
from esvdfair.models.onnx import OnnxAdapter

pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")

COLUMNS = ("--sensitive", "sex", "--target", "income")


def one_rank(rank, port, words, folder):
    """What torchrun starts: a process that finds its place in the environment. Leaves exit code, stdout and stderr."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words, prog_name="esvdfair")
        except SystemExit as end:
            (folder / f"said-{rank}").write_text(json.dumps([end.code, out.getvalue(), err.getvalue()]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def commands(files, folder):
    table = pd.read_csv(files.data)
    table.loc[599, "income"] = np.inf
    table.to_csv(folder / "bad.csv", index=False)
    model = (files.model, files.data, *COLUMNS)
    return {
        "repair": ("repair", *model, "--validation", files.new, "--method", "exact", "-o", folder / "both.onnx"),
        "moments": ("moments", "collect", *model, "-o", folder / "both.moments"),
        "bad": ("repair", files.model, folder / "bad.csv", *COLUMNS, "-o", folder / "fair.onnx"),
        "curve": ("curve", *model, "--method", "exact", "--target-ks", "0", "--json"),
        "audit": ("audit", *model),
    }


@pytest.fixture(scope="module")
def ranks(commands, folder, run_ranks):
    """name of a command -> exit codes, stdouts, stderrs of its two ranks."""
    found = {}
    for name, line in commands.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert run_ranks(one_rank, port, [str(word) for word in line], folder) == [0, 0]
        said = [folder / f"said-{rank}" for rank in (0, 1)]
        found[name] = tuple(zip(*(json.loads(path.read_text()) for path in said), strict=True))
        for path in said:
            path.unlink()
    return found


def test_two_ranks_repair_as_one_process_does(commands, ranks, invoke, folder):
    alone = invoke(*commands["repair"][:-1], folder / "alone.onnx")
    codes, outs, errors = ranks["repair"]
    assert codes == (0, 0), errors
    assert outs[0] == alone.stdout.replace("alone.onnx", "both.onnx")
    assert outs[1] == errors[1] == ""
    X = np.random.default_rng(0).normal(size=(100, 3))
    first, second = (OnnxAdapter(folder / name).predict(X) for name in ("alone.onnx", "both.onnx"))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)


def test_moments_of_two_ranks_are_those_of_one(commands, ranks, invoke, folder):
    invoke(*commands["moments"][:-1], folder / "alone.moments")
    codes, outs, errors = ranks["moments"]
    assert codes == (0, 0), errors
    assert outs[1] == errors[1] == ""
    alone, both = (GroupMoments.load(folder / name) for name in ("alone.moments", "both.moments"))
    np.testing.assert_array_equal(alone.rows, both.rows)
    np.testing.assert_allclose(both.scatters, alone.scatters, rtol=0, atol=1e-10 * np.abs(alone.scatters).max())


def test_a_bad_value_in_the_part_of_one_rank_is_one_line_and_no_file(ranks, folder):
    codes, outs, errors = ranks["bad"]
    assert codes == (2, 2)
    assert outs == ("", "")
    lines = [line for error in errors for line in error.splitlines() if line.startswith("esvdfair: ")]
    assert len(lines) == 1
    assert "income" in lines[0]
    assert not (folder / "fair.onnx").exists()
    assert not list(folder.glob(".*"))


def test_a_target_that_is_not_met_is_the_same_exit_code_on_all_ranks(ranks):
    codes, outs, errors = ranks["curve"]
    assert codes == (1, 1), errors
    assert '"met": false' in outs[0]
    assert outs[1] == errors[1] == ""


def test_a_command_that_shares_no_work_runs_on_the_first_rank_alone(ranks):
    codes, outs, errors = ranks["audit"]
    assert codes == (0, 0), errors
    assert "KS" in outs[0]
    assert outs[1] == ""
