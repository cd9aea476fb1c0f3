"""The curve keeps the unbeaten candidates, and the rule that picks one keeps its promise."""

import numpy as np
import pytest

from esvdfair import ks_distance
from esvdfair.candidates import Candidate
from esvdfair.tradeoff import Judge, Judged, _fronts, make_curve


def judge(rows=400, seed=0, weight=None):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2, rows)
    return Judge(rng.normal(size=rows), codes, np.ones(rows) if weight is None else weight, ("a", "b"))


def predictions(rows_judge, shifts, seed=1):
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(len(rows_judge.codes), 1))
    return rows_judge.y[:, None] * 0.5 + noise + rows_judge.codes[:, None] * np.asarray(shifts)


def candidates(k):
    return [Candidate(np.array([float(i)]), 0.0, "labels", 1e-4, float(i), True) for i in range(k)]


def test_judge_measures_each_column():
    rows = judge()
    p = predictions(rows, [0.0, 1.0])
    assert rows.mse(p) == pytest.approx(((p - rows.y[:, None]) ** 2).mean(0))
    assert rows.ks(p)[1] == pytest.approx(ks_distance(p[:, 1], sensitive_features=rows.codes))
    mean, variance = rows.gaps(p)
    groups = [p[rows.codes == c] for c in (0, 1)]
    assert mean == pytest.approx(abs(groups[0].mean(0) - groups[1].mean(0)))
    assert variance == pytest.approx(abs(groups[0].var(0, ddof=1) - groups[1].var(0, ddof=1)))
    assert list(rows.group_mse(p[:, 0])) == ["a", "b"]


def test_weights_enter_every_measure():
    weight = np.random.default_rng(3).integers(1, 4, 400).astype(float)
    rows = judge(weight=weight)
    again = Judge(
        *(np.repeat(v, weight.astype(int)) for v in (rows.y, rows.codes)), np.ones(int(weight.sum())), rows.labels
    )
    p = predictions(rows, [0.7])
    repeated = np.repeat(p, weight.astype(int), axis=0)
    assert rows.mse(p) == pytest.approx(again.mse(repeated))
    assert rows.ks(p) == pytest.approx(again.ks(repeated))
    assert rows.group_mse(p[:, 0]) == pytest.approx(again.group_mse(repeated[:, 0]))


def test_fronts_peel_off_the_unbeaten():
    mse, ks = np.array([1.0, 2.0, 3.0, 2.5, 3.5]), np.array([0.3, 0.2, 0.1, 0.25, 0.1])
    assert _fronts(mse, ks) == [[0, 1, 2], [3, 4]]


def make(shifts, seed=0, **options):
    rows, fitted = judge(seed=seed), judge(seed=seed + 100, rows=2000)
    judged = Judged(predictions(rows, shifts), predictions(fitted, shifts), rows, fitted, "heldout")
    weights = [{"last": (np.array([[float(i)]]), None)} for i in range(len(shifts))]
    return make_curve(judged, candidates(len(shifts)), weights, lambda w: w["last"][0].item(), 0, **options)


def test_the_curve_runs_from_accurate_to_fair_and_builds_the_right_model():
    curve, order = make(np.linspace(2.0, 0.0, 30))
    judged = [point.judged_ks for point in curve.points]
    assert judged == sorted(judged, reverse=True)
    assert [curve.model(i) for i in range(len(curve))] == [float(i) for i in order]
    assert curve.evaluated_on == "heldout"


def test_a_short_front_is_filled_up():
    curve, _ = make(np.zeros(25), at_least=20)
    assert len(curve) >= 20
    assert len(make([0.0, 0.5], at_least=20)[0]) == 2


def test_select_takes_the_most_accurate_that_meets_else_the_fairest():
    curve, _ = make(np.linspace(2.0, 0.0, 30))
    point = curve.select(target_ks=0.3)
    assert point.judged_ks <= 0.3
    assert point.mse == min(p.mse for p in curve.points if p.judged_ks <= 0.3)
    assert curve.select(target_ks=0.0) is min(curve.points, key=lambda p: p.judged_ks)


def test_a_point_that_meets_the_target_does_so_on_the_judging_rows():
    for seed in range(5):
        curve, _ = make(np.linspace(2.0, 0.0, 30), seed=seed)
        assert all(point.judged_ks >= point.ks for point in curve.points)


def test_the_rule_keeps_its_promise_on_fresh_rows():
    """Many candidates, few rows: picking by the judging rows alone is optimistic, picking by the rule is not."""
    target, promised, naive = 0.2, [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        rows, fitted, fresh = judge(200, seed), judge(1000, seed + 1000), judge(200, seed + 2000)
        shifts = np.repeat(np.linspace(0.9, 0.0, 12), 8)

        def scores(part, rng=rng, shifts=shifts):
            own = 0.3 * rng.normal(size=(len(part.codes), len(shifts)))
            return 0.5 * part.y[:, None] + own + part.codes[:, None] * shifts * 0.5

        p_rows, p_fitted, p_fresh = scores(rows), scores(fitted), scores(fresh)
        judged = Judged(p_rows, p_fitted, rows, fitted, "heldout").judged_ks(0.123)
        # smaller shifts cost accuracy, as on a real curve
        error = -shifts
        for rule, found in ((judged, promised), (rows.ks(p_rows), naive)):
            meeting = np.flatnonzero(rule <= target)
            best = meeting[np.argmin(error[meeting])] if len(meeting) else int(np.argmin(rule))
            found.append(fresh.ks(p_fresh[:, [best]])[0])
    assert np.mean(naive) > 1.1 * target  # the sanity check: the naive rule breaks its promise
    assert np.mean(promised) <= target
