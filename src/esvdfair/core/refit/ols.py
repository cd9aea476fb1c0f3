"""Least-squares refit of the last layer."""

import numpy as np
from numpy.typing import ArrayLike

from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.quadratic import FeatureSpace, Fit, Quadratic


def fit_ols(
    moments: GroupMoments, *, target: int, original: ArrayLike, ridge: float = 0.0, intercept: bool = True
) -> Fit:
    """Least squares with an intercept: ``min over w, b of E(t − h·w − b)² + ρ‖w − w₀‖²``.

    Parameters
    ----------
    moments : of the rows ``[h, ...]``: p features first, the target in a later column
    target : column of the target t
    original : (p,) w₀, the weights of the trained layer
    ridge : ρ, relative to the mean variance of the features. With 0 the directions that no row moves along (dead
        or redundant units) keep w₀: of all least-squares solutions this is the one nearest to it.
    intercept : whether the layer has a bias; without one b = 0

    Notes
    -----
    Differs from the paper: its refit inverts ``HᵀH``, which dead units make singular, has no intercept and is not
    transposed. A plain refit also brings the gap back that an edit of the layer below took out: the edited features
    still carry the group, and least squares finds it. See :mod:`esvdfair.core.refit.parity`.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 3.0], [2.0, 0.0, 5.0], [3.0, 0.0, 7.0]])  # h₁, a dead unit, t
    >>> fit = fit_ols(GroupMoments().update(rows, [0, 1, 0, 1]), target=2, original=[0.0, 0.5])
    >>> fit.weight.round(6).tolist(), round(fit.bias, 6)
    ([2.0, 0.5], 1.0)
    """
    quadratic = quadratic_of(moments, target=target, original=original, ridge=ridge, intercept=intercept)
    return quadratic.fit(quadratic.minimiser)


def quadratic_of(
    moments: GroupMoments, *, target: int, original: ArrayLike, ridge: float, intercept: bool
) -> Quadratic:
    """The quadratic of a layer with as many features as ``original`` has weights; ``target`` is a later column."""
    p = np.size(original)
    if not p <= target < moments.width:
        raise ValueError(
            f"target={target}, but with {p} weights the features are columns 0 to {p - 1} of {moments.width}; "
            f"the target must be one of the columns from {p} on."
        )
    space = FeatureSpace.from_moments(moments, p, intercept=intercept)
    return Quadratic.from_moments(moments, space=space, target=target, original=original, ridge=ridge)
