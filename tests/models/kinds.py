"""Kinds of models that people have: one list, which the test repairs and ``docs/models.md`` shows.

PYTHONPATH=src python -m tests.models.kinds        # write the tables of docs/models.md anew
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

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

    @property
    def name(self) -> str:
        return self.given


def linear(given: str, **more: str) -> Kind:
    return Kind(given, given.partition("(")[0], "coef_", **more)


TORCH = """
import torch
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
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
    return Kind(given, "bytes", changed, needs="onnxruntime", code=ONNX, fits=False, **more)


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
    Kind("skorch.NeuralNetRegressor(network, verbose=0)", "NeuralNetRegressor", "2", needs="skorch",
         code="import skorch" + TORCH),
    Kind("torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))", "Sequential", "2",
         needs="torch", code=TORCH, fits=False),
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


REFUSALS = [
    Refusal("KNeighborsRegressor()", "see esvdfair.baselines"),
    Refusal("SVR()", "see esvdfair.baselines"),
    Refusal("KernelRidge()", "see esvdfair.baselines"),
    Refusal("LinearSVC()", "Use a LogisticRegression, or an SGDClassifier with loss='log_loss'.", y="labels"),
    Refusal("SGDClassifier()", "Use a LogisticRegression, or an SGDClassifier with loss='log_loss'.", y="labels"),
    Refusal("CalibratedClassifierCV(LogisticRegression(), cv=3)", "Fit it with ensemble=False", y="labels"),
    Refusal("VotingRegressor([('a', Ridge()), ('b', KNeighborsRegressor())])",
            "Fit it without that one, or repair each model alone."),
    Refusal("StackingRegressor([('a', Ridge())], SVR())", "see esvdfair.baselines"),
    Refusal("AdaBoostRegressor(n_estimators=3)", "can be changed by esvdfair.baselines"),
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


def make(kind: Kind | Refusal, X: np.ndarray, y: np.ndarray) -> object:
    """The fitted model: the expression of the table is what runs."""
    pytest.importorskip(kind.needs, reason="needs an extra")
    names = {"X": X, "y": y, "np": np}
    exec(kind.code, names)  # our own lines
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that is trained for a moment
        model = eval(kind.given, names)
        return model.fit(X, y[:, None] if "skorch" in kind.given else y) if kind.fits else model


def tables() -> dict[str, str]:
    """The tables of the page, by name."""
    found = {True: [], False: []}
    for kind in KINDS:
        found[kind.back == "bytes"].append(f"| `{kind.given}` | `{kind.back}` | `{kind.changed}` |")
    head = ["| model, trained | what comes back | what is changed in it |", "|---|---|---|"]
    refused = [f"| `{refusal.given}` | … {refusal.next_step} |" for refusal in REFUSALS]
    return {
        "kinds": "\n".join([*head, *found[False]]),
        "onnx": "\n".join([*head, *found[True]]),
        "refusals": "\n".join(["| model | what the error says to do |", "|---|---|", *refused]),
    }


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        head, rest = text.split(START.format(name))
        text = f"{head}{START.format(name)}\n\n{table}\n\n{END.format(name)}{rest.split(END.format(name))[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
