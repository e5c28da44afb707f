"""What can be compared or checked: a trace, a snapshot, or a run directory with either or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.opened_trace import OpenedTrace
from profkit.run.directory import Run


@dataclass(frozen=True, eq=False)
class OpenedCapture:
    """An opened capture, made by `profkit.reading`; ``run`` is None for a file outside a run directory."""

    path: Path
    run: Run | None
    trace: OpenedTrace | None
    snapshot: OpenedSnapshot | None
