"""Peers: the error without the extra always; the adapters themselves where the libraries are installed."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
from scipy.linalg import null_space

from esvdfair.baselines import WassersteinBarycenter
from reproduction.peers import EquipyWasserstein, FairlearnCorrelationRemover, LeaceRegression


def rows(n=600, groups=3, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, groups, size=n)
    x = rng.normal(size=(n, 4)) + codes[:, None] * [1.0, 0.5, 0.0, 0.0]
    return x, x @ [1.0, -0.3, 0.5, 0.2] + 0.1 * rng.normal(size=n), np.array(["a", "b", "c"])[codes]


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed (extra 'peers')")


@pytest.mark.parametrize(
    ("peer", "module", "distribution"),
    [
        (FairlearnCorrelationRemover(), "fairlearn.preprocessing", "fairlearn"),
        (EquipyWasserstein(), "equipy.fairness", "equipy"),
        (LeaceRegression(), "concept_erasure", "concept-erasure"),
    ],
)
def test_a_missing_library_names_the_extra(monkeypatch, peer, module, distribution):
    monkeypatch.setitem(sys.modules, module, None)
    x, scores, groups = rows()
    extra = {"X": x} if isinstance(peer, LeaceRegression) else {}
    with pytest.raises(ImportError, match=rf"needs {distribution}.*esvdfair\[peers\]"):
        peer.fit(scores, sensitive_features=groups, **extra)


@needs("fairlearn")
def test_fairlearn_equalises_the_group_means():
    _, scores, groups = rows()
    got = (
        FairlearnCorrelationRemover().fit(scores, sensitive_features=groups).predict(scores, sensitive_features=groups)
    )
    assert np.ptp([scores[groups == g].mean() for g in "abc"]) > 0.5
    np.testing.assert_allclose([got[groups == g].mean() for g in "abc"], scores.mean(), atol=1e-9)


@needs("equipy")
def test_equipy_agrees_with_our_barycentre():
    _, scores, groups = rows()
    peer = EquipyWasserstein(sigma=1e-9).fit(scores, sensitive_features=groups)
    ours = WassersteinBarycenter(split=False).fit(scores, sensitive_features=groups)
    got = peer.predict(scores, sensitive_features=groups)
    # it interpolates quantiles, we do not, so single rows differ by the gap to their neighbour
    assert np.abs(got - ours.predict(scores, sensitive_features=groups)).mean() < 0.03
    assert np.abs(got - scores).mean() > 0.3
    one = groups == "a"  # rows of one group alone are mapped as among the others
    assert np.abs(peer.predict(scores[one], sensitive_features=groups[one]) - got[one]).mean() < 0.03
    np.testing.assert_array_equal(got, peer.predict(scores, sensitive_features=groups))


@needs("concept_erasure")
def test_leace_leaves_no_mean_gap_and_needs_no_group():
    x, scores, groups = rows()
    got = LeaceRegression().fit(scores, sensitive_features=groups, X=x).predict(X=x)
    assert np.ptp([scores[groups == g].mean() for g in "abc"]) > 0.5
    np.testing.assert_allclose([got[groups == g].mean() for g in "abc"], scores.mean(), atol=1e-6)
    # least squares over all linear functions without a mean gap: constrain the coefficients instead
    means = np.stack([x[groups == g].mean(axis=0) for g in "abc"])
    free = null_space(means[1:] - means[0])
    centred = x - x.mean(axis=0)
    w = free @ np.linalg.lstsq(centred @ free, scores - scores.mean(), rcond=None)[0]
    np.testing.assert_allclose(got, scores.mean() + centred @ w, atol=1e-6)


@pytest.mark.parametrize("peer", [FairlearnCorrelationRemover(), EquipyWasserstein(), LeaceRegression()])
def test_weights_are_refused_rather_than_ignored(peer):
    x, scores, groups = rows()
    extra = {"X": x} if isinstance(peer, LeaceRegression) else {}
    with pytest.raises(ValueError, match="takes no sample weights"):
        peer.fit(scores, sensitive_features=groups, sample_weight=np.ones(600), **extra)
