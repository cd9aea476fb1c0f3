"""Transport refit of the last layer: the least-squares refit plus λ_w · W₂² between the groups' outputs (DESIGN 2.4).

    min over u of   E(t − h·w − b)² + ρ‖w − w₀‖² + λ_w T(scale∘u),

u the whitened coordinates of ``Quadratic``, in which the first two terms are ``‖u − u_ridge‖² + constant``, and T the
mean pairwise W₂² of ``transport_bins``. One path over λ_w is the whole trade-off curve between error and parity.

The solver is L-BFGS whose metric is the Gauss-Newton curvature of the binned problem, ``I + λ_w BᵀB``: a step without
memory is DESIGN's *solve with fixed bins*, the memory learns what bins do not see. Value and gradient are exact (sorted
outputs), so every step lowers the exact objective and the number of bins changes only the speed. T is a minimum of
quadratics, one for each order of the rows, so it has many valleys where λ_w is strong and rows are few; a warm-started
path whose points help each other ends in good ones, on average below those of a plain L-BFGS.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log

import numpy as np
from numpy.typing import ArrayLike

from esvdfair.core.refit.quadratic import Quadratic
from esvdfair.core.refit.transport_bins import Array, Coupling, TransportProblem

__all__ = ["DEFAULT_STRENGTHS", "TransportFit", "TransportProblem", "transport_path"]

# A mean gap of length δ in the whitened features is divided by 1 + λ_w δ². So these serve any data, from groups far
# apart (δ² = 10, half the gap gone at λ_w = 0.1) to a gap barely seen (δ² = 0.06, KS of 0.10, a tenth left at 150).
DEFAULT_STRENGTHS: tuple[float, ...] = (0.0, *np.geomspace(0.02, 200.0, 24).tolist())

_MAX_STEPS = 100
_PATIENCE = 3  # so many negligible decreases in a row end the descent
_MEMORY = 10
_REBIN_EVERY = 10
_ARMIJO = 1e-4
_MAX_TRIALS = 12
_WEAK, _RUNG = 0.03, 3.0  # up to λ_w = 0.03 a cold start is safe; beyond, no step of the path multiplies λ_w by more
_SMALL = 100_000  # up to so many numbers in the rows, further sweeps cost little, and there they gain most


@dataclass(frozen=True)
class TransportFit:
    """The refitted layer at one strength.

    Attributes
    ----------
    weight, bias : (p,) and float
    strength : λ_w
    mse : E(t − h·w − b)² over the rows of the moments
    objective : mse + ridge term + λ_w · wasserstein2_squared
    wasserstein2_squared : exact mean pairwise W₂² between the groups' outputs, over the rows of the problem
    iterations : descent steps taken at this strength
    converged : the descent ended because the objective no longer fell, not because the steps ran out
    coordinates : (r,) u
    """

    weight: Array
    bias: float
    strength: float
    mse: float
    objective: float
    wasserstein2_squared: float
    iterations: int
    converged: bool
    coordinates: Array


def transport_path(
    problem: TransportProblem,
    quadratic: Quadratic,
    *,
    strengths: Sequence[float] = DEFAULT_STRENGTHS,
    start: ArrayLike | None = None,
    tolerance: float = 1e-4,
    sweeps: int | None = None,
) -> tuple[TransportFit, ...]:
    """Refits at every strength λ_w, each warm-started from the others.

    Strengths are solved in ascending order (with more in between where they lie far apart), and every point found is
    a candidate at all of them. So at each strength the objective is at most that of the ridge solution, of a constant
    predictor and of ``start``; and along ascending strengths W₂² never rises and the quadratic never falls.

    Parameters
    ----------
    problem : rows, groups and weights; its columns are the axes of ``quadratic.space``, its rows may be a sample
    quadratic : target and ridge
    strengths : λ_w ≥ 0, a pure number (error and W₂² have the same unit); 0 gives the ridge solution
    start : (r,) whitened coordinates of a further candidate
    tolerance : a relative decrease of the objective below this no longer counts
    sweeps : further passes, down and up the path in turn, each strength from its neighbour's solution; they find better
        valleys. Default: 4 when the rows hold at most 100,000 numbers, else none

    Returns
    -------
    One fit for each strength, in the order given.

    Raises
    ------
    ValueError
        For strengths that are negative or not finite, and for shapes that do not fit each other.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r}; expected a positive number.")
    if sweeps is None:
        sweeps = 4 if problem.rows * problem.rank <= _SMALL else 0
    if sweeps < 0:
        raise ValueError(f"sweeps={sweeps!r}; expected 0 or more further passes.")
    return _Path(problem, quadratic, start, tolerance).fits(_checked_strengths(strengths), sweeps)


@dataclass(frozen=True)
class _Point:
    """Coordinates with what is known there; ``distance`` is ‖u − u_ridge‖²."""

    u: Array
    outputs: Array
    coupling: Coupling
    distance: float

    def loss(self, strength: float) -> float:
        """The objective without the constant of the quadratic."""
        return self.distance + strength * self.coupling.value


@dataclass
class _Outcome:
    """The best point that a descent at one strength has ended in."""

    point: _Point
    steps: int
    converged: bool


class _Path:
    """The points found so far, and the curvature learned on the way, for one quadratic."""

    def __init__(
        self, problem: TransportProblem, quadratic: Quadratic, start: ArrayLike | None, tolerance: float
    ) -> None:
        if problem.rank != len(quadratic.minimiser):
            raise ValueError(
                f"the problem's rows have {problem.rank} columns, the quadratic has {len(quadratic.minimiser)} axes; "
                "rotate the features with the space of the same quadratic."
            )
        self.problem, self.quadratic, self.tolerance = problem, quadratic, tolerance
        self.floor = quadratic.objective(quadratic.minimiser)
        self.memory: deque[tuple[Array, Array]] = deque(maxlen=_MEMORY)  # (s, change of ½∇T along s)
        candidates = [quadratic.minimiser, np.zeros(problem.rank)]
        if start is not None:
            candidates.append(_checked_start(start, problem.rank))
        self.points = [self._exact(u) for u in candidates]
        self.outcomes: dict[float, _Outcome] = {}

    def fits(self, strengths: Array, sweeps: int) -> tuple[TransportFit, ...]:
        asked = sorted(set(strengths.tolist()))
        rungs = _rungs(max(asked, default=0.0), beyond=2 if sweeps else 0)
        if sweeps:
            self._explore(rungs, sweeps)
        else:  # only where the strengths asked for lie too far apart to be followed
            asked = sorted({*asked, *(r for r in rungs if not any(r / _RUNG < s <= r for s in asked))})
        for strength in asked:
            self._descend(strength, self._best(strength))
        for strength in reversed(asked):  # another strength may have found a better valley
            best = self._best(strength)
            if best.loss(strength) < self.outcomes[strength].point.loss(strength):
                self._descend(strength, best)
        return tuple(self._fit(strength) for strength in strengths.tolist())

    def _explore(self, rungs: list[float], sweeps: int) -> None:
        """Up the rungs, then down and up in turn, each from its neighbour's solution: every pass tries new valleys."""
        for strength in rungs:
            self._descend(strength, self._best(strength))
        for sweep in range(sweeps):
            for neighbour, strength in pairwise(rungs if sweep % 2 else rungs[::-1]):
                self._descend(strength, self._best(neighbour))

    def _fit(self, strength: float) -> TransportFit:
        point, outcome = self._best(strength), self.outcomes[strength]
        weight, bias = self.quadratic.layer(point.u)
        return TransportFit(
            weight=weight,
            bias=bias,
            strength=strength,
            mse=self.quadratic.mse(point.u),
            objective=self.quadratic.objective(point.u) + strength * point.coupling.value,
            wasserstein2_squared=point.coupling.value,
            iterations=outcome.steps,
            converged=outcome.converged,
            coordinates=point.u,
        )

    def _best(self, strength: float) -> _Point:
        return min(self.points, key=lambda point: point.loss(strength))

    def _exact(self, u: Array) -> _Point:
        return self._point(u, self.problem.outputs(self.quadratic.scale * u))

    def _point(self, u: Array, outputs: Array) -> _Point:
        change = u - self.quadratic.minimiser
        return _Point(u, outputs, self.problem.couple(outputs), float(change @ change))

    # --- one strength ------------------------------------------------------------------------------------------

    def _descend(self, strength: float, point: _Point) -> None:
        """L-BFGS in the metric of the bins from the given point; the one it ends in joins the others."""
        steps, small, t = 0, 0, 1.0
        pull = self._pull(point)
        while steps < _MAX_STEPS and small < _PATIENCE:
            if steps % _REBIN_EVERY == 0:
                metric = self._bin_metric(point.coupling, strength)
            gradient = point.u - self.quadratic.minimiser + strength * pull
            step = -self._inverse_hessian(gradient, strength, metric)
            fall = -float(gradient @ step)  # the decrease that the quadratic model expects
            negligible = self.tolerance * (self.floor + point.loss(strength))
            if fall <= 0.1 * negligible:
                break
            trial, t = self._line_search(point, step, fall, strength, min(1.0, 2 * t))
            if trial is None:
                break
            before, pull = pull, self._pull(trial)
            self.memory.append((trial.u - point.u, pull - before))
            small = small + 1 if point.loss(strength) - trial.loss(strength) < negligible else 0
            point, steps = trial, steps + 1
        self._record(strength, self._exact(point.u), steps)  # the descent ran on float32 products

    def _record(self, strength: float, point: _Point, steps: int) -> None:
        self.points.append(point)
        outcome = self.outcomes.setdefault(strength, _Outcome(point, 0, False))
        outcome.steps += steps
        if point.loss(strength) <= outcome.point.loss(strength):
            outcome.point, outcome.converged = point, steps < _MAX_STEPS

    def _pull(self, point: _Point) -> Array:
        """½ ∇T in whitened coordinates."""
        pull: Array = self.quadratic.scale * self.problem.half_gradient(point.coupling)
        return pull

    def _line_search(
        self, point: _Point, step: Array, fall: float, strength: float, t: float
    ) -> tuple[_Point | None, float]:
        """Shorten t by quadratic interpolation until Armijo holds. Outputs are linear in the step: one product.

        A short enough t exists: with the order of the rows kept, the objective is a quadratic of slope −2·fall, and
        the true one lies below it.
        """
        before, moved = point.loss(strength), self.problem.fast_outputs(self.quadratic.scale * step)
        for _ in range(_MAX_TRIALS):
            trial = self._point(point.u + t * step, point.outputs + t * moved)
            rise = trial.loss(strength) - before
            if rise <= -2 * _ARMIJO * t * fall:
                return trial, t
            t *= float(np.clip(t * fall / (rise + 2 * t * fall), 0.1, 0.5))
        return None, t

    def _bin_metric(self, coupling: Coupling, strength: float) -> Callable[[Array], Array]:
        """x ↦ (I + λ_w BᵀB)⁻¹ x, by Woodbury when there are fewer bins than coordinates."""
        b = np.sqrt(strength) * self.problem.bin_contrasts(coupling) * self.quadratic.scale
        if len(b) < b.shape[1]:
            small = np.linalg.inv(b @ b.T + np.eye(len(b)))
            return lambda x: x - (small @ (b @ x)) @ b
        inverse = np.linalg.inv(b.T @ b + np.eye(b.shape[1]))
        return lambda x: inverse @ x

    def _inverse_hessian(self, x: Array, strength: float, metric: Callable[[Array], Array]) -> Array:
        """The two-loop recursion. The memory holds T's curvature alone, ``y = s + λ_w·bend``: it outlives λ_w."""
        pairs = [
            (s, y, sy) for s, bend in self.memory if (sy := float(s @ (y := s + strength * bend))) > 0.01 * (s @ s)
        ]
        x, parts = x.copy(), []
        for s, y, sy in reversed(pairs):
            parts.append(float(s @ x) / sy)
            x -= parts[-1] * y
        x = metric(x)
        for (s, y, sy), part in zip(pairs, reversed(parts), strict=True):
            x += (part - float(y @ x) / sy) * s
        return x


def _rungs(strongest: float, *, beyond: int) -> list[float]:
    """Strengths in steps short enough to follow, below the strongest asked for and some past it."""
    if strongest <= _WEAK:
        return []
    count = ceil(log(strongest / _WEAK) / log(_RUNG)) + beyond
    return [_WEAK * _RUNG**k for k in range(1, count)]


def _checked_strengths(strengths: Sequence[float]) -> Array:
    values = np.asarray(strengths, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"strengths={strengths!r}; expected a sequence of finite numbers that are not negative.")
    return values


def _checked_start(start: ArrayLike, rank: int) -> Array:
    u = np.asarray(start, dtype=np.float64)
    if u.shape != (rank,) or not np.isfinite(u).all():
        raise ValueError(f"start has shape {u.shape}; expected ({rank},) finite whitened coordinates.")
    return u
