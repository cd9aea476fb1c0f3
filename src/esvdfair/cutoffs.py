"""Decisions at a cut-off: who is selected before and after a repair, and which cut-off selects as many people."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri

from esvdfair.core.checks import Label, check_column
from esvdfair.core.ks import Groups, live_groups
from esvdfair.exceptions import InputError
from esvdfair.text import interval, label_text, number, percent, share

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Select = Literal["above", "below"]

SCORE_LIMIT = float(ndtri(0.975)) ** 2
"""Where a score test at 5% rejects."""
FEWEST_ROWS = 30
"""A group with fewer rows is not the one that others are compared with, unless all are so small."""


@dataclass(frozen=True)
class Decisions:
    """Selections at one cut-off, before and after; figures of groups are mappings from the group's label.

    Attributes
    ----------
    cutoff_before, cutoff_after : the cut-offs; that of the repaired model selects the same share of all people
    select : "above" selects people at or above the cut-off, "below" those at or below it
    select_share : the share that was asked for, None where a cut-off was given
    share_before, share_after : share of all people selected at these cut-offs
    share_old_cutoff : share that the repaired model would select at the original model's cut-off
    tied_before, tied_after : share of all people that score exactly the same as the last one selected, if several do
    reference_before, reference_after : the most selected group
    rows : rows of the group
    selected_before, selected_after : share of the group that is selected
    ratio_before, ratio_after : adverse-impact ratio, that share over that of the most selected group
    ratio_low, ratio_high : 95% interval of ``ratio_after``
    gained, lost : people of the group whom only the repaired, or only the original model selects (sums of weights)
    difference_before, difference_after : mean prediction minus that of the most selected group, in standard deviations
        of all predictions
    """

    cutoff_before: float
    cutoff_after: float
    select: Select
    select_share: float | None
    share_before: float
    share_after: float
    share_old_cutoff: float
    tied_before: float
    tied_after: float
    reference_before: Label
    reference_after: Label
    rows: dict[Label, int]
    selected_before: dict[Label, float]
    selected_after: dict[Label, float]
    ratio_before: dict[Label, float]
    ratio_after: dict[Label, float]
    ratio_low: dict[Label, float]
    ratio_high: dict[Label, float]
    gained: dict[Label, float]
    lost: dict[Label, float]
    difference_before: dict[Label, float]
    difference_after: dict[Label, float]

    def to_frame(self) -> "pd.DataFrame":
        """Return a table with one row for each group.

        Returns
        -------
        DataFrame
            Shares, ratios and cut-offs.
        """
        import pandas as pd

        columns = {name: list(of.values()) for name, of in vars(self).items() if isinstance(of, dict)}
        index = pd.Index([label_text(label) if isinstance(label, tuple) else label for label in self.rows])
        cutoffs = {"cutoff_before": self.cutoff_before, "cutoff_after": self.cutoff_after}
        return pd.DataFrame(columns, index=index.rename("group")).assign(**cutoffs)

    @property
    def one_model(self) -> bool:
        """Whether both models decide alike, as where one model is compared with itself."""
        return self.cutoff_before == self.cutoff_after and not any(self.gained.values())

    @property
    def lowest_after(self) -> Label:
        """The group with the lowest ratio after the repair, among those that are not too small; where there are any."""
        large = [label for label, rows in self.rows.items() if rows >= FEWEST_ROWS] or list(self.rows)
        return min(large, key=lambda label: self.ratio_after[label])

    def cutoff_words(self) -> str:
        """Say which cut-off to use after the repair, and what ties do to it.

        Returns
        -------
        str
            One or two sentences.
        """
        if self.one_model:
            return f"A cut-off of {self.cutoff_before:,.10g} selects {percent(self.share_before, 1)}."
        old, new = f"{self.cutoff_before:,.10g}", f"{self.cutoff_after:,.10g}"
        was, kept = percent(self.share_before, 1), percent(self.share_old_cutoff, 1)
        parts = [f"The old cut-off of {old} would now select {kept} instead of {was}: use {new}."]
        if self.share_old_cutoff == self.share_before:
            parts = [f"The cut-off of {old} still selects {was}."]
        if self.tied_after and percent(self.share_after, 1) != was:
            parts.append(
                f"{percent(self.tied_after, 1)} of all people score exactly the same there, so no cut-off selects "
                f"exactly {was}: this one selects {percent(self.share_after, 1)}."
            )
        if self.select_share is not None and self.tied_before and percent(self.select_share, 1) != was:
            parts.append(
                f"{percent(self.tied_before, 1)} of all people tie at the old cut-off, so it selects {was} and not "
                f"{percent(self.select_share, 1)}."
            )
        return " ".join(parts)

    def ratio_words(self) -> str:
        """Say what the lowest adverse-impact ratio is before and after.

        Returns
        -------
        str
            One sentence.
        """
        low = self.lowest_after
        if low == self.reference_after:
            return "All groups are selected alike."
        old, new, *ends = (
            share(of[low]) for of in (self.ratio_before, self.ratio_after, self.ratio_low, self.ratio_high)
        )
        known, within = f"Adverse-impact ratio of {label_text(low)}", f"(95% interval {ends[0]} to {ends[1]})."
        was, top = label_text(self.reference_before), label_text(self.reference_after)
        if was != top:
            return f"{known}: {old} before, against {was}; {new} after, against {top} {within}"
        return f"{known} against {top}: {new if self.one_model else f'{old} before, {new} after'} {within}"


def decisions(
    before: Any,
    after: Any,
    *,
    sensitive_features: Any,
    cutoff: float | None = None,
    select_share: float | None = None,
    select: Select = "above",
    sample_weight: Any = None,
) -> Decisions:
    """Compare who is selected at a cut-off before and after a repair.

    Repaired predictions vary less, so the repaired model gets the cut-off that selects the same share of all people.
    Cut-offs are rounded to the fewest digits that select the same people. Where people tie, the cut-off whose share is
    nearest is taken; ``tied_before`` and ``tied_after`` report the shares of people who tie.

    Parameters
    ----------
    before, after : array-like of shape (rows,)
        Predictions of the original and of the repaired model for the same rows.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    cutoff : float, default=None
        Cut-off of the original model.
    select_share : float, default=None
        Share of all people to select, between 0 and 1, instead of a cut-off.
    select : {"above", "below"}, default="above"
        Whether people at or above the cut-off are selected, or people at or below it.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row. Rows of weight 0 are left out.

    Returns
    -------
    Decisions
        ``to_frame()`` has one row for each group. The 95% interval of a ratio is Koopman's score interval, with
        effective sizes where there are weights; it is about the share that would be selected in a large population at
        this cut-off.

    Raises
    ------
    ValueError
        If neither or both of ``cutoff`` and ``select_share`` are given, nobody is selected, lengths differ, or values
        are missing.

    Examples
    --------
    >>> from esvdfair import decisions
    >>> sex = ["f", "f", "f", "f", "m", "m", "m", "m"]
    >>> found = decisions([1, 2, 3, 6, 3, 5, 7, 8], [3, 4, 5, 7, 2, 4, 5, 6], sensitive_features=sex, cutoff=5)
    >>> round(found.ratio_before["f"], 3), found.ratio_after["f"], found.gained, found.lost
    (0.333, 1.0, {'f': 1.0, 'm': 0.0}, {'f': 0.0, 'm': 1.0})
    >>> found.cutoff_words()
    'The cut-off of 5 still selects 50%.'
    """
    old = check_column(before, len(before), "before")
    new = check_column(after, len(old), "after", of="before")
    live, labels, groups = live_groups(sensitive_features, sample_weight, len(old), of="before")
    old, new = old[live], new[live]
    if select not in ("above", "below"):
        raise InputError(f"`select={select!r}` is unknown; pass 'above' or 'below'.")
    if (cutoff is None) == (select_share is None):
        raise InputError("Pass either `cutoff` or `select_share`.")
    if select_share is not None and not 0 < select_share < 1:
        raise InputError(f"`select_share={select_share}` must lie between 0 and 1.")
    if cutoff is not None and not np.isfinite(cutoff):
        raise InputError(f"`cutoff={cutoff}` must be a finite number.")
    sign = 1.0 if select == "above" else -1.0
    own, now = Scores(sign * old, groups.weight), Scores(sign * new, groups.weight)
    at_before = own.cutoff(select_share) if cutoff is None else sign * cutoff  # type: ignore[arg-type]
    wanted = own.share(at_before)
    if not wanted:
        raise InputError(
            f"`cutoff={sign * at_before:.10g}` selects nobody: the predictions range from {number(old.min())} to "
            f"{number(old.max())}. Pass a cut-off between them."
        )
    at_after = at_before if now.share(at_before) == wanted else now.cutoff(wanted)
    yes = own.values >= at_before, now.values >= at_after
    return Decisions(
        cutoff_before=sign * at_before + 0.0, cutoff_after=sign * at_after + 0.0, select=select,
        select_share=select_share, share_before=wanted, share_after=now.share(at_after),
        share_old_cutoff=now.share(at_before), tied_before=own.tied(at_before), tied_after=now.tied(at_after),
        **_group_figures(labels, groups, (old, new), yes),
    )  # fmt: skip


def _group_figures(
    labels: Sequence[Label], groups: Groups, predictions: Sequence[Array], yes: Sequence[NDArray[np.bool_]]
) -> dict[str, Any]:
    """The most selected group before and after, and every figure of `Decisions` that each group has."""
    rows = np.bincount(groups.codes, minlength=groups.count)
    large, sizes, references = rows >= FEWEST_ROWS, groups.sizes, {}
    found: dict[str, NDArray[Any]] = {"rows": rows}
    for when, scores, selected in zip(("before", "after"), predictions, yes, strict=True):
        rates, means = groups.means(selected.astype(np.float64)), groups.means(scores)
        top = int(np.where(large | (not large.any() or not rates[large].any()), rates, -1.0).argmax())
        mean = np.average(scores, weights=groups.weight)
        spread = float(np.sqrt(np.average((scores - mean) ** 2, weights=groups.weight)))
        found |= {f"selected_{when}": rates, f"ratio_{when}": rates / rates[top]}
        found[f"difference_{when}"] = (means - means[top]) / (spread or 1.0)
        references[f"reference_{when}"] = labels[top]
    intervals = [ratio_interval(*own, rates[top], sizes[top]) for own in zip(rates, sizes, strict=True)]
    intervals[top] = 1.0, 1.0
    found["ratio_low"], found["ratio_high"] = np.transpose(intervals)
    for name, moved in (("gained", yes[1] & ~yes[0]), ("lost", yes[0] & ~yes[1])):
        weight = 1.0 if groups.weight is None else groups.weight
        found[name] = np.bincount(groups.codes, moved * weight, groups.count)
    return references | {name: dict(zip(labels, of.tolist(), strict=True)) for name, of in found.items()}


def ratios_by_share(
    predictions: Any, *, sensitive_features: Any, sample_weight: Any = None, select: Select = "above"
) -> list[list[float]]:
    """[share of all people selected, lowest adverse-impact ratio of any group] at up to 99 cut-offs.

    Of tied people all or none are selected. Groups of fewer than 30 rows are left out, unless all are so small.
    """
    values = check_column(predictions, len(predictions), "predictions")
    live, _, groups = live_groups(sensitive_features, sample_weight, len(values), of="predictions")
    scores, rows = Scores((values if select == "above" else -values)[live], groups.weight), np.bincount(groups.codes)
    kept = rows >= (FEWEST_ROWS if rows.max() >= FEWEST_ROWS else 1)
    found: dict[float, float] = {}
    for percentile in range(1, 100):
        at = scores.cutoff(percentile / 100)
        rates = groups.means((scores.values >= at).astype(np.float64))[kept]
        if rates.any():
            found[scores.share(at)] = float(rates.min() / rates.max())
    return [[share, ratio] for share, ratio in sorted(found.items())]


class Scores:
    """Predictions sorted from the first selected to the last, and the share of people at or above each."""

    def __init__(self, values: Array, weight: Array | None) -> None:
        self.values = values
        self._levels, place, self._people = np.unique(-values, return_inverse=True, return_counts=True)  # falling
        mass = np.bincount(place, weight)
        self._mass, self._shares = mass / mass.sum(), np.cumsum(mass) / mass.sum()

    def share(self, cutoff: float) -> float:
        """Share of all people at or above a cut-off."""
        count = int(np.searchsorted(self._levels, -cutoff, side="right"))
        return float(self._shares[count - 1]) if count else 0.0

    def cutoff(self, share: float) -> float:
        """The cut-off whose share is nearest, as the shortest number between the last selected and the next."""
        place = int(np.abs(self._shares - share).argmin())
        last, after = -float(self._levels[place]), -float(self._levels[min(place + 1, len(self._levels) - 1)])
        shortened = (float(f"{after + (last - after) / 2:.{digits}g}") for digits in range(1, 17))
        return next((number for number in shortened if after < number <= last), last)

    def tied(self, cutoff: float) -> float:
        """Share of all people that score as the last one selected does, if several do."""
        place = int(np.searchsorted(self._levels, -cutoff, side="right")) - 1
        return float(self._mass[place]) if place >= 0 and self._people[place] > 1 else 0.0


def ratio_interval(share: float, size: float, reference: float, reference_size: float) -> tuple[float, float]:
    """Koopman's 95% score interval of share / reference, two proportions of so many (effective) rows.

    It holds every ratio r that a score test does not reject. Under p = r q the likelihood of x of n and y of m people
    is largest at the smaller root q of ``(n+m) r q² − (r n + x + m + r y) q + x + y = 0``, and the test compares

        (x/n − r y/m)² / (p(1−p)/n + r² q(1−q)/m)

    with the square of the normal quantile. It is defined at shares of 0 and 1, where intervals of the logarithm are
    not. ``reference`` must be more than 0.
    """
    n, m, yes = size, reference_size, share * size + reference * reference_size

    def excess(log_ratio: float) -> float:
        r = math.exp(log_ratio)
        middle = r * n + share * n + m + r * reference * m
        root = math.sqrt(max(middle**2 - 4 * (n + m) * r * yes, 0.0))
        q = min(2 * yes / (middle + root), 1.0)  # the smaller root, without cancellation
        p = min(r * q, 1.0)
        noise = p * (1 - p) / n + r**2 * q * (1 - q) / m
        return (share - r * reference) ** 2 - SCORE_LIMIT * (noise + 1e-30)  # less than nothing where r is the ratio

    centre = math.log(max(share / reference, 1e-9))
    low = math.exp(brentq(excess, centre - 30, centre)) if share > 0 else 0.0
    return low, math.exp(brentq(excess, centre, centre + 30))


def decision_table(found: Decisions, attribute: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines; of one model without what a repair changes."""
    one, lines = found.one_model, []
    moves = [] if one else ["newly selected", "no longer selected"]

    def figures(group: Label, name: str, form: Callable[[float], str]) -> str:
        old, new = (form(getattr(found, f"{name}_{when}")[group]) for when in ("before", "after"))
        return new if one else f"{old} → {new}"

    for g in found.rows:
        rates, ratios = figures(g, "selected", lambda x: percent(x, 1)), figures(g, "ratio", share)
        own = g == found.reference_after
        within = "reference" if own else interval((found.ratio_low[g], found.ratio_high[g]), share)
        moved = [] if one else [number(found.gained[g]), number(found.lost[g])]
        difference = figures(g, "difference", "{:+z.2f}".format)
        lines.append([label_text(g), f"{found.rows[g]:,}", rates, ratios, within, *moved, difference])
    return [attribute, "rows", "selected", "impact ratio", "95% interval", *moves, "difference in means (sd)"], lines
