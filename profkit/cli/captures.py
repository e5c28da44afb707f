"""Open whatever capture a person names."""

from __future__ import annotations

from pathlib import Path

from profkit.analysis.opened import OpenedTrace, read_trace
from profkit.run.directory import find_run

_REPORT = ".nsys-rep"


def open_trace(path: Path, *, rank: int | None = None, thread_only: bool = False) -> OpenedTrace:
    """Return the opened trace; a ``.nsys-rep`` is exported first, into the user's cache, if nsys is here.

    Raises:
        TraceError: the file cannot be read.
        ToolError: a report, and no nsys to export it.
        UsageError: there is no such rank.
    """
    run = find_run(path)
    report = run.find_trace() if run is not None and path.is_dir() else path
    if report.suffix == _REPORT and report.is_file():
        from profkit.launch.export import export_report

        opened = read_trace(export_report(report), rank=rank, thread_only=thread_only)
        opened.run = run
        return opened
    return read_trace(path, rank=rank, thread_only=thread_only)
