"""Sections -> docs/performance.md."""

from collections.abc import Sequence

from speed.measure import Goal, Section


def render(sections: Sequence[Section], machine: Sequence[str], command: str, minutes: float) -> str:
    """The whole document in Markdown."""
    goals = [goal for section in sections for goal in section.goals]
    missed = [goal for goal in goals if not goal.met]
    lines = [
        "# Performance",
        "",
        f"Written by `{command}` in {minutes:.1f} minutes; do not edit. Every figure was measured in that one run. "
        "Seconds belong to the machine below; the ratios are what to compare.",
        "",
        *(f"- {line}" for line in machine),
        "",
        f"{len(goals) - len(missed)} of {len(goals)} goals are met."
        + (
            " Missed: " + "; ".join(f"{g.what} ({_value(g)}, goal {_bound(g)})" for g in missed) + "." if missed else ""
        ),
    ]
    for number, section in enumerate(sections, 1):
        lines += ["", f"## {number}. {section.title}", "", section.what]
        for table in section.tables:
            lines += ["", *_table(table)]
        if section.goals:
            rows = [(g.what, _value(g), _bound(g), "yes" if g.met else "**no**") for g in section.goals]
            lines += ["", *_table([("goal", "measured", "asked", "met"), *rows])]
        for note in section.notes:
            lines += ["", note]
    return "\n".join(lines) + "\n"


def _value(goal: Goal) -> str:
    return f"{goal.value:.2f}" if goal.value < 100 else f"{goal.value:.0f}"


def _bound(goal: Goal) -> str:
    return f"{'≤' if goal.below else '≥'} {goal.bound:g}"


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    header, *body = [" | ".join(str(cell) for cell in row) for row in rows]
    return [f"| {header} |", "|" + "---|" * len(rows[0]), *(f"| {row} |" for row in body)]
