"""Files that were changed by a few bytes: models, moments, tables.

A reader may refuse them in words, or read what they say: a model as onnxruntime runs the same bytes, a table as pandas
reads the same file. A moments file, which carries a checksum, must be refused or be
what it was.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd

from esvdfair import GroupMoments
from esvdfair.models.onnx import OnnxAdapter
from esvdfair.tables import Roles, TableBatches
from trust.arrays import GROUP, LABEL, TABLE
from trust.models import graph
from trust.verdict import Tally, Trial, judge_all


def mutations(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """The content with a few bytes changed, cut out, doubled or put in, or its end lost."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(rng.integers(1, 4)):
            at, span = int(rng.integers(len(data))), int(rng.integers(1, 9))
            match rng.integers(6):
                case 0:
                    data[at] = int(rng.integers(256))
                case 1:
                    data[at] ^= 1 << int(rng.integers(8))
                case 2:
                    del data[at : at + span]
                case 3:
                    data[at:at] = data[at : at + span]
                case 4:
                    data[at:at] = rng.integers(256, size=span, dtype=np.uint8).tobytes()
                case _:
                    del data[max(at, 1) :]
            data = data or bytearray(b"\0")
        if bytes(data) != content:
            yield bytes(data)


def run(kind: str, count: int) -> Tally:
    """Try so many mutations of one kind of file."""
    with tempfile.TemporaryDirectory() as folder:
        return judge_all(KINDS[kind](Path(folder), count))


# --- ONNX ------------------------------------------------------------------------------------------------------------


def onnx_trials(folder: Path, count: int) -> Iterator[Trial]:
    """Models: what the adapter predicts is what onnxruntime gives for the same bytes."""
    rows = TABLE[:5].astype(np.float32)
    os.environ["ESVDFAIR_TIME_LIMIT"] = "1"
    for i, data in enumerate(mutations(graph().SerializeToString(), count)):
        yield Trial(
            f"model {i}",
            lambda data=data: _predictions(data, rows),
            lambda found, data=data: _as_runtime(found, data, rows),
        )


def _predictions(data: bytes, rows: Any) -> Any:
    adapter = OnnxAdapter(data)
    adapter.layers(rows)
    return adapter.predict(rows)


def _as_runtime(found: Any, data: bytes, rows: Any) -> bool | str:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    known = session.run(None, {session.get_inputs()[0].name: rows})[0]
    same = np.array_equal(np.asarray(found), np.asarray(known).reshape(-1), equal_nan=True)
    return bool(same) or "another prediction than onnxruntime's"


# --- moments ---------------------------------------------------------------------------------------------------------


def moments_trials(folder: Path, count: int) -> Iterator[Trial]:
    """Moments: what was saved, or an error."""
    saved = GroupMoments().update(np.column_stack([TABLE, LABEL]), GROUP)
    path = folder / "site.moments"
    saved.save(path)
    for i, data in enumerate(mutations(path.read_bytes(), count)):
        yield Trial(f"moments {i}", lambda data=data: _loaded(path, data), lambda found: _as_saved(found, saved))


def _loaded(path: Path, data: bytes) -> GroupMoments:
    path.write_bytes(data)
    return GroupMoments.load(path)


def _as_saved(found: GroupMoments, saved: GroupMoments) -> bool | str:
    numbers = ("rows", "counts", "weight_squares", "means", "scatters")
    same = found.labels == saved.labels and all(
        np.array_equal(getattr(found, name), getattr(saved, name)) for name in numbers
    )
    return same or "other moments than were saved"


# --- tables ----------------------------------------------------------------------------------------------------------


def _frame() -> pd.DataFrame:
    return pd.DataFrame(TABLE[:24, :3], columns=["age", "height", "years"]).round(3).assign(
        pay=LABEL[:24].round(3), sex=np.where(GROUP[:24] == "a", "f", "male, or so")
    )  # fmt: skip


def csv_trials(folder: Path, count: int) -> Iterator[Trial]:
    """CSV: the numbers and groups that pandas reads."""
    yield from _table_trials(folder / "people.csv", _frame().to_csv(index=False).encode(), count, pd.read_csv)


def parquet_trials(folder: Path, count: int) -> Iterator[Trial]:
    """Parquet: the numbers and groups that pandas reads."""
    path = folder / "people.parquet"
    _frame().to_parquet(path)
    yield from _table_trials(path, path.read_bytes(), count, pd.read_parquet)


def _table_trials(path: Path, content: bytes, count: int, read: Callable[[Any], pd.DataFrame]) -> Iterator[Trial]:
    for i, data in enumerate(mutations(content, count)):
        yield Trial(
            f"{path.suffix[1:]} {i}", lambda data=data: _read(path, data), lambda found: _as_pandas(found, read(path))
        )  # fmt: skip


def _read(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    roles = Roles(sensitive=("sex",), target="pay", features=("age", "height", "years"))
    return TableBatches(path, roles).sample()


def _as_pandas(found: Any, frame: pd.DataFrame) -> bool | str:
    if len(found) != len(frame):
        return f"{len(found)} rows for {len(frame)}"
    read = {name: found.X[name] for name in ("age", "height", "years")} | {"pay": found.y, "sex": found.groups["sex"]}
    return next((f"other values of {name}" for name, column in read.items() if not _same(column, frame[name])), True)


def _same(one: Any, other: Any) -> bool:
    if all(pd.api.types.is_numeric_dtype(column.dtype) for column in (one, other)):
        return np.array_equal(one.to_numpy(dtype=float), other.to_numpy(dtype=float))
    return bool(one.astype(str).tolist() == other.astype(str).tolist())


KINDS: dict[str, Callable[[Path, int], Iterator[Trial]]] = {
    "ONNX": onnx_trials,
    "moments": moments_trials,
    "CSV": csv_trials,
    "Parquet": parquet_trials,
}
