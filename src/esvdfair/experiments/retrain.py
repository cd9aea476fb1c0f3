"""What a user would do instead: train all layers on the error plus λ·W₂² between the groups' predictions.

From the trained network and from scratch, each with as many epochs as the network had. λ is chosen on the validation
rows, by the rule that chooses our own points. Settings were tuned on law and COMPAS, seeds 1 and 2, which no table
reports: batches with as many rows of every group (in plain ones of law the smaller group has a dozen, and W₂ sees noise
instead of quantiles), a cosine schedule, and from scratch a penalty that rises, or the network would begin as a
constant.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from esvdfair.batches import Data
from esvdfair.core.checks import encode_groups
from esvdfair.core.metrics import ks_population
from esvdfair.core.refit.quadratic import Fit
from esvdfair.curve import Curve, judge
from esvdfair.datasets import Examples
from esvdfair.experiments.config import Experiment, Retraining, Variant
from esvdfair.experiments.network import Adam, Trained, build_network, predict, seeded
from esvdfair.experiments.rows import Outcome
from esvdfair.methods import Candidates
from esvdfair.models import adapt
from esvdfair.sample import Effort, Sample, draw, prepare


def retrained(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """The chosen network of either start, for the experiment's target."""
    shape, target = experiment.training, experiment.target_ks
    with seeded(trained.seed):
        fresh = build_network(trained.split.train.X.shape[1], width=shape.width, depth=shape.depth)
    for name, start in (("finetuned", trained.network), ("from_scratch", fresh)):
        networks = search_penalty(name, start, trained, experiment)
        curve = curve_of(networks, trained)
        point = curve.select(target_ks=target)
        prediction = predict(networks[point.strength], trained.examples(experiment.evaluated_on).X)
        yield Outcome(Variant(name, level=target), prediction, met=curve.meets(point, target))


def search_penalty(
    name: str, start: nn.Sequential, trained: Trained, experiment: Experiment
) -> dict[float, nn.Sequential]:
    """Networks with a few λ, among them the untouched one (λ = 0).

    The first λ has all epochs. The others go on from there for a few epochs each, so that they had more than their due;
    each is as much larger or smaller than the one before as KS ∝ λ^(−1/2) asks for.
    """
    how, rows = experiment.retraining, trained.split.train
    networks, penalty = {0.0: trained.network}, how.penalty
    first = replace(how, ramp=0)
    if name == "from_scratch":
        first = replace(how, learning_rate=2 * how.learning_rate)
    later = replace(how, learning_rate=0.5 * how.learning_rate, ramp=0)
    for stage in range(how.stages):
        epochs, settings = (how.more_epochs, later) if stage else (experiment.training.epochs, first)
        seed = trained.seed + stage
        make = partial(train_on_both, start, rows, penalty, settings, epochs=epochs, seed=seed)
        decided_by = experiment.training, how, penalty
        start = trained.shelf.get(f"seed-{trained.seed}-{name}-{stage}", make, *decided_by)
        networks[penalty] = start
        there = trained.split.validation
        ks = ks_population(predict(start, there.X), sensitive_features=there.sensitive_features)
        apart = ks / (0.95 * experiment.target_ks)
        penalty = float(f"{penalty * np.clip(apart**2, 0.25, 4.0):.4g}")
    return networks


def sample_of(network: nn.Sequential, trained: Trained, effort: Effort | None = None) -> Sample:
    """What the network makes of the training rows, which fit, and of the validation rows, which judge."""
    rows = trained.split.train
    data, validation = Data(rows.X, rows.y, rows.sensitive_features), trained.split.validation
    return draw(prepare(adapt(network), data, validation=validation, seed=trained.seed, effort=effort))


def curve_of(networks: Mapping[float, nn.Sequential], trained: Trained) -> Curve:
    """The trade-off curve of whole networks, judged as the candidates of a repair are; ``strength`` is λ."""
    samples = {penalty: sample_of(network, trained) for penalty, network in networks.items()}
    untouched, *_ = samples.values()
    judging = np.column_stack([sample.judging.prediction for sample in samples.values()])
    training = np.column_stack([sample.training.prediction for sample in samples.values()])
    # What they predict is given, so their last layers, each on features of its own, do not matter.
    fits = tuple(Fit(untouched.layer.weight[0], 0.0, strength=penalty) for penalty in samples)
    candidates = Candidates(untouched, fits, judging, training)
    return judge(candidates, adapt(trained.network), effort=Effort.quick(), seed=trained.seed)


def train_on_both(
    start: nn.Sequential, rows: Examples, penalty: float, how: Retraining, *, epochs: int, seed: int
) -> nn.Sequential:
    """A copy of ``start``, trained on the error plus ``penalty`` times :func:`wasserstein`.

    Every batch holds as many rows of each group; weights give the groups their share in the error. An epoch has as many
    steps as batches would fill the rows.
    """
    labels, codes = encode_groups(rows.sensitive_features)
    x, y = (torch.as_tensor(values, dtype=torch.float32) for values in (rows.X, rows.y))
    members = [torch.as_tensor(np.flatnonzero(codes == g)) for g in range(len(labels))]
    share = [len(m) / len(y) for m in members]
    size = max(how.batch_size // len(labels), 1)
    steps = max(len(y) // how.batch_size, 1)
    with seeded(seed):
        network = copy.deepcopy(start).train()
        optimizer = Adam(network)
        for epoch in range(epochs):
            rate = how.learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
            strength = penalty * (min(1.0, epoch / how.ramp) if how.ramp else 1.0)
            batches = torch.stack([_drawn(m, steps * size).reshape(steps, size) for m in members], dim=1)
            for batch in batches:  # (groups, size) rows
                output = network(x[batch.flatten()])[:, 0].reshape(batch.shape)
                errors = (output - y[batch]).square().mean(dim=1)
                loss = sum((s * e for s, e in zip(share, errors, strict=True)), strength * wasserstein(output))
                optimizer.step(loss, rate)
    return network.eval()


def wasserstein(output: Tensor) -> Tensor:
    """W₂² between groups with as many outputs each, (groups, rows): of sorted outputs; the mean over pairs."""
    ordered = torch.sort(output, dim=1).values
    pairs = [(ordered[a] - ordered[b]).square().mean() for a, b in combinations(range(len(ordered)), 2)]
    return torch.stack(pairs).mean()


def _drawn(members: Tensor, count: int) -> Tensor:
    """``count`` of the members, shuffled; a group that is too small comes again, shuffled anew."""
    times = -(-count // len(members))
    return torch.cat([members[torch.randperm(len(members))] for _ in range(times)])[:count]
