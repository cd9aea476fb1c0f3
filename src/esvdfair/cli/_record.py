"""The audit record of a repair, and the files that it names."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esvdfair.cli._files import sha256_of, staged
from esvdfair.cli._inputs import EXPLAINED_ROWS, some_rows
from esvdfair.cli._output import to_json
from esvdfair.versions import version_of

if TYPE_CHECKING:
    from esvdfair.estimator import ESVDFair
    from esvdfair.tables import TableBatches

FORMAT = "esvdfair-record-1"
PACKAGES = ("esvdfair", "numpy", "scipy", "scikit-learn", "pandas", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Written:
    """The files that a repair writes."""

    model: Path
    report: Path | None = None

    @property
    def record(self) -> Path:
        return self.model.with_name(self.model.name + ".json")

    @property
    def external(self) -> Path:
        """Where the weights go when the model keeps them beside itself."""
        return self.model.with_name(self.model.name + ".data")

    @property
    def paths(self) -> list[Path]:
        return [self.model, self.record, *([self.report] if self.report is not None else [])]


def write_repaired(
    fair: "ESVDFair",
    table: "TableBatches | None",
    judging: "TableBatches | None",
    written: Written,
    *,
    command: Sequence[str] | None,
    moments: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the repaired model, its record and, if there is a place for it, its report: all or none.

    ``moments`` describes the moments that stood in for a table of rows, if they did.

    Returns
    -------
    dict
        The record.
    """
    from esvdfair.models.onnx import save_model

    model = Path(fair.model)
    with staged(*written.paths) as places:
        save_model(fair.estimator_, places[written.model], like=model)
        record = {
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": None if command is None else ["esvdfair", *command],
            "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
            "parameters": _parameters(fair),
            "data": None if table is None else _data(table),
            **({} if moments is None else {"moments": moments}),
            "validation": None if judging is None else _data(judging),
            "reached": fair.summary_,
            "edits": [_edit(edit) for edit in fair.edits_],
            "model_before": {"path": str(model), "sha256": _model_files(model)},
            "model_after": {"path": str(written.model), "sha256": _model_files(places[written.model])},
        }
        places[written.record].write_text(to_json(record) + "\n", encoding="utf-8")
        if written.report is not None:
            from esvdfair.report import write_report

            judged = judging or table
            assert judged is not None
            shown = some_rows(judged, EXPLAINED_ROWS, seed=fair.random_state)
            write_report(
                places[written.report], fair, shown.X, shown.y, sensitive_features=shown.groups, command=command
            )
    return record


def _parameters(fair: "ESVDFair") -> dict[str, Any]:
    return {name: value for name, value in fair.get_params(deep=False).items() if name != "model"}


def _data(table: "TableBatches") -> dict[str, Any]:
    return {
        "path": str(table.path),
        "sha256": table.scan.sha256,
        "rows": table.scan.rows,
        "dropped": table.scan.dropped,
        "features": table.inputs,
        "target": table.roles.target,
        "sensitive": list(table.roles.sensitive),
    }


def _edit(edit: Any) -> dict[str, Any]:
    names = ("layer", "multiplier", "budget", "achieved", "converged", "output_change", "gap_before", "gap_after")
    return {name: getattr(edit, name) for name in names}


def _model_files(path: Path) -> dict[str, str]:
    """SHA-256 of a model file and of the files with its external data, by name."""
    import onnx

    from esvdfair.models._onnx_file import all_tensors

    tensors = all_tensors(onnx.load(str(path), load_external_data=False))
    beside = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return {path.name: sha256_of(path)} | {name: sha256_of(path.parent / name) for name in sorted(beside)}
