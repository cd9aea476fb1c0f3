"""`esvdfair reproduce`: the paper's tables and figures beside ours."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click
from tqdm import tqdm

from esvdfair.cli import _shared as cli
from esvdfair.datasets import Preparation
from esvdfair.experiments.config import EXPERIMENTS, OF_THE_PAPER, PARTS, Experiment, Part
from esvdfair.experiments.report import join, render_report
from esvdfair.experiments.runs import Folder, parse_seeds, plan, run
from esvdfair.experiments.tables import Table, draw_figures

FOLDER = click.Path(file_okay=False, path_type=Path)
WHAT = [*EXPERIMENTS, "figures", "all", "report"]


@click.command()
@click.argument("what", type=click.Choice(WHAT))
@cli.option("--seeds", "SEEDS", "Splits to run: a range or a list.", default="33-82", show_default=True)
@cli.option("--jobs", "N", "Processes of one thread each.", default=1, show_default=True)
@cli.option(
    "--out", "DIR", "Where rows, tables and figures go.", default="reproduction", show_default=True, type=FOLDER
)
@cli.option("--preparation", None, "How the data is prepared; see below.", type=click.Choice(["paper", "clean"]))
@cli.option("--epochs", "N", "Fewer epochs of training, for a quick look only.")
@cli.flag("--peers", "Run other libraries too; needs the extra `peers`.")
@cli.option("--part parts", None, "Make only these rows now; again for more.", type=click.Choice(PARTS), multiple=True)
@cli.option(
    "--onto",
    "DIR",
    "For `report`: put the rows into the tables of this folder first, and report on them.",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
)
@cli.flag("--json as_json", "Print the tables as JSON.")
def reproduce(
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
    """Run the experiments of the paper and print our numbers beside its own.

    \b
    law, compas            every method on the test split
    ablation-mean          c̃_e from 1.5 to 50 at c̃_v = 150, on law
    ablation-covariance    c̃_v from 5 to 150 at c̃_e = 15, on law
    wages                  as law, on a table that needs no download (not in the paper)
    all                    the four experiments of the paper
    figures                as all, but without the tables
    report                 the text of docs/reproduction.md, from the tables that `all` has saved

    Each finished seed and its networks are saved in the folder --out at once; a run that was stopped goes on where it
    was. Rows are saved by part: references (baselines, plug-in optimum), paper (its method, its errata), repaired
    (parity and transport), retrained (all layers, with a penalty). Delete the folder of a part to have it made again.

    --preparation paper (default) does as the authors did; clean leaves out a feature that is the target in disguise
    and fits scalers on the training rows. `all` and `figures` take both, except for the ablations.

    \b
    Example:
      esvdfair reproduce law --seeds 33-38 --jobs 2 --out results
    """
    wanted = parse_seeds(seeds)
    if onto is not None and what != "report":
        raise click.UsageError("--onto is for `report`, which joins what has been run; run first, then report.")
    if what == "report":
        if onto is not None:
            join(out, onto)
        click.echo(render_report(onto or out, wanted), nl=False)
        return
    experiments = _experiments(what, preparation, epochs, peers)
    _complete(experiments, parts, wanted, out, jobs)
    tables = [Table(Folder(out, experiment).rows(wanted), experiment) for experiment in experiments]
    if as_json:
        click.echo(json.dumps([table.to_dict() for table in tables], indent=1))
    elif what != "figures":
        click.echo("\n\n".join(map(str, tables)) + "\n")
    if what != "figures" and find_spec("matplotlib") is None:
        click.echo("no figures: they need matplotlib, pip install 'esvdfair[plots]'", err=True)
        return
    for table in tables:
        for path in draw_figures(table, out / "figures"):
            click.echo(path, err=as_json)


def _experiments(what: str, preparation: Preparation | None, epochs: int | None, peers: bool) -> list[Experiment]:
    several = what not in EXPERIMENTS
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
    with tqdm(total=total, initial=len(done), unit="seed", disable=not sys.stderr.isatty()) as bar:
        run(todo, jobs=jobs, on_done=bar.update)
    for experiment in experiments:
        Folder(out, experiment).combine()
