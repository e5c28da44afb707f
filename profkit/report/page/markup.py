"""What the sections of the page share: tables with their exact values, packed data, texts without folders."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from profkit.findings import Finding
from profkit.report.document import UNKNOWN, Column, Labelled, Lines, Row, Table
from profkit.report.text import make_visible

_LONGEST_TABLE = 400
"""More rows than these are added up: a page must open, and nobody reads them."""

_PATH = re.compile(r"""(?<![\w.*)\]>/\\-])[~/][^\s:=,;'"<>]*""")
_HOME = re.compile(r"/(?:home|Users)/[^/]+")
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")


@dataclass(frozen=True)
class Section:
    """One part of the page: its anchor, its title, the command that prints its figures, and what its template shows."""

    name: str
    title: str
    command: str
    content: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def without_folders(text: str) -> str:
    """Return a text with each absolute path as a relative one: from the working directory or the packages on."""
    return _PATH.sub(lambda match: _relative(match[0]), text)


def _relative(path: str) -> str:
    root, *folders = path.split("/")
    if not folders or not folders[0] or (not root and not "".join(folders[1:])):
        return path  # an absolute path has two folders at least: "/s" of a unit is none
    if _HOME.fullmatch(path):
        return "~"
    here = f"{os.getcwd()}/"
    if path.startswith(here):
        return path.removeprefix(here)
    installed = _INSTALLED.sub("", path)
    return Path(path).name if installed == path else installed


def view_table(table: Table, *, top: int = _LONGEST_TABLE) -> dict[str, Any]:
    """Return what the template needs of a table: each cell as text, with the exact value behind it.

    Columns of which no row knows anything are left out. The rows beyond ``top`` are counted in ``hidden``, and the page
    says so.
    """
    rest = table.rest
    columns = [
        column
        for column in table.columns
        if not table.rows or any(row.get(column.key) is not None for row in (*table.rows, *([rest] if rest else [])))
    ]
    rows = [[_cell(column, row.get(column.key)) for column in columns] for row in table.rows[:top]]
    return {
        "title": table.title,
        "columns": [{"key": column.key, "heading": column.heading, "right": column.unit.right} for column in columns],
        "rows": rows,
        "hidden": max(len(table.rows) - top, 0),
        "rest": None
        if rest is None
        else [_cell(column, rest[column.key]) if column.key in rest else _EMPTY for column in columns],
    }


def view_tree(table: Table, place: Callable[[Row], tuple[int, int]]) -> dict[str, Any]:
    """Return the view of a table whose first column is a tree.

    ``place`` returns the depth of a row, and how many things of one kind it stands for.
    """
    view = view_table(table)
    for cells, row in zip(view["rows"], table.rows, strict=False):
        cells[0]["depth"], cells[0]["number"] = place(row)
    return view


_EMPTY = {"text": "", "value": ""}


def _cell(column: Column, value: Any) -> dict[str, str]:
    """Return a cell; ``value`` is what JSON holds, ``title`` a text that the cell shortens."""
    text = UNKNOWN if value is None else make_visible(column.unit.show(value))
    whole = make_visible(str(value)) if isinstance(value, str) else ""
    return {"text": text, "value": _plain(value), "title": whole if whole != text else ""}


def _plain(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "" if value is None else make_visible(value)
    return repr(value) if isinstance(value, float) else str(value)


def view_parts(parts: Iterable[Table | Lines | Labelled]) -> list[dict[str, Any]]:
    """Return a document's tables and sentences as the template reads them."""
    return [{"table": view_table(part)} if isinstance(part, Table) else _view_lines(part) for part in parts]


def _view_lines(part: Lines | Labelled) -> dict[str, Any]:
    if isinstance(part, Lines):
        return {"title": part.title, "lines": [make_visible(line) for line in part.lines]}
    return {"title": "", "lines": [make_visible(" ".join(filter(None, line))) for line in part.lines]}


def pack(data: Any) -> Markup:
    """Return data as the page holds it: JSON, gzipped, in base 64. Equal data give equal text."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return Markup(base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii"))


class Interned:
    """Texts by number: equal ones are kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text, which it gets when it is first seen."""
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(without_folders(make_visible(text)))
        return self._numbers[text]
