"""Find and read a public data file: the folder of ``ESVDFAIR_DATA``, the cache, or a download with a pinned hash."""

import hashlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import pandas as pd

VARIABLE = "ESVDFAIR_DATA"
Preparation = Literal["clean", "paper"]


@dataclass(frozen=True)
class RemoteFile:
    """One file: where it lies under a data folder, where its very bytes are public, and their SHA-256."""

    path: str
    url: str
    sha256: str


def read_csv(
    file: RemoteFile, preparation: str, *, data_home: str | Path | None, download_if_missing: bool
) -> pd.DataFrame:
    """The table in ``file``. A ``preparation`` that is none of the two is a ValueError before any file is sought."""
    if preparation not in ("clean", "paper"):
        raise ValueError(
            f"preparation is {preparation!r}; choose 'clean' (no leak, scaled on the training rows) or 'paper' (as the "
            "authors did)."
        )
    return pd.read_csv(locate(file, data_home=data_home, download_if_missing=download_if_missing))


def locate(file: RemoteFile, *, data_home: str | Path | None = None, download_if_missing: bool = True) -> Path:
    """Path of a local copy of ``file`` with the pinned bytes.

    Parameters
    ----------
    file : RemoteFile
    data_home : path, optional
        The cache folder; by default that of the operating system for ``esvdfair``.
    download_if_missing : bool
        False never opens a connection.

    Raises
    ------
    ValueError
        The file in ``ESVDFAIR_DATA`` has other bytes than the pinned ones.
    FileNotFoundError
        It is nowhere and cannot be downloaded; the one line names the variable, the file and the address.
    ImportError
        A download is needed and pooch is not installed.
    """
    folder = os.environ.get(VARIABLE)
    if folder and (given := Path(folder) / file.path).is_file():
        found = _sha256(given)
        if found != file.sha256:
            raise ValueError(
                f"{given} (from {VARIABLE}) has SHA-256 {found}, expected {file.sha256}: it is another version of the "
                f"file, and row counts and results would differ. Replace it by {file.url} or unset {VARIABLE}."
            )
        return given
    cached = cache_folder(data_home) / file.path
    if cached.is_file() and _sha256(cached) == file.sha256:
        return cached
    if not download_if_missing:
        raise FileNotFoundError(_absent(file, "download_if_missing=False"))
    return _download(file, cached)


def cache_folder(data_home: str | Path | None = None) -> Path:
    """``data_home``, or the folder for downloaded files that the operating system proposes (``XDG_CACHE_HOME``…)."""
    if data_home is not None:
        return Path(data_home).expanduser()
    return Path(str(_pooch().os_cache("esvdfair")))


def _download(file: RemoteFile, target: Path) -> Path:
    pooch = _pooch()
    try:
        pooch.retrieve(file.url, known_hash=f"sha256:{file.sha256}", fname=target.name, path=target.parent)
    except OSError as error:  # no connection, no such page, no room on the disk
        raise FileNotFoundError(_absent(file, type(error).__name__)) from error
    except ValueError as error:  # pooch's word for a wrong hash; it keeps nothing then
        raise FileNotFoundError(_absent(file, "the bytes there are not the pinned ones")) from error
    return target


def _absent(file: RemoteFile, reason: str) -> str:
    return (
        f"{file.path} not found: set the environment variable {VARIABLE} to a folder that holds it, or go online once "
        f"to download it from {file.url} ({reason})."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pooch() -> ModuleType:
    try:
        return importlib.import_module("pooch")
    except ImportError as error:
        raise ImportError(
            f"downloading needs pooch: pip install 'esvdfair[data]', or set {VARIABLE} to a folder with the file."
        ) from error
