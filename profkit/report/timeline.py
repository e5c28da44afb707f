"""Write an allocation timeline: an interactive page (``.html``) or a picture for a report (``.png``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from profkit.analysis.memory.bins import bin_history
from profkit.analysis.memory.composition import DeviceMemory, Filter
from profkit.analysis.memory.result import MemoryResult
from profkit.errors import UsageError

Stacking = Literal["category", "stack", "allocation"]
STACKINGS: tuple[Stacking, ...] = ("category", "stack", "allocation")


def write_timeline(
    path: Path, memory: DeviceMemory, result: MemoryResult, *, by: Stacking = "category", wanted: Filter | None = None
) -> None:
    """Write the timeline of one device to ``path``, a page or a picture by its ending.

    Raises:
        UsageError: another ending, or single allocations in a picture.
        OSError: it cannot be written.
    """
    ending = path.suffix.lower()
    if ending not in (".html", ".png"):
        raise UsageError(f"--timeline {path}: a timeline is a page or a picture; end its name in .html or .png")
    if ending == ".png" and by == "allocation":
        raise UsageError("--timeline-by allocation: single allocations are for the page; a picture has no hover")
    bins = bin_history(memory, wanted)
    if ending == ".png":
        from profkit.report.timeline_png import write_picture

        write_picture(path, bins, memory, result, by)
    else:
        from profkit.report.timeline_html import write_page

        write_page(path, bins, memory, result, by)
