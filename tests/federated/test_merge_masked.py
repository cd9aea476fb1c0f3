"""Secure aggregation: the sum is that of the sites, and a file alone is noise."""

import hashlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from esvdfair.core.moments import GroupMoments
from esvdfair.federated import (
    MaskedMoments,
    SiteMoments,
    collect_moments,
    make_key,
    mask_moments,
    merge_moments,
    repair_from_moments,
)


@pytest.fixture
def keys(tmp_path):
    """Private and public keys of three sites."""
    made = [(tmp_path / name, make_key(tmp_path / name)) for name in "xyz"]
    return [key for key, _ in made], [public for _, public in made]


def others(public, i):
    return public[:i] + public[i + 1 :]


@pytest.fixture(scope="module")
def sites(make_network, people):
    """Moments of three sites; the second has no group b."""
    model, data = make_network(), people(900)
    data.y = data.y + 1e6  # a mean far from zero costs no digits
    parts = [np.arange(900) % 3 == i for i in range(3)]
    parts[1] &= data.a == "a"
    return [
        collect_moments(model, data.X[p], data.y[p], sensitive_features=data.a[p], sample_weight=data.w[p])
        for p in parts
    ]


def masked(sites, keys, public, groups=("a", "b")):
    return [
        mask_moments(s, k, others(public, i), groups=groups) for i, (s, k) in enumerate(zip(sites, keys, strict=True))
    ]


@pytest.mark.filterwarnings("ignore:some groups are not at every site")
def test_the_sum_is_that_of_the_sites(sites, keys, tmp_path):
    files = []
    for i, part in enumerate(masked(sites, *keys)):
        files.append(tmp_path / f"{i}.masked")
        part.save(files[-1])
    found, plain = merge_moments(files), merge_moments(sites)
    assert found.moments.labels == plain.moments.labels
    np.testing.assert_array_equal(found.moments.rows, plain.moments.rows)
    for name in ("counts", "weight_squares", "means"):
        np.testing.assert_allclose(getattr(found.moments, name), getattr(plain.moments, name), rtol=1e-12)
    for one, other in zip(found.moments.scatters, plain.moments.scatters, strict=True):
        scale = np.sqrt(np.outer(np.diag(other), np.diag(other)))
        assert (np.abs(one - other) <= 1e-9 * np.maximum(scale, 1e-300)).all()
    assert (found.left_out, found.model, found.features) == (plain.left_out, plain.model, plain.features)
    assert [site.rows for site in found.sites] == [()] * 3  # how many rows a site has is not told
    again = MaskedMoments.load(files[0])
    assert again.groups == ("a", "b")
    found.save(tmp_path / "sum")
    assert SiteMoments.load(tmp_path / "sum").sites == found.sites


def test_the_sum_is_exact_where_floats_are_not(keys, sites):
    """Cancelling sums, means 12 digits away from the spread: rounding is left to the end."""
    base, rng = sites[0], np.random.default_rng(0)
    parts, rows = [], [rng.normal(size=(50, 7)) + 1e6, rng.normal(size=(50, 7)) * 1e-5 - 1e6, rng.normal(size=(50, 7))]
    for x in rows:
        parts.append(replace(base, moments=GroupMoments().update(x, ["a"] * 50)))
    found = merge_moments(masked(parts, *keys, groups=("a",))).moments
    plain = GroupMoments().update(np.concatenate(rows), ["a"] * 150)
    np.testing.assert_allclose(found.means, plain.means, atol=1e-9)
    np.testing.assert_allclose(found.scatters, plain.scatters, rtol=1e-12)


def test_a_file_alone_is_noise(sites, keys):
    """Bytes of a masked file are uniform, also where the moments are zero, and say nothing of sizes."""
    one, other, _ = masked(sites, *keys)
    for part in (one, other):
        values = np.frombuffer(part.values, dtype=np.uint8)
        counts = np.bincount(values, minlength=256)
        expected = len(values) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 256 + 6 * np.sqrt(2 * 256)  # chi squared
        assert "rows" not in str({k: v for k, v in part.about.items() if k != "sites"})
        assert part.about["sites"][0]["rows"] == ()
        assert part.about["sites"][0]["fingerprint"] == f"{part.public}-0"
    assert len(one.values) == len(other.values)  # though one has no group b


def test_two_of_three_are_not_enough(sites, keys):
    parts = masked(sites, *keys)
    with pytest.raises(ValueError, match=r"3 sites masked .* 2 files are here; those of the public keys \w{12}… are"):
        merge_moments(parts[:2])
    with pytest.raises(ValueError, match=r"3 sites masked .* 4 files are here\. Only the sum"):
        merge_moments([*parts, parts[0]])
    with pytest.raises(ValueError, match=r"3 files are here; those of the public keys \w{12}… are missing"):
        merge_moments([parts[0], parts[0], parts[1]])


def test_what_does_not_belong_together(sites, keys, tmp_path):
    private, public = keys
    parts = masked(sites, private, public)
    other = mask_moments(replace(sites[2], target="wage"), private[2], others(public, 2), groups=["a", "b"])
    with pytest.raises(ValueError, match="they differ in target"):
        merge_moments([*parts[:2], other])
    with pytest.raises(ValueError, match="they differ in keys of the sites"):
        merge_moments([*parts[:2], mask_moments(sites[2], private[2], public[:1], groups=["a", "b"])])
    with pytest.raises(ValueError, match="some of these moments are masked and some are not"):
        merge_moments([*parts[:2], sites[2]])
    forged = replace(parts[2], values=parts[1].values)
    with pytest.raises(ValueError, match="masks of these files do not cancel"):
        merge_moments([*parts[:2], forged])
    parts[0].save(tmp_path / "a.masked")
    content = bytearray((tmp_path / "a.masked").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.masked").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.masked' is no file of masked moments, or damaged"):
        merge_moments([tmp_path / "a.masked", *parts[1:]])


def test_bad_keys_and_groups(sites, keys, tmp_path):
    private, public = keys
    with pytest.raises(ValueError, match=r"groups lacks \['b'\], which are here"):
        mask_moments(sites[0], private[0], public[1:], groups=["a"])
    for peers in ([], public, [public[1], public[1]]):
        with pytest.raises(ValueError, match="public keys of all other sites, each once"):
            mask_moments(sites[0], private[0], peers)
    with pytest.raises(ValueError, match="x' is no public key of esvdfair"):
        mask_moments(sites[0], private[0], [private[0]])
    with pytest.raises(ValueError, match=r"pub' is no private key of esvdfair"):
        mask_moments(sites[0], public[0], public[1:])
    huge = replace(sites[0], moments=GroupMoments().update(np.eye(7) * 1e20, ["a"] * 7))
    with pytest.raises(ValueError, match="beyond what masked sums hold"):
        mask_moments(huge, private[0], public[1:])
    assert private[0].stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        make_key(private[0])


def test_without_the_extra_its_name_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(ImportError, match=r"esvdfair\[secure\]"):
        make_key(tmp_path / "k")


@pytest.mark.parametrize("header", [b"[" * 100_000, b"{}", b'{"groups": 3}', b"\xff"])
def test_a_header_that_nobody_wrote(tmp_path, header):
    """The checksum of a file that was made on purpose is right."""
    content = len(header).to_bytes(8, "big") + header
    (tmp_path / "odd.masked").write_bytes(b"esvdfair-masked-1\n" + hashlib.sha256(content).digest() + content)
    with pytest.raises(ValueError, match="is a damaged file of masked moments"):
        merge_moments([tmp_path / "odd.masked"])


def test_a_repair_from_the_sum_is_that_from_plain_moments(make_network, people, tmp_path):
    """Also where people were withheld, which masked sites do not tell: the ridge is the one for that."""
    model, data = make_network(), people()
    data.y[5] = 1e4
    parts = [collect_moments(model, data.X[i::2], data.y[i::2], sensitive_features=data.a[i::2]) for i in (0, 1)]
    assert sum(part.sites[0].withheld for part in parts) == 1
    keys = [make_key(tmp_path / str(i)) for i in (0, 1)]
    masked = [mask_moments(part, tmp_path / str(i), [keys[1 - i]]) for i, part in enumerate(parts)]
    plain, summed = (repair_from_moments(model, merge_moments(found)) for found in (parts, masked))
    np.testing.assert_allclose(summed.edits_[0].weight_after, plain.edits_[0].weight_after, rtol=1e-6)
