"""Numbers and labels as people read them; the report and the command line share them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence

from esvdfair.core.checks import Label

WIDEST = 40
"""Characters of a name that are shown."""
ROUNDING = 1e-9
"""A number smaller than this part of what it is compared with is rounding."""


def label_text(label: Label) -> str:
    """A group as people write it; of several attributes, their values."""
    return ", ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def some_names(names: Sequence[str], shown: int) -> str:
    """Names, of many the first few."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def printable(text: str, widest: int = WIDEST) -> str:
    """Text from a user's file that can neither steer a terminal nor break a table."""
    safe = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return safe if len(safe) <= widest else safe[: widest - 1] + "…"


def number(value: float | None, *, beside: float = 0.0) -> str:
    """Four digits that count; a dash for none. What is rounding beside another number is 0, not 8.882e-16."""
    if value is None or not math.isfinite(value):
        return "–"
    return "0" if abs(value) < ROUNDING * abs(beside) else f"{value:.4g}"


def share(value: float | None) -> str:
    """A KS distance, three digits after the point."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A part of all, in per cent."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.0%}"


def interval(ends: tuple[float, float] | None, form: Callable[[float], str] = number) -> str:
    """``[low, high]``; a dash when there is none."""
    return "–" if ends is None else f"[{form(ends[0])}, {form(ends[1])}]"


def quoted(name: str, widest: int = 60) -> str:
    """A name from a user's file, in quotes, of bounded length."""
    return f"'{printable(name, widest)}'"


def distinct_names(labels: Sequence[Label]) -> list[str]:
    """Each label as people write it; where two would be written alike, as JSON, which tells them apart.

    Examples
    --------
    >>> distinct_names([("a", 1), ("b, c", "d"), ("b", "c, d")])
    ['a, 1', '["b, c", "d"]', '["b", "c, d"]']
    """
    texts = [label_text(label) for label in labels]
    alike = Counter(texts)
    return [json.dumps(label) if alike[text] > 1 else text for label, text in zip(labels, texts, strict=True)]


EVALUATED_ON = {
    "validation": "rows set aside for validation",
    "heldout": "rows held out from the repair",
    "train": "the very rows that fitted it, so new people will fare worse",
}
"""``summary_["evaluated_on"]`` -> which rows judged a repair, in words."""
