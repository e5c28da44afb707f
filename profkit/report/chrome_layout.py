"""Where the rows of an export stand: numbers for processes and threads, lanes for slices, idle causes, and memory.

Time and memory are recorded in two processes, on two clocks. So memory gets a process of its own in the export and
begins where the time tracks have ended: nothing of it can be read as happening next to a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from profkit.analysis.intervals import Stretches, intersect
from profkit.analysis.memory.bins import bin_history
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.memory.recorded import Phase
from profkit.analysis.ranks.members import Ranks
from profkit.analysis.time_account.gpu_time import build_gpu_times
from profkit.trace.columns import NO_LAUNCH, Copies, Ints, Trace, Work, distinct_values, empty_ints, rows_by_value

LAUNCHING, SYNCHRONISING, OUTSIDE = (
    "Python prepared kernels",
    "Python waited for the GPU",
    "Python ran without CUDA calls",
)

_THREAD_MASK = 0xFFFFFF
_LARGEST_ID = 2**30
"""Perfetto's processes and threads have ids of 32 bits, with a sign; no system gives larger ones than this."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Processes and threads of a trace by numbers that no two share; ``shift_ns`` moves its first moment to 0 or later.

    ``pids`` and ``labels`` are by process, ``tids`` and ``owners`` (its process) by thread.
    """

    pids: Mapping[int, int]
    labels: Mapping[int, str]
    tids: Mapping[int, int]
    owners: Mapping[int, int]
    shift_ns: int
    end_ns: int
    """When the last thing that was recorded ended, shifted."""


def lay_out(trace: Trace, ranks: Ranks) -> Layout:
    """Return the layout of a trace.

    A main thread's id is its pid. The other threads keep their ids where the trace has them, which is under nsys alone.
    """
    owners: dict[int, int] = {}
    tables = (
        (trace.ranges.process, trace.ranges.thread),
        (trace.ranges.process, trace.ranges.end_thread),
        (trace.calls.process, trace.calls.thread),
        (trace.work.process, trace.work.launch_thread),
        (trace.copies.process, trace.copies.launch_thread),
    )
    for process, thread in tables:
        known, first = np.unique(thread, return_index=True)
        for number, row in zip(known.tolist(), first.tolist(), strict=True):
            if number != NO_LAUNCH:
                owners.setdefault(number, int(process[row]))
    processes = {*owners.values(), *distinct_values(trace.work.process).tolist()}
    processes |= set(distinct_values(trace.copies.process).tolist())
    pids = _numbered({process: trace.process_ids.get(process, 1) for process in sorted(processes)}, set())
    main = {thread: pids[owners[thread]] for thread in owners if thread in trace.main_threads}
    others = [thread for thread in sorted(owners) if thread not in main]
    keeps_ids = trace.source == "nsys"
    wanted = {thread: thread & _THREAD_MASK if keeps_ids else number for number, thread in enumerate(others, 1)}
    rank_of = {process: number for number, process in ranks.members}
    moments = [
        column
        for table in (trace.work, trace.copies, trace.calls, trace.ranges)
        for column in (table.start_ns, table.end_ns)
        if len(column)
    ]
    shift_ns = max(0, -min((int(column.min()) for column in moments), default=0))
    return Layout(
        pids=pids,
        labels={process: f"rank {rank_of[process]}" if process in rank_of else "process" for process in pids},
        tids=main | _numbered(wanted, {*main.values(), *pids.values()}),
        owners=owners,
        shift_ns=shift_ns,
        end_ns=max((int(column.max()) for column in moments), default=0) + shift_ns,
    )


def _numbered(wanted: Mapping[int, int], taken: set[int]) -> dict[int, int]:
    """Return the wanted numbers, those that are taken already replaced by free ones above all others."""
    used, numbers = set(taken), dict[int, int]()
    free = max((number for number in (*wanted.values(), *taken) if number <= _LARGEST_ID), default=0) + 1
    for key, number in wanted.items():
        numbers[key] = number if 0 < number <= _LARGEST_ID and number not in used else free
        free += numbers[key] == free
        used.add(numbers[key])
    return numbers


def launching_calls(trace: Trace, rows: Work | Copies) -> Ints:
    """Return the row in ``trace.calls`` that launched each row, or -1."""
    calls, launching = trace.calls, np.full(len(rows), -1, dtype=np.int64)
    calls_of = rows_by_value(calls.thread)
    for thread, mine in rows_by_value(rows.launch_thread).items():
        # Calls are sorted by start. Of two that begin together, the first recorded is the outer one, whose time it is.
        theirs = calls_of.get(thread, empty_ints())
        at = np.searchsorted(calls.start_ns[theirs], rows.launch_ns[mine], side="left")
        inside = at < len(theirs)
        inside[inside] = calls.start_ns[theirs[at[inside]]] == rows.launch_ns[mine[inside]]
        launching[mine[inside]] = theirs[at[inside]]
    return launching


def assign_lanes(start_ns: Ints, end_ns: Ints) -> list[int]:
    """Return a lane for each row: the lowest whose last row has ended, so that no two rows of a lane run at once."""
    lanes = [0] * len(start_ns)
    running: list[tuple[int, int]] = []
    free: list[int] = []
    order = np.lexsort((end_ns, start_ns))
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        while running and running[0][0] <= start:
            heappush(free, heappop(running)[1])
        lanes[row] = heappop(free) if free else len(running)
        heappush(running, (end, lanes[row]))
    return lanes


def find_crossing(start_ns: Ints, end_ns: Ints) -> list[int]:
    """Return the rows that begin within another one and end after it: all others lie in one another, or apart."""
    crossing = []
    around: list[int] = []
    order = np.lexsort((-end_ns, start_ns))
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        while around and around[-1] <= start:
            around.pop()
        if around and end > around[-1]:
            crossing.append(row)
        else:
            around.append(end)
    return crossing


@dataclass(frozen=True, eq=False)
class IdleTime:
    """When a GPU was idle between its first and its last work, and what the host did then."""

    device: int
    process: int
    """The process that used the GPU most."""
    causes: tuple[tuple[str, Stretches], ...]


def find_idle_time(trace: Trace) -> list[IdleTime]:
    """Return each GPU's idle time in disjoint stretches, which sum to all of it between its first and last work."""
    if trace.measure != "gpu-kernel":
        return []
    idle = []
    for device, time in build_gpu_times(trace).items():
        whole = Stretches(time.starts_ns[:1], time.reach_ns[-1:])
        causes = (
            (LAUNCHING, intersect(time.launching, whole)),
            (SYNCHRONISING, intersect(time.synchronising, whole)),
            (OUTSIDE, time.outside_cuda(whole)),
        )
        users = np.concatenate([table.process[table.device == device] for table in (trace.work, trace.copies)])
        names, counts = np.unique(users, return_counts=True)
        idle.append(IdleTime(device, int(names[counts.argmax()]), causes))
    return idle


@dataclass(frozen=True, eq=False)
class Counter:
    """Bytes over time; ``time_ns`` counts from the first event of all exported memory."""

    name: str
    time_ns: Ints
    bytes: Ints


@dataclass(frozen=True, eq=False)
class MemoryTracks:
    """One process's memory: its counters, and its own steps and phases, by which to read them."""

    label: str
    counters: tuple[Counter, ...]
    steps: tuple[Phase, ...]
    phases: tuple[Phase, ...]
    first_us: int
    """What the times of ``steps`` and ``phases`` count from."""
    peaks: Mapping[int, int]
    """GPU → the peak of its allocated memory, in bytes."""


def find_memory(snapshots: Mapping[int | None, OpenedSnapshot]) -> list[MemoryTracks]:
    """Return the memory tracks of each rank's snapshot; None stands for a program without ranks.

    The ranks of one machine share a clock, so their tracks begin at the first event of all.
    """
    devices = [memory.device for snapshot in snapshots.values() for memory in snapshot.devices.values()]
    first_us = min((device.zero_us for device in devices if len(device.events)), default=0)
    tracks = []
    for rank, snapshot in snapshots.items():
        counters: list[Counter] = []
        spans = snapshot.device().timeline
        for index, memory in snapshot.devices.items():
            bins = bin_history(memory)
            zero_us = memory.device.zero_us - first_us if bins.has_times else 0
            times = (bins.times_us + zero_us) * 1000
            named = [("allocated", bins.allocated), *((category.name, category.bytes) for category in bins.by_category)]
            counters += [Counter(f"GPU {index} {name}", times, values) for name, values in named]
            counters.append(_reserved(f"GPU {index} reserved", bins.moments, times, memory.history.curves.reserved))
        label = "memory" if rank is None else f"rank {rank} memory"
        peaks = {index: memory.history.allocated_peak_bytes for index, memory in snapshot.devices.items()}
        tracks.append(MemoryTracks(label, tuple(counters), spans.steps, spans.phases, first_us, peaks))
    return tracks


def _reserved(name: str, moments: Ints, times_ns: Ints, curve: Ints) -> Counter:
    """Return the reserved memory: at each moment the highest since the one before, so that no peak is lost."""
    edges = np.concatenate([[0], moments[:-1] + 1]) if len(moments) else empty_ints()
    return Counter(name, times_ns, np.maximum.reduceat(curve, edges) if len(edges) else edges)
