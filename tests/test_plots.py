"""The plots show every point and every group, and name them."""

import sys
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from scipy import stats

from esvdfair import ks_distance
from esvdfair.curve import Curve, CurvePoint
from esvdfair.cutoffs import ratios_by_share
from esvdfair.plots import GROUPS, density, make_grid, plot_curve, plot_densities, plot_ratios


def curve():
    points = tuple(
        CurvePoint(
            mse=1.0 + i / 10,
            r2=0.5 - i / 10,
            ks=0.4 - i / 10,
            mean_gap=0.1,
            variance_gap=0.1,
            target="labels",
            ridge=1e-4,
            strength=i,
            ks_population=0.4 - i / 10,
            ks_pairs=(0.4 - i / 10,),
            ks_certified=None,
            constant=False,
            index=i,
            measure=lambda i=i: (max(0.3 - i / 10, 0), 0.5 - i / 10, 0.5 - i / 10),
        )
        for i in range(4)
    )
    return Curve(points, (("a", "b"),), (0.06,), (0.08,), (200.0,), "heldout", ({},) * 4, dict)


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra esvdfair[plots]")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_points_noise_level_and_choice_are_drawn_and_named(plt):
    found = curve()
    points = (found.points[0], replace(found.points[1], target="untouched"), *found.points[2:])
    _, own = plt.subplots()
    axes = plot_curve(replace(found, points=points, mse_refit=1.0), target_ks=0.25, ax=own)
    assert axes is own
    dots, *_ = [line for line in axes.lines if len(line.get_xdata()) == 4]
    assert list(dots.get_ydata()) == [1.0, 1.1, 1.2, 1.3]
    assert "held-out validation rows" in axes.get_xlabel()
    assert axes.get_ylabel() == "mean squared error"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "repaired models", "original model", "refit without fairness constraint", "target 0.25",
        "chosen: KS 0.200 (population 0.200),\nMSE 1.2",
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["noise level"]
    (zone,) = axes.patches
    assert zone.get_zorder() < min(line.get_zorder() for line in axes.lines)


def people(groups, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, groups, 400)
    return rng.normal(size=400) + codes, np.array([f"group {code}" for code in codes])


@pytest.mark.parametrize("groups", [2, 6])
def test_a_density_is_drawn_for_every_group_and_named(plt, groups):
    values, labels = people(groups)
    _, own = plt.subplots()
    axes = plot_densities(values, sensitive_features=labels, ax=own)
    assert axes is own
    lines = {line.get_label(): line for line in axes.lines if line.get_label().startswith("group")}
    assert list(lines) == [f"group {g}" for g in range(groups)]
    for g, line in enumerate(lines.values()):
        x, y = line.get_data()
        assert np.trapezoid(y, x) == pytest.approx(1, abs=0.03)
        assert np.average(x, weights=y) == pytest.approx(g, abs=0.25)  # the density of this group and no other
        assert line.get_color() == GROUPS[g]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(lines)
    assert axes.get_title(loc="left") == f"KS distance {ks_distance(values, sensitive_features=labels):.3f}"


def test_densities_of_rows_that_do_not_match_or_of_one_group_are_refused(plt):
    values, labels = people(2)
    with pytest.raises(ValueError, match="match row by row"):
        plot_densities(values, sensitive_features=labels[:-1])
    with pytest.raises(ValueError, match="group"):
        plot_densities(values, sensitive_features=["a"] * len(values))


def test_groups_have_the_colours_of_the_report():
    style = files("esvdfair.report").joinpath("page.css").read_text("utf-8")
    assert all(f"--g{i}: {colour};" in style for i, colour in enumerate(GROUPS))


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"esvdfair\[plots\]"):
        plot_curve(curve())
    with pytest.raises(ImportError, match=r"esvdfair\[plots\]"):
        plot_densities([0.0, 1.0, 2.0, 3.0], sensitive_features=["a", "a", "b", "b"])


def test_density_agrees_with_scipy_and_integrates_to_one():
    values = np.random.default_rng(0).normal(3, 2, 400)
    grid = make_grid([values], 201)
    sd = values.std(ddof=1)
    width = 0.9 * min(values.std(), np.ptp(np.quantile(values, [0.25, 0.75])) / 1.349) * 400**-0.2
    expected = stats.gaussian_kde(values, bw_method=width / sd)(grid)
    np.testing.assert_allclose(density(values, grid), expected, rtol=1e-9)
    assert np.trapezoid(density(values, grid), grid) == pytest.approx(1, abs=0.01)


def test_density_of_many_rows_is_that_of_their_quantiles():
    values = np.random.default_rng(1).gamma(3, size=20_000)
    grid = make_grid([values])
    exact = stats.gaussian_kde(values, bw_method=0.9 * 20_000**-0.2)(grid)
    assert np.abs(density(values, grid) - exact).max() < 0.05 * exact.max()


@pytest.mark.parametrize("value", [0.0, 1e-9, -5.0, 1e8])
def test_constant_predictions_still_have_a_density(value):
    values = np.full(10, value)
    grid = make_grid([values])
    found = density(values, grid)
    assert np.isfinite(found).all()
    assert np.all(np.diff(grid) > 0)
    assert np.argmax(found) == len(grid) // 2


def test_ratios_before_and_after_over_the_share_selected():
    rng = np.random.default_rng(0)
    groups = np.arange(400) % 2
    before = rng.normal(size=400) + groups
    after = before - groups
    ax = plot_ratios(before, after, sensitive_features=groups)
    _, old, new = ax.lines
    np.testing.assert_array_equal(np.column_stack(old.get_data()), ratios_by_share(before, sensitive_features=groups))
    assert np.mean(new.get_ydata()) > np.mean(old.get_ydata()) + 0.2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["original", "repaired"]


def test_axes_write_numbers_as_tables_do():
    salaries = np.linspace(20_000.0, 90_000.0, 200)
    ax = plot_densities(salaries, sensitive_features=np.arange(200) % 2)
    ax.figure.canvas.draw()
    assert "40,000" in [label.get_text() for label in ax.get_xticklabels()]
