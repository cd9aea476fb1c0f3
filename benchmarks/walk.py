"""How large the package is, and how far a call walks through it.

    python benchmarks/walk.py

Counts the source, then runs a default `ESVDFair.fit` and `esvdfair repair` on small data and counts the files and
functions of the package that each passes through, the second time it is called, when all imports are done. A
comprehension counts as a function up to Python 3.11, where it is one.
"""

import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pandas as pd
from click.testing import CliRunner
from skl2onnx import to_onnx
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair
from esvdfair import __file__ as package
from esvdfair.cli import main as command_line

PACKAGE = Path(package).parent
BARS = {"ESVDFair(model).fit": (14, 300), "esvdfair repair": (20, None)}
"""Files and functions that each may pass through at most."""


def size() -> dict[str, tuple[int, int]]:
    """Files and lines of the package, by the ending of their names."""
    found = {}
    for ending in ("py", "js", "css"):
        files = list(PACKAGE.rglob(f"*.{ending}"))
        found[ending] = len(files), sum(len(path.read_text("utf-8").splitlines()) for path in files)
    return found


def walked(call: Callable[[], Any]) -> set[CodeType]:
    """The functions of the package that run during a call, in any thread."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {code for code in seen if code.co_filename.startswith(f"{PACKAGE}/")}


def measure() -> dict[str, tuple[int, int]]:
    """Files and functions of every call of BARS."""
    rng = np.random.default_rng(0)
    sex = rng.integers(0, 2, 600)
    X = (rng.normal(size=(600, 4)) + sex[:, None] * [0.8, 0, 0, 0]).astype(np.float32)
    y = X.sum(axis=1) + rng.normal(size=600)
    found = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MLPRegressor(hidden_layer_sizes=(16, 8), random_state=0).fit(X, y)
        network, table, out = (f"{folder}/{name}" for name in ("model.onnx", "people.csv", "fair.onnx"))
        Path(network).write_bytes(to_onnx(model, X[:1]).SerializeToString())
        pd.DataFrame(X, columns=list("abcd")).assign(sex=sex, y=y).to_csv(table, index=False)
        words = ["repair", network, table, "--sensitive", "sex", "--target", "y", "-o", out, "--force"]
        calls: dict[str, Callable[[], Any]] = {
            "ESVDFair(model).fit": lambda: ESVDFair(model).fit(X, y, sensitive_features=sex),
            "esvdfair repair": lambda: CliRunner().invoke(command_line, words, catch_exceptions=False),
        }
        for name, call in calls.items():
            call()
            codes = walked(call)
            found[name] = len({code.co_filename for code in codes}), len(codes)
    return found


def main() -> None:
    for ending, (files, lines) in size().items():
        print(f"{ending}: {lines:,} lines in {files} files")
    for name, (files, functions) in measure().items():
        print(f"{name}: through {files} files, {functions} functions")


if __name__ == "__main__":
    main()
