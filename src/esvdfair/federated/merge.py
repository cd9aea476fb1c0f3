"""Between the sites: moments of several -> one, added up as they are, or under masks, so that only the sum can be read.

*Secure aggregation.* Every pair of sites agrees on a secret (X25519), from which both draw the same random numbers
(HKDF-SHA256, ChaCha20); one adds them to its moments, the other subtracts them, modulo 2²⁵⁶. A masked file alone is
therefore noise, to whoever adds the files up too, unless all other sites join against one. Moments are added as
integers, multiples of 2⁻¹²⁸, so that nothing is rounded but the result.

A key serves one collection: two files under the same masks would tell their difference. A site that does not send its
file leaves the sum masked; there is no recovery but new keys and a new collection without it. Whoever hands out public
keys must be trusted to hand out the right ones, or the sites compare them by another way.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import Label, check_labels, sort_key
from esvdfair.core.moments import GroupMoments
from esvdfair.core.moments_file import label_from_json
from esvdfair.exceptions import ESVDFairWarning, Given, InputError
from esvdfair.federated.sites import MomentsFile, SiteMoments
from esvdfair.files import whole_file
from esvdfair.text import printable

FRACTION, BYTES = 128, 32  # bits behind the point, bytes of a number
_ONE, _MODULUS = 1 << FRACTION, 1 << 8 * BYTES
_LARGEST = 2.0**100  # of one site, so that no sum of sites leaves the range
_MAGIC = b"esvdfair-masked-1\n"
_KEY, _PUBLIC = "esvdfair-private-key-1", "esvdfair-public-key-1"
_DIFFERENT = ("model", "layer", "labelled", "sensitive", "features", "target", "control", "group_parts")

Integers = NDArray[np.object_]


# --- as they are ---------------------------------------------------------------------------------------------------


def merge_moments(parts: "Sequence[SiteMoments | MaskedMoments | MomentsFile]") -> SiteMoments:
    """Add up the moments of several sites.

    Parameters
    ----------
    parts : sequence of SiteMoments, or of paths of files that hold them; or masked ones of all sites

    Raises
    ------
    ValueError
        The parts are of different models, layers, label states or columns; the error says what differs and where. Or
        the same rows come twice, also inside a file that was merged before: they would count double.
    """
    if not parts:
        raise ValueError("got no moments to merge; give those of one site at least.")
    masked: list[MaskedMoments] = []
    named: list[tuple[str, SiteMoments]] = []  # each with what an error calls it
    for place, part in enumerate(parts, start=1):
        if isinstance(part, SiteMoments):
            named.append((f"part {place}", part))
        elif isinstance(part, MaskedMoments):
            masked.append(part)
        elif _is_masked_file(part):
            masked.append(MaskedMoments.load(part))
        else:
            named.append((repr(os.fspath(part)), SiteMoments.load(part).named(Path(part).name)))
    if masked and named:
        raise ValueError("some of these moments are masked and some are not; all sites mask for each other, or none.")
    if masked:
        return _unmask(masked)
    _check_together(named)
    sites = [site for _, site in named]
    left_out = tuple(sorted({unit for site in sites for unit in site.left_out}))
    moments = GroupMoments()
    for site in sites:
        moments.merge(site.without(left_out).moments)
    known: dict[str, Any] = {
        name: next((found for site in sites if (found := getattr(site, name)) is not None), None)
        for name in ("sensitive", "features", "target", "control")
    }
    collections = tuple(part for site in sites for part in site.sites)
    return replace(sites[0], moments=moments, left_out=left_out, sites=collections, **known)


def _check_together(named: Sequence[tuple[str, SiteMoments]]) -> None:
    """Raise unless these moments can be added up; warn where a group is missing."""
    (first_name, first), *others = named
    for _, site in named:
        site.check_noise()
    for name, site in others:
        differing = _differences(first_name, first, name, site)
        if differing:
            raise ValueError(
                f"{name} and {first_name} cannot be merged; they differ in the {'; the '.join(differing)}. All sites "
                "must run one model on the same columns, all with labels or all without."
            )
    holder: dict[str, str] = {}
    for name, site in named:
        for part in site.sites:
            if part.fingerprint in holder:
                raise ValueError(
                    f"{name} holds the same rows as {holder[part.fingerprint]}; merged, they would count twice. Give "
                    "each collection once, alone or inside a file that was merged before."
                )
            holder[part.fingerprint] = name
    lone = [
        f"{label!r} is not in {', '.join(absent)}"
        for label in dict.fromkeys(label for _, site in named for label in site.moments.labels)
        if (absent := [name for name, site in named if label not in site.moments.labels])
    ]
    if lone:
        warnings.warn(
            f"some groups are not at every site: {'; '.join(lone)}. That is well if these people are not there; groups "
            "are matched by their values, so all sites must write them alike.",
            ESVDFairWarning,
            stacklevel=3,
        )


def _differences(name: str, one: SiteMoments, other_name: str, other: SiteMoments) -> list[str]:
    """What two sites know of their moments and do not have in common, in words."""

    def facts(site: SiteMoments) -> dict[str, Any]:
        return {
            "model (SHA-256)": site.model,
            "layer": site.layer.name,
            "number of the layer's inputs": site.layer.weight.shape[1],
            "head": site.head.kind,
            "strata": "told apart" if site.group_parts else "not told apart",
            "label": "labelled" if site.labelled else "no label",
            "sensitive columns": site.sensitive,
            "target column": site.target,
            "features": site.features,
            "control columns": site.control,
        }

    found = []
    for (what, mine), theirs in zip(facts(one).items(), facts(other).values(), strict=True):
        if mine == theirs or mine is None or theirs is None:
            continue
        if isinstance(mine, tuple):  # names of columns: where they first differ
            pairs = enumerate(zip_longest(mine, theirs), start=1)
            place, names = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            mine, theirs = (f"no column {place}" if x is None else f"{x[:60]!r} as column {place}" for x in names)
        found.append(f"{what}: {printable(str(theirs), 100)} in {other_name}, {printable(str(mine), 100)} in {name}")
    return found


# --- keys ----------------------------------------------------------------------------------------------------------


def make_key(path: str | os.PathLike[str]) -> Path:
    """Write a private key, for one collection, and beside it the public key ``path + ".pub"``; the place of the latter.

    The private key never leaves the site; the public one goes to all others.
    """
    key = _crypto().X25519PrivateKey.generate()
    public = Path(os.fspath(path) + ".pub")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(f"{_KEY} {key.private_bytes_raw().hex()}\n")
    with whole_file(public) as written:
        written.write(f"{_PUBLIC} {key.public_key().public_bytes_raw().hex()}\n".encode())
    return public


def _read_key(path: str | os.PathLike[str], kind: str) -> bytes:
    with open(path, "rb") as file:
        words = file.read(200).split()
    try:
        found, key = words[0].decode(), bytes.fromhex(words[1].decode())
    except (IndexError, ValueError):
        found, key = "", b""
    if found != kind or len(key) != 32:
        what = "private" if kind == _KEY else "public"
        raise ValueError(f"{os.fspath(path)!r} is no {what} key of esvdfair; `esvdfair moments keygen` makes both.")
    return key


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ImportError:
        raise ImportError("secure aggregation needs cryptography; pip install 'esvdfair[secure]'.") from None
    return x25519


# --- masking -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedMoments:
    """The moments of one site under masks.

    Attributes
    ----------
    about : what they are of, as in a moments file, but for how many rows there are
    groups : those that all sites have agreed on
    public, everyone : public key of this site, and sorted those of all sites
    values : (k · 32 bytes) masked integers
    """

    about: dict[str, Any]
    groups: tuple[Label, ...]
    public: str
    everyone: tuple[str, ...]
    values: bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file, which appears whole or not at all."""
        header = json.dumps({k: v for k, v in asdict(self).items() if k != "values"}).encode()
        content = len(header).to_bytes(8, "big") + header + self.values
        with whole_file(path) as file:
            file.write(_MAGIC + hashlib.sha256(content).digest() + content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MaskedMoments":
        """Read what :meth:`save` wrote; ValueError for a file of another kind, or a damaged one."""
        content = Path(path).read_bytes().removeprefix(_MAGIC)
        digest, content = content[:32], content[32:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError(f"{os.fspath(path)!r} is no file of masked moments, or damaged: its SHA-256 differs.")
        end = 8 + int.from_bytes(content[:8], "big")
        try:
            header = json.loads(content[8:end])
            groups = tuple(label_from_json(item) for item in header["groups"])
            return cls(header["about"], groups, header["public"], tuple(header["everyone"]), content[end:])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)!r} is a damaged file of masked moments ({error!s:.100}).") from error


def _is_masked_file(source: Any) -> bool:
    if not isinstance(source, str | os.PathLike) or not os.path.isfile(source):
        return False
    with open(source, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def mask_moments(
    site: SiteMoments,
    key: str | os.PathLike[str],
    peers: Sequence[str | os.PathLike[str]],
    *,
    groups: Sequence[Label] | None = None,
) -> MaskedMoments:
    """Mask a site's moments; the sum over this site and all peers is what :func:`merge_moments` gives.

    Parameters
    ----------
    key : file with the private key of this site (:func:`make_key`); delete it afterwards, it serves once
    peers : files with the public keys of all other sites
    groups : all groups that any site has, the same at all sites; by default those of this site

    Raises
    ------
    ValueError
        A group that is not among ``groups``, no peer, the own key or one key twice among the peers, values beyond 2¹⁰⁰.
    """
    private = _crypto().X25519PrivateKey.from_private_bytes(_read_key(key, _KEY))
    own = private.public_key().public_bytes_raw()
    others = [_read_key(peer, _PUBLIC) for peer in peers]
    if not others or own in others or len(set(others)) < len(others):
        raise InputError(
            "{peers} must be the public keys of all other sites, each once, and not this site's own; got {count}.",
            peers=Given(),
            count=len(others),
        )
    if any(part.noise is not None and part.noise.sites > 1 + len(others) for part in site.sites):
        raise InputError(
            "{sharing} is more than the {count} sites that mask for each other; the sum would lack noise.",
            sharing=Given(),
            count=1 + len(others),
        )
    agreed = tuple(sorted(groups or site.moments.labels, key=sort_key))
    check_labels([*agreed, *site.moments.labels])
    if unknown := set(site.moments.labels) - set(agreed):
        raise InputError("{groups} lacks {unknown}, which are here.", groups=Given(), unknown=sorted(map(str, unknown)))
    # Of a collection whose numbers nobody is to know only this may be said.
    untold = (
        replace(part, fingerprint=f"{own.hex()}-{i}", labels=(), rows=(), withheld=0, apart=None)
        for i, part in enumerate(site.sites)
    )
    about = site.about() | {"sites": [asdict(part) for part in untold]}
    everyone = tuple(sorted(key.hex() for key in (own, *others)))
    total = _to_integers(site.moments, agreed)
    session = json.dumps([{name: about[name] for name in _DIFFERENT}, agreed, everyone]).encode()
    for peer in others:
        secret = private.exchange(_crypto().X25519PublicKey.from_public_bytes(peer))
        mask = _stream(secret, session, len(total))
        total = total + mask if own < peer else total - mask
    values = b"".join(int(number % _MODULUS).to_bytes(BYTES, "big") for number in total)
    return MaskedMoments(about, agreed, own.hex(), everyone, values)


def _unmask(parts: Sequence[MaskedMoments]) -> SiteMoments:
    """The sum of all sites' moments; ValueError unless each is there once and they masked for each other."""
    first = parts[0]
    for part in parts[1:]:
        differ = [name for name in _DIFFERENT if part.about[name] != first.about[name]]
        differ += [name for name in ("groups", "everyone") if getattr(part, name) != getattr(first, name)]
        if differ:
            words = ", ".join({"everyone": "keys of the sites"}.get(name, name) for name in differ)
            raise ValueError(f"masked moments do not belong together: they differ in {words}.")
    given = [part.public for part in parts]
    missing = [key for key in first.everyone if key not in given]
    if missing or len(given) != len(first.everyone):
        lacking = (
            f"; those of the public keys {', '.join(key[:12] + '…' for key in missing)} are missing" if missing else ""
        )
        raise ValueError(
            f"{len(first.everyone)} sites masked their moments for each other, and {len(given)} files are here"
            f"{lacking}. Only the sum of all can be read. If a site cannot send its file, the others make new keys and "
            "collect again without it."
        )
    total = sum(_numbers(part.values) for part in parts) % _MODULUS
    total = np.where(total >= _MODULUS >> 1, total - _MODULUS, total)
    moments = _from_integers(total, first.groups)
    left_out = tuple(sorted({unit for part in parts for unit in part.about["left_out"]}))
    sites = [site for part in parts for site in part.about["sites"]]
    about = first.about | {"left_out": [], "sites": sites}
    return SiteMoments.from_about(moments, about).without(left_out)


def _stream(secret: bytes, session: bytes, count: int) -> Integers:
    """The numbers that two sites draw alike from their secret, for one session."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(SHA256(), 32, salt=None, info=b"esvdfair moments " + hashlib.sha256(session).digest()).derive(secret)
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(BYTES * count))
    return _numbers(stream)


def _numbers(content: bytes) -> Integers:
    """Integers of 32 bytes each, one after the other."""
    places = range(0, len(content), BYTES)
    return np.array([int.from_bytes(content[at : at + BYTES], "big") for at in places], dtype=object)


# --- moments as integers -------------------------------------------------------------------------------------------


def _to_integers(moments: GroupMoments, groups: Sequence[Label]) -> Integers:
    """Of every group rows, Σw, Σw², Σwx and the upper triangle of Σwxxᵀ, in units of 2⁻¹²⁸; zeros of an absent one."""
    n = moments.width
    upper = np.triu_indices(n)
    none = np.array([0] * (3 + n + len(upper[0])), dtype=object)
    parts = dict.fromkeys(groups, none)
    for g, label in enumerate(moments.labels):
        single = [moments.rows[g], moments.counts[g], moments.weight_squares[g]]
        rows, weight, squares = _fixed(single)
        mean = _fixed(moments.means[g])
        first = weight * mean >> FRACTION
        # Σwxxᵀ = scatter + Σw · mean meanᵀ, exactly: no digit is lost to a mean that is far from zero
        second = _fixed(moments.scatters[g][upper]) + (weight * mean[upper[0]] * mean[upper[1]] >> 2 * FRACTION)
        parts[label] = np.array([rows, weight, squares, *first, *second], dtype=object)
    return np.concatenate(list(parts.values()))


def _fixed(values: Any) -> Integers:
    """Numbers as integers, in units of 2⁻¹²⁸."""
    if np.abs(values).max() > _LARGEST:
        raise ValueError(
            f"moments up to {np.abs(values).max():.3g} are beyond what masked sums hold, about 1e30; give the label or "
            "the features in another unit."
        )
    return np.array([int(math.ldexp(float(value), FRACTION)) for value in values], dtype=object)


def _from_integers(total: Integers, groups: Sequence[Label]) -> GroupMoments:
    """The moments of those groups that have rows."""
    per_group = len(total) // len(groups)
    n = (math.isqrt(8 * per_group - 15) - 3) // 2  # 3 + n + n(n+1)/2 numbers
    upper = np.triu_indices(n)
    found: list[tuple[Any, ...]] = []
    for label, part in zip(groups, total.reshape(len(groups), -1), strict=True):
        (rows, weight, squares), first, second = part[:3], part[3 : 3 + n], part[3 + n :]
        if rows % _ONE or rows < 0 or len(part) != 3 + n + len(upper[0]):
            raise ValueError("the masks of these files do not cancel; they are not of one collection, or damaged.")
        if not rows:
            continue
        scatter = np.zeros((n, n))
        scatter[upper] = _floats(second - first[upper[0]] * first[upper[1]] // weight)
        scatter = scatter + np.triu(scatter, 1).T
        found.append((label, rows // _ONE, weight / _ONE, squares / _ONE, _floats(first * _ONE // weight), scatter))
    return GroupMoments.from_arrays(*map(list, zip(*found, strict=True)))


def _floats(values: Integers) -> NDArray[np.float64]:
    return np.array([value / _ONE for value in values])
