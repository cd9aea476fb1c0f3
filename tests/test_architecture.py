"""Every module imports only from those above it in `docs/architecture.md` and no private name; none is too large."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from complexipy import code_complexity

ROOT = Path(__file__).parents[1]
PACKAGE = "esvdfair"
FRAMEWORKS = {"torch", "onnx", "onnxruntime", "tensorflow", "jax"}
TORCH_HOMES = ("models/",)
OF_TORCH = {"_parameters", "_modules"}  # of every module; there is no public way to replace a parameter
PRINTERS = {"sys.stdout", "sys.stderr", "click.echo", "click.secho"}


def listed_modules(document: str) -> list[str]:
    """The first word of every line of the first fenced block: `core/gaps.py`, `report/`."""
    block = re.search(r"^```\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert block, "docs/architecture.md has no fenced list of modules"
    return [line.split()[0] for line in block[1].splitlines()]


def position(path: str, order: list[str]) -> float | None:
    """Where the source file `path` stands in the list; None when no line covers it."""
    for index, entry in enumerate(order):
        if path == entry or (entry.endswith("/") and path.startswith(entry)):
            return index
    folder = path.removesuffix("__init__.py")
    inside = [index for index, entry in enumerate(order) if entry.startswith(folder)]
    return inside[-1] + 0.5 if folder != path and inside else None


def imported_names(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, wherever in the file it stands.

    `from a import b` gives `a.b`, which may name a module or something in the module `a`.
    """
    package = [PACKAGE, *PurePosixPath(path).parent.parts]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def source_of(name: str, files: set[str]) -> str | None:
    """The file of the package that the dotted name comes from; None for a name from elsewhere."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    for end in range(len(parts), 0, -1):
        stem = "/".join(parts[1:end])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
            if candidate in files:
                return candidate
    raise AssertionError(f"{name} names no file of the package")


def printing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that writes to the terminal."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="print"):
                yield node.lineno, "print"
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if f"{owner}.{attr}" in PRINTERS:
                yield node.lineno, f"{owner}.{attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_definitions(tree: ast.AST) -> set[str]:
    """Private names that a file defines: functions, classes, variables, fields, and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if is_private(name)}


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every `thing._name`, whatever the thing is but self and cls."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, name


def private_faults(path: str, tree: ast.AST, defined: dict[str, set[str]]) -> Iterator[str]:
    """Private names of other files that a file uses, as far as the text alone can tell; ``defined``: by every file.

    A file whose own name is private may be imported by its neighbours. `thing._name` is a fault when this file does
    not define `_name` and another one does.
    """
    for line, name in imported_names(tree, path):
        parts, target = name.split("."), source_of(name, set(defined))
        if not target or target == path:
            continue
        inside = len(PurePosixPath(target).with_suffix("").parts) + (not target.endswith("__init__.py"))
        if any(map(is_private, parts[inside:])):
            yield f"{path}:{line} imports {parts[-1]}, a private name of {target}"
        elif is_private(PurePosixPath(target).stem) and PurePosixPath(target).parent != PurePosixPath(path).parent:
            yield f"{path}:{line} imports {target}, a private file of another folder"
    others = set().union(*(names for other, names in defined.items() if other != path)) - defined[path] - OF_TORCH
    for line, name in private_uses(tree):
        if name in others:
            yield f"{path}:{line} uses {name}, a private name of another file"


def violations(sources: dict[str, str], order: list[str]) -> list[str]:
    """What breaks the rules of `docs/architecture.md`, one line each."""
    found = []
    trees = {path: ast.parse(text) for path, text in sources.items()}
    defined = {path: private_definitions(tree) for path, tree in trees.items()}
    for path, tree in trees.items():
        here = position(path, order)
        if here is None:
            found.append(f"{path} is not in the list of docs/architecture.md")
            continue
        for line, name in imported_names(tree, path):
            found += [f"{path}:{line} {fault}" for fault in _import_faults(path, name, here, sources, order)]
        found += private_faults(path, tree, defined)
        if not path.startswith("cli/"):
            found += [f"{path}:{line} uses {name}; only cli/ prints" for line, name in printing(tree)]
    return found


def _import_faults(path: str, name: str, here: float, sources: dict[str, str], order: list[str]) -> Iterator[str]:
    top = name.split(".")[0]
    if path.startswith("core/") and top in FRAMEWORKS:
        yield f"imports {top}; core/ knows no deep-learning framework"
    elif top == "torch" and not path.startswith(TORCH_HOMES):
        yield f"imports torch; it lives in {', '.join(TORCH_HOMES)}"
    target = source_of(name, set(sources))
    there = position(target, order) if target else None
    if target and target != path and there is not None:
        same_folder = here == there and order[int(here)].endswith("/")
        if there >= here and not same_folder:
            yield f"imports {target}, which is not above it in docs/architecture.md"


def _order() -> list[str]:
    return listed_modules((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


def package_sources() -> dict[str, str]:
    src = ROOT / "src" / PACKAGE
    return {p.relative_to(src).as_posix(): p.read_text(encoding="utf-8") for p in sorted(src.rglob("*.py"))}


def test_the_package_keeps_the_order():
    sources = package_sources()
    assert {"__init__.py", "core/checks.py"} <= sources.keys()
    assert "\n".join(violations(sources, _order())) == ""


def test_the_list_has_no_line_twice():
    order = _order()
    assert len(order) == len(set(order)) > 20
    assert order[-1] == "__init__.py"


ORDER = ["core/low.py", "core/high.py", "models/", "batches.py", "cli/", "__init__.py"]
CLEAN = {
    "core/low.py": "import numpy as np\ndef _f(): ...",
    "core/high.py": "from esvdfair.core import low\nfrom .low import f",
    "core/__init__.py": "from esvdfair.core.high import g",
    "models/__init__.py": "from esvdfair.models.torch import adapt",
    "models/torch.py": "import torch\nfrom esvdfair.models import adapt\nfrom ..core.low import f",
    "batches.py": "import esvdfair.models.torch\nfrom esvdfair import core",
    "cli/audit.py": "print('a table')\nfrom esvdfair.cli._table import rows",
    "cli/_table.py": "class Table:\n    def _cells(self, other):\n        return other._cells(self), super()._cells()",
    "__init__.py": "from esvdfair.batches import Batch",
}


def test_a_clean_package_has_no_violation():
    assert violations(CLEAN, ORDER) == []


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("core/low.py", "from esvdfair.core.high import g", "core/low.py:1 imports core/high.py"),
        ("core/low.py", "from .high import g", "core/low.py:1 imports core/high.py"),
        ("core/low.py", "from . import high", "core/low.py:1 imports core/high.py"),
        ("core/low.py", "from esvdfair.core import g", "core/low.py:1 imports core/__init__.py"),
        ("core/high.py", "def f():\n    import esvdfair.batches", "core/high.py:2 imports batches.py"),
        (
            "core/low.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..batches import Batch",
            "core/low.py:3 imports batches.py",
        ),
        ("batches.py", "from esvdfair import Batch", "batches.py:1 imports __init__.py"),
        ("batches.py", "import importlib\nimportlib.import_module('esvdfair.cli.audit')", "cli/audit.py"),
        ("core/high.py", "def f():\n    import torch.nn", "core/high.py:2 imports torch"),
        ("core/high.py", "from onnx import load", "core/high.py:1 imports onnx"),
        ("batches.py", "from torch.utils.data import DataLoader", "batches.py:1 imports torch"),
        ("batches.py", "def f():\n    print('loaded')", "batches.py:2 uses print"),
        ("models/torch.py", "import sys\nsys.stdout.write('x')", "models/torch.py:2 uses sys.stdout"),
        (
            "core/high.py",
            "from esvdfair.core.low import _f",
            "core/high.py:1 imports _f, a private name of core/low.py",
        ),
        (
            "batches.py",
            "from esvdfair.core import low\nlow._f()",
            "batches.py:2 uses _f, a private name of another file",
        ),
        ("batches.py", "def g(fair):\n    fair._f = 1", "batches.py:2 uses _f, a private name of another file"),
        ("__init__.py", "from esvdfair.cli._table import rows", "__init__.py:1 imports cli/_table.py, a private file"),
        ("new.py", "", "new.py is not in the list"),
        ("extra/__init__.py", "", "extra/__init__.py is not in the list"),
    ],
)
def test_a_violation_is_found(path, text, said):
    found = violations(CLEAN | {path: text}, ORDER)
    assert len(found) == 1
    assert said in found[0]


def test_an_import_of_no_file_is_an_error():
    sources = {"core/low.py": "import esvdfair.core.lost"}
    with pytest.raises(AssertionError, match=r"esvdfair\.core\.lost names no file"):
        violations(sources, ORDER)


# --- size -----------------------------------------------------------------------------------------------------------

FILE_LINES, FUNCTION_LINES, COMPLEXITY = 450, 60, 15
REASON = "Long because"

# What is still too large. Entries leave this list and never join it: one that is no longer needed fails the test.
TOO_LARGE: set[str] = {}


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method with its name, `Class.method`; not the functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{owner}{node.name}", node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def`, without its docstring."""
    lines = (node.end_lineno or 0) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def too_large(sources: dict[str, str]) -> dict[str, str]:
    """Files, functions and names that break the limits: what each is called in TOO_LARGE, and the fault in words."""
    found: dict[str, str] = {}
    homes: dict[str, list[str]] = {}
    for path, text in sources.items():
        tree, count = ast.parse(text), len(text.splitlines())
        if count > FILE_LINES and REASON not in (ast.get_docstring(tree) or ""):
            found[path] = f"{path} has {count} lines; its docstring has no '{REASON} …'"
        complexity = {f.name.replace("::", "."): f.complexity for f in code_complexity(text).functions}
        for name, node in functions(tree):
            if (lines := code_lines(node)) > FUNCTION_LINES:
                found[f"{path}:{name}"] = f"{path}:{node.lineno} {name} has {lines} lines of code"
            if complexity[name] > COMPLEXITY:
                found[f"{path}:{name}"] = f"{path}:{node.lineno} {name} has cognitive complexity {complexity[name]}"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    twice = {name: places for name, places in homes.items() if len({p.split(":")[0] for p in places}) > 1}
    return found | {name: f"{name} is defined in {', '.join(places)}" for name, places in twice.items()}


def test_files_functions_and_complexity_stay_within_their_limits():
    found = too_large(package_sources())
    assert "\n".join(fault for key, fault in found.items() if key not in TOO_LARGE) == ""
    assert sorted(TOO_LARGE - found.keys()) == [], "remove these from TOO_LARGE"


NESTED = (
    "def f(x):\n" + "".join("    " * depth + f"    if x > {depth}:\n" for depth in range(6)) + "    " * 7 + "return 1\n"
)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"a.py": "x = 1\n" * 451}, "a.py has 451 lines"),
        ({"a.py": "class A:\n    def f(self):\n" + "        x = 1\n" * 60}, "a.py:2 A.f has 61 lines of code"),
        ({"a.py": NESTED}, "a.py:1 f has cognitive complexity 21"),
        ({"a.py": "def f(): ...", "b.py": "class f: ..."}, "f is defined in a.py:1, b.py:1"),
    ],
)
def test_what_is_too_large_is_found(sources, said):
    (found,) = too_large(sources).values()
    assert said in found


@pytest.mark.parametrize(
    "text",
    [
        f'"""Much.\n\n{REASON} the formats share one table.\n"""\n' + "x = 1\n" * 451,
        'def f():\n    """Say.\n' + "    more\n" * 60 + '    """\n    return 1\n',
        "x = 1\n" * 450,
    ],
)
def test_a_reason_and_documentation_are_no_fault(text):
    assert too_large({"a.py": text}) == {}
