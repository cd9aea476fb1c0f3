"""What a torch module is made of: wrappers, layers that can and cannot be edited, and what feeds what when it runs.

A forward pass is followed by a dispatch mode, which sees every tensor operation below autograd, so this works where
gradients do not: under `no_grad`, with integer inputs, after `detach`. Tensors are told apart by their storage, because
a view shares it.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from esvdfair.models.base import LinearLayer


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


def check_initialised(model: nn.Module) -> None:
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


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an `nn.Linear`, or a quantised stand-in for one (`find_problem` tells)."""
    return isinstance(module, nn.Linear) or (_quantised(module) and "Linear" in type(module).__name__)


def find_problem(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """Say why a linear layer cannot be given new weights of its own, or None if it can."""
    if _quantised(module) or _quantised(module._parameters.get("weight")):
        return f"layer {name!r} is quantised ({_kind(module)}): repair the float model, then quantise it again."
    if is_computed(module):
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
    sharing = _sharing(module, model)
    if sharing is not None:
        return (
            f"layer {name!r} shares (ties) its {sharing[0]} with {sharing[1]!r}: an edit of one would change "
            "the other. Give each its own parameter."
        )
    return None


def is_computed(module: nn.Module) -> bool:
    """Whether the weight is computed from other parameters (spectral norm, pruning), so that it can only be read."""
    stored = isinstance(module._parameters.get("weight"), nn.Parameter) and not hasattr(module, "parametrizations")
    return not stored and not _quantised(module)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _quantised(value: Any) -> bool:
    """Whether a module or weight comes from a library that quantises (torch.ao, torchao, bitsandbytes)."""
    return any(word in type(value).__module__ for word in ("quantiz", ".qat.", "bitsandbytes"))


def _sharing(layer: nn.Module, model: nn.Module) -> tuple[str, str] | None:
    """Which parameter of the layer another module holds too, and under what name."""
    for own, parameter in layer._parameters.items():
        for name, module in model.named_modules():
            for other, candidate in module._parameters.items():
                if candidate is None or parameter is None or (module is layer and own == other):
                    continue
                if candidate is parameter or (candidate.data_ptr() == parameter.data_ptr() != 0):
                    return own, f"{name}.{other}".lstrip(".")
    return None


def computes_linear_map(module: nn.Linear, value: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a subclass of `nn.Linear`, or one with a patched `forward`, still gives `X Wᵀ + b`."""
    if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
        return True
    bias = None if module.bias is None else module.bias.double()
    expected = nn.functional.linear(value.double(), module.weight.double(), bias)
    tolerance = max(2e-3, 8 * torch.finfo(output.dtype).eps)
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return output.shape == expected.shape and bool((output - expected).abs().max() <= tolerance * size)


def describe_layer(name: str, index: int, module: nn.Linear) -> LinearLayer:
    """Copy a layer's weights into float64."""
    bias = None if module.bias is None else _to_float64(module.bias)
    return LinearLayer(name, index, _to_float64(module.weight), bias)


def _to_float64(tensor: torch.Tensor) -> NDArray[np.float64]:
    return tensor.detach().cpu().to(torch.float64, copy=True).numpy()


def assign(name: str, parameter: torch.Tensor, values: NDArray[Any]) -> None:
    """Write values into a parameter, in its own dtype and on its own device."""
    rounded = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(parameter.dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"new weights of layer {name!r} are too large for {parameter.dtype}.")
    with torch.no_grad():
        parameter.copy_(rounded)


def private(model: nn.Module) -> nn.Module:
    """A copy to run, with the parameters of the original, in eval mode, without compiled parts, which know no hooks.

    The flags are set directly: `eval()` calls the user's `train`, which may do more (merge adapters) than is wanted.
    """
    twin = copied(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in [*twin.modules()]:
        module.training = False
        for name, child in module._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                module._modules[name] = unwrap(child)
    return twin


def copied(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
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
        yield name, storage_of(tensor), tensor


# --- what feeds what ------------------------------------------------------------------------------------------------

INPUT = "the model's input"


@dataclass(frozen=True)
class Operation:
    """One tensor operation: its name, the storages it read with what fed them at that moment, those it wrote."""

    name: str
    read: tuple[tuple[int, frozenset[str]], ...]
    written: frozenset[int]


def weight_of(layer: str) -> str:
    """Label of what was computed from a layer's weight outside that layer."""
    return f"weight of {layer}"


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Record operations, and spread labels from operands to results.

    Reading the weight of a layer while `inside` is another, or None, labels the result `weight_of(layer)`.
    """

    inside: str | None = None

    def __init__(self, weights: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._weights = {storage_of(weight): name for name, weight in weights.items() if weight is not None}
        self._operations: list[Operation] = []
        self._labels: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []  # a storage that is freed could come back as another tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler (seconds), which it needs only to keep out of a mode like this."""
        return False

    def mark(self, tensor: torch.Tensor, label: str) -> None:
        """Say that `tensor`, and all that is computed from it from now on, depends on `label`."""
        self._kept.append(tensor)
        key = storage_of(tensor)
        self._labels[key] = self._labels.get(key, frozenset()) | {label}

    def labels(self, tensor: torch.Tensor) -> frozenset[str]:
        """What `tensor` depends on."""
        return self._labels.get(storage_of(tensor), frozenset())

    def path(self, label: str, tensor: torch.Tensor) -> list[Operation]:
        """Operations by which `label` reaches `tensor`, in order of execution."""
        wanted = {storage_of(tensor)}
        found = []
        for operation in reversed(self._operations):
            carriers = {key for key, labels in operation.read if label in labels}
            if carriers and wanted & operation.written:
                found.append(operation)
                wanted |= carriers
        return found[::-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = tuple((storage_of(t), self.labels(t) | self._foreign_use(t)) for t in _tensors((args, kwargs)))
        result = func(*args, **kwargs)
        written = list(_tensors(result))
        self._kept += written
        name = str(func.overloadpacket.__name__).rstrip("_")
        labels = frozenset[str]().union(*(labels for _, labels in read))
        if labels and not _only_shape(name):
            keys = frozenset(storage_of(t) for t in written)
            self._operations.append(Operation(name, read, keys))
            for key in keys:
                self._labels[key] = self._labels.get(key, frozenset()) | labels
        return result

    def _foreign_use(self, tensor: torch.Tensor) -> frozenset[str]:
        owner = self._weights.get(storage_of(tensor))
        return frozenset() if owner is None or owner == self.inside else frozenset({weight_of(owner)})


def _only_shape(name: str) -> bool:
    """Whether an operation takes no more than shape, dtype and device from its operand (zeros_like, new_full)."""
    return name.endswith("_like") or name.startswith("new_")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def storage_of(tensor: torch.Tensor) -> int:
    """A number by which tensors that share their memory are known, while they live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors have no storage, and no views either
        return id(tensor)


def mixing(path: Iterable[Operation], label: str) -> str | None:
    """Name of the first operation that joins `label` with something that depends on the input in another way."""
    for operation in path:
        others = [labels for _, labels in operation.read if label not in labels]
        if any(INPUT in labels for labels in others):
            return operation.name
    return None
