"""One table, five ways to print it: for a screen, Markdown, LaTeX, CSV; JSON is made from the result itself."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["table", "markdown", "latex", "csv", "json"]
FORMATS: tuple[Format, ...] = ("table", "markdown", "latex", "csv", "json")

WIDTH = 80

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


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


def screen_width() -> int:
    """Return the width of the terminal, never under 80; 80 when the output is no terminal."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) if sys.stdout.isatty() else WIDTH


def render_table(table: Table, *, full: bool = False, width: int | None = None) -> str:
    """Return the table for a screen of ``width`` columns, long cells shortened in the middle unless ``full``."""
    width = screen_width() if width is None else width
    widths = [
        max(len(column.heading), *(len(row[i]) for row in table.cells), 0) if table.cells else len(column.heading)
        for i, column in enumerate(table.columns)
    ]
    if not full:
        flexible = [i for i, column in enumerate(table.columns) if column.flexible]
        spare = width - (sum(widths) + 2 * (len(widths) - 1))
        for i in flexible:
            shrink = min(max(-spare, 0), max(widths[i] - 16, 0))
            widths[i] -= shrink
            spare += shrink
    lines = [_line([column.heading for column in table.columns], widths, table.columns)]
    lines.append("  ".join("─" * w for w in widths))
    lines += [_line(row, widths, table.columns) for row in table.cells]
    return "\n".join(line.rstrip() for line in lines)


def shorten(text: str, width: int) -> str:
    """Return text of at most ``width`` characters, its middle replaced by an ellipsis: both ends tell most."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def render_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown."""
    head = "| " + " | ".join(column.heading for column in table.columns) + " |"
    rule = "|" + "|".join("---:" if column.right else "---" for column in table.columns) + "|"
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.cells]
    return "\n".join([head, rule, *rows])


def render_latex(table: Table) -> str:
    """Return the table as a LaTeX tabular (booktabs)."""
    spec = "".join("r" if column.right else "l" for column in table.columns)
    rows = [" & ".join(_escape_latex(cell) for cell in row) + r" \\" for row in table.cells]
    head = " & ".join(_escape_latex(column.heading) for column in table.columns) + r" \\"
    body = [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(body)


def render_csv(table: Table) -> str:
    """Return the exact values as CSV, with the keys of the JSON as headings."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows(table.values)
    return text.getvalue().rstrip("\n")


def render_json(data: Any) -> str:
    """Return data as indented JSON."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    fitted = [
        shorten(cell, w) if column.flexible else cell for cell, w, column in zip(cells, widths, columns, strict=True)
    ]
    return "  ".join(
        cell.rjust(w) if column.right else cell.ljust(w)
        for cell, w, column in zip(fitted, widths, columns, strict=True)
    )


def _escape_latex(text: str) -> str:
    return "".join(_LATEX_ESCAPES.get(character, character) for character in text)
