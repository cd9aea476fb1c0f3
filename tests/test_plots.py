"""The plot shows every point, the floor and the choice."""

import sys

import pytest

from esvdfair.plots import plot_curve
from esvdfair.tradeoff import Curve, CurvePoint


def curve():
    points = tuple(
        CurvePoint(
            1.0 + i / 10, 0.4 - i / 10, max(0.3 - i / 10, 0), 0.5 - i / 10, 0.1, 0.1, "labels", 1e-4, i, 0.4 - i / 10, i
        )
        for i in range(4)
    )
    return Curve(points, 0.06, "heldout", ({},) * 4, dict)


def test_every_point_the_floor_and_the_choice_are_drawn():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra esvdfair[plots]")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes = plot_curve(curve(), target_ks=0.25)
    dots, *_ = [line for line in axes.lines if len(line.get_xdata()) == 4]
    assert list(dots.get_ydata()) == [1.0, 1.1, 1.2, 1.3]
    texts = [text.get_text() for text in axes.texts]
    assert "sampling floor" in texts
    assert any("KS 0.200" in text for text in texts)
    assert "heldout" in axes.get_xlabel()
    _, own = plt.subplots()
    assert plot_curve(curve(), ax=own) is own
    plt.close("all")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"esvdfair\[plots\]"):
        plot_curve(curve())
