"""What a torch module is made of: wrappers, copies, layers that can and cannot be edited; and what goes in and out."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from esvdfair.core.checks import each_input, to_numpy
from esvdfair.exceptions import InputError
from esvdfair.models import base
from esvdfair.models.base import LinearLayer

Array = NDArray[Any]
Selector = str | int | tuple[str | int, ...] | Callable[[Any], Any]
Inputs = torch.Tensor | tuple[Any, ...] | dict[str, Any]
"""What a module is called with: one tensor, tensors in order, or tensors by name."""


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


# --- copies -----------------------------------------------------------------------------------------------------------


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


def storage_of(tensor: torch.Tensor) -> int:
    """A number by which tensors that share their memory are known, while they live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors have no storage, and no views either
        return id(tensor)


# --- linear layers ----------------------------------------------------------------------------------------------------


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an `nn.Linear`, or a quantised stand-in for one (`find_problem` tells)."""
    return isinstance(module, nn.Linear) or (_quantised(module) and "Linear" in type(module).__name__)


def find_problem(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """Say why a linear layer cannot be given new weights of its own, or None if it can."""
    weight = parameter_of(module)
    if _quantised(module) or _quantised(weight):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"layer {name!r} is quantised ({kind}): repair the float model, then quantise it again."
    if not isinstance(weight, nn.Parameter) or hasattr(module, "parametrizations"):
        return (
            f"the weight of layer {name!r} is not a parameter but computed from others (a parametrisation, weight norm "
            "or pruning), so it cannot be set. Make it permanent first: torch.nn.utils.parametrize."
            "remove_parametrizations, or remove_weight_norm, or prune.remove."
        )
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


class Product(nn.Module):
    """Stands in for `x @ parameter`, with x (rows, …, in), or `einsum("bki,kio->bko", x, parameter)`, as TabM has it.

    The parameter is (in,), (in, out), or (members, in, out): one linear layer a member.
    """

    bias = None

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parameter.ndim == 3:
            return torch.einsum("bki,kio->bko", x, self.parameter)
        return x @ self.parameter.reshape(len(self.parameter), -1)

    @property
    def weight(self) -> torch.Tensor:
        """(out, members · in), as of a layer that takes the inputs of all members side by side."""
        members = self.parameter if self.parameter.ndim == 3 else self.parameter.reshape(1, len(self.parameter), -1)
        return members.permute(2, 0, 1).flatten(1)

    def arranged(self, weight: Array, bias: Array | None, added: torch.Tensor | None) -> tuple[Array, Array | None]:
        """A weight (out, members · in) and a bias (out,) in the shapes of the parameters; members share its change."""
        shape = tuple(self.parameter.shape)
        members = shape[:2] if len(shape) == 3 else (1, shape[0])
        weight = weight.reshape(-1, *members).transpose(1, 2, 0).reshape(shape)
        if bias is None or added is None:
            return weight, bias
        own = to_numpy(added).astype(np.float64).reshape(-1, len(bias))
        return weight, bias if len(own) == 1 else own + (bias - own.mean(axis=0))


Linear = nn.Linear | Product


def parameter_of(module: nn.Module) -> torch.Tensor | None:
    """The weight of a linear layer or a product, if it is a parameter."""
    return module.parameter if isinstance(module, Product) else module._parameters.get("weight")


def computes_linear_map(module: Linear, value: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a stand-in or a subclass of `nn.Linear`, or one with a patched `forward`, still gives `X Wᵀ + b`."""
    if type(module).forward in (nn.Linear.forward, Product.forward) and "forward" not in vars(module):
        return True
    if not isinstance(module.weight, torch.Tensor) or not module.weight.is_floating_point():
        return False
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


def find_products(model: nn.Module) -> dict[str, Product]:
    """Parameters that a product may be made with, by name: those of no linear layer."""
    owned = {id(p) for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    return {
        name: Product(parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in owned and parameter.ndim <= 3 and parameter.numel() > 1
    }


_MATMULS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)


class Watched(TorchFunctionMode):
    """While it is entered, products with some parameters are made by the modules that stand in for them."""

    def __init__(self, products: Mapping[str, Product]) -> None:
        super().__init__()
        self._products = {id(product.parameter): product for product in products.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None
        if func in _MATMULS and len(args) == 2 and not kwargs and id(args[1]) in self._products:
            found = _by_place(self._products[id(args[1])], args[0])
        elif func is torch.einsum:
            found = self._by_labels(*args)
        return func(*args, **(kwargs or {})) if found is None else found

    def _by_labels(self, equation: Any, *operands: Any) -> torch.Tensor | None:
        """``einsum(equation, …)``, where it multiplies rows, or members of rows, by a parameter."""
        operands = operands[0] if len(operands) == 1 and not isinstance(operands[0], torch.Tensor) else operands
        if len(operands) != 2 or not isinstance(equation, str) or not {*map(id, operands)} & self._products.keys():
            return None
        inputs, _, output = equation.replace(" ", "").partition("->")
        (x, of_x), (parameter, own) = zip(operands, inputs.split(","), strict=True)
        if id(x) in self._products:
            x, of_x, parameter, own = parameter, own, x, of_x
        members, width, outputs = own[:-2], own[-2:-1] or own, own[1:][-1:]
        rows = "".join(set(of_x) - set(own))
        given, made = rows + members + width, rows + members + outputs
        if len(rows) != 1 or sorted(of_x) != sorted(given) or sorted(output) != sorted(made):
            return None
        found: torch.Tensor = self._products[id(parameter)](x.permute([of_x.index(label) for label in given]))
        found = found if outputs else found.squeeze(-1)
        return found.permute([made.index(label) for label in output])


def _by_place(product: Product, x: torch.Tensor) -> torch.Tensor | None:
    """``x @ parameter``."""
    dimensions = product.parameter.ndim
    if dimensions == 3:
        members = x.ndim == 3 and len(x) == len(product.parameter)
        return product(x.transpose(0, 1)).transpose(0, 1) if members else None
    if x.ndim < 2:
        return None
    found: torch.Tensor = product(x)
    return found.squeeze(-1) if dimensions == 1 else found


# --- what goes in and out ---------------------------------------------------------------------------------------------


def to_inputs(x: Any, model: nn.Module, *, whole: bool = False) -> Inputs:
    """Copies of one or several inputs, as `to_tensor` makes them; of several, whole numbers and masks stay."""
    several: Inputs | None = each_input(x, lambda value: to_tensor(value, model, whole=True))
    return to_tensor(x, model, whole=whole) if several is None else several


def to_tensor(x: Any, model: nn.Module, *, whole: bool = False) -> torch.Tensor:
    """Copy `x` in the model's dtype, on its device: a forward pass that works in place must not write into `x`.

    Integer tensors stay integers if the model has an embedding; other integers if `whole` numbers are wanted.
    """
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)
    like = torch.empty(0) if like is None else like
    if not isinstance(x, torch.Tensor):
        values = _native(base.numeric(x, "a torch model"))
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


def _native(values: Array) -> Array:
    """An array as torch takes it: no negative strides, no other order of bytes, no long doubles."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind != "f" or (values.dtype.isnative and values.dtype.itemsize <= 8):
        return values
    with np.errstate(over="ignore"):  # what is beyond float64 is infinite, and then said to be
        return values.astype(np.float64)


def select(result: Any, output: Selector | None) -> torch.Tensor:
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
