"""Keras models on the torch backend, in a process of its own: a backend is chosen once, before keras is imported."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed (dev extra)")
CHECKS = ("contract", "repair", "table", "refusals", "several_inputs", "other_backend")


@pytest.fixture(scope="module")
def errors():
    """What went wrong in each check, an empty text for nothing."""
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from tests.models import keras_models; keras_models.main()"
    command = [sys.executable, "-c", code, *CHECKS]
    done = subprocess.run(command, env=os.environ | {"KERAS_BACKEND": "torch"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_keras(name, errors):
    assert errors[name] == ""
