"""Figures of one vector of predictions, by group, and what they say in words."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t as student

from esvdfair.cli._output import label_text, number, share
from esvdfair.core.checks import check_groups
from esvdfair.core.metrics import ks_distance, ks_distance_ci, ks_floor, mean_gap, variance_gap, wasserstein_distance
from esvdfair.estimator import NULL_QUANTILE

Array = NDArray[np.float64]


@dataclass(frozen=True)
class GroupFigures:
    """One group: rows, mean and spread of its predictions, its error, its distance to everybody else.

    Every pair is a 95 % interval; errors are None without labels.
    """

    group: str
    rows: int
    mean: float
    mean_interval: tuple[float, float]
    std: float
    ks_to_rest: float
    ks_to_rest_interval: tuple[float, float]
    mse: float | None
    mse_interval: tuple[float, float] | None
    mean_error: float | None


@dataclass(frozen=True)
class Widest:
    """Where two groups differ most: the share of each at or below a prediction; they differ by the KS distance."""

    threshold: float
    more: str
    more_share: float
    fewer: str
    fewer_share: float


@dataclass(frozen=True)
class Audit:
    """All figures of an audit."""

    rows: int
    ks: float
    ks_interval: tuple[float, float]
    ks_floor: float
    mean_gap: float
    variance_gap: float
    wasserstein: float
    mse: float | None
    widest: Widest
    groups: tuple[GroupFigures, ...]

    def verdict(self) -> str:
        """What the figures say, in plain words."""
        parts = [self._difference()]
        if self.ks > NULL_QUANTILE * self.ks_floor:
            w = self.widest
            parts.append(
                f"Where they differ most, {w.more_share:.0%} of {w.more} but {w.fewer_share:.0%} of {w.fewer} are "
                f"predicted {number(w.threshold)} or less."
            )
            low, high = (end(self.groups, key=lambda g: g.mean) for end in (min, max))
            parts.append(f"The mean of {high.group} is {number(high.mean - low.mean)} above that of {low.group}.")
        parts.extend(self._who_pays())
        return " ".join(parts)

    def _difference(self) -> str:
        ks, floor = share(self.ks), share(self.ks_floor)
        if self.ks <= NULL_QUANTILE * self.ks_floor:
            return f"No difference beyond chance: KS {ks}, and parity itself would show about {floor} on so many rows."
        times = f"KS {ks}, {self.ks / self.ks_floor:.1f} times what parity would show on so many rows"
        if self.ks_interval[0] == 0:
            return f"The groups are predicted differently, but how much is uncertain: {times}."
        return f"The groups are predicted differently: {times}."

    def _who_pays(self) -> list[str]:
        errors = [(g.mse, g.mse_interval, g.group) for g in self.groups if g.mse is not None and g.mse_interval]
        if not errors:
            return []
        best, worst = min(errors), max(errors)
        if best[1][1] >= worst[1][0]:
            return ["The model errs about as much in every group."]
        return [
            f"The model errs most on {worst[2]}: mean squared error {number(worst[0])}, {number(best[0])} on {best[2]}."
        ]


def audit_predictions(predictions: Any, groups: pd.DataFrame, y: Any = None, *, seed: int = 0) -> Audit:
    """Figures of predictions (rows,) for the groups of the sensitive columns, with errors when there are labels."""
    scores = np.asarray(predictions, dtype=np.float64)
    truth = None if y is None else np.asarray(y, dtype=np.float64)
    labels, codes = check_groups(groups, len(scores), "error")
    floor = ks_floor(sensitive_features=codes, y_pred=scores, random_state=seed)
    names = [label_text(label) for label in labels]
    return Audit(
        rows=len(scores),
        ks=ks_distance(scores, sensitive_features=codes),
        ks_interval=ks_distance_ci(scores, sensitive_features=codes, floor=floor, random_state=seed),
        ks_floor=floor,
        mean_gap=mean_gap(scores, sensitive_features=codes),
        variance_gap=variance_gap(scores, sensitive_features=codes),
        wasserstein=wasserstein_distance(scores, sensitive_features=codes),
        mse=None if truth is None else float(np.mean((scores - truth) ** 2)),
        widest=_widest(scores, codes, names),
        groups=tuple(_figures(name, codes == code, scores, truth, seed) for code, name in enumerate(names)),
    )


def _figures(name: str, mine: NDArray[np.bool_], scores: Array, truth: Array | None, seed: int) -> GroupFigures:
    errors = None if truth is None else scores[mine] - truth[mine]
    return GroupFigures(
        group=name,
        rows=int(mine.sum()),
        mean=float(scores[mine].mean()),
        mean_interval=_mean_interval(scores[mine]),
        std=float(scores[mine].std(ddof=1)),
        ks_to_rest=ks_distance(scores, sensitive_features=mine),
        ks_to_rest_interval=ks_distance_ci(scores, sensitive_features=mine, random_state=seed),
        mse=None if errors is None else float(np.mean(errors**2)),
        mse_interval=None if errors is None else _mean_interval(errors**2),
        mean_error=None if errors is None else float(errors.mean()),
    )


def _mean_interval(values: Array, confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of a mean; of squares it starts at 0 at the least."""
    n, mean = len(values), float(values.mean())
    half = float(student.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    low = max(0.0, mean - half) if values.min() >= 0 else mean - half
    return low, mean + half


def _widest(scores: Array, codes: NDArray[np.intp], names: list[str]) -> Widest:
    thresholds = np.unique(scores)
    below = np.stack(
        [
            np.searchsorted(np.sort(scores[codes == g]), thresholds, side="right") / np.count_nonzero(codes == g)
            for g in range(len(names))
        ]
    )  # (groups, thresholds): F_g
    at = int(np.ptp(below, axis=0).argmax())
    more, fewer = int(below[:, at].argmax()), int(below[:, at].argmin())
    return Widest(float(thresholds[at]), names[more], float(below[more, at]), names[fewer], float(below[fewer, at]))
