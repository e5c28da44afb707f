"""A result as people read it: tables, with lines before and after them, on a screen, in Markdown or in LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profkit.report.formats import Format, Table, render_latex, render_markdown, render_table
from profkit.report.text import escape_markdown, make_visible


@dataclass(frozen=True)
class Document:
    """What stands in a result, from top to bottom.

    ``failures`` are what the self-check found, ``heads`` what the tables are of, ``notes`` what is said about them.
    In LaTeX all lines are comments before the tables, for a table is what goes into a paper.
    """

    tables: Sequence[Table]
    failures: Sequence[str] = ()
    heads: Sequence[str] = ()
    notes: Sequence[str] = ()


def render_document(document: Document, style: Format, *, full_names: bool = False) -> str:
    """Return the document as a table for a screen, as Markdown or as LaTeX; JSON and CSV are no documents."""
    failures, heads, notes = document.failures, document.heads, document.notes
    if style == "latex":
        comments = [f"% {make_visible(line)}" for line in [*failures, *heads, *notes]]
        return "\n".join([*comments, "\n\n".join(map(render_latex, document.tables))])
    if style == "markdown":
        bold = "\n".join(f"**{escape_markdown(line)}**" for line in heads)
        listed = "\n".join(f"- {escape_markdown(line)}" for line in notes)
        return _join([*map(escape_markdown, failures), bold, *map(render_markdown, document.tables), listed])
    drawn = [render_table(table, full=full_names) for table in document.tables]
    return _join(["\n".join(failures), "\n".join(heads), *drawn, "\n".join(notes)])


def _join(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts))
