"""Hostile arrays, in every place of the metrics, the moments, the baselines and the estimator.

Metrics and moments are compared with exact fractions; the others with themselves on the clean array that the hostile
one means, and what the estimator says of its result with the same figures computed from its predictions by hand.
"""

import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair, GroupMoments, group_mse, mean_gap, variance_gap
from esvdfair.baselines import GroupPredictor, PrivateHistogram, UnawareOptimum, WassersteinBarycenter
from esvdfair.core import metrics
from trust.hostile import (
    COLUMNS,
    EXTREMES,
    GROUPS,
    SCALES,
    SPARSE,
    TABLES,
    WEIGHTS,
    Array,
    Hostile,
)
from trust.verdict import Trial

ROWS = 48
LARGEST = Fraction(np.finfo(float).max)

_rng = np.random.default_rng(7)
GROUP = np.array(["a", "b"] * (ROWS // 2))
TABLE = _rng.normal(size=(ROWS, 4)) + 0.7 * (GROUP == "b")[:, None]
LABEL = TABLE @ [0.5, -0.2, 0.3, 0.8] + 0.3 * _rng.normal(size=ROWS)
WEIGHT = _rng.uniform(0.5, 2.0, size=ROWS)


def all_trials() -> Iterator[Trial]:
    """Every trial of this file."""
    yield from metric_trials()
    yield from moment_trials()
    yield from baseline_trials()
    yield from estimator_trials()


def made(form: Hostile, clean: Array) -> Any:
    """The hostile array; a warning while it is made is none of the package's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return form.make(clean.copy())


# --- exact figures ---------------------------------------------------------------------------------------------------


def _exact(values: Array) -> list[Fraction]:
    return [Fraction(v) for v in np.asarray(values, dtype=float).tolist()]


def _members(groups: Array) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for i, group in enumerate(groups.tolist()):
        found.setdefault(group, []).append(i)
    return found


def _mean(values: list[Fraction], weight: list[Fraction]) -> Fraction:
    return sum((v * w for v, w in zip(values, weight, strict=True)), Fraction(0)) / sum(weight)


class Exact:
    """The metrics by their definitions, in fractions."""

    def __init__(self, scores: Array, groups: Array, weight: Array) -> None:
        self.parts = {}
        s, w = _exact(scores), _exact(weight)
        for group, index in _members(groups).items():
            self.parts[group] = [s[i] for i in index], [w[i] for i in index]

    def ks_distance(self) -> float:
        cuts = sorted({v for values, _ in self.parts.values() for v in values})
        below = []
        for values, weight in self.parts.values():
            total = sum(weight)
            below.append([sum(w for v, w in zip(values, weight, strict=True) if v <= cut) / total for cut in cuts])
        return float(max(abs(a - b) for one, other in combinations(below, 2) for a, b in zip(one, other, strict=True)))

    def mean_gap(self) -> Fraction:
        means = [_mean(*part) for part in self.parts.values()]
        return max(means) - min(means)

    def wasserstein_distance(self) -> Fraction:
        def between(one: Any, other: Any) -> Fraction:
            cuts = sorted({*one[0], *other[0]})
            total = Fraction(0)
            for low, high in pairwise(cuts):
                shares = [
                    sum(w for v, w in zip(*part, strict=True) if v <= low) / sum(part[1]) for part in (one, other)
                ]
                total += abs(shares[0] - shares[1]) * (high - low)
            return total

        return max(between(a, b) for a, b in combinations(self.parts.values(), 2))

    def squares(self) -> dict[Any, Fraction]:
        """Weighted mean of the squares of every group."""
        return {group: _mean([v * v for v in values], weight) for group, (values, weight) in self.parts.items()}


def near(found: Any, known: Any, *, scale: float | Fraction = 0, relative: float = 1e-7) -> bool | str:
    """Whether a number agrees with a fraction, to a part of the larger of it and ``scale``."""
    if isinstance(known, float):
        known = Fraction(known)
    if not np.isfinite(found):
        return f"{found} for {float(min(known, LARGEST)):g}"
    size = max(abs(known), Fraction(scale))
    # What lies below the smallest normal numbers loses digits as it is stored.
    close = abs(Fraction(float(found)) - known) <= Fraction(relative) * size + Fraction(np.finfo(float).tiny)
    return close or f"{found} for {float(min(known, LARGEST)):g}"


# --- metrics ---------------------------------------------------------------------------------------------------------

RANKED: dict[str, Callable[..., Any]] = {  # metrics that depend on the order of the scores alone
    "ks_distance_ci": partial(metrics.ks_distance_ci, n_resamples=20),
    "ks_bound": metrics.ks_bound,
    "ks_population": metrics.ks_population,
}


def _metric_values(name: str, scores: Array, groups: Array, weight: Array) -> Callable[[Any], bool | str]:
    exact = Exact(scores, groups, weight)
    largest = Fraction(float(np.abs(scores).max())) if scores.size else Fraction(0)
    if name == "ks_distance":
        return lambda found: near(found, exact.ks_distance())
    if name == "mean_gap":
        return lambda found: near(found, exact.mean_gap(), scale=largest / 10**6)
    if name == "wasserstein_distance":
        return lambda found: near(found, exact.wasserstein_distance(), scale=largest / 10**6)
    if name == "group_mse":  # against zeros, so that the truth is the mean square
        return lambda found: all(
            near(found[g], known) is True for g, known in zip(sorted(found), _in_order(exact.squares()), strict=True)
        )
    ranks = rankdata(scores, method="dense")
    return lambda found: bool(np.allclose(found, RANKED[name](ranks, sensitive_features=groups, sample_weight=weight)))


def _in_order(by_group: dict[Any, Fraction]) -> list[Fraction]:
    return [by_group[group] for group in sorted(by_group)]


def metric_trials() -> Iterator[Trial]:
    """Each metric, with a hostile column of scores, groups or weights."""
    calls: dict[str, Callable[..., Any]] = {
        "ks_distance": metrics.ks_distance,
        "mean_gap": mean_gap,
        "variance_gap": variance_gap,
        "wasserstein_distance": metrics.wasserstein_distance,
        "group_mse": lambda y_pred, **rest: group_mse(np.zeros(ROWS), y_pred, **rest),
        **RANKED,
    }
    places = {"y_pred": [*COLUMNS, *EXTREMES], "sensitive_features": GROUPS, "sample_weight": WEIGHTS}
    for name, call in calls.items():
        for place, forms in places.items():
            for form in forms:
                if (name, form.name) == ("group_mse", "one group"):
                    form = form._replace(meaning=form.make)
                clean = {"y_pred": LABEL, "sensitive_features": GROUP, "sample_weight": WEIGHT}
                yield _metric_trial(name, call, place, form, clean)


def _metric_trial(name: str, call: Callable[..., Any], place: str, form: Hostile, clean: dict[str, Array]) -> Trial:
    def run() -> Any:
        given = clean | {place: made(form, clean[place])}
        scores = given.pop("y_pred")
        return call(scores, **given)

    def right(found: Any) -> bool | str:
        meant = clean | {place: form.meaning(clean[place])}  # type: ignore[misc]
        if name == "variance_gap":
            return _variance_gap(found, *meant.values())
        return _metric_values(name, *meant.values())(found)

    return Trial(f"{name} {place} {form.name}", run, None if form.meaning is None else right, place)


def _variance_gap(found: float, scores: Array, groups: Array, weight: Array) -> bool | str:
    """Whether it is the difference of the groups' variances as the moments define them, on a scale near one."""
    largest = float(np.abs(scores).max()) or 1.0
    exponent = int(np.frexp(largest)[1])
    known = variance_gap(np.ldexp(scores, -exponent), sensitive_features=groups, sample_weight=weight)
    spread = [np.average((v - np.average(v, weights=w)) ** 2, weights=w) for v, w in (
        (np.ldexp(scores, -exponent)[groups == g], weight[groups == g]) for g in np.unique(groups)
    )]  # fmt: skip
    if not abs(known - (max(spread) - min(spread))) <= 0.2 * max(spread) + 1e-12:  # divisors n - 1 and n
        return f"{known} is not the gap of {spread}"
    return near(found, Fraction(known) * Fraction(2) ** (2 * exponent), scale=Fraction(largest) ** 2 / 10**9)


# --- moments ---------------------------------------------------------------------------------------------------------


def moment_trials() -> Iterator[Trial]:
    """GroupMoments: a first batch that is clean, a second that is hostile."""
    table = TABLE[:, :3]
    flattened = Hostile("three axes", lambda x: np.repeat(x[:, None], 2, 1), lambda x: np.repeat(x, 2, 0))
    tables = [f for f in TABLES if f.name not in ("three axes", "a column short", "a column more")]
    places = {
        "x": [*tables, *EXTREMES, *SPARSE[:1]],
        "sensitive_features": [f for f in GROUPS if f.name != "one group"],
        "sample_weight": [
            *(f for f in WEIGHTS if not f.name.startswith(("times", "zero", "denormal", "largest"))), *SCALES[2:6],
        ],
    }  # fmt: skip
    for place, forms in places.items():
        for form in forms:
            clean = {"x": table, "sensitive_features": GROUP, "sample_weight": WEIGHT}
            yield _moment_trial(place, form, clean)
    clean = {"x": table, "sensitive_features": GROUP, "sample_weight": WEIGHT}
    yield _moment_trial("x", flattened, clean, times=2)


def _moment_trial(place: str, form: Hostile, clean: dict[str, Array], times: int = 1) -> Trial:
    def run() -> Any:
        given = clean | {place: made(form, clean[place])}
        return GroupMoments().update(given["x"], given["sensitive_features"], given["sample_weight"])

    def right(found: GroupMoments) -> bool | str:
        meant = clean | {place: form.meaning(clean[place])}  # type: ignore[misc]
        x, groups, weight = meant["x"], *(np.repeat(meant[n], times) for n in ("sensitive_features", "sample_weight"))
        for got, (group, index) in zip(range(len(found.labels)), sorted(_members(groups).items()), strict=True):
            w = _exact(weight[index])
            if near(found.counts[got], sum(w)) is not True:
                return f"count of {group}"
            columns = [_exact(x[index, j]) for j in range(x.shape[1])]
            means = [_mean(column, w) for column in columns]
            for j, (column, mean) in enumerate(zip(columns, means, strict=True)):
                size = max(abs(v) for v in column)
                if near(found.means[got, j], mean, scale=size / 10**3) is not True:
                    return f"mean {found.means[got, j]} of {group}"
                scatter = sum((a * (v - mean) ** 2 for v, a in zip(column, w, strict=True)), Fraction(0))
                wanted = near(found.scatters[got, j, j], scatter, scale=size * size * sum(w) / 10**9)
                if wanted is not True:
                    return f"scatter of {group}: {wanted}"
        return True

    return Trial(f"GroupMoments {place} {form.name}", run, None if form.meaning is None else right, place)


# --- baselines -------------------------------------------------------------------------------------------------------

CLEAN = {"scores": LABEL, "X": TABLE, "sensitive_features": GROUP, "sample_weight": WEIGHT}
BASELINES: dict[str, Callable[[], Any]] = {
    "WassersteinBarycenter": lambda: WassersteinBarycenter(random_state=0),
    "PrivateHistogram": lambda: PrivateHistogram(bins=6, random_state=0),
    "UnawareOptimum": lambda: UnawareOptimum(alpha=0.1),
    "GroupPredictor": GroupPredictor,
}


def _run_baseline(name: str, scores: Any, x: Any, groups: Any, weight: Any) -> Array:
    """What a baseline, fitted on hostile input, gives for the clean rows, in units of the scores' largest."""
    made = BASELINES[name]()
    if name == "GroupPredictor":
        return np.asarray(made.fit(x, groups, sample_weight=weight).predict_proba(TABLE))
    if name == "UnawareOptimum":
        made.fit(scores, sensitive_features=groups, X=x, sample_weight=weight)
        return np.asarray(made.predict(scores, X=TABLE))
    made.fit(scores, sensitive_features=groups, sample_weight=weight)
    return np.asarray(made.predict(scores, sensitive_features=groups))


def baseline_trials() -> Iterator[Trial]:
    """Each baseline, with hostile scores, features, groups or weights."""
    for name in BASELINES:
        places = {
            "scores": [*COLUMNS, *(f for f in EXTREMES if f.name not in ("denormal", "shifted by 1e15"))],
            "X": TABLES,
            "sensitive_features": GROUPS,
            "sample_weight": WEIGHTS,
        }
        if name == "GroupPredictor":
            del places["scores"]
        elif name == "UnawareOptimum":  # slow, and it reads all but X as the others do
            places = {place: TABLES if place == "X" else forms[::4] for place, forms in places.items()}
        else:
            del places["X"]
        for place, forms in places.items():
            for form in forms:
                yield _baseline_trial(name, place, form)


@cache
def _known_baseline(name: str, place: str, meaning: Callable[[Array], Array]) -> tuple[Array, int]:
    """What a baseline gives for the clean array, scores brought near one by a power of two; and its exponent."""
    meant = CLEAN | {place: meaning(CLEAN[place])}
    exponent = int(np.frexp(np.abs(meant["scores"]).max())[1]) if place == "scores" else 0
    meant["scores"] = np.ldexp(meant["scores"], -exponent)
    return _run_baseline(name, *meant.values()), exponent


def _baseline_trial(name: str, place: str, form: Hostile) -> Trial:
    clean = CLEAN

    def run() -> Any:
        return _run_baseline(name, *(clean | {place: made(form, clean[place])}).values())

    def right(found: Array) -> bool | str:
        known, exponent = _known_baseline(name, place, form.meaning)
        rtol = 1e-4 if name in ("GroupPredictor", "UnawareOptimum") else 1e-6  # an iteration stops where it stops
        off = float(np.abs(np.ldexp(found, -exponent) - known).max())
        return off <= rtol * max(float(np.abs(known).max()), 1e-300) or f"off by {off:g}"

    return Trial(f"{name} {place} {form.name}", run, None if form.meaning is None else right, place)


# --- the estimator ---------------------------------------------------------------------------------------------------


@cache
def models() -> dict[str, Any]:
    """A fitted scikit-learn model and a torch module, of the clean rows."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1)).double()
    fitted = MLPRegressor(hidden_layer_sizes=(6,), solver="lbfgs", max_iter=60, tol=1e-2, random_state=0).fit(
        TABLE, LABEL
    )
    return {"sklearn": fitted, "torch": net}


METHODS = ("parity", "transport", "exact", "paper")


def fit(kind: str, method: str, **given: Any) -> ESVDFair:
    """A repair of a model on what was given: X, y, sensitive_features, sample_weight, validation."""
    clean = {"X": TABLE, "y": LABEL, "sensitive_features": GROUP, "sample_weight": WEIGHT}
    effort, target = Effort.quick(), None if method in ("paper", "exact") else 0.2
    options = {"refit": "ols"} if method == "paper" else {}
    fair = ESVDFair(
        models()[kind],
        method=method,
        target_ks=target,
        effort=effort,
        validation_fraction=0.0,
        min_group_rows=2,
        random_state=0,
        **options,
    )
    return fair.fit(**(clean | given))


def estimator_trials() -> Iterator[Trial]:
    """Each method on two kinds of model, with one hostile argument; of the tuple ``validation`` each place."""
    for kind in models():
        forms = {
            "X": [*TABLES, *EXTREMES, *(SPARSE if kind == "sklearn" else SPARSE[:1])],
            "y": [*COLUMNS, *EXTREMES],
            "sensitive_features": GROUPS,
            "sample_weight": WEIGHTS,
        }
        for method in METHODS if kind == "sklearn" else METHODS[:1]:
            for place, values in forms.items():
                for form in values:
                    yield _estimator_trial(kind, method, place, form)
        for place, values in forms.items() if kind == "sklearn" else ():
            for form in values:
                yield _estimator_trial(kind, "parity", place, form, validation=True)


@cache
def _reference(
    kind: str, method: str, place: str, meaning: Callable[[Array], Array], validation: bool
) -> tuple[Array, dict[str, Any]]:
    """Predictions and summary of a fit on the clean array that a hostile one means."""
    clean = {"X": TABLE, "y": LABEL, "sensitive_features": GROUP, "sample_weight": WEIGHT}
    meant = clean | {place: meaning(clean[place])}
    fair = fit(kind, method, validation=tuple(meant.values())) if validation else fit(kind, method, **meant)
    return fair.predict(TABLE), fair.summary_


def _estimator_trial(kind: str, method: str, place: str, form: Hostile, *, validation: bool = False) -> Trial:
    clean = {"X": TABLE, "y": LABEL, "sensitive_features": GROUP, "sample_weight": WEIGHT}

    def run() -> Any:
        given = clean | {place: made(form, clean[place])}
        return fit(kind, method, validation=tuple(given.values())) if validation else fit(kind, method, **given)

    def right(fair: ESVDFair) -> bool | str:
        meant = clean | {place: form.meaning(clean[place])}  # type: ignore[misc]
        said = consistent(fair, meant)
        if said is not True:
            return said
        known, summary = _reference(kind, method, place, form.meaning, validation)  # type: ignore[arg-type]
        off = float(np.abs(fair.predict(TABLE) - known).max())
        if not off <= 1e-6 * max(float(np.abs(known).max()), 1e-300):
            return f"predictions off by {off:g}"
        return summary["ks_after"] == fair.summary_["ks_after"] or "another KS distance"

    where = f"validation {place}" if validation else place
    name = f"ESVDFair {kind} {method} {where} {form.name}"
    own = RuntimeError if kind == "torch" and form.name == "three axes" else None  # what the module itself says
    return Trial(name, run, None if form.meaning is None else right, where, own)


def consistent(fair: ESVDFair, meant: dict[str, Array], relative: float = 1e-6) -> bool | str:
    """Whether the summary says of the repaired model what its predictions show."""
    after = np.asarray(fair.predict(meant["X"]), dtype=float)
    if not np.isfinite(after).all():
        return "predictions that are not finite"
    groups, weight = meant["sensitive_features"], meant["sample_weight"]
    exact = Exact(after, groups, weight)
    # Predictions that differ in their last bits alone may change sides.
    ks = near(fair.summary_["ks_after"], exact.ks_distance(), scale=1.0, relative=0.05)
    if ks is not True:
        return f"KS {ks}"
    error = [a - b for a, b in zip(_exact(after), _exact(meant["y"]), strict=True)]
    mse = _mean([e * e for e in error], _exact(weight))
    found = near(fair.summary_["mse_after"], mse, relative=relative, scale=max(e * e for e in error) / 10**6)
    return True if found is True else f"error {found}"
