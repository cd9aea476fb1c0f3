"""Rows from anywhere become batches; the split depends on row numbers and seed alone."""

import numpy as np
import pandas as pd
import pytest

from esvdfair.batches import (
    ArrayBatches,
    Batch,
    Data,
    StreamBatches,
    held_out,
    is_stream,
    make_batches,
    row_key,
)
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.problem import check_apart, hash_rows


def test_arrays_come_in_order_with_global_row_numbers():
    x = np.arange(20.0).reshape(10, 2)
    parts = list(make_batches(Data(x, np.arange(10), list("ab") * 5, np.ones(10)), batch_size=4))
    assert [len(p.codes) for p in parts] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([p.row_id for p in parts]), np.arange(10))
    np.testing.assert_array_equal(np.vstack([p.x for p in parts]), x)
    assert parts[0].labels == ("a", "b")


def test_a_stream_can_be_read_twice_when_a_function_makes_it():
    def factory():
        yield np.ones((3, 2)), np.zeros(3), ["a", "b", "a"]
        yield np.ones((2, 2)), None, ["b", "b"], np.ones(2)

    batches = make_batches(Data(factory))
    for _ in range(2):
        parts = list(batches)
        assert [p.row_id.tolist() for p in parts] == [[0, 1, 2], [3, 4]]
        assert parts[1].weight is not None


def test_a_stream_may_yield_batches_with_numbers_of_their_own():
    batch = Batch(np.ones((2, 2)), None, ("a", "b"), np.array([1, 0]), None, np.array([70, 12]))
    assert list(make_batches(Data(lambda: iter([batch])))) == [batch]


@pytest.mark.parametrize(
    "groups", [[], np.zeros(0), pd.DataFrame({"sex": [], "race": []})], ids=["list", "array", "frame"]
)
def test_a_shard_without_rows_has_no_batches(groups):
    assert list(make_batches(Data(np.zeros((0, 3)), np.zeros(0), groups))) == []


@pytest.mark.parametrize(
    "item", [(np.ones((2, 2)), None), np.ones((2, 2)), (1, 2, 3, 4, 5, 6, 7)], ids=["two", "array", "seven"]
)
def test_a_batch_of_the_wrong_form_is_explained(item):
    with pytest.raises(ValueError, match="a batch must be"):
        list(StreamBatches([item]))


def test_labels_beside_a_stream_are_refused():
    with pytest.raises(ValueError, match="y and sensitive_features came beside it"):
        make_batches(Data(iter([]), [1.0], ["a"]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.ones((2, 2)), False),
        ([[1.0], [2.0]], False),
        ([(np.float64(1), 2.0), (np.float64(3), 4.0)], False),
        ((np.ones((3, 2)), np.ones((3, 1))), False),
        ([(np.ones((3, 2)), np.ones(3), np.zeros(3))] * 2, True),
        (pd.DataFrame(), False),
        (iter([]), True),
        (list, True),
    ],
    ids=["array", "list", "list of pairs", "inputs", "list of batches", "frame", "iterator", "function"],
)
def test_what_counts_as_a_stream(value, expected):
    assert is_stream(value) is expected


def test_the_split_depends_on_row_and_seed_alone():
    rows = np.arange(100_000)
    whole = held_out(0.25, 7)(rows)
    assert abs(whole.mean() - 0.25) < 0.005
    np.testing.assert_array_equal(held_out(0.25, 7)(rows[5_000:6_000]), whole[5_000:6_000])
    other = held_out(0.25, 8)(rows)
    assert abs((whole & other).mean() - 0.0625) < 0.005  # independent of another seed's


def test_keys_are_uniform_and_uncorrelated_with_the_row():
    key = row_key(np.arange(200_000), 0)
    assert key.min() >= 0
    assert key.max() < 1
    assert np.abs(np.histogram(key, 10)[0] / 20_000 - 1).max() < 0.03
    assert abs(np.corrcoef(key[:-1], key[1:])[0, 1]) < 0.01


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"y": np.ones((3, 2))}, "`y` has 2 columns"),
        ({"y": np.ones(2)}, "`X` has 3 rows but `y` has 2 values"),
        ({"y": [1.0, np.nan, np.inf]}, "`y` contains 2 NaN"),
        ({"sensitive_features": [0, 1]}, "`X` has 3 rows but `sensitive_features` has 2"),
        ({"sensitive_features": ["a", None, "b"]}, "1 missing value"),
        ({"sensitive_features": None}, "sensitive_features is missing"),
        ({"sample_weight": [1.0, -1.0, 1.0]}, "negative values"),
        ({"sample_weight": [0.0, 0.0, 0.0]}, "is zero everywhere"),
        ({"control_features": ["x", None, "x"]}, "`control_features` has 1 missing value"),
        ({"sensitive_features": np.arange(3) / 4}, "looks continuous"),
    ],
)
def test_bad_input_is_explained(kwargs, message):
    arguments = {"y": np.ones(3), "sensitive_features": [0, 1, 1], "sample_weight": None} | kwargs
    with pytest.raises(ValueError, match=message):
        make_batches(Data(np.ones((3, 2)), **arguments))


@pytest.mark.parametrize("x", [np.ones(6), [1.0, 2.0], 3.0])
def test_a_vector_is_no_table(x):
    with pytest.raises(ValueError, match="Expected 2D array"):
        make_batches(Data(x, None, ["a", "b"]))


def test_a_dataloader_is_a_stream():
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    data = torch.utils.data.TensorDataset(torch.ones(5, 2), torch.zeros(5, 1), torch.tensor([0, 1, 0, 1, 1]))
    batches = make_batches(Data(torch.utils.data.DataLoader(data, batch_size=2)))
    assert [len(p.codes) for p in list(batches)] == [2, 2, 1]
    assert list(batches)[2].y.shape == (1,)
    assert isinstance(ArrayBatches(Data(torch.ones(5, 2), None, [0, 1, 0, 1, 1])).rows, int)


def test_strata_make_cells_of_arrays_and_streams_alike():
    x, sex, job = np.ones((4, 2)), ["f", "m", "f", "m"], [3, 3, 5, 3]
    (one,) = make_batches(Data(x, None, sex, control_features=job))
    (other,) = make_batches(Data(lambda: [(x, None, sex, None, job)]))
    for batch in (one, other):
        assert batch.labels == (("f", 3), ("f", 5), ("m", 3))
        assert (batch.codes.tolist(), batch.group_parts) == ([0, 2, 1, 2], 1)


# --- indexes of pandas -------------------------------------------------------------------------------------------


FRAME = pd.DataFrame({"age": [1.0, 2.0, 3.0, 4.0]}, index=[7, 5, 3, 1])
SEX = pd.Series(list("abab"), index=FRAME.index)


@pytest.mark.parametrize("name", ["y", "sensitive_features", "sample_weight", "control_features"])
def test_the_index_of_x_in_another_order_is_an_error_that_says_to_reindex(name):
    columns = {name: pd.Series([1.0, 2.0, 3.0, 4.0] if name in ("y", "sample_weight") else list("aabb"), [1, 3, 5, 7])}
    given = {"y": None, "sensitive_features": SEX} | columns
    with pytest.raises(ValueError, match=rf"`{name}` has the index of `X` in another order.*{name}\.loc\[X\.index\]"):
        make_batches(Data(FRAME, **given))
    reindexed = {key: value if value is None else value.loc[FRAME.index] for key, value in given.items()}
    assert len(next(iter(make_batches(Data(FRAME, **reindexed)))).codes) == 4
    if name != "sensitive_features":
        with pytest.raises(ValueError, match=f"{'sensitive_features' if name == 'y' else name}` has the index of"):
            make_batches(Data(FRAME.to_numpy(), **given))


@pytest.mark.parametrize(
    "index", [[0, 1, 2, 3], list("abcd"), [1, 3, 5, 8], [1, 1, 3, 3]], ids=["range", "words", "one other", "twice"]
)
def test_indexes_of_other_labels_are_taken_by_position(index):
    (batch,) = list(make_batches(Data(FRAME, pd.Series([1.0, 2.0, 3.0, 4.0], index=index), SEX)))
    np.testing.assert_array_equal(batch.y, [1, 2, 3, 4])


# --- validation rows that are training rows ----------------------------------------------------------------------


def drawn(rows, seed, *, discrete=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    x = np.round(x * 2) / 2 if discrete else x  # scores in halves and marks in tenths, as in the law school data
    y = np.round(x.sum(axis=1) + rng.normal(size=rows), 1 if discrete else 12)
    return Data(x, y, rng.integers(0, 2, rows))


def apart(training, validation, confidence=None):
    check_apart(make_batches(training), make_batches(validation), confidence)


def some(data, index):
    return Data(data.X[index], data.y[index], data.sensitive_features[index])


@pytest.mark.parametrize("index", [slice(None), slice(100, 300), np.arange(999, -1, -2)], ids=["all", "part", "mixed"])
@pytest.mark.parametrize("kind", [np.asarray, pd.DataFrame, lambda x: x.astype(object)], ids=["array", "table", "any"])
def test_validation_rows_that_are_training_rows_warn_and_cannot_certify(index, kind):
    data = drawn(1000, 0)
    again, rows = some(data, index), len(data.y[index])
    again = Data(kind(again.X), again.y, again.sensitive_features)
    data = Data(kind(data.X), data.y, data.sensitive_features)
    with pytest.warns(ESVDFairWarning, match=f"{rows:,} of {rows:,} rows of `validation` are also in `X`"):
        apart(data, again)
    with pytest.raises(ValueError, match=r"confidence=0.9` requires new rows: .* Pass rows that are not in `X`"):
        apart(data, again, 0.9)


def test_a_part_of_copies_among_new_rows_is_found_too():
    data, new = drawn(1000, 0), drawn(300, 1)
    mixed = Data(*(np.concatenate([getattr(part, name) for part in (some(data, slice(200)), new)])
                   for name in ("X", "y", "sensitive_features")))  # fmt: skip
    with pytest.raises(ValueError, match="200 of 500 rows of `validation` are also in `X`"):
        apart(data, mixed, 0.9)


def test_new_rows_are_apart_and_so_are_the_same_inputs_with_other_labels():
    data = drawn(1000, 0)
    apart(data, drawn(1000, 1), 0.9)
    apart(data, Data(data.X, data.y + 1, data.sensitive_features), 0.9)
    apart(Data(data.X, None, data.sensitive_features), Data(drawn(500, 1).X, None, np.arange(500) % 2), 0.9)
    with pytest.warns(ESVDFairWarning, match="500 of 500 rows"):
        apart(Data(data.X, None, data.sensitive_features), Data(data.X[:500], None, data.sensitive_features[:500]))


@pytest.mark.parametrize("rows", [300, 3000, 30_000])
def test_coincidences_in_discrete_data_are_normal(rows):
    training = drawn(rows, 0, discrete=True)
    for seed in range(1, 6):
        apart(training, drawn(rows // 3, seed, discrete=True), 0.9)
    alike = np.repeat(np.arange(4.0), rows // 4)[:, None]
    apart(Data(alike, alike[:, 0], np.arange(len(alike)) % 2), Data(alike[:8], alike[:8, 0], np.arange(8) % 2), 0.9)
    with pytest.warns(ESVDFairWarning, match="are also in `X`"):
        apart(training, training)


def test_words_and_whole_numbers_are_compared_as_what_they_are():
    x = pd.DataFrame({"job": [f"job {i}" for i in range(200)], "age": range(200)})
    with pytest.warns(ESVDFairWarning, match="50 of 50 rows"):
        apart(Data(x, None, np.arange(200) % 2), Data(x.iloc[:50], None, np.arange(50) % 2))
    apart(Data(x, None, np.arange(200) % 2), Data(x.assign(age=x["age"] + 1), None, np.arange(200) % 2))
    whole = np.arange(10_000).reshape(-1, 2)
    apart(Data(whole, None, np.arange(5000) % 2), Data(whole + 20_000, None, np.arange(5000) % 2))
    assert len(np.unique(hash_rows(whole))) == 5000
    np.testing.assert_array_equal(hash_rows(whole), hash_rows(whole.astype(np.float32)))
