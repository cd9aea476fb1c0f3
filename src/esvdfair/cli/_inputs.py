"""The rows and the model that a command works on."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from esvdfair.cli._output import some_names
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.tables import Progress, Roles, Rows, TableBatches, open_table
from esvdfair.tables.roles import check_roles

if TYPE_CHECKING:
    from esvdfair.models.onnx import OnnxAdapter

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
        self, path: Path, *models: "OnnxAdapter", min_groups: int = 2, progress: Progress | None = None
    ) -> TableBatches:
        """The rows of a file of any size.

        Raises
        ------
        ValueError
            The table cannot be used, or one of the models takes other columns: the error lists both sides.
        """
        if models and path.is_file():  # before a long scan; but what comes through a pipe is read once only
            self._check_width(models, path, check_roles(self.roles, open_table(path).columns, path))
        table = TableBatches(
            path,
            self.roles,
            drop_missing=self.drop_missing,
            missing_group=self.missing_group,
            min_groups=min_groups,
            progress=progress,
        )
        self._check_width(models, path, table.inputs)
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

    def _check_width(self, models: Sequence["OnnxAdapter"], path: Path, names: list[str]) -> None:
        for width in (model.n_features for model in models):
            if width is not None and width != len(names):
                apart = ", ".join(f"{name} ({role})" for name, role in self.roles.named().items() if name not in names)
                raise ValueError(
                    f"the model takes {width} columns and {str(path)!r} gives it {len(names)}: "
                    f"{some_names(names, 30)}. Not given to it: {apart or 'none'}. Name the model's inputs, in its "
                    "order: --features A,B,C"
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


def load_model(path: Path, output: str | None) -> "OnnxAdapter":
    """Read a model.

    Raises
    ------
    ValueError
        The file is no ONNX regressor; of a table the error says that the model comes first.
    """
    from esvdfair.models.onnx import OnnxAdapter

    try:
        return OnnxAdapter(path, output=output)
    except ValueError:
        if _is_table(path):
            raise ValueError(
                f"{str(path)!r} is not an ONNX model but a table; the model comes first: MODEL.onnx DATA"
            ) from None
        raise


def _is_table(path: Path) -> bool:
    try:
        return path.is_file() and len(open_table(path).columns) > 1
    except (OSError, ValueError, ImportError):
        return False
