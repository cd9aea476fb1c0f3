"""Other ways to the same end, behind one shape: ``fit(scores, y, sensitive_features=…)`` and ``predict(scores, …)``.

`WassersteinBarycenter` and `PrivateHistogram` need the group at prediction (``sensitive_features=``);
`WithPredictedGroups` around one of them, and `UnawareOptimum`, need features instead (``X=``).
"""

from esvdfair.baselines.private_histogram import PrivateHistogram
from esvdfair.baselines.score_maps import WassersteinBarycenter
from esvdfair.baselines.unaware import GroupPredictor, UnawareOptimum, WithPredictedGroups

__all__ = ["GroupPredictor", "PrivateHistogram", "UnawareOptimum", "WassersteinBarycenter", "WithPredictedGroups"]
