"""What to type where a file is no model that is known, or a table gives a model too many columns, or too few."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from esvdfair.table_files import open_table
from esvdfair.tables import Roles
from esvdfair.text import some_names

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter


_SKLEARN = (
    "skl2onnx.to_onnx(model, X[:1]).SerializeToString(), written to 'model.onnx'; LightGBM, XGBoost and CatBoost: "
    "save_model('model.txt'), 'model.json' or 'model.cbm'"
)
_EXPORTS = (
    dict.fromkeys(
        (".pt", ".pth", ".ckpt", ".bin", ".safetensors"),
        "torch.onnx.export(model.eval(), (example_inputs,), 'model.onnx', dynamo=True)",
    )
    | dict.fromkeys((".pkl", ".pickle", ".joblib", ".skops"), _SKLEARN)
    | dict.fromkeys((".h5", ".keras"), "model.export('model.onnx', format='onnx')")
)
"""How a model comes to ONNX, by the end of its file's name."""


def other_format(path: Path, columns: Sequence[str]) -> str:
    """What to do with a model in another format, or with a table of these columns in its place; nothing if neither."""
    found = f"{str(path)!r} is not an ONNX model"
    if how := _EXPORTS.get(path.suffix.lower()):
        return f"{found}, and other formats can run code when they are opened. Export it: {how}"
    return f"{found} but a table; the model comes first: MODEL DATA" if len(columns) > 1 else ""


def wrong_width(path: Path, names: Sequence[str], model: "ModelAdapter", roles: Roles, sep: str | None) -> str:
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
