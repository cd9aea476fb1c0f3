"""Any `torch.nn.Module` as a `ModelAdapter`.

A wrapper made by `torch.compile` or `nn.DataParallel` is looked through: the module inside is run, eagerly and on its
own device; a repaired copy wears the same wrapper. Layer names are those inside it.
"""

import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esvdfair.core.checks import row_count, several_inputs, take, to_numpy
from esvdfair.core.quadratic import KINDS, Head
from esvdfair.models import base
from esvdfair.models.base import LinearLayer, ModelAdapter, Weights
from esvdfair.models.heads import name_operations, same_values
from esvdfair.models.readouts import Readout
from esvdfair.models.tails import Section, Tail, find_readout
from esvdfair.models.torch_modules import (
    Inputs,
    Linear,
    Product,
    Selector,
    Watched,
    as_layer,
    check_initialised,
    copied,
    find_problem,
    find_products,
    is_linear,
    parameter_of,
    private,
    select,
    to_inputs,
    to_tensor,
    unwrap,
)
from esvdfair.models.torch_trace import TWICE, Trace

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
        self._problems: dict[str, str] = {}  # why hidden layers cannot be edited
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

    # --- layers -------------------------------------------------------------------------------------------------------

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

    def _layer(self, name: str) -> LinearLayer:
        module = self._linear(name)
        problem = self._problems.get(name) or find_problem(name, module, self._core)
        if problem is not None:
            raise ValueError(problem)
        return as_layer(name, 0, module, self._bias(name))

    def _bias(self, name: str) -> nn.Parameter | None:
        """What a layer adds: its own bias, or the parameter that the model adds to the output of its last one."""
        if self.added is not None and self.added[0] == name:
            return self._core.get_parameter(self.added[1])
        return self._linear(name).bias

    def _has_members(self, name: str) -> bool:
        """Whether a layer is a product with (members, in, out)."""
        return name in self._products and self._products[name].parameter.ndim == 3

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

    def layers(self, x: Any = None) -> tuple[LinearLayer, ...]:
        """As for all models."""
        with self._naming_adapters():
            return super().layers(x)

    def head(self, x: Any) -> Head:
        """As for all models."""
        with self._naming_adapters():
            return super().head(x)

    @contextmanager
    def _naming_adapters(self) -> Iterator[None]:
        """Let an error say what to do about adapters of peft, which may be what is in the way."""
        try:
            yield
        except ValueError as error:
            step = "Call merge_and_unload() on the model of peft first, and repair what it returns."
            if step in str(error) or not any(type(m).__module__.startswith("peft.") for m in self._core.modules()):
                raise
            raise type(error)(f"{error} {step}") from error

    # --- what the layers are, and what follows the last ones ----------------------------------------------------------

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
            known = everything.keys() - self._products.keys()
            self._probed = tuple(each for each in layers if each.name not in known), tail
        return self._probed

    def _look(self, x: Inputs) -> tuple[list[LinearLayer], Tail]:
        """As `_probe`, with products among the layers wherever they are."""
        rows = self._inputs(x)  # a copy, in case the model writes into what it is given
        modules = {name: module for name, module in self._core.named_modules() if is_linear(module)} | self._products
        seen = Trace(self._core, modules, x)
        seen.prediction = self._run(x, {name: partial(seen.leave, name) for name in modules}, seen)
        names = [name for name in seen.outputs if seen.reaches(name) or self._moves(name, rows, seen)]
        if not names:
            raise ValueError(self._without_layers())
        last, operations, joined = seen.last_layers(names)
        self._problems = {name: problem for name in names if (problem := seen.problem(name)) is not None}
        for name, problem in self._problems.items():
            # A hidden layer that can be read, but not edited, is no obstacle to one who edits the last.
            if name in last or name in seen.unreadable:
                raise ValueError(problem)
        self.added = self._find_added(last[0], rows, seen) if len(last) == 1 else None
        operation, kinds = name_operations(operations)
        kinds = kinds if seen.reaches(last[-1]) else KINDS  # else the way was lost outside torch
        tail = self._make_tail({name: seen.outputs[name] for name in last}, rows, seen.prediction.dtype)
        layers = [as_layer(name, i, self._linear(name), self._bias(name)) for i, name in enumerate(names)]
        return layers, replace(tail, operation=operation, kinds=kinds, joined=joined)

    def _without_layers(self) -> str:
        kinds = sorted({type(module).__name__ for module in self._core.modules() if module._parameters})
        others = f" (the model has parameters in {', '.join(kinds)})" if kinds else ""
        return (
            f"no nn.Linear layer feeds the prediction{others}, so there is no weight to edit. Make the last layer an "
            "nn.Linear."
        )

    def _moves(self, name: str, rows: Inputs, seen: Trace) -> bool:
        """Whether a layer feeds the prediction where the trace is lost, in a detour through NumPy or foreign code."""
        output = seen.outputs[name]
        return not torch.equal(self._run_from({name: 1 + output + output.abs().max()}, rows), seen.prediction)

    def _find_added(self, last: str, rows: Inputs, seen: Trace) -> tuple[str, str] | None:
        """The layer and the parameter that is its bias: to move it moves the prediction as the output does."""
        if self._linear(last).bias is not None:
            return None
        output, prediction = seen.outputs[last], seen.prediction
        sizes = (output[0].numel() if self._has_members(last) else output.shape[-1], output.shape[-1])
        eps = max(torch.finfo(dtype).eps for dtype in (output.dtype, prediction.dtype))
        owners = Counter(id(p) for module in self._core.modules() for p in module._parameters.values())
        for name, parameter in self._core.named_parameters():
            if parameter.numel() not in sizes or not parameter.is_floating_point() or owners[id(parameter)] > 1:
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

    def _make_tail(self, outputs: Mapping[str, torch.Tensor], rows: Inputs, predicted: torch.dtype) -> Tail:
        """What follows the last layers and the parameter that is added to one, if there is one."""
        added = torch.zeros(1) if self.added is None else self._core.get_parameter(self.added[1]).detach().reshape(-1)
        count, dtypes = row_count(rows), [predicted, *(output.dtype for output in outputs.values())]
        sections = tuple(
            Section(name, output.numel() // count // output.shape[-1], int(output.shape[-1]), self._has_members(name))
            for name, output in outputs.items()
        )
        ends = np.cumsum([section.positions * section.outputs for section in sections])[:-1]

        def split(z: NDArray[np.float64]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Inputs]:
            """Outputs of the layers, these without what is added, and rows to run."""
            parts = zip(outputs.items(), np.split(z.reshape(len(z), -1), ends, axis=1), strict=True)
            values = {name: torch.as_tensor(np.ascontiguousarray(part)).to(like) for (name, like), part in parts}
            plain = {
                n: v if self.added is None else v - added.repeat(v.shape[1] // len(added)) for n, v in values.items()
            }
            return values, plain, take(rows, np.arange(len(z)) % count)

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values, plain, repeated = split(z)
            return _side_by_side(values, len(z)), to_numpy(self._run_from(plain, repeated))

        def slopes(z: NDArray[np.float64]) -> NDArray[np.float64] | None:
            _, plain, repeated = split(z)
            found = self._slopes(plain, repeated)
            return None if found is None else _side_by_side(found, len(z))

        several = added.reshape(-1, next(iter(outputs.values())).shape[-1]) if self.added else added  # of members
        shown = to_numpy(next(iter(outputs.values())) + several) if len(outputs) == 1 else _side_by_side(outputs, count)
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return Tail(" + ".join(outputs), rows, shown, run, "", eps=eps, sections=sections, slopes=slopes)

    def _tail_of(self, x: Any, readout: Readout) -> Tail:
        rows, outputs = self._inputs(x), dict[str, torch.Tensor]()

        def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            outputs[name] = output.clone()

        prediction = self._run(self._inputs(rows), {part.layer: partial(keep, part.layer) for part in readout.parts})
        return self._make_tail(outputs, rows, prediction.dtype)

    def _slopes(self, outputs: Mapping[str, torch.Tensor | float], x: Inputs) -> dict[str, torch.Tensor] | None:
        """Derivatives of the prediction in the outputs of the last layers, if they gave these; None if torch has none.

        Only what follows the first of these layers is recorded for it.
        """
        leaves: dict[str, torch.Tensor] = {}
        try:
            prediction = self._run_from(outputs, x, leaves)
            if not prediction.requires_grad:
                return None
            own = list(leaves.values())
            found = torch.autograd.grad(prediction.sum(), own, allow_unused=True, materialize_grads=True)
        except RuntimeError:  # a detour through NumPy, inference mode
            return None
        return dict(zip(leaves, found, strict=True))

    def _position_weights(self, x: Any) -> dict[str, torch.Tensor]:
        readout = self.readout
        assert readout is not None
        slopes = self._slopes({part.layer: readout.usual for part in readout.parts}, self._inputs(x))
        if slopes is None:
            raise ValueError("the model stopped giving derivatives, by which positions are found; pass it unchanged.")
        weights = {}
        for part in (part for part in readout.parts if part.positions is None):
            output = part.outputs[int(np.argmax(np.abs(part.factors)))]
            own = slopes[part.layer].reshape(row_count(x), -1, slopes[part.layer].shape[-1])[:, :, output]
            weights[part.layer] = (own / own.sum(dim=1, keepdim=True)).nan_to_num(0.0)  # where every position is masked
        return weights

    # --- forward passes -----------------------------------------------------------------------------------------------

    def _predict(self, x: Any) -> torch.Tensor:
        return self._run(self._inputs(x), {})

    def _capture(
        self, x: Any, names: Sequence[str], *, copies: bool = False
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run one forward pass: the inputs of the named layers and the prediction, on the model's device."""
        inputs: dict[str, torch.Tensor] = {}
        versions: dict[str, int | None] = {}

        def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in inputs:
                raise ValueError(TWICE.format(name))
            found = [*args, *kwargs.values()][0].detach()
            counted = not copies and not found.is_inference()
            inputs[name], versions[name] = (found, found._version) if counted else (found.clone(), None)

        prediction = self._run(self._inputs(x), {name: partial(keep, name) for name in names})
        # Copies only where the model goes on to write into what a layer was given, which torch counts.
        if any(count is not None and count != inputs[name]._version for name, count in versions.items()):
            return self._capture(x, names, copies=True)
        if missed := [name for name in names if name not in inputs]:
            raise ValueError(
                f"the forward pass does not reach layer {missed[0]!r}, so its weights have no effect on this output."
            )
        return inputs, prediction

    def _run_from(
        self, outputs: Mapping[str, torch.Tensor | float], x: Inputs, leaves: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Prediction for rows `x` if the layers had given these outputs; `leaves` keeps them for derivatives."""

        def put(name: str, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            value = torch.as_tensor(outputs[name]).to(output)
            value = (value.expand_as(output) if value.ndim == 0 else value.reshape(output.shape)).clone()
            if leaves is None:
                return value
            torch.set_grad_enabled(True)
            leaves[name] = value.requires_grad_()
            return value.clone()

        return self._run(self._inputs(x), {name: partial(put, name) for name in outputs})

    def _run(self, x: Inputs, after: Mapping[str, Callable[..., Any]], trace: Trace | None = None) -> torch.Tensor:
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
            if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in self._core.modules()):
                self._takes_whole = False
            elif row_count(x) and base.numeric(x, "a torch model").dtype.kind in "iub":
                self._takes_whole = self._fails_on_floats(x)
        found = to_inputs(x, self._core, whole=bool(self._takes_whole))
        if self._takes_whole and isinstance(found, torch.Tensor) and not found.is_floating_point():
            return found if found.dtype in (torch.int32, torch.int64) else found.long()  # what an embedding looks up
        return found

    def _fails_on_floats(self, x: Any) -> bool:
        """Whether a network with embeddings cannot run on the numbers of `x` as floats, as these look none up."""
        try:
            with self._lock, torch.no_grad():
                self._core(to_tensor(base.first_rows(x), self._core))
        except RuntimeError:
            return True
        return False


def _side_by_side(tensors: Mapping[str, torch.Tensor], rows: int) -> NDArray[Any]:
    """(rows, M) all numbers of a row, side by side."""
    return np.concatenate([to_numpy(tensor).reshape(rows, -1) for tensor in tensors.values()], axis=1)
