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
import re
import warnings
from collections.abc import Iterator
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


# Sizes of the groups of the validation rows, and how unequal weights are: lognormal with this σ, none for 0.
SETTINGS: list[tuple[tuple[int, ...], float]] = [
    *(((small, large), 0.0) for small, large in ((360, 40), (280, 120), (200, 200), (900, 100), (500, 500))),
    *(((small, large), 0.0) for small, large in ((4500, 500), (2500, 2500))),
    *((sizes, 0.0) for sizes in ((100, 100, 100, 100), (400, 300, 200, 100), (2000, 1500, 1000, 500))),
    ((200, 200), 1.0),
    ((700, 300), 1.5),
    ((500, 1500, 1500, 1500), 1.0),
]


def scores(codes: Codes, distance: float, shape: Floats, rng: np.random.Generator) -> Floats:
    """Scores of new people; the first two groups are ``distance`` apart, others in between."""
    u = rng.random(len(codes))  # where people stand in their groups
    u = u[np.lexsort((u, codes))]  # rising within each, which is as good as any order and quick to sort
    amount = np.array([distance / 2, -distance / 2, 0.0, 0.0])
    parts = [np.interp(u[codes == g], GRID + amount[g] * shape, GRID) for g in range(codes.max() + 1)]
    return np.concatenate(parts)


# --- one model: its interval and its bound -------------------------------------------------------------------------


def interval(draws: int, seed: int) -> Iterator[Row]:
    """Coverage and false certificates, a row for each setting, shape and distance.

    A row that looks bad (a coverage below .955, more false certificates than δ) is measured anew, with eight times as
    many draws, none of them the first ones.
    """
    for number, (sizes, sigma) in enumerate(SETTINGS):
        for place, (name, shape) in enumerate(SHAPES.items()):
            for distance in DISTANCES if name == "shift" else DISTANCES[1:]:
                what = [seed, number, place, int(1000 * distance)]
                setting = sizes, sigma, shape, distance
                found = _interval_row(*setting, draws, np.random.default_rng(what))
                if found["covers"] < 0.955 or any(found[f"normal_{c:g}"] > 1 - c for c in CONFIDENCES):
                    found = _interval_row(*setting, 8 * draws, np.random.default_rng([*what, 1]))
                rows = " / ".join(map(str, sizes)) + (f", weights σ = {sigma:g}" if sigma else "")
                yield {"rows": rows, "shape": name, "ks": distance, **found}


def _interval_row(
    sizes: tuple[int, ...], sigma: float, shape: Floats, distance: float, draws: int, rng: np.random.Generator
) -> Row:
    codes, found = np.repeat(np.arange(len(sizes)), sizes), []
    for i in range(draws):
        if i % 50 == 0 and (not i or sigma):  # weights stay for a while: their null is not cheap to simulate
            weights = rng.lognormal(0.0, sigma, len(codes)) if sigma else None
            pairs = Pairs(Groups(codes, len(sizes), weights), None, int(rng.integers(2**31)))
        found.append(_misses(scores(codes, distance, shape, rng), pairs, distance))
    low, high, *false, floor, sample = np.array(found).T
    names = [f"{method}_{c:g}" for method in ("normal", "hoeffding") for c in CONFIDENCES]
    means = {"below": low, "above": high, **dict(zip(names, false, strict=True)), "floor": floor, "sample": sample}
    means["estimate"] = np.sqrt(np.maximum(0.0, sample**2 - floor**2))
    row = {name: float(values.mean()) for name, values in means.items()}
    return {"draws": draws, "covers": 1 - row["below"] - row["above"], **row}


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
    table = pd.DataFrame(found).astype(float)
    return {"decisions": len(table)} | pd.concat([table.mean(), table.sem().add_suffix(" ±")]).to_dict()


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


# --- rows and tables -----------------------------------------------------------------------------------------------


def interval_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The worst of the populations of settings of a kind; the file has them one by one."""
    pairs = np.where(rows["rows"].str.count("/") == 1, "two groups", "four groups")
    kinds = rows.groupby(np.where(rows["rows"].str.contains("σ"), "with weights", pairs), sort=False)
    least = rows.loc[kinds["covers"].idxmin()].set_index(kinds["covers"].idxmin().index)
    error = np.sqrt(least["covers"] * (1 - least["covers"]) / least["draws"])
    columns = {"above": "above, most", "below": "below, most"} | {
        f"normal_{c:g}": f"false at {c:g}" for c in CONFIDENCES
    }
    worst = kinds[list(columns)].max().rename(columns=columns).map("{:.3f}".format)
    worst.insert(0, "covers, least", least["covers"].map("{:.3f}".format) + error.map(" ± {:.3f}".format))
    return worst.rename_axis("validation rows").reset_index()


def groups_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each size of the large groups, over the small ones beside them; all at the end."""
    parts = rows["sizes"].str.rpartition(" / ")
    large, small = parts[0], parts[2]
    lines = []
    for name, mine in [*rows.groupby(large, sort=False), ("", rows)]:
        sizes = small[mine.index].iloc[[0, -1]].unique()
        count = mine["decisions"].sum()
        means = np.average(mine[["over", "met", "false", "beyond"]], axis=0, weights=mine["decisions"])
        shown = f"{name} / {' to '.join(sizes)}" if name else f"all, {count:g} decisions"
        lines.append([shown, *(f"{value:.3f}" for value in (mine["excess"].max(), *means))])
    return pd.DataFrame(
        lines, columns=["rows", "excess, most", "above .02", "claims met", "false by .02", "false at all"]
    )


def fit_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Means and Monte-Carlo errors; the share of fits that claim the target in brackets."""
    table = rows[["data", "fitting", "judging"]].set_axis(["data", "training", "validation"], axis=1)
    for t in TARGETS[::2]:
        table[f"KS / {t:g} (claims met)"] = [
            f"{ratio:.2f} ± {error:.2f} ({met:.0%})"
            for ratio, error, met in rows[[f"ratio {t:g}", f"ratio {t:g} ±", f"met {t:g}"]].to_numpy()
        ]
    false, none = (rows[[f"{name} {t:g}" for t in TARGETS]] for name in ("false", "none"))
    table["false certificates at 90%, most (none, least)"] = [
        f"{most:.3f} ({least:.2f})" for most, least in zip(false.max(axis=1), none.min(axis=1), strict=True)
    ]
    return table


def races_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds and their standard errors."""
    names = {"before": "original model", "alone": "repaired, the two alone", "pair": "repaired, six groups"}
    found = {words: (rows[name], rows[f"r2 {name}"]) for name, words in names.items()}
    found["six groups less the two alone"] = rows["pair"] - rows["alone"], rows["r2 pair"] - rows["r2 alone"]
    lines = [[words, *(f"{v.mean():.3f} ± {v.sem():.3f}" for v in values)] for words, values in found.items()]
    return pd.DataFrame(lines, columns=["", "KS, African-American against Caucasian", "R²"])


def write_tables(rows: Path, document: Path) -> None:
    """Put the tables of the saved rows into the document, each below the comment that names it."""
    text = document.read_text(encoding="utf-8")
    for part, (_, _, make) in PARTS.items():
        path = rows / f"{part}.csv"
        if path.exists() and path.stat().st_size > 1:
            table = make(pd.read_csv(path))
            lines = [table.columns, ["---"] * len(table.columns), *table.to_numpy()]
            new = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
            pattern = rf"(?m)(^<!-- promise.py {part} -->\n\n)(?:\|.*\n)*"
            text = re.sub(pattern, lambda match, new=new: match[1] + new, text)
    document.write_text(text, encoding="utf-8")


PARTS = {  # rows, how many draws of each, and the table of them
    "interval": (interval, 500, interval_table),
    "groups": (groups, 21, groups_table),
    "fit": (fit, 20, fit_table),
    "races": (races, 20, races_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "tables"], help="one of them; all when left out")
    parser.add_argument("--draws", type=int, help="of a row; by default 20 to 500, as the part needs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROWS, help="folder of the rows")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="where the tables go")
    options = parser.parse_args()
    for kind in (ESVDFairWarning, ConvergenceWarning):
        warnings.simplefilter("ignore", kind)
    for name in [options.part] if options.part else PARTS:
        if name in PARTS:
            measure, draws, _ = PARTS[name]
            rows = pd.DataFrame(measure(options.draws or draws, options.seed))
            rows.to_csv(options.out / f"{name}.csv", index=False, float_format="%.4g")
    write_tables(options.out, options.document)


if __name__ == "__main__":
    main()
