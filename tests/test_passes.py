"""One pass gathers the moments of all training rows and a bounded sample that does not depend on batching."""

import numpy as np
import pytest

from esvdfair.batches import ArrayBatches, held_out, row_key
from esvdfair.core.moments import GroupMoments
from esvdfair.models.base import LinearLayer
from esvdfair.passes import collect_rows


class Identity:
    """A model whose last layer sees its inputs as they are."""

    model = None
    n_features = None

    def capture(self, x, names):
        return dict.fromkeys(names, x), x.sum(axis=1)


LAYER = LinearLayer("last", 0, np.ones((1, 3)), np.zeros(1))


def batches(batch_size=100, rows=1000, y=True, weight=None, order=None):
    rng = np.random.default_rng(0)
    x, a = rng.normal(size=(rows, 3)), rng.choice(["a", "b", "c"], rows, p=[0.6, 0.3, 0.1])
    labels = x @ [1.0, 2.0, 3.0] if y else None
    return ArrayBatches(x, labels, a, weight, batch_size=batch_size), x, a


def test_moments_are_those_of_the_training_rows_with_their_labels():
    rows, x, a = batches()
    split = held_out(0.25, 3)
    seen = collect_rows(Identity(), rows, LAYER, split=split, seed=3)
    hidden = collect_rows(Identity(), rows, LAYER, split=split, seed=3, inner=LAYER)
    keep = ~split(np.arange(1000))
    expected = GroupMoments().update(np.column_stack([x, x @ [1.0, 2.0, 3.0]])[keep], a[keep])
    np.testing.assert_allclose(seen.moments.scatters, expected.scatters, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(hidden.inner_moments.means, expected.means[:, :3])
    assert len(seen.training) == keep.sum()
    assert len(seen.heldout) == 1000 - keep.sum()
    assert seen.labels == ("a", "b", "c")


@pytest.mark.parametrize("bound", [60, 10_000])
def test_the_sample_does_not_depend_on_batching(bound):
    found = [
        collect_rows(
            Identity(),
            batches(size)[0],
            LAYER,
            split=held_out(0.25, 1),
            seed=1,
            training_rows=bound,
            heldout_rows=bound,
        )
        for size in (7, 100, 1000)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].training.features, other.training.features)
        np.testing.assert_array_equal(found[0].heldout.codes, other.heldout.codes)
        np.testing.assert_allclose(found[0].training.weight, other.training.weight)


def test_the_sample_is_bounded_group_by_group_and_stands_for_all_rows():
    rows, _, a = batches()
    seen = collect_rows(Identity(), rows, LAYER, split=None, seed=0, training_rows=60)
    assert seen.training.group_rows.tolist() == [20, 20, 20]
    for code, label in enumerate("abc"):
        assert seen.training.weight[seen.training.codes == code].sum() == pytest.approx((a == label).sum())
    assert len(seen.heldout) == 0


def test_the_sample_keeps_the_smallest_keys_of_every_group():
    rows, x, a = batches()
    seen = collect_rows(Identity(), rows, LAYER, split=None, seed=4, training_rows=60)
    key = row_key(np.arange(1000), 5)  # the sample's hash is that of the next seed
    expected = [row for label in "abc" for row in sorted(np.flatnonzero(a == label), key=lambda row: key[row])[:20]]
    np.testing.assert_array_equal(seen.training.features, x[expected])


def test_weights_enter_and_rows_of_weight_zero_leave():
    weight = np.zeros(1000)
    weight[:500] = 2.0
    seen = collect_rows(Identity(), batches(weight=weight)[0], LAYER, split=None, seed=0)
    assert len(seen.training) == 500
    assert seen.training.weight.sum() == pytest.approx(1000)
    assert seen.moments.counts.sum() == pytest.approx(1000)


def test_without_labels_the_rows_have_none():
    seen = collect_rows(Identity(), batches(y=False)[0], LAYER, split=None, seed=0)
    assert seen.training.y is None
    assert seen.moments.width == 3


def test_predictions_that_are_not_finite_are_an_error():
    class Broken(Identity):
        def capture(self, x, names):
            inputs, prediction = super().capture(x, names)
            prediction[:2] = np.nan
            return inputs, prediction

    with pytest.raises(ValueError, match="NaN or infinite values for 2 of 100 rows"):
        collect_rows(Broken(), batches()[0], LAYER, split=None, seed=0)


def test_a_sequence_at_the_last_layer_is_an_error():
    class Sequence(Identity):
        def capture(self, x, names):
            return {name: np.stack([x, x], axis=1) for name in names}, x.sum(axis=1)

    with pytest.raises(ValueError, match="one feature vector for each row"):
        collect_rows(Sequence(), batches()[0], LAYER, split=None, seed=0)


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        collect_rows(Identity(), [], LAYER, split=None, seed=0)
