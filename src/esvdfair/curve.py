"""The trade-off curve: what every candidate reaches on validation rows, the rule that picks one, and its summary.

``target_ks`` speaks of the population, not of a sample (docs/method.md 2.7), and of every pair of groups: a point meets
it when the estimate of each pair does and, where a confidence was asked for, when it is certified too.
:meth:`Curve.meets` is the one place that decides it; the choice, the warning, the summary and the exit code of a
command all ask it.

A long file, since every fit passes through all of it: another would be one more stop.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import ndtr

from esvdfair.batches import Rows
from esvdfair.core.checks import Label, label_text
from esvdfair.core.ks import (
    Groups,
    Ranked,
    adjusted_weights,
    ks_between,
    outside_support,
    upper_bound,
)
from esvdfair.core.pairs import Comparison, Pairs, meets, rising
from esvdfair.core.quadratic import Fit
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.methods import UNTOUCHED, Candidates, Effort, Problem, outputs, weights_of
from esvdfair.models.base import ModelAdapter, Weights

Array = NDArray[np.float64]

PARITY = 0.05
"""KS distance that is near enough to parity where no target was given."""
KEPT = 0.5
"""Part of the explained variance below which a repair gives up most of it."""
DIGITS = 1e-9
"""Part of its scale to which a prediction, an error or a distance is rounded before it is compared."""
FLAT = 0.01
"""Part of the original model's standard deviation below which a model is called a constant."""
LARGER = 0.25
"""Weight of the larger of two estimates beside their mean; chosen on seeds 1 to 20 (docs/method.md 2.7)."""
SHOWN_PAIRS = 100
"""Most pairs of groups that a summary lists."""


@dataclass(frozen=True)
class CurvePoint:
    """One repaired model on the trade-off curve, evaluated on validation rows.

    Attributes
    ----------
    mse, r2, ks, mean_gap, variance_gap : on the validation rows
    ks_low, ks_high : 95% interval of the population KS, computed when it is asked for
    ks_upper : one-sided bound of the population KS, at the curve's confidence, 95% where none was asked for
    target : what the refit aimed at: "labels", "predictions", "optimum 0.05"; "untouched" is the original model
    ridge : ρ, relative to the features' variances
    strength : λ_w of transport, the factor on the reductions for paper and exact, …: 0 is the weakest
    ks_population : estimated population KS, the largest over the pairs of groups
    ks_pairs : estimated population KS of every pair, in the order of ``Curve.pairs``; the rule compares these
    ks_certified : smallest target that it is certified for; None where no confidence was asked for
    constant : whether it has become one prediction for everybody
    index : position in ``Curve.points``; a point can be used wherever its index can
    """

    mse: float
    r2: float
    ks: float
    mean_gap: float
    variance_gap: float
    target: str
    ridge: float
    strength: float
    ks_population: float
    ks_pairs: tuple[float, ...]
    ks_certified: float | None
    constant: bool
    index: int
    measure: Callable[[], tuple[float, float, float]] | None = field(default=None, repr=False, compare=False)

    def __index__(self) -> int:
        return self.index

    @cached_property
    def _bounds(self) -> tuple[float, float, float]:
        assert self.measure is not None
        return self.measure()

    @property
    def ks_low(self) -> float:
        return self._bounds[0]

    @property
    def ks_high(self) -> float:
        return self._bounds[1]

    @property
    def ks_upper(self) -> float:
        return self._bounds[2]

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies, which hold numbers and no validation rows."""
        return {**self.__dict__, "_bounds": self._bounds, "measure": None}

    def to_dict(self) -> dict[str, Any]:
        """All figures of the point by name."""
        names = [each.name for each in fields(self) if each.name not in ("measure", "index", "ks_pairs")]
        at = names.index("ks") + 1
        names = [*names[:at], "ks_low", "ks_high", *names[at:]]
        names.insert(names.index("ks_population") + 1, "ks_upper")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, repr=False)
class Curve:
    """Points from the most accurate to the fairest; ``model(i)`` builds the model of one without refitting.

    Attributes
    ----------
    points : tuple of CurvePoint, by falling estimated population KS
    pairs : the pairs of groups that are compared
    pair_floors : noise level of every pair: the mean KS that chance alone produces at these group sizes
    pair_resolved : the smallest population KS of every pair that these rows can tell from parity
    pair_rows : effective rows of every pair, ``1/(1/n₁ + 1/n₂)``
    evaluated_on : "validation", "heldout", "train" or "test"
    weights : of every point, what it puts in place of the layers of the model
    adapter : of the original model, which the models of the curve are copies of
    candidates : of every point, which of the candidates it is
    original_pairs, original_floors : estimate and noise level of every pair for the original model, where that is
        compared on all rows; ``ks_pairs`` of its point is what other points can be compared with
    confidence, certificate : of the certificates; no confidence, no certificates
    mse_refit : error of the last layer refitted without fairness constraint; None where it is not known
    refit : that layer
    """

    points: tuple[CurvePoint, ...]
    pairs: tuple[tuple[Label, Label], ...]
    pair_floors: tuple[float, ...]
    pair_resolved: tuple[float, ...]
    pair_rows: tuple[float, ...]
    evaluated_on: str
    weights: tuple[Weights, ...]
    adapter: ModelAdapter
    candidates: tuple[int, ...] = ()
    original_pairs: tuple[float, ...] = ()
    original_floors: tuple[float, ...] = ()
    confidence: float | None = None
    certificate: str = "normal"
    mse_refit: float | None = None
    refit: Fit | None = None

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        first, last = self.points[0], self.points[-1]
        return (
            f"Curve({len(self)} points, evaluated on {self.evaluated_on!r}: MSE {first.mse:.4g} at KS {first.ks:.3f} "
            f"to MSE {last.mse:.4g} at KS {last.ks:.3f})"
        )

    @property
    def untouched(self) -> CurvePoint | None:
        """The original model; None where it was no candidate."""
        return next((point for point in self.points if point.target == UNTOUCHED), None)

    @property
    def ks_floor(self) -> float:
        """The largest noise level of any pair."""
        return max(self.pair_floors)

    @property
    def ks_resolved(self) -> float:
        """The smallest population KS that these rows can tell from parity for every pair."""
        return max(self.pair_resolved)

    def estimates(self, point: CurvePoint) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Estimated population KS of every pair, and its noise level: what is compared with a target."""
        if point.target == UNTOUCHED and self.original_pairs:
            return self.original_pairs, self.original_floors
        return point.ks_pairs, self.pair_floors

    def told(self, target_ks: float) -> NDArray[np.bool_]:
        """(P,) whether the noise level of each pair is below the target; else the target cannot be told."""
        return np.asarray(self.pair_floors) <= target_ks

    def meets(self, point: CurvePoint, target_ks: float) -> bool:
        """Whether a point keeps the target, for every pair of groups.

        Each estimate is within the target, no pair's noise level exceeds it and, where confidence was asked for, the
        point is certified.
        """
        certified = point.ks_certified is None or point.ks_certified <= target_ks
        return certified and meets(*self.estimates(point), target_ks)

    def _limits(self, target_ks: float) -> Array:
        """(P,) what the estimate of each pair may be for a point to be chosen.

        A pair whose noise level exceeds the target does not drive the choice; where that is so of all, the target
        counts as what these rows can tell from parity: to go further would be to pay for noise.
        """
        told = self.told(target_ks)
        if self.confidence is not None or told.all():
            return np.full(len(self.pairs), target_ks)
        return np.where(told, target_ks, np.inf) if told.any() else np.maximum(target_ks, self.pair_resolved)

    def select(self, *, target_ks: float) -> CurvePoint:
        """The point to take for this target.

        - The original model, if it meets the target already.
        - Else the most accurate point that meets the target.
        - If none does, the most accurate of those that these rows cannot tell from the fairest.

        A pair of groups whose noise level exceeds the target does not drive the choice. If that is so of all pairs, a
        target below what these rows can tell from parity counts as that.
        """
        if self.untouched is not None and self.meets(self.untouched, target_ks):
            return self.untouched
        compared = {p.index: self.estimates(p)[0] if self.told(target_ks).any() else p.ks_pairs for p in self.points}
        return self._within(self._limits(target_ks), compared, target_ks)

    def closest_to_parity(self) -> CurvePoint:
        """The point to take without a target: as for 0.05, or for what these rows can tell from parity if more."""
        compared = {point.index: point.ks_pairs for point in self.points}
        return self._within(np.maximum(PARITY, self.pair_resolved), compared, np.inf)

    def _within(self, limits: Array, compared: Mapping[int, Sequence[float]], certified_for: float) -> CurvePoint:
        """The original model, or the most accurate point, whose pairs, in ``compared`` by index, keep limits (P,)."""
        certified = [p for p in self.points if p.ks_certified is None or p.ks_certified <= certified_for]
        meeting = [point for point in certified if (np.asarray(compared[point.index]) <= limits).all()]
        if self.untouched in meeting:
            assert self.untouched is not None
            return self.untouched
        if not meeting:
            driving = np.isfinite(limits)
            largest = np.array([np.asarray(p.ks_pairs)[driving].max() for p in self.points])
            alike = np.hypot(largest.min(), np.asarray(self.pair_resolved)[driving].max())
            meeting = [point for point, ks in zip(self.points, largest, strict=True) if ks <= alike]
        return _most_accurate(meeting)

    def model(self, i: int) -> Any:
        """The repaired model of point i, of the type of the original model."""
        return self.adapter.replace(self.weights[range(len(self.points))[i]]).model

    def to_frame(self) -> pd.DataFrame:
        """One row for each point; ``ks_population`` and ``ks_certified`` are what the rule compares with a target."""
        frame = pd.DataFrame([point.to_dict() for point in self.points])
        return frame if self.confidence is not None else frame.drop(columns="ks_certified")


def _most_accurate(points: Iterable[CurvePoint]) -> CurvePoint:
    return min(points, key=lambda point: (point.mse, point.ks_population))


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(
    candidates: Candidates,
    adapter: ModelAdapter,
    *,
    effort: Effort,
    seed: int = 0,
    confidence: float | None = None,
    certificate: str = "normal",
) -> Curve:
    """The candidates that no other beats in both error and parity, as a curve.

    When fewer than ``effort.points`` are unbeaten, those that are beaten only by them follow, and so on. The original
    model, where it is a candidate, is on every curve.

    Parameters
    ----------
    adapter : of the original model, which the models of the curve are copies of
    confidence, certificate : of the bounds by which points are certified; none without a confidence
    """
    sample, fits = candidates.sample, candidates.fits
    if confidence is not None and sample.judged_on == "train":
        raise InputError(
            f"`confidence={confidence}` requires validation rows, and here all rows are training rows. Pass "
            "`validation`, or more rows of every group."
        )
    refitted = outputs(sample.head, sample.judging, candidates.plain) if candidates.plain else None

    rows = sample.judging
    # Neither the order of two rows nor that of two candidates may hang on the last bits of a sum.
    judging = measurable(candidates.judging, rows.prediction)
    # Of test rows a model is judged as an audit does, with its own ties; candidates share those of the original.
    here = Judging(rows, len(sample.labels), seed, judging[:, 0] if sample.judged_on == "test" else None)
    errors = here.errors(judging)
    found = _estimate(candidates, here, judging)
    certified = None
    if confidence is not None:
        certified = _certified(here, judging, found.order, confidence, certificate)
    kept = _kept(fits, errors, found.population, certified, effort.points)
    measure = partial(_bounds, here, effort.resamples, confidence or 0.95, certificate)
    points = tuple(
        CurvePoint(
            mse=float(errors[i]),
            r2=here.r2(float(errors[i])),
            ks=float(found.distances[i].max()),
            mean_gap=here.mean_gap(judging[:, i]),
            variance_gap=here.variance_gap(judging[:, i]),
            target=fits[i].target,
            ridge=fits[i].ridge,
            strength=fits[i].strength,
            ks_population=float(found.population[i]),
            ks_pairs=tuple(found.pairs[i].tolist()),
            ks_certified=None if certified is None else float(certified[i]),
            constant=here.constant(judging[:, i]),
            index=place,
            measure=partial(measure, judging[:, i]),
        )
        for place, i in enumerate(kept)
    )
    plain = None if refitted is None else here.errors(refitted)
    first, second = here.pairs.index
    return Curve(
        points=points,
        pairs=tuple((sample.labels[g], sample.labels[h]) for g, h in zip(first, second, strict=True)),
        pair_floors=tuple(here.pairs.floors.tolist()),
        original_pairs=() if found.original is None else tuple(found.original.estimates.tolist()),
        original_floors=() if found.original is None else tuple(found.original.floors.tolist()),
        pair_resolved=tuple(here.pairs.resolved.tolist()),
        pair_rows=tuple(here.pairs.effective_rows.tolist()),
        evaluated_on=sample.judged_on,
        weights=tuple(weights_of(sample.layer, fits[i]) for i in kept),
        adapter=adapter,
        candidates=tuple(kept),
        confidence=confidence,
        certificate=certificate,
        mse_refit=None if plain is None else float(plain.min()),
        refit=None if plain is None else candidates.plain[int(plain.argmin())],
    )


def _bounds(
    here: "Judging", draws: int, confidence: float, certificate: str, column: Array
) -> tuple[float, float, float]:
    """Interval of the population KS, and its one-sided bound."""
    ranked = Ranked(here.compared(column), here.groups)
    low, high = here.pairs.largest_interval(here.compared(column), draws=draws)
    return low, high, upper_bound(ranked, confidence, certificate)


def measurable(prediction: Array, untouched: Array) -> Array:
    """Predictions (n,) or (n, k), rounded to a billionth of the untouched model's range.

    A column that varies by no more than that is one number: the KS distance of rounding noise says nothing.
    """
    unit = float(np.ptp(untouched)) if len(untouched) else 0.0
    measured = np.empty_like(prediction, order="F")
    # one by one: a column stays in the cache
    for column, into in zip(np.atleast_2d(prediction.T), np.atleast_2d(measured.T), strict=True):
        varies = len(column) and np.ptp(column) > DIGITS * unit
        into[:] = _rounded(column if varies else column[:1], unit)
    return measured


def _rounded(values: Array, unit: float) -> Array:
    """To a billionth of the unit."""
    step = DIGITS * float(unit)
    if not np.abs(values).max(initial=0.0) < 2.0**53 * step:  # nothing to round there, and the ratio may overflow
        return np.asarray(values, dtype=np.float64)
    rounded: Array = np.asarray(values, dtype=np.float64) / step
    np.rint(rounded, out=rounded)  # in place: the table may be large
    rounded *= step
    return rounded


@dataclass(frozen=True)
class _Estimates:
    """Of k candidates and P pairs of groups.

    Attributes
    ----------
    distances : (k, P) KS distance on the validation rows
    pairs : (k, P) estimated population KS
    population : (k,) the largest
    order : (k,) rises with the KS that rows other than the validation rows show
    original : what all rows say of the original model, where some of them were held out
    """

    distances: Array
    pairs: Array
    population: Array
    order: Array
    original: Comparison | None = None


def _estimate(candidates: Candidates, here: "Judging", judging: Array) -> _Estimates:
    """Estimate the population KS of every candidate and pair (docs/method.md 2.7).

    From the validation rows alone the square is T² − floor², and the smallest of many is a lucky one; so it is made to
    rise with what the training rows say, and the larger of this and its own is taken. All candidates share the luck of
    the validation rows, though; so candidates that are fitted without them are measured on folds of the training rows
    too (cross-fitting), and the estimate lies between the mean of both, weighted by 1/noise², and the larger.

    The original model was neither fitted to parity nor picked among many: where rows were held out, whether it meets a
    target is decided on all rows, as an audit of them does.
    """
    fits, floors = candidates.fits, here.pairs.floors
    if len(fits) == 1 and candidates.sample.judged_on != "train":
        alone = here.pairs.compare(here.compared(judging[:, 0]))
        return _Estimates(alone.distances[None], alone.estimates[None], np.array([alone.largest]), np.zeros(1))
    distances = here.distances(judging)
    squares, noise = distances**2 - floors**2, floors
    original = np.array([fit.target == UNTOUCHED for fit in fits])
    training = _training_squares(candidates, here.seed)
    if candidates.sample.judged_on == "train":
        # Rows that were fitted to show no excess by sampling; but the original model was not fitted to parity.
        own = np.where(original[:, None], squares, distances**2)
        squares = own if training is None else np.maximum(own, training.squares)
    elif len(fits) > 1 and training is not None:
        squares = np.column_stack([rising(*each) for each in zip(squares.T, training.squares.T, strict=True)])
        if training.complete:
            # The better known of the two counts more. Neither is taken for being small: what is chosen is.
            trust = floors**2 / (floors**2 + training.floors**2)
            mean = squares + trust * (training.squares - squares)
            squares = LARGER * np.maximum(squares, training.squares) + (1 - LARGER) * np.maximum(mean, training.squares)
            noise = floors * np.sqrt(1 - trust)
    pairs, population = here.pairs.largest(squares, noise)
    order = np.zeros(len(fits)) if training is None else training.squares.max(axis=1)
    known = _on_all_rows(candidates, int(original.argmax()), here.seed) if original.any() else None
    return _Estimates(distances, pairs, population, order, known)


def _on_all_rows(candidates: Candidates, i: int, seed: int) -> Comparison | None:
    """What training and held-out rows together say of a candidate that was not fitted.

    None where no row was held out, or where not all training rows were kept.
    """
    sample, count = candidates.sample, len(candidates.sample.labels)
    parts = sample.training, sample.judging
    if sample.judged_on != "heldout" or np.count_nonzero(parts[0].codes < count) < sum(sample.sizes):
        return None
    prediction = np.concatenate([candidates.training[:, i], candidates.judging[:, i]])
    codes, weight = (np.concatenate([getattr(part, name) for part in parts]) for name in ("codes", "weight"))
    inside, strata = codes < count, None
    codes, weight = codes[inside], weight[inside]
    if parts[0].strata is not None and parts[1].strata is not None:
        strata = np.concatenate([parts[0].strata, parts[1].strata])[inside]
        weight = adjusted_weights(codes, count, strata, weight)
    scores = measurable(prediction, prediction)[inside]
    return Pairs(Groups.of(codes, count, weight, strata), scores, seed).compare(scores)


@dataclass(frozen=True)
class _Training:
    """What the training rows say of k candidates and P pairs.

    ``squares`` (k, P) are estimates of the squared population KS where ``complete``; else only their order counts.
    ``floors`` (P,) is the noise level of the training rows.
    """

    squares: Array
    floors: Array
    complete: bool


def _training_squares(candidates: Candidates, seed: int) -> _Training | None:
    """None where the training rows say nothing that the validation rows do not."""
    sample, fits = candidates.sample, candidates.fits
    same = sample.judged_on == "train"
    if len(fits) == 1 or (same and candidates.cross_fitted is None):
        return None
    rows = sample.training
    if not len(rows):
        order = _normal_distances(sample, fits)
        count = len(sample.labels)
        return _Training(np.repeat(order[:, None], count * (count - 1) // 2, axis=1), np.zeros(0), complete=False)
    there = Judging(rows, len(sample.labels), seed)
    # without the last bits, which would else decide the order of equal ones
    seen = np.round(there.distances(measurable(candidates.training, rows.prediction)), 12) ** 2
    floors = there.pairs.floors
    original = np.array([fit.target == UNTOUCHED for fit in fits])
    squares = np.where(original[:, None], seen - floors**2, seen)
    crossed = candidates.cross_fitted
    if crossed is not None:
        apart = there.distances(measurable(crossed.predictions, rows.prediction)) ** 2 - floors**2
        squares = _over_fitted(fits, seen, squares, crossed.fits, apart)
    complete = len(rows) >= min(len(sample.judging), sum(sample.sizes))
    return _Training(squares, floors, complete)


def _over_fitted(fits: Sequence[Fit], seen: Array, squares: Array, some: Sequence[Fit], apart: Array) -> Array:
    """Squares (k, P) of all fits from those of ``some`` that were cross-fitted.

    Fits of one kind of target (and one ridge, where it is the labels) over-fit alike: what the rows that fitted say
    (``seen``) is mapped to what rows left out say (``apart``) by a rising function through those of ``some``.
    """

    def kind(fit: Fit) -> tuple[str, float]:
        name = fit.target.split()[0]
        return name, fit.ridge if name == "labels" else 0.0

    place = {(fit.target, fit.ridge, fit.strength): i for i, fit in enumerate(fits)}
    found = squares.copy()
    for each in {kind(fit) for fit in some}:
        known = [j for j, fit in enumerate(some) if kind(fit) == each and _key(fit) in place]
        at = [place[_key(some[j])] for j in known]
        members = [i for i, fit in enumerate(fits) if kind(fit) == each]
        for p in range(seen.shape[1]):
            order = np.argsort(seen[at, p], kind="stable")
            line = isotonic_regression(apart[known, p][order]).x
            found[members, p] = np.interp(seen[members, p], seen[at, p][order], line)
    return found


def _key(fit: Fit) -> tuple[str, float, float]:
    return fit.target, fit.ridge, fit.strength


def _normal_distances(sample: Problem, fits: Sequence[Fit]) -> Array:
    """(k,) KS distance of normal distributions with the groups' means and variances, where only moments are known.

    A head is monotone and changes no KS distance.
    """
    moments = sample.moments.columns(slice(0, sample.layer.weight.shape[1]))
    weight = np.array([fit.weight for fit in fits])  # (k, p)
    mean = weight @ moments.means.T  # (k, G)
    variance = np.einsum("kp,gpq,kq->kg", weight, moments.covariances(), weight, optimize=True)
    spread = np.sqrt(np.maximum(variance, 1e-24 * variance.max()))
    grid = np.linspace(-4.0, 4.0, 65) * spread.max(axis=1, keepdims=True) + mean.mean(axis=1, keepdims=True)  # (k, t)
    below = ndtr((grid[:, None, :] - mean[:, :, None]) / spread[:, :, None])  # (k, G, t)
    return np.asarray(np.ptp(below, axis=1).max(axis=1), dtype=np.float64)


def _certified(here: "Judging", judging: Array, fitted: Array, confidence: float, method: str) -> Array:
    """(k,) the smallest target for which each fit is certified: a fixed sequence, fairest on *other* rows first.

    A candidate is accepted while the bounds of all candidates up to it are within the target, so what counts is their
    running maximum; stopping at the first failure needs no correction for their number.
    """
    order = np.argsort(fitted, kind="stable")
    bounds = [upper_bound(Ranked(here.compared(judging[:, i]), here.groups), confidence, method) for i in order]
    found = np.empty(len(order))
    found[order] = np.maximum.accumulate(bounds)
    return found


def _kept(fits: Sequence[Fit], mse: Array, population: Array, certified: Array | None, points: int) -> list[int]:
    """Which fits the curve shows, by falling distance."""
    errors, kept = _rounded(mse, mse.max()), [i for i, fit in enumerate(fits) if fit.target == UNTOUCHED]
    if certified is not None:
        kept += _fronts(errors, _rounded(certified, 1.0))[0]
    for depth, front in enumerate(_fronts(errors, _rounded(population, 1.0))):
        room = points - len(set(kept))
        if depth and room <= 0:
            break
        # of the beaten as many as are missing, spread along their front
        shown = np.linspace(0, len(front) - 1, min(room, len(front))).astype(int) if depth else range(len(front))
        kept += [front[i] for i in shown]
    return sorted(set(kept), key=lambda i: (-population[i], mse[i]))


def _fronts(mse: Array, ks: Array) -> list[list[int]]:
    """Candidates sorted into fronts: the unbeaten, those that only the unbeaten beat, and so on."""
    left = np.lexsort((ks, mse)).tolist()  # by error; an unbeaten one has a lower KS than all before it
    fronts = []
    while left:
        best, front, rest = np.inf, [], []
        for i in left:
            if ks[i] < best:
                best = ks[i]
                front.append(i)
            else:
                rest.append(i)
        fronts.append(front)
        left = rest
    return fronts


@dataclass(frozen=True)
class Judging:
    """Validation rows, and what they say of predictions (n,) for them, or of the columns of (n, k).

    The first ``count`` groups are compared; rows of the others, which were set aside, count in the error alone. Ties
    among ``scores`` (n,) lower the noise level; default those of the original model's predictions.
    """

    rows: Rows
    count: int
    seed: int = 0
    scores: Array | None = None

    @cached_property
    def _index(self) -> NDArray[np.intp] | None:
        """Positions of the rows that are compared; None for all."""
        return None if self.rows.codes.max(initial=0) < self.count else np.flatnonzero(self.rows.codes < self.count)

    def compared(self, values: Array) -> Array:
        """Of values (n,) or (n, k) those of the rows that are compared."""
        return values if self._index is None else values[self._index]

    @cached_property
    def groups(self) -> Groups:
        """The groups that are compared."""
        strata = None if self.rows.strata is None else self.rows.strata[... if self._index is None else self._index]
        codes = self.rows.codes if self._index is None else self.rows.codes[self._index]
        return Groups.of(codes, self.count, self.compared(self.rows.parity_weight), strata)

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of groups."""
        scores = self.rows.prediction if self.scores is None else self.scores
        return Pairs(self.groups, self.compared(scores), self.seed)

    def errors(self, columns: Array) -> Array:
        """(k,) weighted mean squared error."""
        share = self.rows.weight / self.rows.weight.sum()
        return np.array([share @ (column - self.rows.y) ** 2 for column in columns.T])

    def r2(self, mse: float) -> float:
        """R² of a model with this error; 0 where the labels do not vary."""
        share = self.rows.weight / self.rows.weight.sum()
        variance = float(share @ (self.rows.y - share @ self.rows.y) ** 2)
        return 1 - mse / variance if variance > 0 else 0.0

    def auc(self, prediction: Array) -> float | None:
        """Area under the ROC curve where the labels are 0 and 1, else None."""
        if set(np.unique(self.rows.y)) != {0.0, 1.0}:
            return None
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(self.rows.y, prediction, sample_weight=self.rows.weight))

    def distances(self, columns: Array) -> Array:
        """(k, P) KS distance of every pair."""
        return np.array([self.pairs.distances(self.compared(column)) for column in columns.T])

    def mean_gap(self, prediction: Array) -> float:
        return float(np.ptp(self.groups.means(self.compared(prediction))))

    def variance_gap(self, prediction: Array) -> float:
        return float(np.ptp(self.groups.variances(self.compared(prediction))))

    def constant(self, prediction: Array) -> bool:
        """Whether hardly anything is left of the spread that the original model's predictions have."""
        return bool(prediction.std() <= FLAT * self.rows.prediction.std())

    def figures(self, prediction: Array) -> dict[str, Any]:
        """What a summary says both of the original model and of the repaired one."""
        measured = self.compared(measurable(prediction, self.rows.prediction))
        error = (prediction - self.rows.y) ** 2
        mse = float(self.errors(prediction[:, None])[0])
        everybody = Groups(self.rows.codes, int(self.rows.codes.max()) + 1, self.rows.weight)
        auc = self.auc(prediction)
        return {
            "mse": mse,
            "r2": self.r2(mse),
            **({} if auc is None else {"auc": auc}),
            "ks": ks_between(measured, self.groups),
            "group_mse": everybody.means(error).tolist(),
            "mean_gap": self.mean_gap(prediction),
            "variance_gap": self.variance_gap(prediction),
        }


# --- the summary ----------------------------------------------------------------------------------------------------


def make_report(
    sample: Problem,
    after: Array,
    curve: Curve,
    point: CurvePoint,
    *,
    method: str,
    target_ks: float | None,
    max_mse_increase: float | None = None,
) -> dict[str, Any]:
    """What was reached on the validation rows, ``after`` (n,) being what the chosen point predicts for them."""
    rows, labels = sample.judging, (*sample.labels, *sample.set_aside)
    here = Judging(rows, len(sample.labels))
    present = [label for label, n in zip(labels, np.bincount(rows.codes, minlength=len(labels)), strict=True) if n]
    old, new = here.figures(rows.prediction), here.figures(after)
    return {
        "method": method,
        "target_ks": target_ks,
        "met": None if target_ks is None else curve.meets(point, target_ks),
        "certified": None if target_ks is None or point.ks_certified is None else point.ks_certified <= target_ks,
        "confidence": curve.confidence,
        "decided_by": decided_by(curve, point, target_ks=target_ks, max_mse_increase=max_mse_increase),
        "constant": here.constant(after),
        **before_and_after(present, old, new),
        "mse_refit": curve.mse_refit,
        "ks_population": max(curve.estimates(point)[0]),
        "ks_upper": point.ks_upper,
        "ks_interval": (point.ks_low, point.ks_high),
        "ks_floor": max(curve.estimates(point)[1]),
        "pairs": _pairs(here, curve, point, measurable(after, rows.prediction)),
        "group_sizes": dict(zip(sample.labels, np.bincount(rows.codes)[: len(sample.labels)].tolist(), strict=True)),
        "groups_set_aside": dict(sample.set_aside),
        "evaluated_on": sample.judged_on,
        "error_against": sample.error_against,
        "rows": len(rows),
        **_unadjusted(rows, after, len(sample.labels)),
    }


def _pairs(here: Judging, curve: Curve, point: CurvePoint, after: Array) -> list[dict[str, Any]]:
    """Figures of every pair of groups that is compared; of very many, those of the largest estimates."""
    before = here.pairs.distances(here.compared(measurable(here.rows.prediction, here.rows.prediction)))
    found = here.pairs.compare(here.compared(after))
    shown = np.sort(np.argsort(curve.estimates(point)[0], kind="stable")[-SHOWN_PAIRS:])
    upper = here.pairs.upper_bounds(here.compared(after), curve.confidence or 0.95, curve.certificate, shown)
    estimates, floors = curve.estimates(point)
    return [
        {
            "groups": curve.pairs[i],
            "ks_before": float(before[i]),
            "ks_after": float(found.distances[i]),
            "ks_population": estimates[i],
            "ks_upper": float(bound),
            "ks_floor": floors[i],
            "established": bool(found.established[i]),
        }
        for i, bound in zip(shown.tolist(), upper, strict=True)
    ]


def before_and_after(labels: Sequence[Any], old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Figures of the untouched and of the repaired model, such as ``mse_before``; lists are of the groups."""
    return {
        f"{name}_{when}": dict(zip(labels, figures[name], strict=True))
        if isinstance(figures[name], list)
        else figures[name]
        for name in old
        for when, figures in (("before", old), ("after", new))
    }


def _unadjusted(rows: Rows, after: Array, count: int) -> dict[str, Any]:
    """Beside adjusted gaps the raw ones, and the share of people who are like nobody of some other group."""
    if rows.adjusted is None:
        return {}
    here = Judging(replace(rows, adjusted=None, strata=None), count)
    inside = rows.codes < count
    old, new = here.figures(rows.prediction), here.figures(after)
    return {
        "ks_raw_before": old["ks"],
        "ks_raw_after": new["ks"],
        "mean_gap_raw_before": old["mean_gap"],
        "mean_gap_raw_after": new["mean_gap"],
        "outside_support": outside_support(rows.weight[inside], rows.adjusted[inside]),
    }


# --- choosing ------------------------------------------------------------------------------------------------------


def choose(
    curve: Curve, *, target_ks: float | None = None, max_mse_increase: float | None = None, closest: bool = False
) -> CurvePoint:
    """A point of the curve, with a warning when it is not as asked for.

    Parameters
    ----------
    target_ks : as :meth:`Curve.select`
    max_mse_increase : the fairest point whose error is at most this part above the original model's
    closest : without either, :meth:`Curve.closest_to_parity`; else the most accurate point that is pressed for parity
        at all (``strength`` above 0)
    """
    if max_mse_increase is not None:
        point = _fairest_within(curve, max_mse_increase)
    elif target_ks is not None:
        point = curve.select(target_ks=target_ks)
        if not curve.meets(point, target_ks):
            _warn_missed(curve, point, target_ks)
    elif closest:
        point = curve.closest_to_parity()
    else:
        point = _most_accurate(point for point in curve.points if point.strength > 0)
    aims = target_ks is not None or closest
    _warn_useless(curve, point, least=KEPT if aims and max_mse_increase is None else 0.0)
    return point


def _fairest_within(curve: Curve, increase: float) -> CurvePoint:
    untouched = curve.untouched
    assert untouched is not None
    within = [point for point in curve.points if point.mse <= untouched.mse * (1 + increase)]
    point = min(within, key=lambda point: (point.ks_population, point.mse))
    if point is untouched:
        _warn(f"No candidate within `max_mse_increase={increase:g}` improves parity; returning the original model.")
    return point


def _warn_missed(curve: Curve, point: CurvePoint, target_ks: float) -> None:
    """Why the target is not met, what was taken instead, and what would help."""
    told, rows = curve.told(target_ks), _rows_text(curve)
    taken = (
        "the original model is returned"
        if point is curve.untouched
        else f"the repaired model has an estimated population KS of {point.ks_population:.3f} and error {point.mse:.4g}"
    )
    if point.ks_certified is not None and point.ks_certified > target_ks:
        said = (
            f"No candidate can be certified to meet `target_ks={target_ks:g}` at `confidence={curve.confidence:g}` on "
            f"the {rows}; {taken}. {_rows_that_certify(curve, target_ks)}"
        )
    elif not told.all():
        said = f"{_below_noise(curve, target_ks)}; {taken}."
        if told.any() and max(np.asarray(point.ks_pairs)[told]) > target_ks:
            said += " Among the other pairs no candidate meets it either."
    else:
        said = (
            f"No candidate meets `target_ks={target_ks:g}`; {taken}, and KS {point.ks:.3f} on the {rows}. See "
            "`curve_` for what can be reached."
        )
    _warn(said)


def _rows_text(curve: Curve) -> str:
    return {"heldout": "held-out", "train": "training"}.get(curve.evaluated_on, curve.evaluated_on) + " rows"


def _times(factor: float) -> str:
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}" if factor < 1e4 else "more than 10,000"


def _rows_that_certify(curve: Curve, target_ks: float) -> str:
    """How many more rows a certificate needs: a bound exceeds its estimate by a margin that falls as 1/√rows."""
    margins = [
        (p.ks_certified - p.ks_population) / (target_ks - p.ks_population)
        for p in curve.points
        if p.ks_certified is not None and p.ks_population < target_ks
    ]
    if not margins:
        return "No number of rows would do, since no estimate is below the target."
    return f"About {_times(min(margins) ** 2)} times as many {_rows_text(curve)} would be needed."


def _below_noise(curve: Curve, target_ks: float) -> str:
    """For which pairs a target is below the noise level, and how many rows would resolve it."""
    told, floors = curve.told(target_ks), np.asarray(curve.pair_floors)
    worst = int(floors.argmax())
    pair = " and ".join(label_text(label) for label in curve.pairs[worst])
    which = "every pair of groups" if not told.any() else f"{np.count_nonzero(~told)} of {len(told)} pairs of groups"
    needed = "No number of rows resolves a target of 0"
    if target_ks > 0:
        needed = f"About {_times((floors[worst] / target_ks) ** 2)} times as many rows would resolve it"
    return (
        f"`target_ks={target_ks:g}` is below the noise level of {which}: chance alone gives a KS of about "
        f"{floors[worst]:.3f} between {pair} on the {_rows_text(curve)}. {needed}"
    )


def _warn_useless(curve: Curve, point: CurvePoint, *, least: float) -> None:
    """Warn of a point that is worse than the original in all, or keeps less than a part of what that explains."""
    untouched = curve.untouched
    if untouched is None or point is untouched:
        return
    if point.mse > untouched.mse and point.ks > untouched.ks:
        _warn(
            f"The repaired model is worse than the original in both error ({untouched.mse:.4g} to {point.mse:.4g}) and "
            f"KS ({untouched.ks:.3f} to {point.ks:.3f}) on the {_rows_text(curve)}. Pass `target_ks` to keep the "
            "original where nothing is better."
        )
    elif point.constant or (untouched.r2 > 0 and point.r2 < least * untouched.r2):
        _warn(
            f"The repaired model {_kept_words(point, untouched)} (R² {untouched.r2:.3f} to {point.r2:.3f})."
            f"{_nearest(curve)} A milder `target_ks` or `max_mse_increase` keeps more; see `curve_`."
        )


def _kept_words(point: CurvePoint, untouched: CurvePoint) -> str:
    if point.constant:
        return "predicts nearly the same number for everybody"
    if point.r2 <= 0:
        return "predicts no better than a constant"
    return f"keeps {point.r2 / untouched.r2:.0%} of the variance that the original model explains"


def _nearest(curve: Curve) -> str:
    """The fairest point that keeps half of what the original model explains."""
    assert curve.untouched is not None
    least = KEPT * curve.untouched.r2
    keeping = [p for p in curve.points if p.r2 >= least and p is not curve.untouched]
    if not keeping:
        return ""
    best = min(keeping, key=lambda p: (p.ks_population, p.mse))
    return (
        f" The fairest point that keeps half of it, number {best.index} of the curve, has an estimated population KS "
        f"of {best.ks_population:.3f}."
    )


def _warn(words: str) -> None:
    warnings.warn(ESVDFairWarning(words), stacklevel=5)


def decided_by(curve: Curve, point: CurvePoint, *, target_ks: float | None, max_mse_increase: float | None) -> str:
    """In a few words, why this point."""
    if max_mse_increase is not None:
        return "the fairest within the error allowed"
    if target_ks is None:
        return "the original model" if point.target == UNTOUCHED else "no target"
    if not curve.meets(point, target_ks):
        if point.ks_certified is not None and point.ks_certified > target_ks:
            return "none can be certified: among the fairest"
        told = curve.told(target_ks)
        if not told.all():
            few = f"{np.count_nonzero(~told)} of {len(told)} pairs of groups"
            return f"the target is below the noise level of {'every pair of groups' if not told.any() else few}"
        return "none meets the target: among the fairest"
    if point.target == UNTOUCHED:
        return "the original model meets the target"
    return "the most accurate that " + ("meets the target" if curve.confidence is None else "is certified")
