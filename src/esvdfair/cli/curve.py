"""`esvdfair curve`: what each degree of parity costs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli._inputs import (
    FILE,
    Reading,
    file_bar,
    force_option,
    json_option,
    load_model,
    model_and_data,
    model_files,
    repair_options,
    table_options,
)
from esvdfair.cli._output import (
    JUDGED_ON,
    after_writing,
    check_free,
    check_plot,
    notes,
    only_first_rank,
    print_json,
    progress,
    scatter,
    table,
)
from esvdfair.files import whole_files
from esvdfair.text import interval, number, share

if TYPE_CHECKING:
    from esvdfair.curve import Curve, CurvePoint


@click.command()
@model_and_data
@table_options()
@repair_options
@click.option("--plot", metavar="FILE", type=FILE, help="Also draw the curve: .png, .svg or .pdf.")
@force_option
@json_option
def curve(
    model: Path,
    data: Path,
    reading: Reading,
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
        check_plot(plot)
    adapter = load_model(model, options["output"])
    if plot is not None:
        check_free([plot], force=force, inputs=[*model_files(model), data, validation])
    with notes(), progress(2) as bar, file_bar() as show:
        bar.set_description("reading")
        rows, judging = reading.tables(data, validation, adapter, progress=show)
        bar.update()
        bar.set_description("refitting")
        judges = None if judging is None else (judging, None, None)
        found = fit_curve(str(model), rows, validation=judges, **options)
        only_first_rank()
        if plot:
            _draw(found, target_ks, plot, replace=force)
    chosen = None if target_ks is None else found.select(target_ks=target_ks)
    met = None if chosen is None or target_ks is None else chosen.ks <= target_ks
    with after_writing([] if plot is None else [plot]):
        if as_json:
            print_json({
                "model": model, "data": data, "method": options["method"], "evaluated_on": found.evaluated_on,
                "ks_floor": found.ks_floor,
                "target_ks": target_ks, "met": met, "chosen": None if chosen is None else chosen.index,
                "points": [asdict(point) for point in found.points],
            })  # fmt: skip
        else:
            _show(found, chosen)
            if met is not None:
                click.echo(f"Target KS ≤ {target_ks:g}: {'met by →' if met else 'not met; → comes closest'}.")
            if plot:
                click.echo(f"wrote {plot}")
    return 1 if met is False else 0


def _show(found: "Curve", chosen: "CurvePoint | None") -> None:
    click.echo(f"{len(found)} repaired models, judged on {JUDGED_ON[found.evaluated_on]}\n")
    lines = [
        [
            "→" if chosen is not None and point.index == chosen.index else "",
            share(point.ks),
            interval((point.ks_low, point.ks_high), share),
            number(point.mse),
            number(point.mean_gap),
            number(point.variance_gap),
            point.target,
            number(point.strength),
        ]
        for point in found.points
    ]
    click.echo(table(["", "KS", "95 % interval", "MSE", "mean gap", "variance gap", "aims at", "strength"], lines))
    click.echo("\nmean squared error over KS distance\n")
    order = [*found.points, *([chosen] if chosen is not None else [])]
    marks = ["•"] * len(found) + ["◉"] * (len(order) - len(found))
    click.echo(scatter([p.ks for p in order], [p.mse for p in order], marks))
    click.echo(f"\nKS floor {share(found.ks_floor)}: what parity itself would show on so many rows.")


def _draw(found: "Curve", target_ks: float | None, path: Path, *, replace: bool) -> None:
    from matplotlib.figure import Figure

    from esvdfair.plots import plot_curve

    figure = Figure(figsize=(6, 4), layout="constrained")
    plot_curve(found, target_ks=target_ks, ax=figure.subplots())
    with whole_files(path, replace=replace) as places:
        figure.savefig(places[path], dpi=160)
