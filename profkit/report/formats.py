"""One table, five ways to print it: for a screen, Markdown, LaTeX, CSV; JSON is made from the result itself."""

from __future__ import annotations

import csv
import io
import json
import os
import re
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
    "|": r"\textbar{}",
    # At the start of a row it would begin an argument of the line break before it.
    "[": "{[}",
}

# Control characters show as the pictures that Unicode has for them; halves of pairs, and what reverses the direction of
# a line, as what they are not.
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_UNSHOWABLE = (*range(0x80, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = _PICTURES | dict.fromkeys((*_UNSHOWABLE, *range(0xD800, 0xE000)), 0xFFFD)

# Underscores within a word are plain in GitHub's Markdown, those at its ends are not.
_MARKDOWN_MARKS = re.compile(r"[\\`*<\[|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


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
    try:
        return max(os.get_terminal_size(sys.stdout.fileno()).columns, WIDTH)
    except (OSError, ValueError, AttributeError):
        # No terminal, or none that is open, or a stream that has no file.
        return WIDTH


def make_visible(text: str) -> str:
    """Return text that a terminal takes for text alone: control characters and the like are replaced.

    Names come from captures, and a capture from anywhere: an escape sequence in one must not reach a screen, nor a
    line break tear a table.
    """
    return text.translate(_VISIBLE)


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
    lines = ([column.key for column in table.columns], *table.values)
    return "\n".join(map(_csv_line, lines))


def render_json(data: Any) -> str:
    """Return data as indented JSON in ASCII, which any terminal, pipe and parser takes.

    What is no Unicode (half a pair, which stands for a stray byte of a file's name) is U+FFFD.
    """
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    return _BEYOND_ASCII.sub(_escape_json, text)


def escape_markdown(text: str) -> str:
    """Return text that GitHub's Markdown shows as it is: ``kernel<float>`` would lose its ``<float>`` as a tag."""
    return _MARKDOWN_MARKS.sub(r"\\\g<0>", make_visible(text))


def escape_latex(text: str) -> str:
    """Return text that LaTeX sets as it is."""
    escaped = "".join(_LATEX_ESCAPES.get(character, character) for character in make_visible(text))
    # Two hyphens would be set as a dash.
    return re.sub(r"-(?=-)", "-{}", escaped)


def _csv_line(values: Sequence[object]) -> str:
    # The writer quotes a carriage return within a value only where it ends lines with one.
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(values)
    return line.getvalue()[:-2]


def _escape_json(match: re.Match[str]) -> str:
    character = match[0] if not "\ud800" <= match[0] <= "\udfff" else "\ufffd"
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    fitted = [
        shorten(cell, w) if column.flexible else cell for cell, w, column in zip(cells, widths, columns, strict=True)
    ]
    return "  ".join(
        cell.rjust(w) if column.right else cell.ljust(w)
        for cell, w, column in zip(fitted, widths, columns, strict=True)
    )


def csv_lines(keys: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return exact values as CSV under their keys; what is not known is an empty cell."""
    return "\n".join(map(_csv_line, (keys, *rows)))


def json_text(data: Any) -> str:
    """Return data as indented JSON in ASCII, which any terminal, pipe and parser takes.

    What is no Unicode (half a pair, which stands for a stray byte of a file's name) is U+FFFD.
    """
    return render_json(data)
