"""The raw rows behind a verdict: the longest gaps in which nothing ran, and the kernels that took the most time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from profkit.analysis.efficiency.summary import EfficiencyRow, chosen_ranges
from profkit.analysis.intervals import subtract, unite
from profkit.analysis.kernels.categories import categorize
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.gpu_time import GpuTime, build_gpu_times, find_windows
from profkit.analysis.tree.range_tree import RangeNodes, build_nodes, work_by_node
from profkit.trace.columns import Ints, Measure, Trace, Work, rows_by_value


@dataclass(frozen=True)
class IdleGap:
    """A gap in which a GPU ran nothing, in the capture's own nanoseconds.

    Three parts say what the host did meanwhile. ``call`` is the CUDA call that was in progress for most of the gap, for
    ``call_ns``. ``ended_by`` is the kernel, copy or fill that ended the gap; its launch call began at ``launch_ns``.
    Each is None if there was none.
    """

    device: int
    start_ns: int
    end_ns: int
    launching_ns: int
    synchronising_ns: int
    outside_cuda_ns: int
    call: str | None
    call_ns: int
    ended_by: str | None
    launch_ns: int | None


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name under a range; the first of them began at ``first_ns``."""

    name: str
    count: int
    total_ns: int
    first_ns: int


@dataclass(frozen=True)
class Evidence:
    """The longest gaps of a range, its largest kernels, and its kernel time by category, the largest first."""

    gaps: tuple[IdleGap, ...]
    kernels: tuple[KernelTime, ...]
    categories: tuple[tuple[str, int], ...]


def find_evidence(
    attribution: Attribution, range: str | None = None, *, numbered: bool = False, most: int = 3
) -> dict[str, Evidence]:
    """Return the evidence for each row of `measure_efficiency`, by path, with at most ``most`` gaps and kernels.

    Raises:
        TraceError, UsageError: as `measure_efficiency` does.
    """
    trace = attribution.trace
    members = chosen_ranges(attribution, range)
    nodes = build_nodes(attribution, numbered=numbered)
    times = build_gpu_times(trace)
    windows = find_windows(attribution, members, times)
    node = nodes.of_range[members[windows.member]]
    kernels = dict(_kernels(attribution, nodes, members))
    present = set(nodes.of_range[members].tolist())
    evidence = {}
    for at in (path for path in nodes.depth_first() if path.node in present):
        gaps: list[IdleGap] = []
        for device, time in times.items():
            mine = (node == at.node) & (windows.device == device)
            gaps += _longest_gaps(trace, device, time, (windows.start_ns[mine], windows.end_ns[mine]), most)
        gaps.sort(key=lambda gap: gap.start_ns - gap.end_ns)
        largest = kernels.get(at.node, ())
        evidence[at.path] = Evidence(tuple(gaps[:most]), largest[:most], _sum_categories(largest, trace.measure))
    return evidence


def _sum_categories(kernels: Sequence[KernelTime], measure: Measure) -> tuple[tuple[str, int], ...]:
    total_ns: dict[str, int] = {}
    for kernel in kernels:
        name = categorize(kernel.name, measure).name
        total_ns[name] = total_ns.get(name, 0) + kernel.total_ns
    return tuple(sorted(total_ns.items(), key=lambda item: (-item[1], item[0])))


def _longest_gaps(trace: Trace, device: int, time: GpuTime, windows: tuple[Ints, Ints], most: int) -> Iterator[IdleGap]:
    idle = subtract(unite(*windows), time.busy)
    longest = np.argsort(idle.start_ns - idle.end_ns, kind="stable")[:most]
    start, end = idle.start_ns[longest], idle.end_ns[longest]
    launching, synchronising = (when.within(start, end).tolist() for when in (time.launching, time.synchronising))
    for began, ended, launch, wait in zip(start.tolist(), end.tolist(), launching, synchronising, strict=True):
        ended_by, launch_ns = _what_began(trace, device, ended)
        call, call_ns = _longest_call(trace, began, ended)
        yield IdleGap(
            device=device,
            start_ns=began,
            end_ns=ended,
            launching_ns=launch,
            synchronising_ns=wait,
            outside_cuda_ns=ended - began - launch - wait,
            call=call,
            call_ns=call_ns,
            ended_by=ended_by,
            launch_ns=launch_ns,
        )


def _what_began(trace: Trace, device: int, time_ns: int) -> tuple[str | None, int | None]:
    """Return what began on a GPU at this very time, and when it was launched; None at the end of a range's window."""
    for table in (trace.work, trace.copies):
        for row in np.flatnonzero((table.start_ns == time_ns) & (table.device == device)).tolist():
            if isinstance(table, Work):
                name = trace.names[int(table.name[row])]
            else:
                name = "a memory fill" if table.is_memset[row] else "a memory copy"
            return name, int(table.launch_ns[row]) if table.launch_thread[row] >= 0 else None
    return None, None


def _longest_call(trace: Trace, start_ns: int, end_ns: int) -> tuple[str | None, int]:
    """Return the CUDA call, of any thread, that was in progress longest between two times, and for how long."""
    calls = trace.calls
    inside = np.minimum(calls.end_ns, end_ns) - np.maximum(calls.start_ns, start_ns)
    if not len(inside) or inside.max() <= 0:
        return None, 0
    longest = int(inside.argmax())
    return trace.names[int(calls.name[longest])], int(inside[longest])


def _kernels(
    attribution: Attribution, nodes: RangeNodes, members: Ints
) -> Iterator[tuple[int, tuple[KernelTime, ...]]]:
    work, names = attribution.trace.work, attribution.trace.names
    for rows, node in work_by_node(attribution, nodes, members):
        for at, which in rows_by_value(node).items():
            mine = rows[which]
            times = []
            for name, same in rows_by_value(work.name[mine]).items():
                total_ns, first_ns = work.duration_ns[mine[same]].sum(), work.start_ns[mine[same]].min()
                times.append(KernelTime(names[name], len(same), int(total_ns), int(first_ns)))
            yield at, tuple(sorted(times, key=lambda kernel: (-kernel.total_ns, kernel.name)))


_LIMITED_BY_HOST = ("launch-bound", "host-bound")

MUCH = 0.2
"""The share of a range's time on the GPU from which a wait is worth naming."""


@dataclass(frozen=True)
class HostWait:
    """The idle share of a range for one cause: the host launches, or does anything else, which may be to load data."""

    path: str
    cause: Literal["launch-bound", "host-bound"]
    share: float
    time_ns: float
    loads_data: bool = False


def find_host_waits(rows: Sequence[EfficiencyRow]) -> list[HostWait]:
    """Return the waits of at least `MUCH`, the longest first; ``rows`` are in the table's order, depth first.

    A range within one that is named for the same cause is not named again.
    """
    waits: list[HostWait] = []
    for wait in _long_waits(rows):
        if not any(wait.cause == above.cause and wait.path.startswith(f"{above.path}/") for above in waits):
            waits.append(wait)
    return sorted(waits, key=lambda wait: -wait.time_ns)


def _long_waits(rows: Sequence[EfficiencyRow]) -> Iterator[HostWait]:
    for row in rows:
        if row.gpu is None or row.verdict in _LIMITED_BY_HOST:
            continue
        span_ns = row.gpu.span_ns_at(row.best_idle_factor)
        if row.launching_share is not None and row.launching_share >= MUCH:
            yield HostWait(row.path, "launch-bound", row.launching_share, row.launching_share * span_ns)
        if row.host_share is not None and row.host_share >= MUCH:
            yield HostWait(row.path, "host-bound", row.host_share, row.host_share * span_ns, row.loads_data)
