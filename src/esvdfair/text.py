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


def too_small(groups: Mapping[Any, int], shown: int = 5) -> str:
    """The sentence about groups that are too small to be compared.

    Examples
    --------
    >>> too_small({"x": 7, "z": 1})
    'Too small to judge: x (7 rows), z (1 row).'
    """
    names = [f"{label_text(label)} ({rows:,} row{'' if rows == 1 else 's'})" for label, rows in groups.items()]
    return f"Too small to judge: {some_names(names, shown)}."


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


def per_cent(value: float) -> str:
    """A share in per cent, with one decimal where it has any.

    Examples
    --------
    >>> per_cent(0.077), per_cent(0.2)
    ('7.7%', '20%')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + "%"


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
    "validation": "validation data",
    "heldout": "validation rows held out from the repair",
    "test": "test data",
    "train": "the training rows themselves, so results on new data will be worse",
}
"""``summary_["evaluated_on"]`` -> on which rows a repair was evaluated, in words."""


def error_name(summary: Mapping[str, Any]) -> str:
    """Without labels an error is the distance to the model's own predictions."""
    return f"mean squared {'error' if summary['error_against'] == 'labels' else 'change'}"


def summary_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table of ``summary_``; what is not known has no line."""
    adjusted = ", adjusted" if "ks_raw_before" in summary else ""
    names = {
        "ks": f"KS distance{adjusted}",
        "ks_raw": "  not adjusted",
        "mse": error_name(summary),
        "r2": "R²",
        "auc": "AUC",
        "mean_gap": f"difference in means{adjusted}",
        "mean_gap_raw": "  not adjusted",
        "variance_gap": "difference in variances",
    }
    sizes, lines = summary["group_sizes"], []
    groups = list(zip(sizes, distinct_names(list(sizes)), strict=True))
    for key, name in names.items():
        old, new = (summary.get(f"{key}_{when}") for when in ("before", "after"))
        if old is None or new is None:
            continue
        if key in ("ks", "ks_raw"):
            lines.append([name, share(old), share(new), interval(summary["ks_interval"], share) if key == "ks" else ""])
            continue
        form = share if key in ("r2", "auc") else number
        lines.append([name, form(old), form(new) if form is share else number(new, beside=old), ""])
        if key == "mse" and summary.get("mse_refit"):
            lines.append(["  refit without fairness constraint", "", number(summary["mse_refit"], beside=old), ""])
        olds, news = (summary.get(f"group_{key}_{when}") or {} for when in ("before", "after"))
        for label, group in groups if olds and news else ():
            line = f"  of {group} ({sizes[label]:,} rows)", number(olds[label]), number(news[label], beside=olds[label])
            lines.append([*line, ""])
    known = summary["ks_interval"] is not None
    return ["", "before", "after", *["95% interval, after"] * known], [line[: 3 + known] for line in lines]


def verdict(summary: Mapping[str, Any]) -> str:
    """Whether the target was met, what is kept of the explained variance, and which groups are too small."""
    parts, target = [], summary["target_ks"]
    estimate = (
        f"estimated population KS {share(summary['ks_population'])}, at most {share(summary['ks_upper'])} with "
        f"{summary['confidence'] or 0.95:.0%} confidence"
    )
    if target is None:
        parts.append(f"{estimate[0].upper()}{estimate[1:]}.")
    else:
        sure = ", certified" if summary.get("certified") else ""
        found = f"met{sure}" if summary["met"] else f"not met ({summary['decided_by']})"
        parts.append(f"Target KS ≤ {target:g}: {found}; {estimate}.")
    parts.append(kept_words(summary))
    if summary.get("outside_support"):
        parts.append(f"{percent(summary['outside_support'])} of the rows are in strata that lack a group.")
    if aside := summary.get("groups_set_aside"):
        parts.append(too_small(aside))
    parts.append(f"Noise level: chance alone shows a KS of about {share(summary['ks_floor'])} at these group sizes.")
    return " ".join(part for part in parts if part)


def kept_words(summary: Mapping[str, Any]) -> str:
    """How much of what the original model explained is kept."""
    before, after = summary["r2_before"], summary["r2_after"]
    if summary.get("constant"):
        return "The repaired model predicts nearly the same number for everybody."
    if after <= 0:
        return f"The repaired model predicts no better than a constant (R² {share(before)} to {share(after)})."
    if before <= 0:
        return f"R² {share(before)} before, {share(after)} after."
    if summary["error_against"] != "labels":
        return ""
    return f"Keeps {percent(after / before)} of the explained variance (R² {share(before)} to {share(after)})."


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
