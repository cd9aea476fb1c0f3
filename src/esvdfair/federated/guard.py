"""What of a site's rows may leave it as moments, so that no person stands alone in them: by rules, or by noise.

Moments are sums of squares and products over people. Whoever looks for a person in them looks along a combination v of
the columns x = [1, h, y] (h inputs of the last layer, y the label): ``Σ(v·x)x`` is, up to a factor, the row of the one
who has nearly all of ``Σ(v·x)²``. The largest part that row i has of it, over all v, is its *leverage*
``xᵢᵀ(Σxxᵀ)⁺xᵢ``. A ReLU unit that is active for one person is the plainest case: the leverage is 1, and the
unit's row of the moments is the person's row.

What is told is: of everybody together, Σxxᵀ over the units that stay; of every group, its mean in these; and of every
group by itself, Σxxᵀ over fewer units, as many as the smallest group can bear. Beyond those, the groups' covariances
are told as if they were alike (:func:`_alike_beyond`), which says nothing of a group that the first two do not say.
Whoever wants the row of one person needs weights that single the person out, ``Σ cᵢxᵢ``: of everybody c can be any
combination of x and of the groups, in a group by itself any of its fewer columns, and there it gives no others. So:

- a unit is active in ``min_rows`` rows of a group, or in none;
- there are ``min_rows`` rows for each active unit: of everybody for those that stay, of the smallest group for those
  that are told of in every group by itself; the units that vary most come first;
- no row has a leverage above `MAX_LEVERAGE`, among everybody (with the groups as columns) or in its own group: rows
  that do are withheld, again and again until none is left, and if these would be more than `MAX_WITHHELD` of a group,
  fewer units stay.

Of units that do not stay only their common part of the output is told, ``Σ wⱼhⱼ``, one column for all of them, to which
the rules apply as well. Leaving out columns, and adding rows, only lowers a leverage; so rows may be judged in pieces,
as they stream, and what holds at each site holds for the sum of all. The reverse is not true: what the sum alone could
bear (under masks) no site can know from its own rows, and whoever could has seen the sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.optimize import brentq
from scipy.special import log_ndtr

from esvdfair.core.checks import Label, sort_key
from esvdfair.core.moments import GroupMoments
from esvdfair.distributed import all_gather, first_rank_rows
from esvdfair.exceptions import Given, InputError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

MIN_ROWS = 10
"""Fewest rows of a group, of a unit in which it is active, and for each active unit, unless asked otherwise."""

MAX_LEVERAGE = 0.5
"""Largest part of any sum of squares that one person may have."""

MAX_WITHHELD = 0.1
"""Largest part of a group's rows that may be withheld (two, in a small group); beyond it units are left out."""

AXES = 8
"""Directions of the last layer's inputs that moments with noise tell of; each costs as much noise as the others."""

FEWEST = 10.0
"""Rows that a group must seem to have after noise."""


# --- rules ---------------------------------------------------------------------------------------------------------


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
    """

    def __init__(self, weight: Array, min_rows: int) -> None:
        self._weight, self._min_rows = weight, min_rows
        self._order: NDArray[np.intp] | None = None  # units that vary most first
        self._kept = np.ones(len(weight), dtype=bool)
        self._waiting: dict[Label, list[Array]] = {}
        self._withheld = 0
        self._apart: int | None = None
        self._piece = max(2**24 // len(weight), 32 * len(weight))  # rows judged at once, of a size that memory can hold
        self._moments = GroupMoments()

    def update(self, rows: Array, labels: Sequence[Label], codes: NDArray[np.intp], weight: Array) -> None:
        """Add rows ``[h, y]``, or h alone without labels."""
        if not self._min_rows:
            self._moments.update_codes(rows, labels, codes, weight)
            return
        for code, label in enumerate(labels):
            mine = (codes == code) & (weight > 0)
            if mine.any():
                self._waiting.setdefault(label, []).append(np.column_stack([weight[mine], rows[mine]]))
        if sum(len(part) for parts in self._waiting.values() for part in parts) >= 2 * self._piece:
            whole = {label: np.concatenate(parts) for label, parts in self._waiting.items()}
            # Half of each group that is large: what is left is never a small piece.
            cuts = {label: len(part) // 2 for label, part in whole.items() if len(part) >= self._piece // 2}
            self._release({label: whole[label][:cut] for label, cut in cuts.items()})
            self._waiting = {label: [part[cuts.get(label, 0) :]] for label, part in whole.items()}

    def finish(self) -> tuple[GroupMoments, tuple[int, ...], int, int | None]:
        """Moments of all ranks, units that must not stay in them, how many rows were withheld, and ``Site.apart``."""
        widths = {label: parts[0].shape[1] for label, parts in self._waiting.items()}
        widths = {label: width for own in all_gather(widths) for label, width in own.items()}
        waiting = {
            label: first_rank_rows(np.concatenate([np.zeros((0, widths[label])), *self._waiting.get(label, [])]))
            for label in sorted(widths, key=sort_key)
        }
        self._release({label: rows for label, rows in waiting.items() if len(rows)})
        kept, withheld, apart = zip(*all_gather((self._kept, self._withheld, self._apart)), strict=True)
        left_out = tuple(np.flatnonzero(~np.logical_and.reduce(kept)).tolist())
        fewest = min((count for count in apart if count is not None), default=None)
        return self._moments.all_reduce(), left_out, sum(withheld), fewest

    def _release(self, groups: Mapping[Label, Array]) -> None:
        """Add rows (weight, h, y) of groups to the moments, as far as the rules let them be told of."""
        if not groups:
            return
        labels, sizes = tuple(groups), [len(rows) for rows in groups.values()]
        if min(sizes) < self._min_rows:
            raise InputError(
                "a group has fewer rows than {min_rows}: {label!r} has {rows}. Moments of so few people tell much "
                "about each of them, and those of a single person are that person's row. Leave these people out or "
                "join groups, here and at the other sites.",
                min_rows=Given(self._min_rows),
                label=labels[int(np.argmin(sizes))],
                rows=min(sizes),
            )
        whole, codes = np.concatenate(list(groups.values())), np.repeat(np.arange(len(labels)), sizes)
        weight, rows = whole[:, 0], whole[:, 1:]
        self._kept, apart, stays = self._judge(labels, rows, codes, weight)
        self._withheld += int((~stays).sum())
        moments = GroupMoments().update_codes(rows[stays], labels, codes[stays], weight[stays])
        if (apart != self._kept).any():
            self._apart = min(int(apart.sum()), len(apart) if self._apart is None else self._apart)
            moments = _alike_beyond(moments, self._told(np.eye(moments.width), apart).T)
        self._moments.merge(moments)

    def _judge(
        self, labels: Sequence[Label], rows: Array, codes: NDArray[np.intp], weight: Array
    ) -> tuple[Flags, Flags, Flags]:
        """Which units may stay, which of them in every group apart, and which rows."""
        h, sizes = rows[:, : len(self._weight)], np.bincount(codes)
        if self._order is None:
            self._order = np.argsort(-h.std(axis=0), kind="stable")
        room = [len(rows) // self._min_rows, int(sizes.min()) // self._min_rows]  # for units of everybody, of a group
        while True:
            kept = self._known_to_many(h, codes, self._kept, room[0])
            apart = self._known_to_many(h, codes, kept, min(room))
            stays, alone = self._not_alone(rows, codes, weight, kept, apart)
            left = np.bincount(codes[stays], minlength=len(labels))
            few = left < np.maximum(np.minimum(sizes * (1 - MAX_WITHHELD), sizes - 2), self._min_rows)
            if not few.any():
                kept = self._known_to_many(h[stays], codes[stays], kept, room[0])
                return kept, self._known_to_many(h[stays], codes[stays], kept, min(room)), stays
            if not any(room):
                raise InputError(
                    "in the group {label!r} {alone} of {rows} rows stand alone: each has more than {bound:.0%} of some "
                    "sum of squares, even of the outputs and labels alone, so their moments would tell who they are. "
                    "Bring more rows, join groups, or leave out extreme rows.",
                    label=labels[int(np.argmax(few))],
                    alone=int((sizes - left)[np.argmax(few)]),
                    rows=int(sizes[np.argmax(few)]),
                    bound=MAX_LEVERAGE,
                )
            narrow = alone if room[alone] else 1 - alone
            room[narrow] = room[narrow] * 3 // 4

    def _known_to_many(self, h: Array, codes: NDArray[np.intp], kept: Flags, room: int) -> Flags:
        """Of the units that are kept at most ``room``, active in enough rows of every group or in none."""
        groups = [codes == code for code in range(int(codes.max()) + 1)]

        def few(values: Array) -> Flags:
            active = np.array([np.count_nonzero(values[mine], axis=0) for mine in groups])
            return np.asarray(((active > 0) & (active < self._min_rows)).any(axis=0))

        kept = kept & ~few(h)
        assert self._order is not None
        there = [j for j in self._order if kept[j] and h[:, j].any()]
        kept[there[room:]] = False
        there = there[:room]
        while few((h[:, ~kept] @ self._weight[~kept])[:, None]).any():
            if not there:
                raise ValueError(
                    "the last layer's inputs are zero for all rows of a group but a few, so its moments would be "
                    "theirs; check the model on these rows."
                )
            kept[there.pop()] = False  # what is told of the others together must not be of few rows either
        return kept

    def _not_alone(
        self, rows: Array, codes: NDArray[np.intp], weight: Array, kept: Flags, apart: Flags
    ) -> tuple[Flags, int]:
        """Rows that are left when those of too large a leverage are withheld until there are none, or far too many.

        And which leverage withheld more: 0 that among everybody, 1 that in the own group.
        """
        groups = np.arange(int(codes.max()) + 1) == codes[:, None]
        everybody, own = (np.column_stack([groups, self._told(rows, units)]) for units in (kept, apart))
        stays, withheld = np.ones(len(rows), dtype=bool), np.zeros(2, dtype=int)
        while stays.sum() >= (1 - 2 * MAX_WITHHELD) * len(rows):
            alone = np.zeros((2, len(rows)), dtype=bool)
            alone[0, stays] = leverages(everybody[stays], weight[stays]) > MAX_LEVERAGE
            for mine in groups.T:
                alone[1, stays & mine] = leverages(own[stays & mine], weight[stays & mine]) > MAX_LEVERAGE
            if not alone.any():
                break
            withheld += alone.sum(axis=1)
            stays &= ~alone.any(axis=0)
        return stays, int(np.argmax(withheld))

    def _told(self, rows: Array, units: Flags) -> Array:
        """What is told of rows ``[h, y]``: the units, the common part of the others, and y."""
        h, y = rows[:, : len(units)], rows[:, len(units) :]
        return np.column_stack([h[:, units], h[:, ~units] @ self._weight[~units], y])


def _alike_beyond(moments: GroupMoments, told: Array) -> GroupMoments:
    """The moments, every group being told of by itself in ``told · x`` alone, told (k, n).

    With W the scatter within all groups, ``T = W toldᵀ(told W toldᵀ)⁺told`` regresses all columns on these. A group's
    scatter S becomes ``T S Tᵀ + share · (W − T W)``: its own along them, and beyond as if what they leave open were
    alike in all groups. The sum over the groups stays W.
    """
    within = moments.scatters.sum(axis=0)
    inner = told @ within @ told.T
    scale = np.sqrt(np.maximum(np.diag(inner), np.finfo(np.float64).tiny))
    inverse = np.linalg.pinv(inner / np.outer(scale, scale), rcond=1e-12, hermitian=True) / np.outer(scale, scale)
    onto = within @ told.T @ inverse @ told
    share = moments.counts / moments.counts.sum()
    scatters = onto @ moments.scatters @ onto.T + share[:, None, None] * (within - onto @ within)
    return moments.replaced(moments.means, (scatters + scatters.transpose(0, 2, 1)) / 2)


def read_alone(moments: GroupMoments) -> dict[Label, Array]:
    """Rows (k, n) that anybody can read from the moments of a group: what the rules are there to stop.

    A column c that is non-zero for one person shows itself, ``Σc² = (Σc)²/w``, and ``Σcx / Σc`` is then the person's
    row. Taken off the moments, the next one may show.
    """
    found = {}
    for g, label in enumerate(moments.labels):
        weight = moments.counts[g] / moments.rows[g]  # of one row, as far as one can tell
        second, rows = second_moments(moments, g), np.zeros((0, moments.width))
        floor = 1e-9 * np.diag(second)[1:]
        while len(rows) <= len(second):
            total, squares = second[0, 1:], np.diag(second)[1:]
            alone = (squares > floor) & (np.abs(total**2 - squares * weight) < 1e-6 * squares * weight)
            if not alone.any():
                break
            column = 1 + int(np.argmax(alone))
            row = second[column] / second[0, column]
            rows = np.vstack([rows, row[1:]])
            second -= weight * np.outer(row, row)
        found[label] = rows
    return found


def second_moments(moments: GroupMoments, g: int) -> Array:
    """``Σ w x xᵀ`` of the rows x = [1, h, y] of group number g."""
    x = np.append(1.0, moments.means[g])
    second: Array = moments.counts[g] * np.outer(x, x)
    second[1:, 1:] += moments.scatters[g]
    return second


# --- noise ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The Gaussian mechanism that a collection went through: it hardly matters whether one person is among the rows.

    Noise must be as large as the most that one person can change, so it needs bounds, and bounds may not come from the
    rows that they protect. They come from *public* rows (:class:`Frame`), which some site or the owner of the model may
    show. One person more or less then changes ``Σxxᵀ``, over all groups, by at most 1 in the Frobenius norm. Noise of
    standard deviation σ on its diagonal and σ/√2 on each entry beside it is then (ε, δ)-private, by the calibration of
    Balle and Wang (2018). Counts and means are in Σxxᵀ too: all numbers in the file have noise. Which groups there are
    is not protected, and *replacing* a person is a change of up to √2, not 1.

    Where only the sum of m sites is ever seen (:mod:`.merge`), they add the noise together: each adds the part ``2/m``
    of its variance, so that the sum has at least all of it as long as half of the sites keep what they added to
    themselves.

    Attributes
    ----------
    epsilon, delta : what it guarantees, for one person more or less
    sigma : standard deviation of the noise, for a sum that one person changes by 1 at most
    axes : directions of the layer's inputs that the moments tell of
    sites : how many add it together under masks; moments of one of them have a part of it only
    """

    epsilon: float
    delta: float
    sigma: float
    axes: int
    sites: int = 1

    @property
    def own(self) -> float:
        """Standard deviation of what one site adds."""
        return self.sigma * math.sqrt(min(1.0, 2 / self.sites))


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Smallest σ for which noise N(0, σ²) on a sum that one person changes by at most 1 is (ε, δ)-private.

    It is the root of ``Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) = δ`` (Balle and Wang 2018, theorem 8).

    Examples
    --------
    >>> round(gaussian_sigma(1.0, 1e-5), 3)
    3.731
    """

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        near, far = (float(log_ndtr(sign / (2 * sigma) - epsilon * sigma)) for sign in (1, -1))
        return math.exp(near) - math.exp(epsilon + far) - delta

    return math.exp(brentq(excess, math.log(1e-3), math.log(1e8), xtol=1e-12))


@dataclass(frozen=True)
class Frame:
    """How public rows bound and measure others.

    By their mean, the direction of the output and their largest principal axes (K in all), their spread along these,
    their range of labels. With z the coordinates along the axes, divided by the spread, rows are seen as
    ``x = (1, z/R, y')/√3``, clipped to ``‖z‖ ≤ R`` and ``|y'| ≤ 1`` (without labels (1, z/R)/√2): nobody's x is longer
    than 1.
    """

    centre: Array  # (p,) c
    axes: Array  # (K, p) orthonormal, the first along the weights of the layer
    reach: Array  # (K,) R times the spread along each axis: z/R are the coordinates of h − c divided by it
    middle: float | None  # of the range of labels; None without labels
    half: float

    @classmethod
    def of(cls, batches: Sequence[Array], weight: Array, *, labelled: bool, axes: int = AXES) -> "Frame":
        """From public rows ``[h, y]``."""
        rows = np.concatenate(batches)
        p = len(weight)
        centre = rows[:, :p].mean(axis=0)
        h = rows[:, :p] - centre
        first = weight / (np.linalg.norm(weight) or 1.0)
        _, _, others = np.linalg.svd(h - np.outer(h @ first, first), full_matrices=False)
        found = np.vstack([first, others[: axes - 1]])
        spread = (h @ found.T).std(axis=0)
        live = spread > 1e-6 * spread.max()
        if len(rows) < 10 * axes or not live[0]:
            raise InputError(
                "{public} has {rows} rows, on which the model's outputs vary by {spread:.3g}; give {needed} or more "
                "that differ, of the same kind as the others.",
                public=Given(),
                rows=len(rows),
                spread=spread[0],
                needed=10 * axes,
            )
        found, spread = found[live], spread[live]
        radius = float(np.quantile(np.linalg.norm(h @ found.T / spread, axis=1), 0.95))  # the others are clipped
        low, high = (float(rows[:, -1].min()), float(rows[:, -1].max())) if labelled else (0.0, 0.0)
        return cls(centre, found, radius * spread, (low + high) / 2 if labelled else None, (high - low) / 2 or 1.0)

    def seen(self, rows: Array) -> Array:
        """(rows, K) clipped z/R, and beside it y' where there are labels."""
        z = (rows[:, : len(self.centre)] - self.centre) @ self.axes.T / self.reach
        z = z / np.maximum(np.linalg.norm(z, axis=1), 1.0)[:, None]
        if self.middle is None:
            return np.asarray(z)
        return np.column_stack([z, np.clip((rows[:, -1] - self.middle) / self.half, -1.0, 1.0)])

    def told(self, moments: GroupMoments) -> GroupMoments:
        """Moments of what is seen as moments of ``[h, y]``: directions beside the axes are as in the centre."""
        back, shift = self.axes.T * self.reach, self.centre
        if self.middle is not None:
            back = block_diag(back, np.full((1, 1), self.half))
            shift = np.append(shift, self.middle)
        found = moments.mapped(back)
        return found.replaced(found.means + shift, found.scatters)


def make_noise(epsilon: float, delta: float, *, axes: int, sites: int = 1) -> Noise:
    """The mechanism for these parameters, checked."""
    if not (0 < epsilon <= 100 and 1e-12 <= delta < 0.5 and sites >= 1):
        raise InputError(
            "{epsilon} and {delta}: expected an epsilon above 0 and up to 100 and a delta from 1e-12 to 0.5, far below "
            "one over the number of people.",
            epsilon=Given(epsilon),
            delta=Given(delta),
        )
    return Noise(float(epsilon), float(delta), gaussian_sigma(epsilon, delta), axes, sites)


def add_noise(moments: GroupMoments, noise: Noise, *, labelled: bool, random: np.random.Generator) -> GroupMoments:
    """Moments of what a frame has seen, with noise on all their sums.

    Raises
    ------
    ValueError
        A group seems to have fewer than `FEWEST` rows after noise.
    """
    parts, found = 2 + labelled, []
    for g, label in enumerate(moments.labels):
        second = second_moments(moments, g)
        drawn = random.normal(scale=noise.own, size=second.shape)
        # On Σxxᵀ of rows x = (1, z/R, y')/√parts: σ on the diagonal and σ/√2 beside it, σ in the Frobenius norm.
        second += parts * (drawn + drawn.T) / 2
        count, mean = float(second[0, 0]), second[0, 1:] / second[0, 0]
        if count < FEWEST:
            raise InputError(
                "with {epsilon} the noise hides the group {label!r}: it seems to have {count:.0f} rows. Join groups, "
                "or allow a larger epsilon.",
                epsilon=Given(noise.epsilon),
                label=label,
                count=count,
            )
        found.append((label, round(count), count, count, mean, second[1:, 1:] - count * np.outer(mean, mean)))
    return GroupMoments.from_arrays(*map(list, zip(*found, strict=True)))
