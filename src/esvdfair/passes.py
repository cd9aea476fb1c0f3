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
from esvdfair.core.checks import Label, count_not_finite, sort_key, take_rows
from esvdfair.core.moments import GroupMoments
from esvdfair.distributed import all_gather, all_rows, rank, reading, together, world_size
from esvdfair.models.protocol import LinearLayer, ModelAdapter
from esvdfair.shards import gather_labelled

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
    inner_moments : of the inputs of a hidden layer over the training rows, when one was asked for; then ``moments`` is
        empty and the samples hold no features
    """

    labels: tuple[Label, ...]
    moments: GroupMoments
    training: Rows
    heldout: Rows
    inner_moments: GroupMoments


@together()
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
    inner : a hidden layer whose input moments are gathered instead; the samples are then without features
    training_rows, heldout_rows : bounds of the samples, shared equally by the groups
    """
    moments, inner_moments = GroupMoments(), GroupMoments()
    name = layer.name if inner is None else inner.name
    training, heldout = _Sample(training_rows, seed), _Sample(heldout_rows, seed)
    rows, labelled = 0, False
    with reading() as listen:
        for batch in batches:
            inputs, prediction = adapter.capture(batch.x, [name])
            _check_prediction(prediction, len(batch.codes))
            out = np.zeros(len(batch.codes), dtype=bool) if split is None else split(batch.row_id)
            weight = (~out).astype(np.float64) if batch.weight is None else batch.weight * ~out
            if inner is None:
                features = inputs[name]
                _check_features(layer, features, len(batch.codes))
                moments.update_codes(features, batch.labels, batch.codes, weight, beside=batch.y)
            else:
                features = np.zeros((len(batch.codes), 0))
                inner_moments.update_codes(inputs[name], batch.labels, batch.codes, weight)
            training.add(batch, ~out, features, prediction)
            heldout.add(batch, out, features, prediction)
            rows, labelled = rows + len(batch.codes), batch.y is not None
            listen()
    gather_labelled(labelled if rows else None)
    for sample in (training, heldout):
        sample.count_all_ranks()
    labels = tuple(sorted(set(training.seen) | set(heldout.seen), key=sort_key))
    return Pass(labels, moments.all_reduce(), training.rows(labels), heldout.rows(labels), inner_moments.all_reduce())


def _check_features(layer: LinearLayer, features: Any, rows: int) -> None:
    if features.ndim != 2 or features.shape[0] != rows:
        raise ValueError(
            f"the last linear layer {layer.name!r} takes inputs of shape {tuple(features.shape)} for {rows} rows; "
            "a repair of the output needs one feature vector for each row."
        )


def _check_prediction(prediction: Any, rows: int) -> None:
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
        self._kept: dict[Label, _Kept] = {}
        self._like: NDArray[Any] = np.zeros((0, 0))  # no rows, of the dtype and width of the features of all ranks
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
            kept = self._kept.setdefault(label, _Kept())
            index = np.flatnonzero(mine & (key < kept.threshold))
            kept.add(
                key[index],
                take_rows(features, index),
                take_rows(prediction, index).astype(np.float64),
                np.full(len(index), np.nan) if batch.y is None else batch.y[index],
                weight[index],
            )
            kept.prune(self._share())

    def _share(self) -> int:
        return max(self._bound // max(len(self.seen), 2), 1)

    def count_all_ranks(self) -> None:
        """Add up what the ranks have seen, so that all of them know every group and its share."""
        own = [kept.columns[1][:0] for kept in self._kept.values()]
        described = all_gather((self.seen, own[:1] and [own[0].astype(np.result_type(*own))]))
        alike = [features for _, kind in described for features in kind]
        self._like = alike[0].astype(np.result_type(*alike)) if alike else np.zeros((0, 0))
        self.seen = {}
        for seen, _ in described:
            for label, (rows, weight) in seen.items():
                count = self.seen.setdefault(label, [0.0, 0.0])
                count[0] += rows
                count[1] += weight

    def rows(self, labels: tuple[Label, ...]) -> Rows:
        """The sample, in an order that does not depend on how the rows came, nor to which rank."""
        parts = [(code, self._kept[label].columns) for code, label in enumerate(labels) if label in self._kept]
        code = np.repeat([code for code, _ in parts], [len(part[0]) for _, part in parts]).astype(np.intp)
        key = np.concatenate([np.zeros(0), *(part[0] for _, part in parts)])
        chosen = self._smallest(all_rows(code), all_rows(key))
        first = sum(all_gather(len(code))[: rank()])
        own = np.flatnonzero(chosen[first : first + len(code)])
        own = own[np.lexsort((key[own], code[own]))]
        # Only rows that stay in the sample leave their rank; each is copied once, to where it belongs.
        empty = (self._like, np.zeros(0), np.zeros(0), np.zeros(0))  # what a rank without rows has
        columns = (_pick([part[i] for _, part in parts], none, own) for i, none in enumerate(empty, 1))
        code, key, features, prediction, y, weight = map(all_rows, (code[own], key[own], *columns))
        order = np.lexsort((key, code))
        if world_size() > 1:
            features = features[order]  # of one rank it is in order already
        code, weight, y = code[order], weight[order], y[order]
        for group in np.unique(code):
            mine = code == group
            weight[mine] *= self.seen[labels[group]][1] / weight[mine].sum()  # the sample stands for the whole group
        return Rows(features, prediction[order], None if np.isnan(y).any() or not len(y) else y, code, weight)

    def _smallest(self, code: NDArray[np.intp], key: Array) -> NDArray[np.bool_]:
        """Which rows are among the smallest keys of their group."""
        order = np.lexsort((key, code))
        start = np.searchsorted(code[order], code[order])
        chosen = np.empty(len(code), dtype=bool)
        chosen[order] = np.arange(len(code)) - start < self._share()
        return chosen


class _Kept:
    """Rows of one group, in arrays with room to spare.

    One array for each part of a batch that stays would leave holes between the large arrays that come and go, and the
    process would grow with the number of rows though it holds no more of them.
    """

    def __init__(self) -> None:
        self._room: list[NDArray[Any]] = []
        self._size = 0
        self.threshold = 1.0  # rows with a larger key cannot be among the smallest any more

    @property
    def columns(self) -> list[NDArray[Any]]:
        """Keys first, then what was added beside them."""
        return [column[: self._size] for column in self._room]

    def add(self, *columns: NDArray[Any]) -> None:
        """Copy rows in: their keys, then anything else that has as many rows."""
        end = self._size + len(columns[0])
        if not self._room:
            self._room = [column[:0] for column in columns]
        for i, (room, column) in enumerate(zip(self._room, columns, strict=True)):
            dtype = np.result_type(room, column)
            if end > len(room) or dtype != room.dtype:
                wider = np.empty((max(end, 2 * len(room)), *column.shape[1:]), dtype=dtype)
                wider[: self._size] = room[: self._size]
                self._room[i] = wider
            self._room[i][self._size : end] = column
        self._size = end

    def prune(self, share: int) -> None:
        """Drop the largest keys when there are a quarter more rows than ``share``."""
        if self._size <= 1.25 * share:
            return
        order = np.argsort(self._room[0][: self._size], kind="stable")[:share]
        for column in self._room:
            column[:share] = column[order]
        self._size = share
        self.threshold = float(self._room[0][share - 1])


def _pick(parts: list[NDArray[Any]], none: NDArray[Any], index: NDArray[np.intp]) -> NDArray[Any]:
    """Rows of the parts, taken as one below the other; ``none`` has no rows, and the dtype and width of all."""
    picked = np.empty((len(index), *none.shape[1:]), dtype=none.dtype)
    start = 0
    for part in parts:
        mine = np.flatnonzero((index >= start) & (index < start + len(part)))
        picked[mine] = part[index[mine] - start]
        start += len(part)
    return picked
