"""One self-contained HTML page about a repair, for a colleague or an auditor, and a model card.

The charts are SVG, drawn by plain JavaScript (`charts.js`) from numbers inlined as JSON. Vega-Lite inlined through
`vl_convert.javascript_bundle` would add about 900 kB to every page and makes functions from strings, which the page's
content security policy forbids. So a page is about 80 kB, needs no extra to be installed, and runs nothing but the one
script whose hash it names. Densities are computed in Python for every point of the curve; the slider only draws. Words
and structure are in the Jinja templates of this folder.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sklearn.utils.validation import check_is_fitted

from esvdfair.batches import Data
from esvdfair.core.checks import row_count
from esvdfair.estimator import ESVDFair
from esvdfair.explain.directions import name_features
from esvdfair.files import versions, whole_file
from esvdfair.report.content import Content, collect
from esvdfair.report.page import make_environment, render
from esvdfair.text import EVALUATED_ON, error_name, label_text, summary_table, verdict

__all__ = ["model_card", "render_report", "verdict", "write_report"]


def render_report(
    fair: ESVDFair,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    judged: tuple[Any, ...] | None = None,
    test: tuple[Any, ...] | None = None,
    summary: Mapping[str, Any] | None = None,
    model: str | None = None,
    data: str | None = None,
    predicts: str | None = None,
    unit: str | None = None,
    command: Sequence[str] | str | None = None,
    title: str | None = None,
    cutoffs: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The report of a fitted ESVDFair as one HTML page.

    All numbers of the page are about one set of rows, at most 10,000 of each group: ``test`` if it is given; else
    ``judged``; else those of the rows given that judged the repair, if they are among them; else all rows given. The
    page says which.

    Parameters
    ----------
    fair : fitted ESVDFair
    X : (rows, features) array, DataFrame, tensor or sparse matrix, in memory
    y : (rows,) labels, if there are any
    sensitive_features : (rows,) group of each person, or several columns
    sample_weight : (rows,) how many people a row stands for
    judged : (X, y, sensitive_features[, sample_weight[, control_features]]), the rows that judged the repair, where
        ``X`` are those that fitted it; y may be None
    test : the same, of rows that neither fitted nor chose
    summary : what :meth:`ESVDFair.assess` says of the test rows, if it is known already
    model, data : what to call them; default the kind of model, and the size of the data
    predicts, unit : what is predicted, and in which unit; default the name of ``y`` if it has one
    command : words after ``esvdfair`` on the command line, or a line to show as it is; the page ends with it
    title : of the page
    cutoffs : where decisions are compared: options of :func:`esvdfair.decisions`, such as ``[{"cutoff": 2.61}]`` or
        ``[{"select_share": 0.2}]``, one mapping a cut-off; default the top 10, 20 and 50%

    Raises
    ------
    ValueError
        A stream of batches, one group only, a group of one row, lengths that differ.
    sklearn.exceptions.NotFittedError
        ``fair`` is not fitted.
    """
    check_is_fitted(fair, "estimator_")
    named = predicts or getattr(y, "name", None) or "a number that nobody named"
    predicted = f"{named}, in {unit}" if unit else str(named)
    judging, testing = (None if part is None else Data(*part) for part in (judged, test))
    rows = Data(X, y, sensitive_features, sample_weight)
    chosen: dict[str, Any] = {"judged": judging, "test": testing, "summary": summary, "cutoffs": tuple(cutoffs or ())}
    content = collect(fair, rows, predicted=predicted, **chosen)
    about = {
        "Model": model or _kind(fair.model),
        "Data": data or f"{row_count(X):,} rows of {len(name_features(X))} inputs",
        "Predicts": predicted,
        "Groups": _group_sizes(content),
    }
    return render(content, about=about, command=command, title=title)


def write_report(path: str | os.PathLike[str], fair: ESVDFair, X: Any, y: Any = None, **options: Any) -> None:
    """Write the page of :func:`render_report`, which takes the same options, to ``path``, complete or not at all.

    Raises
    ------
    OSError
        The file cannot be written; what was there before is still there.
    """
    page = render_report(fair, X, y, **options)
    with whole_file(path) as file:
        file.write(page.encode("utf-8", "replace"))


def _kind(model: Any) -> str:
    """The name of a file, or the kind of a model."""
    if isinstance(model, str | os.PathLike):
        return os.path.basename(model)
    if isinstance(model, bytes):
        return "an ONNX model"
    steps = getattr(model, "steps", None)
    return type(steps[-1][1] if steps else model).__name__


def _group_sizes(content: Content) -> str:
    """The groups and their rows; of many only the smallest and the largest."""
    sizes = dict(zip(content.rows.labels, content.sizes, strict=True))
    names = {label: f"{label_text(label)} ({rows:,} rows)" for label, rows in sizes.items()}
    if len(names) <= 4:
        return f"{content.attribute}: {', '.join(names.values())}"
    few, many = (names[end(sizes, key=lambda label: sizes[label])] for end in (min, max))
    return f"{len(names)} of {content.attribute}, from {few} to {many}"


# --- model card ----------------------------------------------------------------------------------------------------


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
    chosen = [f"{k}={v!r}" for k, v in fair.get_params(deep=False).items() if k != "model" and v is not None]
    header, lines = summary_table(summary)
    card = make_environment().get_template("card.md").render(
        name=name, base=base, data=data, inputs=inputs, attribute=attribute, predicts=predicts, unit=unit,
        hashes=hashes, summary=summary, verdict=verdict(summary), results=[header, *lines], versions=versions(),
        options=[" ".join(option.replace("`", "'").split()) for option in chosen],
        evaluated_on=EVALUATED_ON[summary["evaluated_on"]], error_name=error_name(summary),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", card).strip() + "\n"
