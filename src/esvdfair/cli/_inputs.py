"""What commands are given: the options that they share, the rows of tables, the model."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from esvdfair.exceptions import ESVDFairWarning
from esvdfair.tables import Progress, Roles, TableBatches, TableRows, open_table
from esvdfair.text import some_names

if TYPE_CHECKING:
    from esvdfair.models.onnx import OnnxAdapter

AUDITED_ROWS = 1_000_000
"""Rows that a command holds at once to measure predictions; a sample stands for a larger file."""
EXPLAINED_ROWS = 100_000
"""The same for commands that run many methods, or every layer, over them."""
_SHOWN_BYTES = 32 * 2**20  # files of fewer are read before a bar is seen

Command = Callable[..., Any]
Option = Callable[[Command], Command]
FILE = click.Path(path_type=Path)


# --- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How tables are read: the roles of their columns and what happens to missing values."""

    roles: Roles
    options: dict[str, Any]

    def table(
        self, path: Path, *models: "OnnxAdapter", min_groups: int = 2, progress: Progress | None = None
    ) -> TableBatches:
        """The rows of a file of any size.

        Raises
        ------
        ValueError
            The table cannot be used, or one of the models takes other columns: the error lists both sides.
        """

        def check_width(inputs: Sequence[str]) -> None:
            for width in (model.n_features for model in models):
                if width is not None and width != len(inputs):
                    raise ValueError(self._other_width(path, inputs, width))

        table = TableBatches(
            path, self.roles, **self.options, min_groups=min_groups, check_inputs=check_width, progress=progress
        )
        for model in models:
            model.predict(table.scan.head)  # what else the model does not take, before any long work
        return table

    def tables(
        self, data: Path, validation: Path | None, *models: "OnnxAdapter", progress: Progress | None = None
    ) -> tuple[TableBatches, TableBatches | None]:
        """The rows that fit and those that judge, if they have a file; their inputs are the same columns, by name."""
        rows = self.table(data, *models, progress=progress)
        if validation is None:
            return rows, None
        alike = replace(self, roles=replace(self.roles, features=tuple(rows.inputs)))
        return rows, alike.table(validation, progress=progress)

    def _other_width(self, path: Path, names: Sequence[str], width: int) -> str:
        apart = ", ".join(f"{name} ({role})" for name, role in self.roles.named().items() if name not in names)
        return (
            f"the model takes {width} columns and {str(path)!r} gives it {len(names)}: {some_names(names, 30)}. Not "
            f"given to it: {apart or 'none'}. Name the model's inputs, in its order: --features A,B,C"
        )


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


@contextmanager
def file_bar() -> Iterator[Progress]:
    """A second bar on stderr while a large file is read, gone at the end; silent when stderr is not a terminal."""
    with ExitStack() as stack:
        bars: list[tqdm[Any]] = []  # none until there is something to wait for

        def show(done: int, total: int) -> None:
            if total < _SHOWN_BYTES or not sys.stderr.isatty():
                return
            if not bars:
                form = "  {bar:20} {n_fmt}B of {total_fmt}B"
                bars.append(stack.enter_context(tqdm(unit="B", unit_scale=True, leave=False, bar_format=form)))
            bars[0].total, bars[0].n = total, done
            bars[0].refresh()

        yield show


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


def load_model(path: Path, output: str | None) -> "OnnxAdapter":
    """Read a model.

    Raises
    ------
    ValueError
        The file is no ONNX regressor; of a table the error says that the model comes first, of a model in another
        format how to export it.
    """
    from esvdfair.models.onnx import OnnxAdapter

    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is a pipe or a device; save the model to a file first.")
    try:
        return OnnxAdapter(path, output=output)
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
    from esvdfair.models.onnx_io import external_files

    return [path, *(path.parent / name for name in external_files(path))]


def _columns(path: Path) -> list[str]:
    """Columns of a table; none where it is no table."""
    try:
        return open_table(path).columns if path.is_file() else []
    except (OSError, ValueError, ImportError):
        return []


# --- options -------------------------------------------------------------------------------------------------------


_OF_TABLES = ("drop_missing", "missing_group", "min_group_rows", "other", "sep")


def _one_mark(_: click.Context, __: click.Parameter, mark: str | None) -> str | None:
    """One character; a tab may be written as a word, or as `\\t`."""
    mark = {"tab": "\t", "\\t": "\t"}.get(mark or "", mark)
    if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n'):
        raise click.BadParameter("one character is needed, such as ';', or `tab`.", param_hint="'--sep'")
    return mark


def complete_columns(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Columns that a word may become, or its last part in a list A,B,C; of the first table among the words before."""
    before, comma, name = incomplete.rpartition(",")
    for word in ctx.args:  # an option without its value stops the parser, which leaves all words here
        if columns := _columns(Path(word)):
            return [before + comma + column for column in columns if column.startswith(name)]
    return []


def table_options(
    *,
    target: str = "Column with the true value; without it, error means distance to the model's own predictions.",
    sensitive_required: bool = True,
) -> Option:
    """Options that say what the columns are; the command gets them as one ``reading``."""
    options = [
        click.option("--sensitive", multiple=True, required=sensitive_required, metavar="COL",
                     shell_complete=complete_columns, help="Column with the group of each person; repeat it for "
                     "several, whose combinations become the groups."),
        click.option("--target", metavar="COL", shell_complete=complete_columns, help=target),
        click.option("--features", metavar="A,B,C", shell_complete=complete_columns, help="The model's inputs in its "
                     "order. Default: all other columns in file order; a sensitive column is an input only when named "
                     "here."),
        click.option("--weight", metavar="COL", shell_complete=complete_columns, help="Column that says how much each "
                     "row counts."),
        click.option("--drop-missing", is_flag=True, help="Leave out rows with a missing value."),
        click.option("--missing-group", is_flag=True, help="People without a value of a sensitive "
                     "column become a group of their own."),
        click.option("--min-group-rows", metavar="N", default=1, type=click.IntRange(min=1), help="Leave out groups "
                     "with fewer rows; a note names them."),
        click.option("--other", is_flag=True, help="Join these groups to one, `other`, instead."),
        click.option("--sep", metavar="MARK", callback=_one_mark, help="What separates the fields of CSV; `tab` for "
                     "tabs.  [default: the header tells]"),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def collected(
            *args: Any,
            sensitive: tuple[str, ...],
            target: str | None,
            features: str | None,
            weight: str | None,
            **rest: Any,
        ) -> Any:
            names = None if features is None else tuple(name.strip() for name in features.split(","))
            roles = Roles(sensitive, target, rest.get("predictions"), names, weight)
            kept = {name: rest.pop(name) for name in _OF_TABLES}
            return command(*args, reading=Reading(roles, kept), **rest)

        return _with(options, collected)

    return decorate


output_option = click.option(
    "--output", metavar="NAME", help="Which output of the model is the prediction, if several."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
seed_option = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="Of all that is drawn."
)
validation_option = click.option(
    "--validation", metavar="FILE", type=FILE, help="Rows that the model was not trained on, to choose and to judge."
)
force_option = click.option("--force", is_flag=True, help="Replace files that are there.")
quick_option = click.option("--quick", is_flag=True, help="Try few candidates instead of many: for a first look.")


def target_ks_option(
    text: str = "Largest KS distance between groups to aim at.", *, default: float | None = None
) -> Option:
    """The option --target-ks; with a default, a target that is always there."""
    return click.option(
        "--target-ks", default=default, show_default=True, type=click.FloatRange(0, 1), metavar="KS", help=text
    )


def layer_option(text: str) -> Option:
    """The option --layer: an index when it is a whole number, else a name."""
    return click.option("--layer", metavar="LAYER", type=_layer_of, help=text)


def _layer_of(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text


def model_and_data(command: Command) -> Command:
    """The arguments MODEL and DATA, and which output of the model is meant."""
    model = click.argument("model", metavar="MODEL.onnx", type=FILE)
    return _with([model, click.argument("data", metavar="DATA", type=FILE), output_option], command)


def repair_options(command: Command) -> Command:
    """What a repair aims at and how; the command gets them as ``options`` of ESVDFair, and which rows judge it."""
    method = click.option(
        "--method",
        type=click.Choice(["transport", "parity", "exact", "paper"]),
        default="transport",
        show_default=True,
        help="transport: whole distributions, last layer. parity: means and variances, last layer. exact: a hidden "
        "layer, then the last. paper: the paper's Algorithm 2.",
    )
    layer = layer_option("Layer that exact and paper edit: index or name.  [default: -2]")

    @wraps(command)
    def collected(*args: Any, quick: bool, seed: int, **rest: Any) -> Any:
        from esvdfair.sample import Effort

        options = {name: rest.pop(name) for name in ("target_ks", "method", "layer", "output")}
        options |= {"random_state": seed, "effort": Effort.quick() if quick else None}
        return command(*args, options=options, **rest)

    return _with([target_ks_option(), method, layer, validation_option, quick_option, seed_option], collected)


def _with(options: Sequence[Option], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
