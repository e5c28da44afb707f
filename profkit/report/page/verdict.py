"""Section 2, the lines of the summary, each with its section and its command; and all that would help."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from profkit.report.document import Column, Document, Labelled, Table
from profkit.report.page.markup import view_table
from profkit.report.text import make_visible
from profkit.report.units import NS, TEXT, Unit, format_bytes

_SECTIONS = {
    "STEP": ("step", "summary"),
    "LIMIT": ("step", "efficiency"),
    "GPU": ("step", "efficiency"),
    "WORK": ("kernels", "kernels"),
    "MODULE": ("modules", "ranges"),
    "LINES": ("step", "efficiency"),
    "MEMORY": ("memory", "memory"),
    "RANKS": ("kernels", "kernels"),
    "Try": ("advice", "summary"),
    "Closed": ("trust", "summary"),
}
"""A line's word → the section that shows more, and the command that prints its figures."""


_ELSEWHERE = ("Care", "More")


def build_verdict(document: Document, name: str, against: str = "") -> dict[str, Any]:
    """Return the lines of the summary but for its head and cautions, which the page has already, and further commands.

    A line whose figures another command prints in full names that command. ``against`` says in one sentence what
    changed since an earlier run, if there is one.
    """
    lines: list[dict[str, Any]] = []
    if against:
        lines.append({"label": "AGAINST", "section": "compare", "texts": [make_visible(against)], "command": ""})
    labelled = [part for part in document.parts if isinstance(part, Labelled)]
    for label, text in labelled[-1].lines:
        if label or not lines or lines[-1]["label"] == "AGAINST":
            section, command = _SECTIONS.get(label, ("", "summary"))
            command = "" if command == "summary" else f"profkit {command} {name}"
            lines.append({"label": label, "section": section, "texts": [], "command": command})
        lines[-1]["texts"].append(make_visible(text))
    return {"lines": [line for line in lines if line["label"] not in _ELSEWHERE]}


def build_advice(advice: Sequence[Mapping[str, Any]], run: str) -> dict[str, Any]:
    """Return a table of what would help, the largest effect first: the step after, what it costs, how to prove it."""
    columns = (
        Column("cause", "cause", TEXT),
        Column("where", "line or module", TEXT),
        Column("change", "change", TEXT),
        Column("low", "step after, least", NS),
        Column("expected", "expected", NS),
        Column("high", "most", NS),
        Column("bytes", "memory", Unit(lambda value: f"−{format_bytes(value)}")),
        Column("costs", "costs", TEXT),
        Column("proof", "prove it", TEXT),
    )
    rows = [
        {
            **column,
            **(column["after_ns"] or {}),
            "where": _name_place(column),
            "bytes": None if column["saves_bytes"] is None else column["saves_bytes"]["expected"],
            "proof": str(column["proof"]).replace("RUN", shlex.quote(run), 1),
        }
        for column in advice
    ]
    known = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    return {"table": view_table(Table(known, rows))}


def _name_place(advice: Mapping[str, Any]) -> str | None:
    line = advice["line"]
    return advice["module"] if line is None else f"{PurePath(line['file']).name}:{line['line']}"
