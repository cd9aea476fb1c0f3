"""Any `torch.nn.Module` as a `ModelAdapter`.

A wrapper made by `torch.compile` or `nn.DataParallel` is looked through: the module inside is run, eagerly and on its
own device; a repaired copy wears the same wrapper. Layer names are those inside it.

What feeds what is seen by a dispatch mode, below autograd, so this works where gradients do not: under `no_grad`, with
integer inputs, after `detach`. Tensors are told apart by their storage, because a view shares it.
"""

import copy
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from esvdfair.core.checks import each_input, row_count, several_inputs, take, to_numpy
from esvdfair.core.quadratic import KINDS
from esvdfair.exceptions import InputError
from esvdfair.models import base
from esvdfair.models.base import LinearLayer, ModelAdapter, Tail, Weights

Selector = str | int | tuple[str | int, ...] | Callable[[Any], Any]
Inputs = torch.Tensor | tuple[Any, ...] | dict[str, Any]
"""What a module is called with: one tensor, tensors in order, or tensors by name."""

_HOME = os.getpid()  # the process whose threads torch's pool has

_INPUT = "the model's input"  # label of what depends on it

_TWICE = (
    "layer {!r} shares its weights: one forward pass uses them more than once, so an edit would act in several places. "
    "Give each use a layer of its own."
)


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
        _check_initialised(unwrap(model))
        self._core = _private(unwrap(model))
        self._output = output
        self._takes_whole: bool | None = None  # whether whole numbers go in as such; None until some are seen
        self._probed: tuple[tuple[LinearLayer, ...], Tail] | None = None
        self._lock = threading.Lock()  # hooks of one call must not be seen by another

    @property
    def n_features(self) -> int | None:
        """Input width, known when the model begins with a linear layer."""
        first: nn.Module | None = self._core
        while isinstance(first, nn.Sequential):
            first = next(iter(first), None)
        return first.in_features if isinstance(first, nn.Linear) else None

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run one forward pass: the inputs of the named layers and the prediction, on the model's device."""
        inputs: dict[str, torch.Tensor] = {}
        versions: dict[str, int] = {}

        def keep(copies: bool, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in inputs:
                raise ValueError(_TWICE.format(name))
            found = [*args, *kwargs.values()][0].detach()
            counted = not copies and not found.is_inference()
            inputs[name], versions[name] = (found, found._version) if counted else (found.clone(), 0)

        # Copies only where the model goes on to write into what a layer was given, which torch counts.
        for copies in (False, True):
            inputs.clear()
            prediction = self._run(self._inputs(x), {name: partial(keep, copies, name) for name in names})
            if all(found.is_inference() or found._version == versions[name] for name, found in inputs.items()):
                break
        for name in names:
            if name not in inputs:
                raise ValueError(
                    f"the forward pass does not reach layer {name!r}, so its weights have no effect on this output."
                )
        return inputs, prediction

    def _layer(self, name: str) -> LinearLayer:
        module = self._linear(name)
        problem = _find_problem(name, module, self._core)
        if problem is not None:
            raise ValueError(problem)
        return _describe(name, 0, module, self._bias(name))

    def _bias(self, name: str) -> nn.Parameter | None:
        """What a layer adds: its own bias, or the parameter that the model adds to the output of its last one."""
        if self.added is not None and self.added[0] == name:
            return self._core.get_parameter(self.added[1])
        return self._linear(name).bias

    def _edited(self, weights: Weights) -> "TorchAdapter":
        twin = TorchAdapter(_copied(self._model), output=self._output)
        twin.added = self.added
        for name, new in weights.items():
            for parameter, values in zip((twin._linear(name).weight, twin._bias(name)), new, strict=True):
                if values is None or parameter is None:
                    continue
                rounded = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(parameter.dtype)
                if not bool(torch.isfinite(rounded).all()):
                    raise ValueError(f"new weights of layer {name!r} are too large for {parameter.dtype}.")
                with torch.no_grad():
                    parameter.copy_(rounded.reshape(parameter.shape))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model, "output": self._output, "added": self.added, "column": self.column}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], output=state["output"])  # type: ignore[misc]  # all else is made of these
        self.added, self.column = state["added"], state["column"]

    def _predict(self, x: Any) -> torch.Tensor:
        return self._run(self._inputs(x), {})

    def _all_layers(self, x: Any) -> tuple[LinearLayer, ...]:
        return self._probe(x)[0]

    def _tail(self, rows: Any) -> Tail:
        return self._probe(rows)[1]

    def _probe(self, x: Any) -> tuple[tuple[LinearLayer, ...], Tail]:
        """The layers, and what follows the last one: from one traced forward pass over the first rows of `x`."""
        if self._probed is not None:
            return self._probed
        x = self._inputs(base.first_rows(x))
        modules = {name: module for name, module in self._core.named_modules() if _is_linear(module)}
        trace = _Trace({name: module._parameters.get("weight") for name, module in modules.items()})
        outputs: dict[str, torch.Tensor] = {}
        problems: dict[str, str | None] = {}

        def leave(name: str, module: nn.Linear, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            problems[name] = _TWICE.format(name) if name in outputs else _find_problem(name, module, self._core)
            if problems[name] is None and not _computes_linear_map(module, [*args, *kwargs.values()][0], output):
                problems[name] = f"layer {name!r} is a {type(module).__name__}, whose output is not X Wᵀ + b."
            outputs[name] = output.detach().clone()
            trace.mark(output, name)
            trace.inside = None

        rows = self._inputs(x)  # a copy, in case the model writes into what it is given
        for tensor in _tensors(x):
            trace.mark(tensor, _INPUT)
        prediction = self._run(x, {name: partial(leave, name) for name in modules}, trace)
        reached = trace.labels(prediction)
        # Where the trace is lost, in a detour through NumPy or a foreign kernel, one sees whether the prediction moves.
        moved = {name: 1 + output + output.abs().max() for name, output in outputs.items() if name not in reached}
        still = {name for name, z in moved.items() if torch.equal(self._run_from(name, rows, z), prediction)}
        names = [name for name in outputs if name not in still]
        for name in names:
            problem = problems[name] or (_TWICE.format(name) if _weight_of(name) in reached else None)
            # A hidden layer that can be read, but not edited, is no obstacle to one who edits the last.
            if problem is not None and (name == names[-1] or not _is_computed(modules[name])):
                raise ValueError(problem)
        if not names:
            raise ValueError("no nn.Linear layer feeds the prediction, so there is no weight to edit.")
        last = names[-1]
        if modules[last].bias is None:
            self.added = self._find_added(last, rows, outputs[last], prediction)
        operations, joined = trace.path(last, prediction)
        operation, kinds = base.name_operations(operations)
        kinds = kinds if last in reached else KINDS  # else the way was lost outside torch
        tail = self._make_tail(last, rows, outputs[last], operation, kinds, joined, prediction.dtype)
        layers = (_describe(name, index, modules[name], self._bias(name)) for index, name in enumerate(names))
        self._probed = tuple(layers), tail
        return self._probed

    def _make_tail(
        self, last: str, rows: Inputs, like: torch.Tensor, operation: str, kinds: Sequence[str], joined: str | None,
        predicted: torch.dtype,
    ) -> Tail:  # fmt: skip
        """What follows the last layer and the parameter that is added to it, if there is one."""
        added = 0.0 if self.added is None else self._core.get_parameter(self.added[1]).detach().reshape(-1)

        def run(z: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
            values = torch.as_tensor(np.ascontiguousarray(z)).to(like)
            repeated = take(rows, np.arange(len(values)) % row_count(rows))
            return to_numpy(values), to_numpy(self._run_from(last, repeated, values - added))

        eps = max(torch.finfo(dtype).eps for dtype in (like.dtype, predicted))
        return Tail(last, rows, to_numpy(like + added), run, operation, kinds, joined, eps=eps)

    def _find_added(
        self, last: str, rows: Inputs, output: torch.Tensor, prediction: torch.Tensor
    ) -> tuple[str, str] | None:
        """The layer and the parameter that is its bias: to move it moves the prediction as the output does."""
        width, eps = output.shape[-1], max(torch.finfo(dtype).eps for dtype in (output.dtype, prediction.dtype))
        owners = Counter(id(p) for module in self._core.modules() for p in module._parameters.values())
        for name, parameter in self._core.named_parameters():
            if parameter.numel() != width or not parameter.is_floating_point() or owners[id(parameter)] > 1:
                continue
            shift = torch.linspace(0.5, 1.5, width, dtype=output.dtype, device=output.device)
            twin = TorchAdapter(_copied(self._model), output=self._output)
            moved = twin._core.get_parameter(name)
            with torch.no_grad():
                moved.add_(shift.to(moved).reshape(moved.shape))
            found, expected = (to_numpy(p) for p in (twin._predict(rows), self._run_from(last, rows, output + shift)))
            if base.same_values(found, expected, eps) and not base.same_values(found, to_numpy(prediction), eps):
                return last, name
        return None

    def _run_from(self, name: str, x: Inputs, z: torch.Tensor) -> torch.Tensor:
        """Prediction for rows `x` if the layer had given `z`."""

        def put(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            return z.to(output, copy=True).reshape(output.shape)

        return self._run(self._inputs(x), {name: put})

    def _run(self, x: Inputs, after: Mapping[str, Callable[..., Any]], trace: "_Trace | None" = None) -> torch.Tensor:
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
            prediction: torch.Tensor = base.as_column(_select(self._call(x), self._output), row_count(x))
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
        found = _to_inputs(x, self._core, whole=bool(self._takes_whole))
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
            self._core(_to_tensor(base.first_rows(x), self._core))
        return any(kinds)

    def _linear(self, name: str) -> nn.Linear:
        try:
            module = self._core.get_submodule(name)
        except AttributeError:
            module = self._core
        if not _is_linear(module):
            known = [repr(n) for n, m in self._core.named_modules() if _is_linear(m)]
            raise ValueError(f"the model has no linear layer {name!r}; it has {', '.join(known) or 'none'}.")
        return module


# --- values that go into a model and come out of it -------------------------------------------------------------------


def _to_inputs(x: Any, model: nn.Module, *, whole: bool = False) -> Inputs:
    """Copies of one or several inputs, as `_to_tensor` makes them; of several, whole numbers and masks stay."""
    several: Inputs | None = each_input(x, lambda value: _to_tensor(value, model, whole=True))
    return _to_tensor(x, model, whole=whole) if several is None else several


def _to_tensor(x: Any, model: nn.Module, *, whole: bool = False) -> torch.Tensor:
    """Copy `x` in the model's dtype, on its device: a forward pass that works in place must not write into `x`.

    Integer tensors stay integers if the model has an embedding; other integers if `whole` numbers are wanted.
    """
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)
    like = torch.empty(0) if like is None else like
    if not isinstance(x, torch.Tensor):
        values = np.ascontiguousarray(base.numeric(x, "a torch model"))  # torch takes no negative strides
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


def _select(result: Any, output: Selector | None) -> torch.Tensor:
    """Take the prediction out of what a model returned."""
    value = output(result) if callable(output) else result
    steps = () if output is None or callable(output) else output if isinstance(output, tuple) else (output,)
    try:
        for step in steps:
            value = _item(value, step, output)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise InputError(f"the model returns {_contents(value)}; `output={output!r}` is not part of it.") from error
    if isinstance(value, torch.Tensor):
        return value
    if output is None:
        raise InputError(
            f"the model returns {_contents(result)}. Choose the prediction with `output`, a key or an index."
        )
    raise InputError(f"`output={output!r}` returns a {type(value).__name__}, not a tensor of predictions.")


def _item(result: Any, step: str | int, output: Selector | None) -> Any:
    if not isinstance(result, torch.Tensor):
        attribute = isinstance(step, str) and not isinstance(result, Mapping)  # of a named tuple or a dataclass
        return getattr(result, str(step)) if attribute else result[step]
    if step == base.SIGMOID:
        return torch.sigmoid(result)
    if result.ndim == 2 and result.shape[1] > 1 and isinstance(step, int):
        return result[:, step]
    raise InputError(
        f"`output={output!r}` selects from a dict, a tuple or several columns, but the model returns one tensor. "
        "Leave it out."
    )


def _contents(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"{result.shape[1]} columns"
    kind = f"a {type(result).__name__}"
    if isinstance(result, Mapping):
        return f"{kind} with keys {', '.join(map(repr, result))}"
    return f"{kind} of {len(result)}" if isinstance(result, list | tuple) else kind


# --- what a module is made of: wrappers, copies, layers that can and cannot be edited --------------------------------


def unwrap(model: nn.Module) -> nn.Module:
    """Module inside `torch.compile` and `nn.DataParallel`; other wrappers are a `ValueError`."""
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"got a {kind}: TorchScript does not let its layers be observed or edited. Pass the nn.Module from which "
            "it was made, and script the repaired model again."
        )
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise ValueError(f"got a {kind}, whose copies would need a process group of their own. Pass model.module.")
    if isinstance(model, nn.DataParallel):
        return unwrap(model.module)
    compiled = model._modules.get("_orig_mod")
    return model if compiled is None else unwrap(compiled)


def _check_initialised(model: nn.Module) -> None:
    """Raise if a parameter has no values yet: running the model would initialise it, at random, in place."""
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if is_lazy(parameter):
                raise ValueError(
                    f"layer {name!r} ({type(module).__name__}) is lazy and not initialised yet, so this model is not "
                    "trained. Run it once on data, train it, then repair it."
                )
            if parameter is not None and parameter.is_meta:
                raise ValueError(f"layer {name!r} is on the 'meta' device: it has no weights. Load them first.")
            if parameter is not None and parameter.is_complex():
                raise ValueError(f"layer {name!r} has complex weights; a regressor of real numbers can be repaired.")


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an `nn.Linear`, or a quantised stand-in for one (`_find_problem` tells)."""
    return isinstance(module, nn.Linear) or (_quantised(module) and "Linear" in type(module).__name__)


def _find_problem(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """Say why a linear layer cannot be given new weights of its own, or None if it can."""
    if _quantised(module) or _quantised(module._parameters.get("weight")):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"layer {name!r} is quantised ({kind}): repair the float model, then quantise it again."
    if _is_computed(module):
        return (
            f"the weight of layer {name!r} is not a parameter but computed from others (a parametrisation, weight norm "
            "or pruning), so it cannot be set. Make it permanent first: torch.nn.utils.parametrize."
            "remove_parametrizations, or remove_weight_norm, or prune.remove."
        )
    weight = module._parameters["weight"]
    assert weight is not None
    if not weight.is_floating_point() or weight.dtype.itemsize < 2 or hasattr(type(weight), "__tensor_flatten__"):
        return (
            f"the weight of layer {name!r} is quantised or sharded ({type(weight).__name__}, {weight.dtype}): repair "
            "the plain float model."
        )
    for role, other in _sharing(module, model):
        return (
            f"layer {name!r} shares (ties) its {role} with {other!r}: an edit of one would change the other. Give each "
            "its own parameter."
        )
    return None


def _is_computed(module: nn.Module) -> bool:
    """Whether the weight is computed from other parameters (spectral norm, pruning), so that it can only be read."""
    stored = isinstance(module._parameters.get("weight"), nn.Parameter) and not hasattr(module, "parametrizations")
    return not stored and not _quantised(module)


def _quantised(value: Any) -> bool:
    """Whether a module or weight comes from a library that quantises (torch.ao, torchao, bitsandbytes)."""
    return any(word in type(value).__module__ for word in ("quantiz", ".qat.", "bitsandbytes"))


def _sharing(layer: nn.Module, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters of the layer that another module holds too, and under what name."""
    for own, parameter in layer._parameters.items():
        for name, module in model.named_modules():
            for other, candidate in module._parameters.items():
                if candidate is None or parameter is None or (module is layer and own == other):
                    continue
                if candidate is parameter or (candidate.data_ptr() == parameter.data_ptr() != 0):
                    yield own, f"{name}.{other}".lstrip(".")


def _computes_linear_map(module: nn.Linear, value: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a subclass of `nn.Linear`, or one with a patched `forward`, still gives `X Wᵀ + b`."""
    if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
        return True
    bias = None if module.bias is None else module.bias.double()
    expected = nn.functional.linear(value.double(), module.weight.double(), bias)
    tolerance = max(2e-3, 8 * torch.finfo(output.dtype).eps)
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return output.shape == expected.shape and bool((output - expected).abs().max() <= tolerance * size)


def _describe(name: str, index: int, module: nn.Linear, bias: torch.Tensor | None) -> LinearLayer:
    """A copy of a layer's weights in float64."""
    added = None if bias is None else to_numpy(bias).astype(np.float64).reshape(-1)
    return LinearLayer(name, index, to_numpy(module.weight).astype(np.float64), added)


def _private(model: nn.Module) -> nn.Module:
    """A copy to run, with the parameters of the original, in eval mode, without compiled parts, which know no hooks.

    The flags are set directly: `eval()` calls the user's `train`, which may do more (merge adapters) than is wanted.
    """
    twin = _copied(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in [*twin.modules()]:
        module.training = False
        for name, child in module._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                module._modules[name] = unwrap(child)
    return twin


def _copied(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy, checked to be one: what it holds beyond `shared` (by id) is its own."""
    memo = dict(shared or {})
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, torch.Tensor) and not value.is_leaf:  # a pruned weight, a hidden state: torch copies none
            memo[id(value)] = value.detach().clone()
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the parts of a model raise when they are copied
        raise ValueError(
            f"the model cannot be copied ({error}). An attribute that holds a tensor computed in a forward pass is "
            "the usual cause: detach it, or do not keep it on the module."
        ) from error
    before, after = (list(_named_parts(item)) for item in (model, twin))  # alive together: no number is used twice
    own = {key for _, key, part in before if id(part) not in memo}
    kept = [name for name, key, _ in after if key in own]
    if kept:
        raise ValueError(
            f"copy.deepcopy of the model gives back {kept[0]!r} itself and no copy of it: an edit would reach the "
            "original. Check __deepcopy__ of the model's classes."
        )
    return twin


def _named_parts(model: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Submodules, parameters and buffers: name, a number by which a shared one is known, and the part."""
    yield from ((name or type(model).__name__, id(module), module) for name, module in model.named_modules())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, _storage_of(tensor), tensor


# --- what feeds what ------------------------------------------------------------------------------------------------


def _weight_of(layer: str) -> str:
    """Label of what was computed from a layer's weight outside that layer."""
    return f"weight of {layer}"


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Record operations, and spread labels from operands to results.

    Reading the weight of a layer while `inside` is another, or None, labels the result `_weight_of(layer)`.
    """

    inside: str | None = None

    def __init__(self, weights: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._weights = {_storage_of(weight): name for name, weight in weights.items() if weight is not None}
        # Name of each operation, the storages that it read, with what fed them at that moment, and those it wrote.
        self._operations: list[tuple[str, list[tuple[int, frozenset[str]]], frozenset[int]]] = []
        self._labels: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []  # a storage that is freed could come back as another tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler (seconds), which it needs only to keep out of a mode like this."""
        return False

    def enter(self, layer: str, module: nn.Module, args: Any) -> None:
        """What is called before a layer runs."""
        self.inside = layer

    def mark(self, tensor: torch.Tensor, label: str) -> None:
        """Say that `tensor`, and all that is computed from it from now on, depends on `label`."""
        self._kept.append(tensor)
        key = _storage_of(tensor)
        self._labels[key] = self._labels.get(key, frozenset()) | {label}

    def labels(self, tensor: torch.Tensor) -> frozenset[str]:
        """What `tensor` depends on."""
        return self._labels.get(_storage_of(tensor), frozenset())

    def path(self, label: str, tensor: torch.Tensor) -> tuple[list[str], str | None]:
        """Operations by which `label` reaches `tensor`, in order, and the first that joins it with other inputs."""
        wanted, names, joined = {_storage_of(tensor)}, [], None
        for name, read, written in reversed(self._operations):
            carriers = {key for key, labels in read if label in labels}
            if carriers and wanted & written:
                names.append(name)
                wanted |= carriers
                if any(_INPUT in labels and label not in labels for _, labels in read):
                    joined = name
        return names[::-1], joined

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = []
        for tensor in _tensors((args, kwargs)):
            owner = self._weights.get(_storage_of(tensor), self.inside)
            foreign = set() if owner is None or owner == self.inside else {_weight_of(owner)}
            read.append((_storage_of(tensor), self.labels(tensor) | foreign))
        result = func(*args, **kwargs)
        written = list(_tensors(result))
        self._kept += written
        name = str(func.overloadpacket.__name__).rstrip("_")
        labels = frozenset[str]().union(*(labels for _, labels in read))
        if labels and not name.endswith("_like") and not name.startswith("new_"):  # which take no more than a shape
            keys = frozenset(_storage_of(t) for t in written)
            self._operations.append((name, read, keys))
            for key in keys:
                self._labels[key] = self._labels.get(key, frozenset()) | labels
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _storage_of(tensor: torch.Tensor) -> int:
    """A number by which tensors that share their memory are known, while they live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors have no storage, and no views either
        return id(tensor)
