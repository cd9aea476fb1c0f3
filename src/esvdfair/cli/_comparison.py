"""Our methods and the baselines on the same rows, one named row each."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esvdfair.baselines import PrivateHistogram, UnawareOptimum, WassersteinBarycenter, WithPredictedGroups
from esvdfair.batches import row_key
from esvdfair.core.metrics import group_mse, ks_distance, ks_distance_ci
from esvdfair.estimator import METHODS, ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models import ModelAdapter
from esvdfair.tables import Rows

TEST_FRACTION = 0.3
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """What one method reaches on rows that it has not seen.

    ``needs`` is what it takes at prediction besides the model's inputs; ``same_model`` whether the result is the model
    itself with other weights. A method that cannot be applied has ``error`` and no numbers.
    """

    method: str
    needs: str
    same_model: bool
    mse: float | None = None
    ks: float | None = None
    ks_interval: tuple[float, float] | None = None
    group_mse: dict[Any, float] | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Case:
    """A model, the rows that methods learn from and those that judge them."""

    model: str
    output: str | None
    adapter: ModelAdapter
    fit: Rows
    test: Rows
    target_ks: float
    seed: int


class Method(NamedTuple):
    """One line of the table, and how its predictions for the test rows are made; other fields as in :class:`Score`."""

    name: str
    needs: str
    same_model: bool
    run: Callable[[Case], Array]


def split_rows(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """70 % to learn from and 30 % to judge, by a hash of the row's place.

    Raises
    ------
    ValueError
        A group has fewer than two rows on either side.
    """
    test = row_key(np.arange(len(rows)), seed + 1) < TEST_FRACTION  # not the key by which ESVDFair holds rows out
    try:
        parts = rows.take(~test), rows.take(test)
    except ValueError as error:
        raise ValueError(f"the rows cannot be split in two: {error} Give rows to judge on: --validation FILE") from None
    if any(set(part.labels) != set(rows.labels) or part.groups.value_counts().min() < 2 for part in parts):
        raise ValueError(
            "a group has too few rows to split them in two. Give rows to judge on with --validation FILE, or join "
            "groups."
        )
    return parts


def methods() -> list[Method]:
    """Everything that is compared, in the order of the table."""
    ours = [Method(name, "nothing", True, _repaired(name)) for name in reversed(METHODS)]
    theirs: list[Method] = []
    for name, make in (("barycenter", _barycenter), ("private histogram", _histogram)):
        theirs.append(Method(name, "the group", False, _aware(make)))
        theirs.append(Method(f"{name}, group predicted", "nothing", False, _unaware(make)))
    return [
        Method("the model as it is", "nothing", True, lambda case: case.adapter.predict(case.test.X)),
        *ours,
        *theirs,
        Method("unaware optimum", "nothing", False, _optimum),
    ]


def run_method(case: Case, method: Method) -> Score:
    """Fit a method and judge it; one that cannot be applied here says why."""
    score = Score(method.name, method.needs, method.same_model)
    start = perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ESVDFairWarning)  # a target that is not met shows in the numbers
            prediction = np.asarray(method.run(case), dtype=np.float64)
    except ValueError as error:
        return replace(score, error=str(error))
    return _judge(case, replace(score, seconds=perf_counter() - start), prediction)


def _judge(case: Case, score: Score, prediction: Array) -> Score:
    groups = case.test.groups
    truth = case.adapter.predict(case.test.X) if case.test.y is None else case.test.y
    return replace(
        score,
        mse=float(np.mean((prediction - np.asarray(truth)) ** 2)),
        ks=ks_distance(prediction, sensitive_features=groups),
        ks_interval=ks_distance_ci(prediction, sensitive_features=groups, random_state=case.seed),
        group_mse=group_mse(truth, prediction, sensitive_features=groups),
    )


def _repaired(method: str) -> Callable[[Case], Array]:
    def run(case: Case) -> Array:
        fair = ESVDFair(case.model, method=method, target_ks=case.target_ks, output=case.output, random_state=case.seed)
        fair.fit(case.fit.X, case.fit.y, sensitive_features=case.fit.groups)
        return fair.predict(case.test.X)

    return run


def _barycenter(case: Case) -> Any:
    return WassersteinBarycenter(random_state=case.seed)


def _histogram(case: Case) -> Any:
    return PrivateHistogram(alpha=case.target_ks, random_state=case.seed)


def _aware(make: Callable[[Case], Any]) -> Callable[[Case], Array]:
    def run(case: Case) -> Array:
        fitted = make(case).fit(case.adapter.predict(case.fit.X), case.fit.y, sensitive_features=case.fit.groups)
        return np.asarray(fitted.predict(case.adapter.predict(case.test.X), sensitive_features=case.test.groups))

    return run


def _unaware(make: Callable[[Case], Any]) -> Callable[[Case], Array]:
    return lambda case: _from_features(case, WithPredictedGroups(baseline=make(case)))


def _optimum(case: Case) -> Array:
    return _from_features(case, UnawareOptimum(alpha=case.target_ks))


def _from_features(case: Case, baseline: Any) -> Array:
    """Fit and predict with what the last layer sees: numbers of like size, whatever the inputs are."""
    (train, scores), (test, unseen) = (_last_inputs(case.adapter, rows.X) for rows in (case.fit, case.test))
    baseline.fit(scores, case.fit.y, sensitive_features=case.fit.groups, X=train)
    return np.asarray(baseline.predict(unseen, X=test))


def _last_inputs(adapter: ModelAdapter, x: Any) -> tuple[Array, Array]:
    """Inputs of the last linear layer, and the predictions."""
    name = adapter.layers(x.iloc[:1])[-1].name
    parts = [adapter.capture(x.iloc[i : i + 8192], [name]) for i in range(0, len(x), 8192)]
    return np.concatenate([np.asarray(p[0][name]) for p in parts]), np.concatenate([p[1] for p in parts])
