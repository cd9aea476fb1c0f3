"""One self-contained HTML page about a repair, for a colleague or an auditor, and a model card.

The charts are SVG, drawn by some 200 lines of plain JavaScript (`charts.js`) from numbers inlined as JSON. Vega-Lite
inlined through `vl_convert.javascript_bundle` would add about 900 kB to every page and makes functions from strings,
which the page's content security policy forbids. So a page is about 80 kB, needs no extra to be installed, and runs
nothing but the one script whose hash it names. Densities are computed in Python for every point of the curve; the
slider only draws.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from sklearn.utils.validation import check_is_fitted

from esvdfair.estimator import ESVDFair
from esvdfair.explain.directions import name_features
from esvdfair.files import whole_file
from esvdfair.report.card import model_card
from esvdfair.report.content import Content, attribute_name, collect, read_rows
from esvdfair.report.page import render
from esvdfair.text import label_text

__all__ = ["model_card", "render_report", "write_report"]

UNNAMED_TARGET = "a number that nobody named"


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
    judged : (X, y, sensitive_features) or a fourth item with weights, the rows that judged the repair, where ``X`` are
        those that fitted it; y may be None
    test : the same, of rows that neither fitted nor chose
    summary : what :meth:`ESVDFair.assess` says of the test rows, if it is known already
    model, data : what to call them; default the kind of model, and the size of the data
    predicts, unit : what is predicted, and in which unit; default the name of ``y`` if it has one
    command : words after ``esvdfair`` on the command line, or a line to show as it is; the page ends with it
    title : of the page

    Raises
    ------
    ValueError
        A stream of batches, one group only, a group of one row, lengths that differ.
    sklearn.exceptions.NotFittedError
        ``fair`` is not fitted.
    """
    check_is_fitted(fair, "estimator_")
    rows = read_rows(fair, X, y, sensitive_features, sample_weight)
    which = "test" if test is not None else "judged"
    aside = test or judged
    apart = None if aside is None else read_rows(fair, *aside[:4])
    named = predicts or getattr(y, "name", None)
    predicted = f"{named or UNNAMED_TARGET}{f', in {unit}' if unit else ''}"
    content = collect(
        fair, rows, apart, which, attribute=attribute_name(sensitive_features), predicted=predicted, summary=summary
    )
    about = {
        "Model": model or _kind(fair.model),
        "Data": data or f"{len(rows.codes):,} rows of {len(name_features(rows.x, None))} inputs",
        "Predicts": predicted,
        "Groups": _groups(content),
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


def _groups(content: Content) -> str:
    """The groups and their rows; of many only the smallest and the largest."""
    sizes = dict(zip(content.rows.labels, content.sizes, strict=True))
    names = {label: f"{label_text(label)} ({rows:,} rows)" for label, rows in sizes.items()}
    if len(names) <= 4:
        return f"{content.attribute}: {', '.join(names.values())}"
    few, many = (names[end(sizes, key=lambda label: sizes[label])] for end in (min, max))
    return f"{len(names)} of {content.attribute}, from {few} to {many}"
