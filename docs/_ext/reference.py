"""Writes the two reference pages, of the commands and of the public names, before Sphinx reads the pages."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from esvdfair.cli import main

COMMANDS = """# Command reference

Made from the commands themselves; `esvdfair COMMAND --help` prints the same. Worked examples with their output are in
[the guide](../cli.md). `python -m esvdfair` is the same program.
"""
NAMES = """# API reference

Made from the docstrings. What is not listed here may change without notice.
"""
MODULES = {
    "esvdfair": "repair and measure",
    "esvdfair.plots": "results as matplotlib axes",
    "esvdfair.explain": "which layers, directions, inputs and trees make the difference, and whose predictions change",
    "esvdfair.report": "the report, the verdict and the model card",
    "esvdfair.audit": "predictions and errors by group",
    "esvdfair.tables": "CSV and Parquet files of any size",
    "esvdfair.datasets": "example data",
    "esvdfair.baselines": "methods to compare with",
}


def setup(app: Any) -> dict[str, Any]:
    app.connect("config-inited", lambda app, config: write(Path(app.srcdir) / "reference"))
    return {"parallel_read_safe": True}


def write(folder: Path) -> None:
    """Write both pages; an unchanged one is left alone, so that Sphinx need not read it again."""
    folder.mkdir(exist_ok=True)
    pages = {"commands.md": [COMMANDS, *described(main, "esvdfair", None)], "api.md": [NAMES, *listed()]}
    for name, parts in pages.items():
        path, text = folder / name, "\n".join(parts)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def described(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    """A command and those below it: usage, what it does, examples, options."""
    context = click.Context(command, info_name=name.split()[-1], parent=parent)
    yield f"## {name}\n"
    yield f"```text\n{command.get_usage(context)}\n```\n"
    yield from paragraphs(command.help or "")
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            yield f"`{record[0]}`\n: {escaped(record[1])}\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            if found := command.get_command(context, child):
                yield from described(found, f"{name} {child}", context)


def paragraphs(text: str) -> Iterator[str]:
    """Help as Markdown; what click prints as it stands (after a line of \\b) is a block under its first line."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b"):
            yield f"{escaped(paragraph)}\n"
            continue
        title, colon, lines = paragraph.lstrip("\b\n").partition(":\n")
        yield f"{escaped(title)}:\n" if colon else ""
        yield f"```text\n{inspect.cleandoc(lines or title)}\n```\n"


def escaped(text: str) -> str:
    """Text that Markdown leaves as it is, outside its own backquotes."""
    parts = text.split("`")
    for outside in range(0, len(parts), 2):
        parts[outside] = "".join(f"\\{letter}" if letter in "*_<[" else letter for letter in parts[outside])
    return "`".join(parts)


def listed() -> Iterator[str]:
    """A table of the public names of each module, each with a page of its own."""
    for module, subject in MODULES.items():
        yield f"## {module}\n\n{subject[0].upper()}{subject[1:]}.\n"
        names = "\n".join(f"   ~{module}.{name}" for name in public_names(module))
        yield f"```{{eval-rst}}\n.. autosummary::\n   :toctree: api\n   :nosignatures:\n\n{names}\n```\n"


def public_names(module: str) -> list[str]:
    """What `__all__` lists; without one, the functions and classes that are written there."""
    found = import_module(module)
    if hasattr(found, "__all__"):
        return list(found.__all__)
    return [
        name for name, value in vars(found).items() if getattr(value, "__module__", "") == module and name[0] != "_"
    ]
