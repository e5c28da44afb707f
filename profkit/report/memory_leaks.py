"""Print what each step left behind, and which stacks are suspected of a leak."""

from __future__ import annotations

from profkit.analysis.memory.leaks import LeakCheck
from profkit.report.formats import Column, Table, make_visible
from profkit.report.units import format_bytes

_STEPS_SHOWN = 10


def leak_table(check: LeakCheck) -> Table:
    """Return a line for each of the last steps; the stack is the one that left most of it."""
    columns = (
        Column("left behind", "bytes"),
        Column("began in", "began_in", right=False),
        Column("alive after", "step", right=False),
        Column("most of it from", "stack", right=False, flexible=True),
    )
    cells = [
        (format_bytes(step.bytes), step.began_in, step.step, step.by_stack[0].label if step.by_stack else "")
        for step in check.steps[-_STEPS_SHOWN:]
    ]
    return Table(columns, cells, [])


def leak_lines(check: LeakCheck) -> list[str]:
    """Return who is suspected, that nobody is, or that there is nothing to judge."""
    if not check.steps:
        return ["leak check: the history has fewer than two whole steps"]
    suspects = [
        f"suspected: {format_bytes(row.bytes)} in {row.count:,} allocations a step, {row.label}"
        for row in check.suspects
    ]
    return [make_visible(line) for line in suspects or ["no stack left bytes behind in each of the last two steps"]]


def leak_rows(check: LeakCheck) -> list[tuple[object, ...]]:
    """Return the exact rows for CSV: every stack of every step; the phase is the step after which it is alive."""
    return [
        ("left behind", row.label, row.bytes, "", row.count, "", step.step, "")
        for step in check.steps
        for row in step.by_stack
    ]
