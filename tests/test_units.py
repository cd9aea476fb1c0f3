"""A repair does not depend on the units of the inputs, nor on the scale of hidden units."""

import copy

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import Effort, ESVDFair

pytestmark = pytest.mark.filterwarnings("ignore:.*(keeps .* of the variance|below the noise level|No candidate meets)")

SCALES = [1e-6, 1e6]


@pytest.fixture(scope="module")
def table():
    """Income in euros next to flags, age and a score; the income of group 1 is lower."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 1200)
    income = np.exp(rng.normal(10.2 - 0.4 * group, 0.5))
    flag = rng.random(1200) < 0.3 + 0.2 * group
    X = np.column_stack([income, flag, rng.uniform(18, 80, 1200), rng.normal(size=1200), rng.random(1200) < 0.004])
    y = 4 * X[:, 0] / 3e4 + X[:, 1] - X[:, 2] / 40 + X[:, 3] + rng.normal(size=1200)
    return X, y, group


def repaired(model, table, X=None, **options):
    data, y, group = table
    X = data if X is None else X
    options = {"target_ks": 0.1, "effort": Effort.quick(), "random_state": 0} | options
    return ESVDFair(model, **options).fit(X, y, sensitive_features=group)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("method", ["transport", "parity"])
def test_a_linear_model_in_other_units_is_repaired_alike(table, method, groups):
    X, y, group = table
    group = group + (np.arange(len(y)) % 3 == 0) if groups == 3 else group
    before = repaired(LinearRegression().fit(X, y), (X, y, group), method=method).predict(X)
    for scale in SCALES:
        units = np.array([1.0, scale, 1.0, 1 / scale, 1.0])
        model = LinearRegression().fit(X, y)
        model.coef_ = model.coef_ / units
        after = repaired(model, (X, y, group), X * units, method=method).predict(X * units)
        assert np.abs(after - before).max() < 1e-6 * before.std()


def test_a_scaler_in_front_changes_nothing(table):
    X, y, _ = table
    plain = repaired(LinearRegression().fit(X, y), table)
    scaled = repaired(make_pipeline(StandardScaler(), LinearRegression()).fit(X, y), table)
    np.testing.assert_allclose(plain.predict(X), scaled.predict(X), rtol=0, atol=1e-6 * y.std())
    assert plain.summary_["mse_after"] < np.var(y)


@pytest.fixture(scope="module")
def network(table):
    X, y, _ = table
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1)
    ).double()
    with torch.no_grad():
        net[0].weight /= torch.tensor(X.std(axis=0) + 1e-9)
        net[0].weight[3], net[0].bias[3] = 0.0, -1.0  # dead
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    inputs, labels = torch.tensor(X), torch.tensor(y)[:, None]
    for _ in range(150):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), labels).backward()
        optimiser.step()
    return net.eval()


@pytest.mark.parametrize("method", ["transport", "parity", "exact"])
def test_hidden_units_in_other_units_are_repaired_alike(network, table, method):
    X = table[0]
    options = {"method": method} | ({"target_ks": None} if method == "exact" else {})
    before = repaired(network, table, **options).predict(X)
    assert np.abs(before - network(torch.tensor(X)).detach().numpy()[:, 0]).max() > 0.1
    for scale in SCALES:
        other = copy.deepcopy(network)
        with torch.no_grad():
            for i, unit in ((0, 2), (0, 9), (2, 1), (2, 5)):
                other[i].weight[unit] *= scale
                other[i].bias[unit] *= scale
                other[i + 2].weight[:, unit] /= scale
        np.testing.assert_allclose(other(torch.tensor(X)).detach(), network(torch.tensor(X)).detach(), rtol=1e-9)
        after = repaired(other, table, **options).predict(X)
        assert np.abs(after - before).max() < 1e-6 * before.std()


def test_a_feature_that_varies_on_three_rows_keeps_its_weight(table):
    X, y, group = table
    rare = np.zeros(len(X))
    rare[:3] = 1.0
    wild = np.column_stack([X, rare])
    labels = y + 50 * rare
    model = LinearRegression().fit(X, y)
    model.coef_, model.n_features_in_ = np.append(model.coef_, 0.0), 6
    fair = ESVDFair(model, target_ks=0.1, validation_fraction=0.0).fit(wild, labels, sensitive_features=group)
    weight = fair.estimator_.coef_[-1]
    assert abs(weight) < 0.5  # least squares would take 50


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["transport", "parity"])
def test_last_bits_that_break_ties_change_nothing(method, seed):
    """Of features on few steps, people of different groups have equal predictions but for rounding."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 2, 1200)
    X = np.round(rng.normal(size=(1200, 3)) + 0.5 * group[:, None]) / 10
    y = X @ [1.0, 2.0, 3.0] + 0.05 * rng.normal(size=1200)
    model = LinearRegression().fit(X, y)
    found = []
    for bits in ([0, 0, 0], [1, -1, 2]):
        model.coef_ = np.array([1.0, 2.0, 3.0]) * (1 + np.array(bits) * 2.2e-16)
        fair = ESVDFair(model, method=method, target_ks=0.1, targets=("optimum",), effort=Effort.quick())
        found.append(fair.fit(X, y, sensitive_features=group).predict(X))
    assert np.abs(found[1] - found[0]).max() < 1e-9 * found[0].std()
