"""The page, part by part, and the numbers that its script draws.

Whatever is text goes through `escape`: names come from the user's file.
"""

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import numpy as np

from esvdfair.explain import explain_people
from esvdfair.explain.directions import correlate
from esvdfair.files import version_of
from esvdfair.plots import Array, density, make_grid
from esvdfair.report.content import Content, Step, follows, layer_name, named_groups
from esvdfair.text import interval, label_text, number, per_cent, percent, share, signed, some_names, too_small, verdict

ROWS_ARE = {
    "test": "rows that neither fitted the repair nor chose it",
    "validation": "validation rows, which chose the repair but did not fit it",
    "heldout": "rows held out from the fit, which chose the repair but did not fit it",
    "train": "the very rows that fitted the repair, so new people will fare worse",
    "given": "rows that this report was given; if some of them fitted the repair, new people will fare worse",
}
ABOUT_PARITY = (
    "What statistical parity means: a prediction tells nothing about the group, because every group’s predictions are "
    "distributed alike. It is a statement about groups as wholes.",
    "What it does not mean: that two similar people get the same prediction, that errors are equal in every group, or "
    "that the differences in the data are just or unjust. Where groups truly differ in what is predicted, parity costs "
    "accuracy, and someone must decide whether that is right.",
    "Scope. The repaired model does not ask for the group. Parity was measured on these rows; measure again when the "
    "people it is used on change, and after any retraining.",
)
"""What anyone who relies on a repaired model should know."""
PAIRS_SHOWN = 10
GROUPS_DRAWN = 8
"""As many as there are colours; the tables list all groups."""


def render(
    content: Content, *, about: Mapping[str, str], command: Sequence[str] | str | None, title: str | None
) -> str:
    """The whole page; ``about`` says which model and data it is about, and what is predicted."""
    script, style = (files("esvdfair.report").joinpath(name).read_text("utf-8") for name in ("charts.js", "page.css"))
    name = title or f"Repair report: parity between {content.all_groups}"
    inner = (_adjusted, _pairs, _compared, _decisions, _distributions, _people, _features, _caveats, _engineers)
    parts = [_opening(content, name, about), *(part(content) for part in inner), _origin(command)]
    # Nothing is loaded, and no script but ours runs, even if something were left unescaped.
    policy = f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + '\n</main>\n<script type="application/json" id="data">'
        + script_json(chart_data(content))
        + f"</script>\n<script>{script}</script>\n</body>\n</html>\n"
    )


# --- pieces of HTML ------------------------------------------------------------------------------------------------


def escape(value: object) -> str:
    """Escaped for HTML, quotes included."""
    return html.escape(str(value))


def script_json(value: Any) -> str:
    """JSON that cannot end or comment out the script element that holds it; everything beyond ASCII is escaped."""
    plain = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str,
    texts: Sequence[int] = (),
    moving: Sequence[int] = (),
) -> str:
    """A table, on a narrow screen a block for each row; ``texts`` stand left, ``moving`` columns follow the slider."""
    kinds = [' class="text"' if i in texts else ' class="now"' if i in moving else "" for i in range(len(header))]
    head = "".join(f'<th scope="col"{k}>{escape(cell)}</th>' for cell, k in zip(header, kinds, strict=True))
    body = []
    for first, *rest in rows:
        cells = zip(rest, header[1:], kinds[1:], strict=True)
        body.append(
            f'<tr><th scope="row">{escape(first)}</th>'
            + "".join(f'<td{k} data-name="{escape(name)}">{escape(cell)}</td>' for cell, name, k in cells)
            + "</tr>"
        )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def chart(name: str, label: str, *, heading: str = "", caption: str = "", numbers: str = "") -> str:
    """A place for a chart, what it shows in words, and its numbers behind a fold."""
    return (
        f"<figure>{f'<h3>{escape(heading)}</h3>' if heading else ''}"
        f'<div class="chart" id="{name}" role="img" aria-label="{escape(label)}"></div>'
        f"{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}{fold('Numbers', numbers)}</figure>"
    )


def fold(summary: str, content: str) -> str:
    """HTML behind a line that opens it; nothing for nothing."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""


def section(name: str, heading: str, *parts: str) -> str:
    """A part of the page; ``parts`` are HTML already."""
    return f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n' + "\n".join(parts) + "\n</section>"


def paragraph(sentences: str, kind: str = "") -> str:
    """Escaped sentences; ``kind`` is a class of the style sheet."""
    kind = f' class="{kind}"' if kind else ""
    return f"<p{kind}>{escape(sentences)}</p>" if sentences else ""


def _hash_of(source: str) -> str:
    """How a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")


# --- the parts -----------------------------------------------------------------------------------------------------


def _opening(content: Content, title: str, about: Mapping[str, str]) -> str:
    before, after, found = content.before, content.after, content.distances
    low, high = map(share, found.interval)
    gaps = (number(float(np.ptp(step.means)), beside=content.spread) for step in (before, after))
    errors = (number(step.mse, beside=content.spread**2) for step in (before, after))
    distances = (share(step.peak.distance) for step in (before, after))
    refit = "" if content.mse_refit is None else f"; refit without fairness constraint {number(content.mse_refit)}"
    explained = [share(content.r2(step)) for step in (before, after)] if content.has_labels else []
    r2 = f"R² {' → '.join(explained)}; " if explained else ""
    said = f"95% interval {low} to {high}; estimated population KS {share(found.population)}"
    tiles = [
        ("KS distance", " → ".join(distances), f"{said}; noise level {share(found.floor)}"),
        (content.error_name, " → ".join(errors), f"{r2}method: {content.summary['method']}{refit}"),
        ("difference in group means", " → ".join(gaps), "between the two most different groups"),
    ]
    shown = "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in tiles
    )
    subject = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in about.items())
    rows, which = len(content.rows.codes) + len(content.aside.codes), ROWS_ARE[content.rows_are]
    sampled = f" (an even sample of {content.rows_given:,})" if rows < content.rows_given else ""
    apart = (
        "“Apart” is the Kolmogorov–Smirnov (KS) distance: wherever one draws a line through the predictions, the "
        "shares of two groups that fall below it differ by at most this much. Everything on this page is measured on "
        f"{rows:,} {which}{sampled}."
    )
    return (
        f"<header><h1>{escape(title)}</h1>"
        f'<dl class="about">{subject}</dl>{paragraph(verdict(content.summary).headline, "lead")}</header>\n'
        f'<dl class="tiles">{shown}</dl>\n{paragraph(apart, "soft")}{paragraph(_how_chosen(content), "soft")}'
    )


def _how_chosen(content: Content) -> str:
    """What the repair was chosen by, where that is not what the page shows."""
    s = content.fair.summary_
    if content.rows_judged:
        return ""
    which = ROWS_ARE[s["evaluated_on"]].split(",")[0]
    target = "" if s["target_ks"] is None else f", with a target of {share(s['target_ks'])}"
    reached = f"where its KS distance was {share(s['ks_after'])}{target}"
    return f"The repair was chosen on {s['rows']:,} {which}, {reached}."


def _adjusted(content: Content) -> str:
    """Raw and adjusted gaps side by side, before and after."""
    if not content.adjusted:
        return ""
    s, lines = content.summary, []
    for name, key, form in (("KS distance", "ks", share), ("difference of group means", "mean_gap", number)):
        keys = (f"{key}_raw_before", f"{key}_raw_after", f"{key}_before", f"{key}_after")
        lines.append([name, *(form(s[each]) for each in keys)])
    header = ["", "as it is, before", "as it is, after", "adjusted, before", "adjusted, after"]
    which = ROWS_ARE["test"] if s["evaluated_on"] == "test" else "rows that chose the repair"
    intro = (
        "The target is about groups that are compared as if each had the same mix of the controls (jobs, regions, …), "
        f"on the {s['rows']:,} {which}. {percent(s['outside_support'])} of these people are like nobody of some other "
        "group and are left out of that comparison. All else on this page shows people as they are."
    )
    shown = table(header, lines, caption="Gaps as they are and adjusted")
    return section("adjusted", "Among people who are alike", paragraph(intro), shown)


def _compared(content: Content) -> str:
    """Before, and wherever the slider stands: densities, the trade-off, and who pays."""
    last, here, groups = len(content.steps) - 1, content.step_sentence(content.chosen), len(content.rows.labels)
    control = (
        '<div class="control"><p>Move the slider, use the arrow keys, or choose a dot.</p>'
        f'<label for="slider">Fairness</label><input id="slider" type="range" min="0" '
        f'max="{last}" step="1" value="{content.chosen}" aria-valuetext="{escape(here)}">'
        f'<output id="readout" for="slider">{escape(here)}</output></div>'
    )
    old = zip(content.names, content.before.means, strict=True)
    means = "; ".join(f"{name} has mean {number(mean)}" for name, mean in old)
    densities = [
        chart(name, f"Densities of the predictions{said}", heading=heading, numbers=_quantiles(content, step, heading))
        for name, heading, step, said in (
            ("density-before", "Before", content.before, f" before the repair: {means}."),
            ("density-step", "After", content.after, f". {here}"),
        )
    ]
    note = "The higher a line, the more people of the group have such a prediction; ticks mark the means."
    if groups > GROUPS_DRAWN:
        note += f" Drawn are the {GROUPS_DRAWN} largest groups; the tables hold all {groups}."
    label = f"{content.error_name} over KS distance of {last} repaired models; the numbers are for engineers below."
    intro = (
        "Every dot is the same network with other weights, from the untouched model to the fairest one. Dots in the "
        "grey zone cannot be told from perfect parity on these rows."
        if last > 1
        else "The untouched model and the repaired one; no rows chose among several."
    )
    return section(
        "compared",
        "How predictions are distributed, and what parity costs in each group",
        control,
        f'<div class="pair">{"".join(densities)}</div>',
        paragraph(note, "soft"),
        f'<div class="beside">{chart("tradeoff", label, caption=intro)}{_who_pays(content)}</div>',
    )


def _quantiles(content: Content, step: Step, when: str) -> str:
    levels, lines = (0.1, 0.5, 0.9), []
    for g, name in enumerate(content.names):
        values, weight = _of_group(content, step.prediction, g)
        weight = np.ones(len(values)) if weight is None else weight
        found = np.quantile(values, levels, weights=weight, method="inverted_cdf")
        lines.append([name, f"{len(values):,}", number(float(step.means[g])), *map(number, found)])
    return table([content.attribute, "rows", "mean", *map(percent, levels)], lines, caption=f"Quantiles {when.lower()}")


def _distributions(content: Content) -> str:
    grid = make_grid([content.before.prediction, content.after.prediction], 11)
    charts = []
    for when, step in (("Before", content.before), ("After", content.after)):
        below = zip(grid, _distribution(content, step, grid).T, strict=True)
        rows = [[number(threshold), *map(percent, parts)] for threshold, parts in below]
        numbers = table(["prediction", *content.names], rows, caption="Share of each group at or below a prediction")
        peak, at = step.peak, number(step.peak.threshold)
        more, fewer = content.names[peak.high_group], content.names[peak.low_group]
        shares = f"{percent(peak.high_share)} of {more} are at or below it, and {percent(peak.low_share)} of {fewer}"
        said = f"{when}, the distributions are farthest apart at a prediction of {at}: {shares}."
        charts.append(chart(f"cdf-{when.lower()}", said, heading=when, caption=said, numbers=numbers))
    intro = "Each line climbs from 0 to 1; where two lines are farthest apart vertically, that distance is KS."
    pair = f'<div class="pair">{"".join(charts)}</div>'
    return section("distributions", "Where the groups differ most", paragraph(intro), pair)


def _who_pays(content: Content) -> str:
    """Mean prediction and error of every group, before and at the slider's position."""
    error = "error" if content.has_labels else "change"
    pairs = zip(_group_cells(content, content.before), _group_cells(content, content.after), strict=True)
    rows = [
        [label_text(label), f"{size:,}", old[0], new[0], old[1], new[1]]
        for label, size, (old, new) in zip(content.rows.labels, content.sizes, pairs, strict=True)
    ]
    header = [content.attribute, "rows", "mean before", "mean after", f"{error} before", f"{error} after"]
    caption = f"Mean prediction and {content.error_name} in every group; “after” follows the slider"
    aside = paragraph(too_small(content.set_aside, 10)) if content.set_aside else ""
    return f'<div id="who-pays">{table(header, rows, caption=caption, moving=(3, 5))}{aside}</div>'


def _pairs(content: Content) -> str:
    """Every pair of groups by itself, where there are several."""
    s = content.summary
    if len(s["pairs"]) < 2:
        return ""
    shown = sorted(s["pairs"], key=lambda pair: -pair["ks_population"])[:PAIRS_SHOWN]
    lines = [
        [" and ".join(map(label_text, p["groups"])), *map(share, (p["ks_before"], p["ks_after"], p["ks_population"],
         p["ks_floor"])), "yes" if p["established"] else "no"]
        for p in shown
    ]  # fmt: skip
    header = ["pair", "KS before", "KS after", "estimated population KS", "noise level", "beyond chance"]
    which = ROWS_ARE[s["evaluated_on"]].split(",")[0]
    caption = f"Pairs of groups, the largest first, on {s['rows']:,} {which}"
    intro = (
        "Each pair has its own noise level: the KS that chance alone shows between groups of their size. A difference "
        "beyond chance is one that the repaired model still has, by Holm’s procedure at 5% over all pairs."
    )
    return section("pairs", "Pairs of groups", paragraph(intro), table(header, lines, caption=caption, texts=(5,)))


def _decisions(content: Content) -> str:
    """Who is selected at each cut-off, before and after."""
    header = [content.attribute, "selected before", "selected after", "ratio before", "ratio after", "95% interval",
              "gain", "lose"]  # fmt: skip
    parts = [
        paragraph(
            "Share of each group that is selected, its ratio to the share of the most selected group (adverse-impact "
            "ratio), and people whose decision changes. Each cut-off after the repair selects as many people as before."
        )
    ]
    shown = []
    for found in content.decided:
        lines = [
            [label_text(g), *(per_cent(of[g]) for of in (found.selected_before, found.selected_after)),
             *(share(of[g]) for of in (found.ratio_before, found.ratio_after)),
             "reference" if g == found.reference_after else interval((found.ratio_low[g], found.ratio_high[g]), share),
             number(found.gained[g]), number(found.lost[g])]
            for g in found.rows
        ]  # fmt: skip
        caption = f"{per_cent(found.share_before)} of all people selected: {found.cutoff_words()}"
        shown.append(table(header, lines, caption=caption))
    middle = len(shown) // 2
    rest = "".join(shown[:middle] + shown[middle + 1 :])
    return section(
        "decisions", "Decisions at a cut-off (chosen model)", *parts, shown[middle], fold("Other cut-offs", rest)
    )


def _people(content: Content) -> str:
    predictions = content.before.prediction, content.after.prediction
    people = explain_people(*predictions, **named_groups(content.rows), top=10)
    threshold = number(people.threshold)
    moved = "; ".join(f"{label_text(g.group)} {g.mean_change:+.3g} on average" for g in people.groups)
    intro = (
        f"{percent(people.share_moved)} of all people are moved by more than {threshold}, a quarter of the standard "
        f"deviation of the predictions before. On average a person moves by "
        f"{100 * people.mean_absolute_rank_change:.1f} percentile ranks."
    )
    changes = chart("changes", f"Densities of the change of a prediction by group: {moved}.")
    rows = []
    for g in people.groups:
        shares = map(percent, (g.share_up, g.share_down, g.share_moved))
        rows.append([label_text(g.group), *shares, share(g.rank_correlation)])
    header = [content.attribute, "up", "down", f"moved > {threshold}", "rank kept"]
    kept = "By group. Rank kept: rank correlation within the group, 1 if nobody overtakes anybody"
    by_group = table(header, rows, caption=kept)
    x = content.rows.x
    places = x.index if hasattr(x, "iloc") else content.rows.row_id  # what the user calls a row
    rows = []
    for m in people.movers:
        ranks = (f"{100 * rank:.0f}" for rank in (m.rank_before, m.rank_after))
        rows.append([str(places[m.row]), label_text(m.group), number(m.before), number(m.after), *ranks])
    header = ["row", content.attribute, "before", "after", "percentile before", "percentile after"]
    most = table(header, rows, caption="Rows are numbered as in their file; percentiles among all people", texts=(1,))
    folded = fold("The people who move most", most)
    return section("people", "Who is affected", paragraph(intro), changes, by_group, folded)


def _features(content: Content) -> str:
    """The input columns that tell most of both group and prediction."""
    rows, groups = content.rows, len(content.names)
    members = (rows.codes[:, None] == np.arange(groups)).astype(np.float64)
    values = np.column_stack([content.before.prediction, content.after.prediction, members])
    weight = np.ones(len(values)) if rows.weight is None else rows.weight
    found = []
    names, correlations = correlate(values, weight, rows.x)
    for name, (old, new, *of_groups) in zip(names, correlations.T, strict=True):
        found.append((name, max(of_groups, key=abs) if groups > 2 else of_groups[1], old, new))
    found.sort(key=lambda feature: -abs(feature[1] * feature[2]))
    intro = (
        "Inputs that go with the group as well as with the prediction are how a model that is never told the group "
        "comes to differ between groups. Correlations, the strongest link first."
    )
    header = ["input", f"with {content.attribute}", "with prediction, before", "with prediction, after"]
    lines = [[name, *map(signed, correlations)] for name, *correlations in found[:10]]
    whom = f"being {content.names[1]}" if groups == 2 else "being in the group it follows most"
    shown = table(header, lines, caption=f"Correlation of each input with {whom} and with the prediction")
    return section("features", "Inputs that carry the gap", paragraph(intro), shown)


def _caveats(content: Content) -> str:
    sizes = content.fair.summary_["group_sizes"]
    few = some_names([label_text(label) for label, rows in sizes.items() if rows < 200], 5)
    found = [
        "Noise level. Even if the groups were distributed exactly alike, samples of this size would show a KS "
        f"distance of about {share(content.distances.floor)}. A distance near it cannot be told from none."
    ]
    if aside := content.set_aside:
        found.insert(0, f"{too_small(aside, 10)} They are not compared, but their rows count in the error.")
    if few:
        found.append(f"Few rows chose the repair for {few}: what is said about them is uncertain.")
    found += ABOUT_PARITY
    if not content.has_labels:
        found.append("There were no labels: errors here are distances to the untouched model’s own predictions.")
    if content.rows_are == "heldout":
        found.append(
            "The rows of this page were held out from the repair, but the model may have been trained on them; its "
            "errors on new people are then larger than shown."
        )
    items = "".join(f"<li>{escape(item)}</li>" for item in found)
    return section("caveats", "Before you rely on this", f"<ul>{items}</ul>")


def _engineers(content: Content) -> str:
    """Inner parts, which say little to anyone who does not build networks."""
    parts = [_points(content), _layers(content), _spectrum(content)]
    return section("engineers", "For engineers", fold("Points of the curve, layers and directions", "\n".join(parts)))


def _points(content: Content) -> str:
    rows = []
    for i, step in enumerate(content.steps):
        aim = "" if step.point is None else step.point.target
        error = number(step.mse, beside=content.spread**2)
        rows.append([str(i) if i else "original", share(step.peak.distance), error, share(content.r2(step)), aim])
    header = ["point", "KS", content.error_name, "R²", "refitted towards"]
    return table(header, rows, caption="Points of the curve", texts=(4,))


def _layers(content: Content) -> str:
    heading, scan = "<h3>Layer by layer</h3>", content.scan
    if isinstance(scan, str):
        return heading + paragraph(f"Not available: {scan}")
    intro = (
        "How far the groups are apart after every linear layer, and what the closed-form edit of that layer, followed "
        f"by a refit of the last one, would reach. → marks {layer_name(scan.best)}: of the edits that reach the lowest "
        "KS distance, within the noise level, it is the most accurate."
    )
    if not content.hidden_edits:
        intro += f" The repair itself, a {content.summary['method']} refit of the last layer, is none of these edits."
    rows = []
    for f in scan.layers:
        name = ("→ " if f.index == scan.best.index else "") + layer_name(f)
        gaps = map(number, (f.relative_mean_gap, f.relative_covariance_gap))
        rows.append([name, f"{f.inputs} → {f.outputs}", *gaps, share(f.ks), number(f.mse)])
    header = ["layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    said = f"KS distance if a layer is edited: {'; '.join(f'{row[0]} {row[4]}' for row in rows)}."
    shown = table(header, rows, caption="Gaps are relative to the spread of the layer’s output")
    return heading + paragraph(intro) + chart("layers", said) + shown


def _spectrum(content: Content) -> str:
    heading, found = "<h3>Directions in the network that carry the gap</h3>", content.directions
    if isinstance(found, str):
        return heading + paragraph(f"Not available: {found}")
    after = "after" if content.hidden_edits else "if edited"
    edited = (
        "The repair edited this layer: “after” is the repaired model."
        if content.hidden_edits
        else "The repair refitted the last layer only and left this one as it was; the second line shows what the "
        "closed-form edit of this layer itself would leave."
    )
    seen = "singular values of its weight seen through the groups’ difference in covariance"
    largest = [number(values[0]) for values in (found.spectrum_before, found.spectrum_after)]
    said = f"Singular values before and {after}; the largest is {largest[0]} before and {largest[1]} {after}."
    whole = "part of the bound" if any(d.share_of == "bound" for d in found.covariance) else "part of the gap"
    rows = []
    for d in (*found.mean, *found.covariance):
        name = f"{'means' if d.kind == 'mean' else 'spreads'} {d.rank}"
        sigmas = number(d.sigma_before), number(d.sigma_after, beside=d.sigma_before)
        rows.append([name, percent(d.share), number(d.difference), *sigmas, follows(d)])
    of_two = " minus ".join(content.names) if len(found.groups) == 2 else "of two groups"
    header = ["direction", whole, "difference", "σ before", f"σ {after}", "follows (correlation)"]
    caption = f"The main directions, the difference of mean or variance ({of_two}), and the inputs they go with"
    shown = table(header, rows, caption=caption, texts=(5,))
    intro = f"Layer {layer_name(found)}: {seen}. {edited}"
    return heading + paragraph(intro) + chart("spectrum", said) + shown


def _origin(command: Sequence[str] | str | None) -> str:
    if command is None:
        line = "esvdfair.report.write_report(path, fair, X, y, sensitive_features=…)"
    else:
        line = command if isinstance(command, str) else shlex.join(["esvdfair", *command])
    made_by = f"esvdfair {version_of('esvdfair') or ''}".strip()
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    shown = f"<pre><code>{escape(line)}</code></pre>"
    return section("origin", "How this page was made", shown, paragraph(f"{made_by}, {when}.", "soft"))


# --- the numbers that the page's script draws ------------------------------------------------------------------------


def chart_data(content: Content) -> dict[str, Any]:
    """Everything in #data of the page."""
    drawn = sorted(np.argsort(-np.array(content.sizes), kind="stable")[:GROUPS_DRAWN].tolist())  # the largest groups
    names, old, new = content.names, content.before, content.after
    grid = make_grid([old.prediction, new.prediction])
    change = new.prediction - old.prediction
    at_change = make_grid([change[content.rows.codes == g] for g in drawn])
    steps: list[dict[str, Any]] = [
        {
            "ks": float(f"{step.peak.distance:.4g}"),
            "mse": float(f"{step.mse:.5g}"),
            "sentence": content.step_sentence(position),
            "densities": _densities(content, step.prediction, drawn, grid),
            "means": _rounded(step.means[drawn]),
            "cells": [cell for row in _group_cells(content, step) for cell in row],
        }
        for position, step in enumerate(content.steps)
    ]
    shown = {point.index for point in content.points}
    judged = content.fair.curve_.points if content.points and content.rows_judged else ()
    found: dict[str, Any] = {
        "groups": [names[g] for g in drawn],
        "means": steps[0]["means"],
        "grid": _span(grid),
        "steps": steps,
        "chosen": content.chosen,
        "peak": max(max(map(max, steps[i]["densities"])) for i in (0, content.chosen)),
        "joined": content.rows_judged,
        "predicted": content.predicted if len(content.predicted) <= 40 else "prediction",
        "others": [_rounded((p.ks, p.mse)) for p in judged if p.index not in shown],  # that the slider leaves out
        "floor": content.distances.floor,
        "target": content.summary["target_ks"],
        "refit": content.mse_refit,
        "errorName": content.error_name,
        "cdf": {"before": _cdf(content, old, drawn), "after": _cdf(content, new, drawn)},
        "changes": {
            "grid": _span(at_change),
            "densities": _densities(content, change, drawn, at_change),
            "means": _rounded((new.means - old.means)[drawn]),
        },
    }
    directions, scan = content.directions, content.scan
    if not isinstance(directions, str):
        spectra = {"before": directions.spectrum_before, "after": directions.spectrum_after}
        found["spectrum"] = {when: _rounded(values[:48]) for when, values in spectra.items()}
        found["spectrum"]["afterName"] = "after" if content.hidden_edits else "if edited"
    if not isinstance(scan, str):
        found["layers"] = [
            {"name": layer_name(f), "ks": f.ks, "low": f.ks_low, "high": f.ks_high, "best": f is scan.best}
            for f in scan.layers
        ]
        found["layersBefore"] = scan.ks_before
    return found


def _group_cells(content: Content, step: Step) -> list[list[str]]:
    """Mean prediction and error of every group, which follow the slider."""
    pairs = zip(step.means, step.group_mse, strict=True)
    return [[number(m, beside=content.spread), number(e, beside=content.spread**2)] for m, e in pairs]


def _of_group(content: Content, values: Array, group: int) -> tuple[Array, Array | None]:
    """A group's values and weights."""
    mine, weight = content.rows.codes == group, content.rows.weight
    return values[mine], None if weight is None else weight[mine]


def _distribution(content: Content, step: Step, thresholds: Array) -> Array:
    """(G, k) part of each group at or below each of k thresholds."""
    found = []
    for g in range(len(content.rows.labels)):
        values, weight = _of_group(content, step.prediction, g)
        order = np.argsort(values)
        mass = np.ones(len(order)) if weight is None else weight[order]
        below = np.append(0.0, np.cumsum(mass) / mass.sum())
        found.append(below[np.searchsorted(values[order], thresholds, side="right")])
    return np.array(found)


def _cdf(content: Content, step: Step, drawn: list[int]) -> dict[str, Any]:
    grid = make_grid([content.before.prediction, content.after.prediction], 161)
    thresholds = np.unique(np.append(grid, step.peak.threshold))
    return {
        "x": thresholds.tolist(),
        "shares": [_rounded(shares) for shares in _distribution(content, step, thresholds)[drawn]],
        "at": step.peak.threshold,
        "low": step.peak.low_share,
        "high": step.peak.high_share,
    }


def _densities(content: Content, values: Array, groups: list[int], grid: Array) -> list[list[float]]:
    samples = (_of_group(content, values, group) for group in groups)
    return [_rounded(density(mine, grid, weight)) for mine, weight in samples]


def _rounded(values: Iterable[float]) -> list[float]:
    """Four digits that count: enough for a chart, and short."""
    return [float(f"{value:.4g}") for value in values]


def _span(grid: Array) -> list[float]:
    return [float(grid[0]), float(grid[-1]), len(grid)]
