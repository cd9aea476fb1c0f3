"""Every method of the tables on one trained network: what it predicts for the evaluated rows.

Nothing is built here that the library has: the rows run :class:`~esvdfair.ESVDFair`, the baselines and the estimates
of E[Y|x] and P(group|x) that users run. Only the errata, which nobody should use, have code of their own.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esvdfair.baselines import GroupPredictor, PrivateHistogram, WassersteinBarycenter
from esvdfair.baselines.peers import EquipyWasserstein, FairlearnCorrelationRemover, LeaceRegression
from esvdfair.core.moments import GroupMoments
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.refit.sgd import finetune
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.experiments.config import Experiment, Part, Variant
from esvdfair.experiments.errata import edit_unguarded, edit_with_printed_cubic
from esvdfair.experiments.network import NetworkClassifier, Trained, linear, predict, run_through
from esvdfair.experiments.retrain import retrained, sample_of
from esvdfair.experiments.rows import Outcome
from esvdfair.methods import Refits

Array = NDArray[np.float64]

# Only on 0/1 targets does it matter: without it both groups can get the same constant, which KS counts as equal.
_JITTER = 1e-9
_BINS = 18  # of the private histogram, as in the authors' code


def references(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """What the repairs of this library are compared with, as long as it does not change with them."""
    scores, last = trained.scores(experiment.evaluated_on), list(optimum(trained, experiment))
    yield Outcome(Variant("untouched"), scores)
    yield Outcome(Variant("refitted"), last[-1].prediction)
    yield Outcome(Variant("constant"), np.full_like(scores, trained.split.train.y.mean()))
    yield from baselines(trained, experiment)
    yield from last


def baselines(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Both baselines, fitted on targets as the authors did and on scores as meant, with either group."""
    methods: dict[tuple[str, str], Any] = {}
    for on, jitter in (("targets", _JITTER), ("scores", 0.0)):
        shared: dict[str, Any] = {"fitted_on": on, "random_state": trained.seed}
        methods["barycenter", on] = WassersteinBarycenter(jitter=jitter, **shared)
        methods["private_histogram", on] = PrivateHistogram(bins=_BINS, **shared)
    yield from _with_either_group(trained, experiment, methods)


def peers(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Other libraries: EquiPy and Fairlearn on the scores, LEACE on the features of the last hidden layer."""
    on_scores: dict[tuple[str, str], Any] = {
        ("equipy", "scores"): EquipyWasserstein(random_state=trained.seed),
        ("fairlearn", "scores"): FairlearnCorrelationRemover(),
    }
    yield from _with_either_group(trained, experiment, on_scores)
    rows, (seen, there) = trained.split.train, _features(trained, "train", experiment.evaluated_on)
    leace = LeaceRegression().fit(trained.scores("train"), rows.y, sensitive_features=rows.sensitive_features, X=seen)
    yield Outcome(Variant("leace"), leace.predict(X=there))


def _with_either_group(
    trained: Trained, experiment: Experiment, methods: Mapping[tuple[str, str], Any]
) -> Iterator[Outcome]:
    """Methods that map scores and need the group: the predicted one, as in the paper, and the true one."""
    rows, here = trained.split.train, trained.examples(experiment.evaluated_on)
    seen, there = trained.scores("train"), trained.scores(experiment.evaluated_on)
    groups = {"predicted": predicted_groups(trained, experiment), "true": here.sensitive_features}
    for (name, fitted_on), method in methods.items():
        method.fit(seen, rows.y, sensitive_features=rows.sensitive_features)
        for group, labels in groups.items():
            yield Outcome(Variant(name, fitted_on, group), method.predict(there, sensitive_features=labels))


def predicted_groups(trained: Trained, experiment: Experiment) -> NDArray[Any]:
    """(rows,) the group predicted for every row that is evaluated, as the paper does: from the inputs."""
    network = experiment.group_classifier == "network"
    classifier = NetworkClassifier(experiment.training, trained.seed) if network else None
    rows = trained.split.train
    predictor = GroupPredictor(classifier=classifier).fit(rows.X, rows.sensitive_features)
    return predictor.predict(trained.examples(experiment.evaluated_on).X)


def paper(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Algorithm 1 at the last hidden layer and the fine-tune of the output layer, along the reductions."""
    for reductions in experiment.reductions:
        yield _edited(trained, experiment, Variant.reduced("paper", *reductions), refit="sgd")
    if experiment.is_comparison:
        yield from errata(trained, experiment)


def errata(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """What the paper's slips do: the printed cubic, the authors' root solve, the least-squares refit."""
    ((mean, covariance),) = experiment.reductions
    rows, weight = trained.split.train, linear(trained.network, -3).weight.detach().double().numpy()
    moments = GroupMoments().update(run_through(trained.network[:-3], rows.X), rows.sensitive_features)
    for name, edit in (("paper_printed_cubic", edit_with_printed_cubic), ("paper_unguarded_solve", edit_unguarded)):
        done = edit(weight, moments, mean_reduction=mean, covariance_reduction=covariance)
        yield Outcome(
            Variant.reduced(name, mean, covariance),
            finetuned(trained, done.weight, experiment.evaluated_on),
            mean_reached=done.mean_reached,
            covariance_reached=done.covariance_reached,
        )
    yield _edited(trained, experiment, Variant.reduced("algorithm_2", mean, covariance), refit="ols")


def finetuned(trained: Trained, weight: Array, evaluated_on: str) -> Array:
    """(rows,) predictions with another weight in the last hidden layer, after the paper's fine-tune of the next."""
    network, rows = copy.deepcopy(trained.network), trained.split.train
    with torch.no_grad():
        linear(network, -3).weight.copy_(torch.as_tensor(weight))
    seen, there = (run_through(network[:-1], x) for x in (rows.X, trained.examples(evaluated_on).X))
    last = linear(network, -1)
    start = last.weight[0].detach().double().numpy()
    fit = finetune(seen, rows.y, weight=start, bias=last.bias[0].item(), random_state=trained.seed)
    return there @ fit.weight + fit.bias


def _edited(trained: Trained, experiment: Experiment, variant: Variant, *, refit: str) -> Outcome:
    """Algorithm 2 with the reductions of the variant."""
    fair = repair(
        trained,
        method="paper",
        mean_reduction=variant.mean_reduction,
        covariance_reduction=variant.covariance_reduction,
        refit=refit,
    )
    covariance, mean, _ = fair.edits_
    return Outcome(
        variant,
        fair.predict(trained.examples(experiment.evaluated_on).X),
        mean_reached=float(np.sum(mean.sigma_before**2)) / mean.achieved,
        covariance_reached=float(np.sum(covariance.sigma_before**4)) / covariance.achieved,
    )


def repaired(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """`parity` at the target, `transport` at it and along its curve, every point chosen on the validation rows."""
    x, target = trained.examples(experiment.evaluated_on).X, experiment.target_ks
    asked = {"target_ks": target, "effort": experiment.effort}
    parity, transport = (repair(trained, method=method, **asked) for method in ("parity", "transport"))
    yield Outcome(Variant("parity", level=target), parity.predict(x), met=parity.summary_["met"])
    for level in experiment.transport_levels:
        point = transport.curve_.select(target_ks=level)
        prediction = predict(transport.curve_.model(point.index), x)
        yield Outcome(Variant("transport", level=level), prediction, met=transport.curve_.meets(point, level))


def repair(trained: Trained, **options: Any) -> ESVDFair:
    """:class:`ESVDFair` with these options on the training rows of a seed; points are chosen on its validation rows."""
    rows = trained.split.train
    fair = ESVDFair(trained.network, random_state=trained.seed, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)  # a target that is not met is a column of the row
        return fair.fit(rows.X, rows.y, sensitive_features=rows.sensitive_features, validation=trained.split.validation)


def optimum(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """The attribute-unaware plug-in optimum at every level of its curve; last, at level 1, the estimate of E[Y|x].

    Fitted on the training rows, from what the last hidden layer knows: the estimate is the network with its last layer
    refitted, or as it is if that errs less on the validation rows.
    """
    sample = sample_of(trained.network, trained, experiment.effort)
    refits = Refits(sample, experiment.effort)
    weight, bias = refits.regression_layer
    (there,) = _features(trained, experiment.evaluated_on)
    eta, eta_there = sample.training.features @ weight + bias, there @ weight + bias
    probability, probability_there = (refits.group_probability(x) for x in (refits.rotated, refits.space.rotate(there)))
    for found in fit_optimum(eta, probability, levels=experiment.optimum_levels):
        yield Outcome(Variant("optimum", level=found.level), found.predict(eta_there, probability_there))
    yield Outcome(Variant("optimum", level=1.0), eta_there)


def _features(trained: Trained, *names: str) -> list[NDArray[np.float32]]:
    """(rows, width) inputs of the output layer."""
    return [run_through(trained.network[:-1], trained.examples(name).X) for name in names]


METHODS: dict[Part, Callable[[Trained, Experiment], Iterator[Outcome]]] = {
    "references": references,
    "paper": paper,
    "repaired": repaired,
    "retrained": retrained,
    "peers": peers,
}
