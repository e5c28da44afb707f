"""Open whatever a person has of a run: a trace, a snapshot, or a run directory with either or both."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from profkit.analysis.memory.opened import OpenedSnapshot, read_snapshot
from profkit.analysis.opened import OpenedTrace, read_trace
from profkit.run.directory import Run, find_run

_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"


@dataclass(frozen=True, eq=False)
class OpenedCapture:
    """What was opened: ``run`` is None of a file that lies in no run directory."""

    path: Path
    run: Run | None
    trace: OpenedTrace | None
    snapshot: OpenedSnapshot | None


def open_capture(path: str | Path, open_trace: Callable[[Path], OpenedTrace] = read_trace) -> OpenedCapture:
    """Open a trace, a snapshot (told by its content) or a run directory with all that it holds.

    A file of a run directory keeps its run's manifest, and a trace of one its run's log.

    Args:
        path: the capture.
        open_trace: what opens a trace or a run directory's; the command line's also exports reports.

    Raises:
        CaptureError: a file cannot be read or is none of these.
        RunError: a directory that is no run.
    """
    path = Path(path)
    run = find_run(path)
    if run is not None and path.is_dir():
        trace = open_trace(path) if run.traces else None
        return OpenedCapture(path, run, trace, read_snapshot(path) if run.snapshots else None)
    if _is_pickle(path):
        return OpenedCapture(path, run, None, read_snapshot(path))
    is_the_runs = run is not None and run.find_trace() == path and not run.rank_traces
    return OpenedCapture(path, run, open_trace(path.parent if is_the_runs else path), None)


def _is_pickle(path: Path) -> bool:
    """Return whether a file, unzipped, begins as a pickle does; what cannot be read is left to the reader of traces."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
        if head == _GZIP:
            with gzip.open(path) as content:
                head = content.read(1)
    except (OSError, EOFError, zlib.error):
        return False
    return head[:1] == _PICKLE
