"""The options that commands share, each declared once; and checks of the files that commands are to write."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from esvdfair.cli._reading import Given, header_of
from esvdfair.files import whole_files
from esvdfair.models.base import TIME_LIMIT
from esvdfair.tables import Roles

Command = Callable[..., Any]
Option = Callable[[Command], Command]

FILE = click.Path(path_type=Path)
SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


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


def together(name: str, make: Callable[..., Any], *options: Option) -> Option:
    """Options that a command gets as one value ``name``, which is made of theirs; the first is on top of its help."""

    def decorate(command: Command) -> Command:
        known = len(getattr(command, "__click_params__", ()))

        @wraps(command)
        def collected(*args: Any, **given: Any) -> Any:
            made = make(**{own: given.pop(own) for own in names})
            return command(*args, **{name: made}, **given)

        for each in reversed(options):
            each(collected)
        names = [param.name for param in collected.__click_params__[known:] if param.expose_value]  # type: ignore
        return collected

    return decorate


# --- single options ------------------------------------------------------------------------------------------------


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


def _set_time_limit(_: click.Context, __: click.Parameter, seconds: float | None) -> None:
    if seconds is not None:
        os.environ[TIME_LIMIT] = str(seconds)


MODEL = click.argument("model", metavar="MODEL", type=FILE)
DATA = click.argument("data", metavar="DATA", type=FILE)
SEED = option("--seed", "N", "Random seed.", default=0, show_default=True, type=click.IntRange(min=0))
VALIDATION = option("--validation", "FILE", "Rows that the model was not trained on, to choose among candidates.")
TEST = option("--test", "FILE", "Rows used for neither training nor choosing. Results are then evaluated on them.")
METHOD = (
    option("--method", "METHOD", "transport: match whole distributions. parity: match means and variances. exact: "
           "edit a hidden layer, then the last. paper: Algorithm 2 of the paper.",
           type=click.Choice(["transport", "parity", "exact", "paper"]), default="transport", show_default=True),
    layer_option("Layer that exact and paper edit: index or name.  [default: -2]"),
)  # fmt: skip
json_option = flag("--json as_json", "Print JSON, for machines.")
force_option = flag("--force", "Overwrite existing files.")


# --- topics --------------------------------------------------------------------------------------------------------


def _one_mark(_: click.Context, __: click.Parameter, mark: str | None) -> str | None:
    """One character; a tab may be written as a word, or as `\\t`."""
    mark = {"tab": "\t", "\\t": "\t"}.get(mark or "", mark)
    if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n'):
        raise click.BadParameter("one character is needed, such as ';', or `tab`.", param_hint="'--sep'")
    return mark


def _model_and_table(files: Sequence[Path], predictions: str | None) -> dict[str, Path | None]:
    """Which file is the model, if one is needed, and which the table."""
    if len(files) == 1 and predictions is not None:
        return {"model": None, "data": files[0]}
    if predictions is not None:
        raise click.UsageError(f"--predictions needs one file, a table, and no model; got {len(files)} files.")
    if len(files) == 1:
        raise click.UsageError(
            f"got one file, {str(files[0])!r}. Add the model or the table that is missing (MODEL DATA), or name the "
            "column with predictions: --predictions COL"
        )
    if len(files) != 2:
        raise click.UsageError(f"got {len(files)} files. Pass a model and a table: MODEL DATA")
    return {"model": files[0], "data": files[1]}


def given_options(
    *own: Option,
    sensitive: bool = True,
    target: str = "Column with the true value; without it, error means distance to the model's own predictions.",
) -> Option:
    """The model, the tables, and what their columns are; the command gets them as one `Given`, ``given``.

    ``own`` are the command's: MODEL and DATA, or FILES, and others of `Given` and `Roles`.
    """

    def make(*, features: str | None, files: Sequence[Path] | None = None, **found: Any) -> Given:
        if files is not None:
            found |= _model_and_table(files, found["predictions"])
        columns = {name: found.pop(name) for name in Roles.__dataclass_fields__ if name in found}
        inputs = None if features is None else tuple(name.strip() for name in features.split(","))
        reading = {name: found.pop(name) for name in ("drop_missing", "missing_group", "other", "sep")}
        # Rows of small groups stay, unless they are merged, and count in the error.
        reading["min_group_rows"] = found["min_group_rows"] if reading["other"] else 1
        return Given(roles=Roles(**columns, features=inputs), reading=reading, **found)

    return together(
        "given",
        make,
        *own,
        option("--output", "NAME", "Which output of the model is the prediction."),
        option("--model-timeout", "SECONDS", "Stop when the model takes longer for one batch of rows.  [default: 600]",
               type=click.FloatRange(min=0, min_open=True), callback=_set_time_limit, expose_value=False),
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
    )  # fmt: skip


def repair_options(*own: Option, target_ks: float | None = None) -> Option:
    """What a repair aims at and how; the command gets it as ``options`` of ESVDFair."""

    def make(*, quick: bool, rows: int | None, **options: Any) -> dict[str, Any]:
        from esvdfair.problem import Effort

        effort = Effort.quick() if quick else None
        return options | {"effort": effort if rows is None else replace(effort or Effort(), rows=rows)}

    return together(
        "options",
        make,
        target_ks_option(default=target_ks),
        option("--confidence", "PART", "Return only models that are certified to meet --target-ks; 0.9: with 90% "
               "confidence.", type=SHARE),
        option("--certificate", "BOUND", "Bound of the certificate: normal, or hoeffding, which holds at every sample "
               "size and needs about three times as many rows.",
               type=click.Choice(["normal", "hoeffding"]), default="normal", show_default=True),
        *own,
        flag("--rescale", "Give repaired predictions the mean and standard deviation of the original ones."),
        flag("--quick", "Try few candidates, for a first look."),
        option("--rows", "N", "Rows to keep of a large table, the same number of each large group; all others count "
               "by their means and covariances.  [default: 160000]"),
    )  # fmt: skip


def cutoff_options(command: Command) -> Command:
    """The cut-offs that are asked about; the command gets the options of :func:`esvdfair.decisions` for each."""

    def cutoffs(cutoff: Sequence[float], select_share: Sequence[float], select: str) -> list[dict[str, Any]]:
        asked = [{"cutoff": at} for at in cutoff] + [{"select_share": share} for share in select_share]
        return [of | {"select": select} for of in asked]

    return together(
        "cutoffs",
        cutoffs,
        option("--cutoff", "X", "Show who is selected at this prediction: selection rates, adverse-impact ratios. "
               "Repeat it for several.", multiple=True, type=float),
        option("--select-share", "PART", "The same for the cut-off that selects this share of all people (0.2: one in "
               "five). Repeat it for several.", multiple=True, type=SHARE),
        option("--select", None, "Whether people at or above a cut-off are selected, or those at or below it.",
               type=click.Choice(["above", "below"]), default="above", show_default=True),
    )(command)  # fmt: skip


# --- files that are to be written ----------------------------------------------------------------------------------


def plot_option(text: str) -> Option:
    """The option --plot; fails, before any work, where a picture cannot be drawn."""

    def check(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {str(path)!r}: the name must end in one of .png, .svg, .pdf.")
        if path is not None and find_spec("matplotlib") is None:
            raise ImportError("--plot needs matplotlib: pip install 'esvdfair[plots]'.")
        return path

    return option("--plot", "FILE", f"{text}: .png, .svg or .pdf.", callback=check)


def save_figure(figure: Any, path: Path, *, replace: bool) -> None:
    """Write a picture, whole or not at all, and the same bytes on every run."""
    from matplotlib import rc_context

    with whole_files(path, replace=replace) as places, rc_context({"svg.hashsalt": "esvdfair"}):
        figure.savefig(places[path], dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def check_free(paths: Sequence[Path], *, force: bool, inputs: Sequence[Path | None] = ()) -> None:
    """Fail, before any work, where a file cannot be written or would be overwritten."""
    for path in paths:
        _check_writable(path, force, [other for other in inputs if other is not None and other.exists()])
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("two results would go to one file. Give each a name of its own.")


def _check_writable(path: Path, force: bool, inputs: Sequence[Path]) -> None:
    name = repr(str(path))
    if path.is_dir():
        raise IsADirectoryError(f"{name} is a directory. Name a file in it: {str(path / 'NAME')!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {name}: there is no folder {str(path.parent)!r}. Create it, or write elsewhere."
        )
    if path.exists() and any(path.samefile(other) for other in inputs):
        raise ValueError(f"{name} is also read. Write the result to another file.")
    if path.exists() and not force:
        raise FileExistsError(f"{name} exists. Use --force to overwrite it, or write to another file.")
