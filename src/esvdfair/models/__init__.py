"""Models of several frameworks behind one protocol, `base.ModelAdapter`, and the fingerprint of a model.

Frameworks are known by name, and imported only for their own models.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import NotFittedError

from esvdfair.core.checks import to_numpy
from esvdfair.models.base import LinearLayer, ModelAdapter, find_layer

__all__ = ["LinearLayer", "ModelAdapter", "adapt", "find_layer", "fingerprint"]

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
    keep_zeros : bool, default=True
        Whether coefficients of a linear model that are 0 stay 0.

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
    if _has_trees(model):
        from esvdfair.models.trees import TreeAdapter as adapter
    elif isinstance(model, str | bytes | bytearray | os.PathLike):
        from esvdfair.models.tree_boosters import TreeFileAdapter, tree_format

        if tree_format(model) is not None:
            return TreeFileAdapter
        from esvdfair.models.onnx import adapt_onnx as adapter
    elif _is(model, "keras", "Model"):
        from esvdfair.models.torch_wrappers import KerasAdapter as adapter
    elif _is(model, "pytorch_tabular", "TabularModel"):
        from esvdfair.models.torch_wrappers import TabularAdapter as adapter
    elif _is(model, "torch", "Module"):
        from esvdfair.models.torch import TorchAdapter as adapter
    elif _is(model, "sklearn", "BaseEstimator") or (
        hasattr(model, "predict") and getattr(model, "__dict__", {}).keys() >= {"coef_", "intercept_"}
    ):
        from esvdfair.models.sklearn import SklearnAdapter as adapter
        from esvdfair.models.sklearn import levels

        if _is(levels(model)[-1], "skorch", "NeuralNet"):
            from esvdfair.models.torch_wrappers import SkorchAdapter as adapter
    else:
        raise TypeError(_unsupported(model))
    return adapter


def _is(model: Any, package: str, name: str) -> bool:
    """Whether a class of a package, known by its name, is among those that the model is of."""
    return any(base.__module__.partition(".")[0] == package and base.__name__ == name for base in type(model).__mro__)


def _has_trees(model: Any) -> bool:
    """Whether the model is a tree ensemble, or wraps one; a mean of other models is none."""
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if not packages & {"sklearn", "lightgbm", "xgboost", "catboost"}:
        return False
    from esvdfair.models.sklearn import levels

    *_, last = levels(model)
    if _is(last, "sklearn", "_BaseVoting"):
        return False
    if _is(last, "sklearn", "BaseBagging") and (member := getattr(last, "estimator_", last.estimator)) is not None:
        *_, last = levels(member)
    return any(base.__module__.startswith(_TREES) for base in type(last).__mro__)


def _unsupported(model: Any) -> str:
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    for holder in ("lightning_module", "model"):  # Lightning's, Hugging Face's and widedeep's trainers
        if hasattr(getattr(model, holder, None), "state_dict"):
            return (
                f"cannot repair a {kind} itself. Pass the network that it holds, its attribute {holder}, and put the "
                "repaired one in its place."
            )
    return (
        f"cannot repair a {kind}. Supported are a torch.nn.Module, a Keras model, a network, linear model or tree "
        "ensemble of scikit-learn (also in a Pipeline or GridSearchCV), a model of LightGBM, XGBoost or CatBoost, and "
        "a path or the bytes of an ONNX model. The predictions of any other model can be moved by esvdfair.baselines."
    )


# --- fingerprint ------------------------------------------------------------------------------------------------------


def fingerprint(model: Any) -> str:
    """SHA-256 of a model's structure and weights, the same on every machine.

    Parameters
    ----------
    model : torch.nn.Module, scikit-learn estimator, tree ensemble, or path or bytes of an ONNX file
        Of an ONNX file without external data it is the SHA-256 of the file; with external data, of the file that holds
        all tensors inside. Of a torch module it covers the classes of all submodules, their parameters and buffers,
        not the code of ``forward``. Of a scikit-learn estimator it covers parameters and fitted attributes; of a tree
        ensemble also splits and leaf values.
    """
    if isinstance(model, str | bytes | bytearray | os.PathLike):
        return hashlib.sha256(_file_of(model)).hexdigest()
    model = model.model if _is(model, "pytorch_tabular", "TabularModel") else model
    if hasattr(model, "state_dict"):
        from esvdfair.models.torch_modules import unwrap

        core = unwrap(model)
        model = {name: type(module).__qualname__ for name, module in core.named_modules()}, core.state_dict()
    elif hasattr(model, "__dict__") and _has_trees(model):
        from esvdfair.models.sklearn import levels
        from esvdfair.models.tree_libraries import open_trees

        with suppress(NotFittedError):
            model = model, open_trees(levels(model)[-1]).content()
    digest = hashlib.sha256()
    for part in _content(model, ()):
        digest.update(len(part).to_bytes(8, "little") + part)  # the length keeps neighbours apart
    return digest.hexdigest()


def _file_of(model: Any) -> bytes:
    """The file of a model; of an ONNX model with external data, one that holds all tensors inside."""
    if isinstance(model, bytes | bytearray):
        return bytes(model)
    from esvdfair.models.tree_boosters import tree_format

    if tree_format(model) is None:
        from esvdfair.models.onnx_files import read_model

        proto, external = read_model(model)
        if external:
            return bytes(proto.SerializeToString())
    return Path(model).read_bytes()


def _content(value: Any, above: tuple[int, ...]) -> Iterator[bytes]:
    """What a nested value consists of, in a fixed order; ``above`` are the objects that it stands in."""
    if hasattr(value, "detach"):  # a tensor
        yield str(value.dtype).encode()
        value = to_numpy(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, Mapping | list | tuple | np.ndarray):
        yield from _content_of_several(value, above)
    else:
        named = getattr(value, "__name__", type(value).__qualname__)  # all that a ufunc has
        yield str(getattr(value, "__qualname__", named)).encode()
        if id(value) not in above:
            # What is private is the memory of training, such as the optimiser, not what predicts.
            public = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
            yield from _content(public, (*above, id(value)))


def _content_of_several(values: Any, above: tuple[int, ...]) -> Iterator[bytes]:
    named = isinstance(values, Mapping)
    yield f"{len(values)} {'names' if named else 'items'}".encode()
    for item in sorted(values, key=str) if named else values:
        if named:
            yield str(item).encode()
        yield from _content(values[item] if named else item, above)
