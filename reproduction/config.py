"""What is run: one frozen description for each experiment of the paper, and the numbers the paper prints."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from esvdfair.core.edits import PAPER_REDUCTIONS
from esvdfair.problem import Effort
from reproduction.datasets import Preparation

Part = Literal["references", "paper", "repaired", "retrained", "peers"]
"""Rows of a table that depend on the same things, saved apart: a change of one method makes only its part again.

references : the untouched network, refitted, a constant, the baselines, the plug-in optimum
paper : the paper's method along its reductions; for one pair of them, its errata too
repaired : `parity` and `transport`
retrained : all layers trained with a penalty on the gap
peers : other libraries
"""
PARTS: tuple[Part, ...] = get_args(Part)

_EVERY_PART = ("dataset", "evaluated_on", "training", "shown_range")
_DECIDED_BY: dict[Part, tuple[str, ...]] = {
    "references": ("group_classifier", "optimum_levels"),
    "paper": ("reductions",),
    "repaired": ("target_ks", "transport_levels", "effort"),
    "retrained": ("target_ks", "retraining"),
    "peers": ("group_classifier",),
}


@dataclass(frozen=True)
class Training:
    """How the untouched network is trained; the defaults are the paper's."""

    epochs: int = 20
    width: int = 256
    depth: int = 5
    batch_size: int = 128
    learning_rate: float = 1e-3
    decay: float = 0.8


@dataclass(frozen=True)
class Retraining:
    """How all layers are trained on the error plus λ·W₂² between the groups, instead of a repair."""

    penalty: float = 4.0  # the first λ
    stages: int = 3  # how many λ are tried
    more_epochs: int = 4  # of each but the first
    ramp: int = 8  # epochs over which λ rises from 0 when the network starts from scratch
    batch_size: int = 256
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Variant:
    """What tells one row of a table from another."""

    method: str  # "untouched", "barycenter", "private_histogram", "paper", "transport", …
    fitted_on: str = ""  # "scores" or "targets", whose distributions baselines estimate
    group: str = "none"  # what the method sees of the group at prediction: or "predicted", "true"
    level: float | None = None  # the KS distance asked for (`parity`, `transport`, retrained networks, the optimum)
    mean_reduction: float | None = None  # c̃_e asked for (`paper`)
    covariance_reduction: float | None = None  # c̃_v

    @classmethod
    def reduced(cls, method: str, mean: float, covariance: float) -> "Variant":
        """An edit with the reductions c̃_e and c̃_v."""
        return cls(method, mean_reduction=float(mean), covariance_reduction=float(covariance))


@dataclass(frozen=True)
class Printed:
    """A printed result: mean and standard deviation over 50 splits."""

    variant: Variant
    mse: float
    ks: float
    mse_within: float  # how far a mean of ours may be: the printed deviation, or what the reading of a plot allows
    ks_within: float
    source: str


@dataclass(frozen=True)
class Experiment:
    """A table of the paper, under one preparation of its data."""

    name: str  # what the command line calls it
    dataset: Literal["law", "compas", "wages"]
    preparation: Preparation = "paper"
    evaluated_on: Literal["test", "heldout"] = "test"  # 15 %, or validation and test rows, 30 %
    # The rows it has, in their order; an ablation has only those of the paper, along its reductions (c̃_e, c̃_v).
    parts: tuple[Part, ...] = ("references", "paper", "repaired", "retrained")
    reductions: tuple[tuple[float, float], ...] = (PAPER_REDUCTIONS,)
    # What predicts the group for baselines that need it; "network" is the network with a head for each group.
    group_classifier: Literal["logistic", "network"] = "logistic"
    target_ks: float = 0.10  # of `parity`, `transport` and the retrained networks
    # Where `transport` is compared with methods that reach another KS (1 is no bound), and where the optimum's curve is
    # known, from which the excess over it is interpolated.
    transport_levels: tuple[float, ...] = (0.10, 0.12, 0.15, 0.20, 0.25, 0.30, 1.0)
    optimum_levels: tuple[float, ...] = (0.0, 0.025, 0.05, 0.075, 0.10, 0.15, 0.20, 0.30)
    effort: Effort = field(default_factory=Effort)
    training: Training = field(default_factory=Training)
    retraining: Retraining = field(default_factory=Retraining)
    shown_range: tuple[float, float] = (0.0, 1.0)  # of predictions, in the figures of densities
    printed: tuple[Printed, ...] = ()  # the paper's numbers, for preparation "paper"

    @property
    def full_name(self) -> str:
        """What its files are called: "law-paper"."""
        return f"{self.name}-{self.preparation}"

    @property
    def is_comparison(self) -> bool:
        """Whether methods are compared, not one along its parameter."""
        return len(self.reductions) == 1

    @property
    def preparations(self) -> tuple[Preparation, ...]:
        """Those that its data set has; wages is in no paper and has one."""
        return ("clean",) if self.dataset == "wages" else ("paper", "clean")

    def protocol(self, part: Part) -> dict[str, Any]:
        """What decides the rows of a part, as JSON gives it back; saved beside them, so that no two protocols mix."""
        plain = asdict(self)
        decisive = json.dumps({name: plain[name] for name in (*_EVERY_PART, *_DECIDED_BY[part])})
        found: dict[str, Any] = json.loads(decisive, parse_constant=lambda _: "inf")  # JSON has no infinity
        return found


_UNTOUCHED = Variant("untouched")
_BARYCENTER = Variant("barycenter", "targets", "predicted")
_HISTOGRAM = Variant("private_histogram", "targets", "predicted")
PAPER = Variant.reduced("paper", *PAPER_REDUCTIONS)

_TABLE_LAW, _TABLE_COMPAS = "Table 1 (law)", "Table 2 (COMPAS)"

LAW = Experiment(
    name="law",
    dataset="law",
    shown_range=(2.4, 3.9),
    printed=(
        Printed(_UNTOUCHED, 0.055, 0.376, 0.006, 0.031, _TABLE_LAW),
        Printed(_BARYCENTER, 0.061, 0.267, 0.007, 0.034, _TABLE_LAW),
        Printed(_HISTOGRAM, 0.062, 0.258, 0.006, 0.042, _TABLE_LAW),
        Printed(PAPER, 0.088, 0.235, 0.007, 0.042, _TABLE_LAW),
    ),
)

COMPAS = Experiment(
    name="compas",
    dataset="compas",
    group_classifier="network",
    shown_range=(-0.1, 1.1),
    printed=(
        Printed(_UNTOUCHED, 0.185, 0.256, 0.006, 0.030, _TABLE_COMPAS),
        Printed(_BARYCENTER, 0.403, 0.271, 0.147, 0.025, _TABLE_COMPAS),
        Printed(_HISTOGRAM, 0.227, 0.156, 0.021, 0.053, _TABLE_COMPAS),
        Printed(PAPER, 0.214, 0.130, 0.004, 0.035, _TABLE_COMPAS),
    ),
)


def _ablation(
    name: str, printed: dict[tuple[float, float], tuple[float, float]], *, within: tuple[float, float], source: str
) -> Experiment:
    """The paper's method on law along pairs of reductions, with the MSE and KS that are printed for each."""
    return replace(
        LAW,
        name=name,
        evaluated_on="heldout",
        parts=("paper",),
        reductions=tuple(printed),
        printed=tuple(
            Printed(Variant.reduced("paper", *at), *numbers, *within, source) for at, numbers in printed.items()
        ),
    )


ABLATION_MEAN = _ablation(
    "ablation-mean",
    {
        (1.5, 150.0): (0.059, 0.360),
        (2.0, 150.0): (0.061, 0.350),
        (5.0, 150.0): (0.071, 0.311),
        (15.0, 150.0): (0.087, 0.237),
        (50.0, 150.0): (0.101, 0.171),
    },
    within=(0.010, 0.030),
    source="Figure 3 (c̃_e), read from the authors' plotting code",
)
ABLATION_COVARIANCE = _ablation(
    "ablation-covariance",
    {
        (15.0, 5.0): (0.067, 0.277),
        (15.0, 10.0): (0.070, 0.267),
        (15.0, 50.0): (0.079, 0.246),
        (15.0, 100.0): (0.085, 0.241),
        (15.0, 150.0): (0.088, 0.237),
    },
    within=(0.007, 0.040),
    source="Table 3 (c̃_v)",
)

# Not in the paper: the same comparison on a table that needs no download.
WAGES = Experiment(name="wages", dataset="wages", preparation="clean", shown_range=(1.2, 3.2))

EXPERIMENTS = {e.name: e for e in (LAW, COMPAS, ABLATION_MEAN, ABLATION_COVARIANCE, WAGES)}
OF_THE_PAPER = (LAW.name, COMPAS.name, ABLATION_MEAN.name, ABLATION_COVARIANCE.name)
