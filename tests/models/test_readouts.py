"""Predictions that are read off several layers, or several positions, as one number: repaired as one wide layer."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from esvdfair import ESVDFair, Summary, ks_distance, summarise
from esvdfair.models import adapt
from esvdfair.models.readouts import LinearLayer, Part, Readout

X = np.random.default_rng(0).normal(size=(300, 6))


class Wrapped(nn.Module):
    """A model whose forward pass is any function of itself and x."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def mlp(bias=True, outputs=1):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs, bias=bias))


def ensemble(finish=lambda z: z, bias=True):
    nets = nn.ModuleList([mlp(bias) for _ in range(3)])
    return Wrapped(lambda self, x: finish(torch.stack([net(x) for net in self.nets]).mean(dim=0)), nets=nets)


def wide_and_deep(combine=lambda wide, deep: wide + deep):
    return Wrapped(lambda self, x: combine(self.wide(x), self.deep(x)), deep=mlp(), wide=nn.Linear(6, 1, bias=False))


def low_rank():
    def forward(self, x):
        h = self.body(x).relu()
        return self.base(h) + 2 * self.up(self.down(h))

    parts = {"down": nn.Linear(8, 2, bias=False), "up": nn.Linear(2, 1, bias=False)}
    return Wrapped(forward, body=nn.Linear(6, 8), base=nn.Linear(8, 1), **parts)


def additive():
    def forward(self, x):
        return sum(net(x[:, [i]]) for i, net in enumerate(self.nets))

    return Wrapped(
        forward, nets=nn.ModuleList([nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in X.T])
    )


@torch.inference_mode()
def without_gradients(self, x):
    return 0.3 * self.wide(x) - 0.7 * self.deep(x)


def over_time(pool, outputs=1):
    def forward(self, x):
        return pool(self.out(self.rnn(x.reshape(-1, 3, 2))[0]), x)

    return Wrapped(forward, rnn=nn.GRU(2, 5, batch_first=True), out=nn.Linear(5, outputs))


def last_valid(z, x):
    """As decoders do: one position, which depends on the input."""
    return z[torch.arange(len(z)), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()]


# name: (model, last layer, its inputs, kind of head)
SUMS = {
    "mean of an ensemble": (ensemble, "nets.0.2 + nets.1.2 + nets.2.2", 24, "affine"),
    "without biases": (lambda: ensemble(bias=False), "nets.0.2 + nets.1.2 + nets.2.2", 24, "affine"),
    "mean of logits": (lambda: ensemble(torch.sigmoid), "nets.0.2 + nets.1.2 + nets.2.2", 24, "sigmoid"),
    "wide and deep": (wide_and_deep, "wide + deep.2", 14, "identity"),
    "weighted": (lambda: wide_and_deep(lambda w, d: (0.37 * d - 1.234 * w + 1).exp()), "wide + deep.2", 14, "exp"),
    "clamped": (lambda: wide_and_deep(lambda w, d: (w + d).clamp(-0.5, 0.5)), "wide + deep.2", 14, "monotone"),
    "no gradients": (
        lambda: Wrapped(without_gradients, wide=nn.Linear(6, 1), deep=mlp()), "wide + deep.2", 14, "affine",
    ),
    "low-rank update": (low_rank, "base + up", 10, "affine"),
    "additive model": (additive, " + ".join(f"nets.{i}.2" for i in range(6)), 24, "identity"),
    "mean of columns": (
        lambda: Wrapped(lambda self, x: self.net(x).mean(dim=1), net=mlp(outputs=5)), "net.2", 8, "affine",
    ),
    "one token": (lambda: Wrapped(lambda self, x: self.net(x[:, None]), net=mlp()), "net.2", 8, "identity"),
    "last position": (lambda: over_time(lambda z, x: z[:, -1]), "out", 5, "identity"),
    "mean over positions": (lambda: over_time(lambda z, x: z.mean(dim=1)), "out", 5, "identity"),
    "relu of a mean": (lambda: over_time(lambda z, x: z.mean(dim=1).relu()), "out", 5, "monotone"),
    "position by the input": (lambda: over_time(last_valid), "out", 5, "identity"),
    "difference of two columns": (lambda: over_time(lambda z, x: z[:, -1, 1] - z[:, -1, 0], 2), "out", 5, "identity"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_one_wide_layer(name):
    build, layer, width, kind = SUMS[name]
    torch.manual_seed(0)
    model = build()
    state, adapter = copy.deepcopy(model.state_dict()), adapt(model)
    before, last, head = adapter.predict(X), adapter.layers(X)[-1], adapter.head(X)
    assert (last.name, last.weight.shape, head.kind) == (layer, (1, width), kind)
    features = adapter.capture(X, [layer])[0][layer].double().numpy()
    bias = 0.0 if last.bias is None else last.bias[0]
    np.testing.assert_allclose(head.apply(features @ last.weight[0] + bias), before, rtol=2e-4, atol=2e-6)

    weight = np.random.default_rng(1).normal(size=(1, width))
    edited = adapter.replace({layer: (weight, None if last.bias is None else last.bias + 0.3)})
    expected = head.apply(features @ weight[0] + (bias + 0.3 if last.bias is not None else 0.0))
    np.testing.assert_allclose(edited.predict(X), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    np.testing.assert_allclose(edited.layers(X)[-1].weight, weight, atol=1e-5)
    same = copy.deepcopy(adapter).replace({layer: (last.weight, last.bias)})
    np.testing.assert_allclose(same.predict(X), before, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    changed = {key for key, value in edited.model.state_dict().items() if not torch.equal(state[key], value)}
    assert changed <= {f"{part}.{kind}" for part in layer.split(" + ") for kind in ("weight", "bias")}


def test_biases_of_an_ensemble_change_alike():
    torch.manual_seed(0)
    model = ensemble()
    adapter = adapt(model)
    last = adapter.layers(X)[-1]
    edited = adapter.replace({last.name: (last.weight, last.bias + 3)}).model
    for old, new in zip(model.nets, edited.nets, strict=True):
        torch.testing.assert_close(new[2].bias, old[2].bias + 1)


NO_SUM = {
    "a gate": (lambda self, x: self.wide(x) * torch.sigmoid(self.deep(x)), "'sigmoid', 'mul' brings in another branch"),
    "the larger": (lambda self, x: torch.maximum(self.wide(x), self.deep(x)), "'maximum' brings in another branch"),
    "a skip connection": (lambda self, x: self.wide(x) + self.deep(x) * x[:, :1], "'mul' brings in another branch"),
    "an exposure": (lambda self, x: self.deep(x) * x[:, :1].exp(), r"'mul' multiplies .* Divide y by it"),
    "an offset of a relu": (lambda self, x: (self.deep(x) + x[:, :1]).relu(), "'add' brings in another branch"),
}


@pytest.mark.parametrize("name", NO_SUM)
def test_what_is_no_sum_is_named(name):
    forward, said = NO_SUM[name]
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=said):
        adapt(Wrapped(forward, deep=mlp(), wide=nn.Linear(6, 1))).head(X)


def with_offset(finish, bias=True, outputs=1):
    return Wrapped(lambda self, x: finish(self.net(x[:, :6]), x[:, 6:]), net=mlp(bias, outputs))


# name: (model, kind of head, offset of a row by the last column of X)
OFFSETS = {
    "offset": (lambda: with_offset(lambda z, o: z + o), "identity", lambda o: o),
    "scaled": (lambda: with_offset(lambda z, o: 2 - 3 * (z + o)), "affine", lambda o: o - 2 / 3),
    "exposure": (lambda: with_offset(lambda z, e: z.exp() * (1 + e**2)), "exp", lambda e: np.log1p(e**2)),
    "logarithm of it": (lambda: with_offset(lambda z, o: (z + o).exp()), "exp", lambda o: o),
    "less one": (lambda: with_offset(lambda z, o: torch.expm1(z / 2 + o)), "exp", lambda o: 2 * o),
    "of a logit": (lambda: with_offset(lambda z, o: torch.sigmoid(z + 2 * o)), "sigmoid", lambda o: 2 * o),
    "of a softplus": (lambda: with_offset(lambda z, o: nn.functional.softplus(z - o)), "softplus", lambda o: -o),
    "without bias": (lambda: with_offset(lambda z, o: z + o, bias=False), "identity", lambda o: o),
    "mean of columns": (lambda: with_offset(lambda z, o: z.mean(1) + o[:, 0], outputs=3), "affine", lambda o: 3 * o),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_an_offset_is_a_feature_whose_weight_stays(name):
    build, kind, offset = OFFSETS[name]
    torch.manual_seed(0)
    model, X = build(), np.random.default_rng(0).normal(size=(300, 7))
    adapter, fresh = adapt(model), np.random.default_rng(1).normal(size=(50, 7))
    last, head = adapter.layers(X)[-1], adapter.head(X)
    assert (last.name, last.weight.shape, last.weight[0, -1], last.offset) == ("net.2", (1, 9), 1, True)
    assert (head.kind, head.offset) == (kind, pytest.approx(-1 if name == "less one" else 0, abs=1e-6))
    features = adapter.capture(fresh, ["net.2"])[0]["net.2"].double().numpy()
    np.testing.assert_allclose(features[:, -1], offset(fresh[:, 6]), rtol=1e-4, atol=1e-4)
    bias = None if last.bias is None else last.bias + 0.3
    weight = np.append(np.random.default_rng(1).normal(size=8), 1.0)[None]
    edited = adapter.replace({"net.2": (weight, bias)}).predict(fresh)
    expected = head.apply(features @ weight[0] + (0 if bias is None else bias))
    np.testing.assert_allclose(edited, expected, rtol=2e-4, atol=2e-5)


def test_the_largest_of_several_positions_is_no_sum():
    with pytest.raises(ValueError, match="'amax' makes one prediction a row of them, which is no weighted sum"):
        adapt(over_time(lambda z, x: z.amax(dim=1))).head(X)


def test_of_two_layers_of_which_one_feeds_the_other_the_first_is_an_offset():
    def forward(self, x):
        h = self.a(x)
        return self.b(h.relu()) + h.mean(dim=1, keepdim=True)

    model = Wrapped(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 1))
    adapter = adapt(model)
    assert [layer.offset for layer in adapter.layers(X)] == [False, True]
    features = adapter.capture(X, ["b"])[0]["b"][:, -1]
    torch.testing.assert_close(features, model.a(torch.tensor(X).float()).mean(dim=1), atol=1e-5, rtol=1e-5)


def people(rows=3000, seed=1):
    rng = np.random.default_rng(seed)
    group = rng.choice(["x", "y"], size=rows)
    X = rng.normal(size=(rows, 6)).astype(np.float32)
    X[:, 0] += group == "x"
    return X, X @ [1, 1, -1, 0, 0.5, 0] + 0.3 * rng.normal(size=rows), group


def trained(build, rows, y):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, t = torch.tensor(rows), torch.tensor(y, dtype=torch.float32)
    for _ in range(120):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).reshape(-1), t).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("name", ["mean of an ensemble", "wide and deep", "position by the input"])
def test_repair(name):
    """Also by way of summaries of two parts, which are written to a file, and by a hidden layer."""
    rows, y, group = people()
    model = trained(SUMS[name][0], rows, y)
    options = {"target_ks": 0.15, "random_state": 0}
    fair = ESVDFair(model, **options).fit(rows, y, sensitive_features=group)
    assert type(fair.estimator_) is Wrapped
    assert {edit.layer for edit in fair.edits_} == {SUMS[name][1]}
    assert fair.summary_["ks_after"] < 0.6 * fair.summary_["ks_before"]
    fresh, _, groups = people(seed=2)
    assert ks_distance(fair.predict(fresh), sensitive_features=groups) < 0.2
    np.testing.assert_array_equal(fair.estimator_(torch.tensor(fresh)).detach().numpy().ravel(), fair.predict(fresh))


def insured(seed):
    """Claims of people who were insured for a time e, the last column; one group a little longer than the other."""
    X, y, group = people(seed=seed)
    e = np.random.default_rng(seed).uniform(0.5, 1.5, len(X)) * np.where(group == "x", 1.1, 1)
    return np.column_stack([X, np.log(e)]).astype(np.float32), np.exp(0.3 * y) * e, group


@pytest.mark.parametrize("name", ["offset", "exposure"])
def test_repair_beside_an_offset(name, tmp_path):
    """Fresh rows meet the target, at an error near that of a network in which the weight of the offset is free."""
    X, y, group = insured(1)
    fresh, truth, groups = insured(2)
    if name == "offset":
        y, truth = np.log(y), np.log(truth)
    finish = {"offset": lambda z, o: z + o, "exposure": lambda z, o: z.exp() * o.exp()}[name]
    model = trained(lambda: with_offset(finish), X, y)
    own = nn.Linear(1, 1, bias=False)
    own.weight.data[:] = 1
    free = Wrapped(
        lambda self, x: finish(self.net(x[:, :6]) + self.own(x[:, 6:]), 0 * x[:, 6:]), net=model.net, own=own
    )
    errors, fits = [], []
    for each in (model, free):
        fair = ESVDFair(each, target_ks=0.15, random_state=0).fit(X, y, sensitive_features=group)
        after = fair.estimator_(torch.tensor(fresh)).detach().numpy().ravel()
        np.testing.assert_array_equal(after, fair.predict(fresh))
        assert ks_distance(after, sensitive_features=groups) < 0.17
        errors.append(np.mean((after - truth) ** 2))
        fits.append(fair)
    assert errors[0] < 1.1 * errors[1] < 0.8 * np.var(truth)
    assert fits[0].edits_[0].weight_after[0, -1] == pytest.approx(1, abs=1e-12)
    parts = [
        summarise(model, X[i::2], y[i::2], sensitive_features=group[i::2], row_id=np.arange(len(X))[i::2])
        for i in (0, 1)
    ]
    (parts[0] + parts[1]).save(tmp_path / "s")
    again = ESVDFair(model, target_ks=0.15, random_state=0).fit_summary(Summary.load(tmp_path / "s"))
    np.testing.assert_allclose(again.predict(fresh), fits[0].predict(fresh), rtol=1e-3, atol=1e-5)
    for options in ({"method": "parity"}, {"method": "exact"}, {"rescale": True}):
        with pytest.raises(ValueError, match=r"adds an offset.*Use `method='transport'`, without `rescale`"):
            ESVDFair(model, **options).fit(X, y, sensitive_features=group)


def test_summaries_of_parts_and_files(tmp_path):
    rows, _, group = people(6000)
    torch.manual_seed(0)
    model = wide_and_deep(lambda w, d: 0.37 * d - 1.234 * w)
    with torch.no_grad():
        model.wide.weight[0, 0] = 3
    y = adapt(model).predict(rows).astype(float) + np.random.default_rng(0).normal(size=len(rows))
    parts = [summarise(model, rows[i::2], y[i::2], sensitive_features=group[i::2], part=str(i)) for i in (0, 1)]
    (parts[0] + parts[1]).save(tmp_path / "s")
    fair = ESVDFair(model, method="parity").fit_summary(Summary.load(tmp_path / "s"))
    assert {edit.layer for edit in fair.edits_} == {"wide + deep.2"}
    other = summarise(wide_and_deep(), rows, y, sensitive_features=group)
    with pytest.raises(ValueError, match="different models"):
        parts[0] + other


def test_a_readout_splits_what_it_joins():
    rng = np.random.default_rng(0)
    layers = [
        LinearLayer(n, i, rng.normal(size=(3, k)), rng.normal(size=3)) for i, (n, k) in enumerate([("a", 2), ("b", 4)])
    ]
    readout = Readout((Part("a", (0, 2), (0.5, -1.0)), Part("b", (1,), (2.0,))))
    joint = readout.layer(layers)
    np.testing.assert_allclose(joint.weight[0, :2], 0.5 * layers[0].weight[0] - layers[0].weight[2])
    np.testing.assert_allclose(joint.bias[0], 0.5 * layers[0].bias[0] - layers[0].bias[2] + 2 * layers[1].bias[1])
    weight, bias = rng.normal(size=(1, 6)), rng.normal(size=1)
    new = readout.split(layers, weight, bias)
    np.testing.assert_array_equal(new["a"][0][1:], layers[0].weight[1:])  # what lowers the prediction stays
    after = [LinearLayer(layer.name, layer.index, *new[layer.name]) for layer in layers]
    np.testing.assert_allclose(readout.layer(after).weight, weight)
    np.testing.assert_allclose(readout.layer(after).bias, bias)
    assert readout.same_as(
        Readout(tuple(Part(p.layer, p.outputs, tuple(f + 1e-9 for f in p.factors)) for p in readout.parts))
    )
    assert not readout.same_as(Readout(readout.parts[:1]))
