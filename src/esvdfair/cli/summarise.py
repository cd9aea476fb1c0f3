"""`esvdfair summarise`: a summary of one part of the data. `esvdfair show`: what summaries contain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.files import sha256_of, whole_files
from esvdfair.text import label_text

if TYPE_CHECKING:
    from esvdfair.summary import Summary

SUMMARIES = "A summary file, or a pattern in quotation marks ('*.summary')."


@click.command("summarise")
@cli.model_and_data
@cli.table_options(target="Column with the true value; without it the repair aims at the model's own predictions.")
@cli.option("--row-id", "COL", "Column that identifies each row (whole numbers or texts). With it, the repair does not "
            "depend on how rows are divided into parts.")  # fmt: skip
@cli.option("--part", "NAME", "Name of this part, where there is no --row-id.  [default: the SHA-256 of DATA]")
@cli.option("--rows", "N", "Most rows to keep, the same for all parts.  [default: 160000]")
@cli.option("-o --out", "FILE", "Where the summary goes.", required=True)
@cli.force_option
@cli.json_option
def summarise_command(
    model: Path,
    data: Path,
    reading: cli.Reading,
    part: str | None,
    rows: int | None,
    output: str | None,
    out: Path,
    force: bool,
    as_json: bool,
) -> int:
    """Summarise a part of the data for `esvdfair repair --summary`.

    Summarise each part where it is, on any machine, with the same model; the repair adds the summaries up. A summary
    contains rows (inputs of the last layer, predictions, labels and groups of people): treat it as the data.

    \b
    Example:
      esvdfair summarise model.onnx people.csv --sensitive sex --target income -o people.summary
    """
    from esvdfair.gather import summarise
    from esvdfair.summary import KEPT_ROWS

    adapter = cli.load_model(model, output)
    cli.check_free([out], force=force, inputs=[*cli.model_files(model), data])
    with cli.at_work(2) as work:
        work.step("reading")
        table = reading.table(data, adapter, min_groups=1, progress=work.read)
        table.part = part if part is not None else table.scan.sha256
        work.step("summarising")
        found = summarise(str(model), table, output=output, rows=rows or KEPT_ROWS)
        with whole_files(out, replace=force) as places:
            found.save(places[out])
    with cli.after_writing([out]):
        if as_json:
            cli.print_json(describe(out, found))
        else:
            print_summary(out, found)
    return 0


@click.command("show")
@click.argument("summaries", metavar="SUMMARY...", nargs=-1, required=True)
@cli.json_option
def show_command(summaries: tuple[str, ...], as_json: bool) -> int:
    """Print what summaries contain, each of them and their sum.

    \b
    Example:
      esvdfair show people.summary
      esvdfair show '*.summary' --json
    """
    with cli.at_work():
        found = load_summaries(summaries)
    if as_json:
        cli.print_json([describe(path, each) for path, each in found.each.items()])
        return 0
    for path, each in found.each.items():
        print_summary(path, each)
    if len(found.each) > 1:
        print_summary(None, found.total)
    return 0


@dataclass(frozen=True)
class Summaries:
    """Summaries of parts, by file, and their sum."""

    each: Mapping[Path, "Summary"]
    total: "Summary"

    @property
    def name(self) -> str:
        """The file, or how many there are."""
        return next(iter(self.each)).name if len(self.each) == 1 else f"{len(self.each)} summaries"

    def described(self) -> dict[str, Any]:
        """What a record says of them."""
        return {
            "summaries": {str(path): sha256_of(path) for path in self.each},
            "rows": int(self.total.rows.sum()),
            "features": list(self.total.columns),
        }


def load_summaries(patterns: Sequence[str]) -> Summaries:
    """Read summary files, named one by one or by patterns, and add them up. Of none the sum is empty."""
    from esvdfair.summary import Summary

    paths: dict[Path, None] = {}
    for pattern in patterns:
        matched = sorted(glob(pattern)) if has_magic(pattern) and not Path(pattern).exists() else [pattern]
        if not matched:
            raise FileNotFoundError(f"no file matches {pattern!r}.")
        paths |= dict.fromkeys(map(Path, matched))
    each = {path: Summary.load(path) for path in paths}
    return Summaries(each, sum(each.values()) or Summary("", 0))


def describe(path: Path, summary: "Summary") -> dict[str, Any]:
    """What a summary contains, as numbers."""
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


def print_summary(path: Path | None, summary: "Summary") -> None:
    """Print what a summary contains."""
    kept, total = len(summary.kept), int(summary.rows.sum())
    beside = [name for name, there in (("labels", summary.labelled), ("weights", summary.weighted)) if there]
    click.echo(f"{'sum' if path is None else path}: {total:,} rows\n")
    lines = [[label_text(label), f"{rows:,}"] for label, rows in summary.group_rows.items()]
    click.echo(cli.text_table(["group", "rows"], lines) + "\n")
    words = ", ".join(["inputs of the last layer", "predictions", *beside, "groups"])
    click.echo(f"Contains {kept:,} of these rows ({words}): treat it as the data.\n" if kept else "Contains no rows.\n")
