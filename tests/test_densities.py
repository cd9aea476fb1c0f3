import numpy as np
import pytest
from scipy import stats

from esvdfair.densities import density, make_grid


def test_density_agrees_with_scipy_and_integrates_to_one():
    values = np.random.default_rng(0).normal(3, 2, 400)
    grid = make_grid([values], 201)
    sd = values.std(ddof=1)
    width = 0.9 * min(values.std(), np.ptp(np.quantile(values, [0.25, 0.75])) / 1.349) * 400**-0.2
    expected = stats.gaussian_kde(values, bw_method=width / sd)(grid)
    np.testing.assert_allclose(density(values, grid), expected, rtol=1e-9)
    assert np.trapezoid(density(values, grid), grid) == pytest.approx(1, abs=0.01)


def test_density_of_many_rows_is_that_of_their_quantiles():
    values = np.random.default_rng(1).gamma(3, size=20_000)
    grid = make_grid([values])
    exact = stats.gaussian_kde(values, bw_method=0.9 * 20_000**-0.2)(grid)
    assert np.abs(density(values, grid) - exact).max() < 0.05 * exact.max()


@pytest.mark.parametrize("value", [0.0, 1e-9, -5.0, 1e8])
def test_constant_predictions_still_have_a_density(value):
    values = np.full(10, value)
    grid = make_grid([values])
    found = density(values, grid)
    assert np.isfinite(found).all()
    assert np.all(np.diff(grid) > 0)
    assert np.argmax(found) == len(grid) // 2
