"""Groups reweighted to one mix of strata: against brute force, and moments of cells against weighted rows."""

import numpy as np
import pytest

from esvdfair.core.ks import (
    Groups,
    adjusted_weights,
    ks_between,
    label_parts,
    make_cells,
    outside_support,
    split_cell,
)
from esvdfair.core.moments import GroupMoments
from esvdfair.core.pairs import ks_null
from esvdfair.exceptions import InputError


def people(seed=0, rows=400, groups=2, strata=4):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, groups, rows)
    # Groups differ in their mix of strata, or there would be nothing to adjust.
    mix = rng.dirichlet(np.ones(strata), groups)
    stratum = np.array([rng.choice(strata, p=mix[g]) for g in codes])
    return codes, stratum, rng.uniform(0.5, 2.0, rows), rng


def brute(codes, strata, weight):
    """P(s)/P(s|g) row by row, as it is defined."""
    support = [
        s for s in np.unique(strata) if all(weight[(codes == g) & (strata == s)].sum() for g in np.unique(codes))
    ]
    inside = np.isin(strata, support)
    adjusted = np.zeros(len(codes))
    for i in np.flatnonzero(inside):
        alike = inside & (strata == strata[i])
        mine = inside & (codes == codes[i])
        p = weight[alike].sum() / weight[inside].sum()
        adjusted[i] = weight[i] * p / (weight[alike & mine].sum() / weight[mine].sum())
    return adjusted


@pytest.mark.parametrize("groups", [2, 3])
def test_weights_are_those_of_the_definition(groups):
    codes, strata, weight, _ = people(groups=groups)
    strata[(codes == 0) & (strata == 2)] = 1  # a stratum that one group lacks
    adjusted = adjusted_weights(codes, groups, strata, weight)
    np.testing.assert_allclose(adjusted, brute(codes, strata, weight), rtol=1e-12)
    assert outside_support(weight, adjusted) == pytest.approx(weight[strata == 2].sum() / weight.sum())


def test_every_group_then_has_the_same_mix():
    codes, strata, weight, _ = people(1)

    def mixes(w):
        found = [np.bincount(strata[codes == g], w[codes == g]) for g in (0, 1)]
        return [mix / mix.sum() for mix in found]

    before, after = mixes(weight), mixes(adjusted_weights(codes, 2, strata, weight))
    assert np.abs(before[0] - before[1]).max() > 0.05
    np.testing.assert_allclose(after[0], after[1], atol=1e-12)


def test_groups_that_share_no_stratum_cannot_be_compared():
    with pytest.raises(InputError, match="no stratum of `control_features` contains rows of every group"):
        adjusted_weights(np.array([0, 0, 1]), 2, np.array([0, 0, 1]))


@pytest.mark.parametrize("group", ["a", ("a", 1)])
@pytest.mark.parametrize("stratum", [7, ("x", "y")])
def test_cells_know_their_group_and_stratum(group, stratum):
    (cell,), codes = make_cells(([group], np.zeros(2, dtype=int)), ([stratum], np.zeros(2, dtype=int)))
    assert split_cell(cell, label_parts(group)) == (group, stratum)
    assert codes.tolist() == [0, 0]


def test_moments_of_cells_are_those_of_reweighted_rows():
    codes, strata, weight, rng = people(2, groups=3)
    strata[(codes == 1) & (strata == 3)] = 0
    x = rng.normal(size=(len(codes), 3)) + strata[:, None] + codes[:, None]
    cells = make_cells((["a", "b", "c"], codes), ([0, 1, 2, 3], strata))
    merged = GroupMoments().update_codes(x[:150], cells[0], cells[1][:150], weight[:150])
    merged.merge(GroupMoments().update_codes(x[150:], cells[0], cells[1][150:], weight[150:]))
    found = merged.adjusted(1)
    plain = GroupMoments().update(x, np.array(["a", "b", "c"])[codes], weight)
    direct = GroupMoments().update(x, np.array(["a", "b", "c"])[codes], adjusted_weights(codes, 3, strata, weight))
    assert found.labels == ("a", "b", "c")
    np.testing.assert_allclose(found.means, direct.means, rtol=1e-12)
    np.testing.assert_allclose(found.covariances(), direct.covariances(), rtol=1e-10)
    # The error is everybody's: pooled moments are those of all rows as they are.
    assert found.pooled_weight == pytest.approx(weight.sum())
    np.testing.assert_allclose(found.pooled_mean(), plain.pooled_mean(), rtol=1e-12)
    np.testing.assert_allclose(
        found.columns([0, 2]).pooled_scatter(), plain.columns([0, 2]).pooled_scatter(), rtol=1e-10
    )
    assert np.abs(found.means - plain.means).max() > 0.1


@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_the_noise_of_adjusted_groups_is_that_of_simulated_samples(apart):
    """People of one distribution within strata: what KS distance do their adjusted groups show?"""
    found, said = [], []
    for seed in range(60):
        codes, strata, _, _ = people(3, rows=800)  # the same people, other scores
        scores = apart * strata + np.random.default_rng(seed).normal(size=len(codes))
        groups = Groups(codes, 2, adjusted_weights(codes, 2, strata), strata)
        found.append(ks_between(scores, groups))
        said += [ks_null(groups, scores, seed).floor] if seed < 10 else []
    assert np.mean(said) == pytest.approx(np.mean(found), rel=0.12)  # the mean of 60 has an error of 4 %


def test_adjusted_moments_do_not_add_up_and_say_so(tmp_path):
    cells = make_cells((["a", "b"], np.array([0, 1] * 10)), ([0], np.zeros(20, dtype=int)))
    adjusted = GroupMoments().update_codes(np.random.default_rng(0).normal(size=(20, 2)), *cells).adjusted(1)
    for use in (lambda: adjusted.merge(GroupMoments()), lambda: adjusted.save(tmp_path / "a.moments")):
        with pytest.raises(ValueError, match="adjusted for strata"):
            use()
