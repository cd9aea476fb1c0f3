"""What commands read: tables, models, and the questions to ask when these do not fit each other."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from esvdfair import text
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.table_files import open_table
from esvdfair.tables import Progress, Roles, TableBatches, TableRows
from esvdfair.text import quoted, some_names

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter

AUDITED_ROWS = 1_000_000
"""Rows that a command holds at once to measure predictions; a sample stands for a larger file."""
EXPLAINED_ROWS = 100_000
"""The same for commands that run many methods, or every layer, over them."""
EVALUATED_ON = text.EVALUATED_ON | {"validation": "the rows of --validation"}


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
        """The rows of a file of any size; an error says what to type where one of the models takes other columns."""

        check_there(path)
        reading = self._with_named_inputs(path, models)

        def check_width(names: Sequence[str]) -> None:
            for model in models:
                if model.n_features not in (None, len(names)):
                    raise ValueError(_wrong_width(path, names, model, reading))

        table = TableBatches(
            path, reading.roles, **self.options, min_groups=min_groups, check_inputs=check_width, progress=progress
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

    def _with_named_inputs(self, path: Path, models: "Sequence[ModelAdapter]") -> "Reading":
        """The inputs are the columns that a model names, where the table has them; LightGBM writes _ for spaces."""
        names = next(filter(None, map(_names_of_inputs, models)), None)
        if names is None or self.roles.features is not None:
            return self
        columns = {name.replace(" ", "_"): name for name in header_of(path)}
        missing = [name for name in names if name.replace(" ", "_") not in columns]
        if not missing:
            return self.with_inputs([columns[name.replace(" ", "_")] for name in names])
        if len(missing) < len(names):
            lacking = some_names([quoted(name) for name in missing], 5)
            raise ValueError(
                f"{str(path)!r} has no column {lacking}, which the model takes. Name the columns that are its inputs, "
                "in its order: --features A,B,C"
            )
        return self

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


# --- models -----------------------------------------------------------------------------------------------------


_TORCH = "torch.onnx.export(model.eval(), (example_inputs,), 'model.onnx', dynamo=True)"
_SKLEARN = (
    "skl2onnx.to_onnx(model, X[:1]).SerializeToString(), written to 'model.onnx'; LightGBM, XGBoost and CatBoost: "
    "save_model('model.txt'), 'model.json' or 'model.cbm'"
)
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
        The file is no model; of a table the error says that the model comes first, of a model in another format how to
        export it.
    """
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
                f"{str(path)!r} is not an ONNX model but a table; the model comes first: MODEL.onnx DATA"
            ) from None
        raise


def model_files(path: Path) -> list[Path]:
    """A model file and the files with its external data."""
    from esvdfair.models.tree_boosters import tree_format

    if tree_format(path) is not None:
        return [path]
    from esvdfair.models.onnx_files import external_files

    return [path, *(path.parent / name for name in external_files(path))]


def header_of(path: Path) -> list[str]:
    """Columns of a table; none where it is no table."""
    try:
        return open_table(path).columns if path.is_file() else []
    except (OSError, ValueError, ImportError):
        return []


# --- a table and a model that do not fit ---------------------------------------------------------------------------


def check_there(path: Path) -> None:
    """Fail where there is no such file, and suggest the name of one that is."""
    if path.exists() or "://" in str(path) or str(path).split("/")[0].endswith(":"):  # a Path has one slash of a URI
        return
    near = get_close_matches(path.name, [file.name for file in path.parent.glob("*")], n=1)
    hint = f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
    raise FileNotFoundError(f"there is no file {str(path)!r}.{hint}")


def _names_of_inputs(model: "ModelAdapter") -> list[str] | None:
    """Names of its input columns, which files of trees contain."""
    return getattr(getattr(model, "library", None), "columns", None)


def _wrong_width(path: Path, names: Sequence[str], model: "ModelAdapter", reading: Reading) -> str:
    """That a table gives a model too many columns, or too few, and what to type."""
    width = model.n_features or 0
    given = f"the model takes {width} columns and {str(path)!r} gives it {len(names)}: {some_names(names, 30)}."
    texts, label = _no_inputs(path, names, model, reading) if len(names) > width and path.is_file() else ([], None)
    inputs = [name for name in names if name != label and name not in texts]
    if len(inputs) != width:
        apart = [f"{name} ({role})" for name, role in reading.roles.named.items() if name not in names]
        beside = f"Not given to it: {', '.join(apart) or 'none'}"
        return f"{given} {beside}. Name the model's inputs, in its order: --features A,B,C"
    features = f"--features {','.join(inputs)}"
    if label is not None and reading.roles.target is None:
        return f"{given} Is {label!r} the label? Add --target {label}{f' {features}' if texts else ''}"
    return f"{given} If {some_names([*texts, *filter(None, [label])], 5)} is no input, leave it out: {features}"


def _no_inputs(
    path: Path, names: Sequence[str], model: "ModelAdapter", reading: Reading
) -> tuple[list[str], str | None]:
    """Columns of text, and the one more that is too many, if it is one.

    It is the column without which predictions correlate most with the label; if none was named, with the column itself.
    """
    file, target = open_table(path, sep=reading.options["sep"]), reading.roles.target
    frame, _ = next(file.frames([*names, *([target] if target else [])]))
    frame = frame.head(1000).dropna()
    numbers = [name for name in names if pd.api.types.is_numeric_dtype(frame[name])]
    texts = [name for name in names if name not in numbers]
    if len(numbers) - 1 != model.n_features or len(frame) < 3 or len(names) > 200:
        return texts, None

    def fit(name: str) -> float:
        inputs = frame[[other for other in numbers if other != name]]
        with np.errstate(all="ignore"):
            return abs(float(np.nan_to_num(np.corrcoef(model.predict(inputs), frame[target or name])[0, 1])))

    return texts, max(numbers, key=fit)
