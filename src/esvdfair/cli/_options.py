"""The options that commands share, each declared once; the models and tables that they name; files to write."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from glob import glob, has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from esvdfair import text
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.files import whole_files
from esvdfair.models.base import TIME_LIMIT
from esvdfair.table_files import open_table
from esvdfair.tables import Roles, TableBatches, TableRows
from esvdfair.text import quoted, some_names

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter
    from esvdfair.summary import Summary

Command = Callable[..., Any]
Option = Callable[[Command], Command]

FILE = click.Path(path_type=Path)
SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
SUMMARIES = "A summary file, or a pattern in quotation marks ('*.summary')."
EVALUATED_ON = text.EVALUATED_ON | {"validation": "rows of --validation"}
HELD_ROWS = 100_000
"""Rows of a table that a command holds in memory; a sample stands for a larger file."""


def complete_columns(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Columns that a word may become, or its last part in a list A,B,C; of the first table among the words before."""
    before, comma, name = incomplete.rpartition(",")
    for word in ctx.args:  # an option without its value stops the parser, which leaves all words here
        if columns := header_of(Path(word)):
            return [before + comma + column for column in columns if column.startswith(name)]
    return []


def _index_or_name(word: str) -> int | str:
    return int(word) if word.removeprefix("-").isdecimal() else word


_KINDS: dict[str, dict[str, Any]] = {
    "FILE": {"type": FILE},
    "COL": {"shell_complete": complete_columns},
    "A,B,C": {"shell_complete": complete_columns},
    "N": {"type": click.IntRange(min=1)},
    "KS": {"type": click.FloatRange(0, 1)},
    "LAYER": {"type": _index_or_name},
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
    return option("--target-ks", "KS", text, default=default, show_default=True)


def _set_time_limit(_: click.Context, __: click.Parameter, seconds: float | None) -> None:
    if seconds is not None:
        os.environ[TIME_LIMIT] = str(seconds)


def _one_mark(_: click.Context, __: click.Parameter, mark: str | None) -> str | None:
    """One character; a tab may be written as a word, or as `\\t`."""
    mark = {"tab": "\t", "\\t": "\t"}.get(mark or "", mark)
    if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n'):
        raise click.BadParameter("one character is needed, such as ';', or `tab`.", param_hint="'--sep'")
    return mark


MODEL = click.argument("model", metavar="MODEL", type=FILE)
DATA = click.argument("data", metavar="DATA", type=FILE)
SEED = option("--seed", "N", "Random seed.", default=0, show_default=True, type=click.IntRange(min=0))
VALIDATION = option("--validation", "FILE", "Rows that the model was not trained on, to choose among candidates.")
TEST = option("--test", "FILE", "Rows used for neither training nor choosing. Results are then evaluated on them.")
METHOD = (
    option("--method", "METHOD", "transport: match whole distributions. parity: match means and variances. exact: "
           "edit a hidden layer, then the last. paper: Algorithm 2 of the paper.",
           type=click.Choice(["transport", "parity", "exact", "paper"]), default="transport", show_default=True),
    option("--layer", "LAYER", "Layer that exact and paper edit: index or name.  [default: -2]"),
)  # fmt: skip
json_option = flag("--json as_json", "Print JSON, for machines.")
force_option = flag("--force", "Overwrite existing files.")


# --- topics --------------------------------------------------------------------------------------------------------


def given_options(
    *own: Option,
    sensitive: bool = True,
    target: str = "Column with the true value; without it, error means distance to the model's own predictions.",
) -> Option:
    """The model, the tables and what their columns are, as one `Given`; ``own`` has the options of one command."""

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
        option("--sensitive", "COL", "Column with the group of each person. Repeat it to compare combinations.",
               multiple=True, required=sensitive),
        option("--target", "COL", target),
        *own,
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
        option("--output", "NAME", "Which output of the model is the prediction."),
        option("--model-timeout", "SECONDS", "Stop when the model takes longer for one batch of rows.  [default: 600]",
               type=click.FloatRange(min=0, min_open=True), callback=_set_time_limit, expose_value=False),
    )  # fmt: skip


def _model_and_table(files: Sequence[Path], predictions: str | None) -> dict[str, Path | None]:
    """Which file is the model, if one is needed, and which the table."""
    if predictions is not None:
        if len(files) != 1:
            raise click.UsageError(f"--predictions needs one file, a table, and no model; got {len(files)} files.")
        return {"model": None, "data": files[0]}
    if len(files) == 1:
        raise click.UsageError(
            f"got one file, {str(files[0])!r}. Add the model or the table that is missing (MODEL DATA), or name the "
            "column with predictions: --predictions COL"
        )
    if len(files) != 2:
        raise click.UsageError(f"got {len(files)} files. Pass a model and a table: MODEL DATA")
    return {"model": files[0], "data": files[1]}


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
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a directory. Name a file in it: {str(path / 'NAME')!r}")
        if not path.parent.is_dir():
            where = f"there is no folder {str(path.parent)!r}. Create it, or write elsewhere."
            raise FileNotFoundError(f"cannot write {str(path)!r}: {where}")
    read = [path for path in inputs if path and path.exists()]
    for path in filter(Path.exists, paths):
        if any(map(path.samefile, read)):
            raise ValueError(f"{str(path)!r} is also read. Write the result to another file.")
        if not force:
            raise FileExistsError(f"{str(path)!r} exists. Use --force to overwrite it, or write to another file.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("two results would go to one file. Give each a name of its own.")


# --- models and tables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The model and the tables that a command is given, and how they are to be read."""

    model: Any  # Path; None where a column has the predictions
    data: Path | None
    roles: Roles
    min_group_rows: int
    reading: Mapping[str, Any]  # options of `TableBatches`
    validation: Path | None = None
    test: Path | None = None
    output: str | None = None
    seed: int = 0

    @property
    def attribute(self) -> str:
        """The sensitive columns, for people."""
        return ", ".join(self.roles.sensitive)

    @property
    def fitting(self) -> dict[str, Any]:
        """What `ESVDFair` is told of this."""
        return {"output": self.output, "min_group_rows": self.min_group_rows, "random_state": self.seed}

    @property
    def files(self) -> list[Path | None]:
        """All files that are read."""
        return [*([] if self.model is None else model_files(self.model)), self.data, self.validation, self.test]

    def of_large_groups(self) -> "Given":
        """Without the rows of groups that are too small to compare."""
        return replace(self, reading={**self.reading, "min_group_rows": self.min_group_rows})

    def load(self, path: Path | None = None) -> "ModelAdapter":
        """The model, or another one."""
        from esvdfair.models import adapt

        path = path or self.model
        check_there(path)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{str(path)!r} is a pipe or a device; save the model to a file first.")
        try:
            return adapt(path, output=self.output)
        except ValueError:
            from esvdfair.cli._misfit import other_format

            if words := other_format(path, header_of(path)):
                raise ValueError(words) from None
            raise

    def tables(
        self, *models: "ModelAdapter", inputs: Sequence[str] = (), **options: Any
    ) -> "tuple[Any, TableBatches | None, TableBatches | None]":
        """Training, validation and test rows, where they have a file; their inputs are the same columns, by name."""
        found = []
        for path in (self.data, self.validation, self.test):
            found.append(None if path is None else self._table(path, models, inputs, options))
            inputs = inputs or (found[-1].inputs if found[-1] is not None else ())
        return found[0], found[1], found[2]

    def _table(
        self, path: Path, models: "Sequence[ModelAdapter]", inputs: Sequence[str], options: Mapping[str, Any]
    ) -> TableBatches:
        """The rows of a file of any size; an error says what to type where one of the models takes other columns."""
        check_there(path)
        if not self.roles.sensitive:
            raise click.UsageError("Missing option '--sensitive': the column with the group of each person.")
        roles = replace(self.roles, features=tuple(inputs) or self.roles.features or _inputs_by_name(path, models))

        def check_width(names: Sequence[str]) -> None:
            for model in models:
                if model.n_features not in (None, len(names)):
                    from esvdfair.cli._misfit import wrong_width

                    raise ValueError(wrong_width(path, names, model, roles, self.reading["sep"]))

        gaps = bool(models) and all(model.takes_missing for model in models)
        table = TableBatches(path, roles, check_inputs=check_width, missing_inputs=gaps, **self.reading, **options)
        for model in models if len(table.scan.head) else ():
            model.predict(table.scan.head)  # what else the model does not take, before any long work
        return table


def model_files(path: Path) -> list[Path]:
    """A model file and the files with its external data."""
    from esvdfair.models.tree_boosters import tree_format

    if tree_format(path) is not None:
        return [path]
    from esvdfair.models.onnx_files import external_files

    return [path, *(path.parent / name for name in external_files(path))]


def load_summaries(patterns: Sequence[str]) -> "dict[Path, Summary]":
    """Read summary files, named one by one or by patterns."""
    from esvdfair.summary import Summary

    paths: list[Path] = []
    for pattern in patterns:
        matched = sorted(glob(pattern)) if has_magic(pattern) and not Path(pattern).exists() else [pattern]
        if not matched:
            raise FileNotFoundError(f"no file matches {pattern!r}.")
        paths += map(Path, matched)
    for path in paths:
        check_there(path)
    return {path: Summary.load(path) for path in paths}


def some_rows(table: TableBatches, seed: int, most: int | None = None) -> TableRows:
    """The rows of a table in memory; of a large one a sample, and a note says so."""
    rows = table.sample(most or HELD_ROWS, seed=seed)
    if len(rows) < table.scan.rows:
        warnings.warn(
            f"{str(table.path)!r} has {table.scan.rows:,} rows; what needs them in memory used a random sample of "
            f"{len(rows):,}.",
            ESVDFairWarning,
            stacklevel=2,
        )
    return rows


def split_rows(rows: TableBatches, apart: TableBatches | None, seed: int) -> tuple[TableRows, TableRows]:
    """Training and validation rows in memory: those of two tables, or those that a repair would hold out of one."""
    from esvdfair.batches import held_out
    from esvdfair.estimator import ESVDFair

    some = some_rows(rows, seed)
    if apart is not None:
        return some, some_rows(apart, seed)
    out = held_out(ESVDFair(None).validation_fraction, seed)(some.X.index.to_numpy(dtype=np.int64))
    return some.take(~out), some.take(out)


def header_of(path: Path) -> list[str]:
    """Columns of a table; none where it is no table."""
    try:
        return open_table(path).columns if path.is_file() else []
    except (OSError, ValueError, ImportError):
        return []


def check_there(path: Path) -> None:
    """Fail where there is no such file, and suggest the name of one that is."""
    if path.exists() or "://" in str(path) or str(path).split("/")[0].endswith(":"):  # a Path has one slash of a URI
        return
    near = get_close_matches(path.name, [file.name for file in path.parent.glob("*")], n=1)
    hint = f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
    raise FileNotFoundError(f"there is no file {str(path)!r}.{hint}")


def _inputs_by_name(path: Path, models: "Sequence[ModelAdapter]") -> tuple[str, ...] | None:
    """The columns that a file of trees names as its inputs, where the table has them; LightGBM writes _ for spaces."""
    for model in models:
        if names := getattr(getattr(model, "library", None), "columns", None):
            break
    else:
        return None
    columns = {name.replace(" ", "_"): name for name in header_of(path)}
    missing = [name for name in names if name.replace(" ", "_") not in columns]
    if not missing:
        return tuple(columns[name.replace(" ", "_")] for name in names)
    if len(missing) < len(names):
        lacking = some_names([quoted(name) for name in missing], 5)
        raise ValueError(
            f"{str(path)!r} has no column {lacking}, which the model takes. Name the columns that are its inputs, in "
            "its order: --features A,B,C"
        )
    return None
