"""Moments of several sites add up to those of all rows; what must not be added is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from esvdfair import ESVDFairWarning
from esvdfair.federated import SiteMoments, collect_moments, merge_moments

FEATURES = ["age", "hours", "school"]


def collected(model, data, keep=slice(None), **options):
    rows = {"sensitive_features": data.a[keep], "sample_weight": data.w[keep]}
    return collect_moments(model, data.X[keep], data.y[keep], **rows, **options)


def assert_same_moments(one, other):
    assert one.labels == other.labels
    np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_allclose(one.counts, other.counts, rtol=1e-12)
    np.testing.assert_allclose(one.weight_squares, other.weight_squares, rtol=1e-12)
    np.testing.assert_allclose(one.means, other.means, rtol=1e-10)
    np.testing.assert_allclose(one.scatters, other.scatters, rtol=0, atol=1e-10 * np.abs(other.scatters).max())


@pytest.mark.parametrize("kind", ["torch", "scikit-learn"])
def test_two_sites_equal_one(make_network, mlp, people, kind, tmp_path):
    model, data = make_network("affine") if kind == "torch" else mlp, people()
    first = np.arange(600) < 250
    for name, keep in (("a", first), ("b", ~first)):
        collected(model, data, keep).save(tmp_path / name)
    merged = merge_moments([tmp_path / "a", tmp_path / "b"])
    whole = collected(model, data)
    assert_same_moments(merged.moments, whole.moments)
    assert merged.model == whole.model
    assert [(site.name, sum(site.rows)) for site in merged.sites] == [("a", 250), ("b", 350)]
    np.testing.assert_allclose(merged.figures().means, whole.figures().means, rtol=1e-10)


def test_the_moments_are_of_the_inputs_of_the_last_layer_and_the_label(make_network, people):
    model, data = make_network(), people()
    with torch.no_grad():
        h = torch.relu(model.hidden(torch.as_tensor(data.X))).numpy()
    rows = np.column_stack([h, data.y])
    moments = collect_moments(model, data.X, data.y, sensitive_features=data.a, batch_size=70).moments
    for g, label in enumerate(moments.labels):
        np.testing.assert_allclose(moments.means[g], rows[data.a == label].mean(axis=0), rtol=1e-10)
        np.testing.assert_allclose(moments.covariances()[g], np.cov(rows[data.a == label].T), atol=1e-10)
    bare = collect_moments(model, data.X, sensitive_features=data.a)
    assert (bare.moments.width, bare.labelled) == (6, False)


def test_batches_of_a_stream(make_network, people):
    model, data = make_network(), people()

    def batches():
        for start in range(0, 600, 200):
            part = slice(start, start + 200)
            yield data.X[part], data.y[part], data.a[part], data.w[part]

    assert_same_moments(collect_moments(model, batches).moments, collected(model, data).moments)


def test_merging_is_associative_and_changes_no_part(make_network, people):
    model, data = make_network(), people()
    parts = [collected(model, data, np.arange(600) % 3 == i) for i in range(3)]
    before = [part.moments.scatters.copy() for part in parts]
    nested = merge_moments([merge_moments(parts[:2]), parts[2]])
    assert_same_moments(nested.moments, merge_moments(parts).moments)
    assert nested.sites == merge_moments(parts).sites
    for part, scatters in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part.moments.scatters, scatters)


def test_names_of_columns_are_kept(make_network, people):
    data = people()
    X, y, a = pd.DataFrame(data.X, columns=FEATURES), pd.Series(data.y, name="income"), pd.DataFrame({"sex": data.a})
    site = collect_moments(make_network(), X, y, sensitive_features=a)
    assert (site.features, site.target, site.sensitive) == (tuple(FEATURES), "income", ("sex",))
    nameless = collect_moments(make_network(), data.X + 1, data.y, sensitive_features=data.a)
    assert (nameless.features, nameless.target, nameless.sensitive) == (None, None, None)
    both = merge_moments([nameless, site])  # what one site does not know cannot differ
    assert (both.features, both.target, both.sensitive) == (tuple(FEATURES), "income", ("sex",))


def test_a_site_may_have_one_group_alone(make_network, people):
    model, data = make_network(), people()
    with pytest.warns(ESVDFairWarning, match="'a' is not in part 2; 'b' is not in part 1"):
        merged = merge_moments([collected(model, data, data.a == g) for g in "ab"])
    assert_same_moments(merged.moments, collected(model, data).moments)


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_small_group_does_not_leave(make_network, people):
    model, data = make_network(), people()
    keep = (data.a == "a") | (np.cumsum(data.a == "b") <= 9)
    with pytest.raises(ValueError, match=r"min_rows=10: 'b' has 9\. .* those of a single person are that person's row"):
        collected(model, data, keep)
    keep = (data.a == "a") | (np.cumsum(data.a == "b") <= 30)
    assert collected(model, data, keep, min_rows=5).moments.rows[1] >= 27
    one = (data.a == "a") | (np.cumsum(data.a == "b") <= 1)
    row = collected(model, data, one, unsafe=True)  # why there is a minimum
    person = int(np.flatnonzero(data.a == "b")[0])
    assert row.moments.means[1][-1] == pytest.approx(data.y[person])


@pytest.mark.parametrize("empty", [lambda: iter([]), np.zeros((0, 3))])
def test_no_rows(make_network, empty):
    rows = {} if callable(empty) else {"y": [], "sensitive_features": []}
    with pytest.raises(ValueError, match=r"no rows|empty"):
        collect_moments(make_network(), empty, **rows)


def test_a_model_of_another_kind(people):
    with pytest.raises(TypeError, match="cannot repair a"):
        collect_moments(object(), people().X, sensitive_features=people().a)


def test_parts_that_do_not_belong_together(make_network, people):
    data, more = people(seed=0), people(seed=1)
    names = {"features": tuple(FEATURES), "sensitive": ("sex",), "target": "income"}
    one = replace(collected(make_network(), data), **names)
    other = replace(collected(make_network(), more), **names)
    assert merge_moments([one, other]).rows == 1200
    with pytest.raises(
        ValueError, match=rf"part 2 and part 1 .* the model \(SHA-256\): {'[0-9a-f]' * 64} in part 2, [0-9a-f]+"
    ):
        merge_moments([one, collected(make_network(seed=1), more)])
    with pytest.raises(ValueError, match=r"the layer: last2 in part 3, last in part 1"):
        merge_moments([one, other, replace(other, layer=replace(other.layer, name="last2"))])
    bare = replace(collect_moments(make_network(), more.X, sensitive_features=more.a), **names)
    with pytest.raises(ValueError, match=r"the label: no label in part 2, labelled in part 1"):
        merge_moments([one, bare])
    with pytest.raises(ValueError, match=r"the sensitive columns: 'race' as column 1 in part 2, 'sex' as column 1"):
        merge_moments([one, replace(other, sensitive=("race",))])
    with pytest.raises(ValueError, match=r"the target column: \\x1b\[31mx in part 2, income in part 1"):
        merge_moments([one, replace(other, target="\x1b[31mx")])  # from a file, and printed on a terminal
    with pytest.raises(ValueError, match=r"the target column: wage in part 2, income in part 1"):
        merge_moments([one, replace(other, target="wage")])
    with pytest.raises(ValueError, match=r"the features: 'school' as column 2 in part 2, 'hours' as column 2"):
        merge_moments([one, replace(other, features=("age", "school", "hours"))])
    with pytest.raises(ValueError, match=r"the features: no column 3 in part 2, 'school' as column 3"):
        merge_moments([one, replace(other, features=("age", "hours"))])
    with pytest.raises(ValueError, match="number of the layer's inputs: 5 in part 2, 6"):
        merge_moments([one, replace(collected(make_network(width=5), more), model=one.model)])
    with pytest.raises(ValueError, match="got no moments"):
        merge_moments([])


def test_rows_are_not_counted_twice(make_network, people, tmp_path):
    one, other = (collected(make_network(), people(seed=seed)) for seed in (0, 1))
    with pytest.raises(ValueError, match="part 3 holds the same rows as part 1; merged, they would count twice"):
        merge_moments([one, other, collected(make_network(), people(seed=0))])  # collected a second time
    both = merge_moments([one, other])
    both.save(tmp_path / "both")
    other.save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"other' holds the same rows as '.*both'"):
        merge_moments([tmp_path / "both", tmp_path / "other"])  # inside one that was merged before


# --- several processes -------------------------------------------------------------------------------------------


def small_network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1)).double()


def one_rank(rank, folder, data):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for cut in (200, 600):  # of 600 rows: the second shard is empty once
        own = slice(0, cut) if rank == 0 else slice(cut, None)
        rows = [column[own] for column in (data.X, data.y, data.a)]
        batches = [rows] if len(rows[1]) else []
        collect_moments(small_network(), lambda batches=batches: iter(batches)).save(folder / f"{rank}-{cut}.moments")
    dist.destroy_process_group()


def test_ranks_add_up_their_rows(people, tmp_path, run_ranks):
    data = people()
    assert run_ranks(one_rank, tmp_path, data) == [0, 0]
    whole = collect_moments(small_network(), data.X, data.y, sensitive_features=data.a)
    for name in ("0-200", "1-200", "0-600", "1-600"):
        found = SiteMoments.load(tmp_path / f"{name}.moments")
        assert_same_moments(found.moments, whole.moments)
        assert (found.model, found.layer.name, found.labelled) == (whole.model, "2", True)
