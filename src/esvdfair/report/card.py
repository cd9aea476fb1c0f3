"""A model card about a repair, in the shape that Hugging Face reads: facts in YAML, then Markdown."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sklearn.utils.validation import check_is_fitted

from esvdfair.estimator import ESVDFair
from esvdfair.files import versions
from esvdfair.report.sentences import PARITY
from esvdfair.text import EVALUATED_ON, before_and_after, error_name, label_text, some_names, verdict

JUDGED_ON = EVALUATED_ON | {"moments": "moments of all sites, without rows"}


def model_card(
    fair: ESVDFair,
    *,
    name: str,
    base: str | None = None,
    data: Mapping[str, str] | None = None,
    inputs: Sequence[str] | None = None,
    attribute: str = "group",
    predicts: str | None = None,
    unit: str | None = None,
    hashes: Mapping[str, str] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> str:
    """The model card of a fitted ESVDFair, as Markdown.

    Parameters
    ----------
    fair : fitted ESVDFair
    name : of the repaired model
    base : name of the model before
    data : what rows did ("Fitted on") -> which they are ("people.csv, 2,500 rows")
    inputs : columns that the model takes
    attribute : name of the sensitive column or columns
    predicts, unit : what is predicted, and in which unit
    hashes : file -> its SHA-256
    summary : what was reached; ``fair.summary_`` by default, or what :meth:`ESVDFair.assess` says of other rows

    Raises
    ------
    sklearn.exceptions.NotFittedError
        ``fair`` is not fitted.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import ESVDFair
    >>> from esvdfair.report import model_card
    >>> X, sex = np.random.default_rng(0).normal(size=(400, 3)), np.arange(400) % 2
    >>> fair = ESVDFair(LinearRegression().fit(X, X[:, 0] + sex), method="parity").fit(X, sensitive_features=sex)
    >>> card = model_card(fair, name="pay-fair", attribute="sex", predicts="pay", unit="EUR an hour")
    >>> card.splitlines()[0], "# Model Card for pay-fair" in card
    ('---', True)
    """
    check_is_fitted(fair, "estimator_")
    summary = fair.summary_ if summary is None else summary
    what = f"{predicts or 'a number'}{f', in {unit}' if unit else ''}"
    groups = [f"{label_text(label)} ({rows:,} rows)" for label, rows in summary["group_sizes"].items()]
    judged = f"{summary['rows']:,} rows: {JUDGED_ON[summary['evaluated_on']]}"
    chosen = {key: value for key, value in fair.get_params(deep=False).items() if key != "model" and value is not None}
    facts = {"Base model": base, "Predicts": what, "Inputs": None if inputs is None else some_names(inputs, 30)}
    parts = [
        _front_matter(summary, name, base, data),
        f"# Model Card for {_plain(name)}",
        f"{_plain(base or 'A model')}, repaired so that its predictions are distributed alike in every group of "
        f"{_plain(attribute)}. {verdict(summary)}",
        "## Model Details",
        _bullets({key: value for key, value in facts.items() if value} | {"Repaired by": f"esvdfair, {fair.method}"}),
        "## Uses",
        f"Predicts {_plain(what)}, from the same inputs as the model before. It needs no sensitive attribute.",
        "### Out-of-Scope Use",
        "People unlike those below, and decisions that need errors, not predictions, to be alike in every group.",
        "## Bias, Risks, and Limitations",
        "\n".join(f"- {line}" for line in PARITY),
        "## Training Details",
        _bullets(data or {}),
        "Parameters of the repair: " + ", ".join(f"`{key}={_short(value)}`" for key, value in chosen.items()) + ".",
        "## Evaluation",
        f"Judged on {judged}. Groups of {_plain(attribute)}: {_plain('; '.join(groups))}.",
        "KS distance: the largest difference between two groups' shares at or below any prediction. Errors are against "
        f"{'labels' if summary['error_against'] == 'labels' else 'the predictions of the model before'}.",
        "### Results",
        _table(*before_and_after(summary)),
        verdict(summary),
        "## Technical Specifications",
        _bullets({key: value for key, value in versions().items() if value}),
        _table(["file", "SHA-256"], [[file, f"`{sha256}`"] for file, sha256 in hashes.items()]) if hashes else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(summary: Mapping[str, Any], name: str, base: str | None, data: Mapping[str, str] | None) -> str:
    """What machines read; JSON is YAML."""
    metrics = [
        {"type": kind, "name": title, "value": summary[f"{key}_after"]}
        for kind, title, key in (("mse", error_name(summary), "mse"), ("ks", "KS distance between groups", "ks"))
        if summary[f"{key}_after"] is not None
    ]
    task = {"type": "tabular-regression"}
    rows = {"name": "; ".join((data or {"": "not named"}).values()), "type": "tabular"}
    result = {"task": task, "dataset": rows, "metrics": metrics}
    facts: dict[str, Any] = {
        "pipeline_tag": "tabular-regression",
        "library_name": "esvdfair",
        "tags": ["fairness", "statistical-parity", "regression"],
        "model-index": [{"name": name, "results": [result]}],
    }
    if base:
        facts["base_model_name"] = base
    return "---\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in facts.items()) + "\n---"


def _plain(text: str) -> str:
    """A name from a user's file that neither ends a line nor becomes Markdown or HTML."""
    line = " ".join(text.split())
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in line)


def _short(value: Any) -> str:
    return " ".join(repr(value).replace("`", "'").split())


def _bullets(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- **{_plain(name)}:** {_plain(value)}" for name, value in facts.items())


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    shown = [[cell if cell.startswith("`") else _plain(cell) for cell in line] for line in (header, *lines)]
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (shown[0], rule, *shown[1:]))
