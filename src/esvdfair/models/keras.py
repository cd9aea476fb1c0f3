"""A Keras 3 model on the torch backend as a `ModelAdapter`: its `Dense` layers are the linear layers.

Keras calls its layers without torch's hooks, so what runs is a private clone in which an `nn.Linear` does the work of
every `Dense` layer. New weights are assigned to another clone, which is what a caller gets.
"""

import copy
import sys
from collections import Counter
from threading import Lock
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch
from torch import nn

from esvdfair.models.base import Weights, rounded
from esvdfair.models.torch import TorchAdapter
from esvdfair.models.torch_values import Inputs, Selector


class KerasAdapter(TorchAdapter):
    """A Keras model, seen through its `Dense` layers.

    Parameters
    ----------
    model : keras.Model
        Sequential, functional or subclassed, built, on the torch backend.
    output : as of :class:`TorchAdapter`
    """

    _compared = False  # whether the clone was seen to predict as the model does

    def __init__(self, model: Any, *, output: Selector | None = None) -> None:
        if keras.config.backend() != "torch":
            raise TypeError(
                f"got a Keras model on the backend {keras.config.backend()!r}; 'torch' is supported. Set "
                "KERAS_BACKEND=torch before keras is imported and load the model again, or export it to ONNX with "
                "model.export('model.onnx', format='onnx')."
            )
        if not model.built:
            raise ValueError("the Keras model is not built yet, so it has no weights. Train it, then repair it.")
        super().__init__(model, output=output)

    def _private(self, model: Any) -> nn.Module:
        return _Core(_clone(model))

    @property
    def n_features(self) -> int | None:
        """Input width, where the model tells."""
        shape = getattr(self._model, "input_shape", None) if hasattr(self._model, "_functional") else None
        return shape[1] if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], int) else None

    def _run(self, x: Inputs, *args: Any, **options: Any) -> torch.Tensor:
        if not self._compared:
            self._compared = True
            self._compare(x)
        return super()._run(x, *args, **options)

    def _compare(self, x: Inputs) -> None:
        """Raise unless the clone predicts as the model does."""
        core = self._core
        assert isinstance(core, _Core)
        with torch.no_grad():
            original, clone = (core.leaves(model(x, training=False)) for model in (self._model, core.model))
        if len(original) != len(clone) or not all(map(_alike, original, clone)):
            kind = type(self._model).__name__
            raise ValueError(f"a copy of the {kind} predicts other values. Export it to ONNX and repair the file.")

    def _find_added(self, *args: Any) -> None:
        return None

    def _find_products(self) -> dict[str, Any]:
        return {}

    def _edited(self, weights: Weights) -> "KerasAdapter":
        model = _clone(self._model)
        layers = _dense_layers(model)
        for name, (weight, bias) in weights.items():
            layer = layers[name]
            for variable, values in ((layer.kernel, np.transpose(weight)), (layer.bias, bias)):
                if values is not None and variable is not None:
                    variable.assign(rounded(name, values, variable.dtype))
        return KerasAdapter(model, output=self._output)


class _Core(nn.Module):
    """A Keras model in which `nn.Linear` modules do the work of its `Dense` layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        for name, layer in _dense_layers(model).items():
            if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
                kind = "has a LoRA update" if getattr(layer, "lora_enabled", False) else "is quantised"
                raise ValueError(
                    f"layer {name!r} {kind}. Repair the float model before that, or save and load the model, which "
                    "merges the update."
                )
            self.add_module(name, _stand_in(layer))
            layer.call = _calling(self.get_submodule(name), layer.activation)

    def forward(self, x: Any) -> Any:
        return self.model(x, training=False)

    def leaves(self, result: Any) -> list[torch.Tensor]:
        """The tensors of what the model returned."""
        return [leaf for leaf in keras.tree.flatten(result) if isinstance(leaf, torch.Tensor)]


def _stand_in(layer: Any) -> nn.Linear:
    kernel, bias = layer.kernel.value, None if layer.bias is None else layer.bias.value
    linear = nn.Linear(
        kernel.shape[0], kernel.shape[1], bias=bias is not None, device=kernel.device, dtype=kernel.dtype
    )
    with torch.no_grad():
        linear.weight.copy_(kernel.T)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear.requires_grad_(False)


def _calling(linear: nn.Module, activation: Any) -> Any:
    def call(inputs: torch.Tensor, training: Any = None) -> Any:
        z = linear(inputs)
        return z if activation is None else activation(z)

    return call


def _dense_layers(model: Any) -> dict[str, Any]:
    """The `Dense` layers of a model, wherever they stand in it, by name, or by path where names are not unique."""
    found = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense) and layer.built]
    names = Counter(layer.name for layer in found)
    return {(x.name if names[x.name] == 1 else x.path).replace(".", "_"): x for x in found}


_COPYING = Lock()


def _clone(model: Any) -> Any:
    """A copy of a model, its weights, and what it was compiled with.

    Keras copies by writing a file and reading it, which needs classes that are registered, and a subclassed model made
    with arguments comes back without them. Here the objects themselves are copied.
    """
    saveable = next(base for base in type(model).__mro__ if base.__name__ == "KerasSaveable")
    parts = [value for layer in model._flatten_layers() for value in vars(layer).values()]
    shared = [*sys.modules.values(), *(part for part in parts if type(part).__name__ == "DynamicBackend")]
    memo = {id(part): part for part in shared}  # what computes, and holds nothing of the model
    try:
        with _COPYING, mock.patch.object(saveable, "__reduce__", object.__reduce__):
            twin = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the parts of a model raise when they are copied
        raise ValueError(
            f"the {type(model).__name__} cannot be copied ({str(error).splitlines()[0]}). Build it of parts that "
            "copy.deepcopy can copy."
        ) from error
    for layer in twin._flatten_layers():
        vars(layer).pop("build", None)  # Keras puts a function there that knows the original layer
    return twin


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    size = float(first.abs().max()) if first.numel() else 0.0
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-3, atol=1e-4 * size, equal_nan=True)
