"""Summaries add up: whatever the parts, their order and the order in which they are added, the repair is the same."""

import pickle

import numpy as np
import pytest
import torch
from skl2onnx import to_onnx
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, GroupMoments, Summary, summarise
from esvdfair.batches import row_ids
from esvdfair.summary import level

ROWS = 3000


@pytest.fixture(scope="module")
def people():
    rng = np.random.default_rng(0)
    a = np.where(rng.random(ROWS) < 0.2, "b", "a")
    X = rng.normal(size=(ROWS, 5)) + (a == "b")[:, None] * [0.5, 0, 0, 0, 0]
    y = X[:, :3].sum(axis=1) + 0.3 * X[:, 3] ** 2 + rng.normal(size=ROWS)
    return X, y, a, rng.uniform(0.5, 2, ROWS), np.where(rng.random(ROWS) < 0.4, "x", "y")


@pytest.fixture(scope="module")
def model(people):
    X, y, *_ = people
    return MLPRegressor(hidden_layer_sizes=(16, 8), max_iter=30, random_state=0, tol=1.0).fit(X, y)


def part(model, people, index, **options):
    X, y, a, *_ = people
    return summarise(model, X[index], y[index], sensitive_features=a[index], **options)


def repaired(model, summary, X, **options):
    return ESVDFair(model, target_ks=0.2, effort=Effort.quick(), **options).fit_summary(summary).predict(X)


@pytest.mark.parametrize("method", ["transport", "parity"])
@pytest.mark.parametrize("bound", [160_000, 1000])
def test_parts_with_row_ids_give_the_model_of_fit_whatever_their_order(model, people, method, bound):
    X, y, a, *_ = people
    rng = np.random.default_rng(1)
    effort = Effort(**{**vars(Effort.quick()), "rows": bound})
    options = {"method": method, "target_ks": 0.2}
    expected = ESVDFair(model, effort=effort, **options).fit(X, y, sensitive_features=a).predict(X)
    for _ in range(2):
        order = rng.permutation(ROWS)
        cuts = [0, 1, 4, *np.sort(rng.choice(np.arange(5, ROWS), 4, replace=False))]  # parts of 0, 1 and 3 rows
        parts = [
            part(model, people, index, row_id=index, rows=bound, batch_size=int(rng.integers(100, 900)))
            for index in np.split(order, cuts)
        ]
        rng.shuffle(parts)
        while len(parts) > 1:
            i = int(rng.integers(len(parts) - 1))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert len(parts[0].kept) == min(bound, ROWS)
        found = ESVDFair(model, effort=effort, **options).fit_summary(parts[0]).predict(X)
        assert np.abs(found - expected).max() <= 1e-6 * expected.std()


def torch_model(X, y):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        ((network(torch.as_tensor(X)) - torch.as_tensor(y)[:, None]) ** 2).mean().backward()
        optimizer.step()
    return network


def onnx_model(X, y):
    network = MLPRegressor(hidden_layer_sizes=(16,), max_iter=30, random_state=0, tol=1.0).fit(X, y)
    return to_onnx(network, X[:1]).SerializeToString()


@pytest.mark.parametrize(
    "make",
    [
        torch_model,
        onnx_model,
        lambda X, y: LinearRegression().fit(X, y),
        lambda X, y: HistGradientBoostingRegressor().fit(X, y),
    ],
    ids=["torch", "onnx", "linear", "trees"],
)
def test_of_every_kind_of_model_a_summary_gives_the_model_of_fit(people, make):
    X, y, a, *_ = people
    model, options = make(X, y), {"target_ks": 0.2, "effort": Effort.quick()}
    rows, new = (slice(0, 2500), slice(2500, None))
    x = torch.as_tensor(X) if isinstance(model, torch.nn.Module) else X
    validation = x[new], y[new], a[new]
    expected = ESVDFair(model, **options).fit(x[rows], y[rows], sensitive_features=a[rows], validation=validation)
    summary = summarise(model, x[rows], y[rows], sensitive_features=a[rows])
    found = ESVDFair(model, **options).fit_summary(summary, validation=validation)
    before, after = expected.predict(x), found.predict(x)
    assert np.abs(after - before).max() <= (1e-3 if isinstance(model, bytes) else 1e-6) * before.std()


def test_every_row_is_kept_or_in_the_rest(model, people):
    whole, some = part(model, people, slice(None)), part(model, people, slice(None), rows=500)
    assert len(some.kept) == 500
    assert some.group_rows == whole.group_rows
    everyone = GroupMoments().merge(some.rest)
    everyone.update_codes(some.kept.features, some.groups, some.kept.codes, some.kept.weight, beside=some.kept.y)
    expected = GroupMoments()
    expected.update_codes(whole.kept.features, whole.groups, whole.kept.codes, whole.kept.weight, beside=whole.kept.y)
    np.testing.assert_allclose(everyone.scatters, expected.scatters, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(everyone.rows, expected.rows)


@pytest.mark.parametrize("streams", [False, True])
def test_without_ids_the_order_of_batches_and_sums_does_not_matter(model, people, streams):
    X, y, a, *_ = people
    thirds = np.array_split(np.arange(ROWS), 3)
    parts = [part(model, people, index, part=f"shard {i}", batch_size=170) for i, index in enumerate(thirds)]
    if streams:
        again = [
            summarise(model, iter([(X[j], y[j], a[j]) for j in np.array_split(index, 5)]), part=f"shard {i}")
            for i, index in enumerate(thirds)
        ]
    else:
        again = [part(model, people, index, part=f"shard {i}") for i, index in enumerate(thirds)]
    one, other = repaired(model, sum(parts), X), repaired(model, again[2] + (again[0] + again[1]), X)
    assert np.abs(one - other).max() <= 1e-6 * one.std()


def test_batches_may_carry_row_ids(model, people):
    X, y, a, *_ = people
    order = np.random.default_rng(0).permutation(ROWS)
    batches = [(X[i], y[i], a[i], None, None, i) for i in np.array_split(order, 4)]
    expected = repaired(model, part(model, people, slice(None)), X)
    assert np.abs(repaired(model, summarise(model, iter(batches)), X) - expected).max() <= 1e-6 * expected.std()


def test_parts_of_one_group_weights_and_strata_add_up(model, people):
    X, y, a, w, s = people
    options = {"target_ks": 0.2, "effort": Effort.quick()}
    fair = ESVDFair(model, **options).fit(X, y, sensitive_features=a, sample_weight=w, control_features=s)
    parts = [
        summarise(model, X[i], y[i], sensitive_features=a[i], sample_weight=w[i], control_features=s[i], row_id=i)
        for i in (np.flatnonzero((a == group) & (s == stratum)) for group in "ba" for stratum in "yx")
    ]
    expected = fair.predict(X)
    assert np.abs(repaired(model, sum(parts), X) - expected).max() <= 1e-6 * expected.std()


def test_the_same_rows_twice_are_refused(model, people):
    one = part(model, people, slice(0, 500))
    with pytest.raises(ValueError, match=r"`part`, or each row its own `row_id`"):
        one + part(model, people, slice(0, 500))
    with pytest.raises(ValueError, match=r"`part`"):  # two parts without names
        one + part(model, people, slice(500, 900))
    assert (one + part(model, people, slice(500, 900), part=1)).rows.sum() == 900


def test_what_differs_is_not_added(model, people):
    X, y, a, w, _ = people
    one, i = part(model, people, slice(0, 500)), slice(500, 900)
    other = MLPRegressor(hidden_layer_sizes=(16, 8), max_iter=30, random_state=1, tol=1.0).fit(X, y)
    with pytest.raises(ValueError, match="different models"):
        one + part(other, people, i, part=1)
    with pytest.raises(ValueError, match="`labelled`"):
        one + summarise(model, X[i], sensitive_features=a[i], part=1)
    with pytest.raises(ValueError, match="`weighted`"):
        one + summarise(model, X[i], y[i], sensitive_features=a[i], sample_weight=w[i], part=1)
    with pytest.raises(ValueError, match="another model"):
        ESVDFair(other).fit_summary(one)
    with pytest.raises(ValueError, match="more than once"):
        ESVDFair(model, method="exact").fit_summary(one)
    with pytest.raises(TypeError):
        one + 1


def test_totals_keep_what_is_sent_small_and_change_nothing(model, people):
    X, _, a, *_ = people
    totals = {group: int((a == group).sum()) for group in "ab"}
    halves = np.array_split(np.arange(ROWS), 2)
    plain = [part(model, people, i, row_id=i, rows=600) for i in halves]
    small = [part(model, people, i, row_id=i, rows=600, group_rows=totals) for i in halves]
    assert sum(len(each.kept) for each in small) < sum(len(each.kept) for each in plain)
    one, other = sum(plain), sum(small)
    np.testing.assert_array_equal(np.sort(one.kept.id), np.sort(other.kept.id))
    expected = repaired(model, one, X)
    assert np.abs(repaired(model, other, X) - expected).max() <= 1e-6 * expected.std()


def test_files_and_pickles_hold_all_of_it_and_say_that_they_contain_rows(model, people, tmp_path):
    X, *_ = people
    one = part(model, people, slice(None), rows=800)
    one.save(tmp_path / "one.summary")
    loaded, copied = Summary.load(tmp_path / "one.summary"), pickle.loads(pickle.dumps(one))
    assert b"contains rows" in (tmp_path / "one.summary").read_bytes()
    assert "of which it contains 800" in repr(loaded)
    expected = repaired(model, one, X)
    for each in (loaded, copied):
        np.testing.assert_array_equal(repaired(model, each, X), expected)
    empty = part(model, people, slice(0, 0))
    empty.save(tmp_path / "empty.summary")
    assert (Summary.load(tmp_path / "empty.summary") + one).rows.sum() == ROWS
    content = (tmp_path / "one.summary").read_bytes()
    (tmp_path / "bad.summary").write_bytes(content[:5000] + b"x" + content[5001:])
    with pytest.raises(ValueError, match="not a summary file of esvdfair, or damaged"):
        Summary.load(tmp_path / "bad.summary")


def test_a_summary_of_other_rows_validates(model, people):
    X, y, a, *_ = people
    options = {"target_ks": 0.2, "effort": Effort.quick()}
    i, j = slice(0, 2000), slice(2000, ROWS)
    expected = ESVDFair(model, **options).fit(X[i], y[i], sensitive_features=a[i], validation=(X[j], y[j], a[j]))
    for validation in (part(model, people, j), (X[j], y[j], a[j])):
        fair = ESVDFair(model, **options).fit_summary(part(model, people, i), validation=validation)
        np.testing.assert_allclose(fair.predict(X), expected.predict(X), atol=1e-9)
        assert fair.summary_["evaluated_on"] == "validation"


@pytest.mark.parametrize(("counts", "bound", "expected"), [([5, 5], 20, 5), ([3, 100, 100], 43, 20), ([7, 8, 9], 3, 1)])
def test_small_groups_are_kept_whole(counts, bound, expected):
    assert level(counts, bound) == expected


def test_ids_are_positions_of_part_0_numbers_or_texts():
    np.testing.assert_array_equal(row_ids(None, 0, range(5, 8)), row_ids([5, 6, 7], 0, range(3)))
    assert len({*row_ids(None, 1, range(3)).tolist(), *row_ids(["a", "b", "c"], 0, range(3)).tolist()}) == 6
    for wrong in ([0.5, 1.0], [None, "a"], ["a", float("nan")], [1, 2, 3]):
        with pytest.raises(ValueError, match="`row_id`"):
            row_ids(wrong, 0, range(2))


def test_rows_of_weight_zero_leave(model, people):
    X, y, groups, *_ = people
    weight = np.where(np.arange(len(y)) % 3 == 0, 0.0, 2.0)
    found = summarise(model, X, y, sensitive_features=groups, sample_weight=weight)
    kept = weight > 0
    alone = summarise(
        model,
        X[kept],
        y[kept],
        sensitive_features=groups[kept],
        sample_weight=weight[kept],
        row_id=np.flatnonzero(kept),
    )
    assert found.mass.sum() == weight.sum()
    assert repaired(model, found, X) == pytest.approx(repaired(model, alone, X), abs=1e-9)


def test_predictions_that_are_not_finite_are_an_error(people):
    X, y, groups, *_ = people
    model = LinearRegression().fit(X, y)
    model.coef_ = model.coef_ * np.nan
    with pytest.raises(ValueError, match="NaN"):
        summarise(model, X, y, sensitive_features=groups)


def test_an_empty_batch_changes_nothing(model, people):
    X, y, groups, *_ = people

    def batches(empty):
        yield X[:100], y[:100], groups[:100]
        if empty:
            yield X[:0], y[:0], groups[:0]
        yield X[100:], y[100:], groups[100:]

    fits = [repaired(model, summarise(model, lambda empty=empty: batches(empty)), X) for empty in (False, True)]
    assert np.array_equal(*fits)
