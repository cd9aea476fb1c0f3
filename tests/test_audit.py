import numpy as np
import pandas as pd
import pytest

from esvdfair import group_mse, ks_distance, ks_floor
from esvdfair.audit import audit_predictions, mean_interval


def test_the_verdict_of_equal_groups():
    scores = np.random.default_rng(0).normal(size=400)
    found = audit_predictions(scores, np.resize(["f", "m"], 400))
    assert found.verdict().startswith("No difference beyond chance")
    assert "Where they differ" not in found.verdict()


def test_the_verdict_of_groups_that_differ_on_few_rows():
    sex = np.resize(["f", "m"], 80)
    scores = np.random.default_rng(0).normal(size=80) + 0.9 * (sex == "m")
    found = audit_predictions(scores, sex)
    assert found.ks_interval[0] < found.ks / 2
    assert "but how much is uncertain" in found.verdict()


def test_the_verdict_says_who_pays_and_where_the_groups_part():
    sex = np.resize(["f", "m"], 1000)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=1000) + 2.0 * (sex == "m")
    y = scores + rng.normal(size=1000) * np.where(sex == "f", 3.0, 1.0)
    found = audit_predictions(scores, pd.DataFrame({"sex": sex}), y)
    widest = found.to_dict()["widest"]
    assert widest["more_share"] - widest["fewer_share"] == pytest.approx(found.ks)
    assert widest["more_share"] == pytest.approx(np.mean(scores[sex == "f"] <= widest["threshold"]))
    assert f"{widest['more_share']:.0%} of f but {widest['fewer_share']:.0%} of m" in found.verdict()
    assert "The model errs most on f" in found.verdict()


def test_whole_weights_are_people_and_a_row_of_weight_zero_is_nobody():
    rng = np.random.default_rng(1)
    sex, scores, weight = np.resize(["f", "m", "m"], 90), rng.normal(size=90), rng.integers(0, 4, 90)
    y = scores + rng.normal(size=90)
    found = audit_predictions(scores, sex, y, sample_weight=weight)
    twice = audit_predictions(np.repeat(scores, weight), np.repeat(sex, weight), np.repeat(y, weight))
    assert found.rows == np.count_nonzero(weight) < twice.rows
    for name in ("ks", "mean_gap", "wasserstein", "mse", "widest"):
        assert getattr(found, name) == pytest.approx(getattr(twice, name)), name
    for mine, theirs in zip(found.groups, twice.groups, strict=True):
        assert (mine.mean, mine.mse, mine.mean_error) == pytest.approx((theirs.mean, theirs.mse, theirs.mean_error))
    assert found.ks == ks_distance(scores, sensitive_features=sex, sample_weight=weight)
    assert found.ks_floor == ks_floor(sensitive_features=sex, y_pred=scores, sample_weight=weight) > twice.ks_floor
    by_group = group_mse(y, scores, sensitive_features=sex, sample_weight=weight)
    assert {g.group: g.mse for g in found.groups} == pytest.approx(by_group)


@pytest.mark.parametrize("weight", [None, np.linspace(0.5, 2, 8)])
def test_intervals_of_group_figures_cover(weight):
    """The interval of a group's mean holds the true mean in 95 of 100 tables, even of eight rows."""
    draws = np.random.default_rng(0).normal(size=(1000, 8))
    held = sum(low <= 0 <= high for low, high in (mean_interval(draw, weight) for draw in draws))
    assert 935 <= held <= 965
