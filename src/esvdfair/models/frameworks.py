"""Which adapter a model gets, by what it is. Frameworks are known by name, and imported only for their own models."""

import os
from collections.abc import Callable
from typing import Any

from esvdfair.models.base import ModelAdapter

_TREES = ("sklearn.tree.", "sklearn.ensemble.", "lightgbm.", "xgboost.", "catboost.")


def adapt(model: Any, *, output: Any = None, keep_zeros: bool = True) -> ModelAdapter:
    """Wrap a trained model in the adapter of its framework.

    Parameters
    ----------
    model : torch.nn.Module, keras.Model on the torch backend, fitted scikit-learn network or linear model, tree
        ensemble of scikit-learn, LightGBM, XGBoost or CatBoost, or path or bytes of an ONNX file or of a file of these
        three libraries
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
    adapter = _adapter_of(model)(model, output=output)
    return adapter if keep_zeros else adapter.free_zeros()


def _adapter_of(model: Any) -> Callable[..., ModelAdapter]:
    adapter: Callable[..., ModelAdapter]
    if is_mean(model):
        from esvdfair.models.sums import MeanAdapter as adapter
    elif has_trees(model):
        from esvdfair.models.trees import TreeAdapter as adapter
    elif isinstance(model, str | bytes | bytearray | os.PathLike):
        return _adapter_of_file(model)
    elif _is(model, "keras", "Model"):
        from esvdfair.models.keras import KerasAdapter as adapter
    elif _is(model, "torch", "Module"):
        from esvdfair.models.torch import TorchAdapter as adapter
    elif _is(model, "sklearn", "BaseEstimator") or (
        hasattr(model, "predict") and getattr(model, "__dict__", {}).keys() >= {"coef_", "intercept_"}
    ):
        from esvdfair.models.sklearn import SklearnAdapter as adapter
        from esvdfair.models.sklearn import is_skorch, levels

        if is_skorch(levels(model)[-1]):
            from esvdfair.models.skorch import SkorchAdapter as adapter
    else:
        raise TypeError(_unsupported(model))
    return adapter


def _adapter_of_file(source: Any) -> Callable[..., ModelAdapter]:
    from esvdfair.models.tree_boosters import TreeFileAdapter, tree_format

    if tree_format(source) is not None:
        return TreeFileAdapter
    from esvdfair.models.onnx import adapt_onnx

    return adapt_onnx


def _is(model: Any, package: str, name: str) -> bool:
    """Whether a class of a package, known by its name, is among those that the model is of."""
    return any(base.__module__.partition(".")[0] == package and base.__name__ == name for base in type(model).__mro__)


def _unsupported(model: Any) -> str:
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    for holder in ("lightning_module", "model"):  # Lightning's and Hugging Face's trainers
        if hasattr(getattr(model, holder, None), "state_dict"):
            return f"cannot repair a {kind} itself; pass the network that it holds: its attribute {holder}."
    return (
        f"cannot repair a {kind}. Supported are a torch.nn.Module, a Keras model, a network, linear model or tree "
        "ensemble of scikit-learn (also in a Pipeline or GridSearchCV), a model of LightGBM, XGBoost or CatBoost, and "
        "a path or the bytes of an ONNX model. The predictions of any other model can be moved by esvdfair.baselines."
    )


def has_trees(model: Any) -> bool:
    """Whether the model is a tree ensemble, or wraps one."""
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if not packages & {"sklearn", "lightgbm", "xgboost", "catboost"}:
        return False
    from esvdfair.models.sklearn import levels

    return not is_mean(model) and any(b.__module__.startswith(_TREES) for b in type(levels(model)[-1]).__mro__)


def is_mean(model: Any) -> bool:
    """Whether the model is a `VotingRegressor`, or a `BaggingRegressor` of other models than trees, or wraps one."""
    if not _is(model, "sklearn", "BaseEstimator"):
        return False
    from esvdfair.models.sklearn import levels

    last = levels(model)[-1]
    if not _is(last, "sklearn", "BaggingRegressor"):
        return _is(last, "sklearn", "VotingRegressor")
    member = getattr(last, "estimator_", last.estimator)
    return member is not None and not type(levels(member)[-1]).__module__.startswith(_TREES)
