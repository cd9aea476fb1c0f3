"""What commands print: tables, numbers, JSON, notes, progress."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from esvdfair.cli._words import in_options
from esvdfair.core.checks import Label
from esvdfair.exceptions import ESVDFairWarning

JUDGED_ON = {
    "validation": "the rows of --validation",
    "heldout": "rows held out from the repair",
    "train": "the rows that fitted it; new people will fare worse",
}
_WIDEST = 40  # characters of one cell


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, widest: int = _WIDEST) -> str:
    """Columns of text under a header; the first ``left`` of them start at the left, the others end at the right."""
    lines = [[printable(cell, widest) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(lines[0]), "  ".join("─" * width for width in widths), *map(line, lines[1:])])


def printable(text: str, widest: int = _WIDEST) -> str:
    """Text from a user's file that can neither steer the terminal nor break a table."""
    safe = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return safe if len(safe) <= widest else safe[: widest - 1] + "…"


def label_text(label: Label) -> str:
    """A group as people write it; of several attributes, their values."""
    return ", ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def some_names(names: Sequence[str], shown: int) -> str:
    """Names, of many the first few."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def number(value: float | None) -> str:
    """Four digits that count; a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def share(value: float | None) -> str:
    """A KS distance, three digits after the point."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A part of all, in per cent."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.0%}"


def interval(ends: tuple[float, float] | None, form: Callable[[float], str] = number) -> str:
    """``[low, high]``; a dash when there is none."""
    return "–" if ends is None else f"[{form(ends[0])}, {form(ends[1])}]"


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(to_json(value))


def to_json(value: Any) -> str:
    """JSON of nested plain values; group labels become text and what is not finite becomes null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {label_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


@contextmanager
def notes() -> Iterator[None]:
    """Show the library's warnings as notes of one line on stderr, each once; other warnings are not for users."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ESVDFairWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        click.echo(f"note: {in_options(text)}", err=True)


@contextmanager
def progress(steps: int) -> Iterator["tqdm[Any]"]:
    """A bar on stderr that is gone at the end; silent when stderr is not a terminal."""
    with tqdm(
        total=steps, leave=False, disable=not sys.stderr.isatty(), bar_format="{desc} {bar:20} {n}/{total}"
    ) as bar:
        yield bar


def scatter(x: Sequence[float], y: Sequence[float], marks: Sequence[str], *, width: int = 60, height: int = 12) -> str:
    """Points in a frame of text, y upwards, with the range of both axes; later points cover earlier ones."""
    columns, rows = (_cells(values, size) for values, size in ((x, width), (y, height)))
    grid = [[" "] * width for _ in range(height)]
    for column, row, mark in zip(columns, rows, marks, strict=True):
        grid[height - 1 - row][column] = mark
    top, bottom = number(max(y)), number(min(y))
    side = max(len(top), len(bottom))
    edges = [top.rjust(side), *[" " * side] * (height - 2), bottom.rjust(side)]
    body = [f"{edge} │{''.join(line)}".rstrip() for edge, line in zip(edges, grid, strict=True)]
    left, right = share(min(x)), share(max(x))
    axis = " " * (side + 1) + "└" + "─" * width
    return "\n".join([*body, axis, " " * (side + 2) + left + right.rjust(width - len(left))])


def _cells(values: Sequence[float], size: int) -> list[int]:
    low, high = min(values), max(values)
    return [round((value - low) / (high - low) * (size - 1)) if high > low else 0 for value in values]
