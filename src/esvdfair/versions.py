"""Versions of what is installed, for files that say what made them."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """Version of an installed package; None when it is not installed, as when it runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
