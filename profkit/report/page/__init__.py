"""One HTML page of a run. Here what its sections share: a capture's results, tables, packed data, plain texts."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from profkit.analysis.causes.advice import AdviceResult, find_advice
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.kernels.summary import KernelsResult
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import Summary
from profkit.errors import Finding
from profkit.report import make_visible
from profkit.report.document import UNKNOWN, Column, Labelled, Lines, Table

_LONGEST_TABLE = 400
"""More rows than these are added up: a page must open, and nobody reads them."""

_PATH = re.compile(r"""(?<![\w.*)\]>/\\-])[~/][^\s:=,;'"<>]*""")
_HOME = re.compile(r"/(?:home|Users)/[^/]+")
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")


class Results:
    """What several sections show of one capture; None where it did not record what a result is of."""

    def __init__(self, capture: OpenedCapture) -> None:
        self.capture = capture
        self.name = without_folders(str(capture.path))
        """The capture as commands on the page name it."""

    @cached_property
    def summary(self) -> Summary:
        return summarize_capture(self.capture)

    @cached_property
    def advice(self) -> AdviceResult:
        return find_advice(self.capture, self.summary)

    @cached_property
    def kernels(self) -> KernelsResult | None:
        trace = self.capture.trace
        return trace.kernels() if trace is not None and len(trace.trace.work) else None

    @cached_property
    def efficiency(self) -> EfficiencyResult | None:
        trace = self.capture.trace
        is_on_gpu = self.kernels is not None and self.kernels.measure == "gpu-kernel"
        return trace.efficiency() if trace is not None and is_on_gpu else None

    @cached_property
    def memory(self) -> MemoryResult | None:
        """The account of the device with the highest peak, at that peak."""
        return None if self.capture.snapshot is None else self.capture.snapshot.memory()

    @property
    def steps(self) -> int | None:
        """Over how many measured steps the times of ranges are sums; None if some lie outside them."""
        return None if self.efficiency is None else self.efficiency.step_count


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


def view_table(table: Table) -> dict[str, Any]:
    """Return what the template needs of a table: each cell as text, with the exact value behind it.

    Columns of which no row knows anything are left out. The rows beyond `_LONGEST_TABLE` are counted in ``hidden``, and
    the page says so.
    """
    rest = table.rest
    columns = [
        column
        for column in table.columns
        if not table.rows or any(row.get(column.key) is not None for row in (*table.rows, *([rest] if rest else [])))
    ]
    rows = [[_cell(column, row.get(column.key)) for column in columns] for row in table.rows[:_LONGEST_TABLE]]
    return {
        "title": table.title,
        "columns": [{"key": column.key, "heading": column.heading, "right": column.unit.right} for column in columns],
        "rows": rows,
        "hidden": max(len(table.rows) - _LONGEST_TABLE, 0),
        "rest": None
        if rest is None
        else [_cell(column, rest[column.key]) if column.key in rest else _EMPTY for column in columns],
    }


_EMPTY = {"text": "", "value": ""}


def _cell(column: Column, value: Any) -> dict[str, str]:
    text = UNKNOWN if value is None else make_visible(column.unit.show(value))
    whole = make_visible(str(value)) if isinstance(value, str) else ""
    return {"text": text, "value": _plain(value), "title": whole if whole != text else ""}


def _plain(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "" if value is None else make_visible(value)
    return repr(value) if isinstance(value, float) else str(value)


def view_parts(parts: Iterable[Table | Lines | Labelled]) -> list[dict[str, Any]]:
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
