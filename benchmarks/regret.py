"""Regret where the truth is known: made-up populations with given E[Y|x] and P(group|x), so the optimum is no estimate.

    python benchmarks/regret.py                              # a few minutes on one core
    python benchmarks/regret.py --rows 5000 --seeds 1-4 --targets 0.1

A network is trained on some rows and repaired on the same, with a third as many to validate; everything is judged on
200,000 fresh people. Regret = (error − error of the best predictor without the attribute at the same KS) / (error of
the best constant − error of the network as trained): 0 is optimal, 1 as bad as a constant. Errors are distances to
E[Y|x], so that the noise of Y does not enter. What the network did not learn of E[Y|x] is in the regret of every row;
the row *untouched* shows how much that is at its own KS. Goal: at most 0.05 at KS 0.05 to 0.15.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from esvdfair import ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.core.optimum import fit_optimum
from esvdfair.datasets import Examples, Split
from esvdfair.experiments import methods
from esvdfair.experiments.config import WAGES, Training
from esvdfair.experiments.network import Trained, predict, train_network
from esvdfair.experiments.rows import interpolated_regret, parse_seeds

Array = NDArray[np.float64]

GOAL, BAND = 0.05, (0.05, 0.15)
FRESH, NOISE, INPUTS = 200_000, 0.5, 6
LEVELS = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.6)


@dataclass(frozen=True)
class Population:
    """Two groups of normal inputs with their own means and spreads; the first group is ``share`` of the people."""

    share: float
    shift: tuple[float, ...]
    spread: tuple[float, ...]

    def draw(self, rows: int, seed: int) -> tuple[Array, NDArray[np.intp]]:
        rng = np.random.default_rng(seed)
        first = rng.random(rows) < self.share
        x = rng.normal(size=(rows, INPUTS))
        return np.where(first[:, None], self.shift + np.array(self.spread) * x, x), first.astype(np.intp)

    def probability(self, x: Array) -> Array:
        """(rows, 2) P(group|x), from the two densities."""
        spread = np.array(self.spread)
        ratio = -0.5 * (((x - self.shift) / spread) ** 2 - x**2).sum(axis=1) - np.log(spread).sum()
        first = 1 / (1 + np.exp(-(ratio + np.log(self.share / (1 - self.share)))))
        return np.column_stack([1 - first, first])


def regression(x: Array) -> Array:
    """(rows,) E[Y|x]: a line, a bend and an interaction."""
    return x[:, 0] + 0.5 * np.tanh(2 * x[:, 1]) + 0.4 * np.tanh(x[:, 2] * x[:, 3]) + 0.2 * x[:, 4] ** 2


POPULATIONS = {
    "shifted means": Population(0.4, (0.7, 0.6, 0.0, 0.3, 0.0, 0.4), (1.0,) * 6),
    "unlike spreads": Population(0.3, (0.5, 0.0, 0.4, 0.0, 0.0, 0.0), (1.4, 0.8, 1.0, 1.2, 1.3, 1.0)),
    "one in ten": Population(0.1, (0.8, 0.4, 0.0, 0.0, 0.3, 0.0), (1.1, 1.0, 0.9, 1.0, 1.0, 1.0)),
}


def examples(population: Population, rows: int, seed: int) -> Examples:
    x, codes = population.draw(rows, seed)
    y = regression(x) + NOISE * np.random.default_rng((seed, 1)).normal(size=rows)
    return Examples(x, y, np.array(["many", "few"], dtype=object)[codes])


def judge_by(population: Population) -> tuple[Array, Callable[[Array], tuple[float, float]], Array]:
    """Inputs of fresh people, a function from predictions for them to (error, KS), and the optimum's curve of these."""
    x, codes = population.draw(FRESH, 2**31)
    eta, probability = regression(x), population.probability(x)

    def measure(prediction: Array) -> tuple[float, float]:
        return float(np.mean((prediction - eta) ** 2)), ks_distance(prediction, sensitive_features=codes)

    optima = fit_optimum(eta, probability, levels=LEVELS, n_cells=8192)
    predictions = [optimum.predict(eta, probability) for optimum in optima]
    return x, measure, np.array([measure(prediction) for prediction in [*predictions, eta]])


def predictors(trained: Trained, targets: list[float], x: Array) -> dict[str, Array]:
    """What is compared, by name: predictions for the people x."""
    found = {"untouched": predict(trained.network, x)}
    rows = trained.split.train
    for method in ("transport", "parity"):
        for target in targets:
            fair = ESVDFair(trained.network, method=method, target_ks=target, random_state=trained.seed)
            fair.fit(rows.X, rows.y, sensitive_features=rows.sensitive_features, validation=trained.split.validation)
            found[f"{method}, target {target:g}"] = fair.predict(x)
    people = Examples(x, np.zeros(len(x)), np.zeros(len(x), dtype=object))
    here = Trained(trained.seed, Split(rows, trained.split.validation, people), trained.network)
    *plug_in, refitted = methods.optimum(here, replace(WAGES, optimum_levels=tuple(targets)))
    found |= {f"plug-in optimum, level {o.variant.level:g}": o.prediction for o in plug_in}
    return found | {"refitted": refitted.prediction}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12_000, help="that train and repair")
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("1-5"))
    parser.add_argument("--targets", type=lambda text: [float(t) for t in text.split(",")], default=[0.05, 0.1, 0.15])
    parser.add_argument("--width", type=int, default=Training().width, help="of the network; by default the paper's")
    arguments = parser.parse_args()
    training = replace(Training(), width=arguments.width)
    warnings.simplefilter("ignore", ESVDFairWarning)
    for name, population in POPULATIONS.items():
        x, measure, curve = judge_by(population)
        regrets: dict[str, list[tuple[float, float]]] = {}
        for seed in arguments.seeds:
            parts = [examples(population, n, 2 * seed + i) for i, n in enumerate((arguments.rows, arguments.rows // 3))]
            network = train_network(parts[0].X, parts[0].y, seed=seed, training=training)
            trained = Trained(seed, Split(parts[0], parts[1], parts[1]), network)
            found = predictors(trained, arguments.targets, x)
            gain = float(np.var(regression(x)) - measure(found["untouched"])[0])
            for row, prediction in found.items():
                mse, ks = measure(prediction)
                regret = interpolated_regret(mse, ks, curve_mse=curve[:, 0], curve_ks=curve[:, 1], gain=gain)
                regrets.setdefault(row, []).append((ks, regret))
        print(f"\n{name}: {arguments.rows:,} rows, {population.share:.0%} in the smaller group")
        for row, values in regrets.items():
            (ks, regret), error = np.mean(values, axis=0), np.std(values, axis=0)[1] / np.sqrt(len(values))
            met = (
                "" if not BAND[0] <= ks <= BAND[1] else f"  (goal ≤ {GOAL:g}: {'met' if regret <= GOAL else 'missed'})"
            )
            print(f"  {row:32s} population KS {ks:.3f}, regret {regret:+.3f} ± {error:.3f}{met}", flush=True)


if __name__ == "__main__":
    main()
