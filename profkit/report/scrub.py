"""Say what was taken out of a copy of an export."""

from __future__ import annotations

from dataclasses import asdict

from profkit.report.formats import Column, Format, Table, render_json
from profkit.report.plain_table import render_plain
from profkit.report.text import escape_markdown, make_visible
from profkit.report.units import format_count
from profkit.trace.scrub import ScrubResult

_COLUMNS = (
    Column("taken", "what", right=False),
    Column("from", "table", right=False),
    Column("rows", "row_count"),
)


def render_scrub(result: ScrubResult, style: Format = "table") -> str:
    """Return what was taken, and from which table of the export."""
    if style == "json":
        return render_json(asdict(result))
    values = [(taken.what, taken.table, taken.row_count) for taken in result.taken]
    table = Table(_COLUMNS, [(what, name, f"{count:,}") for what, name, count in values], values)
    drawn = render_plain(table, style)
    if style == "csv":
        return drawn
    if style == "latex":
        return "\n".join([*(f"% {make_visible(line)}" for line in _lines(result)), drawn])
    if style == "markdown":
        return "\n\n".join([drawn, *map(escape_markdown, _lines(result))])
    return "\n\n".join([drawn, *_lines(result)]) if result.taken else "\n".join(_lines(result))


def kept_warnings(result: ScrubResult) -> list[str]:
    """Return what a person has to look at before they share the copy."""
    if not result.kept_path_count:
        return []
    names = format_count(result.kept_path_count, "name")
    return [f"{names} of ranges or kernels look like a path; they are the events and stay, so look at them"]


def _lines(result: ScrubResult) -> list[str]:
    if not result.taken:
        return [f"nothing had to be taken; {result.output} is a copy"]
    return [f"{result.output} holds the recorded events and nothing of the above"]
