"""Any `torch.nn.Module` as a `ModelAdapter`.

A wrapper made by `torch.compile` or `nn.DataParallel` is looked through: the module inside is run, eagerly and on its
own device; a repaired copy wears the same wrapper. Layer names are those inside it.

What feeds what is seen by a dispatch mode, below autograd, so this works where gradients do not: under `no_grad`, with
integer inputs, after `detach`. Tensors are told apart by their storage, because a view shares it.
"""

import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esvdfair.core.checks import row_count, several_inputs, take, to_numpy
from esvdfair.core.quadratic import KINDS
from esvdfair.models import base
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights
from esvdfair.models.heads import name_operations, same_values
from esvdfair.models.readouts import Readout, moves
from esvdfair.models.tails import Section, find_readout
from esvdfair.models.torch_modules import (
    as_layer,
    check_initialised,
    computes_linear_map,
    copied,
    find_problem,
    is_computed,
    is_linear,
    private,
    unwrap,
)
from esvdfair.models.torch_products import Linear, Product, Watched, find_products, parameter_of
from esvdfair.models.torch_trace import INPUT, TWICE, Pass, Trace, tensors
from esvdfair.models.torch_values import Inputs, Selector, select, to_inputs, to_tensor

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
        self._core = self._private(model)
        self._products = self._find_products()
        self._output = output
        self._takes_whole: bool | None = None  # whether whole numbers go in as such; None until some are seen
        self._probed: tuple[tuple[LinearLayer, ...], Tail] | None = None
        self._lock = threading.Lock()  # hooks of one call must not be seen by another

    def _private(self, model: nn.Module) -> nn.Module:
        """What runs: a copy of the module."""
        return private(unwrap(model))

    def _find_products(self) -> dict[str, Product]:
        """Stand-ins for products with bare parameters, by name; once the model was seen, those of its last layers."""
        return find_products(self._core)

    @property
    def n_features(self) -> int | None:
        """Input width, known when the model begins with a linear layer."""
        first: nn.Module | None = self._core
        while isinstance(first, nn.Sequential):
            first = next(iter(first), None)
        return first.in_features if isinstance(first, nn.Linear) else None

    def _capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run one forward pass: the inputs of the named layers and the prediction, on the model's device."""
        inputs, versions, prediction = self._keep_inputs(x, names, copies=False)
        # Copies only where the model goes on to write into what a layer was given, which torch counts.
        if any(not found.is_inference() and found._version != versions[name] for name, found in inputs.items()):
            inputs, _, prediction = self._keep_inputs(x, names, copies=True)
        if missed := [name for name in names if name not in inputs]:
            raise ValueError(
                f"the forward pass does not reach layer {missed[0]!r}, so its weights have no effect on this output."
            )
        return inputs, prediction

    def _keep_inputs(
        self, x: Any, names: Sequence[str], *, copies: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, int], torch.Tensor]:
        """Inputs of the named layers, how often each had been written to by then, and the prediction."""
        inputs: dict[str, torch.Tensor] = {}
        versions: dict[str, int] = {}

        def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in inputs:
                raise ValueError(TWICE.format(name))
            found = [*args, *kwargs.values()][0].detach()
            counted = not copies and not found.is_inference()
            inputs[name], versions[name] = (found, found._version) if counted else (found.clone(), 0)

        prediction = self._run(self._inputs(x), {name: partial(keep, name) for name in names})
        return inputs, versions, prediction

    def _layer(self, name: str) -> LinearLayer:
        module = self._linear(name)
        problem = find_problem(name, module, self._core)
        if problem is not None:
            raise ValueError(problem)
        return as_layer(name, 0, module, self._bias(name))

    def _bias(self, name: str) -> nn.Parameter | None:
        """What a layer adds: its own bias, or the parameter that the model adds to the output of its last one."""
        if self.added is not None and self.added[0] == name:
            return self._core.get_parameter(self.added[1])
        return self._linear(name).bias

    def _edited(self, weights: Weights) -> "TorchAdapter":
        twin = self._twin(copied(self._model))
        for name, (weight, bias) in weights.items():
            layer, added = twin._linear(name), twin._bias(name)
            if isinstance(layer, Product):
                weight, bias = layer.arranged(weight, bias, added)
            for parameter, values in ((parameter_of(layer), weight), (added, bias)):
                if values is None or parameter is None:
                    continue
                rounded = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(parameter.dtype)
                if not bool(torch.isfinite(rounded).all()):
                    raise ValueError(f"new weights of layer {name!r} are too large for {parameter.dtype}.")
                with torch.no_grad():
                    parameter.copy_(rounded.reshape(parameter.shape))
        return twin

    def _twin(self, model: Any) -> "TorchAdapter":
        """An adapter of a copy."""
        twin = TorchAdapter(model, output=self._output)
        twin.added = self.added
        twin._products = {name: twin._products[name] for name in self._products}
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model, "output": self._output, "added": self.added, "readout": self.readout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], output=state["output"])  # type: ignore[misc]  # all else is made of these
        self.added, self.readout = state["added"], state["readout"]

    def _predict(self, x: Any) -> torch.Tensor:
        return self._run(self._inputs(x), {})

    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        return self._probe(x)[0]

    def _tail(self, rows: Any) -> Tail:
        return self._probe(rows)[1]

    def _probe(self, x: Any) -> tuple[tuple[LinearLayer, ...], Tail]:
        """The layers, and what follows the last ones: from one traced forward pass over the first rows of `x`."""
        if self._probed is None:
            rows, everything = self._inputs(base.first_rows(x)), self._products
            layers, tail = self._look(rows)
            self._products = {part.layer: everything[part.layer] for part in tail.parts if part.layer in everything}
            if self._products and (tail.joined is not None or find_readout(tail) is None):
                self._products = {}  # the layers before them may be read as a sum
                layers, tail = self._look(rows)
            self._probed = (
                tuple(each for each in layers if each.name not in everything or each.name in self._products),
                tail,
            )
        return self._probed

    def _look(self, x: Inputs) -> tuple[list[LinearLayer], Tail]:
        """As `_probe`, with products among the layers wherever they are."""
        rows = self._inputs(x)  # a copy, in case the model writes into what it is given
        seen = self._trace(x)
        names = [name for name in seen.outputs if seen.reaches(name) or self._moves(name, rows, seen)]
        if not names:
            raise ValueError("no nn.Linear layer feeds the prediction, so there is no weight to edit.")
        last, operations, joined = seen.last_layers(names)
        for name in names:
            problem = seen.problem(name)
            # A hidden layer that can be read, but not edited, is no obstacle to one who edits the last.
            if problem is not None and (name in last or not is_computed(self._linear(name))):
                raise ValueError(problem)
        self.added = (
            self._find_added(last[0], rows, seen) if len(last) == 1 and self._linear(last[0]).bias is None else None
        )
        operation, kinds = name_operations(operations)
        kinds = kinds if seen.reaches(last[-1]) else KINDS  # else the way was lost outside torch
        tail = self._make_tail({name: seen.outputs[name] for name in last}, rows, seen.prediction.dtype)
        tail = replace(tail, operation=operation, kinds=kinds, joined=joined)
        return [as_layer(name, i, self._linear(name), self._bias(name)) for i, name in enumerate(names)], tail

    def _trace(self, x: Inputs) -> Pass:
        """One forward pass, followed."""
        modules = {name: module for name, module in self._core.named_modules() if is_linear(module)} | self._products
        trace = Trace({name: parameter_of(module) for name, module in modules.items()})
        found = Pass(trace)

        def leave(name: str, module: Linear, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            value = [*args, *kwargs.values()][0]
            problem = TWICE.format(name) if name in found.outputs else find_problem(name, module, self._core)
            if problem is None and not computes_linear_map(module, value, output):
                problem = f"layer {name!r} is a {type(module).__name__}, whose output is not X Wᵀ + b."
            found.problems[name], found.outputs[name] = problem, output.detach().clone()
            found.feeds[name] = trace.labels(value)
            trace.mark(output, name)
            trace.inside = None

        for tensor in tensors(x):
            trace.mark(tensor, INPUT)
        found.prediction = self._run(x, {name: partial(leave, name) for name in modules}, trace)
        return found

    def _moves(self, name: str, rows: Inputs, seen: Pass) -> bool:
        """Whether a layer feeds the prediction where the trace is lost, in a detour through NumPy or foreign code."""
        output = seen.outputs[name]
        return not torch.equal(self._run_from({name: 1 + output + output.abs().max()}, rows), seen.prediction)

    def _make_tail(self, outputs: Mapping[str, torch.Tensor], rows: Inputs, predicted: torch.dtype) -> Tail:
        """What follows the last layers and the parameter that is added to one, if there is one."""
        added = torch.zeros(1) if self.added is None else self._core.get_parameter(self.added[1]).detach().reshape(-1)
        count, dtypes = row_count(rows), [predicted, *(output.dtype for output in outputs.values())]
        sections = tuple(
            Section(name, output.numel() // count // output.shape[-1], int(output.shape[-1]), self._has_members(name))
            for name, output in outputs.items()
        )
        ends = np.cumsum([section.positions * section.outputs for section in sections])[:-1]

        def split(z: NDArray[np.float64]) -> tuple[Inputs, dict[str, torch.Tensor]]:
            """Rows to run, and outputs of the layers."""
            parts = zip(outputs.items(), np.split(z.reshape(len(z), -1), ends, axis=1), strict=True)
            values = {name: torch.as_tensor(np.ascontiguousarray(part)).to(like) for (name, like), part in parts}
            return take(rows, np.arange(len(z)) % count), values

        def without(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            """What the layers give of outputs with the parameter that is added to them."""
            if self.added is None:
                return values
            return {name: value - added.repeat(value.shape[1] // len(added)) for name, value in values.items()}

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            repeated, values = split(z)
            return _side_by_side(values, len(z)), to_numpy(self._run_from(without(values), repeated))

        def slopes(z: NDArray[np.float64]) -> NDArray[np.float64] | None:
            repeated, values = split(z)
            found = self._slopes(without(values), repeated)
            return None if found is None else _side_by_side(found, len(z))

        several = added.reshape(-1, next(iter(outputs.values())).shape[-1]) if self.added else added  # of members
        shown = to_numpy(next(iter(outputs.values())) + several) if len(outputs) == 1 else _side_by_side(outputs, count)
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return Tail(" + ".join(outputs), rows, shown, run, "", eps=eps, sections=sections, slopes=slopes)

    def _find_added(self, last: str, rows: Inputs, seen: Pass) -> tuple[str, str] | None:
        """The layer and the parameter that is its bias: to move it moves the prediction as the output does."""
        output, prediction = seen.outputs[last], seen.prediction
        size = output[0].numel() if self._has_members(last) else output.shape[-1]
        eps = max(torch.finfo(dtype).eps for dtype in (output.dtype, prediction.dtype))
        owners = Counter(id(p) for module in self._core.modules() for p in module._parameters.values())
        for name, parameter in self._core.named_parameters():
            if (
                parameter.numel() not in (size, output.shape[-1])
                or not parameter.is_floating_point()
                or owners[id(parameter)] > 1
            ):
                continue
            shift = torch.linspace(0.5, 1.5, parameter.numel(), dtype=output.dtype, device=output.device)
            twin = self._twin(copied(self._model))
            moved = twin._core.get_parameter(name)
            with torch.no_grad():
                moved.add_(shift.to(moved).reshape(moved.shape))
            expected = to_numpy(self._run_from({last: output + shift.reshape(-1, output.shape[-1])}, rows))
            found = to_numpy(twin._predict(rows))
            if same_values(found, expected, eps) and not same_values(found, to_numpy(prediction), eps):
                return last, name
        return None

    def _run_from(self, outputs: Mapping[str, torch.Tensor], x: Inputs) -> torch.Tensor:
        """Prediction for rows `x` if the layers had given these outputs."""

        def put(z: torch.Tensor, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            return z.to(output, copy=True).reshape(output.shape)

        return self._run(self._inputs(x), {name: partial(put, z) for name, z in outputs.items()})

    def _predict_at(self, x: Any, readout: Readout, values: NDArray[np.float64]) -> NDArray[np.float64]:
        read = [(part, k, f) for part in readout.parts for k, f in zip(part.outputs, part.factors, strict=True)]
        steepest, column, factor = max(read, key=lambda each: abs(each[2]) if moves(each[0]) else 0.0)
        if not moves(steepest):
            raise ValueError("differences of positions stay when all positions are set.")
        wanted = torch.as_tensor(values / factor)

        def put(name: str, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            output, added = output.clone(), None if module.bias is not None else self._bias(name)
            for part in readout.parts:
                if part.layer == name:
                    output[..., list(part.outputs)] = 0
            if name == steepest.layer:
                repeated = wanted.repeat_interleave(output.numel() // output.shape[-1] // len(wanted))
                output[..., column] = repeated.reshape(output.shape[:-1]).to(output)
            return output if added is None else output - added.reshape(-1, output.shape[-1])  # which is added later

        prediction = self._run(self._inputs(x), {part.layer: partial(put, part.layer) for part in readout.parts})
        return to_numpy(prediction).astype(np.float64)

    def _slopes(self, outputs: Mapping[str, torch.Tensor | float], x: Inputs) -> dict[str, torch.Tensor] | None:
        """Derivatives of the prediction in the outputs of the last layers, if they gave these; None if torch has none.

        Only what follows the first of these layers is recorded for it.
        """
        leaves: dict[str, torch.Tensor] = {}

        def put(name: str, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(True)
            value = torch.as_tensor(outputs[name]).to(output)
            leaves[name] = value.expand_as(output) if value.ndim == 0 else value.reshape(output.shape)
            leaves[name] = leaves[name].clone().requires_grad_()
            return leaves[name].clone()

        try:
            prediction = self._run(self._inputs(x), {name: partial(put, name) for name in outputs})
            if not prediction.requires_grad:
                return None
            found = torch.autograd.grad(prediction.sum(), list(leaves.values()), allow_unused=True)
        except RuntimeError:  # a detour through NumPy, inference mode
            return None
        given = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if part is None else part for (name, leaf), part in given}

    def _position_weights(self, x: Any) -> dict[str, torch.Tensor]:
        readout = self.readout
        assert readout is not None
        rows, outputs = row_count(x), {part.layer: readout.usual for part in readout.parts}
        slopes = self._slopes(outputs, self._inputs(x))
        if slopes is None:
            raise ValueError("the model stopped giving derivatives, by which positions are found; pass it unchanged.")
        weights = {}
        for part in (part for part in readout.parts if part.positions is None):
            output = part.outputs[int(np.argmax(np.abs(part.factors)))]
            own = slopes[part.layer].reshape(rows, -1, slopes[part.layer].shape[-1])[:, :, output]
            weights[part.layer] = own / own.sum(dim=1, keepdim=True)
        return weights

    def _run(self, x: Inputs, after: Mapping[str, Callable[..., Any]], trace: "Trace | None" = None) -> torch.Tensor:
        """Forward pass with hooks after the named layers, which a trace may follow: the prediction, (rows,)."""
        if os.getpid() != _HOME:  # a fork has none of the threads of its parent's pool, and would wait for them
            torch.set_num_threads(1)
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(torch.no_grad())
            for name, hook in after.items():
                module = self._linear(name)
                if trace is not None:
                    stack.callback(module.register_forward_pre_hook(partial(trace.enter, name)).remove)
                # First in line: a user's own hook on the layer belongs to what comes after it.
                stack.callback(module.register_forward_hook(hook, prepend=True, with_kwargs=True).remove)
            stack.enter_context(trace or nullcontext())
            stack.enter_context(Watched(self._products) if self._products else nullcontext())
            prediction: torch.Tensor = base.as_column(select(self._call(x), self._output), row_count(x))
            if not prediction.is_floating_point():
                raise ValueError(f"the model predicts {prediction.dtype}; a regressor predicts real numbers.")
            return prediction

    def _call(self, x: Inputs) -> Any:
        """Run the module on its inputs, in order or by name, or as one collection where it takes one."""
        if isinstance(x, torch.Tensor):
            return self._core(x)
        args, kwargs = ((), x) if isinstance(x, dict) else (x, {})
        try:
            inspect.signature(self._core.forward).bind(*args, **kwargs)
        except TypeError:
            return self._core(x)
        return self._core(*args, **kwargs)

    def _inputs(self, x: Any) -> Inputs:
        """Copies of the inputs, on the model's device and in its dtype.

        Whole numbers stay such for a network that would look them up in an embedding as they come.
        """
        if self._takes_whole is None and several_inputs(x) is None and not isinstance(x, torch.Tensor):
            embeddings = [m for m in self._core.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
            if not embeddings:
                self._takes_whole = False
            elif row_count(x) and base.numeric(x, "a torch model").dtype.kind in "iub":
                self._takes_whole = self._embeds_floats(x, embeddings)
        found = to_inputs(x, self._core, whole=bool(self._takes_whole))
        if self._takes_whole and isinstance(found, torch.Tensor) and not found.is_floating_point():
            return found if found.dtype in (torch.int32, torch.int64) else found.long()  # what an embedding looks up
        return found

    def _embeds_floats(self, x: Any, embeddings: Sequence[nn.Module]) -> bool:
        """Whether an embedding would be given the numbers of `x` as floats, which it cannot look up."""
        kinds: list[bool] = []
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(torch.no_grad())
            stack.enter_context(suppress(Exception))  # that it cannot run is what is asked
            for module in embeddings:
                hook = module.register_forward_pre_hook(lambda _, args: kinds.append(args[0].is_floating_point()))
                stack.callback(hook.remove)
            self._core(to_tensor(base.first_rows(x), self._core))
        return any(kinds)

    def _has_members(self, name: str) -> bool:
        """Whether a layer is a product with (members, in, out)."""
        return name in self._products and self._products[name].parameter.ndim == 3

    def _linear(self, name: str) -> Linear:
        if name in self._products:
            return self._products[name]
        try:
            module = self._core.get_submodule(name)
        except AttributeError:
            module = self._core
        if not is_linear(module):
            known = [repr(n) for n, m in self._core.named_modules() if is_linear(m)]
            raise ValueError(f"the model has no linear layer {name!r}; it has {', '.join(known) or 'none'}.")
        return module


def _side_by_side(tensors: Mapping[str, torch.Tensor], rows: int) -> NDArray[Any]:
    """(rows, M) all numbers of a row, side by side."""
    return np.concatenate([to_numpy(tensor).reshape(rows, -1) for tensor in tensors.values()], axis=1)
