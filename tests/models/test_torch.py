import collections
import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from esvdfair import ESVDFair
from esvdfair.core.checks import row_count, take
from esvdfair.models import adapt, find_layer
from esvdfair.models.base import PREDICT_ROWS
from esvdfair.models.torch import TorchAdapter

X = np.random.default_rng(0).normal(size=(300, 6))


def mlp(*last, bias=True):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1, bias=bias), *last)


class Wrapped(nn.Module):
    """A model whose forward pass is any function of itself and x."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def after(function):
    return Wrapped(lambda self, x: function(self.net(x)), net=mlp())


def residual():
    def forward(self, x):
        h = self.stem(x)
        h = h + self.block(h)
        return self.out(h)

    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
    return Wrapped(forward, out=nn.Linear(8, 1), block=block, stem=nn.Linear(6, 8))


def residual_in_place():
    def forward(self, x):
        h = self.stem(x).relu_()
        h += self.block(h)
        return self.out(h)

    return Wrapped(forward, stem=nn.Linear(6, 8), block=nn.Linear(8, 8), out=nn.Linear(8, 1))


def tokens():
    def forward(self, x):
        h = self.embed(x.unsqueeze(-1))  # one token a column: (n, 6, 4)
        return self.out(self.mix(h).relu().mean(dim=1)).squeeze(-1)

    return Wrapped(forward, embed=nn.Linear(1, 4), mix=nn.Linear(4, 4), out=nn.Linear(4, 1))


def two_heads(select):
    def forward(self, x):
        h = self.body(x).relu()
        return select(self.mean(h), self.aux(h))

    return Wrapped(forward, aux=nn.Linear(8, 1), mean=nn.Linear(8, 1), body=nn.Linear(6, 8))


@torch.no_grad()
def gradients_off(self, x):
    return torch.sigmoid(self.net(x))


@torch.inference_mode()
def inference_mode(self, x):
    return self.net(x)


Output = collections.namedtuple("Output", "score extra")


# name: (model, output=, layers in order of execution, kind of head)
CASES = {
    "sequential": (mlp, None, ["0", "2", "4"], "identity"),
    "one layer": (lambda: nn.Linear(6, 1), None, [""], "identity"),
    "no bias": (lambda: mlp(bias=False), None, ["0", "2", "4"], "identity"),
    "flat output": (lambda: mlp(nn.Flatten(0)), None, ["0", "2", "4"], "identity"),
    "residual": (residual, None, ["stem", "block.1", "block.4", "out"], "identity"),
    "residual in place": (residual_in_place, None, ["stem", "block", "out"], "identity"),
    "tokens": (tokens, None, ["embed", "mix", "out"], "identity"),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1), nn.BatchNorm1d(1)),
        None,
        ["0", "3"],
        "affine",
    ),
    "sigmoid": (lambda: mlp(nn.Sigmoid()), None, ["0", "2", "4"], "sigmoid"),
    "softplus": (lambda: mlp(nn.Softplus()), None, ["0", "2", "4"], "softplus"),
    "softplus with beta": (lambda: mlp(nn.Softplus(beta=3)), None, ["0", "2", "4"], "softplus"),
    "exp": (lambda: after(torch.exp), None, ["net.0", "net.2", "net.4"], "exp"),
    "decreasing": (lambda: after(lambda z: 5 - 2 * z[:, 0]), None, ["net.0", "net.2", "net.4"], "affine"),
    "in place": (lambda: after(lambda z: z.mul_(3).add_(1)), None, ["net.0", "net.2", "net.4"], "affine"),
    "sigmoid by hand": (lambda: after(lambda z: 1 / (1 + torch.exp(-z))), None, ["net.0", "net.2", "net.4"], "sigmoid"),
    "range of a score": (
        lambda: after(lambda z: 300 + 550 * torch.sigmoid(z / 2)),
        None,
        ["net.0", "net.2", "net.4"],
        "sigmoid",
    ),
    "no gradients": (lambda: Wrapped(gradients_off, net=mlp()), None, ["net.0", "net.2", "net.4"], "sigmoid"),
    "inference mode": (lambda: Wrapped(inference_mode, net=mlp()), None, ["net.0", "net.2", "net.4"], "identity"),
    "through NumPy": (
        lambda: after(lambda z: torch.from_numpy(np.exp(z.detach().double().numpy())).to(z)),
        None,
        ["net.0", "net.2", "net.4"],
        "exp",
    ),
    "keyword call": (
        lambda: Wrapped(lambda self, x: self.b(input=self.a(input=x).relu()), b=nn.Linear(8, 1), a=nn.Linear(6, 8)),
        None,
        ["a", "b"],
        "identity",
    ),
    "tuple": (lambda: two_heads(lambda m, a: (m, a)), 0, ["body", "mean"], "identity"),
    "second of a tuple": (lambda: two_heads(lambda m, a: (m, a)), 1, ["body", "aux"], "identity"),
    "dict": (lambda: two_heads(lambda m, a: {"m": m, "a": a.exp()}), "m", ["body", "mean"], "identity"),
    "named tuple": (lambda: two_heads(Output), "score", ["body", "mean"], "identity"),
    "callable": (lambda: two_heads(lambda m, a: {"m": [m]}), lambda r: 2 * r["m"][0], ["body", "mean"], "affine"),
    "data parallel": (lambda: nn.DataParallel(mlp()), None, ["0", "2", "4"], "identity"),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    model, output, layers, kind = CASES[name]
    module = model().to(dtype)
    with torch.no_grad():  # statistics of a batch norm that are not those of its construction
        module.train()(torch.as_tensor(X).to(dtype) * 2 + 1)
    return module, output, layers, kind


def reference(module, output, dtype=torch.float32):
    """Predictions by the plainest code."""
    flags = {m: m.training for m in module.modules()}
    with torch.no_grad():
        result = module.eval()(torch.as_tensor(X).to(dtype))
    for m, flag in flags.items():
        m.training = flag
    picks = {int: lambda: result[output], str: lambda: result[output] if isinstance(result, dict) else result.score}
    value = output(result) if callable(output) else picks.get(type(output), lambda: result)()
    return value.reshape(-1).float().numpy() if dtype == torch.bfloat16 else value.reshape(-1).numpy()


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_untouched(module, before, flags):
    assert before.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [m.training for m in module.modules()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


HALF = ("no bias", "batch norm", "sigmoid", "softplus with beta", "exp", "decreasing", "through NumPy")
DTYPE_CASES = [
    *((name, torch.float32) for name in CASES),
    *((name, torch.bfloat16) for name in HALF),
    *((name, torch.float64) for name in ("sequential", "range of a score")),
]


@pytest.mark.parametrize(("name", "dtype"), DTYPE_CASES)
def test_contract(name, dtype):
    """List, predict, capture, replace and head agree with each other and with the model, and leave it alone."""
    module, output, names, kind = build(name, dtype)
    before, flags = snapshot(module), [m.training for m in module.modules()]
    expected = reference(module, output, dtype)
    adapter = adapt(module, output=output)
    assert isinstance(adapter, TorchAdapter)
    assert adapter.model is module

    layers = adapter.layers(X)
    assert [layer.name for layer in layers] == names
    assert [layer.index for layer in layers] == list(range(len(names)))
    prediction = adapter.predict(X)
    np.testing.assert_array_equal(prediction, expected)
    assert prediction.dtype == (np.float32 if dtype == torch.bfloat16 else expected.dtype)

    inputs, captured = adapter.capture(X, names)
    np.testing.assert_array_equal(captured.float().numpy(), prediction.astype(np.float32))
    outputs = {}
    core = module.module if isinstance(module, nn.DataParallel) else module
    handles = [
        core.get_submodule(n).register_forward_hook(lambda m, a, o, n=n: outputs.update({n: o.clone()})) for n in names
    ]
    reference(module, output, dtype)
    for handle in handles:
        handle.remove()
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    for layer in layers:
        assert layer.weight.dtype == np.float64
        bias = 0 if layer.bias is None else layer.bias
        product = inputs[layer.name].double().numpy() @ layer.weight.T + bias
        np.testing.assert_allclose(product, outputs[layer.name].double().numpy(), atol=tolerance, rtol=tolerance)

    head = adapter.head(X)
    assert head.kind == kind
    z = outputs[names[-1]].double().numpy().ravel()
    np.testing.assert_allclose(head.apply(z), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())

    same = adapter.replace({layer.name: (layer.weight, layer.bias) for layer in layers})
    np.testing.assert_array_equal(same.predict(X), expected)
    assert_untouched(module, before, flags)


# What makes another copy, or another last layer; all others are written to in the same way.
COPIES = ["sequential", "one layer", "no bias", "residual in place", "batch norm", "second of a tuple", "data parallel"]


@pytest.mark.parametrize("name", COPIES)
def test_replace_edits_a_copy(name):
    module, output, *_ = build(name)
    before, flags = snapshot(module), [m.training for m in module.modules()]
    adapter = adapt(module, output=output)
    last = adapter.layers(X)[-1]
    edited = adapter.replace({last.name: (2 * last.weight, None if last.bias is None else last.bias + 1)})
    assert type(edited.model) is type(module)
    assert edited.model is not module
    changed = edited.layers(X)[-1]
    np.testing.assert_array_equal(changed.weight, 2 * last.weight)
    if last.bias is not None:
        np.testing.assert_allclose(changed.bias, last.bias + 1, rtol=1e-6)
    assert np.abs(edited.predict(X) - adapter.predict(X)).max() > 1e-3
    assert_untouched(module, before, flags)
    assert [m.training for m in edited.model.modules()] == flags
    copy.deepcopy(module).load_state_dict(edited.model.state_dict())  # same architecture


def test_replace_keeps_dtype_and_requires_grad_and_rounds_once():
    module = mlp().to(torch.bfloat16)
    module[2].weight.requires_grad_(False)
    weight = np.random.default_rng(0).normal(size=(8, 8))
    edited = adapt(module).replace({"2": (weight, None)}).model
    assert edited[2].weight.dtype == torch.bfloat16
    assert not edited[2].weight.requires_grad
    assert edited[2].bias.requires_grad
    assert isinstance(edited[2].weight, nn.Parameter)
    assert torch.equal(edited[2].weight, torch.as_tensor(weight).to(torch.bfloat16))
    assert torch.equal(edited[2].bias, module[2].bias)  # a bias of None leaves it


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"2": (np.zeros((8, 7)), None)}, r"layer '2' has shape \(8, 7\); it must be \(8, 8\)"),
        ({"1": (np.zeros((8, 8)), None)}, "no linear layer '1'; it has '0', '2', '4'"),
        ({"a.b": (np.zeros((8, 8)), None)}, "no linear layer 'a.b'"),
        ({"4": (np.zeros((1, 8)), np.zeros(1))}, "'4' has no bias"),
        ({"2": (np.full((8, 8), 1e39), None)}, "'2' are too large for torch.float32"),
    ],
)
def test_replace_refuses_what_does_not_fit(weights, match):
    with pytest.raises(ValueError, match=match):
        adapt(mlp(bias=False)).replace(weights)


def remember(self, x):
    self.last = self.net(x)
    return self.last


def remember_all(self, x):
    self.last = [self.net(x)]
    return self.last[0]


def test_a_model_that_remembers_can_be_copied():
    module = Wrapped(remember, net=mlp())
    module(torch.ones(2, 6))
    edited = adapt(module).replace({"net.4": (np.zeros((1, 8)), np.ones(1))})
    np.testing.assert_array_equal(edited.predict(X), np.ones(300))
    assert module.last.shape == edited.model.last.shape == (2, 1)


def test_a_model_that_cannot_be_copied():
    module = Wrapped(remember_all, net=mlp())
    module(torch.ones(2, 6))
    with pytest.raises(ValueError, match="cannot be copied"):
        adapt(module).replace({})


MONOTONE = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "relu in place": lambda z: (z + 0.1).relu_(),
    "clamp": lambda z: z.clamp(-0.2, 0.1),
    "idle clamp": lambda z: z.clamp(-1e6, 1e6),
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
    "power": lambda z: z**3,
    "where": lambda z: torch.where(z > 0, z, 0.1 * z),
    "falling": lambda z: 1 - torch.tanh(z),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MONOTONE)
def test_monotone_heads_are_followed(name, dtype):
    adapter = adapt(after(MONOTONE[name]).to(dtype))
    *_, last = adapter.layers(X)
    head = adapter.head(X)
    assert head.kind == "monotone"
    expected = adapter.predict(X)
    z = adapter.capture(X, [last.name])[0][last.name].double().numpy() @ last.weight[0] + last.bias[0]
    np.testing.assert_allclose(
        head.apply(z), expected, atol=(1e-4 if dtype is torch.float32 else 2e-6) * np.ptp(expected)
    )


HEADS_TO_NAME = {
    "square": (lambda z: z * z, "'mul'"),
    "gelu": (F.gelu, "'gelu'"),
    "rounding": (torch.round, "'round'"),
    "sort": (lambda z: z.sort(dim=0).values, "'sort'"),
    "standardised in the batch": (lambda z: z / z.sum(), "'sum'"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in HEADS_TO_NAME), ("square", torch.bfloat16)],
)
def test_unsupported_heads_are_named(name, dtype):
    function, operation = HEADS_TO_NAME[name]
    with pytest.raises(ValueError, match=operation):
        adapt(after(function).to(dtype)).head(X)


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize(
    ("forward", "operation"),
    [
        (lambda self, x: self.net(x) * x[:, :1], "'mul'"),
        (lambda self, x: self.net(x) + self.aux(x) * x[:, :1], "'mul'"),
        (lambda self, x: self.net(x) * torch.sigmoid(self.aux(x)), "'mul'"),
        (lambda self, x: torch.cat([self.net(x), x], dim=1).amax(dim=1), "'cat'"),
    ],
)
def test_what_joins_the_last_layer_is_named(forward, operation, rows):
    adapter = adapt(Wrapped(forward, net=mlp(), aux=nn.Linear(6, 1)))
    adapter.layers(X)  # listing is no problem
    with pytest.raises(ValueError, match=f"depends on more than .* {operation}"):
        adapt(Wrapped(forward, net=mlp(), aux=nn.Linear(6, 1))).head(X[:rows])


def test_a_head_of_several_outputs_is_named():
    model = Wrapped(lambda self, x: self.net(x).amax(dim=1), net=nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"'net' gives shape \(256, 3\) for 256 rows, and .*'amax' makes one"):
        adapt(model).head(X)


def wide(forward=lambda z: z, width=3):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, width))
    return Wrapped(lambda self, x: forward(self.net(x)), net=body)


# name: (model, output, row that is edited, kind of head)
WIDE = {
    "one column": (wide, 1, 1, "identity"),
    "the last column": (wide, -1, 2, "identity"),
    "one column in a dict": (lambda: wide(lambda z: {"y": z.exp()}), ("y", 0), 0, "exp"),
    "mean and spread": (lambda: wide(lambda z: (3 * z[:, 0] + 1, F.softplus(z[:, 1])), 2), 0, 0, "affine"),
    "picked inside": (lambda: wide(lambda z: z[:, 2:].sigmoid()), None, 2, "sigmoid"),
    "a callable": (wide, lambda z: 2 * z[:, 1], 1, "affine"),
    "very wide": (lambda: wide(width=300), 217, 217, "identity"),
    "two classes": (lambda: wide(lambda z: z.softmax(dim=1), 2), 1, 1, "sigmoid"),
    "two classes, the first": (lambda: wide(lambda z: z.softmax(dim=1), 2), 0, 0, "sigmoid"),
    "logits of two classes": (lambda: wide(width=2), lambda z: z.softmax(dim=1)[:, 1], 1, "sigmoid"),
}


@pytest.mark.parametrize("name", WIDE)
def test_one_column_of_a_wide_layer(name):
    model, output, row, kind = WIDE[name]
    model = model()
    adapter = adapt(model, output=output)
    before, last = adapter.predict(X), adapter.layers(X)[-1]
    assert last.weight.shape == (1, 8)
    assert last.bias.shape == (1,)
    head = adapter.head(X)
    assert head.kind == kind
    h = adapter.capture(X, ["net.2"])[0]["net.2"].double().numpy()
    np.testing.assert_allclose(head.apply(h @ last.weight[0] + last.bias), before, rtol=1e-4, atol=1e-5)

    weight = np.random.default_rng(0).normal(size=(1, 8))
    edited = adapter.replace({"net.2": (weight, np.array([0.5]))})
    np.testing.assert_allclose(edited.predict(X), head.apply(h @ weight[0] + 0.5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(edited.layers(X)[-1].weight, weight, atol=1e-6)
    same = edited.replace({"net.2": (last.weight, last.bias)}).model  # the edited one knows its column too
    others = [i for i in range(len(model.net[2].weight)) if i != row]
    for part in ("weight", "bias"):
        old, new, back = (getattr(m.net[2], part).detach() for m in (model, edited.model, same))
        assert torch.equal(old[others], new[others])
        assert torch.allclose(back, old, atol=1e-6)
    np.testing.assert_array_equal(adapter.predict(X), before)


@pytest.mark.parametrize(
    ("forward", "output"),
    [(lambda z: z.softmax(dim=1), 1), (lambda z: z[:, 0] * z[:, 1], None), (lambda z: z.amax(dim=1), None)],
)
def test_columns_that_make_the_prediction_together(forward, output):
    with pytest.raises(ValueError, match=r"'net\.2' gives shape .* which is no weighted sum"):
        adapt(wide(forward), output=output).head(X)


def test_a_column_that_is_not_there():
    with pytest.raises(ValueError, match="returns 3 columns; `output=3` is not part of it"):
        adapt(wide(), output=3).predict(X)


def test_a_head_that_ignores_the_layer_is_constant():
    with pytest.raises(ValueError, match="constant"):
        adapt(after(lambda z: 0 * z + 1)).head(X)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_head_is_found_from_a_single_row(rows):
    adapter = adapt(mlp(nn.Sigmoid()))
    assert adapter.head(X[:rows]).kind == "sigmoid"
    assert adapter.head(X[2:7]).kind == "sigmoid"  # remembered, though these are other rows


def test_a_batch_of_no_rows():
    adapter = adapt(mlp())
    assert adapter.predict(X[:0]).shape == (0,)
    with pytest.raises(ValueError, match="no rows"):
        adapter.layers(X[:0])


def test_layers_that_do_not_run_or_do_not_feed_the_prediction_are_not_listed():
    model = two_heads(lambda m, a: (m, a))
    model.spare = nn.Linear(8, 8)
    adapter = adapt(model, output=0)
    assert [layer.name for layer in adapter.layers(X)] == ["body", "mean"]
    with pytest.raises(ValueError, match=r"'spare'.*0: 'body' \(6 → 8\), 1: 'mean' \(8 → 1\)"):
        find_layer(adapter.layers(X), "spare")
    with pytest.raises(ValueError, match="does not reach layer 'spare'"):
        adapter.capture(X, ["spare"])


def tie(kind):
    layer = nn.Linear(8, 8)
    if kind == "parameter":
        other = nn.Linear(8, 8)
        other.weight = layer.weight
        return nn.Sequential(nn.Linear(6, 8), layer, nn.ReLU(), other, nn.Linear(8, 1)), r"'1'.*weight.*'3.weight'"
    if kind == "bias":
        other = nn.Linear(8, 8)
        other.bias = layer.bias
        return nn.Sequential(nn.Linear(6, 8), layer, nn.ReLU(), other, nn.Linear(8, 1)), r"'1'.*bias.*'3.bias'"
    if kind == "transposed":
        other = nn.Linear(8, 8)
        other.weight = nn.Parameter(layer.weight.detach().t())
        return nn.Sequential(nn.Linear(6, 8), layer, nn.ReLU(), other, nn.Linear(8, 1)), r"'1'.*weight.*'3.weight'"
    if kind == "module":
        return nn.Sequential(nn.Linear(6, 8), layer, nn.ReLU(), layer, nn.Linear(8, 1)), "'1' shares its weights"
    if kind == "loop":

        def forward(self, x):
            h = self.a(x)
            for _ in range(3):
                h = self.b(h).relu()
            return self.c(h)

        return Wrapped(forward, a=nn.Linear(6, 8), b=layer, c=nn.Linear(8, 1)), "'b' shares its weights"

    def decode(self, x):
        return self.c(F.linear(self.b(self.a(x)).relu(), self.b.weight.t()))

    return Wrapped(decode, a=nn.Linear(6, 8), b=layer, c=nn.Linear(8, 1)), "'b' shares its weights"


@pytest.mark.parametrize("kind", ["parameter", "bias", "transposed", "module", "loop", "functional"])
def test_a_hidden_layer_with_tied_weights_cannot_be_edited_and_is_no_obstacle_to_the_last(kind):
    model, match = tie(kind)
    adapter = adapt(model)
    *hidden, last = adapter.layers(X)
    tied = next(layer for layer in hidden if f"'{layer.name}'" in match)
    with pytest.raises(ValueError, match=match):
        adapter.replace({tied.name: (tied.weight, None)})
    if kind in ("module", "loop"):
        with pytest.raises(ValueError, match=match):
            adapter.capture(X, [tied.name])
    assert adapter.head(X).kind == "identity"
    edited = adapter.replace({last.name: (0 * last.weight, last.bias + 1)})
    np.testing.assert_allclose(edited.predict(X), np.full(300, last.bias + 1), rtol=1e-6)


def test_a_last_layer_with_tied_weights_is_named():
    last = nn.Linear(6, 1)
    twice = Wrapped(lambda self, x: self.last(x) + self.last(x.relu()), last=last)
    with pytest.raises(ValueError, match="'last' shares its weights"):
        adapt(twice).layers(X)


def test_ties_that_do_not_matter_are_no_error():
    model = two_heads(lambda m, a: (m, a))
    model.alias = model.body  # a second name for one layer that runs once
    model.spare = nn.Linear(8, 8)
    model.spare2 = nn.Linear(8, 8)
    model.spare2.weight = model.spare.weight  # tied, but not in use
    assert len(adapt(model, output=0).layers(X)) == 2


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})[0]


class Int8(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x), self.bias)


class Masked(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * (self.weight > 0), self.bias)


class Verbose(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def pruned():
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (quantised, "'1' is quantised"),
        (Int8, "'1' is quantised"),
        (lambda: Masked(8, 8), "'1' is a Masked, whose output"),
    ],
)
def test_layers_that_cannot_be_edited(layer, match):
    with pytest.raises(ValueError, match=match):
        adapt(nn.Sequential(nn.Linear(6, 8), layer(), nn.Linear(8, 1))).layers(X)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        old_weight_norm,
        pruned,
    ],
)
def test_layers_whose_weight_is_computed(layer):
    """They are listed and read; they are no obstacle unless it is they that should be edited."""
    adapter = adapt(nn.Sequential(nn.Linear(6, 8), layer(), nn.Linear(8, 1)))
    _, hidden, _ = adapter.layers(X)
    inputs, _ = adapter.capture(X, ["1", "2"])
    np.testing.assert_allclose(inputs["1"].numpy() @ hidden.weight.T + hidden.bias, inputs["2"].numpy(), atol=1e-5)
    assert adapter.head(X).kind == "identity"
    edited = adapter.replace({"2": (np.zeros((1, 8)), np.ones(1))})
    np.testing.assert_array_equal(edited.predict(X), np.ones(300))
    np.testing.assert_array_equal(edited.layers(X)[1].weight, hidden.weight)
    with pytest.raises(ValueError, match="'1' is not a parameter"):
        adapter.replace({"1": (hidden.weight, None)})
    with pytest.raises(ValueError, match="'1' is not a parameter"):
        adapt(nn.Sequential(nn.Linear(6, 8), layer()), output=0).layers(X)


def test_a_layer_of_a_quantile_package_is_not_quantised():
    class QuantileLinear(nn.Linear):
        pass

    class LinearSpread(nn.Identity):
        pass

    QuantileLinear.__module__ = LinearSpread.__module__ = "quantile_nets.layers"
    model = nn.Sequential(nn.Linear(6, 8), QuantileLinear(8, 8), LinearSpread(), nn.Linear(8, 1))
    assert [layer.name for layer in adapt(model).layers(X)] == ["0", "1", "3"]


def test_a_subclass_that_computes_the_same_is_a_linear_layer():
    for dtype in DTYPES:
        model = nn.Sequential(nn.Linear(6, 8), Verbose(8, 8), nn.Linear(8, 1)).to(dtype)
        assert len(adapt(model).layers(X)) == 3


@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(8), lambda: nn.Linear(8, 8, device="meta")])
def test_layers_without_weights(layer):
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(layer()), nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"layer '1\.0'"):
        adapt(model)
    assert isinstance(model[1][0], type(layer()))  # a lazy layer was not initialised by us


def test_no_linear_layer():
    with pytest.raises(ValueError, match=r"no nn\.Linear layer feeds"):
        adapt(Wrapped(lambda self, x: x.mean(dim=1))).layers(X)


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def test_torchscript():
    with pytest.raises(ValueError, match="TorchScript"):
        adapt(scripted(mlp()))


def test_a_scripted_part_of_a_model_is_left_alone():
    part = scripted(nn.Sequential(nn.Linear(6, 6), nn.Dropout()))
    adapter = adapt(nn.Sequential(part, *mlp()).train())
    assert [layer.name for layer in adapter.layers(X)] == ["1", "3", "5"]
    assert adapter.head(X).kind == "identity"
    np.testing.assert_array_equal(adapter.replace({}).predict(X), adapter.predict(X))
    assert part.training


def test_compiled_models_are_looked_through():
    plain = mlp()
    model = torch.compile(plain, backend="eager")
    adapter = adapt(model)
    assert [layer.name for layer in adapter.layers(X)] == ["0", "2", "4"]
    edited = adapter.replace({"4": (np.zeros((1, 8)), np.ones(1))})
    assert type(edited.model) is type(model)
    np.testing.assert_array_equal(edited.model(torch.ones(3, 6)).detach().numpy(), np.ones((3, 1)))
    np.testing.assert_array_equal(model(torch.ones(3, 6)).detach(), plain(torch.ones(3, 6)).detach())


def test_hooks_are_seen_in_submodules_that_are_compiled():
    model = mlp()
    model.compile(backend="eager")
    model(torch.ones(300, 6))  # compiled now, without our hooks
    adapter = adapt(model)
    assert [layer.name for layer in adapter.layers(X)] == ["0", "2", "4"]
    assert adapter.capture(X, ["4"])[0]["4"].shape == (300, 8)


def test_hooks_of_the_user_stay_and_take_part():
    model = mlp()
    seen = []
    model[0].register_forward_hook(lambda m, a, o: seen.append(o.shape))
    model[4].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    model[4].register_forward_hook(lambda m, a, o: 3 * o + 1)
    hooks = [list(m._forward_hooks.items()) + list(m._forward_pre_hooks.items()) for m in model.modules()]
    adapter = adapt(model)
    head = adapter.head(X)
    inputs, prediction = adapter.capture(X, ["4"])
    last = adapter.layers(X)[-1]
    assert (head.kind, head.scale, head.offset) == ("affine", pytest.approx(3), pytest.approx(1))
    z = inputs["4"].double().numpy() @ last.weight.T + last.bias
    np.testing.assert_allclose(head.apply(z).ravel(), prediction.numpy(), rtol=1e-5, atol=1e-5)
    assert hooks == [list(m._forward_hooks.items()) + list(m._forward_pre_hooks.items()) for m in model.modules()]
    before = len(seen)
    model(torch.ones(1, 6))
    assert len(seen) == before + 1


def test_everything_is_put_back_when_the_forward_pass_raises():
    def fail(self, x):
        self.net(x)
        raise RuntimeError("out of luck")

    model = Wrapped(fail, net=mlp(nn.Dropout()))
    model.net[1].eval()
    flags = [m.training for m in model.modules()]
    before = snapshot(model)
    adapter = adapt(model)
    for call in (adapter.layers, adapter.predict, adapter.head, lambda x: adapter.capture(x, ["net.2"])):
        with pytest.raises(RuntimeError, match="out of luck"):
            call(X)
    assert_untouched(model, before, flags)


def test_each_training_flag_is_put_back_and_dropout_is_off():
    model = mlp(nn.Dropout(0.9))
    model.train()
    model[2].eval()
    flags = [m.training for m in model.modules()]
    adapter = adapt(model)
    np.testing.assert_array_equal(adapter.predict(X), adapter.predict(X))
    assert [m.training for m in model.modules()] == flags
    assert [m.training for m in adapter.replace({}).model.modules()] == flags


def test_threads_share_a_module_that_is_left_in_train_mode():
    """Each adapter and each call must see dropout switched off, and no hook of another."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)).train()
    expected = reference(model, None)
    shared = adapt(model)

    def work(i):
        adapter = shared if i % 2 else adapt(model)
        _, prediction = adapter.capture(X, ["3"])
        return np.array_equal(adapter.predict(X), expected) and np.array_equal(prediction.numpy(), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(80)))
    assert all(module.training for module in model.modules())


class Shy(nn.Linear):
    """Gives itself, its weight or the memory of its weight instead of a copy."""

    def __init__(self, shared):
        super().__init__(6, 1)
        self.shared = shared

    def __deepcopy__(self, memo):
        if self.shared == "module":
            return self
        twin = Shy(self.shared)
        twin.weight = self.weight if self.shared == "weight" else nn.Parameter(self.weight.data)
        return twin


@pytest.mark.parametrize("shared", ["module", "weight", "memory"])
def test_a_copy_that_is_none(shared):
    model = nn.Sequential(Shy(shared))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"gives back '0(\.weight)?' itself and no copy"):
        adapt(model).replace({"0": (np.zeros((1, 6)), None)})
    assert torch.equal(model[0].weight, before)


NOT_OF_A_ROW = {
    "dropout that stays on": (lambda self, x: self.net(F.dropout(x, 0.1, training=True)), "same rows"),
    "input noise": (lambda self, x: self.net(x + 0.01 * torch.randn_like(x)), "same rows"),
    "dropout behind the last layer": (lambda self, x: F.dropout(self.net(x), 0.1, training=True), "same rows"),
    "centred in the batch": (lambda self, x: self.net(x - x.mean(dim=0)), "depend on the other rows in the batch"),
    "batch norm without statistics": (
        lambda self, x: self.net(F.batch_norm(x, None, None, training=True)),
        "depend on the other rows in the batch",
    ),
}


@pytest.mark.parametrize("name", NOT_OF_A_ROW)
def test_a_model_that_is_no_function_of_a_row(name):
    forward, said = NOT_OF_A_ROW[name]
    with pytest.raises(ValueError, match=said):
        adapt(Wrapped(forward, net=mlp())).head(X)


def test_an_adapter_can_be_copied_after_use():
    adapter = adapt(two_heads(lambda m, a: (m, a)), output=1)
    expected = adapter.predict(X)
    adapter.head(X)
    np.testing.assert_array_equal(copy.deepcopy(adapter).predict(X), expected)


CONTAINERS = {
    "float32 array": lambda x: x.astype(np.float32),
    "Fortran order": np.asfortranarray,
    "read only": lambda x: np.broadcast_to(x, x.shape),
    "list": np.ndarray.tolist,
    "DataFrame": lambda x: pd.DataFrame(x, columns=list("abcdef")),
    "DataFrame, shuffled index": lambda x: pd.DataFrame(x, index=np.arange(len(x))[::-1]),
    "nullable": lambda x: pd.DataFrame(x).convert_dtypes(),
    "tensor": torch.tensor,
    "float32 tensor": lambda x: torch.tensor(x, dtype=torch.float32, requires_grad=True),
    "sparse": scipy.sparse.csr_array,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_input_of_any_kind(name):
    model = mlp()
    adapter = adapt(model)
    expected = reference(model, None)
    np.testing.assert_allclose(adapter.predict(CONTAINERS[name](X)), expected, atol=1e-6)
    inputs, prediction = adapter.capture(CONTAINERS[name](X), ["4"])
    assert not prediction.requires_grad
    assert not inputs["4"].requires_grad
    np.testing.assert_allclose(prediction.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
def test_integers_become_the_dtype_of_the_model(dtype):
    values = (np.abs(X) * 2).astype(dtype)
    model = mlp()
    expected = adapt(model).predict(values.astype(np.float32))
    np.testing.assert_array_equal(adapt(model).predict(values), expected)
    np.testing.assert_array_equal(adapt(model).predict(torch.as_tensor(values)), expected)


def test_an_embedding_gets_its_integers():
    model = Wrapped(lambda self, x: self.out(self.table(x).mean(dim=1)), table=nn.Embedding(5, 4), out=nn.Linear(4, 1))
    rows = torch.randint(0, 5, (20, 3), generator=torch.Generator().manual_seed(0))
    adapter = adapt(model)
    assert [layer.name for layer in adapter.layers(rows)] == ["out"]
    np.testing.assert_array_equal(adapter.predict(rows), model(rows).detach().numpy().ravel())
    assert adapter.head(rows).kind == "identity"


class Sentences(nn.Module):
    """As a Hugging Face regressor: arguments by name, of which some have defaults, and a dict of results."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)

    def forward(self, input_ids, attention_mask=None, return_dict=True):
        assert input_ids.dtype == attention_mask.dtype == torch.int64
        mask = attention_mask.unsqueeze(-1).to(self.out.weight.dtype)
        pooled = (self.table(input_ids) * mask).sum(dim=1) / mask.sum(dim=1)
        return {"logits": self.out(pooled), "hidden": pooled}


IDS = torch.randint(0, 9, (300, 5), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(5) <= IDS[:, :1] % 5).long()
SEVERAL = {
    "by name": lambda: {"attention_mask": MASK, "input_ids": IDS},
    "another mapping": lambda: collections.UserDict(input_ids=IDS, attention_mask=MASK, return_dict=True),
    "in order": lambda: (IDS, MASK),
    "list": lambda: [IDS, MASK],
    "NumPy": lambda: {"input_ids": IDS.numpy(), "attention_mask": MASK.numpy()},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_inputs(name):
    torch.manual_seed(0)
    model, x = Sentences(), SEVERAL[name]()
    expected = model(IDS, MASK)["logits"].detach().numpy().ravel()
    adapter = adapt(model, output="logits")
    assert row_count(x) == 300
    np.testing.assert_array_equal(adapter.predict(x), expected)
    assert [layer.name for layer in adapter.layers(x)] == ["out"]
    assert adapter.head(x).kind == "identity"
    some = take(x, np.array([3, 1]))
    inputs, prediction = adapter.capture(some, ["out"])
    assert inputs["out"].shape == (2, 4)
    np.testing.assert_allclose(prediction.numpy(), expected[[3, 1]], rtol=1e-6)
    edited = adapter.replace({"out": (np.zeros((1, 4)), np.ones(1))})
    np.testing.assert_array_equal(edited.predict(take(x, slice(7))), np.ones(7))
    np.testing.assert_array_equal(IDS.numpy(), SEVERAL["by name"]()["input_ids"].numpy())


def test_a_mapping_or_tuple_may_be_the_one_input():
    by_name = Wrapped(lambda self, x: self.net(x["a"]) + 0 * x["b"].double().mean(), net=mlp())
    in_order = Wrapped(lambda self, x: self.net(x[0]) + 0 * x[1].double().mean(), net=mlp())
    assert adapt(by_name).predict({"a": X, "b": IDS}).shape == (300,)
    assert adapt(in_order).predict((X, IDS)).shape == (300,)


@pytest.mark.parametrize("rows", [(IDS, None), [IDS, None], {"input_ids": IDS, "attention_mask": None}])
def test_an_optional_input_may_be_none(rows):
    def forward(self, input_ids, attention_mask=None):
        assert attention_mask is None
        return self.out(self.table(input_ids).mean(dim=1))

    model = Wrapped(None, table=nn.Embedding(9, 4), out=nn.Linear(4, 1))
    model.forward = forward.__get__(model)
    adapter = adapt(model)
    assert [layer.name for layer in adapter.layers(rows)] == ["out"]
    assert adapter.predict(rows).shape == (300,)
    fair = ESVDFair(model, target_ks=0.9).fit(rows, sensitive_features=np.arange(300) % 2)
    assert fair.predict(rows).shape == (300,)


def test_several_inputs_of_different_lengths():
    with pytest.raises(ValueError, match=r"different lengths \(input_ids: 300, attention_mask: 299\)"):
        adapt(Sentences(), output="logits").predict({"input_ids": IDS, "attention_mask": MASK[1:]})


def test_a_list_of_rows_is_a_table():
    model = mlp()
    np.testing.assert_array_equal(adapt(model).predict(list(X)), adapt(model).predict(X))


def test_a_column_that_is_no_number_is_named():
    frame = pd.DataFrame(X, columns=list("abcdef")).assign(c="clerk")
    with pytest.raises(ValueError, match="column 'c' is not numeric"):
        adapt(mlp()).predict(frame)


def test_input_is_not_written_to():
    model = Wrapped(lambda self, x: self.net(x.mul_(2).relu_()), net=mlp())
    values = X.astype(np.float32)
    tensor = torch.as_tensor(values.copy())
    adapter = adapt(model)
    for x in (values, tensor):
        adapter.predict(x)
        adapter.capture(x, ["net.0"])
        adapter.head(x)
    np.testing.assert_array_equal(values, X.astype(np.float32))
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_captured_inputs_are_what_the_layer_read():
    """The next operation of this model overwrites what the layer has read."""
    torch.manual_seed(0)
    model = residual_in_place()
    inputs, _ = adapt(model).capture(X, ["block", "out"])
    h = model.stem(torch.tensor(X, dtype=torch.float32)).relu()
    assert torch.equal(inputs["block"], h.detach())
    torch.testing.assert_close(inputs["out"], (h + model.block(h)).detach())


def test_captured_inputs_survive_a_model_that_writes_into_its_own_input():
    model = Wrapped(lambda self, x: self.net(x.mul_(2)) + 0 * x.zero_()[:, :1], net=mlp())
    inputs, prediction = adapt(model).capture(X, ["net.0"])
    np.testing.assert_allclose(inputs["net.0"].numpy(), 2 * X, rtol=1e-6)
    np.testing.assert_array_equal(prediction.numpy(), adapt(model).predict(X))


def test_predict_runs_in_batches():
    sizes = []
    model = Wrapped(lambda self, x: (sizes.append(len(x)), self.net(x))[1], net=mlp())
    many = np.tile(X, (60, 1))
    prediction = adapt(model).predict(many)
    assert prediction.shape == (18_000,)
    assert max(sizes) == PREDICT_ROWS
    assert sum(sizes) == 18_000
    np.testing.assert_allclose(prediction[-300:], adapt(model).predict(X), atol=1e-6)


def test_a_model_that_squeezes_everything_works_on_one_row():
    assert adapt(after(torch.squeeze)).predict(X[:1]).shape == (1,)


@pytest.mark.parametrize(
    ("model", "output", "match"),
    [
        (lambda: nn.Linear(6, 2), None, r"shape \(300, 2\) for 300 rows: more than one output column"),
        (lambda: after(lambda z: z.mean()), None, r"shape \(\) for 300 rows"),
        (lambda: two_heads(lambda m, a: (m, a)), None, "a tuple of 2. Choose"),
        (lambda: two_heads(lambda m, a: {"m": m, "a": a}), None, "a dict with keys 'm', 'a'"),
        (lambda: two_heads(lambda m, a: {"m": m, "a": a}), "b", "'m', 'a'; `output='b'` is not part of it"),
        (lambda: two_heads(lambda m, a: (m, a)), 2, "a tuple of 2; `output=2` is not part of it"),
        (lambda: two_heads(lambda m, a: (m, a)), "m", "`output='m'` is not part of it"),
        (mlp, 0, "returns one tensor. Leave it out"),
        (mlp, lambda result: 3.0, "returns a float, not a tensor"),
        (lambda: two_heads(lambda m, a: None), None, "a NoneType"),
    ],
)
def test_outputs_that_are_no_prediction(model, output, match):
    with pytest.raises(ValueError, match=match):
        adapt(model(), output=output).predict(X)


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (mlp, 6),
        (lambda: nn.Linear(6, 1), 6),
        (lambda: nn.Sequential(mlp()), 6),
        (residual, None),
        (nn.Sequential, None),
    ],
)
def test_n_features(model, width):
    assert adapt(model()).n_features == width


def test_the_probe_runs_once():
    calls = []
    model = Wrapped(lambda self, x: (calls.append(len(x)), self.net(x))[1], net=mlp())
    adapter = adapt(model)
    adapter.layers(X)
    count = len(calls)
    adapter.layers(X)
    assert len(calls) == count == 1
    adapter.head(X)
    assert max(calls) <= 256


class Devices(TorchDispatchMode):
    """Every device on which a result appeared."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {
            t.device.type for t in (result if isinstance(result, tuple) else (result,)) if hasattr(t, "device")
        }
        return result


def cuda_linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))
    layer.bias = nn.Parameter(torch.empty(outputs, device="cuda"))
    return layer


@pytest.mark.parametrize("hidden_transfer", [False, True])
def test_capture_stays_on_the_device(hidden_transfer):
    with FakeTensorMode():
        leak = Wrapped(lambda self, x: (x, x.cpu())[0] if hidden_transfer else x)
        model = nn.Sequential(cuda_linear(6, 8), nn.ReLU(), leak, cuda_linear(8, 1))
        x = torch.empty(10, 6, device="cuda")
        with Devices() as devices:
            inputs, prediction = adapt(model).capture(x, ["0", "3"])
    assert devices.seen == ({"cuda", "cpu"} if hidden_transfer else {"cuda"})  # the second row: the test can fail
    assert {t.device.type for t in (*inputs.values(), prediction)} == {"cuda"}
    assert inputs["3"].shape == (10, 8)
    assert prediction.shape == (10,)


def test_a_repaired_model_can_be_exported():
    model = mlp().eval()
    edited = adapt(model).replace({"4": (np.ones((1, 8)), np.zeros(1))}).model
    rows = torch.as_tensor(X, dtype=torch.float32)
    program = torch.export.export(edited, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    original = torch.export.export(model, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert str(program.graph) == str(original.graph)
    torch.testing.assert_close(program.module()(rows[:7]), edited(rows[:7]))


# --- an intercept that stands beside its layer -----------------------------------------------------------------------


class Beside(nn.Module):
    """A last layer without bias, and a parameter that is added to what it gives."""

    def __init__(self, finish=lambda z: z, shape=(1,), width=1):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, width, bias=False)
        self.other, self.shift, self.finish = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape)), finish

    def forward(self, x):
        return self.finish(self.out(self.body(x * self.other.mean())) + 3 * self.shift - 2 * self.shift)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "identity"),
        ({"shape": ()}, "identity"),
        ({"finish": lambda z: z.squeeze(-1)}, "identity"),
        ({"finish": lambda z: torch.sigmoid(z)}, "sigmoid"),
        ({"finish": lambda z: z[:, 1], "shape": (3,), "width": 3}, "identity"),
    ],
    ids=["a number", "no axis", "squeezed", "sigmoid", "one of three"],
)
def test_a_parameter_that_is_added_to_the_last_layer_is_its_bias(options, kind):
    torch.manual_seed(0)
    model = Beside(**options)
    before = copy.deepcopy(model.state_dict())
    adapter = adapt(model)
    last = adapter.layers(X)[-1]
    assert last.bias == pytest.approx([1.0])
    assert adapter.head(X).kind == kind
    inputs, prediction = adapter.capture(X, ["out"])
    z = inputs["out"].numpy() @ last.weight[0]
    np.testing.assert_allclose(prediction, adapter.head(X).apply(z + 1), atol=1e-5)
    edited = adapter.replace({"out": (2 * last.weight, last.bias + 0.5)})
    np.testing.assert_allclose(edited.predict(X), adapter.head(X).apply(2 * z + 1.5), atol=1e-5)
    assert edited.model.out.bias is None
    assert edited.model.shift.shape == model.shift.shape
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_pickled_adapter_still_knows_the_parameter_that_is_the_bias():
    adapter = adapt(Beside(finish=torch.sigmoid))
    last = adapter.layers(X)[-1]
    again = pickle.loads(pickle.dumps(adapter))
    edited = again.replace({"out": (last.weight, last.bias + 1)})
    np.testing.assert_array_equal(edited.predict(X), adapter.replace({"out": (last.weight, last.bias + 1)}).predict(X))


def test_a_parameter_that_does_more_than_add_is_no_bias():
    class Scaled(Beside):
        def forward(self, x):
            return self.shift * self.out(self.body(x)) + self.shift

    assert adapt(Scaled()).layers(X)[-1].bias is None

    class Inside(Beside):
        def forward(self, x):
            return self.out(self.body(x + self.shift)) + self.shift

    assert adapt(Inside()).layers(X)[-1].bias is None


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint8, np.uint32])
@pytest.mark.parametrize("as_table", [False, True])
def test_whole_numbers_of_numpy_stay_whole_for_an_embedding(as_table, dtype):
    model = Wrapped(lambda self, x: self.out(self.table(x).mean(dim=1)), table=nn.Embedding(5, 4), out=nn.Linear(4, 1))
    rows = np.random.default_rng(0).integers(0, 5, (40, 3))
    expected = model(torch.as_tensor(rows)).detach().numpy().ravel()
    adapter = adapt(model)
    table = pd.DataFrame(rows.astype(dtype)) if as_table else rows.astype(dtype)
    assert [layer.name for layer in adapter.layers(table)] == ["out"]
    np.testing.assert_array_equal(adapter.predict(table), expected)
    assert adapter.head(table).kind == "identity"


def test_a_model_that_makes_its_own_indices_gets_floats_as_before():
    def forward(self, x):
        return self.out(torch.cat([self.table(x[:, 0].long()), self.numbers(x[:, 1:])], dim=1))

    model = Wrapped(forward, table=nn.Embedding(5, 4), numbers=nn.Linear(2, 4), out=nn.Linear(8, 1))
    rows = np.random.default_rng(0).integers(0, 5, (40, 3))
    expected = model(torch.as_tensor(rows, dtype=torch.float32)).detach().numpy().ravel()
    np.testing.assert_array_equal(adapt(model).predict(rows), expected)
