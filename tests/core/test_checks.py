"""Labels of every kind become sorted labels and codes."""

import numpy as np
import pandas as pd
import pytest

from esvdfair.core.checks import encode_groups


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


def test_torch_labels():
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    assert encode_groups(torch.tensor([3, 1]))[0] == (1, 3)
