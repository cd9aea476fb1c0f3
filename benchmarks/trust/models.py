"""Hostile models of torch, scikit-learn and ONNX.

A repair is right when the repaired model, run by its own framework, predicts what `predict` says, when the figures of
the summary follow from those predictions, and when the caller's model is as it was: weights, flags, hooks.
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx.reference
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor
from torch import nn

from esvdfair import Effort, ESVDFair
from trust.arrays import GROUP, LABEL, TABLE, WEIGHT, consistent
from trust.verdict import Trial

METHODS = ("parity", "exact")


def all_trials() -> Iterator[Trial]:
    """Every trial of this file."""
    yield from model_trials("torch", TORCH, _torch_state, _torch_predictions)
    yield from model_trials("sklearn", SKLEARN, lambda model: repr(getattr(model, "coefs_", None)), _predictions)
    yield from model_trials("ONNX", ONNX, bytes, _reference_predictions, TABLE.astype(np.float32))
    yield from path_trials()


Models = dict[str, tuple[Callable[[], Any], bool]]
OK = True  # a model may be repaired, and is then compared; else only a clear error will do
OWN = {
    "raises at once": ValueError,
    "raises later": RuntimeError,
    "raises last": KeyError,
    "a hook that raises": LookupError,
}  # what a model itself raises


def model_trials(
    kind: str, models: Models, state: Callable[[Any], Any], own: Callable[[Any, Any], Any], x: Any = TABLE
) -> Iterator[Trial]:
    """Each model by two methods; ``state`` is what must not change, ``own`` what its framework predicts."""
    for name, (make, may) in models.items():
        for method in METHODS:
            right = partial(_as_framework, own, x) if may else None
            run = partial(_repaired, make, method, state, x)
            yield Trial(f"{kind} {method} {name}", run, right, "model", OWN.get(name))


def _repaired(make: Callable[[], Any], method: str, state: Callable[[Any], Any], x: Any) -> ESVDFair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # while the model is made: none of the package's
        model = make()
    before = state(model)
    try:
        return repair(model, method, x)
    finally:
        if state(model) != before:
            raise AssertionError("the caller's model was changed")


def repair(model: Any, method: str, x: Any = TABLE) -> ESVDFair:
    """A repair on all rows, which also judge."""
    fair = ESVDFair(model, method=method, effort=Effort.quick(), validation_fraction=0.0, min_group_rows=2)
    with patch.dict(os.environ, ESVDFAIR_TIME_LIMIT="0.5"):  # of an ONNX model with a loop
        return fair.fit(x, LABEL, sensitive_features=GROUP, sample_weight=WEIGHT)


def _as_framework(own: Callable[[Any, Any], Any], x: Any, fair: ESVDFair) -> bool | str:
    """Whether `predict` is what the framework gives, and the summary follows from it."""
    known = np.asarray(own(fair.estimator_, x), dtype=float).reshape(-1)
    if not np.allclose(fair.predict(x), known, rtol=1e-5, atol=1e-6):
        return "predict is not what the repaired model gives"
    coarse = isinstance(fair.estimator_, nn.Module) and next(fair.estimator_.parameters()).dtype == torch.bfloat16
    meant = {"X": x, "y": LABEL, "sensitive_features": GROUP, "sample_weight": WEIGHT}
    return consistent(fair, meant, relative=0.02 if coarse else 1e-3)


# --- torch -----------------------------------------------------------------------------------------------------------


def net(last: int = 1, width: int = 4) -> nn.Sequential:
    """A small network in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, last)).double()


class Wrapped(nn.Module):
    """A network with something done to its input or output."""

    def __init__(self, before: Callable[[Any], Any] | None = None, after: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net, self.before, self.after = net(), before, after

    def forward(self, x: Any) -> Any:
        x = x if self.before is None else self.before(x)
        out = self.net(x)
        return out if self.after is None else self.after(out)


class RaisesAt(nn.Module):
    """Raises at one of its calls."""

    def __init__(self, call: int, error: Exception) -> None:
        super().__init__()
        self.net, self.call, self.error, self.seen = net(), call, error, 0

    def forward(self, x: Any) -> Any:
        self.seen += 1
        if self.seen == self.call:
            raise self.error
        return self.net(x)


class SharesCopies(nn.Module):
    """Its copy is itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def __deepcopy__(self, memo: Any) -> "SharesCopies":
        return self

    def forward(self, x: Any) -> Any:
        return self.net(x)


class SharesParameters(SharesCopies):
    """Its copy is another module with the same parameters."""

    def __deepcopy__(self, memo: Any) -> "SharesParameters":
        other = SharesParameters.__new__(SharesParameters)
        nn.Module.__init__(other)
        other.net = self.net
        return other


class Tied(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.same, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x: Any) -> Any:
        return self.last(self.same(torch.relu(self.same(x))))


def _set(value: float, which: str = "2.weight") -> nn.Module:
    module = net()
    with torch.no_grad():
        dict(module.named_parameters())[which].fill_(value)
    return module


def _changed_last(change: Callable[[nn.Module], Any]) -> nn.Module:
    module = net()
    change(module[2])
    return module


def _hooked(hook: Callable[..., Any]) -> nn.Module:
    return _changed_last(lambda layer: layer.register_forward_hook(hook))


def _evil(*args: Any) -> Any:
    raise LookupError("a hook that raises")


TORCH: Models = {
    "plain": (net, OK),
    "in train mode": (lambda: net().train(), OK),
    "frozen": (lambda: net().requires_grad_(False), OK),
    "float32": (lambda: net().float(), OK),
    "float16": (lambda: net().half(), OK),
    "bfloat16": (lambda: net().bfloat16(), OK),
    "complex": (lambda: net().to(torch.complex128), False),
    "on meta": (lambda: net().to("meta"), False),
    "NaN weights": (lambda: _set(float("nan")), False),
    "NaN in a hidden layer": (lambda: _set(float("nan"), "0.weight"), False),
    "infinite weights": (lambda: _set(float("inf")), False),
    "NaN bias": (lambda: _set(float("nan"), "2.bias"), False),
    "weights 1e300": (lambda: _set(1e300), OK),
    "weights 1e155": (lambda: _set(1e155), OK),
    "weights 1e-300": (lambda: _set(1e-300), OK),
    "weights zero": (lambda: _set(0.0), OK),
    "hidden weights zero": (lambda: _set(0.0, "0.weight"), OK),
    "hidden weights 1e200": (lambda: _set(1e200, "0.weight"), OK),
    "all units dead": (lambda: _set(-1e9, "0.bias"), OK),
    "a width more": (lambda: net(width=5), False),
    "a width less": (lambda: net(width=3), False),
    "two outputs": (lambda: net(last=2), False),
    "no layers": (nn.Sequential, False),
    "no linear layer": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), False),
    "only a linear layer": (lambda: net()[:0].append(nn.Linear(4, 1).double()), OK),
    "a width of one": (
        lambda: nn.Sequential(nn.Linear(4, 1).double(), nn.ReLU(), nn.Linear(1, 1).double()), OK,
    ),
    "no bias": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1, bias=False)).double(), OK),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(1)), False),
    "less the mean of the batch": (lambda: Wrapped(before=lambda x: x - x.mean(0)), False),
    "sorted over rows": (lambda: Wrapped(before=lambda x: x.sort(0).values), False),
    "summed over rows": (lambda: Wrapped(before=lambda x: x.cumsum(0)), False),
    "softmax over rows": (lambda: Wrapped(after=lambda z: z.softmax(0)), False),
    "first row for all": (lambda: Wrapped(before=lambda x: x[:1].expand(len(x), 4)), False),
    "rows backwards": (lambda: Wrapped(before=lambda x: x.flip(0)), False),
    "batch norm in train mode": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double().train(), OK,
    ),
    "dropout left on": (lambda: Wrapped(before=lambda x: nn.functional.dropout(x, 0.3, training=True)), False),
    "noise on the input": (lambda: Wrapped(before=lambda x: x + torch.randn_like(x)), False),
    "noise on the output": (lambda: Wrapped(after=lambda z: z + 0.01 * torch.randn_like(z)), False),
    "dropout in train mode": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1)).double().train(), OK,
    ),
    "gives a tuple": (lambda: Wrapped(after=lambda z: (z, z)), False),
    "gives a dict": (lambda: Wrapped(after=lambda z: {"y": z}), OK),
    "gives None": (lambda: Wrapped(after=lambda z: None), False),
    "gives text": (lambda: Wrapped(after=lambda z: "five"), False),
    "gives one number": (lambda: Wrapped(after=lambda z: z.mean()), False),
    "gives a row less": (lambda: Wrapped(after=lambda z: z[1:]), False),
    "gives NumPy": (lambda: Wrapped(after=lambda z: z.detach().numpy()), False),
    "gives integers": (lambda: Wrapped(after=lambda z: z.long()), False),
    "gives NaN": (lambda: Wrapped(after=lambda z: z * float("nan")), False),
    "raises at once": (lambda: RaisesAt(1, ValueError("not today")), False),
    "raises later": (lambda: RaisesAt(3, RuntimeError("out of luck")), False),
    "raises last": (lambda: RaisesAt(6, KeyError("lost")), OK),
    "changes its input": (lambda: Wrapped(before=lambda x: x.mul_(2.0)), OK),
    "its copy is itself": (SharesCopies, False),
    "its copy shares parameters": (SharesParameters, False),
    "one layer twice": (Tied, OK),
    "a hook that changes nothing": (lambda: _hooked(lambda m, i, o: None), OK),
    "a hook that doubles": (lambda: _hooked(lambda m, i, o: o * 2), OK),
    "a hook that raises": (lambda: _hooked(_evil), False),
    "weight norm": (lambda: _changed_last(nn.utils.parametrizations.weight_norm), OK),
    "spectral norm": (lambda: _changed_last(nn.utils.parametrizations.spectral_norm), OK),
    "scripted": (lambda: torch.jit.script(net()), OK),
    "no module": (lambda: {"weights": [1, 2]}, False),
    "a class": (lambda: nn.Linear, False),
    "a function": (lambda: torch.relu, False),
}  # fmt: skip


def _torch_state(module: Any) -> Any:
    if not isinstance(module, nn.Module):
        return None
    flags = [part.training for part in module.modules()]
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    lazy = nn.parameter.UninitializedParameter
    values = [v for v in module.state_dict().values() if not (isinstance(v, lazy) or v.is_meta or v.is_complex())]
    weights = [value.detach().double().numpy().tobytes() for value in values]
    return flags, hooks, weights, [p.requires_grad for p in module.parameters()]


def _torch_predictions(model: nn.Module, x: Any) -> Any:
    with torch.no_grad():
        out = copy.deepcopy(model).eval()(torch.tensor(x, dtype=next(model.parameters()).dtype))
    return (out["y"] if isinstance(out, dict) else out).double().numpy()


# --- scikit-learn ----------------------------------------------------------------------------------------------------


def _mlp(**options: Any) -> MLPRegressor:
    return MLPRegressor(hidden_layer_sizes=(5,), solver="lbfgs", max_iter=40, tol=1e-2, random_state=0, **options)


@cache
def _fitted() -> MLPRegressor:
    return _mlp().fit(TABLE, LABEL)


def _changed(change: Callable[[Any], None]) -> Any:
    model = copy.deepcopy(_fitted())
    change(model)
    return model


def _fill(value: float, layer: int = -1) -> Callable[[Any], None]:
    return lambda model: model.coefs_[layer].fill(value)


def _cube(values: Any) -> Any:
    return values**3


class Pretender:
    """Has fit and predict and nothing else."""

    def fit(self, X: Any, y: Any) -> "Pretender":
        return self

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X))


class Random(MLPRegressor):  # type: ignore[misc]  # scikit-learn has no types
    """Predicts something else each time."""

    def predict(self, X: Any) -> Any:
        return super().predict(X) + np.random.default_rng().normal(size=len(X))


SKLEARN: Models = {
    "plain": (lambda: _fitted(), OK),
    "not fitted": (_mlp, OK),
    "logistic units": (lambda: _mlp(activation="logistic").fit(TABLE, LABEL), OK),
    "tanh": (lambda: _mlp(activation="tanh").fit(TABLE, LABEL), OK),
    "identity": (lambda: _mlp(activation="identity").fit(TABLE, LABEL), OK),
    "float32": (lambda: _mlp().fit(TABLE.astype(np.float32), LABEL.astype(np.float32)), OK),
    "Poisson": (lambda: _mlp(loss="poisson").fit(TABLE, np.exp(LABEL / 4)), OK),
    "two outputs": (lambda: _mlp().fit(TABLE, np.column_stack([LABEL, LABEL])), False),
    "another width": (lambda: _mlp().fit(TABLE[:, :3], LABEL), False),
    "NaN weights": (lambda: _changed(_fill(np.nan)), False),
    "NaN in a hidden layer": (lambda: _changed(_fill(np.nan, 0)), False),
    "weights 1e300": (lambda: _changed(_fill(1e300)), OK),
    "weights 1e155": (lambda: _changed(_fill(1e155)), OK),
    "weights zero": (lambda: _changed(_fill(0.0)), OK),
    "hidden weights zero": (lambda: _changed(_fill(0.0, 0)), OK),
    "a layer of another shape": (lambda: _changed(lambda m: m.coefs_.__setitem__(1, np.ones((4, 1)))), False),
    "a layer lost": (lambda: _changed(lambda m: m.coefs_.pop()), False),
    "weights of text": (lambda: _changed(lambda m: m.coefs_.__setitem__(1, np.full((5, 1), "w"))), False),
    "no weights": (lambda: _changed(lambda m: delattr(m, "coefs_")), OK),
    "read-only weights": (lambda: _changed(lambda m: [c.setflags(write=False) for c in m.coefs_]), OK),
    "in a pipeline": (lambda: make_pipeline(StandardScaler(), _mlp()).fit(TABLE, LABEL), OK),
    "pipeline, not fitted": (lambda: make_pipeline(StandardScaler(), _mlp()), OK),
    "targets transformed": (
        lambda: TransformedTargetRegressor(_mlp(), transformer=StandardScaler()).fit(TABLE, LABEL), OK,
    ),
    "targets cubed": (
        lambda: TransformedTargetRegressor(_mlp(), func=np.cbrt, inverse_func=_cube).fit(TABLE, LABEL), OK,
    ),
    "a linear model": (lambda: Ridge().fit(TABLE, LABEL), OK),
    "a tree": (lambda: DecisionTreeRegressor().fit(TABLE, LABEL), OK),
    "a classifier": (
        lambda: MLPClassifier(hidden_layer_sizes=(5,), tol=1e-2, solver="lbfgs").fit(TABLE, GROUP), OK,
    ),
    "a pretender": (Pretender, False),
    "a class": (lambda: MLPRegressor, False),
    "None": (lambda: None, False),
    "a number": (lambda: 3, False),
    "predicts another each time": (
        lambda: Random(hidden_layer_sizes=(5,), solver="lbfgs", max_iter=40, tol=1e-2).fit(TABLE, LABEL), False,
    ),
}  # fmt: skip


def _predictions(model: Any, x: Any) -> Any:
    return model.predict_proba(x)[:, 1] if hasattr(model, "predict_proba") else model.predict(x)


# --- ONNX ------------------------------------------------------------------------------------------------------------

_rng = np.random.default_rng(3)
W0, B0 = _rng.normal(size=(4, 6)).astype(np.float32), _rng.normal(size=6).astype(np.float32)
W1, B1 = _rng.normal(size=(6, 1)).astype(np.float32), _rng.normal(size=1).astype(np.float32)


def graph(
    *, weights: dict[str, Any] | None = None, rows: Any = None, columns: Any = 4, before: Any = (), after: Any = (),
    out: str = "y", outputs: Any = None, kind: int = TensorProto.FLOAT, opset: int = 17,
) -> onnx.ModelProto:  # fmt: skip
    """A small network as ONNX, with nodes before it (from "x" to "x1") and after it (from "y" on)."""
    arrays = {"w0": W0, "b0": B0, "w1": W1, "b1": B1} | (weights or {})
    nodes = [
        *before,
        helper.make_node("Gemm", ["x1" if before else "x", "w0", "b0"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w1", "b1"], ["y"]),
        *after,
    ]
    outputs = outputs or [helper.make_tensor_value_info(out, kind, [None, None])]
    made = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, columns])], outputs,
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )  # fmt: skip
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _floats(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None])


def _node(operation: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operation, inputs, [output], **attributes)


def endless_loop() -> onnx.ModelProto:
    """A Loop of 2^62 rounds between the network and its output."""
    body = helper.make_graph(
        [_node("Identity", ["c"], "c_out"), _node("Identity", ["v"], "v_out")], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("c_out", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v_out", TensorProto.FLOAT, None)],
    )  # fmt: skip
    more = {"rounds": np.array(2**62, dtype=np.int64), "go": np.array(True)}
    loop = helper.make_node("Loop", ["rounds", "go", "y"], ["z"], body=body)
    return graph(weights=more, after=[loop], out="z")


def _bytes(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString())


def _mutated(change: Callable[[onnx.ModelProto], Any]) -> bytes:
    model = graph()
    change(model)
    return _bytes(model)


def _filled(value: float, name: str = "w1") -> bytes:
    like = {"w0": W0, "b0": B0, "w1": W1, "b1": B1}[name]
    return _bytes(graph(weights={name: np.full_like(like, value)}))


def _external(location: str) -> bytes:
    model = graph()
    tensor = model.graph.initializer[2]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("length", "24")):
        tensor.external_data.add(key=key, value=value)
    return _bytes(model)


_TEXT = TensorProto.STRING
ONNX: Models = {
    "plain": (lambda: _bytes(graph()), OK),
    "a batch of one row": (lambda: _bytes(graph(rows=1)), OK),
    "a batch of seven rows": (lambda: _bytes(graph(rows=7)), OK),
    "a batch of 2^40 rows": (lambda: _bytes(graph(rows=2**40)), False),
    "a batch of 2^62 rows": (lambda: _bytes(graph(rows=2**62)), False),
    "another width": (lambda: _bytes(graph(columns=5)), False),
    "NaN weights": (lambda: _filled(np.nan), False),
    "infinite weights": (lambda: _filled(np.inf), False),
    "NaN in a hidden layer": (lambda: _filled(np.nan, "w0"), False),
    "weights 1e38": (lambda: _filled(1e38), OK),
    "weights 1e-38": (lambda: _filled(1e-38), OK),
    "weights zero": (lambda: _filled(0.0), OK),
    "dead units": (lambda: _filled(-1e9, "b0"), OK),
    "two outputs": (
        lambda: _bytes(graph(outputs=[_floats("y"), _floats("a")])),
        False,
    ),
    "integers out": (
        lambda: _bytes(graph(after=[_node("Cast", ["y"], "z", to=TensorProto.INT64)], out="z", kind=TensorProto.INT64)),
        False,
    ),
    "text out": (
        lambda: _bytes(graph(after=[_node("Cast", ["y"], "z", to=_TEXT)], out="z", kind=_TEXT)),
        False,
    ),
    "endless loop": (lambda: _bytes(endless_loop()), False),
    "14 TiB": (
        lambda: _bytes(graph(weights={"shape": np.array([2**42], dtype=np.int64)}, after=[
            _node("ConstantOfShape", ["shape"], "big"), _node("ReduceSum", ["big"], "s"), _node("Add", ["y", "s"], "z"),
        ], out="z")), False,
    ),
    "noise on the input": (
        lambda: _bytes(graph(before=[_node("RandomNormalLike", ["x"], "n"), _node("Add", ["x", "n"], "x1")])), False,
    ),
    "less the mean of the batch": (
        lambda: _bytes(graph(before=[_node("ReduceMean", ["x"], "m", axes=[0]), _node("Sub", ["x", "m"], "x1")])),
        False,
    ),
    "dropout in training mode": (
        lambda: _bytes(graph(weights={"r": np.array(0.5, np.float32), "t": np.array(True)},
                             before=[_node("Dropout", ["x", "r", "t"], "x1")])), False,
    ),
    "summed over rows": (
        lambda: _bytes(graph(weights={"k": np.array(0, np.int64)}, before=[_node("CumSum", ["x", "k"], "x1")])), False,
    ),
    "a sigmoid behind": (lambda: _bytes(graph(after=[_node("Sigmoid", ["y"], "z")], out="z")), OK),
    "a sine behind": (lambda: _bytes(graph(after=[_node("Sin", ["y"], "z")], out="z")), False),
    "an operator of nobody's": (
        lambda: _bytes(graph(after=[helper.make_node("Evil", ["y"], ["z"], domain="com.evil")], out="z")), False,
    ),
    "an operator that is none": (lambda: _bytes(graph(after=[_node("Nothing", ["y"], "z")], out="z")), False),
    "opset 999": (lambda: _mutated(lambda m: m.opset_import[0].__setattr__("version", 999)), False),
    "no opset": (lambda: _mutated(lambda m: m.ClearField("opset_import")), False),
    "ir_version 99999": (lambda: _mutated(lambda m: m.__setattr__("ir_version", 99999)), False),
    "no nodes": (lambda: _mutated(lambda m: m.graph.ClearField("node")), False),
    "no inputs": (lambda: _mutated(lambda m: m.graph.ClearField("input")), False),
    "no weights": (lambda: _mutated(lambda m: m.graph.ClearField("initializer")), False),
    "no outputs": (lambda: _mutated(lambda m: m.graph.ClearField("output")), False),
    "a circle": (lambda: _mutated(lambda m: m.graph.node[0].input.__setitem__(0, "y")), False),
    "a weight twice": (lambda: _mutated(lambda m: m.graph.initializer.append(m.graph.initializer[0])), False),
    "a type unknown": (lambda: _mutated(lambda m: m.graph.initializer[0].__setattr__("data_type", 77)), False),
    "cut short": (
        lambda: _mutated(lambda m: m.graph.initializer[0].__setattr__("raw_data", b"1234")), False,
    ),
    "a weight of 2^60": (lambda: _mutated(lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**60)), False),
    "a negative shape": (lambda: _mutated(lambda m: m.graph.initializer[0].dims.__setitem__(0, -4)), False),
    "external data at /etc/passwd": (lambda: _external("/etc/passwd"), False),
    "external data above": (lambda: _external("../secret"), False),
    "empty": (lambda: b"", False),
    "text": (lambda: b"not a model at all", False),
    "a pickle": (lambda: b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", False),
    "zeros": (lambda: bytes(100_000), False),
    "cut in half": (lambda: _bytes(graph())[:120], False),
    "something behind it": (lambda: _bytes(graph()) + b"more", False),
}  # fmt: skip


def _reference_predictions(model: bytes, x: Any) -> Any:
    """By onnx's own arithmetic, not onnxruntime's."""
    return onnx.reference.ReferenceEvaluator(onnx.load_from_string(model)).run(None, {"x": x})[0]


def path_trials() -> Iterator[Trial]:
    """Paths that lead to no model."""

    def at(lead: Callable[[Path], Any]) -> ESVDFair:
        with tempfile.TemporaryDirectory() as folder:
            return repair(str(lead(Path(folder))), "parity", TABLE.astype(np.float32))

    def after(make: Callable[[Path], Any], path: Path) -> Path:
        make(path)
        return path

    places: dict[str, Callable[[Path], Any]] = {
        "nowhere": lambda folder: folder / "m.onnx",
        "a folder": lambda folder: folder,
        "a FIFO": lambda folder: after(os.mkfifo, folder / "pipe.onnx"),
        "/dev/zero": lambda folder: "/dev/zero",
        "/dev/null": lambda folder: "/dev/null",
        "a circle of links": lambda folder: after(lambda path: path.symlink_to(path), folder / "m.onnx"),
        "below a folder": lambda folder: after(Path.mkdir, folder / "m.onnx") / "deeper.onnx",
        "a very long name": lambda folder: folder / ("m" * 5000),
        "a name with NUL": lambda folder: folder / "m\0.onnx",
    }
    for name, lead in places.items():
        yield Trial(f"ONNX path {name}", partial(at, lead), None, "model")
