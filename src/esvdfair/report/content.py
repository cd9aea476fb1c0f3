"""What a report tells, as numbers: every model of the curve on one set of rows, and the explanation of the repair."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.audit import Array, Codes
from esvdfair.batches import Batch, Data, is_stream, make_batches
from esvdfair.core.checks import row_count, take
from esvdfair.core.ks import Groups, Peak, ks_peak
from esvdfair.core.metrics import ks_distance_ci, ks_floor
from esvdfair.curve import Curve, CurvePoint
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.explain import Directions, LayerScan, People, explain_directions, explain_people, scan_layers
from esvdfair.explain.directions import correlate, name_features
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
    fair : the repair
    summary : what it comes to; on rows that neither fitted nor chose, what :meth:`ESVDFair.assess` says of them
    fitting : the rows that layers are explained with
    rows : the rows of the page
    rows_are : "test", "validation", "heldout", "train", or "given" when nobody knows whether they fitted the repair
    rows_given : how many there were; those looked at may be fewer
    predicted : what is predicted, and in which unit
    attribute : name of the sensitive column or columns
    """

    fair: ESVDFair
    summary: Mapping[str, Any]
    fitting: Batch
    rows: Batch
    rows_are: str
    rows_given: int
    predicted: str
    attribute: str

    @property
    def chosen_by(self) -> Mapping[str, Any]:
        """The summary of the rows that chose."""
        found: Mapping[str, Any] = self.fair.summary_
        return found

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

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [int(rows) for rows in np.bincount(self.rows.codes, minlength=len(self.rows.labels))]

    @property
    def weight(self) -> Array:
        return np.ones(len(self.rows.codes)) if self.rows.weight is None else self.rows.weight

    @cached_property
    def points(self) -> list[CurvePoint]:
        """What the slider shows of the curve."""
        curve, point = getattr(self.fair, "curve_", None), self.fair.point_
        return [] if curve is None or point is None else slider_points(curve, point)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Positions of the slider, the untouched model first."""
        models: list[tuple[CurvePoint | None, Any]] = [(None, self.fair.model_)]
        models += [(point, self.fair.curve_.model(point.index)) for point in self.points]
        models += [] if self.points else [(None, self.fair.estimator_)]
        before = predict(self.fair, self.fair.model_, self.rows.x)
        truth = before if self.rows.y is None else self.rows.y  # without labels, errors are changes
        return tuple(self._step(point, predict(self.fair, model, self.rows.x), truth) for point, model in models)

    def _step(self, point: CurvePoint | None, prediction: Array, truth: Array) -> Step:
        error, groups = (prediction - truth) ** 2, Groups(self.rows.codes, len(self.rows.labels), self.rows.weight)
        mse = float(np.average(error, weights=self.weight))
        return Step(point, prediction, ks_peak(prediction, groups), mse, groups.means(error), groups.means(prediction))

    @property
    def chosen(self) -> int:
        """Position of the repaired model in ``steps``."""
        point = self.fair.point_
        if not self.points:
            return 1
        return 0 if point.target == UNTOUCHED else 1 + self.points.index(point)

    @property
    def before(self) -> Step:
        return self.steps[0]

    @property
    def after(self) -> Step:
        return self.steps[self.chosen]

    @property
    def others(self) -> list[tuple[float, float]]:
        """(KS, error) of the points of the curve that the slider leaves out, when these rows judged them."""
        drawn = {point.index for point in self.points}
        every = self.fair.curve_.points if self.points and self.rows_judged else ()
        return [(p.ks, p.mse) for p in every if p.index not in drawn]

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the predictions before: what a difference is large or small against."""
        return float(self.before.prediction.std())

    @cached_property
    def ks_floor(self) -> float:
        return ks_floor(
            y_pred=self.after.prediction, sensitive_features=self.rows.codes, sample_weight=self.rows.weight
        )

    @cached_property
    def ks_interval(self) -> tuple[float, float]:
        """Of the repaired model on these rows."""
        beside: dict[str, Any] = {"sensitive_features": self.rows.codes, "sample_weight": self.rows.weight}
        return ks_distance_ci(self.after.prediction, floor=self.ks_floor, **beside)

    @cached_property
    def scan(self) -> LayerScan | str:
        """Of the layers, judged on the rows of the page; or why there is none."""
        fair, judges = self.fair, (self.rows.x, self.rows.y, *named_groups(self.rows).values())
        y = self.fitting.y if self.has_labels else None
        options: dict[str, Any] = {"output": fair.output, "batch_size": fair.batch_size, "effort": fair.effort}
        options |= {"validation": judges, **named_groups(self.fitting)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ESVDFairWarning)  # about single layers; the page shows a dash there
                scan = scan_layers(fair.model_, self.fitting.x, y, **options)
        except ValueError as error:
            return str(error)
        if all(layer.ks is None for layer in scan.layers):
            return "after an edit of any layer the network would predict one value for everybody."
        return scan

    @cached_property
    def layers(self) -> list[str]:
        """Names of all linear layers."""
        adapter = adapt(self.fair.model_, output=self.fair.output)
        return [layer.name for layer in adapter.layers(take(self.rows.x, np.arange(1)))]

    @property
    def hidden_edits(self) -> list[str]:
        """Layers before the last that the repair edited."""
        return [edit.layer for edit in self.fair.edits_ if edit.layer != self.layers[-1]]

    @cached_property
    def directions(self) -> Directions | str:
        """Of the hidden layer that the repair edited; else of the last hidden one, with what an edit of it would do."""
        fair, edited = self.fair, self.hidden_edits
        if len(self.layers) == 1:
            return "the model has no layer before its last one, which the repair refitted."
        options: dict[str, Any] = {**named_groups(self.fitting), "top": DIRECTIONS, "batch_size": fair.batch_size}
        try:
            if edited:
                return explain_directions(fair, self.fitting.x, layer=edited[0], **options)
            return explain_directions(fair.model_, self.fitting.x, layer=-2, output=fair.output, **options)
        except ValueError as error:
            return str(error)

    @cached_property
    def people(self) -> People:
        """Who is moved."""
        found = explain_people(self.before.prediction, self.after.prediction, **named_groups(self.rows), top=MOVERS)
        places = self.rows.x.index if hasattr(self.rows.x, "iloc") else self.rows.row_id  # what the user calls a row
        return replace(found, movers=tuple(replace(m, row=places[m.row]) for m in found.movers))

    @cached_property
    def features(self) -> list[Feature]:
        """The input columns that tell most of both group and prediction."""
        rows, groups = self.rows, len(self.rows.labels)
        members = (rows.codes[:, None] == np.arange(groups)).astype(np.float64)
        values = np.column_stack([self.before.prediction, self.after.prediction, members])
        names, correlations = correlate(values, self.weight, rows.x, name_features(rows.x, None))
        found = []
        for name, (old, new, *of_groups) in zip(names, correlations.T, strict=True):
            strongest = max(of_groups, key=abs) if groups > 2 else of_groups[1]
            found.append(Feature(name, float(strongest), float(old), float(new)))
        return sorted(found, key=lambda f: -abs(f.group * f.before))[:FEATURES]


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
    """Choose the rows of the page and what is said of them; all else is computed as it is asked for."""
    fitting, shown, rows_are = _choose_rows(fair, rows, apart, which)
    given = len(shown.codes)
    fitting, shown = (part.take(spread_rows(part.codes, ROWS_OF_A_GROUP)) for part in (fitting, shown))
    told = fair.summary_
    if rows_are == "test":
        told = summary or fair.assess(shown.x, shown.y, **named_groups(shown))
    return Content(fair, told, fitting, shown, rows_are, given, predicted, attribute)


def read_rows(fair: ESVDFair, X: Any, y: Any, sensitive_features: Any, sample_weight: Any = None) -> Batch:
    """All rows, checked."""
    if is_stream(X):
        raise ValueError("X yields batches, but a report needs its rows in memory; pass a sample as an array.")
    if not row_count(X):
        raise ValueError("X has no rows; there is nothing to report on.")
    classes = adapt(fair.model_, output=fair.output).classes
    options: dict[str, Any] = {"missing": fair.missing, "batch_size": row_count(X), "classes": classes}
    (rows,) = make_batches(Data(X, y, sensitive_features, sample_weight), **options)
    if len(rows.labels) < 2:
        raise ValueError("sensitive_features holds fewer than two groups; a report compares them. Pass rows of each.")
    sizes = np.bincount(rows.codes, None if rows.weight is None else rows.weight > 0, len(rows.labels)).astype(int)
    if sizes.min() < 2:
        raise ValueError(
            f"group {rows.labels[int(sizes.argmin())]!r} has {sizes.min()} row; its distribution needs at least 2. "
            "Pass more rows, or leave the group out."
        )
    return rows


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
    """Rows to explain the layers with, rows of the page, and what these are."""
    if apart is not None:
        return _counted(rows), _counted(apart), "test" if which == "test" else fair.summary_["evaluated_on"]
    judged = fair.judged(rows)
    if judged is None:
        return _counted(rows), _counted(rows), "given"
    shown = rows.take(np.flatnonzero(judged))
    fitting = shown if judged.all() else rows.take(np.flatnonzero(~judged))
    return _counted(fitting), _counted(shown), fair.summary_["evaluated_on"]


def _counted(rows: Batch) -> Batch:
    """Those with weight."""
    return rows if rows.weight is None else rows.take(np.flatnonzero(rows.weight > 0))


def named_groups(rows: Batch) -> dict[str, Any]:
    """Labels and weights, as every function of the package takes them."""
    column = np.empty(len(rows.labels), dtype=object)
    column[:] = rows.labels
    return {"sensitive_features": column[rows.codes], "sample_weight": rows.weight}


def predict(fair: ESVDFair, model: Any, X: Any) -> Array:
    return np.asarray(adapt(model, output=fair.output).predict(X), dtype=np.float64).reshape(-1)
