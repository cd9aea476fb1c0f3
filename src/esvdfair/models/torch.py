"""Any `torch.nn.Module` as a `ModelAdapter`.

A wrapper made by `torch.compile` or `nn.DataParallel` is looked through: the module inside is run, eagerly and on its
own device; a repaired copy wears the same wrapper. Layer names are those inside it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esvdfair.core.checks import row_count
from esvdfair.models import _torch_trace as tracing
from esvdfair.models._torch_modules import (
    assign,
    check_initialised,
    computes_linear_map,
    describe_layer,
    eagerly,
    evaluating,
    find_problem,
    is_linear,
    unwrap,
)
from esvdfair.models._torch_values import Selector, one_column, select, to_numpy, to_tensor
from esvdfair.models.heads import KINDS, Head, find_head, probe_points, unsupported_head
from esvdfair.models.protocol import (
    PREDICT_ROWS,
    PROBE_ROWS,
    LinearLayer,
    check_replacement,
    row_slice,
)

Hook = Callable[..., Any]


@dataclass(frozen=True)
class _Probe:
    """What one traced forward pass told: the layers, and how the last one reaches the prediction."""

    layers: tuple[LinearLayer, ...]
    rows: torch.Tensor
    last_output: torch.Tensor
    prediction: torch.Tensor
    path: tuple[tracing.Operation, ...] | None  # None: the way was lost outside torch


class TorchAdapter:
    """A torch regressor, seen through its `nn.Linear` layers.

    Parameters
    ----------
    model : torch.nn.Module
        Runs in eval mode while it is used here; every submodule's own training flag is put back.
    output : str, int or callable, optional
        What to take as the prediction when the model returns a dict (key), a tuple (index) or anything else
        (a callable of what the model returned).

    Notes
    -----
    Inputs are converted to the model's dtype and device. Layers that the forward pass does not reach, or that do not
    feed the prediction, are not listed.
    """

    def __init__(self, model: nn.Module, *, output: Selector | None = None) -> None:
        self._model = model
        self._core = unwrap(model)
        check_initialised(self._core)
        self._output = output
        self._probed: _Probe | None = None

    @property
    def model(self) -> nn.Module:
        """The module that was given."""
        return self._model

    @property
    def n_features(self) -> int | None:
        """Input width, known when the model begins with a linear layer."""
        first: nn.Module | None = self._core
        while isinstance(first, nn.Sequential):
            first = next(iter(first), None)
        return first.in_features if isinstance(first, nn.Linear) else None

    def layers(self, x: Any) -> tuple[LinearLayer, ...]:
        """List the linear layers that feed the prediction, in order of execution."""
        return self._probe(x).layers

    def capture(self, x: Any, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run one forward pass: the inputs of the named layers and the prediction, on the model's device."""
        for copies in (False, True):
            captured = _Captured(copies=copies)
            hooks = {name: partial(captured.keep, name) for name in names}
            prediction = self._run(to_tensor(x, self._core), hooks)
            if not captured.overwritten():
                break  # else the model went on to write into what a layer had read: run again, with copies
        for name in names:
            if name not in captured.inputs:
                raise ValueError(
                    f"the forward pass does not reach layer {name!r}, so its weights have no effect on this output."
                )
        return {name: captured.inputs[name] for name in names}, prediction

    def predict(self, x: Any) -> NDArray[Any]:
        """Predict in batches; bfloat16 comes back as float32."""
        starts = range(0, max(row_count(x), 1), PREDICT_ROWS)
        batches = (to_tensor(row_slice(x, start, start + PREDICT_ROWS), self._core) for start in starts)
        return np.concatenate([to_numpy(self._run(batch, {})) for batch in batches])

    def replace(self, weights: Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]]) -> "TorchAdapter":
        """Put new weights into a deep copy; dtype, device, requires_grad and training flags stay."""
        for name, (weight, bias) in weights.items():
            module = self._linear(name)
            problem = find_problem(name, module, self._core)
            if problem is not None:
                raise ValueError(problem)
            shape, has_bias = tuple(module.weight.shape), module.bias is not None
            check_replacement(name, weight=weight, bias=bias, weight_shape=shape, has_bias=has_bias)
        try:
            adapter = TorchAdapter(copy.deepcopy(self._model), output=self._output)
        except RuntimeError as error:
            raise ValueError(
                f"the model cannot be copied ({error}). An attribute that holds a tensor computed in a forward pass is "
                "the usual cause: detach it, or do not keep it on the module."
            ) from error
        for name, (weight, bias) in weights.items():
            module = adapter._linear(name)
            assign(name, module.weight, weight)
            if bias is not None:
                assign(name, module.bias, bias)
        return adapter

    def head(self, x: Any) -> Head:
        """Find what maps the last linear layer's output to the prediction.

        Chosen values are put in place of the last layer's output, so that the head is seen beyond the range of `x`;
        the operations on the way are named when they make none of the known kinds.
        """
        probe = self._probe(x)
        name, path = probe.layers[-1].name, probe.path or ()
        operation = tracing.describe(path)
        if probe.last_output.shape[1:] != (1,):
            raise ValueError(
                f"the last linear layer {name!r} gives {tuple(probe.last_output.shape)[1:]} values a row, and "
                f"{operation} makes one prediction of them. Only a layer with one output can stand before a head."
            )
        joined = tracing.mixing(path, name)
        if joined is not None:
            raise ValueError(_bypassed(name, repr(joined)))
        kinds = KINDS if probe.path is None else tracing.head_kinds(path)
        if not kinds:
            raise ValueError(unsupported_head(operation))
        z = torch.as_tensor(probe_points(to_numpy(probe.last_output))).to(probe.last_output.dtype)
        rows = probe.rows[torch.arange(len(z)) % len(probe.rows)]
        prediction = to_numpy(self._run_from(name, rows, z))
        eps = max(torch.finfo(dtype).eps for dtype in (z.dtype, probe.prediction.dtype))
        # Half of the points with other rows and another batch: a head sees neither.
        half = len(z) // 2
        again = to_numpy(self._run_from(name, rows[:half], z.flip(0)[:half]))
        if not _close(prediction[::-1][:half], again, 8 * eps):
            raise ValueError(_bypassed(name, operation))
        return find_head(to_numpy(z), prediction, kinds=kinds, operation=operation, eps=eps)

    def _probe(self, x: Any) -> _Probe:
        """Trace the forward pass over the first rows of `x`, once."""
        if self._probed is None:
            if row_count(x) == 0:
                raise ValueError("got a batch of no rows; at least one is needed to see which layers run.")
            self._probed = self._trace(to_tensor(row_slice(x, 0, PROBE_ROWS), self._core))
        return self._probed

    def _trace(self, x: torch.Tensor) -> _Probe:
        modules = {name: module for name, module in self._core.named_modules() if is_linear(module)}
        trace = tracing.Trace({name: module._parameters.get("weight") for name, module in modules.items()})
        outputs: dict[str, torch.Tensor] = {}
        problems: dict[str, str | None] = {}

        def enter(name: str, module: nn.Module, args: Any) -> None:
            trace.inside = name

        def leave(name: str, module: nn.Linear, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            problems[name] = _TWICE.format(name) if name in outputs else find_problem(name, module, self._core)
            if problems[name] is None and not computes_linear_map(module, _layer_input(args, kwargs), output):
                problems[name] = f"layer {name!r} is a {type(module).__name__}, whose output is not X Wᵀ + b."
            outputs[name] = output.detach().clone()
            trace.mark(output, name)
            trace.inside = None

        rows = x.clone()
        trace.mark(x, tracing.INPUT)
        after, before = ({name: partial(hook, name) for name in modules} for hook in (leave, enter))
        prediction = self._run(x, after, before=before, mode=trace)
        reached = trace.labels(prediction)
        names = [name for name in outputs if name in reached or self._moves(name, rows, outputs[name], prediction)]
        for name in names:
            problem = problems[name] or (_TWICE.format(name) if tracing.weight_of(name) in reached else None)
            if problem is not None:
                raise ValueError(problem)
        if not names:
            raise ValueError("no nn.Linear layer feeds the prediction, so there is no weight to edit.")
        layers = tuple(describe_layer(name, index, modules[name]) for index, name in enumerate(names))
        path = tuple(trace.path(names[-1], prediction)) if names[-1] in reached else None
        return _Probe(layers, rows, outputs[names[-1]], prediction, path)

    def _moves(self, name: str, x: torch.Tensor, output: torch.Tensor, prediction: torch.Tensor) -> bool:
        """Whether the prediction follows a layer whose trace was lost (a detour through NumPy, a foreign kernel)."""
        return not torch.equal(self._run_from(name, x, output + 1 + output.abs().max()), prediction)

    def _run_from(self, name: str, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Prediction for rows `x` if the layer had given `z`."""

        def put(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            return z.to(output, copy=True).reshape(output.shape)

        return self._run(x.clone(), {name: put})

    def _run(
        self,
        x: torch.Tensor,
        after: Mapping[str, Hook],
        *,
        before: Mapping[str, Hook] | None = None,
        mode: AbstractContextManager[Any] | None = None,
    ) -> torch.Tensor:
        """Forward pass in eval mode, with hooks after and before the named layers: the prediction, (rows,)."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(self._core))
            stack.enter_context(eagerly(self._core))
            for name, hook in (before or {}).items():
                stack.callback(self._linear(name).register_forward_pre_hook(hook).remove)
            for name, hook in after.items():
                # First in line: a user's own hook on the layer belongs to what comes after it.
                handle = self._linear(name).register_forward_hook(hook, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(mode or nullcontext())
            return one_column(select(self._core(x), self._output), len(x))

    def _linear(self, name: str) -> nn.Linear:
        try:
            module = self._core.get_submodule(name)
        except AttributeError:
            module = self._core
        if not is_linear(module):
            known = [repr(n) for n, m in self._core.named_modules() if is_linear(m)]
            raise ValueError(f"the model has no linear layer {name!r}; it has {', '.join(known) or 'none'}.")
        return module


class _Captured:
    """Inputs of layers, kept by forward hooks; as views where nobody overwrites them."""

    def __init__(self, *, copies: bool) -> None:
        self.inputs: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._copies = copies

    def keep(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if name in self.inputs:
            raise ValueError(_TWICE.format(name))
        value = _layer_input(args, kwargs).detach()
        if self._copies or value.is_inference():  # a tensor of inference mode does not count its versions
            value = value.clone()
        self.inputs[name] = value
        self._versions[name] = -1 if value.is_inference() else value._version

    def overwritten(self) -> bool:
        """Whether an input was written to after its layer had read it."""
        return any(
            not value.is_inference() and value._version != self._versions[name] for name, value in self.inputs.items()
        )


_TWICE = (
    "layer {!r} shares its weights: one forward pass uses them more than once, so an edit would act in several places. "
    "Give each use a layer of its own."
)


def _layer_input(args: Any, kwargs: Any) -> torch.Tensor:
    value: torch.Tensor = args[0] if args else kwargs["input"]
    return value


def _bypassed(name: str, operation: str) -> str:
    return (
        f"the prediction of a row depends on more than its output of the last linear layer {name!r}: {operation} "
        "brings in another branch of the model, or other rows, so it is no head that a refit could stand before."
    )


def _close(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    finite = np.abs(a[np.isfinite(a)])
    size = float(np.median(finite)) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True))
