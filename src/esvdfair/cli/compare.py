"""`esvdfair compare`: our methods and the baselines on the user's data."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from esvdfair.cli._inputs import (
    EXPLAINED_ROWS,
    FILE,
    Reading,
    file_bar,
    json_option,
    load_model,
    model_and_data,
    quick_option,
    seed_option,
    some_rows,
    table_options,
    target_ks_option,
)
from esvdfair.cli._output import notes, print_json, progress, said, table
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.text import distinct_names, interval, number, share

if TYPE_CHECKING:
    from esvdfair.models import ModelAdapter
    from esvdfair.tables import TableRows

TEST_FRACTION = 0.3
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A model, the rows that methods learn from and those that judge them, and further options of ESVDFair."""

    model: str
    adapter: "ModelAdapter"
    fit: "TableRows"
    test: "TableRows"
    target_ks: float
    seed: int
    options: dict[str, Any]


class Method(NamedTuple):
    """One line of the table: a method, and how its predictions for the test rows are made.

    ``needs`` is what it takes at prediction besides the model's inputs; ``same_model`` whether the result is the model
    itself with other weights.
    """

    name: str
    needs: str
    same_model: bool
    run: Callable[[Case], Array]


@dataclass(frozen=True)
class Score:
    """What one method reaches on rows that it has not seen; one that cannot be applied has ``error`` and no numbers."""

    method: str
    needs: str
    same_model: bool
    mse: float | None = None
    ks: float | None = None
    ks_interval: tuple[float, float] | None = None
    group_mse: dict[Any, float] | None = None
    seconds: float | None = None
    error: str | None = None


@click.command()
@model_and_data
@table_options()
@click.option("--validation", metavar="FILE", type=FILE, help="Rows that judge. Default: 30 % of DATA.")
@target_ks_option(default=0.1)
@quick_option
@seed_option
@json_option
def compare(
    model: Path,
    data: Path,
    output: str | None,
    reading: Reading,
    validation: Path | None,
    target_ks: float,
    quick: bool,
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
    from esvdfair.core.metrics import ks_floor
    from esvdfair.sample import Effort

    options = {"output": output, "effort": Effort.quick() if quick else None}
    chosen = methods()
    with notes(), progress(len(chosen)) as bar, file_bar() as show:
        adapter = load_model(model, output)
        whole, judging = reading.tables(data, validation, adapter, progress=show)
        rows = some_rows(whole, EXPLAINED_ROWS, seed=seed)
        judges = None if judging is None else some_rows(judging, EXPLAINED_ROWS, seed=seed)
        fit, test = split_rows(rows, seed) if judges is None else (rows, judges)
        case = Case(str(model), adapter, fit, test, target_ks, seed, options)
        scores = []
        for method in chosen:
            bar.set_description(method.name)
            scores.append(run_method(case, method))
            bar.update()
    floor = ks_floor(random_state=seed, **_beside(test))
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
            click.echo(f"\n{score.method}: not possible here. {score.error}")


def _table(scores: list[Score]) -> str:
    groups = next(list(score.group_mse) for score in scores if score.group_mse)
    of_groups = [f"MSE of {name}" for name in distinct_names(groups)]
    header = ["", "KS", "95 % interval", "MSE", *of_groups, "needs", "same model", "seconds"]
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


# --- the comparison ------------------------------------------------------------------------------------------------


def split_rows(rows: "TableRows", seed: int) -> tuple["TableRows", "TableRows"]:
    """70 % to learn from and 30 % to judge, by a hash of the row's place.

    Raises
    ------
    ValueError
        A group has fewer than two rows on either side.
    """
    from esvdfair.batches import row_key

    test = row_key(np.arange(len(rows)), seed + 1) < TEST_FRACTION  # not the key by which ESVDFair holds rows out
    parts = rows.take(~test), rows.take(test)
    sizes = [part.groups.value_counts() for part in parts]
    if any(len(found) < len(rows.scan.labels) or found.min() < 2 for found in sizes):
        raise ValueError(
            "a group has too few rows to split them in two. Give rows to judge on with --validation FILE, or join "
            "groups."
        )
    return parts


def methods() -> list[Method]:
    """Everything that is compared, in the order of the table."""
    from esvdfair.baselines import PrivateHistogram, UnawareOptimum, WassersteinBarycenter, WithPredictedGroups
    from esvdfair.estimator import METHODS, ESVDFair

    def repaired(method: str) -> Callable[[Case], Array]:
        def run(case: Case) -> Array:
            fair = ESVDFair(
                case.model, method=method, target_ks=case.target_ks, random_state=case.seed, **case.options
            )  # fmt: skip
            fair.fit(case.fit.X, case.fit.y, **_beside(case.fit))
            return fair.predict(case.test.X)

        return run

    def aware(make: Callable[[Case], Any]) -> Callable[[Case], Array]:
        def run(case: Case) -> Array:
            fitted = make(case).fit(case.adapter.predict(case.fit.X), case.fit.y, **_beside(case.fit))
            return np.asarray(fitted.predict(case.adapter.predict(case.test.X), sensitive_features=case.test.groups))

        return run

    def unaware(make: Callable[[Case], Any]) -> Callable[[Case], Array]:
        return lambda case: _from_features(case, WithPredictedGroups(baseline=make(case)))

    lines = [Method("the model as it is", "nothing", True, lambda case: case.adapter.predict(case.test.X))]
    lines += [Method(name, "nothing", True, repaired(name)) for name in reversed(METHODS)]
    for name, make in (
        ("barycenter", lambda case: WassersteinBarycenter(random_state=case.seed)),
        ("private histogram", lambda case: PrivateHistogram(alpha=case.target_ks, random_state=case.seed)),
    ):
        lines.append(Method(name, "the group", False, aware(make)))
        lines.append(Method(f"{name}, group predicted", "nothing", False, unaware(make)))

    def optimum(case: Case) -> Array:
        return _from_features(case, UnawareOptimum(alpha=case.target_ks))

    return [*lines, Method("unaware optimum", "nothing", False, optimum)]


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
        return replace(score, error=said(error))
    seconds, beside = perf_counter() - start, _beside(case.test)
    truth = case.adapter.predict(case.test.X) if case.test.y is None else case.test.y
    return replace(
        score,
        mse=float(np.average((prediction - np.asarray(truth)) ** 2, weights=case.test.weight)),
        ks=ks_distance(prediction, **beside),
        ks_interval=ks_distance_ci(prediction, random_state=case.seed, **beside),
        group_mse=group_mse(truth, prediction, **beside),
        seconds=seconds,
    )


def _beside(rows: "TableRows") -> dict[str, Any]:
    """What goes with rows."""
    return {"sensitive_features": rows.groups, "sample_weight": rows.weight}


def _from_features(case: Case, baseline: Any) -> Array:
    """Fit and predict with what the last layer sees: numbers of like size, whatever the inputs are."""
    (train, scores), (test, unseen) = (_last_inputs(case.adapter, rows.X) for rows in (case.fit, case.test))
    baseline.fit(scores, case.fit.y, X=train, **_beside(case.fit))
    return np.asarray(baseline.predict(unseen, X=test))


def _last_inputs(adapter: "ModelAdapter", x: Any) -> tuple[Array, Array]:
    """Inputs of the last linear layer, and the predictions."""
    name = adapter.layers(x.iloc[:1])[-1].name
    parts = [adapter.capture(x.iloc[i : i + 8192], [name]) for i in range(0, len(x), 8192)]
    return np.concatenate([np.asarray(p[0][name]) for p in parts]), np.concatenate([p[1] for p in parts])
