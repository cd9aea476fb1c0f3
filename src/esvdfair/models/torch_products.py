"""Products with bare parameters, as TabM has them: `einsum("bki,kio->bko", x, weight)`, seen like linear layers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from esvdfair.core.checks import to_numpy

Array = NDArray[Any]
_MATMULS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)


class Product(nn.Module):
    """Stands in for a product of a (rows, …, in) or (rows, members, in) tensor and a parameter.

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


def find_products(model: nn.Module) -> dict[str, Product]:
    """Parameters that a product may be made with, by name: those of no linear layer."""
    owned = {id(p) for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    return {
        name: Product(parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in owned and parameter.ndim <= 3 and parameter.numel() > 1
    }


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
