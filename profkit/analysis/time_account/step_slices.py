"""One step as it ran: what its threads did and what each GPU stream ran, as slices that a picture can hold.

The slices of a lane that are too short to be seen, and close together, become one; its ``busy_ns`` and ``count`` keep
what they were. All kernels that were launched under the step are there, and nothing else that the GPU ran meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.placing.nesting import NO_RANGE
from profkit.analysis.time_account.gpu_steps import GpuStep
from profkit.analysis.time_account.steps import measured_ranges
from profkit.analysis.tree.selection import select_ranges
from profkit.names import STEP
from profkit.trace.columns import Calls, Copies, Ints, Ranges, Work, distinct_values, rows_by_value

MOST_SLICES = 3000
"""As many a lane may have before its shortest ones are merged."""

_DEEPEST = 24

Kind = Literal["ranges", "calls", "kernels", "copies"]


@dataclass(frozen=True, eq=False)
class Lane:
    """Slices that follow one another: of one thread at one depth of its ranges, its CUDA calls, or one GPU stream.

    ``row`` is the row of the trace's table (`kind`) that a slice stands for, of several the first.
    """

    name: str
    kind: Kind
    depth: int
    row: Ints
    start_ns: Ints
    end_ns: Ints
    busy_ns: Ints
    count: Ints


@dataclass(frozen=True, eq=False)
class StepSlices:
    """The lanes of one step; ``instance`` is its number among the ranges of its name, as ``--instance`` counts."""

    name: str
    instance: int
    start_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]

    @property
    def merged(self) -> int:
        """Return how many slices were merged into others."""
        return sum(int((lane.count - 1).sum()) for lane in self.lanes)


def slice_median_step(attribution: Attribution, steps: Sequence[GpuStep]) -> StepSlices | None:
    """Return the lanes of the step whose time on the GPU is the median, of an even number the lower; None of none."""
    index = _find_median(attribution, steps)
    if index is None:
        return None
    trace = attribution.trace
    ranges, member = trace.ranges, np.array([index])
    kernels, copies = (np.sort(placed.under(member).rows) for placed in (attribution.work, attribution.copies))
    start, end = int(ranges.start_ns[index]), int(ranges.end_ns[index])
    for table, rows in ((trace.work, kernels), (trace.copies, copies)):
        start = min(start, int(table.start_ns[rows].min(initial=start)))
        end = max(end, int(table.end_ns[rows].max(initial=end)))
    name = trace.names[int(ranges.name[index])]
    same = select_ranges(attribution, name).tolist()
    lanes = [*_host_lanes(attribution, index, kernels), *_gpu_lanes(attribution, kernels, copies)]
    return StepSlices(name, same.index(index), start, end, tuple(lanes))


def _find_median(attribution: Attribution, steps: Sequence[GpuStep]) -> int | None:
    ranges, trace = attribution.trace.ranges, attribution.trace
    if not steps:
        return None
    chosen = sorted(steps, key=lambda step: (step.gpu.span_ns, step.start_ns))[(len(steps) - 1) // 2]
    for index in measured_ranges(attribution)[STEP].tolist():
        process = int(ranges.process[index])
        if ranges.start_ns[index] == chosen.start_ns and trace.process_ids.get(process, process) == chosen.process:
            return int(index)
    return None


def _host_lanes(attribution: Attribution, index: int, kernels: Ints) -> Iterator[Lane]:
    """Yield a lane for each depth of ranges, and one of CUDA calls, of each thread that opened or launched something.

    The step's own thread comes first.
    """
    trace = attribution.trace
    ranges, calls = trace.ranges, trace.calls
    start, end = int(ranges.start_ns[index]), int(ranges.end_ns[index])
    inside = (ranges.start_ns >= start) & (ranges.end_ns <= end) & (ranges.process == ranges.process[index])
    inside &= ~attribution.is_mirror & ranges.was_open
    called = (calls.start_ns >= start) & (calls.end_ns <= end) & (calls.process == ranges.process[index])
    launching = distinct_values(trace.work.launch_thread[kernels]).tolist()
    own = int(ranges.thread[index])
    threads = [own, *(thread_id for thread_id in launching if thread_id != own and thread_id >= 0)]
    depth = _depths(attribution.parent)
    for thread in threads:
        name = "Python thread" if thread == own else trace.thread_names.get(thread) or "another thread"
        name = f"autograd thread ({name})" if "autograd" in name else name
        mine = np.flatnonzero(inside & (ranges.thread == thread))
        levels = depth[mine]
        for level in distinct_values(levels).tolist()[:_DEEPEST]:
            rows = mine[levels == level]
            yield _lane(name, "ranges", rows, ranges, level - int(levels.min()))
        rows = np.flatnonzero(called & (calls.thread == thread))
        if len(rows):
            yield _lane(name, "calls", rows, calls)


def _gpu_lanes(attribution: Attribution, kernels: Ints, copies: Ints) -> Iterator[Lane]:
    trace = attribution.trace
    work, moved = trace.work, trace.copies
    for device, rows in rows_by_value(work.device[kernels]).items():
        for stream, some in rows_by_value(work.stream[kernels[rows]]).items():
            name = f"GPU {device}, stream {stream}"
            yield _lane(name, "kernels", kernels[rows][some], work)
    for device, rows in rows_by_value(moved.device[copies]).items():
        yield _lane(f"GPU {device}, copies and fills", "copies", copies[rows], moved)


def _depths(parent: Ints) -> Ints:
    depth, above = np.zeros(len(parent), dtype=np.int64), parent
    while (above != NO_RANGE).any():
        inner = above != NO_RANGE
        depth += inner
        above = np.where(inner, parent[above], NO_RANGE)
    return depth


def _lane(name: str, kind: Kind, rows: Ints, table: Ranges | Calls | Work | Copies, depth: int = 0) -> Lane:
    """Return the rows in order of their start, short ones that lie close together as one."""
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    start, end = table.start_ns[rows], table.end_ns[rows]
    first, shortest = np.arange(len(rows)), 256
    while len(first) > MOST_SLICES:
        # Of both neighbours neither can be seen at this width, nor the gap between them.
        is_short = end - start < shortest
        joins = is_short[1:] & is_short[:-1] & (start[1:] - np.maximum.accumulate(end)[:-1] < shortest)
        first = np.flatnonzero(np.concatenate([[True], ~joins]))
        shortest *= 2
    busy, count = np.add.reduceat(end - start, first), np.diff(np.append(first, len(rows)))
    return Lane(name, kind, depth, rows[first], start[first], np.maximum.reduceat(end, first), busy, count)
