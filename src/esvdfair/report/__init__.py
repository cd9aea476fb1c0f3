"""One self-contained HTML page about a repair, for a colleague or an auditor, and a model card.

The charts are SVG, drawn by plain JavaScript (`charts.js`) from numbers inlined as JSON. Vega-Lite inlined through
`vl_convert.javascript_bundle` would add about 900 kB to every page and makes functions from strings, which the page's
content security policy forbids. So a page is about 80 kB, needs no extra to be installed, and runs nothing but the one
script whose hash it names. Densities are computed in Python for every point of the curve; the slider only draws. Words
and structure are in the Jinja templates of this folder.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sklearn.utils.validation import check_is_fitted

from esvdfair.batches import Data
from esvdfair.core.checks import row_count
from esvdfair.estimator import ESVDFair
from esvdfair.explain.directions import name_features
from esvdfair.files import version_of, versions, whole_file
from esvdfair.report.content import Content
from esvdfair.report.page import GROUPS_DRAWN, chart_data, inline, make_environment
from esvdfair.text import error_name, label_text, summary_table, verdict

__all__ = ["model_card", "render_report", "verdict", "write_report"]

FEW_ROWS = 200
"""What is said of a group with fewer rows is called uncertain."""


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
    """Render the report of a repair as one HTML page.

    All numbers are about one set of rows, at most 10,000 of each group: ``test`` if given, else ``judged``, else the
    validation rows among the given rows, else all given rows. The page says which.

    Parameters
    ----------
    fair : ESVDFair
        A fitted ESVDFair.
    X : array-like, DataFrame, tensor or sparse matrix
        Rows in memory, (rows, features).
    y : array-like of shape (rows,), default=None
        Labels.
    sensitive_features : array-like of shape (rows,) or (rows, attributes)
        Group of each row. Several columns are combined into groups.
    sample_weight : array-like of shape (rows,), default=None
        Weight of each row.
    judged : tuple, default=None
        Validation rows, ``(X, y, sensitive_features[, sample_weight[, control_features]])``, if ``X`` has the training
        rows. y may be None.
    test : tuple, default=None
        Test rows, in the same form.
    summary : mapping, default=None
        What :meth:`ESVDFair.assess` returned for the test rows, if known already.
    model, data : str, default=None
        Names of the model and the data.
    predicts, unit : str, default=None
        What is predicted, and its unit.
    command : str or sequence of str, default=None
        Command to show at the end of the page.
    title : str, default=None
        Title of the page.
    cutoffs : sequence of mapping, default=None
        Options of :func:`esvdfair.decisions` for each cut-off, such as ``[{"cutoff": 2.61}]`` or
        ``[{"select_share": 0.2}]``. If None, the top 10, 20 and 50%.

    Returns
    -------
    str
        The HTML page.

    Raises
    ------
    ValueError
        If X is a stream of batches, there is only one group, a group has one row, or lengths differ.
    sklearn.exceptions.NotFittedError
        If ``fair`` is not fitted.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import ESVDFair
    >>> from esvdfair.report import render_report
    >>> X, sex = np.random.default_rng(0).normal(size=(400, 3)), np.arange(400) % 2
    >>> y = X[:, 0] + sex
    >>> fair = ESVDFair(LinearRegression().fit(X, y), method="parity").fit(X, y, sensitive_features=sex)
    >>> render_report(fair, X, y, sensitive_features=sex)[:15].lower()
    '<!doctype html>'
    """
    check_is_fitted(fair, "estimator_")
    named = predicts or getattr(y, "name", None) or "a number that nobody named"
    predicted = f"{named}, in {unit}" if unit else str(named)
    judging, testing = (None if part is None else Data(*part) for part in (judged, test))
    rows = Data(X, y, sensitive_features, sample_weight)
    content = Content(
        fair, rows, judged=judging, test=testing, summary=summary, predicted=predicted, cutoffs=cutoffs or ()
    )
    about = {
        "Model": model or _kind(fair.model),
        "Data": data or f"{row_count(X):,} rows of {len(name_features(X))} inputs",
        "Predicts": predicted,
        "Groups": _group_sizes(content),
    }
    words = None if isinstance(command, str) else command  # of which the slider can make others
    line = command or "esvdfair.report.write_report(path, fair, X, y, sensitive_features=…)"
    by = "" if content.attribute == "group" else f" by {content.attribute}"
    return make_environment().get_template("page.html").render(
        title=title or f"Repair report: parity{by}", about=about, content=content, data=chart_data(content, words),
        verdict=verdict(content.summary), drawn=GROUPS_DRAWN, script=inline("charts.js"), style=inline("page.css"),
        few=[label_text(group) for group, rows in content.summary["group_sizes"].items() if rows < FEW_ROWS],
        command=line if isinstance(line, str) else shlex.join(["esvdfair", *line]),
        made_by=f"esvdfair {version_of('esvdfair') or ''}".strip(), made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )  # fmt: skip


def write_report(path: str | os.PathLike[str], fair: ESVDFair, X: Any, y: Any = None, **options: Any) -> None:
    """Write the report of a repair to a file.

    Parameters
    ----------
    path : str or Path
        HTML file to write, complete or not at all.
    fair : ESVDFair
        A fitted ESVDFair.
    X : array-like, DataFrame, tensor or sparse matrix
        Rows in memory, (rows, features).
    y : array-like of shape (rows,), default=None
        Labels.
    **options : dict
        As in :func:`render_report`.

    Raises
    ------
    OSError
        If the file cannot be written; an older file is then kept.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from esvdfair import ESVDFair
    >>> from esvdfair.report import write_report
    >>> X, sex = np.random.default_rng(0).normal(size=(400, 3)), np.arange(400) % 2
    >>> y = X[:, 0] + sex
    >>> fair = ESVDFair(LinearRegression().fit(X, y), method="parity").fit(X, y, sensitive_features=sex)
    >>> write_report("report.html", fair, X, y, sensitive_features=sex)
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
    sizes = {label: content.summary["group_sizes"][label] for label in content.rows.labels}
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
    """Write the model card of a repaired model as Markdown.

    Parameters
    ----------
    fair : ESVDFair
        A fitted ESVDFair.
    name : str
        Name of the repaired model.
    base : str, default=None
        Name of the original model.
    data : mapping, default=None
        Data sets by their use, such as ``{"Fitted on": "people.csv, 2,500 rows"}``.
    inputs : sequence of str, default=None
        Columns that the model takes.
    attribute : str, default="group"
        Name of the sensitive column or columns.
    predicts, unit : str, default=None
        What is predicted, and its unit.
    hashes : mapping, default=None
        SHA-256 of files, by name.
    summary : mapping, default=None
        Figures to show. If None, ``fair.summary_``; else what :meth:`ESVDFair.assess` returns for other rows.

    Returns
    -------
    str
        The model card.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        If ``fair`` is not fitted.

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
        error_name=error_name(summary),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", card).strip() + "\n"
