"""What commands print and where they write: tables, JSON, notes, progress, files."""

import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from esvdfair.distributed import rank
from esvdfair.exceptions import ESVDFairWarning, InputError, python_word
from esvdfair.text import EVALUATED_ON, WIDEST, distinct_names, number, printable, share

JUDGED_ON = EVALUATED_ON | {"validation": "the rows of --validation"}
PICTURES = (".png", ".svg", ".pdf")

# --- messages of the library in the words of the command line ------------------------------------------------------

# Parameter of the library -> what the command line calls it; any other is an option of the same name.
_CALLED = {
    "X": "the table",
    "y": "--target",
    "curve_": "`esvdfair curve`",
    "output": "--output NAME",
    "random_state": "--seed",
    "sample_weight": "--weight",
    "sensitive_features": "--sensitive",
    "validation": "--validation FILE",
}
_OPTIONS = {
    "drop_missing", "features", "layer", "max_mse_increase", "method", "min_group_rows", "min_rows", "missing_group",
    "sep", "target_ks",
}  # fmt: skip


def option_word(name: str, value: Any) -> str:
    """A parameter as it is typed: ``target_ks=0.1`` is ``--target-ks 0.1``."""
    if (name, value) == ("missing", "group"):
        return "--missing-group"
    if name not in _CALLED and name not in _OPTIONS:
        return python_word(name, value)
    option = _CALLED.get(name, "--" + name.replace("_", "-"))
    if value is None or value is True:
        return option
    return f"{option.split()[0]} {value:g}" if isinstance(value, float) else f"{option.split()[0]} {value}"


def said(error: BaseException) -> str:
    """A message of the library on one line, with parameters as options."""
    text = error.say(option_word) if isinstance(error, InputError | ESVDFairWarning) else str(error)
    return " ".join(text.split())


@contextmanager
def notes() -> Iterator[None]:
    """Show the library's warnings as notes of one line on stderr, each once; other warnings are not for users."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ESVDFairWarning)
        yield
    for text in dict.fromkeys(said(warning.message) for warning in caught if isinstance(warning.message, Warning)):
        click.echo(f"note: {text}", err=True)


# --- text and JSON -------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, widest: int = WIDEST) -> str:
    """Columns of text under a header; the first ``left`` of them start at the left, the others end at the right."""
    lines = [[printable(cell, widest) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(lines[0]), "  ".join("─" * width for width in widths), *map(line, lines[1:])])


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(to_json(value))


def to_json(value: Any) -> str:
    """JSON of nested plain values; group labels become text and what is not finite becomes null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return dict(zip(distinct_names(list(value)), map(_plain, value.values()), strict=True))
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


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


# --- files ---------------------------------------------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Fail, before any work, where a picture cannot be drawn."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {str(path)!r}: the name must end in one of {', '.join(PICTURES)}.")
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'esvdfair[plots]'.")


def check_free(paths: Sequence[Path], *, force: bool, inputs: Sequence[Path | None]) -> None:
    """Fail, before any work, where a file cannot be written or would be overwritten; by the first rank, who writes."""
    if rank() > 0:
        return
    read = [path for path in inputs if path is not None and path.exists()]
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"cannot write to {str(path)!r}: it is a directory.")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}.")
        if path.exists() and any(path.samefile(other) for other in read):
            raise ValueError(f"{str(path)!r} is a file that is read; write the result elsewhere.")
        if path.exists() and not force:
            raise FileExistsError(f"{str(path)!r} is there already; --force replaces it.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("two results would go to one file; give each a name of its own.")


class Unprinted(Exception):
    """Files were written, but what was reached could not be printed."""


@contextmanager
def after_writing(paths: Sequence[Path]) -> Iterator[None]:
    """Print in this block what is done: a full disk behind stdout is no reason to say that nothing was written."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError) or not paths:
            raise
        names = ", ".join(map(str, paths))
        raise Unprinted(f"wrote {names}, but cannot print the result: {error.strerror or error}") from None


def only_first_rank() -> None:
    """End the command here on all ranks but the first, which goes on to write and print."""
    if rank() > 0:
        raise click.exceptions.Exit(0)
