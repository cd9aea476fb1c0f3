"""What a report tells, as numbers: every model of the curve on one set of rows, and the explanation of the repair."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from esvdfair.audit import Array, Codes
from esvdfair.batches import Batch, held_out, is_stream, make_batches
from esvdfair.core.checks import row_count, take
from esvdfair.core.ks import Groups, Peak, ks_between, ks_peak
from esvdfair.core.metrics import group_mse, ks_distance_ci, ks_floor
from esvdfair.curve import Curve, CurvePoint
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.explain import Directions, LayerScan, People, explain_directions, explain_people, scan_layers
from esvdfair.explain.features import correlate, name_features
from esvdfair.methods import UNTOUCHED
from esvdfair.models import adapt

ROWS_OF_A_GROUP = 10_000
"""Of a larger group, so many rows are looked at."""
STEPS = 40
"""Positions of the slider, at most, besides the untouched model."""
UNNAMED = "group"
"""Name of the attribute when its column has none."""
FEATURES, MOVERS, DIRECTIONS = 10, 10, 3


@dataclass(frozen=True)
class Step:
    """A position of the slider: a model on the rows of the page.

    Attributes
    ----------
    point : of the curve; None for the untouched model, and for a repair that has no curve
    prediction : (rows,)
    peak : where two groups' distributions are farthest apart, which is the KS distance
    mse : mean squared error, or change where there are no labels
    group_mse, means : (G,) of every group
    """

    point: CurvePoint | None
    prediction: Array
    peak: Peak
    mse: float
    group_mse: Array
    means: Array


@dataclass(frozen=True)
class Feature:
    """Correlations of an input column: with the group it follows most, and with the predictions."""

    name: str
    group: float
    before: float
    after: float


@dataclass(frozen=True)
class Content:
    """Everything that the page shows, as numbers, all of them about one set of rows.

    Attributes
    ----------
    summary : of the fitted ESVDFair; on rows that neither fitted nor chose, what :meth:`ESVDFair.assess` says of them
    chosen_by : the summary of the rows that chose
    rows : the rows of the page
    rows_are : "test", "validation", "heldout", "train", or "given" when nobody knows whether they fitted the repair
    rows_given : how many there were; those looked at may be fewer
    predicted : what is predicted, and in which unit
    attribute : name of the sensitive column or columns
    ks_floor, ks_interval : of the repaired model on these rows
    steps : positions of the slider, the untouched model first
    chosen : position of the repaired model in ``steps``
    others : (KS, error) of the points of the curve that the slider leaves out, when these rows judged them
    scan, directions : of the layers; a text that says why when there is none
    hidden_edit : whether the repair edited a layer before the last, the one that ``directions`` describe
    people, features : who is moved, and what the inputs tell of group and prediction
    """

    summary: Mapping[str, Any]
    chosen_by: Mapping[str, Any]
    rows: Batch
    rows_are: str
    rows_given: int
    predicted: str
    attribute: str
    ks_floor: float
    ks_interval: tuple[float, float]
    steps: tuple[Step, ...]
    chosen: int
    others: tuple[tuple[float, float], ...]
    scan: LayerScan | str
    directions: Directions | str
    hidden_edit: bool
    people: People
    features: tuple[Feature, ...]

    @property
    def before(self) -> Step:
        return self.steps[0]

    @property
    def after(self) -> Step:
        return self.steps[self.chosen]

    @property
    def rows_judged(self) -> bool:
        """Whether the rows of the page are those that judged the repair."""
        return bool(self.rows_are == self.chosen_by["evaluated_on"])

    @property
    def summarised(self) -> bool:
        """Whether ``summary`` is about the rows of the page."""
        return bool(self.rows_are == self.summary["evaluated_on"])

    @property
    def adjusted(self) -> bool:
        """Whether the repair was for gaps that are adjusted for strata; the page shows people as they are."""
        return "ks_raw_before" in self.summary

    @property
    def mse_refit(self) -> float | None:
        """Error of the last layer refitted without parity, where these rows tell it."""
        return self.summary.get("mse_refit") if self.summarised and self.has_labels else None

    @property
    def has_labels(self) -> bool:
        return self.rows.y is not None

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the predictions before: what a difference is large or small against."""
        return float(self.before.prediction.std())


def read_rows(X: Any, y: Any, sensitive_features: Any, sample_weight: Any, missing: str) -> Batch:
    """All rows with weight, checked."""
    if is_stream(X):
        raise ValueError("X yields batches, but a report needs its rows in memory; pass a sample as an array.")
    if not row_count(X):
        raise ValueError("X has no rows; there is nothing to report on.")
    (rows,) = make_batches(X, y, sensitive_features, sample_weight, missing=missing, batch_size=row_count(X))
    rows = rows if rows.weight is None else rows.take(np.flatnonzero(rows.weight > 0))
    if len(rows.labels) < 2:
        raise ValueError("sensitive_features holds fewer than two groups; a report compares them. Pass rows of each.")
    sizes = np.bincount(rows.codes, minlength=len(rows.labels))
    if sizes.min() < 2:
        raise ValueError(
            f"group {rows.labels[int(sizes.argmin())]!r} has {sizes.min()} row; its distribution needs at least 2. "
            "Pass more rows, or leave the group out."
        )
    return rows


def collect(
    fair: ESVDFair,
    rows: Batch,
    apart: Batch | None,
    which: str | None,
    *,
    attribute: str,
    predicted: str,
    summary: Mapping[str, Any] | None = None,
) -> Content:
    """Run the untouched model and those of the curve over the rows of the page, and explain the repair on them."""
    check_is_fitted(fair, "estimator_")
    fitting, shown, rows_are = _choose_rows(fair, rows, apart, which)
    given = len(shown.codes)
    fitting, shown = (part.take(spread_rows(part.codes, ROWS_OF_A_GROUP)) for part in (fitting, shown))
    curve = getattr(fair, "curve_", None)
    models: list[tuple[CurvePoint | None, Any]] = [(None, fair.model_)]
    if curve is None or fair.point_ is None:
        models.append((None, fair.estimator_))
        chosen = 1
    else:
        points = slider_points(curve, fair.point_)
        models += [(point, curve.model(point.index)) for point in points]
        chosen = 0 if fair.point_.target == UNTOUCHED else 1 + points.index(fair.point_)
    steps = _steps(fair, models, shown)
    before, after = steps[0].prediction, steps[chosen].prediction
    told = fair.summary_
    if rows_are == "test":
        told = summary or fair.assess(shown.x, shown.y, **_named_groups(shown))
    groups: dict[str, Any] = {"sensitive_features": shown.codes, "sample_weight": shown.weight}
    floor = ks_floor(y_pred=after, **groups)
    directions, hidden_edit = _directions(fair, fitting)
    return Content(
        summary=told,
        chosen_by=fair.summary_,
        rows=shown,
        rows_are=rows_are,
        rows_given=given,
        predicted=predicted,
        attribute=attribute,
        ks_floor=floor,
        ks_interval=ks_distance_ci(after, floor=floor, **groups),
        steps=steps,
        chosen=chosen,
        others=_others(curve, steps) if rows_are == fair.summary_["evaluated_on"] else (),
        scan=_scan(fair, fitting, shown),
        directions=directions,
        hidden_edit=hidden_edit,
        people=_people(before, after, shown),
        features=_features(shown, before, after),
    )


def slider_points(curve: Curve, chosen: CurvePoint) -> list[CurvePoint]:
    """The chosen point and those that no other beats in both error and parity, at most ``STEPS``, by falling KS.

    The untouched model, which every slider starts with, is not among them.
    """
    best, front = np.inf, []
    for point in sorted(curve.points, key=lambda p: (p.mse, p.ks)):
        if point.ks < best and point.target != UNTOUCHED:
            best = point.ks
            front.append(point)
    kept = [front[i] for i in np.unique(np.linspace(0, len(front) - 1, STEPS - 1).round().astype(int))]
    together = kept if chosen in kept or chosen.target == UNTOUCHED else [*kept, chosen]
    return sorted(together, key=lambda point: (-point.ks, point.mse))


def spread_rows(codes: Codes, most: int) -> NDArray[np.intp]:
    """Positions of at most so many rows of each group, evenly spread over its rows, in their order."""
    picked = []
    for code in np.unique(codes):
        mine = np.flatnonzero(codes == code)
        picked.append(mine[np.linspace(0, len(mine) - 1, min(most, len(mine))).round().astype(np.intp)])
    return np.sort(np.concatenate(picked))


def attribute_name(sensitive_features: Any) -> str:
    """Name of the sensitive column or columns."""
    if hasattr(sensitive_features, "columns"):
        return ", ".join(map(str, sensitive_features.columns))
    name = getattr(sensitive_features, "name", None)
    return UNNAMED if name is None else str(name)


def _choose_rows(fair: ESVDFair, rows: Batch, apart: Batch | None, which: str | None) -> tuple[Batch, Batch, str]:
    """Rows to explain the layers with, rows of the page, and what these are.

    Where nobody says so, the rows that judged the repair are told by their number and by the untouched model's KS
    distance on them: all that were given, or those that the split of the fit holds out.
    """
    if apart is not None:
        return rows, apart, "test" if which == "test" else fair.summary_["evaluated_on"]
    summary, n = fair.summary_, len(rows.codes)
    splits = [np.ones(n, dtype=bool)]
    if summary["evaluated_on"] == "heldout" and isinstance(fair.random_state, int | np.integer):
        splits.append(held_out(fair.validation_fraction, int(fair.random_state))(rows.row_id))
    for out in splits:
        part = rows.take(np.flatnonzero(out))
        if len(part.codes) == summary["rows"] and len(np.unique(part.codes)) == len(rows.labels):
            groups = Groups(part.codes, len(part.labels), part.weight)
            before = summary.get("ks_raw_before", summary["ks_before"])
            if before is not None and abs(ks_between(_predict(fair, fair.model_, part.x), groups) - before) < 1e-9:
                return part if out.all() else rows.take(np.flatnonzero(~out)), part, summary["evaluated_on"]
    return rows, rows, "given"


def _named_groups(rows: Batch) -> dict[str, Any]:
    """Labels and weights, as every function of the package takes them."""
    labels = [tuple(label) if isinstance(label, tuple) else label for label in rows.labels]
    column = np.empty(len(labels), dtype=object)
    column[:] = labels
    return {"sensitive_features": column[rows.codes], "sample_weight": rows.weight}


def _predict(fair: ESVDFair, model: Any, X: Any) -> Array:
    return np.asarray(adapt(model, output=fair.output).predict(X), dtype=np.float64).reshape(-1)


def _steps(fair: ESVDFair, models: Sequence[tuple[CurvePoint | None, Any]], rows: Batch) -> tuple[Step, ...]:
    groups: dict[str, Any] = {"sensitive_features": rows.codes, "sample_weight": rows.weight}
    truth, steps = rows.y, []
    for point, model in models:
        prediction = _predict(fair, model, rows.x)
        truth = prediction if truth is None else truth  # without labels, errors are changes
        errors = group_mse(truth, prediction, **groups)
        weight = np.ones(len(rows.codes)) if rows.weight is None else rows.weight
        share = np.bincount(rows.codes, weight)
        steps.append(
            Step(
                point=point,
                prediction=prediction,
                peak=ks_peak(prediction, Groups(rows.codes, len(rows.labels), rows.weight)),
                mse=float(np.average((prediction - truth) ** 2, weights=weight)),
                group_mse=np.array(list(errors.values())),
                means=np.bincount(rows.codes, weight * prediction) / share,
            )
        )
    return tuple(steps)


def _others(curve: Curve | None, steps: Sequence[Step]) -> tuple[tuple[float, float], ...]:
    drawn = {step.point.index for step in steps if step.point is not None}
    return () if curve is None else tuple((p.ks, p.mse) for p in curve.points if p.index not in drawn)


def _scan(fair: ESVDFair, fitting: Batch, shown: Batch) -> LayerScan | str:
    """Of the layers, judged on the rows of the page."""
    judges = (shown.x, shown.y, *_named_groups(shown).values())
    y = fitting.y if shown.y is not None else None
    options: dict[str, Any] = {"output": fair.output, "batch_size": fair.batch_size, "effort": fair.effort}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ESVDFairWarning)  # about single layers; the page shows a dash there
            scan = scan_layers(fair.model_, fitting.x, y, **_named_groups(fitting), validation=judges, **options)
    except ValueError as error:
        return str(error)
    if all(layer.ks is None for layer in scan.layers):
        return "after an edit of any layer the network would predict one value for everybody."
    return scan


def _directions(fair: ESVDFair, rows: Batch) -> tuple[Directions | str, bool]:
    """Of the hidden layer that the repair edited; else of the last hidden one, with what an edit of it would do."""
    layers = adapt(fair.model_, output=fair.output).layers(take(rows.x, np.arange(1)))
    if len(layers) == 1:
        return "the model has no layer before its last one, which the repair refitted.", False
    edited = [edit.layer for edit in fair.edits_ if edit.layer != layers[-1].name]
    options: dict[str, Any] = {**_named_groups(rows), "top": DIRECTIONS, "batch_size": fair.batch_size}
    try:
        if edited:
            return explain_directions(fair, rows.x, layer=edited[0], **options), True
        return explain_directions(fair.model_, rows.x, layer=-2, output=fair.output, **options), False
    except ValueError as error:
        return str(error), bool(edited)


def _people(before: Array, after: Array, rows: Batch) -> People:
    people = explain_people(before, after, **_named_groups(rows), top=MOVERS)
    places = rows.x.index if hasattr(rows.x, "iloc") else rows.row_id  # what the user calls a row
    return replace(people, movers=tuple(replace(m, row=places[m.row]) for m in people.movers))


def _features(rows: Batch, before: Array, after: Array) -> tuple[Feature, ...]:
    """The input columns that tell most of both group and prediction."""
    groups = len(rows.labels)
    members = (rows.codes[:, None] == np.arange(groups)).astype(np.float64)
    weight = np.ones(len(rows.codes)) if rows.weight is None else rows.weight
    names, correlations = correlate(
        np.column_stack([before, after, members]), weight, rows.x, name_features(rows.x, None)
    )
    found = []
    for name, (old, new, *of_groups) in zip(names, correlations.T, strict=True):
        strongest = max(of_groups, key=abs) if groups > 2 else of_groups[1]
        found.append(Feature(name, float(strongest), float(old), float(new)))
    return tuple(sorted(found, key=lambda f: -abs(f.group * f.before))[:FEATURES])
