"""Every method of the tables on one trained network: what it predicts for the evaluated rows.

Nothing is built here that the library has: the rows run :class:`~esvdfair.ESVDFair`, the baselines and the estimates
of E[Y|x] and P(group|x) that users run. Only the errata, which nobody should use, have code of their own.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq, fsolve
from torch import nn

from esvdfair.baselines import GroupPredictor, PrivateHistogram, WassersteinBarycenter
from esvdfair.core import gaps
from esvdfair.core.edits import LayerEdit, edit_mean_paper, shrink_mean, solve_covariance
from esvdfair.core.metrics import ks_population
from esvdfair.core.moments import GroupMoments
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.quadratic import Fit
from esvdfair.curve import Curve
from esvdfair.estimator import ESVDFair
from esvdfair.evaluation import evaluate
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.gather import summarise
from esvdfair.hidden import finetune
from esvdfair.methods import Candidates, Refits
from esvdfair.models import adapt
from esvdfair.problem import Effort, Problem, make_problem
from reproduction import network as nets
from reproduction.config import Experiment, Part, Variant
from reproduction.network import Trained, linear, predict, run_through
from reproduction.peers import EquipyWasserstein, FairlearnCorrelationRemover, LeaceRegression
from reproduction.runs import Outcome

Array = NDArray[np.float64]
Shrink = Callable[[Array, Array, float], Array]

# Only on 0/1 targets does it matter: without it both groups can get the same constant, which KS counts as equal.
_JITTER = 1e-9
_BINS = 18  # of the private histogram, as in the authors' code
_EPSILON = 1e-5  # of S_e, as in the paper


# --- references and baselines --------------------------------------------------------------------------------------


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
    rows, seen = trained.split.train, trained.features("train")
    leace = LeaceRegression().fit(trained.scores("train"), rows.y, sensitive_features=rows.sensitive_features, X=seen)
    yield Outcome(Variant("leace"), leace.predict(X=trained.features(experiment.evaluated_on)))


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
    classifier = nets.NetworkClassifier(experiment.training, trained.seed) if network else None
    rows = trained.split.train
    predictor = GroupPredictor(classifier=classifier).fit(rows.X, rows.sensitive_features)
    return predictor.predict(trained.examples(experiment.evaluated_on).X)


def optimum(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """The attribute-unaware plug-in optimum at every level of its curve; last, at level 1, the estimate of E[Y|x].

    Fitted on the training rows, from what the last hidden layer knows: the estimate is the network with its last layer
    refitted, or as it is if that errs less on the validation rows.
    """
    sample = sample_of(trained.network, trained, experiment.effort)
    refits = Refits(sample, experiment.effort)
    known = refits.regression_layer
    there = trained.features(experiment.evaluated_on)
    eta, eta_there = (features @ known.weight + known.bias for features in (sample.training.features, there))
    probability, probability_there = (refits.group_probability(x) for x in (sample.training.features, there))
    for found in fit_optimum(eta, probability, levels=experiment.optimum_levels):
        yield Outcome(Variant("optimum", level=found.level), found.predict(eta_there, probability_there))
    yield Outcome(Variant("optimum", level=1.0), eta_there)


def sample_of(network: nn.Sequential, trained: Trained, effort: Effort | None = None) -> Problem:
    """What the network makes of the training rows, which fit, and of the validation rows, which judge."""
    rows = trained.split.train
    parts = [
        summarise(network, X, y, sensitive_features=a, rows=(effort or Effort()).rows)
        for X, y, a in ((rows.X, rows.y, rows.sensitive_features), trained.split.validation)
    ]
    return make_problem(*parts, seed=trained.seed)


# --- the repairs ---------------------------------------------------------------------------------------------------


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


def paper(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """Algorithm 1 at the last hidden layer and the fine-tune of the output layer, along the reductions."""
    for reductions in experiment.reductions:
        yield _edited(trained, experiment, Variant.reduced("paper", *reductions), refit="sgd")
    if experiment.is_comparison:
        yield from errata(trained, experiment)


def _edited(trained: Trained, experiment: Experiment, variant: Variant, *, refit: str) -> Outcome:
    """Algorithm 2 with the reductions of the variant."""
    reductions = {name: getattr(variant, name) for name in ("mean_reduction", "covariance_reduction")}
    # Without a target nothing is scanned: the effort is that of the judging alone, and decides no row.
    fair = repair(trained, method="paper", refit=refit, effort=experiment.effort, **reductions)
    covariance, mean, _ = fair.edits_
    prediction = fair.predict(trained.examples(experiment.evaluated_on).X)
    return Outcome(variant, prediction, mean_reached=_reached(mean, 2), covariance_reached=_reached(covariance, 4))


def _reached(edit: LayerEdit, power: int) -> float:
    """By how much Σσᵖ really fell."""
    return float(np.sum(edit.sigma_before**power)) / edit.achieved


# --- errata: the paper's edit as printed and as its authors solve it, to measure what they cost ---------------------


def errata(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """What the paper's slips do: the printed cubic, the authors' root solve, the least-squares refit."""
    (reductions,) = experiment.reductions
    rows, weight = trained.split.train, linear(trained.network, -3).weight.detach().double().numpy()
    moments = GroupMoments().update(run_through(trained.network[:-3], rows.X), rows.sensitive_features)
    for name, edit in (("paper_printed_cubic", edit_with_printed_cubic), ("paper_unguarded_solve", edit_unguarded)):
        after, *reached = edit(weight, moments, *reductions)
        yield Outcome(
            Variant.reduced(name, *reductions), finetuned(trained, after, experiment.evaluated_on), None, *reached
        )
    yield _edited(trained, experiment, Variant.reduced("algorithm_2", *reductions), refit="ols")


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


class ErrataEdit(NamedTuple):
    """The weight (m, n) after both edits, and by how much Σσ² and Σσ⁴ really fell."""

    weight: Array
    mean_reached: float
    covariance_reached: float


def printed_cubic(sigma: Array, cost: Array, multiplier: float) -> Array:
    """σ' as the appendix prints it, with ``27γ⁴ k σ²`` under the root where ``27γ⁴ k² σ²`` is right."""
    k, g = cost, multiplier
    with np.errstate(invalid="ignore", divide="ignore"):  # a negative cost gives no number; the authors saw none either
        root = np.sqrt(2 * g**3 * k**3 + 27 * g**4 * k * sigma**2)
        phi = np.cbrt(9 * g**2 * k * sigma + np.sqrt(3.0) * root)
        return np.asarray(-k / (6 ** (1 / 3) * phi) + phi / (6 ** (2 / 3) * g))


def edit_with_printed_cubic(
    weight: Array, moments: GroupMoments, mean_reduction: float, covariance_reduction: float
) -> ErrataEdit:
    """Algorithm 1 with the printed cubic and everything else right: costs as squared norms, a bracketed root."""
    svd = gaps.explain_covariance(weight, moments)
    total = float(np.sum(svd.sigma**4))
    budget = total / covariance_reduction
    active = (svd.cost > 0) & (svd.sigma > 0)
    sigma, cost = svd.sigma[active], svd.cost[active]

    def excess(log_gamma: float) -> float:
        return float(np.log(np.sum(printed_cubic(sigma, cost, np.exp(log_gamma)) ** 4) / budget))

    # The right multiplier is near theirs: widen a bracket around it until it holds the root.
    low = high = float(np.log(solve_covariance(sigma, cost, budget).multiplier))
    while excess(low) < 0:
        low -= 1.0
    while excess(high) > 0:
        high += 1.0
    shrunk = np.zeros_like(svd.sigma)
    shrunk[active] = printed_cubic(sigma, cost, float(np.exp(brentq(excess, low, high))))
    edit = edit_mean_paper((svd.u * shrunk) @ svd.step, moments, reduction=mean_reduction, epsilon=_EPSILON)
    return ErrataEdit(edit.weight_after, _reached(edit, 2), total / float(np.sum(shrunk**4)))


def edit_unguarded(
    weight: Array, moments: GroupMoments, mean_reduction: float, covariance_reduction: float
) -> ErrataEdit:
    """Algorithm 1 with the printed cubic, costs as direct products, inverses, and ``fsolve`` started from 1.

    Written after a description of the authors' code, not copied from it. A cost that rounding made negative has no σ';
    the root solve then sees no numbers and returns its start, and σ stays as it is in those directions.
    """
    second_moment = gaps.scatter_about(moments, centred=False)
    values, vectors = np.linalg.eigh(gaps.covariance_differences(moments)[0])
    spread, shift = vectors * np.sqrt(np.abs(values)), gaps.mean_factor(moments, _EPSILON)
    weight, covariance_reached = edit_unbracketed(weight, spread, second_moment, 4, covariance_reduction, printed_cubic)
    weight, mean_reached = edit_unbracketed(weight, shift, second_moment, 2, mean_reduction, shrink_mean)
    return ErrataEdit(weight, mean_reached, covariance_reached)


def edit_unbracketed(
    weight: Array, factor: Array, second_moment: Array, power: int, reduction: float, shrink: Shrink
) -> tuple[Array, float]:
    """The weight with ``Σσᵖ`` of ``W S`` lowered ``reduction`` times if the root solve works; by how much it was."""
    u, sigma, vt = np.linalg.svd(weight @ factor, full_matrices=False)
    step = vt @ np.linalg.pinv(factor)
    cost = np.array([p @ second_moment @ p for p in step])
    total = float(np.sum(sigma**power))

    def excess(gamma: Array) -> list[float]:
        return [float(np.sum(shrink(sigma, cost, float(gamma[0])) ** power)) - total / reduction]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # its failure goes unseen, as in the authors' code
        gamma = float(fsolve(excess, 1.0)[0])
    shrunk = shrink(sigma, cost, gamma)
    shrunk = np.where(np.isfinite(shrunk), shrunk, sigma)
    return (u * shrunk) @ step, total / float(np.sum(shrunk**power))


# --- all layers trained with a penalty -----------------------------------------------------------------------------


def retrained(trained: Trained, experiment: Experiment) -> Iterator[Outcome]:
    """What a user would do instead: train all layers on the error plus λ·W₂² between the groups' predictions.

    From the trained network and from scratch, each with as many epochs as the network had. λ is chosen on the
    validation rows, by the rule that chooses our own points.
    """
    shape, target = experiment.training, experiment.target_ks
    with nets.seeded(trained.seed):
        fresh = nets.build_network(trained.split.train.X.shape[1], width=shape.width, depth=shape.depth)
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
    # From scratch the penalty rises, or the network would begin as a constant.
    scratch = replace(how, learning_rate=2 * how.learning_rate)
    first = scratch if name == "from_scratch" else replace(how, ramp=0)
    later = replace(how, learning_rate=0.5 * how.learning_rate, ramp=0)
    for stage in range(how.stages):
        epochs, settings = (how.more_epochs, later) if stage else (experiment.training.epochs, first)
        seed = trained.seed + stage
        make = partial(nets.train_on_both, start, rows, penalty, settings, epochs=epochs, seed=seed)
        decided_by = experiment.training, how, penalty
        start = trained.shelf.get(f"seed-{trained.seed}-{name}-{stage}", make, *decided_by)
        networks[penalty] = start
        there = trained.split.validation
        ks = ks_population(predict(start, there.X), sensitive_features=there.sensitive_features)
        apart = ks / (0.95 * experiment.target_ks)
        penalty = float(f"{penalty * np.clip(apart**2, 0.25, 4.0):.4g}")
    return networks


def curve_of(networks: Mapping[float, nn.Sequential], trained: Trained) -> Curve:
    """The trade-off curve of whole networks, judged as the candidates of a repair are; ``strength`` is λ."""
    samples = {penalty: sample_of(network, trained) for penalty, network in networks.items()}
    original, *_ = samples.values()
    validation = np.column_stack([sample.validation.prediction for sample in samples.values()])
    training = np.column_stack([sample.training.prediction for sample in samples.values()])
    # What they predict is given, so their last layers, each on features of its own, do not matter.
    fits = tuple(Fit(original.layer.weight[0], 0.0, strength=penalty) for penalty in samples)
    candidates = Candidates(original, fits, validation, training)
    return evaluate(candidates, adapt(trained.network), effort=Effort.quick())


METHODS: dict[Part, Callable[[Trained, Experiment], Iterator[Outcome]]] = {
    "references": references,
    "paper": paper,
    "repaired": repaired,
    "retrained": retrained,
    "peers": peers,
}
