"""The quadratic that every refit of the last layer minimises, in the coordinates of the features' principal axes.

A last layer predicts ``h·w + b`` from features h (p of them). With target t, original weights w₀ and ridge ρ,

    min over w, b of   E(t − h·w − b)² + ρ‖w − w₀‖².

The best bias is ``b = t̄ − h̄·w`` whatever w is, so only w remains (a layer without bias is not centred). The pooled
covariance of the features is ``C = QΛQᵀ`` with Q (p × r) over its r non-zero eigenvalues: many ReLU units are dead, so
r is often far below p. Directions outside Q never move the outputs; there w keeps w₀. Along them
``w = w_null + Q (Λ+ρ)^{-1/2} u`` and the objective is ``‖u − u_ridge‖² + constant``: in the whitened coordinates u it
is a plain distance. The paper's own refit, a few epochs of Adam on the first term, stands at the end.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from esvdfair.core.edits import LayerEdit
from esvdfair.core.moments import GroupMoments

Array = NDArray[np.float64]

# Below this part of the largest variance a direction is rounding: of eigh in float64, and of float32 activations.
_DEAD = 1e-13
_ROWS_AT_ONCE = 512
# The defaults of torch.optim.Adam, which the paper used.
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Fit:
    """A last layer ``h·w + b`` and how it was made: what every refit returns.

    Attributes
    ----------
    weight : (p,) w
    bias : b; 0.0 for a layer without bias
    target : what it aimed at: "labels", "predictions", "optimum 0.05"
    ridge : ρ, relative to the mean variance of the features
    strength : how hard parity was pressed for: λ_w of transport, λ_e of parity, 0 without
    converged : whether the method reached its own stopping rule
    diagnostics : what else the method knows, by name; see there
    edits : edits of hidden layers that go with this layer
    """

    weight: Array
    bias: float
    target: str = "labels"
    ridge: float = 0.0
    strength: float = 0.0
    converged: bool = True
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[LayerEdit, ...] = ()


@dataclass(frozen=True)
class FeatureSpace:
    """Principal axes of the features and the group moments along them; serves every target and every ridge.

    Attributes
    ----------
    mean : (p,) pooled mean of the features; zeros for a layer without bias, where nothing may be centred
    axes : (p, r) Q, the eigenvectors of the pooled covariance with non-zero eigenvalue
    variances : (r,) Λ, their eigenvalues (divisor Σw)
    mean_gaps : (G(G−1)/2, r) differences of group means along the axes, one row for each pair
    group_covariances : (G, r, r) ``Qᵀ Cov_g Q``, unbiased
    intercept : whether the layer has a bias
    """

    mean: Array
    axes: Array
    variances: Array
    mean_gaps: Array
    group_covariances: Array
    intercept: bool = True

    @classmethod
    def from_moments(
        cls, moments: GroupMoments, n_features: int | None = None, *, intercept: bool = True
    ) -> "FeatureSpace":
        """From moments whose first ``n_features`` columns (default: all) are the features."""
        features = moments if n_features is None else moments.columns(slice(0, n_features))
        features.require_groups(rows=2)
        mean = features.pooled_mean()
        second = features.pooled_scatter() / features.pooled_weight
        if not intercept:
            second, mean = second + np.outer(mean, mean), np.zeros_like(mean)
        variances, axes = scipy.linalg.eigh(second)
        live = variances > max(len(mean) * np.finfo(np.float64).eps, _DEAD) * max(variances[-1], 0.0)
        if not live.any():
            raise ValueError(
                "all features are constant over these rows, so the last layer can only predict one number; "
                "check that the rows differ and that the layer below is not dead."
            )
        axes, variances = axes[:, live], variances[live]
        return cls(
            mean=mean,
            axes=axes,
            variances=variances,
            mean_gaps=features.mean_differences() @ axes,
            group_covariances=axes.T @ features.covariances() @ axes,
            intercept=intercept,
        )

    def rotate(self, features: ArrayLike) -> Array:
        """(rows, p) features -> (rows, r) centred coordinates along the axes."""
        rotated: Array = (np.asarray(features, dtype=np.float64) - self.mean) @ self.axes
        return rotated


def blocks(rows: int) -> Iterator[slice]:
    """Rows a few at a time: a float64 copy of all features would be large, and new memory costs more than products."""
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, rows, _ROWS_AT_ONCE))


@dataclass(frozen=True)
class Quadratic:
    """``E(t − h·w − b)² + ρ‖w − w₀‖²`` for one target and one ridge.

    Attributes
    ----------
    space : the features
    cross : (r,) covariance of the target with the features along the axes (divisor Σw)
    target_mean : of the target
    original : (p,) w₀
    ridge : ρ relative to the mean variance of the features, ``tr(C)/p``
    """

    space: FeatureSpace
    cross: Array
    target_mean: float
    original: Array
    ridge: float

    def __post_init__(self) -> None:
        if not 0 <= self.ridge < np.inf:
            raise ValueError(f"ridge={self.ridge!r}; expected a finite number that is not negative.")

    @classmethod
    def from_moments(
        cls, moments: GroupMoments, *, space: FeatureSpace, target: int, original: Array, ridge: float
    ) -> "Quadratic":
        """From moments of the rows ``[h, ...]`` with the target in column ``target``."""
        mean = moments.pooled_mean()
        column = moments.pooled_scatter()[:, target] / moments.pooled_weight
        if not space.intercept:
            column, mean = column + mean[target] * mean, np.zeros(moments.width)
        return cls(space, column[: len(space.axes)] @ space.axes, float(mean[target]), original, ridge)

    @classmethod
    def from_targets(
        cls,
        features: NDArray[Any],
        targets: Array,
        *,
        space: FeatureSpace,
        original: Array,
        ridge: float,
        sample_weight: Array,
    ) -> "list[Quadratic]":
        """One for each column of ``targets`` (rows, k), beside the features (rows, p) of the same rows."""
        share = sample_weight / sample_weight.sum()
        means = share @ targets if space.intercept else np.zeros(targets.shape[1])
        weighted = share[:, None] * (targets - means)
        cross = np.zeros((features.shape[1], targets.shape[1]))
        for block in blocks(len(features)):
            cross += (features[block].astype(np.float64) - space.mean).T @ weighted[block]
        along = cross.T @ space.axes
        return [cls(space, one, float(mean), original, ridge) for one, mean in zip(along, means, strict=True)]

    @classmethod
    def from_layer(cls, space: FeatureSpace, weight: Array, bias: float, ridge: float) -> "Quadratic":
        """With the outputs of the original layer themselves as the target: needs no rows."""
        mean = float(space.mean @ weight + bias) if space.intercept else 0.0
        return cls(space, space.variances * (weight @ space.axes), mean, weight, ridge)

    @cached_property
    def penalty(self) -> float:
        """ρ in absolute terms."""
        return float(self.ridge * self.space.variances.sum() / len(self.space.mean))

    @cached_property
    def scale(self) -> Array:
        """(r,) ``(Λ+ρ)^{-1/2}``: from whitened to principal coordinates."""
        scale: Array = 1.0 / np.sqrt(self.space.variances + self.penalty)
        return scale

    @cached_property
    def minimiser(self) -> Array:
        """(r,) whitened coordinates of the ridge solution, the minimum of the quadratic."""
        minimiser: Array = self.scale * (self.cross + self.penalty * self._along)
        return minimiser

    @cached_property
    def _along(self) -> Array:
        """(r,) w₀ along the axes."""
        along: Array = self.original @ self.space.axes
        return along

    def coordinates(self, weight: Array) -> Array:
        """Whitened coordinates of a weight vector."""
        u: Array = (weight @ self.space.axes) / self.scale
        return u

    def layer(self, u: Array) -> tuple[Array, float]:
        """Weight (p,) and bias of the layer at whitened coordinates u."""
        weight: Array = self.original + self.space.axes @ (self.scale * u - self._along)
        bias = float(self.target_mean - self.space.mean @ weight) if self.space.intercept else 0.0
        return weight, bias

    def fit(self, u: Array, **known: Any) -> Fit:
        """The layer at whitened coordinates u, and whatever else is known of it."""
        return Fit(*self.layer(u), ridge=self.ridge, **known)


# --- what follows the layer ----------------------------------------------------------------------------------------


def _exp(u: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(u)


def _sigmoid(u: Array) -> Array:
    return np.asarray(expit(u), dtype=np.float64)


_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "identity": (lambda u: u, np.ones_like),
    "affine": (lambda u: u, np.ones_like),
    "sigmoid": (_sigmoid, lambda u: _sigmoid(u) * _sigmoid(-u)),
    "softplus": (lambda u: np.logaddexp(0.0, u), _sigmoid),
    "exp": (_exp, _exp),
}
KINDS = tuple(_FUNCTIONS)


@dataclass(frozen=True)
class Head:
    """What maps the layer's output z to the prediction: ``p = offset + scale · g(inner_scale · z + inner_offset)``.

    g is one of identity, sigmoid, softplus, exp. That covers a plain output, a standardised target, a sigmoid with
    temperature, `expm1`, and a log target that was standardised as well. Refits work on z, scores are taken on p.

    Parameters
    ----------
    kind : {"identity", "affine", "sigmoid", "softplus", "exp"}
        Which g. "identity" and "affine" share one g; "identity" promises that p is z. A negative scale, or a
        negative inner scale, makes a decreasing head.
    scale, offset, inner_scale, inner_offset : float

    Examples
    --------
    >>> Head("affine", scale=-2.0, offset=1.0).apply([0.0, 3.0])
    array([ 1., -5.])
    """

    kind: str
    scale: float = 1.0
    offset: float = 0.0
    inner_scale: float = 1.0
    inner_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of head must be one of {', '.join(KINDS)}; got {self.kind!r}.")

    def apply(self, z: Any) -> Array:
        """Prediction for outputs `z` of the last linear layer, any shape, in float64."""
        function, _ = _FUNCTIONS[self.kind]
        return self.offset + self.scale * function(self._inner(z))

    def derivative(self, z: Any) -> Array:
        """Derivative dp/dz at `z`, same shape."""
        _, derivative = _FUNCTIONS[self.kind]
        return self.scale * self.inner_scale * derivative(self._inner(z))

    @property
    def is_affine(self) -> bool:
        """Whether a squared error before the head is, up to a factor, one after it."""
        return self.kind in ("identity", "affine")

    @property
    def line(self) -> tuple[float, float]:
        """Slope and intercept of an affine head: ``p = slope · z + intercept``."""
        intercept, one = (float(p) for p in self.apply([0.0, 1.0]))
        return one - intercept, intercept

    def inverse(self, prediction: Any) -> Array:
        """Outputs of the last linear layer that give these predictions.

        Predictions at or beyond the range of the head (0 and 1 of a sigmoid) are first moved inside it, by a thousandth
        of their own spread at most and never past those that lie inside, so that the result is finite.
        """
        g = (np.asarray(prediction, dtype=np.float64) - self.offset) / self.scale
        if self.kind == "sigmoid":
            g = np.clip(g, _smallest_inside(g), 1 - _smallest_inside(1 - g))
            u = np.log(g) - np.log1p(-g)
        elif self.kind == "softplus":
            g = np.maximum(g, _smallest_inside(g))
            u = g + np.log(-np.expm1(-g))
        elif self.kind == "exp":
            u = np.log(np.maximum(g, _smallest_inside(g)))
        else:
            u = g
        return np.asarray((u - self.inner_offset) / self.inner_scale)

    def _inner(self, z: Any) -> Array:
        return self.inner_scale * np.asarray(z, dtype=np.float64) + self.inner_offset


def _smallest_inside(g: Array) -> float:
    """The value that stands for those at or below 0."""
    inside = g[g > 0]
    return float(min(1e-3 * max(float(np.std(g)), 1e-9), inside.min(initial=np.inf)))


# --- the paper's fine-tune -----------------------------------------------------------------------------------------
#
# The layers below stay as they are, so their outputs are computed once; what remains is a linear regression, whose
# 5,500 small steps cost about a second where the same loop through a whole network costs half a minute.


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
