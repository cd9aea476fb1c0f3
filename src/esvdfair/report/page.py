"""The page, part by part. Whatever is text goes through `markup`, which escapes it: names come from the user's file."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

import numpy as np

from esvdfair.report.chartdata import GROUPS_DRAWN, chart_data, shown_distributions
from esvdfair.report.content import Content
from esvdfair.report.figures import Distributions
from esvdfair.report.markup import chart, paragraph, script_json, section, source_hash, table, text
from esvdfair.report.tables import direction_rows, feature_rows, layer_rows, mover_rows, people_rows
from esvdfair.report.words import (
    caveats,
    cdf_words,
    density_words,
    error_name,
    group_names,
    groups_of,
    headline,
    label_text,
    layer_name,
    number,
    percent,
    rows_shown,
    share,
    step_words,
    what_apart_means,
)
from esvdfair.versions import version_of


def render(content: Content, *, command: Sequence[str] | str | None, title: str | None) -> str:
    """The whole page."""
    script, style = (files("esvdfair.report").joinpath(name).read_text("utf-8") for name in ("charts.js", "page.css"))
    before, after = shown_distributions(content)
    name = title or f"Repair report: parity between {groups_of(content)}"
    parts = [
        _summary(content, name),
        _densities(content, before, after),
        _distributions(content, before, after),
        _tradeoff(content),
        _spectrum(content),
        _layers(content),
        _features(content),
        _people(content),
        _caveats(content),
        _origin(command),
    ]
    # Nothing is loaded, and no script but ours runs, even if something were left unescaped.
    policy = f"default-src 'none'; script-src '{source_hash(script)}'; style-src '{source_hash(style)}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(name)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + '\n</main>\n<script type="application/json" id="data">'
        + script_json(chart_data(content, before, after))
        + f"</script>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _summary(content: Content, title: str) -> str:
    s = content.summary
    low, high = s["ks_interval"]
    tiles = [
        ("KS distance", f"{share(s['ks_before'])} → {share(s['ks_after'])}", f"95 % interval {low:.3f} to {high:.3f}"),
        (error_name(s), f"{number(s['mse_before'])} → {number(s['mse_after'])}", f"method: {s['method']}"),
        ("difference of group means", f"{s['mean_gap_before']:.3g} → {s['mean_gap_after']:.3g}", "of the farthest two"),
        ("sampling floor of KS", share(s["ks_floor"]), "what equal groups would show"),
    ]
    shown = "".join(f"<div><dt>{text(a)}</dt><dd>{text(b)}<small>{text(c)}</small></dd></div>" for a, b, c in tiles)
    rows = [
        [label_text(g), f"{n:,}", number(s["group_mse_before"][g]), number(s["group_mse_after"][g])]
        for g, n in s["group_sizes"].items()
    ]
    name = error_name(s)
    paid = table([content.attribute, "rows", "before", "after"], rows, caption=f"Who pays: {name} in every group")
    return (
        f"<header><h1>{text(title)}</h1>{paragraph(headline(content), 'lead')}"
        f"{paragraph(what_apart_means(content), 'soft')}</header>\n"
        f'<dl class="tiles">{shown}</dl>\n{paid}'
    )


def _densities(content: Content, before: Distributions, after: Distributions) -> str:
    charts = [
        chart(
            name,
            density_words(content, position),
            heading=heading,
            numbers=_quantiles(content, position, f"Quantiles of the predictions, {heading.lower()}"),
        )
        for name, position, heading in (("density-before", 0, "Before"), ("density-after", content.chosen, "After"))
    ]
    few = []
    if len(content.labels) > GROUPS_DRAWN:
        few = [
            paragraph(
                f"Drawn are the {GROUPS_DRAWN} largest groups; the tables hold all {len(content.labels)}.", "soft"
            )
        ]
    return section(
        "densities",
        "How predictions are distributed",
        paragraph(rows_shown(content, before, after)),
        *few,
        f'<div class="pair">{"".join(charts)}</div>',
        paragraph(
            "The higher the line, the more people of the group have such a prediction. Ticks mark the means.", "soft"
        ),
    )


def _quantiles(content: Content, position: int, caption: str) -> str:
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    rows = []
    for g, name in enumerate(group_names(content)):
        mine = content.steps[position].prediction[content.codes == g]
        rows.append([name, f"{len(mine):,}", number(float(mine.mean())), *map(number, np.quantile(mine, levels))])
    header = [content.attribute, "rows", "mean", *(f"{level:.0%}" for level in levels)]
    return table(header, rows, caption=caption)


def _distributions(content: Content, before: Distributions, after: Distributions) -> str:
    names = group_names(content)
    charts = []
    for when, found in (("Before", before), ("After", after)):
        words = cdf_words(content, found, when)
        picked = np.linspace(0, len(found.thresholds) - 1, 11).round().astype(int)
        rows = [[number(found.thresholds[k]), *map(percent, found.shares[:, k])] for k in picked]
        numbers = table(["prediction", *names], rows, caption="Share of each group at or below a prediction")
        charts.append(chart(f"cdf-{when.lower()}", words, heading=when, caption=words, numbers=numbers))
    intro = "Each line climbs from 0 to 1; where two lines are farthest apart vertically, that distance is KS."
    return section(
        "distributions", "Where the groups differ most", paragraph(intro), f'<div class="pair">{"".join(charts)}</div>'
    )


def _tradeoff(content: Content) -> str:
    last, name = len(content.steps) - 1, error_name(content.summary)
    rows = [
        [str(i), share(p.ks), f"{share(p.ks_low)} to {share(p.ks_high)}", number(p.mse), p.target]
        if (p := step.point)
        else ["untouched", share(content.summary["ks_before"]), "", number(content.summary["mse_before"]), ""]
        for i, step in enumerate(content.steps)
    ]
    numbers = table(
        ["point", "KS", "95 % interval", name, "refitted towards"], rows, caption="Points of the curve", words=(4,)
    )
    here = step_words(content, content.chosen)
    control = (
        '<div class="control"><p>Move the slider, use the arrow keys, or choose a dot.</p>'
        f'<label for="slider">Fairness</label><input id="slider" type="range" min="0" '
        f'max="{last}" step="1" value="{content.chosen}" aria-valuetext="{text(here)}">'
        f'<output id="readout" for="slider">{text(here)}</output></div>'
    )
    label = f"Trade-off between KS distance and {name} over {last} repaired models; the numbers are in the table below."
    charts = chart("tradeoff", label, numbers=numbers) + chart(
        "density-step", f"Densities of the predictions. {here}", caption="Densities at this point of the curve."
    )
    intro = (
        "Every dot is the same network with other weights, from the untouched model to the fairest one. Dots in the "
        "grey zone cannot be told from perfect parity on the rows that judged them."
    )
    return section(
        "tradeoff-section", "What fairness costs", paragraph(intro), control, f'<div class="pair">{charts}</div>'
    )


def _spectrum(content: Content) -> str:
    heading = "Directions in the network that carry the gap"
    found = content.directions
    if isinstance(found, str):
        return section("spectrum-section", heading, paragraph(f"Not available: {found}"))
    what = (
        f"Layer {layer_name(found)}: singular values of its weight seen through the groups’ difference in covariance. "
    )
    if content.hidden_edit:
        what += "The repair edited this layer: “after” is the repaired model."
        after = "after"
    else:
        what += (
            "The repair refitted the last layer only and left this one as it was; the second line shows what the "
            "closed-form edit of this layer itself would leave."
        )
        after = "if edited"
    pairs = zip(found.spectrum_before[:10], found.spectrum_after[:10], strict=False)
    rows = [[str(i + 1), number(old), number(new)] for i, (old, new) in enumerate(pairs)]
    label = f"Singular values before and {after}; the largest is {number(found.spectrum_before[0])} before and "
    return section(
        "spectrum-section",
        heading,
        paragraph(what),
        chart(
            "spectrum",
            label + f"{number(found.spectrum_after[0])} {after}.",
            numbers=table(["direction", "before", after], rows, caption="The ten largest singular values"),
        ),
        table(
            ["direction", "share of its gap", "σ before", f"σ {after}", "follows (correlation)"],
            direction_rows(found),
            caption="The main directions, and the inputs they go with",
            words=(4,),
        ),
    )


def _layers(content: Content) -> str:
    heading = "Layer by layer"
    scan = content.scan
    if isinstance(scan, str):
        return section("layers-section", heading, paragraph(f"Not available: {scan}"))
    intro = (
        "How far the groups are apart after every linear layer, and what the closed-form edit of that layer, followed "
        f"by a refit of the last one, would reach on rows that did not fit it. → marks {layer_name(scan.best)}: of the "
        "edits that reach the lowest KS distance, give or take the sampling floor, it is the most accurate."
    )
    if not content.hidden_edit:
        intro += f" The repair itself, a {content.summary['method']} refit of the last layer, is none of these edits."
    header = ["layer", "size", "mean gap", "covariance gap", "KS if edited", "MSE if edited"]
    rows = layer_rows(scan)
    return section(
        "layers-section",
        heading,
        paragraph(intro),
        chart("layers", f"KS distance if a layer is edited: {'; '.join(f'{r[0]} {r[4]}' for r in rows)}."),
        table(header, rows, caption="Gaps are relative to the spread of the layer’s output"),
    )


def _features(content: Content) -> str:
    header = ["input", f"with {content.attribute}", "with prediction, before", "with prediction, after"]
    intro = (
        "Inputs that go with the group as well as with the prediction are how a model that is never told the group "
        "comes to differ between groups. Correlations, the strongest link first."
    )
    caption = f"Correlation of each input with {_indicator(content)} and with the prediction"
    return section(
        "features", "Inputs that carry the gap", paragraph(intro), table(header, feature_rows(content), caption=caption)
    )


def _indicator(content: Content) -> str:
    names = group_names(content)
    return f"being {names[1]}" if len(names) == 2 else "being in the group it follows most"


def _people(content: Content) -> str:
    people, header = content.people, [content.attribute, "rows", "mean before", "mean after", "up", "down"]
    header += [f"moved > {number(people.threshold)}", "rank kept"]
    moved = "; ".join(f"{label_text(g.group)} {g.mean_change:+.3g} on average" for g in people.groups)
    intro = (
        f"{percent(people.share_moved)} of all people are moved by more than {number(people.threshold)}, a quarter of "
        "the standard deviation of the predictions before. A person moves by "
        f"{100 * people.mean_absolute_rank_change:.1f} "
        "percentile ranks on average."
    )
    return section(
        "people",
        "Who is affected",
        paragraph(intro),
        chart("changes", f"Densities of the change of a prediction by group: {moved}."),
        table(
            header,
            people_rows(people),
            caption="By group. Rank kept: rank correlation within the group, 1 if nobody overtakes anybody",
        ),
        "<details><summary>The people who move most</summary>"
        + table(
            ["row", content.attribute, "before", "after", "percentile before", "percentile after"],
            mover_rows(people),
            caption="Rows by their index in the data; percentiles among all people",
            words=(1,),
        )
        + "</details>",
    )


def _caveats(content: Content) -> str:
    items = "".join(f"<li>{text(item)}</li>" for item in caveats(content))
    return section("caveats", "Before you rely on this", f"<ul>{items}</ul>")


def _origin(command: Sequence[str] | str | None) -> str:
    if command is None:
        line = "esvdfair.report.write_report(path, fair, X, y, sensitive_features=…)"
    else:
        line = command if isinstance(command, str) else shlex.join(["esvdfair", *command])
    made_by = f"esvdfair {version_of('esvdfair') or ''}".strip()
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return section(
        "origin",
        "How this page was made",
        f"<pre><code>{text(line)}</code></pre>",
        paragraph(f"{made_by}, {when}.", "soft"),
    )
