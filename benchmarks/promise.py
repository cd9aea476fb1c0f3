"""What is said about people who were not there, checked on populations whose KS distance is known.

python benchmarks/promise.py interval     # the interval, the bounds and the estimate, over sizes, groups and weights
python benchmarks/promise.py choice       # a point chosen from a curve by the estimate, and by the certificate
python benchmarks/promise.py interval --draws 100 --seed 1

Groups are uniform but for a difference of a known shape: F_g(x) = x + a_g·shape(x) with sup |shape| = 1, so that the
population's KS distance is max a − min a. Constants of the library were chosen on ad-hoc seeds of these populations;
the default seed is 0.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.ks import Null, population_along_curve
from esvdfair.core.metrics import ks_bound, ks_distance, ks_distance_ci, ks_null, ks_population, rows_to_certify

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


def choice(draws: int, seed: int, candidates: int = 96, before: float = 0.25) -> None:
    """A curve of candidates, each with a difference of its own shape; error grows as the distance falls.

    Estimate: the most accurate candidate whose estimate meets the target, by `population_along_curve` and, for
    comparison, by its own `ks_population` alone. Certificate: in the order of their distance on *other* rows, fairest
    first, while `ks_bound` meets the target; then the most accurate.
    """
    print(f"{candidates} candidates from KS {before} to 0, {draws} draws a line")
    print("judging rows target | KS over target: along the curve, alone | certified .95 and .90: false, none, mean KS")
    for sizes in ((280, 120), (200, 200), (700, 300), (3500, 1500)):
        for target in (0.1, 0.15):
            rng = np.random.default_rng([seed, *sizes])
            taken, certified = [], []
            for _ in range(draws):
                curve = Curve.draw(sizes, candidates, before, rng)
                taken.append([curve.by_estimate(target, alone) for alone in (False, True)])
                certified.append([curve.by_certificate(target, confidence) for confidence in (0.95, 0.9)])
            said = "   ".join(_certified(found, target) for found in np.array(certified).T)
            along, alone = np.mean(taken, axis=0) / target
            print(f"{'/'.join(map(str, sizes)):>12} {target:6.2f} | {along:.2f} {alone:.2f} | {said}", flush=True)
    needed = rows_to_certify(0.05, target_ks=0.1, confidence=0.9)
    print(f"a model at KS .05 is certified for .10 at 90 % from about {needed:.0f} effective rows on")


def _certified(found: Floats, target: float) -> str:
    made = found[~np.isnan(found)]
    mean = f"{made.mean():.3f}" if len(made) else "–"
    return f"{np.mean(found > target):.3f} {np.mean(np.isnan(found)):.2f} {mean}"


@dataclass(frozen=True)
class Curve:
    """Candidates by rising population distance (falling error): judged distances, and distances on training rows."""

    true: Floats
    judged: list[Floats]
    training: list[float]
    codes: NDArray[np.intp]
    floor: float

    @classmethod
    def draw(cls, sizes: tuple[int, ...], candidates: int, before: float, rng: np.random.Generator) -> "Curve":
        codes = Setting(sizes).codes
        people, trained = rng.random(len(codes)), rng.random(3 * len(codes))
        true = before * np.linspace(0, 1, candidates)
        judged, training = [], []
        for distance in true:
            angle = rng.uniform(0, 2 * np.pi)
            shape = np.cos(angle) * np.sin(np.pi * GRID) + np.sin(angle) * np.sin(2 * np.pi * GRID)
            shape /= np.abs(shape).max()
            judged.append(scores(people, codes, distance, shape))
            wide = np.tile(codes, 3)
            training.append(ks_distance(scores(trained, wide, distance, shape), sensitive_features=wide))
        return cls(true, judged, training, codes, ks_null(codes, len(sizes)).floor)

    def by_estimate(self, target: float, alone: bool) -> float:
        """Population distance of what is taken; of the fairest by estimate when none meets the target."""
        distances = np.array([ks_distance(y, sensitive_features=self.codes) for y in self.judged])
        order = distances if alone else np.array(self.training)  # in its own order nothing is shared
        estimates = population_along_curve(distances, order, self.floor)
        met = np.flatnonzero(estimates <= target)
        return float(self.true[met[-1] if len(met) else int(np.argmin(estimates))])

    def by_certificate(self, target: float, confidence: float) -> float:
        """Population distance of the most accurate certified candidate; NaN when the first fails."""
        certified = []
        for at in np.argsort(self.training, kind="stable"):
            if ks_bound(self.judged[at], sensitive_features=self.codes, confidence=confidence) > target:
                break
            certified.append(at)
        return float(self.true[max(certified)]) if certified else float("nan")


PARTS: dict[str, Callable[[int, int], None]] = {"interval": interval, "choice": choice}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of the two; both when left out")
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in [options.part] if options.part else PARTS:
        PARTS[name](options.draws, options.seed)
