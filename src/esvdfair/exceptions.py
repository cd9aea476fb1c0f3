"""Errors and warnings that name parameters, so that every front end can name them in its own words.

A message is a text, or a template and the values of its fields. A field whose value is :class:`Given` is a parameter:
Python says ``target_ks=0.1`` and ``validation``, the command line ``--target-ks 0.1`` and ``--validation``, each by its
own :data:`Word`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

Word = Callable[[str, Any], str]
"""A parameter as a front end writes it: its name, and its value or None."""


@dataclass(frozen=True)
class Given:
    """A parameter in a message: ``name=value``, or its name alone where there is no value."""

    value: Any = None


def python_word(name: str, value: Any) -> str:
    """A parameter as Python code has it."""
    return name if value is None else f"{name}={value!r}"


class _Message(Exception):
    """A text; or, in ``args``, a template and its values. ``str`` names parameters as Python code does."""

    def __init__(self, template: str = "", values: Mapping[str, Any] | None = None, **more: Any) -> None:
        found = {**(values or {}), **more}
        super().__init__(*([template, found] if found else [template]))

    def say(self, word: Word) -> str:
        """The message with parameters in the words of a front end."""
        template, *values = self.args
        if not values:
            return str(template)  # a plain text may hold braces
        words = {name: word(name, v.value) if isinstance(v, Given) else v for name, v in values[0].items()}
        return str(template).format_map(words)

    def about(self, name: str, *, instead_of: str) -> Self:
        """The same message about another parameter."""
        template, *values = self.args
        renamed = {name if key == instead_of else key: value for key, value in dict(*values).items()}
        return type(self)(str(template).replace(f"{{{instead_of}}}", f"{{{name}}}"), renamed)

    def __str__(self) -> str:
        return self.say(python_word)


class InputError(_Message, ValueError):
    """What was given cannot be used.

    Examples
    --------
    >>> print(InputError("{target_ks} needs {validation}.", target_ks=Given(0.1), validation=Given()))
    target_ks=0.1 needs validation.
    """


def refused(name: str, words: str, **values: Any) -> InputError:
    """The error of one parameter: its name, then the words.

    Examples
    --------
    >>> print(refused("y", "has {columns} columns; pass one.", columns=3))
    y has 3 columns; pass one.
    """
    return InputError(f"{{{name}}} {words}", {name: Given()}, **values)


class ESVDFairWarning(_Message, UserWarning):
    """Something the user should know about the repair: a target not met, a fallback taken."""
