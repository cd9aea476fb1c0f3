"""Workflows, hooks and templates: they parse, run what is there, and take nothing that can change under them."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml"]
if not (ROOT / ".github").exists():
    pytest.skip("an sdist has no doors", allow_module_level=True)


def steps(name):
    """Steps of all jobs of a workflow."""
    jobs = yaml.safe_load((ROOT / ".github/workflows" / name).read_text("utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_door_parses(path):
    assert isinstance(yaml.safe_load(path.read_text("utf-8")), dict)


def test_the_checks_are_those_of_ci_run_one_step_each():
    (targets,) = re.findall(r"^make ([a-z ]+)$", (ROOT / ".ci/run").read_text("utf-8"), re.M)
    run = [step["run"].split()[:2] for step in steps("checks.yml") if step.get("run", "").startswith("make")]
    assert run == [["make", target] for target in [*targets.split(), "test", "test-lowest"]]


@pytest.mark.parametrize("name", ["checks.yml", "release.yml"])
def test_actions_of_others_are_pinned_by_hash(name):
    used = [step["uses"] for step in steps(name) if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_the_tests_run_on_every_python_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text("utf-8"))["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


def test_hooks_run_what_is_there_and_download_nothing():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        make = re.fullmatch(r"make ([a-z-]+)", hook["entry"])
        path = re.search(r"tests/\S+", hook["entry"])
        assert make[1] in targets if make else (ROOT / path[0]).exists()
