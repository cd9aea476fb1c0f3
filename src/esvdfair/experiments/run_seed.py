"""One seed from data to saved rows: train once, run what each experiment asks for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esvdfair.core.checks import encode_groups
from esvdfair.core.metrics import ks_distance, ks_floor, mean_gap, variance_gap
from esvdfair.experiments.config import Experiment, Preparation
from esvdfair.experiments.methods import METHODS, Outcome
from esvdfair.experiments.reference import interpolated_regret
from esvdfair.experiments.rows import Density, Folder, Row, SeedResult
from esvdfair.experiments.splits import Part
from esvdfair.experiments.trained import Trained, load, train

SHOWN_BINS = 90


def run_seed(experiments: Sequence[Experiment], preparation: Preparation, seed: int, out: Path) -> None:
    """Train the network of a seed, run each experiment that is not saved yet, save each at once.

    The experiments must share the data set and the training.
    """
    folders = [Folder(out, experiment, preparation) for experiment in experiments]
    missing = [folder for folder in folders if not folder.path(seed).exists()]
    if not missing:
        return
    first = experiments[0]
    trained = train(load(first.dataset, preparation), first.training, seed)
    for folder in missing:
        folder.write(seed, evaluate(trained, folder.experiment, preparation))


def evaluate(trained: Trained, experiment: Experiment, preparation: Preparation) -> SeedResult:
    """All rows of one seed of one experiment."""
    here = trained.part(experiment.evaluated_on)
    outcomes = list(METHODS[experiment.kind](trained, experiment))
    regrets: list[float | None] = [None] * len(outcomes)
    if experiment.kind == "comparison":
        regrets = _regrets(outcomes, here)
    rows = tuple(
        _row(outcome, regret, experiment, preparation, trained.seed, here)
        for outcome, regret in zip(outcomes, regrets, strict=True)
    )
    densities = tuple(density for outcome in outcomes for density in _densities(outcome, here, experiment.shown_range))
    return SeedResult(rows, densities)


def _regrets(outcomes: Sequence[Outcome], here: Part) -> list[float | None]:
    """Regret of every outcome against the optimum's curve on the same rows; the curve itself has none."""
    names = np.array([outcome.variant.method for outcome in outcomes])
    mse = np.array([np.mean((outcome.prediction - here.y) ** 2) for outcome in outcomes])
    ks = np.array([ks_distance(o.prediction, sensitive_features=here.sensitive_features) for o in outcomes])
    curve = names == "optimum"
    gain = float(mse[names == "constant"][0] - mse[names == "untouched"][0])
    return [
        None if on_curve else interpolated_regret(error, distance, curve_mse=mse[curve], curve_ks=ks[curve], gain=gain)
        for error, distance, on_curve in zip(mse.tolist(), ks.tolist(), curve, strict=True)
    ]


def _row(
    outcome: Outcome, regret: float | None, experiment: Experiment, preparation: Preparation, seed: int, here: Part
) -> Row:
    groups, what = here.sensitive_features, outcome.variant
    return Row(
        experiment=experiment.name,
        preparation=preparation,
        seed=seed,
        evaluated_on=experiment.evaluated_on,
        method=what.method,
        fitted_on=what.fitted_on,
        group=what.group,
        level=what.level,
        mean_reduction=what.mean_reduction,
        covariance_reduction=what.covariance_reduction,
        mse=float(np.mean((outcome.prediction - here.y) ** 2)),
        ks=ks_distance(outcome.prediction, sensitive_features=groups),
        ks_floor=ks_floor(sensitive_features=groups),
        mean_gap=mean_gap(outcome.prediction, sensitive_features=groups),
        variance_gap=variance_gap(outcome.prediction, sensitive_features=groups),
        met=outcome.met,
        mean_reached=outcome.mean_reached,
        covariance_reached=outcome.covariance_reached,
        regret=regret,
    )


def _densities(outcome: Outcome, here: Part, shown: tuple[float, float]) -> list[Density]:
    labels, codes = encode_groups(here.sensitive_features)
    edges = np.linspace(*shown, SHOWN_BINS + 1)[1:-1]  # without the outer edges: the outer bins are open
    bins = np.searchsorted(edges, outcome.prediction, side="right")
    found = []
    for code, label in enumerate(labels):
        counts = np.bincount(bins[codes == code], minlength=SHOWN_BINS)
        found.append(Density(outcome.variant, str(label), tuple(counts.tolist())))
    return found
