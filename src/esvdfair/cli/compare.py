"""`esvdfair compare`: our methods and the baselines on the user's data."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from esvdfair.cli import _options as opt
from esvdfair.cli._options import EVALUATED_ON, Given, some_rows, split_rows
from esvdfair.cli._terminal import answer, at_work, in_options, text_table, wrapped
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.text import interval, number, share, too_small

if TYPE_CHECKING:
    from esvdfair.audit import Audit
    from esvdfair.models import ModelAdapter
    from esvdfair.tables import TableBatches, TableRows

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A model; what `esvdfair repair` would be given; rows in memory that baselines learn from and that judge all."""

    model: str
    adapter: "ModelAdapter"
    data: "TableBatches"
    validation: "TableBatches | None"
    options: dict[str, Any]
    learn: "TableRows"
    judge: "TableRows"

    def audit(self, prediction: Any) -> "Audit":
        """Measure predictions for the rows that judge."""
        from esvdfair.audit import audit_predictions

        rows, options = self.judge, self.options
        truth = self.adapter.predict(rows.X) if rows.y is None else rows.y
        return audit_predictions(
            prediction, rows.groups, truth, sample_weight=rows.weight, control_features=rows.control,
            min_group_rows=options["min_group_rows"], seed=options["random_state"],
        )  # fmt: skip


class Method(NamedTuple):
    """One line of the table: a method, and how its predictions for the rows that judge are made.

    ``needs`` is what it takes at prediction besides the model's inputs; ``same_model`` whether the result is the model
    itself with other weights.
    """

    name: str
    needs: str
    same_model: bool
    run: Callable[[Case], Any]


@click.command()
@opt.given_options(opt.MODEL, opt.DATA, opt.VALIDATION, opt.TEST, opt.SEED)
@opt.repair_options(target_ks=0.1)
@opt.json_option
def compare(given: Given, options: dict[str, Any], as_json: bool) -> None:
    """Run our methods and the baselines on the same rows.

    Our methods do what `esvdfair repair` does with the same options: they are fitted on DATA and choose on the rows of
    --validation, or on a quarter of DATA. The baselines are fitted on the same training rows. All are evaluated on the
    rows of --test, or else on the validation rows.

    The barycenter (Chzhen et al. 2020) and the private histogram (Xian et al. 2024) need a person's group at
    prediction, or predict it. The unaware optimum needs no group, but replaces the model by another.

    \b
    Example:
      esvdfair compare model.onnx people.csv --sensitive sex --target income \\
        --target-ks 0.1
    """
    given = given.of_large_groups()
    chosen, options = methods(), given.fitting | options
    with at_work(len(chosen) + 1) as work:
        work.step("reading")
        model = given.load()
        rows, validation, test = given.tables(model, progress=work.read)
        learn, judge = split_rows(rows, validation, given.seed)
        judge = judge if test is None else some_rows(test, given.seed)
        case = Case(str(given.model), model, rows, validation, options, learn, judge)
        before = case.audit(model.predict(judge.X))
        scores = []
        for method in chosen:
            work.step(method.name)
            scores.append(run_method(case, method))
    floor, target_ks = before.compared.ks_floor, options["target_ks"]
    which = EVALUATED_ON["test" if given.test else "validation" if given.validation else "heldout"]
    also = "" if given.test else ", which were also used to choose the points of our methods"
    start = f"Fitted on {len(learn):,} rows, evaluated on {len(judge):,} {which}{also}. Target KS ≤ {target_ks:g}, "
    answer(
        {
            "model": given.model, "data": given.data, "validation": given.validation, "test": given.test,
            "target_ks": target_ks, "ks_floor": floor, "rows_fit": len(learn), "rows_test": len(judge),
            "scores": scores,
        },
        wrapped(f"{start}noise level {share(floor)}."), _table(scores),
        wrapped(too_small(before.groups_set_aside)) if before.groups_set_aside else "",
        *(wrapped(f"{score['method']} is not possible here: {score['error']}") for score in scores if score["error"]),
        as_json=as_json,
    )  # fmt: skip


def _table(scores: list[dict[str, Any]]) -> str:
    groups = next(list(score["group_mse"]) for score in scores if score["group_mse"])
    lines = []
    for s in scores:
        figures = [share(s["ks"]), interval(s["ks_interval"], share), number(s["mse"]), share(s["r2"])]
        errors = [number((s["group_mse"] or {}).get(name)) for name in groups]
        needs, same = "–" if s["needs"] == "nothing" else "group", "yes" if s["same_model"] else "no"
        lines.append([s["method"], *figures, *errors, needs, same, "–" if s["error"] else f"{s['seconds']:.1f} s"])
    errors = [f"MSE of {name}" for name in groups]
    return text_table(["", "KS", "95% interval", "MSE", "R²", *errors, "needs", "same model", "time"], lines)


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


def run_method(case: Case, method: Method) -> dict[str, Any]:
    """Fit a method and judge it; one that cannot be applied here says why."""
    figures = dict.fromkeys(("mse", "r2", "ks", "ks_interval", "group_mse", "seconds", "error"))
    score = {"method": method.name, "needs": method.needs, "same_model": method.same_model, **figures}
    start = perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ESVDFairWarning)  # a target that is not met shows in the numbers
            prediction = method.run(case)
    except ValueError as error:
        return score | {"error": in_options(error)}
    seconds, found = perf_counter() - start, case.audit(prediction)
    errors = {g.group: g.mse for g in found.groups if g.group not in found.groups_set_aside}
    score |= {"mse": found.mse, "r2": found.r2, "ks": found.compared.ks, "ks_interval": found.compared.ks_interval}
    return score | {"group_mse": errors, "seconds": seconds}


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
    baseline.fit(case.adapter.predict(case.learn.X), case.learn.y, **_learned(case.learn))
    scores = case.adapter.predict(case.judge.X)
    return np.asarray(baseline.predict(scores, sensitive_features=case.judge.groups))


def _from_features(case: Case, baseline: Any) -> Array:
    """Fit and predict with what the last layer sees: numbers of like size, whatever the inputs are."""
    name = case.adapter.layers(case.learn.X.iloc[:1])[-1].name

    def seen(x: Any) -> tuple[Array, Array]:
        parts = [case.adapter.capture(x.iloc[i : i + 8192], [name]) for i in range(0, len(x), 8192)]
        return np.concatenate([np.asarray(p[0][name]) for p in parts]), np.concatenate([p[1] for p in parts])

    (train, scores), (test, unseen) = seen(case.learn.X), seen(case.judge.X)
    baseline.fit(scores, case.learn.y, X=train, **_learned(case.learn))
    return np.asarray(baseline.predict(unseen, X=test))
