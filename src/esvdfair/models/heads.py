"""Which `Head` maps the last linear layer's output to the prediction, found from pairs of the two."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from esvdfair.core.refit.quadratic import KINDS, Head

Array = NDArray[np.float64]

_MIN_POINTS = 8
_TOLERANCE_FLOOR = 1e-9  # torch's softplus is the identity above 20: 2e-9 from the formula, in float64 too


def find_head(
    z: Any,
    prediction: Any,
    *,
    kinds: Sequence[str] = KINDS,
    operation: str = "an unknown operation",
    eps: float | None = None,
) -> Head:
    """Find the head, of some kinds, that maps outputs of the last layer `z` (n,) to `prediction` (n,).

    `operation`, what the adapter knows to stand between the two, is named in the error. `eps` is the relative spacing
    of the arithmetic that made `prediction` (0.0078 for bfloat16; by default the coarser of the two dtypes).

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
    mass = weight**2 / np.sum(weight**2)
    with np.errstate(all="ignore"):
        # What a regression of p on g leaves: var(p) − cov(g, p)² / var(g)
        g = Head(kind).apply(slope[:, None] * (z - centre[:, None]))
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
