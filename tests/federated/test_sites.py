"""A moments file, and what moments tell about predictions, against the rows themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import mean_squared_error, r2_score

from esvdfair.core.metrics import group_mse, mean_gap, variance_gap
from esvdfair.core.moments import GroupMoments
from esvdfair.federated import SiteMoments, collect_moments, merge_moments
from esvdfair.models import adapt


def collected(model, data, *, weighted=False, labelled=True):
    y, w = data.y if labelled else None, data.w if weighted else None
    return collect_moments(model, data.X, y, sensitive_features=data.a, sample_weight=w)


@pytest.mark.parametrize("head", ["identity", "affine"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("groups", [("a", "b"), ("a", "b", "c")])
def test_figures_are_those_of_the_rows(make_network, people, head, weighted, groups):
    model, data = make_network(head), people(groups=groups)
    w = data.w if weighted else np.ones(len(data.y))
    predicted = adapt(model).predict(data.X)
    rows = {"sensitive_features": data.a, "sample_weight": w}
    figures = collected(model, data, weighted=weighted).figures()
    assert figures.mean_gap == pytest.approx(mean_gap(predicted, **rows), rel=1e-9)
    assert figures.variance_gap == pytest.approx(variance_gap(predicted, **rows), rel=1e-9)
    assert figures.mse == pytest.approx(mean_squared_error(data.y, predicted, sample_weight=w), rel=1e-9)
    assert figures.r2 == pytest.approx(r2_score(data.y, predicted, sample_weight=w), rel=1e-9)
    np.testing.assert_allclose(figures.group_mse, list(group_mse(data.y, predicted, **rows).values()), rtol=1e-9)
    for group, found in zip(groups, figures.group_r2, strict=True):
        mine = data.a == group
        assert found == pytest.approx(r2_score(data.y[mine], predicted[mine], sample_weight=w[mine]), rel=1e-9)


@pytest.mark.parametrize("labelled", [True, False])
def test_change_is_that_of_the_rows(make_network, people, labelled):
    model, data = make_network("affine"), people()
    site = collected(model, data, labelled=labelled)
    weight, bias = site.layer.weight[0] * 0.5 + 0.1, 0.3
    other = adapt(model).replace({"last": (weight[None, :], np.array([bias]))})
    moved = (other.predict(data.X) - adapt(model).predict(data.X)) ** 2
    overall, by_group = site.change(weight, bias)
    assert overall == pytest.approx(moved.mean(), rel=1e-9)
    np.testing.assert_allclose(by_group, [moved[data.a == g].mean() for g in "ab"], rtol=1e-9)


def test_a_curved_head_hides_errors_and_shows_gaps_before_it(make_network, people):
    data = people()
    curved, straight = (collected(make_network(head), data).figures() for head in ("sigmoid", "identity"))
    np.testing.assert_allclose(curved.means, straight.means)
    np.testing.assert_allclose(curved.variances, straight.variances)
    assert curved.mse is curved.r2 is curved.group_mse is None
    assert collected(make_network("sigmoid"), data).change(np.ones(6), 0.0) is None


def test_without_labels_there_are_no_errors(make_network, people):
    figures = collected(make_network(), people(), labelled=False).figures()
    assert figures.mean_gap > 0.1
    assert figures.mse is figures.r2 is figures.group_r2 is None


def test_a_file_holds_everything(make_network, people, tmp_path):
    data = people()
    data.y[5] = 1e4  # who stands alone is withheld
    both = [(str(g), int(x[0] > 0)) for g, x in zip(data.a, data.X, strict=True)]
    site = collect_moments(make_network("affine"), data.X, data.y, sensitive_features=both)
    site.save(tmp_path / "a.moments")
    again = SiteMoments.load(tmp_path / "a.moments")
    assert again.about() == site.about()
    assert again.sites == site.sites
    assert again.moments.labels == (("a", 0), ("a", 1), ("b", 0), ("b", 1))
    np.testing.assert_array_equal(again.moments.scatters, site.moments.scatters)
    np.testing.assert_array_equal(again.layer.weight, site.layer.weight)
    assert (again.layer.bias, again.head, again.rows) == (site.layer.bias, site.head, 599)
    assert site.sites[0].withheld == 1


def test_a_file_holds_no_more_numbers_than_moments(make_network, people, tmp_path):
    """Its size does not depend on the number of rows."""
    for rows in (100, 5000):
        collected(make_network(), people(rows)).save(tmp_path / f"{rows}")
    with np.load(tmp_path / "5000", allow_pickle=False) as file:
        assert sum(file[name].size for name in file.files if name != "header.json") == 2 * (3 + 7 + 7 * 7)
    assert abs((tmp_path / "100").stat().st_size - (tmp_path / "5000").stat().st_size) < 100


def test_moments_that_say_nothing_of_their_model_are_refused(tmp_path):
    GroupMoments().update(np.eye(4), [0, 0, 1, 1]).save(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"bare' does not say which model .* `esvdfair moments collect"):
        SiteMoments.load(tmp_path / "bare")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda about: about.pop("model"),
        lambda about: about.update(layer=None),
        lambda about: about["layer"].update(weight=[1.0]),
        lambda about: about["layer"].update(weight=[float("nan")] * 6),
        lambda about: about["layer"]["head"].update(kind="tanh"),
        lambda about: about.update(labelled=False),
        lambda about: about.update(sites=[{}]),
        lambda about: about.update(left_out=[6]),
        lambda about: about.update(left_out=[2, 1]),
    ],
)
def test_a_damaged_header_is_refused(make_network, people, tmp_path, spoil):
    site = collected(make_network(), people())
    about = json.loads(json.dumps(site.about()))
    spoil(about)
    site.moments.save(tmp_path / "a.moments", about=about)
    with pytest.raises(ValueError, match="a damaged moments file"):
        SiteMoments.load(tmp_path / "a.moments")


def test_files_written_before_can_be_read():
    """By 0c66bc0: the sum of two sites, the same two under masks, and moments by group and stratum."""
    files = Path(__file__).parent / "files"
    plain, strata = (SiteMoments.load(files / f"{name}.moments") for name in ("sum", "strata"))
    summed = merge_moments([files / "north.masked", files / "south.masked"])
    assert plain.moments.labels == summed.moments.labels == (0, 1, 2)
    np.testing.assert_allclose(plain.moments.scatters, summed.moments.scatters, rtol=1e-9, atol=1e-9)
    assert plain.figures().mse == pytest.approx(0.902883824326946)
    assert [site.name for site in plain.sites] == [None, None]
    assert (strata.group_parts, strata.compared.labels) == (1, (0, 1))
    again = [SiteMoments.from_about(site.moments, json.loads(json.dumps(site.about()))) for site in (plain, strata)]
    assert [site.about() for site in again] == [plain.about(), strata.about()]
