"""`esvdfair audit`: how differently are the groups predicted? `esvdfair explain`: where does that come from?"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from esvdfair.cli import _shared as cli
from esvdfair.cli._cutoffs import Cutoffs, cutoff_options, show
from esvdfair.text import interval, label_text, number, percent, share

if TYPE_CHECKING:
    from esvdfair.audit import Audit
    from esvdfair.explain import Directions, LayerScan, People
    from esvdfair.tables.table import TableRows


@click.command()
@click.argument("files", metavar="[MODEL.onnx] DATA", nargs=-1, type=cli.FILE)
@cli.option("--predictions", "COL", "Column with predictions, for no model.")
@cli.table_options(target="Column with the true value; adds the error of every group.")
@cli.target_ks_option("Largest KS distance between groups that passes; beyond it the exit code is 1.")
@cutoff_options
@cli.output_option
@cli.seed_option
@cli.json_option
def audit(
    files: tuple[Path, ...],
    predictions: str | None,
    reading: cli.Reading,
    target_ks: float | None,
    cutoffs: Cutoffs,
    output: str | None,
    seed: int,
    as_json: bool,
) -> int:
    """Measure how differently a model predicts for the groups.

    DATA is CSV or Parquet. Prints the Kolmogorov–Smirnov distance between the groups' predictions (0: distributed
    alike, 1: fully apart) with a 95% interval and its noise level, figures by group and by pair of groups, and a
    verdict. With --target-ks the exit code is 1 when the estimated population KS of a pair is larger, or cannot be told
    from so few rows. With --control the distances are also adjusted to the same mix of the named columns, and the
    adjusted ones are compared with the target. With --cutoff or --select-share: the share of each group that is
    selected there, and its adverse-impact ratio against the most selected group.

    \b
    Examples:
      esvdfair audit model.onnx people.csv --sensitive sex --target income
      esvdfair audit scores.csv --predictions score --sensitive sex --select-share 0.2
    """
    from esvdfair.audit import audit_predictions

    model, data = _which(files, predictions)
    with cli.at_work(2) as work:
        work.step("reading")
        adapter = None if model is None else cli.load_model(model, output)
        people = reading.table(data, *([adapter] if adapter else []), progress=work.read)
        rows = cli.some_rows(people, cli.AUDITED_ROWS, seed=seed)
        work.step("measuring")
        scores = rows.predictions if adapter is None else adapter.predict(rows.X)
        found = audit_predictions(
            scores, rows.groups, rows.y, sample_weight=rows.weight, control_features=rows.control,
            min_group_rows=reading.min_group_rows, seed=seed,
        )  # fmt: skip
        decided = cutoffs.decide(scores, scores, sensitive_features=rows.groups, sample_weight=rows.weight)
    met = None if target_ks is None else found.compared.meets(target_ks)
    dropped = people.scan.dropped
    if as_json:
        cli.print_json({
            "model": model, "data": data, "data_sha256": people.scan.sha256, "sensitive": list(rows.groups),
            "control": list(reading.roles.control),
            "dropped": dropped, "available": people.scan.rows,
            **found.to_dict(), "target_ks": target_ks, "met": met, "verdict": found.verdict(),
            "decisions": decided,
        })  # fmt: skip
    else:
        subject = f"column {predictions}" if model is None else str(model)
        without = f" ({dropped:,} with missing values left out)" if dropped else ""
        click.echo(f"{subject} on {found.rows:,} rows of {data}{without}\n")
        click.echo(_groups(found, rows.attribute) + "\n")
        click.echo(_distances(found) + "\n")
        click.echo(cli.wrapped(found.verdict()))
        if target_ks is not None:
            seen = "met" if met else "not met" if found.compared.exceeds(target_ks) else "cannot be told"
            estimate = share(found.compared.ks_population)
            click.echo(f"Target KS ≤ {target_ks:g}: {seen} (estimated population KS {estimate}).")
        show(decided, rows.attribute)
    return 1 if met is False else 0


def _which(files: tuple[Path, ...], predictions: str | None) -> tuple[Path | None, Path]:
    """The model, if one is needed, and the data."""
    if predictions is None and len(files) == 2:
        return files[0], files[1]
    if predictions is not None and len(files) == 1:
        return None, files[0]
    raise click.UsageError(
        f"got {len(files)} file(s) {'and' if predictions else 'without'} --predictions; give a model and a table, "
        "MODEL.onnx DATA, or a table that holds predictions, DATA --predictions COL."
    )


def _groups(found: "Audit", attribute: str) -> str:
    several, labelled = len(found.between.names) > 2, found.mse is not None
    header = [attribute, "rows", "mean prediction", "95% interval", "std"]
    header += ["KS to the rest", "95% interval"] * several + ["MSE", "95% interval", "mean error"] * labelled
    lines = []
    for g in found.groups:
        line = [g.group, f"{g.rows:,}", number(g.mean), interval(g.mean_interval), number(g.std)]
        judged = g.group not in found.groups_set_aside
        line += [share(g.ks_to_rest) if judged else "too small to judge"] * several
        line += [interval(g.ks_to_rest_interval, share) if judged else "–"] * several
        if g.mse_interval is not None:
            line += [number(g.mse), interval(g.mse_interval), number(g.mean_error)]
        lines.append(line)
    return cli.text_table(header, lines)


def _distances(found: "Audit") -> str:
    raw, adjusted, several = found.between, found.adjusted, len(found.between.names) > 2
    lines = [
        ["KS distance", share(raw.ks), interval(raw.ks_interval, share)],
        ["  estimated population KS", share(raw.ks_population), ""],
        [
            "  largest noise level of a pair" if several else "  noise level: KS by chance alone",
            share(raw.ks_floor),
            "",
        ],
        ["Wasserstein distance", number(found.wasserstein), ""],
        ["difference in means", number(raw.mean_gap), ""],
        ["difference in variances", number(found.variance_gap), ""],
    ]
    if adjusted is not None:
        lines += [
            ["KS distance, adjusted", share(adjusted.ks), interval(adjusted.ks_interval, share)],
            ["  estimated population KS", share(adjusted.ks_population), ""],
            ["  largest noise level of a pair" if several else "  noise level", share(adjusted.ks_floor), ""],
            ["difference in means, adjusted", number(adjusted.mean_gap), ""],
            ["rows in strata that lack a group", percent(found.outside_support), ""],
        ]
    if found.mse is not None:
        lines += [["mean squared error", number(found.mse), ""], ["R²", share(found.r2), ""]]
    parts = [cli.text_table(["between groups, largest" if several else "between groups", "", "95% interval"], lines)]
    if several:
        shown = [pair for pair in found.compared.pairs if pair.ks_interval is not None]
        rows = [
            [" and ".join(p.groups), share(p.ks), interval(p.ks_interval, share), share(p.ks_population),
             share(p.ks_floor), "yes" if p.established else "no"]
            for p in sorted(shown, key=lambda pair: -pair.ks_population)
        ]  # fmt: skip
        header = ["pair", "KS", "95% interval", "estimated population KS", "noise level", "beyond chance"]
        parts.append(cli.text_table(header, rows))
    return "\n\n".join(parts)


# --- explain -------------------------------------------------------------------------------------------------------


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.validation_option
@cli.layer_option("Layer whose directions to show: index or name.  [default: last hidden]")
@cli.option("--repaired", "FILE", "A repaired model; adds who is moved by it.")
@cli.option("--top", "N", "Directions, and people, to list.", default=5, show_default=True)
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
        if models[0].trees:
            rows = cli.some_rows(reading.of_large_groups().table(data, *models), cli.EXPLAINED_ROWS, seed=seed)
            work.step("splitting the difference in means")
            _explain_trees(model, rows, output=output, top=top, as_json=as_json)
            return
        layers = models[0].layers()
        which = find_layer(layers, max(-2, -len(layers)) if layer is None else layer).name
        whole, judging = reading.of_large_groups().tables(data, validation, *models, progress=work.read)
        rows = cli.some_rows(whole, cli.EXPLAINED_ROWS, seed=seed)
        judges = None if judging is None else cli.some_rows(judging, cli.EXPLAINED_ROWS, seed=seed)
        work.step("scanning layers")
        apart = None if judges is None else judges.parts
        scan = scan_layers(
            str(model), rows.X, rows.y, validation=apart, output=output, random_state=seed,
            min_group_rows=reading.min_group_rows, **rows.compared,
        )  # fmt: skip
        work.step("finding directions")
        directions = explain_directions(str(model), rows.X, layer=which, top=top, output=output, **rows.compared)
        people = None
        if repaired is not None:
            before, after = (m.predict(rows.X) for m in models)
            people = explain_people(before, after, top=top, **rows.beside)
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


def _explain_trees(model: Path, rows: "TableRows", *, output: str | None, top: int, as_json: bool) -> None:
    """Print which columns and trees the difference in means comes from."""
    from esvdfair.explain import explain_trees

    found = explain_trees(str(model), rows.X, sensitive_features=rows.groups, sample_weight=rows.weight, output=output)
    if as_json:
        cli.print_json(asdict(found))
        return
    names = " − ".join(map(label_text, found.groups))
    click.echo(f"Difference in means, before the model's link, {names}: {number(found.mean_gap)}. By input column:\n")
    whole = found.mean_gap or 1.0
    lines = [[name, number(part), percent(part / whole)] for name, part in found.columns[:top]]
    click.echo(cli.text_table(["column", "difference", "share"], lines))


def _layers(scan: "LayerScan") -> str:
    lines = []
    for found in scan.layers:
        mark, size = "→" if found.index == scan.best.index else "", f"{found.inputs} → {found.outputs}"
        gaps = map(number, (found.relative_mean_gap, found.relative_covariance_gap))
        lines.append([mark, f"{found.index}", found.name, size, *gaps, share(found.ks), number(found.mse)])
    header = ["", "", "layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    return (
        f"Layers, in the order of execution (as it is: KS {share(scan.ks_before)}, MSE {number(scan.mse_before)}; "
        f"evaluated on {scan.rows:,} rows, {cli.EVALUATED_ON[scan.evaluated_on]})\n\n"
        f"{cli.text_table(header, lines, left=3)}\n\n"
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
            parts.append(cli.text_table(header, lines, widest=80))
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
        cli.text_table(header, lines),
        "Moved most (row of the table; rank among all)",
        cli.text_table(["row", attribute, "before", "after", "rank before", "rank after"], movers, left=2),
    )
    return "\n\n".join(parts)
