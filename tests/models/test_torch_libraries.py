"""Modules that other libraries make: transformers, peft, Lightning, TabM, pytorch-tabular."""

import copy
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import PowerTransformer
from torch import nn

from esvdfair import Effort, ESVDFair, ks_distance
from esvdfair.models import adapt, fingerprint

X = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)


def check(model, rows, last, *, output=None, kind="identity", tolerance=2e-4):
    """List, capture, replace and head agree with the model, which is left alone; returns the edited one."""
    state = copy.deepcopy(model.state_dict())
    adapter = adapt(model, output=output)
    layer = adapter.layers(rows)[-1]
    assert layer.name == last
    head, before = adapter.head(rows), adapter.predict(rows).astype(np.float64)
    assert head.kind == kind
    inputs, _ = adapter.capture(rows, [last])
    features, bias = inputs[last].double().numpy(), 0.0 if layer.bias is None else layer.bias[0]
    np.testing.assert_allclose(head.apply(features @ layer.weight[0] + bias), before, rtol=tolerance, atol=tolerance)
    weight = np.random.default_rng(1).normal(size=layer.weight.shape)
    edited = adapter.replace({last: (weight, None)})
    expected = head.apply(features @ weight[0] + bias)
    np.testing.assert_allclose(edited.predict(rows), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    assert type(edited.model) is type(model)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    return edited


def decoder(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (dev extra)")
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = transformers.GPT2Config(**sizes, num_labels=1, pad_token_id=0)
        return transformers.GPT2ForSequenceClassification(config)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)


def padded(rows=200):
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(1, 40, (rows, 9)), rng.integers(2, 10, rows)
    keep = np.arange(9) < length[:, None]
    return {"input_ids": torch.tensor(tokens * keep), "attention_mask": torch.tensor(keep.astype(np.int64))}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder_is_read_at_the_last_token_of_each_row(name):
    rows = padded()
    edited = check(decoder(name), rows, "score", output="logits")
    few = {key: value[:7, :4] for key, value in rows.items()}  # batches of another length
    assert edited.predict(few).shape == (7,)


def test_repair_of_a_decoder():
    rows = padded(1000)
    group = np.where(np.random.default_rng(1).random(1000) < 0.5, "a", "b")
    tokens = rows["input_ids"]
    tokens[:] = torch.where(tokens > 0, tokens % 15 + 1 + 20 * torch.tensor(group == "a")[:, None], 0)
    model = decoder("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[20:] += model.score.weight[0]
    before = adapt(model, output="logits").predict(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model that was not trained
        fair = ESVDFair(model, method="parity", output="logits").fit(rows, sensitive_features=group)
    assert [edit.layer for edit in fair.edits_] == ["score"]
    after = fair.predict(rows)
    distances = [ks_distance(values, sensitive_features=group) for values in (before, after)]
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.filterwarnings("ignore")
def test_a_low_rank_update_beside_the_head():
    peft = pytest.importorskip("peft", reason="peft is not installed (dev extra)")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["2"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    prefix = "base_model.model.2"
    check(model, X, f"{prefix}.base_layer + {prefix}.lora_B.default", kind="affine")
    merged = model.merge_and_unload()
    check(merged, X, "2")


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_keeps_working_with_its_trainer(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed (dev extra)")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self(batch[0]).squeeze(1), batch[1])

        def predict_step(self, batch, index):
            return self(batch[0])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(X.sum(axis=1)))
    loader = torch.utils.data.DataLoader(data, batch_size=50)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, enable_checkpointing=False, default_root_dir=tmp_path, **quiet)
    model = Module()
    trainer.fit(model, loader)
    edited = check(model, X, "net.2")
    predicted = torch.cat(trainer.predict(edited.model, loader)).numpy().ravel()
    np.testing.assert_allclose(predicted, edited.predict(X), atol=1e-5)
    again = lightning.Trainer(max_epochs=1, enable_checkpointing=False, default_root_dir=tmp_path, **quiet)
    again.fit(edited.model, loader)  # it can still be trained
    with pytest.raises(TypeError, match="its attribute lightning_module"):
        adapt(trainer)


class Members(nn.Module):
    """As TabM is made: one body, members that scale what it gives, and a product with bare parameters."""

    def __init__(self, product, bias=True, members=4, outputs=1):
        super().__init__()
        self.body, self.product = nn.Linear(6, 8), product
        self.scale = nn.Parameter(torch.randn(members, 8))
        self.head = nn.Parameter(torch.randn(members, 8, outputs))
        self.shift = nn.Parameter(torch.randn(members, outputs)) if bias else None

    def forward(self, x):
        z = self.product(self.body(x).relu()[:, None] * self.scale, self.head)
        return z if self.shift is None else z + self.shift


def mean(result):
    return result.mean(dim=1)


PRODUCTS = {
    "einsum": lambda: Members(lambda h, w: torch.einsum("bki,kio->bko", h, w)),
    "without bias": lambda: Members(lambda h, w: torch.einsum("bki,kio->bko", h, w), bias=False),
    "weight first": lambda: Members(lambda h, w: torch.einsum("k i o, b k i -> b k o", w, h)),
    "matmul": lambda: Members(lambda h, w: (h.transpose(0, 1) @ w).transpose(0, 1)),
    "bmm": lambda: Members(lambda h, w: torch.bmm(h.transpose(0, 1), w).transpose(0, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_members_of_bare_parameters_are_one_layer(name):
    torch.manual_seed(0)
    model = PRODUCTS[name]()
    edited = check(model, X, "head", output=mean)
    assert [layer.name for layer in adapt(model, output=mean).layers(X)] == ["body", "head"]
    state = edited.model.state_dict()
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, state[key])]
    assert changed == ["head"]
    if name != "without bias":
        adapter = adapt(model, output=mean)
        last = adapter.layers(X)[-1]
        shifted = adapter.replace({"head": (last.weight, last.bias + 0.5)})
        torch.testing.assert_close(shifted.model.shift, model.shift + 0.5)
        np.testing.assert_allclose(shifted.predict(X), adapter.predict(X) + 0.5, atol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 3)])
def test_a_product_with_a_vector_or_a_matrix_is_a_layer(shape):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.w, self.c = (
                nn.Linear(6, 8),
                nn.Parameter(torch.randn(shape)),
                nn.Parameter(torch.ones(shape[1:])),
            )

        def forward(self, x):
            return (self.body(x).relu() @ self.w + self.c).reshape(len(x), -1)

    torch.manual_seed(0)
    check(Bare(), X, "w", output=None if shape[1:] != (3,) else 1)


def test_products_before_the_last_layer_or_beside_it_are_no_layers():
    class Pooled(nn.Module):
        """Attention: a learned query chooses among positions."""

        def __init__(self):
            super().__init__()
            self.query, self.head = nn.Parameter(torch.randn(2, 1)), nn.Linear(2, 1)

        def forward(self, x):
            h = x.reshape(-1, 3, 2)
            return ((h @ self.query).softmax(dim=1) * self.head(h)).sum(dim=1)

    torch.manual_seed(0)
    model = Pooled()
    assert [layer.name for layer in adapt(model).layers(X)] == ["head"]
    check(model, X, "head")


class TabularModel:
    """What `models.adapt` uses of pytorch_tabular's class of that name, which needs an older pandas."""

    def __init__(self, network, target=("y",), transformer=None):
        self.model, self.datamodule, self.is_fitted = network, self, network is not None
        self.config = type("Config", (), {"task": "regression", "target": list(target)})
        self.do_target_transform, self.target_transforms = transformer is not None, [transformer]

    def prepare_inference_dataloader(self, table, batch_size):
        columns = torch.tensor(table[["a", "b"]].to_numpy()).float(), torch.tensor((table["kind"] == "x").to_numpy())
        yield {"target": torch.zeros(batch_size), "continuous": columns[0], "categorical": columns[1].long()[:, None]}

    def predict(self, table):
        (batch,) = self.prepare_inference_dataloader(table, len(table))
        found = self.model(batch)["logits"].detach().numpy()
        return (self.target_transforms[0].inverse_transform(found) if self.do_target_transform else found)[:, 0]


TabularModel.__module__ = "pytorch_tabular.tabular_model"


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.hparams, self.kinds = {}, nn.Embedding(2, 3)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return {"logits": self.net(torch.cat([x["continuous"], self.kinds(x["categorical"][:, 0])], 1))}


@pytest.mark.filterwarnings("ignore:.*keeps .* of the variance")
@pytest.mark.parametrize("transformer", [None, PowerTransformer()])
def test_a_tabular_model_goes_in_and_comes_out(transformer):
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 1500)
    table = pd.DataFrame({"a": rng.normal(size=1500) + group, "b": rng.normal(size=1500)})
    table["kind"] = np.where(rng.random(1500) < 0.5, "x", "y")
    torch.manual_seed(0)
    model = TabularModel(Logits(), transformer=transformer)
    y = np.exp((table["a"] + table["b"] + (table["kind"] == "x")) / 3).to_numpy()
    target = torch.tensor(y[:, None] if transformer is None else transformer.fit_transform(y[:, None])).float()
    (batch,) = model.prepare_inference_dataloader(table, 1500)
    optimizer = torch.optim.Adam(model.model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(model.model(batch)["logits"], target).backward()
        optimizer.step()
    before, content = model.predict(table), fingerprint(model)
    np.testing.assert_allclose(adapt(model).predict(table), before, rtol=1e-5)
    fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick()).fit(table, y, sensitive_features=group)
    assert (type(fair.estimator_), [edit.layer for edit in fair.edits_]) == (TabularModel, ["net.2"])
    np.testing.assert_array_equal(model.predict(table), before)
    assert fingerprint(model) == content != fingerprint(fair.estimator_)
    after = fair.predict(table)
    np.testing.assert_allclose(fair.estimator_.predict(table), after, rtol=1e-5)
    assert ks_distance(after, sensitive_features=group) < 0.5 * ks_distance(before, sensitive_features=group)


def test_a_tabular_model_that_cannot_be_repaired_is_named():
    with pytest.raises(ValueError, match=r"TabularModel is not fitted\. Call its fit"):
        adapt(TabularModel(None))
    with pytest.raises(TypeError, match="2 targets"):
        adapt(TabularModel(Logits(), target=("y", "z")))


def test_repair_of_tabm():
    tabm = pytest.importorskip("tabm", reason="tabm is not installed (pip install tabm)")
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 2000)
    rows = rng.normal(size=(2000, 6)).astype(np.float32)
    rows[:, 0] += group
    y = rows @ [1, 1, -1, 0, 0.5, 0]
    torch.manual_seed(0)
    model = tabm.TabM.make(n_num_features=6, d_out=1, k=8, n_blocks=1, d_block=16, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        ((model(torch.tensor(rows))[:, :, 0] - torch.tensor(y[:, None])) ** 2).mean().backward()
        optimizer.step()
    fair = ESVDFair(model, output=mean, target_ks=0.15, random_state=0).fit(rows, y, sensitive_features=group)
    assert [edit.layer for edit in fair.edits_] == ["output.weight"]
    after = mean(fair.estimator_(torch.tensor(rows))).detach().numpy().ravel()
    np.testing.assert_allclose(after, fair.predict(rows), atol=1e-6)
    assert ks_distance(after, sensitive_features=group) < 0.17 < fair.summary_["ks_before"]
    assert fair.summary_["r2_after"] > 0.5
