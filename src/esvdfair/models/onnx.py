"""An ONNX regressor, from a file or from bytes, as a `ModelAdapter`.

Linear layers are Gemm nodes, MatMul nodes by a constant, with or without an Add, and the linear models of ai.onnx.ml.
Of a classifier of two classes, which gives a label and probabilities, the second probability is the prediction. The
model runs in onnxruntime on the CPU. An edit puts other numbers into the constants of a copy: graph, names, opset and
metadata are as they were.
"""

import copy
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from esvdfair.exceptions import InputError
from esvdfair.models import base, onnx_files, onnx_graph
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights
from esvdfair.models.heads import name_operations
from esvdfair.models.onnx_files import ModelSource, save_model
from esvdfair.models.onnx_graph import Graph

__all__ = ["OnnxAdapter", "save_model"]

Selector = str | int | tuple[str | int, int | str]
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
        text: "scores:1", "1", "logit:sigmoid", "sigmoid".

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

    def __init__(self, model: ModelSource | bytearray, *, output: Selector | None = None) -> None:
        if not isinstance(model, str | bytes | bytearray | os.PathLike):
            raise TypeError(f"model must be the path or the bytes of an ONNX model, got a {type(model).__name__}.")
        self._given: ModelSource | None = bytes(model) if isinstance(model, bytearray) else model
        self._proto, _ = onnx_files.read_model(self._given)
        self._output, self._place = _choose_output(self._proto, output)
        self._graph.check_inference()

    @property
    def model(self) -> ModelSource:
        """The path or bytes that were given; of a model with replaced weights the bytes, all tensors inside."""
        return self._proto.SerializeToString() if self._given is None else self._given

    @property
    def ends_in_trees(self) -> bool:
        """Whether the last layer is a tree ensemble: its leaf values are edited by `onnx_trees`."""
        return self._graph.ends_in_trees

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
        twin = OnnxAdapter.__new__(OnnxAdapter)
        twin.__dict__.update(self.__getstate__() | {"_given": None, "_proto": copy.deepcopy(self._proto)})
        for layer in twin._graph.layers:
            weight, bias = weights.get(layer.name, (None, None))
            if weight is not None:
                layer.weight.write(weight, layer.name)
            if layer.bias is not None and bias is not None:
                layer.bias.write(bias, layer.name)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # A session cannot be pickled, and the graph refers to tensors inside the model: both are made anew when needed.
        kept = ("_given", "_proto", "_output", "_place", "readout")
        return {name: getattr(self, name) for name in kept}

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
    def _inputs(self) -> "tuple[ModelInput, ...]":
        return _model_inputs(self._proto)

    @cached_property
    def _batch(self) -> int | None:
        """Number of rows that the model takes at once, if it was exported for one number alone."""
        sizes = {item.shape[0] for item in self._inputs if item.shape} - {None}
        if len(sizes) > 1:
            raise ValueError(f"the inputs of the model take different numbers of rows: {', '.join(map(str, sizes))}.")
        rows = sizes.pop() if sizes else None
        if rows is not None and rows > _MOST_ROWS:
            raise ValueError(
                f"the model was exported for {rows:,} rows at a time; export it for fewer, or for any number."
            )
        return rows

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        return start_session(self._proto, [self._output])

    @cached_property
    def _open_session(self) -> onnxruntime.InferenceSession:
        """A session that shows the inputs of all layers and the output of the last one."""
        layers = self._graph.layers
        return start_session(self._proto, [self._output, layers[-1].output, *(layer.input for layer in layers)])

    @cached_property
    def _tail_session(self) -> onnxruntime.InferenceSession:
        """A session that takes the output of the last layer as a further input."""
        return start_session(self._proto, [self._output], given=self._graph.layers[-1])

    def _run_open(self, x: Any, tensors: Iterable[str]) -> tuple[Feeds, NDArray[Any]]:
        """Tensors inside the model, and the prediction, for all rows of `x`."""
        feeds = _make_feeds(x, self._inputs)
        inside = [self._output, *(set(tensors) - feeds.keys() - {self._output})]
        values = dict(zip(inside, self._run(self._open_session, feeds, inside), strict=True))
        return feeds | values, self._prediction(values[self._output], row_count(x))

    def _predict(self, x: Any) -> NDArray[Any]:
        feeds = _make_feeds(x, self._inputs)
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
        parts = []
        for start in range(0, rows, batch):
            index = np.minimum(np.arange(start, start + batch), rows - 1)
            values = _call(session, {name: value[index] for name, value in feeds.items()}, outputs)
            parts.append([_cut(value, min(batch, rows - start), batch) for value in values])
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def _prediction(self, value: NDArray[Any], rows: int) -> NDArray[Any]:
        """(rows,) of what the model gives."""
        if self._place != base.SIGMOID:
            return np.asarray(base.as_column(value, rows, self._place))
        return np.asarray(expit(base.as_column(value, rows)))

    def _tail(self, rows: Any) -> Tail:
        last = self._graph.layers[-1]
        shown, _ = self._run_open(rows, [last.input, last.output])
        output = shown[last.output]
        if last.transform is not None:
            weight, bias = self._layers[-1].weight, self._layers[-1].bias
            output = (shown[last.input] @ weight.T + (0 if bias is None else bias)).astype(output.dtype)

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            with np.errstate(over="ignore"):  # a point beyond float32 is one at which it is infinite
                values = z.astype(output.dtype)
            finished = last.finish(values)
            if last.output != self._output:
                index = np.arange(len(values)) % row_count(rows)
                feeds = {name: value[index] for name, value in _make_feeds(rows, self._inputs).items()}
                feeds[last.output] = np.ascontiguousarray(finished)
                (finished,) = self._run(self._tail_session, feeds, [self._output])
            return values, self._prediction(finished, len(values))

        operations, joined = self._graph.path(last.output)
        after = ["Sigmoid"] if self._place == base.SIGMOID else []
        operation, kinds = name_operations([*last.operations, *operations, *after])
        return Tail(last.name, rows, output, run, operation, kinds, joined)


def adapt_onnx(model: ModelSource | bytearray, *, output: Selector | None = None) -> ModelAdapter:
    """Wrap an ONNX model that ends in a linear layer or in trees."""
    found = OnnxAdapter(model, output=output)
    if not found.ends_in_trees:
        return found
    from esvdfair.models.onnx_trees import OnnxEnsemble, OnnxTreeAdapter

    return OnnxTreeAdapter(OnnxEnsemble(model, output=output))


# --- which output -----------------------------------------------------------------------------------------------------


def _tensor_of(value: onnx.ValueInfoProto, model: onnx.ModelProto) -> tuple[str | None, int | None]:
    """The tensor that holds the numbers of an output, if they are such, and how many there are a row."""
    kind = value.type.tensor_type
    if value.type.HasField("tensor_type") and kind.elem_type in onnx_graph.FLOATS:
        return value.name, (kind.shape.dim[1].dim_value or None) if len(kind.shape.dim) == 2 else None
    for node in model.graph.node:  # probabilities by class, as scikit-learn's exporter writes them
        if node.op_type == "ZipMap" and value.name in node.output:
            return node.input[0], max(len(a.ints or a.strings) for a in node.attribute)
    return None, None


def _choose_output(model: onnx.ModelProto, output: Selector | None) -> tuple[str, Any]:
    """Name of the tensor that is the prediction, and which of its columns, or that it is a logit."""
    names = [value.name for value in model.graph.output]
    tensors = {value.name: _tensor_of(value, model) for value in model.graph.output}
    numbers = [name for name in names if tensors[name][0] is not None]
    listing = ", ".join(map(repr, names))
    which, place = _name_and_place(output, names)
    if which is None and len(names) > 1 and len(numbers) != 1:
        raise InputError(f"the model has {len(names)} outputs: {listing}. Choose the prediction with `output`.")
    known = place == base.SIGMOID or isinstance(place, int | None)
    if isinstance(which, bool) or not isinstance(which, str | int | None) or not known:
        raise TypeError(f"output must be the name or the position of an output, got {output!r}.")
    if isinstance(which, int):
        which = names[which] if -len(names) <= which < len(names) else which
    chosen = (numbers or names)[0] if which is None else which
    if chosen not in tensors:
        raise ValueError(f"the model has no output {which!r}; it has {listing}.")
    tensor, width = tensors[chosen]
    if tensor is None:
        raise ValueError(f"output {chosen!r} is not a tensor of floating-point numbers, as predictions are.")
    if place is None and width == 2 and len(names) == 2 and len(numbers) == 1:
        place = 1  # beside a label, the probability of the second of two classes
    return tensor, place


def _name_and_place(output: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Split what was given into an output, by name or position, and a column of it or None."""
    if isinstance(output, tuple) and len(output) == 2:
        return output
    if isinstance(output, str) and output not in names:  # as it is written on a command line
        name, _, text = output.rpartition(":")
        place: Any = int(text) if text.isdecimal() else text
        if (name in names or not name) and (place == base.SIGMOID or isinstance(place, int)):
            return (name or None, place) if name or place == base.SIGMOID else _name_and_place(place, names)
    if len(names) == 1 and isinstance(output, int) and not isinstance(output, bool):
        return None, output
    return output, None


# --- running ----------------------------------------------------------------------------------------------------------


def start_session(
    model: onnx.ModelProto, tensors: Sequence[str], given: onnx_graph.GraphLayer | None = None
) -> onnxruntime.InferenceSession:
    """Load on the CPU what of a model gives these tensors, with the output of a layer for an input if it is `given`.

    `OMP_NUM_THREADS` bounds its threads, as it does those of NumPy and torch.
    """
    graph = (part := copy.deepcopy(model)).graph
    if given is not None:
        graph.node.remove(next(node for node in graph.node if given.output in node.output))
        graph.input.append(onnx.helper.make_tensor_value_info(given.output, given.data_type, None))
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


def _cut(value: NDArray[Any], rows: int, batch: int) -> NDArray[Any]:
    """What a call gave for its first `rows` of `batch` rows, each of which may make several along the first axis."""
    value = value[None] if value.ndim == 0 else value
    if len(value) % batch:
        raise ValueError(f"the model gives shape {value.shape} for {batch} rows; these do not come apart row by row.")
    return value[: len(value) * rows // batch]


# --- rows of a table as inputs: one matrix, or one input for each column or block of columns -------------------------


@dataclass(frozen=True)
class ModelInput:
    """An input of a model: its name, its dtype (object for text) and its shape with None for what is open."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None

    @property
    def width(self) -> int | None:
        """Number of columns of a table that it takes, where it tells."""
        if self.shape is None or not 1 <= len(self.shape) <= 2:
            return None
        return self.shape[1] if len(self.shape) == 2 else 1


def _model_inputs(model: onnx.ModelProto) -> tuple[ModelInput, ...]:
    """Inputs that a caller must give: those without an initialiser."""
    graph = model.graph
    preset = {tensor.name for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))}
    inputs = []
    for value in (value for value in graph.input if value.name not in preset):
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            raise ValueError(f"input {value.name!r} of the model is not a tensor.")
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if dtype.kind not in "fiubO":
            raise ValueError(f"input {value.name!r} of the model takes {dtype}; numbers or text can be given.")
        shape = tuple(max(dim.dim_value, 0) or None for dim in kind.shape.dim)  # 0 where none is set
        inputs.append(ModelInput(value.name, dtype, shape if kind.HasField("shape") else None))
    if not inputs:
        raise ValueError("the model has no input, so its prediction depends on no data.")
    for item in inputs:
        if len(inputs) > 1 and item.width is None:
            raise ValueError(
                f"the model has {len(inputs)} inputs, and {item.name!r} does not say how many columns it takes (its "
                f"shape is {item.shape}). Export the model with one input, or with inputs of fixed widths."
            )
    return tuple(inputs)


def _make_feeds(x: Any, inputs: Sequence[ModelInput]) -> Feeds:
    """Split `x` into the inputs of a model, each in its own dtype.

    Several inputs are taken by name, or in order. With one input for each column, the columns of a DataFrame are taken
    by name; else columns are taken in order.
    """
    several = several_inputs(x)
    if several is not None:
        names = [item.name for item in inputs]
        keys = list(range(len(inputs))) if set(several) == set(range(len(inputs))) else names
        if set(several) != set(keys):
            raise ValueError(
                f"X has the inputs {', '.join(map(str, several))}; the model takes {', '.join(sorted(names))}."
            )
        return {item.name: _convert(to_numpy(several[key]), item) for key, item in zip(keys, inputs, strict=True)}
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
