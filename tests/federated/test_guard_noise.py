"""The Gaussian mechanism: as much noise as it must have, on everything, and a repair that lives with it."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from attack import attack
from esvdfair.core.moments import GroupMoments
from esvdfair.federated import (
    Noise,
    SiteMoments,
    collect_moments,
    gaussian_sigma,
    make_key,
    mask_moments,
    merge_moments,
    repair_from_moments,
)
from esvdfair.federated.guard import Frame, add_noise, make_noise
from esvdfair.models import adapt


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_sigma_gives_delta_by_the_definition(epsilon, delta):
    """δ = ∫ max(p(x) − e^ε q(x), 0) dx for N(1, σ²) against N(0, σ²), by quadrature."""
    sigma = gaussian_sigma(epsilon, delta)

    def hockey_stick(s):
        start = 0.5 + epsilon * s**2  # where the two densities are e^ε apart
        return quad(
            lambda x: norm.pdf(x, 1, s) - np.exp(epsilon) * norm.pdf(x, 0, s), start, start + 40 * s, epsabs=1e-13
        )[0]

    assert hockey_stick(sigma) == pytest.approx(delta, rel=1e-3)
    assert hockey_stick(0.98 * sigma) > 1.02 * delta  # no less noise would do
    if epsilon <= 1:
        assert sigma < np.sqrt(2 * np.log(1.25 / delta)) / epsilon  # the textbook's, which is not tight


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    return Frame.of([rng.normal(size=(300, 9)) * np.arange(1, 10)], rng.normal(size=8), labelled=True, axes=4)


def second(frame, rows):
    """Σxxᵀ of what the mechanism sees."""
    x = np.column_stack([np.ones(len(rows)), frame.seen(rows)]) / np.sqrt(3)
    return x.T @ x


def test_one_person_changes_the_sums_by_at_most_one(frame):
    rng = np.random.default_rng(1)
    rows = rng.standard_t(1.5, size=(2000, 9)) * 50  # far beyond what the public rows show
    change = [np.linalg.norm(second(frame, row[None])) for row in rows]
    assert 0.99 < max(change) <= 1 + 1e-12
    swaps = [
        np.linalg.norm(second(frame, a[None]) - second(frame, b[None])) for a, b in zip(rows, rows[::-1], strict=True)
    ]
    assert max(swaps) <= np.sqrt(2) + 1e-12  # what replacing somebody costs


def test_the_noise_has_the_size_it_must_have(frame):
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(500, 9))
    noise, exact = Noise(1.0, 1e-6, 4.0, 4), second(frame, rows)
    seen = GroupMoments().update(frame.seen(rows), ["a"] * 500)
    found = []
    for _ in range(400):
        noisy = add_noise(seen, noise, labelled=True, random=rng)
        x = np.append(1.0, noisy.means[0])
        again = noisy.counts[0] * np.outer(x, x)
        again[1:, 1:] += noisy.scatters[0]
        found.append(again / 3 - exact)
    spread = np.std(found, axis=0)
    np.testing.assert_allclose(np.diag(spread), 4.0, rtol=0.15)
    np.testing.assert_allclose(spread[np.triu_indices(6, 1)], 4.0 / np.sqrt(2), rtol=0.15)
    assert np.abs(np.mean(found, axis=0)).max() < 4 * 4.0 / 20


@pytest.fixture(scope="module")
def setting(make_network, people):
    return make_network(width=30), people(4000), people(600, 7)


def private(setting, epsilon, keep=slice(None), **options):
    model, data, shown = setting
    rows = data.X[keep], data.y[keep]
    known = {"sensitive_features": data.a[keep], "public": (shown.X, shown.y, shown.a)}
    return collect_moments(model, *rows, epsilon=epsilon, delta=1e-6, **known, **options)


def test_little_noise_gives_nearly_the_plain_repair(setting):
    model, data, _ = setting
    plain = repair_from_moments(model, collect_moments(model, data.X, data.y, sensitive_features=data.a))
    near = repair_from_moments(model, private(setting, 100.0))
    errors = [np.mean((fair.predict(data.X) - data.y) ** 2) for fair in (plain, near)]
    assert errors[0] < errors[1] < 0.7 * data.y.var()  # it tells of fewer directions, and clips
    gaps = [abs(np.subtract(*[fair.predict(data.X)[data.a == g].mean() for g in "ab"])) for fair in (plain, near)]
    before = abs(np.subtract(*[adapt(model).predict(data.X)[data.a == g].mean() for g in "ab"]))
    assert max(gaps) < 0.2 * before


def test_everything_in_the_file_has_noise_and_the_file_says_so(setting, tmp_path):
    one, two = (private(setting, 1.0, slice(i, None, 2)) for i in (0, 1))
    assert one.rows != (np.arange(4000) % 2 == 0).sum()
    assert (one.left_out, one.sites[0].withheld) == ((), 0)
    one.save(tmp_path / "a.moments")  # though some variances may be negative
    again = SiteMoments.load(tmp_path / "a.moments")
    assert again.sites == one.sites
    noise = again.sites[0].noise
    assert (noise.epsilon, noise.delta, noise.axes) == (1.0, 1e-6, one.sites[0].noise.axes)
    assert noise.sigma == gaussian_sigma(1.0, 1e-6)
    merged = merge_moments([again, two])
    assert [site.noise for site in merged.sites] == [noise, two.sites[0].noise]
    assert repair_from_moments(setting[0], merged).summary_["mean_gap_after"] < 1e-6
    assert private(setting, 1.0).moments.means[0, 0] != private(setting, 1.0).moments.means[0, 0]


def test_the_attack_reads_nobody(setting):
    model, data, _ = setting
    site = private(setting, 10.0)
    rows = np.column_stack(
        [np.maximum(data.X @ model.hidden.weight.detach().numpy().T + model.hidden.bias.detach().numpy(), 0), data.y]
    )
    for label, found in attack(site.moments).items():
        assert len(found.certain) == len(found.among(rows[data.a == label])) == 0


def test_what_is_refused(setting, people):
    model, data, _ = setting
    with pytest.raises(ValueError, match=r"epsilon=1\.0 needs public"):
        collect_moments(model, data.X, data.y, sensitive_features=data.a, epsilon=1.0)
    for epsilon in (0.0, -1.0, 1e9):
        with pytest.raises(ValueError, match="expected an epsilon above 0"):
            private(setting, epsilon)
    with pytest.raises(ValueError, match=r"epsilon=1\.0 goes with neither sample_weight"):
        private(setting, 1.0, sample_weight=data.w)
    tiny = GroupMoments().update(np.zeros((12, 4)), ["a"] * 12)
    with pytest.raises(ValueError, match=r"the noise hides the group 'a': it seems to have -?\d+ rows"):
        add_noise(tiny, make_noise(0.05, 1e-6, axes=3), labelled=True, random=np.random.default_rng(8))
    few = people(20)
    rows = {"sensitive_features": data.a, "public": (few.X, few.y, few.a)}
    with pytest.raises(ValueError, match="public has 20 rows"):
        collect_moments(model, data.X, data.y, epsilon=1.0, **rows)


def test_sites_add_the_noise_together_under_masks(setting, tmp_path):
    """The sum of four shares has at least the noise of one; a share alone can be neither saved nor merged."""
    model, data, public = setting
    parts = [
        collect_moments(
            model, data.X[i::4], data.y[i::4], sensitive_features=data.a[i::4],
            epsilon=5.0, public=(public.X, public.y, public.a), sharing=4,
        )
        for i in range(4)
    ]  # fmt: skip
    noise = parts[0].sites[0].noise
    assert noise.own == pytest.approx(noise.sigma / np.sqrt(2))
    for refused in (lambda: parts[0].save(tmp_path / "a"), lambda: merge_moments(parts[:2])):
        with pytest.raises(ValueError, match="one site's part of a noise that 4 sites add together"):
            refused()
    keys = [make_key(tmp_path / str(i)) for i in range(4)]
    with pytest.raises(ValueError, match="sharing is more than the 2 sites that mask for each other"):
        mask_moments(parts[0], tmp_path / "0", keys[1:2], groups=("a", "b"))
    masked = [mask_moments(parts[i], tmp_path / str(i), keys[:i] + keys[i + 1 :]) for i in range(4)]
    whole = merge_moments(masked)
    whole.save(tmp_path / "all")
    assert SiteMoments.load(tmp_path / "all").sites[0].noise == noise
    assert whole.moments.counts.sum() == pytest.approx(len(data.y), abs=30 * noise.sigma)


def test_shares_of_noise_have_the_variance_they_say():
    moments = GroupMoments().update(np.random.default_rng(0).normal(size=(400, 2)), ["a"] * 400)
    random = np.random.default_rng(1)
    for sites in (1, 2, 8):
        noise = make_noise(1.0, 1e-6, axes=2, sites=sites)
        counts = [add_noise(moments, noise, labelled=False, random=random).counts[0] for _ in range(400)]
        assert np.std(counts) == pytest.approx(2 * noise.sigma * min(1.0, 2 / sites) ** 0.5, rel=0.12)
