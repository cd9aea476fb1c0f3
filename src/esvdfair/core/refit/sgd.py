"""The paper's fine-tune of the last layer: Adam on cached features, in NumPy.

The layers below stay as they are, so their outputs are computed once; what remains is a linear regression, whose
5,500 small steps cost about a second where the same loop through a whole network costs half a minute.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.refit.quadratic import Array, Fit

# The defaults of torch.optim.Adam, which the paper used.
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


def finetune(
    features: NDArray[Any],
    target: Array,
    *,
    weight: Array,
    bias: float | None,
    sample_weight: Array | None = None,
    epochs: int = 50,
    learning_rate: float = 1e-3,
    decay: float = 0.8,
    batch_size: int = 128,
    random_state: int | np.random.Generator | None = None,
) -> Fit:
    """Minimise ``E(t − h·w − b)²`` for a few epochs of Adam, starting from the given layer.

    The steps are those of ``torch.optim.Adam`` with its default momenta; the learning rate is multiplied by ``decay``
    after every epoch, as by ``ExponentialLR``. It stops early by design: the number of epochs and the decay decide how
    far it gets from the start. Float32 features are worked on in float32, all others in float64.

    Parameters
    ----------
    features : (rows, p) h, the inputs of the last layer
    target : (rows,) t
    weight, bias : (p,) and number; the start. ``None`` for a layer without bias: it stays without
    sample_weight : (rows,) weights of the squared errors, scaled to mean 1
    random_state : seed or generator; its ``permutation(rows)`` orders the rows of each epoch. The last batch of an
        epoch holds what is left.

    Returns
    -------
    Fit
        ``converged`` says whether the error ended no higher than it started; a learning rate that is too large
        makes it grow.

    Examples
    --------
    >>> h = np.random.default_rng(0).normal(size=(500, 2))
    >>> fit = finetune(h, h @ [1.0, 2.0] + 3.0, weight=[0.9, 2.1], bias=2.9, learning_rate=0.01, random_state=0)
    >>> fit.weight.round(2).tolist(), round(fit.bias, 2)
    ([1.0, 2.0], 3.0)
    """
    h = np.asarray(features)
    h = h.astype(np.float32 if h.dtype == np.float32 else np.float64, copy=False)
    t, start = np.asarray(target, dtype=h.dtype), np.array(weight, dtype=np.float64)
    if bias is not None:  # the weight of a last column of ones
        h, start = np.column_stack([h, np.ones(len(h), h.dtype)]), np.append(start, float(bias))
    w = None if sample_weight is None else (sample_weight / np.mean(sample_weight)).astype(h.dtype)
    rates = [learning_rate * decay**epoch for epoch in range(epochs)]
    end = _adam(h, t, start, w, rates=rates, batch_size=batch_size, rng=np.random.default_rng(random_state))
    before, after = (float(np.average((h @ layer - t) ** 2, weights=w)) for layer in (start, end))
    weight, bias = (end, 0.0) if bias is None else (end[:-1], float(end[-1]))
    return Fit(weight, bias, converged=after <= before)


def _adam(
    h: NDArray[Any],
    t: NDArray[Any],
    start: Array,
    sample_weight: NDArray[Any] | None,
    *,
    rates: list[float],
    batch_size: int,
    rng: np.random.Generator,
) -> Array:
    """Adam with one learning rate an epoch; the parameters are as many as h has columns."""
    parameters = start.astype(h.dtype)
    first, second = np.zeros_like(parameters), np.zeros_like(parameters)
    batch = np.empty((min(batch_size, len(h)), h.shape[1]), dtype=h.dtype)
    step = 0
    for rate in rates:
        order = rng.permutation(len(h))
        for begin in range(0, len(h), batch_size):
            rows = order[begin : begin + batch_size]
            x = np.take(h, rows, axis=0, out=batch[: len(rows)], mode="clip")  # the default mode copies once more
            error = x @ parameters - t[rows]
            if sample_weight is not None:
                error *= sample_weight[rows]
            gradient = (2.0 / len(rows)) * (error @ x)
            step += 1
            first += (1.0 - _BETA1) * (gradient - first)
            second *= _BETA2
            second += (1.0 - _BETA2) * gradient**2
            scale = np.sqrt(second) / (1.0 - _BETA2**step) ** 0.5 + _EPS
            parameters -= (rate / (1.0 - _BETA1**step)) * first / scale
    return parameters.astype(np.float64)
