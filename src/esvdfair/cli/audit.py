"""`esvdfair audit`: how differently are the groups predicted?"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from esvdfair.cli import _shared as cli
from esvdfair.text import interval, number, percent, share

if TYPE_CHECKING:
    from esvdfair.audit import Audit


@click.command()
@click.argument("files", metavar="[MODEL.onnx] DATA", nargs=-1, type=cli.FILE)
@click.option(
    "--predictions", metavar="COL", shell_complete=cli.complete_columns, help="Column with predictions, for no model."
)
@cli.table_options(target="Column with the true value; adds the error of every group.")
@cli.target_ks_option("Largest KS distance between groups that passes; beyond it the exit code is 1.")
@cli.output_option
@cli.seed_option
@cli.json_option
def audit(
    files: tuple[Path, ...],
    predictions: str | None,
    reading: cli.Reading,
    target_ks: float | None,
    output: str | None,
    seed: int,
    as_json: bool,
) -> int:
    """Measure how differently a model predicts for the groups.

    DATA is CSV or Parquet. Prints the Kolmogorov–Smirnov distance between the groups' predictions (0: distributed
    alike, 1: fully apart) with a 95 % interval and its sampling floor, figures by group, and a verdict. With
    --target-ks the exit code is 1 when the distance is larger. With --control the distance between groups of the same
    mix of jobs, regions or whatever is named stands beside it, and is the one that must be small.

    \b
    Examples:
      esvdfair audit model.onnx people.csv --sensitive sex --target income
      esvdfair audit scores.csv --predictions score --sensitive sex --sensitive region
    """
    from esvdfair.audit import audit_predictions

    model, data = _which(files, predictions)
    with cli.at_work(2) as work:
        work.step("reading")
        adapter = None if model is None else cli.load_model(model, output)
        people = reading.table(data, *([adapter] if adapter else []), progress=work.read)
        rows = cli.some_rows(people, cli.AUDITED_ROWS, seed=seed)
        work.step("measuring")
        scores = rows.predictions if adapter is None else adapter.predict(rows.X)
        found = audit_predictions(
            scores, rows.groups, rows.y, sample_weight=rows.weight, control_features=rows.control, seed=seed
        )
    judged = found.adjusted or found
    met = None if target_ks is None else judged.ks <= target_ks
    dropped = people.scan.dropped
    if as_json:
        cli.print_json({
            "model": model, "data": data, "data_sha256": people.scan.sha256, "sensitive": list(rows.groups),
            "control": list(reading.roles.control),
            "dropped": dropped, "small_groups": people.scan.small, "available": people.scan.rows,
            **found.to_dict(), "target_ks": target_ks, "met": met, "verdict": found.verdict(),
        })  # fmt: skip
    else:
        subject = f"column {predictions}" if model is None else str(model)
        without = f" ({dropped:,} with missing values left out)" if dropped else ""
        click.echo(f"{subject} on {found.rows:,} rows of {data}{without}\n")
        click.echo(_groups(found, rows.attribute) + "\n")
        click.echo(_distances(found) + "\n")
        click.echo(click.wrap_text(found.verdict(), width=100))
        if target_ks is not None:
            click.echo(f"Target KS ≤ {target_ks:g}: {'met' if met else 'not met'}.")
    return 1 if met is False else 0


def _which(files: tuple[Path, ...], predictions: str | None) -> tuple[Path | None, Path]:
    """The model, if one is needed, and the data."""
    if predictions is None and len(files) == 2:
        return files[0], files[1]
    if predictions is not None and len(files) == 1:
        return None, files[0]
    raise click.UsageError(
        f"got {len(files)} file(s) {'and' if predictions else 'without'} --predictions; give a model and a table, "
        "MODEL.onnx DATA, or a table that holds predictions, DATA --predictions COL."
    )


def _groups(found: "Audit", attribute: str) -> str:
    several, labelled = len(found.groups) > 2, found.mse is not None
    header = [attribute, "rows", "mean prediction", "95 % interval", "std"]
    header += ["KS to the rest", "95 % interval"] * several + ["MSE", "95 % interval", "mean error"] * labelled
    lines = []
    for g in found.groups:
        line = [g.group, f"{g.rows:,}", number(g.mean), interval(g.mean_interval), number(g.std)]
        line += [share(g.ks_to_rest), interval(g.ks_to_rest_interval, share)] * several
        if g.mse_interval is not None:
            line += [number(g.mse), interval(g.mse_interval), number(g.mean_error)]
        lines.append(line)
    return cli.table(header, lines)


def _distances(found: "Audit") -> str:
    lines = [
        ["KS distance", share(found.ks), interval(found.ks_interval, share)],
        ["  its floor: parity on so many rows", share(found.ks_floor), ""],
        ["Wasserstein distance", number(found.wasserstein), ""],
        ["gap of means", number(found.mean_gap), ""],
        ["gap of variances", number(found.variance_gap), ""],
    ]
    if found.adjusted is not None:
        lines += [
            ["KS distance, adjusted", share(found.adjusted.ks), interval(found.adjusted.ks_interval, share)],
            ["  its floor", share(found.adjusted.ks_floor), ""],
            ["gap of means, adjusted", number(found.adjusted.mean_gap), ""],
            ["people outside common support", percent(found.adjusted.outside_support), ""],
        ]
    if found.mse is not None:
        lines.append(["mean squared error", number(found.mse), ""])
    return cli.table(
        ["between groups" if len(found.groups) == 2 else "between groups, largest", "", "95 % interval"], lines
    )
