from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from esvdfair import ESVDFair, decisions
from esvdfair.batches import Data
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.problem import Effort
from esvdfair.report import content
from esvdfair.report.content import STEPS, Content, slider_points, spread_rows


def curve_of(*pairs):
    points = [SimpleNamespace(mse=mse, ks=ks, target="labels", index=i) for i, (mse, ks) in enumerate(pairs)]
    return SimpleNamespace(points=points)


def test_the_slider_takes_unbeaten_points_and_the_chosen_one():
    curve = curve_of((1.0, 0.5), (1.2, 0.3), (1.3, 0.4), (1.4, 0.1), (1.5, 0.2))
    assert [p.index for p in slider_points(curve, curve.points[1])] == [0, 1, 3]
    assert [p.index for p in slider_points(curve, curve.points[2])] == [0, 2, 1, 3]


def test_a_long_curve_keeps_its_ends_and_the_chosen_point():
    curve = curve_of(*[(1 + i / 100, 1 - i / 100) for i in range(100)])
    found = [p.index for p in slider_points(curve, curve.points[37])]
    assert len(found) <= STEPS
    assert {0, 37, 99} <= set(found)
    assert found == sorted(found)


def test_of_points_with_equal_numbers_the_chosen_one_is_shown():
    curve = curve_of((1.0, 0.5), (1.2, 0.3), (1.2, 0.3), (1.2, 0.3))
    found = slider_points(curve, curve.points[2])
    assert found[found.index(curve.points[2])].index == 2
    assert [p.index for p in found] == [0, 1, 2]


def test_rows_are_spread_over_large_groups_and_small_groups_are_kept():
    codes = np.r_[np.zeros(1000, int), np.ones(5, int)]
    rows = spread_rows(codes, 10)
    assert np.bincount(codes[rows]).tolist() == [10, 5]
    assert rows[0] == 0
    assert rows[9] == 999
    assert np.all(np.diff(rows) > 0)


def test_decisions_of_a_sample_are_about_all_people(monkeypatch):
    """Of groups of different size as many rows are looked at, and those too small to compare are selected too."""
    rng = np.random.default_rng(0)
    sex = np.repeat(["f", "m", "x"], [4000, 1000, 20])
    X = rng.normal(size=(len(sex), 2)) + np.outer(sex == "m", [1.5, 0])
    y = X.sum(axis=1) + rng.normal(size=len(sex))
    fair = ESVDFair(LinearRegression().fit(X, y), target_ks=0.2, effort=Effort.quick())
    with pytest.warns(ESVDFairWarning, match="too small"):
        fair.fit(X, y, sensitive_features=sex)
    test = Data(X, y, sex)
    made = {"judged": None, "test": test, "summary": None, "predicted": "y", "cutoffs": [{"select_share": 0.2}]}
    before, after = fair.model_.predict(X), fair.predict(X)
    exact = decisions(before, after, sensitive_features=sex, select_share=0.2)
    whole = Content(fair, test, **made)
    assert whole.decision == exact
    monkeypatch.setattr(content, "ROWS_OF_A_GROUP", 500)
    some = Content(fair, test, **made)
    assert len(some.rows.codes) == 1000
    assert some.decision.cutoff_before == pytest.approx(exact.cutoff_before, abs=0.15)
    assert some.decision.share_old_cutoff == pytest.approx(exact.share_old_cutoff, abs=0.02)
    assert some.after.mse == pytest.approx(whole.after.mse, rel=0.05)
    assert some.decision.rows["x"] == 20
