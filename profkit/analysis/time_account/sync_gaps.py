"""What calls that wait for the GPU cost: once the host has waited, the GPU has nothing queued until the next launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import unite
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.gpu_time import synchronising_calls
from profkit.analysis.time_account.steps import measured_ranges
from profkit.analysis.tree.range_paths import kind_paths
from profkit.names import STEP
from profkit.trace.columns import Ints, distinct_values, empty_ints

_LOOKED_AT = 100
"""The line in the program is looked up for at most this many of the longest gaps."""


@dataclass(frozen=True)
class SyncGaps:
    """The waiting calls within measured steps, over all of them.

    ``gap_ns`` is how long GPUs then ran nothing, from the end of such a call to the next work on the device; a gap
    after two calls counts once. ``call`` and ``path`` are the name and the innermost range of the call before the
    longest gaps, None if there was no gap.
    """

    count: int
    gap_ns: int
    call: str | None
    path: str | None


def find_sync_gaps(attribution: Attribution) -> SyncGaps:
    """Return what the waiting calls of the measured steps cost."""
    trace = attribution.trace
    calls, ranges = trace.calls, trace.ranges
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    is_inside = np.zeros(len(calls), dtype=np.bool_)
    for process in distinct_values(ranges.process[steps]).tolist():
        own = steps[ranges.process[steps] == process]
        within = unite(ranges.start_ns[own], ranges.end_ns[own]).within(calls.start_ns, calls.end_ns) > 0
        is_inside |= within & (calls.process == process)
    rows = np.flatnonzero(synchronising_calls(trace) & is_inside)
    gaps = np.zeros(len(rows), dtype=np.int64)
    for process in distinct_values(calls.process[rows]).tolist():
        mine = np.flatnonzero(calls.process[rows] == process)
        for device in distinct_values(trace.work.device[trace.work.process == process]).tolist():
            gaps[mine] += _gaps_after(attribution, device, calls.end_ns[rows[mine]])
    if not gaps.any():
        return SyncGaps(len(rows), 0, None, None)
    places: dict[tuple[str, str], int] = {}
    paths = kind_paths(attribution)
    for at in np.argsort(-gaps, kind="stable")[:_LOOKED_AT].tolist():
        row = int(rows[at])
        is_around = (ranges.thread == calls.thread[row]) & (ranges.start_ns <= calls.start_ns[row])
        around = np.flatnonzero(is_around & (ranges.end_ns >= calls.start_ns[row]))
        path = paths[int(around[ranges.start_ns[around].argmax()])] if len(around) else ""
        key = trace.names[int(calls.name[row])], path
        places[key] = places.get(key, 0) + int(gaps[at])
    call, path = max(places, key=lambda key: places[key])
    return SyncGaps(len(rows), int(gaps.sum()), call, path or None)


def _gaps_after(attribution: Attribution, device: int, ends_ns: Ints) -> Ints:
    """Return how long a GPU ran nothing from each moment to its next work; of moments in one gap the first counts."""
    work, copies = attribution.trace.work, attribution.trace.copies
    here, moved = work.device == device, copies.device == device
    busy = unite(
        np.concatenate([work.start_ns[here], copies.start_ns[moved]]),
        np.concatenate([work.end_ns[here], copies.end_ns[moved]]),
    )
    following = np.searchsorted(busy.start_ns, ends_ns, side="right")
    has_next = following < len(busy.start_ns)
    reach = np.where(following > 0, busy.end_ns[np.maximum(following - 1, 0)], 0)
    begins = np.maximum(ends_ns, reach)
    next_start = busy.start_ns[np.minimum(following, len(busy.start_ns) - 1)]
    gaps = np.where(has_next, np.maximum(next_start - begins, 0), 0)
    order = np.lexsort((ends_ns, following))
    is_first = np.ones(len(ends_ns), dtype=np.bool_)
    is_first[order[1:]] = np.diff(following[order]) != 0
    return np.where(is_first, gaps, 0)
