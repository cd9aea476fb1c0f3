"""`rescale=True` keeps mean and standard deviation of the original predictions, and no KS distance changes."""

import warnings

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, PoissonRegressor
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance, summarise


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    a = rng.choice(3, 1500, p=[0.6, 0.38, 0.02])  # the third group has some 30 rows and is set aside
    X = rng.normal(size=(1500, 4)) + a[:, None] * [1.2, 0, 0, 0]
    return X, 1e5 + 1e4 * (X[:, 0] + np.sin(X[:, 1]) + 0.3 * rng.normal(size=1500)), a


def network(X, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return MLPRegressor(hidden_layer_sizes=(12, 8), max_iter=40, learning_rate_init=0.01, random_state=0).fit(
            X, (y - 1e5) / 1e4
        )


def linear(X, y):
    return LinearRegression().fit(X, y)


def trees(X, y):
    return GradientBoostingRegressor(n_estimators=20, random_state=0).fit(X, y)


@pytest.mark.filterwarnings("ignore::esvdfair.ESVDFairWarning")
@pytest.mark.parametrize("method", ["transport", "parity", "exact", "paper"])
@pytest.mark.parametrize("make", [linear, network, trees])
def test_mean_and_deviation_are_the_original_ones_and_ks_is_the_same(data, make, method):
    if make is not network and method in ("exact", "paper"):
        pytest.skip("has no hidden layer")
    X, y, a = data
    model = make(X, y)
    options = {"method": method, "effort": Effort.quick(), "min_group_rows": 60}
    weight = np.random.default_rng(1).uniform(0.2, 2, len(y))
    fit = {"sensitive_features": a, "sample_weight": weight, "validation": (X[::3], y[::3] + 1e-3, a[::3])}
    plain, fair = (ESVDFair(model, rescale=rescale, **options).fit(X, y, **fit) for rescale in (False, True))
    curves = plain.curve_.points, fair.curve_.points
    before, share = model.predict(X), weight / weight.sum()
    for point in fair.curve_.points:
        after = fair.curve_.model(point).predict(X)
        if point.constant or point.target == "untouched":
            continue
        assert share @ after == pytest.approx(share @ before, rel=1e-7, abs=1e-7 * before.std())
        spread, wanted = (np.sqrt(share @ (p - share @ p) ** 2) for p in (after, before))
        assert spread == pytest.approx(wanted, rel=1e-7)
    if method == "transport":  # the same fits, of which others may be on the curve
        both = {(p.target, p.ridge, p.strength): p.ks for p in curves[0]}
        shared = [(both[key], p.ks) for p in curves[1] if (key := (p.target, p.ridge, p.strength)) in both]
        assert len(shared) >= 3
        np.testing.assert_allclose(*np.transpose(shared), atol=1e-12)
        narrower = [p for p in curves[0] if p.strength > 0]
        assert any(plain.curve_.model(p).predict(X).std() < 0.99 * before.std() for p in narrower)


def test_errors_are_those_of_the_rescaled_model(data):
    X, y, a = data
    rows = slice(0, None, 2)
    fair = ESVDFair(linear(X, y), method="parity", rescale=True, effort=Effort.quick(), min_group_rows=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        fair.fit(X, y, sensitive_features=a, validation=(X[rows] + 1e-6, y[rows], a[rows]))
    after = fair.predict(X[rows] + 1e-6)
    assert fair.summary_.mse_after == pytest.approx(np.mean((after - y[rows]) ** 2))
    inside = a[rows] < 2
    assert fair.summary_.ks_after == pytest.approx(ks_distance(after[inside], sensitive_features=a[rows][inside]))
    (edit,) = fair.edits_
    np.testing.assert_allclose(edit.weight_after[0], fair.estimator_.coef_)


def test_a_summary_is_rescaled_too(data):
    X, y, a = data
    model = linear(X, y)
    options = {"rescale": True, "effort": Effort.quick(), "min_group_rows": 60}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        whole = ESVDFair(model, **options).fit_summary(summarise(model, X, y, sensitive_features=a))
        fair = ESVDFair(model, **options).fit(X, y, sensitive_features=a)
    np.testing.assert_allclose(whole.predict(X), fair.predict(X))


def test_what_cannot_be_rescaled_is_refused(data):
    X, y, a = data
    fit = {"sensitive_features": np.minimum(a, 1)}
    with pytest.raises(ValueError, match=r"`rescale=True` requires .* and a exp follows"):
        ESVDFair(PoissonRegressor(alpha=0).fit(X, y / 1e5), rescale=True).fit(X, y / 1e5, **fit)
    with pytest.raises(ValueError, match=r"the last layer 'coef_' has no bias"):
        ESVDFair(LinearRegression(fit_intercept=False).fit(X, X[:, 0]), rescale=True).fit(X, X[:, 0], **fit)
    with pytest.raises(ValueError, match=r"`rescale='yes'`; expected False or True"):
        ESVDFair(linear(X, y), rescale="yes").fit(X, y, **fit)
