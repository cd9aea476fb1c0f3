"""Every method on one tiny network: the pieces agree with the library's own way, and do what their names say."""

from dataclasses import replace

import numpy as np
import pytest

from esvdfair.core.metrics import ks_distance, mean_gap
from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.ols import fit_ols
from esvdfair.estimator import ESVDFair
from esvdfair.experiments import methods
from esvdfair.experiments.config import WAGES, Finetune, Training, Variant
from esvdfair.experiments.network import predict
from esvdfair.experiments.reference import interpolated_regret, unaware_optimum
from esvdfair.experiments.trained import NetworkClassifier, load, predicted_groups, train

TINY = replace(WAGES, training=Training(epochs=8, width=16), finetune=Finetune(epochs=3))


@pytest.fixture(scope="module")
def trained():
    return train(load("wages", "clean"), TINY.training, seed=33)


def test_every_part_passes_through_the_network_once_and_right(trained):
    for part in ("train", "validation", "test", "heldout"):
        X = trained.part(part).X
        np.testing.assert_allclose(trained.scores[part], predict(trained.network, X), rtol=1e-5)
        same = methods.edited_features(trained, trained.hidden_layer.weight, part)
        np.testing.assert_allclose(same, trained.outer[part], rtol=1e-4, atol=1e-5)
        layer = trained.output_layer
        np.testing.assert_allclose(same @ layer.weight[0] + layer.bias[0], trained.scores[part], rtol=1e-4, atol=1e-4)


def test_the_papers_edit_is_that_of_the_estimator(trained):
    edits = methods._edit(trained, TINY, 15.0, 150.0)
    train_rows = trained.split.train
    fair = ESVDFair(trained.network, method="paper", refit="ols", random_state=0)
    fair.fit(
        train_rows.X,
        train_rows.y,
        sensitive_features=train_rows.sensitive_features,
        validation=trained.split.validation,
    )
    np.testing.assert_allclose(fair.edits_[1].weight_after, edits[1].weight_after, rtol=1e-5, atol=1e-7)


def test_the_paper_along_its_reductions(trained):
    along = replace(TINY, reductions=((2.0, 5.0), (50.0, 500.0)), evaluated_on="heldout")
    groups = trained.split.heldout.sensitive_features
    mild, strong = methods.paper(trained, along)
    assert mild.variant == Variant.reduced("paper", 2, 5)
    assert (mild.mean_reached, mild.covariance_reached) == pytest.approx((2.0, 5.0), rel=1e-6)
    gaps = [
        mean_gap(p, sensitive_features=groups) for p in (trained.scores["heldout"], mild.prediction, strong.prediction)
    ]
    assert gaps[0] > gaps[1] > gaps[2]


def test_the_finetune_improves_the_edited_network(trained):
    (edited,) = methods.paper(trained, TINY)
    weight = methods._edit(trained, TINY, 15.0, 150.0)[-1].weight_after
    layer, y = trained.output_layer, trained.split.test.y
    before = methods.edited_features(trained, weight, "test") @ layer.weight[0] + layer.bias[0]
    assert np.mean((edited.prediction - y) ** 2) < np.mean((before - y) ** 2)


def test_least_squares_undoes_the_edit(trained):
    outcomes = {outcome.variant.method: outcome for outcome in methods.errata(trained, TINY)}
    assert set(outcomes) == {"paper_printed_cubic", "paper_unguarded_solve", "algorithm_2"}
    (paper,) = methods.paper(trained, TINY)
    groups = trained.split.test.sensitive_features
    gap = {name: mean_gap(o.prediction, sensitive_features=groups) for name, o in {**outcomes, "paper": paper}.items()}
    untouched = mean_gap(trained.scores["test"], sensitive_features=groups)
    assert gap["paper"] < 0.5 * untouched < gap["algorithm_2"]


def test_baselines_with_the_true_group_bring_the_groups_together(trained):
    groups = trained.split.test.sensitive_features
    found = {o.variant: ks_distance(o.prediction, sensitive_features=groups) for o in methods.baselines(trained, TINY)}
    assert len(found) == 8
    before = ks_distance(trained.scores["test"], sensitive_features=groups)
    for method in ("barycenter", "private_histogram"):
        assert found[Variant(method, "scores", "true")] < 0.5 * before
        assert found[Variant(method, "scores", "true")] < found[Variant(method, "scores", "predicted")]


def test_the_group_is_predicted_better_than_by_chance(trained):
    groups = trained.split.test.sensitive_features
    for classifier in ("logistic", "network"):
        predicted = predicted_groups(trained, replace(TINY, group_classifier=classifier))
        assert np.mean(predicted == groups) > 0.6
    codes = (trained.split.train.sensitive_features == "male").astype(int)
    probability = (
        NetworkClassifier(TINY.training, 33).fit(trained.split.train.X, codes).predict_proba(trained.split.test.X)
    )
    np.testing.assert_allclose(probability.sum(axis=1), 1.0)


def test_the_optimum_gets_fairer_and_less_accurate_as_its_level_falls(trained):
    here = trained.split.test
    curve = unaware_optimum(trained, (0.0, 0.1), "test")
    assert [level for level, _ in curve] == [0.0, 0.1, 1.0]
    ks = [ks_distance(p, sensitive_features=here.sensitive_features) for _, p in curve]
    mse = [np.mean((p - here.y) ** 2) for _, p in curve]
    assert ks == sorted(ks)
    assert mse == sorted(mse, reverse=True)


def test_the_optimum_starts_from_the_best_regression_on_validation_rows(trained):
    part = trained.split.train
    moments = GroupMoments().update(np.column_stack([trained.outer["train"], part.y]), part.sensitive_features)
    ((_, eta),) = unaware_optimum(trained, (), "test")
    refits = [fit_ols(moments, target=16, original=trained.output_layer.weight[0], ridge=r) for r in (1e-6, 1e-4, 1e-2)]
    candidates = [trained.scores["test"], *(trained.outer["test"] @ fit.weight + fit.bias for fit in refits)]
    assert any(np.allclose(eta, candidate, atol=1e-5) for candidate in candidates)


CURVE = {"curve_mse": np.array([0.30, 0.20, 0.10]), "curve_ks": np.array([0.1, 0.2, 0.4]), "gain": 0.5}


@pytest.mark.parametrize(
    ("mse", "ks", "regret"),
    [
        (0.20, 0.2, 0.0),  # on the curve
        (0.25, 0.15, 0.0),  # between two points
        (0.20, 0.3, 0.1),
        (0.35, 0.05, 0.1),  # fairer than the curve: measured at its fairest point
        (0.10, 0.9, 0.0),
    ],
)
def test_regret(mse, ks, regret):
    assert interpolated_regret(mse, ks, **CURVE) == pytest.approx(regret)


def test_a_curve_that_sampling_bent_does_not_flatter():
    bent = {"curve_mse": np.array([0.10, 0.20, 0.30]), "curve_ks": np.array([0.4, 0.3, 0.2])}
    assert interpolated_regret(0.2, 0.3, **bent, gain=1.0) == pytest.approx(0.0)
    worse = {"curve_mse": np.array([0.10, 0.50]), "curve_ks": np.array([0.1, 0.4])}
    assert interpolated_regret(0.2, 0.4, **worse, gain=1.0) == pytest.approx(0.1)
