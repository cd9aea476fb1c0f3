"""A repair from moments against one from the rows."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance, mean_gap, variance_gap
from esvdfair.core.ks import adjusted_weights
from esvdfair.core.quadratic import Head
from esvdfair.federated import RIDGE, SiteMoments, collect_moments, merge_moments, repair_from_moments
from esvdfair.models import adapt


def sites(model, data, *, labelled=True):
    """Moments of all rows of two sites, merged."""
    parts = [np.arange(len(data.y)) % 3 == 0, np.arange(len(data.y)) % 3 != 0]
    return merge_moments(
        [
            collect_moments(
                model, data.X[part], data.y[part] if labelled else None, sensitive_features=data.a[part], unsafe=True
            )
            for part in parts
        ]
    )


def on_rows(model, data, **options):
    """The repair that sees all rows."""
    fair = ESVDFair(model, method="parity", **options)
    return fair.fit(data.X, data.y, sensitive_features=data.a)


@pytest.mark.parametrize(
    ("head", "bias", "labelled"),
    [("identity", True, True), ("affine", True, True), ("affine", True, False), ("identity", False, True)],
)
def test_without_validation_it_is_exact_parity_on_all_rows(make_network, people, head, bias, labelled):
    model, data = make_network(head, bias=bias), people()
    fair = repair_from_moments(model, sites(model, data, labelled=labelled))
    target = "labels" if labelled else "predictions"
    options = {"mean_reduction": np.inf, "covariance_reduction": np.inf, "validation_fraction": 0.0}
    options["effort"] = Effort(ridges=(RIDGE,))
    whole = on_rows(model, data, targets=target, **options)
    (same,) = (point for point in whole.curve_.points if point.ridge == RIDGE and point.strength)
    expected = adapt(whole.curve_.model(same)).predict(data.X)
    np.testing.assert_allclose(fair.predict(data.X), expected, rtol=0, atol=1e-6 * np.ptp(expected))

    predicted = fair.predict(data.X)
    assert mean_gap(adapt(model).predict(data.X), sensitive_features=data.a) > 0.05
    assert mean_gap(predicted, sensitive_features=data.a) < 1e-9
    assert variance_gap(predicted, sensitive_features=data.a) < 1e-9
    assert np.std(predicted) > 0.1


def test_what_is_reported_is_what_the_rows_show(make_network, people):
    model, data = make_network("affine"), people()
    fair = repair_from_moments(model, sites(model, data))
    found = fair.summary_
    for when, predicted in (("before", adapt(model).predict(data.X)), ("after", fair.predict(data.X))):
        errors = (predicted - data.y) ** 2
        assert found[f"mse_{when}"] == pytest.approx(errors.mean(), rel=1e-6)
        assert found[f"r2_{when}"] == pytest.approx(1 - errors.mean() / data.y.var(), rel=1e-6)
        for group in "ab":
            assert found[f"group_mse_{when}"][group] == pytest.approx(errors[data.a == group].mean(), rel=1e-6)
    assert found["mean_gap_before"] > 0.1 > 1e-9 > found["mean_gap_after"]
    assert (found["rows"], found["evaluated_on"], found["before_head"]) == (600, "moments", False)
    assert found["ks_before"] is found["ks_after"] is found["ks_interval"] is found["met"] is None
    assert not hasattr(fair, "curve_")
    (edit,) = fair.edits_
    assert (edit.layer, edit.converged) == ("last", True)


def test_without_labels_the_error_is_the_change(make_network, people):
    model, data = make_network("affine"), people()
    fair = repair_from_moments(model, sites(model, data, labelled=False))
    moved = (fair.predict(data.X) - adapt(model).predict(data.X)) ** 2
    assert (fair.summary_["mse_before"], fair.summary_["r2_after"]) == (0.0, None)
    assert fair.summary_["mse_after"] == pytest.approx(moved.mean(), rel=1e-6)
    assert fair.summary_["group_mse_after"]["b"] == pytest.approx(moved[data.a == "b"].mean(), rel=1e-6)


def test_a_curved_head_is_equalised_before_it(make_network, people):
    model, data = make_network("sigmoid"), people()
    data.y = (data.y > 0).astype(float)
    fair = repair_from_moments(model, sites(model, data))
    before, after = (np.log(p / (1 - p)) for p in (adapt(model).predict(data.X), fair.predict(data.X)))
    assert mean_gap(before, sensitive_features=data.a) > 0.05
    assert mean_gap(after, sensitive_features=data.a) < 1e-9
    assert variance_gap(after, sensitive_features=data.a) < 1e-9
    assert fair.summary_["before_head"]
    assert fair.summary_["mean_gap_before"] == pytest.approx(mean_gap(before, sensitive_features=data.a))
    assert fair.summary_["mse_after"] is fair.summary_["r2_after"] is None


def test_scikit_learn_keeps_its_type(mlp, people):
    data = people()
    fair = repair_from_moments(mlp, sites(mlp, data))
    assert type(fair.estimator_) is type(mlp)
    assert fair.n_features_in_ == 3
    np.testing.assert_array_equal(fair.estimator_.predict(data.X), fair.predict(data.X))
    with pytest.raises(ValueError, match="features"):
        fair.predict(data.X[:, :2])


# --- with validation rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labelled", [True, False])
def test_validation_rows_choose_as_they_do_with_all_rows(make_network, people, labelled):
    model, data, new = make_network("affine"), people(), people(400, 5)
    validation = new.X, new.y, new.a
    fair = repair_from_moments(model, sites(model, data, labelled=labelled), validation=validation)
    whole = ESVDFair(model, method="parity", targets=("labels", "predictions") if labelled else "predictions")
    whole.fit(data.X, data.y, sensitive_features=data.a, validation=validation)
    scale = np.ptp(whole.predict(new.X))
    np.testing.assert_allclose(fair.predict(new.X), whole.predict(new.X), rtol=0, atol=1e-6 * scale)
    assert fair.summary_.keys() == whole.summary_.keys()
    for key in ("mse_before", "mse_after", "ks_before", "ks_after", "mean_gap_after", "ks_floor"):
        assert fair.summary_[key] == pytest.approx(whole.summary_[key], rel=1e-6, abs=1e-9)
    assert (fair.summary_["evaluated_on"], fair.summary_["rows"]) == ("validation", 400)


def test_a_target_is_met_with_the_same_candidates(make_network, people):
    model, data, new = make_network(), people(3000), people(2000, 5)
    validation = new.X, new.y, new.a
    fair = repair_from_moments(model, sites(model, data), validation=validation, target_ks=0.12)
    whole = ESVDFair(model, method="parity", target_ks=0.12, targets=("labels", "predictions"))
    whole.fit(data.X, data.y, sensitive_features=data.a, validation=validation)
    assert fair.summary_["ks_before"] > 0.2
    assert fair.summary_["met"]
    assert whole.summary_["met"]
    fresh = people(4000, 6)
    assert ks_distance(fair.predict(fresh.X), sensitive_features=fresh.a) < 0.15
    # One curve of candidates; the choice on it differs only in that training rows cannot confirm it.
    known = {(p.target, p.ridge, p.strength, round(p.mse, 6)): p for p in whole.curve_.points}
    shared = [
        (p, known[key])
        for p in fair.curve_.points
        if (key := (p.target, p.ridge, p.strength, round(p.mse, 6))) in known
    ]
    assert len(shared) >= 10
    for mine, theirs in shared:
        assert mine.ks == pytest.approx(theirs.ks, abs=1e-9)
        assert mine.ks_population == pytest.approx(theirs.ks_population, abs=0.03)
    assert fair.summary_["mse_after"] == pytest.approx(whole.summary_["mse_after"], rel=0.02)


def test_a_curved_head_aims_at_predictions_alone(make_network, people):
    model, data, new = make_network("sigmoid"), people(), people(400, 5)
    for rows in (data, new):
        rows.y = (rows.y > 0).astype(float)
    fair = repair_from_moments(model, sites(model, data), validation=(new.X, new.y, new.a), target_ks=0.25)
    assert {point.target for point in fair.curve_.points} == {"predictions", "untouched"}
    assert fair.summary_["ks_after"] <= 0.25 < fair.summary_["ks_before"]
    whole = ESVDFair(model, method="parity", target_ks=0.25, targets="predictions")
    whole.fit(data.X, data.y, sensitive_features=data.a, validation=(new.X, new.y, new.a))
    assert fair.summary_["mse_after"] == pytest.approx(whole.summary_["mse_after"], rel=0.02)


def test_a_target_out_of_reach(make_network, people):
    model, data, new = make_network(), people(), people(400, 5)
    with pytest.warns(ESVDFairWarning, match="is below"):
        fair = repair_from_moments(model, sites(model, data), validation=(new.X, new.y, new.a), target_ks=0.0)
    assert fair.summary_["met"] is False


def test_names_of_validation_groups_must_be_known(make_network, people):
    model, data, new = make_network(), people(), people(300, 5, groups=("a", "b", "c"))
    site = sites(model, data)
    with pytest.raises(ValueError, match=r"validation has the groups \['c'\]"):
        repair_from_moments(model, site, validation=(new.X, new.y, new.a))
    one = new.a == "a"
    with pytest.raises(ValueError, match=r"validation has no rows of the groups \['b'\]"):
        repair_from_moments(model, site, validation=(new.X[one], new.y[one], new.a[one]))
    with pytest.raises(ValueError, match="validation must be"):
        repair_from_moments(model, site, validation=(new.X, new.y))


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_target_needs_rows(make_network, people):
    model = make_network()
    with pytest.raises(ValueError, match=r"target_ks=0\.1 needs validation rows: a KS distance cannot be known"):
        repair_from_moments(model, sites(model, people()), target_ks=0.1)
    with pytest.raises(ValueError, match="a KS distance lies between 0 and 1"):
        repair_from_moments(model, sites(model, people()), target_ks=2)


def test_moments_of_another_model(make_network, people):
    site = sites(make_network(), people())
    with pytest.raises(
        ValueError, match=rf"another model: SHA-256 {site.model}, and that of this model is [0-9a-f]{{64}}\."
    ):
        repair_from_moments(make_network(seed=1), site)


def test_one_group_is_not_enough(make_network, people):
    model, data = make_network(), people()
    keep = data.a == "a"
    site = collect_moments(model, data.X[keep], data.y[keep], sensitive_features=data.a[keep])
    with pytest.raises(ValueError, match=r"found 1 group\(s\) \['a'\]"):
        repair_from_moments(model, site)


def test_more_groups_than_two_may_leave_nothing(make_network, people):
    model, data = make_network(), people(groups=("a", "b", "c"))
    with pytest.warns(
        ESVDFairWarning, match="with these 3 groups, equal means and variances leave nearly one prediction"
    ):
        fair = repair_from_moments(model, sites(model, data))
    assert np.std(fair.predict(data.X)) < 0.1 * np.std(adapt(model).predict(data.X))
    new = people(900, 5, groups=("a", "b", "c"))
    mild = repair_from_moments(model, sites(model, data), validation=(new.X, new.y, new.a), target_ks=0.2)
    assert mild.summary_["ks_after"] <= 0.2
    assert np.std(mild.predict(new.X)) > 0.1


def test_the_model_is_not_touched(mlp, people):
    before = [coef.copy() for coef in mlp.coefs_]
    repair_from_moments(mlp, sites(mlp, people()))
    for coef, kept in zip(mlp.coefs_, before, strict=True):
        np.testing.assert_array_equal(coef, kept)


def test_frames_are_taken_by_name(mlp, people):
    data, new = people(), people(300, 5)
    X = pd.DataFrame(data.X, columns=["age", "hours", "school"])
    model = type(mlp)(**mlp.get_params()).fit(X, data.y)
    site = collect_moments(model, X, data.y, sensitive_features=data.a)
    frame = pd.DataFrame(new.X, columns=X.columns)
    fair = repair_from_moments(model, site, validation=(frame, new.y, new.a))
    assert fair.summary_["rows"] == 300


@pytest.mark.parametrize("kind", ["torch", "scikit-learn", "bias"])
def test_another_layer_than_the_model_has_is_refused(make_network, mlp, people, kind):
    model, data = mlp if kind == "scikit-learn" else make_network(), people()
    whole = sites(model, data)
    layer = replace(whole.layer, weight=whole.layer.weight + 0.001)
    if kind == "bias":
        layer = replace(whole.layer, bias=whole.layer.bias + 0.001)
    with pytest.raises(ValueError, match="has other weights than it has in this model"):
        repair_from_moments(model, replace(whole, layer=layer))


@pytest.mark.parametrize("kind", ["affine", "sigmoid"])
def test_another_head_than_the_model_has_is_refused(make_network, people, kind):
    model, data = make_network(kind), people()
    whole = sites(model, data)
    other = Head("identity") if kind == "sigmoid" else replace(whole.head, scale=1.01 * whole.head.scale)
    with pytest.raises(ValueError, match=rf"the model ends in {other.kind}, and it ends in {kind}"):
        repair_from_moments(model, replace(whole, head=other))
    with pytest.raises(ValueError, match=rf"the model ends in {other.kind}, and it ends in {kind}"):
        repair_from_moments(model, replace(whole, head=other), validation=(data.X, data.y, data.a))


# --- adjusted for strata -------------------------------------------------------------------------------------------


def with_strata(people, rows=1200, seed=0):
    """People whose groups differ in their mix of strata."""
    data = people(rows, seed)
    data.s = np.where(np.random.default_rng(seed).random(rows) < np.where(data.a == "a", 0.3, 0.7), "town", "land")
    data.X[data.s == "town"] += 1.0
    return data


def controlled(model, data):
    parts = [
        collect_moments(
            model, data.X[i::2], data.y[i::2], sensitive_features=data.a[i::2], control_features=data.s[i::2]
        )
        for i in (0, 1)
    ]
    return merge_moments(parts)


def test_moments_by_group_and_stratum_give_the_adjusted_repair(make_network, people, tmp_path):
    model, data = make_network("affine"), with_strata(people)
    site = controlled(model, data)
    site.save(tmp_path / "a.moments")
    site = SiteMoments.load(tmp_path / "a.moments")
    assert site.moments.labels == (("a", "land"), ("a", "town"), ("b", "land"), ("b", "town"))
    fair = repair_from_moments(model, site)
    weight = adjusted_weights((data.a == "b").astype(int), 2, (data.s == "town").astype(int))
    gaps = [
        mean_gap(p, sensitive_features=data.a, sample_weight=w)
        for p in (adapt(model).predict(data.X), fair.predict(data.X))
        for w in (weight, None)
    ]
    assert fair.summary_["mean_gap_before"] == pytest.approx(gaps[0], rel=1e-6)
    assert abs(gaps[0] - gaps[1]) > 0.05
    assert gaps[2] == pytest.approx(0.0, abs=1e-9)


def test_validation_rows_of_adjusted_moments_have_strata_too(make_network, people):
    model, data, new = make_network(), with_strata(people), with_strata(people, 600, 5)
    site = controlled(model, data)
    fair = repair_from_moments(model, site, validation=(new.X, new.y, new.a, None, new.s))
    assert fair.summary_["outside_support"] == 0.0
    with pytest.raises(ValueError, match="the moments are adjusted for control_features, and validation must be"):
        repair_from_moments(model, site, validation=(new.X, new.y, new.a))
    with pytest.raises(ValueError, match="the moments are not adjusted for control_features"):
        repair_from_moments(model, sites(model, data), validation=(new.X, new.y, new.a, None, new.s))


def test_strata_at_one_site_alone_are_refused(make_network, people):
    model, data = make_network(), with_strata(people)
    plain = collect_moments(model, data.X[::3], data.y[::3], sensitive_features=data.a[::3])
    with pytest.raises(ValueError, match="differ in the strata: not told apart in part 2, told apart in part 1"):
        merge_moments([controlled(model, data), plain])
