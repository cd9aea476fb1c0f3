"""`esvdfair compare`: our methods and the baselines on the user's data."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from esvdfair.cli._inputs import EXPLAINED_ROWS, Reading, file_bar, load_model, some_rows
from esvdfair.cli._options import FILE, json_option, model_and_data, seed_option, table_options, target_ks_option
from esvdfair.cli._output import interval, label_text, notes, number, print_json, progress, share, table
from esvdfair.cli._words import in_options

if TYPE_CHECKING:
    from esvdfair.cli._comparison import Score


@click.command()
@model_and_data
@table_options()
@click.option("--validation", metavar="FILE", type=FILE, help="Rows that judge. Default: 30 % of DATA.")
@target_ks_option(default=0.1)
@seed_option
@json_option
def compare(
    model: Path,
    data: Path,
    output: str | None,
    reading: Reading,
    validation: Path | None,
    target_ks: float,
    seed: int,
    as_json: bool,
) -> None:
    """Run our methods and the baselines on the same rows.

    Every method learns from 70 % of the rows and is judged on the other 30 %; or it learns from DATA and is judged on
    the rows of --validation. The barycentre (Chzhen et al. 2020) and the private histogram (Xian et al. 2024) need to
    know a person's group at prediction, or predict it; the unaware optimum is the best that can be done without it,
    as far as its guess of the group is right, but is no longer the model.

    \b
    Example:
      esvdfair compare model.onnx people.csv --sensitive sex --target income --target-ks 0.1
    """
    from esvdfair.cli._comparison import Case, methods, run_method, split_rows
    from esvdfair.core.metrics import ks_floor

    chosen = methods()
    with notes(), progress(len(chosen)) as bar, file_bar() as show:
        adapter = load_model(model, output)
        whole, judging = reading.tables(data, validation, adapter, progress=show)
        rows = some_rows(whole, EXPLAINED_ROWS, seed=seed)
        judges = None if judging is None else some_rows(judging, EXPLAINED_ROWS, seed=seed)
        fit, test = split_rows(rows, seed) if judges is None else (rows, judges)
        case = Case(str(model), output, adapter, fit, test, target_ks, seed)
        scores = []
        for method in chosen:
            bar.set_description(method.name)
            scores.append(run_method(case, method))
            bar.update()
    floor = ks_floor(sensitive_features=test.groups, random_state=seed)
    if as_json:
        print_json({
            "model": model, "data": data, "target_ks": target_ks, "ks_floor": floor, "rows_fit": len(fit),
            "rows_test": len(test), "scores": [asdict(score) for score in scores],
        })  # fmt: skip
        return
    click.echo(
        f"Fitted on {len(fit):,} rows, judged on {len(test):,} others; target KS ≤ {target_ks:g}; parity itself would "
        f"show about {share(floor)}\n"
    )
    click.echo(_table(scores))
    for score in scores:
        if score.error:
            click.echo(f"\n{score.method}: not possible here. {in_options(score.error)}")


def _table(scores: "list[Score]") -> str:
    groups = next(list(score.group_mse) for score in scores if score.group_mse)
    header = [
        "",
        "KS",
        "95 % interval",
        "MSE",
        *(f"MSE of {label_text(g)}" for g in groups),
        "needs",
        "same model",
        "seconds",
    ]
    lines = [
        [
            s.method,
            share(s.ks),
            interval(s.ks_interval, share),
            number(s.mse),
            *(number(None if s.group_mse is None else s.group_mse[g]) for g in groups),
            s.needs,
            "yes" if s.same_model else "no",
            "–" if s.seconds is None else f"{s.seconds:.1f}",
        ]
        for s in scores
    ]
    return table(header, lines)
