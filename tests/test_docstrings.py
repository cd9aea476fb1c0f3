"""Docstrings of public names say type, default and meaning of every parameter, and their examples run."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import warnings
from pathlib import Path

import pytest
from numpydoc.validate import validate

import esvdfair

MODULES = ("esvdfair", "esvdfair.audit", "esvdfair.baselines", "esvdfair.datasets", "esvdfair.explain",
           "esvdfair.plots", "esvdfair.report")  # fmt: skip

FAULTS = {
    "GL08": "no docstring",
    "SS05": "the first line is no imperative",
    "PR01": "a parameter is not documented",
    "PR02": "an unknown parameter is documented",
    "PR07": "a parameter has no description",
    "RT01": "no section on what is returned",
    "RT03": "what is returned has no description",
    "EX01": "no example",
}


def public_names(module):
    """What `__all__` lists; without one, the functions and classes that are written there."""
    home = importlib.import_module(module)
    own = (name for name, value in vars(home).items() if getattr(value, "__module__", "") == module)
    return [name for name in getattr(home, "__all__", own) if name[0] != "_"]


NAMES = sorted({f"{module}.{name}" for module in MODULES for name in public_names(module)})


def results():
    """Public dataclasses that are returned, not made by users: their attributes are documented instead."""
    found = {name: pkgutil.resolve_name(name.replace(".", ":", 1) if name.count(".") == 1 else name) for name in NAMES}
    return {name for name, value in found.items() if dataclasses.is_dataclass(value) and value is not esvdfair.Effort}


RESULTS = results()
METHODS = [
    f"esvdfair.{owner}.{name}"
    for owner, names in {
        "Curve": "estimates meets select closest_to_parity model plot to_frame",
        "Decisions": "to_frame cutoff_words ratio_words",
        "ESVDFair": "fit fit_summary predict assess",
        "GroupMoments": "update merge mean_differences covariances pooled_mean pooled_scatter save load",
        "Summary": "save load",
    }.items()
    for name in names.split()
]


def faults(name, codes):
    """What numpydoc finds at a public name, of some kinds."""
    return [f"{name}: {FAULTS[code]} ({message})" for code, message in validate(name)["errors"] if code in codes]


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_documented(name):
    left_out = set()
    if name in RESULTS:
        left_out = {"PR01", "EX01", "SS05"}
    elif inspect.isclass(pkgutil.resolve_name(name.replace(".", ":", 1) if name.count(".") == 1 else name)):
        left_out = {"SS05"} if not name.endswith("Warning") else {"SS05", "EX01"}
    assert faults(name, FAULTS.keys() - left_out) == []


@pytest.mark.parametrize("name", METHODS)
def test_public_methods_are_documented(name):
    without_result = {"RT01"} if name.endswith(".save") else set()
    assert faults(name, FAULTS.keys() - {"EX01"} - without_result) == []


def test_what_is_not_documented_is_found():
    def undocumented(x):
        """Something."""

    importlib.import_module(__name__).undocumented = undocumented
    assert {code for code, _ in validate(f"{__name__}.undocumented")["errors"]} >= {"PR01", "EX01"}


SOURCES = sorted(Path(esvdfair.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("source", [path for path in SOURCES if ">>>" in path.read_text("utf-8")], ids=str)
def test_examples_run(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ".".join(["esvdfair", *source.relative_to(SOURCES[0].parent).with_suffix("").parts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", esvdfair.ESVDFairWarning)
        failed, tried = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert (failed, tried > 0) == (0, True)
