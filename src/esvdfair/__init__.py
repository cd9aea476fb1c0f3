"""Repair a trained regressor so that its predictions are distributed alike in every sensitive group."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esvdfair.core.edits import LayerEdit
    from esvdfair.core.metrics import (
        demographic_parity_ks,
        group_mse,
        ks_bound,
        ks_distance,
        ks_distance_ci,
        ks_floor,
        ks_null_quantile,
        ks_population,
        mean_gap,
        variance_gap,
        wasserstein_distance,
    )
    from esvdfair.core.moments import GroupMoments
    from esvdfair.curve import Curve, CurvePoint
    from esvdfair.cutoffs import Decisions, decisions
    from esvdfair.estimator import ESVDFair, fit_curve
    from esvdfair.exceptions import ESVDFairWarning
    from esvdfair.gather import summarise
    from esvdfair.problem import Effort
    from esvdfair.summary import Summary

__version__ = "0.1.0"

_HOMES = {
    "Curve": "curve",
    "CurvePoint": "curve",
    "Decisions": "cutoffs",
    "ESVDFair": "estimator",
    "ESVDFairWarning": "exceptions",
    "Effort": "problem",
    "GroupMoments": "core.moments",
    "LayerEdit": "core.edits",
    "Summary": "summary",
    "decisions": "cutoffs",
    "demographic_parity_ks": "core.metrics",
    "fit_curve": "estimator",
    "group_mse": "core.metrics",
    "ks_bound": "core.metrics",
    "ks_distance": "core.metrics",
    "ks_distance_ci": "core.metrics",
    "ks_floor": "core.metrics",
    "ks_null_quantile": "core.metrics",
    "ks_population": "core.metrics",
    "mean_gap": "core.metrics",
    "summarise": "gather",
    "variance_gap": "core.metrics",
    "wasserstein_distance": "core.metrics",
}

__all__ = [
    "Curve",
    "CurvePoint",
    "Decisions",
    "ESVDFair",
    "ESVDFairWarning",
    "Effort",
    "GroupMoments",
    "LayerEdit",
    "Summary",
    "decisions",
    "demographic_parity_ks",
    "fit_curve",
    "group_mse",
    "ks_bound",
    "ks_distance",
    "ks_distance_ci",
    "ks_floor",
    "ks_null_quantile",
    "ks_population",
    "mean_gap",
    "summarise",
    "variance_gap",
    "wasserstein_distance",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import esvdfair` then costs less than `import sklearn`."""
    if name in _HOMES:
        return getattr(import_module(f"esvdfair.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'esvdfair' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
