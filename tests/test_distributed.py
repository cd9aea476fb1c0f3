"""Moments added up over two real gloo processes are those of one process."""

import numpy as np
import pytest

from esvdfair import distributed
from esvdfair.core.moments import GroupMoments
from esvdfair.distributed import all_gather, all_sum, broadcast, first_rank_rows, reading, together, world_size

pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")


def one_rank(rank, folder, rows, parts):
    """What each way to share the rows leaves in the folder: added-up moments, or an error."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for shards, pair in parts.items():
        own, moments = pair[rank], GroupMoments()
        if own.any():
            moments.update(*(column[own] for column in rows))
        if shards == "widths" and rank == 1:
            moments = GroupMoments().update(np.eye(2), [0, 1])
        try:
            moments.all_reduce().save(folder / f"{shards}{rank}.moments")
        except ValueError as error:
            (folder / f"{shards}{rank}.error").write_text(str(error))
    distributed.MESSAGE_BYTES = 40  # two rows and a half
    places = [np.array([4, 0, 6]), np.array([1, 2, 3, 5, 7])]
    sent = places[rank][:, None] * [1.0, 10.0]
    np.save(folder / f"rows{rank}.npy", first_rank_rows(sent, places))
    np.save(folder / f"after{rank}.npy", first_rank_rows(sent))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)) + 1e3
    return x, rng.choice(["a", "b", "c"], 300), rng.uniform(0.5, 2, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rows, run_ranks):
    """What two ranks left of every way to share the rows."""
    folder, a = tmp_path_factory.mktemp("ranks"), rows[1]
    even = np.arange(300) % 3 == 0
    parts = {
        "even": (even, ~even),
        "empty": (np.ones(300, dtype=bool), np.zeros(300, dtype=bool)),
        "lone": (a == "c", a != "c"),  # group c is seen on rank 0 only
        "nothing": (np.zeros(300, dtype=bool),) * 2,
        "widths": (even, even),
    }
    assert run_ranks(one_rank, folder, rows, parts) == [0, 0]
    return folder


@pytest.mark.parametrize("shards", ["even", "empty", "lone"])
def test_two_ranks_agree_with_one(folder, rows, shards):
    x, a, w = rows
    whole = GroupMoments().update(x, a, w)
    for rank in (0, 1):
        reduced = GroupMoments.load(folder / f"{shards}{rank}.moments")
        assert reduced.labels == whole.labels
        np.testing.assert_array_equal(reduced.rows, whole.rows)
        np.testing.assert_allclose(reduced.weight_squares, whole.weight_squares, rtol=1e-12)
        np.testing.assert_allclose(reduced.means, whole.means, rtol=1e-10)
        np.testing.assert_allclose(reduced.scatters, whole.scatters, rtol=0, atol=1e-10 * np.abs(whole.scatters).max())


def test_ranks_without_rows_stay_empty(folder):
    assert repr(GroupMoments.load(folder / "nothing0.moments")) == "GroupMoments(empty)"


def test_ranks_of_different_widths_are_an_error_on_both(folder):
    for rank in (0, 1):
        assert "different widths [2, 4]" in (folder / f"widths{rank}.error").read_text()


def test_rows_go_to_their_places_on_the_first_rank(folder):
    placed, after = np.load(folder / "rows0.npy"), np.load(folder / "after0.npy")
    np.testing.assert_array_equal(placed, np.arange(8.0)[:, None] * [1.0, 10.0])
    np.testing.assert_array_equal(after[:, 0], [4, 0, 6, 1, 2, 3, 5, 7])
    assert np.load(folder / "rows1.npy").shape == np.load(folder / "after1.npy").shape == (0, 2)


def test_alone_everything_is_its_own_sum():
    assert world_size() == 1
    assert distributed.rank() == 0
    assert all_gather("x") == ["x"]
    values = np.arange(3.0)
    np.testing.assert_array_equal(all_sum(values), values)
    assert first_rank_rows(values) is values
    assert broadcast(lambda: "made") == "made"


def test_alone_errors_are_left_as_they_are():
    with pytest.raises(ValueError, match="invalid literal"), together(), reading():
        int("mine")
