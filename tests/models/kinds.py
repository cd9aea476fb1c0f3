"""Kinds of models that people have: one list, which the test repairs and ``docs/models.md`` shows.

PYTHONPATH=src python -m tests.models.kinds        # write the tables of docs/models.md anew
"""

import copy
import pickle
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.models import adapt, fingerprint

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
START, END = "<!-- {}: made by python -m tests.models.kinds -->", "<!-- end of {} -->"

SCIKIT_LEARN = """
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.cross_decomposition import PLSRegression
from sklearn.ensemble import *
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import *
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import *
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR
"""


@dataclass(frozen=True)
class Kind:
    """A model: how it is passed, an expression; what comes back; the layer that is changed."""

    given: str
    back: str
    changed: str
    y: str = "numbers"  # "labels": 0 and 1; "counts": positive
    needs: str = "sklearn"
    code: str = SCIKIT_LEARN
    fits: bool = True  # else `given` is a model that is trained elsewhere
    rows: str = "X"  # what is passed as `X`, an expression
    output: str = "None"  # and as `output`
    table: str = "kinds"

    @property
    def name(self) -> str:
        return self.given


def linear(given: str, **more: str) -> Kind:
    return Kind(given, given.partition("(")[0], "coef_", **more)


TORCH = """
import torch
from torch import nn
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
"""

NETWORKS = (
    TORCH
    + """
other = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def trained(model, rows=None, output=None, rate=0.03, steps=40):
    rows, score = inputs(X) if rows is None else rows, torch.tensor(y).float()
    given, named = ((), rows) if hasattr(rows, "keys") else (rows if isinstance(rows, tuple) else (rows,), {})
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        found = model(*given, **named)
        found = output(found) if callable(output) else found[output] if output else found
        (found.reshape(len(score), -1).squeeze(1) - score).square().mean().backward()
        optimizer.step()
    return model.eval()

def inputs(X):
    return torch.as_tensor(X).float()

def exposed(X):
    return inputs(X), inputs(X[:, 3:]).exp()

def words(X):
    ids = torch.bucketize(inputs(X).clamp(-2, 2), torch.linspace(-2, 2, 7)) + 8 * torch.arange(4) + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

def mean(result):
    return result.mean(1)

class Ensemble(nn.Module):
    def __init__(self, *members):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        return torch.stack([member(x) for member in self.members]).mean(0)

class WideAndDeep(nn.Module):
    def __init__(self, wide, deep):
        super().__init__()
        self.wide, self.deep = wide, deep

    def forward(self, x):
        return self.wide(x) + self.deep(x)

class WithOffset(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, exposure):
        return self.network(x) + exposure.log()

class WithExposure(WithOffset):
    def forward(self, x, exposure):
        return self.network(x).exp() * exposure

class Members(nn.Module):
    def __init__(self, members=4):
        super().__init__()
        self.body, self.scale = nn.Linear(4, 8), nn.Parameter(torch.randn(members, 8))
        self.head = nn.Parameter(torch.randn(members, 8, 1) / 8)

    def forward(self, x):
        return torch.einsum("bki,kio->bko", self.body(x).relu()[:, None] * self.scale, self.head)

class LastStep(nn.Module):
    def __init__(self, pooled=lambda steps: steps[:, -1]):
        super().__init__()
        self.rnn, self.head, self.pooled = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1), pooled

    def forward(self, x):
        return self.pooled(self.head(self.rnn(x[:, :, None])[0]))

class MeanOverSteps(LastStep):
    def forward(self, x):
        return self.head(self.rnn(x[:, :, None])[0]).mean(1)

class Sine(nn.Module):
    def forward(self, z):
        return z.sin()

class Largest(nn.Module):
    def forward(self, z):
        return z.max(1).values

class OneStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x[:, None]).relu())
"""
)

TRANSFORMERS = (
    NETWORKS
    + """
import transformers
from transformers import BertForSequenceClassification, GPT2ForSequenceClassification, LlamaForSequenceClassification
transformers.logging.set_verbosity_error()
text = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "num_labels": 1}
bert = transformers.BertConfig(**text, intermediate_size=16, max_position_embeddings=4)
gpt2 = transformers.GPT2Config(**text, n_positions=4, pad_token_id=0)
llama = transformers.LlamaConfig(**text, intermediate_size=16, pad_token_id=0)
"""
)

LIGHTNING = (
    NETWORKS
    + """
import pytorch_lightning

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self(batch[0])[:, 0], batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.03)

    def predict_step(self, batch, index):
        return self(batch[0])

quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = pytorch_lightning.Trainer(max_epochs=5, accelerator="cpu", **quiet)

def fitted(module):
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(y))
    trainer.fit(module, torch.utils.data.DataLoader(data, 100))
    return module
"""
)

PEFT = NETWORKS + "import peft\n"
TABULAR = """
import logging
import pandas
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
logging.disable(logging.ERROR)
data = DataConfig(target=["y"], continuous_cols=list("abcd"))
mlp = CategoryEmbeddingModelConfig("regression", layers="16", learning_rate=0.03)
quiet = {"progress_bar": "none", "load_best": False, "checkpoints": None, "early_stopping": None}
trainer = TrainerConfig(max_epochs=5, batch_size=100, accelerator="cpu", **quiet)
configs = {"data_config": data, "model_config": mlp, "optimizer_config": OptimizerConfig(), "trainer_config": trainer}

def table(X):
    return pandas.DataFrame(X, columns=list("abcd"))

def fitted(model):
    model.fit(table(X).assign(y=y), seed=0)
    return model
"""
TABM = NETWORKS + "import tabm\n"

KERAS = """
import os
from unittest import mock
os.environ["KERAS_BACKEND"] = "torch"
import keras
from keras.layers import Dense
keras.utils.set_random_seed(0)
x = keras.Input((4,))

@keras.saving.register_keras_serializable()
class Own(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.hidden, self.out = Dense(8, activation="relu"), Dense(1, name="out")

    def call(self, x):
        return self.out(self.hidden(x))

def on_jax(model):
    mock.patch("keras.config.backend", return_value="jax").start()
    return model

def fitted(model):
    model.compile(optimizer=keras.optimizers.Adam(0.03), loss="mse")
    model.fit(X, y, epochs=3, batch_size=100, verbose=0)
    return model
"""

ONNX = (
    SCIKIT_LEARN
    + TORCH
    + """
import io, tempfile
import onnx, onnxruntime, onnxruntime.quantization
from onnxruntime.transformers.float16 import convert_float_to_float16
from skl2onnx import to_onnx

steps = torch.optim.Adam(network.parameters(), lr=0.03)
for _ in range(60):
    steps.zero_grad()
    (network(torch.tensor(X).float())[:, 0] - torch.tensor(y)).square().mean().backward()
    steps.step()

def from_torch(network):
    file = io.BytesIO()
    rows = {"input_names": ["x"], "dynamic_axes": {"x": {0: "rows"}}}
    torch.onnx.export(network, (torch.zeros(2, 4),), file, dynamo=False, **rows)
    return file.getvalue()

def from_sklearn(model):
    options = {"zipmap": False} if hasattr(model, "predict_proba") else None
    return to_onnx(model.fit(X, y), X[:1], options=options).SerializeToString()

def in_float16(model):
    return convert_float_to_float16(onnx.load_from_string(model), keep_io_types=True).SerializeToString()

def out_of_order(model):
    found = onnx.load_from_string(model)
    nodes = [*found.graph.node][::-1]
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found.SerializeToString()

def fused(model):
    options, path = onnxruntime.SessionOptions(), tempfile.mkdtemp() + "/fused.onnx"
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = path, 3
    onnxruntime.InferenceSession(model, options)
    return open(path, "rb").read()

def quantised(model):
    path = tempfile.mkdtemp() + "/model.onnx"
    onnx.save(onnx.load_from_string(model), path)
    onnxruntime.quantization.quantize_dynamic(path, path)
    return open(path, "rb").read()
"""
)


def onnx(given: str, changed: str, **more: str) -> Kind:
    return Kind(given, "bytes", changed, needs="onnxruntime", code=ONNX, fits=False, table="onnx", **more)


def network(
    given: str, changed: str, *, back: str = "", needs: str = "torch", code: str = NETWORKS, **more: str
) -> Kind:
    back = back or given.removeprefix("trained(").removeprefix("fitted(").partition("(")[0].rpartition(".")[2]
    return Kind(given, back, changed, needs=needs, code=code, fits=False, table="networks", **more)


KINDS = [
    *map(linear, [
        "LinearRegression()", "LinearRegression(positive=True)", "Ridge()", "Lasso(alpha=0.01)",
        "Lasso(alpha=0.01, positive=True)", "ElasticNet(alpha=0.01)", "ElasticNet(alpha=0.01, positive=True)", "Lars()",
        "LassoLars(alpha=0.01)", "OrthogonalMatchingPursuit(n_nonzero_coefs=3)", "BayesianRidge()", "ARDRegression()",
        "HuberRegressor()", "TheilSenRegressor(random_state=0)", "QuantileRegressor(alpha=0)",
        "SGDRegressor(random_state=0)", "PassiveAggressiveRegressor(C=0.01, random_state=0)",
        "LinearSVR(random_state=0)", "PLSRegression(n_components=2)",
    ]),
    *(linear(given, y="counts") for given in ["PoissonRegressor()", "GammaRegressor()", "TweedieRegressor(power=1.5)"]),
    *(linear(given, y="labels") for given in [
        "LogisticRegression()", "SGDClassifier(loss='log_loss', random_state=0)", "RidgeClassifier()",
    ]),
    Kind("MLPRegressor(hidden_layer_sizes=(8,), max_iter=80, random_state=0)", "MLPRegressor", "coefs_[1]"),
    Kind("MLPClassifier(hidden_layer_sizes=(8,), max_iter=80, random_state=0)", "MLPClassifier", "coefs_[1]",
         y="labels"),
    Kind("make_pipeline(StandardScaler(), Ridge())", "Pipeline", "coef_"),
    Kind("TransformedTargetRegressor(Ridge(), transformer=StandardScaler())", "TransformedTargetRegressor", "coef_"),
    Kind("TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1)", "TransformedTargetRegressor",
         "coef_", y="counts"),
    Kind("TransformedTargetRegressor(Ridge(), transformer=PowerTransformer())", "TransformedTargetRegressor", "coef_",
         y="counts"),
    Kind("TransformedTargetRegressor(Ridge(), transformer=PowerTransformer('box-cox'))", "TransformedTargetRegressor",
         "coef_", y="counts"),
    Kind("TransformedTargetRegressor(Ridge(), transformer=QuantileTransformer(n_quantiles=50))",
         "TransformedTargetRegressor", "coef_"),
    Kind("TransformedTargetRegressor(Ridge(), transformer=MinMaxScaler())", "TransformedTargetRegressor", "coef_"),
    Kind("GridSearchCV(Ridge(), {'alpha': [0.1, 1]})", "GridSearchCV", "coef_"),
    Kind("FrozenEstimator(Ridge().fit(X, y))", "FrozenEstimator", "coef_"),
    Kind("RANSACRegressor(random_state=0)", "RANSACRegressor", "coef_"),
    Kind("VotingRegressor([('a', Ridge()), ('b', Lasso(alpha=0.01))])", "VotingRegressor",
         "estimators_[0].coef_ + estimators_[1].coef_"),
    Kind("BaggingRegressor(Ridge(), n_estimators=2, random_state=0)", "BaggingRegressor",
         "estimators_[0].coef_ + estimators_[1].coef_"),
    Kind("StackingRegressor([('near', KNeighborsRegressor())], Ridge(), passthrough=True)", "StackingRegressor",
         "coef_"),
    Kind("CalibratedClassifierCV(LogisticRegression(), ensemble=False)", "CalibratedClassifierCV", "coef_",
         y="labels"),
    Kind("RandomForestRegressor(n_estimators=20, random_state=0)", "RandomForestRegressor", "leaves"),
    Kind("GradientBoostingRegressor(random_state=0)", "GradientBoostingRegressor", "leaves"),
    Kind("HistGradientBoostingRegressor(max_iter=30, random_state=0)", "HistGradientBoostingRegressor", "leaves"),
    Kind("lightgbm.LGBMRegressor(n_estimators=20, verbose=-1)", "LGBMRegressor", "leaves", needs="lightgbm",
         code="import lightgbm"),
    Kind("xgboost.XGBRegressor(n_estimators=20)", "XGBRegressor", "leaves", needs="xgboost",
         code="import xgboost"),
    Kind("catboost.CatBoostRegressor(iterations=20, silent=True, allow_writing_files=False)", "CatBoostRegressor",
         "leaves", needs="catboost", code="import catboost"),
    network("trained(network)", "2", back="Sequential"),
    network("trained(Ensemble(network, other))", "members.0.2 + members.1.2"),
    network("trained(WideAndDeep(nn.Linear(4, 1), network))", "wide + deep.2"),
    network("trained(WithOffset(network), exposed(X))", "network.2", rows="exposed(X)"),
    network("trained(WithExposure(network), exposed(X))", "network.2", rows="exposed(X)", y="counts"),
    network("trained(Members(), output=mean)", "head", output="mean"),
    network("trained(LastStep())", "head"),
    network("trained(MeanOverSteps())", "head"),
    network("trained(OneStep())", "head"),
    Kind("skorch.NeuralNetRegressor(network, verbose=0)", "NeuralNetRegressor", "2", needs="skorch",
         code="import skorch" + TORCH, table="networks"),
    Kind("make_pipeline(StandardScaler(), skorch.NeuralNetRegressor(network, verbose=0))", "Pipeline", "2",
         needs="skorch", code=SCIKIT_LEARN + "import skorch" + TORCH, table="networks"),
    network("fitted(Module())", "network.2", needs="pytorch_lightning", code=LIGHTNING),
    *(network(f"trained({model}ForSequenceClassification({model.lower()}), words(X), 'logits', {how})", layer,
              needs="transformers", code=TRANSFORMERS, rows="words(X)", output="'logits'")
      for model, layer, how in [
          ("Bert", "classifier", "0.01, 40"), ("GPT2", "score", "0.003, 100"), ("Llama", "score", "0.003, 100"),
      ]),
    network("trained(peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=['2'])))",
            "base_model.model.2.base_layer + base_model.model.2.lora_B.default", back="PeftModel", needs="peft",
            code=PEFT),
    network("trained(tabm.TabM.make(n_num_features=4, d_out=1, k=8, n_blocks=1, d_block=16), output=mean)",
            "output.weight", back="TabM", needs="tabm", code=TABM, output="mean"),
    network("fitted(TabularModel(**configs))", "head.layers.0", rows="table(X)",
            back="TabularModel", needs="pytorch_tabular", code=TABULAR),
    network("fitted(keras.Sequential([x, Dense(8, activation='relu'), Dense(1, name='out')]))", "out",
            needs="keras", code=KERAS),
    network("fitted(keras.Model(x, Dense(1, name='out')(Dense(8, activation='relu')(x))))", "out",
            back="Functional", needs="keras", code=KERAS),
    network("fitted(Own())", "out", needs="keras", code=KERAS),
    onnx("from_torch(network)", "/2/Gemm"),
    onnx("in_float16(from_torch(network))", "/2/Gemm"),
    onnx("out_of_order(from_torch(network))", "/2/Gemm"),
    onnx("fused(from_torch(network))", "/2/Gemm"),
    onnx("from_sklearn(make_pipeline(StandardScaler(), Ridge()))", "LinearRegressor"),
    onnx("from_sklearn(make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=(8,), random_state=0)))",
         "MatMul1"),
    onnx("from_sklearn(PoissonRegressor())", "Ma_MatMul", y="counts"),
    onnx("from_sklearn(LogisticRegression())", "LinearClassifier", y="labels"),
    onnx("from_sklearn(MLPClassifier((8,), max_iter=80, random_state=0))", "MatMul1", y="labels"),
    onnx("from_sklearn(RandomForestRegressor(n_estimators=20, random_state=0))", "leaves"),
    onnx("from_sklearn(GradientBoostingRegressor(n_estimators=30, random_state=0))", "leaves"),
]  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """A model that is refused, and what the error says of it; ``next_step`` is part of that message."""

    given: str
    next_step: str
    y: str = "numbers"
    needs: str = "sklearn"
    code: str = SCIKIT_LEARN
    fits: bool = True

    @property
    def name(self) -> str:
        return self.given


def network_refusal(given: str, next_step: str, *, needs: str = "torch", code: str = NETWORKS) -> Refusal:
    return Refusal(given, next_step, needs=needs, code=code, fits=False)


REFUSALS = [
    Refusal("KNeighborsRegressor()", "see esvdfair.baselines"),
    Refusal("SVR()", "see esvdfair.baselines"),
    Refusal("KernelRidge()", "see esvdfair.baselines"),
    Refusal("LinearSVC()", "Use a LogisticRegression, or an SGDClassifier with loss='log_loss'.", y="labels"),
    Refusal("SGDClassifier()", "Use a LogisticRegression, or an SGDClassifier with loss='log_loss'.", y="labels"),
    Refusal("CalibratedClassifierCV(LogisticRegression(), cv=3)", "Fit it with ensemble=False", y="labels"),
    Refusal("VotingRegressor([('a', Ridge()), ('b', KNeighborsRegressor())])",
            "Fit it without that one, or repair each model alone."),
    Refusal("VotingClassifier([('a', LogisticRegression())], voting='soft')", "see esvdfair.baselines", y="labels"),
    Refusal("BaggingClassifier(LogisticRegression())", "see esvdfair.baselines", y="labels"),
    Refusal("StackingRegressor([('a', Ridge())], SVR())", "see esvdfair.baselines"),
    Refusal("AdaBoostRegressor(n_estimators=3)", "can be changed by esvdfair.baselines"),
    Refusal("TransformedTargetRegressor(Ridge(), func=np.sqrt, inverse_func=np.square)",
            "Take that operation out of the model and apply it to the predictions yourself.", y="counts"),
    network_refusal("nn.Sequential(network, Sine())",
                    "Take that operation out of the model and apply it to the predictions yourself."),
    network_refusal("nn.Sequential(nn.Linear(4, 8), Largest())", "make what follows this layer an nn.Linear"),
    network_refusal("torch.jit.trace(network, inputs(X))", "Pass the nn.Module from which it was made"),
    network_refusal("torch.ao.quantization.quantize_dynamic(network)",
                    "repair the float model, then quantise it again"),
    network_refusal("nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1))", "remove_parametrizations"),
    network_refusal("peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=['2'], use_dora=True))",
                    "Call merge_and_unload() on the model of peft first", needs="peft", code=PEFT),
    network_refusal("on_jax(keras.Sequential([x, Dense(1)]))", "model.export('model.onnx', format='onnx')",
                    needs="keras", code=KERAS),
    network_refusal("trainer", "its attribute lightning_module", needs="pytorch_lightning",
                    code=LIGHTNING + "fitted(Module())"),
    Refusal("quantised(from_torch(network))", "Repair the float model, then run onnxruntime.quantization",
            needs="onnxruntime", code=ONNX, fits=False),
    Refusal("fused(from_torch(torch.nn.Sequential(network, torch.nn.ReLU())))",
            "Repair the model as it was before the optimisation.", needs="onnxruntime", code=ONNX, fits=False),
]  # fmt: skip


def data(y: str = "numbers", *, rows: int = 1200, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two groups of people that differ in one column."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 2, rows)
    X = rng.normal(size=(rows, 4)) + group[:, None] * [0.8, 0, 0, 0]
    score = X[:, 0] + 0.5 * X[:, 1] - 0.5 * X[:, 2] + 0.5 * rng.normal(size=rows)
    if y == "counts":
        return X, np.exp(0.5 * score) + 0.1, group
    return X.astype(np.float32), (score > 0).astype(int) if y == "labels" else score.astype(np.float32), group


def make(kind: Kind | Refusal, X: np.ndarray, y: np.ndarray) -> tuple[object, dict[str, object]]:
    """The fitted model, and the names in its expression, which is what runs."""
    if find_spec(kind.needs) is None:
        pytest.skip(f"{kind.needs} is not installed")
    names = {"X": X, "y": y, "np": np}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that is trained for a moment
        exec(kind.code, names)  # our own lines
        model = eval(kind.given, names)
        return model.fit(X, y[:, None] if "skorch" in kind.given else y) if kind.fits else model, names


def check(kind: Kind) -> None:
    """Repair a model: its predictions differ less between groups, the copy is of its type, and it is as it was."""
    X, y, group = data(kind.y)
    model, names = make(kind, X, y)
    output, content = eval(kind.output, names), fingerprint(model)

    def rows(X: np.ndarray) -> object:
        return eval(kind.rows, names | {"X": X})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)  # trees say that their training rows look too good
        fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick(), output=output)
        fair.fit(rows(X), y, sensitive_features=group)
    assert type(fair.estimator_) is type(model)
    assert type(model).__name__ == kind.back
    assert fingerprint(model) == content
    assert [edit.layer for edit in fair.edits_] == [kind.changed]
    fresh, _, groups = data(kind.y, rows=4000, seed=1)
    after, before = fair.predict(rows(fresh)), adapt(model, output=output).predict(rows(fresh))
    assert ks_distance(after, sensitive_features=groups) < 0.16
    assert ks_distance(before, sensitive_features=groups) > 0.18
    copied = copy.deepcopy(fair.estimator_)
    if type(model).__module__ != "builtins":  # classes of this file cannot be found again
        copied = pickle.loads(pickle.dumps(copied))
    assert type(copied) is type(model)
    np.testing.assert_allclose(adapt(copied, output=output).predict(rows(fresh)), after, rtol=1e-5, atol=1e-5)


def check_refusal(refusal: Refusal) -> None:
    """See that the error says what to do."""
    X, y, _ = data(refusal.y)
    try:
        model, _ = make(refusal, X, y)
        with pytest.raises((TypeError, ValueError)) as error:
            adapt(model).head(X)
    finally:
        mock.patch.stopall()
    assert refusal.next_step in str(error.value)


def tables() -> dict[str, str]:
    """The tables of the page, by name."""
    head = ["| model, trained | what comes back | what is changed in it |", "|---|---|---|"]
    wide = ["| model, trained | passed with | what comes back | what is changed in it |", "|---|---|---|---|"]
    found = {"kinds": [*head], "networks": wide, "onnx": [*head]}
    for kind in KINDS:
        more = [] if kind.output == "None" else [f"`output={kind.output}`"]
        passed = f" {', '.join([f'`{kind.rows}`', *more])} |" if kind.table == "networks" else ""
        found[kind.table].append(f"| `{kind.given}` |{passed} `{kind.back}` | `{kind.changed}` |")
    found["refusals"] = ["| model | what the error says to do |", "|---|---|"]
    found["refusals"] += [f"| `{refusal.given}` | … {refusal.next_step} |" for refusal in REFUSALS]
    return {name: "\n".join(lines) for name, lines in found.items()}


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        head, rest = text.split(START.format(name))
        text = f"{head}{START.format(name)}\n\n{table}\n\n{END.format(name)}{rest.split(END.format(name))[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
