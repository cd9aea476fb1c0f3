"""Names from a user's file, as errors show them."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

SHOWN = 12
"""Names that an error lists."""
_LONGEST_NAME = 60


def short(name: str) -> str:
    """A name from a file, in quotes, escaped, of bounded length."""
    return repr(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")


def listing(names: Iterable[str]) -> str:
    """Names, of many the first few."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(short, names[:SHOWN])) + more


def not_there(name: str, columns: Sequence[str], path: Path) -> str:
    """That a column is not there, which one may be meant, and which there are."""
    lower = {column.lower(): column for column in columns}
    near = get_close_matches(name.lower()[:_LONGEST_NAME], list(lower), n=1, cutoff=0.6)
    hint = f" Did you mean {short(lower[near[0]])}?" if near else ""
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        hint = " Its fields seem to be separated by something else than commas."
    return f"{str(path)!r} has no column {short(name)}.{hint} It has {listing(columns)}."


def one_group(label: object, rows: int, sensitive: Sequence[str], path: Path) -> str:
    """That there is one group only."""
    names = ", ".join(map(short, sensitive))
    return f"all {rows:,} rows of {str(path)!r} are of one group, {label!r} in {names}; parity needs two."
