"""What `summary_` holds: error, KS distance and more of the original and the repaired model on the same rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.batches import Rows
from esvdfair.core.ks import outside_support
from esvdfair.curve import Curve, CurvePoint, decided_by
from esvdfair.evaluation import Evaluator, measurable
from esvdfair.problem import Problem

Array = NDArray[np.float64]

SHOWN_PAIRS = 100
"""Most pairs of groups that a summary lists."""


def make_report(
    problem: Problem,
    after: Array,
    curve: Curve,
    point: CurvePoint,
    *,
    method: str,
    target_ks: float | None,
    max_mse_increase: float | None = None,
) -> dict[str, Any]:
    """What was reached on the validation rows, ``after`` (n,) being what the chosen point predicts for them."""
    rows, labels = problem.validation, (*problem.labels, *problem.set_aside)
    here = Evaluator(rows, len(problem.labels))
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
        **_before_and_after(present, old, new),
        "mse_refit": curve.mse_refit,
        "ks_population": max(curve.estimates(point)[0]),
        "ks_upper": point.ks_upper,
        "ks_interval": (point.ks_low, point.ks_high),
        "ks_floor": max(curve.estimates(point)[1]),
        "pairs": _pair_figures(here, curve, point, measurable(after, rows.prediction)),
        "group_sizes": dict(zip(problem.labels, np.bincount(rows.codes)[: len(problem.labels)].tolist(), strict=True)),
        "groups_set_aside": dict(problem.set_aside),
        "evaluated_on": problem.evaluated_on,
        "error_against": problem.error_against,
        "rows": len(rows),
        **_unadjusted(rows, after, len(problem.labels)),
    }


def _pair_figures(here: Evaluator, curve: Curve, point: CurvePoint, after: Array) -> list[dict[str, Any]]:
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


def _before_and_after(labels: Sequence[Any], old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Figures of the original and of the repaired model, such as ``mse_before``; lists have one of each group."""
    return {
        f"{name}_{when}": dict(zip(labels, figures[name], strict=True))
        if isinstance(figures[name], list)
        else figures[name]
        for name in old
        for when, figures in (("before", old), ("after", new))
    }


def _unadjusted(rows: Rows, after: Array, count: int) -> dict[str, Any]:
    """Next to adjusted gaps the raw ones, and the share of rows in strata that lack a group."""
    if rows.adjusted is None:
        return {}
    here = Evaluator(replace(rows, adjusted=None, strata=None), count)
    inside = rows.codes < count
    old, new = here.figures(rows.prediction), here.figures(after)
    return {
        "ks_raw_before": old["ks"],
        "ks_raw_after": new["ks"],
        "mean_gap_raw_before": old["mean_gap"],
        "mean_gap_raw_after": new["mean_gap"],
        "outside_support": outside_support(rows.weight[inside], rows.adjusted[inside]),
    }
