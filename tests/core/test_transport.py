"""Transport refit: bins against mean rows written out, the path against L-BFGS on the exact loss."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize

from esvdfair.core.moments import GroupMoments
from esvdfair.core.quadratic import FeatureSpace, Quadratic
from esvdfair.core.transport import TransportProblem, transport_path

STRENGTHS = (0.1, 1.0, 10.0)


@dataclass
class Case:
    """Rows with a gap between groups, and the quadratic of a refit towards y."""

    features: np.ndarray
    y: np.ndarray
    codes: np.ndarray
    weight: np.ndarray | None
    ridge: float
    offset: bool = False

    def __post_init__(self):
        p, self.n_groups = self.features.shape[1], int(self.codes.max()) + 1
        moments = GroupMoments().update(np.column_stack([self.features, self.y]), self.codes, self.weight)
        self.space = FeatureSpace.from_moments(moments, p, offset=self.offset)
        self.rotated = self.space.rotate(self.features)
        original = np.linspace(-0.3, 0.3, p)
        original[p - 1 if self.offset else p :] = 1
        self.quadratic = Quadratic.from_moments(
            moments, space=self.space, target=p, original=original, ridge=self.ridge
        )

    def problem(self, **options):
        return TransportProblem(self.rotated, self.codes, self.n_groups, sample_weight=self.weight, **options)

    def path(self, strengths=STRENGTHS, **options):
        return transport_path(self.problem(), self.quadratic, strengths=strengths, **options)

    @property
    def weights(self):
        return np.ones(len(self.y)) if self.weight is None else self.weight

    def loss(self, u, strength):
        """Objective and gradient, written independently: every pair of groups, quantile against quantile."""
        q = self.quadratic
        value, slopes = pairwise_w2(self.rotated @ (q.scale * u), self.codes, self.weights)
        weight, bias = q.layer(u)
        error = self.mse(weight, bias) + q.ridge * np.sum(((weight - q.original) @ q.space.dual) ** 2)
        gradient = 2 * (u - q.minimiser) + strength * q.scale * (slopes @ self.rotated)
        gradient[len(u) - self.offset :] = 0
        return error + strength * value, gradient

    def objective(self, fit):
        return self.loss(self.quadratic.coordinates(fit.weight), fit.strength)[0]

    def mse(self, weight, bias):
        return np.average((self.y - self.features @ weight - bias) ** 2, weights=self.weights)

    def distance(self, fit):
        """The mean of W₂² over all pairs."""
        return pairwise_w2(self.features @ fit.weight, self.codes, self.weights)[0]

    def lbfgs(self, strength):
        options = {"maxiter": 1000, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-10}
        return minimize(
            self.loss, self.quadratic.minimiser, args=(strength,), jac=True, method="L-BFGS-B", options=options
        ).fun


def make_case(seed, sizes, p, *, weighted=False, ridge=1e-3, discrete=False, offset=False):
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    hidden = rng.normal(size=(len(codes), p)) * np.exp(0.3 * rng.normal(size=(len(sizes), p)))[codes]
    hidden += 0.6 * rng.normal(size=(len(sizes), p))[codes]
    features = np.maximum(hidden @ rng.normal(size=(p, p)) + 1.0, 0) if p > 1 else hidden
    if discrete:
        features = np.round(features)
    y = features @ rng.normal(size=p) / np.sqrt(p) + codes + 0.5 * rng.normal(size=len(codes))
    weight = rng.exponential(size=len(codes)) if weighted else None
    return Case(features, y, codes, weight, ridge, offset)


def dead_units():
    case = make_case(4, (150, 250), 8)
    dead = np.zeros((400, 5))
    doubled = np.column_stack([case.features[:, :3], dead, case.features])  # repeated columns and constant ones
    return Case(doubled, case.y, case.codes, None, 1e-3)


CASES = {
    "two groups": make_case(0, (300, 300), 10),
    "unequal sizes": make_case(1, (120, 900), 8),
    "three groups": make_case(2, (2000, 1000, 3000), 8),
    "four weighted groups": make_case(3, (3000, 2000, 2400, 1800), 6, weighted=True),
    "dead units": dead_units(),
    "group of 20": make_case(6, (20, 400), 6),
    "one column": make_case(7, (120, 180), 1),
    "ties": make_case(8, (200, 300), 5, discrete=True),
    "more features than bins": make_case(9, (120, 500), 18, ridge=0.3),
    "an offset": make_case(10, (300, 500), 8, offset=True),
    "an offset and more features than bins": make_case(12, (120, 500), 18, ridge=0.3, offset=True),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    return CASES[request.param]


def pairwise_w2(outputs, codes, weight):
    """The mean of W₂²(g, h) over all pairs and its gradient with respect to the outputs."""
    value, slopes, pairs = 0.0, np.zeros(len(outputs)), list(combinations(range(codes.max() + 1), 2))
    for g, h in pairs:
        rows = [np.flatnonzero(codes == k) for k in (g, h)]
        rows = [i[np.argsort(outputs[i], kind="stable")] for i in rows]
        levels = [np.cumsum(weight[i]) / weight[i].sum() for i in rows]
        ends = np.unique(np.concatenate([[0.0], levels[0][:-1], levels[1][:-1], [1.0]]))
        length, middle = np.diff(ends), (ends[1:] + ends[:-1]) / 2
        i, j = (
            r[np.minimum(np.searchsorted(level, middle), len(r) - 1)] for r, level in zip(rows, levels, strict=True)
        )
        gap = outputs[i] - outputs[j]
        value += gap**2 @ length
        np.add.at(slopes, i, 2 * gap * length)
        np.add.at(slopes, j, -2 * gap * length)
    return value / len(pairs), slopes / len(pairs)


# --- the bins --------------------------------------------------------------------------------------------------


def test_bins_see_most_of_the_distance_and_never_more(case):
    problem = case.problem()
    v = case.quadratic.scale * case.quadratic.minimiser
    binned = sum(np.sum((block @ v) ** 2) for block in problem.pair_blocks(problem.outputs(v)))
    exact = pairwise_w2(case.rotated @ v, case.codes, case.weights)[0]
    assert 0.6 * exact < binned < (1 + 1e-6) * exact  # below by Jensen's inequality


def test_bins_are_the_means_of_the_sorted_rows_cut_in_equal_parts():
    """24 and 26 rows in 3 bins, two cuts through a row of the second group: the mean rows written out."""
    rows, codes = np.random.default_rng(1).normal(size=(50, 2)), np.repeat([0, 1], [24, 26])
    problem = TransportProblem(rows, codes, 2, n_bins=3)
    (block,) = problem.pair_blocks(problem.outputs(np.array([1.0, 0.0])))
    means = [quantile_means(rows[codes == g], rows[codes == g, 0], 3) for g in range(2)]
    np.testing.assert_allclose(block, (means[0] - means[1]) / np.sqrt(3), atol=1e-12)


def test_every_pair_has_the_bins_of_its_own_smaller_group():
    """Groups of 17, 36 and 70 rows have 2, 4 and 8 bins, and the pair of the large ones does not lose any."""
    rows, codes = np.random.default_rng(2).normal(size=(123, 3)), np.repeat([0, 1, 2], [17, 36, 70])
    problem = TransportProblem(rows, codes, 3)
    blocks = problem.pair_blocks(problem.outputs(np.array([1.0, 0.0, 0.0])))
    for (g, h), bins, block in zip([(0, 1), (0, 2), (1, 2)], (2, 2, 4), blocks, strict=True):
        means = [quantile_means(rows[codes == k], rows[codes == k, 0], bins) for k in (g, h)]
        np.testing.assert_allclose(block, (means[0] - means[1]) / np.sqrt(3 * bins), atol=1e-12)


def quantile_means(rows, outputs, bins):
    """Mean rows of quantile bins, each row taken as ``bins`` equal parts."""
    return np.repeat(rows[np.argsort(outputs)], bins, axis=0).reshape(bins, -1, rows.shape[1]).mean(axis=1)


def test_integer_weights_are_repeated_rows():
    case = make_case(10, (60, 90), 4)
    counts = np.random.default_rng(3).integers(0, 4, size=150)  # a row of weight 0 is left out
    weighted = Case(case.features, case.y, case.codes, counts.astype(float), 1e-3)
    again = np.repeat(np.arange(150), counts)
    problems = [  # equally many bins: the small group has fewer rows than its weight
        weighted.problem(n_bins=5),
        TransportProblem(weighted.rotated[again], case.codes[again], 2, n_bins=5),
    ]
    paths = [transport_path(problem, weighted.quadratic, strengths=STRENGTHS) for problem in problems]
    for one, other in zip(*paths, strict=True):
        np.testing.assert_allclose(one.weight, other.weight, rtol=1e-6)


# --- the path --------------------------------------------------------------------------------------------------


def test_objective_is_near_that_of_lbfgs(case):
    """Within 1 % where the penalty is at most as strong as the error, 10 % at ten times that; with two bins 5 times."""
    (before,) = case.path((0.0,))
    assert case.distance(before) > 0.02 * np.var(case.y)  # there is a gap to close
    loose = 5 if case.problem().bins.max() == 2 else 1
    for fit, tolerance in zip(case.path(), (0.001, 0.01, 0.1), strict=True):
        assert case.objective(fit) <= (1 + loose * tolerance) * case.lbfgs(fit.strength)


def test_strength_zero_is_the_ridge_solution(case):
    (fit,) = case.path((0.0,))
    weight, bias = case.quadratic.layer(case.quadratic.minimiser)
    assert np.array_equal(fit.weight, weight)
    assert (fit.bias, fit.ridge, fit.strength, fit.converged) == (bias, case.ridge, 0.0, True)


def test_along_the_path_distance_falls_and_error_rises(case):
    fits = case.path(np.concatenate([[0], np.geomspace(0.01, 10, 8)]))
    distance, mse = np.array([(case.distance(fit), case.mse(fit.weight, fit.bias)) for fit in fits]).T
    assert np.all(np.diff(distance) <= 0)
    assert np.all(np.diff(mse) >= -1e-3 * mse[-1])
    assert distance[-1] < 0.3 * distance[0]


def test_a_strong_penalty_removes_a_gap_that_can_be_removed():
    rng = np.random.default_rng(5)
    fair = np.tile(rng.normal(size=200), 2)  # the same values in both groups
    codes = np.repeat([0, 1], 200)
    features = np.column_stack([fair, rng.normal(size=400) + 1.5 * codes])
    case = Case(features, features.sum(axis=1) + 0.1 * rng.normal(size=400), codes, None, 0.0)
    before, after = case.path((0.0, 1e4))
    assert case.distance(before) > 1
    assert case.distance(after) < 1e-4 * case.distance(before)
    assert np.allclose(after.weight, [1, 0], atol=0.1)  # the fair feature stays


def test_strengths_come_back_in_the_order_given():
    case = CASES["group of 20"]
    fits = case.path((10.0, 0.0, 1.0, 10.0))
    assert [fit.strength for fit in fits] == [10.0, 0.0, 1.0, 10.0]
    np.testing.assert_array_equal(fits[0].weight, fits[3].weight)
    assert case.path(()) == []


@pytest.mark.parametrize("name", ["more features than bins", "one column"])
def test_no_strength_is_too_strong(name):
    before, after = (CASES[name].distance(fit) for fit in CASES[name].path((0.0, 1e40)))
    assert after < 0.3 * before


def test_strength_is_free_of_units():
    case = CASES["two groups"]
    other = Case(1e5 * case.features, 1e-4 * case.y, case.codes, None, 0.0)
    one = Case(case.features, case.y, case.codes, None, 0.0)
    for fit, scaled in zip(one.path(), other.path(), strict=True):
        assert other.objective(scaled) == pytest.approx(1e-8 * one.objective(fit), rel=0.01)


def test_two_rows_in_a_group_are_enough_to_run():
    case = make_case(11, (2, 50), 3)
    fits = case.path()
    assert case.distance(fits[-1]) < case.distance(fits[0])


# --- one answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ties", "four weighted groups", "more features than bins"])
def test_the_order_of_the_rows_and_their_last_bits_do_not_matter(name):
    case = CASES[name]
    outputs = [case.features @ fit.weight for fit in case.path((0.1, 3.0, 100.0))]
    rng = np.random.default_rng(0)
    for _ in range(3):
        order = rng.permutation(len(case.y))
        weight = None if case.weight is None else case.weight[order]
        shaken = case.features[order] * (1 + 1e-13 * rng.normal(size=case.features.shape))
        again = Case(shaken, case.y[order], case.codes[order], weight, case.ridge)
        for before, fit in zip(outputs, again.path((0.1, 3.0, 100.0)), strict=True):
            assert np.abs(case.features @ fit.weight - before).max() < 1e-6 * before.std()


def test_rows_that_tie_share_their_bins():
    """Two rows of equal output and unlike features at the edge of a bin: which comes first must not matter."""
    rng = np.random.default_rng(2)
    rows, codes = rng.normal(size=(64, 3)), np.repeat([0, 1], 32)
    edge = np.argsort(rows[:32, 0])[15:17]
    rows[edge, 0] = rows[edge[0], 0] + [0.0, 1e-12]
    swapped = rows.copy()
    swapped[edge, 0] = swapped[edge[::-1], 0]
    bins = {}
    for tie in (0.0, 1e-9):
        problems = [TransportProblem(x, codes, 2, n_bins=2) for x in (rows, swapped)]
        bins[tie] = [p.pair_blocks(p.outputs(np.eye(3)[0]), tie=tie)[0] for p in problems]
    assert np.abs(bins[0.0][0] - bins[0.0][1]).max() > 0.01
    assert np.abs(bins[1e-9][0] - bins[1e-9][1]).max() < 1e-9


# --- bad input -------------------------------------------------------------------------------------------------

ROWS, CODES = np.arange(12.0).reshape(6, 2), np.array([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("codes", "n_groups", "weight", "message"),
    [
        (0 * CODES, 1, None, r"group sizes are \[6\]"),
        (CODES, 3, None, r"group sizes are \[3, 3, 0\]"),
        (CODES, 2, 1.0 * CODES, r"group sizes are \[0, 3\]"),
    ],
)
def test_a_group_without_rows_is_named(codes, n_groups, weight, message):
    with pytest.raises(ValueError, match=message):
        TransportProblem(ROWS, codes, n_groups, sample_weight=weight)


@pytest.mark.parametrize("strength", [-1.0, np.nan, np.inf])
def test_bad_strengths_are_named(strength):
    case = CASES["two groups"]
    with pytest.raises(ValueError, match="strengths="):
        transport_path(case.problem(), case.quadratic, strengths=[strength])
