"""`esvdfair curve`: the trade-off between parity and error."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._options import EVALUATED_ON, Given
from esvdfair.cli._terminal import answer, at_work, text_table, wrapped
from esvdfair.text import interval, number, share

if TYPE_CHECKING:
    from esvdfair.curve import Curve, CurvePoint

SHOWN = 12
"""Points that are listed; there are many more, most of them close to others."""


@click.command()
@opt.given_options(opt.MODEL, opt.DATA, opt.VALIDATION, opt.SEED)
@opt.repair_options(*opt.METHOD)
@opt.flag("--all every", f"List all points, instead of about {SHOWN}.")
@opt.plot_option("Also draw the curve")
@opt.force_option
@opt.json_option
def curve(given: Given, options: dict[str, Any], every: bool, plot: Path | None, force: bool, as_json: bool) -> int:
    """Show the trade-off between parity and error.

    Each point is a repaired model, evaluated on rows that it was not fitted on. With --target-ks, → marks the point
    that `esvdfair repair` would return; the exit code is 1 when none meets the target.

    \b
    Example:
      esvdfair curve model.onnx people.csv --sensitive sex --target income \\
        --target-ks 0.1 --plot curve.png
    """
    from esvdfair.estimator import fit_curve

    target_ks = options.pop("target_ks")
    written = [plot] if plot else []
    model = given.load()
    opt.check_free(written, force=force, inputs=given.files)
    with at_work(2) as work:
        work.step("reading")
        rows, validation, _ = given.tables(model, progress=work.read)
        work.step("refitting")
        found = fit_curve(str(given.model), rows, validation=validation, **given.fitting, **options)
        if plot:
            _save_plot(found, target_ks, plot, replace=force)
    chosen, met, ends = None, None, []
    if target_ks is not None:
        chosen = found.select(target_ks=target_ks)
        met = found.meets(chosen, target_ks)
        which = "the point → meets it" if met else "no point meets it; → comes closest"
        ends.append(f"Target KS ≤ {target_ks:g}: {which}.")
    if plot:
        ends.append(f"wrote {plot}")
    answer(
        {
            "model": given.model, "data": given.data, "method": options["method"], "evaluated_on": found.evaluated_on,
            "ks_floor": found.ks_floor, "mse_refit": found.mse_refit, "target_ks": target_ks, "met": met,
            "chosen": None if chosen is None else chosen.index,
            "points": [point.to_dict() | {"index": point.index} for point in found.points],
        },
        *_curve_blocks(found, chosen, every, ends), as_json=as_json, written=written,
    )  # fmt: skip
    return 1 if met is False else 0


def _curve_blocks(found: "Curve", chosen: "CurvePoint | None", every: bool, ends: Sequence[str]) -> list[str]:
    points = found.points if every else spread_out(found.points, found.original, chosen)
    shown = "" if len(points) == len(found) else f" ({len(points)} are listed; --all lists all)"
    notes = [f"Noise level {share(found.ks_floor)}: the KS that chance alone produces at these group sizes."]
    if found.original is not None:
        notes.append(f"Point {found.original.index} is the original model.")
    if found.mse_refit is not None:
        notes.append(f"MSE of the refit without fairness constraint: {number(found.mse_refit)}.")
    order = [*found.points, *([] if chosen is None else [chosen])]
    marks = ["•"] * len(found) + ["◉"] * (len(order) - len(found))
    return [
        wrapped(f"{len(found)} models{shown}, evaluated on {EVALUATED_ON[found.evaluated_on]}"),
        _point_table(points, chosen), "mean squared error against KS on these rows",
        scatter([p.ks for p in order], [p.mse for p in order], marks), "\n".join(map(wrapped, [*notes, *ends])),
    ]  # fmt: skip


def spread_out(points: "Sequence[CurvePoint]", *named: "CurvePoint | None") -> "list[CurvePoint]":
    """About a dozen points at even steps of the estimated KS, in the order of the curve, and those that are named."""
    estimates = [point.ks_population for point in points]
    high, low = max(estimates), min(estimates)
    steps = [high - (high - low) * step / (SHOWN - 1) for step in range(SHOWN)]
    kept = {min(range(len(points)), key=lambda i: abs(estimates[i] - step)) for step in steps}
    kept |= {i for i, point in enumerate(points) if any(each and point.index == each.index for each in named)}
    return [points[i] for i in sorted(kept)]


def _point_table(points: "Sequence[CurvePoint]", chosen: "CurvePoint | None") -> str:
    lines = []
    for point in points:
        mark = "→" if chosen is not None and point.index == chosen.index else ""
        within = interval((point.ks_low, point.ks_high), share)
        figures = [number(point.mse), share(point.r2), number(point.mean_gap)]
        lines.append([mark, f"{point.index}", share(point.ks_population), share(point.ks), within, *figures])
    header = ["point", "estimated population KS", "KS on these rows", "95% interval", "MSE", "R²"]
    return text_table(["", *header, "difference in means"], lines)


def _save_plot(found: "Curve", target_ks: float | None, path: Path, *, replace: bool) -> None:
    from matplotlib.figure import Figure

    from esvdfair.plots import plot_curve

    figure = Figure(figsize=(6, 4), layout="constrained")
    plot_curve(found, target_ks=target_ks, ax=figure.subplots())
    opt.save_figure(figure, path, replace=replace)


def scatter(x: Sequence[float], y: Sequence[float], marks: Sequence[str], *, width: int = 60, height: int = 12) -> str:
    """Points in a frame of text, y upwards, with the range of both axes; later points cover earlier ones."""
    columns, rows = (_cells(values, size) for values, size in ((x, width), (y, height)))
    grid = [[" "] * width for _ in range(height)]
    for column, row, mark in zip(columns, rows, marks, strict=True):
        grid[height - 1 - row][column] = mark
    top, bottom = number(max(y)), number(min(y))
    side = max(len(top), len(bottom))
    edges = [top.rjust(side), *[" " * side] * (height - 2), bottom.rjust(side)]
    body = [f"{edge} │{''.join(line)}".rstrip() for edge, line in zip(edges, grid, strict=True)]
    left, right = share(min(x)), share(max(x))
    axis = " " * (side + 1) + "└" + "─" * width
    return "\n".join([*body, axis, " " * (side + 2) + left + right.rjust(width - len(left))])


def _cells(values: Sequence[float], size: int) -> list[int]:
    low, high = min(values), max(values)
    return [round((value - low) / (high - low) * (size - 1)) if high > low else 0 for value in values]
