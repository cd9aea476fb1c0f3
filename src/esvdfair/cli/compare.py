"""`esvdfair compare`: our methods and the baselines on the user's data."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from esvdfair.cli import _shared as cli
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.text import distinct_names, interval, number, share

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter
    from esvdfair.tables import TableBatches, TableRows

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A model, and the rows that methods learn from and that judge them.

    Attributes
    ----------
    data, validation : what `esvdfair repair` would be given
    options : of ESVDFair
    fit, judge : rows in memory, which baselines learn from and which judge all methods
    """

    model: str
    adapter: "ModelAdapter"
    data: "TableBatches"
    validation: "TableBatches | None"
    options: dict[str, Any]
    fit: "TableRows"
    judge: "TableRows"


class Method(NamedTuple):
    """One line of the table: a method, and how its predictions for the judging rows are made.

    ``needs`` is what it takes at prediction besides the model's inputs; ``same_model`` whether the result is the model
    itself with other weights.
    """

    name: str
    needs: str
    same_model: bool
    run: Callable[[Case], Array]


@dataclass(frozen=True)
class Score:
    """What one method reaches on the rows that judge; one that cannot be applied has ``error`` and no numbers."""

    method: str
    needs: str
    same_model: bool
    mse: float | None = None
    r2: float | None = None
    ks: float | None = None
    ks_interval: tuple[float, float] | None = None
    group_mse: dict[Any, float] | None = None
    seconds: float | None = None
    error: str | None = None


@click.command()
@cli.model_and_data
@cli.table_options()
@cli.repair_options(one_method=False, target_ks=0.1)
@cli.max_mse_option
@cli.test_option
@cli.json_option
def compare(
    model: Path,
    data: Path,
    reading: cli.Reading,
    options: dict[str, Any],
    validation: Path | None,
    max_mse_increase: float | None,
    test: Path | None,
    as_json: bool,
) -> None:
    """Run our methods and the baselines on the same rows.

    Our methods do what `esvdfair repair` does with the same options: they are fitted on DATA and choose on the rows of
    --validation, or on a quarter of DATA. The baselines are fitted on the same training rows. All are evaluated on the
    rows of --test, or else on the validation rows.

    The barycenter (Chzhen et al. 2020) and the private histogram (Xian et al. 2024) need a person's group at
    prediction, or predict it. The unaware optimum needs no group, but replaces the model by another.

    \b
    Example:
      esvdfair compare model.onnx people.csv --sensitive sex --target income --target-ks 0.1
    """
    from esvdfair.core.metrics import ks_floor

    if max_mse_increase is not None:
        raise click.UsageError(
            "--max-mse-increase: baselines have no rule for it, so methods are compared at one --target-ks."
        )
    reading = reading.of_large_groups()
    options["min_group_rows"] = reading.min_group_rows
    chosen, seed, target_ks = methods(), options["random_state"], options["target_ks"]
    with cli.at_work(len(chosen) + 1) as work:
        work.step("reading")
        adapter = cli.load_model(model, options["output"])
        rows, judging = reading.tables(data, validation, adapter, progress=work.read)
        learn, judge = cli.learning_and_judging(rows, judging, seed)
        if test is not None:
            judge = cli.some_rows(reading.like(rows).table(test, adapter), cli.EXPLAINED_ROWS, seed=seed)
        learn, judge = cli.of_large_groups(learn, judge, reading.min_group_rows)
        case = Case(str(model), adapter, rows, judging, options, learn, judge)
        scores = []
        for method in chosen:
            work.step(method.name)
            scores.append(run_method(case, method))
    floor = ks_floor(random_state=seed, **case.judge.compared)
    if as_json:
        cli.print_json({
            "model": model, "data": data, "validation": validation, "test": test, "target_ks": target_ks,
            "ks_floor": floor,
            "rows_fit": len(case.fit), "rows_test": len(case.judge), "scores": [asdict(score) for score in scores],
        })  # fmt: skip
        return
    which = cli.EVALUATED_ON["test" if test else "validation" if validation else "heldout"]
    also = ", which also chose the points of our methods" if test is None else ""
    judged = f"{len(case.judge):,}, {which}{also}"
    noise = f"target KS ≤ {target_ks:g}; noise level {share(floor)}."
    click.echo(cli.wrapped(f"Fitted on {len(case.fit):,} rows, evaluated on {judged}; {noise}") + "\n")
    click.echo(_table(scores))
    for score in scores:
        if score.error:
            click.echo(f"\n{score.method}: not possible here. {score.error}")


def _table(scores: list[Score]) -> str:
    groups = next(list(score.group_mse) for score in scores if score.group_mse)
    of_groups = [f"MSE of {name}" for name in distinct_names(groups)]
    header = ["", "KS", "95% interval", "MSE", "R²", *of_groups, "needs", "same model", "time"]
    lines = []
    for s in scores:
        errors = [number(None if s.group_mse is None else s.group_mse[g]) for g in groups]
        seconds = "–" if s.seconds is None else f"{s.seconds:.1f} s"
        facts = ["–" if s.needs == "nothing" else "group", "yes" if s.same_model else "no", seconds]
        figures = [share(s.ks), interval(s.ks_interval, share), number(s.mse), share(s.r2)]
        lines.append([s.method, *figures, *errors, *facts])
    return cli.text_table(header, lines)


# --- the comparison ------------------------------------------------------------------------------------------------


def methods() -> list[Method]:
    """Everything that is compared, in the order of the table."""
    from esvdfair.baselines import PrivateHistogram, UnawareOptimum, WassersteinBarycenter, WithPredictedGroups
    from esvdfair.estimator import METHODS

    def barycenter(case: Case) -> Any:
        return WassersteinBarycenter(random_state=case.options["random_state"])

    def histogram(case: Case) -> Any:
        return PrivateHistogram(alpha=case.options["target_ks"], random_state=case.options["random_state"])

    def predicted(make: Callable[[Case], Any]) -> Callable[[Case], Array]:
        return lambda case: _from_features(case, WithPredictedGroups(baseline=make(case)))

    def optimum(case: Case) -> Array:
        return _from_features(case, UnawareOptimum(alpha=case.options["target_ks"]))

    return [
        Method("the original model", "nothing", True, lambda case: case.adapter.predict(case.judge.X)),
        *[Method(name, "nothing", True, partial(_repaired, name)) for name in reversed(METHODS)],
        Method("barycenter", "the group", False, lambda case: _from_groups(case, barycenter(case))),
        Method("barycenter, group predicted", "nothing", False, predicted(barycenter)),
        Method("private histogram", "the group", False, lambda case: _from_groups(case, histogram(case))),
        Method("private histogram, group predicted", "nothing", False, predicted(histogram)),
        Method("unaware optimum", "nothing", False, optimum),
    ]


def run_method(case: Case, method: Method) -> Score:
    """Fit a method and judge it; one that cannot be applied here says why."""
    from esvdfair.core.metrics import group_mse, ks_distance, ks_distance_ci

    score = Score(method.name, method.needs, method.same_model)
    start = perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ESVDFairWarning)  # a target that is not met shows in the numbers
            prediction = np.asarray(method.run(case), dtype=np.float64)
    except ValueError as error:
        return replace(score, error=cli.in_options(error))
    seconds, judge = perf_counter() - start, case.judge
    truth = np.asarray(case.adapter.predict(judge.X) if judge.y is None else judge.y)
    mse = float(np.average((prediction - truth) ** 2, weights=judge.weight))
    variance = float(np.average((truth - np.average(truth, weights=judge.weight)) ** 2, weights=judge.weight))
    return replace(
        score,
        mse=mse,
        r2=1 - mse / variance if variance > 0 else 0.0,
        ks=ks_distance(prediction, **judge.compared),
        ks_interval=ks_distance_ci(prediction, random_state=case.options["random_state"], **judge.compared),
        group_mse=group_mse(truth, prediction, **judge.beside),
        seconds=seconds,
    )


def _learned(rows: "TableRows") -> dict[str, Any]:
    """What baselines are given beside scores: weights that give every group the same mix of the controls."""
    if rows.control is None:
        return rows.beside
    from esvdfair.core.checks import check_groups, check_strata
    from esvdfair.core.ks import adjusted_weights

    (labels, codes), (_, strata) = check_groups(rows.groups, len(rows)), check_strata(rows.control, len(rows))
    weight = None if rows.weight is None else np.asarray(rows.weight, dtype=np.float64)
    return rows.beside | {"sample_weight": adjusted_weights(codes, len(labels), strata, weight)}


def _repaired(method: str, case: Case) -> Array:
    """What `esvdfair repair` does."""
    from esvdfair.estimator import ESVDFair

    fair = ESVDFair(case.model, method=method, **case.options)
    return fair.fit(case.data, validation=case.validation).predict(case.judge.X)


def _from_groups(case: Case, baseline: Any) -> Array:
    """Fit and predict with scores and groups."""
    baseline.fit(case.adapter.predict(case.fit.X), case.fit.y, **_learned(case.fit))
    scores = case.adapter.predict(case.judge.X)
    return np.asarray(baseline.predict(scores, sensitive_features=case.judge.groups))


def _from_features(case: Case, baseline: Any) -> Array:
    """Fit and predict with what the last layer sees: numbers of like size, whatever the inputs are."""
    name = case.adapter.layers(case.fit.X.iloc[:1])[-1].name

    def seen(x: Any) -> tuple[Array, Array]:
        parts = [case.adapter.capture(x.iloc[i : i + 8192], [name]) for i in range(0, len(x), 8192)]
        return np.concatenate([np.asarray(p[0][name]) for p in parts]), np.concatenate([p[1] for p in parts])

    (train, scores), (test, unseen) = seen(case.fit.X), seen(case.judge.X)
    baseline.fit(scores, case.fit.y, X=train, **_learned(case.fit))
    return np.asarray(baseline.predict(unseen, X=test))
