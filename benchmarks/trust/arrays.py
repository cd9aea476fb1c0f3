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
from trust.hostile import COLUMNS, EXTREMES, GROUPS, SCALES, SPARSE, TABLES, WEIGHTS, Array, Hostile
from trust.verdict import Trial

ROWS = 48
LARGEST = Fraction(np.finfo(float).max)

_rng = np.random.default_rng(7)
GROUP = np.array(["a", "b"] * (ROWS // 2))
TABLE = _rng.normal(size=(ROWS, 4)) + 0.7 * (GROUP == "b")[:, None]
LABEL = TABLE @ [0.5, -0.2, 0.3, 0.8] + 0.3 * _rng.normal(size=ROWS)
WEIGHT = _rng.uniform(0.5, 2.0, size=ROWS)
BESIDE = {"sensitive_features": GROUP, "sample_weight": WEIGHT}

Columns = dict[str, Array]
Right = Callable[[Any, Columns], bool | str]  # of a result and the clean columns that were meant


def trial(name: str, place: str, form: Hostile, clean: Columns, call: Callable[..., Any], right: Right) -> Trial:
    """A call with the hostile form of one column."""

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # while it is made: none of the package's
            given = clean | {place: form.make(clean[place].copy())}
        return call(**given)

    def is_right(found: Any) -> bool | str:
        return right(found, clean | {place: form.meaning(clean[place])})  # type: ignore[misc]

    return Trial(f"{name} {place} {form.name}", run, None if form.meaning is None else is_right, place)


# --- exact figures ---------------------------------------------------------------------------------------------------

Part = tuple[list[Fraction], list[Fraction]]  # values and weights of a group


def exact(values: Array) -> list[Fraction]:
    return [Fraction(v) for v in np.asarray(values, dtype=float).tolist()]


def exact_mean(values: list[Fraction], weight: list[Fraction]) -> Fraction:
    return sum((v * w for v, w in zip(values, weight, strict=True)), Fraction(0)) / sum(weight)


def parts_of(values: Array, sensitive_features: Array, sample_weight: Array) -> list[Part]:
    """Of every group, in order."""
    labels = np.asarray(sensitive_features)
    return [(exact(values[labels == g]), exact(sample_weight[labels == g])) for g in sorted(set(labels.tolist()))]


def _below(parts: list[Part]) -> tuple[list[Fraction], list[list[Fraction]]]:
    """All values, and the share of each group at or below them."""
    cuts = sorted({v for values, _ in parts for v in values})
    return cuts, [
        [sum(w for v, w in zip(values, weight, strict=True) if v <= cut) / sum(weight) for cut in cuts]
        for values, weight in parts
    ]


def exact_ks(parts: list[Part]) -> Fraction:
    _, shares = _below(parts)
    return max(abs(a - b) for one, other in combinations(shares, 2) for a, b in zip(one, other, strict=True))


def exact_wasserstein(parts: list[Part]) -> Fraction:
    found = []
    for pair in combinations(parts, 2):
        cuts, (one, other) = _below(list(pair))
        steps = (high - low for low, high in pairwise(cuts))
        found.append(sum((abs(a - b) * s for a, b, s in zip(one[:-1], other[:-1], steps, strict=True)), Fraction(0)))
    return max(found)


def exact_mean_gap(parts: list[Part]) -> Fraction:
    means = [exact_mean(*part) for part in parts]
    return max(means) - min(means)


def near(found: Any, known: Fraction, *, scale: float | Fraction = 0, relative: float = 1e-7) -> bool | str:
    """Whether a number agrees with a fraction, to a part of the larger of it and ``scale``."""
    said = f"{found} for {float(min(known, LARGEST)):g}"
    if not np.isfinite(found):
        return said
    size = max(abs(known), Fraction(scale))
    # What lies below the smallest normal numbers loses digits as it is stored.
    close = abs(Fraction(float(found)) - known) <= Fraction(relative) * size + Fraction(np.finfo(float).tiny)
    return close or said


# --- metrics ---------------------------------------------------------------------------------------------------------


def _square_error(y_pred: Any, **beside: Any) -> dict[Any, float]:
    return group_mse(np.zeros(ROWS), y_pred, **beside)  # against zeros, so that the truth is the mean square


def _as_exact(figure: Callable[[list[Part]], Fraction], found: Any, meant: Columns) -> bool | str:
    scale = 0 if figure is exact_ks else Fraction(float(np.abs(meant["y_pred"]).max())) / 10**6
    return near(found, figure(parts_of(*meant.values())), scale=scale)


def _as_squares(found: dict[Any, float], meant: Columns) -> bool | str:
    known = [exact_mean([v * v for v in values], weight) for values, weight in parts_of(*meant.values())]
    return all(near(found[g], square) is True for g, square in zip(sorted(found), known, strict=True))


def _as_of_ranks(metric: Callable[..., Any], found: Any, meant: Columns) -> bool | str:
    """Of a metric that depends on the order of the scores alone."""
    return bool(np.allclose(found, metric(**meant | {"y_pred": rankdata(meant["y_pred"], method="dense")})))


def _as_variances(found: float, meant: Columns) -> bool | str:
    """Whether it is the difference of the groups' variances as the moments define them, on a scale near one."""
    scores, groups, weight = meant.values()
    largest = float(np.abs(scores).max()) or 1.0
    exponent = int(np.frexp(largest)[1])
    scaled = np.ldexp(scores, -exponent)
    known = variance_gap(scaled, sensitive_features=groups, sample_weight=weight)
    spread = []
    for values, w in ((scaled[groups == g], weight[groups == g]) for g in np.unique(groups)):
        spread.append(np.average((values - np.average(values, weights=w)) ** 2, weights=w))
    if not abs(known - (max(spread) - min(spread))) <= 0.2 * max(spread) + 1e-12:  # divisors n - 1 and n
        return f"{known} is not the gap of {spread}"
    return near(found, Fraction(known) * Fraction(2) ** (2 * exponent), scale=Fraction(largest) ** 2 / 10**9)


def metric_trials() -> Iterator[Trial]:
    """Each metric, with a hostile column of scores, groups or weights."""
    interval = partial(metrics.ks_distance_ci, n_resamples=20)
    calls: dict[str, tuple[Callable[..., Any], Right]] = {
        "ks_distance": (metrics.ks_distance, partial(_as_exact, exact_ks)),
        "mean_gap": (mean_gap, partial(_as_exact, exact_mean_gap)),
        "wasserstein_distance": (metrics.wasserstein_distance, partial(_as_exact, exact_wasserstein)),
        "variance_gap": (variance_gap, _as_variances),
        "group_mse": (_square_error, _as_squares),
        "ks_distance_ci": (interval, partial(_as_of_ranks, interval)),
        "ks_bound": (metrics.ks_bound, partial(_as_of_ranks, metrics.ks_bound)),
        "ks_population": (metrics.ks_population, partial(_as_of_ranks, metrics.ks_population)),
    }
    places = {"y_pred": [*COLUMNS, *EXTREMES], "sensitive_features": GROUPS, "sample_weight": WEIGHTS}
    for name, (call, right) in calls.items():
        for place, forms in places.items():
            for form in forms:
                if (name, form.name) == ("group_mse", "one group"):
                    form = form._replace(meaning=form.make)
                yield trial(name, place, form, {"y_pred": LABEL, **BESIDE}, call, right)


# --- moments ---------------------------------------------------------------------------------------------------------


def _as_moments(found: GroupMoments, meant: Columns) -> bool | str:
    x, times = meant["x"], len(meant["x"]) // ROWS
    groups, weights = (np.repeat(meant[name], times) for name in ("sensitive_features", "sample_weight"))
    for j in range(x.shape[1]):
        for got, (values, weight) in enumerate(parts_of(x[:, j], groups, weights)):
            mean, size, total = exact_mean(values, weight), max(map(abs, values)), sum(weight)
            scatter = sum((w * (v - mean) ** 2 for v, w in zip(values, weight, strict=True)), Fraction(0))
            for agrees in (
                near(found.counts[got], total),
                near(found.means[got, j], mean, scale=size / 10**3),
                near(found.scatters[got, j, j], scatter, scale=size * size * total / 10**9),
            ):
                if agrees is not True:
                    return agrees
    return True


def moment_trials() -> Iterator[Trial]:
    """GroupMoments of one batch."""
    flattened = Hostile("three axes", lambda x: np.repeat(x[:, None], 2, 1), lambda x: np.repeat(x, 2, 0))
    tables = [f for f in TABLES if f.name not in ("three axes", "a column short", "a column more")]
    weights = [f for f in WEIGHTS if not f.name.startswith(("times", "zero", "denormal", "largest"))]
    places = {
        "x": [*tables, *EXTREMES, *SPARSE[:1], flattened],
        "sensitive_features": [f for f in GROUPS if f.name != "one group"],
        "sample_weight": [*weights, *SCALES[2:6]],
    }

    def update(x: Any, sensitive_features: Any, sample_weight: Any) -> GroupMoments:
        return GroupMoments().update(x, sensitive_features, sample_weight)

    for place, forms in places.items():
        for form in forms:
            yield trial("GroupMoments", place, form, {"x": TABLE[:, :3], **BESIDE}, update, _as_moments)


# --- baselines -------------------------------------------------------------------------------------------------------

SCORED = {"scores": LABEL, "X": TABLE, **BESIDE}
BASELINES: dict[str, Callable[[], Any]] = {
    "WassersteinBarycenter": lambda: WassersteinBarycenter(random_state=0),
    "PrivateHistogram": lambda: PrivateHistogram(bins=6, random_state=0),
    "UnawareOptimum": lambda: UnawareOptimum(alpha=0.1),
    "GroupPredictor": GroupPredictor,
}


def _run_baseline(name: str, scores: Any, X: Any, sensitive_features: Any, sample_weight: Any) -> Array:
    """What a baseline, fitted on hostile input, gives for the clean rows."""
    made, beside = BASELINES[name](), {"sensitive_features": sensitive_features, "sample_weight": sample_weight}
    if name == "GroupPredictor":
        return np.asarray(made.fit(X, **beside).predict_proba(TABLE))
    if name == "UnawareOptimum":
        return np.asarray(made.fit(scores, X=X, **beside).predict(scores, X=TABLE))
    return np.asarray(made.fit(scores, **beside).predict(scores, sensitive_features=sensitive_features))


@cache
def _known_baseline(name: str, place: str, meaning: Callable[[Array], Array]) -> tuple[Array, int]:
    """What it gives for the clean array, scores brought near one by a power of two; and its exponent."""
    meant = SCORED | {place: meaning(SCORED[place])}
    exponent = int(np.frexp(np.abs(meant["scores"]).max())[1]) if place == "scores" else 0
    return _run_baseline(name, **meant | {"scores": np.ldexp(meant["scores"], -exponent)}), exponent


def _as_baseline(name: str, place: str, form: Hostile, found: Array, _: Columns) -> bool | str:
    known, exponent = _known_baseline(name, place, form.meaning)  # type: ignore[arg-type]
    rtol = 1e-4 if name in ("GroupPredictor", "UnawareOptimum") else 1e-6  # an iteration stops where it stops
    off = float(np.abs(np.ldexp(found, -exponent) - known).max())
    return off <= rtol * max(float(np.abs(known).max()), 1e-300) or f"off by {off:g}"


def baseline_trials() -> Iterator[Trial]:
    """Each baseline, with hostile scores, features, groups or weights."""
    scores = [*COLUMNS, *(f for f in EXTREMES if f.name not in ("denormal", "shifted by 1e15"))]
    for name in BASELINES:
        places = {"scores": scores, "X": TABLES, "sensitive_features": GROUPS, "sample_weight": WEIGHTS}
        if name == "UnawareOptimum":  # slow, and it reads all but X as the others do
            places = {place: forms if place == "X" else forms[::4] for place, forms in places.items()}
        else:
            del places["scores" if name == "GroupPredictor" else "X"]
        for place, forms in places.items():
            for form in forms:
                right = partial(_as_baseline, name, place, form)
                yield trial(name, place, form, SCORED, partial(_run_baseline, name), right)


# --- the estimator ---------------------------------------------------------------------------------------------------


@cache
def models() -> dict[str, Any]:
    """A fitted scikit-learn model and a torch module, of the clean rows."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1)).double()
    fitted = MLPRegressor(hidden_layer_sizes=(6,), solver="lbfgs", max_iter=60, tol=1e-2, random_state=0)
    return {"sklearn": fitted.fit(TABLE, LABEL), "torch": net}


METHODS = ("parity", "transport", "exact", "paper")
CLEAN = {"X": TABLE, "y": LABEL, **BESIDE}


def fit(kind: str, method: str, validation: bool, **given: Any) -> ESVDFair:
    """A repair of a model on what was given, or on the clean rows with it as validation rows."""
    options: dict[str, Any] = {"effort": Effort.quick(), "validation_fraction": 0.0, "min_group_rows": 2}
    options |= {"refit": "ols"} if method == "paper" else {}
    target = None if method in ("paper", "exact") else 0.2
    fair = ESVDFair(models()[kind], method=method, target_ks=target, **options)
    return fair.fit(**CLEAN, validation=tuple(given.values())) if validation else fair.fit(**given)


Way = tuple[str, str, bool]  # kind of model, method, whether the rows are those of ``validation``


@cache
def _known_fit(way: Way, place: str, meaning: Callable[[Array], Array]) -> tuple[Array, float]:
    """Predictions and KS of a fit on the clean array that a hostile one means."""
    fair = fit(*way, **CLEAN | {place: meaning(CLEAN[place])})
    return fair.predict(TABLE), fair.summary_["ks_after"]


def _as_fit(way: Way, place: str, form: Hostile, fair: ESVDFair, meant: Columns) -> bool | str:
    """Whether the summary follows from the predictions, and both are those of a fit on the clean array."""
    said = consistent(fair, meant)
    if said is not True:
        return said
    expected, ks = _known_fit(way, place, form.meaning)  # type: ignore[arg-type]
    off = float(np.abs(fair.predict(TABLE) - expected).max())
    if not off <= 1e-6 * max(float(np.abs(expected).max()), 1e-300):
        return f"predictions off by {off:g}"
    return ks == fair.summary_["ks_after"] or "another KS distance"


def consistent(fair: ESVDFair, meant: Columns, relative: float = 1e-6) -> bool | str:
    """Whether the summary says of the repaired model what its predictions show."""
    after = np.asarray(fair.predict(meant["X"]), dtype=float)
    if not np.isfinite(after).all():
        return "predictions that are not finite"
    groups, weight = meant["sensitive_features"], meant["sample_weight"]
    # Predictions that differ in their last bits alone may change sides.
    ks = near(fair.summary_["ks_after"], exact_ks(parts_of(after, groups, weight)), scale=1.0, relative=0.05)
    if ks is not True:
        return f"KS {ks}"
    squares = [(a - b) ** 2 for a, b in zip(exact(after), exact(meant["y"]), strict=True)]
    mse = exact_mean(squares, exact(weight))
    found = near(fair.summary_["mse_after"], mse, relative=relative, scale=max(squares) / 10**6)
    return True if found is True else f"error {found}"


def estimator_trials() -> Iterator[Trial]:
    """Each method on two kinds of model, with one hostile argument; of the tuple ``validation`` each place."""
    for kind in models():
        sparse = SPARSE if kind == "sklearn" else SPARSE[:1]
        places = {"X": [*TABLES, *EXTREMES, *sparse], "y": [*COLUMNS, *EXTREMES]}
        places |= {"sensitive_features": GROUPS, "sample_weight": WEIGHTS}
        methods = METHODS if kind == "sklearn" else ("parity",)
        ways = [(kind, method, False) for method in methods] + [(kind, "parity", True)] * (kind == "sklearn")
        for way in ways:
            name = f"ESVDFair {way[0]} {way[1]}" + " validation" * way[2]
            for place, forms in places.items():
                for form in forms:
                    made = trial(name, place, form, CLEAN, partial(fit, *way), partial(_as_fit, way, place, form))
                    if way[2]:
                        made = made._replace(parameter=f"validation {place}")
                    if kind == "torch" and form.name == "three axes":
                        made = made._replace(own=RuntimeError)  # what the module itself says
                    yield made
