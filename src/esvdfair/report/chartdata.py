"""The numbers that the page's script draws, as plain lists."""

from typing import Any

import numpy as np

from esvdfair.audit import Array, make_grid
from esvdfair.explain import LayerScan
from esvdfair.report.content import Content, Step
from esvdfair.report.figures import Distributions, distributions, group_densities, rounded
from esvdfair.report.words import error_name, group_names, layer_name, step_words

GROUPS_DRAWN = 8
"""As many as there are colours; the tables list all groups."""
SPECTRUM_DRAWN = 48


def groups_drawn(content: Content) -> list[int]:
    """Codes of the largest groups, in the order of the labels."""
    sizes = np.bincount(content.codes, minlength=len(content.labels))
    return sorted(np.argsort(-sizes, kind="stable")[:GROUPS_DRAWN].tolist())


def chart_data(content: Content, before: Distributions, after: Distributions) -> dict[str, Any]:
    """Everything in #data of the page; ``before`` and ``after`` are those of :func:`shown_distributions`."""
    drawn, names = groups_drawn(content), group_names(content)
    grid = make_grid([content.before, content.after])
    steps = [_step(content, i, step, drawn, grid) for i, step in enumerate(content.steps)]
    change = content.after - content.before
    at_change = make_grid([change[content.codes == g] for g in drawn])
    points = {step.point.index for step in content.steps if step.point is not None}
    return {
        "groups": [names[g] for g in drawn],
        "means": steps[0]["means"],
        "grid": _span(grid),
        "steps": steps,
        "chosen": content.chosen,
        "peak": max(max(map(max, steps[i]["densities"])) for i in (0, content.chosen)),
        "others": [rounded((p.ks, p.mse)) for p in content.curve.points if p.index not in points],
        "floor": content.curve.ks_floor,
        "target": content.summary["target_ks"],
        "errorName": error_name(content.summary),
        "cdf": {"before": _cdf(before, drawn), "after": _cdf(after, drawn)},
        "changes": {
            "grid": _span(at_change),
            "densities": group_densities(change, content.codes, drawn, at_change),
            "means": rounded(change[content.codes == g].mean() for g in drawn),
        },
        **_spectrum(content),
        **_layers(content.scan),
    }


def shown_distributions(content: Content) -> tuple[Distributions, Distributions]:
    """Distribution functions before and after, on the rows shown."""
    grid = make_grid([content.before, content.after], 161)
    groups = len(content.labels)
    return (
        distributions(content.before, content.codes, groups, grid),
        distributions(content.after, content.codes, groups, grid),
    )


def _step(content: Content, position: int, step: Step, drawn: list[int], grid: Array) -> dict[str, Any]:
    summary, point = content.summary, step.point
    ks, mse = (summary["ks_before"], summary["mse_before"]) if point is None else (point.ks, point.mse)
    return {
        "ks": float(f"{ks:.4g}"),
        "mse": float(f"{mse:.5g}"),
        "words": step_words(content, position),
        "densities": group_densities(step.prediction, content.codes, drawn, grid),
        "means": rounded(step.prediction[content.codes == g].mean() for g in drawn),
    }


def _span(grid: Array) -> list[float]:
    return [float(grid[0]), float(grid[-1]), len(grid)]


def _cdf(found: Distributions, drawn: list[int]) -> dict[str, Any]:
    far = found.farthest
    return {
        "x": found.thresholds.tolist(),
        "shares": [rounded(found.shares[g]) for g in drawn],
        "at": far.at,
        "low": far.low,
        "high": far.high,
    }


def _spectrum(content: Content) -> dict[str, Any]:
    if isinstance(content.directions, str):
        return {}
    before, after = (
        rounded(values[:SPECTRUM_DRAWN])
        for values in (content.directions.spectrum_before, content.directions.spectrum_after)
    )
    name = "after" if content.hidden_edit else "if edited"
    return {"spectrum": {"before": before, "after": after, "afterName": name}}


def _layers(scan: LayerScan | str) -> dict[str, Any]:
    if isinstance(scan, str):
        return {}
    rows = [
        {"name": layer_name(f), "ks": f.ks, "low": f.ks_low, "high": f.ks_high, "best": f.index == scan.best.index}
        for f in scan.layers
    ]
    return {"layers": rows, "layersBefore": scan.ks_before}
