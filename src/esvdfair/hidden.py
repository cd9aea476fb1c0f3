"""`paper` and `exact`: edit a hidden layer, then refit the last one on the features that the edit leaves.

They read the rows once for the moments of the layer, and once more for the features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from esvdfair.batches import ArrayBatches, Batch, Batches, Splitter, row_key
from esvdfair.core.checks import Label, row_count, several_inputs
from esvdfair.core.edits import edit_exact, edit_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit, finetune
from esvdfair.exceptions import InputError
from esvdfair.methods import Candidates, Effort, Problem, Refits, account_for, after_edits, parity_at, plain_fit
from esvdfair.models.base import LinearLayer, ModelAdapter
from esvdfair.summary import Watch

REFIT_RIDGE = 1e-4
"""Of the closed-form refits, about the original weights; without one, features of condition 1e11 let the error
explode."""


class Read(Protocol):
    """Reads the rows with a model, the original one or one with an edited layer, and divides them for the solve."""

    def __call__(self, adapter: ModelAdapter, *, watch: Watch | None = None) -> Problem: ...


class LayerMoments:
    """Moments of the inputs of some layers, of the rows that train and of those that ``split`` holds out."""

    def __init__(self, names: Sequence[str], split: Splitter | None) -> None:
        self.names: Sequence[str] = tuple(names)
        self._split, self._parts = split, 0
        self._found = {name: (GroupMoments(), GroupMoments()) for name in names}

    def add(self, batch: Batch, inputs: Mapping[str, Any]) -> None:
        """Add the rows of a batch."""
        self._parts = batch.group_parts
        weight = np.ones(len(batch.codes)) if batch.weight is None else batch.weight
        out = np.zeros(len(weight), dtype=bool) if self._split is None else self._split(batch.row_id)
        for name in self.names:
            for moments, chosen in zip(self._found[name], (~out, out), strict=True):
                moments.update_codes(inputs[name], batch.labels, batch.codes, weight * chosen)

    def of(self, name: str, problem: Problem) -> GroupMoments:
        """Moments of one layer over the training rows of the groups that are compared."""
        fits, out = self._found[name]
        moments = fits if problem.judged_on != "train" else GroupMoments().merge(fits).merge(out)
        return moments.adjusted(self._parts, problem.labels) if self._parts else moments.only(problem.labels)


def edit_hidden(
    read: Read,
    adapter: ModelAdapter,
    layer: LinearLayer,
    moments: GroupMoments,
    problem: Problem,
    *,
    method: str,
    refit: str,
    reductions: Sequence[tuple[float, float]],
    beside: Sequence[Fit] = (),
) -> Candidates:
    """A refit for every pair (mean, covariance) of reductions, and fits ``beside`` them of the original model.

    Parameters
    ----------
    layer, moments : the hidden layer, and the moments of its inputs
    problem : what ``read`` gives for the original model
    refit : "sgd", "ols" or "parity", how the last layer is refitted
    """
    edit = edit_paper if method == "paper" else edit_exact
    found = []
    for mean, covariance in reductions:
        steps = edit(
            layer.weight, moments, mean_reduction=mean, covariance_reduction=covariance, bias=layer.bias,
            layer=layer.name,
        )  # fmt: skip
        weights = after_edits(steps)
        edited = read(adapter.replace(weights) if weights else adapter)
        _check_same_rows(problem, edited)
        fit = refit_edited(edited, refit, mean, covariance)
        fit = replace(fit, edits=(*steps, *account_for(edited, fit)), strength=float(mean))
        found.append(Candidates.of(edited, [fit]))
    found += [Candidates.of(problem, beside)] if beside else []
    fits = tuple(fit for each in found for fit in each.fits)
    judging, training = (np.concatenate([getattr(e, n) for e in found], axis=1) for n in ("judging", "training"))
    return Candidates(problem, fits, judging, training, None, plain_refits(problem))


def _check_same_rows(first: Problem, second: Problem) -> None:
    """Raise unless two passes gave the same rows the same ids."""
    labels = first.error_against == "labels"
    for one, other in ((first.training, second.training), (first.judging, second.judging)):
        same = np.array_equal(one.id, other.id) and np.array_equal(one.codes, other.codes)  # type: ignore[arg-type]
        if not same or (labels and not np.array_equal(one.y, other.y)):
            raise InputError(
                "`X` yields rows in a different order on each pass. Use a DataLoader with shuffle=False, or arrays."
            )


def plain_refits(problem: Problem) -> tuple[Fit, ...]:
    """The last layer refitted to the labels without fairness constraint; none where there are no labels."""
    if problem.error_against != "labels":
        return ()
    return (plain_fit(Refits(problem, Effort()).labels(REFIT_RIDGE)),)


def refit_edited(problem: Problem, refit: str, mean_reduction: float, covariance_reduction: float) -> Fit:
    """The output layer after a hidden layer was edited, by "sgd", "ols" or "parity"."""
    refits = Refits(problem, Effort())
    quadratic = refits.labels(REFIT_RIDGE)
    name = problem.error_against
    if refit == "parity":
        return replace(parity_at(quadratic, mean_reduction, covariance_reduction), target=name)
    if refit == "ols":
        return quadratic.fit(quadratic.minimiser, target=name)
    layer, head, training = problem.layer, problem.head, problem.training
    fit = finetune(
        training.features,
        head.inverse(training.y) if head.is_affine else refits.head_aware_outputs,
        weight=layer.weight[0],
        bias=None if layer.bias is None else float(layer.bias[0]),
        sample_weight=training.weight,
        random_state=problem.seed,
    )
    return replace(fit, target=name)


def hold(batches: Batches, problem: Problem, *, validation: bool, most_rows: int, most_bytes: int) -> Batches:
    """A bounded number of rows in memory, inputs and all, weighted to represent all; as they are when they are few.

    They are chosen by a hash of their ids, as many of each group that is compared.
    """
    held: list[Batch] = []
    share: dict[Label, float] = {}
    if isinstance(batches, ArrayBatches) and batches.rows <= most_rows:
        return batches
    counts = dict(zip(problem.labels, problem.sizes, strict=True))
    if validation:
        counts = dict(zip(problem.labels, np.bincount(problem.judging.codes).tolist(), strict=False))
    for batch in batches:
        if not share:
            inputs = several_inputs(batch.x)
            size = sum(getattr(x, "nbytes", 0) for x in ([batch.x] if inputs is None else inputs.values()))
            most = min(most_rows, int(most_bytes * max(row_count(batch.x), 1) / size) if size else most_rows)
            share = {label: most / len(counts) / max(n, 1) for label, n in counts.items()}
        part = np.array([min(share.get(group, 1.0), 1.0) for group in batch.groups])[batch.codes]
        index = np.flatnonzero(row_key(batch.row_id, problem.seed + 2) < part)
        weight = np.ones(len(part)) if batch.weight is None else batch.weight
        held += [replace(batch, weight=weight / part).take(index)] if len(index) else []
    return held
