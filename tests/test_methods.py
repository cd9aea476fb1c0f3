"""Targets mean the same thing whatever the head, and parity at given reductions is what it says."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg

from esvdfair.batches import Rows
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit, Head
from esvdfair.fit_report import account_for
from esvdfair.hidden import refit_edited
from esvdfair.methods import TARGETS, Refits, parity, transport
from esvdfair.models.base import LinearLayer
from esvdfair.problem import Effort, Problem, original_fit, outputs


def make_sample(head=None, *, rows=600, groups=2, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.sort(rng.integers(0, groups, rows))
    h = np.maximum(rng.normal(size=(rows, 8)) @ rng.normal(size=(8, 8)) + 0.8 * codes[:, None], 0)
    w = rng.normal(size=8)
    head = head or Head("identity")
    labels = head.apply(h @ w + 0.3 * rng.normal(size=rows))
    part = Rows(h, head.apply(h @ w), labels, codes, np.ones(rows))
    moments = GroupMoments().update(np.column_stack([h, labels]), codes)
    layer = LinearLayer("last", 0, w[None, :], np.zeros(1))
    return Problem(tuple(range(groups)), moments, layer, head, part, part, "train", "labels")


def solution(refits, target, ridge=1e-6):
    _, quadratic = next(refits.quadratics(target, [ridge]))
    return quadratic.layer(quadratic.minimiser)


@pytest.mark.parametrize(
    "head", [Head("affine", scale=-2.0, offset=1.0), Head("affine", inner_scale=3.0, inner_offset=1.0)]
)
def test_labels_are_undone_through_an_affine_head(head):
    weight, bias = solution(Refits(make_sample(head), Effort()), "labels")
    expected, intercept = solution(Refits(make_sample(), Effort()), "labels")
    slope = head.apply(1.0) - head.apply(0.0)
    np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert bias == pytest.approx(intercept, abs=1e-6)
    assert slope != 1


@pytest.mark.parametrize("kind", ["sigmoid", "exp", "softplus"])
def test_labels_after_a_curved_head_are_fitted_after_it(kind):
    head = Head(kind, inner_scale=0.2)
    sample = make_sample(head)
    weight, bias = solution(Refits(sample, Effort()), "labels")
    rows = sample.training
    after = head.apply(rows.features @ weight + bias)
    assert np.mean((after - rows.y) ** 2) <= 1.05 * np.mean((rows.prediction - rows.y) ** 2)


@pytest.mark.parametrize("groups", [2, 3])
def test_the_optimum_is_fairer_at_lower_levels(groups):
    sample = make_sample(groups=groups, rows=900)
    rows, distances = sample.training, []
    for _, quadratic in Refits(sample, Effort()).quadratics("optimum", [1e-6]):
        weight, bias = quadratic.layer(quadratic.minimiser)
        out = rows.features @ weight + bias
        distances.append(np.ptp([out[rows.codes == g].mean() for g in range(groups)]))
    assert distances[0] <= 1.02 * distances[-1]  # the layer can only follow the optimum as far as it is linear
    before = [rows.prediction[rows.codes == g].mean() for g in range(groups)]
    assert distances[0] < (0.5 if groups == 2 else 1.0) * np.ptp(before)


def test_transport_covers_every_target_ridge_and_strength():
    effort = Effort(ridges=(1e-4, 1e-2))
    found = transport(Refits(make_sample(), effort), targets=TARGETS)
    labels = [fit for fit in found if fit.target == "labels" and fit.ridge == 1e-4]
    assert [fit.strength for fit in labels] == list(effort.strengths)
    assert {fit.target.split()[0] for fit in found} == {"labels", "predictions", "optimum"}


def test_the_group_is_predicted_from_a_bounded_number_of_rows_as_from_all():
    sample = make_sample(rows=2000)
    bounded = Refits(sample, Effort(transport_rows=300))
    assert len(bounded.coupling.outputs(np.zeros(len(bounded.space.variances)))) == 600
    both = [Refits(sample, Effort(transport_rows=n)) for n in (400, 2000)]
    few, all_rows = (refits.group_probability(sample.training.features) for refits in both)
    np.testing.assert_allclose(few.sum(axis=1), 1.0)
    assert 0 < np.abs(few - all_rows).max() < 0.15
    sure = all_rows[np.arange(len(all_rows)), sample.validation.codes]
    assert sure.mean() > 0.55  # the features tell groups apart


def test_parity_for_a_target_solves_one_eigenproblem_for_all_targets(monkeypatch):
    sample, effort, solved = make_sample(), Effort.quick(), []
    real = scipy.linalg.eigh
    monkeypatch.setattr(scipy.linalg, "eigh", lambda *given, **options: solved.append(1) or real(*given, **options))
    found = parity(Refits(sample, effort), targets=TARGETS)
    assert len({fit.target for fit in found}) == 4
    assert len(solved) == 1 + len(effort.mean_penalties)  # and the principal axes
    alone = parity(Refits(sample, effort), targets=["predictions"])
    shared = [fit for fit in found if fit.target == "predictions"]
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_allclose(one.weight, other.weight, rtol=1e-9)


def test_least_squares_after_an_edit_stays_near_the_original_where_rows_say_little():
    sample = make_sample()
    rows = sample.training
    # Nearly a copy of the first feature: the difference of the two varies too little to be learned from.
    copy = rows.features[:, [0]] + 1e-6 * np.random.default_rng(1).normal(size=len(rows))[:, None]
    features = np.column_stack([rows.features, copy])
    moments = GroupMoments().update(np.column_stack([features, rows.y]), rows.codes)
    layer = replace(sample.layer, weight=np.append(sample.layer.weight, 0.5)[None, :])
    wider = replace(sample, moments=moments, layer=layer, training=replace(rows, features=features))
    fit = refit_edited(wider, "ols", 15.0, 150.0)
    assert fit.weight[-1] - fit.weight[0] == pytest.approx(0.5 - sample.layer.weight[0, 0], abs=0.01)


@pytest.mark.parametrize(("mean", "covariance"), [(1.0, 1.0), (15.0, 150.0), (100.0, 1.0), (np.inf, np.inf)])
def test_parity_at_given_reductions(mean, covariance):
    sample = make_sample(seed=3)
    effort = Effort(ridges=(1e-4,))
    reductions = {"mean_reduction": mean, "covariance_reduction": covariance}
    *_, fit = parity(Refits(sample, effort), targets=["labels"], **reductions)
    h, codes = sample.training.features, sample.training.codes

    def gaps(w):
        out = [h[codes == g] @ w for g in (0, 1)]
        return (out[0].mean() - out[1].mean()) ** 2, (out[0].var(ddof=1) - out[1].var(ddof=1)) ** 2

    before, after = gaps(sample.layer.weight[0]), gaps(fit.weight)
    assert before[0] > 0.1
    assert after[0] <= before[0] / mean * (1 + 1e-4) + 1e-18
    assert after[1] <= before[1] / covariance * (1 + 1e-6) + 1e-18


@pytest.mark.parametrize("bias", [np.ones(1), None])
def test_the_account_of_a_refit_is_that_of_its_rows(bias):
    sample = make_sample(groups=3)
    layer = replace(sample.layer, bias=bias)
    fit = Fit(layer.weight[0] + 0.3, 0.0 if bias is None else 0.8, strength=2.0, converged=False)
    (edit,) = account_for(replace(sample, layer=layer), fit)
    h, codes, shift = sample.training.features, sample.training.codes, 0.0 if bias is None else -0.2
    assert edit.output_change == pytest.approx(np.sum((h.sum(axis=1) * 0.3 + shift) ** 2), rel=1e-9)
    means = [h[codes == g].mean(axis=0) @ fit.weight for g in range(3)]
    gap = sum((means[a] - means[b]) ** 2 for a, b in ((0, 1), (0, 2), (1, 2)))
    assert edit.gap_after == edit.achieved == edit.budget == pytest.approx(gap, rel=1e-9)
    assert edit.gap_before == pytest.approx(np.sum(edit.sigma_before**2)) != edit.gap_after
    assert (edit.layer, edit.multiplier, edit.converged) == ("last", 2.0, False)


def test_what_the_original_model_predicts_is_known_and_dead_features_are_passed_over():
    sample = make_sample()
    rows = replace(
        sample.validation,
        features=np.column_stack([sample.validation.features, np.zeros(len(sample.validation))]).astype(np.float32),
        prediction=np.arange(len(sample.validation), dtype=np.float64),  # not what the layer would give
    )
    fit = Fit(np.append(2 * sample.layer.weight[0], 5.0), 1.0)
    as_given = original_fit(replace(sample.layer, weight=np.append(sample.layer.weight, 5.0)[None, :]))
    both = outputs(sample.head, rows, [fit, as_given])
    np.testing.assert_allclose(both[:, 0], rows.features.astype(np.float64) @ fit.weight + fit.bias)
    np.testing.assert_array_equal(both[:, 1], rows.prediction)
    np.testing.assert_array_equal(outputs(sample.head, rows, [as_given])[:, 0], rows.prediction)
