"""Models of several frameworks behind one protocol; see `base.ModelAdapter`."""

import os
from importlib import import_module
from typing import Any

from esvdfair.models.base import LinearLayer, ModelAdapter, find_layer, fingerprint
from esvdfair.models.heads import Head

__all__ = ["Head", "LinearLayer", "ModelAdapter", "adapt", "find_layer", "fingerprint"]


def adapt(model: Any, *, output: Any = None) -> ModelAdapter:
    """Wrap a trained model in the adapter of its framework.

    Parameters
    ----------
    model : torch.nn.Module, fitted scikit-learn MLPRegressor, or path or bytes of an ONNX file
        An MLPRegressor may be the last step of a Pipeline, inside a TransformedTargetRegressor or a FrozenEstimator.
    output : str, int or callable, optional
        Which of several outputs is the prediction; torch and ONNX only.

    Raises
    ------
    TypeError
        The model is of no supported type.
    sklearn.exceptions.NotFittedError
        A scikit-learn model that is not fitted.
    """
    if isinstance(model, str | bytes | bytearray | os.PathLike):
        return _load("onnx", "OnnxAdapter", model, output)
    # By name, so that torch is not imported for those who do not use it.
    origins = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    if ("torch", "Module") in origins:
        return _load("torch", "TorchAdapter", model, output)
    if ("sklearn", "BaseEstimator") in origins:
        return _load("sklearn", "SklearnAdapter", model, output)
    raise TypeError(
        f"cannot repair a {type(model).__module__}.{type(model).__qualname__}. Supported are a torch.nn.Module, a "
        "scikit-learn MLPRegressor (also in a Pipeline, TransformedTargetRegressor or FrozenEstimator), and a path or "
        "the bytes of an ONNX model."
    )


def _load(module: str, name: str, model: Any, output: Any) -> ModelAdapter:
    adapter: ModelAdapter = getattr(import_module(f"esvdfair.models.{module}"), name)(model, output=output)
    return adapter
