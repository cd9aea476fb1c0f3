"""One pass of a model over batches -> group moments of a layer's inputs, and a bounded sample of rows.

The moments know every training row; the sample holds the rows that the whole distribution is read from (transport,
the optimum) and the held-out rows on which a point is chosen. Nothing else is kept, so memory does not depend on the
number of rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.batches import Batch, Batches, Splitter, row_key
from esvdfair.core.groups import Label, sort_key
from esvdfair.core.moments import GroupMoments
from esvdfair.models.arrays import append_column, count_not_finite, take_rows
from esvdfair.models.protocol import LinearLayer, ModelAdapter

Array = NDArray[np.float64]

TRAINING_ROWS = 60_000
HELDOUT_ROWS = 100_000


@dataclass(frozen=True)
class Rows:
    """A sample of rows at the input of the last layer.

    Attributes
    ----------
    features : (n, p) inputs of the layer, in the dtype of the model
    prediction : (n,) what the model predicts for them
    y : (n,) labels, or None
    codes : (n,) groups, positions in ``Pass.labels``
    weight : (n,) sample weights, scaled up where a group was sampled
    """

    features: NDArray[Any]
    prediction: Array
    y: Array | None
    codes: NDArray[np.intp]
    weight: Array

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def group_rows(self) -> NDArray[np.intp]:
        """(G,) number of rows of each group that occurs, up to the last that does."""
        return np.bincount(self.codes)


@dataclass(frozen=True)
class Pass:
    """What one pass over the rows has seen.

    Attributes
    ----------
    labels : the groups, sorted
    moments : of ``[h, y]`` (``h`` alone without labels) over the training rows
    training : sample of the training rows
    heldout : sample of the held-out rows; empty when none were asked for
    inner_moments : of the inputs of a further layer over the training rows, when one was asked for
    """

    labels: tuple[Label, ...]
    moments: GroupMoments
    training: Rows
    heldout: Rows
    inner_moments: GroupMoments


def collect_rows(
    adapter: ModelAdapter,
    batches: Batches,
    layer: LinearLayer,
    *,
    split: Splitter | None,
    seed: int,
    inner: LinearLayer | None = None,
    training_rows: int = TRAINING_ROWS,
    heldout_rows: int = HELDOUT_ROWS,
) -> Pass:
    """Run the model once over all batches, at the input of its last linear layer.

    Parameters
    ----------
    split : tells held-out rows from training rows; None keeps every row for training
    seed : of the hash by which rows enter the bounded samples
    inner : a further layer whose input moments are gathered in the same pass
    training_rows, heldout_rows : bounds of the samples, shared equally by the groups
    """
    moments, inner_moments = GroupMoments(), GroupMoments()
    names = [layer.name] if inner is None else [layer.name, inner.name]
    training, heldout = _Sample(training_rows, seed), _Sample(heldout_rows, seed)
    rows = 0
    for batch in batches:
        inputs, prediction = adapter.capture(batch.x, names)
        features = inputs[layer.name]
        _check_capture(layer, features, prediction, len(batch.codes))
        out = np.zeros(len(batch.codes), dtype=bool) if split is None else split(batch.row_id)
        weight = (~out).astype(np.float64) if batch.weight is None else batch.weight * ~out
        moments.update_codes(
            features if batch.y is None else append_column(features, batch.y), batch.labels, batch.codes, weight
        )
        if inner is not None:
            inner_moments.update_codes(inputs[inner.name], batch.labels, batch.codes, weight)
        training.add(batch, ~out, features, prediction)
        heldout.add(batch, out, features, prediction)
        rows += len(batch.codes)
    if not rows:
        raise ValueError("there are no rows to fit on: the data is empty.")
    labels = tuple(sorted(set(training.seen) | set(heldout.seen), key=sort_key))
    return Pass(labels, moments.all_reduce(), training.rows(labels), heldout.rows(labels), inner_moments.all_reduce())


def _check_capture(layer: LinearLayer, features: Any, prediction: Any, rows: int) -> None:
    if features.ndim != 2 or features.shape[0] != rows:
        raise ValueError(
            f"the last linear layer {layer.name!r} takes inputs of shape {tuple(features.shape)} for {rows} rows; "
            "a repair of the output needs one feature vector for each row."
        )
    bad = count_not_finite(prediction)
    if bad:
        raise ValueError(
            f"the model predicts NaN or infinite values for {bad} of {rows} rows; check X for missing values and the "
            "model's weights."
        )


class _Sample:
    """Of every group the rows with the smallest hash keys, at most ``bound / groups`` of each."""

    def __init__(self, bound: int, seed: int) -> None:
        self._bound, self._seed = bound, seed
        self._kept: dict[Label, list[tuple[NDArray[Any], ...]]] = {}
        self._threshold: dict[Label, float] = {}
        self.seen: dict[Label, list[float]] = {}  # [rows, Σw] of every group

    def add(self, batch: Batch, chosen: NDArray[np.bool_], features: Any, prediction: Any) -> None:
        weight = np.ones(len(chosen)) if batch.weight is None else batch.weight
        chosen = chosen & (weight > 0)
        key = row_key(batch.row_id, self._seed + 1)  # another hash than that of the split
        for code, label in enumerate(batch.labels):
            mine = chosen & (batch.codes == code)
            if not mine.any():
                continue
            count = self.seen.setdefault(label, [0.0, 0.0])
            count[0] += int(mine.sum())
            count[1] += float(weight[mine].sum())
            index = np.flatnonzero(mine & (key < self._threshold.get(label, 1.0)))
            part = (
                key[index],
                take_rows(features, index),
                take_rows(prediction, index).astype(np.float64),
                np.full(len(index), np.nan) if batch.y is None else batch.y[index],
                weight[index],
            )
            self._kept.setdefault(label, []).append(part)
            self._prune(label, slack=2)

    def _share(self) -> int:
        return max(self._bound // max(len(self.seen), 2), 1)

    def _prune(self, label: Label, *, slack: int) -> None:
        """Drop the largest keys when there are more than ``slack`` times the share of rows."""
        parts = self._kept[label]
        if sum(len(part[0]) for part in parts) <= slack * self._share():
            return
        merged = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(merged[0], kind="stable")[: self._share()]
        self._kept[label] = [tuple(column[order] for column in merged)]
        self._threshold[label] = float(merged[0][order[-1]])

    def rows(self, labels: tuple[Label, ...]) -> Rows:
        """The sample, in an order that does not depend on how the rows came."""
        blocks, codes = [], []
        for code, label in enumerate(labels):
            if label not in self._kept:
                continue
            self._prune(label, slack=1)
            parts = self._kept[label]
            key, features, prediction, y, weight = (np.concatenate(c) for c in zip(*parts, strict=True))
            order = np.argsort(key, kind="stable")
            scale = self.seen[label][1] / weight.sum()  # the sample stands for the whole group
            blocks.append((features[order], prediction[order], y[order], weight[order] * scale))
            codes.append(np.full(len(order), code, dtype=np.intp))
        if not blocks:
            empty = np.zeros(0)
            return Rows(np.zeros((0, 0)), empty, None, np.zeros(0, dtype=np.intp), empty)
        features, prediction, y, weight = (np.concatenate(c) for c in zip(*blocks, strict=True))
        return Rows(features, prediction, None if np.isnan(y).any() else y, np.concatenate(codes), weight)
