"""What maps the output of the last linear layer to the prediction: a `Head`, found by trying values."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from esvdfair.core.quadratic import KINDS, Head

Array = NDArray[np.float64]
Run = Callable[[Array], tuple[NDArray[Any], NDArray[Any]]]
"""Takes outputs of the last layer to those that the model's arithmetic holds, and to predictions."""

# What torch and ONNX call the operations that make the known kinds of head, in lower case. Whether together they make
# one of them is found numerically; with anything else (clamp, relu, tanh, where) the head is some monotone function.
_MOVES = frozenset({  # move numbers about and leave them as they are
    "view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "squeeze", "unsqueeze", "select", "slice", "t",
    "transpose", "permute", "expand", "clone", "alias", "identity", "detach", "_to_copy", "cast", "castlike", "copy",
    "contiguous", "unbind", "split", "split_with_sizes", "index", "index_select", "gather", "concat", "cat", "stack",
    "lift_fresh", "dropout",
})  # fmt: skip
_LINES = frozenset({  # can make an affine map
    "add", "sub", "rsub", "mul", "div", "neg", "addmm", "mm", "bmm", "addmv", "mv", "dot", "linear", "addcmul", "sum",
    "mean", "reducesum", "reducemean", "batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_no_update", "batchnormalization", "scaler",
})  # fmt: skip
_CURVES = frozenset({"sigmoid", "softplus"})  # are a kind of head by themselves
_PARTS = frozenset({  # a curve can be put together of them
    "exp", "exp2", "expm1", "log", "log1p", "reciprocal", "pow", "logaddexp", "log_sigmoid_forward", "_softmax",
    "softmax",
})  # fmt: skip

_QUANTILES = 64  # of a batch, the first of the points at which a head is looked at
_MAX_KNOTS = 20_000  # of a head that is followed point by point
_PLACES = np.array([0.13, 0.71, 0.382])  # in a piece, from the last: not the middle, where an odd function is a line
_MIN_POINTS = 8  # different outputs of the last layer, to tell which head follows it


def name_operations(operations: Iterable[str]) -> tuple[str, Sequence[str]]:
    """Operations as an error names them, and the kinds of head that they can make.

    Those that are in no known kind are named alone, and make none.
    """
    names = [name for name in dict.fromkeys(operations) if name.lower() not in _MOVES]
    foreign = [name for name in names if name.lower() not in _LINES | _CURVES | _PARTS]
    text = ", ".join(map(repr, foreign or names)) or "no operation that could be seen"
    bends = {name.lower() for name in names} - _LINES
    if foreign:
        return text, ()
    if not bends:
        return text, ("identity", "affine")
    return text, tuple(bends) if len(bends) == 1 and bends <= _CURVES else KINDS


def probe_points(z: Any) -> Array:
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
    inside = np.quantile(flat, np.linspace(0.0, 1.0, _QUANTILES))
    beyond = np.linspace(middle - reach, middle + reach, 64)
    return np.concatenate([inside, beyond, np.linspace(-8.0, 8.0, 64)])


def find_head(
    z: Any,
    prediction: Any,
    *,
    kinds: Sequence[str] = KINDS,
    operation: str = "an unknown operation",
    eps: float | None = None,
    run: Run | None = None,
) -> Head:
    """Find the head, of some kinds, that maps outputs of the last layer `z` (n,) to `prediction` (n,).

    `operation`, what the adapter knows to stand between the two, is named in the error. `eps` is the relative spacing
    of the arithmetic that made `prediction` (0.0078 for bfloat16; by default the coarser of the two dtypes). `run` is
    the head itself, which is followed point by point where no kind fits. That it is not monotone, that `z` varies too
    little to tell, or `prediction` not at all, is a `ValueError`.
    """
    eps = eps or spacing(z, prediction)
    # Some dozens of roundings, but few of bfloat16's, which are 0.8 % each; and torch's softplus is the identity above
    # 20, which is 2e-9 from the formula in float64 too.
    tolerance = max(1e-9, min(64 * eps, 2e-3), 5 * eps)
    z, p = (np.asarray(values, dtype=np.float64).ravel() for values in (z, prediction))
    low, high = np.min(z[:_QUANTILES], initial=np.inf), np.max(z[:_QUANTILES], initial=-np.inf)
    beyond = np.isnan(p) & ((z < low) | (z > high))  # of the batch, and of the domain of a root or a logarithm
    usable = np.isfinite(z) & ~np.isinf(p) & ~beyond  # inf is an overflow of the model's dtype
    z, p = z[usable], p[usable]
    _check_spread(z, p, tolerance, operation)
    # Rounding is relative to p, but where p passes through zero the terms it is made of are not small.
    weight = 1.0 / np.maximum(np.abs(p), np.median(np.abs(p[p != 0])))
    for family in (_plain_fits, _general_fits):
        fits = [(head, float(np.max(np.abs(head.apply(z) - p) * weight))) for head in family(z, p, weight, kinds)]
        fits = [(head, miss) for head, miss in fits if miss <= tolerance and _resolved(head, z)]  # NaN is none
        if fits:
            return _simplest(fits, eps, family is _plain_fits)
    if run is not None and (followed := _follow(run, z, eps)) is not None:
        return followed
    raise ValueError(
        f"the prediction is made from the last linear layer's output by {operation}, which is not continuous and "
        "monotone. Take that operation out of the model and apply it to the predictions yourself."
    )


def _simplest(fits: Sequence[tuple[Head, float]], eps: float, plain: bool) -> Head:
    """The simplest of the heads that fit alike; plain ones of different kinds would differ off the batch."""
    best = min(miss for _, miss in fits)
    heads = [head for head, miss in fits if miss <= 2 * best + 2 * eps]
    shapes = {"a line" if head.is_affine else head.kind for head in heads}
    if len(shapes) > 1 and plain:
        raise ValueError(
            "the last linear layer's outputs vary too little on this batch to distinguish "
            f"{' from '.join(sorted(shapes))} as the head of the model. Pass rows that differ more."
        )
    return heads[0]


def _check_spread(z: Array, p: Array, tolerance: float, operation: str) -> None:
    """Raise unless outputs of the layer and predictions vary enough to find a head."""
    if np.isnan(p).any():  # a logarithm or a root, outside its domain
        raise ValueError(
            f"the prediction is made from the last linear layer's output by {operation}, which is NaN for "
            f"{z[np.isnan(p)][0]:.3g}. Use one that is defined everywhere, such as exp or a QuantileTransformer."
        )
    if np.unique(z).size < _MIN_POINTS:
        raise ValueError(
            f"the last linear layer gives {np.unique(z).size} different outputs on this batch; finding the head that "
            f"follows it needs at least {_MIN_POINTS}. Pass more rows, or check that the model is not constant."
        )
    if np.ptp(p) <= tolerance * np.abs(p).max():
        raise ValueError(
            f"the predictions are constant ({p[0]:.6g}) although the last linear layer's output varies: the head "
            "is saturated or ignores it, so there is nothing to refit. Check the model on this batch."
        )


def _follow(run: Run, z: Array, eps: float) -> Head | None:
    """A monotone head as points, so many that lines between them are right to 3e-7; None if it is not monotone."""
    spread = run(z[:_QUANTILES])[1].astype(np.float64)
    z, p = (np.asarray(found, dtype=np.float64).ravel() for found in run(np.unique(z)))
    z, first = np.unique(z, return_index=True)
    p = p[first]
    middle, scale = float(np.median(spread)), float(np.ptp(spread)) or 1e-3 * float(np.ptp(p))
    tolerance, narrow = max(3e-7, min(64 * eps, 0.02)), 16 * eps * float(np.abs(z).max())
    left = np.full(len(z) - 1, len(_PLACES))  # places of each piece that are to be looked at
    for _ in range(60):
        wide = np.flatnonzero((left > 0) & (np.diff(z) > narrow))
        if not wide.size or len(z) > _MAX_KNOTS:
            break
        left[wide] -= 1
        new_z, new_p = (
            np.asarray(found, dtype=np.float64).ravel()
            for found in run(z[wide] + _PLACES[left[wide]] * np.diff(z)[wide])
        )
        allowed = tolerance * np.maximum(scale, np.abs(new_p - middle))
        miss = (np.abs(new_p - np.interp(new_z, z, p)) > allowed) & (new_z > z[wide]) & (new_z < z[wide + 1])
        at = wide[miss] + 1
        z, p = np.insert(z, at, new_z[miss]), np.insert(p, at, new_p[miss])
        left = np.insert(left, at, 0)
        inserted = at + np.arange(len(at))
        left[inserted] = left[inserted - 1] = len(_PLACES)
    falls, sizes = p[-1] < p[0], np.maximum(scale, np.abs(p - middle))
    jumps = (np.diff(z) <= narrow) & (np.abs(np.diff(p)) > 0.01 * sizes[1:])  # which the coarse dtypes have everywhere
    if jumps.any() and eps < 1e-4:
        return None
    rising = np.maximum.accumulate(-p if falls else p)
    if np.max((rising - (-p if falls else p)) / sizes) > tolerance:
        return None
    return Head("monotone", knots=(z, -rising if falls else rising))


def _plain_fits(z: Array, p: Array, weight: Array, kinds: Sequence[str]) -> Iterator[Head]:
    """Heads with inner map z, from few parameters to more."""
    for kind in KINDS:
        if kind in kinds and kind != "affine":
            yield Head(kind)
        if kind in kinds and kind != "identity":
            yield _with_outer(kind, z, p, weight)


def _resolved(head: Head, z: Array) -> bool:
    """Whether enough points lie on the bend of a sigmoid or softplus: else it could as well be a step or a relu."""
    on_bend = np.abs(head.inner_scale * z + head.inner_offset) <= 4
    return head.kind not in _CURVES or np.unique(z[on_bend]).size >= _MIN_POINTS


def _with_outer(
    kind: str, z: Array, p: Array, weight: Array, inner_scale: float = 1.0, inner_offset: float = 0.0
) -> Head:
    """Least-squares scale and offset for given inner ones: min Σ wᵢ² (pᵢ − offset − scale·gᵢ)²."""
    g = Head(kind, inner_scale=inner_scale, inner_offset=inner_offset).apply(z)
    # Centring and scaling g keeps the two columns of the system independent when g is huge or nearly constant.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # scale and offset are NaN where none fits
        mass = weight**2 / np.sum(weight**2)
        centre_g, centre_p = mass @ g, mass @ p
        scale = float(mass @ ((g - centre_g) * (p - centre_p)) / (mass @ (g - centre_g) ** 2))
    return Head(kind, scale, float(centre_p - scale * centre_g), inner_scale, inner_offset)


def _general_fits(z: Array, p: Array, weight: Array, kinds: Sequence[str]) -> Iterator[Head]:
    """Heads with an inner map slope · (z − centre): a coarse search over it, then Gauss-Newton."""
    slopes = np.geomspace(0.5, 500.0, 14) / np.ptp(z)
    both = np.concatenate([slopes, -slopes])
    centres = np.linspace(z.min(), z.max(), 9)
    if "exp" in kinds:
        yield _refine("exp", z, p, weight, both, np.array([np.median(z)]))  # its centre is a scale
    if "sigmoid" in kinds:
        yield _refine("sigmoid", z, p, weight, slopes, centres)  # sigmoid(−u) = 1 − sigmoid(u)
    if "softplus" in kinds:
        yield _refine("softplus", z, p, weight, both, centres)


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

    def head_at(inner: Array) -> Head:
        inner_scale, middle = (float(value) for value in (*inner, centres[0])[:2])
        return _with_outer(kind, z, p, weight, inner_scale, -inner_scale * middle)

    def residual(inner: Array, /) -> Array:
        with np.errstate(invalid="ignore"):
            miss = (head_at(inner).apply(z) - p) * weight
        return np.where(np.isfinite(miss), miss, 1e6)

    free = min(centres.size, 2)
    sizes, first = (abs(slope[start]), np.ptp(z))[:free], (slope[start], centre[start])[:free]
    solved = least_squares(residual, first, x_scale=sizes, max_nfev=60, xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return head_at(solved.x)


def spacing(*values: NDArray[Any]) -> float:
    """Relative spacing of the coarsest of the arrays' dtypes."""
    return max(float(np.finfo(array.dtype).eps) for array in values)


def close(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    """Whether two computations of the same values differ by some roundings at most."""
    finite = np.abs(a[np.isfinite(a)])
    size = float(np.median(finite)) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True))


def same_values(a: NDArray[Any], b: NDArray[Any], eps: float) -> bool:
    """Whether predictions differ by no more than what another order of summation in a deep model may do to them."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True  # refused elsewhere, with a count of them
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.abs(a - b).max() <= rounding(a, eps))


def rounding(a: Array, eps: float) -> float:
    """What another order of summation may do to predictions."""
    return min(max(1e-6, 2**13 * eps), 0.1) * float(np.ptp(a)) + 64 * eps * float(np.abs(a).max())
