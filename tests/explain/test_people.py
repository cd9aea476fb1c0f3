"""Who is moved: small tables worked out by hand, and scipy for the ranks."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from esvdfair.explain import People, explain_people
from esvdfair.explain.people import mid_ranks

GROUPS = ["a", "a", "a", "b", "b"]
BEFORE = [1.0, 2.0, 3.0, 4.0, 5.0]
AFTER = [1.0, 2.5, 2.0, 6.0, 4.9]


def test_the_table_of_groups_by_hand():
    people = explain_people(BEFORE, AFTER, sensitive_features=GROUPS, threshold=0.5)
    a, b = people.groups
    assert (a.group, a.rows, b.group, b.rows) == ("a", 3, "b", 2)
    assert a.mean_before == pytest.approx(2)
    assert a.mean_after == pytest.approx(5.5 / 3)
    assert a.mean_change == pytest.approx(-0.5 / 3)
    assert a.mean_absolute_change == pytest.approx(0.5)
    assert (a.share_up, a.share_down, a.share_moved) == pytest.approx((1 / 3, 1 / 3, 1 / 3))  # 0.5 is not above 0.5
    assert a.rank_correlation == pytest.approx(0.5)  # ranks 1 2 3 become 1 3 2: 1 − 6·2/24
    assert (b.share_up, b.share_down, b.share_moved) == pytest.approx((0.5, 0.5, 0.5))
    assert b.rank_correlation == pytest.approx(-1)
    assert (a.mean_rank_change, b.mean_rank_change) == pytest.approx((0, 0))  # people only swap within the groups
    assert people.rows == 5
    assert people.share_moved == pytest.approx(2 / 5)
    assert people.mean_absolute_change == pytest.approx((0.5 + 1 + 2 + 0.1) / 5)
    assert people.mean_absolute_rank_change == pytest.approx(4 * (1 / 5) / 5)  # four of five move one place of five
    assert people.rank_correlation == pytest.approx(1 - 6 * 4 / 120)


def test_the_planted_movers_come_first_in_order():
    rng = np.random.default_rng(0)
    before = rng.normal(size=200)
    after = before + 0.01 * rng.normal(size=200)
    after[[17, 150, 3]] += [5, -7, 3]
    groups = rng.integers(0, 3, 200)
    people = explain_people(before, after, sensitive_features=groups, threshold=1, top=3)
    assert [mover.row for mover in people.movers] == [150, 17, 3]
    assert [mover.group for mover in people.movers] == groups[[150, 17, 3]].tolist()
    for mover in people.movers:
        assert mover.change == pytest.approx(after[mover.row] - before[mover.row])
        assert mover.rank_after == pytest.approx((np.sum(after < after[mover.row]) + 0.5) / 200)
    assert people.movers[0].rank_after < people.movers[0].rank_before
    assert people.share_moved == pytest.approx(3 / 200)


def test_ranks_and_their_correlation_are_those_of_scipy():
    rng = np.random.default_rng(1)
    before, after = rng.integers(0, 12, 80) * 1.0, rng.integers(0, 12, 80) * 1.0  # many ties
    groups = rng.integers(0, 2, 80)
    people = explain_people(before, after, sensitive_features=groups)
    assert people.rank_correlation == pytest.approx(scipy.stats.spearmanr(before, after).statistic)
    for change in people.groups:
        mine = groups == change.group
        assert change.rank_correlation == pytest.approx(scipy.stats.spearmanr(before[mine], after[mine]).statistic)
    ranks = scipy.stats.rankdata(before), scipy.stats.rankdata(after)
    assert people.mean_absolute_rank_change == pytest.approx(np.abs(ranks[1] - ranks[0]).mean() / 80)
    np.testing.assert_allclose(mid_ranks(before, np.ones(80)), (ranks[0] - 0.5) / 80)


def test_a_weight_counts_as_so_many_rows():
    rng = np.random.default_rng(2)
    before, after, groups = rng.normal(size=30), rng.normal(size=30), rng.integers(0, 2, 30)
    weight = rng.integers(0, 4, 30)
    weighted = explain_people(before, after, sensitive_features=groups, sample_weight=weight, threshold=0.7)
    repeat = np.repeat(np.arange(30), weight)
    repeated = explain_people(before[repeat], after[repeat], sensitive_features=groups[repeat], threshold=0.7)
    assert weighted.rows == np.count_nonzero(weight)
    assert all(weight[mover.row] > 0 for mover in weighted.movers)
    pd.testing.assert_frame_equal(weighted.to_frame().drop(columns="rows"), repeated.to_frame().drop(columns="rows"))
    for name in ("rank_correlation", "mean_absolute_rank_change", "share_moved", "mean_absolute_change"):
        assert getattr(weighted, name) == pytest.approx(getattr(repeated, name))


def test_the_threshold_is_a_quarter_of_a_standard_deviation_unless_given():
    people = explain_people(BEFORE, AFTER, sensitive_features=GROUPS)
    assert people.threshold == pytest.approx(np.std(BEFORE) / 4)
    assert explain_people(BEFORE, AFTER, sensitive_features=GROUPS, threshold=0).share_moved == pytest.approx(4 / 5)


def test_nobody_moves():
    people = explain_people(BEFORE, np.array(BEFORE) + 1e-9, sensitive_features=GROUPS)
    assert people.movers == ()
    assert people.rank_correlation == pytest.approx(1)
    assert people.mean_absolute_rank_change == 0
    assert [(g.share_up, g.share_down, g.share_moved) for g in people.groups] == [(0, 0, 0)] * 2


def test_constant_predictions_and_a_group_of_one():
    people = explain_people([1, 2, 3], [2, 2, 2], sensitive_features=["a", "a", "b"])
    assert people.rank_correlation is None
    assert [group.rank_correlation for group in people.groups] == [None, None]
    still = explain_people([2, 2], [2, 2], sensitive_features=["a", "b"])
    assert (still.threshold, still.share_moved, still.movers) == (0, 0, ())


def test_the_frames_hold_the_fields():
    people = explain_people(BEFORE, AFTER, sensitive_features=[(g, 1) for g in GROUPS], top=2)
    assert isinstance(people, People)
    assert people.to_frame()["group"].tolist() == [("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"after": AFTER[:4]}, "`before` has 5 rows but `after` has 4"),
        ({"after": [1, 2, np.nan, 4, 5]}, "`after` contains 1 NaN"),
        ({"before": ["low"] * 5}, "`before` contains values that are not numbers"),
        ({"before": [], "after": [], "sensitive_features": []}, "hold no predictions"),
        ({"sensitive_features": GROUPS[:3]}, "`sensitive_features` has 3"),
        ({"sensitive_features": ["a", None, "a", "b", "b"]}, "1 missing value"),
        ({"sample_weight": [0] * 5}, "is zero everywhere"),
        ({"threshold": -1}, "threshold=-1"),
        ({"top": -1}, "top=-1"),
    ],
)
def test_bad_input_is_named(change, said):
    given = {"before": BEFORE, "after": AFTER, "sensitive_features": GROUPS} | change
    with pytest.raises(ValueError, match=said):
        explain_people(given.pop("before"), given.pop("after"), **given)


def test_a_missing_attribute_can_be_a_group():
    people = explain_people(BEFORE, AFTER, sensitive_features=["a", None, "a", "b", "b"], missing="group")
    assert [group.group for group in people.groups] == ["a", "b", "missing"]
