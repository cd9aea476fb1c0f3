"""`esvdfair explain`: where in the network the gap lives, and who is moved by a repair."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli._inputs import (
    EXPLAINED_ROWS,
    FILE,
    Reading,
    file_bar,
    json_option,
    layer_option,
    load_model,
    model_and_data,
    seed_option,
    some_rows,
    table_options,
    validation_option,
)
from esvdfair.cli._output import JUDGED_ON, notes, print_json, progress, table
from esvdfair.text import label_text, number, percent, share

if TYPE_CHECKING:
    from esvdfair.explain import Direction, Directions, LayerScan, People


@click.command()
@model_and_data
@table_options()
@validation_option
@layer_option("Layer whose directions to show: index or name.  [default: last hidden]")
@click.option("--repaired", metavar="FILE", type=FILE, help="A repaired model; adds who is moved by it.")
@click.option(
    "--top",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Directions, and people, to list.",
)
@seed_option
@json_option
def explain(
    model: Path,
    data: Path,
    output: str | None,
    reading: Reading,
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
      esvdfair explain model.onnx people.csv --sensitive sex --repaired fair.onnx --layer 0
    """
    from esvdfair.explain import explain_directions, explain_people, scan_layers
    from esvdfair.models import find_layer

    with notes(), progress(3) as bar, file_bar() as show:
        bar.set_description("reading")
        models = [load_model(path, output) for path in (model, repaired) if path is not None]
        layers = models[0].layers()
        which = find_layer(layers, max(-2, -len(layers)) if layer is None else layer).name
        whole, judging = reading.tables(data, validation, *models, progress=show)
        rows = some_rows(whole, EXPLAINED_ROWS, seed=seed)
        judges = None if judging is None else some_rows(judging, EXPLAINED_ROWS, seed=seed)
        bar.update()
        bar.set_description("scanning layers")
        scan = scan_layers(
            str(model),
            rows.X,
            rows.y,
            sensitive_features=rows.groups,
            sample_weight=rows.weight,
            validation=None if judges is None else judges.parts,
            output=output,
            random_state=seed,
        )
        bar.update()
        bar.set_description("finding directions")
        beside: dict[str, Any] = {"sensitive_features": rows.groups, "sample_weight": rows.weight, "top": top}
        directions = explain_directions(str(model), rows.X, layer=which, output=output, **beside)
        people = None
        if repaired is not None:
            before, after = (m.predict(rows.X) for m in models)
            people = explain_people(before, after, **beside)
            # rows of the file, of which some may have been left out
            places = rows.X.index
            people = replace(people, movers=tuple(replace(m, row=int(places[m.row])) for m in people.movers))
    if as_json:
        moved = None if people is None else asdict(people)
        print_json({"layers": asdict(scan), "directions": asdict(directions), "people": moved})
        return
    click.echo(_layers(scan) + "\n")
    click.echo(_directions(directions, rows.attribute))
    if people is not None:
        click.echo("\n" + _people(people, rows.attribute))


def _layers(scan: "LayerScan") -> str:
    lines = [
        [
            "→" if found.index == scan.best.index else "",
            f"{found.index}",
            found.name,
            f"{found.inputs} → {found.outputs}",
            number(found.relative_mean_gap),
            number(found.relative_covariance_gap),
            share(found.ks),
            number(found.mse),
        ]
        for found in scan.layers
    ]
    header = ["", "", "layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    return (
        f"Layers, in the order of execution (as it is: KS {share(scan.ks_before)}, MSE {number(scan.mse_before)}; "
        f"judged on {scan.rows:,} rows, {JUDGED_ON[scan.evaluated_on]})\n\n{table(header, lines, left=3)}\n\n"
        "Gaps are relative to the spread of the layer's output. → marks the layer whose edit serves best."
    )


def _directions(found: "Directions", attribute: str) -> str:
    title = f"Directions of layer {found.layer} along which {attribute} differs"
    parts = [title]
    for kind, what, directions in (("mean", "means", found.mean), ("covariance", "spreads", found.covariance)):
        if directions:
            figures = [d.group_means if kind == "mean" else d.group_sds for d in directions]
            names = [f"{'mean' if kind == 'mean' else 'sd'} of {label_text(group)}" for group in found.groups]
            header = [what, "share", "gap σ", "σ after edit", *names, "follows"]
            lines = [
                [f"{d.rank}", percent(d.share), *map(number, (d.sigma_before, d.sigma_after, *values)), _follows(d)]
                for d, values in zip(directions, figures, strict=True)
            ]
            parts.append(table(header, lines, widest=80))
    return "\n\n".join(parts if len(parts) > 1 else [title, "None: the groups do not differ there."])


def _follows(direction: "Direction") -> str:
    return ", ".join(f"{name} {correlation:+.2f}" for name, correlation in direction.features) or "–"


def _people(people: "People", attribute: str) -> str:
    header = [
        attribute,
        "rows",
        "mean before",
        "after",
        "up",
        "down",
        f"moved > {number(people.threshold)}",
        "rank kept",
    ]
    lines = [
        [
            label_text(g.group),
            f"{g.rows:,}",
            *map(number, (g.mean_before, g.mean_after)),
            *map(percent, (g.share_up, g.share_down, g.share_moved)),
            share(g.rank_correlation),
        ]
        for g in people.groups
    ]
    movers = [
        [
            f"{m.row + 1:,}",
            label_text(m.group),
            *map(number, (m.before, m.after)),
            *map(percent, (m.rank_before, m.rank_after)),
        ]
        for m in people.movers
    ]
    parts: Iterable[str] = (
        "Who is moved by the repair (rank kept: rank correlation within the group)",
        table(header, lines),
        "Moved most (row of the table; rank among all)",
        table(["row", attribute, "before", "after", "rank before", "rank after"], movers, left=2),
    )
    return "\n\n".join(parts)
