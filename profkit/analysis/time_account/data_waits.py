"""What waiting for data costs a GPU: idle time while the program waits for a batch, and the copy of the batch.

The program waits for data in ranges named ``data`` (profkit opens them around every batch of a DataLoader), and in
those with ``DataLoader`` or ``data loading`` in their names (torch itself opens ``enumerate(DataLoader)#…``). Only
threads that launch work count: workers load while the GPU computes. Whatever the host does within such a range, an idle
GPU waits for data then: a short wait between two CUDA calls too, which otherwise counts as launching.

*Input copies* go from the host to the GPU, and were launched where the program gets its batch: after the phase before
and before the next one (forward, loss, backward, optimizer), where there is also a wait for data. They cost what they
run alone; what something else hides costs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, intersect, subtract, unite
from profkit.analysis.time_account.gpu_time import GpuParts, GpuTime, Windows, sum_within, threads_by_device
from profkit.names import DATA, PHASES
from profkit.trace.columns import Bools, Ints, Trace, distinct_values

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

    def divide_idle(self, parts: GpuParts, factor: float, hidden_ns: float | None) -> tuple[float, float, float]:
        """Return the idle time of ``parts`` without a profiler: launching, other waits for the host, waiting for data.

        Args:
            parts: the time that this is a part of.
            factor: the share of all idle time that is left without a profiler.
            hidden_ns: how much longer the program waits for data without a profiler, which slows everything else and so
                hides such waits; None if that is unknown: then all three keep the same share.
        """
        launching_ns = parts.launching_ns - self.launching_ns
        other_ns = parts.idle_ns - launching_ns - self.idle_ns
        if hidden_ns is None:
            return launching_ns * factor, other_ns * factor, self.idle_ns * factor
        left_ns = parts.idle_ns * factor
        waiting_ns = min(left_ns, self.idle_ns + hidden_ns)
        share = (left_ns - waiting_ns) / (launching_ns + other_ns) if launching_ns + other_ns else 0.0
        return launching_ns * share, other_ns * share, waiting_ns


@dataclass(frozen=True, eq=False)
class DataWaits:
    """When each GPU waited for data; empty for a trace that has no range around such waits."""

    by_part: tuple[dict[int, Stretches], ...]
    """Device → when, for each part of a `DataWait`."""

    def sum_by_group(self, group: Ints, windows: Windows) -> dict[int, DataWait]:
        """Return what waiting for data took of each group of windows; those of one group may overlap."""
        edges = (group, windows.device, windows.start_ns, windows.end_ns)
        sums = [sum_within(part, *edges) for part in self.by_part]
        return {key: DataWait(*(one.get(key, 0) for one in sums)) for key in {key for one in sums for key in one}}


def is_data_wait(trace: Trace) -> Bools:
    """Return which ranges are waits for data, by name and thread."""
    ranges = trace.ranges
    loads = np.array([_LOADS.match(text) is not None for text in trace.names] or [False], dtype=np.bool_)[ranges.name]
    if not loads.any():
        return loads
    found: Bools = loads & np.isin(ranges.thread, distinct_values(trace.work.launch_thread))
    return found


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
    """Return which copies bring a batch to a GPU."""
    ranges, copies = trace.ranges, trace.copies
    is_phase = np.array([text.lower() in PHASES for text in trace.names], dtype=np.bool_)[ranges.name]
    found = np.zeros(len(copies), dtype=np.bool_)
    for thread in distinct_values(ranges.thread[waits]).tolist():
        phases = is_phase & (ranges.thread == thread)
        begins, ends = np.sort(ranges.start_ns[phases]), np.sort(ranges.end_ns[phases])
        rows = np.flatnonzero(copies.from_host & (copies.launch_thread == thread))
        waited_in, _ = _between(ranges.start_ns[waits & (ranges.thread == thread)], begins, ends)
        launched_in, is_between = _between(copies.launch_ns[rows], begins, ends)
        found[rows] = is_between & np.isin(launched_in, waited_in)
    return found


def _between(time_ns: Ints, begins: Ints, ends: Ints) -> tuple[Ints, Bools]:
    """Return for each time how many phases had begun or ended by then, and whether it lies in none of them."""
    begun, ended = (np.searchsorted(edges, time_ns, side="right") for edges in (begins, ends))
    return begun + ended, begun == ended
