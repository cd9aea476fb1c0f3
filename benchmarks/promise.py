"""What is said about people who were not there, checked on populations whose KS distance is known.

python benchmarks/promise.py interval     # the interval, the bounds and the estimate, over sizes, groups and weights
python benchmarks/promise.py choice       # a point chosen from a curve by the estimate, and by the certificate
python benchmarks/promise.py fit          # whole fits, with and without a certificate
python benchmarks/promise.py interval --draws 100 --seed 1

Groups are uniform but for a difference of a known shape: F_g(x) = x + a_g·shape(x) with sup |shape| = 1, so that the
population's KS distance is max a − min a. Constants of the library were chosen on ad-hoc seeds of these populations;
the default seed is 0.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair, ESVDFairWarning
from esvdfair.core.ks import Null, ks_from_codes, ks_null, population_along_curve, upper_bound
from esvdfair.core.metrics import ks_bound, ks_distance, ks_distance_ci, ks_population, rows_to_certify

Floats = NDArray[np.float64]
GRID = np.linspace(0.0, 1.0, 4001)
SHAPES: dict[str, Floats] = {
    "sharp": np.maximum(0.0, 1 - np.abs(GRID - 0.5) / 0.15),  # one peak: the bound has least to spare
    "shift": 4 * GRID * (1 - GRID),  # as when one group is moved
    "wave": np.sin(2 * np.pi * GRID),  # two peaks, as when one group is wider
    "flat": np.clip(np.minimum(GRID, 1 - GRID) / 0.2, 0.0, 1.0),  # no single peak: a sample's distance is most biased
}


@dataclass(frozen=True)
class Setting:
    """Groups of given sizes, and how unequal the weights are: lognormal with this σ, none for 0."""

    sizes: tuple[int, ...]
    sigma: float = 0.0

    @property
    def codes(self) -> NDArray[np.intp]:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def weights(self, rng: np.random.Generator) -> Floats | None:
        return rng.lognormal(0.0, self.sigma, sum(self.sizes)) if self.sigma else None

    def __str__(self) -> str:
        return "/".join(map(str, self.sizes)) + (f" σ={self.sigma:g}" if self.sigma else "")


SETTINGS = [
    Setting((360, 40)),
    Setting((280, 120)),
    Setting((200, 200)),
    Setting((900, 100)),
    Setting((500, 500)),
    Setting((4500, 500)),
    Setting((2500, 2500)),
    Setting((100, 100, 100, 100)),
    Setting((400, 300, 200, 100)),
    Setting((2000, 1500, 1000, 500)),
    Setting((200, 200), 1.0),
    Setting((700, 300), 1.5),
    Setting((500, 1500, 1500, 1500), 1.0),
]
DISTANCES = (0.0, 0.05, 0.1, 0.2)


def scores(u: Floats, codes: NDArray[np.intp], distance: float, shape: Floats) -> Floats:
    """Scores of people at level u of their group; the first two groups are ``distance`` apart, others in between."""
    amount = np.array([distance / 2, -distance / 2, 0.0, 0.0])
    found = np.empty(len(u))
    for g in range(codes.max() + 1):
        found[codes == g] = np.interp(u[codes == g], GRID + amount[g] * shape, GRID)
    return found


def interval(draws: int, seed: int) -> None:
    """Coverage, false certificates and the mean estimate, one line for each setting, shape and distance."""
    print(f"{draws} draws a line; a share of .025 has a Monte-Carlo error of {np.sqrt(0.025 * 0.975 / draws):.3f}")
    print(f"{'rows':>24} {'shape':>6}   KS | {'covers':>6} {'below':>5} {'above':>5} |", end=" ")
    print("false certificate: normal .05 .10, Hoeffding .05 .10 |  floor sample estimate")
    lines = []
    for number, setting in enumerate(SETTINGS):
        for name, shape in SHAPES.items():
            for distance in DISTANCES:
                if distance or name == "shift":
                    rng = np.random.default_rng([seed, number, int(1000 * distance)])
                    line = _interval_line(setting, shape, distance, draws, rng)
                    lines.append(line)
                    print(f"{setting!s:>24} {name:>6} {distance:.2f} |", _printed(line), flush=True)
    table = np.array(lines)
    print(f"{'worst':>36} | {table[:, 0].min():6.3f} {table[:, 1].max():5.3f} {table[:, 2].max():5.3f} |", end=" ")
    print(*(f"{worst:.3f}" for worst in table[:, 3:7].max(axis=0)))


def _interval_line(setting: Setting, shape: Floats, distance: float, draws: int, rng: np.random.Generator) -> Floats:
    codes = setting.codes
    known = None if setting.sigma else ks_null(codes, len(setting.sizes))
    found = [_judge(scores(rng.random(len(codes)), codes, distance, shape), codes, setting.weights(rng), known, rng)
             for _ in range(draws)]  # fmt: skip
    low, high, *bounds, floor, sample, estimate = np.array(found).T
    covers = np.mean((low <= distance) & (distance <= high))
    false = [np.mean(bound < distance) for bound in bounds]
    return np.array([covers, np.mean(low > distance), np.mean(high < distance), *false,
                     floor.mean(), sample.mean(), estimate.mean()])  # fmt: skip


def _judge(
    y: Floats, codes: NDArray[np.intp], weights: Floats | None, known: Null | None, rng: np.random.Generator
) -> tuple[float, ...]:
    rows = {"sensitive_features": codes, "sample_weight": weights}
    null = known or ks_null(codes, codes.max() + 1, None, weights, rng)
    low, high = ks_distance_ci(y, **rows, floor=null, n_resamples=300, random_state=rng)
    bounds = [ks_bound(y, **rows, confidence=c, method=m) for m in ("normal", "hoeffding") for c in (0.95, 0.9)]
    return low, high, *bounds, null.floor, ks_distance(y, **rows), ks_population(y, **rows, floor=null.floor)


def _printed(line: Floats) -> str:
    covers, below, above, n05, n10, h05, h10, floor, sample, estimate = line
    return (
        f"{covers:6.3f} {below:5.3f} {above:5.3f} | {n05:26.3f} {n10:.3f} {h05:14.3f} {h10:.3f} |"
        f" {floor:6.3f} {sample:6.3f} {estimate:8.3f}"
    )


# --- choosing from a curve -----------------------------------------------------------------------------------------


CHOICES = [
    Setting((360, 40)),
    Setting((280, 120)),
    Setting((200, 200)),
    Setting((900, 100)),
    Setting((700, 300)),
    Setting((100, 100, 100, 100)),
    Setting((400, 300, 200, 100)),
    Setting((700, 300), 1.0),
    Setting((4500, 500)),
    Setting((2500, 2500)),
]
TARGETS = (0.1, 0.15, 0.2)


def choice(draws: int, seed: int, candidates: int = 48, before: float = 0.3) -> None:
    """A curve of candidates from KS ``before`` to 0, each with a difference of its own shape, or all of one.

    Estimate: the most accurate candidate, which is the one with the largest distance, whose estimate is within the
    target, or within what the rows can tell from parity if that is more. Certificate: in the order of their distance on
    *other* rows, fairest first, while the bound meets the target.
    """
    print(f"{candidates} candidates from KS {before} to 0, {draws} draws a line, three times as many rows that fit")
    print(
        f"{'judging rows':>24} {'shapes':>6} floor | mean KS over the target (over what rows can tell, in brackets):",
        end=" ",
    )
    print("   ".join(f"{target:4.2f}" for target in TARGETS), "| false certificates (none at all) at .95 and .90")
    for number, setting in enumerate(CHOICES):
        for shapes in ("own", "one"):
            rng = np.random.default_rng([seed, number, shapes == "own"])
            curves = [Curve.draw(setting, candidates, before, shapes, rng) for _ in range(draws)]
            said = []
            for target in TARGETS:
                aims = [max(target, curve.resolved) for curve in curves]
                mean = np.mean([curve.by_estimate(aim) / aim for curve, aim in zip(curves, aims, strict=True)])
                said.append(f"({mean:.2f})" if np.mean(aims) > target else f" {mean:.2f} ")
            certified = [_certified(curves, target, c) for target in TARGETS[1:] for c in (0.95, 0.9)]
            floor = np.mean([curve.floor for curve in curves])
            print(f"{setting!s:>24} {shapes:>6} {floor:.3f} |", *said, "|", *certified, flush=True)
    needed = rows_to_certify(0.05, target_ks=0.1, confidence=0.9)
    print(f"a model at KS .05 is certified for .10 at 90 % from about {needed:.0f} effective rows on")


def _certified(curves: list["Curve"], target: float, confidence: float) -> str:
    found = np.array([curve.by_certificate(target, confidence) for curve in curves])
    return f"{np.mean(found > target):.3f} ({np.mean(np.isnan(found)):.2f})"


@dataclass(frozen=True)
class Curve:
    """Candidates by rising population distance (falling error): judged, and their distances on rows that fit."""

    true: Floats
    judged: list[Floats]
    fitted: Floats
    groups: tuple[NDArray[np.intp], int, Floats | None]
    floor: float
    resolved: float

    @classmethod
    def draw(cls, setting: Setting, candidates: int, before: float, shapes: str, rng: np.random.Generator) -> "Curve":
        codes, weights, count = setting.codes, setting.weights(rng), len(setting.sizes)
        wide = np.tile(codes, 3)
        people, trained = rng.random(len(codes)), rng.random(len(wide))
        heavy = None if weights is None else np.tile(weights, 3)
        true = before * np.linspace(0, 1, candidates)
        judged, fitted, angle = [], [], rng.uniform(0, 2 * np.pi)
        for distance in true:
            angle = rng.uniform(0, 2 * np.pi) if shapes == "own" else angle
            shape = np.cos(angle) * np.sin(np.pi * GRID) + np.sin(angle) * np.sin(2 * np.pi * GRID)
            shape /= np.abs(shape).max()
            judged.append(scores(people, codes, distance, shape))
            fitted.append(ks_from_codes(scores(trained, wide, distance, shape), wide, count, heavy))
        null = ks_null(codes, count, None, weights, draws=1000)
        resolved = np.sqrt(max(0.0, null.quantile(0.9) ** 2 - null.floor**2))
        return cls(true, judged, np.array(fitted), (codes, count, weights), null.floor, float(resolved))

    def by_estimate(self, target: float) -> float:
        """Population distance of what is taken; of the fairest by estimate when none meets the target."""
        distances = np.array([ks_from_codes(y, *self.groups) for y in self.judged])
        estimates = population_along_curve(distances, self.fitted, self.floor)
        met = np.flatnonzero(estimates <= target)
        return float(self.true[met[-1] if len(met) else int(np.argmin(estimates))])

    def by_certificate(self, target: float, confidence: float) -> float:
        """Population distance of the most accurate certified candidate; NaN when the first fails."""
        certified = []
        for at in np.argsort(self.fitted, kind="stable"):
            if upper_bound(self.judged[at], *self.groups, confidence) > target:
                break
            certified.append(at)
        return float(self.true[max(certified)]) if certified else float("nan")


# --- whole fits ----------------------------------------------------------------------------------------------------


def fit(draws: int, seed: int) -> None:
    """`ESVDFair.fit` on people of a known population: 1,500 rows fit, 700 judge, 40,000 tell the truth."""
    print(f"{draws // 8} fits a line; mean, and share beyond the target, of the population's KS distance")
    for share in (0.15, 0.5):
        model = _network(np.random.default_rng([seed, 1]), share)
        for options in ({}, {"confidence": 0.9}):
            for target in (0.15, 0.2):
                found = [_fitted(model, share, target, options, [seed, 2, i]) for i in range(draws // 8)]
                taken = np.array([ks for ks, certified in found if certified])
                said = f"{taken.mean():.3f} ({taken.mean() / target:.2f} of it)" if len(taken) else "none"
                print(
                    f"share {share:.2f} target {target:.2f} {options or 'estimate'!s:>20} | taken {len(taken):3d}, "
                    f"mean {said}, beyond the target {np.mean(taken > target) if len(taken) else 0:.3f}",
                    flush=True,
                )


def _people(rng: np.random.Generator, rows: int, share: float) -> tuple[Floats, Floats, NDArray[np.intp]]:
    a = (rng.random(rows) < share).astype(np.intp)
    x = rng.normal(size=(rows, 8))
    x[:, 0] += a
    x[:, 1] *= 1 + 0.5 * a
    return x, x[:, 0] + np.abs(x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + rng.normal(size=rows), a


def _network(rng: np.random.Generator, share: float) -> MLPRegressor:
    x, y, _ = _people(rng, 3000, share)
    return MLPRegressor(hidden_layer_sizes=(64,), max_iter=60, random_state=0, early_stopping=True).fit(x, y)


def _fitted(
    model: MLPRegressor, share: float, target: float, options: dict[str, float], seed: list[int]
) -> tuple[float, bool]:
    rng = np.random.default_rng(seed)
    x, y, a = _people(rng, 1500, share)
    fair = ESVDFair(model, target_ks=target, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        fair.fit(x, y, sensitive_features=a, validation=_people(rng, 700, share))
    truth, _, groups = _people(rng, 40_000, share)
    return ks_distance(fair.predict(truth), sensitive_features=groups), bool(fair.summary_["met"])


PARTS: dict[str, Callable[[int, int], None]] = {"interval": interval, "choice": choice, "fit": fit}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of them; all when left out")
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in [options.part] if options.part else PARTS:
        PARTS[name](options.draws, options.seed)
