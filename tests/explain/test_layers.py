"""Layer scan, on networks whose gap stands in a known layer."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair, ESVDFairWarning
from esvdfair.batches import Data, make_batches
from esvdfair.explain import LayerGap, LayerScan, scan_layers
from tests.explain.networks import elsewhere, network, random_coefs

# Untrained networks do for what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")


def people(rows=600, seed=0, groups=2):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, groups, rows)
    X = rng.normal(size=(rows, 3)) * (1 + 0.5 * a[:, None]) + a[:, None] * [1.0, 0, 0]
    return X, X.sum(axis=1) + 0.3 * rng.normal(size=rows), a


def random_network():
    return network(*random_coefs(3, 5, 4, 1))


def by_hand(z, a):
    """d_e², d_v², and both relative to the spread of z, from the layer's outputs themselves."""
    labels = np.unique(a)
    mean = covariance = 0.0
    for i, g in enumerate(labels):
        for h in labels[i + 1 :]:
            mean += np.sum((z[a == g].mean(axis=0) - z[a == h].mean(axis=0)) ** 2)
            covariance += np.sum(np.atleast_2d(np.cov(z[a == g].T) - np.cov(z[a == h].T)) ** 2)
    spread = np.atleast_2d(np.cov(z.T, bias=True))
    return mean, covariance, mean / np.trace(spread), covariance / np.sum(spread**2)


@pytest.mark.parametrize("groups", [2, 3])
def test_the_gaps_are_those_of_the_outputs_themselves(groups):
    X, y, a = people(groups=groups)
    model = random_network()
    scan = scan_layers(model, X, y, sensitive_features=a, validation=(X, y, a))  # so that every row counts
    h = X
    for row, coef in zip(scan.layers, model.coefs_, strict=True):
        found = row.mean_gap, row.covariance_gap, row.relative_mean_gap, row.relative_covariance_gap
        np.testing.assert_allclose(found, by_hand(h @ coef, a), rtol=1e-9)
        assert row.covariance_gap <= row.bound * (1 + 1e-12)
        assert (row.inputs, row.outputs) == coef.shape
        h = np.maximum(h @ coef, 0)
    assert [row.name for row in scan.layers] == ["coefs_[0]", "coefs_[1]", "coefs_[2]"]
    assert scan.evaluated_on == "validation"


def test_a_gap_that_is_born_in_the_second_layer_is_found_there():
    # Normal and two-point values of equal mean and variance: only the kink between the layers tells them apart.
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(1000, 2))
    normal = np.linalg.solve(np.linalg.cholesky(np.cov(normal.T)), (normal - normal.mean(axis=0)).T).T
    two = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]] * 250) / np.sqrt(1000 / 999)
    X, a = np.vstack([normal, two]), np.repeat([0, 1], 1000)
    model = network(np.eye(2), np.eye(2), [[1.0], [1.0]])
    scan = scan_layers(model, X, sensitive_features=a, validation=(X, None, a))
    first, second, last = scan.layers
    assert max(first.mean_gap, first.covariance_gap, first.bound) < 1e-20
    assert second.relative_mean_gap > 0.01
    assert last.relative_mean_gap > 0.01


def test_a_gap_that_the_second_layer_lets_go_is_found_in_the_first():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 2000)
    X = rng.normal(size=(2000, 3)) * (1 + a[:, None] * [1, 0, 0]) + a[:, None] * [2, 0, 0]
    model = network(np.eye(3), [[0, 0], [1, 1], [1, -1]], [[1.0], [2.0]], activation="identity")
    scan = scan_layers(model, X, sensitive_features=a)
    first, second, last = scan.layers
    for row in (second, last):
        assert first.relative_mean_gap > 50 * row.relative_mean_gap
        assert first.relative_covariance_gap > 50 * row.relative_covariance_gap
    assert scan.ks_before < 2 * scan.ks_floor


@pytest.mark.filterwarnings("ignore:The repaired model is worse than the original in both")
@pytest.mark.parametrize("labels", [True, False])
def test_what_is_reached_is_what_the_estimator_reaches(labels):
    X, y, a = people()
    y = y if labels else None
    model, weight = random_network(), np.random.default_rng(1).random(len(X)) + 0.5
    rows = {"sensitive_features": a, "sample_weight": weight}
    scan = scan_layers(model, X, y, **rows, random_state=3)
    assert scan.evaluated_on == "heldout"
    assert scan.error_against == ("labels" if labels else "predictions")
    for row in scan.layers[:-1]:
        summary = ESVDFair(model, method="exact", layer=row.index, random_state=3).fit(X, y, **rows).summary_
        assert row.ks == pytest.approx(summary["ks_after"])
        assert row.mse == pytest.approx(summary["mse_after"], rel=1e-6)
        assert (row.ks_low, row.ks_high) == pytest.approx(summary["ks_interval"])
        assert (scan.ks_before, scan.rows) == (pytest.approx(summary["ks_before"]), summary["rows"])
        assert scan.mse_before == pytest.approx(summary["mse_before"])
    given = {"targets": scan.error_against, "mean_reduction": 15, "covariance_reduction": 150, "random_state": 3}
    parity = ESVDFair(model, method="parity", **given).fit(X, y, **rows).summary_
    assert (scan.layers[-1].ks, scan.layers[-1].mse) == pytest.approx((parity["ks_after"], parity["mse_after"]))
    assert scan.ks_before > 0.2  # there was a gap
    assert min(row.ks for row in scan.layers) < 0.8 * scan.ks_before


def test_batches_of_a_stream_without_labels():
    X, _, a = people()
    model = random_network()

    def stream():
        for part in np.split(np.arange(600), 3):
            yield X[part], None, a[part]

    def encoded():
        return iter(make_batches(Data(X, None, a), batch_size=200))

    expected = scan_layers(model, X, sensitive_features=a)
    for source in (stream, encoded):
        found = scan_layers(model, source)
        pd.testing.assert_frame_equal(found.to_frame(), expected.to_frame())
        assert found.error_against == "predictions"
    with pytest.raises(ValueError, match="read only once"):
        scan_layers(model, stream())


def test_dead_units_and_a_dead_layer():
    X, y, a = people()
    coefs = random_network().coefs_
    coefs[0][:, :2] = 0  # two dead units
    scan = scan_layers(network(*coefs), X, y, sensitive_features=a)
    assert np.isfinite(scan.to_frame().select_dtypes("number").to_numpy()).all()
    dead = network(np.zeros((3, 2)), np.zeros((2, 2)), [[1.0], [1.0]])
    with pytest.raises(ValueError, match="for every row"):
        scan_layers(dead, X, y, sensitive_features=a)


def test_an_edit_that_leaves_nothing_is_said_and_the_rest_still_told():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 400)
    X = a[:, None].astype(float)  # nothing but the group
    with pytest.warns(ESVDFairWarning, match=r"edit of layer 'coefs_\[0\]' there is no refit.*for every row"):
        scan = scan_layers(
            network([[1.0]], [[1.0]]), X, a + rng.normal(size=400), sensitive_features=a, mean_reduction=np.inf
        )
    assert scan.layers[0].ks is None
    assert scan.layers[0].mean_gap == pytest.approx(1)
    assert scan.best is scan.layers[1]


def test_no_hidden_layer_and_no_gap():
    X, y, a = people()
    assert [row.name for row in scan_layers(network(np.ones((3, 1))), X, y, sensitive_features=a).layers] == [
        "coefs_[0]"
    ]
    scan = scan_layers(
        random_network(), np.vstack([X, X]), np.append(y, y), sensitive_features=np.repeat(["a", "b"], 600),
        validation=(X, y, np.where(a, "a", "b")),
    )  # fmt: skip
    for row in scan.layers:
        assert (row.mean_gap, row.covariance_gap, row.bound) == (0, 0, 0)


def test_groups_too_small_to_hold_out_warn_once():
    X, y, a = people(rows=120)
    a = np.arange(120) < 35
    with pytest.warns(ESVDFairWarning, match="Too few rows") as caught:
        scan = scan_layers(random_network(), X, y, sensitive_features=a)
    assert len([each for each in caught if "Too few rows" in str(each.message)]) == 1
    assert scan.evaluated_on == "train"
    assert scan.rows == 120


def test_best_is_the_most_accurate_within_the_floor_of_the_fairest():
    def scan(floor, *reached):
        rows = (LayerGap(str(i), i, 1, 1, 0, 0, 0, 0, 0, ks, ks, ks, mse) for i, (ks, mse) in enumerate(reached))
        return LayerScan(tuple(rows), 0.5, 1.0, floor, "heldout", "labels", 10)

    assert scan(0.03, (0.10, 2.0), (0.12, 1.5), (0.2, 1.0)).best.index == 1
    assert scan(0.01, (0.10, 2.0), (0.12, 1.5), (0.2, 1.0)).best.index == 0
    assert scan(0.2, (None, None), (0.12, 1.5), (0.12, 1.5)).best.index == 1


def test_bad_input_is_named():
    X, y, a = people(rows=400)
    model = random_network()
    for change, error, said in (
        ({"sensitive_features": None}, ValueError, "sensitive_features is missing"),
        ({"sensitive_features": np.zeros(400)}, ValueError, "contains one group"),
        ({"X": X[:, :2]}, ValueError, "2 features"),
        ({"random_state": None}, TypeError, "random_state=None"),
        ({"mean_reduction": 0.5}, ValueError, r"reduction=0\.5"),
    ):
        with pytest.raises(error, match=said):
            scan_layers(model, **{"X": X, "y": y, "sensitive_features": a, **change})
    with pytest.raises(NotFittedError):
        scan_layers(MLPRegressor(), X, y, sensitive_features=a)


def test_torch_and_onnx_tell_the_same(tmp_path):
    X, y, a = people()
    model, path = random_network(), tmp_path / "model.onnx"
    module, exported = elsewhere(model)
    path.write_bytes(exported)
    expected = scan_layers(model, X, y, sensitive_features=a).to_frame().drop(columns="name")
    for other in (module, path):
        found = scan_layers(other, X.astype(np.float32), y, sensitive_features=a).to_frame()
        assert found["name"].is_unique
        pd.testing.assert_frame_equal(found.drop(columns="name"), expected, rtol=1e-3, atol=1e-2)
