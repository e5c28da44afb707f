"""A result, built once and printed five ways: for a screen, as Markdown, as LaTeX, as CSV, as JSON.

A command builds one `Document`. Its tables hold exact values under the keys that JSON and CSV use; how a person reads a
value is its column's `Unit`. No value becomes text before the last moment, and no text is taken apart again. What a
reader must know before trusting the result (`Finding`) stands in every format but CSV, which has no place for a
sentence: there it goes to standard error alone.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from profkit.errors import Finding
from profkit.report import (
    WIDTH,
    csv_lines,
    escape_latex,
    escape_markdown,
    json_text,
    make_visible,
    screen_width,
    shorten,
    shorten_apart,
)
from profkit.report.units import COUNT, Unit
from profkit.version import __version__

Format = Literal["table", "markdown", "latex", "csv", "json"]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
FORMATS: tuple[Format, ...] = ("table", "markdown", "latex", "csv", "json")

SCHEMA = 1
"""The version of the JSON: it rises when a key that exists changes its meaning or goes."""

UNKNOWN = "–"
"""Shown for a value that is not known."""

UNTRUSTED = "SELF-CHECK FAILED: do not trust this capture's totals"

_LEAST_WIDTHS = (16, 12)
"""A flexible column shrinks to the first of these, and to the second where only that makes the table fit."""

_PATHS = ("trace", "snapshot", "before", "after", "run", "baseline", "output")
"""The keys of JSON that hold a path; an absolute one stands there in full only if full names are asked for."""

Row = Mapping[str, Any]

Role = Literal["title", "heading", "rule", "wrong"]
"""What text is on a terminal, for its colour."""

Paint = Callable[[str, Role], str]


def plainly(text: str, _: Role) -> str:
    return text


@dataclass(frozen=True)
class Column:
    """A column: the ``key`` of its values, the ``heading`` that people read, and how they read a value.

    ``flexible`` columns give up width on a screen, their cells shortened in the middle. ``wide`` ones are left out on a
    screen, where there is no room. ``on_screen`` returns what stands there instead, from the whole row: a tree's name
    moved in by its depth, say. ``brief`` returns what stands there of a row for which that is too long: the rest of the
    name behind that of the row above it in the tree.
    """

    key: str
    heading: str
    unit: Unit = COUNT
    flexible: bool = False
    wide: bool = False
    on_screen: Callable[[Row], str] | None = None
    brief: Callable[[Row], str] | None = None


@dataclass(frozen=True)
class Table:
    """Columns and rows of exact values.

    ``title`` stands above it. ``rest`` are lines that are not shown, added up as one more row for people. ``exact`` are
    the keys that CSV holds; by default those of the columns. A row that ``is_wrong`` is red on a terminal.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    rest: Row | None = None
    exact: Sequence[str] = ()
    is_wrong: Callable[[Row], bool] | None = None


@dataclass(frozen=True)
class Lines:
    """Sentences: those of a ``head`` say what the result is, ``notes`` what its columns are of and how they add up.

    ``title`` stands above them.
    """

    lines: Iterable[str]
    role: Literal["head", "notes"] = "notes"
    title: str = ""

    def __post_init__(self) -> None:
        """Keep the sentences of a generator, which each format reads."""
        object.__setattr__(self, "lines", tuple(self.lines))


@dataclass(frozen=True)
class Labelled:
    """Sentences that each stand under a word: ``STEP    50.57 ms``; a sentence without one goes on with the last."""

    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Document:
    """A command's result.

    ``data`` is the body of the JSON, where ``schema``, ``profkit``, ``command``, ``warnings`` and ``self_check`` are
    added. ``parts`` stand in the order in which a person reads them; ``csv`` is the one table that CSV holds.
    ``findings`` are the result's own, ``self_check`` those on the capture, None where nothing was checked.
    """

    command: str
    data: Mapping[str, Any]
    parts: Sequence[Table | Lines | Labelled]
    csv: Table
    findings: Sequence[Finding] = ()
    self_check: Sequence[Finding] | None = None
    has_warnings: bool = False
    """Its parts hold the warnings: no format adds them for people."""
    schema: int = SCHEMA

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in (*(self.self_check or ()), *self.findings) if finding.verdict == "failed"]

    @property
    def warnings(self) -> list[Finding]:
        """Return what else a reader must know, each thing once, unless the parts say it."""
        if self.has_warnings:
            return []
        warnings = [finding for finding in (*self.findings, *(self.self_check or ())) if finding.verdict == "warning"]
        return list({finding.message: finding for finding in warnings}.values())


def render(
    document: Document,
    style: Format,
    *,
    full_names: bool = False,
    with_warnings: bool = True,
    paint: Paint = plainly,
) -> str:
    """Return the document as text.

    ``full_names`` does not shorten what does not fit the width of a screen, nor the absolute paths in JSON. Warnings
    are left out without ``with_warnings``: on a screen they stand on standard error, and a file would lack them; JSON,
    Markdown and LaTeX always hold them. ``paint`` colours a text by its role; only a screen has colours.
    """
    if style == "json":
        return json_text(_to_json(document, full_names))
    if style == "csv":
        keys = document.csv.exact or [column.key for column in document.csv.columns]
        return csv_lines(keys, [[row.get(key) for key in keys] for row in document.csv.rows])
    if style == "markdown":
        return _render_markdown(document)
    return _render_latex(document) if style == "latex" else _render_screen(document, full_names, with_warnings, paint)


def without_formulas(table: Table) -> Table:
    """Return a table whose texts no spreadsheet takes for formulas: ``'`` stands before =, +, -, @, tab and return."""
    rows = [
        {
            key: f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
            for key, value in row.items()
        }
        for row in table.rows
    ]
    return replace(table, rows=rows)


def _to_json(document: Document, full_names: bool) -> dict[str, Any]:
    head = {"schema": document.schema, "profkit": __version__, "command": document.command}
    warnings = [
        {"code": finding.code, "message": finding.message, "verdict": finding.verdict} for finding in document.findings
    ]
    body = document.data if full_names else {key: _shown(key, value) for key, value in document.data.items()}
    data = {**head, **body, "warnings": warnings}
    if document.self_check is None:
        return data
    data["warnings"] = warnings + [
        {"code": f"self-check-{finding.code}", "message": finding.message, "verdict": finding.verdict}
        for finding in document.self_check
        if finding.verdict != "note"
    ]
    passed = all(finding.verdict != "failed" for finding in document.self_check)
    return {**data, "self_check": {"passed": passed, "findings": [vars(finding) for finding in document.self_check]}}


def _shown(key: str, value: Any) -> Any:
    """Return a path without the folders of this machine: from the working directory on, else the name alone."""
    if isinstance(value, dict):
        return {name: _shown(name, inner) for name, inner in value.items()}
    if key not in _PATHS or not isinstance(value, str) or not os.path.isabs(value):
        return value
    path = Path(value)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _failure_lines(document: Document) -> list[str]:
    failures = document.failures
    return [UNTRUSTED, *(f"  ✗ {make_visible(finding.message)}" for finding in failures)] if failures else []


def _render_screen(document: Document, full_names: bool, with_warnings: bool, paint: Paint) -> str:
    width = screen_width()
    blocks = ["\n".join(_painted(wrap(line, width), "wrong", paint) for line in _failure_lines(document))]
    for part in document.parts:
        if isinstance(part, Table):
            blocks.append(render_table(part, full_names=full_names, width=width, paint=paint))
        elif isinstance(part, Labelled):
            blocks.append("\n".join(wrap_labelled(part, width)))
        else:
            title, indent = ([_painted(wrap(part.title, width), "title", paint)], "  ") if part.title else ([], "")
            blocks.append("\n".join([*title, *(wrap(indent + line, width) for line in part.lines)]))
    if with_warnings:
        blocks.append("\n".join(wrap(f"warning: {finding.message}", width) for finding in document.warnings))
    return "\n\n".join(filter(None, blocks))


def wrap(line: str, width: int) -> str:
    """Return a sentence in lines of at most ``width`` characters, moved in behind the first."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    return textwrap.fill(
        make_visible(line), width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
    )


def wrap_labelled(part: Labelled, width: int) -> Iterator[str]:
    """Yield the lines of labelled sentences, each sentence moved in behind the longest word."""
    room = max((len(label) + 2 for label, _ in part.lines if label), default=0)
    for label, text in part.lines:
        yield textwrap.fill(
            make_visible(text),
            width,
            initial_indent=label.ljust(room),
            subsequent_indent=" " * (room + 2 if not label or _is_numbered(text) else room),
            break_on_hyphens=False,
        )


def _is_numbered(text: str) -> bool:
    """Return whether a sentence begins with its number in a list: ``1 torch.compile(model)``."""
    return text[:1].isdigit() and text[1:2] == " " and not text[2:4].endswith("s")


def _painted(text: str, role: Role, paint: Paint) -> str:
    """Return text painted line by line: a pager shows colours that span lines on the first one alone."""
    return "\n".join(paint(line, role) for line in text.split("\n"))


def render_table(table: Table, *, full_names: bool = False, width: int = WIDTH, paint: Paint = plainly) -> str:
    """Return a table for a screen of ``width`` columns, long cells shortened in the middle unless ``full_names``."""
    columns = [column for column in table.columns if not column.wide]
    rows = [[make_visible(_screen_cell(column, row)) for column in columns] for row in table.rows]
    rows += [[make_visible(cell) for cell in _rest_cells(table.rest, columns)]] if table.rest is not None else []
    widths = [max(len(column.heading), *(len(row[at]) for row in rows), 0) for at, column in enumerate(columns)]
    spare = width - (sum(widths) + 2 * (len(widths) - 1))
    flexible = [] if full_names else [at for at, column in enumerate(columns) if column.flexible]
    usual, least = ([min(widths[at], bound) for at in flexible] for bound in _LEAST_WIDTHS)
    fits_at_least = spare + sum(widths[at] for at in flexible) >= sum(least)
    for at, to in zip([*flexible, *flexible], [*usual, *(least if fits_at_least else usual)], strict=True):
        shrink = min(max(-spare, 0), max(widths[at] - to, 0))
        widths[at] -= shrink
        spare += shrink
    fitted = [
        shorten_apart(_brief(column, table.rows, [row[at] for row in rows], widths[at]), widths[at])
        if column.flexible
        else [row[at] for row in rows]
        for at, column in enumerate(columns)
    ]
    headings = [shorten(column.heading, width) for column, width in zip(columns, widths, strict=True)]
    lines = [paint(_line(headings, widths, columns).rstrip(), "heading")]
    lines += [paint("  ".join("─" * size for size in widths), "rule")]
    for at, row in enumerate(zip(*fitted, strict=True)):
        is_wrong = table.is_wrong is not None and at < len(table.rows) and table.is_wrong(table.rows[at])
        line = _line(row, widths, columns).rstrip()
        lines.append(paint(line, "wrong") if is_wrong else line)
    text = "\n".join(lines)
    return f"{paint(make_visible(table.title), 'title')}\n{text}" if table.title else text


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    return "  ".join(
        cell.rjust(width) if column.unit.right else cell.ljust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    )


def _screen_cell(column: Column, row: Row) -> str:
    return _cell(column, row.get(column.key)) if column.on_screen is None else column.on_screen(row)


def _brief(column: Column, rows: Sequence[Row], cells: Sequence[str], width: int) -> list[str]:
    briefs = [] if column.brief is None else [make_visible(column.brief(row)) for row in rows]
    chosen = [brief if len(brief) <= width < len(cell) else cell for brief, cell in zip(briefs, cells, strict=False)]
    return [*chosen, *cells[len(chosen) :]]


def _cell(column: Column, value: Any) -> str:
    return UNKNOWN if value is None else column.unit.show(value)


def _rest_cells(rest: Row, columns: Sequence[Column]) -> list[str]:
    return [_cell(column, rest[column.key]) if column.key in rest else "" for column in columns]


def _cells(table: Table) -> list[list[str]]:
    rows = [[_cell(column, row.get(column.key)) for column in table.columns] for row in table.rows]
    return [*rows, _rest_cells(table.rest, table.columns)] if table.rest is not None else rows


def _render_markdown(document: Document) -> str:
    blocks = ["\n".join(map(escape_markdown, _failure_lines(document)))]
    for part in document.parts:
        if isinstance(part, Labelled):
            blocks.append("\n".join(f"- {_marked(label)}{escape_markdown(text)}" for label, text in part.lines))
            continue
        if isinstance(part, Lines):
            shape = "**{}**" if part.role == "head" else "- {}"
            title = f"**{escape_markdown(part.title)}**\n\n" if part.title else ""
            blocks.append(title + "\n".join(shape.format(escape_markdown(line)) for line in part.lines))
            continue
        title = f"**{escape_markdown(part.title)}**\n\n" if part.title else ""
        head = "| " + " | ".join(column.heading for column in part.columns) + " |"
        rule = "|" + "|".join("---:" if column.unit.right else "---" for column in part.columns) + "|"
        rows = ["| " + " | ".join(map(escape_markdown, cells)) + " |" for cells in _cells(part)]
        blocks.append(title + "\n".join([head, rule, *rows]))
    blocks.append("\n".join(f"- warning: {escape_markdown(finding.message)}" for finding in document.warnings))
    return "\n\n".join(filter(None, blocks))


def _marked(label: str) -> str:
    return f"**{escape_markdown(label)}** " if label else ""


def _render_latex(document: Document) -> str:
    """Return the tables as booktabs tabulars; every sentence is a comment, for a table is what goes into a paper."""
    lines = [f"% {make_visible(line)}" for line in _failure_lines(document)]
    for part in document.parts:
        if isinstance(part, Labelled):
            lines += [f"% {make_visible(label)} {make_visible(text)}" for label, text in part.lines]
            continue
        lines += [f"% {make_visible(part.title)}"] if part.title else []
        if isinstance(part, Lines):
            lines += [f"% {make_visible(line)}" for line in part.lines]
            continue
        spec = "".join("r" if column.unit.right else "l" for column in part.columns)
        head = " & ".join(escape_latex(column.heading) for column in part.columns) + r" \\"
        rows = [" & ".join(map(escape_latex, cells)) + r" \\" for cells in _cells(part)]
        lines += [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
        lines += [r"\end{tabular}", ""]
    lines += [f"% warning: {make_visible(finding.message)}" for finding in document.warnings]
    return "\n".join(lines).rstrip("\n")
