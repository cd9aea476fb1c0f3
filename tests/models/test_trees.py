"""Tree ensembles of every library: the leaves add up, edits are written back, and the whole of fit works on them."""

import copy
import pickle
import re

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn import ensemble, tree
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models import adapt, fingerprint
from esvdfair.models.tree_libraries import Tree
from esvdfair.models.trees import BUCKETS, _owner

pytestmark = pytest.mark.filterwarnings("ignore:No candidate meets")  # the trees are small, and so are the tables

NONE = np.zeros(0, dtype=int)
ROWS, SEEN = 900, 600
LGB = {"n_estimators": 12, "num_leaves": 9, "n_jobs": 1, "verbose": -1, "random_state": 0}
XGB = {"n_estimators": 10, "max_depth": 4, "n_jobs": 1, "random_state": 0}
CAT = {"iterations": 12, "depth": 3, "verbose": 0, "thread_count": 1, "allow_writing_files": False, "random_seed": 0}
SKL = {"n_estimators": 12, "max_depth": 4, "random_state": 0}

MODELS = {
    "lightgbm": (lightgbm.LGBMRegressor, LGB, "nan"),
    "lightgbm rf": (lightgbm.LGBMRegressor, LGB | {"boosting_type": "rf", "subsample": 0.7, "subsample_freq": 1}, "y"),
    "lightgbm dart": (lightgbm.LGBMRegressor, LGB | {"boosting_type": "dart"}, "y"),
    "lightgbm goss": (lightgbm.LGBMRegressor, LGB | {"data_sample_strategy": "goss"}, "y"),
    "lightgbm l1": (lightgbm.LGBMRegressor, LGB | {"objective": "l1"}, "y"),
    "lightgbm huber": (lightgbm.LGBMRegressor, LGB | {"objective": "huber"}, "y"),
    "lightgbm quantile": (lightgbm.LGBMRegressor, LGB | {"objective": "quantile"}, "y"),
    "lightgbm poisson": (lightgbm.LGBMRegressor, LGB | {"objective": "poisson"}, "positive"),
    "lightgbm gamma": (lightgbm.LGBMRegressor, LGB | {"objective": "gamma"}, "positive"),
    "lightgbm tweedie": (lightgbm.LGBMRegressor, LGB | {"objective": "tweedie"}, "positive"),
    "lightgbm binary": (lightgbm.LGBMClassifier, LGB, "class"),
    "xgboost": (xgboost.XGBRegressor, XGB, "nan"),
    "xgboost base": (xgboost.XGBRegressor, XGB | {"base_score": 0.3}, "y"),
    "xgboost dart": (xgboost.XGBRegressor, XGB | {"booster": "dart", "rate_drop": 0.3}, "y"),
    "xgboost forest": (xgboost.XGBRFRegressor, XGB, "y"),
    "xgboost gamma": (xgboost.XGBRegressor, XGB | {"objective": "reg:gamma"}, "positive"),
    "xgboost poisson": (xgboost.XGBRegressor, XGB | {"objective": "count:poisson"}, "positive"),
    "xgboost tweedie": (xgboost.XGBRegressor, XGB | {"objective": "reg:tweedie"}, "positive"),
    "xgboost forests": (xgboost.XGBRegressor, XGB | {"num_parallel_tree": 3, "subsample": 0.7}, "y"),
    "xgboost logistic": (xgboost.XGBRegressor, XGB | {"objective": "reg:logistic"}, "class"),
    "xgboost binary": (xgboost.XGBClassifier, XGB, "class"),
    "xgboost raw scores": (xgboost.XGBRegressor, XGB | {"objective": "binary:logitraw"}, "class"),
    "catboost": (catboost.CatBoostRegressor, CAT, "nan"),
    "catboost depthwise": (catboost.CatBoostRegressor, CAT | {"grow_policy": "Depthwise"}, "y"),
    "catboost lossguide": (catboost.CatBoostRegressor, CAT | {"grow_policy": "Lossguide"}, "y"),
    "catboost poisson": (catboost.CatBoostRegressor, CAT | {"loss_function": "Poisson"}, "positive"),
    "catboost binary": (catboost.CatBoostClassifier, CAT, "class"),
    "catboost scores": (lambda **options: catboost.CatBoost(options), CAT | {"loss_function": "Logloss"}, "class"),
    "catboost logs": (lambda **options: catboost.CatBoost(options), CAT | {"loss_function": "Poisson"}, "positive"),
    "tree": (tree.DecisionTreeRegressor, {"max_depth": 5, "random_state": 0}, "y"),
    "forest": (ensemble.RandomForestRegressor, SKL, "y"),
    "grown forest": (ensemble.RandomForestRegressor, SKL | {"max_depth": None}, "y"),
    "extra trees": (ensemble.ExtraTreesRegressor, SKL, "y"),
    "bagging": (ensemble.BaggingRegressor, {"n_estimators": 9, "max_features": 0.6, "random_state": 0}, "y"),
    "boosting": (ensemble.GradientBoostingRegressor, SKL, "y"),
    "boosting from zero": (ensemble.GradientBoostingRegressor, SKL | {"init": "zero"}, "y"),
    "histogram": (ensemble.HistGradientBoostingRegressor, {"max_iter": 12}, "nan"),
    "histogram gamma": (ensemble.HistGradientBoostingRegressor, {"max_iter": 12, "loss": "gamma"}, "positive"),
    "tree binary": (tree.DecisionTreeClassifier, {"max_depth": 5, "random_state": 0}, "class"),
    "extra trees binary": (ensemble.ExtraTreesClassifier, SKL, "class"),
    "bagging binary": (ensemble.BaggingClassifier, {"n_estimators": 9, "random_state": 0}, "class"),
    "forest binary": (ensemble.RandomForestClassifier, SKL, "class"),
    "boosting binary": (ensemble.GradientBoostingClassifier, SKL, "class"),
    "boosting exponential": (ensemble.GradientBoostingClassifier, SKL | {"loss": "exponential"}, "class"),
    "histogram binary": (ensemble.HistGradientBoostingClassifier, {"max_iter": 12}, "class"),
}  # fmt: skip


def rows(kind="y"):
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, ROWS)
    X = rng.normal(size=(ROWS, 4)) + group[:, None] * [1.0, 0, 0, 0.3]
    y = X[:, 0] + X[:, 1] ** 2 + 0.3 * rng.normal(size=ROWS)
    y = {"positive": np.exp(0.3 * y), "class": (y > 1).astype(int)}.get(kind, y)
    if kind == "nan":
        X[rng.random(X.shape) < 0.05] = np.nan
    return X, y, group


def fitted(name):
    make, options, kind = MODELS[name]
    X, y, group = rows(kind)
    return make(**options).fit(X[:SEEN], y[:SEEN]), X, y, group


def scores(model, X):
    return model.predict_proba(X)[:, 1] if hasattr(model, "predict_proba") else model.predict(X)


def repaired(model, X, y, group, **options):
    fair = ESVDFair(model, effort=Effort.quick(), **({"target_ks": 0.15} | options))
    validation = X[SEEN:], y[SEEN:], group[SEEN:]
    return fair.fit(X[:SEEN], y[:SEEN], sensitive_features=group[:SEEN], validation=validation)


@pytest.mark.parametrize("name", MODELS)
def test_leaves_add_up_before_and_after_an_edit(name):
    model, X, _, _ = fitted(name)
    before = scores(model, X).astype(float)
    adapter = adapt(model)
    head, (layer,) = adapter.head(X), adapter.layers(X)
    rng = np.random.default_rng(1)
    weight = np.concatenate([0.02 * rng.normal(size=(1, BUCKETS)), [[0.8]]], axis=1)
    twin = adapter.replace({"leaves": (weight, layer.bias + 0.05)})
    wanted = head.apply(adapter.capture(X, ["leaves"])[0]["leaves"] @ weight[0] + layer.bias + 0.05)
    after, exact = scores(twin.model, X), adapter.library.eps < 1e-10
    assert type(twin.model) is type(model)
    assert np.ptp(wanted - before) > 0.1 * np.ptp(before) * (name != "tree")
    assert np.abs(after - wanted).max() < (1e-12 if exact else 1e-6) * max(1, np.ptp(wanted))
    assert np.array_equal(scores(model, X), before.astype(scores(model, X).dtype)), "the original has changed"
    added = adapt(twin.model).capture(X, ["leaves"])[1]
    assert np.abs(added - after).max() <= (1e-12 if exact else 1e-6) * np.ptp(after)
    for copied in (pickle.loads(pickle.dumps(twin.model)), copy.deepcopy(twin.model)):
        assert np.array_equal(scores(copied, X), after)
    assert fingerprint(twin.model) != fingerprint(model)
    assert fingerprint(model) == fingerprint(copy.deepcopy(model))


@pytest.mark.parametrize("name", ["lightgbm", "xgboost poisson", "catboost", "grown forest", "histogram binary"])
def test_fit_brings_groups_together(name):
    model, X, y, group = fitted(name)
    fair = repaired(model, X, y, group)
    before, after = (ks_distance(p, sensitive_features=group) for p in (scores(model, X), fair.predict(X)))
    assert after < 0.85 * before
    assert type(fair.estimator_) is type(model)
    again = pickle.loads(pickle.dumps(fair))
    assert np.array_equal(again.predict(X), fair.predict(X))
    assert np.array_equal(scores(again.curve_.model(fair.point_), X), fair.predict(X))


@pytest.mark.parametrize(
    "kind", [{}, {"booster": "dart", "rate_drop": 0.3}, {"num_parallel_tree": 4, "subsample": 0.7}]
)
def test_leaves_of_many_xgboost_trees_add_up_in_single_precision(kind):
    X, y, _ = rows()
    model = xgboost.XGBRegressor(**XGB | {"n_estimators": 100}, **kind).fit(X, y + 5)
    added, predicted = adapt(model).capture(X, ["leaves"])[1], model.predict(X)
    assert np.abs(added - predicted).max() <= 1e-7 * np.ptp(predicted)


def test_the_base_of_xgboost_is_written_with_the_digits_of_single_precision():
    model, X, _, _ = fitted("xgboost")
    (layer,) = adapt(model).layers(X)
    twin = adapt(model).replace({"leaves": (layer.weight, layer.bias + 0.05)})
    written = twin.library._saved["learner"]["learner_model_param"]["base_score"]
    assert len(written.strip("[]")) <= 13, "XGBoost 2.1 reads 0.5 where there are more"
    assert np.allclose(twin.predict(X) - model.predict(X), 0.05, atol=1e-6)


WRAPPERS = {
    "pipeline": lambda model: make_pipeline(StandardScaler(), model),
    "frozen": FrozenEstimator,
    "frozen catboost": lambda model: FrozenEstimator(catboost.CatBoostRegressor(**CAT).fit(*rows("positive")[:2])),
    "log target": lambda model: TransformedTargetRegressor(model, func=np.log, inverse_func=np.exp),
    "search": lambda model: GridSearchCV(model, {"num_leaves": [4, 8]}, cv=2),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_inside_other_estimators(wrap):
    X, y, group = rows("positive")
    inner = lightgbm.LGBMRegressor(**LGB)
    wrapped = wrap(inner.fit(X[:SEEN], y[:SEEN])).fit(X[:SEEN], y[:SEEN])
    before = wrapped.predict(X)
    fair = repaired(wrapped, X, y, group)
    assert type(fair.estimator_) is type(wrapped), "deepcopy of a FrozenEstimator may be one of its model"
    assert np.array_equal(wrapped.predict(X), before)
    assert ks_distance(fair.predict(X), sensitive_features=group) < ks_distance(before, sensitive_features=group)


@pytest.mark.parametrize("name", ["lightgbm binary", "xgboost binary", "boosting binary", "forest binary"])
def test_a_calibrated_classifier_is_repaired_before_its_calibration(name):
    model, X, y, group = fitted(name)
    calibrated = CalibratedClassifierCV(FrozenEstimator(model), ensemble=False, cv=2).fit(X, y)
    assert np.allclose(adapt(calibrated).capture(X, ["leaves"])[1], scores(calibrated, X), atol=1e-6)
    fair = repaired(calibrated, X, y, group, target_ks=0.3)
    assert np.array_equal(scores(fair.estimator_, X), fair.predict(X))
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]


def test_early_stopping_edits_the_trees_that_predict():
    X, y, _ = rows()
    booster = lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(X, y), 30)
    booster.best_iteration = 20  # as early stopping leaves it
    wide = xgboost.XGBRegressor(**XGB | {"n_estimators": 300, "early_stopping_rounds": 3})
    wide.fit(X[:400], y[:400], eval_set=[(X[400:], y[400:])], verbose=False)
    for model in (booster, wide):
        adapter = adapt(model)
        adapter.head(X)
        (layer,) = adapter.layers(X)
        twin = adapter.replace({"leaves": (0.5 * layer.weight, 0.5 * layer.bias)})
        assert np.allclose(twin.predict(X), 0.5 * model.predict(X), atol=1e-5)


def test_early_stopping_of_parallel_trees():
    X, y, _ = rows()
    options = XGB | {"n_estimators": 300, "num_parallel_tree": 3, "subsample": 0.8, "early_stopping_rounds": 3}
    model = xgboost.XGBRegressor(**options).fit(X[:400], y[:400], eval_set=[(X[400:], y[400:])], verbose=False)
    adapter = adapt(model)
    assert len(adapter.library.sizes) == 3 * (model.best_iteration + 1) < 900
    adapter.head(X)
    (layer,) = adapter.layers(X)
    twin = adapter.replace({"leaves": (0.5 * layer.weight, 0.5 * layer.bias)})
    assert np.allclose(twin.predict(X), 0.5 * model.predict(X), atol=1e-5)


def test_catboost_with_a_scale_and_after_a_pickle():
    X, y, _ = rows()
    model = catboost.CatBoostRegressor(**CAT).fit(X, y)
    model.set_scale_and_bias(1.7, 0.4)
    for given in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        adapter = adapt(given)
        adapter.head(X)
        (layer,) = adapter.layers(X)
        twin = adapter.replace({"leaves": (0.5 * layer.weight, layer.bias + 1)})
        assert np.allclose(twin.predict(X), 0.5 * (model.predict(X) - 0.4) + 1.4, atol=1e-9)
        assert twin.model.get_scale_and_bias()[0] == 1.7


def test_boosters_and_categories():
    X, y, group = rows()
    table = pd.DataFrame(X, columns=list("abcd"))
    table["job"] = pd.Categorical(np.random.default_rng(2).integers(0, 9, ROWS).astype(str))
    y = y + table["job"].cat.codes.to_numpy() % 3
    models = [
        lightgbm.LGBMRegressor(**LGB).fit(table, y).booster_,
        xgboost.XGBRegressor(**XGB, enable_categorical=True).fit(table, y).get_booster(),
        catboost.CatBoostRegressor(**CAT, cat_features=["job"]).fit(table, y),
        ensemble.HistGradientBoostingRegressor(max_iter=9, categorical_features="from_dtype").fit(table, y),
    ]
    for model in models:
        fair = repaired(model, table, y, group)
        assert type(fair.estimator_) is type(model)
        assert fair.summary_["ks_after"] < fair.summary_["ks_before"]


def test_refusals():
    X, y, group = rows()
    two = np.c_[y, y]
    linear = lightgbm.LGBMRegressor(**LGB, linear_tree=True).fit(X, y)
    cases = {
        "linear trees": linear,
        "gblinear": xgboost.XGBRegressor(booster="gblinear", n_estimators=3, n_jobs=1).fit(X, y),
        "one output or two classes": ensemble.RandomForestRegressor(**SKL).fit(X, two),
        "predicts several outputs": lightgbm.LGBMClassifier(**LGB).fit(X, np.digitize(y, [0, 2])),
        "Only a constant start": ensemble.GradientBoostingRegressor(
            **SKL, init=tree.DecisionTreeRegressor(max_depth=2)
        ).fit(X, y),
    }
    with pytest.raises(ValueError, match="where its leaves give"):
        adapt(xgboost.XGBClassifier(**XGB, objective="binary:hinge").fit(X, group)).head(X)
    for reason, model in cases.items():
        with pytest.raises(ValueError, match=re.escape(reason)):
            adapt(model)
    model = ensemble.RandomForestRegressor(**SKL).fit(X, y)
    for method in ("paper", "exact"):
        with pytest.raises(ValueError, match="no hidden layer"):
            repaired(model, X, y, group, method=method, target_ks=None)
    with pytest.raises(TypeError, match="other than decision trees"):
        adapt(ensemble.BaggingRegressor(ensemble.HistGradientBoostingRegressor(max_iter=2), 2).fit(X, y))


def test_says_once_that_training_rows_mislead():
    model, X, y, group = fitted("forest")
    fair = ESVDFair(model, effort=Effort.quick(), target_ks=0.3)
    with pytest.warns(ESVDFairWarning, match="not trained on as `validation=") as seen:
        fair.fit(X, y, sensitive_features=group)
    assert [each.filename for each in seen] == [__file__]
    fair.set_params(model=ensemble.RandomForestRegressor(**SKL)).fit(X, y, sensitive_features=group)  # fitted here


SIGNS = [1, 0, 0, 0]
CONSTRAINED = [
    lightgbm.LGBMRegressor(**LGB, monotone_constraints=SIGNS),
    xgboost.XGBRegressor(**XGB, monotone_constraints=tuple(SIGNS)),
    catboost.CatBoostRegressor(**CAT, monotone_constraints=SIGNS),
    ensemble.HistGradientBoostingRegressor(max_iter=12, monotonic_cst=SIGNS),
    ensemble.RandomForestRegressor(**SKL, max_features=1, monotonic_cst=np.array(SIGNS)),
]


def rises(model, X, column):
    """How far predictions rise along a column, and how far they fall, both summed over steps and rows."""
    grid = np.linspace(-3, 4, 60)
    steps = np.diff([scores(model, np.insert(np.delete(X, column, 1), column, v, axis=1)) for v in grid], axis=0)
    return steps[steps > 0].sum(), -steps[steps < -1e-6].sum()


@pytest.mark.parametrize("model", CONSTRAINED, ids=lambda model: type(model).__name__)
def test_an_edit_keeps_monotone_constraints(model):
    X, y, _ = rows()
    adapter = adapt(model.fit(X, y))
    adapter.head(X)
    (layer,) = adapter.layers(X)
    weight = np.random.default_rng(1).normal(size=layer.weight.shape)
    weight[0, -1] = 1
    kept = adapter.replace({"leaves": (weight, layer.bias)}).model
    assert np.ptp(kept.predict(X) - model.predict(X)) > 0.5
    assert rises(kept, X[:30], 0)[1] == 0 < rises(kept, X[:30], 0)[0]
    assert adapt(kept).library.constraints == adapter.library.constraints
    adapter = adapt(model)
    adapter.library.constraints = ()  # each leaf has a change of its own
    assert rises(adapter.replace({"leaves": (weight, layer.bias)}).model, X[:30], 0)[1] > 0


def test_monotone_constraints_that_would_leave_nothing_to_change():
    X, y, group = rows()
    kept, not_kept = (lightgbm.LGBMRegressor(**LGB, monotone_constraints=c) for c in ([1, 0, 0, 0], [1, -1, 1, 1]))
    fair = repaired(kept.fit(X[:SEEN], y[:SEEN]), X, y, group)
    assert np.ptp(fair.predict(X) - kept.predict(X)) > 0.1
    assert rises(fair.estimator_, X, 0)[1] == 0
    with pytest.warns(ESVDFairWarning, match="monotone constraint on column 'Column_0', 'Column_1', 'Column_2', 'Col"):
        repaired(not_kept.fit(X[:SEEN], y[:SEEN]), X, y, group)
    adapter = adapt(kept)
    adapter.head(X)
    (layer,) = adapter.layers(X)
    with pytest.warns(ESVDFairWarning, match="monotone constraint on column 'Column_0'"):
        adapter.replace({"leaves": (-layer.weight, layer.bias)})


def test_small_leaves_share_a_bucket():
    # 0 → (1 → (3, 4), 2); node 1 has 50 rows, its children 30 and 20
    left, right = np.array([1, 3, -1, -1, -1]), np.array([2, 4, -1, -1, -1])
    shape = Tree(left, right, np.array([0, 0, -1, -1, -1]), np.array([100.0, 50, 50, 30, 20]))
    assert _owner(shape, 40, NONE).tolist() == [0, 1, 2, 1, 1]
    assert _owner(shape, 10, NONE).tolist() == [0, 1, 2, 3, 4]
    assert _owner(shape, 80, NONE).tolist() == [0] * 5
    ordered = Tree(left, right, np.array([0, 1, -1, -1, -1]), shape.rows)
    assert _owner(ordered, 10, np.array([1])).tolist() == [0, 1, 2, 1, 1]
    assert _owner(ordered, 10, np.array([0])).tolist() == [0] * 5


def test_few_leaves_have_buckets_of_their_own():
    X, y, _ = rows()
    adapter = adapt(lightgbm.LGBMRegressor(**LGB).fit(X, y))
    leaf = np.concatenate([shape.left < 0 for shape in adapter.library.trees()])
    assert np.unique(adapter.codes[leaf]).size == np.unique(np.abs(adapter.codes[leaf])).size <= BUCKETS
    assert adapter.codes[leaf].min() > 0
    wide = adapt(ensemble.RandomForestRegressor(200, min_samples_leaf=40, random_state=0).fit(X, y))
    signs = np.sign(wide.codes[np.concatenate([shape.left < 0 for shape in wide.library.trees()])])
    assert abs(signs.mean()) < 0.2
