"""What is said of the population, checked on populations whose KS distance is known.

    python benchmarks/promise.py                      # all of it, some 40 minutes of one core
    python benchmarks/promise.py interval --draws 100 --out /tmp/promise
    python benchmarks/promise.py tables               # from the rows that are saved

*interval*: the interval and the bound of one model. *groups*: small groups beside large ones, with
`ESVDFair` on a linear model. *fit*: networks that are over-trained on the rows of the repair. *races*: COMPAS by race.
Rows go to ``promise/`` next to the decision records, one CSV file a part; the tables of decision 3 are made from them.

In *interval* groups are uniform but for a difference of a known shape: F_g(x) = x + a_g·shape(x) with sup |shape| = 1,
so that the population's KS distance is max a − min a. Constants of the library were chosen on seeds 1 to 20; the
default is 0.
"""

import argparse
import csv
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esvdfair import ESVDFair, ESVDFairWarning, ks_population
from esvdfair.core.ks import Groups, Ranked, ks_peak, upper_bound
from esvdfair.core.pairs import Pairs
from reproduction.datasets import COMPAS, DATES, load, locate

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
            pairs = Pairs(Groups(codes, count, weights), None, int(rng.integers(2**31)))
        y = scores(levels(codes, rng), codes, distance, shape)
        found.append(_misses(y, pairs, distance))
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


def _misses(y: Floats, pairs: Pairs, distance: float) -> list[float]:
    """Whether the interval lies above the truth or below it, and bounds below it; the noise level, and the distance."""
    groups = pairs.groups
    peak = ks_peak(y, groups)
    sizes = groups.sizes[[peak.high_group, peak.low_group]]
    shares = np.array([peak.high_share, peak.low_share])
    # the lower end is at least 1.96 of these errors below the distance: no need of its bootstrap within 1.4
    error = np.sqrt((shares * (1 - shares) / sizes).sum())
    low = peak.distance > distance + 1.4 * error and pairs.largest_interval(y, draws=300)[0] > distance
    missed = {}
    for method, confidences in (("normal", (0.9, 0.95, 0.975)), ("hoeffding", (0.9, 0.95))):
        miss = peak.distance < distance
        for confidence in confidences:  # bounds rise with their confidence: where one holds, the next ones do
            miss = miss and upper_bound(Ranked(y, groups), confidence, method) < distance
            missed[method, confidence] = miss
    false = [missed[method, c] for method in ("normal", "hoeffding") for c in CONFIDENCES]
    return [low, missed["normal", 0.975], *false, float(pairs.floors.max()), peak.distance]


# --- small groups beside large ones --------------------------------------------------------------------------------


TARGET = 0.1
LARGE = (500, 2000, 10_000)
SMALL = (2, 3, 5, 10, 20, 40, 80, 200)
FALLING = (9000, 3000, 1000, 333)
GAP = 0.8
"""Difference of the first two groups in an input, in standard deviations; a third group has none, or twice it."""


def groups(draws: int, seed: int) -> Iterator[Row]:
    """Two large groups and a small third one, with and without a gap of its own; and four groups of falling size.

    ``pair`` is the mean population KS between the large groups, ``alone`` that of the same rows without the third
    group, ``excess`` the mean of what the largest population KS of a pair that can be told is above the larger of the
    target and ``alone``, ``over`` how often that is more than .02; ``met`` the share of fits that claim the target,
    ``false`` the share of fits that do so although a judged pair is beyond the target by more than .02, ``beyond`` by
    anything.
    """
    for large in LARGE:
        for small in SMALL:
            for gap in (0.0, 2 * GAP):
                sizes, gaps = (large, large, small), (0.0, GAP, gap)
                found = [_beside(sizes, gaps, [seed, large, small, int(gap), i]) for i in range(draws)]
                yield {"sizes": f"{large} / {large} / {small}", "gap": gap, **_means(found)}
    gaps = (0.0, GAP, GAP / 2, 0.0)[: len(FALLING)]
    found = [_beside(FALLING, gaps, [seed, 0, i]) for i in range(draws)]
    yield {"sizes": " / ".join(map(str, FALLING)), "gap": 0.0, **_means(found)}


def _grouped(rng: np.random.Generator, sizes: tuple[int, ...], gaps: tuple[float, ...]) -> tuple[Floats, Floats, Codes]:
    a = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = rng.normal(size=(len(a), 8))
    x[:, :2] += np.array(gaps)[a][:, None] * [1.0, 0.5]
    return x, x[:, 0] + x[:, 2] + x[:, 3] + rng.normal(size=len(a)), a


def _beside(sizes: tuple[int, ...], gaps: tuple[float, ...], seed: list[int]) -> Row:
    rng = np.random.default_rng(seed)
    x, y, a = _grouped(rng, sizes, gaps)
    fresh, _, codes = _grouped(rng, (20_000,) * len(sizes), gaps)
    large = a < 2
    model = LinearRegression().fit(x, y)

    def population(fair: ESVDFair, g: int, h: int) -> float:
        rows = (codes == g) | (codes == h)
        return float(ks_population(fair.predict(fresh[rows]), sensitive_features=codes[rows]))

    together = ESVDFair(model, target_ks=TARGET).fit(x, y, sensitive_features=a)
    alone = ESVDFair(model, target_ks=TARGET).fit(x[large], y[large], sensitive_features=a[large])
    without, pair = population(alone, 0, 1), population(together, 0, 1)
    judged = [population(together, *each["groups"]) for each in together.summary_["pairs"]]
    told = [ks for ks, each in zip(judged, together.summary_["pairs"], strict=True) if each["ks_floor"] <= TARGET]
    met, excess = bool(together.summary_["met"]), max([pair, *told]) - max(TARGET, without)
    return {
        "alone": without,
        "pair": pair,
        "excess": excess,
        "over": excess > 0.02,
        "met": met,
        "false": met and max(judged) > TARGET + 0.02,
        "beyond": met and max(judged) > TARGET,
    }


def _means(found: list[Row]) -> Row:
    """Means of decisions, and their Monte-Carlo errors."""
    summary: Row = {"decisions": len(found)}
    for name in found[0]:
        values = np.array([row[name] for row in found if row[name] is not None], dtype=float)
        summary[name] = values.mean() if len(values) else np.nan
        summary[f"{name} ±"] = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return summary


# --- whole fits ----------------------------------------------------------------------------------------------------


PEOPLE = ((0.5, 500, 250), (0.5, 1500, 700), (0.15, 1500, 700), (0.3, 4000, 1000), (0.07, 7000, 1500))
"""Share of the smaller group, training rows, validation rows."""
FRESH = 40_000


def fit(draws: int, seed: int) -> Iterator[Row]:
    """`transport` with networks that are over-trained on the rows of the repair; fresh rows give the population KS.

    ``ratio`` is the mean population KS over the target, ``met`` the share of fits that claim the target, ``false`` that
    of certificates at 90% that are wrong. The last rows are COMPAS with 1,400 training and 300 validation rows, all
    others being the population; they are left out where the file is not at hand.
    """
    for share, fitting, judging in PEOPLE:
        found = [_over_trained(share, fitting, judging, [seed, fitting, i]) for i in range(draws)]
        yield {"data": f"{share:.0%} in the smaller group", "fitting": fitting, "judging": judging, **_means(found)}
    try:
        compas = load("compas", "clean")
    except FileNotFoundError:
        return
    x, y, a = compas.X.to_numpy(float), compas.y.to_numpy(float), compas.sensitive_features.to_numpy()
    for first, last in ((1, 20), (21, 60)):  # constants of the library were chosen on the first
        found = [_decided(x, y, a, 1400, 300, seed + i) for i in range(first, last + 1)]
        yield {"data": f"COMPAS, seeds {first} to {last}", "fitting": 1400, "judging": 300, **_means(found)}


def _over_trained(share: float, fitting: int, judging: int, seed: list[int]) -> Row:
    rng = np.random.default_rng(seed)
    rows = fitting + judging + FRESH
    a = (rng.random(rows) < share).astype(np.intp)
    x = rng.normal(size=(rows, 20))
    x[:, 0] += 1.2 * a
    x[:, 1] *= 1 + 0.5 * a
    y = x[:, 0] + np.abs(x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + x[:, 4:8].sum(axis=1) + rng.normal(size=rows)
    return _decided(x, y, a, fitting, judging, seed[-1], shuffle=False)


def _decided(
    x: Floats, y: Floats, a: NDArray[Any], fitting: int, judging: int, seed: int, *, shuffle: bool = True
) -> Row:
    order = np.random.default_rng(seed).permutation(len(a)) if shuffle else np.arange(len(a))
    train, validation, fresh = np.split(order, [fitting, fitting + judging])
    network = MLPRegressor(hidden_layer_sizes=(64,), max_iter=200, random_state=seed)
    model = make_pipeline(StandardScaler(), network).fit(x[train], y[train])
    apart = x[validation], y[validation], a[validation]
    found: Row = {}
    for confidence in (None, 0.9):
        fair = ESVDFair(model, target_ks=TARGETS[0], confidence=confidence, random_state=seed)
        curve = fair.fit(x[train], y[train], sensitive_features=a[train], validation=apart).curve_
        for target in TARGETS:
            point = curve.select(target_ks=target)
            prediction = curve.model(point).predict(x[fresh])
            ks, met = ks_population(prediction, sensitive_features=a[fresh]), curve.meets(point, target)
            if confidence is None:
                found |= {f"ratio {target:g}": ks / target, f"met {target:g}": met}
            else:
                found |= {f"false {target:g}": met and ks > target, f"none {target:g}": not met}
    return found


# --- COMPAS by race ------------------------------------------------------------------------------------------------


RACES = "African-American", "Caucasian"


def races(draws: int, seed: int) -> Iterator[Row]:
    """COMPAS by race, six groups, next to the repair of the two largest alone; a row for each seed.

    ``alone`` and ``pair`` are the population KS between the two largest groups, estimated on test rows. No rows where
    the file is not at hand.
    """
    try:
        compas, table = load("compas", "clean"), pd.read_csv(locate(COMPAS))
    except FileNotFoundError:
        return
    race = table.loc[table[list(DATES)].notna().all(axis=1), "race"].to_numpy()
    x, y = compas.X.to_numpy(float), compas.y.to_numpy(float)
    for i in range(seed + 1, seed + 1 + draws):
        train, validation, test = np.split(np.random.default_rng(i).permutation(len(y)), [3500, 4400])
        network = MLPRegressor(hidden_layer_sizes=(64,), max_iter=200, early_stopping=True, random_state=i)
        model = make_pipeline(StandardScaler(), network).fit(x[train], y[train])
        test = test[np.isin(race[test], RACES)]
        found: Row = {"before": ks_population(model.predict(x[test]), sensitive_features=race[test])}
        for name in ("alone", "pair"):
            inside = np.isin(race, RACES) | (name == "pair")
            rows, apart = train[inside[train]], validation[inside[validation]]
            fair = ESVDFair(model, target_ks=TARGET, random_state=i).fit(
                x[rows], y[rows], sensitive_features=race[rows], validation=(x[apart], y[apart], race[apart])
            )
            prediction = fair.predict(x[test])
            found[name] = ks_population(prediction, sensitive_features=race[test])
            found[f"r2 {name}"] = r2_score(y[test], prediction)
        found["r2 before"] = r2_score(y[test], model.predict(x[test]))
        yield {"seed": i, **found, "met": fair.summary_["met"], "compared": len(fair.summary_["group_sizes"])}


def races_table(rows: list[Row]) -> list[list[str]]:
    """Means over the seeds."""

    def shown(values: list[float]) -> str:
        return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"

    cells = [["", "KS, African-American against Caucasian", "R²"]]
    names = {"before": "original model", "alone": "repaired, the two alone", "pair": "repaired, six groups"}
    for name, words in names.items():
        cells.append([words, shown([row[name] for row in rows]), shown([row[f"r2 {name}"] for row in rows])])
    more = [[row[f"{kind}pair"] - row[f"{kind}alone"] for row in rows] for kind in ("", "r2 ")]
    return [*cells, ["six groups less the two alone", *map(shown, more)]]


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
    """The worst of the populations of settings of a kind; the file has them one by one."""

    def kind(row: Row) -> str:
        return "with weights" if "σ" in row["rows"] else "two groups" if row["rows"].count("/") == 1 else "four groups"

    cells = [
        ["validation rows", "covers, least", "above, most", "below, most", *(f"false at {c:g}" for c in CONFIDENCES)]
    ]
    for name in dict.fromkeys(map(kind, rows)):
        mine = [row for row in rows if kind(row) == name]
        least = min(mine, key=lambda row: row["covers"])
        worst = [max(row[name] for row in mine) for name in ("above", "below", "normal_0.95", "normal_0.9")]
        error = np.sqrt(least["covers"] * (1 - least["covers"]) / least["draws"])
        cells.append([name, f"{least['covers']:.3f} ± {error:.3f}", *(f"{value:.3f}" for value in worst)])
    return cells


def groups_table(rows: list[Row]) -> list[list[str]]:
    """A line for each size of the large groups, over the small ones beside them; all at the end."""
    shares = ("over", "met", "false", "beyond")
    cells = [["rows", "excess, most", "above .02", "claims met", "false by .02", "false at all"]]
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["sizes"].rsplit(" / ", 1)[0], []).append(row)
    for name, mine in [*parts.items(), ("", rows)]:
        sizes = dict.fromkeys(row["sizes"].rsplit(" / ", 1)[1] for row in (mine[0], mine[-1]))
        count = sum(row["decisions"] for row in mine)
        means = [f"{sum(row[share] * row['decisions'] for row in mine) / count:.3f}" for share in shares]
        shown = f"{name} / {' to '.join(sizes)}" if name else f"all, {count:g} decisions"
        cells.append([shown, f"{max(row['excess'] for row in mine):.3f}", *means])
    return cells


def fit_table(rows: list[Row]) -> list[list[str]]:
    """Means and Monte-Carlo errors; the share of fits that claim the target in brackets."""
    head = [f"KS / {t:g} (claims met)" for t in TARGETS[::2]]
    cells = [["data", "training", "validation", *head, "false certificates at 90%, most (none, least)"]]
    for row in rows:
        line = [row["data"], f"{row['fitting']:g}", f"{row['judging']:g}"]
        for t in TARGETS[::2]:
            line.append(f"{row[f'ratio {t:g}']:.2f} ± {row[f'ratio {t:g} ±']:.2f} ({row[f'met {t:g}']:.0%})")
        false, none = max(row[f"false {t:g}"] for t in TARGETS), min(row[f"none {t:g}"] for t in TARGETS)
        cells.append([*line, f"{false:.3f} ({none:.2f})"])
    return cells


def write_tables(rows: Path, document: Path) -> None:
    """Put the tables of the saved rows into the document, each below the comment that names it."""
    text = document.read_text(encoding="utf-8")
    for part, make in TABLES.items():
        if (rows / f"{part}.csv").exists() and (found := read(rows / f"{part}.csv")):
            head, *lines = make(found)
            table = "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
            pattern = rf"(?m)(^<!-- promise.py {part} -->\n\n)(?:\|.*\n)*"
            text = re.sub(pattern, lambda match, table=table: f"{match[1]}{table}\n", text)
    document.write_text(text, encoding="utf-8")


PARTS: dict[str, Callable[[int, int], Iterator[Row]]] = {
    "interval": interval,
    "groups": groups,
    "fit": fit,
    "races": races,
}
TABLES: dict[str, Callable[[list[Row]], list[list[str]]]] = {
    "interval": interval_table,
    "groups": groups_table,
    "fit": fit_table,
    "races": races_table,
}
DRAWS = {"interval": 500, "groups": 21, "fit": 20, "races": 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "tables"], help="one of them; all when left out")
    parser.add_argument("--draws", type=int, help=f"of a row; default {DRAWS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROWS, help="folder of the rows")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="where the tables go")
    options = parser.parse_args()
    for kind in (ESVDFairWarning, ConvergenceWarning):
        warnings.simplefilter("ignore", kind)
    for name in [options.part] if options.part else PARTS:
        if name in PARTS:
            save(PARTS[name](options.draws or DRAWS[name], options.seed), options.out / f"{name}.csv")
    write_tables(options.out, options.document)


if __name__ == "__main__":
    main()
