"""`esvdfair summarise`: a summary of one part of the data. `esvdfair show`: what summaries contain."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._options import Given, load_summaries
from esvdfair.cli._terminal import answer, at_work, text_table, wrapped
from esvdfair.files import whole_files
from esvdfair.text import label_text

if TYPE_CHECKING:
    from esvdfair.summary import Summary


@click.command("summarise")
@opt.given_options(
    opt.MODEL,
    opt.DATA,
    opt.option("--row-id", "COL", "Column that identifies each row (whole numbers or texts). With it, the repair does "
               "not depend on how rows are divided into parts."),
    target="Column with the true value; without it the repair aims at the model's own predictions.",
)  # fmt: skip
@opt.option("--part", "NAME", "Name of this part, where there is no --row-id.  [default: the SHA-256 of DATA]")
@opt.option("--rows", "N", "Most rows to keep, the same for all parts.  [default: 160000]")
@opt.option("-o --out", "FILE", "Where the summary goes.", required=True)
@opt.force_option
@opt.json_option
def summarise_command(given: Given, part: str | None, rows: int | None, out: Path, force: bool, as_json: bool) -> None:
    """Summarise a part of the data for `esvdfair repair --summary`.

    Summarise each part where it is, on any machine, with the same model; the repair adds the summaries up. A summary
    contains rows (inputs of the last layer, predictions, labels and groups of people): treat it as the data.

    \b
    Example:
      esvdfair summarise model.onnx people.csv --sensitive sex --target income \\
        -o people.summary
    """
    from esvdfair.gather import summarise
    from esvdfair.summary import KEPT_ROWS

    model = given.load()
    opt.check_free([out], force=force, inputs=given.files)
    with at_work(2) as work:
        work.step("reading")
        table, _, _ = given.tables(model, min_groups=0, progress=work.read)
        table.part = table.scan.sha256 if part is None else part
        work.step("summarising")
        found = summarise(str(given.model), table, output=given.output, rows=rows or KEPT_ROWS)
        with whole_files(out, replace=force) as places:
            found.save(places[out])
    answer(_described_summary(out, found), *_summary_blocks(out, found), as_json=as_json, written=[out])


@click.command()
@click.argument("summaries", metavar="SUMMARY...", nargs=-1, required=True)
@opt.json_option
def show(summaries: tuple[str, ...], as_json: bool) -> None:
    """Print what summaries contain, each of them and their sum.

    \b
    Example:
      esvdfair show people.summary
      esvdfair show '*.summary' --json
    """
    with at_work():
        found = load_summaries(summaries)
        whole: list[tuple[Any, Any]] = [("sum", sum(found.values()))] * (len(found) > 1)
    answer(
        [_described_summary(path, each) for path, each in found.items()],
        *(block for name, each in [*found.items(), *whole] for block in _summary_blocks(name, each)), as_json=as_json,
    )  # fmt: skip


def _described_summary(path: Path, summary: "Summary") -> dict[str, Any]:
    """What a summary contains, for machines."""
    return {
        "path": path,
        "contains_rows": len(summary.kept),
        "rows": int(summary.rows.sum()),
        "group_rows": {label_text(label): n for label, n in summary.group_rows.items()},
        "strata": [label_text(label) for label in summary.strata] if summary.adjusted else [],
        "model": summary.model,
        "columns": list(summary.columns),
        "labels": summary.labelled,
        "weights": summary.weighted,
    }


def _summary_blocks(name: Path | str, summary: "Summary") -> list[str]:
    """What a summary contains, for people."""
    lines = [[label_text(label), f"{rows:,}"] for label, rows in summary.group_rows.items()]
    beside = ["labels"] * summary.labelled + ["weights"] * summary.weighted
    words = ", ".join(["inputs of the last layer", "predictions", *beside, "groups"])
    kept = f"Contains {len(summary.kept):,} of these rows ({words}): treat it as the data."
    return [
        f"{name}: {int(summary.rows.sum()):,} rows",
        text_table(["group", "rows"], lines),
        wrapped(kept) if len(summary.kept) else "Contains no rows.",
    ]
