"""One pass over a table that says whether it can be used: its rows, types, missing values and groups."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.core.checks import Label, check_groups
from esvdfair.distributed import all_gather, rank, reading, together, world_size
from esvdfair.tables.columns import OTHER, Types, Usage, as_float, count_infinite, not_numeric, numbers, text_in
from esvdfair.tables.sources import Chunk, Source
from esvdfair.tables.words import SHOWN, one_group, short

Codes = NDArray[np.intp]

MAX_GROUPS = 10_000
"""More combinations of sensitive values than this are not collected, nor accepted."""

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are read, after every chunk; starts anew with every pass."""


@dataclass(frozen=True)
class Scan:
    """What is known of a table after one pass.

    Attributes
    ----------
    sha256 : of the file
    total : rows of the file
    rows : those that are used: none of the values that are needed is missing
    labels : the groups that occur
    sizes : rows of each of them
    chunks : of the file
    firsts : for each chunk, the position in the file of its first row
    texts : columns that are text, though some chunks alone look like numbers
    floats : columns of whole numbers that are fractions, or missing, elsewhere
    head : the first row's inputs, in the types of the whole file
    """

    sha256: str
    total: int
    rows: int
    labels: tuple[Label, ...]
    sizes: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    firsts: tuple[int, ...]
    texts: tuple[str, ...]
    floats: tuple[str, ...]
    head: pd.DataFrame

    @property
    def dropped(self) -> int:
        """Rows left out because a value was missing."""
        return self.total - self.rows


@dataclass
class _Seen:
    """What chunks say; sums of it say what all of them say."""

    types: dict[str, Types]
    rows: dict[int, int] = field(default_factory=dict)
    incomplete: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], int] = field(default_factory=dict)
    heads: dict[int, pd.DataFrame] = field(default_factory=dict)

    def add(self, chunk: Chunk, frame: pd.DataFrame, usage: Usage) -> None:
        absent = usage.absent(frame)
        incomplete = absent.any(axis=1)
        self.rows[chunk.index] = len(frame)
        self.incomplete += int(incomplete.sum())
        _count(self.missing, absent.sum().items())
        for name, column in frame.items():
            self.types[str(name)].add(column)
        for name, role in usage.numeric.items():
            if text_in(frame[name]) is not None:
                numbers(frame[name], role, usage.path)  # fails at once: other chunks cannot make numbers of text
        kept = frame if not incomplete.any() else frame[~incomplete]
        if len(kept):
            _count(self.infinite, ((str(name), count_infinite(column)) for name, column in kept.items()))
            self._add_groups(usage.groups(kept).astype(object))
            if not self.heads:
                self.heads[chunk.index] = kept[list(usage.inputs)].iloc[:1]

    def _add_groups(self, groups: pd.DataFrame) -> None:
        if len(self.groups) <= MAX_GROUPS:
            sizes = groups.groupby(list(groups.columns), sort=False).size()
            several = groups.shape[1] > 1
            _count(self.groups, ((key if several else (key,), count) for key, count in sizes.items()))

    def merge(self, other: "_Seen") -> None:
        self.rows |= other.rows
        self.heads |= other.heads
        self.incomplete += other.incomplete
        for mine, theirs in (
            (self.missing, other.missing),
            (self.infinite, other.infinite),
            (self.groups, other.groups),
        ):
            _count(mine, theirs.items())
        for name, types in other.types.items():
            self.types[name].merge(types)


def _count(counts: dict[Any, int], more: Any) -> None:
    for key, count in more:
        counts[key] = counts.get(key, 0) + int(count)


def scan_source(
    source: Source, usage: Usage, *, progress: Progress | None = None, keep: bool = False
) -> tuple[Scan, list[tuple[Chunk, pd.DataFrame]] | None]:
    """Read a table once, in bounded memory, and see whether it can be used.

    The ranks of a process group share the chunks and then tell each other what they have seen.

    Parameters
    ----------
    keep : also give back the chunks of this rank, in case there is room for all of them

    Raises
    ------
    ValueError
        A malformed file, a target or predictions that are not numbers, missing values (counted) unless they may be
        dropped, infinite values, too few groups.
    """
    with together():
        chunks, sha256 = source.plan(world_size())
        if len(set(all_gather(sha256))) > 1:
            raise ValueError(f"the ranks read different files under the name {str(source.path)!r}.")
        texts: tuple[str, ...] = ()
        while True:
            seen, kept = _observe(source, usage, own(chunks), texts, progress, keep)
            mixed = tuple(name for name, types in seen.types.items() if types.is_mixed and name not in texts)
            if not mixed:
                break
            texts += mixed  # a chunk alone looked like numbers: read all of them again, as what they are
        return _settle(source, usage, seen, chunks, sha256, texts), kept


def own(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of this rank: every so many-th."""
    return [chunk for chunk in chunks if chunk.index % world_size() == rank()]


def read_chunks(
    source: Source,
    chunks: Sequence[Chunk],
    columns: Sequence[str],
    texts: Sequence[str],
    progress: Progress | None,
    *,
    strict: bool = False,
) -> Iterator[tuple[Chunk, pd.DataFrame]]:
    """Chunks and their rows, saying how far it is."""
    if progress is not None:
        progress(0, source.size)
    for chunk, frame in source.frames(chunks, columns, dict.fromkeys(texts, str), strict=strict):
        yield chunk, frame
        if progress is not None:
            progress(chunk.end_byte, source.size)


def _observe(
    source: Source,
    usage: Usage,
    chunks: Sequence[Chunk],
    texts: Sequence[str],
    progress: Progress | None,
    keep: bool,
) -> tuple[_Seen, list[tuple[Chunk, pd.DataFrame]] | None]:
    seen = _Seen({name: Types() for name in usage.columns})
    kept = []
    with reading() as listen:
        for chunk, frame in read_chunks(source, chunks, usage.columns, texts, progress, strict=True):
            seen.add(chunk, frame, usage)
            if keep:
                kept.append((chunk, frame))
            listen()
    first, *others = all_gather(seen)
    for other in others:
        first.merge(other)
    return first, kept if keep else None


def _settle(
    source: Source, usage: Usage, seen: _Seen, chunks: Sequence[Chunk], sha256: str, texts: tuple[str, ...]
) -> Scan:
    """What all chunks say together, or why the table cannot be used."""
    sizes = [seen.rows[chunk.index] for chunk in chunks]
    total = sum(sizes)
    if not total:
        raise ValueError(f"{str(source.path)!r} has {len(source.columns)} columns and no rows.")
    for name, role in usage.numeric.items():
        if OTHER in seen.types[name].kinds:
            raise ValueError(not_numeric(name, role, usage.path, None))
    _check_complete(usage, seen, total)
    _check_finite(usage, seen)
    labels, counts = _labels(usage, seen)
    floats = tuple(name for name, types in seen.types.items() if types.is_float)
    return Scan(
        sha256=sha256,
        total=total,
        rows=total - seen.incomplete,
        labels=labels,
        sizes=counts,
        chunks=tuple(chunks),
        firsts=tuple(accumulate([0, *sizes[:-1]])),
        texts=texts,
        floats=floats,
        head=as_float(seen.heads[min(seen.heads)], [name for name in floats if name in usage.inputs]),
    )


def _check_complete(usage: Usage, seen: _Seen, total: int) -> None:
    """An error that counts the missing values, unless they may be dropped."""
    if seen.incomplete and not usage.drop_missing:
        found = {name: count for name, count in seen.missing.items() if count}
        counts = sorted(found.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{short(name)} {count}" for name, count in counts[:SHOWN])
        more = f" and {len(counts) - SHOWN} more columns" if len(counts) > SHOWN else ""
        own = any(name in found for name in usage.roles.sensitive) and not usage.missing_group
        raise ValueError(
            f"{str(usage.path)!r} has missing values in {seen.incomplete:,} of {total:,} rows ({listed}{more}). "
            "--drop-missing leaves those rows out"
            + ("; --missing-group makes people without a group a group of their own." if own else ".")
        )
    if seen.incomplete == total:
        raise ValueError(f"all {total:,} rows of {str(usage.path)!r} have a missing value; none is left.")


def _check_finite(usage: Usage, seen: _Seen) -> None:
    for name in (*usage.inputs, *usage.numeric):
        if seen.infinite[name]:
            raise ValueError(
                f"column {short(name)} of {str(usage.path)!r} holds {seen.infinite[name]} infinite values; correct or "
                "remove those rows."
            )


def _labels(usage: Usage, seen: _Seen) -> tuple[tuple[Label, ...], tuple[int, ...]]:
    """The groups and their sizes; fails on too few, and on a column that looks continuous."""
    combinations = pd.DataFrame(list(seen.groups), columns=list(usage.roles.sensitive), dtype=object)
    labels, codes = check_labels(combinations, usage.roles.sensitive)
    if len(seen.groups) > MAX_GROUPS:
        raise ValueError(
            f"{_sensitive(usage.roles.sensitive)} makes more than {MAX_GROUPS:,} groups; parity is between groups of "
            "many people. Join them into fewer."
        )
    sizes = [0] * len(labels)
    for code, count in zip(codes, seen.groups.values(), strict=True):
        sizes[code] += count
    if len(labels) < usage.min_groups:
        raise ValueError(one_group(labels[0], sizes[0], usage.roles.sensitive, usage.path))
    return labels, tuple(sizes)


def check_labels(groups: pd.DataFrame, names: Sequence[str]) -> tuple[tuple[Label, ...], Codes]:
    """Labels and codes of sensitive columns; errors name the columns."""
    try:
        return check_groups(groups, len(groups), "error")
    except ValueError as error:
        raise ValueError(str(error).replace("sensitive_features", _sensitive(names))) from None


def _sensitive(names: Sequence[str]) -> str:
    return f"the sensitive column {', '.join(map(short, names))}"
