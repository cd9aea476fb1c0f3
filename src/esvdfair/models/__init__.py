"""Models of several frameworks behind one protocol, `base.ModelAdapter`, and the fingerprint of a model."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import NotFittedError

from esvdfair.core.checks import to_numpy
from esvdfair.models.base import LinearLayer, ModelAdapter, find_layer
from esvdfair.models.frameworks import adapt

__all__ = ["LinearLayer", "ModelAdapter", "adapt", "find_layer", "fingerprint"]


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
    if isinstance(model, bytearray):
        model = bytes(model)
    if isinstance(model, str | bytes | os.PathLike):
        from esvdfair.models.tree_boosters import tree_format

        if tree_format(model) is not None:
            return hashlib.sha256(model if isinstance(model, bytes) else Path(model).read_bytes()).hexdigest()
        from esvdfair.models.onnx_files import read_model

        proto, external = read_model(model)
        if not isinstance(model, bytes):
            model = proto.SerializeToString() if external else Path(model).read_bytes()
        return hashlib.sha256(model).hexdigest()
    if hasattr(model, "state_dict"):
        from esvdfair.models.torch_modules import unwrap

        core = unwrap(model)
        model = {name: type(module).__qualname__ for name, module in core.named_modules()}, core.state_dict()
    elif hasattr(model, "__dict__") and (trees := _tree_library(model)) is not None:
        model = model, trees.content()
    digest = hashlib.sha256()
    for part in _content(model, ()):
        digest.update(len(part).to_bytes(8, "little") + part)  # the length keeps neighbours apart
    return digest.hexdigest()


def _tree_library(model: Any) -> Any:
    """The trees of a model that is fitted; None where there are none."""
    from esvdfair.models.frameworks import has_trees

    if not has_trees(model):
        return None
    from esvdfair.models.sklearn import levels
    from esvdfair.models.tree_libraries import open_trees

    try:
        return open_trees(levels(model)[-1])
    except NotFittedError:
        return None


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
