"""The page: numbers for its charts, and the templates, which hold its words and tables.

Jinja escapes all text: names come from the user's file.
"""

import base64
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np

from esvdfair.audit import Array
from esvdfair.curve import Curve, CurvePoint
from esvdfair.cutoffs import decision_table, ratios_by_share
from esvdfair.explain import Directions, LayerGap, LayerScan
from esvdfair.plots import density, make_grid
from esvdfair.report.content import Content, Step
from esvdfair.text import (
    EVALUATED_ON,
    interval,
    label_text,
    number,
    percent,
    share,
    signed,
    some_names,
    too_small,
)

GROUPS_DRAWN = 8
"""As many as there are colours; the tables list all groups."""


@cache
def make_environment() -> jinja2.Environment:
    """Templates in which all values are escaped, with the forms of numbers as filters; each is compiled once."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("esvdfair.report"), autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.do"],
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    forms = (interval, label_text, number, percent, plain, share, signed, some_names, too_small)
    environment.filters |= {form.__name__: form for form in forms}
    environment.globals |= {make.__name__: make for make in (decision_table, layer_name)}
    environment.globals["EVALUATED_ON"] = EVALUATED_ON
    return environment


def plain(text: str) -> str:
    """A name from a user's file that neither ends a line nor becomes Markdown or HTML."""
    line = " ".join(text.split())
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in line)


def layer_name(found: LayerGap | Directions) -> str:
    """What the model calls a layer; a model that is a layer has no name for it."""
    name = found.layer if isinstance(found, Directions) else found.name
    return name or f"number {found.index}"


def inline(name: str) -> tuple[str, str]:
    """The script or style of this folder, and how a content security policy names it."""
    source = files("esvdfair.report").joinpath(name).read_text("utf-8")
    return source, "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")


# --- the numbers that the page's script draws ------------------------------------------------------------------------


def chart_data(content: Content, command: Sequence[str] | None) -> dict[str, Any]:
    """Everything in #data of the page."""
    drawn = sorted(np.argsort(-np.array(content.sizes), kind="stable")[:GROUPS_DRAWN].tolist())  # the largest groups
    old, new, grid = content.before, content.after, content.grid(81)
    change = new.prediction - old.prediction
    at_change = make_grid([content.of_group(change, g)[0] for g in drawn])
    steps = [_step_data(content, i, command) | {
        "densities": _densities(content, step.prediction, drawn, grid), "means": _digits(step.means[drawn]),
    } for i, step in enumerate(content.steps)]  # fmt: skip
    shown = {point.index for point in content.points}
    known = content.points and content.rows_judged and not content.adjusted  # figures of the same rows, not adjusted
    ratios = (ratios_by_share(step.everybody, **content.all_groups) for step in (old, new))
    return {
        "groups": [content.names[g] for g in drawn],
        "means": steps[0]["means"],
        "grid": _span(grid),
        "steps": steps,
        "chosen": content.chosen,
        "peak": max(max(map(max, steps[i]["densities"])) for i in (0, content.chosen)),
        "predicted": content.predicted if len(content.predicted) <= 40 else "prediction",
        # points that the slider leaves out
        "others": [
            _digits((p.ks, p.mse)) for p in (content.fair.curve_.points if known else ()) if p.index not in shown
        ],
        "floor": content.summary["ks_floor"],
        "target": content.summary["target_ks"],
        "refit": content.mse_refit,
        "errorName": content.error_name,
        "cdf": {"before": _cdf(content, old, drawn), "after": _cdf(content, new, drawn)},
        "changes": {
            "grid": _span(at_change),
            "densities": _densities(content, change, drawn, at_change),
            "means": _digits((new.means - old.means)[drawn]),
        },
        "ratios": [[_digits(point) for point in points] for points in ratios],
        **_inner_data(content),
    }


def _step_data(content: Content, i: int, command: Sequence[str] | None) -> dict[str, Any]:
    """A position of the slider: its figures, and how to make its model."""
    step, target = content.steps[i], None
    python, line = f"model = fair.{'estimator_' if i else 'model_'}", command if i == content.chosen and i else None
    if step.point is not None and i != content.chosen:
        python, target = f"model = fair.curve_.model({step.point.index})", target_of(content.fair.curve_, step.point)
    if command is not None and target is not None:
        line = with_target(command, target)
    cells = []
    for mean, bias, mse in zip(step.means, step.bias, step.group_mse, strict=True):
        values = (mean, bias) if content.has_labels else (mean,)
        cells += [*(number(v, beside=content.spread) for v in values), number(mse, beside=content.spread**2)]
    return {
        "ks": float(f"{step.peak.distance:.4g}"),
        "mse": float(f"{step.mse:.5g}"),
        "sentence": content.step_sentence(i),
        "dominated": content.dominated_by[i] is not None,
        "python": python,
        "command": None if line is None else shlex.join(["esvdfair", *line]),
        "cells": cells,  # of every group the mean, the mean error where there are labels, and the error
    }


def target_of(curve: Curve, point: CurvePoint) -> float | None:
    """The shortest target for which :meth:`Curve.select` returns a point; None where no target does."""
    for places in (3, 4, 6):
        target = float(np.ceil(point.ks_population * 10**places) / 10**places)
        if 0 < target <= 1 and curve.select(target_ks=target) == point:
            return target
    return None


def with_target(command: Sequence[str], target: float) -> list[str]:
    """The words of a command with another target."""
    kept, skip = [], False
    for word in command:
        if skip or word.split("=")[0] in ("--target-ks", "--max-mse-increase"):
            skip = not skip and "=" not in word
            continue
        kept.append(word)
    return [*kept, "--target-ks", f"{target:g}"]


def _inner_data(content: Content) -> dict[str, Any]:
    """Layers and directions, where there are any."""
    found: dict[str, Any] = {}
    directions, scan = content.directions, content.scan
    if isinstance(directions, Directions):
        spectra = {"before": directions.spectrum_before, "after": directions.spectrum_after}
        found["spectrum"] = {when: _digits(values[:48]) for when, values in spectra.items()}
        found["spectrum"]["afterName"] = "after" if content.hidden_edits else "if edited"
    if isinstance(scan, LayerScan):
        found["layers"] = [
            {"name": layer_name(f), "ks": f.ks, "low": f.ks_low, "high": f.ks_high, "best": f is scan.best}
            for f in scan.layers
        ]
        found["layersBefore"] = scan.ks_before
    return found


def _cdf(content: Content, step: Step, drawn: list[int]) -> dict[str, Any]:
    thresholds = np.union1d(content.grid(161), step.peak.threshold)
    return {
        "x": thresholds.tolist(),
        "shares": [_digits(shares) for shares in content.shares_below(step, thresholds)[drawn]],
        "at": step.peak.threshold,
        "low": step.peak.low_share,
        "high": step.peak.high_share,
    }


def _densities(content: Content, values: Array, groups: list[int], grid: Array) -> list[list[float]]:
    samples = (content.of_group(values, group) for group in groups)
    return [_digits(density(mine, grid, weight)) for mine, weight in samples]


def _digits(values: Iterable[float]) -> list[float]:
    """Four digits that count: enough for a chart, and short."""
    return [float(f"{value:.4g}") for value in values]


def _span(grid: Array) -> list[float]:
    return [float(grid[0]), float(grid[-1]), len(grid)]
