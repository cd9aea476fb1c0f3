"""Every method of the tables on one trained network: what it predicts for the evaluated rows."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.baselines import PrivateHistogram, WassersteinBarycenter
from esvdfair.baselines.peers import EquipyWasserstein, FairlearnCorrelationRemover, LeaceRegression
from esvdfair.core.edits import LayerEdit, edit_paper
from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.ols import fit_ols
from esvdfair.core.refit.sgd import finetune
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.experiments.config import Experiment, Finetune, Variant
from esvdfair.experiments.errata import ErrataEdit, edit_unguarded, edit_with_printed_cubic
from esvdfair.experiments.network import predict
from esvdfair.experiments.reference import unaware_optimum
from esvdfair.experiments.trained import Features, Trained, predicted_groups

Array = NDArray[np.float64]

# Only on 0/1 targets does it matter: without it both groups can get the same constant, which KS counts as equal.
_JITTER = 1e-9

# Next to nothing, but without it least squares on features that are nearly collinear errs wildly on a few splits.
_RIDGE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """Predictions of one method for the evaluated rows; the rest as in :class:`~esvdfair.experiments.rows.Row`."""

    variant: Variant
    prediction: Array
    met: bool | None = None
    mean_reached: float | None = None
    covariance_reached: float | None = None


def all_methods(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Everything that a table compares, in the order of its rows."""
    scores = trained.scores[experiment.evaluated_on]
    yield Outcome(Variant("untouched"), scores)
    yield Outcome(Variant("constant"), np.full_like(scores, trained.split.train.y.mean()))
    yield from baselines(trained, experiment)
    yield from paper(trained, experiment)
    yield from errata(trained, experiment)
    yield from repaired(trained, experiment)
    yield from optimum(trained, experiment)


def baselines(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Both baselines, fitted on targets as the authors did and on scores as meant, with either group."""
    train, here = trained.split.train, trained.part(experiment.evaluated_on)
    predicted = predicted_groups(trained, experiment)
    for fitted_on in ("targets", "scores"):
        jitter = _JITTER if fitted_on == "targets" else 0.0
        barycenter = WassersteinBarycenter(fitted_on=fitted_on, jitter=jitter, random_state=trained.seed)
        histogram = PrivateHistogram(fitted_on=fitted_on, bins=experiment.bins, random_state=trained.seed)
        for name, baseline in (("barycenter", barycenter), ("private_histogram", histogram)):
            baseline.fit(trained.scores["train"], train.y, sensitive_features=train.sensitive_features)
            for group, labels in (("predicted", predicted), ("true", here.sensitive_features)):
                moved = baseline.predict(trained.scores[experiment.evaluated_on], sensitive_features=labels)
                yield Outcome(Variant(name, fitted_on, group), moved)


def paper(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Algorithm 1 at the last hidden layer and the fine-tune of the output layer, along the reductions."""
    for mean, covariance in experiment.reductions:
        edits = _edit(trained, experiment, mean, covariance)
        prediction = finetuned(trained, edits[-1].weight_after, experiment)
        yield _edited(Variant.reduced("paper", mean, covariance), prediction, edits)


def errata(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """What the paper's slips do: the printed cubic, the authors' root solve, the least-squares refit."""
    ((mean, covariance),) = experiment.reductions
    for name, edit in (("paper_printed_cubic", edit_with_printed_cubic), ("paper_unguarded_solve", edit_unguarded)):
        done: ErrataEdit = edit(
            trained.hidden_layer.weight,
            trained.inner_moments,
            mean_reduction=mean,
            covariance_reduction=covariance,
            epsilon=experiment.epsilon,
        )
        yield Outcome(
            Variant.reduced(name, mean, covariance),
            finetuned(trained, done.weight, experiment),
            mean_reached=done.mean_reached,
            covariance_reached=done.covariance_reached,
        )
    edits = _edit(trained, experiment, mean, covariance)
    prediction = refitted(trained, edits[-1].weight_after, experiment)
    yield _edited(Variant.reduced("algorithm_2", mean, covariance), prediction, edits)


def repaired(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """`parity` at the target, `transport` at it and along its curve, every point chosen on the validation rows."""
    x = trained.part(experiment.evaluated_on).X
    parity, transport = (_fit(trained, method, experiment.target_ks) for method in ("parity", "transport"))
    yield Outcome(Variant("parity", level=experiment.target_ks), parity.predict(x), met=parity.summary_["met"])
    for level in experiment.transport_levels:
        point = transport.curve_.select(target_ks=level)
        prediction = predict(transport.curve_.model(point.index), x)
        yield Outcome(Variant("transport", level=level), prediction, met=point.ks <= level)


def _fit(trained: Trained, method: str, target_ks: float) -> ESVDFair:
    train = trained.split.train
    fair = ESVDFair(trained.network, method=method, target_ks=target_ks, random_state=trained.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)  # a target that is not met is a column of the row
        return fair.fit(
            train.X, train.y, sensitive_features=train.sensitive_features, validation=trained.split.validation
        )


def optimum(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """The attribute-unaware optimum at every level of its curve."""
    for level, prediction in unaware_optimum(trained, experiment.optimum_levels, experiment.evaluated_on):
        yield Outcome(Variant("optimum", level=level), prediction)


def peers(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Other libraries: EquiPy and Fairlearn on the scores, LEACE on the features of the last hidden layer."""
    train, here = trained.split.train, trained.part(experiment.evaluated_on)
    on_scores: dict[str, Any] = {
        "equipy": EquipyWasserstein(random_state=trained.seed),
        "fairlearn": FairlearnCorrelationRemover(),
    }
    predicted = predicted_groups(trained, experiment)
    for name, peer in on_scores.items():
        if name not in experiment.peers:
            continue
        peer.fit(trained.scores["train"], sensitive_features=train.sensitive_features)
        for group, labels in (("predicted", predicted), ("true", here.sensitive_features)):
            moved = peer.predict(trained.scores[experiment.evaluated_on], sensitive_features=labels)
            yield Outcome(Variant(name, "scores", group), moved)
    if "leace" in experiment.peers:
        leace = LeaceRegression().fit(
            trained.scores["train"], train.y, sensitive_features=train.sensitive_features, X=trained.outer["train"]
        )
        yield Outcome(Variant("leace"), leace.predict(X=trained.outer[experiment.evaluated_on]))


def finetuned(trained: Trained, weight: Array, experiment: Experiment) -> Array:
    """The paper's fine-tune of the output layer, on the features that the edited hidden layer leaves."""
    how: Finetune = experiment.finetune
    layer = trained.output_layer
    fit = finetune(
        edited_features(trained, weight, "train"),
        trained.split.train.y,
        weight=layer.weight[0],
        bias=float(layer.bias[0]),
        epochs=how.epochs,
        learning_rate=how.learning_rate,
        decay=how.decay,
        batch_size=how.batch_size,
        random_state=trained.seed,
    )
    return edited_features(trained, weight, experiment.evaluated_on) @ fit.weight + fit.bias


def refitted(trained: Trained, weight: Array, experiment: Experiment) -> Array:
    """Algorithm 2 as printed: least squares on the same features."""
    train = trained.split.train
    features = edited_features(trained, weight, "train")
    moments = GroupMoments().update(np.column_stack([features, train.y]), train.sensitive_features)
    fit = fit_ols(moments, target=features.shape[1], original=trained.output_layer.weight[0], ridge=_RIDGE)
    return edited_features(trained, weight, experiment.evaluated_on) @ fit.weight + fit.bias


def edited_features(trained: Trained, weight: Array, part: str) -> Features:
    """(rows, width) inputs of the output layer when the hidden layer has another weight."""
    bias = trained.hidden_layer.bias.astype(np.float32)
    features: Features = np.maximum(trained.inner[part] @ weight.T.astype(np.float32) + bias, np.float32(0.0))
    return features


def _edit(trained: Trained, experiment: Experiment, mean: float, covariance: float) -> tuple[LayerEdit, ...]:
    return edit_paper(
        trained.hidden_layer.weight,
        trained.inner_moments,
        mean_reduction=mean,
        covariance_reduction=covariance,
        epsilon=experiment.epsilon,
    )


def _edited(variant: Variant, prediction: Array, edits: tuple[LayerEdit, ...]) -> Outcome:
    covariance, mean = edits
    return Outcome(
        variant,
        prediction,
        mean_reached=float(np.sum(mean.sigma_before**2)) / mean.achieved,
        covariance_reached=float(np.sum(covariance.sigma_before**4)) / covariance.achieved,
    )


METHODS = {"comparison": all_methods, "ablation": paper, "peers": peers}
