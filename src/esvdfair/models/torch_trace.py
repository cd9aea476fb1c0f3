"""What feeds what in a forward pass of a torch module, and what its linear layers gave.

It is seen by a dispatch mode, below autograd, so this works where gradients do not: under `no_grad`, with integer
inputs, after `detach`. Tensors are known by their storage, because a view shares it.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from esvdfair.models.torch_modules import Linear, computes_linear_map, find_problem, parameter_of, storage_of

TWICE = (
    "layer {!r} shares its weights: one forward pass uses them more than once, so an edit would act in several places. "
    "Give each use a layer of its own."
)

_INPUT = "the model's input"  # label of what depends on it
_SELECTING = frozenset({"index", "gather", "index_select", "take", "select", "slice", "where"})
"""Operations by which whole numbers choose among others, and add nothing to them."""


class Operand(NamedTuple):
    """A tensor that an operation read: its storage, and what fed it at that moment."""

    key: int
    labels: frozenset[str]
    direct: frozenset[str]  # what fed it with no linear layer in between
    chooses: bool  # whether it is an index or a mask


def _weight_of(layer: str) -> str:
    """Label of what was computed from a layer's weight outside that layer."""
    return f"weight of {layer}"


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """One forward pass that is followed: operations are recorded, and labels spread from operands to results."""

    prediction: torch.Tensor
    _inside: str | None = None  # the layer that runs: what reads the weight of another one is labelled

    def __init__(self, model: nn.Module, modules: Mapping[str, Linear], inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.outputs: dict[str, torch.Tensor] = {}
        self.unreadable: set[str] = set()  # layers that are no `X Wᵀ + b` with a weight of floats
        self._problems: dict[str, str | None] = {}
        self._feeds: dict[str, frozenset[str]] = {}  # what the input of a layer depends on
        self._model, self._modules = model, modules
        weights = ((name, parameter_of(module)) for name, module in modules.items())
        self._weights = {storage_of(weight): name for name, weight in weights if weight is not None}
        self._operations: list[tuple[str, list[Operand], frozenset[int]]] = []  # name, what it read, what it wrote
        self._labels: dict[int, frozenset[str]] = {}
        self._direct: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []  # a storage that is freed could come back as another tensor
        for tensor in _tensors(inputs):
            self._mark(tensor, _INPUT)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch the import of its compiler (seconds), which it needs only to keep out of a mode like this."""
        return False

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        """What is called before a layer runs."""
        self._inside = name

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """What is called after a layer ran."""
        value = [*args, *kwargs.values()][0]
        problem = find_problem(name, module, self._model)
        if not computes_linear_map(self._modules[name], value, output):
            self.unreadable.add(name)
            problem = problem or f"layer {name!r} is a {type(module).__name__}, whose output is not X Wᵀ + b."
        self._problems[name] = TWICE.format(name) if name in self.outputs else problem
        self.outputs[name] = output.detach().clone()
        self._feeds[name] = self._labels.get(storage_of(value), frozenset())
        self._mark(output, name)
        self._inside = None

    def reaches(self, name: str) -> bool:
        """Whether a layer was seen to feed the prediction."""
        return name in self._labels.get(storage_of(self.prediction), frozenset())

    def problem(self, name: str) -> str | None:
        """Why a layer cannot be edited, or None."""
        return self._problems[name] or (TWICE.format(name) if self.reaches(_weight_of(name)) else None)

    def last_layers(self, names: Sequence[str]) -> tuple[list[str], list[str], str | None]:
        """Layers after which no other one comes, what is done to their outputs, and what else is brought in."""
        direct = self._direct.get(storage_of(self.prediction), frozenset())
        last = [name for name in names if name in direct] or [names[-1]]
        if any(name in self._feeds[other] for name in last for other in last):  # one goes round the other
            last = [names[-1]]
        return last, *self._path({*last})

    def _path(self, layers: Set[str]) -> tuple[list[str], str | None]:
        """Operations by which some layers reach the prediction, and the first that brings in other inputs."""
        wanted, names, joined = {storage_of(self.prediction)}, [], None
        for name, read, written in reversed(self._operations):
            carriers = {each.key for each in read if each.direct & layers}
            if carriers and wanted & written:
                names.append(name)
                wanted |= carriers
                if any(_INPUT in each.labels and not each.direct & layers and not each.chooses for each in read):
                    joined = name
        return names[::-1], joined

    def _mark(self, tensor: torch.Tensor, label: str) -> None:
        """Say that `tensor`, and all that is computed from it from now on, depends on `label`."""
        self._kept.append(tensor)
        key = storage_of(tensor)
        self._labels[key] = self._labels.get(key, frozenset()) | {label}
        self._direct[key] = frozenset({label})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket.__name__).rstrip("_")
        read = [self._operand(name, tensor) for tensor in _tensors((args, kwargs))]
        result = func(*args, **kwargs)
        written = list(_tensors(result))
        self._kept += written
        labels, direct = (frozenset[str]().union(*(getattr(r, kind) for r in read)) for kind in ("labels", "direct"))
        if labels and not name.endswith("_like") and not name.startswith("new_"):  # which take no more than a shape
            keys = frozenset(storage_of(t) for t in written)
            self._operations.append((name, read, keys))
            for key in keys:
                self._labels[key] = self._labels.get(key, frozenset()) | labels
                self._direct[key] = self._direct.get(key, frozenset()) | direct
        return result

    def _operand(self, operation: str, tensor: torch.Tensor) -> Operand:
        key = storage_of(tensor)
        owner = self._weights.get(key, self._inside)
        foreign = set() if owner is None or owner == self._inside else {_weight_of(owner)}
        chooses = operation in _SELECTING and not tensor.is_floating_point()
        none = frozenset[str]()
        return Operand(key, self._labels.get(key, none) | foreign, self._direct.get(key, none), chooses)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
