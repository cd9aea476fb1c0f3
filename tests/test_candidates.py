"""Targets mean the same thing whatever the head, and parity at given reductions is what it says."""

import numpy as np
import pytest

from esvdfair.candidates import STRENGTHS, TRANSPORT_ROWS, LastLayer, Refits
from esvdfair.core.moments import GroupMoments
from esvdfair.models.heads import Head
from esvdfair.passes import Rows
from esvdfair.repair import _parity_at


def refits(head=None, *, rows=600, y=None, groups=2, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.sort(rng.integers(0, groups, rows))
    h = np.maximum(rng.normal(size=(rows, 8)) @ rng.normal(size=(8, 8)) + 0.8 * codes[:, None], 0)
    w = rng.normal(size=8)
    head = head or Head("identity")
    prediction = head.apply(h @ w)
    labels = head.apply(h @ w + 0.3 * rng.normal(size=rows)) if y is None else y
    part = Rows(h, prediction, labels, codes, np.ones(rows))
    moments = GroupMoments().update(np.column_stack([h, labels]), codes)
    return Refits(LastLayer("last", w, 0.0, head), moments, part, part, groups)


def solution(r, target, ridge=1e-6):
    _, quadratic = next(r.quadratics(target, [ridge]))
    return quadratic.layer(quadratic.minimiser)


@pytest.mark.parametrize(
    "head", [Head("affine", scale=-2.0, offset=1.0), Head("affine", inner_scale=3.0, inner_offset=1.0)]
)
def test_labels_are_undone_through_an_affine_head(head):
    weight, bias = solution(refits(head), "labels")
    expected, intercept = solution(refits(), "labels")
    slope = head.apply(1.0) - head.apply(0.0)
    np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert bias == pytest.approx(intercept, abs=1e-6)
    assert slope != 1


@pytest.mark.parametrize("kind", ["sigmoid", "exp", "softplus"])
def test_labels_after_a_curved_head_are_fitted_after_it(kind):
    head = Head(kind, inner_scale=0.2)
    r = refits(head)
    weight, bias = solution(r, "labels")
    rows = r.training
    after = head.apply(rows.features @ weight + bias)
    assert np.mean((after - rows.y) ** 2) <= 1.05 * np.mean((rows.prediction - rows.y) ** 2)


def test_predictions_alone_give_the_layer_back():
    r = refits()
    weight, bias = solution(r, "predictions")
    np.testing.assert_allclose(r.training.features @ weight + bias, r.training.prediction, atol=1e-8)


@pytest.mark.parametrize("groups", [2, 3])
def test_the_optimum_is_fairer_at_lower_levels(groups):
    r = refits(groups=groups, rows=900)
    distances = []
    for _, quadratic in r.quadratics("optimum", [1e-6]):
        weight, bias = quadratic.layer(quadratic.minimiser)
        out = r.training.features @ weight + bias
        means = [out[r.training.codes == g].mean() for g in range(groups)]
        distances.append(np.ptp(means))
    assert distances[0] <= 1.02 * distances[-1]  # the layer can only follow the optimum as far as it is linear
    before = [r.training.prediction[r.training.codes == g].mean() for g in range(groups)]
    assert distances[0] < (0.5 if groups == 2 else 1.0) * np.ptp(before)


def test_transport_candidates_cover_every_target_ridge_and_strength():
    found = refits().transport(["labels", "predictions", "optimum"], [1e-4, 1e-2], STRENGTHS)
    labels = [c for c in found if c.target == "labels" and c.ridge == 1e-4]
    assert [c.strength for c in labels] == list(STRENGTHS)
    assert {c.target.split()[0] for c in found} == {"labels", "predictions", "optimum"}


def test_transport_couples_a_bounded_number_of_rows():
    r = refits(rows=2 * TRANSPORT_ROWS + 3000)
    coupled = len(r.problem.outputs(np.zeros(r.problem.rank)))
    assert coupled == 2 * TRANSPORT_ROWS


@pytest.mark.parametrize(("mean", "covariance"), [(1.0, 1.0), (15.0, 150.0), (100.0, 1.0), (np.inf, np.inf)])
def test_parity_at_given_reductions(mean, covariance):
    r = refits(seed=3)
    _, quadratic = next(r.quadratics("labels", [1e-4]))
    candidate = _parity_at(quadratic, "labels", mean, covariance)
    h, codes = r.training.features, r.training.codes

    def gaps(w):
        out = [h[codes == g] @ w for g in (0, 1)]
        return (out[0].mean() - out[1].mean()) ** 2, (out[0].var(ddof=1) - out[1].var(ddof=1)) ** 2

    before, after = gaps(r.layer.weight), gaps(candidate.weight)
    assert before[0] > 0.1
    assert after[0] <= before[0] / mean * (1 + 1e-4) + 1e-18
    assert after[1] <= before[1] / covariance * (1 + 1e-6) + 1e-18
