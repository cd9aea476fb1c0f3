"""`esvdfair audit`: how different are the predictions for the groups?"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from esvdfair.cli import _shared as cli
from esvdfair.cli._cutoffs import Cutoffs, cutoff_options, show
from esvdfair.text import interval, number, percent, share

if TYPE_CHECKING:
    from esvdfair.audit import Audit, PairFigures
    from esvdfair.cutoffs import Decisions


@click.command()
@click.argument("files", metavar="[MODEL] DATA", nargs=-1, type=cli.FILE)
@cli.option("--predictions", "COL", "Column with predictions, if there is no model.")
@cli.table_options(target="Column with the true value; adds the error of every group.")
@cli.target_ks_option("Largest KS distance between groups that passes; above it the exit code is 1.")
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
    """Measure how different predictions are between groups.

    Prints figures for each group, the Kolmogorov–Smirnov (KS) distance between their predictions (0: the same
    distribution, 1: no overlap) with a 95% interval and its noise level, and a verdict.

    With --target-ks, the exit code is 1 unless the estimated population KS of every pair of groups is within the
    target. With --control, distances are also adjusted for the named columns, and the adjusted ones are compared with
    the target. With --cutoff or --select-share, prints the selection rates and adverse-impact ratios.

    \b
    Examples:
      esvdfair audit model.onnx people.csv --sensitive sex --target income
      esvdfair audit scores.csv --predictions score --sensitive sex --select-share 0.2
    """
    from esvdfair.audit import audit_predictions

    model, data = _model_and_table(files, predictions)
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
    if as_json:
        cli.print_json({
            "model": model, "data": data, "data_sha256": people.scan.sha256, "sensitive": list(rows.groups),
            "control": list(reading.roles.control), "dropped": people.scan.dropped, "available": people.scan.rows,
            **found.to_dict(), "target_ks": target_ks, "met": met, "verdict": found.verdict(), "decisions": decided,
        })  # fmt: skip
    else:
        without = f" ({people.scan.dropped:,} with missing values left out)" if people.scan.dropped else ""
        subject = f"{model or f'column {predictions}'} on {found.rows:,} rows of {data}{without}"
        _print_audit(found, subject, ", ".join(reading.roles.sensitive), target_ks, decided)
    return 1 if met is False else 0


def _model_and_table(files: tuple[Path, ...], predictions: str | None) -> tuple[Path | None, Path]:
    """The model, if one is needed, and the table."""
    if predictions is None and len(files) == 2:
        return files[0], files[1]
    if predictions is not None and len(files) == 1:
        return None, files[0]
    if predictions is not None:
        raise click.UsageError(f"--predictions needs one file, a table, and no model; got {len(files)} files.")
    if len(files) == 1:
        raise click.UsageError(
            f"got one file, {str(files[0])!r}. Add the model or the table that is missing (MODEL DATA), or name the "
            "column with predictions: --predictions COL"
        )
    raise click.UsageError(f"got {len(files)} files. Pass a model and a table: MODEL DATA")


def _print_audit(
    found: "Audit", subject: str, attribute: str, target_ks: float | None, decided: "list[Decisions]"
) -> None:
    several = len(found.between.pairs) > 1
    pairs = [pair for pair in found.compared.pairs if pair.ks_interval is not None]
    cli.print_blocks(
        cli.wrapped(subject), _group_table(found, attribute), _distance_table(found), _pair_table(pairs) * several,
        cli.wrapped(found.verdict()),
    )  # fmt: skip
    if target_ks is not None:
        met = found.compared.meets(target_ks)
        answer = "met" if met else "not met" if found.compared.exceeds(target_ks) else "cannot be told"
        estimate = share(found.compared.ks_population)
        click.echo(f"Target KS ≤ {target_ks:g}: {answer} (estimated population KS {estimate}).")
    show(decided, attribute)


def _group_table(found: "Audit", attribute: str) -> str:
    several, labelled = len(found.between.pairs) > 1, found.mse is not None
    header = [attribute, "rows", "mean prediction", "95% interval", "std"]
    header += ["KS to the rest", "95% interval"] * several + ["MSE", "95% interval", "mean error"] * labelled
    lines = []
    for g in found.groups:
        line = [g.group, f"{g.rows:,}", number(g.mean), interval(g.mean_interval), number(g.std)]
        if several:
            small = g.group in found.groups_set_aside
            line += ["–", "too few rows"] if small else [share(g.ks_to_rest), interval(g.ks_to_rest_interval, share)]
        if g.mse_interval is not None:
            line += [number(g.mse), interval(g.mse_interval), number(g.mean_error)]
        lines.append(line)
    return cli.text_table(header, lines)


def _distance_table(found: "Audit") -> str:
    raw, adjusted, several = found.between, found.adjusted, len(found.between.pairs) > 1
    noise = "  largest noise level of a pair" if several else "  noise level: KS by chance alone"
    lines = [
        ["KS distance", share(raw.ks), interval(raw.ks_interval, share)],
        ["  estimated population KS", share(raw.ks_population), ""],
        [noise, share(raw.ks_floor), ""],
        ["Wasserstein distance", number(found.wasserstein), ""],
        ["difference in means", number(raw.mean_gap), ""],
        ["difference in variances", number(found.variance_gap), ""],
    ]
    if adjusted is not None:
        lines += [
            ["KS distance, adjusted", share(adjusted.ks), interval(adjusted.ks_interval, share)],
            ["  estimated population KS", share(adjusted.ks_population), ""],
            [noise, share(adjusted.ks_floor), ""],
            ["difference in means, adjusted", number(adjusted.mean_gap), ""],
            ["rows in strata that lack a group", percent(found.outside_support), ""],
        ]
    if found.mse is not None:
        lines += [["mean squared error", number(found.mse), ""], ["R²", share(found.r2), ""]]
    return cli.text_table(["between groups, largest" if several else "between groups", "", "95% interval"], lines)


def _pair_table(pairs: "list[PairFigures]") -> str:
    """Every pair of groups, the largest difference first."""
    lines = [
        [" and ".join(p.groups), share(p.ks_population), share(p.ks), interval(p.ks_interval, share),
         share(p.ks_floor), "yes" if p.established else "no"]
        for p in sorted(pairs, key=lambda pair: -pair.ks_population)
    ]  # fmt: skip
    header = ["pair", "estimated population KS", "KS on these rows", "95% interval", "noise level", "beyond chance"]
    return cli.text_table(header, lines)
