"""The quadratic that every refit of the last layer minimises, in the coordinates of the features' principal axes.

A last layer predicts ``h·w + b`` from features h (p of them). With target t, original weights w₀ and ridge ρ,

    min over w, b of   E(t − h·w − b)² + ρ‖w − w₀‖².

The best bias is ``b = t̄ − h̄·w`` whatever w is, so only w remains (a layer without bias is not centred). The pooled
covariance of the features is ``C = QΛQᵀ`` with Q (p × r) over its r non-zero eigenvalues: many ReLU units are dead, so
r is often far below p. Directions outside Q never move the outputs; there w keeps w₀. Along them
``w = w_null + Q (Λ+ρ)^{-1/2} u`` and the objective is ``‖u − u_ridge‖² + constant``: in the whitened coordinates u it
is a plain distance.
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
    def from_layer(cls, space: FeatureSpace, weight: Array, bias: float, *, ridge: float) -> "Quadratic":
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
