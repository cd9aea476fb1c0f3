"""Decisions at a cut-off: against Fairlearn and statsmodels, ties, weights, words, and coverage by simulation."""

import numpy as np
import pandas as pd
import pytest

from esvdfair import decisions
from esvdfair.cutoffs import ratio_interval, ratios_by_share

COLUMNS = [
    "rows", "selected_before", "selected_after", "ratio_before", "ratio_after", "ratio_low", "ratio_high", "gained",
    "lost", "difference_before", "difference_after",
]  # fmt: skip

RNG = np.random.default_rng(0)
SEX = np.repeat(["f", "m"], [300, 500])
BEFORE = RNG.normal(size=800) + (SEX == "m")
AFTER = 0.4 * BEFORE - 0.35 * (SEX == "m") + 0.1 * RNG.normal(size=800)
WEIGHT = RNG.integers(0, 4, 800).astype(float)


def selection_rates(yes, sample_weight=None):
    """As Fairlearn computes them."""
    frames = pytest.importorskip("fairlearn.metrics", reason="fairlearn is not installed (extra esvdfair[peers])")
    params = {"sample_params": {"sample_weight": sample_weight}} if sample_weight is not None else {}
    metric = {"metrics": frames.selection_rate, "y_true": yes, "y_pred": yes}
    return frames.MetricFrame(**metric, sensitive_features=SEX, **params)


@pytest.mark.parametrize("select", ["above", "below"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("how", [{"cutoff": 0.9}, {"select_share": 0.2}])
def test_rates_and_ratios_are_those_of_fairlearn(select, weight, how):
    found = decisions(BEFORE, AFTER, sensitive_features=SEX, select=select, sample_weight=weight, **how)
    frame = found.to_frame()
    assert list(frame.columns) == [*COLUMNS, "cutoff_before", "cutoff_after"]
    for when, scores in (("before", BEFORE), ("after", AFTER)):
        cutoff = getattr(found, f"cutoff_{when}")
        yes = scores >= cutoff if select == "above" else scores <= cutoff
        theirs = selection_rates(yes, weight)
        np.testing.assert_allclose(frame[f"selected_{when}"], theirs.by_group, rtol=0, atol=1e-9)
        assert frame[f"ratio_{when}"].min() == pytest.approx(theirs.ratio(), abs=1e-9)
        assert getattr(found, f"share_{when}") == pytest.approx(theirs.overall, abs=1e-9)
        means = (
            pd.Series(scores)
            .groupby(SEX)
            .apply(lambda s: np.average(s, weights=None if weight is None else weight[s.index]))
        )
        mean = np.average(scores, weights=weight)
        spread = np.sqrt(np.average((scores - mean) ** 2, weights=weight))
        reference = means[theirs.by_group.idxmax()]
        np.testing.assert_allclose(frame[f"difference_{when}"], (means - reference) / spread, atol=1e-9)
    people = pd.Series(np.ones(800) if weight is None else weight).groupby(SEX).sum()
    moved = (frame["selected_after"] - frame["selected_before"]) * people
    np.testing.assert_allclose(frame["gained"] - frame["lost"], moved, atol=1e-9)


def test_the_new_cutoff_selects_as_many_and_can_be_typed():
    found = decisions(BEFORE, AFTER, sensitive_features=SEX, select_share=0.2)
    assert found.share_before == found.share_after == np.mean(found.cutoff_after <= AFTER) == 0.2
    assert found.share_old_cutoff == np.mean(found.cutoff_before <= AFTER) < 0.1
    assert len(str(found.cutoff_after)) < 8
    kept = f"{100 * found.share_old_cutoff:.1f}".removesuffix(".0")
    words = (
        f"The old cut-off of {found.cutoff_before} would now select {kept}% instead of 20%: use {found.cutoff_after}."
    )
    assert found.cutoff_words() == words
    again = decisions(BEFORE, AFTER, sensitive_features=SEX, cutoff=found.cutoff_before)
    assert again.to_frame().equals(found.to_frame())
    assert (
        "Adverse-impact ratio of f against m"
        in decisions(BEFORE, BEFORE, sensitive_features=SEX, cutoff=1).ratio_words()
    )


def test_words_name_the_most_selected_group_of_each_time():
    """Before the repair it may be another one than after."""
    group = np.repeat(["f", "m", "z"], 100)
    before, after = (np.tile(np.arange(100.0), 3) + np.repeat(moved, 100) for moved in ([0, 30, 20], [18, 20, 25]))
    found = decisions(before, after, sensitive_features=group, cutoff=80)
    assert (found.reference_before, found.reference_after) == ("m", "z")
    assert found.ratio_before["f"] == 20 / 50
    assert found.ratio_words().startswith("Adverse-impact ratio of f: 0.400 before, against m; 0.")
    assert ", against z (95% interval " in found.ratio_words()


def test_weights_count_as_people():
    times = np.repeat(np.arange(800), WEIGHT.astype(int))
    once = decisions(BEFORE, AFTER, sensitive_features=SEX, sample_weight=WEIGHT, cutoff=0.9)
    repeated = decisions(BEFORE[times], AFTER[times], sensitive_features=SEX[times], cutoff=0.9)
    same = [name for name in COLUMNS if name not in ("rows", "ratio_low", "ratio_high")]
    pd.testing.assert_frame_equal(once.to_frame()[same], repeated.to_frame()[same])
    assert once.ratio_low["f"] < repeated.ratio_low["f"]  # fewer effective rows


def test_below_is_above_of_the_negative():
    above = decisions(-BEFORE, -AFTER, sensitive_features=SEX, select_share=0.3).to_frame()
    below = decisions(BEFORE, AFTER, sensitive_features=SEX, select_share=0.3, select="below").to_frame()
    pd.testing.assert_frame_equal(above.iloc[:, :-4], below.iloc[:, :-4])
    np.testing.assert_array_equal(above.iloc[:, -4:], -below.iloc[:, -4:])


def test_ties_take_the_nearest_share_and_are_told():
    before = np.repeat([1.0, 2, 3, 4], 25)
    after = np.repeat([1.0, 2, 3], [40, 40, 20])
    found = decisions(before, after, sensitive_features=np.arange(100) % 2, select_share=0.2)
    assert (found.share_before, found.tied_before) == (0.25, 0.25)
    assert (found.share_after, found.tied_after) == (0.2, 0.2)
    assert (
        "20% of all people score exactly the same there, so no cut-off selects exactly 25%: this one selects 20%."
        in (found.cutoff_words())
    )
    assert "25% of all people tie at the old cut-off, so it selects 25% and not 20%." in found.cutoff_words()
    constant = decisions(before, np.ones(100), sensitive_features=np.arange(100) % 2, cutoff=4)
    assert (constant.share_after, constant.cutoff_after) == (1.0, 1.0)


def test_a_tiny_group_is_not_what_others_are_compared_with():
    groups = np.append(SEX, ["x"] * 3)
    scores = np.append(BEFORE, [9.0] * 3)
    found = decisions(scores, scores, sensitive_features=groups, select_share=0.2)
    assert found.reference_after == "m"
    assert found.lowest_after == "f"
    assert found.ratio_after["x"] > 1
    tiny = decisions([1, 2, 3, 4], [1, 2, 3, 4], sensitive_features=["a", "a", "b", "b"], cutoff=3)
    assert (tiny.reference_after, tiny.ratio_after["a"], tiny.ratio_low["a"]) == ("b", 0.0, 0.0)


def test_two_attributes_become_their_combinations():
    both = np.column_stack([SEX, np.tile(["x", "y"], 400)])
    found = decisions(BEFORE, AFTER, sensitive_features=both, cutoff=1)
    assert found.ratio_after["f", "x"] == found.to_frame()["ratio_after"]["f, x"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "Pass either `cutoff` or `select_share`"),
        ({"cutoff": 1, "select_share": 0.2}, "Pass either"),
        ({"cutoff": 99}, r"`cutoff=99` selects nobody: the predictions range from -.* to .*"),
        ({"cutoff": float("nan")}, "`cutoff=nan` must be a finite number"),
        ({"select_share": 20}, "`select_share=20` must lie between 0 and 1"),
        ({"cutoff": 1, "select": "top"}, "`select='top'` is unknown"),
    ],
)
def test_what_it_refuses(options, said):
    with pytest.raises(ValueError, match=said):
        decisions(BEFORE, AFTER, sensitive_features=SEX, **options)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="after"):
        decisions(BEFORE, AFTER[1:], sensitive_features=SEX, cutoff=1)


@pytest.mark.parametrize("select", ["above", "below"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_ratios_by_share_are_those_of_fairlearn(select, weight):
    found = ratios_by_share(BEFORE, sensitive_features=SEX, sample_weight=weight, select=select)
    shares = [share for share, _ in found]
    assert 90 < len(found) <= 99
    assert shares == sorted(shares)
    for share, ratio in found[::10]:
        decided = decisions(
            BEFORE, BEFORE, sensitive_features=SEX, select=select, sample_weight=weight, select_share=share
        )
        yes = decided.cutoff_before <= BEFORE if select == "above" else decided.cutoff_before >= BEFORE
        theirs = selection_rates(yes, weight)
        assert share == pytest.approx(theirs.overall, abs=1e-9)
        assert ratio == pytest.approx(theirs.ratio(), abs=1e-9)


def test_ratios_by_share_leave_out_tiny_groups_and_keep_ties_together():
    groups = np.append(SEX, ["x"] * 3)
    last = ratios_by_share(np.append(BEFORE, [-99.0] * 3), sensitive_features=groups)
    assert all(ratio > 0 for share, ratio in last if share > 0.2)
    tied = ratios_by_share(np.repeat([1.0, 2.0], 100), sensitive_features=np.arange(200) % 2)
    assert tied == [[0.5, 1.0], [1.0, 1.0]]


# --- the interval of a ratio -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "n", "y", "m"), [(7, 40, 30, 90), (0, 25, 12, 30), (3, 12, 200, 400), (19, 20, 30, 60)])
def test_the_interval_is_the_score_interval_of_statsmodels(x, n, y, m):
    stats = pytest.importorskip("statsmodels.stats.proportion", reason="statsmodels is not installed")
    ends = ratio_interval(x / n, n, y / m, m)
    for end in ends:  # a two-sided score test of the ratio at either end has a p-value of 5%
        if end > 0:
            test = stats.test_proportions_2indep(
                x, n, y, m, value=float(end), method="score", compare="ratio", correction=False
            )
            assert test.pvalue == pytest.approx(0.05, abs=1e-6)
    assert ends[0] <= x / n / (y / m) <= ends[1]


@pytest.mark.parametrize("at", [{"cutoff": 0.6}, {"select_share": 0.25}])
@pytest.mark.parametrize(
    ("sizes", "shift", "weighted"),
    [((30, 30), 0.5, False), ((25, 600), 0.8, False), ((300, 300), 0.0, False), ((200, 400), 0.5, True)],
)
def test_the_interval_covers_the_ratio_at_the_cutoff_of_a_population(at, sizes, shift, weighted):
    """Scores are rounded to tenths, so that many people tie; the ratio of the population is known exactly."""
    from scipy.special import ndtr

    rng, hits, runs = np.random.default_rng(1), 0, 400
    groups = np.repeat([0, 1], sizes)
    for _ in range(runs):
        scores = np.round(rng.normal(size=len(groups)) + shift * groups, 1)
        weight = rng.lognormal(0, 0.7, len(groups)) if weighted else None
        found = decisions(scores, scores, sensitive_features=groups, sample_weight=weight, **at)
        edge = np.ceil(round(found.cutoff_after * 10, 6)) / 10 - 0.05
        shares = ndtr(shift * np.arange(2) - edge)
        low = 1 - found.reference_after
        hits += found.ratio_low[low] <= shares[low] / shares[found.reference_after] <= found.ratio_high[low]
    assert 0.92 <= hits / runs <= 0.985


def test_cutoffs_are_written_like_other_numbers_but_with_all_digits_that_select():
    scores = np.arange(24_000.0, 26_000.0, 20.0)
    sex = np.arange(len(scores)) % 2
    one = decisions(scores, scores, sensitive_features=sex, cutoff=25_010)
    assert one.cutoff_words() == "A cut-off of 25,010 selects 49%."
    two = decisions(scores, scores - 1000.125, sensitive_features=sex, cutoff=25_010)
    assert "The old cut-off of 25,010 would now select 0% instead of 49%: use 24,000." in two.cutoff_words()
    with pytest.raises(ValueError, match="cutoff=1000000` selects nobody: the predictions range from 24,000 to 26,000"):
        decisions(scores, scores, sensitive_features=sex, cutoff=1e6)
