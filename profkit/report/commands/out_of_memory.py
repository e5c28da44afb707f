"""What a run says of the allocation that ended it: why it failed, and who held the memory then."""

from __future__ import annotations

from pathlib import Path

from profkit.analysis.memory.oom import last_failure
from profkit.analysis.memory.opened_snapshot import FAILURE
from profkit.reading import open_snapshot
from profkit.report.commands.memory import build_memory_document
from profkit.report.document import render

_TOP = 3


def render_out_of_memory(run: Path, rank: int) -> str:
    """Return why a rank's last allocation failed, and who held the memory then.

    Raises:
        CaptureError: the snapshot cannot be read.
        UsageError: it shows no allocation that failed.
    """
    opened = open_snapshot(run, rank=rank)
    failed = [one for one in opened.devices.values() if last_failure(one) is not None]
    device = failed[-1].device.index if failed else None
    return render(build_memory_document(opened.memory(at=FAILURE, device=device), top=_TOP), "table")
