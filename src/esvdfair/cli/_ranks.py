"""A command on the ranks that torchrun has started: the long work is shared, the first rank writes and prints."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from typing import Any

import click

from esvdfair.distributed import RankError, all_gather, process_group, rank, started_by_torchrun, together

_SHARED = (("repair",), ("curve",), ("moments", "collect"))
"""Commands whose work the ranks share; any other runs on the first rank alone."""


def run_on_ranks(
    words: Sequence[str], command: Callable[[], Any], exit_code: Callable[[Callable[[], Any]], int]
) -> int:
    """Run a command, shared by the ranks where there are several, and give its exit code, the same on all of them.

    Parameters
    ----------
    words : of the command line
    command : runs the command and gives its code, or raises
    exit_code : runs a command and turns what it raises into a line on stderr and a code
    """
    if not started_by_torchrun():
        return exit_code(command)
    if not any(tuple(words[: len(name)]) == name for name in _SHARED):
        return exit_code(command) if os.environ["RANK"] == "0" else 0

    def shared() -> Any:
        with together():
            return command()

    with process_group(), ExitStack() as stack:
        if rank() > 0:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        code = exit_code(shared)
        with suppress(RankError):  # a rank is gone: there is no code to wait for
            # torchrun ends all ranks when one leaves with an error, so none does before the first has had its say.
            code = max(all_gather(code))
    return code


def only_first_rank() -> None:
    """End the command here on all ranks but the first, which goes on to write and print."""
    if rank() > 0:
        raise click.exceptions.Exit(0)
