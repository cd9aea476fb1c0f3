"""What a torch module is made of: wrappers, copies, layers that can and cannot be edited."""

import copy
from collections.abc import Iterator
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from esvdfair.core.checks import to_numpy
from esvdfair.models.readouts import LinearLayer
from esvdfair.models.torch_products import Linear, Product, parameter_of
from esvdfair.models.torch_trace import storage_of


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
    if _quantised(module) or _quantised(parameter_of(module)):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"layer {name!r} is quantised ({kind}): repair the float model, then quantise it again."
    if is_computed(module):
        return (
            f"the weight of layer {name!r} is not a parameter but computed from others (a parametrisation, weight norm "
            "or pruning), so it cannot be set. Make it permanent first: torch.nn.utils.parametrize."
            "remove_parametrizations, or remove_weight_norm, or prune.remove."
        )
    weight = parameter_of(module)
    assert weight is not None
    if not weight.is_floating_point() or weight.dtype.itemsize < 2 or hasattr(type(weight), "__tensor_flatten__"):
        return (
            f"the weight of layer {name!r} is quantised or sharded ({type(weight).__name__}, {weight.dtype}): repair "
            "the plain float model."
        )
    for role, other in _sharing(name, module, model):
        return (
            f"layer {name!r} shares (ties) its {role} with {other!r}: an edit of one would change the other. Give each "
            "its own parameter."
        )
    return None


def is_computed(module: nn.Module) -> bool:
    """Whether the weight is computed from other parameters (spectral norm, pruning), so that it can only be read."""
    stored = isinstance(parameter_of(module), nn.Parameter) and not hasattr(module, "parametrizations")
    return not stored and not _quantised(module)


def _quantised(value: Any) -> bool:
    """Whether a module or weight comes from a library that quantises (torch.ao, torchao, bitsandbytes)."""
    return any(word in type(value).__module__ for word in ("quantiz", ".qat.", "bitsandbytes"))


def _sharing(known: str, layer: nn.Module, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters of the layer that another module holds too, and under what name."""
    held = [
        (module, other, f"{name}.{other}".lstrip("."), parameter)
        for name, module in model.named_modules()
        for other, parameter in module._parameters.items()
        if parameter is not None
    ]
    for own, parameter in layer._parameters.items():
        for module, other, name, candidate in held if parameter is not None else ():
            same = candidate is parameter or candidate.data_ptr() == parameter.data_ptr() != 0  # type: ignore[union-attr]
            if same and not (module is layer and own == other) and name != known:
                yield own, name


def computes_linear_map(module: Linear, value: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a subclass of `nn.Linear`, or one with a patched `forward`, still gives `X Wᵀ + b`."""
    if type(module).forward in (nn.Linear.forward, Product.forward) and "forward" not in vars(module):
        return True
    bias = None if module.bias is None else module.bias.double()
    expected = nn.functional.linear(value.double(), module.weight.double(), bias)
    tolerance = max(2e-3, 8 * torch.finfo(output.dtype).eps)
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return output.shape == expected.shape and bool((output - expected).abs().max() <= tolerance * size)


def as_layer(name: str, index: int, module: Linear, bias: torch.Tensor | None) -> LinearLayer:
    """A copy of a layer's weights in float64; the mean of the biases of its members."""
    weight = to_numpy(module.weight).astype(np.float64)
    added = None if bias is None else to_numpy(bias).astype(np.float64).reshape(-1, len(weight)).mean(axis=0)
    return LinearLayer(name, index, weight, added)


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
