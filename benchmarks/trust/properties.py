"""What must not change a repair: order and number of rows, units, names of groups, a small group; measured.

Each is how far the predictions move, in standard deviations of the clean ones. All rows fit and judge
(``validation_fraction=0``), or a part of them is held out by row number, which an order or a copy changes.
"""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance

METHODS = ("parity", "transport", "exact", "paper")
HELD = 1e-6
"""A property holds when predictions move by no more than this many standard deviations."""
UNITS = np.array([1e-6, 1e-3, 1e3, 1e6])
"""Of the four inputs, and of hidden units in turn."""

Rows = tuple[Any, Any, Any]


def _rows() -> Rows:
    rng = np.random.default_rng(11)
    groups = rng.integers(2, size=400)
    x = rng.normal(size=(400, 4)) + 0.6 * groups[:, None]
    return x, x @ [0.5, -0.2, 0.3, 0.8] + 0.3 * rng.normal(size=400), groups


def _fitted(method: str, model: Any, rows: Rows, fraction: float, target: float | None, **options: Any) -> ESVDFair:
    options |= {"refit": "ols"} if method == "paper" else {}
    fair = ESVDFair(
        model, method=method, target_ks=target, validation_fraction=fraction, effort=Effort.quick(), random_state=0,
        **options,
    )  # fmt: skip
    return fair.fit(rows[0], rows[1], sensitive_features=rows[2])


def _predictions(method: str, model: Any, rows: Rows, x: Any, fraction: float, target: float | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        return _fitted(method, model, rows, fraction, target).predict(x)


def _scaled(model: MLPRegressor, factor: float) -> MLPRegressor:
    """The same model in another unit of its output."""
    other = deepcopy(model)
    other.coefs_[-1], other.intercepts_[-1] = model.coefs_[-1] * factor, model.intercepts_[-1] * factor
    return other


def _in_units(model: MLPRegressor, layer: int, factors: Any) -> MLPRegressor:
    """The same model with the inputs of a layer in other units; those of a hidden layer are outputs of ReLU units."""
    other = deepcopy(model)
    if layer:
        other.coefs_[layer - 1] = model.coefs_[layer - 1] * factors
        other.intercepts_[layer - 1] = model.intercepts_[layer - 1] * factors
    other.coefs_[layer] = model.coefs_[layer] / factors[:, None]
    return other


def _with_newcomers(rows: Rows) -> Rows:
    """With a third group of 3 rows, which is set aside."""
    x, y, groups = rows
    return np.r_[x, x[:3]], np.r_[y, y[:3] - 0.5], np.r_[groups, [2, 2, 2]]


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
        "inputs times 1e-6 to 1e6": (_in_units(model, 0, UNITS), (x * UNITS, y, groups), 1.0),
        "hidden units times 1e-6 to 1e6": (_in_units(model, 1, np.resize(UNITS, 8)), (x, y, groups), 1.0),
        "a third group of 3 rows": (model, _with_newcomers((x, y, groups)), 1.0),
    }
    found: dict[str, dict[str, float]] = {name: {} for name in changes}
    for method in METHODS:
        goal = None if method in ("paper", "exact") else target
        known = _predictions(method, model, (x, y, groups), x, fraction, goal)
        for name, (changed, rows, unit) in changes.items():
            same = x * UNITS if name.startswith("inputs") else x
            got = _predictions(method, changed, rows, same, fraction, goal)
            found[name][method] = float(np.abs(got / unit - known).max() / known.std())
    return found


def worse_in_both(problems: int) -> dict[str, dict[str, int]]:
    """Of made-up problems, how many repairs err more *and* differ more on the rows that fitted than the model given.

    With a target and without one; told by a warning, or not.
    """
    names = [f"{told}, {goal}" for told in ("with a warning", "without") for goal in ("no target", "target 0.1")]
    found = {name: dict.fromkeys(METHODS, 0) for name in names}
    for seed in range(1, problems + 1):
        rng = np.random.default_rng(seed)
        rows, kinds = int(rng.integers(60, 500)), int(rng.integers(2, 4))
        groups = rng.integers(kinds, size=rows)
        x = rng.normal(size=(rows, 4)) * rng.uniform(0.7, 1.4, kinds)[groups][:, None]
        x += rng.uniform(0.0, 1.0) * groups[:, None]
        y = x @ rng.normal(size=4) + np.abs(x[:, 0]) + rng.uniform(0.1, 2.0) * rng.normal(size=rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a model that could be better is one too
            model = MLPRegressor(hidden_layer_sizes=(8,), solver="lbfgs", max_iter=40, random_state=0).fit(x, y)
        before = model.predict(x)
        for method in METHODS:
            for goal, target in (("no target", None), ("target 0.1", 0.1)):
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    after = _fitted(method, model, (x, y, groups), 0.0, target, min_group_rows=2).predict(x)
                errors = [float(np.mean((p - y) ** 2)) for p in (before, after)]
                distances = [ks_distance(p, sensitive_features=groups) for p in (before, after)]
                if errors[1] > errors[0] and distances[1] > distances[0]:
                    said = any("worse than the original" in str(warning.message) for warning in told)
                    found[f"{'with a warning' if said else 'without'}, {goal}"][method] += 1
    return found


def table(measured: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines of a Markdown table: counts as they are, distances as "holds" when they are none."""
    lines = ["| | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for name, by_method in measured.items():
        cells = (_cell(value) for value in by_method.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return "holds" if value <= HELD else f"{value:.1g}"
