"""Files that were changed by a few bytes: models, moments, tables.

A reader may refuse them in words, or read what they say: a model as onnxruntime runs the same bytes, a table as pandas
reads the same file. A moments file, which carries a checksum, must be refused or be what it was.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import pandas as pd

from esvdfair import GroupMoments
from esvdfair.models.onnx import OnnxAdapter
from esvdfair.tables import Roles, TableBatches
from trust.arrays import GROUP, LABEL, TABLE
from trust.models import graph
from trust.verdict import Tally, Trial, judge_all

Read = Callable[[Path], Any]
Right = Callable[[Path, Any], bool | str]


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
    name, write, read, right = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, ESVDFAIR_TIME_LIMIT="1"):  # a loop ends then
        path = Path(folder, name)
        write(path)

        def read_changed(data: bytes) -> Any:
            path.write_bytes(data)
            return read(path)

        return judge_all(
            Trial(f"{kind} {i}", lambda data=data: read_changed(data), lambda found: right(path, found))
            for i, data in enumerate(mutations(path.read_bytes(), count))
        )


# --- models and moments --------------------------------------------------------------------------------------------

ROWS = TABLE[:5].astype(np.float32)
SAVED = GroupMoments().update(np.column_stack([TABLE, LABEL]), GROUP)


def _predictions(path: Path) -> Any:
    adapter = OnnxAdapter(path.read_bytes())
    adapter.layers(ROWS)
    return adapter.predict(ROWS)


def _as_runtime(path: Path, found: Any) -> bool | str:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    known = session.run(None, {session.get_inputs()[0].name: ROWS})[0]
    same = np.array_equal(np.asarray(found), np.asarray(known).reshape(-1), equal_nan=True)
    return bool(same) or "another prediction than onnxruntime's"


def _as_saved(path: Path, found: GroupMoments) -> bool | str:
    numbers = ("rows", "counts", "weight_squares", "means", "scatters")
    same = all(np.array_equal(getattr(found, name), getattr(SAVED, name)) for name in numbers)
    return (same and found.labels == SAVED.labels) or "other moments than were saved"


# --- tables --------------------------------------------------------------------------------------------------------

NUMBERS = ["age", "height", "years"]
PEOPLE = pd.DataFrame(TABLE[:24, :3], columns=NUMBERS).assign(pay=LABEL[:24]).round(3)
PEOPLE["sex"] = np.where(GROUP[:24] == "a", "f", "male, or so")


def _sample(path: Path) -> Any:
    return TableBatches(path, Roles(sensitive=("sex",), target="pay", features=tuple(NUMBERS))).sample()


def _as_pandas(path: Path, found: Any) -> bool | str:
    frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    if len(found) != len(frame):
        return f"{len(found)} rows for {len(frame)}"
    read = {name: found.X[name] for name in NUMBERS} | {"pay": found.y, "sex": found.groups["sex"]}
    return next((f"other values of {name}" for name, column in read.items() if not _same(column, frame[name])), True)


def _same(one: Any, other: Any) -> bool:
    if all(pd.api.types.is_numeric_dtype(column.dtype) for column in (one, other)):
        return np.array_equal(one.to_numpy(dtype=float), other.to_numpy(dtype=float))
    return bool(one.astype(str).tolist() == other.astype(str).tolist())


KINDS: dict[str, tuple[str, Callable[[Path], Any], Read, Right]] = {
    "ONNX": ("m.onnx", lambda path: path.write_bytes(graph().SerializeToString()), _predictions, _as_runtime),
    "moments": ("site.moments", SAVED.save, GroupMoments.load, _as_saved),
    "CSV": ("people.csv", lambda path: PEOPLE.to_csv(path, index=False), _sample, _as_pandas),
    "Parquet": ("people.parquet", PEOPLE.to_parquet, _sample, _as_pandas),
}
