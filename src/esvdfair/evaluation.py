"""Candidates -> Curve: error and KS distance on validation rows, estimates for the population, certificates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from esvdfair.batches import Rows
from esvdfair.core.ks import Groups, Ranked, adjusted_weights, upper_bound
from esvdfair.core.pairs import Comparison, Pairs, rising
from esvdfair.core.quadratic import Fit
from esvdfair.curve import Curve, CurvePoint
from esvdfair.exceptions import InputError
from esvdfair.methods import Candidates, weights_of
from esvdfair.models.base import ModelAdapter
from esvdfair.problem import FLAT, ORIGINAL, Effort, outputs

Array = NDArray[np.float64]

DIGITS = 1e-9  # part of its scale to which a prediction, an error or a distance is rounded before it is compared
LARGER = 0.25  # weight of the larger of two estimates beside their mean; chosen on seeds 1 to 20 (docs/method.md 2.7)
CAUTION = 0.25  # standard deviations added to the estimate of trees; chosen on seeds 1 to 10 (docs/method.md 2.7)


def evaluate(
    candidates: Candidates,
    adapter: ModelAdapter,
    *,
    effort: Effort,
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
    problem, fits = candidates.problem, candidates.fits
    if confidence is not None and problem.evaluated_on == "train":
        raise InputError(
            f"`confidence={confidence}` requires validation rows, and here all rows are training rows. Pass "
            "`validation`, or more rows of every group."
        )
    rows = problem.validation
    # Neither the order of two rows nor that of two candidates may hang on the last bits of a sum.
    predicted = measurable(candidates.validation, rows.prediction)
    # Of test rows a model is compared as an audit does, with its own ties; candidates share those of the original.
    scores = predicted[:, 0] if problem.evaluated_on == "test" else None
    here = Evaluator(rows, len(problem.labels), problem.seed, scores)
    found = _estimate(candidates, here, predicted, trees=adapter.trees)
    if confidence is not None:
        found = replace(found, certified=_certified(here, predicted, found.order, confidence, certificate))
    kept = _kept(fits, here.errors(predicted), found, effort.points)
    measure = partial(_bounds, here, effort.resamples, confidence or 0.95, certificate)
    points = [
        CurvePoint(
            **here.figures(predicted[:, i]),
            ks=float(found.distances[i].max()),
            target=fits[i].target,
            ridge=fits[i].ridge,
            strength=fits[i].strength,
            ks_population=float(found.population[i]),
            ks_pairs=tuple(found.pairs[i].tolist()),
            ks_certified=None if found.certified is None else float(found.certified[i]),
            index=place,
            measure=partial(measure, predicted[:, i], float(found.population[i])),
        )
        for place, i in enumerate(kept)
    ]
    plain = here.errors(outputs(problem.head, rows, candidates.plain)) if candidates.plain else None
    return Curve(
        points=tuple(points),
        pairs=tuple(combinations(problem.labels, 2)),
        pair_floors=tuple(here.pairs.floors.tolist()),
        original_pairs=() if found.original is None else tuple(found.original.estimates.tolist()),
        original_floors=() if found.original is None else tuple(found.original.floors.tolist()),
        pair_resolved=tuple(here.pairs.resolved.tolist()),
        pair_rows=tuple(here.pairs.effective_rows.tolist()),
        evaluated_on=problem.evaluated_on,
        weights=tuple(weights_of(problem.layer, fits[i]) for i in kept),
        adapter=adapter,
        candidates=tuple(kept),
        confidence=confidence,
        certificate=certificate,
        mse_refit=None if plain is None else float(plain.min()),
        refit=None if plain is None else candidates.plain[int(plain.argmin())],
    )


def _bounds(
    here: "Evaluator", draws: int, confidence: float, certificate: str, column: Array, estimate: float
) -> tuple[float, float, float]:
    """Interval and one-sided bound of the population KS from validation rows, widened to contain the estimate."""
    # Training rows count in the estimate too; no two figures may contradict each other.
    ranked = Ranked(here.compared(column), here.groups)
    low, high = here.pairs.largest_interval(here.compared(column), draws=draws)
    return min(low, estimate), max(high, estimate), max(upper_bound(ranked, confidence, certificate), estimate)


def measurable(prediction: Array, original: Array) -> Array:
    """Predictions (n,) or (n, k), rounded to a billionth of the original model's range.

    A column that varies by no more than that is one number: the KS distance of rounding noise says nothing.
    """
    unit = float(np.ptp(original)) if len(original) else 0.0
    measured = np.empty_like(prediction, dtype=np.float64, order="F")
    # one by one: a column stays in the cache
    for column, into in zip(np.atleast_2d(prediction.T), np.atleast_2d(measured.T), strict=True):
        varies = len(column) and np.ptp(column) > DIGITS * unit
        _to_digits(column if varies else column[:1], unit, into)
    return measured


def _to_digits(values: Array, unit: float, into: Array | None = None) -> Array:
    """To a billionth of the unit."""
    step = DIGITS * float(unit)
    rounded: Array = np.empty_like(values, dtype=np.float64) if into is None else into  # in place: it may be large
    if not max(values.max(initial=0.0), -values.min(initial=0.0)) < 2.0**53 * step:  # the ratio may overflow
        rounded[:] = values
        return rounded
    rounded[:] = values / step
    np.rint(rounded, out=rounded)
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
    certified : (k,) smallest target for which each is certified, where a confidence was asked for
    """

    distances: Array
    pairs: Array
    population: Array
    order: Array
    original: Comparison | None = None
    certified: Array | None = None


def _estimate(candidates: Candidates, here: "Evaluator", predicted: Array, *, trees: bool = False) -> _Estimates:
    """Estimate the population KS of every candidate and pair (docs/method.md 2.7).

    From the validation rows alone the square is T² − floor², and the smallest of many is a lucky one; so it is made to
    rise with what the training rows say, and the larger of this and its own is taken. All candidates share the luck of
    the validation rows, though; so candidates that are fitted without them are measured on folds of the training rows
    too (cross-fitting), and the estimate lies between the mean of both, weighted by 1/noise², and the larger. Trees
    know the labels of the rows that they were trained on: these only give the order, one for each ridge, and the
    estimate is raised by a quarter of its standard deviation.

    The original model was neither fitted to parity nor picked among many: where rows were held out, whether it meets a
    target is decided on all rows, as an audit of them does.
    """
    fits, floors = candidates.fits, here.pairs.floors
    if len(fits) == 1 and candidates.problem.evaluated_on != "train":
        alone = here.pairs.compare(here.compared(predicted[:, 0]))
        return _Estimates(alone.distances[None], alone.estimates[None], np.array([alone.largest]), np.zeros(1))
    distances = here.distances(predicted)
    squares, noise = distances**2 - floors**2, floors
    original = np.array([fit.target == ORIGINAL for fit in fits])
    training = _training_squares(candidates, here.seed)
    if candidates.problem.evaluated_on == "train":
        # Rows that were fitted to show no excess by sampling; but the original model was not fitted to parity.
        own = np.where(original[:, None], squares, distances**2)
        squares = own if training is None else np.maximum(own, training.squares)
    elif len(fits) > 1 and training is not None:
        ridges = np.array([fit.ridge for fit in fits]) if trees else None
        squares, noise = _with_training(squares.copy(), training, floors, ridges)
    pairs, population = here.pairs.largest(squares, noise)
    order = np.zeros(len(fits)) if training is None else training.squares.max(axis=1)
    known = _on_all_rows(candidates, int(original.argmax()), here.seed) if original.any() else None
    return _Estimates(distances, pairs, population, order, known)


def _with_training(squares: Array, training: "_Training", floors: Array, ridges: Array | None) -> tuple[Array, Array]:
    """Squares (k, P) and noise (P,) with what training rows say; of trees, given ridges (k,), in order within each."""
    for alike in [slice(None)] if ridges is None else [ridges == ridge for ridge in np.unique(ridges)]:
        for own, seen in zip(squares.T, training.squares.T, strict=True):
            own[alike] = rising(own[alike], seen[alike])
    if ridges is not None:
        return squares + CAUTION * floors * np.sqrt(np.maximum(squares, 0.0) + floors**2 / 2), floors
    if not training.complete:
        return squares, floors
    larger = np.maximum(squares, training.squares)
    # The better known of the two counts more. Neither is taken for being small: what is chosen is.
    trust = floors**2 / (floors**2 + training.floors**2)
    mean = squares + trust * (training.squares - squares)
    return LARGER * larger + (1 - LARGER) * np.maximum(mean, training.squares), floors * np.sqrt(1 - trust)


def _on_all_rows(candidates: Candidates, i: int, seed: int) -> Comparison | None:
    """What training and held-out rows together say of a candidate that was not fitted.

    None where no row was held out, or where not all training rows were kept.
    """
    problem, count = candidates.problem, len(candidates.problem.labels)
    parts = problem.training, problem.validation
    if problem.evaluated_on != "heldout" or np.count_nonzero(parts[0].codes < count) < sum(problem.sizes):
        return None
    prediction = np.concatenate([candidates.training[:, i], candidates.validation[:, i]])
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
    problem, fits = candidates.problem, candidates.fits
    if len(fits) == 1 or (problem.evaluated_on == "train" and candidates.cross_fitted is None):
        return None
    rows = problem.training
    there = Evaluator(rows, len(problem.labels), seed)
    # without the last bits, which would else decide the order of equal ones
    columns = (measurable(column, rows.prediction) for column in candidates.training.T)  # the table is large: no copy
    seen = np.round([there.pairs.distances(there.compared(column)) for column in columns], 12) ** 2
    floors = there.pairs.floors
    original = np.array([fit.target == ORIGINAL for fit in fits])
    squares = np.where(original[:, None], seen - floors**2, seen)
    crossed = candidates.cross_fitted
    if crossed is not None:
        some, predictions = crossed
        apart = there.distances(measurable(predictions, rows.prediction)) ** 2 - floors**2
        squares = _over_fitted(fits, seen, squares, some, apart)
    return _Training(squares, floors, complete=len(rows) >= min(len(problem.validation), sum(problem.sizes)))


def _over_fitted(fits: Sequence[Fit], seen: Array, squares: Array, some: Sequence[Fit], apart: Array) -> Array:
    """Squares (k, P) of all fits from those of ``some`` that were cross-fitted.

    Fits of one kind of target (and one ridge, where it is the labels) over-fit alike: what the rows that fitted say
    (``seen``) is mapped to what rows left out say (``apart``) by a rising function through those of ``some``.
    """
    made, made_of_some = (
        [(fit.target, fit.ridge, fit.strength, fit.diagnostics.get("variance_reduction")) for fit in each]
        for each in (fits, some)
    )
    at = np.array([made.index(key) if key in made else -1 for key in made_of_some])
    names = [(fit.target.split()[0], fit.ridge) for fit in fits]
    kinds = np.array([f"labels {ridge}" if name == "labels" else name for name, ridge in names])
    found = squares.copy()
    for kind in np.unique(kinds[at[at >= 0]]):
        known, members = np.flatnonzero((at >= 0) & (kinds[at] == kind)), np.flatnonzero(kinds == kind)
        for p in range(seen.shape[1]):
            order = np.argsort(seen[at[known], p], kind="stable")
            line = isotonic_regression(apart[known, p][order]).x
            found[members, p] = np.interp(seen[members, p], seen[at[known], p][order], line)
    return found


def _certified(here: "Evaluator", predicted: Array, fitted: Array, confidence: float, method: str) -> Array:
    """(k,) the smallest target for which each fit is certified: a fixed sequence, fairest on *other* rows first.

    A candidate is accepted while the bounds of all candidates up to it are within the target, so what counts is their
    running maximum; stopping at the first failure needs no correction for their number.
    """
    order = np.argsort(fitted, kind="stable")
    bounds = [upper_bound(Ranked(here.compared(predicted[:, i]), here.groups), confidence, method) for i in order]
    found = np.empty(len(order))
    found[order] = np.maximum.accumulate(bounds)
    return found


def _kept(fits: Sequence[Fit], mse: Array, found: _Estimates, points: int) -> list[int]:
    """Which fits the curve shows, by falling distance."""
    errors, kept = _to_digits(mse, mse.max()), [i for i, fit in enumerate(fits) if fit.target == ORIGINAL]
    if found.certified is not None:
        kept += _fronts(errors, _to_digits(found.certified, 1.0))[0]
    for depth, front in enumerate(_fronts(errors, _to_digits(found.population, 1.0))):
        room = points - len(set(kept))
        if depth and room <= 0:
            break
        # of the beaten as many as are missing, spread along their front
        shown = np.linspace(0, len(front) - 1, min(room, len(front))).astype(int) if depth else range(len(front))
        kept += [front[i] for i in shown]
    return sorted(set(kept), key=lambda i: (-found.population[i], mse[i]))


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
class Evaluator:
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

    def distances(self, columns: Array) -> Array:
        """(k, P) KS distance of every pair."""
        return np.array([self.pairs.distances(self.compared(column)) for column in columns.T])

    def figures(self, prediction: Array) -> dict[str, Any]:
        """What a point of a curve holds; R² is 0 where the labels do not vary.

        ``constant`` says that hardly anything is left of the spread of the original model's predictions.
        """
        share, compared = self.rows.weight / self.rows.weight.sum(), self.compared(prediction)
        mse, variance = (float(share @ (self.rows.y - each) ** 2) for each in (prediction, share @ self.rows.y))
        return {
            "mse": mse,
            "r2": 1 - mse / variance if variance > 0 else 0.0,
            "mean_gap": float(np.ptp(self.groups.means(compared))),
            "variance_gap": float(np.ptp(self.groups.variances(compared))),
            "constant": bool(prediction.std() <= FLAT * self.rows.prediction.std()),
        }
