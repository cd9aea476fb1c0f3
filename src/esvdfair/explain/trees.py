"""Which input columns and which trees the difference in means of a tree ensemble comes from."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esvdfair.batches import Data, as_rows, make_batches
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
    """

    groups: tuple[Label, Label]
    mean_gap: float
    columns: tuple[tuple[str, float], ...]
    trees: tuple[float, ...]

    def to_frame(self) -> pd.DataFrame:
        """The columns as a table with ``column``, ``mean_gap`` and ``share``."""
        table = pd.DataFrame(self.columns, columns=["column", "mean_gap"])
        return table.assign(share=table["mean_gap"] / self.mean_gap if self.mean_gap else np.nan)


def explain_trees(
    model: Any, X: Any, *, sensitive_features: Any, sample_weight: Any = None, missing: str = "error"
) -> TreeGap:
    """Split the difference in means of a tree ensemble by input column and by tree.

    With d(n) the share of the first group's rows that pass a node n minus that of the second's, and v̄(n) the mean leaf
    value of all rows below n, a split of n into a and b adds ``d(a)v̄(a) + d(b)v̄(b) − d(n)v̄(n)`` to the part of its
    column. The parts of a tree add up to ``Σ_leaf d·v``, which is its difference in means. Of more than two groups, the
    two whose means are farthest apart are compared.

    Parameters
    ----------
    model : tree ensemble, as :class:`esvdfair.ESVDFair` takes it, before or after the repair
    X, sensitive_features, sample_weight, missing : as in :class:`esvdfair.ESVDFair` and its ``fit``

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
    adapter = adapt(model)
    if not isinstance(adapter, TreeAdapter):
        raise TypeError(f"a {type(model).__name__} is no tree ensemble. Use explain_directions or scan_layers.")
    library = adapter.library
    nodes = int(library.starts[-1])
    labels: tuple[Label, ...] = ()
    masses, totals = np.zeros((0, nodes)), np.zeros(0)
    for batch in make_batches(Data(as_rows(X), None, sensitive_features, sample_weight), missing=missing):
        labels = batch.labels
        if not len(masses):
            masses, totals = np.zeros((len(labels), nodes)), np.zeros(len(labels))
        leaves, weight = adapter.leaves(batch.x), np.ones(len(batch.codes)) if batch.weight is None else batch.weight
        for group in range(len(labels)):
            rows = np.flatnonzero(batch.codes == group)
            repeated = np.repeat(weight[rows], leaves.shape[1])
            masses[group] += np.bincount(leaves[rows].ravel(), repeated, minlength=nodes)
            totals[group] += weight[rows].sum()
    means = masses @ library.values / totals
    first, second = int(np.argmax(means)), int(np.argmin(means))
    if first == second:
        first, second = 0, 1
    apart, pooled = masses[first] / totals[first] - masses[second] / totals[second], masses.sum(axis=0)
    names = _names(adapter, X)
    parts: dict[str, float] = {}
    by_tree = []
    values = library.values
    for place, tree in enumerate(library.trees()):
        part = slice(*library.starts[place : place + 2])
        gains = _gains(tree, values[part], apart[part], pooled[part])
        by_tree.append(float(gains.sum()))
        inner = np.flatnonzero(tree.left >= 0)
        for column in np.unique(tree.column[inner]).tolist():
            name = SEVERAL if column < 0 else names[column] if column < len(names) else str(column)
            parts[name] = parts.get(name, 0.0) + float(gains[inner][tree.column[inner] == column].sum())
    ranked = sorted(parts.items(), key=lambda item: -abs(item[1]))
    return TreeGap((labels[first], labels[second]), float(apart @ values), tuple(ranked), tuple(by_tree))


def _gains(tree: Tree, values: Array, apart: Array, pooled: Array) -> Array:
    """(N,) what the split of each node adds to the difference in means; 0 at leaves."""
    apart, pooled, total = apart.copy(), pooled.copy(), pooled * values
    levels = tree.levels()
    for nodes in reversed(levels):
        for sums in (apart, pooled, total):
            sums[nodes] = sums[tree.left[nodes]] + sums[tree.right[nodes]]
    share = apart * np.divide(total, pooled, out=np.zeros_like(total), where=pooled > 0)
    gains = np.zeros_like(share)
    for nodes in levels:
        gains[nodes] = share[tree.left[nodes]] + share[tree.right[nodes]] - share[nodes]
    return gains


def _names(adapter: TreeAdapter, X: Any) -> list[str]:
    """Names of the columns that the trees see: the table's, unless the model or a Pipeline has others."""
    own = adapter.library.columns
    if own is None and hasattr(X, "columns"):
        own = list(X.columns)
    return [str(name) for name in own or ()]
