"""What a run with ``--memory`` says at its end: the peak, whether the allocator agrees, and what recording cost."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from profkit.analysis.memory.oom import last_failure
from profkit.analysis.memory.opened_snapshot import FAILURE
from profkit.reading import open_snapshot
from profkit.report.document import render
from profkit.report.memory import build_memory_document
from profkit.run.directory import Run
from profkit.run.samples import Samples

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


def render_memory_summary(run: Path) -> str:
    """Return the memory table of a run, and how much longer its steps took while the allocator was recorded."""
    text = render(build_memory_document(open_snapshot(run).memory(), top=_TOP), "table")
    manifest = Run(run).manifest
    recorded = () if manifest.memory is None else Samples(manifest.memory.steps).step_ns()
    clean = () if manifest.unprofiled is None else manifest.unprofiled.step_ns()
    if not recorded or not clean:
        return text
    times = f"median step {median(recorded) / 1e6:.2f} ms, {median(clean) / 1e6:.2f} ms without"
    cost = median(recorded) / median(clean) - 1
    return f"{text}\n\nrecording the allocator changed the step time by {cost:+.1%} ({times})"
