"""`esvdfair curve`: what each degree of parity costs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.text import interval, number, share

if TYPE_CHECKING:
    from esvdfair.curve import Curve, CurvePoint


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.repair_options()
@click.option("--plot", metavar="FILE", type=cli.FILE, help="Also draw the curve: .png, .svg or .pdf.")
@cli.force_option
@cli.json_option
def curve(
    model: Path,
    data: Path,
    reading: cli.Reading,
    options: dict[str, Any],
    validation: Path | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Show the trade-off between error and parity.

    One line a repaired model, from the most accurate to the fairest, judged on rows that did not fit it. With
    --target-ks the point that `esvdfair repair` would take is marked; the exit code is 1 when none meets it.

    \b
    Example:
      esvdfair curve model.onnx people.csv --sensitive sex --target income --target-ks 0.1 --plot curve.png
    """
    from esvdfair.estimator import fit_curve

    target_ks = options.pop("target_ks")
    if plot is not None:
        cli.check_plot(plot)
    adapter = cli.load_model(model, options["output"])
    if plot is not None:
        cli.check_free([plot], force=force, inputs=[*cli.model_files(model), data, validation])
    with cli.at_work(2) as work:
        work.step("reading")
        rows, judging = reading.tables(data, validation, adapter, progress=work.read)
        work.step("refitting")
        judges = None if judging is None else (judging, None, None)
        found = fit_curve(str(model), rows, validation=judges, **options)
        cli.only_first_rank()
        if plot:
            _draw(found, target_ks, plot, replace=force)
    chosen = None if target_ks is None else found.select(target_ks=target_ks)
    met = None if chosen is None or target_ks is None else found.meets(chosen, target_ks)
    with cli.after_writing([] if plot is None else [plot]):
        if as_json:
            cli.print_json({
                "model": model, "data": data, "method": options["method"], "evaluated_on": found.evaluated_on,
                "ks_floor": found.ks_floor, "mse_refit": found.mse_refit, "target_ks": target_ks, "met": met,
                "chosen": None if chosen is None else chosen.index, "points": [asdict(p) for p in found.points],
            })  # fmt: skip
        else:
            _show(found, chosen)
            if met is not None:
                click.echo(f"Target KS ≤ {target_ks:g}: {'met by →' if met else 'not met; → comes closest'}.")
            if plot:
                click.echo(f"wrote {plot}")
    return 1 if met is False else 0


def _show(found: "Curve", chosen: "CurvePoint | None") -> None:
    click.echo(f"{len(found)} repaired models, judged on {cli.JUDGED_ON[found.evaluated_on]}\n")
    lines = []
    for point in found.points:
        mark = "→" if chosen is not None and point.index == chosen.index else ""
        numbers = map(number, (point.mse, point.mean_gap, point.variance_gap))
        within = interval((point.ks_low, point.ks_high), share)
        estimate = share(point.ks_population)
        lines.append([mark, estimate, share(point.ks), within, *numbers, point.target, number(point.strength)])
    judged = ["KS expected", "on these rows", "95 % interval", "MSE", "mean gap", "variance gap"]
    click.echo(cli.table(["", *judged, "aims at", "strength"], lines))
    click.echo("\nmean squared error over KS distance\n")
    order = [*found.points, *([chosen] if chosen is not None else [])]
    marks = ["•"] * len(found) + ["◉"] * (len(order) - len(found))
    click.echo(scatter([p.ks for p in order], [p.mse for p in order], marks))
    click.echo(f"\nKS floor {share(found.ks_floor)}: what parity itself would show on so many rows.")
    if found.mse_refit is not None:
        click.echo(f"MSE {number(found.mse_refit)}: the last layer refitted without parity.")


def _draw(found: "Curve", target_ks: float | None, path: Path, *, replace: bool) -> None:
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
