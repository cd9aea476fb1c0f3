"""Two real gloo processes that share a fit hold the model of one process; when one fails, the other says so at once."""

import os
import pickle
import signal
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, distributed
from esvdfair.batches import Batch, Data
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models import adapt
from esvdfair.sample import draw, prepare

torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")

OPTIONS = ("targets", "max_mse_increase", "mean_reduction", "covariance_reduction")
SECONDS = 20  # within which a failure must be known everywhere, on a busy machine
FEW_ROWS = Effort(training_rows=90, judging_rows=60)
PARITY = {"targets": ("labels",), "mean_reduction": 20.0, "covariance_reduction": 5.0}
FITS = [
    "exact", "paper", "parity", "transport", "weighted", "empty", "no labels", "lone group", "few rows", "unseeded",
    "validation", "loader", "numbered", "several inputs", "controlled", "sample", "apart",
]  # fmt: skip
ERRORS = [
    "half labelled", "unfitted", "other options", "other model", "other kind", "nothing", "broken", "broken, slow",
    "endless", "nan", "bad option",
]  # fmt: skip


def scenarios(rank, model, X, y, a):
    """name -> what this rank does in it."""
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    n, third = len(y), len(y) // 3
    first_third = slice(0, third) if rank == 0 else slice(third, n)
    second_half = slice(0, 0) if rank == 0 else slice(0, n)
    tenth = slice(0, 10) if rank == 0 else slice(10, 20)

    def fit(part, method="exact", *, model=model, labels=y, weight=None, validation=None, **more):
        labels = None if labels is None else labels[part]
        fair = ESVDFair(model, method=method, effort=Effort.quick(), **more)
        weight = None if weight is None else weight[part]
        return fair.fit(X[part], labels, sensitive_features=a[part], sample_weight=weight, validation=validation)

    def stream(factory):
        return ESVDFair(model, method="exact", effort=Effort.quick()).fit(factory)

    class Rows(Dataset):
        def __len__(self):
            return n

        def __getitem__(self, i):
            return X[i], y[i], a[i]

    def collate(items):
        x, labels, groups = zip(*items, strict=True)
        return np.array(x), np.array(labels), list(groups)

    def loader():
        return DataLoader(Rows(), 50, sampler=DistributedSampler(Rows(), shuffle=False), collate_fn=collate)

    def numbered():
        if rank == 1:
            for start in range(0, n, 100):
                part = slice(start, start + 100)
                labels, codes = np.unique(a[part], return_inverse=True)
                yield Batch(X[part], y[part], tuple(map(str, labels)), codes, None, np.arange(n)[part])

    def broken(slow=0.0):
        for start in range(0, n, 10):
            part = slice(start + rank, start + 10, 2)
            if rank == 1 and start == 20:
                raise ValueError("line 21 of the file is broken")
            time.sleep(slow)
            yield X[part], y[part], a[part]

    def endless():
        for _ in range(1000):
            if rank == 1:
                raise ValueError("the disk is gone")
            time.sleep(0.05)
            yield X, y, a

    def killed():
        yield X[rank::2], y[rank::2], a[rank::2]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(400):
            time.sleep(0.05)
            yield X[:10], y[:10], a[:10]

    def nan():
        part = X[rank::2].copy()
        if rank == 1:
            part[3, 0] = np.nan
        yield part, y[rank::2], a[rank::2]

    def sample():
        rows = Data(X[first_third], y[first_third], a[first_third])
        return draw(prepare(adapt(model), rows, batch_size=77, effort=FEW_ROWS))

    def apart():
        rows = Data(X[first_third], y[first_third], a[first_third])
        return draw(replace(prepare(adapt(model), rows, effort=FEW_ROWS), moments_alone=True)).judging

    def several():
        fair = ESVDFair(sides_network(), method="parity", mean_reduction=20.0, covariance_reduction=5.0)
        return fair.fit(sides(X[second_half]), y[second_half], sensitive_features=a[second_half])

    def controlled():
        job = (X[:, 1] > 0).astype(int)[first_third]
        fair = ESVDFair(model, method="parity", **PARITY)
        return fair.fit(X[first_third], y[first_third], sensitive_features=a[first_third], control_features=job)

    def other():
        return MLPRegressor(hidden_layer_sizes=(8, 8), tol=1e9, n_iter_no_change=3, random_state=1).fit(X, y)

    return {
        "exact": lambda: fit(first_third),
        "paper": lambda: fit(first_third, "paper"),
        "apart": apart,
        "parity": lambda: fit(first_third, "parity", **PARITY),
        "transport": lambda: fit(first_third, "transport", targets=("predictions",), max_mse_increase=0.3),
        "weighted": lambda: fit(first_third, weight=np.where(np.arange(n) < third, 0.0, 1.5)),
        "empty": lambda: fit(second_half),
        "no labels": lambda: fit(first_third, labels=None),
        "lone group": lambda: fit(np.flatnonzero((a == "c") == (rank == 1))),
        "few rows": lambda: fit(tenth),
        "unseeded": lambda: fit(first_third, random_state=None),
        "validation": lambda: fit(first_third, validation=(X[rank::2], y[rank::2], a[rank::2])),
        "loader": lambda: stream(loader()),
        "numbered": lambda: stream(numbered),
        "several inputs": several,
        "controlled": controlled,
        "sample": sample,
        "half labelled": lambda: fit(first_third, labels=y if rank else None),
        "unfitted": lambda: fit(first_third, model=MLPRegressor(hidden_layer_sizes=(8, 8))),
        "other options": lambda: fit(first_third, method=("exact", "paper")[rank]),
        "bad option": lambda: fit(first_third, method=("exact", "exakt")[rank]),
        "other model": lambda: fit(first_third, model=other() if rank else model),
        "other kind": lambda: stream(numbered) if rank else fit(first_third),
        "nothing": lambda: fit(slice(0, 0)),
        "broken": lambda: stream(broken),
        "broken, slow": lambda: stream(lambda: broken(0.1)),
        "endless": lambda: stream(endless),
        "nan": lambda: stream(nan),
        "killed": lambda: stream(killed),
        "last": lambda: fit(first_third),
    }


def sides(x):
    """Rows of a model with two inputs."""
    return {"left": torch.tensor(x[:, :2], dtype=torch.float32), "right": torch.tensor(x[:, 2:], dtype=torch.float32)}


def sides_network():
    class Sides(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.leave = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

        def forward(self, left, right):
            return self.leave(torch.relu(self.body(torch.cat([left, right], dim=1))))

    torch.manual_seed(0)
    return Sides()


def one_rank(rank, folder, rows, wanted):
    """Run scenarios one after the other; a file for each says what it gave or raised, and after how long."""
    dist = torch.distributed
    warnings.simplefilter("ignore")
    distributed.PULSE_SECONDS = 0.3
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    todo = scenarios(rank, *rows)
    for name in wanted:
        dist.barrier()
        start, found = time.monotonic(), {}
        try:
            result = todo[name]()
            shown = sides(rows[1]) if name == "several inputs" else rows[1]
            found["result"] = result
            if name not in ("sample", "apart"):
                found["result"] = result.predict(shown), result.summary_, result.curve_.points
        except Exception as error:
            found["error"] = type(error).__name__, str(error)
        found["seconds"] = time.monotonic() - start
        with open(folder / f"{name}.{rank}", "wb") as file:
            pickle.dump(found, file)
    if "killed" not in wanted:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    a = rng.choice(["a", "b", "c"], 600, p=[0.5, 0.3, 0.2])
    X = rng.normal(size=(600, 4))
    X[:, 0] += np.where(a == "b", 1.0, 0.0)
    y = X @ [1.0, 0.5, 0.2, 0.0] + np.abs(X[:, 3]) + 0.3 * rng.normal(size=600)
    model = MLPRegressor(hidden_layer_sizes=(8, 8), solver="lbfgs", max_iter=60, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # good enough to be repaired
        model.fit(X, y)
    return model, X, y, a


def read(folder, name):
    found = []
    for rank in (0, 1):
        with open(folder / f"{name}.{rank}", "rb") as file:
            found.append(pickle.load(file))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, rows, run_ranks):
    """What both ranks got in a scenario; all of them run in one pair of processes, which failures must not disturb."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(one_rank, folder, rows, [*FITS, *ERRORS, "last"], seconds=300) == [0, 0]
    return lambda name: read(folder, name)


def one_process(rows, method="exact", order=None, **more):
    model, X, y, a = rows
    order = slice(None) if order is None else order
    options = {name: more.pop(name) for name in OPTIONS if name in more}
    fair = ESVDFair(model, method=method, effort=Effort.quick(), **options)
    more = {"y": y[order], "sensitive_features": a[order]} | more
    return fair.fit(X[order], **more)


def check(ranks, name, expected, X):
    first, second = (found["result"] for found in ranks(name))
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1:] == second[1:]
    np.testing.assert_allclose(first[0], expected.predict(X), rtol=0, atol=1e-6)
    assert first[1]["rows"] == expected.summary_["rows"]
    assert first[1]["ks_after"] == pytest.approx(expected.summary_["ks_after"], abs=1e-9)


@pytest.mark.parametrize("method", ["exact", "paper"])
def test_two_ranks_hold_the_model_of_one_process(ranks, rows, method):
    check(ranks, method, one_process(rows, method), rows[1])


def test_parity_of_two_ranks_is_that_of_one_process(ranks, rows):
    expected = one_process(rows, "parity", **PARITY)
    check(ranks, "parity", expected, rows[1])


def test_transport_of_two_ranks_is_that_of_one_process(ranks, rows):
    expected = one_process(rows, "transport", targets=("predictions",), max_mse_increase=0.3)
    check(ranks, "transport", expected, rows[1])


def test_a_rank_may_have_no_rows(ranks, rows):
    check(ranks, "empty", one_process(rows), rows[1])


def test_a_group_may_be_on_one_rank_only(ranks, rows):
    order = np.argsort(rows[3] == "c", kind="stable")
    check(ranks, "lone group", one_process(rows, order=order), rows[1])


def test_all_weights_of_a_rank_may_be_zero(ranks, rows):
    weight = np.where(np.arange(600) < 200, 0.0, 1.5)
    check(ranks, "weighted", one_process(rows, sample_weight=weight), rows[1])


def test_labels_are_not_needed(ranks, rows):
    check(ranks, "no labels", one_process(rows, y=None), rows[1])


def test_validation_is_sharded_too(ranks, rows):
    _, X, y, a = rows
    both = np.concatenate([np.arange(0, 600, 2), np.arange(1, 600, 2)])
    check(ranks, "validation", one_process(rows, validation=(X[both], y[both], a[both])), X)


def test_too_few_rows_are_counted_over_all_ranks(ranks, rows):
    with pytest.warns(ESVDFairWarning, match="too few rows"):
        expected = one_process(rows, order=slice(0, 20))
    check(ranks, "few rows", expected, rows[1])


def test_a_distributed_sampler_deals_out_the_rows_of_one_process(ranks, rows):
    check(ranks, "loader", one_process(rows), rows[1])


def test_batches_keep_the_numbers_they_carry_and_a_stream_may_be_empty(ranks, rows):
    check(ranks, "numbered", one_process(rows), rows[1])


def test_a_rank_without_rows_meets_several_inputs(ranks):
    first, second = (found["result"] for found in ranks("several inputs"))
    np.testing.assert_array_equal(first[0], second[0])
    assert np.ptp(first[0]) > 0
    assert first[1]["rows"] == ranks("empty")[0]["result"][1]["rows"]


def test_without_a_seed_all_ranks_take_that_of_the_first(ranks):
    first, second = (found["result"] for found in ranks("unseeded"))
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1:] == second[1:]


def test_moments_and_bounded_sample_are_those_of_one_process(ranks, rows):
    model, X, y, a = rows
    whole = draw(prepare(adapt(model), Data(X, y, a), effort=FEW_ROWS))
    assert np.bincount(whole.training.codes).tolist() == [30, 30, 30]
    first, second = (found["result"] for found in ranks("sample"))
    for seen in (first, second):
        assert (seen.labels, seen.sizes, seen.judging_sizes) == (whole.labels, whole.sizes, whole.judging_sizes)
        for name in ("means", "scatters"):
            mine, all_rows = getattr(seen.moments, name), getattr(whole.moments, name)
            np.testing.assert_allclose(mine, all_rows, rtol=0, atol=1e-10 * np.abs(all_rows).max())
    assert len(second.training) == len(second.judging) == 0  # the first rank solves
    for mine, all_rows in ((first.training, whole.training), (first.judging, whole.judging)):
        np.testing.assert_array_equal(mine.codes, all_rows.codes)
        np.testing.assert_array_equal(mine.y, all_rows.y)
        np.testing.assert_allclose(mine.features, all_rows.features, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(mine.prediction, all_rows.prediction, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(mine.weight, all_rows.weight, rtol=1e-12)


def test_features_of_rows_that_judge_stay_on_their_ranks_where_moments_are_enough(ranks, rows):
    """What is needed of them is what candidates predict, and that is small."""
    model, X, y, a = rows
    whole = draw(prepare(adapt(model), Data(X, y, a), effort=FEW_ROWS)).judging
    first, second = (found["result"] for found in ranks("apart"))
    np.testing.assert_array_equal(first.codes, whole.codes)
    assert len(second) == 0
    assert len(first.features) > 0
    assert len(second.features) > 0
    for mine, places in zip((first, second), first.places, strict=True):
        np.testing.assert_allclose(mine.features, whole.features[places], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half labelled", "the ranks [1] have labels and the ranks [0] have none"),
        ("unfitted", "each rank would fit another one on its shard"),
        ("other options", "method is 'exact' on rank 0 and 'paper' on rank 1"),
        ("other model", "rank 1 holds another model than rank 0"),
        ("other kind", "X is a stream on the ranks [1] and arrays on the others"),
        ("nothing", "n_samples=0"),
    ],
)
def test_what_is_wrong_for_all_is_an_error_on_all(ranks, name, message):
    for found in ranks(name):
        assert found["error"][0] in ("ValueError", "NotFittedError")
        assert message in found["error"][1]
        assert found["seconds"] < SECONDS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "line 21 of the file is broken"),
        ("broken, slow", "line 21 of the file is broken"),
        ("endless", "the disk is gone"),
        ("nan", "X holds 1 NaN"),
        ("bad option", "method='exakt'"),
    ],
)
def test_a_rank_that_raises_ends_the_other_within_seconds_though_it_lives_on(ranks, name, message):
    first, second = ranks(name)
    assert second["error"][0] in ("ValueError", "InputError")
    assert message in second["error"][1]
    assert first["error"][0] == "RankError"
    assert first["error"][1].startswith(f"rank 1 failed: {second['error'][0]}: ")
    assert message in first["error"][1]
    assert first["seconds"] < SECONDS


def test_after_failures_the_ranks_can_fit_again(ranks, rows):
    check(ranks, "last", one_process(rows), rows[1])


def test_a_rank_that_is_killed_ends_the_other_within_seconds(tmp_path, rows, run_ranks):
    codes = run_ranks(one_rank, tmp_path, rows, ["killed"])
    assert codes[1] == -signal.SIGKILL
    with open(tmp_path / "killed.0", "rb") as file:
        found = pickle.load(file)
    kind, words = found["error"]
    assert kind == "RankError"
    assert words.startswith("lost the connection to another rank: it has ended or cannot be reached")
    assert "pytorch" not in words
    assert found["seconds"] < SECONDS


def test_strata_are_those_of_all_ranks(rows, ranks):
    model, X, y, a = rows
    fair = ESVDFair(model, method="parity", **PARITY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        fair.fit(X, y, sensitive_features=a, control_features=(X[:, 1] > 0).astype(int))
    for found in ranks("controlled"):
        predicted, summary, _ = found["result"]
        np.testing.assert_allclose(predicted, fair.predict(X), atol=1e-6 * np.std(predicted))
        assert summary["ks_raw_before"] == pytest.approx(fair.summary_["ks_raw_before"])
        assert summary["ks_before"] == pytest.approx(fair.summary_["ks_before"])
        assert summary["ks_before"] != summary["ks_raw_before"]
