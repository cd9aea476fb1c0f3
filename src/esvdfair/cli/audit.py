"""`esvdfair audit`: how different are the predictions for the groups?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._options import Given, some_rows
from esvdfair.cli._terminal import answer, at_work, decision_blocks, text_table, wrapped
from esvdfair.text import interval, number, percent, share

if TYPE_CHECKING:
    from esvdfair.audit import Audit, Distances

AUDITED_ROWS = 1_000_000
"""Rows held at once; predictions alone need less memory than methods that are fitted."""


@click.command()
@opt.given_options(
    click.argument("files", metavar="[MODEL] DATA", nargs=-1, type=opt.FILE),
    opt.option("--predictions", "COL", "Column with predictions, if there is no model."),
    opt.SEED,
    target="Column with the true value; adds the error of every group.",
)
@opt.target_ks_option("Largest KS distance between groups that passes; above it the exit code is 1.")
@opt.cutoff_options
@opt.json_option
def audit(given: Given, target_ks: float | None, cutoffs: Sequence[Mapping[str, Any]], as_json: bool) -> int:
    """Measure how different predictions are between groups.

    Prints figures for each group, the Kolmogorov–Smirnov (KS) distance between their predictions (0: the same
    distribution, 1: no overlap) with a 95% interval and its noise level, and a verdict.

    With --target-ks, the exit code is 1 unless the estimated population KS of every pair of groups is within the
    target. With --control, distances are also adjusted for the named columns, and the adjusted ones are compared with
    the target. With --cutoff or --select-share, prints the selection rates and adverse-impact ratios.

    \b
    Examples:
      esvdfair audit model.onnx people.csv --sensitive sex --target income
      esvdfair audit scores.csv --predictions score --sensitive sex \\
        --select-share 0.2
    """
    from esvdfair.audit import audit_predictions
    from esvdfair.cutoffs import decisions

    with at_work(2) as work:
        work.step("reading")
        models = [] if given.model is None else [given.load()]
        people, _, _ = given.tables(*models, progress=work.read)
        rows = some_rows(people, given.seed, AUDITED_ROWS)
        work.step("measuring")
        scores = models[0].predict(rows.X) if models else rows.predictions
        found = audit_predictions(
            scores, rows.groups, rows.y, sample_weight=rows.weight, control_features=rows.control,
            min_group_rows=given.min_group_rows, seed=given.seed,
        )  # fmt: skip
        decided = [decisions(scores, scores, **rows.beside, **options) for options in cutoffs]
    met = None if target_ks is None else found.compared.meets(target_ks)
    subject, dropped = given.model or f"column {given.roles.predictions}", people.scan.dropped
    without = f" ({dropped:,} with missing values left out)" if dropped else ""
    verdict = wrapped(found.verdict())
    if target_ks is not None:
        told = "met" if met else "not met" if found.compared.exceeds(target_ks) else "cannot be decided"
        estimate = share(found.compared.ks_population)
        verdict += f"\nTarget KS ≤ {target_ks:g}: {told} (estimated population KS {estimate})."
    answer(
        {
            "model": given.model, "data": given.data, "data_sha256": people.scan.sha256, "sensitive": list(rows.groups),
            "control": list(given.roles.control), "dropped": dropped, "available": people.scan.rows,
            **found.to_dict(), "target_ks": target_ks, "met": met, "verdict": found.verdict(), "decisions": decided,
        },
        wrapped(f"{subject} on {found.rows:,} rows of {given.data}{without}"),
        *_tables(found, given.attribute), verdict, *decision_blocks(decided, given.attribute), as_json=as_json,
    )  # fmt: skip
    return 1 if met is False else 0


def _tables(found: "Audit", attribute: str) -> list[str]:
    """Figures of the groups, of the distances between them, and of every pair where there are several."""
    several, labelled = len(found.between.pairs) > 1, found.mse is not None
    header = [attribute, "rows", "mean prediction", "95% interval", "std"]
    header += ["KS to the rest", "95% interval"] * several + ["MSE", "95% interval", "mean error"] * labelled
    lines = []
    for g in found.groups:
        line = [g.group, f"{g.rows:,}", number(g.mean), interval(g.mean_interval), number(g.std)]
        if several:
            small = g.group in found.groups_set_aside
            line += ["–", "too few rows"] if small else [share(g.ks_to_rest), interval(g.ks_to_rest_interval, share)]
        if labelled:
            line += [number(g.mse), interval(g.mse_interval), number(g.mean_error)]
        lines.append(line)
    tables = [text_table(header, lines), _distance_table(found, several)]
    if several:
        header = ["pair", "estimated population KS", "KS on these rows", "95% interval", "noise level", "beyond chance"]
        pairs = sorted(found.compared.pairs, key=lambda pair: -pair.ks_population)
        tables.append(text_table(header, [
            [" and ".join(p.groups), share(p.ks_population), share(p.ks), interval(p.ks_interval, share),
             share(p.ks_floor), "yes" if p.established else "no"]
            for p in pairs if p.ks_interval is not None
        ]))  # fmt: skip
    return tables


def _distance_table(found: "Audit", several: bool) -> str:
    """Largest differences between groups, as they are and adjusted; the error of all."""
    noise = "  largest noise level of a pair" if several else "  noise level: KS by chance alone"

    def distance(distances: "Distances", adjusted: str = "") -> list[list[str]]:
        return [
            [f"KS distance{adjusted}", share(distances.ks), interval(distances.ks_interval, share)],
            ["  estimated population KS", share(distances.ks_population), ""],
            [noise, share(distances.ks_floor), ""],
        ]

    lines = [
        *distance(found.between),
        ["Wasserstein distance", number(found.wasserstein), ""],
        ["difference in means", number(found.between.mean_gap), ""],
        ["difference in variances", number(found.variance_gap), ""],
    ]
    if found.adjusted is not None:
        lines += [
            *distance(found.adjusted, ", adjusted"),
            ["difference in means, adjusted", number(found.adjusted.mean_gap), ""],
            ["rows in strata that lack a group", percent(found.outside_support), ""],
        ]
    if found.mse is not None:
        lines += [["mean squared error", number(found.mse), ""], ["R²", share(found.r2), ""]]
    return text_table(["between groups, largest" if several else "between groups", "", "95% interval"], lines)
