"""What must not change a repair: order and number of rows, units, names of groups, a small group; measured.

Each is how far the predictions move, in standard deviations of the clean ones. All rows fit and judge
(``validation_fraction=0``), or a part of them is held out by row number, which an order or a copy changes.
"""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, ks_distance

METHODS = ("parity", "transport", "exact", "paper")
HELD = 1e-6
"""A property holds when predictions move by no more than this many standard deviations."""
UNITS = np.array([1e-6, 1e-3, 1e3, 1e6])
"""Of the four inputs, and of hidden units in turn."""

Rows = tuple[Any, Any, Any]


def _network(x: Any, y: Any, max_iter: int) -> MLPRegressor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model that could be better is one too
        network = MLPRegressor(hidden_layer_sizes=(8,), solver="lbfgs", max_iter=max_iter, tol=1e-2, random_state=0)
        return network.fit(x, y)


def _fitted(method: str, model: Any, rows: Rows, fraction: float, **options: Any) -> ESVDFair:
    options |= {"refit": "ols"} if method == "paper" else {}
    fair = ESVDFair(model, method=method, validation_fraction=fraction, effort=Effort.quick(), **options)
    return fair.fit(rows[0], rows[1], sensitive_features=rows[2])


def _scaled(model: MLPRegressor, factors: Any, layer: int | None) -> MLPRegressor:
    """The same model in other units: of its output, or of the inputs of a layer, which ReLU units may be."""
    other = deepcopy(model)
    if layer != 0:
        before = -1 if layer is None else layer - 1
        other.coefs_[before], other.intercepts_[before] = (
            part[before] * factors for part in (model.coefs_, model.intercepts_)
        )
    if layer is not None:
        other.coefs_[layer] = model.coefs_[layer] / factors[:, None]
    return other


def measure(fraction: float) -> dict[str, dict[str, float]]:
    """How far predictions move, by property and method."""
    rng = np.random.default_rng(11)
    groups = rng.integers(2, size=400)
    x = rng.normal(size=(400, 4)) + 0.6 * groups[:, None]
    y = x @ [0.5, -0.2, 0.3, 0.8] + 0.3 * rng.normal(size=400)
    rows, model = (x, y, groups), _network(x, y, 60)
    order = np.random.default_rng(5).permutation(400)
    newcomers = np.r_[x, x[:3]], np.r_[y, y[:3] - 0.5], np.r_[groups, [2, 2, 2]]  # set aside
    changes: dict[str, tuple[Any, Rows, float]] = {
        "another order of rows": (model, (x[order], y[order], groups[order]), 1.0),
        "every row twice": (model, tuple(np.repeat(column, 2, axis=0) for column in rows), 1.0),  # type: ignore[dict-item]
        "other names of groups": (model, (x, y, np.where(groups == 1, "a", "z")), 1.0),
        "predictions and labels times 1000": (_scaled(model, 1000.0, None), (x, y * 1000.0, groups), 1000.0),
        "inputs times 1e-6 to 1e6": (_scaled(model, UNITS, 0), (x * UNITS, y, groups), 1.0),
        "hidden units times 1e-6 to 1e6": (_scaled(model, np.resize(UNITS, 8), 1), rows, 1.0),
        "a third group of 3 rows": (model, newcomers, 1.0),
    }
    found: dict[str, dict[str, float]] = {name: {} for name in changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in METHODS:
            known = _fitted(method, model, rows, fraction).predict(x)
            for name, (changed, others, unit) in changes.items():
                same = x * UNITS if name.startswith("inputs") else x
                got = _fitted(method, changed, others, fraction).predict(same)
                found[name][method] = float(np.abs(got / unit - known).max() / known.std())
    return found


def worse_in_both(problems: int) -> dict[str, dict[str, int]]:
    """Of made-up problems, how many repairs err more *and* differ more on the rows that fitted than the model given.

    With a target and without one; told by a warning, or not.
    """
    goals = {"no target": None, "target 0.1": 0.1}
    found = {f"{told}, {goal}": dict.fromkeys(METHODS, 0) for told in ("with a warning", "without") for goal in goals}
    for seed in range(1, problems + 1):
        rng = np.random.default_rng(seed)
        rows, kinds = int(rng.integers(60, 500)), int(rng.integers(2, 4))
        groups = rng.integers(kinds, size=rows)
        x = rng.normal(size=(rows, 4)) * rng.uniform(0.7, 1.4, kinds)[groups][:, None]
        x += rng.uniform(0.0, 1.0) * groups[:, None]
        y = x @ rng.normal(size=4) + np.abs(x[:, 0]) + rng.uniform(0.1, 2.0) * rng.normal(size=rows)
        model = _network(x, y, 40)
        before = model.predict(x)
        for method in METHODS:
            for goal, target in goals.items():
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    fair = _fitted(method, model, (x, y, groups), 0.0, target_ks=target, min_group_rows=2)
                    after = fair.predict(x)
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
        cells = (str(v) if isinstance(v, int) else "holds" if v <= HELD else f"{v:.1g}" for v in by_method.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
