"""The difference in means, by column and by tree, adds up."""

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from esvdfair.explain import explain_trees

RNG = np.random.default_rng(0)
GROUP = RNG.integers(0, 3, 900)
X = pd.DataFrame(RNG.normal(size=(900, 3)) + GROUP[:, None] * [0.8, 0, 0.2], columns=["a", "b", "c"])
Y = X["a"] + X["b"] ** 2 + X["a"] * X["c"]
QUIET = {"verbose": 0, "thread_count": 1, "allow_writing_files": False}
MODELS = [
    lightgbm.LGBMRegressor(n_estimators=20, n_jobs=1, verbose=-1),
    xgboost.XGBRegressor(n_estimators=20, n_jobs=1),
    catboost.CatBoostRegressor(iterations=20, **QUIET),
    catboost.CatBoostRegressor(iterations=20, grow_policy="Lossguide", **QUIET),
    RandomForestRegressor(20, random_state=0),
    HistGradientBoostingRegressor(max_iter=20),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_parts_add_up(model):
    model.fit(X, Y)
    found = explain_trees(model, X, sensitive_features=GROUP)
    prediction = model.predict(X)
    assert found.groups == (2, 0)
    gap = prediction[GROUP == 2].mean() - prediction[GROUP == 0].mean()
    assert gap > 0.5
    assert found.mean_gap == pytest.approx(gap, abs=1e-5)
    assert sum(part for _, part in found.columns) == pytest.approx(found.mean_gap, rel=1e-12)
    assert sum(found.trees) == pytest.approx(found.mean_gap, rel=1e-12)
    assert {name for name, _ in found.columns} == {"a", "b", "c"}
    assert found.columns[0][0] == "a"
    assert found.to_frame()["share"].sum() == pytest.approx(1)


@pytest.mark.parametrize("model", MODELS[:4], ids=lambda model: type(model).__name__)
def test_agrees_with_treeshap(model):
    found = explain_trees(model.fit(X, Y), X, sensitive_features=GROUP, shap=True)
    shap, columns = dict(found.shap), dict(found.columns)
    assert sum(shap.values()) == pytest.approx(found.mean_gap, abs=1e-5)
    assert np.corrcoef(*zip(*((shap[name], columns[name]) for name in X.columns), strict=True))[0, 1] > 0.98
    assert found.to_frame().set_index("column")["shap"].to_dict() == shap
    assert explain_trees(model, X, sensitive_features=GROUP).shap is None


def test_treeshap_of_trees_that_predict_and_of_averages():
    stopped = xgboost.XGBRegressor(n_estimators=200, early_stopping_rounds=2, n_jobs=1)
    stopped.fit(X[:600], Y[:600], eval_set=[(X[600:], Y[600:])], verbose=False)
    forest = lightgbm.LGBMRegressor(boosting_type="rf", subsample=0.7, subsample_freq=1, n_estimators=9, verbose=-1)
    job = pd.Categorical(np.where(X["b"] > 0, "x", "y"))
    table, quiet = X.assign(job=job), {"iterations": 9, "cat_features": ["job"], **QUIET}
    piped = make_pipeline(StandardScaler(), lightgbm.LGBMRegressor(n_estimators=9, verbose=-1))
    cases = [(stopped, X), (forest, X), (catboost.CatBoostRegressor(**quiet), table), (piped, X)]
    for model, rows in cases:
        fitted = model if model is stopped else model.fit(rows, Y)
        found = explain_trees(fitted, rows, sensitive_features=GROUP, shap=True)
        assert sum(dict(found.shap).values()) == pytest.approx(found.mean_gap, abs=1e-5)
        assert found.shap[0][0] == "a"


def test_treeshap_is_refused_where_the_library_has_none():
    model = RandomForestRegressor(5, random_state=0).fit(X, Y)
    with pytest.raises(ValueError, match="RandomForestRegressor computes no TreeSHAP"):
        explain_trees(model, X, sensitive_features=GROUP, shap=True)


def test_names_are_those_of_the_columns_that_enter_the_trees():
    table = X.assign(job=np.where(X["b"] > 0, "x", "y"))
    encoder = make_column_transformer((OneHotEncoder(), ["job"]), (StandardScaler(), list("abc")))
    model = make_pipeline(encoder, RandomForestRegressor(5, random_state=0)).fit(table, Y)
    names = {name for name, _ in explain_trees(model, table, sensitive_features=GROUP).columns}
    assert names == {"onehotencoder__job_x", "onehotencoder__job_y"} | {f"standardscaler__{c}" for c in "abc"}
    rename = FunctionTransformer(np.asarray)  # gives no names
    model = make_pipeline(rename, RandomForestRegressor(5, random_state=0)).fit(X, Y)
    assert explain_trees(model, X, sensitive_features=GROUP).columns[0][0] == "0"


def test_weights_count_as_rows():
    model = RandomForestRegressor(5, random_state=0).fit(X, Y)
    twice = np.repeat(np.arange(900), 1 + np.arange(900) % 2)
    weighed = explain_trees(model, X, sensitive_features=GROUP, sample_weight=1 + np.arange(900) % 2)
    repeated = explain_trees(model, X.iloc[twice], sensitive_features=GROUP[twice])
    assert dict(weighed.columns) == pytest.approx(dict(repeated.columns))


def test_takes_trees_alone():
    with pytest.raises(TypeError, match="MLPRegressor is no tree ensemble"):
        explain_trees(
            MLPRegressor(hidden_layer_sizes=(3,), solver="lbfgs", max_iter=5000).fit(X, Y), X, sensitive_features=GROUP
        )
