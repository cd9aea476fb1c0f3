"""What follows the last linear layers of a model, laid open, and the `Readout` that it shows when values are tried."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import row_count
from esvdfair.core.quadratic import KINDS, Head
from esvdfair.models.heads import find_head, probe_points, spacing
from esvdfair.models.readouts import Part, Readout

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Section:
    """Columns of `Tail.output` that belong to one layer: (positions, outputs) of each row."""

    layer: str
    positions: int
    outputs: int
    members: bool = False  # whether each position has weights of its own


@dataclass(frozen=True)
class Tail:
    """What follows the last linear layers of a model, laid open."""

    layer: str  # name of the last linear layer, or "a + b" of several
    rows: Any  # the rows that were looked at
    output: NDArray[Any]  # (rows, ...) what the layer gives for them; of several layers (rows, M), side by side
    # Takes outputs z (n, ...) to `(z, prediction)`: z as the model's arithmetic holds it, and what the model makes of
    # it, with rows of the batch repeated as needed.
    run: Callable[[Array], tuple[NDArray[Any], NDArray[Any]]]
    operation: str  # what stands between the two, by name
    kinds: Sequence[str] = KINDS  # of head that this can be
    joined: str | None = None  # first operation that brings in something else which depends on the input
    eps: float | None = None  # relative spacing of the model's arithmetic, where the dtype of the arrays does not tell
    sections: tuple[Section, ...] = ()  # of several layers
    # Derivatives (n, M) of the predictions in the outputs, None where the framework has none.
    slopes: Callable[[Array], Array | None] | None = None

    @property
    def flat(self) -> Array:
        """(rows, M) all outputs of a row."""
        return np.asarray(self.output, dtype=np.float64).reshape(row_count(self.rows), -1)

    @property
    def parts(self) -> tuple[Section, ...]:
        """The sections, of which a single layer has one."""
        outputs = int(self.output.shape[-1]) if self.output.ndim > 1 else 1
        return self.sections or (Section(self.layer, self.flat.shape[1] // outputs, outputs),)

    def at(self, flat: Array) -> tuple[Array, NDArray[Any]]:
        """`run` on flat outputs (n, M)."""
        z, prediction = self.run(flat.reshape(-1, *self.output.shape[1:]))
        return np.asarray(z, dtype=np.float64).reshape(len(flat), -1), prediction


@dataclass(frozen=True)
class Line:
    """A way through the outputs of the last layers along which the value before the head takes any number."""

    tail: Tail
    coefficients: Array  # (M,) of the value before the head; of positions that differ between rows, on average
    moved: NDArray[np.intp]  # columns that are set, all to the same
    unit: float  # what they are set to for a value of 1

    @classmethod
    def of(cls, tail: Tail, readout: Readout) -> "Line":
        """Along the output with the largest factor."""
        coefficients, steepest = np.zeros(tail.flat.shape[1]), (0.0, np.zeros(0, dtype=np.intp))
        for columns, part, factor in _columns(tail, readout):
            places = np.array(part.positions or (1 / len(columns),) * len(columns))
            coefficients[columns] += factor * places
            moved = columns if part.positions is None else columns[[int(np.argmax(np.abs(places)))]]
            size = float(abs(coefficients[moved].sum()))
            steepest = (size, moved) if size > steepest[0] * (1 + 1e-9) else steepest
        return cls(tail, coefficients, steepest[1], 1 / float(coefficients[steepest[1]].sum()))

    def run(self, points: Array) -> tuple[Array, NDArray[Any]]:
        """Values before the head as the model's arithmetic holds them, and predictions, at some points."""
        z, prediction = self.tail.at(self.outputs(points))
        return self.read(z), prediction

    def read(self, flat: Array) -> Array:
        """(n,) values before the head of outputs (n, M)."""
        used = np.flatnonzero(self.coefficients)
        return np.asarray(flat[:, used] @ self.coefficients[used])

    def outputs(self, points: Array) -> Array:
        """Outputs (n, M) that read as `points`, in columns that are not read as the rows have them."""
        like = self.tail.flat
        flat = like[np.arange(len(points)) % len(like)]
        flat[:, self.coefficients != 0] = 0
        flat[:, self.moved] = (points * self.unit)[:, None]
        return flat


def _columns(tail: Tail, readout: Readout) -> Iterator[tuple[NDArray[np.intp], Part, float]]:
    """Columns of an output of a layer, one for each position, and what is read of it."""
    start = 0
    for section in tail.parts:
        for part in (part for part in readout.parts if part.layer == section.layer):
            for output, factor in zip(part.outputs, part.factors, strict=True):
                yield start + np.arange(section.positions) * section.outputs + output, part, factor
        start += section.positions * section.outputs


# --- finding it -------------------------------------------------------------------------------------------------------

_POINTS = 32  # outputs at which derivatives are compared
_MOST = 0.8  # of the points; at others a head is nearly flat, and derivatives are rounding
_MOST_COLUMNS = 256  # that are moved one by one where there are no derivatives


def find_readout(tail: Tail) -> Readout | None:
    """What of the last layers the prediction depends on, if it is a weighted sum; None if it is not."""
    if tail.flat.shape[1] == 1:
        return Readout((Part(tail.parts[0].layer),))
    like = tail.flat
    usual = like[np.arange(_POINTS) % len(like)]
    noise = np.random.default_rng(0).normal(size=usual.shape) * max(float(np.std(usual)), 1e-3)
    points = (usual, usual + noise)  # of the same rows: a maximum is a sum too, where one always wins
    eps = tail.eps or spacing(*tail.at(usual[:2]))
    slopes = [found for z in points if tail.slopes is not None and (found := tail.slopes(z)) is not None]
    pooled = len(slopes) == len(points)
    if not pooled:
        slopes = [found for z in points if (found := _ratios(tail, z)) is not None]
    if len(slopes) < len(points):
        return None
    parts = _parts_of(tail, np.concatenate(slopes), pooled, max(1e-3, 64 * eps), eps)
    if parts is None:
        return None
    moving = any(part.positions is None for part in parts)
    return Readout(tuple(part for part in parts if part.outputs), _steepest(tail, like) if moving else 0.0)


FEWEST_ROWS = 8
"""That tell an offset from a factor, or from anything else that a model may bring in."""


def find_offset(tail: Tail, readout: Readout, tail_of: Callable[[NDArray[np.intp]], Tail]) -> Head | None:
    """The head that follows the sum of the last layers and an offset that depends on the row; None if none does.

    An exposure by which ``exp`` is multiplied is an offset too: its logarithm. A constant that is added to all offsets
    and taken from the head changes nothing, so the head has none. ``tail_of`` gives the tail of some of the rows.
    """
    count, eps, line = row_count(tail.rows), tail.eps or spacing(tail.output), Line.of(tail, readout)
    if count < FEWEST_ROWS:
        return None
    points = probe_points(line.read(tail.flat)).astype(tail.output.dtype).astype(np.float64)
    try:
        middle = np.argsort(line.run(np.zeros(count))[1])[[count // 2]]
        found = find_head(*Line.of(tail_of(middle), readout).run(points), kinds=tail.kinds, eps=eps)
    except ValueError:  # no head of a known kind, or a framework that cannot be asked
        return None
    which, tolerance = np.arange(len(points)) % count, max(1e-7, 256 * eps)
    seen = line.run(points)[1].astype(np.float64)
    for head in _without_constants(found, eps):
        offsets = offsets_of(line, head)[which]
        z, unsure = points + offsets, tolerance * (np.abs(points) + np.abs(offsets))
        made, low, high = (head.apply(z + sign * unsure) for sign in (0.0, -1.0, 1.0))
        if np.all(np.abs(made - seen) <= np.abs(high - low) + tolerance * np.abs(made)):
            return head
    return None


def _without_constants(head: Head, eps: float) -> list[Head]:
    """Heads of one kind, the simplest first, which need no constant that could be part of the offset."""
    if head.is_affine:
        scale = _simple(head.line[0], eps)
        return [Head("identity") if scale == 1 else Head("affine", scale)]
    inner, sign = _simple(head.inner_scale, eps), float(np.sign(head.scale))
    scale = sign if head.kind == "exp" else head.scale
    return [Head(head.kind, sign, 0.0, inner), Head(head.kind, scale, head.offset, inner)]


def offsets_of(line: Line, head: Head) -> Array:
    """(rows,) what a model adds to the output of its last layer: predictions where that is 0, without the head."""
    offsets = head.inverse(line.run(np.zeros(row_count(line.tail.rows)))[1])
    if head.is_affine or (head.kind == "exp" and not head.offset):
        return offsets
    return offsets + head.inverse(line.run(-offsets)[1])  # again where the head is steep


def _parts_of(tail: Tail, slopes: Array, pooled: bool, tolerance: float, eps: float) -> list[Part] | None:
    """The parts that derivatives (n, M) show; ``pooled`` if positions may differ between rows."""
    ends = np.cumsum([section.positions * section.outputs for section in tail.parts])
    found = [
        part.reshape(-1, section.positions, section.outputs)
        for section, part in zip(tail.parts, np.split(slopes, ends[:-1], axis=1), strict=True)
    ]
    totals = [part.sum(axis=1) if pooled else part.reshape(len(part), -1) for part in found]
    factors = _constant(np.concatenate(totals, axis=1), tolerance, eps)
    if factors is None:
        return None
    parts: list[Part] = []
    splits = np.split(factors, np.cumsum([total.shape[1] for total in totals])[:-1])
    for section, part, own in zip(tail.parts, found, splits, strict=True):
        if not pooled or section.positions == 1:
            parts += _fixed(section, own)
        elif _separates(part, own, tolerance):
            parts.append(_part(section, own, None))
        else:
            return None
    return parts


def _steepest(tail: Tail, like: Array) -> float:
    """A usual output at which the prediction of every row depends on it: a relu may be idle at others."""
    assert tail.slopes is not None
    best, found = -1.0, 0.0
    for value in np.quantile(like, [0.5, 0.75, 0.25, 0.95, 0.05]):
        slopes = tail.slopes(np.full((_POINTS, like.shape[1]), value))
        size = 0.0 if slopes is None else float(np.abs(slopes).sum(axis=1).min())
        if size > best * (1 + 1e-6):
            best, found = size, float(value)
    return found


def _constant(slopes: Array, tolerance: float, eps: float) -> Array | None:
    """(K,) ratios of derivatives (n, K) to those of one column, if they are the same at all points; None if not."""
    finite = np.isfinite(slopes).all(axis=1)
    slopes, share = slopes[finite], finite.mean()
    if share < _MOST or not slopes.any():
        return None
    means = slopes.mean(axis=0)
    rising = means.max() > 0.1 * np.abs(means).max()
    one = int(np.argmax(np.where(means >= (1 - 1e-3) * means.max(), 1, 0) if rising else -means))
    used = np.abs(slopes[:, one]) > 1e-3 * np.abs(slopes).max()
    if not used.any() or (np.abs(slopes[~used]) > 0.01 * np.abs(slopes).max()).any():
        return None
    ratios = slopes[used] / slopes[used][:, [one]]
    middle = np.median(ratios, axis=0)
    agrees = (np.abs(ratios - middle) <= tolerance * max(1.0, np.abs(middle).max())).all(axis=1)
    if agrees.mean() * share < _MOST:
        return None
    middle[np.abs(middle) < tolerance * np.abs(middle).max()] = 0.0
    return np.array([_simple(float(value), eps) for value in middle / np.abs(middle).max()])


def _simple(value: float, eps: float) -> float:
    """The simple fraction that a measured number is, if it is one up to rounding."""
    fraction = float(Fraction(value).limit_denominator(64))
    return fraction if abs(fraction - value) <= 64 * max(eps, 1e-9) * abs(value) else value


def _separates(slopes: Array, factors: Array, tolerance: float) -> bool:
    """Whether derivatives (n, positions, outputs) are weights of positions times factors of outputs.

    The second half of them is of the same rows as the first, at other outputs.
    """
    one = int(np.argmax(np.abs(factors)))
    if not factors[one]:
        return not slopes.any()
    allowed = tolerance * np.abs(slopes).max()
    separate = np.abs(slopes - slopes[:, :, [one]] * (factors / factors[one])) <= allowed
    totals = slopes[:, :, one].sum(axis=1)
    first, second = np.split(slopes[:, :, one], 2)
    moved = first * totals[len(first) :, None] - second * totals[: len(first), None]
    return bool(separate.all() and (np.abs(moved) <= allowed * np.abs(totals).max()).all())


def _part(section: Section, factors: Array, positions: tuple[float, ...] | None) -> Part:
    used = np.flatnonzero(factors)
    outputs, own = tuple(used.tolist()), tuple(factors[used].tolist())
    return Part(section.layer, outputs, own, positions, section.members)


def _fixed(section: Section, factors: Array) -> list[Part]:
    """Parts of a layer whose positions have the same weights in all rows: one, or one for each output."""
    table = factors.reshape(section.positions, section.outputs)
    place, output = np.unravel_index(int(np.argmax(np.abs(table))), table.shape)
    if not table[place, output]:
        return []
    if np.allclose(table, np.outer(table[:, output], table[place]) / table[place, output], atol=1e-6):
        groups = [(table[:, output] / table[place, output], table[place])]
    else:
        groups = [(table[:, i], np.eye(section.outputs)[i]) for i in np.flatnonzero(table.any(axis=0))]
    parts = []
    for places, own in groups:
        total = places.sum() if abs(places.sum()) > 1e-6 else 1.0
        parts.append(_part(section, own * total, tuple((places / total).tolist())))
    return parts


def _ratios(tail: Tail, z: Array) -> Array | None:
    """(n, M) effects of the columns, found by moving them: how far one column must move to do what each does."""
    before: Array = tail.at(z)[1].astype(np.float64)
    # Unequal, or a softmax would not see all at once
    shift: Array = np.random.default_rng(0).uniform(0.5, 1.5, size=(z.shape[1],))

    def moving(columns: NDArray[np.intp]) -> list[int]:
        moved = z.copy()
        moved[:, columns] += shift[columns]
        if np.array_equal(tail.at(moved)[1], before, equal_nan=True):
            return []
        if len(columns) == 1:
            return [int(columns[0])]
        found = moving(columns[: len(columns) // 2])
        return found if len(found) > _MOST_COLUMNS else found + moving(columns[len(columns) // 2 :])

    found = moving(np.arange(z.shape[1]))
    if not found or len(found) > _MOST_COLUMNS:
        return None
    size = max(0.25 * float(np.std(z)), 1e-3)
    effects = np.zeros_like(z)
    after: dict[int, Array] = {}
    for column in found:
        moved = z.copy()
        moved[:, column] += size
        after[column] = tail.at(moved)[1] - before
    one = max(after, key=lambda column: float(np.nanmean(np.abs(after[column]))))
    sign = 1.0 if float(np.nanmean(after[one])) > 0 else -1.0
    for column in found:
        effects[:, column] = sign * _matched(tail, z, before, one, after[one], after[column])
    sizes: Array = np.max([np.abs(effect) for effect in after.values()], axis=0)
    steep: NDArray[np.bool_] = sizes > 0.05 * np.nanmax(sizes)
    return effects[steep]


def _matched(tail: Tail, z: Array, before: Array, one: int, effect: Array, wanted: Array) -> Array:
    """(n,) how many times its own move column ``one`` must move to change the prediction as ``wanted``, by secants."""
    size = max(0.25 * float(np.std(z)), 1e-3)
    with np.errstate(all="ignore"):
        last, last_effect, step = np.ones(len(z)), effect, wanted / effect
        best, least = step, np.full(len(z), np.inf)
        for _ in range(12):
            moved = z.copy()
            moved[:, one] += size * step
            found = tail.at(moved)[1] - before
            miss = np.abs(found - wanted)
            best, least = np.where(miss < least, step, best), np.fmin(miss, least)
            slope = (found - last_effect) / (step - last)
            good = np.isfinite(slope) & (slope != 0)
            last, last_effect, step = step, found, np.where(good, step + (wanted - found) / slope, step)
    return best
