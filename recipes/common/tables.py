"""Tables of a report: as Markdown, as CSV and on a screen. A missing value is a dash for people and empty in CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from recipes.common.recipe import OK

DASH = "—"
"""What stands for a value that was not measured; never 0."""

_MARKDOWN_MARKS = re.compile(r"[\\`*<\[|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_NUMBER_LIKE = re.compile(r"[-+<>≤−]?[\d.]")


@dataclass(frozen=True)
class Table:
    """Headings and lines of values; ``exact`` headings keep every digit of a float, the others show six."""

    headings: Sequence[str]
    lines: Sequence[Sequence[object]]
    exact: Collection[str] = ()

    @property
    def cells(self) -> list[list[str]]:
        """What people read."""
        return [
            [show(value, exact=heading in self.exact) for heading, value in zip(self.headings, line, strict=True)]
            for line in self.lines
        ]


def select(
    rows: Sequence[Mapping[str, object]], keys: Sequence[str] | Mapping[str, str], exact: Collection[str] = ()
) -> Table:
    """Return the values of some keys of all rows, each under its key, or under the heading that ``keys`` maps to it."""
    named = keys if isinstance(keys, Mapping) else {key: key for key in keys}
    return Table(list(named), [[row.get(key) for key in named.values()] for row in rows], exact)


def pivot(
    rows: Sequence[Mapping[str, object]], down: str, across: Sequence[str], value: str, *, digits: int = 4
) -> Table:
    """Return ``value`` with a line for each value of ``down`` and a column for each combination of ``across``.

    Floats show ``digits`` significant digits. A row without a value shows its status instead, unless that is ``ok``.
    """
    heads = list(dict.fromkeys(tuple(row[key] for key in across) for row in rows))
    lines = sorted({row[down] for row in rows}, key=lambda entry: (isinstance(entry, str), entry))
    found = {(row[down], tuple(row[key] for key in across)): row for row in rows}

    def cell(row: Mapping[str, object]) -> object:
        known = row.get(value)
        if known is None:
            return None if row.get("status") == OK else row.get("status")
        return show_digits(known, digits) if isinstance(known, float) else known

    headings = [down, *(" ".join(map(str, head)) for head in heads)]
    return Table(headings, [[line, *(cell(found.get((line, head), {})) for head in heads)] for line in lines])


def markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown; columns of numbers are aligned to the right."""
    cells = table.cells
    rule = "|".join("---:" if right else "---" for right in _right_aligned(table, cells))
    lines = [table.headings, *([_MARKDOWN_MARKS.sub(r"\\\g<0>", cell) for cell in line] for line in cells)]
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, f"|{rule}|", *body])


def screen(table: Table) -> str:
    """Return the table for a terminal, each column as wide as its widest cell."""
    cells = [list(table.headings), *table.cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = _right_aligned(table, cells[1:])
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def csv_text(table: Table) -> str:
    """Return the exact values as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.headings, *table.lines])
    return text.getvalue()


def show(value: object, *, exact: bool = False) -> str:
    """Return a value for people: a dash for None, six significant digits of a float unless ``exact``."""
    if value is None:
        return DASH
    return f"{value:.6g}" if isinstance(value, float) and not exact else str(value)


def show_digits(value: float, digits: int) -> str:
    """Return a number with that many significant digits, or as a whole number if it has more: 8.900, 14.66, 1410."""
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text.rstrip(".")


def show_share(value: float | None) -> str | None:
    """Return a fraction as per cent with one decimal; a small part does not show as nothing."""
    if value is None:
        return None
    return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"


def show_bytes(value: object) -> str | None:
    """Return a size with four digits in the unit that fits (1 KiB is 2¹⁰ B): ``13.49 GiB``."""
    if value is None:
        return None
    size, units = float(str(value)), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    if units[0] == "B":
        return f"{size:.0f} B"
    decimals = next((digits for digits, limit in ((3, 10), (2, 100), (1, 1000)) if round(size, digits) < limit), 0)
    return f"{size:,.{decimals}f} {units[0]}"


def listed(sentences: Iterable[str]) -> str:
    """Return sentences as a Markdown list."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _right_aligned(table: Table, cells: Sequence[Sequence[str]]) -> list[bool]:
    columns = list(zip(*cells, strict=True)) or [() for _ in table.headings]
    firsts = [next((cell for cell in column if cell not in (DASH, "", "not run")), "") for column in columns]
    return [_NUMBER_LIKE.match(first) is not None for first in firsts]
