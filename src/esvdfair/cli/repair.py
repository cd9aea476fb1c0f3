"""`esvdfair repair`: a model file in, a repaired model file and its record out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from esvdfair.cli._files import check_free
from esvdfair.cli._inputs import Reading, file_bar, load_model
from esvdfair.cli._options import (
    FILE,
    force_option,
    json_option,
    output_option,
    repair_options,
    seed_option,
    table_options,
)
from esvdfair.cli._output import JUDGED_ON, interval, label_text, notes, number, print_json, progress, share, table
from esvdfair.cli._ranks import only_first_rank


@click.command()
@click.argument("model", metavar="MODEL.onnx", type=FILE)
@click.argument("data", metavar="[DATA]", type=FILE, required=False)
@output_option
@click.option(
    "--moments", metavar="FILE", type=FILE, help="Instead of DATA: what `esvdfair moments` has collected or merged."
)
@table_options(
    target="Column with the true value; without it the repair aims at the model's own predictions.",
    sensitive_required=False,
)
@repair_options
@click.option("-o", "--out", metavar="FILE", required=True, type=FILE, help="Where the repaired model goes.")
@click.option("--report", metavar="FILE", type=FILE, help="Also write a report of one HTML page.")
@force_option
@seed_option
@json_option
@click.pass_context
def repair(
    ctx: click.Context,
    model: Path,
    data: Path | None,
    output: str | None,
    moments: Path | None,
    reading: Reading,
    target_ks: float | None,
    method: str,
    layer: int | str | None,
    validation: Path | None,
    out: Path,
    report: Path | None,
    force: bool,
    seed: int,
    as_json: bool,
) -> int:
    """Write a repaired model that predicts alike for every group.

    Same graph, same inputs, other weights; predictions need no sensitive column. Beside FILE goes FILE.json, a record
    of what was done: versions, fingerprints of data and models, parameters, what was reached. DATA may be the rows that
    the model was trained on; then --validation gives rows that it has not seen.

    With --moments no rows are needed but those of --validation, which choose and judge: see `esvdfair moments`.

    Exit code 1: done and written, but --target-ks was not met.

    \b
    Examples:
      esvdfair repair model.onnx people.csv --sensitive sex --target income --target-ks 0.1 -o fair.onnx
      esvdfair repair model.onnx --moments all.moments --method parity -o fair.onnx
    """
    from esvdfair.cli._record import Written, write_repaired
    from esvdfair.estimator import ESVDFair

    written = Written(out, report)
    inputs = [path for path in (model, data, moments, validation) if path is not None]
    check_free([*written.paths, written.external], force=force, inputs=inputs)
    if moments is not None:
        from esvdfair.cli._moments import Request, repair_with_moments

        request = Request(model, data, output, moments, reading, target_ks, method, layer, validation, seed)
        return repair_with_moments(request, written, as_json=as_json, command=ctx.obj)
    if data is None:
        raise click.UsageError("Missing argument 'DATA': a table of rows, or give --moments FILE.")
    if not reading.roles.sensitive:
        raise click.UsageError("Missing option '--sensitive'.")
    with notes(), progress(3) as bar, file_bar() as show:
        bar.set_description("reading")
        rows, judging = reading.tables(data, validation, load_model(model, output), progress=show)
        bar.update()
        bar.set_description("repairing")
        fair = ESVDFair(
            str(model),
            method=method,
            target_ks=target_ks,
            layer=layer,
            output=output,
            random_state=seed,
        )
        fair.fit(rows, validation=None if judging is None else (judging, None, None))
        only_first_rank()
        bar.update()
        bar.set_description("writing")
        record = write_repaired(fair, rows, judging, written, command=ctx.obj)
    if as_json:
        print_json(record)
    else:
        click.echo(
            f"{model} repaired by {method}; judged on {fair.summary_['rows']:,} rows, "
            f"{JUDGED_ON[fair.summary_['evaluated_on']]}\n"
        )
        click.echo(before_and_after(fair.summary_, labelled=rows.roles.target is not None) + "\n")
        click.echo(click.wrap_text(verdict(fair.summary_), width=100))
        click.echo(f"\nwrote {', '.join(map(str, written.paths))}")
    return 1 if fair.summary_["met"] is False else 0


def before_and_after(summary: Mapping[str, Any], *, labelled: bool) -> str:
    """The table of a repair's summary; without labels an error is the distance to the model's own predictions."""
    error = "error" if labelled else "change"
    both = [
        ("KS distance", "ks", share),
        (f"mean squared {error}", "mse", number),
        ("gap of means", "mean_gap", number),
        ("gap of variances", "variance_gap", number),
    ]
    lines = [[name, form(summary[f"{key}_before"]), form(summary[f"{key}_after"]), ""] for name, key, form in both]
    lines[0][3] = interval(summary["ks_interval"], share)
    for label, size in summary["group_sizes"].items():
        before, after = (summary[f"group_mse_{when}"][label] for when in ("before", "after"))
        lines.append([f"  of {label_text(label)} ({size:,} rows)", number(before), number(after), ""])
    return table(["", "before", "after", "95 % interval, after"], [*lines[:2], *lines[4:], *lines[2:4]])


def verdict(summary: Mapping[str, Any]) -> str:
    """Whether the target was met, and what parity would show."""
    floor = f"Parity itself would show a KS distance of about {share(summary['ks_floor'])} on so many rows."
    if summary["target_ks"] is None:
        return floor
    target = f"Target KS ≤ {summary['target_ks']:g}"
    if summary["met"]:
        return f"{target}: met. {floor}"
    return f"{target}: not met; this is the fairest candidate, and it is written. {floor}"
