"""`esvdfair doctor`: what is installed here."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._terminal import answer
from esvdfair.files import version_of

FOR_USERS = ("torch", "onnx", "lightgbm", "xgboost", "catboost", "plots", "data")
"""Extras for users; the others are for developers."""
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.command()
@opt.json_option
def doctor(as_json: bool) -> None:
    """Print versions and threads, for bug reports.

    Versions of this package, of what it needs, and of the extras. Nothing is sent anywhere.

    \b
    Example:
      esvdfair doctor
    """
    found: dict[str, Any] = {
        "esvdfair": version_of("esvdfair") or "not installed, run from its source",
        "python": f"{platform.python_version()} on {platform.platform()}",
        **_packages(),
        "threads": _threads(),
    }
    lines = []
    for name, value in found.items():
        items = [f"{key} {item}" for key, item in value.items()] if isinstance(value, dict) else [value]
        lines.append(f"{name:10}" + f"\n{'':10}".join(items))
    answer(found, "\n".join(lines), as_json=as_json)


def _packages() -> dict[str, dict[str, str]]:
    """Versions of what is needed always, then of what each extra needs."""
    found: dict[str, dict[str, str]] = {name: {} for name in ("needs", *FOR_USERS)}
    try:
        needed = requires("esvdfair") or []
    except PackageNotFoundError:
        needed = []
    for line in needed:
        package, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)
        name = extra[1] if extra else "needs"
        if package and name in found:
            missing = "is not installed" + (f": pip install 'esvdfair[{name}]'" if extra else "")
            found[name][package[0]] = version_of(package[0]) or version_of(f"{package[0]}-cpu") or missing
    return found


def _threads() -> dict[str, Any]:
    """Cores, the libraries that use threads, and what the environment says of these."""
    from threadpoolctl import threadpool_info

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pools = [(f"{pool['internal_api']} {pool['version'] or ''}".strip(), pool) for pool in threadpool_info()]
    found = {"cores": cores} | {name: f"uses {pool['num_threads']}" for name, pool in pools}
    return found | {name: f"is {os.environ[name]}" for name in VARIABLES if name in os.environ}
