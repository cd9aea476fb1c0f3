"""What a report is about: every model of the curve on one set of rows, and the explanation of the repair."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from sklearn.metrics import r2_score

from esvdfair import explain
from esvdfair.audit import Array, Codes
from esvdfair.batches import COLUMNS, Batch, Data, make_batches
from esvdfair.core.checks import Label, row_count, take
from esvdfair.core.ks import Groups, Peak, ks_peak, sorted_groups
from esvdfair.curve import Curve, CurvePoint
from esvdfair.cutoffs import Decisions, decisions
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning, InputError
from esvdfair.explain.directions import correlate
from esvdfair.models import adapt
from esvdfair.models.base import ModelAdapter
from esvdfair.plots import make_grid
from esvdfair.problem import ORIGINAL
from esvdfair.text import label_text, number, share, some_names

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

    point: CurvePoint | None  # None for the original model, and for a repair that has no curve
    prediction: Array  # (rows,)
    peak: Peak  # where two groups' distributions are farthest apart, which is the KS distance
    mse: float  # mean squared error, or change where there are no labels
    r2: float | None  # None without labels
    group_mse: Array  # (G,)
    bias: Array  # (G,) mean error: over-prediction is positive
    means: Array  # (G,)


@dataclass(frozen=True)
class Content:
    """Everything that the page shows, as numbers, all of them about one set of rows."""

    fair: ESVDFair
    summary: Mapping[str, Any]  # of the rows of the page, all of them
    fitting: Batch  # the rows that layers are explained with
    rows: Batch  # those of the page, of the groups that are compared
    aside: Batch  # rows of groups that are too small to judge, which count in the error only
    rows_given: int  # how many there were; those looked at may be fewer
    predicted: str  # what is predicted, and in which unit
    attribute: str  # name of the sensitive column or columns
    cutoffs: Sequence[Mapping[str, Any]]  # options of `decisions`; `TOP` where there are none

    @property
    def rows_are(self) -> str:
        """A key of `EVALUATED_ON`; "given" where nobody knows whether the rows fitted the repair."""
        return str(self.summary["evaluated_on"])

    @property
    def rows_judged(self) -> bool:
        """Whether the rows of the page are those that judged the repair."""
        return bool(self.rows_are == self.fair.summary_["evaluated_on"])

    @property
    def rows_shown(self) -> int:
        return len(self.rows.codes) + len(self.aside.codes)

    @property
    def adjusted(self) -> bool:
        """Whether the repair was for gaps that are adjusted for strata; the page shows people as they are."""
        return "ks_raw_before" in self.summary

    @property
    def has_labels(self) -> bool:
        return self.rows.y is not None

    @property
    def error_name(self) -> str:
        return "mean squared error" if self.has_labels else "mean squared change of the predictions"

    @property
    def mse_refit(self) -> float | None:
        """Error of the last layer refitted without fairness constraint, where it is known."""
        return self.summary.get("mse_refit") if self.has_labels else None

    # --- the groups ----------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> list[str]:
        """Of the groups, for sentences and charts: a number says little without the name of its column."""
        labels = self.rows.labels
        bare = not any(isinstance(label, str | tuple) for label in labels) and len(self.attribute) <= 12
        return [f"{self.attribute} {label}" if bare else label_text(label) for label in labels]

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.rows.codes, len(self.rows.labels), self.rows.weight)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [len(rows) for rows in self.groups.members]

    def of_group(self, values: Array, group: int) -> tuple[Array, Array | None]:
        """A group's values and weights."""
        mine, weight = self.groups.members[group], self.rows.weight
        return values[mine], None if weight is None else weight[mine]

    def grid(self, cells: int) -> Array:
        """Evenly spaced predictions."""
        return make_grid([self.before.prediction, self.after.prediction], cells)

    def shares_below(self, step: Step, thresholds: Array) -> Array:
        """(G, k) part of each group at or below each of k thresholds."""
        ordered = sorted_groups(step.prediction, self.groups)
        return np.array([shares[values.searchsorted(thresholds, side="right")] for values, shares in ordered])

    def quantiles(self, step: Step, levels: Sequence[float]) -> list[list[float]]:
        """(k,) of each group: the smallest predictions that so large parts of it do not exceed."""
        ordered = sorted_groups(step.prediction, self.groups)
        return [values[shares[1:].searchsorted(np.subtract(levels, 1e-12))].tolist() for values, shares in ordered]

    # --- models of the curve -------------------------------------------------------------------------------------

    @cached_property
    def points(self) -> list[CurvePoint]:
        """What the slider shows of the curve."""
        curve, point = getattr(self.fair, "curve_", None), self.fair.point_
        return [] if curve is None or point is None else slider_points(curve, point)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Positions of the slider: the original model, then the others by falling KS distance on these rows."""
        repaired = [self._step(self.fair.curve_.model(point.index), point) for point in self.points]
        repaired = repaired or [self._step(self.fair.estimator_)]
        return self._step(self.fair.model_), *sorted(repaired, key=lambda step: (-step.peak.distance, step.mse))

    def _step(self, model: Any, point: CurvePoint | None = None) -> Step:
        predicted, weight, inside = self._predict(model), self._everybody("weight"), len(self.rows.codes)
        error, shown = predicted - self._truth, predicted[:inside]
        r2 = float(r2_score(self._truth, predicted, sample_weight=weight)) if self.has_labels else None
        mse, of_groups = float(np.average(error**2, weights=weight)), (error[:inside] ** 2, error[:inside], shown)
        return Step(point, shown, ks_peak(shown, self.groups), mse, r2, *map(self.groups.means, of_groups))

    def _predict(self, model: Any) -> Array:
        """Predictions for the rows that are compared, then for those that are set aside."""
        adapter, parts = adapt(model, output=self.fair.output), (self.rows, self.aside)
        return np.concatenate([adapter.predict(part.x).astype(float).reshape(-1) for part in parts if len(part.codes)])

    @cached_property
    def _truth(self) -> Array:
        """Labels; without any, predictions of the original model."""
        labels = self._everybody("y")
        return self._predict(self.fair.model_) if labels is None else labels

    def _everybody(self, name: str) -> Array | None:
        """A column of all rows, also of those in groups that are too small to judge."""
        parts = getattr(self.rows, name), getattr(self.aside, name)
        return None if parts[0] is None else np.concatenate(parts)

    @cached_property
    def chosen(self) -> int:
        """Position of the repaired model in ``steps``."""
        point = self.fair.point_
        if not self.points:
            return 1
        return 0 if point.target == ORIGINAL else [step.point for step in self.steps].index(point)

    @property
    def before(self) -> Step:
        return self.steps[0]

    @property
    def after(self) -> Step:
        return self.steps[self.chosen]

    @cached_property
    def dominated_by(self) -> list[int | None]:
        """Of every step one that has neither a larger error nor a larger KS distance on these rows, if there is one."""
        places = [(step.peak.distance, step.mse) for step in self.steps]

        def better(ks: float, mse: float) -> int | None:
            found = (i for i, (k, m) in enumerate(places) if k <= ks and m <= mse and (k, m) != (ks, mse))
            return next(found, None)

        return [better(*place) for place in places]

    def step_sentence(self, position: int) -> str:
        """What the slider says at a position."""
        step, better = self.steps[position], self.dominated_by[position]
        explained = "" if step.r2 is None else f", R² {share(step.r2)}"
        error = f"{self.error_name} {number(step.mse, beside=self.spread**2)}"
        reached = f"KS {share(step.peak.distance)}, {error}{explained}."
        if position == 0:
            return f"Original model: {reached}"
        if better is not None:
            which = f"point {better}" if better else "the original model"
            reached += f" On these rows {which} is better or equal in both."
        chosen = " (the chosen model)" if position == self.chosen else ""
        return f"Point {position} of {len(self.steps) - 1}{chosen}: {reached}"

    # --- people --------------------------------------------------------------------------------------------------

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the predictions before: what a difference is large or small against."""
        return float(self.before.prediction.std())

    @cached_property
    def decided(self) -> list[Decisions]:
        """Decisions at each cut-off, by the original and by the repaired model."""
        old, new, beside = self.before.prediction, self.after.prediction, named_groups(self.rows)
        return [decisions(old, new, **{**beside, **options}) for options in self.cutoffs or TOP]

    @property
    def decision(self) -> Decisions:
        """The decisions of the first screen: at the first cut-off that was asked about, else the top 20%."""
        return self.decided[0 if self.cutoffs else 1]

    @cached_property
    def people(self) -> explain.People:
        return explain.explain_people(self.before.prediction, self.after.prediction, **named_groups(self.rows))

    @property
    def row_names(self) -> Any:
        """What the user calls each row."""
        return self.rows.x.index if hasattr(self.rows.x, "iloc") else self.rows.row_id

    @cached_property
    def features(self) -> list[tuple[str, list[float]]]:
        """Input columns, the strongest link first: their correlation with group, and prediction before and after."""
        rows, members = self.rows, self.rows.codes[:, None] == np.arange(len(self.names))
        values = np.column_stack([self.before.prediction, self.after.prediction, members])
        weight = np.ones(len(values)) if rows.weight is None else rows.weight
        names, correlations = correlate(values, weight, rows.x)
        found = []
        for name, (old, new, *of_groups) in zip(names, correlations.T, strict=True):
            own = of_groups[1] if len(of_groups) == 2 else max(of_groups, key=abs)
            found.append((name, [own, old, new]))
        return sorted(found, key=lambda feature: -abs(feature[1][0] * feature[1][1]))

    # --- explanation of the repair -------------------------------------------------------------------------------

    @cached_property
    def scan(self) -> explain.LayerScan | str:
        """Of the layers, judged on the rows of the page; or why there is none."""
        if self._model.trees:
            return "trees have no layers."
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

    @cached_property
    def trees(self) -> explain.TreeGap | None:
        """Of a tree ensemble, the original model's difference in means by column and by tree."""
        if not self._model.trees:
            return None
        return explain.explain_trees(self.fair.model_, self.rows.x, output=self.fair.output, **named_groups(self.rows))

    @property
    def largest_trees(self) -> list[tuple[str, float]]:
        """The five trees that carry most of the difference."""
        parts = [] if self.trees is None else self.trees.trees
        named = [(f"tree {place}", part) for place, part in enumerate(parts)]
        return sorted(named, key=lambda tree: -abs(tree[1]))[:5]

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


# --- the rows of the page ------------------------------------------------------------------------------------------


def collect(
    fair: ESVDFair,
    data: Data,
    *,
    judged: Data | None,
    test: Data | None,
    summary: Mapping[str, Any] | None,
    predicted: str,
    cutoffs: Sequence[Mapping[str, Any]],
) -> Content:
    """Choose the rows of the page and what is said of them; all else is computed as it is asked for."""
    fitting = shown = _checked_rows(fair, data)
    known: Mapping[str, Any] = fair.summary_
    if test is not None:
        shown, known = _checked_rows(fair, test), summary or _assess(fair, test)
    elif judged is not None:
        shown = _checked_rows(fair, judged)
    elif (chose := fair.judged(fitting)) is not None:
        shown = fitting.take(np.flatnonzero(chose))
        fitting = fitting if chose.all() else fitting.take(np.flatnonzero(~chose))
    elif np.count_nonzero(np.bincount(shown.codes) >= fair.min_group_rows) < 2:
        few = f"two groups of `min_group_rows={fair.min_group_rows}` rows or more"
        raise InputError(f"`sensitive_features` contains fewer than {few}. Pass more rows.")
    else:
        known = {**_assess(fair, data), "evaluated_on": "given"}
    given, compared = len(shown.codes), tuple(known["group_sizes"])
    aside = _only(shown, set(shown.labels) - set(compared))
    fitting, shown = (_only(part, set(compared)) for part in (fitting, shown))
    if len(shown.labels) < 2:
        names = some_names([label_text(label) for label in compared], 5)
        raise InputError(f"`sensitive_features` contains fewer than two of the groups that were compared: {names}.")
    fitting, shown, aside = (part.take(spread_rows(part.codes, ROWS_OF_A_GROUP)) for part in (fitting, shown, aside))
    columns = getattr(data.sensitive_features, "columns", [getattr(data.sensitive_features, "name", None)])
    attribute = ", ".join(str(name) for name in columns if name is not None) or UNNAMED
    return Content(fair, known, fitting, shown, aside, given, predicted, attribute, cutoffs)


def _assess(fair: ESVDFair, data: Data) -> Mapping[str, Any]:
    return fair.assess(data.X, data.y, **{name: getattr(data, name) for name in COLUMNS})


def _checked_rows(fair: ESVDFair, data: Data) -> Batch:
    """All rows that have weight, checked; strata are left behind."""
    if data.is_stream:
        raise ValueError("X yields batches, but a report needs its rows in memory; pass a sample as an array.")
    if not row_count(data.X):
        raise ValueError("X has no rows; there is nothing to report on.")
    classes = adapt(fair.model_, output=fair.output).classes
    options: dict[str, Any] = {"missing": fair.missing, "batch_size": row_count(data.X), "classes": classes}
    (rows,) = make_batches(replace(data, control_features=None), **options)
    rows = rows if rows.weight is None else rows.take(np.flatnonzero(rows.weight > 0))
    if len(np.unique(rows.codes)) < 2:
        raise InputError("`sensitive_features` contains fewer than two groups; a report compares them.")
    return rows


def _only(rows: Batch, groups: Collection[Label]) -> Batch:
    """The rows of some groups."""
    kept = [code for code, label in enumerate(rows.labels) if label in groups]
    part = rows.take(np.flatnonzero(np.isin(rows.codes, kept)))
    return replace(part, labels=tuple(rows.labels[code] for code in kept), codes=np.searchsorted(kept, part.codes))


def slider_points(curve: Curve, chosen: CurvePoint) -> list[CurvePoint]:
    """The chosen point and those that no other beats in both error and parity, at most ``STEPS``, by falling KS.

    The untouched model, which every slider starts with, is not among them.
    """
    best, front = np.inf, []
    for point in sorted(curve.points, key=lambda p: (p.mse, p.ks)):
        if point.ks < best and point.target != ORIGINAL:
            best = point.ks
            front.append(point)
    kept = [front[i] for i in np.unique(np.linspace(0, len(front) - 1, STEPS - 1).round().astype(int))]
    together = kept if chosen in kept or chosen.target == ORIGINAL else [*kept, chosen]
    return sorted(together, key=lambda point: (-point.ks, point.mse))


def spread_rows(codes: Codes, most: int) -> Codes:
    """Positions of at most so many rows of each group, evenly spread over its rows, in their order."""
    groups = (np.flatnonzero(codes == code) for code in np.unique(codes))
    picked = [rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.intp)] for rows in groups]
    return np.sort(np.concatenate([np.zeros(0, dtype=np.intp), *picked]))


def named_groups(rows: Batch) -> dict[str, Any]:
    """Labels and weights, as every function of the package takes them."""
    labels = np.fromiter(rows.labels, dtype=object, count=len(rows.labels))
    return {"sensitive_features": labels[rows.codes], "sample_weight": rows.weight}
