"""What a run with ``--memory`` says of it at its end: the peak, whether the allocator agrees, what recording cost."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from profkit.analysis.memory.opened import read_snapshot
from profkit.report.memory import render_memory
from profkit.run_directory import read_manifest

_TOP = 3


def render_memory_summary(run: Path) -> str:
    """Return the memory table of a run and what recording cost, against the steps that ran unrecorded."""
    text = render_memory(read_snapshot(run).memory(), top=_TOP)
    manifest = read_manifest(run)
    twin = "clean" if "clean" in manifest else "attached"
    recorded, clean = (_median_step_ns(manifest.get(part)) for part in ("memory", twin))
    if recorded is None or clean is None:
        return text
    times = f"median step {recorded / 1e6:.2f} ms, {clean / 1e6:.2f} ms without"
    return f"{text}\n\nrecording the allocator cost {recorded / clean - 1:+.1%} a step ({times})"


def _median_step_ns(part: Any) -> float | None:
    if not isinstance(part, dict) or not part.get("steps"):
        return None
    return float(median(step["step_ns"] for step in part["steps"]))
