"""What a report tells: every model of the curve on one set of rows, the explanation of the repair, and the sentences.

Sentences are plain text: whoever places them escapes them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair import explain
from esvdfair.audit import Array, Codes
from esvdfair.batches import COLUMNS, Batch, Data, make_batches
from esvdfair.core.checks import Label, row_count, take
from esvdfair.core.ks import Groups, Peak, ks_peak
from esvdfair.core.pairs import Pairs
from esvdfair.curve import Curve, CurvePoint
from esvdfair.cutoffs import Decisions, decisions
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.methods import UNTOUCHED
from esvdfair.models import adapt
from esvdfair.models.base import ModelAdapter
from esvdfair.text import label_text, number, share, signed, some_names

ROWS_OF_A_GROUP = 10_000
"""Of a larger group, so many rows are looked at."""
STEPS = 40
"""Positions of the slider, at most, besides the untouched model."""
UNNAMED = "group"
"""Name of the attribute when its column has none."""

TOP = ({"select_share": 0.1}, {"select_share": 0.2}, {"select_share": 0.5})
"""Where decisions are compared unless cut-offs are given."""


@dataclass(frozen=True)
class Step:
    """A position of the slider: a model on the rows of the page."""

    point: CurvePoint | None  # None for the untouched model, and for a repair that has no curve
    prediction: Array  # (rows,)
    peak: Peak  # where two groups' distributions are farthest apart, which is the KS distance
    mse: float  # mean squared error, or change where there are no labels
    group_mse: Array  # (G,)
    means: Array  # (G,)


@dataclass(frozen=True)
class Distances:
    """Of the repaired model, the largest over the pairs of groups: interval, noise level, estimated population KS."""

    interval: tuple[float, float]
    floor: float
    population: float


@dataclass(frozen=True)
class Content:
    """Everything that the page shows, as numbers, all of them about one set of rows."""

    fair: ESVDFair
    summary: Mapping[str, Any]  # on rows that neither fitted nor chose, what `ESVDFair.assess` says of them
    fitting: Batch  # the rows that layers are explained with
    rows: Batch  # those of the page, of the groups that are compared
    aside: Batch  # rows of groups that are too small to judge, which count in the error only
    rows_are: str  # "test", "validation", "heldout", "train", or "given": nobody knows whether they fitted the repair
    rows_given: int  # how many there were; those looked at may be fewer
    predicted: str  # what is predicted, and in which unit
    attribute: str  # name of the sensitive column or columns
    cutoffs: tuple[Mapping[str, Any], ...] = TOP  # options of `decisions`

    @property
    def rows_judged(self) -> bool:
        """Whether the rows of the page are those that judged the repair."""
        return bool(self.rows_are == self.fair.summary_["evaluated_on"])

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
    def set_aside(self) -> dict[Label, int]:
        """Groups that are too small to judge, with their rows."""
        if self.summarised:
            return dict(self.summary.get("groups_set_aside") or {})
        sizes = np.bincount(self.aside.codes, minlength=len(self.aside.labels)).tolist()
        return {label: rows for label, rows in zip(self.aside.labels, sizes, strict=True) if rows}

    # --- models of the curve -------------------------------------------------------------------------------------

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
        rows, found, original = self.rows, list[Step](), list[Array]()
        groups, weight = Groups(rows.codes, len(rows.labels), rows.weight), self._everybody("weight")
        for point, model in models:
            adapter = adapt(model, output=self.fair.output)
            predicted = [
                adapter.predict(part.x).astype(np.float64).reshape(-1) if len(part.codes) else np.zeros(0)
                for part in (rows, self.aside)
            ]
            original = original or predicted
            truths = [of if part.y is None else part.y for part, of in zip((rows, self.aside), original, strict=True)]
            errors = [(a - b) ** 2 for a, b in zip(predicted, truths, strict=True)]  # without labels these are changes
            mse = float(np.average(np.concatenate(errors), weights=weight))
            means = groups.means(errors[0]), groups.means(predicted[0])
            found.append(Step(point, predicted[0], ks_peak(predicted[0], groups), mse, *means))
        return tuple(found)

    def _everybody(self, name: str) -> Array | None:
        """A column of all rows, also of those in groups that are too small to judge."""
        parts = getattr(self.rows, name), getattr(self.aside, name)
        return None if parts[0] is None else np.concatenate([part for part in parts if part is not None])

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

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the predictions before: what a difference is large or small against."""
        return float(self.before.prediction.std())

    @cached_property
    def distances(self) -> Distances:
        """KS of the repaired model with its interval and noise level, as the summary has it of the same rows."""
        s = self.summary
        seen = len(self.rows.codes) + len(self.aside.codes)
        if self.summarised and not self.adjusted and seen == self.rows_given == s["rows"]:
            return Distances(s["ks_interval"], s["ks_floor"], s["ks_population"])
        groups = Groups.of(self.rows.codes, len(self.rows.labels), self.rows.weight)
        pairs, scores = Pairs(groups, self.after.prediction), self.after.prediction
        population = s["ks_population"] if self.summarised and not self.adjusted else pairs.compare(scores).largest
        return Distances(pairs.largest_interval(scores), float(pairs.floors.max()), population)

    @cached_property
    def decided(self) -> list[Decisions]:
        """Decisions at each cut-off, by the original and by the repaired model."""
        old, new, beside = self.before.prediction, self.after.prediction, named_groups(self.rows)
        return [decisions(old, new, **{**beside, **options}) for options in self.cutoffs]

    def r2(self, step: Step) -> float | None:
        """R² of a model; None without labels."""
        y, weight = self._everybody("y"), self._everybody("weight")
        if y is None:
            return None
        variance = float(np.average((y - np.average(y, weights=weight)) ** 2, weights=weight))
        return 1 - step.mse / variance if variance > 0 else 0.0

    # --- explanation of the repair -------------------------------------------------------------------------------

    @cached_property
    def scan(self) -> explain.LayerScan | str:
        """Of the layers, judged on the rows of the page; or why there is none."""
        fair, judges = self.fair, (self.rows.x, self._given_labels(self.rows), *named_groups(self.rows).values())
        y = self._given_labels(self.fitting) if self.has_labels else None
        options: dict[str, Any] = {"output": fair.output, "batch_size": fair.batch_size, "effort": fair.effort}
        options |= {"validation": judges, **named_groups(self.fitting)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ESVDFairWarning)  # about single layers; the page shows a dash there
                scan = explain.scan_layers(fair.model_, self.fitting.x, y, **options)
        except ValueError as error:
            return str(error)
        if all(layer.ks is None for layer in scan.layers):
            return "after an edit of any layer the network would predict one value for everybody."
        return scan

    def _given_labels(self, rows: Batch) -> Any:
        """Labels as the model knows them: those of a classifier are classes, not 0 and 1."""
        classes = self._model.classes
        return rows.y if rows.y is None or classes is None else np.asarray(classes)[rows.y.astype(int)]

    @cached_property
    def _model(self) -> ModelAdapter:
        return adapt(self.fair.model_, output=self.fair.output)

    @cached_property
    def layers(self) -> list[str]:
        """Names of all linear layers."""
        return [layer.name for layer in self._model.layers(take(self.rows.x, np.arange(1)))]

    @property
    def hidden_edits(self) -> list[str]:
        """Layers before the last that the repair edited."""
        return [edit.layer for edit in self.fair.edits_ if edit.layer != self.layers[-1]]

    @cached_property
    def directions(self) -> explain.Directions | str:
        """Of the hidden layer that the repair edited; else of the last hidden one, with what an edit of it would do."""
        fair, edited = self.fair, self.hidden_edits
        if len(self.layers) == 1:
            return "the model has no layer before its last one, which the repair refitted."
        options: dict[str, Any] = {**named_groups(self.fitting), "top": 3, "batch_size": fair.batch_size}
        options |= {"layer": edited[0]} if edited else {"layer": -2, "output": fair.output}
        try:
            return explain.explain_directions(fair if edited else fair.model_, self.fitting.x, **options)
        except ValueError as error:
            return str(error)

    # --- sentences -----------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> list[str]:
        """Of the groups, for sentences and charts: a number says little without the name of its column."""
        labels = self.rows.labels
        bare = not any(isinstance(label, str | tuple) for label in labels) and len(self.attribute) <= 12
        return [f"{self.attribute} {label}" if bare else label_text(label) for label in labels]

    @property
    def all_groups(self) -> str:
        """“groups of sex”."""
        return "groups" if self.attribute == UNNAMED else f"groups of {self.attribute}"

    @property
    def error_name(self) -> str:
        return "mean squared error" if self.has_labels else "mean squared change of the predictions"

    def step_sentence(self, position: int) -> str:
        """One position of the slider."""
        step = self.steps[position]
        r2 = self.r2(step)
        explained = "" if r2 is None else f", R² {share(r2)}"
        error = f"{self.error_name} {number(step.mse, beside=self.spread**2)}"
        reached = f"KS {share(step.peak.distance)}, {error}{explained}."
        if position == 0:
            return f"Original model: {reached}"
        name = f"Point {position} of {len(self.steps) - 1}{' (the chosen one)' if position == self.chosen else ''}"
        return f"{name}: {reached}"


# --- the rows of the page ------------------------------------------------------------------------------------------


def collect(
    fair: ESVDFair,
    data: Data,
    *,
    judged: Data | None,
    test: Data | None,
    summary: Mapping[str, Any] | None,
    predicted: str,
) -> Content:
    """Choose the rows of the page and what is said of them; all else is computed as it is asked for."""
    rows, told = checked_rows(fair, data), fair.summary_
    fitting, shown, rows_are = rows, rows, told["evaluated_on"]
    if test is not None:
        shown, rows_are = checked_rows(fair, test), "test"
        told = summary or fair.assess(test.X, test.y, **{name: getattr(test, name) for name in COLUMNS})
    elif judged is not None:
        shown = checked_rows(fair, judged)
    elif (chose := fair.judged(rows)) is None:
        rows_are = "given"
        if np.count_nonzero(np.bincount(rows.codes) >= fair.min_group_rows) < 2:
            raise InputError(
                "`sensitive_features` contains fewer than two groups of "
                f"`min_group_rows={fair.min_group_rows}` rows or more. Pass more rows."
            )
        told = fair.assess(data.X, data.y, **{name: getattr(data, name) for name in COLUMNS})
        told["evaluated_on"] = rows_are
    else:
        shown = rows.take(np.flatnonzero(chose))
        fitting = shown if chose.all() else rows.take(np.flatnonzero(~chose))
    fitting, shown = (
        part if part.weight is None else part.take(np.flatnonzero(part.weight > 0)) for part in (fitting, shown)
    )
    given, judged_groups = len(shown.codes), tuple(told["group_sizes"])
    aside = _only(shown, tuple(label for label in shown.labels if label not in judged_groups))
    fitting, shown = (_only(part, judged_groups) for part in (fitting, shown))
    if len(shown.labels) < 2:
        known = some_names([label_text(label) for label in told["group_sizes"]], 5)
        raise InputError(f"`sensitive_features` contains fewer than two of the groups that were compared: {known}.")
    fitting, shown, aside = (part.take(spread_rows(part.codes, ROWS_OF_A_GROUP)) for part in (fitting, shown, aside))
    attribute = _attribute(data.sensitive_features)
    return Content(fair, told, fitting, shown, aside, rows_are, given, predicted, attribute)


def checked_rows(fair: ESVDFair, data: Data) -> Batch:
    """All rows, checked; strata are left behind."""
    if data.is_stream:
        raise ValueError("X yields batches, but a report needs its rows in memory; pass a sample as an array.")
    if not row_count(data.X):
        raise ValueError("X has no rows; there is nothing to report on.")
    classes = adapt(fair.model_, output=fair.output).classes
    options: dict[str, Any] = {"missing": fair.missing, "batch_size": row_count(data.X), "classes": classes}
    (rows,) = make_batches(replace(data, control_features=None), **options)
    if np.count_nonzero(np.bincount(rows.codes, rows.weight) > 0) < 2:
        raise InputError("`sensitive_features` contains fewer than two groups; a report compares them.")
    return rows


def _only(rows: Batch, groups: tuple[Label, ...]) -> Batch:
    """The rows of some groups."""
    kept = [label for label in rows.labels if label in groups]
    if len(kept) == len(rows.labels):
        return rows
    place = np.array([kept.index(label) if label in kept else -1 for label in rows.labels], dtype=np.intp)
    part = rows.take(np.flatnonzero(place[rows.codes] >= 0))
    return replace(part, labels=tuple(kept), codes=place[part.codes])


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
    return np.sort(np.concatenate(picked)) if picked else np.zeros(0, dtype=np.intp)


def named_groups(rows: Batch) -> dict[str, Any]:
    """Labels and weights, as every function of the package takes them."""
    column = np.empty(len(rows.labels), dtype=object)
    column[:] = rows.labels
    return {"sensitive_features": column[rows.codes], "sample_weight": rows.weight}


def _attribute(sensitive_features: Any) -> str:
    """Name of the sensitive column or columns."""
    if hasattr(sensitive_features, "columns"):
        return ", ".join(map(str, sensitive_features.columns))
    name = getattr(sensitive_features, "name", None)
    return UNNAMED if name is None else str(name)


# --- words ----------------------------------------------------------------------------------------------------


def layer_name(found: explain.LayerGap | explain.Directions) -> str:
    """What the model calls a layer; a model that is a layer has no name for it."""
    name = found.layer if isinstance(found, explain.Directions) else found.name
    return name or f"number {found.index}"


def follows(direction: explain.Direction) -> str:
    """The inputs that a direction goes with, if it is one."""
    if not direction.stable:
        known = "" if direction.stability is None else f" (|cos| {direction.stability:.2f})"
        return f"not the same in two halves of the rows{known}"
    return ", ".join(f"{name} {signed(correlation)}" for name, correlation in direction.features) or "–"
