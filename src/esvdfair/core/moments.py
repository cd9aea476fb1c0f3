"""Group moments: count, mean and scatter of every group, additive over rows, batches, workers and sites."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import (
    Label,
    check_labels,
    check_numbers,
    check_rows,
    check_weight,
    encode_groups,
    sort_key,
)
from esvdfair.core.ks import adjusting_factors, split_cell
from esvdfair.exceptions import InputError
from esvdfair.files import damaged, label_from_json, read_arrays, write_arrays

Array = NDArray[np.float64]

FIELDS = ("rows", "counts", "weight_squares", "means", "scatters")  # arrays of a file
_LARGEST_SUM = 1e300  # of squares in one batch, so that a sum over many batches stays in float64


@dataclass(frozen=True)
class _Moments:
    """Moments of one group."""

    rows: int
    weight: float  # Σw
    weight_squares: float  # Σw²
    mean: Array  # (n,)
    scatter: Array  # (n, n)   Σ w (x − mean)ᵀ(x − mean)

    def columns(self, selection: slice | list[int]) -> "_Moments":
        mean, scatter = self.mean[selection], self.scatter[selection][:, selection]
        return _Moments(self.rows, self.weight, self.weight_squares, mean, scatter)

    def scaled(self, factor: float) -> "_Moments":
        """With all weights times a factor."""
        weight, squares = factor * self.weight, factor**2 * self.weight_squares
        return _Moments(self.rows, weight, squares, self.mean, factor * self.scatter)

    def __add__(self, other: "_Moments") -> "_Moments":
        """Chan's pairwise update: exact in real arithmetic, stable in floating point."""
        weight, delta = self.weight + other.weight, other.mean - self.mean
        scatter = self.scatter + other.scatter
        scatter += np.outer(delta, delta * (self.weight * other.weight / weight))
        mean, squares = self.mean + delta * (other.weight / weight), self.weight_squares + other.weight_squares
        return _Moments(self.rows + other.rows, weight, squares, mean, scatter)


def _stacked(name: str, dtype: type = np.float64) -> Any:
    """A property: what the groups have under this name, in the order of their labels."""
    return property(lambda self: np.array([getattr(self._groups[label], name) for label in self.labels], dtype=dtype))


class GroupMoments:
    """Count, mean and scatter of the rows of every group, gathered over any number of batches.

    Holds no rows: memory is G·n² numbers whatever the number of rows. Batches may come in any order and on any
    worker; the result is that of one pass over all rows. Sums are in float64, on the CPU.

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
        self._groups: Mapping[Label, _Moments] = {}  # replaced, never changed: copies grow apart
        self._everyone: _Moments | None = None  # of all rows, where the groups are adjusted and do not add up to them

    rows = _stacked("rows", np.int64)
    counts = _stacked("weight")
    weight_squares = _stacked("weight_squares")
    means = _stacked("mean")
    scatters = _stacked("scatter")

    # --- gathering ---------------------------------------------------------------------------------------------

    def update(self, x: Any, groups: Any, sample_weight: Any = None) -> Self:
        """Add a batch of rows.

        Parameters
        ----------
        x : ndarray or torch.Tensor of shape (batch, ..., n)
            Values. Middle axes (a sequence, an image) are flattened into rows, each with the group of its first axis.
        groups : array-like of shape (batch,) or (batch, attributes)
            Group of each row. Several columns are combined into groups.
        sample_weight : array-like of shape (batch,), default=None
            Weights. A row of weight 0 is left out.

        Returns
        -------
        GroupMoments
            This object.

        Raises
        ------
        ValueError
            If lengths differ, the width changed, values are NaN or infinite, or weights are negative. Nothing is added
            then.
        """
        return self.update_codes(x, *encode_groups(groups), sample_weight)

    def update_codes(
        self,
        x: Any,
        labels: Sequence[Label],
        codes: NDArray[np.intp],
        sample_weight: Any = None,
        *,
        beside: Array | None = None,
    ) -> Self:
        """As :meth:`update`, for groups that are encoded already: row i belongs to ``labels[codes[i]]``.

        ``beside`` (batch,) is taken as a last column of x (batch, n), without copying x to put it there.
        """
        check_labels([*self._groups, *labels])
        weights = None if sample_weight is None else check_weight(sample_weight, len(codes), zero=True, squares=True)
        x, codes, weights = _flatten(x, codes, weights)
        width = x.shape[1] + (beside is not None)
        if self._groups and width != self.width:
            raise ValueError(
                f"this batch has {width} columns, the batches before had {self.width}; moments of different "
                "layers or feature sets cannot be mixed. Use one GroupMoments for each."
            )
        order = np.argsort(codes, kind="stable")
        if weights is not None:
            order = order[weights[order] > 0]
            weights = None if (weights[order] == 1.0).all() else weights
        parts = np.split(order, np.searchsorted(codes[order], np.arange(1, len(labels))))
        with np.errstate(over="ignore", invalid="ignore"):
            found = [(labels[i], _moments_of(x, beside, part, weights)) for i, part in enumerate(parts) if len(part)]
            total = sum((m.scatter.diagonal() + m.weight * m.mean**2).max() for _, m in found)
        if not total < _LARGEST_SUM:  # NaN is not
            bad = int((~np.isfinite(x[order]).all(axis=1)).sum())
            raise ValueError(
                f"{bad} of {x.shape[0]} rows hold NaN or infinite values; moments of them would be meaningless. "
                "Check the inputs and the model's activations."
                if bad
                else "the rows hold finite values whose squares are beyond the largest float64, about 1.8e308; "
                "give the features in another unit, or standardise them."
            )
        self._add(found)
        return self

    def merge(self, other: "GroupMoments") -> Self:
        """Add the rows of another GroupMoments, which is not changed.

        Parameters
        ----------
        other : GroupMoments
            Moments of other rows.

        Returns
        -------
        GroupMoments
            This object.
        """
        if not isinstance(other, GroupMoments):
            raise TypeError(f"merge takes GroupMoments, got {type(other).__name__}; load or gather them first.")
        self._refuse_adjusted()
        other._refuse_adjusted()
        check_labels([*self._groups, *other._groups])
        if self._groups and other._groups and self.width != other.width:
            raise ValueError(
                f"cannot merge moments of width {other.width} into moments of width {self.width}; "
                "both must come from the same layer."
            )
        self._add(other._groups.items())
        return self

    def _add(self, groups: Iterable[tuple[Label, _Moments]]) -> None:
        known = dict(self._groups)
        for label, moments in groups:
            known[label] = known[label] + moments if label in known else moments
        self._groups = known

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(sorted(self._groups, key=sort_key))

    @property
    def width(self) -> int:
        """Number of columns n."""
        if not self._groups:
            raise ValueError("these moments have seen no rows yet; call update first.")
        return int(next(iter(self._groups.values())).mean.shape[0])

    def mean_differences(self) -> Array:
        """Return the differences of group means.

        Returns
        -------
        ndarray of shape (pairs, n)
            D, one row ``x̄_g − x̄_h`` for each pair g < h.
        """
        self.require_groups()
        means = self.means
        first, second = np.triu_indices(len(means), k=1)
        return np.asarray(means[first] - means[second])

    def covariances(self) -> Array:
        """Return the unbiased covariance of each group: its scatter over ``Σw − Σw²/Σw``.

        That is N_g − 1 without weights, and does not change when all weights are scaled (``numpy.cov`` with
        ``aweights``).

        Differs from the paper: its M divides both groups by N₁ − 1.

        Returns
        -------
        ndarray of shape (G, n, n)
            Covariances, in the order of ``labels``.
        """
        self.require_groups(rows=2)
        divisors = self.counts - self.weight_squares / self.counts
        if not divisors.min() > 0:
            raise InputError(
                f"`sample_weight` of group {self.labels[int(divisors.argmin())]!r} lies on one row; a covariance "
                "needs at least two rows with weight."
            )
        return np.asarray(self.scatters / divisors[:, None, None])

    @property
    def _total(self) -> _Moments:
        return self._everyone or reduce(add, [self._groups[label] for label in self.labels])

    @property
    def pooled_weight(self) -> float:
        """Σw over all rows."""
        return float(self.counts.sum()) if self._everyone is None else self._everyone.weight

    def pooled_mean(self) -> Array:
        """Return the mean over all rows of all groups.

        Returns
        -------
        ndarray of shape (n,)
            The mean.
        """
        everyone = self._everyone
        return self.counts @ self.means / self.counts.sum() if everyone is None else everyone.mean

    def pooled_scatter(self) -> Array:
        """Return the scatter of all rows: within plus between groups.

        Returns
        -------
        ndarray of shape (n, n)
            ``Σ w (x − x̄)ᵀ(x − x̄)``.
        """
        if self._everyone is not None:
            return self._everyone.scatter
        centred = self.means - self.pooled_mean()
        return np.asarray(self.scatters.sum(axis=0) + (self.counts[:, None] * centred).T @ centred)

    # --- moments of other rows and columns ---------------------------------------------------------------------

    @classmethod
    def _of(cls, groups: Mapping[Label, _Moments], everyone: _Moments | None = None) -> "GroupMoments":
        made = cls()
        made._groups, made._everyone = groups, everyone
        return made

    def columns(self, selection: slice | list[int]) -> "GroupMoments":
        """Moments of some of the columns, as a new object."""
        everyone = None if self._everyone is None else self._everyone.columns(selection)
        return self._of({label: m.columns(selection) for label, m in self._groups.items()}, everyone)

    def only(self, labels: Sequence[Label]) -> "GroupMoments":
        """Moments of some of the groups; the pooled ones stay those of all rows."""
        if set(labels) == set(self._groups):
            return self
        chosen = {label: moments for label, moments in self._groups.items() if label in labels}
        return self._of(chosen, self._total)

    def with_pooled(self, everyone: "GroupMoments") -> "GroupMoments":
        """These groups, with the pooled moments of other rows: those of all groups of ``everyone`` together."""
        return self._of(self._groups, everyone._total)

    @classmethod
    def total(cls, parts: Sequence["GroupMoments"]) -> "GroupMoments":
        """Moments of several sets of rows, and the pooled ones of theirs; the parts are not changed."""
        if len(parts) == 1:
            return parts[0]
        apart = any(part._everyone is not None for part in parts)
        total = cls._of({}, reduce(add, [part._total for part in parts]) if apart else None)
        for part in parts:
            total._add(part._groups.items())
        return total

    def adjusted(self, parts: int, judged: Sequence[Label] | None = None) -> "GroupMoments":
        """From moments of cells (:mod:`esvdfair.core.ks`) those of groups with one mix of strata; pooled ones stay.

        The groups are the first ``parts`` parts of the labels, all of them or those in ``judged``.
        """
        cells = [(split_cell(label, parts), self._groups[label]) for label in self.labels]
        groups = sorted({group for (group, _), _ in cells} if judged is None else judged, key=sort_key)
        strata = sorted({stratum for (_, stratum), _ in cells}, key=sort_key)
        compared = [(groups.index(g), strata.index(s), moments) for (g, s), moments in cells if g in groups]
        mass = np.zeros((len(groups), len(strata)))
        for g, s, moments in compared:
            mass[g, s] = moments.weight
        factors = adjusting_factors(mass)
        result = self._of({}, reduce(add, [moments for _, moments in cells]))
        result._add([(groups[g], m.scaled(float(factors[g, s]))) for g, s, m in compared if factors[g, s] > 0])
        return result

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

    def __repr__(self) -> str:
        if not self._groups:
            return "GroupMoments(empty)"
        sizes = ", ".join(f"{label!r}: {count:g}" for label, count in zip(self.labels, self.counts, strict=True))
        return f"GroupMoments(width={self.width}, counts={{{sizes}}})"

    # --- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file of plain arrays and JSON, complete or not at all.

        Parameters
        ----------
        path : str or Path
            File to write.
        """
        self._refuse_adjusted()
        arrays = {name: getattr(self, name) for name in FIELDS} if self._groups else {}
        write_arrays(path, "moments", 4, {"labels": self.labels}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "GroupMoments":
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : str or Path
            File to read.

        Returns
        -------
        GroupMoments
            The moments.

        Raises
        ------
        ValueError
            If the file is of another kind or damaged.
        """
        header, arrays = read_arrays(path, "moments", 4)
        try:
            return cls.from_file(header["labels"], arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, "moments", error) from error

    @classmethod
    def from_file(cls, labels: Sequence[Any], arrays: Mapping[str, NDArray[Any]]) -> "GroupMoments":
        """From labels, as JSON has them, and arrays of a file."""
        columns = [arrays[name] for name in FIELDS] if labels else []
        groups = zip(map(label_from_json, labels), *columns, strict=True)
        return cls._of({label: _Moments(int(n), float(w), float(w2), *rest) for label, n, w, w2, *rest in groups})


def _moments_of(x: NDArray[Any], beside: Array | None, index: NDArray[np.intp], weights: Array | None) -> _Moments:
    """Moments of some rows, by products of a few thousand of them at a time."""
    found, n = [], x.shape[1]
    width = n + (beside is not None)
    at_once = int(np.clip(4 * n, 1024, 4096))  # rows of a product: enough for its speed, and little memory
    for start in range(0, len(index), at_once):
        part = index[start : start + at_once]
        values, w = x[part], None if weights is None else weights[part]
        live = np.flatnonzero(values.any(axis=0))  # of a ReLU network half of the units may be dead
        rows = np.empty((len(part), len(live) + (beside is not None)))
        rows[:, : len(live)] = values if len(live) == n else values.take(live, axis=1)
        if beside is not None:
            rows[:, -1], live = beside[part], np.append(live, n)
        weight, squares = (float(len(part)),) * 2 if w is None else (float(w.sum()), float(w @ w))
        centre = rows.mean(0) if w is None else w / weight @ rows
        rows -= centre
        if w is not None:
            rows *= np.sqrt(w)[:, None]
        mean, scatter = centre, rows.T @ rows
        if len(live) < width:
            small, mean, scatter = scatter, np.zeros(width), np.zeros((width, width))
            mean[live], scatter[live[:, None], live] = centre, small
        found.append(_Moments(len(part), weight, squares, mean, scatter))
    return reduce(add, found)


def _flatten(x: Any, codes: NDArray[np.intp], weights: Array | None) -> tuple[Any, NDArray[np.intp], Array | None]:
    """(batch, ..., n) -> (rows, n) with codes and weights repeated to match."""
    x = check_numbers(x, "X")
    if x.ndim < 2 or not x.shape[-1]:
        raise InputError(f"`X` has shape {x.shape}; expected (batch, ..., n), one row of n values for each sample.")
    check_rows(len(codes), x.shape[0], "sensitive_features")
    repeats = int(np.prod(x.shape[1:-1]))
    if repeats == 1:
        return x.reshape(-1, x.shape[-1]), codes, weights
    weights = None if weights is None else np.repeat(weights, repeats)
    return x.reshape(-1, x.shape[-1]), np.repeat(codes, repeats), weights
