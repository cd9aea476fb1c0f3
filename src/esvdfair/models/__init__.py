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
    model : torch.nn.Module, fitted scikit-learn network or linear model, or path or bytes of an ONNX file
        A scikit-learn model may be the last step of a Pipeline, inside a TransformedTargetRegressor, a FrozenEstimator
        or a GridSearchCV. Of a classifier of two classes the score P(second class | x) is the prediction.
    output : str, int, tuple or callable, optional
        Which of several outputs, or columns of an output, is the prediction.

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
    if ("sklearn", "BaseEstimator") in origins and not hasattr(model, "module_"):  # skorch, too, is an estimator
        return _load("sklearn", "SklearnAdapter", model, output)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    for holder in ("module_", "lightning_module", "model"):  # skorch, Lightning's and Hugging Face's trainers
        if hasattr(getattr(model, holder, None), "state_dict"):
            raise TypeError(f"cannot repair a {kind} itself; pass the network that it holds: its attribute {holder}.")
    raise TypeError(
        f"cannot repair a {kind}. Supported are a torch.nn.Module, a scikit-learn MLPRegressor, MLPClassifier or "
        "linear model (also in a Pipeline, TransformedTargetRegressor, FrozenEstimator or GridSearchCV), and a path or "
        "the bytes of an ONNX model. The predictions of any other model can be moved by esvdfair.baselines."
    )


def _load(module: str, name: str, model: Any, output: Any) -> ModelAdapter:
    adapter: ModelAdapter = getattr(import_module(f"esvdfair.models.{module}"), name)(model, output=output)
    return adapter
