"""The command line. A command parses, calls one library function, prints."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from typing import Any
from zipfile import BadZipFile

import click

from esvdfair.cli._terminal import Unprinted, in_options, print_message

_COMMANDS = ("audit", "explain", "curve", "repair", "compare", "summarise", "show", "demo", "doctor")
_ELSEWHERE = {"show": ("summarise", "show"), "summarise": ("summarise", "summarise_command")}
"""Command -> its module and its name there, where these are others than its own."""

BAD_INPUT = 2
NOT_PRINTED = 3
OUR_FAULT = 70
INTERRUPTED = 130
CLOSED_PIPE = 141  # as of a program that SIGPIPE ends; 1 would mean that a target was not met


class Commands(click.Group):
    """Commands loaded on demand; errors of the user are one line on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _ELSEWHERE.get(cmd_name, (cmd_name, cmd_name))
        command: click.Command = getattr(import_module(f"esvdfair.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in _COMMANDS:
            near = get_close_matches(args[0].lower(), _COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_COMMANDS)}."
            ctx.fail(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without ≤ still gets its table
        # A command that keeps a record of itself finds its words in ctx.obj.
        extra.setdefault("obj", list(sys.argv[1:] if args is None else args))
        run = partial(super().main, args, *more, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_exit_code(run))


def _exit_code(command: Callable[[], Any]) -> int:
    """Run a command; what went wrong in terms that the user can act on becomes one line."""
    try:
        code = command()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit:  # click's, when whoever read the output has closed it
        code, message = CLOSED_PIPE, ""
    except Exception as error:
        code, message = _explained(error)
    if message:
        print_message(f"esvdfair: {message}")
    _drop_unwritten()
    return code


def _explained(error: Exception) -> tuple[int, str]:
    """The exit code, and what went wrong."""
    if isinstance(error, click.Abort) or _is_interrupt(error):
        return INTERRUPTED, "interrupted"
    if isinstance(error, click.ClickException):
        return BAD_INPUT, _usage(error)
    if isinstance(error, Unprinted):
        return NOT_PRINTED, str(error)
    if isinstance(error, MemoryError | RecursionError):
        what = f"{type(error).__name__} {error}".strip()
        return BAD_INPUT, f"this needs more memory than there is ({what}); is a file damaged?"
    if isinstance(error, ValueError | TypeError | OSError | ImportError | BadZipFile):
        return BAD_INPUT, in_options(error)
    traceback.print_exception(error)  # a fault of ours, for a report; 1 would mean that a target was not met
    return OUR_FAULT, ""


def _usage(error: click.ClickException) -> str:
    """What click says; of something that is missing also what it is."""
    if not isinstance(error, click.MissingParameter):
        return error.format_message()
    what = f": {error.param.help}" if isinstance(error.param, click.Option) and error.param.help else "."
    more = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
    return error.format_message().rstrip(".") + what + more


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: an extension module that is being loaded makes an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _drop_unwritten() -> None:
    """Forget what a full disk did not take: Python would try again as it ends, and leave with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(package_name="esvdfair")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Repair a trained regression model so that its predictions are distributed alike in every sensitive group.

    \b
    Examples:
      esvdfair demo
      esvdfair audit model.onnx people.csv --sensitive sex --target income
      esvdfair repair model.onnx people.csv --sensitive sex --target income \\
        --target-ks 0.1 -o fair.onnx

    Exit codes: 0 done; 1 done, but the target was not met; 2 bad input, nothing was written; 3 done and
    written, but the result could not be printed.

    To complete commands, options and columns with the tab key, add a line to the start-up file of your shell:

    \b
      bash  eval "$(_ESVDFAIR_COMPLETE=bash_source esvdfair)"
      zsh   eval "$(_ESVDFAIR_COMPLETE=zsh_source esvdfair)"
      fish  _ESVDFAIR_COMPLETE=fish_source esvdfair | source
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
