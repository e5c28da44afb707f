"""What a GPU was doing at any time, in parts that sum up, and which part of that time belongs to a range.

::

    span = computing            a kernel or a graph runs that is not communication
         + exposed communication  only communication kernels run, perhaps with copies
         + exposed copies         only memory copies and fills run
         + idle                 nothing runs: the host launches, synchronises or is outside CUDA

While a GPU is idle, the threads that launch its work decide what the host was doing: *synchronising* during a call that
waits for the GPU, and from the end of a copy to that of its call, since calls that copy pageable memory wait for it;
*launching* during any other CUDA call, and between two that lie at most `LONGEST_PAUSE_NS` apart; at all other times
*outside CUDA*. Of several threads launching goes first, then synchronising.

The *window* of a range on a GPU begins when the range opens, or when the GPU has ended earlier work, but never after
the range's own first kernel or copy. It ends when the range closes or its last kernel ends, whichever is later; a GPU
that is done before the others of the range stays idle until they are, or until it begins other work. So the windows of
ranges that follow one another on a stream do not overlap.

The program *waits for data* in ranges named ``data``, or with ``DataLoader`` or ``data loading`` in their names, on
threads that launch work: an idle GPU waits for data then. *Input copies* go from the host to the GPU between two phases
that also have a wait for data between them; they cost what they run alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from profkit.analysis.intervals import (
    NOTHING,
    Stretches,
    disjoint_pieces,
    fill_gaps,
    intersect,
    subtract,
    unite,
    unite_all,
)
from profkit.analysis.kernels import categorize
from profkit.analysis.placing.attribution import NEVER, Attribution
from profkit.names import DATA, phase_of
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, empty_ints, rows_by_value

LONGEST_PAUSE_NS = 500_000
"""An eager operator takes 5 to 300 µs in Python and the framework under a profiler; the captures tried have almost no
pause between this and 5 ms."""

_SYNCHRONISES = re.compile(
    r"^(cuda|cu)((Device|Stream|Event|Ctx|Thread)Synchronize(_ptsz)?(_v\d{1,5}){0,2}|Memcpy(?!\w*Async)\w*)$"
)

_LOADS = re.compile(rf"^{DATA}$|^.*data[ _]?load(er|ing)", re.IGNORECASE)


@dataclass(frozen=True)
class GpuParts:
    """The time of one or more GPUs in its parts, in nanoseconds; two GPUs count twice.

    ``span_ns`` is the sum of the parts from ``computing_ns`` to ``outside_cuda_ns``; the overlapped communication lies
    within ``computing_ns``.
    """

    span_ns: int
    computing_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    launching_ns: int
    synchronising_ns: int
    outside_cuda_ns: int
    overlapped_communication_ns: int

    @property
    def busy_ns(self) -> int:
        return self.computing_ns + self.exposed_communication_ns + self.exposed_copy_ns

    @property
    def idle_ns(self) -> int:
        return self.launching_ns + self.synchronising_ns + self.outside_cuda_ns

    @property
    def idle_share(self) -> float:
        return self.idle_ns / self.span_ns if self.span_ns else 0.0

    def to_dict(self) -> dict[str, int]:
        """Return the parts, and their sums ``busy_ns`` and ``idle_ns``."""
        return {**asdict(self), "busy_ns": self.busy_ns, "idle_ns": self.idle_ns}


@dataclass(frozen=True, eq=False)
class GpuTime:
    """One GPU's time as disjoint sets.

    ``busy`` is the time in which anything runs. In the time outside ``busy``, ``launching`` and ``synchronising`` the
    GPU is idle and the host is outside CUDA. ``starts_ns`` are the sorted starts of its kernels and copies;
    ``reach_ns`` is when each of them and all earlier ones had ended.
    """

    busy: Stretches
    computing: Stretches
    exposed_communication: Stretches
    exposed_copies: Stretches = NOTHING
    launching: Stretches = NOTHING
    synchronising: Stretches = NOTHING
    overlapped_communication: Stretches = NOTHING
    starts_ns: Ints = field(default_factory=empty_ints)
    reach_ns: Ints = field(default_factory=empty_ints)

    def parts_within(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return the parts of each window, in the order of `GpuParts`: ``(windows, parts)``."""
        sets = (self.computing, self.exposed_communication, self.exposed_copies, self.launching, self.synchronising)
        known = [stretches.within(start_ns, end_ns) for stretches in sets]
        span = end_ns - start_ns
        overlapped = self.overlapped_communication.within(start_ns, end_ns)
        return np.stack([span, *known, span - np.sum(known, axis=0), overlapped], axis=1)

    def outside_cuda(self, when: Stretches) -> Stretches:
        """Return when, of the given time, the GPU is idle and the host is outside CUDA."""
        return subtract(when, unite_all([self.busy, self.launching, self.synchronising]))

    def last_end_before(self, time_ns: Ints) -> Ints:
        """Return when all work that began before each time had ended; -2⁶² if there was none."""
        before = np.searchsorted(self.starts_ns, time_ns, side="left")
        return np.concatenate([[-(1 << 62)], self.reach_ns])[before]

    def next_start_from(self, time_ns: Ints) -> Ints:
        """Return when work begins next, at each time or after it; 2⁶² if none does."""
        return np.append(self.starts_ns, NEVER)[np.searchsorted(self.starts_ns, time_ns, side="left")]


@dataclass(frozen=True, eq=False)
class HostTime:
    """When the host was launching and when it was synchronising; at all other times it was outside CUDA."""

    launching: Stretches
    synchronising: Stretches


_NO_HOST = HostTime(NOTHING, NOTHING)


def build_gpu_times(trace: Trace) -> dict[int, GpuTime]:
    hosts = build_host_times(trace)
    talks = communication_rows(trace)
    devices = distinct_values(np.concatenate([trace.work.device, trace.copies.device])).tolist()
    return {device: _build_one(trace, device, talks, hosts.get(device, _NO_HOST)) for device in devices}


def communication_rows(trace: Trace) -> Bools:
    return category_rows(trace, frozenset({"communication"}))


def category_rows(trace: Trace, categories: Container[str]) -> Bools:
    is_one = np.zeros(len(trace.names), dtype=np.bool_)
    names = distinct_values(trace.work.name).tolist()
    is_one[[i for i in names if categorize(trace.names[i], trace.measure).name in categories]] = True
    return is_one[trace.work.name]


@dataclass(frozen=True, eq=False)
class Windows:
    """One row per range and GPU that it launched work on; ``member`` is the range's place in what was asked."""

    member: Ints
    device: Ints
    start_ns: Ints
    end_ns: Ints

    def take(self, order: Ints) -> Windows:
        return Windows(self.member[order], self.device[order], self.start_ns[order], self.end_ns[order])


def find_windows(attribution: Attribution, members: Ints, times: dict[int, GpuTime]) -> Windows:
    trace = attribution.trace
    ranges = trace.ranges
    tables = ((trace.work, attribution.work), (trace.copies, attribution.copies))
    extents: dict[int, tuple[Ints, Ints, Ints]] = {}
    last_of_all = np.full(len(members), -NEVER, dtype=np.int64)
    for device in times:
        first = np.full(len(members), NEVER, dtype=np.int64)
        last = np.full(len(members), -NEVER, dtype=np.int64)
        for rows, placed in tables:
            here = rows.device == device
            begun, ended = placed.extent(
                members, np.where(here, rows.start_ns, NEVER), np.where(here, rows.end_ns, -NEVER)
            )
            first, last = np.minimum(first, begun), np.maximum(last, ended)
        worked = np.flatnonzero(first < NEVER)
        extents[device] = worked, first[worked], last[worked]
        np.maximum(last_of_all, last, out=last_of_all)
    columns = []
    for device, time in times.items():
        worked, first, last = extents[device]
        opened, closed = ranges.start_ns[members[worked]], ranges.end_ns[members[worked]]
        start = np.minimum(first, np.maximum(opened, time.last_end_before(first)))
        end = np.maximum(closed, last)
        end = np.maximum(end, np.minimum(last_of_all[worked], time.next_start_from(end)))
        columns.append((worked, np.full(len(worked), device, dtype=np.int64), start, end))
    if not columns:
        return Windows(*(np.empty(0, dtype=np.int64) for _ in range(4)))
    return Windows(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def sum_parts(
    times: dict[int, GpuTime], group: Ints, device: Ints, start_ns: Ints, end_ns: Ints
) -> dict[int, GpuParts]:
    """Return the parts of each group of windows; windows of one group that overlap on a device count once."""
    measures = {number: time.parts_within for number, time in times.items()}
    totals = _sum_windows(measures, group, Windows(group, device, start_ns, end_ns))
    return {key: GpuParts(*total.tolist()) for key, total in totals.items()}


def _sum_windows(
    measures: Mapping[int, Callable[[Ints, Ints], Ints]], group: Ints, windows: Windows
) -> dict[int, Ints]:
    """Return the sums of each group; ``measures`` return, of each device, columns for windows that do not overlap."""
    totals: dict[int, Ints] = {}
    for number, measure in measures.items():
        mine = windows.device == number
        groups, starts, ends = disjoint_pieces(group[mine], windows.start_ns[mine], windows.end_ns[mine])
        if len(groups):
            first = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
            sums = np.add.reduceat(measure(starts, ends), first, axis=0)
            for key, total in zip(groups[first].tolist(), sums, strict=True):
                totals[key] = totals[key] + total if key in totals else total
    return totals


def _build_one(trace: Trace, device: int, talks: Bools, host: HostTime) -> GpuTime:
    work, copies = trace.work, trace.copies
    here = work.device == device
    computing, communicating = (unite(work.start_ns[rows], work.end_ns[rows]) for rows in (here & ~talks, here & talks))
    moved = copies.device == device
    copying = unite(copies.start_ns[moved], copies.end_ns[moved])
    kernels = unite_all([computing, communicating])
    busy = unite_all([kernels, copying])
    starts = np.concatenate([work.start_ns[here], copies.start_ns[moved]])
    order = np.argsort(starts, kind="stable")
    return GpuTime(
        busy=busy,
        computing=computing,
        exposed_communication=subtract(communicating, computing),
        exposed_copies=subtract(copying, kernels),
        launching=subtract(host.launching, busy),
        synchronising=subtract(host.synchronising, busy),
        overlapped_communication=intersect(communicating, computing),
        starts_ns=starts[order],
        reach_ns=np.maximum.accumulate(np.concatenate([work.end_ns[here], copies.end_ns[moved]])[order]),
    )


def build_host_times(trace: Trace) -> dict[int, HostTime]:
    calls = trace.calls
    threads = threads_by_device(trace)
    wanted = {thread for members in threads.values() for thread in members}
    waits = calls_named(trace, _SYNCHRONISES)
    rows_of = rows_by_value(calls.thread)
    by_thread = {
        thread: _one_thread(calls.start_ns[rows], calls.end_ns[rows], waits[rows], _find_wakings(trace, thread, rows))
        for thread, rows in rows_of.items()
        if thread in wanted
    }
    by_device = {}
    for device, members in threads.items():
        parts = [by_thread[thread] for thread in members if thread in by_thread]
        launching = unite_all([part.launching for part in parts])
        synchronising = unite_all([part.synchronising for part in parts])
        by_device[device] = HostTime(launching, subtract(synchronising, launching))
    return by_device


def calls_named(trace: Trace, pattern: re.Pattern[str]) -> Bools:
    matching = np.zeros(len(trace.names), dtype=np.bool_)
    matching[[i for i in distinct_values(trace.calls.name).tolist() if pattern.match(trace.names[i])]] = True
    return matching[trace.calls.name]


def _find_wakings(trace: Trace, thread: int, rows: Ints) -> Stretches:
    calls, mine = trace.calls, trace.copies.launch_thread == thread
    launched_ns, ended_ns = trace.copies.launch_ns[mine], trace.copies.end_ns[mine]
    at = np.searchsorted(calls.start_ns[rows], launched_ns).clip(max=len(rows) - 1)
    returned_ns = calls.end_ns[rows][at]
    waits = (calls.start_ns[rows][at] == launched_ns) & (launched_ns < ended_ns) & (ended_ns < returned_ns)
    return unite(ended_ns[waits], returned_ns[waits]) if waits.any() else NOTHING


def _one_thread(start_ns: Ints, end_ns: Ints, waits: Bools, wakings: Stretches) -> HostTime:
    synchronising = unite_all([unite(start_ns[waits], end_ns[waits]) if waits.any() else NOTHING, wakings])
    calls = unite(start_ns, end_ns)
    return HostTime(subtract(fill_gaps(calls, LONGEST_PAUSE_NS), synchronising), synchronising)


def threads_by_device(trace: Trace) -> dict[int, set[int]]:
    by_device: dict[int, set[int]] = {}
    for table in (trace.work, trace.copies):
        for thread, rows in rows_by_value(table.launch_thread).items():
            for device in distinct_values(table.device[rows]).tolist():
                by_device.setdefault(device, set()).add(thread)
    return by_device


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
        totals = _sum_windows({at: partial(self.parts_within, at) for at in self.by_part[0]}, group, windows)
        return {key: DataWait(*total.tolist()) for key, total in totals.items()}


def is_data_wait(trace: Trace) -> Bools:
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
    begun, ended = (np.searchsorted(edges, time_ns, side="right") for edges in (begins, ends))
    return begun + ended, begun == ended
