"""1. Fit time over the lower bound: the forward passes, the products XᵀX and the factorisations that a method needs."""

import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.linalg
import torch

from esvdfair import ESVDFair
from speed.measure import Goal, Section, interleaved
from speed.models import BATCH, forward, make_rows, network

GOAL = 1.5
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


def run(widths: Sequence[int], rows: int, repeats: Mapping[int, int]) -> Section:
    """Fits of all methods at all widths, each beside the bare parts of its lower bound."""
    table: list[Sequence[object]] = [
        ("method", "width", "fit, s", "forward, s", "XᵀX, s", "factorisations, s", "bound, s", "fit / bound")
    ]
    shares: list[Sequence[object]] = [("method", "width", *PARTS)]
    goals = []
    for width in widths:
        profiles = {name: cProfile.Profile() for name in METHODS}
        times = interleaved(_bare(width, rows) | _fits(width, rows, profiles), repeats[width])
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
            "Second table: where the time of the fits went, from a profile taken during those very fits. *the pass* is "
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


def _fits(width: int, rows: int, profiles: Mapping[str, cProfile.Profile]) -> dict[str, Callable[[], object]]:
    model, (x, y, a) = network(width), make_rows(rows)

    def fit(name: str) -> None:
        fair = ESVDFair(model, method=name, **METHODS[name].options)
        profiles[name].runcall(fair.fit, x, y, sensitive_features=a)

    return {name: lambda name=name: fit(name) for name in METHODS}


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
    model, moments = entries["torch.py", "capture"], entries["moments.py", "update_codes"]
    factorisations = sum(
        time
        for (file, function), time in entries.items()
        if function in FACTORISATIONS and file in ("_decomp.py", "_decomp_svd.py", "_decomp_cholesky.py", "_linalg.py")
    )
    judging = entries["tradeoff.py", "make_curve"]
    known = [model, moments, entries["passes.py", "collect_rows"] - model - moments, factorisations, judging]
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
