import pickle

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import PowerTransformer, StandardScaler
from torch import nn

from esvdfair import Effort, ESVDFair
from esvdfair.models import adapt

skorch = pytest.importorskip("skorch")
RNG = np.random.default_rng(0)
SEX = RNG.integers(0, 2, 1200)
X = (RNG.normal(size=(1200, 4)) + SEX[:, None] * [1, 0, 0, 0]).astype(np.float32)
Y = (X[:, :1] + X[:, 1:2] + X[:, 2:3] + 0.1 * RNG.normal(size=(1200, 1))).astype(np.float32)
OPTIONS = {"method": "transport", "effort": Effort.quick(), "target_ks": 0.15}


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, X):
        return self.net(X)


def net(**options):
    torch.manual_seed(0)
    return skorch.NeuralNetRegressor(Net, max_epochs=20, lr=0.05, verbose=0, **options)


MODELS = {
    "alone": net,
    "pipeline": lambda: make_pipeline(StandardScaler(), net()),
    "target": lambda: TransformedTargetRegressor(net(), transformer=StandardScaler()),
    "power": lambda: TransformedTargetRegressor(net(), transformer=PowerTransformer()),
    "search": lambda: GridSearchCV(net(), {"module__width": [4, 8]}, cv=2, scoring="r2"),
    "search of a pipeline": lambda: GridSearchCV(
        Pipeline([("scale", StandardScaler()), ("net", net())]), {"net__module__width": [4, 8]}, cv=2, scoring="r2"
    ),
}


@pytest.mark.filterwarnings("ignore:.*(cannot be told|keeps .* of the variance|No candidate meets)")
@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_wrapper_goes_in_and_comes_out(name, fitted):
    model = MODELS[name]()
    if fitted:
        model.fit(X, Y)
        before = model.predict(X)
    fair = ESVDFair(model, **OPTIONS).fit(X, Y, sensitive_features=SEX)
    assert type(fair.estimator_) is type(model)
    np.testing.assert_allclose(fair.estimator_.predict(X).ravel(), fair.predict(X), rtol=1e-5, atol=1e-6)
    assert fair.summary_["ks_after"] < 0.8 * fair.summary_["ks_before"]
    if fitted:
        np.testing.assert_array_equal(model.predict(X), before)
        np.testing.assert_allclose(adapt(model).predict(X), before.ravel(), rtol=1e-5, atol=1e-6)
        assert adapt(model).n_features in (None, 4)
    again = pickle.loads(pickle.dumps(fair))
    np.testing.assert_array_equal(again.predict(X), fair.predict(X))


def test_what_cannot_be_repaired_is_named():
    with pytest.raises(NotFittedError, match="NeuralNetRegressor is not fitted"):
        adapt(net())
    classifier = skorch.NeuralNetClassifier(Net, max_epochs=0, verbose=0).initialize()
    with pytest.raises(TypeError, match="NeuralNetClassifier; of skorch, a NeuralNetRegressor is supported"):
        adapt(classifier)
