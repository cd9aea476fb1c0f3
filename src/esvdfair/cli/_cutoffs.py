"""The options --cutoff, --select-share and --select, and the table of what is decided there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.cutoffs import Decisions, Select, decision_table, decisions

SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@dataclass(frozen=True)
class Cutoffs:
    """The cut-offs that a command was asked about."""

    cutoff: tuple[float, ...]
    select_share: tuple[float, ...]
    select: Select

    def __bool__(self) -> bool:
        return bool(self.cutoff or self.select_share)

    @property
    def each(self) -> list[dict[str, Any]]:
        """Options of :func:`esvdfair.decisions`, one mapping a cut-off."""
        asked = [{"cutoff": at} for at in self.cutoff] + [{"select_share": part} for part in self.select_share]
        return [of | {"select": self.select} for of in asked]

    def decide(self, before: Any, after: Any, **beside: Any) -> list[Decisions]:
        """What is decided at each of them."""
        return [decisions(before, after, **beside, **options) for options in self.each]


def cutoff_options(command: cli.Command) -> cli.Command:
    """The options; the command gets them as ``cutoffs``."""

    @wraps(command)
    def collected(
        *args: Any, cutoff: tuple[float, ...], select_share: tuple[float, ...], select: Select, **rest: Any
    ) -> Any:
        return command(*args, cutoffs=Cutoffs(cutoff, select_share, select), **rest)

    options = [
        cli.option("--cutoff", "X", "Show who is selected at this prediction: selection rates, adverse-impact ratios. "
                   "Repeat it for several.", multiple=True, type=float),
        cli.option("--select-share", "PART", "The same for the cut-off that selects this share of all people (0.2: one "
                   "in five). Repeat it for several.", multiple=True, type=SHARE),
        cli.option("--select", None, "Whether people at or above a cut-off are selected, or those at or below it.",
                   type=click.Choice(["above", "below"]), default="above", show_default=True),
    ]  # fmt: skip
    return cli.with_options(options, collected)


def show(found: Sequence[Decisions], attribute: str) -> None:
    """Print a table and the sentences of each cut-off."""
    for one in found:
        header, lines = decision_table(one, attribute)
        click.echo("\n" + cli.text_table(header, lines) + "\n")
        click.echo(cli.wrapped(f"{one.cutoff_words()} {one.ratio_words()}"))
