"""Open whatever a person has of a run: a trace, a snapshot, or a run directory with either or both."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profkit.analysis.memory.opened import OpenedSnapshot, read_snapshot
from profkit.analysis.opened import OpenedTrace, read_trace
from profkit.run_directory import find_manifest, find_trace, holds_snapshot, holds_trace, rank_traces, read_manifest

_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"


@dataclass(frozen=True, eq=False)
class OpenedCapture:
    """What was opened: ``manifest`` is None of a file that lies in no run directory."""

    path: Path
    manifest: dict[str, Any] | None
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
    if path.is_dir():
        return OpenedCapture(
            path,
            read_manifest(path),
            open_trace(path) if holds_trace(path) else None,
            read_snapshot(path) if holds_snapshot(path) else None,
        )
    manifest = find_manifest(path)
    if _is_pickle(path):
        return OpenedCapture(path, manifest, None, read_snapshot(path))
    is_the_runs = manifest is not None and find_trace(path.parent) == path and not rank_traces(path.parent)
    return OpenedCapture(path, manifest, open_trace(path.parent if is_the_runs else path), None)


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
