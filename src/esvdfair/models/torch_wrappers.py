"""Models of skorch, pytorch-tabular and Keras, which hold a torch network: the wrapper goes in, and comes out."""

import copy
import sys
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError
from torch import nn

from esvdfair.core.checks import to_numpy
from esvdfair.models.base import Weights, rounded
from esvdfair.models.sklearn import before_last, finish_target, levels
from esvdfair.models.torch import TorchAdapter
from esvdfair.models.torch_modules import Inputs, Product, Selector


class _HeldAdapter(TorchAdapter):
    """A model of another library that holds a torch network, which is repaired and put back into a copy."""

    _finish: Callable[[NDArray[Any]], NDArray[Any]] | None = None  # what the wrapper makes of what the network gives

    def __init__(self, model: Any, *, output: Selector | None = None) -> None:
        self._wrapper = model
        super().__init__(self._network(), output=output)

    @abstractmethod
    def _network(self) -> nn.Module:
        """The network inside, or an error that says why it cannot be repaired."""

    @abstractmethod
    def _holding(self, network: nn.Module) -> Any:
        """A copy of the wrapper that holds this network."""

    @property
    def model(self) -> Any:
        """The wrapper."""
        return self._wrapper

    def _run(self, *args: Any, **options: Any) -> torch.Tensor:
        prediction = super()._run(*args, **options)
        return (
            prediction if self._finish is None else torch.as_tensor(self._finish(to_numpy(prediction)[:, None])[:, 0])
        )

    def _run_from(self, *args: Any) -> torch.Tensor:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a transformer may complain of values beyond its domain
            return super()._run_from(*args)

    def _edited(self, weights: Weights) -> Self:
        held = self._holding(super()._edited(weights).model)
        twin = type(self).__new__(type(self))
        twin.__setstate__(self.__getstate__() | {"model": held})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"model": self._wrapper}


class SkorchAdapter(_HeldAdapter):
    """A `NeuralNetRegressor` of skorch: the network inside, seen through the steps around it.

    Parameters
    ----------
    model : skorch.NeuralNetRegressor
        Or a Pipeline, TransformedTargetRegressor, FrozenEstimator or GridSearchCV that ends in one. Fitted;
        `NotFittedError` otherwise.
    output : as of :class:`TorchAdapter`
    """

    def _network(self) -> nn.Module:
        self._levels = levels(self._wrapper)
        net = self._levels[-1]
        if not hasattr(net, "module_"):
            raise NotFittedError(f"the {type(net).__name__} is not fitted; fit it first.")
        if not any(base.__name__ == "NeuralNetRegressor" for base in type(net).__mro__):
            raise TypeError(
                f"cannot repair a {type(net).__name__}; of skorch, a NeuralNetRegressor is supported. Pass its "
                "network, the attribute module_."
            )
        if any(hasattr(level, "transformer_") for level in self._levels):
            self._finish = partial(finish_target, self._levels)
        network: nn.Module = net.module_
        return network

    @property
    def n_features(self) -> int | None:
        """Number of columns that the first step, or else the network, takes."""
        alone = len(self._levels) == 1
        width: int | None = super().n_features if alone else getattr(self._wrapper, "n_features_in_", None)
        return width

    def _inputs(self, x: Any) -> Inputs:
        if not isinstance(x, torch.Tensor):  # which the steps before the network have made
            x = before_last(self._levels, x)
        return super()._inputs(x)

    def _holding(self, network: nn.Module) -> Any:
        wrapper = copy.deepcopy(self._wrapper)
        levels(wrapper)[-1].module_.load_state_dict(network.state_dict())
        return wrapper


class TabularAdapter(_HeldAdapter):
    """A `TabularModel` of pytorch-tabular: the network inside, which sees what its datamodule makes of a table.

    Parameters
    ----------
    model : pytorch_tabular.TabularModel
        Fitted, for a regression of one target. The repaired one shares all but the network with it.
    output : as of :class:`TorchAdapter`, by default "logits"
    """

    def __init__(self, model: Any, *, output: Selector | None = None) -> None:
        super().__init__(model, output="logits" if output is None else output)

    def _network(self) -> nn.Module:
        network, config = getattr(self._wrapper, "model", None), self._wrapper.config
        if network is None or not self._wrapper.is_fitted:
            raise ValueError("the TabularModel is not fitted. Call its fit, then repair it.")
        if config.task != "regression" or len(config.target) != 1 or getattr(network.hparams, "_probabilistic", False):
            raise TypeError(
                f"cannot repair a TabularModel with task={config.task!r} and {len(config.target)} targets, or one that "
                "predicts distributions. Pass one of a regression of one target."
            )
        if self._wrapper.datamodule.do_target_transform:
            self._finish = self._wrapper.datamodule.target_transforms[0].inverse_transform
        found: nn.Module = network
        return found

    @property
    def n_features(self) -> None:
        """A table may hold more columns than the model takes."""

    def _inputs(self, x: Any) -> Inputs:
        if hasattr(x, "columns"):
            loader = self._wrapper.datamodule.prepare_inference_dataloader(x, batch_size=max(len(x), 1))
            (x,) = ({name: value for name, value in batch.items() if hasattr(value, "dtype")} for batch in loader)
            x.pop("target", None)
        return super()._inputs(x)

    def _holding(self, network: nn.Module) -> Any:
        wrapper = copy.copy(self._wrapper)
        wrapper.model = network
        return wrapper


# --- Keras ------------------------------------------------------------------------------------------------------------


class KerasAdapter(TorchAdapter):
    """A Keras model, seen through its `Dense` layers.

    Keras calls its layers without torch's hooks, so what runs is a private clone in which an `nn.Linear` does the work
    of every `Dense` layer. New weights are assigned to another clone, which is what a caller gets.

    Parameters
    ----------
    model : keras.Model
        Sequential, functional or subclassed, built, on the torch backend.
    output : as of :class:`TorchAdapter`
    """

    _compared = False  # whether the clone was seen to predict as the model does

    def __init__(self, model: Any, *, output: Selector | None = None) -> None:
        backend = sys.modules["keras"].config.backend()
        if backend != "torch":
            raise TypeError(
                f"got a Keras model on the backend {backend!r}; 'torch' is supported. Set KERAS_BACKEND=torch before "
                "keras is imported and load the model again, or export it to ONNX with "
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
            with torch.no_grad():
                original, clone = _leaves(self._model(x, training=False)), _leaves(self._core(x))
            if len(original) != len(clone) or not all(map(_alike, original, clone)):
                kind = type(self._model).__name__
                raise ValueError(f"a copy of the {kind} predicts other values. Export it to ONNX and repair the file.")
        return super()._run(x, *args, **options)

    def _find_added(self, *args: Any) -> None:
        return None

    def _find_products(self) -> dict[str, Product]:
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
            kernel, bias = layer.kernel.value, None if layer.bias is None else layer.bias.value
            inputs, outputs = kernel.shape
            linear = nn.Linear(inputs, outputs, bias is not None, kernel.device, kernel.dtype)
            linear.load_state_dict({"weight": kernel.T} | ({} if bias is None else {"bias": bias}))
            self.add_module(name, linear.requires_grad_(False))
            layer.call = _calling(linear, layer.activation)

    def forward(self, x: Any) -> Any:
        return self.model(x, training=False)


def _calling(linear: nn.Module, activation: Any) -> Callable[..., Any]:
    def call(inputs: torch.Tensor, training: Any = None) -> Any:
        z = linear(inputs)
        return z if activation is None else activation(z)

    return call


def _dense_layers(model: Any) -> dict[str, Any]:
    """The `Dense` layers of a model, wherever they stand in it, by name, or by path where names are not unique."""
    dense = sys.modules["keras"].layers.Dense
    found = [layer for layer in model._flatten_layers() if isinstance(layer, dense) and layer.built]
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
        own = vars(layer)
        own.pop("build", None)  # Keras puts a function there that knows the original layer
        if nodes := own.get("_nodes"):  # of a functional model, by which it is saved: "{id of a layer}_ib-0"
            apart = [node.partition("_") for node in nodes]
            own["_nodes"] = {f"{id(memo[int(key)])}_{rest}" for key, _, rest in apart}
    return twin


def _leaves(result: Any) -> list[torch.Tensor]:
    """The tensors of what a model returned."""
    return [leaf for leaf in sys.modules["keras"].tree.flatten(result) if isinstance(leaf, torch.Tensor)]


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    size = float(first.abs().max()) if first.numel() else 0.0
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-3, atol=1e-4 * size, equal_nan=True)
