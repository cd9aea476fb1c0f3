"""What must not change a repair: the order of rows, their number, units, names of groups. Measured, not promised.

Each is how far the predictions move, in standard deviations of the clean ones. All rows fit and judge
(``validation_fraction=0``), or a part of them is held out by row number, which an order or a copy changes.
"""

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, ESVDFairWarning

METHODS = ("parity", "transport", "exact", "paper")
HELD = 1e-8
"""A property holds when predictions move by no more than this many standard deviations."""

Rows = tuple[Any, Any, Any]


def _rows() -> Rows:
    rng = np.random.default_rng(11)
    groups = rng.integers(2, size=400)
    x = rng.normal(size=(400, 4)) + 0.6 * groups[:, None]
    return x, x @ [0.5, -0.2, 0.3, 0.8] + 0.3 * rng.normal(size=400), groups


def _predictions(method: str, model: Any, rows: Rows, x: Any, fraction: float, target: float | None) -> Any:
    options = {"refit": "ols"} if method == "paper" else {}
    fair = ESVDFair(
        model, method=method, target_ks=target, validation_fraction=fraction, effort=Effort.quick(), random_state=0,
        **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        return fair.fit(rows[0], rows[1], sensitive_features=rows[2]).predict(x)


def _scaled(model: MLPRegressor, factor: float) -> MLPRegressor:
    """The same model in another unit of its output."""
    other = deepcopy(model)
    other.coefs_[-1], other.intercepts_[-1] = model.coefs_[-1] * factor, model.intercepts_[-1] * factor
    return other


def measure(fraction: float, target: float | None = None) -> dict[str, dict[str, float]]:
    """How far predictions move, by property and method."""
    x, y, groups = _rows()
    model = MLPRegressor(hidden_layer_sizes=(8,), solver="lbfgs", max_iter=60, tol=1e-2, random_state=0).fit(x, y)
    order = np.random.default_rng(5).permutation(len(y))
    changes: dict[str, tuple[Any, Rows, float]] = {
        "another order of rows": (model, (x[order], y[order], groups[order]), 1.0),
        "every row twice": (model, (np.repeat(x, 2, 0), np.repeat(y, 2), np.repeat(groups, 2)), 1.0),
        "other names of groups": (model, (x, y, np.where(groups == 1, "a", "z")), 1.0),
        "predictions and labels times 1000": (_scaled(model, 1000.0), (x, y * 1000.0, groups), 1000.0),
    }
    found: dict[str, dict[str, float]] = {name: {} for name in changes}
    for method in METHODS:
        goal = None if method in ("paper", "exact") else target
        known = _predictions(method, model, (x, y, groups), x, fraction, goal)
        for name, (changed, rows, unit) in changes.items():
            got = _predictions(method, changed, rows, x, fraction, goal)
            found[name][method] = float(np.abs(got / unit - known).max() / known.std())
    return found


def table(measured: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for name, by_method in measured.items():
        cells = ("holds" if moved <= HELD else f"{moved:.1g}" for moved in by_method.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
