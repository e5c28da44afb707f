"""The tables of section 6: what held the memory at a moment, by module, by line and by category."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

from profkit.analysis.memory.composition import StackRow
from profkit.analysis.memory.result import MemoryResult
from profkit.report.document import Column, Table
from profkit.report.page.markup import view_table
from profkit.report.units import BYTES, SHARE, TEXT

_FRAME = re.compile(r"^(?P<file>.+):(?P<line>\d{1,9}) ")
_LONGEST_SOURCE = 160
_SIZES = (Column("bytes", "bytes", BYTES), Column("share", "share", SHARE), Column("count", "count"))
_USES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "activations": "activations",
}


def build_tables(result: MemoryResult, source: Path | None) -> dict[str, Any]:
    """Return the three tables; a line has its source text if a folder to look it up in is given."""
    at = result.composition
    modules = [
        {
            "name": row.name,
            **_sizes(row),
            "own_bytes": row.own_bytes,
            **{key: row.categories.get(key, 0) for key in _USES},
        }
        for row in at.by_module
    ]
    used = [Column(key, heading, BYTES) for key, heading in _USES.items() if any(row[key] for row in modules)]
    own = Column("own_bytes", "in no inner module", BYTES)
    lines: list[dict[str, Any]] = [
        {**_sizes(row), "label": row.label, "source": _source(row, source)} for row in at.by_stack
    ]
    text = [] if source is None else [Column("source", "source", TEXT)]
    return {
        "module": view_table(Table((Column("name", "module", TEXT), *_SIZES, own, *used), modules)),
        "line": view_table(Table((*_SIZES, Column("label", "your line ← called from", TEXT), *text), lines)),
        "category": view_table(
            Table((Column("category", "category", TEXT), *_SIZES), [vars(r) for r in at.by_category])
        ),
    }


def _sizes(row: Any) -> dict[str, Any]:
    return {"bytes": row.bytes, "share": row.share, "count": row.count}


def _source(row: StackRow, folder: Path | None) -> str:
    """Return the source line of the innermost frame, where its file lies in the folder; else nothing."""
    match = _FRAME.match(row.stack[0]) if folder is not None and row.stack else None
    if folder is None or match is None:
        return ""
    try:
        file = (folder / match["file"]).resolve()
        if not file.is_relative_to(folder.resolve()) or file.suffix != ".py":
            return ""
    except (OSError, ValueError):
        # The name comes from a capture, and may be none that a file can have.
        return ""
    return linecache.getline(str(file), int(match["line"])).strip()[:_LONGEST_SOURCE]
