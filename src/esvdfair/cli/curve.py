"""`esvdfair curve`: the trade-off between parity and error."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.text import interval, number, share

if TYPE_CHECKING:
    from esvdfair.curve import Curve, CurvePoint

SHOWN = 12
"""Points that are listed; there are many more, most of them close to others."""


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.repair_options()
@cli.flag("--all every", f"List all points, instead of about {SHOWN}.")
@cli.option("--plot", "FILE", "Also draw the curve: .png, .svg or .pdf.")
@cli.force_option
@cli.json_option
def curve(
    model: Path,
    data: Path,
    reading: cli.Reading,
    options: dict[str, Any],
    validation: Path | None,
    every: bool,
    plot: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Show the trade-off between parity and error.

    Each point is a repaired model, evaluated on rows that it was not fitted on. With --target-ks, → marks the point
    that `esvdfair repair` would return; the exit code is 1 when none meets the target.

    \b
    Example:
      esvdfair curve model.onnx people.csv --sensitive sex --target income --target-ks 0.1 --plot curve.png
    """
    from esvdfair.estimator import fit_curve

    target_ks = options.pop("target_ks")
    options["min_group_rows"] = reading.min_group_rows
    cli.check_plot(plot)
    written = [plot] if plot else []
    adapter = cli.load_model(model, options["output"])
    cli.check_free(written, force=force, inputs=[*cli.model_files(model), data, validation])
    with cli.at_work(2) as work:
        work.step("reading")
        rows, judging = reading.tables(data, validation, adapter, progress=work.read)
        work.step("refitting")
        found = fit_curve(str(model), rows, validation=judging, **options)
        if plot:
            _save_plot(found, target_ks, plot, replace=force)
    chosen, met = None, None
    if target_ks is not None:
        chosen = found.select(target_ks=target_ks)
        met = found.meets(chosen, target_ks)
    with cli.after_writing(written):
        if as_json:
            cli.print_json({
                "model": model, "data": data, "method": options["method"], "evaluated_on": found.evaluated_on,
                "ks_floor": found.ks_floor, "mse_refit": found.mse_refit, "target_ks": target_ks, "met": met,
                "chosen": None if chosen is None else chosen.index,
                "points": [point.to_dict() | {"index": point.index} for point in found.points],
            })  # fmt: skip
        else:
            _print_curve(found, chosen, every=every)
            if met is not None:
                click.echo(f"Target KS ≤ {target_ks:g}: {'met by →' if met else 'not met; → comes closest'}.")
            if plot:
                click.echo(f"wrote {plot}")
    return 1 if met is False else 0


def _print_curve(found: "Curve", chosen: "CurvePoint | None", *, every: bool) -> None:
    points = found.points if every else spread_out(found.points, chosen)
    shown = "" if len(points) == len(found) else f", {len(points)} of which are listed (--all lists all)"
    notes = [f"Noise level {share(found.ks_floor)}: the KS that chance alone produces at these group sizes."]
    if found.mse_refit is not None:
        notes.append(f"MSE of the refit without fairness constraint: {number(found.mse_refit)}.")
    order = [*found.points, *([] if chosen is None else [chosen])]
    marks = ["•"] * len(found) + ["◉"] * (len(order) - len(found))
    where = cli.EVALUATED_ON[found.evaluated_on]
    cli.print_blocks(
        cli.wrapped(f"{len(found)} repaired models, evaluated on {where}{shown}"), _point_table(points, chosen),
        "mean squared error against KS on these rows",
        scatter([p.ks for p in order], [p.mse for p in order], marks), "\n".join(map(cli.wrapped, notes)),
    )  # fmt: skip


def spread_out(points: "Sequence[CurvePoint]", chosen: "CurvePoint | None") -> "list[CurvePoint]":
    """About a dozen points at even steps of the estimated KS, in the order of the curve; the chosen one is one."""
    estimates = [point.ks_population for point in points]
    high, low = max(estimates), min(estimates)
    steps = [high - (high - low) * step / (SHOWN - 1) for step in range(SHOWN)]
    kept = {min(range(len(points)), key=lambda i: abs(estimates[i] - step)) for step in steps}
    return [point for i, point in enumerate(points) if i in kept or (chosen and point.index == chosen.index)]


def _point_table(points: "Sequence[CurvePoint]", chosen: "CurvePoint | None") -> str:
    lines = []
    for point in points:
        mark = "→" if chosen is not None and point.index == chosen.index else ""
        within = interval((point.ks_low, point.ks_high), share)
        figures = [number(point.mse), share(point.r2), number(point.mean_gap)]
        lines.append([mark, f"{point.index}", share(point.ks_population), share(point.ks), within, *figures])
    header = ["point", "estimated population KS", "KS on these rows", "95% interval", "MSE", "R²"]
    return cli.text_table(["", *header, "difference in means"], lines)


def _save_plot(found: "Curve", target_ks: float | None, path: Path, *, replace: bool) -> None:
    from matplotlib.figure import Figure

    from esvdfair.plots import plot_curve

    figure = Figure(figsize=(6, 4), layout="constrained")
    plot_curve(found, target_ks=target_ks, ax=figure.subplots())
    cli.save_figure(figure, path, replace=replace)


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
