"""The owner of the model: moments of all sites -> a repaired model."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from esvdfair.batches import Data, Rows, make_batches
from esvdfair.core.checks import Label, by_group
from esvdfair.core.quadratic import Fit, Head
from esvdfair.curve import FLAT, before_and_after, choose, judge
from esvdfair.distributed import few_threads, together
from esvdfair.estimator import ESVDFair, check_options, take_model, take_point
from esvdfair.exceptions import ESVDFairWarning, Given, InputError
from esvdfair.federated.sites import MomentsFile, SiteMoments
from esvdfair.methods import Candidates, account_for, parity, untouched, weights_of
from esvdfair.models import ModelAdapter, adapt, fingerprint
from esvdfair.models.base import PROBE_ROWS
from esvdfair.sample import Effort, Sample, draw_judging, meet

RIDGE = 1e-4
"""Ridge of a repair that no rows judge; with validation rows, those choose among those of ``Effort``."""

GUARDED_RIDGES = (1e-2, 1e-1)
"""Ridges where people or units are not in the moments: along what only those have, a weaker one lets weights run away.

The first serves a repair that no rows judge (docs/federated.md, "What it costs"; chosen on seeds 1-3).
"""


def repair_from_moments(
    model: Any,
    moments: SiteMoments | MomentsFile,
    *,
    validation: Any = None,
    target_ks: float | None = None,
    confidence: float | None = None,
    certificate: str = "normal",
    output: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
    effort: Effort | None = None,
    random_state: Any = 0,
) -> ESVDFair:
    """Repair a model by ``parity`` from moments, without the rows that they are of.

    Parameters
    ----------
    model : the model that the moments were collected with; never changed
    moments : SiteMoments, or the path of a file that holds them
    validation : (X, y, sensitive_features[, sample_weight[, control_features]]) or what yields such batches, optional
        Local rows on which candidates are judged and one is chosen, as by ``ESVDFair(method="parity")``. Without them
        group means and variances become equal over the rows of the moments, with the ridge ``RIDGE``, and no more can
        be said of the result than moments tell: ``summary_["ks_after"]`` and ``point_`` are None, and there is no
        ``curve_``.
    target_ks : float, optional
        As in ESVDFair; needs ``validation``, since no moments tell a KS distance.
    confidence, certificate, output, missing, batch_size, effort, random_state : as in ESVDFair

    Returns
    -------
    ESVDFair
        Fitted: ``estimator_`` is the repaired model, ``summary_`` what was reached. Its ``evaluated_on`` is
        "validation", or "moments" with further keys: ``r2_…`` and ``group_r2_…`` where there are labels, and
        ``before_head``, True where the head is curved, so that gaps are those before it and errors are unknown.

    Raises
    ------
    ValueError
        The moments are of another model, hold fewer than two groups, or ``target_ks`` came without ``validation``.
    """
    site = moments if isinstance(moments, SiteMoments) else SiteMoments.load(moments)
    fair = ESVDFair(
        model,
        method="parity",
        target_ks=target_ks,
        confidence=confidence,
        certificate=certificate,
        output=output,
        missing=missing,
        batch_size=batch_size,
        effort=effort,
        random_state=random_state,
    )
    check_options(fair)
    if target_ks is not None and validation is None:
        raise InputError(
            "{target_ks} needs validation rows: a KS distance cannot be known from moments. Pass {validation}, or "
            "leave the target out for equal means and variances.",
            target_ks=Given(target_ks),
            validation=Given(),
        )
    adapter = adapt(model, output=output)
    _check_model(adapter, site)
    site = _quieted(site)
    site.compared.require_groups(rows=2)
    fair.model_ = adapter.model
    with together(), few_threads(site.layer.weight.shape[1]):
        if validation is None:
            _repair_blindly(fair, adapter, site)
        else:
            _repair_judged(fair, adapter, site, validation)
    if site.inputs is not None:
        fair.n_features_in_ = site.inputs
    return fair


# --- the refit -----------------------------------------------------------------------------------------------------


def _repair_judged(fair: ESVDFair, adapter: ModelAdapter, site: SiteMoments, validation: Any) -> None:
    """All parity candidates of the moments, judged on validation rows."""
    reading: dict[str, Any] = {"missing": fair.missing, "batch_size": fair.batch_size, "classes": adapter.classes}
    batches = make_batches(Data.of(validation), name="validation", **reading)
    setting = meet(adapter, batches, seed=fair.seed(), effort=fair.effort)
    _check_head(setting.head, site)
    effort = replace(setting.effort, ridges=GUARDED_RIDGES) if _guarded(site) else setting.effort
    judging = draw_judging(setting, site.compared.labels)
    if (judging.adjusted is not None) != bool(site.group_parts):
        raise InputError(
            "the moments are {not_}adjusted for {control_features}, and {validation} must be as well; give both, or "
            "neither.",
            not_="" if site.group_parts else "not ",
            control_features=Given(),
            validation=Given(),
        )
    sample = replace(
        _without_rows(site),
        judging=judging,
        judged_on="validation",
        error_against="labels" if setting.has_labels else "predictions",
    )
    reduction = None if fair.target_ks is not None else np.inf
    fits = parity(
        sample, targets=_targets(site), mean_reduction=reduction, covariance_reduction=reduction, effort=effort
    )
    candidates = Candidates.of(sample, [*fits, untouched(sample.layer)])
    judged: dict[str, Any] = {"effort": effort, "confidence": fair.confidence, "certificate": fair.certificate}
    curve = judge(candidates, adapter, seed=setting.seed, **judged)
    take_point(fair, candidates, curve, choose(curve, target_ks=fair.target_ks))


def _repair_blindly(fair: ESVDFair, adapter: ModelAdapter, site: SiteMoments) -> None:
    """Equal means and variances over the rows of the moments, and what these tell about it."""
    sample = _without_rows(site)
    effort = replace(fair.effort or Effort(), ridges=(GUARDED_RIDGES[0] if _guarded(site) else RIDGE,))
    *_, fit = parity(
        sample, targets=_targets(site)[:1], mean_reduction=np.inf, covariance_reduction=np.inf, effort=effort
    )
    fair.point_ = None
    take_model(fair, adapter.replace(weights_of(site.layer, fit)))
    fair.edits_ = account_for(sample, fit)
    fair.summary_ = _known(site, fit)


def _guarded(site: SiteMoments) -> bool:
    """Whether something may not be in the moments that is in the rows; under masks a site does not say."""
    return bool(site.left_out) or any(part.withheld or not part.rows for part in site.sites)


def _targets(site: SiteMoments) -> tuple[str, ...]:
    """What a refit can aim at: labels before a curved head would need rows."""
    return ("labels", "predictions") if site.labelled and site.head.is_affine else ("predictions",)


def _without_rows(site: SiteMoments) -> Sample:
    """The moments as what a pass leaves, with no rows."""
    none = Rows.none(site.layer.weight.shape[1])
    against = "labels" if site.labelled else "predictions"
    return Sample(site.compared.labels, site.compared, site.layer, site.head, none, none, "moments", against)


_UNKNOWN = (
    "target_ks", "met", "certified", "confidence", "mse_refit", "ks_before", "ks_after", "ks_population", "ks_upper",
    "ks_interval", "ks_floor",
)  # fmt: skip
"""What moments alone do not tell, of the keys of a summary."""
_TOLD = ("mse", "group_mse", "r2", "group_r2", "mean_gap", "variance_gap")
"""What they tell of a model."""


def _known(site: SiteMoments, fit: Fit) -> dict[str, Any]:
    """A summary with the keys of ESVDFair's; None for what moments do not tell."""
    labels, before, after = site.compared.labels, site.figures(), site.figures(fit.weight, fit.bias)
    change = None if site.labelled else site.change(fit.weight, fit.bias)
    if change is not None:
        before = replace(before, mse=0.0, group_mse=np.zeros(len(labels)))
        after = replace(after, mse=change[0], group_mse=change[1])
    _note_flat(before.variances, after.variances, labels)
    old, new = (
        {name: value.tolist() if isinstance(value := getattr(figures, name), np.ndarray) else value for name in _TOLD}
        for figures in (before, after)
    )
    return {
        **dict.fromkeys(_UNKNOWN),
        **before_and_after(labels, old, new),
        "method": "parity",
        "decided_by": "no target",
        "constant": bool(after.variances.max() <= FLAT**2 * before.variances.max()),
        "group_sizes": by_group(labels, site.compared.rows.tolist()),
        "before_head": not site.head.is_affine,
        "evaluated_on": "moments",
        "error_against": "labels" if site.labelled else "predictions",
        "rows": site.rows,
    }


def _note_flat(before: Any, after: Any, labels: tuple[Label, ...]) -> None:
    if after.max() < 0.01 * before.max():
        warnings.warn(
            ESVDFairWarning(
                "with these {groups} groups, equal means and variances leave nearly one prediction for everybody: its "
                "standard deviation is {after:.2g}, it was {before:.2g}. Pass {validation} and {target_ks} for a "
                "milder repair.",
                groups=len(labels),
                after=np.sqrt(max(after.max(), 0.0)),
                before=np.sqrt(before.max()),
                validation=Given(),
                target_ks=Given(),
            ),
            stacklevel=5,
        )


def _check_model(adapter: ModelAdapter, site: SiteMoments) -> None:
    mine = fingerprint(adapter.model)
    if mine != site.model:
        raise ValueError(
            f"the moments are of another model: SHA-256 {site.model}, and that of this model is {mine}. Inputs of "
            "another model's last layer say nothing about this one; collect them with this model."
        )
    # With its own layer put in its place a model stays as it is.
    same, put = (
        fingerprint(adapter.replace(w).model) for w in ({}, {site.layer.name: (site.layer.weight, site.layer.bias)})
    )
    if put != same:
        raise ValueError(
            f"the moments say that layer {site.layer.name!r} has other weights than it has in this model, though they "
            "name this model; the file was changed. Collect it again."
        )
    rows = np.zeros((PROBE_ROWS, site.inputs or 0))
    try:  # a head is looked at by chosen outputs of the layer, so that any rows serve which the model takes
        head = adapter.head(rows if site.features is None else pd.DataFrame(rows, columns=list(site.features)))
    except (ValueError, TypeError, RuntimeError):  # none of zeros, such as words: the file's checksum must do
        return
    _check_head(head, site)


def _check_head(head: Head, site: SiteMoments) -> None:
    """Raise unless the model's head is the one that the moments speak of."""
    z = np.linspace(-8.0, 8.0, 65)
    mine, told = head.apply(z), site.head.apply(z)
    if not np.allclose(mine, told, rtol=1e-4, atol=1e-4 * float(np.ptp(mine))):
        raise ValueError(
            f"the moments say that the model ends in {site.head.kind}, and it ends in {head.kind}, or in another scale "
            "of it; the file was changed. Collect it again."
        )


def _quieted(site: SiteMoments) -> SiteMoments:
    """The moments as a repair can use them: variances that noise made negative are zero. Uses nothing but the file."""
    if not any(part.noise for part in site.sites):
        return site
    moments = site.moments
    values, axes = np.linalg.eigh((moments.scatters + moments.scatters.transpose(0, 2, 1)) / 2)
    scatters = axes * np.maximum(values, 0.0)[:, None, :] @ axes.transpose(0, 2, 1)
    return replace(site, moments=moments.replaced(moments.means, scatters))
