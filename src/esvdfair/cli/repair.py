"""`esvdfair repair`: a repaired model, its record, its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.cli._cutoffs import Cutoffs, cutoff_options, show
from esvdfair.cli.summarise import SUMMARIES, Summaries, load_summaries
from esvdfair.files import sha256_of, versions, whole_files
from esvdfair.tables import Roles
from esvdfair.text import summary_table, to_json, verdict

if TYPE_CHECKING:
    from esvdfair.cutoffs import Decisions
    from esvdfair.estimator import ESVDFair
    from esvdfair.tables import TableBatches, TableRows

ONE_FILE = 256 * 2**20
"""Bytes up to which a repaired model is one file, also where the model before kept its weights beside itself."""
FORMAT = "esvdfair-record-1"
EDIT = ("layer", "multiplier", "budget", "achieved", "converged", "output_change", "gap_before", "gap_after")


@click.command()
@click.argument("model", metavar="MODEL.onnx", type=cli.FILE)
@click.argument("data", metavar="[DATA]", type=cli.FILE, required=False)
@cli.output_option
@cli.option("--summary", "FILES", f"Instead of DATA: summaries of its parts. {SUMMARIES}", multiple=True)
@cli.table_options(
    sensitive=False,
    target="Column with the true value; without it the repair aims at the model's own predictions.",
)
@cli.repair_options()
@cli.max_mse_option
@cli.test_option
@cutoff_options
@cli.option("-o --out", "FILE", "Where the repaired model goes.", required=True)
@cli.option("--report", "FILE", "Also write a report, one HTML page.")
@cli.option("--model-card", "FILE", "Also write a model card for Hugging Face.")
@cli.option("--unit", "UNIT", "Unit of the target, for the report and the card: `EUR per year`.")
@cli.force_option
@cli.json_option
@click.pass_context
def repair(
    ctx: click.Context,
    model: Path,
    data: Path | None,
    summary: tuple[str, ...],
    reading: cli.Reading,
    options: dict[str, Any],
    max_mse_increase: float | None,
    validation: Path | None,
    test: Path | None,
    cutoffs: Cutoffs,
    out: Path,
    report: Path | None,
    model_card: Path | None,
    unit: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Write a repaired model whose predictions are distributed alike in every group.

    The repaired model has the same format and inputs, and other weights; predictions need no sensitive column.
    FILE.json is a record of the repair: versions, hashes of data and models, parameters, results.

    DATA is the training data, a table or a directory of Parquet files; --validation gives rows that the model was not
    trained on. Instead of DATA, --summary takes files that `esvdfair summarise` wrote; then --report, --cutoff and
    --select-share need --test. With --cutoff or --select-share, prints who is selected before and after, and the
    cut-off that selects as many people after the repair.

    Exit code 1: done and written, but --target-ks was not met.

    \b
    Examples:
      esvdfair repair model.onnx people.csv --sensitive sex --target income --target-ks 0.1 -o fair.onnx
      esvdfair repair model.onnx --summary '*.summary' --target-ks 0.1 -o fair.onnx
    """
    from esvdfair.estimator import ESVDFair

    _check_sources(data, summary, rows_shown=test is None and (report is not None or bool(cutoffs)))
    cli.check_sensitive(ctx, reading, data, validation, test)
    options |= {"max_mse_increase": max_mse_increase, "min_group_rows": reading.min_group_rows}
    written = [path for path in (out, _record_path(out), report, model_card) if path is not None]
    adapter = cli.load_model(model, options["output"])
    parts = load_summaries(summary)
    read = [*cli.model_files(model), data, validation, test, *parts.each]
    beside = out.with_name(out.name + ".data")  # where the weights go when the model keeps them beside itself
    _check_format(model, out)
    cli.check_free([*written, beside], force=force, inputs=read)
    with cli.at_work(3) as work:
        work.step("reading")
        rows = None if data is None else reading.table(data, adapter, progress=work.read)
        reading = reading.with_inputs(parts.total.columns if rows is None else rows.inputs)
        judging, apart = (
            None if path is None else reading.table(path, adapter, progress=work.read) for path in (validation, test)
        )
        work.step("repairing")
        fair = ESVDFair(str(model), **options)
        fair = fair.fit_summary(parts.total, judging) if rows is None else fair.fit(rows, validation=judging)
        reached = fair.summary_ if apart is None else fair.assess(apart)
        work.step("writing")
        done = Done(fair, out, rows, parts, judging, apart, reading.roles, reached, unit, ctx.obj, cutoffs)
        with whole_files(*written, replace=force) as places:
            record = _write(done, places, report, model_card)
    paths = [*cli.model_files(out), *written[1:]]
    with cli.after_writing(paths):
        if as_json:
            cli.print_json(record)
        else:
            _show(fair, reached)
            show(done.decided, ", ".join(reading.roles.sensitive))
            click.echo(f"\nwrote {', '.join(map(str, paths))}")
    return 1 if reached["met"] is False else 0


def _check_sources(data: Path | None, summaries: Sequence[str], *, rows_shown: bool) -> None:
    """Fail unless there is either a table or summaries, and with these, unless no rows of theirs are shown."""
    if data is None and not summaries:
        raise ValueError("there is nothing to repair with: pass DATA, or summaries of it with --summary FILES.")
    if data is not None and summaries:
        raise ValueError(
            f"{str(data)!r} and --summary were both given; pass one of them. Put a pattern in quotation marks: "
            "--summary '*.summary'"
        )
    if summaries and rows_shown:
        raise ValueError("--report, --cutoff and --select-share need rows beside --summary: add --test FILE.")


def _check_format(model: Path, out: Path) -> None:
    """Fail where the name of the result says another format than that of the model."""
    from esvdfair.models.tree_boosters import tree_format

    form = tree_format(model) or "onnx"
    if out.suffix.lower() in {".onnx", ".txt", ".json", ".ubj", ".cbm"} - {f".{form}"}:
        raise ValueError(
            f"{str(out)!r} has the wrong extension: the repaired model has the format of {str(model)!r}. "
            f"Write it to {str(out.with_suffix('.' + form))!r}."
        )


# --- what is written -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A repair, the table or the summaries it was made from, and its figures on the rows of the headline."""

    fair: "ESVDFair"
    out: Path
    rows: "TableBatches | None"
    parts: Summaries
    judging: "TableBatches | None"
    test: "TableBatches | None"
    roles: Roles
    summary: Mapping[str, Any]
    unit: str | None
    command: Sequence[str] | None
    cutoffs: Cutoffs

    @property
    def model(self) -> Path:
        return Path(self.fair.model_)

    @property
    def data(self) -> str:
        """What it was made from, for people."""
        return self.parts.name if self.rows is None else self.rows.path.name

    @cached_property
    def held(self) -> "tuple[TableRows, TableRows | None]":
        """Rows in memory: those that fitted, and those that the figures are about where they are others."""
        seed = self.fair.random_state
        if self.rows is None:
            assert self.tested is not None
            return self.tested, None
        if self.fair.summary_["evaluated_on"] == "train":
            some = cli.some_rows(self.judging or self.rows, cli.EXPLAINED_ROWS, seed=seed)
            return some, None
        return cli.learning_and_judging(self.rows, self.judging, seed)

    @cached_property
    def tested(self) -> "TableRows | None":
        """The test rows, in memory."""
        test, seed = self.test, self.fair.random_state
        return None if test is None else cli.some_rows(test, cli.EXPLAINED_ROWS, seed=seed)

    @cached_property
    def decided(self) -> "list[Decisions]":
        """Decisions at the cut-offs that were asked about, on the rows of the headline."""
        from esvdfair.models import adapt

        if not self.cutoffs:
            return []
        rows = self.tested or self.held[1] or self.held[0]
        models = (adapt(model, output=self.fair.output) for model in (self.fair.model_, self.fair.estimator_))
        return self.cutoffs.decide(*(model.predict(rows.X) for model in models), **rows.beside)


def _write(done: Done, places: Mapping[Path, Path], report: Path | None, card: Path | None) -> dict[str, Any]:
    """Write the model and all that goes beside it; return the record."""
    hashes = _save_model(done, places[done.out])
    record = _record(done, *hashes)
    places[_record_path(done.out)].write_text(to_json(record) + "\n", encoding="utf-8")
    if card is not None:
        places[card].write_text(_card(done, hashes[0] | hashes[1]), encoding="utf-8", errors="replace")
    if report is not None:
        _write_report(done, places[report])
    return record


def _record_path(model: Path) -> Path:
    return model.with_name(model.name + ".json")


def _save_model(done: Done, place: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Write the repaired model; the SHA-256 of each file of the model before, and of this one."""
    from esvdfair.models.tree_boosters import tree_format

    if tree_format(done.fair.estimator_) is not None:
        place.write_bytes(done.fair.estimator_)
    else:
        from esvdfair.models.onnx import save_model

        one_file = len(done.fair.estimator_) <= ONE_FILE
        save_model(done.fair.estimator_, place, like=None if one_file else done.model)
    before, after = (
        {str(path.relative_to(file.parent)): sha256_of(path) for path in cli.model_files(file)}
        for file in (done.model, place)
    )
    return before, after


def _record(done: Done, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    """For an auditor: what was done, with what, and what was reached."""
    fair = done.fair
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": None if done.command is None else ["esvdfair", *done.command],
        "versions": versions(),
        "parameters": {name: value for name, value in fair.get_params(deep=False).items() if name != "model"},
        "data": _described(done.rows) or done.parts.described(),
        "validation": _described(done.judging),
        "test": _described(done.test),
        "reached": fair.summary_,
        "tested": None if done.test is None else done.summary,
        "verdict": verdict(done.summary),
        "decisions": done.decided,
        "point": fair.point_,
        "edits": [{name: getattr(edit, name) for name in EDIT} for edit in fair.edits_],
        "model_before": {"path": str(done.model), "sha256": before},
        "model_after": {"path": str(done.out), "sha256": after},
    }


def _write_report(done: Done, place: Path) -> None:
    """Write the report, about the validation rows."""
    from esvdfair.report import write_report

    judging, (some, judged) = done.judging, done.held
    names = [done.data] + ([] if judging is None else [f"validation data {judging.path.name}"])
    names += [] if done.test is None else [f"test data {done.test.path.name}"]
    write_report(
        place, done.fair, *_counted(some)[:2], **some.beside, judged=judged and _counted(judged),
        test=done.tested and _counted(done.tested), summary=done.summary, cutoffs=done.cutoffs.each,
        model=f"{done.model.name}, repaired as {done.out.name}", data=", ".join(names), unit=done.unit,
        command=done.command,
    )  # fmt: skip


def _counted(rows: "TableRows") -> tuple[Any, ...]:
    """Inputs, labels, groups, weights and strata, with rows counted from 1, as people count those of a file."""
    return rows.X.set_axis(rows.X.index + 1), rows.y, rows.groups, rows.weight, rows.control


def _card(done: Done, hashes: Mapping[str, str]) -> str:
    from esvdfair.report import model_card

    data, roles = {}, done.roles
    if done.rows is None:
        data["Fitted on"] = f"{done.parts.name}, {done.parts.total.rows.sum():,} rows"
    chose = "Chosen on" if done.test else "Chosen and evaluated on"
    for what, table in (("Fitted on", done.rows), (chose, done.judging), ("Evaluated on", done.test)):
        if table is not None:
            data[what] = f"{table.path.name}, {table.scan.rows:,} rows, SHA-256 {table.scan.sha256}"
    return model_card(
        done.fair, name=done.out.name, base=done.model.name, data=data, unit=done.unit, hashes=hashes,
        predicts=roles.target, inputs=roles.features, summary=done.summary, attribute=", ".join(roles.sensitive),
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


def _show(fair: "ESVDFair", summary: Mapping[str, Any]) -> None:
    where = f"evaluated on {summary['rows']:,} rows, {cli.EVALUATED_ON[summary['evaluated_on']]}"
    start = cli.wrapped(f"{fair.model_} repaired by {fair.method}; {where}")
    cli.print_blocks(start, cli.text_table(*summary_table(summary)), cli.wrapped(str(verdict(summary))))
