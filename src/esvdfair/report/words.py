"""The sentences of the page, as plain text: whoever places them escapes them."""

import math
from typing import Any

from esvdfair.core.checks import Label
from esvdfair.explain import Directions, LayerGap
from esvdfair.report.content import UNNAMED, Content
from esvdfair.report.figures import Distributions

JUDGED_ON = {
    "validation": "rows set aside for validation",
    "heldout": "rows held out from the repair",
    "train": "the very rows that fitted it, so new people will fare worse",
}
SMALL_GROUP = 200
"""Rows below which a group's distribution is known only roughly."""


def label_text(label: Label) -> str:
    """A group as people write it; of several attributes, their values."""
    return ", ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def group_names(content: Content) -> list[str]:
    """Names for sentences and charts: a number says little without the name of its column."""
    bare = not any(isinstance(label, str | tuple) for label in content.labels) and len(content.attribute) <= 12
    return [f"{content.attribute} {label}" if bare else label_text(label) for label in content.labels]


def groups_of(content: Content) -> str:
    return "groups" if content.attribute == UNNAMED else f"groups of {content.attribute}"


def layer_name(found: LayerGap | Directions) -> str:
    """What the model calls a layer; a model that is a layer has no name for it."""
    name = found.layer if isinstance(found, Directions) else found.name
    return name or f"number {found.index}"


def number(value: float | None) -> str:
    """Four digits that count; a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%"


def points(value: float) -> str:
    """A KS distance in percentage points."""
    return f"{100 * value:.1f}"


def without_labels(summary: dict[str, Any]) -> bool:
    """Whether the errors are distances to the untouched model's own predictions."""
    return bool(summary["mse_before"] <= 1e-9 * summary["mse_after"])


def error_name(summary: dict[str, Any]) -> str:
    return "mean squared change of the predictions" if without_labels(summary) else "mean squared error"


def headline(content: Content) -> str:
    """The repair in one sentence."""
    s = content.summary
    names = group_names(content)
    whom = f"{names[0]} and {names[1]}" if len(names) == 2 else f"the {len(names)} {groups_of(content)}"
    moved = "brings" if s["ks_after"] < s["ks_before"] else "does not bring"
    sentence = (
        f"The repair {moved} the predictions for {whom} closer together: from {points(s['ks_before'])} to "
        f"{points(s['ks_after'])} percentage points apart, {_price(s)}"
    )
    if s["target_ks"] is None:
        return sentence + "."
    return sentence + f"; this {'meets' if s['met'] else 'does not meet'} the target of {points(s['target_ks'])}."


def _price(s: dict[str, Any]) -> str:
    if without_labels(s):
        return f"while a prediction moves by {number(math.sqrt(s['mse_after']))} (root mean square)"
    change = s["mse_after"] / s["mse_before"] - 1
    if abs(change) < 0.0005:
        return "at no cost in mean squared error"
    return f"with a mean squared error {abs(change):.1%} {'larger' if change > 0 else 'smaller'}".replace(
        "%", "\N{NO-BREAK SPACE}%"
    )


def what_apart_means(content: Content) -> str:
    s = content.summary
    return (
        "“Apart” is the Kolmogorov–Smirnov (KS) distance: wherever one draws a line through the predictions, the "
        "shares of two groups that fall below it differ by at most this much. These numbers come from "
        f"{s['rows']:,} {JUDGED_ON[s['evaluated_on']]}."
    )


def rows_shown(content: Content, before: Distributions, after: Distributions) -> str:
    count = f"{len(content.codes):,}"
    if len(content.codes) < content.rows_given:
        count = f"an even sample of {count} of the {content.rows_given:,}"
    return (
        f"The charts show {count} rows that this report was given, which need not be the rows behind the headline. On "
        f"them the KS distance is {share(before.farthest.distance)} before and {share(after.farthest.distance)} after."
    )


def step_words(content: Content, position: int) -> str:
    """One position of the slider."""
    s, point = content.summary, content.steps[position].point
    if point is None:
        return f"Untouched model: KS {share(s['ks_before'])}, {error_name(s)} {number(s['mse_before'])}."
    name = f"Point {position} of {len(content.steps) - 1}{' (the chosen one)' if position == content.chosen else ''}"
    interval = f"95 % interval {share(point.ks_low)} to {share(point.ks_high)}"
    return f"{name}: KS {share(point.ks)} ({interval}), {error_name(s)} {number(point.mse)}."


def density_words(content: Content, position: int) -> str:
    prediction = content.steps[position].prediction
    means = [
        f"{name} has mean {number(float(mine.mean()))} and standard deviation {number(float(mine.std()))}"
        for name, mine in ((n, prediction[content.codes == g]) for g, n in enumerate(group_names(content)))
    ]
    return f"Densities of the predictions {'before' if position == 0 else 'after'} the repair: {'; '.join(means)}."


def cdf_words(content: Content, found: Distributions, when: str) -> str:
    far, names = found.farthest, group_names(content)
    return (
        f"{when}, the distributions are farthest apart at a prediction of {number(far.at)}: {percent(far.high)} of "
        f"{names[far.high_group]} are at or below it, and {percent(far.low)} of {names[far.low_group]} "
        f"(KS {share(far.distance)})."
    )


def caveats(content: Content) -> list[str]:
    s = content.summary
    found = [
        f"Sampling floor. Even if the groups were distributed exactly alike, samples of this size would show a KS "
        f"distance of about {share(s['ks_floor'])}. A distance near it cannot be told from none.",
        "Group sizes. The judging rows hold "
        + ", ".join(f"{n:,} of {label_text(g)}" for g, n in s["group_sizes"].items())
        + "."
        + _small(s["group_sizes"]),
        "What statistical parity means: a prediction tells nothing about the group, because every group’s predictions "
        "are distributed alike. It is a statement about groups as wholes.",
        "What it does not mean: that two similar people get the same prediction, that errors are equal in every group, "
        "or that the differences in the data are just or unjust. Where groups truly differ in what is predicted, "
        "parity costs accuracy, and someone must decide whether that is right.",
        "Scope. The repaired model does not ask for the group. Parity was measured on these rows; measure again when "
        "the people it is used on change, and after any retraining.",
    ]
    if without_labels(s):
        found.append("There were no labels: errors here are distances to the untouched model’s own predictions.")
    if s["evaluated_on"] == "heldout":
        found.append(
            "The rows that judged the repair were held out from it, but the model may have been trained on them; its "
            "errors on new people are then larger than shown."
        )
    return found


def _small(sizes: dict[Label, int]) -> str:
    few = [label_text(label) for label, rows in sizes.items() if rows < SMALL_GROUP]
    return f" Few rows: what is said about {', '.join(few)} is uncertain." if few else ""
