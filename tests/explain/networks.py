from itertools import pairwise

import numpy as np
import pytest
from sklearn.neural_network import MLPRegressor


def network(*coefs, activation="relu", bias=0.0):
    """An MLPRegressor with the given (inputs, outputs) weights."""
    coefs = [np.asarray(c, dtype=np.float64) for c in coefs]
    model = MLPRegressor(hidden_layer_sizes=[c.shape[1] for c in coefs[:-1]], activation=activation, random_state=0)
    model.partial_fit(np.zeros((2, len(coefs[0]))), np.zeros(2))
    model.coefs_ = coefs
    model.intercepts_ = [np.full(c.shape[1], bias) for c in coefs]
    return model


def random_coefs(*widths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in pairwise(widths)]


def elsewhere(model):
    """The same ReLU network of three layers as a torch module and as the bytes of an ONNX model."""
    torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")
    skl2onnx = pytest.importorskip("skl2onnx", reason="needs skl2onnx to export")
    linears = [torch.nn.Linear(*coef.shape) for coef in model.coefs_]
    with torch.no_grad():
        for linear, coef in zip(linears, model.coefs_, strict=True):
            linear.weight.copy_(torch.tensor(coef.T))
            linear.bias.zero_()
    module = torch.nn.Sequential(linears[0], torch.nn.ReLU(), linears[1], torch.nn.ReLU(), linears[2])
    row = np.zeros((1, len(model.coefs_[0])), dtype=np.float32)
    return module, skl2onnx.to_onnx(model, row).SerializeToString()
