"""What commands share: options, the rows and the model they are given; what they print, and where they write."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli._reading import AUDITED_ROWS as AUDITED_ROWS
from esvdfair.cli._reading import EVALUATED_ON as EVALUATED_ON
from esvdfair.cli._reading import EXPLAINED_ROWS as EXPLAINED_ROWS
from esvdfair.cli._reading import Reading as Reading
from esvdfair.cli._reading import header_of
from esvdfair.cli._reading import learning_and_judging as learning_and_judging
from esvdfair.cli._reading import load_model as load_model
from esvdfair.cli._reading import model_files as model_files
from esvdfair.cli._reading import of_large_groups as of_large_groups
from esvdfair.cli._reading import some_rows as some_rows
from esvdfair.cli._terminal import at_work as at_work
from esvdfair.cli._terminal import in_options as in_options
from esvdfair.cli._terminal import print_blocks as print_blocks
from esvdfair.cli._terminal import print_json as print_json
from esvdfair.cli._terminal import text_table as text_table
from esvdfair.cli._terminal import wrapped as wrapped
from esvdfair.files import whole_files
from esvdfair.models.base import TIME_LIMIT
from esvdfair.tables import Roles

if TYPE_CHECKING:
    pass

_PICTURES = (".png", ".svg", ".pdf")

Command = Callable[..., Any]
Option = Callable[[Command], Command]
FILE = click.Path(path_type=Path)


# --- options -------------------------------------------------------------------------------------------------------


def complete_columns(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Columns that a word may become, or its last part in a list A,B,C; of the first table among the words before."""
    before, comma, name = incomplete.rpartition(",")
    for word in ctx.args:  # an option without its value stops the parser, which leaves all words here
        if columns := header_of(Path(word)):
            return [before + comma + column for column in columns if column.startswith(name)]
    return []


_KINDS: dict[str, dict[str, Any]] = {
    "FILE": {"type": FILE},
    "COL": {"shell_complete": complete_columns},
    "A,B,C": {"shell_complete": complete_columns},
    "N": {"type": click.IntRange(min=1)},
}


def option(names: str, value: str | None, text: str, **more: Any) -> Option:
    """An option: its names, what stands for its value, which may say what that is, and what it is for."""
    return click.option(*names.split(), metavar=value, help=text, **(_KINDS.get(value or "", {}) | more))


def flag(names: str, text: str) -> Option:
    """An option that has no value."""
    return click.option(*names.split(), is_flag=True, help=text)


def target_ks_option(
    text: str = "Largest KS distance between groups that is allowed.", *, default: float | None = None
) -> Option:
    """The option --target-ks; with a default, a target that is always there."""
    return option("--target-ks", "KS", text, default=default, show_default=True, type=click.FloatRange(0, 1))


def layer_option(text: str) -> Option:
    """The option --layer."""
    return option("--layer", "LAYER", text, type=_index_or_name)


def _index_or_name(word: str) -> int | str:
    return int(word) if word.removeprefix("-").isdecimal() else word


json_option = flag("--json as_json", "Print JSON, for machines.")
force_option = flag("--force", "Overwrite existing files.")
seed_option = option("--seed", "N", "Random seed.", default=0, show_default=True, type=click.IntRange(min=0))
validation_option = option(
    "--validation", "FILE", "Rows that the model was not trained on, to choose among candidates."
)
test_option = option(
    "--test", "FILE", "Rows used for neither training nor choosing. Results are then evaluated on them."
)
max_mse_option = option(
    "--max-mse-increase",
    "PART",
    "Instead of --target-ks: the fairest candidate whose error increases by at most this part (0.05: 5%).",
    type=click.FloatRange(min=0),
)


def output_option(command: Command) -> Command:
    """What is to be known of a model: which output is the prediction, and how long a batch may take."""

    def set_limit(_: click.Context, __: click.Parameter, seconds: float | None) -> None:
        if seconds is not None:
            os.environ[TIME_LIMIT] = str(seconds)

    patience = option(
        "--model-timeout",
        "SECONDS",
        "Stop when the model takes longer for one batch of rows.  [default: 600]",
        type=click.FloatRange(min=0, min_open=True),
        callback=set_limit,
        expose_value=False,
    )
    return option("--output", "NAME", "Which output of the model is the prediction.")(patience(command))


def model_and_data(command: Command) -> Command:
    """The arguments MODEL and DATA, and what is to be known of the model."""
    model = click.argument("model", metavar="MODEL.onnx", type=FILE)
    return model(click.argument("data", metavar="DATA", type=FILE)(output_option(command)))


def _one_mark(_: click.Context, __: click.Parameter, mark: str | None) -> str | None:
    """One character; a tab may be written as a word, or as `\\t`."""
    mark = {"tab": "\t", "\\t": "\t"}.get(mark or "", mark)
    if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n'):
        raise click.BadParameter("one character is needed, such as ';', or `tab`.", param_hint="'--sep'")
    return mark


def table_options(
    *,
    sensitive: bool = True,
    target: str = "Column with the true value; without it, error means distance to the model's own predictions.",
) -> Option:
    """Options that say what the columns are; the command gets them as one ``reading``.

    A command that can do without a table is not ``sensitive``: it calls :func:`check_sensitive` where it has one.
    """
    options = [
        option("--sensitive", "COL", "Column with the group of each person. Repeat it to compare combinations.",
               multiple=True, required=sensitive),
        option("--target", "COL", target),
        option("--features", "A,B,C", "The model's inputs, in its order.  [default: the columns that the model names, "
               "else all other columns in file order]"),
        option("--weight", "COL", "Column with the sample weight."),
        option("--control", "COL", "Column to adjust for (job, region): people are compared within its strata. Repeat "
               "it for several. It stays an input of the model.", multiple=True),
        flag("--drop-missing", "Leave out rows with missing values."),
        flag("--missing-group", "Make a group of the people without a value in a sensitive column."),
        option("--min-group-rows", "N", "Set aside groups with fewer rows; they are named.",
               default=30, show_default=True, type=click.IntRange(min=2)),
        flag("--other", "Merge these groups into one, `other`, instead."),
        option("--sep", "MARK", "Separator of CSV fields, `tab` for tabs.  [default: found in the header]",
               callback=_one_mark),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def collected(*args: Any, sensitive: tuple[str, ...], features: str | None, **rest: Any) -> Any:
            names = None if features is None else tuple(name.strip() for name in features.split(","))
            target, weight, control = (rest.pop(name) for name in ("target", "weight", "control"))
            roles = Roles(sensitive, target, rest.get("predictions"), names, weight, control, rest.pop("row_id", None))
            options = {name: rest.pop(name) for name in ("drop_missing", "missing_group", "other", "sep")}
            fewest = rest.pop("min_group_rows")
            options["min_group_rows"] = fewest if options["other"] else 1
            return command(*args, reading=Reading(roles, options, fewest), **rest)

        return with_options(options, collected)

    return decorate


def check_sensitive(ctx: click.Context, reading: Reading, *tables: Path | None) -> None:
    """Fail, as click does, where tables are read and --sensitive is missing."""
    if any(tables) and not reading.roles.sensitive:
        missing = next(param for param in ctx.command.params if param.name == "sensitive")
        raise click.MissingParameter(ctx=ctx, param=missing)


def repair_options(*, one_method: bool = True, target_ks: float | None = None) -> Option:
    """What a repair aims at and how; the command gets them as ``options`` of ESVDFair, and which rows judge it."""
    aim = [
        target_ks_option(default=target_ks),
        option("--confidence", "PART", "Return only models that are certified to meet --target-ks; 0.9: with 90% "
               "confidence.", type=click.FloatRange(0, 1, min_open=True, max_open=True)),
        option("--certificate", None, "Bound of the certificate; hoeffding holds at every sample size and needs about "
               "three times as many rows.",
               type=click.Choice(["normal", "hoeffding"]), default="normal", show_default=True),
    ]  # fmt: skip
    which = [
        option("--method", None, "transport: match whole distributions. parity: match means and variances. exact: edit "
               "a hidden layer, then the last. paper: Algorithm 2 of the paper.",
               type=click.Choice(["transport", "parity", "exact", "paper"]), default="transport", show_default=True),
        layer_option("Layer that exact and paper edit: index or name.  [default: -2]"),
    ]  # fmt: skip
    rescale = flag("--rescale", "Give repaired predictions the mean and standard deviation of the original ones.")
    quick = flag("--quick", "Try few candidates, for a first look.")
    rows = option("--rows", "N", "Rows to keep of a large table, the same number of each large group; all others count "
                  "by their means and covariances.  [default: 160000]")  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def collected(*args: Any, quick: bool, rows: int | None, seed: int, **rest: Any) -> Any:
            from esvdfair.problem import Effort

            effort = Effort.quick() if quick else None
            effort = effort if rows is None else replace(effort or Effort(), rows=rows)

            names = ("target_ks", "confidence", "certificate", "rescale", "output", *("method", "layer") * one_method)
            options = {name: rest.pop(name) for name in names}
            options |= {"random_state": seed, "effort": effort}
            return command(*args, options=options, **rest)

        after = [rescale, validation_option, quick, rows, seed_option]
        return with_options([*aim, *which * one_method, *after], collected)

    return decorate


def with_options(options: Sequence[Option], command: Command) -> Command:
    """A command with options, the first on top of its help."""
    for each in reversed(options):
        command = each(command)
    return command


# --- files ---------------------------------------------------------------------------------------------------------


def check_plot(path: Path | None) -> None:
    """Fail, before any work, where a picture cannot be drawn."""
    if path is None:
        return
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"--plot {str(path)!r}: the name must end in one of {', '.join(_PICTURES)}.")
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'esvdfair[plots]'.")


def save_figure(figure: Any, path: Path, *, replace: bool) -> None:
    """Write a picture, whole or not at all, and the same bytes on every run."""
    from matplotlib import rc_context

    with whole_files(path, replace=replace) as places, rc_context({"svg.hashsalt": "esvdfair"}):
        figure.savefig(places[path], dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def check_free(paths: Sequence[Path], *, force: bool, inputs: Sequence[Path | None]) -> None:
    """Fail, before any work, where a file cannot be written or would be overwritten."""
    read = [path for path in inputs if path is not None and path.exists()]
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a directory. Name a file in it: {str(path / 'NAME')!r}")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}. Create it, or write elsewhere."
            )
        if path.exists():
            _check_overwriting(path, read, force)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("two results would go to one file. Give each a name of its own.")


def _check_overwriting(path: Path, read: Sequence[Path], force: bool) -> None:
    if any(path.samefile(other) for other in read):
        raise ValueError(f"{str(path)!r} is also read. Write the result to another file.")
    if not force:
        raise FileExistsError(f"{str(path)!r} exists. Use --force to overwrite it, or write to another file.")


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
