"""Group moments: count, mean and scatter of every group, additive over rows, batches, workers and sites."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dsyr, dsyrk

from esvdfair.core import array_file
from esvdfair.core.checks import (
    Label,
    check_labels,
    check_rows,
    check_weight,
    encode_groups,
    numbers_in_place,
    sort_key,
    to_numpy,
)
from esvdfair.core.ks import adjusting_factors, split_cell
from esvdfair.exceptions import InputError

_CACHED_ROWS = 256  # rows of 256 float64 columns that fit in a core's own cache, with room to spare
_BLOCK_ROWS = 1024  # rows of one product: enough for its speed, and no more than is given back to the system each time
FIELDS = {"rows": "i8", "counts": "f8", "weight_squares": "f8", "means": "f8", "scatters": "f8"}
"""Arrays that hold moments in a file, and their types."""
_LARGEST_SUM = 1e300  # of squares in one batch, so that a sum over many batches stays in float64


@dataclass(frozen=True)
class _Moments:
    """Moments of one group; arrays are float64, in NumPy or on the device of the tensors that were seen."""

    rows: int
    weight: float  # Σw
    weight_squares: float  # Σw²
    mean: Any  # (n,)
    scatter: Any  # (n, n)   Σ w (x − mean)ᵀ(x − mean)

    def columns(self, selection: slice | list[int]) -> "_Moments":
        return replace(self, mean=self.mean[selection], scatter=self.scatter[selection][:, selection])

    def scaled(self, factor: float) -> "_Moments":
        """With all weights times a factor."""
        weight, squares = factor * self.weight, factor**2 * self.weight_squares
        return replace(self, weight=weight, weight_squares=squares, scatter=factor * self.scatter)

    def __add__(self, other: "_Moments") -> "_Moments":
        """Chan's pairwise update: exact in real arithmetic, stable in floating point."""
        weight = self.weight + other.weight
        mean, scatter = other.mean, other.scatter
        if isinstance(self.mean, np.ndarray) != isinstance(mean, np.ndarray):
            mean, scatter = _like(self.mean, mean), _like(self.scatter, scatter)
        delta = mean - self.mean
        total = self.scatter + scatter
        total += delta.reshape(-1, 1) * (delta * (self.weight * other.weight / weight))
        return _Moments(
            self.rows + other.rows,
            weight,
            self.weight_squares + other.weight_squares,
            self.mean + delta * (other.weight / weight),
            total,
        )


class GroupMoments:
    """Count, mean and scatter of the rows of every group, gathered over any number of batches.

    Holds no rows: memory is G·n² numbers whatever the number of rows. Batches may come in any order and on any
    worker; the result is that of one pass over all rows. Torch tensors are multiplied on their own device, and the sums
    are kept there in float64; those on the CPU are read in place by NumPy.

    Attributes
    ----------
    labels : tuple of the G group labels, sorted
    rows : (G,) number of rows of positive weight
    counts : (G,) Σw, which is the number of rows when there are no sample weights
    weight_squares : (G,) Σw²
    means : (G, n)
    scatters : (G, n, n), ``Σ w (x − mean)ᵀ(x − mean)``

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
    >>> moments = GroupMoments().update(x[:2], ["a", "a"]).update(x[2:], ["b"])
    >>> moments.labels, moments.means.tolist()
    (('a', 'b'), [[2.0, 3.0], [5.0, 9.0]])
    """

    def __init__(self) -> None:
        self._whole: dict[Label, _Moments] = {}
        self._running: _Running | None = None  # what came since
        self._covariances: NDArray[np.float64] | None = None  # of what _groups holds now
        self._everyone: _Moments | None = None  # of all rows, where the groups are adjusted and do not add up to them

    # --- gathering ---------------------------------------------------------------------------------------------

    def update(self, x: Any, groups: Any, sample_weight: Any = None) -> Self:
        """Add a batch of rows; returns self.

        Parameters
        ----------
        x : (batch, ..., n) NumPy array or torch tensor
            Middle axes (a sequence, an image) are flattened into rows, each with the group of its first axis.
        groups : (batch,) labels, or (batch, attributes) whose combinations become the groups
        sample_weight : (batch,) non-negative weights; a row of weight 0 is left out

        Raises
        ------
        ValueError
            For lengths that differ, a width that changed, NaN or infinite values, negative weights, or a device
            without float64. Nothing is added then.
        """
        return self.update_codes(x, *encode_groups(groups), sample_weight)

    def update_codes(
        self,
        x: Any,
        labels: Sequence[Label],
        codes: NDArray[np.intp],
        sample_weight: Any = None,
        *,
        beside: NDArray[np.float64] | None = None,
    ) -> Self:
        """As :meth:`update`, for groups that are encoded already: row i belongs to ``labels[codes[i]]``.

        ``beside`` (batch,) is taken as a last column of x (batch, n), without copying x to put it there.
        """
        known = self._whole if self._running is None else self._whole | self._running.sums
        check_labels([*known, *labels])
        weights = None if sample_weight is None else check_squares(check_weight(sample_weight, len(codes), zero=True))
        x, codes, weights = _flatten(x, codes, weights)
        width, before = x.shape[1] + (beside is not None), self.width if known else 0
        if known and width != before:
            raise ValueError(
                f"this batch has {width} columns, the batches before had {before}; moments of different "
                "layers or feature sets cannot be mixed. Use one GroupMoments for each."
            )
        if not isinstance(x, np.ndarray):
            found = _batch_moments(x, beside, codes, len(labels), weights)
            self._add([(labels[code], moments) for code, moments in found.items()])
            return self
        parts = _by_group(codes, len(labels), weights)
        _check_range(x, beside, parts)  # all of it first: what raises has added nothing
        self._running = self._running or _Running(width)
        for code, (rows, part) in parts.items():
            self._running.add(labels[code], x, beside, rows, part)
        self._covariances = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which share nothing that grows."""
        return self.__dict__ | {"_whole": self._groups, "_running": None}

    @property
    def _groups(self) -> dict[Label, _Moments]:
        """What was gathered, by group."""
        running, self._running = self._running, None
        if running is not None:
            self._add([(label, sums.moments()) for label, sums in running.sums.items()])
        return self._whole

    def merge(self, other: "GroupMoments") -> Self:
        """Add the rows that another accumulator has seen; returns self. ``other`` is left as it is."""
        if not isinstance(other, GroupMoments):
            raise TypeError(f"merge takes GroupMoments, got {type(other).__name__}; load or gather them first.")
        for moments in (self, other):
            moments._refuse_adjusted()
        check_labels([*self._groups, *other._groups])
        if self._groups and other._groups and self.width != other.width:
            raise ValueError(
                f"cannot merge moments of width {other.width} into moments of width {self.width}; "
                "both must come from the same layer."
            )
        self._add(list(other._groups.items()))
        return self

    def _add(self, groups: list[tuple[Label, _Moments]]) -> None:
        total = dict(self._whole)
        for label, moments in groups:
            mine = total.get(label)
            if mine is None:
                total[label] = moments
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                total[label] = mine + moments
            if isinstance(total[label].scatter, np.ndarray) and not np.isfinite(np.diag(total[label].scatter)).all():
                raise _too_large()
        self._whole = total  # only now: what raises above has added nothing
        self._covariances = None

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(sorted(self._groups, key=sort_key))

    @property
    def width(self) -> int:
        """Number of columns n."""
        if self._running is not None:
            return self._running.width
        if not self._groups:
            raise ValueError("these moments have seen no rows yet; call update first.")
        return int(next(iter(self._groups.values())).mean.shape[0])

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.array([m.rows for m in self._ordered()], dtype=np.int64)

    @property
    def counts(self) -> NDArray[np.float64]:
        return np.array([m.weight for m in self._ordered()], dtype=np.float64)

    @property
    def weight_squares(self) -> NDArray[np.float64]:
        return np.array([m.weight_squares for m in self._ordered()], dtype=np.float64)

    @property
    def means(self) -> NDArray[np.float64]:
        return np.array([to_numpy(m.mean) for m in self._ordered()], dtype=np.float64)

    @property
    def scatters(self) -> NDArray[np.float64]:
        return np.array([to_numpy(m.scatter) for m in self._ordered()], dtype=np.float64)

    @property
    def divisors(self) -> NDArray[np.float64]:
        """(G,) what makes a scatter an unbiased covariance: Σw − Σw²/Σw.

        N_g − 1 without weights; unchanged when all weights are scaled (``numpy.cov`` with ``aweights``).
        """
        return self.counts - self.weight_squares / self.counts

    def mean_differences(self) -> NDArray[np.float64]:
        """(pairs, n) D, one row ``x̄_g − x̄_h`` for each pair g < h."""
        self.require_groups()
        first, second = np.triu_indices(len(self.means), k=1)
        differences: NDArray[np.float64] = self.means[first] - self.means[second]
        return differences

    def covariances(self) -> NDArray[np.float64]:
        """(G, n, n) unbiased covariance of each group.

        Differs from the paper: its M divides both groups by N₁ − 1.
        """
        if self._covariances is None:
            self.require_groups(rows=2)
            divisors = self.divisors
            if not divisors.min() > 0:
                raise InputError(
                    f"`sample_weight` of group {self.labels[int(divisors.argmin())]!r} lies on one row; a covariance "
                    "needs at least two rows with weight."
                )
            self._covariances = self.scatters / divisors[:, None, None]
            self._covariances.flags.writeable = False
        return self._covariances

    @property
    def pooled_weight(self) -> float:
        """Σw over all rows."""
        return float(self.counts.sum()) if self._everyone is None else self._everyone.weight

    @property
    def has_own_pool(self) -> bool:
        """Whether the pooled moments are of other rows than those of the groups."""
        return self._everyone is not None

    def pooled_mean(self) -> NDArray[np.float64]:
        """(n,) mean over all rows of all groups."""
        if self._everyone is not None:
            return to_numpy(self._everyone.mean)
        mean: NDArray[np.float64] = self.counts @ self.means / self.counts.sum()
        return mean

    def pooled_scatter(self) -> NDArray[np.float64]:
        """(n, n) ``Σ w (x − x̄)ᵀ(x − x̄)`` over all rows: within plus between groups."""
        if self._everyone is not None:
            return to_numpy(self._everyone.scatter)
        centred = self.means - self.pooled_mean()
        scatter = np.sum([to_numpy(m.scatter) for m in self._ordered()], axis=0)
        total: NDArray[np.float64] = scatter + (self.counts[:, None] * centred).T @ centred
        return total

    def columns(self, selection: slice | list[int]) -> "GroupMoments":
        """Moments of some of the columns, as a new object."""
        part = GroupMoments()
        part._whole = {label: m.columns(selection) for label, m in self._groups.items()}
        part._everyone = None if self._everyone is None else self._everyone.columns(selection)
        return part

    def only(self, labels: Sequence[Label]) -> "GroupMoments":
        """Moments of some of the groups; the pooled ones stay those of all rows."""
        if set(labels) == set(self._groups):
            return self
        part = GroupMoments()
        part._whole = {label: self._groups[label] for label in labels}
        every = [self._everyone] if self._everyone is not None else self._ordered()
        part._everyone = reduce(add, every)
        return part

    def with_pooled(self, everyone: "GroupMoments") -> "GroupMoments":
        """These groups, with the pooled moments of other rows: those of all groups of ``everyone`` together."""
        part = GroupMoments()
        part._whole = dict(self._groups)
        part._everyone = reduce(add, everyone._ordered())
        return part

    def adjusted(self, parts: int, judged: Sequence[Label] | None = None) -> "GroupMoments":
        """From moments of cells (see :mod:`esvdfair.core.ks`) those of groups that all have the same mix of strata.

        The groups are the first ``parts`` parts of the labels, all of them or those in ``judged``. Pooled moments stay
        those of all rows as they are: the error is everybody's, only gaps are adjusted.
        """
        cells = [(split_cell(label, parts), self._groups[label]) for label in self.labels]
        groups = sorted({group for (group, _), _ in cells} if judged is None else judged, key=sort_key)
        strata = sorted({stratum for (_, stratum), _ in cells}, key=sort_key)
        mass = np.zeros((len(groups), len(strata)))
        compared = [(groups.index(g), strata.index(s), moments) for (g, s), moments in cells if g in groups]
        for g, s, moments in compared:
            mass[g, s] = moments.weight
        factors = adjusting_factors(mass)
        result = GroupMoments()
        result._everyone = reduce(add, [moments for _, moments in cells])
        for g, s, moments in compared:
            if factors[g, s] > 0:
                result._add([(groups[g], moments.scaled(float(factors[g, s])))])
        return result

    @classmethod
    def from_arrays(cls, labels: Sequence[Label], *arrays: Any) -> "GroupMoments":
        """From what the attributes rows, counts, weight_squares, means and scatters hold, for these labels."""
        made = cls()
        made._whole = {
            label: _Moments(int(rows), float(weight), float(squares), mean, scatter)
            for label, rows, weight, squares, mean, scatter in zip(labels, *arrays, strict=True)
        }
        return made

    def _refuse_adjusted(self) -> None:
        if self._everyone is not None:
            raise ValueError("these moments are adjusted for strata, and no longer add up; keep those of the cells.")

    def require_groups(self, *, rows: int = 1) -> None:
        """Raise unless there are two groups or more, each with at least ``rows`` rows."""
        if len(self._groups) < 2:
            raise ValueError(
                f"found {len(self._groups)} group(s) {list(self.labels)}; parity compares at least two. "
                "Check that the sensitive attribute varies in these rows."
            )
        for label, count in zip(self.labels, self.rows, strict=True):
            if count < rows:
                raise ValueError(
                    f"group {label!r} has {count} row(s); a covariance needs at least {rows}. "
                    "Pass more rows, or merge this group with another."
                )

    def _ordered(self) -> list[_Moments]:
        return [self._groups[label] for label in self.labels]

    def __repr__(self) -> str:
        if not self._groups:
            return "GroupMoments(empty)"
        sizes = ", ".join(f"{label!r}: {count:g}" for label, count in zip(self.labels, self.counts, strict=True))
        return f"GroupMoments(width={self.width}, counts={{{sizes}}})"

    # --- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file: a zip of plain arrays and a header, no pickle. It appears whole or not at all."""
        self._refuse_adjusted()
        arrays = {name: getattr(self, name) for name in FIELDS} if self._groups else {}
        array_file.write(path, "moments", 3, {"labels": self.labels}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "GroupMoments":
        """Read what :meth:`save` wrote. A file of another kind, a damaged one, or impossible moments: ValueError."""
        header, arrays = array_file.read(path, "moments", 3)
        try:
            return cls.from_file([array_file.label_from_json(item) for item in header["labels"]], arrays)
        except (TypeError, ValueError) as error:
            raise array_file.damaged(path, "moments", error) from error

    @classmethod
    def from_file(cls, labels: Sequence[Label], arrays: Mapping[str, NDArray[Any]]) -> "GroupMoments":
        """From labels and arrays of a file; ValueError where no rows have such moments."""
        if not labels:
            return cls()
        check_labels(labels)
        if sorted(set(labels), key=sort_key) != list(labels):
            raise ValueError("its groups are not in order")
        if set(arrays) != set(FIELDS):
            raise ValueError("arrays are missing")
        width = arrays["means"].shape[-1]
        shapes = {"means": (len(labels), width), "scatters": (len(labels), width, width)}
        for name, dtype in FIELDS.items():
            if arrays[name].shape != shapes.get(name, (len(labels),)) or arrays[name].dtype != dtype:
                raise ValueError(f"its {name} have another type or shape than they should")
        moments = cls.from_arrays(labels, *(arrays[name] for name in FIELDS))
        if not moments._is_possible():
            raise ValueError("no rows have such moments")
        return moments

    def _is_possible(self) -> bool:
        """Whether these can be moments of rows: finite, symmetric, no negative variance anywhere."""
        rows, counts, squares, means, scatters = (getattr(self, name) for name in FIELDS)
        with np.errstate(over="ignore", invalid="ignore"):
            # What rounding leaves of a constant column is of the size of its mean, not of its variance.
            noise = 1e-12 * counts[:, None] * means**2
            scale = np.sqrt(np.maximum(np.diagonal(scatters, axis1=1, axis2=2), 0.0) + noise)
            unit = scatters / np.maximum(scale[:, :, None] * scale[:, None, :], np.finfo(np.float64).tiny)
            return bool(
                all(np.isfinite(a).all() for a in (counts, squares, means, scatters, unit))
                and (rows >= 1).all()
                and (counts > 0).all()
                and (squares * rows >= counts**2 * (1 - 1e-9)).all()
                and (squares <= counts**2 * (1 + 1e-9)).all()
                and np.abs(unit - unit.transpose(0, 2, 1)).max() < 1e-8
                and np.linalg.eigvalsh(unit).min() > -1e-6
            )


def _flatten(
    x: Any, codes: NDArray[np.intp], weights: NDArray[np.float64] | None
) -> tuple[Any, NDArray[np.intp], NDArray[np.float64] | None]:
    """(batch, ..., n) -> (rows, n) with codes and weights repeated to match."""
    x = numbers_in_place(x, "X")
    if x.ndim < 2 or not x.shape[-1]:
        raise InputError(
            f"`X` has shape {tuple(x.shape)}; expected (batch, ..., n), one row of n values for each sample."
        )
    check_rows(len(codes), x.shape[0], "sensitive_features")
    if x.ndim > 2:
        repeats = int(np.prod(x.shape[1:-1]))
        codes = np.repeat(codes, repeats)
        weights = None if weights is None else np.repeat(weights, repeats)
        x = x.reshape(-1, x.shape[-1])
    return x, codes, weights


Parts = dict[int, tuple[NDArray[np.intp], NDArray[np.float64] | None]]


def _by_group(codes: NDArray[np.intp], n_groups: int, weights: NDArray[np.float64] | None) -> Parts:
    """By the code of every group that has some: which rows are its own, and their weights unless all are 1."""
    order = np.argsort(codes, kind="stable")
    if weights is not None:
        order = order[weights[order] > 0]
    bounds = np.searchsorted(codes[order], np.arange(n_groups + 1)).tolist()
    w = None if weights is None or (weights[order] == 1.0).all() else weights[order]
    return {
        code: (order[start:stop], None if w is None else w[start:stop])
        for code, (start, stop) in enumerate(pairwise(bounds))
        if stop > start
    }


def _check_range(x: NDArray[Any], beside: NDArray[np.float64] | None, parts: Parts) -> None:
    """Raise ValueError for values that are not finite, or whose squares leave float64, in rows that count."""
    weight = sum(float(len(rows)) if w is None else float(w.sum()) for rows, w in parts.values())

    def is_good(*columns: NDArray[Any]) -> bool:
        ends = [float(end) for part in columns for end in (part.max(initial=0), part.min(initial=0))]
        extent = float(np.abs(ends).max())  # NaN where there is one
        return 4 * extent * extent * weight < _LARGEST_SUM

    columns = [x] if beside is None else [x, beside]
    with np.errstate(over="ignore", invalid="ignore"):
        if not parts or is_good(*columns):
            return
        rows = np.concatenate([rows for rows, _ in parts.values()])
        if is_good(*(part[rows] for part in columns)):
            return
    bad = int((~np.isfinite(x).all(axis=1)).sum())
    raise _too_large() if not bad else _not_finite(bad, len(x))


class _Running:
    """Sums of NumPy batches, to which rows are added in place: a large array for each batch costs more than its sums.

    Attributes
    ----------
    sums : by label, in the order in which the groups came
    """

    def __init__(self, width: int) -> None:
        self.width, self.sums = width, dict[Label, _Sums]()
        self._gathered, self._rows = np.empty((_CACHED_ROWS, width)), np.empty((_BLOCK_ROWS, width))
        self._products = np.zeros((width, width), order="F")

    def add(
        self,
        label: Label,
        x: NDArray[Any],
        beside: NDArray[np.float64] | None,
        rows: NDArray[np.intp],
        w: NDArray[np.float64] | None,
    ) -> None:
        """Add some rows of an array, with a further column beside it or without.

        The rows are gathered, shifted and summed a few hundred at a time, while they are in the cache; a product then
        reads some thousand. The shift is the mean of the first rows, so what is left of the mean is of the size of the
        rows' own spread, and taking its square off the products costs no digits.
        """
        weight, squares = (float(len(rows)), float(len(rows))) if w is None else (float(w.sum()), float(w @ w))
        n = x.shape[1]
        first = x[rows[:64]] if beside is None else np.column_stack([x[rows[:64]], beside[rows[:64]]])
        shift = first.mean(axis=0, dtype=np.float64)
        if self._gathered.dtype != x.dtype or self._gathered.shape[1] != n:
            self._gathered = np.empty((_CACHED_ROWS, n), dtype=x.dtype)
        total = np.zeros(self.width)
        for start in range(0, len(rows), _BLOCK_ROWS):
            chosen = rows[start : start + _BLOCK_ROWS]
            for i in range(0, len(chosen), _CACHED_ROWS):
                block, index = self._rows[i : min(i + _CACHED_ROWS, len(chosen))], chosen[i : i + _CACHED_ROWS]
                gathered = self._gathered[: len(block)]
                np.take(x, index, axis=0, out=gathered, mode="clip")  # with "raise" NumPy copies once more
                np.subtract(gathered, shift[:n], out=block[:, :n])
                if beside is not None:
                    np.subtract(beside[index], shift[n], out=block[:, n])
                if w is None:
                    total += block.sum(axis=0)
                else:
                    part = w[start + i :][: len(block)]
                    total += part @ block
                    block *= np.sqrt(part)[:, None]
            dsyrk(1.0, self._rows[: len(chosen)].T, beta=float(start > 0), c=self._products, overwrite_c=1)
        left = total / weight
        if label not in self.sums:
            self.sums[label] = _Sums(np.zeros(self.width), np.zeros((self.width, self.width), order="F"))
        self.sums[label].add(len(rows), weight, squares, shift + left, self._products)
        dsyr(-weight, left, a=self.sums[label].upper, overwrite_a=1)


@dataclass
class _Sums:
    """As `_Moments`, of a group that grows; of the scatter the upper triangle alone."""

    mean: NDArray[np.float64]
    upper: NDArray[np.float64]
    rows: int = 0
    weight: float = 0.0
    squares: float = 0.0

    def add(
        self, rows: int, weight: float, squares: float, mean: NDArray[np.float64], upper: NDArray[np.float64]
    ) -> None:
        """Chan's update, as in `_Moments`."""
        total, delta = self.weight + weight, mean - self.mean
        self.upper += upper
        dsyr(self.weight * weight / total, delta, a=self.upper, overwrite_a=1)
        self.mean += delta * (weight / total)
        self.rows, self.weight, self.squares = self.rows + rows, total, self.squares + squares

    def moments(self) -> _Moments:
        scatter = np.triu(self.upper)
        scatter += np.triu(self.upper, 1).T
        return _Moments(self.rows, self.weight, self.squares, self.mean, scatter)


def _batch_moments(
    x: Any,
    beside: NDArray[np.float64] | None,
    codes: NDArray[np.intp],
    n_groups: int,
    weights: NDArray[np.float64] | None,
) -> dict[int, _Moments]:
    """Moments of each group of one batch, a tensor: one gather of the rows, one matrix product for each group."""
    parts = _by_group(codes, n_groups, weights)
    order = np.concatenate([np.zeros(0, dtype=np.intp), *(rows for rows, _ in parts.values())])
    ordered = _gather_float64(x, beside, order)
    found, start = {}, 0
    for code, (rows, w) in parts.items():
        found[code] = _moments_of(ordered.narrow(0, start, len(rows)), w)
        start += len(rows)
    if not _all_finite(list(found.values())):
        bad = int((~np.isfinite(to_numpy(x.double())).all(axis=1)).sum())
        raise _too_large() if not bad else _not_finite(bad, x.shape[0])
    return found


def _moments_of(x: Any, w: NDArray[np.float64] | None) -> _Moments:
    """Moments of the rows of one group, a tensor that is ours to overwrite."""
    if w is None:
        rows = weight = squares = x.shape[0]
        mean = x.mean(0)
        x -= mean
    else:
        rows, weight, squares = len(w), float(w.sum()), float(w @ w)
        mean = _like(x, w / weight) @ x
        x -= mean
        x *= _like(x, np.sqrt(w)).reshape(-1, 1)
    return _Moments(int(rows), float(weight), float(squares), mean, x.T @ x)


def _gather_float64(x: Any, beside: NDArray[np.float64] | None, order: NDArray[np.intp]) -> Any:
    """The rows of a tensor in the given order as a new float64 tensor, on the same device."""
    torch = sys.modules["torch"]
    index = torch.as_tensor(order, device=x.device)
    try:
        rows = x.index_select(0, index).double()
        if beside is None:
            return rows
        return torch.cat([rows, torch.as_tensor(beside[order], device=x.device).unsqueeze(1)], dim=1)
    except TypeError as error:
        raise ValueError(
            f"device {x.device} has no float64, which the sums need to stay accurate; move the batch to the CPU first."
        ) from error


def _like(reference: Any, values: Any) -> Any:
    """float64 values as an array of the reference's kind and device."""
    if isinstance(reference, np.ndarray):
        return to_numpy(values)
    torch = sys.modules["torch"]
    return torch.as_tensor(values, dtype=torch.float64, device=reference.device)


def _all_finite(found: list[_Moments]) -> bool:
    """The one small transfer that a batch on a device costs beside its group labels."""
    sums = [values for m in found for values in (m.mean, m.scatter.diagonal())]
    torch = sys.modules["torch"]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())


def check_squares(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights, unless their squares, which a covariance needs, leave the range of float64."""
    largest = float(weight.max(initial=0.0))
    if largest and not 1e-140 < largest < 1e140:
        raise InputError(
            f"`sample_weight` has a maximum of {largest:.3g}, and the sum of squares leaves float64. Divide the "
            "weights of all batches by one common number."
        )
    return weight


def _too_large() -> ValueError:
    return ValueError(
        "the rows hold finite values whose squares are beyond the largest float64, about 1.8e308; give the features in "
        "another unit, or standardise them."
    )


def _not_finite(bad: int, rows: int) -> ValueError:
    return ValueError(
        f"{bad} of {rows} rows hold NaN or infinite values; moments of them would be meaningless. "
        "Check the inputs and the model's activations."
    )
