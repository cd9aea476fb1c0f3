"""What `test_keras.py` runs in a process that has keras on the torch backend."""

import json
import pickle
import sys
import traceback
from unittest import mock

import keras
import numpy as np
import pytest
import torch
from keras import layers

from esvdfair import ESVDFair, ks_distance
from esvdfair.models import adapt, fingerprint
from tests.models import kinds

X = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)


def sequential():
    body = [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dropout(0.5), layers.BatchNormalization()]
    return keras.Sequential([*body, layers.Dense(1, activation="sigmoid")])


def functional():
    inputs = keras.Input((6,))
    h = layers.Dense(8, activation="tanh", name="hidden")(layers.Normalization(mean=0.5, variance=2.0)(inputs))
    return keras.Model(inputs, layers.Dense(1, name="score", use_bias=False)(layers.Concatenate()([h, inputs])))


class Own(keras.Model):
    def __init__(self, width=8, **options):
        super().__init__(**options)
        self.width, self.hidden, self.out = width, layers.Dense(width, activation="gelu"), layers.Dense(1)
        self.drop = layers.Dropout(0.3)

    def call(self, x, training=False):
        return self.out(self.drop(self.hidden(x), training=training))


def subclassed():
    model = Own(5)
    model(X[:1])
    return model


def nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu")], name="inner")
    return keras.Sequential([keras.Input((6,)), inner, layers.Dense(1, name="last")])


def wide_and_deep():
    inputs = keras.Input((6,))
    deep = layers.Dense(1, name="deep")(layers.Dense(8, activation="relu")(inputs))
    return keras.Model(inputs, layers.Add()([layers.Dense(1, name="wide")(inputs), deep]))


def predicted(model, x=X):
    return model(x, training=False).detach().cpu().numpy().ravel()


def contract():
    """Layers, capture, replace and head agree with the model, which is left alone; the class is kept."""
    expected = {
        sequential: ("sigmoid", 2, True), functional: ("identity", 2, False), subclassed: ("identity", 2, True),
        nested: ("identity", 2, True), wide_and_deep: ("identity", 2, True),
    }  # fmt: skip
    for build, (kind, count, bias) in expected.items():
        keras.utils.set_random_seed(0)
        model = build()
        before, mark = predicted(model), fingerprint(model)
        adapter = adapt(model)
        assert adapter.model is model
        found = adapter.layers(X)
        assert len(found) == count, [layer.name for layer in found]
        assert (found[-1].bias is not None) == bias
        head = adapter.head(X)
        assert head.kind == kind
        np.testing.assert_allclose(adapter.predict(X), before, atol=1e-6)
        features = adapter.capture(X, [found[-1].name])[0][found[-1].name].numpy()
        shift = 0.0 if found[-1].bias is None else found[-1].bias[0]
        np.testing.assert_allclose(head.apply(features @ found[-1].weight[0] + shift), before, atol=1e-5)
        weight = np.random.default_rng(1).normal(size=found[-1].weight.shape)
        edited = adapter.replace({found[-1].name: (weight, None if found[-1].bias is None else np.array([0.5]))})
        after = head.apply(features @ weight[0] + (0.5 if bias else 0.0))
        assert type(edited.model) is type(model)
        np.testing.assert_allclose(predicted(edited.model), after, atol=1e-5)
        np.testing.assert_allclose(edited.predict(X), after, atol=1e-5)
        np.testing.assert_array_equal(predicted(model), before)
        assert fingerprint(model) == mark != fingerprint(edited.model)


def table():
    """The lines of the tables in the docs."""
    for kind in kinds.KINDS:
        if kind.needs == "keras":
            kinds.check(kind)
    for refusal in kinds.REFUSALS:
        if refusal.needs == "keras":
            kinds.check_refusal(refusal)


def repair():
    rng = np.random.default_rng(0)
    group = rng.choice(["a", "b"], size=2000)
    rows = rng.normal(size=(2000, 6)).astype(np.float32)
    rows[:, 0] += 1.5 * (group == "a")
    y = (rows @ [1, 1, 0, 0, -1, 0.5]).astype(np.float32)
    for build in (functional, subclassed):
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
        model.fit(rows, y, epochs=15, batch_size=200, verbose=0)
        fair = ESVDFair(model, target_ks=0.15).fit(rows, y, sensitive_features=group)
        assert type(fair.estimator_) is type(model)
        assert ks_distance(fair.predict(rows), sensitive_features=group) < 0.2
        np.testing.assert_allclose(predicted(fair.estimator_, rows), fair.predict(rows), atol=1e-5)
        fair.estimator_.fit(rows, y, epochs=1, verbose=0)  # compiled as the model was
        if build is functional:
            again = pickle.loads(pickle.dumps(fair.estimator_))
            np.testing.assert_array_equal(predicted(again, rows), predicted(fair.estimator_, rows))


def several_inputs():
    first, second = keras.Input((6,), name="first"), keras.Input((1,), name="second", dtype="int32")
    table = layers.Flatten()(layers.Embedding(5, 3)(second))
    model = keras.Model([first, second], layers.Dense(1, name="out")(layers.Concatenate()([first, table])))
    codes = np.random.default_rng(0).integers(0, 5, (300, 1)).astype(np.int32)
    expected = model([torch.tensor(X), torch.tensor(codes)], training=False).detach().numpy().ravel()
    for rows in ((X, codes), {"first": X, "second": codes}):
        adapter = adapt(model)
        assert adapter.layers(rows)[-1].name == "out"
        assert adapter.head(rows).kind == "identity"
        np.testing.assert_allclose(adapter.predict(rows), expected, atol=1e-6)


class Closed(keras.Model):
    def __init__(self, function):
        super().__init__()
        self.function, self.out = function, layers.Dense(1)

    def call(self, x):
        return self.out(x)


def refusals():
    closed = Closed(x for x in ())
    closed(X[:1])
    inputs, shared = keras.Input((6,)), layers.Dense(1)
    twice = keras.Model(inputs, layers.Add()([shared(inputs), shared(layers.ReLU()(inputs))]))
    updated = sequential()
    updated.layers[0].enable_lora(2)
    cases = [
        (closed, "Closed cannot be copied .*generator"),
        (keras.Sequential([layers.Dense(1)]), "not built yet"),
        (twice, "shares its weights"),
        (updated, "has a LoRA update"),
        (keras.Sequential([keras.Input((6,)), layers.Dense(2)]), "more than one output column"),
    ]
    for model, said in cases:
        with pytest.raises(ValueError, match=said):
            adapt(model).layers(X)


def other_backend():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    said = r"backend 'jax'.*KERAS_BACKEND=torch.*model\.export"
    with mock.patch("keras.config.backend", return_value="jax"), pytest.raises(TypeError, match=said):
        adapt(model)


def main():
    errors = dict.fromkeys(sys.argv[1:], "")
    for name in errors:
        try:
            globals()[name]()
        except Exception:
            errors[name] = traceback.format_exc()[-1500:]
    print(json.dumps(errors))
