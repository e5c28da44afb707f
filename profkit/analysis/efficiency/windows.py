"""When a range has a GPU: the window in which the GPU's work and idleness are the range's own.

A range's kernels may run long after it has closed, so its time on the host is not its time on the GPU. The window of
one instance on one GPU begins when the range opens or, if the GPU is then still at work on what came before, when that
ends, but never after the range's own first kernel (or copy); it ends when the range closes or its last kernel does,
whichever is later. So the idle time before a range's first kernel is the range's, unless there was something to run
first, and the windows of ranges that follow one another on a stream do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import NEVER, Attribution
from profkit.analysis.efficiency.gpu_time import GpuTime
from profkit.trace.columns import Ints


@dataclass(frozen=True, eq=False)
class Windows:
    """One row per range and GPU that the range launched work on; ``member`` is the range's place among those asked."""

    member: Ints
    device: Ints
    start_ns: Ints
    end_ns: Ints


def find_windows(attribution: Attribution, members: Ints, times: dict[int, GpuTime]) -> Windows:
    """Return the windows of the ranges ``members``, GPU by GPU."""
    trace = attribution.trace
    ranges = trace.ranges
    tables = ((trace.work, attribution.work), (trace.copies, attribution.copies))
    found = []
    for device, time in times.items():
        first = np.full(len(members), NEVER, dtype=np.int64)
        last = np.full(len(members), -NEVER, dtype=np.int64)
        for rows, placed in tables:
            here = rows.device == device
            begun, ended = placed.extent(
                members, np.where(here, rows.start_ns, NEVER), np.where(here, rows.end_ns, -NEVER)
            )
            first, last = np.minimum(first, begun), np.maximum(last, ended)
        some = np.flatnonzero(first < NEVER)
        opened, closed = ranges.start_ns[members[some]], ranges.end_ns[members[some]]
        first, last = first[some], last[some]
        start = np.minimum(first, np.maximum(opened, time.last_end_before(first)))
        found.append((some, np.full(len(some), device, dtype=np.int64), start, np.maximum(closed, last)))
    if not found:
        return Windows(*(np.empty(0, dtype=np.int64) for _ in range(4)))
    return Windows(*(np.concatenate(column) for column in zip(*found, strict=True)))
