"""The quadratic that every refit of the last layer minimises, in the coordinates of the features' principal axes.

A last layer predicts ``h·w + b`` from features h (p of them). With target t, original weights w₀, ridge ρ and a unit
s_j of each feature,

    min over w, b of   E(t − h·w − b)² + ρ Σ s_j² (w_j − w₀_j)².

The unit is the standard deviation of the feature, so that the ridge does not depend on scale, and far more for a
feature that varies on a few rows only, whose weight is held so that it cannot fit those rows (:func:`unit_factors`).

The best bias is ``b = t̄ − h̄·w`` whatever w is, so only w remains (a layer without bias is not centred). The pooled
covariance of the features in their units is ``C = QΛQᵀ`` with Q (p × r) over its r non-zero eigenvalues: many ReLU
units are dead, so r is often far below p. Directions outside Q never move the outputs; there w keeps w₀. Along them
``w = w_null + s⁻¹Q (Λ+ρ)^{-1/2} u`` and the objective is ``‖u − u_ridge‖² + constant``: in the whitened coordinates u
it is a plain distance. An offset o, which the model adds to h·w, is a last feature whose weight stays 1: it has an axis
of its own, and ``t − o`` is the target of the others.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
_ROUNDING = 64 * float(np.finfo(np.float64).eps)  # part of its mean below which a standard deviation is rounding
_NO_VARIANCE_GAP = 1e-13  # part of the features' own spread that is rounding of the moments
_FEWEST_ROWS = 10  # on which a feature must vary for its weight to be refitted
_PEAKED = 12  # of fewer than 120 rows: one in so many (it is one in three for a normal distribution)
_HELD = 3e4  # factor on the unit of others: a ridge of 1e-6 counts as 1000 for them
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Fit:
    """A last layer ``h·w + b`` and how it was made: what every refit returns.

    Attributes
    ----------
    weight, bias : w (p,) and b; 0.0 for a layer without bias
    target : what it aimed at: "labels", "predictions", "optimum 0.05"
    ridge : ρ, relative to the variance of each feature
    strength : how hard parity was pressed for: λ_w of transport, λ_e of parity, 0 without
    converged : whether the method reached its own stopping rule
    diagnostics : what else the method knows, by name
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
    axes : (p, r) ``s⁻¹Q``: coordinates of features are ``(h − mean) @ axes``
    dual : (p, r) ``sQ``: coordinates of weights are ``w @ dual``; ``dual.T @ axes`` is the identity
    variances : (r,) Λ (divisor Σw)
    group_means : (G, r) of the features along the axes
    group_covariances : (G, r, r), unbiased
    group_rows : (G,) effective rows, (Σw)²/Σw²
    intercept : whether the layer has a bias
    offset : (r,) covariance of the offset, whose axis is the last, with the features along the axes; None without one
    """

    mean: Array
    axes: Array
    dual: Array
    variances: Array
    group_means: Array
    group_covariances: Array
    group_rows: Array
    intercept: bool = True
    offset: Array | None = None

    @classmethod
    def from_moments(
        cls,
        moments: GroupMoments,
        n_features: int | None = None,
        *,
        intercept: bool = True,
        factors: Array | None = None,
        offset: bool = False,
    ) -> "FeatureSpace":
        """From moments whose first ``n_features`` columns (default: all) are the features, the last maybe an offset.

        ``factors`` (p,), from :func:`unit_factors`, multiply the units.
        """
        features = moments if n_features is None else moments.columns(slice(0, n_features))
        features.require_groups(rows=2)
        mean = features.pooled_mean()
        second = features.pooled_scatter() / features.pooled_weight
        if not intercept:
            second, mean = second + np.outer(mean, mean), np.zeros_like(mean)
        constant = np.diag(second) <= (_ROUNDING * mean) ** 2
        unit = np.where(constant, 0.0, np.sqrt(np.diag(second))) * (1.0 if factors is None else factors)
        varying = np.flatnonzero(unit)
        held = offset and unit[-1] > 0
        if not (free := len(varying) - held):
            raise ValueError(
                "all features are constant over these rows, so the last layer can only predict one number; "
                "check that the rows differ and that the layer below is not dead."
            )
        unit = unit[varying]
        second = second[np.ix_(varying, varying)] / unit / unit[:, None]
        variances, axes = scipy.linalg.eigh(second[:free, :free], driver="evd")
        live = variances > max(len(mean) * np.finfo(np.float64).eps, _DEAD) * variances[-1]
        axes, variances = axes[:, live], variances[live]
        # Eigenvectors are known up to their sign, on which a local solver's path may depend.
        axes = axes * np.sign(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0))
        if factors is not None and factors.max() > 1.0:  # eigh knows variances to a part of the largest only
            variances = np.einsum("ij,ij->j", axes, second[:free, :free] @ axes)
        if held:
            axes, variances = scipy.linalg.block_diag(axes, np.eye(1)), np.append(variances, second[-1, -1])
        along = axes / unit[:, None]
        both = np.zeros((2, len(mean), len(variances)))
        both[:, varying] = along, unit[:, None] * axes
        return cls(
            mean=mean,
            axes=both[0],
            dual=both[1],
            variances=variances,
            group_means=(features.means - mean)[:, varying] @ along,
            group_covariances=along.T @ features.covariances()[:, varying[:, None], varying] @ along,
            group_rows=features.counts**2 / features.weight_squares,
            intercept=intercept,
            offset=unit[-1] * (second[-1] @ axes) if held else None,
        )

    @cached_property
    def covariance_gaps(self) -> Array:
        """(1, r, r) ``C₀ − C₁`` for two groups, (G, r, r) ``C_g − C̄`` for more; 0 where only rounding is left."""
        covariances, two = self.group_covariances, len(self.group_covariances) == 2
        gaps = covariances[: -1 if two else None] - (covariances[1:] if two else covariances.mean(axis=0))
        gaps[np.abs(gaps).max(axis=(1, 2)) <= _NO_VARIANCE_GAP * self.variances[-1]] = 0.0
        return np.asarray(0.5 * (gaps + gaps.transpose(0, 2, 1)))

    @cached_property
    def mean_gaps(self) -> Array:
        """(G(G−1)/2, r) differences of group means along the axes, one row for each pair."""
        first, second = np.triu_indices(len(self.group_means), k=1)
        return np.asarray(self.group_means[first] - self.group_means[second])

    def rotate(self, features: ArrayLike) -> Array:
        """(rows, p) features -> (rows, r) centred coordinates along the axes."""
        live = np.flatnonzero(self.axes.any(axis=1))  # of a ReLU network half of the units may be dead
        return np.asarray((np.asarray(features).take(live, axis=1) - self.mean[live]) @ self.axes[live])

    def denoised(self) -> "FeatureSpace":
        """With group means and covariances drawn to the pooled ones by what sampling noise adds to them.

        In the coordinates in which the pooled covariance is the identity (r of them), with n effective rows, a group's
        gap d to the pooled mean is multiplied by ``max(0, 1 − tr C_g/(n‖d‖²))``, and the eigenvalues of ``C_g − C̄`` are
        moved towards 0 by ``2√(r/n) + r/n``: the largest that pure noise has.
        """
        root = np.sqrt(self.variances)
        share = self.group_rows / self.group_rows.sum()
        common = np.tensordot(share, self.group_covariances, 1)
        middle = (0.0 if self.intercept else share @ self.group_means) * np.ones(len(root))
        means, covariances = np.empty_like(self.group_means), np.empty_like(self.group_covariances)
        for g, n in enumerate(self.group_rows):
            gap = (self.group_means[g] - middle) / root
            trace = float(np.sum(np.diag(self.group_covariances[g]) / root**2))
            means[g] = middle + max(0.0, 1 - trace / (n * max(gap @ gap, 1e-300))) * (self.group_means[g] - middle)
            sizes, vectors = np.linalg.eigh((self.group_covariances[g] - common) / root / root[:, None])
            noise = 2 * np.sqrt(len(sizes) / n) + len(sizes) / n
            sizes = np.sign(sizes) * np.maximum(0.0, np.abs(sizes) - noise)
            lift = root[:, None] * vectors
            covariances[g] = common + (lift * sizes) @ lift.T
        return replace(self, group_means=means, group_covariances=covariances)


def unit_factors(features: NDArray[Any], sample_weight: Array, *, centred: bool = True) -> Array:
    """(p,) factors on the units of features (rows, p): 1, and 0 for those constant up to the rounding of their dtype.

    A feature that varies on k of n rows has ``n m₂²/m₄ = k`` (m₂, m₄ its second and fourth central moments, or those
    about zero without ``centred``). Below 10 such rows, or one row in 12, the factor is large: the weight is held.
    """
    share, live = sample_weight / sample_weight.sum(), np.flatnonzero(features.any(axis=0))
    size, mean, second, fourth = np.zeros((4, len(live)))
    for block in blocks(len(features)):
        part = features[block].take(live, axis=1)
        np.maximum(size, np.abs(part).max(axis=0), out=size)
        mean += share[block] @ part
    mean /= size  # so that fourth powers neither overflow nor vanish
    room = np.empty((_ROWS_AT_ONCE, len(live)))  # written again and again: new memory costs more than products
    for block in blocks(len(features)):
        part = np.divide(features[block].take(live, axis=1), size, out=room[: len(share[block])])
        part -= mean if centred else 0.0
        second += share[block] @ np.square(part, out=part)
        fourth += share[block] @ np.square(part, out=part)
    eps = float(np.finfo(features.dtype).eps) if features.dtype.kind == "f" else 0.0
    rounding = max(4 * eps, _ROUNDING) * np.abs(mean)
    varies = second > (rounding**2 if centred else 0.0)
    fewest = min(_FEWEST_ROWS, len(features) / _PEAKED)
    rare = second**2 * len(features) < fewest * fourth
    factors = np.zeros(features.shape[1])
    factors[live] = np.where(varies, np.where(rare, _HELD, 1.0), 0.0)
    return factors


def blocks(rows: int, size: int = _ROWS_AT_ONCE) -> Iterator[slice]:
    """Rows a few at a time: a float64 copy of all features would be large, and new memory costs more than products."""
    return (slice(start, start + size) for start in range(0, rows, size))


@dataclass(frozen=True)
class Quadratic:
    """``E(t − h·w − b)² + ρ Σ s_j² (w_j − w₀_j)²`` for one target and one ridge.

    Attributes
    ----------
    space : the features
    cross : (r,) covariance of the target with the features along the axes (divisor Σw)
    target_mean : of the target
    original : (p,) w₀
    ridge : ρ, relative to the variance of each feature
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
    def from_layer(cls, space: FeatureSpace, weight: Array, bias: float, ridge: float) -> "Quadratic":
        """With the outputs of the original layer themselves as the target: needs no rows."""
        mean = float(space.mean @ weight + bias) if space.intercept else 0.0
        cross = space.variances * (weight @ space.dual)
        return cls(space, cross if space.offset is None else cross + space.offset, mean, weight, ridge)

    @cached_property
    def scale(self) -> Array:
        """(r,) ``(Λ+ρ)^{-1/2}``: from whitened to principal coordinates."""
        return np.asarray(1.0 / np.sqrt(self.space.variances + self.ridge))

    @cached_property
    def minimiser(self) -> Array:
        """(r,) whitened coordinates of the ridge solution, the minimum of the quadratic."""
        along = self.original @ self.space.dual  # w₀ along the axes
        minimiser: Array = self.scale * (self.cross + self.ridge * along)
        if self.space.offset is not None:
            minimiser -= self.scale * self.space.offset
            minimiser[-1] = along[-1] / self.scale[-1]
        return minimiser

    def coordinates(self, weight: Array) -> Array:
        """Whitened coordinates of a weight vector."""
        return np.asarray((weight @ self.space.dual) / self.scale)

    def layer(self, u: Array) -> tuple[Array, float]:
        """Weight (p,) and bias of the layer at whitened coordinates u."""
        weight: Array = self.original + self.space.axes @ (self.scale * u - self.original @ self.space.dual)
        bias = float(self.target_mean - self.space.mean @ weight) if self.space.intercept else 0.0
        return weight, bias

    def fit(self, u: Array, **known: Any) -> Fit:
        """The layer at whitened coordinates u, and whatever else is known of it."""
        return Fit(*self.layer(u), ridge=self.ridge, **known)


def target_covariances(
    features: NDArray[Any], targets: Array, sample_weight: Array, fold: NDArray[np.intp], *, centred: bool = True
) -> list[tuple[Array, Array]]:
    """Covariances (k, p) of targets (rows, k) with features (rows, p), and means (k,) of the targets.

    For the rows without the first fold, without the second, and so on, and last for all rows. Unless ``centred``, means
    are 0.
    """
    middle = sample_weight @ targets / sample_weight.sum() if centred else np.zeros(targets.shape[1])
    folds, live = int(fold.max()) + 1, np.flatnonzero(features.any(axis=0))
    columns = sample_weight[:, None] * np.column_stack([targets - middle, np.ones(len(targets))])
    products, totals = np.zeros((folds, columns.shape[1], features.shape[1])), np.zeros((folds, columns.shape[1]))
    for k in range(folds):
        index, sums = np.flatnonzero(fold == k), np.zeros((columns.shape[1], len(live)))
        for block in blocks(len(index)):
            sums += columns[index[block]].T @ features[index[block]].take(live, axis=1).astype(np.float64)
        products[k, :, live], totals[k] = sums.T, columns[index].sum(axis=0)
    found = []
    for kept in [*(1.0 - np.eye(folds) if folds > 1 else ()), np.ones(folds)]:
        *means, weight = kept @ totals
        product, mean = np.tensordot(kept, products, 1) / weight, np.array(means) / weight
        found.append(
            (product[:-1] - np.outer(mean, product[-1]), mean + middle) if centred else (product[:-1], 0 * mean)
        )
    return found


# --- what follows the layer ----------------------------------------------------------------------------------------


def _exp(u: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(u)


_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "identity": (lambda u: u, np.ones_like),
    "affine": (lambda u: u, np.ones_like),
    "sigmoid": (expit, lambda u: expit(u) * expit(-u)),
    "softplus": (lambda u: np.logaddexp(0.0, u), expit),
    "exp": (_exp, _exp),
}
KINDS = tuple(_FUNCTIONS)


@dataclass(frozen=True)
class Head:
    """What maps the layer's output z to the prediction: ``p = offset + scale · g(inner_scale · z + inner_offset)``.

    g is one of identity, sigmoid, softplus, exp: a plain output, a standardised target, a sigmoid with temperature, a
    log target. Any other monotone function (relu, tanh, a quantile transformer) is kept as points between which it is
    linear. Refits work on z, scores are taken on p: a monotone head never increases the KS distance.

    Parameters
    ----------
    kind : {"identity", "affine", "sigmoid", "softplus", "exp", "monotone"}
        Which g. "identity" and "affine" share one g; "identity" promises that p is z.
    scale, offset, inner_scale, inner_offset : float
    knots : of "monotone", z in rising order and p, which rises or falls; the outer pieces go on beyond them

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
    knots: tuple[Array, Array] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS and self.knots is None:
            raise ValueError(f"kind of head must be one of {', '.join(KINDS)}; got {self.kind!r}.")

    def apply(self, z: Any) -> Array:
        """Prediction for outputs `z` of the last linear layer, any shape, in float64."""
        if self.knots is not None:
            z = np.asarray(z, dtype=np.float64)
            piece, slopes = self._piece(z)
            return np.asarray(self.knots[1][piece] + slopes[piece] * (z - self.knots[0][piece]))
        prediction = self.scale * _FUNCTIONS[self.kind][0](self._inner(z))
        prediction += self.offset
        return prediction

    def derivative(self, z: Any) -> Array:
        """Derivative dp/dz at `z`, same shape."""
        if self.knots is not None:
            piece, slopes = self._piece(np.asarray(z, dtype=np.float64))
            return np.asarray(slopes[piece])
        _, derivative = _FUNCTIONS[self.kind]
        return self.scale * self.inner_scale * derivative(self._inner(z))

    @property
    def is_affine(self) -> bool:
        """Whether a squared error before the head is, up to a factor, one after it."""
        return self.kind in ("identity", "affine")

    @property
    def line(self) -> tuple[float, float]:
        """Slope and intercept of an affine head: ``p = slope · z + intercept``."""
        intercept, one = self.apply([0.0, 1.0]).tolist()
        return one - intercept, intercept

    def inverse(self, prediction: Any) -> Array:
        """Outputs of the last linear layer that give these predictions.

        Predictions at or beyond the range of the head (0 and 1 of a sigmoid) are first moved inside it, by a thousandth
        of their spread at most and never past those that lie inside. Of many outputs that give one prediction (a relu),
        the result is the one next to the others, or in the middle.
        """
        if self.knots is not None:
            sign = 1.0 if self.knots[1][-1] >= self.knots[1][0] else -1.0
            values = sign * self.knots[1]
            levels = np.unique(values)
            first, last = (np.searchsorted(values, levels, side) for side in ("left", "right"))
            first[0], last[-1] = last[0] - 1, first[-1] + 1
            middles = (self.knots[0][first] + self.knots[0][last - 1]) / 2
            return np.interp(sign * np.asarray(prediction, dtype=np.float64), levels, middles)
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

    def _piece(self, z: Array) -> tuple[NDArray[np.intp], Array]:
        """On which piece between knots each output is, and the slopes of the pieces."""
        assert self.knots is not None
        at, values = self.knots
        return np.clip(np.searchsorted(at, z, side="right") - 1, 0, len(at) - 2), np.diff(values) / np.diff(at)

    def _inner(self, z: Any) -> Array:
        inner: Array = np.asarray(z, dtype=np.float64)
        if (self.inner_scale, self.inner_offset) != (1.0, 0.0):
            inner = self.inner_scale * inner + self.inner_offset
        return inner


def _smallest_inside(g: Array) -> float:
    """The value that stands for those at or below 0."""
    inside = g[g > 0]
    return float(min(1e-3 * max(float(np.std(g)), 1e-9), inside.min(initial=np.inf)))
