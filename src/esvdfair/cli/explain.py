"""`esvdfair explain`: where in the network the gap lives, and who is moved by a repair."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.text import label_text, number, percent, share

if TYPE_CHECKING:
    from esvdfair.explain import Directions, LayerScan, People


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.validation_option
@cli.layer_option("Layer whose directions to show: index or name.  [default: last hidden]")
@click.option("--repaired", metavar="FILE", type=cli.FILE, help="A repaired model; adds who is moved by it.")
@click.option(
    "--top",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Directions, and people, to list.",
)
@cli.seed_option
@cli.json_option
def explain(
    model: Path,
    data: Path,
    output: str | None,
    reading: cli.Reading,
    validation: Path | None,
    layer: int | str | None,
    repaired: Path | None,
    top: int,
    seed: int,
    as_json: bool,
) -> None:
    """Show which layers carry the gap, and which inputs it follows.

    For every linear layer: how far the groups are apart after it, and the KS distance and error that an edit of it
    would reach. For one layer: the directions of its output along which the groups differ. With --repaired: how far
    people are moved, by group.

    \b
    Examples:
      esvdfair explain model.onnx people.csv --sensitive sex --target income
      esvdfair explain model.onnx people.csv --sensitive sex --target income --repaired fair.onnx --layer 0
    """
    from esvdfair.explain import explain_directions, explain_people, scan_layers
    from esvdfair.models import find_layer

    with cli.at_work(3) as work:
        work.step("reading")
        models = [cli.load_model(path, output) for path in (model, repaired) if path is not None]
        layers = models[0].layers()
        which = find_layer(layers, max(-2, -len(layers)) if layer is None else layer).name
        whole, judging = reading.tables(data, validation, *models, progress=work.read)
        rows = cli.some_rows(whole, cli.EXPLAINED_ROWS, seed=seed)
        judges = None if judging is None else cli.some_rows(judging, cli.EXPLAINED_ROWS, seed=seed)
        work.step("scanning layers")
        beside: dict[str, Any] = {"sensitive_features": rows.groups, "sample_weight": rows.weight}
        apart = None if judges is None else judges.parts
        compared = beside | {"control_features": rows.control, "output": output}
        scan = scan_layers(str(model), rows.X, rows.y, validation=apart, random_state=seed, **compared)
        work.step("finding directions")
        directions = explain_directions(str(model), rows.X, layer=which, top=top, **compared)
        people = None
        if repaired is not None:
            before, after = (m.predict(rows.X) for m in models)
            people = explain_people(before, after, top=top, **beside)
            # rows of the file, of which some may have been left out
            places = rows.X.index
            people = replace(people, movers=tuple(replace(m, row=int(places[m.row])) for m in people.movers))
    if as_json:
        moved = None if people is None else asdict(people)
        cli.print_json({"layers": asdict(scan), "directions": asdict(directions), "people": moved})
        return
    click.echo(_layers(scan) + "\n")
    click.echo(_directions(directions, rows.attribute))
    if people is not None:
        click.echo("\n" + _people(people, rows.attribute))


def _layers(scan: "LayerScan") -> str:
    lines = []
    for found in scan.layers:
        mark, size = "→" if found.index == scan.best.index else "", f"{found.inputs} → {found.outputs}"
        gaps = map(number, (found.relative_mean_gap, found.relative_covariance_gap))
        lines.append([mark, f"{found.index}", found.name, size, *gaps, share(found.ks), number(found.mse)])
    header = ["", "", "layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    return (
        f"Layers, in the order of execution (as it is: KS {share(scan.ks_before)}, MSE {number(scan.mse_before)}; "
        f"judged on {scan.rows:,} rows, {cli.JUDGED_ON[scan.evaluated_on]})\n\n{cli.table(header, lines, left=3)}\n\n"
        "Gaps are relative to the spread of the layer's output. → marks the layer whose edit serves best."
    )


def _directions(found: "Directions", attribute: str) -> str:
    from esvdfair.report.content import follows

    title = f"Directions of layer {found.layer} along which {attribute} differs"
    parts = [title]
    for kind, what, directions in (("mean", "means", found.mean), ("covariance", "spreads", found.covariance)):
        if directions:
            figures = [d.group_means if kind == "mean" else d.group_sds for d in directions]
            names = [f"{'mean' if kind == 'mean' else 'sd'} of {label_text(group)}" for group in found.groups]
            header = [what, f"part of the {directions[0].share_of}", "gap σ", "σ after edit", *names, "follows"]
            lines = [
                [f"{d.rank}", percent(d.share), *map(number, (d.sigma_before, d.sigma_after, *values)), follows(d)]
                for d, values in zip(directions, figures, strict=True)
            ]
            parts.append(cli.table(header, lines, widest=80))
    return "\n\n".join(parts if len(parts) > 1 else [title, "None: the groups do not differ there."])


def _people(people: "People", attribute: str) -> str:
    moved = f"moved > {number(people.threshold)}"
    header = [attribute, "rows", "mean before", "after", "up", "down", moved, "rank kept"]
    lines = []
    for g in people.groups:
        means, shares = (g.mean_before, g.mean_after), (g.share_up, g.share_down, g.share_moved)
        line = [label_text(g.group), f"{g.rows:,}", *map(number, means), *map(percent, shares)]
        lines.append([*line, share(g.rank_correlation)])
    movers = []
    for m in people.movers:
        values, ranks = (m.before, m.after), (m.rank_before, m.rank_after)
        movers.append([f"{m.row + 1:,}", label_text(m.group), *map(number, values), *map(percent, ranks)])
    parts = (
        "Who is moved by the repair (rank kept: rank correlation within the group)",
        cli.table(header, lines),
        "Moved most (row of the table; rank among all)",
        cli.table(["row", attribute, "before", "after", "rank before", "rank after"], movers, left=2),
    )
    return "\n\n".join(parts)
