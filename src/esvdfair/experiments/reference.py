"""The attribute-unaware optimum of a seed, along a curve of levels, and regret against it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from esvdfair.candidates import RIDGES
from esvdfair.core.checks import encode_groups
from esvdfair.core.moments import GroupMoments
from esvdfair.core.optimum import fit_optimum
from esvdfair.core.refit.ols import fit_ols
from esvdfair.core.refit.quadratic import FeatureSpace
from esvdfair.experiments.trained import Trained

Array = NDArray[np.float64]


def unaware_optimum(trained: Trained, levels: Sequence[float], evaluated_on: str) -> list[tuple[float, Array]]:
    """Levels α and predictions of the optimum for the evaluated rows; last, at level 1, the estimate of E[Y|x] itself.

    Fitted on the training rows, from what the last hidden layer knows.

    η(x) = E[Y|x] is the output layer, as trained or refitted to the labels with one of a few ridges, whichever errs
    least on the validation rows; P(group|x) is a logistic regression on the whitened features.
    """
    part = trained.split.train
    moments = GroupMoments().update(np.column_stack([trained.outer["train"], part.y]), part.sensitive_features)
    weight, bias = _best_regression(trained, moments)
    eta, eta_there = (trained.outer[name] @ weight + bias for name in ("train", evaluated_on))
    probability, probability_there = _group_probability(trained, moments, evaluated_on)
    optima = fit_optimum(eta, probability, levels=levels)
    curve = [(optimum.level, optimum.predict(eta_there, probability_there)) for optimum in optima]
    return [*curve, (1.0, eta_there)]


def interpolated_regret(mse: float, ks: float, *, curve_mse: Array, curve_ks: Array, gain: float) -> float:
    """(mse − mse of the optimum's curve at the same KS) / gain; 0 is optimal (DESIGN 2.7).

    ``gain`` is the mse of the best constant minus that of the untouched model. The curve is linear between its points,
    after each has been given the lowest error of any that is as fair: an error that sampling made larger at a looser
    level would flatter us. Fairer than the fairest point of the curve, the error of that point is taken, which also
    errs against us.
    """
    order = np.lexsort((curve_mse, curve_ks))
    lowest = np.minimum.accumulate(curve_mse[order])
    return (mse - float(np.interp(ks, curve_ks[order], lowest))) / gain


def _best_regression(trained: Trained, moments: GroupMoments) -> tuple[Array, float]:
    layer, validation = trained.output_layer, trained.split.validation
    start = layer.weight[0]
    candidates = [(start, float(layer.bias[0]))]
    for ridge in RIDGES:
        fit = fit_ols(moments, target=len(start), original=start, ridge=ridge)
        candidates.append((fit.weight, fit.bias))
    errors = [np.mean((trained.outer["validation"] @ w + b - validation.y) ** 2) for w, b in candidates]
    return candidates[int(np.argmin(errors))]


def _group_probability(trained: Trained, moments: GroupMoments, evaluated_on: str) -> tuple[Array, Array]:
    """P̂(group | features) of the training rows and of the evaluated rows, each (rows, G)."""
    space = FeatureSpace.from_moments(moments, trained.outer["train"].shape[1])
    keep = space.variances > 1e-8 * space.variances[-1]
    scale = 1.0 / np.sqrt(space.variances[keep])
    seen, there = (space.rotate(trained.outer[name])[:, keep] * scale for name in ("train", evaluated_on))
    codes = encode_groups(trained.split.train.sensitive_features)[1]
    classifier = LogisticRegression(max_iter=200).fit(seen, codes)
    return np.asarray(classifier.predict_proba(seen)), np.asarray(classifier.predict_proba(there))
