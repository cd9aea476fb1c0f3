"""Pieces of HTML, in which every text is escaped."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

Rows = Iterable[Sequence[str]]


def text(value: object) -> str:
    """Escaped for HTML, quotes included."""
    return html.escape(str(value))


def script_json(value: Any) -> str:
    """JSON that cannot end or comment out the script element that holds it; everything beyond ASCII is escaped."""
    plain = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(header: Sequence[str], rows: Rows, *, caption: str, words: Sequence[int] = ()) -> str:
    """A table that scrolls by itself on a narrow screen; ``words`` are columns of text, set flush left."""
    of = [' class="words"' if i in words else "" for i in range(len(header))]
    head = "".join(f'<th scope="col"{c}>{text(cell)}</th>' for cell, c in zip(header, of, strict=True))
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>'
        + "".join(f"<td{c}>{text(cell)}</td>" for cell, c in zip(row[1:], of[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table><caption>{text(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def chart(name: str, label: str, *, heading: str = "", caption: str = "", numbers: str = "") -> str:
    """A place for a chart, what it shows in words, and its numbers behind a fold."""
    fold = f"<details><summary>Numbers</summary>{numbers}</details>" if numbers else ""
    return (
        f"<figure>{f'<h3>{text(heading)}</h3>' if heading else ''}"
        f'<div class="chart" id="{name}" role="img" aria-label="{text(label)}"></div>'
        f"{f'<figcaption>{text(caption)}</figcaption>' if caption else ''}{fold}</figure>"
    )


def section(name: str, heading: str, *parts: str) -> str:
    """A part of the page; ``parts`` are HTML already."""
    return f'<section id="{name}">\n<h2>{text(heading)}</h2>\n' + "\n".join(parts) + "\n</section>"


def paragraph(words: str, kind: str = "") -> str:
    """Escaped words; ``kind`` is a class of the style sheet."""
    return f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def source_hash(source: str) -> str:
    """How a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")
