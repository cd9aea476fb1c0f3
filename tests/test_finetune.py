"""The NumPy fine-tune against torch's Adam with the same batches."""

import numpy as np
import pytest
import torch
from torch.optim.adam import adam

from esvdfair.hidden import finetune


def make_rows(rows=150, p=6, seed=0):
    rng = np.random.default_rng(seed)
    h = np.maximum(rng.normal(size=(rows, p)), 0.0)
    t = h @ rng.normal(size=p) + 1.0 + 0.1 * rng.normal(size=rows)
    return h, t, rng.normal(size=p), 0.3


def torch_finetune(h, t, weight, bias, sample_weight, *, epochs, batch_size, seed, dtype=torch.float64):
    """Oracle: the training loop of the paper, batch by batch, with torch's gradients and torch's Adam.

    The function behind ``torch.optim.Adam``: the class imports torch's compiler, which costs more than all other tests.
    """
    start = [torch.tensor(weight, dtype=dtype)] + ([] if bias is None else [torch.tensor([bias], dtype=dtype)])
    parameters = [x.requires_grad_() for x in start]
    first, second = ([torch.zeros_like(x) for x in start] for _ in range(2))
    steps = [torch.tensor(0.0) for _ in start]
    h, t = torch.tensor(h, dtype=dtype), torch.tensor(t, dtype=dtype)
    w = torch.ones_like(t) if sample_weight is None else torch.tensor(sample_weight / np.mean(sample_weight))
    rng = np.random.default_rng(seed)
    for epoch in range(epochs):
        for rows in torch.tensor(rng.permutation(len(h))).split(batch_size):
            output = h[rows] @ parameters[0] + (0.0 if bias is None else parameters[1])
            gradients = torch.autograd.grad(torch.mean(w[rows] * (output - t[rows]) ** 2), parameters)
            with torch.no_grad():
                adam(
                    parameters,
                    list(gradients),
                    first,
                    second,
                    [],
                    steps,
                    foreach=False,
                    amsgrad=False,
                    beta1=0.9,
                    beta2=0.999,
                    lr=1e-3 * 0.8**epoch,  # ExponentialLR
                    weight_decay=0.0,
                    eps=1e-8,
                    maximize=False,
                )
    end = [x.detach().double().numpy() for x in parameters]
    return end[0], 0.0 if bias is None else float(end[1][0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [0.3, None])
def test_equals_torch_adam_with_exponential_decay(weighted, bias):
    h, t, weight, _ = make_rows()
    sample_weight = np.random.default_rng(1).uniform(0, 5, len(t)) if weighted else None
    # 150 rows in batches of 64: the last batch of every epoch has 22.
    fit = finetune(
        h, t, weight=weight, bias=bias, sample_weight=sample_weight, epochs=12, batch_size=64, random_state=5
    )

    expected_weight, expected_bias = torch_finetune(h, t, weight, bias, sample_weight, epochs=12, batch_size=64, seed=5)

    assert np.abs(fit.weight - weight).max() > 0.01  # it moved
    np.testing.assert_allclose(fit.weight, expected_weight, rtol=0, atol=1e-8)
    assert fit.bias == pytest.approx(expected_bias, abs=1e-8)


def test_float32_features_are_worked_on_in_float32():
    h, t, weight, bias = make_rows()
    fit = finetune(h.astype(np.float32), t, weight=weight, bias=bias, epochs=12, batch_size=64, random_state=5)
    expected, _ = torch_finetune(h, t, weight, bias, None, epochs=12, batch_size=64, seed=5, dtype=torch.float32)
    assert fit.weight.dtype == np.float64
    np.testing.assert_allclose(fit.weight, expected, rtol=0, atol=1e-5)


def test_reaches_least_squares_when_given_time():
    h, t, weight, bias = make_rows()
    fit = finetune(h, t, weight=weight, bias=bias, epochs=400, decay=0.99, learning_rate=0.05, random_state=0)
    least = np.linalg.lstsq(np.column_stack([h, np.ones(len(h))]), t, rcond=None)[1][0] / len(h)
    assert np.mean((t - h @ fit.weight - fit.bias) ** 2) == pytest.approx(least, rel=0.02)


def test_same_seed_same_layer_and_inputs_untouched():
    h, t, weight, bias = make_rows()
    before = h.copy(), t.copy(), weight.copy()
    one, two, other = (
        finetune(h, t, weight=weight, bias=bias, epochs=2, random_state=seed)
        for seed in (1, np.random.default_rng(1), 2)
    )
    np.testing.assert_array_equal(one.weight, two.weight)
    assert not np.array_equal(one.weight, other.weight)
    for kept, now in zip(before, (h, t, weight), strict=True):
        np.testing.assert_array_equal(kept, now)


def test_weight_zero_leaves_a_row_out_of_the_loss():
    h, t, weight, bias = make_rows()
    sample_weight = np.ones(len(t))
    sample_weight[:5] = 0
    spoiled = t.copy()
    spoiled[:5] = 1e6
    clean, dirty = (
        finetune(h, y, weight=weight, bias=bias, sample_weight=sample_weight, epochs=2, random_state=0)
        for y in (t, spoiled)
    )
    np.testing.assert_array_equal(clean.weight, dirty.weight)
    tiny = finetune(h, t, weight=weight, bias=bias, sample_weight=1e-12 * sample_weight, epochs=2, random_state=0)
    np.testing.assert_allclose(clean.weight, tiny.weight, rtol=1e-10)
    assert clean.converged
    assert not finetune(h, t, weight=weight, bias=bias, epochs=2, learning_rate=1e3, random_state=0).converged
