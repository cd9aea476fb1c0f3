"""Labels and numbers of every kind are read as their owner meant them, or refused."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from esvdfair.core.checks import (
    MISSING,
    check_column,
    check_groups,
    check_labels,
    check_weight,
    encode_groups,
    make_generator,
    unit_scale,
    unscaled,
)
from esvdfair.exceptions import InputError


@pytest.mark.parametrize(
    ("groups", "labels", "codes"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (np.array([2, 0, 2]), (0, 2), [1, 0, 1]),
        (np.array([1.0, 0.0]), (0, 1), [1, 0]),
        ([True, False], (False, True), [1, 0]),
        (pd.Series(["x", "y"], dtype="category"), ("x", "y"), [0, 1]),
        (pd.DataFrame({"sex": ["m", "f", "m"], "race": [1, 1, 1]}), (("f", 1), ("m", 1)), [1, 0, 1]),
        (np.array([["m", "x"], ["f", "y"]]), (("f", "y"), ("m", "x")), [1, 0]),
        ([("a", 2), ("a", 1)], (("a", 1), ("a", 2)), [1, 0]),
        (pd.Series([("a", 2), ("a", 1)]), (("a", 1), ("a", 2)), [1, 0]),
        (np.array([["m"], ["f"]]), ("f", "m"), [1, 0]),
        (pd.Series(["a", 2, 1], dtype=object), (1, 2, "a"), [2, 1, 0]),
        ([["m", 1], ["f", 2]], (("f", 2), ("m", 1)), [1, 0]),
        (pd.DataFrame([["m", 1], ["f", 1]], columns=["sex", "sex"]), (("f", 1), ("m", 1)), [1, 0]),
        ([10**400, 10**400 + 1], (10**400, 10**400 + 1), [0, 1]),
        (
            np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[ns]"),
            ("2020-01-01 00:00:00", "2021-01-01 00:00:00"),
            [0, 1],
        ),
    ],
    ids=str,
)
def test_labels_are_sorted_plain_values(groups, labels, codes):
    found, where = encode_groups(groups)
    assert found == labels
    assert [type(label) for label in found] == [type(label) for label in labels]
    assert where.tolist() == codes


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["a", None, None], "2 missing value"),
        (["a", float("nan"), "b"], "1 missing value"),
        (["a", pd.NA, pd.NaT], "2 missing value"),
        (np.array(["a", np.nan]), "1 missing value"),
        (np.ma.masked_equal(["a", "b", "b"], "b"), "2 missing value"),
        ([["a", 1], ["b", np.nan]], "1 missing value"),
        ([("a", 1), None], "1 missing value"),
        ([1, "1"], "1 and '1' read alike"),
        ([True, 1], "mixes booleans and numbers"),
        ([b"a", "a"], "all read 'a'"),
        ([{1}, {2}], "unhashable"),
        ([("a", ["x"]), ("b", ["y"])], "unhashable"),
        (np.array([(1, 2)], dtype=[("a", int), ("b", int)]), "one column for each attribute"),
        (np.array([np.nan, 1.0]), "1 missing value"),
        (np.array([0.25, 1.0]), "looks continuous"),
        (np.zeros((2, 2, 2)), r"shape \(2, 2, 2\)"),
        ("a", r"shape \(\)"),
        ([("a", 1), ("b",)], "different lengths"),
        (pd.DataFrame(index=[0, 1]), "no column"),
    ],
    ids=str,
)
def test_bad_labels_are_explained(groups, message):
    with pytest.raises(ValueError, match=message):
        encode_groups(groups)


def test_a_missing_group_may_be_a_group():
    assert encode_groups(["b", None, float("nan")], missing="group")[0] == ("b", MISSING)
    labels, codes = check_groups([["a", 1], ["b", pd.NA]], 2, "group")
    assert (labels, codes.tolist()) == ((("a", 1), ("b", MISSING)), [0, 1])


def test_many_whole_numbers_look_continuous():
    with pytest.raises(ValueError, match="looks continuous"):
        check_groups(np.arange(60), 60)
    assert len(check_groups(np.arange(60).astype(str), 60)[0]) == 60


def test_torch_labels():
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    assert encode_groups(torch.tensor([3, 1]))[0] == (1, 3)
    assert encode_groups([torch.tensor(3), torch.tensor(1), torch.tensor(3)])[1].tolist() == [1, 0, 1]


def test_labels_that_read_alike_are_refused_between_batches():
    check_labels(["a", "a", 1, ("a", 1)])
    for labels in ([1, "1"], [True, 1], [("a", 1), ("a", "1")]):
        with pytest.raises(InputError, match="read alike"):
            check_labels(labels)


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([1, 2], [1, 2]),
        ([[1.5], [2]], [1.5, 2]),
        ([True, False], [1, 0]),
        (pd.Series([1, 2], dtype="Int64"), [1, 2]),
        ([Decimal("0.5"), 10**30], [0.5, 1e30]),
        (np.ma.masked_array([1.0, 2.0]), [1, 2]),
    ],
)
def test_numbers_are_read(values, read):
    assert check_column(values, 2, "y").tolist() == read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1", "2"], "`y` contains values that are not numbers"),
        (pd.Series(["1", 2], dtype=object), "one is '1'"),
        (pd.to_datetime(["2020-01-01", "2020-01-02"]), "dtype is datetime64"),
        ([pd.NaT, 1.0], "not numbers"),
        ([1, 1 + 1j], "Complex data not supported"),
        ([10**400, 1], "too large"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), "1 masked values"),
        ([None, 1.0], "`y` contains 1 NaN or infinite values among 2"),
        (pd.Series([1, None], dtype="Int64"), "1 NaN or infinite"),
        (np.array([1, 10], dtype=np.longdouble) ** 2000, "1 NaN or infinite"),
        ([[1], [1, 2]], "cannot be read as an array"),
        (np.ones((2, 2)), "2 columns"),
        (np.ones((2, 1, 1)), r"shape \(2, 1, 1\)"),
        ([1, 2, 3], "`X` has 2 rows but `y` has 3"),
    ],
    ids=str,
)
def test_what_are_no_numbers_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        check_column(values, 2, "y")


def test_weights_of_nothing_are_refused_unless_allowed():
    with pytest.raises(InputError, match="is zero everywhere"):
        check_weight([0, 0], 2)
    assert check_weight([0, 0], 2, zero=True).tolist() == [0, 0]


@pytest.mark.parametrize("random_state", [-1, "x", 1.5, True])
def test_what_is_no_seed_is_refused(random_state):
    with pytest.raises(InputError, match="random_state="):
        make_generator(random_state)


def test_a_seed_serves_several_purposes():
    draws = {make_generator(7, *purpose).random() for purpose in ((), (1,), (2,))}
    assert len(draws) == 3
    assert make_generator(np.int64(7), 1).random() in draws


def test_units_are_exact_and_their_limits_are_said():
    values = np.array([3e-320, -5e300])
    unit = unit_scale(values)
    assert 0.5 <= np.abs(np.ldexp(values, -unit)).max() < 1
    assert unscaled(0.75, unit, "it") == 0.75 * 2.0**unit
    assert unit_scale(np.zeros(3)) == 0
    with pytest.raises(ValueError, match="the gap is beyond the largest float64"):
        unscaled(1.0, 1024, "the gap")
