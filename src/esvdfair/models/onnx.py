"""An ONNX regressor, from a file or from bytes, as a `ModelAdapter`.

Linear layers are Gemm nodes, MatMul nodes by a constant, with or without an Add, and the linear models of ai.onnx.ml.
The model runs in onnxruntime on the CPU. An edit puts other numbers into the constants of a copy: graph, names, opset
and metadata are as they were.
"""

import copy
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

# Its telemetry keeps a device id and events in the user's cache; a switch after the import comes too late.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import onnx
    import onnxruntime
except ImportError as error:
    raise ImportError(
        f"ONNX models need onnx and onnxruntime ({error}): pip install 'esvdfair[onnx]'.", name=error.name
    ) from error

from esvdfair.core.checks import row_count, several_inputs, to_numpy
from esvdfair.models import base, onnx_files, onnx_graph
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights
from esvdfair.models.heads import name_operations
from esvdfair.models.onnx_files import ModelInput, ModelSource, Selector, save_model
from esvdfair.models.onnx_graph import Graph, GraphLayer
from esvdfair.models.tails import Section

__all__ = ["OnnxAdapter", "save_model"]

Feeds = dict[str, NDArray[Any]]

_FATAL = 4  # onnxruntime's log level: what goes wrong is raised, too
_MOST_ROWS = 2**22  # rows of a batch, where the model is made for one number alone: missing ones are filled up


class OnnxAdapter(ModelAdapter):
    """An ONNX regressor, seen through its Gemm and MatMul nodes.

    Parameters
    ----------
    model : path or bytes of an ONNX model
        External data is read from the model's folder alone; bytes must hold all tensors.
    output : str, int or (str or int, int), optional
        Name or position of the output that is the prediction, needed when there are several; with a second number,
        which column of it, or with "sigmoid", that it is a logit. Of a model with one output, a number is a column. As
        text: "scores:1", "1", "logit:sigmoid", "sigmoid". Of a classifier of two classes, which gives a label and
        probabilities, the second probability is the prediction.

    Notes
    -----
    A layer is called after its node, or after its output if the nodes have no names of their own. A model with one
    input for each column takes the columns of a DataFrame by name, those of an array in order. A model that was
    exported for a fixed number of rows is run on that many at a time.
    """

    def __init__(self, model: ModelSource | bytearray, *, output: Selector | None = None) -> None:
        if not isinstance(model, str | bytes | bytearray | os.PathLike):
            raise TypeError(f"model must be the path or the bytes of an ONNX model, got a {type(model).__name__}.")
        self._given: ModelSource | None = bytes(model) if isinstance(model, bytearray) else model
        self._proto, _ = onnx_files.read_model(self._given)
        self._output, self._place = onnx_files.choose_output(self._proto, output)
        self._graph.check_inference()

    @property
    def model(self) -> ModelSource:
        """The path or bytes that were given; of a model with replaced weights the bytes, all tensors inside."""
        return self._proto.SerializeToString() if self._given is None else self._given

    @property
    def n_features(self) -> int | None:
        """Number of columns that the inputs take together, where they tell."""
        widths = [item.width for item in self._inputs]
        return None if None in widths else sum(width or 0 for width in widths)

    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Run one forward pass: the inputs of the named layers and the prediction."""
        tensors = {name: self._graph.layers[self._layer(name).index].input for name in names}
        shown, prediction = self._run_open(x, tensors.values())
        return {name: shown[tensor] for name, tensor in tensors.items()}, prediction

    def _edited(self, weights: Weights) -> "OnnxAdapter":
        twin = copy.copy(self)
        twin._given, twin._proto = None, copy.deepcopy(self._proto)
        for layer in twin._graph.layers:
            weight, bias = weights.get(layer.name, (None, None))
            if weight is not None:
                layer.weight.write(weight, layer.name)
            if layer.bias is not None and bias is not None:
                layer.bias.write(bias, layer.name)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # A session cannot be pickled, and the graph refers to tensors inside the model: both are made anew when needed.
        return {name: getattr(self, name) for name in ("_given", "_proto", "_output", "_place", "readout")}

    @cached_property
    def _graph(self) -> Graph:
        return Graph(self._proto, self._output)

    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        return self._layers

    @cached_property
    def _layers(self) -> tuple[LinearLayer, ...]:
        return tuple(
            LinearLayer(layer.name, index, layer.weight.read(), None if layer.bias is None else layer.bias.read())
            for index, layer in enumerate(self._graph.layers)
        )

    @cached_property
    def _inputs(self) -> tuple[ModelInput, ...]:
        return onnx_files.inputs_of_model(self._proto)

    @cached_property
    def _batch(self) -> int | None:
        """Number of rows that the model takes at once, if it was exported for one number alone."""
        sizes = {item.shape[0] for item in self._inputs if item.shape and item.shape[0] is not None}
        if len(sizes) > 1 or max(sizes, default=0) > _MOST_ROWS:
            rows = " and ".join(f"{size:,}" for size in sorted(sizes))
            raise ValueError(f"the model was exported for {rows} rows at a time; export it for any number of rows.")
        return sizes.pop() if sizes else None

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        return start_session(self._proto, [self._output])

    @cached_property
    def _open_session(self) -> onnxruntime.InferenceSession:
        """A session that shows the inputs of all layers and the outputs of the last ones."""
        layers, last = self._graph.layers, self._graph.last_layers
        tensors = [*(layer.output for layer in last), *(layer.input for layer in layers)]
        return start_session(self._proto, [self._output, *tensors])

    @cached_property
    def _tail_session(self) -> onnxruntime.InferenceSession:
        """A session that takes the outputs of the last layers as further inputs."""
        return start_session(self._proto, [self._output], given=self._graph.last_layers)

    def _run_open(self, x: Any, tensors: Iterable[str]) -> tuple[Feeds, NDArray[Any]]:
        """Tensors inside the model, and the prediction, for all rows of `x`."""
        feeds = make_feeds(x, self._inputs)
        inside = [self._output, *(set(tensors) - feeds.keys() - {self._output})]
        values = dict(zip(inside, self._run(self._open_session, feeds, inside), strict=True))
        return feeds | values, self._prediction(values[self._output], row_count(x))

    def _predict(self, x: Any) -> NDArray[Any]:
        feeds = make_feeds(x, self._inputs)
        (value,) = self._run(self._session, feeds, [self._output])
        return self._prediction(value, len(next(iter(feeds.values()))))

    def _run(self, session: onnxruntime.InferenceSession, feeds: Feeds, outputs: Sequence[str]) -> list[NDArray[Any]]:
        """Outputs for all rows, in one call, or in several where the model takes one number of rows alone.

        The last call is then filled up with copies of the last row, whose results are dropped.
        """
        batch, rows = self._batch, len(next(iter(feeds.values())))
        if batch is None or batch == rows:
            return _call(session, feeds, outputs)
        if rows == 0:
            raise ValueError(f"got a batch of no rows; the model was exported for {batch} at a time.")
        index = np.minimum(np.arange(-(-rows // batch) * batch), rows - 1)
        calls = [
            _call(session, {name: value[part] for name, value in feeds.items()}, outputs)
            for part in np.split(index, len(index) // batch)
        ]
        for value in calls[0]:
            if value.ndim and len(value) % batch:
                raise ValueError(
                    f"the model gives shape {value.shape} for {batch} rows; these do not come apart row by row."
                )
        whole = (np.concatenate([*map(np.atleast_1d, values)]) for values in zip(*calls, strict=True))
        return [value[: len(value) * rows // len(index)] for value in whole]

    def _prediction(self, value: NDArray[Any], rows: int) -> NDArray[Any]:
        """(rows,) of what the model gives."""
        if self._place != base.SIGMOID:
            return np.asarray(base.as_column(value, rows, self._place))
        return np.asarray(expit(base.as_column(value, rows)))

    def _tail(self, rows: Any) -> Tail:
        last, count = self._graph.last_layers, row_count(rows)
        shown, _ = self._run_open(rows, [name for layer in last for name in (layer.input, layer.output)])
        outputs = [shown[layer.output] if layer.shows_z else _scores(layer, shown[layer.input]) for layer in last]
        sections = tuple(
            Section(layer.name, output.size // count // layer.weight.shape[0], layer.weight.shape[0])
            for layer, output in zip(last, outputs, strict=True)
        )

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = _apart(z, outputs)
            return _flat(values), self._run_from(values, rows)

        found, joined = self._graph.path(*(layer.output for layer in last))
        before = [name for layer in last for name in layer.operations]
        operation, kinds = name_operations([*before, *found, *(["Sigmoid"] if self._place == base.SIGMOID else [])])
        name = " + ".join(layer.name for layer in last)
        return Tail(name, rows, _flat(outputs), run, operation, kinds, joined, sections=sections)

    def _run_from(self, values: Sequence[NDArray[Any]], rows: Any) -> NDArray[Any]:
        """Prediction if the last layers gave these outputs, for rows that are repeated as needed."""
        count = len(values[0])
        given = {
            layer.output: np.ascontiguousarray(layer.finish(value))
            for layer, value in zip(self._graph.last_layers, values, strict=True)
        }
        if self._output in given:
            return self._prediction(given[self._output], count)
        index = np.arange(count) % row_count(rows)
        feeds = {name: value[index] for name, value in make_feeds(rows, self._inputs).items()}
        (finished,) = self._run(self._tail_session, feeds | given, [self._output])
        return self._prediction(finished, count)


def _apart(z: NDArray[Any], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Outputs of several layers that stand side by side in z (n, ...), each as its layer gives them."""
    ends = np.cumsum([output.size // len(output) for output in like])[:-1]
    parts = zip(np.split(z.reshape(len(z), -1), ends, axis=1), like, strict=True)
    with np.errstate(over="ignore"):  # a point beyond float32 is one at which it is infinite
        return [part.reshape(-1, *output.shape[1:]).astype(output.dtype) for part, output in parts]


def _scores(layer: GraphLayer, x: NDArray[Any]) -> NDArray[np.float32]:
    """What a LinearClassifier computes before its own transform."""
    bias = 0.0 if layer.bias is None else layer.bias.read()
    return np.asarray(x @ layer.weight.read().T + bias).astype(np.float32)


def _flat(outputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(n, M) outputs of the last layers."""
    return np.concatenate([output.reshape(len(output), -1) for output in outputs], axis=1)


def adapt_onnx(model: ModelSource | bytearray, *, output: Selector | None = None) -> ModelAdapter:
    """Wrap an ONNX model that ends in a linear layer or in trees."""
    found = OnnxAdapter(model, output=output)
    if not found._graph.ends_in_trees:
        return found
    from esvdfair.models.onnx_trees import OnnxEnsemble, OnnxTreeAdapter

    return OnnxTreeAdapter(OnnxEnsemble(model, output=output))


# --- running ----------------------------------------------------------------------------------------------------------


def start_session(
    model: onnx.ModelProto, tensors: Sequence[str], given: Sequence[GraphLayer] = ()
) -> onnxruntime.InferenceSession:
    """Load on the CPU what of a model gives these tensors, with the outputs of layers that are `given` as inputs.

    `OMP_NUM_THREADS` bounds its threads, as it does those of NumPy and torch.
    """
    graph = (part := copy.deepcopy(model)).graph
    for layer in given:
        graph.node.remove(next(node for node in graph.node if layer.output in node.output))
        graph.input.append(onnx.helper.make_tensor_value_info(layer.output, layer.data_type, None))
    typed, inputs = {value.name: value for value in model.graph.output}, {value.name for value in graph.input}
    needed = onnx_graph.upstream(graph.node, tensors)
    nodes = [node for node in graph.node if not needed.isdisjoint(node.output)]
    del graph.output[:], graph.node[:]
    graph.node.extend(nodes)
    shown = (name for name in dict.fromkeys(tensors) if name not in inputs)
    graph.output.extend(typed.get(name, onnx.ValueInfoProto(name=name)) for name in shown)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    options.intra_op_num_threads = int(threads) if threads.isdecimal() else 0
    try:
        return onnxruntime.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class of their own
        raise ValueError(f"onnxruntime cannot load the model: {onnx_files.first_line(error)}") from error


def _call(session: onnxruntime.InferenceSession, feeds: Feeds, outputs: Sequence[str]) -> list[NDArray[Any]]:
    limit = float(os.environ.get(base.TIME_LIMIT) or 600)
    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL
    values: list[NDArray[Any]] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            values.extend(np.asarray(value) for value in session.run(list(outputs), feeds, options))
        except Exception as error:  # see start_session
            errors.append(error)

    # In a thread of its own: a call into onnxruntime listens to nobody, neither a clock nor Ctrl-C.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        thread.join(limit)
        if thread.is_alive():
            raise ValueError(
                f"the model has not finished a batch of {len(next(iter(feeds.values())))} rows in {limit:g} seconds, "
                f"maybe for an endless loop. {base.TIME_LIMIT} in the environment, or --model-timeout, sets how many "
                "it may take."
            )
    finally:
        options.terminate = True  # of no effect on a call that has ended
    if errors:
        raise ValueError(
            f"onnxruntime cannot run the model on this batch: {onnx_files.first_line(errors[0])}"
        ) from errors[0]
    return values


# --- rows of a table as inputs: one matrix, or one input for each column or block of columns -------------------------


def make_feeds(x: Any, inputs: Sequence[ModelInput]) -> Feeds:
    """Split `x` into the inputs of a model, each in its own dtype.

    Several inputs are taken by name, or in order. With one input for each column, the columns of a DataFrame are taken
    by name; else columns are taken in order.
    """
    several = several_inputs(x)
    if several is not None:
        return _feeds_of_several(several, inputs)
    x = x.toarray() if hasattr(x, "toarray") else x
    x = x if base.is_frame(x) else to_numpy(x)
    if len(inputs) == 1 and (inputs[0].shape is None or len(inputs[0].shape) > 2):
        return {inputs[0].name: _convert(np.asarray(x), inputs[0])}
    if x.ndim != 2:
        raise ValueError(f"X has {x.ndim} dimensions; the model takes a table of {_columns_of(inputs)}.")
    feeds = {}
    for item, columns in zip(inputs, _assign_columns(x, inputs), strict=True):
        block = _convert(x.iloc[:, columns] if base.is_frame(x) else x[:, columns], item)
        feeds[item.name] = block[:, 0] if item.shape is not None and len(item.shape) == 1 else block
    return feeds


def _feeds_of_several(several: Mapping[Any, Any], inputs: Sequence[ModelInput]) -> Feeds:
    names = [item.name for item in inputs]
    keys = list(range(len(inputs))) if set(several) == set(range(len(inputs))) else names
    if set(several) != set(keys):
        raise ValueError(
            f"X has the inputs {', '.join(map(str, several))}; the model takes {', '.join(sorted(names))}."
        )
    return {item.name: _convert(to_numpy(several[key]), item) for key, item in zip(keys, inputs, strict=True)}


def _assign_columns(x: Any, inputs: Sequence[ModelInput]) -> list[Any]:
    """Which columns of `x`, by position, go to each input."""
    names = list(x.columns) if base.is_frame(x) else []
    found = f"X has {x.shape[1]} columns" + (f" ({', '.join(map(str, names))})" if names else "")
    if len(inputs) > 1 and any(isinstance(name, str) for name in names) and all(item.width == 1 for item in inputs):
        if sorted(map(str, names)) != sorted(item.name for item in inputs):
            raise ValueError(
                f"{found}; the model takes {_columns_of(inputs)}, by name. Pass these columns alone, or an array with "
                "the columns in that order."
            )
        return [[names.index(item.name)] for item in inputs]
    if len(inputs) == 1 and inputs[0].width is None:
        return [slice(None)]
    ends = np.cumsum([item.width for item in inputs]).tolist()
    if x.shape[1] != ends[-1]:
        raise ValueError(f"{found}; the model takes {_columns_of(inputs)}.")
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _columns_of(inputs: Sequence[ModelInput]) -> str:
    if len(inputs) == 1:
        return f"{inputs[0].width or 'any number of'} columns (input {inputs[0].name!r})"
    parts = (item.name if item.width == 1 else f"{item.name}: {item.width} columns" for item in inputs)
    return f"{sum(item.width or 0 for item in inputs)} columns ({', '.join(parts)})"


def _convert(values: Any, item: ModelInput) -> NDArray[Any]:
    """An array or a table in the dtype of an input, if it can be said in it."""
    if item.dtype.kind == "O":
        given = converted = np.asarray(values, dtype=object)
        bad, takes = ~np.vectorize(lambda value: isinstance(value, str), otypes=[bool])(given), "text"
    else:
        given = base.numeric(values, f"input {item.name!r}")
        with np.errstate(over="ignore", invalid="ignore"):
            converted = given.astype(item.dtype)
        if item.dtype.kind == "f":
            return converted
        kind = "0 or 1" if item.dtype.kind == "b" else "whole numbers"
        bad, takes = converted != given, f"{kind} ({item.dtype})"
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        column = repr(values.columns[place[-1]]) if base.is_frame(values) else "X"
        raise ValueError(f"column {column} holds {given[place]!s}; input {item.name!r} takes {takes}.")
    return converted
