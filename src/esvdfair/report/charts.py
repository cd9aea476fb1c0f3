"""The numbers that the page's script draws, as plain lists."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from esvdfair.audit import Array, density, make_grid
from esvdfair.batches import Batch
from esvdfair.explain import LayerScan
from esvdfair.report.content import Content, Step
from esvdfair.report.sentences import error_name, group_names, layer_name, step_sentence
from esvdfair.text import number

GROUPS_DRAWN = 8
"""As many as there are colours; the tables list all groups."""
SPECTRUM_DRAWN = 48


def chart_data(content: Content) -> dict[str, Any]:
    """Everything in #data of the page."""
    drawn, names, rows = groups_drawn(content), group_names(content), content.rows
    grid = make_grid([content.before.prediction, content.after.prediction])
    steps = [_step(content, i, drawn, grid) for i in range(len(content.steps))]
    change = content.after.prediction - content.before.prediction
    at_change = make_grid([change[rows.codes == g] for g in drawn])
    return {
        "groups": [names[g] for g in drawn],
        "means": steps[0]["means"],
        "grid": _span(grid),
        "steps": steps,
        "chosen": content.chosen,
        "peak": max(max(map(max, steps[i]["densities"])) for i in (0, content.chosen)),
        "joined": content.rows_judged,
        "predicted": content.predicted if len(content.predicted) <= 40 else "prediction",
        "others": [rounded(pair) for pair in content.others],
        "floor": content.ks_floor,
        "target": content.summary["target_ks"],
        "refit": content.mse_refit,
        "errorName": error_name(content),
        "cdf": {
            when: _cdf(content, step, drawn) for when, step in (("before", content.before), ("after", content.after))
        },
        "changes": {
            "grid": _span(at_change),
            "densities": _densities(change, rows, drawn, at_change),
            "means": rounded((content.after.means - content.before.means)[drawn]),
        },
        **_spectrum(content),
        **_layers(content.scan),
    }


def groups_drawn(content: Content) -> list[int]:
    """Codes of the largest groups, in the order of the labels."""
    sizes = np.array(content.sizes)
    return sorted(np.argsort(-sizes, kind="stable")[:GROUPS_DRAWN].tolist())


def group_cells(content: Content, step: Step) -> list[list[str]]:
    """Mean prediction and error of every group, which follow the slider."""
    pairs = zip(step.means, step.group_mse, strict=True)
    return [[number(m, beside=content.spread), number(e, beside=content.spread**2)] for m, e in pairs]


def distribution(rows: Batch, step: Step, thresholds: Array) -> Array:
    """(G, k) part of each group at or below each of k thresholds."""
    found = []
    for g in range(len(rows.labels)):
        mine = rows.codes == g
        order = np.argsort(step.prediction[mine])
        mass = np.ones(len(order)) if rows.weight is None else rows.weight[mine][order]
        below = np.append(0.0, np.cumsum(mass) / mass.sum())
        found.append(below[np.searchsorted(step.prediction[mine][order], thresholds, side="right")])
    return np.array(found)


def rounded(values: Iterable[float]) -> list[float]:
    """Four digits that count: enough for a chart, and short."""
    return [float(f"{value:.4g}") for value in values]


def _step(content: Content, position: int, drawn: list[int], grid: Array) -> dict[str, Any]:
    step = content.steps[position]
    return {
        "ks": float(f"{step.peak.distance:.4g}"),
        "mse": float(f"{step.mse:.5g}"),
        "sentence": step_sentence(content, position),
        "densities": _densities(step.prediction, content.rows, drawn, grid),
        "means": rounded(step.means[drawn]),
        "cells": [cell for row in group_cells(content, step) for cell in row],
    }


def _densities(values: Array, rows: Batch, groups: list[int], grid: Array) -> list[list[float]]:
    found = []
    for g in groups:
        mine = rows.codes == g
        found.append(rounded(density(values[mine], grid, None if rows.weight is None else rows.weight[mine])))
    return found


def _span(grid: Array) -> list[float]:
    return [float(grid[0]), float(grid[-1]), len(grid)]


def _cdf(content: Content, step: Step, drawn: list[int]) -> dict[str, Any]:
    grid = make_grid([content.before.prediction, content.after.prediction], 161)
    thresholds = np.unique(np.append(grid, step.peak.threshold))
    return {
        "x": thresholds.tolist(),
        "shares": [rounded(shares) for shares in distribution(content.rows, step, thresholds)[drawn]],
        "at": step.peak.threshold,
        "low": step.peak.low_share,
        "high": step.peak.high_share,
    }


def _spectrum(content: Content) -> dict[str, Any]:
    found = content.directions
    if isinstance(found, str):
        return {}
    before, after = (rounded(values[:SPECTRUM_DRAWN]) for values in (found.spectrum_before, found.spectrum_after))
    return {
        "spectrum": {"before": before, "after": after, "afterName": "after" if content.hidden_edits else "if edited"}
    }


def _layers(scan: LayerScan | str) -> dict[str, Any]:
    if isinstance(scan, str):
        return {}
    rows = [
        {"name": layer_name(f), "ks": f.ks, "low": f.ks_low, "high": f.ks_high, "best": f.index == scan.best.index}
        for f in scan.layers
    ]
    return {"layers": rows, "layersBefore": scan.ks_before}
