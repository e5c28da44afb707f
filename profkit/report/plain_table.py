"""A table on its own, without a ledger or a self-check, in the formats that all tables have."""

from __future__ import annotations

from profkit.report.formats import Format, Table, render_csv, render_latex, render_markdown, render_table


def render_plain(table: Table, style: Format) -> str:
    """Return the table; JSON is made from the result itself, not from its table."""
    renderers = {"markdown": render_markdown, "latex": render_latex, "csv": render_csv}
    return renderers[style](table) if style in renderers else render_table(table)
