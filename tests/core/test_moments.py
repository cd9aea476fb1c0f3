"""GroupMoments against numpy.cov on all rows at once."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esvdfair.core.moments import GroupMoments


def sample(rng, rows=200, width=4, groups=("a", "b", "c")):
    x = rng.normal(size=(rows, width)) * [1, 10, 0.1, 3][:width] + [0, 5, -2, 100][:width]
    return x, rng.choice(np.array(groups), rows)


def assert_equals_numpy(moments, x, g, weights=None):
    assert moments.labels == tuple(sorted(set(g.tolist())))
    for i, label in enumerate(moments.labels):
        rows = x[g == label]
        w = None if weights is None else weights[g == label]
        scale = np.abs(np.cov(rows.T, aweights=w)).max() if len(rows) > 1 else 1
        np.testing.assert_allclose(moments.means[i], np.average(rows, axis=0, weights=w), rtol=1e-10)
        if len(rows) > 1:
            np.testing.assert_allclose(moments.covariances()[i], np.cov(rows.T, aweights=w), atol=1e-10 * scale, rtol=0)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 200), max_size=8), data=st.data())
def test_any_batches_in_any_order_merged_in_any_tree_equal_numpy(seed, cuts, data):
    rng = np.random.default_rng(seed)
    x, g = sample(rng)
    bounds = [0, *sorted(cuts), 200]
    parts = [GroupMoments().update(x[a:b], g[a:b]) for a, b in pairwise(bounds) if b > a]
    while len(parts) > 1:
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(first.merge(second))
    assert_equals_numpy(parts[0], x, g)


def test_large_mean_keeps_six_digits():
    rng = np.random.default_rng(2)
    x = 1e8 + rng.normal(size=(20_000, 3))
    g = rng.integers(0, 2, 20_000)
    moments = GroupMoments()
    for start in range(0, len(x), 512):
        moments.update(x[start : start + 512], g[start : start + 512])
    for i in (0, 1):
        exact = np.cov((x[g == i] - 1e8).T)
        np.testing.assert_allclose(moments.covariances()[i], exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def test_weights_follow_numpy_aweights_and_do_not_depend_on_their_scale():
    rng = np.random.default_rng(3)
    x, g = sample(rng)
    w = rng.uniform(0.1, 3, len(x))
    whole = GroupMoments().update(x, g, w)
    assert_equals_numpy(whole, x, g, w)
    split = GroupMoments().update(x[:50], g[:50], w[:50]).update(x[50:], g[50:], w[50:])
    np.testing.assert_allclose(split.scatters, whole.scatters, rtol=1e-10)
    scaled = GroupMoments().update(x, g, 1000 * w)
    np.testing.assert_allclose(scaled.covariances(), whole.covariances(), rtol=1e-10)


def test_integer_weights_are_repeated_rows_and_zero_weights_absent_ones():
    rng = np.random.default_rng(4)
    x, g = sample(rng)
    w = rng.integers(0, 4, len(x))
    weighted = GroupMoments().update(x, g, w)
    repeated = GroupMoments().update(np.repeat(x, w, axis=0), np.repeat(g, w))
    np.testing.assert_allclose(weighted.scatters, repeated.scatters, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(weighted.counts, repeated.counts)
    absent = GroupMoments().update(x, np.where(w > 0, g, "ghost"), w)
    assert "ghost" not in absent.labels
    assert weighted.rows.sum() == np.count_nonzero(w)


def test_middle_axes_are_flattened_with_the_group_broadcast():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(30, 4, 2, 3))
    g = rng.integers(0, 2, 30)
    w = rng.uniform(1, 2, 30)
    flat = GroupMoments().update(x.reshape(-1, 3), np.repeat(g, 8), np.repeat(w, 8))
    np.testing.assert_allclose(GroupMoments().update(x, g, w).scatters, flat.scatters)


def test_pooled_moments_are_those_of_all_rows():
    rng = np.random.default_rng(6)
    x, g = sample(rng)
    moments = GroupMoments().update(x, g)
    np.testing.assert_allclose(moments.pooled_mean(), x.mean(0))
    centred = x - x.mean(0)
    np.testing.assert_allclose(moments.pooled_scatter(), centred.T @ centred, rtol=1e-9, atol=1e-9)


def test_float32_and_integers_are_summed_in_float64():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(100, 3)).astype(np.float32)
    g = rng.integers(0, 2, 100)
    np.testing.assert_allclose(
        GroupMoments().update(x, g).scatters, GroupMoments().update(x.astype(np.float64), g).scatters, rtol=1e-14
    )
    assert GroupMoments().update(np.arange(12).reshape(4, 3), [0, 0, 1, 1]).scatters.dtype == np.float64


def test_neither_the_input_nor_what_is_merged_is_touched():
    x, g = sample(np.random.default_rng(9))
    before = x.copy()
    one, two = GroupMoments().update(x[:90], g[:90]), GroupMoments().update(x[90:], g[90:], np.ones(110))
    scatters = two.scatters
    total = GroupMoments().merge(one).merge(two).update(x, g)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(two.scatters, scatters)
    assert total.counts.sum() == 400


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_tensors_give_the_moments_of_their_values(dtype):
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(60, 2, 3)), requires_grad=True).to(getattr(torch, dtype))
    g, w, copied = torch.tensor(rng.integers(0, 2, 60)), torch.tensor(rng.uniform(1, 2, 60)), x.clone()
    from_torch = GroupMoments().update(x[:20], g[:20], w[:20]).update(x[20:], g[20:], w[20:])
    from_numpy = GroupMoments().update(x.detach().double().numpy(), g.numpy(), w.numpy())
    np.testing.assert_allclose(from_torch.scatters, from_numpy.scatters, rtol=1e-12, atol=1e-12)
    assert isinstance(from_torch.means, np.ndarray)
    assert torch.equal(x, copied)
    with pytest.raises(ValueError, match="1 of 2 rows hold NaN"):
        GroupMoments().update(torch.tensor([[1, 2], [float("nan"), 3]], dtype=getattr(torch, dtype)), [0, 1])


def test_a_column_beside_x_is_a_column_of_x():
    rng = np.random.default_rng(1)
    x, codes, y, w = (
        rng.normal(size=(400, 3)),
        rng.integers(0, 2, 400),
        rng.normal(size=400) + 5,
        rng.uniform(0, 2, 400),
    )
    for weight in (None, w):
        beside = GroupMoments().update_codes(x, ("a", "b"), codes, weight, beside=y)
        inside = GroupMoments().update_codes(np.column_stack([x, y]), ("a", "b"), codes, weight)
        np.testing.assert_allclose(beside.scatters, inside.scatters, rtol=1e-12)
    with pytest.raises(ValueError, match="3 columns, the batches before had 4"):
        beside.update_codes(x, ("a", "b"), codes)


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels", [["a", "b", "ü"], [0, 1, 2], [True, False, True], [("f", 1), ("m", 2), ("m", 1)]], ids=str
)
def test_save_and_load_give_the_same_moments(tmp_path, labels):
    x = np.random.default_rng(0).normal(size=(30, 2))
    moments = GroupMoments().update(x, labels * 10, np.arange(1, 31))
    moments.save(tmp_path / "site.moments")
    again = GroupMoments.load(tmp_path / "site.moments")
    assert again.labels == moments.labels
    for field in ("rows", "counts", "weight_squares", "means", "scatters"):
        np.testing.assert_array_equal(getattr(again, field), getattr(moments, field))
    assert [path.name for path in tmp_path.iterdir()] == ["site.moments"]


def test_empty_moments_survive_a_file_and_merge_as_nothing(tmp_path):
    GroupMoments().save(tmp_path / "empty")
    empty = GroupMoments.load(tmp_path / "empty")
    assert repr(empty) == "GroupMoments(empty)"
    x, g = sample(np.random.default_rng(0))
    assert empty.merge(GroupMoments().update(x, g)).merge(GroupMoments()).counts.sum() == 200


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "groups", "weights", "message"),
    [
        (np.ones((3, 2)), [0, 1], None, "3 rows but `sensitive_features` has 2"),
        (np.ones(3), [0, 1, 0], None, r"shape \(3,\)"),
        (np.ones((2, 3)), [0, 1], None, "3 columns, the batches before had 2"),
        (np.array([[1.0, np.nan], [1, 2]]), [0, 1], None, "1 of 2 rows hold NaN"),
        (np.array([[1.0, np.inf], [-np.inf, 2]]), [0, 1], None, "2 of 2 rows hold NaN"),
        (np.ones((2, 2)), [0, 1], [1.0], "2 rows but `sample_weight` has 1"),
        (np.ones((2, 2)), [0, 1], [1.0, -1.0], "negative values"),
        (np.ones((2, 2)), [0, 1], [1.0, np.nan], "`sample_weight` contains 1 NaN"),
        (np.ones((2, 2)), [0, None], None, "1 missing value"),
        (np.ones((2, 2)), [0.5, 1.0], None, "continuous"),
        (np.ones((2, 2)), ["0", "1"], None, "0 and '0' read alike"),
        (np.array([["1", "2"], ["3", "4"]]), [0, 1], None, "not numbers"),
        (np.ma.masked_equal(np.eye(2), 1), [0, 1], None, "2 masked values"),
        (np.full((2, 2), 1j), [0, 1], None, "complex"),
        (np.array([[1e200, 1], [-1e200, 2]]), [0, 0], None, "squares are beyond"),
        (np.array([[1e200, 1], [-1e200, 2]]), [0, 1], None, "squares are beyond"),
        (np.ones((2, 2)), [0, 1], [1e-200, 1e-200], "sum of squares leaves float64"),
    ],
)
def test_bad_batches_raise_and_change_nothing(x, groups, weights, message):
    moments = GroupMoments().update(np.eye(2), [0, 1])
    before = moments.scatters, moments.counts
    with pytest.raises(ValueError, match=message):
        moments.update(x, groups, weights)
    np.testing.assert_array_equal(moments.scatters, before[0])
    np.testing.assert_array_equal(moments.counts, before[1])


def test_labels_that_read_alike_are_neither_merged_nor_lost():
    x = np.eye(4)
    with pytest.raises(ValueError, match="read alike"):
        GroupMoments().update(x, [1, "1", 1, "1"])
    with pytest.raises(ValueError, match="read alike"):
        GroupMoments().update(x, [0, 1, 0, 1]).merge(GroupMoments().update(x, [True, False, True, False]))
    twice = GroupMoments().update_codes(x, ("a", "b", "a"), np.array([0, 1, 2, 2]))
    assert twice.counts.tolist() == [3, 1]


def test_merging_what_are_no_moments_is_an_error():
    with pytest.raises(TypeError, match="merge takes GroupMoments, got dict"):
        GroupMoments().merge({})


def test_merging_other_widths_is_an_error():
    with pytest.raises(ValueError, match="width 3 into moments of width 2"):
        GroupMoments().update(np.eye(2), [0, 1]).merge(GroupMoments().update(np.eye(3), [0, 1, 1]))


def test_too_few_groups_or_rows_are_errors():
    with pytest.raises(ValueError, match="seen no rows"):
        _ = GroupMoments().width
    with pytest.raises(ValueError, match="1 group"):
        GroupMoments().update(np.eye(2), ["a", "a"]).covariances()
    with pytest.raises(ValueError, match="group 'b' has 1 row"):
        GroupMoments().update(np.eye(3), ["a", "a", "b"]).covariances()


def test_repr_names_the_groups():
    assert repr(GroupMoments().update(np.eye(3), ["a", "a", "b"])) == "GroupMoments(width=3, counts={'a': 2, 'b': 1})"


def test_adjusted_moments_are_neither_merged_nor_saved(tmp_path):
    """They are of groups with weights of their own and no longer add up: those of the cells do."""
    rng = np.random.default_rng(0)
    cells = [(group, stratum) for group in "ab" for stratum in (0, 1)]
    moments = GroupMoments().update(rng.normal(size=(40, 3)), cells * 10)
    adjusted = moments.adjusted(1)
    for use in (
        lambda: adjusted.merge(moments),
        lambda: moments.merge(adjusted),
        lambda: adjusted.save(tmp_path / "a"),
    ):
        with pytest.raises(ValueError, match="adjusted for strata, and no longer add up; keep those of the cells"):
            use()


def test_what_was_read_stays_as_it_was_when_more_rows_come():
    """Sums grow in place, but not those that somebody was given."""
    rng = np.random.default_rng(0)
    x, groups = rng.normal(size=(60, 3)), np.tile(["a", "b"], 30)
    moments = GroupMoments().update(x[:20], groups[:20])
    scatters, part, width = moments.scatters, moments.columns(slice(0, 2)), moments.width
    before = scatters.copy()
    moments.update(x[20:40], groups[20:40]).update(x[40:], groups[40:])
    np.testing.assert_array_equal(scatters, before)
    np.testing.assert_array_equal(part.scatters, before[:, :2, :2])
    np.testing.assert_allclose(moments.scatters, GroupMoments().update(x, groups).scatters, rtol=1e-12)
    assert width == moments.width == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda moments: pickle.loads(pickle.dumps(moments))])
def test_a_copy_and_its_original_grow_apart(copied):
    rng = np.random.default_rng(0)
    x, groups = rng.normal(size=(40, 3)), np.tile(["a", "b"], 20)
    moments = GroupMoments().update(x[:20], groups[:20])
    other = copied(moments).update(x[20:], groups[20:])
    moments.update(x[:20], groups[:20])
    assert other.rows.tolist() == moments.rows.tolist() == [20, 20]
    np.testing.assert_allclose(other.means, GroupMoments().update(x, groups).means, rtol=1e-12)
    np.testing.assert_allclose(moments.means, GroupMoments().update(x[:20], groups[:20]).means, rtol=1e-12)


def test_rows_that_are_left_out_may_hold_anything():
    x = np.array([[1.0, 2.0], [3.0, 1.0], [np.nan, 1.0], [1e200, np.inf]])
    moments = GroupMoments().update(x, ["a", "b", "a", "b"], [1.0, 1.0, 0.0, 0.0])
    assert moments.means.tolist() == [[1.0, 2.0], [3.0, 1.0]]
