"""An ONNX regressor, from a file or from bytes, as a `ModelAdapter`.

Linear layers are Gemm nodes, and MatMul nodes by a constant, with or without an Add. The model runs in onnxruntime on
the CPU. An edit puts other numbers into the constants of a copy: graph, names, opset and metadata are as they were.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import onnx
    import onnxruntime
except ImportError as error:
    raise ImportError(
        f"ONNX models need onnx and onnxruntime ({error}): pip install 'esvdfair[onnx]'.", name=error.name
    ) from error

from esvdfair.core.checks import row_count
from esvdfair.models._onnx_file import all_tensors, read_model, write_model
from esvdfair.models._onnx_graph import Graph
from esvdfair.models._onnx_heads import FLOATS, describe, head_kinds
from esvdfair.models._onnx_inputs import ModelInput, batch_size, make_feeds, model_inputs
from esvdfair.models._onnx_run import expose, run, start_session, substitute
from esvdfair.models.heads import Head, find_head, probe_points, unsupported_head
from esvdfair.models.protocol import (
    PREDICT_ROWS,
    PROBE_ROWS,
    LinearLayer,
    check_replacement,
    find_layer,
    row_slice,
)

Source = str | os.PathLike[str] | bytes


class OnnxAdapter:
    """An ONNX regressor, seen through its Gemm and MatMul nodes.

    Parameters
    ----------
    model : path or bytes of an ONNX model
        External data is read from the model's folder alone; bytes must hold all tensors.
    output : str or int, optional
        Name or position of the output that is the prediction; needed when there are several.

    Notes
    -----
    A layer is called after its node, or after its output if the nodes have no names of their own. A model with one
    input for each column takes the columns of a DataFrame by name, those of an array in order. A model that was
    exported for a fixed number of rows is run on that many at a time.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, ValueError
        The model cannot be read, or does not say which of its outputs is the prediction.
    """

    def __init__(self, model: Source | bytearray, *, output: str | int | None = None) -> None:
        if not isinstance(model, str | bytes | bytearray | os.PathLike):
            raise TypeError(f"model must be the path or the bytes of an ONNX model, got a {type(model).__name__}.")
        self._given: Source | None = bytes(model) if isinstance(model, bytearray) else model
        self._proto, self._external = read_model(self._given)
        self._output = _choose_output(self._proto, output)

    @property
    def model(self) -> Source:
        """The path or bytes that were given; of a model with replaced weights the bytes, all tensors inside."""
        return self._proto.SerializeToString() if self._given is None else self._given

    @property
    def n_features(self) -> int | None:
        """Number of columns that the inputs take together, where they tell."""
        widths = [item.width for item in self._inputs]
        return None if None in widths else sum(width or 0 for width in widths)

    def layers(self, x: Any = None) -> tuple[LinearLayer, ...]:
        """List the linear layers that feed the output, in order of execution; read off the graph, not off `x`."""
        return self._layers

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Run one forward pass: the inputs of the named layers and the prediction."""
        tensors = {name: self._graph.layers[self._index(name)].input for name in names}
        shown, prediction = self._run_open(x, tensors.values())
        return {name: shown[tensor] for name, tensor in tensors.items()}, prediction

    def predict(self, x: Any) -> NDArray[Any]:
        """Predict in batches."""
        parts = []
        for start in range(0, max(row_count(x), 1), PREDICT_ROWS):
            feeds = make_feeds(row_slice(x, start, start + PREDICT_ROWS), self._inputs)
            (value,) = run(self._session, feeds, [self._output], self._batch)
            parts.append(_one_column(value, len(next(iter(feeds.values())))))
        return np.concatenate(parts)

    def replace(self, weights: Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]]) -> "OnnxAdapter":
        """Put new weights into a copy of the model, in the dtype of the old ones; all else is as it was."""
        for name, (weight, bias) in weights.items():
            layer = self._graph.layers[self._index(name)]
            check_replacement(
                name, weight=weight, bias=bias, weight_shape=layer.weight.shape, has_bias=layer.bias is not None
            )
        adapter = OnnxAdapter.__new__(OnnxAdapter)
        adapter._given, adapter._external, adapter._output = None, self._external, self._output
        adapter._proto = onnx.ModelProto()
        adapter._proto.CopyFrom(self._proto)
        for name, (weight, bias) in weights.items():
            layer = adapter._graph.layers[self._index(name)]
            layer.weight.write(weight, name)
            if layer.bias is not None and bias is not None:
                layer.bias.write(bias, name)
        return adapter

    def head(self, x: Any) -> Head:
        """Find what maps the last linear layer's output to the prediction.

        The graph from that output on is run on chosen values, within and beyond the range of `x`; its operations are
        named when they make none of the known kinds.
        """
        rows = row_slice(x, 0, PROBE_ROWS)
        if row_count(rows) == 0:
            raise ValueError("got a batch of no rows; at least one is needed to see the head of the model.")
        last = self._graph.layers[-1]
        path = self._graph.path(last.output)
        operation, kinds, joined = describe(path), head_kinds(path), self._graph.mixing(last.output)
        values = self._run_open(rows, [last.output])[0][last.output]
        if values.shape not in ((row_count(rows),), (row_count(rows), 1)):
            raise ValueError(
                f"the last linear layer {last.name!r} gives shape {values.shape} for {row_count(rows)} rows, and "
                f"{operation} makes one prediction a row of them. Only a layer with one output can stand before a head."
            )
        if joined is not None:
            raise ValueError(_bypassed(last.name, repr(joined)))
        if not kinds:
            raise ValueError(unsupported_head(operation))
        z = probe_points(values).astype(values.dtype).reshape(-1, *values.shape[1:])
        prediction = self._run_tail(rows, z)
        # Half of the points with other rows and another batch: a head sees neither.
        half = len(z) // 2
        again = self._run_tail(rows, z[::-1][:half])
        if not _close(prediction[::-1][:half], again, max(np.finfo(item.dtype).eps for item in (z, prediction))):
            raise ValueError(_bypassed(last.name, operation))
        return find_head(z, prediction, kinds=kinds, operation=operation)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as `save_model` does; tensors that were in external data are so again."""
        write_model(self._proto, path, self._external)

    def __getstate__(self) -> dict[str, Any]:
        # A session cannot be pickled, and the graph refers to tensors inside the model: both are made anew when needed.
        return {name: self.__dict__[name] for name in ("_given", "_proto", "_external", "_output")}

    @cached_property
    def _graph(self) -> Graph:
        return Graph(self._proto, self._output)

    @cached_property
    def _layers(self) -> tuple[LinearLayer, ...]:
        return tuple(
            LinearLayer(layer.name, index, layer.weight.read(), None if layer.bias is None else layer.bias.read())
            for index, layer in enumerate(self._graph.layers)
        )

    @cached_property
    def _inputs(self) -> tuple[ModelInput, ...]:
        return model_inputs(self._proto)

    @cached_property
    def _batch(self) -> int | None:
        return batch_size(self._inputs)

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        return start_session(self._proto)

    @cached_property
    def _open_session(self) -> onnxruntime.InferenceSession:
        """A session that shows the inputs of all layers and the output of the last one."""
        layers = self._graph.layers
        return start_session(expose(self._proto, {*(layer.input for layer in layers), layers[-1].output}))

    @cached_property
    def _tail_session(self) -> onnxruntime.InferenceSession:
        """A session that takes the output of the last layer as a further input."""
        last = self._graph.layers[-1]
        return start_session(substitute(self._proto, last.output, last.weight.tensor.data_type, self._output))

    def _index(self, name: str) -> int:
        return find_layer(self._layers, name).index

    def _run_open(self, x: Any, tensors: Iterable[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Tensors inside the model, and the prediction, for all rows of `x`."""
        feeds = make_feeds(x, self._inputs)
        inside = [self._output, *(set(tensors) - feeds.keys() - {self._output})]
        values = dict(zip(inside, run(self._open_session, feeds, inside, self._batch), strict=True))
        return feeds | values, _one_column(values[self._output], row_count(x))

    def _run_tail(self, x: Any, z: NDArray[Any]) -> NDArray[Any]:
        """Prediction if the last layer had given `z`, (n,) or (n, 1), for rows of `x`, repeated as needed."""
        last = self._graph.layers[-1]
        if last.output == self._output:
            return z.reshape(-1)
        feeds = make_feeds(x, self._inputs)
        index = np.arange(len(z)) % row_count(x)
        feeds = {name: value[index] for name, value in feeds.items()} | {last.output: np.ascontiguousarray(z)}
        (prediction,) = run(self._tail_session, feeds, [self._output], self._batch)
        return _one_column(prediction, len(z))


def save_model(model: Source, path: str | os.PathLike[str], *, like: Source | None = None) -> None:
    """Write an ONNX model to a file.

    Parameters
    ----------
    model : bytes or path
        Such as `estimator_` of a repaired model.
    path : where to write; what is there is replaced at the end, and left alone if writing fails
    like : the model before its repair, optional
        Tensors that it keeps in external data go to external data again, in a file named `path` + ".data".
    """
    proto, external = read_model(model)
    if like is not None:
        original, external = read_model(like)
        count, other = (sum(1 for _ in all_tensors(item)) for item in (proto, original))
        if count != other:
            raise ValueError(f"the model has {count} tensors and the one it should be like {other}; pass its original.")
    write_model(proto, path, external)


def _choose_output(model: onnx.ModelProto, output: str | int | None) -> str:
    """Name of the output that is the prediction."""
    outputs = list(model.graph.output)
    listing = ", ".join(repr(value.name) for value in outputs)
    if output is None and len(outputs) > 1:
        raise ValueError(f"the model has {len(outputs)} outputs: {listing}. Say which is the prediction: output=name.")
    if isinstance(output, bool) or not isinstance(output, str | int | None):
        raise TypeError(f"output must be the name or the position of an output, got {output!r}.")
    if isinstance(output, str):
        chosen = [value for value in outputs if value.name == output]
    else:
        chosen = [outputs[output or 0]] if -len(outputs) <= (output or 0) < len(outputs) else []
    if not chosen:
        raise ValueError(f"the model has no output {output!r}; it has {listing}.")
    if chosen[0].type.tensor_type.elem_type not in FLOATS:
        raise ValueError(f"output {chosen[0].name!r} is not a tensor of floating-point numbers, as predictions are.")
    return str(chosen[0].name)


def _one_column(prediction: NDArray[Any], rows: int) -> NDArray[Any]:
    """Predictions as (rows,), from (rows,), (rows, 1) or, for a single row that was squeezed, ()."""
    shape = prediction.shape
    if prediction.size == rows and (shape[:1] == (rows,) or (shape == () and rows == 1)):
        return prediction.reshape(rows)
    raise ValueError(
        f"the model returns shape {shape} for {rows} rows; one number a row is needed. Select another output with "
        "output=, or export the model with one output column."
    )


def _bypassed(name: str, operation: str) -> str:
    return (
        f"the prediction of a row depends on more than its output of the last linear layer {name!r}: {operation} "
        "brings in another branch of the model, or other rows, so it is no head that a refit could stand before."
    )


def _close(a: NDArray[Any], b: NDArray[Any], eps: float) -> bool:
    """Whether two computations of the same values differ by some roundings at most."""
    finite = np.abs(a[np.isfinite(a)])
    size = float(np.median(finite)) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=8 * eps, atol=8 * eps * size, equal_nan=True))
