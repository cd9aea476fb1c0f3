"""What commands share on their way in: arguments, options, and the rows and the model that they lead to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.tables import Roles, Rows, read_rows

if TYPE_CHECKING:
    from esvdfair.models.onnx import OnnxAdapter

Command = Callable[..., Any]
FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class Reading:
    """How tables are read: the roles of their columns and what happens to missing values."""

    roles: Roles
    drop_missing: bool
    missing_group: bool

    def rows(self, path: Path, *, like: Rows | None = None) -> Rows:
        """The rows of a file; with the inputs of ``like``, by name, when it stands beside another file."""
        roles = self.roles
        if like is not None:
            roles = Roles(roles.sensitive, roles.target, roles.predictions, tuple(like.X.columns))
        return read_rows(path, roles, drop_missing=self.drop_missing, missing_group=self.missing_group)


def table_options(*, target: str = "Column with the true value.") -> Callable[[Command], Command]:
    """Options that say what the columns are; the command gets them as one ``reading``."""
    options: list[Callable[[Command], Command]] = [
        click.option("--sensitive", multiple=True, required=True, metavar="COL", help="Column with the group of each "
                     "person; repeat it for several, whose combinations become the groups."),
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


def load_model(path: Path, output: str | None, rows: Rows) -> "OnnxAdapter":
    """Read a model and see that it takes the inputs of these rows.

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
    width, names = adapter.n_features, list(map(str, rows.X.columns))
    if width is not None and width != len(names):
        apart = ", ".join(f"{name} ({role})" for name, role in rows.roles.named().items() if name not in names)
        raise ValueError(
            f"the model takes {width} columns and {str(rows.path)!r} gives it {len(names)}: {_shortened(names)}. Not "
            f"given to it: {apart or 'none'}. Name the model's inputs, in its order: --features A,B,C"
        )
    adapter.predict(rows.X.iloc[:1])  # what else the model does not take, before any long work
    return adapter


def _shortened(names: list[str], shown: int = 30) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def check_free(paths: list[Path], *, force: bool, inputs: list[Path]) -> None:
    """Fail, before any work, where a file cannot be written or would be overwritten."""
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
