"""The verdict and its words, from summaries alone."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from esvdfair import ESVDFair
from esvdfair.text import percent, summary_table, verdict

BASE = {
    "target_ks": 0.1, "met": True, "certified": None, "confidence": None, "ks_before": 0.376, "ks_after": 0.098,
    "ks_population": 0.082, "ks_upper": 0.11, "ks_interval": (0.05, 0.12), "ks_floor": 0.04, "mse_before": 0.05,
    "mse_after": 0.06, "r2_before": 0.5, "r2_after": 0.4, "constant": False, "rows": 1250, "error_against": "labels",
    "evaluated_on": "validation", "decided_by": "the most accurate that meets the target",
    "group_sizes": {"f": 250, "m": 1000}, "groups_set_aside": {},
}  # fmt: skip
KEPT = {f"{name}_after": BASE[f"{name}_before"] for name in ("mse", "ks", "r2")}
KEEPS = ", and it keeps 80% of the explained variance (R² 0.500 to 0.400)."


@pytest.mark.parametrize(
    ("changed", "answer", "headline"),
    [
        ({}, "use", f"Use the repaired model: its estimated population KS of 0.082 meets the target of 0.1{KEEPS}"),
        ({"target_ks": None, "met": None}, "use",
         f"The repaired model has an estimated population KS of 0.082; no target was set{KEEPS}"),
        ({"certified": True, "confidence": 0.9}, "use",
         "Use the repaired model: it is certified to meet the target of 0.1 with 90% confidence (estimated population "
         f"KS 0.082){KEEPS}"),
        ({"met": False, "ks_population": 0.12}, "unmet",
         f"The repaired model does not meet the target of 0.1: its estimated population KS is 0.120{KEEPS}"),
        ({"met": False, "certified": False, "confidence": 0.9, "ks_upper": 0.13}, "unmet",
         "The repaired model is not certified to meet the target of 0.1: estimate 0.082, at most 0.130 with 90% "
         f"confidence{KEEPS}"),
        ({"met": False, "target_ks": 0.02, "ks_population": 0.01}, "unknown",
         "These rows cannot show whether the target of 0.02 is met: it is below what chance alone shows, 0.040 "
         f"(estimate 0.010){KEEPS}"),
        (KEPT, "keep", "Keep the original model: its estimated population KS of 0.082 meets the target of 0.1."),
        (KEPT | {"met": False, "ks_population": 0.3}, "unmet",
         "The original model, which is returned, does not meet the target of 0.1: its estimated population KS is "
         "0.300."),
        ({"ks_after": 0.4, "met": False, "ks_population": 0.4}, "keep",
         "Keep the original model: the repair brings the groups no closer (estimated population KS 0.400, against the "
         "target of 0.1)."),
        ({"constant": True}, "useless",
         "Do not use the repaired model: it predicts nearly the same number for everybody (estimated population KS "
         "0.082, against the target of 0.1)."),
        ({"r2_after": -0.1}, "useless",
         "Do not use the repaired model: it predicts no better than a constant, R² 0.500 to -0.100 (estimated "
         "population KS 0.082, against the target of 0.1)."),
        ({"error_against": "predictions", "r2_before": 1.0}, "use",
         "Use the repaired model: its estimated population KS of 0.082 meets the target of 0.1, and it changes "
         "predictions by 0.245 (root mean square)."),
    ],
)  # fmt: skip
def test_the_answer_and_the_figure_beside_its_target(changed, answer, headline):
    found = verdict(BASE | changed)
    assert (found.answer, found.headline) == (answer, headline)
    assert str(found).startswith(headline)
    assert found.measured == (
        "Measured on 1,250 rows of validation data: KS distance 0.376 before, "
        f"{(BASE | changed)['ks_after']:.3f} after; chance alone shows about 0.040 at these group sizes."
    )
    assert found.next_steps


def test_what_to_do_next():
    steps = {name: " ".join(verdict(BASE | changed).next_steps) for name, changed in {
        "validated": {}, "tested": {"evaluated_on": "test"}, "unmet": {"met": False, "ks_population": 0.2},
        "unknown": {"met": False, "target_ks": 0.02, "ks_population": 0.0},
    }.items()}  # fmt: skip
    assert "Evaluate the repaired model on test data" in steps["validated"]
    assert "test data" not in steps["tested"]
    assert "Reset your cut-offs" in steps["tested"]
    assert "more rows, especially of f" in steps["unmet"]
    assert "about 4.0 times as many rows" in steps["unknown"]


def test_small_groups_strata_and_bounds_are_named():
    found = str(verdict(BASE | {"groups_set_aside": {"x": 7}, "outside_support": 0.04}))
    assert "Too small to compare: x (7 rows)." in found
    adjusted = verdict(BASE | {"ks_raw_before": 0.4}).measured
    assert "KS distance, adjusted for the control features, 0.376 before, 0.098 after" in adjusted
    assert "4% of the rows are in strata that lack a group." in found
    assert "Its population KS is at most 0.110 with 95% confidence." in found
    assert "is at most" not in str(verdict(BASE | {"certified": True, "confidence": 0.9}))


def test_the_table_begins_with_the_figure_that_decides():
    rng = np.random.default_rng(0)
    groups = np.arange(600) % 2
    X = rng.normal(size=(600, 3)) + np.outer(groups, [1, 0, 0])
    y = X.sum(axis=1) + rng.normal(size=600)
    fair = ESVDFair(LinearRegression().fit(X, y), method="parity", target_ks=0.2).fit(X, y, sensitive_features=groups)
    header, lines = summary_table(fair.summary_)
    s = fair.summary_
    assert header == ["", "before", "after", "95% interval, after"]
    low, high = s["ks_interval"]
    estimate = f"{s['ks_population']:.3f}"
    assert lines[0] == ["estimated population KS (target 0.2)", "", estimate, f"[{low:.3f}, {high:.3f}]"]
    assert lines[1] == ["KS distance", f"{s['ks_before']:.3f}", f"{s['ks_after']:.3f}", ""]
    of_groups = [f"  of {group} ({rows} rows)" for group, rows in s["group_sizes"].items()]
    assert [line[0] for line in lines[2:6]] == ["mean squared error", "  refit without fairness constraint", *of_groups]


def test_nothing_is_minus_zero_percent():
    assert [percent(value) for value in (-0.002, 0.0, 0.002, -0.2)] == ["0%", "0%", "0%", "-20%"]
    assert percent(-0.0001, 1) == "0%"


def test_more_explained_variance_than_before_is_not_kept_variance():
    better = {"r2_before": 0.207, "r2_after": 0.431}
    words = "and it explains more of the variance than before (R² 0.207 to 0.431)."
    assert verdict(BASE | better).headline.endswith(words)
    assert "keeps 100% of" in verdict(BASE | {"r2_before": 0.4, "r2_after": 0.4001}).headline
    below = {"met": False, "target_ks": 0.02, "ks_population": 0.01, "r2_after": -0.1}
    assert verdict(BASE | below).headline.endswith(", and it has an R² of -0.100 (0.500 before).")
