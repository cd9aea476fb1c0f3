"""GroupMoments against numpy.cov on all rows at once."""

import copy
import json
import pickle
import tracemalloc
import zipfile
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esvdfair.core.moments import GroupMoments
from esvdfair.files import write_arrays


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


def test_streaming_equals_one_batch_and_a_group_may_come_late():
    x, g = sample(np.random.default_rng(1))
    order = np.argsort(g, kind="stable")  # group c is first seen in a late batch
    x, g = x[order], g[order]
    moments = GroupMoments()
    for start in range(0, len(x), 17):
        moments.update(x[start : start + 17], g[start : start + 17])
    assert_equals_numpy(moments, x, g)


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


def test_columns_are_the_moments_of_those_columns():
    x, g = sample(np.random.default_rng(7))
    part = GroupMoments().update(x, g).columns([2, 0])
    np.testing.assert_allclose(part.scatters, GroupMoments().update(x[:, [2, 0]], g).scatters)


def test_float32_and_integers_are_summed_in_float64():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(100, 3)).astype(np.float32)
    g = rng.integers(0, 2, 100)
    np.testing.assert_allclose(
        GroupMoments().update(x, g).scatters, GroupMoments().update(x.astype(np.float64), g).scatters, rtol=1e-14
    )
    assert GroupMoments().update(np.arange(12).reshape(4, 3), [0, 0, 1, 1]).scatters.dtype == np.float64


def test_input_is_not_touched():
    x, g = sample(np.random.default_rng(9))
    before = x.copy()
    GroupMoments().update(x, ["a"] * len(x)).update(x, g, np.ones(len(x)))
    np.testing.assert_array_equal(x, before)


def test_merge_leaves_the_other_as_it_was():
    x, g = sample(np.random.default_rng(10))
    one, two = GroupMoments().update(x[:90], g[:90]), GroupMoments().update(x[90:], g[90:])
    before = two.scatters
    total = GroupMoments().merge(one).merge(two).update(x, g)
    np.testing.assert_array_equal(two.scatters, before)
    assert total.counts.sum() == 400


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


def test_plain_numpy_reads_a_file(tmp_path):
    moments = GroupMoments().update(np.eye(4), [0, 0, 1, 1])
    moments.save(tmp_path / "a")
    with np.load(tmp_path / "a") as file:
        assert json.loads(file["header.json"]).keys() == {"format", "labels", "arrays", "sha256"}
        np.testing.assert_array_equal(file["scatters"], moments.scatters)


def test_empty_moments_survive_a_file_and_merge_as_nothing(tmp_path):
    GroupMoments().save(tmp_path / "empty")
    empty = GroupMoments.load(tmp_path / "empty")
    assert repr(empty) == "GroupMoments(empty)"
    x, g = sample(np.random.default_rng(0))
    assert empty.merge(GroupMoments().update(x, g)).merge(GroupMoments()).counts.sum() == 200


def test_a_file_of_another_kind_is_refused(tmp_path):
    bad = tmp_path / "bad"
    bad.write_text("not a zip")
    with pytest.raises(ValueError, match="not a moments file"):
        GroupMoments.load(bad)
    with open(bad, "wb") as file:
        np.savez(file, x=np.ones(3))
    with pytest.raises(ValueError, match="not a moments file"):
        GroupMoments.load(bad)
    with open(bad, "wb") as file:
        np.savez(file, header=np.array([{"format": "x"}], dtype=object))  # a pickle, and never run
    with pytest.raises(ValueError, match="not a moments file"):
        GroupMoments.load(bad)
    write(bad, {"header.json": json.dumps({"format": "other", "labels": []}).encode()})
    with pytest.raises(ValueError, match="format 'other'"):
        GroupMoments.load(bad)
    with pytest.raises(FileNotFoundError):
        GroupMoments.load(tmp_path / "nowhere")


def write(path, parts, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.fixture
def parts(tmp_path):
    """What a file of moments of two groups and four columns holds, by name."""
    x, g = sample(np.random.default_rng(0), rows=60, groups=("a", "b"))
    GroupMoments().update(x, g).save(tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "a") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def f4(content):
    return content.replace(b"'<f8'", b"'<f4'")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("scatters.npy", f4),  # half of the bytes would be read, and no checksum of the zip reached
        ("scatters.npy", lambda content: content[:-8] + np.float64(7).tobytes()),
        ("means.npy", lambda content: content[:-8] + np.float64(7).tobytes()),
        ("means.npy", lambda content: content + bytes(8)),
        ("header.json", lambda content: content.replace(b'["a", "b"]', b'["a", "a"]')),
        ("header.json", lambda content: content.replace(b'["a", "b"]', b'[1, "1"]')),
        ("header.json", lambda content: content.replace(b'["a", "b"]', b'["b", "a"]')),
        ("header.json", lambda content: content.replace(b'"<f8", 2, 4]', b'"<f8", 2, 99999999]')),
        ("header.json", lambda content: content.replace(b'"<f8", 2, 4]', b'"<f8", 4, 2]')),
        ("header.json", lambda content: b"[" * 100_000),
    ],
)
def test_a_changed_file_is_refused(tmp_path, parts, name, spoil):
    assert spoil(parts[name]) != parts[name]
    write(tmp_path / "a", parts | {name: spoil(parts[name])})
    with pytest.raises(ValueError, match=r"a' is not a moments file of esvdfair, or damaged \("):
        GroupMoments.load(tmp_path / "a")


def test_a_bomb_is_not_unpacked(tmp_path, parts):
    write(tmp_path / "a", parts | {"scatters.npy": bytes(10**7)}, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "a").stat().st_size < 30_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="compressed parts"):
        GroupMoments.load(tmp_path / "a")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


@pytest.mark.parametrize("change", [{"scatters": -1.0}, {"counts": -1.0}, {"counts": 1e6}, {"rows": -1}])
def test_moments_that_no_rows_have(tmp_path, change):
    """A file that was made with its checksum, but not of rows."""
    x, g = sample(np.random.default_rng(0))
    moments = GroupMoments().update(x, g)
    arrays = {name: getattr(moments, name) for name in ("rows", "counts", "weight_squares", "means", "scatters")}
    skewed = arrays["scatters"] * (1 + 0.1 * np.triu(np.ones((4, 4)), 1))
    broken = [arrays[name] * change.get(name, 1) for name in arrays]
    for made in (broken, [*list(arrays.values())[:-1], skewed]):
        write_arrays(tmp_path / "a", "moments", 3, {"labels": moments.labels}, dict(zip(arrays, made, strict=True)))
        with pytest.raises(ValueError, match=r"a' is not a moments file .*no rows have such moments"):
            GroupMoments.load(tmp_path / "a")


def test_constant_and_dead_columns_are_possible(tmp_path):
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=300), np.full(300, 0.1), np.zeros(300), 1e8 + rng.normal(size=300)])
    moments = GroupMoments()
    for part in np.array_split(x, 7):
        moments.update(part, ["a"] * len(part))
    moments.save(tmp_path / "a")
    assert GroupMoments.load(tmp_path / "a").rows.tolist() == [300]


def test_mutated_files_are_refused_or_the_same(tmp_path, parts):
    """Bytes changed, cut out, doubled or cut off, 2,000 times."""
    write(tmp_path / "a", parts)
    whole, scatters = (tmp_path / "a").read_bytes(), GroupMoments.load(tmp_path / "a").scatters
    rng = np.random.default_rng(0)
    same = 0
    for _ in range(2000):
        place, kind = int(rng.integers(len(whole))), rng.integers(5)
        end = place + int(rng.integers(1, 9))
        middle = [rng.bytes(1), b"", whole[place:end] * 2, bytes(end - place), None][kind]
        changed = whole[:place] if middle is None else whole[:place] + middle + whole[place + 1 if kind == 0 else end :]
        (tmp_path / "b").write_bytes(changed)
        with suppress(ValueError):
            np.testing.assert_array_equal(GroupMoments.load(tmp_path / "b").scatters, scatters)
            same += 1
    assert same < 600  # what the zip says twice, dates, permissions


def test_a_failed_save_leaves_no_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="No space"):
        GroupMoments().update(np.eye(2), [0, 1]).save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"format": ' * 50_000], ids=["lists", "objects"])
def test_a_header_that_is_nested_without_end(tmp_path, header):
    """JSON that would be a RecursionError."""
    with zipfile.ZipFile(tmp_path / "deep.moments", "w") as archive:
        archive.writestr("header.json", header)
    with pytest.raises(ValueError, match=r"deep\.moments' is not a moments file of esvdfair, or damaged"):
        GroupMoments.load(tmp_path / "deep.moments")


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
