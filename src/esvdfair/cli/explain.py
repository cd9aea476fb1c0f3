"""`esvdfair explain`: where in the model does the difference come from, and whose predictions change?"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.text import label_text, number, percent, share

if TYPE_CHECKING:
    from esvdfair.explain import Direction, Directions, LayerScan, People
    from esvdfair.explain.trees import TreeGap
    from esvdfair.models import ModelAdapter
    from esvdfair.tables import TableRows

ROW_AND_RANK = "row: of the table; rank: share of all people with lower predictions"


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.validation_option
@cli.layer_option("Layer of a network whose directions to show: index or name.  [default: last hidden]")
@cli.option("--repaired", "FILE", "A repaired model; adds whose predictions it changes.")
@cli.option("--top", "N", "Directions, columns, trees and people to list.", default=5, show_default=True)
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
    """Show where in the model the difference between groups comes from.

    Of a network: for each linear layer how far the groups are apart after it, and the KS distance and error that an
    edit of it would reach; for one layer the directions along which the groups differ. Of trees: how much each input
    column and each tree adds to the difference in means. With --repaired: whose predictions change.

    \b
    Examples:
      esvdfair explain model.onnx people.csv --sensitive sex --target income
      esvdfair explain model.onnx people.csv --sensitive sex --target income --repaired fair.onnx --layer 0
    """
    with cli.at_work(3) as work:
        work.step("reading")
        models = [cli.load_model(path, output) for path in (model, repaired) if path is not None]
        if models[0].trees and layer is not None:
            raise click.UsageError(f"{str(model)!r} is a tree ensemble and has no layers. Leave out --layer.")
        options = {"layer": _layer_name(models[0], layer), "top": top, "output": output}
        whole, judging = reading.of_large_groups().tables(data, validation, *models, progress=work.read)
        rows = cli.some_rows(whole, cli.EXPLAINED_ROWS, seed=seed)
        judges = None if judging is None else cli.some_rows(judging, cli.EXPLAINED_ROWS, seed=seed)
        work.step("explaining")
        parts, blocks = (_trees if models[0].trees else _network)(
            str(model), rows, judges, options, random_state=seed, min_group_rows=reading.min_group_rows
        )
        work.step("comparing")
        people = None if repaired is None else _changes(models[0], models[1], rows, top)
    if as_json:
        cli.print_json(parts | {"people": None if people is None else asdict(people)})
    else:
        cli.print_blocks(
            *blocks, *([] if people is None else _people_blocks(people, ", ".join(reading.roles.sensitive)))
        )


def _layer_name(model: "ModelAdapter", layer: int | str | None) -> str | None:
    from esvdfair.models import find_layer

    if model.trees:
        return None
    layers = model.layers()
    return find_layer(layers, max(-2, -len(layers)) if layer is None else layer).name


# --- trees ---------------------------------------------------------------------------------------------------------


def _trees(
    model: str, rows: "TableRows", _: "TableRows | None", options: dict[str, Any], **__: Any
) -> tuple[dict[str, Any], list[str]]:
    """Which columns and trees the difference in means comes from: for machines, and for people."""
    from esvdfair.explain import explain_trees

    found = explain_trees(model, rows.X, **rows.beside, output=options["output"])
    return asdict(found), _tree_blocks(found, options["top"])


def _tree_blocks(found: "TreeGap", top: int) -> list[str]:
    names, whole = " − ".join(map(label_text, found.groups)), found.mean_gap or 1.0

    def parts(header: str, named: Sequence[tuple[str, float]]) -> str:
        lines = [[name, number(part, beside=whole), percent(part / whole)] for name, part in named[:top]]
        return cli.text_table([header, "difference in means", "share"], lines)

    trees = sorted(((f"{index}", part) for index, part in enumerate(found.trees)), key=lambda tree: -abs(tree[1]))
    shown = f"The {min(top, len(trees))} of {len(trees):,} trees with the largest part:"
    difference = f"Difference in mean predictions, {names}: {number(found.mean_gap)}"
    return [
        cli.wrapped(f"{difference} (before a link function, if the model has one)."),
        parts("column", found.columns),
        shown,
        parts("tree", trees),
    ]


# --- networks ------------------------------------------------------------------------------------------------------


def _network(
    model: str, rows: "TableRows", judges: "TableRows | None", options: dict[str, Any], **scan_options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Which layers carry the difference, and along which directions of one: for machines, and for people."""
    from esvdfair.explain import explain_directions, scan_layers

    apart = None if judges is None else (judges.X, judges.y, judges.groups, judges.weight, judges.control)
    scan = scan_layers(
        model, rows.X, rows.y, validation=apart, output=options["output"], **scan_options, **rows.compared
    )
    directions = explain_directions(model, rows.X, **options, **rows.compared)
    parts = {"layers": asdict(scan), "directions": asdict(directions)}
    return parts, [*_layer_blocks(scan), *_direction_blocks(directions, ", ".join(map(str, rows.groups)))]


def _layer_blocks(scan: "LayerScan") -> list[str]:
    lines = []
    for found in scan.layers:
        mark, size = "→" if found.index == scan.best.index else "", f"{found.inputs} → {found.outputs}"
        gaps = map(number, (found.relative_mean_gap, found.relative_covariance_gap))
        lines.append([mark, f"{found.index}", found.name, size, *gaps, share(found.ks), number(found.mse)])
    header = ["", "", "layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    original = f"original model: KS {share(scan.ks_before)}, MSE {number(scan.mse_before)}"
    where = f"evaluated on {scan.rows:,} rows, {cli.EVALUATED_ON[scan.evaluated_on]}"
    return [
        cli.wrapped(f"Layers in the order of execution ({original}; {where})"),
        cli.text_table(header, lines, left=3),
        cli.wrapped("Gaps are relative to the spread of the layer's output. → marks the layer whose edit works best."),
    ]


def _direction_blocks(found: "Directions", attribute: str) -> list[str]:
    kinds = (("means", "mean", found.mean), ("spreads", "sd", found.covariance))
    tables = [_direction_table(what, form, found, directions) for what, form, directions in kinds if directions]
    title = f"Directions of layer {found.layer} along which {attribute} differs"
    return [title, *(tables or ["None: the groups do not differ there."])]


def _direction_table(what: str, form: str, found: "Directions", directions: "Sequence[Direction]") -> str:
    """The directions along which means, or spreads, differ: what they follow, their share, and a figure a group."""
    from esvdfair.report.page import follows

    lines = []
    for d in directions:
        figures = d.group_means if form == "mean" else d.group_sds
        lines.append([f"{d.rank}", follows(d), percent(d.share), *map(number, figures)])
    names = [f"{form} of {label_text(group)}" for group in found.groups]
    header = [what, "inputs it follows (correlation)", f"share of {directions[0].share_of}", *names]
    return cli.text_table(header, lines, left=2, widest=80)


# --- people --------------------------------------------------------------------------------------------------------


def _changes(before: "ModelAdapter", after: "ModelAdapter", rows: "TableRows", top: int) -> "People":
    """Whose predictions change; people are known by their row of the file, of which some may have been left out."""
    from esvdfair.explain import explain_people

    people = explain_people(before.predict(rows.X), after.predict(rows.X), top=top, **rows.beside)
    places = rows.X.index
    return replace(people, movers=tuple(replace(m, row=int(places[m.row])) for m in people.movers))


def _people_blocks(people: "People", attribute: str) -> list[str]:
    changed = f"changed by > {number(people.threshold)}"
    header = [attribute, "rows", "mean before", "after", "up", "down", changed, "rank correlation"]
    lines = []
    for g in people.groups:
        means, shares = (g.mean_before, g.mean_after), (g.share_up, g.share_down, g.share_moved)
        line = [label_text(g.group), f"{g.rows:,}", *map(number, means), *map(percent, shares)]
        lines.append([*line, share(g.rank_correlation)])
    movers = []
    for m in people.movers:
        values, ranks = (m.before, m.after), (m.rank_before, m.rank_after)
        movers.append([f"{m.row + 1:,}", label_text(m.group), *map(number, values), *map(percent, ranks)])
    return [
        cli.wrapped("Predictions that change (rank correlation: before against after, within the group)"),
        cli.text_table(header, lines),
        cli.wrapped(f"Largest changes ({ROW_AND_RANK})"),
        cli.text_table(["row", attribute, "before", "after", "rank before", "rank after"], movers, left=2),
    ]
