"""What waiting for data costs a GPU.

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
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.gpu_time import (
    GpuTime,
    Windows,
    sum_within,
    threads_by_device,
)
from profkit.names import DATA, phase_of
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
    of_launchers: Bools = loads & np.isin(ranges.thread, distinct_values(trace.work.launch_thread))
    return of_launchers


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
        for part, when in zip(parts, of_device, strict=True):
            part[device] = when
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
