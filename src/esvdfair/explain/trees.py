"""Which input columns and which trees the difference in means of a tree ensemble comes from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.batches import Batch, Data, as_rows, make_batches
from esvdfair.core.checks import Label
from esvdfair.models import adapt
from esvdfair.models.tree_libraries import Tree
from esvdfair.models.trees import TreeAdapter

Array = NDArray[np.float64]

SEVERAL = "several columns"
"""Stands for splits on a combination of columns."""


@dataclass(frozen=True)
class TreeGap:
    """The difference in means between two groups, before the link of the model, split by column and by tree.

    Attributes
    ----------
    groups : the two groups; differences are those of the first minus the second
    mean_gap : difference in means of the sums of leaf values
    columns : (name, part) of every column that the trees split on, largest part first; the parts add up to ``mean_gap``
    trees : (trees,) part of each tree; they add up to ``mean_gap``
    shap : (name, part) of every column by TreeSHAP, largest first, which also add up; None if not asked for
    """

    groups: tuple[Label, Label]
    mean_gap: float
    columns: tuple[tuple[str, float], ...]
    trees: tuple[float, ...]
    shap: tuple[tuple[str, float], ...] | None = None

    def to_frame(self) -> pd.DataFrame:
        """The columns as a table with ``column``, ``mean_gap`` and ``share``, and ``shap`` if it was asked for."""
        table = pd.DataFrame(self.columns, columns=["column", "mean_gap"])
        table["share"] = table["mean_gap"] / self.mean_gap if self.mean_gap else np.nan
        return table if self.shap is None else table.assign(shap=table["column"].map(dict(self.shap)))


def explain_trees(
    model: Any,
    X: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    missing: str = "error",
    output: Any = None,
    shap: bool = False,
) -> TreeGap:
    """Split the difference in means of a tree ensemble by input column and by tree.

    The parts add up exactly. Of more than two groups, the two whose means differ most are compared.

    Parameters
    ----------
    model : tree ensemble
        As :class:`esvdfair.ESVDFair` takes it, original or repaired.
    X : array-like, DataFrame, tensor or sparse matrix
        Rows in memory, (rows, features).
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row. Rows of weight 0 are left out.
    missing : {"error", "group"}, default="error"
        Whether a missing attribute value is an error or a group of its own.
    output : str, int or callable, default=None
        Which output is the prediction, as in :class:`esvdfair.ESVDFair`.
    shap : bool, default=False
        Also split by the mean TreeSHAP values of LightGBM, XGBoost or CatBoost, which takes longer.

    Returns
    -------
    TreeGap
        Parts by column and by tree.

    Notes
    -----
    With d(n) the share of the first group's rows that pass a node n minus that of the second's, and v̄(n) the mean leaf
    value of all rows below n, a split of n into a and b adds ``d(a)v̄(a) + d(b)v̄(b) − d(n)v̄(n)`` to the part of its
    column. The parts of a tree add up to ``Σ_leaf d·v``, which is its difference in means.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.ensemble import GradientBoostingRegressor
    >>> from esvdfair.explain import explain_trees
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 500)
    >>> X = rng.normal(size=(500, 2)) + a[:, None] * [1, 0]
    >>> model = GradientBoostingRegressor(random_state=0).fit(X, X.sum(axis=1))
    >>> explain_trees(model, X, sensitive_features=a).columns[0][0]
    '0'
    """
    adapter = adapt(model, output=output)
    if not isinstance(adapter, TreeAdapter):
        raise TypeError(f"a {type(model).__name__} is no tree ensemble. Use explain_directions or scan_layers.")
    batches = make_batches(Data(as_rows(X), None, sensitive_features, sample_weight), missing=missing)
    labels, masses, contributions = _sum_groups(adapter, batches, shap=shap)
    values = adapter.library.values
    first_tree = masses[:, : adapter.library.sizes[0]]  # of which every row reaches one leaf
    totals = first_tree.sum(axis=1, keepdims=True)
    means = masses @ values / totals[:, 0]
    first, second = int(np.argmax(means)), int(np.argmin(means))
    if first == second:
        first, second = 0, 1
    apart = masses[first] / totals[first] - masses[second] / totals[second]
    columns, trees = _split(adapter, X, apart, masses.sum(axis=0))
    shown = None
    if contributions is not None:
        parts = contributions[first] / totals[first] - contributions[second] / totals[second]
        shown = _ranked({_name(adapter.names(X), place): float(part) for place, part in enumerate(parts)})
    return TreeGap((labels[first], labels[second]), float(apart @ values), _ranked(columns), tuple(trees), shown)


def _sum_groups(
    adapter: TreeAdapter, batches: Iterable[Batch], *, shap: bool
) -> tuple[tuple[Label, ...], Array, Array | None]:
    """The groups, the weight of their rows at each node (groups, nodes), and times TreeSHAP (groups, columns)."""
    labels: tuple[Label, ...] = ()
    masses, contributions, nodes = np.zeros((0, 0)), None, int(adapter.library.starts[-1])
    for batch in batches:
        if not labels:
            labels, masses = batch.labels, np.zeros((len(batch.labels), nodes))
        weight = np.ones(len(batch.codes)) if batch.weight is None else batch.weight
        leaves = adapter.leaves(batch.x)
        for group, mass in enumerate(masses):
            rows = np.flatnonzero(batch.codes == group)
            mass += np.bincount(leaves[rows].ravel(), np.repeat(weight[rows], leaves.shape[1]), minlength=nodes)
        if shap:
            one_hot = (np.arange(len(labels))[:, None] == batch.codes) * weight
            contributions = one_hot @ adapter.contributions(batch.x) + (0 if contributions is None else contributions)
    if not labels:
        raise ValueError("`X` has no rows.")
    return labels, masses, contributions


def _split(adapter: TreeAdapter, X: Any, apart: Array, pooled: Array) -> tuple[dict[str, float], list[float]]:
    """Parts of the columns by name, and of the trees."""
    library, names = adapter.library, adapter.names(X)
    columns: dict[str, float] = {}
    trees = []
    for place, tree in enumerate(library.trees()):
        part = slice(*library.starts[place : place + 2])
        gains = _gains(tree, library.values[part], apart[part], pooled[part])
        trees.append(float(gains.sum()))
        inner = np.flatnonzero(tree.left >= 0)
        for column in np.unique(tree.column[inner]).tolist():
            name = _name(names, column)
            columns[name] = columns.get(name, 0.0) + float(gains[inner][tree.column[inner] == column].sum())
    return columns, trees


def _name(names: Sequence[str] | None, column: int) -> str:
    if column < 0:
        return SEVERAL
    return names[column] if names is not None and column < len(names) else str(column)


def _ranked(parts: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(parts.items(), key=lambda item: -abs(item[1])))


def _gains(tree: Tree, values: Array, apart: Array, pooled: Array) -> Array:
    """(N,) what the split of each node adds to the difference in means; 0 at leaves."""
    apart, pooled, total = apart.copy(), pooled.copy(), pooled * values
    tree.add_up(apart, pooled, total)
    share = apart * np.divide(total, pooled, out=np.zeros_like(total), where=pooled > 0)
    inner = np.flatnonzero(tree.left >= 0)
    gains = np.zeros_like(share)
    gains[inner] = share[tree.left[inner]] + share[tree.right[inner]] - share[inner]
    return gains
