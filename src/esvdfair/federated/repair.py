"""The owner of the model: moments of all sites -> a repaired model."""

import warnings
from typing import Any

import numpy as np

from esvdfair.candidates import Candidate, Refits
from esvdfair.core.checks import Label
from esvdfair.core.moments import GroupMoments
from esvdfair.core.refit.parity import ParityProblem
from esvdfair.distributed import broadcast, together
from esvdfair.estimator import ESVDFair
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.federated.sites import SiteMoments, Source, loaded
from esvdfair.models import ModelAdapter, adapt, find_layer
from esvdfair.models.fingerprint import fingerprint
from esvdfair.passes import Pass, Rows
from esvdfair.repair import (
    Gathered,
    Repair,
    Setting,
    collect_judging,
    last_edit,
    last_weights,
    refit_by_parity,
)
from esvdfair.shards import share_probe

RIDGE = 1e-4
"""Ridge of a repair that no rows judge; with validation rows, those choose among ``candidates.RIDGES``."""


def repair_from_moments(
    model: Any,
    moments: Source,
    *,
    validation: tuple[Any, ...] | None = None,
    target_ks: float | None = None,
    output: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
    random_state: Any = 0,
) -> ESVDFair:
    """Repair a model by ``parity`` from moments, without the rows that they are of.

    Parameters
    ----------
    model : the model that the moments were collected with; never changed
    moments : SiteMoments, or the path of a file that holds them
    validation : (X, y, sensitive_features) or a fourth item with weights, optional
        Local rows on which candidates are judged and one is chosen, as by ``ESVDFair(method="parity")``. Without them
        group means and variances become equal over the rows of the moments, with the ridge ``RIDGE``, and no more can
        be said of the result than moments tell: ``summary_["ks_after"]`` is None, and there is no ``curve_``.
    target_ks : float, optional
        As in ESVDFair; needs ``validation``, since no moments tell a KS distance.
    output, missing, batch_size, random_state : as in ESVDFair

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
    site = loaded(moments)
    fair = ESVDFair(
        model,
        method="parity",
        target_ks=target_ks,
        output=output,
        missing=missing,
        batch_size=batch_size,
        random_state=random_state,
    )
    fair._check_options()
    if target_ks is not None and validation is None:
        raise ValueError(
            f"target_ks={target_ks:g} needs validation rows: a KS distance cannot be known from moments. Pass "
            "validation=, or leave the target out for equal means and variances."
        )
    adapter = adapt(model, output=output)
    _check_model(adapter, site)
    site.moments.require_groups(rows=2)
    with together():
        if validation is None:
            _finish_blind(fair, adapter, site)
        else:
            fair._finish(_judged_repair(fair, adapter, site, validation))
    fair._predictor = adapt(fair.estimator_, output=output)
    width = adapter.n_features or (None if site.features is None else len(site.features))
    if width is not None:
        fair.n_features_in_ = width
    return fair


# --- the refit -----------------------------------------------------------------------------------------------------


def _judged_repair(fair: ESVDFair, adapter: ModelAdapter, site: SiteMoments, validation: tuple[Any, ...]) -> Repair:
    """All parity candidates of the moments, judged on validation rows."""
    batches = fair._validation_batches(validation)
    probe, _ = share_probe(next(iter(batches), None))
    seed, labels = broadcast(fair._seed), site.moments.labels
    layers = adapter.layers(probe)
    judging = collect_judging(adapter, batches, find_layer(layers, site.layer.name), labels=labels, seed=seed)
    none = _no_rows(site)
    seen = Pass(labels, site.moments, none, none, GroupMoments())
    setting = Setting(adapter, layers, site.layer, batches, None, None, seed, site.labelled)
    reduction = None if fair.target_ks is not None else np.inf
    return refit_by_parity(
        setting,
        Gathered(seen, none, judging, "validation"),
        targets=_targets(site),
        mean_reduction=reduction,
        covariance_reduction=reduction,
    )


def _finish_blind(fair: ESVDFair, adapter: ModelAdapter, site: SiteMoments) -> None:
    """Equal means and variances over the rows of the moments, and what these tell about it."""
    none = _no_rows(site)
    refits = Refits(site.layer, site.moments, none, none, len(site.moments.labels))
    name, quadratic = next(refits.quadratics(_targets(site)[0], [RIDGE]))
    fit = ParityProblem(quadratic, np.inf).solve(0.0)
    candidate = broadcast(lambda: Candidate(fit.weight, fit.bias, name, RIDGE, np.inf, fit.converged))
    fair.estimator_ = adapter.replace(last_weights(site.layer, candidate)).model
    fair.edits_ = [last_edit(site.layer, candidate, site.moments)]
    fair.summary_ = _known(site, candidate)


def _targets(site: SiteMoments) -> tuple[str, ...]:
    """What a refit can aim at: labels before a curved head would need rows."""
    return ("labels", "predictions") if site.labelled and site.layer.head.is_affine else ("predictions",)


def _no_rows(site: SiteMoments) -> Rows:
    none = np.zeros(0)
    return Rows(np.zeros((0, len(site.layer.weight))), none, none, np.zeros(0, dtype=np.intp), none)


def _known(site: SiteMoments, candidate: Candidate) -> dict[str, Any]:
    """A summary with the keys of ESVDFair's; None for what moments do not tell."""
    labels = site.moments.labels
    before, after = site.figures(), site.figures(candidate.weight, candidate.bias)
    _note_flat(before.variances, after.variances, labels)

    def by_group(values: Any) -> dict[Label, float] | None:
        return None if values is None else dict(zip(labels, np.asarray(values).tolist(), strict=True))

    mse = before.mse, after.mse
    group_mse = before.group_mse, after.group_mse
    change = None if site.labelled else site.change(candidate.weight, candidate.bias)
    if change is not None:
        mse, group_mse = (0.0, change[0]), (np.zeros(len(labels)), change[1])
    return {
        "method": "parity",
        "target_ks": None,
        "met": None,
        "mse_before": mse[0],
        "mse_after": mse[1],
        "ks_before": None,
        "ks_after": None,
        "ks_interval": None,
        "ks_floor": None,
        "group_sizes": dict(zip(labels, site.moments.rows.tolist(), strict=True)),
        "group_mse_before": by_group(group_mse[0]),
        "group_mse_after": by_group(group_mse[1]),
        "r2_before": before.r2,
        "r2_after": after.r2,
        "group_r2_before": by_group(before.group_r2),
        "group_r2_after": by_group(after.group_r2),
        "mean_gap_before": before.mean_gap,
        "mean_gap_after": after.mean_gap,
        "variance_gap_before": before.variance_gap,
        "variance_gap_after": after.variance_gap,
        "before_head": not site.layer.head.is_affine,
        "evaluated_on": "moments",
        "rows": site.rows,
    }


def _note_flat(before: Any, after: Any, labels: tuple[Label, ...]) -> None:
    if after.max() < 0.01 * before.max():
        warnings.warn(
            f"with these {len(labels)} groups, equal means and variances leave nearly one prediction for everybody: "
            f"its standard deviation is {np.sqrt(max(after.max(), 0.0)):.2g}, it was {np.sqrt(before.max()):.2g}. Pass "
            "validation= and target_ks for a milder repair.",
            ESVDFairWarning,
            stacklevel=5,
        )


def _check_model(adapter: ModelAdapter, site: SiteMoments) -> None:
    mine = fingerprint(adapter.model)
    if mine != site.model:
        raise ValueError(
            f"the moments are of another model: SHA-256 {site.model}, and that of this model is {mine}. Inputs of "
            "another model's last layer say nothing about this one; collect them with this model."
        )
