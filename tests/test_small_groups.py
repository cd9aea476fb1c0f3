"""A small group beside large ones hides nothing, unrepairs nothing, and is named."""

import json
import pickle
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.exceptions import InputError

LARGE = 10_000


def people(small, seed=0, large=LARGE, shift=0.0):
    """Two large groups whose predictions are a KS of about 0.29 apart, and ``small`` rows of a third."""
    rng = np.random.default_rng(seed)
    group = np.repeat(["a", "b", "c"], [large, large, small])
    X = rng.normal(size=(len(group), 4))
    X[:, 0] += 1.5 * (group == "b") + shift * (group == "c")
    y = X.sum(axis=1) + 0.3 * rng.normal(size=len(group))
    order = rng.permutation(len(group))
    return X[order], y[order], group[order]


FRESH, _, FRESH_GROUP = people(0, seed=1, large=50_000)


def gap(predict):
    """The population KS of the large groups."""
    return ks_distance(predict(FRESH), sensitive_features=FRESH_GROUP)


def repair(X, y, group, **options):
    model = LinearRegression().fit(X, y)
    return ESVDFair(model, **({"target_ks": 0.1, "effort": Effort.quick()} | options)).fit(
        X, y, sensitive_features=group
    )


@pytest.fixture(scope="module")
def without():
    """The population KS that the repair of the two large groups alone reaches."""
    X, y, group = people(0)
    assert gap(LinearRegression().fit(X, y).predict) == pytest.approx(0.29, abs=0.02)
    fair = repair(X, y, group)
    assert fair.summary_["met"]
    return gap(fair.predict)


@pytest.mark.filterwarnings("ignore:.*(set aside|below the noise level)")
@pytest.mark.parametrize("shift", [0.0, 2.0], ids=["no gap of its own", "a gap of its own"])
@pytest.mark.parametrize("small", [3, 6, 40, 100, 200])
def test_a_small_group_neither_hides_nor_unrepairs_the_gap_of_large_ones(without, small, shift):
    fair = repair(*people(small, shift=shift))
    assert gap(fair.predict) < max(0.1, without) + 0.02
    assert fair.summary_["ks_before"] > 0.25
    assert fair.summary_["ks_after"] < 0.5 or shift
    large = next(pair for pair in fair.summary_["pairs"] if pair["groups"] == ("a", "b"))
    assert large["ks_before"] > 0.25
    assert large["ks_population"] < 0.12
    assert large["ks_floor"] < 0.03  # of the large groups, whatever is beside them
    if len(fair.summary_["pairs"]) > 1:
        # 25 to 50 validation rows show a KS of 0.12 to 0.18 by chance: a target of 0.1 cannot be told.
        assert fair.summary_["met"] is False
        assert fair.summary_["ks_floor"] > 0.1
    else:
        assert fair.summary_["met"]


@pytest.mark.parametrize("small", [3, 40])
def test_groups_set_aside_are_named_and_their_rows_count_in_the_error(small):
    X, y, group = people(small, large=1000)
    y = np.where(group == "c", y + 50.0, y)  # which only the rows of c can show
    with pytest.warns(
        ESVDFairWarning, match=rf"1 group is too small to compare and set aside: c \({small} rows\)"
    ) as caught:
        fair = repair(X, y, group, target_ks=0.3)
    assert len(caught) == 1
    summary = fair.summary_
    assert summary["groups_set_aside"] == {"c": small}
    assert list(summary["group_sizes"]) == ["a", "b"]
    assert [pair["groups"] for pair in summary["pairs"]] == [("a", "b")]
    mine = summary["group_mse_before"]
    if "c" in mine:  # at least one row was held out
        assert mine["c"] > 1000
        assert summary["mse_before"] > 1.5 * max(mine["a"], mine["b"])
    assert json.loads(json.dumps(summary))["groups_set_aside"] == {"c": small}


@pytest.mark.filterwarnings("ignore:.*set aside")
def test_a_group_without_validation_rows_has_no_error():
    X, y, group = people(20, large=500)
    few = np.where(np.cumsum(group == "c") > 9, np.char.replace(group, "c", "d"), group)
    X2, y2, group2 = people(5, seed=3, large=500)
    y2 = np.where(group2 == "c", y2 + 50.0, y2)
    fair = ESVDFair(LinearRegression().fit(X, y), target_ks=0.9, effort=Effort.quick())
    fair.fit(X, y, sensitive_features=few, validation=(X2, y2, np.char.replace(group2, "c", "d")))
    summary, alone, before = fair.summary_, group2 != "c", fair.model_.predict(X2)
    assert list(summary["group_mse_after"]) == ["a", "b", "d"]
    assert summary["rows"] == 1005
    assert summary["mse_before"] == pytest.approx(np.mean((before - y2) ** 2))
    assert summary["ks_before"] == pytest.approx(ks_distance(before[alone], sensitive_features=group2[alone]))
    everybody = repair(*people(60, large=1000), min_group_rows=2, target_ks=0.9).summary_
    assert everybody["groups_set_aside"] == {}
    assert [pair["groups"] for pair in everybody["pairs"]] == [("a", "b"), ("a", "c"), ("b", "c")]


def test_fewer_than_two_groups_left_is_an_error_that_says_so():
    X, y, _ = people(0, large=60)
    few = np.where(np.arange(120) < 20, "few", "many")
    with pytest.raises(
        InputError, match=r"`min_group_rows=30`, .* fewer than two groups to compare \('many': 100, 'few': 20"
    ):
        repair(X, y, few)


# --- choices -------------------------------------------------------------------------------------------------------


def test_an_original_model_that_meets_the_target_is_returned_unchanged():
    """Of a model that was trained badly every refit is more accurate, and nobody asked for that."""
    X, y, group = people(0, large=2000)
    model = LinearRegression().fit(X, y)
    model.coef_ = model.coef_ * [0.1, 0.5, 1.5, 1.0]
    fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick()).fit(X, y, sensitive_features=group)
    assert fair.summary_["decided_by"] == "the original model meets the target"
    assert any(point.mse < 0.5 * fair.summary_["mse_before"] for point in fair.curve_.points)
    np.testing.assert_array_equal(fair.predict(X), model.predict(X))
    assert fair.edits_ == []


def test_a_repair_that_keeps_less_than_half_of_the_variance_says_so_and_names_a_point_that_keeps_it():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 4000)
    X = rng.normal(size=(4000, 2)) + np.outer(group, [2.0, 0.0])
    y = X @ [2.0, 0.5] + 0.3 * rng.normal(size=4000)
    model = LinearRegression().fit(X, y)
    with pytest.warns(ESVDFairWarning, match=r"keeps \d+% of the variance .* number \d+ of the curve") as caught:
        fair = ESVDFair(model, target_ks=0.1).fit(X, y, sensitive_features=group)
    summary = fair.summary_
    assert summary["r2_after"] < 0.5 * summary["r2_before"]
    said = str(caught[0].message)
    assert f"keeps {summary['r2_after'] / summary['r2_before']:.0%} of" in said
    point = fair.curve_.points[int(said.split("number ")[1].split()[0])]
    assert point.r2 >= 0.5 * summary["r2_before"]
    assert f"{point.ks_population:.3f}" in said
    fairer = [p for p in fair.curve_.points if p.ks_population < point.ks_population]
    assert all(p.r2 < 0.5 * summary["r2_before"] for p in fairer)


# --- over-fitted models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over_fitted():
    """A wide network that has learned 600 rows by heart."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 600)
    X = rng.normal(size=(600, 8)) + np.outer(group, np.eye(8)[0])
    y = X[:, 0] + X[:, 1] + rng.normal(size=600)
    network = MLPRegressor(hidden_layer_sizes=(100,), max_iter=400, tol=1e-6, learning_rate_init=0.01, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return network.fit(X, y), X, y, group


@pytest.mark.filterwarnings("ignore:.*(No candidate meets|below the noise level|keeps .* of the variance|no better)")
def test_the_estimate_lies_within_its_interval_and_below_its_bound(over_fitted):
    model, X, y, group = over_fitted
    fair = ESVDFair(model, target_ks=0.1, effort=Effort.quick()).fit(X, y, sensitive_features=group)
    outside = 0
    for point in fair.curve_.points:
        assert point.ks_low <= point.ks_population <= min(point.ks_high, point.ks_upper)
        outside += point.ks_population in (point.ks_low, point.ks_high, point.ks_upper)
    assert outside  # the training rows show more than the validation rows at some points
    found = fair.summary_
    assert found["ks_interval"][0] <= found["ks_population"] <= min(found["ks_interval"][1], found["ks_upper"])
    assert all(pair["ks_population"] <= pair["ks_upper"] for pair in found["pairs"])


@pytest.mark.filterwarnings("ignore:.*(No candidate meets|keeps .* of the variance|no better than a constant)")
def test_training_rows_are_estimated_by_cross_fitting(over_fitted, monkeypatch):
    """In sample the strongest refits show hardly any distance; rows that were left out show what they have."""
    from esvdfair.evaluation import evaluate

    seen = []
    monkeypatch.setattr(
        "esvdfair.estimator.evaluate", lambda found, *more, **opts: seen.append(found) or evaluate(found, *more, **opts)
    )
    model, X, y, group = over_fitted
    ESVDFair(model, target_ks=0.15, targets="labels", effort=Effort.quick()).fit(X, y, sensitive_features=group)
    (candidates,) = seen
    (some, predictions), codes = candidates.cross_fitted, candidates.problem.training.codes
    place = {(fit.target, fit.ridge, fit.strength): i for i, fit in enumerate(candidates.fits)}
    apart, inside = [], []
    for j, fit in enumerate(some):
        i = place[fit.target, fit.ridge, fit.strength]
        apart.append(ks_distance(predictions[:, j], sensitive_features=codes))
        inside.append(ks_distance(candidates.training[:, i], sensitive_features=codes))
    strong = [fit.strength > 0.5 for fit in some]
    assert np.mean(np.array(apart)[strong]) > 1.5 * np.mean(np.array(inside)[strong])


# --- pickles -------------------------------------------------------------------------------------------------------


def test_a_pickle_keeps_the_intervals_and_holds_no_rows():
    X, y, group = people(0, large=4000)
    fair = repair(X, y, group)
    content = pickle.dumps(fair)
    assert len(content) < 8 * 2000  # one column of the validation rows
    again = pickle.loads(content)
    for point, other in zip(fair.curve_.points, again.curve_.points, strict=True):
        assert (point.ks_low, point.ks_high, point.ks_upper) == (other.ks_low, other.ks_high, other.ks_upper)
        assert 0 <= other.ks_low <= other.ks_high
