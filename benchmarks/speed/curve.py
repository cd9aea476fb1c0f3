"""5. The trade-off curve of 20 points over a single point."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from esvdfair import ESVDFair, estimator, fit_curve
from esvdfair.candidates import STRENGTHS
from speed.measure import Goal, Section, interleaved
from speed.models import make_rows, network

GOAL = 5.0
ONE_RIDGE = (1e-4,)
TWENTY, MIDDLE = STRENGTHS[-20:], STRENGTHS[-10:-9]


def run(rows: int, width: int, repeats: int) -> Section:
    """Curves and single points of transport and parity, from the model and the rows in memory."""
    model, (x, y, a) = network(width), make_rows(rows)
    data = {"sensitive_features": a}

    def transport(strengths: tuple[float, ...]) -> Any:
        with _replaced("repair_by_transport", ridges=ONE_RIDGE, strengths=strengths):
            return fit_curve(model, x, y, targets="labels", **data)

    def point() -> Any:
        fixed = {"mean_reduction": np.inf, "covariance_reduction": np.inf}
        return ESVDFair(model, method="parity", targets="labels", **fixed).fit(x, y, **data).curve_

    runs: dict[str, Callable[[], Any]] = {
        "transport curve": lambda: transport(TWENTY),
        "transport point": lambda: transport(MIDDLE),
        "parity curve": lambda: fit_curve(model, x, y, method="parity", targets="labels", **data),
        "parity point": point,
    }
    points = {name: len(function().points) for name, function in runs.items()}
    times = interleaved(runs, repeats)
    table: list[tuple[object, ...]] = [("method", "points", "curve, s", "one, s", "curve / one")]
    goals = []
    for method in ("transport", "parity"):
        curve, one = times[f"{method} curve"], times[f"{method} point"]
        table.append((method, points[f"{method} curve"], f"{curve:.2f}", f"{one:.2f}", f"{curve / one:.2f}"))
        goals.append(Goal(f"{method}: the curve over one point", curve / one, GOAL))
    return Section(
        "The trade-off curve",
        f"{rows:,} rows, a network of two hidden layers of width {width}; labels as the only target. Both times go "
        "from the model and the rows to judged points, so both hold one forward pass. *transport*: 20 strengths "
        "against a single one, one ridge. *parity*: `fit_curve` (8 mean penalties × 3 variance reductions × 3 ridges, "
        "of which the best 20 or more are kept and given an interval) against `fit` with both reductions infinite (3 "
        f"ridges). Fewest seconds of {repeats} rounds.",
        [table],
        goals,
        ["`ESVDFair(target_ks=…)` solves the curve in any case and takes a point of it: there the ratio is 1."],
    )


@contextmanager
def _replaced(name: str, **options: object) -> Iterator[None]:
    """ESVDFair with other settings of a method than it offers: fewer strengths, one ridge."""
    original = getattr(estimator, name)
    setattr(estimator, name, partial(original, **options))
    try:
        yield
    finally:
        setattr(estimator, name, original)
