"""What serves networks serves trees: summaries, strata, weights, several groups, certificates; copies and files."""

import re

import catboost
import joblib
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from skl2onnx import to_onnx
from sklearn.base import clone
from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance, summarise
from esvdfair.evaluation import _Training, _with_training
from esvdfair.explain import explain_trees
from esvdfair.report import render_report
from esvdfair.text import number

pytestmark = pytest.mark.filterwarnings("ignore:No candidate meets")

SEEN, JUDGE, ROWS = 700, 1600, 2400
LGB = {"n_estimators": 15, "num_leaves": 9, "n_jobs": 1, "verbose": -1, "random_state": 0}
CAT = {"iterations": 15, "depth": 3, "verbose": 0, "thread_count": 1, "allow_writing_files": False, "random_seed": 0}


def people(groups=2):
    rng = np.random.default_rng(3)
    group = rng.choice(groups, ROWS, p=[0.6, *[0.4 / (groups - 1)] * (groups - 1)])
    X = rng.normal(size=(ROWS, 4)) + np.outer(group, [0.7, 0, 0, 0.2])
    return X, X[:, 0] + X[:, 1] ** 2 + 0.3 * rng.normal(size=ROWS), group, rng


X, Y, GROUP, _ = people()
TRAIN, HELD, TEST = slice(0, SEEN), slice(SEEN, JUDGE), slice(JUDGE, None)
MODELS = {
    "lightgbm": lambda: lightgbm.LGBMRegressor(**LGB).fit(X[TRAIN], Y[TRAIN]),
    "xgboost": lambda: xgboost.XGBRegressor(n_estimators=12, max_depth=4, n_jobs=1).fit(X[TRAIN], Y[TRAIN]),
    "catboost": lambda: catboost.CatBoostRegressor(**CAT).fit(X[TRAIN], Y[TRAIN]),
    "forest": lambda: RandomForestRegressor(12, random_state=0).fit(X[TRAIN], Y[TRAIN]),
    "onnx": lambda: to_onnx(
        GradientBoostingRegressor(n_estimators=12, random_state=0).fit(X[TRAIN], Y[TRAIN]), X[:1].astype(np.float32)
    ).SerializeToString(),
}


def fit(model, *, sample_weight=None, control_features=None, **options):
    def rows(part):
        return [None if column is None else column[part] for column in (GROUP, sample_weight, control_features)]

    groups, weight, strata = rows(TRAIN)
    fair = ESVDFair(model, effort=Effort.quick(), **({"target_ks": 0.15} | options))
    return fair.fit(
        X[TRAIN],
        Y[TRAIN],
        sensitive_features=groups,
        sample_weight=weight,
        control_features=strata,
        validation=(X[HELD], Y[HELD], *rows(HELD)),
    )


def ks(fair, **options):
    return ks_distance(fair.predict(X[TEST]), sensitive_features=GROUP[TEST], **options)


@pytest.mark.parametrize("name", MODELS)
def test_summaries_of_parts_give_the_model_of_fit(name):
    model = MODELS[name]()
    expected = fit(model).predict(X)
    order, parts = np.random.default_rng(0).permutation(SEEN), []
    for index in np.split(order, [3, 90, 400]):
        parts.append(summarise(model, X[index], Y[index], sensitive_features=GROUP[index], row_id=index))
    fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick())
    fair.fit_summary(parts[2] + parts[0] + (parts[3] + parts[1]), (X[HELD], Y[HELD], GROUP[HELD]))
    assert np.abs(fair.predict(X) - expected).max() <= 1e-6 * expected.std()
    assert np.ptp(expected) > 0


def test_weights_count_as_rows_do():
    model = MODELS["lightgbm"]()
    weight = 1.0 + (X[:, 1] > 0)
    fair = fit(model, sample_weight=weight)
    assert np.abs(fair.predict(X) - fit(model).predict(X)).max() > 1e-3
    twice = np.repeat(np.arange(ROWS), weight.astype(int))
    seen, held = (twice[(twice >= part.start) & (twice < part.stop)] for part in (TRAIN, HELD))
    repeated = ESVDFair(model, target_ks=0.15, effort=Effort.quick())
    validation = X[held], Y[held], GROUP[held]
    repeated.fit(X[seen], Y[seen], sensitive_features=GROUP[seen], validation=validation)
    assert abs(ks(repeated) - ks(fair)) < 0.05


def test_strata():
    stratum = np.where(X[:, 3] > 0.1, "high", "low")
    model = MODELS["lightgbm"]()
    fair = fit(model, control_features=stratum, target_ks=0.12)
    original = model.predict(X[TEST])
    before = ks_distance(original, sensitive_features=GROUP[TEST], control_features=stratum[TEST])
    assert ks(fair, control_features=stratum[TEST]) < 0.8 * before


def test_several_groups_and_a_small_one():
    x, y, group, _ = people(groups=3)
    group = group.astype(object)
    group[::150] = "few"
    model = lightgbm.LGBMRegressor(**LGB).fit(x[TRAIN], y[TRAIN])
    fair = ESVDFair(model, target_ks=0.2, effort=Effort.quick())
    with pytest.warns(ESVDFairWarning, match=r"1 group is too small .*few"):
        fair.fit(x[TRAIN], y[TRAIN], sensitive_features=group[TRAIN], validation=(x[HELD], y[HELD], group[HELD]))
    large = group[TEST] != "few"
    before, after = (
        ks_distance(p[large], sensitive_features=group[TEST][large])
        for p in (model.predict(x[TEST]), fair.predict(x[TEST]))
    )
    assert after < 0.8 * before


def test_certificate():
    fair = fit(MODELS["lightgbm"](), confidence=0.9, target_ks=0.25)
    assert fair.point_.ks_certified <= 0.25
    assert ks(fair) < 0.25


@pytest.mark.parametrize("method", ["transport", "parity"])
def test_error_is_judged_on_rows_that_the_trees_have_not_seen(method):
    fair = fit(MODELS["forest"](), method=method)
    point = fair.point_
    assert point.mse == pytest.approx(np.mean((fair.predict(X[HELD]) - Y[HELD]) ** 2))
    assert point.mse > 1.2 * np.mean((fair.predict(X[TRAIN]) - Y[TRAIN]) ** 2)
    assert fair.summary_["evaluated_on"] == "validation"


def test_the_estimate_is_never_below_what_validation_rows_say():
    fair = fit(MODELS["forest"](), target_ks=0.3)
    seen = [point for point in fair.curve_.points if point.target != "original"]
    floor = fair.curve_.ks_floor
    told = np.array([max(0.0, point.ks**2 - floor**2) for point in seen])
    said = np.array([point.ks_population**2 for point in seen])
    assert len(seen) > 3
    assert said.mean() >= told.mean() - 1e-3  # point by point it is smoothed


def test_trees_are_estimated_with_caution_and_ordered_within_each_ridge():
    told = np.array([[0.30], [0.40], [0.10], [0.20]])
    training = _Training(np.array([[0.0], [0.1], [0.05], [0.15]]), np.array([0.01]), complete=True)
    floors, ridges = np.array([0.1]), np.array([1.0, 1.0, 9.0, 9.0])
    deviation = 0.1 * np.sqrt(told + 0.005)  # noise √(KS² + noise²/2)
    squares, noise = _with_training(told.copy(), training, floors, ridges)
    assert squares == pytest.approx(told + deviation / 4)  # each ridge is in order already
    assert noise is floors
    mixed, _ = _with_training(told.copy(), training, floors, np.ones(4))
    assert mixed[2] == pytest.approx(0.2 + 0.025 * np.sqrt(0.205))  # 0.30 and 0.10 are out of order
    both, known = _with_training(told.copy(), training, floors, None)
    assert both[0] < mixed[0]  # a network's training rows count
    assert known < floors


def test_the_report_splits_the_difference_in_means():
    fair = fit(MODELS["lightgbm"]())
    table = pd.DataFrame(X[HELD], columns=["age", "priors", "height", "weight"])
    page = render_report(fair, table, Y[HELD], sensitive_features=GROUP[HELD])
    found = explain_trees(fair.model, table, sensitive_features=GROUP[HELD])
    assert "by the columns that its trees split on" in page
    assert "Layer by layer" not in page
    name, part = found.columns[0]
    assert re.search(rf"<t[hd][^>]*>{name}</t[hd]>\s*<td[^>]*>{re.escape(number(part))}</td>", page)


# --- copies and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if name != "onnx"])
def test_copies_predict_the_same(name, tmp_path):
    fair = fit(MODELS[name]())
    expected, repaired = fair.predict(X), fair.estimator_
    joblib.dump(repaired, tmp_path / "model.joblib")
    frozen = clone(FrozenEstimator(repaired))
    for copied in (joblib.load(tmp_path / "model.joblib"), frozen):
        assert np.array_equal(copied.predict(X), expected)


def test_files_of_the_libraries_predict_the_same(tmp_path):
    path = str(tmp_path / "model")
    fair = {name: fit(MODELS[name]()) for name in ("lightgbm", "xgboost", "catboost")}
    fair["lightgbm"].estimator_.booster_.save_model(path + ".txt")
    fair["xgboost"].estimator_.save_model(path + ".ubj")
    fair["catboost"].estimator_.save_model(path + ".cbm")
    loaded = {
        "lightgbm": lightgbm.Booster(model_file=path + ".txt"),
        "xgboost": xgboost.XGBRegressor(n_jobs=1),
        "catboost": catboost.CatBoostRegressor().load_model(path + ".cbm"),
    }
    loaded["xgboost"].load_model(path + ".ubj")
    for name, model in loaded.items():
        assert np.array_equal(model.predict(X), fair[name].predict(X))
        assert fit(model).summary_["ks_before"] == pytest.approx(fair[name].summary_["ks_after"], abs=1e-6)


def test_a_pipeline_and_its_histogram_boosting_are_copied():
    model = make_pipeline(StandardScaler(), HistGradientBoostingRegressor(max_iter=10)).fit(X[TRAIN], Y[TRAIN])
    before = model.predict(X)
    fair = fit(model)
    assert np.array_equal(model.predict(X), before)
    assert np.array_equal(clone(FrozenEstimator(fair.estimator_)).predict(X), fair.predict(X))
    assert ks(fair) < ks_distance(before[TEST], sensitive_features=GROUP[TEST])
