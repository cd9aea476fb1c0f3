"""The curve keeps the unbeaten candidates, and the rule that picks one keeps its promise."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.special import ndtr

from esvdfair import Effort, ESVDFairWarning, ks_bound, ks_distance, ks_distance_ci
from esvdfair.batches import Rows
from esvdfair.core import pairs
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit, Head
from esvdfair.curve import choose
from esvdfair.evaluation import Evaluator, evaluate, measurable
from esvdfair.fit_report import make_report
from esvdfair.methods import Candidates
from esvdfair.models.base import LinearLayer
from esvdfair.problem import ORIGINAL, Problem


def make_rows(n=400, seed=0, weight=None):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2, n)
    y = rng.normal(size=n)
    return Rows(np.zeros((n, 1)), y, y, codes, np.ones(n) if weight is None else weight)


def predictions(rows, shifts, seed=1):
    noise = np.random.default_rng(seed).normal(size=(len(rows), 1))
    return rows.y[:, None] * 0.5 + noise + rows.codes[:, None] * np.asarray(shifts)


def sample_of(validation, training, evaluated_on="heldout"):
    layer = LinearLayer("last", 0, np.zeros((1, 1)), None)
    return Problem(("a", "b"), GroupMoments(), layer, Head("identity"), training, validation, evaluated_on, "labels")


class Weight:
    """A model that is nothing but the weight of its last layer."""

    model = None
    trees = False

    def replace(self, weights):
        replaced = Weight()
        replaced.model = weights["last"][0].item()
        return replaced


def judged(columns, *, targets=None, seed=0, rows=400, points=20, evaluated_on="heldout", **options):
    """A curve of given predictions: ``columns(rows)`` is (rows, k)."""
    here, fitted = make_rows(rows, seed=seed), make_rows(5 * rows, seed=seed + 100)
    here, fitted = (replace(part, y=part.y + part.codes) for part in (here, fitted))
    predicted = columns(here), columns(fitted)
    targets = targets or ["labels"] * predicted[0].shape[1]
    fits = [
        Fit(np.array([float(i)]), 0.0, ridge=1e-4, strength=float(i), target=target) for i, target in enumerate(targets)
    ]
    effort = Effort(points=points, resamples=50)
    sample = sample_of(here, fitted, evaluated_on)
    return evaluate(Candidates(sample, tuple(fits), *predicted), Weight(), effort=effort, **options)


def make(shifts, **options):
    return judged(lambda rows: predictions(rows, shifts), **options)


def test_every_column_is_measured_with_the_weights_of_the_rows():
    weight = np.random.default_rng(3).integers(1, 4, 400)
    rows = make_rows(weight=weight.astype(float))
    p = predictions(rows, [0.0, 1.0])
    here = Evaluator(rows, 2)
    assert here.errors(p) == pytest.approx(np.average((p - rows.y[:, None]) ** 2, axis=0, weights=weight))
    repeated = ks_distance(np.repeat(p[:, 1], weight), sensitive_features=np.repeat(rows.codes, weight))
    assert here.distances(p)[1] == pytest.approx(repeated)


def test_a_summary_measures_the_judging_rows_before_and_after():
    rows = make_rows()
    curve = make([0.5])
    p = predictions(rows, [0.5])[:, 0]
    found = make_report(sample_of(rows, rows), p, curve, curve.points[0], method="parity", target_ks=0.1)
    assert json.loads(json.dumps(found))["met"] is False
    groups = [p[rows.codes == c] for c in (0, 1)]
    errors = [(p - rows.y)[rows.codes == c] for c in (0, 1)]
    assert found["mean_gap_after"] == pytest.approx(abs(groups[0].mean() - groups[1].mean()))
    assert found["variance_gap_after"] == pytest.approx(abs(groups[0].var(ddof=1) - groups[1].var(ddof=1)))
    assert found["group_mse_after"] == pytest.approx({"a": (errors[0] ** 2).mean(), "b": (errors[1] ** 2).mean()})
    assert found["mse_before"] == 0.0  # perfect on the labels, and they are labels all the same
    assert found["error_against"] == "labels"


def test_the_curve_runs_from_accurate_to_fair_and_builds_the_right_model():
    curve = make(np.linspace(2.0, 0.0, 30))
    distances = [point.ks_population for point in curve.points]
    assert distances == sorted(distances, reverse=True)
    assert [curve.model(i) for i in range(len(curve))] == [float(i) for i in curve.candidates]
    assert curve.evaluated_on == "heldout"
    assert len(repr(curve)) < 200


def test_only_the_unbeaten_are_kept_unless_they_are_few():
    curve = make(np.linspace(2.0, 0.0, 30), points=1)
    by_error = sorted(curve.points, key=lambda point: point.mse)
    assert all(a.ks_population > b.ks_population for a, b in pairwise(by_error))
    assert len(make(np.zeros(45))) == 20  # no more of the beaten than are missing
    assert len(make([0.0, 0.5])) == 2


# --- the rule ------------------------------------------------------------------------------------------------------


def trade_off(shifts, costs=0.0, seed=1):
    """Columns whose groups are ``shifts`` apart, where 1 would be right, with noise of variance ``costs``."""

    def columns(rows):
        noise = np.random.default_rng(seed).normal(size=(len(rows), 1)) * np.sqrt(0.01 + np.asarray(costs))
        return rows.y[:, None] + noise + rows.codes[:, None] * (np.asarray(shifts) - 1)

    return columns


def population(shift, cost=0.0):
    """KS distance of two normal groups so far apart."""
    return float(2 * ndtr(shift / 2 / np.sqrt(1.01 + cost)) - 1)


FALLING = np.linspace(1.0, 0.0, 21)


def test_the_most_accurate_that_meets_the_target_is_taken():
    curve = judged(trade_off(FALLING), rows=3000)
    point = curve.select(target_ks=0.2)
    assert curve.meets(point, 0.2)
    assert point.mse == min(p.mse for p in curve.points if p.ks_population <= 0.2)
    assert 0.12 < point.ks < 0.25  # no more parity than was asked for


def test_an_original_model_that_meets_the_target_is_taken_although_others_are_better_in_both():
    """The original at 0.2 with noise; the candidate at 0.2 without is more accurate and as fair."""
    shifts, costs = np.append(FALLING, 0.2), np.append(np.zeros(21), 0.05)
    targets = ["labels"] * 21 + [ORIGINAL]
    curve = judged(trade_off(shifts, costs), targets=targets, rows=3000)
    untouched = curve.original
    assert curve.meets(untouched, 0.2)
    assert any(p.mse < untouched.mse and p.ks_population <= untouched.ks_population for p in curve.points)
    assert curve.select(target_ks=0.2) is untouched
    assert curve.select(target_ks=0.04) is not untouched


def test_accuracy_is_never_traded_for_noise():
    """Candidates that are equally fair and ever less accurate, under a target that these rows cannot tell."""
    costs = np.linspace(0.0, 2.0, 12)
    curve = judged(trade_off(np.zeros(12), costs), rows=60)
    assert curve.pair_resolved[0] > 0.1
    assert curve.select(target_ks=0.0).mse == min(p.mse for p in curve.points)


def test_a_target_below_the_noise_level_stops_at_what_rows_can_tell_and_names_the_rows_needed():
    curve = judged(trade_off(FALLING), rows=150)
    needed = (curve.ks_floor / 0.01) ** 2
    said = rf"below the noise level of every pair of groups: .* between a and b .* About {needed:,.0f} times as many"
    with pytest.warns(ESVDFairWarning, match=said):
        point = choose(curve, target_ks=0.01)
    assert not curve.meets(point, 0.01)
    assert point.ks_population <= curve.pair_resolved[0]
    fairest = min(curve.points, key=lambda p: p.ks_population)
    assert point.mse < fairest.mse
    assert not curve.meets(fairest, 0.99 * curve.ks_floor)  # however small its estimate is
    assert curve.meets(fairest, 1.01 * curve.ks_floor)
    # Without a target `transport` aims at what a target that these rows cannot tell from parity aims at.
    assert curve.select(target_ks=0.5 * curve.pair_resolved[0]) == choose(curve, closest=True)


def test_nothing_dominated_is_taken():
    for seed in range(5):
        curve = judged(trade_off(FALLING, seed=seed), seed=seed)
        for target in (0.0, 0.05, 0.1, 0.2, 0.4):
            point = curve.select(target_ks=target)
            assert not any(p.mse < point.mse and p.ks_population < point.ks_population for p in curve.points)


def test_the_fairest_within_an_error_is_the_model_as_given_at_worst():
    curve = judged(trade_off(FALLING), targets=[*["labels"] * 8, ORIGINAL, *["labels"] * 12], rows=3000)
    point = choose(curve, max_mse_increase=0.5)
    within = [p for p in curve.points if p.mse <= 1.5 * curve.original.mse]
    assert point.ks_population == min(p.ks_population for p in within)
    with pytest.warns(ESVDFairWarning, match="No candidate within `max_mse_increase=0` improves parity"):
        choose(judged(trade_off([0.5, 0.1]), targets=[ORIGINAL, "labels"]), max_mse_increase=0.0)


def test_worse_in_both_is_said_where_no_target_was_given():
    curve = judged(trade_off([0.2, 0.6], [0.0, 1.0]), targets=[ORIGINAL, "labels"], rows=2000)
    with pytest.warns(ESVDFairWarning, match="worse than the original in both"):
        assert choose(curve).target == "labels"


def test_a_constant_is_called_one_and_has_no_distance():
    """Rounding noise that differs by group would be a KS distance of 1."""

    def columns(rows):
        return np.column_stack([rows.y + rows.codes, 0.3 + 1e-13 * rows.codes])

    curve = judged(columns, targets=[ORIGINAL, "labels"])
    flat = next(p for p in curve.points if p.strength == 1.0)
    assert (flat.ks, flat.ks_low, flat.constant) == (0.0, 0.0, True)
    with pytest.warns(ESVDFairWarning, match="predicts nearly the same number for everybody"):
        choose(curve, target_ks=0.1)
    rows = make_rows()
    assert np.ptp(measurable(columns(rows)[:, 1], rows.prediction)) == 0.0


# --- the estimate --------------------------------------------------------------------------------------------------


def test_a_candidate_alone_is_estimated_from_the_rows_that_judge():
    """There is no order that other rows could tell, and no level that they did tell."""
    curve = make([0.2])
    point = curve.points[0]
    assert point.ks > curve.ks_floor
    assert point.ks_population == pytest.approx(np.sqrt(point.ks**2 - curve.ks_floor**2))


def test_the_estimate_keeps_its_promise_in_the_population():
    """Many candidates, few rows: the mean population distance of what is taken is within 80 to 100 % of the target."""
    shifts, taken = np.linspace(0.7, 0.1, 31), []
    for seed in range(24):
        curve = judged(trade_off(shifts, seed=seed), seed=1000 + seed, rows=1000, points=1)
        taken.append(population(shifts[curve.candidates[curve.select(target_ks=0.15)]]))
    assert 0.8 * 0.15 <= np.mean(taken) <= 0.15


def test_rows_that_fitted_are_not_corrected_for_sampling():
    curve = make(np.linspace(1.0, 0.0, 10), evaluated_on="train")
    assert [p.ks_population for p in curve.points] == [p.ks for p in curve.points]


def test_noise_levels_are_found_once_for_all_points(monkeypatch):
    asked, real = [], pairs.ks_null
    monkeypatch.setattr(pairs, "ks_null", lambda *given, **more: asked.append(given) or real(*given, **more))
    found = judged(
        lambda rows: np.round(predictions(rows, [0.1, 0.2, 0.3])), evaluated_on="train"
    )  # ties: a simulation
    assert len(found.points) == 3
    assert [point.ks_low <= point.ks_high for point in found.points] == [True] * 3
    assert len(asked) == 1


# --- the certificate -----------------------------------------------------------------------------------------------


def test_points_that_share_their_draws_have_the_intervals_of_the_public_metric():
    rows = make_rows()
    here = Evaluator(rows, 2, seed=3)
    for column in predictions(rows, [0.2, 0.9]).T:
        alone = ks_distance_ci(column, sensitive_features=rows.codes, n_resamples=50, random_state=3)
        assert here.pairs.largest_interval(column, draws=50) == alone


def test_a_certified_point_is_within_its_bound_and_so_is_all_before_it():
    curve = judged(trade_off(FALLING), rows=3000, confidence=0.9)
    rows, fitted = (replace(part, y=part.y + part.codes) for part in (make_rows(3000), make_rows(15_000, seed=100)))
    here, there = (trade_off(FALLING)(part) for part in (rows, fitted))
    bounds = [ks_bound(column, sensitive_features=rows.codes, confidence=0.9) for column in here.T]
    sequence = np.argsort(Evaluator(fitted, 2).distances(there)[:, 0], kind="stable").tolist()
    for point, i in zip(curve.points, curve.candidates, strict=True):
        before = sequence[: sequence.index(i) + 1]
        assert point.ks_certified == pytest.approx(max(bounds[j] for j in before), abs=1e-6)
    point = curve.select(target_ks=0.2)
    assert point.ks_certified <= 0.2
    assert point.mse == min(p.mse for p in curve.points if p.ks_certified <= 0.2)
    hoeffding = judged(trade_off(FALLING), rows=3000, confidence=0.9, certificate="hoeffding")
    assert min(p.ks_certified for p in hoeffding.points) > min(p.ks_certified for p in curve.points)


def test_what_cannot_be_certified_says_how_many_rows_it_needs():
    curve = judged(trade_off(FALLING), rows=200, confidence=0.9)
    for target in (0.1, 0.15, min(p.ks_certified for p in curve.points) - 1e-3):
        with pytest.warns(ESVDFairWarning, match="No candidate can be certified") as caught:
            point = choose(curve, target_ks=target)
        assert not curve.meets(point, target)
        said = re.search(r"About ([\d.,]+) times as many held-out rows", str(caught[0].message))
        assert float(said[1].replace(",", "")) >= 1  # fewer rows than there are would not do
    hopeless = {"columns": trade_off([1.0, 0.9]), "rows": 3000}
    with pytest.warns(ESVDFairWarning, match="No number of rows would do"):
        choose(judged(**hopeless, confidence=0.9), target_ks=0.1)
    with pytest.warns(ESVDFairWarning, match="No candidate meets `target_ks=0.2`"):
        choose(judged(**hopeless), target_ks=0.2)
    with pytest.raises(ValueError, match=r"confidence=0.9` requires validation rows"):
        make([0.1, 0.0], evaluated_on="train", confidence=0.9)
