"""A seed's network with what passes through it, each computed once for all methods."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esvdfair.baselines import GroupPredictor
from esvdfair.core.moments import GroupMoments
from esvdfair.datasets import Dataset, fetch_compas, fetch_law, load_wages
from esvdfair.experiments.config import Experiment, Preparation, Training
from esvdfair.experiments.network import predict_proba, train_network
from esvdfair.experiments.splits import Part, Split, split

Array = NDArray[np.float64]
Features = NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """Weight (m, n) and bias (m,) of a linear layer, in float64."""

    weight: Array
    bias: Array

    @classmethod
    def of(cls, module: nn.Module) -> "Layer":
        assert isinstance(module, nn.Linear)
        return cls(module.weight.detach().double().numpy(), module.bias.detach().double().numpy())


@dataclass(frozen=True)
class Trained:
    """A network, the split it was trained on, and the inputs of its last two linear layers for every part.

    Attributes
    ----------
    seed : of the split and of everything random after it
    split : Split
    network : ends in ``Linear, ReLU, Linear``
    inner, outer : part -> (rows, width) float32, what enters the last hidden layer and the output layer
    scores : part -> (rows,) predictions
    """

    seed: int
    split: Split
    network: nn.Sequential
    inner: Mapping[str, Features]
    outer: Mapping[str, Features]
    scores: Mapping[str, Array]

    @property
    def hidden_layer(self) -> Layer:
        """The layer that Algorithm 1 edits."""
        return Layer.of(self.network[-3])

    @property
    def output_layer(self) -> Layer:
        return Layer.of(self.network[-1])

    @cached_property
    def inner_moments(self) -> GroupMoments:
        """Of the training rows at the input of the hidden layer."""
        return GroupMoments().update(self.inner["train"], self.split.train.sensitive_features)

    def part(self, name: str) -> Part:
        part: Part = getattr(self.split, name)
        return part


@lru_cache(maxsize=2)
def load(dataset: str, preparation: Preparation) -> Dataset:
    """A data set of the experiments, once for each process."""
    if dataset == "wages":
        return load_wages()
    return fetch_law(preparation) if dataset == "law" else fetch_compas(preparation)


def train(dataset: Dataset, training: Training, seed: int) -> Trained:
    """Train the network of a seed and run all rows through it."""
    parts = split(dataset, seed)
    network = train_network(
        parts.train.X,
        parts.train.y,
        seed=seed,
        epochs=training.epochs,
        width=training.width,
        depth=training.depth,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        decay=training.decay,
    )
    return run_through(network, parts, seed)


def run_through(network: nn.Sequential, parts: Split, seed: int) -> Trained:
    """One forward pass for every part."""
    inner, outer, scores = {}, {}, {}
    with torch.inference_mode():
        for name in ("train", "validation", "test"):
            x = torch.as_tensor(getattr(parts, name).X, dtype=torch.float32)
            inner[name] = network[:-3](x)
            outer[name] = network[-3:-1](inner[name])
            scores[name] = network[-1](outer[name])[:, 0].double().numpy()
    for values in (inner, outer):
        values["heldout"] = torch.cat([values["validation"], values["test"]])
    scores["heldout"] = np.concatenate([scores["validation"], scores["test"]])
    return Trained(seed, parts, network, _as_numpy(inner), _as_numpy(outer), scores)


def _as_numpy(tensors: Mapping[str, torch.Tensor]) -> dict[str, Features]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


class NetworkClassifier:
    """The paper's network with an output for each group, in the shape that `GroupPredictor` wants."""

    def __init__(self, training: Training, seed: int) -> None:
        self.training, self.seed = training, seed

    def fit(self, X: Any, codes: Any) -> "NetworkClassifier":
        t = self.training
        self.network_ = train_network(
            X,
            codes,
            seed=self.seed,
            loss="cross_entropy",
            epochs=t.epochs,
            width=t.width,
            depth=t.depth,
            batch_size=t.batch_size,
            learning_rate=t.learning_rate,
            decay=t.decay,
        )
        return self

    def predict_proba(self, X: Any) -> Array:
        return predict_proba(self.network_, X)

    def predict(self, X: Any) -> NDArray[np.intp]:
        codes: NDArray[np.intp] = np.argmax(self.predict_proba(X), axis=1)
        return codes


def predicted_groups(trained: Trained, experiment: Experiment) -> NDArray[Any]:
    """(rows,) the group predicted for every row that is evaluated, as the paper does: from the inputs."""
    network = experiment.group_classifier == "network"
    classifier = NetworkClassifier(experiment.training, trained.seed) if network else None
    fit_on = trained.split.train
    predictor = GroupPredictor(classifier=classifier).fit(fit_on.X, fit_on.sensitive_features)
    return predictor.predict(trained.part(experiment.evaluated_on).X)
