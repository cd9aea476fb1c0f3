"""One self-contained HTML page about a repair, for a colleague or an auditor.

The charts are SVG, drawn by some 200 lines of plain JavaScript (`charts.js`) from numbers inlined as JSON. Vega-Lite
inlined through `vl_convert.javascript_bundle` would add about 900 kB to every page and makes functions from strings,
which the page's content security policy forbids. So a page is about 80 kB, needs no extra to be installed, and runs
nothing but the one script whose hash it names. Densities are computed in Python for every point of the curve; the
slider only draws.
"""

import os
from collections.abc import Sequence
from typing import Any

from esvdfair.estimator import ESVDFair
from esvdfair.files import whole_file
from esvdfair.report.content import gather
from esvdfair.report.page import render

__all__ = ["render_report", "write_report"]


def render_report(
    fair: ESVDFair,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any,
    command: Sequence[str] | str | None = None,
    title: str | None = None,
) -> str:
    """The report of a fitted ESVDFair as one HTML page.

    The headline numbers are those of ``fair.summary_``, from the rows that judged the repair; the charts and tables
    show the rows given here, at most 10,000 of each group.

    Parameters
    ----------
    fair : fitted ESVDFair
    X : (rows, features) array, DataFrame, tensor or sparse matrix, in memory
    y : (rows,) labels, if there are any
    sensitive_features : (rows,) group of each person, or several columns
    command : words after ``esvdfair`` on the command line, or a line to show as it is; the page ends with it
    title : of the page

    Raises
    ------
    ValueError
        A stream of batches, one group only, a group of one row, lengths that differ.
    sklearn.exceptions.NotFittedError
        ``fair`` is not fitted.
    """
    return render(gather(fair, X, y, sensitive_features=sensitive_features), command=command, title=title)


def write_report(
    path: str | os.PathLike[str],
    fair: ESVDFair,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any,
    command: Sequence[str] | str | None = None,
    title: str | None = None,
) -> None:
    """Write the page of :func:`render_report` to ``path``, complete or not at all.

    Raises
    ------
    OSError
        The file cannot be written; what was there before is still there.
    """
    page = render_report(fair, X, y, sensitive_features=sensitive_features, command=command, title=title)
    with whole_file(path) as file:
        file.write(page.encode("utf-8", "replace"))
