"""`esvdfair repair`: a model file in, a repaired model file and its record out."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.files import sha256_of, version_of, whole_files
from esvdfair.text import distinct_names, interval, number, share

if TYPE_CHECKING:
    from esvdfair.estimator import ESVDFair
    from esvdfair.federated import SiteMoments
    from esvdfair.tables import TableBatches

FORMAT = "esvdfair-record-1"
PACKAGES = ("esvdfair", "numpy", "scipy", "scikit-learn", "pandas", "onnx", "onnxruntime")
UNKNOWN_KS = (
    "KS distance: unknown. Moments tell means and variances, not whole distributions; --validation FILE gives rows to "
    "measure it on."
)


@click.command()
@click.argument("model", metavar="MODEL.onnx", type=cli.FILE)
@click.argument("data", metavar="[DATA]", type=cli.FILE, required=False)
@cli.output_option
@click.option(
    "--moments", metavar="FILE", type=cli.FILE, help="Instead of DATA: what `esvdfair moments` has collected or merged."
)
@cli.table_options(
    target="Column with the true value; without it the repair aims at the model's own predictions.",
    sensitive_required=False,
)
@cli.repair_options
@click.option(
    "--max-mse-increase",
    metavar="PART",
    type=click.FloatRange(min=0),
    help="Instead of --target-ks: the fairest candidate whose error grows by at most this part (0.05: five per cent).",
)
@click.option("-o", "--out", metavar="FILE", required=True, type=cli.FILE, help="Where the repaired model goes.")
@click.option("--report", metavar="FILE", type=cli.FILE, help="Also write a report of one HTML page.")
@click.option("--unit", metavar="TEXT", help="Unit of the target, for the report: `EUR a year`.")
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
    out: Path,
    report: Path | None,
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
    options["max_mse_increase"] = max_mse_increase
    _check_words(data, moments, reading, options, validation, report)
    written = Written(out, report)
    adapter = cli.load_model(model, options["output"])
    read = [*cli.model_files(model), data, moments, validation]
    cli.check_free([*written.paths, written.external], force=force, inputs=read)
    with cli.at_work(3) as work:
        work.step("reading")
        site = None if moments is None else _load_moments(moments)
        if site is None:
            assert data is not None
            rows, judging = reading.tables(data, validation, adapter, progress=work.read)
        else:
            alike = _columns_of(site, reading)
            rows, judging = None, None if validation is None else alike.table(validation, adapter, progress=work.read)
        work.step("repairing")
        fair = _repair(str(model), rows if site is None else site, judging, options)
        cli.only_first_rank()
        work.step("writing")
        record = _write(fair, rows, site, moments, judging, written, replace=force, unit=unit, command=ctx.obj)
    paths = [*cli.model_files(out), written.record, *([] if report is None else [report])]
    with cli.after_writing(paths):
        if as_json:
            cli.print_json(record)
        else:
            _show(fair, site)
            click.echo(f"\nwrote {', '.join(map(str, paths))}")
    return 1 if fair.summary_["met"] is False else 0


def _check_words(
    data: Path | None,
    moments: Path | None,
    reading: cli.Reading,
    options: dict[str, Any],
    validation: Path | None,
    report: Path | None,
) -> None:
    """Refuse what is not enough to work on, and what moments cannot do."""
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
    if options["method"] != "parity":
        raise click.UsageError(
            f"--method {options['method']} needs rows: transport compares whole distributions, exact and paper run the "
            "rows through an edited layer. From moments alone, --method parity equalises means and variances."
        )
    if options["layer"] is not None:
        raise click.UsageError("--layer belongs to --method exact and paper, which --moments cannot serve.")
    if options.pop("max_mse_increase") is not None:
        raise click.UsageError("--max-mse-increase needs the rows of a table; with --moments give --target-ks.")
    if validation is None and report is not None:
        raise click.UsageError("--report needs --validation FILE: it shows predictions for rows.")


def _load_moments(path: Path) -> "SiteMoments":
    from esvdfair.federated import SiteMoments

    return SiteMoments.load(path)


def _columns_of(site: "SiteMoments", reading: cli.Reading) -> cli.Reading:
    """How validation rows are read: columns that were not named are those of the moments."""
    roles = reading.roles
    sensitive, features = roles.sensitive or site.sensitive or (), roles.features or site.features
    return replace(reading, roles=replace(roles, sensitive=sensitive, features=features))


def _repair(
    model: str, given: "TableBatches | SiteMoments | None", judging: "TableBatches | None", options: Mapping[str, Any]
) -> "ESVDFair":
    from esvdfair.estimator import ESVDFair
    from esvdfair.tables import TableBatches

    validation = None if judging is None else (judging, None, None)
    if isinstance(given, TableBatches):
        return ESVDFair(model, **options).fit(given, validation=validation)
    from esvdfair.federated import repair_from_moments

    assert given is not None
    options = {name: value for name, value in options.items() if name not in ("method", "layer")}
    return repair_from_moments(model, given, validation=validation, **options)


# --- what is written -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The files that a repair writes."""

    model: Path
    report: Path | None = None

    @property
    def record(self) -> Path:
        return self.model.with_name(self.model.name + ".json")

    @property
    def external(self) -> Path:
        """Where the weights go when the model keeps them beside itself."""
        return self.model.with_name(self.model.name + ".data")

    @property
    def paths(self) -> list[Path]:
        """All of them, the record last."""
        return [self.model, *([self.report] if self.report is not None else []), self.record]


def _write(
    fair: "ESVDFair",
    rows: "TableBatches | None",
    site: "SiteMoments | None",
    moments: Path | None,
    judging: "TableBatches | None",
    written: Written,
    *,
    replace: bool,
    unit: str | None,
    command: Sequence[str] | None,
) -> dict[str, Any]:
    """Write the repaired model, its record and, if there is a place for it, its report: all or none. The record."""
    from esvdfair.models.onnx_io import save_model

    model = Path(fair.model_)
    with whole_files(*written.paths, replace=replace) as places:
        save_model(fair.estimator_, places[written.model], like=model)
        before, after = (
            {str(path.relative_to(file.parent)): sha256_of(path) for path in cli.model_files(file)}
            for file in (model, places[written.model])
        )
        record = {
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": None if command is None else ["esvdfair", *command],
            "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
            "parameters": {name: value for name, value in fair.get_params(deep=False).items() if name != "model"},
            "data": None if rows is None else _described(rows),
            "validation": None if judging is None else _described(judging),
            "reached": fair.summary_,
            "point": fair.point_,
            "edits": [_edit(edit) for edit in fair.edits_],
            "model_before": {"path": str(model), "sha256": before},
            "model_after": {"path": str(written.model), "sha256": after},
        }
        if site is not None and moments is not None:
            from esvdfair.cli.moments import described

            record["moments"] = described(site, moments)
        places[written.record].write_text(cli.to_json(record) + "\n", encoding="utf-8")
        shown = judging or rows
        if written.report is not None and shown is not None:
            from esvdfair.report import write_report

            seed, judged = fair.random_state, None
            if rows is None or fair.summary_["evaluated_on"] == "train":
                some = cli.some_rows(shown, cli.EXPLAINED_ROWS, seed=seed)
            else:
                some, judged = cli.learning_and_judging(rows, judging, seed)
            fitted = "moments" if rows is None else rows.path.name
            data = fitted if shown is rows else f"fitted on {fitted}, judged on {shown.path.name}"
            write_report(
                places[written.report], fair, *some.counted[:2], sensitive_features=some.groups,
                sample_weight=some.weight, judged=None if judged is None else judged.counted,
                model=f"{model.name}, repaired as {written.model.name}", data=data, unit=unit, command=command,
            )  # fmt: skip
    return record


def _described(table: "TableBatches") -> dict[str, Any]:
    return {
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


def _edit(edit: Any) -> dict[str, Any]:
    names = ("layer", "multiplier", "budget", "achieved", "converged", "output_change", "gap_before", "gap_after")
    return {name: getattr(edit, name) for name in names}


# --- what is printed -----------------------------------------------------------------------------------------------


def _show(fair: "ESVDFair", site: "SiteMoments | None") -> None:
    summary = fair.summary_
    start = f"{fair.model_} repaired by {fair.method}"
    if site is not None:
        sites = f"{len(site.sites)} sites" if len(site.sites) > 1 else "1 site"
        start += f" from moments of {site.rows:,} rows at {sites}"
    if summary["evaluated_on"] == "moments":
        click.echo(f"{start}\n\n{_known(summary)}\n")
        if summary["before_head"] and site is not None:
            kind = site.head.kind
            click.echo(f"Gaps are those before the {kind} at the end of the model; errors after it are unknown.")
        click.echo(click.wrap_text(UNKNOWN_KS, width=100))
        return
    click.echo(f"{start}; judged on {summary['rows']:,} rows, {cli.JUDGED_ON[summary['evaluated_on']]}\n")
    click.echo(_before_and_after(summary) + "\n")
    click.echo(click.wrap_text(_verdict(summary), width=100))


def _error_name(summary: Mapping[str, Any]) -> str:
    """Without labels an error is the distance to the model's own predictions."""
    return f"mean squared {'error' if summary['error_against'] == 'labels' else 'change'}"


def _before_and_after(summary: Mapping[str, Any]) -> str:
    """The table of a repair that rows have judged."""
    both = [
        ("KS distance", "ks", share),
        (_error_name(summary), "mse", number),
        ("gap of means", "mean_gap", number),
        ("gap of variances", "variance_gap", number),
    ]
    lines = [[name, form(summary[f"{key}_before"]), form(summary[f"{key}_after"]), ""] for name, key, form in both]
    lines[0][3] = interval(summary["ks_interval"], share)
    sizes = summary["group_sizes"]
    for name, (label, size) in zip(distinct_names(list(sizes)), sizes.items(), strict=True):
        before, after = (summary[f"group_mse_{when}"][label] for when in ("before", "after"))
        lines.append([f"  of {name} ({size:,} rows)", number(before), number(after), ""])
    return cli.table(["", "before", "after", "95 % interval, after"], [*lines[:2], *lines[4:], *lines[2:4]])


def _known(summary: Mapping[str, Any]) -> str:
    """Before and after, of what moments tell."""
    keys = [("gap of means", "mean_gap"), ("gap of variances", "variance_gap")]
    if summary["mse_after"] is not None:
        keys.append((_error_name(summary), "mse"))
    if summary["r2_after"] is not None:
        keys.append(("R²", "r2"))
    lines = []
    for name, key in keys:
        lines.append([name, *(number(summary[f"{key}_{when}"]) for when in ("before", "after"))])
        before, after = (summary.get(f"group_{key}_{when}") for when in ("before", "after"))
        if before is not None and after is not None:
            names = distinct_names(list(before))
            lines += [[f"  of {n}", number(before[g]), number(after[g])] for n, g in zip(names, before, strict=True)]
    return cli.table(["", "before", "after"], lines)


def _verdict(summary: Mapping[str, Any]) -> str:
    """Whether the target was met, and what parity would show."""
    floor = f"Parity itself would show a KS distance of about {share(summary['ks_floor'])} on so many rows."
    if summary["target_ks"] is None:
        return floor
    target = f"Target KS ≤ {summary['target_ks']:g}"
    if summary["met"]:
        return f"{target}: met. {floor}"
    return f"{target}: not met; this is the fairest candidate, and it is written. {floor}"
