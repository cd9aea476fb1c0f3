"""The options of `ESVDFair`, checked before any row is read."""

from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils import check_random_state

from esvdfair.core.edits import check_reduction
from esvdfair.exceptions import InputError
from esvdfair.problem import Effort
from esvdfair.targets import TARGETS

METHODS = ("paper", "exact", "parity", "transport")
REDUCTIONS = ("mean_reduction", "covariance_reduction")
CHOICES: dict[str, tuple[Any, ...]] = {
    "method": METHODS,
    "missing": ("error", "group"),
    "refit": (None, "sgd", "ols"),
    "certificate": ("normal", "hoeffding"),
    "rescale": (False, True),
    "keep_zeros": (True, False),
}
"""Values of the options that have a few."""
RANGES: dict[str, tuple[Any, str]] = {
    "target_ks": (pd.Interval(0, 1, closed="both"), "a KS distance lies between 0 and 1"),
    "max_mse_increase": (pd.Interval(0, np.inf, closed="both"), "expected a number that is not negative"),
    "confidence": (pd.Interval(0, 1, closed="neither"), "expected a number between 0 and 1, such as 0.9"),
    "validation_fraction": (pd.Interval(0, 1, closed="left"), "expected a number from 0 to below 1"),
    "min_group_rows": (pd.Interval(2, np.inf, closed="left"), "expected a whole number of at least 2"),
    "batch_size": (pd.Interval(1, np.inf, closed="left"), "expected a whole number of at least 1"),
}
"""What the options that are numbers must be."""


def has_target(fair: Any) -> bool:
    """Whether a point of the curve is chosen by `target_ks` or `max_mse_increase`."""
    return fair.target_ks is not None or fair.max_mse_increase is not None


def seed_of(state: Any) -> int:
    """A whole number from `random_state`."""
    if not isinstance(state, int | np.integer):
        return int(check_random_state(state).randint(2**31 - 1))
    if isinstance(state, bool) or state < 0:
        raise InputError(f"`random_state={state}`; expected a whole number of at least 0, a RandomState or None.")
    return int(state)


def targets_of(targets: Any, *, labelled: bool) -> tuple[str, ...]:
    """What the refit may aim at."""
    if isinstance(targets, str) and targets == "auto":
        return TARGETS if labelled else TARGETS[1:]
    names = (targets,) if isinstance(targets, str | int | float) else tuple(targets)
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        raise ValueError(f"targets={targets!r}; expected 'auto' or some of {TARGETS}.")
    if "labels" in names and not labelled:
        raise ValueError("targets holds 'labels', but there is no y; pass y, or targets='predictions'.")
    return names


def check_options(fair: Any) -> None:
    """Raise ValueError for options of an `ESVDFair` that are wrong, or that contradict each other."""
    _check_choices(fair)
    _check_numbers(fair)
    if fair.refit is not None and fair.method != "paper":
        raise InputError(f"`refit={fair.refit!r}` requires `method='paper'`; got `method={fair.method!r}`.")
    if fair.layer is not None and fair.method in ("parity", "transport"):
        raise InputError(
            f"`layer={fair.layer!r}` was given, but `method={fair.method!r}` edits the last layer alone. Leave the "
            "layer out, or use the method 'exact' or 'paper'."
        )
    if fair.target_ks is not None and fair.max_mse_increase is not None:
        raise InputError(
            f"`target_ks={fair.target_ks}` and `max_mse_increase={fair.max_mse_increase}` each choose a point on the "
            "curve. Give one of them."
        )
    if fair.confidence is not None and not has_target(fair):
        raise InputError(f"`confidence={fair.confidence}` requires `target_ks`.")
    given = [name for name in REDUCTIONS if getattr(fair, name) is not None]
    if given and has_target(fair):
        raise ValueError(f"{' and '.join(given)} fix the point, and a target chooses it; give one or the other.")
    if given and fair.method == "transport":
        raise ValueError(f"{' and '.join(given)} belong to the other methods; transport takes target_ks.")


def _check_choices(fair: Any) -> None:
    """Raise for a single option that is none of its values."""
    if isinstance(fair.model, type):
        raise TypeError(f"model is the class {fair.model.__name__}; pass an object of it.")
    if fair.effort is not None and not isinstance(fair.effort, Effort):
        raise TypeError(f"effort={fair.effort!r}; expected an esvdfair.Effort, such as Effort.quick().")
    for name, choices in CHOICES.items():
        if (value := getattr(fair, name)) not in choices:
            allowed = " or ".join(repr(choice) for choice in choices if choice is not None)
            raise InputError(f"`{name}={value!r}`; expected {allowed}.")


def _check_numbers(fair: Any) -> None:
    """Raise for a single number that is out of range."""
    for name, (allowed, expected) in RANGES.items():
        value = getattr(fair, name)
        if value is None and name not in ("validation_fraction", "batch_size", "min_group_rows"):
            continue
        _check_number(name, value, "expected a number")
        if value not in allowed or ("whole" in expected and isinstance(value, float)):
            raise InputError(f"`{name}={value!r}`; {expected}.")
    for name in REDUCTIONS:
        if (value := getattr(fair, name)) is not None:
            _check_number(name, value, "expected a number of at least 1, or inf")
            check_reduction(value)


def _check_number(name: str, value: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"`{name}={value!r}`; {expected}.")
