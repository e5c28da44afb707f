"""What waiting costs a GPU: for data, and after calls in which the host waits for the GPU.

The program waits for data in ranges named ``data`` (profkit opens them around every batch of a DataLoader), and in
those with ``DataLoader`` or ``data loading`` in their names (torch itself opens ``enumerate(DataLoader)#…``). Only
threads that launch work count: workers load while the GPU computes. Whatever the host does within such a range, an idle
GPU waits for data then: a short wait between two CUDA calls too, which otherwise counts as launching.

*Input copies* go from the host to the GPU, and were launched where the program gets its batch: after the phase before
and before the next one (forward, loss, backward, optimizer), where there is also a wait for data. They cost what they
run alone; what something else hides costs nothing.

After a call that waits for the GPU nothing is queued, so the GPU is idle until the next launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, intersect, subtract, unite
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.gpu_time import (
    GpuTime,
    Windows,
    sum_within,
    synchronising_calls,
    threads_by_device,
)
from profkit.analysis.time_account.steps import measured_ranges
from profkit.analysis.tree.range_tree import kind_paths
from profkit.names import DATA, STEP, phase_of
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, empty_ints

_LOADS = re.compile(rf"^{DATA}$|^.*data[ _]?load(er|ing)", re.IGNORECASE)


@dataclass(frozen=True)
class DataWait:
    """What waiting for data took of some time on GPUs, in nanoseconds.

    The first three are parts of the idle time of the same names in `GpuParts`, ``input_copy_ns`` of its exposed copies.
    """

    launching_ns: int = 0
    synchronising_ns: int = 0
    outside_cuda_ns: int = 0
    input_copy_ns: int = 0

    @property
    def idle_ns(self) -> int:
        """Return the time in which the GPU was idle because the program waited for data."""
        return self.launching_ns + self.synchronising_ns + self.outside_cuda_ns


@dataclass(frozen=True, eq=False)
class DataWaits:
    """When each GPU waited for data; empty for a trace that has no range around such waits."""

    by_part: tuple[dict[int, Stretches], ...]
    """Device → when, for each part of a `DataWait`."""

    def parts_within(self, device: int, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return the parts of a `DataWait` in each window on a GPU: ``(windows, parts)``."""
        return np.stack([part.get(device, NOTHING).within(start_ns, end_ns) for part in self.by_part], axis=1)

    def sum_by_group(self, group: Ints, windows: Windows) -> dict[int, DataWait]:
        """Return what waiting for data took of each group of windows; those of one group may overlap."""
        edges = (group, windows.device, windows.start_ns, windows.end_ns)
        sums = [sum_within(part, *edges) for part in self.by_part]
        return {key: DataWait(*(part.get(key, 0) for part in sums)) for key in {key for part in sums for key in part}}


def is_data_wait(trace: Trace) -> Bools:
    """Return which ranges are waits for data, by name and thread."""
    ranges = trace.ranges
    loads = np.array([_LOADS.match(text) is not None for text in trace.names] or [False], dtype=np.bool_)[ranges.name]
    if not loads.any():
        return loads
    found: Bools = loads & np.isin(ranges.thread, distinct_values(trace.work.launch_thread))
    return found


def sum_host_waits(attribution: Attribution, members: Ints) -> Ints:
    """Return how long each step waited for data, on the thread that it runs on."""
    ranges = attribution.trace.ranges
    waits, waited_ns = is_data_wait(attribution.trace), np.zeros(len(members), dtype=np.int64)
    for thread in distinct_values(ranges.thread[waits]).tolist():
        mine, here = waits & (ranges.thread == thread), ranges.thread[members] == thread
        waited = unite(ranges.start_ns[mine], ranges.end_ns[mine])
        waited_ns[here] = waited.within(ranges.start_ns[members[here]], ranges.end_ns[members[here]])
    return waited_ns


def find_data_waits(trace: Trace, times: dict[int, GpuTime]) -> DataWaits:
    """Return when each GPU waited for data."""
    waits = is_data_wait(trace)
    if not waits.any():
        return DataWaits(({}, {}, {}, {}))
    ranges, threads = trace.ranges, threads_by_device(trace)
    parts: tuple[dict[int, Stretches], ...] = ({}, {}, {}, {})
    is_input = _input_copies(trace, waits)
    for device, time in times.items():
        mine = waits & np.isin(ranges.thread, list(threads.get(device, ())))
        idle = subtract(unite(ranges.start_ns[mine], ranges.end_ns[mine]), time.busy) if mine.any() else NOTHING
        copied = is_input & (trace.copies.device == device)
        inputs = unite(trace.copies.start_ns[copied], trace.copies.end_ns[copied]) if copied.any() else NOTHING
        of_device = (
            intersect(idle, time.launching),
            intersect(idle, time.synchronising),
            time.outside_cuda(idle),
            intersect(inputs, time.exposed_copies),
        )
        for part, found in zip(parts, of_device, strict=True):
            part[device] = found
    return DataWaits(parts)


def _input_copies(trace: Trace, waits: Bools) -> Bools:
    ranges, copies = trace.ranges, trace.copies
    is_phase = np.array([phase_of(text) is not None for text in trace.names], dtype=np.bool_)[ranges.name]
    is_input = np.zeros(len(copies), dtype=np.bool_)
    for thread in distinct_values(ranges.thread[waits]).tolist():
        phases = is_phase & (ranges.thread == thread)
        begins, ends = np.sort(ranges.start_ns[phases]), np.sort(ranges.end_ns[phases])
        rows = np.flatnonzero(copies.from_host & (copies.launch_thread == thread))
        waited_in, _ = _between(ranges.start_ns[waits & (ranges.thread == thread)], begins, ends)
        launched_in, is_between = _between(copies.launch_ns[rows], begins, ends)
        is_input[rows] = is_between & np.isin(launched_in, waited_in)
    return is_input


def _between(time_ns: Ints, begins: Ints, ends: Ints) -> tuple[Ints, Bools]:
    """Return for each time how many phases had begun or ended by then, and whether it lies in none of them."""
    begun, ended = (np.searchsorted(edges, time_ns, side="right") for edges in (begins, ends))
    return begun + ended, begun == ended


_LOOKED_AT = 100
"""The line in the program is looked up for at most this many of the longest gaps."""


@dataclass(frozen=True)
class SyncGaps:
    """The waiting calls within measured steps, over all of them.

    ``gap_ns`` is how long GPUs then ran nothing, from the end of such a call to the next work on the device; a gap
    after two calls counts once. ``call`` and ``path`` are the name and the innermost range of the call before the
    longest gaps, None if there was no gap. ``by_device`` divides ``gap_ns`` among the GPUs.
    """

    count: int
    gap_ns: int
    by_device: dict[int, int]
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
    gaps, by_device = np.zeros(len(rows), dtype=np.int64), dict[int, int]()
    for process in distinct_values(calls.process[rows]).tolist():
        mine = np.flatnonzero(calls.process[rows] == process)
        for device in distinct_values(trace.work.device[trace.work.process == process]).tolist():
            of_device = _gaps_after(attribution, device, calls.end_ns[rows[mine]])
            gaps[mine] += of_device
            by_device[device] = by_device.get(device, 0) + int(of_device.sum())
    if not gaps.any():
        return SyncGaps(len(rows), 0, by_device, None, None)
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
    return SyncGaps(len(rows), int(gaps.sum()), by_device, call, path or None)


def _gaps_after(attribution: Attribution, device: int, ends_ns: Ints) -> Ints:
    """Return how long a GPU ran nothing from each moment to its next work; of moments in one gap the first counts."""
    work, copies = attribution.trace.work, attribution.trace.copies
    here, moved = work.device == device, copies.device == device
    busy = unite(
        np.concatenate([work.start_ns[here], copies.start_ns[moved]]),
        np.concatenate([work.end_ns[here], copies.end_ns[moved]]),
    )
    if not len(busy.start_ns):  # rows that took no time
        return np.zeros(len(ends_ns), dtype=np.int64)
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
