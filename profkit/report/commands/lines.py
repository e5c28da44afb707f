"""The document of ``profkit efficiency --by line``: the lines of source behind a step's time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profkit.analysis.lines import LinesResult
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import NS, TEXT, Unit, format_count
from profkit.run.lines import LineTime

_WAITS = Unit(lambda value: f"{value:.3g}" if value else UNKNOWN)
_TIME = Unit(lambda value: NS.show(value) if value else UNKNOWN)


def build_lines_document(result: LinesResult) -> Document:
    """Return the lines, the longest first."""
    files = _short_names({row.file for row in result.lines if row.file is not None})
    rows: list[dict[str, Any]] = [
        {**vars(row), "place": f"{files[row.file or '']}:{row.line}", "called": row.called or ""}
        for row in result.lines
    ]
    head = f"Lines of source in {format_count(result.steps, 'step')} of {NS.show(result.step_ns)}"
    columns = (
        Column("place", "line", TEXT, flexible=True),
        Column("function", "function", TEXT, flexible=True),
        Column("called", "calls", TEXT, flexible=True),
        Column("phase", "phase", TEXT, on_screen=_show_phase),
        Column("time_ns", "per step", _TIME),
        Column("error_ns", "±", _TIME),
        Column("waiting_ns", "waiting", _TIME),
        Column("waits", "waits", _WAITS),
    )
    table = Table(columns, rows, exact=tuple(LineTime.__dataclass_fields__))
    return Document("lines", result.to_dict(), (Lines([head], "head"), table, Lines(_notes(result))), table)


def _notes(result: LinesResult) -> Iterator[str]:
    if result.is_scaled:
        yield "times are scaled, phase by phase, to the unprofiled steps; ± is the standard error"
    else:
        yield "times are as sampled: no unprofiled step is near enough to scale them to; ± is the standard error"
    if result.unnamed_ns:
        yield f"{NS.show(result.unnamed_ns)} a step with no line of your own, or too few samples to name one"
    if result.batch_ns is not None:
        yield f"workers of data loaders: per batch, of which one takes {NS.show(result.batch_ns)}"
    if result.no_waits is not None:
        yield f"calls that wait for the GPU are not known: {result.no_waits}"
    else:
        yield "waits: calls that wait for the GPU, per step; torch does not see torch.cuda.synchronize() and NCCL"
    yield "waiting for the GPU is not work: removing a wait helps only if the GPU is idle meanwhile"


def describe_line(line: LineTime) -> str:
    """Return one line of source and what it takes, in a few words."""
    place = f"{Path(line.file or '').name}:{line.line} {line.function}"
    what = f"{place}: {line.called}" if line.called else place
    waits = f", of it {NS.show(line.waiting_ns)} waiting for the GPU" if line.waiting_ns else ""
    times = f" ({_WAITS.show(line.waits)} waits)" if line.waits else ""
    return f"{what} {NS.show(line.time_ns)}{waits}{times}"


def _show_phase(row: Row) -> str:
    return "loader worker" if row["thread"] == "worker" else str(row["phase"] or UNKNOWN)


def _short_names(files: set[str]) -> dict[str, str]:
    """Return the shortest ends of paths that tell the files apart."""
    short = {}
    for file in files:
        parts = Path(file).parts
        others = [Path(other).parts for other in files if other != file]
        size = 1
        while size < len(parts) and any(other[-size:] == parts[-size:] for other in others):
            size += 1
        short[file] = str(Path(*parts[-size:]))
    return short
