"""What commands share on their way in: arguments, options, and the rows and the model that they lead to."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from esvdfair.distributed import rank
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.tables import Progress, Roles, Rows, TableBatches

if TYPE_CHECKING:
    from esvdfair.models.onnx import OnnxAdapter

Command = Callable[..., Any]
FILE = click.Path(path_type=Path)
AUDITED_ROWS = 1_000_000
"""Rows that a command holds at once to measure predictions; a sample stands for a larger file."""
EXPLAINED_ROWS = 100_000
"""The same for commands that run many methods, or every layer, over them."""
_SHOWN_BYTES = 32 * 2**20  # files of fewer are read before a bar is seen


@dataclass(frozen=True)
class Reading:
    """How tables are read: the roles of their columns and what happens to missing values."""

    roles: Roles
    drop_missing: bool
    missing_group: bool

    def table(
        self,
        path: Path,
        *,
        like: TableBatches | None = None,
        min_groups: int = 2,
        progress: Progress | None = None,
    ) -> TableBatches:
        """The rows of a file of any size; with the inputs of ``like``, by name, when it stands beside another file."""
        roles = self.roles if like is None else replace(self.roles, features=tuple(like.inputs))
        return TableBatches(
            path,
            roles,
            drop_missing=self.drop_missing,
            missing_group=self.missing_group,
            min_groups=min_groups,
            progress=progress,
        )


def some_rows(table: TableBatches, most: int, *, seed: int) -> Rows:
    """The rows of a table in memory; of a large one a sample, and a note says so."""
    rows = table.sample(most, seed=seed)
    if len(rows) < rows.available:
        warnings.warn(
            f"{str(table.path)!r} has {rows.available:,} rows; what needs them in memory used a random sample of "
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


def table_options(
    *, target: str = "Column with the true value.", sensitive_required: bool = True
) -> Callable[[Command], Command]:
    """Options that say what the columns are; the command gets them as one ``reading``."""
    options: list[Callable[[Command], Command]] = [
        click.option("--sensitive", multiple=True, required=sensitive_required, metavar="COL", help="Column with "
                     "the group of each person; repeat it for several, whose combinations become the groups."),
        click.option("--target", metavar="COL", help=target),
        click.option("--features", metavar="A,B,C", help="The model's inputs in its order. Default: all other columns "
                     "in file order; a sensitive column is an input only when named here."),
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
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of all that is drawn."
)
method_option = click.option(
    "--method",
    type=click.Choice(["transport", "parity", "exact", "paper"]),
    default="transport",
    show_default=True,
    help="transport: whole distributions, last layer. parity: means and variances, last layer. exact: a hidden layer, "
    "then the last. paper: the paper's Algorithm 2.",
)
layer_option = click.option(
    "--layer", metavar="LAYER", help="Layer that exact and paper edit: index or name.  [default: -2]"
)
validation_option = click.option(
    "--validation", metavar="FILE", type=FILE, help="Rows that the model was not trained on, to choose and to judge."
)
target_ks_option = click.option(
    "--target-ks", type=click.FloatRange(0, 1), metavar="KS", help="Largest KS distance between groups to aim at."
)
force_option = click.option("--force", is_flag=True, help="Replace files that are there.")


def _with(options: list[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def layer_of(text: str) -> int | str:
    """A layer by index when it is a whole number, else by name."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def load_model(path: Path, output: str | None, table: TableBatches) -> "OnnxAdapter":
    """Read a model and see that it takes the inputs of this table.

    Raises
    ------
    ValueError
        The file is no ONNX regressor, or takes other columns; the error lists both sides.
    """
    from esvdfair.models.onnx import OnnxAdapter

    try:
        adapter = OnnxAdapter(path, output=output)
    except ValueError as error:
        raise ValueError(str(error).replace("output=name", "--output NAME")) from None
    width, names = adapter.n_features, table.inputs
    if width is not None and width != len(names):
        apart = ", ".join(f"{name} ({role})" for name, role in table.roles.named().items() if name not in names)
        raise ValueError(
            f"the model takes {width} columns and {str(table.path)!r} gives it {len(names)}: {_shortened(names)}. Not "
            f"given to it: {apart or 'none'}. Name the model's inputs, in its order: --features A,B,C"
        )
    adapter.predict(table.scan.head)  # what else the model does not take, before any long work
    return adapter


def _shortened(names: list[str], shown: int = 30) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def check_free(paths: list[Path], *, force: bool, inputs: list[Path]) -> None:
    """Fail, before any work, where a file cannot be written or would be overwritten; by the first rank, who writes."""
    if rank() > 0:
        return
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"cannot write to {str(path)!r}: it is a directory.")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}.")
        if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
            raise ValueError(f"{str(path)!r} is a file that is read; write the result elsewhere.")
        if path.exists() and not force:
            raise FileExistsError(f"{str(path)!r} is there already; --force replaces it.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("two results would go to one file; give each a name of its own.")
