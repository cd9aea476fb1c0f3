"""Repair a model on data of several sites, each of which gives away group moments and no row.

Every site runs :func:`collect_moments`, somebody :func:`merge_moments`, and whoever owns the model
:func:`repair_from_moments`. Moments add up exactly, so the result is that of one pass over the rows of all sites.
"""

from esvdfair.federated.guard import MAX_LEVERAGE, MIN_ROWS, Noise, gaussian_sigma
from esvdfair.federated.merge import MaskedMoments, make_key, mask_moments, merge_moments
from esvdfair.federated.repair import RIDGE, repair_from_moments
from esvdfair.federated.sites import OutputFigures, Site, SiteMoments, collect_moments

__all__ = [
    "MAX_LEVERAGE",
    "MIN_ROWS",
    "RIDGE",
    "MaskedMoments",
    "Noise",
    "OutputFigures",
    "Site",
    "SiteMoments",
    "collect_moments",
    "gaussian_sigma",
    "make_key",
    "mask_moments",
    "merge_moments",
    "repair_from_moments",
]
