"""What commands write: tables and paragraphs that fit the terminal, JSON, notes, errors, progress."""

import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.align import Align
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from esvdfair.exceptions import ESVDFairWarning
from esvdfair.text import WIDEST, printable, to_json

if TYPE_CHECKING:
    from esvdfair.cutoffs import Decisions

PROSE = 100
"""Columns of a paragraph, at most: longer lines are hard to read."""
LABELS = 24
"""Columns below which the names of rows are not broken into several lines."""
GAP = 2
BESIDE = "95% interval"
"""Header of a column that stays with the one before it."""
_SHOWN_BYTES = 32 * 2**20


# --- results -------------------------------------------------------------------------------------------------------


class Unprinted(Exception):
    """Files were written, but the result could not be printed."""


def answer(found: Any, *blocks: str, as_json: bool, written: Sequence[Path] = ()) -> None:
    """Print the result of a command: as JSON, or as tables and paragraphs with an empty line between them.

    After files were written, a full disk behind stdout is no reason to say that nothing was.
    """
    try:
        click.echo(to_json(found) if as_json else "\n\n".join(filter(None, blocks)))
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError) or not written:
            raise
        names = ", ".join(map(str, written))
        raise Unprinted(f"wrote {names}, but cannot print the result: {error.strerror or error}") from None


def wrapped(text: str) -> str:
    """Text in lines that fit the terminal; paths and other long words stay whole."""
    return textwrap.fill(text, min(_terminal_width(), PROSE), break_long_words=False, break_on_hyphens=False)


def _terminal_width() -> int:
    """Columns of the terminal; where the output goes elsewhere, ``COLUMNS`` or 80."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, widest: int = WIDEST) -> str:
    """Columns of text under a header, within the width of the terminal.

    The first ``left`` columns start at the left, the others end at the right. When the table is too wide, headers and
    names of rows take several lines; the columns that still do not fit follow in a second table with the same names.
    """
    cells = [[printable(cell, widest) for cell in row] for row in (header, *rows)]
    columns = [_Column(column, i < left) for i, column in enumerate(zip(*cells, strict=True))]
    names, tables = columns[:left], [columns[:left]]
    for column in columns[left:]:
        shown = tables[-1]
        if sum(each.least + GAP for each in (*shown, column)) - GAP > _terminal_width() and len(shown) > left:
            tables.append([*names, shown.pop()] if column.stays_beside and len(shown) > left + 1 else [*names])
        tables[-1].append(column)
    return "\n\n".join(map(_drawn, tables))


class _Column:
    """A column of a table. Figures are never broken into lines; headers and names of rows may be."""

    def __init__(self, cells: Sequence[str], is_name: bool) -> None:
        self.cells, self.side = cells, "left" if is_name else "right"
        self.stays_beside, self.width = cells[0].startswith(BESIDE), max(map(cell_len, cells))
        word = max(map(cell_len, cells[0].split() or [""]))
        self.least = min(self.width, max(LABELS, word)) if is_name else max([word, *map(cell_len, cells[1:])])


def _drawn(columns: Sequence[_Column]) -> str:
    """One table. Columns are as wide as their content; those that gain most by it give way until the table fits."""
    widths = [column.width for column in columns]
    spare = _terminal_width() - sum(widths) - GAP * (len(widths) - 1)
    while spare < 0:
        gains = [width - column.least for width, column in zip(widths, columns, strict=True)]
        most, gain = max(enumerate(gains), key=lambda each: each[1])
        if not gain:
            break
        widths[most] -= min(gain, -spare)
        spare += min(gain, -spare)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        side: Any = column.side
        table.add_column(Align(Text(column.cells[0], justify=side), side, vertical="bottom"), width=width, justify=side)
    for row in list(zip(*(column.cells for column in columns), strict=True))[1:]:
        table.add_row(*map(_indented, row))
    screen = StringIO()
    Console(file=screen, width=sum(widths) + GAP * len(widths), color_system=None, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def _indented(cell: str) -> Any:
    """A cell; the lines of one that starts with spaces all do."""
    indent = len(cell) - len(cell.lstrip(" "))
    return Padding(Text(cell.lstrip(" ")), (0, 0, 0, indent)) if indent else Text(cell)


def decision_blocks(decided: "Sequence[Decisions]", attribute: str) -> list[str]:
    """A table and the sentences of each cut-off."""
    from esvdfair.cutoffs import decision_table

    blocks = []
    for one in decided:
        blocks += [text_table(*decision_table(one, attribute)), wrapped(f"{one.cutoff_words()} {one.ratio_words()}")]
    return blocks


# --- messages of the library in the words of the command line ------------------------------------------------------

_OPTIONS = {
    **{name: "--" + name.replace("_", "-") for name in (
        "certificate", "confidence", "cutoff", "drop_missing", "features", "layer", "max_mse_increase", "method",
        "min_group_rows", "missing_group", "part", "predictions", "rescale", "row_id", "rows", "select_share", "sep",
        "target_ks",
    )},
    "X": "the table", "model": "MODEL", "summary": "--summary",
    "y": "--target", "control_features": "--control", "sensitive_features": "--sensitive",
    "sample_weight": "--weight", "validation": "--validation FILE",
    "validation=(X, y, sensitive_features)": "--validation FILE", "output": "--output NAME",
    "random_state": "--seed", "missing='group'": "--missing-group", "curve_": "`esvdfair curve`",
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


# --- while a command works -----------------------------------------------------------------------------------------


class Work:
    """Progress of a command on stderr: which step of how many, for how long, and how much of a large file is read."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._task = progress, progress.add_task("", total=steps, read="")
        self._done = -1

    def step(self, name: str) -> None:
        """The step before is done, and this one begins."""
        self._done += 1
        self._progress.update(self._task, description=name, completed=self._done, refresh=True)

    def read(self, done: int, total: int) -> None:
        """So many bytes of a file are read; a small file is read before anybody could see it."""
        if total >= _SHOWN_BYTES:
            self._progress.update(self._task, read=f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB", refresh=True)


@contextmanager
def at_work(steps: int = 1) -> Iterator[Work]:
    """The work of a command: progress on a terminal, and the library's warnings as notes of one line, each once."""
    description, read = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[read]}"))
    columns = (description, BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), read)
    screen, hidden = Console(stderr=True), not sys.stderr.isatty()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # those of other libraries are not for users
        warnings.simplefilter("always", ESVDFairWarning)
        with Progress(*columns, console=screen, transient=True, disable=hidden) as progress:
            yield Work(progress, steps)
    for message in dict.fromkeys(in_options(w.message) for w in caught if isinstance(w.message, Warning)):
        print_message(f"note: {message}")
