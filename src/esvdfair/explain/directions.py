"""Along which directions of a layer the groups are apart, and which input features these follow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from esvdfair.batches import Batches, Data, as_rows, is_stream, make_batches, row_key
from esvdfair.core import gaps
from esvdfair.core.checks import Label, several_inputs, to_numpy
from esvdfair.core.edits import edit_exact
from esvdfair.core.moments import GroupMoments
from esvdfair.estimator import ESVDFair
from esvdfair.explain.layers import covariance_sigmas
from esvdfair.models import adapt
from esvdfair.models.base import LinearLayer, ModelAdapter, find_layer
from esvdfair.text import signed

Array = NDArray[np.float64]

FEATURES = 3
"""Features listed with every direction."""
MAX_CATEGORIES = 50
"""Of a column that is not numeric, so many of its most frequent values are looked at."""
ROUNDING = 1e-12
"""A gap below this part of the layer's spread is rounding."""
STABLE = 0.7
"""From this |cos| on, two half samples agree on more than half of a direction."""


@dataclass(frozen=True)
class Direction:
    """One direction u of a layer's output z.

    Attributes
    ----------
    kind : "mean" (the groups' means differ along it) or "covariance" (their spreads do)
    rank : 1 has the largest share
    sigma_before, sigma_after : the gap along it, before and after the repair: the length of ``uᵀWDᵀ`` for means; for
        spreads ``|uᵀWMWᵀu|^½``, the root of the difference of variances, or ``‖uᵀWS_v‖`` of more than two groups
    share : part of what ``share_of`` names: ``σ²/Σσ²`` (mean), ``σ⁴/Σσ⁴`` (covariance)
    group_means, group_sds : mean and standard deviation of ``uᵀz`` in every group, ordered as ``Directions.groups``
    features : (name, correlation) of the input columns that ``uᵀz`` correlates with most; u points to where the first
        of them grows. Empty when no column varies.
    share_of : "gap", which the squared shares add up to exactly, or "bound": of the spreads of more than two groups
        only ``d_v² ≤ Σσ⁴`` is split
    difference : mean, or variance, of the first group minus that of the second along u; None for more than two groups
    stability : ``|cos|`` between this direction in two halves of the rows; None when a half is too small to have it
    """

    kind: str
    rank: int
    sigma_before: float
    sigma_after: float
    share: float
    group_means: tuple[float, ...]
    group_sds: tuple[float, ...]
    features: tuple[tuple[str, float], ...]
    share_of: str
    difference: float | None
    stability: float | None

    @property
    def stable(self) -> bool:
        """Whether other people from the same population would show it too; False also when that is not known."""
        return self.stability is not None and self.stability >= STABLE

    @property
    def follows(self) -> str:
        """The inputs that it goes with, in words, if it is a direction that other people would show."""
        if self.stable:
            return ", ".join(f"{name} {signed(correlation)}" for name, correlation in self.features) or "–"
        known = "" if self.stability is None else f" (|cos| {self.stability:.2f})"
        return f"not the same in two halves of the rows{known}"


@dataclass(frozen=True)
class Directions:
    """The explainable SVD of one layer.

    Attributes
    ----------
    layer, index : of the layer
    after : what "after" means: "repaired model", or "exact edit" of this layer with the default reductions
    groups : labels of the groups
    mean_gap_before, mean_gap_after : d_e²
    covariance_gap_before, covariance_gap_after : d_v²
    spectrum_before, spectrum_after : all singular values of ``W S_v``, largest first: ``d_v² ≤ Σσ⁴``
    mean, covariance : tuples of Direction, the largest share first; empty when there is no such gap
    """

    layer: str
    index: int
    after: str
    groups: tuple[Label, ...]
    mean_gap_before: float
    mean_gap_after: float
    covariance_gap_before: float
    covariance_gap_after: float
    spectrum_before: tuple[float, ...]
    spectrum_after: tuple[float, ...]
    mean: tuple[Direction, ...]
    covariance: tuple[Direction, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row for each direction, those of the mean first."""
        plain = ["kind", "rank", "sigma_before", "sigma_after", "share", "share_of", "difference", "stability"]
        columns = [*plain, *(f"{what}[{group}]" for what in ("mean", "sd") for group in self.groups)]
        columns += [f"{what}_{i + 1}" for i in range(FEATURES) for what in ("feature", "correlation")]
        rows = []
        for d in (*self.mean, *self.covariance):
            features = [*d.features, *[(None, None)] * (FEATURES - len(d.features))]
            flat = (value for pair in features for value in pair)
            rows.append((*(getattr(d, name) for name in plain), *d.group_means, *d.group_sds, *flat))
        return pd.DataFrame(rows, columns=columns)


def explain_directions(
    model: Any,
    X: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    control_features: Any = None,
    layer: int | str = -2,
    top: int = 10,
    feature_names: Sequence[str] | None = None,
    output: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
) -> Directions:
    """Split the gap after a layer into directions, and name the input features that follow each of them.

    Parameters
    ----------
    model : estimator, torch.nn.Module, str, Path, bytes or fitted ESVDFair
        The model. For a fitted ESVDFair, "after" is its repaired model; else it is the exact edit of this layer.
    X : array-like, DataFrame, tensor or sparse matrix
        Rows in memory, (rows, features).
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row. Rows of weight 0 are left out.
    control_features : array-like or DataFrame, default=None
        Strata to adjust for, as in :meth:`esvdfair.ESVDFair.fit`.
    layer : int or str, default=-2
        Index among the linear layers, or name.
    top : int, default=10
        Largest number of directions of each kind.
    feature_names : sequence of str, default=None
        Names of the columns of X. If None, those of a DataFrame, else x0, x1, …
    output : str, int or callable, default=None
        Which output is the prediction, as in :class:`esvdfair.ESVDFair`.
    missing : {"error", "group"}, default="error"
        Whether a missing attribute value is an error or a group of its own.
    batch_size : int, default=8192
        Rows that run through the model at once.

    Returns
    -------
    Directions
        Directions of the mean gap and of the covariance gap.

    Raises
    ------
    ValueError
        If X is a stream of batches, there is only one group, the layer does not exist, or names do not match the
        columns.

    Notes
    -----
    Mean: ``W Dᵀ = Σ σ_i u_i a_iᵀ``, the rows of D being the mean differences of all pairs of groups, so that
    ``d_e² = Σσ_i²`` with at most G − 1 directions: the paper's ``W S_e`` for ε → 0. Covariance, two groups:
    ``W M Wᵀ = Σ λ_i u_i u_iᵀ``, signed and exact, ``d_v² = Σλ_i²`` and ``σ_i = |λ_i|^½``; more groups: the paper's
    ``W S_v = Σ σ_i u_i v_iᵀ``, which splits the bound.

    Differs from the paper: it splits the bound ``Σσ⁴ ≥ d_v²`` for two groups too.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPRegressor
    >>> from esvdfair.explain import explain_directions
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 500)
    >>> X = rng.normal(size=(500, 2)) + a[:, None] * [1, 0]
    >>> model = MLPRegressor(hidden_layer_sizes=(8,), max_iter=1000, random_state=0).fit(X, X.sum(axis=1))
    >>> "kind" in explain_directions(model, X, sensitive_features=a).to_frame()
    True
    """
    if is_stream(X):
        raise ValueError(
            "X yields batches, but correlating with every input column needs the rows in memory. Pass a sample of them "
            "as an array or DataFrame."
        )
    if not top >= 1:
        raise ValueError(f"top={top!r}; it says how many directions to describe, so give 1 or more.")
    X = as_rows(X)
    names = name_features(X, feature_names)
    data = Data(X, None, sensitive_features, sample_weight, control_features)
    batches = make_batches(data, missing=missing, batch_size=batch_size)
    adapter, repaired = _adapters(model, output)
    before, *halves = _read_layer(adapter, batches, layer)
    old = before.layer
    if repaired is None:
        edit = edit_exact(old.weight, before.moments, bias=old.bias, layer=old.name)[-1]
        after = _LayerState(replace(old, weight=edit.weight_after, bias=edit.bias_after), before.moments)
    else:
        after = _read_layer(repaired, batches, old.index)[0]
    shown = [u[:, :top] for _, u in before.axes.values()]
    followed, correlations = correlate(*_project(adapter, batches, old, np.hstack(shown)), X, names)
    found: dict[str, Any] = {}
    for kind, along in zip(before.axes, np.split(correlations, [shown[0].shape[1]]), strict=True):
        found[kind] = tuple(before.describe(kind, along, followed, after, halves))
    for when, state in (("before", before), ("after", after)):
        w, moments = state.layer.weight, state.moments
        found[f"mean_gap_{when}"] = gaps.squared_mean_gap(w, moments)
        found[f"covariance_gap_{when}"] = gaps.squared_covariance_gap(w, moments)
        found[f"spectrum_{when}"] = tuple(covariance_sigmas(w, moments).tolist())
    what = "exact edit" if repaired is None else "repaired model"
    return Directions(layer=old.name, index=old.index, after=what, groups=before.moments.labels, **found)


@dataclass(frozen=True)
class _LayerState:
    """A layer and the moments of its inputs, before or after a repair."""

    layer: LinearLayer
    moments: GroupMoments

    def form(self, kind: str) -> Array:
        """(m, m) A of which ``uᵀAu`` is the gap along u: ``W DᵀD Wᵀ``; ``W M Wᵀ`` of two groups, ``W|M|Wᵀ`` of more."""
        if kind == "mean":
            found = self.layer.weight @ self.moments.mean_differences().T
            return np.asarray(found @ found.T)
        axes, values = gaps.covariance_spectrum(self.moments)
        found = self.layer.weight @ axes
        return np.asarray((found * values) @ found.T)

    @cached_property
    def axes(self) -> dict[str, tuple[Array, Array]]:
        """Of each kind (k,) gaps σ², the largest first, and their (m, k) u: ``A = Σ ±σ_i² u_i u_iᵀ``."""
        return {kind: self._axes(kind) for kind in ("mean", "covariance")}

    def _axes(self, kind: str) -> tuple[Array, Array]:
        """Those that are more than rounding."""
        values, u = scipy.linalg.eigh(self.form(kind))
        order = np.argsort(-np.abs(values), kind="stable")
        gap = np.abs(values[order])  # squared differences of means, or differences of variances
        scatter = self.moments.pooled_scatter() / self.moments.pooled_weight
        spread = float(np.sum((self.layer.weight @ scatter) * self.layer.weight))
        least = max(ROUNDING**2 * spread, ROUNDING * gap[0]) if kind == "mean" else ROUNDING * spread
        count = np.count_nonzero(gap > least)
        return gap[:count], u[:, order[:count]]

    def along(self, u: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """uᵀz̄ and √(uᵀ W Cov_g Wᵀ u) of every group."""
        p, shift = u @ self.layer.weight, 0.0 if self.layer.bias is None else float(u @ self.layer.bias)
        sds = (float(np.sqrt(max(p @ covariance @ p, 0.0))) for covariance in self.moments.covariances())
        return tuple((self.moments.means @ p + shift).tolist()), tuple(sds)

    def describe(
        self, kind: str, correlations: Array, names: Sequence[str], after: "_LayerState", halves: list["_LayerState"]
    ) -> Iterator[Direction]:
        """The first directions u of a kind, those whose correlations (k, p) with the p named inputs are given."""
        gap, u = self.axes[kind]
        power, rest = gap ** (1 if kind == "mean" else 2), after.form(kind)
        again = [half.axes[kind][1].T for half in halves]
        for i, along in enumerate(correlations):
            strongest = np.argsort(-np.abs(along), kind="stable")[:FEATURES]
            # A singular vector has no sign of its own: let the feature that it follows most grow along it.
            sign = -1.0 if len(strongest) and along[strongest[0]] < 0 else 1.0
            axis = sign * u[:, i]
            means, sds = self.along(axis)
            two, known = len(means) == 2, again and i < min(map(len, again))
            difference = means[0] - means[1] if kind == "mean" else sds[0] ** 2 - sds[1] ** 2
            yield Direction(
                kind=kind,
                rank=i + 1,
                sigma_before=float(gap[i] ** 0.5),
                sigma_after=float(abs(axis @ rest @ axis) ** 0.5),
                share=float(power[i] / power.sum()),
                group_means=means,
                group_sds=sds,
                features=tuple((names[j], float(sign * along[j])) for j in strongest),
                share_of="gap" if kind == "mean" or two else "bound",
                difference=difference if two else None,
                stability=min(abs(float(again[0][i] @ again[1][i])), 1.0) if known else None,
            )


def _read_layer(adapter: ModelAdapter, batches: Batches, which: int | str) -> list[_LayerState]:
    """A layer with the moments of its inputs over all rows, and over two halves of them if each has all groups."""
    first = next(iter(batches), None)
    if first is None:
        raise ValueError("X has no rows; there is nothing to explain.")
    layer = find_layer(adapter.layers(first.x), which)
    whole, *halves = (GroupMoments() for _ in range(3))
    for batch in batches:
        inputs = adapter.capture(batch.x, [layer.name])[0][layer.name]
        weight = np.ones(len(batch.codes)) if batch.weight is None else batch.weight
        left = row_key(batch.row_id, 0) < 0.5
        for moments, chosen in ((whole, 1.0), (halves[0], left), (halves[1], ~left)):
            moments.update_codes(inputs, batch.labels, batch.codes, weight * chosen)
    full = all(half.labels == whole.labels and half.rows.min() >= 2 for half in halves)
    found = [whole, *halves] if full else [whole]
    if first.group_parts:
        found = [moments.adjusted(first.group_parts) for moments in found]
    found[0].require_groups(rows=2)
    return [_LayerState(layer, moments) for moments in found]


def _adapters(model: Any, output: Any) -> tuple[ModelAdapter, ModelAdapter | None]:
    """The original model, and the repaired one of a fitted ESVDFair."""
    if not isinstance(model, ESVDFair):
        return adapt(model, output=output), None
    check_is_fitted(model, "estimator_")
    if output is not None:
        raise ValueError(f"output={output!r} was given, but this ESVDFair has an output of its own: drop it.")
    return adapt(model.model_, output=model.output), adapt(model.estimator_, output=model.output)


def _project(adapter: ModelAdapter, batches: Batches, layer: LinearLayer, u: Array) -> tuple[Array, Array]:
    """(rows, k) ``Z u`` up to the bias, averaged over middle axes (a sequence); and the weight of every row."""
    projected, weights = [], []
    for batch in batches:
        inputs = to_numpy(adapter.capture(batch.x, [layer.name])[0][layer.name]).astype(np.float64)
        x = inputs.reshape(len(batch.codes), -1, layer.weight.shape[1]).mean(axis=1)
        projected.append(x @ (layer.weight.T @ u))
        weights.append(np.ones(len(x)) if batch.weight is None else batch.weight)
    return np.concatenate(projected), np.concatenate(weights)


# --- input features ------------------------------------------------------------------------------------------------


def name_features(X: Any, given: Sequence[str] | None = None) -> list[str]:
    """Names of the columns of X: those given, those of a DataFrame, or x0, x1, …; rows of any shape count as flat.

    Of several inputs the columns are called name[0], name[1], …
    """
    columns = _as_frame(X).columns
    if given is not None and len(given) != len(columns):
        raise ValueError(f"feature_names holds {len(given)} names, X has {len(columns)} columns; give one for each.")
    return [str(name) for name in (columns if given is None else given)]


def correlate(values: Array, weight: Array, X: Any, names: Sequence[str] | None = None) -> tuple[list[str], Array]:
    """Names of the p columns of X that vary, and their Pearson correlation (k, p) with k values (rows, k).

    It is 0 for values that do not vary. A column that is not numeric becomes one indicator for each of its most
    frequent values, named "column=value". Rows where a column is missing do not count for that column.
    """
    found = []
    for name, column in _numeric_columns(_as_frame(X), names or name_features(X)):
        known = np.isfinite(column) & (weight > 0)
        if not known.any():
            continue
        share, x, z = weight[known] / weight[known].sum(), column[known], values[known]
        least, leasts = ((1e-12 * np.abs(v).max(axis=0)) ** 2 for v in (x, z))  # what rounding of the mean leaves
        x, z = x - share @ x, z - share @ z
        spread, spreads, cross = share @ x**2, share @ z**2, (share * x) @ z
        if spread > least:
            varies = spreads > leasts
            found.append((name, np.divide(cross, np.sqrt(spread * spreads), out=np.zeros_like(cross), where=varies)))
    correlations = np.array([each for _, each in found]).reshape(len(found), values.shape[1]).T
    return [name for name, _ in found], np.clip(correlations, -1.0, 1.0)


def _numeric_columns(table: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
    for name, (_, column) in zip(names, table.items(), strict=True):
        column = column.infer_objects()
        if pd.api.types.is_numeric_dtype(column.dtype):
            yield name, column.to_numpy(dtype=np.float64, na_value=np.nan)
            continue
        for value in column.value_counts().index[:MAX_CATEGORIES]:
            indicator = (column == value).to_numpy(dtype=np.float64, na_value=np.nan)
            yield f"{name}={value}", np.where(column.isna(), np.nan, indicator)


def _as_frame(X: Any) -> pd.DataFrame:
    """X as a DataFrame; several inputs side by side."""
    if (several := several_inputs(X)) is not None:
        named = []
        for name, part in several.items():
            table = _as_frame(part)
            columns = getattr(part, "columns", range(table.shape[1]))
            named.append(table.set_axis([f"{name}[{column}]" for column in columns], axis=1).reset_index(drop=True))
        return pd.concat(named, axis=1)
    if isinstance(X, pd.DataFrame):
        return X
    if hasattr(X, "tocsc"):
        sparse: pd.DataFrame = pd.DataFrame.sparse.from_spmatrix(X.tocsc())  # type: ignore[attr-defined]
        return sparse.add_prefix("x")
    values = to_numpy(X)
    return pd.DataFrame(values.reshape(len(values), int(np.prod(values.shape[1:])))).add_prefix("x")
