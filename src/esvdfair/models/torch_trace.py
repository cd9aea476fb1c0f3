"""What feeds what in a forward pass of a torch module.

It is seen by a dispatch mode, below autograd, so this works where gradients do not: under `no_grad`, with integer
inputs, after `detach`. Tensors are known by their storage, because a view shares it.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

INPUT = "the model's input"
"""Label of what depends on it."""

_SELECTING = frozenset({"index", "gather", "index_select", "take", "select", "slice", "where"})
"""Operations by which whole numbers choose among others, and add nothing to them."""


class Operand(NamedTuple):
    """A tensor that an operation read: its storage, and what fed it at that moment."""

    key: int
    labels: frozenset[str]
    direct: frozenset[str]  # what fed it with no linear layer in between
    chooses: bool  # whether it is an index or a mask


def weight_of(layer: str) -> str:
    """Label of what was computed from a layer's weight outside that layer."""
    return f"weight of {layer}"


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Record operations, and spread labels from operands to results.

    Reading the weight of a layer while `inside` is another, or None, labels the result `weight_of(layer)`.
    """

    inside: str | None = None

    def __init__(self, weights: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._weights = {storage_of(weight): name for name, weight in weights.items() if weight is not None}
        self._operations: list[tuple[str, list[Operand], frozenset[int]]] = []  # name, what it read, what it wrote
        self._labels: dict[int, frozenset[str]] = {}
        self._direct: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []  # a storage that is freed could come back as another tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler (seconds), which it needs only to keep out of a mode like this."""
        return False

    def enter(self, layer: str, module: nn.Module, args: Any) -> None:
        """What is called before a layer runs."""
        self.inside = layer

    def mark(self, tensor: torch.Tensor, label: str) -> None:
        """Say that `tensor`, and all that is computed from it from now on, depends on `label`."""
        self._kept.append(tensor)
        key = storage_of(tensor)
        self._labels[key] = self._labels.get(key, frozenset()) | {label}
        self._direct[key] = frozenset({label})

    def labels(self, tensor: torch.Tensor) -> frozenset[str]:
        """What `tensor` depends on."""
        return self._labels.get(storage_of(tensor), frozenset())

    def direct(self, tensor: torch.Tensor) -> frozenset[str]:
        """What `tensor` depends on with no linear layer in between."""
        return self._direct.get(storage_of(tensor), frozenset())

    def path(self, labels: Set[str], tensor: torch.Tensor) -> tuple[list[str], str | None]:
        """Operations by which some layers reach `tensor`, in order, and the first that brings in other inputs."""
        wanted, names, joined = {storage_of(tensor)}, [], None
        for name, read, written in reversed(self._operations):
            carriers = {each.key for each in read if each.direct & labels}
            if carriers and wanted & written:
                names.append(name)
                wanted |= carriers
                if any(INPUT in each.labels and not each.direct & labels and not each.chooses for each in read):
                    joined = name
        return names[::-1], joined

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, read = str(func.overloadpacket.__name__).rstrip("_"), []
        for tensor in tensors((args, kwargs)):
            owner = self._weights.get(storage_of(tensor), self.inside)
            foreign = set() if owner is None or owner == self.inside else {weight_of(owner)}
            chooses = name in _SELECTING and not tensor.is_floating_point()
            read.append(Operand(storage_of(tensor), self.labels(tensor) | foreign, self.direct(tensor), chooses))
        result = func(*args, **kwargs)
        written = list(tensors(result))
        self._kept += written
        labels, direct = (frozenset[str]().union(*(getattr(r, kind) for r in read)) for kind in ("labels", "direct"))
        if labels and not name.endswith("_like") and not name.startswith("new_"):  # which take no more than a shape
            keys = frozenset(storage_of(t) for t in written)
            self._operations.append((name, read, keys))
            for key in keys:
                self._labels[key] = self._labels.get(key, frozenset()) | labels
                self._direct[key] = self._direct.get(key, frozenset()) | direct
        return result


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def storage_of(tensor: torch.Tensor) -> int:
    """A number by which tensors that share their memory are known, while they live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors have no storage, and no views either
        return id(tensor)


TWICE = (
    "layer {!r} shares its weights: one forward pass uses them more than once, so an edit would act in several places. "
    "Give each use a layer of its own."
)


class Pass:
    """One forward pass that was followed: what the linear layers gave, and what became of it."""

    prediction: torch.Tensor

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.outputs: dict[str, torch.Tensor] = {}
        self.problems: dict[str, str | None] = {}  # why a layer cannot be edited
        self.feeds: dict[str, frozenset[str]] = {}  # what the input of a layer depends on

    def reaches(self, name: str) -> bool:
        """Whether a layer was seen to feed the prediction."""
        return name in self._trace.labels(self.prediction)

    def problem(self, name: str) -> str | None:
        """Why a layer cannot be edited, or None."""
        outside = weight_of(name) in self._trace.labels(self.prediction)
        return self.problems[name] or (TWICE.format(name) if outside else None)

    def last_layers(self, names: Sequence[str]) -> tuple[list[str], list[str], str | None]:
        """Layers after which no other one comes, what is done to their outputs, and what else is brought in."""
        direct = self._trace.direct(self.prediction)
        last = [name for name in names if name in direct] or [names[-1]]
        if any(name in self.feeds[other] for name in last for other in last):  # one goes round the other
            last = [names[-1]]
        return last, *self._trace.path({*last}, self.prediction)
