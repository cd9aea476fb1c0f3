"""Where a file is looked for, in which order, and what is said when it is nowhere."""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from esvdfair import datasets
from esvdfair.datasets import VARIABLE, RemoteFile, cache_folder, locate

GOOD, BAD = b"a,b\n1,2\n", b"a,b\n3,4\n"
FILE = RemoteFile("some/file.csv", "https://example.invalid/file.csv", hashlib.sha256(GOOD).hexdigest())


def put(folder: Path, content: bytes) -> Path:
    path = folder / FILE.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "given"))
    return tmp_path / "given"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fake_pooch(monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception) -> list[tuple[str, str]]:
    """Replace the network by a fixed answer; returns the log of requests."""
    requests: list[tuple[str, str]] = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> None:
        requests.append((url, known_hash))
        if isinstance(answer, Exception):
            raise answer
        path.mkdir(parents=True, exist_ok=True)
        (path / fname).write_bytes(answer)

    monkeypatch.setattr(datasets, "_pooch", lambda: SimpleNamespace(retrieve=retrieve))
    return requests


def test_the_variable_comes_first(given: Path, cache: Path) -> None:
    put(cache, GOOD)
    stored = put(given, GOOD)
    assert locate(FILE, data_home=cache) == stored


def test_other_bytes_in_the_variable_are_an_error_not_a_download(given: Path, cache: Path) -> None:
    put(cache, GOOD)
    put(given, BAD)
    with pytest.raises(ValueError, match=f"{VARIABLE}.*expected {FILE.sha256}"):
        locate(FILE, data_home=cache)


def test_then_the_cache(given: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = fake_pooch(monkeypatch, OSError("must not be called"))
    stored = put(cache, GOOD)
    assert locate(FILE, data_home=cache) == stored
    assert requests == []


@pytest.mark.parametrize("cached", [None, BAD])
def test_then_a_download_with_the_pinned_hash(
    given: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, cached: bytes | None
) -> None:
    if cached is not None:
        put(cache, cached)
    requests = fake_pooch(monkeypatch, GOOD)
    assert locate(FILE, data_home=cache).read_bytes() == GOOD
    assert requests == [(FILE.url, f"sha256:{FILE.sha256}")]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ConnectionError("a very long story"), "ConnectionError"),
        (ValueError("hash of downloaded file"), "bytes there are not the pinned ones"),
    ],
)
def test_nowhere_is_one_line_with_variable_and_file(
    given: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, reason: str
) -> None:
    fake_pooch(monkeypatch, problem)
    with pytest.raises(FileNotFoundError) as caught:
        locate(FILE, data_home=cache)
    message = str(caught.value)
    assert "\n" not in message
    for part in (VARIABLE, FILE.path, FILE.url, reason):
        assert part in message


def test_never_downloads_when_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    requests = fake_pooch(monkeypatch, GOOD)
    with pytest.raises(FileNotFoundError, match="download_if_missing=False"):
        locate(FILE, data_home=cache, download_if_missing=False)
    assert requests == []


def test_without_pooch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=rf"esvdfair\[data\].*{VARIABLE}"):
        locate(FILE)


def test_a_file_in_the_variable_needs_no_pooch(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    stored = put(given, GOOD)
    assert locate(FILE) == stored


def test_the_cache_follows_the_operating_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "esvdfair" in str(cache_folder())
