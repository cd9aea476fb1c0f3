"""The difference in means, by column and by tree, adds up."""

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.neural_network import MLPRegressor

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


def test_agrees_with_treeshap():
    model = lightgbm.LGBMRegressor(n_estimators=20, n_jobs=1, verbose=-1).fit(X, Y)
    shap = model.predict(X, pred_contrib=True)[:, :3]
    apart = shap[GROUP == 2].mean(axis=0) - shap[GROUP == 0].mean(axis=0)
    found = dict(explain_trees(model, X, sensitive_features=GROUP).columns)
    assert np.corrcoef(apart, [found[name] for name in X.columns])[0, 1] > 0.98


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
