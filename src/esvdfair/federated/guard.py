"""What of a site's rows may leave it as moments, so that no person stands alone in them.

Moments are sums of squares and products over people. Whoever looks for a person in them looks along a combination v of
the columns x = [1, h, y] (h inputs of the last layer, y the label): ``Σ(v·x)x`` is, up to a factor, the row of the one
who has nearly all of ``Σ(v·x)²``. The largest part that row i has of it, over all v, is its *leverage*
``xᵢᵀ(Σxxᵀ)⁺xᵢ``. A ReLU unit that is active for one person is the plainest case: the leverage is 1, and the
unit's row of the moments is the person's row.

So three rules hold in every group, before anything is written:

- a unit is active in ``min_rows`` rows, or in none;
- there are ``min_rows`` rows for each unit that is active; those that vary most stay;
- no row has a leverage above `MAX_LEVERAGE`: rows that do are withheld, again and again until none is left, and if
  these would be more than `MAX_WITHHELD` of a group, fewer units stay.

Of units that do not stay only their common part of the output is told, ``Σ wⱼhⱼ``, one column for all of them, to which
the rules apply as well. Leaving out columns, and adding rows, only lowers a leverage; so rows may be judged in pieces,
as they stream, and what holds at each site holds for the sum of all.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label, sort_key
from esvdfair.core.moments import GroupMoments
from esvdfair.distributed import all_gather, first_rank_rows
from esvdfair.exceptions import Given, InputError

Array = NDArray[np.float64]

MIN_ROWS = 10
"""Fewest rows of a group, of a unit in which it is active, and for each active unit, unless asked otherwise."""

MAX_LEVERAGE = 0.5
"""Largest part of any sum of squares that one person may have."""

MAX_WITHHELD = 0.1
"""Largest part of a group's rows that may be withheld (two, in a small group); beyond it units are left out."""


def leverages(x: Array, weight: Array) -> Array:
    """(rows,) ``wᵢ xᵢᵀ(Σ w x xᵀ)⁺xᵢ`` of the rows of x: the largest part that each has of any sum of squares."""
    x = x * np.sqrt(weight)[:, None]
    norms = np.linalg.norm(x, axis=0)
    x = x[:, norms > 0] / norms[norms > 0]
    values, axes = np.linalg.eigh(x.T @ x)
    live = values > 8 * len(values) * np.finfo(np.float64).eps * values.max(initial=0.0)
    whitened = x @ (axes[:, live] / np.sqrt(values[live]))
    found: Array = np.einsum("ij,ij->i", whitened, whitened)
    return found


class Guard:
    """Moments of ``[h, y]`` of the rows that may be told of, as they stream.

    Parameters
    ----------
    weight : (p,) of the last layer
    min_rows : see the rules above; 0 is for no rule, and all rows are released as they come

    Attributes
    ----------
    moments : of the rows that were released, all units still in them; :meth:`finish` says which must go
    """

    def __init__(self, weight: Array, min_rows: int) -> None:
        self._weight, self._min_rows = weight, min_rows
        self._order: NDArray[np.intp] | None = None  # units that vary most first
        self._kept = np.ones(len(weight), dtype=bool)
        self._waiting: dict[Label, list[Array]] = {}
        self._withheld = 0
        # so many rows of a group are judged at once: enough for all units to stay, of a size that memory can hold
        self._piece = max(2**24 // len(weight), 16 * len(weight))
        self.moments = GroupMoments()

    def update(self, rows: Array, labels: Sequence[Label], codes: NDArray[np.intp], weight: Array) -> None:
        """Add rows ``[h, y]``, or h alone without labels."""
        if not self._min_rows:
            self.moments.update_codes(rows, labels, codes, weight)
            return
        for code, label in enumerate(labels):
            mine = (codes == code) & (weight > 0)
            if mine.any():
                waiting = self._waiting.setdefault(label, [])
                waiting.append(np.column_stack([weight[mine], rows[mine]]))
                while sum(map(len, waiting)) >= 2 * self._piece:  # what is left is never a small piece
                    all_of_it = np.concatenate(waiting)
                    self._release(label, all_of_it[: self._piece])
                    waiting[:] = [all_of_it[self._piece :]]

    def finish(self) -> tuple[GroupMoments, tuple[int, ...], int]:
        """Moments of all ranks, the units that must not stay in them, and how many rows were withheld."""
        widths = {label: parts[0].shape[1] for label, parts in self._waiting.items()}
        widths = {label: width for own in all_gather(widths) for label, width in own.items()}
        for label in sorted(widths, key=sort_key):
            rows = first_rank_rows(np.concatenate([np.zeros((0, widths[label])), *self._waiting.get(label, [])]))
            if len(rows):
                self._release(label, rows)
        found = all_gather((self._kept, self._withheld))
        kept = np.logical_and.reduce([kept for kept, _ in found])
        return self.moments.all_reduce(), tuple(np.flatnonzero(~kept).tolist()), sum(count for _, count in found)

    def _release(self, label: Label, rows: Array) -> None:
        weight, rows = rows[:, 0], rows[:, 1:]
        if len(rows) < self._min_rows:
            raise InputError(
                "a group has fewer rows than {min_rows}: {label!r} has {rows}. Moments of so few people tell much "
                "about each of them, and those of a single person are that person's row. Leave these people out or "
                "join groups, here and at the other sites.",
                min_rows=Given(self._min_rows),
                label=label,
                rows=len(rows),
            )
        self._kept, stays = self._judge(label, rows, weight)
        self._withheld += int((~stays).sum())
        codes = np.zeros(int(stays.sum()), dtype=np.intp)
        self.moments.update_codes(rows[stays], (label,), codes, weight[stays])

    def _judge(self, label: Label, rows: Array, weight: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which units and which rows may stay."""
        h = rows[:, : len(self._weight)]
        if self._order is None:
            self._order = np.argsort(-h.std(axis=0), kind="stable")
        kept, room = self._kept.copy(), len(rows) // self._min_rows
        while True:
            kept = self._known_to_many(h, kept, room)
            stays = self._not_alone(rows, weight, kept)
            if stays.sum() >= max(_fewest_left(len(rows)), self._min_rows):
                return self._known_to_many(h[stays], kept, room), stays
            if not room:
                raise InputError(
                    "in the group {label!r} {alone} of {rows} rows stand alone: each has more than {bound:.0%} of some "
                    "sum of squares, even of the outputs and labels alone, so their moments would tell who they are. "
                    "Bring more rows, join groups, or leave out extreme rows.",
                    label=label,
                    alone=int((~stays).sum()),
                    rows=len(rows),
                    bound=MAX_LEVERAGE,
                )
            room = room * 3 // 4

    def _known_to_many(self, h: Array, kept: NDArray[np.bool_], room: int) -> NDArray[np.bool_]:
        """Of the units that are kept those that are active in enough rows or in none; at most ``room`` active ones."""
        active = (h != 0).sum(axis=0)
        kept = kept & ((active == 0) | (active >= self._min_rows))
        assert self._order is not None
        there = [j for j in self._order if kept[j] and active[j]]
        kept[there[room:]] = False
        there = there[:room]
        while there and 0 < np.count_nonzero(h[:, ~kept] @ self._weight[~kept]) < self._min_rows:
            kept[there.pop()] = False  # what is told of the others together must not be of few rows either
        if not there and 0 < np.count_nonzero(h @ self._weight) < self._min_rows:
            raise ValueError(
                "the last layer's inputs are zero for all rows of a group but a few, so its moments would be theirs; "
                "check the model on these rows."
            )
        return kept

    def _not_alone(self, rows: Array, weight: Array, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows that are left when those of too large a leverage are withheld, until there are none."""
        p = len(kept)
        rest = rows[:, :p][:, ~kept] @ self._weight[~kept]
        told = np.column_stack([np.ones(len(rows)), rows[:, :p][:, kept], rest, rows[:, p:]])
        stays = np.ones(len(rows), dtype=bool)
        while stays.any():
            alone = leverages(told[stays], weight[stays]) > MAX_LEVERAGE
            if not alone.any():
                break
            stays[np.flatnonzero(stays)[alone]] = False
            if stays.sum() < _fewest_left(len(rows)):
                break  # too many already
        return stays


def _fewest_left(rows: int) -> float:
    """How many of so many rows must be left when some are withheld."""
    return rows - max(MAX_WITHHELD * rows, 2)
