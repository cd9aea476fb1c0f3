"""`esvdfair explain`: where in the model does the difference come from, and whose predictions change?"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._options import EVALUATED_ON, Given, some_rows
from esvdfair.cli._terminal import answer, at_work, text_table, wrapped
from esvdfair.text import label_text, number, percent, share

if TYPE_CHECKING:
    from esvdfair.explain import Direction, Directions, LayerScan, People
    from esvdfair.models import ModelAdapter
    from esvdfair.tables import TableRows

ROW_AND_RANK = "row: in the table; rank: share of all people with lower predictions"


@click.command()
@opt.given_options(opt.MODEL, opt.DATA, opt.VALIDATION, opt.SEED)
@opt.option("--layer", "LAYER", "Layer of a network whose directions to show: index or name.  [default: last hidden]")
@opt.option("--repaired", "FILE", "A repaired model; adds whose predictions it changes.")
@opt.option("--top", "N", "Directions, columns, trees and people to list.", default=5, show_default=True)
@opt.json_option
def explain(given: Given, layer: int | str | None, repaired: Path | None, top: int, as_json: bool) -> None:
    """Show where the difference between groups comes from.

    Of a network: for each linear layer how far the groups are apart after it, and the KS distance and error that an
    edit of it would reach; for one layer the directions along which the groups differ. Of trees: how much each input
    column and each tree adds to the difference in means. With --repaired: whose predictions change.

    \b
    Examples:
      esvdfair explain model.onnx people.csv --sensitive sex --target income
      esvdfair explain model.onnx people.csv --sensitive sex --target income \\
        --repaired fair.onnx --layer 0
    """
    with at_work(3) as work:
        work.step("reading")
        models = [given.load(path) for path in (given.model, repaired) if path is not None]
        if models[0].trees and layer is not None:
            raise click.UsageError(f"{str(given.model)!r} is a tree ensemble and has no layers. Leave out --layer.")
        tables = given.of_large_groups().tables(*models, progress=work.read)
        rows, *apart = (some_rows(table, given.seed) for table in tables if table is not None)
        work.step("explaining")
        if models[0].trees:
            found, blocks = _trees(given, rows, top)
        else:
            options = {"layer": _layer_name(models[0], layer), "top": top, "output": given.output}
            found, blocks = _network(given, rows, apart, options)
        work.step("comparing")
        people = None if repaired is None else _changes(models[0], models[1], rows, top)
    if people is not None:
        blocks += _people_blocks(people, given.attribute)
    answer(found | {"people": None if people is None else asdict(people)}, *blocks, as_json=as_json)


def _layer_name(model: "ModelAdapter", layer: int | str | None) -> str:
    from esvdfair.models import find_layer

    layers = model.layers()
    return find_layer(layers, max(-2, -len(layers)) if layer is None else layer).name


# --- trees ---------------------------------------------------------------------------------------------------------


def _trees(given: Given, rows: "TableRows", top: int) -> tuple[dict[str, Any], list[str]]:
    """Which columns and trees the difference in means comes from: for machines, and for people."""
    from esvdfair.explain import explain_trees

    found = explain_trees(str(given.model), rows.X, **rows.beside, output=given.output)
    names, whole = " − ".join(map(label_text, found.groups)), found.mean_gap or 1.0

    def parts(header: str, named: Sequence[tuple[str, float]]) -> str:
        lines = [[name, number(part, beside=whole), percent(part / whole)] for name, part in named[:top]]
        return text_table([header, "difference in means", "share"], lines)

    trees = sorted(((f"{index}", part) for index, part in enumerate(found.trees)), key=lambda tree: -abs(tree[1]))
    shown = f"The {min(top, len(trees))} of {len(trees):,} trees with the largest part:"
    difference = f"Difference in mean predictions, {names}: {number(found.mean_gap)}"
    start = wrapped(f"{difference} (before a link function, if the model has one).")
    return asdict(found), [start, parts("column", found.columns), shown, parts("tree", trees)]


# --- networks ------------------------------------------------------------------------------------------------------


def _network(
    given: Given, rows: "TableRows", apart: "Sequence[TableRows]", options: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Which layers carry the difference, and along which directions of one: for machines, and for people."""
    from esvdfair.explain import explain_directions, scan_layers

    judging = next(((r.X, r.y, r.groups, r.weight, r.control) for r in apart), None)
    scan = scan_layers(str(given.model), rows.X, rows.y, validation=judging, **given.fitting, **rows.compared)
    directions = explain_directions(str(given.model), rows.X, **options, **rows.compared)
    parts = {"layers": asdict(scan), "directions": asdict(directions)}
    return parts, [*_layer_blocks(scan), *_direction_blocks(directions)]


def _layer_blocks(scan: "LayerScan") -> list[str]:
    lines = []
    for found in scan.layers:
        mark, size = "→" if found.index == scan.best.index else "", f"{found.inputs} → {found.outputs}"
        gaps = map(number, (found.relative_mean_gap, found.relative_covariance_gap))
        lines.append([mark, f"{found.index}", found.name, size, *gaps, share(found.ks), number(found.mse)])
    header = ["", "", "layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    original = f"original model: KS {share(scan.ks_before)}, MSE {number(scan.mse_before)}"
    where = f"evaluated on {scan.rows:,} {EVALUATED_ON[scan.evaluated_on]}"
    return [
        wrapped(f"Layers in the order of execution ({original}; {where})"),
        text_table(header, lines, left=3),
        wrapped("Gaps are relative to the spread of the layer's output. → marks the layer whose edit works best."),
    ]


def _direction_blocks(found: "Directions") -> list[str]:
    kinds = (("means", "mean", found.mean), ("spreads", "sd", found.covariance))
    tables = [_direction_table(what, form, found, directions) for what, form, directions in kinds if directions]
    title = f"Directions of layer {found.layer} along which the groups differ"
    return [title, *(tables or ["None: the groups do not differ there."])]


def _direction_table(what: str, form: str, found: "Directions", directions: "Sequence[Direction]") -> str:
    """The directions along which means, or spreads, differ: what they follow, their share, and a figure a group."""
    lines = []
    for d in directions:
        figures = d.group_means if form == "mean" else d.group_sds
        lines.append([f"{d.rank}", d.follows, percent(d.share), *map(number, figures)])
    names = [f"{form} of {label_text(group)}" for group in found.groups]
    header = [what, "inputs it follows (correlation)", f"share of {directions[0].share_of}", *names]
    return text_table(header, lines, left=2, widest=80)


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
        wrapped("Predictions that change (rank correlation: before against after, within the group)"),
        text_table(header, lines),
        wrapped(f"Largest changes ({ROW_AND_RANK})"),
        text_table(["row", attribute, "before", "after", "rank before", "rank after"], movers, left=2),
    ]
