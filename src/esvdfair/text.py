"""Numbers, labels and what a repair came to as people read them; report, model card and command line share them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from esvdfair.core.checks import distinct_names as distinct_names
from esvdfair.core.checks import label_text as label_text

WIDEST = 40
"""Characters of a name that are shown."""
ROUNDING = 1e-9
"""A number smaller than this part of what it is compared with is rounding."""


def some_names(names: Sequence[str], shown: int) -> str:
    """Names, of many the first few."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def printable(text: str, widest: int = WIDEST) -> str:
    """Text from a user's file that can neither steer a terminal nor break a table."""
    safe = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return safe if len(safe) <= widest else safe[: widest - 1] + "…"


def number(value: float | None, *, beside: float = 0.0) -> str:
    """Four digits that count; a dash for none.

    What is rounding beside another number is 0, not 8.882e-16, and a salary is 39,750, not 3.975e+04.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if 9999.5 <= abs(value) < 999_950:
        return f"{float(f'{value:.4g}'):,.0f}"
    return "0" if abs(value) < ROUNDING * abs(beside) else f"{value:.4g}"


def share(value: float | None) -> str:
    """A KS distance, three digits after the point."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A part of all, in per cent."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.0%}"


def signed(correlation: float) -> str:
    """A correlation with its sign, which nothing has that rounds to zero."""
    return f"{correlation:+z.2f}".replace("+0.00", "0.00")


def interval(ends: tuple[float, float] | None, form: Callable[[float], str] = number) -> str:
    """``[low, high]``; a dash when there is none."""
    return "–" if ends is None else f"[{form(ends[0])}, {form(ends[1])}]"


def quoted(name: str) -> str:
    """A name from a user's file, in quotes, of bounded length."""
    return f"'{printable(name, 60)}'"


EVALUATED_ON = {
    "validation": "rows set aside for validation",
    "heldout": "rows held out from the repair",
    "test": "rows that neither fitted nor chose",
    "train": "the very rows that fitted it, so new people will fare worse",
}
"""``summary_["evaluated_on"]`` -> which rows judged a repair, in words."""


def error_name(summary: Mapping[str, Any]) -> str:
    """Without labels an error is the distance to the model's own predictions."""
    return f"mean squared {'error' if summary['error_against'] == 'labels' else 'change'}"


def summary_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table of ``summary_``; what is not known has no line."""
    adjusted = ", adjusted" if "ks_raw_before" in summary else ""
    names = {
        "ks": f"KS distance{adjusted}",
        "ks_raw": "  as it is, not adjusted",
        "mse": error_name(summary),
        "mean_gap": f"gap of means{adjusted}",
        "mean_gap_raw": "  as it is, not adjusted",
        "variance_gap": "gap of variances",
    }
    sizes, lines = summary["group_sizes"], []
    groups = list(zip(sizes, distinct_names(list(sizes)), strict=True))
    for key, name in (names | {"r2": "R²"}).items():
        old, new = (summary.get(f"{key}_{when}") for when in ("before", "after"))
        if old is None or new is None:
            continue
        if key in ("ks", "ks_raw"):
            lines.append([name, share(old), share(new), interval(summary["ks_interval"], share) if key == "ks" else ""])
            continue
        lines.append([name, number(old), number(new, beside=old), ""])
        if key == "mse" and summary.get("mse_refit"):
            lines.append(["  last layer refitted without parity", "", number(summary["mse_refit"], beside=old), ""])
        olds, news = (summary.get(f"group_{key}_{when}") or {} for when in ("before", "after"))
        for label, group in groups if olds and news else ():
            line = f"  of {group} ({sizes[label]:,} rows)", number(olds[label]), number(news[label], beside=olds[label])
            lines.append([*line, ""])
    judged = summary["ks_interval"] is not None
    return ["", "before", "after", *["95 % interval, after"] * judged], [line[: 3 + judged] for line in lines]


def verdict(summary: Mapping[str, Any]) -> str:
    """Whether the target was met, as ``summary_`` has it; what to expect of such people; what parity would show."""
    parts, target = [], summary["target_ks"]
    if summary.get("outside_support"):
        parts.append(
            f"{percent(summary['outside_support'])} of people are like nobody of another group and are left out."
        )
    if target is not None:
        sure = f", certified at {summary['confidence']:.0%} confidence" if summary.get("certified") else ""
        found = f"met{sure}" if summary["met"] else f"not met ({summary['decided_by']})"
        parts.append(f"Target KS ≤ {target:g}: {found}.")
    if summary.get("constant"):
        parts.append("The repaired model predicts nearly one value for everybody.")
    if summary.get("ks_population") is not None:
        at = summary["confidence"] or 0.95
        parts.append(
            f"Any number of such people would show a KS distance of about {share(summary['ks_population'])}, at most "
            f"{share(summary['ks_upper'])} with {at:.0%} confidence."
        )
    if summary["ks_floor"] is None:
        parts.append("The KS distance is not known: moments tell means and variances, not whole distributions.")
    else:
        parts.append(f"Parity itself would show a KS distance of about {share(summary['ks_floor'])} on so many rows.")
    return " ".join(parts)


def to_json(value: Any) -> str:
    """JSON of nested plain values, such as ``summary_``; labels become text and what is not finite becomes null.

    ``json.dumps`` alone writes NaN, which JSON does not know.

    Examples
    --------
    >>> print(to_json({("a", 1): float("nan"), "b": (1, 2.5)}))
    {
      "a, 1": null,
      "b": [
        1,
        2.5
      ]
    }
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return dict(zip(distinct_names(list(value)), map(_plain, value.values()), strict=True))
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
