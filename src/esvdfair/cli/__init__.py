"""The command line. One file a command: parse, call one library function, print."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from esvdfair.cli._group import SuggestingGroup
from esvdfair.cli._ranks import run_on_ranks
from esvdfair.cli._words import in_options
from esvdfair.distributed import RankError

# Command -> its module, which is imported when it is needed and holds a click command of the same name.
_COMMANDS = {
    "audit": "esvdfair.cli.audit",
    "explain": "esvdfair.cli.explain",
    "curve": "esvdfair.cli.curve",
    "repair": "esvdfair.cli.repair",
    "moments": "esvdfair.cli.moments",
    "compare": "esvdfair.cli.compare",
    "demo": "esvdfair.cli.demo",
    "reproduce": "esvdfair.cli.reproduce",
}

BAD_INPUT = 2


class Commands(SuggestingGroup):
    """Commands loaded on demand; errors of the user are one line on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(_COMMANDS[cmd_name]), cmd_name)
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without ≤ still gets its table
        # A command that keeps a record of itself finds its words in ctx.obj.
        extra.setdefault("obj", list(sys.argv[1:] if args is None else args))

        def run() -> Any:
            return super(Commands, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        sys.exit(run_on_ranks(extra["obj"], run, _exit_code))


def _exit_code(command: Callable[[], Any]) -> int:
    """Run a command; what went wrong in terms that the user can act on becomes one line."""
    try:
        code = command()
    except click.ClickException as error:
        _say(error.format_message())
        return BAD_INPUT
    except click.Abort:
        _say("interrupted")
        return 130
    except (ValueError, TypeError, OSError, ImportError, RankError) as error:
        _say(in_options(str(error)))
        _drop_unwritten()
        return BAD_INPUT
    return code if isinstance(code, int) else 0


def _drop_unwritten() -> None:
    """Forget what a full disk did not take: Python would try again as it ends, and leave with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    click.echo(f"esvdfair: {' '.join(message.split())}", err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="esvdfair")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Repair a trained regressor so that its predictions are distributed alike in every sensitive group.

    \b
    Examples:
      esvdfair demo
      esvdfair audit model.onnx people.csv --sensitive sex --target income
      esvdfair repair model.onnx people.csv --sensitive sex --target income --target-ks 0.1 -o fair.onnx

    Exit codes: 0 done; 1 done, but the target was not met; 2 bad input, and nothing was written.

    \b
    Completion of commands, options and columns with the tab key; put the line for your shell into its start-up file:
      bash  eval "$(_ESVDFAIR_COMPLETE=bash_source esvdfair)"
      zsh   eval "$(_ESVDFAIR_COMPLETE=zsh_source esvdfair)"
      fish  _ESVDFAIR_COMPLETE=fish_source esvdfair | source
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
