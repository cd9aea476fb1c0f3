"""Run ONNX models in onnxruntime, whole or with tensors inside them laid open."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from esvdfair.models._onnx_file import first_line
from esvdfair.models._onnx_inputs import Feeds

_FATAL = 4  # onnxruntime's log level: what goes wrong is raised, too


def start_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Load a model on the CPU; `OMP_NUM_THREADS` bounds its threads, as it does those of NumPy and torch."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    options.intra_op_num_threads = int(threads) if threads.isdecimal() else 0
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class of their own
        raise ValueError(f"onnxruntime cannot load the model: {first_line(error)}") from error


def run(
    session: onnxruntime.InferenceSession, feeds: Feeds, outputs: Sequence[str], batch: int | None
) -> list[NDArray[Any]]:
    """Outputs for all rows, in one call, or in calls of `batch` rows where the model takes no other number.

    The last call is filled up with copies of the last row, whose results are dropped.
    """
    rows = len(next(iter(feeds.values())))
    if batch is None or batch == rows:
        return _call(session, feeds, outputs)
    if rows == 0:
        raise ValueError(f"got a batch of no rows; the model was exported for {batch} at a time.")
    parts = []
    for start in range(0, rows, batch):
        index = np.minimum(np.arange(start, start + batch), rows - 1)
        values = _call(session, {name: value[index] for name, value in feeds.items()}, outputs)
        parts.append([_cut(value, min(batch, rows - start), batch) for value in values])
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def expose(model: onnx.ModelProto, tensors: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model with more outputs: tensors inside it, under their own names."""
    copy = _copy(model)
    known = {value.name for value in (*copy.graph.input, *copy.graph.output)}
    copy.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in tensors if tensor not in known)
    return copy


def substitute(model: onnx.ModelProto, tensor: str, data_type: int, output: str) -> onnx.ModelProto:
    """A copy of a model with one output, in which a tensor inside it is an input."""
    copy = _copy(model)
    (producer,) = (node for node in copy.graph.node if tensor in node.output)
    copy.graph.node.remove(producer)
    copy.graph.input.append(onnx.helper.make_tensor_value_info(tensor, data_type, None))
    outputs = [value for value in model.graph.output if value.name == output]
    del copy.graph.output[:]
    copy.graph.output.extend(outputs)
    return copy


def _call(session: onnxruntime.InferenceSession, feeds: Feeds, outputs: Sequence[str]) -> list[NDArray[Any]]:
    try:
        values = session.run(list(outputs), feeds)
    except Exception as error:  # see start_session
        raise ValueError(f"onnxruntime cannot run the model on this batch: {first_line(error)}") from error
    return [np.asarray(value) for value in values]


def _cut(value: NDArray[Any], rows: int, batch: int) -> NDArray[Any]:
    """What a call gave for its first `rows` of `batch` rows, each of which may make several along the first axis."""
    value = value[None] if value.ndim == 0 else value
    if len(value) % batch:
        raise ValueError(f"the model gives shape {value.shape} for {batch} rows; these do not come apart row by row.")
    return value[: len(value) * rows // batch]


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
