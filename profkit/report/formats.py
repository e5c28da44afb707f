"""The old tables, whose cells are text, until the last report has become a `profkit.report.document.Document`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profkit.report.document import FORMATS, Format
from profkit.report.text import WIDTH, csv_lines, escape_latex, escape_markdown, make_visible, screen_width, shorten
from profkit.report.text import json_text as render_json

# What other reports still take from here.
__all__ = [
    "FORMATS",
    "WIDTH",
    "Format",
    "escape_latex",
    "escape_markdown",
    "make_visible",
    "render_json",
    "screen_width",
    "shorten",
]


@dataclass(frozen=True)
class Column:
    """A column of a table: ``heading`` for people, ``key`` for CSV; ``flexible`` ones give up width on a screen."""

    heading: str
    key: str
    right: bool = True
    flexible: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as text for people, and the exact values behind them for CSV."""

    columns: tuple[Column, ...]
    cells: Sequence[Sequence[str]]
    values: Sequence[Sequence[object]]


def render_table(table: Table, *, full: bool = False, width: int | None = None) -> str:
    """Return the table for a screen of ``width`` columns, long cells shortened in the middle unless ``full``."""
    width = screen_width() if width is None else width
    rows = [[make_visible(cell) for cell in row] for row in table.cells]
    widths = [max(len(column.heading), *(len(row[i]) for row in rows), 0) for i, column in enumerate(table.columns)]
    if not full:
        flexible = [i for i, column in enumerate(table.columns) if column.flexible]
        spare = width - (sum(widths) + 2 * (len(widths) - 1))
        for i in flexible:
            shrink = min(max(-spare, 0), max(widths[i] - 16, 0))
            widths[i] -= shrink
            spare += shrink
    lines = [_line([column.heading for column in table.columns], widths, table.columns)]
    lines.append("  ".join("─" * w for w in widths))
    lines += [_line(row, widths, table.columns) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def render_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown."""
    head = "| " + " | ".join(column.heading for column in table.columns) + " |"
    rule = "|" + "|".join("---:" if column.right else "---" for column in table.columns) + "|"
    rows = ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in table.cells]
    return "\n".join([head, rule, *rows])


def render_latex(table: Table) -> str:
    """Return the table as a LaTeX tabular (booktabs)."""
    spec = "".join("r" if column.right else "l" for column in table.columns)
    rows = [" & ".join(map(escape_latex, row)) + r" \\" for row in table.cells]
    head = " & ".join(escape_latex(column.heading) for column in table.columns) + r" \\"
    body = [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(body)


def render_csv(table: Table) -> str:
    """Return the exact values as CSV, with the keys of the JSON as headings."""
    return csv_lines([column.key for column in table.columns], table.values)


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    fitted = [
        shorten(cell, w) if column.flexible else cell for cell, w, column in zip(cells, widths, columns, strict=True)
    ]
    return "  ".join(
        cell.rjust(w) if column.right else cell.ljust(w)
        for cell, w, column in zip(fitted, widths, columns, strict=True)
    )
