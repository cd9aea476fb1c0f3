"""Quality of the default method on the paper's networks: test MSE, KS and regret, over seeds 33..38.

    ESVDFAIR_DATA=../shared/data python benchmarks/quality.py                  # law, compas; paper and clean; wages
    ESVDFAIR_DATA=../shared/data python benchmarks/quality.py law paper --seeds 33-38 --target 0.10
    ESVDFAIR_DATA=../shared/data python benchmarks/quality.py speed            # ratios to a forward pass, law

Regret (DESIGN 2.7): (MSE − MSE of the unaware optimum at equal KS) / (MSE of the best constant − MSE before), by
interpolation along the optimum's curve, fitted on the training split and judged on the test split.
"""

import argparse
import time
import warnings

import numpy as np
import scipy.linalg
import torch

from esvdfair import ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.core.optimum import fit_optimum
from esvdfair.datasets import fetch_compas, fetch_law, load_wages
from esvdfair.experiments.network import predict, train_network
from esvdfair.experiments.splits import split
from esvdfair.repair import repair_by_transport

SETS = [("law", "paper"), ("compas", "paper"), ("law", "clean"), ("compas", "clean"), ("wages", "clean")]
LEVELS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.3, 0.4)


def load(name: str, preparation: str):
    if name == "wages":
        return load_wages()
    return (fetch_law if name == "law" else fetch_compas)(preparation=preparation)


def features(network: torch.nn.Module, X: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return network[:-1](torch.as_tensor(X, dtype=torch.float32)).numpy().astype(np.float64)


def optimum_curve(network, parts) -> tuple[np.ndarray, np.ndarray]:
    """Test KS and MSE of the attribute-unaware optimum along its levels, from the strictest on.

    η is a ridge refit of the last layer or the network itself, whichever errs less on the validation split.
    """
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, validation, test = parts.train, parts.validation, parts.test
    h, v, g = (features(network, part.X) for part in (train, validation, test))
    chance = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500)).fit(h, train.sensitive_features)
    refit = make_pipeline(StandardScaler(), RidgeCV(np.geomspace(1, 1e4, 9))).fit(h, train.y)
    if np.mean((refit.predict(v) - validation.y) ** 2) < np.mean((predict(network, validation.X) - validation.y) ** 2):
        eta, eta_test = refit.predict(h), refit.predict(g)
    else:
        eta, eta_test = predict(network, train.X), predict(network, test.X)
    ks, mse = [], []
    for optimum in fit_optimum(eta, chance.predict_proba(h), levels=LEVELS):
        f = optimum.predict(eta_test, chance.predict_proba(g))
        ks.append(ks_distance(f, sensitive_features=test.sensitive_features))
        mse.append(np.mean((f - test.y) ** 2))
    return np.array(ks), np.array(mse)


def at_equal_ks(ks: np.ndarray, mse: np.ndarray, level: float) -> float:
    """MSE by linear interpolation along the optimum's curve; its strictest point when ``level`` is fairer still."""
    return float(np.interp(level, np.maximum.accumulate(ks), mse))


def quality(name: str, preparation: str, seeds: list[int], target: float) -> None:
    data, rows = load(name, preparation), []
    for seed in seeds:
        parts = split(data, seed)
        network = train_network(parts.train.X, parts.train.y, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ESVDFairWarning)
            fair = ESVDFair(network, target_ks=target, random_state=seed).fit(
                parts.train.X,
                parts.train.y,
                sensitive_features=parts.train.sensitive_features,
                validation=tuple(parts.validation),
            )
        test = parts.test
        before, after = predict(network, test.X), fair.predict(test.X)
        mse, ks = np.mean((after - test.y) ** 2), ks_distance(after, sensitive_features=test.sensitive_features)
        mse0 = np.mean((before - test.y) ** 2)
        reference = at_equal_ks(*optimum_curve(network, parts), ks)
        regret = (mse - reference) / (np.var(test.y) - mse0)
        base = ks_distance(before, sensitive_features=test.sensitive_features)
        rows.append((mse0, base, mse, ks, regret, fair.summary_["met"]))
        print(
            f"  {name} {preparation} seed {seed}: {mse0:.4f}/{base:.3f} -> {mse:.4f}/{ks:.3f}  "
            f"(validation {fair.summary_['mse_after']:.4f}/{fair.summary_['ks_after']:.3f}) regret {regret:+.3f}",
            flush=True,
        )
    mean, sd = np.mean(rows, axis=0), np.std(rows, axis=0)
    print(
        f"{name} {preparation}, target {target}: before {mean[0]:.4f}/{mean[1]:.3f}, after {mean[2]:.4f}±{sd[2]:.4f} / "
        f"{mean[3]:.3f}±{sd[3]:.3f}, regret {mean[4]:+.3f}, met on validation {mean[5]:.0%}",
        flush=True,
    )


def speed() -> None:
    """Law, from model and arrays to repaired model and curve, over one forward pass and one eigh of the width."""
    import esvdfair.estimator as estimator

    parts = split(load("law", "paper"), 33)
    network = train_network(parts.train.X, parts.train.y, seed=33, epochs=5)
    X = torch.as_tensor(parts.train.X, dtype=torch.float32)
    gram = np.cov(features(network, parts.train.X).T)

    def unit() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            network(X)
        scipy.linalg.eigh(gram)
        return time.perf_counter() - start

    def fit(**options) -> float:
        start = time.perf_counter()
        ESVDFair(network, target_ks=0.1, random_state=0, **options).fit(
            parts.train.X,
            parts.train.y,
            sensitive_features=parts.train.sensitive_features,
            validation=tuple(parts.validation),
        )
        return time.perf_counter() - start

    base = min(unit() for _ in range(5))
    everything = fit() / base
    original = estimator.repair_by_transport
    estimator.repair_by_transport = lambda setting, targets: repair_by_transport(
        setting, targets=("labels",), ridges=(1e-4,)
    )
    one = fit() / base
    estimator.repair_by_transport = original
    print(f"one target, one ridge: {one:.0f} × (goal ≤ 30); everything: {everything:.0f} × (goal ≤ 150)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="all")
    parser.add_argument("preparation", nargs="?", default="paper")
    parser.add_argument("--seeds", default="33-38")
    parser.add_argument("--target", type=float, default=0.10)
    arguments = parser.parse_args()
    if arguments.name == "speed":
        return speed()
    low, _, high = arguments.seeds.partition("-")
    seeds = list(range(int(low), int(high or low) + 1))
    chosen = SETS if arguments.name == "all" else [(arguments.name, arguments.preparation)]
    for name, preparation in chosen:
        quality(name, preparation, seeds, arguments.target)
    return None


if __name__ == "__main__":
    main()
