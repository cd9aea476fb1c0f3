"""A bounded sample of rows, and group moments of all others. Summaries of parts add up.

Every row is in exactly one of the two, so training rows, folds and validation rows are chosen at the solve and one
summary serves every seed. Which rows are kept depends on a hash of their ids alone, not on order, batches or parts.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.batches import Rows, row_key
from esvdfair.core.checks import Label, check_labels, sort_key
from esvdfair.core.moments import FIELDS, GroupMoments
from esvdfair.core.quadratic import Head
from esvdfair.exceptions import InputError
from esvdfair.files import damaged, label_from_json, read_arrays, write_arrays
from esvdfair.models.base import LinearLayer, OutputLayer
from esvdfair.models.readouts import Readout

Array = NDArray[np.float64]

KEPT_ROWS = 160_000  # that a summary keeps at most; of the groups, the small ones whole
KEEP_SEED = 12345  # of the hash by which rows are kept: one for all summaries, so that they add up


@dataclass(frozen=True, eq=False)
class Summary:
    """All that a repair of the output layer needs to know of some rows. Add summaries of parts with ``+`` or ``sum``.

    It contains rows (features, predictions, labels and groups of people): treat it as the data.

    Attributes
    ----------
    model : fingerprint of the model
    output : its output layer and head; None while there are no rows
    columns, n_features : names of the input columns, where they have some, and their number, where it is known
    labelled, weighted, adjusted : whether rows have labels, weights, strata
    bound : most rows that are kept
    groups, strata : labels, sorted; one stratum ``""`` where there are none
    rows, mass : (G, S) number of rows and sum of weights, of all rows
    cut : (G,) rows with a larger hash key are not kept
    kept : the rows that are kept
    rest : moments of ``[features, y]`` over the rows that are not

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import ESVDFair, summarise
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 2000)
    >>> X = rng.normal(size=(2000, 3)) + a[:, None]
    >>> y = X.sum(axis=1) + rng.normal(size=2000)
    >>> model = LinearRegression().fit(X, y)
    >>> parts = [summarise(model, X[i], y[i], sensitive_features=a[i], row_id=i)
    ...          for i in np.array_split(np.arange(2000), 4)]
    >>> sum(parts)
    Summary(2,000 rows, of which it contains 2,000; groups 0: 957, 1: 1,043)
    >>> fair = ESVDFair(model, target_ks=0.2).fit_summary(sum(parts))
    """

    model: str
    bound: int
    output: OutputLayer | None = None
    columns: tuple[str, ...] = ()
    n_features: int | None = None
    labelled: bool = False
    weighted: bool = False
    adjusted: bool = False
    groups: tuple[Label, ...] = ()
    strata: tuple[Label, ...] = ()
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    mass: Array = field(default_factory=lambda: np.zeros((0, 0)))
    cut: Array = field(default_factory=lambda: np.zeros(0))
    kept: Rows = field(default_factory=lambda: Rows.none(0))
    rest: GroupMoments = field(default_factory=GroupMoments)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label}: {n:,}" for label, n in list(self.group_rows.items())[:10])
        more = ", …" if len(self.groups) > 10 else ""
        total = int(self.rows.sum())
        return f"Summary({total:,} rows, of which it contains {len(self.kept):,}; groups {sizes or 'none'}{more})"

    @property
    def group_rows(self) -> dict[Label, int]:
        """Number of rows of every group."""
        return dict(zip(self.groups, self.rows.sum(axis=1).tolist(), strict=True))

    @property
    def complete(self) -> bool:
        """Whether all rows are kept."""
        return len(self.kept) == int(self.rows.sum())

    def __add__(self, other: Any) -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        _check_alike(self, other)
        if self.output is None or other.output is None:
            return other if self.output is None else self
        groups, strata = (
            tuple(sorted({*getattr(self, name), *getattr(other, name)}, key=sort_key)) for name in ("groups", "strata")
        )
        for labels in (groups, strata):
            check_labels(labels)
        first, second = self.relabelled(groups, strata), other.relabelled(groups, strata)
        return replace(
            first,
            output=min(self.output, other.output, key=lambda known: repr(known.head)),
            rows=first.rows + second.rows,
            mass=first.mass + second.mass,
            cut=np.minimum(first.cut, second.cut),
            kept=first.kept.joined(second.kept),
            rest=GroupMoments().merge(self.rest).merge(other.rest),
        ).pruned()

    def __radd__(self, other: Any) -> "Summary":
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def relabelled(self, groups: tuple[Label, ...], strata: tuple[Label, ...]) -> "Summary":
        """With codes and tables for more groups and strata."""
        group, stratum = (
            np.array([new.index(label) for label in old], dtype=np.intp)
            for old, new in ((self.groups, groups), (self.strata, strata))
        )
        rows, mass = np.zeros((len(groups), len(strata)), dtype=np.int64), np.zeros((len(groups), len(strata)))
        rows[np.ix_(group, stratum)], mass[np.ix_(group, stratum)] = self.rows, self.mass
        cut = np.ones(len(groups))
        cut[group] = self.cut
        assert self.kept.strata is not None
        kept = replace(self.kept, codes=group[self.kept.codes], strata=stratum[self.kept.strata])
        return replace(self, groups=groups, strata=strata, rows=rows, mass=mass, cut=cut, kept=kept)

    def pruned(self) -> "Summary":
        """With the rows that are too many moved into ``rest``.

        Of every group those with the smallest keys stay. Their number only falls as parts are added, so the order in
        which they are added does not matter.
        """
        assert self.kept.id is not None
        if len(np.unique(self.kept.id)) < len(self.kept):
            raise InputError(
                "a row is in the sum twice: the same part was added twice, or two parts have the same ids. Give each "
                "part its own `part`, or each row its own `row_id`."
            )
        stays, cut, rest = prune(self.kept, self.cut, self.rows, self.bound, self.groups, self.rest)
        return replace(self, cut=cut, kept=self.kept if stays.all() else self.kept.take(stays), rest=rest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file of plain arrays and JSON.

        It contains rows: treat it as the data.

        Parameters
        ----------
        path : str or Path
            File to write.
        """
        write_arrays(path, "summary", 2, *_to_file(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Summary":
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : str or Path
            File to read.

        Returns
        -------
        Summary
            The summary.

        Raises
        ------
        ValueError
            If the file is of another kind or damaged.
        """
        header, arrays = read_arrays(path, "summary", 2)
        try:
            return _from_file(header, arrays)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise damaged(path, "summary", error) from error


def _check_alike(one: Summary, other: Summary) -> None:
    """Raise unless two summaries are of the same model and of rows of one kind."""
    if one.model != other.model:
        raise InputError("these are summaries of different models; summarise all parts with the same model.")
    if one.output is None or other.output is None:
        return
    for name in ("columns", "n_features", "labelled", "weighted", "adjusted", "bound"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            raise InputError(f"summaries differ in `{name}` ({mine} and {theirs}); summarise all parts alike.")
    first, second = one.output, other.output
    same = first.layer.name == second.layer.name and first.added == second.added
    same = same and (first.readout is second.readout or (first.readout or Readout(())).same_as(second.readout))
    # A head is found by trying values, and differs between batches: in the last digits, or as knots of a table do.
    prediction = np.concatenate([one.kept.prediction[:100], other.kept.prediction[:100]])
    unit = (1e-4 if first.head.kind == "monotone" else 1e-6) * max(
        float(np.ptp(prediction)), 1e-6 * float(np.abs(prediction).max(initial=0.0))
    )
    if same:
        z = first.head.inverse(prediction)
        same = bool(np.abs(first.head.apply(z) - second.head.apply(z)).max(initial=0.0) <= unit)
    if not same:
        raise InputError("these are summaries of different outputs of the model; give all parts one `output`.")


def level(counts: Sequence[int] | NDArray[np.int64], bound: int) -> int:
    """The largest s with ``Σ min(n_g, s) ≤ bound``: how many rows of a group may be kept."""
    left, sizes = bound, sorted(int(n) for n in counts)
    for i, n in enumerate(sizes):
        share = left // (len(sizes) - i)
        if n > share:
            return share
        left -= n
    return sizes[-1] if sizes else 0


def prune(
    kept: Rows, cut: Array, rows: NDArray[np.int64], bound: int, groups: Sequence[Label], rest: GroupMoments
) -> tuple[NDArray[np.bool_], Array, GroupMoments]:
    """Which rows stay, those of the smallest keys of every group; the cuts after that, and ``rest`` with the others."""
    assert kept.id is not None
    if rows.sum() <= bound and (cut >= 1.0).all():  # none is too many
        return np.ones(len(kept), dtype=bool), cut, rest
    key, codes = row_key(kept.id, KEEP_SEED), kept.codes
    order = np.lexsort((kept.id, key, codes))
    rank = np.empty(len(order), dtype=np.intp)
    rank[order] = np.arange(len(order)) - np.searchsorted(codes[order], codes[order])
    stays = (rank < level(rows.sum(axis=1), bound)) & (key < cut[codes])
    if stays.all():
        return stays, cut, rest
    cut, rest, gone = cut.copy(), GroupMoments().merge(rest), kept.take(~stays)
    np.minimum.at(cut, gone.codes, key[~stays])
    return stays, cut, rest.update_codes(gone.features, groups, gone.codes, gone.weight, beside=gone.y)


# --- files ------------------------------------------------------------------------------------------------------------


NOTICE = "This file contains rows (features, predictions, labels and groups of people). Treat it as the data."
_PLAIN = ("model", "bound", "columns", "n_features", "labelled", "weighted", "adjusted", "groups", "strata")
_TABLES = ("rows", "mass", "cut")
_KEPT = ("features", "prediction", "y", "codes", "weight", "strata", "id")


def _to_file(summary: Summary) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """A header that JSON can hold, in which the arrays of a head are lists, and arrays."""
    header: dict[str, Any] = {"notice": NOTICE, **{name: getattr(summary, name) for name in _PLAIN}}
    known, rest = summary.output, summary.rest
    if known is None:
        return header, {}
    head = {n: [part.tolist() for part in v] if isinstance(v, tuple) else v for n, v in asdict(known.head).items()}
    readout = None if known.readout is None else asdict(known.readout)
    output = {
        "layer": [known.layer.name, known.layer.index, known.layer.offset],
        "head": head,
        "readout": readout,
        "added": known.added,
    }
    arrays = {
        **{name: getattr(summary, name) for name in _TABLES},
        **{f"kept_{name}": getattr(summary.kept, name) for name in _KEPT},
        **{f"rest_{name}": getattr(rest, name) for name in FIELDS if rest.labels},
        "layer_weight": known.layer.weight,
        "layer_bias": known.layer.bias,
    }
    present = {name: values for name, values in arrays.items() if values is not None}
    return header | {"output": output, "rest": rest.labels}, present


def _from_file(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Summary:
    plain: dict[str, Any] = {name: header[name] for name in _PLAIN} | {"columns": tuple(header["columns"])}
    groups, strata = (tuple(label_from_json(label) for label in header[name]) for name in ("groups", "strata"))
    plain |= {"groups": groups, "strata": strata}
    if "output" not in header:
        return Summary(**plain)
    output = _output(header["output"], arrays)
    kept, tables = Rows(**{n: arrays[f"kept_{n}"] for n in _KEPT}), {n: arrays[n] for n in _TABLES}
    rest = GroupMoments.from_file(header["rest"], {name: arrays[f"rest_{name}"] for name in FIELDS if header["rest"]})
    return Summary(**plain | tables, output=output, kept=kept, rest=rest)


def _output(known: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> OutputLayer:
    name, index, offset = known["layer"]
    layer = LinearLayer(name, index, arrays["layer_weight"], arrays.get("layer_bias"), offset)
    head: dict[str, Any] = {
        n: tuple(np.array(part) for part in v) if isinstance(v, list) else v for n, v in known["head"].items()
    }
    readout = None if known["readout"] is None else Readout.from_json(known["readout"])
    return OutputLayer(layer, Head(**head), readout, None if known["added"] is None else tuple(known["added"]))
