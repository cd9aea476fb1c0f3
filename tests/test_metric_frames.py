"""The KS distance where people use metrics: Fairlearn's MetricFrame, scikit-learn's scorers and searches."""

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.metrics import make_scorer, mean_squared_error
from sklearn.model_selection import GridSearchCV

from esvdfair import Effort, ESVDFair, demographic_parity_ks, ks_distance

RNG = np.random.default_rng(0)
SEX = np.array(["f", "m"])[RNG.integers(0, 2, 400)]
REGION = np.array(["north", "south"])[RNG.integers(0, 2, 400)]
X = pd.DataFrame(RNG.normal(size=(400, 3)) + (SEX == "m")[:, None], columns=["a", "b", "c"])
Y = X.sum(axis=1) + RNG.normal(size=400)


def test_it_is_the_ks_distance():
    weight = RNG.random(400)
    for options in ({}, {"sample_weight": weight}):
        found = demographic_parity_ks(Y, X["a"], sensitive_features=SEX, **options)
        assert found == ks_distance(X["a"], sensitive_features=SEX, **options)
    assert demographic_parity_ks(Y, X["a"], sensitive_features=np.ones(400)) == 0


def test_in_a_metric_frame():
    frames = pytest.importorskip("fairlearn.metrics", reason="fairlearn is not installed (extra esvdfair[peers])")
    metrics = {"error": mean_squared_error, "ks": demographic_parity_ks}
    params = {"ks": {"sensitive_features": pd.Series(SEX)}}
    options = {"y_true": Y, "y_pred": X["a"], "metrics": metrics, "sample_params": params}
    by_region = frames.MetricFrame(sensitive_features=REGION, **options)
    assert by_region.overall["ks"] == ks_distance(X["a"], sensitive_features=SEX)
    north = REGION == "north"
    assert by_region.by_group["ks"]["north"] == ks_distance(X["a"][north], sensitive_features=SEX[north])
    by_sex = frames.MetricFrame(sensitive_features=SEX, **options)
    assert by_sex.overall["ks"] == by_region.overall["ks"]
    assert set(by_sex.by_group["ks"]) == {0.0}


def test_a_strength_is_chosen_by_cross_validation():
    """As docs/python.md shows it."""
    with sklearn.config_context(enable_metadata_routing=True):
        model = FrozenEstimator(LinearRegression().fit(X, Y))
        fair = ESVDFair(model, method="parity", min_group_rows=10, effort=Effort.quick()).set_fit_request(
            sensitive_features=True
        )
        unfair = make_scorer(demographic_parity_ks, greater_is_better=False)
        search = GridSearchCV(
            fair,
            {"mean_reduction": [1.0, 100.0]},
            scoring=unfair.set_score_request(sensitive_features=True),
            cv=2,
        ).fit(X, Y, sensitive_features=SEX)
    assert search.best_params_ == {"mean_reduction": 100.0}
    less, more = -search.cv_results_["mean_test_score"]
    assert more < 0.7 * less


@pytest.mark.parametrize("kind", ["dict", "dict of series", "frame"])
def test_columns_by_name(kind):
    columns = {"sex": SEX, "region": REGION}
    series = {name: pd.Series(column) for name, column in columns.items()}
    given = {"dict": columns, "dict of series": series, "frame": pd.DataFrame(columns)}
    expected = ks_distance(Y, sensitive_features=np.column_stack([SEX, REGION]))
    assert ks_distance(Y, sensitive_features=given[kind]) == expected
    with pytest.raises(ValueError, match=r"columns of different lengths, \[399, 400\]"):
        ks_distance(Y, sensitive_features={"sex": SEX, "region": REGION[1:]})


def test_a_column_of_x_by_name():
    rows = X.assign(sex=(SEX == "m").astype(float))
    model = LinearRegression().fit(rows, Y)
    fair = ESVDFair(model, method="parity", effort=Effort.quick())
    named = fair.fit(rows, Y, sensitive_features="sex").predict(rows)
    np.testing.assert_array_equal(named, fair.fit(rows, Y, sensitive_features=rows["sex"]).predict(rows))
    apart = fair.fit(rows, Y, sensitive_features="sex", validation=(rows.assign(a=rows["a"] + 0.1), Y, "sex"))
    assert apart.summary_["evaluated_on"] == "validation"
    for given in (X, X.to_numpy()):
        with pytest.raises(ValueError, match="`sensitive_features='sex'` is a name, and `X` has no such column"):
            ESVDFair(LinearRegression(), method="parity").fit(given, Y, sensitive_features="sex")


def test_errors_about_missing_groups_name_the_way_out():
    holes = pd.Series(SEX)
    holes[:3] = None
    model = LinearRegression().fit(X, Y)
    with pytest.raises(ValueError, match=r"3 missing value\(s\).*missing='group'"):
        ESVDFair(model, method="parity").fit(X, Y, sensitive_features=holes)
