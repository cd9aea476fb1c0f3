"""Adjusted gaps: what job explains is no gap, what it does not explain is; streams, files and methods agree."""

import numpy as np
import pandas as pd
import pytest
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, fit_curve, ks_distance, ks_floor, mean_gap
from esvdfair.core.ks import adjusted_weights

ROWS = 1600


def population(explained, seed=0):
    """Jobs pay differently; women have other jobs (explained), or the same jobs and a lower score (not)."""
    rng = np.random.default_rng(seed)
    sex = rng.integers(0, 2, ROWS)
    mix = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]) if explained else np.full((2, 3), 1 / 3)
    job = np.array([rng.choice(3, p=mix[g]) for g in sex])
    score = rng.normal(size=ROWS) + (0.0 if explained else 1.6) * sex
    X = np.column_stack([job, score, rng.normal(size=(ROWS, 2))])
    y = 2.0 * job + score + 0.3 * rng.normal(size=ROWS)
    model = MLPRegressor(hidden_layer_sizes=(16, 8), max_iter=2000, solver="lbfgs", random_state=0).fit(X, y)
    return model, X, y, sex, job


@pytest.fixture(scope="module")
def explained():
    return population(True)


@pytest.fixture(scope="module")
def unexplained():
    return population(False)


def fit(people, control=True, **options):
    model, X, y, sex, job = people
    fair = ESVDFair(model, effort=Effort.quick(), **options)
    return fair.fit(X, y, sensitive_features=sex, control_features=job if control else None)


@pytest.mark.filterwarnings("ignore:The repaired model keeps")  # about half of the variance
def test_a_gap_that_is_explained_leaves_the_model_as_it_is(explained):
    model, X, _, sex, _ = explained
    assert ks_distance(model.predict(X), sensitive_features=sex) > 0.25
    fair = fit(explained, target_ks=0.15)
    np.testing.assert_allclose(fair.predict(X), model.predict(X), atol=1e-9)
    assert fair.summary_["ks_before"] < 0.15 < fair.summary_["ks_raw_before"]
    plain = fit(explained, control=False, target_ks=0.15)  # without the strata the same target is dear
    assert plain.summary_["mse_after"] > 1.5 * fair.summary_["mse_after"]


@pytest.mark.filterwarnings("ignore:The repaired model predicts no better than a constant")  # of the paper's fine-tune
@pytest.mark.parametrize("method", ["transport", "parity", "exact", "paper"])
def test_a_gap_that_is_not_explained_is_closed(unexplained, method):
    model, X, _, sex, job = unexplained
    fair = fit(unexplained, method=method, **({} if method == "paper" else {"target_ks": 0.12}))
    before, after = (
        ks_distance(predict(X), sensitive_features=sex, control_features=job)
        for predict in (model.predict, fair.predict)
    )
    assert before > 0.2
    assert after < 0.6 * before


def test_what_is_said_is_what_brute_force_says(explained):
    """On rows given for validation, so that the same rows can be reweighted by hand."""
    model, X, y, sex, job = explained
    half = slice(0, ROWS // 2), slice(ROWS // 2, ROWS)
    fair = ESVDFair(model, method="parity", target_ks=0.06, effort=Effort.quick())
    there = X[half[1]], y[half[1]], sex[half[1]], None, job[half[1]]
    fair.fit(X[half[0]], y[half[0]], sensitive_features=sex[half[0]], control_features=job[half[0]], validation=there)
    weight = adjusted_weights(sex[half[1]], 2, job[half[1]])
    prediction = fair.predict(X[half[1]])
    said = fair.summary_
    rows = {"sensitive_features": sex[half[1]], "sample_weight": weight}
    assert said["ks_after"] == pytest.approx(ks_distance(prediction, **rows), abs=1e-9)
    assert said["mean_gap_after"] == pytest.approx(mean_gap(prediction, **rows), rel=1e-6)
    assert said["ks_raw_after"] == pytest.approx(ks_distance(prediction, sensitive_features=sex[half[1]]), abs=1e-9)
    assert said["mse_after"] == pytest.approx(np.mean((prediction - y[half[1]]) ** 2), rel=1e-6)  # everybody's
    assert said["outside_support"] == 0.0


def test_parity_holds_for_the_reweighted_rows_it_was_fitted_on(unexplained):
    model, X, y, sex, job = unexplained
    fair = ESVDFair(model, method="parity", validation_fraction=0.0, targets="labels", effort=Effort.quick())
    fair.fit(X, y, sensitive_features=sex, control_features=job)
    rows = {"sensitive_features": sex, "control_features": job}
    assert mean_gap(model.predict(X), **rows) > 0.5
    assert mean_gap(fair.predict(X), **rows) < 1e-6


def test_streams_and_arrays_agree(unexplained):
    model, X, y, sex, job = unexplained
    parts = np.array_split(np.arange(ROWS), 5)
    stream = lambda: ((X[i], y[i], sex[i], None, job[i]) for i in parts)  # noqa: E731
    options = {"method": "parity", "target_ks": 0.1, "effort": Effort.quick()}
    streamed = ESVDFair(model, **options).fit(stream)
    whole = ESVDFair(model, **options).fit(X, y, sensitive_features=sex, control_features=job)
    np.testing.assert_allclose(streamed.predict(X), whole.predict(X), atol=1e-6 * np.std(whole.predict(X)))
    assert streamed.summary_["ks_raw_before"] == pytest.approx(whole.summary_["ks_raw_before"])


def test_people_outside_the_common_support_are_counted(explained):
    model, X, y, sex, job = explained
    job = np.where((job == 2) & (sex == 1), 3, job)  # a job that only men have, another that only women have
    fair = ESVDFair(model, method="parity", target_ks=0.2, effort=Effort.quick())
    fair.fit(X, y, sensitive_features=sex, control_features=pd.DataFrame({"job": job}))
    assert fair.summary_["outside_support"] == pytest.approx(np.isin(job, [2, 3]).mean(), abs=0.05)


def test_strata_that_no_two_groups_share(explained):
    model, X, y, sex, _ = explained
    with pytest.raises(ValueError, match="no stratum of `control_features` contains rows of every group"):
        fit_curve(model, X, y, sensitive_features=sex, control_features=sex, effort=Effort.quick())


def test_the_floor_of_adjusted_groups_is_lower_where_strata_tell_scores_apart(explained):
    model, X, _, sex, job = explained
    rows = {"sensitive_features": sex, "y_pred": model.predict(X)}
    weight = adjusted_weights(sex, 2, job)
    assert ks_floor(**rows, control_features=job) < 0.9 * ks_floor(**rows, sample_weight=weight)


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(explained, tmp_path_factory):
    """The model and its people as files."""
    from skl2onnx import to_onnx

    model, X, y, sex, job = explained
    folder = tmp_path_factory.mktemp("control")
    (folder / "model.onnx").write_bytes(to_onnx(model, X[:1].astype(np.float32)).SerializeToString())
    frame = pd.DataFrame(X, columns=["level", "a", "b", "c"]).assign(job=job, sex=sex, y=y)
    frame.to_csv(folder / "people.csv", index=False)
    return folder


def run(*words):
    from click.testing import CliRunner

    from esvdfair.cli import main

    return CliRunner().invoke(main, [str(word) for word in words])


def test_audit_shows_raw_and_adjusted_side_by_side(files):
    done = run("audit", files / "model.onnx", files / "people.csv", "--sensitive", "sex", "--target", "y",
               "--features", "level,a,b,c", "--control", "job", "--target-ks", "0.1")  # fmt: skip
    assert "KS distance, adjusted" in done.output
    assert "rows in strata that lack a group" in done.output
    assert "no difference beyond chance: KS" in " ".join(done.output.split())
    assert done.exit_code == 0, done.output  # the raw distance is far beyond the target, the adjusted one is not


def test_repair_adjusts_for_a_column(files):
    done = run("repair", files / "model.onnx", files / "people.csv", "--sensitive", "sex", "--target", "y",
               "--features", "level,a,b,c", "--control", "job", "--target-ks", "0.15", "--quick",
               "-o", files / "fair.onnx")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "KS distance, adjusted" in done.output
    assert "not adjusted" in done.output


def test_the_report_shows_raw_and_adjusted_gaps_side_by_side(unexplained):
    from esvdfair.report import render_report

    _, X, y, sex, _ = unexplained
    fair = fit(unexplained, method="parity", target_ks=0.12)
    page = render_report(fair, X, y, sensitive_features=sex)
    assert "<h2>Adjusted for the control features</h2>" in page
    assert "adjusted for the control features" in page
    for key in ("ks_before", "ks_after", "ks_raw_before", "ks_raw_after"):
        assert f"{fair.summary_[key]:.3f}".lstrip("0") in page or f"{fair.summary_[key]:.3f}" in page


def test_the_report_adjusts_test_rows_for_their_strata(unexplained):
    from esvdfair.report import render_report

    _, X, y, sex, job = unexplained
    fair, test = fit(unexplained, method="parity", target_ks=0.12), slice(0, 800)
    told = fair.assess(X[test], y[test], sensitive_features=sex[test], control_features=job[test])
    page = render_report(fair, X, y, sensitive_features=sex, test=(X[test], y[test], sex[test], None, job[test]))
    assert "measured on 800 rows of test data" in page
    for key in ("ks_before", "ks_after", "ks_raw_before", "ks_raw_after"):
        assert f"{told[key]:.3f}" in page
