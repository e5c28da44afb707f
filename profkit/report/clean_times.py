"""What the steps of a run took without a profiler, and what profiling cost them: the two are never mixed."""

from __future__ import annotations

from statistics import median
from typing import Any

from profkit.report.formats import Column, Table, render_table
from profkit.report.units import format_ns

_COLUMNS = (
    Column("wall time of", "phase", right=False),
    Column("unprofiled", "clean_ns"),
    Column("from", "clean_min_ns"),
    Column("to", "clean_max_ns"),
    Column("profiled", "profiled_ns"),
    Column("cost", "cost"),
)
# Beyond this the steps differ so much among themselves that a median of a few says little.
_WIDE = 1.5


def render_clean_times(manifest: dict[str, Any]) -> str:
    """Return the table of unprofiled and profiled times per phase (medians over steps); "" where there are none."""
    clean, profiled = (_samples(manifest.get(part)) for part in ("clean", "profiled"))
    rows = [(name, clean[name], profiled[name]) for name in clean if profiled.get(name)]
    if not rows:
        return ""
    cells = [
        [
            name,
            *map(format_ns, (round(median(a)), min(a), max(a), round(median(b)))),
            f"{median(b) / median(a) - 1:+.0%}",
        ]
        for name, a, b in rows
    ]
    count = len(rows[0][1])
    text = f"medians of {count} steps, each of the two in a process of its own"
    steps = clean.get("step", [])
    if len(steps) > 1 and max(steps) > _WIDE * min(steps):
        text += "; the unprofiled steps differ widely:\nother work on the machine, or too little warm-up"
    return f"{render_table(Table(_COLUMNS, cells, cells))}\n\n{text}"


def _samples(part: Any) -> dict[str, list[int]]:
    """Return phase → its time in each step, the whole step last."""
    steps = part.get("steps") if isinstance(part, dict) else None
    if not steps:
        return {}
    return {key.removesuffix("_ns"): [step[key] for step in steps if key in step] for key in steps[0]}
