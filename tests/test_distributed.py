"""Moments added up over two real gloo processes are those of one process."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from esvdfair import distributed
from esvdfair.core.moments import GroupMoments
from esvdfair.distributed import all_gather, all_rows, all_sum, broadcast, reading, together, world_size

pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")

RANK = textwrap.dedent(
    """
    import sys
    import numpy as np
    import torch.distributed as dist
    from esvdfair.core.moments import GroupMoments

    rank, folder, *scenarios = int(sys.argv[1]), *sys.argv[2:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    data = np.load(f"{folder}/data.npz")
    for shards in scenarios:
        own = data[f"{shards}_{rank}"]
        moments = GroupMoments()
        if own.any():
            moments.update(data["x"][own], data["a"][own], data["w"][own])
        if shards == "widths" and rank == 1:
            moments = GroupMoments().update(np.eye(2), [0, 1])
        try:
            moments.all_reduce().save(f"{folder}/{shards}{rank}.moments")
        except ValueError as error:
            print(error)
    dist.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)) + 1e3
    return x, rng.choice(["a", "b", "c"], 300), rng.uniform(0.5, 2, 300)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, rows):
    """The folder of what two ranks left of every way to share the rows, and what each said."""
    folder, (x, a, w) = tmp_path_factory.mktemp("ranks"), rows
    even = np.arange(300) % 3 == 0
    parts = {
        "even": (even, ~even),
        "empty": (np.ones(300, dtype=bool), np.zeros(300, dtype=bool)),
        "lone": (a == "c", a != "c"),  # group c is seen on rank 0 only
        "nothing": (np.zeros(300, dtype=bool),) * 2,
        "widths": (even, even),
    }
    own = {f"{name}_{rank}": part for name, pair in parts.items() for rank, part in enumerate(pair)}
    np.savez(folder / "data.npz", x=x, a=a, w=w, **own)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder), *parts], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return folder, said


@pytest.mark.parametrize("shards", ["even", "empty", "lone"])
def test_two_ranks_agree_with_one(ran, rows, shards):
    x, a, w = rows
    whole = GroupMoments().update(x, a, w)
    for rank in (0, 1):
        reduced = GroupMoments.load(ran[0] / f"{shards}{rank}.moments")
        assert reduced.labels == whole.labels
        np.testing.assert_array_equal(reduced.rows, whole.rows)
        np.testing.assert_allclose(reduced.weight_squares, whole.weight_squares, rtol=1e-12)
        np.testing.assert_allclose(reduced.means, whole.means, rtol=1e-10)
        np.testing.assert_allclose(reduced.scatters, whole.scatters, rtol=0, atol=1e-10 * np.abs(whole.scatters).max())


def test_ranks_without_rows_stay_empty(ran):
    assert repr(GroupMoments.load(ran[0] / "nothing0.moments")) == "GroupMoments(empty)"


def test_ranks_of_different_widths_are_an_error_on_both(ran):
    assert all("different widths [2, 4]" in words for words in ran[1])


def test_alone_everything_is_its_own_sum():
    assert world_size() == 1
    assert distributed.rank() == 0
    assert all_gather("x") == ["x"]
    values = np.arange(3.0)
    np.testing.assert_array_equal(all_sum(values), values)
    assert all_rows(values) is values
    assert broadcast(lambda: "made") == "made"


def test_alone_errors_are_left_as_they_are():
    with pytest.raises(ValueError, match="invalid literal"), together(), reading():
        int("mine")
