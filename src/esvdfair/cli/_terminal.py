"""What commands write to the terminal: tables and paragraphs that fit its width, notes, progress, JSON."""

import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from esvdfair.exceptions import ESVDFairWarning
from esvdfair.text import WIDEST, printable, to_json

PROSE = 100
"""columns of a paragraph, at most: longer lines are hard to read."""
LABELS = 24
"""Columns below which the names of rows are not broken into several lines."""
GAP = 2
BESIDE = "95% interval"
"""Header of a column that stays with the one before it."""
_SHOWN_BYTES = 32 * 2**20


def terminal_width() -> int:
    """Columns of the terminal; where the output goes elsewhere, ``COLUMNS`` or 80."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


# --- text ----------------------------------------------------------------------------------------------------------


def wrapped(text: str) -> str:
    """Text in lines that fit the terminal; paths and other long words stay whole."""
    return textwrap.fill(text, min(terminal_width(), PROSE), break_long_words=False, break_on_hyphens=False)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, widest: int = WIDEST) -> str:
    """Columns of text under a header, within the width of the terminal.

    The first ``left`` columns start at the left, the others end at the right. When the table is too wide, headers and
    names of rows take several lines; the columns that still do not fit follow in a second table with the same names.
    """
    cells = [[printable(cell, widest) for cell in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    names, others = columns[:left], columns[left:]
    tables: list[str] = []
    while others or not tables:
        taken = _fitting([*map(_narrowest_name, names), *map(_narrowest, others)], left)
        if 1 < taken < len(others) and others[taken][0].startswith(BESIDE):
            taken -= 1
        tables.append(_drawn([*names, *others[:taken]], left))
        others = others[taken:]
    return "\n\n".join(tables)


def _narrowest(column: Sequence[str]) -> int:
    """Width of a column of figures, which are never broken; its header may be."""
    return max(*map(cell_len, column[0].split() or [""]), *map(cell_len, column[1:]), 0)


def _narrowest_name(column: Sequence[str]) -> int:
    return min(max(map(cell_len, column)), max(LABELS, _narrowest(column[:1])))


def _fitting(widths: Sequence[int], left: int) -> int:
    """How many columns fit beside the first ``left``; at least one."""
    total, taken = sum(widths[:left]) + GAP * (left - 1), 0
    for width in widths[left:]:
        total += GAP + width
        if total > terminal_width() and taken:
            break
        taken += 1
    return taken


def _drawn(columns: Sequence[Sequence[str]], left: int) -> str:
    """One table. Columns are as wide as their content; those that gain most by it give way until the table fits."""

    least = [_narrowest_name(c) if i < left else _narrowest(c) for i, c in enumerate(columns)]
    widths = [max(map(cell_len, column)) for column in columns]
    spare = terminal_width() - sum(widths) - GAP * (len(widths) - 1)
    while spare < 0 and widths != least:
        most = max(range(len(widths)), key=lambda i: widths[i] - least[i])
        cut = min(widths[most] - least[most], -spare)
        widths[most] -= cut
        spare += cut
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(Text(column[0]), width=width, justify="left" if i < left else "right", vertical="bottom")
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*(_indented(cell) for cell in row))
    screen = StringIO()
    Console(file=screen, width=sum(widths) + GAP * len(widths), color_system=None, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def _indented(cell: str) -> Any:
    """A cell; the lines of one that starts with spaces all do."""

    indent = len(cell) - len(cell.lstrip(" "))
    return Padding(Text(cell.lstrip(" ")), (0, 0, 0, indent)) if indent else Text(cell)


def print_blocks(*blocks: str) -> None:
    """Print tables and paragraphs, an empty line between them."""
    click.echo("\n\n".join(block for block in blocks if block))


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(to_json(value))


# --- messages of the library in the words of the command line ------------------------------------------------------

_OPTIONS = {
    **{name: "--" + name.replace("_", "-") for name in (
        "certificate", "confidence", "cutoff", "drop_missing", "features", "layer", "max_mse_increase", "method",
        "min_group_rows", "missing_group", "predictions", "rescale", "rows", "select_share", "sep", "target_ks",
    )},
    "X": "the table", "y": "--target", "control_features": "--control", "sensitive_features": "--sensitive",
    "sample_weight": "--weight", "validation": "--validation FILE", "output": "--output NAME",
    "part": "--part", "row_id": "--row-id", "random_state": "--seed",
    "missing='group'": "--missing-group", "curve_": "`esvdfair curve`",
}  # fmt: skip
"""What messages of the library name in backticks -> what the command line calls it."""


def in_options(error: BaseException) -> str:
    """A message of the library on one line, with parameters as options: `target_ks=0.1` is --target-ks 0.1."""
    return " ".join(re.sub(r"`(\w+)(?:=([^`]+))?`", _option, str(error)).split())


def _option(parameter: re.Match[str]) -> str:
    name, value = parameter.groups()
    whole = parameter[0].strip("`")
    if whole in _OPTIONS or name not in _OPTIONS:
        return _OPTIONS.get(whole, parameter[0])
    return f"{_OPTIONS[name].split()[0]} {value.strip(chr(39))}"


def print_message(text: str) -> None:
    """Print a message on stderr: one line, or several that fit when it is a terminal."""
    line = " ".join(text.split())
    click.echo(wrapped(line) if sys.stderr.isatty() else line, err=True)


@contextmanager
def notes() -> Iterator[None]:
    """Show the library's warnings as notes of one line on stderr, each once; other warnings are not for users."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ESVDFairWarning)
        yield
    for words in dict.fromkeys(
        in_options(warning.message) for warning in caught if isinstance(warning.message, Warning)
    ):
        print_message(f"note: {words}")


# --- progress ------------------------------------------------------------------------------------------------------


class Work:
    """Progress of a command on stderr: which step of how many, for how long, and how much of a large file is read."""

    def __init__(self, progress: Any, steps: int) -> None:
        self._progress, self._task = progress, None if progress is None else progress.add_task("", total=steps, read="")
        self._done = -1

    def step(self, name: str) -> None:
        """The step before is done, and this one begins."""
        self._done += 1
        if self._progress is not None:
            self._progress.update(self._task, description=name, completed=self._done, refresh=True)

    def read(self, done: int, total: int) -> None:
        """So many bytes of a file are read; a small file is read before anybody could see it."""
        if self._progress is not None and total >= _SHOWN_BYTES:
            self._progress.update(self._task, read=f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB", refresh=True)


@contextmanager
def at_work(steps: int = 1) -> Iterator[Work]:
    """The work of a command: progress while it lasts, if stderr is a terminal, and :func:`notes` behind it."""
    with notes():
        if not sys.stderr.isatty():
            yield Work(None, steps)
            return

        texts = [TextColumn("{task.description}", markup=False), TextColumn("{task.fields[read]}", markup=False)]
        columns = (texts[0], BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), texts[1])
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield Work(progress, steps)
