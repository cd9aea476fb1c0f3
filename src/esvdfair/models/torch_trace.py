"""Follow values through one forward pass of a torch model: which layer feeds what, and by which operations.

A dispatch mode sees every tensor operation below autograd, so this works where gradients do not: under
`no_grad`, with integer inputs, after `detach`. Tensors are told apart by their storage, because a view shares it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esvdfair.models.heads import Vocabulary

INPUT = "the model's input"


@dataclass(frozen=True)
class Operation:
    """One tensor operation: its name, the storages it read with what fed them at that moment, those it wrote."""

    name: str
    read: tuple[tuple[int, frozenset[str]], ...]
    written: frozenset[int]


def weight_of(layer: str) -> str:
    """Label of what was computed from a layer's weight outside that layer."""
    return f"weight of {layer}"


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Record operations, and spread labels from operands to results.

    Parameters
    ----------
    weights : mapping
        Weight of each layer; reading one while `inside` is not that layer labels the result `weight_of(layer)`.
    """

    inside: str | None = None

    def __init__(self, weights: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._weights = {storage_of(weight): name for name, weight in weights.items() if weight is not None}
        self._operations: list[Operation] = []
        self._labels: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []  # a storage that is freed could come back as another tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler (seconds), which it needs only to keep out of a mode like this."""
        return False

    def mark(self, tensor: torch.Tensor, label: str) -> None:
        """Say that `tensor`, and all that is computed from it from now on, depends on `label`."""
        self._kept.append(tensor)
        key = storage_of(tensor)
        self._labels[key] = self._labels.get(key, frozenset()) | {label}

    def labels(self, tensor: torch.Tensor) -> frozenset[str]:
        """What `tensor` depends on."""
        return self._labels.get(storage_of(tensor), frozenset())

    def path(self, label: str, tensor: torch.Tensor) -> list[Operation]:
        """Operations by which `label` reaches `tensor`, in order of execution."""
        wanted = {storage_of(tensor)}
        found = []
        for operation in reversed(self._operations):
            carriers = {key for key, labels in operation.read if label in labels}
            if carriers and wanted & operation.written:
                found.append(operation)
                wanted |= carriers
        return found[::-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = tuple((storage_of(t), self.labels(t) | self._foreign_use(t)) for t in _tensors((args, kwargs)))
        result = func(*args, **kwargs)
        written = list(_tensors(result))
        self._kept += written
        name = str(func.overloadpacket.__name__).rstrip("_")
        labels = frozenset[str]().union(*(labels for _, labels in read))
        if labels and not _only_shape(name):
            keys = frozenset(storage_of(t) for t in written)
            self._operations.append(Operation(name, read, keys))
            for key in keys:
                self._labels[key] = self._labels.get(key, frozenset()) | labels
        return result

    def _foreign_use(self, tensor: torch.Tensor) -> frozenset[str]:
        owner = self._weights.get(storage_of(tensor))
        return frozenset() if owner is None or owner == self.inside else frozenset({weight_of(owner)})


def _only_shape(name: str) -> bool:
    """Whether an operation takes no more than shape, dtype and device from its operand (zeros_like, new_full)."""
    return name.endswith("_like") or name.startswith("new_")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def storage_of(tensor: torch.Tensor) -> int:
    """A number by which tensors that share their memory are known, while they live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors have no storage, and no views either
        return id(tensor)


VOCABULARY = Vocabulary(
    moves=frozenset({
        "view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "select", "slice", "t",
        "transpose", "permute", "expand", "clone", "alias", "detach", "_to_copy", "copy", "contiguous", "unbind",
        "split", "split_with_sizes", "index", "lift_fresh",
    }),
    lines=frozenset({
        "add", "sub", "rsub", "mul", "div", "neg", "addmm", "mm", "bmm", "addmv", "mv", "dot", "linear", "addcmul",
        "sum", "mean", "batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
        "miopen_batch_norm", "_batch_norm_no_update",
    }),
    curves={"sigmoid": "sigmoid", "softplus": "softplus"},
    parts=frozenset({
        "exp", "exp2", "expm1", "log", "log1p", "reciprocal", "pow", "logaddexp", "log_sigmoid_forward", "_softmax",
    }),
)  # fmt: skip


def mixing(path: Iterable[Operation], label: str) -> str | None:
    """Name of the first operation that joins `label` with something that depends on the input in another way."""
    for operation in path:
        others = [labels for _, labels in operation.read if label not in labels]
        if any(INPUT in labels for labels in others):
            return operation.name
    return None
