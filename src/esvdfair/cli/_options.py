"""Arguments and options that commands share."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from esvdfair.cli._inputs import Reading
from esvdfair.tables import Roles, open_table

Command = Callable[..., Any]
FILE = click.Path(path_type=Path)


def complete_columns(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Columns that a word may become, or its last part in a list A,B,C; of the first table among the words before."""
    before, comma, name = incomplete.rpartition(",")
    for word in ctx.args:  # an option without its value stops the parser, which leaves all words here
        try:
            columns = open_table(word).columns if Path(word).is_file() else []
        except (OSError, ValueError, ImportError):
            continue  # the model, for one
        if columns:
            return [before + comma + column for column in columns if column.startswith(name)]
    return []


def table_options(
    *,
    target: str = "Column with the true value; without it, error means distance to the model's own predictions.",
    sensitive_required: bool = True,
) -> Callable[[Command], Command]:
    """Options that say what the columns are; the command gets them as one ``reading``."""
    options: list[Callable[[Command], Command]] = [
        click.option("--sensitive", multiple=True, required=sensitive_required, metavar="COL",
                     shell_complete=complete_columns, help="Column with the group of each person; repeat it for "
                     "several, whose combinations become the groups."),
        click.option("--target", metavar="COL", shell_complete=complete_columns, help=target),
        click.option("--features", metavar="A,B,C", shell_complete=complete_columns, help="The model's inputs in its "
                     "order. Default: all other columns in file order; a sensitive column is an input only when named "
                     "here."),
        click.option("--drop-missing", is_flag=True, help="Leave out rows with a missing value."),
        click.option("--missing-group", is_flag=True, help="People without a value of a sensitive "
                     "column become a group of their own."),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def collected(
            *args: Any,
            sensitive: tuple[str, ...],
            target: str | None,
            features: str | None,
            drop_missing: bool,
            missing_group: bool,
            **rest: Any,
        ) -> Any:
            names = None if features is None else tuple(name.strip() for name in features.split(","))
            roles = Roles(sensitive, target, rest.get("predictions"), names)
            return command(*args, reading=Reading(roles, drop_missing, missing_group), **rest)

        return _with(options, collected)

    return decorate


def model_and_data(command: Command) -> Command:
    """The arguments MODEL and DATA, and which output of the model is meant."""
    return _with(
        [
            click.argument("model", metavar="MODEL.onnx", type=FILE),
            click.argument("data", metavar="DATA", type=FILE),
            output_option,
        ],
        command,
    )


output_option = click.option(
    "--output", metavar="NAME", help="Which output of the model is the prediction, if several."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
seed_option = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="Of all that is drawn."
)
_method_option = click.option(
    "--method",
    type=click.Choice(["transport", "parity", "exact", "paper"]),
    default="transport",
    show_default=True,
    help="transport: whole distributions, last layer. parity: means and variances, last layer. exact: a hidden layer, "
    "then the last. paper: the paper's Algorithm 2.",
)
validation_option = click.option(
    "--validation", metavar="FILE", type=FILE, help="Rows that the model was not trained on, to choose and to judge."
)
force_option = click.option("--force", is_flag=True, help="Replace files that are there.")


def target_ks_option(
    text: str = "Largest KS distance between groups to aim at.", *, default: float | None = None
) -> Callable[[Command], Command]:
    """The option --target-ks; with a default, a target that is always there."""
    return click.option(
        "--target-ks", default=default, show_default=True, type=click.FloatRange(0, 1), metavar="KS", help=text
    )


def layer_option(text: str) -> Callable[[Command], Command]:
    """The option --layer: an index when it is a whole number, else a name."""
    return click.option("--layer", metavar="LAYER", type=_layer_of, help=text)


def repair_options(command: Command) -> Command:
    """What a repair aims at, how, and which rows judge it."""
    return _with(
        [
            target_ks_option(),
            _method_option,
            layer_option("Layer that exact and paper edit: index or name.  [default: -2]"),
            validation_option,
        ],
        command,
    )


def _with(options: list[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def _layer_of(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text
