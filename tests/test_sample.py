"""A fit that keeps a bounded sample beside one that keeps every row: how far apart they may be."""

from functools import partial

import numpy as np
import pytest
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair, candidates, ks_distance, passes, repair

ROWS, BOUND, COUPLED = 12_000, 3_000, 500


def make_rows(rows, seed):
    rng = np.random.default_rng(seed)
    group = (rng.random(rows) < 0.3).astype(int)
    x = rng.normal(size=(rows, 4)) + group[:, None] * np.array([0.8, -0.5, 0, 0])
    y = x[:, 0] + 0.5 * np.tanh(x[:, 1] * x[:, 2]) + 0.5 * rng.normal(size=rows)
    return x, y, group


@pytest.fixture(scope="module")
def network():
    x, y, _ = make_rows(4000, 2)
    return MLPRegressor(hidden_layer_sizes=(24,), early_stopping=True, random_state=0).fit(x, y)


@pytest.mark.parametrize("method", ["transport", "parity"])
def test_a_bounded_sample_comes_close_to_all_rows(network, method, monkeypatch):
    x, y, group = make_rows(ROWS, 0)
    fresh, label, its_group = make_rows(20_000, 1)
    found = []
    for bound, coupled in ((BOUND, COUPLED), (ROWS, ROWS)):
        monkeypatch.setattr(candidates, "TRANSPORT_ROWS", coupled)
        bounded = partial(passes.collect_rows, training_rows=bound, heldout_rows=bound)
        monkeypatch.setattr(repair, "collect_rows", bounded)
        fair = ESVDFair(network, method=method, target_ks=0.15, targets=("labels", "predictions"), random_state=0)
        prediction = fair.fit(x, y, sensitive_features=group).predict(fresh)
        found.append((ks_distance(prediction, sensitive_features=its_group), np.mean((prediction - label) ** 2)))
    (ks, mse), (ks_all, mse_all) = found
    assert abs(ks - ks_all) < 0.02
    assert abs(mse / mse_all - 1) < 0.05
    assert ks < 0.17  # both keep the promise on people whom neither has seen
    assert ks_all < 0.17
