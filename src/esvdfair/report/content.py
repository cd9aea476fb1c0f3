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
from esvdfair.plots import make_grid
from esvdfair.problem import ORIGINAL
from esvdfair.text import label_text, number, share, some_names

ROWS_OF_A_GROUP = 10_000
"""Of a larger group, so many rows are looked at."""
STEPS = 40
"""Positions of the slider, at most, besides the untouched model."""
TOP = ({"select_share": 0.1}, {"select_share": 0.2}, {"select_share": 0.5})
"""Where decisions are compared unless cut-offs are given."""


@dataclass(frozen=True)
class Step:
    """A position of the slider: a model on the rows of the page."""

    point: CurvePoint | None  # None for the original model, and for a repair that has no curve
    prediction: Array  # (rows,)
    everybody: Array  # the same, then those of groups that are too small to compare
    peak: Peak  # where two groups' distributions are farthest apart, which is the KS distance
    mse: float  # mean squared error, or change where there are no labels
    r2: float | None  # None without labels
    group_mse: Array  # (G,)
    bias: Array  # (G,) mean error: over-prediction is positive
    means: Array  # (G,)


class Content:
    """Everything that the page shows, as numbers, all of them about one set of rows.

    Attributes
    ----------
    fair, predicted : the repair, and what is predicted, in which unit
    summary : of all rows of the page
    fitting : the rows that layers are explained with
    rows, aside : those of the page, of groups that are compared and of groups too small, which count in the error only
    rows_given, rows_shown : how many these were, and how many are looked at
    rows_judged : whether the rows of the page are those that judged the repair
    adjusted : whether the repair was for gaps that are adjusted for strata; the page shows people as they are
    mse_refit : error of the last layer refitted without fairness constraint, where it is known
    attribute, names, groups, sizes : of the sensitive column; of its groups
    points : what the slider shows of the curve
    steps : positions of the slider: the original model, then the others by falling KS distance on these rows
    chosen : position of the repaired model
    spread : standard deviation of the predictions before: what a difference is large or small against
    """

    def __init__(
        self,
        fair: ESVDFair,
        data: Data,
        *,
        judged: Data | None,
        test: Data | None,
        summary: Mapping[str, Any] | None,
        predicted: str,
        cutoffs: Sequence[Mapping[str, Any]],
    ) -> None:
        self.fair, self.predicted, self.cutoffs = fair, predicted, cutoffs
        fitting, shown, self.summary = _choose_rows(fair, data, judged, test, summary)
        compared = list(self.summary["group_sizes"])
        parts = _only(fitting, compared), _only(shown, compared), _only(shown, set(shown.labels) - set(compared))
        if len(parts[1].labels) < 2:
            names = some_names([label_text(label) for label in compared], 5)
            raise InputError(f"`sensitive_features` contains fewer than two of the groups that were compared: {names}.")
        self.fitting, self.rows, self.aside = (sampled(part, ROWS_OF_A_GROUP) for part in parts)
        self.rows_given, self.rows_shown = len(shown.codes), len(self.rows.codes) + len(self.aside.codes)
        self.rows_judged = self.summary["evaluated_on"] == fair.summary_["evaluated_on"]
        self.adjusted, self.has_labels = "ks_raw_before" in self.summary, self.rows.y is not None
        self.mse_refit = self.summary.get("mse_refit") if self.has_labels else None
        self.error_name = f"mean squared {'error' if self.has_labels else 'change of the predictions'}"

        self.attribute, self.names = _names(data.sensitive_features, self.rows.labels)
        self.groups = Groups(self.rows.codes, len(self.names), self.rows.weight)
        self.sizes = [len(rows) for rows in self.groups.members]

        self._model = adapt(fair.model_, output=fair.output)
        curve, point = getattr(fair, "curve_", None), fair.point_
        self.points = [] if curve is None or point is None else slider_points(curve, point)
        repaired = [self._step(fair.curve_.model(point.index), point) for point in self.points]
        self.before, *others = self._step(fair.model_), *(repaired or [self._step(fair.estimator_)])
        self.steps = [self.before, *sorted(others, key=lambda step: (-step.peak.distance, step.mse))]
        self.chosen = 1
        if self.points:
            self.chosen = 0 if point.target == ORIGINAL else [step.point for step in self.steps].index(point)
        self.after, self.spread = self.steps[self.chosen], float(self.before.prediction.std())

    # --- models of the curve -------------------------------------------------------------------------------------

    def _step(self, model: Any, point: CurvePoint | None = None) -> Step:
        predicted, weight, inside = self._predict(model), self._everybody("weight"), len(self.rows.codes)
        error, shown = predicted - self._truth, predicted[:inside]
        r2 = float(r2_score(self._truth, predicted, sample_weight=weight)) if self.has_labels else None
        mse, of_groups = float(np.average(error**2, weights=weight)), (error[:inside] ** 2, error[:inside], shown)
        return Step(point, shown, predicted, ks_peak(shown, self.groups), mse, r2, *map(self.groups.means, of_groups))

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
        if all(part is None for part in parts):
            return None
        sizes = len(self.rows.codes), len(self.aside.codes)
        return np.concatenate([np.ones(n) if part is None else part for n, part in zip(sizes, parts, strict=True)])

    @property
    def all_groups(self) -> dict[str, Any]:
        """Group and weight of everybody, also of those in groups that are too small to compare."""
        labels = [named_groups(part)["sensitive_features"] for part in (self.rows, self.aside)]
        return {"sensitive_features": np.concatenate(labels), "sample_weight": self._everybody("weight")}

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

    @cached_property
    def decided(self) -> list[Decisions]:
        """Decisions at each cut-off, by the original and by the repaired model."""
        old, new = self.before.everybody, self.after.everybody
        return [decisions(old, new, **{**self.all_groups, **options}) for options in self.cutoffs or TOP]

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
        fair, classes = self.fair, self._model.classes

        def labels(rows: Batch) -> Any:
            """Labels as the model knows them: those of a classifier are classes, not 0 and 1."""
            return rows.y if rows.y is None or classes is None else np.asarray(classes)[rows.y.astype(int)]

        options: dict[str, Any] = {"output": fair.output, "batch_size": fair.batch_size, "effort": fair.effort}
        options["validation"] = self.rows.x, labels(self.rows), *named_groups(self.rows).values()
        y = labels(self.fitting) if self.has_labels else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ESVDFairWarning)  # about single layers; the page shows a dash there
                scan = explain.scan_layers(fair.model_, self.fitting.x, y, **named_groups(self.fitting), **options)
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


def _names(sensitive_features: Any, labels: Sequence[Label]) -> tuple[str, list[str]]:
    """Of the sensitive column, and of the groups: a number says little without the name of its column."""
    columns = getattr(sensitive_features, "columns", [getattr(sensitive_features, "name", None)])
    attribute = ", ".join(str(name) for name in columns if name is not None) or "group"
    bare = not any(isinstance(label, str | tuple) for label in labels) and len(attribute) <= 12
    return attribute, [f"{attribute} {label}" if bare else label_text(label) for label in labels]


# --- the rows of the page ------------------------------------------------------------------------------------------


def _choose_rows(
    fair: ESVDFair, data: Data, judged: Data | None, test: Data | None, summary: Mapping[str, Any] | None
) -> tuple[Batch, Batch, Mapping[str, Any]]:
    """The rows that fitted the repair, those of the page, and the summary of the latter."""
    rows = _checked_rows(fair, data)
    if test is not None:
        return rows, _checked_rows(fair, test), summary or _assess(fair, test)
    if judged is not None:
        return rows, _checked_rows(fair, judged), fair.summary_
    chose = fair.judged(rows)
    if chose is not None:
        fitting = rows if chose.all() else rows.take(np.flatnonzero(~chose))
        return fitting, rows.take(np.flatnonzero(chose)), fair.summary_
    if np.count_nonzero(np.bincount(rows.codes) >= fair.min_group_rows) < 2:
        few = f"two groups of {fair.min_group_rows} rows or more (`min_group_rows={fair.min_group_rows}`)"
        raise InputError(f"`sensitive_features` contains fewer than {few}. Pass more rows.")
    return rows, rows, {**_assess(fair, data), "evaluated_on": "given"}


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


def sampled(rows: Batch, most: int) -> Batch:
    """At most so many rows of each group; they stand for all of it, so that shares of all people stay what they are."""
    part = rows.take(spread_rows(rows.codes, most))
    if len(part.codes) == len(rows.codes):
        return rows
    count = len(rows.labels)
    times = (np.bincount(rows.codes, minlength=count) / np.bincount(part.codes, minlength=count))[part.codes]
    return replace(part, weight=times if part.weight is None else part.weight * times)


def spread_rows(codes: Codes, most: int) -> Codes:
    """Positions of at most so many rows of each group, evenly spread over its rows, in their order."""
    groups = (np.flatnonzero(codes == code) for code in np.unique(codes))
    picked = [rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.intp)] for rows in groups]
    return np.sort(np.concatenate([np.zeros(0, dtype=np.intp), *picked]))


def named_groups(rows: Batch) -> dict[str, Any]:
    """Labels and weights, as every function of the package takes them."""
    labels = np.fromiter(rows.labels, dtype=object, count=len(rows.labels))
    return {"sensitive_features": labels[rows.codes], "sample_weight": rows.weight}
