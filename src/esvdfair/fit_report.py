"""What a repair reports: error, KS distance and more before and after it, on the same rows; and the changed layers."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray

from esvdfair.core.checks import Label
from esvdfair.core.edits import LayerEdit
from esvdfair.core.ks import ks_between, outside_support
from esvdfair.core.quadratic import Fit
from esvdfair.curve import Curve, CurvePoint
from esvdfair.evaluation import Evaluator, measurable
from esvdfair.problem import ORIGINAL, Problem
from esvdfair.text import summary_table, verdict

Array = NDArray[np.float64]

SHOWN_PAIRS = 100  # that a summary lists, at most


class FitReport(dict[str, Any]):
    """Error, KS distance and more of the original and the repaired model, on the same rows.

    Every entry is an attribute too: ``report.ks_after`` is ``report["ks_after"]``. It is a plain dict otherwise.

    Attributes
    ----------
    method, target_ks, confidence : the options that were asked for
    met : whether the estimated population KS of every pair of groups meets the target; None without a target
    certified : whether it is certified to do so; None without a confidence
    decided_by : in a few words, why this model was chosen
    constant : whether the repaired model predicts nearly the same number for everybody
    mse_before, mse_after : mean squared error of the original and of the repaired model
    mse_refit : error of the last layer refitted without fairness constraint; None where it is not known
    r2_before, r2_after : R²; with labels 0 and 1 there are auc_before and auc_after too
    ks_before, ks_after : KS distance, the largest over the pairs of groups
    ks_population : estimated population KS, which is compared with the target
    ks_upper : one-sided bound of the population KS at the confidence asked for, else 95%
    ks_interval : its 95% interval
    ks_floor : noise level: the KS distance that chance alone produces at these group sizes
    mean_gap_before, mean_gap_after, variance_gap_before, variance_gap_after : largest differences between groups
    group_sizes : rows of every group that is compared
    groups_set_aside : groups too small to be compared, with their rows
    group_mse_before, group_mse_after : error of every group
    pairs : for each pair of groups ``groups``, ``ks_before``, ``ks_after``, ``ks_population``, ``ks_upper``,
        ``ks_floor`` and ``established``
    evaluated_on : "validation", "heldout", "train" or "test"
    error_against : "labels", or "predictions" of the original model
    rows : number of rows that these figures are of
    negative_coefficients : of a linear model with ``positive=True``, how many of its repaired coefficients are negative
    """

    method: str
    target_ks: float | None
    confidence: float | None
    met: bool | None
    certified: bool | None
    decided_by: str
    constant: bool
    mse_before: float
    mse_after: float
    mse_refit: float | None
    r2_before: float
    r2_after: float
    ks_before: float
    ks_after: float
    ks_population: float
    ks_upper: float
    ks_interval: tuple[float, float]
    ks_floor: float
    mean_gap_before: float
    mean_gap_after: float
    variance_gap_before: float
    variance_gap_after: float
    group_sizes: dict[Label, int]
    groups_set_aside: dict[Label, int]
    group_mse_before: dict[Label, float]
    group_mse_after: dict[Label, float]
    pairs: list[dict[str, Any]]
    evaluated_on: str
    error_against: str
    rows: int

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no entry {name!r}.") from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self})

    def __repr__(self) -> str:
        head, lines = summary_table(self)
        width, said = max(len(line[0]) for line in lines), verdict(self)
        left = {head[0]: lambda name: name.ljust(width)}
        table = pd.DataFrame(lines, columns=head).to_string(index=False, justify="right", formatters=left)
        return f"{said.headline}\n\n{table}\n\n{said.measured}"

    def _repr_html_(self) -> str:
        head, lines = summary_table(self)
        table = pd.DataFrame([[line[0].strip(), *line[1:]] for line in lines], columns=head)
        headline, measured = (escape(words) for words in (verdict(self).headline, verdict(self).measured))
        return f"<div><p><b>{headline}</b></p>{table.to_html(index=False, border=0)}<p>{measured}</p></div>"


def make_report(
    problem: Problem,
    after: Array,
    curve: Curve,
    point: CurvePoint,
    *,
    method: str,
    target_ks: float | None,
    max_mse_increase: float | None = None,
) -> FitReport:
    """What was reached on the validation rows, ``after`` (n,) being what the chosen point predicts for them."""
    rows, labels = problem.validation, (*problem.labels, *problem.set_aside)
    here, count = Evaluator(rows, len(problem.labels)), len(problem.labels)
    old, new = (_figures(here, predicted, labels) for predicted in (rows.prediction, after))
    estimates, floors = curve.estimates(point)
    entries = {
        "method": method,
        "target_ks": target_ks,
        "met": None if target_ks is None else curve.meets(point, target_ks),
        "certified": None if target_ks is None or point.ks_certified is None else point.ks_certified <= target_ks,
        "confidence": curve.confidence,
        "decided_by": _decided_by(curve, point, target_ks, max_mse_increase),
        "constant": here.figures(after)["constant"],
        **{f"{name}_{when}": found[name] for name in new for when, found in (("before", old), ("after", new))},
        "mse_refit": curve.mse_refit,
        "ks_population": max(estimates),
        "ks_upper": max(point.ks_upper, *estimates),
        "ks_interval": (min(point.ks_low, max(estimates)), max(point.ks_high, *estimates)),
        "ks_floor": max(floors),
        "pairs": _pair_figures(here, curve, point, measurable(after, rows.prediction)),
        "group_sizes": dict(zip(problem.labels, np.bincount(rows.codes).tolist(), strict=False)),
        "groups_set_aside": dict(problem.set_aside),
        "evaluated_on": problem.evaluated_on,
        "error_against": problem.error_against,
        "rows": len(rows),
    }
    if rows.adjusted is not None:  # next to adjusted gaps the raw ones
        raw, inside = Evaluator(replace(rows, adjusted=None, strata=None), count), rows.codes < count
        for when, predicted in (("before", rows.prediction), ("after", after)):
            figures = _figures(raw, predicted, labels)
            entries |= {f"ks_raw_{when}": figures["ks"], f"mean_gap_raw_{when}": figures["mean_gap"]}
        entries["outside_support"] = outside_support(rows.weight[inside], rows.adjusted[inside])
    return FitReport(entries)


def _figures(here: Evaluator, prediction: Array, labels: Sequence[Label]) -> dict[str, Any]:
    """The entries both of the original model and of the repaired one; ``labels`` of all groups."""
    from sklearn.metrics import roc_auc_score

    rows, found = here.rows, here.figures(prediction)
    mass, errors = (np.bincount(rows.codes, rows.weight * each) for each in (1.0, (prediction - rows.y) ** 2))
    known: dict[str, Any] = {"mse": found["mse"], "r2": found["r2"]}
    if set(np.unique(rows.y)) == {0.0, 1.0}:
        known["auc"] = float(roc_auc_score(rows.y, prediction, sample_weight=rows.weight))
    return known | {
        "ks": ks_between(here.compared(measurable(prediction, rows.prediction)), here.groups),
        "group_mse": {labels[g]: float(errors[g] / mass[g]) for g in np.flatnonzero(mass).tolist()},
        "mean_gap": found["mean_gap"],
        "variance_gap": found["variance_gap"],
    }


def _pair_figures(here: Evaluator, curve: Curve, point: CurvePoint, after: Array) -> list[dict[str, Any]]:
    """Figures of every pair of groups that is compared; of very many, those of the largest estimates."""
    before = here.pairs.distances(here.compared(measurable(here.rows.prediction, here.rows.prediction)))
    found, (estimates, floors) = here.pairs.compare(here.compared(after)), curve.estimates(point)
    shown = np.sort(np.argsort(estimates, kind="stable")[-SHOWN_PAIRS:])
    upper = here.pairs.upper_bounds(here.compared(after), curve.confidence or 0.95, curve.certificate, shown)
    return [
        {
            "groups": curve.pairs[i],
            "ks_before": float(before[i]),
            "ks_after": float(found.distances[i]),
            "ks_population": estimates[i],
            "ks_upper": max(float(bound), estimates[i]),
            "ks_floor": floors[i],
            "established": bool(found.established[i]),
        }
        for i, bound in zip(shown.tolist(), upper, strict=True)
    ]


def _decided_by(curve: Curve, point: CurvePoint, target_ks: float | None, max_mse_increase: float | None) -> str:
    """In a few words, why this point."""
    if max_mse_increase is not None:
        return "the fairest within the error allowed"
    if target_ks is None:
        return "the original model" if point.target == ORIGINAL else "no target"
    if curve.meets(point, target_ks):
        if point.target == ORIGINAL:
            return "the original model meets the target"
        return "the most accurate that " + ("meets the target" if curve.confidence is None else "is certified")
    if point.ks_certified is not None and point.ks_certified > target_ks:
        return "among the fairest, as none can be certified"
    if not curve.resolvable(target_ks).all():
        return f"among the fairest, as the target is below the noise level of {curve.unresolved(target_ks)}"
    return "among the fairest, as none meets the target"


def account_for(problem: Problem, fit: Fit) -> list[LayerEdit]:
    """The account of what a fit changes: those of its edits, or that of the refit of the last layer.

    There ``sigma`` are the singular values of ``D Wᵀ``, so that Σσ² is d_e², and the budget is what was achieved.
    """
    if fit.edits:
        return list(fit.edits)
    layer, before, after = problem.layer, problem.layer.weight, fit.weight[None, :]
    moments = problem.moments.columns(slice(0, before.shape[1]))
    sigma_before, sigma_after = (scipy.linalg.svdvals(moments.mean_differences() @ w.T) for w in (before, after))
    bias = None if layer.bias is None else np.array([fit.bias])
    shift = 0.0 if layer.bias is None else fit.bias - layer.bias[0]
    change = fit.weight - before[0]
    moved = change @ moments.pooled_scatter() @ change
    moved += moments.pooled_weight * (change @ moments.pooled_mean() + shift) ** 2
    gap = float(np.sum(sigma_after**2))
    return [
        LayerEdit(
            layer=layer.name,
            weight_before=before,
            weight_after=after,
            bias_before=layer.bias,
            bias_after=bias,
            sigma_before=sigma_before,
            sigma_after=sigma_after,
            multiplier=fit.strength,
            budget=gap,
            achieved=gap,
            converged=fit.converged,
            output_change=float(moved),
            gap_before=float(np.sum(sigma_before**2)),
            gap_after=gap,
        )
    ]
