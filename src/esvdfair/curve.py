"""The trade-off curve: what every fit reaches on rows that did not fit it, and the rule that picks one.

``target_ks`` speaks of the population, not of a sample (docs/method.md 2.7): a point meets it when its estimate
``ks_population`` does and, where a confidence was asked for, when it is certified too. :meth:`Curve.meets` is the one
place that says so; the choice, the warning, the summary and the exit code of a command all ask it.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from esvdfair.batches import Rows
from esvdfair.core.checks import by_group
from esvdfair.core.ks import (
    Groups,
    Normals,
    Null,
    Ranked,
    ks_between,
    ks_interval,
    ks_null,
    outside_support,
    population_along_curve,
    rows_to_certify,
    upper_bound,
)
from esvdfair.core.quadratic import Fit
from esvdfair.distributed import broadcast
from esvdfair.exceptions import ESVDFairWarning, Given, InputError
from esvdfair.methods import UNTOUCHED, Candidates, outputs, weights_of
from esvdfair.models.base import ModelAdapter, Weights
from esvdfair.sample import Effort, Sample

Array = NDArray[np.float64]

DIGITS = 1e-9
"""Part of its scale to which a prediction, an error or a distance is rounded before it is compared."""
FLAT = 0.01
"""Part of the untouched model's standard deviation below which a model is called a constant."""
PARITY = 0.05
"""KS distance that is near enough to parity where no target was given."""


@dataclass(frozen=True)
class CurvePoint:
    """One repaired model on the trade-off curve, judged on rows that did not fit it.

    Attributes
    ----------
    mse, ks, ks_low, ks_high, mean_gap, variance_gap : on the judging rows
    target : what the refit aimed at: "labels", "predictions", "optimum 0.05"; "untouched" is the model as given
    ridge : ρ, relative to the features' mean variance
    strength : λ_w of transport, the factor on the reductions for paper and exact, …: 0 is the weakest
    ks_population : estimate of the distance that any number of such people would show; the rule compares it
    ks_upper : one-sided bound of that distance, at the curve's confidence, 95 % where none was asked for
    ks_certified : smallest target that it is certified for; None where no confidence was asked for
    constant : whether it has become one prediction for everybody
    index : position in ``Curve.points``; a point can stand wherever its index can
    """

    mse: float
    ks: float
    ks_low: float
    ks_high: float
    mean_gap: float
    variance_gap: float
    target: str
    ridge: float
    strength: float
    ks_population: float
    ks_upper: float
    ks_certified: float | None
    constant: bool
    index: int

    def __index__(self) -> int:
        return self.index


@dataclass(frozen=True, repr=False)
class Curve:
    """Points from the most accurate to the fairest; ``model(i)`` builds the model of one without refitting.

    Attributes
    ----------
    points : tuple of CurvePoint, by falling KS distance
    ks_floor : what two samples of one distribution would show at these group sizes
    evaluated_on : "validation", "heldout" or "train"
    weights : of every point, what it puts in place of the layers of the model
    adapter : of the untouched model, which the models of the curve are copies of
    candidates : of every point, which of the fits that were judged it is
    ks_resolved : the smallest population distance that these rows can tell from parity
    confidence, certificate : of the certificates; no confidence, no certificates
    rows : effective rows of the two smallest groups, ``1/(1/n₁ + 1/n₂)``
    mse_refit : error of the last layer refitted without parity; None where it is not known
    refit : that layer
    """

    points: tuple[CurvePoint, ...]
    ks_floor: float
    evaluated_on: str
    weights: tuple[Weights, ...]
    adapter: ModelAdapter
    candidates: tuple[int, ...] = ()
    ks_resolved: float = 0.0
    confidence: float | None = None
    certificate: str = "normal"
    rows: float = np.inf
    mse_refit: float | None = None
    refit: Fit | None = None

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        first, last = self.points[0], self.points[-1]
        return (
            f"Curve({len(self)} points, judged on {self.evaluated_on!r}: MSE {first.mse:.4g} at KS {first.ks:.3f} to "
            f"MSE {last.mse:.4g} at KS {last.ks:.3f})"
        )

    @property
    def untouched(self) -> CurvePoint | None:
        """The model as it was given; None where it was no candidate."""
        return next((point for point in self.points if point.target == UNTOUCHED), None)

    def meets(self, point: CurvePoint, target_ks: float) -> bool:
        """Whether a point keeps the target: its estimate does and, where confidence was asked for, its certificate."""
        certified = point.ks_certified is None or point.ks_certified <= target_ks
        return certified and point.ks_population <= target_ks

    def select(self, *, target_ks: float) -> CurvePoint:
        """The point that a person would take for this target.

        - The untouched model, if it meets the target already, or whatever is better in both error and parity.
        - Else the most accurate point that meets the target.
        - If none does, the most accurate of those that these rows cannot tell from the fairest.

        Without a certificate, a target below what these rows can tell from parity counts as that: to go further would
        be to pay for noise.
        """
        within = target_ks if self.confidence is not None else max(target_ks, self.ks_resolved)
        meeting = [point for point in self.points if self.meets(point, within)]
        untouched = self.untouched
        if untouched in meeting:
            return _most_accurate(
                p for p in meeting if p.mse <= untouched.mse and p.ks_population <= untouched.ks_population
            )
        if not meeting:
            alike = np.hypot(min(point.ks_population for point in self.points), self.ks_resolved)
            meeting = [point for point in self.points if point.ks_population <= alike]
        return _most_accurate(meeting)

    def model(self, i: int) -> Any:
        """The repaired model of point i, of the type of the model that was given."""
        return self.adapter.replace(self.weights[range(len(self.points))[i]]).model

    def to_frame(self) -> pd.DataFrame:
        """One row for each point; ``ks_population`` and ``ks_certified`` are what the rule compares with a target."""
        frame = pd.DataFrame([asdict(point) for point in self.points]).drop(columns="index")
        return frame if self.confidence is not None else frame.drop(columns="ks_certified")


def _most_accurate(points: Iterable[CurvePoint]) -> CurvePoint:
    return min(points, key=lambda point: (point.mse, point.ks_population))


# --- judging -------------------------------------------------------------------------------------------------------


def judge(
    candidates: Candidates,
    adapter: ModelAdapter,
    *,
    effort: Effort,
    seed: int = 0,
    confidence: float | None = None,
    certificate: str = "normal",
) -> Curve:
    """The fits that are not beaten in both error and parity, as a curve.

    When fewer than ``effort.points`` are unbeaten, those that are beaten only by them follow, and so on. The untouched
    model, where it is among the fits, is on every curve.

    Parameters
    ----------
    adapter : of the untouched model, which the models of the curve are copies of
    confidence, certificate : of the bounds by which points are certified; none without a confidence
    """
    sample, fits = candidates.sample, candidates.fits
    if confidence is not None and sample.judged_on == "train":
        raise InputError(
            "{confidence} needs rows that neither fitted nor chose, and here all rows fitted: a certificate cannot "
            "come from them. Pass {validation}, or more rows of every group, or leave the confidence out.",
            confidence=Given(confidence),
            validation=Given(),
        )

    refitted = outputs(sample.head, sample.judging, candidates.plain) if candidates.plain else None

    def look() -> dict[str, Any]:
        rows = sample.judging
        # Neither the order of two rows nor that of two candidates may hang on the last bits of a sum.
        judging = measurable(candidates.judging, rows.prediction)
        here = Judging.of(rows, len(sample.labels), seed)
        errors, distances = here.errors(judging), here.distances(judging)
        fitted = _training_distances(sample, fits, candidates.training)
        if fitted is None:
            # Rows that fitted show no excess by sampling; but the untouched model was not fitted to parity.
            excess = [here.null.floor * (fit.target == UNTOUCHED) for fit in fits]
            population = np.sqrt(np.maximum(0.0, distances**2 - np.square(excess)))
        else:
            few = len(sample.training)
            # A few of the rows that fit say which candidate is fairer, but less than those that judge how fair it is.
            order_only = len(fits) == 1 or few < min(len(rows), sum(sample.sizes)) or not few
            population = population_along_curve(distances, fitted, here.null.floor, order_only=order_only)
        certified = None
        if fitted is not None and confidence is not None:
            certified = _certified(here, judging, fitted, confidence, certificate)
        kept = _kept(fits, errors, population, certified, effort.points)
        points = []
        for place, i in enumerate(kept):
            ranked = Ranked(judging[:, i], here.groups)
            low, high = here.interval(ranked, effort.resamples)
            points.append(
                CurvePoint(
                    mse=float(errors[i]),
                    ks=float(distances[i]),
                    ks_low=low,
                    ks_high=high,
                    mean_gap=here.mean_gap(judging[:, i]),
                    variance_gap=here.variance_gap(judging[:, i]),
                    target=fits[i].target,
                    ridge=fits[i].ridge,
                    strength=fits[i].strength,
                    ks_population=float(population[i]),
                    ks_upper=upper_bound(ranked, confidence or 0.95, certificate),
                    ks_certified=None if certified is None else float(certified[i]),
                    constant=here.constant(judging[:, i]),
                    index=place,
                )
            )
        plain = None if refitted is None else here.errors(refitted)
        return {
            "points": tuple(points),
            "candidates": tuple(kept),
            "ks_floor": here.null.floor,
            "ks_resolved": here.resolved,
            "rows": here.fewest,
            "mse_refit": None if plain is None else float(plain.min()),
            "refit": None if plain is None else candidates.plain[int(plain.argmin())],
        }

    found = broadcast(look)
    return Curve(
        evaluated_on=sample.judged_on,
        weights=tuple(weights_of(sample.layer, fits[i]) for i in found["candidates"]),
        adapter=adapter,
        confidence=confidence,
        certificate=certificate,
        **found,
    )


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


def _training_distances(sample: Sample, fits: Sequence[Fit], training: Array) -> Array | None:
    """(k,) the KS distance of each fit on rows that do not judge; None where the rows that judge have fitted.

    Only their order counts. Where there are no training rows but their moments, it is the distance of normal
    distributions with the groups' means and variances (a head is monotone and changes no KS distance).
    """
    if sample.judged_on == "train":
        return None
    if len(fits) == 1:
        return np.zeros(1)  # nothing to put in order
    if len(sample.training):
        # without the last bits, which would else decide the order of equal ones
        groups, untouched = Judging.of(sample.training, len(sample.labels)).groups, sample.judging.prediction
        return np.round([ks_between(measurable(column, untouched), groups) for column in training.T], 12)
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
    bounds = [upper_bound(Ranked(judging[:, i], here.groups), confidence, method) for i in order]
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
    """Rows that judge, and what they say of predictions (n,) for them, or of the columns of (n, k)."""

    rows: Rows
    groups: Groups
    seed: int = 0

    @classmethod
    def of(cls, rows: Rows, count: int, seed: int = 0) -> "Judging":
        return cls(rows, Groups.of(rows.codes, count, rows.parity_weight, rows.strata), seed)

    @cached_property
    def null(self) -> Null:
        """What parity would show; models of one curve share the ties of the untouched one."""
        return ks_null(self.groups, self.rows.prediction, self.seed, draws=1000, normals=self._normals)

    @property
    def resolved(self) -> float:
        """The population distance at which a sample's, about √(k² + floor²), is the 90 % point of parity's own."""
        return float(np.sqrt(max(0.0, self.null.quantile(0.9) ** 2 - self.null.floor**2)))

    @property
    def fewest(self) -> float:
        """Effective rows of the two smallest groups, ``1/(1/n₁ + 1/n₂)``."""
        return float(1 / np.sum(1 / np.sort(self.groups.sizes)[:2]))

    def errors(self, columns: Array) -> Array:
        """(k,) weighted mean squared error."""
        share = self.rows.weight / self.rows.weight.sum()
        return np.array([share @ (column - self.rows.y) ** 2 for column in columns.T])

    def distances(self, columns: Array) -> Array:
        """(k,) KS distance."""
        return np.array([ks_between(column, self.groups) for column in columns.T])

    def mean_gap(self, prediction: Array) -> float:
        return float(np.ptp(self.groups.means(prediction)))

    def variance_gap(self, prediction: Array) -> float:
        return float(np.ptp(self.groups.variances(prediction)))

    def interval(self, ranked: Ranked, draws: int) -> tuple[float, float]:
        return ks_interval(ranked, floor=self.null, draws=draws, random_state=self.seed, normals=self._normals)

    @cached_property
    def _normals(self) -> Normals:
        """Draws that the intervals of all points share: the first of one long list."""
        rng, known = np.random.default_rng(self.seed), np.empty(0)

        def drawn(shape: tuple[int, int, int]) -> Array:
            nonlocal known
            missing = prod(shape) - len(known)
            if missing > 0:  # a little more: points differ in a threshold or two
                known = np.append(known, rng.standard_normal(missing + missing // 50))
            return known[: prod(shape)].reshape(shape)

        return drawn

    def constant(self, prediction: Array) -> bool:
        """Whether hardly anything is left of the spread that the untouched model's predictions have."""
        return bool(prediction.std() <= FLAT * self.rows.prediction.std())

    def figures(self, prediction: Array) -> dict[str, Any]:
        """What a summary says both of the untouched model and of the repaired one."""
        measured = measurable(prediction, self.rows.prediction)
        error = (prediction - self.rows.y) ** 2
        return {
            "mse": float(self.errors(prediction[:, None])[0]),
            "ks": ks_between(measured, self.groups),
            "group_mse": replace(self.groups, weight=self.rows.weight).means(error).tolist(),
            "mean_gap": self.mean_gap(prediction),
            "variance_gap": self.variance_gap(prediction),
        }


# --- choosing ------------------------------------------------------------------------------------------------------


def choose(
    curve: Curve,
    *,
    target_ks: float | None = None,
    max_mse_increase: float | None = None,
    as_far_as_told: bool = False,
) -> CurvePoint:
    """A point of the curve, with a warning when none is as asked for.

    Parameters
    ----------
    target_ks : as :meth:`Curve.select`
    max_mse_increase : the fairest point whose error is at most this part above the untouched model's
    as_far_as_told : without either, as for a target of 0.05, or of what these rows can tell from parity if that is
        more; else the most accurate point that is pressed for parity at all (``strength`` above 0)
    """
    if max_mse_increase is not None:
        point = _fairest_within(curve, max_mse_increase)
    elif target_ks is not None:
        point = curve.select(target_ks=target_ks)
        if not curve.meets(point, target_ks):
            _note_missed(curve, point, target_ks)
    elif as_far_as_told:
        point = curve.select(target_ks=max(PARITY, curve.ks_resolved))
    else:
        point = _most_accurate(point for point in curve.points if point.strength > 0)
        _note_worse(curve, point)
    if point.constant:
        _note(
            "the repaired model predicts nearly one number for everybody; that is parity, and of no other use. A "
            "milder {target_ks} or {max_mse_increase} would keep more. See {curve_} for what can be reached.",
            target_ks=Given(),
            max_mse_increase=Given(),
            curve_=Given(),
        )
    return point


def _fairest_within(curve: Curve, increase: float) -> CurvePoint:
    untouched = curve.untouched
    assert untouched is not None
    within = [point for point in curve.points if point.mse <= untouched.mse * (1 + increase)]
    point = min(within, key=lambda point: (point.ks_population, point.mse))
    if point is untouched:
        _note("within {max_mse_increase} nothing is fairer than the model as given.", max_mse_increase=Given(increase))
    return point


def _note_missed(curve: Curve, point: CurvePoint, target_ks: float) -> None:
    """Why the target is not met, what was taken instead, and what would help."""
    fairest = min(curve.points, key=lambda p: (p.ks_population, p.mse))
    taken = "took the most accurate of the fairest, with an estimated KS of {ks_population:.3f} in the population"
    if curve.confidence is not None:
        needed = rows_to_certify(
            fairest.ks_population, target_ks=target_ks, confidence=curve.confidence, method=curve.certificate
        )
        more = "no number of rows would do, since no estimate is below the target"
        if np.isfinite(needed):
            more = f"about {needed / curve.rows:.1f} times as many {{rows}} rows would be needed"
        said = (
            f"no candidate can be certified to keep {{target_ks}} at {{confidence}} on the {{rows}} rows; {taken} and "
            f"a bound of {{ks_upper:.3f}}; {more}. See {{curve_}} for what can be reached."
        )
    elif target_ks < curve.ks_resolved:
        said = (
            "{target_ks} is below {resolved:.3f}, the smallest KS that the {rows} rows can tell from parity (which "
            f"shows about {{floor:.3f}} on them); {taken} and error {{mse:.4g}}. The fairest has error "
            "{fairest:.4g}, for a difference that may be noise; more rows in the smallest group would tell."
        )
    else:
        said = (
            f"no candidate meets {{target_ks}}; {taken}, {{ks:.3f}} [{{ks_low:.3f}}, {{ks_high:.3f}}] on the {{rows}} "
            "rows. See {curve_} for what can be reached."
        )
    asked = {"target_ks": Given(target_ks), "confidence": Given(curve.confidence), "curve_": Given()}
    known = {"floor": curve.ks_floor, "resolved": curve.ks_resolved, "fairest": fairest.mse, "rows": curve.evaluated_on}
    _note(said, **asked, **known, **asdict(point))


def _note_worse(curve: Curve, point: CurvePoint) -> None:
    untouched = curve.untouched
    if untouched is not None and point.mse > untouched.mse and point.ks > untouched.ks:
        _note(
            "the repaired model is worse than the one given in both error ({before:.4g} to {mse:.4g}) and KS "
            "({ks_before:.3f} to {ks:.3f}) on the {rows} rows. With {target_ks} the model given would be kept where "
            "nothing is better.",
            before=untouched.mse,
            ks_before=untouched.ks,
            rows=curve.evaluated_on,
            target_ks=Given(),
            **asdict(point),
        )


def _note(template: str, **values: Any) -> None:
    warnings.warn(ESVDFairWarning(template, values), stacklevel=5)


def decided_by(curve: Curve, point: CurvePoint, *, target_ks: float | None, max_mse_increase: float | None) -> str:
    """In a few words, why this point."""
    if max_mse_increase is not None:
        return "the fairest within the error allowed"
    if target_ks is None:
        return "the model as given" if point.target == UNTOUCHED else "no target"
    if not curve.meets(point, target_ks):
        if curve.confidence is not None:
            return "none can be certified: among the fairest"
        return (
            "as far as these rows can tell"
            if target_ks < curve.ks_resolved
            else "none meets the target: among the fairest"
        )
    if point.target == UNTOUCHED:
        return "the model as given meets the target"
    return "the most accurate that " + ("meets the target" if curve.confidence is None else "is certified")


def summarise(
    sample: Sample,
    after: Array,
    curve: Curve,
    point: CurvePoint,
    *,
    method: str,
    target_ks: float | None,
    max_mse_increase: float | None = None,
) -> dict[str, Any]:
    """What was reached on the judging rows, ``after`` (n,) being what the chosen point predicts for them."""
    rows, labels = sample.judging, sample.labels
    here = Judging.of(rows, len(labels))
    old, new = here.figures(rows.prediction), here.figures(after)
    return {
        "method": method,
        "target_ks": target_ks,
        "met": None if target_ks is None else curve.meets(point, target_ks),
        "certified": None if target_ks is None or point.ks_certified is None else point.ks_certified <= target_ks,
        "confidence": curve.confidence,
        "decided_by": decided_by(curve, point, target_ks=target_ks, max_mse_increase=max_mse_increase),
        "constant": here.constant(after),
        **before_and_after(labels, old, new),
        "mse_refit": curve.mse_refit,
        "ks_population": point.ks_population,
        "ks_upper": point.ks_upper,
        "ks_interval": (point.ks_low, point.ks_high),
        "ks_floor": curve.ks_floor,
        "group_sizes": by_group(labels, np.bincount(rows.codes, minlength=len(labels)).tolist()),
        "evaluated_on": sample.judged_on,
        "error_against": sample.error_against,
        "rows": len(rows),
        **_unadjusted(rows, after, len(labels)),
    }


def before_and_after(labels: Sequence[Any], old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Figures of the untouched and of the repaired model, such as ``mse_before``; lists are of the groups."""
    return {
        f"{name}_{when}": by_group(labels, figures[name]) if isinstance(figures[name], list) else figures[name]
        for name in old
        for when, figures in (("before", old), ("after", new))
    }


def _unadjusted(rows: Rows, after: Array, count: int) -> dict[str, Any]:
    """Beside adjusted gaps the raw ones, and the share of people who are like nobody of some other group."""
    if rows.adjusted is None:
        return {}
    here = Judging.of(replace(rows, adjusted=None, strata=None), count)
    old, new = here.figures(rows.prediction), here.figures(after)
    return {
        "ks_raw_before": old["ks"],
        "ks_raw_after": new["ks"],
        "mean_gap_raw_before": old["mean_gap"],
        "mean_gap_raw_after": new["mean_gap"],
        "outside_support": outside_support(rows.weight, rows.adjusted),
    }
