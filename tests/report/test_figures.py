import numpy as np
import pytest

from esvdfair import ks_distance
from esvdfair.audit import make_grid
from esvdfair.report.figures import distributions


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("decimals", [1, 12])  # with ties and without
def test_the_farthest_point_is_the_ks_distance(groups, decimals):
    rng = np.random.default_rng(groups)
    codes = rng.integers(0, groups, 300)
    values = np.round(rng.normal(size=300) + 0.4 * codes, decimals)
    found = distributions(values, codes, groups, make_grid([values]))
    assert found.farthest.distance == pytest.approx(ks_distance(values, sensitive_features=codes), abs=1e-12)
    k = int(np.flatnonzero(found.thresholds == found.farthest.at)[0])
    assert found.shares[found.farthest.high_group, k] == found.farthest.high
    assert found.shares[found.farthest.low_group, k] == found.farthest.low
