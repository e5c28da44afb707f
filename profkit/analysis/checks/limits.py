"""Refuse a trace whose times are so far off that no sum over them can be held in 64 bits."""

from __future__ import annotations

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import Trace

_LIMIT_NS = 1 << 62


def refuse_impossible_times(trace: Trace) -> None:
    """Raise where a time or a sum of durations exceeds 2⁶² ns, 146 years: a damaged value that would wrap around.

    Raises:
        TraceError: the trace holds such times.
    """
    tables = (trace.work, trace.copies, trace.ranges, trace.calls)
    for table in tables:
        if not len(table):
            continue
        extreme = max(
            abs(int(edge)) for column in (table.start_ns, table.end_ns) for edge in (column.min(), column.max())
        )
        # A double cannot wrap.
        total = float(np.abs(table.end_ns - table.start_ns).sum(dtype=np.float64))
        if max(extreme, total) >= _LIMIT_NS:
            raise TraceError(
                f"{trace.path}: holds impossible times (up to {max(extreme, total):.3g} ns, over a century); the file"
                " is damaged: export or record it again"
            )
