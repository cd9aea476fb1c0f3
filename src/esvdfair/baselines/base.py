"""What the baselines share: checked inputs, group codes and seeded generators."""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label, encode_groups

Floats: TypeAlias = NDArray[np.float64]
FittedOn: TypeAlias = Literal["scores", "targets"]
RandomState: TypeAlias = int | np.random.Generator | None


class FitRows(NamedTuple):
    """The rows a baseline learns from.

    ``values`` (rows,) are the scores or the targets, ``codes`` (rows,) index ``labels``, ``weight`` (rows,)
    is all ones when no sample weight was given.
    """

    values: Floats
    labels: tuple[Label, ...]
    codes: NDArray[np.intp]
    weight: Floats

    def proportions(self) -> Floats:
        """Weighted share of every group, shape (groups,), sums to 1."""
        mass = np.bincount(self.codes, weights=self.weight, minlength=len(self.labels))
        return np.asarray(mass / mass.sum(), dtype=np.float64)


def as_column(values: Any, *, name: str) -> Floats:
    """One finite float64 per row, from an array-like or tensor of shape (rows,) or (rows, 1)."""
    if hasattr(values, "detach"):  # a torch tensor, on whichever device
        values = values.detach().cpu().numpy()
    column = np.asarray(values, dtype=np.float64)
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.ndim != 1 or column.size == 0:
        raise ValueError(
            f"{name} has shape {column.shape}; expected one number for each row, shape (rows,), at least one row."
        )
    bad = int(np.count_nonzero(~np.isfinite(column)))
    if bad:
        raise ValueError(
            f"{name} has {bad} missing or infinite values among {column.size} rows; a distribution cannot be "
            "estimated from them. Drop or impute those rows."
        )
    return column


def as_weight(sample_weight: Any, rows: int) -> Floats:
    """Non-negative weights, one for each row; all ones for None."""
    if sample_weight is None:
        return np.ones(rows)
    weight = as_column(sample_weight, name="sample_weight")
    check_rows("sample_weight", weight.size, rows)
    if weight.min() < 0:
        raise ValueError(f"sample_weight has the negative value {weight.min()}; give weights of at least 0.")
    return weight


def check_rows(name: str, got: int, rows: int) -> None:
    """Fail when ``name`` does not have one entry for each of the ``rows`` scores."""
    if got != rows:
        raise ValueError(f"{name} has {got} rows but scores has {rows}; they must describe the same rows.")


def fit_rows(
    scores: Any, y: Any, *, sensitive_features: Any, sample_weight: Any, fitted_on: FittedOn = "scores"
) -> FitRows:
    """Check what ``fit`` was given and choose the values whose distributions are estimated.

    ``fitted_on="targets"`` takes the training targets y, as the authors of the paper did; the maps so found are
    later applied to model scores all the same.

    Raises
    ------
    ValueError
        Targets asked for but not given, lengths that differ, fewer than two groups, a group of zero weight.
    """
    if fitted_on not in ("scores", "targets"):
        raise ValueError(f"fitted_on is {fitted_on!r}; expected 'scores' or 'targets'.")
    values = as_column(scores, name="scores")
    if fitted_on == "targets":
        if y is None:
            raise ValueError("fitted_on='targets' needs the training targets; pass y to fit.")
        rows, values = values.size, as_column(y, name="y")
        check_rows("y", values.size, rows)
    labels, codes = encode_groups(sensitive_features)
    check_rows("sensitive_features", codes.size, values.size)
    if len(labels) < 2:
        raise ValueError(f"only one group, {labels[0]!r}, among {codes.size} rows; parity needs at least two.")
    weight = as_weight(sample_weight, values.size)
    mass = np.bincount(codes, weights=weight, minlength=len(labels))
    if mass.min() <= 0:
        raise ValueError(f"group {labels[int(mass.argmin())]!r} has zero total sample_weight; drop it or weigh it.")
    return FitRows(values, labels, codes, weight)


def known_codes(sensitive_features: Any, labels: tuple[Label, ...], rows: int) -> NDArray[np.intp]:
    """Position in ``labels`` of each row's group; fails on a group that ``fit`` has not seen."""
    got, codes = encode_groups(sensitive_features)
    check_rows("sensitive_features", codes.size, rows)
    position = {label: i for i, label in enumerate(labels)}
    unseen = [label for label in got if label not in position]
    if unseen:
        raise ValueError(
            f"sensitive_features has groups {unseen} that were not in fit, which saw {list(labels)}; there is no "
            "map for them. Fit on rows of every group."
        )
    return np.array([position[label] for label in got], dtype=np.intp)[codes]


def label_array(labels: tuple[Label, ...]) -> NDArray[Any]:
    """Labels as a one-dimensional array, also when they are tuples (intersections of attributes) or of mixed type."""
    if isinstance(labels[0], tuple) or len({type(label) for label in labels}) > 1:
        array = np.empty(len(labels), dtype=object)
        array[:] = labels
        return array
    return np.asarray(labels)


def generator(random_state: RandomState, *, purpose: int) -> np.random.Generator:
    """A generator for one purpose (0 for fit, 1 for predict), so that the two never share draws.

    An integer gives the same draws at every call, None fresh ones, a Generator is used as it stands and moves on.
    """
    if random_state is None or isinstance(random_state, np.random.Generator):
        return np.random.default_rng(random_state)
    return np.random.default_rng([random_state, purpose])
