"""The attack on moments, mounted: it reads people from unguarded moments, and nobody from those as collected."""

import numpy as np
import pytest
import torch

from attack import attack, attack_together, pooled_with_groups
from esvdfair.core.moments import GroupMoments
from esvdfair.federated import MAX_LEVERAGE, MIN_ROWS, collect_moments, guard, merge_moments, repair_from_moments
from esvdfair.federated.guard import leverages, read_alone
from esvdfair.models import adapt


class Rare(torch.nn.Module):
    """A network of which many units are active for few people: their thresholds are far out."""

    def __init__(self, width=40, seed=0, reach=2.6):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.hidden = torch.nn.Linear(4, width)
            self.last = torch.nn.Linear(width, 1)
        self.double()
        with torch.no_grad():
            self.hidden.weight /= self.hidden.weight.norm(dim=1, keepdim=True)
            self.hidden.bias[:] = -torch.linspace(-1.0, reach, width)

    def forward(self, x):
        return self.last(torch.relu(self.hidden(x)))


def people(rows, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 4))
    a = rng.choice(["a", "b"], rows, p=[0.6, 0.4])
    X[a == "b"] += 0.4
    return X, X @ [1.0, -0.5, 0.3, 0.2] + rng.normal(size=rows), a


def told_by(model, X, y):
    """The rows [h, y]."""
    with torch.no_grad():
        return np.column_stack([torch.relu(model.hidden(torch.as_tensor(X))).numpy(), y])


def told(model, X, y, site):
    """The rows of which moments are told: units that are left out as their common part."""
    h = told_by(model, X, y)[:, :-1]
    along = np.zeros(h.shape[1])
    along[list(site.left_out)] = site.layer.weight[0][list(site.left_out)]
    common = (h @ along)[:, None] * along / (along @ along or 1.0)
    h[:, list(site.left_out)] = 0.0
    return np.column_stack([h + common, y])


def recovered(model, X, y, a, site):
    """People whose rows the attack reads from a site's moments, and how many rows show themselves."""
    rows, found = told(model, X, y, site), attack(site.moments)
    read = {i for label, hits in found.items() for i in np.flatnonzero(a == label)[hits.among(rows[a == label])]}
    together = attack_together(site.moments)
    read |= set(together.among(np.column_stack([*(a == label for label in site.moments.labels), rows])))
    return len(read), sum(len(hits.certain) for hits in (*found.values(), together))


@pytest.mark.parametrize(("rows", "reach"), [(60, 2.6), (200, 2.6), (1000, 3.0), (5000, 3.8)])
@pytest.mark.parametrize("labelled", [True, False])
def test_nobody_is_read_from_moments_as_they_are_collected(rows, reach, labelled):
    model, (X, y, a) = Rare(reach=reach), people(rows)
    y_or_none = y if labelled else None
    bare = collect_moments(model, X, y_or_none, sensitive_features=a, unsafe=True)
    safe = collect_moments(model, X, y_or_none, sensitive_features=a)
    if labelled:
        people_read, show = recovered(model, X, y, a, bare)
        assert min(people_read, show) >= 2  # a sanity check: there is something to protect
        assert recovered(model, X, y, a, safe) == (0, 0)
    else:
        assert sum(map(len, read_alone(bare.moments).values())) >= 2
        assert sum(map(len, read_alone(safe.moments).values())) == 0
    assert safe.left_out
    assert bare.left_out == ()


def test_nobody_is_read_from_the_sum_of_sites_either():
    model, (X, y, a) = Rare(), people(2000)
    sites = [collect_moments(model, X[i::4], y[i::4], sensitive_features=a[i::4]) for i in range(4)]
    for i, site in enumerate(sites):
        assert recovered(model, X[i::4], y[i::4], a[i::4], site) == (0, 0)
    assert recovered(model, X, y, a, merge_moments(sites)) == (0, 0)


def test_one_who_alone_lacks_a_unit_is_read_too():
    """A column with one value for all but one person; a difference of two columns would be another."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(size=(50, 3)), np.full(50, 2.0)])
    rows[17, 3] = 0.0
    (found,) = attack(GroupMoments().update(rows, ["a"] * 50)).values()
    assert 17 in found.among(rows)
    assert leverages(np.column_stack([np.ones(50), rows]), np.ones(50))[17] == pytest.approx(1.0)


def test_peeling_reads_those_who_stand_behind_another():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(80, 4)) + 10
    rows[:, :2] = 0.0
    rows[3, :2] = 1.5, 0.7  # unit 0 shows person 3, and without her unit 1 shows person 9
    rows[9, 1] = 0.4
    (found,) = attack(GroupMoments().update(rows, ["a"] * 80)).values()
    np.testing.assert_allclose(found.certain, rows[[3, 9]], rtol=1e-6)


# --- the rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_the_rules_hold_for_what_is_told(monkeypatch, weighted):
    model, (X, y, a) = Rare(), people(400)
    X[5] *= 8  # somebody stands out in all units
    weight = np.random.default_rng(1).uniform(0.2, 3, 400) if weighted else np.ones(400)
    judged = []
    judge = guard.Guard._judge
    monkeypatch.setattr(
        guard.Guard, "_judge", lambda self, *given: judged.append((self, given, judge(self, *given))) or judged[-1][2]
    )
    site = collect_moments(model, X, y, sensitive_features=a, sample_weight=weight)
    ((keeper, (labels, rows, codes, w), (kept, apart, stays)),) = judged
    assert tuple(np.flatnonzero(~kept)) == site.left_out
    assert site.sites[0].apart == apart.sum()
    assert set(np.flatnonzero(apart)) < set(np.flatnonzero(kept))
    groups = codes[:, None] == np.arange(2)
    everybody = np.column_stack([groups, keeper._told(rows, kept)])[stays]
    assert leverages(everybody, w[stays]).max() <= MAX_LEVERAGE
    assert (np.count_nonzero(rows[:, :40][:, kept], axis=0) > 0).sum() <= 400 // MIN_ROWS
    for mine, label in zip(groups.T, labels, strict=True):
        own, here = keeper._told(rows, apart)[stays & mine], w[stays & mine]
        assert leverages(np.column_stack([np.ones(len(own)), own]), here).max() <= MAX_LEVERAGE
        for units in (kept, apart):
            active = np.count_nonzero(keeper._told(rows, units)[stays & mine][:, :-1], axis=0)
            assert ((active == 0) | (active >= MIN_ROWS)).all()
        assert (np.count_nonzero(own[:, :-2], axis=0) > 0).sum() <= groups.sum(axis=0).min() // MIN_ROWS
        assert len(own) >= 0.9 * mine.sum()
        everything = np.column_stack([np.ones(mine.sum()), told_by(model, X, y)[a == label]])
        assert leverages(everything, weight[a == label]).max() > 0.99  # there was something to do
    assert site.sites[0].withheld == 400 - site.rows > 0


def test_beyond_what_a_small_group_bears_the_groups_are_told_of_together():
    """Sums over all groups, means, and what is told of each by itself are those of the rows; the rest is shared."""
    rng = np.random.default_rng(0)
    a = np.repeat(["a", "b"], [60, 400])
    rows = rng.normal(size=(460, 6)) @ rng.normal(size=(6, 6)) * np.where(a == "a", 2.0, 1.0)[:, None]
    moments = GroupMoments().update(rows, a)
    told = rng.normal(size=(2, 6))
    shared = guard._alike_beyond(moments, told)
    np.testing.assert_array_equal(shared.means, moments.means)
    np.testing.assert_allclose(shared.pooled_scatter(), moments.pooled_scatter(), rtol=1e-9)
    np.testing.assert_allclose(told @ shared.scatters @ told.T, told @ moments.scatters @ told.T, rtol=1e-9)
    shared.check_possible()
    off = np.linalg.svd(told)[2][2:]  # in these directions the groups are alike, up to what the others explain
    ratio = [off @ m.covariances()[0] @ off.T / (off @ m.covariances()[1] @ off.T) for m in (moments, shared)]
    assert np.diag(ratio[0]).min() > 2
    assert np.diag(ratio[1]).max() < 2.5
    # Another share of the unseen part between the groups gives the same file: it tells nothing of either.
    moved = moments.scatters + np.array([1, -1])[:, None, None] * 5 * off.T @ off
    other = GroupMoments.from_arrays(
        moments.labels, moments.rows, moments.counts, moments.weight_squares, moments.means, moved
    )
    np.testing.assert_allclose(guard._alike_beyond(other, told).scatters, shared.scatters, rtol=1e-9, atol=1e-9)


def test_everybody_together_can_be_attacked_too():
    rng = np.random.default_rng(0)
    a = np.repeat(["a", "b"], [30, 50])
    rows = np.abs(rng.normal(size=(80, 4)))
    rows[:, 0] = np.arange(80) == 17
    moments = GroupMoments().update(rows, a)
    whole = np.column_stack([a == "a", a == "b", rows])
    np.testing.assert_allclose(pooled_with_groups(moments).scatters[0] / 79, np.cov(whole.T), atol=1e-9)
    assert 17 in attack_together(moments).among(whole)


def test_pieces_of_a_stream_keep_the_rules(monkeypatch):
    """Rows are judged in pieces, so that memory is bounded; a sum of pieces keeps what each of them keeps."""
    model, (X, y, a) = Rare(), people(4000)
    whole = collect_moments(model, X, y, sensitive_features=a)
    init = guard.Guard.__init__
    monkeypatch.setattr(
        guard.Guard, "__init__", lambda self, *given: (init(self, *given), setattr(self, "_piece", 1000))[0]
    )
    pieces = collect_moments(model, X, y, sensitive_features=a)
    assert set(whole.left_out) <= set(pieces.left_out)
    assert recovered(model, X, y, a, pieces) == (0, 0)
    assert pieces.rows > 0.95 * 4000
    with torch.no_grad():
        output = model(torch.as_tensor(X))[:, 0].numpy()
    assert pieces.figures().means[0] == pytest.approx(output[a == "a"].mean(), abs=0.02)


def test_units_left_out_keep_their_weights_up_to_one_factor():
    model, (X, y, a) = Rare(), people(1500)
    site = collect_moments(model, X, y, sensitive_features=a)
    fair = repair_from_moments(model, site)
    left = list(site.left_out)
    (edit,) = fair.edits_
    factors = (edit.weight_after / edit.weight_before)[0, left]
    np.testing.assert_allclose(factors, factors[0], rtol=1e-9)
    assert 3 < len(left) < 37
    # What is known of them is enough for parity on the rows that are in the moments, and these are nearly all.
    before, after = (adapt(m).predict(X) for m in (model, fair.estimator_))
    gaps = [abs(p[a == "a"].mean() - p[a == "b"].mean()) for p in (before, after)]
    assert gaps[1] < 0.05 * gaps[0]
    assert fair.summary_["mean_gap_after"] < 1e-9


def test_people_who_stand_alone_in_the_label_itself():
    model, (X, y, a) = Rare(width=3, reach=0.0), people(40)
    y[a == "a"] = 0.0
    y[np.flatnonzero(a == "a")[:3]] = [1.0, 1e3, 1e6]  # each alone once the larger one is withheld
    with pytest.raises(ValueError, match=r"in the group 'a' \d of \d+ rows stand alone: each has more than 50%"):
        collect_moments(model, X, y, sensitive_features=a)
