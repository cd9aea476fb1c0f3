"""What a report tells: predictions at every point of the curve, and the explanation of the repair."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from esvdfair.batches import is_stream
from esvdfair.core.checks import Label, check_column, check_groups
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.explain import Directions, LayerScan, People, explain_directions, explain_people, scan_layers
from esvdfair.explain.features import correlate, name_features
from esvdfair.models import adapt
from esvdfair.tradeoff import Curve, CurvePoint

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

ROWS_OF_A_GROUP = 10_000
"""Of a larger group, so many rows are shown."""
STEPS = 40
"""Positions of the slider, at most, besides the untouched model."""
UNNAMED = "group"
"""Name of the attribute when its column has none."""
FEATURES = 15
MOVERS = 10
DIRECTIONS = 3


@dataclass(frozen=True)
class Step:
    """A position of the slider: a point of the curve (None for the untouched model) and its predictions (rows,)."""

    point: CurvePoint | None
    prediction: Array


@dataclass(frozen=True)
class Feature:
    """Correlations of an input column: with the group it follows most, and with the predictions."""

    name: str
    group: float
    before: float
    after: float


@dataclass(frozen=True)
class Content:
    """Everything that the page shows, as numbers.

    Attributes
    ----------
    summary : of the fitted ESVDFair, from the rows that judged it
    curve : all of its points
    labels, codes : the groups, and the group of each of the rows shown
    attribute : name of the sensitive column or columns
    rows_given : number of rows that the report was given; those shown may be fewer
    has_labels : whether the rows shown have labels
    steps : positions of the slider, the untouched model first
    chosen : position of the repaired model in ``steps``
    scan, directions : of the layers; a text that says why when there is none
    hidden_edit : whether the repair edited a layer before the last, the one that ``directions`` describe
    people, features : who is moved, and what the inputs tell of group and prediction
    """

    summary: dict[str, Any]
    curve: Curve
    labels: tuple[Label, ...]
    codes: Codes
    attribute: str
    rows_given: int
    has_labels: bool
    steps: tuple[Step, ...]
    chosen: int
    scan: LayerScan | str
    directions: Directions | str
    hidden_edit: bool
    people: People
    features: tuple[Feature, ...]

    @property
    def before(self) -> Array:
        return self.steps[0].prediction

    @property
    def after(self) -> Array:
        return self.steps[self.chosen].prediction


def gather(fair: ESVDFair, X: Any, y: Any, *, sensitive_features: Any) -> Content:
    """Run the untouched model and those of the curve over the rows, and explain the repair on them."""
    check_is_fitted(fair, "estimator_")
    if is_stream(X):
        raise ValueError("X yields batches, but a report needs its rows in memory; pass a sample as an array.")
    X = X if hasattr(X, "shape") else np.asarray(X)
    X = X.tocsr() if hasattr(X, "tocsr") else X
    rows_given = int(X.shape[0])
    labels, codes = check_groups(sensitive_features, rows_given, fair.missing)
    _check_sizes(labels, codes)
    shown = spread_rows(codes, ROWS_OF_A_GROUP)
    X, codes = _take(X, shown), codes[shown]
    y = None if y is None else check_column(y, rows_given, "y")[shown]
    groups = _as_column(labels, codes)
    untouched = fair.curve_.build({})
    chosen = chosen_point(fair)
    points = slider_points(fair.curve_, chosen)
    predictions = [_predict(fair, untouched, X), *(_predict(fair, fair.curve_.model(p.index), X) for p in points)]
    steps = tuple(Step(point, found) for point, found in zip([None, *points], predictions, strict=True))
    position = 1 + points.index(chosen)
    before, after = predictions[0], predictions[position]
    directions, hidden_edit = _directions(fair, untouched, X, groups)
    return Content(
        summary=fair.summary_,
        curve=fair.curve_,
        labels=labels,
        codes=codes,
        attribute=_attribute(sensitive_features),
        rows_given=rows_given,
        has_labels=y is not None,
        steps=steps,
        chosen=position,
        scan=_scan(fair, untouched, X, y, groups),
        directions=directions,
        hidden_edit=hidden_edit,
        people=_people(before, after, groups, X, shown),
        features=_features(X, codes, len(labels), before, after),
    )


def chosen_point(fair: ESVDFair) -> CurvePoint:
    """The point of the curve that became the repaired model."""
    mse, ks = fair.summary_["mse_after"], fair.summary_["ks_after"]
    return min(fair.curve_.points, key=lambda point: abs(point.ks - ks) + abs(point.mse - mse) / (mse or 1.0))


def slider_points(curve: Curve, chosen: CurvePoint) -> list[CurvePoint]:
    """The chosen point and those that no other beats in both error and parity, at most ``STEPS``, by falling KS."""
    best, front = np.inf, []
    for point in sorted(curve.points, key=lambda p: (p.mse, p.judged_ks)):
        if point.judged_ks < best:
            best = point.judged_ks
            front.append(point)
    kept = [front[i] for i in np.unique(np.linspace(0, len(front) - 1, STEPS - 1).round().astype(int))]
    together = kept if chosen in kept else [*kept, chosen]
    return sorted(together, key=lambda point: (-point.judged_ks, point.mse))


def spread_rows(codes: Codes, most: int) -> NDArray[np.intp]:
    """Positions of at most so many rows of each group, evenly spread over its rows, in their order."""
    picked = []
    for code in np.unique(codes):
        mine = np.flatnonzero(codes == code)
        picked.append(mine[np.linspace(0, len(mine) - 1, min(most, len(mine))).round().astype(np.intp)])
    return np.sort(np.concatenate(picked))


def _check_sizes(labels: Sequence[Label], codes: Codes) -> None:
    if len(labels) < 2:
        raise ValueError("sensitive_features holds fewer than two groups; a report compares them. Pass rows of each.")
    sizes = np.bincount(codes, minlength=len(labels))
    if sizes.min() < 2:
        raise ValueError(
            f"group {labels[int(sizes.argmin())]!r} has {sizes.min()} row; its distribution needs at least 2. Pass "
            "more rows, or leave the group out."
        )


def _take(X: Any, rows: NDArray[np.intp]) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]


def _as_column(labels: Sequence[Label], codes: Codes) -> NDArray[Any]:
    """(rows,) or (rows, attributes) labels, such as every function of the package takes."""
    if isinstance(labels[0], tuple):
        return np.array([list(labels[code]) for code in codes], dtype=object)
    return np.array([labels[code] for code in codes], dtype=object)


def _attribute(sensitive_features: Any) -> str:
    if hasattr(sensitive_features, "columns"):
        return ", ".join(map(str, sensitive_features.columns))
    name = getattr(sensitive_features, "name", None)
    return UNNAMED if name is None else str(name)


def _predict(fair: ESVDFair, model: Any, X: Any) -> Array:
    return np.asarray(adapt(model, output=fair.output).predict(X), dtype=np.float64).reshape(-1)


def _scan(fair: ESVDFair, untouched: Any, X: Any, y: Any, groups: Any) -> LayerScan | str:
    options = {"output": fair.output, "missing": fair.missing, "batch_size": fair.batch_size}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ESVDFairWarning)  # about single layers; the page shows a dash there
            scan = scan_layers(untouched, X, y, sensitive_features=groups, **options)
    except ValueError as error:
        return str(error)
    if all(layer.ks is None for layer in scan.layers):
        return "after an edit of any layer the network would predict one value for everybody."
    return scan


def _directions(fair: ESVDFair, untouched: Any, X: Any, groups: Any) -> tuple[Directions | str, bool]:
    """Of the hidden layer that the repair edited; else of the last hidden one, with what an edit of it would do."""
    layers = adapt(untouched, output=fair.output).layers(X[:1] if not hasattr(X, "iloc") else X.iloc[:1])
    if len(layers) == 1:
        return "the model has no layer before its last one, which the repair refitted.", False
    edited = [edit.layer for edit in fair.edits_ if edit.layer != layers[-1].name]
    options: dict[str, Any] = {"sensitive_features": groups, "top": DIRECTIONS, "batch_size": fair.batch_size}
    try:
        if edited:
            return explain_directions(fair, X, layer=edited[0], **options), True
        return explain_directions(untouched, X, layer=-2, output=fair.output, **options), False
    except ValueError as error:
        return str(error), bool(edited)


def _people(before: Array, after: Array, groups: Any, X: Any, shown: NDArray[np.intp]) -> People:
    people = explain_people(before, after, sensitive_features=groups, top=MOVERS)
    places = X.index if hasattr(X, "iloc") else shown
    return replace(people, movers=tuple(replace(m, row=places[m.row]) for m in people.movers))


def _features(X: Any, codes: Codes, groups: int, before: Array, after: Array) -> tuple[Feature, ...]:
    """The input columns that tell most of both group and prediction."""
    members = (codes[:, None] == np.arange(groups)).astype(np.float64)
    values = np.column_stack([before, after, members])
    names, correlations = correlate(values, np.ones(len(codes)), X, name_features(X, None))
    found = []
    for name, (old, new, *of_groups) in zip(names, correlations.T, strict=True):
        strongest = max(of_groups, key=abs) if groups > 2 else of_groups[1]
        found.append(Feature(name, float(strongest), float(old), float(new)))
    return tuple(sorted(found, key=lambda f: -abs(f.group * f.before))[:FEATURES])
