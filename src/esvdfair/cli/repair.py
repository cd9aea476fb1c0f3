"""`esvdfair repair`: a repaired model and its record. `esvdfair curve`: what each degree of parity costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.files import sha256_of, versions, whole_files
from esvdfair.text import interval, number, share, summary_table, to_json, verdict

if TYPE_CHECKING:
    from esvdfair.curve import Curve, CurvePoint
    from esvdfair.estimator import ESVDFair
    from esvdfair.federated import SiteMoments
    from esvdfair.tables import TableBatches

ONE_FILE = 256 * 2**20
"""Bytes up to which a repaired model is one file, also where the model before kept its weights beside itself."""
FORMAT = "esvdfair-record-1"
EDIT = ("layer", "multiplier", "budget", "achieved", "converged", "output_change", "gap_before", "gap_after")
UNKNOWN_KS = (
    "KS distance: unknown. Moments tell means and variances, not whole distributions; --validation FILE gives rows to "
    "measure it on."
)


@click.command()
@click.argument("model", metavar="MODEL.onnx", type=cli.FILE)
@click.argument("data", metavar="[DATA]", type=cli.FILE, required=False)
@cli.output_option
@cli.option("--moments", "FILE", "Instead of DATA: what `esvdfair moments` has collected or merged.")
@cli.table_options(
    target="Column with the true value; without it the repair aims at the model's own predictions.",
    sensitive_required=False,
)
@cli.repair_options()
@cli.max_mse_option
@cli.test_option
@cli.option("-o --out", "FILE", "Where the repaired model goes.", required=True)
@cli.option("--report", "FILE", "Also write a report of one HTML page.")
@cli.option("--model-card", "FILE", "Also write a model card, as Hugging Face reads it.")
@cli.option("--unit", "UNIT", "Unit of the target, for report and card: `EUR a year`.")
@cli.force_option
@cli.json_option
@click.pass_context
def repair(
    ctx: click.Context,
    model: Path,
    data: Path | None,
    moments: Path | None,
    reading: cli.Reading,
    options: dict[str, Any],
    max_mse_increase: float | None,
    validation: Path | None,
    test: Path | None,
    out: Path,
    report: Path | None,
    model_card: Path | None,
    unit: str | None,
    force: bool,
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
    from esvdfair.estimator import ESVDFair

    options["max_mse_increase"] = max_mse_increase
    _check_words(data, moments, reading, options, validation, report)
    record_path = out.with_name(out.name + ".json")
    written = [path for path in (out, record_path, report, model_card) if path is not None]
    adapter = cli.load_model(model, options["output"])
    read = [*cli.model_files(model), data, moments, validation, test]
    beside = out.with_name(out.name + ".data")  # where the weights go when the model keeps them beside itself
    cli.check_free([*written, beside], force=force, inputs=read)
    with cli.at_work(3) as work:
        work.step("reading")
        rows, site = None, None
        if data is not None:
            rows = reading.table(data, adapter, progress=work.read)
            reading = reading.like(rows)
        elif moments is not None:
            from esvdfair.federated import SiteMoments, repair_from_moments

            site = SiteMoments.load(moments)
            reading = _like(site, reading)
        judging, apart = (
            None if path is None else reading.table(path, adapter, progress=work.read) for path in (validation, test)
        )
        work.step("repairing")
        if site is None:
            fair = ESVDFair(str(model), **options).fit(rows, validation=judging)
        else:
            fair = repair_from_moments(str(model), site, validation=judging, **options)
        summary = fair.summary_ if apart is None else fair.assess(apart)
        cli.only_first_rank()
        work.step("writing")
        done = Done(fair, rows, judging, site, moments, apart, summary, unit, ctx.obj)
        with whole_files(*written, replace=force) as places:
            hashes = _save_model(done, places[out])
            record = _record(done, out, *hashes)
            places[record_path].write_text(to_json(record) + "\n", encoding="utf-8")
            if model_card is not None:
                card = _card(done, out.name, hashes[0] | hashes[1])
                places[model_card].write_text(card, encoding="utf-8", errors="replace")
            if report is not None:
                _write_report(done, places[report], out.name)
    paths = [*cli.model_files(out), *written[1:]]
    with cli.after_writing(paths):
        if as_json:
            cli.print_json(record)
        else:
            _show(fair, site, summary)
            click.echo(f"\nwrote {', '.join(map(str, paths))}")
    return 1 if summary["met"] is False else 0


def _check_words(
    data: Path | None,
    moments: Path | None,
    reading: cli.Reading,
    options: dict[str, Any],
    validation: Path | None,
    report: Path | None,
) -> None:
    """Refuse what is not enough to work on, and what moments cannot do, which then leaves the options."""
    if moments is None:
        if data is None:
            raise click.UsageError("Missing argument 'DATA': a table of rows, or give --moments FILE.")
        if not reading.roles.sensitive:
            raise click.UsageError("Missing option '--sensitive'.")
        return
    if data is not None:
        raise click.UsageError(
            f"got both {str(data)!r} and --moments; the rows of a table would be counted beside the moments, perhaps "
            "twice. Give one of them, and rows to choose and judge on as --validation FILE."
        )
    if (method := options.pop("method")) != "parity":
        raise click.UsageError(
            f"--method {method} needs rows: transport compares whole distributions, exact and paper run the "
            "rows through an edited layer. From moments alone, --method parity equalises means and variances."
        )
    if options.pop("layer") is not None:
        raise click.UsageError("--layer belongs to --method exact and paper, which --moments cannot serve.")
    if options.pop("max_mse_increase") is not None:
        raise click.UsageError("--max-mse-increase needs the rows of a table; with --moments give --target-ks.")
    if validation is None and report is not None:
        raise click.UsageError("--report needs --validation FILE: it shows predictions for rows.")


def _like(site: "SiteMoments", reading: cli.Reading) -> cli.Reading:
    """How tables are read beside moments: columns that were not named are those of the moments."""
    roles = reading.roles
    sensitive, features = roles.sensitive or site.sensitive or (), roles.features or site.features
    control = roles.control or site.control or ()
    return replace(reading, roles=replace(roles, sensitive=sensitive, features=features, control=control))


# --- what is written -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A repair, what it was made from, rows of tables or moments, and what it comes to on the rows of the headline."""

    fair: "ESVDFair"
    rows: "TableBatches | None"
    judging: "TableBatches | None"
    site: "SiteMoments | None"
    moments: Path | None
    test: "TableBatches | None"
    summary: Mapping[str, Any]
    unit: str | None
    command: Sequence[str] | None

    @property
    def model(self) -> Path:
        return Path(self.fair.model_)


def _save_model(done: Done, place: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Write the repaired model; the SHA-256 of each file of the model before, and of this one."""
    from esvdfair.models.onnx import save_model

    one_file = len(done.fair.estimator_) <= ONE_FILE
    save_model(done.fair.estimator_, place, like=None if one_file else done.model)
    before, after = (
        {str(path.relative_to(file.parent)): sha256_of(path) for path in cli.model_files(file)}
        for file in (done.model, place)
    )
    return before, after


def _record(done: Done, out: Path, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    """For an auditor: what was done, with what, and what was reached."""
    fair = done.fair
    record = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": None if done.command is None else ["esvdfair", *done.command],
        "versions": versions(),
        "parameters": {name: value for name, value in fair.get_params(deep=False).items() if name != "model"},
        "data": _described(done.rows),
        "validation": _described(done.judging),
        "test": _described(done.test),
        "reached": fair.summary_,
        "tested": None if done.test is None else done.summary,
        "point": fair.point_,
        "edits": [{name: getattr(edit, name) for name in EDIT} for edit in fair.edits_],
    }
    if done.site is not None and done.moments is not None:
        from esvdfair.cli.moments import described

        record["moments"] = described(done.site, done.moments)
    return record | {
        "model_before": {"path": str(done.model), "sha256": before},
        "model_after": {"path": str(out), "sha256": after},
    }


def _write_report(done: Done, place: Path, name: str) -> None:
    """About the rows that judged, which `_check_words` has seen to."""
    from esvdfair.report import write_report

    fair, rows, judging, judged = done.fair, done.rows, done.judging, None
    if rows is not None and fair.summary_["evaluated_on"] != "train":
        some, judged = cli.learning_and_judging(rows, judging, fair.random_state)
    else:
        shown = judging or rows
        assert shown is not None
        some = cli.some_rows(shown, cli.EXPLAINED_ROWS, seed=fair.random_state)
    names = [str(done.moments) if rows is None else rows.path.name]
    names += [] if judging is None else [judging.path.name]
    tested = None if done.test is None else cli.some_rows(done.test, cli.EXPLAINED_ROWS, seed=fair.random_state).counted
    names += [] if done.test is None else [done.test.path.name]
    write_report(
        place, fair, *some.counted[:2], **some.beside,
        judged=None if judged is None else judged.counted, test=tested, summary=done.summary,
        model=f"{done.model.name}, repaired as {name}", data=", judged on ".join(names), unit=done.unit,
        command=done.command,
    )  # fmt: skip


def _card(done: Done, name: str, hashes: Mapping[str, str]) -> str:
    from esvdfair.report import model_card

    data, table, site = {}, done.rows or done.judging, done.site
    roles: Any = site if table is None else replace(table.roles, features=tuple(table.inputs))
    if site is not None:
        data["Fitted on"] = f"moments of {site.rows:,} rows at {len(site.sites)} site(s)"
    chose = "Chosen on" if done.test else "Chosen and judged on"
    for what, table in (("Fitted on", done.rows), (chose, done.judging), ("Judged on", done.test)):
        if table is not None:
            data[what] = f"{table.path.name}, {table.scan.rows:,} rows, SHA-256 {table.scan.sha256}"
    return model_card(
        done.fair, name=name, base=done.model.name, data=data, unit=done.unit, hashes=hashes, predicts=roles.target,
        inputs=roles.features, summary=done.summary,
        attribute=", ".join(roles.sensitive or ["the sensitive attribute"]),
    )  # fmt: skip


def _described(table: "TableBatches | None") -> dict[str, Any] | None:
    return (
        None
        if table is None
        else {
            "path": str(table.path),
            "sha256": table.scan.sha256,
            "rows": table.scan.rows,
            "dropped": table.scan.dropped,
            "small_groups": table.scan.small,
            "features": table.inputs,
            "target": table.roles.target,
            "sensitive": list(table.roles.sensitive),
            "weight": table.roles.weight,
        }
    )


# --- what is printed -----------------------------------------------------------------------------------------------


def _show(fair: "ESVDFair", site: "SiteMoments | None", summary: Mapping[str, Any]) -> None:
    start = f"{fair.model_} repaired by {fair.method}"
    if site is not None:
        sites = f"{len(site.sites)} sites" if len(site.sites) > 1 else "1 site"
        start += f" from moments of {site.rows:,} rows at {sites}"
    if summary["evaluated_on"] == "moments":
        click.echo(f"{start}\n\n{cli.table(*summary_table(summary))}\n")
        if summary["before_head"] and site is not None:
            kind = site.head.kind
            click.echo(f"Gaps are those before the {kind} at the end of the model; errors after it are unknown.")
        click.echo(click.wrap_text(UNKNOWN_KS, width=100))
        return
    click.echo(f"{start}; judged on {summary['rows']:,} rows, {cli.JUDGED_ON[summary['evaluated_on']]}\n")
    click.echo(cli.table(*summary_table(summary)) + "\n")
    click.echo(click.wrap_text(verdict(summary), width=100))


# --- curve ---------------------------------------------------------------------------------------------------------


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.repair_options()
@cli.option("--plot", "FILE", "Also draw the curve: .png, .svg or .pdf.")
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
    cli.check_plot(plot)
    written = [] if plot is None else [plot]
    adapter = cli.load_model(model, options["output"])
    cli.check_free(written, force=force, inputs=[*cli.model_files(model), data, validation])
    with cli.at_work(2) as work:
        work.step("reading")
        rows, judging = reading.tables(data, validation, adapter, progress=work.read)
        work.step("refitting")
        found = fit_curve(str(model), rows, validation=judging, **options)
        cli.only_first_rank()
        if plot:
            _draw(found, target_ks, plot, replace=force)
    chosen = None if target_ks is None else found.select(target_ks=target_ks)
    met = None if chosen is None or target_ks is None else found.meets(chosen, target_ks)
    with cli.after_writing(written):
        if as_json:
            cli.print_json({
                "model": model, "data": data, "method": options["method"], "evaluated_on": found.evaluated_on,
                "ks_floor": found.ks_floor, "mse_refit": found.mse_refit, "target_ks": target_ks, "met": met,
                "chosen": None if chosen is None else chosen.index, "points": [asdict(p) for p in found.points],
            })  # fmt: skip
        else:
            _show_curve(found, chosen)
            if met is not None:
                click.echo(f"Target KS ≤ {target_ks:g}: {'met by →' if met else 'not met; → comes closest'}.")
            if plot:
                click.echo(f"wrote {plot}")
    return 1 if met is False else 0


def _show_curve(found: "Curve", chosen: "CurvePoint | None") -> None:
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
