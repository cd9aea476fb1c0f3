"""What commands share: options, the rows and the model they are given; what they print, and where they write."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pandas as pd

from esvdfair import text
from esvdfair.cli._terminal import at_work as at_work
from esvdfair.cli._terminal import in_options as in_options
from esvdfair.cli._terminal import print_blocks as print_blocks
from esvdfair.cli._terminal import print_json as print_json
from esvdfair.cli._terminal import text_table as text_table
from esvdfair.cli._terminal import wrapped as wrapped
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.files import whole_files
from esvdfair.models.base import TIME_LIMIT
from esvdfair.tables import Progress, Roles, TableBatches, TableRows, open_table
from esvdfair.text import some_names

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter

AUDITED_ROWS = 1_000_000
"""Rows that a command holds at once to measure predictions; a sample stands for a larger file."""
EXPLAINED_ROWS = 100_000
"""The same for commands that run many methods, or every layer, over them."""
EVALUATED_ON = text.EVALUATED_ON | {"validation": "the rows of --validation"}
_PICTURES = (".png", ".svg", ".pdf")

Command = Callable[..., Any]
Option = Callable[[Command], Command]
FILE = click.Path(path_type=Path)


# --- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How tables are read: the roles of their columns and what happens to missing values."""

    roles: Roles
    options: dict[str, Any]
    min_group_rows: int = 30

    def table(
        self, path: Path, *models: "ModelAdapter", min_groups: int = 2, progress: Progress | None = None
    ) -> TableBatches:
        """The rows of a file of any size; an error lists both sides where one of the models takes other columns."""

        def check_width(names: Sequence[str]) -> None:
            apart = ", ".join(f"{name} ({role})" for name, role in self.roles.named().items() if name not in names)
            for width in (model.n_features for model in models):
                if width is not None and width != len(names):
                    raise ValueError(
                        f"the model takes {width} columns and {str(path)!r} gives it {len(names)}: "
                        f"{some_names(names, 30)}. Not given to it: {apart or 'none'}. Name the model's inputs, in its "
                        "order: --features A,B,C"
                    )

        table = TableBatches(
            path, self.roles, **self.options, min_groups=min_groups, check_inputs=check_width, progress=progress
        )
        for model in models:
            model.predict(table.scan.head)  # what else the model does not take, before any long work
        return table

    def tables(
        self, data: Path, validation: Path | None, *models: "ModelAdapter", progress: Progress | None = None
    ) -> tuple[TableBatches, TableBatches | None]:
        """The rows that fit and those that judge, if they have a file; their inputs are the same columns, by name."""
        rows = self.table(data, *models, progress=progress)
        return rows, None if validation is None else self.like(rows).table(validation, progress=progress)

    def of_large_groups(self) -> "Reading":
        """Without the rows of groups that are too small to compare."""
        return replace(self, options=self.options | {"min_group_rows": self.min_group_rows})

    def like(self, rows: TableBatches) -> "Reading":
        """For another table whose inputs are the same columns, by name."""
        return self.with_inputs(rows.inputs)

    def with_inputs(self, names: Sequence[str]) -> "Reading":
        """For tables whose inputs are these columns, where they are known."""
        return replace(self, roles=replace(self.roles, features=tuple(names))) if names else self


def some_rows(table: TableBatches, most: int, *, seed: int) -> TableRows:
    """The rows of a table in memory; of a large one a sample, and a note says so."""
    rows = table.sample(most, seed=seed)
    if len(rows) < table.scan.rows:
        warnings.warn(
            f"{str(table.path)!r} has {table.scan.rows:,} rows; what needs them in memory used a random sample of "
            f"{len(rows):,}.",
            ESVDFairWarning,
            stacklevel=2,
        )
    return rows


def learning_and_judging(rows: TableBatches, judging: TableBatches | None, seed: int) -> tuple[TableRows, TableRows]:
    """Rows in memory to learn from and to judge on: those of two tables, or those that a repair would hold out."""
    from esvdfair.batches import held_out
    from esvdfair.estimator import ESVDFair

    some = some_rows(rows, EXPLAINED_ROWS, seed=seed)
    if judging is not None:
        return some, some_rows(judging, EXPLAINED_ROWS, seed=seed)
    out = held_out(ESVDFair(None).validation_fraction, seed)(some.X.index.to_numpy(dtype=np.int64))
    return some.take(~out), some.take(out)


def of_large_groups(learn: TableRows, judge: TableRows, least: int) -> tuple[TableRows, TableRows]:
    """The rows of the groups that have at least so many rows on both sides; a note names the others.

    Raises
    ------
    ValueError
        Fewer than two groups are left.
    """
    sizes = [part.groups.value_counts() for part in (learn, judge)]
    rows = sizes[0].add(sizes[1], fill_value=0).astype(int)
    large = [key for key in rows.index if min(found.get(key, 0) for found in sizes) >= least]
    small = {key if len(key) > 1 else key[0]: int(rows[key]) for key in rows.index if key not in large}
    if len(large) < 2:
        raise InputError(
            f"fewer than two groups have `min_group_rows={least}` training rows, and as many validation rows. Pass "
            "more rows with `validation`, or merge groups."
        )
    if small:
        warnings.warn(ESVDFairWarning(f"{text.too_small(small)} They are left out."), stacklevel=2)
    parts = [part.take(pd.MultiIndex.from_frame(part.groups).isin(large)) for part in (learn, judge)]
    return parts[0], parts[1]


# --- the model -----------------------------------------------------------------------------------------------------


_TORCH = "torch.onnx.export(model.eval(), (example_inputs,), 'model.onnx', dynamo=True)"
_SKLEARN = "skl2onnx.to_onnx(model, X[:1]).SerializeToString(), written to 'model.onnx'"
_KERAS = "model.export('model.onnx', format='onnx')"
_EXPORTS = (
    dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".safetensors"), _TORCH)
    | dict.fromkeys((".pkl", ".pickle", ".joblib", ".skops"), _SKLEARN)
    | dict.fromkeys((".h5", ".keras"), _KERAS)
)
"""How a model comes to ONNX, by the end of its file's name."""


def load_model(path: Path, output: str | None) -> "ModelAdapter":
    """Read a model.

    Raises
    ------
    ValueError
        The file is no ONNX regressor; of a table the error says that the model comes first, of a model in another
        format how to export it.
    """
    from esvdfair.models import adapt

    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is a pipe or a device; save the model to a file first.")
    try:
        return adapt(path, output=output)
    except ValueError:
        if how := _EXPORTS.get(path.suffix.lower()):
            raise ValueError(
                f"{str(path)!r} is not an ONNX model. The command line takes ONNX alone, as other formats can run code "
                f"when they are opened; export it: {how}"
            ) from None
        if len(_columns(path)) > 1:
            raise ValueError(
                f"{str(path)!r} is not an ONNX model but a table; the model comes first: MODEL.onnx DATA"
            ) from None
        raise


def model_files(path: Path) -> list[Path]:
    """A model file and the files with its external data."""
    from esvdfair.models.tree_files import tree_format

    if tree_format(path) is not None:
        return [path]
    from esvdfair.models.onnx_files import external_files

    return [path, *(path.parent / name for name in external_files(path))]


def _columns(path: Path) -> list[str]:
    """Columns of a table; none where it is no table."""
    try:
        return open_table(path).columns if path.is_file() else []
    except (OSError, ValueError, ImportError):
        return []


# --- options -------------------------------------------------------------------------------------------------------


def complete_columns(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Columns that a word may become, or its last part in a list A,B,C; of the first table among the words before."""
    before, comma, name = incomplete.rpartition(",")
    for word in ctx.args:  # an option without its value stops the parser, which leaves all words here
        if columns := _columns(Path(word)):
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
    text: str = "Largest KS distance between groups to aim at.", *, default: float | None = None
) -> Option:
    """The option --target-ks; with a default, a target that is always there."""
    return option("--target-ks", "KS", text, default=default, show_default=True, type=click.FloatRange(0, 1))


def layer_option(text: str) -> Option:
    """The option --layer: an index when it is a whole number, else a name."""

    def layer(word: str) -> int | str:
        return int(word) if word.removeprefix("-").isdecimal() else word

    return option("--layer", "LAYER", text, type=layer)


json_option = flag("--json as_json", "Print JSON, for machines.")
force_option = flag("--force", "Replace files that are there.")
seed_option = option("--seed", "N", "Of all that is drawn.", default=0, show_default=True, type=click.IntRange(min=0))
validation_option = option("--validation", "FILE", "Rows that the model was not trained on, to choose and to judge.")
test_option = option(
    "--test", "FILE", "Rows that neither fit nor choose: what is printed and reported is then about them."
)
max_mse_option = option(
    "--max-mse-increase",
    "PART",
    "Instead of --target-ks: the fairest candidate whose error grows by at most this part (0.05: five per cent).",
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
        "How long the model may take for a batch of rows before it is given up, 600 unless said otherwise.",
        type=click.FloatRange(min=0, min_open=True),
        callback=set_limit,
        expose_value=False,
    )
    return option("--output", "NAME", "Which output of the model is the prediction, if several.")(patience(command))


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
        option("--sensitive", "COL", "Column with the group of each person; repeat it for several, whose combinations "
               "become the groups.", multiple=True, required=sensitive),
        option("--target", "COL", target),
        option("--features", "A,B,C", "The model's inputs in its order. Default: all other columns in file order; a "
               "sensitive column is an input only when named here."),
        option("--weight", "COL", "Column that says how much each row counts."),
        option("--control", "COL", "Column that people may rightly differ in (job, region): gaps are adjusted for it. "
               "Repeat it for several. It stays an input of the model.", multiple=True),
        flag("--drop-missing", "Leave out rows with a missing value."),
        flag("--missing-group", "People without a value of a sensitive column become a group of their own."),
        option("--min-group-rows", "N", "Do not compare groups with fewer rows; a note names them.",
               default=30, show_default=True, type=click.IntRange(min=2)),
        flag("--other", "Join these groups to one, `other`, instead."),
        option("--sep", "MARK", "What separates the fields of CSV; `tab` for tabs.  [default: the header tells]",
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
        option("--confidence", "PART", "Take only what is certified to keep --target-ks; 0.9: wrongly in at most one "
               "of ten samples.", type=click.FloatRange(0, 1, min_open=True, max_open=True)),
        option("--certificate", None, "The bound behind it; hoeffding holds at every sample size and needs about three "
               "times as many rows.", type=click.Choice(["normal", "hoeffding"]), default="normal", show_default=True),
    ]  # fmt: skip
    which = [
        option("--method", None, "transport: whole distributions, last layer. parity: means and variances, last layer. "
               "exact: a hidden layer, then the last. paper: the paper's Algorithm 2.",
               type=click.Choice(["transport", "parity", "exact", "paper"]), default="transport", show_default=True),
        layer_option("Layer that exact and paper edit: index or name.  [default: -2]"),
    ]  # fmt: skip
    quick = flag("--quick", "Try few candidates instead of many: for a first look.")
    rows = option("--rows", "N", "Rows to keep of a large table, the same number of each large group; all others count "
                  "by their means and covariances.  [default: 160000]")  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def collected(*args: Any, quick: bool, rows: int | None, seed: int, **rest: Any) -> Any:
            from esvdfair.problem import Effort

            effort = Effort.quick() if quick else None
            effort = effort if rows is None else replace(effort or Effort(), rows=rows)

            names = ("target_ks", "confidence", "certificate", "output", *("method", "layer") * one_method)
            options = {name: rest.pop(name) for name in names}
            options |= {"random_state": seed, "effort": effort}
            return command(*args, options=options, **rest)

        return with_options([*aim, *which * one_method, validation_option, quick, rows, seed_option], collected)

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
