"""ESVDFair on models with several inputs, in memory and in loaders, and on objects that hold a network."""

import warnings
from collections import UserDict

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.batches import Batch
from esvdfair.explain import explain_directions, scan_layers

torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")

# Untrained networks do for what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")
nn = torch.nn
DataLoader = torch.utils.data.DataLoader

METHODS = ["paper", "exact", "parity", "transport"]
QUICK = {"effort": Effort.quick(), "targets": "labels"}


class Words(nn.Module):
    """A regressor of token ids and their mask beside a table of numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.leave = nn.Embedding(12, 6), nn.Linear(9, 12), nn.Linear(12, 1)

    def forward(self, ids, mask, numbers):
        shown = mask.unsqueeze(-1).to(numbers.dtype)
        pooled = (self.embed(ids) * shown).sum(1) / shown.sum(1)
        return self.leave(torch.relu(self.body(torch.cat([pooled, numbers], dim=1))))


class Encoding(UserDict):
    """A mapping that is no dict, as the tokenizers of Hugging Face give."""


def people(rows=600, seed=0):
    rng = np.random.default_rng(seed)
    sex = rng.integers(0, 2, rows)
    ids = torch.tensor(rng.integers(0, 10, (rows, 5)) + 2 * sex[:, None])
    mask = torch.tensor((np.arange(5) < rng.integers(1, 6, (rows, 1))).astype(int))
    numbers = torch.tensor(rng.normal(size=(rows, 3)) + [1, 0, 0] * sex[:, None], dtype=torch.float32)
    y = (ids * mask).sum(1) / mask.sum(1) / 3 + numbers.sum(1)
    return {"ids": ids, "mask": mask, "numbers": numbers}, y.float(), sex


@pytest.fixture(scope="module")
def words():
    X, y, sex = people()
    torch.manual_seed(0)
    model = Words()
    return model, X, y, sex


def batches(X, y, sex, size=100):
    """A list of batches, in order; each with several inputs by name."""
    parts = [slice(start, start + size) for start in range(0, len(y), size)]
    return [({name: column[part] for name, column in X.items()}, y[part], sex[part]) for part in parts]


class Loader:
    """What can be read again and again, without being a list."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("method", METHODS)
def test_several_inputs_by_name_in_order_and_in_loaders_give_one_repair(words, method):
    model, X, y, sex = words
    options = QUICK | {"method": method}
    whole = ESVDFair(model, **options).fit(X, y, sensitive_features=sex)
    assert whole.summary_["ks_after"] < 0.8 * whole.summary_["ks_before"]
    assert type(whole.estimator_) is Words
    expected = whole.predict(X)
    np.testing.assert_array_equal(expected, whole.estimator_.eval()(**X).detach().numpy().ravel())
    given = {
        "a tuple": tuple(X.values()),
        "a list": list(X.values()),
        "a mapping that is no dict": Encoding(X),
        "arrays": {name: part.numpy() for name, part in X.items()},
    }
    for what, several in given.items() if method == "parity" else ():
        fair = ESVDFair(model, **options).fit(several, y, sensitive_features=sex)
        np.testing.assert_array_equal(fair.predict(several), expected, err_msg=what)
    streamed = ESVDFair(model, **options).fit(Loader(batches(X, y, sex)))
    np.testing.assert_allclose(streamed.predict(X), expected, atol=2e-3)


def test_loaders_to_validate_and_to_predict(words):
    model, X, y, sex = words
    fresh, options = people(seed=1), QUICK | {"method": "parity"}
    apart = ESVDFair(model, **options).fit(X, y, sensitive_features=sex, validation=fresh)
    loaded = ESVDFair(model, **options).fit(Loader(batches(X, y, sex)), validation=Loader(batches(*fresh)))
    assert loaded.summary_["evaluated_on"] == apart.summary_["evaluated_on"] == "validation"
    assert loaded.summary_["ks_after"] == pytest.approx(apart.summary_["ks_after"], abs=1e-3)
    assert loaded.summary_["rows"] == apart.summary_["rows"] == 600
    triples, expected = batches(X, y, sex), apart.predict(X)
    for items in (triples, [x for x, *_ in triples], [(x,) for x, *_ in triples], [(x, t) for x, t, _ in triples]):
        np.testing.assert_allclose(apart.predict(Loader(items)), expected, rtol=1e-6)
    np.testing.assert_allclose(apart.predict(lambda: iter(triples)), expected, rtol=1e-6)


def test_predict_takes_a_loader_of_one_tensor():
    rng = np.random.default_rng(0)
    sex = rng.integers(0, 2, 400)
    X = torch.tensor(rng.normal(size=(400, 3)) + sex[:, None], dtype=torch.float32)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    fair = ESVDFair(model, method="parity", effort=Effort.quick()).fit(X, sensitive_features=sex)
    for data in (X, torch.utils.data.TensorDataset(X)):
        np.testing.assert_allclose(fair.predict(DataLoader(data, batch_size=64)), fair.predict(X), rtol=1e-6)
    with pytest.raises(ValueError, match="no batch"):
        fair.predict(Loader([]))


@pytest.fixture(scope="module")
def three():
    """Rows of three groups and a network that fits them."""
    rng = np.random.default_rng(0)
    group = rng.choice(["a", "b", "c"], 600, p=[0.5, 0.3, 0.2])
    X = rng.normal(size=(600, 4))
    X[:, 0] += np.where(group == "b", 1.0, 0.0)
    y = X @ [1.0, 0.5, 0.2, 0.0] + np.abs(X[:, 3]) + 0.3 * rng.normal(size=600)
    model = MLPRegressor(hidden_layer_sizes=(8, 8), solver="lbfgs", max_iter=60, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # good enough to be repaired
        return model.fit(X, y), X, y, group


@pytest.mark.filterwarnings("ignore:1 group is too small")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "exact"},
        {"method": "parity", "targets": ("labels",), "mean_reduction": 20.0, "covariance_reduction": 5.0},
        {"method": "transport", "targets": ("predictions",), "max_mse_increase": 0.3},
    ],
    ids=lambda options: options["method"],
)
def test_batches_that_carry_row_numbers_give_the_repair_of_the_rows_in_that_order(three, options):
    """In any order, of any size, some of them empty and some of one group alone."""
    model, X, y, group = three
    options = {"effort": Effort.quick()} | options
    whole = ESVDFair(model, **options).fit(X, y, sensitive_features=group)

    def numbered():
        order = np.argsort(group == "c", kind="stable")[::-1]
        for part in np.split(order, [0, 7, 130, 130, 480]):
            labels, codes = np.unique(group[part], return_inverse=True)
            yield Batch(X[part], y[part], tuple(map(str, labels)), codes, None, part)

    streamed = ESVDFair(model, **options).fit(numbered)
    np.testing.assert_allclose(streamed.predict(X), whole.predict(X), rtol=0, atol=1e-6)
    assert streamed.summary_["rows"] == whole.summary_["rows"]
    assert streamed.summary_["ks_after"] == pytest.approx(whole.summary_["ks_after"], abs=1e-9)


@pytest.mark.filterwarnings("ignore:1 group is too small")
def test_without_a_seed_each_fit_holds_out_other_rows(three):
    model, X, y, group = three
    options = QUICK | {"method": "parity", "target_ks": 0.9, "random_state": None}
    fits = [ESVDFair(model, **options).fit(X, y, sensitive_features=group) for _ in range(2)]
    assert fits[0].summary_["mse_before"] != fits[1].summary_["mse_before"]


def test_a_stream_that_breaks_says_why(three):
    model, X, y, group = three

    def broken():
        for start in range(0, 600, 10):
            if start == 20:
                raise OSError("line 21 of the file is broken")
            yield X[start : start + 10], y[start : start + 10], group[start : start + 10]

    fair = ESVDFair(model, **QUICK)
    with pytest.raises(OSError, match="line 21 of the file is broken"):
        fair.fit(broken)
    assert not hasattr(fair, "estimator_")


def test_several_inputs_are_explained(words):
    model, X, y, sex = words
    scan = scan_layers(model, X, y, sensitive_features=sex, effort=Effort.quick())
    assert [layer.name for layer in scan.layers] == ["body", "leave"]
    found = explain_directions(model, X, sensitive_features=sex, layer=-1)
    assert {name for direction in found.mean for name, _ in direction.features} <= {
        f"{name}[{i}]" for name, part in X.items() for i in range(part.shape[1])
    }


def test_what_is_wrong_with_several_inputs_is_said(words):
    model, X, y, sex = words
    with pytest.raises(ValueError, match="different lengths"):
        ESVDFair(model).fit(X | {"mask": X["mask"][1:]}, y, sensitive_features=sex)
    holes = X | {"numbers": X["numbers"].clone()}
    holes["numbers"][:2, 0] = np.nan
    with pytest.raises(ValueError, match="`X` contains 2 NaN"):
        ESVDFair(model).fit(holes, y, sensitive_features=sex)
    with pytest.raises(ValueError, match="holds no array"):
        ESVDFair(model).fit({}, y, sensitive_features=sex)
    network = MLPRegressor(hidden_layer_sizes=(4,), max_iter=5, tol=1, n_iter_no_change=1).fit(X["numbers"], y)
    with pytest.raises(ValueError, match="one table"):
        ESVDFair(network).fit(X, y, sensitive_features=sex)


# --- Hugging Face --------------------------------------------------------------------------------------------------


def test_a_hugging_face_regressor_is_repaired_saved_and_loaded(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra esvdfair[dev])")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1,
        max_position_embeddings=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight *= 20  # untrained, it would tell nobody apart
    rng = np.random.default_rng(0)
    sex = rng.integers(0, 2, 300)
    ids = torch.tensor(rng.integers(0, 15, (300, 6)) + 10 * sex[:, None])
    mask = torch.tensor((np.arange(6) < rng.integers(2, 7, (300, 1))).astype(int))
    X = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})
    fair = ESVDFair(model, method="parity", output="logits", effort=Effort.quick()).fit(X, sensitive_features=sex)
    assert fair.summary_["ks_after"] < 0.6 * fair.summary_["ks_before"]
    fair.estimator_.save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = again(**X).logits.numpy().ravel()
    np.testing.assert_allclose(found, fair.predict(X), atol=1e-6)
    assert ks_distance(found, sensitive_features=sex) < 0.6 * fair.summary_["ks_before"]


# --- objects that hold a network -----------------------------------------------------------------------------------


def small():
    rng = np.random.default_rng(0)
    sex = rng.integers(0, 2, 400)
    X = (rng.normal(size=(400, 3)) + sex[:, None] * [1, 0, 0]).astype(np.float32)
    return X, X.sum(1) + rng.normal(size=400), sex


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def test_wrapped_modules_come_back_wrapped():
    X, y, sex = small()
    model = nn.DataParallel(network())
    fair = ESVDFair(model, method="parity", **QUICK).fit(X, y, sensitive_features=sex)
    assert type(fair.estimator_) is type(model)
    assert fair.summary_["ks_after"] < 0.6 * fair.summary_["ks_before"]

    class Trainer:
        lightning_module = network()

    with pytest.raises(TypeError, match="its attribute lightning_module"):
        ESVDFair(Trainer()).fit(X, y, sensitive_features=sex)


def test_a_grid_search_gives_its_best_estimator():
    X, y, sex = small()
    model = MLPRegressor(max_iter=20, tol=1, n_iter_no_change=2, random_state=0)
    search = GridSearchCV(model, {"alpha": [1e-4, 1e-2]}, cv=2).fit(X, y)
    fair = ESVDFair(search, method="parity", **QUICK).fit(X, y, sensitive_features=sex)
    assert type(fair.estimator_) is GridSearchCV
    np.testing.assert_array_equal(fair.estimator_.predict(X), fair.predict(X))
    assert not np.array_equal(fair.predict(X), search.predict(X))


@pytest.mark.parametrize("method", METHODS)
def test_a_parametrised_hidden_layer_stops_only_who_edits_it(method):
    X, y, sex = small()
    torch.manual_seed(0)
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 8))
    model = nn.Sequential(spectral, nn.ReLU(), nn.Linear(8, 1))
    repair = ESVDFair(model, method=method, **QUICK)
    if method in ("paper", "exact"):
        with pytest.raises(ValueError, match="remove_parametrizations"):
            repair.fit(X, y, sensitive_features=sex)
    else:
        assert repair.fit(X, y, sensitive_features=sex).summary_["ks_after"] < 0.3


# --- small things --------------------------------------------------------------------------------------------------


def test_columns_of_a_frame_may_be_reordered_for_predict():
    X, y, sex = small()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = MLPRegressor(hidden_layer_sizes=(6,), max_iter=20, tol=1, n_iter_no_change=2, random_state=0).fit(frame, y)
    fair = ESVDFair(model, method="parity", **QUICK).fit(frame, y, sensitive_features=sex)
    np.testing.assert_array_equal(fair.predict(frame[["c", "a", "b"]]), fair.predict(frame))
    with pytest.raises(ValueError, match="feature names"):
        fair.predict(frame.rename(columns={"a": "z"}))
    torch_fair = ESVDFair(network(), method="parity", **QUICK).fit(frame, y, sensitive_features=sex)
    np.testing.assert_array_equal(torch_fair.predict(frame[["c", "a", "b"]]), torch_fair.predict(frame))


@pytest.mark.parametrize("method", ["exact", "paper"])
def test_methods_that_edit_a_hidden_layer_say_that_there_is_none(method):
    X, y, sex = small()
    with pytest.raises(ValueError, match=r"one linear layer.*no hidden layer") as error:
        ESVDFair(nn.Linear(3, 1), method=method).fit(X, y, sensitive_features=sex)
    assert "-2" not in str(error.value)


# --- tables of polars and pyarrow --------------------------------------------------------------------------------


def table_of(kind):
    """What makes a table of a mapping of columns, and a column of an array."""
    if kind == "pyarrow":
        pa = pytest.importorskip("pyarrow", reason="needs the extra esvdfair[data]")
        return pa.table, lambda values: pa.chunked_array([values[:7].tolist(), values[7:].tolist()])
    pl = pytest.importorskip("polars", reason="needs the extra esvdfair[dev]")
    return pl.DataFrame, pl.Series


@pytest.mark.parametrize("kind", ["polars", "pyarrow"])
def test_tables_of_polars_and_pyarrow_give_the_repair_of_the_same_pandas_table(kind):
    table, column = table_of(kind)
    rng = np.random.default_rng(0)
    sex = np.array(["f", "m"])[rng.integers(0, 2, 500)]
    X = pd.DataFrame(rng.normal(size=(500, 3)) + (sex == "m")[:, None], columns=["a", "b", "c"])
    y, weight, job = X.sum(axis=1).to_numpy() + rng.normal(size=500), rng.uniform(1, 2, 500), rng.integers(0, 2, 500)
    model = MLPRegressor(hidden_layer_sizes=(8,), tol=0.1, random_state=0).fit(X, y)
    beside = {"sensitive_features": sex, "sample_weight": weight, "control_features": job}
    options = QUICK | {"method": "parity"}
    expected = ESVDFair(model, **options).fit(X, y, **beside, validation=(X + 0.1, y, sex, weight, job))

    frame = table({name: values.tolist() for name, values in X.items()})
    shifted = table({name: (values + 0.1).tolist() for name, values in X.items()})
    own = {name: column(values) for name, values in beside.items()}
    fair = ESVDFair(model, **options).fit(frame, column(y), **own, validation=(shifted, column(y), *own.values()))
    assert list(fair.feature_names_in_) == ["a", "b", "c"]
    np.testing.assert_array_equal(fair.predict(frame), expected.predict(X))
    assert fair.assess(frame, column(y), **own) == expected.assess(X, y, **beside)
    several = table({"sex": sex.tolist(), "job": job.tolist()})
    both = ESVDFair(model, **options, min_group_rows=20).fit(frame, column(y), sensitive_features=several)
    assert list(both.summary_["group_sizes"]) == [("f", 0), ("f", 1), ("m", 0), ("m", 1)]
    parts = [slice(start, start + 100) for start in range(0, 500, 100)]
    columns = (X, y, sex, weight, job)
    plain = [tuple(column[part] for column in columns) for part in parts]
    tables = [(table({n: x.tolist() for n, x in X[p].items()}), *(column(c[p]) for c in columns[1:])) for p in parts]
    expected, fair = (ESVDFair(model, **options).fit(Loader(items)) for items in (plain, tables))
    np.testing.assert_array_equal(fair.estimator_.predict(X), expected.estimator_.predict(X))


def test_a_lazy_table_is_to_be_collected_first():
    lazy = table_of("polars")[0]({"a": [1.0, 2.0]}).lazy()
    with pytest.raises(ValueError, match=r"`X` is a LazyFrame, which contains no rows yet; pass X\.collect\(\)"):
        ESVDFair(MLPRegressor()).fit(lazy, [0, 1], sensitive_features=[0, 1])


def jobs(rows, seed):
    """A table with a column of categories, labels and groups; the categories are not in the order of the alphabet."""
    rng = np.random.default_rng(seed)
    sex, job = rng.integers(0, 2, rows), np.array(["pilot", "cook", "nurse"])[rng.integers(0, 3, rows)]
    categories = pd.Categorical(job, categories=["pilot", "cook", "nurse"])
    numbers = {"years": rng.normal(size=rows) + 1.5 * sex, "grade": rng.normal(size=rows)}
    y = numbers["years"] + numbers["grade"] + (job == "pilot") + 0.3 * rng.normal(size=rows)
    return pd.DataFrame({**numbers, "job": categories}), y, sex


def as_table(kind, frame):
    """The same table of another library."""
    if kind == "pandas":
        return frame
    if kind == "pyarrow":
        return pytest.importorskip("pyarrow", reason="needs the extra esvdfair[data]").Table.from_pandas(frame)
    pl = pytest.importorskip("polars", reason="needs the extra esvdfair[dev]")
    table = pl.DataFrame({name: column.astype(str if name == "job" else float) for name, column in frame.items()})
    dtype = {"text": pl.String, "Categorical": pl.Categorical, "Enum": pl.Enum(list(frame["job"].cat.categories))}
    return table.with_columns(pl.col("job").cast(dtype[kind.removeprefix("polars, ")]))


CATEGORIES = ["pandas", "pyarrow", "polars, Categorical", "polars, Enum"]


@pytest.mark.filterwarnings("ignore:Trees fit their training rows closely")
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *((model, kind) for model in ("pipeline", "scikit-learn", "lightgbm", "xgboost") for kind in CATEGORIES),
        ("pipeline", "polars, text"),
    ],
)
def test_tables_with_categories(model, kind):
    frame, y, sex = jobs(2000, 0)
    if model == "pipeline":
        encode = make_column_transformer((OneHotEncoder(), ["job"]), remainder=StandardScaler())
        model = make_pipeline(encode, Ridge())
    elif model == "scikit-learn":
        model = HistGradientBoostingRegressor(max_iter=20)
    elif model == "lightgbm":
        model = pytest.importorskip("lightgbm", reason="needs an extra").LGBMRegressor(n_estimators=20, verbose=-1)
    else:
        model = pytest.importorskip("xgboost", reason="needs an extra").XGBRegressor(
            n_estimators=20, enable_categorical=True
        )
    model.fit(frame, y)
    table = as_table(kind, frame)
    fair = ESVDFair(model, effort=Effort.quick(), target_ks=0.15).fit(table, y, sensitive_features=sex)
    np.testing.assert_array_equal(fair.predict(table), fair.estimator_.predict(frame))
    fresh, _, sexes = jobs(6000, 1)
    before, after = (each.predict(fresh) for each in (model, fair.estimator_))
    assert ks_distance(after, sensitive_features=sexes) < 0.5 * ks_distance(before, sensitive_features=sexes)
    np.testing.assert_array_equal(fair.predict(as_table(kind, fresh)), after)


# --- whole numbers for an embedding, and inputs that may be left out -------------------------------------------------
