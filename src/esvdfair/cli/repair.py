"""`esvdfair repair`: a repaired model, its record, its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._options import EVALUATED_ON, Given, load_summaries, model_files, some_rows, split_rows
from esvdfair.cli._terminal import answer, at_work, decision_blocks, text_table, wrapped
from esvdfair.files import sha256_of, versions, whole_files
from esvdfair.text import summary_table, to_json, verdict

if TYPE_CHECKING:
    from esvdfair.cutoffs import Decisions
    from esvdfair.estimator import ESVDFair
    from esvdfair.models import ModelAdapter
    from esvdfair.summary import Summary
    from esvdfair.tables import TableBatches, TableRows

ONE_FILE = 256 * 2**20
"""Bytes up to which a repaired model is one file, also where the model before kept its weights beside itself."""
FORMAT = "esvdfair-record-1"
MAX_MSE = opt.option(
    "--max-mse-increase",
    "PART",
    "Instead of --target-ks: the fairest candidate whose error increases by at most this part (0.05: 5%).",
    type=click.FloatRange(min=0),
)
EDIT = ("layer", "multiplier", "budget", "achieved", "converged", "output_change", "gap_before", "gap_after")


@click.command()
@opt.option("--summary", "FILES", f"Instead of DATA: summaries of its parts. {opt.SUMMARIES}", multiple=True)
@opt.given_options(
    opt.MODEL,
    click.argument("data", metavar="[DATA]", type=opt.FILE, required=False),
    opt.VALIDATION,
    opt.TEST,
    opt.SEED,
    sensitive=False,
    target="Column with the true value; without it the repair aims at the model's own predictions.",
)
@opt.repair_options(MAX_MSE, *opt.METHOD)
@opt.cutoff_options
@opt.option("-o --out", "FILE", "Where the repaired model goes.", required=True)
@opt.option("--report", "FILE", "Also write a report, one HTML page.")
@opt.option("--model-card", "FILE", "Also write a model card for Hugging Face.")
@opt.option("--unit", "UNIT", "Unit of the target, for the report and the card: `EUR per year`.")
@opt.force_option
@opt.json_option
@click.pass_obj
def repair(
    command: Sequence[str],
    given: Given,
    options: dict[str, Any],
    summary: tuple[str, ...],
    cutoffs: Sequence[Mapping[str, Any]],
    out: Path,
    report: Path | None,
    model_card: Path | None,
    unit: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Write a model whose predictions are distributed alike in every group.

    The repaired model has the same format and inputs, and other weights; predictions need no sensitive column.
    FILE.json is a record of the repair: versions, hashes of data and models, parameters, results.

    DATA is the training data, a table or a directory of Parquet files; --validation gives rows that the model was not
    trained on. Instead of DATA, --summary takes files that `esvdfair summarise` wrote; then --report, --cutoff and
    --select-share need --test. With --cutoff or --select-share, prints who is selected before and after, and the
    cut-off that selects as many people after the repair.

    Exit code 1: done and written, but --target-ks was not met.

    \b
    Examples:
      esvdfair repair model.onnx people.csv --sensitive sex --target income \\
        --target-ks 0.1 -o fair.onnx
      esvdfair repair model.onnx --summary '*.summary' -o fair.onnx
    """
    from esvdfair.estimator import ESVDFair

    _check_sources(given, summary, rows_shown=report is not None or bool(cutoffs))
    model, parts = given.load(), load_summaries(summary)
    _check_format(given.model, out)
    record_path = out.with_name(out.name + ".json")
    written = [path for path in (out, record_path, report, model_card) if path is not None]
    beside = out.with_name(out.name + ".data")  # where the weights go when the model keeps them beside itself
    opt.check_free([*written, beside], force=force, inputs=[*given.files, *parts])
    with at_work(3) as work:
        work.step("reading")
        whole: Any = sum(parts.values())
        rows, validation, test = given.tables(model, inputs=whole.columns if parts else (), progress=work.read)
        work.step("repairing")
        fair = ESVDFair(str(given.model), **given.fitting, **options)
        fair = fair.fit_summary(whole, validation) if parts else fair.fit(rows, validation=validation)
        done = Repair(given, fair, model, out, rows, parts, whole, validation, test, unit, command, cutoffs)
        work.step("writing")
        with whole_files(*written, replace=force) as places:
            record = done.save(places[out])
            places[record_path].write_text(to_json(record) + "\n", encoding="utf-8")
            if model_card is not None:
                places[model_card].write_text(done.card(record), encoding="utf-8", errors="replace")
            if report is not None:
                done.write_report(places[report])
    paths = [*model_files(out), *written[1:]]
    answer(record, *done.blocks(), f"wrote {', '.join(map(str, paths))}", as_json=as_json, written=paths)
    return 1 if done.reached["met"] is False else 0


def _check_sources(given: Given, summaries: Sequence[str], *, rows_shown: bool) -> None:
    """Fail unless there is either a table or summaries, and with these, unless no rows of theirs are shown."""
    if given.data is None and not summaries:
        raise ValueError("there is nothing to repair with: pass DATA, or summaries of it with --summary FILES.")
    if given.data is not None and summaries:
        raise ValueError(
            f"{str(given.data)!r} and --summary were both given; pass one of them. Put a pattern in quotation marks: "
            "--summary '*.summary'"
        )
    if summaries and rows_shown and given.test is None:
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


# --- what is written and printed -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repair:
    """A repair, what it was made from, and what is to be told of it."""

    given: Given
    fair: "ESVDFair"
    model: "ModelAdapter"
    out: Path
    rows: "TableBatches | None"
    parts: "Mapping[Path, Summary]"
    whole: Any  # their sum
    validation: "TableBatches | None"
    test: "TableBatches | None"
    unit: str | None
    command: Sequence[str]
    cutoffs: Sequence[Mapping[str, Any]]

    @property
    def source(self) -> str:
        """What it was made from, for people."""
        if self.rows is not None:
            return self.rows.path.name
        return next(iter(self.parts)).name if len(self.parts) == 1 else f"{len(self.parts)} summaries"

    @cached_property
    def reached(self) -> Mapping[str, Any]:
        """The figures of the headline: of the test rows, if there are any."""
        return self.fair.summary_ if self.test is None else self.fair.assess(self.test)

    @cached_property
    def held(self) -> "tuple[TableRows, TableRows | None, TableRows | None]":
        """Rows in memory: training rows, validation rows where they are others, test rows where there are any."""
        seed = self.given.seed
        tested = None if self.test is None else some_rows(self.test, seed)
        if self.rows is None:
            assert tested is not None
            return tested, None, tested
        if self.fair.summary_["evaluated_on"] == "train":
            return some_rows(self.rows, seed), None, tested
        return *split_rows(self.rows, self.validation, seed), tested

    @cached_property
    def decided(self) -> "list[Decisions]":
        """Decisions at the cut-offs that were asked about, on the rows of the headline."""
        from esvdfair.cutoffs import decisions

        if not self.cutoffs:
            return []
        rows = next(rows for rows in reversed(self.held) if rows is not None)
        before, after = self.model.predict(rows.X), self.fair.predict(rows.X)
        return [decisions(before, after, **rows.beside, **options) for options in self.cutoffs]

    def save(self, place: Path) -> dict[str, Any]:
        """Write the repaired model; the record, for an auditor, of what was done, with what, and what was reached."""
        from esvdfair.models.tree_boosters import tree_format

        fair, repaired, point = self.fair, self.fair.estimator_, self.fair.point_
        if tree_format(repaired) is not None:
            place.write_bytes(repaired)
        else:
            from esvdfair.models.onnx import save_model

            save_model(repaired, place, like=None if len(repaired) <= ONE_FILE else self.given.model)
        before, after = (
            {str(path.relative_to(file.parent)): sha256_of(path) for path in model_files(file)}
            for file in (self.given.model, place)
        )
        return {
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": ["esvdfair", *self.command],
            "versions": versions(),
            "parameters": {name: value for name, value in fair.get_params(deep=False).items() if name != "model"},
            "data": _described(self.rows) or _described_sum(self.parts, self.whole),
            "validation": _described(self.validation),
            "test": _described(self.test),
            "reached": fair.summary_,
            "tested": None if self.test is None else self.reached,
            "verdict": verdict(self.reached),
            "decisions": self.decided,
            "point": point and point.to_dict() | {"index": point.index, "ks_pairs": point.ks_pairs},
            "edits": [{name: getattr(edit, name) for name in EDIT} for edit in fair.edits_],
            "model_before": {"path": str(self.given.model), "sha256": before},
            "model_after": {"path": str(self.out), "sha256": after},
        }

    def write_report(self, place: Path) -> None:
        """Write the report; its rows are counted from 1, as people count those of a file."""
        from esvdfair.report import write_report

        names = [self.source] + ([] if self.validation is None else [f"validation data {self.validation.path.name}"])
        names += [] if self.test is None else [f"test data {self.test.path.name}"]
        some, judged, tested = (
            None
            if rows is None
            else (rows.X.set_axis(rows.X.index + 1), rows.y, rows.groups, rows.weight, rows.control)
            for rows in self.held
        )
        assert some is not None
        write_report(
            place, self.fair, *some[:2], sensitive_features=some[2], sample_weight=some[3], judged=judged, test=tested,
            summary=self.reached, cutoffs=self.cutoffs, model=f"{self.given.model.name}, repaired as {self.out.name}",
            data=", ".join(names), unit=self.unit, command=self.command,
        )  # fmt: skip

    def card(self, record: Mapping[str, Any]) -> str:
        """The model card."""
        from esvdfair.report import model_card

        roles, data = self.given.roles, {}
        if self.rows is None:
            data["Fitted on"] = f"{self.source}, {record['data']['rows']:,} rows"
        chose = "Chosen on" if self.test else "Chosen and evaluated on"
        for what, table in (("Fitted on", self.rows), (chose, self.validation), ("Evaluated on", self.test)):
            if table is not None:
                data[what] = f"{table.path.name}, {table.scan.rows:,} rows, SHA-256 {table.scan.sha256}"
        return model_card(
            self.fair, name=self.out.name, base=self.given.model.name, data=data, inputs=record["data"]["features"],
            attribute=self.given.attribute or "group", predicts=roles.target, unit=self.unit, summary=self.reached,
            hashes=record["model_before"]["sha256"] | record["model_after"]["sha256"],
        )  # fmt: skip

    def blocks(self) -> list[str]:
        """What is printed."""
        found = self.reached
        where = f"evaluated on {found['rows']:,} {EVALUATED_ON[found['evaluated_on']]}"
        return [
            wrapped(f"{self.given.model} repaired with --method {self.fair.method}; {where}"),
            text_table(*summary_table(found)),
            wrapped(str(verdict(found))),
            *decision_blocks(self.decided, self.given.attribute),
        ]


def _described(table: "TableBatches | None") -> dict[str, Any] | None:
    """A table in the record."""
    if table is None:
        return None
    scan, roles = table.scan, table.roles
    return {
        "path": str(table.path), "sha256": scan.sha256, "rows": scan.rows, "dropped": scan.dropped,
        "small_groups": scan.small, "features": table.inputs, "target": roles.target,
        "sensitive": list(roles.sensitive), "weight": roles.weight,
    }  # fmt: skip


def _described_sum(parts: "Mapping[Path, Summary]", whole: "Summary") -> dict[str, Any]:
    """Summaries in the record."""
    hashes = {str(path): sha256_of(path) for path in parts}
    return {"summaries": hashes, "rows": int(whole.rows.sum()), "features": list(whole.columns)}
