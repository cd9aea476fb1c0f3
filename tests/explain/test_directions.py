"""Directions of the gap, on networks where feature and unit that carry it are known."""

import numpy as np
import pandas as pd
import pytest
import scipy.linalg
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from esvdfair import ESVDFair, GroupMoments
from esvdfair.batches import row_key
from esvdfair.core import gaps
from esvdfair.core.edits import edit_exact
from esvdfair.explain import explain_directions
from tests.explain.networks import elsewhere, network, random_coefs

WIDTHS = 5, 6, 4, 1


def people(rows=800, groups=2, seed=0):
    """x1 has another mean in each group, x3 another spread."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, groups, rows)
    X = rng.normal(size=(rows, 5))
    X[:, 1] += 2.0 * a
    X[:, 3] *= 1 + 2.0 * a
    return X, a


def test_the_planted_features_are_named():
    X, a = people()
    frame = pd.DataFrame(X, columns=["height", "debt", "age", "income", "rent"])
    coefs = [-np.eye(5), np.ones((5, 1))]
    model = network(*coefs)
    model.feature_names_in_ = np.array(frame.columns, dtype=object)
    found = explain_directions(model, frame, sensitive_features=a, layer=0)
    (mean,) = found.mean
    assert mean.features[0] == ("debt", pytest.approx(1, abs=0.05))
    assert mean.sigma_before == pytest.approx(2, abs=0.3)
    covariance = found.covariance[0]
    assert covariance.features[0] == ("income", pytest.approx(1, abs=0.01))
    assert covariance.share > 0.95
    assert covariance.group_sds == pytest.approx((1, 3), rel=0.1)
    # u points to where "debt" grows, although the layer turns it round
    assert mean.group_means[1] - mean.group_means[0] == pytest.approx(mean.sigma_before)
    assert len(mean.features) == 3
    names = explain_directions(network(*coefs), X, sensitive_features=a, layer=0)
    assert names.mean[0].features[0][0] == "x1"
    named = explain_directions(network(*coefs), X, sensitive_features=a, layer=0, feature_names=list("abcde"))
    assert named.mean[0].features[0][0] == "b"


@pytest.mark.parametrize("groups", [2, 3])
def test_sigma_share_and_means_by_hand(groups):
    X, a = people(groups=groups)
    coefs = random_coefs(*WIDTHS)
    found = explain_directions(network(*coefs, bias=0.1), X, sensitive_features=a, top=99)
    h = np.maximum(X @ coefs[0] + 0.1, 0)
    z, moments = h @ coefs[1] + 0.1, GroupMoments().update(h, a)
    assert found.layer == "coefs_[1]"
    assert len(found.mean) == groups - 1
    assert sum(d.sigma_before**2 for d in found.mean) == pytest.approx(found.mean_gap_before)
    assert found.mean_gap_before == pytest.approx(gaps.squared_mean_gap(coefs[1].T, moments))
    assert found.covariance_gap_before == pytest.approx(gaps.squared_covariance_gap(coefs[1].T, moments))
    paper = gaps.explain_mean(coefs[1].T, moments, epsilon=1e-9).sigma[: groups - 1]
    np.testing.assert_allclose([d.sigma_before for d in found.mean], paper, rtol=1e-6)
    paper = gaps.explain_covariance(coefs[1].T, moments)
    np.testing.assert_allclose(found.spectrum_before, paper.sigma)
    if groups == 2:  # Differs from the paper: the gap itself is split, not its bound
        difference = np.cov(z[a == 0].T) - np.cov(z[a == 1].T)
        values, u = np.linalg.eigh(difference)
        order = np.argsort(-np.abs(values))
        sigma, u = np.sqrt(np.abs(values[order])), u[:, order]
        np.testing.assert_allclose([d.difference for d in found.covariance], values[order])
        assert min(values) < 0 < max(values)
        assert sum(d.difference**2 for d in found.covariance) == pytest.approx(found.covariance_gap_before)
        assert {d.share_of for d in found.covariance} == {"gap"}
        means = z[a == 0].mean(axis=0) - z[a == 1].mean(axis=0)
        assert abs(found.mean[0].difference) == pytest.approx(np.linalg.norm(means))
    else:
        sigma, u = paper.sigma, paper.u
        assert {d.share_of for d in found.covariance} == {"bound"}
        assert {d.difference for d in (*found.mean, *found.covariance)} == {None}
    np.testing.assert_allclose([d.sigma_before for d in found.covariance], sigma)
    for kind, power in ((found.mean, 2), (found.covariance, 4)):
        sigma = np.array([d.sigma_before for d in kind])
        np.testing.assert_allclose([d.share for d in kind], sigma**power / np.sum(sigma**power))
        assert sum(d.share for d in kind) == pytest.approx(1)
        assert [d.rank for d in kind] == list(range(1, len(kind) + 1))
    for d, axis in zip(found.covariance, u.T, strict=True):
        along = z @ axis
        along *= np.sign(np.corrcoef(along, X[:, int(d.features[0][0][1:])])[0, 1])
        np.testing.assert_allclose(d.group_means, [along[a == g].mean() for g in range(groups)])
        np.testing.assert_allclose(d.group_sds, [along[a == g].std(ddof=1) for g in range(groups)])
        expected = [np.corrcoef(along, x)[0, 1] for x in X.T]
        top = np.argsort(-np.abs(expected))[:3]
        assert [name for name, _ in d.features] == [f"x{i}" for i in top]
        np.testing.assert_allclose([value for _, value in d.features], np.array(expected)[top])
        assert d.features[0][1] > 0


def test_after_is_the_exact_edit_for_a_model():
    X, a = people()
    coefs = random_coefs(*WIDTHS)
    found = explain_directions(network(*coefs), X, sensitive_features=a, layer="coefs_[0]", top=99)
    moments = GroupMoments().update(X, a)
    edit = edit_exact(coefs[0].T, moments, bias=np.zeros(6))[-1]
    assert found.after == "exact edit"
    assert found.mean_gap_after == pytest.approx(gaps.squared_mean_gap(edit.weight_after, moments))
    assert found.covariance_gap_after < found.covariance_gap_before / 100
    axes, values = gaps.covariance_spectrum(moments)
    after = edit.weight_after @ (axes * np.sqrt(np.abs(values)))
    np.testing.assert_allclose(found.spectrum_after, scipy.linalg.svdvals(after), atol=1e-12)
    left = edit.weight_after @ (np.cov(X[a == 0].T) - np.cov(X[a == 1].T)) @ edit.weight_after.T
    values, u = np.linalg.eigh(coefs[0].T @ (np.cov(X[a == 0].T) - np.cov(X[a == 1].T)) @ coefs[0])
    for d in found.covariance:
        axis = u[:, np.argmin(np.abs(np.sqrt(np.abs(values)) - d.sigma_before))]
        assert d.sigma_after == pytest.approx(np.sqrt(abs(axis @ left @ axis)), abs=1e-9)
    assert found.mean[0].sigma_after < found.mean[0].sigma_before / 3


def test_after_is_the_repaired_model_of_a_fitted_estimator():
    X, a = people()
    model = network(*random_coefs(*WIDTHS))
    fair = ESVDFair(model, method="exact", layer=0).fit(X, sensitive_features=a)
    found = explain_directions(fair, X, sensitive_features=a, layer=1)  # behind the edited layer: only its inputs moved
    assert found.after == "repaired model"
    h = np.maximum(X @ fair.estimator_.coefs_[0] + fair.estimator_.intercepts_[0], 0)
    moments = GroupMoments().update(h, a)
    assert found.mean_gap_after == pytest.approx(gaps.squared_mean_gap(model.coefs_[1].T, moments))
    assert found.mean_gap_after < found.mean_gap_before
    before = explain_directions(model, X, sensitive_features=a, layer=1)
    assert found.mean_gap_before == before.mean_gap_before
    parity = ESVDFair(model, method="parity", mean_reduction=9, targets="predictions").fit(X, sensitive_features=a)
    untouched = explain_directions(parity, X, sensitive_features=a)
    for d in (*untouched.mean, *untouched.covariance):  # parity edits the last layer alone
        assert d.sigma_after == pytest.approx(d.sigma_before)
    with pytest.raises(NotFittedError):
        explain_directions(ESVDFair(model), X, sensitive_features=a)
    with pytest.raises(ValueError, match="output='y' was given"):
        explain_directions(fair, X, sensitive_features=a, output="y")


def test_a_weight_counts_as_so_many_rows():
    X, a = people(rows=200)
    model, weight = network(*random_coefs(*WIDTHS)), np.random.default_rng(0).integers(0, 3, 200)
    repeat = np.repeat(np.arange(200), weight)
    weighted = explain_directions(model, X, sensitive_features=a, sample_weight=weight)
    repeated = explain_directions(model, X[repeat], sensitive_features=a[repeat])
    assert weighted.mean_gap_before == pytest.approx(repeated.mean_gap_before)
    np.testing.assert_allclose(weighted.mean[0].group_means, repeated.mean[0].group_means)
    assert [name for name, _ in weighted.mean[0].features] == [name for name, _ in repeated.mean[0].features]
    np.testing.assert_allclose(
        [value for _, value in weighted.mean[0].features], [value for _, value in repeated.mean[0].features]
    )


def test_a_planted_direction_is_stable_and_one_of_noise_is_not():
    X, a = people(rows=2000)
    found = explain_directions(network(np.eye(5), np.ones((5, 1))), X, sensitive_features=a, layer=0)
    assert found.mean[0].stability > 0.98
    assert found.covariance[0].stability > 0.98
    assert found.covariance[0].stable
    assert min(d.stability for d in found.covariance[1:]) < 0.7
    assert not all(d.stable for d in found.covariance)
    # by hand: the halves are told apart by a hash of the row number
    left = row_key(np.arange(2000), 0) < 0.5
    d, e = (X[half & (a == 0)].mean(axis=0) - X[half & (a == 1)].mean(axis=0) for half in (left, ~left))
    assert found.mean[0].stability == pytest.approx(abs(d @ e) / np.linalg.norm(d) / np.linalg.norm(e))
    few = explain_directions(network(np.eye(5), np.ones((5, 1))), X[:60], sensitive_features=np.arange(60) < 3)
    assert {d.stability for d in (*few.mean, *few.covariance)} == {None}  # one half has one row of a group
    assert not few.mean[0].stable


def test_no_gap_has_no_directions():
    X, _ = people(rows=100)
    found = explain_directions(
        network(*random_coefs(*WIDTHS)), np.vstack([X, X]), sensitive_features=np.repeat(["a", "b"], 100)
    )
    assert (found.mean, found.covariance) == ((), ())
    assert (found.mean_gap_before, found.covariance_gap_before) == (0, 0)
    frame = found.to_frame()
    assert len(frame) == 0
    assert "mean[a]" in frame.columns


def test_dead_units_and_one_output():
    X, a = people()
    coefs = random_coefs(5, 6, 1)
    coefs[0][:, :3] = 0
    found = explain_directions(network(*coefs, activation="identity"), X, sensitive_features=a)
    assert len(found.covariance) == 3  # the dead units carry nothing
    last = explain_directions(network(*coefs, activation="identity"), X, sensitive_features=a, layer=-1)
    prediction = (X @ coefs[0] @ coefs[1])[:, 0]
    assert last.mean[0].sigma_before == pytest.approx(abs(prediction[a == 0].mean() - prediction[a == 1].mean()))
    assert (last.mean[0].share, last.covariance[0].share) == (1, 1)
    assert last.mean[0].sigma_after < last.mean[0].sigma_before


def test_the_frame_has_a_row_for_each_direction():
    X, a = people(groups=3)
    found = explain_directions(network(*random_coefs(*WIDTHS)), X[:, :], sensitive_features=a, top=1)
    frame = found.to_frame()
    assert frame["kind"].tolist() == ["mean", "covariance"]
    assert frame["mean[2]"].tolist() == [d.group_means[2] for d in (*found.mean, *found.covariance)]
    assert frame["sd[0]"].tolist() == [d.group_sds[0] for d in (*found.mean, *found.covariance)]
    assert frame["feature_2"].tolist() == [d.features[1][0] for d in (*found.mean, *found.covariance)]
    assert found.mean[0].share < 1  # of two
    single = explain_directions(network(np.ones((1, 2)), np.ones((2, 1))), X[:, [1]], sensitive_features=a)
    assert single.to_frame()["feature_2"].isna().all()


def test_a_column_of_text_in_a_pipeline():
    X, a = people()
    frame = pd.DataFrame({"city": np.where(X[:, 1] > 1, "Oslo", "Rome"), "age": X[:, 0]})
    steps = make_column_transformer((OneHotEncoder(), ["city"]), remainder="passthrough")
    model = make_pipeline(
        steps, MLPRegressor(hidden_layer_sizes=(4,), solver="lbfgs", max_iter=30, tol=1.0, random_state=0)
    )
    model.fit(frame, X[:, 1] + X[:, 0])
    found = explain_directions(model, frame, sensitive_features=a)
    assert found.mean[0].features[0][0] in ("city=Oslo", "city=Rome")


def test_bad_input_is_named():
    X, a = people(rows=60)
    model = network(*random_coefs(*WIDTHS))
    with pytest.raises(ValueError, match="X yields batches"):
        explain_directions(model, lambda: iter([]), sensitive_features=a)
    for change, said in (
        ({"layer": 7}, "layer 7 is out of range"),
        ({"sensitive_features": np.zeros(60)}, "found 1 group"),
        ({"sensitive_features": np.arange(60) < 1}, "has 1 row"),
        ({"top": 0}, "top=0"),
        ({"feature_names": ["a"]}, "1 names, X has 5 columns"),
    ):
        with pytest.raises(ValueError, match=said):
            explain_directions(model, X, **{"sensitive_features": a, **change})
    with pytest.raises(ValueError, match="X has no rows"):
        explain_directions(model, X[:0], sensitive_features=a[:0])
    with pytest.raises(ValueError, match=r"one linear layer, 'coefs_\[0\]', and no hidden layer"):
        explain_directions(network(np.ones((5, 1))), X, sensitive_features=a)


def test_torch_and_onnx_tell_the_same():
    X, a = people()
    X = X.astype(np.float32)
    model = network(*random_coefs(*WIDTHS))
    expected = explain_directions(model, X, sensitive_features=a).to_frame()
    for other in elsewhere(model):
        found = explain_directions(other, X, sensitive_features=a).to_frame()
        pd.testing.assert_frame_equal(found, expected, rtol=1e-3, atol=1e-3)
        fair = ESVDFair(other, method="exact").fit(X, sensitive_features=a)
        assert explain_directions(fair, X, sensitive_features=a).mean[0].sigma_after < found["sigma_before"][0] / 2


def test_a_sequence_counts_as_the_mean_of_its_steps():
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    torch.manual_seed(0)

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.out = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)

        def forward(self, x):
            return self.out(self.step(x).mean(dim=1))

    X, a = people()
    X = torch.tensor(X[:, [0, 1, 2, 4]], dtype=torch.float32).reshape(-1, 2, 2)
    found = explain_directions(Pooled(), X, sensitive_features=a, layer="step")
    assert found.mean[0].features[0][0] == "x1"
