import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf, expit
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    PowerTransformer,
    QuantileTransformer,
    StandardScaler,
)
from torch import nn
from torch.nn import functional

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.core.quadratic import KINDS, Head
from esvdfair.models import adapt
from esvdfair.models.heads import find_head, probe_points
from tests.models import kinds


def softplus(u):
    return np.log1p(np.exp(-np.abs(u))) + np.maximum(u, 0)


FUNCTIONS = {
    "identity": (lambda z: z, Head("identity")),
    "affine": (lambda z: 3 * z - 2, Head("affine", 3, -2)),
    "decreasing": (lambda z: 7 - 0.5 * z, Head("affine", -0.5, 7)),
    "money": (lambda z: 1e5 * z + 3e5, Head("affine", 1e5, 3e5)),
    "sigmoid": (expit, Head("sigmoid")),
    "sigmoid, decreasing": (lambda z: 1 - expit(z), Head("sigmoid", -1, 1)),
    "sigmoid between 200 and 800": (lambda z: 200 + 600 * expit(z), Head("sigmoid", 600, 200)),
    "sigmoid with temperature": (lambda z: expit(z / 3 + 1), Head("sigmoid", 1, 0, 1 / 3, 1)),
    "softplus": (softplus, Head("softplus")),
    "softplus with beta": (lambda z: softplus(2 * z) / 2, Head("softplus", 0.5, 0, 2)),
    "softplus, decreasing": (lambda z: softplus(-z) + 1, Head("softplus", 1, 1, -1)),
    "exp": (np.exp, Head("exp")),
    "expm1": (np.expm1, Head("exp", 1, -1)),
    "exp of a standardised log": (lambda z: np.exp(0.4 * z + 10.5), Head("exp", np.exp(10.5), 0, 0.4)),
    "exp, decreasing": (lambda z: 2 - np.exp(-z), Head("exp", -1, 2, -1)),
}
OTHERS = {
    "relu": lambda z: np.maximum(z, 0),
    "clip": lambda z: np.clip(z, -5, 5),
    "cube": lambda z: z**3,
    "elu": lambda z: np.where(z > 0, z, np.expm1(z)),
    "arctan": np.arctan,
    "erf": erf,
    "complementary log-log": lambda z: 1 - np.exp(-np.exp(z)),
}
BATCHES = {
    "standard": np.random.default_rng(0).normal(size=200),
    "wide": np.random.default_rng(1).normal(3, 5, size=100),
    "narrow": np.random.default_rng(2).normal(0.5, 0.01, size=100),
    "shifted": np.random.default_rng(3).normal(-12, 1, size=100),
}
PRECISION = {np.float64: 1e-12, np.float32: 2e-6, np.float16: 5e-3}


def rounded(function, z, dtype):
    with np.errstate(all="ignore"):
        return function(z.astype(np.float64)).astype(dtype)


TOO_LARGE_FOR_FLOAT16 = ("money", "exp of a standardised log")
CASES = [
    *((name, list(BATCHES)[i % 4], np.float64) for i, name in enumerate(FUNCTIONS)),
    *((name, list(BATCHES)[(i + 1) % 4], np.float32) for i, name in enumerate(FUNCTIONS)),
    *((name, "standard", np.float16) for name in FUNCTIONS if name not in TOO_LARGE_FOR_FLOAT16),
]


@pytest.mark.parametrize(("name", "batch", "dtype"), CASES)
def test_finds_the_head(name, batch, dtype):
    function, expected = FUNCTIONS[name]
    z = probe_points(BATCHES[batch]).astype(dtype)
    head = find_head(z, rounded(function, z, dtype))
    assert head.kind == expected.kind
    at = BATCHES[batch]
    scale = np.maximum(np.abs(function(at)), np.median(np.abs(function(z.astype(float)))))
    assert np.max(np.abs(head.apply(at) - function(at)) / scale) < PRECISION[dtype]
    slope = np.maximum(np.abs(expected.derivative(at)), np.median(np.abs(expected.derivative(z.astype(float)))))
    assert np.max(np.abs(head.derivative(at) - expected.derivative(at)) / slope) < 3 * PRECISION[dtype]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["identity", "decreasing", "sigmoid", "softplus", "expm1", "softplus with beta"])
def test_plain_heads_are_found_exactly_on_any_batch(name, batch):
    function, expected = FUNCTIONS[name]
    z = probe_points(BATCHES[batch])
    head = find_head(z, function(z))
    assert head.kind == expected.kind
    for field in ("scale", "offset", "inner_scale", "inner_offset"):
        assert getattr(head, field) == pytest.approx(getattr(expected, field), rel=1e-9, abs=1e-9)


NOT_MONOTONE = {
    "square": np.square,
    "silu": lambda z: z * expit(z),
    "step": lambda z: np.where(z > 0, 1.0, 0.0),
    "rounding": np.round,
    "log": lambda z: np.log(np.where(z > 0, z, np.nan)),
}


def followed(function, batch, dtype):
    z = probe_points(batch).astype(dtype)

    def run(points):
        at = points.astype(dtype)
        return at, rounded(function, at, dtype)

    return find_head(z, rounded(function, z, dtype), operation="mine", run=run)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("batch", ["standard", "wide"])
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_monotone_function_is_followed(name, batch, dtype):
    function, z = OTHERS[name], BATCHES[batch]
    for sign in (1, -1):
        head = followed(lambda z, sign=sign: sign * function(z), z, dtype)
        assert (head.kind, head.is_affine) == ("monotone", False)
        expected = sign * function(z)
        size = 2e-6 if dtype is np.float64 else 1e-4
        np.testing.assert_allclose(head.apply(z), expected, atol=size * np.ptp(expected))
        np.testing.assert_allclose(head.apply(head.inverse(expected)), expected, atol=size * np.ptp(expected))
        assert (sign * head.derivative(z) >= 0).all()
        assert np.isfinite(head.inverse([-1e9, 1e9])).all()


def test_a_piece_that_one_point_takes_for_straight_is_looked_at_elsewhere():
    rng = np.random.default_rng(0)
    bends = np.sort(rng.normal(size=800))  # of which some have the value of their chord where it is looked at first
    heights = np.cumsum(rng.exponential(size=800))
    z = rng.normal(size=400)
    head = followed(lambda z: np.interp(z, bends, heights), z, np.float64)
    dense = np.linspace(-2, 2, 40_000)
    miss = head.apply(dense) - np.interp(dense, bends, heights)
    assert np.abs(miss).max() < 2e-6 * np.ptp(np.interp(z, bends, heights))


def test_of_outputs_that_give_one_prediction_the_inverse_is_next_to_the_others():
    head = followed(OTHERS["relu"], BATCHES["standard"], np.float64)
    np.testing.assert_allclose(head.inverse([-1.0, 0.0, 0.5]), [0, 0, 0.5], atol=1e-5)


def test_beyond_the_domain_of_a_function_there_are_no_points():
    def root(z):
        return np.sqrt(np.where(z >= 0, z, np.nan))

    z = np.linspace(0.5, 3, 100)
    head = followed(root, z, np.float64)
    np.testing.assert_allclose(head.apply(z), root(z), atol=1e-6)
    with pytest.raises(ValueError, match="which is NaN for"):
        followed(root, z - 1, np.float64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", NOT_MONOTONE)
def test_what_is_not_monotone_is_named(name, dtype):
    said = "by mine, which is NaN for" if name == "log" else "by mine, which is not continuous and monotone"
    with pytest.raises(ValueError, match=said):
        followed(NOT_MONOTONE[name], BATCHES["standard"], dtype)


def test_a_clamp_that_the_batch_does_not_touch_is_seen():
    z = BATCHES["narrow"]
    assert find_head(z, np.clip(z, 0.25, 2), kinds=("identity",)).kind == "identity"  # the batch alone is blind to it
    points = probe_points(z)
    with pytest.raises(ValueError, match="continuous and monotone"):
        find_head(points, np.clip(points, 0.25, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_is_the_derivative(kind):
    head = Head(kind) if kind == "identity" else Head(kind, -1.5, 2.0, 0.7, 0.3)
    z, h = np.linspace(-4, 4, 33), 1e-6
    np.testing.assert_allclose(head.derivative(z), (head.apply(z + h) - head.apply(z - h)) / (2 * h), rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inverse_undoes_the_head(name):
    head, z = FUNCTIONS[name][1], np.linspace(-2, 2, 33)
    np.testing.assert_allclose(head.inverse(head.apply(z)), z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inverse_of_what_the_head_cannot_give_is_finite_and_keeps_the_order(name):
    head = FUNCTIONS[name][1]
    beyond = head.offset + head.scale * np.array([-1.0, 0.0, 0.3, 0.7, 1.0, 2.0])
    z = head.inverse(beyond)
    assert np.all(np.isfinite(z))
    assert np.all(np.diff(z) * head.inner_scale >= 0)


@pytest.mark.parametrize("kind", KINDS)
def test_affine_heads(kind):
    assert Head(kind).is_affine == (kind in ("identity", "affine"))


@pytest.mark.parametrize("kind", KINDS)
def test_shape_is_kept_and_nothing_overflows_noisily(kind):
    head = Head(kind)
    z = np.array([[-1e4, 0.0], [1.0, 1e4]])
    assert head.apply(z).shape == head.derivative(z).shape == (2, 2)
    assert np.all(np.diff(head.apply(np.sort(z.ravel()))) >= 0)


def test_unknown_kind():
    with pytest.raises(ValueError, match="'tanh'"):
        Head("tanh")


@pytest.mark.parametrize("z", [np.zeros(50), np.arange(5.0), np.zeros(0), np.repeat([1.0, 2.0], 100)])
def test_too_few_different_outputs(z):
    with pytest.raises(ValueError, match="at least 8"):
        find_head(z, z)


@pytest.mark.parametrize("constant", [0.0, 1.0, -3e6])
def test_constant_predictions(constant):
    with pytest.raises(ValueError, match="constant"):
        find_head(np.arange(20.0), np.full(20, constant))


@pytest.mark.parametrize("name", ["identity", "sigmoid", "exp"])
def test_a_batch_too_narrow_to_tell_is_an_error_not_a_guess(name):
    z = np.linspace(0.5, 0.501, 40, dtype=np.float32)
    with pytest.raises(ValueError, match="too little on this batch to distinguish"):
        find_head(z, rounded(FUNCTIONS[name][0], z, np.float32))


def test_overflow_of_the_models_dtype_is_left_out():
    z = np.linspace(-20, 200, 200).astype(np.float32)
    with np.errstate(over="ignore"):
        prediction = np.exp(z)
    assert np.isinf(prediction).any()
    assert find_head(z, prediction) == Head("exp")


def test_nan_is_no_head():
    z = np.linspace(-3, 3, 50)
    with pytest.raises(ValueError, match="by a secret"):
        find_head(z, np.where(z > 2, np.nan, z), operation="a secret")


def test_kinds_narrow_the_choice():
    z = np.linspace(-3, 3, 50)
    with pytest.raises(ValueError, match="continuous and monotone"):
        find_head(z, expit(z), kinds=("identity", "affine"))


@pytest.mark.parametrize("batch", [*BATCHES.values(), np.full(3, 1e6), np.array([np.nan, np.inf]), np.array([])])
def test_probe_points_cover_the_batch_and_more(batch):
    points = probe_points(batch)
    finite = batch[np.isfinite(batch)]
    assert np.all(np.isfinite(points))
    if finite.size:
        reach = max(1.5 * np.ptp(finite), 4)
        middle = (finite.min() + finite.max()) / 2
        assert points.min() <= middle - reach
        assert points.max() >= middle + reach
        assert np.sum((points >= finite.min()) & (points <= finite.max())) >= 64


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS[1:]),
    scale=st.floats(0.01, 1e4),
    sign=st.sampled_from([-1, 1]),
    offset=st.floats(-100, 100),
    middle=st.floats(-5, 5),
    spread=st.floats(0.1, 5),
)
def test_any_affine_map_of_a_plain_head_is_recovered(kind, scale, sign, offset, middle, spread):
    expected = Head(kind, sign * scale, sign * scale * offset)
    z = probe_points(np.linspace(middle - spread, middle + spread, 50))
    head = find_head(z, expected.apply(z))
    assert head.kind == expected.kind
    size = np.abs(expected.apply(z)).max()
    np.testing.assert_allclose(head.apply(z), expected.apply(z), rtol=1e-8, atol=1e-8 * size)


def test_the_line_of_an_affine_head():
    head = Head("affine", scale=-2.0, offset=1.0, inner_scale=0.5, inner_offset=3.0)
    slope, intercept = head.line
    np.testing.assert_allclose(head.apply([0.0, 7.0]), [intercept, 7.0 * slope + intercept])


# --- models that end in one -------------------------------------------------------------------------------------------

ENDS = {  # what follows the last linear layer, in torch
    "relu": torch.relu,
    "clamp": lambda z: z.clamp(-1, 1.5),
    "relu6": functional.relu6,
    "tanh": torch.tanh,
    "elu": functional.elu,
    "leaky relu": functional.leaky_relu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "hard sigmoid": functional.hardsigmoid,
    "log of a sigmoid": functional.logsigmoid,
    "softsign": functional.softsign,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "expm1 of a relu": lambda z: torch.expm1(z.relu()),
    "clamped sigmoid": lambda z: (5 * torch.sigmoid(z)).clamp(1, 4),
}


class Network(nn.Module):
    """A network whose last linear layer is a given line."""

    def __init__(self, line, end):
        super().__init__()
        self.last, self.end = nn.Linear(4, 1), end
        self.last.load_state_dict({"weight": torch.tensor(line.coef_)[None], "bias": torch.tensor([line.intercept_])})

    def forward(self, x):
        return self.end(self.last(x))


def check_repair(model, X, y, group, of):
    """Fresh rows are as close to parity as is asked, and the error is below that of a constant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)  # much of the accuracy is in the column of the group
        fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick()).fit(X, y, sensitive_features=group)
    assert type(fair.estimator_) is type(model)
    fresh, score, groups = kinds.data(rows=4000, seed=1)
    after, wanted = fair.predict(fresh), of(score)
    assert ks_distance(adapt(model).predict(fresh), sensitive_features=groups) > 0.2
    assert ks_distance(after, sensitive_features=groups) < 0.16
    assert np.mean((after - wanted) ** 2) < np.var(wanted)


@pytest.mark.parametrize("framework", ["torch", "scikit-learn"])
@pytest.mark.parametrize("name", ENDS)
def test_a_model_that_ends_in_it_is_repaired(name, framework):
    def of(z):
        return ENDS[name](torch.from_numpy(np.array(z))).numpy()

    X, score, group = kinds.data()
    line = Ridge().fit(X, score)
    model = Network(line, ENDS[name])
    if framework != "torch":
        model = TransformedTargetRegressor(Ridge(), func=lambda y: y, inverse_func=of, check_inverse=False)
        model.fit(X, score)
    np.testing.assert_allclose(adapt(model).predict(X), of(line.predict(X)), rtol=1e-5, atol=1e-5)
    check_repair(model, X, of(score), group, of)


CLIP = FunctionTransformer(None, lambda z: np.clip(z, -1.5, 1.5), check_inverse=False)
TRANSFORMERS = {
    "power": lambda: PowerTransformer(),
    "box-cox": lambda: PowerTransformer("box-cox"),
    "quantiles": lambda: QuantileTransformer(n_quantiles=50),
    "normal quantiles": lambda: QuantileTransformer(n_quantiles=50, output_distribution="normal"),
    "many normal quantiles": lambda: QuantileTransformer(n_quantiles=1200, output_distribution="normal"),
    "minimum and maximum": lambda: MinMaxScaler(clip=True),
    "clipped": lambda: make_pipeline(StandardScaler(), CLIP),
    "clipped logarithm": lambda: make_pipeline(
        FunctionTransformer(np.log1p, np.expm1, check_inverse=False), StandardScaler(), CLIP
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_a_transformed_target_is_repaired(name):
    X, score, group = kinds.data()
    y = np.exp(score / 2)
    model = TransformedTargetRegressor(Ridge(), transformer=TRANSFORMERS[name](), check_inverse=False).fit(X, y)
    check_repair(model, X, y, group, lambda score: np.exp(score / 2))
