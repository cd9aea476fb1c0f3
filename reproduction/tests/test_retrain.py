"""All layers with MSE + λ·W₂²: the distance is right, the penalty brings the groups together, λ is sought."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from esvdfair.core.metrics import ks_distance, ks_population
from reproduction.config import WAGES, Retraining, Training
from reproduction.datasets import Examples, Split
from reproduction.methods import curve_of, retrained, search_penalty
from reproduction.network import Trained, predict, train_network, train_on_both, wasserstein

TINY = replace(
    WAGES,
    training=Training(epochs=10, width=16, depth=3, batch_size=32, learning_rate=5e-3),
    retraining=Retraining(batch_size=64, learning_rate=5e-3, ramp=3),
)


def examples(rows: int, seed: int) -> Examples:
    """A quarter of the rows is in group b, whose first input is larger by 1.5."""
    rng = np.random.default_rng(seed)
    b = np.arange(rows) % 4 == 0
    X = rng.normal(size=(rows, 3)) + 1.5 * b[:, None] * [1, 0, 0]
    return Examples(
        X, X[:, 0] + np.sin(2 * X[:, 1]) + 0.3 * rng.normal(size=rows), np.where(b, "b", "a").astype(object)
    )


@pytest.fixture(scope="module")
def trained():
    parts = Split(*(examples(rows, seed) for seed, rows in enumerate((800, 400, 1000))))
    return Trained(1, parts, train_network(parts.train.X, parts.train.y, seed=1, training=TINY.training))


def ks(network, trained):
    here = trained.split.test
    return ks_distance(predict(network, here.X), sensitive_features=here.sensitive_features)


def test_the_distance_is_that_between_sorted_outputs():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=50), rng.normal(1.0, 2.0, size=50)
    apart = float(wasserstein(torch.as_tensor(np.stack([a, b]))))
    assert apart == pytest.approx(np.mean((np.sort(a) - np.sort(b)) ** 2))
    assert apart >= wasserstein_distance(a, b) ** 2
    shift = torch.stack([torch.arange(5.0), torch.arange(5.0).flip(0) + 2, torch.arange(5.0)])
    assert float(wasserstein(shift)) == pytest.approx((4 + 0 + 4) / 3)


def test_the_distance_has_a_gradient():
    output = torch.tensor([[0.0, 1.0], [3.0, 5.0]], requires_grad=True)
    wasserstein(output).backward()
    np.testing.assert_allclose(output.grad, [[-3.0, -4.0], [3.0, 4.0]])


def test_a_larger_penalty_brings_the_groups_closer_and_the_start_is_left_alone(trained):
    before = [p.clone() for p in trained.network.parameters()]
    settings = replace(TINY.retraining, ramp=0)
    found = [
        ks(train_on_both(trained.network, trained.split.train, penalty, settings, epochs=6, seed=0), trained)
        for penalty in (0.0, 1.0, 30.0)
    ]
    assert ks(trained.network, trained) > 0.3
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.15
    assert all(torch.equal(a, b) for a, b in zip(before, trained.network.parameters(), strict=True))


def test_equal_seeds_give_equal_networks_and_torch_is_left_alone(trained):
    state = torch.get_rng_state()
    once, again = (
        train_on_both(trained.network, trained.split.train, 1.0, TINY.retraining, epochs=1, seed=3) for _ in range(2)
    )
    np.testing.assert_array_equal(predict(once, trained.split.test.X), predict(again, trained.split.test.X))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_search_goes_where_the_target_is(trained):
    networks = search_penalty("finetuned", trained.network, trained, TINY)
    assert len(networks) == 1 + TINY.retraining.stages
    assert networks[0.0] is trained.network
    penalties = list(networks)
    there = trained.split.validation
    first = ks_population(predict(networks[penalties[1]], there.X), sensitive_features=there.sensitive_features)
    assert (penalties[2] > penalties[1]) == (first > 0.095)
    assert {point.strength for point in curve_of(networks, trained).points} == set(networks)


def test_either_start_gives_an_outcome_that_is_fairer_than_before(trained):
    finetuned, from_scratch = retrained(trained, TINY)
    assert (finetuned.variant.method, from_scratch.variant.method) == ("finetuned", "from_scratch")
    here, before = trained.split.test, ks(trained.network, trained)
    for outcome in (finetuned, from_scratch):
        assert ks_distance(outcome.prediction, sensitive_features=here.sensitive_features) < 0.5 * before
        assert np.mean((outcome.prediction - here.y) ** 2) < here.y.var()
    assert not np.allclose(finetuned.prediction, from_scratch.prediction)
