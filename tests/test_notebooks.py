"""What a notebook shows: the summary, the curve, the distributions."""

import copy
import json
import pickle
import re
import sys
from collections.abc import Mapping
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.fit_report import FitReport


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 1500)
    X = rng.normal(size=(1500, 3)) + a[:, None] * [1.0, 0, 0]
    return X, X.sum(axis=1) + rng.normal(size=1500), np.where(a, "f<b>", "m")


@pytest.fixture(scope="module")
def fair(data):
    X, y, a = data
    model = LinearRegression().fit(X, y)
    return ESVDFair(model, target_ks=0.1, effort=Effort.quick()).fit(X, y, sensitive_features=a)


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra esvdfair[plots]")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_summary_is_a_mapping_whose_entries_are_attributes(fair, data):
    report = fair.summary_
    assert isinstance(report, Mapping)
    assert dict(report) == {name: getattr(report, name) for name in report}
    assert set(get_type_hints(FitReport)) == set(report)  # every entry is documented, and typed
    assert all(re.search(rf"\b{name}\b", FitReport.__doc__) for name in report)
    assert json.loads(json.dumps(report))["ks_after"] == report.ks_after
    assert {"ks_after", "items"} <= set(dir(report))
    assert type(report | {"met": None}) is dict
    for again in (pickle.loads(pickle.dumps(report)), copy.copy(report), copy.deepcopy(report)):
        assert type(again) is FitReport
        assert again == report
    with pytest.raises(AttributeError, match="FitReport has no entry 'ks'"):
        _ = report.ks
    X, y, a = data
    assert type(fair.assess(X, y, sensitive_features=a)) is FitReport


def test_a_summary_reads_well(fair):
    report = fair.summary_
    for shown in (repr(report), report._repr_html_()):
        assert "meets the target of 0.1" in shown
        assert f"{report.ks_before:.3f}" in shown
        assert f"{report.r2_after:.3f}" in shown
        assert f"Measured on {report.rows} held-out validation rows" in shown
    assert max(map(len, repr(report).split("\n\n")[1].splitlines())) < 100
    assert "of f&lt;b&gt; (" in report._repr_html_()
    assert "<b>m" not in report._repr_html_()


def test_a_curve_shows_a_picture_and_a_table(fair):
    curve, shown = fair.curve_, fair.curve_._repr_html_()
    assert shown.count("<circle") == len(curve)
    table = shown[shown.index("<table") :]
    frame = pd.DataFrame([re.findall(r"<td>(.*?)</td>", row) for row in table.split("</tr>")[1:-1]])
    np.testing.assert_allclose(frame[2].astype(float), [point.ks for point in curve.points], atol=5e-3)
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', shown)]
    assert np.corrcoef(places, [point.ks for point in curve.points])[0, 1] > 0.999


def test_a_curve_and_the_distributions_are_drawn(fair, data, plt):
    X, _, a = data
    dots, *_ = fair.curve_.plot(target_ks=0.1).lines
    assert list(dots.get_ydata()) == [point.mse for point in fair.curve_.points]
    before, after = fair.plot_distributions(X, sensitive_features=a)
    for ax, model in ((before, fair.model_), (after, fair)):
        ks = ks_distance(model.predict(X), sensitive_features=a)
        assert f"KS distance {ks:.3f}" in ax.get_title(loc="left")
    assert before.get_xlim() == after.get_xlim()
    _, own = plt.subplots(2)
    batches = ((X[i : i + 500], None, a[i : i + 500]) for i in range(0, 1500, 500))
    assert fair.plot_distributions(batches, sensitive_features=None, axes=own) is own
    assert own[1].get_title(loc="left") == after.get_title(loc="left")


def test_without_matplotlib_the_extra_is_named_and_tables_are_still_shown(fair, data, monkeypatch):
    X, _, a = data
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for draw in (fair.curve_.plot, lambda: fair.plot_distributions(X, sensitive_features=a)):
        with pytest.raises(ImportError, match=r"esvdfair\[plots\]"):
            draw()
    assert "<svg" in fair.curve_._repr_html_()
