"""What a checkpoint costs: the kernel time of the ranges that run their forward pass a second time."""

from __future__ import annotations

from collections.abc import Sequence

from profkit.analysis.edits.outcome import Cost
from profkit.analysis.range_tree import RangesResult
from profkit.names import BACKWARD


def cost_of_ranges(tree: RangesResult) -> Cost:
    """Return what tells the kernel time per step of some ranges in the forward pass, from a trace's tree of ranges."""

    def cost(names: Sequence[str]) -> int | None:
        wanted = set(names)
        rows = [row for row in tree.ranges if row.name in wanted and BACKWARD not in row.path.split("/")]
        if not rows or not tree.steps:
            return None
        return sum(row.kernel_time_ns for row in rows) // tree.steps

    return cost
