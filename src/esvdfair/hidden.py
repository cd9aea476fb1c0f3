"""`paper` and `exact`: edit a hidden layer, then refit the last one on the features that the edit leaves.

They read the rows once for the moments of the layer, and once more for the features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.batches import ArrayBatches, Batch, Batches, Splitter, held_out, row_key
from esvdfair.core.checks import Label, row_count, several_inputs
from esvdfair.core.edits import edit_exact, edit_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import Fit
from esvdfair.exceptions import InputError
from esvdfair.fit_report import account_for
from esvdfair.gather import Watch, few_threads, gather, layers_of
from esvdfair.methods import (
    Candidates,
    Refits,
    after_edits,
    check_rescales,
    parity_at,
    rescaled,
)
from esvdfair.models.base import LinearLayer, ModelAdapter, find_layer
from esvdfair.problem import Effort, Problem, make_problem, original_fit

Array = NDArray[np.float64]

REFIT_RIDGE = 1e-4  # of the closed-form refits; without one, features of condition 1e11 let the error explode
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # the defaults of torch.optim.Adam, which the paper used


@dataclass
class Reader:
    """Reads the rows with a model, the original one or one with an edited layer, and divides them for the solve.

    Attributes
    ----------
    original : adapter of the original model, whose predictions are the labels where there are none
    batches, apart : training rows, and validation rows where they are apart
    rows : that are kept, at most
    split : options of :func:`esvdfair.problem.make_problem`
    n_features : columns of the inputs, known once they are read
    """

    original: ModelAdapter
    batches: Batches
    apart: Batches | None
    rows: int
    split: dict[str, Any]
    n_features: int | None = None

    def read(self, adapter: ModelAdapter | None = None, *, watch: Watch | None = None) -> Problem:
        """Read all rows with this model, by default the original one."""
        adapter = adapter or self.original
        order = (self.split["validation_fraction"] if self.apart is None else 0.0, self.split["seed"])
        asked: dict[str, Any] = {"rows": self.rows, "original": self.original, "split": order}
        summary = gather(adapter, self.batches, watch=watch, **asked)
        self.n_features = summary.n_features
        apart = None if self.apart is None else gather(adapter, self.apart, output=summary.output, **asked)
        return make_problem(summary, apart, **self.split)

    def layers(self) -> tuple[LinearLayer, ...]:
        """The linear layers of the original model."""
        first = next((batch.x for batch in self.batches if len(batch.codes)), None)
        if first is None:
            raise ValueError("there are no rows to fit on: the data is empty.")
        return layers_of(self.original, first)

    def moments_of(self, layers: Sequence[LinearLayer]) -> tuple[list[GroupMoments], Problem]:
        """Moments of the inputs of some layers over the training rows, and the problem of the original model."""
        out = None
        if self.apart is None:
            out = held_out(self.split["validation_fraction"], self.split["seed"])
        watch = LayerMoments([layer.name for layer in layers], out)
        problem = self.read(watch=watch)
        self.split = self.split | {"warns": False}  # once is enough
        return [watch.of(layer.name, problem) for layer in layers], problem

    def bounded(self, problem: Problem, most_bytes: int) -> None:
        """Keep a bounded number of rows in memory, for models that are read again and again."""
        limits = {"most_rows": self.rows, "most_bytes": most_bytes}
        self.batches = hold(self.batches, problem, dict(zip(problem.labels, problem.sizes, strict=True)), **limits)
        if self.apart is not None:
            sizes = dict(zip(problem.labels, np.bincount(problem.validation.codes).tolist(), strict=False))
            self.apart = hold(self.apart, problem, sizes, **limits)


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
        moments = fits if problem.evaluated_on != "train" else GroupMoments().merge(fits).merge(out)
        return moments.adjusted(self._parts, problem.labels) if self._parts else moments.only(problem.labels)


def solve(
    reader: Reader,
    *,
    method: str,
    layer: int | str,
    refit: str,
    reductions: Sequence[tuple[float, float]],
    most_bytes: int | None = None,
    rescale: bool = False,
) -> Candidates:
    """A refit for every pair (mean, covariance) of reductions, and the original model.

    Parameters
    ----------
    method : "paper" or "exact", how the hidden layer is edited
    layer : index or name of that layer
    refit : "sgd", "ols" or "parity", how the last layer is refitted
    rescale : keep mean and standard deviation of the original predictions
    most_bytes : size of the inputs that are kept where there are several pairs; None reads all rows for each
    """
    layers = reader.layers()
    layers[-1].check_no_offset(f"method={method!r}")
    edited_layer = find_layer(layers, layer)
    if edited_layer.index == layers[-1].index:
        raise InputError(
            f"`layer={layer!r}` is the output layer, but `method={method!r}` edits a hidden layer. Choose an earlier "
            "one, or the method 'parity' or 'transport', which edits the output layer alone."
        )
    with few_threads(max(each.weight.shape[1] for each in layers)):
        (moments,), problem = reader.moments_of([edited_layer])
        if most_bytes is not None:
            reader.bounded(problem, most_bytes)
            problem = reader.read()
        if rescale:
            check_rescales(problem)
        asked: dict[str, Any] = {"method": method, "refit": refit, "rescale": rescale}
        found = [_edited(reader, edited_layer, moments, problem, each, **asked) for each in reductions]
    found.append(Candidates.of(problem, [original_fit(problem.layer)]))
    fits = tuple(fit for each in found for fit in each.fits)
    validation, training = (np.concatenate([getattr(e, n) for e in found], axis=1) for n in ("validation", "training"))
    plain: tuple[Fit, ...] = ()
    if problem.error_against == "labels":
        known = Refits(problem, Effort()).labels(REFIT_RIDGE)
        plain = (known.fit(known.minimiser),)
    return Candidates(problem, fits, validation, training, None, plain)


def _edited(
    reader: Reader,
    layer: LinearLayer,
    moments: GroupMoments,
    problem: Problem,
    reductions: tuple[float, float],
    *,
    method: str,
    refit: str,
    rescale: bool,
) -> Candidates:
    """The one candidate of a pair of reductions."""
    mean, covariance = reductions
    steps = (edit_paper if method == "paper" else edit_exact)(
        layer.weight, moments, mean_reduction=mean, covariance_reduction=covariance, bias=layer.bias, layer=layer.name
    )
    weights = after_edits(steps)
    edited = reader.read(reader.original.replace(weights) if weights else None)
    _check_same_rows(problem, edited)
    fit = refit_edited(edited, refit, mean, covariance)
    fit = rescaled(fit, edited, problem) if rescale else fit
    fit = replace(fit, edits=(*steps, *account_for(edited, fit)), strength=float(mean))
    return Candidates.of(edited, [fit])


def _check_same_rows(first: Problem, second: Problem) -> None:
    """Raise unless two passes gave the same rows the same ids."""
    labels = first.error_against == "labels"
    for one, other in ((first.training, second.training), (first.validation, second.validation)):
        same = np.array_equal(one.id, other.id) and np.array_equal(one.codes, other.codes)  # type: ignore[arg-type]
        if not same or (labels and not np.array_equal(one.y, other.y)):
            raise InputError(
                "`X` yields rows in a different order on each pass. Use a DataLoader with shuffle=False, or arrays."
            )


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


def hold(batches: Batches, problem: Problem, sizes: Mapping[Label, int], *, most_rows: int, most_bytes: int) -> Batches:
    """A bounded number of rows in memory, inputs and all, weighted to represent all; as they are when they are few.

    They are chosen by a hash of their ids, as many of each group that is compared; ``sizes`` are rows of these groups.
    """
    held: list[Batch] = []
    share: dict[Label, float] = {}
    if isinstance(batches, ArrayBatches) and batches.rows <= most_rows:
        return batches
    for batch in batches:
        if not share:
            most = min(most_rows, int(most_bytes / _row_bytes(batch)))
            share = {label: most / len(sizes) / max(n, 1) for label, n in sizes.items()}
        part = np.array([min(share.get(group, 1.0), 1.0) for group in batch.groups])[batch.codes]
        index = np.flatnonzero(row_key(batch.row_id, problem.seed + 2) < part)
        weight = np.ones(len(part)) if batch.weight is None else batch.weight
        held += [replace(batch, weight=weight / part).take(index)] if len(index) else []
    return held


def _row_bytes(batch: Batch) -> float:
    """Bytes of one row of inputs."""
    several = several_inputs(batch.x)
    size = sum(getattr(x, "nbytes", 0) for x in ([batch.x] if several is None else several.values()))
    return max(size / max(row_count(batch.x), 1), 1e-9)


def finetune(
    features: NDArray[Any],
    target: Array,
    *,
    weight: Array,
    bias: float | None,
    sample_weight: Array | None = None,
    epochs: int = 50,
    learning_rate: float = 1e-3,
    decay: float = 0.8,
    batch_size: int = 128,
    random_state: int | np.random.Generator | None = None,
) -> Fit:
    """The paper's fine-tune: minimise ``E(t − h·w − b)²`` for a few epochs of Adam, starting from the given layer.

    The steps are those of ``torch.optim.Adam``; the learning rate is multiplied by ``decay`` after every epoch, as by
    ``ExponentialLR``, so that it stops early by design. The layers below stay as they are: their outputs, features
    (rows, p), are computed once, and float32 ones are worked on in float32. ``converged`` says whether the error ended
    no higher than it started. A layer without bias (None) stays without.
    """
    h = np.asarray(features)
    h = h.astype(np.float32 if h.dtype == np.float32 else np.float64, copy=False)
    t, start = np.asarray(target, dtype=h.dtype), np.array(weight, dtype=np.float64)
    if bias is not None:  # the weight of a last column of ones
        h, start = np.column_stack([h, np.ones(len(h), h.dtype)]), np.append(start, float(bias))
    w = None if sample_weight is None else (sample_weight / np.mean(sample_weight)).astype(h.dtype)
    layer, rng = start.astype(h.dtype), np.random.default_rng(random_state)
    first, second = np.zeros_like(layer), np.zeros_like(layer)
    batch = np.empty((min(batch_size, len(h)), h.shape[1]), dtype=h.dtype)
    step = 0
    for epoch in range(epochs):
        order, rate = rng.permutation(len(h)), learning_rate * decay**epoch
        for begin in range(0, len(h), batch_size):
            rows = order[begin : begin + batch_size]
            x = np.take(h, rows, axis=0, out=batch[: len(rows)], mode="clip")  # the default mode copies once more
            error = x @ layer - t[rows]
            if w is not None:
                error *= w[rows]
            gradient = (2.0 / len(rows)) * (error @ x)
            step += 1
            first += (1.0 - _BETA1) * (gradient - first)
            second *= _BETA2
            second += (1.0 - _BETA2) * gradient**2
            scale = np.sqrt(second) / (1.0 - _BETA2**step) ** 0.5 + _EPSILON
            layer -= (rate / (1.0 - _BETA1**step)) * first / scale
    end = layer.astype(np.float64)
    before, after = (float(np.average((h @ known - t) ** 2, weights=w)) for known in (start, end))
    weight, bias = (end, 0.0) if bias is None else (end[:-1], float(end[-1]))
    return Fit(weight, bias, converged=after <= before)
