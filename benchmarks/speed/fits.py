"""Rows in memory: the core over bare linear algebra, whole fits over their lower bound, a curve over one point."""

import cProfile
import pstats
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch

from esvdfair import ESVDFair, fit_curve
from esvdfair.core.edits import edit_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.parity import ParityProblem
from esvdfair.core.quadratic import FeatureSpace, Quadratic
from esvdfair.problem import Effort
from reproduction.config import Training
from reproduction.datasets import load
from reproduction.network import train
from speed.measure import BATCH, Goal, Section, all_threads, forward, interleaved, make_rows, network

GOAL = 1.5
# --- the core ------------------------------------------------------------------------------------------------------


def run_core(rows: int, widths: Sequence[int], repeats: int, threads: int) -> Section:
    """Moments, the paper's edit and the parity refit, each beside the bare products and factorisations in it."""
    table: list[Sequence[object]] = [("what", "width", "s", "bare, s", "ratio")]
    goals = []
    for width in widths:
        pairs = _core_pairs(rows, width)
        times = interleaved({f"{name}{i}": pair[i] for name, pair in pairs.items() for i in (0, 1)}, repeats)
        for name in pairs:
            ours, bare = times[f"{name}0"], times[f"{name}1"]
            table.append((name, width, f"{ours:.3f}", f"{bare:.3f}", f"{ours / bare:.2f}"))
            goals.append(Goal(f"{name}, width {width}", ours / bare, GOAL))
    return Section(
        "The core over the bare linear algebra in it",
        f"*moments*: `GroupMoments` of {rows:,} rows in batches of {BATCH:,} over a float64 XᵀX of the same batches. "
        "*Algorithm 1*: `edit_paper` of a square layer over one symmetric eigenproblem and two SVDs. *parity*: the "
        f"refit over its generalised eigenproblem. Fewest seconds of {repeats} rounds.",
        [table],
        goals,
    )


def _core_pairs(rows: int, width: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 2, rows)
    x = rng.normal(size=(rows, width)) * np.where(groups[:, None], np.linspace(0.5, 2.0, width), 1.0) + 0.3
    y, weight = x @ rng.normal(size=width), rng.normal(size=(width, width))
    batches = [slice(start, start + BATCH) for start in range(0, rows, BATCH)]
    beside = GroupMoments().update(np.column_stack([x, y]), groups)
    moments = beside.columns(slice(0, width))
    first, second = moments.covariances()
    space = FeatureSpace.from_moments(moments)
    quadratic = Quadratic.from_moments(beside, space=space, target=width, original=weight[0], ridge=1e-4)

    def gather() -> None:
        seen = GroupMoments()
        for batch in batches:
            seen.update_codes(x[batch], (0, 1), groups[batch])

    def products() -> None:
        for batch in batches:
            x[batch].T @ x[batch]

    def factorise() -> None:
        scipy.linalg.eigh(first - second, driver="evd")
        for _ in range(2):
            scipy.linalg.svd(weight, full_matrices=False)

    def refit() -> None:
        problem = ParityProblem(quadratic, mean_penalty=np.inf)
        problem.solve(problem.budget(100))

    return {
        "moments": (gather, products),
        "Algorithm 1": (lambda: edit_paper(weight, moments), factorise),
        "parity": (refit, lambda: scipy.linalg.eigh(first - second, first + second)),
    }


# --- whole fits ----------------------------------------------------------------------------------------------------

FITTING = 0.75  # the part of the rows that fit; the others judge


@dataclass(frozen=True)
class Method:
    """Options of ESVDFair, and what one solution of the method cannot do without."""

    options: Mapping[str, object]
    needs: Mapping[str, int]


METHODS = {
    "parity": Method({"targets": "labels"}, {"forward": 1, "product": 1, "eigh": 2}),
    "paper": Method({"refit": "ols"}, {"forward": 2, "product": 2, "eigh": 2, "svd": 2}),
    "exact": Method({}, {"forward": 2, "product": 2, "eigh": 3, "svd": 1, "cholesky": 1}),
}


def run_fit(widths: Sequence[int], rows: int, repeats: Mapping[int, int], threads: int) -> Section:
    """Fits of all methods at all widths, each beside the bare parts of its lower bound."""
    table: list[Sequence[object]] = [
        ("method", "width", "fit, s", "forward, s", "XᵀX, s", "factorisations, s", "bound, s", "fit / bound")
    ]
    shares: list[Sequence[object]] = [("method", "width", *PARTS)]
    goals = []
    for width in widths:
        fits = _fits(width, rows)
        times = interleaved(_bare(width, rows) | fits, repeats[width])
        profiles = {name: cProfile.Profile() for name in METHODS}
        for name, profile in profiles.items():
            profile.runcall(fits[name])
        for name, method in METHODS.items():
            parts = {part: count * times[part] for part, count in method.needs.items()}
            bound = sum(parts.values())
            factors = bound - parts["forward"] - parts["product"]
            ratio = times[name] / bound
            numbers = (times[name], parts["forward"], parts["product"], factors, bound, ratio)
            table.append((name, width, *(f"{number:.2f}" for number in numbers)))
            shares.append((name, width, *(f"{share:.0%}" for share in _shares(profiles[name]))))
            goals.append(Goal(f"{name}, width {width}", ratio, GOAL))
    return Section(
        "Fit time over its lower bound",
        f"`ESVDFair(network, method=…).fit(X, y, sensitive_features=a)` with {rows:,} rows in memory and a network of "
        "two hidden layers, reductions left at their defaults, no target. The bound is what one solution of the method "
        "cannot do without, each part measured bare in the same rounds: the forward passes (parity one, the others "
        "two), one float64 XᵀX over the rows that fit (three quarters) for every layer whose moments are needed, and "
        "the factorisations: parity two symmetric eigenproblems of the width; paper two of them and two SVDs; exact "
        "three, one SVD and a Cholesky factor. Fewest seconds of " + _rounds(repeats) + ".",
        [table, shares],
        goals,
        [
            _dominated(shares),
            "Second table: where the time of the fits went, from a profile of one more fit each. *the pass* is "
            "what a pass does beside the model and the moments (the bounded sample, conversions); *judging* makes the "
            "points of the curve.",
        ],
    )


def _bare(width: int, rows: int) -> dict[str, Callable[[], object]]:
    model, x = network(width), torch.as_tensor(make_rows(rows)[0])
    rng = np.random.default_rng(0)
    square = rng.standard_normal((width, width))
    symmetric, definite = square + square.T, square @ square.T + width * np.eye(width)
    batch = rng.standard_normal((BATCH, width))
    whole, rest = divmod(round(FITTING * rows), BATCH)

    def product() -> None:
        for part in [batch] * whole + [batch[:rest]]:
            part.T @ part

    return {
        "forward": lambda: forward(model, x),
        "product": product,
        "eigh": lambda: scipy.linalg.eigh(symmetric, driver="evd"),
        "svd": lambda: scipy.linalg.svd(square, full_matrices=False),
        "cholesky": lambda: scipy.linalg.cholesky(definite),
    }


def _fits(width: int, rows: int) -> dict[str, Callable[[], object]]:
    model, (x, y, a) = network(width), make_rows(rows)

    def fit(name: str) -> object:
        return ESVDFair(model, method=name, **METHODS[name].options).fit(x, y, sensitive_features=a)

    return {name: partial(fit, name) for name in METHODS}


# --- a target on real rows -----------------------------------------------------------------------------------------

TARGETED = {"transport": 3.5, "parity": 3.0}
PAPERS = Training()


def run_target(dataset: str, repeats: int, threads: int, training: Training = PAPERS) -> Section:
    """Fits with a target on the paper's network, each over one forward pass, one XᵀX and two eigenproblems."""
    trained = train(load(dataset, "paper"), training, 1)
    (x, y, a), validation = trained.split.train, trained.split.validation
    all_rows = torch.as_tensor(np.concatenate([x, validation.X]), dtype=torch.float32)
    hidden = np.random.default_rng(0).standard_normal((len(x), trained.network[-1].in_features))
    symmetric = hidden[: hidden.shape[1]] + hidden[: hidden.shape[1]].T

    def bound() -> None:
        forward(trained.network, all_rows)
        for start in range(0, len(hidden), BATCH):
            hidden[start : start + BATCH].T @ hidden[start : start + BATCH]
        for _ in range(2):
            scipy.linalg.eigh(symmetric, driver="evd")

    def fit(method: str) -> Callable[[], object]:
        fair = ESVDFair(trained.network, method=method, target_ks=0.1)
        return lambda: fair.fit(x, y, sensitive_features=a, validation=validation)

    runs = {"bound": bound} | {method: fit(method) for method in TARGETED}
    times = interleaved(runs, repeats)
    one = interleaved(runs, repeats, time.perf_counter)
    with all_threads():
        free = interleaved(runs, repeats, time.perf_counter)
        spun = interleaved(runs, repeats, time.process_time)
    clocks = ("by the clock, s", "with default threads, s", "processor seconds of these")
    table: list[Sequence[object]] = [("", "s", "over the bound", *clocks)]
    table += [
        (name, f"{t:.2f}", f"{t / times['bound']:.1f}", *(f"{clock[name]:.2f}" for clock in (one, free, spun)))
        for name, t in times.items()
    ]
    return Section(
        "A target on real rows",
        "`ESVDFair(network, method=…, target_ks=0.1).fit(…, validation=…)` with the paper's network on "
        f"{dataset}, seed 1, {len(x):,} rows that fit. The bound is one forward pass over all rows, a float64 XᵀX of "
        f"the rows that fit and two symmetric eigenproblems. Fewest seconds of {repeats} rounds. Default "
        "threads are as many as there are cores; their processor seconds show whether a pool spins.",
        [table],
        [
            Goal(f"{name} over the bound, {dataset}", times[name] / times["bound"], goal)
            for name, goal in TARGETED.items()
        ]
        + [Goal(f"{name}, default threads over one, by the clock", free[name] / one[name], 1.1) for name in TARGETED],
    )


# --- where the time went -------------------------------------------------------------------------------------------

PARTS = ("model", "moments", "the pass", "factorisations", "judging", "rest")
FACTORISATIONS = {"eigh", "svd", "svdvals", "cholesky", "eigvalsh", "pinv"}


def _shares(profile: cProfile.Profile) -> list[float]:
    """Parts of the fit's time: cumulative over functions of which none calls another."""
    entries = {
        (Path(file).name, function): cumulative
        for (file, _, function), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    }
    total = entries["estimator.py", "fit"]
    model, moments = entries["base.py", "capture"], entries["moments.py", "update_codes"]
    factorisations = sum(
        time
        for (file, function), time in entries.items()
        if function in FACTORISATIONS and file in ("_decomp.py", "_decomp_svd.py", "_decomp_cholesky.py", "_linalg.py")
    )
    evaluating = entries["evaluation.py", "evaluate"]
    known = [
        model,
        moments,
        entries["gather.py", "gather"] + entries["problem.py", "make_problem"] - model - moments,
        factorisations,
        evaluating,
    ]
    return [part / total for part in [*known, total - sum(known)]]


def _dominated(shares: Sequence[Sequence[object]]) -> str:
    """In words, for every row of the table of shares: its two largest parts."""
    said = []
    for name, width, *values in shares[1:]:
        parts = sorted(zip((int(str(v).rstrip("%")) for v in values), PARTS, strict=True), reverse=True)
        said.append(f"{name} at {width}: {parts[0][1]} ({parts[0][0]} %), then {parts[1][1]} ({parts[1][0]} %)")
    return "What dominated: " + "; ".join(said) + "."


def _rounds(repeats: Mapping[int, int]) -> str:
    return ", ".join(f"{count} round{'s' if count > 1 else ''} at width {width}" for width, count in repeats.items())


# --- the trade-off curve -------------------------------------------------------------------------------------------

CURVE_GOALS = {"transport": 1.5, "parity": 2.0}
TWENTY = Effort().strengths[-20:]


def run_curve(rows: int, width: int, repeats: int, threads: int) -> Section:
    """Curves and single points of transport and parity, from the model and the rows in memory."""
    model, (x, y, a) = network(width), make_rows(rows)
    data = {"sensitive_features": a}

    def transport(strengths: tuple[float, ...]) -> Any:
        effort = replace(Effort(), ridges=(1e-4,), strengths=strengths)
        return fit_curve(model, x, y, targets="labels", effort=effort, **data)

    def point() -> Any:
        fixed = {"mean_reduction": np.inf, "covariance_reduction": np.inf}
        return ESVDFair(model, method="parity", targets="labels", **fixed).fit(x, y, **data).curve_

    runs: dict[str, Callable[[], Any]] = {
        "transport curve": lambda: transport(TWENTY),
        "transport point": lambda: transport(TWENTY[10:11]),
        "parity curve": lambda: fit_curve(model, x, y, method="parity", targets="labels", **data),
        "parity point": point,
    }
    points = {name: len(function().points) for name, function in runs.items()}
    times = interleaved(runs, repeats)
    table: list[tuple[object, ...]] = [("method", "points", "curve, s", "one, s", "curve / one")]
    goals = []
    for method in ("transport", "parity"):
        curve, one = times[f"{method} curve"], times[f"{method} point"]
        table.append((method, points[f"{method} curve"], f"{curve:.2f}", f"{one:.2f}", f"{curve / one:.2f}"))
        goals.append(Goal(f"{method}: the curve over one point", curve / one, CURVE_GOALS[method]))
    return Section(
        "The trade-off curve",
        f"{rows:,} rows, a network of two hidden layers of width {width}; labels as the only target. Both times go "
        "from the model and the rows to judged points, so both hold one forward pass. *transport*: 20 strengths "
        "against a single one, one ridge. *parity*: `fit_curve` (8 mean penalties × 3 variance reductions × 2 ridges, "
        "of which the best 20 or more are kept and given an interval) against `fit` with both reductions infinite (2 "
        f"ridges). Fewest seconds of {repeats} rounds.",
        [table],
        goals,
        ["`ESVDFair(target_ks=…)` solves the curve in any case and takes a point of it: there the ratio is 1."],
    )
