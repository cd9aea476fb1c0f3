"""Any `torch.nn.Module` as a `ModelAdapter`.

A wrapper made by `torch.compile` or `nn.DataParallel` is looked through: the module inside is run, eagerly and on its
own device; a repaired copy wears the same wrapper. Layer names are those inside it.
"""

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esvdfair.core.checks import each_input, row_count, take, to_numpy
from esvdfair.core.refit.quadratic import KINDS
from esvdfair.exceptions import Given, InputError
from esvdfair.models.base import (
    SIGMOID,
    LinearLayer,
    ModelAdapter,
    Tail,
    as_column,
    first_rows,
    name_operations,
    numeric,
)
from esvdfair.models.torch_graph import (
    INPUT,
    Trace,
    assign,
    check_initialised,
    computes_linear_map,
    copied,
    describe_layer,
    find_problem,
    is_computed,
    is_linear,
    mixing,
    private,
    unwrap,
    weight_of,
)

Selector = str | int | tuple[str | int, ...] | Callable[[Any], Any]
Inputs = torch.Tensor | tuple[Any, ...] | dict[str, Any]
"""What a module is called with: one tensor, tensors in order, or tensors by name."""

Hook = Callable[..., Any]

_HOME = os.getpid()  # the process whose threads torch's pool has


class TorchAdapter(ModelAdapter):
    """A torch regressor, seen through its `nn.Linear` layers.

    Parameters
    ----------
    model : torch.nn.Module
        Never touched: what runs, in eval mode, is a private copy that shares its parameters.
    output : str, int, tuple of these, or callable, optional
        What to take as the prediction when the model returns a dict (key), a tuple (index), several columns (index), a
        logit ("sigmoid"), one inside the other (a tuple of these), or anything else (a callable of what it returned).

    Notes
    -----
    Inputs are converted to the model's dtype and device. Several are given as a tuple (in order) or a mapping (by
    name). Layers that the forward pass does not reach, or that do not feed the prediction, are not listed.
    """

    def __init__(self, model: nn.Module, *, output: Selector | None = None) -> None:
        self._model = model
        check_initialised(unwrap(model))
        self._core = private(unwrap(model))
        self._output = output
        self._probed: tuple[tuple[LinearLayer, ...], Tail] | None = None
        self._lock = threading.Lock()  # hooks of one call must not be seen by another

    @property
    def model(self) -> nn.Module:
        """The module that was given."""
        return self._model

    @property
    def n_features(self) -> int | None:
        """Input width, known when the model begins with a linear layer."""
        first: nn.Module | None = self._core
        while isinstance(first, nn.Sequential):
            first = next(iter(first), None)
        return first.in_features if isinstance(first, nn.Linear) else None

    def layers(self, x: Any) -> tuple[LinearLayer, ...]:
        """List the linear layers that feed the prediction, in order of execution."""
        return self._narrowed(self._probe(x)[0], x)

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run one forward pass: the inputs of the named layers and the prediction, on the model's device."""
        inputs: dict[str, torch.Tensor] = {}

        def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in inputs:
                raise ValueError(_TWICE.format(name))
            inputs[name] = _layer_input(args, kwargs).detach().clone()  # the model may go on to write into it

        prediction = self._run(_to_inputs(x, self._core), {name: partial(keep, name) for name in names})
        for name in names:
            if name not in inputs:
                raise ValueError(
                    f"the forward pass does not reach layer {name!r}, so its weights have no effect on this output."
                )
        return inputs, prediction

    def _layer(self, name: str) -> LinearLayer:
        module = self._linear(name)
        problem = find_problem(name, module, self._core)
        if problem is not None:
            raise ValueError(problem)
        return describe_layer(name, 0, module)

    def _twin(self) -> "TorchAdapter":
        return TorchAdapter(copied(self._model), output=self._output)

    def _write(self, name: str, weight: NDArray[Any], bias: NDArray[Any] | None) -> None:
        module = self._linear(name)
        for parameter, values in ((module.weight, weight), (module.bias, bias)):
            if values is not None:
                assign(name, parameter, values)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model, "output": self._output}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], output=state["output"])  # type: ignore[misc]  # all else is made of these

    def _predict(self, x: Any) -> torch.Tensor:
        return self._run(_to_inputs(x, self._core), {})

    def _tail(self, rows: Any) -> Tail:
        return self._probe(rows)[1]

    def _probe(self, x: Any) -> tuple[tuple[LinearLayer, ...], Tail]:
        """The layers, and what follows the last one: from one traced forward pass over the first rows of `x`."""
        if self._probed is None:
            self._probed = self._trace(_to_inputs(first_rows(x), self._core))
        return self._probed

    def _trace(self, x: Inputs) -> tuple[tuple[LinearLayer, ...], Tail]:
        modules = {name: module for name, module in self._core.named_modules() if is_linear(module)}
        trace = Trace({name: module._parameters.get("weight") for name, module in modules.items()})
        outputs: dict[str, torch.Tensor] = {}
        problems: dict[str, str | None] = {}

        def enter(name: str, module: nn.Module, args: Any) -> None:
            trace.inside = name

        def leave(name: str, module: nn.Linear, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            problems[name] = _TWICE.format(name) if name in outputs else find_problem(name, module, self._core)
            if problems[name] is None and not computes_linear_map(module, _layer_input(args, kwargs), output):
                problems[name] = f"layer {name!r} is a {type(module).__name__}, whose output is not X Wᵀ + b."
            outputs[name] = output.detach().clone()
            trace.mark(output, name)
            trace.inside = None

        rows = _cloned(x)
        for tensor in _tensors(x):
            trace.mark(tensor, INPUT)
        after, before = ({name: partial(hook, name) for name in modules} for hook in (leave, enter))
        prediction = self._run(x, after, before=before, mode=trace)
        reached = trace.labels(prediction)
        names = [name for name in outputs if name in reached or self._moves(name, rows, outputs[name], prediction)]
        for name in names:
            problem = problems[name] or (_TWICE.format(name) if weight_of(name) in reached else None)
            # A hidden layer that can be read, but not edited, is no obstacle to one who edits the last.
            if problem is not None and (name == names[-1] or not is_computed(modules[name])):
                raise ValueError(problem)
        if not names:
            raise ValueError("no nn.Linear layer feeds the prediction, so there is no weight to edit.")
        layers = tuple(describe_layer(name, index, modules[name]) for index, name in enumerate(names))
        last, like = names[-1], outputs[names[-1]]
        path = trace.path(last, prediction)
        operation, kinds = name_operations(step.name for step in path)

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = torch.as_tensor(np.ascontiguousarray(z)).to(like.dtype)
            repeated = take(rows, np.arange(len(values)) % row_count(rows))
            return to_numpy(values), to_numpy(self._run_from(last, repeated, values))

        return layers, Tail(
            last,
            rows,
            to_numpy(like),
            run,
            operation,
            kinds if last in reached else KINDS,  # else the way was lost outside torch
            joined=mixing(path, last),
            eps=max(torch.finfo(dtype).eps for dtype in (like.dtype, prediction.dtype)),
        )

    def _moves(self, name: str, x: Inputs, output: torch.Tensor, prediction: torch.Tensor) -> bool:
        """Whether the prediction follows a layer whose trace was lost (a detour through NumPy, a foreign kernel)."""
        return not torch.equal(self._run_from(name, x, output + 1 + output.abs().max()), prediction)

    def _run_from(self, name: str, x: Inputs, z: torch.Tensor) -> torch.Tensor:
        """Prediction for rows `x` if the layer had given `z`."""

        def put(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            return z.to(output, copy=True).reshape(output.shape)

        return self._run(_cloned(x), {name: put})

    def _run(
        self,
        x: Inputs,
        after: Mapping[str, Hook],
        *,
        before: Mapping[str, Hook] | None = None,
        mode: AbstractContextManager[Any] | None = None,
    ) -> torch.Tensor:
        """Forward pass with hooks after and before the named layers: the prediction, (rows,)."""
        if os.getpid() != _HOME:  # a fork has none of the threads of its parent's pool, and would wait for them
            torch.set_num_threads(1)
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(torch.no_grad())
            for name, hook in (before or {}).items():
                stack.callback(self._linear(name).register_forward_pre_hook(hook).remove)
            for name, hook in after.items():
                # First in line: a user's own hook on the layer belongs to what comes after it.
                handle = self._linear(name).register_forward_hook(hook, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(mode or nullcontext())
            prediction: torch.Tensor = as_column(_select(self._call(x), self._output), row_count(x))
            if not prediction.is_floating_point():
                raise ValueError(f"the model predicts {prediction.dtype}; a regressor predicts real numbers.")
            return prediction

    def _call(self, x: Inputs) -> Any:
        """Run the module on its inputs, in order or by name, or as one collection where it takes one."""
        if isinstance(x, torch.Tensor) or not self._spreads(x):
            return self._core(x)
        return self._core(**x) if isinstance(x, dict) else self._core(*x)

    def _spreads(self, x: tuple[Any, ...] | dict[str, Any]) -> bool:
        """Whether the inputs are arguments of `forward` rather than a collection that is its only one."""
        try:
            inspect.signature(self._core.forward).bind(
                *(() if isinstance(x, dict) else x), **(x if isinstance(x, dict) else {})
            )
        except TypeError:
            return False
        return True

    def _linear(self, name: str) -> nn.Linear:
        try:
            module = self._core.get_submodule(name)
        except AttributeError:
            module = self._core
        if not is_linear(module):
            known = [repr(n) for n, m in self._core.named_modules() if is_linear(m)]
            raise ValueError(f"the model has no linear layer {name!r}; it has {', '.join(known) or 'none'}.")
        return module


_TWICE = (
    "layer {!r} shares its weights: one forward pass uses them more than once, so an edit would act in several places. "
    "Give each use a layer of its own."
)


def _layer_input(args: Any, kwargs: Any) -> torch.Tensor:
    value: torch.Tensor = args[0] if args else kwargs["input"]
    return value


# --- values that go into a model and come out of it -------------------------------------------------------------------


def _to_inputs(x: Any, model: nn.Module) -> Inputs:
    """Copies of one or several inputs, as `_to_tensor` makes them; of several, whole numbers and masks stay."""
    several: Inputs | None = each_input(x, lambda value: _to_tensor(value, model, whole=True))
    return _to_tensor(x, model) if several is None else several


def _tensors(x: Inputs) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [value for value in (x.values() if isinstance(x, dict) else x) if isinstance(value, torch.Tensor)]


def _cloned(x: Inputs) -> Inputs:
    return x.clone() if isinstance(x, torch.Tensor) else each_input(x, torch.clone)


def _to_tensor(x: Any, model: nn.Module, *, whole: bool = False) -> torch.Tensor:
    """Copy `x` in the model's dtype, on its device: a forward pass that works in place must not write into `x`.

    Integer tensors stay integers if the model has an embedding, or if they are `whole` numbers beside other inputs.
    """
    like = _reference(model)
    if not isinstance(x, torch.Tensor):
        values = np.ascontiguousarray(numeric(x, "a torch model"))  # torch takes no negative strides
        if values.dtype.kind == "f" and not (values.dtype.isnative and values.dtype.itemsize <= 8):
            with np.errstate(over="ignore"):  # what is beyond float64 is infinite, and then said to be
                values = values.astype(np.float64)  # torch takes no other order of bytes, and no long doubles
        keep = whole and values.dtype.kind in "iub"
        return torch.tensor(values, dtype=None if keep else like.dtype).to(like.device)
    if x.is_complex() or x.is_meta or x.layout != torch.strided:
        kind = "complex" if x.is_complex() else "on the device meta, without data" if x.is_meta else f"{x.layout}"
        raise ValueError(f"X is a tensor that is {kind}; a torch model takes dense tensors of numbers.")
    embeds = whole or any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    keep = not x.is_floating_point() and embeds
    # dtype first: a device may not know the dtype that comes in (float64 on Apple's)
    moved = (x if keep else x.to(like.dtype)).to(like.device)
    return (moved.clone() if moved is x else moved).detach()


def _reference(model: nn.Module) -> torch.Tensor:
    """A floating tensor of the model that shows its dtype and device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0)


def _select(result: Any, output: Selector | None) -> torch.Tensor:
    """Take the prediction out of what a model returned."""
    value = output(result) if callable(output) else result
    for step in () if callable(output) or output is None else output if isinstance(output, tuple) else (output,):
        value = _item(value, step, output)
    if isinstance(value, torch.Tensor):
        return value
    raise InputError(
        "the model returns {contents}. Say which is the prediction: {output}, a key or an index."
        if output is None
        else "{output} gives a {kind}, not a tensor of predictions.",
        contents=_contents(result),
        kind=type(value).__name__,
        output=Given(output),
    )


def _item(result: Any, step: str | int, output: Selector | None) -> Any:
    if isinstance(result, torch.Tensor) and step == SIGMOID:
        return torch.sigmoid(result)
    if isinstance(result, torch.Tensor) and not (result.ndim == 2 and result.shape[1] > 1 and isinstance(step, int)):
        raise InputError(
            "{output} selects from a dict, a tuple or several columns; the model returns one tensor: drop it.",
            output=Given(output),
        )
    try:
        if isinstance(result, torch.Tensor):
            return result[:, int(step)]
        if isinstance(step, str) and not isinstance(result, Mapping):
            return getattr(result, step)  # a named tuple or a dataclass
        return result[step]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise InputError(
            "the model returns {contents}, and nothing in it is {output}.",
            contents=_contents(result),
            output=Given(output),
        ) from error


def _contents(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"{result.shape[1]} columns"
    kind = f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        return f"{kind} with keys {', '.join(map(repr, result))}"
    return f"{kind} of {len(result)}" if isinstance(result, list | tuple) else kind
