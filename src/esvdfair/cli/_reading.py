"""What commands read: models and tables, and the questions to ask where these do not fit each other."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pandas as pd

from esvdfair import text
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.table_files import open_table
from esvdfair.tables import Roles, TableBatches, TableRows
from esvdfair.text import quoted, some_names

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter

AUDITED_ROWS = 1_000_000
"""Rows that a command holds at once to measure predictions; a sample stands for a larger file."""
EXPLAINED_ROWS = 100_000
"""The same for commands that run many methods, or every layer, over them."""
EVALUATED_ON = text.EVALUATED_ON | {"validation": "rows of --validation"}


# --- tables --------------------------------------------------------------------------------------------------------


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

    def load(self, path: Path | None = None) -> "ModelAdapter":
        """The model, or another one."""
        return load_model(path or self.model, self.output)

    def of_large_groups(self) -> "Given":
        """Without the rows of groups that are too small to compare."""
        return replace(self, reading={**self.reading, "min_group_rows": self.min_group_rows})

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
                    raise ValueError(_wrong_width(path, names, model, roles, self.reading["sep"]))

        table = TableBatches(path, roles, check_inputs=check_width, **self.reading, **options)
        for model in models:
            model.predict(table.scan.head)  # what else the model does not take, before any long work
        return table


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


def split_rows(rows: TableBatches, apart: TableBatches | None, seed: int) -> tuple[TableRows, TableRows]:
    """Training and validation rows in memory: those of two tables, or those that a repair would hold out of one."""
    from esvdfair.batches import held_out
    from esvdfair.estimator import ESVDFair

    some = some_rows(rows, EXPLAINED_ROWS, seed=seed)
    if apart is not None:
        return some, some_rows(apart, EXPLAINED_ROWS, seed=seed)
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


# --- models -----------------------------------------------------------------------------------------------------


_TORCH = "torch.onnx.export(model.eval(), (example_inputs,), 'model.onnx', dynamo=True)"
_SKLEARN = (
    "skl2onnx.to_onnx(model, X[:1]).SerializeToString(), written to 'model.onnx'; LightGBM, XGBoost and CatBoost: "
    "save_model('model.txt'), 'model.json' or 'model.cbm'"
)
_EXPORTS = (
    dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".safetensors"), _TORCH)
    | dict.fromkeys((".pkl", ".pickle", ".joblib", ".skops"), _SKLEARN)
    | dict.fromkeys((".h5", ".keras"), "model.export('model.onnx', format='onnx')")
)
"""How a model comes to ONNX, by the end of its file's name."""


def load_model(path: Path, output: str | None) -> "ModelAdapter":
    """Read a model; the error says what to do with one in another format, and with a table that was named first."""
    from esvdfair.models import adapt

    check_there(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is a pipe or a device; save the model to a file first.")
    try:
        return adapt(path, output=output)
    except ValueError:
        if how := _EXPORTS.get(path.suffix.lower()):
            raise ValueError(
                f"{str(path)!r} is not an ONNX model, and other formats can run code when they are opened. Export it: "
                f"{how}"
            ) from None
        if len(header_of(path)) > 1:
            raise ValueError(
                f"{str(path)!r} is not an ONNX model but a table; the model comes first: MODEL DATA"
            ) from None
        raise


def model_files(path: Path) -> list[Path]:
    """A model file and the files with its external data."""
    from esvdfair.models.tree_boosters import tree_format

    if tree_format(path) is not None:
        return [path]
    from esvdfair.models.onnx_files import external_files

    return [path, *(path.parent / name for name in external_files(path))]


# --- a table and a model that do not fit ---------------------------------------------------------------------------


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


def _wrong_width(path: Path, names: Sequence[str], model: "ModelAdapter", roles: Roles, sep: str | None) -> str:
    """That a table gives a model too many columns, or too few, and what to type."""
    width = model.n_features or 0
    given = f"the model takes {width} columns and {str(path)!r} gives it {len(names)}: {some_names(names, 30)}."
    inputs, label = (
        _likely_inputs(path, names, model, roles, sep) if len(names) > width and path.is_file() else ([], "")
    )
    if len(inputs) != width:
        apart = [f"{name} ({role})" for name, role in roles.named.items() if name not in names]
        beside = f"Not given to it: {', '.join(apart) or 'none'}"
        return f"{given} {beside}. Name the model's inputs, in its order: --features A,B,C"
    others, features = [name for name in names if name not in inputs], f"--features {','.join(inputs)}"
    if label and roles.target is None:
        return f"{given} Is {label!r} the label? Add --target {label}{f' {features}' if len(others) > 1 else ''}"
    return f"{given} If {some_names(others, 5)} is no input, leave it out: {features}"


def _likely_inputs(
    path: Path, names: Sequence[str], model: "ModelAdapter", roles: Roles, sep: str | None
) -> tuple[list[str], str]:
    """The columns of numbers; of one too many without the label, and what that is.

    It is the column without which predictions correlate most with the label; if none is named, with the column itself.
    """
    frame = next(open_table(path, sep=sep).frames([*names, *filter(None, [roles.target])]))[0].head(1000).dropna()
    numbers = [name for name in names if pd.api.types.is_numeric_dtype(frame[name])]
    if len(numbers) - 1 != model.n_features or len(frame) < 3 or len(names) > 200:
        return numbers, ""

    def correlation(name: str) -> float:
        predicted = model.predict(frame[[other for other in numbers if other != name]])
        with np.errstate(all="ignore"):
            return abs(float(np.nan_to_num(np.corrcoef(predicted, frame[roles.target or name])[0, 1])))

    label = max(numbers, key=correlation)
    return [name for name in numbers if name != label], label
