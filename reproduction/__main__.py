"""`python -m reproduction`: the tables and figures of the paper next to ours."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from reproduction.config import EXPERIMENTS, OF_THE_PAPER, PARTS, Experiment, Part
from reproduction.datasets import Preparation
from reproduction.report import join, render_report
from reproduction.runs import Folder, parse_seeds, plan, run
from reproduction.tables import Table, draw_figures

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("what", type=click.Choice([*EXPERIMENTS, "all", "report"]))
@click.option("--seeds", default="33-82", show_default=True, help="Splits to run: a range or a list.")
@click.option("--jobs", default=1, type=click.IntRange(1), show_default=True, help="Processes of one thread each.")
@click.option("--out", default="results", type=FOLDER, show_default=True, help="Folder of rows, tables and figures.")
@click.option("--preparation", type=click.Choice(["paper", "clean"]), help="How the data is prepared; see below.")
@click.option("--epochs", type=click.IntRange(1), help="Train for fewer epochs, for a quick look only.")
@click.option("--peers", is_flag=True, help="Run other libraries too.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Make only these rows; repeatable.")
@click.option("--onto", type=FOLDER, help="For `report`: put the rows into the tables of this folder first.")
@click.option("--json", "as_json", is_flag=True, help="Print the tables as JSON.")
def main(
    what: str,
    seeds: str,
    jobs: int,
    out: Path,
    preparation: Preparation | None,
    epochs: int | None,
    peers: bool,
    parts: tuple[Part, ...],
    onto: Path | None,
    as_json: bool,
) -> None:
    """Run the experiments of the paper and print our numbers next to its own.

    \b
    law, compas            every method on the test split
    ablation-mean          c̃_e from 1.5 to 50 at c̃_v = 150, on law
    ablation-covariance    c̃_v from 5 to 150 at c̃_e = 15, on law
    wages                  as law, on a table that needs no download (not in the paper)
    all                    the four experiments of the paper
    report                 the text of reproduction/README.md, from the tables that `all` has saved

    Each finished seed and its networks are saved in --out at once; a stopped run continues where it was. Rows are
    saved by part: references (baselines, plug-in optimum), paper (its method, its errata), repaired (parity and
    transport), retrained (all layers, with a penalty), peers. Delete the folder of a part to run it again.

    --preparation paper (default) does as the authors did; clean leaves out a feature that is the target in disguise
    and fits scalers on the training rows. `all` runs both, except for the ablations.
    """
    try:
        wanted = parse_seeds(seeds)
        if what == "report":
            if onto is not None:
                join(out, onto)
            click.echo(render_report(onto or out, wanted), nl=False)
            return
        experiments = _experiments(what, preparation, epochs, peers)
        _complete(experiments, parts, wanted, out, jobs)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    tables = [Table(Folder(out, experiment).rows(wanted), experiment) for experiment in experiments]
    click.echo(json.dumps([t.to_dict() for t in tables], indent=1) if as_json else "\n\n".join(map(str, tables)) + "\n")
    for table in tables:
        for path in draw_figures(table, out / "figures"):
            click.echo(path, err=as_json)


def _experiments(what: str, preparation: Preparation | None, epochs: int | None, peers: bool) -> list[Experiment]:
    several = what == "all"
    experiments = [EXPERIMENTS[name] for name in (OF_THE_PAPER if several else (what,))]
    if epochs is not None:
        experiments = [replace(e, training=replace(e.training, epochs=epochs)) for e in experiments]
    if peers:
        experiments = [replace(e, parts=(*e.parts, "peers")) if e.is_comparison else e for e in experiments]
    if preparation:
        return [replace(e, preparation=preparation) for e in experiments]
    if not several:
        return experiments
    return [replace(e, preparation=p) for e in experiments for p in e.preparations if p == "paper" or e.is_comparison]


def _complete(
    experiments: Sequence[Experiment], parts: Sequence[Part], seeds: Sequence[int], out: Path, jobs: int
) -> None:
    now = [replace(e, parts=tuple(part for part in e.parts if part in parts or not parts)) for e in experiments]
    done, todo = plan([e for e in now if e.parts], seeds, out)
    total = len(done) + len(todo)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        seeds_done = progress.add_task("seeds", total=total, completed=len(done))
        run(todo, jobs=jobs, on_done=lambda: progress.advance(seeds_done))
    for experiment in experiments:
        Folder(out, experiment).combine()


if __name__ == "__main__":
    main(prog_name="python -m reproduction")
