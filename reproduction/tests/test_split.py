"""70/15/15, disjoint, repeatable, and scaled without looking at held-out rows."""

import numpy as np
import pandas as pd

from reproduction.datasets import Unscaled, load, split


def made_up(rows: int = 200, **changes: object) -> Unscaled:
    rng = np.random.default_rng(0)
    number = np.arange(rows, dtype=float)
    fields: dict[str, object] = {
        "X": pd.DataFrame({"row": number, "z": rng.normal(5, 3, rows), "t": rng.uniform(10, 30, rows), "one": 1.0}),
        "y": pd.Series(number),
        "sensitive_features": pd.Series(np.where(number % 3 == 0, "a", "b")),
        "name": "made up",
        "target_name": "y",
        "sensitive_name": "s",
        "standardize": ("z", "one"),
        "rescale": ("t",),
    }
    return Unscaled(**(fields | changes))


def test_sizes_are_disjoint_and_complete() -> None:
    parts = split(made_up(), 33)
    rows = [part.y for part in (parts.train, parts.validation, parts.test)]
    assert [len(r) for r in rows] == [140, 30, 30]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(200))


def test_rows_stay_together() -> None:
    for part in (split(made_up(), 33).train, split(made_up(), 33).test):
        np.testing.assert_array_equal(part.X[:, 0], part.y)
        np.testing.assert_array_equal(part.sensitive_features, np.where(part.y % 3 == 0, "a", "b"))


def test_repeats_by_seed() -> None:
    first, again, other = split(made_up(), 33), split(made_up(), 33), split(made_up(), 34)
    np.testing.assert_array_equal(first.test.X, again.test.X)
    assert not np.array_equal(np.sort(first.test.y), np.sort(other.test.y))


def test_heldout_is_validation_and_test() -> None:
    parts = split(made_up(), 40)
    assert len(parts.heldout.y) == 60
    np.testing.assert_array_equal(parts.heldout.X, np.vstack([parts.validation.X, parts.test.X]))


def test_scaling_knows_the_training_rows_only() -> None:
    dataset = made_up()
    train = split(dataset, 33).train
    np.testing.assert_allclose([train.X[:, 1].mean(), train.X[:, 1].std()], [0, 1], atol=1e-12)
    assert (train.X[:, 2].min(), train.X[:, 2].max()) == (0, 1)

    heldout = ~np.isin(np.arange(200), train.y)
    X = dataset.X.copy()
    X.loc[heldout, ["z", "t"]] += 1000.0
    moved = split(made_up(X=X), 33)
    np.testing.assert_array_equal(moved.train.X, train.X)
    assert moved.test.X[:, 1].min() > 100


def test_a_constant_column_is_centred_not_divided_by_zero() -> None:
    np.testing.assert_array_equal(split(made_up(), 33).test.X[:, 3], 0.0)


def test_columns_that_came_scaled_stay() -> None:
    dataset = made_up(standardize=(), rescale=())
    part = split(dataset, 33).test
    np.testing.assert_array_equal(part.X, dataset.X.to_numpy()[part.y.astype(int)])


def test_does_not_touch_the_data_set() -> None:
    dataset = made_up()
    before = dataset.X.copy()
    split(dataset, 33)
    pd.testing.assert_frame_equal(dataset.X, before)


def test_wages() -> None:
    parts = split(load("wages", "clean"), 33)
    assert [len(p.y) for p in (parts.train, parts.validation, parts.test)] == [4734, 1014, 1015]
    np.testing.assert_allclose(parts.train.X.std(axis=0), 1)
    assert abs(parts.test.X.mean()) > 1e-6
