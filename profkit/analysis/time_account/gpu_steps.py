"""What the GPUs did in each step: busy, idle and why, overlapped and exposed communication, waiting for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from profkit.analysis.efficiency.waiting import Waiting
from profkit.analysis.intervals import Stretches, intersect, subtract, unite
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.ranks.members import Ranks
from profkit.analysis.time_account.gpu_time import (
    GpuParts,
    GpuTime,
    Windows,
    category_rows,
    communication_rows,
    find_windows,
    sum_parts,
)
from profkit.analysis.time_account.steps import measured_ranges
from profkit.analysis.time_account.waits import DataWait, find_data_waits, is_data_wait
from profkit.names import STEP
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, empty_ints


@dataclass(frozen=True)
class GpuStep:
    """One step on one GPU, in nanoseconds.

    ``process`` is the operating system's pid, ``rank`` its rank if the run has ranks; ``start_ns`` and ``wall_ns`` are
    Python time. ``gpu`` is the step's window on the GPU in its parts (`profkit.analysis.time_account.gpu_time`).
    ``communication_ns`` is the union of communication kernels, exposed and overlapped. ``waiting_ns`` is the part
    before the last rank arrived (`profkit.analysis.efficiency.waiting`); ``untold_ns`` is the part for which this is
    unknown. ``waiting_ns`` is None if it is unknown for the whole, as in a trace of one rank. ``data`` is the part of
    ``gpu`` that is waiting for data; ``data_wait_ns`` is the Python time of these waits, whatever the GPU did.

    ``matmul_ns`` and ``attention_ns`` split ``gpu.computing_ns``: the time in which a matrix product ran, and of the
    rest that in which an attention kernel did. ``exposed_waiting_ns`` is the part of ``gpu.exposed_communication_ns``
    that is known to be waiting; most of it was for ``waiting_for``, a rank.
    """

    name: str
    rank: int | None
    process: int
    device: int
    start_ns: int
    wall_ns: int
    gpu: GpuParts
    communication_ns: int
    waiting_ns: int | None
    untold_ns: int
    data: DataWait
    data_wait_ns: int
    matmul_ns: int = 0
    attention_ns: int = 0
    exposed_waiting_ns: int = 0
    waiting_for: int | None = None

    @property
    def idle_share(self) -> float:
        """Return the share of the step's time on the GPU in which nothing ran."""
        return self.gpu.idle_share


@dataclass(frozen=True)
class IdleCauses:
    """Why GPUs were idle, in nanoseconds; the four sum up to `GpuParts.idle_ns`.

    ``data_ns``: the program waited for a batch. Else the host prepared kernels, waited for the GPU, or ran without
    calling CUDA.
    """

    data_ns: int
    launching_ns: int
    synchronising_ns: int
    outside_cuda_ns: int


def divide_idle_time(parts: GpuParts, data: DataWait) -> IdleCauses:
    """Return why the GPUs were idle; ``data`` are the waits for data in the same time."""
    return IdleCauses(
        data.idle_ns,
        parts.launching_ns - data.launching_ns,
        parts.synchronising_ns - data.synchronising_ns,
        parts.outside_cuda_ns - data.outside_cuda_ns,
    )


def sum_steps(steps: Sequence[GpuStep]) -> tuple[GpuParts, DataWait]:
    """Return the time of all steps on all GPUs in its parts, and their waits for data."""
    return (
        GpuParts(*(sum(getattr(step.gpu, one.name) for step in steps) for one in fields(GpuParts))),
        DataWait(*(sum(getattr(step.data, one.name) for step in steps) for one in fields(DataWait))),
    )


def summarize_steps(
    attribution: Attribution, ranks: Ranks, times: dict[int, GpuTime], waiting: Waiting
) -> tuple[GpuStep, ...]:
    """Return the steps outside ``warmup`` that launched work, one row per step and GPU, in order of their start.

    A step is a range named ``step`` or ``step N``. The result is empty for a trace without steps or without GPU work.
    """
    trace = attribution.trace
    members = measured_ranges(attribution).get(STEP, empty_ints())
    if trace.measure != "gpu-kernel" or not len(members):
        return ()
    windows = find_windows(attribution, members, times)
    group = np.arange(len(windows.member))
    parts = sum_parts(times, group, windows.device, windows.start_ns, windows.end_ns)
    measured = _measure_communication(attribution, windows, waiting)
    data = find_data_waits(trace, times).sum_by_group(group, windows)
    waited_ns = _sum_host_waits(attribution, members)
    products, attention = _split_computing(trace, windows)
    exposed = _sum_exposed_waits(times, windows, waiting)
    ranges = trace.ranges
    numbers = {process: number for number, process in ranks.members}
    rows = [
        GpuStep(
            name=trace.names[int(ranges.name[index])],
            rank=numbers.get(int(ranges.process[index])),
            process=trace.process_ids.get(int(ranges.process[index]), int(ranges.process[index])),
            device=int(windows.device[row]),
            start_ns=int(ranges.start_ns[index]),
            wall_ns=int(ranges.end_ns[index] - ranges.start_ns[index]),
            gpu=parts[row],
            communication_ns=measured[row][0],
            waiting_ns=measured[row][1],
            untold_ns=measured[row][2],
            data=data.get(row, DataWait()),
            data_wait_ns=waited_ns[int(windows.member[row])],
            matmul_ns=int(products[row]),
            attention_ns=int(attention[row]),
            exposed_waiting_ns=exposed[row][0],
            waiting_for=exposed[row][1],
        )
        for row, index in enumerate(members[windows.member].tolist())
    ]
    return tuple(sorted(rows, key=lambda row: (row.start_ns, row.device)))


def _sum_host_waits(attribution: Attribution, members: Ints) -> list[int]:
    """Return how long each step waited for data, on the thread that it runs on."""
    ranges = attribution.trace.ranges
    waits, found = is_data_wait(attribution.trace), np.zeros(len(members), dtype=np.int64)
    for thread in distinct_values(ranges.thread[waits]).tolist():
        mine, here = waits & (ranges.thread == thread), ranges.thread[members] == thread
        waited = unite(ranges.start_ns[mine], ranges.end_ns[mine])
        found[here] = waited.within(ranges.start_ns[members[here]], ranges.end_ns[members[here]])
    sums: list[int] = found.tolist()
    return sums


def _split_computing(trace: Trace, windows: Windows) -> tuple[Ints, Ints]:
    """Return for each window how long matrix products ran, and how long attention did while none of them ran."""
    work, (products, attention) = trace.work, np.zeros((2, len(windows.member)), dtype=np.int64)
    is_product, is_attention = (category_rows(trace, frozenset({one})) for one in ("gemm", "attention"))
    for device in distinct_values(windows.device).tolist():
        mine, here = windows.device == device, work.device == device
        window = windows.start_ns[mine], windows.end_ns[mine]
        matmuls, attends = (
            unite(work.start_ns[rows], work.end_ns[rows]) for rows in (here & is_product, here & is_attention)
        )
        products[mine], attention[mine] = matmuls.within(*window), subtract(attends, matmuls).within(*window)
    return products, attention


def _sum_exposed_waits(times: dict[int, GpuTime], windows: Windows, waiting: Waiting) -> list[tuple[int, int | None]]:
    """Return for each window how long only waiting for other ranks ran, and for which rank most of it was."""
    found: list[tuple[int, int | None]] = []
    for device, start, end in zip(windows.device.tolist(), windows.start_ns, windows.end_ns, strict=True):
        alone, window = times[device].exposed_communication, (np.array([start]), np.array([end]))
        total = int(intersect(waiting.on(device), alone).within(*window)[0])
        sums = {
            waiting.rank_of.get(last): int(intersect(when, alone).within(*window)[0])
            for last, when in waiting.by_last.get(device, {}).items()
        }
        found.append((total, max(sums, key=lambda rank: sums[rank]) if total else None))
    return found


def _measure_communication(
    attribution: Attribution, windows: Windows, waits: Waiting
) -> list[tuple[int, int | None, int]]:
    """Return for each window its communication, the waiting in it, and the part for which waiting is unknown, in ns."""
    trace = attribution.trace
    talks = communication_rows(trace)
    found: list[tuple[int, int | None, int]] = [(0, 0, 0)] * len(windows.member)
    for device in set(windows.device.tolist()):
        mine = np.flatnonzero(windows.device == device)
        here = talks & (trace.work.device == device)
        sets = (_kernels(attribution, here), waits.on(device), _kernels(attribution, here & ~waits.is_known))
        columns = [one.within(windows.start_ns[mine], windows.end_ns[mine]).tolist() for one in sets]
        for row, talking, waiting, unknown in zip(mine.tolist(), *columns, strict=True):
            known = talking > unknown or not talking
            found[row] = (talking, waiting if known else None, unknown)
    return found


def _kernels(attribution: Attribution, rows: Bools) -> Stretches:
    work = attribution.trace.work
    return unite(work.start_ns[rows], work.end_ns[rows])
