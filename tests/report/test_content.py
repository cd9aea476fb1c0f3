from types import SimpleNamespace

import numpy as np

from esvdfair.report.content import STEPS, slider_points, spread_rows


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
