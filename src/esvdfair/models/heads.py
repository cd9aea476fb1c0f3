"""What maps the last linear layer's output to the prediction, found from pairs of the two.

A head is `p = offset + scale · g(inner_scale · z + inner_offset)` with g one of identity, sigmoid, softplus, exp.
That covers a plain output, a standardised target, a sigmoid with temperature, `expm1`, and a log target that was
standardised as well. Refits work on z, before the head; scores are taken on p, after it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import expit

Array = NDArray[np.float64]

KINDS = ("identity", "affine", "sigmoid", "softplus", "exp")

_MIN_POINTS = 8
_TOLERANCE_FLOOR = 1e-9  # torch's softplus is the identity above 20: 2e-9 from the formula, in float64 too


def _exp(u: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(u)


def _softplus(u: Array) -> Array:
    return np.logaddexp(0.0, u)


def _sigmoid(u: Array) -> Array:
    return np.asarray(expit(u), dtype=np.float64)


def _sigmoid_derivative(u: Array) -> Array:
    return _sigmoid(u) * _sigmoid(-u)


_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "identity": (lambda u: u, np.ones_like),
    "affine": (lambda u: u, np.ones_like),
    "sigmoid": (_sigmoid, _sigmoid_derivative),
    "softplus": (_softplus, _sigmoid),
    "exp": (_exp, _exp),
}


@dataclass(frozen=True)
class Head:
    """`p = offset + scale · g(inner_scale · z + inner_offset)`.

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


def probe_points(z: Any, count: int = 192) -> Array:
    """Outputs of the last layer at which to look at a head: where a batch `z` lies, and well beyond.

    A third are quantiles of `z`; a third cover three times its range (at least four either side of its middle), so
    that a clamp that the batch does not touch shows, and a narrow batch cannot pass a curve for a line; a third lie
    around zero, where a softplus and a relu differ on any scale.
    """
    flat = np.asarray(z, dtype=np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    if flat.size == 0:
        flat = np.zeros(1)
    low, high = float(flat.min()), float(flat.max())
    middle, reach = (low + high) / 2, max(1.5 * (high - low), 4.0)
    inside = np.quantile(flat, np.linspace(0.0, 1.0, count - 2 * (count // 3)))
    beyond = np.linspace(middle - reach, middle + reach, count // 3)
    return np.concatenate([inside, beyond, np.linspace(-8.0, 8.0, count // 3)])


def find_head(
    z: Any,
    prediction: Any,
    *,
    kinds: Sequence[str] = KINDS,
    operation: str = "an unknown operation",
    eps: float | None = None,
) -> Head:
    """Find the head that maps `z` to `prediction`.

    Parameters
    ----------
    z, prediction : (n,)
        Outputs of the last linear layer and the predictions made of them.
    kinds : sequence of str
        Kinds to consider; an adapter that sees the operations can leave the others out.
    operation : str
        What the adapter knows to stand between the two; named in the error.
    eps : float, optional
        Relative spacing of the arithmetic that made `prediction` (0.0078 for bfloat16). Default: the coarser
        of the two dtypes.

    Raises
    ------
    ValueError
        No kind fits; or too few different `z`, or too narrow a range of them, to tell; or `prediction` does not vary.
    """
    if eps is None:
        eps = max(_eps(z), _eps(prediction))
    z = np.asarray(z, dtype=np.float64).ravel()
    p = np.asarray(prediction, dtype=np.float64).ravel()
    usable = np.isfinite(z) & ~np.isinf(p)  # inf is an overflow of the model's dtype
    z, p = z[usable], p[usable]
    if np.isnan(p).any():  # a logarithm or a root, outside its domain
        raise ValueError(unsupported_head(operation))
    tolerance = _tolerance(eps)
    _check_varied(z, p, tolerance)
    # Rounding is relative to p, but where p passes through zero the terms it is made of are not small.
    weight = 1.0 / np.maximum(np.abs(p), np.median(np.abs(p[p != 0])))

    for family in (_plain_fits, _general_fits):
        fits = [(head, _miss(head, z, p, weight)) for head in family(z, p, weight, kinds)]
        fits = [(head, miss) for head, miss in fits if miss <= tolerance and _resolved(head, z)]
        if fits:
            best = min(miss for _, miss in fits)
            close = [head for head, miss in fits if miss <= 2 * best + 2 * eps]
            if family is _plain_fits:
                _check_told_apart(close)
            return close[0]
    raise ValueError(unsupported_head(operation))


@dataclass(frozen=True)
class Vocabulary:
    """What a framework calls the operations that may stand in a head.

    Whether together they make one of the known kinds is found numerically; anything else (clamp, relu, tanh, where) is
    refused even if it is idle on every point that was tried.

    Parameters
    ----------
    moves : operations that move numbers about and leave them as they are
    lines : operations that can make an affine map
    curves : operations that are a kind of head by themselves, and which
    parts : operations of which a curve can be put together
    """

    moves: frozenset[str]
    lines: frozenset[str]
    curves: Mapping[str, str]
    parts: frozenset[str]

    def kinds(self, operations: Iterable[str]) -> tuple[str, ...]:
        """Kinds of head that the operations can make; none if one of them cannot stand in a head."""
        names = set(operations) - self.moves - self.lines
        if not names:
            return ("identity", "affine")
        if not names <= self.parts | self.curves.keys():
            return ()
        if len(names) == 1 and (name := names.pop()) in self.curves:
            return (self.curves[name],)
        return ("sigmoid", "softplus", "exp", "identity", "affine")

    def describe(self, operations: Iterable[str]) -> str:
        """Name the operations that matter: those that cannot stand in a head if there are any, else all but moves."""
        names = [name for name in dict.fromkeys(operations) if name not in self.moves]
        foreign = [name for name in names if name not in self.lines | self.parts | self.curves.keys()]
        return ", ".join(repr(name) for name in foreign or names) or "no operation that could be seen"


def unsupported_head(operation: str) -> str:
    """Error text for a head that is none of `KINDS`."""
    return (
        f"the prediction is made from the last linear layer's output by {operation}; only {', '.join(KINDS)} "
        "(each up to an affine map) are supported, because a refit works before the head and is scored after it. "
        "Take that operation out of the model and apply it to the predictions yourself."
    )


def _eps(values: Any) -> float:
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else float(np.finfo(np.float64).eps)


def _tolerance(eps: float) -> float:
    """Largest relative miss of a fit: some dozens of roundings, but few of bfloat16's, which are 0.8 % each."""
    return max(_TOLERANCE_FLOOR, min(64 * eps, 2e-3), 5 * eps)


def _check_varied(z: Array, p: Array, tolerance: float) -> None:
    if np.unique(z).size < _MIN_POINTS:
        raise ValueError(
            f"the last linear layer gives {np.unique(z).size} different outputs on this batch; telling which "
            f"head follows it needs at least {_MIN_POINTS}. Pass more rows, or check that the model is not constant."
        )
    if np.ptp(p) <= tolerance * np.abs(p).max():
        raise ValueError(
            f"the predictions are constant ({p[0]:.6g}) although the last linear layer's output varies: the head "
            "is saturated or ignores it, so there is nothing to refit. Check the model on this batch."
        )


def _plain_fits(z: Array, p: Array, weight: Array, kinds: Sequence[str]) -> Iterator[Head]:
    """Heads with inner map z, from few parameters to more."""
    if "identity" in kinds:
        yield Head("identity")
    if "affine" in kinds:
        yield _with_outer("affine", z, p, weight)
    for kind in ("sigmoid", "softplus", "exp"):
        if kind in kinds:
            yield Head(kind)
            yield _with_outer(kind, z, p, weight)


def _miss(head: Head, z: Array, p: Array, weight: Array) -> float:
    worst = float(np.max(np.abs(head.apply(z) - p) * weight))
    return worst if np.isfinite(worst) else np.inf


def _resolved(head: Head, z: Array) -> bool:
    """Whether enough points lie on the bend of a sigmoid or softplus: else it could as well be a step or a relu."""
    if head.kind not in ("sigmoid", "softplus"):
        return True
    on_bend = np.abs(head.inner_scale * z + head.inner_offset) <= 4
    return np.unique(z[on_bend]).size >= _MIN_POINTS


def _check_told_apart(close: Sequence[Head]) -> None:
    """Heads of two kinds that fit equally well on a batch would differ off it."""
    curves = {"a line" if head.kind in ("identity", "affine") else head.kind for head in close}
    if len(curves) > 1:
        raise ValueError(
            f"the last linear layer's outputs vary too little on this batch to tell {' from '.join(sorted(curves))} "
            "as the head of the model. Pass rows that differ more."
        )


def _with_outer(
    kind: str, z: Array, p: Array, weight: Array, inner_scale: float = 1.0, inner_offset: float = 0.0
) -> Head:
    """Least-squares scale and offset for given inner ones: min Σ wᵢ² (pᵢ − offset − scale·gᵢ)²."""
    g = Head(kind, inner_scale=inner_scale, inner_offset=inner_offset).apply(z)
    if not np.all(np.isfinite(g)) or np.ptp(g) == 0:
        return Head(kind, np.nan, np.nan, inner_scale, inner_offset)
    # Centring and scaling g keeps the two columns of the system independent when g is huge or nearly constant.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mass = weight**2 / np.sum(weight**2)
        centre_g, centre_p = mass @ g, mass @ p
        scale = float(mass @ ((g - centre_g) * (p - centre_p)) / (mass @ (g - centre_g) ** 2))
    return Head(kind, scale, float(centre_p - scale * centre_g), inner_scale, inner_offset)


def _general_fits(z: Array, p: Array, weight: Array, kinds: Sequence[str]) -> Iterator[Head]:
    """Heads with an inner map slope · (z − centre): a coarse search over it, then Gauss-Newton."""
    slopes = np.geomspace(0.5, 500.0, 14) / np.ptp(z)
    for kind in ("exp", "sigmoid", "softplus"):  # exp has a parameter less: its centre is a scale
        if kind in kinds:
            signed = slopes if kind == "sigmoid" else np.concatenate([slopes, -slopes])  # sigmoid(−u) = 1 − sigmoid(u)
            centres = np.array([np.median(z)]) if kind == "exp" else np.linspace(z.min(), z.max(), 9)
            yield _refine(kind, z, p, weight, signed, centres)


def _refine(kind: str, z: Array, p: Array, weight: Array, slopes: Array, centres: Array) -> Head:
    """Best head over slope and centre (over slope alone if there is one centre); scale and offset are solved for."""
    slope, centre = (grid.ravel() for grid in np.meshgrid(slopes, centres))
    function, _ = _FUNCTIONS[kind]
    mass = weight**2 / np.sum(weight**2)
    with np.errstate(all="ignore"):
        # What a regression of p on g leaves: var(p) − cov(g, p)² / var(g)
        g = function(slope[:, None] * (z - centre[:, None]))
        g = g - (g @ mass)[:, None]
        gain = (g @ (mass * (p - mass @ p))) ** 2 / (g**2 @ mass)
    start = int(np.argmax(np.where(np.isfinite(gain), gain, -1.0)))

    def head_at(inner: Sequence[float] | Array) -> Head:
        inner_scale, middle = float(inner[0]), float(inner[1]) if len(inner) > 1 else float(centres[0])
        return _with_outer(kind, z, p, weight, inner_scale, -inner_scale * middle)

    def residual(inner: Sequence[float] | Array, /) -> Array:
        with np.errstate(invalid="ignore"):
            miss = (head_at(inner).apply(z) - p) * weight
        return np.where(np.isfinite(miss), miss, 1e6)

    free = 1 if centres.size == 1 else 2
    sizes = (abs(slope[start]), np.ptp(z))[:free]
    first = (slope[start], centre[start])[:free]
    solved = least_squares(residual, first, x_scale=sizes, max_nfev=60, xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return head_at(solved.x)
