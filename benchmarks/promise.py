"""What is said about people who were not there, checked on populations whose KS distance is known.

    python benchmarks/promise.py                      # all of it, some 30 minutes of one core
    python benchmarks/promise.py interval --draws 100 --out /tmp/promise
    python benchmarks/promise.py tables               # from the rows that are saved

*interval*: the interval and the bound of one model. *choice*: a point taken from a curve by the estimate, and by the
certificate; many fresh samples judge one curve, so that a thousand decisions are cheap. *fit*: the same with curves of
`ESVDFair` on a network and people who are made up. Rows go to ``promise/`` beside the documents, one CSV file a part;
the tables of decision 3 are made from them.

Groups are uniform but for a difference of a known shape: F_g(x) = x + a_g·shape(x) with sup |shape| = 1, so that the
population's KS distance is max a − min a. Constants of the library were chosen on seeds 1 to 20; the default is 0.
"""

import argparse
import csv
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.neural_network import MLPRegressor

from esvdfair import methods
from esvdfair.batches import Data
from esvdfair.core.ks import (
    Groups,
    Null,
    Ranked,
    ks_between,
    ks_null,
    ks_peak,
    lower_end,
    population_along_curve,
    rows_to_certify,
    upper_bound,
)
from esvdfair.curve import judge
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.models import adapt
from esvdfair.sample import Effort, draw, draw_judging, prepare

Floats = NDArray[np.float64]
Codes = NDArray[np.intp]
Row = dict[str, Any]

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "decisions" / "0003-how-a-point-is-chosen.md"
ROWS = DOCUMENT.parent / "promise"
GRID = np.linspace(0.0, 1.0, 4001)
SHAPES: dict[str, Floats] = {
    "sharp": np.maximum(0.0, 1 - np.abs(GRID - 0.5) / 0.15),  # one peak: the bound has least to spare
    "shift": 4 * GRID * (1 - GRID),  # as when one group is moved
    "wave": np.sin(2 * np.pi * GRID),  # two peaks, as when one group is wider
    "flat": np.clip(np.minimum(GRID, 1 - GRID) / 0.2, 0.0, 1.0),  # no single peak: a sample's distance is most biased
}
DISTANCES = (0.0, 0.05, 0.1, 0.2)
TARGETS = (0.1, 0.15, 0.2)
CONFIDENCES = (0.95, 0.9)


@dataclass(frozen=True)
class Setting:
    """Judging rows: groups of given sizes, and how unequal the weights are: lognormal with this σ, none for 0."""

    sizes: tuple[int, ...]
    sigma: float = 0.0

    @property
    def codes(self) -> Codes:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def weights(self, rng: np.random.Generator) -> Floats | None:
        return rng.lognormal(0.0, self.sigma, sum(self.sizes)) if self.sigma else None

    def __str__(self) -> str:
        return " / ".join(map(str, self.sizes)) + (f", weights σ = {self.sigma:g}" if self.sigma else "")


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


def levels(codes: Codes, rng: np.random.Generator) -> Floats:
    """Where people stand in their groups; rising within each, which is as good as any order and quick to sort."""
    u = rng.random(len(codes))
    return u[np.lexsort((u, codes))]


def scores(u: Floats, codes: Codes, distance: float, shape: Floats) -> Floats:
    """Scores of people at level u of their group; the first two groups are ``distance`` apart, others in between."""
    amount = np.array([distance / 2, -distance / 2, 0.0, 0.0])
    found = np.empty(len(u))
    for g in range(codes.max() + 1):
        found[codes == g] = np.interp(u[codes == g], GRID + amount[g] * shape, GRID)
    return found


# --- one model: its interval and its bound -------------------------------------------------------------------------


def interval(draws: int, seed: int) -> Iterator[Row]:
    """Coverage and false certificates, a row for each setting, shape and distance.

    A row that looks bad (a coverage below .955, more false certificates than δ) is measured anew, with eight times as
    many draws, none of them the first ones.
    """
    for number, setting in enumerate(SETTINGS):
        for name, shape in SHAPES.items():
            for distance in DISTANCES:
                if distance or name == "shift":
                    what = [seed, number, list(SHAPES).index(name), int(1000 * distance)]
                    found = _interval_row(setting, shape, distance, draws, np.random.default_rng(what))
                    if found["covers"] < 0.955 or any(found[f"normal_{c:g}"] > 1 - c for c in CONFIDENCES):
                        found = _interval_row(setting, shape, distance, 8 * draws, np.random.default_rng([*what, 1]))
                    yield {"rows": str(setting), "shape": name, "ks": distance, **found}


def _interval_row(setting: Setting, shape: Floats, distance: float, draws: int, rng: np.random.Generator) -> Row:
    codes, count, found = setting.codes, len(setting.sizes), []
    for i in range(draws):
        if i % 50 == 0 and (not i or setting.sigma):  # weights stay for a while: their null is not cheap to simulate
            weights = setting.weights(rng)
            null = ks_null(Groups(codes, count, weights), None, rng)
        y = scores(levels(codes, rng), codes, distance, shape)
        found.append(_misses(y, Groups(codes, count, weights), distance, null, rng))
    low, high, *false, floor, sample = np.array(found).T
    estimate = np.sqrt(np.maximum(0.0, sample**2 - floor**2))
    names = [f"{method}_{c:g}" for method in ("normal", "hoeffding") for c in CONFIDENCES]
    return {
        "draws": draws,
        "covers": 1 - low.mean() - high.mean(),
        "below": low.mean(),
        "above": high.mean(),
        **{name: missed.mean() for name, missed in zip(names, false, strict=True)},
        "floor": floor.mean(),
        "sample": sample.mean(),
        "estimate": estimate.mean(),
    }


def _misses(y: Floats, groups: Groups, distance: float, null: Null, rng: np.random.Generator) -> list[float]:
    """Whether the interval lies above the truth or below it, and bounds below it; the floor, and the distance."""
    peak = ks_peak(y, groups)
    sizes = groups.sizes[[peak.high_group, peak.low_group]]
    shares = np.array([peak.high_share, peak.low_share])
    # the lower end is at least 1.96 of these errors below the distance: no need of its bootstrap within 1.4
    error = np.sqrt((shares * (1 - shares) / sizes).sum())
    options = {"floor": null, "draws": 300, "random_state": rng}
    low = peak.distance > distance + 1.4 * error and lower_end(Ranked(y, groups), 0.95, **options) > distance
    missed = {}
    for method, confidences in (("normal", (0.9, 0.95, 0.975)), ("hoeffding", (0.9, 0.95))):
        miss = peak.distance < distance
        for confidence in confidences:  # bounds rise with their confidence: where one holds, the next ones do
            miss = miss and upper_bound(Ranked(y, groups), confidence, method) < distance
            missed[method, confidence] = miss
    false = [missed[method, c] for method in ("normal", "hoeffding") for c in CONFIDENCES]
    return [low, missed["normal", 0.975], *false, null.floor, peak.distance]


# --- choosing from a curve -----------------------------------------------------------------------------------------


CANDIDATES, BEFORE, JUDGED = 36, 0.3, 25


def choice(draws: int, seed: int) -> Iterator[Row]:
    """Points taken from curves of candidates, from KS .3 to 0, each with a difference of its own shape, or all of one.

    Estimate: the most accurate candidate, which is the one with the largest distance, whose estimate is within the
    target, or within what the rows can tell from parity if that is more. Certificate: in the order of their distance on
    *other* rows, fairest first, while the bound meets the target. 25 samples judge each curve.
    """
    for number, setting in enumerate(SETTINGS):
        for shapes in ("own", "one"):
            rng = np.random.default_rng([seed, number, shapes == "own"])
            curves = [Candidates.draw(setting, shapes, rng) for _ in range(max(2, draws // JUDGED))]
            found = [[_decisions(curve, rng) for _ in range(JUDGED)] for curve in curves]
            yield {"rows": str(setting), "shapes": shapes, **_summary(found)}


def _summary(found: list[list[Row]]) -> Row:
    """Means of decisions over all curves, and their Monte-Carlo errors: judgements of one curve are not independent."""
    summary: Row = {"decisions": sum(map(len, found))}
    for name in found[0][0]:
        known = [[decision[name] for decision in curve if decision[name] is not None] for curve in found]
        means = np.array([np.mean(values) for values in known if values])
        summary[name] = means.mean() if len(means) else np.nan
        summary[f"{name} ±"] = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
    return summary


@dataclass(frozen=True)
class Candidates:
    """By rising population distance (falling error), each with its shape, and their distances on rows that fit."""

    setting: Setting
    true: Floats
    shapes: list[Floats]
    fitted: Floats
    weights: Floats | None
    null: Null

    @classmethod
    def draw(cls, setting: Setting, shapes: str, rng: np.random.Generator) -> "Candidates":
        weights, wide = setting.weights(rng), np.repeat(setting.codes, 3)
        true, people = BEFORE * np.linspace(0, 1, CANDIDATES), levels(wide, rng)
        angles = rng.uniform(0, 2 * np.pi, CANDIDATES if shapes == "own" else 1)
        waves = [np.cos(a) * np.sin(np.pi * GRID) + np.sin(a) * np.sin(2 * np.pi * GRID) for a in angles]
        drawn = [wave / np.abs(wave).max() for wave in waves] * (CANDIDATES // len(waves))
        groups = Groups(wide, len(setting.sizes), None if weights is None else rng.permutation(np.repeat(weights, 3)))
        fitted = [
            ks_between(scores(people, wide, distance, shape), groups)
            for distance, shape in zip(true, drawn, strict=True)
        ]
        null = ks_null(Groups(setting.codes, len(setting.sizes), weights), None, rng, draws=1000)
        return cls(setting, true, drawn, np.array(fitted), weights, null)


def _decisions(curve: Candidates, rng: np.random.Generator) -> Row:
    """What fresh rows choose: population distance over the target, and whether a certificate was false, or none."""
    codes = curve.setting.codes
    groups = Groups(codes, len(curve.setting.sizes), curve.weights)
    people = levels(codes, rng)
    judged = [scores(people, codes, d, shape) for d, shape in zip(curve.true, curve.shapes, strict=True)]
    distances = np.array([ks_between(y, groups) for y in judged])
    estimates = population_along_curve(distances, curve.fitted, curve.null.floor)
    resolved = np.sqrt(max(0.0, curve.null.quantile(0.9) ** 2 - curve.null.floor**2))
    order, found = np.argsort(curve.fitted, kind="stable"), {"floor": curve.null.floor, "resolved": float(resolved)}
    for target in TARGETS:
        aim = max(target, resolved)
        met = np.flatnonzero(estimates <= aim)
        chosen = met[-1] if len(met) else int(np.argmin(estimates))
        found[f"ratio {target:g}"] = curve.true[chosen] / aim
        found[f"beyond {target:g}"] = curve.true[chosen] > upper_bound(Ranked(judged[chosen], groups), 0.95)
    for target in TARGETS:
        # A false certificate takes in all candidates up to the first beyond the target: ask that one first.
        beyond = int(np.flatnonzero(curve.true[order] > target)[0])
        for confidence in CONFIDENCES:

            def within(at: int, target: float = target, confidence: float = confidence) -> bool:
                return upper_bound(Ranked(judged[order[at]], groups), confidence) <= target

            first = within(0)
            found[f"false {target:g} {confidence:g}"] = first and within(beyond) and all(map(within, range(1, beyond)))
            found[f"none {target:g} {confidence:g}"] = not first
    return found


# --- whole fits ----------------------------------------------------------------------------------------------------


PEOPLE = ((0.5, 1500, 700), (0.15, 1500, 700), (0.3, 4000, 1000), (0.07, 7000, 1500))
"""Share of the smaller group, rows that fit, rows that judge."""
LEARNT, FRESH, JUDGE_A_FIT = 3000, 40_000, 10
EFFORT = replace(Effort(), points=1, resamples=10)  # intervals are not looked at


def fit(draws: int, seed: int) -> Iterator[Row]:
    """`transport` on people of a known population; fresh people tell the distance of every candidate in it.

    A ratio is over the decisions that meet the target; ``fairest`` is the least distance of any candidate.
    """
    for share, fitting, judging in PEOPLE:
        network = _network(np.random.default_rng([seed, 1]), share)
        count = max(2, draws // (4 * JUDGE_A_FIT))
        fits = [_fitted(network, share, fitting, judging, [seed, 2, i]) for i in range(count)]
        yield {"share": share, "fitting": fitting, "judging": judging, **_summary(fits)}


def _people(rng: np.random.Generator, rows: int, share: float) -> tuple[Floats, Floats, Codes]:
    a = (rng.random(rows) < share).astype(np.intp)
    x = rng.normal(size=(rows, 8))
    x[:, 0] += a
    x[:, 1] *= 1 + 0.5 * a
    return x, x[:, 0] + np.abs(x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + rng.normal(size=rows), a


def _network(rng: np.random.Generator, share: float) -> MLPRegressor:
    x, y, _ = _people(rng, LEARNT, share)
    return MLPRegressor(hidden_layer_sizes=(64,), max_iter=300, random_state=0, early_stopping=True).fit(x, y)


def _fitted(network: MLPRegressor, share: float, fitting: int, judging: int, seed: list[int]) -> list[Row]:
    """One fit, judged by ten samples; the certificates are those at 90 %."""
    rng, adapter = np.random.default_rng(seed), adapt(network)

    def rows(count: int) -> Data:
        x, y, a = _people(rng, count, share)
        return Data(x, y, a)

    sample = draw(prepare(adapter, rows(fitting), validation=_people(rng, judging, share), effort=EFFORT))
    known = methods.Candidates.of(sample, [*methods.transport(sample, effort=EFFORT), methods.untouched(sample.layer)])
    fresh = draw_judging(prepare(adapter, rows(FRESH)), sample.labels)
    everyone = methods.outputs(sample.head, fresh, known.fits)
    true = np.array([ks_between(column, Groups(fresh.codes, 2)) for column in everyone.T])
    decisions = []
    for _ in range(JUDGE_A_FIT):
        here = replace(sample, judging=draw_judging(prepare(adapter, rows(judging)), sample.labels))
        judged = replace(known, sample=here, judging=methods.outputs(here.head, here.judging, known.fits))
        decision: Row = {"fairest": float(true.min())}
        for confidence in (None, 0.9):
            curve = judge(judged, adapter, effort=EFFORT, confidence=confidence)
            for target in TARGETS:
                point = curve.select(target_ks=target)
                distance, met = true[curve.candidates[point.index]], curve.meets(point, target)
                if confidence is None:
                    decision[f"ratio {target:g}"] = distance / target if met else None
                    decision[f"met {target:g}"] = met
                else:
                    decision[f"false {target:g} {confidence:g}"] = met and distance > target
                    decision[f"none {target:g} {confidence:g}"] = not met
        decisions.append(decision)
    return decisions


# --- rows and tables -----------------------------------------------------------------------------------------------


def save(rows: Iterable[Row], path: Path) -> None:
    """Rows as they come, so that a run can be watched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        for i, row in enumerate(rows):
            table = csv.DictWriter(file, list(row), lineterminator="\n")
            if not i:
                table.writeheader()
            table.writerow({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()})
            file.flush()


def read(path: Path) -> list[Row]:
    def number(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    with path.open(encoding="utf-8", newline="") as file:
        return [{name: number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def interval_table(rows: list[Row]) -> list[list[str]]:
    """The worst of the populations of a setting."""
    cells = [["judging rows", "covers, least", "above, most", "below, most", *(f"false at {c:g}" for c in CONFIDENCES)]]
    settings = dict.fromkeys(row["rows"] for row in rows)
    for setting, mine in [(s, [r for r in rows if r["rows"] == s]) for s in settings] + [("all", rows)]:
        least = min(mine, key=lambda row: row["covers"])
        worst = [max(row[name] for row in mine) for name in ("above", "below", "normal_0.95", "normal_0.9")]
        error = np.sqrt(least["covers"] * (1 - least["covers"]) / least["draws"])
        cells.append([setting, f"{least['covers']:.3f} ± {error:.3f}", *(f"{value:.3f}" for value in worst)])
    return cells


def decision_table(rows: list[Row], names: list[str]) -> list[list[str]]:
    """Means and Monte-Carlo errors; brackets where the rows cannot resolve a target."""
    confidences = [c for c in CONFIDENCES if f"false {TARGETS[0]:g} {c:g}" in rows[0]]
    head = [f"KS / {t:g}" for t in TARGETS] + [f"false at {c:g}, most (none, least)" for c in confidences]
    chosen = [f"beyond {t:g}" for t in TARGETS if f"beyond {t:g}" in rows[0]]
    cells = [[*names, *head, *(["beyond `ks_upper`, most"] if chosen else [])]]
    for row in rows:
        line = [f"{row[name]:.4g}" if isinstance(row[name], float) else row[name] for name in names]
        for target in TARGETS:
            said = f"{row[f'ratio {target:g}']:.2f} ± {row[f'ratio {target:g} ±']:.2f}"
            met = f", met {row[f'met {target:g}']:.0%}" if f"met {target:g}" in row else ""
            line.append(f"({said})" if row.get("resolved", 0.0) > target else said + met)
        for c in confidences:
            at = max(TARGETS, key=lambda t: row[f"false {t:g} {c:g}"])
            none = min(row[f"none {t:g} {c:g}"] for t in TARGETS)
            line.append(f"{row[f'false {at:g} {c:g}']:.3f} ± {row[f'false {at:g} {c:g} ±']:.3f} ({none:.2f})")
        if chosen:
            line.append(f"{max(row[name] for name in chosen):.3f}")
        cells.append(line)
    return cells


def write_tables(rows: Path, document: Path) -> None:
    """Put the tables of the saved rows into the document, each below the comment that names it."""
    text = document.read_text(encoding="utf-8")
    for part, make in TABLES.items():
        if (rows / f"{part}.csv").exists():
            head, *lines = make(read(rows / f"{part}.csv"))
            table = "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
            pattern = rf"(?m)(^<!-- promise.py {part} -->\n\n)(?:\|.*\n)*"
            text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n", text)
    document.write_text(text, encoding="utf-8")


PARTS: dict[str, Callable[[int, int], Iterator[Row]]] = {"interval": interval, "choice": choice, "fit": fit}
TABLES: dict[str, Callable[[list[Row]], list[list[str]]]] = {
    "interval": interval_table,
    "choice": lambda rows: decision_table(rows, ["rows", "shapes"]),
    "fit": lambda rows: decision_table(rows, ["share", "fitting", "judging", "fairest"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "tables"], help="one of them; all when left out")
    parser.add_argument("--draws", type=int, default=1000, help="of a row, or decisions; whole fits have a quarter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROWS, help="folder of the rows")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="where the tables go")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ESVDFairWarning)
    for name in [options.part] if options.part else PARTS:
        if name in PARTS:
            save(PARTS[name](options.draws, options.seed), options.out / f"{name}.csv")
    write_tables(options.out, options.document)
    needed = rows_to_certify(0.05, target_ks=0.1, confidence=0.9)
    print(f"a model at KS .05 is certified for .10 at 90 % from about {needed:.0f} effective rows on")


if __name__ == "__main__":
    main()
