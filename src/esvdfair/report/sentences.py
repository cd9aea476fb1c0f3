"""The sentences of the page, as plain text: whoever places them escapes them."""

import math

from esvdfair.curve import FLAT
from esvdfair.explain import Direction, Directions, LayerGap
from esvdfair.report.content import UNNAMED, Content, Step
from esvdfair.text import label_text, number, percent, share, some_names

ROWS_ARE = {
    "test": "rows that neither fitted the repair nor chose it",
    "validation": "validation rows, which chose the repair but did not fit it",
    "heldout": "rows held out from the fit, which chose the repair but did not fit it",
    "train": "the very rows that fitted the repair, so new people will fare worse",
    "given": "rows that this report was given; if some of them fitted the repair, new people will fare worse",
}
SMALL_GROUP = 200
"""Rows below which a group's distribution is known only roughly."""


def group_names(content: Content) -> list[str]:
    """Names for sentences and charts: a number says little without the name of its column."""
    labels = content.rows.labels
    bare = not any(isinstance(label, str | tuple) for label in labels) and len(content.attribute) <= 12
    return [f"{content.attribute} {label}" if bare else label_text(label) for label in labels]


def groups_of(content: Content) -> str:
    return "groups" if content.attribute == UNNAMED else f"groups of {content.attribute}"


def layer_name(found: LayerGap | Directions) -> str:
    """What the model calls a layer; a model that is a layer has no name for it."""
    name = found.layer if isinstance(found, Directions) else found.name
    return name or f"number {found.index}"


def points(value: float) -> str:
    """A KS distance in percentage points."""
    return f"{100 * value:.1f}"


def signed(correlation: float) -> str:
    """A correlation with its sign, which nothing has that rounds to zero."""
    return f"{correlation:+z.2f}".replace("+0.00", "0.00")


def error_name(content: Content) -> str:
    return "mean squared error" if content.has_labels else "mean squared change of the predictions"


def headline(content: Content) -> str:
    """What to do, and why, in one sentence. Whether the target is met is what ``summary_`` says."""
    before, after, target = content.before.peak.distance, content.after.peak.distance, content.summary["target_ks"]
    names, met = group_names(content), content.summary["met"]
    whom = f"{names[0]} and {names[1]}" if len(names) == 2 else f"the {len(names)} {groups_of(content)}"
    if content.adjusted:
        before, after = content.summary["ks_before"], content.summary["ks_after"]
        whom += ", adjusted for what they may rightly differ in,"
    apart = f"from {points(before)} to {points(after)} percentage points apart"
    asked = "" if target is None else f"the target of {points(target)}"
    if is_constant(content):
        return f"Do not use the repaired model: it predicts nearly the same value for everybody ({whom} go {apart})."
    if content.chosen == 0:
        found = f"the predictions for {whom} are {points(before)} percentage points apart"
        if target is None:
            return f"Keep the original model: {found}, and no repair was chosen."
        if met:
            return f"Keep the original model: {found}, which meets {asked}."
        return f"No repair was chosen, and the original model does not meet {asked} on these rows: {found}."
    if after >= before:
        unmet = f", and does not meet {asked}" if met is False else ""
        closer = f"bring the predictions for {whom} closer together ({apart}){unmet}"
        return f"Keep the original model: the repair does not {closer}."
    brings = f"it brings the predictions for {whom} {apart}"
    if target is None:
        return f"Use the repaired model {_condition(content)}: {brings}."
    if met:
        sure = f" ({content.summary['confidence']:.0%} confidence)" if content.summary.get("certified") else ""
        return f"Use the repaired model {_condition(content)}: {brings} and meets {asked}{sure}."
    if content.chosen_by["met"]:
        return (
            f"Use the repaired model with care: {brings}, {_price(content)}; it met {asked} on the rows that chose it, "
            "but does not on these."
        )
    few = min(content.summary["group_sizes"].items(), key=lambda item: item[1])[0]
    return (
        f"The repaired model does not meet {asked}: {brings}, {_price(content)}. Decide whether that is enough, or "
        f"repair again with more rows, above all of {label_text(few)}."
    )


def adjusted_sentence(content: Content) -> str:
    """What adjusting means, and whom it leaves out."""
    left = percent(content.summary["outside_support"])
    return (
        "The target is about groups that are compared as if each had the same mix of the controls (jobs, regions, …), "
        f"on the {content.summary['rows']:,} rows that chose the repair. {left} of these people are like nobody of "
        "some other group and are left out of that comparison. All else on this page shows people as they are."
    )


def is_constant(content: Content) -> bool:
    """Whether the repaired model has become one value for everybody."""
    return bool(content.after.prediction.std() < FLAT * content.spread)


def _condition(content: Content) -> str:
    if not content.has_labels:
        return f"if predictions may move by {number(math.sqrt(content.after.mse))} (root mean square)"
    price, costs = _price(content), content.after.mse >= 1.0005 * content.before.mse
    return f"if {price.removeprefix('with ')} is acceptable" if costs else f"({price})"


def _price(content: Content) -> str:
    if not content.has_labels:
        return f"while predictions move by {number(math.sqrt(content.after.mse))} (root mean square)"
    if not content.before.mse > 0:
        return f"with a mean squared error of {number(content.after.mse)} instead of none"
    change = content.after.mse / content.before.mse - 1
    if abs(change) < 0.0005:
        return "at no cost in mean squared error"
    return f"with a mean squared error {abs(change):.1%} {'larger' if change > 0 else 'smaller'}"


def what_apart_means(content: Content) -> str:
    count = f"{len(content.rows.codes):,} {ROWS_ARE[content.rows_are]}"
    if len(content.rows.codes) < content.rows_given:
        count += f" (an even sample of {content.rows_given:,})"
    return (
        "“Apart” is the Kolmogorov–Smirnov (KS) distance: wherever one draws a line through the predictions, the "
        "shares of two groups that fall below it differ by at most this much. Everything on this page is measured on "
        f"{count}."
    )


def how_chosen(content: Content) -> str:
    """What the repair was chosen by, where that is not what the page shows."""
    s = content.chosen_by
    if s["evaluated_on"] == "moments":
        return (
            "The repair was made from moments of all sites, without rows: group means and variances became equal over "
            f"the {s['rows']:,} rows of the moments. No rows chose it."
        )
    if content.rows_judged:
        return ""
    target = "" if s["target_ks"] is None else f", with a target of {share(s['target_ks'])}"
    return (
        f"The repair was chosen on {s['rows']:,} {ROWS_ARE[s['evaluated_on']].split(',')[0]}, where its KS distance "
        f"was {share(s['ks_after'])}{target}."
    )


def step_sentence(content: Content, position: int) -> str:
    """One position of the slider."""
    step = content.steps[position]
    reached = f"KS {share(step.peak.distance)}, {error_name(content)} {number(step.mse, beside=content.spread**2)}."
    if position == 0:
        return f"Untouched model: {reached}"
    name = f"Point {position} of {len(content.steps) - 1}{' (the chosen one)' if position == content.chosen else ''}"
    return f"{name}: {reached}"


def density_sentence(content: Content) -> str:
    means = zip(group_names(content), content.before.means, strict=True)
    said = "; ".join(f"{name} has mean {number(mean)}" for name, mean in means)
    return f"Densities of the predictions before the repair: {said}."


def peak_sentence(content: Content, step: Step, when: str) -> str:
    peak, names = step.peak, group_names(content)
    return (
        f"{when}, the distributions are farthest apart at a prediction of {number(peak.threshold)}: "
        f"{percent(peak.high_share)} of {names[peak.high_group]} are at or below it, and {percent(peak.low_share)} of "
        f"{names[peak.low_group]}."
    )


def follows(direction: Direction) -> str:
    if not direction.stable:
        known = "" if direction.stability is None else f" (|cos| {direction.stability:.2f})"
        return f"not the same in two halves of the rows{known}"
    return ", ".join(f"{name} {signed(correlation)}" for name, correlation in direction.features) or "–"


PARITY = (
    "What statistical parity means: a prediction tells nothing about the group, because every group’s predictions are "
    "distributed alike. It is a statement about groups as wholes.",
    "What it does not mean: that two similar people get the same prediction, that errors are equal in every group, or "
    "that the differences in the data are just or unjust. Where groups truly differ in what is predicted, parity costs "
    "accuracy, and someone must decide whether that is right.",
    "Scope. The repaired model does not ask for the group. Parity was measured on these rows; measure again when the "
    "people it is used on change, and after any retraining.",
)
"""What anyone who relies on a repaired model should know."""


def caveats(content: Content) -> list[str]:
    sizes = content.chosen_by["group_sizes"]
    few = [label_text(label) for label, rows in sizes.items() if rows < SMALL_GROUP]
    found = [
        "Sampling floor. Even if the groups were distributed exactly alike, samples of this size would show a KS "
        f"distance of about {share(content.ks_floor)}. A distance near it cannot be told from none.",
        *PARITY,
    ]
    if few:
        found.insert(1, f"Few rows chose the repair for {some_names(few, 5)}: what is said about them is uncertain.")
    if not content.has_labels:
        found.append("There were no labels: errors here are distances to the untouched model’s own predictions.")
    if content.rows_are == "heldout":
        found.append(
            "The rows of this page were held out from the repair, but the model may have been trained on them; its "
            "errors on new people are then larger than shown."
        )
    return found
