"""Numbers, labels and what a repair came to as people read them; report, model card and command line share them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
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
    """The sentence about groups that are too small to be compared."""
    names = [f"{label_text(label)} ({rows:,} row{'' if rows == 1 else 's'})" for label, rows in groups.items()]
    return f"Too small to compare: {some_names(names, shown)}."


def printable(text: str, widest: int = WIDEST) -> str:
    """Text from a user's file that can neither steer a terminal nor break a table."""
    safe = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return safe if len(safe) <= widest else safe[: widest - 1] + "…"


def number(value: float | None, *, beside: float = 0.0) -> str:
    """Three significant digits; a dash for none.

    What is rounding beside another number is 0, not 8.88e-16, and a salary is 39,800, not 3.98e+04.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if 999.5 <= abs(value) < 999_500_000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return "0" if abs(value) < ROUNDING * abs(beside) else f"{value:.3g}"


def share(value: float | None) -> str:
    """A KS distance, three digits after the point."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float | None, decimals: int = 0) -> str:
    """A part of all, in per cent, with decimals where it has any: 8%, 7.7%, 20%."""
    return "–" if value is None or not math.isfinite(value) else f"{value:z.{decimals}%}".replace(".0%", "%")


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
    "validation": "rows of validation data",
    "heldout": "held-out validation rows",
    "test": "rows of test data",
    "train": "training rows, so results on new data will be worse",
    "given": "rows given here; if some of them are training rows, results on new data will be worse",
}
"""``summary_["evaluated_on"]`` -> on which rows a repair was evaluated, in words that follow a number."""


def error_name(summary: Mapping[str, Any]) -> str:
    """Without labels an error is the distance to the model's own predictions."""
    return f"mean squared {'error' if summary['error_against'] == 'labels' else 'change'}"


# --- the table of a summary ----------------------------------------------------------------------------------------


def summary_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table of ``summary_``; what is not known has no line."""
    adjusted = ", adjusted" if "ks_raw_before" in summary else ""
    target = summary["target_ks"]
    decides = "estimated population KS" + ("" if target is None else f" (target {target:g})")
    lines = [[decides, "", share(summary["ks_population"]), interval(summary["ks_interval"], share)]]
    for key, name, form in (
        ("ks", f"KS distance{adjusted}", share),
        ("ks_raw", "  not adjusted", share),
        ("mse", error_name(summary), number),
        ("r2", "R²", share),
        ("auc", "AUC", share),
        ("mean_gap", f"difference in means{adjusted}", number),
        ("mean_gap_raw", "  not adjusted", number),
        ("variance_gap", "difference in variances", number),
    ):
        old, new = (summary.get(f"{key}_{when}") for when in ("before", "after"))
        if old is not None and new is not None:
            lines.append([name, form(old), form(new) if form is share else number(new, beside=old), ""])
            lines += _mse_lines(summary) if key == "mse" else []
    known = summary["ks_interval"] is not None
    return ["", "before", "after", *["95% interval, after"] * known], [line[: 3 + known] for line in lines]


def _mse_lines(summary: Mapping[str, Any]) -> list[list[str]]:
    """Below the error: that of the refit without fairness constraint, and that of each group."""
    lines, sizes = [], summary["group_sizes"]
    if summary.get("mse_refit"):
        refit = number(summary["mse_refit"], beside=summary["mse_before"])
        lines.append(["  refit without fairness constraint", "", refit, ""])
    olds, news = (summary.get(f"group_mse_{when}") or {} for when in ("before", "after"))
    for label, name in zip(sizes, distinct_names(list(sizes)), strict=True):
        if label in olds and label in news:
            old, new = olds[label], news[label]
            lines.append([f"  of {name} ({sizes[label]:,} rows)", number(old), number(new, beside=old), ""])
    return lines


# --- the verdict ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What a repair came to, in the words that terminal, report, record and model card share.

    Attributes
    ----------
    answer : "use", "keep" the original model, "unmet", "unknown" (too few rows to tell), or "useless"
    headline : one sentence: what to do, and the figure that decides next to the target
    measured : what was measured, and on which data
    details : what is kept of the accuracy, what is uncertain, and groups that are too small
    next_steps : what to do next
    """

    answer: str
    headline: str
    measured: str
    details: tuple[str, ...]
    next_steps: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.headline, self.measured, *self.details, "Next:", *self.next_steps))


def verdict(summary: Mapping[str, Any]) -> Verdict:
    """Judge a repair and say in words what was reached and what to do next.

    Parameters
    ----------
    summary : mapping
        ``ESVDFair.summary_``, or what :meth:`ESVDFair.assess` returns.

    Returns
    -------
    Verdict
        The answer and its sentences.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import ESVDFair
    >>> from esvdfair.report import verdict
    >>> X, sex = np.random.default_rng(0).normal(size=(400, 3)), np.arange(400) % 2
    >>> fair = ESVDFair(LinearRegression().fit(X, X[:, 0]), target_ks=0.3).fit(X, X[:, 0], sensitive_features=sex)
    >>> print(verdict(fair.summary_).answer)
    keep
    """
    unchanged = all(
        math.isclose(summary[f"{key}_before"], summary[f"{key}_after"], rel_tol=1e-12) for key in ("mse", "ks")
    )
    answer, headline = _judge(summary, unchanged)
    distance = "KS distance" + (", adjusted for the control features," if "ks_raw_before" in summary else "")
    known = f"{distance} {share(summary['ks_before'])} before, {share(summary['ks_after'])} after"
    noise = f"chance alone shows about {share(summary['ks_floor'])} at these group sizes"
    measured = f"Measured on {summary['rows']:,} {EVALUATED_ON[summary['evaluated_on']]}: {known}; {noise}."
    details = [f"Why this model: {summary['decided_by']}."] if summary["target_ks"] is not None else []
    if not summary.get("certified"):
        details.append(
            f"Its population KS is at most {share(summary['ks_upper'])} with {summary['confidence'] or 0.95:.0%} "
            "confidence."
        )
    if summary.get("outside_support"):
        details.append(f"{percent(summary['outside_support'])} of the rows are in strata that lack a group.")
    if aside := summary.get("groups_set_aside"):
        details.append(too_small(aside))
    if negative := summary.get("negative_coefficients"):
        details.append(f"The model has positive=True, but {negative} of its repaired coefficients are negative.")
    return Verdict(answer, headline, measured, tuple(details), _next_steps(answer, summary))


def _judge(summary: Mapping[str, Any], unchanged: bool) -> tuple[str, str]:
    """The answer and its sentence; ``unchanged`` says that the original model was kept."""
    estimate, price = share(summary["ks_population"]), "" if unchanged else f", and it {accuracy_words(summary)}"
    target = "" if summary["target_ks"] is None else f"the target of {summary['target_ks']:g}"
    if summary["met"] is False and summary["ks_population"] <= summary["target_ks"] < summary["ks_floor"]:
        noise = f"below what chance alone shows, {share(summary['ks_floor'])}"
        return "unknown", f"These rows cannot show whether {target} is met: it is {noise} (estimate {estimate}){price}."
    if unchanged and summary["met"] is False:
        return "unmet", f"The original model, which is returned, {_missed(summary, estimate, target)}."
    if unchanged:
        meets = f"meets {target}" if target else "was not improved, no repair was chosen"
        return "keep", f"Keep the original model: its estimated population KS of {estimate} {meets}."
    beside = f"estimated population KS {estimate}" + (target and f", against {target}")
    if useless := _useless_words(summary):
        return "useless", f"Do not use the repaired model: it {useless} ({beside})."
    if summary["ks_after"] >= summary["ks_before"]:
        return "keep", f"Keep the original model: the repair brings the groups no closer ({beside})."
    if summary["met"] is False:
        return "unmet", f"The repaired model {_missed(summary, estimate, target)}{price}."
    if summary.get("certified"):
        sure = f"certified to meet {target} with {summary['confidence']:.0%} confidence"
        return "use", f"Use the repaired model: it is {sure} (estimated population KS {estimate}){price}."
    if summary["met"]:
        return "use", f"Use the repaired model: its estimated population KS of {estimate} meets {target}{price}."
    return "use", f"The repaired model has an estimated population KS of {estimate}; no target was set{price}."


def _missed(summary: Mapping[str, Any], estimate: str, target: str) -> str:
    if summary["certified"] is False and summary["ks_population"] <= summary["target_ks"]:
        bound = f"at most {share(summary['ks_upper'])} with {summary['confidence']:.0%} confidence"
        return f"is not certified to meet {target}: estimate {estimate}, {bound}"
    return f"does not meet {target}: its estimated population KS is {estimate}"


def _useless_words(summary: Mapping[str, Any]) -> str:
    """Why nobody should use the repaired model; nothing if it still predicts."""
    if summary.get("constant"):
        return "predicts nearly the same number for everybody"
    before, after = summary["r2_before"], summary["r2_after"]
    return f"predicts no better than a constant, R² {share(before)} to {share(after)}" if after <= 0 < before else ""


def accuracy_words(summary: Mapping[str, Any]) -> str:
    """How much of what the original model explained is kept, or that more is explained."""
    before, after = summary["r2_before"], summary["r2_after"]
    if summary["error_against"] != "labels":
        return f"changes predictions by {number(math.sqrt(summary['mse_after']))} (root mean square)"
    if after > before > 0 and percent(after / before) != "100%":
        return f"explains more of the variance than before (R² {share(before)} to {share(after)})"
    if before > 0 and after > 0:
        return f"keeps {percent(after / before)} of the explained variance (R² {share(before)} to {share(after)})"
    return f"has an R² of {share(after)} ({share(before)} before)"


def _next_steps(answer: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    few = label_text(min(summary["group_sizes"], key=summary["group_sizes"].get))
    if answer == "keep":
        return ("Measure again when the people it is used on change.",)
    if answer == "useless":
        return ("Repair again with a milder target, or limit the error increase.",)
    if answer == "unmet":
        more = f"more rows, especially of {few}, or with " if summary["target_ks"] else ""  # no number resolves 0
        return (f"Repair again with {more}a milder target.",)
    if answer == "unknown":
        times = (summary["ks_floor"] / summary["target_ks"]) ** 2 if summary["target_ks"] else math.inf
        return (f"Evaluate on about {times:,.1f} times as many rows, or choose a milder target.",)
    again = "Evaluate the repaired model on test data, which was used neither to fit nor to choose it."
    reset = "Reset your cut-offs: predictions have changed, so the old cut-offs select different people."
    return (reset,) if summary["evaluated_on"] == "test" else (again, reset)


def to_json(value: Any) -> str:
    """JSON of nested plain values, such as ``summary_``; labels become text and NaN, which JSON does not know, null."""
    return json.dumps(_json_value(value), indent=2, allow_nan=False)


def _json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return dict(zip(distinct_names(list(value)), map(_json_value, value.values()), strict=True))
    if isinstance(value, np.ndarray | np.generic):
        return _json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
